from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.data.preprocess import whiten
from sordino.data.sources import load
from sordino.data.splits import apportion, generator, hold_out
from sordino.errors import SordinoError


def npz(folder: Path, **arrays: object) -> str:
    path = folder / "data.npz"
    np.savez(path, **{name: np.asarray(value) for name, value in arrays.items()})
    return str(path)


def text(folder: Path, content: str) -> str:
    path = folder / "data.csv"
    path.write_text(content)
    return str(path)


def parquet(folder: Path, **columns: object) -> str:
    path = folder / "data.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


def rows(x: np.ndarray) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.tolist()}


# ------------------------------------------------------------------------------------------------------------ digits


def test_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn holds the copy to compare with")
    theirs, ours = datasets.load_digits(), load("digits")
    both = np.vstack((ours.x_train, ours.x_test))
    labels = np.append(ours.y_train, ours.y_test)
    assert both.shape == (1797, 64)
    assert both.dtype == np.float32
    assert ours.classes == tuple("0123456789")
    mine = np.column_stack((both * 16, labels))
    true = np.column_stack((theirs.data, theirs.target))
    np.testing.assert_array_equal(mine[np.lexsort(mine.T)], true[np.lexsort(true.T)])


def test_the_held_out_part_is_disjoint_and_seeded() -> None:
    a, again, other = load("digits", seed=3), load("digits", seed=3), load("digits", seed=4)
    np.testing.assert_array_equal(a.x_test, again.x_test)
    assert not np.array_equal(a.x_test, other.x_test)
    assert not rows(a.x_train) & rows(a.x_test)
    assert len(a.y_test) in (359, 360)
    assert len(load("digits", test_fraction=0.5).y_test) in (898, 899)


def test_a_label_does_not_move_other_records_into_the_test_part(tmp_path: Path) -> None:
    """Which records are held out depends on position and client alone: neighbours differ in one record, no more."""
    x, y, site = np.arange(60.0).reshape(60, 1), np.arange(60) % 3, np.repeat(["a", "b", "c"], 20)
    before = load(npz(tmp_path, x=x, y=y, client=site))
    y[7] = 2
    after = load(npz(tmp_path, x=x, y=y, client=site))
    np.testing.assert_array_equal(before.x_train, after.x_train)
    np.testing.assert_array_equal(before.site, after.site)
    assert [np.count_nonzero(before.site == name) for name in "abc"] == [16, 16, 16]


