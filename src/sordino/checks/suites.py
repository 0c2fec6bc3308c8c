"""What `sordino check` tries beside methods, models and tallies: variants of DP-FedGD with options of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sordino.checks.contracts import apart, engines, replay
from sordino.checks.fixtures import Through
from sordino.checks.language import clips_every_token, small_language
from sordino.checks.mutants import (
    OF_CLIPPINGS,
    clips_by_the_last_layer,
    refactors_by_records,
    sends_the_frozen_factor,
    weighed_records,
    weighs_beyond_the_clip,
)
from sordino.checks.report import Report, apart_engines, missed_mutant, rejecting, reports_of, searched
from sordino.checks.search import TRIALS, sensitivity
from sordino.checks.streams import MECHANISMS, missed_mutants, streams
from sordino.core import Adjacency, Clipping, Method, Unit
from sordino.methods import entry
from sordino.methods.adapters import with_adapters
from sordino.methods.calibration import calibrated
from sordino.methods.clipping import with_clipping
from sordino.methods.uncertainty import OF_CLASSES, OF_QUANTITIES, of_counts, with_uncertainty
from sordino.models.linear import Linear, Loss
from sordino.models.lora import adapt
from sordino.models.torch_model import TorchModel

# The names of `SUITES` in reports and for `sordino check`.
ADAPTERS = "adapters"  # the variants of low-rank adapters
ATTENTION = "attention"  # `nn.MultiheadAttention`, in bfloat16 too
CALIBRATE = "calibrate"  # calibrated intercepts
CLIPPING = "clipping"  # the laws of clipping of networks
SEQUENCES = "sequences"  # causal language models
STREAMS = "streams"  # noise that is correlated over rounds
UNCERTAINTY = "uncertainty"  # the releases for standard errors
WEIGHTS = "weights"  # weights of classes and of records
CHECKED_CLIPPINGS = ("per-layer", "per-layer:1,2", "automatic")
CHECKED_VARIANTS = ("freeze-a", "alternating", "fedsvd")
# A claim must hold on every model; the search must come near it on at least one.
CHECKED_MODELS = (Linear(3, 3), Linear(3, 1, Loss.SQUARES, bias=False))


def check_calibration(
    name: str = CALIBRATE, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with calibrated intercepts and slope, on a model of two classes.

    Args:
      name: the name that reports show.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, noised query and adjacency.
    """
    methods = [calibrated(entry("dp-fedgd").at(unit), 0.1, 0.1) for unit in units]
    return [report for each in methods for report in reports_of(name, each, [Linear(3, 2)], trials, seed)]


