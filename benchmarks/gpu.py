"""What privacy costs on a GPU: one private step compared with the fastest plain step of the same network.

    PYTHONPATH=src python benchmarks/gpu.py --out results/gpu.json
    PYTHONPATH=src python benchmarks/gpu.py --device cpu --tiny      # does it run at all?

Networks have random weights, on which speed does not depend. `full`: all parameters are trained. `lora`: adapters of
rank 16 on Q, K and V and the head. Both steps run in bfloat16 autocast with float32 parameters and end with AdamW:

- plain: forward, mean loss, backward. It is tried eagerly, compiled (`torch.compile`), compiled from a trace of the
  whole eager pass (which keeps the attention kernels that the eager pass chooses), for a ResNet with inputs in
  channels-last order, for adapters with the masks of dropout that the private step has ("own masks"), and each of them
  as one CUDA graph with the optimizer. The fastest counts.
- Opacus, with `--opacus` (where its package is installed): gradients of single examples by its hooks, and its two
  passes ("ghost"), then noise and AdamW, each also as one CUDA graph. Adapters are pairs of linear layers, and
  parameters that lie in no layer it knows (the class token and the positions of a ViT) are frozen.
- private: `TorchModel.clipped_sum`, Gaussian noise. It is tried eagerly, with compiled passes (`compile=True`), and
  both as one CUDA graph with noise and optimizer.

Noise is `torch.randn` of the device for both speed and memory; certified runs draw it from a cipher. Steps are timed in
turns in one process per network; these processes compile side by side and measure one after another. Memory is the peak
of a step above what the process held before the step's own objects were built, without a CUDA graph: that of the
fastest private step over that of the fastest plain one. Where it exceeds MOST_MEMORY, a second line shows the fastest
private step that does not. Works in `--out` that are not measured again keep their figures; `--show` prints them.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parent))
import opacus_sums
from gpu_works import CLASSES, CLIP, LENGTH, SIGMA, WORKS, Work, interleaved, write
from provenance import provenance
from sordino.core import Shard
from sordino.models.compiled import Passes
from sordino.models.lora import GroupedLinear, LoRALinear, dropped_out, module_of
from sordino.models.nets import resnet18
from sordino.models.torch_model import TorchModel
from sordino.models.transformers import Rows, build, plain

MOST_MEMORY = 1.3  # private / plain
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # as adapters have it in frozen layers
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
TINY: dict[str, dict[str, Any]] = {
    "vit": {
        **{"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "intermediate_size": 48},
    },
    "roberta": TEXT,
}
Step = Callable[[], None]


class Bench:
    """One work on one device, with random data."""

    def __init__(self, work: Work, device: torch.device, tiny: bool) -> None:
        self.work, self.device = work, device
        self.batch = 4 if tiny else work.batch
        self.flat = self._model(TINY.get(work.network, {}) if tiny else {}, 16 if tiny else LENGTH, tiny)
        if work.network == "roberta":
            self.x = torch.randint(3, 99, (self.batch, self.flat.features), device=device).float()
        else:
            self.x = torch.randn(self.batch, self.flat.features, device=device)
        self.y = torch.randint(CLASSES, (self.batch,), device=device)

    def _model(self, sizes: dict[str, Any], length: int, tiny: bool) -> TorchModel:
        kind, name = torch.bfloat16, f"{self.work.network}-base-lora"
        if self.work.trained == "lora":
            options: dict[str, Any] = {"device": self.device, "chunk": 512, "mode": "tape"}
            return build(name, classes=CLASSES, length=length, autocast=kind, **options, **sizes)
        if self.work.network == "resnet":
            shape = (3, 8, 8) if tiny else (3, 32, 32)
            return TorchModel(resnet18(3, CLASSES).to(self.device), shape=shape, autocast=kind)
        network: Any = plain(name, classes=CLASSES, **(STILL | sizes))
        text = self.work.network == "roberta"
        side = network.config.image_size if not text else 0
        module = Rows(network, network.config.pad_token_id if text else None).to(self.device)
        return TorchModel(module, shape=(length,) if text else (3, side, side), autocast=kind)

    def adamw(self, values: list[Tensor]) -> torch.optim.Optimizer:
        words = {"fused": True, "capturable": True} if self.device.type == "cuda" else {}
        return torch.optim.AdamW(values, lr=1e-4, weight_decay=0.01, **words)

    def traced(self, *, channels_last: bool = False, own_masks: bool = False) -> Step:
        """A plain step from a trace of the forward and backward pass, compiled as one graph."""
        module, seed = self.copied(own_masks)
        seen = self.x.reshape(-1, *self.flat.shape)
        if channels_last:
            module, seen = module.to(memory_format=torch.channels_last), seen.to(memory_format=torch.channels_last)
        names, values = zip(*((name, p) for name, p in module.named_parameters() if p.requires_grad), strict=True)
        optimizer = self.adamw(list(values))

        def both(*tensors: Tensor) -> list[Tensor]:
            *plain, x, y, drawn = tensors
            for layer in module.modules():
                if isinstance(layer, OwnDropout):
                    layer.seed = drawn
            leaves = [p.detach().requires_grad_() for p in plain]
            with torch.enable_grad(), torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
                z = functional_call(module, dict(zip(names, leaves, strict=True)), (x,))
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(z.float(), y)
            found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            return [
                g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
                for g, p in zip(found, leaves, strict=True)
            ]

        inputs = [*(p.detach() for p in values), seen, self.y, seed]
        run = torch.compile(make_fx(both)(*inputs), dynamic=False)

        def step() -> None:
            with torch.no_grad():
                seed.random_()
                for p, g in zip(values, run(*inputs), strict=True):
                    p.grad = g
            optimizer.step()

        return step

    def copied(self, own_masks: bool) -> tuple[nn.Module, Tensor]:
        """The module in training mode, and the seed of its dropout, if that has masks of our own."""
        module = copy.deepcopy(module_of(self.flat)).train()
        seed = torch.zeros(2, dtype=torch.int32, device=self.device)
        layers = [layer for layer in module.modules() if own_masks and isinstance(layer, LoRALinear)]
        for number, layer in enumerate(layers):
            layer.dropout = OwnDropout(layer.dropout.p, seed, number)
        return module, seed

    def plain(self, *, compiled: bool, channels_last: bool = False, own_masks: bool = False) -> Step:
        module, seed = self.copied(own_masks)
        seen = self.x.reshape(-1, *self.flat.shape)
        if channels_last:
            module, seen = module.to(memory_format=torch.channels_last), seen.to(memory_format=torch.channels_last)
        values = [p for p in module.parameters() if p.requires_grad]
        optimizer = self.adamw(values)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
                z = module(x)
            return nn.functional.cross_entropy(z.float(), y)

        asked = torch.compile(loss) if compiled else loss

        def step() -> None:
            seed.random_()
            for p, g in zip(values, torch.autograd.grad(asked(seen, self.y), values, allow_unused=True), strict=True):
                p.grad = g if g is None or g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            optimizer.step()

        return step

    def private(self, *, compiled: bool, chunk: int | None = None) -> Step:
        flat = copy.copy(self.flat)
        flat._passes, flat.chunk = Passes() if compiled else None, chunk or flat.chunk
        theta = nn.Parameter(self.flat.init().to(self.device))
        optimizer, shard = self.adamw([theta]), Shard(self.x, self.y, torch.ones(self.batch, device=self.device))

        def noised(total: Tensor) -> Tensor:
            noise = torch.randn(total.shape, device=total.device)
            return (total.float() + SIGMA * CLIP * noise) / self.batch

        finish = torch.compile(noised, dynamic=False) if compiled else noised

        def step() -> None:
            theta.grad = finish(flat.clipped_sum(theta.detach(), shard, CLIP))
            optimizer.step()

        return step

    def opacus(self, mode: str) -> Step:
        module = served_by_opacus(copy.deepcopy(module_of(self.flat)).train())
        data = (self.x.reshape(-1, *self.flat.shape), self.y, CLIP)
        kind = torch.bfloat16
        values = [p for p in module.parameters() if p.requires_grad]
        if mode == "ghost":
            sums = opacus_sums.ghost(module, *data, autocast=kind)
        else:
            sums = opacus_sums.per_example(module, *data, mode, autocast=kind)
        optimizer = self.adamw(values)

        def step() -> None:
            for p, total in zip(values, sums(), strict=True):
                p.grad = (total.float() + SIGMA * CLIP * torch.randn_like(p)) / self.batch
            optimizer.step()

        return step

    def steps(self, opacus: bool = False) -> dict[str, Callable[[], Step]]:
        """Builders of all steps that are not captured."""
        makers: dict[str, Callable[[], Step]] = {
            "private": lambda: self.private(compiled=False),
            "private, compiled": lambda: self.private(compiled=True),
            "plain": lambda: self.plain(compiled=False),
            "plain, compiled": lambda: self.plain(compiled=True),
            "plain, traced": self.traced,
        }
        if self.work.network == "resnet":
            makers["plain, compiled, channels last"] = lambda: self.plain(compiled=True, channels_last=True)
            makers["plain, traced, channels last"] = lambda: self.traced(channels_last=True)
            makers["private, compiled, in halves"] = lambda: self.private(compiled=True, chunk=-(-self.batch // 2))
        if self.work.trained == "lora":
            makers["plain, compiled, own masks"] = lambda: self.plain(compiled=True, own_masks=True)
            makers["plain, traced, own masks"] = lambda: self.traced(own_masks=True)
        if opacus:
            makers |= {f"opacus, {mode}": lambda mode=mode: self.opacus(mode) for mode in ("hooks", "ghost")}
        return makers


class OwnDropout(nn.Module):
    """Dropout with the masks of a compiled private step, which follow from a seed."""

    def __init__(self, p: float, seed: Tensor, number: int) -> None:
        super().__init__()
        self.p, self.seed, self.number = p, seed, number

    def forward(self, x: Tensor) -> Tensor:
        return dropped_out(x, self.seed, self.number, self.p)


class Pair(nn.Module):
    """An adapted layer, with A and B as linear layers."""

    def __init__(self, layer: LoRALinear) -> None:
        super().__init__()
        self.base, self.dropout, self.scale = layer.base, layer.dropout, layer.adapter.scale
        self.down, self.up = linear(layer.adapter.lora_A), linear(layer.adapter.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.scale * self.up(self.down(self.dropout(x)))
        return adapted


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def served_by_opacus(module: nn.Module) -> nn.Module:
    """The module with layers that Opacus knows. Other trained parameters are frozen."""
    for name, child in list(module.named_children()):
        if isinstance(child, LoRALinear):
            setattr(module, name, Pair(child))
        elif isinstance(child, GroupedLinear):
            setattr(module, name, linear(child.weight, child.bias))
        else:
            served_by_opacus(child)
    known = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, nn.Embedding)
    if not isinstance(module, known):
        for p in module.parameters(recurse=False):
            p.requires_grad_(False)
    return module


# ------------------------------------------------------------------------------------------------------------- timing


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def clock(step: Step, count: int, device: torch.device) -> float:
    """Seconds per step."""
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - began) / count


def measured(make: Callable[[], Step], device: torch.device) -> tuple[Step, int | None]:
    """A step, and its peak of bytes above what was held before it was built."""
    empty(device)
    if device.type != "cuda":
        step = make()
        step()
        return step, None
    before = torch.cuda.memory_allocated(device)
    step = make()
    for _ in range(3):
        step()
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return step, torch.cuda.max_memory_allocated(device) - before


def captured(step: Step, device: torch.device) -> Step:
    """The step as one CUDA graph. The graph does not keep tensors that the step made, so it keeps the step."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    empty(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()

    def replay(kept: Step = step) -> None:
        graph.replay()

    return replay


