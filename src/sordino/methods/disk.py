"""DP-DiSK: one clipped release per round that also tells how the gradient changes along the last step (Kalman filter).

A mean of gradients over rounds has less noise, but it lags behind, because the model has moved. The released term
corrects that: (1 - w) g(theta) + w g(theta + gamma d), with d the last step and w = (1 - kappa) / (kappa gamma), is
g(theta) plus (1 - kappa) / kappa times the change of g along d. The two gradients of a record are added before the one
clip, so a round costs one release. kappa = 1 keeps no past, and is DP-FedGD or DP-FedAdam.
"""

from __future__ import annotations

from sordino.core import Ask, Blend, Broadcast, Local, Method, Rule, Tree, Unit
from sordino.errors import SordinoError, check_known
from sordino.lazy import Tensor
from sordino.methods.fedgd import server_gradient
from sordino.rules import adam, chain, ema
from sordino.rules.basic import zeros

OPTIMIZERS = ("sgd", "adam")
LEAST, MOST_GAMMA = 1e-6, 1e6  # of kappa and gamma, which divide a weight
LAST_STEP = Rule(zeros, lambda step, state, theta, t: (step, step), broadcast=lambda state: state)  # tells clients d


def disk(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    kappa: float = 0.7,
    gamma: float = 0.5,
    optimizer: str = "sgd",
    beta1: float = 0.9,
    beta2: float = 0.999,
    tau: float = 0.01,
    tail: float = 0.0,
) -> Method:
    """theta <- theta - lr M, M = (1 - kappa) M + kappa G, G of g(theta) and g(theta + gamma d), d the last step.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's weighted sum of two gradients, or of a client's message.
        lr: Step size of the server.
        kappa: Part of a new release in the filter, at most 1, which is DP-FedGD, or DP-FedAdam.
        gamma: Length of the look ahead in last steps, above 0.
        optimizer: `sgd` steps along M; `adam` along Adam's moments of M.
        beta1: Decay of the first moment, in [0, 1); for `adam`.
        beta2: Decay of the second moment, in [0, 1); for `adam`.
        tau: Start of the root of v and its lower bound, above 0; for `adam`.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Per round and client, the noised sum over records of a weighted sum of two gradients, clipped as one
            vector (record level), or the client's clipped mean of these sums with noise (client level).
        Sensitivity: clip if a unit joins or leaves; 2 clip if it is replaced.
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: Both points are broadcast, and the clip bounds a record's whole term at any two points. A release
            depends on earlier ones only through broadcasts, and filter and step are post-processing.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-disk", clip=0.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        1.0
    """
    for name, value, most in (("kappa", kappa, 1), ("gamma", gamma, MOST_GAMMA)):
        if not LEAST <= value <= most:
            raise SordinoError(f"{name}: {value} must lie in [{LEAST:g}, {most:g}].")
    check_known("optimizer", optimizer, OPTIMIZERS)
    w = (1 - kappa) / (kappa * gamma)

    def compute(ask: Ask, broadcast: Broadcast, memory: Tree, cache: Tree) -> Tensor:
        theta, (_, d) = broadcast
        if not w:
            return ask.gradient(theta)
        return ask.gradient(theta, blend=Blend(theta + gamma * d, (1 - w, w)))

    rules = (ema(1 - kappa), *((adam(beta1=beta1, beta2=beta2, tau=tau),) if optimizer == "adam" else ()))
    method = server_gradient("dp-disk", unit, clip, lr, rules, tail)
    (stage,) = method.stages
    return method._replace(stages=(stage._replace(local=Local(compute), rule=chain(stage.rule, LAST_STEP)),))
