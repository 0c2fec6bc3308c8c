"""How good a model is on test records that are protected themselves: `sordino evaluate`.

Every client counts its own test records by label and by score, in public bins, and only the noised counts leave it: one
release, under any of the three trust models, with a certificate of its own. Where persons are protected, the records of
a person share one count: figures are those of a person drawn at random, and of that person a record drawn at random.
Accuracy, AUC, calibration and their intervals are computed from the noised counts (`noised_metrics`).

An evaluation has a folder of its own: what may be published in `public/`, keys and ledger in `private/`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sordino.core import Adjacency, Privacy, Trust, Unit
from sordino.data.arrays import numbers_of_pairs, unit_numbers
from sordino.data.identity import records_digest
from sordino.data.preprocess import preprocess
from sordino.data.records import Records, check_person_clients
from sordino.data.sources import labelled
from sordino.engines.schedule import record_choice
from sordino.errors import SordinoError, check_known
from sordino.evidence.certificate import certificate, ranges
from sordino.evidence.ledger import Ledger
from sordino.evidence.signing import Signer, sha256
from sordino.evidence.spent import Charge
from sordino.evidence.statement import issue
from sordino.privacy import spending
from sordino.privacy.mechanisms.random import Source, source
from sordino.privacy.plan import Plan
from sordino.training import noised_metrics, shared_ledger
from sordino.training.evaluate import task_of
from sordino.training.evaluation_plan import Settings, assumptions, choose_bins, measure, plan_of, release, tally_of
from sordino.training.folder import EVALUATION_FILE, NAMED, RunFolder, shown_name
from sordino.training.metrics import Task
from sordino.training.predict import LoadedRun, load_run
from sordino.training.shared_ledger import SharedLedger
from sordino.training.spec import PERSON_IDS
from sordino.version import __version__

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
    units: str  # the column that says whom a record is about, as in `ResolvedSpec.unit_column`

    @property
    def assumptions(self) -> list[str]:
        return assumptions(self.settings)


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
    person: str | None = None,
    person_records: int = 4,
    person_clients: int = 1,
    person_ids: str = "global",
    person_choice: str = "first",
    seed: int | None = None,
    weights: str | Path | None = None,
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
      person: the column that says whom a record is about, where the model has no schema. With it, or with the schema's
        person column, all records of a person are protected together.
      person_records: of one person that each client uses. More of them need no more noise.
      person_clients: at most so many hold records of one person.
      person_ids: `global`, or `per-client`: equal ids at two clients are two persons.
      person_choice: which records are used of a person with more: the `first`, or `random` ones.
      seed: reproducible noise, for experiments; the result is not private.
      weights: of a transformer, the folder that it was trained from; by default the path in the run's private part.

    Raises:
      SordinoError: the model, the data or an argument does not fit.
    """
    run = load_run(model, weights=weights)
    if not 0.5 < confidence < 1:
        raise SordinoError(f"confidence: {confidence} must lie between 0.5 and 1; 0.95 is usual.")
    task = task_of(run.model)
    target = None if run.schema is None else run.schema.target
    if task is Task.SEQUENCES:
        raise SordinoError(
            f"model: {run.about['kind']} learns text without labels, and a noised perplexity is not served; evaluate a "
            "model of classes, numbers or times."
        )
    bounded = target is not None and (target.range is not None or target.maximum is not None)
    if task in (Task.QUANTITIES, Task.COUNTS) and not bounded:
        raise SordinoError(
            "model: it predicts numbers without a public range, so its errors have no bound; train it with a schema "
            "whose target has a range or a maximum."
        )
    check_known("person_ids", person_ids, PERSON_IDS)
    columns = label, client, person
    x, y, site, who = labelled(str(data), run.classes, run.features, int(run.about["features"]), run.schema, *columns)
    x = preprocess(x, None if run.schema is not None else run.public, run.normalize, apart=who is not None)
    sites = np.zeros(len(y), int) if site is None else np.unique(site, return_inverse=True)[1]
    names = () if site is None else tuple(str(name) for name in np.unique(site))
    sites, promised = sites.reshape(-1), (epsilon, delta, Unit.RECORD if who is None else Unit.PERSON, adjacency, trust)
    of_persons = {} if who is None else {"person_clients": person_clients, "person_choice": person_choice}
    privacy = Privacy(*promised, person_records=person_records, **of_persons)  # type: ignore[arg-type]
    noise = source(seed)
    if who is not None:
        who = unit_numbers(who)
        if person_ids == "global":
            check_person_clients(sites, who, person_clients)
        else:  # else an id that another client has too would move the rows of others
            who = numbers_of_pairs(sites, who)
    records = Records.of(
        x,
        y,
        sites,
        person=who,
        per_person=person_records,
        choose=record_choice(noise, privacy),
        dtype=run.theta.dtype,
        copy=False,
    )
    intervals = len(run.edges)
    bins = choose_bins(task, records.sizes, privacy, threshold, intervals) if bins is None else bins
    unit = 1.0 if run.schema is None else run.schema.unit
    settings = Settings(task, bins, threshold, privacy, confidence, unit, intervals)
    schema_sha256 = "" if run.schema is None else run.schema.sha256()
    own_ids = who is not None and person_ids == PERSON_IDS[1]
    settings = settings._replace(schema_sha256=schema_sha256, own_ids=own_ids)
    named = (person, client) if run.schema is None else (run.schema.person, run.schema.client)
    path = Path(model)
    file = RunFolder.find(path).named(path, "model.safetensors")
    return PreparedEvaluation(
        run=run,
        records=records,
        settings=settings,
        plan=plan_of(settings, records.sizes),
        source=noise,
        names=names,
        model_sha256=sha256(file),
        data=str(data),
        units="" if who is None else shared_ledger.persons_of(named[0], named[1] or "", own_ids and bool(named[1])),
    )


