"""What somebody's runs cost together, however later runs were chosen. docs/proofs.md, "The ledger", has the proofs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Self

from sordino.core import Adjacency
from sordino.errors import SordinoError
from sordino.privacy.accounting import concentrated, events, gaussian
from sordino.privacy.accounting.samplers import Sampler
from sordino.privacy.accounting.slots import MOST_OVERFLOW

FIXED_BEFOREHAND = ", if the rates, noise and rounds of all runs were fixed before the first result was seen"
COPIES, REST = 1 / 4, 1 / 16  # shares of delta, of which docs/proofs.md, "The ledger", speaks
LATE_CHOICE = f", at a delta that is larger by {REST:.2%}, because minibatches were allowed after the first run"
NOT_STOPPED = ", if no run with minibatches was stopped because of its own results before it was reserved as a whole"
MU_TOLERANCE = 1e-9  # relative, on mu squared, so that rounding does not refuse the last planned release
SAMPLERS = (
    "poisson add-remove",
    "poisson replace-one",
    "fixed add-remove",
    "fixed replace-one",
    "allocation add-remove",
    "allocation replace-one",
    "poisson add-remove smoothed-discrete-gaussian",
    "poisson replace-one smoothed-discrete-gaussian",
)
RESERVED = -1  # the round of the rows that charge a whole run at its start

limit_mu = lru_cache(gaussian.mu)


class Charge(NamedTuple):
    """The cost of `times` equal releases. About all of the data it is mu² = times (sensitivity/std)².

    Attributes:
      who: who pays, a client or a person.
      round: the round of the plan.
      query: the name of the query.
      sensitivity: how far one unit moves the release.
      std: standard deviation of the noise.
      times: number of equal releases.
      plan: the plan to which the round belongs.
      rate: the chance of a record to be in the sample; 1 for all of the data.
      sampler: if the rate is below 1, the sampler and the adjacency, as in 'poisson add-remove', and a noise law that
        is not Gaussian. At rate 1, such a law, or an empty string.
    """

    who: str
    round: int
    query: str
    sensitivity: float
    std: float
    times: int
    plan: str
    rate: float = 1.0
    sampler: str = ""

    @staticmethod
    def of(release: events.Release, who: str, round: int, plan: str, adjacency: Adjacency) -> Charge:
        """The charge for a release of the plan."""
        query, sensitivity, std, times, rate, sampler, mechanism = release
        law = "" if mechanism == events.Gaussian.name else mechanism
        law = f"{sampler} {adjacency} {law}".strip() if rate < 1 else law
        if rate < 1 and law not in SAMPLERS:
            raise SordinoError(f"mechanism: there is no account of {mechanism} noise on a {sampler} sample.")
        return Charge(who, round, query, sensitivity, std, times, plan, rate, law)

    @property
    def mechanism(self) -> str:
        """The name of the accounting event of the noise."""
        law = self.sampler if self.rate == 1 else " ".join(self.sampler.split()[2:])
        return law or events.Gaussian.name


class Spent:
    """The total cost of somebody's charges, if their numbers were fixed before the first result was seen."""

    def __init__(self) -> None:
        self.square = 0.0  # mu squared, as if nothing were sampled
        self.gaussian_square = 0.0  # the same, of the Gaussian releases that these are functions of
        # (sampler and adjacency, rate, sensitivity, std, mechanism, whose minibatches are counted together) -> times
        self.parts: dict[tuple[str, float, float, float, str, str], int] = {}
        self.gaussian = True  # all noise is accounted for as Gaussian
        self.of_gaussian = True  # all of it is a function of Gaussian noise
        self.may_fail = 0  # releases whose bound may fail

    def copy(self) -> Self:
        other = type(self)()
        other.square, other.gaussian_square, other.parts = self.square, self.gaussian_square, dict(self.parts)
        other.gaussian, other.may_fail = self.gaussian, self.may_fail
        other.of_gaussian = self.of_gaussian
        return other

    def add(self, entry: Charge) -> None:
        noise = events.noise_event(entry.mechanism, entry.sensitivity, entry.std)
        square = gaussian.mu_of([(noise.mu, 1.0, entry.times)]) ** 2
        self.square += square
        self.gaussian_square += square * noise.gaussian_factor**2
        self.gaussian &= noise.gaussian_factor > 0 and not noise.is_concentrated
        self.of_gaussian &= noise.gaussian_factor > 0
        self.may_fail += entry.times * noise.may_fail
        sampler = " ".join(entry.sampler.split()[:2]) if entry.rate < 1 else ""
        # Epochs of an allocation begin with a run, so the minibatches of two runs, or of two queries, are no epoch.
        together = f"{entry.plan} {entry.query}" if sampler.startswith(Sampler.ALLOCATION) else ""
        key = (sampler, entry.rate, entry.sensitivity, entry.std, entry.mechanism, together)
        self.parts[key] = self.parts.get(key, 0) + entry.times

    def repeated(self, times: int) -> Spent:
        """The cost of the same charges so many times."""
        other = Spent()
        other.square, other.gaussian_square = times * self.square, times * self.gaussian_square
        other.gaussian, other.may_fail = self.gaussian, times * self.may_fail
        other.of_gaussian = self.of_gaussian
        for key, count in self.parts.items():
            if key[-1]:
                other.parts |= {(*key[:-1], f"{key[-1]} {copy}"): count for copy in range(times)}
            else:
                other.parts[key] = times * count
        return other

    def epsilon(self, delta: float) -> float:
        """The smallest bound on epsilon: for each adjacency, what was sampled under it counts as such."""
        adjacencies = self._adjacencies - ({""} if self.gaussian else set())
        return min([self._plain(delta), *(self._under(adjacency, delta) for adjacency in adjacencies)])

    @property
    def sampled(self) -> bool:
        """Whether some release is about a sample."""
        return any(key[0] for key in self.parts)

    def is_part_of(self, other: Spent) -> bool:
        """Whether the other total holds each of these releases as often, or more often."""
        return all(times <= other.parts.get(key, 0) for key, times in self.parts.items())

    def cover(self, delta: float) -> float:
        """A mu for which a run with samples is mu-Gaussian up to this delta (`accounting/cover.py`)."""
        releases = {adjacency: self._releases(adjacency) for adjacency in self._adjacencies - {""}}
        mus = (events.mu_up_to(r, delta, Adjacency(a), self._overflow) for a, r in releases.items())
        return min(mus, default=math.inf)

    @property
    def _adjacencies(self) -> set[str]:
        return {key[0].partition(" ")[2] for key in self.parts}

    @property
    def _overflow(self) -> float:
        """The chance that a minibatch of random size overflows its slots.

        Each run reserves a share of its own delta for that. All runs together may need more than that share.
        """
        may_overflow = (Sampler.POISSON, Sampler.ALLOCATION)
        drawn = sum(times for (name, *_), times in self.parts.items() if name.startswith(may_overflow))
        return drawn * MOST_OVERFLOW

    def _plain(self, delta: float) -> float:
        """Epsilon as if nothing were sampled."""
        return self._unsampled(delta - self._overflow)

    def _unsampled(self, delta: float) -> float:
        """Epsilon of releases on all data: Gaussian DP, or concentrated DP where some noise has no other account.

        Which of both it is may depend on results. So concentrated DP never counts less than the Gaussian noise that
        releases are functions of: then Gaussian DP holds on every path (docs/proofs.md, lemma 29).
        """
        left = concentrated.remaining(delta, self.may_fail)
        if left <= 0 or math.isinf(self.square):
            return math.inf
        of_gaussian = gaussian.epsilon(math.sqrt(self.gaussian_square), left) if self.of_gaussian else 0.0
        if self.gaussian:
            return of_gaussian
        return max(of_gaussian, concentrated.epsilon(self.square / 2, delta, self.may_fail))

    def _under(self, adjacency: str, delta: float) -> float:
        """Epsilon with what was sampled under this adjacency as sampled; none of it if the adjacency is empty."""
        left = delta - self._overflow
        neighbours = Adjacency(adjacency or Adjacency.REPLACE_ONE)
        return events.epsilon(self._releases(adjacency), left, neighbours) if left > 0 else math.inf

    def _releases(self, adjacency: str) -> list[events.Release]:
        releases = []
        for (sampler_and_adjacency, rate, moved, std, mechanism, _), times in self.parts.items():
            sampler, _, its_adjacency = sampler_and_adjacency.partition(" ")
            sampled = (rate, Sampler(sampler)) if sampler and its_adjacency == adjacency else (1.0, Sampler.FULL)
            releases.append(events.Release("", moved, std, times, *sampled, mechanism=mechanism))
        return releases


