"""A run: from a spec to a directory with the model, its curve, its certificate and its statement.

The order inside a round makes a run safe to kill: the result of the round is stored (`checkpoint.npz`, replaced
atomically) before anything about it is shown. A resumed run continues from what was stored; no round is released twice.
Copies of the folder do not do the same rounds either: one of them has the lease (`leases`), and the others are refused.
The plan is charged once, after an empty checkpoint was stored: a charged ledger without its checkpoint is refused,
because another model would be another release.

A resumed run reads nothing from `public/` that `private/` does not vouch for: spec and data by the identity in the
checkpoint, metrics by their digest there. The schema, with what noised counts found, is that in `private/`.

What a certified run may publish lies in `public/`, what no run may publish in `private/` (`evidence.public`
lists every public field). README.txt says which of the two a finished run is.
Every hash of the data is keyed by `private/run.key`.
"""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino import files
from sordino.core import Checkpoint, Unit
from sordino.data.identity import records_digest
from sordino.data.records import Records
from sordino.data.schema import Schema
from sordino.data.sources import Dataset
from sordino.engines import reference, simulate
from sordino.engines.distributed import ALONE, Team
from sordino.engines.trace import sent_answers
from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate, finite, ranges
from sordino.evidence.ledger import Ledger
from sordino.evidence.signing import Signer, sha256
from sordino.evidence.spent import Charge
from sordino.evidence.statement import issue
from sordino.methods.uncertainty import GRADIENT, HESSIAN, SPREAD
from sordino.models.hazards import Hazards
from sordino.models.registry import BuiltModel
from sordino.privacy import calibration, spending
from sordino.privacy.accounting.events import Release
from sordino.privacy.mechanisms.random import Noiseless, Source, source
from sordino.privacy.plan import Plan
from sordino.rules.kalman import KalmanState
from sordino.rules.life_table import life_table_of
from sordino.training import artifacts, intervals, leases, model_card, shared_ledger
from sordino.training.artifacts import Progress, adapter_sha256, save_model
from sordino.training.evaluate import (
    beats_constant_guess,
    draw_curve,
    evaluate,
    evaluate_clients,
    evaluate_fully,
    heterogeneity,
    no_better,
)
from sordino.training.folder import SCHEMA, RunFolder, publishable, readme
from sordino.training.leases import HeldLease, StateRegister
from sordino.training.metrics import OF_A_ROUND
from sordino.training.private_statistics import found_schema
from sordino.training.resolved import ResolvedSpec, resolve
from sordino.training.shared_ledger import SharedLedger
from sordino.training.spec import Spec
from sordino.version import __version__

SHARED = "shared_ledger.json"  # in private/: the ledger of several runs


@dataclass(frozen=True)
class PreparedRun:
    """A resolved spec with its data in memory and its noise calibrated; nothing has been released yet."""

    resolved: ResolvedSpec
    dataset: Dataset
    records: Records
    model: BuiltModel
    plan: Plan
    source: Source
    unscaled: Records | None = None  # what private statistics count; None where there are none

    @property
    def names(self) -> list[str]:
        """The names of the clients, in order, where the partition brings them. Client level hides whose data were
        used."""
        if self.dataset.site is None or not self.resolved.partition.by_site:
            return []
        if self.plan.privacy.unit is Unit.CLIENT:
            return []
        return [str(name) for name in np.unique(self.dataset.site)]

    def identity(self, key: bytes) -> str:
        """Keyed hash of spec and data, because a resumed run must continue with the same. It enters the ledger's chain,
        whose head the certificate publishes; without the key nobody can compare it with data that they guess."""
        return hashlib.blake2b(self._digest, key=key, person=b"sordino run", digest_size=32).hexdigest()

    @cached_property
    def _digest(self) -> bytes:
        """Not keyed, and never written to disk."""
        digest = hashlib.sha256(f"{self.resolved.portable.toml()}{self.plan.sizes}".encode())
        records, schema = self.records, self.dataset.schema
        if self.unscaled is not None and schema is not None:  # the same before and after the ranges were found
            records, schema = self.unscaled, schema.without_ranges
        if schema is not None:
            digest.update(schema.sha256().encode())
        if self.plan.privacy.person_choice == "random":  # a resumed run draws again, from the same records
            if Path(self.resolved.spec.data).is_file():
                digest.update(shared_ledger.file_digest(self.resolved.spec.data))
            else:
                for array in (self.dataset.x_train, self.dataset.y_train, self.dataset.person):
                    digest.update(np.ascontiguousarray(array).data)
            return digest.digest()
        filled = [] if records.filled is None else [records.filled]
        for part in (records.x, records.y, *filled):
            digest.update(part.contiguous().cpu().numpy().data)
        return digest.digest()

    def published(self) -> dict[str, Any]:
        """The keys of the spec that may be published."""
        return tomllib.loads(self.resolved.published(self.plan)[0])

    @property
    def heterogeneity(self) -> dict[str, float] | None:
        """How much simulated clients differ, for records that everybody may see; None for others."""
        classes = len(self.dataset.classes)
        alone = self.records.filled is None
        if not (self.resolved.source.open and classes and alone) or self.resolved.partition.by_site:
            return None
        return heterogeneity(self.records.y.cpu().numpy(), self.plan.sizes, classes)


