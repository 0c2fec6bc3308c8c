"""What a private evaluation releases and what follows from it: settings, plan, noised counts, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sordino.core import Privacy, Unit
from sordino.data.records import Records
from sordino.data.schema import assumption
from sordino.engines import reference
from sordino.errors import SordinoError
from sordino.evidence.certificate import EVALUATION
from sordino.methods.auto import MOST_INTERVALS
from sordino.methods.tally import tally_method
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear, Loss
from sordino.models.tally import CountTally, ErrorTally, ScoreTally, SurvivalTally, Tally, score_edges
from sordino.privacy import calibration
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Source
from sordino.privacy.plan import Plan
from sordino.training import noised_metrics
from sordino.training.folder import EVALUATION_FILE
from sordino.training.metrics import Task
from sordino.training.noised_metrics import Released
from sordino.training.spec import OWN_IDS, PERSON_IDS

# Bins that the noise on one share allows: more of them make the AUC noisier, fewer make its bins coarser.
BINS_BY_NOISE = ((0.0005, 64), (0.004, 32))
FEWEST_BINS = 16
PERSON_KEYS = ("person_records", "person_clients", "person_choice")  # of a promise to persons


class Settings(NamedTuple):
    """What an evaluation releases; all of it is public."""

    task: Task
    bins: int
    threshold: float
    privacy: Privacy
    confidence: float = noised_metrics.CONFIDENCE
    label_unit: float = 1.0  # how much 1 in the model's labels is, where they are quantities or counts
    intervals: int = 0  # of time, where the model is one of survival
    dropouts: int | None = None  # of a federation that adds up integers under masks
    colluders: int | None = None
    schema_sha256: str = ""  # of the schema of the tables, where there is one
    own_ids: bool = False  # whether each client numbers its persons by itself

    def toml(self, model_sha256: str) -> str:
        """The content of the evaluation's spec.toml."""
        import tomli_w

        privacy = self.privacy
        values = {
            EVALUATION: str(self.task),
            "model_sha256": model_sha256,
            "bins": self.bins,
            "threshold": self.threshold,
            "confidence": self.confidence,
            "label_unit": self.label_unit,
            **{"epsilon": privacy.epsilon, "delta": privacy.delta},
            **{"unit": str(privacy.unit), "adjacency": str(privacy.adjacency), "trust": str(privacy.trust)},
        }
        if self.intervals:
            values["intervals"] = self.intervals
        if privacy.unit is Unit.PERSON:
            values |= {key: getattr(privacy, key) for key in PERSON_KEYS}
        if self.own_ids:
            values["person_ids"] = PERSON_IDS[1]
        if self.schema_sha256:
            values["schema_sha256"] = self.schema_sha256
        masked = {"dropouts": self.dropouts, "colluders": self.colluders}
        return tomli_w.dumps(values | {key: value for key, value in masked.items() if value is not None})

    @staticmethod
    def of(values: Mapping[str, Any]) -> Settings:
        """From the keys of an evaluation's spec.toml."""
        try:
            promise = {key: values[key] for key in ("epsilon", "delta", "unit", "adjacency", "trust")}
            if promise["unit"] == Unit.PERSON:
                promise |= {key: values[key] for key in PERSON_KEYS}
            numbers = int(values["bins"]), float(values["threshold"])
            found = Settings(Task(values[EVALUATION]), *numbers, Privacy(**promise), float(values["confidence"]))
            found = found._replace(label_unit=float(values["label_unit"]), intervals=int(values.get("intervals", 0)))
            own_ids = values.get("person_ids", PERSON_IDS[0]) == PERSON_IDS[1]
            found = found._replace(schema_sha256=str(values.get("schema_sha256", "")), own_ids=own_ids)
            if "dropouts" not in values:
                return found
            return found._replace(dropouts=int(values["dropouts"]), colluders=int(values["colluders"]))
        except (KeyError, TypeError, ValueError) as error:
            raise SordinoError(f"spec: these are not settings of an evaluation ({error}).") from None


def tally_of(settings: Settings, model: Any = None) -> Tally:
    """What is counted. Without a model, only for what follows from the settings: bounds and sizes."""
    if settings.task is Task.SURVIVAL:
        if not 1 <= settings.intervals <= MOST_INTERVALS:
            raise SordinoError(f"intervals: {settings.intervals} must lie between 1 and {MOST_INTERVALS}.")
        times = tuple(float(k) for k in range(settings.intervals + 1))
        return SurvivalTally(Hazards(1, times) if model is None else model, score_edges(settings.bins))
    if settings.task is Task.COUNTS:
        return CountTally(Linear(1, 1, Loss.POISSON) if model is None else model, settings.label_unit)
    if settings.task is Task.QUANTITIES:
        return ErrorTally(Linear(1, 1, Loss.SQUARES) if model is None else model)
    classes = 1 if settings.task is Task.TWO_CLASSES else 3
    stand_in = Linear(1, classes, Loss.LOGISTIC if classes == 1 else Loss.SOFTMAX)
    edges = score_edges(settings.bins, settings.threshold)
    return ScoreTally(stand_in if model is None else model, edges, settings.threshold)


