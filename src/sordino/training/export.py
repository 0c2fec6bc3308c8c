"""A trained model in formats that other programs read. Its input is always the *encoded* features (`LoadedRun.encode`).

Scaling each record is a part of the model, so torch, ONNX and scikit-learn files hold it too, and give the
probabilities of `sordino predict`. Beside each of these files lies a JSON with the names of the features, the schema,
and the hash of the model that it was made from.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import files
from sordino.core import SAFETY
from sordino.data.preprocess import FEATURES_THRESHOLD, RADIUS, of_roots, scaler, whitening
from sordino.errors import SordinoError, nearest
from sordino.foreign import cell, comment
from sordino.lazy import optional
from sordino.models import registry
from sordino.models.hazards import Hazards
from sordino.models.linear import NUMERIC_LOSSES, Linear, Loss
from sordino.models.torch_model import TorchModel
from sordino.models.trees import Trees
from sordino.training.intervals import INTERCEPT
from sordino.training.predict import LoadedRun
from sordino.training.units import Effects, effects
from sordino.version import __version__

# The formats, and the usual name of a file of each.
FORMATS = {"coefficients": "coefficients.csv", "torch": "model.pt2", "sklearn": "model.joblib", "onnx": "model.onnx"}
SMALLEST = 1e-300  # stands for 0 in a divisor
BASELINE = "(baseline)"  # of the hazard in an interval
EQUAL = 1e-6  # a record whose centred norm is below this share of its norm has equal features
OPSET, IR_VERSION = 17, 8  # of ONNX files, so that programs since 2022 read them


def export(run: LoadedRun, to: str, out: str | Path | None = None) -> list[Path]:
    """Write a model in another format.

    Args:
      run: what `load_run` returned.
      to: one of `FORMATS`.
      out: the file to write, which must not exist; by default one of the usual name in this folder.

    Returns:
      The files that were written.

    Raises:
      SordinoError: the format cannot hold this model, a package is missing, or the file exists.
    """
    if to not in FORMATS:
        raise SordinoError(f"--to: '{to}' is unknown.{nearest(to, FORMATS)}")
    out = Path(out or FORMATS[to])
    beside = out.with_name(out.name + ".json")
    for path in (out, beside) if to != "coefficients" else (out,):
        if path.exists():
            raise SordinoError(f"--out: '{path}' exists; name another file.")
    if not out.absolute().parent.is_dir():
        raise SordinoError(f"--out: there is no folder for '{out}'; make it first.")
    files.check_writable(out)
    WRITERS[to](run, out)
    if to == "coefficients":
        return [out]
    files.write(beside, (json.dumps(describe(run, to), indent=2, ensure_ascii=False) + "\n").encode())
    return [out, beside]


def describe(run: LoadedRun, to: str) -> dict[str, Any]:
    """The JSON beside a file: what goes in, what comes out, and which model it is."""
    cert = run.certificate or {}
    return {
        "format": to,
        "sordino": __version__,
        "input": f"encoded features, records by {run.about['features']}, unscaled: the file scales each record itself",
        "features": list(run.features),
        "schema": None if run.schema is None else run.schema.values(),
        "normalize": preparation(run).words,
        "output": output_of(run),
        "classes": list(run.classes),
        "model_sha256": cert.get("model_sha256"),
        "epsilon": cert.get("epsilon"),
        "delta": cert.get("delta"),
        "certified": cert.get("certified"),
    }


def output_of(run: LoadedRun) -> str:
    """What a file of the model answers, in words."""
    if run.edges:
        return "probability of no event by " + ", ".join(f"{edge:g}" for edge in run.edges)
    return "probabilities of the classes, in their order" if run.classes else "numbers"


# --------------------------------------------------------------------------------------------------------- preparation


@dataclass(frozen=True)
class Preparation:
    """How encoded features become what the model reads, as numbers instead of code.

    1. With `roots`, a record without negative entries is replaced by its square roots.
    2. mean and matrix: (x - mean) @ matrix; those of `root_mean`, `root_matrix` for the square roots. With `centre`,
       the mean of the record is subtracted instead.
    3. The record is multiplied by scale / max(norm, floor). With `roots`, a record whose features are all equal is 0.
    """

    words: str
    mean: np.ndarray | None = None
    matrix: np.ndarray | None = None
    scale: float | None = None
    floor: float = SMALLEST
    roots: bool = False
    centre: bool = False
    root_mean: np.ndarray | None = None
    root_matrix: np.ndarray | None = None


def preparation(run: LoadedRun) -> Preparation:
    """The preparation of a run's records; `data.preprocess` defines it."""
    law, _, argument = run.normalize.partition(":")
    scaler(run.normalize)  # refuse an unknown law
    public = None if run.schema is not None else run.public
    mean, matrix = (None, None) if public is None else (public[0], whitening(public[1]))
    before = "" if public is None else "centred and whitened by public statistics, then "
    features = int(run.about["features"])
    if law == "none":
        return Preparation("not scaled" if public is None else before.removesuffix(", then "), mean, matrix)
    if law == "l2":
        return Preparation(f"{before}each record divided by its norm", mean, matrix, 1.0)
    if law == "clip":
        limit = float(argument) * (1 - SAFETY)
        return Preparation(f"{before}each record scaled to a norm of at most {limit:.9g}", mean, matrix, limit, limit)
    if law == "table" or features < FEATURES_THRESHOLD:
        floor = math.sqrt(float(argument) if law == "table" else features)
        words = f"{before}each record multiplied by {RADIUS:g} / max(its norm, {floor:.9g})"
        return Preparation(words, mean, matrix, RADIUS, floor)
    words = "a record without negative entries replaced by its square roots, "
    if public is None:
        words += f"its own mean subtracted, scaled to norm {RADIUS:g}"
        return Preparation(words, scale=RADIUS, roots=True, centre=True)
    root_mean, root_cov = of_roots(*public)
    return Preparation(
        f"{words}half whitened by public statistics, scaled to norm {RADIUS:g}",
        *(public[0], whitening(public[1], 0.25), RADIUS, SMALLEST, True, False),
        *(root_mean, whitening(root_cov, 0.25)),
    )


