"""The identity of records: what a file says, not how it is written."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from sordino.data.identity import records_digest

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
}
OTHER = {
    "a number": TABLE.replace("61", "62"),
    "a label": TABLE.replace("yes", "no"),
    "a record less": TABLE.replace("70,10,f,no\n", ""),
    "the order of records": "age,dose,sex,label\n61,2.5,m,yes\n50,1,f,no\n70,10,f,no\n",
    "a missing cell": TABLE.replace("61,2.5", "61,"),
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


def test_arrays_count_by_their_numbers(tmp_path):
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 1, 0])
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "b.npz", y=y.astype(np.int8), x=x.astype(np.float64))
    np.savez(tmp_path / "c.npz", x=x.T, y=y)
    a, b, c = (records_digest(str(tmp_path / name), KEY) for name in ("a.npz", "b.npz", "c.npz"))
    assert a == b != c


def test_large_integers_and_keys_count(tmp_path):
    assert digest(tmp_path / "a.csv", f"id\n{2**53}\n") != digest(tmp_path / "b.csv", f"id\n{2**53 + 1}\n")
    assert digest(tmp_path / "a.csv", TABLE) != digest(tmp_path / "a.csv", TABLE, b"another key")
    assert records_digest("digits", KEY) != records_digest("mnist", KEY)


def test_a_file_that_is_no_table_counts_by_its_bytes(tmp_path):
    assert digest(tmp_path / "a.npz", b"no arrays") != digest(tmp_path / "a.npz", b"nor here")
