"""Tallies: what one record adds, its bound, and exact sums."""

import math

import numpy as np
import pytest
import torch
from scipy.special import expit

from sordino.core import Adjacency, Shard
from sordino.errors import SordinoError
from sordino.models import tally
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear, Loss
from sordino.models.tally import CountTally, ErrorTally, ScoreTally, SurvivalTally, score_edges

LOGISTIC = Linear(1, 1, Loss.LOGISTIC, bias=False)
ONE = torch.ones(1, dtype=torch.float64)


def shard(z, y):
    z = torch.as_tensor(np.asarray(z, float)).unsqueeze(-1)
    return Shard(z, torch.as_tensor(np.asarray(y)), torch.ones(len(z), dtype=torch.float64))


def parts(counted, z, y, clip=None):
    total = counted.tally_sum(ONE, shard(z, y), counted.clip if clip is None else clip)
    return {name: np.asarray(part) for name, part in counted.split(total).items()}


def test_scores_are_counted_by_label_and_bin():
    counted = ScoreTally(LOGISTIC, score_edges(4))
    z, y = [-5.0, -1.0, 0.0, 1.0, 5.0, 1.0], [0, 1, 1, 1, 1, 0]
    found = parts(counted, z, y)
    assert found["cells"].tolist() == [1, 0, 1, 0, 0, 2, 1, 1], "a score of exactly 0.5 is not above the threshold"
    assert found["confusion"].tolist() == [1, 1, 2, 2]
    p = expit(np.array(z))
    assert found["predicted"][0] == pytest.approx(p.sum(), abs=6 * tally.GRID)
    assert found["brier"][0] == pytest.approx(np.square(p - y).sum(), abs=6 * tally.GRID)