def linear_parts(run: LoadedRun, to: str, remedy: str) -> tuple[Linear, np.ndarray, np.ndarray]:
    """Model, weights (features x outputs) and intercepts of a linear model; others are refused.

    With a schema, numbers come in the unit of the table: a quantity's range is folded into weights and intercept, and a
    count's unit into intercept and cap.
    """
    if not isinstance(run.model, Linear):
        _check_reads_numbers(run)
        forest = "a model of trees" if isinstance(run.model, Trees) else f"a network ({run.about['kind']})"
        what = "a survival model" if run.edges else forest
        raise SordinoError(f"--to: {to} is for linear models, and this is {what}; {remedy}.")
    model, theta = run.model, run.theta.double().cpu().numpy()
    size = model.features * model.outputs
    weight, offset = theta[:size].reshape(-1, model.outputs), theta[size:] if model.bias else np.zeros(model.outputs)
    if run.schema is not None and model.kind is Loss.SQUARES:
        weight, offset = weight * run.schema.unit, offset * run.schema.unit + run.schema.middle
    if run.schema is not None and model.kind is Loss.POISSON:
        unit = math.log(run.schema.unit)
        model, offset = dataclasses.replace(model, cap=model.cap + unit), offset + unit
    return model, weight, offset


def hazard_parts(run: LoadedRun) -> tuple[np.ndarray, np.ndarray] | None:
    """Weights and constants of a survival model; None for other models."""
    if not isinstance(run.model, Hazards):
        return None
    theta = run.theta.double().cpu().numpy()
    return theta[: run.model.features], theta[run.model.features :]


# -------------------------------------------------------------------------------------------------------- coefficients


