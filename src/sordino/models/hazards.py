"""Survival with closed-form clipping: a logistic model of the hazard in each of K public intervals of time.

A record is seen from time 0 until its event, or until it was last seen (censored). The label is that time, negative
where the event did not happen (`data.target.Target`). In interval k the event happens with probability

    h_k = sigmoid(x . w + b_k)

for those who are still at risk. With m_k the share of interval k in which a record is at risk (1, or 1/2 where it was
last seen inside: the rule of the life table) and d_k = 1 where its event happens, the loss is the sum over k of
m_k log(1 + exp z_k) - d_k z_k. Its gradient has the residuals r_k = m_k h_k - d_k alone:

    d loss / d w = s x,  s = sum of r_k,      d loss / d b_k = r_k,      norm^2 = s^2 |x|^2 + sum of r_k^2

so a sum of clipped gradients needs no per-example gradients. Where a person has several records, their gradients are
added up and the sum is clipped, once per person. For small hazards exp(w) is a hazard ratio, as in Cox's
model for grouped times. Sums are float64, and every shape depends only on public numbers: docs/proofs.md has the
proof that one record moves a computed sum by at most the clip.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.core import SAFETY, Shard
from sordino.errors import SordinoError
from sordino.models.arithmetic import exact_arithmetic, product_rows
from sordino.models.linear import MATRIX_CHUNK_RECORDS, MIN_NORM, outer, shared_bound, sum_over, usable
from sordino.models.tally import person_means
from sordino.rules.life_table import first_hazard

KIND = "hazards"


class LifeSpan(NamedTuple):
    """What the labels say of each interval: float64, records by intervals."""

    at_risk: Tensor  # m, the share of the interval in which a record is at risk
    event: Tensor  # d, 1 in the interval of the event


class _Terms(NamedTuple):
    """The parts of each record's gradient, float64; all zero where a number is not finite."""

    x: Tensor  # features
    residual: Tensor  # r, by interval
    total: Tensor  # s, the sum of residuals
    length: Tensor  # |x|


