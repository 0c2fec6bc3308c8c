"""Simulated errors of four private federated estimators, and their predictions.

Designs: x ~ N(0, I_5), logistic labels with |theta_0| = 1 or Poisson labels with |theta_0| = 1/2. Records are bounded
by Mallows weights (radius 3), Poisson also by |residual| <= 3 and rate <= e^2; steps are 3 and 1/2. Every repetition
has its own data and noise and is one row of a tensor; its data are the same for every method and budget. Sizes are
drawn once per design. The guarantee is mu-GDP for one record of a client against the server, replace-one.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import Method, Privacy
from sordino.data.partition import SIZE_LAWS
from sordino.data.records import Records
from sordino.engines import simulate
from sordino.errors import SordinoError, nearest
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy.accounting import gaussian
from sordino.privacy.mechanisms.random import Address, Floats, Seeded, Words
from sordino.privacy.plan import Plan
from sordino.studies import theory

DIM, DELTA = 5, 1e-5
MUS = (0.5, 1.0, 3.0)
CLIENTS, MEAN, TOTAL = (20, 30, 40, 50, 60), 400, 20_000
SPLITS = (10, 20, 50, 100, 200)  # clients of a fixed total
STEPS = (2, 4, 6, 10, 20, 50, 100, 200, 400)
DESIGNS = (*SIZE_LAWS, "fixed-total", "iterations", "mnist-binary", "mnist-multiclass")
LABELS = {"fedsgd": "FedSGD", "fedhybrid": "FedHybrid", "fedavg-gdp": "FedAvg", "fednewton": "FedNewton"}
POOLED = "pooled"  # the estimate from all pooled data, without privacy
AT_ONCE = 4_000_000  # records of all repetitions in memory at once: about 0.5 GB

OnProgress = Callable[[str], None]


class Setup(NamedTuple):
    """A model, its true parameter, and the public constants of the methods."""

    model: Linear
    length: float
    clip: float
    curvature_clip: float
    lr: float
    floor: float = 0.05

    @property
    def truth(self) -> Tensor:
        return torch.full((self.model.features,), self.length / math.sqrt(self.model.features), dtype=torch.float64)


def setup(kind: str, dim: int = DIM) -> Setup:
    """The simulations' constants for `logistic` or `poisson`; the radius is 3 at five dimensions."""
    radius = 3 * math.sqrt(dim / DIM)
    if kind == "logistic":
        return Setup(Linear(dim, 1, Loss.LOGISTIC, bias=False, radius=radius), 1.0, radius, radius**2 / 4, 3.0)
    if kind == "poisson":
        model = Linear(dim, 1, Loss.POISSON, bias=False, radius=radius, residual=3.0, cap=2.0)
        return Setup(model, 0.5, 3 * radius, radius**2 * math.exp(2), 0.5)
    raise SordinoError(f"model: '{kind}' is unknown.{nearest(kind, ('logistic', 'poisson'))}")


@dataclass(frozen=True)
class DesignPoint:
    """One point of a figure."""

    kind: str
    law: str
    clients: int
    mu: float
    total: int | None = None  # records of all clients together; None: about 400 per client
    iterations: int = 100

    @property
    def sizes(self) -> tuple[int, ...]:
        return sizes(self.law, self.clients, self.total)

    @property
    def case(self) -> theory.Scenario:
        at = setup(self.kind)
        world = theory.population(at.model, at.length)
        return theory.Scenario(self.sizes, self.mu, world, at.clip, at.curvature_clip, at.lr)

    @property
    def key(self) -> tuple[int, ...]:
        """Numbers that seed the noise of this point."""
        law, kind = SIZE_LAWS.index(self.law), int(self.kind == "poisson")
        return (kind, law, self.clients, round(1000 * self.mu), self.total or 0, self.iterations)

    def predicted(self) -> dict[str, theory.ErrorTerms]:
        """Predicted error terms by method, from the closed forms."""
        case, half = self.case, self.iterations // 2
        return {
            "fedsgd": theory.fedsgd(case, self.iterations),
            "fedhybrid": theory.fedhybrid(case, half, half),
            "fedavg-gdp": theory.fedavg(case, half, 2),
            "fednewton": theory.fednewton(case, half),
        }


