"""A table of a million rows and 50 columns: from file to trained model, against bare matrix products.

    python benchmarks/million.py [--rows 1000000] [--folder DIR]        results/million.json and results/million.md

`--folder` keeps the tables for the next call, and `--file data.csv` measures one of them.
The table has 40 numbers (10 with blank cells), 8 categories of 5 levels, a boolean and a target, as CSV and Parquet.
The baseline reads the file with pyarrow and then makes, per round, the two products of a linear model's gradient with
the encoded training records in float32: logits and their transpose. Ours is what `sordino run` does: read, encode by
the schema, hold a fifth out, scale, train 70 rounds with noise from a secret source, evaluate, write the run. Each part
runs in a process of its own, whose peak memory is compared with the encoded table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from provenance import provenance

ROOT = Path(__file__).parents[1]
ROUNDS, NUMBERS, CATEGORIES, LEVELS, BLANKS = 70, 40, 8, 5, 10
METHODS, FILES = ("auto", "dp-fedgd"), ("data.csv", "data.parquet")


def make(folder: Path, rows: int) -> None:
    """Write data.csv, data.parquet and schema.toml."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {}
    described: dict[str, Any] = {}
    logit = np.zeros(rows)
    for k in range(NUMBERS):
        values = rng.normal(50, 15, rows).round(2)
        logit += (values - 50) / 15 * rng.normal(0, 0.2)
        blank = rng.random(rows) < 0.05 if k < BLANKS else None
        columns[f"number{k}"] = pa.array(values, mask=blank)
        described[f"number{k}"] = {"type": "number", "range": [0, 100], "indicator": k < BLANKS}
    words = [f"level {k}" for k in range(LEVELS)]
    for k in range(CATEGORIES):
        index = rng.integers(0, LEVELS, rows)
        logit += rng.normal(0, 0.2, LEVELS)[index]
        columns[f"category{k}"] = pa.DictionaryArray.from_arrays(index.astype(np.int8), words).cast(pa.string())
        described[f"category{k}"] = {"type": "category", "levels": words}
    flag = rng.random(rows) < 0.4
    columns["flag"] = pa.array(flag)
    described["flag"] = {"type": "boolean"}
    died = rng.random(rows) < 1 / (1 + np.exp(-(logit + 0.5 * flag - 1)))
    columns["died"] = pa.array(np.where(died, "yes", "no"))
    table = pa.table(columns)
    pa.csv.write_csv(table, folder / "data.csv")
    pa.parquet.write_table(table, folder / "data.parquet")
    target = {"column": "died", "levels": ["no", "yes"]}
    (folder / "schema.toml").write_text(tomli_w.dumps({"target": target, "columns": described}))


def read_bare(path: Path) -> float:
    """Seconds of pyarrow for the whole file."""
    import pyarrow.csv
    import pyarrow.parquet

    began = time.perf_counter()
    table = pyarrow.csv.read_csv(path) if path.suffix == ".csv" else pyarrow.parquet.read_table(path)
    assert table.num_columns == NUMBERS + CATEGORIES + 2
    return time.perf_counter() - began


def products(rows: int, features: int) -> float:
    """Seconds of the matrix products of all rounds, with two outputs as softmax regression has."""
    import torch

    x = torch.randn(rows, features)
    theta = torch.randn(features, 2)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        x.T @ (x @ theta)
    return time.perf_counter() - began


def ours(path: Path, method: str) -> dict[str, Any]:
    """Seconds of a run, by part."""
    from sordino.training import run
    from sordino.training.spec import Spec

    values = {"data": str(path), "schema": str(path.with_name("schema.toml")), "method": method, "rounds": ROUNDS}
    values |= {"clients": 10, "epsilon": 1.0} | ({"normalize": "table:49", "lr": 0.5} if method == "dp-fedgd" else {})
    began, busy = time.perf_counter(), time.process_time()
    prepared = run.prepare(Spec.of(values))
    loaded = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / "run"
        run.start(prepared, out)
        history = list(run.rounds(prepared, out))
        trained = time.perf_counter()
        run.finish(prepared, out, history)
        metrics = run.final_metrics(prepared, out)
    ended = time.perf_counter()
    return {
        "load_and_encode": loaded - began,
        "train": trained - loaded,
        "write": ended - trained,
        "seconds": ended - began,
        "processor_seconds": time.process_time() - busy,
        "features": prepared.dataset.x_train.shape[1],
        "auc": metrics["auc"],
    }


