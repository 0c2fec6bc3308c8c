"""The public schema: what a record becomes, which files it reads, and what it refuses."""

import gzip
import json
import lzma
import re
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from sordino.cli import main
from sordino.data import tables
from sordino.data.arrays import unit_numbers
from sordino.data.schema import BLANK, Schema
from sordino.errors import SordinoError

VALUES = {
    "client": "hospital",
    "target": {"column": "died", "levels": ["no", "yes"], "recode": {"0": "no", "1": "yes"}},
    "columns": {
        "age": {"type": "number", "range": [0, 100], "fill": 40},
        "cost": {"type": "number", "range": [0, 999], "log": True, "indicator": False},
        "bmi": {"type": "number", "mean": 25, "std": 5, "limit": 2},
        "ward": {"type": "category", "levels": ["a", "b"]},
        "stage": {"type": "ordinal", "levels": ["I", "II", "III"]},
        "smokes": {"type": "boolean"},
        "admitted": {"type": "date", "range": ["2020-01-01", "2020-01-11"]},
        "id": {"type": "drop"},
    },
}
FRAME = {
    "died": ["no", "1", "0"],
    "hospital": ["x", "y", "x"],
    "age": [50, None, 400],
    "cost": [0, 999, None],
    "bmi": [25, 100, None],
    "ward": ["b", "c", None],
    "stage": ["I", "III", "IV"],
    "smokes": ["yes", "No", ""],
    "admitted": ["2020-01-01", "2020-01-06", None],
    "id": [1, 2, 3],
}
FEATURES = [
    *("age", "age is missing", "cost", "bmi", "bmi is missing"),
    *("ward = a", "ward = b", "ward = other", "ward = missing"),
    *("stage", "stage is missing", "smokes", "smokes is missing", "admitted", "admitted is missing"),
]
EXPECTED = np.array(
    [
        [0.0, 0, -1, 0, 0, 0, 1, 0, 0, -1, 0, 1, 0, -1, 0],
        [-0.2, 1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0],
        [1.0, 0, 2 * np.log1p(499.5) / np.log1p(999) - 1, 0, 1, 0, 0, 0, 1, 0, 1, 0.5, 1, 0, 1],
    ]
)


def changed(path, value, values=VALUES):
    """The values with one key replaced (or removed, where the value is None)."""
    head, *rest = path
    copy = dict(values)
    if rest:
        copy[head] = changed(rest, value, values[head])
    elif value is None:
        copy.pop(head)
    else:
        copy[head] = value
    return copy


def survival(**changes):
    """A survival target with some keys changed, or removed where they are None."""
    target = {"column": "time", "task": "survival", "event": "died", "intervals": [0, 10, 20], **changes}
    return {key: value for key, value in target.items() if value is not None}


