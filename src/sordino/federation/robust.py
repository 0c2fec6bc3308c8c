"""A mean that a few sites cannot move far: per coordinate, the largest and the smallest values are left out.

It is for messages in the open (untrusted-server). Every message is released with enough noise of its own, so what the
coordinator makes of them costs no privacy, and no certificate changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sordino.core import Tree
from sordino.tree import tree_map


def trimmed_sum(updates: Sequence[Tree], weights: Sequence[float], trim: int) -> Tree:
    """The sum of the weights times the trimmed mean.

    *Bound.* If at most `trim` of the updates are arbitrary, each coordinate lies between the smallest and the largest
    value of the others, times the sum of the weights. For a value above all others can only be kept if more than `trim`
    updates have such values; the same holds below.

    Args:
        updates: of the sites, alike in form.
        weights: of the sites, positive.
        trim: how many values are left out at each end of every coordinate; 2 trim < number of updates.

    Returns:
        The sum of all weights, times the weighted mean of the values that are kept.

    Example:
        >>> honest = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
        >>> trimmed_sum([*honest, torch.tensor([1e9])], [0.25] * 4, 1)
        tensor([2.5000])
    """
    assert 0 <= 2 * trim < len(updates)
    total = float(sum(weights))

    def trimmed(*leaf: Tensor) -> Tensor:
        values, order = torch.stack(leaf).sort(0)
        weight = values.new_tensor(list(weights))[order]
        kept, by = values[trim : len(leaf) - trim], weight[trim : len(leaf) - trim]
        return total * (by * kept).sum(0) / by.sum(0)

    return tree_map(trimmed, *updates)
