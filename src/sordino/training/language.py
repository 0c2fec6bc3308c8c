"""Texts for causal language models: rows to learn from, and what a trained model writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from sordino.data import text
from sordino.data.sources import TextColumn
from sordino.errors import SordinoError
from sordino.lazy import Tensor
from sordino.models.registry import NO_WEIGHTS, BuiltModel


def column(name: str, length: int, weights: str | Path | None, prompt: str | None = None) -> TextColumn:
    """The column of a table whose texts are learned, for `sources.load`.

    Args:
      name: of the column.
      length: tokens per row.
      weights: the folder of the model, with its tokenizer.
      prompt: the column of what comes before each text; None where there is none.

    Returns:
      The column with its encoding.

    Raises:
      SordinoError: no folder is named.
    """
    if weights is None:
        raise SordinoError(NO_WEIGHTS)
    return TextColumn(name, partial(rows, length, weights), prompt, labelled=False)


def of_table(
    name: str, length: int, *, causal: bool, weights: str | Path | None, tokenizer: str | Path, prompt: str | None
) -> TextColumn:
    """The column of a table, with its encoding for a model that reads text.

    Args:
      name: of the column.
      length: tokens per row.
      causal: the text itself is learned; else its labels are.
      weights: the folder of the model, which a causal one needs.
      tokenizer: of other models, as for `text.tokenize`.
      prompt: the column of what comes before each text, for causal models; None where there is none.

    Returns:
      The column with its encoding.

    Raises:
      SordinoError: the model is causal, and no folder is named.
    """
    return column(name, length, weights, prompt) if causal else text.column(name, length, tokenizer)


def rows(length: int, weights: str | Path, texts: Sequence[str], prompts: Sequence[str] | None = None) -> np.ndarray:
    """Texts as the model of a folder reads them (`text.sequences`), float32."""
    from sordino.models.causal import special_tokens

    special = special_tokens(weights)
    how = {"pad": special.pad, "end": special.end, "vocabulary": special.vocabulary}
    return text.sequences(texts, length, weights, prompts=prompts, **how).astype(np.float32)


def write(
    model: BuiltModel,
    theta: Tensor,
    weights: str | Path,
    prompts: Sequence[str],
    *,
    most: int = 40,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """What a trained model writes after each prompt. It is post-processing of the model, and reads no record.

    Args:
      model: what `causal.build` returned.
      theta: the trained parameters.
      weights: the folder of the model, with its tokenizer.
      prompts: what comes before, at least one token each. Of a long one the last tokens are read.
      most: new tokens at most.
      temperature: 0 takes the most probable token; above 0 tokens are drawn.
      seed: of the draws; the prompts draw apart.

    Returns:
      One text per prompt.

    Raises:
      SordinoError: a prompt has no token, or an argument is out of its range.
    """
    from sordino.models import causal
    from sordino.models.torch_model import TorchModel

    assert isinstance(model, TorchModel)
    texts = []
    for number, prompt in enumerate(prompts):
        ids = text.encode(prompt, weights)
        new = causal.generate(model, theta, ids, most=most, temperature=temperature, seed=seed + number)
        texts.append(text.decode(new, weights))
    return texts
