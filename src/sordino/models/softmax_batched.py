"""Many softmax models over the same records: the records are read once for all of them.

Runs are the last axis, beside the classes: two wide matrix products take the place of two narrow ones per run, and sums
over classes run along whole rows of memory. Records come in chunks, so that memory is bounded and a chunk stays in
cache. Compiled, the part between the products is one kernel on a GPU. On a CPU `Linear` takes runs one by one instead.
The second product is float64, and no shape depends on the data: docs/numerics.md says why.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor

from sordino.core import Shard
from sordino.models.arithmetic import product_rows

CHUNK_NUMBERS = {"cpu": 2**20, "cuda": 2**28}  # numbers in memory at once
MIN_CHUNK_RECORDS = 512
MAX_UNROLLED_CLASSES = 32  # classes that a compiled kernel goes through one by one
MIN_PROBABILITY = 1e-20  # smaller probabilities count as 0, because subnormal products are slow


def clipped_sums(theta: Tensor, shard: Shard, length: Tensor, bound: float, outputs: int) -> Tensor:
    """The sum of clipped gradients for every run. Records that are not finite contribute zero.

    Args:
      theta: runs x … x parameters, with a bias.
      shard: the records, without the axis of runs.
      length: the norm of (x, 1) of every record.
      bound: on the norm of one gradient.
      outputs: number of classes.

    Returns:
      The sums in float64.
    """
    runs, lead, rows = len(theta), shard.x.shape[:-2], shard.x.shape[-2]
    wide = theta.expand(runs, *lead, theta.shape[-1]).reshape(runs, *lead, -1, outputs)
    W = wide.movedim(0, -1).flatten(-2) * math.log2(math.e)
    width = W.shape[-2]
    pad = -width % 4 if theta.is_cuda else 0  # kernels for rows of whole vectors are faster
    W = torch.nn.functional.pad(W, (0, 0, 0, pad))
    total = torch.zeros_like(W, dtype=torch.float64)
    fit = CHUNK_NUMBERS.get(theta.device.type, 2**20) // (W.shape[-1] * math.prod(lead))
    step = product_rows(rows, max(MIN_CHUNK_RECORDS, fit))
    fine = torch.isfinite(length)  # the length is finite if and only if x is
    mask, length = torch.where(fine, shard.mask, 0.0), torch.where(fine, length, 1.0)
    cut = _compiled() if theta.is_cuda and outputs <= MAX_UNROLLED_CLASSES else cut_residuals
    for first in range(0, rows, step):
        here = slice(first, first + step)
        x = torch.where(fine[..., here].unsqueeze(-1), shard.x[..., here, :], 0.0)
        u = torch.cat([x, torch.ones_like(x[..., :1]), x.new_zeros(*x.shape[:-1], pad)], -1)
        z = (u @ W).view(*u.shape[:-1], outputs, runs)
        r = cut(z, shard.y[..., here], length[..., here], mask[..., here], bound).flatten(-2)
        if lead:
            total += u.double().transpose(-1, -2) @ r
        else:
            total.addmm_(u.double().T, r)
    total = total[..., :width, :]
    return total.reshape(*total.shape[:-1], outputs, runs).movedim(-1, 0).flatten(-2)


def cut_residuals(z: Tensor, y: Tensor, length: Tensor, mask: Tensor, bound: float) -> Tensor:
    """Residuals in float64, from logits to base 2 (records x classes x runs), times each record's factor."""
    r = z.sub_(z.amax(-2, keepdim=True)).exp2_()
    r = torch.threshold_(r.mul_(r.sum(-2, keepdim=True).reciprocal_()), MIN_PROBABILITY, 0.0)
    classes = torch.arange(r.shape[-2], device=r.device)
    r = r.sub_((y.unsqueeze(-1) == classes).to(r.dtype).unsqueeze(-1)).double()
    factor = mask.unsqueeze(-1).double()
    if math.isfinite(bound):
        norm = torch.linalg.vector_norm(r, dim=-2) * length.double().unsqueeze(-1)
        factor = factor * (bound / norm.clamp_min_(bound))
    usable = (torch.isfinite(factor) & (mask.unsqueeze(-1) != 0)).unsqueeze(-2) & torch.isfinite(r)
    return torch.where(usable, r.mul_(factor.unsqueeze(-2)), 0.0)


def unrolled(z: Tensor, y: Tensor, length: Tensor, mask: Tensor, bound: float) -> Tensor:
    """`cut_residuals`, class by class and without sums along an axis, so that it compiles to one pass over memory.

    Squares are added in float32: the sum of at most MAX_UNROLLED_CLASSES of them has a relative error of 2e-6, well
    within SAFETY.
    """
    logits = z.unbind(-2)
    top = functools.reduce(torch.maximum, logits)
    powers = [torch.exp2(each - top) for each in logits]
    scale = 1 / sum(powers[1:], powers[0])
    mine = y.unsqueeze(-1)
    r = [power * scale - (mine == k).to(z.dtype) for k, power in enumerate(powers)]
    factor = mask.unsqueeze(-1).double()
    if math.isfinite(bound):
        # Squares of small residuals underflow. The floor replaces their norm, which is then never too small.
        squares = sum((each.square() for each in r[1:]), r[0].square())
        norm = squares.sqrt().clamp_min(1e-15).double() * length.double().unsqueeze(-1)
        factor = (bound / norm).clamp_max(1) * factor
    usable = torch.isfinite(factor) & torch.isfinite(scale) & (mask.unsqueeze(-1) != 0)
    return torch.stack([torch.where(usable, each.double() * factor, 0.0) for each in r], -2)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(unrolled) if importlib.util.find_spec("triton") else unrolled
