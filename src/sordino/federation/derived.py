"""The numbers that follow from the terms of a run: a party that computes others runs other code, and takes no part.

Every site computes noise, weights and integer steps from the terms. A site with another constant would add noise of
another size, or integers of another scale, and the certificates of all sites would be wrong. So the coordinator states
its numbers in the terms, and a site compares them with its own before anything is charged.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace

from sordino.errors import SordinoError
from sordino.federation.terms import Terms
from sordino.federation.testing import AgreedEvaluation
from sordino.privacy import calibration
from sordino.privacy.plan import Plan
from sordino.version import __version__

TOLERANCE = 1e-9  # relative: processors differ in the last bits
# Of noise for minibatches, whose search ends within 1e-3 of the least: last bits may decide where. An epsilon is then
# off by at most as much, which is within what `sordino verify` allows.
SAMPLED_TOLERANCE = 2e-3


def stated(terms: Terms) -> Terms:
    """The terms, with this package's version and the numbers that it derives from them.

    Raises:
      SordinoError: the plan cannot be calibrated.
    """
    return replace(terms, version=__version__, derived=derived_numbers(terms))


def derived_numbers(terms: Terms) -> dict[str, float]:
    """The bound, noise, weights (each summed over the sites) and integer step of every noised query."""
    numbers = _of_plan(terms.plan, "") | _of_masks(terms)
    return numbers | _of_plan(AgreedEvaluation(terms).plan, "evaluation ") if terms.evaluation else numbers


def check_derived(terms: Terms) -> None:
    """Compare the numbers of the terms with those that this package derives.

    Raises:
      SordinoError: they differ.
    """
    own, others = derived_numbers(terms), terms.derived
    searched = bool((terms.plan.rates < 1).any())
    for name in sorted(own.keys() | others.keys()):
        here, there = own.get(name), others.get(name)
        allowed = SAMPLED_TOLERANCE if searched and name.endswith((" noise", " step")) else TOLERANCE
        if here is None or there is None or not math.isclose(here, there, rel_tol=allowed):
            raise SordinoError(
                f"derived: the terms state {_text(there)} for '{name}', and this site computes {_text(here)}. The "
                f"coordinator runs sordino {terms.version or 'of an unknown version'}, this site {__version__}: "
                "install the same version at both."
            )


def _of_plan(plan: Plan, prefix: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for noise in calibration.query_noises(plan):
        parts = {"bound": noise.sensitivity, "noise": noise.std, "weight": noise.weight}
        numbers |= {f"{prefix}{noise.name} {part}": float(values.sum()) for part, values in parts.items()}
        numbers[f"{prefix}{noise.name} step"] = float(noise.step)
    return numbers


def _of_masks(terms: Terms) -> dict[str, float]:
    """The parameters of the graph of masks, where a run has too many sites for masks between all pairs."""
    graph = terms.plan.integers.graph(len(terms.names)) if terms.plan.integers is not None else None
    return {} if graph is None else {f"masks {name}": float(value) for name, value in asdict(graph).items()}


def _text(number: float | None) -> str:
    return "nothing" if number is None else f"{number:.12g}"
