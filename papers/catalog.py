"""All tables of all papers, by name."""

from __future__ import annotations

from papers import adamw, fednew, fednew_time, sofim
from papers.tables import PaperTable


def tables() -> dict[str, PaperTable]:
    """Every table that `python -m papers` can run."""
    return {table.name: table for table in (*sofim.TABLES, *fednew.TABLES, *fednew_time.TABLES, *adamw.TABLES)}
