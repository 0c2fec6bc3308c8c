"""A run of a federation that finds what a schema leaves open: ranges, levels and shares, from noised counts.

It is a run of its own, with one round, before the training: `statistics_epsilon` in federation.toml asks for it. Its
terms hold the hash of the schema as people wrote it, and how many cells each block of counts has, so that every party
computes the same plan. Each site counts its training records, with the bounds of `models.tally`, pays from the budget
of these records, and answers noised counts, under masks where rounds are masked. What follows from the sum is
post-processing: coordinator and sites write the completed schema.toml by themselves, from the same numbers. The
training is a second run, whose terms hold the hash of the completed schema and say what in it was found.
"""

from __future__ import annotations

from sordino.data.columns import PREVALENCE
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.models.tally import ColumnTally
from sordino.training.private_statistics import statistics_tally


def filled(schema: Schema) -> Schema:
    """The schema with its widest ranges, all candidates and even shares where it leaves them open: to count with."""
    schema = schema.at_its_widest
    if PREVALENCE in schema.unknown:
        schema = schema.with_prevalence((1 / len(schema.classes),) * len(schema.classes))
    return schema


def tally_of(schema: Schema | None) -> ColumnTally:
    """What a run for a schema counts.

    Raises:
      SordinoError: there is no schema, or it leaves nothing open.
    """
    if schema is None or not schema.unknown:
        raise SordinoError(
            "statistics_epsilon: it finds ranges of columns with within, levels of columns with candidates and shares "
            f"of classes, and {'there is no schema' if schema is None else 'the schema leaves none open'}; remove "
            "statistics_epsilon."
        )
    return statistics_tally(schema)


def cells_of(schema: Schema | None) -> tuple[int, ...]:
    """The cells of each block of the counts, which are public."""
    return tuple(block.cells for block in tally_of(schema).layout)


def found_in(schema: Schema | None) -> tuple[str, ...]:
    """What noised counts found of a completed schema: names of columns, and `target.prevalence`."""
    if schema is None or schema.unknown:
        return ()
    return (*schema.searched, *schema.merged, *([PREVALENCE] if schema.counted else []))