def write_coefficients(run: LoadedRun, out: Path) -> None:
    """A CSV: feature, class, weight, and the effect per unit of the table; comments say what the weights multiply.

    Of two classes there is one row per feature, which is about the second class against the first.
    """
    if (hazards := hazard_parts(run)) is not None:
        _write_hazards(run, out, *hazards)
        return
    if isinstance(run.model, Trees):
        _write_leaves(run, run.model, out)
        return
    model, weight, offset = linear_parts(run, "coefficients", "use --to torch")
    prepared = preparation(run)
    if prepared.matrix is not None:
        if prepared.scale is not None:
            raise SordinoError(
                "--to: the features are whitened by public statistics and then scaled, so that a weight belongs to no "
                "single feature; use --to torch or --to onnx."
            )
        assert prepared.mean is not None
        weight = prepared.matrix @ weight
        offset = offset - prepared.mean @ weight
    names = list(run.features) or [f"x{k}" for k in range(model.features)]
    outputs = list(map(cell, run.classes)) if model.outputs > 1 else list(map(cell, run.classes[-1:])) or [""]
    event, about = comment(outputs[0]), comment(contrast(run))
    link = {
        Loss.SOFTMAX: "probabilities are softmax of intercept + sum of weight * feature, over the classes",
        Loss.LOGISTIC: f"probability of {event} is 1 / (1 + exp(-(intercept + sum of weight * feature)))",
        Loss.SQUARES: "the value is intercept + sum of weight * feature",
        Loss.POISSON: f"the rate is exp(intercept + sum of weight * feature), the exponent at most {model.cap:g}",
    }[model.kind]
    units = "encoded features" if prepared.matrix is not None else f"encoded features; {prepared.words}"
    one = model.outputs == 1 or (model.kind is Loss.SOFTMAX and len(outputs) == 2)
    if not one:
        with files.replacing(out) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            file.write(f"# {link}\n# features: {units}\n")
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["feature", "class", "weight"])
            for k, output in enumerate(outputs):
                rows = zip([INTERCEPT, *names], [offset[k], *weight[:, k]], strict=True)
                table.writerows([cell(name), output, repr(float(value))] for name, value in rows)
        return
    if model.outputs == 2:
        weight, offset = weight[:, 1] - weight[:, 0], offset[1] - offset[0]
    else:
        weight, offset = weight[:, 0], offset[0]
    what, ratio = {Loss.SQUARES: ("effect", ""), Loss.POISSON: ("log_rate", "rate_ratio")}.get(
        model.kind, ("log_odds", "odds_ratio")
    )
    links = {
        Loss.SQUARES: f"the value of {about}" if about else "the value",
        Loss.POISSON: f"the logarithm of the rate (at most {model.cap:g})",
    }
    link = f"{links.get(model.kind, f'the log odds of {about}')} = intercept + sum of weight * feature"
    found = effects(weight, float(offset), run.schema, _scale_of_all(run, prepared))
    _write_rows(run, out, link, units, names, weight, float(offset), found, what, ratio)


def _scale_of_all(run: LoadedRun, prepared: Preparation) -> float | None:
    """What every complete record is multiplied by; None if each record has its own factor."""
    if prepared.scale is None:
        return 1.0
    return prepared.scale / prepared.floor if run.normalize.partition(":")[0] == "table" else None


INTERVAL = ["estimate", "standard_error", "low", "high"]


