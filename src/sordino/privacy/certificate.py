"""The statement a run ends with, and its independent re-check.

A certificate holds raw numbers (sensitivities, standard deviations, counts) beside the epsilon they imply. `verify`
recomputes epsilon from the raw numbers with dp-accounting's privacy loss distributions, which share no code with the
closed form that calibrated the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sordino.core import Adjacency, SordinoError, Trust, Unit
from sordino.privacy import gaussian
from sordino.privacy.noise import Seeded, Source
from sordino.privacy.plan import EVERYONE, Plan

FORMAT = 1
TOLERANCE = 0.005  # relative, in epsilon, between the two accountants
DELTAS = (1e-4, 1e-5, 1e-6, 1e-8)

NUMERICS = (
    "The accounting is exact for Gaussian noise in real arithmetic; noise is sampled in float64 by inverse cdf.",
    "Sums and releases are floating-point numbers: their lowest bits are not those of an exact Gaussian.",
)


def certificate(
    plan: Plan,
    source: Source,
    *,
    version: str,
    done: int | None = None,
    spec_sha256: str = "",
    ledger_head: str = "",
    ledger_rows: int = 0,
    tuning: str = "not paid for: hyperparameters are taken as given",
) -> dict[str, Any]:
    """Everything a reader needs to recompute the promise, after `done` rounds (default: all)."""
    groups = plan.groups(done)
    worst = max(groups, key=lambda group: group.mu)
    noise, client_noise = plan.summed_noise()
    delta = plan.privacy.delta
    reasons = _reasons(plan, source)
    return {
        "format": FORMAT,
        "sordino": version,
        "certified": not reasons,
        "reasons": reasons,
        "epsilon": gaussian.epsilon(worst.mu, delta),
        "delta": delta,
        "mu": worst.mu,
        "epsilon_asked": plan.privacy.epsilon,
        "epsilon_at": {f"{d:g}": gaussian.epsilon(worst.mu, d) for d in DELTAS},
        "unit": str(plan.privacy.unit),
        "adjacency": str(plan.privacy.adjacency),
        "trust": str(plan.privacy.trust),
        "method": plan.method.name,
        "rounds": plan.rounds if done is None else done,
        "clients": plan.clients,
        "records": sum(plan.sizes),
        "sampler": {"clients": str(plan.participation), "records": "all", "amplification": "none claimed"},
        "divisor": str(plan.divisor),
        "clip": plan.levels[0].query.clip,
        "noise": noise,
        "client_noise": client_noise,
        "noise_source": "seeded" if isinstance(source, Seeded) else type(source).__name__.lower(),
        "queries": [
            {
                "query": level.name,
                "clip": level.query.clip,
                "calls": level.query.calls,
                "semidefinite": level.query.psd,
                "bound": "by clip" if level.query.bound is None else f"by lemma: {level.query.bound.name}",
            }
            for level in plan.levels
        ],
        "worst_client": worst.clients[0],
        "groups": [
            {
                "clients": ranges(group.clients),
                "count": len(group.clients),
                "records": list(group.records),
                "mu": group.mu,
                "epsilon": gaussian.epsilon(group.mu, delta),
                "releases": [release._asdict() for release in group.releases],
            }
            for group in groups
        ],
        "assumes": _assumes(plan, tuning),
        "numerics": list(NUMERICS),
        "spec_sha256": spec_sha256,
        "ledger": {"head": ledger_head, "rows": ledger_rows},
    }


def _reasons(plan: Plan, source: Source) -> list[str]:
    """Why it is not certified; empty if it is."""
    if plan.privacy.epsilon == math.inf and plan.noise is None:
        return ["not private: no noise was added"]
    reasons = []
    if not source.private:
        reasons.append("seeded: not private. Whoever knows the seed can subtract the noise")
    if not plan.proved:
        where = f"{plan.privacy.unit} level under {plan.privacy.trust}"
        reasons.append(f"not proved: {plan.method.name} at {where}. {plan.method.caveat}".strip())
    return reasons


def _assumes(plan: Plan, tuning: str) -> list[str]:
    facts = [
        "The number of clients is public.",
        "Records used for testing lie outside the guarantee.",
        f"Hyperparameter tuning: {tuning}.",
    ]
    if plan.privacy.unit is Unit.RECORD:
        facts.append("The number of records of each client is public and fixed.")
    if plan.privacy.trust is not Trust.TRUSTED_SERVER:
        facts.append("Who takes part in a round is public.")
    if plan.privacy.trust is Trust.SECURE_AGGREGATION:
        facts.append("Every participant adds its share of the noise, and none tells its share to the observer.")
    if plan.privacy.trust is Trust.TRUSTED_SERVER:
        facts.append("The server, and the links to it, see every message and are trusted with them.")
    if plan.participation.kind != EVERYONE:
        facts.append(
            "Participants were drawn before the run, without looking at data; each client pays for its rounds."
        )
    return facts


def ranges(numbers: Sequence[int]) -> str:
    """'0-4, 7' for 0, 1, 2, 3, 4, 7."""
    parts: list[list[int]] = []
    for i in sorted(numbers):
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


# ------------------------------------------------------------------------------------------------------- in plain words

_WHO = {
    (Unit.RECORD, Adjacency.ADD_REMOVE): "any single record: whether it was among a client's data at all",
    (
        Unit.RECORD,
        Adjacency.REPLACE_ONE,
    ): "any single record: what it said, whichever other record might have stood there",
    (Unit.USER, Adjacency.ADD_REMOVE): "any whole client: whether its data were used at all",
    (Unit.USER, Adjacency.REPLACE_ONE): "any whole client: what its data were, whichever other data it might have held",
}
_WHOM = {
    Trust.UNTRUSTED_SERVER: "anyone who reads every message that every client sent, the server included",
    Trust.SECURE_AGGREGATION: "anyone who sees who took part, the sums of their messages and all models, but no single message",
    Trust.TRUSTED_SERVER: "anyone who sees the models that were sent out; not against the server itself, which is trusted",
}


def statement(cert: Mapping[str, Any]) -> str:
    """One page for an ethics board: who is protected, against whom, how well, and what is not protected."""
    unit, adjacency, trust = Unit(cert["unit"]), Adjacency(cert["adjacency"]), Trust(cert["trust"])
    epsilon, delta = cert["epsilon"], cert["delta"]
    if cert["certified"]:
        head = f"**Certified: ε = {epsilon:.4g} at δ = {delta:g}.**"
    else:
        head = "**Not certified.** " + " ".join(f"{reason.rstrip('.')}." for reason in cert["reasons"])
    size = {Unit.RECORD: "record", Unit.USER: "client"}[unit]
    lines = [
        "# Privacy statement",
        "",
        head,
        "",
        f"A model was trained with {cert['method']} over {cert['clients']} clients and {cert['records']:,} records in "
        f"{cert['rounds']} rounds.",
        "",
        "## Who is protected, and against whom",
        "",
        f"The guarantee speaks of {_WHO[unit, adjacency]}. It holds against {_WHOM[trust]}, whatever else they know and "
        "however much they compute.",
        "",
        "## How well",
        "",
    ]
    if math.isfinite(epsilon):
        right = 1 / (1 + math.exp(-epsilon))
        lines += [
            f"Whatever is concluded from the outcome would have been concluded almost as readily had that {size} been "
            f"different: no probability changes by more than a factor of e^ε = {_factor(epsilon)}, but for a slack of "
            f"δ = {delta:g}. Someone who guesses between two possibilities that seemed equally likely is right with "
            f"probability at most {min(1.0, right + delta):.1%} instead of 50 %.",
            "",
            f"| at δ | {' | '.join(cert['epsilon_at'])} |",
            f"|---|{'---|' * len(cert['epsilon_at'])}",
            f"| ε | {' | '.join(f'{value:.4g}' for value in cert['epsilon_at'].values())} |",
            "",
            f"This is the client worst off (client {cert['worst_client']}). All clients:",
            "",
            "| clients | records | ε |",
            "|---|---|---|",
            *(f"| {_short(g['clients'])} | {_span(g['records'])} | {g['epsilon']:.4g} |" for g in cert["groups"][:20]),
        ]
        if len(cert["groups"]) > 20:
            lines.append(f"| {len(cert['groups']) - 20} more groups: see certificate.json | | |")
    else:
        lines.append("There is no bound: nothing about the data is hidden.")
    lines += [
        "",
        "## How it was done",
        "",
        *(
            f"- Each contribution to the {q['query'].split()[-1]} was bounded {q['bound']}"
            + (f" to length {q['clip']:g}" if q["bound"] == "by clip" else "")
            + "."
            for q in cert["queries"]
        ),
        f"- Gaussian noise: the noise of one client has {cert['client_noise']:.4g} times, of all together "
        f"{cert['noise']:.4g} times that length as its standard deviation.",
        f"- Participants: {cert['sampler']['clients']}; privacy amplification by sampling: {cert['sampler']['amplification']}.",
        f"- Noise source: {_source(cert['noise_source'])}.",
        "",
        "## What is not protected",
        "",
        "- What is true of the population: the model may reveal that a trait goes with an outcome, for people in the data "
        "and people outside it alike.",
        *(
            [
                "- A person with several records is protected less than the figure says; k records cost about k times as much."
            ]
            if unit is Unit.RECORD
            else []
        ),
        "- The same data used in other runs: every run adds to the total.",
        "",
        "## Assumptions",
        "",
        *(f"- {fact}" for fact in cert["assumes"]),
        *(f"- {fact}" for fact in cert["numerics"]),
        "",
        f"Spec sha256 `{cert['spec_sha256'] or 'none'}`; ledger head `{cert['ledger']['head'] or 'none'}` "
        f"({cert['ledger']['rows']} rows); sordino {cert['sordino']}. Re-check: `sordino verify certificate.json`.",
        "",
    ]
    return "\n".join(lines)


def _factor(epsilon: float) -> str:
    return f"{math.exp(epsilon):.3g}" if epsilon < 20 else f"about 10^{epsilon / math.log(10):.0f}"


def _short(clients: str) -> str:
    return clients if len(clients) <= 60 else clients[:57] + "…"


def _span(records: Sequence[int]) -> str:
    return f"{records[0]:,}" if records[0] == records[1] else f"{records[0]:,} to {records[1]:,}"


def _source(name: str) -> str:
    return {
        "secure": "cryptographic (ChaCha20), fresh key from the operating system",
        "seeded": "seeded: not private",
        "silent": "none",
    }.get(name, name)


# ------------------------------------------------------------------------------------------------------- the re-check


class Verdict(NamedTuple):
    problems: list[str]
    claimed: float
    recomputed: float


def verify(cert: Mapping[str, Any]) -> Verdict:
    """Recompute every epsilon from the raw numbers with dp-accounting; list what does not hold."""
    problems: list[str] = []
    try:
        if cert["format"] != FORMAT:
            raise SordinoError(f"certificate: format {cert['format']} is not the format {FORMAT} known here.")
        delta, claimed = float(cert["delta"]), float(cert["epsilon"])
        recomputed = 0.0
        for group in cert["groups"]:
            own = _pld_epsilon(group["releases"], delta)
            recomputed = max(recomputed, own)
            _compare(f"clients {_short(group['clients'])}", float(group["epsilon"]), own, problems)
        _compare("the worst client", claimed, recomputed, problems)
        worst = max(cert["groups"], key=lambda group: float(group["mu"]))
        for at, value in cert["epsilon_at"].items():
            _compare(f"epsilon at delta {at}", float(value), _pld_epsilon(worst["releases"], float(at)), problems)
        _check_bounds(cert, problems)
        _check_claims(cert, claimed, problems)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SordinoError):
            raise
        raise SordinoError(f"certificate: a field is missing or malformed ({error!r}).") from None
    return Verdict(problems, claimed, recomputed)


def _compare(what: str, claimed: float, found: float, problems: list[str]) -> None:
    if claimed == found:  # both infinite, or both zero
        return
    if not abs(claimed - found) <= TOLERANCE * max(abs(found), 1e-6):
        problems.append(f"{what}: {claimed:.6g} is claimed, the raw numbers give {found:.6g}")


def _pld_epsilon(releases: Sequence[Mapping[str, Any]], delta: float) -> float:
    """By composing privacy loss distributions. The grid is finer for small epsilon, where relative error counts."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    steps = [(float(r["std"]), float(r["sensitivity"]), int(r["times"])) for r in releases]
    if any(not (std >= 0 and moved >= 0 and times >= 0) for std, moved, times in steps):
        raise SordinoError("certificate: releases hold a negative or undefined number.")
    if any(std == 0 and moved > 0 and times for std, moved, times in steps):
        return math.inf
    rough = sum(times * (moved / std) ** 2 for std, moved, times in steps if moved)
    if not rough:
        return 0.0
    # A release adds mu^2/2 + mu sqrt(2 log 1/delta) to epsilon at most: enough to choose a grid.
    guess = rough / 2 + math.sqrt(2 * rough * math.log(1 / delta))
    accountant = PLDAccountant(
        NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=min(1e-2, max(1e-6, guess * 1e-4))
    )
    for std, moved, times in steps:
        if moved and times:
            accountant.compose(GaussianDpEvent(std / moved), times)
    return float(accountant.get_epsilon(delta))


