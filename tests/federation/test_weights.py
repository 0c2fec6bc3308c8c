"""Models that begin with a folder of weights: every party has its own copy, bound by the hash of its files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from fixtures import LocalFolders
from test_parity import simulated_rounds

from sordino.cli import main
from sordino.engines import reference, simulate
from sordino.errors import Refused, SordinoError
from sordino.evidence import public
from sordino.federation.config import SiteConfig
from sordino.federation.coordinator import Coordinator
from sordino.federation.derived import derived_numbers
from sordino.federation.policy import check_rules
from sordino.federation.site_data import SiteData
from sordino.federation.terms import Terms, against_terms
from sordino.federation.weights import check_weights, folder_hash
from sordino.operations.doctor import doctor
from sordino.training.artifacts import load_model, weights_sha256
from sordino.training.verify_run import verify_run
from tests.support import language, tiers

LENGTH = 10


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return language.gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def texts(fast, gpt2):
    """Three sites with tables of questions and answers. Each has its own copy of the weights, in another place."""

    def make(trust="secure-aggregation", **keys):
        spec = {"method": "dp-fedgd", "rounds": 2, "epsilon": 8.0, "delta": 1e-5, "trust": trust}
        spec |= {"model": "causal-lora", "length": LENGTH, "lora_rank": 2, **keys}
        made = LocalFolders(Path(fast) / "texts", spec, tiny=True)
        for k, name in enumerate(made.names):
            shutil.copytree(gpt2, made.place(name) / f"weights{k}")
            language.answers(made.place(name) / "answers.csv", 15 + 5 * k)
            made.configure(name, **columns(weights=f"weights{k}"))
        about = made.about | {"features": LENGTH, "classes": [], "weights": str(gpt2)}
        made.about = about
        (made.coordinator / "federation.toml").write_text(tomli_w.dumps(about))
        return made

    return make


def columns(**changes):
    own = {"data": "answers.csv", "text": "answer", "prompt": "question", "length": LENGTH, "classes": []}
    return own | {"models": ["causal-lora"], **changes}


CASES = [
    ("secure-aggregation", 0.0, simulate),
    ("untrusted-server", 0.1, reference),  # this engine draws dropout as the sites do, client by client
]


@pytest.mark.parametrize(("trust", "dropout", "engine"), tiers(CASES, 1))
def test_a_causal_model_of_sites_is_the_simulators(texts, monkeypatch, trust, dropout, engine):
    """Under masks the opened sums are those of `sordino run --integers`, bit for bit."""
    opened, step = [], Coordinator._step

    def kept(self, round_plan, aggregate, theta, state):
        opened.append(aggregate)
        return step(self, round_plan, aggregate, theta, state)

    monkeypatch.setattr(Coordinator, "_step", kept)
    made, masked = texts(trust, lora_dropout=dropout), trust == "secure-aggregation"
    coordinator, transport = made.run()
    rounds = simulated_rounds(made, coordinator, engine)
    if masked:
        assert all(torch.equal(total, there.aggregate) for total, there in zip(opened, rounds, strict=True))
    _, theta, about, _ = load_model(coordinator.out / "model.safetensors", coordinator.config.weights_folder)
    assert theta.abs().max() > 0
    torch.testing.assert_close(theta, rounds[-1].model, rtol=2e-6, atol=2e-6)
    assert about["model"]["weights_sha256"] == coordinator.terms.weights
    for name in made.names:
        check_site(made, name, coordinator.terms.weights, masked)
    sent = b"".join(reply for _, _, reply in transport.log if reply)
    assert not any(word in sent for word in (b"film", b"question", b"answer.csv", b"weights0", b"perplexity"))


def check_site(made, name, weights, masked):
    """Its certificate holds and names the weights; its scores and texts are in no file that may leave."""
    (place,) = (made.place(name) / "runs").iterdir()
    verdict = verify_run(place, made.roster.card(name).sign, against_terms=against_terms)
    assert verdict.problems == []
    assert len(verdict.gaps) == masked, verdict.gaps  # the lengths of answers follow from the weights
    cert = made.certificate(name)
    assert any(weights in fact for fact in cert["assumes"])
    assert set(public.fields(cert)) <= {*public.CERTIFICATE, *public.SECURE, *public.SITE}
    assert "perplexity" in (place / "metrics.jsonl").read_text()  # README.txt says that it stays here
    leaves = [place / file for file in ("certificate.json", "statement.md", "spec.toml", "terms.json")]
    leaves += [place / "model.safetensors", *(place / "adapter").iterdir()]
    told = b"".join(path.read_bytes() for path in leaves)
    assert not any(word in told for word in (b"perplexity", b"film", b"question", str(made.place(name)).encode()))


def test_a_site_with_other_weights_refuses_before_anything_is_charged(texts):
    made = texts("untrusted-server")
    terms = made.terms(weights=folder_hash(made.about["weights"]), weights_folder=made.about["weights"])
    (made.coordinator / "terms.json").write_text(terms.json())
    path = made.place("south") / "weights1" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(SordinoError, match="terms: refused by south"):
        made.run()
    assert "model and tokenizer must be the same files everywhere" in made.events("south")[-1]["detail"]
    assert made.charged("south") == []
    path.write_text(path.read_text()[:-1])
    for changes, why in (
        ({"weights": "weights9"}, "there is no folder"),
        ({"text": None, "prompt": None, "data": "data.npz"}, "learns the text of a table, and site.toml names no"),
    ):
        own = {"weights": "weights1", **changes}
        made.configure("south", **{key: value for key, value in columns(**own).items() if value is not None})
        config = made.site_config("south")
        terms = Terms.read((made.coordinator / "terms.json").read_text(), config.weights_folder)
        with pytest.raises(Refused, match=why):
            check_rules(SiteData(config), terms)


def test_a_site_refuses_to_go_on_with_other_weights(texts, talk):
    made = texts("untrusted-server")
    terms = made.terms(weights=folder_hash(made.about["weights"]), weights_folder=made.about["weights"])
    begun = talk(made.site("south"), terms)
    assert begun.propose().kind == "agreed"
    path = made.place("south") / "weights1" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert begun.round(0).fields["code"] == "policy"
    assert talk(made.site("south"), terms).propose().fields["code"] == "changed"  # as after a restart
    assert made.charged("south") == []


def test_terms_bind_the_weights_and_never_tell_where_they_are(texts, gpt2):
    made = texts("untrusted-server")
    stated = made.terms(weights=folder_hash(str(gpt2)), weights_folder=str(gpt2))
    assert str(gpt2) not in stated.json()
    assert Terms.read(stated.json(), "elsewhere") == stated
    assert stated.weights == weights_sha256(gpt2) == folder_hash(str(made.place("west") / "weights2"))
    with pytest.raises(SordinoError, match="is unknown to sordino"):
        Terms.read(json.dumps(json.loads(stated.json()) | {"weights_folder": "/tmp"}))
    for changes, why in (
        ({"weights": "", "weights_folder": ""}, "model: causal-lora is whatever model a folder of weights holds"),
        ({"features": 9}, "length: 10 in the spec, and features = 9"),
        ({"weights_folder": ""}, "and none is named here"),
        ({"evaluation": 1.0, "tests": (2, 2, 2)}, "evaluation_epsilon: the model learns text without labels"),
    ):
        with pytest.raises(SordinoError, match=why):
            derived_numbers(replace(stated, **changes)) if "evaluation" in changes else replace(stated, **changes).model
    with pytest.raises(SordinoError, match="weights: model softmax begins with none"):
        _ = replace(stated, spec=stated.spec.replace("causal-lora", "softmax").split("lora_")[0]).resolved
    with pytest.raises(SordinoError, match="the terms state no weights; remove the key"):
        check_weights("", str(gpt2))
    with pytest.raises(SordinoError, match="weights is not a SHA-256 hash"):
        Terms.read(json.dumps(json.loads(stated.json()) | {"weights": "Z" * 64}))


def test_keys_and_doctor_know_the_columns_and_the_weights(tmp_path, gpt2, capsys):
    words = ["--data", language.answers(tmp_path / "answers.csv"), "--text", "answer", "--prompt", "question"]
    assert main(["federate", "keys", "north", str(tmp_path / "n"), *words, "--weights", str(gpt2)]) == 0
    config = SiteConfig.read(tmp_path / "n" / "site.toml")
    assert (config.text, config.prompt, config.models) == ("answer", "question", ("causal-lora",))
    assert config.weights_folder == str(gpt2)
    with pytest.raises(SordinoError, match="weights: without classes the text itself is learned"):
        replace(config, weights=None)
    with pytest.raises(SordinoError, match="prompt: it comes before a text that is learned"):
        replace(config, classes=("0", "1"))
    told = {check.about: check.says for check in doctor(tmp_path / "n" / "site.toml")}
    assert told["weights"].replace(" ", "") == f"hash{folder_hash(str(gpt2))}"


@pytest.mark.soak  # a second kind of model
def test_labels_of_texts_are_learned_from_a_folder_of_weights(fast, tmp_path):
    weights = language.roberta(tmp_path)
    spec = {"method": "dp-fedgd", "rounds": 2, "epsilon": 8.0, "delta": 1e-5, "trust": "secure-aggregation"}
    spec |= {"model": "sequence-lora", "length": LENGTH, "lora_rank": 2, "lora_dropout": 0.0}
    made = LocalFolders(Path(fast) / "labels", spec, tiny=True)
    about = {"text": "body", "label": "stars", "classes": ["1", "5"], "weights": str(weights)}
    for name in made.names:
        language.reviews(made.place(name) / "reviews.csv", 20)
        made.configure(name, **about, data="reviews.csv", length=LENGTH, models=["sequence-lora"])
    made.about |= {"features": LENGTH, "classes": ["1", "5"], "weights": str(weights)}
    (made.coordinator / "federation.toml").write_text(tomli_w.dumps(made.about))
    coordinator, _ = made.run()
    _, theta, *_ = load_model(coordinator.out / "model.safetensors", weights)
    torch.testing.assert_close(theta, simulated_rounds(made, coordinator, simulate)[-1].model, rtol=2e-6, atol=2e-6)


def test_one_row_with_an_id_beyond_the_vocabulary_does_not_silence_a_site(fast, tmp_path):
    """A site whose sum fails sends noise alone: one such record took all others out of the update."""
    weights = language.roberta(tmp_path)
    spec = {"method": "dp-fedgd", "rounds": 1, "epsilon": 8.0, "delta": 1e-5, "trust": "untrusted-server"}
    spec |= {"model": "sequence-lora", "length": LENGTH, "lora_rank": 2, "lora_dropout": 0.0, "normalize": "none"}
    made = LocalFolders(Path(fast) / "ids", spec, tiny=True)
    made.about |= {"features": LENGTH, "classes": ["1", "5"], "weights": str(weights)}
    (made.coordinator / "federation.toml").write_text(tomli_w.dumps(made.about))
    for name in made.names:
        made.configure(name, classes=["1", "5"], weights=str(weights), models=["sequence-lora"])
        ids = np.random.default_rng(0).integers(5, 12, (20, LENGTH)).astype(np.float32)
        ids[::3, 2] = 1e6 if name == "north" else 5
        np.savez(made.place(name) / "data.npz", x=ids, y=np.arange(20) % 2 * 4 + 1)
    made.run()
    assert [event["what"] for event in made.events("north")] == ["agreed", "finished"]