def _write_rows(
    run: LoadedRun,
    out: Path,
    link: str,
    units: str,
    names: list[str],
    weight: np.ndarray,
    offset: float,
    found: Effects | None,
    what: str,
    ratio: str,
) -> None:
    """One row per feature: its weight, its effect per unit of the table, and where the run has them, intervals."""
    intervals = {row["feature"]: row for row in run.about.get("intervals") or []}
    ends = [f"{ratio or what}_low", f"{ratio or what}_high"] if intervals else []
    told = ["per", what, *([ratio] if ratio else [])] if found else []
    factors = {} if found is None else dict(zip(names, found.factor, strict=True))
    with files.replacing(out) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        file.write(f"# {link}\n# features: {units}\n")
        if found is not None:
            file.write(_units_said(run, what, ratio))
        if intervals:
            rows = f"rows of '{comment(contrast(run))}' have"
            file.write(
                f"# {rows} 95 % intervals: by Newton steps from the weights, with sampling error and the noise of the "
                "run; blank where the noise hides a coefficient\n"
            )
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["feature", "class", "weight", *(INTERVAL if intervals else []), *told, *(ends if told else [])])
        for k, name in enumerate([INTERCEPT, *names]):
            cells = [cell(name), cell(contrast(run)), repr(offset if k == 0 else float(weight[k - 1]))]
            row = intervals.get(name, dict.fromkeys(INTERVAL))
            if intervals:
                cells += ["" if row[key] is None else repr(row[key]) for key in INTERVAL]
            if found is not None:
                value = found.intercept if k == 0 else float(found.effect[k - 1])
                cells += ["" if k == 0 else found.per[k - 1], _short(value)]
                cells += ([_ratio(value) if k else ""] if ratio else []) + ([""] * len(ends) if k == 0 else [])
                if k and ends:
                    both = [None if row[key] is None else row[key] * factors[name] for key in ("low", "high")]
                    cells += ["" if end is None else (_ratio if ratio else _short)(end) for end in both]
            table.writerow(cells)


def _units_said(run: LoadedRun, what: str, ratio: str) -> str:
    """Comments: what an effect is about."""
    line = f"# {what}: of one unit of the table, which 'per' says, all else equal"
    line += f"; {ratio} = exp({what})" if ratio else ""
    first = "baseline" if what == "log_hazard" else "intercept"
    at_zero = f" The {first} of {what} is that of a record with 0 in every number."
    line += f".{at_zero} Values beyond a public range are "
    line += "clamped.\n"
    line += (
        "# A missing number, date, boolean or ordinal counts as its fill in the schema (by default the middle of its "
        "range), and its row 'is missing' is added; a missing category has its row 'missing' alone.\n"
    )
    if run.normalize.partition(":")[0] == "table":
        line += (
            "# A record with missing values may be scaled to a shorter length; all effects are smaller there. Levels "
            "of a category: divide two ratios to compare two levels.\n"
        )
    return line


def _short(value: float) -> str:
    return f"{value:.6g}"


def _ratio(value: float) -> str:
    return f"{math.exp(min(value, 700)):.6g}"


def _write_leaves(run: LoadedRun, model: Trees, out: Path) -> None:
    """A CSV: tree, class, where the leaf lies, its value. Leaves that no round has moved are left out."""
    theta = run.theta.double().cpu().numpy()
    values = theta[: -model.outputs].reshape(model.trees, model.leaves, model.outputs)
    names = list(map(cell, run.features)) or [f"x{k}" for k in range(model.features)]
    outputs, written = list(map(cell, run.classes)) or [""], table_edges(run)
    with files.replacing(out) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        unit = "; numbers are cut in the unit of the table, and a boolean is 0 or 1" if written else ""
        file.write(
            f"# the logit of a class is its intercept plus the values of the leaves that hold the record{unit}\n"
        )
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["tree", "class", "leaf", "value"])
        table.writerows(
            ["", output, "(intercept)", repr(float(theta[k - model.outputs]))] for k, output in enumerate(outputs)
        )
        for t, leaf, k in zip(*np.nonzero(values), strict=True):
            words = model.words_of(int(t), int(leaf), names, written)
            table.writerow([t + 1, outputs[k], words, repr(float(values[t, leaf, k]))])


def _in_table(knot: Callable[[float], str], edge: float) -> str:
    return knot((edge + 1) / 2)


def table_edges(run: LoadedRun) -> dict[int, Callable[[float], str]]:
    """By the first feature of a number or date, how an edge of a tree is written in the unit of the table.

    Empty without a schema, and where records are scaled after they were encoded.
    """
    if run.schema is None or run.normalize != "none":
        return {}
    found: dict[int, Callable[[float], str]] = {}
    first = 0
    for block in run.schema.blocks:
        if block.knot is not None:
            found[first] = partial(_in_table, block.knot)
        first += len(block.features)
    return found


