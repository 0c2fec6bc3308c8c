"""The target of a schema: how cells become labels, by public rules alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sordino.data import tables
from sordino.data.columns import FALSE, MISSING_LEVEL, OTHER_LEVEL, TRUE, check_levels, level_index, missing_cell
from sordino.errors import SordinoError, check_known, count

TASKS = ("classes", "quantity", "count", "survival")
MOST_INTERVALS, MOST_COUNT = 100, 1_000_000
LEAST_PREVALENCE = 1e-5  # of a class
LEAST_TIME = 2.0**-20  # of the last edge: stands for a time of 0, whose sign could not say whether the event happened
KEYS_OF_TASKS: Mapping[str, tuple[str, ...]] = {
    "levels": ("classes", "survival"),
    "recode": ("classes",),
    "range": ("quantity",),
    "maximum": ("count",),
    "event": ("survival",),
    "intervals": ("survival",),
    "prevalence": ("classes",),
    "find_prevalence": ("classes",),
}


@dataclass(frozen=True)
class Target:
    """What is predicted. A record whose target is missing is refused, because nobody can learn from it.

    Args:
        column: The column to predict; of survival, the time until the event or until the record was last seen.
        task: `classes`, `quantity`, `count` or `survival`.
        levels: Of classes, the public levels. Of survival, how the event column spells no and yes (optional).
        recode: Of classes, other spellings of a level.
        range: Of a quantity, the public range.
        maximum: Of a count, the largest that is learnt; larger ones are clamped.
        event: Of survival, the column that says whether the event happened at that time.
        intervals: Of survival, the public edges of intervals of time, from 0, in the unit of the table.
        prevalence: Of classes, the public share of each level, for class_weights = balanced.
        find_prevalence: Of classes, whether noised counts find the shares (`--private-statistics`).
    """

    column: str
    task: str = "classes"
    levels: tuple[str, ...] = ()
    recode: Mapping[str, str] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    maximum: float | None = None
    event: str | None = None
    intervals: tuple[float, ...] = ()
    prevalence: tuple[float, ...] = ()
    find_prevalence: bool = False

    def check(self) -> None:
        check_known("target.task", self.task, TASKS)
        for key, tasks in KEYS_OF_TASKS.items():
            if self.task not in tasks and getattr(self, key) not in (None, (), {}, False):
                raise SordinoError(f"target.{key}: it is for {' and '.join(tasks)}, and the task is {self.task}.")
        if self.task == "count":
            self._check_count()
        elif self.task == "survival":
            self._check_survival()
        elif self.task == "classes":
            check_levels(self.levels, "target", least=2)
            if wrong := [level for level in self.recode.values() if level not in self.levels]:
                raise SordinoError(f"target.recode: '{wrong[0]}' is none of the levels {', '.join(self.levels)}.")
            if self.prevalence and (
                len(self.prevalence) != len(self.levels)
                or not all(LEAST_PREVALENCE <= share < 1 for share in self.prevalence)
                or not 0.99 <= sum(self.prevalence) <= 1.01
            ):
                raise SordinoError(
                    f"target.prevalence: {list(self.prevalence)} must be one share of at least {LEAST_PREVALENCE:g} "
                    f"for each of the {len(self.levels)} levels, with a sum of 1."
                )
        elif self.range is None or not -math.inf < self.range[0] < self.range[1] < math.inf:
            why = "" if self.range is None else f"; {list(self.range)} is not one"
            if self.range is not None and self.range[0] > self.range[1]:
                why = f"; {list(self.range)} is reversed, write {list(self.range[::-1])}"
            raise SordinoError(f"target.range: a quantity needs a public range = [low, high]{why}.")

    def _check_count(self) -> None:
        if self.maximum is None or not (1 <= self.maximum <= MOST_COUNT and float(self.maximum).is_integer()):
            written = "none is given" if self.maximum is None else f"{self.maximum:g} is given"
            raise SordinoError(
                f"target.maximum: a count needs a public maximum, a whole number from 1 to {MOST_COUNT:,}; {written}."
            )

    def _check_survival(self) -> None:
        if self.event is None:
            raise SordinoError(
                "target.event: survival needs the column that says whether the event happened; `column` is the time."
            )
        if self.levels and (len(self.levels) != 2 or self.levels[0] == self.levels[1]):
            raise SordinoError("target.levels: of survival, give how the event column spells no and yes.")
        edges = self.intervals
        if not 2 <= len(edges) <= MOST_INTERVALS + 1 or edges[0] != 0 or not (np.diff(edges) > 0).all():
            raise SordinoError(
                "target.intervals: survival needs public edges of time that begin with 0 and rise, such as "
                f"[0, 365, 730, 1095], at most {MOST_INTERVALS + 1}."
            )

    @property
    def spelt(self) -> list[str]:
        """Of classes, how a cell may spell a level."""
        return [*self.levels, *self.recode]

    @property
    def unlisted(self) -> str:
        """What a cell that spells no level becomes, for people."""
        return "ends a run"

    @property
    def reads(self) -> dict[str, str]:
        """The columns that are read, each as `number` or `level`."""
        if self.event is not None:
            return {self.column: "number", self.event: "level"}
        return {self.column: "level" if self.task == "classes" else "number"}

    def encode(self, table: Any, missing: Sequence[str]) -> np.ndarray:
        """The target of every record.

        Classes become indices, quantities and counts are clamped to what is public. Survival becomes one number: the
        time, with a minus sign where the event did not happen. Who is still there at the last edge counts as last seen
        then.

        Args:
            table: A table with the columns of `reads`.
            missing: Cells that mean that a value is missing.
        """
        column = table.column(self.column)
        if self.task != "classes":
            values = tables.numbers(column, self.column, missing)
            if blank := int(np.isnan(values).sum()):
                raise self._absent(blank, self.column)
            if self.task == "survival":
                return self._signed(values, table.column(self.event), missing)
            if self.task == "count":
                if wrong := int(((values < 0) | (values != np.floor(values))).sum()):
                    raise SordinoError(
                        f"target: {count(wrong, 'cell')} of column '{self.column}' cannot be a count (0, 1, 2, …); "
                        'correct what is wrong, or use task = "quantity".'
                    )
                return np.asarray(np.minimum(values, self.maximum or 0), np.float32)
            assert self.range is not None
            return np.asarray(np.clip(values, *self.range), np.float32)
        spelt = self.spelt
        index = level_index(column, spelt, missing)
        if blank := int((index == MISSING_LEVEL).sum()):
            raise self._absent(blank, self.column)
        if other := int((index == OTHER_LEVEL).sum()):
            raise SordinoError(
                f"target: {count(other, 'cell')} of column '{self.column}' {'is' if other == 1 else 'are'} none of the "
                f"levels {', '.join(spelt[:8])}; add what is said there to levels, or map it to one with recode "
                "(sordino schema check shows it)."
            )
        position = [*range(len(self.levels)), *(self.levels.index(level) for level in self.recode.values())]
        return np.take(np.asarray(position, np.int64), index)

    def _signed(self, time: np.ndarray, column: Any, missing: Sequence[str]) -> np.ndarray:
        """Times until an event as they are, other times negative."""
        no, yes = ((self.levels[0],), (self.levels[1],)) if self.levels else (FALSE, TRUE)
        index = level_index(column, (*no, *yes), missing, lower=not self.levels)
        if blank := int((index == MISSING_LEVEL).sum()):
            raise self._absent(blank, str(self.event))
        if other := int((index == OTHER_LEVEL).sum()):
            raise SordinoError(
                f"target: {count(other, 'cell')} of column '{self.event}' {'is' if other == 1 else 'are'} neither "
                f"{no[0]} nor {yes[0]}; spell them in levels = [NO, YES]."
            )
        if wrong := int((time < 0).sum()):
            raise SordinoError(f"target: {wrong} times in column '{self.column}' are below 0; drop those records.")
        return signed_times(time, index >= len(no), self.intervals[-1])

    def _absent(self, missing: int, column: str) -> SordinoError:
        return SordinoError(f"target: {missing_cell(missing, column)}; drop those records.")

    def says(self) -> str:
        """The task, for people."""
        if self.task == "count":
            return f"count, 0 … {self.maximum:g}; larger ones are clamped"
        if self.task == "survival":
            return f"survival: event in {self.event}, {len(self.intervals) - 1} intervals up to {self.intervals[-1]:g}"
        return f"classes: {', '.join(self.levels)}" if self.task == "classes" else self.task


def signed_times(time: np.ndarray, event: np.ndarray, end: float) -> np.ndarray:
    """Survival as one number: the time, negative where no event happened before `end`, at most `end`."""
    happened = event & (time < end)
    return np.asarray(np.where(happened, 1, -1) * np.clip(time, LEAST_TIME * end, end), np.float32)
