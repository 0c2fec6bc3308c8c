"""Simulated estimates: the designs, agreement with predictions, orders that must hold, failures that must show."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sordino.cli import main
from sordino.core import Privacy
from sordino.data.partition import SIZE_LAWS
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.privacy import spending
from sordino.privacy.mechanisms.random import Address
from sordino.privacy.plan import Plan
from sordino.studies import estimation, estimation_report, theory
from sordino.studies.estimation import DesignPoint, cells, simulate_cell, sizes

MNIST = Path(__file__).parents[3] / "shared" / "data"


def se(sample):
    return sample.std(ddof=1) / math.sqrt(len(sample))


def call(capsys, *words):
    status = main(["estimate", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def small(monkeypatch):
    """Designs of a few hundred records."""
    monkeypatch.setattr(estimation, "CLIENTS", (4, 6))
    monkeypatch.setattr(estimation, "MEAN", 60)


# ------------------------------------------------------------------------------------------------------- designs


def test_sizes_follow_their_laws():
    assert sizes("equal", 20) == (400,) * 20
    uniform, lognormal = np.array(sizes("uniform", 500)), np.array(sizes("lognormal", 500))
    assert uniform.min() >= 200
    assert uniform.max() <= 600
    assert abs(uniform.mean() - 400) < 4 * 116 / math.sqrt(500)
    assert lognormal.mean() == pytest.approx(400, rel=0.01)
    assert lognormal.min() >= 50
    assert np.log(lognormal).std() == pytest.approx(0.5, rel=0.15)
    for law in SIZE_LAWS:
        assert sizes(law, 40) == sizes(law, 40)
        for m in estimation.SPLITS:
            assert (len(sizes(law, m, 20_000)), sum(sizes(law, m, 20_000))) == (m, 20_000)


def test_designs_hold_the_points_they_should():
    assert [c.clients for c in cells("lognormal", ["poisson"], [1.0])] == [20, 30, 40, 50, 60]
    assert {(c.clients, sum(c.sizes)) for c in cells("fixed-total", ["logistic"], [3.0])} == {
        (m, 20_000) for m in (10, 20, 50, 100, 200)
    }
    assert len(cells("iterations", ["logistic", "poisson"], estimation.MUS)) == 6 * len(estimation.STEPS)
    with pytest.raises(SordinoError, match="Did you mean 'uniform'"):
        cells("unifrom", ["logistic"], [1.0])


def test_every_method_keeps_its_promise():
    for method, rounds in estimation.contestants(estimation.setup("logistic"), 20).values():
        plan = Plan(method, rounds, (100, 400), estimation.promise(0.7))
        assert plan.proved
        assert spending.mu(plan) == pytest.approx(0.7, rel=1e-9)


def test_rows_are_a_function_of_addresses():
    one, two = estimation.NormalRows(7, 4), estimation.NormalRows(7, 4)
    at = [Address(i, t, q, k) for i in range(4) for t in range(2) for q in range(2) for k in range(2)]
    first = {a: one.normal(a, (3,)) for a in at}
    for a in reversed(at):
        assert (two.normal(a, (3,)) == first[a]).all()
    assert len({tuple(v) for v in first.values()}) == len(at)
    big = np.concatenate(
        [estimation.NormalRows(s, 50).normal(Address(i, 0, 0), (20,)) for s in range(4) for i in range(50)]
    )
    assert abs(big.mean()) < 4 / math.sqrt(big.size)
    assert abs(big.var() - 1) < 4 * math.sqrt(2 / big.size)


def test_chunks_change_nothing(monkeypatch, small):
    cell = DesignPoint("poisson", "lognormal", 6, 2.0, iterations=4)
    whole = simulate_cell(cell, 5)
    monkeypatch.setattr(estimation, "AT_ONCE", 2 * sum(cell.sizes))
    parts = simulate_cell(cell, 5)
    for name in whole:
        assert np.allclose(whole[name], parts[name], rtol=1e-4), name
    assert np.unique(whole["fedsgd"]).size == 5


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_the_pooled_estimate_is_the_root_of_the_score(kind):
    records = estimation.worlds(kind, (500, 700), range(3), seed=1)
    theta = estimation.pooled(kind, records)
    z = torch.einsum("rnd,rd->rn", records.x, theta)
    mean = z.sigmoid() if kind == "logistic" else z.exp()
    score = torch.einsum("rnd,rn->rd", records.x, mean - records.y) / 1200
    assert score.abs().max() < 1e-5
    assert (theta - estimation.setup(kind).truth).norm(dim=-1).max() < 0.4


# ----------------------------------------------------------------------------------- measured beside what is predicted


@pytest.mark.soak
@pytest.mark.parametrize("law", ["equal", "lognormal"])
def test_errors_are_as_predicted_where_predictions_hold(law):
    cell = DesignPoint("logistic", law, 20, 3.0, iterations=40)
    found, known = simulate_cell(cell, 60), cell.predicted()
    for name, terms in known.items():
        allowed = 4 * se(found[name]) + 0.1 * terms.total  # 4 SE, and a tenth for what the expansion leaves out
        assert abs(found[name].mean() - terms.total) < allowed, name
    world = cell.case.world
    fisher = float(world.times @ (1 / world.fisher)) / sum(cell.sizes)
    assert abs(found["pooled"].mean() - fisher) < 4 * se(found["pooled"])
    noiseless = DesignPoint("logistic", law, 20, 9.0, iterations=40).predicted()["fedsgd"].total
    assert abs(found["fedsgd"].mean() - noiseless) > 4 * se(found["fedsgd"])


@pytest.mark.soak  # long statistics
def test_more_steps_help_and_then_hurt():
    """With noise the error has a least; without, every step helps."""
    found = [
        simulate_cell(DesignPoint("logistic", "equal", 20, 1.0, iterations=k), 40, methods=["fedsgd"])
        for k in (2, 6, 80)
    ]
    few, some, many = (f["fedsgd"] for f in found)
    assert few.mean() - some.mean() > 4 * math.hypot(se(few), se(some))
    assert many.mean() - some.mean() > 4 * math.hypot(se(many), se(some))
    at, records = estimation.setup("logistic"), estimation.worlds("logistic", (400,) * 20, range(4), 0)
    ends = []
    for k in (2, 6, 20, 80):
        method, rounds = estimation.contestants(at, k)["fedsgd"]
        plan = Plan(method, rounds, (400,) * 20, Privacy(math.inf))
        ends.append(estimation.estimates(plan, at.model, records, [(r,) for r in range(4)]))
    left = [(end - ends[-1]).square().sum(-1).mean().item() for end in ends]
    assert left[0] > left[1] > left[2] > left[3] == 0
    case = DesignPoint("logistic", "equal", 20, 1.0).case
    curve = [theory.fedsgd(case, k).total for k in (1, 2, 4, 8, 16, 64, 256)]
    assert min(curve) not in (curve[0], curve[-1])


def bias_squared(clients, repetitions=24, total=20_000):
    """Of FedAvg without noise: |mean error|^2, less what the mean of so many repetitions has by chance."""
    at, n = estimation.setup("logistic"), (total // clients,) * clients
    records = estimation.worlds("logistic", n, range(repetitions), 0)
    plan = Plan(build("fedavg-gdp", clip=at.clip, local_lr=at.lr, steps=40), 1, n, Privacy(math.inf))
    errors = estimation.estimates(plan, at.model, records, [(r,) for r in range(repetitions)]).double() - at.truth
    return float(errors.mean(0).square().sum() - errors.var(0).sum() / repetitions)


@pytest.mark.soak
def test_the_bias_of_fedavg_grows_with_the_square_of_the_clients():
    m = np.array([100, 200, 400])
    bias = [bias_squared(int(clients)) for clients in m]
    slope = np.polyfit(np.log(m), np.log(bias), 1)[0]
    assert 1.6 < slope < 2.6
    world = theory.population(estimation.setup("logistic").model, 1.0)
    case = theory.Scenario((200,) * 100, math.inf, world, 3.0, 2.25, 3.0)
    assert theory.fedavg(case, 40, 1).bias == pytest.approx(bias[0], rel=0.5)
    assert theory.fedsgd(case, 40).bias < 1e-4 * bias[0]


@pytest.mark.soak  # long statistics
@pytest.mark.parametrize(
    ("cell", "repetitions"),
    [
        (DesignPoint("logistic", "equal", 200, 3.0, 20_000), 12),
        (DesignPoint("poisson", "equal", 20, 1.0), 20),
    ],
    ids=["many small clients", "a large bound on the Hessian"],
)
def test_fednewton_fails_where_it_is_said_to(cell, repetitions):
    found = simulate_cell(cell, repetitions, methods=["fedsgd", "fednewton"])
    newton, sgd = found["fednewton"], found["fedsgd"]
    assert newton.mean() - sgd.mean() > 4 * math.hypot(se(newton), se(sgd))
    assert not theory.safe(cell.case)


@pytest.mark.soak
def test_fednewton_wins_where_it_is_safe():
    cell = DesignPoint("logistic", "equal", 20, 3.0)
    found = simulate_cell(cell, 30, methods=["fedsgd", "fednewton"])
    newton, sgd = found["fednewton"], found["fedsgd"]
    assert sgd.mean() - newton.mean() > 4 * math.hypot(se(newton), se(sgd))
    assert theory.safe(cell.case)


# --------------------------------------------------------------------------------------------------- the command line


@pytest.mark.draws
def test_the_command_prints_a_table_and_writes_what_it_says(capsys, tmp_path, small):
    out = tmp_path / "made" / "here"
    status, text, err = call(capsys, "--repetitions", "2", "--mu", "0.5,3", "--out", str(out))
    assert status == 0
    assert all(label in text for label in estimation.LABELS.values())
    assert "it is not a certificate" in text
    assert "6 clients" in err
    document = json.loads((out / "estimation.json").read_text())
    assert [(p["mu"], p["clients"]) for p in document["points"]] == [(0.5, 4), (0.5, 6), (3.0, 4), (3.0, 6)]
    for point in document["points"]:
        assert point["methods"].keys() == {*estimation.LABELS, "pooled"}
        assert (point["rate_with_log"] is None) == (point["mu"] >= 1)
        parts = point["predicted"]["fedsgd"]
        assert sum(parts[k] for k in theory.ErrorTerms._fields) == pytest.approx(parts["total"], rel=1e-2)
    page = (out / "estimation.md").read_text()
    assert "a rate, not a certificate" in page
    assert "Gap" in page
    assert (out / "estimation.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_all_there_is_on_stdout(capsys, small):
    words = ("--design", "uniform", "--model", "poisson", "--repetitions", "2", "--seed", "3", "--json")
    status, text, _ = call(capsys, *words)
    first = json.loads(text)
    assert (status, first["samples"], len(first["points"])) == (0, 2, 2)
    _, text, _ = call(capsys, *words)
    assert json.loads(text)["points"] == first["points"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--design", "equl"], "Did you mean 'equal'"),
        (["--model", "probit"], "model"),
        (["--mu", "x"], "--mu"),
        (["--mu", "0"], "--mu"),
        (["--repetitions", "1"], "--repetitions"),
        (["--seed", "-1"], "--seed"),
        (["--device", "tpu"], "--device"),
        (["--design", "fixed-total", "--sizes", "odd"], "sizes"),
        (["--design", "mnist-binary"], "--data"),
        (["--design", "mnist-binary", "--data", "/nowhere"], "data"),
        (["--json", "x.txt"], "--json"),
    ],
)
def test_mistakes_get_one_line(capsys, words, says):
    status, out, err = call(capsys, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_numbers_are_short():
    assert [estimation_report.short(v) for v in (0.0123456, 12.3456, 1234.5, 0, None, math.nan, 1e-9)] == [
        *("0.0123", "12.3", "1234", "0", "–", "–", "1.00e-09")
    ]


# ---------------------------------------------------------------------------------------------------------- MNIST


def fake_mnist(folder, records=200):
    import gzip

    rng = np.random.default_rng(0)
    for part in ("train", "t10k"):
        labels = rng.integers(0, 10, records).astype(np.uint8)
        images = (rng.integers(0, 50, (records, 28, 28)) + 20 * labels[:, None, None] * (np.arange(28) > 14)).clip(
            0, 255
        )
        for name, header, data in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            path = folder / f"mnist-{part}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(bytes(header) + data.astype(np.uint8).tobytes()))


def test_mnist_files_are_read_and_learnt(tmp_path, capsys, monkeypatch):
    fake_mnist(tmp_path)
    data = estimation.mnist(tmp_path, binary=True)
    assert data.x_train.shape == (200, 49)
    assert torch.allclose(data.x_train.norm(dim=1), torch.ones(200), atol=1e-5)
    assert torch.allclose(data.x_train.mean(1), torch.zeros(200), atol=1e-6)
    assert set(data.y_train.tolist()) == {0, 1}
    for binary, least in ((True, 0.0), (False, 0.12)):
        data = estimation.mnist(tmp_path, binary=binary)
        options = {"binary": binary, "clients": 4, "repetitions": 2, "iterations": 4}
        found = estimation.mnist_accuracies(data, 50.0, **options)
        assert found.keys() == estimation.LABELS.keys()
        assert found["fedsgd"].shape == (2,)
        assert found["fedsgd"].mean() > least
    pixels = estimation.mnist(tmp_path, binary=True, pool=1)
    assert pixels.x_train.shape == (200, 784)
    some = estimation.mnist_accuracies(pixels, 50.0, binary=True, clients=4, repetitions=2, methods=("fedsgd",))
    assert some.keys() == {"fedsgd"}
    table = estimation_report.mnist_table([estimation.mnist_point(50.0, some)], 0.9)
    assert table.count("not run") == 3
    quick = estimation.mnist_accuracies.__kwdefaults__ | {"clients": 4, "iterations": 2}
    monkeypatch.setattr(estimation.mnist_accuracies, "__kwdefaults__", quick)
    words = ("--design", "mnist-binary", "--data", str(tmp_path), "--repetitions", "2", "--out", str(tmp_path / "out"))
    status, text, _ = call(capsys, *words)
    assert status == 0
    assert "without privacy" in text
    assert "norm" in estimation.mnist.__doc__
    assert (tmp_path / "out" / "estimation.png").exists()


@pytest.mark.parametrize("binary", [True, False])
def test_bounds_hold_for_every_record_of_mnist(binary, tmp_path):
    """So that clipping changes nothing: the constants are those of records with norm 1."""
    fake_mnist(tmp_path, 60)
    at, data = estimation.mnist_setup(binary=binary), estimation.mnist(tmp_path, binary=binary)
    theta = torch.randn(at.model.size, generator=torch.Generator().manual_seed(0))
    records = estimation.Records(data.x_train, data.y_train, np.arange(61))
    for i in range(60):
        shard = records.shard(i)
        assert at.model.clipped_sum(theta, shard, math.inf).norm() <= at.clip * (1 + 1e-5)
        assert at.model.curvature_sum(theta, shard, math.inf).norm() <= at.curvature_clip * (1 + 1e-5)


def test_the_four_methods_learn_mnist():
    if not (MNIST / "mnist-train-images-idx3-ubyte.gz").is_file():
        pytest.skip("MNIST's files are not beside this repository (../shared/data)")
    data = estimation.mnist(MNIST, binary=True)
    part = estimation.Digits(data.x_train[:8000], data.y_train[:8000], data.x_test, data.y_test)
    found = estimation.mnist_accuracies(part, 3.0, binary=True, clients=10, repetitions=2, iterations=20)
    for name, accuracies in found.items():
        assert accuracies.mean() > 0.7, name
