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

from sordino.core import SAFETY, Shard
from sordino.errors import SordinoError
from sordino.models import per_example
from sordino.models.per_example import Owned, Use, summed


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

    def shaped(self, x: Tensor) -> Tensor: ...

    def cast(self, theta: Tensor) -> Any: ...

    def split(self, theta: Tensor) -> Mapping[str, Tensor]: ...

    def instead(self, module: nn.Module, theta: Tensor, training: bool) -> AbstractContextManager[None]: ...

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor: ...


class Probed(NamedTuple):
    """What two rows reveal about a module."""

    random: bool  # two passes over the same rows differ, as with dropout
    outputs: int
    mode: str  # the fastest mode that fits
    held: int  # numbers per example in the gradients that two-pass stores
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
    x, y = model.shaped(_rows_like(2, model.features).to(first)), torch.zeros(2, dtype=torch.long, device=first.device)
    weights, saved = {p.data_ptr() for p in module.parameters()}, dict[int, int]()
    before = [buffer.clone() for buffer in module.buffers()]
    helps, wide, held = [False], [0], [0]

    def visit(use: Use) -> None:
        short = per_example.short(use, 2)
        helps[0] |= short
        if hasattr(use.module, "kernel_size"):
            wide[0] = max(wide[0], math.prod(per_example.extent(use, 2)[:2]))  # of patches
        held[0] += 0 if short else sum(trained[name].numel() for name in use.names.values())

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = 0 if tensor.data_ptr() in weights else tensor.numel() // 2
        return tensor

    module.train()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.random.fork_rng([first.device] if first.is_cuda else []), model.cast(first), hooks:
        try:
            outs = [functional_call(module, trained, (x,)) for _ in range(2)]
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise SordinoError(f"shape: the module fails on rows of shape {model.shape}: {error}") from error
        if not isinstance(outs[0], Tensor):
            raise SordinoError(
                f"module: it returns a {type(outs[0]).__name__} for two rows; it must return one tensor with logits "
                "per record. Wrap it in a module that returns only the logits."
            )
        try:
            per_example.sweep(module, trained, x, y, summed, visit, owned if ruled else [])
        except (RuntimeError, SordinoError):
            ruled = False
    if any(not torch.equal(old, new) for old, new in zip(before, module.buffers(), strict=True)):
        raise SordinoError("module: a buffer changes in training and would carry data around the clip; see group_norm.")
    if outs[0].dim() != 2 or len(outs[0]) != 2:
        raise SordinoError(
            f"module: it returns shape {tuple(outs[0].shape)} for two rows; it must return one row of logits each."
        )
    better = helps[0] and model.autocast is None and not model.grouped
    mode = ("two-pass" if better else "tape") if ruled else "vmap"
    return Probed(not torch.equal(*outs), outs[0].shape[1], mode, held[0], 2 * sum(saved.values()) + wide[0])


def agrees(model: FlatModel) -> bool:
    """Whether the sum of the chosen mode agrees with autograd row by row, on three rows in float64 without dropout."""
    module = copy.deepcopy(model.module).double().train()
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    theta = torch.cat([p.detach().flatten().double() for p in model.trained.values()])
    # Moved a little, because parameters that start at zero would hide the layers below them.
    theta += 0.01 * torch.randn(model.size, generator=torch.Generator().manual_seed(0)).to(theta)
    params = {name: part.requires_grad_() for name, part in model.split(theta).items()}
    x, y = _rows_like(3, model.features).to(theta), (torch.arange(3) % model.outputs).to(theta.device)

    def logits(rows: Tensor) -> Tensor:
        z: Tensor = functional_call(module, params, (model.shaped(rows),))
        return z

    train = not model.random or torch.equal(logits(x), logits(x))
    module.train(train)  # some other kind of dropout: compare in evaluation mode
    alone = [logits(row) for row in x]
    with torch.no_grad():
        if not torch.allclose(torch.cat(alone), logits(x), 1e-4, 1e-6):
            raise SordinoError(
                "module: its output for one row depends on the other rows, which no clip bounds; keep rows separate."
            )
    rows = []
    for z, label in zip(alone, y, strict=True):
        loss = summed(z, label.reshape(1))
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
