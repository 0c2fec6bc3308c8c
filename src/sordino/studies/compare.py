"""Compare methods under exactly equal budgets: tune each once, train with every seed, collect all in one document.

Each method is tuned once per budget, by a metric of its last round on validation records: accuracy for classes, R² for
quantities, explained deviance for counts and concordance for survival, or the one that is asked for. The same setting
serves the results of all rounds; another round to tune for can be named (`tune_round`). A grid whose best value lies on
its edge is extended. Nobody pays for that. A method may have a second row, tuned within the budget: one private search
per seed, whose (epsilon, delta) covers all its runs and the choice (`private_tuning`). One more row may be that of a
trusted party that holds all records (`one_party`). A seed changes partition and noise; of private records it changes
noise alone, so that all runs expose the same test records. `report` turns the document into a page, Markdown and
figures.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sordino import files
from sordino.data.partition import describe
from sordino.data.schema import Schema
from sordino.data.sources import Dataset
from sordino.errors import SordinoError, nearest
from sordino.evidence.certificate import certificate, finite
from sordino.methods import REGISTRY, entry
from sordino.models import registry
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Seeded
from sordino.settings import parse_setting
from sordino.studies import curves, one_party, private_tuning
from sordino.studies.grids import UNTUNED, Grid, cut, preset
from sordino.studies.statistics import mcnemar, pack, unpack
from sordino.studies.tune import TuningCase, tune, validated
from sordino.training.batch import Trained, run_many
from sordino.training.evaluate import edges_of, in_units, predictions, task_of, task_of_data
from sordino.training.metrics import NAMES, TASKS, Task, ranking_metric, score, task_of_classes
from sordino.training.resolved import DataSource, ResolvedSpec, resolve
from sordino.training.spec import RUN_KEYS, Spec
from sordino.version import __version__

PAPER = (
    "dp-fedgd",
    "dp-fedavg",
    "dp-fedfc",
    "dp-scaffold",
    "dp-fedadam",
    "dp-fedyogi",
    "dp-ftrl",
    "dp-adafedprox",
    "dp-fedsofim",
    "dp-fedsofim:apply_to=momentum",
)
RIVAL, SHARE = "dp-fedgd", 0.95  # the report counts the rounds until this share of this method's last accuracy
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times a tuned step size: how much does it matter?
MEMORIES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
WITHIN = "{}, tuned within the budget"  # the label of the row of a paid search
PAID_RUNS = 8  # of a paid search; more settings leave less of the budget for each
EXTENSIONS = 4  # times that a grid is extended where its best value lies on an edge
EXPOSED = (
    "the records are private: no noise hides the test records in these figures, and the noise of the runs can be "
    "subtracted; show this comparison to nobody who may not see the records"
)
Tick = Callable[[int], None]


class Contestant(NamedTuple):
    label: str
    method: str
    options: dict[str, Any]  # fixed, not tuned

    def values(self, base: dict[str, Any], epsilon: float) -> dict[str, Any]:
        """The keys of a run.

        A common option such as the clip is set for methods that have it and do not derive it, and the common number of
        rounds for methods that have a choice: the others keep their own, and spend the whole budget there.
        """
        known = entry(self.method)
        method_options = () if self.method in UNTUNED else known.options
        common = {key: value for key, value in base.items() if key in SHARED_KEYS or key in method_options}
        if known.fixed:
            common.pop("rounds", None)
        return {**common, **self.options, "method": self.method, "epsilon": epsilon}


GRADIENT_OPTIONS = entry("dp-fedgd").options
OPTION_KEYS = {key for known in REGISTRY.values() for key in known.options}
SHARED_KEYS = {
    *RUN_KEYS,
    *(key for known in registry.REGISTRY.values() for key in known.options),
}  # keys that belong to no method


def contestants(requests: Sequence[str], base: dict[str, Any]) -> list[Contestant]:
    """Parse `paper`, `all`, or names with options as in dp-fedsofim:rho=1.

    `paper` and `all` keep the methods that are proved in this setting.
    """
    if unknown := [key for key in base if key not in SHARED_KEYS and key not in OPTION_KEYS]:
        raise SordinoError(
            f"{unknown[0]}: no method has this option.{nearest(unknown[0], [*SHARED_KEYS, *OPTION_KEYS])}"
        )
    chosen: list[Contestant] = []
    for request in requests:
        if request == "paper":
            chosen += [each for each in map(_contestant, PAPER) if _proved(each.values(base, 1.0))]
        elif request == "all":
            chosen += [each for each in map(_contestant, REGISTRY) if _proved(each.values(base, 1.0))]
        else:
            chosen.append(_contestant(request))
            _check(chosen[-1].values(base, 1.0), int(base.get("clients", 10)))
    return list({each.label: each for each in chosen}.values())


def _contestant(text: str) -> Contestant:
    name, *settings = text.split(":")
    entry(name)
    options = dict(map(parse_setting, settings))
    for key in options:
        if key not in entry(name).options:
            raise SordinoError(f"methods: {name} has no option '{key}'.{nearest(key, entry(name).options)}")
    about = ", ".join(value if isinstance(value, str) else f"{key} {value:g}" for key, value in options.items())
    return Contestant(f"{name} ({about})" if about else name, name, options)


def _check(values: dict[str, Any], clients: int) -> None:
    """Fail here, before anything is trained, if the options are wrong or do not fit the task of a schema."""
    resolved = resolve(Spec.of(values))
    resolved.plan((10,) * clients)
    if (schema := resolved.source.schema) is not None:
        resolved.build_model(len(schema.features), len(schema.classes))


def _proved(values: dict[str, Any]) -> bool:
    try:
        _check(values, 2)
    except SordinoError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------ tuning


def settle(
    who: Sequence[Contestant],
    base: dict[str, Any],
    epsilons: Sequence[float],
    *,
    grid: str = "paper-fine",
    how: str = "grid",
    validation: float = 0.1,
    metric: str | None = None,
    tune_round: int | None = None,
    alone: bool = False,
    most: int | None = None,
    data: Dataset | None = None,
    **search: Any,
) -> dict[str, Any]:
    """Tune every contestant for every budget. The result is the `tuning` part of a document.

    tune_round: the round whose metric decides (default: the last). alone: also tune the row of `one_party`. most:
    settings of a grid that are tried (default: all). data: the data of `base`, where they are in memory already.
    search: see `tune`.
    """
    cases: list[tuple[Contestant, float, TuningCase]] = []
    for each in who:
        for epsilon in epsilons:
            tried = _tried(each, base, epsilon, grid)
            tried = tried if most is None else cut(tried, most)
            cases.append((each, epsilon, TuningCase({**each.values(base, epsilon), "seed": 0, "split_seed": 0}, tried)))
    tunable = [case for case in cases if case[2].grid]
    if data is None and tunable:
        data = resolve(Spec.of(tunable[0][2].values)).read_data()
    dataset = validated(data, validation) if data is not None and tunable else None
    metric = ranking_metric(metric, task_of_data(dataset)) if dataset else metric
    search = {"extensions": EXTENSIONS, "metric": metric, "tune_round": tune_round, **search}
    tuned = tune([case for *_, case in tunable], dataset, how=how, **search) if dataset else []
    settings = [
        {
            "method": each.label,
            "epsilon": finite(epsilon),
            "options": best.options,
            "score": best.score,
            "tried": best.tried,
            **({"added": best.added} if best.added else {}),
            **({"edge": list(best.edge)} if best.edge else {}),
        }
        for (each, epsilon, _), best in zip(tunable, tuned, strict=True)
    ]
    for row in one_party_lineup(base, epsilons, [0]) if alone else ():
        share, score = one_party.best_share(row.values, validated(row.data(), validation), metric)
        found: dict[str, Any] = {"options": {"share": share}, "score": score, "tried": len(one_party.SHARES)}
        settings.append({"method": one_party.LABEL, "epsilon": row.values["epsilon"], **found})
    held = "records" if dataset is None or dataset.person is None else "persons"
    return {
        "how": in_words(settings, how, grid, tune_round),
        "paid": private_tuning.UNPAID,
        "validation": f"{validation:.0%} of the training {held}, held out by position (seed 0); no test record",
        "settings": settings,
        "metric": metric or "accuracy",
        **({} if tune_round is None else {"round": tune_round}),
    }


def _tried(who: Contestant, base: dict[str, Any], epsilon: float, grid: str) -> Grid:
    """The values of a preset that are proved in this setting: for example no K > 1 if the server sees only sums."""
    at = who.values(base, 1.0)
    return {
        key: tuple(value for value in values if _proved({**at, key: value}))
        for key, values in preset(grid, who.method, epsilon).items()
        if key not in who.options
    }


def in_words(settings: Sequence[dict[str, Any]], how: str, grid: str, tune_round: int | None) -> str:
    """How a search chose: over which grid, by which round, and which grids were extended."""
    by = "" if tune_round is None else f", by the metric after round {tune_round}"
    return f"{how} over {grid}{by}{extended(settings)}"


def extended(settings: Sequence[dict[str, Any]]) -> str:
    """Which grids were extended, in words; empty if none was."""
    grown = dict.fromkeys(f"{each['method']} ({key})" for each in settings for key in each.get("added", ()))
    if not grown:
        return ""
    words = f"; extended where the best value lay on an edge: {', '.join(grown)}"
    still = dict.fromkeys(f"{each['method']} ({key})" for each in settings for key in each.get("edge", ()))
    return words + (f"; still on the edge after {EXTENSIONS} extensions: {', '.join(still)}" if still else "")


UNTOUCHED: dict[str, Any] = {"how": "none", "paid": "nothing was tuned", "validation": "none", "settings": []}


class PaidSearch(NamedTuple):
    """A search within the budget of one run, and its place in the document."""

    label: str
    beside: str  # the label of the row that it stands beside
    values: dict[str, Any]
    grid: Grid
    how: str  # one of `private_tuning.SELECTIONS`
    runs: int
    public: str | None = None

    def command(self) -> str:
        """The `sordino sweep` command for the same search."""
        run = as_command(Spec.of(self.values)).replace("sordino run", "sordino sweep", 1)
        listed = {key: ",".join(map(as_word, values)) for key, values in self.grid.items()}
        grids = [f"--grid {shlex.quote(f'{key}={values}')}" for key, values in listed.items()]
        public = [f"--public {shlex.quote(self.public)}"] if self.public else []
        return " ".join([run, *grids, f"--charge-tuning {self.how}", f"--paid-runs {self.runs}", *public])


def paid_lineup(
    who: Sequence[Contestant],
    base: dict[str, Any],
    epsilons: Sequence[float],
    seeds: Sequence[int],
    how: str,
    *,
    grid: str = "paper-fine",
    runs: int = PAID_RUNS,
    public: str | None = None,
    metric: str | None = None,
) -> list[PaidSearch]:
    """One search per tunable method, finite budget and seed, checked before anything is trained.

    Args:
        who: The methods. Those without a grid have no such row.
        base: The keys that all runs share.
        epsilons: The budgets. Without noise there is nothing to pay, and no row.
        seeds: As in `lineup`. Each seed makes a search of its own.
        how: How the search is paid for.
        grid: The preset that settings are drawn from. It is not extended, because that would look at the data.
        runs: Runs of each search; for random stopping, the expected number.
        public: A file of public records, for `how = public`.
        metric: What the comparison ranks by; None for that of the task.

    Returns:
        The searches.

    Raises:
        SordinoError: The cost of such a search is not proved, the metric is not that of the task, the public records do
            not fit, or there is nothing to tune.
    """
    searches = []
    for each in who:
        for epsilon in filter(math.isfinite, epsilons):
            if tried := _tried(each, base, epsilon, grid):
                values = each.values(base, epsilon)
                private_tuning.check(resolve(Spec.of(values)), tried, how, metric)
                searches += [
                    PaidSearch(
                        WITHIN.format(each.label),
                        each.label,
                        _seeded(values, seed),
                        tried,
                        how,
                        runs,
                        public,
                    )
                    for seed in seeds
                ]
    if not searches:
        raise SordinoError(
            "--charge-tuning: there is nothing to tune within a budget; name a method that has a grid, and a finite "
            "epsilon."
        )
    first = resolve(Spec.of(searches[0].values))
    dataset = private_tuning.scoring(first, first.read_data(), public)
    ranking_metric(metric if how == "public" else "accuracy", task_of_data(dataset))  # refuses a task without it
    return searches


class OneParty(NamedTuple):
    """A row for a party that holds all records, with one seed."""

    values: dict[str, Any]
    share: float

    def data(self) -> Dataset:
        return one_party.check(self.values).read_data()


def one_party_lineup(
    base: dict[str, Any], epsilons: Sequence[float], seeds: Sequence[int], tuning: dict[str, Any] | None = None
) -> list[OneParty]:
    """One fit per finite budget and seed, checked before anything is trained."""
    known = Contestant(one_party.LABEL, one_party.METHOD, {})
    settings = (tuning or UNTOUCHED)["settings"]
    chosen = {each["epsilon"]: each["options"]["share"] for each in settings if each["method"] == one_party.LABEL}
    rows = [
        OneParty(
            _seeded(known.values(base, epsilon), seed),
            chosen.get(epsilon, one_party.SHARE),
        )
        for epsilon in filter(math.isfinite, epsilons)
        for seed in seeds
    ]
    if not rows:
        raise SordinoError("--one-party: without noise there is nothing to compare with; name a finite epsilon.")
    one_party.check(rows[0].values)
    return rows


# ----------------------------------------------------------------------------------------------------------- running


class Entrant(NamedTuple):
    """A run to make, and its place in the document."""

    label: str
    group: str
    values: dict[str, Any]
    vary: tuple[str, Any] | None = None


def lineup(
    who: Sequence[Contestant],
    base: dict[str, Any],
    epsilons: Sequence[float],
    seeds: Sequence[int],
    tuning: dict[str, Any],
) -> list[Entrant]:
    """The runs of the comparison itself."""
    chosen = {(s["method"], s["epsilon"]): s["options"] for s in tuning["settings"]}
    return [
        Entrant(each.label, "comparison", _seeded(values, seed))
        for each in who
        for epsilon in epsilons
        for values in [{**each.values(base, epsilon), **chosen.get((each.label, finite(epsilon)), {})}]
        for seed in seeds
    ]


def _seeded(values: dict[str, Any], seed: int) -> dict[str, Any]:
    """The keys of the run with this seed. Private records keep one split: each further one would expose others."""
    everybody_may_see = resolve(Spec.of({**values, "seed": seed})).source.open
    return {**values, "seed": seed, "split_seed": seed if everybody_may_see else values.get("split_seed", 0)}


def ablation(runs: Sequence[Entrant], of: str) -> list[Entrant]:
    """DP-FedSOFIM without its parts, at equal effective step lr / rho: only the gradient, only its moving average."""
    entrants = []
    for run in runs:
        if run.label == of:
            whole = {**entry("dp-fedsofim").options, **run.values}
            step = whole["lr"] / whole["rho"]
            plain = {key: value for key, value in run.values.items() if key in SHARED_KEYS or key in GRADIENT_OPTIONS}
            entrants.append(Entrant("gradient alone", "ablation", {**plain, "method": "dp-fedgd", "lr": step}))
            average = {"apply_to": "gradient", "rho": 1.0, "lr": step, "ema_rounds": 10**6}
            entrants.append(Entrant("moving average alone", "ablation", {**run.values, **average}))
            entrants.append(run._replace(label=f"full: {of}", group="ablation"))
    return entrants


def sensitivity(runs: Sequence[Entrant], of: str) -> list[Entrant]:
    """Vary one method's settings: each step and regulariser times FACTORS, each momentum over MEMORIES."""
    entrants = []
    for run in runs:
        if run.label != of:
            continue
        for key in [k for k in ("lr", "rho", "beta") if k in entry(run.values["method"]).options]:
            centre = run.values.get(key, entry(run.values["method"]).options[key])
            for value in MEMORIES if key == "beta" else [centre * factor for factor in FACTORS]:
                entrants.append(Entrant(of, "sensitivity", {**run.values, key: value}, (key, value)))
    return entrants