@dataclass(frozen=True)
class Hazards:
    """A survival model: the hazard in each public interval of time, proportional in its odds.

    The parameters `theta` are one weight per feature, then one constant per interval.

    Args:
        features: Number of features.
        intervals: Public edges of the intervals, from 0, in the unit of the labels.

    Raises:
        SordinoError: The edges do not rise from 0.

    Example:
        >>> model = Hazards(39, (0.0, 365.0, 730.0, 1095.0))
        >>> model.size, model.outputs
        (42, 3)
    """

    features: int
    intervals: tuple[float, ...]

    serves_persons: ClassVar[bool] = True

    def __post_init__(self) -> None:
        edges = self.intervals
        if len(edges) < 2 or edges[0] != 0 or not all(a < b < math.inf for a, b in itertools.pairwise(edges)):
            raise SordinoError(f"intervals: {list(edges)} must be edges of time that begin with 0 and rise.")

    @property
    def kind(self) -> str:
        return KIND

    @property
    def outputs(self) -> int:
        """Number of intervals."""
        return len(self.intervals) - 1

    @property
    def size(self) -> int:
        return self.features + self.outputs

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size, 1),)

    @property
    def _edges(self) -> Tensor:
        # Not cached: a tensor that is made inside a transform of torch.func must not outlive it.
        return torch.tensor(self.intervals[1:], dtype=torch.float64)

    def init(self, generator: torch.Generator | None = None) -> Tensor:
        """The first parameters: one hazard for everybody, with which half of them pass the last edge."""
        hazard = first_hazard(self.outputs)
        theta = torch.zeros(self.size)
        theta[self.features :] = math.log(hazard / (1 - hazard))
        return theta

    # ------------------------------------------------------------------------------------------------- predictions

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """Log-odds of the hazard, records by intervals."""
        weight, constant = theta[..., : self.features], theta[..., self.features :]
        return x @ weight.unsqueeze(-1) + constant.unsqueeze(-2)

    def life_span(self, y: Tensor) -> LifeSpan:
        """What labels say of each interval. A label that is not finite says nothing."""
        time, happened = y.double().abs(), (y > 0).double()
        whole = torch.bucketize(time, self._edges.to(y.device), right=True).unsqueeze(-1)  # intervals passed
        place = torch.arange(self.outputs, device=y.device)
        fine = torch.isfinite(time).double().unsqueeze(-1)
        last = (place == whole).double() * fine
        event = last * happened.unsqueeze(-1)
        return LifeSpan((place < whole).double() * fine + (last + event) / 2, event)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one example."""
        z = self.logits(theta, x.unsqueeze(0))[0]
        span = self.life_span(y)
        softplus = torch.logaddexp(z, torch.zeros_like(z))
        return (span.at_risk.to(z) * softplus - span.event.to(z) * z).sum(-1)

    def scores(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """The probability that the event has not happened by the end of each interval: records by intervals."""
        z = self.logits(theta, torch.as_tensor(x).to(theta)).double()
        return torch.nn.functional.logsigmoid(-z).cumsum(-1).exp()

    def predict(self, theta: Tensor, x: Tensor | np.ndarray) -> Tensor:
        """The risk: the probability that the event happens before the last edge."""
        return 1 - self.scores(theta, x)[..., -1]

    # ---------------------------------------------------------------------------------------------------- sums

    @exact_arithmetic()
    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, scale: Tensor | None = None) -> Tensor:
        """The sum of gradients (times `scale`), each clipped to norm `clip`: one record moves it by at most `clip`.

        Where a shard has several rows per person, the gradients of a person are added up, and the sum is clipped.
        """
        theta, bound = theta.to(shard.x), clip * (1 - SAFETY)
        scale = None if scale is None else usable(scale).double()

        def part_sum(part: Shard) -> Tensor:
            terms = self._terms(theta, part)
            if part.per_person > 1:
                return self._clipped_persons(terms, part, bound, scale)
            norm = self._norm(terms, scale)
            factor = torch.ones_like(norm) if math.isinf(bound) else bound / norm.clamp_min(bound)
            return self._pull(terms, factor * part.mask)

        total = sum_over(shard, part_sum, self._rows(shard))
        return total if scale is None or shard.per_person > 1 else total * scale

    @exact_arithmetic()
    def count_sum(self, theta: Tensor, shard: Shard, scale: Tensor) -> Tensor:
        """Add 1/2 for every record whose gradient times `scale` has norm at most 1, and -1/2 for every other."""
        theta, scale = theta.to(shard.x), usable(scale).double()

        def part_sum(part: Shard) -> Tensor:
            terms, weights = self._terms(theta, part), part.mask
            if part.per_person > 1:
                norm = torch.linalg.vector_norm(self._person_gradients(terms, part) * scale.unsqueeze(-2), dim=-1)
                weights = part.person_weights()
            else:
                norm = self._norm(terms, scale)
            signs: Tensor = norm.le(1).double() - 0.5
            return (signs * weights).sum(-1, keepdim=True)

        return sum_over(shard, part_sum, self._rows(shard))

    @exact_arithmetic()
    def gram_sum(self, shard: Shard, clip: float, constant: float = 1.0) -> Tensor:
        """The sum of u u^T, u = (x, constant), each clipped to Frobenius norm `clip`. Labels do not matter."""

        def total(part: Shard) -> Tensor:
            x, length, fine = self._usable(part)
            u = torch.cat([x, constant * fine.expand(x.shape[:-1]).unsqueeze(-1)], -1)
            factor = shared_bound(length.square() + constant**2, clip, part)
            return outer(u * (factor.sqrt() * part.mask).unsqueeze(-1))

        return sum_over(shard, total)

    @exact_arithmetic()
    def tally_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """Records by what their label says: censored in interval 0, event in 0, censored in 1, …, beyond the last edge.

        A record adds min(1, clip) to one cell, so it moves the sum by at most `clip`, and by sqrt(2) clip if another
        record replaces it. The sums are exact, and theta does not matter. A label that is not finite adds nothing. A
        person adds the mean of its records, which keeps both bounds: `models.tally` has the proof.
        """

        def total(part: Shard) -> Tensor:
            time = part.y.double().abs()
            whole = torch.bucketize(time, self._edges.to(part.y.device), right=True)
            cell = 2 * whole + ((part.y > 0) & (whole < self.outputs))
            one = (torch.arange(2 * self.outputs + 1, device=cell.device) == cell.unsqueeze(-1)).double()
            one, mask = one * torch.isfinite(time).unsqueeze(-1), part.mask.double()
            if part.per_person > 1:
                one, mask = person_means(one, mask, part.per_person)
            return ((min(1.0, clip) * mask).unsqueeze(-1) * one).sum(-2)

        cells = sum_over(shard, total, self._rows(shard))
        return cells + theta.new_zeros(*theta.shape[:-1], 1).double()

    @exact_arithmetic()
    def curvature_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """The sum of Hessians, each positive semi-definite and clipped to Frobenius norm `clip`.

        With q_k = m_k h_k (1 - h_k) a Hessian is the sum over k of q_k u_k u_k^T, u_k = (x, e_k).
        """

        def total(part: Shard) -> Tensor:
            x, q = self._curved(theta.to(part.x), part, clip)
            weight = q.sum(-1).sqrt().unsqueeze(-1) * x
            cross = x.transpose(-1, -2) @ q
            upper = torch.cat([outer(weight), cross], -1)
            return torch.cat([upper, torch.cat([cross.transpose(-1, -2), torch.diag_embed(q.sum(-2))], -1)], -2)

        return sum_over(shard, total)

    @exact_arithmetic()
    def curvature_times(self, theta: Tensor, shard: Shard, clip: float, v: Tensor) -> Tensor:
        """The sum of clipped Hessians times v, without building a Hessian, in float64."""

        def total(part: Shard) -> Tensor:
            x, q = self._curved(theta.to(part.x), part, clip)
            r = q * self.logits(v.double(), x)
            return torch.cat([(x.transpose(-1, -2) @ r.sum(-1, keepdim=True))[..., 0], r.sum(-2)], -1)

        return sum_over(shard, total, self._rows(shard))

    @exact_arithmetic()
    def fisher_sum(self, theta: Tensor, shard: Shard, clip: float) -> Tensor:
        """The sum of g g^T, each clipped to Frobenius norm `clip`."""

        def total(part: Shard) -> Tensor:
            terms = self._terms(theta.to(part.x), part)
            factor = shared_bound(self._norm(terms, None).square(), clip, part)
            root = (factor.sqrt() * part.mask).unsqueeze(-1)
            return outer(torch.cat([terms.x * (terms.total.unsqueeze(-1) * root), terms.residual * root], -1))

        return sum_over(shard, total)

    # --------------------------------------------------------------------------------------------------- internals

    def _rows(self, shard: Shard) -> int:
        return product_rows(shard.x.shape[-2], MATRIX_CHUNK_RECORDS)

    def _usable(self, part: Shard) -> tuple[Tensor, Tensor, Tensor]:
        """Features (zero where they are not finite), their length, and 1 where they are finite: float64."""
        length = part.length
        if length is None:
            length = torch.linalg.vector_norm(part.x, dim=-1, dtype=torch.float64)
        fine = torch.isfinite(length)
        x = torch.where(fine.unsqueeze(-1), part.x, part.x.new_zeros(()))
        short = length < MIN_NORM  # a norm of such numbers lacks digits
        x = torch.where(short.unsqueeze(-1), x.new_zeros(()), x)
        length = torch.where(fine & ~short, length, length.new_zeros(()))
        return x.double(), length.double(), fine.double()

    def _terms(self, theta: Tensor, part: Shard) -> _Terms:
        """Each record is decided on its own, and all records are computed in the same way."""
        x, length, fine = self._usable(part)
        span = self.life_span(part.y)
        hazard = self.logits(theta.double(), x).sigmoid()
        residual = span.at_risk * hazard - span.event
        residual = torch.where(residual.abs() < MIN_NORM, 0.0, residual)
        good = (fine > 0) & torch.isfinite(residual).all(-1)
        residual = torch.where(good.unsqueeze(-1), residual, 0.0)
        total = residual.sum(-1)
        return _Terms(x, residual, torch.where(total.abs() < MIN_NORM, 0.0, total), length)

    def _norm(self, terms: _Terms, scale: Tensor | None) -> Tensor:
        """The norm of each gradient (times `scale`); infinite where it overflows, so that its factor is 0."""
        if scale is None:
            bias = torch.linalg.vector_norm(terms.residual, dim=-1)
            return torch.hypot(terms.length * terms.total.abs(), bias).nan_to_num(math.inf, math.inf)
        squares = scale.square().unsqueeze(-2)
        length = (terms.x.square() * squares[..., : self.features]).sum(-1).sqrt().nan_to_num(math.inf, math.inf)
        length = (length * terms.total.abs()).masked_fill(terms.total == 0, 0)
        bias = (terms.residual.square() * squares[..., self.features :]).sum(-1).sqrt()
        return torch.hypot(length, bias).nan_to_num(math.inf, math.inf)

    def _person_gradients(self, terms: _Terms, part: Shard) -> Tensor:
        """The gradient of every person, summed over the person's records, in float64."""
        held = (part.mask > 0).unsqueeze(-1)
        g = torch.cat([terms.x * terms.total.unsqueeze(-1), terms.residual.expand(*terms.total.shape, -1)], -1)
        g = torch.where(held, g, 0.0)
        return g.reshape(*g.shape[:-2], -1, part.per_person, g.shape[-1]).sum(-2)

    def _clipped_persons(self, terms: _Terms, part: Shard, bound: float, scale: Tensor | None) -> Tensor:
        """The sum of persons' gradients (times `scale`), each clipped; its norm is that of the numbers added."""
        g = self._person_gradients(terms, part)
        g = g if scale is None else g * scale.unsqueeze(-2)
        norm = torch.linalg.vector_norm(g, dim=-1)
        fine = torch.isfinite(norm)
        factor = torch.where(fine, bound / norm.clamp_min(bound) if math.isfinite(bound) else 1.0, 0.0)
        g = torch.where(fine.unsqueeze(-1), g, 0.0)
        return ((factor * part.person_weights()).unsqueeze(-2) @ g).squeeze(-2)

    def _pull(self, terms: _Terms, factor: Tensor) -> Tensor:
        """The sum over records of factor times gradient."""
        along = (terms.total * factor).unsqueeze(-2)
        return torch.cat([(along @ terms.x)[..., 0, :], (factor.unsqueeze(-2) @ terms.residual)[..., 0, :]], -1)

    def _curved(self, theta: Tensor, part: Shard, clip: float) -> tuple[Tensor, Tensor]:
        """Features, and q of each record times its clip factor."""
        x, length, fine = self._usable(part)
        z = self.logits(theta.double(), x)
        q = self.life_span(part.y).at_risk * z.sigmoid() * (-z).sigmoid() * fine.unsqueeze(-1)
        q = torch.where(torch.isfinite(q).all(-1, keepdim=True), q, 0.0)
        squares, weight = q.square().sum(-1), q.sum(-1)
        cross = math.sqrt(2) * length * squares.sqrt()
        norm = torch.hypot(torch.hypot(weight * length.square(), cross), squares.sqrt())
        factor = shared_bound(norm.nan_to_num(math.inf, math.inf), clip, part)
        return x, q * (factor * part.mask).unsqueeze(-1)