def contrast(run: LoadedRun) -> str:
    """What the intervals are about: one class against the other, or the target itself."""
    if run.classes:
        return f"{run.classes[-1]} against {run.classes[0]}"
    return "" if run.schema is None or run.schema.target is None else run.schema.target.column


def _write_hazards(run: LoadedRun, out: Path, weight: np.ndarray, constant: np.ndarray) -> None:
    """Weights of features, and the baseline of each interval: a survival model has no intercept."""
    edges = (0.0, *run.edges)
    intervals = [f"{start:g} to {end:g}" for start, end in itertools.pairwise(edges)]
    names = list(run.features) or [f"x{k}" for k in range(len(weight))]
    with files.replacing(out) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        file.write(
            "# the hazard in an interval is 1 / (1 + exp(-(its baseline + sum of weight * feature))); survival is the "
            "product of 1 - hazard; as in Cox's model there is no intercept\n"
            f"# features: encoded features; {preparation(run).words}\n"
        )
        table = csv.writer(file, lineterminator="\n")
        found = effects(weight, 0.0, run.schema, _scale_of_all(run, preparation(run)))
        if found is not None:
            file.write(
                _units_said(run, "log_hazard", "hazard_ratio").replace(
                    "exp(log_hazard)", "exp(log_hazard), of the odds of an event in an interval"
                )
            )
        table.writerow(["feature", "interval", "weight", *(["per", "log_hazard", "hazard_ratio"] if found else [])])
        for interval, b in zip(intervals, constant, strict=True):
            at_zero = ["", _short(float(b) + found.intercept), ""] if found else []
            table.writerow([BASELINE, interval, repr(float(b)), *at_zero])
        for k, name in enumerate(names):
            effect = [] if found is None else [found.per[k], _short(found.effect[k]), _ratio(found.effect[k])]
            table.writerow([cell(name), "", repr(float(weight[k])), *effect])


# --------------------------------------------------------------------------------------------------------------- torch


def _check_reads_numbers(run: LoadedRun) -> None:
    if registry.entry(run.about["kind"]).reads == "text":
        raise SordinoError(
            f"--to: {run.about['kind']} reads text; load public/adapter with peft, or sordino.load_run in Python."
        )


def write_torch(run: LoadedRun, out: Path) -> None:
    """A program of `torch.export` (.pt2), preparation included: torch.export.load(FILE).module()(x)."""
    _check_reads_numbers(run)
    module = torch_module(run)
    x = torch.ones(2, int(run.about["features"]))
    records = torch.export.Dim("records", min=1)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: records}})
    with files.replacing(out) as temporary, open(temporary, "wb") as file:
        torch.export.save(program, file)


def torch_module(run: LoadedRun) -> nn.Module:
    """Preparation and model as one module: encoded features in, probabilities or numbers out."""
    if (hazards := hazard_parts(run)) is not None:
        return _Prepared(preparation(run), _Survival(*hazards, run.theta.dtype)).eval()
    if isinstance(run.model, Linear):
        return _Prepared(preparation(run), _Head(*linear_parts(run, "torch", ""), run.theta.dtype)).eval()
    if isinstance(run.model, Trees):
        return _Prepared(preparation(run), _Forest(run, run.model)).eval()
    assert isinstance(run.model, TorchModel)
    network = copy.deepcopy(run.model.module).cpu()
    values = run.model.split(run.theta.detach().cpu())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in values:
                parameter.copy_(values[name])
    head = _Network(network, run.model.shape, run.theta.dtype)
    return _Prepared(preparation(run), head).eval().requires_grad_(False)


class _Head(nn.Module):
    """A linear model with its link."""

    def __init__(self, linear: Linear, weight: np.ndarray, offset: np.ndarray, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.tensor(offset, dtype=dtype), requires_grad=False)
        self.kind, self.cap = linear.kind, linear.cap

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.weight.dtype) @ self.weight + self.bias
        if self.kind is Loss.SOFTMAX:
            return z.softmax(-1)
        if self.kind is Loss.LOGISTIC:
            p = z.sigmoid()
            return torch.cat([1 - p, p], -1)
        return (z.clamp(max=self.cap).exp() if self.kind is Loss.POISSON else z)[:, 0]


