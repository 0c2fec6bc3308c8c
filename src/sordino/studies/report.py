"""A comparison as a page, as Markdown and as figures.

`view` computes everything once; the page and the figures only draw it.
"""

from __future__ import annotations

import html
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sordino.core import Adjacency, Trust, Unit
from sordino.evidence.certificate import finite
from sordino.evidence.statement import ADVERSARY, PROTECTED
from sordino.studies import figures
from sordino.studies.estimation_report import markdown
from sordino.training.metrics import LOWER_IS_BETTER, NAMES, goodness, written

Document = dict[str, Any]
Epsilon = float | None  # None: no noise
CLIENTS_SHOWN = 200  # the most that a page lists one by one
SIGNIFICANT = 0.05
NONE = "–"
SEEDED = "seeded: "  # how the reason of a certificate begins where the noise has a seed


class Score(NamedTuple):
    mean: float  # NaN where the metric of a run is not defined
    std: float | None  # population standard deviation over seeds; None with one seed


class Measure(NamedTuple):
    """What the curves and tables of a comparison show: accuracy for classes, the metric of the task for others."""

    key: str
    name: str
    label: str  # of an axis
    factor: float  # from a stored value to a shown one
    bound: tuple[float, float] | None  # of shown values

    def text(self, value: Score | None) -> str:
        """A score for people."""
        if value is None:
            return NONE
        if self.key != "accuracy":
            return written(self.key, value.mean) + ("" if value.std is None else f" ± {value.std:.2g}")
        return f"{100 * value.mean:.1f}" + ("" if value.std is None else f" ± {100 * value.std:.1f}")


ACCURACY = Measure("accuracy", "accuracy", "test accuracy, %", 100, (0, 100))
SHARES = ("auc", "balanced_accuracy", "macro_auc", "brier", "concordance")  # metrics between 0 and 1


class TableCell(NamedTuple):
    text: str
    mark: str = ""  # "best", or "near": within the standard deviation of the best


class Table(NamedTuple):
    head: list[str]
    rows: list[list[TableCell]]
    note: str = ""


def write(document: Document, out: Path) -> list[Path]:
    """Write `report.html`, `report.md` and, if matplotlib is installed, `figures/`."""
    out.mkdir(parents=True, exist_ok=True)
    drawing = view(document)
    drawn = figures.draw(drawing, out / "figures")
    texts = {"report.html": page(drawing), "report.md": text(document, [path.name for path in drawn])}
    for name, content in texts.items():
        (out / name).write_text(content, encoding="utf-8")
    return [*(out / name for name in texts), *drawn]


# ------------------------------------------------------------------------------------------------------- the numbers


def named(epsilon: Epsilon) -> str:
    return "∞" if epsilon is None else f"{epsilon:g}"


def of_group(document: Document, group: str = "comparison") -> list[Document]:
    return [run for run in document["runs"] if run["group"] == group]


def labels(runs: Sequence[Document]) -> list[str]:
    return list(dict.fromkeys(run["label"] for run in runs))


def epsilons(runs: Sequence[Document]) -> list[Epsilon]:
    """All budgets, the smallest ε first and no noise last."""
    return sorted({run["epsilon"] for run in runs}, key=lambda e: math.inf if e is None else e)


def measure_of(document: Document) -> Measure:
    """What the curves show. Another metric of classes has a table of its own (`by_metric`)."""
    if document["data"]["classes"]:
        return ACCURACY
    name = NAMES[key := metric_of(document)]
    return Measure(key, name, f"test {name}", 1, (0, 1) if key in SHARES else None)


def series(run: Document) -> list[float | None]:
    """The measure of a run, by round."""
    return run["accuracy"] or run.get("scores") or []


def score(values: Sequence[float | None]) -> Score:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Score(math.nan, None)
    return _score(known)


def _score(values: Sequence[float]) -> Score:
    return Score(statistics.fmean(values), statistics.pstdev(values) if len(values) > 1 else None)


def by_label(runs: Sequence[Document], epsilon: Epsilon) -> dict[str, list[Document]]:
    """The runs of each method at one ε, one per seed."""
    runs_of: dict[str, list[Document]] = {}
    for run in runs:
        if run["epsilon"] == epsilon:
            runs_of.setdefault(run["label"], []).append(run)
    return runs_of


