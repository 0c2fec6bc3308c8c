"""All tables of all papers, by name."""

from __future__ import annotations

from papers import adamw, adamw_accuracy, fednew, fednew_time, limits, sofim
from papers.tables import PaperTable


def tables() -> dict[str, PaperTable]:
    """Every table that `python -m papers` can run."""
    modules = (sofim, fednew, fednew_time, limits, adamw_accuracy, adamw)
    return {table.name: table for module in modules for table in module.TABLES}