class _Forest(nn.Module):
    """Trees with their link; numbers come in the unit of the table."""

    keys: Tensor
    edges: Tensor
    values: Tensor
    constant: Tensor

    def __init__(self, run: LoadedRun, model: Trees) -> None:
        super().__init__()
        keys, edges = model.arrays
        values, constant = model.parts(run.theta.detach().cpu())
        self.register_buffer("keys", torch.from_numpy(keys).flatten(1).to(run.theta.dtype))
        self.register_buffer("edges", torch.from_numpy(edges).flatten(0, 1).to(run.theta.dtype))
        self.register_buffer("values", values.clone())
        self.register_buffer("constant", constant.clone())
        self.kind, self.bins, self.columns, self.cap = model.kind, model.bins, model.columns, model.linear.cap
        schema = run.schema
        self.unit = 1.0 if schema is None else float(schema.unit)
        self.middle = schema.middle if schema is not None and model.kind is Loss.SQUARES else 0.0

    def forward(self, x: Tensor) -> Tensor:
        score = (x.to(self.values.dtype) @ self.keys).T.contiguous()
        place = torch.searchsorted(self.edges, score).reshape(len(self.values), self.columns, -1)
        leaf = place[:, 0]
        for k in range(1, self.columns):
            leaf = leaf * self.bins + place[:, k]
        found = self.values.gather(1, leaf.unsqueeze(-1).expand(-1, -1, self.values.shape[-1]))
        z = found.sum(0) + self.constant
        if self.kind is Loss.SOFTMAX:
            return z.softmax(-1)
        return (z.clamp(max=self.cap).exp() if self.kind is Loss.POISSON else z)[:, 0] * self.unit + self.middle