def write(folder: Path, text: str, name="table.csv", encoding="utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


# ------------------------------------------------------------------------------------------------------------- encoding


def test_every_type_becomes_what_the_schema_says():
    schema = Schema.of(VALUES)
    assert schema.features == FEATURES
    encoded = schema.encode(FRAME)
    np.testing.assert_allclose(encoded.x, EXPECTED, atol=1e-6)
    assert encoded.x.dtype == np.float32
    assert encoded.y.tolist() == [0, 1, 0]
    assert encoded.client.tolist() == ["x", "y", "x"]
    assert schema.used == 7


def test_columns_are_found_by_name_in_any_order():
    schema = Schema.of(VALUES)
    again = schema.encode(dict(reversed(FRAME.items())))
    np.testing.assert_array_equal(again.x, schema.encode(FRAME).x)


def test_no_record_changes_what_another_becomes():
    schema = Schema.of(VALUES)
    alone = [schema.encode({name: cells[i : i + 1] for name, cells in FRAME.items()}).x[0] for i in range(3)]
    np.testing.assert_array_equal(np.stack(alone), schema.encode(FRAME).x)


def test_every_feature_is_bounded_whatever_the_cell():
    wild = {**FRAME, "age": [1e300, -1e300, None], "bmi": [1e300, -1e300, 0], "cost": [-1e9, 1e300, 5]}
    assert np.abs(Schema.of(VALUES).encode(wild).x).max() <= 1


def test_pandas_and_polars_frames_are_read():
    schema = Schema.of(VALUES)
    for library in ("pandas", "polars"):
        frame = pytest.importorskip(library).DataFrame(FRAME)
        np.testing.assert_allclose(schema.encode(frame).x, EXPECTED, atol=1e-6)


def test_numeric_levels_match_whole_numbers_and_floats():
    values = {"columns": {"cp": {"type": "category", "levels": [1, 2.0], "other": False, "indicator": False}}}
    x = Schema.of(values).encode({"cp": [1.0, 2.0, 3.0]}, target=False).x
    np.testing.assert_array_equal(x, [[1, 0], [0, 1], [0, 0]])


def test_a_quantity_is_clamped_to_its_public_range_and_scaled():
    schema = Schema.of(changed(["target"], {"column": "died", "task": "quantity", "range": [0, 10]}))
    assert schema.classes == ()
    y = schema.encode({**FRAME, "died": [3, 12, -1]}).y
    assert y.tolist() == [3, 10, 0]
    np.testing.assert_allclose(schema.to_model(y), [-0.4, 1, -1], rtol=1e-6)
    np.testing.assert_allclose(schema.to_people(np.array([-0.4, 3.0, -1])), [3, 10, 0])
    assert schema.unit == 5


def test_the_hash_is_of_what_the_schema_says():
    schema = Schema.of(VALUES)
    assert Schema.of(schema.values()).sha256() == schema.sha256()
    assert Schema.of(dict(reversed(VALUES.items()))).sha256() == schema.sha256()
    assert Schema.of(changed(["columns", "age", "fill"], 41)).sha256() != schema.sha256()
    reversed_columns = changed(["columns"], dict(reversed(VALUES["columns"].items())))
    assert Schema.of(reversed_columns).sha256() != schema.sha256()  # another order of features is another model


def test_a_schema_survives_its_file(tmp_path):
    schema = Schema.of(VALUES)
    path = write(tmp_path, schema.toml(), "schema.toml")
    assert Schema.read(path) == schema


# ---------------------------------------------------------------------------------------------------------------- files

SMALL = {"target": {"column": "y", "levels": ["n", "j"]}, "columns": {"größe": {"type": "number", "range": [0, 2]}}}
TEXT = "größe,y\n1.5,j\n,n\n"


def small(**file):
    return Schema.of({**SMALL, "file": file} if file else SMALL)


@pytest.mark.parametrize(
    ("text", "file", "encoding"),
    [
        (TEXT, {}, "utf-8"),
        (TEXT, {}, "utf-8-sig"),
        (TEXT.replace("\n", "\r\n"), {}, "utf-8"),
        (TEXT.replace(",", ";"), {}, "utf-8"),
        (TEXT.replace(",", "\t"), {}, "utf-8"),
        (TEXT.replace(",", ";").replace(".", ","), {"decimal": ","}, "utf-8"),
        (TEXT, {"encoding": "latin-1"}, "latin-1"),
        (TEXT.replace(",", "|"), {"delimiter": "|"}, "utf-8"),
        ('y,"größe"\nj, 1.5\nn,?\n', {}, "utf-8"),
    ],
)
def test_text_files_are_read_in_every_dialect(tmp_path, text, file, encoding):
    encoded = small(**file).open(write(tmp_path, text, encoding=encoding))
    np.testing.assert_allclose(encoded.x, [[0.5, 0], [0, 1]])
    assert encoded.y.tolist() == [1, 0]


def test_compressed_and_binary_files(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "t.csv.xz").write_bytes(lzma.compress(TEXT.encode()))
    pa.parquet.write_table(pa.table({"y": ["j", "n"], "größe": [1.5, None]}), tmp_path / "t.parquet")
    for name in ("t.csv.gz", "t.csv.xz", "t.parquet"):
        np.testing.assert_allclose(small().open(tmp_path / name).x, [[0.5, 0], [0, 1]])


def test_an_excel_sheet_is_read_as_a_text_file_is(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (["größe", "y"], [1.5, "j"], [None, "n"]):
        book.active.append(row)
    book.save(tmp_path / "t.xlsx")
    np.testing.assert_allclose(small().open(tmp_path / "t.xlsx").x, [[0.5, 0], [0, 1]])


@pytest.mark.parametrize("cell", ["x", "1", 1.5, True, None, datetime(2020, 5, 1, 12), 10**17, 2.0**60])
def test_no_cell_of_a_sheet_changes_how_other_records_are_read(tmp_path, cell):
    """The mutant: where a column has cells of several types, every cell of the sheet is spelt as Python spells it."""
    openpyxl = pytest.importorskip("openpyxl")
    schema = Schema.of(
        {
            "person": "who",
            "target": {"column": "y", "levels": ["0", "1"]},
            "columns": {
                "n": {"type": "number", "range": [0, 9]},
                "stage": {"type": "category", "levels": ["1", "2", "100000000000000000"]},
                "flag": {"type": "category", "levels": ["true", "false"]},
                "day": {"type": "date", "range": ["2020-01-01", "2020-12-31"]},
            },
        }
    )

    def opened(*changed):
        book = openpyxl.Workbook()
        book.active.append(["n", "stage", "flag", "day", "y", "who"])
        rows = [
            [k / 2, 10**17 if k == 1 else float(k), bool(k % 2), datetime(2020, 1, 1 + k), float(k % 2), 2**50 + k // 2]
            for k in range(6)
        ]
        for column in changed:
            rows[5][column] = cell
        for row in rows:
            book.active.append(row)
        book.save(tmp_path / "t.xlsx")
        return schema.open(tmp_path / "t.xlsx")

    before = opened()
    for column in range(6):
        try:
            after = opened(column)
        except SordinoError:  # the cell does not fit the column
            continue
        assert np.array_equal(after.x[:5], before.x[:5])
        assert np.array_equal(after.y[:5], before.y[:5])
        assert np.array_equal(unit_numbers(after.person)[:5], unit_numbers(before.person)[:5])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("größe,y\nabc,j\n", "column 'größe' holds a cell that is not a number"),
        ("größe;y\n1,5;j\n", 'set decimal = ","'),
        ("grösse,y\n1,j\n", "lacks the column 'größe'. Did you mean"),
        ("größe,y,id\n1,j,3\n", "has the column 'id', which the schema does not mention"),
        ("größe,größe,y\n1,2,j\n", "has the column 'größe' twice"),
        ("größe,y\n1,j,3\n", "more or fewer cells than the heading"),
        ("größe,y\n1,x\n", "1 cell of column 'y' is none of the levels n, j"),
        ("größe,y\n1,\n", "1 cell of column 'y' is missing"),
        ("", "is empty"),
    ],
)
def test_files_that_do_not_fit(tmp_path, text, problem):
    with pytest.raises(SordinoError, match=re.escape(problem)):
        small().open(write(tmp_path, text))


def test_a_wrong_encoding_names_the_remedy(tmp_path):
    for encoding in ("latin-1", "utf-16"):
        with pytest.raises(SordinoError, match='encoding = "latin-1"'):
            small().open(write(tmp_path, TEXT, encoding=encoding))


def test_a_cell_in_latin_1_names_the_remedy(tmp_path):
    schema = Schema.of({"columns": {"a": {"type": "category", "levels": ["é"]}}})
    with pytest.raises(SordinoError, match='encoding = "latin-1"'):
        schema.open(write(tmp_path, "a\né\n", encoding="latin-1"), target=False)


def test_errors_quote_no_cell(tmp_path):
    for text in ("größe,y\nsecret,j\n", "größe,y\n1,secret\n", "größe,y\n1,j,secret\n", 'größe,y\n"1,secret",j\n'):
        with pytest.raises(SordinoError) as caught:
            small().open(write(tmp_path, text))
        assert "secret" not in str(caught.value)
    with pytest.raises(SordinoError, match="several types") as caught:
        tables.of_frame({"a": [1.0, "secret"]})
    assert "secret" not in str(caught.value)


def test_dates_in_another_form(tmp_path):
    about = {"type": "date", "range": ["2020-01-01", "2020-12-31"], "format": "%d.%m.%Y"}
    schema = Schema.of({"columns": {"day": about}})
    cells = {"day": ["01.01.2020", "31.12.2020", None]}
    np.testing.assert_allclose(schema.encode(cells, target=False).x, [[-1, 0], [1, 0], [0, 1]])
    with pytest.raises(SordinoError, match=r"2 cells of column 'day' are not dates like 31\.12\.2024;"):
        schema.encode({"day": ["2020-01-01", "01.01.2020", "31.02.2020"]}, target=False)
    with pytest.raises(SordinoError, match="format: 'm/y' must name day, month and year"):
        Schema.of({"columns": {"day": {**about, "format": "m/y"}}})


def test_a_closed_file_is_not_called_damaged(tmp_path, monkeypatch):
    """Root may read everything, so that the system's answer is put in."""

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(tables, "_stream", closed)
    with pytest.raises(SordinoError, match=r"^data: this user cannot read '.*'; change its permissions\.$"):
        tables.heading(write(tmp_path, "a\n1\n"), tables.Dialect())


def test_check_explains_a_schema_whose_ranges_are_to_be_found(tmp_path, capsys):
    text = '[target]\ncolumn = "y"\nlevels = ["n", "j"]\nfind_prevalence = true\n'
    text += '[columns.a]\ntype = "number"\nwithin = [0, 9]\n[columns.b]\ntype = "category"\ncandidates = ["u"]\n'
    schema = write(tmp_path, text, name="schema.toml")
    for more in ([], [str(write(tmp_path, "a,b,y\n1,u,n\n2,v,j\n"))]):
        assert main(["schema", "check", str(schema), *more]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "to find a, b, target.prevalence: not known yet" in said
        assert ("every cell can be read" in said) == bool(more)


# -------------------------------------------------------------------------------------------------------- wrong schemas


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (["columns", "age", "range"], [100, 0], "columns.age.range: .* the lower one first"),
        (["columns", "age", "range"], [0], "columns.age.range: .* two numbers"),
        (["columns", "age", "range"], ["0", "1"], "columns.age.range: .* two numbers"),
        (["columns", "age", "range"], [BLANK, BLANK], "columns.age.range: it still says 'FILL IN'.*drop"),
        (["columns", "age", "range"], None, "columns.age: give either a public range"),
        (["columns", "age", "std"], 3, "columns.age: give either"),
        (["columns", "age", "fill"], "x", "columns.age.fill: 'x' must be a number"),
        (["columns", "age", "rang"], [0, 1], "columns.age: the key 'rang' is unknown. Did you mean 'range'"),
        (["columns", "age", "type"], "numbr", "columns.age.type: 'numbr' is unknown. Did you mean 'number'"),
        (["columns", "age", "indicator"], "yes", "columns.age.indicator: 'yes' must be true or false"),
        (["columns", "bmi", "std"], 0, "columns.bmi.std: 0.0 must be above 0"),
        (["columns", "bmi", "limit"], -1, "columns.bmi.limit"),
        (["columns", "ward", "levels"], [], "columns.ward.levels: list at least 1"),
        (["columns", "ward", "levels"], ["a", "a"], "columns.ward.levels: a level stands there twice"),
        (["columns", "ward", "levels"], "ab", "columns.ward.levels: 'ab' must be a list"),
        (["columns", "stage", "levels"], ["I"], "columns.stage.levels: list at least 2"),
        (["columns", "stage", "fill"], "V", "columns.stage.fill: 'V' is none of the levels"),
        (["columns", "smokes", "true"], ["no"], "columns.smokes: a word stands under both"),
        (["columns", "admitted", "range"], ["2020-01-01", "soon"], "'soon' is not a date"),
        (["columns", "admitted", "range"], ["2020-01-02", "2020-01-01"], "the earlier one first"),
        (["columns"], {}, "there are no columns"),
        (["columns", "age"], "number", "columns.age: write a table"),
        (["target", "task"], "clases", "target.task: 'clases' is unknown. Did you mean 'classes'"),
        (["target", "levels"], ["no"], "target.levels: list at least 2"),
        (["target", "recode"], {"2": "maybe"}, "target.recode: 'maybe' is none of the levels"),
        (["target", "recode"], "0", "target.recode: '0' must be a table"),
        (["target"], {"column": "died", "task": "quantity"}, "target.range: a quantity needs a public range"),
        (["target"], {"column": "died", "task": "quantity", "range": [5, 5]}, "target.range: a quantity needs"),
        (["target"], {"column": "died", "task": "quantity", "range": [20, 0]}, r"\[20.* is reversed, write \[0.*, 20"),
        (["target"], {"task": "classes", "levels": ["a", "b"]}, "target: it lacks column"),
        (["target", "maximum"], 9, "target.maximum: it is for count, and the task is classes"),
        (["target"], {"column": "died", "task": "count"}, "target.maximum: a count needs .* none is given"),
        (["target"], {"column": "died", "task": "count", "maximum": 2.5}, "target.maximum: .* 2.5 is given"),
        (["target"], {"column": "died", "task": "count", "maximum": 0}, "target.maximum: .* 0 is given"),
        (["target"], {"column": "died", "task": "count", "maximum": "many"}, "target.maximum: 'many' must be a number"),
        (["target"], {"column": "died", "task": "count", "range": [0, 9], "maximum": 9}, "target.range: it is for"),
        (["target"], survival(event=None), "target.event: survival needs the column that says whether the event"),
        (["target"], survival(event="time"), "must be three different columns"),
        (["target"], survival(event="hospital"), "must be three different columns"),
        (["target"], survival(event="age"), "columns.age: age is the event, so it is not a feature"),
        (["target"], survival(intervals=None), "target.intervals: survival needs public edges"),
        (["target"], survival(intervals=[0]), "target.intervals: survival needs public edges"),
        (["target"], survival(intervals=[1, 2]), "target.intervals: .* begin with 0"),
        (["target"], survival(intervals=[0, 2, 2]), "target.intervals: .* begin with 0 and rise"),
        (["target"], survival(intervals=list(range(200))), "target.intervals: .* at most 101"),
        (["target"], survival(intervals=[0, "x"]), "target.intervals: .* must be a list of numbers"),
        (["target"], survival(intervals=365), "target.intervals: 365 must be a list of numbers"),
        (["target"], survival(levels=["no"]), "target.levels: of survival, give how the event column spells"),
        (["target"], survival(maximum=3), "target.maximum: it is for count, and the task is survival"),
        (
            ["target", "column"],
            "age",
            r"columns.age: age is the target, so it is not a feature; remove \[columns.age\]",
        ),
        (["client"], "died", "must be three different columns"),
        (["client"], 3, "client: '3' must be the name of a column"),
        (["person"], "died", "must be three different columns"),
        (["missing"], "?", "missing: give a list of texts"),
        (["clients"], "hospital", "schema: the key 'clients' is unknown. Did you mean 'client'"),
        (["file"], {"delimeter": ";"}, "file: the key 'delimeter' is unknown. Did you mean 'delimiter'"),
    ],
)
def test_wrong_schemas_are_refused_by_the_key(path, value, problem):
    with pytest.raises(SordinoError, match=problem):
        Schema.of(changed(path, value))


