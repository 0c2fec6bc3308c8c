"""The numbers a run ends with, and their independent re-check. `statement` puts them into words.

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
from sordino.privacy.participation import EVERYONE
from sordino.privacy.plan import Plan

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
    sizes_public = plan.privacy.unit is Unit.RECORD  # at user level, a client's size is part of what is hidden
    return {
        "format": FORMAT,
        "sordino": version,
        "certified": not reasons,
        "reasons": reasons,
        "epsilon": finite(gaussian.epsilon(worst.mu, delta)),
        "delta": delta,
        "mu": finite(worst.mu),
        "epsilon_asked": finite(plan.privacy.epsilon) if plan.noise is None else None,
        "epsilon_at": {f"{d:g}": finite(gaussian.epsilon(worst.mu, d)) for d in DELTAS},
        "unit": str(plan.privacy.unit),
        "adjacency": str(plan.privacy.adjacency),
        "trust": str(plan.privacy.trust),
        "method": plan.method.name,
        "rounds": plan.rounds if done is None else done,
        "clients": plan.clients,
        "records": sum(plan.sizes) if sizes_public else None,
        "sampler": {"clients": str(plan.participation), "records": "all", "amplification": "none claimed"},
        "divisor": str(plan.divisor),
        "clip": plan.levels[0].scale,
        "noise": noise,
        "client_noise": client_noise,
        "noise_source": "seeded" if isinstance(source, Seeded) else type(source).__name__.lower(),
        "queries": [
            {
                "query": level.name,
                "clip": level.scale,
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
                "records": list(group.records) if sizes_public else None,
                "mu": finite(group.mu),
                "epsilon": finite(gaussian.epsilon(group.mu, delta)),
                "releases": [release._asdict() for release in group.releases],
            }
            for group in groups
        ],
        "assumes": _assumes(plan, tuning),
        "numerics": list(NUMERICS),
        "spec_sha256": spec_sha256,
        "ledger": {"head": ledger_head, "rows": ledger_rows},
    }


def finite(value: float) -> float | None:
    """JSON has no infinity: null."""
    return value if math.isfinite(value) else None


def _limitless(value: Any) -> float:
    """The number behind a null."""
    return math.inf if value is None else float(value)


def _reasons(plan: Plan, source: Source) -> list[str]:
    """Why it is not certified; empty if it is."""
    if plan.silent:
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
        "The number of clients, the features and the set of labels are public.",
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


# ------------------------------------------------------------------------------------------------------- the re-check


class Verdict(NamedTuple):
    problems: list[str]
    claimed: float
    recomputed: float
    certified: bool


def verify(cert: Mapping[str, Any]) -> Verdict:
    """Recompute every epsilon from the raw numbers with dp-accounting; list what does not hold."""
    problems: list[str] = []
    try:
        if cert["format"] != FORMAT:
            raise SordinoError(f"certificate: format {cert['format']} is not the format {FORMAT} known here.")
        delta, claimed = float(cert["delta"]), _limitless(cert["epsilon"])
        recomputed = 0.0
        for group in cert["groups"]:
            own = _pld_epsilon(group["releases"], delta)
            recomputed = max(recomputed, own)
            _compare(f"clients {group['clients']}", _limitless(group["epsilon"]), own, problems)
        _compare("the worst client", claimed, recomputed, problems)
        worst = max(cert["groups"], key=lambda group: _limitless(group["mu"]))
        for at, value in cert["epsilon_at"].items():
            _compare(f"epsilon at delta {at}", _limitless(value), _pld_epsilon(worst["releases"], float(at)), problems)
        _check_bounds(cert, problems)
        _check_claims(cert, claimed, problems)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SordinoError):
            raise
        raise SordinoError(f"certificate: a field is missing or malformed ({error!r}).") from None
    return Verdict(problems, claimed, recomputed, bool(cert["certified"]))


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
                least = factor * float(query["clip"])
                problems.append(f"{query['query']}: sensitivity {largest:.6g}, but its clip makes it {least:.6g}")
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
