"""Models are built by name, and a new one needs its own file and one line in the registry."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

from sordino.checks.sums import neighbours
from sordino.core import Adjacency, Shard
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.models import registry
from sordino.models.linear import Linear
from sordino.models.registry import ModelEntry
from sordino.models.torch_model import TorchModel
from sordino.training import run
from sordino.training.batch import run_many
from sordino.training.predict import predict
from sordino.training.spec import Spec, keys
from sordino.training.verify_run import verify_run

RUN = {"model": "toy", "method": "dp-fedgd", "rounds": 2, "clients": 3, "seed": 1, "lr": 0.5}


def toy(features: int, classes: int, *, seed: int = 0, hidden: int = 6) -> TorchModel:
    """The whole of a new model: what its own file would hold."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TorchModel(nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes)))


@pytest.fixture
def registered(monkeypatch):
    """The one line in the registry."""
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))
    registry.register("toy", ModelEntry(toy, "a small network"))


def test_a_new_model_is_trained_certified_verified_and_used(registered, tmp_path):
    out = tmp_path / "run"
    prepared = run.prepare(Spec.of({**RUN, "hidden": 4}))
    assert prepared.model.size == 64 * 4 + 4 + 4 * 10 + 10
    run.start(prepared, out)
    run.finish(prepared, out, list(run.rounds(prepared, out)))
    assert verify_run(out).problems == []
    assert "hidden = 4" in (out / "public" / "spec.toml").read_text()
    np.savez(tmp_path / "x.npz", x=prepared.dataset.x_test[:5])
    assert len(predict(out, str(tmp_path / "x.npz")).labels) == 5
    (trained,) = run_many([Spec.of({**RUN, "hidden": 4})])
    assert trained.theta.shape == (prepared.model.size,)


def test_its_options_are_keys_of_a_run_and_of_no_other_model(registered):
    assert "hidden" in keys("dp-fedgd", "toy")
    with pytest.raises(SordinoError, match=r"hidden: 'wide' must be a whole number"):
        Spec.of({**RUN, "hidden": "wide"})
    with pytest.raises(SordinoError, match=r"hidden: not an option of model softmax\. It is one of toy: set model"):
        Spec.of({**RUN, "model": "softmax", "hidden": 4})


def moved(model, clip):
    """How far one record moves the clipped sum, in units of the claim, under either adjacency."""
    rng = torch.Generator().manual_seed(0)
    shard = Shard(torch.randn(9, 64, generator=rng), torch.arange(9) % 2, torch.ones(9))
    theta = model.init()
    before = model.clipped_sum(theta, shard, clip)
    for adjacency, other in neighbours(shard, 0):
        claim = clip if adjacency is Adjacency.ADD_REMOVE else 2 * clip
        yield float((before - model.clipped_sum(theta, other, clip)).norm()) / claim


class Unclipped(TorchModel):
    """Mutant: forgets to clip."""

    def clipped_sum(self, theta, shard, clip, scale=None):
        return super().clipped_sum(theta, shard, 1e9, scale)


def test_it_holds_the_contracts_of_every_model(registered):
    """One record moves its sum by no more than the claim, and both engines train the same model."""
    prepared = run.prepare(Spec.of({**RUN, "dtype": "float64"}))
    assert max(moved(prepared.model, 0.1)) <= 1
    assert max(moved(Unclipped(prepared.model.module, check=False), 0.1)) > 1
    *_, fast = simulate.run(prepared.plan, prepared.model, prepared.records, prepared.source, shares=True)
    *_, slow = reference.run(prepared.plan, prepared.model, prepared.records, prepared.source)
    torch.testing.assert_close(fast.model, slow.model, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [n for n, e in registry.REGISTRY.items() if e.reads != "text" and "lora" not in n])
def test_every_model_is_built_from_its_shape_alone(name):
    classes = 0 if name in ("squares", "poisson", "hazards") else 2
    options = {"edges": (0.0, 1.0, 2.0)} if name == "hazards" else {}
    model = registry.build(name, 64, classes, **options)
    assert model.features == 64
    assert model.init().shape == (model.size,)


@pytest.mark.parametrize(
    ("name", "features", "classes", "options", "message"),
    [
        ("softmx", 4, 2, {}, "model: 'softmx' is unknown. Did you mean 'softmax'"),
        ("softmax", 4, 2, {"hidden": 3}, "hidden: model softmax has no such option"),
        ("softmax", 4, 2, {"class_weights": (1.0,)}, "class_weights: 1 weights for 2 classes"),
        ("softmax", 4, 0, {}, "softmax does not fit labels that are quantities"),
        ("squares", 4, 3, {}, "squares does not fit labels that are classes"),
        ("poisson", 4, 3, {}, "poisson does not fit labels that are classes"),
        ("hazards", 4, 3, {"edges": (0.0, 1.0)}, "hazards does not fit labels that are classes"),
        ("hazards", 4, 0, {}, "edges: model hazards needs public edges of time; describe the table by a schema"),
        ("hazards", 4, 0, {"edges": (1.0, 2.0)}, "begin with 0 and rise"),
        ("hazards", 4, 0, {"edges": (0.0, 2.0, 2.0)}, "begin with 0 and rise"),
        ("logistic", 4, 3, {}, "logistic is for two classes, but the data have 3"),
        ("mlp", 4, 0, {}, "mlp predicts classes"),
        ("cnn", 5, 3, {}, "rows of 5 numbers are laid out in no known way"),
    ],
)
def test_what_does_not_fit_is_named(name, features, classes, options, message):
    with pytest.raises(SordinoError, match=message):
        registry.build(name, features, classes, **options)


def test_a_name_is_registered_once():
    with pytest.raises(SordinoError, match="'mlp' is registered already"):
        registry.register("mlp", ModelEntry(toy, ""))


def test_the_registry_knows_no_spec_and_auto_follows_the_labels():
    assert "sordino.training" not in inspect.getsource(registry)
    assert isinstance(registry.build("auto", 3, 0), Linear)
    assert registry.build("auto", 3, 0).kind == "squares"
    assert registry.build("auto", 3, 4).kind == "softmax"
