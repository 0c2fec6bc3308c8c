"""Causal language models with low-rank adapters: one record is one sequence of tokens, and its loss is clipped as one.

A row holds token ids as exact float32 numbers, padded at the end. A token of a prompt is stored as -1 - id: the model
reads it, and it is not learned. The loss of a sequence is the mean of -log p over its own next tokens. `TorchModel`
clips cross entropies of classes, so the module returns two scores per sequence whose cross entropy with class 0 is
exactly that loss: softmax of the scores is (exp(-loss), 1 - exp(-loss)). All labels are 0, every bound of `TorchModel`
holds as it is, and one sequence moves a clipped sum by at most the clip. The loss of a sequence without a token that
counts is constant, so that it adds zero.

Perplexity and generation read the trained parameters only, so they cost no privacy beyond the records they read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from sordino.errors import SordinoError
from sordino.models.lora import adapt, module_of
from sordino.models.torch_model import TorchModel
from sordino.models.transformers import library, loaded

LEAST_LOSS = 1e-6  # nats per token; below it the second score would be minus infinity
MOST_TOKENS = 4096  # that one call generates


class SpecialTokens(NamedTuple):
    """What a model's configuration says of its tokens.

    Attributes:
      pad: the id that fills a row after its text.
      end: the id that ends a text.
      stops: the ids after which nothing more is generated.
      vocabulary: ids are below it.
    """

    pad: int
    end: int
    stops: frozenset[int]
    vocabulary: int


class Sequences(nn.Module):
    """Two scores per sequence, whose cross entropy with class 0 is the loss of the sequence.

    Args:
      network: a causal language model of `transformers`.
      pad: the id of the padding at the end of a row.
      ends: the padding is the end of a text too, so that its first token is learned.
      after: only tokens after the first of this id count, as for answers after a question; None counts all.
      vocabulary: what is no id below it counts as padding, because the network would refuse it with all other rows.
    """

    def __init__(
        self, network: nn.Module, pad: int, ends: bool, after: int | None = None, vocabulary: float = math.inf
    ) -> None:
        super().__init__()
        self.network, self.pad, self.ends, self.after, self.vocabulary = network, pad, ends, after, vocabulary

    def forward(self, x: Tensor, tokens: bool = False) -> Tensor:
        """Scores (n, 2) of rows; or logits (n, length, vocabulary) of the tokens after each position."""
        rows = torch.where((x >= -self.vocabulary) & (x < self.vocabulary), x, self.pad).long()
        logits: Tensor = self.network(input_ids=_ids(rows), use_cache=False).logits
        if tokens:
            return logits
        loss = self.losses(logits, rows).clamp(min=LEAST_LOSS)
        return torch.stack([torch.zeros_like(loss), loss + torch.log(-torch.expm1(-loss))], -1)

    def losses(self, logits: Tensor, rows: Tensor) -> Tensor:
        """The mean of -log p over the tokens of each sequence that count; 0 where none does."""
        counted = self.counted(rows).to(torch.promote_types(logits.dtype, torch.float32))
        each = cross_entropy(logits[:, :-1].mT.to(counted.dtype), _ids(rows)[:, 1:], reduction="none")
        return (each * counted).sum(1) / counted.sum(1).clamp(min=1)

    def counted(self, rows: Tensor) -> Tensor:
        """Which tokens after the first count: those before the padding, its first one if it ends the text, and none of
        a prompt."""
        ended = (rows[:, 1:] == self.pad).cumsum(1)
        fine = (rows[:, 1:] >= 0) & (ended <= 1 if self.ends else ended == 0)
        return fine if self.after is None else fine & ((rows[:, :-1] == self.after).cumsum(1) > 0)


def _ids(rows: Tensor) -> Tensor:
    """Token ids of rows; those of prompts are stored as -1 - id."""
    return torch.where(rows < 0, -1 - rows, rows)


def special_tokens(weights: str | Path) -> SpecialTokens:
    """The special tokens of the model in a folder, from its configuration.

    Args:
      weights: a folder that `save_pretrained` wrote.

    Returns:
      Its special tokens.

    Raises:
      SordinoError: the folder has no configuration, or it names neither padding nor an end.
    """
    if not Path(weights).expanduser().is_dir():
        raise SordinoError(f"weights: '{weights}' is not a folder; name one that save_pretrained wrote.")
    try:
        about = library().AutoConfig.from_pretrained(
            Path(weights).expanduser(), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().split("\n")[0]
        raise SordinoError(f"weights: '{weights}' holds no configuration of a model ({first}).") from error
    return _special_tokens(about, weights)


def _special_tokens(about: Any, weights: str | Path) -> SpecialTokens:
    ends = about.eos_token_id if isinstance(about.eos_token_id, list) else [about.eos_token_id]
    known = [int(token) for token in (about.pad_token_id, *ends) if token is not None]
    if not known:
        raise SordinoError(
            f"weights: the configuration of '{weights}' has neither pad_token_id nor eos_token_id; set one."
        )
    end = known[0] if ends[0] is None else int(ends[0])
    pad = end if about.pad_token_id is None else int(about.pad_token_id)
    return SpecialTokens(pad, end, frozenset(known), int(about.vocab_size))


def _positions(about: Any) -> int | None:
    """The longest sequence that a model reads; None for one that has no table of positions, such as BLOOM."""
    most = getattr(about, "max_position_embeddings", None) or getattr(about, "max_seq_len", None)
    return None if most is None else int(most)


def _reads_backwards(network: nn.Module) -> bool:
    """Whether what a model says at a token follows from that token and earlier ones alone."""
    ids = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]], device=next(network.parameters()).device)
    with torch.no_grad():
        one, other = network.eval()(input_ids=ids).logits[:, :-1]
    return torch.allclose(one, other, 1e-3, 1e-3 * float(one.abs().max()))


def build(
    weights: str | Path,
    *,
    length: int,
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.1,
    variant: str = "lora",
    targets: Sequence[str] | None = None,
    after: int | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    chunk: int | None = None,
    check: bool = False,
) -> TorchModel:
    """A causal language model from local weights, with adapters on its attention. Everything else is frozen.

    Args:
      weights: a folder that `save_pretrained` wrote, for example of GPT-2. Nothing is downloaded.
      length: tokens per row.
      rank: of the adapters.
      alpha: the adapters are scaled by alpha / rank.
      dropout: of the adapters' inputs.
      variant: which factors of the adapters are trained; see `lora.adapt`.
      targets: layers to adapt; see `lora.adapt`.
      after: count only tokens after the first of this id, as for answers after a question.
      seed: of the adapters.
      autocast: bfloat16 or float16.
      chunk: sequences per pass; see `TorchModel`.
      check: compare gradients with those of single sequences once, in float64; for a large model this takes minutes.

    Returns:
      The model. Its labels are 0 for every sequence.

    Raises:
      SordinoError: the folder holds no causal language model, or an argument is out of its range.

    Example:
      >>> from sordino.models import causal
      >>> model = causal.build("gpt2", length=64)  # doctest: +SKIP
    """
    network = loaded(library().AutoModelForCausalLM, weights, whole=True)
    about: Any = network.config
    if not _reads_backwards(network):
        raise SordinoError(
            f"weights: the {type(network).__name__} in '{weights}' reads the tokens that it is to predict, as encoders "
            "do; name the folder of a causal language model, such as GPT-2."
        )
    special = _special_tokens(about, weights)
    most = _positions(about)
    if length < 2 or (most is not None and length > most):
        upper = "be at least 2" if most is None else f"lie between 2 and {most}, the positions"
        raise SordinoError(f"length: {length} must {upper}.")
    how: dict[str, Any] = {"rank": rank, "alpha": alpha, "dropout": dropout, "variant": variant}
    adapt(network, targets=targets, head=[], seed=seed, **how)
    module = Sequences(network, special.pad, special.pad == special.end, after, special.vocabulary)
    return TorchModel(module, shape=(length,), autocast=autocast, chunk=chunk, classes=2, check=check)


def losses(model: TorchModel, theta: Tensor, rows: Tensor | np.ndarray) -> Tensor:
    """The loss of each sequence in nats per token, in evaluation mode.

    Args:
      model: what `build` returned.
      theta: the trained parameters.
      rows: token ids, sequences by `length`.

    Returns:
      One number per sequence, with leading axes where theta has them.
    """
    z = model.logits(theta, rows).double()
    return z.logsumexp(-1) - z[..., 0]


def perplexity(model: TorchModel, theta: Tensor, rows: Tensor | np.ndarray) -> float:
    """exp of the mean loss per token over all sequences, each token counted once.

    Args:
      model: what `build` returned.
      theta: the trained parameters.
      rows: token ids, sequences by `length`. They lie outside the guarantee, as test records do.

    Returns:
      The perplexity.

    Raises:
      SordinoError: no token counts.
    """
    counts = counted_tokens(model, rows)
    if not counts.sum() > 0:
        raise SordinoError("rows: no token counts; give texts of at least two tokens.")
    each = losses(model, theta, torch.as_tensor(rows).to(theta)).cpu()
    return math.exp(float((each * counts).sum() / counts.sum()))


def counted_tokens(model: TorchModel, rows: Tensor | np.ndarray) -> Tensor:
    """How many tokens of each sequence count in its loss.

    Args:
      model: what `build` returned.
      rows: token ids, sequences by `length`.

    Returns:
      One number per sequence, in float64 on the CPU.
    """
    return _sequences(model).counted(torch.as_tensor(rows).long()).sum(1).double().cpu()


def is_causal(model: Any) -> bool:
    """Whether `build` made the model, so that its records are sequences without labels."""
    return isinstance(model, TorchModel) and isinstance(model.module, Sequences)


def generate(
    model: TorchModel,
    theta: Tensor,
    tokens: Sequence[int],
    *,
    most: int = 20,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Continue a sequence of tokens, one token at a time, until padding or the end of a text.

    Args:
      model: what `build` returned.
      theta: the trained parameters.
      tokens: the ids of the beginning, at least one.
      most: new tokens at most.
      temperature: 0 takes the most probable token; above 0 tokens are drawn from softmax(logits / temperature).
      seed: of the draws.

    Returns:
      The ids of the new tokens.

    Raises:
      SordinoError: an argument is out of its range.
    """
    if not len(tokens) or not 1 <= most <= MOST_TOKENS or not 0 <= temperature < math.inf:
        raise SordinoError(
            f"tokens {len(tokens)}, most {most}, temperature {temperature:g}: they must be at least 1, between 1 and "
            f"{MOST_TOKENS}, and at least 0."
        )
    module = module_of(model)
    params = model.split(theta.to(next(module.parameters()).dtype))  # sums of integers leave parameters in float64
    about: Any = _sequences(model).network.config
    stops = _special_tokens(about, "the model").stops
    generator, ids = torch.Generator().manual_seed(seed), list(map(int, tokens))
    module.eval()
    for _ in range(most):
        row = torch.tensor([ids[-(_positions(about) or len(ids)) :]], device=theta.device)
        with torch.no_grad():
            z = functional_call(module, params, (row,), {"tokens": True})[0, -1].float().cpu()
        drawn = torch.multinomial((z / temperature).softmax(-1), 1, generator=generator) if temperature else z.argmax()
        if int(drawn) in stops:
            break
        ids.append(int(drawn))
    return ids[len(tokens) :]


def _sequences(model: TorchModel) -> Sequences:
    module = module_of(model)
    if not isinstance(module, Sequences):
        raise SordinoError("model: it is not a causal language model; use causal.build.")
    return module
