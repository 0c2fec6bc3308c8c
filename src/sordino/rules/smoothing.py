"""Laplacian smoothing (Liang, Wang, Gu, Osher, Yao 2020): average noise over neighbouring coordinates.

    (I - s L)^-1 u,  L the circulant second difference:  ifft( fft(u)_k / (1 + 2 s - 2 s cos(2 pi k / d)) )

White noise keeps (1 + 2 s) / (1 + 4 s)^(3/2) of its variance. So does a signal whose coordinates have a random order:
smoothing helps only if neighbouring coordinates are similar.
"""

from __future__ import annotations

import math

from sordino.core import Rule, Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.rules.basic import stateless


def smooth(strength: float) -> Rule:
    """Apply (I - strength L)^-1 along the last axis. The sum of the entries does not change.

    Args:
      strength: s, at least 0; 0 changes nothing.

    Returns:
      The rule.

    Raises:
      SordinoError: strength is out of its range.
    """
    if not 0 <= strength < math.inf:
        raise SordinoError(f"strength: {strength} must be at least 0; 0 changes nothing.")

    def update(u: Tensor, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        d = u.shape[-1]
        k = torch.arange(d // 2 + 1, device=u.device, dtype=u.dtype)
        eigenvalue = 1 + 2 * strength - 2 * strength * torch.cos(2 * math.pi * k / d)
        return torch.fft.irfft(torch.fft.rfft(u) / eigenvalue, n=d), state

    return Rule(stateless, update)
