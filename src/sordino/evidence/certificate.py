"""The certificate of a run: sensitivities, standard deviations and counts, and the epsilon that they imply.

`statement` explains it in words, `verify` recomputes it with another accountant, `signing` signs it. Everything here is
public: `public` states for every field why it may be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sordino.core import FLAT_CLIPPING, SAFETY, Adjacency, Divisor, Noise, Query, Trust, Unit
from sordino.errors import SordinoError
from sordino.evidence.signing import code_sha256
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import events
from sordino.privacy.accounting.correlated import Banded
from sordino.privacy.accounting.inverse_root import InverseRoot
from sordino.privacy.accounting.samplers import Sampler
from sordino.privacy.mechanisms import mask_graph
from sordino.privacy.mechanisms.laws import mechanism_of
from sordino.privacy.mechanisms.random import Seeded, Source
from sordino.privacy.participation import FULL, Participation
from sordino.privacy.plan import Plan, plan_mechanism, unbounded_sampling, unequal_cohorts
from sordino.privacy.releases import QueryNoise
from sordino.privacy.spending import Group

CERTIFICATE_FORMAT = 2
MOST_LISTED_CLIENTS = 10_000_000
MOST_LISTED_ROUNDS = 1_000_000  # clients times rounds of a drawn schedule that a certificate lists
SECRET_SEED = 2**96  # a smaller seed of a schedule can be guessed
DELTAS = (1e-4, 1e-5, 1e-6, 1e-8)
EVALUATION = "evaluation"  # the method of a certificate that is about test records
OF_MINIBATCHES = ", also of a Poisson minibatch"  # at the end of a lemma's name, if it holds for them
NO_AMPLIFICATION = "none claimed"
ALL_TAKE_PART, PUBLIC, SECRET, GUESSABLE = "all take part", "public", "secret", "guessable"  # schedules
GENERAL = 3  # assumptions that every certificate has
TUNING = "Tuning: "  # how the sentence on earlier tries begins
STATISTICS = "statistics"  # the method of a certificate that is about counts which complete a schema

NUMERICS = (  # {unit}: whose data are protected
    "Every released number is the exact sum of what was computed and Gaussian noise, rounded to a public grid: no tail "
    "of the noise is cut, and rounding is post-processing, so that the account of the Gaussian mechanism is exact.",
    f"Clips are enforced at {1 - SAFETY:.6f} of their stated value. That pays for rounding: sums are taken in float64, "
    "or of at most 16 float32 terms at a time, and in that arithmetic one {unit} moves them by no more than the stated "
    "sensitivity (proof: docs/numerics.md).",
)

SAMPLES = (  # {unit}: what minibatches are of
    "What sampling hides is composed numerically: an upper bound, by less than 1 % of epsilon where it is tight. A "
    "millionth of δ is set aside for minibatches with more {unit} than places."
)

INTEGERS = (
    "Messages are integers modulo 2^32: clipped sums (added up in float64) in steps, randomly rounded, with discrete "
    "Gaussian noise sampled exactly. The account is concentrated DP (Kairouz, Liu, Steinke 2021), rounding included; "
    "what the rounding's bound may miss, 2^-64 per release, is part of δ.",
)
INTEGERS_AS_GAUSSIAN = (
    "Messages are integers modulo 2^32: clipped sums (added up in float64) in steps, randomly rounded, with discrete "
    "Gaussian noise sampled exactly. The account is that of the Gaussian noise, smaller by a factor of 1 + 2^-12, of "
    "which this noise is a function (docs/secure-aggregation.md), rounding included; what the rounding's bound may "
    "miss, 2^-64 per release, is part of δ.",
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
    model_sha256: str = "",
    metrics_sha256: str = "",
    curve_sha256: str = "",
    adapter_sha256: str = "",
    schema_sha256: str = "",
    doubts: Sequence[str] = (),
    tested: int | None = None,
    names: Sequence[str] = (),
    execution: str = "simulated on one machine",
    assumes: Sequence[str] = (),
    tuning: str = "if settings were tried out on these data first, that is not paid for here",
) -> dict[str, Any]:
    """Everything that a reader needs to recompute the guarantee after `done` rounds. `signing.signed` adds a signature.

    Args:
        plan: What was released.
        source: Where the noise came from; a seeded source is never certified.
        version: The version of the package.
        done: Rounds that took place; None for all.
        spec_sha256, ledger_head, ledger_rows, model_sha256, metrics_sha256, curve_sha256, adapter_sha256: Ties to the
            files of the run. `statement.issue` adds the hash of the statement, and `training.run.finish` that of the
            model card.
        schema_sha256: Hash of the public schema of a table; empty where there is none.
        doubts: Why it is not certified, in addition to what follows from the plan and the source.
        tested: How many records the model was tested on.
        names: The names of the clients, if they have names.
        execution: How the run took place, in words.
        assumes: Further assumptions of the guarantee.
        tuning: What is known about settings that were tried before.

    Returns:
        The certificate, ready for JSON.

    Example:
        >>> import sordino as so
        >>> plan = so.Plan(so.build("dp-fedgd"), rounds=5, sizes=(100,) * 4, privacy=so.Privacy(epsilon=2.0))
        >>> cert = certificate(plan, so.source(None), version=so.__version__)
        >>> cert["certified"], round(cert["epsilon"], 3)
        (True, 2.0)
    """
    if done is not None and (type(done) is not int or not 0 <= done <= plan.rounds):
        raise SordinoError(f"done: {done!r} must be a number of rounds, 0 to {plan.rounds}: t + 1 after round t.")
    groups = spending.groups(plan, done)
    epsilons = [spending.epsilon_of(plan, group) for group in groups]
    worst = groups[int(np.argmax(epsilons))]
    noises = calibration.query_noises(plan)
    noise, client_noise = calibration.summed_noise(plan)
    delta = plan.privacy.delta
    reasons = [*_reasons(plan, source), *(f"not proved: {doubt}" for doubt in doubts)]
    sizes_public = plan.privacy.unit.sizes_public  # at client level, a client's size is part of what is hidden
    cert: dict[str, Any] = {
        "format": CERTIFICATE_FORMAT,
        "sordino": version,
        "certified": not reasons,
        "reasons": reasons,
        "epsilon": finite(max(epsilons)),
        "delta": delta,
        "mu": finite(worst.mu),
        "guess": max(events.guess(group.releases, plan.privacy.adjacency) for group in groups),
        "epsilon_asked": finite(plan.privacy.epsilon) if plan.noise is None else None,
        "epsilon_at": {f"{d:g}": finite(max(spending.epsilon_of(plan, g, d) for g in groups)) for d in DELTAS},
        "unit": str(plan.privacy.unit),
        "person": _person(plan),
        "adjacency": str(plan.privacy.adjacency),
        "trust": str(plan.privacy.trust),
        "method": plan.method.name,
        "execution": execution,
        "rounds": plan.rounds if done is None else done,
        "clients": plan.clients,
        "client_names": list(names) if sizes_public else [],  # whose data were used is what client level hides
        "cohort": plan.participation.rate(plan.clients) * plan.clients,
        "records": sum(plan.sizes) if sizes_public else None,
        "test_records": tested,
        "sampler": _sampler(plan),
        "divisor": str(plan.divisor if sizes_public else Divisor.CLIENT_MEAN),
        "clip": finite(noises[0].scale),
        "noise": noise,
        "client_noise": client_noise,
        "noise_source": "seeded" if isinstance(source, Seeded) else type(source).__name__.lower(),
        "queries": [_query(plan, level) for level in noises],
        "worst_client": worst.clients[0],
        "groups": [_group(plan, group, epsilon, done) for group, epsilon in zip(groups, epsilons, strict=True)],
        "secure": _secure(plan, groups),
        "assumes": [],
        "numerics": [],
        "spec_sha256": spec_sha256,
        "model_sha256": model_sha256,
        "metrics_sha256": metrics_sha256,
        "curve_sha256": curve_sha256,
        "adapter_sha256": adapter_sha256,
        "statement_sha256": "",
        "card_sha256": "",
        "schema_sha256": schema_sha256,
        "code_sha256": code_sha256(),
        "ledger": {"head": ledger_head, "rows": ledger_rows},
    }
    words = [*_assumes(plan, tuning, cert), *plan.method.assumes, *assumes]
    return {**cert, "assumes": words, "numerics": numerics_of(cert)}


def _query(plan: Plan, level: QueryNoise) -> dict[str, Any]:
    """What is asked and released, and with which noise."""
    query, mechanism = level.query, mechanism_of(level.query.noise)
    return {
        "query": level.name,
        "clip": finite(level.scale),
        "calls": query.calls,
        "joint": query.joint,
        "semidefinite": query.psd,
        "mechanism": plan_mechanism(plan, level.stage, level.number).name,
        "stream": mechanism.spans_rounds,
        "carried": mechanism.carried,
        "step": level.step,
        "dimension": level.dimension,
        "bound": _bound(query),
        **_factor(query.noise),
        **({} if query.clipping == FLAT_CLIPPING else {"clipping": str(query.clipping)}),
    }


def _group(plan: Plan, group: Group, epsilon: float, done: int | None) -> dict[str, Any]:
    """Clients with equal releases, and their epsilon."""
    sizes_public, noises = plan.privacy.unit.sizes_public, calibration.query_noises(plan)
    return {
        "clients": ranges(group.clients),
        "count": len(group.clients),
        "records": list(group.records) if sizes_public else None,
        "sizes": _sizes(plan, group) if sizes_public else None,
        **_attended(plan, group, done),
        "mu": finite(group.mu),
        "epsilon": finite(epsilon),
        "own_std": {level.name: _common(calibration.own_std(plan, level), group.clients) for level in noises},
        "influence": {level.name: _common(level.weight / level.weight.max(), group.clients) for level in noises},
        "releases": [{**release._asdict(), "sensitivity": finite(release.sensitivity)} for release in group.releases],
    }


def _bound(query: Query) -> str:
    """What the sensitivity of a query follows from."""
    lemma = query.bound
    return "by clip" if lemma is None else f"by lemma: {lemma.name}{OF_MINIBATCHES if lemma.sampled else ''}"


def of_runs(cert: dict[str, Any], runs: int) -> dict[str, Any]:
    """The certificate of several visible runs like this one: k times the releases, sqrt(k) times the mu.

    Raises:
        SordinoError: The runs added up integers, whose epsilon against the server alone is not computed for several.
    """
    if cert["secure"] is not None:
        raise SordinoError("certificate: runs that add up integers have no certificate of several; certify each run.")
    adjacency, root = Adjacency(cert["adjacency"]), math.sqrt(runs)
    groups = []
    for group in cert["groups"]:
        releases = [{**release, "times": runs * release["times"]} for release in group["releases"]]
        epsilon = events.epsilon(listed(releases), cert["delta"], adjacency)
        mu = None if group["mu"] is None else root * group["mu"]
        groups.append({**group, "mu": mu, "epsilon": finite(epsilon), "releases": releases})
    worst = max(groups, key=lambda group: math.inf if group["epsilon"] is None else group["epsilon"])
    by_group = [listed(group["releases"]) for group in groups]
    return {
        **cert,
        "epsilon": worst["epsilon"],
        "epsilon_asked": None,
        "epsilon_at": {
            d: finite(max(events.epsilon(each, float(d), adjacency) for each in by_group)) for d in cert["epsilon_at"]
        },
        "mu": worst["mu"],
        "guess": max(events.guess(each, adjacency) for each in by_group),
        "rounds": runs * cert["rounds"],
        "groups": groups,
    }


def listed(releases: Sequence[dict[str, Any]]) -> list[events.Release]:
    """The releases as a certificate lists them.

    Raises:
        SordinoError: a mechanism has no account, or the certificate was written before mechanisms had names.
    """
    if any(release.get("integers") for release in releases):
        raise SordinoError(
            "certificate: it is of an old format that does not name the mechanism of integers; write a new certificate."
        )
    fields = ({key: release[key] for key in events.Release._fields if key in release} for release in releases)
    parsed = [
        events.Release(
            **{
                **each,
                "sampler": Sampler(each["sampler"]),
                "sensitivity": math.inf if each["sensitivity"] is None else each["sensitivity"],
            }
        )
        for each in fields
    ]
    events.mu(parsed)
    return parsed


def _person(plan: Plan) -> dict[str, int | str] | None:
    """For the unit person: records of one person that each client uses, which ones, and clients that may hold some."""
    if plan.privacy.unit is not Unit.PERSON:
        return None
    privacy = plan.privacy
    return {"records": privacy.person_records, "clients": privacy.person_clients, "choice": privacy.person_choice}


def numerics_of(cert: Mapping[str, Any], unit: str | None = None) -> list[str]:
    """How numbers are computed, and by which account, as it follows from the other fields.

    Args:
        cert: the certificate.
        unit: what a sum has a term of (default: what the certificate protects; earlier versions wrote record always).
    """
    laws = {query["mechanism"] for query in cert["queries"]}
    integers = INTEGERS if events.DiscreteGaussian.name in laws else INTEGERS_AS_GAUSSIAN
    unit = unit or cert["unit"]
    gaussian = [words.replace("{unit}", unit) for words in NUMERICS]
    drawn = SAMPLES.replace("{unit}", "persons" if unit == Unit.PERSON else "records")
    return [*(integers if cert["secure"] else gaussian), *([drawn] if draws(cert) else [])]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _secure(plan: Plan, groups: Sequence[Group]) -> dict[str, Any] | None:
    """The clients whose noise counts in a sum of integers, and epsilon against the server alone."""
    if plan.integers is None:
        return None
    how, honest = plan.integers, plan.integers.honest(plan.clients)
    more = math.sqrt(
        (plan.clients - how.dropouts) / honest
    )  # against the server alone, the noise of colluders counts too
    without_colluders = [[r._replace(std=r.std * more) for r in group.releases] for group in groups]
    graph = how.graph(plan.clients)
    return {
        "dropouts": how.dropouts,
        "colluders": how.colluders,
        "honest": honest,
        "epsilon_server": finite(
            max(events.epsilon(each, plan.privacy.delta, plan.privacy.adjacency) for each in without_colluders)
        ),
        **({} if graph is None else {"masks": dataclasses.asdict(graph)}),
    }


def _factor(noise: Noise | None) -> dict[str, Any]:
    """What `verify` needs to compute the sensitivity of a stream by itself, where it can."""
    if isinstance(noise, InverseRoot):
        return {"factor": {"inverse_band": noise.bands, "rounds": noise.rounds}}
    if not isinstance(noise, Banded):
        return {}
    fitted = {"diagonals": list(noise.diagonals), "momentum": noise.momentum, "decay": noise.decay}
    return {"factor": {**fitted, "rounds": len(noise.decoder)}}


def _attended(plan: Plan, group: Group, done: int | None) -> dict[str, list[str]]:
    """The rounds of each of the group's clients, as `ranges` writes them, if a banded stream has a drawn schedule."""
    banded = any(isinstance(query.noise, Banded) for stage in plan.stages for query in stage.queries)
    if not banded or plan.participation.kind in (FULL, "cyclic") or plan.clients * plan.rounds > MOST_LISTED_ROUNDS:
        return {}
    table = np.zeros((plan.rounds, plan.clients), dtype=bool)
    for t, cohort in enumerate(plan.cohorts[:done]):
        table[t, cohort] = True
    return {"rounds": [ranges(np.flatnonzero(table[:, client]).tolist()) for client in group.clients]}


