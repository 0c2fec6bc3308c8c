"""The identity of records: what a file says, not how it is written."""

import gzip
import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from sordino.data.identity import arrays_digest, frame_digest, records_digest
from sordino.data.tables import Dialect

TABLE = "age,dose,sex,label\n50,1,f,no\n61,2.5,m,yes\n70,10,f,no\n"
KEY = b"k" * 32


def digest(path, content, key=KEY):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return records_digest(str(path), key)


SAME = {
    "CRLF": TABLE.replace("\n", "\r\n"),
    "a blank line": TABLE + "\n",
    "no last line end": TABLE.rstrip("\n"),
    "other spelling of numbers": TABLE.replace("50,1,", "50.0,1e0,").replace("10,", "1E1,"),
    "quotes": TABLE.replace("yes", '"yes"'),
    "order of columns": "label,sex,dose,age\nno,f,1,50\nyes,m,2.5,61\nno,f,10,70\n",
    "semicolons": TABLE.replace(",", ";"),
    "spaces around a text": TABLE.replace(",no\n", ", no \n", 1),
    "spaces around a name": TABLE.replace(",label", ", label "),
}
OTHER = {
    "a number": TABLE.replace("61", "62"),
    "a label": TABLE.replace("yes", "no"),
    "a record less": TABLE.replace("70,10,f,no\n", ""),
    "the order of records": "age,dose,sex,label\n61,2.5,m,yes\n50,1,f,no\n70,10,f,no\n",
    "a missing cell": TABLE.replace("61,2.5", "61,"),
    "a small part of a number": TABLE.replace("2.5", "2.50001"),
    "a column more": TABLE.replace("\n", ",1\n").replace("label,1", "label,x"),
    "names exchanged": TABLE.replace("age,dose", "dose,age"),
}


@pytest.mark.parametrize("how", SAME)
def test_how_a_table_is_written_does_not_matter(tmp_path, how):
    assert digest(tmp_path / "a.csv", TABLE) == digest(tmp_path / "b.csv", SAME[how])


@pytest.mark.parametrize("how", OTHER)
def test_what_a_table_says_matters(tmp_path, how):
    assert digest(tmp_path / "a.csv", TABLE) != digest(tmp_path / "b.csv", OTHER[how])


def test_the_format_does_not_matter(tmp_path):
    first = digest(tmp_path / "a.csv", TABLE)
    pa.parquet.write_table(pa.csv.read_csv(tmp_path / "a.csv"), tmp_path / "a.parquet")
    assert records_digest(str(tmp_path / "a.parquet"), KEY) == first
    assert digest(tmp_path / "a.csv.gz", gzip.compress(TABLE.encode())) == first


KINDS = (
    "when,at,late,smoker,code,note,weight\n"
    "2020-01-01,2020-01-01 10:30:00,10:30:00,true,007,NA,0.1\n"
    "2020-01-02,2020-01-02 10:30:00.25,10:31:00,false,E10,a,0.2\n"
    ",,,,,,3\n"
)


def as_texts(table):
    return pa.table({name: table.column(name).cast(pa.string()) for name in table.column_names})


def cast(**types):
    return lambda table: table.cast(
        pa.schema([(name, types.get(name, table.field(name).type)) for name in table.column_names])
    )


OTHER_TYPES = {
    "as read": lambda table: table,
    "texts": as_texts,
    "nanoseconds": cast(when=pa.timestamp("ns"), at=pa.timestamp("ns")),
    "with a time zone": cast(at=pa.timestamp("us", "UTC")),
    "0 and 1": cast(smoker=pa.int8()),
    "0.0 and 1.0": cast(smoker=pa.float64()),
    "float32": cast(weight=pa.float32()),
    "categories": lambda table: table.set_column(4, "code", table.column("code").dictionary_encode()),
    "null for NA": lambda table: table.set_column(5, "note", pa.array([None, "a", None])),
    "two row groups": lambda table: pa.concat_tables([table.slice(0, 1), table.slice(1)]),
    "a saved index": lambda table: table.append_column("__index_level_0__", pa.array([4, 5, 6])),
}


@pytest.mark.parametrize("how", OTHER_TYPES)
def test_the_types_of_columns_do_not_matter(tmp_path, how):
    """A table in a file, and the same in memory."""
    first = digest(tmp_path / "a.csv", KINDS, b"")
    table = OTHER_TYPES[how](pa.csv.read_csv(tmp_path / "a.csv"))
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    assert records_digest(str(tmp_path / "a.parquet")) == first
    assert frame_digest(table) == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2020-01-01,", "2020-01-03,"),
        ("10:30:00.25", "10:30:00.26"),
        ("10:31", "10:32"),
        ("false", "true"),
        ("007", "008"),
        ("E10", "E11"),
    ],
)
def test_what_columns_of_other_types_say_matters(tmp_path, old, new):
    assert digest(tmp_path / "a.csv", KINDS) != digest(tmp_path / "a.csv", KINDS.replace(old, new))


