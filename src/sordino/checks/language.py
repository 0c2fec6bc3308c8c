"""A causal language model small enough to attack: three tokens, of which those of a prompt are not learned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sordino.checks.mutants import ClippedSum, careless
from sordino.core import Method, Shard
from sordino.models.causal import Sequences
from sordino.models.torch_model import TorchModel

VOCABULARY, WIDTH, LENGTH = 3, 4, 3
GAIN = 8.0  # of the hidden states, so that gradients are longer than the clip


class Logits(NamedTuple):
    """What a network of language returns."""

    logits: Tensor


class Network(nn.Module):
    """Logits of the token after each position, from the sum of the embeddings up to there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Logits:
        return Logits(self.head(GAIN * self.embed(input_ids).cumsum(1).tanh()))


class Rounded(nn.Module):
    """Sequences whose rows are any numbers: the search moves records by small steps."""

    def __init__(self, sequences: Sequences) -> None:
        super().__init__()
        self.sequences = sequences

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.sequences(tokens(x))
        return scores


def tokens(x: Tensor) -> Tensor:
    """Rows of token ids, those of prompts as -1 - id, from any numbers."""
    return x.nan_to_num().floor().clamp(-VOCABULARY, VOCABULARY - 1)


def small_language() -> TorchModel:
    """A causal language model with a vocabulary of three, whose last token is padding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchModel(Rounded(Sequences(Network(), VOCABULARY - 1, ends=True)), shape=(LENGTH,))


def clips_every_token(method: Method, model: Any) -> tuple[Method, Any]:
    """Every token that counts is a term of its own, with a clip of its own."""

    def total(sums: ClippedSum, shard: Shard, clip: float) -> Tensor:
        rows, places = tokens(shard.x), torch.arange(shard.x.shape[-1], device=shard.x.device)
        read = torch.where(rows < 0, rows, -1 - rows)
        alone = [torch.where(places == place, rows, read) for place in range(1, shard.x.shape[-1])]
        return torch.stack([sums(shard._replace(x=x + 0.5), clip) for x in alone]).sum(0)

    return method, careless(model, total)
