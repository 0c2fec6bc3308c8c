"""Linear models with closed-form clipping: softmax, binary logistic and Poisson regression, least squares.

The gradient of one record is an outer product, u = (x, 1) times a residual r, so its norm is |u| |r|, and a sum of
clipped gradients is one matrix product without per-example gradients in memory. Its Hessian is u u^T (x) S with a small
positive semi-definite S (softmax: diag p - p p^T) and has Frobenius norm |u|^2 |S|. Sums of Hessians are computed in
chunks of records, so they need no more memory than the sum.

Sums over records are float64 for any type of records, and every shape depends only on public numbers. So one record
moves a computed sum by at most the clip: docs/proofs.md has the proof.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from sordino.core import CALIBRATION_LEVEL, MOST_LOG_ODDS, SAFETY, Blend, Shard
from sordino.errors import SordinoError
from sordino.models import kernel, softmax_batched
from sordino.models.arithmetic import exact_arithmetic, product_rows
from sordino.models.softmax_batched import MIN_PROBABILITY

LOG2_E = math.log2(math.e)
MIN_NORM = 1e-30  # of a record and of a residual; smaller ones have too few digits and count as 0
MAX_SCALE = 1e15  # of a public scale; squares of larger ones overflow


class Loss(StrEnum):
    """The loss of a linear model."""

    SOFTMAX = "softmax"
    LOGISTIC = "logistic"
    SQUARES = "squares"
    POISSON = "poisson"


SumT = TypeVar("SumT", Tensor, Tensor | None)
NUMERIC_LOSSES = (Loss.SQUARES, Loss.POISSON)  # losses whose labels are numbers, not classes
MATRIX_CHUNK_RECORDS = 1024  # records whose matrices are held at once
CLIENT_NUMBERS_THRESHOLD = 2**16  # clients with more numbers in their terms are computed one by one, within the cache
KERNEL_CHUNK_RECORDS = 2**16  # in one slice of the compiled kernel
PRODUCT_CHUNK_NUMBERS = 2**19  # in one matrix product
PERSON_CHUNK_NUMBERS = 2**18  # in the gradients, and the records, of one chunk of persons
PAIR_CHUNK_NUMBERS = 2**19  # in one block of products of feature pairs
SYMMETRIC_BLOCKS = 4  # column blocks of a symmetric product, of which only those on and above the diagonal are computed


@dataclass(frozen=True)
class Linear:
    """A linear model: softmax, logistic, least squares or Poisson regression.

    The parameters `theta` are the weights (features x outputs), then, with a bias, one number per output.

    Args:
        features: Number of features.
        outputs: Number of outputs: classes, or 1.
        kind: The loss.
        bias: Whether each output has a constant.
        class_weights: Weights of the classes, as scikit-learn has them; only their ratios count. A record's term is
            clipped first, and then multiplied by its class's weight over the largest one. That factor is at most 1, so
            the term stays within the clip, and the clip does not undo the weights.
        radius: R weighs a record by min(1, R^2 / |u|^2), which depends on x alone. The estimate stays consistent,
            while clipping would bias it (Mallows).
        residual: Bounds |r|; this causes a small bias.
        cap: Bounds the exponent of a Poisson rate; this causes a small bias.

    Example:
        >>> model = Linear(features=64, outputs=10)
        >>> model.size
        650
    """

    features: int
    outputs: int = 1
    kind: Loss = Loss.SOFTMAX
    bias: bool = True
    class_weights: Tensor | None = None
    radius: float = math.inf
    residual: float = math.inf
    cap: float = 10.0

    serves_persons: ClassVar[bool] = True
    serves_blends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        weights = self.class_weights
        if weights is not None and not (torch.isfinite(weights) & (weights >= 0)).all():
            raise SordinoError("class_weights: they must be finite numbers of at least 0.")
        if weights is not None and not weights.max() > 0:
            raise SordinoError("class_weights: at least one must be above 0, because all are divided by the largest.")
        if not (self.radius > 0 and self.residual > 0 and not math.isnan(self.cap)):
            raise SordinoError("radius, residual, cap: radius and residual must be above 0, and cap must be a number.")

    @property
    def serves_centres(self) -> bool:
        return self.bias  # which takes up the mean

    @property
    def size(self) -> int:
        return (self.features + self.bias) * self.outputs

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.features + self.bias, self.outputs),)

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        """The first parameters: zeros, because the problem is convex."""
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
        """The loss of one example."""
        z = self.logits(theta, x.unsqueeze(0))[0]
        if self.kind is Loss.SQUARES:
            return (z[0] - y).square() / 2
        if self.kind is Loss.POISSON:  # above the cap the rate is constant, and the loss is linear
            low = z[0].clamp(max=self.cap)
            return low.exp() * (1 + z[0] - low) - y * z[0]
        if self.kind is Loss.LOGISTIC:
            value = torch.logaddexp(z[0], torch.zeros_like(z[0])) - y * z[0]
        else:
            value = torch.logsumexp(z, 0) - z.gather(0, y.unsqueeze(0))[0]
        weights = self.relative_weights
        return value if weights is None else value * weights.to(value).gather(0, y.long().unsqueeze(0))[0]

    def predict(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """Predicted classes as indices, or values for least squares, or rates."""
        z = self.logits(theta, torch.as_tensor(x).to(theta))
        if self.kind in NUMERIC_LOSSES:
            return self._value(z)[..., 0]
        return (z[..., 0] > 0).long() if self.kind is Loss.LOGISTIC else z.argmax(-1)

    def scores(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """The probabilities of the classes; for numeric labels, the predictions."""
        z = self.logits(theta, torch.as_tensor(x).to(theta))
        if self.kind in NUMERIC_LOSSES:
            return self._value(z)[..., 0]
        if self.kind is Loss.SOFTMAX:
            return z.softmax(-1)
        p = z.sigmoid()
        return torch.cat([1 - p, p], -1)

    @exact_arithmetic()
    def clipped_sum(
        self,
        theta: Tensor,
        shard: Shard,
        clip: float,
        scale: Tensor | None = None,
        blend: Blend | None = None,
    ) -> Tensor:
        """The sum of gradients (times `scale`), each clipped to norm `clip`: one record moves it by at most `clip`.

        The factor is computed from the residual that is used, so the bound holds for any rounding of the softmax. A
        record whose gradient is not finite contributes zero. A gradient is features times residual, so that of a
        `blend` is features times the weighted sum of two residuals.
        """
        theta, bound = theta.to(shard.x), clip * (1 - SAFETY)
        if shard.per_person > 1:
            return self._clipped_persons(theta, shard, bound, scale, blend)
        plain = scale is None and blend is None
        if plain and theta.dim() == shard.x.dim() > shard.mask.dim() and self.plain:  # runs over the same records
            if theta.device.type == "cpu":  # the kernel is faster, run by run, than wide products
                return torch.stack([self.clipped_sum(run, shard, clip) for run in theta])
            return softmax_batched.clipped_sums(theta, shard, self._length(shard), bound, self.outputs)
        scale = None if scale is None else usable(scale).to(shard.x)

        def compiled(part: Shard) -> Tensor | None:
            length = self._length(part)
            mask = self._weighed(part.mask, part)
            mask = mask if self.bias else torch.where(length >= MIN_NORM, mask, 0.0)
            return kernel.clipped_sum(
                *(theta, part.x, part.y, mask, length),
                outputs=self.outputs,
                kind=str(self.kind),
                bias=self.bias,
                clip_bound=bound,
                radius=self.radius,
                residual=self.residual,
                cap=self.cap,
            )

        if plain and kernel.takes(shard.x):
            rows = kernel.MOST_SLICES * product_rows(shard.x.shape[-2], KERNEL_CHUNK_RECORDS)
            if (total := sum_over(shard, compiled, rows)) is not None:
                return total

        def part_sum(part: Shard) -> Tensor:
            x, residual, length = self._finite(theta, part, blend)
            factor = self._weighed(self._factor(residual, x, length, bound, scale) * part.mask, part)
            residual = residual * factor.unsqueeze(-1)
            return self._pull(x, residual)

        total = sum_over(shard, part_sum, self._rows(theta, shard))
        return total if scale is None else total * scale.double()

    def summing(self, shard: Shard, clip: float, runs: int) -> Callable[[Tensor], Tensor]:
        """`clipped_sum` of runs over the same records, as a function of theta. The records are laid out once.

        Args:
            shard: the records, without an axis of runs.
            clip: bound on the norm of one record's gradient.
            runs: number of runs.

        Returns:
            The function of runs x parameters.
        """
        if shard.per_person > 1 or not self.plain or shard.x.device.type == "cpu":
            return functools.partial(self.clipped_sum, shard=shard, clip=clip)
        length, bound = self._length(shard), clip * (1 - SAFETY)
        return exact_arithmetic()(softmax_batched.summing(shard, length, bound, self.outputs, runs))

    @exact_arithmetic()
    def count_sum(self, theta: Tensor, shard: Shard, scale: Tensor) -> Tensor:
        """Add 1/2 for every record whose gradient times `scale` has norm at most 1, and -1/2 for every other."""
        theta, scale = theta.to(shard.x), usable(scale).to(shard.x)

        def part_sum(part: Shard) -> Tensor:
            x, residual, _ = self._finite(theta, part)
            if part.per_person > 1:
                scaled = self._person_gradients(x, residual, part) * scale.unsqueeze(-2)
                norm, weights = torch.linalg.vector_norm(scaled, dim=-1), part.person_weights()
            else:
                norm, weights = self._scaled_norm(residual, x, scale), part.mask
            signs: Tensor = norm.le(1).double() - 0.5
            return (signs * weights).sum(-1, keepdim=True)

        return sum_over(shard, part_sum, self._rows(theta, shard))

    @exact_arithmetic()
    def calibration_sum(self, theta: Tensor, shard: Shard, clip: float, differences: bool = False) -> Tensor:
        """The sum of (one-hot label, probabilities of the classes), each clipped to norm `clip`; sqrt(2) cuts nothing.

        Class weights, `radius` and `residual` play no part: this is what the model predicts, and what was observed.
        With `differences`, of (label - probabilities, `CALIBRATION_LEVEL` probabilities), added up over the records of
        a person; the norm that is clipped is that of the very sum, in which differences may cancel.
        """
        if self.kind is not Loss.SOFTMAX:
            raise SordinoError(f"calibrate: intercepts are calibrated for classes, not for {self.kind}.")
        theta = theta.to(shard.x)

        def total(part: Shard) -> Tensor:
            length = self._length(part)
            part = part._replace(mask=part.mask * (torch.isfinite(length) & (length >= MIN_NORM)))
            p = self.logits(theta, part.x).double().softmax(-1)
            p = torch.where(torch.isfinite(p).all(-1, keepdim=True), p, 0.0)
            label = torch.nn.functional.one_hot(part.y.clamp(0, self.outputs - 1), self.outputs).to(p)
            label = label.expand_as(p)
            if differences:
                terms = torch.cat([label - p, CALIBRATION_LEVEL * p], -1).masked_fill((part.mask == 0).unsqueeze(-1), 0)
                terms = terms.reshape(*terms.shape[:-2], -1, part.per_person, terms.shape[-1]).sum(-2)
                factor = bounded(torch.linalg.vector_norm(terms, dim=-1), clip) * part.person_weights()
            else:
                terms = torch.cat([label, p], -1)
                factor = shared_bound(torch.linalg.vector_norm(terms, dim=-1), clip, part) * part.mask
            return (factor.unsqueeze(-2) @ terms).squeeze(-2)

        return sum_over(shard, total, self._rows(theta, shard))

    @exact_arithmetic()
    def slope_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """The sum of the eight numbers that `Ask.slope` lists, each record's clipped to norm `clip`; sqrt(2) cuts none.

        No number is negative. For log-odds of 0 or more the squares add up to at most t^2 (1 + p^2) + 3 w^2 <= 2, and
        for others the same holds with 1 - p in place of p.
        """
        if self.kind is not Loss.SOFTMAX or self.outputs != 2:
            raise SordinoError("calibrate_slope: a slope is calibrated for two classes.")
        theta = theta.to(shard.x)

        def total(part: Shard) -> Tensor:
            part = self._usable(part)
            z = self.logits(theta, part.x).double()
            odds = z[..., 1] - z[..., 0]
            fine = torch.isfinite(odds)
            odds = torch.where(fine, odds, 0.0)
            t, p = (odds / MOST_LOG_ODDS).clamp(-1, 1), odds.sigmoid()
            up, down, y = t.clamp_min(0), (-t).clamp_min(0), (part.y == 1).double().expand_as(t)
            w = p * (1 - p)
            numbers = (y * up, p * up, (1 - y) * down, (1 - p) * down, w, w * up, w * down, w * t * t)
            terms = torch.stack(numbers, -1) * fine.unsqueeze(-1)
            factor = shared_bound(torch.linalg.vector_norm(terms, dim=-1), clip, part) * part.mask
            return (terms * factor.unsqueeze(-1)).sum(-2)

        return sum_over(shard, total)

    @exact_arithmetic()
    def gram_sum(self, shard: Shard, clip: float, constant: float = 1.0) -> Tensor:
        """The sum of u u^T, u = (x, constant), each clipped to Frobenius norm `clip`, then weighed by its class."""

        def total(part: Shard) -> Tensor:
            part = self._usable(part)
            factor = shared_bound(self._length(part, constant).double().square(), clip, part)
            return outer(self._long(part, self._weighed(factor, part), constant))

        return sum_over(shard, total)

    @exact_arithmetic()
    def curvature_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """The sum of Hessians, each positive semi-definite and clipped to Frobenius norm `clip`."""

        def total(part: Shard) -> Tensor:
            part = self._usable(part)
            p, factor = self._curved(theta, part, clip)
            u = self._long(part._replace(mask=(part.mask > 0).to(part.mask)), factor)  # the factor holds the mask
            if self.kind is not Loss.SOFTMAX:
                return outer(u)
            p = p.double()
            rest = p @ (1 - torch.eye(self.outputs).to(p))  # 1 - p without cancellation
            weights = torch.cat([p * rest, *(-p[..., a : a + 1] * p[..., a + 1 :] for a in range(self.outputs))], -1)
            return weighted_outer(u, weights)

        if shard.x.dim() == 3 and theta.dim() == 2 and shard.x.shape[-2] * self.size > CLIENT_NUMBERS_THRESHOLD:
            each = zip(theta.expand(len(shard.x), -1), clients_of(shard), strict=True)
            return torch.stack([self.curvature_sum(client_theta, client, clip) for client_theta, client in each])
        sums = sum_over(shard, total)
        if self.kind is not Loss.SOFTMAX:
            return sums
        index = _symmetric_index(self.features + self.bias, self.outputs).to(sums.device)
        return sums.flatten(-3).index_select(-1, index).view(*sums.shape[:-3], self.size, self.size)

    @exact_arithmetic()
    def curvature_times(self, theta: Tensor, shard: Shard, clip: float, v: Tensor) -> Tensor:
        """The sum of clipped Hessians times v, by two matrix products without building a Hessian.

        It is float64, because the bound of the solution needs an error far below that of float32.
        """

        def total(part: Shard) -> Tensor:
            part = self._usable(part)
            p, factor = self._curved(theta, part, clip)
            x, p = part.x.double(), p.double()
            a = self.logits(v.double(), x).masked_fill((factor == 0).unsqueeze(-1), 0)
            if self.kind is Loss.SOFTMAX:
                a = p * (a - (p * a).sum(-1, keepdim=True))
            return self._pull(x, a * factor.unsqueeze(-1))

        return sum_over(shard, total, self._rows(theta, shard))

    @exact_arithmetic()
    def fisher_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """The sum of g g^T, each clipped to Frobenius norm `clip`."""

        def total(part: Shard) -> Tensor:
            part = self._usable(part)
            length = self._length(part)
            r = self._residual(theta, part, length)
            r = torch.where(r.abs() < MIN_NORM, r.new_zeros(()), r)
            norm = torch.linalg.vector_norm(r, dim=-1, dtype=torch.float64) * length.double()
            # In float64, because u times its factor may be too small for float32 while r is large.
            factor = self._weighed(shared_bound(norm.square(), clip, part), part)
            u = self._long(part._replace(x=part.x.double()), factor)
            return outer((u.unsqueeze(-1) * r.double().nan_to_num(0, 0, 0).unsqueeze(-2)).flatten(-2))

        return sum_over(shard, total)

    # --------------------------------------------------------------------------------------------------- internals

    @property
    def plain(self) -> bool:
        """Whether this is softmax without weights or bounds on residuals, so that sums over runs are wide products."""
        bare = self.class_weights is None and math.isinf(self.radius) and math.isinf(self.residual)
        return self.kind is Loss.SOFTMAX and self.bias and bare

    @property
    def relative_weights(self) -> Tensor | None:
        """The weights of the classes over the largest one, in float64: at most 1. None where labels are numbers."""
        if self.class_weights is None or self.kind in NUMERIC_LOSSES:
            return None
        weights = self.class_weights.detach().double()
        return weights / weights.max()

    @property
    def mean_weight(self) -> float:
        """The mean relative weight of a record if classes are as frequent as their weights are small.

        That is exact for balanced weights, and needs no private count. Classes of weight 0 are left out.
        """
        weights = self.relative_weights
        return 1.0 if weights is None else float(1 / (1 / weights[weights > 0]).mean())

    def _weighed(self, factor: Tensor, shard: Shard, axes: int = 0) -> Tensor:
        """Factors of the records times the relative weights of their classes. axes: that follow the records' axis."""
        weights = self.relative_weights
        if weights is None:
            return factor
        each = weights.to(factor)[shard.y.long().clamp(0, len(weights) - 1)]
        return factor * each[(..., *(None,) * axes)]

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
        n = self.features * self.outputs
        weight = theta[..., :n].reshape(*theta.shape[:-1], self.features, self.outputs)
        return weight, theta[..., n:] if self.bias else None

    def _clipped_persons(
        self, theta: Tensor, shard: Shard, bound: float, scale: Tensor | None, blend: Blend | None = None
    ) -> Tensor:
        """The sum of persons' gradients (times `scale`), each clipped to norm `bound`.

        Every person's gradient is built, in float64, and its norm is that of the very numbers that are added. So terms
        that cancel within a person need no margin. With class weights it is the larger one of two norms, without and
        with weights: the weighted sum stays within the bound, and the clip is that of a person without weights.
        """
        scale = None if scale is None else usable(scale).double().unsqueeze(-2)

        def part_sum(part: Shard) -> Tensor:
            x, residual, _ = self._finite(theta, part, blend)
            g = self._person_gradients(x, residual, part)
            g = g if scale is None else g * scale
            norm = torch.linalg.vector_norm(g, dim=-1)
            if self.relative_weights is not None:
                g = self._person_gradients(x, self._weighed(residual.double(), part, axes=1), part)
                g = g if scale is None else g * scale
                norm = norm.maximum(torch.linalg.vector_norm(g, dim=-1))
            fine = torch.isfinite(norm)
            factor = torch.where(fine, bound / norm.clamp_min(bound) if math.isfinite(bound) else 1.0, 0.0)
            g = torch.where(fine.unsqueeze(-1), g, 0.0)
            return ((factor * part.person_weights()).unsqueeze(-2) @ g).squeeze(-2)

        return sum_over(shard, part_sum, self._person_chunk(theta, shard))

    def _person_gradients(self, x: Tensor, residual: Tensor, part: Shard) -> Tensor:
        """The gradient of every person, summed over the person's records: flat, in float64."""
        persons = (x.shape[-2] // part.per_person, part.per_person)
        r = residual.double().masked_fill((part.mask == 0).unsqueeze(-1), 0.0)
        r, rows = (t.reshape(*t.shape[:-2], *persons, t.shape[-1]) for t in (r, x.double()))
        weight = torch.einsum("...pkf,...pko->...pfo", rows, r).flatten(-2)
        return torch.cat([weight, r.sum(-2)], -1) if self.bias else weight

    def _person_chunk(self, theta: Tensor, shard: Shard) -> int:
        """Rows per chunk, so that the gradients of its persons stay in cache."""
        lead = max(math.prod(theta.shape[:-1]), math.prod(shard.x.shape[:-2]))
        persons = max(1, shard.x.shape[-2] // shard.per_person)
        width = lead * (self.size + shard.per_person * self.features)
        return shard.per_person * product_rows(persons, max(16, PERSON_CHUNK_NUMBERS // width))

    def _pull(self, x: Tensor, r: Tensor) -> Tensor:
        """The sum over records of u (x) r, flat, in float64."""
        r = r.double()
        weight = (x.double().transpose(-1, -2) @ r).flatten(-2)
        return torch.cat([weight, r.sum(-2)], -1) if self.bias else weight

    def _rows(self, theta: Tensor, shard: Shard) -> int:
        """Records per chunk, so that intermediate results stay in cache. It depends only on shapes."""
        lead = max(math.prod(theta.shape[:-1]), math.prod(shard.x.shape[:-2]))
        width = lead * (self.features + self.outputs)
        return product_rows(shard.x.shape[-2], max(MATRIX_CHUNK_RECORDS, PRODUCT_CHUNK_NUMBERS // width))

    def _finite(self, theta: Tensor, part: Shard, blend: Blend | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Features, residuals (of a blend, their weighted sum) and lengths; all are zero for a record with numbers that
        are not finite.

        Each record is decided on its own, and all records are computed in the same way. Otherwise one record could
        change how the others are rounded, and with a small clip rounding is as large as the clip.
        """
        length = self._length(part)
        fine = (length >= MIN_NORM) & (length < math.inf)  # false for NaN
        x = torch.where(fine.unsqueeze(-1), part.x, 0.0)
        rows, known = part._replace(x=x), torch.where(fine, length, 1.0)
        residual = self._residual(theta, rows, known)
        if blend is not None:
            here, there = blend.weights
            residual = here * residual + there * self._residual(blend.theta.to(theta), rows, known)
        size = residual.abs()
        fine = fine & (size < math.inf).all(-1)
        keep = fine.unsqueeze(-1) & (size >= MIN_NORM)
        return x, torch.where(keep, residual, 0.0), torch.where(fine, length, 0.0)

    def _factor(self, residual: Tensor, x: Tensor, length: Tensor, bound: float, scale: Tensor | None) -> Tensor:
        """The factors that clip gradients to `bound`, in float64, where products of float32 numbers are in range."""
        if not math.isfinite(bound):
            return torch.ones_like(length, dtype=torch.float64)
        if scale is None:
            norm = torch.linalg.vector_norm(residual, dim=-1, dtype=torch.float64) * length.double()
        else:
            norm = self._scaled_norm(residual, x, scale)
        norm = norm.nan_to_num(math.inf, math.inf)  # a float64 norm may overflow; such a record counts as zero
        return torch.div(bound, norm.clamp_min(bound))

    def _value(self, z: Tensor) -> Tensor:
        return z.clamp(max=self.cap).exp() if self.kind is Loss.POISSON else z

    def _usable(self, shard: Shard) -> Shard:
        """Records that are not finite count as absent."""
        whole = self._length(shard)
        fine = torch.isfinite(whole) & (whole >= MIN_NORM)
        x = torch.where(fine.unsqueeze(-1), shard.x, shard.x.new_zeros(()))
        length = None if shard.length is None else shard.length.masked_fill(~fine, 0)
        return shard._replace(x=x, mask=shard.mask * fine, length=length)

    def _long(self, shard: Shard, factor: Tensor, constant: float = 1.0) -> Tensor:
        """sqrt(factor) u of every record, u = (x, constant)."""
        u = torch.cat([shard.x, torch.full_like(shard.x[..., :1], constant)], -1) if self.bias else shard.x
        root = factor.sqrt()
        root = root.masked_fill(root < torch.finfo(u.dtype).tiny, 0)  # too few digits to keep the bound
        return u * (root.to(u) * shard.mask.sqrt()).unsqueeze(-1)

    def _curved(self, theta: Tensor, shard: Shard, clip: float) -> tuple[Tensor, Tensor]:
        """Softmax probabilities (unused for other losses), and per record the clip factor times all but u u^T (x) S."""
        z = self.logits(theta, shard.x)
        if self.kind is Loss.SOFTMAX:
            z = z.softmax(-1).nan_to_num(0)
            others = 1 - torch.eye(self.outputs, dtype=torch.float64, device=z.device)
            squares = z.double().square()
            size = (squares * ((z.double() @ others).square() + squares @ others)).sum(-1).sqrt()  # |diag p - p p^T|
            size = size + 1e4 * torch.finfo(z.dtype).eps  # covers the rounding of p - p^2, which |u|^2 amplifies
            weight = torch.ones_like(size)
        else:
            z = z[..., 0]
            curve = {Loss.LOGISTIC: z.sigmoid() * (-z).sigmoid(), Loss.SQUARES: torch.ones_like(z)}
            weight = curve[self.kind] if self.kind in curve else self._value(z)
            weight, size = weight.nan_to_num(0), torch.ones_like(weight, dtype=torch.float64)
        length = self._length(shard)
        weight = weight.double() * self._mallows(length).double()
        norm = weight * size * length.double().square()
        factor = (weight * shared_bound(norm, clip, shard) * shard.mask).nan_to_num(0, 0, 0)
        return z, self._weighed(factor, shard)

    def _mallows(self, length: Tensor) -> Tensor:
        return (self.radius / length.clamp_min(self.radius)).square() if math.isfinite(self.radius) else length * 0 + 1

    def _length(self, shard: Shard, constant: float = 1.0) -> Tensor:
        """The norm of u = (x, constant)."""
        norm = torch.linalg.vector_norm(shard.x, dim=-1, dtype=torch.float64) if shard.length is None else shard.length
        return (torch.hypot(norm, norm.new_full((), constant)) if self.bias else norm).to(shard.x.dtype)

    def _residual(self, theta: Tensor, shard: Shard, length: Tensor) -> Tensor:
        """d loss / d logits of every record, in a new tensor that may be overwritten."""
        if self.kind is Loss.SOFTMAX:
            r = self.logits(theta * LOG2_E, shard.x)
            r = r.sub_(r.amax(-1, keepdim=True)).exp2_()  # cheaper than exp
            r.mul_(r.sum(-1, keepdim=True).reciprocal_())
            torch.threshold_(r, MIN_PROBABILITY, 0.0)
            labels = shard.y.unsqueeze(-1).expand(*r.shape[:-1], 1)
            r.scatter_add_(-1, labels, r.new_full((), -1.0).expand(labels.shape))
        else:
            z = self.logits(theta, shard.x)
            r = (z.sigmoid_() if self.kind is Loss.LOGISTIC else self._value(z)).sub_(shard.y.unsqueeze(-1).to(z))
        if math.isfinite(self.residual):
            norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
            r = r * (self.residual / norm.clamp_min(self.residual))
        return r * self._mallows(length).unsqueeze(-1) if math.isfinite(self.radius) else r

    def _scaled_norm(self, residual: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        """|scale * (u (x) r)|: sum over f, o of u_f^2 r_o^2 scale_fo^2."""
        weight, bias = self._split(scale.double().square())
        of_output = x.double().square() @ weight + (0 if bias is None else bias.unsqueeze(-2))
        squares = of_output * residual.double().square()
        squares = squares.masked_fill(residual == 0, 0)  # a record may be too long but have no residual
        return squares.sum(-1).sqrt().nan_to_num(math.inf, math.inf)


def usable(scale: Tensor) -> Tensor:
    """A scale with finite, bounded entries. It comes from outside, and the clip must hold for any scale."""
    return scale.nan_to_num(0, MAX_SCALE, -MAX_SCALE).clamp(-MAX_SCALE, MAX_SCALE)


def bounded(norm: Tensor, clip: float) -> Tensor:
    """The factor that brings a norm down to `clip`; 0 if the norm is not finite."""
    if not math.isfinite(clip):
        return torch.isfinite(norm).to(norm)
    bound = clip * (1 - SAFETY)
    return torch.where(torch.isfinite(norm), bound / norm.clamp_min(bound), 0.0)


def shared_bound(norm: Tensor, clip: float, shard: Shard) -> Tensor:
    """The factor of every record's term: the one that brings its person's sum down to `clip`.

    The norm of a sum is at most the sum of norms. For terms that do not cancel, such as positive semi-definite
    matrices, that is at most sqrt(per_person) times too much, and exact for records in the same direction.
    """
    if shard.per_person == 1:
        return bounded(norm, clip)
    total = shard.by_person(torch.where(shard.mask > 0, norm, 0.0)).sum(-1, keepdim=True)
    return bounded(total, clip).expand(*total.shape[:-1], shard.per_person).flatten(-2)


def outer(rows: Tensor) -> Tensor:
    """The sum over records of the outer product of each row with itself, in float64.

    The product is symmetric: of its SYMMETRIC_BLOCKS x SYMMETRIC_BLOCKS blocks, those below the diagonal are copied.
    """
    rows = rows.double()
    size = rows.shape[-1]
    sums = rows.new_empty(*rows.shape[:-2], size, size)
    step = -(-size // SYMMETRIC_BLOCKS) if size >= 64 * SYMMETRIC_BLOCKS else size
    for start in range(0, size, step):
        here, beyond = slice(start, start + step), slice(start + step, None)
        sums[..., here, start:] = rows[..., here].transpose(-1, -2) @ rows[..., start:]
        sums[..., beyond, here] = sums[..., here, beyond].transpose(-1, -2)
    return sums


def weighted_outer(rows: Tensor, weights: Tensor) -> Tensor:
    """The sum over records of a row's outer product with itself times each of its weights, in float64.

    The result has the shape weights x size x size. Entries below the diagonal of the last two axes are not computed,
    because the products are symmetric.
    """
    columns, weights = rows.double().transpose(-1, -2).contiguous(), weights.double().transpose(-1, -2)
    size, n = columns.shape[-2:]
    sums = weights.new_empty(*weights.shape[:-1], size, size)
    step = max(1, min(size, PAIR_CHUNK_NUMBERS // (size * n)))
    for start in range(0, size, step):
        products = columns[..., start : start + step, None, :] * columns[..., None, start:, :]
        block = weights @ products.flatten(-3, -2).transpose(-1, -2)
        sums[..., start : start + step, start:] = block.view(*block.shape[:-1], *products.shape[-3:-1])
    return sums


@functools.cache
def _symmetric_index(size: int, outputs: int) -> Tensor:
    """The place of entry ((i, a), (j, b)) of a Hessian in the result of `weighted_outer` over pairs of outputs."""
    a, b = torch.triu_indices(outputs, outputs, 1)
    pair = torch.diag(torch.arange(outputs))  # an output with itself, then the pairs a < b
    pair[a, b] = pair[b, a] = torch.arange(outputs, outputs + len(a))
    i, j = torch.arange(size).view(-1, 1, 1, 1), torch.arange(size).view(-1, 1)
    place = torch.minimum(i, j) * size + torch.maximum(i, j)  # size x 1 x size x 1
    return (pair.view(1, outputs, 1, outputs) * size**2 + place).flatten()


def clients_of(shard: Shard) -> list[Shard]:
    """The clients of a batch, as separate shards."""
    y, mask, length = (None if part is None else part.expand(shard.x.shape[:-1]) for part in shard[1:4])
    return [
        Shard(shard.x[k], y[k], mask[k], None if length is None else length[k], shard.per_person)  # type: ignore[index]
        for k in range(len(shard.x))
    ]


def sum_over(shard: Shard, total: Callable[[Shard], SumT], rows: int | None = None) -> SumT:
    """The sum of `total` over chunks of a shard; None if `total` returns None."""
    x, y, mask, length, per_person = shard
    n = x.shape[-2]
    rows = product_rows(n, MATRIX_CHUNK_RECORDS) if rows is None else rows
    rows = max(1, rows // per_person) * per_person
    if 0 < n <= rows:
        return total(shard)
    parts = (
        Shard(x[..., k, :], y[..., k], mask[..., k], None if length is None else length[..., k], per_person)
        for k in (slice(start, start + rows) for start in range(0, n, rows))
    )
    sums = total(next(parts))
    for part in parts if sums is not None else ():
        sums += total(part)  # type: ignore[operator]
    return sums
