"""Records sorted by client, and the views of them that engines take."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.core import SordinoError
from sordino.data.shard import Records


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


def test_types():
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


def test_padding_is_zero_even_where_the_first_record_is_not_finite():
    records = Records.of(np.array([[np.nan], [1.0], [2.0], [3.0]]), np.zeros(4), np.array([0, 1, 1, 1]))
    ((_, shard),) = records.buckets(np.array([1]))
    assert shard.x.flatten().tolist() == [1.0, 2.0, 3.0]
    records = Records.of(np.array([[np.nan], [1.0], [2.0], [3.0], [4.0]]), np.zeros(5), np.array([0, 0, 0, 1, 1]))
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
    with pytest.raises(SordinoError, match=f"data: {rows} rows of x, {labels} labels and {len(client)} client"):
        Records.of(np.ones((rows, 1)), np.zeros(labels), np.array(client))


@pytest.mark.parametrize("client", [[0, 2, 2], [1, 1, 1], [-1, -1, -1], []])
def test_every_client_needs_a_record(client):
    with pytest.raises(SordinoError, match="clients: some client holds no record"):
        Records.of(np.ones((len(client), 1)), np.zeros(len(client)), np.array(client, dtype=int))
