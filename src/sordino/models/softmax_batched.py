"""Many softmax models over the same records: the records are read once for all of them.

Runs are the last axis, beside the classes: two wide matrix products take the place of two narrow ones per run, and sums
over classes run along whole rows of memory. Records come in chunks, so that memory is bounded and a chunk stays in
cache. Compiled, the part between the products is one kernel on a GPU. On a CPU `Linear` takes runs one by one instead.
The second product is float64, and no shape depends on the data: docs/numerics.md says why.

On a GPU the logits are one product of bfloat16 numbers with float32 sums: digits of both factors side by side, all
pairs but those below the last digit of float32. Matrix units compute it, in half of the time of a float32 product. Any
rounding of logits keeps the clip, because a residual is measured as it is summed.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sordino.core import Shard
from sordino.models.arithmetic import product_rows

CHUNK_NUMBERS = {"cpu": 2**20, "cuda": 2**28}  # numbers in memory at once
HELD_NUMBERS = 2**27  # of records, which take 20 bytes each in the form that the products read
MIN_CHUNK_RECORDS = 512
MAX_UNROLLED_CLASSES = 32  # classes that a compiled kernel goes through one by one
DIGITS_MASK = -(2**16)  # the bits of a float32 number that bfloat16 keeps
PAIRS = ((0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (1, 1))  # digits of the left and of the right factor, from the largest
MIXED_PRODUCTS = (2, 8)  # the first PyTorch with an `out_dtype` of products
MATRIX_UNITS = (8, 0)  # the first compute capability with bfloat16
MIN_PROBABILITY = 1e-20  # smaller probabilities count as 0, because subnormal products are slow


class Chunk(NamedTuple):
    """Some of the records, as the products read them."""

    left: Tensor  # factor of the logits: rows (x, 1, 0 …), or their digits side by side
    rows: Tensor  # (x, 1, 0 …) in float64
    y: Tensor
    length: Tensor
    mask: Tensor


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
    return summing(shard, length, bound, outputs, len(theta), hold=False)(theta)


def summing(
    shard: Shard, length: Tensor, bound: float, outputs: int, runs: int, *, hold: bool = True
) -> Callable[[Tensor], Tensor]:
    """`clipped_sums` as a function of theta. `hold`: up to HELD_NUMBERS numbers are laid out once, for all calls."""
    lead, rows, cuda = shard.x.shape[:-2], shard.x.shape[-2], shard.x.is_cuda
    features = shard.x.shape[-1]
    pad = -(features + 1) % 4 if cuda else 0  # kernels for rows of whole vectors are faster
    by_digits = cuda and not lead and shard.x.dtype is torch.float32 and _mixed_products()
    fit = CHUNK_NUMBERS.get(shard.x.device.type, 2**20) // (outputs * runs * math.prod(lead))
    step = product_rows(rows, max(MIN_CHUNK_RECORDS, fit))
    fine = torch.isfinite(length)  # the length is finite if and only if x is
    mask, length = torch.where(fine, shard.mask, 0.0), torch.where(fine, length, 1.0)

    def chunk(first: int) -> Chunk:
        here = slice(first, first + step)
        x = torch.where(fine[..., here].unsqueeze(-1), shard.x[..., here, :], 0.0)
        u = torch.cat([x, torch.ones_like(x[..., :1]), x.new_zeros(*x.shape[:-1], pad)], -1)
        left = torch.cat([digits(u)[k] for k, _ in PAIRS], -1) if by_digits else u
        return Chunk(left, u.double(), shard.y[..., here], length[..., here], mask[..., here])

    firsts = range(0, rows, step)
    held = [chunk(first) for first in firsts] if hold and shard.x.numel() <= HELD_NUMBERS else None
    cut = compiled(unrolled) if cuda and outputs <= MAX_UNROLLED_CLASSES else cut_residuals
    lay = compiled(digits_of_factor) if by_digits else factor_of_logits

    def sums(theta: Tensor) -> Tensor:
        W = lay(theta.expand(runs, *lead, theta.shape[-1]).reshape(runs, *lead, features + 1, outputs), pad)
        total = None
        for left, u, y, lengths, masks in map(chunk, firsts) if held is None else held:
            z = torch.mm(left, W, out_dtype=torch.float32) if by_digits else left @ W
            r = cut(z.view(*u.shape[:-1], outputs, runs), y, lengths, masks, bound).flatten(-2)
            if total is None:
                total = u.transpose(-1, -2) @ r
            elif lead:
                total += u.transpose(-1, -2) @ r
            else:
                total.addmm_(u.T, r)
        if total is None:
            total = theta.new_zeros(*lead, features + 1, W.shape[-1], dtype=torch.float64)
        total = total[..., : features + 1, :]
        return total.reshape(*total.shape[:-1], outputs, runs).movedim(-1, 0).flatten(-2)

    return sums


def factor_of_logits(wide: Tensor, pad: int) -> Tensor:
    """The right factor of the product that gives logits to base 2: … x (features + pad) x (outputs x runs)."""
    return torch.nn.functional.pad(wide.movedim(0, -1).flatten(-2) * math.log2(math.e), (0, 0, 0, pad))


def digits_of_factor(wide: Tensor, pad: int) -> Tensor:
    """The digits of `factor_of_logits`, one below the other."""
    W = factor_of_logits(wide, pad)
    return torch.cat([digits(W)[k] for _, k in PAIRS], 0)


def digits(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bfloat16 tensors that add up to a float32 one: eight of its 24 binary digits each.

    Bits are masked, because a compiler may leave out a conversion to bfloat16 and back.
    """
    high = (t.view(torch.int32) & DIGITS_MASK).view(torch.float32)
    rest = t - high
    middle = (rest.view(torch.int32) & DIGITS_MASK).view(torch.float32)
    return high.bfloat16(), middle.bfloat16(), (rest - middle).bfloat16()


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
def _mixed_products() -> bool:
    """Whether this PyTorch multiplies bfloat16 numbers with float32 sums on this GPU."""
    new = tuple(int(k) for k in torch.__version__.split(".")[:2]) >= MIXED_PRODUCTS
    return new and torch.version.hip is None and torch.cuda.get_device_capability() >= MATRIX_UNITS


@functools.cache
def compiled(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(f) if importlib.util.find_spec("triton") else f