def peak_mib() -> float:
    """Peak memory of this process. `getrusage` would begin with that of the process that started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def part(*words: str) -> dict[str, Any]:
    """One part in a process of its own, with its peak memory in MiB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # a second thread that waits for a busy core costs both sides
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def study(rows: int, folder: Path, files: list[str]) -> list[dict[str, Any]]:
    if not (folder / "schema.toml").is_file():
        make(folder, rows)
    results = []
    for name in files:
        read = min(part("--read", str(folder / name))["seconds"] for _ in range(2))
        bare = None
        for method in METHODS:
            run = part("--ours", str(folder / name), "--method", method)
            words = ("--products", str(rows * 4 // 5), "--features", str(run["features"]))
            bare = bare or min(part(*words)["seconds"] for _ in range(2))
            encoded = rows * run["features"] * 4 / 2**20
            results.append(
                {
                    "file": name,
                    "method": method,
                    "rows": rows,
                    **{key: round(value, 3) for key, value in run.items()},
                    "read_bare": round(read, 3),
                    "products_bare": round(bare, 3),
                    "time_ratio": round(run["seconds"] / (read + bare), 3),
                    "encoded_mib": round(encoded, 1),
                    "memory_ratio": round((run["peak_mib"] - run["idle_mib"]) / encoded, 3),
                }
            )
            print(results[-1], flush=True)
    return results


def page(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# A million rows",
        "",
        "`python benchmarks/million.py`. 50 columns: 40 numbers, 8 categories of 5 levels, a boolean, a target. Read, "
        "encoded by the schema, a fifth held out, 70 rounds at ε = 1 over ten clients with noise from a secret source, "
        "every round evaluated, run written. Bare: pyarrow reads the file, then two float32 matrix products per round "
        "with the encoded training records (the faster one of two). One thread for sums and products on both sides, "
        "two cores for pyarrow. Memory: peak of the process beyond its imports, over the encoded table. Where "
        "seconds exceed those of the processor, other programs ran too.",
        "",
        "| file | method | rows | read bare, s | products bare, s | ours, s | of the processor "
        "| load and encode, s | train, s | time ratio | memory ratio | AUC |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['file']} | {r['method']} | {r['rows']:,} | {r['read_bare']:.1f} | {r['products_bare']:.1f} | "
        f"{r['seconds']:.1f} | {r['processor_seconds']:.1f} | {r['load_and_encode']:.1f} | {r['train']:.1f} | "
        f"{r['time_ratio']:.2f} | "
        f"{r['memory_ratio']:.2f} | {r['auc']:.3f} |"
        for r in rows
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--file", action="append", choices=FILES)
    parser.add_argument("--read")
    parser.add_argument("--products", type=int)
    parser.add_argument("--features", type=int)
    parser.add_argument("--ours")
    parser.add_argument("--method", default="auto")
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps({"seconds": read_bare(Path(arguments.read))}))
    elif arguments.products:
        print(json.dumps({"seconds": products(arguments.products, arguments.features)}))
    elif arguments.ours:
        for name in ("pyarrow.csv", "sklearn.metrics", "sordino.training.run"):
            importlib.import_module(name)  # imports are not part of a run's memory
        idle = peak_mib()
        document = ours(Path(arguments.ours), arguments.method)
        print(json.dumps({**document, "idle_mib": idle, "peak_mib": peak_mib()}))
    else:
        files = arguments.file or list(FILES)
        with tempfile.TemporaryDirectory() as temporary:
            rows = study(arguments.rows, arguments.folder or Path(temporary), files)
        path = ROOT / "results" / "million.json"
        if arguments.rows == 1_000_000:
            known = json.loads(path.read_text())["rows"] if path.is_file() else []
            rows = sorted([*rows, *(row for row in known if row["file"] not in files)], key=lambda row: row["file"])
            document = {"provenance": provenance("python benchmarks/million.py"), "rows": rows}
            path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
            path.with_suffix(".md").write_text(page(rows))


if __name__ == "__main__":
    main()
