"""The nouns. Everything else is a function over them.

Axes: every tensor a method or a rule touches ends in the axis it talks about (parameters, usually). Leading axes
are whoever is being served: clients, or runs, or both. Written over trailing axes only (`sum(-1, keepdim=True)`,
never a bare `.norm()`), one body serves a loop over clients and a batch of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from sordino.errors import SordinoError, check_known
from sordino.lazy import Tensor, torch

# A message, a client's memory or a rule's state: a tensor, or a tuple of trees. Several parts are a NamedTuple, whose
# fields say what they are. A tree holds nothing else, so a stored one is plain data.
Tree: TypeAlias = "Tensor | tuple[Tree, ...]"

if TYPE_CHECKING:
    # A rule names its own types; a container of unlike rules writes `Rule`, which stands for any of them.
    from typing_extensions import TypeVar as DefaultTypeVar

    MessageT = DefaultTypeVar("MessageT", bound=Tree, default=Any)
    MemoryT = DefaultTypeVar("MemoryT", bound=Tree, default=Any)
    CacheT = DefaultTypeVar("CacheT", bound=Tree, default=Any)
    ExtrasT = DefaultTypeVar("ExtrasT", bound=Tree, default=Any)
    StateT = DefaultTypeVar("StateT", bound=Tree, default=Any)
    AnyTree = DefaultTypeVar("AnyTree", bound=Tree)
else:
    MessageT, MemoryT, CacheT = TypeVar("MessageT"), TypeVar("MemoryT"), TypeVar("CacheT")
    ExtrasT, StateT, AnyTree = TypeVar("ExtrasT"), TypeVar("StateT"), TypeVar("AnyTree")

# ---------------------------------------------------------------------------------------------- what is protected

MOST_EPSILON, MOST_DELTA = 1e4, 1e-2  # beyond these a number is a slip, not a promise
MOST_PERSON_RECORDS, MOST_PERSON_CLIENTS = 1000, 1000
PERSON_CHOICES = ("first", "random")


class Unit(StrEnum):
    """Who is protected: one record, all records of one person, or a whole client.

    Example:
        >>> [unit.value for unit in Unit]
        ['record', 'person', 'client']
    """

    RECORD = "record"
    PERSON = "person"
    CLIENT = "client"

    @property
    def sizes_public(self) -> bool:
        """The number of units of each client is public and fixed; at client level sizes are hidden."""
        return self is not Unit.CLIENT


def check_number(name: str, value: object) -> None:
    """Refuse what is not a number, such as a text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise SordinoError(f"{name}: {value!r} must be a number.")


def _as_float(value: float) -> float:
    """The number as a Python float, where it is one of numpy's.

    A product with numpy's float16 is rounded to 11 binary digits, which is coarser than the margin of a clip.
    """
    return float(value) if isinstance(value, np.floating) else value