@pytest.mark.parametrize(
    ("column", "cells", "problem"),
    [
        ("age", ["x", "1", "2"], "column 'age' holds 1 cell that is not a number"),
        ("age", [float("inf"), 1, 2], "column 'age' holds an infinite number"),
        (
            "admitted",
            ["31.12.2020", None, None],
            "1 cell of column 'admitted' is not a date like 2024-12-31. .* set format",
        ),
        ("hospital", ["a", None, "b"], "client: 1 cell of column 'hospital' is missing"),
        ("died", ["no", "perhaps", "no"], "target: 1 cell of column 'died' is none"),
    ],
)
def test_wrong_cells_are_refused_by_the_column(column, cells, problem):
    with pytest.raises(SordinoError, match=problem):
        Schema.of(VALUES).encode({**FRAME, column: cells})


def test_a_missing_cell_does_not_change_how_long_codes_of_others_are_read():
    """A data frame turns all codes of a column into floats where one is missing."""
    pandas = pytest.importorskip("pandas")
    codes = [1000000000000000, 7, 1234567890123456]
    levels = {"type": "category", "levels": [str(code) for code in codes]}
    schema = Schema.of({"target": {"column": "y", "levels": ["no", "yes"]}, "columns": {"code": levels}})
    frame = pandas.DataFrame({"y": ["no", "yes", "no"], "code": codes})
    blank = pandas.DataFrame({"y": ["no", "yes", "no"], "code": [*codes[:2], None]})
    assert schema.encode(blank).x[:2].tolist() == schema.encode(frame).x[:2].tolist()
    assert schema.encode(frame).x[:, :3].tolist() == np.eye(3).tolist()
    frame["code"] = [900000000000207008, 7, 8]
    schema.encode(frame)
    frame.loc[2, "code"] = None
    with pytest.raises(SordinoError, match=r"^data: column 'code' holds whole numbers of 16 digits and more as floats"):
        schema.encode(frame)


