"""The figures of a report for print: PNG at 300 dpi, and SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError
from sordino.studies.estimation_report import pyplot

# After Okabe and Ito, with 3:1 contrast against white and near-black. Lines also differ in dashes and markers.
LIGHT = ["#0072b2", "#c84e00", "#00805c", "#a8478a", "#946c00", "#1a1a1a", "#808080"]
DARK = ["#5ab4f0", "#ff9154", "#3ecf9f", "#e79ac6", "#f0c848", "#f4f4f4", "#989898"]
DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3], [12, 4]]
MARKERS = ["o", "s", "^", "D", "v", "X"]  # the page draws the same six in the same order


def draw(view: dict[str, Any], out: Path) -> list[Path]:
    """Draw all figures of a report's `view`; none if matplotlib is not installed."""
    try:
        figure_of = pyplot()
    except SordinoError:
        return []
    import matplotlib

    out.mkdir(parents=True, exist_ok=True)
    written = []
    look: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sordino"}
    with matplotlib.rc_context(look):
        for name, figure in _figures(view, figure_of):
            for ending, facts in (("png", {}), ("svg", {"Date": None})):
                path = out / f"{name}.{ending}"
                figure.savefig(path, dpi=300, metadata=facts)
                written.append(path)
    return written


def style(i: int) -> dict[str, Any]:
    """Style of the i-th line. Colours repeat after seven lines, with another dash and marker."""
    shift = i + i // len(LIGHT)
    dash = DASHES[shift % len(DASHES)]
    return {
        "color": LIGHT[i % len(LIGHT)],
        "linestyle": (0, [part / 2 for part in dash]) if dash else "-",
        "marker": MARKERS[shift % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.3,
    }


def _figures(view: dict[str, Any], figure_of: Any) -> Iterator[tuple[str, Any]]:
    for name in view["names"]:
        yield f"{view['measure']['key']}_epsilon_{_filed(name)}", _trajectories(view, name, figure_of)
    if len(view["names"]) > 1:
        yield "frontier", _frontier(view, figure_of)
    noisy = [curve for curve in view["curves"] if curve["noise"] and any(curve["noise"])]
    if noisy:
        yield "noise", _noise(noisy, figure_of)
    if view["partition"]:
        yield "partition", _partition(view, figure_of)
    for k, sweep in enumerate(view["sensitivity"]):
        yield f"sensitivity_{k}", _sensitivity(view, sweep, figure_of)
    for kind, name in itertools.product(("calibration", "roc", "survival"), view["names"]):
        if lines := _first_seed(view, kind, name):
            yield f"{kind}_epsilon_{_filed(name)}", _model_curves(view, kind, name, lines, figure_of)


def _filed(name: str) -> str:
    return "infinity" if name == "∞" else name


def _first_seed(view: dict[str, Any], kind: str, name: str) -> list[dict[str, Any]]:
    """The curves of the first seed at one ε."""
    lines: list[dict[str, Any]] = next(iter(view["model_curves"][kind].values()), [])
    return [line for line in lines if line["epsilon"] == name]


def _panel(figure_of: Any, title: str = "", size: tuple[float, float] = (5.5, 3.6)) -> tuple[Any, Any]:
    figure = figure_of(figsize=size, layout="constrained")
    panel = figure.subplots()
    panel.set_title(_safe(title), fontsize=9)
    panel.grid(alpha=0.25)
    return figure, panel


def _safe(label: str) -> str:
    """Escape `$`, so that matplotlib does not read a label as a formula."""
    return label.replace("$", r"\$")


def _shown(view: dict[str, Any], values: Sequence[float | None]) -> list[float]:
    factor = view["measure"]["factor"]
    return [math.nan if v is None else factor * v for v in values]


def _trajectories(view: dict[str, Any], name: str, figure_of: Any) -> Any:
    figure, panel = _panel(figure_of, f"ε = {name}")
    for i, label in enumerate(view["labels"]):
        for curve in view["curves"]:
            if (curve["label"], curve["epsilon"]) != (label, name):
                continue
            mean, std = _shown(view, curve["mean"]), _shown(view, curve["std"])
            t = range(1, len(mean) + 1)
            marks = [r - 1 for r in view["rounds"] if r <= len(mean)]
            panel.plot(t, mean, label=_safe(label), markevery=marks, **style(i))
            low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
            panel.fill_between(t, low, high, color=style(i)["color"], alpha=0.15, linewidth=0)
    panel.set(xlabel="round", ylabel=view["measure"]["label"])
    panel.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure)
    return figure


def _frontier(view: dict[str, Any], figure_of: Any) -> Any:
    figure, panel = _panel(figure_of)
    budgets = [e for e in view["epsilons"] if e is not None]
    beyond = max(budgets) * max(2.0, (max(budgets) / min(budgets)) ** 0.25) if budgets else 1.0
    at = dict(zip(view["names"], (beyond if e is None else e for e in view["epsilons"]), strict=True))
    for i, label in enumerate(view["labels"]):
        curves = [curve for curve in view["curves"] if curve["label"] == label]
        ends, bars = (_shown(view, [c[key][-1] for c in curves]) for key in ("mean", "std"))
        panel.errorbar([at[c["epsilon"]] for c in curves], ends, bars, label=_safe(label), capsize=2, **style(i))
    panel.set(xscale="log", xlabel="ε", ylabel=_last(view))
    panel.set_xticks(list(at.values()), list(at))
    panel.minorticks_off()
    if "∞" in at and budgets:
        panel.axvline(math.sqrt(beyond * max(budgets)), color="#777777", linestyle=":", linewidth=1)
    _legend(figure)
    return figure


