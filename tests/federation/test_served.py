"""The table of what runs where is the one on the page, and says yes wherever it can."""

from pathlib import Path

import pytest

from sordino.core import Unit
from sordino.federation import served


@pytest.fixture(scope="module")
def rows():
    return served.table()


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "secure-aggregation.md").read_text(encoding="utf-8")
    assert served.page() in page, "put the output of python -m sordino.federation.served there"


def test_what_is_certified_in_a_simulation_runs_under_masks(rows):
    """But for longer streams than are proved."""
    but = {"long": {"rounds": 5000}}
    for row in rows:
        for unit in Unit:
            simulated, masked = row.cells["simulated", unit], row.cells["masked", unit]
            assert masked == simulated or row.options == but[masked]
    assert {cell for row in rows for cell in row.cells.values()} == {"yes", "level", "unproved", *but}


def test_what_is_certified_under_masks_is_certified_in_the_open(rows):
    for row in rows:
        for unit in Unit:
            assert row.cells["open", unit] == "yes" or row.cells["masked", unit] != "yes"
    assert rows[0].method == "auto"
    assert set(rows[0].cells.values()) == {"yes"}


def test_an_unknown_refusal_is_not_a_reason(monkeypatch):
    monkeypatch.setattr(served, "REASONS", ())
    with pytest.raises(served.SordinoError, match="is not proved private"):
        served._tried("dp-scaffold", {}, "simulated", Unit.RECORD)
