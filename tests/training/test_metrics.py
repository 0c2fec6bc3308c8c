"""Metrics: known values, scikit-learn's values, and the cases where a metric is not defined."""

import json
import math

import numpy as np
import pytest
import torch

from sordino.cli.run import slope_note
from sordino.errors import SordinoError
from sordino.models.linear import Linear, Loss
from sordino.training import metrics
from sordino.training.evaluate import evaluate, evaluate_clients, evaluate_fully
from sordino.training.metrics import Task

TWO, MANY, NUMBERS = Task.TWO_CLASSES, Task.MANY_CLASSES, Task.QUANTITIES


def logistic(n=4000, slope=1.0, shift=0.0, seed=0):
    """Labels drawn from the log-odds, and predictions that a slope and a shift distort."""
    rng = np.random.default_rng(seed)
    z = rng.normal(-1, 1.5, n)
    y = (rng.random(n) < 1 / (1 + np.exp(-z))).astype(int)
    return y, (z - shift) / slope


# -------------------------------------------------------------------------------------------------------- known values


def test_known_values_of_two_classes():
    y, p = np.array([0, 0, 1, 1]), np.array([0.1, 0.6, 0.4, 0.8])
    found = metrics.full(TWO, y, metrics.log_odds(p), threshold=0.3)
    assert found["accuracy"] == 0.5
    assert found["auc"] == 0.75
    assert found["log_loss"] == pytest.approx(-(math.log(0.9) + math.log(0.4) + math.log(0.4) + math.log(0.8)) / 4)
    assert found["brier"] == pytest.approx((0.01 + 0.36 + 0.36 + 0.04) / 4)
    assert (found["mean_predicted"], found["observed"]) == (pytest.approx(0.475), 0.5)
    assert (found["sensitivity"], found["specificity"], found["threshold"]) == (1.0, 0.5, 0.3)


def test_known_values_of_quantities_and_of_many_classes():
    found = metrics.full(NUMBERS, np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0]))
    assert found == {"r2": pytest.approx(1 - 5 / (14 / 3)), "mse": pytest.approx(5 / 3), "mae": 1.0}
    z = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    found = metrics.full(MANY, np.array([1, 2]), z)
    loss = pytest.approx(-(math.log(0.3) + math.log(0.8)) / 2)
    classes = found.pop("classes")
    assert found == {"accuracy": 0.5, "balanced_accuracy": 0.5, "macro_auc": 1.0, "log_loss": loss}
    assert [row["recall"] for row in classes] == [None, 0.0, 1.0], "of the first class there is no record"
    assert [(row["auc"], row["records"]) for row in classes] == [(None, 0), (1.0, 1), (1.0, 1)]


