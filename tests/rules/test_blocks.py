"""Blocks of theta: means over them, and a transformer's own, on real lists of parameters."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch

from sordino.errors import SordinoError
from sordino.rules.blocks import block_means, count, expand, transformer_blocks

# Names and shapes as Hugging Face's models list them: with a classifier, and the published depths, widths and heads.
MODELS = json.loads(gzip.decompress((Path(__file__).parent / "transformers.json.gz").read_bytes()))


def thin(name):
    """A model's parameters by their rows alone: heads are rows, and whole ones would fill gigabytes."""
    return [(key, shape[:1]) for key, shape in MODELS[name]["parameters"]]


def placed(parameters, heads):
    """The blocks that every parameter falls into, by name."""
    sizes = [math.prod(shape) for _, shape in parameters]
    return dict(zip([key for key, _ in parameters], transformer_blocks(parameters, heads).split(sizes), strict=True))


# -------------------------------------------------------------------------------------------------------------- means


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_means_over_the_last_axis(lead):
    numbers = torch.tensor([2, 0, 1, 0, 2, 2])
    v = torch.randn(*lead, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means = block_means(v, numbers)
    assert means.shape == (*lead, 3)
    by_hand = torch.stack([v[..., numbers == b].mean(-1) for b in range(3)], -1)
    torch.testing.assert_close(means, by_hand)
    back = expand(means, numbers)
    assert torch.equal(back, means[..., numbers])
    torch.testing.assert_close(block_means(back, numbers), means)
    assert not torch.allclose(means, block_means(v, numbers.flip(0)))


def test_without_blocks_there_is_one():
    v = torch.arange(6.0).view(2, 3)
    assert block_means(v, None).tolist() == [[1.0], [4.0]]
    assert expand(block_means(v, None), None).tolist() == [[1.0], [4.0]]
    assert count(None) == 1


def test_a_block_of_its_own_for_every_entry_changes_nothing():
    v = torch.randn(5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block_means(v, torch.arange(5)), v)


def test_large_blocks_are_summed_with_care():
    """Added one by one in float32, ones get lost beside 2^24."""
    v = torch.cat([torch.tensor([2.0**24]), torch.ones(999)])
    mean = block_means(v, torch.zeros(1000, dtype=torch.long))
    assert mean.item() == pytest.approx((2**24 + 999) / 1000, rel=1e-7)
    lost = torch.zeros(1)
    for entry in v:
        lost = lost + entry
    assert abs(lost.item() / 1000 - mean.item()) > 0.9


# ------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize(
    ("name", "expected"), [("vit-base", 458), ("roberta-base", 458), ("swin-base", 1178), ("swin-tiny", 440)]
)
def test_as_many_as_published(name, expected):
    model = MODELS[name]
    numbers = transformer_blocks(thin(name), model["heads"])
    assert len(numbers) == sum(shape[0] for _, shape in model["parameters"])
    assert numbers.unique().tolist() == list(range(expected))
    assert expected == sum(3 * heads + 2 for heads in model["heads"]) + 2
    assert expected != sum(3 * heads + 3 for heads in model["heads"]) + 2, "a block for each matrix of an MLP"


def test_heads_are_rows_and_biases_go_with_them():
    layer = "vit.encoder.layer.3."
    whole = [(key, shape) for key, shape in MODELS["vit-base"]["parameters"] if key.startswith((layer, "classifier"))]
    at = placed(whole, 12)
    seen = set()
    for part in ("query", "key", "value"):
        name = f"{layer}attention.attention.{part}"
        weight, bias = at[f"{name}.weight"].view(768, 768), at[f"{name}.bias"]
        assert (weight == weight[:, :1]).all(), "a row is of one head"
        assert torch.equal(weight[:, 0], bias)
        assert torch.equal(bias, bias[::64].repeat_interleave(64)), "a head is 64 rows"
        assert len(bias.unique()) == 12
        seen |= set(bias.tolist())
    assert len(seen) == 36
    size = torch.bincount(torch.cat(list(at.values())))
    assert all(size[b] == 64 * 768 + 64 for b in seen)
    assert len(size) == 36 + 2 + 1


