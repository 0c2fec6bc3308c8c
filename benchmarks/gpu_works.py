"""What `gpu.py` and `jax_sums.py` share: their works, the turns in which steps are timed, and the file of results.

It needs neither torch nor jax.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

CLASSES, CLIP, SIGMA, LENGTH = 10, 0.1, 1.0, 128
OWN_PROVENANCE = ("command", "commit", "uncommitted_changes_in_src")  # that a work keeps if others are measured later
S = TypeVar("S")


class Work(NamedTuple):
    """A network, what is trained of it, and the batch of one step."""

    network: str  # vit, roberta or resnet
    trained: str  # full or lora
    batch: int
    goal: float = 0.0  # private / plain speed of Sordino that is aimed at

    @property
    def name(self) -> str:
        return f"{self.network}-{self.trained}-{self.batch}"


WORKS = (
    Work("vit", "full", 32, 0.6),
    Work("roberta", "full", 32, 0.6),
    Work("resnet", "full", 256, 0.5),
    Work("vit", "lora", 64, 0.9),
    Work("vit", "lora", 256, 1.0),
    Work("roberta", "lora", 64, 0.9),
    Work("roberta", "lora", 256, 1.0),
)


def interleaved(
    steps: Mapping[str, S], repetitions: int, seconds: Callable[[S, int], float], *, cpu: bool
) -> dict[str, list[float]]:
    """All steps in turns, again and again, so that a slow spell of the machine meets all of them.

    Args:
      steps: by name.
      repetitions: how often each is timed.
      seconds: runs a step so many times and returns the seconds per step.
      cpu: on a GPU at least 10 steps run in a row, so that launching one overlaps with computing the one before.

    Returns:
      The seconds of each step, one number per repetition.
    """
    counts = {name: max(1 if cpu else 10, round(0.1 / seconds(step, 2))) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            samples[name].append(seconds(step, counts[name]))
    return samples


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results, with the works of an older file that were not measured again, which say how they were."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {"works": {}}
    about = {key: before["provenance"][key] for key in OWN_PROVENANCE} if before["works"] else {}
    older = {name: {"provenance": about} | work for name, work in before["works"].items()}
    names = [work.name for work in WORKS]
    works = dict(sorted((older | results["works"]).items(), key=lambda item: names.index(item[0])))
    path.write_text(json.dumps(results | {"works": works}, separators=(",", ":")) + "\n")
