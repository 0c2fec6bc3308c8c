"""The curvature of logistic regression on real data, and what knowing it gains. Writes results/spectra.{json,md}.

    python benchmarks/spectra.py DATA_DIR

Records are those of results/auto.md (norm 10, with a constant feature). A is the mean of u u^T. The optimum is that of
logistic regression with C = 1 on at most RECORDS records; the largest eigenvalue of its Hessian is found by Lanczos'
method. What curvature gains is read from results/auto.json: `auto`, which knows A, less the tuned `dp-fedgd`, at
epsilon 10 where only sums are visible.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression

import auto
import compact
from provenance import provenance

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "spectra.json"
RECORDS, EPSILON, TRUST = 8_000, 10.0, "secure-aggregation"
Floats = np.ndarray[Any, np.dtype[np.float64]]


def largest(u: Floats, p: Floats) -> float:
    """The largest eigenvalue of the mean of (diag p - p p^T) (x) u u^T."""
    n, (rows, outputs) = len(u), (u.shape[1], p.shape[1])

    def times(v: Floats) -> Floats:
        z = u @ v.reshape(rows, outputs)
        return np.asarray(u.T @ (p * (z - (p * z).sum(1, keepdims=True))) / n).ravel()

    operator = LinearOperator((rows * outputs,) * 2, matvec=times, dtype=np.float64)
    return float(
        eigsh(
            operator, k=1, tol=1e-3, return_eigenvectors=False, v0=np.random.default_rng(0).normal(size=rows * outputs)
        )[0]
    )


def measured(name: str, folder: Path) -> dict[str, float]:
    """Of one data set."""
    dataset = auto.read(name, folder)
    rng = np.random.default_rng(0)
    some = rng.permutation(len(dataset.x_train))[:RECORDS]
    x, y, classes = dataset.x_train[some].astype(np.float64), dataset.y_train[some], len(dataset.classes)
    u = np.c_[x, np.ones(len(x))]
    values = np.linalg.eigvalsh(u.T @ u / len(u))[::-1].clip(0)
    fitted = LogisticRegression(C=1.0, max_iter=300).fit(x, y)
    p = fitted.predict_proba(x)
    if p.shape[1] < classes:
        p = np.c_[p, np.full((len(p), classes - p.shape[1]), 0.0)]
    at_zero = largest(u, softmax(np.zeros((len(u), classes)), 1))
    return {
        "features": x.shape[1],
        "largest": values[0],
        "over_median": values[0] / max(float(np.median(values)), 1e-12),
        "rank": values.sum() ** 2 / (values**2).sum(),
        "at_optimum": largest(u, p) / at_zero,
    }


def gains(rows: list[Any], name: str) -> list[float]:
    """`auto` less the tuned `dp-fedgd`, in points, after each of the rounds of results/auto."""
    cells = {cell[:4]: cell for cell in auto.read_rows(rows)}
    ours, plain = (cells[name, row, TRUST, EPSILON].accuracy for row in (auto.PLAIN, "dp-fedgd"))
    return [100 * (a - b) for a, b in zip(ours, plain, strict=True)]


def page(document: dict[str, Any]) -> str:
    """The page, from the JSON alone."""
    lines = [
        "# Curvature of logistic regression on real data",
        "",
        f"`{document['provenance']['command']}`. A is the mean of u uᵀ over at most {RECORDS:,} records of norm 10, "
        "with a constant feature: its largest eigenvalue λ, that over the median one, and its effective rank "
        "(tr A)² / tr A². Then the largest eigenvalue of the Hessian at the optimum (C = 1) over that at zero. The "
        f"last column is what knowing A gains: `auto` less tuned `dp-fedgd` in results/auto.md, ε = {EPSILON:g}, "
        f"{TRUST}, after {auto.ROUNDS[0]} → {auto.ROUNDS[1]} rounds.",
        "",
        "| | features | λ of A | λ / median | effective rank | at the optimum / at zero | gain, points |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        gain = " → ".join(f"{each:+.1f}" for each in row["gain"])
        numbers = f"{row['largest']:.1f} | {row['over_median']:,.0f} | {row['rank']:.1f} | {row['at_optimum']:.2f}"
        lines.append(f"| {row['data']} | {row['features']} | {numbers} | {gain} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    words = parser.parse_args()
    known = json.loads(auto.OUT.read_text(encoding="utf-8"))["rows"]
    rows = [{"data": name, **measured(name, words.data_dir), "gain": gains(known, name)} for name in auto.FILES]
    document = {"provenance": provenance("python benchmarks/spectra.py DATA_DIR"), "rows": rows}
    words.out.write_text(compact.text(document), encoding="utf-8")
    kept = json.loads(words.out.read_text(encoding="utf-8"))
    words.out.with_suffix(".md").write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