def document(
    entrants: Sequence[Entrant],
    *,
    base: dict[str, Any],
    tuning: dict[str, Any],
    command: str,
    printed: Sequence[int] = (),
    pairs: Sequence[tuple[str, str]] = (),
    paid: Sequence[PaidSearch] = (),
    alone: Sequence[OneParty] = (),
    metric: str | None = None,
    device: str = "cpu",
    tick: Tick = lambda runs: None,
) -> dict[str, Any]:
    """Train all runs, and collect what a report needs.

    paid: searches within the budget. Each becomes one more run of the document.
    alone: fits by one party that holds all records. Each becomes one more run, after the others.
    pairs: labels for McNemar's test, on the first seed; for classes only.
    metric: what to rank by; by default that of the task.
    """
    specs = [Spec.of(entrant.values) for entrant in entrants]
    trained = run_many(specs, device=device, metric=metric, tick=tick)
    metric = ranking_metric(metric, task_of(trained[0].model))
    read: tuple[DataSource, Dataset] | None = None
    runs, partition, tested = [], dict[str, list[list[int]]](), dict[int | None, int]()
    for entrant, spec, each in zip(entrants, specs, trained, strict=True):
        if read is None or read[0] != each.resolved.source:
            read = each.resolved.source, each.resolved.read_data()
        data = read[1]
        client = each.resolved.owners(data)
        runs.append(_filed(entrant, spec, each, data, client, metric))
        if str(spec.seed) not in partition:
            partition[str(spec.seed)] = _held(data, client, each.plan.clients)
            tested[spec.seed] = len(data.y_test)
    for search, filed in zip(paid, _all_paid(paid, metric, device, tick), strict=True):
        above = [run["group"] == "comparison" and run["label"] in (search.label, search.beside) for run in runs]
        runs.insert(len(above) - above[::-1].index(True), filed)
    for row in alone:
        runs.append(_fitted(row, metric, command))
        tick(1)
    assert read is not None
    lengths, first = {len(each.scores) for each in trained} | ({1} if alone else set()), read[1]
    shared = {key: value for key, value in base.items() if key not in OPTION_KEYS}
    promise = {key: value for key, value in trained[0].resolved.spec.values().items() if key in PROMISE}
    return {
        "sordino": __version__,
        "command": command,
        "host": {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__},
        "setting": {**promise, **shared},
        "data": {
            "name": first.name,
            "train": len(first.y_train),
            "test": len(first.y_test),
            "features": first.x_train.shape[1],
            "task": first.task,
            "classes": list(first.classes),
            "clients": trained[0].plan.clients,
        },
        "metric": metric,
        "rounds": list(printed) or _printed(lengths),
        "target": {
            "reference": RIVAL if any(e.label == RIVAL for e in entrants) else entrants[0].label,
            "share": SHARE,
        },
        "tuning": tuning,
        "partition": partition if _may_show_clients(trained[0].resolved) else None,
        "exposed": "" if trained[0].resolved.source.open else EXPOSED,
        "runs": runs,
        "pairs": _pairs(runs, pairs, tested),
        "varied": _varied(entrants),
    }


