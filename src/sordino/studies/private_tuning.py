"""Private tuning: the budget covers every run of the search, and the scores that choose among them.

- `public`: public records score the runs. Every run trains on the private records, so k runs cost sqrt(k) times the mu
  of one.
- `count`: scores are noisy counts of correct validation records (sensitivity 1). A record is used for training or
  for validation, never for both, so it pays for k runs or for k counts.
- `stopping`: a random number of runs with random settings, each scored by a noisy count. Only the best run is shown.
  It needs a trusted server.

The result is the model of the chosen run. Training it again would cost privacy again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sordino.core import Privacy, Trust, Unit
from sordino.data.sources import Dataset, load
from sordino.data.splits import generator
from sordino.errors import SordinoError, check_known
from sordino.evidence.certificate import certificate, of_runs
from sordino.methods import entry
from sordino.privacy.accounting import gaussian, selection
from sordino.privacy.accounting.events import Gaussian, Release
from sordino.privacy.mechanisms.random import Address, source
from sordino.privacy.participation import Participation, Sampling
from sordino.studies.grids import Grid, product, size
from sordino.studies.tune import validated
from sordino.training import shared_ledger
from sordino.training.batch import Trained, run_many
from sordino.training.evaluate import task_of_data
from sordino.training.metrics import goodness, ranking_metric
from sordino.training.resolved import ResolvedSpec, resolve
from sordino.training.run import join_ledger, prepare_resolved
from sordino.training.spec import Spec
from sordino.version import __version__

SELECTIONS = ("public", "count", "stopping")
EXPECTED_RUNS = 16.0  # of random stopping, where no number is given
SCORES = 2**16 - 2  # the query number under which counts are noised
UNPAID = "not paid for: the settings were chosen on validation records, and no budget covers that choice"


class Chosen(NamedTuple):
    trained: Trained
    options: dict[str, Any]
    account: dict[str, Any]  # the guarantee and how it was met; public


def check(base: ResolvedSpec, grid: Grid, how: str, metric: str | None = None) -> None:
    """Refuse a search whose cost is not proved, before anything is trained.

    Args:
        base: The run, without the options of the grid.
        grid: The values to try.
        how: One of `SELECTIONS`.
        metric: What the runs are ranked by; None for that of the task.

    Raises:
        SordinoError: The search cannot be paid for.

    Example:
        >>> check(resolve(Spec.of({"method": "dp-fedgd", "epsilon": "inf"})), {"lr": (1.0, 2.0)}, "count")
        Traceback (most recent call last):
        sordino.errors.SordinoError: epsilon: private tuning needs a budget; give a finite epsilon.
    """
    check_known("charge-tuning", how, SELECTIONS)
    privacy = base.privacy
    if how != "public" and metric not in (None, "accuracy"):
        raise SordinoError(
            f"--metric: --charge-tuning {how} chooses by noisy counts of correct records, whose sensitivity is 1, and "
            f"not by {metric}; use accuracy, or --charge-tuning public."
        )
    if not math.isfinite(privacy.epsilon) or base.noise is not None:
        raise SordinoError("epsilon: private tuning needs a budget; give a finite epsilon.")
    if how != "public" and privacy.unit is Unit.CLIENT:
        raise SordinoError(
            "unit: at client level a client's records would both train and validate, and pay twice; use "
            "--charge-tuning public."
        )
    if how != "public" and privacy.unit is Unit.PERSON:
        raise SordinoError(
            "unit: noisy counts of correct records are calibrated for single records, and a person may have several; "
            "use --charge-tuning public."
        )
    if unknown := [key for key in grid if key not in entry(base.method_name).options]:
        raise SordinoError(
            f"--grid: {unknown[0]} changes the run, not the method; private tuning varies only options of the method."
        )
    if base.sampling != Sampling():
        raise SordinoError("batch: the joint cost of k sampled runs is not calibrated; use batch = full.")
    if privacy.unit is Unit.CLIENT and privacy.trust is Trust.TRUSTED_SERVER and base.participation != Participation():
        raise SordinoError("participation: the joint cost of k runs on secret cohorts is not calibrated; use full.")
    if privacy.client_epsilon:
        raise SordinoError("client_epsilon: private tuning has one budget for all clients; leave it out.")
    if how == "stopping":
        selection.assumption(privacy.trust)


def scoring(base: ResolvedSpec, dataset: Dataset, public: str | None, validation: float = 0.1) -> Dataset:
    """The data of a search. Its test part scores the runs: the records of the file `public`, or else a part of the
    training records, on which no run trains then."""
    if public is None:  # at record level, where whose record it is must not decide which others are held out
        return validated(dataset._replace(person=None), validation)
    if Path(public).resolve() == Path(base.source.name).resolve():
        raise SordinoError(f"--public: '{public}' is the private data; give a file of public records.")
    other = load(
        public,
        label=base.source.label,
        public_stats=base.source.public_stats,
        normalize=base.source.normalize,
    )
    if other.classes != dataset.classes or other.x_train.shape[1] != dataset.x_train.shape[1]:
        raise SordinoError(f"--public: '{public}' has other features or classes than the data; use the same ones.")
    return dataset._replace(x_test=other.x_train, y_test=other.y_train, tested=None)


def search(
    values: dict[str, Any],
    grid: Grid,
    dataset: Dataset,
    how: str,
    *,
    metric: str | None = None,
    runs: int | None = None,
    device: str = "cpu",
    tick: Callable[[int], None] = lambda runs: None,
) -> Chosen:
    """Choose among the grid's settings within the (epsilon, delta) of `values`.

    dataset: its test part scores the runs. It holds public records for `public`, else validation records
      (`scoring`).
    metric: what public records score the runs by. Counts of correct records are accuracy, and no other metric has
      their sensitivity of 1.
    runs: so many settings of the grid are tried, drawn at random without looking at the data (default: all). For
      `stopping`, the expected number of runs (default: `EXPECTED_RUNS`).
    """
    base = resolve(Spec.of(values))
    check(base, grid, how, metric)
    if runs is not None and runs < 1:
        raise SordinoError(f"--paid-runs: {runs} must be at least 1.")
    metric = ranking_metric(metric if how == "public" else "accuracy", task_of_data(dataset))
    privacy, settings = base.privacy, list(product(grid))
    if how == "stopping":
        settings, account, mu = _random(settings, privacy, runs or EXPECTED_RUNS, base.seed)
    else:
        listed, settings = len(settings), _drawn(settings, runs, base.seed)
        mu = selection.each(gaussian.mu(privacy.epsilon, privacy.delta), len(settings))
        sentence = _sentence(how, len(settings), listed)
        account = {"runs": len(settings), "settings": listed, "sentence": sentence}
    # The epsilon of one run, at the same delta, that has exactly this mu.
    epsilon_per_run = gaussian.epsilon(mu, privacy.delta)
    specs = [
        Spec.of({**values, **options, "epsilon": epsilon_per_run, "seed": _seed(base.seed, i)})
        for i, options in enumerate(settings)
    ]
    secret_count = how == "stopping"  # the number of runs is a secret
    shown = (lambda runs: None) if secret_count else tick
    trained = run_many(specs, dataset, device=device, at=(), metric=metric, tick=shown)
    counts = np.array([goodness(metric, each.scores[max(each.scores)]) for each in trained]) * len(dataset.y_test)
    if how != "public":
        # If the server sees single messages, each client's count must carry the whole noise.
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
        "epsilon_of_a_run": epsilon_per_run,
        "private": base.seed is None,
    }
    if base.seed is not None:
        promise["why_not_private"] = "the noise and the choice of runs follow from a seed; leave seed out"
    return Chosen(trained[best], settings[best], {**promise, **account})


def charge(
    values: dict[str, Any],
    grid: Grid,
    dataset: Dataset,
    how: str,
    ledger: Path,
    limit: float | None = None,
    *,
    metric: str | None = None,
    runs: int | None = None,
) -> int:
    """Charge all runs of a search to a ledger of several runs, before the first of them begins.

    A search that dies stays charged, because its runs may have released something. One that is started again has noise
    of its own, and is charged again.

    Args:
        values, grid, dataset, how, metric, runs: Those of `search`.
        ledger: The ledger, as `sordino run --ledger` names it.
        limit: The most epsilon of all runs on the same data.

    Returns:
        The number of runs that were charged.

    Raises:
        SordinoError: The cost of the search does not add up with that of other runs.
        OverspentError: The ledger cannot pay for it. Nothing was charged.
    """
    prepared = prepare_resolved(resolve(Spec.of({**values, **next(product(grid))})), dataset)
    privacy = prepared.plan.privacy
    check(prepared.resolved, grid, how, metric)
    gaussian_only = all(release.mechanism == Gaussian.name for release in shared_ledger.worst_case(prepared.plan))
    if how == "stopping" or not gaussian_only:
        why = "random stopping" if how == "stopping" else "noise that is not Gaussian"
        raise SordinoError(
            f"--ledger: the cost of a search by {why} does not add up with that of other runs; leave --ledger out."
        )
    count = min(runs or math.inf, size(grid))
    mu = selection.each(gaussian.mu(privacy.epsilon, privacy.delta), int(count))
    release = Release("runs of a search", mu, 1.0, int(count))
    join_ledger(prepared, ledger, limit, releases=(release,)).charge(f"search {secrets.token_hex(16)}")
    return int(count)


def _seed(first: int | None, number: int) -> int | None:
    """The seed of one run. Two runs must not share noise, because it would cancel in their difference."""
    return None if first is None else first + 1000 * number


def _drawn(settings: list[dict[str, Any]], runs: int | None, seed: int | None) -> list[dict[str, Any]]:
    """So many of the settings, at random, in their order. The draw does not depend on the data, so it costs nothing."""
    if runs is None or runs >= len(settings):
        return settings
    places = range(len(settings))
    if seed is None:
        picks = secrets.SystemRandom().sample(places, runs)
    else:
        picks = generator(seed, "settings").permutation(places)[:runs].tolist()
    return [settings[i] for i in sorted(picks)]


def _sentence(how: str, runs: int, listed: int) -> str:
    by = "public records" if how == "public" else "noisy counts of correct validation records, which are paid for too"
    part = f" ({runs} of {listed} settings, drawn at random)" if runs < listed else ""
    return f"paid for: {runs} runs within the one budget{part}, each with 1/√{runs} of its μ, chosen by {by}"


def _random(
    settings: list[dict[str, Any]], privacy: Privacy, mean: float, seed: int | None
) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """Settings to run, and the public account of them, which has neither their number nor their scores."""
    assumes = selection.assumption(privacy.trust)
    law = selection.NegativeBinomial.of(mean)
    # The runs and their number are secret, so they come from secure randomness; a seed is for tests only.
    rng = None if seed is None else generator(seed, "stopping")
    picks = range(selection.draw(law, rng))
    each = len(settings)
    chosen = [settings[secrets.randbelow(each) if rng is None else int(rng.integers(each))] for _ in picks]
    account = {
        "law": f"geometric, {mean:g} runs expected",
        "assumes": assumes,
        "sentence": "paid for: a random number of runs, of which only the best is shown (random stopping)",
    }
    return chosen, account, selection.calibrate(law, privacy.epsilon, privacy.delta)


def certificate_of(chosen: Chosen, *, tested: int | None = None) -> dict[str, Any]:
    """The certificate of a whole search: of all its runs, where they are visible.

    Args:
        chosen: The result of `search`.
        tested: How many records the chosen model was tested on.

    Returns:
        The certificate. It is not certified where it cannot recompute what the search spent.
    """
    account, resolved = chosen.account, chosen.trained.resolved
    cert = certificate(
        chosen.trained.plan,
        source(resolved.seed),
        version=__version__,
        spec_sha256=resolved.spec.sha256(),
        tested=tested,
        execution=resolved.execution,
        doubts=resolved.doubts,
        tuning=account["sentence"],
        assumes=[*resolved.assumptions, *([account["assumes"]] if "assumes" in account else [])],
    )
    if "runs" in account:
        cert = of_runs(cert, account["runs"])
        if (cert["epsilon"] or math.inf) > account["epsilon"] * (1 + 1e-6):
            raise SordinoError(f"epsilon: the search spent {cert['epsilon']}, more than {account['epsilon']:g}.")
        if (cert["epsilon"] or math.inf) < account["epsilon"] * (1 - 1e-4):
            most = f"up to ε = {account['epsilon']:g}"
            why = f"the chosen run spent less than other runs may have, and than their scores did: {most}"
            cert |= {"certified": False, "reasons": [*cert["reasons"], why]}
    else:
        promise = f"ε = {account['epsilon']:g} at δ = {account['delta']:g}"
        why = f"the search keeps {promise} by random stopping, which this certificate, of one run, does not recompute"
        cert |= {"certified": False, "reasons": [*cert["reasons"], why]}
    return cert
