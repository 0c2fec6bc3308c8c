"""Causal language models from the command line: tables of text, prompts, perplexity, and what a model writes."""

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from sordino.cli import main
from sordino.errors import SordinoError
from sordino.evidence import public
from sordino.federation.terms import federated
from sordino.models import causal
from sordino.models.lora import module_of
from sordino.training import language, private_evaluation, run
from sordino.training.artifacts import weights_sha256
from sordino.training.predict import load_run
from sordino.training.spec import Spec
from tests.support import language as tiny

LENGTH = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return tiny.answers(tmp_path_factory.mktemp("table") / "answers.csv")


def words(folder, table, *more):
    return [
        *("--data", table, "--text", "answer", "--model", "causal-lora", "--method", "dp-fedgd", "--rounds", "2"),
        *("--set", f"weights={folder}", "--set", f"length={LENGTH}", "--set", "lora_rank=2", *more),
    ]


@pytest.fixture(scope="module")
def done(folder, table, tmp_path_factory):
    """A certified run with prompts over three clinics: (directory, what it printed)."""
    out = tmp_path_factory.mktemp("runs") / "answers"
    more = ("--prompt", "question", "--partition", "by-column:clinic", "--out", str(out))
    assert main(["run", *words(folder, table, *more)]) == 0
    return out


def spec(folder, table, **changes):
    values = {"data": table, "text": "answer", "model": "causal-lora", "method": "dp-fedgd", "rounds": 1}
    values |= {"weights": str(folder), "length": LENGTH, "lora_rank": 2, "clients": 2, **changes}
    return Spec.of({key: value for key, value in values.items() if value is not None})