def _sampler(plan: Plan) -> dict[str, str]:
    """What was drawn at random, and the account that is claimed for it."""
    kind = plan.participation.kind if plan.amplified else plan.sampling.kind
    by = "client" if plan.amplified else str(plan.privacy.unit)
    claim = amplification(by, kind, plan.privacy.adjacency) if spending.samples(plan) else NO_AMPLIFICATION
    secret = SECRET if plan.schedule_seed >= SECRET_SEED else GUESSABLE
    return {
        "clients": str(plan.participation),
        "records": "all" if plan.sampling.kind == FULL else str(plan.sampling),
        "amplification": claim,
        "schedule": ALL_TAKE_PART if plan.participation.kind == FULL else secret if plan.amplified else PUBLIC,
    }


def amplification(drawn: str, sampler: str, adjacency: Adjacency) -> str:
    """What is drawn at random, how, and how it is accounted for."""
    how = {Sampler.POISSON: "Poisson", Sampler.FIXED: "fixed size", Sampler.ALLOCATION: "allocation"}[Sampler(sampler)]
    of_epochs = " of epochs" if sampler == Sampler.ALLOCATION else ""
    return f"by {drawn}s; {how}, {adjacency}: composed privacy loss distributions{of_epochs}"


def _sizes(plan: Plan, group: Group) -> list[int]:
    """The sizes of the group's clients in order; one number if all are equal."""
    sizes = [plan.sizes[i] for i in group.clients]
    return sizes[:1] if len(set(sizes)) == 1 else sizes


