"""The clipped sum of a small CNN on a CPU, in our modes and in Opacus's, and the plain gradient, interleaved.

Writes results/deep_cpu.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sordino.core import Shard
from sordino.models.nets import cnn
from sordino.models.per_example import laid_out
from sordino.models.torch_model import TorchModel

sys.path.insert(0, str(Path(__file__).parent))
import compact
from opacus_sums import ghost, per_example
from provenance import provenance

SHAPE, CLASSES, BATCH, CLIP, ROUNDS = (1, 28, 28), 10, 256, 1.0, 31
OURS = ("auto", "tape", "two-pass", "vmap")
OUT = Path(__file__).parent.parent / "results" / "deep_cpu.json"


def ours(net: nn.Module, x: Tensor, y: Tensor, mode: str) -> Callable[[], Tensor]:
    flat = TorchModel(net, shape=SHAPE, mode=mode)
    theta, shard = flat.init(), Shard(x.flatten(1), y, torch.ones(len(x)))
    return lambda: flat.clipped_sum(theta, shard, CLIP)


def plain(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The gradient without privacy."""
    copy = clone(net)

    def total() -> Tensor:
        loss = nn.functional.cross_entropy(copy(x), y, reduction="sum")
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(copy.parameters()))])

    return total


def opacus(net: nn.Module, x: Tensor, y: Tensor, mode: str, *, last: bool = False) -> Callable[[], Tensor]:
    """last: channels come last in memory, as in our own pass; Opacus leaves that to its user."""
    copy = clone(net)
    if last:
        for part in copy.modules():
            if isinstance(part, nn.Conv2d):
                part.weight.data = laid_out(part.weight.data)
    sums = ghost(copy, x, y, CLIP) if mode == "ghost" else per_example(copy, x, y, CLIP, mode)
    return lambda: torch.cat([part.flatten() for part in sums()])


def clone(net: nn.Module) -> nn.Module:
    copy = cnn(SHAPE, CLASSES)
    copy.load_state_dict(net.state_dict())
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # Opacus hooks warn of things that do not matter here
    torch.manual_seed(0)
    net, x, y = cnn(SHAPE, CLASSES), torch.randn(BATCH, *SHAPE), torch.randint(0, CLASSES, (BATCH,))
    rivals = {f"sordino {mode}": ours(net, x, y, mode) for mode in OURS}
    left_out = {}
    for mode, last in itertools.product(("hooks", "functorch", "ghost", "ew"), (False, True)):
        name = f"opacus {mode}{', channels last' * last}"
        try:
            one = opacus(net, x, y, mode, last=last)
            one()
            rivals[name] = one
        except Exception as error:  # it serves some layers, layouts and versions of PyTorch only
            left_out[name] = f"{type(error).__name__}: {error}"[:200]
    want = rivals["sordino vmap"]()
    apart = {name: float((f() - want).norm() / want.norm()) for name, f in rivals.items()}
    for name in [name for name, error in apart.items() if error >= 1e-3]:
        left_out[name] = f"its sum is wrong: it differs by {apart.pop(name):.2g} of its norm"
        del rivals[name]
    rivals["plain"] = plain(net, x, y)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(arguments.rounds):
        for name, f in rivals.items():
            began = time.perf_counter()
            f()
            times[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(each) for name, each in times.items()}
    theirs = {name: t for name, t in middle.items() if name.startswith("opacus")}

    def ratio(other: str, mine: str = "sordino auto") -> float:
        """Of times taken one after the other: what slows the machine slows both."""
        return statistics.median(b / a for a, b in zip(times[mine], times[other], strict=True))

    fastest = min(theirs, key=lambda name: theirs[name])
    results = {
        "examples_per_second": {name: BATCH / t for name, t in middle.items()},
        "auto_over_opacus": {name: ratio(name) for name in theirs},
        "auto_over_opacus_hooks": ratio("opacus hooks"),
        "auto_over_fastest_of_opacus": ratio(fastest),
        "fastest_of_opacus": fastest,
        "auto_over_plain": ratio("plain"),
    }
    console, table = Console(), Table("", "examples/s", "sordino auto is faster by")
    for name, rate in results["examples_per_second"].items():
        table.add_row(name, f"{rate:,.0f}", f"{ratio(name):.2f}")
    console.print(table)
    if arguments.dry:
        return
    command = "python benchmarks/deep.py" + (f" --rounds {arguments.rounds}" if arguments.rounds != ROUNDS else "")
    about = provenance(command) | {"opacus": version("opacus"), "threads": arguments.threads}
    setting = {"batch": BATCH, "shape": SHAPE, "parameters": sum(p.numel() for p in net.parameters()), "clip": CLIP}
    body = (
        {"provenance": about}
        | {"setting": setting, "difference_of_sums": apart, "left_out": left_out}
        | results
        | {"seconds": times}
    )
    OUT.write_text(compact.text(body), encoding="utf-8")


if __name__ == "__main__":
    main()
