"""A search that pays for itself: the budget covers every run that was tried, and the scores they were chosen by.

- `public`: scores come from records that anybody may see. Every run trains on the private ones: k of them cost
  sqrt(k) times one.
- `count`: scores are noisy counts of correct validation records (sensitivity 1). A record trains or validates, never
  both, so that it pays for k runs or for k counts.
- `stopping`: a random number of runs with random settings, each with its noisy count, of which only the best is ever
  shown; under a trusted server alone.

The model handed out is that of the run chosen. Whoever trained it anew would pay again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sordino.core import Privacy, Trust, Unit
from sordino.data.sources import Dataset
from sordino.data.splits import generator
from sordino.errors import SordinoError, nearest
from sordino.methods import entry
from sordino.privacy.accounting import gaussian, selection
from sordino.privacy.mechanisms.random import Address, source
from sordino.privacy.participation import Participation, Sampling
from sordino.studies.grids import Grid, product
from sordino.training.batch import Trained, run_many
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

SELECTIONS = ("public", "count", "stopping")
SCORES = 2**16 - 2  # the query number under which counts are noised
UNPAID = "not paid for: the settings were chosen on validation records, and no budget covers that choice"


class Chosen(NamedTuple):
    trained: Trained
    options: dict[str, Any]
    account: dict[str, Any]  # what was promised, and how it was met; it may be shown to anybody


def search(
    values: dict[str, Any],
    grid: Grid,
    dataset: Dataset,
    how: str,
    *,
    mean: float = 16.0,
    device: str = "cpu",
    tick: Callable[[int], None] = lambda runs: None,
) -> Chosen:
    """Choose among the grid's settings within the (epsilon, delta) of `values`.

    dataset: its test part scores the runs; public records for `public`, else validation records (see `tune.validated`).
    mean: runs that `stopping` expects to make.
    """
    if how not in SELECTIONS:
        raise SordinoError(f"charge-tuning: '{how}' is unknown.{nearest(how, SELECTIONS)}")
    base = resolve(Spec.of(values))
    privacy, settings = base.privacy, list(product(grid))
    if not math.isfinite(privacy.epsilon) or base.noise is not None:
        raise SordinoError("epsilon: a search that pays needs a budget; give a finite epsilon.")
    if how != "public" and privacy.unit is Unit.USER:
        raise SordinoError(
            "unit: a user's records would train and validate both, and pay twice; score by public data instead."
        )
    if unknown := [key for key in grid if key not in entry(base.method_name).options]:
        raise SordinoError(
            f"--grid: {unknown[0]} changes the run, not the method; a search that pays tries options only."
        )
    if base.sampling != Sampling():
        raise SordinoError("batch: what k sampled runs cost together is not calibrated here; leave batch at full.")
    if privacy.unit is Unit.USER and privacy.trust is Trust.TRUSTED_SERVER and base.participation != Participation():
        raise SordinoError("participation: what k runs on secret cohorts cost together is not calibrated; use full.")
    if privacy.client_epsilon:
        raise SordinoError("client_epsilon: a search that pays knows one budget for all; leave it out.")
    if how == "stopping":
        settings, account, mu = _random(settings, privacy, mean, base.seed)
    else:
        mu = selection.each(gaussian.mu(privacy.epsilon, privacy.delta), len(settings))
        account = {"runs": len(settings), "sentence": _sentence(how, len(settings))}
    # A run's own (epsilon, delta) at the same delta has exactly this mu.
    own = gaussian.epsilon(mu, privacy.delta)
    specs = [
        Spec.of({**values, **options, "epsilon": own, "seed": _seed(base.seed, i)})
        for i, options in enumerate(settings)
    ]
    noiseless = how == "stopping"  # how many runs there were is a secret
    trained = run_many(specs, dataset, device=device, at=(), tick=(lambda runs: None) if noiseless else tick)
    counts = np.array([each.scores[max(each.scores)] for each in trained]) * len(dataset.y_test)
    if how != "public":
        # Where single messages are seen, each client's own count must carry the whole noise.
        parties = trained[0].plan.clients if privacy.trust is Trust.UNTRUSTED_SERVER else 1
        std = selection.score_std(mu) * math.sqrt(parties)
        counts = counts + std * source(base.seed).fresh().normal(Address(0, 0, SCORES), counts.shape)
        account["score_std"] = std
    best = int(np.argmax(counts))
    promise = {
        "how": how,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "mu_of_a_run": mu,
        "epsilon_of_a_run": own,
        "private": base.seed is None,
    }
    if base.seed is not None:
        promise["why_not_private"] = "the noise and the choice of runs follow from a seed; leave seed out"
    return Chosen(trained[best], settings[best], {**promise, **account})


def _seed(first: int | None, number: int) -> int | None:
    """The seed of one run; two runs with the same noise would cancel it in their difference."""
    return None if first is None else first + 1000 * number


def _sentence(how: str, runs: int) -> str:
    by = "public records" if how == "public" else "noisy counts of correct validation records, which are paid for too"
    return f"paid for: {runs} runs within the one budget, each with 1/√{runs} of its μ, chosen by {by}"


def _random(
    settings: list[dict[str, Any]], privacy: Privacy, mean: float, seed: int | None
) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """Settings to run, and what may be told of them: neither their number nor their scores."""
    assumes = selection.assumption(privacy.trust)
    law = selection.NegativeBinomial.of(mean)
    # Which runs were made is a secret, and with it their number: the system's secure randomness, or for a test a seed.
    rng = None if seed is None else generator(seed, "stopping")
    picks = range(selection.draw(law, rng))
    each = len(settings)
    chosen = [settings[secrets.randbelow(each) if rng is None else int(rng.integers(each))] for _ in picks]
    told = {
        "law": f"geometric, {mean:g} runs expected",
        "assumes": assumes,
        "sentence": "paid for: a random number of runs, of which only the best is shown (random stopping)",
    }
    return chosen, told, selection.calibrate(law, privacy.epsilon, privacy.delta)
