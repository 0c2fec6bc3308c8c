"""The numbers a run ends with, and their independent re-check. `statement` puts them into words.

A certificate holds raw numbers (sensitivities, standard deviations, counts) beside the epsilon they imply. `verify`
recomputes epsilon from the raw numbers with dp-accounting's privacy loss distributions, which share no code with the
closed form that calibrated the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sordino.core import Adjacency, Correlated, Divisor, Kind, Query, SordinoError, Trust, Unit
from sordino.privacy import gaussian
from sordino.privacy.noise import Seeded, Source
from sordino.privacy.participation import EVERYONE
from sordino.privacy.plan import Plan

FORMAT = 1
TOLERANCE = 0.005  # relative, in epsilon, between the two accountants
DELTAS = (1e-4, 1e-5, 1e-6, 1e-8)

NUMERICS = (
    "The accounting is exact for Gaussian noise in real arithmetic; noise is sampled in float64 by inverse cdf, added "
    "in float64, and what leaves is rounded to a public grid of its standard deviation / 2^14. That hides the lowest "
    "bits of the sum but for a chance of about 2^-38 a number, which is not part of δ.",
    "Sums of clipped gradients are floating-point sums: in float32 one record of 100,000 may move them by some 1e-4 of "
    "the clip more than claimed; dtype = float64 removes that.",
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
    tested: int | None = None,
    names: Sequence[str] = (),
    execution: str = "simulated on one machine",
    assumes: Sequence[str] = (),
    tuning: str = "if settings were tried out on these data first, that is not paid for here",
) -> dict[str, Any]:
    """Everything a reader needs to recompute the promise, after `done` rounds (default: all).

    `tested`: how many records the model was tested on. `names`: of the clients, where they have any.
    """
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
        "execution": execution,
        "rounds": plan.rounds if done is None else done,
        "clients": plan.clients,
        "client_names": list(names),
        "cohort": plan.participation.rate(plan.clients) * plan.clients,
        "records": sum(plan.sizes) if sizes_public else None,
        "test_records": tested,
        "sampler": {"clients": str(plan.participation), "records": "all", "amplification": "none claimed"},
        "divisor": str(plan.divisor if sizes_public else Divisor.CLIENT_MEAN),
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
                "stream": isinstance(level.query.noise, Correlated),
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
                "own_std": {level.name: _common(plan.own_std(level), group.clients) for level in plan.levels},
                "influence": {
                    level.name: _common(level.weight / level.weight.max(), group.clients) for level in plan.levels
                },
                "releases": [release._asdict() for release in group.releases],
            }
            for group in groups
        ],
        "assumes": [*_assumes(plan, tuning), *assumes],
        "numerics": list(NUMERICS),
        "spec_sha256": spec_sha256,
        "ledger": {"head": ledger_head, "rows": ledger_rows},
    }


def _common(values: np.ndarray, clients: Sequence[int]) -> float | list[float]:
    """What equal clients share; the range, where they do not share it."""
    mine = values[list(clients)]
    low, high = float(mine.min()), float(mine.max())
    return low if low == high else [low, high]


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
    if not math.isfinite(plan.mu()):
        reasons.append("not private: the noise is too small for any bound")
    if not source.private:
        reasons.append("seeded: not private. Whoever knows the seed can subtract the noise")
    if not plan.proved:
        where = f"{plan.privacy.unit} level under {plan.privacy.trust}"
        reasons.append(f"not proved: {plan.method.name} at {where}. {plan.method.caveat}".strip())
    return reasons


def _assumes(plan: Plan, tuning: str) -> list[str]:
    facts = [
        "The number of clients, the features and the set of labels are public.",
        "Which record belongs to which client, and which are for testing, is taken as given and tells nothing.",
        "Records used for testing lie outside the guarantee, and so do figures computed from them.",
        f"Tuning: {tuning}.",
    ]
    if plan.privacy.unit is Unit.RECORD:
        facts.append("The number of records of each client is public and fixed.")
    if plan.privacy.trust is not Trust.TRUSTED_SERVER:
        facts.append("Who takes part in a round is public.")
    if plan.privacy.trust is Trust.SECURE_AGGREGATION:
        facts.append(
            "Messages are added up by a secure aggregation protocol, which this library does not yet carry out."
        )
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
    gaps: list[str]  # what it could not be compared with


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
    return Verdict(problems, claimed, recomputed, bool(cert["certified"]), [])


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
    """What was seen follows from unit, adjacency, trust, clip and each client's own noise."""
    unit, adjacency, trust = Unit(cert["unit"]), Adjacency(cert["adjacency"]), Trust(cert["trust"])
    sums_only = trust is not Trust.UNTRUSTED_SERVER
    gather = math.sqrt(float(cert["cohort"])) if sums_only else 1.0
    for query in cert["queries"]:
        name, kind, clip = query["query"], Kind(query["query"].split()[-1]), float(query["clip"])
        rows = [(g, r) for g in cert["groups"] for r in g["releases"] if r["query"] == name]
        if unit is Unit.USER and kind is not Kind.DELTA:
            problems.append(f"{name}: at user level a whole message must be noised, not an answer")
        if rows and max(int(r["times"]) for _, r in rows) > int(cert["rounds"]) * int(query["calls"]):
            problems.append(f"{name}: released more often than {cert['rounds']} rounds allow")
        for group, release in rows:
            low, high = _span(group["influence"][name])
            own, most = _span(group["own_std"][name])
            seen = float(release["std"])
            # In a sum, a client's noise and its data arrive with the same weight, and a cohort's noises add up.
            if (
                not (_near(seen, own * high * gather) and _near(seen, most * low * gather))
                if sums_only
                else (not (_near(seen, own) and _near(seen, most)))
            ):
                problems.append(
                    f"{name}: the noise seen under {trust} is not {seen:.6g}, from a client's own {own:.6g}"
                )
            if query["bound"] == "by clip" and not query["stream"]:
                bound = Query(kind, clip, psd=query["semidefinite"]).sensitivity(adjacency, unit)
                expected = bound * (high if sums_only else 1.0)
                if not _near(float(release["sensitivity"]), expected):
                    problems.append(
                        f"{name}: the sensitivity is {release['sensitivity']:.6g}, but clip {clip:g}, {unit} level and "
                        f"{adjacency} make it {expected:.6g}"
                    )
    _check_totals(cert, problems)


