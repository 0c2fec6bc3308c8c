"""The federated configurations of the DP-FedAdamW paper (arXiv 2602.19945, tables 18 to 20), and their guarantees.

`preset` gives a row as keys of a run. A table trains nothing: its lines are the epsilon of each row under both
adjacencies, which needs no data, and its notes state what can be run on this machine. Our accuracies are not compared
with those of the paper, because its released code clips the gradient of a batch per tensor, not that of a record.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from papers.tables import PaperTable, TableRequest, TableResult, against, on_this_machine, published, roots, set_files
from sordino.core import Adjacency
from sordino.errors import SordinoError, nearest
from sordino.methods import entry
from sordino.models.pretrained import TRANSFORMERS
from sordino.models.transformers import package_folder
from sordino.privacy.accounting import subsampled
from sordino.privacy.accounting.samplers import SampledGaussian, Sampler

CLIP, GAMMA = 0.1, 0.5
UNPRINTED = {"tau": 1e-8, "rho": 0.05, "strength": 1.0}  # AdamW's default; a tried value; ours
SKEW = {
    "adamw-18": 0.6,
    "adamw-19": 0.8,
    "adamw-20": 0.6,
}  # concentration of the Dirichlet partition; the paper also uses 0.1
RECORDS = {  # for training, as published
    "cifar10": 50_000,
    "cifar100": 50_000,
    "tiny-imagenet": 100_000,
    "sst2": 67_349,
    "qqp": 363_846,
    "qnli": 104_743,
    "mnli": 392_702,
}
SETS = {
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Tiny-ImageNet": "tiny-imagenet",
    "SST-2": "sst2",
    "QQP": "qqp",
    "QNLI": "qnli",
    "MNLI": "mnli",
}
MODELS = {
    "ResNet-18 (GN)": ("resnet18-gn",),
    "ViT-Base": ("vit-base-lora",),
    "Swin-Tiny/Base": ("swin-tiny-lora", "swin-base-lora"),
    "RoBERTa-Base": ("roberta-base-lora",),
}


class PaperRow(NamedTuple):
    """One configuration as printed, and the records of its set."""

    data: str
    printed: str  # the model's name
    models: tuple[str, ...]
    clients: int
    rounds: int
    steps: int
    part: float  # share of clients per round
    batch: int
    sigma: float  # std of a client's noise / clip
    delta: float
    model_options: dict[str, Any]  # keys of the model: adapters, length

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of clients, as equal as possible."""
        each, more = divmod(RECORDS[self.data], self.clients)
        return tuple(each + (k < more) for k in range(self.clients))

    @property
    def rate(self) -> float:
        """Sampling rate of the smallest client."""
        return self.batch / min(self.sizes)

    @property
    def releases(self) -> dict[str, int]:
        """Noised gradients per client: if it joins its share of the rounds, and if it joins all."""
        every = self.rounds * self.steps
        return {"T K": every} if self.part == 1 else {"T K l": round(every * self.part), "T K": every}


def rows(table: str) -> list[PaperRow]:
    """Rows of tables 18 and 19. Table 20 is about the first model of table 18."""
    if table not in SKEW:
        raise SordinoError(f"table: '{table}' is unknown.{nearest(table, SKEW)}")
    if table == "adamw-20":
        return [row for row in rows("adamw-18") if row.models == MODELS["ResNet-18 (GN)"]]
    return [_row(line) for line in published(table.replace("-", "_table"))]


def _row(line: dict[str, str]) -> PaperRow:
    models = MODELS[line["model"]]
    model_options: dict[str, Any] = {"length": int(line["length"])} if "length" in line else {}
    if models[0] in TRANSFORMERS:
        rank, alpha, dropout = int(line["lora_rank"]), float(line["lora_alpha"]), float(line["dropout"])
        model_options |= {"lora_rank": rank, "lora_alpha": alpha, "lora_dropout": dropout}
    return PaperRow(
        data=SETS[line["dataset"]],
        printed=line["model"],
        models=models,
        clients=int(line["clients"]),
        rounds=int(line["rounds"]),
        steps=int(line["steps"]),
        part=float(line["participation"]),
        batch=int(line["batch"]),
        sigma=float(line["sigma"]),
        delta=float(line["delta"]),
        model_options=model_options,
    )


def methods() -> dict[str, dict[str, str]]:
    """Table 20 under the names of this library."""
    return {line["method"].lower(): line for line in published("adamw_table20")}


# ----------------------------------------------------------------------------------------------------------- presets


