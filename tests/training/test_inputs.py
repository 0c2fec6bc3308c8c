"""Files that a run names are checked before it trains."""

import os

import numpy as np
import pytest

from sordino.cli import main


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'ill' if a + b > 0 else 'well'}" for a, b in rng.normal(size=(120, 2))]
    (tmp_path / "patients.csv").write_text("age,dose,outcome\n" + "\n".join(rows) + "\n")
    return ["run", "--data", "patients.csv", "--label", "outcome", "--clients", "3", "--rounds", "5", "--out", "run"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mean": [0, 0], "std": [1, 0]}, "public_stats: std must be above 0, and column 'dose' has 0; "),
        ({"mean": [0, 0], "std": [-40, 1]}, "public_stats: std must be above 0, and column 'age' has -40; "),
        ({"mean": [0, 0], "cov": [[2, 0], [0, -1]]}, "public_stats: cov must be 0 or more on its diagonal, and column"),
    ],
)
def test_statistics_that_no_records_have_are_refused(words, arrays, message, capsys, tmp_path):
    np.savez(tmp_path / "public.npz", **{key: np.array(value, float) for key, value in arrays.items()})
    assert main([*words, "--public-stats", "public.npz"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_statistics_of_columns_without_names_are_refused_by_number(capsys, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(60, 3)), y=np.arange(60) % 2)
    np.savez(tmp_path / "p.npz", mean=np.zeros(3), std=np.array([1.0, 1.0, -1.0]))
    files = ["--data", str(tmp_path / "d.npz"), "--public-stats", str(tmp_path / "p.npz")]
    assert main(["run", *files, "--out", str(tmp_path / "run")]) == 2
    assert "feature 2 has -1" in capsys.readouterr().err


def test_a_table_is_no_file_of_statistics(words, capsys, tmp_path):
    assert main([*words, "--public-stats", "patients.csv"]) == 2
    told = capsys.readouterr().err
    assert "patients.csv' is not an .npz file; write one with numpy.savez(FILE, mean=…, std=…)" in told
    assert "pickle" not in told


def test_a_file_of_somebody_else_is_called_unreadable(words, capsys, monkeypatch):
    monkeypatch.setattr("sordino.training.inputs.os.access", lambda path, mode: mode != os.R_OK)
    assert main(words) == 2
    assert "data: this user cannot read" in capsys.readouterr().err


def test_good_statistics_are_taken(words, tmp_path):
    np.savez(tmp_path / "public.npz", mean=np.zeros(2), std=np.ones(2))
    assert main([*words, "--public-stats", "public.npz"]) == 0