def attempt(errors: dict[str, str], what: str, do: Callable[[], Any]) -> Any:
    """A part that fails is reported and left out; the others go on."""
    try:
        return do()
    except Exception as error:
        errors[what] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(f"  {what} failed: {errors[what]}", flush=True)
        traceback.print_exc(limit=-4)
        return None


def one_work(work: Work, options: argparse.Namespace, device: torch.device, errors: dict[str, str]) -> dict[str, Any]:
    """Times and memory of all steps of one work."""
    bench = Bench(work, device, options.tiny)
    steps: dict[str, Step] = {}
    memory: dict[str, int | None] = {}
    for name, make in bench.steps(options.opacus).items():
        if name in options.without:
            continue
        found = attempt(errors, f"{work.name} {name}", lambda make=make: measured(make, device))
        if found is not None:
            steps[name], memory[name] = found
    if device.type == "cuda" and not options.no_graphs:
        for name, step in list(steps.items()):
            title = f"{name}, captured"
            replay = attempt(errors, f"{work.name} {title}", lambda step=step: captured(step, device))
            if replay is not None:
                steps[title] = replay
    with turn(work, options.gate):
        timed = partial(clock, device=device)
        seconds = interleaved(steps, options.repetitions, timed, cpu=device.type == "cpu")
    if options.profile:
        for name in ("private, compiled", "plain, traced", "plain, traced, own masks"):
            if name in steps:
                profile(name, steps[name], device)
    trained = bench.flat.size
    del steps, bench
    empty(device)
    return {"trained": trained, "goal": work.goal, "seconds": seconds, "peak_bytes": memory}


