"""Standard errors of coefficients: exact without noise, honest about what noise hides, paid for, refused elsewhere."""

import csv
import json
import math

import numpy as np
import pytest
from scipy.special import expit

import sordino as so
from sordino import checks
from sordino.cli import main
from sordino.core import Adjacency, Kind, Unit
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.federation.terms import federated
from sordino.methods import build
from sordino.methods.uncertainty import OF_QUANTITIES, of_counts, with_uncertainty
from sordino.models.linear import Linear
from sordino.training import run
from sordino.training.export import export
from sordino.training.intervals import (
    INTERCEPT,
    Released,
    dispersion,
    estimate,
    hidden_for_sure,
    most_records,
    table,
    told,
)
from sordino.training.predict import load_run
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run
from tests.support import tiers


def estimated(theta, g, H, stds, records, spread=1.0):
    return estimate(Released(theta, g, H, stds).of_contrast(), records, spread)


def released(x, y, w):
    """Mean gradient and Hessian of a softmax of two classes with parameters (0, w), by their definitions."""
    u = np.concatenate([x, np.ones((len(x), 1))], 1)
    p = expit(u @ w)
    g = np.einsum("ni,na->ia", u, np.stack([y - p, p - y], 1)).ravel() / len(x)
    sign = np.array([[1, -1], [-1, 1]])
    H = np.einsum("n,ni,nj,ab->iajb", p * (1 - p), u, u, sign) / len(x)
    return np.stack([0 * w, w], 1).ravel(), g, H.reshape(2 * len(w), 2 * len(w))


def problem(n=4000, seed=0):
    rng = np.random.default_rng(seed)
    x, w = rng.uniform(-1, 1, (n, 3)), np.array([1.0, -0.5, 0.0, -0.3])
    return x, (rng.random(n) < expit(x @ w[:-1] + w[-1])).astype(float), w


def test_without_noise_they_are_those_of_maximum_likelihood():
    x, y, w = problem()
    start = w * 0.9  # as a trained model: near, not there
    for _ in range(4):
        found = estimated(*released(x, y, start), (0.0, 0.0), len(x))
        start = found.value
    u = np.concatenate([x, np.ones((len(x), 1))], 1)
    p = expit(u @ start)
    assert np.allclose(u.T @ (p - y), 0, atol=1e-6), "the step goes to the maximum"
    information = (u * (p * (1 - p))[:, None]).T @ u
    assert np.allclose(found.standard_error, np.sqrt(np.diag(np.linalg.inv(information))), rtol=1e-6)


def test_noise_that_is_known_is_in_the_errors():
    """Over draws of noise alone, the spread of estimates is the stated one, less the sampling error."""
    x, y, w = problem(20_000)
    theta, g, H = released(x, y, w * 1.1)
    rng, stds, size = np.random.default_rng(1), (0.01, 0.01), len(w)
    sampling = estimated(theta, g, H, (0.0, 0.0), len(x)).standard_error
    values, errors = [], []
    for _ in range(400):
        E = rng.normal(0, stds[1] / math.sqrt(2), (2 * size, 2 * size))
        E = np.triu(E, 1) + np.triu(E, 1).T + np.diag(rng.normal(0, stds[1], 2 * size))
        found = estimated(theta, g + rng.normal(0, stds[0], 2 * size), H + E, stds, len(x))
        values.append(found.value)
        errors.append(found.standard_error)
    stated = np.sqrt(np.mean(np.square(errors), 0) - sampling**2)
    assert np.std(values, 0) == pytest.approx(stated, rel=0.25)


def test_what_the_noise_hides_has_no_interval():
    x, y, _ = problem()
    rare, level = np.zeros((len(x), 1)), (x[:, :1] > 0).astype(float)
    wide = np.concatenate([x[:, 1:2], rare, level, 1 - level], 1)  # levels sum to 1, as the intercept does
    theta, g, H = released(wide, y, np.zeros(5))
    rows = table(estimated(theta, g, H, (1e-4, 1e-4), len(x)), ["a", "rare", "yes", "no"])
    assert [row["feature"] for row in rows if row["low"] is not None] == ["a"]
    assert rows[-1] == {"feature": INTERCEPT, "estimate": None, "standard_error": None, "low": None, "high": None}
    hidden = table(estimated(theta, g, H, (1e-4, 10.0), len(x)), ["a", "rare", "yes", "no"])
    assert all(row["low"] is None for row in hidden)


