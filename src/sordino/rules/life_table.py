"""Steps of a survival model that follow from public numbers, one noised histogram and one noised mean of u u^T.

The histogram counts records by what their label says (`Hazards.tally_sum`): censored or with the event in interval
k, or beyond the last edge. It is a life table: who is at risk in an interval, and how many have the event. So it gives
the baseline hazards h_k, which the model begins with. Near them the gradient is linear in theta, with the curvature

    H = mean over records of sum over k of m_k v_k u_k u_k^T,   u_k = (x, e_k),   v_k = h_k (1 - h_k)

where m_k is the share of interval k in which a record is at risk. If that does not depend on x, then H is the sum over
k of E[m_k] v_k T_k A T_k^T: A is the mean of u u^T with u = (x, 1), and T_k puts (x, 1) in the places of x and b_k. So
H is positive semi-definite, and follows from the life table and from A. `kalman` steps along its eigenvectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sordino.core import Facts, Rule, Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.rules.baseline import BIAS_OF_PERSONS, BIAS_OF_RECORDS, Baseline
from sordino.rules.estimates import FLOOR, spectrum
from sordino.rules.kalman import DAMPING, KalmanState, unshifted

FIRST_SURVIVAL = 0.5  # up to the last edge, before any data: in the middle of what is possible
LEAST_AT_RISK = 0.01  # share of records in an interval; fewer are taken as that many
BALANCE_STEPS = 60  # of Newton's method
LEAST_CURVATURE = 1e-9
MOST_SHIFT = 3.0  # of a constant, by clipping
LEAST_RELATIVE_HAZARD = 0.05  # of an interval, relative to the mean over intervals


def first_hazard(intervals: int) -> float:
    """The hazard in each interval before any data: half of all records pass the last edge."""
    return float(1 - FIRST_SURVIVAL ** (1 / intervals))


class LifeTable(NamedTuple):
    """Shares of records by interval: weighted by how long they are at risk, and with the event."""

    at_risk: Tensor
    events: Tensor


class LifeTableState(NamedTuple):
    """The state of `release_life_table`."""

    cells: Tensor  # the noised histogram, as shares of all records
    std: Tensor  # of the noise on a cell
    at_risk: Tensor  # of each interval, the share of records, smoothed


class CurvatureState(NamedTuple):
    """The state of `estimate_hazard_curvature`."""

    table: LifeTableState
    kalman: KalmanState


def of_cells(cells: Tensor) -> LifeTable:
    """The life table of a histogram: censored in 0, event in 0, censored in 1, …, beyond the last edge.

    A record that is censored in an interval is at risk during half of it.
    """
    censored, events = cells[..., 0:-1:2], cells[..., 1::2]
    here = censored + events
    later = cells.sum(-1, keepdim=True) - here.cumsum(-1)
    return LifeTable(later + events + censored / 2, events)


def smoothed(cells: Tensor, std: Tensor, first: float) -> LifeTable:
    """The life table that a noised histogram makes most plausible.

    All events together, and then those of each interval, are drawn towards what is known without them, by the share of
    noise in them: first the hazard `first` in every interval, then the mean hazard of all intervals.

    Args:
        cells: The noised histogram, as shares.
        std: Of the noise on a cell.
        first: The hazard before any data.
    """
    cells = cells.double()
    std = torch.as_tensor(std, dtype=torch.float64).to(cells)
    table = of_cells(cells)
    at_risk = table.at_risk.clamp(LEAST_AT_RISK, 1).cummin(-1).values
    intervals, whole = at_risk.shape[-1], at_risk.sum(-1, keepdim=True)
    expected = first * whole
    variance = intervals * std.square()
    share = expected.square() / (expected.square() + variance)
    total = expected + share * (table.events.sum(-1, keepdim=True) - expected)
    mean = total.maximum(variance.sqrt()).clamp_min(1e-3 * expected) / whole * at_risk
    share = mean.square() / (mean.square() + std.square())
    events = (mean + share * (table.events - mean)).maximum(LEAST_RELATIVE_HAZARD * mean)
    return LifeTable(at_risk, events.minimum(0.95 * at_risk))


def life_table_of(cells: np.ndarray, std: float, intervals: Sequence[float]) -> list[dict[str, float]]:
    """A released life table for people: by interval, shares of records at risk and with the event, and survival.

    Args:
        cells: The noised histogram, as shares.
        std: Of the noise on a cell.
        intervals: The public edges, from 0.
    """
    first = first_hazard(len(intervals) - 1)
    noised, smooth = of_cells(torch.from_numpy(cells)), smoothed(torch.from_numpy(cells), torch.tensor(std), first)
    survival = (1 - smooth.events / smooth.at_risk).cumprod(-1).tolist()
    columns = zip(intervals, intervals[1:], noised.at_risk.tolist(), noised.events.tolist(), survival, strict=False)
    names = ("start", "end", "at_risk", "events", "survival")
    return [{**dict(zip(names, map(float, row), strict=True)), "std": float(std)} for row in columns]


def release_life_table(intervals: int, first: float) -> Rule:
    """Begin with the baseline hazards of a noised life table.

    Args:
        intervals: Number of public intervals.
        first: The hazard before any data.

    Returns:
        A rule that sets the constants of a survival model, and leaves its weights unchanged.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> LifeTableState:
        if facts.intervals != intervals:
            raise SordinoError(
                f"intervals: {intervals} of the method and {facts.intervals} of the model must be equal; leave the "
                "option out, because the schema says how many there are."
            )
        std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta)
        cells = theta.new_zeros(*theta.shape[:-1], 2 * intervals + 1)
        return LifeTableState(cells, std, torch.ones_like(cells[..., :intervals]))

    def update(cells: Tensor, state: LifeTableState, theta: Tensor, t: int) -> tuple[Tensor, LifeTableState]:
        at_risk, events = smoothed(cells, state.std, first)
        constant = torch.log(events / (at_risk - events)).to(theta)
        step = torch.zeros_like(theta)
        step[..., -intervals:] = constant - theta[..., -intervals:]
        return step, state._replace(cells=cells.to(theta), at_risk=at_risk.to(theta))

    return Rule(init, update)


