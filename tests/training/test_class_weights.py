"""Class weights: they mean what scikit-learn's do, the clip does not undo them, and balanced ones are paid for."""

import json
import tomllib

import numpy as np
import pytest
import torch
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from sordino import checks
from sordino.checks import report as rows
from sordino.checks import suites
from sordino.cli import main
from sordino.core import Shard, Unit
from sordino.data.columns import PREVALENCE
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.federation.terms import written
from sordino.models import registry
from sordino.models.linear import Linear, Loss
from sordino.training.predict import load_run
from sordino.training.private_statistics import shares
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run
from tests.support import passing

SCHEMA = {
    "target": {"column": "died", "levels": ["no", "yes"]},
    "columns": {"age": {"type": "number", "range": [0, 100]}, "dose": {"type": "number", "range": [-3, 3]}},
}


def data(n=4000, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    return x, (rng.random(n) < expit(x @ [1.0, -0.5, 0.2] - 2.5)).astype(np.int64)


def newton(model, x, y, clip):
    """The minimum of the summed clipped loss, by Newton's method."""
    shard = Shard(torch.from_numpy(x), torch.from_numpy(y), torch.ones(len(x), dtype=torch.float64))
    theta = torch.zeros(model.size, dtype=torch.float64)
    for _ in range(30):
        step = torch.linalg.solve(model.curvature_sum(theta, shard, clip), model.clipped_sum(theta, shard, clip))
        theta = theta - step
    return theta.numpy()


@pytest.mark.parametrize("weights", ["balanced", {0: 1.0, 1: 3.5}])
def test_without_noise_and_with_a_large_clip_they_are_those_of_scikit_learn(weights):
    x, y = data()
    want = LogisticRegression(C=np.inf, class_weight=weights, tol=1e-10, max_iter=1000).fit(x, y)
    given = registry.balanced((1 - y.mean(), y.mean())) if weights == "balanced" else tuple(weights.values())
    model = Linear(3, 1, Loss.LOGISTIC, class_weights=torch.tensor(given, dtype=torch.float64))
    theta = newton(model, x, y, 1e9)
    assert np.allclose(theta, [*want.coef_[0], want.intercept_[0]], atol=1e-5)
    plain = newton(Linear(3, 1, Loss.LOGISTIC), x, y, 1e9)
    assert abs(theta[-1] - plain[-1]) > 1, "the intercept shows that weights were used"


def test_the_mean_weight_is_that_of_the_records_where_weights_are_balanced():
    _, y = data()
    weights = torch.tensor(registry.balanced((1 - y.mean(), y.mean())), dtype=torch.float64)
    model = Linear(3, 2, class_weights=weights)
    assert model.mean_weight == pytest.approx(model.relative_weights[y].mean().item(), rel=1e-9)
    assert model.mean_weight < 0.3
    assert Linear(3, 2).mean_weight == 1


@pytest.mark.parametrize("per_person", [1, 2])
def test_the_clip_does_not_undo_them(per_person):
    """Where every gradient is clipped, classes still count by their weights."""
    x, y = (torch.from_numpy(part[:40]) for part in data(seed=1))
    model = Linear(3, 1, Loss.LOGISTIC, class_weights=torch.tensor([1.0, 4.0]))
    y = y.reshape(-1, 2).amax(-1).repeat_interleave(2)  # both records of a person have the same class
    mask, theta, clip = torch.ones(40, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), 1e-3
    for k in range(0, 40, per_person):
        one = Shard(x, y, mask * 0, None, per_person)
        one.mask[k : k + per_person] = 1
        norm = float(model.clipped_sum(theta, one, clip).norm())
        assert norm == pytest.approx(clip * (1.0 if y[k] else 0.25), rel=1e-3)


def test_a_person_of_two_classes_stays_within_the_clip():
    """Two gradients that cancel without weights do not cancel with them."""
    x, y = torch.tensor([[30.0], [30.0]], dtype=torch.float64), torch.tensor([0, 1])
    model = Linear(1, 1, Loss.LOGISTIC, class_weights=torch.tensor([0.1, 1.0]))
    shard = Shard(x, y, torch.ones(2, dtype=torch.float64), None, 2)
    assert float(model.clipped_sum(torch.zeros(2, dtype=torch.float64), shard, 1.0).norm()) == pytest.approx(
        1, rel=1e-3
    )


@pytest.mark.parametrize("unit", [Unit.RECORD, pytest.param(Unit.PERSON, marks=pytest.mark.soak)])
def test_contracts_hold_and_weights_beyond_the_clip_are_rejected(unit, monkeypatch):
    reports = checks.check_weights(trials=checks.LEAST_TRIALS, units=[unit])
    assert len(reports) == (4 if unit is Unit.RECORD else 2)
    assert [problem for report in reports for problem in report.problems] == []
    monkeypatch.setattr(suites, "weighs_beyond_the_clip", lambda method, model: (method, model))
    monkeypatch.setattr(rows, "reports_of", passing)  # all other contracts hold, as above
    wrong = checks.check_weights(trials=checks.LEAST_TRIALS, units=[Unit.RECORD])
    assert [report.passed for report in wrong] == [False] * 4


# ------------------------------------------------------------------------------------------------------------- balanced


def test_a_public_prevalence_costs_nothing():
    schema = Schema.of({**SCHEMA, "target": {**SCHEMA["target"], "prevalence": [0.9, 0.1]}})
    resolved = resolve(Spec.of({"class_weights": "balanced", "data": "t.csv"}), schema=schema)
    model = resolved.build_model(4, 2)
    assert model.class_weights.tolist() == pytest.approx([1 / 1.8, 5])
    assert len(resolved.method.stages) == len(resolve(Spec.of({"data": "t.csv", "calibrate": 0})).method.stages)
    assert resolved.spec.calibrate == 0, "weights ask for risks that are not calibrated"
    terms = Spec.of(tomllib.loads(written(Spec.of({"class_weights": "balanced"}), schema)))
    assert terms.model_options["prevalence"] == (0.9, 0.1), "sites of a federation read it in the terms"


def test_balanced_from_counts_that_are_paid_for(tmp_path, capsys):
    x, y = data(20_000)
    rows = [f"{50 + 10 * a:.2f},{b:.3f},{'yes' if c else 'no'}" for (a, b, _), c in zip(x, y, strict=True)]
    (tmp_path / "data.csv").write_text("\n".join(["age,dose,died", *rows]) + "\n")
    schema = Schema.of({**SCHEMA, "target": {**SCHEMA["target"], "find_prevalence": True}})
    assert schema.unknown == [PREVALENCE]
    (tmp_path / "schema.toml").write_text(schema.toml())
    words = ["run", "--data", str(tmp_path / "data.csv"), "--schema", str(tmp_path / "schema.toml"), "--clients", "2"]
    words += ["--epsilon", "8", "--rounds", "10", "--set", "class_weights=balanced"]
    assert main([*words, "--out", str(tmp_path / "none")]) == 2
    assert "--private-statistics" in capsys.readouterr().err
    out = tmp_path / "run"
    assert main([*words, "--private-statistics", "0.05", "--out", str(out), "--json"]) == 0
    found = Schema.read(out / "public" / "schema.toml")
    assert found.target.prevalence[1] == pytest.approx(y.mean(), abs=0.02)
    assert found.without_ranges == schema
    certificate = json.loads((out / "public" / "certificate.json").read_text())
    assert certificate["certified"]
    assert any("the shares of the levels of died" in fact for fact in certificate["assumes"])
    assert not verify_run(out).problems
    risk = load_run(out).predict_proba({"age": [50.0], "dose": [0.0]})[0, 1]
    assert risk > 0.3, "a mean record is near even odds where classes are balanced, and 0.08 where they are not"


def test_shares_below_their_noise():
    assert shares(np.array([1.0, -0.02]), 0.01) == pytest.approx((1 / 1.01, 0.01 / 1.01), rel=1e-4)
    assert sum(shares(np.array([0.2, 0.3, 0.5]), 0.0)) == pytest.approx(1)


# --------------------------------------------------------------------------------------------------------- wrong inputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weights": "balanced"}, r"class_weights: balanced needs the share of each class"),
        ({"class_weights": "even"}, r"class_weights: 'even' is unknown"),
        ({"class_weights": "balanced", "prevalence": (0.5,)}, r"prevalence: 1 shares for 2 classes"),
        ({"class_weights": "balanced", "prevalence": (0.5, 0.6)}, r"prevalence: .* with a sum of 1"),
        ({"class_weights": "balanced", "prevalence": (1.0, 0.0)}, r"prevalence: .* at least"),
        ({"class_weights": (1.0, 2.0), "prevalence": (0.5, 0.5)}, r"prevalence: it is for class_weights = balanced"),
        ({"class_weights": (0.0, 0.0)}, r"class_weights: at least one must be above 0"),
        ({"class_weights": (1.0, -1.0)}, r"class_weights: they must be finite"),
        ({"class_weights": (1.0,)}, r"class_weights: 1 weights for 2 classes"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(SordinoError, match=message):
        registry.build("auto", 3, 2, **options)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"prevalence": [0.5]}, r"target.prevalence: \[0.5\] must be one share"),
        ({"prevalence": [0.5, 0.2]}, r"target.prevalence: .* with a sum of 1"),
        ({"find_prevalence": "yes"}, r"target.find_prevalence: 'yes' must be true or false"),
        ({"task": "count", "levels": [], "maximum": 3, "find_prevalence": True}, r"target.find_prevalence: it is for"),
    ],
)
def test_wrong_targets(target, message):
    with pytest.raises(SordinoError, match=message):
        Schema.of({**SCHEMA, "target": {**SCHEMA["target"], **target}})


def test_two_prevalences_that_differ():
    schema = Schema.of({**SCHEMA, "target": {**SCHEMA["target"], "prevalence": [0.9, 0.1]}})
    spec = Spec.of({"class_weights": "balanced", "prevalence": [0.8, 0.2], "data": "t.csv"})
    with pytest.raises(SordinoError, match="prevalence: the target of the schema has other shares"):
        resolve(spec, schema=schema)