def is_whole(value: object) -> bool:
    """Whether the value is a whole number by its type, which 2.0 and True are not.

    Args:
        value: The value.

    Returns:
        True for an int, or for an integer of numpy.

    Raises:
        Nothing.
    """
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class Adjacency(StrEnum):
    """Neighbouring data: one unit joins or leaves, or one is swapped for another. Sizes stay public either way.

    Example:
        >>> [adjacency.value for adjacency in Adjacency]
        ['add-remove', 'replace-one']
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


class Trust(StrEnum):
    """What the adversary sees: every message, the sums of messages, or the broadcast models alone.

    Example:
        >>> [trust.value for trust in Trust]
        ['untrusted-server', 'secure-aggregation', 'trusted-server']
    """

    UNTRUSTED_SERVER = "untrusted-server"
    SECURE_AGGREGATION = "secure-aggregation"
    TRUSTED_SERVER = "trusted-server"


class Divisor(StrEnum):
    """How clients of unequal size are averaged: every record weighs the same, or every client does.

    Example:
        >>> [divisor.value for divisor in Divisor]
        ['pooled', 'client-mean']
    """

    POOLED = "pooled"
    CLIENT_MEAN = "client-mean"


@dataclass(frozen=True)
class Privacy:
    """The promise: (epsilon, delta) for one unit, under an adjacency, against an adversary.

    Args:
        epsilon: Bound on the change of any probability, as a factor e^epsilon; inf means no noise.
        delta: Probability with which the bound may fail.
        unit: Who is protected: `record`, `person` (all records of one person) or `client`.
        adjacency: Which data sets are neighbours: `replace-one` or `add-remove`.
        trust: What the adversary sees: `untrusted-server`, `secure-aggregation` or `trusted-server`.
        client_epsilon: Stricter values that single clients request, by client index.
        person_records: At most so many records of one person are used, at each client; for the unit `person`.
        person_clients: At most so many clients hold records of one person; for the unit `person`.
        person_choice: Which records of a person are used where it has more: the `first`, or `random` ones, drawn from
            the secret source.

    Raises:
        SordinoError: A value is unknown or out of its range.

    Example:
        >>> Privacy(epsilon=2.0, trust="secure-aggregation").trust
        <Trust.SECURE_AGGREGATION: 'secure-aggregation'>
    """

    epsilon: float = 1.0
    delta: float = 1e-5
    unit: Unit = Unit.RECORD
    adjacency: Adjacency = Adjacency.REPLACE_ONE
    trust: Trust = Trust.UNTRUSTED_SERVER
    client_epsilon: dict[int, float] = field(default_factory=dict)
    person_records: int = 4
    person_clients: int = 1
    person_choice: str = "first"

    def __post_init__(self) -> None:
        check_known("person_choice", self.person_choice, PERSON_CHOICES)
        object.__setattr__(self, "client_epsilon", dict(self.client_epsilon))  # the caller may go on with the other
        for name, kind in (("unit", Unit), ("adjacency", Adjacency), ("trust", Trust)):
            value = str(getattr(self, name))
            check_known(name, value, list(kind))
            object.__setattr__(self, name, kind(value))
        for name in ("epsilon", "delta"):
            check_number(name, getattr(self, name))
            object.__setattr__(self, name, _as_float(getattr(self, name)))
        if not (0 < self.epsilon <= MOST_EPSILON or self.epsilon == math.inf):
            raise SordinoError(
                f"epsilon: {self.epsilon} must lie in (0, {MOST_EPSILON:g}], or be inf: no noise at all."
            )
        if not 0 < self.delta <= MOST_DELTA:
            raise SordinoError(f"delta: {self.delta} must lie in (0, {MOST_DELTA:g}]; 1e-5 is usual.")
        for name, count in (("person_records", self.person_records), ("person_clients", self.person_clients)):
            if not is_whole(count):
                raise SordinoError(f"{name}: {count!r} must be a whole number.")
        if not 1 <= self.person_records <= MOST_PERSON_RECORDS:
            raise SordinoError(f"person_records: {self.person_records} must lie between 1 and {MOST_PERSON_RECORDS}.")
        if not 1 <= self.person_clients <= MOST_PERSON_CLIENTS:
            raise SordinoError(f"person_clients: {self.person_clients} must lie between 1 and {MOST_PERSON_CLIENTS}.")
        if self.person_clients > 1 and self.unit is not Unit.PERSON:
            raise SordinoError(
                f"person_clients: {self.person_clients} clients per person need unit = person, not {self.unit}."
            )
        if self.person_clients > 1 and self.client_epsilon:
            raise SordinoError(
                "client_epsilon: a person may be at several clients (person_clients), so no single client can promise "
                "it less; remove one of the two."
            )
        if self.epsilon == math.inf and self.client_epsilon:
            raise SordinoError("client_epsilon: with epsilon = inf nobody adds noise; give the federation an epsilon.")
        for client, epsilon in self.client_epsilon.items():
            if not is_whole(client):
                raise SordinoError(
                    f"client_epsilon: {client!r} is not a client's number; write whole numbers from 0: {{0: 0.5}}."
                )
            check_number(f"client_epsilon: client {client}", epsilon)
            if not 0 < epsilon <= self.epsilon:
                raise SordinoError(
                    f"client_epsilon: client {client} asks for {epsilon}; a request must lie in (0, {self.epsilon}]: "
                    "a client may be stricter than the federation, never laxer."
                )


# ------------------------------------------------------------------------------------------------------ the data


class Shard(NamedTuple):
    """One client's examples; a cohort has a leading axis.

    `mask` is 0 for padding and for records a minibatch left out, else 1, or the record's weight (at most 1); a fused
    engine folds public client weights (at most 1) into it. `length` is the norm of each row of x where it was computed
    beforehand. Each person has `per_person` consecutive rows, a public number; those it does not fill have mask 0. A
    sum clips one term per person: the sum over the person's records.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    length: Tensor | None = None
    per_person: int = 1

    def person_weights(self) -> Tensor:
        """One weight per person: that of its filled rows."""
        return self.by_person(self.mask).amax(-1)

    def by_person(self, values: Tensor) -> Tensor:
        """Numbers of rows as persons x rows of each."""
        return values.reshape(*values.shape[:-1], values.shape[-1] // self.per_person, self.per_person)


class Batch(NamedTuple):
    """A minibatch, by its number: which records it holds stays with whoever answers.

    Attributes:
        number: Of the minibatch in its round, from 0.
        crowding: The most records that it may hold over the expected number, by which answers are divided; public, and
            1 where the plan draws no minibatches.
    """

    number: int
    crowding: float = 1.0


class Model(Protocol):
    """What to do with theta, one flat vector of trainable parameters."""

    @property
    def size(self) -> int: ...
    def init(self, generator: torch.Generator | None = None) -> Tensor: ...
    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one example."""
        ...

    def predict(self, theta: Tensor, x: Tensor) -> Tensor: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters that theta strings together."""
        ...

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor:
        """Sum over records of the gradient (times `scale`, entry by entry) cut down to norm `clip`; gradients that are
        not finite contribute zero. The sums of matrices below are bounded alike, in the Frobenius norm. If the shard
        has several rows per person, the terms are sums over the records of each person."""
        ...


class Abilities(Protocol):
    """What a model may have beyond `Model`. Nothing here is required: `answers` and `serves` say what a model has.

    Attributes:
        serves_blends: Whether terms may be blends of two gradients; then `clipped_sum` takes `blend`.
        serves_centres: Whether features can be centred (`Centre`).
        serves_persons: Whether sums have one clipped term per person, where a shard has several rows per person. Other
            models are refused at person level.
    """

    serves_blends: bool
    serves_centres: bool
    serves_persons: bool

    def check_clipping(self, clipping: Clipping) -> None:
        """Refuse a law of clipping that the model does not serve. With this method `clipped_sum` takes `clipping`."""
        ...

    def count_sum(self, theta: Tensor, shard: Shard, scale: Tensor) -> Tensor:
        """Of 1/2 for each gradient whose norm, times `scale`, is at most 1, and -1/2 for others: for adaptive clips."""
        ...

    def calibration_sum(self, theta: Tensor, shard: Shard, clip: float, differences: bool = False) -> Tensor:
        """Of (one-hot label, probabilities), or of what `Ask.calibration` says of differences."""
        ...

    def slope_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """Of what `Ask.slope` says, for two classes."""
        ...

    def gram_sum(self, shard: Shard, clip: float, constant: float = 1.0) -> Tensor:
        """Of u u^T, for second-order methods."""
        ...

    def curvature_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """Of Hessians."""
        ...

    def curvature_times(self, theta: Tensor, shard: Shard, clip: float, v: Tensor) -> Tensor:
        """The sum of Hessians times v."""
        ...

    def fisher_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """Of g g^T."""
        ...

    def leaves_sum(self, theta: Tensor, shard: Shard, clip: float, tree: int) -> Tensor:
        """Of residuals and curvatures by leaf of a tree (`Ask.leaves`)."""
        ...

    def tally_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """Of one bounded vector per record, for models that count (`models.tally`)."""
        ...


def answers(model: object, kind: Kind) -> bool:
    """Whether a model computes the sum that a query asks for.

    Args:
        model: The model.
        kind: The kind of the query.

    Returns:
        Whether the model has the method of that kind.

    Example:
        >>> from sordino.models.linear import Linear
        >>> answers(Linear(3, 2), Kind.SLOPE), answers(Linear(3, 2), Kind.LEAVES)
        (True, False)
    """
    return hasattr(model, "clipped_sum" if kind is Kind.GRADIENT else f"{kind}_sum")


def serves(model: object, what: Literal["blends", "centres", "clipping", "persons"]) -> bool:
    """Whether a model has an ability other than a sum.

    Args:
        model: The model.
        what: Blends of two gradients, centred features, laws of clipping other than flat, or whole persons.

    Returns:
        Whether it does.

    Example:
        >>> from sordino.models.linear import Linear
        >>> serves(Linear(3, 2), "persons"), serves(Linear(3, 2), "clipping")
        (True, False)
    """
    return hasattr(model, "check_clipping") if what == "clipping" else bool(getattr(model, f"serves_{what}", False))


# ----------------------------------------------------------------------------------------------- what may be asked


class Kind(StrEnum):
    """What an answer is made of. DELTA is the finished message itself.

    Example:
        >>> Kind("gradient") is Kind.GRADIENT
        True
    """

    GRADIENT = "gradient"
    CURVATURE = "curvature"
    FISHER = "fisher"
    GRAM = "gram"
    COUNT = "count"
    CALIBRATION = "calibration"
    SLOPE = "slope"
    LEAVES = "leaves"
    TALLY = "tally"
    DELTA = "delta"


CALIBRATION_LEVEL = 0.5  # of the probabilities that a person adds to a CALIBRATION answer, beside differences
MOST_LOG_ODDS = 4.0  # of a record in a SLOPE answer; larger ones count as that much
# Kinds whose terms can have inner products that are never negative; DELTA only if it is made of these alone.
SEMIDEFINITE = (Kind.GRAM, Kind.CURVATURE, Kind.FISHER, Kind.CALIBRATION, Kind.SLOPE, Kind.TALLY, Kind.DELTA)
SAMPLED = (Kind.GRADIENT, Kind.COUNT, Kind.LEAVES)  # asked of minibatches, where a plan draws any; else of all records


class Noise:
    """A noise law, as a method declares it; `privacy.mechanisms.laws` has the mechanism that implements it."""


@dataclass(frozen=True)
class Independent(Noise):
    """Fresh Gaussian noise for every release."""


MOST_ERROR = 1e-3  # of the inverse of a covariance


@dataclass(frozen=True)
class Correlated(Noise):
    """Release t carries `decoder[t] @ z` for standard normals z, and is paid for as one release of `encoder @ x`.

    The released stream x + decoder @ z is a function of `encoder @ x + z` (decoder = encoder's inverse, or any
    linear estimator built on it), so the sensitivity of the whole stream is that of `encoder @ x`.
    """

    encoder: np.ndarray
    decoder: np.ndarray

    @property
    def length(self) -> int:
        """The number of rounds that the noise was factorised for."""
        return len(self.decoder)

    @property
    def separate(self) -> bool:
        """Every release has noise of its own, of a size fixed beforehand: nothing is carried from round to round."""
        square = all(factor.shape[0] == factor.shape[1] for factor in (self.encoder, self.decoder))
        return square and not any((f - np.diag(f.diagonal())).any() for f in (self.encoder, self.decoder))

    def sensitivity(self, rounds: np.ndarray) -> float:
        """The sensitivity to a unit that takes part in exactly `rounds`: by at most 1 each time, in any direction."""
        rounds = np.asarray(rounds)
        chosen: Any = slice(len(rounds)) if np.array_equal(rounds, np.arange(len(rounds))) else rounds  # a view is fast
        return float(np.sqrt((self._moves[:, chosen].sum(1) ** 2).sum()))

    def released_sensitivity(self, rounds: np.ndarray) -> float:
        """As `sensitivity`, of a stream that nobody else adds to and whose other rows nobody sees.

        The releases of these rounds are x + n with n of covariance S = D D^T, D the decoder's rows of these rounds.
        With S = L L^T they are a function of L^-1 x + z and the reverse, and L^-1 is lower triangular. So they are one
        Gaussian release, and its squared sensitivity, x^T S^-1 x, is at most the sum of |S^-1|.
        """
        rounds = np.asarray(rounds)
        if self._of_first_rounds is not None and np.array_equal(rounds, np.arange(len(rounds))):
            return math.sqrt(self._of_first_rounds[len(rounds)])
        key = rounds.tobytes()
        if key not in self._released:
            self._released[key] = self._inverted_sensitivity(rounds)
        return self._released[key]

    def _inverted_sensitivity(self, rounds: np.ndarray) -> float:
        bound = self.sensitivity(rounds)
        if not len(rounds):
            return bound
        rows = self.decoder_rows(rounds)
        covariance = rows @ rows.T
        try:
            inverse = np.linalg.inv(covariance)
        except np.linalg.LinAlgError:
            return bound
        # With R = 1 - S inverse, S^-1 = inverse (1 - R)^-1: its entries sum to at most those of `inverse` / (1 - |R|).
        # The second term bounds the rounding of both products.
        products = np.abs(rows) @ (np.abs(rows).T @ np.abs(inverse).sum(1))
        rounding = 8 * (len(rounds) + rows.shape[1]) * 2.0**-52 * products
        error = float((np.abs(np.eye(len(rounds)) - covariance @ inverse).sum(1) + rounding).max())
        if not error < MOST_ERROR:  # too few digits are left of the inverse
            return bound
        return min(bound, math.sqrt(float(np.abs(inverse).sum()) / (1 - error)))

    def decoder_rows(self, rounds: np.ndarray) -> np.ndarray:
        """The decoder's rows of these rounds."""
        return np.asarray(self.decoder[rounds])

    def largest_column(self, rounds: np.ndarray) -> float | None:
        """The largest norm of the encoder's columns of these rounds, if no two of them share a row; else None.

        Such rounds move parts of `encoder @ x + z` that are apart, so that each is a Gaussian release by itself.
        """
        columns = self._moves[:, np.asarray(rounds)]
        if (np.count_nonzero(columns, axis=1) > 1).any():
            return None
        return float(np.linalg.norm(columns, axis=0).max(initial=0.0))

    @cached_property
    def _moves(self) -> np.ndarray:
        return np.asarray(np.abs(self.encoder))

    @cached_property
    def _released(self) -> dict[bytes, float]:
        """Known values of `released_sensitivity`, by rounds: an account asks for the same ones several times."""
        return {}

    @cached_property
    def _of_first_rounds(self) -> np.ndarray | None:
        """Entry k: the squared sensitivity of the first k releases alone; None where it takes an inverse to know it.

        If encoder and decoder are square and lower triangular, S^-1 of the first k releases is B^T B, B the first k
        rows and columns of the encoder. If none is negative, its entries sum to the squares of the sums of B's rows.
        """
        square = self.encoder.shape == self.decoder.shape == (len(self.encoder),) * 2
        if not square or any(np.triu(factor, 1).any() for factor in (self.encoder, self.decoder)):
            return None
        return None if (self.encoder < 0).any() else np.append(0.0, np.cumsum(self.encoder.sum(1) ** 2))


@dataclass(frozen=True)
class Stream(Noise):
    """Correlated noise whose factors follow from the number of rounds."""

    name: str
    over: Callable[[int], Noise]


@dataclass(frozen=True)
class Lemma:
    """A named proof that neighbouring data move a message by at most `bound(records, adjacency)`.

    Attributes:
        name: As certificates state it.
        bound: (records, adjacency) -> the bound.
        sampled: The bound holds for sums of any number of terms that are divided by `records`. Then it holds for a
            Poisson minibatch of `records` expected ones, if all answers of a round are about that one minibatch. The
            engines refuse every other question where minibatches are drawn.
    """

    name: str
    bound: Callable[[float, Adjacency], float]
    sampled: bool = False


LEAST_CLIP = 1e-12  # numbers near the end of floats have too few digits to keep a bound
SAFETY = 2.0**-14  # clips are enforced this much below their nominal value, which pays for rounding: docs/numerics.md
CLIPPING_LAWS = ("flat", "per-layer", "automatic")
LEAST_GAMMA, MOST_GAMMA, USUAL_GAMMA = 1e-6, 1e6, 0.01
MOST_LAYER_RATIO = 1e6  # of the largest bound of a layer to the smallest


@dataclass(frozen=True)
class Clipping:
    """How a record's gradient g is brought within the clip C. Its L2 norm is at most C in every case.

    - `flat`: g min(1, C / |g|), with the norm over all parameters.
    - `per-layer`: the part g_l of each layer is clipped to its own c_l. C is sqrt(sum of c_l^2). A layer is a module
      with its weight and bias.
    - `automatic`: g C / (|g| + gamma) (AUTO-S of Bu et al. 2023, arXiv 2206.07136). Short gradients are lengthened, so
      the direction of a sum is biased.

    Args:
        law: One of `CLIPPING_LAWS`.
        layers: For `per-layer`, the bounds c_l in proportion, in the order of the layers. Empty: all are equal.
        gamma: For `automatic`, what is added to the norm.

    Raises:
        SordinoError: The law is unknown, or a number is out of its range.

    Example:
        >>> Clipping.parse("per-layer:3,4").bounds(10.0, 2)
        (6.0, 8.0)
        >>> str(Clipping.parse("automatic"))
        'automatic:0.01'
    """

    law: str = "flat"
    layers: tuple[float, ...] = ()
    gamma: float = 0.0

    def __post_init__(self) -> None:
        check_known("clipping", self.law, CLIPPING_LAWS)
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.layers and (self.law != "per-layer" or not 0 < max(self.layers) <= MOST_LAYER_RATIO * min(self.layers)):
            raise SordinoError(
                f"clipping: {self} must list one positive number per layer, the largest at most {MOST_LAYER_RATIO:g} "
                "times the smallest; other laws have none."
            )
        if self.law == "automatic" and not LEAST_GAMMA <= self.gamma <= MOST_GAMMA:
            raise SordinoError(
                f"clipping: gamma {self.gamma:g} must lie in [{LEAST_GAMMA:g}, {MOST_GAMMA:g}]; {USUAL_GAMMA} is usual."
            )
        if self.law != "automatic" and self.gamma:
            raise SordinoError(f"clipping: gamma belongs to automatic, not to {self.law}.")

    @staticmethod
    def parse(text: str) -> Clipping:
        """Read `flat`, `per-layer`, `per-layer:1,2,1`, `automatic` or `automatic:0.01`."""
        law, _, rest = text.partition(":")
        try:
            numbers = tuple(float(number) for number in rest.split(",")) if rest else ()
        except ValueError:
            numbers = (math.nan,)
        if law == "automatic" and len(numbers) <= 1:
            return Clipping(law, gamma=numbers[0] if numbers else USUAL_GAMMA)
        if not all(map(math.isfinite, numbers)) or (numbers and law in ("automatic", "flat")):
            raise SordinoError(f"clipping: '{text}' is not read; write per-layer, per-layer:1,2,1 or automatic:0.01.")
        return Clipping(law, numbers)

    def __str__(self) -> str:
        numbers = self.layers or ((self.gamma,) if self.gamma else ())
        return ":".join([self.law, *[",".join(repr(number).removesuffix(".0") for number in numbers)] * bool(numbers)])

    def bounds(self, clip: float, layers: int) -> tuple[float, ...]:
        """The bound of each layer, or of all together; the squares add up to the square of the clip."""
        if self.law != "per-layer":
            return (clip,)
        if len(self.layers or range(layers)) != layers:
            raise SordinoError(f"clipping: {len(self.layers)} bounds for {layers} layers; give one per layer, or none.")
        parts = self.layers or (1.0,) * layers
        whole = math.hypot(*parts)
        return tuple(clip * part / whole for part in parts)


FLAT_CLIPPING = Clipping()


@dataclass(frozen=True)
class Query:
    """One kind of answer a method may ask of a client's data, or the message it sends.

    Args:
        kind: What the answer is made of.
        clip: Largest norm of one term; `inf` (with `noise=None` only) leaves terms as they are.
        calls: How often it is asked per round.
        share: This query's part of mu squared. Queries without one divide what is left in proportion to their number of
            releases.
        psd: The terms are positive semi-definite, or have no negative entry, so that the inner product of two terms is
            never negative. This lowers the sensitivity under `replace-one` from 2C to sqrt(2) C.
        bound: A proof that replaces the clip as the bound on the message.
        noise: The noise law. None marks an answer that is used inside the client only: it is clipped and counted, and
            the message built from it must carry a noised DELTA query.
        joint: Number of answers about the same minibatch, which are then one release.
        clipping: How a gradient is brought within the clip; the sensitivity is that of the clip in every case.

    Example:
        >>> query = Query(Kind.GRADIENT, clip=1.0)
        >>> query.sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """

    kind: Kind
    clip: float = math.inf
    calls: int = 1
    share: float | None = None
    psd: bool = False
    bound: Lemma | None = None
    noise: Noise | None = Independent()
    joint: int = 1
    clipping: Clipping = FLAT_CLIPPING

    def __post_init__(self) -> None:
        check_known("kind", str(self.kind), list(Kind))
        object.__setattr__(self, "kind", Kind(str(self.kind)))
        check_number("clip", self.clip)
        object.__setattr__(self, "clip", _as_float(self.clip))
        if not self.clip >= LEAST_CLIP:
            raise SordinoError(f"clip: {self.clip:g} must be {LEAST_CLIP:g} or more; measure the data in other units.")
        if self.psd and self.kind not in SEMIDEFINITE:
            raise SordinoError(
                f"psd: terms of kind {self.kind} can point in opposite directions, so one for another costs 2 clips; "
                "leave psd out."
            )
        if self.clipping != FLAT_CLIPPING and (self.kind is not Kind.GRADIENT or not math.isfinite(self.clip)):
            raise SordinoError(f"clipping: {self.clipping.law} is for gradients with a finite clip; leave it out.")

    @property
    def sampled(self) -> bool:
        """Its release is about a minibatch, where a plan draws any."""
        return self.kind in SAMPLED or (self.bound is not None and self.bound.sampled)

    def sensitivity(self, adjacency: Adjacency, unit: Unit, records: float = 1, rate: float = 1.0) -> float:
        """L2 sensitivity of one release of one client: a lemma's bound, or the clip, once or twice.

        A lemma speaks of `records` bounded terms; at person level these are persons. If it holds for minibatches and
        these are drawn at a `rate` below 1, it speaks of the expected number. The account of a sample compares a
        replaced term with none, and so with the other one: twice the bound of one that joins.

        - One unit more or less changes a sum of clipped terms by one of them: C.
        - One term for another: two vectors of norm C differ by at most 2C; two positive semi-definite matrices by at
          most sqrt(2) C, because their inner product is not negative. So do two vectors without negative entries.
        - A record or a person may carry its client's clipped message from anywhere in the ball to anywhere, joining or
          not: 2C.
        """
        if self.bound is not None and self.bound.sampled and rate < 1:
            terms = 1 if adjacency is Adjacency.ADD_REMOVE else 2
            return terms * self.bound.bound(records * rate, Adjacency.ADD_REMOVE)
        if self.bound is not None:
            return self.bound.bound(records, adjacency)
        anywhere = self.kind is Kind.DELTA and unit is not Unit.CLIENT
        if adjacency is Adjacency.ADD_REMOVE and not anywhere:
            return self.clip
        return math.sqrt(2) * self.clip if self.psd else 2 * self.clip


# ------------------------------------------------------------------------------------------ who does what, in turn


class Broadcast(NamedTuple, Generic[ExtrasT]):
    """What the server sends at the start of a round.

    Attributes:
        theta: The model's parameters.
        extras: What the rule adds: a tensor, a NamedTuple of tensors, or () for nothing.
    """

    theta: Tensor
    extras: ExtrasT = ()  # type: ignore[assignment]


class Blend(NamedTuple):
    """A second point at which a gradient is taken. Each record's term is a sum of two gradients, clipped as one vector:
    weights[0] times that at the first point plus weights[1] times that at `theta`.

    Attributes:
        theta: The second point, of the shape of the first.
        weights: Of the first point, and of this one; public numbers of any sign.
    """

    theta: Tensor
    weights: tuple[float, float]


class Centre(NamedTuple):
    """Public numbers by which features are centred: factor (x - mean) takes the place of x, record by record.

    Attributes:
        mean: One number per feature.
        factor: One number.
    """

    mean: Tensor
    factor: Tensor

    def parameters(self, theta: Tensor) -> Tensor:
        """What predicts from centred features as theta, weights and then a bias, predicts from the features."""
        weight, bias = self._split(theta)
        bias = bias + (self.mean.to(theta).unsqueeze(-2) @ weight).squeeze(-2)
        return torch.cat([(weight / self.factor.to(theta).unsqueeze(-1)).flatten(-2), bias], -1)

    def step(self, step: Tensor) -> Tensor:
        """A step of such parameters as one of theta."""
        weight, bias = self._split(step)
        weight = weight * self.factor.to(step).unsqueeze(-1)
        bias = bias - (self.mean.to(step).unsqueeze(-2) @ weight).squeeze(-2)
        return torch.cat([weight.flatten(-2), bias], -1)

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        features = self.mean.shape[-1]
        outputs = theta.shape[-1] // (features + 1)
        weight = theta[..., : features * outputs].reshape(*theta.shape[:-1], features, outputs)
        return weight, theta[..., features * outputs :]


class Ask(Protocol):
    """The only way from a local rule to its data. Answers come divided by `records`, a public number."""

    @property
    def records(self) -> Tensor: ...
    @property
    def facts(self) -> Facts: ...

    def gradient(
        self,
        theta: Tensor,
        on: Batch | None = None,
        scale: Tensor | None = None,
        part: Tensor | None = None,
        blend: Blend | None = None,
        centre: Centre | None = None,
    ) -> Tensor:
        """The clipped, noised mean gradient over all records, or over a fresh minibatch if the plan draws any.

        A sum over a minibatch is divided by its expected size.
        `blend` adds a second gradient to each record's, and `scale` multiplies the sum entry by entry, before the clip.
        With `part`, numbers of entries of theta, only these entries of a record's gradient are clipped, noised and
        answered, in this order. With `centre`, it is the gradient of the same predictions by the parameters of a linear
        model of centred features.
        """
        ...

    def count(self, theta: Tensor, scale: Tensor) -> Tensor:
        """The mean of 1/2 for each record whose gradient times `scale` has a norm up to 1, and of -1/2 for others."""
        ...

    def calibration(self, theta: Tensor, differences: bool = False) -> Tensor:
        """The shares of the classes among all labels, then the mean probabilities of the classes.

        With `differences`, the shares minus the probabilities, then `CALIBRATION_LEVEL` times the probabilities."""
        ...

    def slope(self, theta: Tensor) -> Tensor:
        """Means over all records of two classes of y t+, p t+, (1 - y) t-, (1 - p) t-, w, w t+, w t- and w t^2.

        Here y and p are the label and the probability of the second class, t the log-odds over 4, clamped to -1 … 1, t+
        and t- its positive and negative part, and w = p (1 - p).
        """
        ...

    def curvature(self, theta: Tensor, on: Batch | None = None) -> Tensor:
        """The mean Hessian over all records.

        Over a minibatch it is divided by the expected size, and must carry no noise.
        """
        ...

    def curvature_times(self, theta: Tensor, v: Tensor, on: Batch | None = None) -> Tensor:
        """The curvature times a vector, never built; a call of the CURVATURE query, which must carry no noise."""
        ...

    def fisher(self, theta: Tensor, on: Batch | None = None) -> Tensor:
        """The mean of g g^T over clipped gradients g; `on` as in `curvature`."""
        ...

    def gram(self, constant: float = 1.0) -> Tensor:
        """The mean of u u^T over all records, where u is x, followed by `constant` if the model has a bias."""
        ...

    def leaves(self, theta: Tensor, tree: Tensor) -> Tensor:
        """Per leaf of a tree and output: the residuals, then the curvatures in `leaf_curvature_unit`.

        `tree` is its number; beyond the last tree, trees are counted from the first one again.
        """
        ...

    def tally(self, theta: Tensor) -> Tensor:
        """One vector of counts and bounded sums over all records (`models.tally`), whatever the minibatches."""
        ...

    def std(self, kind: Kind) -> Tensor:
        """The standard deviation of the noise on one number of this client's answer; public."""
        ...

    def sample(self) -> Batch:
        """A minibatch as the plan draws them; pass it as `on` to ask about the same records again."""
        ...


def leaf_curvature_unit(numeric: bool) -> float:
    """What curvatures are multiplied by beside residuals, so that they take up little of the clip.

    The curvature of a probability is at most 1/4. That of a number is 1, so it is sent as a quarter.
    """
    return 0.25 if numeric else 1.0


def forget(theta: Tensor, before: Tree) -> Tree:
    """No memory: the `init` of a client that stores nothing."""
    return ()


def keep(message: Tree, broadcast: Broadcast, memory: AnyTree) -> AnyTree:
    """The memory stays unchanged: the default `update_memory`."""
    return memory


def nothing(ask: Ask) -> Tree:
    """No cache: the default `prepare`."""
    return ()


def no_extras(state: Tree) -> Tree:
    """Nothing is sent but theta: the default `broadcast`."""
    return ()


def itself(theta: Tensor, state: Tree) -> Tensor:
    """The model handed out is theta: the default `model`."""
    return theta


class Local(NamedTuple, Generic[MessageT, MemoryT, CacheT, ExtrasT]):
    """A client's rule. It reaches its data only through `ask`, and stores only what follows from its messages.

    Attributes:
        compute: (ask, broadcast, memory, cache) -> message.
        update_memory: (message as it was sent, broadcast, memory) -> memory.
        init: (theta, memory of the stage before) -> memory.
        prepare: (ask) -> cache, computed from data once per stage; a cache never leaves the client.
        message: A NamedTuple of () with the fields of the message, if it has several parts. A message that was stored
            or received is a plain tuple; `tree.rebuild` gives it these fields again.

    Example:
        >>> gradient = Local(lambda ask, broadcast, memory, cache: ask.gradient(broadcast.theta))
        >>> gradient.init(None, ())
        ()
    """

    compute: Callable[[Ask, Broadcast[ExtrasT], MemoryT, CacheT], MessageT]
    update_memory: Callable[[MessageT, Broadcast[ExtrasT], MemoryT], MemoryT] = keep
    init: Callable[[Tensor, Tree], MemoryT] = forget  # type: ignore[assignment]
    prepare: Callable[[Ask], CacheT] = nothing  # type: ignore[assignment]
    message: Tree = ()


class Rule(NamedTuple, Generic[MessageT, StateT]):
    """A server's rule: pure post-processing of the aggregate.

    Attributes:
        init: (theta, facts, state of the stage before) -> state. If no client ever took part in the stage before, its
            state is the one its own `init` returned.
        update: (aggregate, state, theta, t) -> (step, state); the engine adds the step to theta. t counts the rounds of
            the stage from 0.
        broadcast: (state) -> what clients receive beside theta.
        model: (theta, state) -> the model to hand out.

    Example:
        >>> descent = Rule(init=lambda theta, facts, before: (), update=lambda g, state, theta, t: (-0.5 * g, state))
        >>> descent.update(2.0, (), 0.0, 0)
        (-1.0, ())
    """

    init: Callable[[Tensor, Facts, Tree], StateT]
    update: Callable[[MessageT, StateT, Tensor, int], tuple[Tensor, StateT]]
    broadcast: Callable[[StateT], Tree] = no_extras
    model: Callable[[Tensor, StateT], Tensor] = itself


class Stage(NamedTuple):
    """Rounds of one kind. A warm start or a covariance release is a stage of one round.

    Attributes:
        local: The clients' rule.
        rule: The server's rule.
        queries: Everything that the clients' rule may ask.
        rounds: Number of rounds; None: all that the other stages leave.

    Example:
        >>> from sordino.methods import build
        >>> build("dp-fedfc").stages[0].rounds
        1
    """

    local: Local
    rule: Rule
    queries: tuple[Query, ...]
    rounds: int | None = None

    def with_part(self, part: float) -> Stage:
        """The same stage in a method that leaves it this part of the budget: declared shares shrink in proportion."""
        queries = (q if q.share is None else replace(q, share=part * q.share) for q in self.queries)
        return self._replace(queries=tuple(queries))


class Method(NamedTuple):
    """Stages, and the (unit, trust) pairs for which the noise is proved to be enough.

    Attributes:
        name: As `sordino methods` lists it.
        unit: The unit that it was built for.
        stages: Its rounds, in their order.
        proves: The pairs that are certified.
        caveat: Why the other pairs are not proved.
        assumes: What the promise rests on beside the noise; the certificate states it.
        registered: The stages and pairs as `methods.build` made them; None for a method written by hand.
        fewer: How to build it for fewer rounds, where that is possible; the error that refuses too few rounds says it.

    Example:
        >>> from sordino.methods import build
        >>> method = build("dp-scaffold", steps=5)
        >>> sorted(trust.value for _, trust in method.proves)
        ['untrusted-server']
    """

    name: str
    unit: Unit
    stages: tuple[Stage, ...]
    proves: frozenset[tuple[Unit, Trust]]
    caveat: str = ""
    assumes: tuple[str, ...] = ()
    registered: tuple[tuple[Stage, ...], frozenset[tuple[Unit, Trust]]] | None = None
    fewer: str = ""

    @property
    def by_hand(self) -> bool:
        """Not built by name, or changed since: nobody but its author vouches for its claims."""
        if self.registered is None:
            return True
        stages, proves = self.registered
        return stages is not self.stages or proves != self.proves


@dataclass(frozen=True)
class Facts:
    """Every public number of a run; rules and local rules may read it.

    Attributes:
        clients: Number of clients.
        sizes: Records of each client; empty at client level, where they are not public.
        rounds: Number of rounds.
        cohort: Expected participants of a round.
        aggregate_std: Noise per coordinate on the aggregate, from the stage's first noised query. Runs that are trained
            together and differ in it have one each (runs x 1).
        shapes: Of the model's parameters, which theta strings together.
        blocks: A number for each of theta's entries; entries with the same number share a second moment.
        adapters: Which of `shapes` are the A and the B of each low-rank adapter.
        numeric: The labels are numbers, so the scale of the model's output counts.
        rates: The output is the logarithm of a rate, to which the curvature is proportional.
        intervals: Of a survival model.
        mean_weight: Of a record's term: below 1 where classes have weights.
        persons: Sums have one clipped term per person.
        same_records: Every round is about all records: everybody takes part, and there are no minibatches.
        query_stds: As `aggregate_std`, for each noised query of the stage.
    """

    clients: int
    sizes: np.ndarray
    rounds: int
    cohort: float
    aggregate_std: float | Tensor
    shapes: tuple[tuple[int, ...], ...] = ()
    blocks: Tensor | None = None
    adapters: tuple[tuple[int, int], ...] = ()
    numeric: bool = False
    rates: bool = False
    intervals: int = 0
    mean_weight: float = 1.0
    persons: bool = False
    same_records: bool = True
    query_stds: tuple[float | Tensor, ...] = ()


class Checkpoint(NamedTuple):
    """All that the next round needs."""

    theta: Tensor
    state: Tree  # of the server's rule
    memory: Tree  # of the clients


class Round(NamedTuple):
    """What an engine yields after each round.

    Attributes:
        t: Number of the round, from 0.
        model: The model to evaluate and to hand out.
        cohort: The clients that took part.
        aggregate: The noised aggregate that the server saw; () if nobody took part.
        checkpoint: What `run` needs to resume after this round.

    Example:
        >>> import sordino as so
        >>> data = so.load("digits")
        >>> records = so.Records.of(data.x_train, data.y_train, so.split(data, "iid", 4))
        >>> plan = so.Plan(so.build("dp-fedgd"), rounds=2, sizes=records.sizes, privacy=so.Privacy(epsilon=8.0))
        >>> [round.t for round in so.simulate.run(plan, so.Linear(64, 10), records, so.source(None))]
        [0, 1]
    """

    t: int
    model: Tensor
    cohort: np.ndarray
    aggregate: Tree
    checkpoint: Checkpoint
