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


def clipped_sums(theta: Tensor, shard: Shard, length: Tensor, clip: float, outputs: int, shift: bool) -> Tensor:
    """The sum of clipped gradients for every run of theta (runs x … x parameters, with a bias), of records without
    that axis. `length`: of (x, 1). `shift`: logits may be large. Records that are not finite contribute zero."""
    runs, lead, rows = len(theta), shard.x.shape[:-2], shard.x.shape[-2]
    wide = theta.expand(runs, *lead, theta.shape[-1]).reshape(runs, *lead, -1, outputs)
    W = wide.movedim(0, -1).flatten(-2) * math.log2(math.e)
    weight, bias = W[..., :-1, :].contiguous(), W[..., -1:, :]
    total = torch.zeros_like(W)
    step = max(1, CHUNK.get(theta.device.type, 2**20) // (W.shape[-1] * math.prod(lead)))
    bounded = _compiled() if theta.is_cuda else cut
    mask = shard.mask * (length <= clip / torch.finfo(theta.dtype).tiny)  # a longer record's residual would underflow
    for first in range(0, rows, step):
        here = slice(first, first + step)
        x, usable = shard.x[..., here, :], mask[..., here]
        if theta.is_cuda:  # asking whether something is not finite would stop the queue; mending it does not
            fine = torch.isfinite(x).all(-1)
            x, usable = torch.where(fine.unsqueeze(-1), x, 0), usable * fine
        z = torch.addmm(bias[0], x, weight) if not lead else x @ weight + bias
        r = bounded(z.view(*z.shape[:-1], outputs, runs), shard.y[..., here], length[..., here], usable, clip, shift)
        r = r.flatten(-2)
        if lead:
            total[..., :-1, :] += x.transpose(-1, -2) @ r
        else:
            total[:-1].addmm_(x.T, r)
        total[..., -1, :] += r.sum(-2)
    return total.view(*total.shape[:-1], outputs, runs).movedim(-1, 0).flatten(-2)


def cut(z: Tensor, y: Tensor, length: Tensor, mask: Tensor, clip: float, shift: bool) -> Tensor:
    """Residuals, from logits to base 2 (records x classes x runs), times each record's factor. `Linear._sum` says why
    the factor is made as it is."""
    tiny = torch.finfo(z.dtype).tiny
    r = z.sub_(z.amax(-2, keepdim=True)).exp2_() if shift else z.exp2_()
    r = r.mul_(r.sum(-2, keepdim=True).reciprocal_())
    classes = torch.arange(r.shape[-2], device=r.device)
    r = r.sub_((y.unsqueeze(-1) == classes).to(r.dtype).unsqueeze(-1))
    factor = mask.unsqueeze(-1)
    if math.isfinite(clip):
        wide = torch.float64 if r.shape[-2] > 64 else r.dtype
        norm = r.square().sum(-2, dtype=wide).sqrt_().to(r.dtype).clamp_min_(tiny**0.4).mul_(length.unsqueeze(-1))
        factor = torch.threshold_(torch.div(clip * (1 - SAFETY), norm).clamp_max_(1), tiny, 0.0).mul_(factor)
    r = r.mul_(factor.unsqueeze(-2))
    return torch.where(torch.isfinite(r), r, 0) if r.is_cuda else r


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(cut) if importlib.util.find_spec("triton") else cut
    return compiled
