"""The independent re-check of a certificate.

Epsilon is recomputed from the raw numbers without the code that calibrated the noise (`second_account`). The raw
numbers must also follow from the unit, adjacency, trust, clip and noise that the certificate states. Agreement shows
that the numbers are consistent. Only the signature shows who wrote them and that they belong to an actual run, and only
to a reader who knows whose key it is.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from sordino.core import PERSON_CHOICES, SAMPLED, SEMIDEFINITE, Adjacency, Clipping, Divisor, Kind, Query, Trust, Unit
from sordino.errors import SordinoError
from sordino.evidence import signing, streams
from sordino.evidence.certificate import (
    ALL_TAKE_PART,
    CERTIFICATE_FORMAT,
    DELTAS,
    GUESSABLE,
    MOST_LISTED_CLIENTS,
    MOST_LISTED_ROUNDS,
    NO_AMPLIFICATION,
    OF_MINIBATCHES,
    PUBLIC,
    SECRET,
    TUNING,
    amplification,
    amplifies,
    assumptions_of,
    listed,
    numerics_of,
)
from sordino.evidence.form import misfits
from sordino.evidence.second_account import OF_INTEGERS, epsilons, right_guess
from sordino.evidence.signing import code_sha256
from sordino.privacy.accounting import events, gaussian
from sordino.privacy.accounting.samplers import Sampler
from sordino.privacy.mechanisms import discrete_gaussian, mask_graph
from sordino.privacy.mechanisms.quantization import LEAST_STEP_VARIANCE
from sordino.privacy.participation import FULL, Participation, Sampling
from sordino.privacy.plan import MOST_ROUNDS

GUESS_TOLERANCE = 1e-3  # relative, on the chance of a right guess: both grids of losses err upwards
BY_CLIP, BY_LEMMA = "by clip", "by lemma: "  # what a sensitivity follows from, as certificates say it
MOST_BELOW = 0.005  # relative: how far a claimed epsilon may lie below the other accountant's
NEGLIGIBLE = 1e-12  # with which an honest certificate of a drawn schedule is called too cheap
RUNS = re.compile(r"Tuning: paid for: (\d+) runs within the one budget")  # as `private_tuning` writes it
MOST_SEARCHED_ROUNDS = 100 * MOST_ROUNDS  # a search for settings counts the rounds of all its runs
MOST_MISFITS = 20  # that are told
NOT_SIGNED = "who wrote it: it is not signed"
MOST_ABOVE = 0.01  # relative: how far it may lie above; both are upper bounds
MOST_ABOVE_ALLOCATION = 0.1  # the same for allocation, whose account has wide cells where there is little noise


class Verdict(NamedTuple):
    """The result of `verify`."""

    problems: list[str]
    claimed: float
    recomputed: float
    certified: bool
    assumed: list[str]  # sensitivities that do not follow from a clip: taken from the certificate
    gaps: list[str]  # what could not be checked
    signed: str = ""  # who signed it; empty if nobody did
    known: bool = False  # the reader named this key


def verify(cert: Mapping[str, Any], key: str | None = None) -> Verdict:
    """Recompute every epsilon from the raw numbers with a second accountant, and check the signature.

    Args:
        cert: The contents of certificate.json.
        key: Who must have signed it: a public key, its fingerprint, or a file with either.

    Returns:
        A verdict: whether the certificate holds, and the problems found.

    Raises:
        SordinoError: The certificate has an unknown format, or a field that nothing can be computed from.

    Example:
        >>> import sordino as so
        >>> plan = so.Plan(so.build("dp-fedgd"), rounds=5, sizes=(100,) * 4, privacy=so.Privacy(epsilon=2.0))
        >>> verdict = verify(so.certificate(plan, so.source(None), version=so.__version__))
        >>> round(verdict.recomputed, 3)
        2.0
    """
    if not isinstance(cert, Mapping):
        raise SordinoError(
            f"certificate: a {type(cert).__name__} is not the contents of a certificate.json; write "
            "verify(json.loads(Path(FILE).read_text())), or in a shell: sordino verify FILE."
        )
    problems: list[str] = []
    gaps: list[str] = []
    try:
        if cert["format"] != CERTIFICATE_FORMAT:
            raise SordinoError(
                f"certificate: its format is {cert['format']}; this version reads format {CERTIFICATE_FORMAT}."
            )
        problems.extend(itertools.islice(misfits(cert), MOST_MISFITS))
        given, cert = cert, _with_bounds(cert)
        _check_extent(cert)
        delta, claimed = float(cert["delta"]), _limitless(cert["epsilon"])
        recomputed = 0.0
        adjacency = Adjacency(cert["adjacency"])
        deltas = (delta, *map(float, cert["epsilon_at"]))
        above = gaps if _allocates(cert) else None
        epsilons_of_groups = [epsilons(group["releases"], deltas, adjacency) for group in cert["groups"]]
        for group, (epsilon, *_) in zip(cert["groups"], epsilons_of_groups, strict=True):
            recomputed = max(recomputed, epsilon)
            _compare(f"clients {group['clients']}", _limitless(group["epsilon"]), epsilon, problems, above)
        _compare("the worst client", claimed, recomputed, problems, above)
        for k, (at, value) in enumerate(cert["epsilon_at"].items(), 1):
            worst = max(epsilons[k] for epsilons in epsilons_of_groups)
            _compare(f"epsilon at delta {at}", _limitless(value), worst, problems, above)
        _check_bounds(cert, problems)
        _check_integers(cert, problems)
        _check_claims(cert, claimed, problems)
        _check_ranges(cert, problems)
        _check_site(cert, problems)
        _check_words(cert, problems, gaps)
        by = _check_signature(given, key, problems)
        assumed = _assumed_sensitivities(cert)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, SordinoError) and not problems:
            raise
        raise malformed(ValueError(problems[0]) if problems else error) from None
    except MemoryError:
        raise SordinoError("certificate: to compute it again takes more memory than there is.") from None
    gaps += [] if by else [NOT_SIGNED]
    return Verdict(problems, claimed, recomputed, bool(cert["certified"]), assumed, gaps, by, bool(by and key))


def _with_bounds(cert: Mapping[str, Any]) -> Mapping[str, Any]:
    """The certificate with infinite bounds where it has null, as in a run without noise and without a clip."""
    queries = [{**query, "clip": _limitless(query["clip"])} for query in cert["queries"]]
    groups = [
        {**group, "releases": [{**r, "sensitivity": _limitless(r["sensitivity"])} for r in group["releases"]]}
        for group in cert["groups"]
    ]
    return {**cert, "clip": _limitless(cert["clip"]), "queries": queries, "groups": groups}


def _check_extent(cert: Mapping[str, Any]) -> None:
    """Refuse numbers of clients, rounds and releases that no run has: a short text could keep a reader busy for days.

    Raises:
        SordinoError: One of them is too large.
    """
    clients, rounds = int(cert["clients"]), int(cert["rounds"])
    streamed = [int(query["factor"]["rounds"]) for query in cert["queries"] if "factor" in query]
    listed_rounds = clients * rounds if any("rounds" in group for group in cert["groups"]) else 0
    times = [int(release["times"]) for group in cert["groups"] for release in group["releases"]]
    for what, number, most in (
        ("clients", clients, MOST_LISTED_CLIENTS),
        ("rounds", rounds, MOST_SEARCHED_ROUNDS),
        ("rounds of a stream", max(streamed, default=0), MOST_ROUNDS),
        ("clients times rounds", listed_rounds, MOST_LISTED_ROUNDS),
        ("releases of one kind", max(times, default=0), 10 * MOST_SEARCHED_ROUNDS),
    ):
        if number > most:
            raise SordinoError(f"certificate: it has {number:,} {what}; at most {most:,} are read.")


def malformed(error: Exception) -> SordinoError:
    """The error for a document that lacks what a certificate has."""
    remedy = "name a certificate.json that sordino wrote"
    if isinstance(error, KeyError):
        return SordinoError(f"certificate: the field {error} is missing, so this is no certificate; {remedy}.")
    return SordinoError(f"certificate: a field has a wrong value ({error}); {remedy}.")


def _check_signature(cert: Mapping[str, Any], key: str | None, problems: list[str]) -> str:
    """Who signed the certificate; empty if nobody did."""
    about = cert.get("signature")
    if about is None:
        if key is not None:
            problems.append("it is not signed, but --key names who should have signed it")
        return ""
    if why := signing.broken(cert):
        problems.append(why)
    public = str(about["key"])
    print_of_key = signing.fingerprint(public)
    if key is not None and not {public, print_of_key} & set(signing.known_keys(key)):
        problems.append(f"it was signed by {about['signer']} {print_of_key}, but --key names another key")
    return f"{about['signer']} {print_of_key}"


def _compare(what: str, claimed: float, recomputed: float, problems: list[str], gaps: list[str] | None = None) -> None:
    """Note where an epsilon lies too far below or above the other accountant's.

    gaps: of allocation. Its account may be far above the other one where there is little noise, which is no mistake.
    """
    if claimed == recomputed:  # both infinite, or both zero
        return
    apart, unit = claimed - recomputed, max(abs(recomputed), 1e-6)
    told = f"{what}: {claimed:.6g} is claimed, but the raw numbers give {recomputed:.6g}"
    most = MOST_ABOVE if gaps is None else MOST_ABOVE_ALLOCATION
    if not apart >= -MOST_BELOW * unit:
        problems.append(told)
    elif not apart <= most * unit:
        (problems if gaps is None else gaps).append(told)


def _allocates(cert: Mapping[str, Any]) -> bool:
    return any(r["sampler"] == Sampler.ALLOCATION for group in cert["groups"] for r in group["releases"])


def _check_bounds(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check that the releases follow from unit, adjacency, trust, clip and each client's noise."""
    unit, adjacency, trust = Unit(cert["unit"]), Adjacency(cert["adjacency"]), Trust(cert["trust"])
    only_sums_visible = trust is not Trust.UNTRUSTED_SERVER
    several = _clients_of_a_person(cert, problems)
    several = several if only_sums_visible else math.sqrt(several)
    for query in cert["queries"]:
        gather = math.sqrt(_senders(cert, query)) if only_sums_visible else 1.0
        name, kind, clip = query["query"], Kind(query["query"].split()[-1]), float(query["clip"])
        rows = [(g, r) for g in cert["groups"] for r in g["releases"] if r["query"] == name]
        if query["bound"] != BY_CLIP and not str(query["bound"]).startswith(BY_LEMMA):
            problems.append(f"{name}: a bound is '{BY_CLIP}' or '{BY_LEMMA}' and its name, not '{query['bound']}'")
        _check_clipping(query, kind, clip, problems)
        if query["stream"] and streams.stated(cert, query):
            streams.check(cert, query, problems)
            for group in cert["groups"]:
                if (
                    not any(r["query"] == name for r in group["releases"])
                    and streams.factor_of(cert, query, group).times
                ):
                    problems.append(f"clients {group['clients']}: they took part in {name} and paid nothing for it")
        if unit is Unit.CLIENT and kind is not Kind.DELTA:
            problems.append(f"{name}: at client level the whole message must be noised, not an answer")
        if rows and max(int(r["times"]) for _, r in rows) > int(cert["rounds"]) * int(query["calls"]):
            problems.append(f"{name}: it is released more often than {cert['rounds']} rounds allow")
        for group, release in rows:
            low, high = _span(group["influence"][name])
            least_std, most_std = _span(group["own_std"][name])
            std = float(release["std"])
            # In a sum, a client's noise has the same weight as its data, and the noise of the whole cohort adds up.
            weights = (low * gather, high * gather) if only_sums_visible else (1.0, 1.0)
            if not (_near(std, least_std * weights[1]) and _near(std, most_std * weights[0])):
                problems.append(
                    f"{name}: the visible noise under {trust} is not {std:.6g} if a client adds {least_std:.6g}"
                )
            if query["semidefinite"] and kind not in SEMIDEFINITE:
                problems.append(f"{name}: terms of kind {kind} are not semi-definite")
            elif query["bound"] == BY_CLIP and (not query["stream"] or streams.stated(cert, query)):
                bound = Query(kind, clip, psd=query["semidefinite"]).sensitivity(adjacency, unit) * several
                sampled = float(release["rate"]) < 1
                separate = (Sampler.POISSON, Sampler.ALLOCATION)
                apart = sampled and query["semidefinite"] and release["sampler"] in separate
                apart = apart and adjacency is Adjacency.REPLACE_ONE
                joint = (int(query["joint"]) if sampled else 1) * (2 if apart else 1)
                # A sample's terms are rounded one by one, because a replaced one is also compared with none.
                terms = bound / clip if sampled and adjacency is Adjacency.REPLACE_ONE else 1.0
                moved = bound / terms * (high if only_sums_visible else 1.0)
                expected = terms * _after_rounding(cert, query, moved) * math.sqrt(joint)
                factor = streams.factor_of(cert, query, group) if query["stream"] else streams.Factor(1.0, 0.0, 0)
                expected *= factor.value
                if query["stream"] and int(release["times"]) != factor.times:
                    problems.append(f"{name}: it is accounted {release['times']} times, not {factor.times}")
                if not _near(float(release["sensitivity"]), expected, factor.above):
                    problems.append(
                        f"{name}: the sensitivity is {release['sensitivity']:.6g}, but clip {clip:g}, {unit} level and "
                        f"{adjacency} make it {expected:.6g}"
                    )
            _check_rate(cert, query, group, release, problems)
    _check_rounds(cert, problems)
    _check_totals(cert, problems)