def prepare(spec: Spec, dataset: Dataset | None = None, device: str = "cpu") -> PreparedRun:
    """Resolve the spec, load the data (unless given), partition them, build the model and calibrate the noise.

    Args:
      spec: what the user wrote.
      dataset: data that are in memory already, in place of those that the spec names.
      device: `cpu` or `cuda`.
    """
    return prepare_resolved(resolve(spec, device), dataset)


def prepare_resolved(
    resolved: ResolvedSpec, dataset: Dataset | None = None, widest: Dataset | None = None
) -> PreparedRun:
    """The same, from a spec that was resolved already.

    widest: where private statistics are asked for and data are given, what they count: the same records, with searched
    columns scaled by `within` (`Schema.at_its_widest`).
    """
    resolved.check_certifiable()
    if resolved.spec.compile and resolved.device == "cpu":
        raise SordinoError("compile: it is for a GPU; add --device cuda, or leave compile out.")
    schema, unscaled = resolved.source.schema, None
    if resolved.spec.private_statistics is not None:
        if dataset is not None and widest is None:
            raise SordinoError("private_statistics: the records are in memory already; give the path of a table.")
        widest = resolved.read_unscaled() if widest is None else widest
        unscaled = resolved.records(widest)
        if dataset is None and schema is not None and schema.unknown:  # `release_statistics` finds the ranges
            dataset = widest._replace(schema=schema)
    dataset = resolved.read_data() if dataset is None else dataset
    if resolved.partition.by_site and resolved.clients and dataset.site is not None:
        sites = len(np.unique(dataset.site))
        if sites != resolved.clients:
            raise SordinoError(f"clients: {resolved.clients}, but the data hold {sites} clients; leave clients out.")
    resolved = resolved.with_images(dataset)
    records = resolved.records(dataset)
    model = resolved.build_model(dataset.x_train.shape[1], len(dataset.classes))
    noise = Noiseless(resolved.seed or 0) if resolved.noiseless else source(resolved.seed)

    def messages(plan: Plan) -> Any:
        return sent_answers(plan, model, records.x.shape[-1], records.y.dtype)

    plan = resolved.plan(records.sizes, messages=messages)
    return PreparedRun(resolved, dataset, records, model, plan, noise, unscaled)


def join_ledger(
    run: PreparedRun, path: str | Path, limit: float | None = None, *, releases: tuple[Release, ...] | None = None
) -> SharedLedger:
    """The account of the run's data in a ledger of several runs (`shared_ledger.join`). Charges nothing.

    releases: what is charged, if it is more than this run.

    Raises:
      OverspentError: the ledger cannot pay for the run.
      SordinoError: the run is not certified, or the ledger cannot be used.
    """
    cert = certificate(run.plan, run.source, version=__version__, doubts=run.resolved.doubts)
    digest = records_digest(run.resolved.spec.data)
    units = run.resolved.unit_column.encode()
    account: dict[str, Any] = {"data": digest, "units": units, "tested": run.dataset.tested}
    return shared_ledger.join(run.plan, path, limit, **account, reasons=cert["reasons"], releases=releases)


def check_new(out: Path) -> None:
    """Refuse a directory that is not empty."""
    if out.exists() and any(out.iterdir()):
        raise SordinoError(f"out: '{out}' is not empty; resume it with --resume {out}, or name another directory.")