@contextmanager
def turn(work: Work, gate: Path | None) -> Iterator[None]:
    """Wait until all processes have compiled, and then for the others' measurements."""
    if gate is None:
        yield
        return
    (gate / work.name).touch()
    while not all((gate / name).exists() for name in (gate / "works").read_text().split(",")):
        time.sleep(0.2)
    with (gate / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def side_by_side(asked: list[str], words: list[str]) -> dict[str, Any]:
    """One process per work; returns their results together."""
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder)
        (gate / "works").write_text(",".join(asked))
        processes, logs = {}, {}
        for name in asked:
            logs[name] = (gate / f"{name}.log").open("w")
            told = [*words, "--works", name, "--gate", str(gate), "--out", str(gate / f"{name}.json")]
            processes[name] = subprocess.Popen([sys.executable, *told], stdout=logs[name], stderr=subprocess.STDOUT)
        results: dict[str, Any] = {}
        while processes:
            time.sleep(0.5)
            for name in [name for name, process in processes.items() if process.poll() is not None]:
                code = processes.pop(name).returncode
                logs[name].close()
                (gate / name).touch()  # nobody waits for a process that failed
                print((gate / f"{name}.log").read_text(), flush=True)
                found = json.loads(path.read_text()) if (path := gate / f"{name}.json").exists() else {}
                results = found | {key: results.get(key, {}) | found.get(key, {}) for key in ("works", "errors")}
                if not found:
                    results["errors"][name] = f"exit {code}"
    return results


