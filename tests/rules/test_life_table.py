"""The life table: what a histogram says, what noise leaves of it, and the curvature that follows."""

import math

import numpy as np
import pytest
import torch

from sordino.core import Facts, Shard
from sordino.errors import SordinoError
from sordino.models.hazards import Hazards
from sordino.rules.kalman import KalmanState, unshifted
from sordino.rules.life_table import (
    LifeTableState,
    balanced,
    estimate_hazard_curvature,
    first_hazard,
    life_table_of,
    of_cells,
    release_life_table,
    smoothed,
)

EDGES = (0.0, 1.0, 2.0, 3.0)
MODEL = Hazards(3, EDGES)
ZERO = torch.zeros(MODEL.size)
CELLS = torch.tensor([0.1, 0.2, 0.1, 0.06, 0.04, 0.1, 0.4], dtype=torch.float64)
RECORDS = 4000


def facts(std=0.0, intervals=3):
    return Facts(1, np.array([RECORDS]), 70, 1.0, std, MODEL.shapes, intervals=intervals)


@pytest.fixture
def shard():
    """Records whose features do not depend on how long they are seen."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RECORDS, 3)) + 1
    time, seen = rng.exponential(4, RECORDS), rng.exponential(5, RECORDS)
    y = np.where(time < seen, time, -seen)
    return Shard(torch.from_numpy(x), torch.from_numpy(y), torch.ones(RECORDS, dtype=torch.float64))


def test_a_histogram_is_a_life_table():
    table = of_cells(CELLS)
    assert table.events.tolist() == pytest.approx([0.2, 0.06, 0.1])
    assert table.at_risk.tolist() == pytest.approx([1 - 0.05, 0.7 - 0.05, 0.54 - 0.02])
    rng = np.random.default_rng(1)
    y = torch.from_numpy(rng.normal(size=500) * 3)
    span = MODEL.life_span(y)
    counted = of_cells(MODEL.tally_sum(ZERO, Shard(torch.zeros(500, 3), y, torch.ones(500)), 1.0))
    torch.testing.assert_close(counted.at_risk, span.at_risk.sum(0))
    torch.testing.assert_close(counted.events, span.event.sum(0))


def test_without_noise_nothing_is_smoothed_and_under_noise_the_first_hazard_remains():
    exact = smoothed(CELLS, torch.tensor(0.0), 0.1)
    torch.testing.assert_close(exact.events, of_cells(CELLS).events)
    lost = smoothed(CELLS, torch.tensor(1e3), 0.1)
    assert torch.isfinite(lost.events).all()
    assert (lost.events < lost.at_risk).all()
    noise = torch.from_numpy(np.random.default_rng(2).normal(size=(200, 7)))
    for std in (0.02, 0.1):
        tables = smoothed(CELLS + std * noise, torch.tensor(std), 0.1)
        hazards, raw = tables.events / tables.at_risk, of_cells(CELLS + std * noise)
        truth = of_cells(CELLS).events / of_cells(CELLS).at_risk
        error = (hazards - truth).square().mean()
        assert error < (raw.events / raw.at_risk - truth).square().mean()  # the mutant: cells as they come
        assert ((hazards > 0) & (hazards < 1)).all()


def test_the_model_begins_with_the_hazards_of_the_table():
    rule, theta = release_life_table(3, first_hazard(3)), MODEL.init().double()
    state = rule.init(theta, facts(), ())
    step, after = rule.update(CELLS, state, theta, 0)
    assert not step[:3].any()
    truth = of_cells(CELLS)
    torch.testing.assert_close((theta + step)[3:].sigmoid(), truth.events / truth.at_risk)
    torch.testing.assert_close(after.cells, CELLS)
    with pytest.raises(SordinoError, match="intervals: 3 of the method and 5 of the model must be equal"):
        rule.init(theta, facts(intervals=5), ())
    with pytest.raises(SordinoError, match="must follow release_life_table"):
        estimate_hazard_curvature(5.0, 10.0, 1.0).init(theta, facts(), ())


def test_the_curvature_is_the_mean_hessian_where_features_and_time_at_risk_are_independent(shard):
    cells = MODEL.tally_sum(ZERO, shard, 1.0) / RECORDS
    first, second = release_life_table(3, first_hazard(3)), estimate_hazard_curvature(1e6, 1e6, 1.0)
    theta = MODEL.init().double()
    step, table = first.update(cells, first.init(theta, facts(), ()), theta, 0)
    theta = theta + step
    A = MODEL.gram_sum(shard, 1e6) / RECORDS
    _, state = second.update(A, second.init(theta, facts(), table), theta, 1)
    V, h = state.kalman.vectors, state.kalman.curvature
    H = MODEL.curvature_sum(theta, shard, math.inf) / RECORDS
    assert float((V * h @ V.T - H).norm() / H.norm()) < 0.05
    assert float(state.kalman.shift.abs().max()) < 1e-6, "no clip cuts events"
    logit = (state.kalman.variance * h).sum() / (h.shape[-1] * state.kalman.variance * h).mean()
    assert float(logit) == pytest.approx(1.0)


def test_rare_events_count_less_by_clip_over_norm():
    rare = torch.tensor([0.1, 0.004, 0.1, 0.004, 0.1, 0.004], dtype=torch.float64)
    table = of_cells(torch.cat([rare, 1 - rare.sum(-1, keepdim=True)]))
    constant = torch.log(table.events / (table.at_risk - table.events))
    for clip, shift in ((2.0, math.log(0.5)), (4.1, 0.0)):
        trained, _ = balanced(constant, table.at_risk, torch.tensor([17.0], dtype=torch.float64), clip)
        assert (trained - constant).tolist() == pytest.approx([shift] * 3, abs=0.03)


@pytest.mark.parametrize("mean", [1.5, 4.0, 30.0])
def test_clipped_gradients_balance_at_the_shifted_constants(mean):
    """Whatever the hazards are, and for records of one length. Without the shift they do not."""
    rng, n = np.random.default_rng(4), 20_000
    x = torch.from_numpy(rng.normal(size=(n, 3)))
    x = 4 * x / x.norm(dim=1, keepdim=True)
    time, seen = rng.exponential(mean, n), rng.uniform(0.5, 5, n)
    y = torch.from_numpy(np.where(time < seen, time, -seen))
    shard = Shard(x, y, torch.ones(n, dtype=torch.float64))
    table = of_cells(MODEL.tally_sum(ZERO, shard, 1.0) / n)
    constant = torch.log(table.events / (table.at_risk - table.events))
    trained, _ = balanced(constant, table.at_risk, torch.tensor([17.0], dtype=torch.float64), 2.0)
    zero = torch.zeros(3, dtype=torch.float64)
    at, without = (MODEL.clipped_sum(torch.cat([zero, b]), shard, 2.0)[3:] / n for b in (trained, constant))
    assert at.abs().max() < 0.002
    assert without.abs().max() > 5 * at.abs().max()


def test_the_shift_is_taken_back_in_the_model_that_is_handed_out():
    theta, std = MODEL.init().double(), torch.tensor(0.0)
    table = LifeTableState(CELLS, std, of_cells(CELLS).at_risk)
    rule = estimate_hazard_curvature(2.0, 100.0, 1.0)
    A = torch.diag(torch.tensor([5.0, 5.0, 5.0, 1.0], dtype=torch.float64))
    step, state = rule.update(A, rule.init(theta, facts(), table), theta, 1)
    assert step[3:].abs().min() > 0.05
    assert not step[:3].any()
    torch.testing.assert_close(rule.model(theta + step, state), theta)
    torch.testing.assert_close(unshifted(theta + step, state.kalman), theta)
    plain = KalmanState(*torch.ones(7, 1), torch.ones(0))
    assert unshifted(theta, plain) is theta


def test_a_released_table_for_people():
    rows = life_table_of(CELLS.numpy(), 0.0, EDGES)
    assert [row["end"] for row in rows] == [1, 2, 3]
    assert rows[0]["survival"] == pytest.approx(1 - 0.2 / 0.95)
    survival = [row["survival"] for row in rows]
    assert survival == sorted(survival, reverse=True)
    noisy = life_table_of(CELLS.numpy() - 0.3, 0.5, EDGES)
    assert all(0 <= row["survival"] <= 1 for row in noisy)
