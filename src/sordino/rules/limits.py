"""Two ways to keep g + b within a ball, of which one is private."""

from __future__ import annotations

import math

from sordino.core import SAFETY
from sordino.lazy import Tensor, torch


def projected(g: Tensor, b: Tensor, limit: float) -> Tensor:
    """g + b, projected on the ball of radius `limit`."""
    v, most = g + b, limit * (1 - SAFETY)
    if not math.isfinite(limit):
        return v
    norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=torch.float64)  # float32 falls short over long v
    short: Tensor = v.double() * torch.div(most, norm.clamp_min(most))
    return short.to(v.dtype)


def rescaled(g: Tensor, b: Tensor, limit: float) -> Tensor:
    """g + xi b of norm `limit` where g + b is longer: as printed in the paper, and not private."""
    size = torch.linalg.vector_norm(b, dim=-1, keepdim=True).clamp_min(1e-30)
    along = (g * b).sum(-1, keepdim=True) / size
    root = (along.square() + limit**2 - g.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
    longer = torch.linalg.vector_norm(g + b, dim=-1, keepdim=True) > limit
    return g + torch.where(longer, (root - along) / size, 1.0) * b


LIMITS = {"projection": projected, "paper-xi": rescaled}
