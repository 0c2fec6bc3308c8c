"""How much noise does each accountant ask for? Writes results/accounts.{json,md}.

    python benchmarks/accounts.py [--others PYTHON]
    python benchmarks/accounts.py --unequal      # prints the CPU seconds for 1,000 unequal clients, and writes nothing
    python benchmarks/accounts.py --survey 500   # the same for so many plans of all kinds, drawn from a fixed seed

Every accountant gets the same questions: a number of Gaussian releases, what is drawn at random, and epsilon and delta.
It answers with the least noise, as standard deviation over the bound on one record (or one client). The accountants are
this library's, dp-accounting's two, those of opacus and jax-privacy (in the environment of --others, because this
library needs neither), and published bounds. Each one is searched to 0.1 % of the noise; the others' search starts
around this library's answer. Seconds are of the process's CPU, for the whole search, without stored results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DELTA, TOLERANCE = 1e-5, 1e-3
SLOW = 0.4  # CPU seconds of a plan that a survey shows
ADD, REPLACE = "add-remove", "replace-one"
OTHERS = ("opacus RDP", "opacus PRV", "jax-privacy")


class Question(NamedTuple):
    """`times` Gaussian releases about all, or a part, of `population` records or clients."""

    name: str
    sampler: str  # full, poisson, fixed or allocation
    drawn: int
    population: int
    times: int
    epsilon: float
    adjacency: str

    @property
    def rate(self) -> float:
        return self.drawn / self.population


SHAPES = (
    ("all records", "full", 1, 1, 70, 1.0),
    ("all records", "full", 1, 1, 70, 4.0),
    ("records", "poisson", 16, 1000, 200, 1.0),
    ("records", "poisson", 16, 1000, 200, 4.0),
    ("records", "poisson", 16, 1000, 2000, 4.0),
    ("records", "fixed", 16, 1000, 200, 1.0),
    ("records", "fixed", 16, 1000, 200, 4.0),
    ("records", "fixed", 16, 1000, 2000, 4.0),
    ("clients", "poisson", 10, 200, 100, 2.0),
    ("clients", "fixed", 10, 200, 100, 2.0),
    ("records", "allocation", 16, 992, 200, 1.0),
    ("records", "allocation", 16, 992, 200, 4.0),
    ("records", "allocation", 16, 992, 1984, 4.0),
)
QUESTIONS = [Question(*shape, adjacency) for shape in SHAPES for adjacency in (ADD, REPLACE)]


def least(spent: Callable[[float], float], q: Question) -> float:
    """The least noise with which `spent` is at most epsilon: secants of log epsilon, from this library's answer."""
    noise, slope, points = ours(q), -1.5, list[tuple[float, float]]()
    while len(points) < 12:
        reached = spent(noise)
        if (1 - 2 * TOLERANCE) * q.epsilon <= reached <= q.epsilon:
            return noise
        points.append((math.log(noise), math.log(reached)))
        if len(points) > 1:
            (x, y), (x_before, y_before) = points[-1], points[-2]
            slope = min(-0.3, (y - y_before) / (x - x_before))
        noise *= math.exp((math.log(q.epsilon * (1 - TOLERANCE)) - points[-1][1]) / slope)
    raise RuntimeError(f"no noise was found for {q}")


# ------------------------------------------------------------------------------------------------------- accountants


def ours(q: Question) -> float:
    from sordino.core import Adjacency
    from sordino.privacy.accounting.samplers import Sampler
    from sordino.privacy.accounting.subsampled import multiplier

    return multiplier(q.rate, q.times, q.epsilon, DELTA, Adjacency(q.adjacency), Sampler(q.sampler))


