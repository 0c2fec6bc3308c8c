"""Hazards in intervals of time: gradients, Hessians and histograms against autograd and by hand, and their bounds."""

import math

import numpy as np
import pytest
import torch

from sordino.checks.sums import neighbours
from sordino.core import SAFETY, Adjacency, Shard
from sordino.errors import SordinoError
from sordino.models.hazards import Hazards

EDGES = (0.0, 1.0, 2.0, 4.0)
MODEL = Hazards(4, EDGES)
ZERO = torch.zeros(MODEL.size)
ROWS = 40


@pytest.fixture
def shard():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 4)) * 3, rng.normal(size=ROWS) * 3
    return Shard(torch.from_numpy(x), torch.from_numpy(y), torch.ones(ROWS, dtype=torch.float64))


@pytest.fixture
def theta():
    return torch.from_numpy(np.random.default_rng(1).normal(size=MODEL.size))


def each(shard, function):
    return torch.stack([function(x, y) for x, y in zip(shard.x, shard.y, strict=True)])


def clipped(terms, clip):
    norm = terms.flatten(1).norm(dim=1)
    bound = clip * (1 - SAFETY)
    return (terms * (bound / norm.clamp_min(bound)).view(-1, *[1] * (terms.dim() - 1))).sum(0)


def gradients(shard, theta):
    return each(shard, lambda x, y: torch.func.grad(lambda at: MODEL.loss(at, x, y))(theta))


# ------------------------------------------------------------------------------------------------------ the labels


def test_a_label_says_for_how_long_a_record_is_at_risk():
    y = torch.tensor([0.5, -0.5, 1.0, -2.5, 3.9, -4.0, 9.0, math.nan, math.inf])
    span = MODEL.life_span(y)
    assert span.at_risk.tolist() == [
        [1, 0, 0],  # the event in the first interval
        [0.5, 0, 0],  # last seen inside the first
        [1, 1, 0],  # an interval begins at its first edge
        [1, 1, 0.5],
        [1, 1, 1],
        [1, 1, 1],  # seen to the end
        [1, 1, 1],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert span.event.argmax(-1)[[0, 2, 4]].tolist() == [0, 1, 2]
    assert span.event.sum(-1).tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 0]


