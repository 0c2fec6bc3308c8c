"""The steps that clients take between two rounds: their size, its schedule and weight decay, for all local methods.

Both are public: the factor of a schedule follows from the number of the round, and the part of decay that holds no data
from the broadcast model. So they change neither noise nor sensitivity. Noised gradients are only post-processed. A
finished update is clipped and noised in units of the factor and without that part, which the server multiplies and adds
afterwards; a clip then bounds the same movement in every round, whatever the decay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sordino.core import Facts, Rule, Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch
from sordino.rules.schedule import check_schedule, descend, schedule_factor


class Pace(NamedTuple):
    """Where a schedule stands. Both are () if the step size is constant."""

    factor: Tree = ()  # of this round's step size
    rounds: Tree = ()  # of the stage


@dataclass(frozen=True)
class LocalSteps:
    """K local steps y <- y - lr factor (direction(y) + decay y), and what a server makes of their messages.

    Args:
      count: K.
      lr: the step size, before the schedule.
      schedule: `cosine` or `constant`, over the rounds.
      decay: decoupled weight decay.

    Raises:
      SordinoError: the schedule is unknown, or the decay is negative or takes more than the model in one step.
    """

    count: int
    lr: float | Tensor
    schedule: str = "constant"
    decay: float = 0.0

    def __post_init__(self) -> None:
        check_schedule(self.schedule, self.decay)
        if (most := float(torch.as_tensor(self.lr).max()) if self.decay else 0.0) * self.decay > 1:
            raise SordinoError(f"decay: {self.decay} times a step size of {most:g} must be at most 1.")

    def start(self, theta: Tensor, facts: Facts) -> Pace:
        """The pace of the first round."""
        return (
            Pace() if self.schedule == "constant" else Pace(torch.ones_like(theta[..., :1]), torch.tensor(facts.rounds))
        )

    def following(self, pace: Pace, t: int) -> Pace:
        """The pace of the round after round t."""
        if not isinstance(pace.factor, Tensor):
            return pace
        factor = schedule_factor(self.schedule, t + 1, float(pace.rounds))  # type: ignore[arg-type]
        return pace._replace(factor=torch.full_like(pace.factor, factor))

    def drift(self, theta: Tensor, factor: Tree, pull: float | Tensor = 0.0) -> Tensor:
        """y - theta after K steps whose only directions are decay and a pull (y - theta): what is free of data."""
        rate = self.lr * _number(factor)
        part: float | Tensor = 0.0  # y = (1 + part) theta
        for _ in range(self.count):
            part = part - rate * (pull * part + self.decay * (1 + part))
        return part * theta

    def total(self, factor: Tree) -> float | Tensor:
        """The sum of the weights that the K directions have in the update, over the step size; K without decay."""
        keeps = 1 - self.lr * _number(factor) * self.decay
        total: float | Tensor = 0.0
        for _ in range(self.count):
            total = keeps * total + 1.0
        return total

    def update(
        self, theta: Tensor, factor: Tree, direction: Callable[[Tensor], Tensor], pull: float | Tensor = 0.0
    ) -> Tensor:
        """The client's message: y - theta after K steps, without `drift`, over the factor.

        pull: of a pull (y - theta) that `direction` contains.
        """
        y = theta
        for _ in range(self.count):
            y = descend(y, direction(y), self.lr * _number(factor), self.decay)
        u = y - theta - self.drift(theta, factor, pull) if self.decay else y - theta
        return u / factor if isinstance(factor, Tensor) else u

    def received(
        self,
        message: Tensor,
        theta: Tensor,
        factor: Tree,
        *,
        lr: float | Tensor = 1.0,
        gradient: bool = False,
        pull: float | Tensor = 0.0,
    ) -> Tensor:
        """lr mean(y - theta), of a mean of messages as `update` makes them; or of gradients at theta, for one step."""
        u = (-self.lr * lr if gradient else lr) * _number(factor) * message
        return u + lr * self.drift(theta, factor, pull) if self.decay else u

    def rule(self, gradient: bool, lr: float | Tensor = 1.0) -> Rule:
        """The first rule of a server: it turns the mean of messages into lr mean(y - theta).

        Args:
          gradient: messages are gradients at theta, of one step.
          lr: step size of the server.

        Returns:
          The rule.
        """

        def init(theta: Tensor, facts: Facts, before: Tree) -> Pace:
            return self.start(theta, facts)

        def update(message: Tensor, pace: Pace, theta: Tensor, t: int) -> tuple[Tensor, Pace]:
            return self.received(message, theta, pace.factor, lr=lr, gradient=gradient), self.following(pace, t)

        return Rule(init, update)


class PacedExtras(NamedTuple):
    """What a server with a schedule sends beside theta."""

    own: Tree  # of the method
    factor: Tensor  # of the step size in this round


def paced(own: Tree, factor: Tree) -> Tree:
    """A method's extras, and the factor if there is a schedule."""
    return PacedExtras(own, factor) if isinstance(factor, Tensor) else own


def unpaced(extras: Tree) -> tuple[Any, Tree]:
    """A method's extras, and the factor; () if there is no schedule."""
    return extras if isinstance(extras, PacedExtras) else (extras, ())


def _number(factor: Tree) -> float | Tensor:
    return factor if isinstance(factor, Tensor) else 1.0
