"""Many runs at once: those that share data and shape are one more tensor axis, and the features are read once for all.

Runs of one batch may differ in seed, epsilon and delta, and in those options that `MethodEntry.batch` names.
Everything else splits the batch. Each run keeps its own plan, and so its own account: a batch saves time, not privacy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import Method, Tree
from sordino.data.records import Records
from sordino.data.sources import Dataset
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import build, entry
from sordino.methods.clipping import with_clipping
from sordino.methods.fedgd import gradient
from sordino.models.registry import BuiltModel
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Counted, Noiseless, Source, source
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.training.evaluate import edges_of, in_units, predictions, task_of
from sordino.training.metrics import Task, ranking_metric, score
from sordino.training.resolved import DataSource, ResolvedSpec, resolve
from sordino.training.spec import Spec
from sordino.tree import leaves

MAX_RUNS_PER_BATCH = 64  # runs per batch
Watch = Callable[[BuiltModel, Tensor, Records], dict[str, float]]  # a model, one run's parameters, its records
HELD_NUMBERS = 2**20  # of aggregates whose norms are computed by one call
FREE_KEYS = ("seed", "epsilon", "delta")  # keys in which runs of one batch may differ, beside options


class Trained(NamedTuple):
    """The result of one run."""

    resolved: ResolvedSpec
    plan: Plan
    model: BuiltModel
    theta: Tensor  # the parameters handed out at the end
    scores: dict[int, float]  # by round: the metric asked for, on the test records
    accuracy: dict[int, float]  # by round; empty where labels are quantities
    signal: tuple[float, ...]  # per round, the norm of the aggregate less what noise adds to it; () where unknown
    traffic: tuple[int, int]  # numbers that a client present in every round sent, and received
    seconds: float  # its share of the time of its batch
    cpu_seconds: dict[int, float]  # its share of the CPU time up to each evaluated round, without evaluation
    watched: dict[int, dict[str, float]]  # what `watch` found at each evaluated round


def run_many(
    specs: Sequence[Spec],
    dataset: Dataset | None = None,
    *,
    device: str = "cpu",
    at: Sequence[int] | None = None,
    stop: int | None = None,
    metric: str | None = None,
    most: int = MAX_RUNS_PER_BATCH,
    tick: Callable[[int], None] = lambda runs: None,
    watch: Watch | None = None,
) -> list[Trained]:
    """Train every spec.

    Args:
      specs: what to run; results come in the same order.
      dataset: data in memory, for all of them.
      device: `cpu` or `cuda`; on `cuda`, seeds drive a stream that is drawn there.
      at: rounds after which to evaluate (default: all).
      stop: train only so many rounds.
      metric: what to score by (default: accuracy for classes, r2 for quantities).
      most: runs per batch, which bounds memory.
      tick: called with the number of runs that finished.
      watch: figures to compute at each evaluated round from one run's parameters and the training records.
    """
    if any(spec.private_statistics is not None for spec in specs):
        raise SordinoError(
            "private_statistics: ranges are found by sordino run alone; take the public/schema.toml that it wrote, and "
            "leave private_statistics out."
        )
    runs = [resolve(spec, device) for spec in specs]
    batches: dict[tuple[Any, ...], list[int]] = {}
    for number, run in enumerate(runs):
        batches.setdefault(_shape(run), []).append(number)
    loader, results = _Loader(dataset, device), dict[int, Trained]()
    for members in batches.values():
        # A network fills the machine alone; linear models and adapters share one. `together` builds bare methods.
        alone = not runs[members[0]].model.entry.shared_batch or bool(
            runs[members[0]].spec.calibrate or runs[members[0]].spec.uncertainty
        )
        size = 1 if alone else most
        for first in range(0, len(members), size):
            part = members[first : first + size]
            results |= zip(part, _train([runs[i] for i in part], loader, at, stop, metric, watch), strict=True)
            tick(len(part))
    return [results[i] for i in range(len(runs))]


def _shape(run: ResolvedSpec) -> tuple[Any, ...]:
    """Equal for runs that fit one batch."""
    free = {*FREE_KEYS, *entry(run.method_name).batch}
    if run.participation == Participation():
        free.add("schedule_seed")
    rest = {k: str(v) for k, v in run.spec.values().items() if k not in free}
    return (*sorted(rest.items()), run.noiseless, run.seed is None)


class _Loader:
    """Data and partitions, read once and copied to the device once."""

    def __init__(self, dataset: Dataset | None, device: str) -> None:
        self.dataset, self.device = dataset, device
        self._read: tuple[DataSource, Dataset] | None = None
        self._records: tuple[Any, Records, Tensor, Tensor] | None = None

    def data(self, run: ResolvedSpec) -> Dataset:
        if self.dataset is not None:
            return self.dataset
        if self._read is None or self._read[0] != run.source:
            self._read = run.source, run.read_data()
        return self._read[1]

    def records(self, run: ResolvedSpec) -> tuple[Records, Tensor, Tensor]:
        dataset = self.data(run)
        unit = run.privacy.unit, run.privacy.person_records, run.privacy.person_choice
        key = (id(dataset), run.partition, run.clients, run.source.split_seed, run.dtype, unit)
        if self._records is None or self._records[0] != key:
            records = run.records(dataset)
            test = torch.from_numpy(dataset.x_test).to(records.x), torch.from_numpy(dataset.y_test).to(self.device)
            self._records = key, records, *test
        return self._records[1:]


def _train(
    runs: list[ResolvedSpec],
    loader: _Loader,
    at: Sequence[int] | None,
    stop: int | None,
    metric: str | None,
    watch: Watch | None,
) -> Iterator[Trained]:
    records, x, y = loader.records(runs[0])
    data = loader.data(runs[0])
    model = runs[0].with_images(data).build_model(x.shape[-1], len(data.classes))
    metric = ranking_metric(metric, task_of(model))
    plans = [run.plan(records.sizes) for run in runs]
    method = together(runs, records.x)
    shared = [replace(plans[0], method=method), *plans[1:]] if len(runs) > 1 else plans[0]
    theta = model.init().expand(len(runs), -1) if len(runs) > 1 else model.init()
    sources = [_source(run, loader.device) for run in runs]
    bare = [stage.local.compute for stage in plans[0].stages] == [gradient]  # the aggregate is the noised gradient
    began, last = time.perf_counter(), min(stop or plans[0].rounds, plans[0].rounds)
    curves: dict[int, dict[str, list[float]]] = {}
    cpu_began, cpu_seconds = time.process_time(), dict[int, float]()
    watched: dict[int, list[dict[str, float]]] = {}
    norms: list[Tensor] = []
    aggregates: list[Tensor] = []  # whose norms are computed by one call
    sent = received = 0
    for this_round in simulate.run(shared, model, records, sources if len(runs) > 1 else sources[0], theta=theta):
        if at is None or this_round.t + 1 in at or this_round.t + 1 == last:
            paused = time.process_time()
            cpu_seconds[this_round.t + 1] = (paused - cpu_began) / len(runs)
            curves[this_round.t + 1] = _scores(model, this_round.model, x, y, metric, loader.data(runs[0]).unit)
            if watch is not None:
                each = this_round.model.reshape(len(runs), -1)
                watched[this_round.t + 1] = [watch(model, theta_of_run, records) for theta_of_run in each]
            cpu_began += time.process_time() - paused
        rule = plans[0].stages[plans[0].stage_of(this_round.t)].rule
        sent += numbers(this_round.aggregate) // len(runs)
        received += numbers((this_round.checkpoint[0], rule.broadcast(this_round.checkpoint[1]))) // len(runs)
        if bare and isinstance(this_round.aggregate, Tensor):
            aggregates.append(this_round.aggregate)
            if len(aggregates) * aggregates[0].numel() >= HELD_NUMBERS:
                norms.append(_norms(aggregates))
                aggregates = []
        if this_round.t + 1 == last:
            break
    norms += [_norms(aggregates)] if aggregates else []
    squares = torch.cat(norms).T.cpu().numpy() ** 2 if norms else np.zeros((len(runs), 0))
    seconds = (time.perf_counter() - began) / len(runs)
    for i, (run, plan) in enumerate(zip(runs, plans, strict=True)):
        final = this_round.model[i] if len(runs) > 1 else this_round.model
        noise = model.size * calibration.aggregate_std(plan, 0) ** 2
        signal = np.sqrt((squares[i] - noise).clip(min=0)) if bare else np.zeros(0)
        scores = {t: values[metric][i] for t, values in curves.items()}
        accuracy = {t: values["accuracy"][i] for t, values in curves.items() if "accuracy" in values}
        traffic, norms_of_run = (sent, received), tuple(signal.tolist())
        seen = {t: found[i] for t, found in watched.items()}
        known = (scores, accuracy, norms_of_run, traffic, seconds, cpu_seconds, seen)
        yield Trained(run, plan, model, final.cpu(), *known)


def _norms(aggregates: list[Tensor]) -> Tensor:
    """The norms of the aggregates: rounds x runs."""
    norms: Tensor = torch.linalg.vector_norm(torch.stack(aggregates), dim=-1, dtype=torch.float64)
    return norms.view(len(aggregates), -1)


def _scores(model: BuiltModel, theta: Tensor, x: Tensor, y: Tensor, metric: str, unit: float) -> dict[str, list[float]]:
    """The metric of every run, and accuracy for classes. What is not defined is NaN."""
    if metric == "accuracy":  # on the device
        return {metric: (model.predict(theta, x) == y).double().mean(-1).reshape(-1).tolist()}
    task = task_of(model)
    wanted = (metric, "accuracy") if task in (Task.TWO_CLASSES, Task.MANY_CLASSES) else (metric,)
    labels, predicted = in_units(task, y, predictions(model, theta, x), unit)
    runs = predicted if theta.dim() > 1 else predicted[None]
    each = [score(task, labels, one, wanted, edges=edges_of(model)) for one in runs]
    return {name: [math.nan if (v := one[name]) is None else v for one in each] for name in wanted}


def numbers(tree: Tree) -> int:
    """How many numbers a tree holds."""
    return sum(leaf.numel() for leaf in leaves(tree))


def together(runs: Sequence[ResolvedSpec], like: Tensor) -> Method:
    """One method for all runs. An option in which they differ is a tensor with as many axes after the runs as what it
    multiplies: parameters in the server's rule, clients and parameters in the clients' rule."""
    first = runs[0]
    differ = [key for key in entry(first.method_name).batch if len({run.options[key] for run in runs}) > 1]

    def built(axes: int) -> Method:
        columns = {key: like.new_tensor([run.options[key] for run in runs]) for key in differ}
        shaped = {key: column.reshape(-1, *[1] * axes) for key, column in columns.items()}
        method = build(first.method_name, first.privacy.unit, **{**first.options, **shaped})
        return first.adapted(with_clipping(method, first.clipping))

    server, clients = built(1), built(2)
    stages = [stage._replace(local=other.local) for stage, other in zip(server.stages, clients.stages, strict=True)]
    return server._replace(stages=tuple(stages))


def _source(run: ResolvedSpec, device: str) -> Source:
    if run.noiseless:
        return Noiseless(run.seed or 0)
    if device != "cpu" and run.seed is not None:
        return Counted(run.seed)
    return source(run.seed)
