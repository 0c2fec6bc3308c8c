"""jax-privacy's private step on a GPU, with the networks, batches, clip, noise and optimizer of `gpu.py`.

    python benchmarks/jax_sums.py --out results/gpu_jax.json
    python benchmarks/jax_sums.py --show results/gpu_jax.json --beside results/gpu.json
    python benchmarks/jax_sums.py --device cpu --tiny      # does it run at all?

It needs jax and jax-privacy, which no extra of Sordino installs. On a machine that has jax but no network, carry the
rest as a folder (5 MB, no compiled code) and name it in PYTHONPATH:

    pip install --target carried --no-deps --no-compile jax-privacy==2.0.0 optax==0.2.8 chex==0.1.92 \\
        dp-accounting==0.6.0 absl-py==2.5.1 attrs==23.2.0 toolz==1.2.0 typing-extensions==4.16.0

The networks are written in plain JAX with the shapes of PyTorch's. They compute in bfloat16 with float32 parameters;
norms, softmax and the loss in float32. Weights are random, on which speed does not depend. A step is one compiled
program with donated state that ends with AdamW:

- private: `jax_privacy.clipped_grad`, Gaussian noise of `jax.random`. Version 2.0.0 has one way to clip, a `vmap` over
  the examples of a microbatch. It is tried with the whole batch and with smaller microbatches, without its check for
  NaN, and with matrices cast to bfloat16 before instead of inside it, so that it holds gradients of single examples in
  16 bits ("16-bit"). Sums are float32 in each case.
- plain: the gradient of the mean loss.

Both are tried with the attention of XLA and of cuDNN. Convolutions are tried as such and as products of patches.
Random numbers are those of `rbg`, the faster generator, or of `threefry`, jax's default. Dropout is drawn by either,
or its mask is a function of a seed, as in Sordino's step ("own masks"). The fastest counts.

All steps of a work are compiled side by side, up to `--limit` seconds, and timed in turns. Works run one after another,
each in a process of its own, which is stopped after twice the limit. Memory is what XLA reports for the compiled step:
its temporary buffers and its state, without weights that are not trained and without the batch. Works in `--out` that
are not measured again keep their figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax_privacy import clipped_grad

sys.path.insert(0, str(Path(__file__).parent))
from gpu_works import CLASSES, CLIP, LENGTH, SIGMA, WORKS, Work, interleaved, write
from provenance import provenance

RANK, ALPHA, RATE = 16, 32.0, 0.1
LR, DECAY = 1e-4, 0.01
PAD = 1  # RoBERTa's token of padding
PACKAGES = ("jax", "jaxlib", "jax-privacy", "optax", "jax-cuda13-plugin", "jax-cuda12-plugin")
Tree = dict[str, Array]


USUAL = ("resnet-full-256", "vit-full-32", "vit-lora-64", "roberta-full-32", "roberta-lora-64")


class Sizes(NamedTuple):
    """Of a network."""

    side: int = 224
    patch: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    words: int = 50265
    positions: int = 514
    length: int = LENGTH


SIZES = {"vit": Sizes(), "roberta": Sizes(), "resnet": Sizes(side=32)}
TINY = {
    "vit": Sizes(16, 8, 32, 2, 4, 48),
    "roberta": Sizes(0, 0, 32, 2, 4, 48, 99, 514, 16),
    "resnet": Sizes(side=8),
}


class How(NamedTuple):
    """How a step computes. The private one has a microbatch or the whole batch."""

    private: bool = True
    attention: str = "xla"  # or cudnn
    patches: bool = False  # convolutions as products of patches
    random: str = "rbg"  # or threefry2x32
    own_masks: bool = False  # dropout by a function of a seed
    narrow: bool = False  # matrices are cast before clipped_grad
    microbatch: int | None = None
    nan_safe: bool = True

    @property
    def name(self) -> str:
        words = ["jax-privacy" if self.private else "plain jax"]
        words += [f"microbatch {self.microbatch}"] if self.microbatch else []
        words += ["cudnn"] if self.attention == "cudnn" else []
        words += ["patches"] if self.patches else []
        words += ["16-bit"] if self.narrow else []
        words += ["own masks"] if self.own_masks else []
        words += ["threefry"] if self.random != "rbg" else []
        words += ["no check for NaN"] if not self.nan_safe else []
        return ", ".join(words)


def ways(work: Work) -> list[How]:
    """All steps of a work, the likely fastest first."""
    half, quarter = work.batch // 2, work.batch // 4
    if work.network == "resnet":
        whole, plain = How(patches=True, narrow=True), How(private=False)
        return [
            *(whole, plain, whole._replace(microbatch=quarter), How(narrow=True), How(microbatch=work.batch // 16)),
            *(whole._replace(microbatch=half), plain._replace(patches=True), whole._replace(narrow=False)),
            *(whole._replace(microbatch=work.batch // 8), whole._replace(nan_safe=False), How(microbatch=quarter)),
            *(whole._replace(random="threefry2x32"), How()),
        ]
    lora = work.trained == "lora"
    best = How(attention="cudnn", narrow=not lora, own_masks=lora)
    usual = best._replace(own_masks=False) if lora else best._replace(narrow=False)  # as one writes it first
    plain = How(private=False, attention="cudnn", own_masks=lora)
    steps = [best, plain]
    steps += [each._replace(attention="xla") for each in steps]
    steps += [best._replace(microbatch=half), usual, usual._replace(attention="xla")]
    steps += [plain._replace(own_masks=False)] if lora else []
    steps += [best._replace(microbatch=half, attention="xla"), best._replace(microbatch=quarter)]
    steps += [best._replace(microbatch=quarter, attention="xla"), best._replace(nan_safe=False)]
    return [*steps, usual._replace(random="threefry2x32")]


# ----------------------------------------------------------------------------------------------------------- networks


def shapes(work: Work, sizes: Sizes) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The shapes of trained parameters and of frozen ones, as PyTorch has them."""
    if work.network == "resnet":
        return resnet_shapes(), {}
    width, found = sizes.width, dict[str, tuple[int, ...]]()

    def linear(name: str, inputs: int, outputs: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (width,)

    if work.network == "vit":
        found |= {"class": (1, 1, width), "positions": (1, (sizes.side // sizes.patch) ** 2 + 1, width)}
        found |= {"patches.weight": (width, 3, sizes.patch, sizes.patch), "patches.bias": (width,)}
    else:
        found |= {"words": (sizes.words, width), "types": (1, width), "positions": (sizes.positions, width)}
    norm("norm")
    adapters = dict[str, tuple[int, ...]]()
    for k in range(sizes.layers):
        for name in ("query", "key", "value"):
            adapters |= {f"{k}.{name}.A": (RANK, width), f"{k}.{name}.B": (width, RANK)}
        for name in ("query", "key", "value", "output"):
            linear(f"{k}.{name}", width, width)
        linear(f"{k}.up", width, sizes.hidden)
        linear(f"{k}.down", sizes.hidden, width)
        norm(f"{k}.norm_1")
        norm(f"{k}.norm_2")
    if work.network == "roberta":
        linear("head.dense", width, width)
    linear("head", width, CLASSES)
    if work.trained == "full":
        return found, {}
    heads = {name: found.pop(name) for name in list(found) if name.startswith("head")}
    return adapters | heads, found


def resnet_shapes() -> dict[str, tuple[int, ...]]:
    found = dict[str, tuple[int, ...]]()

    def convolution(name: str, inputs: int, outputs: int, side: int) -> None:
        found[f"{name}.weight"] = (outputs, inputs, side, side)
        found[f"{name}.norm.weight"] = found[f"{name}.norm.bias"] = (outputs,)

    convolution("stem", 3, 64, 3)
    inputs = 64
    for k, outputs in enumerate((64, 64, 128, 128, 256, 256, 512, 512)):
        convolution(f"{k}.first", inputs, outputs, 3)
        convolution(f"{k}.second", outputs, outputs, 3)
        if inputs != outputs:
            convolution(f"{k}.around", inputs, outputs, 1)
        inputs = outputs
    return found | {"head.weight": (CLASSES, 512), "head.bias": (CLASSES,)}


def first(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A first value: zero for biases and B, one for scales of norms."""
    if name.endswith((".bias", ".B")):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    scale = 0.02 if len(shape) == 2 and "head" not in name else 1 / math.sqrt(math.prod(shape[1:]))
    return np.float32(scale) * rng.standard_normal(shape, np.float32)


def linear(p: Tree, name: str, x: Array) -> Array:
    y = x @ p[f"{name}.weight"].astype(x.dtype).T
    return y + p[f"{name}.bias"].astype(x.dtype)


def layer_norm(p: Tree, name: str, x: Array, eps: float, kind: Any = None) -> Array:
    z = x.astype(jnp.float32)
    z = z - z.mean(-1, keepdims=True)
    z = z * jax.lax.rsqrt((z * z).mean(-1, keepdims=True) + eps)
    return (z * p[f"{name}.weight"] + p[f"{name}.bias"]).astype(kind or x.dtype)


def group_norm(p: Tree, name: str, x: Array, eps: float = 1e-5) -> Array:
    """Of images with channels last."""
    n, *side, channels = x.shape
    groups = min(32, channels // 4)
    z = x.astype(jnp.float32).reshape(n, *side, groups, channels // groups)
    z = z - z.mean((1, 2, 4), keepdims=True)
    z = z * jax.lax.rsqrt((z * z).mean((1, 2, 4), keepdims=True) + eps)
    z = z.reshape(x.shape) * p[f"{name}.weight"] + p[f"{name}.bias"]
    return z.astype(x.dtype)


def convolution(p: Tree, name: str, x: Array, stride: int, patches: bool) -> Array:
    """A convolution and its group norm. `patches` makes it one product."""
    weight = p[f"{name}.weight"].astype(x.dtype)
    side, pad = weight.shape[-1], weight.shape[-1] // 2
    if patches:
        high = (x.shape[1] - 1) // stride + 1
        padded = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        reach = (high - 1) * stride + 1
        shifted = [padded[:, i : i + reach : stride, j : j + reach : stride] for i in range(side) for j in range(side)]
        y = jnp.concatenate(shifted, -1) @ weight.transpose(2, 3, 1, 0).reshape(-1, len(weight))
    else:
        words = {"dimension_numbers": ("NHWC", "OIHW", "NHWC")}
        y = jax.lax.conv_general_dilated(x, weight, (stride, stride), [(pad, pad), (pad, pad)], **words)
    return group_norm(p, f"{name}.norm", y)


def dropped(x: Array, draw: Array, number: Array, own: bool) -> Array:
    """Dropout with a key, or with a mask that is a function of two random numbers."""
    if own:
        h = (jnp.arange(x.size, dtype=jnp.uint32) ^ draw[0]) * np.uint32(0x9E3779B1)
        h = (h ^ (h >> 15)) + (draw[1] ^ (number.astype(jnp.uint32) * np.uint32(0x85EBCA77)))
        h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE3D)
        keep = ((h ^ (h >> 16)) >= np.uint32(round(RATE * 2**32))).reshape(x.shape)
    else:
        bits = jax.random.bits(jax.random.fold_in(draw, number), x.shape, jnp.uint16)
        keep = bits >= np.uint16(round(RATE * 2**16))
    return jnp.where(keep, x * np.float32(1 / (1 - RATE)).astype(x.dtype), jnp.zeros_like(x))


def attended(q: Array, key: Array, value: Array, lengths: Array | None, implementation: str) -> Array:
    """The attention. The backward pass of cuDNN takes even lengths only, so that of a ViT is padded."""
    n, length, *_ = q.shape
    if implementation == "cudnn" and length % 2:
        q, key, value = (jnp.pad(z, ((0, 0), (0, 1), (0, 0), (0, 0))) for z in (q, key, value))
        lengths = jnp.full(n, length, jnp.int32)
    words: dict[str, Any] = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    return jax.nn.dot_product_attention(q, key, value, implementation=implementation, **words)[:, :length]


@partial(jax.jit, static_argnames=("heads", "how", "after", "eps", "rate"))
def block(
    p: Tree,
    x: Array,
    lengths: Array | None,
    draw: Array | None,
    k: Array,
    heads: int,
    how: How,
    after: bool,
    eps: float,
    rate: float,
) -> Array:
    """One layer of a transformer, with norms before the products or after. One trace serves all layers."""

    def projected(number: int, name: str, z: Array) -> Array:
        y = linear(p, name, z)
        if f"{name}.A" in p:
            inner = z if not rate or draw is None else dropped(z, draw, 3 * k + number, how.own_masks)
            y = y + (ALPHA / RANK) * (inner @ p[f"{name}.A"].astype(z.dtype).T @ p[f"{name}.B"].astype(z.dtype).T)
        return y.reshape(*y.shape[:-1], heads, -1)

    z = x if after else layer_norm(p, "norm_1", x, eps)
    q, key, value = (projected(i, name, z) for i, name in enumerate(("query", "key", "value")))
    z = attended(q, key, value, lengths, how.attention)
    x = x + linear(p, "output", z.reshape(x.shape))
    x = layer_norm(p, "norm_1", x, eps) if after else x
    z = x if after else layer_norm(p, "norm_2", x, eps)
    x = x + linear(p, "down", jax.nn.gelu(linear(p, "up", z), approximate=False))
    return layer_norm(p, "norm_2", x, eps) if after else x


def logits(
    work: Work, sizes: Sizes, p: Tree, x: Array, draw: Array | None, how: How, kind: Any, rate: float = RATE
) -> Array:
    """Of rows as `gpu.py` has them. Products are computed in `kind`."""
    n = len(x)
    if work.network == "resnet":
        z = x.reshape(n, 3, sizes.side, sizes.side).transpose(0, 2, 3, 1).astype(kind)
        z = jax.nn.relu(convolution(p, "stem", z, 1, how.patches))
        for k in range(8):
            stride = 2 if k in (2, 4, 6) else 1
            around = convolution(p, f"{k}.around", z, stride, how.patches) if stride == 2 else z
            z = jax.nn.relu(convolution(p, f"{k}.first", z, stride, how.patches))
            z = jax.nn.relu(convolution(p, f"{k}.second", z, 1, how.patches) + around)
        return linear(p, "head", z.astype(jnp.float32).mean((1, 2)).astype(kind)).astype(jnp.float32)
    text = work.network == "roberta"
    lengths = None
    if text:
        ids = x.astype(jnp.int32)
        kept = ids != PAD
        places = jnp.cumsum(kept, 1) * kept + PAD
        lengths = kept.sum(1).astype(jnp.int32)  # padding is at the end
        gathered = [
            p[name].at[at].get(mode="promise_in_bounds") for name, at in (("words", ids), ("positions", places))
        ]
        z = gathered[0].astype(jnp.float32) + gathered[1] + p["types"]
        z = layer_norm(p, "norm", z, 1e-5, kind)
    else:
        across, patch = sizes.side // sizes.patch, sizes.patch
        z = x.reshape(n, 3, across, patch, across, patch).transpose(0, 2, 4, 1, 3, 5).astype(kind)
        weight = p["patches.weight"].astype(kind).reshape(sizes.width, -1)
        z = z.reshape(n, across * across, -1) @ weight.T + p["patches.bias"].astype(kind)
        start = jnp.broadcast_to(p["class"].astype(kind), (n, 1, sizes.width))
        z = jnp.concatenate([start, z], 1) + p["positions"].astype(kind)
    for k in range(sizes.layers):
        own = {name.partition(".")[2]: value for name, value in p.items() if name.startswith(f"{k}.")}
        eps = 1e-5 if text else 1e-12
        z = block(own, z, lengths, draw, jnp.int32(k), sizes.heads, how, text, eps, rate)
    if text:
        return linear(p, "head", jnp.tanh(linear(p, "head.dense", z[:, 0]))).astype(jnp.float32)
    return linear(p, "head", layer_norm(p, "norm", z[:, 0], 1e-12)).astype(jnp.float32)


# -------------------------------------------------------------------------------------------------------------- steps


class Problem:
    """One work with random weights and data, and its steps."""

    def __init__(self, work: Work, tiny: bool = False, kind: Any = jnp.bfloat16) -> None:
        self.work, self.kind = work, kind
        self.batch = 4 if tiny else work.batch
        self.sizes = (TINY if tiny else SIZES)[work.network]
        rng = np.random.default_rng(0)
        trained, frozen = (
            {name: first(name, shape, rng) for name, shape in each.items()} for each in shapes(work, self.sizes)
        )
        self.trained = {name: jnp.asarray(value) for name, value in trained.items()}
        self.frozen = cast({name: jnp.asarray(value) for name, value in frozen.items()}, kind)
        if work.network == "roberta":
            self.x = jnp.asarray(rng.integers(3, 99, (self.batch, self.sizes.length)).astype(np.float32))
        else:
            self.x = jnp.asarray(rng.standard_normal((self.batch, 3 * self.sizes.side**2), np.float32))
        self.y = jnp.asarray(rng.integers(0, CLASSES, self.batch))

    @property
    def size(self) -> int:
        return sum(value.size for value in self.trained.values())

    @property
    def draws(self) -> bool:
        """Whether the network has dropout."""
        return self.work.trained == "lora"

    def loss(self, trained: Tree, frozen: Tree, x: Array, y: Array, draw: Array | None, how: How) -> Array:
        if draw is not None and not how.own_masks:
            draw = jax.random.wrap_key_data(draw, impl=how.random)
        z = logits(self.work, self.sizes, frozen | trained, x, draw, how, self.kind)
        return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1).mean()

    def draw(self, key: Array, how: How, single: bool) -> Array | None:
        """What dropout follows from: of each example, or of the batch."""
        if not self.draws:
            return None
        if how.own_masks:
            return jax.random.bits(key, (self.batch, 2) if single else (2,), jnp.uint32)
        # As plain numbers, because the microbatches of optax cannot reshape keys.
        return jax.random.key_data(jax.random.split(key, self.batch) if single else key)

    def sums(self, how: How, clip: float = CLIP) -> Callable[..., Tree]:
        """jax-privacy's clipped sum of gradients, of trained, frozen, x, y and draws of single examples."""

        def loss(trained: Tree, frozen: Tree, x: Array, y: Array, *draws: Array) -> Array:
            return self.loss(trained, frozen, x, y, draws[0][0] if draws else None, how)

        words = {"microbatch_size": how.microbatch, "nan_safe": how.nan_safe, "dtype": jnp.float32}
        numbers = (2, 3, 4) if self.draws else (2, 3)
        summed = clipped_grad(loss, l2_clip_norm=clip, batch_argnums=numbers, **words)

        def sums(trained: Tree, frozen: Tree, x: Array, y: Array, draws: Array | None) -> Tree:
            seen = cast(trained, self.kind) if how.narrow else trained
            found: Tree = summed(seen, frozen, x, y, *(() if draws is None else (draws,)))
            return found

        return sums

    def step(self, how: How) -> Callable[..., Any]:
        """A step: state, frozen, x, y -> state."""
        sums = self.sums(how)

        def step(state: Any, frozen: Tree, x: Array, y: Array) -> Any:
            trained, *moments, count = state
            key = jax.random.fold_in(jax.random.key(1, impl=how.random), count)
            dropout, noise = jax.random.split(key)
            draw = self.draw(dropout, how, single=how.private)
            if how.private:
                found = sums(trained, frozen, x, y, draw)
                keys = jax.random.split(noise, len(found))
                gradient = {
                    name: (total + SIGMA * CLIP * jax.random.normal(keys[i], total.shape)) / self.batch
                    for i, (name, total) in enumerate(found.items())
                }
            else:
                gradient = jax.grad(self.loss)(trained, frozen, x, y, draw, how)
            return adamw(trained, moments, count, gradient)

        return step

    def state(self) -> Any:
        """Parameters, AdamW's moments and the number of steps."""
        zeros = [{name: jnp.zeros_like(value) for name, value in self.trained.items()} for _ in range(2)]
        return {name: value.copy() for name, value in self.trained.items()}, *zeros, jnp.int32(0)


def cast(tree: Tree, kind: Any) -> Tree:
    """Matrices and kernels in another type."""
    return {name: value.astype(kind) if value.ndim > 1 else value for name, value in tree.items()}


def adamw(trained: Tree, moments: list[Tree], count: Array, gradient: Tree) -> Any:
    count = count + 1
    t = count.astype(jnp.float32)
    first = {name: 0.9 * m + 0.1 * gradient[name] for name, m in moments[0].items()}
    second = {name: 0.999 * v + 0.001 * gradient[name] ** 2 for name, v in moments[1].items()}
    right = 1 / (1 - 0.9**t), 1 / (1 - 0.999**t)
    after = {
        name: p * (1 - LR * DECAY) - LR * first[name] * right[0] / (jnp.sqrt(second[name] * right[1]) + 1e-8)
        for name, p in trained.items()
    }
    return after, first, second, count


# ------------------------------------------------------------------------------------------------------------- timing


class Clock:
    """Runs compiled steps on one state, which each of them takes and gives back."""

    def __init__(self, problem: Problem) -> None:
        self.state = problem.state()
        self.rest = (problem.frozen, problem.x, problem.y)

    def seconds(self, step: Callable[..., Any], count: int) -> float:
        """Per step."""
        jax.block_until_ready(self.state)
        began = time.perf_counter()
        for _ in range(count):
            self.state = step(self.state, *self.rest)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began) / count


def peak(compiled: Any) -> int | None:
    """Bytes of the state and of temporary buffers."""
    found = compiled.memory_analysis()
    return None if found is None else int(found.temp_size_in_bytes + found.output_size_in_bytes)


def one_work(work: Work, options: argparse.Namespace, errors: dict[str, str]) -> dict[str, Any]:
    """Times and memory of all steps of one work."""
    began = time.perf_counter()
    problem = Problem(work, options.tiny)
    clock = Clock(problem)
    wanted = [how for how in ways(work) if not options.only or any(part in how.name for part in options.only)]
    if options.tiny:
        wanted = [
            how._replace(microbatch=how.microbatch and max(1, how.microbatch * 4 // work.batch)) for how in wanted
        ]
    if jax.default_backend() != "gpu":
        wanted = [how._replace(attention="xla") for how in wanted]
    futures: dict[str, Future[tuple[Any, float]]] = {}

    def failed(name: str, error: BaseException) -> None:
        text = str(error).splitlines()[0][:300] if str(error) else ""
        errors[f"{work.name} {name}"] = f"{type(error).__name__}: {text}"
        print(f"  {name} failed: {errors[f'{work.name} {name}']}", flush=True)
        traceback.print_exception(error, limit=-3)

    def compiled(lowered: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        return lowered.compile(), time.perf_counter() - start

    pool = ThreadPoolExecutor(max_workers=options.threads)
    for how in dict.fromkeys(wanted):
        if time.perf_counter() - began > options.limit:
            errors[f"{work.name} {how.name}"] = f"not begun within {options.limit:g} s"
            continue
        try:
            step = jax.jit(problem.step(how), donate_argnums=0)
            futures[how.name] = pool.submit(compiled, step.lower(clock.state, *clock.rest))
        except Exception as error:
            failed(how.name, error)
    print(f"  traced {len(futures)} steps in {time.perf_counter() - began:.0f} s", flush=True)
    wait(futures.values(), timeout=max(1.0, options.limit - (time.perf_counter() - began)))
    pool.shutdown(wait=False, cancel_futures=True)
    steps, memory, compile_seconds = dict[str, Any](), dict[str, int | None](), dict[str, float]()
    for name, future in futures.items():
        if not future.done() or future.cancelled():
            errors[f"{work.name} {name}"] = f"not compiled within {options.limit:g} s"
            print(f"  {name} is not compiled within {options.limit:g} s", flush=True)
            continue
        try:
            step, taken = future.result()
            clock.state = jax.block_until_ready(step(clock.state, *clock.rest))
        except Exception as error:
            failed(name, error)
            clock = Clock(problem)  # the state was donated
            continue
        steps[name], memory[name], compile_seconds[name] = step, peak(step), round(taken, 1)
    unfinished = sum(not future.done() for future in futures.values())
    if unfinished:
        errors[f"{work.name} timing"] = f"{unfinished} steps were still being compiled while the others were timed"
    if not steps:
        raise RuntimeError("no step was compiled in time; see the other errors")
    compiled_at = time.perf_counter() - began
    seconds = interleaved(steps, options.repetitions, clock.seconds, cpu=jax.default_backend() == "cpu")
    if not all(bool(np.isfinite(np.asarray(value)).all()) for value in clock.state[0].values()):
        errors[f"{work.name} values"] = "a parameter is not finite after the steps"
    print(f"  compiled in {compiled_at:.0f} s, timed in {time.perf_counter() - began - compiled_at:.0f} s", flush=True)
    return {
        "trained": problem.size,
        "seconds": seconds,
        "peak_bytes": memory,
        "compile_seconds": compile_seconds,
    }


# ------------------------------------------------------------------------------------------------------------- report


def fastest(found: dict[str, Any], kind: str) -> tuple[str, float, int | None] | None:
    """The fastest step whose name begins with the kind, its milliseconds and its bytes."""
    middle = {name: statistics.median(samples) for name, samples in found["seconds"].items() if name.startswith(kind)}
    if not middle:
        return None
    best = min(middle, key=middle.__getitem__)
    return best, 1e3 * middle[best], found["peak_bytes"].get(best.removesuffix(", captured"))


def table(works: dict[str, Any], beside: dict[str, Any] | None = None) -> str:
    """The fastest steps. `beside` holds the works of a file of `gpu.py`, with Sordino's steps."""
    lines = [
        "| step | Sordino, ms | jax-privacy, ms | its mode | Sordino is faster by | plain jax, ms "
        "| GiB | jax-privacy, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def shown(value: float | None, places: int = 1) -> str:
        return "–" if value is None else f"{value:.{places}f}"

    for name, found in works.items():
        theirs, plain = fastest(found, "jax-privacy"), fastest(found, "plain")
        ours = fastest(beside[name], "private") if beside and name in beside else None
        mode = (theirs[0].removeprefix("jax-privacy").removeprefix(", ") or "whole batch") if theirs else "–"
        ratio = theirs[1] / ours[1] if theirs and ours else None
        held = [each[2] / 2**30 if each and each[2] else None for each in (ours, theirs)]
        lines.append(
            f"| {name} | {shown(ours and ours[1])} | {shown(theirs and theirs[1])} | {mode} | {shown(ratio, 2)} | "
            f"{shown(plain and plain[1])} | {shown(held[0])} | {shown(held[1])} |"
        )
    return "\n".join(lines)


def about(command: str) -> dict[str, Any]:
    found = provenance(command)
    for name in PACKAGES:
        try:
            found["versions"][name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"xla_flags": os.environ.get("XLA_FLAGS", "")}


def one_after_another(asked: list[str], options: argparse.Namespace, words: list[str], results: dict[str, Any]) -> None:
    """One process per work, so that one that fails or hangs costs only its own figures."""
    began = time.perf_counter()
    for name in asked:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            told = [sys.executable, *words, "--works", name, "--together", "--out", str(path)]
            try:
                code = subprocess.run(told, timeout=2 * options.limit, check=False).returncode
                problem = f"exit {code}" if code else ""
            except subprocess.TimeoutExpired:
                problem = f"stopped after {2 * options.limit:g} s"
            found = json.loads(path.read_text()) if path.exists() else {}
        results |= {key: found[key] for key in ("device", "settings") if key in found}
        results["works"] |= found.get("works", {})
        results["errors"] |= found.get("errors", {}) | ({name: problem} if problem else {})
        results["seconds"] = round(time.perf_counter() - began, 1)
        if options.out:
            write(options.out, results)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models, few repetitions")
    known = [work.name for work in WORKS]
    parser.add_argument("--works", help=f"some of {', '.join(known)}; default: {', '.join(USUAL)}")
    parser.add_argument("--only", action="append", default=[], help="steps whose name contains this; may be repeated")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for compiling one work; default: 60")
    parser.add_argument("--threads", type=int, default=8, help="steps that are compiled at once; default: 8")
    parser.add_argument("--together", action="store_true", help="all works in this process")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of a file of results")
    parser.add_argument("--beside", type=Path, help="a file of gpu.py, whose private steps the table shows")
    options = parser.parse_args()
    options.repetitions = options.repetitions or (2 if options.tiny else 7)
    options.asked = list(USUAL) if options.works is None else options.works.split(",")
    if unknown := set(options.asked) - set(known):
        parser.error(f"--works: {', '.join(sorted(unknown))} unknown; know {', '.join(known)}")
    return options


def main() -> None:
    options = parsed()
    beside = json.loads(options.beside.read_text())["works"] if options.beside else None
    if options.show:
        print(table(json.loads(options.show.read_text())["works"], beside))
        return
    shown = (f"results/{options.out.name}" if options.out and word == str(options.out) else word for word in sys.argv)
    results: dict[str, Any] = {"provenance": about(" ".join(["python", *shown])), "works": {}, "errors": {}}
    if len(options.asked) > 1 and not options.together:
        words = [word for word in sys.argv if not word.startswith(("--works=", "--out="))]
        one_after_another(options.asked, options, words, results)
        print(table(results["works"], beside))
        return
    jax.config.update("jax_platforms", options.device)
    results["device"] = jax.devices()[0].device_kind
    results["settings"] = {"rank": RANK, "alpha": ALPHA, "dropout": RATE, "kind": "bfloat16", "clip": CLIP}
    results["settings"]["sigma"] = SIGMA
    began = time.perf_counter()
    for work in WORKS:
        if work.name not in options.asked:
            continue
        print(work.name, flush=True)
        try:
            found = one_work(work, options, results["errors"])
        except Exception as error:
            results["errors"][work.name] = f"{type(error).__name__}: {error}"
            traceback.print_exc(limit=-4)
            continue
        results["works"][work.name] = found
        for name, samples in found["seconds"].items():
            found["seconds"][name] = [float(f"{value:.4g}") for value in samples]
            held = (found["peak_bytes"][name] or 0) / 2**30
            taken = found["compile_seconds"][name]
            print(f"  {name:52} {1e3 * statistics.median(samples):9.2f} ms {held:7.2f} GiB, compiled in {taken:.0f} s")
        results["seconds"] = round(time.perf_counter() - began, 1)
        if options.out:
            write(options.out, results)
    print(table(results["works"], beside), flush=True)
    sys.stderr.flush()
    os._exit(0)  # a step that is still being compiled is not waited for


if __name__ == "__main__":
    main()
