"""What each option of a method does, and in which range it may lie.

A registry entry declares every option of its method. A site reads the declaration before it takes part in a run, so
that a coordinator cannot choose a clip at which float arithmetic no longer keeps the bound, or a local loop that never
ends. An option that is not declared is refused by every site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Bound(NamedTuple):
    """The kind of an option, and its range for numbers."""

    kind: str
    least: float = 0.0
    most: float = 0.0

    def allows(self, value: Any) -> bool:
        """Whether a value is of the declared kind and inside the range. NaN is outside every range.

        >>> CLIP.allows(1.0), CLIP.allows(1e-9), CLIP.allows(float("nan")), CHOICE.allows("tree")
        (True, False, False, True)
        """
        if self == CHOICE:
            return isinstance(value, str | bool)
        return isinstance(value, int | float) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a {self.kind}" if self == CHOICE else f"a {self.kind} in [{self.least:g}, {self.most:g}]"


CLIP = Bound("clip", 1e-6, 1e6)  # bounds what one record contributes; far from the ends of float32
COUNT = Bound("count", 0, 10_000)  # local steps, rounds, ranks: bounds the work of a site
STEP_SIZE = Bound("step size", 0, 1e6)
WEIGHT = Bound("weight", 0, 1e6)  # shares, decays, damping and regularisation
CHOICE = Bound("choice")  # a name or a switch
CLASS_WEIGHT = Bound("class weight", 1e-6, 1e6)  # of the spec's class_weights


def declare(
    *,
    clips: str = "",
    counts: str = "",
    step_sizes: str = "",
    weights: str = "",
    choices: str = "",
) -> Mapping[str, Bound]:
    """The options of a method by their kind; each argument is a list of names, separated by spaces.

    Args:
      clips: bounds on what one record contributes.
      counts: local steps and other numbers of repetitions.
      step_sizes: learning rates.
      weights: shares of the budget, decays, damping, regularisation.
      choices: options that are names or switches.

    Returns:
      One `Bound` per option.

    >>> {name: str(bound) for name, bound in declare(clips="clip", counts="steps local_steps").items()}
    {'clip': 'a clip in [1e-06, 1e+06]', 'steps': 'a count in [0, 10000]', 'local_steps': 'a count in [0, 10000]'}
    """
    kinds = ((clips, CLIP), (counts, COUNT), (step_sizes, STEP_SIZE), (weights, WEIGHT), (choices, CHOICE))
    return {name: bound for names, bound in kinds for name in names.split()}
