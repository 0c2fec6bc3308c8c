"""A data format is a reader, registered by its suffix."""

import json

import numpy as np
import pytest

from sordino.data import readers
from sordino.data.readers import Raw, Reader, register
from sordino.data.sources import load, read_features
from sordino.errors import SordinoError
from sordino.training import resolved


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(path, label, client, person):
    """One JSON object per line: `x`, `y`, and whose it is."""
    lines = rows(path)
    x = np.asarray([line["x"] for line in lines], np.float32)
    site = None if client is None else np.asarray([line[client] for line in lines])
    return Raw(x, np.asarray([line[label or "y"] for line in lines]), site)


def features(path, columns, count):
    return np.asarray([line["x"] for line in rows(path)], np.float32)


@pytest.fixture
def toy(monkeypatch):
    """A format of this test's own, forgotten afterwards."""
    monkeypatch.setattr(readers, "READERS", dict(readers.READERS))
    register(".jsonl", Reader(records, features))


@pytest.fixture
def file(tmp_path):
    rng = np.random.default_rng(0)
    lines = [{"x": rng.normal(size=3).tolist(), "y": int(i % 2), "ward": f"w{i % 4}"} for i in range(40)]
    path = tmp_path / "table.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_format_is_unknown_without_its_reader(file):
    with pytest.raises(SordinoError, match=r"not a file of a known kind; use .npz, .csv, .tsv, .parquet, .xlsx"):
        load(str(file))


def test_a_finished_run_is_no_data(tmp_path):
    (tmp_path / "mine" / "public").mkdir(parents=True)
    with pytest.raises(SordinoError, match=r"is a finished run, not data; sordino.load_run reads it"):
        load(str(tmp_path / "mine"))


def test_a_toy_format_is_loaded_split_and_predicted_from(toy, file):
    """Registering a reader is all it takes: loading, clients, prediction and specs know the format."""
    data = load(str(file), client="ward", test_fraction=0.25)
    assert (data.name, data.classes) == ("table", ("0", "1"))
    assert data.x_train.shape == (30, 3)
    assert set(data.site) == {"w0", "w1", "w2", "w3"}
    assert read_features(str(file), (), 3).shape == (40, 3)
    assert not resolved._benchmark(str(file))
    with pytest.raises(SordinoError, match="has 3 features, the model was trained on 4"):
        read_features(str(file), (), 4)


def test_what_a_reader_returns_is_checked(toy, file):
    lines = rows(file)
    lines[3]["x"] = [1.0, float("nan"), 2.0]
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SordinoError, match="NaN, infinite or too large"):
        load(str(file))


@pytest.mark.parametrize(
    ("suffix", "problem"), [(".csv", "has a reader already"), ("csv", "dot"), (".CSV", "lower case")]
)
def test_a_suffix_is_registered_once_and_well_formed(toy, suffix, problem):
    with pytest.raises(SordinoError, match=problem):
        register(suffix, Reader(records, features))
