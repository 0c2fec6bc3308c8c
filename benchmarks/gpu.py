"""What privacy costs on a GPU: a private LoRA step compared with a plain one, and clients batched together.

    PYTHONPATH=src python benchmarks/gpu.py --out results/gpu.json
    PYTHONPATH=src python benchmarks/gpu.py --device cpu --tiny      # does it run at all?

The models are ViT-Base, Swin-Base and RoBERTa-base with random weights (speed does not depend on them), adapters of
rank 16 on Q, K and V and a trained head, in bfloat16 autocast with float32 adapters, norms and noise:

- plain: forward, mean loss, backward, AdamW, by autograd through the same modules;
- private: `TorchModel.clipped_sum`, Gaussian noise, the same AdamW;
- one buffer: the same gradients of examples, gathered in one tensor: one norm, one product;
- vmap: `torch.func.vmap(grad)`, clipped and noised alike.

Steps are interleaved. They are timed again as captured CUDA graphs (the same kernels without their launches), each in
its own process, because a failed capture spoils the device's random numbers. "private, replayed" is
`TorchModel(capture=True)`, with noise and AdamW outside of its graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from sordino.core import Shard
from sordino.models import per_example
from sordino.models.lora import module_of
from sordino.models.torch_model import TorchModel
from sordino.models.transformers import build
from sordino.rules.blocks import block_means, expand

CLASSES, CLIP, SIGMA, LENGTH = 10, 0.1, 1.0, 128
FAMILIES = {"vit": "vit-base-lora", "swin": "swin-base-lora", "roberta": "roberta-base-lora"}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
TINY: dict[str, dict[str, Any]] = {
    "vit": {
        **{"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "intermediate_size": 48},
    },
    "swin": {
        **{"image_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16},
        **{"depths": [2, 2], "num_heads": [2, 4]},
    },
    "roberta": TEXT,
}
Step = Callable[[], None]


def summed(z: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z.float(), y, reduction="sum")


class Bench:
    """One model, and random data for it."""

    def __init__(self, family: str, device: torch.device, tiny: bool, capture: bool = False) -> None:
        self.family, self.device, self.tiny = family, device, tiny
        began = time.perf_counter()
        self.flat: TorchModel = build(
            FAMILIES[family],
            classes=CLASSES,
            length=16 if tiny else LENGTH,
            autocast=torch.bfloat16,
            device=device,
            chunk=512,
            mode="tape",
            capture=capture,
            **(TINY[family] if tiny else {}),
        )
        self.module = module_of(self.flat).train()
        self.names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.owned = per_example.owners(self.module, self.names)
        self.seconds = time.perf_counter() - began

    def rows(self, *lead: int) -> Tensor:
        """Flat rows: pixels, or token ids."""
        if self.family == "roberta":
            return torch.randint(3, 99, (*lead, self.flat.features), device=self.device).float()
        return torch.randn(*lead, self.flat.features, device=self.device)

    def cast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16)

    def shaped(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.flat.shape)

    def adamw(self, values: list[Tensor]) -> torch.optim.Optimizer:
        words = {"fused": True, "capturable": True} if self.device.type == "cuda" else {}
        return torch.optim.AdamW(values, lr=1e-4, weight_decay=0.01, **words)

    # ------------------------------------------------------------------------------------------------- one step each

    def plain(self, x: Tensor, y: Tensor, capture: bool = False) -> Step:
        """capture: gradients are asked for, instead of added up in leaves, which belong to a stream."""
        values = [p for p in self.module.parameters() if p.requires_grad]
        optimizer, seen = self.adamw(values), self.shaped(x)

        def step() -> None:
            self.module.train()
            optimizer.zero_grad(set_to_none=True)
            with self.cast():
                loss = summed(self.module(seen), y) / len(y)
            if capture:
                for p, g in zip(values, torch.autograd.grad(loss, values), strict=True):
                    p.grad = g
            else:
                loss.backward()
            optimizer.step()

        return step

    def noised(self, x: Tensor, total: Callable[[Tensor], Tensor]) -> Step:
        """A step on a sum of clipped gradients."""
        theta = nn.Parameter(self.flat.init().to(self.device))
        optimizer = self.adamw([theta])

        def step() -> None:
            gradient = total(theta.detach())
            theta.grad = gradient.add_(torch.randn_like(gradient), alpha=SIGMA * CLIP).div_(len(x)).to(theta.dtype)
            optimizer.step()

        return step

    def private(self, x: Tensor, y: Tensor) -> Step:
        shard = Shard(x, y, torch.ones(len(x), device=self.device))
        return self.noised(x, lambda theta: self.flat.clipped_sum(theta, shard, CLIP))

    def one_buffer(self, x: Tensor, y: Tensor) -> Step:
        seen = self.shaped(x)

        def total(theta: Tensor) -> Tensor:
            self.module.train()
            with self.cast():
                gradients = per_example.gradients(self.module, self.split(theta), seen, y, summed, self.owned)
            return clipped(self.gather(gradients))

        return self.noised(x, total)

    def by_vmap(self, x: Tensor, y: Tensor, chunk: int, whole: bool = False) -> Step:
        """whole: attention from matrix products, where the fused kernel would be looped over."""
        seen = self.shaped(x)

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            with self.cast():  # the backward pass without it: its thread does not know the type
                return summed(functional_call(self.module, params, (x.unsqueeze(0),)), y.unsqueeze(0))

        each = vmap(grad(loss), (None, 0, 0), randomness="different")

        def total(theta: Tensor) -> Tensor:
            self.module.train()
            params = self.split(theta)
            parts = zip(seen.split(chunk), y.split(chunk), strict=True)
            with sdpa_kernel(SDPBackend.MATH) if whole else nullcontext():
                gradients = [self.gather(each(params, *part)) for part in parts]
            return torch.stack([clipped(part) for part in gradients]).sum(0)

        return self.noised(x, total)

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        parts = theta.split([math.prod(shape) for shape in self.flat.shapes])
        return {n: p.view(shape) for n, p, shape in zip(self.names, parts, self.flat.shapes, strict=True)}

    def gather(self, gradients: dict[str, Tensor]) -> Tensor:
        parts = [gradients.pop(name).flatten(1) for name in self.names]
        kind = min((part.dtype for part in parts), key=lambda kind: torch.finfo(kind).bits)
        return torch.cat([part.to(kind) for part in parts], 1)

    # ----------------------------------------------------------------------------------------------- does it agree

    def agreement(self) -> dict[str, float]:
        """Relative distance of both private sums from autograd, an example at a time; dropout off."""
        rates = {part: part.p for part in self.module.modules() if isinstance(part, nn.Dropout)}
        for part in rates:
            part.p = 0.0
        x, y = self.rows(4), torch.arange(4, device=self.device) % CLASSES
        theta = self.flat.init().to(self.device)
        theta += 0.02 * torch.randn(self.flat.size, device=self.device)
        grads = []
        for k in range(4):
            params = {name: value.clone().requires_grad_() for name, value in self.split(theta).items()}
            with self.cast():
                loss = summed(functional_call(self.module, params, (self.shaped(x[k : k + 1]),)), y[k : k + 1])
            grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(params.values()))]))
        want = clipped(torch.stack(grads))
        shard = Shard(x, y, torch.ones(4, device=self.device))
        with self.cast():
            gradients = per_example.gradients(self.module, self.split(theta), self.shaped(x), y, summed, self.owned)
        sums = {
            "private": self.flat.clipped_sum(theta, shard, CLIP).to(theta.dtype),
            "one buffer": clipped(self.gather(gradients)),
        }
        for part, rate in rates.items():
            part.p = rate
        return {name: float((value - want).norm() / want.norm()) for name, value in sums.items()}


def clipped(G: Tensor) -> Tensor:
    """Sum over rows, each cut to norm CLIP; rows that are not finite count as zero. No look at a number: no waiting.

    Norms, factors and sums in float32, whatever G is held in: the fill casts as it goes.
    """
    norm = torch.linalg.vector_norm(G, dim=1, dtype=torch.float32)
    fine = torch.isfinite(norm)
    factor = torch.where(fine, CLIP / norm.clamp_min(CLIP), 0.0)
    return factor @ torch.where(fine.unsqueeze(1), G, norm.new_zeros(1))


# ------------------------------------------------------------------------------------------------------------- timing


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(step: Step, count: int, device: torch.device) -> float:
    """Seconds a step."""
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - began) / count


def interleaved(steps: dict[str, Step], count: int, repetitions: int, device: torch.device) -> dict[str, list[float]]:
    """Each in turn, again and again, so that a slow spell of the machine meets all of them."""
    for step in steps.values():
        clock(step, 3 if device.type == "cuda" else 1, device)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            samples[name].append(clock(step, count, device))
    return samples


def peak(step: Step, device: torch.device) -> int | None:
    """Bytes at the highest, everything that lives counted."""
    if device.type != "cuda":
        return None
    step()
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return torch.cuda.max_memory_allocated(device)


def few(step: Step, device: torch.device, options: argparse.Namespace) -> tuple[int | None, list[float]]:
    """Peak and a few samples of something slow."""
    return peak(step, device), [clock(step, 1, device) for _ in range(min(3, options.repetitions))]


def captured(step: Step, device: torch.device) -> Step:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    gc.collect()  # graphs of autograd that cycles keep alive
    empty(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()
    return graph.replay


def attempt(errors: dict[str, str], what: str, do: Callable[[], Any]) -> Any:
    """A part that fails is said and left out; the others go on."""
    try:
        return do()
    except Exception as error:
        errors[what] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(f"  {what} failed: {errors[what]}", flush=True)
        traceback.print_exc(limit=-4)
        return None


def empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def one_batch(bench: Bench, batch: int, options: argparse.Namespace, errors: dict[str, str]) -> dict[str, Any]:
    device, name = bench.device, f"{bench.family} {batch}"
    x, y = bench.rows(batch), torch.randint(CLASSES, (batch,), device=device)
    steps = {
        "plain": bench.plain(x, y),
        "private": bench.private(x, y),
        "one buffer": bench.one_buffer(x, y),
    }
    memory = {}
    for kind in list(steps):
        memory[kind] = attempt(errors, f"{name} {kind}", lambda kind=kind: peak(steps[kind], device))
        if f"{name} {kind}" in errors:
            del steps[kind]
        empty(device)
    seconds = interleaved(steps, times(batch, options), options.repetitions, device)
    result = {"batch": batch, "seconds": seconds, "peak_bytes": memory}

    if bench.family == "vit" and batch == options.batches[0] and not options.no_vmap:
        for kind, whole in (("vmap", False), ("vmap, math attention", True)):
            for chunk in (batch, 16, 4):
                failures: dict[str, str] = {}
                step = bench.by_vmap(x, y, min(chunk, batch), whole)
                measured = attempt(failures, f"{name} {kind} by {chunk}", lambda step=step: few(step, device, options))
                if measured is not None:
                    memory[kind], seconds[kind] = measured
                    result[f"{kind}, chunk"] = min(chunk, batch)
                    break
                errors |= failures
                empty(device)

    return result


KINDS = ("private, captured", "private, replayed", "plain, captured", "one buffer, captured")


def one_graph(bench: Bench, batch: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of a captured step, which is held until the last replay: a graph does not keep its tensors."""
    device = bench.device
    x, y = bench.rows(batch), torch.randint(CLASSES, (batch,), device=device)
    measured: dict[str, Any] = {}
    if kind == "private, replayed":
        step = replay = bench.private(x, y)
        theta, shard = bench.flat.init().to(device), Shard(x, y, torch.ones(batch, device=device))
        sums = []
        for _ in range(6):  # the first three are no replays
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(7)
                sums.append(bench.flat.clipped_sum(theta, shard, CLIP).to(theta.dtype))
        measured["distance from eager"] = float((sums[-1] - sums[0]).norm() / sums[0].norm())
        for _ in range(4):
            step()
    else:
        base = kind.split(",")[0]
        steps = {"private": bench.private, "one buffer": bench.one_buffer}
        step = bench.plain(x, y, capture=True) if base == "plain" else steps[base](x, y)
        replay = captured(step, device) if device.type == "cuda" else step
    measured["seconds"] = interleaved({kind: replay}, times(batch, options), options.repetitions, device)[kind]
    if device.type == "cuda":
        measured["bytes"] = torch.cuda.max_memory_reserved(device)  # a graph's memory is reserved, not allocated
    del replay, step
    return measured


