"""The tables of the DP-FedSOFIM paper (arXiv 2601.09166).

The paper uses the noise of its appendix E: per-client accounting, replace-one, equal weights. The tables add the noise
of secure aggregation, which section 5.1 suggests, for methods that are proved under it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from papers.tables import (
    PUBLISHED,
    PaperTable,
    PrintedFigures,
    TableRequest,
    TableResult,
    Want,
    against,
    attempt,
    chosen,
    published,
    train,
)
from papers.tuning import Part, Settled, settle
from sordino.data.partition import describe, split
from sordino.errors import SordinoError
from sordino.evidence.certificate import finite
from sordino.studies import compare
from sordino.studies.statistics import from_counts, mcnemar
from sordino.training.batch import run_many
from sordino.training.spec import Spec

SEEDS, ROUNDS, EARLY, LEVEL = 3, 70, 10, 0.05  # LEVEL: of a test
BUDGETS = (0.5, 1.0, 5.0, 10.0)  # the paper's
BASE = {
    "clients": 20,
    "partition": "dirichlet:0.5",
    "rounds": ROUNDS,
    "delta": 1e-5,
    "adjacency": "replace-one",
    "clip": 10.0,
    "covariance_clip": 100.0,
}
SEEN = {"trust": "untrusted-server", "divisor": "client-mean"}  # appendix E
SUMS = {"trust": "secure-aggregation", "divisor": "pooled"}
LAST = Part(SEEN, ROUNDS, "settings_client-mean")
ALONE = (LAST, Part(SEEN, EARLY, "round10_settings_client-mean"))
BOTH = (LAST, Part(SUMS, ROUNDS, "settings_sa"), ALONE[1], Part(SUMS, EARLY, "round10_settings_sa"))
PAPER = ("paper",)  # all methods of the paper, as sordino compare names them
NAMES = {
    "dp-fedgd": "DP-FedGD",
    "dp-fedavg": "DP-FedAvg",
    "dp-fedfc": "DP-FedFC",
    "dp-scaffold": "DP-SCAFFOLD",
    "dp-fedadam": "DP-FedAdam",
    "dp-fedyogi": "DP-FedYogi",
    "dp-ftrl": "DP-FTRL",
    "dp-adafedprox": "DP-AdaFedProx",
    "dp-fedsofim": "DP-FedSOFIM",
}
GRADIENT, MOMENTUM = "dp-fedsofim", "dp-fedsofim (momentum)"
INFERRED: dict[float, dict[str, Any]] = {  # the paper has bias correction up to epsilon 1
    1.0: {"lr": 4.0, "rho": 10.0, "beta": 0.9, "bias_correction": True},
    5.0: {"lr": 0.5, "rho": 0.5, "beta": 0.9},
}
FORMS = ("gradient", "momentum")
FEATURES = "the features are not the paper's: compare orders, gaps and shapes, not levels"
OWN_PARTS = (
    "DP-FedSOFIM is tuned with and without the parts of its paper for small budgets: bias correction up to epsilon 1, "
    "a warm-up of 20 rounds at 0.5"
)
SILENT = "epsilon ∞ is without noise: nothing is certified there"
AS_PRINTED = "DP-FedSOFIM (gradient) is the formula as printed, (momentum) multiplies the moving average instead"


def title(label: str) -> str:
    """The name of a contestant in the tables."""
    name, _, form = label.partition(" ")
    return NAMES[name] + (f" {form or '(gradient)'}" if name == GRADIENT else "")


def printed_figures(rows: Sequence[dict[str, str]], **where: Any) -> PrintedFigures:
    """Mean and standard deviation by round, of the matching rows."""
    return {
        int(row.get("round", ROUNDS)): (float(row["test_accuracy_mean_pct"]), float(row["test_accuracy_std_pct"]))
        for row in rows
        if all(_same(row[key], value) for key, value in where.items())
    }


def _same(text: str, value: Any) -> bool:
    return text == value if isinstance(value, str) else float(text) == value


def of_budget(settings: dict[tuple[str, float | None], dict[str, Any]], label: str, epsilon: float) -> dict[str, Any]:
    """The setting chosen for a method at a budget; an error if there is none."""
    if (label, finite(epsilon)) not in settings:
        raise SordinoError(
            f"settings: none for {label} at epsilon {epsilon:g}; choose them with sordino compare "
            "--only-tune and give its settings.json as --settings, or leave the budget out of --epsilons."
        )
    return settings[label, finite(epsilon)]


def listed(budgets: Sequence[float]) -> str:
    """In words."""
    return ", ".join("∞" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in budgets)


def trained(request: TableRequest, wants: Sequence[Want], stop: int | None = None) -> list[dict[str, Any]]:
    """Lines with their mark beside the labels, so that a row continues at a budget that is not certified."""
    lines = train(request, wants, request.seeds or SEEDS, stop=stop)
    for line in lines:
        mark = line["labels"].pop("certified")
        line["certified"] = "no: no noise" if math.isinf(line["labels"]["epsilon"]) else mark
    return lines


def remarks(budgets: Sequence[float]) -> list[str]:
    """Notes on budgets that the paper does not have."""
    notes = []
    if more := [epsilon for epsilon in budgets if epsilon not in BUDGETS]:
        notes.append(f"the paper has no epsilon {listed(more)}")
    if any(map(math.isinf, budgets)):
        notes.append(SILENT)
    return notes


# ------------------------------------------------------------------------------------------------------- comparisons


def lineup(
    request: TableRequest,
    world: dict[str, Any],
    tuning: dict[str, Any],
    rows: Sequence[dict[str, str]],
    *,
    strict: bool = True,
) -> list[Want]:
    """Every method of the paper that is proved in this setting, at every budget. strict: settings must exist."""
    base = {**BASE, **world, "data": request.source}
    settings = chosen(tuning)
    budgets = request.epsilons or tuple(sorted({float("inf") if e is None else e for _, e in settings}))
    wants = []
    for each in compare.contestants(["paper"], base):
        for epsilon in budgets:
            if not strict and (each.label, finite(epsilon)) not in settings:
                continue
            values = {**each.values(base, epsilon), **of_budget(settings, each.label, epsilon)}
            labels = {"method": title(each.label), "noise": world["trust"], "epsilon": epsilon}
            wants.append(Want(labels, values, printed_figures(rows, method=NAMES[each.method], epsilon=epsilon)))
    return wants


def comparison(request: TableRequest, of: str, partition: str, parts: Sequence[Part]) -> TableResult:
    """Tables 3 to 6, 8 and 9. parts: noises, and the rounds that settings are tuned for."""
    rows, found = published(of), settle(request, parts, PAPER, BASE, BUDGETS)
    unprinted: PrintedFigures = dict.fromkeys(
        range(10, ROUNDS + 1, 10), (None, None)
    )  # at a budget that the paper does not have
    wants: dict[int, list[Want]] = {EARLY: [], ROUNDS: []}  # by the round that they are tuned for
    for part, tuning in found.parts:
        for want in lineup(request, {**part.world, "partition": partition}, tuning, rows, strict=part.world is SEEN):
            labels = {**want.labels, "tuned for": f"round {part.round}"}
            last = EARLY if part.round == EARLY else ROUNDS
            wants[last].append(want._replace(printed=want.printed or unprinted, labels=labels))
    lines = trained(request, wants[ROUNDS])
    early = [want for want in wants[EARLY] if EARLY in want.printed]
    lines += trained(request, early, min(EARLY, ROUNDS)) if early else []
    notes = [FEATURES, *found.notes, *found.grids, OWN_PARTS, AS_PRINTED]
    if early:
        notes.append(
            f"rows tuned for round {EARLY} have settings of their own, chosen by the accuracy after that round"
        )
    everyone = [*wants[ROUNDS], *wants[EARLY]]
    worlds = list(dict.fromkeys(part.world["trust"] for part, _ in found.parts))
    if len(worlds) > 1:
        notes.append("under secure aggregation records are pooled, and methods that are not proved there are left out")
    for world in worlds:
        has = {want.labels["epsilon"] for want in everyone if want.labels["noise"] == world}
        if lacks := [epsilon for epsilon in request.epsilons or () if epsilon not in has]:
            notes.append(f"left out under {world}, for want of settings: epsilon {listed(lacks)}")
    notes += remarks(sorted({want.labels["epsilon"] for want in everyone}))
    if partition == "iid":
        notes.append("settings are those of the Dirichlet partition: the paper says both that it kept and retuned them")
    return TableResult(lines, "epsilon", notes, found.tuning)


# ---------------------------------------------------------------------------------------------------------- ablation


def ablation(request: TableRequest, dataset: str) -> TableResult:
    """Tables 10 and 11: as published, and with the parts at the effective step lr / rho of the whole method."""
    rows, base = published("sofim-10-11"), {**BASE, **SEEN, "data": request.source}
    base.pop("covariance_clip")
    budgets = request.epsilons or BUDGETS
    found, tuned = momentum_form(request, budgets)
    wants = []
    for origin, settings in (("tuned here", tuned), ("inferred", {e: INFERRED[e] for e in budgets if e in INFERRED})):
        for epsilon, whole in settings.items():
            run = {**base, "epsilon": epsilon}
            for step, word in ((whole["lr"], "lr"), (whole["lr"] / whole["rho"], "lr / rho")):
                gradient = {**run, "method": "dp-fedgd", "lr": step}
                average = {**whole, "rho": 1.0, "lr": step, "ema_rounds": ROUNDS}
                for part, values in (
                    ("grad_only", gradient),
                    ("ema_only", {**run, "method": "dp-fedsofim", **average}),
                ):
                    printed = (
                        printed_figures(rows, dataset=dataset, variant=part, epsilon=epsilon) if word == "lr" else {}
                    )
                    labels = {"settings": origin, "part": part, "step": word, "epsilon": epsilon}
                    wants.append(Want(labels, values, printed))
            for form in FORMS:
                values = {**run, "method": "dp-fedsofim", "apply_to": form, **whole}
                labels = {"settings": origin, "part": f"full ({form})", "step": "lr / rho", "epsilon": epsilon}
                wants.append(
                    Want(labels, values, printed_figures(rows, dataset=dataset, variant="full", epsilon=epsilon))
                )
    order = {"grad_only": 0, "ema_only": 1}
    wants.sort(key=lambda want: (want.labels["settings"] != "tuned here", order.get(want.labels["part"], 2)))
    notes = [
        FEATURES,
        f"tuned here: the settings of the momentum form in table {3 if dataset == 'CIFAR-10' else 4}; inferred: the "
        "paper's, from its table 12",
        "inferred settings are for epsilon 1 and 5 alone, which are those of table 12",
        "the paper compares its parts at step lr with a whole that moves by about lr / rho",
        *found.notes,
        *remarks(budgets),
    ]
    return TableResult(trained(request, wants), "epsilon", notes, found.tuning)


def momentum_form(request: TableRequest, budgets: Sequence[float]) -> tuple[Settled, dict[float, dict[str, Any]]]:
    """The settings of the table, and of them those of DP-FedSOFIM's momentum form by budget."""
    found = settle(request, [LAST], ["dp-fedsofim:apply_to=momentum"], BASE, budgets)
    settings = chosen(found.parts[0][1])
    return found, {epsilon: of_budget(settings, MOMENTUM, epsilon) for epsilon in budgets}