def _may_show_clients(resolved: ResolvedSpec) -> bool:
    """Whether exact figures of clients' own records may be shown: those of clients that are simulated, and of records
    that everybody may see."""
    return resolved.source.open and not resolved.partition.by_site


def check_metric(name: str | None, base: dict[str, Any]) -> str | None:
    """Refuse a metric that no task has, or not the one of the schema. None: that of the task."""
    if name is not None and name not in NAMES:
        raise SordinoError(f"--metric: '{name}' is unknown.{nearest(name, NAMES)}")
    schema = Schema.read(base["schema"]) if base.get("schema") else None
    if schema is not None and schema.target is not None:
        return ranking_metric(name, TASKS.get(schema.task) or task_of_classes(len(schema.classes)))
    return name


def _held(data: Dataset, client: np.ndarray, clients: int) -> list[list[int]]:
    """Training records of each client, by class where there are classes."""
    if not data.classes:
        return [[int(count)] for count in np.bincount(client[client >= 0], minlength=clients)]
    return [list(map(int, each.counts)) for each in describe(data.y_train, client, len(data.classes))]


PROMISE = ("unit", "adjacency", "trust", "delta", "divisor", "partition", "participation", "rounds", "clients")


def _filed(
    entrant: Entrant, spec: Spec, trained: Trained, dataset: Dataset, client: np.ndarray, metric: str
) -> dict[str, Any]:
    plan, model = trained.plan, trained.model
    sizes_public = plan.privacy.unit.sizes_public
    cert = certificate(
        plan,
        Seeded(spec.seed or 0),
        version=__version__,
        spec_sha256=trained.resolved.spec.sha256(),
        tested=len(dataset.y_test) if sizes_public else None,
    )
    client_epsilons = np.zeros(plan.clients)
    for group in spending.groups(plan):
        client_epsilons[list(group.clients)] = spending.epsilon_of(plan, group)
    noise = calibration.aggregate_std(plan, 0) * math.sqrt(model.size)
    rounds = max(trained.scores)
    filed = {
        "label": entrant.label,
        "method": spec.method,
        "group": entrant.group,
        "epsilon": finite(spec.epsilon),
        "seed": spec.seed,
        "options": {key: value for key, value in trained.resolved.options.items() if key in spec.options},
        "accuracy": [round(trained.accuracy[t], 6) for t in sorted(trained.accuracy)],
        "signal": [float(f"{value:.4g}") for value in trained.signal] or None,
        "noise": [float(f"{noise:.4g}")] * rounds if trained.signal else None,
        **_by_class(trained, dataset),
        "per_client": _per_client(trained, dataset, client, metric) if _may_show_clients(trained.resolved) else None,
        "client_epsilon": [finite(float(f"{value:.6g}")) for value in client_epsilons],
        "seconds": round(trained.seconds, 4),
        "bytes_up": 4 * trained.traffic[0],
        "bytes_down": 4 * trained.traffic[1],
        "command": as_command(spec),
        "certificate": cert,
    }
    if metric != "accuracy":
        filed["scores"] = [finite(float(f"{trained.scores[t]:.6g}")) for t in sorted(trained.scores)]
    if sizes_public:  # the intervals tell how many test records there are
        filed |= _curves(trained, dataset)
    return filed if entrant.vary is None else {**filed, "vary": entrant.vary[0], "value": entrant.vary[1]}


