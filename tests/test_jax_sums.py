"""The networks and steps of `benchmarks/jax_sums.py`, beside those of PyTorch and of `benchmarks/gpu.py`."""

import importlib.util
import json
import math
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
NEEDS = [name for name in ("jax", "jax_privacy") if importlib.util.find_spec(name) is None]
if NEEDS:
    pytest.skip(f"{', '.join(NEEDS)} not installed: no dependency of Sordino", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other packages
    import jax
    import jax.numpy as jnp
    import jax_privacy  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jax-privacy calls older names of optax

jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than computing

# Names of PyTorch's parameters to those of the benchmark.
NAMES = {
    "vit": [
        (r"^network\.(vit\.)?", ""),
        (r"^(encoder\.)?layers?\.", ""),
        (r"embeddings\.cls_token", "class"),
        (r"embeddings\.position_embeddings", "positions"),
        (r"embeddings\.patch_embeddings\.projection", "patches"),
        (r"^layernorm\.", "norm."),
        (r"attention\.(attention\.)?(query|key|value|output)\.(dense\.)?", r"\2."),
        (r"attention\.q_proj", "query"),
        (r"attention\.k_proj", "key"),
        (r"attention\.v_proj", "value"),
        (r"attention\.o_proj", "output"),
        (r"mlp\.fc1|intermediate\.dense", "up"),
        (r"mlp\.fc2|output\.dense", "down"),
        (r"layernorm_before", "norm_1"),
        (r"layernorm_after", "norm_2"),
        (r"^classifier", "head"),
    ],
    "roberta": [
        (r"^network\.(roberta\.)?", ""),
        (r"embeddings\.word_embeddings\.weight", "words"),
        (r"embeddings\.token_type_embeddings\.weight", "types"),
        (r"embeddings\.position_embeddings\.weight", "positions"),
        (r"embeddings\.LayerNorm", "norm"),
        (r"^encoder\.layer\.", ""),
        (r"attention\.self\.", ""),
        (r"attention\.output\.dense", "out"),
        (r"attention\.output\.LayerNorm", "norm_1"),
        (r"intermediate\.dense", "up"),
        (r"output\.dense", "down"),
        (r"output\.LayerNorm", "norm_2"),
        (r"\.out\.", ".output."),
        (r"classifier\.dense", "head.dense"),
        (r"classifier\.out_proj", "head"),
    ],
    "resnet": [
        (r"^0\.0", "stem"),
        (r"^0\.1", "stem.norm"),
        (r"^11", "head"),
        (r"norms\.0", "first.norm"),
        (r"norms\.1", "second.norm"),
        (r"around\.0", "around"),
        (r"around\.1", "around.norm"),
        (r"^(\d+)\.(?=first|second|around)", lambda found: f"{int(found[1]) - 1}."),
    ],
}


def loaded(name):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def sums():
    return loaded("jax_sums")


@pytest.fixture(scope="module")
def gpu():
    pytest.importorskip("transformers")
    return loaded("gpu")


def renamed(name, network):
    for pattern, to in [*NAMES[network], (r"\.adapter\.lora_", "."), (r"\.base\.", ".")]:
        name = re.sub(pattern, to, name)
    return name


def problem(sums, name):
    (work,) = (work for work in sums.WORKS if work.name == name)
    found = sums.Problem(work, tiny=True, kind=jnp.float32)
    rng = np.random.default_rng(1)
    for key, value in found.trained.items():  # B and biases start at zero
        found.trained[key] = value + 0.1 * rng.standard_normal(value.shape, np.float32)
    return found


def close(found, wanted, tolerance):
    scale = max(float(np.abs(value).max()) for value in wanted.values())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance * scale, err_msg=name)


USUAL = ("resnet-full-256", "vit-full-32", "vit-lora-64", "roberta-full-32", "roberta-lora-64")