def _noise(curves: Sequence[dict[str, Any]], figure_of: Any) -> Any:
    """One panel per method, one colour per ε. A signal has gaps where the noise hides it."""
    names = list(dict.fromkeys(curve["label"] for curve in curves))
    colors = {e: LIGHT[k % len(LIGHT)] for k, e in enumerate(dict.fromkeys(curve["epsilon"] for curve in curves))}
    across = min(3, len(names))
    down = -(-len(names) // across)
    figure = figure_of(figsize=(max(4.0, 2.6 * across), 0.6 + 2.1 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, name in zip(panels, names, strict=False):
        for curve in curves:
            if curve["label"] == name:
                t, e = range(1, len(curve["noise"]) + 1), curve["epsilon"]
                signal, noise = ([v or math.nan for v in curve[key]] for key in ("signal", "noise"))
                panel.plot(
                    t, signal, color=colors[e], linewidth=1.2, marker=".", markersize=3, label=f"signal, ε = {e}"
                )
                panel.plot(t, noise, color=colors[e], linewidth=1.2, linestyle="--", label=f"noise, ε = {e}")
        panel.set_yscale("log")
        panel.yaxis.set_minor_formatter("")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_title(_safe(name), fontsize=8)
        panel.grid(alpha=0.25)
    for k, panel in enumerate(panels):
        panel.set_visible(k < len(names))
        if k + across >= len(names):  # no panel below it
            panel.set_xlabel("round", fontsize=8)
            panel.tick_params(labelbottom=True)
    figure.supylabel("norm of the aggregate", fontsize=9)
    _legend(figure)
    return figure


def _partition(view: dict[str, Any], figure_of: Any) -> Any:
    seed, counts = next(iter(view["partition"].items()))
    size = (1.5 + 0.45 * len(view["classes"]), 1.2 + 0.2 * len(counts))
    figure, panel = _panel(figure_of, f"records by client and class (seed {seed})", size)
    panel.grid(visible=False)
    figure.colorbar(panel.imshow(counts, aspect="auto", cmap="cividis"), ax=panel)
    panel.set_xticks(range(len(view["classes"])), [_safe(name) for name in view["classes"]], rotation=45, ha="right")
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.set(xlabel="class", ylabel="client")
    return figure


def _last(view: dict[str, Any]) -> str:
    name, comma, unit = view["measure"]["label"].partition(",")
    return f"{name} at the last round{comma}{unit}"


def _sensitivity(view: dict[str, Any], sweep: dict[str, Any], figure_of: Any) -> Any:
    figure, panel = _panel(figure_of)
    for i, line in enumerate(sweep["lines"]):
        mean, std = _shown(view, line["mean"]), _shown(view, line["std"])
        panel.errorbar(range(len(mean)), mean, std, label=_safe(line["label"]), capsize=2, **style(i))
    panel.set_xticks(range(len(sweep["values"])), [_safe(value) for value in sweep["values"]])
    panel.set(xlabel=_safe(sweep["vary"]), ylabel=_last(view))
    _legend(figure)
    return figure


AXES = {
    "calibration": ("predicted", "observed"),
    "roc": ("1 − specificity", "sensitivity"),
    "survival": ("time", "share without the event"),
}


def _model_curves(view: dict[str, Any], kind: str, name: str, lines: Sequence[dict[str, Any]], figure_of: Any) -> Any:
    """Predicted against observed, ROC or survival of the last models, with 95 % intervals where there are any."""
    figure, panel = _panel(figure_of, f"ε = {name}, seed {next(iter(view['model_curves'][kind]))}")
    for line in lines:
        columns, look = list(zip(*line["points"], strict=True)), style(view["labels"].index(line["label"]))
        if kind == "calibration":
            bars = _bars(columns[1], columns[2], columns[3])
            panel.errorbar(columns[0], columns[1], bars, label=_safe(line["label"]), capsize=2, **look)
        else:
            shape = {**look, "marker": ""} if kind == "roc" else look
            panel.plot(columns[0], columns[1], label=_safe(line["label"]), **shape)
    if kind == "survival":
        time, _, observed, low, high = zip(*lines[0]["points"], strict=True)
        panel.errorbar(time, observed, _bars(observed, low, high), label="observed", capsize=2, color="#777777")
    else:
        panel.axline((0, 0), slope=1, color="#777777", linestyle=":", linewidth=1)
    panel.set(xlabel=AXES[kind][0], ylabel=AXES[kind][1])
    _legend(figure)
    return figure


def _bars(middle: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Lengths of error bars; rounding may put an end beyond the middle."""
    return [
        [max(0.0, m - a) for m, a in zip(middle, low, strict=True)],
        [max(0.0, b - m) for m, b in zip(middle, high, strict=True)],
    ]


def _legend(figure: Any) -> None:
    """Put the legend below the figure, with each line once."""
    handles: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = 3 if len(handles) % 2 or len(handles) == 6 else 2
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
