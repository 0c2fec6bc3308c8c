"""The accuracies of the DP-FedAdamW paper (arXiv 2602.19945, tables 10 to 12 and 14): Swin transformers on images.

The configuration is that of table 18, for each concentration, noise and pair of decays that a table varies. Every row
has its epsilon, which needs no data. A row is trained where its images and weights are on this machine; elsewhere the
published figure stands alone. Ours are no attempt at the same figure: the paper's code clips the gradient of a batch
per tensor, not that of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from papers import adamw
from papers.tables import PaperTable, TableRequest, TableResult, Want, against, attempt, line, published

SEEDS = 3
ADADPS = "dp-adadps"  # the paper does not say what public data it had
MODELS = {"Swin-Tiny": "swin-tiny-lora", "Swin-Base": "swin-base-lora"}
FEW = {"clients": 2, "steps": 1, "batch": "poisson:4", "participation": "full", "partition": "iid"}  # of a trial
ACCOUNT = "epsilon, add-remove, {}"
NOTES = (
    "published accuracies are no target: the paper's code clips the gradient of a batch per tensor, not that of a "
    "record, so that its epsilon is not that of the configuration",
    "configuration of table 18. Step sizes are table 20's (ResNet-18); for these models the paper prints grids only. "
    "tau, rho and the smoothing's strength are not printed",
    "epsilon: of the client with the fewest records where sizes are equal, every message is seen and minibatches are "
    "Poisson's; T K l: who came to its share of the rounds, T K: to all. adamw-18 has other accounts",
)
UNTRAINED = (
    "not trained: dp-adadps, because the paper does not say which public data scale its gradients; without any it is "
    "dp-fedavg"
)


class AccuracyRow(NamedTuple):
    """One published accuracy, and the run that it belongs to."""

    labels: dict[str, Any]
    values: dict[str, Any]  # keys of the run
    row: adamw.PaperRow
    sigma: float
    accuracy: float

    @property
    def method(self) -> str:
        return str(self.values["method"])


def accuracy_rows(table: str) -> list[AccuracyRow]:
    """The rows of tables 10 to 12 and 14, with the keys of their runs."""
    found = []
    for each in published(table.replace("-", "_table")):
        data, model, method = adamw.SETS[each["dataset"]], MODELS[each["model"]], each["method"].lower()
        alpha, sigma = float(each["alpha"]), float(each["sigma"])
        betas: dict[str, Any] = {key: float(each[key]) for key in ("beta1", "beta2") if each[key]}
        like = "dp-fedavg" if method == ADADPS else method  # table 20 does not have it
        values = {**adamw.preset("adamw-18", data, like, model=model, sigma=sigma, alpha=alpha, **betas)}
        row = next(row for row in adamw.rows("adamw-18") if row.data == data and model in row.models)
        labels = {"data": data, "model": each["model"], "alpha": alpha, "sigma": sigma, "method": method, **betas}
        found.append(AccuracyRow(labels, values | {"method": method}, row, sigma, float(each["accuracy_pct"])))
    return found


def accuracies(request: TableRequest) -> TableResult:
    """Accuracy and epsilon of every row; trained where it can be."""
    name = request.table.name
    rows = accuracy_rows(name)
    lacks = adamw.missing(name, [(each.row.data, each.values["model"]) for each in rows], request.data_dir)
    able = [each for each in rows if each.method != ADADPS and lacks.runs(each.row.data, each.values["model"])]
    able = able if request.rounds is None else able[: request.most_settings]
    trained = {id(each): one for each, one in zip(able, _trained(request, able, lacks), strict=True)}
    lines = []
    for each in rows:
        lines.append(trained.get(id(each)) or _line(each, "accuracy", against([], each.accuracy)))
        for times, count in each.row.releases.items():
            gradients = 2 if each.method == "dp-fedsam" else 1
            known = adamw.epsilon(each.row, count, "add-remove", gradients=gradients, sigma=each.sigma)
            lines.append(_line(each, ACCOUNT.format(times), against([known])))
    notes = [*NOTES, *([UNTRAINED] if any(each.method == ADADPS for each in rows) else []), *lacks.notes]
    if lacks.notes:
        where = {"weights": f"DIR/{adamw._folder(rows[-1].values['model'])}", "data_dir": "DIR"}
        notes.append(f"one row by itself, with its files in DIR: {adamw.command(rows[-1].values | where)}")
    return TableResult(lines, "measure", notes)


def _trained(request: TableRequest, rows: Sequence[AccuracyRow], lacks: adamw.Missing) -> list[dict[str, Any]]:
    """The accuracy lines of rows whose images and weights are at hand."""
    lines, seeds = [], request.seeds or SEEDS
    for each in rows:
        more = {"weights": lacks.folders[each.values["model"]]}
        more |= {"data_dir": request.data_dir} if request.data_dir else {}
        values = {**each.values, **more, **(FEW if request.rounds is not None else {})}
        rounds = request.rounds or each.row.rounds
        want = Want({**each.labels, "measure": "accuracy"}, values, {rounds: (each.accuracy, None)})
        found = line(want, attempt(request, [want], range(1, seeds + 1), own_data=True))
        found["certified"] = found["labels"].pop("certified")
        found["rounds"] = {t: figure | {"digits": 2} for t, figure in found["rounds"].items()}
        lines.append(found)
    return lines


def _line(each: AccuracyRow, measure: str, figure: dict[str, Any]) -> dict[str, Any]:
    labels = {**each.labels, "measure": measure}
    return {"labels": labels, "rounds": {str(each.row.rounds): figure | {"digits": 2}}, "settings": each.values}


ABOUT = {
    "adamw-10": "accuracy of Swin on CIFAR-10",
    "adamw-11": "accuracy of Swin-Base on CIFAR-100 by noise",
    "adamw-12": "accuracy of DP-AdaDPS and DP-FedAdamW, Swin-Tiny",
    "adamw-14": "accuracy of Swin-Base on CIFAR-100 by beta1 and beta2",
}
TABLES = tuple(PaperTable(name, f"{about}, and its epsilon", accuracies) for name, about in ABOUT.items())