def _dp_accounting(q: Question, by_losses: bool) -> Callable[[float], float] | None:
    """Its multiplier is std over the bound on one record, but for samples of a fixed size std over twice that."""
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    replaced = q.adjacency == REPLACE
    relation = dp.NeighboringRelation.REPLACE_ONE if replaced else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    supported = {"full": True, "poisson": by_losses or not replaced, "fixed": not by_losses and replaced}
    if not supported.get(q.sampler, False):
        return None
    orders = [*range(2, 24), *range(24, 120, 8)] if q.sampler == "fixed" else None

    def spent(noise: float) -> float:
        if q.sampler == "full":  # replacing a record moves the sum twice as far
            event: Any = dp.GaussianDpEvent(noise / (1 + replaced))
            plain = PLDAccountant() if by_losses else RdpAccountant()
            return float(plain.compose(event, q.times).get_epsilon(DELTA))
        if q.sampler == "poisson":
            event = dp.PoissonSampledDpEvent(q.rate, dp.GaussianDpEvent(noise))
        else:
            event = dp.SampledWithoutReplacementDpEvent(q.population, q.drawn, dp.GaussianDpEvent(noise / 2))
        accountant: Any = PLDAccountant(relation) if by_losses else RdpAccountant(orders, relation)
        return float(accountant.compose(event, q.times).get_epsilon(DELTA))

    return spent


def dp_pld(q: Question) -> float | None:
    spent = _dp_accounting(q, by_losses=True)
    return spent and least(spent, q)


def dp_rdp(q: Question) -> float | None:
    spent = _dp_accounting(q, by_losses=False)
    return spent and least(spent, q)


def _opacus(q: Question, mechanism: str) -> float | None:
    from opacus.accountants import create_accountant

    if q.adjacency == REPLACE or q.sampler in ("fixed", "allocation"):
        return None

    def spent(noise: float) -> float:
        accountant = create_accountant(mechanism=mechanism)
        accountant.history = [(noise, q.rate, q.times)]
        return float(accountant.get_epsilon(delta=DELTA))

    return least(spent, q)


def opacus_rdp(q: Question) -> float | None:
    return _opacus(q, "rdp")


def opacus_prv(q: Question) -> float | None:
    return _opacus(q, "prv")


def jax_privacy(q: Question) -> float | None:
    import jax_privacy.accounting as jp

    if q.sampler in ("full", "allocation") or (q.sampler == "poisson" and q.adjacency == REPLACE):
        return None
    method = jp.SamplingMethod.POISSON if q.sampler == "poisson" else jp.SamplingMethod.FIXED_BATCH_SIZE
    accountant = jp.DpsgdTrainingAccountant(dp_accountant_config=jp.PldAccountantConfig())

    def spent(noise: float) -> float:
        facts = {"num_samples": q.population, "delta": DELTA, "batch_size": q.drawn, "sampling_method": method}
        return float(accountant.compute_epsilon(q.times, jp.DpParams(noise_multipliers=noise, **facts)))

    return least(spent, q)


def lower(q: Question) -> float | None:
    """What no account can go below: the noise against one attack.

    Samples of a fixed size, where all other records are opposite to the one that is there (or is like them, or leaves
    its place empty). The same pair of distributions in every release; dp-accounting composes it under replace-one.
    """
    if q.sampler != "fixed" or q.adjacency == ADD:
        return None
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    def spent(noise: float) -> float:
        event = dp.PoissonSampledDpEvent(q.rate, dp.GaussianDpEvent(noise / 2))
        return float(PLDAccountant().compose(event, q.times).get_epsilon(DELTA))

    return least(spent, q)


ACCOUNTANTS: dict[str, Callable[[Question], float | None]] = {
    "Sordino": ours,
    "dp-accounting PLD": dp_pld,
    "dp-accounting RDP": dp_rdp,
    "opacus RDP": opacus_rdp,
    "opacus PRV": opacus_prv,
    "jax-privacy": jax_privacy,
    "one attack": lower,
}


def answers(name: str) -> list[dict[str, Any]]:
    """The noise and the seconds for every question that this accountant can answer."""
    ACCOUNTANTS[name](Question("", "poisson", 1, 50, 10, 1.0, ADD))  # imports, and compiled code, are not counted
    rows = []
    for number, question in enumerate(QUESTIONS):
        start = time.process_time()
        if name != "Sordino":
            ours(question)  # stored: where the search starts is not counted
            start = time.process_time()
        noise = ACCOUNTANTS[name](question)
        if noise is not None:
            rows.append({"q": number, "by": name, "noise": round(noise, 4), "s": round(time.process_time() - start, 2)})
    return rows


# --------------------------------------------------------------------------------------------------- unequal clients


