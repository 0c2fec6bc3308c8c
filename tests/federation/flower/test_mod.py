"""The mod for existing Flower apps: what leaves is clipped, noised and paid for, and nothing else leaves."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict

from sordino.cli import main
from sordino.errors import SordinoError
from sordino.evidence.ledger import Ledger
from sordino.federation.flower.mod import REFUSED, PrivateUpdates
from sordino.operations.status import of_site
from sordino.privacy import calibration

SHAPES = {"weight": (4, 3), "bias": (3,)}
CLIP, EPSILON, ROUNDS = 0.5, 8.0, 3


@pytest.fixture
def site(tmp_path, monkeypatch):
    lines = ['name = "north"', 'data = "none.csv"', f"epsilon = {EPSILON}", "delta = 1e-5", 'unit = "client"']
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "site.toml").write_text("\n".join([*lines, 'witness = "../witness.json"']) + "\n")
    monkeypatch.setenv("SORDINO_SITE", str(folder))
    return folder


def model(value=0.0):
    return ArrayRecord([np.full(shape, value, np.float32) for shape in SHAPES.values()])


def asked(kind="train", arrays=None):
    about = {
        "run_id": 7,
        "message_id": "m",
        "src_node_id": 1,
        "dst_node_id": 2,
        "reply_to_message_id": "",
        "group_id": "",
    }
    metadata = Metadata(**about, created_at=1.0, ttl=1e9, message_type=kind)
    content = RecordDict({"arrays": model() if arrays is None else arrays, "config": ConfigRecord({"lr": 0.1})})
    return Message(metadata=metadata, content=content)


CONTEXT = Context(run_id=7, node_id=2, node_config={}, state=RecordDict(), run_config={})


def app(value=100.0, seen=None):
    """Returns a model far away, with scores that nobody should see."""

    def train(message, context):
        if seen is not None:
            seen.append(message)
        scores = MetricRecord({"num-examples": 123, "train_loss": 0.7})
        return Message(RecordDict({"arrays": model(value), "metrics": scores}), reply_to=message)

    return train


def vector(message):
    return np.concatenate([array.reshape(-1) for array in message.content["arrays"].to_numpy_ndarrays()])


def mod(**changes):
    return PrivateUpdates(**{"clip": CLIP, "epsilon": EPSILON, "rounds": ROUNDS, **changes})


def test_the_noise_is_that_of_the_plan_and_the_update_is_clipped(site, monkeypatch):
    made = mod()
    std = float(calibration.query_noises(made.plan)[0].std[0])
    drawn = []
    monkeypatch.setattr(
        "sordino.federation.flower.mod.noised",
        lambda total, draw, std, secret: drawn.append((total, std, secret)) or total,
    )
    reply = made(asked(), CONTEXT, app())
    ((total, used, secret),) = drawn
    assert secret
    assert used == pytest.approx(std)
    assert 0.99 * CLIP < total.norm() <= CLIP
    assert np.allclose(vector(reply), total.numpy(), atol=1e-6)


def test_every_round_is_paid_for_and_the_certificate_is_what_verify_says(site, capsys):
    made = mod()
    first = vector(made(asked(), CONTEXT, app()))
    assert np.abs(first).max() > 1e-3  # noise
    assert not np.allclose(first, vector(made(asked(), CONTEXT, app())))
    made(asked(), CONTEXT, app())
    path = site / "runs" / "flower-7" / "certificate.json"
    cert = json.loads(path.read_text())
    assert cert["certified"]
    assert cert["epsilon"] == pytest.approx(EPSILON, rel=1e-6)
    assert cert["unit"] == "client"
    assert main(["verify", str(path)]) == 0, capsys.readouterr()
    status = of_site(site)
    assert status.answered == 3
    assert status.epsilon == pytest.approx(EPSILON, rel=1e-6)
    over = made(asked(), CONTEXT, app())
    assert over.error.reason == REFUSED
    assert of_site(site).answered == 3


def test_no_metric_and_no_number_of_examples_leaves(site):
    made, seen = mod(), []
    reply = made(asked(), CONTEXT, app())
    assert dict(reply.content["metrics"]) == {"num-examples": 1}
    assert set(reply.content) == {"arrays", "metrics"}
    evaluated = made(asked("evaluate"), CONTEXT, app(seen=seen))
    assert dict(evaluated.content["metrics"]) == {"num-examples": 1}
    assert made(asked("query"), CONTEXT, app(seen=seen)).has_error()
    assert seen == []  # the records are not touched


def test_that_the_app_failed_is_hidden_by_noise_and_paid_for(site):
    def fails(message, context):
        raise RuntimeError("patient 17 has no weight")

    def leaves(message, context):
        raise SystemExit(3)

    def other(message, context):
        return Message(RecordDict({"arrays": ArrayRecord([np.zeros(2, np.float32)])}), reply_to=message)

    made = mod(rounds=4)
    for wrong in (fails, leaves, other, app(value=float("nan"))):
        reply = made(asked(), CONTEXT, wrong)
        assert not reply.has_error()
        assert np.isfinite(vector(reply)).all()
        assert np.abs(vector(reply)).max() > 0  # noise alone
    assert of_site(site).answered == 4


def test_a_run_keeps_its_settings(site):
    mod()(asked(), CONTEXT, app())
    seen = []
    for change in ({"clip": 2 * CLIP}, {"epsilon": 7.0}, {"rounds": 2}):
        assert mod(**change)(asked(), CONTEXT, app(seen=seen)).error.reason == REFUSED
    assert seen == []
    assert of_site(site).answered == 1
    assert not mod()(asked(), CONTEXT, app()).has_error()


def test_the_budget_of_the_site_decides(site):
    seen = []
    assert mod(epsilon=9.0)(asked(), CONTEXT, app(seen=seen)).error.reason == REFUSED
    other = mod(rounds=2)
    other(asked(), CONTEXT, app())
    elsewhere = asked()
    elsewhere.metadata.__dict__["_run_id"] = 8
    assert mod()(elsewhere, CONTEXT, app(seen=seen)).has_error()  # another run no longer fits
    assert seen == []
    with Ledger(site / "ledger.db") as ledger:
        assert ledger.audit() == []


@pytest.mark.parametrize("line", ["ask = true", "reserve_epsilon = 1.0"])
def test_what_only_a_person_may_allow_is_not_spent(site, line):
    path, seen = site / "site.toml", []
    path.write_text(f"{path.read_text()}{line}\n")
    assert mod()(asked(), CONTEXT, app(seen=seen)).error.reason == REFUSED
    assert seen == []
    if line != "ask = true":
        assert not mod(epsilon=EPSILON - 1)(asked(), CONTEXT, app()).has_error()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ('unit = "client"', "unit"),
        ('name = "north"', "name"),
    ],
)
def test_a_site_that_is_not_set_up_takes_no_part(site, change, what):
    text = (site / "site.toml").read_text()
    (site / "site.toml").write_text(text.replace(change + "\n", ""))
    seen = []
    assert mod()(asked(), CONTEXT, app(seen=seen)).error.reason == REFUSED
    assert seen == []


def test_wrong_arguments_are_refused(monkeypatch):
    for wrong in ({"clip": 0.0}, {"clip": float("inf")}, {"rounds": 0}):
        with pytest.raises(SordinoError):
            mod(**wrong)
    monkeypatch.delenv("SORDINO_SITE", raising=False)
    assert mod()(asked(), CONTEXT, app()).error.reason == REFUSED


def test_a_strategy_of_flower_adds_up_what_the_mod_sends(site):
    """FedAvg as it comes: it weighs by num-examples, which are all 1, and averages scores, of which there are none."""
    strategies = pytest.importorskip("flwr.serverapp.strategy")
    made, strategy = mod(), strategies.FedAvg()
    replies = [made(asked(), CONTEXT, app(value)) for value in (1.0, 3.0)]
    arrays, metrics = strategy.aggregate_train(1, replies)
    want = np.mean([vector(reply) for reply in replies], axis=0)
    assert np.allclose(np.concatenate([a.reshape(-1) for a in arrays.to_numpy_ndarrays()]), want, atol=1e-6)
    assert dict(metrics) == {}
    assert dict(strategy.aggregate_evaluate(1, [made(asked("evaluate"), CONTEXT, app())])) == {}
