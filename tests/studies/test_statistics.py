"""McNemar's test by hand and against published tables; bits there and back."""

import csv
from pathlib import Path

import numpy as np
import pytest

from sordino.studies.statistics import from_counts, mcnemar, pack, unpack

TABLE = Path(__file__).parents[3] / "shared" / "spec" / "tables" / "s000_table15_16_mcnemar_round70.csv"


def test_mcnemar_agrees_with_a_computation_by_hand():
    a = [True] * 7 + [False] * 3 + [True, False]
    b = [False] * 7 + [True] * 3 + [True, False]
    n10, n01, chi2, p = mcnemar(a, b)
    assert (n10, n01) == (7, 3)
    assert chi2 == pytest.approx((4 - 1) ** 2 / 10)
    assert p == pytest.approx(0.342782, abs=1e-6)


def test_it_is_symmetric():
    a, b = np.random.default_rng(1).random((2, 500)) < [[0.7], [0.6]]
    one, other = mcnemar(a, b), mcnemar(b, a)
    assert (one.n10, one.n01, one.chi2, one.p) == (other.n01, other.n10, other.chi2, other.p)


@pytest.mark.parametrize(("n10", "n01"), [(0, 0), (5, 5)])
def test_no_difference(n10, n01):
    """|0| - 1 would be squared to 1."""
    assert from_counts(n10, n01) == (n10, n01, 0.0, 1.0)


def test_answers_to_different_records_are_refused():
    with pytest.raises(ValueError, match="paired"):
        mcnemar([True], [True, False])


@pytest.mark.skipif(not TABLE.is_file(), reason=f"the published table is not at {TABLE}")
def test_every_published_row():
    with open(TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 128
    for row in rows:
        found = from_counts(int(row["n10_sofim_right_baseline_wrong"]), int(row["n01_sofim_wrong_baseline_right"]))
        assert found.chi2 == pytest.approx(float(row["chi2"]), abs=5.01e-4), row
        p = float(row["p_value_or_upper_bound"])
        if row["p_is_upper_bound"] == "1":
            assert found.p < p, row
        else:
            assert found.p == pytest.approx(p, abs=5.01e-5), row


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 10_000])
def test_bits_there_and_back(count):
    bits = np.random.default_rng(count).random(count) < 0.6
    assert (unpack(pack(bits), count) == bits).all()
    assert pack([True] + [False] * 7) == "gA=="


def test_a_wrong_count_is_noticed():
    with pytest.raises(ValueError, match="2 bytes do not hold 7 bits"):
        unpack(pack([True] * 9), 7)
