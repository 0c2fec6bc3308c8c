"""Linear models with closed-form clipping: softmax regression, binary logistic regression, least squares.

The gradient of one record is an outer product, (x, 1) times a residual r, so its norm is |(x, 1)| |r| and a sum of
clipped gradients is one matrix product: no per-example gradient is ever held in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from sordino.core import SAFETY, Shard

LOG2_E = math.log2(math.e)
MODERATE = 100.0  # powers of two up to this, and sums of them, are far from the ends of float32


class Loss(StrEnum):
    SOFTMAX = "softmax"
    LOGISTIC = "logistic"
    SQUARES = "squares"


@dataclass(frozen=True)
class Linear:
    """`theta` is the weights (features x outputs), then, with a bias, one number per output.

    `class_weights` multiply a record's loss, and so its gradient *before* the clip: the bound holds for any weights.
    """

    features: int
    outputs: int = 1
    kind: Loss = Loss.SOFTMAX
    bias: bool = True
    class_weights: Tensor | None = None

    @property
    def size(self) -> int:
        return (self.features + self.bias) * self.outputs

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        """Zero: the problem is convex, and nothing is known of the data yet."""
        return torch.zeros(self.size)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        weight, bias = self._split(theta)
        if bias is None:
            return x @ weight
        if theta.dim() == 1 and x.dim() == 2:
            return torch.addmm(bias, x, weight)
        return x @ weight + bias.unsqueeze(-2)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of one example."""
        z = self.logits(theta, x.unsqueeze(0))[0]
        if self.kind is Loss.SQUARES:
            return (z[0] - y).square() / 2
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
        """Class indices, or values for least squares."""
        z = self.logits(theta, torch.as_tensor(x).to(theta))
        if self.kind is Loss.SQUARES:
            return z[..., 0]
        return (z[..., 0] > 0).long() if self.kind is Loss.LOGISTIC else z.argmax(-1)

    def scores(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """Probabilities of the classes, or values for least squares."""
        z = self.logits(theta, torch.as_tensor(x).to(theta))
        if self.kind is Loss.SQUARES:
            return z[..., 0]
        if self.kind is Loss.SOFTMAX:
            return z.softmax(-1)
        p = z.sigmoid()
        return torch.cat([1 - p, p], -1)

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """Sum of gradients, each scaled to norm at most `clip`: one record moves it by at most that much.

        The factor is computed from the residual actually used, so the bound survives any rounding of the softmax.
        A record whose gradient is not finite would leave a trace in the sum; then it is found and set to zero.
        """
        length = self._length(shard)
        residual = self._residual(theta, shard, length)
        total = self._sum(residual, shard, length, clip)
        if torch.isfinite(total).all():
            return total
        x = shard.x.nan_to_num(0, 0, 0)
        residual = self._residual(theta, shard._replace(x=x), length)
        squares = residual.square().sum(-1)
        usable = torch.isfinite(shard.x).all(-1) & torch.isfinite(squares) & torch.isfinite(squares.sqrt() * length)
        residual = residual.masked_fill(~usable.unsqueeze(-1), 0)
        clean = Shard(x, shard.y, shard.mask * usable)
        return self._sum(residual, clean, self._length(clean).nan_to_num(posinf=1), clip)

    # ------------------------------------------------------------------------------------------------------ inside

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
        n = self.features * self.outputs
        weight = theta[..., :n].reshape(*theta.shape[:-1], self.features, self.outputs)
        return weight, theta[..., n:] if self.bias else None

    def _length(self, shard: Shard) -> Tensor:
        """Of (x, 1)."""
        norm = torch.linalg.vector_norm(shard.x, dim=-1, dtype=torch.float64) if shard.length is None else shard.length
        norm = norm.to(shard.x.dtype)
        return norm.square().add_(1).sqrt_() if self.bias else norm

    def _moderate(self, theta: Tensor, length: Tensor) -> bool:
        """No logit can leave the range where exp neither overflows nor loses digits (Cauchy-Schwarz)."""
        columns = torch.linalg.vector_norm(theta.reshape(*theta.shape[:-1], -1, self.outputs), dim=-2)
        return bool(length.amax() * columns.amax() * LOG2_E < MODERATE)

    def _residual(self, theta: Tensor, shard: Shard, length: Tensor) -> Tensor:
        """d loss / d logits for every record, in a fresh tensor that may be written to."""
        if self.kind is Loss.SOFTMAX:
            r = self.logits(theta * LOG2_E, shard.x)
            if not self._moderate(theta, length):
                low, high = r.aminmax()
                if not (low > -MODERATE and high < MODERATE):  # rare, and dear: also where something is not finite
                    r.sub_(r.amax(-1, keepdim=True))
            r.exp2_()  # cheaper than exp
            r.mul_(r.sum(-1, keepdim=True).reciprocal_())
            labels = shard.y.unsqueeze(-1).expand(*r.shape[:-1], 1)
            r.scatter_add_(-1, labels, r.new_full((), -1.0).expand(labels.shape))
        else:
            z = self.logits(theta, shard.x)
            r = (z.sigmoid_() if self.kind is Loss.LOGISTIC else z).sub_(shard.y.unsqueeze(-1).to(z))
        if self.class_weights is not None and self.kind is not Loss.SQUARES:
            r.mul_(self.class_weights.to(r)[shard.y.long()].unsqueeze(-1))
        return r

    def _sum(self, residual: Tensor, shard: Shard, length: Tensor, clip: float) -> Tensor:
        factor = shard.mask
        if math.isfinite(clip):
            wide = torch.float64 if self.outputs > 64 else residual.dtype  # many float32 squares would fall short
            tiny = torch.finfo(residual.dtype).tiny
            norm = torch.linalg.vector_norm(residual, dim=-1, dtype=wide).to(residual.dtype)
            # Squares of residuals below the floor underflow: take the floor for their norm, which is never too small.
            factor = torch.div(clip * (1 - SAFETY), norm.clamp_min_(tiny**0.4).mul_(length)).clamp_max_(1)
            # A factor below the normal range has too few digits to keep the bound: such a record counts as zero.
            factor = torch.threshold_(factor, tiny, 0.0).mul_(shard.mask)
        residual.mul_(factor.unsqueeze(-1))
        weight = (shard.x.transpose(-1, -2) @ residual).flatten(-2)
        return torch.cat([weight, residual.sum(-2)], -1) if self.bias else weight