@pytest.mark.parametrize("prevalence", [0.01, 0.3])
def test_scikit_learn_has_the_same_values(prevalence):
    sk = pytest.importorskip("sklearn.metrics")
    from sklearn.calibration import calibration_curve

    rng = np.random.default_rng(1)
    y = (rng.random(5000) < prevalence).astype(int)
    z = rng.normal(y * 1.2 - 3, 1.0).round(1)  # with ties
    p = 1 / (1 + np.exp(-z))
    found = metrics.full(TWO, y, z, threshold=0.2)
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, z), rel=1e-12)
    assert found["log_loss"] == pytest.approx(sk.log_loss(y, p), rel=1e-12)
    assert found["brier"] == pytest.approx(sk.brier_score_loss(y, p), rel=1e-12)
    assert found["accuracy"] == sk.accuracy_score(y, p > 0.5)
    assert found["sensitivity"] == pytest.approx(sk.recall_score(y, p > 0.2))
    assert found["specificity"] == pytest.approx(sk.recall_score(1 - y, p <= 0.2))
    observed, predicted = calibration_curve(y, p, n_bins=10, strategy="quantile")
    assert [g["observed"] for g in found["calibration_curve"]] == pytest.approx(observed)
    assert [g["predicted"] for g in found["calibration_curve"]] == pytest.approx(predicted)
    assert sum(g["records"] for g in found["calibration_curve"]) == 5000

    labels, logits = rng.integers(0, 4, 300), rng.normal(size=(300, 4))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = metrics.full(MANY, labels, logits)
    assert found["log_loss"] == pytest.approx(sk.log_loss(labels, shares), rel=1e-12)
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(labels, logits.argmax(1)), rel=1e-12)
    areas = sk.roc_auc_score(labels, shares, multi_class="ovr", average=None)
    assert [row["auc"] for row in found["classes"]] == pytest.approx(areas, rel=1e-12)
    assert found["macro_auc"] == pytest.approx(areas.mean(), rel=1e-12)
    recalls = sk.recall_score(labels, logits.argmax(1), average=None)
    assert [row["recall"] for row in found["classes"]] == pytest.approx(recalls)
    value, guess = rng.normal(size=300), rng.normal(size=300)
    found = metrics.full(NUMBERS, value, guess)
    assert found["r2"] == pytest.approx(sk.r2_score(value, guess))
    assert found["mse"] == pytest.approx(sk.mean_squared_error(value, guess))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(value, guess))


def test_slope_and_intercept_are_those_of_a_logistic_regression():
    linear_model = pytest.importorskip("sklearn.linear_model")
    for seed in range(3):
        y, z = logistic(seed=seed, slope=0.6, shift=0.8)
        fit = linear_model.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(z[:, None], y)
        assert metrics.calibration_slope(y, z) == pytest.approx(fit.coef_[0, 0], rel=1e-6)
        a = metrics.calibration_intercept(y, z)
        assert (1 / (1 + np.exp(-(a + z)))).mean() == pytest.approx(y.mean(), abs=1e-12)


def test_slope_and_intercept_tell_how_predictions_are_distorted():
    """Standard errors at 20,000 records: about 0.02 of the slope, 0.02 of the intercept."""
    y, z = logistic(20_000)
    assert metrics.calibration_slope(y, z) == pytest.approx(1, abs=0.08)
    assert metrics.calibration_intercept(y, z) == pytest.approx(0, abs=0.08)
    y, z = logistic(20_000, slope=0.5)  # twice too extreme
    assert metrics.calibration_slope(y, z) == pytest.approx(0.5, abs=0.04)
    y, z = logistic(20_000, shift=0.7)  # risks too low by 0.7 in log-odds
    assert metrics.calibration_intercept(y, z) == pytest.approx(0.7, abs=0.08)
    assert metrics.calibration_slope(y, z) == pytest.approx(1, abs=0.08)


def test_the_slope_is_found_where_predictions_are_far_out():
    y, z = logistic(2000)
    z = np.append(z, [900.0, -900.0])
    y = np.append(y, [0, 1])
    slope = metrics.calibration_slope(y, z)
    assert math.isfinite(slope)
    near = [metrics._log_loss_of_two(y, a + b * z) for a in np.linspace(-2, 2, 41) for b in (slope * 0.9, slope * 1.1)]
    best = min(metrics._log_loss_of_two(y, a + slope * z) for a in np.linspace(-2, 2, 4001))
    assert best <= min(near)


# ------------------------------------------------------------------------------------------------------------ the edges


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_only(label):
    found = metrics.full(TWO, np.full(20, label), np.linspace(-1, 2, 20))
    undefined = {"auc", "calibration_slope", "calibration_intercept", "sensitivity" if label == 0 else "specificity"}
    assert {name for name, value in found.items() if value is None} == undefined
    assert found["log_loss"] > 0
    assert len(found["calibration_curve"]) == 10


