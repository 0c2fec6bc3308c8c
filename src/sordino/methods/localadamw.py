"""DP-LocalAdamW: DP-FedAdamW without block means, bias correction and alignment."""

from __future__ import annotations

from typing import Any

from sordino.core import Method, Unit
from sordino.methods.adamw import fedadamw


def localadamw(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.3,
    steps: int = 3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 0.1,
    decay: float = 0.01,
    schedule: str = "cosine",
) -> Method:
    """y <- y - lr (m^ / (sqrt(v^) + tau) + decay y), K times from theta; theta <- theta + mean(y - theta).

    m^ and v^ are Adam's moments, which start from zero in every round.

    Args:
        unit: Whose data are protected; only records.
        clip: Bound on the norm of a record's gradient.
        lr: Step size of the local steps.
        steps: Local steps per round, K.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Added to the root of v^; bounds the steps.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The K noised gradients of each round and client; the update and the moments follow from them.
        Sensitivity: clip if a record joins or leaves; 2 clip if it is replaced; per gradient.
        Proved for: record level; untrusted-server.
        Reason: AdamW's steps are not linear in a client's noise, so the noise of other clients in the sum cannot be
            counted.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-localadamw", steps=2)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    shared: dict[str, Any] = {"lr": lr, "steps": steps, "beta1": beta1, "beta2": beta2, "tau": tau, "decay": decay}
    bare = fedadamw(unit=unit, clip=clip, schedule=schedule, aggregate="none", correct=False, align="none", **shared)
    return bare._replace(name="dp-localadamw")
