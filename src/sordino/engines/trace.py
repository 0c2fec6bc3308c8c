"""Find out what a local rule asks by running it once with a probe in place of its data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sordino.core import Broadcast, Centre, Kind, Model, Shard, Stage, Tree, forget, keep, nothing
from sordino.engines.oracle import Oracle, Unchanged
from sordino.engines.preconditions import MATRICES, check_kinds
from sordino.engines.schedule import stage_facts
from sordino.errors import SordinoError
from sordino.privacy.mechanisms.quantization import Answer
from sordino.privacy.plan import Plan
from sordino.tree import leaves


class _AsksMoreError(Exception):
    """The rule asked something other than one gradient at theta."""


class _GradientProbe:
    """Stands in for `ask`: answers one gradient query at theta, about the broadcast centre if there is one, and rejects
    every other question."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._theta, self._centre, self._asked = broadcast.theta, centre_of(broadcast), False
        self.answer = torch.ones_like(broadcast.theta)  # not 0, so that a write shows

    def gradient(
        self,
        theta: Tensor,
        on: Any = None,
        scale: Any = None,
        part: Any = None,
        blend: Any = None,
        centre: Any = None,
    ) -> Tensor:
        plain = theta is self._theta and centre is self._centre
        if not plain or self._asked or any(each is not None for each in (on, scale, part, blend)):
            raise _AsksMoreError
        self._asked = True
        return self.answer

    def __getattr__(self, name: str) -> Any:
        raise _AsksMoreError


def centre_of(broadcast: Broadcast) -> Centre | None:
    """The centre that is broadcast beside theta, if one is."""
    return broadcast.extras if isinstance(broadcast.extras, Centre) else None


def only_asks_for_the_gradient(stage: Stage, broadcast: Broadcast) -> bool:
    """Whether every client of the stage sends its gradient at the broadcast theta, unchanged, and nothing else.

    If a centre is broadcast, the gradient must be about it.

    Args:
        stage: The stage whose local rule is traced.
        broadcast: What the server sends at the start of a round.

    Returns:
        True if the engine may replace the local rules by one sum over all records.
    """
    local = stage.local
    if local.init is not forget or local.update_memory is not keep or local.prepare is not nothing:
        return False
    if [query.kind for query in stage.queries] != [Kind.GRADIENT]:
        return False
    probe = _GradientProbe(broadcast)
    held = Unchanged((broadcast.theta, broadcast.extras, probe.answer))
    try:
        return local.compute(probe, broadcast, (), ()) is probe.answer and held.holds
    except _AsksMoreError:
        return False


class _Shapes:
    """The model, with gradients of zeros: only the shape of an answer matters here, and a network is slow."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def clipped_sum(self, theta: Tensor, shard: Shard, clip: float, *how: Any, **options: Any) -> Tensor:
        return torch.zeros_like(theta)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def sent_answers(plan: Plan, model: Model, features: int, label: torch.dtype) -> tuple[tuple[Answer, ...], ...]:
    """What one message of each stage holds, for `quantization.Integers`: found out by one empty record per stage.

    Args:
        plan: The plan, with or without integers.
        model: The model.
        features: Numbers per record.
        label: The type of labels.

    Returns:
        Per stage, the noised answers in the order of the message's leaves.

    Raises:
        SordinoError: The model cannot answer, or a stage sends something other than unchanged answers.
    """
    check_kinds(plan.method, model)
    # Shapes do not depend on the noise, and a fixed one needs no calibration.
    plan = replace(plan, noise=1.0, integers=None, privacy=replace(plan.privacy, client_epsilon={}))
    theta = model.init().double()
    blank = Shard(theta.new_zeros(1, features), torch.zeros(1, dtype=label), theta.new_zeros(1))
    state: Tree = ()
    memory: Tree = ()
    result = []
    for s, stage in enumerate(plan.stages):
        facts = stage_facts(plan, model, s)
        state, memory = stage.rule.init(theta, facts, state), stage.local.init(theta, memory)

        def ask(preparing: bool = False, stage: Stage = stage, facts: Any = facts) -> Oracle:
            stds = [theta.new_zeros(()) for _ in stage.queries]
            return Oracle(
                _Shapes(model),
                lambda: blank,
                stage,
                sizes=theta.new_ones(()),
                stds=stds,
                draw=_no_noise,
                facts=facts,
                secret=False,
                preparing=preparing,
                add_noise=False,
            )

        cache = stage.local.prepare(ask(preparing=True))
        asked = ask()
        message = stage.local.compute(asked, Broadcast(theta, stage.rule.broadcast(state)), memory, cache)
        result.append(_answers_of(plan.method.name, stage, asked, message))
    return tuple(result)


def _answers_of(name: str, stage: Stage, ask: Oracle, message: Tree) -> tuple[Answer, ...]:
    try:
        numbers = ask.released(message)
    except SordinoError:
        raise SordinoError(
            f"method: {name} changes its answers before it sends them, and integer noise is added to the answers "
            "themselves. Use auto, dp-fedsofim, dp-fedgd or dp-fedadam, or trust = untrusted-server."
        ) from None
    parts = leaves(ask.finish(message))
    if not isinstance(message, Tensor) and (len(parts) < 2 or any(isinstance(part, tuple) for part in message)):
        raise SordinoError(f"message: {name} nests its answers; send one tensor, or one tuple of several.")
    for number, part in zip(numbers, parts, strict=True):
        matrix = stage.queries[number].kind in MATRICES
        if part.dim() != 1 + matrix or (matrix and part.shape[0] != part.shape[1]):
            raise SordinoError(f"message: {name} sends an answer of shape {tuple(part.shape)}; flatten it.")
    return tuple(Answer(number, tuple(part.shape)) for number, part in zip(numbers, parts, strict=True))


def _no_noise(number: int, call: int, shape: tuple[int, ...]) -> Any:
    raise SordinoError("noise: shapes are found out without any.")