def test_probabilities_of_exactly_0_and_1():
    y = np.array([0, 1, 1, 0])
    right = metrics.full(TWO, y, metrics.log_odds(y.astype(float)))
    assert right["log_loss"] == pytest.approx(0, abs=1e-15)
    assert right["brier"] == pytest.approx(0, abs=1e-15)
    assert (right["accuracy"], right["auc"], right["calibration_slope"]) == (1.0, 1.0, None)
    wrong = metrics.full(TWO, y, metrics.log_odds(1.0 - y))
    assert wrong["log_loss"] == pytest.approx(52 * math.log(2))
    assert (wrong["accuracy"], wrong["auc"]) == (0.0, 0.0)
    # Logits keep what the probability has lost: the log loss of log-odds of 1000 is 1000.
    assert metrics.score(TWO, np.array([0, 1]), np.array([1000.0, 1000.0]))["log_loss"] == 500.0
    assert metrics.score(MANY, np.array([0]), np.array([[0.0, 1000.0, 0.0]]))["log_loss"] == 1000.0
    assert metrics.score(TWO, np.array([0, 1]), np.array([math.inf, 1.0]))["log_loss"] is None


def test_a_constant_model():
    y = np.array([0] * 99 + [1])
    found = metrics.full(TWO, y, np.full(100, math.log(1 / 99)))
    assert found["auc"] == 0.5
    assert found["calibration_slope"] is None
    assert found["calibration_intercept"] == pytest.approx(0, abs=1e-12)
    assert found["log_loss"] == pytest.approx(metrics.entropy(y), rel=1e-12)
    assert found["calibration_curve"] == [{"predicted": pytest.approx(0.01), "observed": 0.01, "records": 100}]
    assert metrics.score(NUMBERS, np.full(5, 0.1), np.zeros(5))["r2"] is None


def test_predictions_that_are_not_numbers():
    y = np.array([0, 0, 1, 1])
    found = metrics.full(TWO, y, np.array([-1.0, math.nan, math.nan, 2.0]))
    assert found["accuracy"] == 0.5, "NaN is wrong"
    assert (found["sensitivity"], found["specificity"]) == (0.5, 0.5)
    assert [found[k] for k in ("auc", "log_loss", "brier", "mean_predicted", "calibration_slope")] == [None] * 5
    assert found["calibration_curve"] == []
    found = metrics.full(MANY, np.array([0, 1]), np.array([[math.nan] * 3, [0.0, 1.0, 0.0]]))
    assert [row["recall"] for row in found.pop("classes")] == [0.0, 1.0, None], "NaN is wrong"
    assert found == {"accuracy": 0.5, "balanced_accuracy": 0.5, "macro_auc": None, "log_loss": None}
    assert metrics.full(NUMBERS, np.ones(2), np.array([1.0, math.nan])) == {"r2": None, "mse": None, "mae": None}


def test_metrics_of_no_records_are_undefined():
    empty = np.zeros(0)
    found = metrics.full(TWO, empty, empty)
    assert {v for k, v in found.items() if k not in ("threshold", "calibration_curve")} == {None}
    assert metrics.full(NUMBERS, empty, empty) == {"r2": None, "mse": None, "mae": None}


def test_the_area_of_a_class_orders_records_whose_probability_rounds_to_one():
    z = np.array([[900.0, 0, 0], [800.0, 0, 0], [0, 0, 700.0]])
    assert metrics.per_class(np.array([0, 1, 2]), z)[0]["auc"] == 1.0
    assert metrics.per_class(np.array([1, 0, 2]), z)[0]["auc"] == 0.5


def test_entropy_is_the_log_loss_of_the_prevalence():
    assert metrics.entropy(np.array([1, 1])) == 0
    assert metrics.entropy(np.array([0, 1, 0, 1])) == pytest.approx(math.log(2))


# ------------------------------------------------------------------------------------------------------------- ranking