def test_public_stats_may_be_means_and_deviations(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", mean=np.ones(64), std=np.full(64, 2.0))
    np.savez(tmp_path / "b.npz", mean=np.ones(64), cov=4 * np.eye(64))
    a, b = (load("digits", public_stats=tmp_path / f"{name}.npz") for name in "ab")
    np.testing.assert_allclose(a.x_train, b.x_train, rtol=1e-6)


# --------------------------------------------------------------------------------------------------------- synthetic


def test_synthetic_has_the_sizes_asked_for() -> None:
    data = load("synthetic(1,1,clients=7,features=5,classes=3,records=700)")
    assert data.x_train.shape[1] == 5
    assert len(data.x_train) + len(data.x_test) == 700
    assert data.classes == ("0", "1", "2")
    assert data.site is not None
    assert set(data.site) == set(range(7))
    assert data.y_train.dtype == np.int64
    assert data.x_train.dtype == np.float32
    assert np.bincount(data.site).max() > 2 * np.bincount(data.site).min()


def test_synthetic_spellings_and_seeds() -> None:
    small = "clients=5,features=4,classes=3,records=100"
    a, b = load(f"synthetic(1,1,{small})", seed=1), load(f"synthetic:1,1,{small}", seed=1)
    np.testing.assert_array_equal(a.x_train, b.x_train)
    np.testing.assert_array_equal(a.y_test, load(f"synthetic( {small} )", seed=1).y_test)
    assert not np.array_equal(a.x_train, load(f"synthetic(1,1,{small})", seed=2).x_train)
    even = load("synthetic(1,1,clients=5,features=4,classes=3,records=100,spread=0)")
    assert np.bincount(even.site).tolist() == [16] * 5
    assert len(load("synthetic").x_test) == 4000


def test_synthetic_variances() -> None:
    """Within a device feature j varies by j^-1.2; between devices a mean of features varies by beta + 1/features."""
    clients, features, each, beta = 2000, 6, 50, 9.0
    source = f"synthetic(0,{beta},clients={clients},features={features},classes=2,records={clients * each},spread=0)"
    data = load(source, test_fraction=0.02)
    x = data.x_train[np.argsort(data.site, kind="stable")].reshape(clients, each - 1, features).astype(float)
    within = x.var(1, ddof=1).mean(0)
    true = np.arange(1, features + 1) ** -1.2
    se = true * np.sqrt(2 / (clients * (each - 2)))
    assert (np.abs(within - true) < 5 * se).all()
    between = x.mean((1, 2)).var(ddof=1)
    expected = beta + 1 / features + true.sum() / features**2 / (each - 1)
    assert abs(between - expected) < 5 * expected * np.sqrt(2 / clients)


def test_synthetic_labels_follow_a_linear_rule_of_the_device() -> None:
    data = load(
        "synthetic(1,1,clients=1,features=5,classes=2,records=4000)", seed=5
    )  # a seed under which both classes are common
    design = np.column_stack((data.x_train, np.ones(len(data.x_train))))
    fit = np.linalg.lstsq(design, 2.0 * data.y_train - 1, rcond=None)[0]
    guess = np.column_stack((data.x_test, np.ones(len(data.x_test)))) @ fit > 0
    assert 0.3 < data.y_test.mean() < 0.7
    assert (guess == data.y_test).mean() > 0.95


def test_alpha_moves_all_logits_of_a_device_alike() -> None:
    """So the labels stay; beta does move the data."""
    a, b, c = (load(f"synthetic({level},clients=5,records=500)") for level in ("0,1", "4,1", "0,4"))
    np.testing.assert_array_equal(a.x_train, b.x_train)
    np.testing.assert_array_equal(a.y_train, b.y_train)
    assert np.abs(a.x_train - c.x_train).max() > 0.1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("synthetic(1)", "both alpha and beta"),
        ("synthetic(1,1", "malformed"),
        ("synthetic(one,1)", "'one' in .* is malformed"),
        ("synthetic(1,1,clients=2.5)", "'clients=2.5' in .* is malformed"),
        ("synthetic(1,1,client=3)", "no setting 'client'. Did you mean 'clients'"),
        ("synthetic(1,1,classes=1)", "the minimum is 2"),
        ("synthetic(-1,1)", "the minimum is 0"),
        ("synthetic(1,1,spread=99)", "the maximum is 10"),
        ("synthetic(1,1,clients=60,records=100)", "fewer than two records per client"),
    ],
)
def test_synthetic_errors(source: str, message: str) -> None:
    with pytest.raises(SordinoError, match=message):
        load(source)


# ------------------------------------------------------------------------------------------------------------- files


def test_npz_with_a_split_keeps_it(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float16).reshape(6, 2)
    path = npz(
        tmp_path, x_train=x[:4], y_train=["b", "a", "b", "a"], x_test=x[4:], y_test=["b", "a"], client=["n", "s"] * 2
    )
    data = load(path)
    assert data.name == "data"
    np.testing.assert_array_equal(data.x_train, x[:4].astype(np.float32))
    assert data.x_test.dtype == np.float32
    assert data.y_train.tolist() == [1, 0, 1, 0]
    assert data.y_test.tolist() == [1, 0]
    assert data.classes == ("a", "b")
    assert data.site is not None
    assert data.site.tolist() == ["n", "s", "n", "s"]