def test_works_are_those_of_the_benchmark_of_torch(sums, gpu):
    assert [tuple(work) for work in sums.WORKS] == [tuple(work)[:3] for work in gpu.WORKS]
    assert sums.USUAL == USUAL
    assert (sums.CLASSES, sums.CLIP, sums.SIGMA, sums.LENGTH) == (gpu.CLASSES, gpu.CLIP, gpu.SIGMA, gpu.LENGTH)


def test_as_many_parameters_as_torch_in_the_published_sizes(sums):
    measured = json.loads((ROOT / "results" / "gpu.json").read_text())["works"]
    for work in sums.WORKS:
        trained, _ = sums.shapes(work, sums.SIZES[work.network])
        assert sum(math.prod(shape) for shape in trained.values()) == measured[work.name]["trained"], work.name


@pytest.mark.filterwarnings("ignore:.*weights are random")
@pytest.mark.parametrize("name", USUAL)
def test_the_network_is_that_of_torch(sums, gpu, name):
    (work,) = (work for work in gpu.WORKS if work.name == name)
    bench = gpu.Bench(work, torch.device("cpu"), True)
    module = gpu.module_of(bench.flat).float().eval()
    found = problem(sums, name)
    assert found.size == bench.flat.size
    generator = torch.Generator().manual_seed(2)
    weights = {}
    for key, value in module.named_parameters():
        with torch.no_grad():
            value += 0.1 * torch.randn(value.shape, generator=generator)
        weights[renamed(key, work.network)] = jnp.asarray(value.detach().numpy())
    ours = found.trained | found.frozen
    assert {key: value.shape for key, value in weights.items()} == {key: value.shape for key, value in ours.items()}
    x = bench.x.clone()
    if work.network == "roberta":
        x[1, 10:] = sums.PAD
    with torch.no_grad():
        wanted = module(x.reshape(-1, *bench.flat.shape)).numpy()
    for patches in (False, True)[: 2 if work.network == "resnet" else 1]:
        how = sums.How(patches=patches)
        whole = jax.jit(
            lambda weights, x, how=how: sums.logits(found.work, found.sizes, weights, x, None, how, jnp.float32)
        )
        logits = whole(weights, jnp.asarray(x.numpy()))
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", USUAL)
def test_the_clipped_sum_is_that_of_a_loop_over_examples(sums, name):
    found = problem(sums, name)
    base = sums.How(random="threefry2x32", own_masks=found.draws)
    resnet = found.work.network == "resnet"
    hows = [base, base._replace(microbatch=2, narrow=True, nan_safe=False, patches=resnet)]
    hows += [base._replace(own_masks=False, microbatch=2)] if found.draws else []
    gradients = {}
    for how in hows:
        draws = found.draw(jax.random.key(3, impl=how.random), how, single=True)
        if how.own_masks not in gradients:
            native = how._replace(patches=False)
            gradients[how.own_masks] = jax.jit(jax.grad(lambda *each, native=native: found.loss(*each, native)))
        gradient = gradients[how.own_masks]
        singles = []
        for i in range(found.batch):
            draw = None if draws is None else draws[i]
            singles.append(gradient(found.trained, found.frozen, found.x[i : i + 1], found.y[i : i + 1], draw))
        norms = [math.sqrt(sum(float((g * g).sum()) for g in single.values())) for single in singles]
        clip = float(np.median(norms))
        wanted = {
            key: sum(min(1, clip / norm) * single[key] for norm, single in zip(norms, singles, strict=True))
            for key in found.trained
        }
        assert min(norms) < clip < max(norms)
        rest = (found.trained, found.frozen, found.x, found.y, draws)
        close(jax.jit(found.sums(how, clip))(*rest), wanted, 2e-4)