def test_losses_rank_downwards_and_nan_ranks_last():
    assert metrics.goodness("log_loss", 0.1) > metrics.goodness("log_loss", 0.2) > metrics.goodness("log_loss", None)
    assert metrics.goodness("auc", 0.9) > metrics.goodness("auc", 0.8) > metrics.goodness("auc", math.nan)


def test_a_metric_that_the_labels_do_not_have_is_refused():
    assert metrics.ranking_metric("auc", TWO) == "auc"
    assert [metrics.ranking_metric(None, task) for task in (TWO, MANY, NUMBERS)] == ["accuracy", "accuracy", "r2"]
    with pytest.raises(SordinoError, match=r"--metric: 'acu' is unknown\. Did you mean 'auc'\?"):
        metrics.ranking_metric("acu", TWO)
    with pytest.raises(SordinoError, match=r"quantities have no auc; use one of r2, mse, mae"):
        metrics.ranking_metric("auc", NUMBERS)
    with pytest.raises(SordinoError, match=r"many classes have no brier; use one of accuracy, balanced_accuracy"):
        metrics.ranking_metric("brier", MANY)


# --------------------------------------------------------------------------------------------------------- of a model


@pytest.mark.parametrize(("kind", "outputs"), [(Loss.LOGISTIC, 1), (Loss.SOFTMAX, 2)])
def test_two_classes_are_scored_alike_by_both_models(kind, outputs):
    y, z = logistic(500)
    model = Linear(1, outputs, kind, bias=False)
    theta = torch.tensor([1.0]) if outputs == 1 else torch.tensor([-0.5, 0.5])
    x = torch.from_numpy(z[:, None]).float()
    found = evaluate(model, theta, x, torch.from_numpy(y))
    want = metrics.score(TWO, y, x[:, 0].double().numpy())
    assert found == pytest.approx(want, rel=1e-6)
    whole = evaluate_fully(model, theta, x, torch.from_numpy(y), 0.2)
    assert whole["threshold"] == 0.2
    bare = evaluate_fully(model, theta, x, torch.from_numpy(y), 0.2, counts=False)
    assert [set(group) for group in bare["calibration_curve"]] == [{"predicted", "observed"}] * 10


def test_what_is_not_defined_is_left_out_of_a_round():
    model = Linear(1, 1, Loss.LOGISTIC, bias=False)
    x = torch.ones(3, 1)
    found = evaluate(model, torch.ones(1), x, torch.ones(3).long())
    assert set(found) == {"accuracy", "log_loss", "brier"}
    assert set(evaluate(model, torch.full((1,), math.nan), x, torch.tensor([0, 1, 1]))) == {"accuracy"}
    squares = Linear(1, 1, Loss.SQUARES, bias=False)
    diverged = evaluate(squares, torch.full((1,), math.inf), torch.zeros(3, 1), torch.ones(3))
    assert list(diverged) == ["mse"]
    assert math.isnan(diverged["mse"])


def test_every_client_is_scored_on_its_own_records():
    from sordino.data.records import Records

    x, y = np.array([[1.0], [-1.0], [1.0], [1.0]], np.float32), np.array([1, 0, 0, 1])
    records = Records.of(x, y, np.array([0, 0, 1, 1]))
    table = evaluate_clients(Linear(1, 1, Loss.LOGISTIC, bias=False), torch.ones(1), records)
    assert [(row["client"], row["records"], row["accuracy"], row["auc"]) for row in table] == [
        (0, 2, 1.0, 1.0),
        (1, 2, 0.5, 0.5),
    ]


# ----------------------------------------------------------------------------------------------------------- of a run


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """Two classes, of which the second is rare; a run on them, with its --json document."""
    place = tmp_path_factory.mktemp("metrics")
    rng = np.random.default_rng(3)
    x = rng.normal(size=(900, 3))
    died = rng.random(900) < 1 / (1 + np.exp(2 - 1.5 * x[:, 0]))
    rows = [f"{a:.3f},{b:.3f},{c:.3f},{int(d)}" for (a, b, c), d in zip(x, died, strict=True)]
    (place / "patients.csv").write_text("\n".join(["a,b,c,died", *rows]) + "\n")
    return place