def test_npz_without_a_split_flattens_images_and_splits_the_clients_along(tmp_path: Path) -> None:
    x = np.arange(80, dtype=np.uint8).reshape(20, 2, 2)
    source = npz(tmp_path, x=x, y=[[k % 2] for k in range(20)], hospital=np.arange(20) // 10)
    data = load(source, client="hospital")
    assert data.x_train.shape == (16, 4)
    assert data.site is not None
    first = (data.x_train[:, 0] * 255).round()  # images of bytes become pixels in [0, 1]
    np.testing.assert_array_equal(first // 40, data.site)
    np.testing.assert_array_equal(data.y_train, first // 4 % 2)
    assert data.shape == (2, 2)


def test_a_csv_becomes_features_and_classes(tmp_path: Path) -> None:
    lines = [f"{k},{k / 2},{'yes' if k % 3 else 'no'},{'true' if k % 2 else 'false'}" for k in range(30)]
    data = load(text(tmp_path, "age,dose,answer,smokes\n" + "\n".join(lines)), label="answer")
    assert data.classes == ("no", "yes")
    assert data.x_train.shape == (24, 3)
    np.testing.assert_array_equal(data.y_train, data.x_train[:, 0] % 3 != 0)
    np.testing.assert_array_equal(data.x_train[:, 2], data.x_train[:, 0] % 2)
    assert data.site is None


def test_a_parquet_file_of_every_type_is_read(tmp_path: Path) -> None:
    n = 40
    path = parquet(
        tmp_path,
        a=pa.array(np.arange(n, dtype=np.float16)),
        b=pa.array([1.5] * n).cast(pa.decimal128(5, 2)),
        target=pa.array([-1.0, 1.0] * (n // 2)),
        ward=pa.array(["x", "y", "z", "x"] * (n // 4)).dictionary_encode(),
        __index_level_0__=pa.array(range(n)),
    )
    data = load(path, client="ward")
    assert data.classes == ("-1", "1")
    assert data.x_train.shape == (32, 2)
    assert data.site is not None
    assert set(data.site.tolist()) == {"x", "y", "z"}
    np.testing.assert_array_equal(data.y_train, data.x_train[:, 0] % 2)


def test_integer_clients_are_kept_as_given(tmp_path: Path) -> None:
    data = load(text(tmp_path, "a,y,who\n" + "".join(f"{k},{k % 2},{7 + k % 3}\n" for k in range(30))), client="who")
    assert data.site is not None
    np.testing.assert_array_equal(data.site, 7 + data.x_train[:, 0].astype(int) % 3)


def test_many_fractional_labels_are_a_regression(tmp_path: Path) -> None:
    y = np.linspace(0.01, 0.99, 60)
    data = load(npz(tmp_path, x=np.arange(60.0), y=y))
    assert data.classes == ()
    assert data.y_train.dtype == np.float32
    np.testing.assert_allclose(data.y_train, y[data.x_train[:, 0].astype(int)], rtol=1e-6)
    few = load(npz(tmp_path, x=np.arange(60.0), y=np.repeat([0.25, 0.5], 30)))
    assert few.classes == ("0.25", "0.5")
    whole = load(npz(tmp_path, x=np.arange(120.0), y=np.arange(120.0) % 60))
    assert len(whole.classes) == 60


def test_a_rare_class_stays_in_training(tmp_path: Path) -> None:
    data = load(npz(tmp_path, x=np.arange(30.0), y=[0] * 29 + [1]), test_fraction=0.9)
    assert 1 in data.y_train


X, Y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
BAD = np.array([[0, 1], [np.nan, np.inf], [1e300, 2], [3, 4]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x": BAD, "y": Y},
            "x: NaN, infinite or too large for float32 in 3 places, the first in row 1 .*column 0; clean",
        ),
        ({"x": X, "y": [1, 1, 1, 1]}, "one label"),
        ({"x": X, "y": Y[:3]}, "y: 3 entries for 4 records in x"),
        ({"x": X, "y": Y, "client": [1, 2]}, "client: 2 entries for 4 records"),
        ({"x": X, "y": Y, "client": X}, r"client: the array has shape \(4, 2\)"),
        ({"x": X[:0], "y": Y[:0]}, "x: there are no records"),
        ({"x": X[:, :0], "y": Y}, "no features"),
        ({"x": [["a"]] * 4, "y": Y}, "x: features of type <U1 are not numeric"),
        ({"x": X, "y": np.eye(4)}, r"y: labels of shape \(4, 4\)"),
        ({"x": X, "y": [0, 1, np.nan, 1]}, "y: 1 labels are NaN"),
        ({"x": X, "y": Y + 1j}, "y: labels of type complex128"),
        ({"x": X, "labels": Y}, r"holds \['labels', 'x'\]; it needs"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": [0, 1, 2, 1]}, "y_test: label '2' never occurs"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": ["0"] * 4}, "y_test: labels of type <U1"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :1], "y_test": Y}, "x_test: 1 features, but x_train has 2"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y[:1]}, "y_test: 1 entries for 4"),
        ({"x_train": X, "y_train": Y, "x_test": BAD, "y_test": Y}, "x_test: NaN.* in 3 places"),
        ({"x": X, "y": Y.astype(object)}, "pickled objects are not read"),
    ],
)
def test_an_npz_that_does_not_fit_is_refused(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    path = npz(tmp_path, **arrays)
    with pytest.raises(SordinoError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a,y\n1,0\n2,1\n", {"label": "yy"}, "label: .* no column 'yy'. Did you mean 'y'"),
        ("a,y\n1,0\n2,1\n", {"client": "ward"}, "client: .* no column 'ward'"),
        ("a,y\n1,0\n2,1\n", {"client": "y"}, "is the label column already"),
        ("a,b\n1,0\n2,1\n", {}, "label: no column is called label, y, target, class; .*Columns: a, b"),
        ("a,y,class\n1,0,0\n2,1,1\n", {}, r"columns \['y', 'class'\] could each be it"),
        (
            "a,sex,town,y\n1,m,r,0\n2,f,s,1\n",
            {},
            r"are not numeric: 'sex', 'town'\. Describe .* \(sordino schema draft",
        ),
        ("a,b,y\n1,2,0\n2,,1\n", {}, "NaN.* in 1 places.* row 1 .*column b"),
        ("a,y\n1,0\n2,\n", {}, "label: 1 entries of column 'y' are missing"),
        ("a,y\n1,u\n2,\n", {}, "label: 1 entries of column 'y' are missing"),
        ("a,y,who\n1,u,k\n2,v,\n", {"client": "who"}, "client: 1 entries of column 'who' are missing"),
        ("a,y\n", {}, "there are no records"),
        ("y\n1\n2\n", {}, "no features"),
        ("a,a,y\n1,2,0\n", {}, r"column names \['a'\] .* empty or repeated"),
        (",a,y\n1,2,0\n", {}, r"column names \[''\] .* empty or repeated"),
        ("a,y\n1,0\n2\n", {}, "more or fewer cells than the heading"),
        ("", {}, "is empty"),
    ],
)
def test_a_csv_that_does_not_fit_is_refused(
    tmp_path: Path, content: str, options: dict[str, str], message: str
) -> None:
    path = text(tmp_path, content)
    with pytest.raises(SordinoError, match=message):
        load(path, **options)  # type: ignore[arg-type]


def test_source_errors(tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match=r"data: 'digit' is unknown. Did you mean 'digits'"):
        load("digit")
    with pytest.raises(SordinoError, match=r"there is no file 'nowhere.csv'"):
        load("nowhere.csv")
    with pytest.raises(SordinoError, match=r"use .npz, .csv, .tsv, .parquet, .xlsx"):
        load("records.doc")
    with pytest.raises(SordinoError, match="label: 'digits' has no columns"):
        load("digits", label="y")
    with pytest.raises(SordinoError, match="client: 'synthetic' has no columns"):
        load("synthetic", client="ward")
    for name in ("bad.npz", "bad.parquet"):
        (tmp_path / name).write_bytes(b"not what it says")
        with pytest.raises(SordinoError, match="cannot be read"):
            load(str(tmp_path / name))
    path = npz(tmp_path, x=X, y=Y)
    with pytest.raises(SordinoError, match=r"label: an .npz names its labels"):
        load(path, label="y")
    with pytest.raises(SordinoError, match=r"client: .* no array 'z'"):
        load(path, client="z")
    with pytest.raises(SordinoError, match="leaves no test part"):
        load(path, test_fraction=0.01)
    with pytest.raises(SordinoError, match="test_fraction: 1 must lie"):
        load("digits", test_fraction=1)
    with pytest.raises(SordinoError, match=r"test_fraction: 0 must lie above 0 .* cannot be 0, because .* 0\.01"):
        load("digits", test_fraction=0)
    with pytest.raises(SordinoError, match="seed: -1"):
        load("digits", seed=-1)


def test_a_file_may_be_called_like_a_built_in_source(tmp_path: Path) -> None:
    path = tmp_path / "synthetic(1).npz"
    np.savez(path, x=np.arange(10.0), y=np.arange(10) % 2)
    assert load(str(path)).x_train.shape == (8, 1)


# ----------------------------------------------------------------------------------------------------- preprocessing


def test_normalize_is_per_record(tmp_path: Path) -> None:
    x = np.array([[3, 4], [0, 0], [0.3, 0.4], [3e30, 4e30]])
    path = npz(tmp_path, x_train=x, y_train=Y, x_test=x[:1], y_test=Y[:1])
    unit = load(path, normalize="l2")
    np.testing.assert_allclose(unit.x_train, [[0.6, 0.8], [0, 0], [0.6, 0.8], [0.6, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(unit.x_test, [[0.6, 0.8]], rtol=1e-6)
    ball = load(path, normalize="clip:2.5")
    np.testing.assert_allclose(ball.x_train, [[1.5, 2], [0, 0], [0.3, 0.4], [1.5, 2]], rtol=1e-4)
    digits = load("digits", normalize="clip:2.5").x_train  # many records: rounding goes either way
    assert (np.linalg.norm(digits.astype(float), axis=1) <= 2.5).all()
    assert unit.x_train.dtype == ball.x_train.dtype == np.float32


def test_public_stats_whiten_before_normalize(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((3, 3))
    x = rng.standard_normal((500, 3)) @ mix + 5
    mean, cov = x.mean(0), np.cov(x.T, ddof=0)
    np.savez(tmp_path / "public.npz", mean=mean, cov=cov, n=500)
    path = npz(tmp_path, x_train=x, y_train=np.arange(500) % 2, x_test=x, y_test=np.arange(500) % 2)
    data = load(path, public_stats=tmp_path / "public.npz")
    eigenvalue, V = np.linalg.eigh(cov)
    shrunk = V @ np.diag(eigenvalue / (eigenvalue + 1e-3 * eigenvalue.mean())) @ V.T
    np.testing.assert_allclose(np.cov(data.x_train.T.astype(float), ddof=0), shrunk, atol=1e-4)
    np.testing.assert_allclose(data.x_test.mean(0), 0, atol=1e-4)
    both = load(path, public_stats=str(tmp_path / "public.npz"), normalize="l2")
    norm = np.linalg.norm(data.x_train, axis=1, keepdims=True)
    np.testing.assert_allclose(both.x_train, data.x_train / norm, rtol=1e-4, atol=1e-6)


def test_whitening_is_bounded_where_the_covariance_is_singular() -> None:
    turned = whiten(np.eye(2, dtype=np.float32), np.zeros(2), np.diag([1.0, 0.0]))
    np.testing.assert_allclose(turned, np.diag([1.0005**-0.5, 0.0005**-0.5]), rtol=1e-5)
    assert turned.dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mean": np.zeros(3), "cov": np.eye(3)}, "do not fit data of 64 features"),
        ({"mean": np.zeros(64)}, "needs mean, and cov or std"),
        ({"mean": np.zeros(64), "cov": np.zeros((64, 64))}, "must be finite, and cov not zero"),
        ({"mean": np.full(64, np.nan), "cov": np.eye(64)}, "must be finite"),
    ],
)
def test_public_stats_errors(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    with pytest.raises(SordinoError, match=message):
        load("digits", public_stats=npz(tmp_path, **arrays))


def test_preprocessing_errors() -> None:
    for word in ("standardize", "pca", "pca:10"):
        with pytest.raises(SordinoError, match=r"these are a release.*--public-stats.*normalize l2"):
            load("digits", normalize=word)
    with pytest.raises(SordinoError, match=r"normalize: 'l1' is unknown. Known: clip:R, l2,"):
        load("digits", normalize="l1")
    for word in ("clip", "clip:", "clip:big", "clip:0", "clip:nan"):
        with pytest.raises(SordinoError, match="needs a radius"):
            load("digits", normalize=word)
    with pytest.raises(SordinoError, match="public_stats: there is no file"):
        load("digits", public_stats="nowhere.npz")


# -------------------------------------------------------------------------------------------------------- properties


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(0, 500))
def test_apportion_is_exact_and_leaves_no_one_empty(weights: list[float], more: int) -> None:
    total = len(weights) + more
    sizes = apportion(np.array(weights), total)
    assert sizes.sum() == total
    assert sizes.min() >= 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=200), st.floats(0.05, 0.95), st.integers(0, 9))
def test_hold_out_takes_its_part_of_each_stratum(strata: list[int], fraction: float, seed: int) -> None:
    groups = np.array(strata)
    try:
        chosen = hold_out(groups, fraction, generator(seed, "test"))
    except SordinoError:
        sizes = np.bincount(groups)
        assert sizes.max() == 1 or fraction * len(groups) <= len(sizes)
        return
    for group in set(strata):
        size, taken = (groups == group).sum(), chosen[groups == group].sum()
        assert taken <= size - 1
        assert taken == size - 1 or abs(taken - fraction * size) <= 1
