"""Many softmax models over the same records: the records are read once for all of them.

Runs are the last axis, beside the classes: two wide matrix products take the place of two narrow ones a run, and sums
over classes run along whole rows of memory. Records come in chunks, so that memory is bounded and a chunk stays in
cache. Compiled, the part between the products is one kernel on a GPU; on a CPU it was slower than as it stands.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor

from sordino.core import SAFETY, Shard

CHUNK = {"cpu": 2**20, "cuda": 2**28}  # numbers held at once
UNROLLED = 32  # classes that a compiled kernel goes through one by one
MODERATE = 100.0  # powers of two up to this, and sums of them, are far from the ends of float32


def clipped_sums(
    theta: Tensor, shard: Shard, length: Tensor, clip: float, outputs: int, shift: bool, mend: bool = False
) -> Tensor:
    """The sum of clipped gradients for every run of theta (runs x … x parameters, with a bias), of records without
    that axis. `length`: of (x, 1). `shift`: logits may be large. Records that are not finite contribute zero.

    mend: look for such records. On a CPU that is done, all else alike, where the sum is found not to be finite; asking
    would stop a GPU's queue, mending does not."""
    mend = mend or theta.is_cuda
    runs, lead, rows = len(theta), shard.x.shape[:-2], shard.x.shape[-2]
    wide = theta.expand(runs, *lead, theta.shape[-1]).reshape(runs, *lead, -1, outputs)
    W = wide.movedim(0, -1).flatten(-2) * math.log2(math.e)
    width = W.shape[-2]
    pad = -width % 4 if theta.is_cuda else 0  # kernels for rows of whole vectors are faster
    W = torch.nn.functional.pad(W, (0, 0, 0, pad))
    total = torch.zeros_like(W)
    step = max(1, CHUNK.get(theta.device.type, 2**20) // (W.shape[-1] * math.prod(lead)))
    # A record's residual would underflow where it is too long. A length that is not finite tells of an x that is not.
    mask = shard.mask * (length <= clip / torch.finfo(theta.dtype).tiny) * torch.isfinite(length)
    for first in range(0, rows, step):
        here = slice(first, first + step)
        x = shard.x[..., here, :]
        if mend:
            x = torch.where(torch.isfinite(length[..., here]).unsqueeze(-1), x, 0)
        u = torch.cat([x, torch.ones_like(x[..., :1]), x.new_zeros(*x.shape[:-1], pad)], -1)
        z = (u @ W).view(*u.shape[:-1], outputs, runs)
        bounded = _compiled() if theta.is_cuda and outputs <= UNROLLED else cut
        r = bounded(z, shard.y[..., here], length[..., here], mask[..., here], clip, shift)
        r = (torch.where(torch.isfinite(r), r, 0) if mend else r).flatten(-2)
        if lead:
            total += u.transpose(-1, -2) @ r
        else:
            total.addmm_(u.T, r)
    if not mend and not torch.isfinite(total).all():
        return clipped_sums(theta, shard, length, clip, outputs, shift, mend=True)
    total = total[..., :width, :]
    return total.reshape(*total.shape[:-1], outputs, runs).movedim(-1, 0).flatten(-2)


def shifted(z: Tensor, axis: int) -> Tensor:
    """Logits to base 2, in place, less the largest of the same record where one of them is far from zero (or is none).

    Each record decides for itself: were all shifted because of one, that one would change how the others are rounded,
    and a small clip makes rounding as large as itself.
    """
    if not z.is_cuda:  # asking would stop a queue
        low, high = z.aminmax()
        if low > -MODERATE and high < MODERATE:
            return z
    top = z.amax(axis, keepdim=True)
    near = (z.amin(axis, keepdim=True) > -MODERATE) & (top < MODERATE)
    return z.sub_(top.masked_fill_(near, 0))


def cut(z: Tensor, y: Tensor, length: Tensor, mask: Tensor, clip: float, shift: bool) -> Tensor:
    """Residuals, from logits to base 2 (records x classes x runs), times each record's factor. `Linear._sum` says why
    the factor is made as it is."""
    tiny = torch.finfo(z.dtype).tiny
    r = (shifted(z, -2) if shift else z).exp2_()
    r = r.mul_(r.sum(-2, keepdim=True).reciprocal_())
    classes = torch.arange(r.shape[-2], device=r.device)
    r = r.sub_((y.unsqueeze(-1) == classes).to(r.dtype).unsqueeze(-1))
    factor = mask.unsqueeze(-1)
    if math.isfinite(clip):
        wide = torch.float64 if r.shape[-2] > 64 else r.dtype
        norm = r.square().sum(-2, dtype=wide).sqrt_().to(r.dtype).clamp_min_(tiny**0.4).mul_(length.unsqueeze(-1))
        factor = torch.threshold_(torch.div(clip * (1 - SAFETY), norm).clamp_max_(1), tiny, 0.0).mul_(factor)
    return r.mul_(factor.unsqueeze(-2))


def unrolled(z: Tensor, y: Tensor, length: Tensor, mask: Tensor, clip: float, shift: bool) -> Tensor:
    """`cut`, class by class and without sums along an axis, so that it compiles to one pass over memory."""
    tiny = torch.finfo(z.dtype).tiny
    logits = z.unbind(-2)
    top = functools.reduce(torch.maximum, logits)
    powers = [torch.exp2(each - top) for each in logits]
    scale = 1 / sum(powers[1:], powers[0])
    mine = y.unsqueeze(-1)
    r = [power * scale - (mine == k).to(z.dtype) for k, power in enumerate(powers)]
    factor = mask.unsqueeze(-1)
    if math.isfinite(clip):
        squares = sum((each.square() for each in r[1:]), r[0].square())
        norm = squares.sqrt().clamp_min(tiny**0.4) * length.unsqueeze(-1)
        bound = (clip * (1 - SAFETY) / norm).clamp_max(1)
        factor = torch.where(bound > tiny, bound, 0) * factor
    usable = torch.isfinite(factor) & torch.isfinite(scale) & (mask.unsqueeze(-1) != 0)
    return torch.stack([torch.where(usable, each * factor, 0) for each in r], -2)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(unrolled) if importlib.util.find_spec("triton") else unrolled