def numbers(n=4000, seed=0, sd=0.2):
    """Records of a linear model of quantities, and the releases at w: mean gradient, Hessian, trace of g g^T."""
    rng, w = np.random.default_rng(seed), np.array([0.4, -0.2, 0.0, 0.1])
    u = np.concatenate([rng.uniform(-1, 1, (n, 3)), np.ones((n, 1))], 1)
    r = u @ (0.9 * w) - (u @ w + rng.normal(0, sd, n))
    return 0.9 * w, u, u.T @ r / n, u.T @ u / n, float(np.mean(r**2 * (u**2).sum(1)))


def test_a_hidden_intercept_that_nobody_calibrated_hides_all():
    """Features are long and the intercept's is 1, so the noise hides it first; risks or rates may all be wrong then."""
    H = np.diag([1.0, 1.0, 0.01])
    released = Released(np.zeros(3), np.array([0.1, -0.1, 0.0]), H, (0.001, 0.01))
    assert np.isfinite(estimate(released, 1000).standard_error).tolist() == [True, True, False]
    assert not np.isfinite(estimate(released, 1000, sure=False).standard_error).any()
    seen = released._replace(hessian=np.diag([1.0, 1.0, 0.5]))
    assert np.isfinite(estimate(seen, 1000, sure=False).standard_error).all()


def test_quantities_have_the_errors_of_least_squares():
    w, u, g, H, trace = numbers()
    found = estimate(Released(w, g, H, (0.0, 0.0)), len(u), dispersion(trace, 0.0, H))
    exact = w - np.linalg.solve(H, g)
    assert np.allclose(found.value, exact)
    errors = np.sqrt(np.diag(np.linalg.inv(u.T @ u))) * 0.2
    assert np.allclose(found.standard_error, errors, rtol=0.1)
    assert dispersion(-1.0, 0.1, H) == pytest.approx(0.1 * 2 / np.trace(H)), "a hidden spread is as large as its noise"


def test_a_person_may_add_as_much_as_its_records_and_errors_allow_for_any_likeness_of_them():
    privacy = so.Privacy(1.0, unit="person", person_records=3, person_clients=2)
    assert most_records(privacy) == 6
    assert most_records(so.Privacy(1.0)) == 1
    x, y, w = problem()
    single, double = (estimated(*released(x, y, w), (0.0, 0.0), len(x), k).standard_error for k in (1.0, 4.0))
    assert np.allclose(double, 2 * single)
    gradient, hessian = with_uncertainty(build("auto", Unit.PERSON), 0.2, 10.0, records=3).stages[-1].queries
    assert gradient.clip == pytest.approx(3 * math.sqrt(202))
    assert hessian.clip == pytest.approx(3 * 101 / 2)


@pytest.mark.parametrize("terms", [OF_QUANTITIES, of_counts(3.0)])
def test_numbers_also_pay_for_their_spread(terms):
    method = with_uncertainty(build("auto", Unit.RECORD), 0.2, 10.0, terms)
    *first, gradient, hessian, spread = [query for stage in method.stages[-3:] for query in stage.queries]
    assert [gradient.kind, hessian.kind, spread.kind] == [Kind.GRADIENT, Kind.CURVATURE, Kind.FISHER]
    assert spread.sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD) == pytest.approx(math.sqrt(2) * gradient.clip**2)
    assert hessian.clip == pytest.approx(terms.curvature * 101)
    assert sum(query.share for query in (*first, gradient, hessian, spread)) == pytest.approx(0.2)


# ------------------------------------------------------------------------------------------------------------ in a run


