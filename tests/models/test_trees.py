"""Trees with public splits: their leaves, their sums, and the linear model they are."""

import math

import numpy as np
import pytest
import torch

from sordino.core import Shard
from sordino.errors import SordinoError
from sordino.models.linear import Loss
from sordino.models.trees import Trees

WIDTHS = (1, 4, 2)  # a number, a category of four levels, a number with the indicator of a missing value


def shard(rows=300, seed=0, numeric=False):
    rng = np.random.default_rng(seed)
    x = np.zeros((rows, 7))
    x[:, 0] = rng.uniform(-1, 1, rows)
    x[np.arange(rows), 1 + rng.integers(4, size=rows)] = 1
    x[:, 5], x[:, 6] = rng.uniform(-1, 1, rows), rng.random(rows) < 0.2
    y = rng.normal(size=rows) if numeric else rng.integers(3, size=rows)
    return Shard(torch.from_numpy(x), torch.from_numpy(y), torch.ones(rows, dtype=torch.float64))


def model(kind=Loss.SOFTMAX, **options):
    given = {"trees": 5, "depth": 3, "widths": WIDTHS, "seed": 1, **options}
    return Trees(7, 3 if kind is Loss.SOFTMAX else 1, kind, **given)


def theta(of, seed=0):
    return torch.randn(of.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_every_record_is_in_one_leaf_that_its_words_describe(columns):
    of, x = model(columns=columns), shard().x
    names = ["age", "ward = a", "ward = b", "ward = c", "ward = d", "weight", "weight is missing"]
    leaf = of.leaf(x, range(of.trees))
    assert leaf.shape == (of.trees, len(x))
    assert 0 <= leaf.min() <= leaf.max() < of.leaves
    for tree in range(of.trees):
        assert len(of.splits[tree]) == columns
        assert len({split.first for split in of.splits[tree]}) == columns
        for place in range(of.leaves):
            words = of.words_of(tree, place, names)
            inside = [
                all(_holds(part, dict(zip(names, row, strict=True)), of.bins > 2) for part in words.split(" and "))
                for row in x.tolist()
            ]
            assert inside == (leaf[tree] == place).tolist(), words


def _holds(words, row, missing_apart):
    """Whether a record lies where the words say."""
    if words == "none":
        return False
    if "<" not in words:
        if words in ("age", "weight"):  # beyond no edge
            return True
        return any(row[level] == 1 for level in words.split(" or "))
    parts = words.replace("<=", "<").split(" < ")
    place = next(k for k, part in enumerate(parts) if part in row)
    value = row[parts[place]]
    if missing_apart and parts[place] == "weight" and row["weight is missing"]:
        return False
    return (not place or float(parts[0]) < value) and (place == len(parts) - 1 or value <= float(parts[-1]))


def test_columns_take_turns():
    firsts = [split.first for tree in model(trees=30).splits for split in tree]
    assert {first: firsts.count(first) for first in (0, 1, 5)} == {0: 10, 1: 10, 5: 10}


def test_splits_follow_from_the_public_seed_alone():
    assert model().splits == model().splits
    assert model().splits != model(seed=2).splits


@pytest.mark.parametrize("kind", [Loss.SOFTMAX, Loss.SQUARES, Loss.POISSON])
def test_it_is_a_linear_model_of_leaf_indicators(kind):
    of, data = model(kind), shard(numeric=kind is not Loss.SOFTMAX)
    at = 0.3 * theta(of)
    expanded = data._replace(x=of._indicators(data.x).double())
    torch.testing.assert_close(of.logits(at, data.x), of.linear.logits(at, expanded.x))
    torch.testing.assert_close(of.predict(at, data.x), of.linear.predict(at, expanded.x))
    torch.testing.assert_close(of.scores(at, data.x), of.linear.scores(at, expanded.x))
    torch.testing.assert_close(of.clipped_sum(at, data, 0.5), of.linear.clipped_sum(at, expanded, 0.5))
    losses = torch.stack([of.loss(at, x, y) for x, y in zip(data.x[:5], data.y[:5], strict=True)])
    assert torch.isfinite(losses).all()


@pytest.mark.parametrize("kind", [Loss.SOFTMAX, Loss.SQUARES, Loss.POISSON])
def test_sums_by_leaf_are_derivatives_of_the_loss(kind):
    """Residuals are the gradient of the tree's leaf values, curvatures the diagonal of its Hessian."""
    of, data = model(kind), shard(rows=40, numeric=kind is not Loss.SOFTMAX)
    at, unit = (0.3 * theta(of)).requires_grad_(), 1.0 if kind is Loss.SOFTMAX else 0.25
    total = sum(of.loss(at, x, y) for x, y in zip(data.x, data.y, strict=True))
    (gradient,) = torch.autograd.grad(total, at, create_graph=True)
    size = of.leaves * of.outputs
    for tree in (0, 4):
        places = range(tree * size, (tree + 1) * size)
        residual, curvature = of.leaves_sum(at.detach(), data, math.inf, tree).chunk(2)
        torch.testing.assert_close(residual, gradient.detach()[places.start : places.stop])
        diagonal = torch.stack([torch.autograd.grad(gradient[k], at, retain_graph=True)[0][k] for k in places])
        torch.testing.assert_close(curvature, unit * diagonal, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("per_person", [1, 3])
def test_a_record_or_person_adds_at_most_the_clip(per_person):
    of, clip = model(), 0.3
    data = shard(rows=30)._replace(per_person=per_person)
    at = 3 * theta(of)
    whole = of.leaves_sum(at, data, clip, 2)
    parts = []
    for k in range(0, 30, per_person):
        mask = torch.zeros(30, dtype=torch.float64)
        mask[k : k + per_person] = 1
        parts.append(of.leaves_sum(at, data._replace(mask=mask), clip, 2))
    assert max(part.norm() for part in parts) <= clip
    assert max(part.norm() for part in parts) > 0.999 * clip
    torch.testing.assert_close(sum(parts), whole)


def test_a_record_that_is_not_finite_adds_nothing():
    of, data = model(), shard(rows=6)
    x = data.x.clone()
    x[0, 3], x[1, 0] = math.nan, math.inf
    mask = data.mask.clone()
    mask[:2] = 0
    broken, without = data._replace(x=x), data._replace(mask=mask)
    for total in (
        lambda part: of.leaves_sum(theta(of), part, 1.0, 0),
        lambda part: of.clipped_sum(theta(of), part, 1.0),
    ):
        torch.testing.assert_close(total(broken), total(without))


def test_a_person_whose_sum_overflows_adds_nothing():
    of = Trees(1, 1, Loss.SQUARES, trees=1, depth=1)
    y = torch.tensor([1e308, 1e308, 2.0, 1.0], dtype=torch.float64)
    data = Shard(torch.zeros(4, 1), y, torch.ones(4), None, 2)
    without = data._replace(mask=torch.tensor([0.0, 0, 1, 1]))
    torch.testing.assert_close(of.leaves_sum(of.init(), data, 1.0, 0), of.leaves_sum(of.init(), without, 1.0, 0))


def test_runs_and_clients_are_computed_together():
    of = model()
    clients = [shard(rows=20, seed=k) for k in range(2)]
    both = Shard(*(torch.stack([part[k] for part in clients]) for k in range(3)))
    thetas = torch.stack([theta(of, k) for k in range(2)])
    each = torch.stack([of.leaves_sum(thetas[k], clients[k], 0.5, 1) for k in range(2)])
    torch.testing.assert_close(of.leaves_sum(thetas, both, 0.5, 1), each)
    runs = torch.stack([of.leaves_sum(thetas[k], clients[0], 0.5, 1) for k in range(2)])
    torch.testing.assert_close(of.leaves_sum(thetas, clients[0], 0.5, 1), runs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trees": 0}, "trees: 0 must lie"),
        ({"depth": 7}, "depth: 7 must lie between 1 and 6"),
        ({"columns": 4}, "columns: 4 must lie between 1 and 3"),
        ({"widths": (1, 4)}, "widths: .* add up to 7"),
        ({"kind": Loss.LOGISTIC}, "loss: trees have no logistic loss"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(SordinoError, match=message):
        model(**options)


@pytest.mark.parametrize("per_person", [1, 3])
def test_the_slope_is_that_of_the_linear_model_and_a_person_adds_at_most_the_clip(per_person):
    of = Trees(7, 2, trees=5, depth=3, widths=WIDTHS, seed=1)
    part = shard()
    part = part._replace(y=part.y % 2, per_person=per_person)
    at = 3 * theta(of)
    whole = of.slope_sum(at, part, math.sqrt(2))
    linear = of.linear.slope_sum(at, part._replace(x=of._indicators(part.x).to(part.x)), math.sqrt(2))
    assert torch.allclose(whole, linear)
    moves = []
    for first in range(0, 30, per_person):
        mask = part.mask.clone()
        mask[first : first + per_person] = 0
        moves.append(float((of.slope_sum(at, part._replace(mask=mask), math.sqrt(2)) - whole).norm()))
    assert 0.1 < max(moves) <= math.sqrt(2)


def test_the_slope_of_trees_is_calibrated():
    from sordino.core import Privacy
    from sordino.data.records import Records
    from sordino.engines import simulate
    from sordino.methods import build
    from sordino.methods.calibration import calibrated
    from sordino.privacy.mechanisms.random import Seeded
    from sordino.privacy.plan import Plan
    from sordino.training.metrics import calibration_slope

    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (4000, 3))
    y = (rng.random(4000) < 1 / (1 + np.exp(-1.5 * x[:, 0]))).astype(np.int64)
    records = Records.of(x, y, np.arange(4000) % 4, dtype=torch.float64)
    of = Trees(3, 2, trees=30, depth=4, seed=1)
    slopes = []
    for slope in (0.0, 0.1):
        plan = Plan(calibrated(build("dp-boost"), 0.1, slope), 33, records.sizes, Privacy(2.0, 1e-5))
        *_, last = simulate.run(plan, of, records, Seeded(3))
        z = of.logits(last.model, torch.from_numpy(x))
        slopes.append(calibration_slope(y, (z[:, 1] - z[:, 0]).numpy()))
    assert abs(slopes[1] - 1) < abs(slopes[0] - 1), slopes
