"""The centre of the records, from a noised mean of u u^T, u = (x, constant).

Its last row is the mean of the records times the constant. About their mean, records are shorter. They are scaled to
the length that they had, so that gradients say more within the same clip and noise. And intercepts no longer depend on
the weights.
"""

from __future__ import annotations

import math

from sordino.core import Centre, Facts
from sordino.lazy import Tensor, torch
from sordino.rules.estimates import spectrum

SPREAD_DOUBT = 0.1  # how far the mean of |x|^2 may lie below its bound, over the bound, before A is known
LEVEL_DOUBT = 0.1  # the same of the mean weight of a record
LEAST_SPREAD = 0.1  # of the mean of |x|^2, that is left about the centre; it bounds the factor


def no_centre(theta: Tensor, facts: Facts) -> Centre:
    """The centre before it is known: features stay as they are."""
    rows, _ = facts.shapes[0]
    return Centre(theta.new_zeros(*theta.shape[:-1], rows - 1), torch.ones_like(theta[..., :1]))


def with_one(A: Tensor, constant: float) -> Tensor:
    """The mean of u u^T with u = (x, 1), from that with u = (x, constant)."""
    scale = torch.nn.functional.pad(torch.ones_like(A[..., -1, :-1]), (0, 1), value=1 / constant)
    return scale.unsqueeze(-1) * A * scale.unsqueeze(-2)


def find_centre(A: Tensor, std: Tensor, most: float, constant: float, weight: Tensor) -> tuple[Centre, Tensor, Tensor]:
    """The centre, and the spectrum of the mean of u u^T with u = (factor (x - mean), 1).

    Much noise leaves the records where they are: the mean is multiplied by the part of its square that is not noise.
    With class weights the last entry of A tells the mean weight of a record.

    Args:
        A: The noised mean of u u^T, u = (x, constant).
        std: Of the noise on its diagonal; off it, over sqrt 2.
        most: Bound on |u|^2.
        constant: The last feature of u.
        weight: The expected mean weight of a record.

    Returns:
        The centre, and the eigenvalues and eigenvectors; the last ones are those of the constant feature.
    """
    A, std, weight = A.double(), std.double(), weight.double()
    features, bound = A.shape[-1] - 1, most - constant**2
    level = shrunk(A[..., -1, -1:] / constant**2, std / constant**2, weight, LEVEL_DOUBT * weight)
    level = level.maximum(weight / 2).clamp_max(1)
    mean = A[..., -1, :-1] / (constant * level)
    square = mean.square().sum(-1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    noise = features * (std / (math.sqrt(2) * constant * level)).square()
    mean = mean * (1 - noise / square).clamp_min(0) * (bound / square).sqrt().clamp_max(1)
    spread = A[..., :-1, :-1] - (level * mean).unsqueeze(-1) * mean.unsqueeze(-2)
    trace = A.diagonal(dim1=-2, dim2=-1)[..., :-1].sum(-1, keepdim=True)  # the mean of |x|^2
    trace = shrunk(trace / level, math.sqrt(features) * std / level, bound, SPREAD_DOUBT * bound).clamp_max(bound)
    trace = trace.clamp_min(LEAST_SPREAD * bound)
    scale = trace / (trace - mean.square().sum(-1, keepdim=True)).maximum(LEAST_SPREAD * trace)
    value, vectors = spectrum(spread * scale.unsqueeze(-1), std * scale, most, level * trace)
    vectors = torch.nn.functional.pad(vectors, (0, 1, 0, 1))
    vectors[..., -1, -1] = 1
    return Centre(mean, scale.sqrt()), torch.cat([value, level], -1), vectors


def seen_along(
    A: Tensor, std: Tensor, V: Tensor, level: Tensor, centre: Centre, constant: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The diagonal of the noised covariance about the centre along all but the last eigenvector, and its noise's std.

    Persons with several records may weigh more than 1 in A, which its last entry tells: the third result.

    Args:
        A: The noised mean of u u^T, u = (x, constant).
        std: Of the noise on its diagonal; off it, over sqrt 2.
        V: The eigenvectors that `find_centre` found.
        level: The mean weight of a record, at most 1.
        centre: That it found.
        constant: The last feature of u.
    """
    A, level = A.double(), level.double()
    seen = (A[..., -1, -1:] / constant**2).clamp_min(1)
    square, mean, vectors = (
        centre.factor.double().square(),
        centre.mean.double() * level / seen,
        V[..., :-1, :-1].double(),
    )
    spread = A[..., :-1, :-1] - (seen * mean).unsqueeze(-1) * mean.unsqueeze(-2)
    return square * ((spread @ vectors) * vectors).sum(-2), square * std.double(), seen


def shrunk(value: Tensor, std: Tensor, expected: Tensor | float, doubt: Tensor | float) -> Tensor:
    """A noised number, nearer to what was expected the larger its noise is over the doubt about that."""
    weight = (std / doubt).square()
    return (value + weight * expected) / (1 + weight)
