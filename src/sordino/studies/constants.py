"""Constants of convergence theorems, measured on data: eigenvalues of Hessians, and a preconditioner's on a path.

Nothing here is private: these are figures for a study whose data are public, and they are never released by a method.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sordino.core import Shard
from sordino.data.records import Records
from sordino.errors import SordinoError
from sordino.models.linear import Linear
from sordino.rules.structures import rank_one
from sordino.studies import theory

LANCZOS_STEPS = 16
BATCH_NUMBERS = 2**24  # of the records of a batch of clients, which bounds memory

# ------------------------------------------------------------------------------------------------------- eigenvalues


def largest_eigenvalues(times: Callable[[Tensor], Tensor], start: Tensor, steps: int = LANCZOS_STEPS) -> Tensor:
    """The largest eigenvalue of each symmetric matrix of a batch, by Lanczos with full reorthogonalisation.

    Args:
        times: The products of the matrices with one vector each: batch x size in, batch x size out.
        start: The first vectors, batch x size.
        steps: Products per matrix, at most its size.

    Returns:
        One number per matrix, never above the true eigenvalue except for rounding.

    Raises:
        SordinoError: A first vector is zero.
    """
    length = start.norm(dim=-1, keepdim=True)
    if not (length > 0).all():
        raise SordinoError("start: a vector is zero; give random ones.")
    basis = [start / length]
    rows = min(steps, start.shape[-1])
    tridiagonal = start.new_zeros(len(start), rows, rows)
    for k in range(rows):
        v = times(basis[k])
        tridiagonal[:, k, k] = (v * basis[k]).sum(-1)
        if k + 1 == rows:
            break
        for _ in range(2):  # once is not enough where vectors nearly cancel
            for known in basis:
                v = v - (v * known).sum(-1, keepdim=True) * known
        size = v.norm(dim=-1, keepdim=True)
        ended = size <= 1e-10 * tridiagonal[:, 0, 0].abs().unsqueeze(-1) + 1e-300  # an invariant space was found
        tridiagonal[:, k, k + 1] = tridiagonal[:, k + 1, k] = torch.where(ended, 0.0, size)[:, 0]
        basis.append(torch.where(ended, 0.0, v / size.clamp_min(1e-300)))
    largest: Tensor = torch.linalg.eigvalsh(tridiagonal)[:, -1]
    return largest


def client_eigenvalues(
    model: Linear, theta: Tensor, records: Records, clip: float = math.inf, steps: int = LANCZOS_STEPS
) -> Tensor:
    """The largest eigenvalue of each client's mean Hessian at theta, each record's clipped to Frobenius norm `clip`."""
    found = torch.zeros(len(records.sizes), dtype=torch.float64)
    by_size: dict[int, list[int]] = {}
    for client, size in enumerate(records.sizes):
        by_size.setdefault(int(size), []).append(client)
    generator = torch.Generator().manual_seed(0)
    for size, clients in by_size.items():
        most = max(1, BATCH_NUMBERS // (size * model.size))
        for first in range(0, len(clients), most):
            part = clients[first : first + most]
            shards = [records.shard(client) for client in part]
            x, y = torch.stack([shard.x for shard in shards]), torch.stack([shard.y for shard in shards])
            stacked = Shard(x, y, torch.stack([shard.mask for shard in shards]))
            times = _times(model, theta.detach().to(stacked.x), stacked, clip, size)
            start = torch.randn(len(part), model.size, generator=generator, dtype=torch.float64)
            found[part] = largest_eigenvalues(times, start.to(stacked.x.device), steps).cpu()
    return found


def _times(model: Linear, theta: Tensor, stacked: Shard, clip: float, size: int) -> Callable[[Tensor], Tensor]:
    each = theta.expand(len(stacked.x), -1)
    return lambda v: model.curvature_times(each, stacked, clip, v).double() / size


# -------------------------------------------------------------------------------------------------- preconditioners


class Path(NamedTuple):
    """Runs of a method, rounds x runs x parameters (gaps: rounds x runs), each round before its step."""

    gradients: Tensor  # of the objective, without clipping
    aggregates: Tensor  # clipped and noised, as the server sees them
    gaps: Tensor  # F(theta) - F*


def path_constants(path: Path, rho: float, beta: float, second: float) -> theory.PathConstants:
    """alpha_H, sigma_H^2 and B_H of DP-FedSOFIM (its paper, section 4.7) on a path, and the constant mu.

    - alpha_H: the least <grad F, H grad F> / |grad F|^2 over rounds and runs;
    - sigma_H^2: the largest over rounds of the mean over runs of |H G|^2, over C^2 + d nu^2;
    - B_H: the largest over rounds of the mean over runs of -<grad F, H (G - grad F)>, at least 0. The paper says that
      B_H "collects the bias and coupling terms" and gives no formula; with this one the one-step descent holds;
    - mu: the least |grad F|^2 / (2 (F - F*)), for the paper's inequality (7) on the path.

    Args:
        path: What happened, H formed from the aggregates.
        rho: Damping of H.
        beta: Decay of M.
        second: C^2 + d nu^2.

    Returns:
        The constants.
    """
    m, alpha = torch.zeros_like(path.aggregates[0]), math.inf
    sigma = plain = coupling = 0.0
    for gradient, aggregate in zip(path.gradients, path.aggregates, strict=True):
        m = beta * m + (1 - beta) * aggregate
        kept = (gradient * rank_one(m, gradient, rho)).sum(-1) / gradient.square().sum(-1)
        alpha = min(alpha, float(kept.min()))
        sigma = max(sigma, float(rank_one(m, aggregate, rho).square().sum(-1).mean()) / second)
        plain = max(plain, float(aggregate.square().sum(-1).mean()) / second)
        coupling = max(coupling, -float((gradient * rank_one(m, aggregate - gradient, rho)).sum(-1).mean()))
    flatness = float((path.gradients.square().sum(-1) / (2 * path.gaps)).min())
    return theory.PathConstants(alpha, sigma, plain, coupling, flatness)
