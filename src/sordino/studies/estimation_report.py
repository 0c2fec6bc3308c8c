"""Tables and figures of the simulations in `estimation`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sordino.errors import SordinoError
from sordino.studies.estimation import LABELS, POOLED

COLORS = {
    "fedsgd": "#1f5fa8",
    "fedhybrid": "#2f8f5b",
    "fedavg-gdp": "#b3541e",
    "fednewton": "#7a3fa0",
    POOLED: "#777777",
}
NOTES = """\
*Error* is the mean over repetitions of |theta - theta_0|², ± its standard error. The *prediction* (in brackets) is the
closed form: sampling, privacy noise, bias and missing steps, to second order around theta_0. FedNewton's
prediction holds where the noise on every client's Hessian is small against its smallest eigenvalue; elsewhere it is
~~struck~~. FedAvg's bias is a second-order expansion in each client's own noise, and far too high where that noise is
larger than theta_0 itself (Poisson at small μ or n). *Pooled* is maximum likelihood from all pooled records,
without privacy. *Rate* is d / Σ min(n_i, n_i² μ²/d) with its constant set to 1: **a rate, not a certificate** (for μ
< 1 the form with μ² log(1/μ) is in the JSON; where n_i is the smaller of the two they are equal). *Bound* is the
information bound of the design (local minimax; the derivation is in `theory.information_bound`)."""


def short(value: float | None) -> str:
    """A number to three digits, without an exponent if possible."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}" if digits <= 7 else f"{value:.2e}"


def error_text(point: dict[str, Any], method: str, *, markdown: bool = True) -> str:
    """`error ± se (predicted)`."""
    entry = point["methods"][method]
    text = f"{short(entry['error'])} ± {short(entry['se'])}"
    if method not in point["predicted"]:
        return text
    known = short(point["predicted"][method]["total"])
    if method == "fednewton" and not point["fednewton_safe"]:
        known = f"~~{known}~~" if markdown else "unsafe"
    return f"{text} ({known})"


def varying(points: Sequence[dict[str, Any]]) -> str:
    """The quantity that varies over the points of one panel."""
    return "iterations" if len({p["iterations"] for p in points}) > 1 else "clients"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def errors_table(points: Sequence[dict[str, Any]]) -> str:
    """Measured and predicted error by budget and x."""
    x = varying(points)
    head = ["μ", x, "N", *LABELS.values(), POOLED, "rate", "bound"]
    rows = [
        [
            f"{p['mu']:g}",
            str(p[x]),
            f"{p['records']:,}",
            *(error_text(p, method) for method in LABELS),
            error_text(p, POOLED),
            short(p["rate"]),
            short(p["information_bound"]),
        ]
        for p in points
    ]
    return markdown(head, rows)


def gap_table(points: Sequence[dict[str, Any]]) -> str:
    """Measured error over the rate."""
    x = varying(points)
    head = ["μ", x, *LABELS.values(), POOLED, "bound / rate"]
    rows = [
        [
            f"{p['mu']:g}",
            str(p[x]),
            *(short(p["methods"][name]["error"] / p["rate"]) for name in (*LABELS, POOLED)),
            short(p["information_bound"] / p["rate"]),
        ]
        for p in points
    ]
    return markdown(head, rows)


def mnist_table(points: Sequence[dict[str, Any]], pooled: float) -> str:
    """Test accuracies in percent."""

    def cell(entry: dict[str, float] | None) -> str:
        return "not run" if entry is None else f"{100 * entry['accuracy']:.1f} ± {100 * entry['se']:.1f}"

    rows = [[f"{p['mu']:g}", *(cell(p["methods"].get(name)) for name in LABELS)] for p in points]
    return markdown(["μ", *LABELS.values()], rows) + f"\n\nPooled records, without privacy: {100 * pooled:.1f} %."