def regulariser(request: TableRequest) -> TableResult:
    """Table 12, in both forms."""
    rows, base = published("sofim-12"), {**BASE, **SEEN, "data": request.source, "method": "dp-fedsofim"}
    base.pop("covariance_clip")
    budgets = request.epsilons or tuple(INFERRED)
    found, tuned = momentum_form(request, budgets)
    wants = []
    for epsilon in budgets:
        origins = {"inferred": INFERRED[epsilon]} if epsilon in INFERRED else {}
        for origin, whole in {**origins, "tuned here": tuned[epsilon]}.items():
            for form in FORMS:
                for rho in dict.fromkeys(float(row["rho"]) for row in rows):
                    values = {**base, "epsilon": epsilon, **whole, "rho": rho, "apply_to": form}
                    step = f"{whole['lr']:g} ({origin})"
                    labels = {"epsilon": epsilon, "lr": step, "form": form, "rho": rho}
                    printed = printed_figures(rows, dataset="CIFAR-10", epsilon=epsilon, rho=rho)
                    wants.append(Want(labels, values, printed))
    at = ", ".join(f"{tuned[epsilon]['rho']:g} at epsilon {listed([epsilon])}" for epsilon in budgets)
    notes = [
        FEATURES,
        "lr of the paper is not given; inferred from its figures: 4 at epsilon 1, 0.5 at epsilon 5",
        "tuned here: the settings of the momentum form in table 3; a row keeps them while rho varies",
        f"they were tuned beside rho = {at}",
    ]
    if more := [epsilon for epsilon in budgets if epsilon not in INFERRED]:
        notes.append(f"table 12 has no epsilon {listed(more)}: no figures to infer an lr from, so tuned here alone")
    if any(map(math.isinf, budgets)):
        notes.append(SILENT)
    return TableResult(trained(request, wants), "rho", [*notes, *found.notes], found.tuning)