def curve(runs: Sequence[Document]) -> list[Score]:
    """Mean and standard deviation of the measure over the runs, by round."""
    return [score(values) for values in zip(*(series(run) for run in runs), strict=True)]


def marked(scores: Sequence[Score | None], measure: Measure = ACCURACY) -> list[TableCell]:
    """Mark the best score, and those within its standard deviation."""
    good = [-math.inf if s is None else goodness(measure.key, s.mean) for s in scores]
    best = max(good, default=-math.inf)
    slack = max((s.std or 0.0 for s, g in zip(scores, good, strict=True) if s is not None and g == best), default=0.0)
    return [
        TableCell(measure.text(s), "" if g == -math.inf else "best" if g == best else "near" * (g >= best - slack))
        for s, g in zip(scores, good, strict=True)
    ]


def mean_of(rows: Iterable[Sequence[float | None]]) -> list[float | None]:
    """The mean of each column, without missing values."""
    columns = [[v for v in column if v is not None] for column in zip(*rows, strict=True)]
    return [statistics.fmean(column) if column else None for column in columns]


def parts(runs: Sequence[Document], key: str) -> dict[tuple[str, Epsilon], list[float | None]]:
    """The measure per class or per client of every method and ε, mean over the seeds of `runs`."""
    means = {}
    for epsilon in epsilons(runs):
        for label, some in by_label(runs, epsilon).items():
            if all(run.get(key) for run in some):
                means[label, epsilon] = mean_of([run[key] for run in some])
    return means


def payment(shares: dict[tuple[str, Epsilon], list[float | None]]) -> dict[tuple[str, Epsilon], list[float | None]]:
    """The cost of noise: differences from the same method without noise, or else at its largest ε."""
    base: dict[str, tuple[float, list[float | None]]] = {}
    for (label, epsilon), values in shares.items():
        size = math.inf if epsilon is None else epsilon
        if label not in base or size > base[label][0]:
            base[label] = size, values
    return {
        (label, epsilon): [
            None if v is None or b is None else v - b for v, b in zip(values, base[label][1], strict=True)
        ]
        for (label, epsilon), values in shares.items()
        if base[label][1] is not values
    }


# -------------------------------------------------------------------------------------------------------- the tables


def table(head: list[str], names: Sequence[str], columns: Sequence[Sequence[TableCell]], note: str = "") -> Table:
    """A table with one row per method."""
    rows = [[TableCell(name), *(column[i] for column in columns)] for i, name in enumerate(names)]
    return Table(head, rows, note)


def _with_rounds(shown: Table, runs: Sequence[Document]) -> Table:
    """The table with the number of rounds of each method, where some have fewer than others."""
    rounds = {run["label"]: len(series(run)) for run in runs}
    if len(set(rounds.values())) < 2:
        return shown
    method, *head = shown.head
    rows = [[name, TableCell(str(rounds[name.text])), *row] for name, *row in shown.rows]
    return Table([method, "rounds", *head], rows, shown.note)


