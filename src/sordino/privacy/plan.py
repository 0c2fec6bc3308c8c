"""The facts of a run: a method, its rounds, its clients and the privacy that they are promised.

A `Plan` holds facts and properties that follow from them directly. Functions over a plan do the rest:

- `sordino.privacy.calibration`: how much noise each query gets
- `sordino.privacy.releases`: what the adversary sees of each client
- `sordino.privacy.spending`: epsilon and mu, per group of clients and after each round
- `sordino.evidence.charges`: rows of the ledger
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import TypeVar

import numpy as np

from sordino.core import (
    SAMPLED,
    SEMIDEFINITE,
    Divisor,
    Kind,
    Method,
    Privacy,
    Query,
    Stage,
    Trust,
    Unit,
    is_whole,
    nothing,
)
from sordino.errors import SordinoError, check_known
from sordino.privacy import strict
from sordino.privacy.accounting import gaussian, slots
from sordino.privacy.accounting.samplers import Sampler
from sordino.privacy.mechanisms import quantization
from sordino.privacy.mechanisms.laws import carries, mechanism_of
from sordino.privacy.mechanisms.mechanism import Mechanism
from sordino.privacy.mechanisms.quantization import Answer, Integers
from sordino.privacy.participation import FULL, Participation, Sampling

MOST_ROUNDS = 1_000_000
LEAST_SAMPLED_DELTA = 1e-200  # below it the account of samples runs out of floats
MOST_RECORDS = 2**53  # of one client: larger numbers are rounded as floats
LEAST_NOISE, MOST_NOISE = 1e-6, 1e12
MOST_STREAM_TERMS = 2**35  # records times rounds of a stream of integers: its rows are sums of rounded answers

Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """What will be released, to whom, and what is promised. All other figures follow from these fields.

    Args:
      method: the stages, their queries, and the (unit, trust) pairs for which the noise is proved.
      rounds: of all stages together.
      sizes: public number of records of each client; at person level, of persons.
      privacy: epsilon, delta, unit, adjacency and trust model.
      participation: which clients take part in which round; a text such as `fixed:5` is parsed.
      divisor: how clients of unequal size are averaged.
      schedule_seed: of the participation schedule.
      noise: standard deviation of the summed client noise, divided by the clip; None: calibrated to epsilon.
      uncertified: accept a plan for which nothing is proved.
      sampling: which of a client's records enter a minibatch; a text such as `poisson:64` is parsed.
      integers: set where secure aggregation adds up integers.

    Raises:
      SordinoError: a field is out of range, or nothing is proved for this combination.

    Example:
      >>> import sordino as so
      >>> from sordino.privacy import spending
      >>> plan = so.Plan(so.build("dp-fedgd"), rounds=70, sizes=(2500,) * 20, privacy=so.Privacy(epsilon=1.0))
      >>> round(spending.epsilon(plan), 3)
      1.0
    """

    method: Method
    rounds: int
    sizes: tuple[int, ...]
    privacy: Privacy
    participation: Participation = field(default_factory=Participation)
    divisor: Divisor = Divisor.POOLED
    schedule_seed: int = 0
    noise: float | None = None
    uncertified: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    integers: Integers | None = None

    def __post_init__(self) -> None:
        check_known("divisor", str(self.divisor), list(Divisor))
        object.__setattr__(self, "divisor", Divisor(str(self.divisor)))
        for name, kind in (("participation", Participation), ("sampling", Sampling)):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, kind.parse(given))
            elif not isinstance(given, kind):
                raise SordinoError(f"{name}: {given!r} is not a {kind.__name__}; write a text such as 'full'.")
        for name, wanted, remedy in (
            ("method", Method, 'build("dp-fedgd")'),
            ("privacy", Privacy, "Privacy(epsilon=4.0)"),
            ("sizes", Iterable, "records.sizes"),
        ):
            if not isinstance(given := getattr(self, name), wanted):
                raise SordinoError(f"{name}: a {type(given).__name__} is not what a plan takes; write {name}={remedy}.")
        if isinstance(self.sizes, list | np.ndarray):  # noise is kept once it is calibrated, so sizes must not change
            object.__setattr__(self, "sizes", tuple(self.sizes))
        _check(self)

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def noiseless(self) -> bool:
        """Runs without noise, and therefore without privacy."""
        return self.privacy.epsilon == math.inf and self.noise is None

    @property
    def only_sums_visible(self) -> bool:
        """The adversary sees no single client's message."""
        return self.privacy.trust is not Trust.UNTRUSTED_SERVER

    @property
    def proved(self) -> bool:
        """The method's noise is proved sufficient for this unit, trust model, participation and sampling."""
        known = (self.privacy.unit, self.privacy.trust) in self.method.proves
        return known and not (self.random_participation or unbounded_sampling(self) or unequal_cohorts(self))

    @property
    def random_participation(self) -> bool:
        """Noise is carried from round to round, and each client may be drawn in every round."""
        carried = any(carries(query.noise) for stage in self.stages for query in stage.queries)
        return carried and self.participation.kind == "poisson"

    @property
    def amplified(self) -> bool:
        """Participants are drawn at random, known to the server only, and the protected unit is a whole client.

        At record level this does not help, because the client's other records reveal whether it took part.
        """
        if self.privacy.unit is not Unit.CLIENT or self.privacy.trust is not Trust.TRUSTED_SERVER:
            return False
        if any(mechanism_of(query.noise).spans_rounds for _, _, query in noised_queries(self)):
            return False
        return self.participation.kind in ("fixed", "poisson") and self.participation.rate(self.clients) < 1

    @cached_property
    def stage_rounds(self) -> tuple[int, ...]:
        """The number of rounds of each stage."""
        fixed = sum(stage.rounds or 0 for stage in self.method.stages)
        open_ended = sum(stage.rounds is None for stage in self.method.stages)
        if open_ended > 1 or fixed + open_ended > self.rounds or (not open_ended and fixed != self.rounds):
            fewer = (
                f" For fewer: {self.method.fewer}." if self.method.fewer and fixed + open_ended > self.rounds else ""
            )
            if not open_ended:
                number = f"{fixed} round{'s' * (fixed != 1)}"
                raise SordinoError(
                    f"rounds: {self.method.name} needs {number} and has no use for others, got {self.rounds}; leave "
                    f"rounds out of a run, or set {fixed}."
                )
            raise SordinoError(f"rounds: {self.method.name} needs more than {fixed} rounds.{fewer}")
        return tuple(self.rounds - fixed if stage.rounds is None else stage.rounds for stage in self.method.stages)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The method's stages, with correlated noise factorised for their number of rounds."""
        return tuple(_over(stage, rounds) for stage, rounds in zip(self.method.stages, self.stage_rounds, strict=True))

    def stage_of(self, t: int) -> int:
        """The stage that round t belongs to."""
        return bisect.bisect_right(self._stage_ends, t)

    @cached_property
    def _stage_ends(self) -> list[int]:
        return list(itertools.accumulate(self.stage_rounds))

    @cached_property
    def cohorts(self) -> list[np.ndarray]:
        """The clients that take part in each round."""
        return self.participation.schedule(self.rounds, self.clients, self.schedule_seed)

    @cached_property
    def weights(self) -> np.ndarray:
        """Each client's weight in the aggregate of means; they sum to 1.

        Clients count by their sizes, or equally (always so at client level, where sizes are not public). A client that
        requests a stricter epsilon counts less, by the ratio of the mu that it allows, so that its message needs no
        more noise than those of the others, and nobody pays for the strictest client. Where minibatches are added up,
        its own account decides by how much (`strict.factors`).
        """
        sizes = np.asarray(self.sizes, dtype=float)
        by_size = self.divisor is Divisor.POOLED and self.privacy.unit.sizes_public
        weights = sizes / sizes.sum() if by_size else np.full(self.clients, 1 / self.clients)
        if not self.privacy.client_epsilon:
            return np.asarray(weights)
        if _strict_by_accounts(self):
            weights = weights * self._strict_factors(weights)
            return np.asarray(weights / weights.sum())
        whole = gaussian.mu(self.privacy.epsilon, self.privacy.delta)
        for client, epsilon in self.privacy.client_epsilon.items():
            weights[client] *= gaussian.mu(epsilon, self.privacy.delta) / whole
        return np.asarray(weights / weights.sum())

    def _strict_factors(self, weights: np.ndarray) -> np.ndarray:
        """The factors on the weights of strict clients, by their own accounts."""
        queries = list(noised_queries(self))
        rounds = np.full(self.clients, self.rounds)
        if self.participation.kind != FULL:
            rounds = np.bincount(np.concatenate(self.cohorts), minlength=self.clients)
        calls = sum(q.calls // q.joint * self.stage_rounds[s] for s, _, q in queries) / self.rounds
        epsilons = np.full(self.clients, self.privacy.epsilon, dtype=float)
        for client, epsilon in self.privacy.client_epsilon.items():
            epsilons[client] = epsilon
        moved, times = weights / (np.asarray(self.sizes) * self.rates), np.ceil(rounds * calls)
        sampler, delta, adjacency = Sampler(self.sampling.kind), self.privacy.delta, self.privacy.adjacency
        return strict.factors(moved, self.rates, times, sampler, epsilons, delta, adjacency)

    @cached_property
    def rates(self) -> np.ndarray:
        """The rate at which each client's records enter a minibatch."""
        return self.sampling.rates(np.asarray(self.sizes, dtype=float))

    @cached_property
    def slots(self) -> np.ndarray:
        """The public number of places in each client's minibatch."""
        sizes = np.asarray(self.sizes)
        if not self._random_sizes:
            return np.asarray(np.rint(sizes * self.rates).astype(int))
        return slots.slots(sizes, self.rates, slots.tail(self.privacy.delta, self._draws))

    @property
    def overflow(self) -> float:
        """The largest chance that some minibatch of the run has more records than places."""
        return self._draws * math.exp(slots.tail(self.privacy.delta, self._draws)) if self._random_sizes else 0.0

    @property
    def _random_sizes(self) -> bool:
        return self.sampling.kind in ("poisson", "allocation") and bool((self.rates < 1).any())

    @property
    def _draws(self) -> int:
        """Minibatches of one client."""
        calls = sum(q.calls for stage in self.method.stages for q in stage.queries if q.kind in SAMPLED)
        return self.rounds * max(calls, 1)


def with_weights_of(plan: Plan, other: Plan) -> Plan:
    """The plan, with the weights of another one in place of its own.

    Args:
      plan: a plan that nobody else uses.
      other: a plan for the same clients.

    Returns:
      The first plan.
    """
    plan.__dict__["weights"] = other.weights
    return plan


def memoised(function: Callable[[Plan], Result]) -> Callable[[Plan], Result]:
    """Compute a function of a plan once per plan; the plan keeps the result."""
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def call(plan: Plan) -> Result:
        if key not in plan.__dict__:
            plan.__dict__[key] = function(plan)
        result: Result = plan.__dict__[key]
        return result

    return call


def noised_queries(plan: Plan) -> Iterator[tuple[int, int, Query]]:
    """(stage, number within the stage, query) of every query that is noised."""
    for s, stage in enumerate(plan.stages):
        for k, query in enumerate(stage.queries):
            if query.noise is not None:
                yield s, k, query


def plan_mechanism(plan: Plan, stage: int, number: int) -> Mechanism:
    """The mechanism that noises the answers of a stage's query in this plan."""
    mechanism = mechanism_of(plan.stages[stage].queries[number].noise)
    if plan.integers is None:
        return mechanism
    return mechanism.with_integers(plan.integers.of(stage, number))


def sent_answers(plan: Plan, stage: int) -> tuple[Answer, ...]:
    """The noised answers of one message of the stage, in their order, where secure aggregation adds up integers."""
    assert plan.integers is not None
    messages = plan.integers.messages
    if not isinstance(messages, int):
        return messages[stage]
    return tuple(Answer(k, (messages,)) for s, k, _ in noised_queries(plan) if s == stage)


def continues_stream(plan: Plan, t: int) -> bool:
    """Whether round t adds to a noise stream that an earlier round began, and needs the draws of that round."""
    stage = plan.stage_of(t)
    carried = any(carries(query.noise) for query in plan.stages[stage].queries)
    return carried and t > sum(plan.stage_rounds[:stage]) and not plan.noiseless


@memoised
def _streams_apart(plan: Plan) -> bool:
    """Whether the rounds in which a client takes part move separate parts of every stream, with real numbers.

    Then a minibatch in each of them is one sampled Gaussian release (Choquette-Choo et al. 2023).
    """
    if plan.sampling.kind != "poisson" or plan.integers is not None or plan.participation.kind == "poisson":
        return False
    table = np.zeros((plan.rounds, plan.clients), dtype=bool)
    for t, cohort in enumerate(plan.cohorts):
        table[t, cohort] = True
    patterns, start = np.unique(table, axis=1), 0
    for stage, rounds in zip(plan.stages, plan.stage_rounds, strict=True):
        mechanisms = [mechanism_of(query.noise) for query in stage.queries if _spans_rounds(query)]
        for mechanism, pattern in itertools.product(mechanisms, patterns[start : start + rounds].T):
            if mechanism.separate_factor(np.flatnonzero(pattern)) is None:
                return False
        start += rounds
    return True


def _strict_by_accounts(plan: Plan) -> bool:
    """Whether weights of strict clients follow from accounts of minibatches: all releases are about them, and share the
    budget equally."""
    queries = [query for *_, query in noised_queries(plan)]
    alike = len({query.joint for query in queries}) == 1 and all(
        query.kind in SAMPLED and query.share is None and query.bound is None and not _spans_rounds(query)
        for query in queries
    )
    sampled = plan.sampling.kind != FULL and plan.privacy.unit.sizes_public and bool((plan.rates < 1).any())
    promised = plan.noise is None and math.isfinite(plan.privacy.epsilon)
    return alike and sampled and promised and plan.only_sums_visible and not unbounded_sampling(plan)


def _sampled_kinds(stage: Stage) -> int:
    return sum(query.kind in SAMPLED for query in stage.queries)


def unequal_cohorts(plan: Plan) -> str:
    """Why nothing is proved for cohorts of a fixed size whose clients weigh differently; empty if they do not.

    In a cohort of a fixed size a client takes the place of another one. Its account bounds the other one's term by its
    own, but a heavier client moves the sum further, and so tells that the lighter one did not come.
    """
    if not (plan.amplified and plan.participation.kind == "fixed"):
        return ""
    if not plan.weights.max() > plan.weights.min() * (1 + 1e-12):
        return ""
    return (
        f"client_epsilon under {plan.participation}: a stricter client weighs less, and takes the place of a heavier "
        "one in a cohort of a fixed size, which tells more than its own account covers; use poisson:R."
    )


def unbounded_sampling(plan: Plan) -> str:
    """Why nothing is proved for this plan's minibatches; empty if it is proved, or if there are none."""
    queries = [q for stage in plan.method.stages for q in stage.queries]
    # At client level sizes are private, and must not decide what is refused.
    if plan.sampling.kind == FULL or (plan.privacy.unit.sizes_public and not (plan.rates < 1).any()):
        return ""
    lemmas = [q.bound for q in queries if q.bound is not None]
    if not all(lemma.sampled for lemma in lemmas):
        return f"the bound of {plan.method.name} is proved only for all records of a client; use batch = full."
    if lemmas and plan.sampling.kind != "poisson":
        return f"the bound of {plan.method.name} is proved for Poisson minibatches; use batch = poisson:B, or full."
    if any(_spans_rounds(q) for q in queries) and not _streams_apart(plan):
        return (
            f"the correlated noise of {plan.method.name} is proved for minibatches only where each of a client's "
            "rounds moves a separate part of the stream: batch = poisson, mechanism = banded, and participation = "
            "cyclic:b with b at least band. Use these, or batch = full."
        )
    if plan.sampling.kind == "allocation" and any(_sampled_kinds(stage) > 1 for stage in plan.method.stages):
        return (
            f"{plan.sampling}: {plan.method.name} asks two kinds of questions about minibatches. Use batch = poisson."
        )
    noised = any(q.sampled and q.noise is not None for q in queries)
    if noised and plan.privacy.person_clients > 1:
        return (
            f"{plan.sampling} with person_clients = {plan.privacy.person_clients}: there is no account of a person "
            "whom several clients draw separately. Use batch = full."
        )
    return ""


# ------------------------------------------------------------------------------------------------------- validation


def _check(plan: Plan) -> None:
    """Raise SordinoError if a field is out of range or nothing is proved."""
    method, privacy = plan.method, plan.privacy
    for name, value in (("rounds", plan.rounds), ("schedule_seed", plan.schedule_seed)):
        if not is_whole(value):
            raise SordinoError(f"{name}: {value!r} must be a whole number of at least 0; write 10, not 10.0.")
    if not 1 <= plan.rounds <= MOST_ROUNDS:
        raise SordinoError(f"rounds: {plan.rounds} must lie between 1 and {MOST_ROUNDS:,}.")
    if plan.schedule_seed < 0:
        raise SordinoError(f"schedule_seed: {plan.schedule_seed} must be 0 or more.")
    for client, size in enumerate(plan.sizes):
        if not is_whole(size) or not size < MOST_RECORDS:
            raise SordinoError(
                f"sizes: client {client} has {size!r} records; give a whole number below {MOST_RECORDS:,}, as in "
                "sizes=(100, 80)."
            )
    if not plan.sizes or min(plan.sizes) < 1:
        raise SordinoError("clients: every client needs at least one record.")
    if unknown := [i for i in privacy.client_epsilon if not 0 <= i < len(plan.sizes)]:
        raise SordinoError(f"client_epsilon: client {unknown[0]} does not exist; the last is {len(plan.sizes) - 1}.")
    if not isinstance(method.unit, Unit):
        raise SordinoError(
            f"unit: {method.name} has the text '{method.unit}' as its unit; write Unit('{method.unit}')."
        )
    if method.unit is not privacy.unit:
        again = f"build('{method.name}', unit='{privacy.unit}')"
        again = again if method.registered else f"Method(…, unit=Unit('{privacy.unit}'))"
        raise SordinoError(
            f"unit: {method.name} was built for {method.unit}, not {privacy.unit}; build it for that unit, {again}, or "
            f"promise Privacy(…, unit='{method.unit}')."
        )
    for stage in method.stages:
        _check_stage(method.name, stage, privacy.unit)
    _check_noise(plan)
    _check_proved(plan)
    if privacy.delta < LEAST_SAMPLED_DELTA and (plan.sampling.kind != FULL or plan.amplified):
        raise SordinoError(
            f"delta: {privacy.delta} must be at least {LEAST_SAMPLED_DELTA:g} where records or clients are drawn at "
            "random; 1e-5 is usual. For a smaller one use batch = full, and participation = full or cyclic:K."
        )
    if plan.integers is not None:
        _check_integers(plan, plan.integers)


def _check_noise(plan: Plan) -> None:
    method, privacy = plan.method, plan.privacy
    if plan.noise is not None and not LEAST_NOISE <= plan.noise <= MOST_NOISE:
        raise SordinoError(
            f"noise: {plan.noise} must lie between {LEAST_NOISE:g} and {MOST_NOISE:g}; epsilon = inf runs without "
            "noise."
        )
    if plan.noise is not None and privacy.client_epsilon:
        raise SordinoError("client_epsilon: it cannot be combined with a fixed noise; remove one of them.")
    noised = [q for stage in method.stages for q in stage.queries if q.noise is not None]
    if not plan.noiseless and any(math.isinf(q.sensitivity(privacy.adjacency, privacy.unit)) for q in noised):
        raise SordinoError(f"epsilon: {method.name} bounds nothing. {method.caveat or 'Set clip, or epsilon = inf.'}")


def _check_proved(plan: Plan) -> None:
    method, privacy = plan.method, plan.privacy
    optional = plan.uncertified or plan.noiseless
    if (privacy.unit, privacy.trust) not in method.proves and not optional:
        pairs = ", ".join(sorted(f"{unit} level under {trust}" for unit, trust in method.proves))
        raise SordinoError(
            f"trust: {method.name} is not proved private at {privacy.unit} level under {privacy.trust}. "
            + f"{method.caveat} ".lstrip()
            + (
                f"Proved: {pairs}. Choose one of these, or set"
                if pairs
                else "With these options nothing is proved. Set"
            )
            + " uncertified = true (--set uncertified=true) and read the statement, which then begins with 'not "
            "certified'."
        )
    plan.participation.rate(len(plan.sizes))
    if plan.random_participation and not optional:
        raise SordinoError(
            f"participation: the correlated noise of {method.name} is certified for full, fixed:K or cyclic:K "
            f"participation, where each client's rounds are few by design; {plan.participation} is not."
        )
    if (why := unequal_cohorts(plan)) and not optional:
        raise SordinoError(f"participation: {why}")
    if (why := unbounded_sampling(plan)) and not optional:
        raise SordinoError(f"batch: {why}")


def _check_integers(plan: Plan, integers: Integers) -> None:
    integers.honest(plan.clients)
    integers.graph(plan.clients)  # refuses what no graph of masks withstands
    if not isinstance(integers.messages, int) and len(integers.messages) != len(plan.stages):
        raise SordinoError(
            f"messages: {len(integers.messages)} are described, but there are {len(plan.stages)} stages."
        )
    quantization.check(plan.method, integers)
    for stage, number, query in noised_queries(plan):
        plan_mechanism(plan, stage, number)
        if _spans_rounds(query) and max(plan.sizes) * (plan.stage_rounds[stage] + 2) > MOST_STREAM_TERMS:
            raise SordinoError(
                f"rounds: {plan.stage_rounds[stage]} rounds of a stream with {max(plan.sizes):,} records: rounding "
                "could move a row by more than the margin of the clip; use fewer rounds."
            )
    if plan.privacy.trust is not Trust.SECURE_AGGREGATION:
        raise SordinoError(f"trust: sums of integers need secure-aggregation, not {plan.privacy.trust}.")
    if plan.privacy.person_clients > 1:
        raise SordinoError(
            "person_clients: integers are rounded by each client, and that is proved for persons at one."
        )
    if plan.participation.kind != FULL:
        raise SordinoError(f"participation: secure aggregation needs full participation, not {plan.participation}.")
    if plan.sampling.kind not in (FULL, "poisson"):
        raise SordinoError(
            f"batch: integers with {plan.sampling} have no account. A record that is drawn takes the place of another, "
            "and the bound on rounding holds for each pair of samples, but not for all pairs at once. Use poisson:B."
        )
    if plan.noiseless:
        raise SordinoError("epsilon: secure aggregation without noise is not supported; set a finite epsilon.")


def _check_stage(name: str, stage: Stage, unit: Unit) -> None:
    """Check that every answer without noise ends in a noised message; otherwise data would leave without noise."""
    if not isinstance(stage.queries, tuple) or not all(isinstance(query, Query) for query in stage.queries):
        raise SordinoError(f"{name}: the queries of a stage are a tuple; write (Query(…),), with a comma.")
    delta = [q for q in stage.queries if q.kind is Kind.DELTA]
    others = [q for q in stage.queries if q.kind is not Kind.DELTA]
    if any(q.psd for q in delta) and not (others and all(q.kind in SEMIDEFINITE for q in others)):
        raise SordinoError(
            f"{name}: psd is proved for a message that is made of semi-definite answers alone; leave psd out of DELTA."
        )
    if len(delta) > 1 or any(q.noise is None or q.calls != 1 for q in delta):
        raise SordinoError(f"{name}: a stage has at most one DELTA query; it is noised, and called once.")
    if not delta and any(q.noise is None for q in stage.queries):
        raise SordinoError(f"{name}: an answer without noise needs a noised DELTA query for the message built from it.")
    if delta and any(q.noise is not None for q in stage.queries if q.kind is not Kind.DELTA):
        raise SordinoError(f"{name}: noise the answers or the message, not both.")
    if unit is Unit.CLIENT and not delta:
        raise SordinoError(f"{name}: a client moves an answer once per record; noise the message (DELTA) instead.")
    if len({q.kind for q in stage.queries}) < len(stage.queries):
        raise SordinoError(f"{name}: a stage has at most one query of each kind; increase its calls instead.")
    streams = [q for q in stage.queries if _spans_rounds(q)]
    if any(q.joint < 1 or q.calls % q.joint for q in stage.queries):
        raise SordinoError(f"{name}: a query's calls must be a multiple of those that share a minibatch (joint).")
    if any(q.calls != 1 for q in streams) or (streams and stage.local.prepare is not nothing):
        raise SordinoError(f"{name}: a correlated query is called once per round, by clients without a cache of data.")


def _over(stage: Stage, rounds: int) -> Stage:
    queries = (q if q.noise is None else replace(q, noise=mechanism_of(q.noise).over(rounds)) for q in stage.queries)
    return stage._replace(queries=tuple(queries))


def _spans_rounds(query: Query) -> bool:
    return query.noise is not None and mechanism_of(query.noise).spans_rounds
