"""Classifiers of sequences from any folder that `save_pretrained` wrote."""

import copy
import functools
import json

import pytest
import torch
from torch import nn

from sordino.core import Shard
from sordino.errors import SordinoError
from sordino.models import encoders, per_example, registry, watch
from sordino.models import transformers as ours
from sordino.models.lora import LoRALinear, load_peft, module_of, save_peft
from sordino.models.torch_model import TorchModel
from tests.models.test_lora import far, moved, naive, summed
from tests.support import language

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of DeBERTa's module
LENGTH, CLASSES, WORDS = 9, 3, 30
ROTATED = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
RELATIVE |= {"type_vocab_size": 0, "pooler_hidden_size": 16}
DEBERTA = RELATIVE | {"position_buckets": 6, "norm_rel_ebd": "layer_norm", "share_att_key": True}
# Name of the test -> name of the class, and its configuration. A window of ModernBERT is narrower than a row.
KINDS = {
    "Bert": ("Bert", {}),
    "DistilBert": ("DistilBert", {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}),
    "MPNet": ("MPNet", {"pad_token_id": 1}),
    "DebertaV2": ("DebertaV2", DEBERTA),
    "DebertaV2 with a convolution": ("DebertaV2", DEBERTA | {"position_buckets": 4, "conv_kernel_size": 3}),
    "DebertaV2 with matrices of positions": ("DebertaV2", DEBERTA | {"share_att_key": False}),
    "Deberta": ("Deberta", RELATIVE),
    "ModernBert": ("ModernBert", ROTATED | {"global_attn_every_n_layers": 2, "local_attention": 4}),
    "ModernBert by the mean": ("ModernBert", ROTATED | {"local_attention": 4, "classifier_pooling": "mean"}),
    "GPT2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20, "eos_token_id": 1}),
}
ENCODERS = [kind for kind in KINDS if kind != "GPT2"]
NEW = [kind for kind in ENCODERS if kind not in ("Bert", "DistilBert")]


