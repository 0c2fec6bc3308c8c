"""How good a model is on test records that are protected themselves: `sordino evaluate`.

Every client counts its own test records by label and by score, in public bins, and only the noised counts leave it: one
release, under any of the three trust models, with a certificate of its own. Accuracy, AUC, calibration and their
intervals are computed from the noised counts (`noised_metrics`).

An evaluation has a folder of its own: what may be published in `public/`, keys and ledger in `private/`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sordino.core import Adjacency, Privacy, Trust, Unit
from sordino.data.preprocess import preprocess
from sordino.data.records import Records
from sordino.data.schema import assumption
from sordino.data.sources import labelled
from sordino.engines import reference
from sordino.errors import SordinoError
from sordino.methods.tally import tally_method
from sordino.models.linear import Linear, Loss
from sordino.models.tally import ErrorTally, ScoreTally, Tally, score_edges
from sordino.privacy import calibration, spending
from sordino.privacy.evidence.certificate import EVALUATION, certificate, ranges
from sordino.privacy.evidence.ledger import Charge, Ledger
from sordino.privacy.evidence.signing import Signer, sha256
from sordino.privacy.evidence.statement import issue
from sordino.privacy.mechanisms.random import Source, source
from sordino.privacy.plan import Plan
from sordino.training import noised_metrics, shared_ledger
from sordino.training.evaluate import task_of
from sordino.training.folder import EVALUATION_FILE, RunFolder
from sordino.training.metrics import Task
from sordino.training.noised_metrics import Released
from sordino.training.predict import LoadedRun, load_run
from sordino.training.shared_ledger import SharedLedger
from sordino.version import __version__

# Bins that the noise on one share allows: more of them make the AUC noisier, fewer make its bins coarser.
BINS_BY_NOISE = ((0.0005, 64), (0.004, 32))
FEWEST_BINS = 16


class Settings(NamedTuple):
    """What an evaluation releases; all of it is public."""

    task: Task
    bins: int
    threshold: float
    privacy: Privacy
    confidence: float = noised_metrics.CONFIDENCE
    label_unit: float = 1.0  # how much 1 in the model's labels is, where they are quantities

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
        return tomli_w.dumps(values)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Settings:
        """From the keys of an evaluation's spec.toml."""
        try:
            promise = {key: values[key] for key in ("epsilon", "delta", "unit", "adjacency", "trust")}
            numbers = int(values["bins"]), float(values["threshold"])
            rest = float(values["confidence"]), float(values["label_unit"])
            return Settings(Task(values[EVALUATION]), *numbers, Privacy(**promise), *rest)
        except (KeyError, TypeError, ValueError) as error:
            raise SordinoError(f"spec: these are no settings of an evaluation ({error}).") from None


def tally_of(settings: Settings, model: Any = None) -> Tally:
    """What is counted. Without a model, only for what follows from the settings: bounds and sizes."""
    if settings.task is Task.QUANTITIES:
        return ErrorTally(Linear(1, 1, Loss.SQUARES) if model is None else model)
    classes = 1 if settings.task is Task.TWO_CLASSES else 3
    stand_in = Linear(1, classes, Loss.LOGISTIC if classes == 1 else Loss.SOFTMAX)
    edges = score_edges(settings.bins, settings.threshold)
    return ScoreTally(stand_in if model is None else model, edges, settings.threshold)


def plan_of(settings: Settings, sizes: Sequence[int]) -> Plan:
    """The plan of an evaluation on clients with so many test records: one round, one release.

    Raises:
      SordinoError: the unit is not a record, or epsilon is infinite.
    """
    privacy = settings.privacy
    if privacy.unit is not Unit.RECORD:
        raise SordinoError(
            f"unit: an evaluation protects single records, not {privacy.unit}: nothing is proved for more records; "
            "use unit = record."
        )
    if not privacy.epsilon < float("inf"):
        raise SordinoError("epsilon: an evaluation needs noise; set a finite epsilon, such as 0.5.")
    method = tally_method(EVALUATION, tally_of(settings))
    return Plan(method, 1, tuple(int(size) for size in sizes), privacy)


def choose_bins(task: Task, sizes: Sequence[int], privacy: Privacy, threshold: float = 0.5) -> int:
    """The number of bins that the noise allows: 64, 32 or 16. It follows from public numbers."""
    trial = plan_of(Settings(task, FEWEST_BINS, threshold, privacy), sizes)
    noise = calibration.aggregate_std(trial, 0)
    return next((bins for most, bins in BINS_BY_NOISE if noise <= most), FEWEST_BINS)


