"""`make bench`: how fast, in ratios that survive a noisy machine.

Ratios are compared with the committed figures of the same architecture before results/bench/ARCHITECTURE.json is
written, with the raw samples; see guard.py. `--accept` writes it whatever grew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sordino import Linear, Plan, Privacy, Records, build, simulate
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Address, Secure

sys.path.insert(0, str(Path(__file__).parent))
import guard
from provenance import provenance

CLIENTS, EACH, FEATURES, CLASSES = 20, 2_500, 64, 10
PAIRS = 101
RATIOS = (  # held against the committed figures: less is better
    "round_over_two_matmuls",
    "many_clients_over_few",
    "peak_over_data",
    "server_step_over_round",
    "five_local_steps_over_round",
    "fednew_fc_over_round",
    "fednew_over_product",
)


def cohort(clients: int = CLIENTS, records: int = CLIENTS * EACH) -> tuple[Linear, Records]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((records, FEATURES), dtype=np.float32)
    y = rng.integers(0, CLASSES, records)
    owner = np.repeat(np.arange(clients), records // clients)
    return Linear(FEATURES, CLASSES), Records.of(
        x, y, owner, copy=False
    )  # as commands do, whose arrays nobody else holds


def sofim(records: Records, rounds: int) -> Plan:
    return Plan(build("dp-fedsofim", clip=10.0), rounds, records.sizes, Privacy(1.0))


def train(source: Secure, model: Linear, records: Records) -> None:
    for _ in simulate.run(sofim(records, 70), model, records, source):
        pass


def clock(f) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def round_over_two_matmuls() -> dict:
    """A DP-FedSOFIM round against the two bare matrix products it needs, in interleaved pairs."""
    model, records = cohort()
    x, weight, residual = records.x, torch.randn(FEATURES, CLASSES), torch.randn(len(records.x), CLASSES)
    rounds = simulate.run(sofim(records, PAIRS + 10), model, records, Secure())
    for _ in range(10):
        next(rounds)
    bare, whole = [], []
    for _ in range(PAIRS):
        bare.append(clock(lambda: (x @ weight, x.T @ residual)))
        whole.append(clock(lambda: next(rounds)))
    ratio = [w / b for w, b in zip(whole, bare, strict=True)]
    return {"value": statistics.median(ratio), "samples": ratio, "matmul_seconds": bare, "round_seconds": whole}


@contextmanager
def one_thread() -> Iterator[None]:
    """Where another process takes a core, threads wait for each other, and ratios tell of that alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@one_thread()
def round_over_round(name: str, rounds: int, **options) -> dict:
    """Rounds of a method against rounds of DP-FedGD over the same 20 clients, interleaved."""
    model, records = cohort()
    plain = simulate.run(
        Plan(build("dp-fedgd", clip=10.0), rounds + 3, records.sizes, Privacy(1.0)), model, records, Secure()
    )
    theirs = Plan(build(name, **options), rounds + 3, records.sizes, Privacy(1.0))
    other = simulate.run(theirs, model, records, Secure())
    for _ in range(3):  # layout and factorisation are paid for once
        next(plain), next(other)
    ratio, base, whole = [], [], []
    for _ in range(rounds):
        base.append(clock(lambda: next(plain)))
        whole.append(clock(lambda: next(other)))
        ratio.append(whole[-1] / base[-1])
    return {"value": statistics.median(ratio), "samples": ratio, "fedgd_seconds": base, "round_seconds": whole}


def five_local_steps_over_round() -> dict:
    return round_over_round("dp-fedavg", 31, clip=10.0, steps=5)


def fednew_fc_over_round() -> dict:
    return round_over_round("dp-fednew-fc", 51, clip=10.0)


@one_thread()
def fednew_over_product() -> dict:
    """A DP-FedNew round, d = 650, against one float32 product (2,500 x 650) with its transpose a client."""
    model, records = cohort()
    rows = torch.randn(EACH, model.size)
    rounds = simulate.run(Plan(build("dp-fednew"), 9, records.sizes, Privacy(1.0)), model, records, Secure())
    next(rounds)
    ratio, base, whole = [], [], []
    for _ in range(8):
        base.append(clock(lambda: [rows.T @ rows for _ in range(CLIENTS)]))
        whole.append(clock(lambda: next(rounds)))
        ratio.append(whole[-1] / base[-1])
    return {"value": statistics.median(ratio), "samples": ratio, "product_seconds": base, "round_seconds": whole}


def whole_run() -> tuple[dict, dict]:
    """`sordino run` on digits from process start to exit, and `import torch` alone, interleaved."""
    runs, imports = [], []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(5):
            imports.append(clock(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True)))
            command = [
                sys.executable,
                "-m",
                "sordino.cli",
                "run",
                "--out",
                f"{folder}/{k}",
                "--json",
                f"{folder}/{k}.json",
            ]
            runs.append(clock(lambda c=command: subprocess.run(c, check=True, capture_output=True)))
    return (
        {"value": statistics.median(runs), "samples": runs},
        {"value": statistics.median(imports), "samples": imports},
    )