def join_ledger(prepared: PreparedEvaluation, path: str | Path, limit: float | None = None) -> SharedLedger:
    """The account of the test records in a ledger of several runs and evaluations. Charges nothing.

    Raises:
      OverspentError: the ledger cannot pay for the evaluation.
      SordinoError: the evaluation is not certified, or the ledger cannot be used.
    """
    cert = certificate(prepared.plan, prepared.source, version=__version__)
    digest = records_digest(prepared.data)
    units = prepared.units.encode()
    return shared_ledger.join(prepared.plan, path, limit, data=digest, units=units, reasons=cert["reasons"])


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
    folder.write_readme(readme(cert) + NAMED.format(name=shown_name(identity)))
    return found, cert


def evaluate_privately(model: str | Path, data: str | Path, out: str | Path, **options: Any) -> dict[str, Any]:
    """Evaluate a trained model on protected test records, with noise, a certificate and a folder of its own.

    Args:
      model: the directory of a run, its public/, or a model.safetensors.
      data: labelled test records, which training did not use.
      out: a new folder.
      options: epsilon (required), delta, trust, adjacency, bins, threshold, confidence, label, client, person,
        person_records, person_clients, person_ids, person_choice, seed, weights.

    Returns:
      The metrics: accuracy, AUC, calibration and Brier score, each with an interval. Beside them `certified`, `reasons`
      (why not) and `certificate` (the content of certificate.json). `constant_guess` says how the model compares with
      a constant: better, no better, open, or not compared (many classes). A model that is not shown to be better
      raises a warning.

    Raises:
      SordinoError: the model, the data, the folder or an option does not fit.

    Example:
      >>> import sordino
      >>> from sordino.training import run  # what `sordino run --out tested` does
      >>> trained = run.prepare(run.Spec(method="dp-fedgd", rounds=20))
      >>> run.start(trained, Path("tested"))
      >>> certificate = run.finish(trained, Path("tested"), list(run.rounds(trained, Path("tested"))))
      >>> digits = sordino.load("digits")
      >>> np.savez("test.npz", x=digits.x_test, y=digits.y_test)
      >>> found = evaluate_privately("tested", "test.npz", "tested/evaluation", epsilon=2.0)
      >>> found["records"], found["accuracy"]["low"] < found["accuracy"]["estimate"] < found["accuracy"]["high"]
      (359, True)
      >>> found["certified"], found["certificate"]["epsilon"] <= 2.0
      (True, True)
    """
    found, cert = evaluate_into(prepare(model, data, **options), Path(out))
    if doubt := noised_metrics.doubt(found):
        warnings.warn(doubt.partition(": ")[2], UserWarning, stacklevel=2)
    return {**found, "certified": cert["certified"], "reasons": cert["reasons"], "certificate": cert}


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
