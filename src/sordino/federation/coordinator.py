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
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

import sordino
from sordino import secagg, wire
from sordino.core import Down, SordinoError, Tree
from sordino.data.sources import Dataset, load
from sordino.engines.client import Turn, opened, turns
from sordino.experiments.run import evaluate, save_model
from sordino.experiments.spec import read_values
from sordino.federation.config import Federation
from sordino.federation.disk import write
from sordino.federation.terms import Terms, federated, written
from sordino.privacy.certificate import certificate
from sordino.privacy.noise import Secure
from sordino.privacy.statement import statement
from sordino.tree import leaves, pack, tree_map, unpack

log = logging.getLogger("sordino.coordinator")
LOST = 3  # rounds in a row that may come to nothing before the run stops
POLL = 1.0  # seconds between looks for sites
Arrays = dict[str, np.ndarray]


class Transport(Protocol):
    """Letters to numbered nodes and their replies; who failed or was late is missing."""

    def sites(self) -> list[int]: ...

    def exchange(
        self, letters: dict[int, bytes], seconds: float, enough: Callable[[dict[int, bytes]], bool] | None = None
    ) -> dict[int, bytes]: ...


class Hello(NamedTuple):
    node: int
    name: str
    records: int
    wish: float | None


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
        self.transport, self.folder = transport, folder
        self.config = Federation.read(folder / "federation.toml")
        self.out = folder / "run"
        self.out.mkdir(mode=0o700, exist_ok=True)
        self.nodes: dict[str, int] = {}
        self.offers: dict[str, bytes] = {}
        self.forms: dict[int, Any] = {}  # of messages that a stage's rule took

    def run(self) -> None:
        began = time.perf_counter()
        self.tell("waiting", sites=list(self.config.sites))
        met = self._meet()
        self.terms = terms = self._propose(met)
        self.plan, self.model = terms.plan, terms.model
        self._agree()
        start, theta, state = self._restore()
        if terms.secure and start < self.plan.rounds:
            self._begin(start)
        lost = 0
        self.tell("begun", run=terms.run, method=self.plan.method.name, rounds=self.plan.rounds, start=start)
        for turn in turns(self.plan, self.model, start):
            if turn.t == turn.first:
                state = turn.stage.rule.init(theta, turn.facts, state)
            down = Down(theta, turn.stage.rule.say(state))
            aggregate, came = (self._secure if terms.secure else self._plain)(turn, down)
            lost = 0 if came else lost + 1
            if came:
                theta, state = self._moved(turn, aggregate, theta, state)
            model = turn.stage.rule.model(theta, state)
            self._store(turn.t + 1, theta, state)
            scores = evaluate(self.model, model, *self._test) if self._test else {}
            seconds = round(time.perf_counter() - began, 3)
            self.tell("round", t=turn.t, came=came, epsilon=self.plan.spent(turn.t), seconds=seconds, **scores)
            if lost == LOST and turn.t + 1 < self.plan.rounds:
                raise SordinoError(
                    f"sites: {LOST} rounds in a row came to nothing; no more is spent on this. Look at the sites' "
                    f"logs and start again: the run goes on with round {turn.t + 1}."
                )
        self._finish(model if start < self.plan.rounds else self._last_model(theta, state))

    def _moved(self, turn: Turn, aggregate: Tree, theta: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """The step, if there is one: what sites made up moves nothing."""
        try:
            step, after = turn.stage.rule.update(aggregate, state, theta, turn.step)
            there = theta + step
            if there.shape != theta.shape or not all(
                bool(torch.isfinite(part).all()) for part in leaves((there, after))
            ):
                raise SordinoError("the step is not finite, or not of the model's size.")
        except Exception as error:  # a rule fails in many ways on messages of a form it does not know
            self.tell("abandoned", t=turn.t, why=str(error)[:200] or type(error).__name__, came=[])
            return theta, state
        self.forms[turn.first] = _form(aggregate)
        return there, after

    def tell(self, what: str, **fields: Any) -> None:
        """Progress, for whoever watches the folder."""
        log.info("%s %s", what, fields)
        with open(self.out / "progress.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, **fields}) + "\n")

    # ---------------------------------------------------------------------------------------------------- before it all

    def _meet(self) -> dict[str, Hello]:
        """Those who say who they are; waits until all are there, or on a resumed run as many as a round needs."""
        wanted, until = set(self.config.sites), time.monotonic() + self.config.patience
        least = len(wanted) - self.config.dropouts if (self.out / "terms.json").exists() else len(wanted)
        met: dict[str, Hello] = {}
        asked_alone = 0.0
        while True:
            new = [node for node in self.transport.sites() if node not in {hello.node for hello in met.values()}]
            if new:
                replies = self.transport.exchange(dict.fromkeys(new, wire.encode("hello", {})), self.config.deadline)
                for node, reply in replies.items():
                    hello = self._hello(node, reply)
                    if hello is not None and hello.name in wanted:
                        met[hello.name] = hello
            if met.keys() == wanted or (len(met) >= least and asked_alone > self.config.deadline):
                self.nodes = {name: hello.node for name, hello in met.items()}
                return met
            if time.monotonic() > until:
                raise SordinoError(f"sites: {', '.join(sorted(wanted - met.keys()))} did not come in time.")
            time.sleep(POLL)
            asked_alone += POLL

    def _hello(self, node: int, reply: bytes) -> Hello | None:
        found = self._read(reply, "hello")
        name, records, wish = (found.fields.get(k) if found else None for k in ("name", "records", "epsilon"))
        if not isinstance(name, str) or type(records) is not int or type(wish) not in (float, int, type(None)):
            self.tell("misfit", node=str(node))
            return None
        return Hello(node, name, records, None if wish is None else float(wish))

    def _propose(self, met: dict[str, Hello]) -> Terms:
        path = self.out / "terms.json"
        if path.exists():
            return Terms.read(path.read_text(encoding="utf-8"))
        config = self.config
        spec = federated(read_values(config.path(config.spec)))
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
            wishes={name: wish for name in names if (wish := met[name].wish) is not None and wish < spec.epsilon},
            features=config.features,
            classes=tuple(config.classes),
            dropouts=config.dropouts,
            colluders=config.colluders,
            roster=roster,
        )
        if roster:
            secagg.Session.of(terms.run, self.roster, terms.sha256(), terms.dropouts, terms.colluders)
        terms.plan.levels  # noqa: B018  what cannot be calibrated is refused before anybody is asked
        write(path, terms.json().encode())
        write(self.out / "spec.toml", terms.spec.encode())
        return terms

    def _agree(self) -> None:
        letter = wire.encode("terms", {"terms": self.terms.json()})
        refused = {}
        for name, found in self._ask(dict.fromkeys(self.nodes, letter), "agreed").items():
            if found.kind == "refused":
                refused[name] = str(found.fields.get("reason"))
            elif found.fields.get("terms") == self.terms.sha256() and "offer" in found.arrays:
                self.offers[name] = found.arrays["offer"].tobytes()
        if refused:
            said = "; ".join(f"{name}: {reason}" for name, reason in sorted(refused.items()))
            raise SordinoError(f"terms: refused by {said}. The sites' own logs say more.")

    @cached_property
    def roster(self) -> secagg.Roster:
        return secagg.Roster.read(self.config.path(self.config.roster))

    @cached_property
    def session(self) -> secagg.Session:
        terms = self.terms
        return secagg.Session.of(terms.run, self.roster, terms.sha256(), terms.dropouts, terms.colluders)

    # ------------------------------------------------------------------------------------------------------- the rounds

    def _letter(self, turn: Turn, down: Down, more: Arrays | None = None) -> bytes:
        skeleton, words = wire.from_tree(down.word, "word")
        fields = {"run": self.terms.run, "terms": self.terms.sha256(), "t": turn.t, "word": skeleton}
        return wire.encode("round", fields, {"theta": down.theta.numpy(), **words, **(more or {})})

    def _plain(self, turn: Turn, down: Down) -> tuple[Tree, list[str]]:
        """Every message is seen, and weighted by public numbers; who is missing moves nothing."""
        names = [self.terms.names[i] for i in turn.cohort]
        letter = self._letter(turn, down)
        share = self.plan.weights / self.plan.participation.rate(self.plan.clients)
        replies = self._ask({n: letter for n in names if n in self.nodes}, "said")
        said = {name: self._message(replies[name], turn, down) for name in names if name in replies}
        counted = Counter(_form(message) for message in said.values() if message is not None)
        form = self.forms.get(turn.first) or (counted.most_common(1)[0][0] if counted else None)
        parts, came = [], []
        for i, name in sorted((self.terms.names.index(name), name) for name in said):
            message = said[name]
            if message is None or _form(message) != form:
                self.tell("misfit", site=name, t=turn.t)
                continue
            parts.append(tree_map(lambda leaf, w=float(share[i]): w * leaf, message))
            came.append(name)
        return (tree_map(lambda *leaf: torch.stack(leaf).sum(0), *parts) if parts else ()), came

    def _message(self, found: wire.Message, turn: Turn, down: Down) -> Tree | None:
        """What a site said, if it is made of finite numbers of the model's type and of this round."""
        if found.fields.get("t") != turn.t or found.fields.get("run") != self.terms.run:
            return None
        try:
            message = wire.to_tree(found.fields.get("tree"), found.arrays, "said")
        except wire.WireError:
            return None
        if not leaves(message) or not all(leaf.is_floating_point() for leaf in leaves(message)):
            return None
        message = tree_map(lambda leaf: leaf.to(down.theta), message)
        return message if all(bool(torch.isfinite(leaf).all()) for leaf in leaves(message)) else None

    def _secure(self, turn: Turn, down: Down) -> tuple[Tree, list[str]]:
        """Only the sum is seen, and only if as many as planned are in it."""
        session = self.session
        offers = self._offers(turn.t)
        if len(offers) < session.threshold:
            self.tell("abandoned", t=turn.t, why="too few offers", came=sorted(offers))
            self._gather(turn.t + 1)
            return (), []
        more = {f"offer:{name}": np.frombuffer(offer, np.uint8) for name, offer in sorted(offers.items())}
        said = self._ask({n: self._letter(turn, down, more) for n in offers if n in self.nodes}, "said")
        masked = {n: f.arrays["masked"].tobytes() for n, f in said.items() if "masked" in f.arrays}
        masked = {n: data for n, data in masked.items() if self._fits(session, turn.t, n, data, offers)}
        self.offers = {}
        if len(masked) < session.threshold:
            self.tell("abandoned", t=turn.t, why="too few survivors", came=sorted(masked))
            self._gather(turn.t + 1)
            return (), []
        fields = {"run": self.terms.run, "terms": self.terms.sha256(), "t": turn.t, "survivors": sorted(masked)}
        fields["seals"] = secagg.seals(session, turn.t, masked)
        found = self._ask(dict.fromkeys(sorted(masked), wire.encode("reveal", fields, more)), "revealed")
        self.offers = {n: f.arrays["offer"].tobytes() for n, f in found.items() if "offer" in f.arrays}
        self._keep_offers(turn.t + 1)
        reveals = {n: f.arrays["reveal"].tobytes() for n, f in found.items() if "reveal" in f.arrays}
        reveals = {n: r for n, r in reveals.items() if self._answers(session, turn.t, n, r, offers, masked)}
        try:
            total = self._open(session, turn.t, offers, masked, reveals)
        except SordinoError as error:
            self.tell("abandoned", t=turn.t, why=str(error), came=sorted(masked))
            self._gather(turn.t + 1)
            return (), []
        if len(self.offers) < len(self.terms.names):
            self._gather(turn.t + 1)
        return opened(self.plan, turn, total).to(down.theta), sorted(masked)

    def _open(
        self,
        session: secagg.Session,
        t: int,
        offers: dict[str, bytes],
        masked: dict[str, bytes],
        reveals: dict[str, bytes],
    ) -> np.ndarray:
        """The sum; whoever sent a wrong share is left out while enough are left."""
        while True:
            try:
                return secagg.open_sum(session, t, offers, masked, reveals)
            except secagg.WrongShareError as error:
                self.tell("misfit", site=error.site, t=t)
                reveals = {name: data for name, data in reveals.items() if name != error.site}

    def _offers(self, t: int) -> dict[str, bytes]:
        """Of round t: those on disk, where it was begun already."""
        path = self.out / "offers.json"
        if path.exists():
            known = json.loads(path.read_text())
            if known["t"] == t:
                return {name: bytes.fromhex(offer) for name, offer in known["offers"].items()}
        session = self.session
        mine = {n: o for n, o in self.offers.items() if self._reads(secagg.read_offer, session, t, n, o)}
        write(path, json.dumps({"t": t, "offers": {n: o.hex() for n, o in sorted(mine.items())}}).encode())
        return mine

    def _reads(self, read: Callable[..., Any], session: secagg.Session, t: int, name: str, data: bytes) -> Any:
        try:
            return read(session, t, name, data)
        except SordinoError as error:
            self.tell("misfit", site=name, t=t, why=str(error)[:200])
            return None

    def _fits(self, session: secagg.Session, t: int, name: str, data: bytes, offers: dict[str, bytes]) -> bool:
        """Signed by its site, of the model's size, and masked with the offers that were sent out."""
        read = partial(secagg.read_masked, dimension=self.model.size)
        found = self._reads(read, session, t, name, data)
        same = found and (found.vector.size, found.offers_sha256) == (self.model.size, secagg.offers_sha256(offers))
        return bool(same)

    def _answers(
        self,
        session: secagg.Session,
        t: int,
        name: str,
        data: bytes,
        offers: dict[str, bytes],
        masked: dict[str, bytes],
    ) -> bool:
        """Signed by its site, and about these offers and survivors."""
        found = self._reads(secagg.read_reveal, session, t, name, data)
        if not found:
            return False
        about = found.offers_sha256, found.seeds.keys(), found.keys.keys()
        if same := about == (secagg.offers_sha256(offers), masked.keys(), offers.keys() - masked.keys()):
            return same
        self.tell("misfit", site=name, t=t, why="its reveal is about other offers or survivors")
        return False

    def _begin(self, t: int) -> None:
        """Offers for the first round to come: a site that was away when others answered sent one for another round."""
        self._keep_offers(t)
        if len(self.offers) < len(self.terms.names):
            self._gather(t)

    def _keep_offers(self, t: int) -> None:
        session = self.session
        self.offers = {n: o for n, o in self.offers.items() if self._reads(secagg.read_offer, session, t, n, o)}

    def _gather(self, t: int) -> None:
        """Offers for round t from sites that have not sent theirs: those that were away may be back."""
        if t >= self.plan.rounds:
            return
        missing = [n for n in self.nodes if n not in self.offers]
        fields = {"run": self.terms.run, "terms": self.terms.sha256(), "t": t}
        for name, found in self._ask(dict.fromkeys(missing, wire.encode("offer", fields)), "offered").items():
            if "offer" in found.arrays:
                self.offers[name] = found.arrays["offer"].tobytes()

    def _ask(self, letters: dict[str, bytes], kind: str) -> dict[str, wire.Message]:
        """Replies by name: of the kind asked for, or refusals (told, and left out but for terms)."""
        if not letters:
            return {}
        by_node = {self.nodes[name]: letter for name, letter in letters.items()}
        replies = self._exchange(by_node)
        found = {}
        for name in letters:
            message = self._read(replies.get(self.nodes[name], b""), kind)
            if message is None:
                self.tell("missing", site=name, kind=kind)
            elif message.kind == "refused":
                self.tell("refused", site=name, kind=kind, reason=str(message.fields.get("reason"))[:200])
                if kind == "agreed":
                    found[name] = message
            else:
                found[name] = message
        return found

    def _exchange(self, letters: dict[int, bytes]) -> dict[int, bytes]:
        """Until the deadline; a site that left the link is waited for, and asked again when it is back."""
        until = time.monotonic() + self.config.deadline
        replies = self.transport.exchange(letters, self.config.deadline)
        while True:
            here = set(self.transport.sites())
            away = [node for node in letters if node not in replies and node not in here]
            if not away or time.monotonic() + POLL > until:
                return replies
            time.sleep(POLL)
            back = {node: letters[node] for node in away if node in self.transport.sites()}
            if back:
                replies |= self.transport.exchange(back, max(POLL, until - time.monotonic()))

    def _read(self, reply: bytes, kind: str) -> wire.Message | None:
        try:
            message = wire.decode(reply)
        except wire.WireError:
            return None
        return message if message.kind in (kind, "refused") else None

    # ---------------------------------------------------------------------------------------------------------- storing

    def _store(self, done: int, theta: Tensor, state: Tree) -> None:
        write(self.out / "checkpoint", pack((torch.tensor([done]), theta, state)))

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
        fields = {"run": self.terms.run, "terms": self.terms.sha256(), "done": self.plan.rounds}
        letter = wire.encode("finish", fields, {"theta": model.numpy()})
        done = self._ask(dict.fromkeys(self.nodes, letter), "finished")
        cert = certificate(
            self.plan,
            Secure(),  # the sites' own; the coordinator draws none
            version=sordino.__version__,
            spec_sha256=hashlib.sha256(self.terms.spec.encode()).hexdigest(),
            names=self.terms.names,
            execution=f"as a federation of {self.plan.clients} sites; this is the coordinator's statement",
            assumes=["Every site drew its noise from a secret source; each says so in a certificate of its own."],
        )
        nobody = np.zeros((0, self.terms.features), np.float32)
        none = np.zeros(0, np.int64)
        data = Dataset("sites", nobody, none, nobody, none, None, self.terms.classes)
        save_model(self.out / "model.safetensors", self.terms.parsed, data, self.model, model)
        write(self.out / "statement.md", statement(cert).encode())
        write(self.out / "certificate.json", (json.dumps(cert, indent=2) + "\n").encode())
        self.tell("finished", epsilon=cert["epsilon"], sites=sorted(done))


def _form(tree: Tree) -> Any:
    """Of a message: how it is nested, and the shapes of its parts."""
    return tuple(_form(part) for part in tree) if isinstance(tree, tuple) else ("of", *tree.shape)