def test_a_run_over_clients_is_certified_and_scored_by_perplexity(done, folder, table):
    cert = json.loads((done / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert cert["client_names"] == ["0", "1", "2"]
    assert public.unlisted(done / "public") == []
    assert main(["verify", str(done)]) == 0
    prepared = run.prepare(spec(folder, table, prompt="question", partition="by-column:clinic", clients=None))
    last = json.loads((done / "public" / "metrics.jsonl").read_text().splitlines()[-1])
    trained = load_run(done)
    want = causal.perplexity(trained.model, trained.theta, prepared.dataset.x_test)
    assert last["perplexity"] == pytest.approx(want, rel=1e-6)
    assert (prepared.dataset.x_train[:, 0] < 0).all(), "rows begin with a prompt"
    card = (done / "public" / "MODEL_CARD.md").read_text()
    assert "the next token of a text" in card
    assert f"- Base: the weights `{Path(folder).name}`, whose files have the SHA-256 `{weights_sha256(folder)}`" in card


def test_one_query_of_the_plan_is_one_clipped_gradient_per_record(folder, table):
    prepared = run.prepare(spec(folder, table, prompt="question", clip=0.5))
    ((query,),) = (stage.queries for stage in prepared.plan.stages)
    assert (query.kind, query.clip) == ("gradient", 0.5)
    assert prepared.records.sizes == (16, 16)
    assert prepared.plan.proved


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_adapter_loads_into_the_class_of_the_folder(done, folder):
    peft = pytest.importorskip("peft", reason="pip install sordino[transformers]")
    from transformers import GPT2LMHeadModel

    trained = load_run(done)
    rows = torch.from_numpy(trained.encode(["it was good", "the film was bad"]))
    config = json.loads((done / "public" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == Path(folder).name
    for file in (done / "public").rglob("*"):
        assert not file.is_file() or str(Path(folder).parent).encode() not in file.read_bytes()
    theirs = peft.PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(folder), done / "public" / "adapter").eval()
    ours = functional_call(
        module_of(trained.model).eval(), trained.model.split(trained.theta), (rows,), {"tokens": True}
    )
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows.long()).logits, ours, rtol=1e-4, atol=1e-5)


def test_predict_writes_after_a_prompt_a_line_and_a_column(done, table, folder, tmp_path, capsys):
    trained = load_run(done)
    prompt = "the film was very good"
    how = {"most": 4, "temperature": 1.0, "seed": 3}
    want = language.write(trained.model, trained.theta, folder, [f"{prompt}\n"], **how)
    assert trained.generate([prompt], **how) == want
    flags = ["--most", "4", "--temperature", "1", "--seed", "3"]
    assert main(["predict", str(done), "--prompt", prompt, *flags]) == 0
    assert list(csv.DictReader(io.StringIO(capsys.readouterr().out))) == [{"row": "0", "prediction": want[0]}]
    (tmp_path / "lines.txt").write_text(prompt)
    assert main(["predict", str(done), str(tmp_path / "lines.txt"), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"predictions": want}
    assert len(trained.predict(table)) == 40
    with pytest.raises(SordinoError, match="prompts: a dict; give a list of texts"):
        trained.generate({"question": ["one"]})
    with pytest.raises(SordinoError, match="predict_proba: the model writes text"):
        trained.predict_proba(table)


def test_the_folder_of_weights_is_private_and_named_again_where_only_public_files_are(done, folder, tmp_path, capsys):
    assert run.reopen(done).model_options["weights"] == str(folder)
    assert main(["run", "--resume", str(done)]) == 0
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(done / "public", copy)
    with pytest.raises(SordinoError, match=f"weights: the model was trained from '{folder.name}', whose folder is not"):
        load_run(copy)
    want = load_run(done).generate(["the film"], most=3)
    assert load_run(copy, weights=folder).generate(["the film"], most=3) == want
    capsys.readouterr()
    assert main(["predict", str(copy), "--prompt", "the film", "--most", "3", "--weights", str(folder)]) == 0
    assert want[0] in capsys.readouterr().out
    shutil.copytree(folder, other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    with pytest.raises(SordinoError, match="weights: the model was trained from other files than those of"):
        load_run(copy, weights=other)
    with pytest.raises(SordinoError, match="weights: there is no"):
        load_run(done, weights=tmp_path / "none")


def test_new_tables_are_encoded_as_those_of_training(done, folder, table):
    prepared = run.prepare(spec(folder, table, prompt="question"))
    rows = load_run(done).encode(table)
    assert rows.shape == (40, LENGTH)
    assert {tuple(row) for row in prepared.dataset.x_train} <= {tuple(row) for row in rows}


def test_without_prompts_all_tokens_count_and_open_data_are_divided_at_random(folder, table):
    prepared = run.prepare(spec(folder, table, public_data=True))
    assert prepared.resolved.partition.law == "iid"
    assert (prepared.dataset.x_train >= 0).all()
    assert prepared.dataset.task == "sequence"
    assert prepared.heterogeneity is None
    assert not prepared.dataset.y_train.any()


def test_training_lowers_the_perplexity_that_is_told(folder, table, tmp_path, capsys):
    out = str(tmp_path / "out")
    more = (
        "--method",
        "dp-fedadam",
        "--rounds",
        "20",
        "--epsilon",
        "inf",
        "--set",
        "lr=0.03",
        "--set",
        "lora_dropout=0",
    )
    assert main(["run", *words(folder, table, *more, "--prompt", "question", "--out", out, "--json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metrics"]["perplexity"] < 0.95 * document["metrics"]["perplexity_before"]
    assert document["beats_guessing"] is True
    assert document["perplexity"]["20"] == pytest.approx(document["metrics"]["perplexity"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": None}, "text: causal-lora learns the text of a table; name its column"),
        ({"label": "clinic"}, "label: 'clinic', but the text itself is learned"),
        ({"prompt": "questoin"}, "prompt: '.*' has no column 'questoin'. Did you mean 'question'"),
        ({"prompt": "id"}, "prompt: column 'id' of '.*' holds numbers"),
        ({"prompt": "answer"}, "prompt: 'answer' is the text column already"),
        ({"partition": "dirichlet", "public_data": True}, "partition: dirichlet divides records by their labels"),
        ({"weights": None}, "weights: causal-lora is whatever causal language model a folder holds"),
        ({"weights": "/nowhere"}, "weights: '/nowhere' is not a folder"),
        ({"length": 100}, "length: 100 must lie between 2 and 32"),
        ({"length": 2}, "length: 2 leaves no room"),
        (
            {"method": "auto", "normalize": "record"},
            "method: auto scales numbers, and the features are token ids",
        ),
        ({"model": "sequence-lora", "prompt": "question"}, "prompt: model sequence-lora learns labels"),
        ({"data": "sst2", "text": None}, "text: causal-lora learns the text of a table"),
    ],
)
def test_mistakes_name_their_key(folder, table, changes, message):
    with pytest.raises(SordinoError, match=message):
        run.prepare(spec(folder, table, **changes))


def test_what_is_not_served_is_refused(done, table, tmp_path, capsys):
    with pytest.raises(SordinoError, match="a noised perplexity is not served"):
        private_evaluation.prepare(done, table, epsilon=1)
    assert main(["predict", str(done)]) == 2
    assert "name a file of records, or write --prompt" in capsys.readouterr().err
    with pytest.raises(SordinoError, match="weights: the spec of a federation must not set it; remove it"):
        federated({"model": "causal-lora", "weights": "gpt2"})
    with pytest.raises(SordinoError, match="prompt: the spec of a federation must not set it"):
        federated({"prompt": "question"})


def test_a_model_of_labels_writes_nothing(tmp_path, capsys):
    out = str(tmp_path / "digits")
    assert main(["run", "--method", "dp-fedgd", "--rounds", "1", "--out", out]) == 0
    assert main(["predict", out, "--prompt", "one"]) == 2
    assert "--prompt: softmax predicts labels and writes no text" in capsys.readouterr().err
    with pytest.raises(SordinoError, match="prompt: softmax writes no text"):
        load_run(out).generate(["one"])


def test_perplexity_is_that_of_the_rows(folder, table):
    prepared = run.prepare(spec(folder, table))
    theta, x = prepared.model.init(), prepared.dataset.x_test
    found = run.evaluate(prepared.model, theta, torch.from_numpy(x), torch.zeros(len(x)))
    assert found == {"perplexity": pytest.approx(causal.perplexity(prepared.model, theta, np.asarray(x)), rel=1e-6)}
