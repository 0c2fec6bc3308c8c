"""The picture of a black-box audit: what the certificate allows, and what two attackers achieved."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from scipy.special import ndtr, ndtri

from sordino import files
from sordino.studies.black_box import BlackBox
from sordino.studies.figures import LIGHT

CERTIFIED, COLORS = LIGHT[1], (LIGHT[0], LIGHT[2])


def draw(audit: BlackBox, path: Path) -> bool:
    """Draw ROC curves below the certified limit, and epsilons side by side. False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
    rates = np.linspace(0, 1, 400)
    left.plot(rates, most_true_positives(audit, rates), color=CERTIFIED, lw=2, label="limit by the certificate")
    left.fill_between(rates, most_true_positives(audit, rates), 1, color=CERTIFIED, alpha=0.08, lw=0)
    for color, each in zip(COLORS, audit.attackers, strict=True):
        left.plot(*zip(*each.roc, strict=True), color=color, lw=1.6, label=f"sees {each.sees}: AUC {each.auc:.3f}")
    left.plot((0, 1), (0, 1), color="#777777", ls=":", lw=1, label="a blind guess")
    left.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1), ylim=(0, 1))
    left.legend(loc="lower right", fontsize=7)
    bars = [("certified ε", audit.certified, CERTIFIED)]
    for color, each in zip(COLORS, audit.attackers, strict=True):
        bars.append((f"{each.sees},\nby thresholds", each.lower_thresholds, color))
        if each.lower_gaussian is not None:
            bars.append((f"{each.sees},\nunder Gaussian DP", each.lower_gaussian, color))
    names, values, colors = zip(*bars, strict=True)
    drawn = right.barh(range(len(bars)), values, color=colors)
    right.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
    right.set_yticks(range(len(bars)), names, fontsize=8)
    right.invert_yaxis()
    right.margins(x=0.15)
    right.set_xlabel(f"ε at δ = {audit.delta:g}; lower bounds at {audit.confidence:.0%} confidence")
    figure.suptitle(f"{audit.method}: two attacks on one canary, {audit.runs:,} runs per data set", fontsize=10)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    files.write(path, drawn.getvalue())  # for its owner alone
    return True


def most_true_positives(audit: BlackBox, rates: np.ndarray) -> np.ndarray:
    """The largest true positive rate that the certificate allows at each false positive rate."""
    if audit.mu is not None:
        return np.asarray(ndtr(ndtri(rates) + audit.mu))
    grown = np.exp(audit.certified)
    return np.asarray(np.minimum.reduce([grown * rates + audit.delta, 1 - (1 - audit.delta - rates) / grown, rates**0]))
