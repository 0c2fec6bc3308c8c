"""`nn.MultiheadAttention` by linear layers, so that its matrices have the rule of a linear layer.

PyTorch's layer reads its matrices by a function, which tells nothing of single examples. `torch.func` serves it, more
slowly, and not in half precision. `by_linear_layers` replaces such layers by a subclass that computes the same from the
same parameters under the same names: the matrix of Q, K and V is one linear layer, and the projection of the outputs
another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.errors import SordinoError
from sordino.models.recurrent import tied


class AttentionByLayers(nn.MultiheadAttention):
    """`nn.MultiheadAttention` that reads its own parameters through `projection` and `out_proj`."""

    by_parts = True
    projection: nn.ModuleList

    def forward(  # the order of PyTorch's own arguments
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs, and the weights of the attention where they are needed: see `nn.MultiheadAttention`."""
        if any(part.dim() != 3 for part in (query, key, value)):
            raise SordinoError(
                "module: nn.MultiheadAttention must read an axis of records, one of positions and one of numbers; keep "
                "the axis of records."
            )
        if is_causal and attn_mask is None:
            raise SordinoError("module: nn.MultiheadAttention with is_causal=True needs attn_mask; pass the mask too.")
        q, k, v = self._projected(query, key, value)
        if self.add_zero_attn:
            k, v = (functional.pad(part, (0, 0, 0, 1)) for part in (k, v))
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        rate = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = functional.dropout(weights, rate) if rate else weights
            out = weights @ v.to(weights.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = functional.scaled_dot_product_attention(q, k, v, mask, rate)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Q, K and V: (records, heads, positions, width). What is read twice is projected once."""
        thirds: list[Tensor] = []
        known: list[tuple[Tensor, Tensor]] = []
        for place, source in enumerate((query, key, value)):
            out = next((out for given, out in known if given is source), None)
            if out is None:
                out = self.projection[0](source if self.batch_first else source.transpose(0, 1))
                known.append((source, out))
            third = out[..., place * self.embed_dim : (place + 1) * self.embed_dim]
            thirds.append(third.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2))
        return thirds

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """What is added to the scores, (records or 1, heads or 1, queries, keys): minus infinity hides a key."""
        parts = []
        if mask is not None:
            if mask.dim() == 3:
                mask = mask.reshape(len(q), self.num_heads, *mask.shape[1:])
            parts.append(_added(mask, q))
        if padding is not None:
            parts.append(_added(padding[:, None, None], q))
        if self.add_zero_attn:  # the key of zeros is never hidden
            parts = [functional.pad(part, (0, 1)) for part in parts]
        total: Tensor | None = None
        for part in parts:
            total = part if total is None else total + part
        return total if total is None else total.expand(*total.shape[:-2], q.shape[-2], k.shape[-2])


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers; a mask of truths is true where a key is hidden."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
    return mask.to(like.dtype)


def by_linear_layers(module: nn.Module) -> None:
    """Let the attentions of PyTorch with trained parameters run by linear layers, in place.

    Frozen ones stay as they are, and so do those with keys and values of another width (`kdim`, `vdim`), with
    `add_bias_kv`, or whose projection of the outputs is a layer of another class, such as one with weight norm.

    An encoder of PyTorch computes every position in evaluation too, as in training: nested tensors would leave out
    those that are hidden, and the number of those depends on data.

    Args:
      module: the network. Names and order of its parameters stay the same.
    """
    for part in list(module.modules()):
        if isinstance(part, nn.TransformerEncoder):
            part.enable_nested_tensor = part.use_nested_tensor = False
        if type(part) is not nn.MultiheadAttention or part.in_proj_weight is None or part.bias_k is not None:
            continue
        if type(part.out_proj) not in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue
        if any(p.requires_grad for p in part.parameters()):
            weight, bias = part.in_proj_weight, part.in_proj_bias
            attention: Any = part
            attention.__class__ = AttentionByLayers
            attention.out_proj.__class__ = nn.Linear  # its own class differs from this one in name alone
            attention.projection = nn.ModuleList([tied(weight, bias)])
