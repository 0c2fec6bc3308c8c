"""The independent re-check of a certificate.

Epsilon is recomputed from the raw numbers with dp-accounting's privacy loss distributions, which share no code with the
closed form that calibrated the noise; and the raw numbers must follow from what the certificate says of unit,
adjacency, trust, clip and noise. Nothing is signed: agreement shows that the numbers hold together, not who wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sordino.core import Adjacency, Kind, Query, SordinoError, Trust, Unit
from sordino.privacy import gaussian
from sordino.privacy.certificate import FORMAT

TOLERANCE = 0.005  # relative, in epsilon, between the two accountants


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
    return Verdict(problems, claimed, recomputed, bool(cert["certified"]), _taken_as_given(cert))


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
    for query in cert["queries"]:
        gather = math.sqrt(_senders(cert, query)) if sums_only else 1.0
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
            weights = (low * gather, high * gather) if sums_only else (1.0, 1.0)
            if not (_near(seen, own * weights[1]) and _near(seen, most * weights[0])):
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
            _senders(cert, first)
            * sum(int(g["count"]) * s[k] ** 2 for g, s in zip(groups, spans, strict=True))
            / int(cert["clients"])
        )
        / float(first["clip"])
        for k in (0, 1)
    )
    if not low * (1 - 1e-6) <= float(cert["noise"]) <= high * (1 + 1e-6):
        problems.append(f"noise {cert['noise']:.6g} is claimed, the groups have {high:.6g}")


def _senders(cert: Mapping[str, Any], query: Mapping[str, Any]) -> float:
    """Clients whose noise a round adds up: a common stream has all of them."""
    common = query.get("carried", query["stream"]) and cert["trust"] != Trust.UNTRUSTED_SERVER
    return float(cert["clients"] if common else cert["cohort"])


def _taken_as_given(cert: Mapping[str, Any]) -> list[str]:
    """Sensitivities that do not follow from a clip."""
    why = {q["query"]: "a schedule" if q["stream"] else q["bound"].removeprefix("by ") for q in cert["queries"]}
    return [
        f"the sensitivity of query {name}, which follows from {source}"
        for name, source in why.items()
        if source != "clip"
    ]


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


def _limitless(value: Any) -> float:
    """The number behind a null."""
    return math.inf if value is None else float(value)