def riders(name):
    at = placed(thin(name), MODELS[name]["heads"])
    return lambda key: set(at[key].tolist())


def test_the_rest_rides_with_the_nearest():
    of = riders("vit-base")
    layer = "vit.encoder.layer.0."
    before, after = of(f"{layer}layernorm_before.weight"), of(f"{layer}layernorm_after.bias")
    assert before == of(f"{layer}attention.output.dense.weight")
    assert after == of(f"{layer}intermediate.dense.weight") == of(f"{layer}output.dense.bias")
    assert after != before
    assert of("vit.embeddings.cls_token") == of("vit.embeddings.patch_embeddings.projection.weight")
    assert of("vit.layernorm.weight") == of("classifier.weight") != of("vit.embeddings.cls_token")

    of = riders("roberta-base")
    layer = "roberta.encoder.layer.11."
    assert of(f"{layer}attention.output.LayerNorm.weight") == of(f"{layer}attention.output.dense.weight")
    assert of(f"{layer}output.LayerNorm.weight") == of(f"{layer}intermediate.dense.weight")
    assert of("roberta.embeddings.LayerNorm.weight") == of("roberta.embeddings.word_embeddings.weight")
    assert of("classifier.dense.weight") == of("classifier.out_proj.weight")

    of = riders("swin-base")
    layer = "swin.encoder.layers.2.blocks.17."
    table = of(f"{layer}attention.self.relative_position_bias_table")
    assert table == of(f"{layer}attention.output.dense.weight")
    assert of("swin.encoder.layers.2.downsample.reduction.weight") == of(f"{layer}output.dense.weight")
    assert of("swin.encoder.layers.2.blocks.1.output.dense.weight") != of(f"{layer}output.dense.weight")


def toy(attention):
    return [("embed.weight", (5, 4)), *attention, ("layers.0.linear1.weight", (8, 4)), ("head.weight", (3, 4))]


def test_a_fused_matrix_falls_into_the_same_blocks():
    split = toy([(f"layers.0.self_attn.{p}_proj.weight", (4, 4)) for p in "qkv"])
    for name in ("layers.0.self_attn.in_proj_weight", "layers.0.attn.qkv.weight"):
        fused = toy([(name, (12, 4))])
        assert torch.equal(transformer_blocks(fused, 2), transformer_blocks(split, 2))
    assert count(transformer_blocks(split, 2)) == 1 + 6 + 1 + 1
    assert not torch.equal(transformer_blocks(split, 2), transformer_blocks(split, 4))


def test_low_rank_factors():
    """B has the rows of its matrix; all A of a layer are one block."""
    layer = "layers.0.self_attn."
    factors = [(f"{layer}{p}_proj.lora_{ab}.weight", (4, 2) if ab == "B" else (2, 4)) for p in "qv" for ab in "AB"]
    numbers = transformer_blocks([*factors, ("head.weight", (3, 4))], 2)
    assert numbers.tolist() == [0] * 8 + [1] * 4 + [2] * 4 + [0] * 8 + [3] * 4 + [4] * 4 + [5] * 12


@pytest.mark.parametrize(
    ("parameters", "heads", "message"),
    [
        ([("conv.weight", (3, 3))], 2, "parameters: no name looks like an attention"),
        (
            toy([("layers.0.attn.qkv.weight", (12, 4))]),
            3,
            "heads: 3 do not divide the 12 rows of attn.qkv.weight in layer 0",
        ),
        (toy([("layers.0.attn.qkv.weight", (12, 4))]), [2, 2], "heads: 2 numbers for 1 layers"),
        (toy([("layers.0.attn.qkv.weight", (12, 4))]), 0, "heads: 0 do not divide"),
    ],
)
def test_what_does_not_fit_is_named(parameters, heads, message):
    with pytest.raises(SordinoError, match=message):
        transformer_blocks(parameters, heads)
