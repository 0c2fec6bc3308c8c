"""DP-FedAdam, DP-FedYogi and DP-AdamBC: DP-FedGD's release under an adaptive server optimiser."""

from __future__ import annotations

from sordino.core import Method, Unit
from sordino.methods.clipping import adaptive_clip
from sordino.methods.fedgd import server_gradient
from sordino.rules import adam, yogi


def fedadam(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.05,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 0.01,
    bias_correction: bool = False,
    tail: float = 0.0,
    quantile: float = 0.0,
) -> Method:
    """theta <- theta - lr m / (sqrt(v) + tau), Adam's moments of G.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Start of the root of v and its lower bound, above 0.
        bias_correction: Correct both moments for their start, as Adam does.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.
        quantile: Part of the gradients that an adaptive clip leaves unclipped (record level; it takes 5 % of mu
            squared); 0 keeps the clip fixed.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per round and client, the noised sum of clipped per-record gradients (record level), or the client's
            clipped mean gradient with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: A release depends on earlier ones only through the broadcast model, and the server only post-processes
            sums of releases.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedadam", clip=0.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        1.0
    """
    rule = adam(beta1=beta1, beta2=beta2, tau=tau, bias_correction=bias_correction)
    return adaptive_clip(server_gradient("dp-fedadam", unit, clip, lr, (rule,), tail), clip, quantile)


def fedyogi(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.05,
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 0.01,
    bias_correction: bool = False,
    tail: float = 0.0,
) -> Method:
    """theta <- theta - lr m / (sqrt(v) + tau), Yogi's moments of G.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Start of the root of v and its lower bound, above 0.
        bias_correction: Correct both moments for their start, as Adam does.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per round and client, the noised sum of clipped per-record gradients (record level), or the client's
            clipped mean gradient with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: A release depends on earlier ones only through the broadcast model, and the server only post-processes
            sums of releases.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-fedyogi", clip=0.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        1.0
    """
    rule = yogi(beta1=beta1, beta2=beta2, tau=tau, bias_correction=bias_correction)
    return server_gradient("dp-fedyogi", unit, clip, lr, (rule,), tail)


def adambc(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.999,
    floor: float = 1e-3,
    decay: float = 0.0,
    tail: float = 0.0,
) -> Method:
    """theta <- theta - lr (m^ / sqrt(max(v^ - Phi, floor)) + decay theta), Phi the variance of the noise on G.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        floor: Lower bound of v^ - Phi, above 0; noise alone makes the difference negative more often than not.
        decay: Decoupled weight decay.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per round and client, the noised sum of clipped per-record gradients (record level), or the client's
            clipped mean gradient with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: A release depends on earlier ones only through the broadcast model. Phi is public, so subtracting it is
            post-processing.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-adambc", floor=1e-4)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    rule = adam(
        beta1=beta1, beta2=beta2, tau=0, bias_correction=True, correction="subtract-floor", floor=floor, decay=decay
    )
    return server_gradient("dp-adambc", unit, clip, lr, (rule,), tail)
