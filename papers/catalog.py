"""All tables of all papers, by name."""

from __future__ import annotations

from papers import adamw, fednew, fednew_time, limits, sofim
from papers.tables import PaperTable


def tables() -> dict[str, PaperTable]:
    """Every table that `python -m papers` can run."""
    papers = (sofim.TABLES, fednew.TABLES, fednew_time.TABLES, limits.TABLES, adamw.TABLES)
    return {table.name: table for paper in papers for table in paper}