def sizes(law: str, clients: int, total: int | None = None) -> tuple[int, ...]:
    """Records per client: equal, uniform within half of the mean, or lognormal (log-sd 0.5, at least 50)."""
    if law not in SIZE_LAWS:
        raise SordinoError(f"design: sizes cannot be '{law}'.{nearest(law, SIZE_LAWS)}")
    mean = MEAN if total is None else total / clients
    rng = np.random.default_rng([SIZE_LAWS.index(law), clients])
    if law == "equal":
        drawn = np.full(clients, mean)
    elif law == "uniform":
        drawn = rng.integers(int(mean / 2), int(1.5 * mean) + 1, clients).astype(float)
    else:
        drawn = np.exp(0.5 * rng.standard_normal(clients))
        drawn *= mean / drawn.mean()
    if total is not None:
        drawn *= total / drawn.sum()
    n = np.maximum(np.round(drawn), min(50, mean / 2)).astype(int)
    if total is not None:  # the remainder of rounding
        n[np.argmax(n)] += total - n.sum()
    return tuple(n.tolist())


def cells(design: str, kinds: Sequence[str], mus: Sequence[float], law: str = "equal") -> list[DesignPoint]:
    """The points of a design."""
    if design in SIZE_LAWS:
        return [DesignPoint(kind, design, m, mu) for kind in kinds for mu in mus for m in CLIENTS]
    if design == "fixed-total":
        return [DesignPoint(kind, law, m, mu, TOTAL) for kind in kinds for mu in mus for m in SPLITS]
    if design == "iterations":
        return [DesignPoint(kind, law, 40, mu, iterations=k) for kind in kinds for mu in mus for k in STEPS]
    raise SordinoError(f"design: '{design}' is unknown.{nearest(design, DESIGNS)}")


# ---------------------------------------------------------------------------------------------------- simulation


class NormalRows:
    """Seeded noise, drawn for all clients of a release at once: faster for many clients and short vectors."""

    private = False

    def __init__(self, seed: int, clients: int) -> None:
        self.seeded, self.clients = Seeded(seed), clients
        self.key: tuple[Any, ...] = ()
        self.block = np.zeros(0)

    def fresh(self) -> NormalRows:
        return self

    def normal(self, at: Address, shape: tuple[int, ...]) -> Floats:
        if at.client >= self.clients:
            return self.seeded.normal(at, shape)
        key = (*at[1:], shape)
        if key != self.key:
            self.key = key
            self.block = self.seeded.normal(at._replace(client=self.clients), (self.clients, *shape))
        return np.asarray(self.block[at.client])

    def uniform(self, at: Address, shape: tuple[int, ...]) -> Floats:
        return self.seeded.uniform(at, shape)

    def words(self, at: Address, count: int) -> Words:
        return self.seeded.words(at, count)


def worlds(kind: str, sizes: Sequence[int], repetitions: Iterable[int], seed: int, device: str = "cpu") -> Records:
    """Data of some repetitions, on the leading axis. Each repetition has its own random stream."""
    at, n = setup(kind), sum(sizes)
    rngs = [np.random.default_rng([seed, r, n, len(sizes)]) for r in repetitions]
    x = np.stack([rng.standard_normal((n, DIM), dtype=np.float32) for rng in rngs])
    z = x @ at.truth.numpy().astype(np.float32)
    if kind == "logistic":
        y = np.stack([rng.random(n) < 1 / (1 + np.exp(-row)) for rng, row in zip(rngs, z, strict=True)])
    else:
        y = np.stack([rng.poisson(np.exp(row)) for rng, row in zip(rngs, z, strict=True)])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return Records(torch.from_numpy(x).to(device), torch.from_numpy(y.astype(np.float32)).to(device), starts)


def contestants(at: Setup, iterations: int) -> dict[str, tuple[Method, int]]:
    """The four methods and their rounds, with equal numbers of gradients; FedNewton uses half, and one Newton step."""
    half = iterations // 2
    local: dict[str, Any] = {"clip": at.clip, "local_lr": at.lr}
    newton: dict[str, Any] = {"curvature_clip": at.curvature_clip, "floor": at.floor}
    return {
        "fedsgd": (build("fedsgd", clip=at.clip, lr=at.lr), iterations),
        "fedhybrid": (build("fedhybrid", lr=at.lr, local_steps=half, **local), 1 + half),
        "fedavg-gdp": (build("fedavg-gdp", steps=half, **local), 2),
        "fednewton": (build("fednewton", local_steps=half, **newton, **local), 2),
    }


def promise(mu: float) -> Privacy:
    """mu-GDP as (epsilon, delta)."""
    return Privacy(gaussian.epsilon(mu, DELTA), DELTA)


def estimates(plan: Plan, model: Linear, records: Records, seeds: Sequence[Sequence[int]]) -> Tensor:
    """One estimate per seed."""
    sources = [NormalRows(int(np.random.SeedSequence(s).generate_state(1, np.uint64)[0]), plan.clients) for s in seeds]
    theta = torch.zeros(len(sources), model.size, device=records.x.device)
    for this_round in simulate.run(plan, model, records, sources, theta=theta):
        theta = this_round.model
    return theta