def _check_bounds(cert: Mapping[str, Any], problems: list[str]) -> None:
    """The sensitivities follow from clip and adjacency, and the counts from the rounds."""
    twice = Adjacency(cert["adjacency"]) is Adjacency.REPLACE_ONE
    for query in cert["queries"]:
        mine = [r for g in cert["groups"] for r in g["releases"] if r["query"] == query["query"]]
        if not mine:
            problems.append(f"{query['query']}: no client released it")
            continue
        if query["bound"] == "by clip":
            factor = (math.sqrt(2) if query["semidefinite"] else 2.0) if twice else 1.0
            largest = max(float(r["sensitivity"]) for r in mine)
            if largest < factor * float(query["clip"]) * (1 - 1e-9):
                problems.append(
                    f"{query['query']}: sensitivity {largest:.6g} is less than {factor:.4g} times the clip {query['clip']:g}"
                )
        if max(int(r["times"]) for r in mine) > int(cert["rounds"]) * int(query["calls"]):
            problems.append(f"{query['query']}: released more often than {cert['rounds']} rounds allow")
    if sum(int(g["count"]) for g in cert["groups"]) != int(cert["clients"]):
        problems.append("the groups do not add up to the number of clients")


def _check_claims(cert: Mapping[str, Any], claimed: float, problems: list[str]) -> None:
    if cert["certified"] and (cert["reasons"] or cert["noise_source"] != "secure" or not math.isfinite(claimed)):
        problems.append(
            "it says certified, yet its noise is not secret, its epsilon is infinite, or it names reasons why not"
        )
    if not cert["certified"] and not cert["reasons"]:
        problems.append("it says not certified and gives no reason")