def graph_worker(options: argparse.Namespace, device: torch.device) -> None:
    """Rows of one family, until one fails: after that the device's random numbers are spoilt."""
    family, *rows = options.graphs.split(";")
    for row in rows:
        batch, kind = row.split(":")
        bench = Bench(family, device, options.tiny, capture=kind == "private, replayed")
        empty(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        errors: dict[str, str] = {}
        do = partial(one_graph, bench, int(batch), kind, options)
        measured = attempt(errors, f"{family} {batch} {kind}", do)
        with options.out.open("a") as file:
            file.write(json.dumps({"batch": int(batch), "kind": kind, "found": measured, "errors": errors}) + "\n")
        if errors:
            return
        del bench, do
        gc.collect()
        empty(device)


def as_graphs(family: str, batches: list[dict[str, Any]], options: argparse.Namespace, errors: dict[str, str]) -> None:
    """Rows of one family in processes of their own, a new one after each failure."""
    rows = [f"{part['batch']}:{kind}" for part in batches for kind in KINDS]
    while rows:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.jsonl"
            words = [sys.executable, __file__, "--device", options.device, "--graphs", ";".join([family, *rows])]
            words += ["--out", str(out), "--repetitions", str(options.repetitions)] + ["--tiny"] * options.tiny
            done = subprocess.run(words, check=False)
            lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        for line in lines:
            part = next(part for part in batches if part["batch"] == line["batch"])
            errors |= line["errors"]
            if line["found"]:
                part["seconds"][line["kind"]] = line["found"].pop("seconds")
                part.setdefault("graphs", {})[line["kind"]] = line["found"]
        if len(lines) < len(rows) and not (lines and lines[-1]["errors"]):  # it died
            errors[f"{family} {rows[len(lines)]}"] = f"exit {done.returncode}"
            rows = rows[1:]
        rows = rows[len(lines) :]


def times(batch: int, options: argparse.Namespace) -> int:
    """Steps of one sample."""
    return 1 if options.tiny else max(1, 384 // batch)


# --------------------------------------------------------------------------------------------- a round of DP-FedAdamW


def local_rounds(bench: Bench, clients: int, steps: int, batch: int) -> dict[str, Step]:
    """DP-FedAdamW's clients: one after another, and all in one pass with an adapter each."""
    flat, device, kept = bench.flat, bench.device, 4 * batch
    x, y = bench.rows(clients, kept), torch.randint(CLASSES, (clients, kept), device=device)
    ones = torch.ones(clients, batch, device=device)
    start, blocks = flat.init().to(device), flat.blocks.to(device)
    direction, second = torch.zeros_like(start), torch.full((int(blocks.max()) + 1,), 1e-6, device=device)
    beta1, beta2, rate, decay, align, done = 0.9, 0.999, 3e-4, 0.01, 0.5, 20
    noise = (SIGMA * CLIP / batch) ** 2

    def compute(theta: Tensor, some: slice | int) -> tuple[Tensor, Tensor]:
        m, v = torch.zeros_like(theta), expand(second, blocks).expand_as(theta).clone()
        for k in range(1, steps + 1):
            rows = slice(batch * (k % 4), batch * (k % 4) + batch)
            shard = Shard(x[some, ..., rows, :], y[some, ..., rows], ones[some])
            g = flat.clipped_sum(theta, shard, CLIP).to(theta.dtype)
            g = g.add_(torch.randn_like(g), alpha=SIGMA * CLIP).div_(batch)
            m = m.mul_(beta1).add_(g, alpha=1 - beta1)
            v = v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = (v / (1 - beta2 ** (done + k)) - noise).clamp_min_(1e-8).sqrt_().add_(1e-8)
            theta = theta - rate * (m / (1 - beta1**k) / root + decay * theta + align * direction)
        return theta, block_means(v, blocks)

    def one_by_one() -> None:
        results = [compute(start, k) for k in range(clients)]
        torch.stack([theta for theta, _ in results]).mean(0)

    def together() -> None:
        theta, _ = compute(start.repeat(clients, 1), slice(0, clients))
        theta.mean(0)

    return {"one by one": one_by_one, "together": together}


def whole_round(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    clients, steps, batch = (3, 2, 4) if options.tiny else (10, 20, 16)
    kinds = local_rounds(bench, clients, steps, batch)
    memory = {name: peak(step, bench.device) for name, step in kinds.items()}  # warms up as well
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(1 if options.tiny else 3):
        for name, step in kinds.items():
            seconds[name].append(clock(step, 1, bench.device))
    return {"clients": clients, "steps": steps, "batch": batch, "seconds": seconds, "peak_bytes": memory}


# ------------------------------------------------------------------------------------------------------------- report


def table(results: dict[str, Any]) -> str:
    """ "of plain" and "of captured": examples/s over those of the plain step, eager and captured."""
    head = f"{'model':8} {'batch':>5}  {'step':24} {'examples/s':>11} {'ms':>9} {'of plain':>9} {'of captured':>11}"
    lines = [f"{head} {'GiB':>7} {'of plain':>9}"]
    for family, result in results["models"].items():
        for part in result["batches"]:
            middle = {name: statistics.median(samples) for name, samples in part["seconds"].items() if samples}
            for name, seconds in middle.items():
                bases = middle.get("plain"), middle.get("plain, captured")
                bytes_, plain = part["peak_bytes"].get(name), part["peak_bytes"].get("plain")
                lines.append(
                    f"{family:8} {part['batch']:5}  {name:24} {part['batch'] / seconds:11.1f} {1e3 * seconds:9.2f} "
                    + " ".join(
                        f"{base / seconds:{n}.3f}" if base else n * " " for n, base in zip((9, 11), bases, strict=True)
                    )
                    + (f" {bytes_ / 2**30:7.2f} {bytes_ / plain:9.3f}" if bytes_ and plain else "")
                )
            if slow := middle.get("vmap"):
                ours = ", ".join(f"{k} {slow / middle[k]:.2f}" for k in ("private", *KINDS[:2]) if k in middle)
                lines.append(f"{family:8} {part['batch']:5}  times vmap's speed: {ours}")
            for kind, graph in part.get("graphs", {}).items():
                if "distance from eager" in graph:
                    lines.append(f"{family:8} {part['batch']:5}  {kind}: {graph['distance from eager']:.2g} from eager")
    if result := results.get("round"):
        for name, samples in result["seconds"].items():
            seconds, bytes_ = statistics.median(samples), result["peak_bytes"][name]
            work = f"{result['clients']} clients x {result['steps']} steps x {result['batch']}, {name}"
            lines.append(f"round: {work}: {seconds:.2f} s" + (f", {bytes_ / 2**30:.2f} GiB" if bytes_ else ""))
    lines += [f"failed: {work}: {why}" for work, why in results["errors"].items()]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    known = {"python": platform.python_version()}
    for name in ("torch", "transformers", "numpy"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, few repetitions")
    parser.add_argument("--parts", default="vit,swin,roberta,round")
    parser.add_argument("--batches", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--no-vmap", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--graphs", help=argparse.SUPPRESS)  # rows for a process of its own
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.batches = options.batches or ([4, 8] if options.tiny else [64, 256])
    options.repetitions = options.repetitions or (2 if options.tiny else 15)
    parts = options.parts.split(",")
    if unknown := set(parts) - {*FAMILIES, "round"}:
        parser.error(f"--parts: {', '.join(sorted(unknown))} unknown; know {', '.join(FAMILIES)}, round")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # as tensors name it
    warnings.filterwarnings("ignore", message=".*weights are random")
    torch.manual_seed(0)
    if options.graphs:
        graph_worker(options, device)
        return
    began = time.perf_counter()

    errors: dict[str, str] = {}
    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": versions(),
        "settings": {"rank": 16, "alpha": 32, "dropout": 0.1, "autocast": "bfloat16", "clip": CLIP, "sigma": SIGMA},
        "models": {},
        "errors": errors,
    }

    def save() -> None:
        results["seconds"] = time.perf_counter() - began
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")

    benches: dict[str, Bench] = {}
    for family in FAMILIES:
        if family not in parts and not (family == "vit" and "round" in parts):
            continue
        bench = attempt(errors, family, lambda family=family: Bench(family, device, options.tiny))
        if bench is None:
            continue
        print(f"{family}: {bench.flat.size:,} trained, built in {bench.seconds:.1f} s", flush=True)
        if family in parts:
            model: dict[str, Any] = {"trained": bench.flat.size, "batches": []}
            results["models"][family] = model
            model["agreement"] = attempt(errors, f"{family} agreement", bench.agreement)
            print(f"  distance from autograd: {model['agreement']}", flush=True)
            for batch in options.batches:
                part = attempt(
                    errors,
                    f"{family} {batch}",
                    lambda bench=bench, batch=batch: one_batch(bench, batch, options, errors),
                )
                if part is not None:
                    model["batches"].append(part)
                empty(device)
                save()
                print(f"  batch {batch} done at {results['seconds']:.0f} s", flush=True)
        if family == "vit" and "round" in parts:
            results["round"] = attempt(errors, "round", lambda bench=bench: whole_round(bench, options))
            save()
            print(f"  round done at {results['seconds']:.0f} s", flush=True)
        benches[family] = bench
        empty(device)
    benches.clear()
    empty(device)
    for family in results["models"] if (device.type == "cuda" or options.tiny) and not options.no_graphs else ():
        batches = results["models"][family]["batches"]
        attempt(errors, f"{family} captured", lambda f=family, b=batches: as_graphs(f, b, options, errors))
        save()
        print(f"{family} captured at {results['seconds']:.0f} s", flush=True)
    save()
    print(table(results))


if __name__ == "__main__":
    main()