def pooled(kind: str, records: Records, steps: int = 12) -> Tensor:
    """Maximum likelihood from all records of each repetition, by Newton's method."""
    model = Linear(DIM, 1, setup(kind).model.kind, bias=False)
    shard = Records(records.x, records.y, np.array([0, records.x.shape[-2]])).shard(0)
    theta = torch.zeros(len(records.x), DIM, device=records.x.device)
    for _ in range(steps):
        g = model.clipped_sum(theta, shard, math.inf).double()
        H = model.curvature_sum(theta, shard, math.inf).double()
        theta = theta - torch.linalg.solve(H, g).to(theta)
    return theta


def simulate_cell(
    cell: DesignPoint,
    repetitions: int,
    *,
    seed: int = 0,
    device: str = "cpu",
    methods: Iterable[str] = (*LABELS, POOLED),
    progress: OnProgress = lambda _: None,
) -> dict[str, np.ndarray]:
    """Squared errors by method, one per repetition."""
    at, sizes, errors = setup(cell.kind), cell.sizes, {name: list[np.ndarray]() for name in methods}
    known = contestants(at, cell.iterations)
    chunk = max(1, AT_ONCE // sum(sizes))
    for start in range(0, repetitions, chunk):
        repeats = range(start, min(start + chunk, repetitions))
        records = worlds(cell.kind, sizes, repeats, seed, device)
        for name in errors:
            if name == POOLED:
                theta = pooled(cell.kind, records)
            else:
                method, rounds = known[name]
                plan = Plan(method, rounds, sizes, promise(cell.mu))
                theta = estimates(
                    plan, at.model, records, [(seed, r, *cell.key, list(LABELS).index(name)) for r in repeats]
                )
            errors[name].append((theta.cpu().double() - at.truth).square().sum(-1).numpy())
            progress(f"{cell.kind}, {cell.clients} clients, mu {cell.mu:g}: {LABELS.get(name, name)}")
    return {name: np.concatenate(parts) for name, parts in errors.items()}


def pieces(cell: DesignPoint, repetitions: int) -> int:
    """How often `simulate_cell` reports progress."""
    return math.ceil(repetitions / max(1, AT_ONCE // sum(cell.sizes))) * (len(LABELS) + 1)


def point(cell: DesignPoint, errors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Results of one point: each method's error with its standard error, and the predictions."""
    return {
        "samples": len(next(iter(errors.values()))),
        "methods": {name: _summary(values) for name, values in errors.items()},
        **foretold(cell),
    }


def foretold(cell: DesignPoint) -> dict[str, Any]:
    """The point itself, the predictions, and the rates."""
    case = cell.case
    bound = theory.information_bound(cell.sizes, cell.mu, case.world.fisher, case.world.times)
    return {
        "model": cell.kind,
        "sizes": cell.law,
        "total": "fixed" if cell.total else "grows",
        "clients": cell.clients,
        "records": case.records,
        "smallest": min(cell.sizes),
        "mu": cell.mu,
        "iterations": cell.iterations,
        "rate": rounded(theory.rate(DIM, cell.sizes, cell.mu)),
        "rate_with_log": rounded(theory.rate(DIM, cell.sizes, cell.mu, log=True)) if cell.mu < 1 else None,
        "information_bound": rounded(bound),
        "fednewton_safe": theory.safe(case),
        "predicted": {
            name: {part: rounded(value) for part, value in theory.plain(terms).items()}
            for name, terms in cell.predicted().items()
        },
    }


def _summary(errors: np.ndarray) -> dict[str, float]:
    return {
        "error": rounded(errors.mean()),
        "se": rounded(errors.std(ddof=1) / math.sqrt(len(errors))),
        "median": rounded(np.median(errors)),
    }


def rounded(value: float) -> float:
    """The value, rounded to four digits."""
    return float(f"{float(value):.4g}")


def measure(points: Sequence[DesignPoint], repetitions: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Every point, simulated."""
    if repetitions < 2:
        raise SordinoError(f"repetitions: {repetitions} must be at least 2, because a standard error needs two.")
    for cell in points:
        yield point(cell, simulate_cell(cell, repetitions, **options))


# ---------------------------------------------------------------------------------------------------------- MNIST

MATRICES_AT_ONCE = 20_000_000  # numbers in the Hessians of all clients and repetitions
POOL = 4  # side of the averaged squares: 28 x 28 pixels become 7 x 7


class Digits(NamedTuple):
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def mnist(folder: str | Path, *, binary: bool, pool: int = POOL) -> Digits:
    """MNIST as 7 x 7 averages of 4 x 4 pixels. Each record is centred and scaled to norm 1 by itself.

    binary: even against odd digits. pool: side of the averaged squares, a divisor of 28; 1 keeps all pixels. The
    folder holds MNIST's four gzipped idx files, such as `mnist-train-images-idx3-ubyte.gz`.
    """
    parts = []
    for part in ("train", "t10k"):
        x = _idx(Path(folder) / f"mnist-{part}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        y = torch.from_numpy(_idx(Path(folder) / f"mnist-{part}-labels-idx1-ubyte.gz", 8).astype(np.int64))
        small = x.reshape(-1, 28 // pool, pool, 28 // pool, pool).mean((2, 4), dtype=np.float32).reshape(len(x), -1)
        small -= small.mean(1, keepdims=True)
        small /= np.maximum(np.linalg.norm(small, axis=1, keepdims=True), 1e-6)
        parts += [torch.from_numpy(small), y % 2 if binary else y]
    return Digits(*parts)


def _idx(path: Path, header: int) -> np.ndarray:
    if not path.is_file():
        raise SordinoError(f"data: there is no '{path}'; name the folder that holds MNIST's four files.")
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)


def mnist_setup(*, binary: bool, features: int = (28 // POOL) ** 2) -> Setup:
    """Bounds for records of norm 1. The step was chosen by hand, once for all methods and budgets."""
    if binary:
        return Setup(Linear(features, 1, Loss.LOGISTIC, bias=False, radius=1.0), 0.0, 1.0, 0.25, 12.0)
    # |p - e_y| <= sqrt(2), and diag p - p p^T has Frobenius norm at most 1/2.
    return Setup(Linear(features, 10, Loss.SOFTMAX, bias=False, radius=1.0), 0.0, math.sqrt(2), 0.5, 12.0)


def mnist_accuracies(
    data: Digits,
    mu: float,
    *,
    binary: bool,
    clients: int = 80,
    repetitions: int = 10,
    iterations: int = 100,
    seed: int = 0,
    device: str = "cpu",
    methods: Sequence[str] = tuple(LABELS),
    progress: OnProgress = lambda _: None,
) -> dict[str, np.ndarray]:
    """Test accuracies by method, one per repetition. Every repetition has the same partition and new noise."""
    at, n = mnist_setup(binary=binary, features=data.x_train.shape[1]), len(data.x_train)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    owner = np.sort(np.arange(n) % clients)
    records = Records.of(data.x_train[order], data.y_train[order], owner, device=device)
    # The floor is the size of the noise on a client's Hessian, sqrt(2 d) s_H, which is public.
    noisy = math.sqrt(2 * at.model.size) * 2 * math.sqrt(2) * at.curvature_clip / (mu * (n // clients))
    chunk = max(1, MATRICES_AT_ONCE // (clients * at.model.size**2))
    accuracies = {}
    for i, (name, (method, rounds)) in enumerate(contestants(at._replace(floor=noisy), iterations).items()):
        if name not in methods:
            continue
        plan, reached = Plan(method, rounds, records.sizes, promise(mu)), list[float]()
        for start in range(0, repetitions, chunk):
            seeds = [(seed, r, i) for r in range(start, min(start + chunk, repetitions))]
            theta = estimates(plan, at.model, records, seeds).cpu()
            reached += [accuracy(at.model, one, data) for one in theta]
        accuracies[name] = np.array(reached)
        progress(f"mu {mu:g}: {LABELS[name]}")
    return accuracies


def accuracy(model: Linear, theta: Tensor, data: Digits) -> float:
    return float((model.predict(theta, data.x_test) == data.y_test).double().mean())


def mnist_point(mu: float, accuracies: dict[str, np.ndarray]) -> dict[str, Any]:
    """Results of one budget: accuracy and its standard error over noise, by method."""
    count = len(next(iter(accuracies.values())))
    return {
        "mu": mu,
        "samples": count,
        "methods": {
            name: {"accuracy": rounded(a.mean()), "se": rounded(a.std(ddof=1) / math.sqrt(count))}
            for name, a in accuracies.items()
        },
    }


def mnist_pooled(data: Digits, *, binary: bool, steps: int = 2000) -> float:
    """Test accuracy of the same model on pooled records without privacy, by gradient steps with momentum."""
    at = mnist_setup(binary=binary, features=data.x_train.shape[1])
    shard = Records(data.x_train, data.y_train, np.array([0, len(data.x_train)])).shard(0)
    theta, velocity = at.model.init(), at.model.init()
    for _ in range(steps):
        velocity = 0.95 * velocity + at.model.clipped_sum(theta, shard, at.clip) / len(data.x_train)
        theta = theta - at.lr * velocity
    return accuracy(at.model, theta, data)