def test_masks_of_our_own_drop_a_tenth_and_differ_between_layers_and_examples(sums):
    x = jnp.ones((1, 300, 100))
    draws = jax.random.bits(jax.random.key(0), (2, 2), jnp.uint32)
    masks = [sums.dropped(x, draw, jnp.int32(k), True) == 0 for draw in draws for k in (0, 1)]
    for i, mask in enumerate(masks):
        assert float(mask.mean()) == pytest.approx(0.1, abs=0.01)
        for other in masks[:i]:
            assert float((mask & other).mean()) == pytest.approx(0.01, abs=0.003)
    assert float(sums.dropped(x, draws[0], jnp.int32(0), True).max()) == pytest.approx(1 / 0.9)


def test_adamw_is_that_of_torch(sums):
    rng = np.random.default_rng(0)
    value, gradients = rng.standard_normal(5, np.float32), rng.standard_normal((3, 5), np.float32)
    theirs = torch.nn.Parameter(torch.tensor(value))
    optimizer = torch.optim.AdamW([theirs], lr=sums.LR, weight_decay=sums.DECAY)
    zeros = {"a": jnp.zeros(5)}
    state = ({"a": jnp.asarray(value)}, zeros, zeros, jnp.int32(0))
    for gradient in gradients:
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        ours, *moments, count = state
        state = sums.adamw(ours, moments, count, {"a": jnp.asarray(gradient)})
    np.testing.assert_allclose(state[0]["a"], theirs.detach().numpy(), rtol=1e-6)


def test_a_step_adds_noise_of_the_scale_of_the_clip(sums, monkeypatch):
    """From the first moments of two steps with and without noise."""
    found = problem(sums, "vit-full-32")
    how = sums.How()
    rest = (found.frozen, found.x, found.y)
    noisy = jax.jit(found.step(how))(found.state(), *rest)
    monkeypatch.setattr(sums, "SIGMA", 0.0)
    silent = jax.jit(found.step(how))(found.state(), *rest)
    noise = np.concatenate([np.ravel(noisy[1][name] - silent[1][name]) for name in found.trained])
    assert noise.std() * 10 * found.batch == pytest.approx(sums.CLIP, rel=0.05)
    assert int(noisy[3]) == 1


def test_every_work_tries_the_whole_batch_and_microbatches(sums):
    for work in sums.WORKS:
        found = sums.ways(work)
        assert len({how.name for how in found}) == len(set(found)) == len(found)
        private = [how for how in found if how.private]
        assert {True, False} == {how.microbatch is None for how in private} == {how.nan_safe for how in private}
        assert all(work.batch % (how.microbatch or 1) == 0 for how in found)
        assert any(not how.private for how in found)


def test_the_table_takes_sordino_from_another_file(sums):
    works = {
        "vit-full-32": {
            "seconds": {"jax-privacy": [0.02, 0.03], "jax-privacy, cudnn": [0.02], "plain jax": [0.01]},
            "peak_bytes": {"jax-privacy": 2**31, "jax-privacy, cudnn": 2**30, "plain jax": None},
        }
    }
    ours = {"seconds": {"private, compiled, captured": [0.016]}, "peak_bytes": {"private, compiled": 3 * 2**30}}
    shown = sums.table(works, {"vit-full-32": ours})
    assert "| vit-full-32 | 16.0 | 20.0 | cudnn | 1.25 | 10.0 | 3.0 | 1.0 |" in shown
    assert "| vit-full-32 | – | 20.0 | cudnn | – | 10.0 | – | 1.0 |" in sums.table(works)


def test_works_that_are_not_measured_again_keep_their_figures(sums, tmp_path):
    path = tmp_path / "gpu_jax.json"
    first = {"provenance": {"command": "a", "commit": "b", "uncommitted_changes_in_src": False}}
    sums.write(path, first | {"works": {"vit-lora-64": {"trained": 1}}, "errors": {}})
    second = first | {"provenance": first["provenance"] | {"command": "c"}}
    sums.write(path, second | {"works": {"vit-full-32": {"trained": 2}}, "errors": {}})
    works = json.loads(path.read_text())["works"]
    assert list(works) == ["vit-full-32", "vit-lora-64"]
    assert works["vit-lora-64"]["provenance"]["command"] == "a"
