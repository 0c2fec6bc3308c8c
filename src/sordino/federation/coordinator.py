"""The coordinator's side: it sends models, adds up the updates, and can be killed at any moment.

Each round's outcome is on disk before the next round begins. After a restart the coordinator sends the messages of the
unfinished round again, byte for byte, and sites answer with what they stored: nothing is noised or charged twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import files, plugins, wire
from sordino.core import Broadcast, Tree
from sordino.data.sources import Dataset, load
from sordino.engines.oracle import combined, decode_sum, masked_size, rows_of_stream, stream_factors, stream_of_rows
from sordino.engines.schedule import RoundPlan, checkpoint_template, round_plans
from sordino.errors import SordinoError, StoppedError
from sordino.evidence.certificate import certificate
from sordino.evidence.signing import sha256
from sordino.evidence.statement import issue
from sordino.federation import counting, limits, readmes, robust
from sordino.federation.config import FederationConfig, text_column
from sordino.federation.enrolment import Enrolment
from sordino.federation.messenger import Messenger, Transport, about, reason_of
from sordino.federation.progress import COORDINATOR_LOCK, parsed, read_lines
from sordino.federation.secure_sum import Arrays, SecureSum, parts
from sordino.federation.study_queue import ASKED_AGAIN
from sordino.federation.terms import DRAWN, carried_out
from sordino.federation.testing import AgreedEvaluation
from sordino.federation.witness import RECEIPTS, Receipts
from sordino.foreign import printable
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Secure
from sordino.training import noised_metrics
from sordino.training.artifacts import adapter_sha256, save_model
from sordino.training.evaluate import (
    evaluate,
    evaluate_fully,
    hardly_better,
    no_better,
    of_constant,
    scores_to_compare,
    task_of,
)
from sordino.training.folder import SCHEMA
from sordino.training.metrics import Task
from sordino.training.private_statistics import LARGER_EPSILON, found_schema, rough
from sordino.tree import leaves, pack, rebuild, tree_map, unpack
from sordino.version import __version__

log = logging.getLogger("sordino.coordinator")
LONGEST_TEXT = 2000  # characters of a text in progress.jsonl; one that names many sites is long
LOCK_SECONDS = 10.0  # to wait for a coordinator that is just ending
MOST_LOST_ROUNDS = 3  # rounds in a row without a result before the run stops


class StoredRun(NamedTuple):
    """The coordinator's checkpoint."""

    done: Tensor  # rounds done
    theta: Tensor
    state: Tree
    sums: Tree = ()  # of a stream of integers: one row per opened round of the stage, its number and its sum


def serve(transport: Transport, folder: Path) -> None:
    """Run the federation that `folder` describes, from the round where it stands.

    Raises:
      StoppedError: another process coordinates this folder, or the run cannot go on.
      OSError: a file cannot be written, perhaps because the disk is full.
    """
    folder = Path(folder)
    with files.alone(
        folder / COORDINATOR_LOCK,
        f"'{folder}' is in use by another coordinator; stop it, or choose another folder.",
        LOCK_SECONDS,
    ):
        coordinator = Coordinator(transport, folder)
        try:
            coordinator.run()
        except Exception as error:
            why = str(error) if isinstance(error, SordinoError | OSError) else type(error).__name__
            with suppress(OSError):  # a full disk cannot be told to the progress; the exit status tells it
                coordinator.tell("failed", why=why)
            raise