def _all_paid(paid: Sequence[PaidSearch], metric: str, device: str, tick: Tick) -> list[dict[str, Any]]:
    """The chosen run of each search, in order. Searches with the same records share one reading of the file."""
    bases = [resolve(Spec.of(search.values)) for search in paid]
    filed: dict[int, dict[str, Any]] = {}
    for first, base in enumerate(bases):
        if first in filed:
            continue
        data = base.read_data()
        for k in (k for k, other in enumerate(bases) if other.source == base.source):
            filed[k] = _paid(paid[k], bases[k], data, metric, device)
            tick(1)
    return [filed[k] for k in range(len(paid))]


def _paid(search: PaidSearch, base: ResolvedSpec, data: Dataset, metric: str, device: str) -> dict[str, Any]:
    """Search within the budget, and file the chosen run.

    The chosen run is repeated with its seed, which gives the same models, to test each of them on the test records. The
    search itself has seen no test record.
    """
    dataset = private_tuning.scoring(base, data, search.public)
    chosen = private_tuning.search(
        search.values, search.grid, dataset, search.how, metric=metric, runs=search.runs, device=device
    )
    spec = chosen.trained.resolved.spec
    tested = dataset._replace(x_test=data.x_test, y_test=data.y_test)
    (trained,) = run_many([spec], tested, device=device, metric=metric)
    filed = _filed(
        Entrant(search.label, "comparison", search.values), spec, trained, tested, base.owners(tested), metric
    )
    runs = chosen.account.get("runs")  # None: a secret
    return filed | {
        "epsilon": chosen.account["epsilon"],
        "seed": base.seed,
        "client_epsilon": [chosen.account["epsilon"]] * trained.plan.clients,  # also pays for validation records
        "seconds": round(filed["seconds"] * (runs or 1), 4),
        "bytes_up": runs and runs * filed["bytes_up"],
        "bytes_down": runs and runs * filed["bytes_down"],
        "command": search.command(),
        "certificate": private_tuning.certificate_of(
            chosen, tested=len(data.y_test) if trained.plan.privacy.unit.sizes_public else None
        ),
        "tuned_within_budget": {"of": search.beside, **chosen.account},
    }