def sizes_of(cert: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The number of records of every client; None if the certificate does not state them.

    Raises:
        SordinoError: the groups do not name every client once.
    """
    clients = int(cert["clients"])
    if not 1 <= clients <= MOST_LISTED_CLIENTS:
        raise SordinoError(f"certificate: it has {clients} clients; 1 to {MOST_LISTED_CLIENTS:,} are allowed.")
    if any(group["sizes"] is None for group in cert["groups"]):
        return None
    by_client: dict[int, int] = {}
    for group in cert["groups"]:
        numbers = numbers_of(group["clients"], clients)
        sizes = group["sizes"] * (len(numbers) if len(group["sizes"]) == 1 else 1)
        if len(sizes) != len(numbers) or by_client.keys() & set(numbers):
            raise SordinoError(f"certificate: clients {group['clients']} do not fit their sizes, or appear twice.")
        by_client |= dict(zip(numbers, map(int, sizes), strict=True))
    if sorted(by_client) != list(range(clients)):
        raise SordinoError(f"certificate: the groups do not name each of {clients} clients once.")
    return tuple(by_client[i] for i in range(clients))


def numbers_of(text: str, clients: int) -> list[int]:
    """The clients of '0-4, 7'."""
    spans = [[int(end) for end in part.split("-")] for part in text.split(", ") if part]
    if any(not 0 <= span[0] <= span[-1] < clients for span in spans):
        raise SordinoError(f"certificate: clients '{text[:60]}' are not among 0 to {clients - 1}.")
    return [k for span in spans for k in range(span[0], span[-1] + 1)]


def group_of_site(cert: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group of the site that a certificate is of. Its epsilon may be stricter than that of other sites."""
    number, clients = cert["site"]["client"], int(cert["clients"])
    groups: list[Mapping[str, Any]] = cert["groups"]
    for group in groups:
        if number in numbers_of(group["clients"], clients):
            return group
    raise SordinoError(f"certificate: its site has the number {number}, and no group of clients has that one.")


def _common(values: np.ndarray, clients: Sequence[int]) -> float | list[float]:
    """The value that the clients share; its range if they differ."""
    selected = values[list(clients)]
    low, high = float(selected.min()), float(selected.max())
    return low if low == high else [low, high]


def finite(value: float) -> float | None:
    """The value; None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def _reasons(plan: Plan, source: Source) -> list[str]:
    """Why the run is not certified; empty if it is."""
    if plan.noiseless:
        return ["not private: no noise was added"]
    reasons = []
    if not math.isfinite(spending.mu(plan)):
        reasons.append("not private: the noise is too small for any bound")
    if not source.private:
        reasons.append("seeded: not private. Whoever knows the seed can subtract the noise")
    if plan.amplified and plan.schedule_seed < SECRET_SEED:
        reasons.append("not proved: who takes part can be guessed from a small schedule_seed; omit it")
    if plan.random_participation:
        reasons.append(
            f"not proved: correlated noise under {plan.participation}, where any client may take part in every round"
        )
    elif why := unequal_cohorts(plan) or unbounded_sampling(plan):
        reasons.append(f"not proved: {why}")
    elif not plan.proved:
        where = f"{plan.privacy.unit} level under {plan.privacy.trust}"
        reasons.append(f"not proved: {plan.method.name} at {where}. {plan.method.caveat}".strip())
    return reasons


def _assumes(plan: Plan, tuning: str, cert: Mapping[str, Any]) -> list[str]:
    follow = assumptions_of(cert)
    own = []
    if plan.method.by_hand:
        own.append(
            f"The method {plan.method.name} was not built by name from the registry, or was changed afterwards. Its "
            "sensitivities and proofs are claims of its author and were not checked here; `sordino.checks.check` "
            "tries to break them."
        )
    return [*follow[:GENERAL], f"{TUNING}{tuning}.", *own, *follow[GENERAL:]]


def assumptions_of(cert: Mapping[str, Any]) -> list[str]:
    """The assumptions that follow from the other fields of a certificate; the first `GENERAL` are of every one."""
    unit, trust, sampler = Unit(cert["unit"]), Trust(cert["trust"]), cert["sampler"]
    clients, samples, amplified = sampler["clients"].partition(":")[0], draws(cert), amplifies(cert)
    facts = [
        "The number of clients, the features and the set of labels are public.",
        "Which record belongs to which client, and which are for testing, is taken as given and tells nothing.",
        "The records are those that a model was tested on; bins, thresholds and the labels' set are public."
        if cert["method"] == EVALUATION
        else "Records used for testing lie outside the guarantee, and so do figures computed from them.",
    ]
    if unit is Unit.RECORD:
        facts.append("The number of records of each client is public and fixed.")
    if unit is Unit.PERSON:
        facts.append("The number of persons of each client is public and fixed; how many records a person has is not.")
        facts.append(
            "Each client knows which of its records belong to one person, and at most "
            f"{_counted(cert['person']['clients'], 'client')} hold records of the same person."
        )
    if trust is not Trust.TRUSTED_SERVER:
        facts.append("Who takes part in a round is public.")
    if amplified:
        facts.append(
            "Cohorts are drawn anew every round from a secret seed, which the server keeps to itself "
            "(private/secret.toml), as it does who took part; no participant tells that it came."
        )
    elif samples:
        drawn = "epoch" if sampler["records"].startswith(Sampler.ALLOCATION) else "answer"
        facts.append(
            f"Minibatches are drawn anew for every {drawn} by the noise's own secret source, and no client "
            "tells what they hold."
        )
    of_fixed_size = (clients if amplified else sampler["records"].partition(":")[0]) == Sampler.FIXED
    if samples and cert["adjacency"] == Adjacency.ADD_REMOVE and of_fixed_size:
        facts.append("Who or what is absent leaves its place in a sample of a fixed size empty; nobody else takes it.")
    if secure := cert["secure"]:
        facts.append(
            "The server follows the protocol of secure aggregation; of the sites at most "
            f"{secure['colluders']} tell it, or one another, what they know."
        )
        if masks := secure.get("masks"):
            facts.append(
                "Sites share masks along a random graph, with "
                f"{mask_graph.Parameters(**masks).degree(cert['clients']):.0f} neighbours on average. The sites that "
                "collude are fixed before the terms are known, and the server tries at most 2^64 terms; "
                "then the protection fails with probability at most 2^-66, which delta includes."
            )
    elif trust is Trust.SECURE_AGGREGATION:
        facts.append("Messages are added up by a secure aggregation protocol, which a simulation does not carry out.")
        facts.append("Every participant adds its share of the noise, and none tells its share to the observer.")
    carried = any(query["carried"] for query in cert["queries"]) and cert["rounds"] > 1
    if trust is not Trust.UNTRUSTED_SERVER and clients != FULL and carried:
        facts.append("Clients outside a round's cohort send their part of the common noise all the same.")
    if trust is Trust.TRUSTED_SERVER:
        facts.append("The server, and the links to it, see every message and are trusted with them.")
    if clients != FULL and not amplified:
        facts.append(
            "Participants were drawn before the run, without looking at data; each client pays for its rounds."
        )
    return facts


def draws(cert: Mapping[str, Any]) -> bool:
    """Whether a certificate claims that what is drawn at random hides something."""
    return bool(cert["sampler"]["amplification"] != NO_AMPLIFICATION)


def amplifies(cert: Mapping[str, Any]) -> bool:
    """Whether random cohorts, which only the server knows, hide whole clients: `Plan.amplified`."""
    if (cert["unit"], cert["trust"]) != (Unit.CLIENT, Trust.TRUSTED_SERVER):
        return False
    law, clients = Participation.parse(cert["sampler"]["clients"]), int(cert["clients"])
    drawn = law.kind in (Sampler.FIXED, Sampler.POISSON) and law.rate(clients) < 1
    return drawn and not any(query["stream"] for query in cert["queries"])


def ranges(numbers: Sequence[int]) -> str:
    """'0-4, 7' for 0, 1, 2, 3, 4, 7."""
    parts: list[list[int]] = []
    for i in sorted(numbers):
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