class _Survival(nn.Module):
    """A survival model: the probability of no event by the end of each interval."""

    def __init__(self, weight: np.ndarray, constant: np.ndarray, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight[:, None], dtype=dtype), requires_grad=False)
        self.constant = nn.Parameter(torch.tensor(constant, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.weight.dtype) @ self.weight + self.constant
        return nn.functional.logsigmoid(-z.double()).cumsum(-1).exp()


class _Network(nn.Module):
    """A network with its softmax."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.shape, self.dtype = network, shape, dtype

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.network(x.to(self.dtype).reshape(-1, *self.shape))
        return z.softmax(-1)


class _Prepared(nn.Module):
    """A model behind the preparation of its records."""

    mean: Tensor | None
    matrix: Tensor | None
    root_mean: Tensor | None
    root_matrix: Tensor | None

    def __init__(self, prepared: Preparation, head: nn.Module) -> None:
        super().__init__()
        self.prepared, self.head = prepared, head
        for name in ("mean", "matrix", "root_mean", "root_matrix"):
            value = getattr(prepared, name)
            self.register_buffer(name, None if value is None else torch.tensor(value, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        z, prepared = _affine(x, self.mean, self.matrix), self.prepared
        if prepared.roots:
            root = _affine(x.abs().sqrt(), self.root_mean, self.root_matrix)
            z = torch.where((x >= 0).all(-1, keepdim=True), root, z)
        if prepared.centre:
            z = z - z.mean(-1, keepdim=True)
        if prepared.scale is not None:
            norm = z.square().sum(-1, keepdim=True).sqrt()
            if prepared.roots:
                real = norm > EQUAL * x.square().sum(-1, keepdim=True).sqrt()
                z = torch.where(real, z, torch.zeros_like(z))
            z = z * (prepared.scale / norm.clamp(min=prepared.floor))
        result: Tensor = self.head(z)
        return result


def _affine(x: Tensor, mean: Tensor | None, matrix: Tensor | None) -> Tensor:
    return x if mean is None or matrix is None else (x - mean) @ matrix


# ------------------------------------------------------------------------------------------------------------- sklearn


def write_sklearn(run: LoadedRun, out: Path) -> None:
    """A joblib file: a fitted LogisticRegression or Ridge, behind a `RecordScaler` where records are scaled."""
    optional("sklearn", "sklearn", "--to sklearn")
    joblib = optional("joblib", "sklearn", "--to sklearn")
    from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge
    from sklearn.pipeline import Pipeline

    from sordino.training.record_scaler import RecordScaler

    model, weight, offset = linear_parts(run, "sklearn", "use --to torch or onnx")
    estimator: Any
    if model.kind in NUMERIC_LOSSES:
        estimator = Ridge() if model.kind is Loss.SQUARES else PoissonRegressor()
        estimator.coef_, estimator.intercept_ = weight[:, 0], float(offset[0])
        if model.kind is Loss.POISSON:
            estimator._base_loss = estimator._get_loss()  # `fit` sets it, and `predict` reads its link
    else:
        estimator = LogisticRegression()
        estimator.classes_ = np.asarray(run.classes)
        if model.kind is Loss.SOFTMAX and len(run.classes) == 2:
            weight, offset = weight[:, 1:] - weight[:, :1], offset[1:] - offset[:1]
        estimator.coef_, estimator.intercept_ = weight.T, offset
        estimator.n_iter_ = np.asarray([0])
    estimator.n_features_in_ = model.features
    if run.normalize != "none" or (run.public is not None and run.schema is None):
        public = None if run.schema is not None else run.public
        scale = RecordScaler(run.normalize, public).fit(np.ones((1, model.features)))
        estimator = Pipeline([("scale", scale), ("model", estimator)])
    with files.replacing(out) as temporary:
        joblib.dump(estimator, temporary)


# ---------------------------------------------------------------------------------------------------------------- onnx


def write_onnx(run: LoadedRun, out: Path) -> None:
    """An ONNX graph, preparation included: input `features` (float32), output `probabilities` or `values`."""
    onnx = optional("onnx", "onnx", "--to onnx")
    graph, hazards = _Graph(onnx), hazard_parts(run)
    z = graph.prepare(graph.node("Cast", "features", to=onnx.TensorProto.DOUBLE), preparation(run))
    model: Any = run.model
    if isinstance(run.model, Trees):
        z = graph.forest(z, run.model, run.theta.detach().cpu())
    elif hazards is not None:
        z = graph.linear(z, hazards[0][:, None], hazards[1])
    else:
        model, weight, offset = linear_parts(run, "onnx", "use --to torch")
        z = graph.linear(z, weight, offset)
    if hazards is not None:
        tail = graph.node("Exp", graph.node("Neg", graph.node("Abs", z)))  # softplus of doubles is in no runtime
        tail = graph.node("Log", graph.node("Add", tail, graph.constant(1.0)))
        softplus = graph.node("Add", tail, graph.node("Max", z, graph.constant(0.0)))
        passed = graph.node("Neg", softplus)  # log(1 - hazard)
        z = graph.node("Exp", graph.node("CumSum", passed, graph.constant(1, np.int64)))
    elif model.kind is Loss.SOFTMAX:
        z = graph.node("Softmax", z, axis=-1)
    elif model.kind is Loss.LOGISTIC:
        p = graph.node("Sigmoid", z)
        z = graph.node("Concat", graph.node("Sub", graph.constant(1.0), p), p, axis=-1)
    elif model.kind is Loss.POISSON:
        cap = model.linear.cap if isinstance(model, Trees) else model.cap
        z = graph.node("Exp", graph.node("Min", z, graph.constant(cap)))
    if isinstance(model, Trees) and run.schema is not None and not run.classes:  # of linear models it is in the weights
        middle = run.schema.middle if model.kind is Loss.SQUARES else 0.0
        z = graph.node("Add", graph.node("Mul", z, graph.constant(run.schema.unit)), graph.constant(middle))
    name = "probabilities" if run.classes or run.edges else "values"
    graph.node("Cast", z, out=name, to=onnx.TensorProto.FLOAT)
    width = len(run.classes) or len(run.edges) or 1
    inputs = [
        onnx.helper.make_tensor_value_info("features", onnx.TensorProto.FLOAT, ["records", int(run.about["features"])])
    ]
    outputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["records", width])]
    body = onnx.helper.make_graph(graph.nodes, "sordino", inputs, outputs, graph.constants)
    made = onnx.helper.make_model(
        body,
        producer_name="sordino",
        producer_version=__version__,
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    told = {key: json.dumps(value, ensure_ascii=False) for key, value in describe(run, "onnx").items()}
    onnx.helper.set_model_props(made, told)
    onnx.checker.check_model(made, full_check=True)
    files.write(out, made.SerializeToString())


class _Graph:
    """The nodes and constants of an ONNX graph; every value is a double."""

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, dtype: Any = np.float64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        name = out or f"v{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def norm(self, x: str) -> str:
        squares = self.node("Mul", x, x)
        return self.node("Sqrt", self.node("ReduceSum", squares, self.constant([1], np.int64), keepdims=1))

    def affine(self, x: str, mean: np.ndarray | None, matrix: np.ndarray | None) -> str:
        if mean is None or matrix is None:
            return x
        return self.node("MatMul", self.node("Sub", x, self.constant(mean)), self.constant(matrix))

    def linear(self, x: str, weight: np.ndarray, offset: np.ndarray) -> str:
        return self.node("Add", self.node("MatMul", x, self.constant(weight)), self.constant(offset))

    def forest(self, x: str, model: Trees, theta: Tensor) -> str:
        """The logits of trees: bins by counted edges, leaves by their number. Edges are compared in the run's type."""
        single = theta.dtype == torch.float32
        number = np.float32 if single else np.float64
        keys, edges = model.arrays
        values, constant = model.parts(theta.double())
        x = self.node("Cast", x, to=self.onnx.TensorProto.FLOAT) if single else x
        score = self.node("MatMul", x, self.constant(keys.reshape(model.features, -1), number))
        score = self.node("Unsqueeze", score, self.constant([2], np.int64))
        above = self.node("Greater", score, self.constant(edges.reshape(model.trees * model.columns, -1), number))
        above = self.node("Cast", above, to=self.onnx.TensorProto.INT64)
        place = self.node("ReduceSum", above, self.constant([2], np.int64), keepdims=0)
        place = self.node("Reshape", place, self.constant([-1, model.trees, model.columns], np.int64))
        strides = model.bins ** np.arange(model.columns)[::-1]
        leaf = self.node("Mul", place, self.constant(strides, np.int64))
        leaf = self.node("ReduceSum", leaf, self.constant([2], np.int64), keepdims=0)
        leaf = self.node("Add", leaf, self.constant(model.leaves * np.arange(model.trees), np.int64))
        found = self.node("Gather", self.constant(values.reshape(-1, model.outputs).numpy()), leaf, axis=0)
        total = self.node("ReduceSum", found, self.constant([1], np.int64), keepdims=0)
        return self.node("Add", total, self.constant(constant.numpy()))

    def prepare(self, x: str, prepared: Preparation) -> str:
        z = self.affine(x, prepared.mean, prepared.matrix)
        if prepared.roots:
            root = self.affine(self.node("Sqrt", self.node("Abs", x)), prepared.root_mean, prepared.root_matrix)
            lowest = self.node("ReduceMin", x, axes=[1], keepdims=1)
            z = self.node("Where", self.node("GreaterOrEqual", lowest, self.constant(0.0)), root, z)
        if prepared.centre:
            z = self.node("Sub", z, self.node("ReduceMean", z, axes=[1], keepdims=1))
        if prepared.scale is None:
            return z
        norm = self.norm(z)
        if prepared.roots:
            real = self.node("Greater", norm, self.node("Mul", self.constant(EQUAL), self.norm(x)))
            z = self.node("Where", real, z, self.constant(0.0))
        longest = self.node("Max", norm, self.constant(prepared.floor))
        return self.node("Mul", z, self.node("Div", self.constant(prepared.scale), longest))


WRITERS = {
    "coefficients": write_coefficients,
    "torch": write_torch,
    "sklearn": write_sklearn,
    "onnx": write_onnx,
}