def pyplot() -> Any:
    """matplotlib's Figure, drawn without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise SordinoError("out: figures need matplotlib; pip install 'sordino[report]'.") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure


def draw(points: Sequence[dict[str, Any]], out: Path | BinaryIO, **how: Any) -> None:
    """Error against x: one row of panels per law of sizes, one column per budget. how: see matplotlib's savefig."""
    laws = list(dict.fromkeys(p["sizes"] for p in points))
    mus = sorted({p["mu"] for p in points})
    size = (max(7.5, 1.2 + 3.6 * len(mus)), 1.4 + 3.0 * len(laws))
    figure = pyplot()(figsize=size, dpi=95, layout="constrained")
    panels = figure.subplots(len(laws), len(mus), sharey="row", squeeze=False)
    for i, law in enumerate(laws):
        for j, mu in enumerate(mus):
            panel = panels[i][j]
            _panel(panel, [p for p in points if p["sizes"] == law and p["mu"] == mu])
            panel.set_title(f"sizes {law}, μ = {mu:g}", fontsize=9)
        panels[i][0].set_ylabel("mean |theta − theta_0|²")
    handles, labels = panels[0][0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda k: (labels[k] not in LABELS.values(), labels[k]))
    some = [handles[k] for k in order], [labels[k] for k in order]
    figure.legend(*some, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    model, count = points[0]["model"].capitalize(), points[0]["samples"]
    figure.suptitle(f"{model}, {count} repetitions: measured (dots, ± 2 SE) and predicted (dashes)", fontsize=10)
    figure.savefig(out, **how)


def _panel(panel: Any, points: Sequence[dict[str, Any]]) -> None:
    x = varying(points)
    at = [p[x] for p in points]
    for name in (*LABELS, POOLED):
        measured = [p["methods"][name] for p in points]
        bars = [2 * f["se"] for f in measured]
        label, color = LABELS.get(name, "pooled MLE, no privacy"), COLORS[name]
        look: dict[str, Any] = {"fmt": "o-", "ms": 3.5, "lw": 1, "color": color, "label": label}
        if name == "fedhybrid":  # often on top of FedSGD: an open square around its dot
            look |= {"fmt": "s-", "ms": 6, "mfc": "none", "zorder": 1}
        panel.errorbar(at, [f["error"] for f in measured], bars, **look)
        known = [p["predicted"].get(name, {}).get("total", math.nan) for p in points]
        if name == "fednewton":
            known = [k if p["fednewton_safe"] else math.nan for p, k in zip(points, known, strict=True)]
        panel.plot(at, known, "--", lw=1, color=color, alpha=0.8)
    panel.plot(
        at, [p["rate"] for p in points], ":", color="black", lw=1.2, label="d/Σ(n ∧ n²μ²/d): a rate, not a certificate"
    )
    if any(p["rate_with_log"] not in (None, p["rate"]) for p in points):
        panel.plot(at, [p["rate_with_log"] for p in points], ":", color="grey", lw=1.2, label="… with μ² log(1/μ)")
    panel.plot(at, [p["information_bound"] for p in points], "-.", color="black", lw=1, label="information bound")
    panel.set_yscale("log")
    if x == "iterations" or max(at) / min(at) > 5:
        panel.set_xscale("log")
        panel.set_xticks(at, [str(v) for v in at], fontsize=8)
        panel.minorticks_off()
    panel.set_xlabel("gradients per client" if x == "iterations" else "clients")
    panel.grid(alpha=0.25)


def draw_mnist(tasks: dict[str, tuple[Sequence[dict[str, Any]], float]], out: Path | BinaryIO, **how: Any) -> None:
    """Accuracy against mu, one panel per task. how: see matplotlib's savefig."""
    figure = pyplot()(figsize=(4.2 * len(tasks) + 0.6, 3.8), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for panel, (title, (points, pooled)) in zip(panels, tasks.items(), strict=True):
        at = [p["mu"] for p in points]
        for name, label in LABELS.items():
            measured = [p["methods"][name] for p in points]
            bars = [2 * f["se"] for f in measured]
            panel.errorbar(at, [f["accuracy"] for f in measured], bars, fmt="o-", ms=4, color=COLORS[name], label=label)
        panel.axhline(pooled, color=COLORS[POOLED], ls="--", lw=1, label="pooled, no privacy")
        panel.set(title=title, xlabel="μ", xscale="log")
        panel.set_xticks(at, [f"{v:g}" for v in at])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("test accuracy")
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(out, **how)
