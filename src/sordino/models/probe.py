"""What a model of flat parameters learns about its module before it is used: a look at two rows, and a check."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sordino.core import SAFETY, Shard
from sordino.errors import SordinoError
from sordino.models import per_example
from sordino.models.per_example import Owned, Use, summed

if TYPE_CHECKING:
    from sordino.models.torch_model import TorchModel


class Probed(NamedTuple):
    """Is it random, how many outputs, which mode is best; numbers that one example keeps."""

    random: bool
    outputs: int
    mode: str
    held: int  # gradients in two-pass
    rest: int  # all else


def probe(flat: TorchModel, owned: Owned, ruled: bool) -> Probed:
    """Two rows tried."""
    module, trained = flat.module, flat.trained
    first = next(iter(trained.values()))
    x, y = flat.seen(_rows_like(2, flat.features).to(first)), torch.zeros(2, dtype=torch.long, device=first.device)
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
    kept = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.random.fork_rng([first.device] if first.is_cuda else []), flat.cast(first), kept:
        try:
            outs = [functional_call(module, trained, (x,)) for _ in range(2)]
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise SordinoError(f"shape: the module fails on rows of shape {flat.shape}: {error}") from error
        if not isinstance(outs[0], Tensor):
            raise SordinoError(
                f"module: gives a {type(outs[0]).__name__} for two rows; it must give one tensor, a row of logits per "
                "record. Wrap it in a module that returns the logits alone."
            )
        try:
            per_example.sweep(module, trained, x, y, summed, visit, owned if ruled else [])
        except (RuntimeError, SordinoError):
            ruled = False
    if any(not torch.equal(old, new) for old, new in zip(before, module.buffers(), strict=True)):
        raise SordinoError("module: a buffer changes in training and would carry data past the clip; see group_norm.")
    if outs[0].dim() != 2 or len(outs[0]) != 2:
        raise SordinoError(f"module: gives {tuple(outs[0].shape)} for two rows; it must give a row of logits each.")
    better = helps[0] and flat.autocast is None and not flat.grouped
    mode = ("two-pass" if better else "tape") if ruled else "vmap"
    return Probed(not torch.equal(*outs), outs[0].shape[1], mode, held[0], 2 * sum(saved.values()) + wide[0])


def agrees(flat: TorchModel) -> bool:
    """Three rows in float64, dropout off: the sum of the chosen mode against autograd, a row at a time."""
    module = copy.deepcopy(flat.module).double().train()
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    theta = torch.cat([p.detach().flatten().double() for p in flat.trained.values()])
    # Moved a little: what starts at zero would hide what lies below it.
    theta += 0.01 * torch.randn(flat.size, generator=torch.Generator().manual_seed(0)).to(theta)
    params = {name: part.requires_grad_() for name, part in flat.split(theta).items()}
    x, y = _rows_like(3, flat.features).to(theta), (torch.arange(3) % flat.outputs).to(theta.device)

    def say(rows: Tensor) -> Tensor:
        z: Tensor = functional_call(module, params, (flat.seen(rows),))
        return z

    train = not flat.random or torch.equal(say(x), say(x))
    module.train(train)  # dropout of another make: compare as it predicts
    alone = [say(row) for row in x]
    with torch.no_grad():
        if not torch.allclose(torch.cat(alone), say(x), 1e-4, 1e-6):
            raise SordinoError(
                "module: what it says of a row depends on the other rows, which no clip bounds; serve each alone."
            )
    rows = []
    for z, label in zip(alone, y, strict=True):
        loss = summed(z, label.reshape(1))
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in found]))
    each, weight = torch.stack(rows), torch.tensor([1.0, 0.7, 0.4]).to(theta)
    norms = each.norm(dim=1)
    clip = float(norms.median())
    want = each.T @ (weight * (clip * (1 - SAFETY) / norms).clamp(max=1))
    try:  # with and without a scale: two ways through two-pass
        with flat.instead(module, theta, train):
            scales = (None, torch.ones_like(theta))
            offs = [flat.clipped_sum(theta, Shard(x, y, weight), clip, scale) - want for scale in scales]
    except (RuntimeError, SordinoError, TypeError):
        return False  # an operation that this mode cannot follow
    pairs = [p for off in offs for p in zip(*(flat.split(t).values() for t in (want, off)), strict=True)]
    return all(bool(off.norm() <= 1e-5 * part.norm() + 1e-7 * want.norm()) for part, off in pairs)


def given(module: nn.Module) -> tuple[int, ...]:
    """The shape of a row, where the first layer says it."""
    first = next((part for part in module.modules() if not list(part.children())), None)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    raise SordinoError("shape: cannot tell what the module reads; give the shape of one row, as in (1, 28, 28).")


def _rows_like(n: int, features: int) -> Tensor:
    """Rows for trying a module: positive, and token numbers 0 and 1 where it reads tokens."""
    x = 0.5 + 1.49 * torch.rand(n, features, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 1 + x[:, 0] / 4
    return x
