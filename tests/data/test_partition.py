from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.data.partition import ClientSummary, describe, split
from sordino.data.sources import Dataset, load
from sordino.errors import SordinoError

TABLES = Path(__file__).parents[2].parent / "shared" / "spec" / "tables"


def labelled(y: np.ndarray, classes: int, site: object = None) -> Dataset:
    """Records whose features nobody looks at."""
    x = np.zeros((len(y), 1), np.float32)
    where = None if site is None else np.asarray(site)
    return Dataset("test", x, y, x[:1], y[:1], where, tuple(map(str, range(classes))))


def even(records: int, classes: int = 10) -> Dataset:
    return labelled(np.arange(records) % classes, classes)


REGRESSION = labelled(np.linspace(0, 1, 20, dtype=np.float32), 0)


def counts(data: Dataset, owner: np.ndarray) -> np.ndarray:
    return np.array([row.counts for row in describe(data.y_train, owner, len(data.classes))])


# -------------------------------------------------------------------------------------------------------- properties


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["iid", "dirichlet", "dirichlet:0.01", "dirichlet:100", "classes:2"]),
    st.integers(1, 12),
    st.lists(st.integers(0, 3), min_size=60, max_size=150),
    st.integers(0, 2**40),
)
def test_every_record_goes_to_one_client_and_no_client_is_empty(
    partition: str, clients: int, y: list[int], seed: int
) -> None:
    data = labelled(np.array(y), 4)
    try:
        owner = split(data, partition, clients, seed=seed)
    except SordinoError:
        assert partition == "classes:2"  # some labels are too rare, or clients too few, to be dealt like that
        return
    assert owner.dtype == np.int64
    assert owner.shape == (len(y),)
    assert set(owner.tolist()) == set(range(clients))
    np.testing.assert_array_equal(owner, split(data, partition, clients, seed=seed))


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 300), st.integers(0, 5))
def test_iid_sizes_differ_by_at_most_one(clients: int, more: int, seed: int) -> None:
    sizes = np.bincount(split(even(clients + more), "iid", clients, seed=seed), minlength=clients)
    assert sizes.max() - sizes.min() <= 1


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 5))
def test_classes_deals_evenly(held: int, clients: int, seed: int) -> None:
    classes = 8
    data = even(classes * 100, classes)
    if clients * held < classes:
        with pytest.raises(SordinoError, match="cannot hold all 8 classes"):
            split(data, f"classes:{held}", clients, seed=seed)
        return
    table = counts(data, split(data, f"classes:{held}", clients, seed=seed))
    assert ((table > 0).sum(1) == held).all()
    holders = (table > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    assert holders.min() >= 1
    for column in table.T:
        assert np.ptp(column[column > 0]) <= 1


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.5", "classes:2"])
def test_another_seed_is_another_partition(partition: str) -> None:
    data = even(400)
    assert not np.array_equal(split(data, partition, 10, seed=0), split(data, partition, 10, seed=1))


def test_records_are_dealt_at_random_within_a_class() -> None:
    """Not in file order: the mean position of a client's records is that of all, to within 5 standard errors."""
    owner = split(even(20_000), "iid", 2)
    place = np.flatnonzero(owner == 0)
    assert abs(place.mean() - 9999.5) < 5 * 20_000 / math.sqrt(12 * 10_000)


# --------------------------------------------------------------------------------------------------------- dirichlet


def test_dirichlet_proportions_have_their_mean_and_variance() -> None:
    """The share of a class at a client has mean 1/n and variance (1/n)(1 - 1/n) / (nA + 1)."""
    clients, alpha, seeds = 4, 0.5, 400
    data = labelled(np.repeat([0, 1], 5000), 2)
    share = np.array([counts(data, split(data, f"dirichlet:{alpha}", clients, seed=s))[:, 0] for s in range(seeds)])
    share = share / 5000
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert (np.abs(share.mean(0) - 1 / clients) < 5 * math.sqrt(variance / seeds)).all()
    squared = (share - 1 / clients) ** 2
    se = squared.std(ddof=1) / math.sqrt(seeds)  # clients of one draw are not independent: no division by them
    assert abs(squared.mean() - variance) < 5 * se


def test_dirichlet_is_a_half_by_default() -> None:
    data = even(1000)
    np.testing.assert_array_equal(split(data, "dirichlet", 10), split(data, "dirichlet:0.5", 10))


def test_dirichlet_is_mended_where_redrawing_cannot_help() -> None:
    data = even(50, 2)
    table = counts(data, split(data, "dirichlet:0.001", 50))
    assert (table.sum(1) == 1).all()
    assert table.sum(0).tolist() == [25, 25]


def test_dirichlet_is_redrawn_before_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mended client has exactly one record; a redrawn one seldom."""
    data = even(50_000, 2)

    def lone() -> int:
        sizes = [np.bincount(split(data, "dirichlet:0.1", 5, seed=seed)).min() for seed in range(40)]
        return sizes.count(1)

    redrawn = lone()
    monkeypatch.setattr("sordino.data.partition.MAX_REDRAWS", 1)
    assert 2 * redrawn < lone()


def test_small_concentration_is_more_skewed() -> None:
    data = even(10_000)
    far = [
        np.mean([row.kl_from_uniform for row in describe(data.y_train, split(data, partition, 20), 10)])
        for partition in ("iid", "dirichlet:10", "dirichlet:1", "dirichlet:0.1", "classes:1")
    ]
    assert far == sorted(far)


# ------------------------------------------------------------------------------------------------------------- sizes


def test_sizes_follow_their_law() -> None:
    data, clients = even(200_000), 1000
    uniform = np.bincount(split(data, "iid", clients, sizes="uniform")) / 200
    assert 0.45 < uniform.min() < 0.55
    assert 1.45 < uniform.max() < 1.55
    assert abs(uniform.std() - 1 / math.sqrt(12)) < 0.03
    for law, deviation in (("lognormal", 0.5), ("lognormal:1", 1.0)):
        sizes = np.bincount(split(data, "iid", clients, sizes=law))
        assert sizes.sum() == 200_000
        assert abs(np.log(sizes).std() - deviation) < 5 * deviation / math.sqrt(2 * clients)


def test_size_laws_leave_no_client_empty() -> None:
    assert np.bincount(split(even(30), "iid", 25, sizes="lognormal:3"), minlength=25).min() >= 1


# -------------------------------------------------------------------------------------------------- sites and counts


def test_sites_are_clients_in_sorted_order() -> None:
    data = labelled(np.array([0, 1, 0, 1]), 2, site=["north", "east", "north", "west"])
    assert split(data, "by-site", None).tolist() == [1, 0, 1, 2]
    assert split(data, "by-column:ward", 7).tolist() == [1, 0, 1, 2]
    numbers = labelled(np.array([0, 1, 0]), 2, site=[10, 9, 100])
    assert split(numbers, "by-site", None).tolist() == [1, 0, 2]


def test_by_column_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ward.csv"
    path.write_text("a,y,ward\n" + "".join(f"{k},{k % 2},{'nsw'[k % 3]}\n" for k in range(30)))
    data = load(str(path), client="ward")
    owner = split(data, "by-column:ward", None)
    np.testing.assert_array_equal(owner, data.x_train[:, 0].astype(int) % 3)  # n, s, w are sorted already


def test_a_regression_has_iid_and_sites() -> None:
    assert np.bincount(split(REGRESSION, "iid", 4)).tolist() == [5] * 4
    assert describe(REGRESSION.y_train, np.repeat([0, 1], 10), 0) == [
        ClientSummary(0, 10, (), 0.0, 0),
        ClientSummary(1, 10, (), 0.0, 0),
    ]


def table(folder: Path, content: str) -> str:
    (folder / "counts.csv").write_text(content)
    return f"counts:{folder / 'counts.csv'}"


def test_counts_are_rebuilt_and_the_rest_left_out(tmp_path: Path) -> None:
    partition = table(tmp_path, "class_1,client,class_0,total\n3,1,2,5\n0,0,4,4\n")
    data = labelled(np.repeat([0, 1], [8, 5]), 2)
    owner = split(data, partition, 2)
    assert counts(data, owner).tolist() == [[4, 0], [2, 3]]
    assert (owner == -1).sum() == 4
    assert sum(row.records for row in describe(data.y_train, owner, 2)) == 9


@pytest.mark.parametrize(
    ("name", "totals"),
    [("s000_table14_cifar10_partition.csv", [5000] * 10), ("s000_table13_pathmnist_partition.csv", None)],
)
def test_a_published_partition_is_rebuilt_exactly(name: str, totals: list[int] | None) -> None:
    path = TABLES / name
    if not path.is_file():
        pytest.skip("the published partition tables are not beside this repository (../shared/spec/tables)")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    classes = sum(name.startswith("class_") for name in rows[0])
    asked = np.array([[int(row[f"class_{k}"]) for k in range(classes)] for row in rows])
    y = np.repeat(np.arange(classes), asked.sum(0) if totals is None else totals)
    data = labelled(np.random.default_rng(0).permutation(y), classes)
    owner = split(data, f"counts:{path}", None)
    np.testing.assert_array_equal(counts(data, owner), asked)
    summary = describe(data.y_train, owner, classes)
    assert [row.records for row in summary] == [int(row["printed_total"]) for row in rows]
    assert [row.absent for row in summary] == (asked == 0).sum(1).tolist()


@pytest.mark.parametrize(
    ("content", "clients", "message"),
    [
        ("client,class_0,class_1\n0,9,1\n", None, "the counts need 9 records of class 0, but the data have 5"),
        ("client,class_0\n0,1\n", None, r"no column 'class_1'. Did you mean 'class_0'"),
        ("class_0,class_1\n1,1\n", None, "no column 'client'"),
        ("client,class_0,class_1,class_2\n0,1,1,1\n", None, r"columns \['class_2'\], but the data has only 2"),
        ("client,class_0,class_1\n0,1,-1\n", None, "'-1' in row 1, column 'class_1'"),
        ("client,class_0,class_1\n0,1\n", None, "'' in row 1, column 'class_1'"),
        ("client,class_0,class_1\n0,1,1\n0,1,1\n", None, "once each"),
        ("client,class_0,class_1\n", None, "once each"),
        ("client,class_0,class_1\n0,0,0\n", None, "client 0 .* has no records"),
        ("client,class_0,class_1\n0,1,1\n", 3, "clients: 3 requested, but .* has 1"),
    ],
)
def test_counts_errors(tmp_path: Path, content: str, clients: int | None, message: str) -> None:
    with pytest.raises(SordinoError, match=message):
        split(even(10, 2), table(tmp_path, content), clients)


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("partition", "clients", "sizes", "message"),
    [
        ("dirichelt:0.5", 4, "equal", r"unknown. Did you mean 'dirichlet'"),
        ("dirichlet:", 4, "equal", "lacks a number above 0"),
        ("dirichlet:half", 4, "equal", "malformed; write dirichlet:0.5"),
        ("dirichlet:inf", 4, "equal", "malformed"),
        ("dirichlet:-1", 4, "equal", "concentration above 0"),
        ("classes", 4, "equal", "lacks a number"),
        ("classes:2.5", 4, "equal", "malformed; write classes:2"),
        ("classes:11", 4, "equal", "impossible with 10 classes"),
        ("classes:0", 4, "equal", "impossible"),
        ("classes:10", 20, "equal", "class 0 has 10 records for 20 clients"),
        ("iid:2", 4, "equal", "takes no argument"),
        ("iid", 101, "equal", "101 clients cannot share 100 records"),
        ("dirichlet", 101, "equal", "101 clients cannot share 100 records"),
        ("iid", None, "equal", "must be at least 1 with partition"),
        ("iid", 0, "equal", "must be at least 1 with partition"),
        ("dirichlet", 4, "lognormal", "needs partition iid"),
        ("iid", 4, "lognorml", r"sizes: 'lognorml' is unknown. Did you mean 'lognormal'"),
        ("iid", 4, "uniform:2", "sizes: 'uniform:2' is unknown"),
        ("iid", 4, "lognormal:wide", "malformed; write lognormal:0.5"),
        ("iid", 4, "lognormal:-1", "log-sd from 0 to 10"),
        ("by-site", 4, "equal", "needs data with a client column"),
        ("by-column", 4, "equal", "lacks a column"),
        ("by-column:ward", 4, "equal", "needs data with a client column"),
        ("counts:nowhere.csv", 4, "equal", "no file 'nowhere.csv'"),
    ],
)
def test_a_partition_that_cannot_be_made_is_refused(
    partition: str, clients: int | None, sizes: str, message: str
) -> None:
    with pytest.raises(SordinoError, match=message):
        split(even(100), partition, clients, sizes=sizes)


@pytest.mark.parametrize("partition", ["dirichlet:1", "classes:2", "counts:any.csv"])
def test_a_regression_has_no_classes_to_divide(partition: str) -> None:
    with pytest.raises(SordinoError, match="needs classes, but this is a regression"):
        split(REGRESSION, partition, 2)


# ---------------------------------------------------------------------------------------------------------- describe


def test_describe_counts_labels_and_what_is_absent() -> None:
    y = np.array([0, 0, 1, 1, 2, 2, 2, 0])
    client = np.array([0, 0, 0, 0, 1, 1, 1, -1])
    first, second = describe(y, client, 3)
    assert first[:3] == (0, 4, (2, 2, 0))
    assert first.kl_from_uniform == pytest.approx(math.log(1.5))
    assert first.absent == 1
    assert second[:3] == (1, 3, (0, 0, 3))
    assert second.kl_from_uniform == pytest.approx(math.log(3))
    assert second.absent == 2


def test_describe_of_a_uniform_client_is_zero() -> None:
    assert describe(np.arange(7), np.zeros(7, np.int64), 7)[0].kl_from_uniform == pytest.approx(0, abs=1e-12)
