"""Matrices with a flatter spectrum: the step of a network along directions that few gradients share.

The mean gradient of a layer often has one singular value far above the others, and along it a long step overshoots
first. `flatten` multiplies each parameter, read as a matrix M (outputs x all inputs of one output), by a root:

    P = M (M^T M + c^2 I)^(-1/2),  scaled to the norm of M,  c^2 = mean of the squared singular values + 4 e^2.

Singular values far below c keep their proportions, and those above it become equal. e is the largest singular value
that noise alone would have, std (sqrt rows + sqrt columns): where noise rules, c is larger than every singular value,
and P is almost M, because making singular values of noise equal would only hide what is left of the signal. Vectors
stay as they are.
"""

from __future__ import annotations

import math

from sordino.lazy import Tensor, torch

NOISE = 4.0  # times e^2 in c^2


def shapes_of(shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """(rows, columns) of each parameter; a vector has one row."""
    flat = [(s[0], math.prod(s[1:])) if len(s) > 1 else (1, math.prod(s)) for s in shapes]
    return torch.tensor(flat, dtype=torch.float64).reshape(-1, 2)


def flatten(m: Tensor, std: Tensor, shapes: Tensor) -> Tensor:
    """Every matrix of m with a flatter spectrum and the norm that it had.

    Args:
      m: parameters strung together, along the last axis.
      std: noise per coordinate; one per run where m holds several.
      shapes: (rows, columns) of each parameter (`shapes_of`). Without any, m is a vector.

    Returns:
      As m.

    Example:
      >>> shapes = shapes_of(((2, 2), (1,)))
      >>> flatten(torch.tensor([3.0, 0.0, 0.0, 1.0, 5.0]), torch.tensor(0.0), shapes)
      tensor([2.8180, 0.0000, 0.0000, 1.4349, 5.0000])
    """
    alike: dict[tuple[int, int], list[int]] = {}  # where matrices of one shape begin; they are computed together
    start = 0
    for rows, columns in shapes.long().tolist():
        if min(rows, columns) > 1:
            alike.setdefault((rows, columns), []).append(start)
        start += rows * columns
    flat = m.clone()
    for (rows, columns), starts in alike.items():
        parts = [m[..., k : k + rows * columns].reshape(*m.shape[:-1], rows, columns) for k in starts]
        edge = std * (math.sqrt(rows) + math.sqrt(columns))
        new = _flatter(torch.stack(parts, -3), edge[..., None])
        for number, k in enumerate(starts):
            flat[..., k : k + rows * columns] = new[..., number, :, :].flatten(-2)
    return flat


def _flatter(m: Tensor, edge: Tensor) -> Tensor:
    """P of each matrix, by the eigenvectors of M^T M or M M^T, whichever is smaller."""
    tall = m if m.shape[-2] >= m.shape[-1] else m.mT
    squares, vectors = torch.linalg.eigh(tall.mT @ tall)
    damped = squares.clamp(min=0) + squares.mean(-1, keepdim=True) + NOISE * edge.square()
    p = tall @ (vectors * _inverse(damped.sqrt()).unsqueeze(-2)) @ vectors.mT
    p = p * (_norm(tall) * _inverse(_norm(p)))
    same: Tensor = p if tall is m else p.mT
    return same


def _norm(m: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(m, dim=(-2, -1), keepdim=True)
    return norm


def _inverse(x: Tensor) -> Tensor:
    """1 / x; of 0, a large number."""
    return x.clamp_min(torch.finfo(x.dtype).tiny).reciprocal()
