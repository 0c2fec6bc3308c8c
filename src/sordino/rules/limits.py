"""Two ways to keep g + b within a ball; only the projection is private."""

from __future__ import annotations

import math

from sordino.core import SAFETY
from sordino.lazy import Tensor, torch


def projected(g: Tensor, b: Tensor, limit: float) -> Tensor:
    """g + b, projected on the ball of radius `limit`."""
    v, most = g + b, limit * (1 - SAFETY)
    if not math.isfinite(limit):
        return v
    norm = torch.linalg.vector_norm(
        v, dim=-1, keepdim=True, dtype=torch.float64
    )  # a float32 norm of a long v is too small
    short: Tensor = v.double() * torch.div(most, norm.clamp_min(most))
    return short.to(v.dtype)


def rescaled(g: Tensor, b: Tensor, limit: float) -> Tensor:
    """g + xi b of norm `limit` if g + b is longer: the formula of the paper, which is not private."""
    size = torch.linalg.vector_norm(b, dim=-1, keepdim=True).clamp_min(1e-30)
    along = (g * b).sum(-1, keepdim=True) / size
    root = (along.square() + limit**2 - g.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
    longer = torch.linalg.vector_norm(g + b, dim=-1, keepdim=True) > limit
    return g + torch.where(longer, (root - along) / size, 1.0) * b


LIMITS = {"projection": projected, "paper-xi": rescaled}
