"""Blocks of theta: parameters that share one number, such as the mean of their second moments.

A transformer (partition of DP-FedAdamW) has, for every layer, one block per head of Q, of K and of V, one for the
output projection of the attention, and one for the whole MLP. The embedding and the output have one block each. Biases
belong to the block of their rows. Norms, tables of relative positions and patch merging belong to the nearest block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence

from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

LAYER = re.compile(r"(.*?)\.(?:self_)?att\w*\.")  # a layer is what owns an attention
SPLIT = re.compile(r"\b((?:query|key|value)(?:_proj)?|[qkv]_proj|[qkv]_lin|(?<=\battn\.)[qkv])\b")
FUSED = re.compile(r"\b(qkv|in_proj|Wqkv)")
ATTENTION = re.compile(
    r"(?:self_)?att|\w*(?:before|norm_?1|ln_?1)\b"
)  # the norm of an attention comes before it or inside it


def count(blocks: Tensor | None) -> int:
    """The number of blocks; None means one block."""
    return 1 if blocks is None else int(blocks.max()) + 1


def block_means(v: Tensor, blocks: Tensor | None) -> Tensor:
    """The mean of v over every block, on the last axis. Sums are float64, because blocks have millions of entries."""
    if blocks is None:
        return v.mean(-1, keepdim=True)
    blocks = blocks.to(v.device)
    sums = v.new_zeros((*v.shape[:-1], count(blocks)), dtype=torch.float64).index_add_(-1, blocks, v.double())
    return (sums / torch.bincount(blocks)).to(v)


def expand(means: Tensor, blocks: Tensor | None) -> Tensor:
    """The value of its block for every entry of theta; a single block needs no copies."""
    return means if blocks is None else means.index_select(-1, blocks.to(means.device))


def transformer_blocks(parameters: Sequence[tuple[str, Sequence[int]]], heads: int | Sequence[int]) -> Tensor:
    """The block of every entry of theta.

    Heads are rows of the weights of Q, K and V, which may be fused into one matrix of three times the rows. For
    low-rank factors, B has the rows of its matrix, and all A of a layer form one block.

    Args:
      parameters: name and shape of every parameter, in the order of theta.
      heads: of each layer, or one number for all layers.

    Returns:
      One block number per entry.

    Raises:
      SordinoError: no attention is found by name, or the heads do not fit.
    """
    with_heads = [name for name, _ in parameters if SPLIT.search(name) or FUSED.search(name)]
    names = list(dict.fromkeys(owner[1] for name in with_heads if (owner := LAYER.match(name))))
    if not names:
        raise SordinoError("parameters: no name looks like an attention; without one, use one block per tensor.")
    of_layer = [heads] * len(names) if isinstance(heads, int) else list(heads)
    if len(of_layer) != len(names):
        raise SordinoError(
            f"heads: {len(of_layer)} numbers for {len(names)} layers; give one number, or one per layer."
        )
    at = [next((n for n, owner in enumerate(names) if name.startswith(f"{owner}.")), -1) for name, _ in parameters]
    first, last = at.index(0), len(at) - 1 - at[::-1].index(max(at))
    numbers: dict[Hashable, int] = {}
    parts, layer = [], 0
    for k, (name, shape) in enumerate(parameters):
        layer = max(layer, at[k])
        if at[k] < 0:
            keys: list[Hashable] = ["embedding" if k < first else "output" if k > last else (layer, "mlp")]
        else:
            rest = name.removeprefix(f"{names[at[k]]}.")
            keys = _keys(at[k], rest, shape[0] if shape else 1, of_layer[at[k]])
        rows = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
        parts.append(rows.repeat_interleave(math.prod(shape) // len(keys)))
    return torch.cat(parts)


def _keys(layer: int, rest: str, rows: int, heads: int) -> list[Hashable]:
    """The keys of the blocks of a layer's tensor; each block has an equal part of the rows."""
    split, fused = SPLIT.search(rest), FUSED.search(rest)
    if "lora_A" in rest:
        return [(layer, "A")]
    if not (split or fused):
        return [(layer, "attention" if ATTENTION.match(rest) else "mlp")]
    kinds = split[1][0] if split else "qkv"
    if heads < 1 or rows % (heads * len(kinds)):
        raise SordinoError(
            f"heads: {heads} do not divide the {rows} rows of {rest} in layer {layer}; give one number per layer."
        )
    return [(layer, kind, head) for kind in kinds for head in range(heads)]