def start(run: PreparedRun, out: Path, shared: SharedLedger | None = None) -> None:
    """Create the run directory.

    Args:
      run: the run.
      out: a new or empty directory.
      shared: the ledger of several runs, which the run is charged to as well.

    Raises:
      SordinoError: the directory is not empty, or the schema has what noised counts are to find already.
    """
    check_new(out)
    schema = run.dataset.schema
    if run.unscaled is not None and schema is not None and schema != schema.without_ranges:
        raise SordinoError(
            "private_statistics: the schema has ranges, levels or shares already that noised counts are to find, and "
            "the certificate would say that they were counted; leave them out of the schema, or leave "
            "private_statistics out."
        )
    folder = RunFolder.of(out)
    folder.make(*run.resolved.published(run.plan))
    if run.dataset.schema is not None:
        folder.write_private(SCHEMA, run.dataset.schema.toml())
        folder.show_schema()
    if shared is not None:
        folder.write_private(SHARED, shared_ledger.store(shared))


def shared_of(run: PreparedRun, out: Path) -> SharedLedger | None:
    """The ledger of several runs that the run in this directory is charged to; None where there is none."""
    path = RunFolder.find(out).private / SHARED
    if not path.is_file():
        return None
    return shared_ledger.reopen(path.read_text(encoding="utf-8"), run.plan, run.dataset.tested)


def reopen(out: Path) -> Spec:
    """The spec of a run, its secret part included. Its schema is that in private/."""
    folder = RunFolder.find(out)
    if folder.root == folder.public or not (folder.public / "spec.toml").is_file():
        raise SordinoError(f"--resume: '{out}' holds no run (no public/spec.toml); check the path.")
    values = folder.settings()
    if "schema" in values:
        values["schema"] = str(folder.kept_schema().absolute())
    return Spec.of(values)


def pay(run: PreparedRun, ledger: Ledger, identity: str) -> None:
    """Charge the whole plan, once, before its first round: one row per query and group of equal clients."""
    for group in spending.groups(run.plan):
        clients = f"clients {ranges(group.clients)}"
        if group.releases and not ledger.charged(identity, clients, 0):
            ledger.charge([Charge.of(r, clients, 0, identity, run.plan.privacy.adjacency) for r in group.releases])


def release_statistics(run: PreparedRun, out: Path) -> PreparedRun:
    """Find the ranges that the schema leaves open, by the first round of the plan. A run without such columns stays.

    The charge is stored first, then the schema with its ranges in private/, then the checkpoint, and the public copy
    last. A kill before the schema is stored showed nothing, so that counts are drawn again; after that they are not.

    Returns:
      The run with its records scaled by these ranges.

    Raises:
      SordinoError: the schema in private/ is missing or an older one, or the public copy is another one.
    """
    if run.unscaled is None:
        return run
    folder = RunFolder.find(out)
    identity = run.identity(folder.keys().identity)
    limit = (None, None) if run.resolved.noise is not None else (run.plan.privacy.epsilon, run.plan.privacy.delta)
    with ExitStack() as stack:
        stack.enter_context(folder.locked())
        ledger = stack.enter_context(Ledger(folder.private / "ledger.db", epsilon=limit[0], delta=limit[1]))
        progress, lease = _begin(run, folder, ledger, identity, stack)
        began = time.perf_counter()
        kept = Schema.read(folder.kept_schema())
        if kept.unknown and progress.done:
            raise SordinoError(
                f"resume: '{folder.kept_schema()}' lacks {kept.unknown[0]}, which round 1 found and may have shown; "
                "counting again would release it twice. Put the file back as it was, or start a new run."
            )
        if kept.unknown:
            kept = count(run, kept)
            files.write(folder.private / SCHEMA, kept.toml().encode())
        found = run
        if run.dataset.schema != kept:
            found = replace(prepare_resolved(run.resolved.with_schema(kept)), plan=run.plan, source=run.source)
        if not progress.done:
            checkpoint = after_count(found)
            line = {"round": 1, "epsilon": finite(spending.epsilon_after(run.plan, 0))}
            artifacts.store(folder, identity, (checkpoint, checkpoint.theta), line)
            if lease is not None:
                lease.keep(1)
            ledger.mark(identity, 1)
            artifacts.add_timing(folder, 1, time.perf_counter() - began)
        folder.show_schema()
    return found


def count(run: PreparedRun, schema: Schema) -> Schema:
    """Release the first round, the noised counts, and complete the schema by them. The caller has paid."""
    assert run.unscaled is not None
    tally = run.resolved.statistics
    (first,) = reference.run(run.plan, tally, run.unscaled, run.source, stop=1)  # type: ignore[arg-type]
    aggregate = first.aggregate if isinstance(first.aggregate, Tensor) else torch.zeros(tally.dimension)
    std = calibration.aggregate_std(run.plan, 0)
    return found_schema(schema, tally, aggregate.double().cpu().numpy(), std)