def test_the_round_is_paid_for_and_its_bounds_cut_nothing():
    method = with_uncertainty(build("auto", Unit.RECORD), 0.2, 10.0)
    gradient, hessian = method.stages[-1].queries
    before = [query for stage in method.stages[-3:-1] for query in stage.queries]
    assert gradient.sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD) == pytest.approx(2 * math.sqrt(202))
    assert hessian.sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD) == pytest.approx(math.sqrt(2) * 101 / 2)
    assert sum(query.share for query in (gradient, hessian, *before)) == pytest.approx(0.2)
    assert with_uncertainty(method, 0, 1.0) is method


def test_a_round_asks_as_declared_and_the_server_only_post_processes():
    method, model = with_uncertainty(build("dp-fedgd", Unit.RECORD), 0.2, 0.5), Linear(3, 3)
    assert checks.asks(method, model) == []
    assert checks.replay(method, model) == []
    assert checks.engines(method, model) <= checks.TOLERANCE


@pytest.mark.soak
def test_contracts_hold():
    reports = checks.check_uncertainty(trials=16)
    assert [problem for report in reports for problem in report.problems] == []
    assert {report.query.split()[-1] for report in reports} == {"gradient", "curvature", "fisher"}
    assert {report.unit for report in reports} == {"record", "person"}


