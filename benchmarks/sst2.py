"""SST-2 by MiniLM with LoRA, in the DP-FedAdamW paper's configuration: 4 clients, 100 rounds of 20 steps, batch 16.

`prepare DATA_DIR FOLDER` writes token ids and float16 weights, for a machine that has neither package nor tokenizer;
`run FOLDER --device cuda` tunes each method's step on validation records at sigma 1 and 30 rounds, then trains:
every method at every sigma, the ablation of DP-FedAdamW and its betas; `report` writes results/sst2.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from fleet import train
from provenance import provenance

RESULTS = Path(__file__).resolve().parents[1] / "results"
LENGTH, SHORT = 64, 32  # tokens when judged, and when trained: 5.5 % of the phrases are cut
CLIENTS, ROUNDS, STEPS, BATCH, CLIP, DELTA = 4, 100, 20, 16, 0.1, 1e-5
SIGMAS, SEEDS, TUNING = (0.5, 1.0, 1.5, 2.0), (1, 2, 3), 30
SGD = (0.01, 0.03, 0.05, 0.1, 0.3, 1.0, 3.0)  # the paper's grid, and two more
ADAM = (1e-4, 3e-4, 1e-3, 3e-3)
TAUS = (1e-8, 0.00625)  # Adam's epsilon: as usual, and as large as the noise of one number at sigma 1
METHODS: dict[str, dict[str, Any]] = {
    "DP-FedAvg": {"method": "dp-fedavg"},
    "DP-SCAFFOLD": {"method": "dp-scaffold"},
    "DP-FedAvg-LS": {"method": "dp-fedavg-ls"},
    "DP-FedSAM": {"method": "dp-fedsam", "decay": 0.001},
    "DP-LocalAdamW": {"method": "dp-localadamw", "decay": 0.01},
    "DP-FedAdamW": {"method": "dp-fedadamw", "decay": 0.01},
}
BETAS = ((0.9, 0.99), (0.9, 0.999), (0.95, 0.99), (0.95, 0.999))
ABLATION = {
    "DP-FedAdamW without block aggregation": {"aggregate": "none"},
    "DP-FedAdamW without bias correction": {"correct": False},
    "DP-FedAdamW without alignment": {"align": "none"},
}

READING = (
    "Read with care: noise adds up over 2,000 steps, and a step that was best for 600 of them (80 % on validation",
    "records, `sst2/tuning.json`) is too long where σ > 1: every method falls to chance there, and DP-FedAvg and",
    "DP-SCAFFOLD at σ = 1 already. At σ = 0.5 all but DP-LocalAdamW are level. At σ = 1 DP-FedAvg-LS and",
    "DP-FedSAM (which pays for two gradients a step) stand before DP-FedAdamW, and DP-FedAdamW is better without",
    "any of its three parts: the pull towards the last aggregate and the smaller denominators lengthen steps that",
    "are too long already. The paper's order is not confirmed here; whether shorter steps would restore it was",
    "not tried.",
)


def prepare(data_dir: str, folder: Path) -> None:
    from sordino.data.text import load
    from sordino.models.transformers import export_minilm

    data = load("sst2", length=LENGTH, data_dir=data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: getattr(data, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    small = {name: part.astype(np.uint16 if name.startswith("x") else np.uint8) for name, part in parts.items()}
    np.savez_compressed(folder / "sst2.npz", **small)
    export_minilm(folder / "minilm.safetensors", vocabulary=np.unique(data.x_train.astype(int)))


def load(part: str, folder: str) -> Any:
    """`final`, or `tuning`: 3 % of the training records in place of the test records; `long`: nothing cut."""
    from sordino.data.sources import Dataset
    from sordino.experiments.tune import validated

    with np.load(Path(folder) / "sst2.npz", allow_pickle=False) as file:
        x, x_test = (file[name].astype(np.float32) for name in ("x_train", "x_test"))
        data = Dataset("sst2", x, file["y_train"].astype(int), x_test, file["y_test"].astype(int), None, ("0", "1"))
    if part == "long":
        return data
    return validated(data, 0.03) if part == "tuning" else data._replace(x_train=cut(x), x_test=cut(x_test))


def cut(x: np.ndarray) -> np.ndarray:
    """Rows of SHORT tokens; where words were cut, the last one is [SEP] all the same."""
    short = x[:, :SHORT].copy()
    short[x[:, SHORT] != 0, -1] = 102
    return short


def judge(run: Any, folder: str, device: str) -> float:
    """Accuracy on development sentences in full length: adapters and head do not depend on it."""
    import torch

    from sordino.experiments.run import choose_model

    data = _whole.setdefault(folder, load("long", folder))
    theta, x = run.theta.to(device), torch.from_numpy(data.x_test).to(device)
    found = choose_model(run.spec, data).predict(theta, x).cpu().numpy()
    return float((found == data.y_test).mean())


_whole: dict[str, Any] = {}


def base(folder: str, sigma: float, rounds: int, device: str = "cpu") -> dict[str, Any]:
    return {
        "data": "sst2",
        "model": "minilm-lora",
        "weights": str(Path(folder) / "minilm.safetensors"),
        "clients": CLIENTS,
        "partition": "dirichlet:0.8",
        "rounds": rounds,
        "steps": STEPS,
        "batch": f"poisson:{BATCH}",
        "clip": CLIP,
        "delta": DELTA,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "noise": sigma * math.sqrt(CLIENTS),  # of the sum of clients, each of which adds sigma
    }


def grid(label: str) -> list[dict[str, Any]]:
    if label.endswith("AdamW"):
        return [{"lr": lr, "tau": tau} for lr in ADAM for tau in TAUS]
    return [{"local_lr": lr} for lr in SGD]


def final_jobs(
    folder: str, chosen: dict[str, dict[str, Any]], seeds: list[int], rounds: int, device: str
) -> list[dict[str, Any]]:
    jobs = []

    def add(study: str, label: str, sigma: float, options: dict[str, Any]) -> None:
        jobs.append({"study": study, "label": label, "sigma": sigma, "options": options})

    for label, own in METHODS.items():
        for sigma in SIGMAS:
            add("sigma", label, sigma, {**own, **chosen[label]})
    for label, change in ABLATION.items():
        add("ablation", label, 1.0, {**METHODS["DP-FedAdamW"], **chosen["DP-FedAdamW"], **change})
    for label in ("DP-LocalAdamW", "DP-FedAdamW"):
        for beta1, beta2 in BETAS:
            if (beta1, beta2) != (0.9, 0.999):  # the default, which stands in the first study
                betas = {"beta1": beta1, "beta2": beta2}
                add("betas", label, 1.0, {**METHODS[label], **chosen[label], **betas})
    for job in jobs:
        values = {**base(folder, job["sigma"], rounds, device), **job["options"]}
        own = seeds if job["study"] == "sigma" else seeds[:2]
        job |= {"values": values, "seeds": own, "at": [rounds], "part": "final"}
    jobs.sort(key=lambda job: ("AdamW" not in job["label"], job["label"] == "DP-FedSAM"))
    return jobs


def accounts(folder: str) -> dict[str, dict[str, float]]:
    """Epsilon of every sigma under both adjacencies, for the client worst off."""
    from sordino.data.partition import split
    from sordino.experiments.spec import Spec

    data = load("final", folder)
    client = split(data, "dirichlet:0.8", CLIENTS, sizes="equal", seed=0)
    sizes = tuple(np.bincount(client).tolist())
    found: dict[str, dict[str, float]] = {"sizes": list(sizes)}  # type: ignore[dict-item]
    for label in ("DP-FedAdamW", "DP-FedSAM"):
        for sigma in SIGMAS:
            for adjacency in ("add-remove", "replace-one"):
                values = base(folder, sigma, ROUNDS) | METHODS[label] | {"adjacency": adjacency}
                found.setdefault(f"{label} {sigma:g}", {})[adjacency] = Spec.of(values).plan(sizes).epsilon()
    return found


def run(words: argparse.Namespace) -> None:
    began, seeds = time.perf_counter(), [1] if words.quick else list(SEEDS)
    tuning, rounds = (2, 3) if words.quick else (TUNING, ROUNDS)
    out: dict[str, Any] = {"provenance": provenance(f"python benchmarks/sst2.py run FOLDER --device {words.device}")}
    out["accounts"] = accounts(words.folder)
    jobs = []
    for label, own in METHODS.items():
        for options in grid(label)[: 1 if words.quick else None]:
            values = {**base(words.folder, 1.0, tuning, words.device), **own, **options}
            jobs.append({"label": label, "options": options, "values": values, "seeds": [0], "at": [tuning]})
    jobs.sort(key=lambda job: "SAM" not in job["label"])
    if words.settings:  # of an earlier search
        out["tuning"] = json.loads(words.settings.read_text())["tuning"]
    else:
        out["tuning"] = fill([job | {"part": "tuning"} for job in jobs], words, began)
    chosen = {}
    for label in METHODS:
        mine = [job for job in out["tuning"] if job["label"] == label and "scores" in job]
        chosen[label] = max(mine, key=lambda job: job["scores"][0][str(tuning)])["options"] if mine else grid(label)[0]
    out["chosen"] = chosen
    write(words.out, out)
    jobs = final_jobs(words.folder, chosen, seeds, rounds, words.device)
    done = json.loads(words.settings.read_text()).get("runs", []) if words.settings else []
    out["runs"] = done = [job for job in done if "scores" in job]
    known = [(job["study"], job["label"], job["sigma"], job["options"]) for job in done]
    jobs = [job for job in jobs if (job["study"], job["label"], job["sigma"], job["options"]) not in known]
    out["runs"] = done + fill(jobs[: 2 if words.quick else None], words, began, out)
    out["seconds"] = time.perf_counter() - began
    write(words.out, out)


def fill(
    jobs: list[dict[str, Any]], words: argparse.Namespace, began: float, out: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Jobs with what became of them; written as they end."""
    done: list[dict[str, Any]] = []
    final = {} if out is None else {"judge": judge}
    for number, found in train(jobs, load, (words.folder,), device=words.device, workers=words.workers, **final):
        job = {
            key: value for key, value in jobs[number].items() if key in ("study", "label", "sigma", "options", "seeds")
        }
        if "scores" in found:
            found["scores"] = [{str(t): score for t, score in scores.items()} for scores in found["scores"]]
        done.append(job | found)
        last = [list(scores.values())[-1] for scores in found.get("scores", [])]
        print(f"{time.perf_counter() - began:6.0f} s", job["label"], job["options"], last or found, flush=True)
        if out is not None:
            write(words.out, out | {"runs": out["runs"] + done})
    return done