class Coordinator:
    """One run over a transport. Files: `run/` in the coordinator's folder."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.folder = folder
        self.config = FederationConfig.read(folder / "federation.toml")
        self.out = folder / "run"
        self.out.mkdir(mode=0o700, exist_ok=True)
        if not (self.out / "README.txt").exists():
            files.write(self.out / "README.txt", readmes.of_run(None, readmes.COORDINATOR_RUN).encode())
        progress = self.out / "progress.jsonl"
        if progress.exists() and not progress.read_bytes().endswith(b"\n"):
            files.append(progress, "\n")  # a full disk or a kill cut the last line off
        self.messenger = Messenger(transport, self.config.deadline, self.tell, Receipts(folder / RECEIPTS))
        self.enrolment = Enrolment(self.config, self.out, self.messenger, self.tell)
        self.sums: dict[int, Tensor] = {}  # of a stream of integers, by round
        self.forms: dict[int, Any] = {}  # of the messages that a stage's rule accepted

    def run(self) -> None:
        began = time.perf_counter()
        self.tell("waiting", sites=list(self.config.sites))
        met = self.enrolment.meet()
        self.terms = terms = self.enrolment.propose(met)
        self.plan, self.model = terms.plan, terms.model
        self.messenger.most = limits.message_bytes(terms)
        start, theta, state = self._restore()
        self._agree(self.messenger.nodes, start)
        lost = 0
        self.tell("begun", run=terms.run, method=self.plan.method.name, rounds=self.plan.rounds, start=start)
        for round_plan in round_plans(self.plan, self.model, start):
            if len(self.messenger.nodes) < len(terms.names):
                self.messenger.unknown_sites |= self.enrolment.greet().keys()
            if self.messenger.unknown_sites:  # they missed the terms, or connected late
                self._agree(self.messenger.unknown_sites, round_plan.t)
            if round_plan.t == round_plan.first:
                state = round_plan.stage.rule.init(theta, round_plan.facts, state)
            broadcast = Broadcast(theta, round_plan.stage.rule.broadcast(state))
            aggregate, came = (self._secure if terms.secure else self._plain)(round_plan, broadcast)
            stepped = self._step(round_plan, aggregate, theta, state) if came else None
            theta, state = stepped or (theta, state)
            lost = 0 if stepped else lost + 1
            model = round_plan.stage.rule.model(theta, state)
            self._store(round_plan.t + 1, theta, state)
            tested = self._test is not None and not terms.cells
            scores = evaluate(self.model, model, *self._test, unit=self._unit) if tested and self._test else {}
            seconds = round(time.perf_counter() - began, 3)
            self.tell(
                "round",
                t=round_plan.t,
                came=came,
                epsilon=spending.epsilon_after(self.plan, round_plan.t),
                seconds=seconds,
                **scores,
            )
            if lost == MOST_LOST_ROUNDS and round_plan.t + 1 < self.plan.rounds:
                raise StoppedError(
                    f"sites: {lost} rounds in a row had no result, so the run stops before it spends more. Read the "
                    "reasons above and the sites' logs, and start again: the run continues with round "
                    f"{round_plan.t + 2}."
                )
        last = model if start < self.plan.rounds else self._last_model(theta, state)
        if terms.cells:
            self._finish_statistics(last, lost > 0)
        else:
            self._finish(last)

    def _step(self, round_plan: RoundPlan, aggregate: Tree, theta: Tensor, state: Tree) -> tuple[Tensor, Tree] | None:
        """Apply the server's rule. None if it fails: then the model and the state stay as they are."""
        try:
            step, new_state = round_plan.stage.rule.update(aggregate, state, theta, round_plan.step)
            moved = theta + step
            finite = all(bool(torch.isfinite(part).all()) for part in leaves((moved, new_state)))
            if moved.shape != theta.shape or not finite:
                raise SordinoError("the step is not finite, or not of the model's size.")
        except Exception as error:  # a rule fails in many ways on messages of an unknown form
            why = plugins.fault_of(error) or str(error)[:200] or type(error).__name__
            self.tell("abandoned", t=round_plan.t, why=why, came=[])
            return None
        self.forms[round_plan.first] = _form(aggregate)
        return moved, new_state

    def tell(self, what: str, **fields: Any) -> None:
        """Append a line to progress.jsonl. Texts, which may come from a site, are cut and made safe to print."""
        fields = {key: _safe(value) for key, value in fields.items()}
        log.info("%s %s", what, fields)
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "what": what, **fields}
        files.append(self.out / "progress.jsonl", json.dumps(line) + "\n")

    def _agree(self, names: Iterable[str], t: int) -> None:
        """Send the terms to sites that may not know them; round t is next. A refusal before round 0 ends the run."""
        request = wire.encode("terms", {"terms": self.terms.json()})
        answers = self._ask_in_turn(list(names), request, t)
        self.messenger.unknown_sites.clear()
        refused = {name: reason_of(reply) for name, reply in answers.items() if reply.kind == "refused"}
        if refused and t == 0:
            self._withdraw(
                name
                for name, reply in answers.items()
                if reply.kind == "agreed" or reply.fields.get("code") == "queued"
            )
            self.enrolment.withdraw()  # no site was asked anything about its data: other terms may be proposed
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(refused.items()))
            raise StoppedError(f"terms: refused by {reasons}. The log of each site states the details.")
        if self.terms.secure:
            self.secure_sum.offers |= parts(answers, "offer")
            self.secure_sum.gather(t)

    def _ask_in_turn(self, names: list[str], request: bytes, t: int) -> dict[str, wire.Message]:
        """Propose the terms, and wait while sites are busy with other studies; once round 0 is over, do not wait.

        Two studies could wait for each other at two sites. So a study that waits for one with a smaller number gives
        back the places that it has, and takes them again after the place that it waits for.
        """
        until, told = time.monotonic() + self.config.queue_patience, dict[str, int]()
        answers: dict[str, wire.Message] = {}
        asked, given_back = names, list[str]()
        while True:
            answers |= self.messenger.ask(dict.fromkeys(asked, request), "agreed")
            queued = {name: reply for name, reply in answers.items() if reply.fields.get("code") == "queued"}
            refused = any(reply.kind == "refused" for name, reply in answers.items() if name not in queued)
            for name, reply in queued.items():
                if told.get(name) != (place := _whole(reply.fields.get("place"))):
                    told[name] = place
                    self.tell("queued", site=name, place=place)
            if t > 0 or refused or (queued and time.monotonic() > until):
                return answers
            if queued:
                if any(str(reply.fields.get("ahead")) < self.terms.run for reply in queued.values()):
                    given_back += self._withdraw(name for name in answers if name not in queued)
                    answers = dict(queued)
                asked = list(queued)
                time.sleep(ASKED_AGAIN)
            elif given_back:
                asked, given_back = given_back, []
            else:
                return answers

    def _withdraw(self, names: Iterable[str]) -> list[str]:
        """Tell sites that agreed that the run does not begin, so that other studies get their places. Nothing is said
        if it has begun before: a site may have answered. Returns whom it told."""
        begun = (line for line in parsed(read_lines(self.out / "progress.jsonl")) if line["what"] == "begun")
        if any(line.get("run") == self.terms.run for line in begun):
            return []
        chosen = list(names)
        self.messenger.ask(dict.fromkeys(chosen, wire.encode("withdraw", about(self.terms))), "withdrawn")
        return chosen

    @cached_property
    def secure_sum(self) -> SecureSum:
        return SecureSum(self.terms, self.enrolment.roster_of(self.terms), self.out, self.messenger)

    # ------------------------------------------------------------------------------------------------------- the rounds

    def _request(self, round_plan: RoundPlan, broadcast: Broadcast, more: Arrays | None = None) -> bytes:
        skeleton, extras = wire.from_tree(broadcast.extras, "extras")
        fields = about(self.terms, t=round_plan.t, extras=skeleton)
        return wire.encode("round", fields, {"theta": broadcast.theta.numpy(), **extras, **(more or {})})

    def _plain(self, round_plan: RoundPlan, broadcast: Broadcast) -> tuple[Tree, list[str]]:
        """The weighted sum of the updates. Weights are public; a missing site contributes nothing."""
        names = [self.terms.names[i] for i in round_plan.cohort]
        request = self._request(round_plan, broadcast)
        share = self.plan.weights / self.plan.participation.rate(self.plan.clients)
        replies = self.messenger.ask({n: request for n in names if n in self.messenger.nodes}, "update")
        updates = {name: self._update(replies[name], round_plan, broadcast) for name in names if name in replies}
        counted = Counter(_form(update) for update in updates.values() if update is not None)
        form = self.forms.get(round_plan.first) or (counted.most_common(1)[0][0] if counted else None)
        fitting, came = [], []
        for i, name in sorted((self.terms.names.index(name), name) for name in updates):
            update = updates[name]
            if update is None or _form(update) != form:
                self.tell("misfit", site=name, t=round_plan.t)
                continue
            fitting.append((update, float(share[i])))
            came.append(name)
        if trim := self.config.trim:
            if len(came) <= 2 * trim:
                why = f"{len(came)} sites answered, and trim = {trim} needs more than {2 * trim}"
                self.tell("abandoned", t=round_plan.t, why=why, came=came)
                return (), []
            return robust.trimmed_sum([update for update, _ in fitting], [weight for _, weight in fitting], trim), came
        weighted = [tree_map(lambda leaf, w=weight: w * leaf, update) for update, weight in fitting]
        return (tree_map(lambda *leaf: torch.stack(leaf).sum(0), *weighted) if weighted else ()), came

    def _update(self, reply: wire.Message, round_plan: RoundPlan, broadcast: Broadcast) -> Tree | None:
        """A site's update, if it belongs to this round and holds finite floating-point numbers."""
        if reply.fields.get("t") != round_plan.t or reply.fields.get("run") != self.terms.run:
            return None
        try:
            update = wire.to_tree(reply.fields.get("tree"), reply.arrays, "update")
            update = rebuild(update, round_plan.stage.local.message)
        except SordinoError:
            return None
        if not leaves(update) or not all(leaf.is_floating_point() for leaf in leaves(update)):
            return None
        update = tree_map(lambda leaf: leaf.to(broadcast.theta), update)
        return update if all(bool(torch.isfinite(leaf).all()) for leaf in leaves(update)) else None

    def _secure(self, round_plan: RoundPlan, broadcast: Broadcast) -> tuple[Tree, list[str]]:
        """The sum under secure aggregation, if at least the planned number of sites is in it."""
        self.secure_sum.dimension = masked_size(self.plan, round_plan.t)
        total, came = self.secure_sum.round(round_plan.t, lambda offers: self._request(round_plan, broadcast, offers))
        aggregate: Tree = () if total is None else decode_sum(self.plan, round_plan, total)
        factors = stream_factors(self.plan, round_plan)
        self.sums = {t: row for t, row in self.sums.items() if factors is not None and t >= round_plan.first}
        if total is not None and factors is not None:
            self.sums[round_plan.t] = leaves(aggregate)[0]
            aggregate = combined(factors.decoder, round_plan, self.sums)
        return tree_map(lambda leaf: leaf.to(broadcast.theta), aggregate), came

    # ---------------------------------------------------------------------------------------------------------- storing

    def _store(self, done: int, theta: Tensor, state: Tree) -> None:
        sums: Tree = rows_of_stream(self.sums) if self.sums else ()
        files.write(self.out / "checkpoint", pack(StoredRun(torch.tensor([done]), theta, state, sums)))

    def _restore(self) -> tuple[int, Tensor, Tree]:
        path = self.out / "checkpoint"
        if not path.exists():
            return 0, self.model.init().to(self.terms.number), ()
        stored = unpack(path.read_bytes(), StoredRun(torch.zeros(1), torch.zeros(1), ()))
        done, self.sums = int(stored.done[0]), stream_of_rows(stored.sums)
        template = checkpoint_template(self.plan, self.model, stored.theta, done)
        return done, stored.theta, rebuild(stored.state, template.state)

    def _last_model(self, theta: Tensor, state: Tree) -> Tensor:
        return self.plan.stages[-1].rule.model(theta, state)

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor] | None:
        """The coordinator's own test records, if federation.toml names any."""
        config = self.config
        if config.test is None:
            return None
        path = config.path(config.test)
        data = load(
            str(path) if path.exists() else config.test,
            label=config.label,
            schema=config.table_schema,
            classes=self.terms.classes,
            normalize=self.terms.resolved.source.normalize,
            text=text_column(config, self.terms.features),
        )
        x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
        return torch.from_numpy(x).to(self.terms.number), torch.from_numpy(y)

    def _evaluate(self, model: Tensor) -> None:
        """Ask the sites for the noised counts of their test records. What came is stored; a restart asks again, and the
        sites send the same bytes."""
        out = self.out / "evaluation"
        if not self.terms.evaluation or (out / "certificate.json").exists():
            return
        agreed = AgreedEvaluation(self.terms, self._unit)

        def request(offers: Arrays) -> bytes:
            return wire.encode("evaluate", about(self.terms), {"theta": model.numpy(), **offers})

        total: np.ndarray | None = None
        if self.terms.secure:
            self.secure_sum.dimension = agreed.dimension
            summed, came = self.secure_sum.round(self.plan.rounds, request)
            if summed is not None:
                (counts_sum,) = leaves(decode_sum(agreed.plan, agreed.round_plan, summed))
                total = counts_sum.numpy()
        else:
            replies = self.messenger.ask(dict.fromkeys(self.messenger.nodes, request({})), "update")
            counts = {name: self._counts(reply, agreed.dimension) for name, reply in replies.items()}
            came = sorted(name for name, vector in counts.items() if vector is not None)
            weighted = [agreed.plan.weights[self.terms.names.index(name)] * counts[name] for name in came]
            total = np.sum(weighted, axis=0) if weighted else None
        if total is None:
            self.tell("evaluation", came=[], why="too few sites answered")
            return
        numbers = sorted(self.terms.names.index(name) for name in came)
        path = self.out / "model.safetensors"
        found = agreed.store(out, total, numbers, path)
        parts: dict[str, Any] = {key: part for key, part in found.items() if isinstance(part, dict)}
        parts |= {"constant_guess": found["constant_guess"], "doubt": noised_metrics.doubt(found)}
        self.tell("evaluation", came=came, epsilon=self.terms.evaluation, records=found["records"], **parts)

    def _counts(self, reply: wire.Message, size: int) -> np.ndarray | None:
        """A site's noised counts, if they are finite numbers of the agreed size."""
        vector = reply.arrays.get("update0")
        fits = vector is not None and vector.shape == (size,) and vector.dtype.kind == "f"
        if vector is None or not fits or reply.fields.get("run") != self.terms.run or not np.isfinite(vector).all():
            return None
        return np.asarray(vector, np.float64)

    def _finish(self, model: Tensor) -> None:
        no_x, no_y = np.zeros((0, self.terms.features), np.float32), np.zeros(0, np.int64)
        about: dict[str, Any] = {"schema": self.config.table_schema, "sequences": self.terms.learns_text}
        data = Dataset("sites", no_x, no_y, no_x, no_y, None, self.terms.classes, **about)
        save_model(self.out / "model.safetensors", self.terms.resolved, data, self.model, model)
        self._evaluate(model)  # before the sites delete the secret of the run
        done = self._tell_sites(model)
        cert = self._certify(model_sha256=sha256(self.out / "model.safetensors"))
        self.tell("finished", epsilon=cert["epsilon"], sites=done, **self._useless(data, model), **self._metrics(model))

    def _finish_statistics(self, counts: Tensor, lost: bool) -> None:
        """Write the schema that the noised counts complete, and send the sites these counts: they write it too."""
        if lost:
            raise StoppedError("sites: too few answered with counts, so nothing was found. Read the sites' logs.")
        schema = self.config.table_schema
        assert schema is not None
        std = calibration.aggregate_std(self.plan, 0)
        tally = counting.tally_of(schema)
        found = found_schema(schema, tally, counts.double().numpy(), std)
        files.write(self.out / SCHEMA, found.toml().encode())
        done = self._tell_sites(counts)
        cert = self._certify(schema_sha256=sha256(self.out / SCHEMA))
        doubt = rough(tally, std, sum(self.plan.sizes), LARGER_EPSILON)
        more = {} if doubt is None else {"rough": doubt}
        self.tell("finished", epsilon=cert["epsilon"], sites=done, schema=str(self.out / SCHEMA), **more)

    def _tell_sites(self, result: Tensor) -> list[str]:
        """Send the sites what the run found. Returns those that have their certificate."""
        request = wire.encode("finish", about(self.terms, done=self.plan.rounds), {"theta": result.numpy()})
        done: set[str] = set()
        for _ in range(MOST_LOST_ROUNDS):  # a site that misses this message has no certificate
            missing = [name for name in self.messenger.nodes if name not in done]
            done |= self.messenger.ask(dict.fromkeys(missing, request), "finished").keys()
        return sorted(done)

    def _certify(self, model_sha256: str = "", schema_sha256: str = "") -> dict[str, Any]:
        """Write the coordinator's certificate, which names these files by their hashes, and its statement."""
        cert = certificate(
            self.plan,
            Secure(),  # the sites draw the noise; the coordinator draws none
            version=__version__,
            spec_sha256=hashlib.sha256(self.terms.spec.encode()).hexdigest(),
            names=self.terms.names,
            execution=carried_out(self.plan.clients),
            assumes=[DRAWN, *self.terms.assumptions],
            model_sha256=model_sha256,
            schema_sha256=schema_sha256,
            adapter_sha256=adapter_sha256(self.out / "model.safetensors"),
        )
        cert, text = issue(cert)
        files.write(self.out / "statement.md", text.encode())
        files.write(self.out / "README.txt", readmes.of_run(cert, readmes.COORDINATOR_RUN).encode())
        files.write(self.out / "certificate.json", (json.dumps(cert, indent=2) + "\n").encode())
        return cert

    @property
    def _unit(self) -> float:
        schema = self.config.table_schema
        return 1.0 if schema is None else schema.unit

    def _metrics(self, model: Tensor) -> dict[str, Any]:
        """Every metric of the model on the coordinator's own test records; it stays in the coordinator's progress."""
        if self._test is None or not len(self._test[1]):
            return {}
        x, y = self._test
        whole = evaluate_fully(self.model, model, x, y, counts=False, unit=self._unit, classes=self.terms.classes)
        task = task_of(self.model)
        constant = of_constant(task, y.numpy() * self._unit if task is Task.COUNTS else y.numpy())
        return {"metrics": {**whole, "constant": constant, "records": len(y)}}

    def _useless(self, data: Dataset, model: Tensor) -> dict[str, Any]:
        """Why the coordinator's test records do not show that the model is better than a constant guess; else empty.

        `by_chance` is there if it is better on these records, but no more than by chance.
        """
        if self._test is None:
            return {}
        x, y = self._test
        if not len(y):
            return {}
        data = data._replace(y_test=y.numpy(), person_test=None)
        scores = scores_to_compare(self.model, model, x, y, unit=self._unit)
        if why := no_better(data, scores):
            return {"useless": why}
        chance = hardly_better(data, scores)
        return {"useless": chance, "by_chance": True} if chance else {}


def _safe(value: Any) -> Any:
    """A field of the progress, with its texts made safe to print."""
    if isinstance(value, list):
        return [_safe(part) for part in value]
    return printable(value, LONGEST_TEXT) if isinstance(value, str) else value


def _whole(value: Any) -> int:
    """A number that a site told; 0 for anything else."""
    return value if type(value) is int and 0 < value < 2**31 else 0


def _form(tree: Tree) -> Any:
    """How a message is nested, and the shapes of its parts."""
    return tuple(_form(part) for part in tree) if isinstance(tree, tuple) else ("of", *tree.shape)
