"""The tallies that `sordino check` and `sordino audit` try to break: releases that train nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sordino.core import Method, Unit
from sordino.evidence.certificate import EVALUATION, STATISTICS
from sordino.methods.tally import tally_method
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear, Loss
from sordino.models.tally import ColumnTally, CountTally, ErrorTally, ScoreTally, SurvivalTally, score_edges

BINS = 8


class CheckedTally(NamedTuple):
    """A method that releases one tally, and the tallies that stand in for its model."""

    method: Method
    models: tuple[Any, ...]

    def at(self, unit: Unit) -> Method:
        """The method for records, or for persons."""
        return tally_method(self.method.name, self.models[0], unit)


def _scores(*models: Linear) -> CheckedTally:
    tallies = tuple(ScoreTally(model, score_edges(BINS)) for model in models)
    return CheckedTally(tally_method(EVALUATION, tallies[0]), tallies)


def tallies() -> Mapping[str, CheckedTally]:
    """What is checked and audited, by the name that reports show."""
    columns = ColumnTally(5, (("age", 0, True),), BINS, classes=2, labels=True, levels=(("ward", 2, 3),))
    errors = ErrorTally(Linear(3, 1, Loss.SQUARES))
    counts = CountTally(Linear(3, 1, Loss.POISSON), 5.0)
    survival = SurvivalTally(Hazards(3, (0.0, 1.0, 2.0)), score_edges(4))
    return {
        EVALUATION: _scores(Linear(3, 1, Loss.LOGISTIC), Linear(3, 3)),
        STATISTICS: CheckedTally(tally_method(STATISTICS, columns), (columns,)),
        f"{EVALUATION} of quantities": CheckedTally(tally_method(EVALUATION, errors), (errors,)),
        f"{EVALUATION} of counts": CheckedTally(tally_method(EVALUATION, counts), (counts,)),
        f"{EVALUATION} of survival": CheckedTally(tally_method(EVALUATION, survival), (survival,)),
    }
