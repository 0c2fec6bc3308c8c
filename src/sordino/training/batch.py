"""Many runs at once: those that share data and shape are one more tensor axis, and the features are read once for all.

Runs of one batch may differ in seed, epsilon and delta, and in those options of their method that `Entry.batch` names.
Everything else splits the batch. Each run keeps its own plan, and so its own account: a batch saves time, not privacy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import Method, Tree, Unit
from sordino.data.partition import split
from sordino.data.records import Records
from sordino.data.sources import Dataset
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import build, entry
from sordino.methods.fedgd import gradient
from sordino.models.linear import Linear, Loss
from sordino.models.nets import NETS
from sordino.models.torch_model import TorchModel
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Counted, Noiseless, Source, source
from sordino.privacy.plan import Plan
from sordino.training.run import choose_model, read
from sordino.training.spec import Spec
from sordino.tree import leaves

MOST = 64  # runs of a batch
OWN = ("seed", "epsilon", "delta")  # what runs of a batch may differ in, beside options


class Trained(NamedTuple):
    """What became of one run."""

    spec: Spec
    plan: Plan
    model: Linear | TorchModel
    theta: Tensor  # the model handed out at the end
    scores: dict[int, float]  # by round: accuracy on the test records
    signal: tuple[float, ...]  # per round, the norm of the aggregate less what noise adds to it; () where unknown
    traffic: tuple[int, int]  # numbers that a client that came every time sent, and got
    seconds: float  # its part of the batch's


def run_many(
    specs: Sequence[Spec],
    dataset: Dataset | None = None,
    *,
    device: str = "cpu",
    at: Sequence[int] | None = None,
    stop: int | None = None,
    most: int = MOST,
    tick: Callable[[int], None] = lambda runs: None,
) -> list[Trained]:
    """Train every spec; answers come in the order of the specs.

    dataset: at hand already, for all of them. device: on `cuda`, seeds drive a stream that is drawn there. at: rounds
    to evaluate after (default: all). stop: train so many rounds only. most: runs of a batch, which bounds memory. tick:
    called with the number of runs that were finished.
    """
    specs = [spec.resolved() for spec in specs]
    batches: dict[tuple[Any, ...], list[int]] = {}
    for number, spec in enumerate(specs):
        batches.setdefault(_shape(spec), []).append(number)
    loader, answers = _Loader(dataset, device), dict[int, Trained]()
    for members in batches.values():
        few = 1 if specs[members[0]].model in NETS else most  # a network fills a machine; adapters share theirs
        for first in range(0, len(members), few):
            part = members[first : first + few]
            answers |= zip(part, _train([specs[i] for i in part], loader, at, stop), strict=True)
            tick(len(part))
    return [answers[i] for i in range(len(specs))]


def _shape(spec: Spec) -> tuple[Any, ...]:
    """Equal for runs that fit one batch."""
    own = {*OWN, *entry(spec.method).batch}
    if spec.participation == "full":
        own.add("schedule_seed")
    rest = {k: str(v) for k, v in spec.values().items() if k not in own}
    return (*sorted(rest.items()), spec.epsilon == float("inf"), spec.seed is None)


class _Loader:
    """Data and partitions, read once and laid on the device once."""

    def __init__(self, dataset: Dataset | None, device: str) -> None:
        self.given, self.device = dataset, device
        self.read: tuple[Any, Dataset] | None = None
        self.laid: tuple[Any, Records, Tensor, Tensor] | None = None

    def data(self, spec: Spec) -> Dataset:
        if self.given is not None:
            return self.given
        column = spec.partition if spec.partition.startswith("by-column") else ""
        file = (spec.data, spec.data_dir, spec.label, spec.test_fraction, spec.public_stats, spec.normalize)
        key = (*file, spec.split_seed, column)
        if self.read is None or self.read[0] != key:
            self.read = key, read(spec)
        return self.read[1]

    def records(self, spec: Spec) -> tuple[Records, Tensor, Tensor]:
        dataset = self.data(spec)
        key = (id(dataset), spec.partition, spec.clients, spec.sizes, spec.split_seed, spec.dtype)
        if self.laid is None or self.laid[0] != key:
            client = split(dataset, spec.partition, spec.clients, sizes=spec.sizes, seed=spec.split_seed)
            records = Records.of(dataset.x_train, dataset.y_train, client, dtype=spec.number, device=self.device)
            test = torch.from_numpy(dataset.x_test).to(records.x), torch.from_numpy(dataset.y_test).to(self.device)
            self.laid = key, records, *test
        return self.laid[1:]


def _train(specs: list[Spec], loader: _Loader, at: Sequence[int] | None, stop: int | None) -> Iterator[Trained]:
    records, x, y = loader.records(specs[0])
    model = choose_model(specs[0], loader.data(specs[0]))
    if getattr(model, "kind", Loss.SOFTMAX) not in (Loss.SOFTMAX, Loss.LOGISTIC):
        raise SordinoError("data: runs are compared by accuracy; labels that are quantities have none.")
    plans = [spec.plan(records.sizes) for spec in specs]
    method = together(specs, records.x)
    shared = [replace(plans[0], method=method), *plans[1:]] if len(specs) > 1 else plans[0]
    theta = model.init().expand(len(specs), -1) if len(specs) > 1 else model.init()
    sources = [_source(spec, loader.device) for spec in specs]
    bare = [stage.local.compute for stage in plans[0].stages] == [gradient]  # the aggregate is the noised gradient
    began, last = time.perf_counter(), min(stop or plans[0].rounds, plans[0].rounds)
    curves: dict[int, Tensor] = {}
    norms: list[Tensor] = []
    sent = got = 0
    for this_round in simulate.run(shared, model, records, sources if len(specs) > 1 else sources[0], theta=theta):
        if at is None or this_round.t + 1 in at or this_round.t + 1 == last:
            curves[this_round.t + 1] = (model.predict(this_round.model, x) == y).double().mean(-1).reshape(-1)
        rule = plans[0].stages[plans[0].stage_of(this_round.t)].rule
        sent += numbers(this_round.aggregate) // len(specs)
        got += numbers((this_round.checkpoint[0], rule.broadcast(this_round.checkpoint[1]))) // len(specs)
        if bare and isinstance(this_round.aggregate, Tensor):
            norms.append(this_round.aggregate.double().square().sum(-1).reshape(-1))
        if this_round.t + 1 == last:
            break
    squares = torch.stack(norms, -1).cpu().numpy() if norms else np.zeros((len(specs), 0))
    scores = {t: values.tolist() for t, values in curves.items()}
    seconds = (time.perf_counter() - began) / len(specs)
    for i, (spec, plan) in enumerate(zip(specs, plans, strict=True)):
        own = this_round.model[i] if len(specs) > 1 else this_round.model
        noise = model.size * calibration.aggregate_std(plan, 0) ** 2
        signal = np.sqrt((squares[i] - noise).clip(min=0)) if bare else np.zeros(0)
        by_round = {t: values[i] for t, values in scores.items()}
        yield Trained(spec, plan, model, own.cpu(), by_round, tuple(signal.tolist()), (sent, got), seconds)


def numbers(tree: Tree) -> int:
    return sum(leaf.numel() for leaf in leaves(tree))


def together(specs: Sequence[Spec], like: Tensor) -> Method:
    """One method for all runs. What differs between them is a tensor with as many axes after the runs as what it
    multiplies: parameters in the server's rule, clients and parameters in the clients'."""
    known = entry(specs[0].method)
    options = {**known.options, **specs[0].options}
    differ = [key for key in known.batch if len({spec.options.get(key, options[key]) for spec in specs}) > 1]

    def built(axes: int) -> Method:
        columns = {key: like.new_tensor([spec.options.get(key, options[key]) for spec in specs]) for key in differ}
        shaped = {key: column.reshape(-1, *[1] * axes) for key, column in columns.items()}
        return build(specs[0].method, Unit(specs[0].unit), **{**specs[0].options, **shaped})

    server, clients = built(1), built(2)
    stages = [mine._replace(local=own.local) for mine, own in zip(server.stages, clients.stages, strict=True)]
    return server._replace(stages=tuple(stages))


def _source(spec: Spec, device: str) -> Source:
    if spec.epsilon == float("inf") and spec.noise is None:
        return Noiseless(spec.seed or 0)
    if device != "cpu" and spec.seed is not None:
        return Counted(spec.seed)
    return source(spec.seed)