def test_a_missing_column_is_refused():
    with pytest.raises(SordinoError, match="lacks the column 'age'"):
        Schema.of(VALUES).encode({name: cells for name, cells in FRAME.items() if name != "age"})
    with pytest.raises(SordinoError, match="is not a table"):
        tables.of_frame([1, 2])


def of_target(target, **columns):
    """A schema with one feature, and its table."""
    schema = Schema.of({"target": target, "columns": {"age": {"type": "number", "range": [0, 100]}}})
    rows = len(next(iter(columns.values())))
    return schema, {"age": [50] * rows, **columns}


def test_a_count_is_clamped_at_its_public_maximum_and_measured_in_its_root():
    schema, frame = of_target({"column": "n", "task": "count", "maximum": 16}, n=[0, 3, 16, 99])
    y = schema.encode(frame).y
    assert y.tolist() == [0, 3, 16, 16]
    assert schema.unit == 4
    assert schema.to_model(y).tolist() == [0, 0.75, 4, 4]
    assert schema.to_people(np.array([0.5, 9.0])).tolist() == [2, 16]
    assert Schema.of(schema.values()).sha256() == schema.sha256()
    assert schema.target.says() == "count, 0 … 16; larger ones are clamped"


def test_survival_becomes_a_signed_time_and_ends_at_the_last_edge():
    schema, frame = of_target(survival(), time=[5, 5, 0, 0, 20, 30, 19.5], died=[1, 0, 1, 0, 1, 0, 1])
    y = schema.encode(frame).y
    least = 20 * 2.0**-20
    assert y.tolist() == [5, -5, pytest.approx(least), pytest.approx(-least), -20, -20, 19.5]
    assert schema.to_model(y).tolist() == y.tolist()
    assert schema.reads() == {"age": "number", "time": "number", "died": "level"}
    assert Schema.of(schema.values()).sha256() == schema.sha256()
    schema, frame = of_target(survival(levels=["Alive", "Dead"]), time=[1, 2], died=["Dead", "Alive"])
    assert schema.encode(frame).y.tolist() == [1, -2]