def write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def report(path: Path) -> str:
    found = json.loads(path.read_text())

    def cell(job: dict[str, Any], t: int = ROUNDS) -> str:
        values = [100 * scores[str(t)] for scores in job["scores"]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.mean(values):.1f} ± {spread:.1f}"

    def line(*cells: str) -> str:
        return "| " + " | ".join(cells) + " |"

    runs = [job for job in found["runs"] if "scores" in job]
    head = [f"σ = {sigma:g}" for sigma in SIGMAS]
    lines = [
        "# SST-2 by MiniLM with LoRA",
        "",
        "Rank 16, alpha 32, dropout 0.1; 4 clients (Dirichlet 0.8), 100 rounds of 20 steps, Poisson minibatches",
        "of 16, clip 0.1. `python benchmarks/sst2.py prepare DATA_DIR FOLDER`, then `… run FOLDER --device cuda`.",
        "Phrases are cut at 32 tokens for training (5.5 % are longer), at 64 for judging. Accuracy on the 872",
        "development sentences after round 100, mean ± standard deviation over seeds (three; two for ablation and",
        "betas), in percent; –: not run. Steps were chosen on validation records at σ = 1 and 30 rounds, which",
        "nobody paid for.",
        "",
        *READING,
        "",
        line("method", *head),
        line("---", *["---"] * len(head)),
    ]
    for label in METHODS:
        mine = {job["sigma"]: cell(job) for job in runs if job["study"] == "sigma" and job["label"] == label}
        lines.append(line(label, *(mine.get(sigma, "–") for sigma in SIGMAS)))
    lines += ["", "ε at δ = 1e-5 of the client worst off (Poisson minibatches, every message seen):", ""]
    lines += [line("", *head), line("---", *["---"] * len(head))]
    for label, name in (("DP-FedAdamW", "one gradient a step"), ("DP-FedSAM", "two (DP-FedSAM)")):
        for adjacency in ("add-remove", "replace-one"):
            row = (f"{found['accounts'][f'{label} {sigma:g}'][adjacency]:.3g}" for sigma in SIGMAS)
            lines.append(line(f"{name}, {adjacency}", *row))
    lines += ["", "Ablation at σ = 1:", "", line("", "accuracy"), line("---", "---")]
    whole = [job for job in runs if job["study"] == "sigma" and job["sigma"] == 1 and job["label"].endswith("AdamW")]
    for job in [*whole, *(job for job in runs if job["study"] == "ablation")]:
        lines.append(line(job["label"], cell(job)))
    lines += ["", "Betas at σ = 1:", "", line("(β₁, β₂)", "DP-LocalAdamW", "DP-FedAdamW"), line("---", "---", "---")]
    for beta1, beta2 in BETAS:
        row = []
        for label in ("DP-LocalAdamW", "DP-FedAdamW"):
            mine = [
                job
                for job in runs
                if job["label"] == label and job["sigma"] == 1 and job["study"] != "ablation"
                if (job["options"].get("beta1", 0.9), job["options"].get("beta2", 0.999)) == (beta1, beta2)
            ]
            row.append(cell(mine[0]) if mine else "–")
        lines.append(line(f"({beta1:g}, {beta2:g})", *row))
    chosen = "; ".join(f"{k} {', '.join(f'{a} {b:g}' for a, b in v.items())}" for k, v in found["chosen"].items())
    return "\n".join([*lines, "", f"Chosen: {chosen}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prepare", "run", "report"))
    parser.add_argument("folder", nargs="+", help="prepare: DATA_DIR FOLDER; run: FOLDER")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs")
    parser.add_argument(
        "--settings", type=Path, help="the JSON of an earlier run, whose search and finished runs are taken over"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "sst2.json")
    words = parser.parse_args()
    if words.what == "prepare":
        prepare(words.folder[0], Path(words.folder[1]))
        return
    words.folder = words.folder[-1]
    if words.what == "run":
        run(words)
    if not words.quick:
        words.out.with_suffix(".md").write_text(report(words.out))
        print(report(words.out))


if __name__ == "__main__":
    main()
