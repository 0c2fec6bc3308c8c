"""Recommend one of four estimators and predict its error, by the closed forms of `theory`.

The closed forms hold for a reference design: features have mean 0, variance 1 and little correlation, the true
parameter has length 1 (Poisson: 1/2), and all clients draw from one distribution. Other data have other errors. The
order of the methods and the safety of a Newton step depend mostly on sizes, dimension and budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sordino.errors import SordinoError
from sordino.privacy.accounting import gaussian
from sordino.studies import theory
from sordino.studies.estimation import DELTA, LABELS, setup

STEPS_TRIED = (4, 6, 8, 10, 14, 20, 30, 40, 60, 80, 100, 140, 200)
CLOSE = 1.1  # errors within this factor count as equal; then fewer rounds win
LEARNT = 0.25  # an estimate with an error above this share of |theta_0|^2 is useless


class Option(NamedTuple):
    """A method with its best number of steps."""

    method: str
    rounds: int
    settings: dict[str, int]
    terms: theory.ErrorTerms

    @property
    def error(self) -> float:
        return self.terms.cautious


def best(case: theory.Scenario, method: str) -> Option:
    """The best number of steps, and of rounds if the method leaves it open."""
    tries: dict[str, Callable[[int], list[Option]]] = {
        "fedsgd": lambda k: [Option(method, k, {}, theory.fedsgd(case, k))],
        "fedhybrid": lambda k: [
            Option(method, 1 + later, {"local_steps": k}, theory.fedhybrid(case, k, later)) for later in STEPS_TRIED
        ],
        "fedavg-gdp": lambda k: [Option(method, r, {"steps": k}, theory.fedavg(case, k, r)) for r in (1, 2)],
        "fednewton": lambda k: [Option(method, 2, {"local_steps": k}, theory.fednewton(case, k))],
    }
    return min((option for k in STEPS_TRIED for option in tries[method](k)), key=lambda option: option.error)


def advise(
    sizes: Sequence[int],
    dim: int,
    *,
    mu: float | None = None,
    epsilon: float | None = None,
    delta: float = DELTA,
    model: str = "logistic",
) -> dict[str, Any]:
    """The recommendation, the four methods' predicted errors, and when a Newton step is unsafe."""
    if not 1 <= dim <= 100_000:
        raise SordinoError(f"dim: {dim} must lie between 1 and 100,000.")
    if (mu is None) == (epsilon is None):
        raise SordinoError("epsilon: give either epsilon (with delta) or mu.")
    if (epsilon is not None and not epsilon > 0) or (mu is not None and not mu > 0):
        raise SordinoError("--epsilon, --mu: the budget must be above 0.")
    budget = gaussian.mu(epsilon, delta) if mu is None and epsilon is not None else float(mu or 0)
    at = setup(model, dim)
    world = theory.population(at.model, at.length)
    case = theory.Scenario(tuple(sizes), budget, world, at.clip, at.curvature_clip, at.lr)
    options = {name: best(case, name) for name in LABELS}
    safe = theory.safe(case)
    chosen = _choose([option for name, option in options.items() if safe or name != "fednewton"])
    statistical = float(world.times @ (1 / world.fisher)) / case.records
    return {
        "recommended": chosen.method,
        "learnt": chosen.error < LEARNT * at.length**2,
        "expected_error": chosen.error,
        "theta_squared": at.length**2,
        "why": _why(case, options, chosen, safe, statistical),
        "mu": budget,
        "epsilon": gaussian.epsilon(budget, delta) if math.isfinite(budget) else math.inf,
        "delta": delta,
        "model": model,
        "clients": len(case.sizes),
        "records": case.records,
        "smallest": min(case.sizes),
        "dim": dim,
        "constants": {"radius": at.model.radius, "clip": at.clip, "curvature_clip": at.curvature_clip, "lr": at.lr},
        "fednewton_safe": safe,
        "fednewton_needs_records": theory.needed_records(case),
        "without_privacy": statistical,
        "rate": theory.rate(dim, case.sizes, budget),
        "information_bound": theory.information_bound(case.sizes, budget, world.fisher, world.times),
        "methods": {
            name: {"error": o.error, "rounds": o.rounds, "settings": o.settings, "terms": theory.plain(o.terms)}
            for name, o in options.items()
        },
    }


def _choose(options: Sequence[Option]) -> Option:
    """The method with the least error; among nearly equal errors, the one with the fewest rounds."""
    least = min(option.error for option in options)
    return min((o for o in options if o.error <= CLOSE * least), key=lambda o: (o.rounds, o.error))


def _why(
    case: theory.Scenario, options: dict[str, Option], chosen: Option, safe: bool, statistical: float
) -> list[str]:
    name, parts = LABELS[chosen.method], chosen.terms
    of = {
        "statistical": "sampling, which no method can avoid",
        "privacy": "privacy noise",
        "bias": "bias: clients' own estimates are curved away from the truth, more so the fewer records they have",
        "optimisation": "steps not taken, each of which would cost budget",
    }
    most = of[max(of, key=lambda part: getattr(parts, part))]
    rounds = "one round" if chosen.rounds == 1 else f"{chosen.rounds} rounds"
    lines = [
        f"{name} is predicted to reach {chosen.error:.3g} in {rounds}; most of it is {most}.",
        f"Without privacy, all records in one place would reach {statistical:.3g}.",
    ]
    least = min((o for o in options.values() if safe or o.method != "fednewton"), key=lambda o: o.error)
    if least.method != chosen.method:
        equal = f"errors within {CLOSE - 1:.0%} count as equal, and then fewer rounds decide"
        lines.insert(1, f"{LABELS[least.method]} would reach {least.error:.3g} in {least.rounds}; {equal}.")
    needed, smallest = theory.needed_records(case), min(case.sizes)
    rule = f"a client needs n ≥ 8 √d Δ_H / (μ λ_min) = {needed:.3g} records for a safe Newton step"
    if safe:
        lines.append(f"FedNewton is safe here: {rule}, and the smallest has {smallest:,}.")
    else:
        lines.append(
            f"FedNewton is unsafe here: {rule}, and the smallest has {smallest:,}. The noise on its Hessian may then "
            "turn eigenvalues around, and its error exceeds any prediction."
        )
    if len(case.sizes) > case.records ** (2 / 3):
        lines.append("More clients than N^(2/3): local Newton steps are biased as local averages are.")
    bias = options["fedavg-gdp"].terms.bias
    if bias > options["fedavg-gdp"].error / 2:
        lines.append(f"FedAvg's error would be mostly bias ({bias:.3g}), which more clients do not average away.")
    return lines