def test_survival_is_the_product_of_what_hazards_leave(theta, shard):
    z = MODEL.logits(theta, shard.x)
    survival = MODEL.scores(theta, shard.x)
    torch.testing.assert_close(survival[:, 1], (1 - z[:, 0].sigmoid()) * (1 - z[:, 1].sigmoid()))
    torch.testing.assert_close(MODEL.predict(theta, shard.x), 1 - survival[:, -1])
    first = MODEL.scores(MODEL.init().double(), shard.x)
    torch.testing.assert_close(first[:, -1], torch.full((ROWS,), 0.5, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("edges", [(0.0,), (1.0, 2.0), (0.0, 2.0, 2.0), (0.0, math.inf), (0.0, math.nan)])
def test_edges_rise_from_zero(edges):
    with pytest.raises(SordinoError, match=r"intervals: .* must be edges of time that begin with 0 and rise"):
        Hazards(2, edges)


# ------------------------------------------------------------------------------------------------------ the sums


def check_sums(shard, theta, clip, g):
    """Sums of clipped gradients, of scaled ones, and the count of short ones. g: the gradient of each unit."""
    found = MODEL.clipped_sum(theta, shard, clip)
    torch.testing.assert_close(found, g.sum(0) if math.isinf(clip) else clipped(g, clip))
    scale = torch.linspace(0, 3, MODEL.size, dtype=torch.float64)
    scaled = MODEL.clipped_sum(theta, shard, clip, scale)
    torch.testing.assert_close(scaled, (g * scale).sum(0) if math.isinf(clip) else clipped(g * scale, clip))
    below = ((g * scale).norm(dim=1) <= 1).double() - 0.5
    assert MODEL.count_sum(theta, shard, scale).item() == below.sum()


@pytest.mark.parametrize("clip", [math.inf, 2.0, 0.1])
def test_the_sum_is_that_of_clipped_gradients(shard, theta, clip):
    check_sums(shard, theta, clip, gradients(shard, theta))


def test_the_sums_of_matrices_are_those_of_clipped_terms(shard, theta):
    H = each(shard, lambda x, y: torch.func.jacrev(torch.func.grad(lambda at: MODEL.loss(at, x, y)))(theta))
    g, u = gradients(shard, theta), torch.cat([shard.x, torch.ones(ROWS, 1)], 1)
    for clip in (1.0, 1e6):
        found = MODEL.curvature_sum(theta, shard, clip)
        torch.testing.assert_close(found, clipped(H, clip))
        assert torch.linalg.eigvalsh(found).min() > -1e-12
        v = torch.linspace(-1, 1, MODEL.size, dtype=torch.float64)
        torch.testing.assert_close(MODEL.curvature_times(theta, shard, clip, v), found @ v)
        torch.testing.assert_close(MODEL.fisher_sum(theta, shard, clip), clipped(g[:, :, None] * g[:, None], clip))
        torch.testing.assert_close(MODEL.gram_sum(shard, clip), clipped(u[:, :, None] * u[:, None], clip))


def test_the_histogram_counts_what_labels_say():
    y = torch.tensor([0.5, -0.5, -0.7, 1.5, -3.0, -4.0, 7.0, math.nan])
    shard = Shard(torch.zeros(8, 4), y, torch.tensor([1.0, 1, 1, 1, 0.5, 1, 1, 1]))
    assert MODEL.tally_sum(ZERO, shard, 1.0).tolist() == [2, 1, 0, 1, 0.5, 0, 2]
    assert MODEL.tally_sum(ZERO, shard, 9.0).tolist() == [2, 1, 0, 1, 0.5, 0, 2], "one cell, once"
    assert MODEL.tally_sum(ZERO, shard, 0.25).tolist() == [0.5, 0.25, 0, 0.25, 0.125, 0, 0.5]


def of_persons(shard):
    """Persons of two rows each, the second of which is empty now and then."""
    filled = torch.arange(ROWS) % 8 != 3
    return shard._replace(x=shard.x * filled.unsqueeze(-1), mask=shard.mask * filled, per_person=2)


@pytest.mark.parametrize("clip", [0.5, 3.0, math.inf])
def test_the_gradients_of_a_person_are_added_up_and_clipped_once(shard, theta, clip):
    persons = of_persons(shard)
    g = (gradients(shard, theta) * persons.mask.unsqueeze(-1)).view(-1, 2, MODEL.size).sum(1)
    check_sums(persons, theta, clip, g)


def test_a_person_has_one_count_in_the_histogram():
    y = torch.tensor([0.5, -0.5, -4.0, 7.0, 1.5, math.nan])
    shard = Shard(torch.zeros(6, 4), y, torch.tensor([1.0, 1, 1, 0, 1, 1]), per_person=2)
    found = MODEL.tally_sum(ZERO, shard, 1.0)
    assert found.tolist() == [0.5, 0.5, 0, 0.5, 0, 0, 1], "the empty row of the second person is not counted"


def test_runs_and_clients_are_one_more_axis(shard):
    rng = np.random.default_rng(2)
    theta = torch.from_numpy(rng.normal(size=(3, 5, MODEL.size)))
    x, y, mask = shard.x.view(5, 8, 4), shard.y.view(5, 8), shard.mask.view(5, 8)
    clients = Shard(x, y, mask)
    for name in ("clipped_sum", "curvature_sum", "fisher_sum"):
        together = getattr(MODEL, name)(theta, clients, 1.0)
        alone = [getattr(MODEL, name)(theta[1, k], Shard(x[k], y[k], mask[k]), 1.0) for k in range(5)]
        torch.testing.assert_close(together[1], torch.stack(alone))
    runs = MODEL.clipped_sum(theta[:, 0], shard, 1.0)
    torch.testing.assert_close(runs[2], MODEL.clipped_sum(theta[2, 0], shard, 1.0))
    together = MODEL.gram_sum(clients, 1.0)
    torch.testing.assert_close(together[3], MODEL.gram_sum(Shard(x[3], y[3], mask[3]), 1.0))
    together = MODEL.tally_sum(theta, clients, 1.0)
    torch.testing.assert_close(together[2, 3], MODEL.tally_sum(ZERO, Shard(x[3], y[3], mask[3]), 1.0))


# ---------------------------------------------------------------------------------------------- the bounds


def moved(total, shard, clip):
    """The most that one record moves a sum, as a share of the clip, for each adjacency."""
    worst = dict.fromkeys(Adjacency, 0.0)
    for row in range(len(shard.y)):
        for adjacency, other in neighbours(shard, row):
            gap = float((total(shard) - total(other)).norm()) / clip
            worst[adjacency] = max(worst[adjacency], gap)
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_record_moves_every_sum_by_at_most_its_claim(dtype):
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(24, 4)) * 10.0 ** rng.uniform(-3, 8, (24, 1))).to(dtype)
    shard = Shard(x, torch.from_numpy(rng.normal(size=24) * 3).to(dtype), torch.ones(24, dtype=dtype))
    theta = torch.from_numpy(rng.normal(size=MODEL.size))
    for clip in (1.0, 1e-3):
        worst = moved(lambda s, clip=clip: MODEL.clipped_sum(theta, s, clip), shard, clip)
        assert 0.9 < worst[Adjacency.ADD_REMOVE] <= 1
        assert worst[Adjacency.REPLACE_ONE] <= 2
        for total in (
            lambda s, clip=clip: MODEL.curvature_sum(0 * theta, s, clip),
            lambda s, clip=clip: MODEL.fisher_sum(0 * theta, s, clip),
            lambda s, clip=clip: MODEL.gram_sum(s, clip),
            lambda s, clip=clip: MODEL.tally_sum(ZERO, s, clip),
        ):
            worst = moved(total, shard, clip)
            assert 0.9 < worst[Adjacency.ADD_REMOVE] <= 1
            assert worst[Adjacency.REPLACE_ONE] <= math.sqrt(2) + 1e-12
    # The mutant: the norm forgets the constants, whose residuals are r_k.
    short = torch.tensor([[1e-9, 0, 0, 0]], dtype=dtype)
    one = Shard(short, torch.tensor([-9.0], dtype=dtype), torch.ones(1, dtype=dtype))
    forgetful = MODEL.clipped_sum(theta, one, math.inf)  # as if the factor were 1, because |x| s is small
    assert float(MODEL.clipped_sum(theta, one, 0.1).norm()) <= 0.1 < float(forgetful.norm())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200])
