"""Classifiers of sequences from any folder that `save_pretrained` wrote."""

import pytest
import torch

from sordino.errors import SordinoError
from sordino.models import registry
from tests.support import language

LENGTH = 8


def saved(kind, folder):
    """A tiny model of the kind on disk, and what it computes."""
    transformers = pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    torch.manual_seed(0)
    configs = {
        "DistilBert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 20},
        "Bert": {"max_position_embeddings": 20, **language.SIZES},
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20, "bos_token_id": 1, "eos_token_id": 1},
    }
    config = getattr(transformers, f"{kind}Config")(vocab_size=30, num_labels=3, pad_token_id=0, **configs[kind])
    network = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    network.save_pretrained(folder)
    return network


@pytest.mark.parametrize("kind", ["Bert", "DistilBert"])
def test_any_encoder_in_a_folder_gives_its_own_logits(kind, tmp_path):
    network = saved(kind, tmp_path)
    model = registry.build("sequence-lora", LENGTH, 3, weights=str(tmp_path), lora_rank=2)
    ids = torch.randint(3, 30, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[1, 5:] = 0
    with torch.no_grad():
        want = network(input_ids=ids, attention_mask=(ids != 0).long()).logits
    torch.testing.assert_close(model.logits(model.init(), ids.float()), want, rtol=1e-4, atol=1e-5)


def test_models_that_read_tokens_in_order_are_refused_as_classifiers(tmp_path):
    saved("GPT2", tmp_path)
    with pytest.raises(SordinoError, match="does not read padded texts as an encoder does"):
        registry.build("sequence-lora", LENGTH, 3, weights=str(tmp_path))


def test_a_folder_is_needed_and_must_hold_a_classifier(tmp_path):
    pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    with pytest.raises(SordinoError, match="weights: sequence-lora is whatever classifier a folder holds"):
        registry.build("sequence-lora", LENGTH, 3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SordinoError, match=r"weights: '.*' holds no AutoModelForSequenceClassification"):
        registry.build("sequence-lora", LENGTH, 3, weights=str(tmp_path))
