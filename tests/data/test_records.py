"""Records sorted by client, and the views of them that engines take."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.core import Privacy
from sordino.data.records import Lazy, Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy.mechanisms.random import Seeded, source
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from tests.support import covering, tiers


def numbered(client, **kwargs):
    """Record k is the row (k, -k), with label k."""
    k = np.arange(len(client), dtype=float)
    return Records.of(np.stack([k, -k], 1), np.arange(len(client)), np.asarray(client), **kwargs)


owners = st.lists(st.integers(-1, 4), min_size=1, max_size=40).map(lambda more: [*range(5), *more])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(owners, st.randoms(use_true_random=False))
def test_each_client_has_its_own_records_in_their_order(client, random):
    random.shuffle(client)
    records = numbered(client)
    client = np.asarray(client)
    assert records.sizes == tuple((client == i).sum() for i in range(5))
    for i in range(5):
        shard = records.shard(i)
        assert shard.y.tolist() == np.flatnonzero(client == i).tolist()
        assert (shard.x[:, 0] == shard.y).all()
        assert shard.mask.tolist() == [1.0] * len(shard.y)
    assert len(records.x) == (client >= 0).sum(), "records of client -1 are left out"


def test_sorted_input_is_kept_as_it_is():
    assert numbered([0, 0, 1, 2]).y.tolist() == [0, 1, 2, 3]
    assert numbered([-1, 0, 0, 1]).y.tolist() == [1, 2, 3]
    assert numbered([0, 1, -1, 1]).y.tolist() == [0, 1, 3]


def test_records_are_float32_and_labels_int64_unless_asked_otherwise():
    records = numbered([0, 1])
    assert records.x.dtype == torch.float32
    assert records.y.dtype == torch.int64
    assert numbered([0, 1], dtype=torch.float64).x.dtype == torch.float64
    floats = Records.of(np.ones((2, 1)), np.array([0.5, 1.5]), np.array([0, 1]))
    assert floats.y.is_floating_point()
    short = Records.of(np.ones((2, 1)), np.array([1, 2], dtype=np.uint8), np.array([0, 1]))
    assert short.y.dtype == torch.int64


def test_a_shard_is_a_view():
    records = numbered([0, 1, 1])
    assert records.shard(1).x.data_ptr() == records.x[1:].data_ptr()


def test_length_is_the_norm_of_the_rows():
    records = numbered([1, 0, 1], dtype=torch.float64)
    torch.testing.assert_close(records.length, records.x.norm(dim=1))
    torch.testing.assert_close(records.shard(1).length, records.shard(1).x.norm(dim=1))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.data())
def test_buckets_pad_clients_of_like_size(sizes, data):
    records = numbered(np.repeat(np.arange(len(sizes)), sizes))
    cohort = np.array(sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))))
    buckets = records.buckets(cohort)
    assert sorted(i for clients, _ in buckets for i in clients) == cohort.tolist()
    for clients, shard in buckets:
        assert max(sizes[i] for i in clients) <= 2 * min(sizes[i] for i in clients)
        assert shard.x.shape == (len(clients), max(sizes[i] for i in clients), 2)
        for row, i in enumerate(clients):
            mine, m = records.shard(i), sizes[i]
            assert shard.mask[row].tolist() == [1.0] * m + [0.0] * (shard.mask.shape[1] - m)
            torch.testing.assert_close(shard.x[row, :m], mine.x, rtol=0, atol=0)
            assert shard.y[row, :m].tolist() == mine.y.tolist()
            torch.testing.assert_close(shard.length[row, :m], mine.length, rtol=0, atol=0)
            assert not shard.x[row, m:].any()
            assert not shard.length[row, m:].any()


@pytest.mark.parametrize(
    ("x", "y", "field"),
    [
        ([[1.0, 2.0], [np.nan, 0.0], [np.inf, 0.0]], [0, 1, 1], "x: 2 values"),
        (
            [[1.0, 2.0], [1e39, 0.0], [3.0, 0.0]],
            [0, 1, 1],
            "x: 1 values are NaN, infinite or too large for torch.float32",
        ),
        ([[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]], [0.5, np.nan, 1.0], "y: 1 values"),
    ],
)
def test_values_that_are_not_finite_are_refused(x, y, field):
    """Such a record would be counted and sampled like any other, but its gradient would be replaced by zero."""
    owner = np.array([1, 0, 0])
    with pytest.raises(SordinoError, match=field) as error:
        Records.of(np.array(x), np.array(y), owner)
    assert "the first in row 1 (from 0)" in str(error.value), "as the caller counts rows, not as they are sorted"
    assert Records.of(np.nan_to_num(np.array(x), posinf=1.0).clip(-9, 9), np.nan_to_num(y), owner).sizes == (2, 1)


def test_a_table_of_pandas_is_read_as_numbers():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": [50, 60], "dose": [0.5, 1.5]})
    records = Records.of(table, pandas.Series([0, 1]), np.array([1, 0]))
    assert records.x.tolist() == [[60.0, 1.5], [50.0, 0.5]]
    with pytest.raises(SordinoError, match="x: not an array of numbers"):
        Records.of(table.assign(name=["a", "b"]), pandas.Series([0, 1]), np.array([1, 0]))


def unfinished(x, client):
    """Records of which the first is not finite; `Records.of` refuses such a table."""
    finite = Records.of(np.nan_to_num(x), np.zeros(len(x)), client)
    return replace(finite, x=torch.from_numpy(x).float())


def test_padding_is_zero_even_where_the_first_record_is_not_finite():
    records = unfinished(np.array([[np.nan], [1.0], [2.0], [3.0]]), np.array([0, 1, 1, 1]))
    ((_, shard),) = records.buckets(np.array([1]))
    assert shard.x.flatten().tolist() == [1.0, 2.0, 3.0]
    records = unfinished(np.array([[np.nan], [1.0], [2.0], [3.0], [4.0]]), np.array([0, 0, 0, 1, 1]))
    for _, shard in records.buckets(np.array([0, 1])):
        assert torch.isfinite(shard.x[shard.mask == 0]).all()
        assert torch.isfinite(shard.length[shard.mask == 0]).all()


def test_nobody_is_no_bucket():
    assert numbered([0, 1]).buckets(np.array([], dtype=int)) == []


def test_a_cohort_as_one_client():
    records = numbered([0, 1, 1, 2])
    weight = np.array([0.5, 1.0, 0.25])
    everyone = records.fused(np.arange(3), weight)
    assert everyone.x is records.x
    assert everyone.mask.tolist() == [0.5, 1.0, 1.0, 0.25]
    some = records.fused(np.array([0, 2]), weight)
    assert some.y.tolist() == [0, 3]
    assert some.mask.tolist() == [0.5, 0.25]
    torch.testing.assert_close(some.length, some.x.norm(dim=1))


@pytest.mark.parametrize(("rows", "labels", "client"), [(2, 3, [0, 1, 1]), (3, 2, [0, 1, 1]), (3, 3, [0, 1])])
def test_lengths_must_agree(rows, labels, client):
    with pytest.raises(SordinoError, match=f"data: x has {rows} rows, y {labels} labels and client {len(client)} n"):
        Records.of(np.ones((rows, 1)), np.zeros(labels), np.array(client))


@pytest.mark.parametrize(("client", "empty"), [([0, 2, 2], 1), ([1, 1, 1], 0), ([-1, -1, -1], 0), ([], 0)])
def test_every_client_needs_a_record(client, empty):
    with pytest.raises(
        SordinoError, match=f"clients: client {empty} holds no record; number clients 0, 1, 2, … without"
    ):
        Records.of(np.ones((len(client), 1)), np.zeros(len(client)), np.array(client, dtype=int))


# -------------------------------------------------------------------------------------- records made when asked for

SIZES = (3, 5, 8, 13, 21, 6)
TRUTH = Records.of(
    np.random.default_rng(0).normal(size=(sum(SIZES), 2)),
    np.random.default_rng(1).integers(0, 3, sum(SIZES)),
    np.repeat(np.arange(len(SIZES)), SIZES),
    dtype=torch.float64,
)


def lazy():
    """The same records, made on demand, and the clients in the order in which they were asked for."""
    asked = []

    def load(i):
        asked.append(i)
        rows = slice(int(TRUTH.starts[i]), int(TRUTH.starts[i + 1]))
        return TRUTH.x[rows].clone(), TRUTH.y[rows].clone()

    records = Lazy.of(SIZES, load)
    assert asked == [0], "one client shows what the features are like"
    asked.clear()
    return records, asked


def plan_for(method, participation="fixed:2", batch="full", trust="untrusted-server", rounds=6):
    privacy = Privacy(4.0, unit=method.unit, trust=trust)
    who, which = Participation.parse(participation), Sampling.parse(batch)
    return Plan(method, rounds, SIZES, privacy, who, schedule_seed=3, sampling=which)


LAZY = [
    ("dp-fedgd", "record", {}),
    ("dp-fedgd", "client", {}),
    ("dp-fedavg", "record", {"steps": 2}),
    ("dp-fedavg", "client", {"steps": 2}),
]


ON_DEMAND = (range(len(LAZY)), ["full", "poisson:4", "poisson:0.3", "fixed:4"], ["fixed:2", "cyclic:3", "full"])


@pytest.mark.parametrize(
    ("number", "batch", "participation"), tiers(itertools.product(*ON_DEMAND), covering(*ON_DEMAND))
)
def test_records_made_on_demand_give_the_same_run(number, batch, participation):
    name, unit, options = LAZY[number]
    plan, model = plan_for(build(name, unit, **options), participation, batch), Linear(2, 3)
    for shares in (False, True):
        records, asked = lazy()
        there = simulate.run(plan, model, TRUTH, Seeded(1), shares=shares)
        here = simulate.run(plan, model, records, Seeded(1), shares=shares)
        before = np.arange(0)
        for one, other in zip(there, here, strict=True):
            assert np.array_equal(one.cohort, other.cohort)
            assert other.model.dtype is torch.float64
            torch.testing.assert_close(one.aggregate, other.aggregate, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(one.model, other.model, rtol=1e-12, atol=1e-12)
            # Each client of the cohort once, whatever the local steps, and nobody else; a cohort that stays, not again.
            assert asked == ([] if np.array_equal(before, other.cohort) else other.cohort.tolist())
            asked.clear()
            before = other.cohort


@pytest.mark.parametrize("batch", ["full", "poisson:4"])
@pytest.mark.parametrize(("name", "unit", "options"), LAZY)
def test_several_runs_load_a_client_once(name, unit, options, batch):
    plan, model = plan_for(build(name, unit, **options), batch=batch), Linear(2, 3)
    records, asked = lazy()
    theta, sources = model.init().double().expand(3, -1), [Seeded(k) for k in range(3)]
    there = simulate.run(plan, model, TRUTH, sources, theta=theta)
    here = simulate.run(plan, model, records, sources, theta=theta)
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=1e-12, atol=1e-12)
        assert len(asked) == len(set(asked))
        assert set(asked) <= set(other.cohort.tolist())
        asked.clear()


@pytest.mark.parametrize("batch", ["full", "poisson:4"])
def test_the_reference_reads_them_too(batch):
    plan, model = plan_for(build("dp-fedavg", "record", steps=2), batch=batch), Linear(2, 3)
    slow = list(reference.run(plan, model, lazy()[0], Seeded(1)))
    fast = list(simulate.run(plan, model, lazy()[0], Seeded(1), shares=True))
    torch.testing.assert_close(slow[-1].model, fast[-1].model, rtol=1e-9, atol=1e-12)


def test_a_round_to_which_nobody_came_loads_nobody():
    plan = plan_for(build("dp-fedgd", "client"), "poisson:0.1", trust="trusted-server", rounds=12)
    records, asked = lazy()
    empty = 0
    for there, here in zip(
        simulate.run(plan, Linear(2, 3), TRUTH, Seeded(1)),
        simulate.run(plan, Linear(2, 3), records, Seeded(1)),
        strict=True,
    ):
        torch.testing.assert_close(there.model, here.model, rtol=1e-12, atol=1e-12)
        empty += not len(here.cohort)
    assert empty
    assert set(asked) <= {int(i) for cohort in plan.cohorts for i in cohort} | {0}, "the first sends noise for nobody"


def test_views_of_some_clients():
    records, _ = lazy()
    cohort, weight = np.array([1, 4, 5]), np.linspace(0.1, 1.0, len(SIZES))
    for one, other in zip(TRUTH.fused(cohort, weight), records.fused(cohort, weight), strict=True):
        torch.testing.assert_close(one, other)
    for (who, one), (whose, other) in zip(TRUTH.buckets(cohort), records.buckets(cohort), strict=True):
        assert who.tolist() == whose.tolist()
        assert (one.y == other.y)[one.mask > 0].all()
        for left, right in zip((one.x, one.mask, one.length), (other.x, other.mask, other.length), strict=True):
            torch.testing.assert_close(left, right)
    assert records.buckets(np.array([], dtype=int)) == []


def test_a_client_that_holds_another_number_of_records_is_refused():
    records = Lazy.of((2, 3), lambda i: (torch.ones(2, 1), torch.zeros(2)))
    with pytest.raises(SordinoError, match="clients: client 1 has 2 records, but 3 were declared"):
        records.shard(1)


def test_labels_of_a_client_are_checked_when_it_is_loaded():
    """Of every client, for the model of the last run; also of clients that another model's run has loaded."""
    labels = {0: [0, 1], 1: [0, 2], 2: [0, -1]}
    records = Lazy.of((2, 2, 2), lambda i: (torch.ones(2, 4), torch.tensor(labels[i])))
    records.check_fits(Linear(4, 3))
    assert records.shard(1).y.tolist() == [0, 2]
    records.fused(np.array([1]), np.ones(3))
    records.check_fits(Linear(4, 2))
    records.shard(0)
    words = r"clients: client 1 does not fit the model\. y: the label 2 is out of range: the model has 2 classes"
    for load in (
        lambda: records.shard(1),
        lambda: records.fused(np.array([1]), np.ones(3)),
        lambda: records.buckets(np.array([0, 1])),
        lambda: records.picked(np.array([1]), [np.array([0])]),
    ):
        with pytest.raises(SordinoError, match=words):
            load()
    with pytest.raises(SordinoError, match=r"client 2 does not fit the model\. y: the label -1 is out of range"):
        records.shard(2)