def preset(
    table: str,
    data: str,
    method: str,
    *,
    model: str | None = None,
    sigma: float | None = None,
    alpha: float | None = None,
    adjacency: str = "add-remove",
    **more: Any,
) -> dict[str, Any]:
    """Keys for `Spec.of`: a row of adamw-18, adamw-19 or adamw-20, trained by one of table 20's methods.

    A client's noise is `sigma` times the clip. Step sizes are those of table 20, which were chosen for ResNet-18; for
    other models the paper prints only grids.

    Args:
      model: if the row has several: resnet18-gn, vit-base-lora, swin-tiny-lora or swin-base-lora.
      sigma: by default the row's.
      alpha: of the Dirichlet partition.
      more: further keys (weights, seed, evaluate_every), and other values for the preset's (lr, tau, rounds). Another
        model than the row's is merged over what is returned: `| {"model": "minilm-lora"}`.
    """
    row, chosen = _find(table, data, model)
    sigma = row.sigma if sigma is None else sigma
    return {
        "data": data,
        "model": chosen,
        **row.model_options,
        "method": method,
        "rounds": row.rounds,
        **options(method, row.steps),
        "clients": row.clients,
        "partition": f"dirichlet:{SKEW[table] if alpha is None else alpha:g}",
        "participation": "full" if row.part == 1 else f"fixed:{round(row.part * row.clients)}",
        "batch": f"poisson:{row.batch}",
        "divisor": "client-mean",
        "unit": "record",
        "adjacency": adjacency,
        "noise": sigma * math.sqrt(row.clients * row.part),
        "delta": row.delta,
        **more,
    }


def _find(table: str, data: str, model: str | None) -> tuple[PaperRow, str]:
    row_of = {(row.data, each): row for row in rows(table) for each in row.models}
    if data not in {known for known, _ in row_of}:
        raise SordinoError(f"data: {table} has no row for '{data}'.{nearest(data, {known for known, _ in row_of})}")
    models = [each for known, each in row_of if known == data]
    if model is None and len(models) == 1:
        model = models[0]
    if model not in models:
        wrong = "several models" if model is None else f"no row for '{model}'"
        raise SordinoError(f"model: {table} has {wrong} on {data}; name one of {', '.join(models)}.")
    return row_of[data, model], model


def options(method: str, steps: int) -> dict[str, Any]:
    """The paper's settings for options of the method."""
    known = methods()
    if method not in known:
        raise SordinoError(f"method: '{method}' is not in table 20.{nearest(method, known)}")
    line, method_options = known[method], entry(method).options
    settings = {key: float(line[key]) for key in ("beta1", "beta2", "decay") if line[key]}
    settings |= (
        {"local_lr": float(line["lr"]), "lr": 1.0} if "local_lr" in method_options else {"lr": float(line["lr"])}
    )
    settings |= {"clip": CLIP, "gamma": GAMMA} | UNPRINTED
    return {"steps": steps, **{key: value for key, value in settings.items() if key in method_options}} | (
        {"schedule": "cosine"} if "schedule" in method_options else {}
    )


# ------------------------------------------------------------------------------------------------------------ epsilon


def epsilon(
    row: PaperRow,
    releases: int,
    adjacency: str,
    *,
    sampler: str = "poisson",
    gradients: int = 1,
    sigma: float | None = None,
) -> float:
    """Epsilon of the smallest client. gradients: noised answers per minibatch."""
    mu = math.sqrt(gradients) / (row.sigma if sigma is None else sigma)
    return _epsilon(SampledGaussian(row.rate, mu, releases, Sampler(sampler)), row.delta, Adjacency(adjacency))


@cache
def _epsilon(sampled: SampledGaussian, delta: float, adjacency: Adjacency) -> float:
    """Tables repeat the same account for many methods, and 0.1 s of it each time."""
    return subsampled.epsilon([sampled], delta, adjacency)


ACCOUNTS = {  # by the words for them
    "add-remove": ("add-remove", "poisson"),
    "replace-one": ("replace-one", "poisson"),
    "replace-one, fixed size": ("replace-one", "fixed"),
}


def _lines(table: str) -> list[dict[str, Any]]:
    if table == "adamw-20":  # CIFAR-100 has the same number of records and the same settings
        row = rows(table)[0]
        return [
            each
            for method, line in methods().items()
            for each in _published_lines(
                table, row, method, {"method": method, "lr": line["lr"], "decay": line["decay"]}
            )
        ]
    two = {"dp-fedadamw": "all but dp-fedsam", "dp-fedsam": "dp-fedsam"}
    return [
        each
        for row in rows(table)
        for method, name in two.items()
        for each in _published_lines(table, row, method, {"data": row.data, "model": row.printed, "method": name})
    ]