def unequal() -> None:
    """CPU seconds of the calibration for 1,000 clients of 20 to 2,000 records with random allocation, without stored
    results. Cohorts are drawn before, and not counted."""
    import numpy as np

    import sordino as so
    from sordino.privacy import calibration

    sizes = tuple(np.exp(np.random.default_rng(0).uniform(math.log(20), math.log(2000), 1000)).astype(int).tolist())
    axes = (("untrusted-server", "secure-aggregation"), ("full", "fixed:200"), (ADD, REPLACE))
    all_seconds = []
    for trust, who, adjacency in itertools.product(*axes):
        for rounds, batch, epsilon in itertools.product((50, 500, 5000), (16, 4), (0.5, 2.0, 8.0)):
            forget()
            privacy = so.Privacy(epsilon, DELTA, adjacency=adjacency, trust=trust)
            plan = so.Plan(
                so.build("dp-fedgd"), rounds, sizes, privacy, participation=who, sampling=f"allocation:{batch}"
            )
            assert plan.cohorts
            start = time.process_time()
            noise = calibration.query_noises(plan)[0]
            all_seconds.append(time.process_time() - start)
            shown = f"{trust}, {who}, {adjacency}, {rounds} rounds, allocation:{batch}, epsilon {epsilon:g}"
            print(f"{shown}: {all_seconds[-1]:.2f} s, mean noise {noise.std.mean() / noise.scale:.4f}", flush=True)
    print(f"median {sorted(all_seconds)[len(all_seconds) // 2]:.2f} s, most {max(all_seconds):.2f} s")


def forget() -> None:
    """No result is stored: neither on disk nor in this process."""
    from sordino.privacy.accounting import allocation

    os.environ["SORDINO_CACHE"] = tempfile.mkdtemp()
    allocation._remembered.clear()
    modules = [module for name, module in sys.modules.items() if name.startswith("sordino.privacy")]
    for cached in (value for module in modules for value in list(vars(module).values())):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


SURVEYED: dict[str, tuple[Any, ...]] = {
    "clients": (1, 2, 20, 200, 1000, 1000),
    "sizes": ("equal", "two", "unequal"),
    "method": ("dp-fedgd", "dp-fedavg 2", "dp-fedavg 20", "dp-scaffold 3", "dp-fednew", "dp-ftrl", "dp-ftrl banded"),
    "epsilon": (0.1, 0.3, 1.0, 3.0, 8.0, 20.0),
    "asked": ("the same", "three", "different"),
    "delta": (1e-5, 1e-7, 1e-10),
    "rounds": (1, 10, 50, 200, 1000, 5000, 10_000),
    "sampling": ("full", *(f"{kind}:{drawn}" for kind in ("poisson", "fixed", "allocation") for drawn in (4, 16))),
    "participation": ("full", "fixed:1", "poisson:0.1", "poisson:0.01", "cyclic:2"),
    "trust": ("untrusted-server", "secure-aggregation", "trusted-server"),
    "adjacency": (ADD, REPLACE),
    "unit": ("record", "record", "person", "client"),
}


