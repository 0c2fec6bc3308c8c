"""The constants of a survival model from its life table: what the model predicts on average is what the table shows.

Clipping changes the constants that gradients lead to: events are cut more than other records, and of a person with
several records the sum is cut. The life table has no such bias, because its cells are counted without a cut. So the
model that is handed out keeps the weights w that were trained, and takes the constants b_k at which the mean predicted
survival at each edge is that of the table:

    mean over records of prod over j <= k of (1 - sigmoid(x . w + b_j)) = S_k

x . w is taken as normal, with the mean and variance that follow from w and the noised mean of u u^T. Everything here
was released before, so this is post-processing: it costs nothing, and whatever the noise is, no promise depends on it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from sordino.lazy import Tensor, torch

NODES = 21  # of the Gauss-Hermite rule
REACH = 8.0  # constants lie within this distance of the table's log-odds
PARTS, DIVISIONS = 16, 8  # each division keeps one of so many parts of the interval that holds the constant
# Typical change of a constant by the clip, in log-odds, where records are clipped, and where sums of a person's are.
BIAS_OF_RECORDS, BIAS_OF_PERSONS = 0.1, 0.3
LEAST_CURVATURE = LEAST_NOISE = 1e-9


class Baseline(NamedTuple):
    """What the constants follow from.

    Attributes:
        mean: The noised mean of the features.
        error: Standard deviation of the noise on an entry of it.
        square: The estimated mean of x x^T.
        constant: Log-odds of the hazards of the life table.
        bias: Typical change of a constant by the clip.
    """

    mean: Tensor
    error: Tensor
    square: Tensor
    constant: Tensor
    bias: Tensor

    @staticmethod
    def of(A: Tensor, clean: Tensor, std: Tensor, constant: Tensor, bias: Tensor) -> Baseline:
        """From the noised mean of u u^T and its estimate without noise; u = (x, 1).

        Where persons are protected, A is the mean over persons of a sum over records, so its last entry, the number of
        records, divides it.
        """
        count = clean[..., -1:, -1:].clamp_min(LEAST_CURVATURE)
        last = (A[..., -1, :-1] + A[..., :-1, -1]) / 2
        error = std.double() / count[..., 0] / math.sqrt(2)
        typical = bias.to(count) + torch.zeros_like(count[..., 0])
        return Baseline(last / count[..., 0], error, clean[..., :-1, :-1] / count, constant, typical)


def recalibrated(weight: Tensor, trained: Tensor, baseline: Baseline) -> Tensor:
    """The constants at which mean predicted survival is that of the life table.

    The noise on the mean of the features moves all constants by one normal number, of variance error^2 |w|^2. Where it
    exceeds what a clip changes, the trained constants are better; the result lies in between, by the share of noise.

    Args:
        weight: One weight per feature, with any leading axes.
        trained: The constants that gradients led to.
        baseline: The life table and the moments of the features.

    Returns:
        One constant per interval.
    """
    w, constant = weight.double(), baseline.constant.double()
    mean = (baseline.mean.double() * w).sum(-1, keepdim=True)
    square = (w.unsqueeze(-2) @ baseline.square.double() @ w.unsqueeze(-1))[..., 0]
    noise = baseline.error.double().square() * w.square().sum(-1, keepdim=True)
    spread = (square - (mean.square() - noise).clamp_min(0)).clamp_min(0).sqrt()
    places, chances = (torch.from_numpy(part).to(w) for part in _nodes())
    predictor = mean + spread * places  # one value per node
    inner = torch.arange(1, PARTS).to(w)  # edges between parts
    alive, survived = chances.expand_as(predictor), torch.ones_like(mean)
    constants = []
    for k in range(constant.shape[-1]):
        centre = constant[..., k : k + 1]
        survived = survived * (-centre).sigmoid()
        low, part = centre - REACH, 2 * REACH / PARTS
        for _ in range(DIVISIONS):
            edges = (low + part * inner).unsqueeze(-1)
            mean_survival = (alive.unsqueeze(-2) * (-(predictor.unsqueeze(-2) + edges)).sigmoid()).sum(-1)
            low = low + part * (mean_survival > survived).sum(-1, keepdim=True)  # survival falls from edge to edge
            part /= PARTS
        b = low + part * PARTS / 2
        alive = alive * (-(predictor + b)).sigmoid()
        constants.append(b)
    bias = baseline.bias.double().square()
    share = bias / (bias + noise.clamp_min(LEAST_NOISE))
    return (trained.double() + share * (torch.cat(constants, -1) - trained.double())).to(weight)


@cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Places of a standard normal, and their chances, by Gauss and Hermite's rule."""
    places, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return places, weights / weights.sum()
