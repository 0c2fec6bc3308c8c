"""The plain rules: scale, moving average, tail average, and the chain that joins rules."""

from __future__ import annotations

import math
from typing import NamedTuple

from sordino.core import Facts, Rule, Tree, itself
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch


class TailAverage(NamedTuple):
    """The state of `average`."""

    mean: Tensor  # of the iterates so far
    first_round: Tensor  # from which iterates are averaged


def stateless(theta: Tensor, facts: Facts, before: Tree) -> Tree:
    """The initial state of a rule without state."""
    return ()


def zeros(theta: Tensor, facts: Facts, before: Tree) -> Tensor:
    """An initial state of zeros, one per parameter."""
    return torch.zeros_like(theta)


def chain(*rules: Rule) -> Rule:
    """Apply rules in order; each gets the result of the one before it.

    Args:
      rules: the rules.

    Returns:
      One rule.
    """

    def init(theta: Tensor, facts: Facts, before: Tree) -> tuple[Tree, ...]:
        return tuple(rule.init(theta, facts, before) for rule in rules)

    def update(g: Tensor, states: tuple[Tree, ...], theta: Tensor, t: int) -> tuple[Tensor, tuple[Tree, ...]]:
        new = []
        for rule, state in zip(rules, states, strict=True):
            g, state = rule.update(g, state, theta, t)
            new.append(state)
        return g, tuple(new)

    def broadcast(states: tuple[Tree, ...]) -> Tree:
        return tuple(rule.broadcast(state) for rule, state in zip(rules, states, strict=True))

    def model(theta: Tensor, states: tuple[Tree, ...]) -> Tensor:
        for rule, state in zip(rules, states, strict=True):
            theta = rule.model(theta, state)
        return theta

    whole = all(rule.model is itself for rule in rules)
    return Rule(init, update, broadcast, itself if whole else model)


def scale(factor: float | Tensor) -> Rule:
    """factor * G. The step is added to theta, so descent has a negative factor.

    Args:
      factor: the factor.

    Returns:
      The rule.
    """
    return Rule(stateless, lambda g, state, theta, t: (factor * g, state))


def shrink(part: float) -> Rule:
    """G - part * theta: weight decay of a step G that is added to theta, whatever its size.

    Args:
      part: of the model that a round takes away, in [0, 1).

    Returns:
      The rule.

    Raises:
      SordinoError: part is out of its range.
    """
    check_decay("weight_decay", part)
    return Rule(stateless, lambda g, state, theta, t: (g - part * theta, state))


def check_decay(name: str, value: float | Tensor) -> None:
    """Raise SordinoError unless a decay lies in [0, 1)."""
    if not isinstance(value, Tensor) and not 0 <= value < 1:
        raise SordinoError(f"{name}: {value} must lie in [0, 1).")


def check_above_zero(**values: float | Tensor) -> None:
    """Raise SordinoError unless each of these options is finite and above 0."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and not 0 < value < math.inf:
            raise SordinoError(f"{name}: {value} must be a finite number above 0.")


def moving(m: Tensor, g: Tensor, beta: float | Tensor) -> Tensor:
    """The next value of a moving average: beta m + (1 - beta) g."""
    return torch.lerp(m, g, 1 - beta)


def debias(m: Tensor, beta: float | Tensor, t: int) -> Tensor:
    """Correct the bias towards zero of a moving average of t + 1 terms that starts at zero (Adam)."""
    return m / (1 - beta ** (t + 1))


def ema(beta: float | Tensor, *, bias_correction: bool = False) -> Rule:
    """A moving average: M = beta M + (1 - beta) G, from M = 0. Noise keeps (1 - beta) / (1 + beta) of its variance.

    Args:
      beta: the decay, in [0, 1).
      bias_correction: divide by 1 - beta^(t+1).

    Returns:
      The rule.

    Raises:
      SordinoError: beta is out of its range.
    """

    check_decay("beta", beta)

    def update(g: Tensor, m: Tensor, theta: Tensor, t: int) -> tuple[Tensor, Tensor]:
        m = moving(m, g, beta)
        return (debias(m, beta, t) if bias_correction else m), m

    return Rule(zeros, update)


def heavy_ball(beta: float | Tensor, restart: int = 0) -> Rule:
    """Heavy-ball momentum: M = beta M + G from M = 0.

    Args:
      beta: the momentum, in [0, 1).
      restart: rounds after which M starts again; 0 for never.

    Returns:
      The rule.

    Raises:
      SordinoError: beta is out of its range.
    """

    check_decay("momentum", beta)

    def update(g: Tensor, m: Tensor, theta: Tensor, t: int) -> tuple[Tensor, Tensor]:
        m = g if restart and t % restart == 0 else beta * m + g
        return m, m

    return Rule(zeros, update)


def average(last: float) -> Rule:
    """Return the mean of the last iterates as the model. The iterates themselves do not change.

    It must be the last rule of a chain, because its input is the step.

    Args:
      last: the part of the rounds whose iterates are averaged, in (0, 1].

    Returns:
      The rule.

    Raises:
      SordinoError: last is out of its range.
    """
    if not 0 < last <= 1:
        raise SordinoError(f"average: {last} must lie in (0, 1], the part of the rounds whose iterates are averaged.")

    def init(theta: Tensor, facts: Facts, before: Tree) -> TailAverage:
        first = facts.rounds - max(1, round(last * facts.rounds))
        return TailAverage(theta, torch.tensor(float(first)))

    def update(g: Tensor, state: TailAverage, theta: Tensor, t: int) -> tuple[Tensor, TailAverage]:
        iterates = max(t - int(state.first_round), 0) + 1
        return g, state._replace(mean=state.mean + (theta + g - state.mean) / iterates)

    return Rule(init, update, model=lambda theta, state: state.mean)