def release(plan: Plan, tally: Any, theta: Tensor, records: Records, noise: Source) -> np.ndarray:
    """The noised tally of all clients, divided by the number of records."""
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
    else:
        found |= noised_metrics.of_errors(released, settings.label_unit, settings.confidence)
    promise = settings.privacy
    return {
        **found,
        "noise": std / share * records,
        "sensitivity_of_counts": tally.bound(1, promise.adjacency),
        **{"epsilon": promise.epsilon, "delta": promise.delta},
        **{"unit": str(promise.unit), "adjacency": str(promise.adjacency), "trust": str(promise.trust)},
    }


# ------------------------------------------------------------------------------------------------------ one evaluation


@dataclass(frozen=True)
class PreparedEvaluation:
    """A model, test records in memory and a calibrated plan; nothing has been released yet."""

    run: LoadedRun
    records: Records
    settings: Settings
    plan: Plan
    source: Source
    names: tuple[str, ...]
    model_sha256: str
    data: str  # the file of the test records

    @property
    def assumptions(self) -> list[str]:
        return assumptions(self.run.schema)


def assumptions(schema: Any) -> list[str]:
    """What the certificate of an evaluation assumes beside what its plan assumes."""
    facts = [
        "The model is public. If these records were also used for training, what training revealed of them adds up "
        "with this."
    ]
    return [*facts, *([assumption(schema.sha256())] if schema is not None else [])]


def prepare(
    model: str | Path,
    data: str | Path,
    *,
    epsilon: float,
    delta: float = 1e-6,
    trust: str = Trust.UNTRUSTED_SERVER,
    adjacency: str = Adjacency.REPLACE_ONE,
    bins: int | None = None,
    threshold: float = 0.5,
    confidence: float = noised_metrics.CONFIDENCE,
    label: str | None = None,
    client: str | None = None,
    seed: int | None = None,
) -> PreparedEvaluation:
    """Read a model and labelled test records, and calibrate the noise of their evaluation.

    Args:
      model: the directory of a run, its public/, or a model.safetensors.
      data: a file with the columns of training and the label. A schema's client column says whose a record is.
      epsilon: of this evaluation.
      delta: of this evaluation.
      trust: who sees what: `untrusted-server`, `secure-aggregation` or `trusted-server`.
      adjacency: which test data are neighbours.
      bins: of the score; None for as many as the noise allows.
      threshold: a probability: above it, a record counts as positive.
      confidence: of each interval.
      label: the label's column, where the model has no schema.
      client: the column that says whose a record is, where the model has no schema.
      seed: reproducible noise, for experiments; the result is not private.

    Raises:
      SordinoError: the model, the data or an argument does not fit.
    """
    run = load_run(model)
    if not 0.5 < confidence < 1:
        raise SordinoError(f"confidence: {confidence} must lie between 0.5 and 1; 0.95 is usual.")
    task = task_of(run.model)
    if task is Task.QUANTITIES and (run.schema is None or run.schema.target is None or run.schema.target.range is None):
        raise SordinoError(
            "model: it predicts numbers without a public range, so its errors have no bound; train it with a schema "
            "whose target has a range."
        )
    x, y, site = labelled(str(data), run.classes, run.features, int(run.about["features"]), run.schema, label, client)
    x = preprocess(x, None if run.schema is not None else run.public, run.normalize)
    sites = np.zeros(len(y), int) if site is None else np.unique(site, return_inverse=True)[1]
    names = () if site is None else tuple(str(name) for name in np.unique(site))
    records = Records.of(x, y, sites.reshape(-1), dtype=run.theta.dtype)
    privacy = Privacy(epsilon, delta, Unit.RECORD, adjacency, trust)  # type: ignore[arg-type]
    bins = choose_bins(task, records.sizes, privacy, threshold) if bins is None else bins
    settings = Settings(task, bins, threshold, privacy, confidence, 1.0 if run.schema is None else run.schema.unit)
    path = Path(model)
    weights = RunFolder.find(path).named(path, "model.safetensors")
    return PreparedEvaluation(
        run=run,
        records=records,
        settings=settings,
        plan=plan_of(settings, records.sizes),
        source=source(seed),
        names=names,
        model_sha256=sha256(weights),
        data=str(data),
    )


def join_ledger(prepared: PreparedEvaluation, path: str | Path, limit: float | None = None) -> SharedLedger:
    """The account of the test records in a ledger of several runs and evaluations. Charges nothing.

    Raises:
      OverspentError: the ledger cannot pay for the evaluation.
      SordinoError: the evaluation is not certified, or the ledger cannot be used.
    """
    cert = certificate(prepared.plan, prepared.source, version=__version__)
    digest = shared_ledger.file_digest(prepared.data)
    return shared_ledger.join(prepared.plan, path, limit, data=digest, reasons=cert["reasons"])


