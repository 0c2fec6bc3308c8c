"""The figure of a table: ours, and dashed what the paper prints.

Errors of estimation have the figure of `sordino estimate`. Otherwise: figures by round where a table has three rounds
or more, by CPU seconds where it has them; else the last round by the numbers that the table varies. One line per
method, or what else is compared, and one panel for everything else that varies.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from typing import Any

from sordino.errors import SordinoError
from sordino.studies import estimation_report as report
from sordino.studies.figures import style

COLUMNS = 4  # of panels
SERIES = ("method", "form", "part", "what", "against")  # what a line may stand for, the first that varies
STYLE: Any = {"font.size": 8, "svg.hashsalt": "sordino", "svg.fonttype": "none"}
SVG: dict[str, Any] = {"format": "svg", "metadata": {"Date": None}}  # the same document, the same file
Point = tuple[float, dict[str, Any]]


def drawn(document: dict[str, Any]) -> str | None:
    """The figure of a table's document as SVG; None where matplotlib is not installed."""
    try:
        figure_of = report.pyplot()
    except SordinoError:
        return None
    import matplotlib

    if estimated := document.get("estimated"):
        return _estimated(estimated)
    lines = [{**line, "labels": {key: _number(v) for key, v in line["labels"].items()}} for line in document["lines"]]
    timed = {"accuracy", "seconds"} <= {line["labels"].get("measure") for line in lines}
    lines = by_seconds(lines) if timed else lines
    varied = {key: values(lines, key) for key in lines[0]["labels"] if key != "certified"}
    varied = {key: found for key, found in varied.items() if len(found) > 1}
    series = next((key for key in SERIES if key in varied), "")
    by_round = timed or len({t for line in lines for t in line["rounds"]}) > 2
    numbers = [key for key in (document["across"], *varied) if key in varied and numeric(varied[key])]
    x = "" if by_round or not numbers else numbers[0]
    panels = [key for key in varied if key not in (series, x)]
    places = [at for at in itertools.product(*(varied[key] for key in panels)) if shown(lines, panels, at)]
    curves = [at for at in places if any(len(line["rounds"]) > 1 for line in shown(lines, panels, at))]
    places = (curves or places) if by_round else places
    columns = min(COLUMNS, len(places))
    rows = math.ceil(len(places) / columns)
    with matplotlib.rc_context(STYLE):
        figure = figure_of(figsize=(3.2 * columns, 2.4 * rows + 0.6), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, at in itertools.zip_longest(grid, places):
            if at is None:
                axes.set_axis_off()
                continue
            mine = shown(lines, panels, at)
            for i, name in enumerate(varied.get(series, [""])):
                curve = [line for line in mine if not series or line["labels"].get(series) == name]
                _plot(axes, points(curve, x, varied.get(x, [])), word(name), style(i))
            axes.set_title(", ".join(f"{key} {word(value)}" for key, value in zip(panels, at, strict=True)))
            axes.set_xlabel(x or ("CPU seconds" if timed else "round"))
            if timed:
                axes.set_xscale("log")
            if x:
                axes.set_xticks(range(len(varied[x])), [word(value) for value in varied[x]])
            axes.grid(alpha=0.25)
        found = {
            label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if series:
            figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=COLUMNS, frameon=False)
        figure.suptitle(f"{document['table']}: {document['about']}")
        out = io.StringIO()
        figure.savefig(out, **SVG)
    return out.getvalue()


def _estimated(estimated: dict[str, Any]) -> str:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        if "pooled" in estimated:
            report.draw_mnist({estimated["task"]: (estimated["points"], estimated["pooled"])}, out, **SVG)
        else:
            report.draw(estimated["points"], out, **SVG)
    return out.getvalue().decode()


def by_seconds(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy by the seconds of the same round."""
    found: dict[Any, dict[str, Any]] = {}
    for line in lines:
        rest = {key: value for key, value in line["labels"].items() if key != "measure"}
        found.setdefault(tuple(rest.items()), {})[line["labels"]["measure"]] = line["rounds"]
    return [
        {"labels": dict(key), "rounds": {each["seconds"][t]["ours"]: cell for t, cell in each["accuracy"].items()}}
        for key, each in found.items()
    ]


def _number(value: Any) -> Any:
    """JSON has no infinity."""
    return math.inf if value == "inf" else value


def values(lines: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """What a label says, in the order of the lines; numbers in ascending order."""
    found = list(dict.fromkeys(line["labels"][key] for line in lines if key in line["labels"]))
    return sorted(found) if numeric(found) else found


def numeric(found: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in found)


def shown(lines: Sequence[dict[str, Any]], panels: Sequence[str], at: Sequence[Any]) -> list[dict[str, Any]]:
    """The lines of one panel."""
    wanted = dict(zip(panels, at, strict=True))
    return [line for line in lines if all(line["labels"].get(key) == value for key, value in wanted.items())]


def points(curve: Sequence[dict[str, Any]], x: str, ticks: Sequence[Any]) -> list[Point]:
    """Places on the axis, and figures there: by round, or of the last round by the label x."""
    if not x:
        return sorted(
            ((float(t), cell) for line in curve for t, cell in line["rounds"].items()), key=lambda each: each[0]
        )
    places = {value: float(k) for k, value in enumerate(ticks)}
    ends = [(places[line["labels"][x]], list(line["rounds"].values())[-1]) for line in curve if x in line["labels"]]
    return sorted(ends, key=lambda each: each[0])


def _plot(axes: Any, curve: Sequence[Point], name: str, look: dict[str, Any]) -> None:
    if ours := [(at, cell) for at, cell in curve if cell["ours"] is not None]:
        spread = [cell.get("std") or 0.0 for _, cell in ours]
        axes.errorbar([at for at, _ in ours], [cell["ours"] for _, cell in ours], spread, label=name, capsize=2, **look)
    printed = [(at, cell["published"]) for at, cell in curve if cell.get("published") is not None]
    if printed:
        faint = look | {"linestyle": ":", "markerfacecolor": "none", "alpha": 0.7}
        axes.plot(*zip(*printed, strict=True), label=f"{name}, published", **faint)


def word(value: Any) -> str:
    """A label or a number as pages write it."""
    if isinstance(value, float):
        return "∞" if math.isinf(value) else f"{value:g}"
    return str(value)