def test_a_record_that_is_not_finite_is_absent_and_changes_no_other(value, shard, theta):
    bad = shard._replace(x=shard.x.clone(), mask=shard.mask.clone())
    bad.x[0, 1] = value
    absent = shard._replace(mask=shard.mask.clone())
    absent.mask[0] = 0
    for clip in (1.0, 1e-6):
        found, others = MODEL.clipped_sum(theta, bad, clip), MODEL.clipped_sum(theta, absent, clip)
        assert torch.isfinite(found).all()
        assert float((found - others).norm()) <= clip
        for name in ("curvature_sum", "fisher_sum"):
            found = getattr(MODEL, name)(theta, bad, clip)
            assert float((found - getattr(MODEL, name)(theta, absent, clip)).norm()) <= clip
    if not math.isfinite(value):
        torch.testing.assert_close(MODEL.clipped_sum(theta, bad, 1.0), MODEL.clipped_sum(theta, absent, 1.0))


def test_records_that_have_no_label_say_nothing(shard, theta):
    blank = shard._replace(y=torch.full_like(shard.y, math.nan))
    assert not MODEL.clipped_sum(theta, blank, 1.0).any()
    assert not MODEL.tally_sum(ZERO, blank, 1.0).any()
    assert not MODEL.curvature_sum(theta, blank, 1.0).any()
