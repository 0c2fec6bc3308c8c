"""The tables of the DP-FedNew paper (PoPETs 2025), and experiments that it shows only as figures.

The paper uses the noise of secure aggregation, add-remove adjacency, and delta = 1 / records. Variants that are not
proved under it (duals and control variates are hidden client state) run uncertified. The proved variants run beside
them: without duals, and with an untrusted server. Settings are tuned at a few budgets on validation records; a run uses
those of the nearest budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from papers.tables import (
    PaperTable,
    PrintedFigures,
    TableRequest,
    TableResult,
    Want,
    attempt,
    chosen,
    line,
    of_table,
    published,
    train,
    watched_line,
)
from sordino.core import MOST_EPSILON
from sordino.data.records import Records
from sordino.data.sources import Dataset
from sordino.errors import SordinoError
from sordino.models.linear import Linear
from sordino.models.registry import BuiltModel
from sordino.studies.constants import client_eigenvalues
from sordino.studies.grids import Grid, product
from sordino.studies.private_tuning import UNPAID
from sordino.studies.tune import validated
from sordino.training.batch import MAX_RUNS_PER_BATCH, run_many
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

SEEDS, ROUNDS = 2, 70
EPSILONS = (0.1, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0, 8.0, 10.0)
TUNED_AT = (0.1, 1.0, 10.0)
USERS, USER_EPSILONS = 500, (1.0, 3.0, 10.0)  # at client level; the paper also uses 1 and more
FEW_USERS = 50  # of a trial of two rounds; two classes each hold all 47 of EMNIST
LIVES_AT = 100  # clients under an untrusted server; with more, noise dominates
MEMORY = {"cpu": 3e9, "cuda": 3e10}  # bytes for Hessians
STEPS, CURVATURE = (0.5, 2.0, 8.0), (0.1, 1.0)

GRIDS: dict[str, Grid] = {
    "dp-fedgd": {"lr": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)},
    "dp-fedfc": {"lr": (0.05, 0.2, 1.0, 4.0), "gamma": (0.01, 0.1, 1.0)},
    "dp-scaffold": {"local_lr": (0.05, 0.2, 0.8, 3.2), "steps": (1, 5), "warm_start": (True,)},
    "dp-fednew-fc": {"lr": STEPS, "covariance_clip": CURVATURE, "alpha": (0.1,), "rho": (0.1, 1.0)},
    "dp-fednew": {"lr": STEPS, "curvature_clip": CURVATURE, "alpha": (0.1,), "rho": (0.1, 1.0), "solver": ("cg",)},
}
Settings = dict[tuple[str, float | None], dict[str, Any]]  # by label and budget
SUMS, SEEN = "secure-aggregation", "untrusted-server"


class Rival(NamedTuple):
    """A method in one of its variants."""

    method: str
    name: str  # as printed
    trust: str = SUMS
    duals: bool | None = None  # None: the method has no duals

    @property
    def label(self) -> str:
        return self.name + (" without duals" if self.duals is False else "")

    def values(self, unit: str) -> dict[str, Any]:
        hidden = self.trust == SUMS and (self.duals or self.method == "dp-scaffold")
        keys = {"method": self.method, "trust": self.trust, "unit": unit, "uncertified": bool(hidden)}
        return keys if self.duals is None else {**keys, "duals": self.duals}


FIRST_ORDER = (
    Rival("dp-fedgd", "DP-FedGD"),
    Rival("dp-fedfc", "DP-FedFC"),
    Rival("dp-scaffold", "DP-Scaffold"),
    Rival("dp-scaffold", "DP-Scaffold", SEEN),
)


def newton(method: str, name: str) -> tuple[Rival, ...]:
    """With duals as published, without duals, and with duals under the trust model for which they are proved."""
    return Rival(method, name, SUMS, True), Rival(method, name, SUMS, False), Rival(method, name, SEEN, True)


DUALS = newton("dp-fednew", "DP-FedNew")[0]
BEST_DAMPING = ((0.01, 1.0), (0.1, 1.0), (0.1, 0.1))  # alpha and rho: the best with 500 clients, of damping's lines
EPOCHS: PrintedFigures = dict.fromkeys((1, 10, 30, 50, 70), (None, None))  # columns of tables 6 and 12

COVARIANCE = (*FIRST_ORDER, *newton("dp-fednew-fc", "DP-FedNew-FC"))
EVERYONE = (*COVARIANCE, *newton("dp-fednew", "DP-FedNew"))

NOTES = (
    "the paper chose settings on test records; here: few settings, on validation records at epsilon "
    f"{', '.join(f'{e:g}' for e in TUNED_AT)} and {LIVES_AT} clients, each run taking those of the nearest budget",
    "seeds change the noise; the partition of IID data is one for all",
    "certified no: hidden duals or control variates; what sums of messages tell of them is not proved",
    "secure aggregation without duals is proved, and so is every method where each message is seen "
    f"(shown for {LIVES_AT} clients: there the noise grows with their number)",
)
CLIENT_NOTES = (
    "one whole client joins or leaves, under secure aggregation; settings were chosen on validation records at epsilon "
    f"{', '.join(f'{e:g}' for e in TUNED_AT if e >= min(USER_EPSILONS))} and {USERS} clients, each run taking those of "
    "the nearest budget",
    *NOTES[1:3],
)


# ------------------------------------------------------------------------------------------------------------ tuning


def rivals(who: Sequence[Rival], unit: str) -> list[Rival]:
    """Client level under secure aggregation, because per-client noise would be too large."""
    return [each for each in who if unit == "record" or each.trust == SUMS]


def settle(
    request: TableRequest, who: Sequence[Rival], units: Sequence[str], source: str, partition: str
) -> dict[str, Any]:
    """The best setting of every rival at every level, at a few budgets."""
    if request.settings:
        return request.tuning()
    settings = []
    for unit in units:
        clients = LIVES_AT if unit == "record" else _users(request)
        dataset = validated(_data(request, source, partition, clients))
        base = {**_base(dataset, partition, clients), "data": source.format(clients=clients)}
        for each in rivals(who, unit):
            tried = list(product(_grid(each.method, unit)))[: request.most_settings]
            specs = [
                Spec.of({**base, **each.values(unit), "epsilon": e, **options, **request.shortened, "seed": 0})
                for e in _tuned_at(request, unit)
                for options in tried
            ]
            runs = run_many(
                specs,
                dataset,
                device=request.device,
                at=(),
                most=_most(request, each, unit, clients, dataset),
                tick=request.tick,
            )
            for k, epsilon in enumerate(_tuned_at(request, unit)):
                scores = [run.scores[max(run.scores)] for run in runs[k * len(tried) : (k + 1) * len(tried)]]
                best = max(range(len(tried)), key=scores.__getitem__)
                settings.append(
                    {
                        "method": _key(each, unit),
                        "epsilon": epsilon,
                        "options": tried[best],
                        "score": scores[best],
                        "tried": len(tried),
                    }
                )
    return {
        "how": "grid",
        "paid": UNPAID,
        "validation": "10% of the training records, held out by position (seed 0); no test record",
        "settings": settings,
    }


def _grid(method: str, unit: str) -> Grid:
    """The grid. At client level no record is clipped, so the curvature has no bound and is inverted directly."""
    grid = GRIDS[method]
    if unit == "record":
        return grid
    return {key: values for key, values in grid.items() if key not in ("curvature_clip", "solver")} | (
        {"covariance_clip": (1.0,)} if "covariance_clip" in grid else {}
    )


def _tuned_at(request: TableRequest, unit: str) -> tuple[float, ...]:
    wanted = _budgets(request, unit)
    return tuple(e for e in TUNED_AT if e in {min(TUNED_AT, key=partial(_apart, each)) for each in wanted})


def _apart(a: float, b: float) -> float:
    return abs(math.log(min(a, MOST_EPSILON) / b))


def _of_nearest(settings: Settings, each: Rival, unit: str, epsilon: float) -> dict[str, Any]:
    """The setting chosen for a rival at the nearest budget; an error if there is none."""
    key = _key(each, unit)
    tuned = [budget for label, budget in settings if label == key and budget is not None]
    if not tuned:
        labels = sorted({label for label, _ in settings})
        raise SordinoError(
            f"settings: none for '{key}'; the file has {', '.join(labels) or 'none at all'}. Give the JSON file that "
            "this table wrote, or leave out --settings to tune again."
        )
    return settings[key, min(tuned, key=partial(_apart, epsilon))]


def _budgets(request: TableRequest, unit: str) -> tuple[float, ...]:
    asked = request.epsilons or EPSILONS
    return asked if unit == "record" else tuple(e for e in asked if e in USER_EPSILONS)


def _of_methods(request: TableRequest, who: Sequence[Rival]) -> list[Rival]:
    """The rivals of the requested methods, in all their variants."""
    known = list(dict.fromkeys(each.method for each in who))
    for name in request.methods or ():
        if name not in known:
            raise SordinoError(f"methods: {name}, but the table has {', '.join(known)}; choose from these.")
    return [each for each in who if each.method in (request.methods or known)]


def _users(request: TableRequest) -> int:
    """Clients at client level; few where rounds are shortened, because they are served one by one."""
    return USERS if request.rounds is None else FEW_USERS


def _key(each: Rival, unit: str) -> str:
    return f"{each.label}, {unit} level, {each.trust}"


def _most(request: TableRequest, each: Rival, unit: str, clients: int, dataset: Dataset) -> int:
    """Runs per batch. At client level Hessians are built, which limits it."""
    if each.method != "dp-fednew" or unit == "record":
        return MAX_RUNS_PER_BATCH
    size = (dataset.x_train.shape[1] + 1) * len(dataset.classes)
    return max(1, min(MAX_RUNS_PER_BATCH, int(MEMORY[request.device] / (16 * clients * size**2))))


# ----------------------------------------------------------------------------------------------------------- running


def _data(request: TableRequest, source: str, partition: str, clients: int) -> Dataset:
    """The data source: on this machine, or generated for this number of clients."""
    if partition != "by-site":
        return request.dataset
    return resolve(Spec.of({"data": source.format(clients=clients), "partition": partition})).read_data()


def _base(dataset: Dataset, partition: str, clients: int) -> dict[str, Any]:
    return {
        "partition": partition,
        "clients": None if partition == "by-site" else clients,
        "rounds": ROUNDS,
        "delta": 1 / len(dataset.y_train),
        "adjacency": "add-remove",
    }


def comparison(
    request: TableRequest,
    who: Sequence[Rival],
    clients: Sequence[int],
    of: str | None = None,
    units: Sequence[str] = ("record", "client"),
    source: str | None = None,
    partition: str = "iid",
) -> TableResult:
    """All rivals at all budgets and numbers of clients. source: generates data for every seed, by-site."""
    data, own_data = source or request.source, partition == "by-site"
    units = [unit for unit in units if _budgets(request, unit)]
    clients = of_table(request, clients)
    who = [each for each in _of_methods(request, who) if each.trust == SUMS or LIVES_AT in clients]
    tuning = settle(request, who, units, data, partition)
    settings = chosen(tuning)
    rows = published(of) if of else []
    dataset = _data(request, data, partition, LIVES_AT)
    batches: dict[int, list[Want]] = {}
    for unit in units:
        for each in rivals(who, unit):
            for n in clients if unit == "record" else [_users(request)]:
                if each.trust == SEEN and n != LIVES_AT:
                    continue
                for epsilon in _budgets(request, unit):
                    values = {
                        **_base(dataset, partition, n),
                        "data": data.format(clients=n),
                        **each.values(unit),
                        **_of_nearest(settings, each, unit, epsilon),
                        "epsilon": epsilon,
                    }
                    labels = {"level": unit, "method": each.label, "noise": each.trust, "n": n, "epsilon": epsilon}
                    printed = _printed_figure(rows, each.name, n, epsilon) if unit == "record" else (None, None)
                    want = Want(labels, values, {10: (None, None), ROUNDS: printed})
                    batches.setdefault(_most(request, each, unit, n, dataset), []).append(want)
    seeds = request.seeds or SEEDS
    lines = [
        line
        for most, wants in batches.items()
        for line in train(request, wants, seeds, most=most, own_data=own_data, split=None if own_data else 1)
    ]
    notes = list(NOTES if "record" in units else CLIENT_NOTES)
    if request.settings:
        used = {_key(each, unit) for unit in units for each in rivals(who, unit)}
        tuning["settings"] = [each for each in tuning["settings"] if each["method"] in used]
        notes.append(f"settings: those of {Path(request.settings).name}, not tuned again")
    return TableResult(lines, "epsilon", notes, tuning)


def _printed_figure(
    rows: Sequence[dict[str, str]], name: str, n: int, epsilon: float
) -> tuple[float | None, float | None]:
    for row in rows:
        if (row["method"], int(row["n_clients"]), float(row["epsilon"])) == (name, n, epsilon):
            return 100 * float(row["test_accuracy_fraction"]), None
    return None, None


def damping(request: TableRequest) -> TableResult:
    """Tables 6 and 12 have no body: alpha and rho at epsilon 1, all else 1, with duals and without."""
    wants = []
    for each in _of_methods(request, newton("dp-fednew", "DP-FedNew")[:2]):
        for n in of_table(request, (100, 500)):
            for alpha in (0.01, 0.1, 1.0):
                for rho in (0.01, 0.1, 1.0, 10.0, 100.0):
                    labels = {"method": each.label, "n": n, "alpha": alpha, "rho": rho}
                    wants.append(Want(labels, _damped(request, each, n, alpha, rho), {10: (None, None)}))
    notes = (
        "the paper prints no body of its tables 6 and 12; its words: the best rho is mostly 1, and alpha below 1",
        "eta = C1 = C2 = Delta_H = 1, epsilon 1, secure aggregation, one record joins or leaves",
    )
    return TableResult(train(request, wants, request.seeds or SEEDS, split=1), "rho", notes)


def _damped(request: TableRequest, each: Rival, n: int, alpha: float, rho: float) -> dict[str, Any]:
    options = {"alpha": alpha, "rho": rho, "lr": 1.0, "clip": 1.0, "limit": 1.0, "curvature_clip": 1.0}
    base = {**_base(request.dataset, "iid", n), "data": request.source, "solver": "cg"}
    return {**base, **each.values("record"), **options, "epsilon": 1.0}


def eigenvalues(request: TableRequest) -> TableResult:
    """The columns of tables 6 and 12: accuracy, and the mean over clients of the largest eigenvalue of H_i, by round.

    The settings are the three that are best with duals in `damping`. H_i is the mean of clipped Hessians, which the
    method inverts; beside it stands the mean of the Hessians before clipping.
    """
    clips = {"λ_max of clipped H_i": 1.0, "λ_max before clipping": math.inf}

    def watch(model: BuiltModel, theta: Tensor, records: Records) -> dict[str, float]:
        if not isinstance(model, Linear):
            raise SordinoError("model: only the Hessian of a linear head is computed.")
        return {name: float(client_eigenvalues(model, theta, records, clip).mean()) for name, clip in clips.items()}

    wants = []
    for n in of_table(request, (100, 500)):
        for alpha, rho in BEST_DAMPING:
            labels = {"measure": "accuracy", "n": n, "what": f"α = {alpha:g}, ρ = {rho:g}"}
            wants.append(Want(labels, _damped(request, DUALS, n, alpha, rho), EPOCHS))
    seeds = request.seeds or SEEDS
    runs = attempt(request, wants, range(1, seeds + 1), split=1, watch=watch)
    lines = []
    for k, want in enumerate(wants):
        part = runs[k * seeds : (k + 1) * seeds]
        lines.append(line(want, part))
        for name in clips:
            lines.append(watched_line(want, part, name, {**want.labels, "measure": name}, 3))
    notes = (
        "the paper prints no body of its tables 6 and 12, so no value stands beside these",
        "DP-FedNew with duals, eta = C1 = C2 = Delta_H = 1, epsilon 1, secure aggregation, one record joins or leaves",
        "the three best settings of fednew-alpha-rho with duals; Hessians are clipped in the Frobenius norm",
    )
    return TableResult(lines, "measure", notes)


# ------------------------------------------------------------------------------------------------------------ tables

IMAGENET = "features by a ResNet-50 that was trained on ImageNet (sordino features --network resnet50 --size 224)"
FASHION = (
    "fashion_mnist_resnet44.npz",
    "features of Fashion-MNIST by a ResNet-44 that was trained on CIFAR-100 (sordino features --data fashion-mnist "
    "--network resnet44 --weights FILE --out fashion_mnist_resnet44.npz)",
)
CIFAR = (
    "cifar10_resnet44.npz",
    "features of CIFAR-10 by a ResNet-44 that was trained on CIFAR-100 (sordino features --data cifar10 "
    "--network resnet44 --weights FILE --out cifar10_resnet44.npz)",
)
SYNTHETIC = "synthetic(5,5,clients={clients},records=50000,spread=0)"

TABLES = (
    PaperTable(
        "fednew-5",
        "Federated EMNIST, 100 x 47, at most two classes a client",
        partial(comparison, who=COVARIANCE, clients=(47, 100, 250, 500, 1000), of="fednew-5", partition="classes:2"),
        "federated_emnist_pca100.npz",
        "EMNIST balanced (sordino's emnist-balanced, from NIST) on its first 100 principal components",
    ),
    PaperTable(
        "fednew-8",
        "Adult, 123 x 2, IID",
        partial(comparison, who=EVERYONE, clients=(10, 100, 250, 500), of="fednew-8"),
        "a9a",
        "files a9a and a9a.t of LIBSVM's data sets (downloaded by sordino run --data a9a)",
    ),
    PaperTable(
        "fednew-10",
        "Fashion-MNIST, 2048 x 10, IID",
        partial(comparison, who=COVARIANCE, clients=(20, 50, 100, 250, 500), of="fednew-10"),
        "fashion_mnist_resnet50.npz",
        IMAGENET,
    ),
    PaperTable(
        "fednew-11",
        "EMNIST digits, 2048 x 10, IID",
        partial(comparison, who=COVARIANCE, clients=(50, 100, 250, 500), of="fednew-11"),
        "emnist_digits_resnet50.npz",
        IMAGENET,
    ),
    PaperTable(
        "fednew-synthetic",
        "Synthetic(5, 5), 60 x 10, clients unlike each other (its figures 2 and 6)",
        partial(comparison, who=EVERYONE, clients=(100, 500), source=SYNTHETIC, partition="by-site"),
    ),
    PaperTable(
        "fednew-fashion",
        "Fashion-MNIST, 64 x 10, IID (its table 4, which has no body)",
        partial(comparison, who=EVERYONE, clients=(100, 500, 1000)),
        *FASHION,
    ),
    PaperTable(
        "fednew-cifar",
        "CIFAR-10, 64 x 10, IID (its figures 1a and 9a, which print no values)",
        partial(comparison, who=EVERYONE, clients=(100, 500), units=("record",)),
        *CIFAR,
    ),
    PaperTable(
        "fednew-cifar-client",
        "CIFAR-10, 64 x 10, IID, client level (its figures 3 and 7, which print no values)",
        partial(comparison, who=EVERYONE, clients=(USERS,), units=("client",)),
        *CIFAR,
    ),
    PaperTable("fednew-alpha-rho", "alpha and rho of DP-FedNew, Fashion-MNIST (its table 6)", damping, *FASHION),
    PaperTable(
        "fednew-eigenvalues",
        "largest eigenvalues of the clients' Hessians, Fashion-MNIST (columns of its table 6)",
        eigenvalues,
        *FASHION,
    ),
)