def _check_clipping(query: Mapping[str, Any], kind: Kind, clip: float, problems: list[str]) -> None:
    """Check that the law of clipping, if one is named, is known, is for gradients, and keeps to the clip."""
    if "clipping" not in query:
        return
    try:
        law = Clipping.parse(str(query["clipping"]))
    except SordinoError as error:
        problems.append(f"{query['query']}: {error}")
        return
    length = math.hypot(*law.bounds(clip, len(law.layers) or 1))
    if kind is not Kind.GRADIENT or query["bound"] != BY_CLIP or not _near(length, clip):
        problems.append(f"{query['query']}: {law} is no way to bound it by a clip")


def _clients_of_a_person(cert: Mapping[str, Any], problems: list[str]) -> float:
    """The declared number of clients of one person; 1 where persons are not the unit."""
    person = cert.get("person")
    if (person is not None) != (cert["unit"] == Unit.PERSON):
        problems.append("the field person must be there at person level, and only there")
    if person is None:
        return 1.0
    if not (int(person["records"]) >= 1 and int(person["clients"]) >= 1):
        problems.append("person: the numbers of records and clients must be at least 1")
    sampled = any(float(r["rate"]) < 1 for g in cert["groups"] for r in g["releases"])
    if int(person["clients"]) > 1 and (sampled or cert.get("secure")):
        problems.append("person: there is no account of minibatches, or of integers, for a person at several clients")
    return float(person["clients"])