# --------------------------------------------------------------------------------------------------- other measures


def measured(labels: dict[str, Any], figure: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A line that is not an accuracy by round."""
    return {"labels": labels, "rounds": {str(ROUNDS): figure}, "settings": settings}


def runtime(request: TableRequest) -> TableResult:
    """Table 7: rounds are timed on this machine, so only ratios to DP-FedGD are comparable."""
    rows = [row for row in published("sofim-7") if (row["dataset"], row["backbone"]) == ("CIFAR-10", "ResNet-20")]
    base, times, repeats = {**BASE, **SEEN, "data": request.source}, dict[tuple[str, int], list[float]](), 3
    todo = {(row["method"], int(row["local_steps_K"])): float(row["seconds_per_round"]) for row in rows}
    names = {title: name for name, title in NAMES.items()}
    for _ in range(request.seeds or repeats):
        for method, steps in todo:
            each = compare.Contestant(method, names[method], {"steps": steps} if steps > 1 else {})
            spec = Spec.of({**each.values(base, 1.0), "seed": 1, "split_seed": 1})
            (run,) = run_many([spec], request.dataset, device=request.device, at=(), stop=20)
            times.setdefault((method, steps), []).append(run.seconds / 20)
            request.tick(1)
    lines, unit = [], ("DP-FedGD", 1)
    for key, printed in todo.items():
        labels, ours = {"method": key[0], "K": key[1]}, [min(times[key])]
        lines.append(
            measured({**labels, "measure": "seconds"}, {**against(ours, printed), "digits": 3}, {"steps": key[1]})
        )
        ratio = against([min(times[key]) / min(times[unit])], printed / todo[unit])
        lines.append(measured({**labels, "measure": "times DP-FedGD"}, {**ratio, "digits": 2}, {"steps": key[1]}))
    notes = [
        "seconds a round at epsilon 1, the best of three repeats over 20 rounds; machines differ: compare the ratios",
        "the paper prints two digits, so that its ratios are good to an eighth",
    ]
    return TableResult(lines, "measure", notes)


def partition(request: TableRequest, of: str, dataset: str) -> TableResult:
    """Tables 13 and 14: the published counts compared with Dirichlet partitions, and their effect on training."""
    rows, file = published(of), PUBLISHED / f"{of}.csv"
    classes = len(request.dataset.classes)
    counts = np.array([[int(row[f"class_{k}"]) for k in range(classes)] for row in rows])
    whose, label = np.repeat(np.arange(len(counts)), counts.sum(1)), np.tile(np.arange(classes), len(counts))
    printed = _shape(np.repeat(label, counts.ravel()), whose, classes)
    drawn = [
        _shape(request.dataset.y_train, split(request.dataset, "dirichlet:0.5", len(counts), seed=seed), classes)
        for seed in range(1, 101)
    ]
    lines = []
    for key, value in printed.items():
        figure = {**against([each[key] for each in drawn], value), "digits": 2}
        lines.append(measured({"what": key, "epsilon": "any"}, figure, {"seeds": 100}))
    number, who = 3 if dataset == "CIFAR-10" else 4, ["dp-fedgd", "dp-fedsofim", "dp-fedsofim:apply_to=momentum"]
    found, wants, accuracies_of_paper = settle(request, [LAST], who, BASE, BUDGETS), [], published(f"sofim-{number}")
    settings = chosen(found.parts[0][1])
    for law, words in (("dirichlet:0.5", "drawn"), (f"counts:{file}", "as printed")):
        base = {**BASE, **SEEN, "data": request.source, "partition": law, "clients": None}
        if law.startswith("dirichlet"):
            base["clients"] = len(counts)
        for each in compare.contestants(who, {**BASE, **SEEN}):
            for epsilon in request.epsilons or BUDGETS:
                values = {**each.values(base, epsilon), **of_budget(settings, each.label, epsilon)}
                labels = {"what": f"accuracy of {title(each.label)}, counts {words}", "epsilon": epsilon}
                last = printed_figures(accuracies_of_paper, method=NAMES[each.method], epsilon=epsilon, round=ROUNDS)
                wants.append(Want(labels, values, last))
    accuracies = trained(request, wants)
    for line in accuracies:
        line["settings"]["partition"] = str(line["settings"]["partition"]).replace(str(PUBLISHED), "published")
    notes = [
        "statistics of the partition: ours over 100 Dirichlet(0.5) draws, the paper's of its printed counts",
        FEATURES,
        f"accuracies: the paper's are those of its table {number}, over three partitions",
        *found.notes,
        *remarks(request.epsilons or BUDGETS),
    ]
    return TableResult([*lines, *accuracies], "epsilon", notes, found.tuning)


def _shape(y: np.ndarray, whose: np.ndarray, classes: int) -> dict[str, float]:
    clients = describe(y, whose, classes)
    sizes = [each.records for each in clients]
    return {
        "smallest client": float(min(sizes)),
        "largest client": float(max(sizes)),
        "standard deviation of sizes": statistics.pstdev(sizes),
        "KL of a client's labels from uniform, mean": statistics.fmean(each.kl_from_uniform for each in clients),
        "classes absent, mean": statistics.fmean(each.absent for each in clients),
        "noise against equal sizes": float(np.sqrt(np.mean(np.array(sizes, float) ** -2)) * np.mean(sizes)),
    }


def significance(request: TableRequest, dataset: str, backbone: str) -> TableResult:
    """Tables 15 and 16: McNemar's test of DP-FedSOFIM against every baseline, one seed."""
    rows = [r for r in published("sofim-15-16") if (r["dataset"], r["backbone"]) == (dataset, backbone)]
    found = settle(request, [LAST], PAPER, BASE, BUDGETS)
    wants = lineup(request, SEEN, found.parts[0][1], [])
    if request.epsilons is None:
        wants = [want for want in wants if want.labels["epsilon"] in BUDGETS]
    right = {}
    for want, run in zip(wants, attempt(request, wants, [1]), strict=True):
        guessed = run.model.predict(run.theta, request.dataset.x_test).numpy()
        right[want.labels["method"], want.labels["epsilon"]] = guessed == request.dataset.y_test
    lines, budgets = [], list(dict.fromkeys(epsilon for _, epsilon in right))
    printed = {(row["baseline"], float(row["epsilon"])): row for row in rows}
    for epsilon in budgets:
        for form in FORMS:
            ours = right[f"DP-FedSOFIM ({form})", epsilon]
            for baseline in dict.fromkeys(row["baseline"] for row in rows):
                rival = right[baseline, epsilon]
                test, lead = mcnemar(ours, rival), 100 * float(ours.mean() - rival.mean())
                figure = {**against([lead]), "mark": _star(test.p), "test": test._asdict()}
                if row := printed.get((baseline, epsilon)):
                    n10, n01 = int(row["n10_sofim_right_baseline_wrong"]), int(row["n01_sofim_wrong_baseline_right"])
                    theirs = from_counts(n10, n01)
                    figure |= against([lead], 100 * (n10 - n01) / int(row["n_test"]))
                    figure |= {"published_mark": _star(theirs.p), "published_test": theirs._asdict()}
                labels = {"form": form, "against": baseline, "epsilon": epsilon}
                lines.append(measured(labels, figure, {"seed": 1}))
    notes = [
        f"lead of DP-FedSOFIM in points; * significant at {LEVEL:g} (McNemar with continuity correction, seed 1)",
        "tests against one baseline each, not corrected for their number",
        FEATURES,
        *found.notes,
        OWN_PARTS,
        *remarks(budgets),
    ]
    return TableResult(lines, "epsilon", notes, found.tuning)


def _star(p: float) -> str:
    return "*" if p < LEVEL else ""


# ------------------------------------------------------------------------------------------------------------ tables


def _source(images: str, network: str) -> str:
    return (
        f"features of {images} by a {network} that was trained on CIFAR-100 (sordino features --data {images} "
        f"--network {network} --weights FILE --out {images}_{network}.npz)"
    )


CIFAR, PATH = (
    ("cifar10_resnet20.npz", _source("cifar10", "resnet20")),
    ("pathmnist_resnet20.npz", _source("pathmnist", "resnet20")),
)
CIFAR_VGG, PATH_VGG = (
    ("cifar10_vgg16.npz", _source("cifar10", "vgg16")),
    ("pathmnist_vgg16.npz", _source("pathmnist", "vgg16")),
)
DIRICHLET = "dirichlet:0.5"

TABLES = (
    PaperTable(
        "sofim-3",
        "CIFAR-10, ResNet-20, Dirichlet 0.5",
        partial(comparison, of="sofim-3", partition=DIRICHLET, parts=BOTH),
        *CIFAR,
    ),
    PaperTable(
        "sofim-4",
        "PathMNIST, ResNet-20, Dirichlet 0.5",
        partial(comparison, of="sofim-4", partition=DIRICHLET, parts=BOTH),
        *PATH,
    ),
    PaperTable(
        "sofim-5",
        "CIFAR-10, VGG-16, Dirichlet 0.5",
        partial(comparison, of="sofim-5", partition=DIRICHLET, parts=BOTH),
        *CIFAR_VGG,
    ),
    PaperTable(
        "sofim-6",
        "PathMNIST, VGG-16, Dirichlet 0.5",
        partial(comparison, of="sofim-6", partition=DIRICHLET, parts=BOTH),
        *PATH_VGG,
    ),
    PaperTable("sofim-7", "seconds a round", runtime, *CIFAR),
    PaperTable(
        "sofim-8", "CIFAR-10, ResNet-20, IID", partial(comparison, of="sofim-8", partition="iid", parts=ALONE), *CIFAR
    ),
    PaperTable(
        "sofim-9", "PathMNIST, ResNet-20, IID", partial(comparison, of="sofim-9", partition="iid", parts=ALONE), *PATH
    ),
    PaperTable("sofim-10", "ablation, CIFAR-10", partial(ablation, dataset="CIFAR-10"), *CIFAR),
    PaperTable("sofim-11", "ablation, PathMNIST", partial(ablation, dataset="PathMNIST"), *PATH),
    PaperTable("sofim-12", "sensitivity to rho, CIFAR-10", regulariser, *CIFAR),
    PaperTable("sofim-13", "partition of PathMNIST", partial(partition, of="sofim-13", dataset="PathMNIST"), *PATH),
    PaperTable("sofim-14", "partition of CIFAR-10", partial(partition, of="sofim-14", dataset="CIFAR-10"), *CIFAR),
    PaperTable(
        "sofim-15",
        "McNemar's test, CIFAR-10, ResNet-20",
        partial(significance, dataset="CIFAR-10", backbone="ResNet-20"),
        *CIFAR,
    ),
    PaperTable(
        "sofim-16",
        "McNemar's test, PathMNIST, ResNet-20",
        partial(significance, dataset="PathMNIST", backbone="ResNet-20"),
        *PATH,
    ),
)