def many_clients_over_few() -> dict:
    """70 rounds with 10,000 clients x 5 records against 20 clients over the same 50,000, plan and layout included."""
    few, many = [], []

    def afresh(model: Linear, records: Records) -> None:
        train(Secure(), model, Records(records.x, records.y, records.starts))  # no cached layout

    small, large = cohort(CLIENTS), cohort(10_000)
    afresh(*small)
    for _ in range(7):
        few.append(clock(lambda: afresh(*small)))
        many.append(clock(lambda: afresh(*large)))
    ratio = [m / f for m, f in zip(many, few, strict=True)]
    return {"value": statistics.median(ratio), "samples": ratio, "few_seconds": few, "many_seconds": many}


def peak_over_data() -> dict:
    """(peak RSS - RSS after imports) / bytes of x, in a process of its own."""
    samples = []
    for _ in range(3):
        done = subprocess.run([sys.executable, __file__, "--memory"], check=True, capture_output=True, text=True)
        samples.append(json.loads(done.stdout))
    return {"value": statistics.median(s["peak_over_data"] for s in samples), "samples": samples}


def measure_memory() -> None:
    def status(name: str) -> int:
        """VmRSS or VmHWM in bytes. (getrusage's maximum would include that of the process we were started from.)"""
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    source = Secure()
    train(source, *cohort(CLIENTS, records=500))  # pages of libraries' code and threads' stacks are not data
    before = status("VmRSS")
    model, records = cohort()
    train(source, model, records)
    peak = status("VmHWM")
    data = records.x.numel() * records.x.element_size()
    print(json.dumps({"peak_over_data": (peak - before) / data, "before": before, "peak": peak, "data": data}))


def secure_normals_per_second() -> dict:
    """On one core: numpy and scipy draw on the calling thread."""
    source, n = Secure(), 4_000_000
    rates = [n / clock(lambda k=k: source.normal(Address(0, k, 0), (n,))) for k in range(7)]
    return {"value": statistics.median(rates), "samples": rates}


def server_step_over_round() -> dict:
    """The whole server side (fisher rule and step) against a round."""
    model, records = cohort()
    plan = sofim(records, PAIRS)
    rule = plan.method.stages[0].rule
    theta = torch.randn(model.size)
    state, g = rule.init(theta, calibration.stage_facts(plan, 0), ()), torch.randn(model.size)
    steps = [clock(lambda: rule.update(g, state, theta, 5)) for _ in range(PAIRS)]
    rounds = simulate.run(plan, model, records, Secure())
    whole = [clock(lambda: next(rounds)) for _ in range(PAIRS)]
    value = statistics.median(steps) / statistics.median(whole)
    return {"value": value, "step_seconds": steps, "round_seconds": whole}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help="write the new figures whatever grew")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)  # a process of its own, see above
    arguments = parser.parse_args()
    if arguments.memory:
        measure_memory()
        return 0
    origin = provenance("make bench")
    console = Console(stderr=True)
    with console.status("measuring") as status:
        results = {}
        for measure in (
            round_over_two_matmuls,
            many_clients_over_few,
            peak_over_data,
            secure_normals_per_second,
            server_step_over_round,
            five_local_steps_over_round,
            fednew_fc_over_round,
            fednew_over_product,
        ):
            status.update(measure.__name__)
            results[measure.__name__] = measure()
        status.update("whole runs")
        results["run_seconds"], results["import_torch_seconds"] = whole_run()
    limits = {
        "round_over_two_matmuls": "at most 2.0",
        "run_seconds": f"at most {3 * results['import_torch_seconds']['value'] + 2:.3g} (3 imports of torch + 2 s)",
        "many_clients_over_few": "at most 1.5",
        "peak_over_data": "at most 3",
        "secure_normals_per_second": "at least 1e7",
        "server_step_over_round": "at most 0.02",
        "five_local_steps_over_round": "at most 6.5",
        "fednew_fc_over_round": "at most 1.5",
        "fednew_over_product": "at most 2.5",
    }
    table = Table("figure", "median", "asked for")
    for name, result in results.items():
        table.add_row(name, f"{result['value']:.4g}", limits.get(name, ""))
    Console().print(table)
    document = {
        **{name: result["value"] for name, result in results.items()},
        "provenance": origin | {"threads": torch.get_num_threads()} | guard.machine(),
        "raw": results,
    }
    out = guard.place("bench")
    old, new = guard.ratios_of(guard.committed(out), RATIOS), guard.ratios_of(document, RATIOS)
    return guard.settle(out, document, old, new, arguments.accept)


if __name__ == "__main__":
    sys.exit(main())