@pytest.mark.parametrize(
    ("target", "columns", "problem"),
    [
        (
            {"column": "n", "task": "count", "maximum": 9},
            {"n": [1, -1]},
            "target: 1 cell of column 'n' cannot be a count",
        ),
        ({"column": "n", "task": "count", "maximum": 9}, {"n": [1.5, 2]}, "target: 1 cell .* cannot be a count"),
        ({"column": "n", "task": "count", "maximum": 9}, {"n": [None, 2]}, "target: 1 cell .* is missing"),
        ({"column": "n", "task": "count", "maximum": 9}, {"n": ["a", "2"]}, "column 'n' holds 1 cell that is"),
        (survival(), {"time": [1, -2], "died": [1, 0]}, "target: 1 times in column 'time' are below 0"),
        (survival(), {"time": [1, None], "died": [1, 0]}, "target: 1 cell of column 'time' is missing"),
        (survival(), {"time": [1, 2], "died": [1, None]}, "target: 1 cell of column 'died' is missing"),
        (
            survival(),
            {"time": [1, 2], "died": ["yes", "perhaps"]},
            "1 cell of column 'died' is neither false nor true",
        ),
        (survival(levels=["a", "d"]), {"time": [1, 2], "died": ["a", "D"]}, "is neither a nor d; spell them in"),
        (survival(), {"time": [1, 2]}, "lacks the column 'died'"),
    ],
)
def test_wrong_counts_and_times_are_refused(target, columns, problem):
    schema, frame = of_target(target, **columns)
    with pytest.raises(SordinoError, match=problem):
        schema.encode(frame)


