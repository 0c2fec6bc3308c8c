"""Figure 4 of the DP-FedNew paper: accuracy against the CPU time of all computations.

Every run is trained by itself, and evaluation is not part of its time. For each seed and budget all methods run one
after another, so that ratios compare times of the same minutes. The paper builds Hessians; `solver = cg` finds the same
directions without them. So DP-FedNew is timed both ways, with Hessians for the first rounds alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from papers.fednew import FASHION, SEEDS, SUMS, TUNED_AT, Rival, _base, _of_methods, _of_nearest, settle
from papers.tables import PaperTable, TableRequest, TableResult, against, chosen
from sordino.training.batch import Trained, run_many
from sordino.training.spec import Spec

CLIENTS, FEW_CLIENTS = 50, 4  # the paper's, for ten times as many records per client; of a trial
EARLY, WARM_UP = 10, 2  # a round that is shown beside the last one; rounds before the clock counts
BASELINE, FIRST_ORDER = "DP-FedGD", ("DP-FedGD", "DP-Scaffold")


class Timed(NamedTuple):
    """A method of the figure, and how it is timed."""

    rival: Rival
    label: str
    solver: str | None = None  # None: the method has none to choose
    stop: int | None = None  # after so many rounds


GD, SCAFFOLD = Rival("dp-fedgd", "DP-FedGD"), Rival("dp-scaffold", "DP-Scaffold")
COVARIANCE, HESSIAN = Rival("dp-fednew-fc", "DP-FedNew-FC", SUMS, True), Rival("dp-fednew", "DP-FedNew", SUMS, True)
TIMED = (
    *(Timed(rival, rival.label) for rival in (GD, SCAFFOLD, COVARIANCE)),
    Timed(HESSIAN, "DP-FedNew, cg", "cg"),
    Timed(HESSIAN, "DP-FedNew, Hessians", "direct", EARLY),
)

NOTES = [
    f"{CLIENTS} clients, secure aggregation, one record joins or leaves; duals and control variates as published, so "
    "only DP-FedGD is certified",
    "the settings of the nearest budget, tuned with 100 clients on validation records",
    "seconds: CPU time of all computations of clients and server, without evaluation; machines differ: compare ratios, "
    "which are taken within a seed; the ratio of DP-FedNew with Hessians is that of the first rounds",
    "reaches both: the first round whose mean accuracy is at least the last one of DP-FedGD and of DP-Scaffold; empty "
    "if there is none",
]


def timing(request: TableRequest) -> TableResult:
    """Accuracy and seconds by round, and when each method reaches the last accuracy of the first-order methods."""
    timed = [each for each in TIMED if each.rival in _of_methods(request, [GD, SCAFFOLD, COVARIANCE, HESSIAN])]
    tuning = settle(request, list(dict.fromkeys(each.rival for each in timed)), ("record",), request.source, "iid")
    settings = chosen(tuning)
    lines = []
    for epsilon in request.epsilons or TUNED_AT:
        keys = {
            each: {
                **_base(request.dataset, "iid", CLIENTS if request.rounds is None else FEW_CLIENTS),
                "data": request.source,
                **each.rival.values("record"),
                **_of_nearest(settings, each.rival, "record", epsilon),
                **({} if each.solver is None else {"solver": each.solver}),
                "epsilon": epsilon,
                **request.shortened,
            }
            for each in timed
        }
        lines += compared(epsilon, _runs(request, keys))
    if request.settings:  # the file has them
        tuning = {**{key: value for key, value in tuning.items() if key != "settings"}, "file": request.settings}
    return TableResult(lines, "measure", [*NOTES, f"threads of each run: {torch.get_num_threads()}"], tuning)


def _runs(request: TableRequest, keys: dict[Timed, dict[str, Any]]) -> dict[str, list[Trained]]:
    """One run of every method for each seed, by label."""
    runs: dict[str, list[Trained]] = {each.label: [] for each in keys}
    for seed in range(1, (request.seeds or SEEDS) + 1):
        for each, values in keys.items():
            spec = Spec.of({**values, "seed": seed, "split_seed": 1})
            if seed == 1:
                run_many([spec], request.dataset, device=request.device, at=(), stop=WARM_UP)
            runs[each.label] += run_many([spec], request.dataset, device=request.device, stop=each.stop)
            request.tick(1)
    return runs


def compared(epsilon: float, runs: dict[str, list[Trained]]) -> list[dict[str, Any]]:
    """The lines of one budget."""
    lines = []
    last = max(max(some[0].scores) for some in runs.values())
    goals = [_mean(runs[label])[last] for label in FIRST_ORDER if label in runs]
    for label, some in runs.items():
        shown = [t for t in sorted({min(EARLY, last), last}) if t in some[0].scores]
        measures = {
            "accuracy": {t: against([100 * run.scores[t] for run in some]) for t in shown},
            "seconds": {t: against([run.cpu_seconds[t] for run in some]) | {"digits": 2} for t in shown},
        }
        if BASELINE in runs and label != BASELINE:
            measures[f"times {BASELINE}"] = {shown[-1]: _times(some, shown[-1], runs[BASELINE], shown[-1])}
        there = next((t for t, score in _mean(some).items() if goals and score >= max(goals)), None)
        if label not in FIRST_ORDER and there is not None:
            measures["reaches both"] = {last: against([there]) | {"digits": 0}}
            if BASELINE in runs:
                measures[f"times {BASELINE} until then"] = {last: _times(some, there, runs[BASELINE], last)}
        settings = {"clients": len(some[0].plan.sizes), **some[0].resolved.options}
        for measure, cells in measures.items():
            labels = {"method": label, "epsilon": epsilon, "measure": measure}
            lines.append({"labels": labels, "rounds": {str(t): cells[t] for t in cells}, "settings": settings})
    return lines


def _mean(runs: Sequence[Trained]) -> dict[int, float]:
    """Accuracy by round."""
    return {t: sum(run.scores[t] for run in runs) / len(runs) for t in sorted(runs[0].scores)}


def _times(runs: Sequence[Trained], t: int, others: Sequence[Trained], until: int) -> dict[str, Any]:
    """CPU time up to round t over that of the other runs up to their own round, within a seed."""
    ratios = [run.cpu_seconds[t] / other.cpu_seconds[until] for run, other in zip(runs, others, strict=True)]
    return against(ratios) | {"digits": 2}


TABLES = (PaperTable("fednew-time", "accuracy against time, Fashion-MNIST, 64 x 10 (its figure 4)", timing, *FASHION),)