def plan_of(settings: Settings, sizes: Sequence[int]) -> Plan:
    """The plan of an evaluation on clients with so many test records, or persons: one round, one release.

    Raises:
      SordinoError: the unit is a client, or epsilon is infinite.
    """
    privacy = settings.privacy
    if privacy.unit is Unit.CLIENT:
        raise SordinoError(
            "unit: an evaluation protects records or persons, and nothing is proved for whole clients; use unit = "
            "record or person."
        )
    if not privacy.epsilon < float("inf"):
        raise SordinoError("epsilon: an evaluation needs noise; set a finite epsilon, such as 0.5.")
    tally = tally_of(settings)
    plan = Plan(tally_method(EVALUATION, tally, privacy.unit), 1, tuple(int(size) for size in sizes), privacy)
    if settings.dropouts is None or settings.colluders is None:
        return plan
    return replace(plan, integers=Integers(tally.dimension, settings.dropouts, settings.colluders))


def choose_bins(task: Task, sizes: Sequence[int], privacy: Privacy, threshold: float = 0.5, intervals: int = 0) -> int:
    """The number of bins that the noise allows: 64, 32 or 16; of survival half as many. From public numbers alone."""
    trial = plan_of(Settings(task, FEWEST_BINS, threshold, privacy, intervals=intervals), sizes)
    noise = calibration.aggregate_std(trial, 0)
    bins = next((bins for most, bins in BINS_BY_NOISE if noise <= most), FEWEST_BINS)
    return bins // 2 if task is Task.SURVIVAL else bins


def release(plan: Plan, tally: Any, theta: Tensor, records: Records, noise: Source) -> np.ndarray:
    """The noised tally of all clients, divided by the number of records, or of persons."""
    (only,) = reference.run(plan, tally, records, noise, theta=theta)
    assert isinstance(only.aggregate, Tensor)
    return np.asarray(only.aggregate.double().cpu().numpy())


def measure(settings: Settings, plan: Plan, aggregate: np.ndarray, came: Sequence[int] | None = None) -> dict[str, Any]:
    """The metrics that follow from a released tally.

    Args:
      settings: of the evaluation.
      plan: its plan.
      aggregate: what `release` returned, or a federation's sum.
      came: the clients in the sum; None for all.
    """
    tally = tally_of(settings)
    present = list(range(plan.clients) if came is None else came)
    records = sum(plan.sizes[i] for i in present)
    share = float(plan.weights[present].sum())
    std = calibration.aggregate_std(plan, 0)
    if not plan.only_sums_visible and len(present) < plan.clients:  # the noise of those that came
        noise = calibration.query_noises(plan)[0]
        std = float(np.sqrt(((noise.weight * noise.std)[present] ** 2).sum()))
    elif plan.integers is not None:  # every site that came added an equal part
        std *= float(np.sqrt(len(present) / plan.clients))
    released = Released(
        {name: part / share for name, part in tally.split(np.asarray(aggregate, float)).items()},
        {block.name: std / block.weight / share for block in tally.layout},
        records,
    )
    found: dict[str, Any] = {"task": str(settings.task)}
    if isinstance(tally, ScoreTally):
        two = settings.task is Task.TWO_CLASSES
        found |= noised_metrics.of_scores(
            released, tally.edges, settings.threshold, two_classes=two, confidence=settings.confidence
        )
    elif isinstance(tally, SurvivalTally):
        found |= noised_metrics.of_survival(released, settings.intervals, settings.confidence)
    elif isinstance(tally, CountTally):
        found |= noised_metrics.of_counts(released, settings.label_unit, settings.confidence)
    else:
        found |= noised_metrics.of_errors(released, settings.label_unit, settings.confidence)
    promise = settings.privacy
    return {
        **found,
        "constant_guess": noised_metrics.against_constant(found),
        "noise": std / share * records,
        "sensitivity_of_counts": tally.bound(1, promise.adjacency),
        **{"epsilon": promise.epsilon, "delta": promise.delta},
        **{"unit": str(promise.unit), "adjacency": str(promise.adjacency), "trust": str(promise.trust)},
    }


def assumptions(settings: Settings) -> list[str]:
    """What the certificate of an evaluation assumes beside what its plan assumes."""
    facts = [
        "The model is public. If these records were also used for training, what training revealed of them adds up "
        "with this."
    ]
    facts += [assumption(settings.schema_sha256)] if settings.schema_sha256 else []
    return [*facts, *([OWN_IDS] if settings.own_ids else [])]


def rebuilt(values: Mapping[str, Any], sizes: Sequence[int], found: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan that an evaluation's spec.toml stands for, and the metrics that follow from the tally in `found`."""
    settings = Settings.of(values)
    plan = plan_of(settings, sizes)
    tally = np.asarray(found.get("tally", ()), float)
    if tally.shape != (tally_of(settings).dimension,):
        raise SordinoError(f"{EVALUATION_FILE}: its tally has {tally.size} numbers, not those of its settings.")
    came = found.get("came")
    if came is not None and sorted({*came} & {*range(plan.clients)}) != came:
        raise SordinoError(f"{EVALUATION_FILE}: it counts sites {came}, and there are {plan.clients}.")
    more = {} if came is None else {"came": came}
    return plan, {**measure(settings, plan, tally, came), "tally": tally.tolist(), **more}
