"""Causal language models: one sequence is one record, and its loss is clipped as one."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from sordino import Plan, Privacy, Records, build, simulate, source
from sordino.checks.sums import neighbours
from sordino.core import SAFETY, Adjacency, Shard
from sordino.data.text import sequences, tokenize
from sordino.errors import SordinoError
from sordino.models import causal
from sordino.models.lora import adapt, load_peft, module_of, save_peft
from sordino.models.torch_model import TorchModel
from sordino.models.transformers import routing
from tests.support import language

LENGTH = 10
TEXTS = ["the film was good", "it was dull and cold", "a warm film", "not very fine"] * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return language.gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def model(folder):
    return causal.build(folder, length=LENGTH, rank=2, dropout=0.0, check=True)


@pytest.fixture(scope="module")
def rows(folder):
    return torch.from_numpy(tokenize(TEXTS, LENGTH, folder)).float()


def theirs(folder, ids):
    """Loss of one sequence as `transformers` computes it from labels: padding is -100, except the first."""
    from transformers import GPT2LMHeadModel

    labels = ids.clone()
    ends = (ids == 0).nonzero()[0, 0] if (ids == 0).any() else len(ids)
    labels[ends + 1 :] = -100
    with torch.no_grad():
        return float(GPT2LMHeadModel.from_pretrained(folder).eval()(ids[None], labels=labels[None]).loss)


def test_the_loss_of_a_sequence_is_that_of_the_library(folder, model, rows):
    ours = causal.losses(model, model.init(), rows[:4])
    want = [theirs(folder, row.long()) for row in rows[:4]]
    np.testing.assert_allclose(ours, want, rtol=1e-5)


def test_gradients_are_those_of_the_loss_and_clipped_per_sequence(model, rows):
    """Against autograd of the loss itself, one sequence after another; a clip of the whole batch differs."""
    theta = (model.init() + 0.1 * torch.randn(model.size, generator=torch.Generator().manual_seed(1))).double()
    module, total, clip = module_of(model).double().eval(), torch.zeros(model.size, dtype=torch.float64), 0.05
    for row in rows[:5].double():
        params = {name: part.clone().requires_grad_() for name, part in model.split(theta).items()}
        logits = functional_call(module, params, (row[None],), {"tokens": True})
        loss = module.losses(logits, row[None].long()).sum()
        g = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(params.values()))])
        assert g.norm() > clip
        total += g * clip * (1 - SAFETY) / g.norm()
    module.float()
    shard = Shard(rows[:5].double(), torch.zeros(5, dtype=torch.long), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(model.clipped_sum(theta, shard, clip), total, rtol=1e-6, atol=1e-9)


def moved(model, rows, clip):
    """How far one sequence moves the clipped sum, in units of the claim."""
    shard = Shard(rows[:9], torch.zeros(9, dtype=torch.long), torch.ones(9))
    theta = model.init()
    before = model.clipped_sum(theta, shard, clip)
    for adjacency, other in neighbours(shard, 0):
        claim = clip if adjacency is Adjacency.ADD_REMOVE else 2 * clip
        found = (
            other._replace(x=torch.where(other.x == shard.x, shard.x, rows[10:19]))
            if other.x.shape == shard.x.shape
            else other
        )
        yield float((before - model.clipped_sum(theta, found, clip)).norm()) / claim


class Unclipped(TorchModel):
    """Mutant: forgets to clip."""

    def clipped_sum(self, theta, shard, clip, scale=None):
        return super().clipped_sum(theta, shard, 1e9, scale)


def test_one_sequence_moves_a_sum_by_the_clip_at_most(model, rows):
    assert max(moved(model, rows, 0.01)) <= 1
    mutant = Unclipped(module_of(model), shape=(LENGTH,), check=False)
    assert max(moved(mutant, rows, 0.01)) > 1


def test_training_lowers_perplexity_and_text_is_generated(folder, rows):
    model = causal.build(folder, length=LENGTH, rank=4, dropout=0.0)
    y, client = np.zeros(len(rows), np.int64), np.arange(len(rows)) % 2
    records = Records.of(rows, y, client)
    plan = Plan(build("dp-fedadam", lr=0.03, clip=1.0), 25, records.sizes, Privacy(epsilon=float("inf"), delta=1e-5))
    before = causal.perplexity(model, model.init(), rows)
    *_, done = simulate.run(plan, model, records, source(1))
    after = causal.perplexity(model, done.model, rows)
    assert after < 0.95 * before
    new = causal.generate(model, done.model, [8, 7], most=5)  # "the film"
    assert new == causal.generate(model, done.model, [8, 7], most=5)
    assert new == causal.generate(model, done.model.double(), [8, 7], most=5), "as sums of integers leave them"
    assert len(new) <= 5
    drawn = causal.generate(model, done.model, [8], most=5, temperature=1.0, seed=3)
    assert all(0 < token < 15 for token in drawn)


def test_only_answers_count_where_a_token_separates_them(folder):
    whole, answer = (causal.build(folder, length=6, rank=2, after=after) for after in (None, 9))
    ids = torch.tensor([[8, 7, 9, 1, 2, 0]])
    assert module_of(whole).counted(ids).tolist() == [[True] * 5]
    assert module_of(answer).counted(ids).tolist() == [[False, False, True, True, True]]


def prompted(folder, n=24):
    """Rows in which three tokens of a prompt come before a text."""
    special = causal.special_tokens(folder)._asdict()
    del special["stops"]
    texts = [text.replace("film", ("warm", "cold")[k % 2]) for k, text in enumerate(TEXTS[:n])]
    prompts = ["the film was", "it was not", "a very good", "and the film"] * 6
    return torch.from_numpy(sequences(texts, LENGTH, folder, prompts=prompts[:n], **special)).float()


def test_tokens_of_a_prompt_are_read_and_not_learned(folder, model):
    """Against the loss of the library, whose labels are -100 for the prompt and after the end."""
    from transformers import GPT2LMHeadModel

    rows = prompted(folder)[:4].long()
    assert (rows[:, :3] < 0).all()
    ids = torch.where(rows < 0, -1 - rows, rows)
    labels = torch.where(rows < 0, -100, ids)
    for row, label in zip(ids, labels, strict=True):
        ends = (row == 0).nonzero()
        label[(int(ends[0, 0]) if len(ends) else len(row)) + 1 :] = -100
    network = GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        want = [float(network(i[None], labels=y[None]).loss) for i, y in zip(ids, labels, strict=True)]
    np.testing.assert_allclose(causal.losses(model, model.init(), rows.float()), want, rtol=1e-5)
    other = rows.clone()
    other[:, 0] = -1 - 5
    assert not torch.allclose(
        causal.losses(model, model.init(), other.float()), causal.losses(model, model.init(), rows.float())
    ), "prompts are read"


def test_a_sequence_without_a_token_that_counts_adds_zero(folder, model):
    rows, theta = prompted(folder)[:4], model.init() + 0.1
    empty = -1 - rows[:1].long().abs().float()  # a prompt alone
    assert causal.counted_tokens(model, empty).tolist() == [0]
    assert 0 < float(causal.losses(model, theta, empty)) < 2 * causal.LEAST_LOSS

    def total(x):
        return model.clipped_sum(theta, Shard(x, torch.zeros(len(x), dtype=torch.long), torch.ones(len(x))), 0.01)

    assert torch.equal(total(empty), torch.zeros(model.size, dtype=torch.float64))
    assert total(rows).norm() > 0
    torch.testing.assert_close(total(torch.cat([rows, empty])), total(rows), rtol=1e-5, atol=1e-8)


class ClipsTokens(TorchModel):
    """Mutant: every token that counts is a term of its own, with a clip of its own."""

    def clipped_sum(self, theta, shard, clip, scale=None):
        module, total = module_of(self), 0.0
        for row, kept in zip(shard.x, shard.mask, strict=True):
            for place in module.counted(row[None].long())[0].nonzero()[:, 0].tolist():
                one = torch.where(torch.arange(len(row)) == place + 1, row, -1 - row.abs())
                one = torch.where(row < 0, row, one)
                label = torch.zeros(1, dtype=torch.long)
                total = total + super().clipped_sum(theta, Shard(one[None], label, kept.reshape(1)), clip, scale)
        return total


def test_a_prompted_sequence_is_one_clipped_term(folder, model):
    rows = prompted(folder)
    assert max(moved(model, rows, 0.01)) <= 1
    assert max(moved(ClipsTokens(module_of(model), shape=(LENGTH,), check=False), rows, 0.01)) > 1


class MeanOverBatch(causal.Sequences):
    """Mutant: divides by the tokens of all sequences, as a mean over a batch does."""

    def losses(self, logits, rows):
        own = super().losses(logits, rows) * self.counted(rows).sum(1)
        return own * len(rows) / self.counted(rows).sum()


def test_a_mean_over_the_tokens_of_a_batch_is_refused(model):
    inner = module_of(model)
    with pytest.raises(SordinoError, match="depends on the other rows"):
        TorchModel(MeanOverBatch(inner.network, inner.pad, ends=True), shape=(LENGTH,))


def test_special_tokens_are_those_of_the_configuration(folder, tmp_path):
    assert causal.special_tokens(folder) == (0, 0, {0}, 15)
    about = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"eos_token_id": [3, 4], "pad_token_id": 2}))
    assert causal.special_tokens(tmp_path) == (2, 3, {2, 3, 4}, 15)
    (tmp_path / "config.json").write_text(json.dumps(about | {"eos_token_id": None}))
    with pytest.raises(SordinoError, match="has neither pad_token_id nor eos_token_id"):
        causal.special_tokens(tmp_path)
    with pytest.raises(SordinoError, match="weights: '/nowhere' is not a folder"):
        causal.special_tokens("/nowhere")
    (tmp_path / "config.json").unlink()
    with pytest.raises(SordinoError, match="holds no configuration"):
        causal.special_tokens(tmp_path)


def test_padding_counts_once_if_it_ends_a_text_and_never_else(model):
    ids = torch.tensor([[8, 7, 0, 0], [8, 7, 3, 4]])
    assert module_of(model).counted(ids).tolist() == [[True, True, False], [True] * 3]
    other = causal.Sequences(module_of(model).network, 0, ends=False)
    assert other.counted(ids).tolist() == [[True, False, False], [True] * 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_peft_computes_the_same_from_our_files_and_back(folder, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # where PEFT looks for the name of the base when it writes
    peft = pytest.importorskip("peft", reason="pip install sordino[transformers]")
    from transformers import GPT2LMHeadModel

    model = causal.build(folder, length=LENGTH, rank=2)
    theta = model.init() + 0.1 * torch.randn(model.size, generator=torch.Generator().manual_seed(0))
    save_peft(tmp_path, model, theta)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == Path(folder).name
    theirs = peft.PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(folder), tmp_path).eval()
    ours = functional_call(module_of(model).eval(), model.split(theta), (rows[:3],), {"tokens": True})
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows[:3].long()).logits, ours, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "again")
    assert torch.equal(load_peft(tmp_path / "again", model), theta)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"length": 1}, "length: 1 must lie between 2 and 32"),
        ({"weights": "/nowhere"}, "weights: '/nowhere' is not a folder"),
    ],
)
def test_mistakes_name_their_field(folder, words, message):
    given = {"weights": folder, "length": LENGTH} | words
    with pytest.raises(SordinoError, match=message):
        causal.build(given.pop("weights"), **given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", ["bloom", "gpt_neox", "falcon", "phi3"])
def test_one_layer_for_queries_keys_and_values_is_adapted(family, rows, tmp_path):
    """BLOOM has no table of positions either, so that it reads sequences of any length. PEFT computes the same."""
    peft = pytest.importorskip("peft", reason="pip install sordino[transformers]")
    from transformers import AutoModelForCausalLM

    folder = language.fused(tmp_path / family, family)
    model = causal.build(folder, length=LENGTH, rank=2, dropout=0.0, check=True)
    theta = model.init() + 0.1 * torch.randn(model.size, generator=torch.Generator().manual_seed(0))
    ours = functional_call(module_of(model).eval(), model.split(theta), (rows[:3],), {"tokens": True})
    save_peft(tmp_path / "adapter", model, theta)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows[:3].long()).logits, ours, rtol=1e-4, atol=1e-5)
    long = 33 if family == "bloom" else 3
    assert len(causal.generate(model, theta, [1] * long, most=2)) <= 2
    if family != "bloom":
        with pytest.raises(SordinoError, match="length: 33 must lie between 2 and 32, the positions"):
            causal.build(folder, length=33)
    with pytest.raises(SordinoError, match="length: 1 must"):
        causal.build(folder, length=1)


def test_a_classifier_is_no_language_model(model):
    with pytest.raises(SordinoError, match=r"use causal\.build"):
        causal.perplexity(TorchModel(torch.nn.Linear(3, 2)), torch.zeros(8), torch.ones(2, 3))
    with pytest.raises(SordinoError, match="tokens 0, most 20"):
        causal.generate(model, model.init(), [])


def test_encoders_are_no_language_models(tmp_path):
    """One lacks the head that says the next token, the other has it and reads the token that it is to predict."""
    from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=9, max_position_embeddings=40, initializer_range=0.3, **sizes)
    for kind, words in (
        (RobertaForSequenceClassification, "lacks lm_head.*random and frozen"),
        (RobertaForMaskedLM, "reads the tokens that it is to predict.*such as GPT-2"),
    ):
        kind(config).save_pretrained(tmp_path / kind.__name__)
        with pytest.raises(SordinoError, match=words):
            causal.build(tmp_path / kind.__name__, length=LENGTH)


def test_a_model_that_routes_tokens_to_experts_is_refused_by_name(tmp_path, folder):
    """Its folder names them in a field; without the field, a layer does. Layers of a dense model do not."""
    from transformers import GPT2LMHeadModel, MixtralForCausalLM

    routed = language.mixtral(tmp_path)
    with pytest.raises(SordinoError, match=r"routes tokens to experts \(num_local_experts = 4\).*use a model without"):
        causal.build(routed, length=LENGTH)
    network = MixtralForCausalLM.from_pretrained(routed)
    assert routing(network) == "num_local_experts = 4"
    network.config.num_local_experts = 1
    assert "layer model.layers.0.mlp" in routing(network)
    assert routing(GPT2LMHeadModel.from_pretrained(folder)) == ""


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_model_that_routes_tokens_to_experts_is_refused_by_what_it_computes(tmp_path, autocast):
    """By the shapes of one pass, for networks that no name gives away, and without the check of gradients."""
    from transformers import MixtralForCausalLM

    network = MixtralForCausalLM.from_pretrained(language.mixtral(tmp_path))
    for way in ("grouped_mm", "eager"):
        network.config._experts_implementation = way
        adapted = adapt(copy.deepcopy(network), head=[], rank=2)
        with pytest.raises(SordinoError, match="depends on the data, as where a layer routes tokens to experts"):
            TorchModel(causal.Sequences(adapted, 0, True), shape=(LENGTH,), autocast=autocast, check=False)