def _fitted(row: OneParty, metric: str, command: str) -> dict[str, Any]:
    """Fit and file a row of one party, which nobody certifies."""
    data = row.data()
    dataset = data._replace(x_train=one_party.within(data.x_train), x_test=one_party.within(data.x_test))
    trained = one_party.train(row.values, row.share, data, metric)
    spec, owners = trained.resolved.spec, trained.resolved.owners(data)
    filed = _filed(Entrant(one_party.LABEL, "comparison", row.values), spec, trained, dataset, owners, metric)
    return filed | {
        "method": one_party.LABEL,
        "options": {"share": row.share},
        "client_epsilon": [spec.epsilon] * trained.plan.clients,
        "bytes_up": None,
        "bytes_down": None,
        "command": command,
        "certificate": {"certified": False, "reasons": [one_party.WHY], "epsilon": spec.epsilon, "delta": spec.delta},
    }


def _by_class(trained: Trained, dataset: Dataset) -> dict[str, Any]:
    """Which test records are classified correctly, and the share of each class; None for other tasks."""
    if not dataset.classes:
        return {"per_class": None, "correct": None}
    right = trained.model.predict(trained.theta, dataset.x_test).numpy() == dataset.y_test
    sizes = np.bincount(dataset.y_test, minlength=len(dataset.classes))
    shares = np.bincount(dataset.y_test, weights=right, minlength=len(dataset.classes)) / np.maximum(sizes, 1)
    return {"per_class": [round(float(value), 4) for value in shares], "correct": pack(right)}


