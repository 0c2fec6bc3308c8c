"""What single encoders of `transformers` need, so that every record is computed and differentiated on its own.

Most encoders read an additive mask of four axes (`additive`). Two kinds read padding in another way:

- DeBERTa reads which tokens are there (`wants_tokens`). The attention of v2 and v3 also projects a table of relative
  positions, by the matrices of Q and K (`share_att_key`), once for all records. The gradient of an adapter would then
  be that of all records together. `prepare` lets each record project a table of its own: `RecordwiseAttention`. The
  numbers are the same.
- ModernBERT has two masks, because some layers read a window of neighbours alone. `prepare` makes both, without the
  library's question whether any token is masked: that would be a branch that depends on all records.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import SordinoError
from sordino.models.lora import GroupedLinear, LoRALinear

TOKEN_MASKS = ("DebertaForSequence", "DebertaV2ForSequence", "ModernBertForSequence")  # begin the names of classes


def additive(mask: Tensor, kind: torch.dtype) -> Tensor:
    """The additive mask of the attention's scores, (n, 1, 1, length).

    `transformers` uses a mask of four axes as it is. For a mask of two axes it checks whether any token is masked, and
    the CPU has to wait for the accelerator.
    """
    return _scores(mask[:, None, None], kind)


def _scores(reads: Tensor, kind: torch.dtype) -> Tensor:
    """0 where a position reads another one, and the lowest number elsewhere, in the type of autocast."""
    where = reads.device.type
    kind = torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) else kind
    return torch.zeros_like(reads, dtype=kind).masked_fill_(~reads, torch.finfo(kind).min)


def wants_tokens(network: nn.Module) -> bool:
    """Whether a classifier reads which tokens are there, (n, length), rather than an additive mask."""
    return type(network).__name__.startswith(TOKEN_MASKS)


def prepare(network: nn.Module, autocast: torch.dtype | None = None) -> None:
    """Let a classifier of sequences compute each record on its own, in place. Other encoders stay as they are.

    Args:
      network: the classifier, before or after `lora.adapt`. Names and order of its parameters stay the same.
      autocast: the type of the forward and backward passes.

    Raises:
      SordinoError: the installed `transformers` computes ModernBERT in another way, or an attention does not compute in
        half precision.
    """
    if autocast is not None and type(network).__name__.startswith("DebertaForSequence"):
        raise SordinoError(
            f"dtype: the attention of {type(network).__name__} (DisentangledSelfAttention) fails in "
            f"{str(autocast).removeprefix('torch.')}, because it masks scores by a number of float32; use float32, or "
            "a folder of DeBERTa-v2 or v3."
        )
    for part in list(network.modules()):
        if type(part).__name__ == "DisentangledSelfAttention" and hasattr(part, "share_att_key"):
            part.__class__ = _recordwise(type(part))
    if type(network).__name__.startswith("ModernBertForSequence"):
        model: Any = network.get_submodule("model")
        half = getattr(model.config, "sliding_window", None)
        if half is None or not hasattr(model.config, "layer_types"):
            raise SordinoError(
                "weights: this version of transformers makes the masks of ModernBERT's layers from all records "
                "together; update transformers to 5.0 or later, or use BERT, DeBERTa or MPNet."
            )
        model.register_forward_pre_hook(partial(_both_masks, half=int(half)), with_kwargs=True)


# ------------------------------------------------------------------------------------------------------- ModernBERT


def _both_masks(
    model: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], *, half: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Masks of both kinds of layers, where the mask is one of numbers (n, length), as `transformers.Rows` makes it.

    The other kinds, such as whole numbers, are left to the library.
    """
    mask = keywords.get("attention_mask")
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return None
    places, there = torch.arange(mask.shape[1], device=mask.device), mask[:, None, None] > 0
    near = (places[:, None] - places).abs() <= half
    both = {"full_attention": _scores(there, mask.dtype), "sliding_attention": _scores(there & near, mask.dtype)}
    return args, keywords | {"attention_mask": both}


# ----------------------------------------------------------------------------------------------------- DeBERTa-v2, v3

_RECORDWISE: dict[type[nn.Module], type[nn.Module]] = {}


def _recordwise(attention: type[nn.Module]) -> type[nn.Module]:
    """The attention of `transformers`, with `RecordwiseAttention` before it."""
    if attention not in _RECORDWISE:
        _RECORDWISE[attention] = type(f"Recordwise{attention.__name__}", (RecordwiseAttention, attention), {})
    return _RECORDWISE[attention]


class RecordwiseAttention:
    """The part of DeBERTa's attention that depends on positions, with a table of positions per record.

    With p = the table's row for the distance from i to j, the score of i and j gains q_i . K(p) and k_j . Q(p), each
    divided by the root of width times terms. K and Q are the attention's own matrices (`share_att_key`), or others.
    """

    num_attention_heads: int
    pos_ebd_size: int
    pos_att_type: list[str]
    share_att_key: bool

    def disentangled_attention_bias(
        self, query_layer: Tensor, key_layer: Tensor, relative_pos: Tensor, rel_embeddings: Tensor, scale_factor: int
    ) -> Tensor | int:
        """Scores of positions: (records x heads, length, length); 0 if there are none."""
        span, length = self.pos_ebd_size, query_layer.shape[-2]
        records = len(query_layer) // self.num_attention_heads
        distances = relative_pos.to(query_layer.device, torch.long).reshape(-1, length, length)
        table = rel_embeddings[: 2 * span].unsqueeze(0)
        root = (query_layer.shape[-1] * scale_factor) ** 0.5
        score: Tensor | int = 0
        if "c2p" in self.pos_att_type:
            keys = self._projected("key_proj", table, records)
            each = query_layer @ keys.transpose(-1, -2)
            places = (distances + span).clamp(0, 2 * span - 1).expand(len(each), -1, -1)
            score = score + each.gather(-1, places) / root
        if "p2c" in self.pos_att_type:
            queries = self._projected("query_proj", table, records)
            each = key_layer @ queries.transpose(-1, -2)
            places = (span - distances).clamp(0, 2 * span - 1).expand(len(each), -1, -1)
            score = score + each.gather(-1, places).transpose(-1, -2) / root
        return score

    def _projected(self, name: str, table: Tensor, records: int) -> Tensor:
        """The table through a matrix: (records x heads, rows, width). A frozen matrix is read once for all records."""
        layer = getattr(self, name if self.share_att_key else f"pos_{name}")
        if isinstance(layer, LoRALinear | GroupedLinear):
            out = layer(table.expand(records, -1, -1))
        else:
            out = layer(table).expand(records, -1, -1)
        split: Tensor = out.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
        return split.flatten(0, 1)