def test_many_classes_are_counted_by_whether_the_prediction_is_right():
    counted = ScoreTally(Linear(3, 3, bias=False), score_edges(8))
    x = torch.eye(3, dtype=torch.float64)
    theta = torch.tensor([2.0, 0, 0, 0, 5.0, 0, 0, 0, 0.0], dtype=torch.float64)
    total = counted.tally_sum(theta, Shard(x, torch.tensor([0, 2, 0]), torch.ones(3).double()), counted.clip)
    found = counted.split(total)
    assert float(found["cells"][8:].sum()) == 2, "record 0 is right; of three equal classes the first is predicted"
    p = torch.softmax((x @ theta.reshape(3, 3)), -1)
    own = torch.nn.functional.one_hot(torch.tensor([0, 2, 0]), 3)
    assert float(found["brier"][0]) == pytest.approx(float((p - own).square().sum() / 2), abs=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_a_record_of_any_size_adds_one_vector_within_the_bound(value):
    for counted in (ScoreTally(LOGISTIC, score_edges(16)), ErrorTally(Linear(1, 1, Loss.SQUARES, bias=False))):
        vector = counted.tally_sum(ONE, shard([value], [1]), counted.clip)
        assert torch.isfinite(vector).all()
        assert float(vector.norm()) <= counted.clip
        assert (vector >= 0).all()


def test_sums_are_exact_in_any_order_and_for_many_records(monkeypatch):
    counted, rng = ScoreTally(LOGISTIC, score_edges(16)), np.random.default_rng(0)
    z, y = 10 * rng.normal(size=20_001), rng.integers(2, size=20_001)
    whole = counted.tally_sum(ONE, shard(z, y), counted.clip)
    order = rng.permutation(len(z))
    monkeypatch.setattr(tally, "CHUNK_NUMBERS", 1000)
    assert torch.equal(whole, counted.tally_sum(ONE, shard(z[order], y[order]), counted.clip))
    without = counted.tally_sum(ONE, shard(z[1:], y[1:]), counted.clip)
    assert torch.equal(whole - without, counted.tally_sum(ONE, shard(z[:1], y[:1]), counted.clip))


def by_person(z, y, counts, per_person):
    """Persons with so many records each, in `per_person` rows."""
    rows = np.full((len(counts), per_person), -1)
    at = 0
    for k, count in enumerate(counts):
        rows[k, :count] = np.arange(at, at + count)
        at += count
    rows = rows.reshape(-1)
    whole = shard(np.asarray(z, float)[rows], np.asarray(y)[rows])
    return whole._replace(mask=torch.from_numpy((rows >= 0).astype(float)), per_person=per_person)


def test_a_person_adds_the_mean_of_its_records():
    counted = ScoreTally(LOGISTIC, score_edges(4))
    z, y, counts = [-5.0, 5.0, 5.0, -5.0], [0, 1, 1, 0], [3, 1]
    found = counted.split(counted.tally_sum(ONE, by_person(z, y, counts, 3), counted.clip))
    assert found["cells"].numpy() == pytest.approx([1 / 3 + 1, 0, 0, 0, 0, 0, 0, 2 / 3], abs=2 * tally.GRID)
    assert float(found["cells"].sum()) <= 2, "rounding down keeps the total within the number of persons"
    assert float(found["predicted"][0]) == pytest.approx(expit(np.array(z))[:3].mean() + expit(-5), abs=6 * tally.GRID)


def test_sums_over_persons_are_exact_and_within_the_bound(monkeypatch):
    counted, rng = ScoreTally(LOGISTIC, score_edges(16)), np.random.default_rng(0)
    counts = rng.integers(1, 8, 500)
    z, y = 10 * rng.normal(size=counts.sum()), rng.integers(2, size=counts.sum())
    whole = counted.tally_sum(ONE, by_person(z, y, counts, 7), counted.clip)
    each = [
        counted.tally_sum(ONE, by_person(z[end - n : end], y[end - n : end], [n], 7), counted.clip)
        for n, end in zip(counts, counts.cumsum(), strict=True)
    ]
    assert torch.equal(whole, torch.stack(each).sum(0))
    assert max(float(one.norm()) for one in each) <= counted.clip
    assert float(torch.cdist(torch.stack(each), torch.stack(each)).max()) <= counted.bound(1, Adjacency.REPLACE_ONE)
    monkeypatch.setattr(tally, "CHUNK_NUMBERS", 1000)
    assert torch.equal(whole, counted.tally_sum(ONE, by_person(z, y, counts, 7), counted.clip))


def test_bounds_follow_from_the_blocks():
    scores, errors = ScoreTally(LOGISTIC, score_edges(16)), ErrorTally(Linear(1, 1, Loss.SQUARES))
    safety = 1 - 2.0**-14
    assert scores.clip * safety == pytest.approx(math.sqrt(1 + 3 / 4))
    assert scores.bound(9, Adjacency.REPLACE_ONE) * safety == pytest.approx(math.sqrt(2 * 1.25 + 0.5))
    assert errors.bound(9, Adjacency.REPLACE_ONE) == errors.clip, "numbers from 0 to 1 differ by 1 at most"


def test_a_smaller_clip_shortens_every_vector():
    counted = ScoreTally(LOGISTIC, score_edges(4))
    short = counted.tally_sum(ONE, shard([1.0], [1]), 0.5)
    assert float(short.norm()) == pytest.approx(0.5 * (1 - 2.0**-14))


def test_edges_hold_the_threshold_and_serve_rare_classes():
    for threshold in (0.5, 0.2, 0.013):
        edges = score_edges(32, threshold)
        assert len(edges) == 31
        assert list(edges) == sorted(set(edges))
        assert math.log(threshold / (1 - threshold)) in edges
    p = expit(np.array(score_edges(32)))
    assert (p < 0.03).sum() >= 4, "scores near a prevalence of 1 % fall into several bins"
    assert np.diff(p).max() < 0.06


@pytest.mark.parametrize(("bins", "threshold"), [(3, 0.5), (5000, 0.5), (32, 0.0), (32, 1.0)])
def test_edges_out_of_range_are_refused(bins, threshold):
    with pytest.raises(SordinoError, match="must lie between"):
        score_edges(bins, threshold)


def test_a_tally_of_scores_needs_classes_and_its_threshold_among_the_edges():
    with pytest.raises(SordinoError, match="no classes"):
        ScoreTally(Linear(1, 1, Loss.SQUARES), score_edges(8))
    with pytest.raises(SordinoError, match="hold the threshold"):
        ScoreTally(LOGISTIC, (-1.0, 1.0))


def test_quantities_have_errors_within_their_range():
    counted = ErrorTally(Linear(1, 1, Loss.SQUARES, bias=False))
    found = parts(counted, [5.0, 0.5], [-1.0, 0.25])
    assert found["absolute error"][0] == pytest.approx(1.0 + 0.125, abs=1e-5), (
        "a prediction beyond the range is clamped"
    )
    assert found["squared error"][0] == pytest.approx(1.0 + 0.125**2, abs=1e-5)
    assert found["value"][0] == pytest.approx(0.0 + 0.625, abs=1e-5)


def test_survival_counts_outcomes_by_risk_and_squared_errors_by_edge():
    model = Hazards(1, (0.0, 1.0, 2.0))
    counted = SurvivalTally(model, score_edges(4))
    theta = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    x, y = torch.tensor([[5.0], [-5.0], [0.0]], dtype=torch.float64), torch.tensor([0.5, -7.0, -1.5])
    total = counted.tally_sum(theta, Shard(x, y, torch.ones(3).double()), counted.clip)
    found = counted.split(total)
    assert found["outcomes"].tolist() == [0, 1, 1, 0, 1], "event in the first, censored in the second, beyond"
    cells = found["cells"].reshape(4, 5)
    assert float(cells[3, 1]) == float(cells[0, 4]) == 1, "high risk and an early event; low risk and none"
    survival = model.scores(theta, x)
    expected = [(1 - survival[1, 0]).square() + (1 - survival[2, 0]).square(), survival[0, 0].square()]
    assert found["brier 1"].tolist() == pytest.approx([float(e) for e in expected], abs=1e-5)
    assert found["brier 2"].tolist() == pytest.approx(
        [float((1 - survival[1, 1]).square()), float(survival[0, 1].square()), 0.0], abs=1e-5
    ), "who was last seen before an edge adds nothing there"


def test_counts_have_errors_and_a_capped_deviance():
    counted = CountTally(Linear(1, 1, Loss.POISSON, bias=False), 5.0)
    z = [math.log(2 / 5), math.log(1e-6), math.log(100)]
    found = parts(counted, z, [1 / 5, 4 / 5, 30.0])
    deviance = 2 * (1 * math.log(1 / 2) - 1 + 2)
    assert found["deviance"][0] == pytest.approx((deviance + 10 + 0) / 10, abs=1e-4)
    assert found["absolute error"][0] == pytest.approx((1 + 4 + 0) / 25, abs=1e-4), "beyond the maximum both are 25"
    assert found["predicted"][0] == pytest.approx((2 + 0 + 25) / 25, abs=1e-4)
