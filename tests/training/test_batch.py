"""Many runs at once are the runs one by one."""

import itertools
import time

import numpy as np
import pytest
import torch

from sordino.data.sources import load
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.methods import REGISTRY
from sordino.models import cuda_graphs, softmax_batched
from sordino.privacy import spending
from sordino.privacy.mechanisms import random
from sordino.training.batch import _shape, run_many
from sordino.training.evaluate import evaluate
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

NOT_PRIVATE = [name for name in REGISTRY if name == "fednew"]


@pytest.fixture(scope="module")
def digits():
    whole = load("digits")
    return whole._replace(x_train=whole.x_train[:240, ::8], y_train=whole.y_train[:240], x_test=whole.x_test[:, ::8])


def spec(**values):
    start = {"data": "digits", "clients": 3, "rounds": 3, "dtype": "float64", "normalize": "l2"}
    return Spec.of({**start, **values})


def alike(specs, dataset, **how):
    """Train together and one by one, and compare."""
    many = run_many(specs, dataset, **how)
    for one, batched in zip(specs, many, strict=True):
        (alone,) = run_many([one], dataset)
        torch.testing.assert_close(batched.theta, alone.theta, rtol=1e-6, atol=1e-8)
        assert batched.scores == pytest.approx(alone.scores)
        assert batched.signal == pytest.approx(alone.signal, rel=1e-6, abs=1e-9)
        assert spending.epsilon(batched.plan) == pytest.approx(min(one.epsilon, spending.epsilon(alone.plan)))
    return many


@pytest.mark.parametrize("name", REGISTRY)
def test_runs_side_by_side_are_the_runs_one_by_one(name, digits):
    """Every option that a batch may vary is varied, and so are seeds and budgets."""
    known = REGISTRY[name]
    base = {"method": name, "rounds": 6 if name == "auto" else max(3, known.rounds if known.rounds < 5 else 3)}
    base |= {"rounds": known.rounds} if known.fixed else {}
    base |= {"steps": 2} if "steps" in known.options else {}  # a single local step has no use for some options
    budgets = [float("inf")] if name in NOT_PRIVATE else [4.0, 8.0]
    specs = [spec(**base, seed=1 + k, epsilon=e) for k, e in enumerate(budgets)]
    for k, option in enumerate(known.batch):
        values = [known.options[option] * (factor - 0.01 * k) for factor in (0.9, 0.95)]
        specs += [spec(**base, seed=5, epsilon=budgets[0], **{option: value}) for value in values]
    assert len({_shape(resolve(each)) for each in specs}) == 1
    many = alike(specs, digits)
    moved = {tuple(np.round(trained.theta.tolist(), 12)) for trained in many}
    assert len(moved) == len(specs)  # a batch that ignored what differs would repeat itself


@pytest.mark.parametrize("name", [name for name in REGISTRY if REGISTRY[name].options.get("schedule") == "constant"])
def test_schedules_and_decay_are_the_same_in_a_batch(name, digits):
    for steps, unit in itertools.product((1, 2), REGISTRY[name].units):
        base = {"method": name, "steps": steps, "unit": unit, "schedule": "cosine", "decay": 0.1}
        alike([spec(**base, seed=5, local_lr=local_lr) for local_lr in (0.3, 0.6)], digits)


def test_what_does_not_fit_splits_the_batch(digits):
    specs = [spec(method="dp-fedgd", seed=1, clip=c, epsilon=e) for c, e in itertools.product((0.5, 1.0), (2.0, 4.0))]
    specs += [spec(method="dp-fedgd", seed=1, epsilon=float("inf")), spec(method="dp-fedavg", seed=2, steps=2)]
    assert len({_shape(resolve(each)) for each in specs}) == 4
    alike(specs, digits)