def test_a_workbook_counts_as_the_file_that_it_was_made_of(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("openpyxl")
    first = digest(tmp_path / "a.csv", KINDS)
    for number, dates in enumerate(([], ["when", "at"])):
        frame = pandas.read_csv(tmp_path / "a.csv", parse_dates=dates, date_format="ISO8601")
        frame.to_excel(tmp_path / f"{number}.xlsx", index=False)
        frame.to_parquet(tmp_path / f"{number}.parquet")
        assert records_digest(str(tmp_path / f"{number}.parquet"), KEY) == first
        assert records_digest(str(tmp_path / f"{number}.xlsx"), KEY) == first


def test_arrays_without_names_count_by_their_numbers_and_labels():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 2, 20)
    first = arrays_digest(x, y)
    same = [(x.astype(float), y), (x[:, ::-1], y), (x, y.astype(str)), (x, y.astype(float)), (x, y.astype(bool))]
    assert {arrays_digest(*each) for each in same} == {first}
    other = [(x + 1, y), (x, 1 - y), (x[:-1], y[:-1]), (x[:, :2], y), (x[::-1], y), (x, np.where(y, "b", "a"))]
    assert len({first, *(arrays_digest(*each) for each in other)}) == 1 + len(other)


def test_names_that_are_there_twice_count_in_a_frame():
    twice = [pa.Table.from_arrays([pa.array([1, k]), pa.array([2, 3])], names=["a", "a"]) for k in (1, 2)]
    assert frame_digest(twice[0]) != frame_digest(twice[1])


def test_arrays_count_by_their_numbers(tmp_path):
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 1, 0])
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "b.npz", y=y.astype(np.int8), x=x.astype(np.float64))
    np.savez(tmp_path / "c.npz", x=x.T, y=y)
    a, b, c = (records_digest(str(tmp_path / name), KEY) for name in ("a.npz", "b.npz", "c.npz"))
    assert a == b != c


def test_large_integers_and_keys_count(tmp_path):
    assert digest(tmp_path / "a.csv", f"id\n{2**53}\n") != digest(tmp_path / "b.csv", f"id\n{2**53 + 1}\n")
    texts = pa.table({"id": pa.array([str(2**53 + 1), "0"])})
    assert frame_digest(texts) == frame_digest(pa.table({"id": [2**53 + 1, 0]}))
    assert frame_digest(texts) != frame_digest(pa.table({"id": [2**53, 0]}))
    assert frame_digest(pa.table({"id": ["1e300", "2"]})) == frame_digest(pa.table({"id": [1e300, 2.0]}))
    assert digest(tmp_path / "a.csv", TABLE) != digest(tmp_path / "a.csv", TABLE, b"another key")
    assert records_digest("digits", KEY) != records_digest("mnist", KEY)


def test_a_file_that_is_no_table_counts_by_its_bytes(tmp_path):
    assert digest(tmp_path / "a.npz", b"no arrays") != digest(tmp_path / "a.npz", b"nor here")


CYRILLIC, POLISH = "возраст,город\n50,Москва\n61,Ярославль…\n", "wiek,miasto\n50,Łódź\n61,Kraków\n"


@pytest.mark.parametrize(
    ("table", "encoding"),
    [*((CYRILLIC, name) for name in ("cp1251", "koi8-r", "iso8859-5")), (POLISH, "cp1250"), (POLISH, "iso8859-2")],
)
def test_a_file_and_its_copy_in_utf_8_are_the_same(tmp_path, table, encoding):
    """Three certified runs passed the limit of a ledger: one as cp1251, one as KOI8-R, one as UTF-8."""
    table = table if encoding == "cp1251" else table.replace("…", "")
    first = digest(tmp_path / "a.csv", table, b"")
    assert digest(tmp_path / "b.csv", table.encode(encoding), b"") == first
    assert digest(tmp_path / "c.csv", unicodedata.normalize("NFD", table), b"") == first
    assert frame_digest(pa.csv.read_csv(tmp_path / "a.csv")) == first
    assert digest(tmp_path / "b.csv", table.replace("61", "62").encode(encoding), b"") != first
    assert digest(tmp_path / "b.csv", table.replace("о", "оо").replace("ó", "óó").encode(encoding), b"") != first


def test_with_a_dialect_every_letter_counts(tmp_path):
    """A site, whose schema says how its file is written, keeps a run to the records that it began with."""
    (tmp_path / "a.csv").write_text(POLISH, encoding="cp1250")
    (tmp_path / "b.csv").write_text(POLISH.replace("ó", "ö"), encoding="cp1250")
    first, other = (
        records_digest(str(tmp_path / name), KEY, Dialect(encoding="cp1250")) for name in ("a.csv", "b.csv")
    )
    assert first != other


EUROPEAN = "age;crp;town;label\n50;3,5;Köln;no\n61;-,25;Bonn;yes\n70;1,0e1;„Öd“;no\n"


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_a_file_with_commas_and_its_copy_are_the_same_whatever_a_schema_says(tmp_path, encoding):
    """A ledger asks without a dialect: with that of a schema, each way to read one file would be an account."""
    columns = {"age": [50, 61, 70], "crp": [3.5, -0.25, 10.0], "town": ["Köln", "Bonn", "„Öd“"]}
    copy = pa.table({**columns, "label": ["no", "yes", "no"]})
    assert digest(tmp_path / "a.csv", EUROPEAN.encode(encoding), b"") == frame_digest(copy)
    assert digest(tmp_path / "b.csv", EUROPEAN.replace("3,5", "3,6").encode(encoding), b"") != frame_digest(copy)