def test_a_run_checks_labels_that_are_loaded_on_demand():
    records = Lazy.of((2, 2), lambda i: (torch.ones(2, 4), torch.tensor([0, 5 * i])))
    plan = Plan(build("dp-fedgd"), 2, (2, 2), Privacy())
    with pytest.raises(SordinoError, match=r"client 1 does not fit the model\. y: the label 5 is out of range"):
        list(simulate.run(plan, Linear(4, 3), records, Seeded(0)))


def test_clients_of_equal_size_are_a_view_and_others_are_padded():
    x, y = torch.randn(12, 3), torch.arange(12)
    equal = Records.of(x, y, np.repeat([0, 1, 2], 4))
    ((clients, shard),) = equal.buckets(np.arange(3))
    assert shard.x.shape == (3, 4, 3)
    assert shard.x.data_ptr() == equal.x.data_ptr(), "nothing is copied"
    some = equal.buckets(np.array([0, 2]))[0][1]
    assert some.x.data_ptr() != equal.x.data_ptr()
    for k, i in enumerate(clients):
        for mine, own in zip(shard[:4], equal.shard(int(i))[:4], strict=True):
            assert torch.equal(mine[k], own)
    ((_, padded),) = Records.of(x, y, np.repeat([0, 1, 2], [4, 5, 3])).buckets(np.array([0, 2]))
    assert padded.mask.sum(-1).tolist() == [4, 3]
    assert padded.x[1, 3].tolist() == [0, 0, 0]


