"""Fisher estimates F of several structures, and what each makes of v: (rho I + F)^-1 v.

- rank-one: F = M M^T.
- rank-k: F = mean over the last k M of M M^T (Woodbury's identity).
- block: one M M^T for each column of each parameter, read as a matrix.
- kronecker: F = (M M^T) (x) (M^T M / |M|^2) for each parameter, read as a matrix; damped exactly, in the eigenbasis
  that one thin singular value decomposition gives.

All are built from noised aggregates, so they cost no privacy, and take O(k d) time, where k is the rank or the
number of columns. For a parameter of one column, block and kronecker equal the rank-one estimate; so does rank-k for
k = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sordino.lazy import Tensor, torch

Solve = Callable[[Tensor, Tensor, float | Tensor], Tensor]
STRUCTURES = ("rank-one", "rank-k", "block", "kronecker")


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The scalar product along the last axis, which stays."""
    return (a * b).sum(-1, keepdim=True)


def rank_one(m: Tensor, v: Tensor, rho: float | Tensor) -> Tensor:
    """The rank-one estimate, by the formula of Sherman and Morrison: (v - M (M . v) / (rho + |M|^2)) / rho."""
    return torch.addcmul(v, m, dot(m, v) / (rho + dot(m, m)), value=-1) / rho


def rank_k(past: Tensor, v: Tensor, rho: float | Tensor) -> Tensor:
    """The rank-k estimate. `past` holds k vectors before the last axis; some may be zero."""
    k, r = past.shape[-2], torch.as_tensor(rho, dtype=v.dtype, device=v.device).unsqueeze(-1)
    u = past / math.sqrt(k)
    small = r * torch.eye(k).to(v) + u @ u.transpose(-1, -2)
    inner: Tensor = torch.linalg.solve(small, u @ v.unsqueeze(-1))
    return (v - (u.transpose(-1, -2) @ inner).squeeze(-1)) / rho


def block(m: Tensor, v: Tensor, rho: float | Tensor) -> Tensor:
    """The block estimate, for each column of a matrix."""
    r = torch.as_tensor(rho).to(v).unsqueeze(-1) if isinstance(rho, Tensor) else rho
    across, size = (m * v).sum(-2, keepdim=True), (m * m).sum(-2, keepdim=True)
    return torch.addcmul(v, m, across / (r + size), value=-1) / r


def kronecker(m: Tensor, v: Tensor, rho: float | Tensor) -> Tensor:
    """The Kronecker estimate: with M = U S W^T, F has the eigenvalue s_i^2 s_j^2 / |s|^2 on u_i (x) w_j, else 0."""
    r = torch.as_tensor(rho).to(v).unsqueeze(-1) if isinstance(rho, Tensor) else rho
    u, s, wt = torch.linalg.svd(m, full_matrices=False)
    square = s.square()
    tiny = torch.finfo(v.dtype).tiny
    value = square.unsqueeze(-1) * square.unsqueeze(-2) / square.sum(-1).clamp_min(tiny).unsqueeze(-1).unsqueeze(-1)
    inner = (u.transpose(-1, -2) @ v @ wt.transpose(-1, -2)) * (value / (r + value))
    solved: Tensor = (v - u @ inner @ wt) / r
    return solved


def by_parameter(solve: Solve, shapes: Tensor) -> Solve:
    """Apply `solve` to each parameter of theta, read as a matrix of its shape."""

    def whole(m: Tensor, v: Tensor, rho: float | Tensor) -> Tensor:
        parts, start = [], 0
        for rows, columns in shapes.long().tolist():
            block_of_theta = slice(start, start + rows * columns)
            a, b = (each[..., block_of_theta].reshape(*each.shape[:-1], rows, columns) for each in (m, v))
            parts.append(solve(a, b, rho).flatten(-2))
            start += rows * columns
        return torch.cat(parts, -1)

    return whole


def matrices(shapes: tuple[tuple[int, ...], ...], size: int) -> Tensor:
    """(rows, columns) of each parameter: the last axis gives the columns, and a vector is one column."""
    flat = [(math.prod(s[:-1]), s[-1]) if len(s) > 1 else (math.prod(s), 1) for s in shapes or ((size,),)]
    return torch.tensor(flat, dtype=torch.float64)
