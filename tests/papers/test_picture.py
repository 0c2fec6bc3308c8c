"""The picture of a table: what stands on its axis, in its lines and in its panels."""

import pytest

from papers import picture, tables
from sordino.errors import SordinoError

pytestmark = pytest.mark.draws
CELL = {"ours": 70.0, "std": 0.5, "published": 65.0}


def line(rounds=("70",), cell=CELL, **labels):
    return {"labels": labels, "rounds": dict.fromkeys(rounds, cell)}


def drawn(lines, across="epsilon"):
    return picture.drawn({"table": "one", "about": "two", "across": across, "lines": lines})


def test_budgets_stand_on_the_axis_in_order_and_methods_are_lines():
    lines = [line(method=name, epsilon=e) for name in ("A-one", "B-two") for e in (10.0, 1.0, "inf")]
    svg = drawn(lines)
    assert [svg.index(f">{tick}<") for tick in ("1", "10", "∞")] == sorted(
        svg.index(f">{t}<") for t in ("1", "10", "∞")
    )
    for name in ("A-one", "B-two", "A-one, published"):
        assert f">{name}<" in svg
    assert "published" not in drawn([line(cell={**CELL, "published": None}, epsilon=e) for e in (1.0, 2.0)])


def test_three_rounds_make_curves_with_a_panel_for_each_budget():
    lines = [line(("10", "20", "70"), method="A", epsilon=e) for e in (1.0, "inf")]
    svg = drawn([*lines, line(("10",), method="A", epsilon=5.0)])
    assert ">round<" in svg
    assert ">epsilon 1<" in svg
    assert ">epsilon ∞<" in svg
    assert ">epsilon 5<" not in svg, "one point is no curve"


def test_seconds_become_the_axis():
    lines = [
        line(("10", "70"), {"ours": ours, "std": None}, method="A", measure=measure, epsilon=e)
        for e in (1.0, 2.0)
        for measure, ours in (("accuracy", 70.0), ("seconds", 3.0))
    ]
    assert ">CPU seconds<" in drawn(lines, "measure")
    (found,) = picture.by_seconds(lines[:2])
    assert found["labels"] == {"method": "A", "epsilon": 1.0}
    assert found["rounds"] == {3.0: {"ours": 70.0, "std": None}}


def test_one_line_is_a_picture_too():
    assert "<svg" in drawn([line(method="A", epsilon=1.0)])


def test_without_matplotlib_there_is_none(monkeypatch, tmp_path):
    def refuse():
        raise SordinoError("none")

    document = {"table": "one", "about": "two", "across": "epsilon", "lines": [line(method="A", epsilon=1.0)]}
    document |= {"command": "c", "device": "cpu", "notes": []}
    document["lines"][0]["rounds"]["70"] = {**CELL, "difference": 5.0}
    assert [path.suffix for path in tables.write(document, tmp_path)] == [".md", ".json", ".svg"]
    monkeypatch.setattr(picture.report, "pyplot", refuse)
    assert [path.suffix for path in tables.write(document, tmp_path)] == [".md", ".json"]


@pytest.mark.parametrize("across", ["epsilon", "rho"])
def test_what_is_left_is_in_panels(across):
    lines = [line(form="gradient", epsilon=e, rho=r) for e in (1.0, 5.0) for r in (0.5, 2.0)]
    other = "rho" if across == "epsilon" else "epsilon"
    svg = drawn(lines, across)
    assert f">{across}<" in svg
    assert f">{other} {'0.5' if other == 'rho' else '5'}<" in svg
