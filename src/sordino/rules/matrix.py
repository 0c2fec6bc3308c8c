"""Small linear algebra on noised matrices, batched over leading axes."""

from __future__ import annotations

import math
from collections.abc import Callable

from sordino.lazy import Tensor, torch
from sordino.rules.structures import dot

TINY = 1e-30


def identity_like(matrix: Tensor) -> Tensor:
    """The identity of the same size, type and device."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def floored_inverse(matrix: Tensor, floor: float) -> Tensor:
    """The inverse of the symmetrised matrix after raising eigenvalues to `floor`; noise may have made them negative."""
    values, vectors = torch.linalg.eigh((matrix + matrix.transpose(-1, -2)) / 2)
    inverse: Tensor = (vectors / values.clamp_min(floor).unsqueeze(-2)) @ vectors.transpose(-1, -2)
    return inverse


def floored_solve(matrix: Tensor, v: Tensor, floor: float) -> Tensor:
    """`floored_inverse` times v."""
    return (floored_inverse(matrix, floor) @ v.unsqueeze(-1)).squeeze(-1)


def damped(matrix: Tensor, gamma: float) -> Tensor:
    """The Cholesky factor of H + gamma I, which overwrites H.

    If H is so large that rounding makes it indefinite, the diagonal of the factor is NaN, and so is every solution.
    """
    matrix.diagonal(dim1=-2, dim2=-1).add_(gamma)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    factor.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0).unsqueeze(-1), math.nan)
    return factor


def conjugate_gradients(product: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> Tensor:
    """Solve `product(y) = v` from zero, in a number of steps that does not depend on the data."""
    y, r, p = torch.zeros_like(v), v, v
    for _ in range(steps):
        Ap, size = product(p), dot(r, r)
        a = size / dot(p, Ap).clamp_min(TINY)
        y, r = y + a * p, r - a * Ap
        p = r + dot(r, r) / size.clamp_min(TINY) * p
    return y


def steps_for(condition: float, accuracy: float) -> int:
    """The number of steps k with error 2 ((sqrt(condition) - 1) / (sqrt(condition) + 1))^k <= accuracy."""
    root = math.sqrt(condition)
    if root == 1:  # a multiple of the identity
        return 1
    return max(1, math.ceil(math.log(accuracy / 2) / math.log((root - 1) / (root + 1))))