def trained(patients, capsys, *words):
    from sordino.cli import main

    start = ["run", "--data", str(patients / "patients.csv"), "--label", "died", "--clients", "3", "--rounds", "6"]
    assert main([*start, *words]) == 0
    return capsys.readouterr().out


def test_a_run_tells_every_metric_of_its_model(patients, capsys):
    from sordino.training import run

    sk = pytest.importorskip("sklearn.metrics")
    out, result = patients / "run", patients / "run.json"
    told = trained(patients, capsys, "--out", str(out), "--json", str(result), "--set", "threshold=0.2")
    document = json.loads(result.read_text())
    prepared = run.prepare(run.reopen(out))
    y = prepared.dataset.y_test
    model, theta = prepared.model, run._final_model(prepared, out)
    p = model.scores(theta, prepared.dataset.x_test).double().numpy()[:, 1]
    found = document["metrics"]
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, p), rel=1e-6)
    assert found["log_loss"] == pytest.approx(sk.log_loss(y, p), rel=1e-5)
    assert found["brier"] == pytest.approx(sk.brier_score_loss(y, p), rel=1e-5)
    assert found["sensitivity"] == pytest.approx(sk.recall_score(y, p > 0.2))
    assert (found["mean_predicted"], found["observed"]) == pytest.approx((p.mean(), y.mean()), rel=1e-5)
    last = json.loads((out / "public" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {k: last[k] for k in metrics.OF_A_ROUND[TWO]} == {k: found[k] for k in metrics.OF_A_ROUND[TWO]}
    assert document["auc"]["6"] == found["auc"]
    assert f"AUC {found['auc']:.4g}, log loss {found['log_loss']:.4g} ({metrics.entropy(y):.4g} from" in told
    assert f"{found['mean_predicted']:.1%} predicted on average, {found['observed']:.1%} observed" in told
    assert f"threshold  above 0.2: sensitivity {found['sensitivity']:.1%}" in told
    assert "client_metrics" not in document, "these are private records"


@pytest.mark.parametrize("unit", ["record", "client"])
def test_a_run_on_many_classes_tells_recall_and_area_of_each(unit, tmp_path, capsys):
    from sordino.cli import main
    from sordino.evidence import public

    sk, rng = pytest.importorskip("sklearn.metrics"), np.random.default_rng(4)
    x = rng.normal(size=(900, 2))
    risk = x[:, 0] + rng.normal(size=900)
    words = np.select([risk > 1.5, risk > 0], ["dead", "ill"], "well")
    lines = [f"{a:.3f},{b:.3f},{word},{k % 12}" for k, ((a, b), word) in enumerate(zip(x, words, strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,state,site", *lines]) + "\n")
    out, result = tmp_path / "run", tmp_path / "run.json"
    table = ["--data", str(tmp_path / "t.csv"), "--label", "state", "--partition", "by-column:site", "--unit", unit]
    rest = ["--epsilon", "200", "--rounds", "6", "--set", "public_data=true", "--out", str(out), "--json", str(result)]
    assert main(["run", *table, *rest]) == 0
    told, document = capsys.readouterr().out, json.loads(result.read_text())
    found = document["metrics"]
    rows = found["classes"]
    assert [row["class"] for row in rows] == ["dead", "ill", "well"]
    assert [("records" in row) for row in rows] == [unit == "record"] * 3, "sizes of whole clients are private"
    from sordino.training import run

    prepared = run.prepare(run.reopen(out))
    p = prepared.model.scores(run._final_model(prepared, out), prepared.dataset.x_test).double().numpy()
    recalls = sk.recall_score(prepared.dataset.y_test, p.argmax(1), average=None)
    assert [row["recall"] for row in rows] == pytest.approx(recalls)
    assert found["macro_auc"] == pytest.approx(np.mean([row["auc"] for row in rows]))
    for row in rows:
        assert f"class      {row['class']}: recall {row['recall']:.1%}, AUC {row['auc']:.4g}" in told
    lines = [json.loads(line) for line in (out / "public" / "metrics.jsonl").read_text().splitlines()]
    assert "balanced_accuracy" in lines[0]
    assert "macro_auc" not in lines[0], "it sorts all records once per class"
    assert lines[-1]["macro_auc"] == found["macro_auc"]
    card = (out / "public" / "MODEL_CARD.md").read_text()
    assert f"| balanced accuracy | {found['balanced_accuracy']:.4g} |" in card
    assert f"| macro auc | {found['macro_auc']:.4g} |" in card
    assert public.unlisted(out / "public") == []


def test_of_many_classes_those_that_are_found_least_have_a_line():
    from sordino.cli.run import quality

    rows = [{"class": f"c{k}", "recall": None if k == 3 else k / 20, "auc": 0.5} for k in range(12)]
    found = {"log_loss": 1.0, "balanced_accuracy": 0.5, "macro_auc": 0.5, "classes": rows}
    lines = [text for heading, text in quality(found, 2.0) if heading == "class"]
    assert [line.split(":")[0] for line in lines[:-1]] == ["c0", "c1", "c2", "c4", "c5"]
    assert lines[-1].startswith("7 more, which --json lists")


def test_a_run_whose_risks_are_useless_says_so_loudly(patients, capsys):
    told = trained(patients, capsys, "--epsilon", "0.01", "--seed", "1", "--out", str(patients / "bad"))
    assert "WARNING: the model is no better than a constant guess: its log loss is" in told
    card = (patients / "bad" / "public" / "MODEL_CARD.md").read_text()
    assert "**The model is no better than a constant guess: its log loss is" in card
    told = trained(patients, capsys, "--epsilon", "inf", "--out", str(patients / "good"))
    assert "WARNING" not in told
    assert "constant guess" not in (patients / "good" / "public" / "MODEL_CARD.md").read_text()


def test_risks_that_are_too_sure_are_told_where_enough_records_show_it():
    assert "--set calibrate_slope=0.05" in slope_note({"calibration_slope": 0.6}, 1000)
    for measured, tests in (({"calibration_slope": 0.6}, 50), ({"calibration_slope": 0.9}, 1000), ({}, 1000)):
        assert slope_note(measured, tests) == ""
    assert slope_note({"calibration_slope": 0.6}, None) == "", "the number is private"
    assert slope_note({"calibration_slope": -0.3}, 1000) == "", "the order of risks is wrong; their distance is not"


@pytest.mark.draws
def test_a_model_that_diverged_is_told_and_drawn(tmp_path):
    from sordino.training.evaluate import draw_curve

    history = [{"round": 1, "mse": 0.5, "epsilon": 1.0}, {"round": 2, "mse": None, "epsilon": 2.0}]
    pytest.importorskip("matplotlib")
    assert draw_curve(tmp_path / "curve.png", "diverged", 1e-5, history)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.5, 20.0])
def test_a_threshold_is_a_probability(threshold):
    from sordino.training.spec import Spec

    with pytest.raises(SordinoError, match=rf"threshold: {threshold:g} must lie between 0 and 1"):
        Spec.of({"threshold": threshold})


def test_perplexity_counts_every_token_once():
    loss, tokens = np.array([1.0, 3.0, 9.0]), np.array([3.0, 1.0, 0.0])
    found = metrics.score(Task.SEQUENCES, np.zeros(3), np.stack([loss, tokens], 1))
    assert found == {"perplexity": pytest.approx(np.exp(6 / 4))}
    assert metrics.score(Task.SEQUENCES, np.zeros(1), np.array([[1.0, 0.0]])) == {"perplexity": None}, "no token counts"