def after_count(run: PreparedRun) -> Checkpoint:
    """Where the engine goes on after the round of counts."""
    theta = run.model.init()
    return Checkpoint(theta, theta.new_zeros(run.resolved.statistics.dimension), ())


def rounds(run: PreparedRun, out: Path | None = None, team: Team = ALONE) -> Iterator[dict[str, Any]]:
    """Train, and yield the metrics of each round. With `out`, continue from the state of that directory, which holds
    the ledger. With a team this is rank 0; the others call `ranks.follow`."""
    if run.dataset.schema is not None and run.dataset.schema.unknown:
        raise SordinoError("private_statistics: the ranges are not found yet; use sordino run, or release_statistics.")
    with ExitStack() as stack:
        progress, seconds = Progress(0, (), None, []), 0.0
        if out:
            folder = RunFolder.find(out)
            stack.enter_context(folder.locked())
            identity = run.identity(folder.keys().identity)
            fixed_noise = run.resolved.noise is not None
            limit = (None, None) if fixed_noise else (run.plan.privacy.epsilon, run.plan.privacy.delta)
            ledger = stack.enter_context(Ledger(folder.private / "ledger.db", epsilon=limit[0], delta=limit[1]))
            progress, lease = _begin(run, folder, ledger, identity, stack)
            _show(run, folder, progress)
            seconds = artifacts.total_seconds(folder)
        team.tell(progress.done, progress.checkpoint)
        yield from progress.history
        digest = artifacts.digest(progress.history)
        x, y = torch.from_numpy(run.dataset.x_test).to(run.records.x), torch.from_numpy(run.dataset.y_test)
        began = time.perf_counter() - seconds
        for this_round in simulate.run(
            run.plan,
            run.model,
            run.records,
            run.source,
            start=progress.done,
            checkpoint=progress.checkpoint,
            team=team,
        ):
            done = this_round.t + 1
            last = done == run.plan.rounds
            scores: dict[str, Any] = {}
            if last or done % run.resolved.evaluate_every == 0:
                found = evaluate(run.model, this_round.model, x, y.to(x.device), unit=run.dataset.unit, last=last)
                scores = _line(found)
            if last and not run.dataset.sequences:
                scores["no_better"] = no_better(run.dataset, scores)  # for the model card; empty if it is better
            line: dict[str, Any] = {
                "round": done,
                **scores,
                "epsilon": finite(spending.epsilon_after(run.plan, this_round.t)),
            }
            if out:
                digest = artifacts.store(folder, identity, (this_round.checkpoint, this_round.model), line, digest)
                if lease is not None:
                    lease.keep(done)
                ledger.mark(identity, done)
                with open(folder.public / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")
                artifacts.add_timing(folder, done, time.perf_counter() - began)
            yield line


def _show(run: PreparedRun, folder: RunFolder, progress: Progress) -> None:
    """Write the public schema and metrics, as private/ has them."""
    if run.dataset.schema is not None:
        if run.dataset.schema.toml() != Schema.read(folder.kept_schema()).toml():
            raise SordinoError(
                f"resume: the schema of the run is not '{folder.kept_schema()}', which it goes on with; read the spec "
                "by reopen, or start a new run."
            )
        folder.show_schema()
    lines = "".join(json.dumps(line) + "\n" for line in progress.history)
    (folder.public / "metrics.jsonl").write_text(lines)


def _line(scores: dict[str, float]) -> dict[str, float | None]:
    return {key: finite(value) for key, value in scores.items()}


def _begin(
    run: PreparedRun, folder: RunFolder, ledger: Ledger, identity: str, stack: ExitStack
) -> tuple[Progress, HeldLease | None]:
    """How far the run is, with its charge paid, and its lease; None if it needs none.

    `stack` closes what keeps the lease.

    An empty checkpoint is stored before the charge. So a charge without a checkpoint means that the checkpoint was
    removed, and the rounds after it may have been seen: with fresh noise they would be released a second time. A kill
    between the charge and the first round leaves the empty checkpoint, and nothing was shown.
    """
    if run.dataset.schema is not None:
        folder.check_schema()
    path, charged = folder.private / "checkpoint.npz", len(ledger) > 0
    if not path.exists():
        metrics, model = folder.public / "metrics.jsonl", folder.public / "model.safetensors"
        if charged or model.exists() or (metrics.exists() and metrics.stat().st_size):
            raise SordinoError(
                f"resume: '{path}' is missing, and the run was paid for already; doing its rounds again would release "
                "a second model on one charge. Start a new run."
            )
        artifacts.store(folder, identity, (), None)
    progress = artifacts.restore(folder, identity)
    if progress.done < ledger.marked(identity):
        raise SordinoError(
            f"resume: '{path}' holds round {progress.done}, and {ledger.marked(identity)} rounds were stored; doing "
            "them again would release them twice. Put the newest checkpoint back, or start a new run."
        )
    if progress.done and not charged:
        raise SordinoError(
            f"resume: '{ledger.path}' does not hold the charge of {progress.done} rounds done; start a new run."
        )
    if (shared := shared_of(run, folder.root)) is not None:  # first, so that a charge of our own implies it
        shared.charge(identity, must_exist=charged)
    lease = None
    over = progress.done >= run.plan.rounds  # nothing more will be released
    if not over and (shared is not None or not run.resolved.source.open):
        register = StateRegister(identity) if shared is None else stack.enter_context(shared.open())
        lease = leases.take(folder, identity, progress.done, register)
    pay(run, ledger, identity)
    return progress, lease


def finish(run: PreparedRun, out: Path, history: list[dict[str, Any]], signer: Signer | None = None) -> dict[str, Any]:
    """Write model, certificate, statement, model card and curve.

    Returns:
      The certificate, signed by `signer` or by the key of the run.
    """
    folder, resolved = RunFolder.find(out), run.resolved
    keys = folder.keys()
    progress = artifacts.restore(folder, run.identity(keys.identity))
    if progress.theta is None:
        raise SordinoError(f"out: no round of '{out}' is done yet; train it first.")
    _show(run, folder, progress)
    path = folder.public / "model.safetensors"
    known = (life_table(run, progress.checkpoint), coefficient_intervals(run, progress.checkpoint))
    save_model(path, resolved, run.dataset, run.model, progress.theta, *known)
    title = f"{resolved.method_name} on {run.dataset.name}, {run.plan.clients} clients"
    curve = folder.public / "curve.png"
    drawn = draw_curve(curve, title, run.plan.privacy.delta, history)
    with Ledger(folder.private / "ledger.db") as ledger:
        cert = certificate(
            run.plan,
            run.source,
            version=__version__,
            spec_sha256=hashlib.sha256(resolved.published(run.plan)[0].encode()).hexdigest(),
            model_sha256=sha256(folder.public / "model.safetensors"),
            metrics_sha256=sha256(folder.public / "metrics.jsonl"),
            curve_sha256=sha256(curve) if drawn else "",
            schema_sha256=sha256(folder.public / SCHEMA) if run.dataset.schema is not None else "",
            adapter_sha256=adapter_sha256(path),
            ledger_head=ledger.head(),
            ledger_rows=len(ledger),
            tested=len(run.dataset.y_test) if run.plan.privacy.unit.sizes_public else None,
            execution=resolved.execution,
            assumes=resolved.assumptions,
            doubts=resolved.doubts,
            names=run.names,
        )
    signer = signer or keys.sign
    cert, text = issue(model_card.bind(folder.public, cert, signer), signer)
    (folder.public / "statement.md").write_bytes(text.encode())
    (folder.public / "certificate.json").write_text(json.dumps(cert, indent=2) + "\n", encoding="utf-8")
    folder.level_times()
    name = run.identity(keys.identity)
    folder.write_readme(readme(cert, data_public=resolved.source.open, name=name))
    return cert


def life_table(run: PreparedRun, checkpoint: Any) -> list[dict[str, float]] | None:
    """The life table that `auto` released, from the state of its rule; None if the run released none."""
    if not isinstance(run.model, Hazards) or run.resolved.method_name != "auto":
        return None
    cells = np.asarray(checkpoint[1][KalmanState._fields.index("cells")].double().cpu().numpy())
    return life_table_of(cells, calibration.aggregate_std(run.plan, 0), run.model.intervals)


def no_intervals(run: PreparedRun) -> bool:
    """Whether it is certain before training that no coefficient gets an interval, by plan and dimension alone."""
    if not run.resolved.spec.uncertainty:
        return False
    stds, bound = _uncertainty_stds(run), run.plan.stages[-1].queries[HESSIAN].clip
    numeric, size = len(stds) > SPREAD, run.dataset.x_train.shape[1] + 1
    if numeric:
        return intervals.hidden_for_sure(bound, stds[HESSIAN], size)
    # Of two classes, half of the Hessian; at the intercept p (1 - p), which must be seen if it is not calibrated.
    intercept = intervals.most_records(run.plan.privacy) / 4
    bound = bound / 2 if run.resolved.spec.calibrate else min(bound / 2, intercept)
    return intervals.hidden_for_sure(bound, stds[HESSIAN] / 2, size)


def _uncertainty_stds(run: PreparedRun) -> list[float]:
    """The standard deviations of the noise on the releases of the last round, by query."""
    last = len(run.plan.method.stages) - 1
    return [calibration.aggregate_std(run.plan, last, number) for number in range(len(run.plan.stages[last].queries))]


def coefficient_intervals(run: PreparedRun, checkpoint: Any) -> list[dict[str, Any]] | None:
    """Intervals of the coefficients, from the last releases of the run; None if it released none for them."""
    if not run.resolved.spec.uncertainty:
        return None
    schema, privacy, stds = run.resolved.source.schema, run.plan.privacy, _uncertainty_stds(run)
    _, point, gradient, hessian, trace = (np.asarray(part.double().cpu().numpy()) for part in checkpoint[1])
    released = intervals.Released(point, gradient, hessian, (stds[GRADIENT], stds[HESSIAN]))
    numeric, records = bool(trace.size), intervals.most_records(privacy)
    released = released if numeric else released.of_contrast()
    spread = intervals.dispersion(float(trace[0]), stds[SPREAD], released.hessian) if numeric else 1.0
    sure = schema.task == "quantity" if numeric and schema is not None else bool(run.resolved.spec.calibrate)
    found = intervals.estimate(released, sum(run.plan.sizes), records * spread, sure=sure)
    names = run.dataset.features or tuple(f"x{k}" for k in range(run.dataset.x_train.shape[1]))
    return intervals.table(found if schema is None else found.in_units(schema), names)


def final_metrics(run: PreparedRun, out: Path) -> dict[str, Any]:
    """Every metric of the stored model on the test records. At client level nothing tells how many those are."""
    theta = _final_model(run, out)
    if theta is None:
        return {}
    x, y = torch.from_numpy(run.dataset.x_test).to(run.records.x), torch.from_numpy(run.dataset.y_test)
    counts = run.plan.privacy.unit.sizes_public
    threshold, data = run.resolved.spec.threshold, run.dataset
    return evaluate_fully(run.model, theta.to(x), x, y, threshold, counts=counts, unit=data.unit, classes=data.classes)


def _final_model(run: PreparedRun, out: Path) -> Tensor | None:
    folder = RunFolder.find(out)
    return artifacts.restore(folder, run.identity(folder.keys().identity)).theta


def summary(run: PreparedRun, cert: dict[str, Any], history: list[dict[str, Any]], out: Path | None) -> dict[str, Any]:
    """The document that `--json` prints."""
    names = dict.fromkeys(name for task in OF_A_ROUND.values() for name in task)
    by_round = {k: {str(line["round"]): line[k] for line in history if k in line} for k in names}
    measured = final_metrics(run, out) if out else {}
    document = {
        **{k: v for k, v in by_round.items() if v},
        "metrics": measured,
        "epsilon": cert["epsilon"],
        "delta": cert["delta"],
        "certified": cert["certified"],
        "reasons": cert["reasons"],
        "publishable": publishable(cert, run.resolved.source.open),
        "noise": cert["noise"],
        "client_noise": cert["client_noise"],
        "method": run.resolved.method_name,
        "clients": run.plan.clients,
        "records": cert["records"],
        "rounds": run.plan.rounds,
        "beats_guessing": beats_constant_guess(run.dataset, {**measured, **history[-1]}),
        "client_names": cert["client_names"],
        "out": str(out) if out else None,
        "spec": run.published(),
    }
    if run.resolved.source.open:  # exact functions of the records, and the time that they took
        seconds = artifacts.total_seconds(RunFolder.find(out)) if out else None
        theta = _final_model(run, out) if out else None
        clients = [] if theta is None else evaluate_clients(run.model, theta, run.records, run.dataset.unit)
        document |= {"heterogeneity": run.heterogeneity, "seconds": seconds, "client_metrics": clients}
    return document
