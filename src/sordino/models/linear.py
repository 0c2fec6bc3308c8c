"""Linear models with closed-form clipping: softmax, binary logistic and Poisson regression, least squares.

The gradient of one record is an outer product, u = (x, 1) times a residual r, so its norm is |u| |r| and a sum of
clipped gradients is one matrix product: no per-example gradient is ever held in memory. Its Hessian is u u^T (x) S with
a small positive semi-definite S (softmax: diag p - p p^T), of Frobenius norm |u|^2 |S|; sums of those are streamed over
records, so that memory is that of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from sordino.core import SAFETY, Shard, SordinoError
from sordino.models.runs import MODERATE, clipped_sums, shifted

LOG2_E = math.log2(math.e)
FARTHEST = 1e15  # of a scale; squares of what is larger would overflow


class Loss(StrEnum):
    SOFTMAX = "softmax"
    LOGISTIC = "logistic"
    SQUARES = "squares"
    POISSON = "poisson"


NUMBERS = (Loss.SQUARES, Loss.POISSON)  # losses whose labels are numbers, not classes
STREAM = 1024  # records whose terms of a sum of matrices are held at once


@dataclass(frozen=True)
class Linear:
    """`theta` is the weights (features x outputs), then, with a bias, one number per output.

    `class_weights` multiply a record's loss, and so its gradient *before* the clip: the bound holds for any weights.
    `radius` R weighs a record by min(1, R^2 / |u|^2), a function of x alone: the estimate stays consistent, which
    clipping would bias (Mallows). `residual` bounds |r|, and `cap` the exponent of a Poisson rate: both bias a little.
    """

    features: int
    outputs: int = 1
    kind: Loss = Loss.SOFTMAX
    bias: bool = True
    class_weights: Tensor | None = None
    radius: float = math.inf
    residual: float = math.inf
    cap: float = 10.0

    def __post_init__(self) -> None:
        weights = self.class_weights
        if weights is not None and not (torch.isfinite(weights) & (weights >= 0)).all():
            raise SordinoError("class_weights: must be finite numbers, 0 or more.")
        if not (self.radius > 0 and self.residual > 0 and not math.isnan(self.cap)):
            raise SordinoError("radius, residual, cap: radius and residual must be above 0, and cap a number.")

    @property
    def size(self) -> int:
        return (self.features + self.bias) * self.outputs

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.features + self.bias, self.outputs),)

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        """Zero: the problem is convex, and nothing is known of the data yet."""
        return torch.zeros(self.size)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        weight, bias = self._split(theta)
        if bias is None:
            return x @ weight
        if theta.dim() == 2 and x.dim() == 2:  # runs over the same records: one wide product
            z = x @ weight.movedim(0, 1).flatten(1) + bias.flatten()
            return z.reshape(len(x), *bias.shape).movedim(1, 0)
        if theta.dim() == 1 and x.dim() == 2:
            return torch.addmm(bias, x, weight)
        if theta.dim() == 2 and x.dim() == 3 and len(theta) == len(x):
            return torch.baddbmm(bias.unsqueeze(-2), x, weight)
        return x @ weight + bias.unsqueeze(-2)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of one example."""
        z = self.logits(theta, x.unsqueeze(0))[0]
        if self.kind is Loss.SQUARES:
            return (z[0] - y).square() / 2
        if self.kind is Loss.POISSON:  # beyond the cap the rate stays, and the loss goes on as a line
            low = z[0].clamp(max=self.cap)
            return low.exp() * (1 + z[0] - low) - y * z[0]
        if self.kind is Loss.LOGISTIC:
            value = torch.logaddexp(z[0], torch.zeros_like(z[0])) - y * z[0]
        else:
            value = torch.logsumexp(z, 0) - z.gather(0, y.unsqueeze(0))[0]
        return (
            value
            if self.class_weights is None
            else value * self.class_weights.to(value).gather(0, y.long().unsqueeze(0))[0]
        )

    def predict(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """Class indices, or values for least squares, or rates."""
        z = self.logits(theta, torch.as_tensor(x).to(theta))
        if self.kind in NUMBERS:
            return self._value(z)[..., 0]
        return (z[..., 0] > 0).long() if self.kind is Loss.LOGISTIC else z.argmax(-1)

    def scores(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """Probabilities of the classes, or what is predicted."""
        z = self.logits(theta, torch.as_tensor(x).to(theta))
        if self.kind in NUMBERS:
            return self._value(z)[..., 0]
        if self.kind is Loss.SOFTMAX:
            return z.softmax(-1)
        p = z.sigmoid()
        return torch.cat([1 - p, p], -1)

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor:
        """Sum of gradients (times `scale`), each cut to norm at most `clip`: one record moves it by at most that much.

        The factor is computed from the residual actually used, so the bound survives any rounding of the softmax.
        A record whose gradient is not finite would leave a trace in the sum; then it is found and set to zero.
        """
        length = self._length(shard)
        if scale is None and theta.dim() == shard.x.dim() > shard.mask.dim() and self.plain:
            shift = theta.is_cuda or not self._moderate(theta, length)
            return clipped_sums(theta, shard, length, clip, self.outputs, shift)
        scale = None if scale is None else usable(scale)
        total = self._sum(self._residual(theta, shard, length), shard, length, clip, scale)
        if torch.isfinite(total).all():
            return total
        # The same for every other record as before: what is not finite counts as zero, and changes nothing else.
        fine = torch.isfinite(shard.x).all(-1) & torch.isfinite(length)
        clean = shard._replace(x=shard.x.masked_fill(~fine.unsqueeze(-1), 0), mask=shard.mask * fine)
        length = length.masked_fill(~fine, 1)
        residual = self._residual(theta, clean, length)
        residual = residual.masked_fill(~torch.isfinite(residual).all(-1, keepdim=True), 0)
        return self._sum(residual, clean, length, clip, scale)

    def count_sum(self, theta: Tensor, shard: Shard, scale: Tensor) -> Tensor:
        """1/2 for every record whose gradient times `scale` has a norm up to 1, -1/2 for every other."""
        residual = self._residual(theta, shard, self._length(shard))
        below = self._scaled_norm(residual, shard.x, usable(scale)) <= 1
        return ((below.to(residual.dtype) - 0.5) * shard.mask).sum(-1, keepdim=True)

    def gram_sum(self, shard: Shard, clip: float) -> Tensor:
        """Sum of u u^T, each cut to Frobenius norm `clip`."""
        return sum_over(self._usable(shard), lambda part: outer(self._long(part, bounded(self._squared(part), clip))))

    def curvature_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """Sum of Hessians, each positive semi-definite and cut to Frobenius norm `clip`."""

        def total(part: Shard) -> Tensor:
            p, factor = self._curved(theta, part, clip)
            u = self._long(part, factor)
            if self.kind is not Loss.SOFTMAX:
                return outer(u)
            up = (u.unsqueeze(-1) * p.unsqueeze(-2)).flatten(-2)  # sqrt(factor) u (x) p
            rest = p @ (1 - torch.eye(self.outputs).to(p))  # 1 - p, without a difference of near numbers
            spread = (u.unsqueeze(-1) * (p * rest).unsqueeze(-2)).flatten(-2)
            sums = -outer(up)
            lead, pairs = sums.shape[:-2], (u.shape[-1], self.outputs)
            diagonal = (spread.transpose(-1, -2) @ u).view(*lead, *pairs, u.shape[-1])
            sums.view(*lead, *pairs, *pairs).diagonal(dim1=-3, dim2=-1).copy_(diagonal.transpose(-1, -2))
            return sums

        return sum_over(self._usable(shard), total)

    def curvature_times(self, theta: Tensor, shard: Shard, clip: float, v: Tensor) -> Tensor:
        """The sum of cut Hessians times v, in two matrix products: no Hessian is ever built."""
        shard = self._usable(shard)
        p, factor = self._curved(theta, shard, clip)
        a = self.logits(v, shard.x).masked_fill((factor == 0).unsqueeze(-1), 0)
        if self.kind is Loss.SOFTMAX:
            a = p * (a - (p * a).sum(-1, keepdim=True))
        return self._pull(shard.x, a * factor.unsqueeze(-1))

    def fisher_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """Sum of g g^T, each cut to Frobenius norm `clip`: g to its root."""
        shard = self._usable(shard)

        def total(part: Shard) -> Tensor:
            length = self._length(part)
            r = self._residual(theta, part, length)
            norm = torch.linalg.vector_norm(r, dim=-1, dtype=torch.float64) * length
            u = self._long(part, bounded(norm.square(), clip))
            return outer((u.unsqueeze(-1) * r.nan_to_num(0, 0, 0).unsqueeze(-2)).flatten(-2))

        return sum_over(shard, total)

    # ------------------------------------------------------------------------------------------------------ inside

    @property
    def plain(self) -> bool:
        """Softmax without anything that weighs or bounds residuals: sums over runs are one kernel on a GPU."""
        bare = self.class_weights is None and math.isinf(self.radius) and math.isinf(self.residual)
        return self.kind is Loss.SOFTMAX and self.bias and bare

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
        n = self.features * self.outputs
        weight = theta[..., :n].reshape(*theta.shape[:-1], self.features, self.outputs)
        return weight, theta[..., n:] if self.bias else None

    def _pull(self, x: Tensor, r: Tensor) -> Tensor:
        """Sum over records of u (x) r, flat."""
        weight = (x.transpose(-1, -2) @ r).flatten(-2)
        return torch.cat([weight, r.sum(-2)], -1) if self.bias else weight

    def _value(self, z: Tensor) -> Tensor:
        return z.clamp(max=self.cap).exp() if self.kind is Loss.POISSON else z

    def _usable(self, shard: Shard) -> Shard:
        """Records that are not finite count as absent."""
        if torch.isfinite(shard.x).all():
            return shard
        fine = torch.isfinite(shard.x).all(-1)
        x = shard.x.masked_fill(~fine.unsqueeze(-1), 0)
        return Shard(x, shard.y, shard.mask * fine)

    def _squared(self, shard: Shard) -> Tensor:
        """|u|^2, the norm of u u^T; infinite where it overflows, and then the record's factor is zero."""
        return self._length(shard).double().square()

    def _long(self, shard: Shard, factor: Tensor) -> Tensor:
        """sqrt(factor) u, for every record."""
        u = torch.cat([shard.x, torch.ones_like(shard.x[..., :1])], -1) if self.bias else shard.x
        root = factor.sqrt()
        root = root.masked_fill(root < torch.finfo(u.dtype).tiny, 0)  # too few digits to keep the bound
        return u * (root.to(u) * shard.mask).unsqueeze(-1)

    def _curved(self, theta: Tensor, shard: Shard, clip: float) -> tuple[Tensor, Tensor]:
        """Softmax probabilities (else what is not needed), and per record the cut times everything but u u^T (x) S."""
        z = self.logits(theta, shard.x)
        if self.kind is Loss.SOFTMAX:
            z = z.softmax(-1).nan_to_num(0)
            others = 1 - torch.eye(self.outputs, dtype=torch.float64, device=z.device)
            squares = z.double().square()
            size = (squares * ((z.double() @ others).square() + squares @ others)).sum(-1).sqrt()  # |diag p - p p^T|
            size = size + 1e4 * torch.finfo(z.dtype).eps  # what rounding leaves of p - p^2, amplified by |u|^2
            weight = torch.ones_like(size)
        else:
            z = z[..., 0]
            curve = {Loss.LOGISTIC: z.sigmoid() * (-z).sigmoid(), Loss.SQUARES: torch.ones_like(z)}
            weight = curve[self.kind] if self.kind in curve else self._value(z)
            weight, size = weight.nan_to_num(0), torch.ones_like(weight, dtype=torch.float64)
        if self.class_weights is not None and self.kind not in NUMBERS:
            weight = weight * self.class_weights.to(weight)[shard.y.long()]
        length = self._length(shard)
        weight = weight.double() * self._mallows(length).double()
        norm = weight * size * length.double().square()
        factor = (weight * bounded(norm, clip) * shard.mask).nan_to_num(0, 0, 0)
        return z, factor.masked_fill(factor < torch.finfo(shard.x.dtype).tiny, 0).to(shard.x)

    def _mallows(self, length: Tensor) -> Tensor:
        return (self.radius / length.clamp_min(self.radius)).square() if math.isfinite(self.radius) else length * 0 + 1

    def _length(self, shard: Shard) -> Tensor:
        """Of (x, 1)."""
        norm = torch.linalg.vector_norm(shard.x, dim=-1, dtype=torch.float64) if shard.length is None else shard.length
        norm = norm.to(shard.x.dtype)
        return norm.square().add_(1).sqrt_() if self.bias else norm

    def _moderate(self, theta: Tensor, length: Tensor) -> bool:
        """No logit can leave the range in which `shifted` leaves it alone (Cauchy-Schwarz, and room for rounding)."""
        columns = torch.linalg.vector_norm(theta.reshape(*theta.shape[:-1], -1, self.outputs), dim=-2)
        return bool(length.amax() * columns.amax() * LOG2_E < 0.99 * MODERATE)

    def _residual(self, theta: Tensor, shard: Shard, length: Tensor) -> Tensor:
        """d loss / d logits for every record, in a fresh tensor that may be written to."""
        if self.kind is Loss.SOFTMAX:
            r = self.logits(theta * LOG2_E, shard.x)
            if not self._moderate(theta, length):
                r = shifted(r, -1)
            r.exp2_()  # cheaper than exp
            r.mul_(r.sum(-1, keepdim=True).reciprocal_())
            labels = shard.y.unsqueeze(-1).expand(*r.shape[:-1], 1)
            r.scatter_add_(-1, labels, r.new_full((), -1.0).expand(labels.shape))
        else:
            z = self.logits(theta, shard.x)
            r = (z.sigmoid_() if self.kind is Loss.LOGISTIC else self._value(z)).sub_(shard.y.unsqueeze(-1).to(z))
        if self.class_weights is not None and self.kind not in NUMBERS:
            r.mul_(self.class_weights.to(r)[shard.y.long()].unsqueeze(-1))
        if math.isfinite(self.residual):
            norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
            r = r * (self.residual / norm.clamp_min(self.residual))
        return r * self._mallows(length).unsqueeze(-1) if math.isfinite(self.radius) else r

    def _sum(self, residual: Tensor, shard: Shard, length: Tensor, clip: float, scale: Tensor | None) -> Tensor:
        factor = shard.mask
        if math.isfinite(clip):
            wide = torch.float64 if self.outputs > 64 else residual.dtype  # many float32 squares would fall short
            tiny = torch.finfo(residual.dtype).tiny
            if scale is None:
                norm = torch.linalg.vector_norm(residual, dim=-1, dtype=wide).to(residual.dtype)
                # Squares of residuals below the floor underflow: take it for their norm, which is never too small.
                norm = norm.clamp_min_(tiny**0.4).mul_(length)
            else:
                norm = self._scaled_norm(residual, shard.x, scale).to(residual.dtype).clamp_min(tiny**0.4)
            factor = torch.div(clip * (1 - SAFETY), norm).clamp_max_(1)
            # A factor below the normal range has too few digits to keep the bound: such a record counts as zero.
            factor = torch.threshold_(factor, tiny, 0.0).mul_(shard.mask)
            if (length > clip / tiny).any():  # so does one whose bounded residual is
                factor = factor.masked_fill(length > clip / tiny, 0)
        residual.mul_(factor.unsqueeze(-1))
        total = self._pull(shard.x, residual)
        return total if scale is None else total * scale

    def _scaled_norm(self, residual: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        """|scale * (u (x) r)|: sum over f, o of u_f^2 r_o^2 scale_fo^2."""
        weight, bias = self._split(scale.double().square())
        of_output = x.double().square() @ weight + (0 if bias is None else bias.unsqueeze(-2))
        squares = of_output * residual.double().square()
        squares = squares.masked_fill(residual == 0, 0)  # a record may be too long and say nothing
        return squares.sum(-1).sqrt().nan_to_num(math.inf, math.inf)


def usable(scale: Tensor) -> Tensor:
    """A scale comes from outside, and may be anything; whatever is made of it, the clip must hold."""
    return scale.nan_to_num(0, FARTHEST, -FARTHEST).clamp(-FARTHEST, FARTHEST)


def bounded(norm: Tensor, clip: float) -> Tensor:
    """The factor that brings a norm down to `clip`; 0 where the norm is not finite."""
    if not math.isfinite(clip):
        return torch.isfinite(norm).to(norm)
    bound = clip * (1 - SAFETY)
    return torch.where(torch.isfinite(norm), bound / norm.clamp_min(bound), 0.0)


def outer(rows: Tensor) -> Tensor:
    """Sum over records of the outer product of each row with itself."""
    return rows.transpose(-1, -2) @ rows


def sum_over(shard: Shard, total: Callable[[Shard], Tensor]) -> Tensor:
    """Of `total` over parts of a shard, some records at a time."""
    x, y, mask, length = shard
    parts = (
        Shard(x[..., k, :], y[..., k], mask[..., k], None if length is None else length[..., k])
        for k in (slice(start, start + STREAM) for start in range(0, x.shape[-2], STREAM))
    )
    sums = total(next(parts))
    for part in parts:
        sums = sums + total(part)
    return sums