def evaluate_into(
    prepared: PreparedEvaluation, out: Path, shared: SharedLedger | None = None, signer: Signer | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pay for the evaluation, release it, and write its folder.

    The charge is on disk before the records are read. An evaluation that is killed after that has to be paid for again.

    Returns:
      The metrics and the certificate.

    Raises:
      OverspentError: the ledger cannot pay for the evaluation.
      SordinoError: the folder is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise SordinoError(f"out: '{out}' is not empty; name another directory.")
    folder, plan = RunFolder.of(out), prepared.plan
    spec = prepared.settings.toml(prepared.model_sha256)
    folder.make(spec, "")
    keys = folder.keys()
    digest = hashlib.sha256(spec.encode() + shared_ledger.file_digest(prepared.data)).digest()
    identity = hashlib.blake2b(digest, key=keys.identity, person=b"sordino run", digest_size=32).hexdigest()
    if shared is not None:
        shared.charge(identity)
    promise = plan.privacy
    with Ledger(folder.private / "ledger.db", epsilon=promise.epsilon, delta=promise.delta) as ledger:
        for group in spending.groups(plan):
            who = f"clients {ranges(group.clients)}"
            ledger.charge([Charge.of(r, who, 0, identity, promise.adjacency) for r in group.releases])
        head, rows = ledger.head(), len(ledger)
    tally = tally_of(prepared.settings, prepared.run.model)
    theta = prepared.run.theta.to(prepared.records.x)
    aggregate = release(plan, tally, theta, prepared.records, prepared.source)
    found = measure(prepared.settings, plan, aggregate)
    found["tally"] = aggregate.tolist()
    (folder.public / EVALUATION_FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    cert = certificate(
        plan,
        prepared.source,
        version=__version__,
        spec_sha256=hashlib.sha256(spec.encode()).hexdigest(),
        model_sha256=prepared.model_sha256,
        metrics_sha256=sha256(folder.public / EVALUATION_FILE),
        ledger_head=head,
        ledger_rows=rows,
        assumes=prepared.assumptions,
        names=prepared.names,
        tuning="the model and the settings were chosen before these records were looked at, or that was paid for",
    )
    cert, text = issue(cert, signer or keys.sign)
    (folder.public / "statement.md").write_bytes(text.encode())
    (folder.public / "certificate.json").write_text(json.dumps(cert, indent=2) + "\n", encoding="utf-8")
    folder.level_times()
    folder.write_readme(readme(cert))
    return found, cert


def evaluate_privately(model: str | Path, data: str | Path, out: str | Path, **options: Any) -> dict[str, Any]:
    """Evaluate a trained model on protected test records, with noise, a certificate and a folder of its own.

    Args:
      model: the directory of a run, its public/, or a model.safetensors.
      data: labelled test records, which training did not use.
      out: a new folder.
      options: epsilon (required), delta, trust, adjacency, bins, threshold, confidence, label, client, seed.

    Returns:
      The metrics: accuracy, AUC, calibration and Brier score, each with an interval.

    Raises:
      SordinoError: the model, the data, the folder or an option does not fit.

    Example:
      >>> from sordino.training import run  # what `sordino run --out tested` does
      >>> trained = run.prepare(run.Spec(method="dp-fedgd", rounds=20))
      >>> run.start(trained, Path("tested"))
      >>> certificate = run.finish(trained, Path("tested"), list(run.rounds(trained, Path("tested"))))
      >>> found = evaluate_privately("tested", "digits", "tested/evaluation", epsilon=2.0)
      >>> found["records"], found["accuracy"]["low"] < found["accuracy"]["estimate"] < found["accuracy"]["high"]
      (359, True)
    """
    return evaluate_into(prepare(model, data, **options), Path(out))[0]


def rebuilt(values: Mapping[str, Any], sizes: Sequence[int], found: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan that an evaluation's spec.toml stands for, and the metrics that follow from the tally in `found`."""
    settings = Settings.of(values)
    plan = plan_of(settings, sizes)
    tally = np.asarray(found.get("tally", ()), float)
    if tally.shape != (tally_of(settings).dimension,):
        raise SordinoError(f"{EVALUATION_FILE}: its tally has {tally.size} numbers, not those of its settings.")
    return plan, {**measure(settings, plan, tally), "tally": tally.tolist()}


def readme(cert: Mapping[str, Any]) -> str:
    """README.txt of an evaluation."""
    private = (
        "private/  must not be published, and only its owner can read it: the keys and the ledger of this evaluation.\n"
    )
    if not cert["certified"]:
        reasons = "; ".join(cert["reasons"])
        return (
            f"NOTHING IN THIS FOLDER MAY BE PUBLISHED: the evaluation is not certified.\nReason: {reasons}.\n{private}"
        )
    return (
        "public/   may be published. It holds the noised counts and what follows from them (evaluation.json), the\n"
        "          certificate for machines (certificate.json) and in words (statement.md), and the settings.\n"
        + private
    )