def _note(runs: Sequence[Document], measure: Measure) -> str:
    seeds = len({run["seed"] for run in runs})
    least = "less is better" if measure.key in LOWER_IS_BETTER else "more is better"
    what = "Accuracy in %" if measure.key == "accuracy" else f"{_capital(measure.name)}, {least}"
    if seeds == 1:
        return f"{what}, one seed; the best is bold."
    return (
        f"{what}, mean ± standard deviation over {seeds} seeds; the best is bold, ≈ marks those within its standard "
        "deviation."
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _final(runs: Sequence[Document], measure: Measure) -> Table:
    names, columns = labels(runs), []
    for epsilon in epsilons(runs):
        runs_of = by_label(runs, epsilon)
        columns.append(marked([curve(runs_of[name])[-1] if name in runs_of else None for name in names], measure))
    head = ["method", *(f"ε = {named(epsilon)}" for epsilon in epsilons(runs))]
    return _with_rounds(table(head, names, columns, _note(runs, measure)), runs)


def final(document: Document) -> Table:
    """The measure at the last round."""
    return _final(of_group(document), measure_of(document))


def metric_of(document: Document) -> str:
    """The metric that the methods are ranked by."""
    return str(document.get("metric", "accuracy"))


def by_metric(document: Document) -> Table | None:
    """The metric asked for at the last round; None if it is the measure, which has its own table."""
    runs, metric = of_group(document), metric_of(document)
    if metric == measure_of(document).key:
        return None
    measure = Measure(metric, NAMES[metric], NAMES[metric], 1, None)
    names, columns = labels(runs), []
    for epsilon in epsilons(runs):
        ends = _ends_by(metric, by_label(runs, epsilon))
        columns.append(marked([ends.get(name) for name in names], measure))
    head = ["method", *(f"ε = {named(epsilon)}" for epsilon in epsilons(runs))]
    return _with_rounds(table(head, names, columns, _note(runs, measure)), runs)


def _ends_by(metric: str, runs_of: dict[str, list[Document]]) -> dict[str, Score]:
    """The metric of every method at the last round, over seeds. NaN where one of them is not defined."""
    key = "accuracy" if metric == "accuracy" else "scores"
    return {name: score([run[key][-1] for run in runs]) for name, runs in runs_of.items()}


def by_round(document: Document) -> dict[str, Table]:
    """For each ε, the measure at the printed rounds."""
    runs, measure = of_group(document), measure_of(document)
    names, printed = labels(runs), document["rounds"]
    tables = {}
    for epsilon in epsilons(runs):
        curves = {name: curve(some) for name, some in by_label(runs, epsilon).items()}
        columns = [
            marked([curves[name][t - 1] if t <= len(curves.get(name, ())) else None for name in names], measure)
            for t in printed
        ]
        head = ["method", *(f"round {t}" for t in printed)]
        tables[named(epsilon)] = table(head, names, columns, _note(runs, measure))
    return tables


def reached(means: Sequence[float], goal: float, rounds: Iterable[int] | None = None) -> int | None:
    """The first of `rounds` (default: of all) at which a mean reaches the goal."""
    some = range(1, len(means) + 1) if rounds is None else rounds
    return next((t for t in some if t <= len(means) and means[t - 1] >= goal - 1e-12), None)


def to_target(document: Document) -> Table | None:
    """Rounds until the mean reaches a share of the reference's last accuracy; None without classes or a reference."""
    runs, target = of_group(document), document["target"]
    if not document["data"]["classes"]:
        return None
    names, columns, head = labels(runs), [], ["method"]
    for epsilon in epsilons(runs):
        means = {name: [s.mean for s in curve(some)] for name, some in by_label(runs, epsilon).items()}
        if target["reference"] not in means:
            continue
        goal = target["share"] * means[target["reference"]][-1]
        head.append(f"ε = {named(epsilon)} ({100 * goal:.1f} %)")
        columns.append([_reached(means.get(name, []), goal, document["rounds"]) for name in names])
    if not columns:
        return None
    note = (
        f"The first round at which the mean accuracy reaches {100 * target['share']:g} % of the "
        f"last accuracy of {target['reference']} at the same ε; after the slash, the first such printed round. "
        f"{NONE}: never."
    )
    return table(head, names, columns, note)


def _reached(means: Sequence[float], goal: float, printed: Sequence[int]) -> TableCell:
    first = reached(means, goal)
    return TableCell(NONE if first is None else f"{first} / {reached(means, goal, printed) or NONE}")


def costs(document: Document) -> Table:
    """Bytes and seconds per method."""
    runs = of_group(document)
    rows = []
    for name in labels(runs):
        runs_of_method = [run for run in runs if run["label"] == name]
        rounds = statistics.fmean(len(series(run)) for run in runs_of_method)
        sent = [
            statistics.fmean(values)
            if (values := [run[key] for run in runs_of_method if run.get(key) is not None])
            else None
            for key in ("bytes_up", "bytes_down")
        ]
        seconds = score([run["seconds"] for run in runs_of_method])
        digits = max(0, 1 - math.floor(math.log10(seconds.mean))) if seconds.mean > 0 else 0
        took = " ± ".join(f"{value:.{digits}f}" for value in seconds if value is not None)
        rows.append(
            [
                TableCell(name),
                *(TableCell(_count(v and v / rounds)) for v in sent),
                *(TableCell(_count(v)) for v in sent),
                TableCell(took),
            ]
        )
    note = (
        "Bytes of one client; seconds of the whole simulation, mean ± standard deviation over all runs of the method."
        + " Rows tuned within the budget count all runs of a search; of random stopping only the chosen one, because "
        "the number of runs is secret." * bool(within_budget(document))
    )
    head = ["method", "bytes up per round", "down per round", "up in all", "down in all", "seconds per run"]
    return Table(head, rows, note)


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def pairs(document: Document) -> dict[str, Table]:
    """McNemar's tests, for each ε."""
    tables: dict[str, Table] = {}
    head = ["a", "b", "seed", "only a right", "only b right", "χ²", "p", "better"]
    note = (
        f"With continuity correction, on the same test records at the last round; better: p < {SIGNIFICANT:g}. Each p "
        "is that of one test, without correction for multiple tests."
    )
    for pair in sorted(document["pairs"], key=lambda pair: math.inf if pair["epsilon"] is None else pair["epsilon"]):
        a, b, p = pair["a"], pair["b"], pair["p"]
        better = "neither" if p >= SIGNIFICANT else a if pair["n10"] > pair["n01"] else b
        shown = [a, b, str(pair["seed"]), f"{pair['n10']:,}", f"{pair['n01']:,}", f"{pair['chi2']:.2f}", _p(p), better]
        tables.setdefault(named(pair["epsilon"]), Table(head, [], note)).rows.append([*map(TableCell, shown)])
    return tables


def _p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def by_class(document: Document) -> dict[str, Table]:
    """For each ε, accuracy of each class and, in brackets, the change by noise."""
    runs = of_group(document)
    shares = parts(runs, "per_class")
    cost, tables = payment(shares), {}
    note = "In brackets: difference from the same method without noise, or else at its largest ε."
    for epsilon in epsilons(runs):
        rows = [
            [TableCell(name), *_costing(shares[name, epsilon], cost.get((name, epsilon)))]
            for name in labels(runs)
            if (name, epsilon) in shares
        ]
        if rows:
            tables[named(epsilon)] = Table(["method", *map(str, document["data"]["classes"])], rows, note)
    return tables


def _costing(values: Sequence[float | None], cost: Sequence[float | None] | None) -> list[TableCell]:
    cells = [NONE if v is None else f"{100 * v:.1f}" for v in values]
    if cost is not None:
        cells = [c if d is None else f"{c} ({_signed(d)})" for c, d in zip(cells, cost, strict=True)]
    return [*map(TableCell, cells)]


def _signed(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def client_epsilon(document: Document) -> dict[str, dict[str, Table]]:
    """For each seed and ε, the ε spent per client; consecutive clients with equal values share a row."""
    by_seed: dict[str, dict[str, Table]] = {}
    for run in of_group(document):
        by_seed.setdefault(str(run["seed"]), {})
    for seed, tables in by_seed.items():
        runs = [run for run in of_group(document) if str(run["seed"]) == seed]
        for epsilon in epsilons(runs):
            some = {name: r[0]["client_epsilon"] for name, r in by_label(runs, epsilon).items()}
            some = {name: spent for name, spent in some.items() if spent}
            spent = list(zip(*some.values(), strict=True))
            starts = [i for i, row in enumerate(spent) if i == 0 or row != spent[i - 1]]
            rows = []
            for start, stop in zip(starts, [*starts[1:], len(spent)], strict=True):
                clients = f"{start}" if stop == start + 1 else f"{start} to {stop - 1}"
                values = (NONE if v is None else f"{v:.4g}" for v in spent[start])
                rows.append([TableCell(clients), *map(TableCell, values)])
            more = f" The first {CLIENTS_SHOWN} of {len(rows):,} rows." if len(rows) > CLIENTS_SHOWN else ""
            tables[named(epsilon)] = Table(["client", *some], rows[:CLIENTS_SHOWN], f"{NONE}: no bound.{more}")
    return by_seed


def ablation(document: Document) -> Table | None:
    """The measure at the last round of the whole methods and of their ablations."""
    some = _ablated(document)
    return _final(some, measure_of(document)) if some else None


def _ablated(document: Document) -> list[Document]:
    changed = of_group(document, "ablation")
    methods, at = {run["method"] for run in changed}, {run["epsilon"] for run in changed}
    whole = [run for run in of_group(document) if run["method"] in methods and run["epsilon"] in at]
    return [*whole, *changed]


class Sweep(NamedTuple):
    """The measure at the last round against one option, one line per method and ε."""

    vary: str
    values: list[Any]
    lines: dict[str, list[Score | None]]


def sweeps(document: Document) -> list[Sweep]:
    runs = of_group(document, "sensitivity")
    results = []
    for vary in dict.fromkeys(run["vary"] for run in runs):
        varied = [run for run in runs if run["vary"] == vary]
        values = [v for v in document["varied"][vary] if any(run["value"] == v for run in varied)]
        lines: dict[tuple[str, str, Epsilon], dict[Any, list[float | None]]] = {}
        for run in varied:
            others = _options({key: v for key, v in run["options"].items() if key != vary})
            line = lines.setdefault((run["method"], others, run["epsilon"]), {})
            line.setdefault(run["value"], []).append(series(run)[-1])
        known = [(method, epsilon) for method, _, epsilon in lines]
        named_lines = {
            f"{method}{f' ({others})' * (others != '' and known.count((method, epsilon)) > 1)}, ε = {named(epsilon)}": [
                score(line[v]) if v in line else None for v in values
            ]
            for (method, others, epsilon), line in lines.items()
        }
        results.append(Sweep(vary, values, named_lines))
    return results


def sensitivity(document: Document) -> dict[str, Table]:
    """For each varied option, the measure at the last round by value."""
    runs, measure = of_group(document, "sensitivity"), measure_of(document)
    note = _note(runs, measure) if runs else ""
    return {
        sweep.vary: Table(
            ["method", *(_value(v) for v in sweep.values)],
            [[TableCell(name), *marked(line, measure)] for name, line in sweep.lines.items()],
            note,
        )
        for sweep in sweeps(document)
    }


def tuning(document: Document) -> Table | None:
    """The chosen settings, and how many were tried."""
    metric = document["tuning"].get("metric", "accuracy")
    rows = [
        [
            TableCell(choice["method"]),
            TableCell(named(choice["epsilon"])),
            TableCell(_options(choice["options"]) or "defaults"),
            TableCell(_validation(metric, choice["score"])),
            TableCell(str(choice["tried"])),
        ]
        for choice in document["tuning"]["settings"]
    ]
    rows += _paid_choices(document)
    shown = "accuracy, %" if metric == "accuracy" else NAMES[metric]
    return Table(["method", "ε", "chosen", f"validation {shown}", "tried"], rows) if rows else None


def _paid_choices(document: Document) -> list[list[TableCell]]:
    """The settings of rows that are tuned within the budget: one choice per seed."""
    runs = [run for run in of_group(document) if "tuned_within_budget" in run]
    rows = []
    for epsilon in epsilons(runs):
        for name, some in by_label(runs, epsilon).items():
            chosen = "; ".join(f"{_options(run['options']) or 'defaults'} (seed {run['seed']})" for run in some)
            tried = some[0]["tuned_within_budget"].get("runs", "random")
            rows.append([*map(TableCell, (name, named(epsilon), chosen, NONE, str(tried)))])
    return rows


def within_budget(document: Document) -> dict[str, list[str]]:
    """How rows that are tuned within the budget are paid for, and of which methods; empty where there are none."""
    rows: dict[str, list[str]] = {}
    for run in of_group(document):
        if "tuned_within_budget" in run:
            methods, label = (
                rows.setdefault(run["tuned_within_budget"]["sentence"], []),
                run["tuned_within_budget"]["of"],
            )
            methods += [] if label in methods else [label]
    return rows


def _validation(metric: str, value: float | None) -> str:
    if value is None:
        return NONE
    return f"{100 * value:.1f}" if metric == "accuracy" else written(metric, value)


def _options(options: Document) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in options.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------------------------------- the words


def summary(document: Document) -> list[str]:
    """What was compared, under which guarantee, what tuning cost, and the best method."""
    runs, data, setting = of_group(document), document["data"], document["setting"]
    seeds, rounds = sorted({run["seed"] for run in runs}), max(len(series(run)) for run in runs)
    partition = f" (partition {setting['partition']})" if setting.get("partition") else ""
    methods = labels([run for run in runs if "tuned_within_budget" not in run])
    compared = (
        f"{_several(len(methods), 'method')} on {data['name']}: {data['train']:,} training and "
        f"{data['test']:,} test records, {data['features']} features, {_task(data)}, "
        f"{_several(data['clients'], 'client')}{partition}, {_several(rounds, 'round')}, "
        f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}."
    )
    tuned = [_tuned(document["tuning"]), *_tuned_within(document)]
    exposed = [_sentence(document["exposed"])] if document.get("exposed") else []
    return [compared, _promise(document), _certified(document), *exposed, *tuned, _best(document)]


def _task(data: Document) -> str:
    named = {"quantity": "a quantity", "count": "a count", "survival": "survival"}
    return f"{len(data['classes'])} classes" if data["classes"] else f"to predict {named[data['task']]}"


def _promise(document: Document) -> str:
    setting, runs = document["setting"], of_group(document)
    if epsilons(runs) == [None]:
        return "No promise: nothing here adds noise."
    unit, adjacency, trust = Unit(setting["unit"]), Adjacency(setting["adjacency"]), Trust(setting["trust"])
    budgets = ", ".join(named(e) for e in epsilons(runs) if e is not None)
    bare = " ε = ∞ is without noise and promises nothing." * (None in epsilons(runs))
    return (
        f"The promise: ε = {budgets} at δ = {setting['delta']:g}, {unit} level, {adjacency}, {trust}. Protected: "
        f"{PROTECTED[unit, adjacency]}. It holds against {ADVERSARY[trust]}.{bare}"
    )


def _certified(document: Document) -> str:
    """How many runs are certified, with the reason first where none can be: seeds."""
    runs = [run for run in document["runs"] if run["epsilon"] is not None]
    certified = sum(run["certificate"]["certified"] for run in runs)
    reasons = [list(run["certificate"]["reasons"]) for run in runs]
    seeded = [SEEDED in " ".join(each) for each in reasons]
    others = dict.fromkeys(reason for each in reasons for reason in each if SEEDED not in reason)
    why = "".join(f" {_sentence(reason)}" for reason in others)
    if not any(seeded):
        return f"Certified: {certified:,} of {len(runs):,} runs with noise.{why}"
    barred = sum(len(each) > 1 for each, has in zip(reasons, seeded, strict=True) if has)
    could = sum(seeded) - barred
    return (
        f"{'All' if all(seeded) else f'{sum(seeded):,} of {len(runs):,}'} runs with noise have a seed, so that they "
        "can be repeated. Whoever knows the seed can subtract the noise, so such a run is never certified; without its "
        f"seed the same command is, for {could:,} of these {sum(seeded):,} runs. Certified as they are: {certified:,} "
        f"of {len(runs):,}.{why}"
    )


def _tuned(tuned: Document) -> str:
    if not tuned["settings"]:
        return "Tuning: nothing was tuned."
    words = (f"Tuning: {tuned['how']}", tuned.get("paid"), tuned.get("validation"))
    return " ".join(_sentence(part) for part in words if part)


def _tuned_within(document: Document) -> list[str]:
    """What rows that are tuned within the budget promise, and how many settings they tried; [] without such rows."""
    paid = [f"{sentence} ({', '.join(methods)})" for sentence, methods in within_budget(document).items()]
    if not paid:
        return []
    return [
        "Rows tuned within the budget: each seed makes a search of its own, and the ε at the head of the column covers "
        f"every run of it, the choice and the chosen model. {' '.join(map(_sentence, paid))}"
    ]


def _best(document: Document) -> str:
    runs, metric, winners = of_group(document), metric_of(document), []
    for epsilon in epsilons(runs):
        ends = _ends_by(metric, by_label(runs, epsilon))
        best = max(goodness(metric, end.mean) for end in ends.values())
        measure, unit = Measure(metric, NAMES[metric], "", 1, None), " %" if metric == "accuracy" else ""
        equal = [(name, end) for name, end in ends.items() if goodness(metric, end.mean) == best]
        winners.append(
            " and ".join(f"{name} at ε = {named(epsilon)} ({measure.text(end)}{unit})" for name, end in equal)
        )
    by = "" if metric == "accuracy" else f" by {NAMES[metric]}"
    return f"Best at the last round{by}: {'; '.join(winners)}."


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _sentence(words: str) -> str:
    words = words.strip()
    return words[:1].upper() + words[1:] + "." * (words[-1:] not in ".!?")


# ------------------------------------------------------------------------------------------------------ the Markdown


def text(document: Document, drawn: Sequence[str] = ()) -> str:
    """The tables as Markdown, with the figures."""
    sections = [f"# {_plain(title(document))}", *map(_plain, summary(document)), _code(document["command"])]

    def add(name: str, shown: Table | dict[str, Table] | None, each: str = "") -> None:
        if not shown:
            return
        several = shown if isinstance(shown, dict) else {"": shown}
        note = next(iter(several.values())).note
        sections.extend([f"## {name}", *([_plain(note)] if note else [])])
        for key, one in several.items():
            sections.extend([f"### {_plain(each + key)}"] if key else [])
            sections.append(markdown([*map(_plain, one.head)], ([_bold(cell) for cell in row] for row in one.rows)))

    add(f"By {NAMES[metric_of(document)]}, at the last round", by_metric(document))
    measure = _capital(measure_of(document).name)
    add(f"{measure} at the last round", final(document))
    add(f"{measure} by round", by_round(document), "ε = ")
    add("Rounds to the target", to_target(document))
    add("Costs", costs(document))
    add("McNemar's tests", pairs(document), "ε = ")
    add("Accuracy by class", by_class(document), "ε = ")
    add("Ablations", ablation(document))
    add("Sensitivity", sensitivity(document))
    add("Settings chosen", tuning(document))
    pictures = [name.removesuffix(".png") for name in drawn if name.endswith(".png")]
    shown = "\n\n".join(f"![{name}](figures/{name}.png)" for name in pictures)
    sections += ["## Figures", shown or "None: they need matplotlib (`pip install 'sordino[report]'`)."]
    return "\n\n".join(sections) + "\n"


def title(document: Document) -> str:
    return f"Comparison on {document['data']['name']}"


def _bold(cell: TableCell) -> str:
    words = _plain(cell.text)
    return f"**{words}**" if cell.mark == "best" else f"≈ {words}" if cell.mark == "near" else words


def _plain(words: str) -> str:
    """Escape Markdown and HTML."""
    words = re.sub(r"&(?=#?\w+;)", "&amp;", words)
    words = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", words)
    return re.sub(r"[\\`*\[\]|$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(words.split()))


def _code(words: str) -> str:
    return "\n".join(f"    {line}" for line in words.splitlines())


# ---------------------------------------------------------------------------------------------------------- the page


def page(seen: Document) -> str:
    """A self-contained HTML file. Every `<` in the data is escaped, so that no label can close the script element."""
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    head, tail = template.split("{{data}}")
    data = json.dumps(seen, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return head.replace("{{title}}", html.escape(seen["title"])) + data.replace("<", "\\u003c") + tail


def view(document: Document) -> Document:
    """Everything that the page and the figures draw, to four digits; certificate parts are exact and stored once."""
    runs = of_group(document)
    names, budgets = labels(runs), epsilons(runs)
    seeds = list(dict.fromkeys(str(run["seed"]) for run in runs))
    ablated = _ablated(document)
    certificate_parts, commands = _certificates(document["runs"])
    return {
        "title": title(document),
        "sordino": document["sordino"],
        "command": document["command"],
        "host": document["host"],
        "setting": document["setting"],
        "summary": summary(document),
        "look": {"light": figures.LIGHT, "dark": figures.DARK, "dashes": figures.DASHES},
        "labels": names,
        "epsilons": budgets,
        "names": [named(epsilon) for epsilon in budgets],
        "seeds": seeds,
        "metric": NAMES[metric_of(document)],
        "measure": {
            **measure_of(document)._asdict(),
            "digits": 1 if measure_of(document) is ACCURACY else None,
            "lower": measure_of(document).key in LOWER_IS_BETTER,
        },
        "rounds": document["rounds"],
        "target": document["target"],
        "curves": _curves(runs),
        "tables": {
            "by_metric": _json(by_metric(document)),
            "final": _json(final(document)),
            "by_round": _json(by_round(document)),
            "to_target": _json(to_target(document)),
            "costs": _json(costs(document)),
            "pairs": _json(pairs(document)),
            "client_epsilon": {seed: _json(tables) for seed, tables in client_epsilon(document).items()},
            "ablation": _json(ablation(document)),
            "sensitivity": _json(sensitivity(document)),
            "tuning": _json(tuning(document)),
        },
        "classes": [*map(str, document["data"]["classes"] or ["records"])],
        "model_curves": {name: _model_curves(runs, name) for name in ("calibration", "roc", "survival")},
        "per_class": _heat(runs, "per_class"),
        "per_client": {seed: _heat([r for r in runs if str(r["seed"]) == seed], "per_client") for seed in seeds},
        "clients": document["data"]["clients"],
        "partition": {k: v[:CLIENTS_SHOWN] for k, v in (document["partition"] or {}).items()},
        "ablation": {"labels": labels(ablated), "curves": _ends(ablated)} if ablated else None,
        "sensitivity": [
            {"vary": s.vary, "values": [*map(_value, s.values)], "lines": [_line(n, p) for n, p in s.lines.items()]}
            for s in sweeps(document)
        ],
        "parts": certificate_parts,
        "runs": commands,
    }


def _curves(runs: Sequence[Document]) -> list[Document]:
    """One line per method and ε."""
    curves = []
    for epsilon in epsilons(runs):
        for name, some in by_label(runs, epsilon).items():
            entry = {"label": name, "epsilon": named(epsilon), **_scores(curve(some))}
            for key in ("signal", "noise"):
                known = all(run.get(key) for run in some)
                entry[key] = [_digits(v) for v in mean_of([run[key] for run in some])] if known else None
            curves.append(entry)
    return curves


def _model_curves(runs: Sequence[Document], name: str) -> Document:
    """By seed, the curves of the last models on test records: one per method and ε that has it."""
    by_seed: Document = {}
    for run in runs:
        if run.get(name):
            line = {"label": run["label"], "epsilon": named(run["epsilon"]), "points": run[name]}
            by_seed.setdefault(str(run["seed"]), []).append(line)
    return by_seed


def _ends(runs: Sequence[Document]) -> list[Document]:
    return [
        {"label": name, "epsilon": named(epsilon), **_scores(curve(some)[-1:])}
        for epsilon in epsilons(runs)
        for name, some in by_label(runs, epsilon).items()
    ]


def _line(name: str, points: Sequence[Score | None]) -> Document:
    return {"label": name, **_scores(points)}


def _scores(scores: Sequence[Score | None]) -> Document:
    return {"mean": [s and _digits(s.mean) for s in scores], "std": [s and _digits(s.std) for s in scores]}


def _heat(runs: Sequence[Document], key: str) -> Document:
    """By ε and method: the measure, and its change by noise."""
    shares = parts(runs, key)
    heat: Document = {}
    for name, some in (("value", shares), ("difference", payment(shares))):
        heat[name] = {}
        for (label, epsilon), values in some.items():
            shown = [_digits(v) for v in values[:CLIENTS_SHOWN]]
            heat[name].setdefault(named(epsilon), {})[label] = shown
    return heat


def _certificates(runs: Sequence[Document]) -> tuple[list[Any], list[Document]]:
    """(distinct parts, runs whose certificates are {key: index of the part}), because runs share most parts."""
    numbers: dict[str, int] = {}
    parts: list[Any] = []
    shown_runs = []
    for run in runs:
        certificate = {}
        for key, value in run["certificate"].items():
            written = json.dumps(value)
            if written not in numbers:
                numbers[written] = len(parts)
                parts.append(value)
            certificate[key] = numbers[written]
        about = {key: run[key] for key in ("label", "seed", "group", "command")}
        shown_runs.append({**about, "epsilon": named(run["epsilon"]), "certificate": certificate})
    return parts, shown_runs


def _json(shown: Table | dict[str, Table] | None) -> Any:
    if shown is None:
        return None
    if isinstance(shown, dict):
        return {key: _json(one) for key, one in shown.items()}
    rows = [[cell if cell.mark else cell.text for cell in row] for row in shown.rows]
    return {"head": shown.head, "rows": rows, "note": shown.note}


def _digits(value: float | None) -> float | None:
    return None if value is None else finite(float(f"{value:.4g}"))