def _mu(releases: Sequence[Mapping[str, Any]]) -> float:
    moved = [(float(r["sensitivity"]), float(r["std"]), int(r["times"])) for r in releases]
    return gaussian.mu_of(moved)


def _check_totals(cert: Mapping[str, Any], problems: list[str]) -> None:
    groups, first = cert["groups"], cert["queries"][0]
    for group in groups:
        if not _near(_limitless(group["mu"]), _mu(group["releases"])):
            problems.append(f"clients {group['clients']}: mu {group['mu']} does not follow from the releases")
    if not _near(_limitless(cert["mu"]), max(_mu(group["releases"]) for group in groups)):
        problems.append(f"mu {cert['mu']} is not that of the client worst off")
    if not cert["assumes"] or not cert["numerics"]:
        problems.append("the assumptions are missing")
    if sum(int(g["count"]) for g in groups) != int(cert["clients"]):
        problems.append("the groups do not add up to the number of clients")
    sizes = [g["records"] for g in groups]
    if cert["records"] is not None:
        low, high = (sum(int(g["count"]) * size[k] for g, size in zip(groups, sizes, strict=True)) for k in (0, 1))
        if not low <= int(cert["records"]) <= high:
            problems.append(f"{cert['records']} records are claimed, the groups hold {low} to {high}")
    if float(cert["clip"]) != float(first["clip"]):
        problems.append(f"clip {cert['clip']:g} is claimed, the first query has {first['clip']:g}")
    spans = [_span(g["own_std"][first["query"]]) for g in groups]
    most = max(high for _, high in spans) / float(first["clip"])
    if not _near(float(cert["client_noise"]), most):
        problems.append(f"client noise {cert['client_noise']:.6g} is claimed, the groups have {most:.6g}")
    low, high = (
        math.sqrt(
            float(cert["cohort"])
            * sum(int(g["count"]) * s[k] ** 2 for g, s in zip(groups, spans, strict=True))
            / int(cert["clients"])
        )
        / float(first["clip"])
        for k in (0, 1)
    )
    if not low * (1 - 1e-6) <= float(cert["noise"]) <= high * (1 + 1e-6):
        problems.append(f"noise {cert['noise']:.6g} is claimed, the groups have {high:.6g}")


def _span(value: Any) -> tuple[float, float]:
    low, high = value if isinstance(value, list) else (value, value)
    return float(low), float(high)


def _near(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)


def _check_claims(cert: Mapping[str, Any], claimed: float, problems: list[str]) -> None:
    if cert["certified"] and (cert["reasons"] or cert["noise_source"] != "secure" or not math.isfinite(claimed)):
        problems.append(
            "it says certified, yet its noise is not secret, its epsilon is infinite, or it names reasons why not"
        )
    if not cert["certified"] and not cert["reasons"]:
        problems.append("it says not certified and gives no reason")
