"""Which transformers there are: names and published sizes, without torch. `transformers.build` builds them."""

from __future__ import annotations

from typing import Any, NamedTuple

from sordino.models.images import Normalisation

# Which factors of low-rank adapters are trained: both; B alone; A and B in turns; B alone, and after each round the
# server re-factors B A so that A has orthonormal rows. `methods.adapters` has the last two.
LORA_VARIANTS = ("lora", "freeze-a", "alternating", "fedsvd")


class Architecture(NamedTuple):
    """How to build one: names of the configuration and of the model in `transformers`, and the published sizes."""

    config: str
    model: str
    sizes: dict[str, Any]
    text: bool = False
    pixels: Normalisation | None = None  # of images, as the published weights expect them


_IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic")
_SWIN = {"image_size": 224, "patch_size": 4, "window_size": 7}
_BERT = {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2, "pad_token_id": 0}

TRANSFORMERS = {
    "vit-base-lora": Architecture(
        *("ViTConfig", "ViTForImageClassification"),
        {"image_size": 224, "patch_size": 16},
        pixels=Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ),
    "swin-tiny-lora": Architecture(
        *("SwinConfig", "SwinForImageClassification"),
        _SWIN | {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]},
        pixels=_IMAGENET,
    ),
    "swin-base-lora": Architecture(
        *("SwinConfig", "SwinForImageClassification"),
        _SWIN | {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]},
        pixels=_IMAGENET,
    ),
    "roberta-base-lora": Architecture(
        *("RobertaConfig", "RobertaForSequenceClassification"),
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        text=True,
    ),
    "minilm-lora": Architecture(
        *("BertConfig", "BertModel"),
        _BERT
        | {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        | {"layer_norm_eps": 1e-12},
        text=True,
    ),
    # Whatever classifier of sequences the folder of the weights holds.
    "sequence-lora": Architecture("AutoConfig", "AutoModelForSequenceClassification", {}, text=True),
}