def surveyed(drawn: dict[str, Any], seed: int) -> Any:
    """The plan of these facts, with at most 10,000 releases of one client.

    Raises:
      SordinoError: the library refuses it.
    """
    import numpy as np

    import sordino as so

    rng, clients = np.random.default_rng(seed), drawn["clients"]
    sizes = {
        "equal": np.full(clients, 1000),
        "two": rng.choice([300, 2000], clients),
        "unequal": np.exp(rng.uniform(math.log(20), math.log(20_000), clients)).astype(int),
    }[drawn["sizes"]]
    shares = {
        "the same": np.ones(clients),
        "three": rng.choice([0.25, 0.5, 1.0], clients),
        "different": rng.uniform(0.1, 1.0, clients),
    }[drawn["asked"]]
    name, _, how = drawn["method"].partition(" ")
    options: dict[str, Any] = {"mechanism": how} if how.isalpha() else {"steps": int(how)} if how else {}
    asked = {} if drawn["asked"] == "the same" else {k: drawn["epsilon"] * float(s) for k, s in enumerate(shares)}
    privacy = so.Privacy(
        drawn["epsilon"], drawn["delta"], unit=drawn["unit"], adjacency=drawn["adjacency"], trust=drawn["trust"],
        client_epsilon=asked,
    )  # fmt: skip
    rounds = min(drawn["rounds"], 10_000 // options.get("steps", 1))
    return so.Plan(
        so.build(name, unit=drawn["unit"], **options), rounds, tuple(sizes.tolist()), privacy,
        participation=drawn["participation"], sampling=drawn["sampling"],
    )  # fmt: skip


def survey(number: int) -> None:
    """CPU seconds of the calibration of plans that are drawn from all of `SURVEYED`, without stored results; those
    that take long. Cohorts are drawn before, and not counted."""
    import random

    from sordino.errors import SordinoError
    from sordino.privacy import calibration

    draws, seconds = random.Random(0), list[float]()
    first = {key: values[0] for key, values in SURVEYED.items()} | {"clients": 20, "sizes": "unequal"}
    for sampling in SURVEYED["sampling"]:  # imports are not counted
        calibration.query_noises(surveyed(first | {"sampling": sampling}, 0))
    while len(seconds) < number:
        drawn, seed = {key: draws.choice(values) for key, values in SURVEYED.items()}, draws.randrange(2**32)
        try:
            plan = surveyed(drawn, seed)
            assert plan.cohorts
            forget()
            start = time.process_time()
            calibration.query_noises(plan)
        except SordinoError:
            continue
        seconds.append(time.process_time() - start)
        if seconds[-1] > SLOW:
            print(f"{seconds[-1]:.2f} s: " + ", ".join(f"{key} {value}" for key, value in drawn.items()), flush=True)
    ordered, above = sorted(seconds), sum(each > 0.5 for each in seconds)
    shown = f"median {ordered[number // 2]:.2f} s, 95 % below {ordered[number * 95 // 100]:.2f} s"
    print(f"{number} plans: {shown}, most {ordered[-1]:.2f} s, {above} above 0.5 s")


# ---------------------------------------------------------------------------------------- integers, correlated noise


def special() -> list[dict[str, Any]]:
    """Noise that no other accountant is asked about: integers under secure aggregation, and one stream of noise."""
    import sordino as so
    from sordino.privacy import calibration
    from sordino.privacy.accounting import gaussian
    from sordino.privacy.mechanisms.quantization import Integers

    rows: list[dict[str, Any]] = []
    for what, name, adjacency in (
        ("20 clients, integers", "dp-fedgd", ADD),
        ("20 clients, integers", "dp-fedgd", REPLACE),
        ("20 clients, correlated noise", "dp-ftrl", ADD),
        ("20 clients, correlated noise", "dp-ftrl", REPLACE),
    ):
        privacy = so.Privacy(1.0, DELTA, adjacency=adjacency, trust="secure-aggregation")
        start = time.process_time()
        integers = Integers(650) if "integers" in what else None
        plan = so.Plan(so.build(name), 70, (2500,) * 20, privacy, integers=integers)
        noise = calibration.summed_noise(plan)[0]
        seconds = time.process_time() - start
        level = calibration.query_noises(plan)[0]
        factor = 1.0
        if integers is None:  # the sensitivity of the whole stream, for dp-accounting's exact Gaussian
            from sordino.privacy.releases import release_counts

            factor = float(release_counts(plan, 0, level.query)[1].max())
        moved = (2 if adjacency == REPLACE else 1) * factor * math.sqrt(70 if integers is not None else 1)
        exact = moved / gaussian.mu(1.0, DELTA)
        rows.append(
            {
                "what": what,
                "adjacency": adjacency,
                "noise": round(noise, 3),
                "exact": round(exact, 3),
                "s": round(seconds, 2),
            }
        )
    return rows


# ------------------------------------------------------------------------------------------------------------ the page


def page(document: dict[str, Any]) -> str:
    rows, names = document["rows"], list(ACCOUNTANTS)
    lines = [
        "# Noise that each accountant asks for",
        "",
        f"`{document['provenance']['command']}`. Standard deviation over the bound on one record or client, at "
        "δ = 1e-5; in brackets the CPU seconds of the whole search, to 0.1 % of the noise (Sordino's from nothing, "
        "those of others from its answer). "
        "Less noise is better. A dash: the accountant has no answer. "
        + ", ".join(f"{name} {number}" for name, number in document["others"].items())
        + f", dp-accounting {document['provenance']['versions'].get('dp-accounting')}.",
        "",
        "| drawn | releases | ε | adjacency | " + " | ".join(names) + " |",
        "|---" * (4 + len(names)) + "|",
    ]
    for number, q in enumerate(QUESTIONS):
        found = {row["by"]: row for row in rows if row["q"] == number}
        cells = [f"{found[n]['noise']:.3f} ({found[n]['s']:.1f} s)" if n in found else "–" for n in names]
        drawn = q.name if q.sampler == "full" else f"{q.drawn} of {q.population:,} {q.name}, {q.sampler}"
        lines.append(f"| {drawn} | {q.times:,} | {q.epsilon:g} | {q.adjacency} | " + " | ".join(cells) + " |")
    lines += [
        "",
        *(note.format(more=_more(rows)) for note in NOTES),
        "",
        "## Integers and correlated noise",
        "",
    ]
    lines += [
        "70 rounds of 20 clients at ε = 1 under secure aggregation, noise of the sum over the clip. *Exact* is what "
        "Gaussian noise needs that is neither rounded to integers nor anything else, for the same releases (and "
        "for the stream, the same factors).",
        "",
        "| noise | adjacency | Sordino | exact | more than exact |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['what']} | {r['adjacency']} | {r['noise']:.3f} ({r['s']:.1f} s) | {r['exact']:.3f} | "
        f"{100 * (r['noise'] / r['exact'] - 1):.1f} % |"
        for r in document["special"]
    ]
    return "\n".join([*lines, ""])


def _more(rows: list[dict[str, Any]]) -> float:
    """How much more noise this library asks for than jax-privacy under replace-one, at most, in percent."""
    noise = {(row["q"], row["by"]): row["noise"] for row in rows}
    asked = [n for n, q in enumerate(QUESTIONS) if q.adjacency == REPLACE and (n, "jax-privacy") in noise]
    return max((100 * (noise[n, "Sordino"] / noise[n, "jax-privacy"] - 1) for n in asked), default=0.0)


NOTES = (
    "- *dp-accounting RDP* on samples of a fixed size is the bound of Wang, Balle and Kasiviswanathan (2019), which "
    "this library used before.",
    "- *jax-privacy* accounts for a fixed size as for a Poisson sample with twice the sensitivity: it composes each of "
    "the two directions by itself and takes the worse one. Under replace-one, a pair of data sets may act in one "
    "direction in some rounds and in the other in others. This library composes a pair that dominates one release in "
    "both directions at once (no smaller pair does), which needs more noise: up to {more:.0f} % in this table. Of "
    "mixtures of directions, those that were tried stay below jax-privacy's answer, but a proof for all is not known "
    "here. Under add-remove its answer covers replacement as well, and this library's does not.",
    "- *one attack* is a lower bound: the noise that is needed against the canary among opposite records. No valid "
    "account under replace-one can be below it.",
    "- opacus and dp-accounting's RDP have no answer under replace-one for Poisson samples.",
    "- *allocation*: each record is in exactly one of the 62 minibatches of an epoch. No accountant here but this "
    "library's was asked about it.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", metavar="PYTHON", help="an interpreter with opacus and jax-privacy")
    parser.add_argument("--only", choices=ACCOUNTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--unequal", action="store_true", help="only the CPU seconds for many unequal clients")
    parser.add_argument("--survey", type=int, metavar="N", help="only the CPU seconds for N plans of all kinds")
    arguments = parser.parse_args()
    if arguments.unequal or arguments.survey:
        survey(arguments.survey) if arguments.survey else unequal()
        return
    if arguments.only:
        print(json.dumps(answers(arguments.only)))
        return
    from provenance import provenance

    rows, versions = [], {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "SORDINO_CACHE": cache, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
        for name in ACCOUNTANTS:
            python = arguments.others if name in OTHERS else sys.executable
            if python is None:
                continue
            words = [python, __file__, "--only", name]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
            rows += json.loads(done.stdout.splitlines()[-1])
            print(name, "done", flush=True)
        for package in ("opacus", "jax-privacy") if arguments.others else ():
            code = f"from importlib.metadata import version; print(version('{package}'))"
            versions[package] = subprocess.run(
                [arguments.others, "-c", code], capture_output=True, text=True, check=True
            ).stdout.strip()
    made = provenance("python benchmarks/accounts.py" + " --others PYTHON" * bool(arguments.others))
    document = {"provenance": made, "others": versions, "rows": rows, "special": special()}
    (ROOT / "results" / "accounts.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    (ROOT / "results" / "accounts.md").write_text(page(document))


if __name__ == "__main__":
    main()