def test_partial_participation_is_the_same_in_a_batch(digits):
    alike([spec(seed=s, schedule_seed=7, participation="fixed:2", method="dp-fedgd") for s in (1, 2)], digits)
    drawn = [resolve(spec(seed=s, participation="fixed:2", method="dp-fedgd")) for s in (1, 2)]
    assert _shape(drawn[0]) != _shape(drawn[1])  # other cohorts, other batch


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
@pytest.mark.parametrize("unit", ["record", "client"])
def test_units_and_trust_models(unit, trust, digits):
    alike([spec(seed=s, epsilon=e, unit=unit, trust=trust, method="dp-fedgd") for s, e in ((1, 3.0), (2, 6.0))], digits)


def test_chunks_of_runs_and_of_records_change_nothing(digits, monkeypatch):
    specs = [spec(method="dp-fedsofim", seed=s, lr=lr) for s in (1, 2) for lr in (0.5, 1.0, 2.0)]
    whole = run_many(specs, digits)
    monkeypatch.setitem(softmax_batched.CHUNK_NUMBERS, "cpu", 500)
    for trained, again in zip(whole, run_many(specs, digits, most=4), strict=True):
        torch.testing.assert_close(trained.theta, again.theta, rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedsofim", "dp-fedadam", "auto"])
def test_runs_side_by_side_on_a_gpu(name, digits):
    """Each run draws the noise of its seed, so that only rounding of float32 differs."""
    specs = [spec(method=name, seed=s, epsilon=e, dtype="float32") for s in (1, 2) for e in (2.0, 8.0)]
    many = run_many(specs, digits, device="cuda")
    for one, batched in zip(specs, many, strict=True):
        (alone,) = run_many([one], digits, device="cuda")
        torch.testing.assert_close(batched.theta, alone.theta, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_runs_with_class_weights_on_a_gpu(digits):
    specs = [spec(method="auto", seed=s, class_weights=[*range(1, 11)], dtype="float32") for s in (1, 2)]
    for one, batched in zip(specs, run_many(specs, digits, device="cuda"), strict=True):
        (alone,) = run_many([one], digits, device="cuda")
        torch.testing.assert_close(batched.theta, alone.theta, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_sums_about_a_centre_are_those_without_a_cuda_graph(trust, digits, monkeypatch):
    specs = [spec(method="auto", seed=s, epsilon=e, trust=trust, dtype="float32") for s, e in ((1, 2.0), (2, 8.0))]
    replayed, graphs = run_many(specs, digits, device="cuda"), []

    def plain(f, inputs, **how):
        graphs.append(f)
        return lambda at: f(*at)

    monkeypatch.setattr(simulate, "CapturedGraph", plain)
    for graph, again in zip(replayed, run_many(specs, digits, device="cuda"), strict=True):
        torch.testing.assert_close(graph.theta, again.theta, rtol=1e-5, atol=1e-6)
    assert graphs


def test_rounds_to_stop_and_to_look_at(digits):
    (early,) = run_many([spec(method="dp-fedgd", seed=1, rounds=6)], digits, at=[2], stop=4)
    (late,) = run_many([spec(method="dp-fedgd", seed=1, rounds=6)], digits)
    assert early.scores == {t: late.scores[t] for t in (2, 4)}
    assert set(late.scores) == set(range(1, 7))


def test_a_record_whose_gradient_is_not_finite_counts_for_nothing_in_a_batch(digits):
    x = digits.x_train.copy()
    x[3] = 3e38
    alike([spec(method="dp-fedgd", seed=s) for s in (1, 2)], digits._replace(x_train=x))


def test_large_logits_in_a_batch(digits):
    big = digits._replace(x_train=digits.x_train * 1e3)
    alike([spec(method="dp-fedgd", seed=s, clip=1e3, lr=lr) for s, lr in ((1, 1.0), (2, 5.0))], big)


def test_quantities_have_no_accuracy(digits):
    numbers = digits._replace(classes=(), y_train=digits.y_train.astype("float32"))
    with pytest.raises(SordinoError, match=r"labels that are quantities have no accuracy; use one of r2, mse, mae"):
        run_many([spec(method="dp-fedgd", partition="iid")], numbers, metric="accuracy")


def two_classes(digits):
    return digits._replace(classes=("low", "high"), y_train=digits.y_train // 5, y_test=digits.y_test // 5)


@pytest.mark.parametrize("metric", ["auc", "log_loss", "brier", "accuracy"])
def test_a_batch_has_the_metric_of_a_single_run(digits, metric):
    specs = [spec(method="dp-fedgd", seed=seed, rounds=3, lr=lr) for seed, lr in ((1, 0.5), (2, 1.0), (3, 2.0))]
    data = two_classes(digits)
    batched = run_many(specs, data, metric=metric)
    for one, each in zip(specs, batched, strict=True):
        (alone,) = run_many([one], data, metric=metric)
        assert each.scores == pytest.approx(alone.scores, rel=1e-5)
        x, y = torch.from_numpy(data.x_test).double(), torch.from_numpy(data.y_test)
        assert each.scores[3] == pytest.approx(evaluate(each.model, each.theta, x, y)[metric], rel=1e-5)
        assert each.accuracy == pytest.approx(run_many([one], data)[0].scores)


def test_quantities_are_scored_by_r2_unless_another_metric_is_named(digits):
    numbers = digits._replace(
        classes=(), y_train=digits.y_train.astype("float32") / 9, y_test=digits.y_test.astype("float32") / 9
    )
    specs = [spec(method="dp-fedgd", partition="iid", rounds=3, seed=seed) for seed in (1, 2)]
    by = {metric: run_many(specs, numbers, metric=metric) for metric in (None, "r2", "mse")}
    variance = numbers.y_test.astype("float64").var()
    for default, r2, mse in zip(*by.values(), strict=True):
        assert default.scores == r2.scores
        assert r2.accuracy == {}
        assert r2.scores[3] == pytest.approx(1 - mse.scores[3] / variance)


def test_counted_noise_is_the_same_however_it_is_drawn(digits, monkeypatch):
    """A batch draws it ahead, for all runs at once; a single run address by address."""
    import sordino.training.batch as many

    monkeypatch.setattr(many, "source", random.Counted)
    for method, unit in itertools.product(("dp-fedgd", "dp-fedavg", "dp-scaffold", "dp-fedfc"), ("record", "client")):
        runs = [{"seed": s, "epsilon": e} for s, e in ((1, 4.0), (2, 8.0))]
        alike([spec(method=method, unit=unit, rounds=20, **each) for each in runs], digits)


def test_cpu_time_grows_by_round_and_leaves_evaluation_out(digits, monkeypatch):
    from sordino.training import batch

    scores, pause = batch._scores, 0.05

    def slow(*given):
        began = time.process_time()
        while time.process_time() - began < pause:
            pass
        return scores(*given)

    monkeypatch.setattr(batch, "_scores", slow)
    runs = run_many([spec(method="dp-fedgd", epsilon=4.0, seed=seed) for seed in (1, 2)], digits)
    for run in runs:
        times = [run.cpu_seconds[t] for t in (1, 2, 3)]
        assert times == sorted(times)
        assert times[0] > 0
        assert times[2] - times[0] < pause, "two evaluations took twice as long"
    assert run_many([spec(method="dp-fedgd", epsilon=4.0)], digits, at=())[0].cpu_seconds.keys() == {3}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32")  # of PyTorch's compiler
@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedadamw", "auto"])
def test_compiled_passes_and_graphs_train_the_same_network(name, monkeypatch):
    """Only rounding differs. Minibatches have one shape per client, so that graphs are made."""
    made = []
    monkeypatch.setattr(cuda_graphs.CapturedGraph, "__init__", counted(cuda_graphs.CapturedGraph.__init__, made))
    shared = {"data": "digits", "model": "cnn", "batch": "poisson:16", "rounds": 6, "clients": 2, "partition": "iid"}
    plain, fast = (
        run_many([Spec.of({**shared, "method": name, "seed": 1, "compile": on})], load("digits"), device="cuda")[0]
        for on in (False, True)
    )
    assert made
    torch.testing.assert_close(fast.theta, plain.theta, rtol=1e-3, atol=1e-3)


def counted(f, calls):
    def wrapped(*args, **how):
        calls.append(f)
        return f(*args, **how)

    return wrapped