def test_what_the_caller_does_to_the_arrays_does_not_change_the_records():
    x, y, weight = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1]), np.ones(4)
    held, shared = (
        Records.of(x, y, np.array([0, 0, 1, 1]), weight=weight),
        Records.of(x, y, np.zeros(4, int), copy=False),
    )
    x *= 30
    y += 7
    weight *= 20
    assert held.x.max() == held.weight.max() == held.y.max() == 1
    assert shared.x.max() == 30


@pytest.mark.parametrize("engine", [reference.run, simulate.run])
def test_records_that_are_changed_in_place_are_refused(engine):
    """The norms by which gradients are clipped are of before; a record would move the sum by 30 clips and more."""

    def held():
        return Records.of(np.ones((4, 2)), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]))

    plan = Plan(build("dp-fedgd"), 3, (2, 2), Privacy(8.0))
    records = held()
    records.x.mul_(30)
    with pytest.raises(SordinoError, match="changed in place"):
        next(engine(plan, Linear(2, 2), records, source(None)))
    records = held()
    rounds = engine(plan, Linear(2, 2), records, source(None))
    next(rounds)
    records.y.add_(1)
    with pytest.raises(SordinoError, match="changed in place"):
        next(rounds)
    with torch.inference_mode():  # in which PyTorch does not count changes
        records = held()
        records.x.mul_(30)
    with pytest.raises(SordinoError, match="changed in place"):
        next(engine(plan, Linear(2, 2), records, source(None)))


def test_weights_are_checked_however_records_are_built():
    records = Records.of(np.ones((4, 2)), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]))
    for wrong in (20.0, -1.0, float("nan")):
        with pytest.raises(SordinoError, match=r"^weight: a weight is not in \[0, 1\]"):
            replace(records, weight=torch.full((4,), wrong))