def _published_lines(table: str, row: PaperRow, method: str, labels: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of one configuration and method: each count of minibatches by each account."""
    lines = []
    for times, count in row.releases.items():
        for account, (adjacency, sampler) in ACCOUNTS.items():
            shown = {
                **labels,
                "delta": row.delta,
                "rate": f"{row.batch}/{min(row.sizes):,}",
                "minibatches": f"{count:,} ({times})",
                "epsilon": account,
            }
            known = epsilon(row, count, adjacency, sampler=sampler, gradients=2 if method == "dp-fedsam" else 1)
            settings = preset(table, row.data, method, model=row.models[0], adjacency=adjacency)
            settings |= {"batch": f"{sampler}:{row.batch}"}
            lines.append(
                {
                    "labels": shown,
                    "rounds": {str(row.rounds): against([known]) | {"digits": 2}},
                    "settings": settings,
                }
            )
    return lines


# ------------------------------------------------------------------------------------------------------ what is there


def weights(model: str, data_dir: str | None) -> str | None:
    """The folder of published weights: DIR/roberta-base of roberta-base-lora."""
    places = (root / _folder(model) for root in roots(data_dir))
    return next((str(place) for place in places if (place / "config.json").is_file()), None)


def command(values: dict[str, Any]) -> str:
    """The run as one command."""
    return " ".join(["sordino run", *(f"--set {key}={shlex.quote(str(value))}" for key, value in values.items())])


def _folder(model: str) -> str:
    """The folder of its weights."""
    return model.removesuffix("-lora")


class Missing(NamedTuple):
    """What rows lack on this machine."""

    sets: dict[str, bool]  # by name: whether it is there
    folders: dict[str, str | None]  # of weights, by model
    notes: list[str]

    def runs(self, data: str, model: str) -> bool:
        """Whether a row can be trained here."""
        return self.sets[data] and self.folders.get(model, "") is not None


def missing(name: str, needed: Sequence[tuple[str, str]], data_dir: str | None) -> Missing:
    """Whether sets and weights are on this machine. needed: pairs of set and model."""
    sets = {data: on_this_machine(data, data_dir) for data, _ in needed}
    folders = {model: weights(model, data_dir) for _, model in needed if model in TRANSFORMERS}
    notes = []
    if lacking := [set_files(data)[0] for data, here in sets.items() if not here]:
        wanted = ", ".join(f"{each.title} ({each.remotes[0].file} in DIR/{each.folders[0]})" for each in lacking)
        notes.append(
            f"data not at hand: {name} needs {wanted}. Name DIR by --data-dir, or let sordino run download them"
        )
    if absent := [_folder(model) for model, folder in folders.items() if folder is None]:
        notes.append(
            f"weights not at hand: {name} needs {', '.join(absent)}, each as save_pretrained writes it (with "
            f"tokenizer.json where it reads text) in a folder of that name under DIR; none are downloaded"
        )
    return Missing(sets, folders, notes)


def _at_hand(table: str, data_dir: str | None) -> list[str]:
    """Missing files and their folders, and one command per model that can be run."""
    everything = rows(table)
    lacks = missing(table, [(row.data, model) for row in everything for model in row.models], data_dir)
    notes, sets, folders = lacks.notes, lacks.sets, lacks.folders
    for model in dict.fromkeys(each for row in everything for each in row.models):
        row = max((row for row in everything if model in row.models), key=lambda row: bool(sets[row.data]))
        here = lacks.runs(row.data, model)
        more: dict[str, Any] = {"weights": folders[model] or f"DIR/{_folder(model)}"} if model in folders else {}
        more |= {"data_dir": data_dir or "DIR"} if data_dir or not here else {}
        when = "" if here else ", with its files in DIR"
        notes.append(f"to run it{when}: {command(preset(table, row.data, 'dp-fedadamw', model=model, **more))}")
    if sets.get("sst2") and package_folder() is not None:
        notes.append(
            "SST-2 and MiniLM are at hand: benchmarks/sst2.py runs this configuration on minilm-lora in place of "
            "roberta-base-lora"
        )
    return notes


NOTES = (
    "epsilon of the configuration, for the client with the fewest records where sizes are equal and every message is "
    "seen; nothing was trained for it. Minibatches are Poisson's but in the last column. A Dirichlet partition makes "
    "sizes unlike: a run counts each client's own rate, and a small client's epsilon is larger than these",
    "T K: who came to all rounds. T K l: who came to its share of them; a schedule gives some clients more, and a run "
    "counts what each one's own schedule says. Not knowing who came helps no record: other records of a client tell",
    "dp-fedsam noises two gradients of each minibatch, which counts as one with sigma / sqrt(2)",
    "the paper draws minibatches of a fixed size, which need more noise than Poisson's, because a record that is drawn "
    "takes the place of another; a preset draws Poisson ones of the same expected size",
    "step sizes are table 20's (ResNet-18); for other models the paper prints grids only. tau, rho and the smoothing's "
    "strength are not printed",
)
VISION = (
    "resnet18-gn is trained in full from random weights: it has no adapters, and no weights are published for it",
)
RESIZED = (
    "vit-base-lora and swin-*-lora resize images to the image_size of their folder, inside the model: rows stay those "
    "of the set",
)


def configuration(request: TableRequest, extra: tuple[str, ...] = ()) -> TableResult:
    """The epsilon of every row, and what can be run on this machine."""
    name = request.table.name
    return TableResult(_lines(name), "epsilon", (*NOTES, *extra, *_at_hand(name, request.data_dir)))


TABLES = (
    PaperTable(
        "adamw-18",
        "DP-FedAdamW's configurations for images, and their epsilon",
        partial(configuration, extra=(*VISION, *RESIZED)),
    ),
    PaperTable("adamw-19", "DP-FedAdamW's configurations for GLUE with RoBERTa-base, and their epsilon", configuration),
    PaperTable(
        "adamw-20",
        "DP-FedAdamW's settings of ResNet-18 by method, and their epsilon",
        partial(configuration, extra=VISION),
    ),
)