def profile(name: str, step: Step, device: torch.device) -> None:
    """Print the kernels that take the most time."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as found:
        step()
        wait(device)
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    times: dict[str, list[float]] = {}
    for event in found.key_averages():
        if device.type != "cuda" or event.device_type.name == "CUDA":
            kind = times.setdefault(re.sub(r"_\d+$", "", event.key), [0.0, 0])  # one name for the layers of a network
            kind[0] += getattr(event, order) / 1e3
            kind[1] += event.count
    print(f"  {name}: {sum(t for t, _ in times.values()):.2f} ms in {sum(n for _, n in times.values()):.0f} kernels")
    for key, (t, count) in sorted(times.items(), key=lambda item: -item[1][0])[:40]:
        print(f"    {t:8.2f} ms {count:5.0f} {key[:110]}")


# ------------------------------------------------------------------------------------------------------------- report


def summary(found: dict[str, Any], most_memory: float | None = None) -> dict[str, Any] | None:
    """The fastest plain and private step, their ratio, and the ratio of memory, up to a limit if there is one."""
    middle = {name: statistics.median(samples) for name, samples in found["seconds"].items()}
    peak = {name: found["peak_bytes"].get(name.removesuffix(", captured")) for name in middle}
    plain = min((n for n in middle if n.startswith("plain")), key=middle.__getitem__)
    memory = {n: peak[n] / peak[plain] if peak[n] and peak[plain] else None for n in middle if n.startswith("private")}
    names = [n for n, ratio in memory.items() if most_memory is None or (ratio is not None and ratio <= most_memory)]
    if not names:
        return None
    private = min(names, key=middle.__getitem__)
    return {
        "plain": plain,
        "plain_ms": 1e3 * middle[plain],
        "private": private,
        "private_ms": 1e3 * middle[private],
        "speed": middle[plain] / middle[private],
        "memory": memory[private],
    }


def table(works: dict[str, Any]) -> str:
    lines = [
        "| step | fastest plain | ms | fastest private | ms | private / plain speed | goal | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in works.items():
        first = summary(found)
        lean = summary(found, MOST_MEMORY) if first and (first["memory"] or 0) > MOST_MEMORY else None
        for s in filter(None, (first, lean)):
            memory, missed = f"{s['memory']:.2f}" if s["memory"] else "–", s["speed"] < found["goal"]
            lines.append(
                f"| {name} | {s['plain']} | {s['plain_ms']:.1f} | {s['private']} | {s['private_ms']:.1f} | "
                f"{s['speed']:.2f} | {found['goal']:.1f}{', missed' if missed else ''} | {memory} |"
            )
    return "\n".join(lines).replace(", captured", ", graph")


def beside_opacus(works: dict[str, Any]) -> str:
    """The fastest private step beside Opacus's: as its package runs them, and as CUDA graphs."""
    lines = [
        "| step | Sordino, ms | Opacus, ms | as a CUDA graph, ms | Sordino is faster by | GiB | Opacus, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in works.items():
        ms = {step: 1e3 * statistics.median(samples) for step, samples in found["seconds"].items()}
        kinds = ("private", "opacus")
        private, opacus = ({step: t for step, t in ms.items() if step.startswith(kind)} for kind in kinds)
        if not opacus:
            continue
        graphs = {step: t for step, t in opacus.items() if step.endswith(", captured")}
        plain = {step: t for step, t in opacus.items() if step not in graphs}
        best = [min(each, key=each.__getitem__) for each in (private, plain, graphs)]
        ratios = [ms[step] / ms[best[0]] for step in best[1:]]
        held = [found["peak_bytes"][step.removesuffix(", captured")] / 2**30 for step in (best[0], best[1])]
        times = " | ".join(f"{ms[step]:.1f}" for step in best)
        lines.append(f"| {name} | {times} | {ratios[0]:.1f}, {ratios[1]:.1f} | {held[0]:.1f} | {held[1]:.1f} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, few repetitions")
    parser.add_argument("--works", help=f"some of {', '.join(work.name for work in WORKS)}; default: all")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a private step")
    parser.add_argument("--without", action="append", default=[], help="a step to leave out, as in 'plain, compiled'")
    parser.add_argument("--opacus", action="store_true", help="Opacus's steps too")
    parser.add_argument("--together", action="store_true", help="all works in this process, one after another")
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)  # of a process among several
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of a file of results")
    options = parser.parse_args()
    if options.show:
        works = json.loads(options.show.read_text())["works"]
        print(beside_opacus(works) or table(works))
        return
    options.repetitions = options.repetitions or (2 if options.tiny else 15)
    asked = [work.name for work in WORKS] if options.works is None else options.works.split(",")
    if unknown := set(asked) - {work.name for work in WORKS}:
        parser.error(f"--works: {', '.join(sorted(unknown))} unknown; know {', '.join(work.name for work in WORKS)}")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # as tensors name it
    warnings.filterwarnings("ignore", message=".*weights are random")
    torch.manual_seed(0)
    shown = (f"results/{options.out.name}" if options.out and word == str(options.out) else word for word in sys.argv)
    about = provenance(" ".join(["python", *shown]))
    if len(asked) > 1 and not options.together:
        began = time.perf_counter()
        words = [word for word in sys.argv if not word.startswith(("--works=", "--out="))]
        # Graphs keep their memory, so the largest batches are measured by themselves.
        large = [name for name in asked if name.endswith("lora-256")]
        results: dict[str, Any] = {}
        for wave in ([name for name in asked if name not in large], *([name] for name in large)):
            found = side_by_side(wave, words) if wave else {}
            results = found | {key: results.get(key, {}) | found.get(key, {}) for key in ("works", "errors")}
        results["works"] = {name: results["works"][name] for name in asked if name in results["works"]}
        results |= {"provenance": about, "seconds": round(time.perf_counter() - began, 1)}
        if options.out:
            write(options.out, results)
        print(table(results["works"]))
        return
    began, errors, works = time.perf_counter(), dict[str, str](), dict[str, Any]()
    results = {
        "provenance": about,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "settings": {"rank": 16, "alpha": 32, "dropout": 0.1, "autocast": "bfloat16", "clip": CLIP, "sigma": SIGMA},
        "works": works,
        "errors": errors,
    }
    for work in WORKS:
        if work.name not in asked:
            continue
        found = attempt(errors, work.name, lambda work=work: one_work(work, options, device, errors))
        if found is not None:
            works[work.name] = found | {"summary": summary(found)}
            for name, samples in found["seconds"].items():
                found["seconds"][name] = [float(f"{value:.4g}") for value in samples]
                peak = found["peak_bytes"].get(name)
                print(f"  {name:40} {1e3 * statistics.median(samples):9.2f} ms {(peak or 0) / 2**30:7.2f} GiB")
        torch.compiler.reset()
        empty(device)
        results["seconds"] = round(time.perf_counter() - began, 1)
        if options.out:
            write(options.out, results)
        print(f"{work.name} done at {results['seconds']:.0f} s", flush=True)
    print(table(works))


if __name__ == "__main__":
    main()