def _predicted(trained: Trained, x: np.ndarray, y: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions as metrics take them."""
    found = predictions(trained.model, trained.theta, torch.from_numpy(x).to(trained.theta))
    return in_units(task_of(trained.model), torch.from_numpy(y), found, unit)


def _curves(trained: Trained, dataset: Dataset) -> dict[str, Any]:
    """The curves of the last model on the test records; numbers as `predict` gives them, within the public range."""
    task = task_of(trained.model)
    y, found = _predicted(trained, dataset.x_test, dataset.y_test, 1.0)
    if task in (Task.QUANTITIES, Task.COUNTS) and dataset.schema is not None:
        y, found = dataset.schema.to_people(y), dataset.schema.to_people(found)
    return curves.of_model(task, y, found, edges_of(trained.model))


def _per_client(trained: Trained, dataset: Dataset, client: np.ndarray, metric: str) -> list[float | None]:
    """Accuracy, or the metric of another task, on each client's own training records. Only a simulation may do that."""
    if not dataset.classes:
        y, found = _predicted(trained, dataset.x_train, dataset.y_train, dataset.unit)
        task, edges = task_of(trained.model), edges_of(trained.model)
        each = (client == i for i in range(trained.plan.clients))
        values = (score(task, y[mine], found[mine], (metric,), edges=edges)[metric] for mine in each)
        return [None if value is None else float(f"{value:.4g}") for value in values]
    right = trained.model.predict(trained.theta, dataset.x_train).numpy() == dataset.y_train
    inside = client >= 0
    totals = np.bincount(client[inside], weights=right[inside], minlength=trained.plan.clients)
    return [round(float(value), 4) for value in totals / np.asarray(trained.plan.sizes)]


def _pairs(
    runs: Sequence[dict[str, Any]], pairs: Sequence[tuple[str, str]], tested: dict[int | None, int]
) -> list[dict[str, Any]]:
    """McNemar's tests on the first seed.

    tested: by seed, the number of test records, which differs where persons are held out as a whole.
    """
    compared = [run for run in runs if run["group"] == "comparison" and run["correct"] is not None]
    seed = min((run["seed"] for run in compared), default=None)
    mine = [run for run in compared if run["seed"] == seed]
    by = {(run["label"], run["epsilon"]): unpack(run["correct"], tested[seed]) for run in mine}
    tests = []
    for epsilon in dict.fromkeys(run["epsilon"] for run in compared):
        for a, b in pairs:
            if (a, epsilon) in by and (b, epsilon) in by:
                test = mcnemar(by[a, epsilon], by[b, epsilon])
                tests.append(
                    {"epsilon": epsilon, "a": a, "b": b, "seed": seed, "tested": tested[seed], **test._asdict()}
                )
    return tests


def _varied(entrants: Sequence[Entrant]) -> dict[str, list[Any]]:
    values_of: dict[str, list[Any]] = {}
    for entrant in entrants:
        if entrant.vary:
            key, value = entrant.vary
            values_of[key] = sorted({*values_of.get(key, []), value})
    return values_of


def _printed(lengths: set[int]) -> list[int]:
    """Every tenth round, as in the papers; every round if all runs are short; the last one of those that have fewer."""
    rounds = max(lengths)
    usual = range(10, rounds + 1, 10) if rounds >= 10 else range(1, rounds + 1)
    return sorted({*usual, *(lengths - {rounds})})


def as_command(spec: Spec) -> str:
    """The `sordino run` command for the same run."""
    default, flags = Spec(method=spec.method).values(), []
    for key, value in spec.values().items():
        if key not in ("data", "method", "epsilon", "seed") and default.get(key) != value:
            flags.append(f"--set {shlex.quote(f'{key}={as_word(value)}')}")
    head = f"sordino run --data {shlex.quote(spec.data)} --method {spec.method}"
    budget = f"--epsilon {spec.epsilon:g}" if spec.noise is None else ""
    seed = [] if spec.seed is None else [f"--seed {spec.seed}"]
    return " ".join([head, budget, *flags, *seed]).replace("  ", " ")


def as_word(value: Any) -> str:
    """A value as the command line reads it."""
    return json.dumps(value) if isinstance(value, list | bool) else str(value)


def frozen(path: Path) -> dict[str, Any]:
    """Read settings that an earlier comparison chose, from its compare.json or settings.json."""
    try:
        tuning = json.loads(path.read_text(encoding="utf-8"))
        tuning = tuning.get("tuning", tuning)
        assert {"how", "paid", "validation", "settings"} <= tuning.keys()
    except FileNotFoundError:
        raise files.absent("settings", path) from None
    except (ValueError, AttributeError, AssertionError):
        raise SordinoError(
            f"settings: '{path}' holds no settings; give settings.json or compare.json of a comparison."
        ) from None
    return dict(tuning)
