"""A data format is a reader, registered by its suffix."""

import gzip
import json

import numpy as np
import pandas as pd
import pyarrow.csv
import pytest

from sordino.data import readers
from sordino.data.arrays import unit_numbers
from sordino.data.readers import Raw, Reader, read_table, read_texts, register
from sordino.data.sources import load, read_features
from sordino.data.tables import Dialect, open_table
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


@pytest.mark.parametrize("name", ["1.5", "x", "007", "9223372036854775808"])
@pytest.mark.parametrize("suffix", [".csv", ".xlsx"])
def test_no_name_of_a_person_or_client_changes_those_of_others(tmp_path, name, suffix):
    """The mutant: with one 1.5, a column of long whole numbers is read as floats, and 20 persons become 2."""
    path = tmp_path / f"t{suffix}"

    def units(last):
        rows = [[str(k), str(k % 2), str(2**60 + k // 2)] for k in range(40)] + [["40", "1", last]]
        frame = pd.DataFrame(rows, columns=["x", "y", "who"]).astype({"x": float, "y": int})
        frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_excel(path, index=False)
        raw = read_table(path, "y", None, "who"), read_table(path, "y", "who")
        return unit_numbers(raw[0].person), unit_numbers(raw[1].site)

    if suffix == ".xlsx":
        pytest.importorskip("openpyxl")
    for before, after in zip(units(str(2**60)), units(name), strict=True):
        assert np.array_equal(before[:40], after[:40])
        assert before.max() == 19


@pytest.mark.parametrize("name", ["8", "x"])
def test_whether_all_names_are_numbers_does_not_decide_which_are_one(tmp_path, name):
    """The mutant: where all are numbers, 7 in two kinds of digits is one client, and beside another name it is two."""
    path = tmp_path / "t.csv"
    path.write_text(f"x,y,who\n1,0,7\n2,1,\u0667\n3,0,{name}\n", encoding="utf-8")
    assert unit_numbers(read_table(path, "y", "who").site).tolist() == [0, 0, 1]


@pytest.mark.parametrize("last", ["2020-01-03 12:00", "hello", "12:00", "2020-01-03", "true"])
def test_no_text_changes_how_others_are_spelt(tmp_path, last):
    """The mutant: where all texts are times, pyarrow reads them as such, and they gain seconds."""
    path = tmp_path / "t.csv"
    path.write_text("body,y\n" + "2020-01-01 10:00,0\n" * 9 + f"{last},1\n")
    assert read_texts(path, "body", "y", None).x[0, 0] == "2020-01-01 10:00"


def test_names_of_clients_keep_one_spelling_and_their_order(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y,ward\n1,0,10\n2,1,007\n3,0,7\n")
    assert read_table(path, "y", "ward").site.tolist() == [10, 7, 7]
    path.write_text("x,y,ward\n1,0,10\n2,1,007\n3,0, 7\n4,1,b\n")
    assert read_table(path, "y", "ward").site.tolist() == ["10", "7", "7", "b"]
    path.write_text("x,y,ward\n1,0,10\n2,1,NA\n")
    with pytest.raises(SordinoError, match="client: 1 entries of column 'ward' are missing"):
        read_table(path, "y", "ward")


@pytest.mark.parametrize("cell", ['"a', 'a"', 'a"b', '"a"b', '"a""', ' "a"'])
def test_a_loose_quote_hides_no_other_record(tmp_path, cell):
    """The mutant: all records below the one with the cell are gone."""
    path = tmp_path / "t.csv"
    path.write_text(f'x,y,note\n1,0,"b"\n2,1,{cell}\n' + '3,0,""\n' * 20)
    with pytest.raises(SordinoError, match=r"line 3 of .* (has a quote that neither|begins a quoted cell that)"):
        open_table(path)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ('5,"6"\n"7",8\n', "line 3 of .* does not end, or line 4 has a quote in the middle of it; end it"),
        ("5,6\n7,8\n", "line 3 of .* begins a quoted cell that does not end; end it with a quote"),
        ('5,""\n7,8\n', "line 3 of .* does not end; end"),
        ('5,6\n"""7,8\n', "line 3 of .* does not end, or line 5 has a quote"),
    ],
)
def test_a_quote_that_is_not_closed_is_told_by_the_line_that_opened_it(tmp_path, rest, message):
    path = tmp_path / "t.csv"
    path.write_text('x,note\n1,"a ""b"" c"\n3,"4\n' + rest)
    with pytest.raises(SordinoError, match=message):
        open_table(path)


def test_quoted_cells_may_have_several_lines(tmp_path):
    """Without the option for it, pyarrow refuses such a cell where a block of the file ends in it."""
    path = tmp_path / "t.csv.gz"
    cells = [f'"{k}, ""one"" and\r\ntwo"' for k in range(100_000)]
    path.write_bytes(
        gzip.compress(("x,note\r\n" + "".join(f"{k},{cell}\r\n" for k, cell in enumerate(cells))).encode())
    )
    table = open_table(path)
    assert table.num_rows == 100_000
    assert table.column("note")[70_000].as_py() == '70000, "one" and\r\ntwo'


def test_no_thread_of_pyarrow_holds_what_python_unpacks_or_decodes(tmp_path, monkeypatch):
    """Such a thread aborts a process that ends: one in three runs that refused a large .gz file had status 134."""
    threads, read = [], pyarrow.csv.read_csv

    def watched(stream, options, *more):
        threads.append(options.use_threads)
        return read(stream, options, *more)

    monkeypatch.setattr(pyarrow.csv, "read_csv", watched)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"x,y\n1,0\n"))
    (tmp_path / "t.csv").write_text("x,y\n1,0\n")
    open_table(tmp_path / "t.csv.gz")
    open_table(tmp_path / "t.csv", Dialect(encoding="latin-1"))
    open_table(tmp_path / "t.csv")
    assert threads == [False, False, True]


def test_errors_quote_no_cell(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('x,y\n1,0\n"secret\ncell",1\n')
    with pytest.raises(SordinoError) as told:
        open_table(path, types={"x": "number"})
    assert "secret" not in str(told.value)