def balanced(constant: Tensor, at_risk: Tensor, square: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Constants at which the clipped gradients of a life table add up to zero, and the curvature along each.

    Without weights, all records of a cell have the same residuals; their |u|^2 is taken to be its mean.

    Args:
        constant: Log-odds of the hazards of the life table.
        at_risk: Share of records at risk in each interval.
        square: Mean of |u|^2.
        clip: Clip of a record's gradient.

    Returns:
        The constants, and for each the mean of m h (1 - h) times the clip factor.
    """
    intervals = constant.shape[-1]
    share, m, d = _cells_of(at_risk, at_risk * constant.sigmoid())
    b = constant
    for _ in range(BALANCE_STEPS):
        hazard = b.sigmoid().unsqueeze(-2)
        r = m * hazard - d
        norm = ((square - 1).clamp_min(0) * r.sum(-1).square() + r.square().sum(-1)).sqrt()
        weight = (share * (clip / norm.clamp_min(clip))).unsqueeze(-1)
        curve = (weight * m * hazard * (1 - hazard)).sum(-2).clamp_min(LEAST_CURVATURE)
        b = b - ((weight * r).sum(-2) / curve).clamp(-0.5, 0.5)
    # Beyond what a clip can explain, the life table is too noisy to tell.
    return constant + (b - constant).clamp(-MOST_SHIFT, MOST_SHIFT), curve.expand(*curve.shape[:-1], intervals)


def _cells_of(at_risk: Tensor, events: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of the cells of a life table (censored in 0, event in 0, …, beyond), and its m and d by interval."""
    intervals = at_risk.shape[-1]
    left, shares = torch.ones_like(at_risk[..., 0]), []
    for k in range(intervals):
        event = events[..., k].minimum(left)
        censored = (2 * (left - at_risk[..., k])).clamp_min(0).minimum(left - event)
        shares += [censored, event]
        left = left - event - censored
    place = torch.arange(intervals).to(at_risk.device)
    cell = torch.arange(2 * intervals + 1).to(at_risk.device).unsqueeze(-1)
    d = (cell == 2 * place + 1).to(at_risk)
    m = (2 * place + 1 <= cell).to(at_risk) + (cell == 2 * place).to(at_risk) / 2
    return torch.stack([*shares, left], -1), m, d


def estimate_hazard_curvature(clip: float, most: float, prior: float) -> Rule:
    """Store the spectrum of H for `kalman`, after a stage of `release_life_table`.

    A clip below |u| cuts the gradients of events, whose residual is near -1, and few others. That is as if events
    counted less: hazards come out too low, and weights hardly change. So while the model is trained its constants are
    those at which the *clipped* gradients of the life table balance (`balanced`). The model that is handed out has
    those at which mean predicted survival is that of the life table (`rules.baseline`).

    Args:
        clip: Clip of a record's gradient.
        most: Bound on |u|^2.
        prior: Standard deviation of a logit before training; every eigenvector contributes equally.

    Returns:
        A rule that leaves theta unchanged.
    """

    def state_of(A: Tensor, theta: Tensor, table: LifeTableState, std: Tensor, bias: Tensor) -> KalmanState:
        value, V = spectrum(A, std, most)
        clean = (V * value.unsqueeze(-2)).double() @ V.transpose(-1, -2).double()
        intervals = table.at_risk.shape[-1]
        constant = theta[..., -intervals:].double()
        square = value.double().sum(-1, keepdim=True)  # mean of |u|^2
        trained, weight = balanced(constant, table.at_risk.double(), square, clip)
        shift = trained - constant
        mass, mean = weight.sum(-1, keepdim=True), clean[..., :-1, -1:]
        cross = mean * weight.unsqueeze(-2)
        constants = torch.diag_embed(weight * clean[..., -1, -1:])
        upper = torch.cat([clean[..., :-1, :-1] * mass.unsqueeze(-1), cross], -1)
        H = torch.cat([upper, torch.cat([cross.transpose(-1, -2), constants], -1)], -2)
        h, vectors = torch.linalg.eigh(H)
        h = h.maximum(FLOOR * h.mean(-1, keepdim=True))
        variance = prior**2 * mass / (h.shape[-1] * h)
        zero = torch.zeros_like(theta[..., :1])
        basis = vectors.to(theta), h.to(theta), variance.to(theta), std
        baseline = Baseline(*(part.to(theta) for part in Baseline.of(A.double(), clean, std, constant, bias)))
        return KalmanState(*basis, zero, zero + DAMPING, shift.to(theta), table.cells, baseline)

    def init(theta: Tensor, facts: Facts, before: Tree) -> CurvatureState:
        if not isinstance(before, LifeTableState):
            raise SordinoError("stages: estimate_hazard_curvature must follow release_life_table.")
        std = torch.as_tensor(facts.aggregate_std, dtype=torch.float64).to(theta)
        rows = theta.shape[-1] - facts.intervals + 1
        A = theta.new_zeros(*theta.shape[:-1], rows, rows)
        bias = theta.new_tensor(BIAS_OF_PERSONS if facts.persons else BIAS_OF_RECORDS)
        return CurvatureState(before, state_of(A, theta, before, std, bias))

    def update(A: Tensor, state: CurvatureState, theta: Tensor, t: int) -> tuple[Tensor, CurvatureState]:
        table, kalman = state
        assert isinstance(kalman.baseline, Baseline)
        rows = theta.shape[-1] - table.at_risk.shape[-1] + 1
        A = A.reshape(*theta.shape[:-1], rows, rows)
        after = CurvatureState(table, state_of(A, theta, table, kalman.noise, kalman.baseline.bias))
        step = torch.zeros_like(theta)
        step[..., -table.at_risk.shape[-1] :] = after.kalman.shift
        return step, after

    def model(theta: Tensor, state: CurvatureState) -> Tensor:
        return unshifted(theta, state.kalman)

    return Rule(init, update, model=model)