def _as_reserved(entry: Charge, run: Spent) -> Charge:
    """The charge with the numbers that were reserved, where it differs from them by rounding alone.

    A run that is resumed with another version of a library may find its noise with other last digits.
    """
    wanted = (entry.rate, entry.sensitivity, entry.std)
    for name, *numbers, mechanism, _ in run.parts:
        same_kind = name == " ".join(entry.sampler.split()[:2]) if entry.rate < 1 else name == ""
        close = all(math.isclose(a, b, rel_tol=MU_TOLERANCE) for a, b in zip(numbers, wanted, strict=True))
        if same_kind and close and mechanism == entry.mechanism:
            rate, sensitivity, std = numbers
            return entry._replace(rate=rate, sensitivity=sensitivity, std=std)
    return entry


class Choice(StrEnum):
    """What an account assumes of how the numbers of later runs (rate, noise, rounds) are chosen."""

    ANY = "any"  # nothing; the first run decides whether minibatches of later runs count as such
    MIXED = "mixed"  # nothing; minibatches count as such, because a person said so before the first run
    LATE = "late"  # the same, but a person said so after the first run: limits hold at a larger delta
    FIXED = "fixed"  # a person stated that the numbers of all runs were fixed before the first result was seen


class SpentByRuns(Spent):
    """The cost of somebody's runs, however the numbers of later runs were chosen: docs/proofs.md, "The ledger".

    A run with samples that was reserved counts as a whole from its start on; its rounds use it up.
    """

    def __init__(self, choice: Choice = Choice.ANY) -> None:
        super().__init__()
        self.choice = choice
        self.runs: dict[str, Spent] = {}  # in the order in which they were first charged
        self.used: dict[str, Spent] = {}  # what the rounds of reserved runs have used
        self.overused: set[str] = set()  # reserved runs whose rounds exceed what was reserved
        self._sampled_round: dict[str, int] = {}
        self._in_pieces: set[str] = set()  # runs with samples that were charged by round and not reserved
        self._first_round: tuple[str, int] | None = None  # the plan and the round that were charged first
        self._concentrated_first = False  # that round has noise that is accounted for as concentrated DP

    def copy(self) -> Self:
        other = super().copy()
        other.choice = self.choice
        other.runs = {plan: run.copy() for plan, run in self.runs.items()}
        other.used = {plan: run.copy() for plan, run in self.used.items()}
        other.overused, other._in_pieces = set(self.overused), set(self._in_pieces)
        other._sampled_round = dict(self._sampled_round)
        other._first_round, other._concentrated_first = self._first_round, self._concentrated_first
        return other

    def add(self, entry: Charge) -> None:
        if entry.sensitivity == 0:  # what costs nothing is not a run
            return
        if entry.round == RESERVED:
            self.used.setdefault(entry.plan, Spent())
        elif entry.plan in self.used:
            used, run = self.used[entry.plan], self.runs[entry.plan]
            used.add(_as_reserved(entry, run)._replace(plan=""))
            if used.is_part_of(run):
                return
            self.overused.add(entry.plan)  # `charge` refuses this; in a file that was written otherwise it counts
        elif entry.rate < 1 and self._sampled_round.setdefault(entry.plan, entry.round) != entry.round:
            self._in_pieces.add(entry.plan)
        super().add(entry)
        self._first_round = self._first_round or (entry.plan, entry.round)
        if self._first_round == (entry.plan, entry.round):
            self._concentrated_first |= events.EVENTS[entry.mechanism].is_concentrated
        self.runs.setdefault(entry.plan, Spent()).add(entry._replace(plan=""))

    @property
    def unproved(self) -> bool:
        """Whether the account may have changed because of results, to one that is not proved beside the first one."""
        return not self.of_gaussian and not self._concentrated_first and self.choice is not Choice.FIXED

    def _unsampled(self, delta: float) -> float:
        return math.inf if self.unproved else super()._unsampled(delta)

    @property
    def caveats(self) -> list[str]:
        """What `epsilon` assumes, as ends of a sentence; empty if it holds for any choice of later runs."""
        if not self.sampled:
            return []
        if self.choice is Choice.FIXED:
            return [FIXED_BEFOREHAND]
        late = [LATE_CHOICE] if self.choice is Choice.LATE and not self._minibatches_count else []
        whole = self._in_pieces and len(self.runs) > 1 and (self._minibatches_count or late)
        return [*late, *([NOT_STOPPED] if whole else [])]

    @property
    def as_if_unsampled(self) -> bool:
        """Whether minibatches of later runs count as if they held all records."""
        return self.choice is Choice.ANY and bool(self.runs) and not self._minibatches_count

    @property
    def _minibatches_count(self) -> bool:
        """Whether a part of delta was set aside for minibatches before the first result was seen."""
        first = next(iter(self.runs.values()), None)
        return self.choice is Choice.MIXED or (first is not None and first.sampled)

    def epsilon(self, delta: float) -> float:
        """The epsilon of all runs; `caveats` says what it assumes.

        - The first run has no minibatches: everything counts as if unsampled (or, if a person allowed minibatches
          later, by `_filtered`, with a share REST of delta in addition).
        - Otherwise the first run alone counts exactly. With later runs, it is the better one of two rules: copies of
          the first run with a share COPIES of delta, if each run is a part of it, and `_filtered` with the remaining
          shares.
        """
        if self.choice is Choice.FIXED:
            return super().epsilon(delta)
        if not self._minibatches_count:
            late = self.choice is Choice.LATE and self.sampled
            return self._filtered(delta, REST * delta) if late else self._plain(delta)
        first, *later = self.runs.values() or [Spent()]
        if not later:
            return first.epsilon(delta)
        rules = [self._filtered((1 - COPIES - REST) * delta, REST * delta)]
        if all(run.is_part_of(first) for run in later):
            rules.append(first.repeated(len(self.runs)).epsilon(COPIES * delta))
        return min(rules)

    def _filtered(self, delta: float, rest: float) -> float:
        """Epsilon of the Gaussian releases that stand for the runs; those of runs with samples share `rest`."""
        counted, number = Spent(), 0
        overflow = 0.0
        for run in self.runs.values():
            if run.sampled:
                number += 1
                mu = run.cover(rest / (number * (number + 1)))  # these shares add up to less than 1
                if mu * mu < run.square:
                    counted.square += mu * mu
                    counted.gaussian_square += mu * mu
                    continue
                overflow += run._overflow
            counted.square += run.square
            counted.gaussian_square += run.gaussian_square
            counted.gaussian &= run.gaussian
            counted.of_gaussian &= run.of_gaussian
            counted.may_fail += run.may_fail
        return math.inf if self.unproved else counted._unsampled(delta - overflow)

    def exceeds(self, mu: float, epsilon: float, delta: float) -> bool:
        """Whether the total exceeds a limit, which has this mu."""
        # A small enough mu needs no further check, where it is proved that the mu squared of releases add up.
        adds_up = self._closed_form or (self.gaussian and self.choice is Choice.FIXED)
        fits = adds_up and not self.may_fail and self.gaussian_square <= mu * mu * (1 + MU_TOLERANCE)
        return not fits and self.epsilon(delta) > epsilon * (1 + MU_TOLERANCE)

    def left(self, epsilon: float, delta: float, shares: Sequence[float] = (1.0,)) -> float:
        """The largest epsilon of further Gaussian releases on all of the data within the limit; 0 if none fits.

        Args:
          epsilon: epsilon of the limit.
          delta: delta of the limit.
          shares: one further run per number, its part of mu squared.
        """
        remaining = concentrated.remaining(delta, self.may_fail)
        if remaining <= 0:
            return 0.0
        whole = limit_mu(epsilon, remaining)
        low, high = 0.0, whole  # mu of the releases
        if self._closed_form:
            low = math.sqrt(max(0.0, whole * whole - self.gaussian_square))
        elif self.epsilon(delta) <= epsilon:
            for _ in range(12):
                middle = (low + high) / 2
                after = self.copy()
                for number, share in enumerate(shares):
                    after.add(Charge("", 0, "", middle * math.sqrt(share), 1.0, 1, f"further run {number}"))
                low, high = (low, middle) if after.exceeds(whole, epsilon, delta) else (middle, high)
        return gaussian.epsilon(low, delta) if low > 0 else 0.0

    @property
    def _closed_form(self) -> bool:
        """Whether the mu squared of releases add up to the total."""
        return self.gaussian and not self.sampled and self.choice is not Choice.MIXED
