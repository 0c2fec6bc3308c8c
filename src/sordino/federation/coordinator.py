"""The coordinator's side: it proposes terms, sends models, adds up what comes back, and can be killed at any moment.

Each round's outcome is on disk before the next begins. Begun again, it sends the letters of the round it was in once
more, byte for byte, and sites answer with what they had stored: nothing is noised or paid for twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import sordino
from sordino import files, secagg, wire
from sordino.core import MOST_EPSILON, Broadcast, Tree
from sordino.data.sources import Dataset, load
from sordino.engines.oracle import decode_sum
from sordino.engines.schedule import RoundPlan, round_plans
from sordino.errors import SordinoError, WireError
from sordino.federation import messenger
from sordino.federation.config import Federation
from sordino.federation.messenger import Messenger, Transport, about, read
from sordino.federation.secure_sum import Arrays, Sums, parts
from sordino.federation.terms import DRAWN, Terms, federated, written
from sordino.privacy import calibration, spending
from sordino.privacy.evidence.certificate import certificate
from sordino.privacy.evidence.statement import statement
from sordino.privacy.mechanisms.random import Secure
from sordino.settings import read_toml
from sordino.training.artifacts import save_model
from sordino.training.evaluate import evaluate
from sordino.tree import leaves, pack, tree_map, unpack

log = logging.getLogger("sordino.coordinator")
LOST = 3  # rounds in a row that may come to nothing before the run stops


class Hello(NamedTuple):
    node: int
    name: str
    records: int
    requested_epsilon: float | None


def serve(transport: Transport, folder: Path) -> None:
    """Run the federation that `folder` describes, from wherever it stands."""
    coordinator = Coordinator(transport, Path(folder))
    try:
        coordinator.run()
    except Exception as error:
        coordinator.tell("failed", why=str(error) if isinstance(error, SordinoError) else type(error).__name__)
        raise


class Coordinator:
    def __init__(self, transport: Transport, folder: Path) -> None:
        self.folder = folder
        self.config = Federation.read(folder / "federation.toml")
        self.out = folder / "run"
        self.out.mkdir(mode=0o700, exist_ok=True)
        self.post = Messenger(transport, self.config.deadline, self.tell)
        self.fresh = False  # whether the terms were proposed just now
        self.forms: dict[int, Any] = {}  # of messages that a stage's rule took

    def run(self) -> None:
        began = time.perf_counter()
        self.tell("waiting", sites=list(self.config.sites))
        met = self._meet()
        self.terms = terms = self._propose(met)
        self.plan, self.model = terms.plan, terms.model
        start, theta, state = self._restore()
        self._agree(self.post.nodes, start)
        lost = 0
        self.tell("begun", run=terms.run, method=self.plan.method.name, rounds=self.plan.rounds, start=start)
        for round_plan in round_plans(self.plan, self.model, start):
            if len(self.post.nodes) < len(terms.names):
                self.post.unknown_sites |= self._greet().keys()
            if self.post.unknown_sites:  # they missed the terms, or came late
                self._agree(self.post.unknown_sites, round_plan.t)
            if round_plan.t == round_plan.first:
                state = round_plan.stage.rule.init(theta, round_plan.facts, state)
            broadcast = Broadcast(theta, round_plan.stage.rule.broadcast(state))
            aggregate, came = (self._secure if terms.secure else self._plain)(round_plan, broadcast)
            lost = 0 if came else lost + 1
            if came:
                theta, state = self._moved(round_plan, aggregate, theta, state)
            model = round_plan.stage.rule.model(theta, state)
            self._store(round_plan.t + 1, theta, state)
            scores = evaluate(self.model, model, *self._test) if self._test else {}
            seconds = round(time.perf_counter() - began, 3)
            self.tell(
                "round",
                t=round_plan.t,
                came=came,
                epsilon=spending.epsilon_after(self.plan, round_plan.t),
                seconds=seconds,
                **scores,
            )
            if lost == LOST and round_plan.t + 1 < self.plan.rounds:
                raise SordinoError(
                    f"sites: {LOST} rounds in a row came to nothing; no more is spent on this. Look at the sites' "
                    f"logs and start again: the run goes on with round {round_plan.t + 1}."
                )
        self._finish(model if start < self.plan.rounds else self._last_model(theta, state))

    def _moved(self, round_plan: RoundPlan, aggregate: Tree, theta: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """The step, if there is one: what sites made up moves nothing."""
        try:
            step, after = round_plan.stage.rule.update(aggregate, state, theta, round_plan.step)
            there = theta + step
            if there.shape != theta.shape or not all(
                bool(torch.isfinite(part).all()) for part in leaves((there, after))
            ):
                raise SordinoError("the step is not finite, or not of the model's size.")
        except Exception as error:  # a rule fails in many ways on messages of a form it does not know
            self.tell("abandoned", t=round_plan.t, why=str(error)[:200] or type(error).__name__, came=[])
            return theta, state
        self.forms[round_plan.first] = _form(aggregate)
        return there, after

    def tell(self, what: str, **fields: Any) -> None:
        """Progress, for whoever watches the folder."""
        log.info("%s %s", what, fields)
        files.append(self.out / "progress.jsonl", json.dumps({"what": what, **fields}) + "\n")

    # ---------------------------------------------------------------------------------------------------- before it all

    def _meet(self) -> dict[str, Hello]:
        """Those who say who they are; waits until all are there, or on a resumed run as many as a round needs."""
        wanted = set(self.config.sites)
        least = len(wanted) - self.config.dropouts if (self.out / "terms.json").exists() else len(wanted)
        met: dict[str, Hello] = {}
        began = time.monotonic()
        while True:
            met |= self._greet()
            waited = time.monotonic() - began
            if met.keys() == wanted or (len(met) >= least and waited > self.config.deadline):
                return met
            if waited > self.config.patience:
                raise SordinoError(f"sites: {', '.join(sorted(wanted - met.keys()))} did not come in time.")
            time.sleep(messenger.POLL)

    def _greet(self) -> dict[str, Hello]:
        """Sites that were not met before."""
        known = self.post.nodes
        new = [node for node in self.post.transport.sites() if node not in known.values()]
        if not new:
            return {}
        replies = self.post.transport.exchange(dict.fromkeys(new, wire.encode("hello", {})), self.config.deadline)
        said = [hello for node, reply in replies.items() if (hello := self._hello(node, reply)) is not None]
        met = {hello.name: hello for hello in said if hello.name in self.config.sites}
        known.update({name: hello.node for name, hello in met.items()})
        return met

    def _hello(self, node: int, reply: bytes) -> Hello | None:
        found = read(reply, "hello")
        name, records, requested_epsilon = (
            found.fields.get(k) if found else None for k in ("name", "records", "epsilon")
        )
        if isinstance(name, str) and type(records) is int and 0 < records < 2**40:
            if requested_epsilon is None:
                return Hello(node, name, records, None)
            if type(requested_epsilon) in (float, int) and 0 < requested_epsilon < MOST_EPSILON:
                return Hello(node, name, records, float(requested_epsilon))
        self.tell("misfit", node=str(node))
        return None

    def _propose(self, met: dict[str, Hello]) -> Terms:
        path = self.out / "terms.json"
        if path.exists():
            return Terms.read(path.read_text(encoding="utf-8"))
        config = self.config
        spec = federated(read_toml(config.path(config.spec)))
        text = written(spec)
        names = tuple(config.sites)
        roster = ""
        if spec.trust == "secure-aggregation":
            names = tuple(self.roster.names)
            if set(names) != set(config.sites):
                raise SordinoError("roster: it does not name the same sites as federation.toml.")
            roster = self.roster.sha256()
        terms = Terms(
            run=secrets.token_hex(16),
            spec=text,
            names=names,
            sizes=tuple(met[name].records for name in names),
            requested_epsilons={
                name: requested_epsilon
                for name in names
                if (requested_epsilon := met[name].requested_epsilon) is not None and requested_epsilon < spec.epsilon
            },
            features=config.features,
            classes=tuple(config.classes),
            dropouts=config.dropouts,
            colluders=config.colluders,
            roster=roster,
        )
        if roster:
            secagg.Session.of(terms.run, self.roster, terms.sha256(), terms.dropouts, terms.colluders)
        terms = Terms.read(terms.json())
        calibration.query_noises(terms.plan)
        files.write(path, terms.json().encode())
        files.write(self.out / "spec.toml", terms.spec.encode())
        self.fresh = True
        return terms

    def _agree(self, names: Iterable[str], t: int) -> None:
        """Terms, to sites that may not know them yet; round t is the next. Who refuses before the first ends it all."""
        letter = wire.encode("terms", {"terms": self.terms.json()})
        found = self.post.ask(dict.fromkeys(names, letter), "agreed")
        self.post.unknown_sites.clear()
        refused = {name: str(no.fields.get("reason")) for name, no in found.items() if no.kind == "refused"}
        if refused and t == 0:
            if self.fresh:  # nobody was asked anything about them: others may be proposed
                (self.out / "terms.json").unlink()
            said = "; ".join(f"{name}: {reason}" for name, reason in sorted(refused.items()))
            raise SordinoError(f"terms: refused by {said}. The sites' own logs say more.")
        if self.terms.secure:
            self.sums.offers |= parts(found, "offer")
            self.sums.gather(t)

    @cached_property
    def roster(self) -> secagg.Roster:
        return secagg.Roster.read(self.config.path(self.config.roster))

    @cached_property
    def sums(self) -> Sums:
        return Sums(self.terms, self.roster, self.out, self.post)

    # ------------------------------------------------------------------------------------------------------- the rounds

    def _letter(self, round_plan: RoundPlan, broadcast: Broadcast, more: Arrays | None = None) -> bytes:
        skeleton, words = wire.from_tree(broadcast.extras, "word")
        fields = about(self.terms, t=round_plan.t, word=skeleton)
        return wire.encode("round", fields, {"theta": broadcast.theta.numpy(), **words, **(more or {})})

    def _plain(self, round_plan: RoundPlan, broadcast: Broadcast) -> tuple[Tree, list[str]]:
        """Every message is seen, and weighted by public numbers; who is missing moves nothing."""
        names = [self.terms.names[i] for i in round_plan.cohort]
        letter = self._letter(round_plan, broadcast)
        share = self.plan.weights / self.plan.participation.rate(self.plan.clients)
        replies = self.post.ask({n: letter for n in names if n in self.post.nodes}, "said")
        said = {name: self._message(replies[name], round_plan, broadcast) for name in names if name in replies}
        counted = Counter(_form(message) for message in said.values() if message is not None)
        form = self.forms.get(round_plan.first) or (counted.most_common(1)[0][0] if counted else None)
        parts, came = [], []
        for i, name in sorted((self.terms.names.index(name), name) for name in said):
            message = said[name]
            if message is None or _form(message) != form:
                self.tell("misfit", site=name, t=round_plan.t)
                continue
            parts.append(tree_map(lambda leaf, w=float(share[i]): w * leaf, message))
            came.append(name)
        return (tree_map(lambda *leaf: torch.stack(leaf).sum(0), *parts) if parts else ()), came

    def _message(self, found: wire.Message, round_plan: RoundPlan, broadcast: Broadcast) -> Tree | None:
        """What a site said, if it is made of finite numbers of the model's type and of this round."""
        if found.fields.get("t") != round_plan.t or found.fields.get("run") != self.terms.run:
            return None
        try:
            message = wire.to_tree(found.fields.get("tree"), found.arrays, "said")
        except WireError:
            return None
        if not leaves(message) or not all(leaf.is_floating_point() for leaf in leaves(message)):
            return None
        message = tree_map(lambda leaf: leaf.to(broadcast.theta), message)
        return message if all(bool(torch.isfinite(leaf).all()) for leaf in leaves(message)) else None

    def _secure(self, round_plan: RoundPlan, broadcast: Broadcast) -> tuple[Tree, list[str]]:
        """Only the sum is seen, and only if as many as planned are in it."""
        total, came = self.sums.round(round_plan.t, lambda offers: self._letter(round_plan, broadcast, offers))
        return (() if total is None else decode_sum(self.plan, round_plan, total).to(broadcast.theta)), came

    # ---------------------------------------------------------------------------------------------------------- storing

    def _store(self, done: int, theta: Tensor, state: Tree) -> None:
        files.write(self.out / "checkpoint", pack((torch.tensor([done]), theta, state)))

    def _restore(self) -> tuple[int, Tensor, Tree]:
        path = self.out / "checkpoint"
        if not path.exists():
            return 0, self.model.init().to(self.terms.number), ()
        done, theta, state = unpack(path.read_bytes())
        return int(done[0]), theta, state

    def _last_model(self, theta: Tensor, state: Tree) -> Tensor:
        return self.plan.stages[-1].rule.model(theta, state)

    @property
    def _test(self) -> tuple[Tensor, Tensor] | None:
        if self.config.test is None:
            return None
        if not hasattr(self, "_loaded"):
            config, spec = self.config, self.terms.parsed
            name = config.test or ""
            where = config.path(name)
            data = load(
                str(where) if where.exists() else name,
                label=config.label,
                classes=self.terms.classes,
                normalize=str(spec.normalize),
            )
            x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
            self._loaded = torch.from_numpy(x).to(self.terms.number), torch.from_numpy(y)
        return self._loaded

    def _finish(self, model: Tensor) -> None:
        letter = wire.encode("finish", about(self.terms, done=self.plan.rounds), {"theta": model.numpy()})
        done: set[str] = set()
        for _ in range(LOST):  # who misses this has no certificate
            missing = [name for name in self.post.nodes if name not in done]
            done |= self.post.ask(dict.fromkeys(missing, letter), "finished").keys()
        cert = certificate(
            self.plan,
            Secure(),  # the sites' own; the coordinator draws none
            version=sordino.__version__,
            spec_sha256=hashlib.sha256(self.terms.spec.encode()).hexdigest(),
            names=self.terms.names,
            execution=f"as a federation of {self.plan.clients} sites; this is the coordinator's statement",
            assumes=[DRAWN],
        )
        nobody = np.zeros((0, self.terms.features), np.float32)
        none = np.zeros(0, np.int64)
        data = Dataset("sites", nobody, none, nobody, none, None, self.terms.classes)
        save_model(self.out / "model.safetensors", self.terms.resolved, data, self.model, model)
        files.write(self.out / "statement.md", statement(cert).encode())
        files.write(self.out / "certificate.json", (json.dumps(cert, indent=2) + "\n").encode())
        self.tell("finished", epsilon=cert["epsilon"], sites=sorted(done))


def _form(tree: Tree) -> Any:
    """Of a message: how it is nested, and the shapes of its parts."""
    return tuple(_form(part) for part in tree) if isinstance(tree, tuple) else ("of", *tree.shape)
