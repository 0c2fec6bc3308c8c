"""DP-AdaDPS: DP-FedAvg with gradients divided by a public scale A before the clip, and not multiplied by A afterwards.

A comes from data that their owner declares public: statistics of features, or records whose gradients the server uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sordino.core import Ask, Broadcast, Facts, Local, Method, Rule, Shard, Stage, Tree, Unit
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.methods.fedavg import LOCAL_STEPS_CAVEAT, local_steps, sends_gradient
from sordino.methods.local import LocalSteps, paced, unpaced
from sordino.rules import chain
from sordino.rules.basic import check_decay, moving


@dataclass(frozen=True)
class Public:
    """Side information that somebody declared public: second moments of features, or records and their model."""

    moments: Tensor
    model: Any = None
    shard: Any = None

    @staticmethod
    def statistics(of: str | Path | Mapping[str, Any]) -> Public:
        """`second_moment`, or `mean` and `std` or `cov`, of public features: an .npz, or arrays by name."""
        try:
            arrays = dict(np.load(of, allow_pickle=False) if isinstance(of, str | Path) else of)
            part = {name: torch.as_tensor(array).double() for name, array in arrays.items()}
            if "second_moment" not in part:
                variance = part["std"].square() if "std" in part else part["cov"].diag()
                part["second_moment"] = part["mean"].square() + variance
        except Exception as error:  # a damaged archive fails in a dozen ways
            needs = "give an .npz or a dict of arrays second_moment, or mean and std or cov, that anybody may see"
            raise SordinoError(f"public: no statistics ({type(error).__name__}: {error}); {needs}.") from None
        if (moments := part["second_moment"]).dim() != 1 or not (torch.isfinite(moments) & (moments >= 0)).all():
            raise SordinoError("public: second moments must be a vector of finite numbers, 0 or more, one per feature.")
        return Public(moments)

    @staticmethod
    def records(model: Any, x: np.ndarray | Tensor, y: np.ndarray | Tensor) -> Public:
        if not (isinstance(x, np.ndarray | Tensor) and isinstance(y, np.ndarray | Tensor)):
            raise SordinoError("public: clients' records are private; give arrays x and y that anybody may see.")
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        return Public(torch.ones(0), model, Shard(x, y, torch.ones(len(x))))

    def squares(self, theta: Tensor, shapes: tuple[tuple[int, ...], ...] = ()) -> Tensor:
        """The squares of the mean gradient at theta, or what replaces them: a feature's second moment, 1 for a bias."""
        if self.model is not None:
            x, y, ones = self.shard[:3]
            sums = self.model.clipped_sum(theta, Shard(x.to(theta), y, ones.to(theta)), math.inf)
            return torch.square(sums / len(x)).to(theta)
        rows, outputs = shapes[0] if len(shapes) == 1 and len(shapes[0]) == 2 else (-1, 0)
        if not 0 <= rows - len(self.moments) <= 1:
            raise SordinoError(f"public: {len(self.moments)} features do not fit this model; use Public.records.")
        moments = torch.cat([self.moments, torch.ones(rows - len(self.moments))])
        return moments.repeat_interleave(outputs).to(theta).expand_as(theta)


def adadps(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    local_lr: float = 2.0,
    steps: int = 1,
    decay: float = 0.0,
    schedule: str = "constant",
    noise_at: str = "per-step",
    public: str | Public = "",
    beta: float = 0.9,
    eps: float = 0.1,
) -> Method:
    """y <- y - local_lr (clip(g / A) + decay y), K times; A = sqrt(v) + eps of public data. Without any, dp-fedavg.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message. At record level the gradient is
            divided by A before the clip.
        lr: Step size of the server.
        local_lr: Step size of the local steps.
        steps: Local steps per round, K.
        decay: Decoupled weight decay.
        schedule: `cosine` or `constant` step size.
        noise_at: `per-step` noises every local gradient (record level only); `final` clips and noises the update once.
            At client level the update is always noised once.
        public: Public side information: an .npz with the features' second_moment, or mean and std or cov; or a
            `Public`; empty for none.
        beta: Decay of v, the squared gradients of public records, in [0, 1).
        eps: Added to sqrt(v); bounds 1 / A.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: Record level, per-step: the K noised gradients of each round (the update follows from them).
            Otherwise: the clipped update, noised once per round.
        Sensitivity: Per noised gradient: clip if a record joins or leaves, 2 clip if it is replaced. Noised update:
            clip or 2 clip for a client; always 2 clip for a record, which may move the update anywhere in the ball.
        Proved for: untrusted-server at both levels; secure-aggregation and trusted-server too with steps = 1, noise_at
            = final or at client level.
        Reason: With K > 1 noised steps the update is not linear in a client's noise, so the noise of other clients in
            the sum cannot be counted. A is public, so the clip bounds every record; the certificate states the
            assumption that the side information is public.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-adadps", eps=0.5)
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    check_decay("beta", beta)
    if not 1e-12 <= eps < math.inf:
        raise SordinoError(f"eps: {eps} must lie in [1e-12, inf): it bounds 1 / A where the public gradient is zero.")
    if not isinstance(public, str | Public):
        raise SordinoError(
            f"public: {type(public).__name__} is not declared public; see Public.statistics, Public.records."
        )
    side = public if isinstance(public, Public) else Public.statistics(public) if public else None
    queries, proves = local_steps(unit, clip, steps, noise_at)
    walk, one = LocalSteps(steps, local_lr, schedule, decay), sends_gradient(queries)

    def compute(ask: Ask, broadcast: Broadcast[Tree], memory: Tree, cache: Tree) -> Tensor:
        A, factor = unpaced(broadcast.extras)
        scale = None if side is None else 1 / A
        if one:
            return ask.gradient(broadcast.theta, scale=scale)
        return walk.update(broadcast.theta, factor, lambda y: ask.gradient(y, scale=scale))

    def update(step: Tensor, v: Tree, theta: Tensor, t: int) -> tuple[Tensor, Tree]:
        if side is not None and side.model is not None and isinstance(v, Tensor):
            v = moving(v, side.squares(theta + step), beta)
        return step, v

    def init(theta: Tensor, facts: Facts, before: Tree) -> Tree:
        return () if side is None else side.squares(theta, facts.shapes)

    def divisor(v: Tree) -> Tree:
        return v.sqrt() + eps if isinstance(v, Tensor) else ()

    rule, assumes = chain(walk.rule(one, lr), Rule(init, update)), tuple[str, ...]()
    rule = rule._replace(broadcast=lambda states: paced(divisor(states[1]), () if one else states[0].factor))
    if side is not None:
        assumes = ("The side information that gradients are divided by is public.",)
    return Method("dp-adadps", unit, (Stage(Local(compute), rule, queries),), proves, LOCAL_STEPS_CAVEAT, assumes)