def saved(kind, folder, **changes):
    """A tiny model of the kind on disk, and what it computes."""
    transformers = pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    torch.manual_seed(0)
    name, about = KINDS[kind]
    sizes = (
        {} if name in ("DistilBert", "GPT2") else language.SIZES | {"num_hidden_layers": 2, "num_attention_heads": 2}
    )
    sizes |= {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": 0, "initializer_range": 0.3}
    sizes |= {} if name == "GPT2" else {"max_position_embeddings": 20}
    config = getattr(transformers, f"{name}Config")(**sizes | about | changes)
    network = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    network.save_pretrained(folder)
    return network


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Tiny models by kind: the folder of one, what it computes, and a function that builds it, once per option. A test
    that changes one copies it before."""

    @functools.cache
    def made(kind):
        folder = tmp_path_factory.mktemp("encoder")
        return folder, saved(kind, folder), functools.cache(functools.partial(built, folder))

    return made


def built(folder, length=LENGTH, **options):
    return registry.build("sequence-lora", length, CLASSES, weights=str(folder), **{"lora_rank": 2} | options)


def rows(network, length=LENGTH):
    """Four texts, two of them padded."""
    ids = torch.randint(3, WORDS, (4, length), generator=torch.Generator().manual_seed(1))
    ids[1, 5:] = ids[2, 2:] = network.config.pad_token_id
    return ids


def away(model):
    """Parameters away from their start, where B = 0 hides A."""
    return model.init() + 0.2 * torch.randn(model.size, generator=torch.Generator().manual_seed(2))


def by_the_library(network, ids):
    with torch.no_grad():
        return network(input_ids=ids, attention_mask=(ids != network.config.pad_token_id).long()).logits


# ------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("kind", ENCODERS)
def test_any_encoder_in_a_folder_gives_its_own_logits(kind, encoder):
    _, network, build = encoder(kind)
    model, ids = build(), rows(network)
    want = by_the_library(network, ids)
    torch.testing.assert_close(model.logits(model.init(), ids.float()), want, rtol=1e-4, atol=1e-5)
    assert (want[0] - want[1]).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", NEW)
def test_peft_computes_the_same_from_the_files_of_an_encoder(kind, encoder, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install sordino[transformers]")
    _, network, build = encoder(kind)
    model, ids = build(), rows(network)
    theta = away(model)
    save_peft(tmp_path / "adapter", model, theta)
    assert torch.equal(load_peft(tmp_path / "adapter", model), theta)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path / "adapter").eval()
    want = by_the_library(theirs, ids)
    torch.testing.assert_close(model.logits(theta, ids.float()), want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model.logits(model.init(), ids.float()), want, atol=0.05)


@pytest.mark.parametrize("kind", NEW)
def test_padding_changes_nothing(kind, encoder):
    """The same text in a row of its own length and in a longer one: its logits and its gradient."""
    _, network, build = encoder(kind)
    short, long = build(5, lora_dropout=0.0), build(lora_dropout=0.0)
    text, theta = rows(network)[:1, :5].float(), away(short)
    filled = nn.functional.pad(text, (0, LENGTH - 5), value=float(network.config.pad_token_id))
    torch.testing.assert_close(long.logits(theta, filled), short.logits(theta, text), rtol=1e-4, atol=1e-5)
    one, other = (
        model.clipped_sum(theta.double(), Shard(x.double(), torch.ones(1), torch.ones(1).double()), 1e6)
        for model, x in ((short, text), (long, filled))
    )
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-8)
    assert one.norm() > 0.1


# --------------------------------------------------------------------------------------------- gradients of examples


@pytest.mark.parametrize("kind", NEW)
def test_gradients_of_texts_are_those_of_autograd(kind, encoder):
    _, network, build = encoder(kind)
    module = copy.deepcopy(module_of(build(lora_dropout=0.0))).double().eval()
    params, x, y = moved(module), rows(network).double(), torch.arange(4) % CLASSES
    found, want = per_example.gradients(module, params, x, y, summed), naive(module, params, x, y)
    assert far(found, want) < 1e-9
    assert all(float(part.abs().max()) > 0 for part in want.values())


@pytest.mark.parametrize("kind", NEW)
def test_clients_with_their_own_adapters_share_a_pass(kind, encoder):
    _, network, build = encoder(kind)
    module = copy.deepcopy(module_of(build(lora_dropout=0.0))).double().eval()
    params, x, y = moved(module, clients=2), rows(network).double(), torch.arange(4) % CLASSES
    together = per_example.gradients(module, params, torch.cat([x, x.flip(0)]), torch.cat([y, y.flip(0)]), summed)
    for k, (texts, labels) in enumerate(((x, y), (x.flip(0), y.flip(0)))):
        alone = per_example.gradients(module, {key: p[k] for key, p in params.items()}, texts, labels, summed)
        assert far({key: part[4 * k : 4 * k + 4] for key, part in together.items()}, alone) < 1e-9


@pytest.mark.parametrize("buckets", [4, 6])
def test_a_table_of_positions_that_all_texts_share_is_refused(buckets, tmp_path, monkeypatch):
    """DeBERTa as the library has it: 2 x 6 rows are a multiple of three records, and 2 x 4 are not."""
    saved("DebertaV2", tmp_path, position_buckets=buckets)
    built(tmp_path)
    monkeypatch.setattr(ours, "prepare", lambda *_: None)
    with pytest.raises(SordinoError, match=r"gradient of one row at .*(query|key)_proj|cannot be told apart"):
        built(tmp_path)


def test_adapters_where_positions_come_before_records_are_refused():
    """Outputs of one record do not change with others, and yet its part of the gradient would."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.value, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.value(self.embed(x).transpose(0, 1)).tanh().mean(0))

    from sordino.models.lora import adapt

    with pytest.raises(SordinoError, match=r"the gradient of one row at value\.adapter\.lora_\w depends on the other"):
        TorchModel(adapt(Turned(), rank=2), shape=(3, 2), check=False)


@pytest.mark.parametrize("kind", NEW)
def test_texts_do_not_meet(kind, encoder):
    _, network, build = encoder(kind)
    model, ids = build(lora_dropout=0.0), rows(network).float()
    theta, other = away(model), ids.flip(-1)
    other[0] = ids[0]
    assert torch.equal(model.logits(theta, ids)[0], model.logits(theta, other)[0])
    y, without = torch.arange(4) % CLASSES, torch.tensor([0.0, 1.0, 1.0, 1.0])
    terms = [
        model.clipped_sum(theta, Shard(x, y, torch.ones(4)), 0.01)
        - model.clipped_sum(theta, Shard(x, y, without), 0.01)
        for x in (ids, other)
    ]
    torch.testing.assert_close(terms[0], terms[1], rtol=0, atol=1e-9)
    assert 0.009 < terms[0].norm() <= 0.01


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without bfloat16
@pytest.mark.parametrize("kind", [kind for kind in NEW if kind != "Deberta"])
def test_one_text_moves_the_sum_by_the_clip_in_half_precision_with_dropout(kind, encoder):
    _, network, build = encoder(kind)
    model = build(lora_dropout=0.5, autocast=torch.bfloat16)
    theta, ids = away(model), rows(network).float()
    for k in range(4):
        one = Shard(ids[k : k + 1], torch.ones(1), torch.ones(1))
        assert 0.9999e-3 < model.clipped_sum(theta, one, 1e-3).norm() <= 1e-3
    assert not torch.equal(*(model.clipped_sum(theta, one, 1.0) for _ in range(2)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", NEW)
def test_sums_of_texts_on_a_gpu(kind, tmp_path):
    network = saved(kind, tmp_path)
    model, ids = built(tmp_path, lora_dropout=0.0), rows(network).float()
    shard, theta = Shard(ids, torch.arange(4) % CLASSES, torch.ones(4)), away(model)
    want = model.clipped_sum(theta, shard, 0.1)
    for _ in range(3):  # the later ones replay a graph
        have = model.clipped_sum(theta.cuda(), Shard(*(part.cuda() for part in shard[:3])), 0.1).cpu()
        assert (have - want).norm() < 1e-3 * want.norm()


# ------------------------------------------------------------------------------------------------ layers with adapters


def test_targets_name_the_layers_with_adapters_and_are_stated_in_the_files(tmp_path):
    peft = pytest.importorskip("peft", reason="pip install sordino[transformers]")
    network = saved("Bert", tmp_path / "base")
    model = built(tmp_path / "base", lora_targets="query, output.dense")
    adapted = {name for name, part in module_of(model).named_modules() if isinstance(part, LoRALinear)}
    layers = ("attention.self.query", "attention.output.dense", "output.dense")
    assert adapted == {f"network.bert.encoder.layer.{k}.{name}" for k in range(2) for name in layers}
    assert built(tmp_path / "base", lora_targets=["query", "output.dense"]).size == model.size
    theta = away(model)
    save_peft(tmp_path / "adapter", model, theta)
    stated = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert {f"network.{name}" for name in stated} == adapted
    theirs = peft.PeftModel.from_pretrained(network, tmp_path / "adapter").eval()
    ids = rows(network)
    torch.testing.assert_close(model.logits(theta, ids.float()), by_the_library(theirs, ids), rtol=1e-4, atol=1e-4)


def test_the_pooler_of_deberta_belongs_to_its_head(tmp_path):
    for kind, targets, trained in (("DebertaV2", "query_proj,dense", True), ("Bert", "query,dense", False)):
        saved(kind, tmp_path / kind)
        model = built(tmp_path / kind, lora_targets=targets)
        assert any(name.endswith("pooler.dense.weight") for name in model.trained) == trained
        assert any("pooler.dense.adapter" in name for name in model.trained) != trained


def test_without_targets_adapters_are_on_q_k_and_v(tmp_path):
    saved("Bert", tmp_path)
    assert list(built(tmp_path).trained) == list(built(tmp_path, lora_targets="query,key,value").trained)


def test_layers_outside_the_attention_have_one_block_per_tensor(tmp_path):
    saved("Bert", tmp_path)
    model = built(tmp_path, lora_targets="intermediate.dense")
    assert model.blocks.unique().tolist() == list(range(len(model.trained)))
    assert [int(part.unique().numel()) for part in model.split(model.blocks).values()] == [1] * len(model.trained)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("wq", r"lora_targets: no linear layer is named 'wq'.*bert\.encoder\.layer\.\*\.attention\.self\.query"),
        ("query,wq", r"lora_targets: no linear layer is named 'wq'"),
        ("classifier", r"lora_targets: no linear layer outside the head, which is trained in full, is named 'classif"),
        ("", r"lora_targets: '' must name layers, as in lora_targets=query,value"),
        ("query,", r"lora_targets: 'query,' must name layers"),
        ((), r"lora_targets: \(\) must name layers"),
    ],
)
def test_targets_that_are_no_layers_are_answered_with_what_there_is(targets, message, tmp_path):
    saved("Bert", tmp_path)
    with pytest.raises(SordinoError, match=message):
        built(tmp_path, lora_targets=targets)


def test_a_target_that_serves_all_texts_is_refused(tmp_path):
    """DeBERTa's matrix of positions gets a table of its own per text; that of the first DeBERTa does not."""
    saved("DebertaV2 with matrices of positions", tmp_path / "second")
    assert any("pos_key_proj" in name for name in built(tmp_path / "second", lora_targets="pos_key_proj").trained)
    saved("Deberta", tmp_path / "first")
    with pytest.raises(SordinoError, match=r"pos_proj.*leave it out of the targets|cannot be told apart"):
        built(tmp_path / "first", lora_targets="in_proj,pos_proj")


# ----------------------------------------------------------------------------------------------------------- refusals


def test_models_that_read_tokens_in_order_are_refused_as_classifiers(tmp_path):
    saved("GPT2", tmp_path)
    with pytest.raises(SordinoError, match="does not read padded texts as an encoder does"):
        built(tmp_path)


def test_a_mask_that_an_encoder_does_not_read_is_found_out(tmp_path, monkeypatch):
    saved("DebertaV2", tmp_path / "deberta")
    saved("ModernBert", tmp_path / "modern")
    monkeypatch.setattr(ours, "wants_tokens", lambda network: False)
    for kind in ("deberta", "modern"):
        with pytest.raises(SordinoError, match=r"classifier (does not read padded texts|fails on rows of 9 tokens)"):
            built(tmp_path / kind)


def test_another_attention_of_positions_is_found_out(tmp_path, monkeypatch):
    """A version of transformers whose attention computes something else than ours is refused."""
    saved("DebertaV2", tmp_path)
    bias = encoders.RecordwiseAttention.disentangled_attention_bias
    monkeypatch.setattr(encoders.RecordwiseAttention, "disentangled_attention_bias", lambda *a: 1.5 * bias(*a))
    with pytest.raises(SordinoError, match="does not read padded texts as an encoder does"):
        built(tmp_path)


@pytest.mark.parametrize(("kind", "longest"), [("MPNet", 18), ("Bert", 20)])
def test_rows_fit_into_the_positions(kind, longest, tmp_path):
    network = saved(kind, tmp_path)
    model, ids = built(tmp_path, longest), rows(network, longest)
    torch.testing.assert_close(
        model.logits(model.init(), ids.float()), by_the_library(network, ids), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(SordinoError, match="length"):
        built(tmp_path, longest + 1)


def test_the_first_deberta_is_refused_in_half_precision(tmp_path):
    saved("Deberta", tmp_path)
    with pytest.raises(SordinoError, match=r"dtype: .*\(DisentangledSelfAttention\) fails in bfloat16.*use float32"):
        built(tmp_path, autocast=torch.bfloat16)


def test_an_older_modernbert_is_refused(tmp_path):
    network = saved("ModernBert", tmp_path)
    network.model.config = type("Config", (), {})()
    with pytest.raises(SordinoError, match="update transformers"):
        encoders.prepare(network)


def test_a_folder_is_needed_and_must_hold_a_classifier(tmp_path):
    pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    with pytest.raises(SordinoError, match="weights: sequence-lora is whatever classifier a folder holds"):
        registry.build("sequence-lora", LENGTH, 3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SordinoError, match=r"weights: '.*' holds no AutoModelForSequenceClassification"):
        registry.build("sequence-lora", LENGTH, 3, weights=str(tmp_path))


def test_memory_of_rows_that_is_free_is_not_taken_for_that_of_others():
    x = torch.ones(4)
    with (seen := watch.Watch(x)):
        place = watch._place(x + 1)  # which is free at once
    assert place in seen._from_rows
    kept = [torch.UntypedStorage(16) for _ in range(2000)]
    assert all(each._cdata != place for each in kept)


def test_a_row_with_ids_beyond_the_vocabulary_does_not_end_the_sum(encoder):
    """At a site of a federation a sum that fails is noise alone: one such record took all others out of it."""
    _, network, build = encoder("Bert")
    model, ids = build(lora_dropout=0.0), rows(network).double()
    whole = model.clipped_sum(away(model), Shard(ids, torch.zeros(4).long(), torch.ones(4)), 1.0)
    for wrong in (WORDS, -1, 1e30, float("nan")):
        odd = ids.clone()
        odd[3, 4] = wrong
        other = model.clipped_sum(away(model), Shard(odd, torch.zeros(4).long(), torch.ones(4)), 1.0)
        assert 0 < (whole - other).norm() <= 2
        padded = ids.clone()
        padded[3, 4] = network.config.pad_token_id
        same = model.clipped_sum(away(model), Shard(padded, torch.zeros(4).long(), torch.ones(4)), 1.0)
        assert torch.equal(other, same)