def _check_integers(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check the fields about sums of integers: all or none, enough noise, and the figures beside epsilon."""
    secure, releases = cert.get("secure"), [r for g in cert["groups"] for r in g["releases"]]
    marks = [r.get("mechanism") in OF_INTEGERS for r in releases] + [
        float(q.get("step", 0)) > 0 for q in cert["queries"]
    ]
    if any(mark != bool(secure) for mark in marks):
        problems.append("some fields describe sums of integers and others do not")
        return
    by_group = [listed(group["releases"]) for group in cert["groups"]]
    adjacency = Adjacency(cert["adjacency"])
    recomputed = max(right_guess(group["releases"], float(cert["delta"]), adjacency) for group in cert["groups"])
    least = max(events.guess(releases, adjacency) for releases in by_group) * (1 - 1e-6)
    if float(cert["guess"]) < max(least, recomputed * (1 - GUESS_TOLERANCE)):
        problems.append(f"the chance {cert['guess']:.4g} of a right guess does not follow from the releases")
    if not secure:
        return
    if cert["trust"] != Trust.SECURE_AGGREGATION:
        problems.append(f"integers need the trust model secure-aggregation, not {cert['trust']}")
    _check_masks(cert, secure, problems)
    more = math.sqrt((int(cert["clients"]) - int(secure["dropouts"])) / int(secure["honest"]))
    without_colluders = [[{**r, "std": more * float(r["std"])} for r in g["releases"]] for g in cert["groups"]]
    against_server = max(epsilons(each, (float(cert["delta"]),), adjacency)[0] for each in without_colluders)
    _compare("epsilon against the server alone", _limitless(secure["epsilon_server"]), against_server, problems)
    for query in cert["queries"]:
        name, step = query["query"], float(query["step"])
        least = min(_span(g["own_std"][name])[0] * _span(g["influence"][name])[0] for g in cert["groups"])
        if not (least / step) ** 2 >= LEAST_STEP_VARIANCE * (1 - 1e-6):
            problems.append(f"{name}: noise of {least / step:.3g} steps is too small for its account")


def _check_masks(cert: Mapping[str, Any], secure: Mapping[str, Any], problems: list[str]) -> None:
    """Check that the graph of masks, where there is one, is as dense as the dropouts and colluders need it."""
    sites = int(cert["clients"])
    if not mask_graph.ALL_PAIRS < sites <= mask_graph.MOST_SITES:
        if "masks" in secure:
            problems.append(f"{sites} sites share masks with all others, and a graph of masks is named")
        return
    try:
        needed = asdict(mask_graph.parameters(sites, int(secure["dropouts"]), int(secure["colluders"])))
    except SordinoError as error:
        problems.append(str(error))
        return
    if secure.get("masks") != needed:
        problems.append(f"the graph of masks is {secure.get('masks')}, and {needed} is needed")


def _after_rounding(cert: Mapping[str, Any], query: Mapping[str, Any], moved: float) -> float:
    """The sensitivity after random rounding to integers; the bound fails with chance at most 2^-80."""
    secure, step = cert.get("secure"), float(query.get("step", 0.0))
    if secure is None:
        return moved
    if not step > 0 or any(r.get("mechanism") not in OF_INTEGERS for g in cert["groups"] for r in g["releases"]):
        raise SordinoError("certificate: sums of integers need a step above 0 and a mechanism of integers.")
    row = streams.least_row(query) if query["stream"] else 1.0  # what is rounded are rows of the encoded stream
    return step * discrete_gaussian.rounded(row * moved / step, int(query["dimension"])) / row


class _Paid(NamedTuple):
    """The rounds that each client of a group paid for."""

    least: int
    exact: bool  # a stream is one release of all rounds of its stage, so that their number is at least one


def _check_rounds(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check how often each client pays against the rounds of the run and who takes part in them.

    All rounds count for every client where all take part, or where sampling hides who did. Under `cyclic` they follow
    from a client's number. A drawn schedule is not in the certificate: under `fixed` as many clients as stated pay for
    each round, and no client, nor all together under `poisson`, may have paid for far fewer rounds than are likely.
    """
    runs, rounds, clients = _runs(cert), int(cert["rounds"]), int(cert["clients"])
    law, hidden = Participation.parse(cert["sampler"]["clients"]), _hides_clients(cert)
    if rounds % runs:
        problems.append(f"{rounds} rounds are not the same number in each of {runs} runs")
    total, members, exact = 0, 0, True
    for group in cert["groups"]:
        who, paid = f"clients {group['clients']}", _paid(cert, group, runs, problems)
        total, members = total + int(group["count"]) * paid.least, members + int(group["count"]) * bool(paid.least)
        exact &= paid.exact
        if hidden or law.kind == FULL:
            due = {rounds}
        elif law.kind == "cyclic":
            phases = _phases(_spans_of(group["clients"]), int(law.amount))
            due = {runs * len(range(phase, rounds // runs, int(law.amount))) for phase in phases}
        else:
            rate, chance = law.rate(clients), NEGLIGIBLE / clients
            if paid.exact and _unlikely(paid.least / runs, rounds // runs, rate, chance):
                problems.append(
                    f"{who}: they paid for {paid.least} rounds of {rounds}, too few for {law} participation"
                )
            continue
        if any(paid.least > each or (paid.exact and paid.least < each) for each in due):
            problems.append(
                f"{who}: they paid for {paid.least} rounds of {rounds}, but {law} participation makes it "
                f"{' or '.join(map(str, sorted(due)))}"
            )
    if hidden or law.kind not in ("fixed", "poisson"):
        return
    told = f"all clients together paid for {total} places in {rounds} rounds"
    if law.kind == "fixed":
        due_in_all = int(law.amount) * rounds
        if (exact and total < due_in_all) or (rounds and members < law.amount):  # to pay for more is no loss of privacy
            problems.append(f"{told}, but {law} participation makes it {due_in_all}")
    elif exact and _unlikely(total / runs, clients * (rounds // runs), law.amount, NEGLIGIBLE):
        problems.append(f"{told}, too few for {law} participation")


def _paid(cert: Mapping[str, Any], group: Mapping[str, Any], runs: int, problems: list[str]) -> _Paid:
    """What each client of a group paid for. All queries of a stage are asked in the same rounds."""
    stages: dict[str, tuple[set[int], set[int]]] = {}
    for query in cert["queries"]:
        name = query["query"]
        counted, streamed = stages.setdefault(name.split(".")[0], (set(), set()))
        rows = [r for r in group["releases"] if r["query"] == name]
        if len(rows) > 1:
            problems.append(f"clients {group['clients']}: query {name} has {len(rows)} entries, and one is needed")
        times, drawn = sum(int(r["times"]) for r in rows), any(float(r["rate"]) < 1 for r in rows)
        if query["stream"] and not drawn:
            streamed.add(times)
            continue
        each = max(int(query["calls"]) // (int(query["joint"]) if drawn else 1), 1)
        counted.add(times // each)
        if times % each:
            problems.append(f"clients {group['clients']}: {times} releases of {name} are no whole number of rounds")
    for stage, (counted, streamed) in stages.items():
        if len({bool(times) for times in counted | streamed}) > 1 or len(counted) > 1 or not streamed <= {0, runs}:
            problems.append(f"clients {group['clients']}: they did not pay alike for all queries of stage {stage}")
    least = sum(min(counted) if counted else max(streamed) for counted, streamed in stages.values())
    exact = all(counted or streamed == {0} for counted, streamed in stages.values())
    if unknown := {r["query"] for r in group["releases"]} - {query["query"] for query in cert["queries"]}:
        problems.append(f"clients {group['clients']}: they paid for {min(unknown)}, which is no query of this run")
    return _Paid(least, exact)


def _spans_of(text: str) -> list[tuple[int, int]]:
    """The first and last client of each part of '0-4, 7'."""
    spans = [[int(end) for end in part.split("-")] for part in text.split(", ") if part]
    return [(span[0], span[-1]) for span in spans]


def _phases(spans: Sequence[tuple[int, int]], step: int) -> set[int]:
    """The remainders of the clients' numbers."""
    return {number % step for low, high in spans for number in range(low, min(high, low + step - 1) + 1)}


def _runs(cert: Mapping[str, Any]) -> int:
    """How many runs a certificate counts together, with the same schedule: more than one for a search for settings."""
    told = [RUNS.search(fact) for fact in cert["assumes"]]
    return max([int(found.group(1)) for found in told if found and cert.get("epsilon_asked") is None], default=1)


def _hides_clients(cert: Mapping[str, Any]) -> bool:
    """Whether sampling hides which clients took part, so that all of them pay for every round."""
    return any(float(r["rate"]) < 1 for g in cert["groups"] for r in g["releases"]) and cert["unit"] == Unit.CLIENT


def _unlikely(count: float, draws: int, rate: float, chance: float) -> bool:
    """Whether so few of independent draws succeed with a smaller probability than `chance`.

    By the bound of Chernoff: P[Bin(n, p) <= k] <= e^(-n KL(k/n, p)) for k below np. So an honest number is called
    unlikely with a smaller probability than `chance`.
    """
    if count >= draws * rate:
        return False
    if rate >= 1:
        return True
    part = count / draws
    divergence = (1 - part) * (math.log1p(-part) - math.log1p(-rate))
    divergence += part * math.log(part / rate) if part else 0.0
    return draws * divergence > -math.log(chance)


def _check_rate(
    cert: Mapping[str, Any],
    query: Mapping[str, Any],
    group: Mapping[str, Any],
    release: Mapping[str, Any],
    problems: list[str],
) -> None:
    """Check a rate below 1: it must be the rate of the sampler for the smallest client of the group, and sampling must
    give privacy at all. A whole message is about a minibatch only by a lemma, which is proved for Poisson sampling."""
    rate, sampler, unit = float(release["rate"]), str(release["sampler"]), Unit(cert["unit"])
    if rate == 1:
        return
    name, kind = query["query"], Kind(query["query"].split()[-1])
    by_lemma = kind is Kind.DELTA and query["bound"].endswith(OF_MINIBATCHES) and sampler == Sampler.POISSON
    if unit.sizes_public and (kind in SAMPLED or by_lemma):
        law = Sampling.parse(cert["sampler"]["records"])
        least, ran = float(law.rates(np.array([float(group["records"][0])]))[0]), law.kind
    elif unit is Unit.CLIENT and cert["trust"] == Trust.TRUSTED_SERVER:
        least, ran = float(cert["cohort"]) / int(cert["clients"]), cert["sampler"]["clients"].partition(":")[0]
        lightest = min(_span(each["influence"][name])[0] for each in cert["groups"])
        if sampler == Sampler.FIXED and not _near(lightest, 1.0):
            problems.append(f"{name}: there is no account of cohorts of a fixed size whose clients weigh differently")
    else:
        problems.append(
            f"{name}: a rate below 1 is claimed, but sampling gives no privacy at {unit} level under {cert['trust']}"
        )
        return
    if sampler != ran:
        problems.append(f"{name}: the account is for {sampler} sampling, but the run used {ran} sampling")
    if rate < least * (1 - 1e-9):
        problems.append(f"{name}: a rate of {rate:.6g} is claimed, but the sampler draws at {least:.6g}")


def _mu(releases: Sequence[Mapping[str, Any]]) -> float:
    moved = [(float(r["sensitivity"]), float(r["std"]), int(r["times"])) for r in releases]
    return gaussian.mu_of(moved)


def _check_totals(cert: Mapping[str, Any], problems: list[str]) -> None:
    groups, first = cert["groups"], cert["queries"][0]
    for group in groups:
        if not _near(_limitless(group["mu"]), _mu(group["releases"])):
            problems.append(f"clients {group['clients']}: mu {group['mu']} does not follow from the releases")
    worst = max(groups, key=lambda group: _limitless(group["epsilon"]))
    if not _near(_limitless(cert["mu"]), _mu(worst["releases"])):
        problems.append(f"mu {cert['mu']} is not the mu of the worst client")
    if sum(int(g["count"]) for g in groups) != int(cert["clients"]):
        problems.append("the groups do not add up to the number of clients")
    _check_members(cert, problems)
    cohort = Participation.parse(cert["sampler"]["clients"]).rate(int(cert["clients"])) * int(cert["clients"])
    if not _near(float(cert["cohort"]), cohort):
        problems.append(
            f"a cohort of {cert['cohort']:.6g} is claimed, but {cert['sampler']['clients']} makes it {cohort:.6g}"
        )
    for name in (query["query"] for query in cert["queries"]):
        if not _near(max(_span(g["influence"][name])[1] for g in groups), 1.0):
            problems.append(f"{name}: no client has the influence 1, which all others are measured by")
    sizes = [g["records"] for g in groups]
    if cert["records"] is not None:
        low, high = (sum(int(g["count"]) * size[k] for g, size in zip(groups, sizes, strict=True)) for k in (0, 1))
        if not low <= int(cert["records"]) <= high:
            problems.append(f"{cert['records']} records are claimed, but the groups have {low} to {high}")
    if float(cert["clip"]) != float(first["clip"]):
        problems.append(f"clip {cert['clip']:g} is claimed, but the first query has {first['clip']:g}")
    spans = [_span(g["own_std"][first["query"]]) for g in groups]
    most = max(high for _, high in spans) / float(first["clip"])
    if not _near(float(cert["client_noise"]), most):
        problems.append(f"client noise {cert['client_noise']:.6g} is claimed, but the groups have {most:.6g}")
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
        problems.append(f"noise {cert['noise']:.6g} is claimed, but the groups have {high:.6g}")


def _check_members(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check that the groups name each client once, and state sizes and a worst client that fit."""
    groups = cert["groups"]
    spans = sorted(span for group in groups for span in _spans_of(group["clients"]))
    ends = [-1, *(high for _, high in spans)]
    follow = all(low == before + 1 and high >= low for (low, high), before in zip(spans, ends, strict=False))
    counts = [sum(high - low + 1 for low, high in _spans_of(group["clients"])) for group in groups]
    if not follow or ends[-1] != int(cert["clients"]) - 1 or counts != [int(group["count"]) for group in groups]:
        problems.append(f"the groups do not name each of {cert['clients']} clients once")
    for group, count in zip(groups, counts, strict=True):
        if (sizes := group.get("sizes")) is None:
            continue
        if list(map(int, group["records"])) != [min(sizes), max(sizes)] or len(sizes) not in (1, count):
            problems.append(f"clients {group['clients']}: {group['records']} records do not follow from their sizes")
    if cert["records"] is not None and all(group.get("sizes") for group in groups):
        total = sum(
            sum(g["sizes"]) * (count if len(g["sizes"]) == 1 else 1) for g, count in zip(groups, counts, strict=True)
        )
        if total != int(cert["records"]):
            problems.append(f"{cert['records']} records are claimed, but the sizes add up to {total}")
    most = max(_limitless(group["epsilon"]) for group in groups)
    named = int(cert["worst_client"])
    of_it = [g for g in groups if any(low <= named <= high for low, high in _spans_of(g["clients"]))]
    if not of_it or _limitless(of_it[0]["epsilon"]) < most * (1 - 1e-6):
        problems.append(f"client {named} is called the worst one, but another one has a larger epsilon")


def _senders(cert: Mapping[str, Any], query: Mapping[str, Any]) -> float:
    """The number of clients whose noise a round adds up; all clients for a common stream."""
    if secure := cert.get("secure"):
        honest = int(cert["clients"]) - int(secure["dropouts"]) - int(secure["colluders"])
        if honest != int(secure["honest"]) or honest < 2 or min(secure["dropouts"], secure["colluders"]) < 0:
            raise SordinoError(
                "certificate: the number of honest sites does not follow from clients, dropouts and colluders."
            )
        return float(honest)
    common = query.get("carried", query["stream"]) and cert["trust"] != Trust.UNTRUSTED_SERVER
    return float(cert["clients"] if common else cert["cohort"])


def _assumed_sensitivities(cert: Mapping[str, Any]) -> list[str]:
    """The sensitivities that do not follow from a clip, which this check takes from the certificate."""
    of_schedule = {q["query"] for q in cert["queries"] if q["stream"] and not streams.stated(cert, q)}
    law = Participation.parse(cert["sampler"]["clients"])
    drawn = law.kind in ("fixed", "poisson") and law.rate(int(cert["clients"])) < 1 and not _hides_clients(cert)
    schedule = [f"how often each client took part: {law} participation was drawn, and its seed is not in it"] * drawn
    return schedule + [
        f"the sensitivity of query {name}, which follows from "
        + ("a schedule" if name in of_schedule else query["bound"].removeprefix("by "))
        for name, query in ((query["query"], query) for query in cert["queries"])
        if name in of_schedule or query["bound"] != BY_CLIP
    ]


def _span(value: Any) -> tuple[float, float]:
    low, high = value if isinstance(value, list) else (value, value)
    return float(low), float(high)


def _near(a: float, b: float, above: float = 0.0) -> bool:
    """Whether the numbers agree up to rounding; a may lie `above` b by this part of it."""
    return a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) or b < a <= b * (1 + above)


def _check_claims(cert: Mapping[str, Any], claimed: float, problems: list[str]) -> None:
    if cert["certified"] and (cert["reasons"] or cert["noise_source"] != "secure" or not math.isfinite(claimed)):
        problems.append(
            "it says certified, but its noise is not secret, its epsilon is infinite, or it names reasons why not"
        )
    if not cert["certified"] and not cert["reasons"]:
        problems.append("it says not certified but gives no reason")


def _check_ranges(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check settings that nothing is computed from, and that they fit the unit."""
    if not 0 < float(cert["delta"]) < 1:
        problems.append(f"delta is {cert['delta']:g}, which is no probability between 0 and 1")
    if not 0.5 <= float(cert["guess"]) <= 1:
        problems.append(f"the chance {cert['guess']:g} of a right guess does not lie between 1/2 and 1")
    if {*cert["epsilon_at"]} != {f"{at:g}" for at in DELTAS}:
        problems.append("epsilon_at does not list the epsilons at the usual deltas")
    if (asked := cert["epsilon_asked"]) is not None and _limitless(cert["epsilon"]) > asked * (1 + MOST_BELOW):
        problems.append(f"epsilon is {_limitless(cert['epsilon']):.6g}, more than the {asked:.6g} that was asked for")
    bounds = [cert["clip"], *(query["clip"] for query in cert["queries"])]
    bounds += [release["sensitivity"] for group in cert["groups"] for release in group["releases"]]
    if cert["certified"] and math.inf in bounds:
        problems.append("it says certified, although a clip or a sensitivity is infinite")
    names, public = [query["query"] for query in cert["queries"]], Unit(cert["unit"]).sizes_public
    if len({*names}) < len(names):
        problems.append("a query is listed twice")
    told = [cert["records"], *(group[part] for group in cert["groups"] for part in ("records", "sizes"))]
    if any((part is not None) != public for part in told):
        problems.append(f"the numbers of records are {'missing' if public else 'private'} at {cert['unit']} level")
    if len(cert["client_names"]) not in ((0, int(cert["clients"])) if public else (0,)):
        problems.append(f"{len(cert['client_names'])} clients are named, and there are {cert['clients']}")
    if cert["divisor"] not in ([*Divisor] if public else [Divisor.CLIENT_MEAN]):
        problems.append(f"the divisor '{cert['divisor']}' is none of a run at {cert['unit']} level")
    if cert["noise_source"] not in ("secure", "seeded", "noiseless"):
        problems.append(f"the source of the noise '{cert['noise_source']}' is unknown")
    if (person := cert.get("person")) and person.get("choice") not in PERSON_CHOICES:
        problems.append(f"person: records are chosen in the way '{person.get('choice')}', which is unknown")
    for query in (query for query in cert["queries"] if "factor" in query):
        factor = query["factor"]
        bands = len(factor["diagonals"]) if "diagonals" in factor else int(factor["inverse_band"])
        if min(bands, int(factor["rounds"])) > 1 and not query["carried"]:
            problems.append(f"{query['query']}: its noise is carried over {bands} rounds, and it says that none is")
    laws = {query["query"]: query["mechanism"] for query in cert["queries"]}
    for release in (r for group in cert["groups"] for r in group["releases"]):
        law, own = laws.get(release["query"]), release.get("mechanism")
        if law != own and {law, own} & {*OF_INTEGERS}:
            problems.append(f"{release['query']}: its releases are not of the mechanism {law}")
            break


def _check_site(cert: Mapping[str, Any], problems: list[str]) -> None:
    """Check the site that a certificate says it is of: its number, which tells the epsilon of its own data."""
    if (site := cert.get("site")) is None:
        return
    if not int(site["client"]) < int(cert["clients"]):
        problems.append(f"site {site['client']} is none of {cert['clients']} clients")
    elif cert["client_names"] and cert["client_names"][site["client"]] != site["name"]:
        problems.append(f"the site is '{site['name']}', and client {site['client']} has another name")
    if int(site["rounds"]) > int(cert["rounds"]):
        problems.append(f"the site answered {site['rounds']} of {cert['rounds']} rounds")


def _check_words(cert: Mapping[str, Any], problems: list[str], gaps: list[str]) -> None:
    """Check the sentences that follow from other fields: without an assumption, a statement promises more."""
    if (cert["unit"] == Unit.PERSON) != bool(cert.get("person")):
        return  # a problem already
    law, drawn = Participation.parse(cert["sampler"]["clients"]), amplifies(cert)
    records, told = cert["sampler"]["records"], cert["sampler"]["amplification"]
    kind = law.kind if drawn else FULL if records == "all" else Sampling.parse(records).kind
    sampled = any(float(r["rate"]) < 1 for g in cert["groups"] for r in g["releases"])
    by = Unit.CLIENT if drawn else cert["unit"]
    if not (told == NO_AMPLIFICATION and not sampled) and (
        kind == FULL or told != amplification(by, kind, Adjacency(cert["adjacency"]))
    ):
        problems.append(f"amplification by sampling is claimed as '{told}', which does not follow from the sampler")
    schedules = [ALL_TAKE_PART] if law.kind == FULL else [SECRET, GUESSABLE] if drawn else [PUBLIC]
    if cert["sampler"]["schedule"] not in schedules:
        problems.append(f"the schedule is called '{cert['sampler']['schedule']}', and it is {' or '.join(schedules)}")
    if cert["certified"] and cert["sampler"]["schedule"] == GUESSABLE:
        problems.append("it says certified, although the schedule that hides clients can be guessed")
    if cert["certified"] and law.kind == Sampler.POISSON and any(query["carried"] for query in cert["queries"]):
        problems.append(f"it says certified, but nothing is proved for correlated noise under {law}")
    needed, present = [*assumptions_of(cert), *numerics_of(cert)], {*cert["assumes"], *cert["numerics"]}
    lost = [words for words in needed if words not in present]
    wrong = {words for unit in Unit for words in numerics_of(cert, unit)} & present - {*needed}
    if cert["code_sha256"] != code_sha256():  # earlier versions say "one record", whatever is protected
        before = dict(zip(numerics_of(cert), numerics_of(cert, Unit.RECORD), strict=True))
        lost = [words for words in lost if before.get(words) not in present]
        wrong -= {*before.values()}
    problems.extend(f"it protects a {cert['unit']}, and says: {words}" for words in sorted(wrong))
    if not any(words.startswith(TUNING) for words in cert["assumes"]):
        lost.append(f"{TUNING}…")
    if lost and cert["code_sha256"] == code_sha256():
        problems.extend(f"an assumption that follows from the other fields is missing: {words}" for words in lost)
    elif lost:
        gaps.append("the words of the assumptions: sordino with other sources wrote them")


def _limitless(value: Any) -> float:
    """The number; null stands for infinity."""
    return math.inf if value is None else float(value)
