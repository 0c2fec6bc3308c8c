"""auto: every step from public facts, nothing to tune.

The first round releases the mean of u u^T, u = (x, 1): each record adds one matrix, cut to norm 1 + radius^2, and
replacing it costs sqrt 2 of that, for these are positive semi-definite. All other rounds release a gradient, as in
DP-FedGD. Steps are Kalman's (`rules.derived`). Early rounds get more of the budget than late ones, so that a model is
worth having long before the last: round t a part in proportion to t^-front. That is fresh noise of a size fixed
beforehand, so every trust model is proved.
Records are best brought to one norm, `radius`: a run does so by itself (`normalize = record`).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sordino.core import (
    Ask,
    Correlated,
    Down,
    Facts,
    Independent,
    Kind,
    Local,
    Method,
    Query,
    Rule,
    SordinoError,
    Stage,
    Stream,
    Tree,
    Trust,
    Unit,
)
from sordino.methods.fedgd import gradient
from sordino.privacy.correlated import MOST_ROUNDS
from sordino.rules.derived import kalman, matrix_of


def auto(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 5.0,
    radius: float = 10.0,
    prior: float = 1.0,
    doubt: float = 10.0,
    front: float = 0.5,
    covariance_share: float = 0.05,
) -> Method:
    """A = noised mean of u u^T, once; theta <- theta - K G, with K derived from A, the noise and the rounds.

    clip: of a gradient, half of radius. radius: norm that records are brought to. prior: std of a logit before anything
    is known. doubt: about the curvature; 0 averages all rounds alike. front: round t gets t^-front of the budget (0:
    all the same). covariance_share: of mu squared.
    """
    for name, value in (("clip", clip), ("radius", radius), ("prior", prior)):
        if not 0 < value < math.inf:
            raise SordinoError(f"{name}: {value} must be a finite number above 0.")
    if not (0 <= doubt < math.inf and 0 <= front <= 1 and 0 < covariance_share < 1):
        raise SordinoError("doubt, front, covariance_share: must be 0 or more, in [0, 1], and in (0, 1).")
    most, over = 1 + radius**2, partial(stds, front)
    noise = Stream("front-loaded", partial(front_loaded, front)) if front else Independent()

    def look(ask: Ask, down: Down, memory: Tree, cache: Tree) -> Tensor:
        return ask.gram().flatten(-2) if unit is Unit.USER else ask.gram()

    def unseen(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        rows, _ = matrix_of(facts)
        return theta.new_zeros(*theta.shape[:-1], rows * rows), theta.new_tensor(facts.aggregate_std)

    def keep_it(A: Tree, state: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        return torch.zeros_like(theta), (A.reshape(state[0].shape), state[1])

    seen: tuple[Query, ...] = (Query(Kind.GRAM, most, share=covariance_share, psd=True),)
    asked: tuple[Query, ...] = (Query(Kind.GRADIENT, clip, noise=noise),)
    if unit is Unit.USER:
        seen = (Query(Kind.GRAM, noise=None), Query(Kind.DELTA, most, share=covariance_share, psd=True))
        asked = (Query(Kind.GRADIENT, noise=None), Query(Kind.DELTA, clip, noise=noise))
    stages = (
        Stage(Local(look), Rule(unseen, keep_it), seen, rounds=1),
        Stage(Local(gradient), kalman(clip=clip, most=most, prior=prior, doubt=doubt, over=over), asked),
    )
    return Method("auto", unit, stages, frozenset((unit, trust) for trust in Trust))


def stds(front: float, rounds: int) -> np.ndarray:
    """Of the rounds' noise: the inverse square, a round's part of the budget, is t^-front, and 1 in the mean."""
    part = np.arange(1.0, rounds + 1) ** -front
    return np.asarray(np.sqrt(part.mean() / part))


def front_loaded(front: float, rounds: int) -> Correlated:
    if rounds > MOST_ROUNDS:
        raise SordinoError(
            f"rounds: {rounds} are more than {MOST_ROUNDS}; set front = 0, the same noise in all rounds."
        )
    std = stds(front, rounds)
    return Correlated(np.diag(1 / std), np.diag(std))