def check_uncertainty(
    name: str = UNCERTAINTY, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with the releases for standard errors: of classes, quantities and counts.

    Args:
      name: the name that reports show.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, kind of labels, noised query and adjacency.
    """
    reports: list[Report] = []
    counts = (Linear(3, 1, Loss.POISSON),)
    kinds = ((OF_CLASSES, CHECKED_MODELS), (OF_QUANTITIES, CHECKED_MODELS), (of_counts(3.0), counts))
    for unit, (terms, models) in itertools.product(units, kinds):
        method = with_uncertainty(entry("dp-fedgd").at(unit), 0.2, 0.5, terms, 1 if unit is Unit.RECORD else 2)
        reports += reports_of(name, method, models, trials, seed)
    return reports


def check_weights(
    name: str = WEIGHTS, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with class weights and, for records, with weights of single records.

    One more mutant weighs terms beyond the clip.

    Args:
      name: the name that reports show.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, kind of weights, noised query and adjacency.
    """
    classes = Linear(3, 3, class_weights=torch.tensor([0.5, 2.0, 2.0]))
    reports: list[Report] = []
    for unit in units:
        method = entry("dp-fedgd").at(unit)
        for model in (classes, weighed_records(Linear(3, 3))) if unit is Unit.RECORD else (classes,):
            reports += rejecting(weighs_beyond_the_clip, name, method, model, trials, seed)
    return reports


def check_clipping(
    name: str = CLIPPING, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with each law of clipping other than flat, on a small network.

    Each law has one more mutant: every layer has the whole clip, or a gradient is divided by the norm of one layer.

    Args:
      name: the name that reports show, before the law.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, law, noised query and adjacency.
    """
    model = small_network()
    reports: list[Report] = []
    for unit in units:
        for law in CHECKED_CLIPPINGS:
            clipping = Clipping.parse(law)
            method = with_clipping(entry("dp-fedgd").at(unit), clipping)
            reports += rejecting(OF_CLIPPINGS[clipping.law], f"{name} {law}", method, model, trials, seed)
    return reports


def check_attention(
    name: str = ATTENTION, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with `nn.MultiheadAttention`, in float64 and in bfloat16.

    There is one more mutant: a gradient is clipped by the norm of the layer after the attention.

    Args:
      name: the name that reports show, before the type.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, type, noised query and adjacency.
    """
    reports: list[Report] = []
    for unit in units:
        method = entry("dp-fedgd").at(unit)
        reports += rejecting(clips_by_the_last_layer, name, method, small_attention(), trials, seed)
        half = small_attention(torch.bfloat16)
        reports += in_bfloat16(name, method, half, trials, seed, mutant=clips_by_the_last_layer)
    return reports


def check_sequences(
    name: str = SEQUENCES, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with a small causal language model, whose records may begin with a prompt.

    There is one more mutant: every token that counts is clipped by itself.

    Args:
      name: the name that reports show.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, noised query and adjacency.
    """
    model, methods = small_language(), [entry("dp-fedgd").at(unit) for unit in units]
    return [report for each in methods for report in rejecting(clips_every_token, name, each, model, trials, seed)]


def check_streams(name: str = STREAMS, *, seed: int = 0, units: Sequence[Unit] = tuple(Unit)) -> list[Report]:
    """Check the correlated noise of DP-FTRL with each mechanism: the contracts `streams` and `engines`.

    The mutants claim the sensitivity of one round, of rounds that are apart, or of an encoder without its last
    diagonal; or they draw noise afresh that must be carried, or the same noise in every round.

    Args:
      name: the name that reports show, before the mechanism.
      seed: seed of the records on which the engines are compared.
      units: the protected units.

    Returns:
      One report per unit and mechanism. Claims are factors on the sensitivity of one answer.
    """
    reports = []
    for unit, (mechanism, options) in itertools.product(units, MECHANISMS.items()):
        method = entry("dp-ftrl").at(unit, **options)
        found, difference = streams(method), engines(method, CHECKED_MODELS[0], seed=seed)
        missed = [missed_mutant("streams", mutant) for mutant in missed_mutants(method)]
        problems = [*found.problems, *missed, *apart_engines(difference)]
        numbers = (found.claimed, found.worst, difference, not problems, problems)
        reports.append(Report(f"{name} {mechanism}", unit, "", "0.0 stream", *numbers))
    return reports


def check_adapters(
    name: str = ADAPTERS, *, trials: int = TRIALS, seed: int = 0, units: Sequence[Unit] = (Unit.RECORD, Unit.PERSON)
) -> list[Report]:
    """Run all contracts on DP-FedGD with each variant of low-rank adapters other than `lora`, on a small network.

    Where a round trains a part of theta there are two more mutants: the frozen factor is sent too, outside of the clip,
    and the server's step depends on records.

    Args:
      name: the name that reports show, before the variant.
      trials: restarts of the search for one query.
      seed: seed of the search.
      units: the protected units.

    Returns:
      One report per unit, variant, noised query and adjacency.
    """
    reports: list[Report] = []
    for unit in units:
        for variant in CHECKED_VARIANTS:
            model, named, always = small_adapters(variant), f"{name} {variant}", list[str]()
            method = with_adapters(entry("dp-fedgd").at(unit), variant, rounds=2)
            if variant == "freeze-a":
                reports += reports_of(named, method, [model], trials, seed)
                continue
            if not replay(*refactors_by_records(method, model), seed=seed):
                always = [missed_mutant("replay", refactors_by_records)]
            for report in rejecting(sends_the_frozen_factor, named, method, model, trials, seed):
                reports.append(report._replace(passed=report.passed and not always, problems=report.problems + always))
    return reports


class _Adaptable(torch.nn.Module):
    """Two layers for records of three features and two classes; the first is adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.nn.functional.leaky_relu(self.query(x)))
        return scores


def small_adapters(variant: str) -> TorchModel:
    """A small network with an adapter of rank 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchModel(adapt(_Adaptable(), rank=2, dropout=0.0, variant=variant), shape=(3,))


class _Attends(torch.nn.Module):
    """An attention over two positions of two numbers each, and a linear layer for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = torch.nn.MultiheadAttention(2, 1, batch_first=True)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.attend(x, x, x, need_weights=False)[0].flatten(1))
        return scores


def small_attention(autocast: torch.dtype | None = None) -> TorchModel:
    """A small network with PyTorch's attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchModel(_Attends(), shape=(2, 2), autocast=autocast)


def in_bfloat16(
    name: str,
    method: Method,
    model: TorchModel,
    trials: int,
    seed: int,
    *,
    mutant: Callable[..., Any] | None = None,
) -> Iterator[Report]:
    """The search and the contract `apart` for a network that computes in bfloat16, and perhaps with one more mutant.

    Its sums are those of float32 parameters: float64 ones, as in a search, take no part in autocast. The engines may
    differ by what float32 rounds, and do not decide here.
    """

    def total(_: str, inner: Callable[..., torch.Tensor], theta: torch.Tensor, *args: Any, **how: Any) -> Any:
        return inner(theta.float(), *args, **how)

    half = Through(model, ("clipped_sum",), total)
    always, difference = apart(method, half, seed=seed), engines(method, half, seed=seed)
    for adjacency in Adjacency:
        passing = always
        if mutant is not None:
            breaking, its_model = mutant(method, half)
            wrong = sensitivity(breaking, its_model, adjacency, trials=trials, seed=seed)
            passing = always + [missed_mutant("sensitivity", mutant)] * (not all(each.beyond for each in wrong))
        for worst, missed in searched(method, [half], adjacency, trials, seed):
            problems = [*worst.problems, *missed, *passing]
            numbers = (worst.claimed, worst.worst, difference)
            yield Report(f"{name} bfloat16", method.unit, adjacency, worst.query, *numbers, not problems, problems)


def small_network() -> TorchModel:
    """Two layers, for records of three features and two classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchModel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LeakyReLU(), torch.nn.Linear(2, 2)))


# What `sordino check` tries beside methods, models and tallies, by the names that reports show.
SUITES: dict[str, Callable[[str], list[Report]]] = {
    CALIBRATE: check_calibration,
    WEIGHTS: check_weights,
    UNCERTAINTY: check_uncertainty,
    CLIPPING: check_clipping,
    SEQUENCES: check_sequences,
    STREAMS: check_streams,
    ADAPTERS: check_adapters,
    ATTENTION: check_attention,
}
