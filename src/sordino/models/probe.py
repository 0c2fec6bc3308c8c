"""Checks of a module before it is trained: which mode fits it, and whether its per-example sums are correct."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.core import SAFETY, Shard
from sordino.errors import SordinoError
from sordino.models import per_example
from sordino.models.objective import Objective
from sordino.models.per_example import Owned, Use


class FlatModel(Protocol):
    """What the checks need of a model whose parameters are one flat vector (`torch_model.TorchModel`)."""

    module: nn.Module
    trained: dict[str, Tensor]
    shape: tuple[int, ...]
    features: int
    size: int
    outputs: int
    random: bool
    grouped: bool
    autocast: torch.dtype | None
    objective: Objective

    def shaped(self, x: Tensor) -> Tensor: ...

    def cast(self, theta: Tensor) -> Any: ...

    def split(self, theta: Tensor) -> Mapping[str, Tensor]: ...

    def instead(self, module: nn.Module, theta: Tensor, training: bool) -> AbstractContextManager[None]: ...

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor: ...


class Probed(NamedTuple):
    """What two rows reveal about a module."""

    random: bool  # two passes over the same rows differ, as with dropout, wherever the parameters are
    outputs: int
    mode: str  # the fastest mode that fits
    held: int  # numbers per example in the gradients that two-pass stores
    lasting: int  # the same on a GPU in half precision
    rest: int  # numbers per example of everything else


def probe(model: FlatModel, owned: Owned, ruled: bool) -> Probed:
    """Run two rows through the module.

    Args:
      model: the model.
      owned: the modules that own trained parameters.
      ruled: every layer has a rule in `per_example.RULES`.

    Returns:
      What the rows reveal.

    Raises:
      SordinoError: the module fails, does not return logits, or changes a buffer.
    """
    module, trained = model.module, model.trained
    first = next(iter(trained.values()))
    x, y = model.shaped(_rows_like(2, model.features).to(first)), model.objective.labels_of(torch.zeros(2), first)
    weights, saved = {tuple(sorted(p.shape)) for p in module.parameters()}, dict[int, int]()
    before = [buffer.clone() for buffer in module.buffers()]
    helps, wide, held, lasting = [False], [0], [0], [0]

    def visit(use: Use) -> None:
        short = per_example.short(use, 2)
        helps[0] |= short
        if hasattr(use.module, "kernel_size"):
            wide[0] = max(wide[0], math.prod(per_example.extent(use, 2)[:2]))  # of patches
        numbers = sum(trained[name].numel() for name in use.names.values())
        held[0] += 0 if short else numbers
        lasting[0] += 0 if per_example.half(use, 2) else numbers

    def keep(tensor: Tensor) -> Tensor:
        copied = tuple(sorted(tensor.shape)) in weights  # a parameter, or its copy in another type
        saved[tensor.data_ptr()] = 0 if copied else tensor.numel() // 2
        return tensor

    module.train()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.random.fork_rng([first.device] if first.is_cuda else []), model.cast(first), hooks:
        try:
            returned = [functional_call(module, trained, (x,)) for _ in range(2)]
        except SordinoError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise SordinoError(f"shape: the module fails on rows of shape {model.shape}: {error}") from error
        outs = [model.objective.read(each) for each in returned]
        if outs[0].dim() != 2 or len(outs[0]) != 2:
            raise SordinoError(
                f"module: it returns shape {tuple(outs[0].shape)} for two rows; it must return one row of logits each."
            )
        model.objective.check_losses(returned[0], y)
        try:
            per_example.sweep(module, trained, x, y, model.objective.total, visit, owned if ruled else [])
        except (RuntimeError, SordinoError):
            ruled = False
    if any(not torch.equal(old, new) for old, new in zip(before, module.buffers(), strict=True)):
        raise SordinoError("module: a buffer changes in training and would carry data around the clip; see group_norm.")
    better = helps[0] and model.autocast is None and not model.grouped
    mode = ("two-pass" if better else "tape") if ruled else "vmap"
    rest = 2 * sum(saved.values()) + wide[0]
    return Probed(not torch.equal(*outs) or _draws(model, x), outs[0].shape[1], mode, held[0], lasting[0], rest)


def _draws(model: FlatModel, x: Tensor) -> bool:
    """Whether two passes in training mode differ once the parameters have moved a little.

    Where they begin, adapters are zero and hide their dropout."""
    start = torch.cat([p.detach().flatten() for p in model.trained.values()])
    params = dict(model.split(_moved(start)))
    with torch.no_grad(), torch.random.fork_rng([start.device] if start.is_cuda else []):
        outs = [model.objective.read(functional_call(model.module, params, (x,))) for _ in range(2)]
    return not torch.equal(*outs)


def _moved(theta: Tensor) -> Tensor:
    """Parameters near theta: those that start at zero would hide the layers below them."""
    return theta + 0.01 * torch.randn(len(theta), generator=torch.Generator().manual_seed(0)).to(theta)


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations whose products have as many rows as the data say: selections, and groups of rows.

    `index` alone may have a shape that is known beforehand: it selects by numbers, or by a mask.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name == "aten.index.Tensor":
            masks = (torch.bool, torch.uint8)
            selects = any(isinstance(index, Tensor) and index.dtype in masks for index in args[1])
        else:
            selects = torch.Tag.dynamic_output_shape in func.tags
        if selects or "grouped_mm" in name:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def check_apart(model: FlatModel) -> None:
    """Refuse a module in which what is computed of one row depends on other rows, even in the last digit.

    The proof of the clip needs this by assumption (P) of docs/proofs.md: shapes depend on public numbers alone. Three
    passes change what the other rows hold, and nothing else. No position and no shape changes, so that a library that
    rounds by position or by blocks returns the same bits; equality is asked for in the type of the run. The operations
    of one pass are searched for shapes that depend on data, because few rows need not show what many would.

    Args:
      model: the model. Outputs are compared in evaluation mode, without dropout.

    Raises:
      SordinoError: a shape depends on data, or an output changes with another row.
    """
    first = next(iter(model.trained.values()))
    start = torch.cat([p.detach().flatten() for p in model.trained.values()])
    params, rows = dict(model.split(_moved(start))), _rows_like(4, model.features).to(first)
    seen, training = _Shapes(), model.module.training

    def run(x: Tensor) -> Tensor:
        return model.objective.read(functional_call(model.module, params, (model.shaped(x),)))

    mixes = [rows.clone(), rows.clone(), rows.clone()]
    mixes[0][1:] = 1.0
    mixes[1][1:] = rows[1:].flip(-1)
    mixes[2][1:] = rows[:1]
    model.module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([first.device] if first.is_cuda else []), model.cast(first):
            before, again = run(rows), run(rows)
            others = [run(mix) for mix in mixes]
            model.module.train()  # as in the passes of a run: some layers route in training alone
            with seen:
                run(rows)
    finally:
        model.module.train(training)
    if seen.found:
        raise SordinoError(
            f"module: the number of rows in {', '.join(sorted(seen.found))} depends on the data, as where a layer "
            "routes tokens to experts or selects rows by a mask. Rows then round differently with other records in the "
            "batch, which no clip bounds; use a module without experts, and torch.where in place of a mask."
        )
    steady = torch.equal(before, again)  # otherwise it draws numbers, or its kernels add in any order
    if steady and any(not torch.equal(before[0], other[0]) for other in others):
        raise SordinoError(
            "module: its output for one row depends on the other rows, which no clip bounds; keep rows separate."
        )


def agrees(model: FlatModel) -> bool:
    """Whether the sum of the chosen mode agrees with autograd row by row, on three rows in float64 without dropout."""
    module = copy.deepcopy(model.module).double().train()
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0
    theta = _moved(torch.cat([p.detach().flatten().double() for p in model.trained.values()]))
    params = {name: part.requires_grad_() for name, part in model.split(theta).items()}
    x, objective = _rows_like(3, model.features).to(theta), model.objective
    y = objective.labels_of(torch.arange(3) % max(2, model.outputs), theta)

    def run(rows: Tensor) -> Any:
        return functional_call(module, params, (model.shaped(rows),))

    train = not model.random or torch.equal(*(objective.read(run(x)) for _ in range(2)))
    module.train(train)  # some other kind of dropout: compare in evaluation mode
    alone = [run(row) for row in x]
    with torch.no_grad():
        together = run(x)
        if not torch.allclose(torch.cat([objective.read(z) for z in alone]), objective.read(together), 1e-4, 1e-6):
            raise SordinoError(
                "module: its output for one row depends on the other rows, which no clip bounds; keep rows separate."
            )
        each = torch.cat([objective.losses(z, label.reshape(1)) for z, label in zip(alone, y, strict=True)])
        if not torch.allclose(each, objective.losses(together, y), 1e-4, 1e-6):
            raise SordinoError(
                "loss: that of one record depends on other records, which no clip bounds; use its own row alone."
            )
    rows = []
    for z, label in zip(alone, y, strict=True):
        loss = objective.total(z, label.reshape(1))
        gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in gradients]))
    each, weight = torch.stack(rows), torch.tensor([1.0, 0.7, 0.4]).to(theta)
    norms = each.norm(dim=1)
    clip = float(norms.median())
    want = each.T @ (weight * (clip * (1 - SAFETY) / norms).clamp(max=1))
    try:  # with and without a scale: two ways through two-pass
        with model.instead(module, theta, train):
            scales = (None, torch.ones_like(theta))
            offs = [model.clipped_sum(theta, Shard(x, y, weight), clip, scale) - want for scale in scales]
    except (RuntimeError, SordinoError, TypeError):
        return False  # this mode does not support an operation
    pairs = [p for off in offs for p in zip(*(model.split(t).values() for t in (want, off)), strict=True)]
    return all(bool(off.norm() <= 1e-5 * part.norm() + 1e-7 * want.norm()) for part, off in pairs)


def input_shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of one row, read from the first layer."""
    first = next((part for part in module.modules() if not list(part.children())), None)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    raise SordinoError(
        "shape: the first layer does not determine the shape of a row; pass it, for example shape=(1, 28, 28). A "
        "function that builds a module for --model returns the pair (module, (1, 28, 28))."
    )


def _rows_like(n: int, features: int) -> Tensor:
    """Rows to try a module: positive numbers, which are token ids 0 and 1 for a module that reads tokens."""
    x = 0.5 + 1.49 * torch.rand(n, features, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 1 + x[:, 0] / 4
    return x