def test_a_run_writes_them(tmp_path, capsys):
    x, y, _ = problem(6000)
    names = ["a", "b", "c"]
    rows = [",".join([*(f"{v:.4f}" for v in row), "yes" if label else "no"]) for row, label in zip(x, y, strict=True)]
    (tmp_path / "data.csv").write_text("\n".join([",".join([*names, "died"]), *rows]) + "\n")
    columns = {name: {"type": "number", "range": [-1, 1], "indicator": False} for name in names}
    schema = Schema.of({"columns": columns, "target": {"column": "died", "levels": ["no", "yes"]}})
    (tmp_path / "schema.toml").write_text(schema.toml())
    words = ["run", "--data", str(tmp_path / "data.csv"), "--schema", str(tmp_path / "schema.toml"), "--clients", "2"]
    words += ["--epsilon", "8", "--rounds", "24", "--set", "uncertainty=0.2", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert "intervals  4 of 4 coefficients have a 95 % interval\n" in capsys.readouterr().out
    assert not verify_run(tmp_path / "run").problems
    certificate = json.loads((tmp_path / "run" / "public" / "certificate.json").read_text())
    assert certificate["certified"]
    assert certificate["epsilon"] == pytest.approx(8)
    loaded = load_run(tmp_path / "run")
    assert [row["feature"] for row in loaded.about["intervals"]] == [*names, INTERCEPT]
    assert "## Coefficients" in (tmp_path / "run" / "public" / "MODEL_CARD.md").read_text()
    export(loaded, "coefficients", tmp_path / "coefficients.csv")
    lines = [line for line in (tmp_path / "coefficients.csv").read_text().splitlines() if not line.startswith("#")]
    table = {row["feature"]: row for row in csv.DictReader(lines) if row["class"] == "yes against no"}
    low, high = float(table["a"]["low"]), float(table["a"]["high"])
    assert low < float(table["a"]["estimate"]) < high
    assert low > 0, "a coefficient of 1 in 6,000 records is seen at epsilon 8"
    ends = [float(table["a"][key]) for key in ("odds_ratio_low", "odds_ratio_high")]
    assert ends == pytest.approx([math.exp(end * 10 / math.sqrt(3)) for end in (low, high)], rel=1e-4)
    truth = math.sqrt(3) / 10  # of a feature that is scaled by 10 / sqrt(3)
    assert abs(float(table["a"]["estimate"]) - truth) < 6 * float(table["a"]["standard_error"])


@pytest.mark.parametrize("task", ["quantity", "count"])
@pytest.mark.parametrize("unit", tiers(["record", "person"], 1))
def test_intervals_of_numbers_are_in_the_unit_of_the_table(task, unit, tmp_path):
    """A run per record or person, at a large epsilon: intervals hold the coefficients that made the table."""
    rng, n, w = np.random.default_rng(0), 6000, np.array([0.6, -0.3, 0.0])
    x = rng.uniform(-1, 1, (n, 3))
    if task == "quantity":
        y, target = 50 + 10 * (x @ w) + rng.normal(0, 2, n), {"column": "days", "task": task, "range": [20, 80]}
        truth, middle = 10 * w, 50.0
    else:
        y, target = rng.poisson(np.exp(x @ w + 0.5)), {"column": "days", "task": task, "maximum": 16}
        truth, middle = w, 0.5
    rows = [
        ",".join([*(f"{v:.5f}" for v in row), f"{label:g}", f"p{k // 2}"])
        for k, (row, label) in enumerate(zip(x, y, strict=True))
    ]
    (tmp_path / "data.csv").write_text("\n".join(["a,b,c,days,who", *rows]) + "\n")
    columns = {name: {"type": "number", "range": [-1, 1], "indicator": False} for name in "abc"}
    (tmp_path / "schema.toml").write_text(Schema.of({"columns": columns, "target": target, "person": "who"}).toml())
    words = ["run", "--data", str(tmp_path / "data.csv"), "--schema", str(tmp_path / "schema.toml"), "--clients", "2"]
    words += ["--epsilon", "800", "--rounds", "24", "--set", "uncertainty=0.3", "--unit", unit, "--seed", "1"]
    assert main([*words, "--set", "person_records=2", "--out", str(tmp_path / "run")]) == 0
    loaded = load_run(tmp_path / "run")
    export(loaded, "coefficients", tmp_path / "coefficients.csv")
    lines = [line for line in (tmp_path / "coefficients.csv").read_text().splitlines() if not line.startswith("#")]
    table = {row["feature"]: row for row in csv.DictReader(lines) if row["class"] == "days"}
    assert list(table) == [INTERCEPT, "a", "b", "c"]
    for name, value in zip([*"abc"], truth * math.sqrt(3) / 10, strict=True):  # of features scaled by 10 / sqrt(3)
        assert abs(float(table[name]["estimate"]) - value) < 5 * float(table[name]["standard_error"])
    assert abs(float(table[INTERCEPT]["estimate"]) - middle) < 5 * float(table[INTERCEPT]["standard_error"])
    assert float(table["a"]["low"]) > 0
    assert not verify_run(tmp_path / "run").problems


def test_run_and_export_say_why_intervals_are_blank(tmp_path, capsys):
    """With 600 records at epsilon 1 the noise hides everything; somebody who reads the blank cells must know why."""
    x, y, _ = problem(600)
    np.savez(tmp_path / "data.npz", x=x.astype(np.float32), y=y.astype(np.int64))
    words = ["run", "--data", str(tmp_path / "data.npz"), "--partition", "iid", "--clients", "2", "--epsilon", "1"]
    words += ["--rounds", "8", "--set", "uncertainty=0.2", "--out", str(tmp_path / "run")]
    blank = "0 of 4 coefficients have a 95 % interval; the noise is too large for the others"
    assert main(words) == 0
    told_in_run = capsys.readouterr()
    assert blank in told_in_run.out
    assert told_in_run.err.startswith("WARNING: no coefficient will have an interval"), "before training"
    words = ["export", str(tmp_path / "run"), "--to", "coefficients", "--out", str(tmp_path / "coefficients.csv")]
    assert main(words) == 0
    assert blank in capsys.readouterr().out
    lines = [line for line in (tmp_path / "coefficients.csv").read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert rows
    assert not any(row["low"] for row in rows)


def shown(size, std, draws=60):
    """How often the last coefficient is seen, if B is as large as it can be along it and elsewhere anything."""
    rng, times = np.random.default_rng(size), 0
    for draw in range(draws):
        u = rng.normal(size=size) * (draw % 3)
        u[-1] = 1.0
        E = rng.normal(size=(size, size)) * std
        E = (E + E.T) / 2
        E[np.diag_indices(size)] = rng.normal(size=size) * std
        found = estimate(Released(np.zeros(size), np.zeros(size), np.outer(u, u) / 4 + E, (0.0, std)), 1000)
        times += math.isfinite(found.standard_error[-1])
    return times


@pytest.mark.parametrize("size", [8, 20, 60])
def test_what_is_hidden_for_sure_is_never_seen(size):
    """The least noise of which this is said hides every draw. An eighth of it does not: the mutant would be wrong."""
    std = next(std for std in np.geomspace(1e-3, 10, 400) if hidden_for_sure(0.25, std, size))
    assert not hidden_for_sure(0.25, std / 8, size)
    assert shown(size, std) == 0
    assert shown(size, std / 8) > 0
    assert not hidden_for_sure(0.25, 0.0, size)


def test_a_run_whose_intervals_are_seen_gets_no_warning(tmp_path):
    """The warning follows from the plan alone: the same for other labels, and for no run without intervals."""
    x, y, _ = problem(4000)
    said = {}
    for name, labels, values in (
        ("seen", y, {"epsilon": 200.0}),
        ("hidden", y, {"epsilon": 0.05}),
        ("other labels", 1 - y, {"epsilon": 0.05}),
        ("calibrated", y, {"epsilon": 0.05, "calibrate": 0.1}),
        ("none", y, {"epsilon": 0.05, "uncertainty": 0.0}),
    ):
        np.savez(tmp_path / f"{name}.npz", x=x.astype(np.float32), y=labels.astype(np.int64))
        base = {"data": str(tmp_path / f"{name}.npz"), "clients": 2, "partition": "iid", "rounds": 8}
        said[name] = run.no_intervals(run.prepare(Spec.of({**base, "uncertainty": 0.2, **values})))
    assert said == {"seen": False, "hidden": True, "other labels": True, "calibrated": False, "none": False}


def test_the_sentence_counts_what_is_known():
    row = {"feature": "a", "low": 0.0}
    assert told([row, row]) == "2 of 2 coefficients have a 95 % interval"
    assert told([row, {**row, "low": None}]).startswith("1 of 2 coefficients have a 95 % interval; the noise is too")


@pytest.mark.parametrize(
    ("values", "classes", "message"),
    [
        ({"method": "dp-fedgd"}, 2, "here method = dp-fedgd"),
        ({}, 3, "there are 3 classes"),
        ({"model": "logistic"}, 2, r"model = logistic \(use auto or softmax\)"),
        ({"radius": 3.0}, 2, "radius = 3, below the norm of records, 10"),
        ({"class_weights": [1, 2]}, 2, "class_weights are set"),
        ({"batch": "poisson:0.5"}, 2, "batch = poisson:0.5"),
        ({"participation": "fixed:2"}, 2, "not every client takes part"),
        ({"divisor": "client-mean"}, 2, "divisor = client-mean"),
        ({"normalize": "none"}, 2, "records are not scaled"),
    ],
)
def test_other_runs_are_refused(values, classes, message):
    resolved = resolve(Spec.of({"data": "t.csv", "uncertainty": 0.2, "partition": "iid", **values}))
    with pytest.raises(SordinoError, match=f"^uncertainty: .*{message}"):
        resolved.build_model(20, classes)


def test_wrong_shares_and_units_are_refused():
    for share in (-0.1, 0.6):
        with pytest.raises(SordinoError, match=f"uncertainty: {share} must lie in"):
            with_uncertainty(build("auto", Unit.RECORD), share, 10.0)
    with pytest.raises(SordinoError, match="uncertainty: it is derived for records and persons, not for unit = client"):
        with_uncertainty(build("auto", Unit.CLIENT), 0.1, 10.0)
    with pytest.raises(SordinoError, match="uncertainty: the spec of a federation must not set it"):
        federated({"uncertainty": 0.1})


def test_a_run_is_resumed_between_these_rounds(tmp_path):
    x, y, _ = problem(2000)
    np.savez(tmp_path / "data.npz", x=x.astype(np.float32), y=y.astype(np.int64))
    values = {"data": str(tmp_path / "data.npz"), "epsilon": 8.0, "clients": 2, "partition": "iid"}
    prepared, out = run.prepare(Spec.of({**values, "rounds": 8, "uncertainty": 0.2})), tmp_path / "run"
    run.start(prepared, out)
    rounds = run.rounds(prepared, out)
    assert [next(rounds)["round"] for _ in range(7)][-1] == 7
    rounds.close()
    again = run.prepare(run.reopen(out))
    run.finish(again, out, list(run.rounds(again, out)))
    assert len(load_run(out).about["intervals"]) == 4
    assert not verify_run(out).problems