# ------------------------------------------------------------------------------------------------- what the owner sees


def test_a_word_that_is_neither_true_nor_false_is_refused_and_not_told():
    schema = Schema.of({"columns": {"card": {"type": "boolean", "true": ["Ja", "J"], "false": ["Nein"]}}})
    cells = ["ja", "NEIN", "", "Ja", "j"]
    assert schema.encode({"card": cells}, target=False).x[:, 0].tolist() == [1, 0, 0.5, 1, 1]
    assert schema.columns["card"].says() == "Ja becomes 1, Nein becomes 0"
    with pytest.raises(SordinoError, match="column 'card' holds a cell that is neither among its words") as caught:
        schema.encode({"card": [*cells, "rare"]}, target=False)
    assert "rare" not in str(caught.value)


def test_unknown_levels_end_no_run_and_are_counted_for_the_owner(tmp_path, capsys):
    rows = ["low,a,n", "tiny,a,j", "high,zz,n", "[red]tiny,b,j", ",b,n", "tiny,a,n", *(f"t{k},a,n" for k in range(6))]
    path = write(tmp_path, "\n".join(["dose,ward,y", *rows]) + "\n")
    columns = {
        "dose": {"type": "ordinal", "levels": ["low", "mid", "high"]},
        "ward": {"type": "category", "levels": ["a", "b"]},
    }
    schema = Schema.of({"columns": columns, "target": {"column": "y", "levels": ["n", "j"]}})
    (tmp_path / "s.toml").write_text(schema.toml())
    x = schema.open(path).x
    assert x[1].tolist() == [0, 1, 1, 0, 0, 0], "an unknown level of an ordinal counts as missing"
    assert x[2].tolist() == [1, 0, 0, 0, 1, 0], "one of a category as other"
    found = schema.unlisted(path)
    assert found["dose"]["tiny"] == 2
    assert next(iter(found["dose"])) == "tiny", "the most frequent first"
    assert found["ward"] == {"zz": 1}
    assert main(["schema", "check", str(tmp_path / "s.toml"), str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "unlisted dose: 9 cells are none of its levels (tiny 2, [red]tiny 1," in told
    assert "and 3 others); each counts as missing. (This line comes from the records: do not publish it.)" in told
    assert "unlisted ward: 1 cell is none of its levels (zz 1); each counts as other." in told
    assert main(["schema", "check", str(tmp_path / "s.toml"), str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["unlisted"] == found
    (tmp_path / "t.csv").write_text("dose,ward,y\nlow,a,n\nmid,,j\n")
    assert schema.unlisted(tmp_path / "t.csv") == {}
    says = {name: text for name, text, _ in schema.explain()}
    assert "any other level counts as missing" in says["dose"]


def test_codes_that_a_frame_wrote_as_floats_are_their_levels(tmp_path):
    columns = {
        "ward": {"type": "category", "levels": [1, 2, "3.0"]},
        "smoker": {"type": "boolean"},
    }
    schema = Schema.of({"columns": columns, "target": {"column": "y", "levels": [0, 1]}})
    heading = "ward,smoker,y\n"
    plain = schema.open(write(tmp_path, heading + "1,1,0\n2,0,1\n3.0,,1\n3,0,0\n"))
    (tmp_path / "f.csv").write_text(heading + "1.0,1.0,0.0\n2.00,0.0,1.0\n3.0,,1.0\n3,0,0\n")
    floats = schema.open(tmp_path / "f.csv")
    assert np.array_equal(floats.x, plain.x)
    assert np.array_equal(floats.y, plain.y)
    assert floats.x[2, 2] == 1, "a level that is spelt 3.0 is found as it is spelt"
    assert floats.x[3, 3] == 1, "3 is not the level 3.0"
    assert schema.unlisted(tmp_path / "f.csv") == {"ward": {"3": 1}}


def test_the_owner_sees_which_cells_end_a_run(tmp_path, capsys):
    columns = {"smoker": {"type": "boolean"}}
    schema = Schema.of({"columns": columns, "target": {"column": "y", "levels": ["well", "ill"]}})
    (tmp_path / "s.toml").write_text(schema.toml())
    path = write(tmp_path, "smoker,y\nYES,well\nnope,il\nno,ill\n")
    with pytest.raises(SordinoError):
        schema.open(path)
    assert main(["schema", "check", str(tmp_path / "s.toml"), str(path)]) == 2
    told = capsys.readouterr()
    out = " ".join(told.out.split())
    assert "unlisted smoker: 1 cell is none of its levels (nope 1); each ends a run." in out
    assert "unlisted y: 1 cell is none of its levels (il 1); each ends a run." in out
    assert "add the word to true or false" in told.err
    assert "nope" not in told.err


def test_a_heading_of_toml_that_needs_quotes_is_said_so(tmp_path):
    (tmp_path / "s.toml").write_text('[columns.größe]\ntype = "drop"\n', encoding="utf-8")
    with pytest.raises(SordinoError, match=r"line 1, column 12.; a name with other characters .* needs quotes"):
        Schema.read(tmp_path / "s.toml")


def test_explanations_name_the_feature_of_missing_cells():
    (name, says, features), *_ = Schema.of({"columns": {"age": {"type": "number", "range": [0, 100]}}}).explain()
    assert (name, features) == ("age", ["age", "age is missing"])
    assert says.endswith("one more feature is 1 where the cell is missing")
    plain = {"type": "number", "range": [0, 100], "indicator": False}
    assert "missing" not in Schema.of({"columns": {"age": plain}}).explain()[0][1]


def test_files_with_few_distinct_texts_are_encoded_as_frames_are(tmp_path, monkeypatch):
    """Readers hand such columns over as dictionaries; records are encoded in slices."""
    import pyarrow as pa
    import pyarrow.parquet

    schema = Schema.of(
        {
            "columns": {
                "ward": {"type": "category", "levels": ["a", "b"]},
                "grade": {"type": "ordinal", "levels": ["low", "mid", "high"]},
                "smokes": {"type": "boolean"},
            },
            "target": {"column": "died", "levels": ["no", "yes"]},
        }
    )
    frame = {
        "ward": ["a", " b", "c", None, "?", "a "],
        "grade": ["low", "high", "NA", "mid", None, "none"],
        "smokes": ["YES", "no", "True", "0", "", "n"],
        "died": ["no", "yes", "yes", "no", "no", "yes"],
    }
    whole = schema.encode(frame)
    pa.parquet.write_table(pa.table(frame), tmp_path / "t.parquet", row_group_size=2)
    rows = [",".join("" if cell is None else cell for cell in row) for row in zip(*frame.values(), strict=True)]
    (tmp_path / "t.csv").write_text("\n".join([",".join(frame), *rows]) + "\n")
    for chunk in (2**16, 4, 1):
        monkeypatch.setattr("sordino.data.schema.CHUNK_RECORDS", chunk)
        for name in ("t.parquet", "t.csv"):
            opened = schema.open(tmp_path / name)
            assert np.array_equal(opened.x, whole.x), (name, chunk)
            assert np.array_equal(opened.y, whole.y)
