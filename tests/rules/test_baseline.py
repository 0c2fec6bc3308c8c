"""The constants of a survival model that fit its life table."""

import dataclasses

import numpy as np
import pytest
import torch

import sordino.rules.baseline as module
from sordino import FederatedCox
from sordino.rules.baseline import Baseline, recalibrated
from sordino.training import batch, run, survival
from sordino.training.spec import Spec

TABLE = torch.tensor([-2.0, -1.5, -1.8], dtype=torch.float64)
TRAINED = torch.zeros(3, dtype=torch.float64)


def baseline(mean, covariance, records=1.0, std=0.0):
    """Of features with these moments, and so many records per person."""
    mean, covariance = torch.tensor(mean, dtype=torch.float64), torch.tensor(covariance, dtype=torch.float64)
    A = torch.ones(len(mean) + 1, len(mean) + 1, dtype=torch.float64)
    A[:-1, :-1], A[-1, :-1], A[:-1, -1] = covariance + torch.outer(mean, mean), mean, mean
    return Baseline.of(records * A, records * A, torch.tensor([std]), TABLE, torch.tensor(0.1))


def test_without_weights_they_are_those_of_the_table():
    found = recalibrated(torch.zeros(2, dtype=torch.float64), TRAINED, baseline([1.0, 2.0], [[1.0, 0.2], [0.2, 2.0]]))
    torch.testing.assert_close(found, TABLE, atol=1e-6, rtol=0)


@pytest.mark.parametrize("records", [1.0, 2.5])
def test_mean_predicted_survival_is_that_of_the_table(records):
    w = torch.tensor([0.8, -0.5], dtype=torch.float64)
    mean, covariance = [0.5, -1.0], [[1.0, 0.3], [0.3, 0.6]]
    found = recalibrated(w, TRAINED, baseline(mean, covariance, records))
    x = np.random.default_rng(0).multivariate_normal(mean, covariance, 400_000)
    predicted = survival.survival_of((x @ w.numpy())[:, None] + found.numpy()).mean(0)
    shown = (-TABLE).sigmoid().cumprod(-1).numpy()
    np.testing.assert_allclose(predicted, shown, atol=2e-3)
    naive = survival.survival_of((x @ w.numpy())[:, None] + TABLE.numpy()).mean(0)
    assert np.abs(naive - shown).max() > 0.02, "the table's own constants do not fit a model with weights"


def test_noise_on_the_mean_leaves_the_trained_constants():
    w = torch.tensor([0.8, -0.5], dtype=torch.float64)
    args = [0.5, -1.0], [[1.0, 0.3], [0.3, 0.6]]
    exact, noisy = (recalibrated(w, TRAINED, baseline(*args, std=std)) for std in (0.0, 50.0))
    assert (noisy - TRAINED).abs().max() < 0.01
    assert (exact - TRAINED).abs().max() > 1


def test_runs_are_computed_together():
    w = torch.tensor([[0.8, -0.5], [0.1, 0.4]], dtype=torch.float64)
    one = baseline([0.5, -1.0], [[1.0, 0.3], [0.3, 0.6]])
    both = recalibrated(w, TRAINED.expand(2, -1), Baseline(*(part.expand(2, *part.shape) for part in one)))
    for k in range(2):
        torch.testing.assert_close(both[k], recalibrated(w[k], TRAINED, one))


def test_persons_with_several_records_are_predicted_without_the_bias_of_the_clip(monkeypatch):
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(400), rng.integers(1, 4, 400))
    x = np.clip(rng.uniform(-1, 1, (400, 4))[who] + 0.1 * rng.normal(size=(len(who), 4)), -1, 1)
    event, censored = rng.exponential(8 * np.exp(-x @ np.linspace(-1.2, 1.2, 4))), rng.uniform(2, 12, len(who))
    time, happened = np.minimum(event, censored), event <= censored
    edges = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    observed = survival.constant_survival(np.where(happened, time, -time), edges[1:])

    def off():
        settings = {"epsilon": np.inf, "random_state": 0, "clients": 2, "rounds": 30}
        model = FederatedCox(edges=edges, **settings, options={"person_records": 3})
        model.fit(x, np.stack([time, happened], 1), persons=who)
        return np.abs(model.predict_survival_function(x).mean(0) - observed).mean()

    assert off() < 0.008
    monkeypatch.setattr(module, "LEAST_NOISE", 1e9)
    assert off() > 0.012, "with the trained constants"


# ------------------------------------------------------------------------------------------------------------ of a run

SCHEMA = """
[target]
column = "time"
task = "survival"
event = "died"
intervals = [0, 1, 2, 3]
[columns.a]
type = "number"
range = [-3, 3]
"""


@pytest.fixture
def spec(tmp_path):
    rng = np.random.default_rng(0)
    a, time = rng.normal(size=300), rng.exponential(3, 300)
    rows = [f"{x:.3f},{min(t, 4):.3f},{int(t < 4)}" for x, t in zip(a, time, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,time,died", *rows]) + "\n")
    (tmp_path / "s.toml").write_text(SCHEMA)
    about = {"data": str(tmp_path / "t.csv"), "schema": str(tmp_path / "s.toml"), "rounds": 9, "clients": 2, "seed": 1}
    return Spec.of({**about, "epsilon": 20.0})


def test_a_stopped_run_goes_on(spec, tmp_path):
    whole = run.prepare(spec)
    run.start(whole, tmp_path / "whole")
    lines = list(run.rounds(whole, tmp_path / "whole"))
    part = run.prepare(spec)
    run.start(part, tmp_path / "part")
    stream = run.rounds(part, tmp_path / "part")
    for _ in range(4):
        next(stream)
    stream.close()
    again = run.prepare(run.reopen(tmp_path / "part"))
    assert list(run.rounds(again, tmp_path / "part")) == lines
    models = [run._final_model(each, tmp_path / name) for each, name in ((whole, "whole"), (again, "part"))]
    assert torch.equal(*models)


def test_runs_side_by_side_are_those_alone(spec):
    specs = [dataclasses.replace(spec, seed=seed, epsilon=epsilon) for seed, epsilon in ((1, 20.0), (2, 5.0))]
    both, alone = batch.run_many(specs), [batch.run_many([each])[0] for each in specs]
    for each, single in zip(both, alone, strict=True):
        torch.testing.assert_close(each.theta, single.theta, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(both[0].theta, both[1].theta, atol=1e-2)
