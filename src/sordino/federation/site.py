"""A site's side: it decides, keeps its own ledger, and answers letters.

The order inside a round: what is asked is held against the terms agreed upon, the ledger is asked, then the data are
touched; the answer is charged and stored in one step, and only then does it leave. The same letter again gets the same
bytes again; another letter about the same round gets a refusal. What is told of a refusal is one of a few constant
texts; the rest stays in the site's own log.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sordino
from sordino import secagg, wire
from sordino.core import Down, OverspentError, SordinoError, Tree, nothing
from sordino.data.shard import Records
from sordino.data.sources import Dataset, load
from sordino.engines.client import Turn, blocks, secured, turns
from sordino.engines.reference import oracle
from sordino.experiments.run import evaluate, save_model
from sordino.federation.config import SiteConfig
from sordino.federation.terms import RUN, Terms
from sordino.privacy.certificate import certificate
from sordino.privacy.ledger import Entry, Ledger
from sordino.privacy.noise import Secure, Seeded, Source
from sordino.privacy.statement import statement
from sordino.tree import leaves, pack, tree_map, unpack

log = logging.getLogger("sordino.site")
MOST = 2**30  # bytes of a letter
ROUND_LIMIT = 2**20  # letters of a round may be no larger than the model, and this
MOST_CLIP = 1e6
LOG = 2**24  # bytes of the site's own log

REASONS = {
    "malformed": "the letter cannot be read, or is not of the agreed form",
    "unknown-run": "no terms of this run were agreed upon",
    "policy": "the site does not take part in such a run",
    "changed": "the terms, or the data, are not those agreed upon",
    "replayed": "another letter about this round was answered already",
    "order": "this round is not to come next",
    "budget": "the site's own limit does not allow it",
    "storage": "the site cannot write its ledger",
    "failed": "the site failed",
}


class Refused(Exception):  # noqa: N818
    """`detail` stays at the site."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class Site:
    """Answers letters; one at a time."""

    def __init__(self, config: SiteConfig, *, only_looking: bool = False) -> None:
        """only_looking: write no ledger, and so no limit, yet."""
        self.config = config
        self.runs = config.folder / "runs"
        self._open: dict[str, Run] = {}
        if not only_looking:
            self.runs.mkdir(mode=0o700, exist_ok=True)
            with self.ledger():  # a limit laxer than the stored one is refused here
                pass

    def ledger(self) -> Ledger:
        return Ledger(self.config.path(self.config.ledger), epsilon=self.config.epsilon, delta=self.config.delta)

    def answer(self, letter: bytes) -> bytes:
        """A reply, whatever the letter; nothing is raised, and no text of an exception leaves.

        One letter at a time, over all processes: two workers could otherwise answer one round with two messages.
        """
        try:
            with self._alone():
                return self._answer(letter)
        except OSError as error:
            return self._refuse("storage", str(error))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self.config.folder / "lock", "w") as file:
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            except ImportError:  # not a POSIX system
                pass
            yield

    def _answer(self, letter: bytes) -> bytes:
        try:
            message = wire.decode(letter, MOST)
            handle = self._handlers.get(message.kind)
            if handle is None:
                raise Refused("malformed", f"kind {message.kind[:40]!r}")
            return handle(message, letter)
        except Refused as no:
            return self._refuse(no.code, no.detail)
        except wire.WireError as error:
            return self._refuse("malformed", str(error))
        except OverspentError as error:
            return self._refuse("budget", str(error))
        except (SordinoError, OSError) as error:
            storage = isinstance(error, OSError) or str(error).startswith("ledger ")
            return self._refuse("storage" if storage else "failed", str(error))
        except Exception as error:
            log.exception("the site failed")
            return self._refuse("failed", repr(error))

    @cached_property
    def _handlers(self) -> dict[str, Callable[[wire.Message, bytes], bytes]]:
        return {
            "hello": self._hello,
            "terms": self._terms,
            "round": self._round,
            "offer": self._offer,
            "reveal": self._reveal,
            "finish": self._finish,
        }

    def _refuse(self, code: str, detail: str) -> bytes:
        self.note("refused", code=code, detail=detail)
        return wire.encode("refused", {"code": code, "reason": REASONS[code]})

    def note(self, what: str, **fields: Any) -> None:
        """Into the site's own log, which stays here and has an end."""
        log.info("%s %s", what, fields)
        path = self.config.folder / "events.jsonl"
        try:
            if path.exists() and path.stat().st_size > LOG:
                return
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": _now(), "what": what, **fields}) + "\n")
        except OSError:
            log.exception("the log cannot be written")

    # ------------------------------------------------------------------------------------------------- the site's data

    @cached_property
    def dataset_id(self) -> str:
        """Of the data's content: under this name they have an account in the ledger."""
        return self.identify()

    def _look_again(self) -> None:
        """The data may have been changed since: then they have another name, number and account."""
        if "dataset_id" in self.__dict__ and self.dataset_id != self.identify():
            self.__dict__.pop("dataset_id", None)
            self.__dict__.pop("shape", None)
            self._open.clear()

    def identify(self) -> str:
        """Keyed: a bare hash of the content, which stands in certificates, would let others try out records."""
        path = self.config.folder / "data.key"
        if not path.exists():
            write(path, secrets.token_bytes(32))
        return f"{self.config.name} {content(self._source, path.read_bytes())[:32]}"

    @property
    def _source(self) -> str:
        path = self.config.path(self.config.data)
        return str(path) if path.exists() else self.config.data

    def load(self, normalize: str = "none") -> Dataset:
        """By the site's own list of labels: whether the data fit another's is nothing to tell."""
        config = self.config
        return load(
            self._source,
            label=config.label,
            test_fraction=config.test_fraction,
            normalize=normalize,
            classes=config.classes,
        )

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Training records and features: public numbers."""
        rows, columns = self.load().x_train.shape
        return int(rows), int(columns)

    @property
    def records(self) -> int:
        return self.shape[0]

    # ------------------------------------------------------------------------------------------------------- letters

    def _hello(self, message: wire.Message, letter: bytes) -> bytes:
        """Name, number of records and wish: all public."""
        _only(message, fields=())
        self._look_again()
        config = self.config
        said: dict[str, Any] = {"name": config.name, "records": self.records, "sordino": sordino.__version__}
        return wire.encode("hello", said | ({"epsilon": config.run_epsilon} if config.run_epsilon else {}))

    def _terms(self, message: wire.Message, letter: bytes) -> bytes:
        _only(message, fields=("terms",))
        self._look_again()
        try:
            terms = Terms.read(str(message.fields["terms"]))
        except SordinoError as error:
            raise Refused("malformed", str(error)) from None
        folder = self.runs / terms.run
        if folder.exists():
            run = self._run(terms.run)
            if run.terms != terms:
                raise Refused("changed", f"run {terms.run}")
        else:
            self._agree(terms)
            with self.ledger() as ledger:  # the whole of it, before anything is begun
                mine = terms.names.index(self.config.name)
                plan = terms.plan
                ledger.afford(
                    [
                        e._replace(who=self.dataset_id)
                        for t in range(plan.rounds)
                        for e in plan.entries(mine, t, terms.run)
                    ]
                )
            run = Run.make(self, terms)
            self._open[terms.run] = run
            self.note("agreed", run=terms.run, method=terms.plan.method.name, rounds=terms.plan.rounds)
        with self.ledger() as ledger:
            run.settle(ledger, self.dataset_id)
        offers = terms.secure and not run.over
        arrays = {"offer": _bytes(secagg.offer(run.member, run.next))} if offers else {}
        return wire.encode("agreed", {"run": terms.run, "terms": terms.sha256(), "next": run.next}, arrays)

    def _agree(self, terms: Terms) -> None:
        """The site's own rules, before its data are touched."""
        config = self.config
        if config.name not in terms.names:
            raise Refused("policy", "this site is not among the named")
        try:
            spec = terms.parsed
        except SordinoError as error:
            raise Refused("policy", str(error)) from None
        allowed, rounds = config.run_epsilon or config.epsilon, int(spec.rounds or 0)
        mine = terms.names.index(config.name)
        for fine, what in (
            (terms.classes == config.classes, "its classes are not those of site.toml"),
            (spec.model in config.models, f"model {spec.model} is not among those allowed"),
            (spec.adjacency == config.adjacency, f"adjacency {spec.adjacency}; this site's is {config.adjacency}"),
            (not spec.options.get("clip", 1.0) > MOST_CLIP, "the clip is too large for sums of floats"),
            (not terms.secure or terms.colluders >= config.colluders, f"{terms.colluders} colluders are too few"),
            (not config.methods or spec.method in config.methods, f"method {spec.method} is not among those allowed"),
            (spec.trust in config.trust, f"trust {spec.trust} is not allowed"),
            (rounds <= config.most_rounds, f"{rounds} rounds; most_rounds is {config.most_rounds}"),
            (spec.delta <= config.delta, f"delta {spec.delta:g} is larger than the limit's {config.delta:g}"),
            (min(spec.epsilon, allowed) == spec.epsilon or terms.wishes.get(config.name) == config.run_epsilon,
             f"epsilon {spec.epsilon:g} where {allowed:g} is allowed, and the site's wish was left out"),
        ):  # fmt: skip
            if not fine:
                raise Refused("policy", what)
        if terms.secure:
            roster = self.roster
            if terms.roster != roster.sha256() or tuple(roster.names) != terms.names:
                raise Refused("policy", "the roster is not this site's own")
            try:
                secagg.Session.of(terms.run, roster, terms.sha256(), terms.dropouts, terms.colluders)
            except SordinoError as error:
                raise Refused("policy", str(error)) from None
        if (claimed := (terms.sizes[mine], terms.features)) != self.shape:  # only now are the data read, and counted
            raise Refused("policy", f"records and numbers of each: {claimed} are claimed; here are {self.shape}")
        try:  # only now: a large plan takes long to make
            plan = terms.plan
            own = next(group for group in plan.groups() if mine in group.clients)
            if not plan.proved:
                raise SordinoError("the plan is not proved private")
            if plan.epsilon_of(own) > allowed * (1 + 1e-9):
                raise SordinoError(f"the plan would cost {plan.epsilon_of(own):g}, and {allowed:g} is allowed")
        except SordinoError as error:
            raise Refused("policy", str(error)) from None

    def _round(self, message: wire.Message, letter: bytes) -> bytes:
        _only(message, fields=("run", "terms", "t", "word"), arrays=True)
        run, t = self._asked(message)
        offers = _offers(message) if run.terms.secure else {}
        asked = hashlib.sha256(letter).hexdigest()
        with self.ledger() as ledger:
            stored = ledger.release(run.terms.run, self.dataset_id, t)
            run.settle(ledger, self.dataset_id)
            if stored is not None:
                if wire.decode(stored).fields["asked"] != asked:
                    raise Refused("replayed", f"round {t} of run {run.terms.run}, with another model or other sites")
                return stored
            if t < run.next:
                raise Refused("order", f"round {t} of run {run.terms.run}; the next is {run.next}")
            entries = [e._replace(who=self.dataset_id) for e in run.plan.entries(run.mine, t, run.terms.run)]
            if not entries:
                entries = [Entry(self.dataset_id, t, "nothing", 0.0, 1.0, 1, run.terms.run)]
            ledger.afford(entries)
            down = run.down(message)
            turn = next(turns(run.plan, run.model, t))
            if run.mine not in turn.cohort:
                raise Refused("order", f"round {t} is not this site's")
            if run.terms.secure:
                _check_offers(run, t, offers)
            run.ready()  # what is refused until here costs nothing
            reply = self._said(run, turn, down, offers, asked)
            ledger.charge(entries, reply)
            run.settle(ledger, self.dataset_id)
        try:
            run.look(t, down)
        except Exception:  # for the site's own eyes alone: what was paid for leaves all the same
            log.exception("the model could not be looked at")
        return reply

    def _said(self, run: Run, turn: Turn, down: Down, offers: dict[str, bytes], asked: str) -> bytes:
        """The answer to a round. From here on the data are touched, so that whatever comes of it is charged: a failure
        that could be had for nothing, again and again, would be a question about the data."""
        about = {"run": run.terms.run, "t": turn.t, "asked": asked}
        try:
            said = run.work(turn, down)
            run.keep(turn.t, turn, said, down)
            if run.terms.secure:
                masked = secagg.masked(run.member, turn.t, offers, said)
                return wire.encode("said", {**about, "tree": []}, {"masked": _bytes(masked)})
            skeleton, arrays = wire.from_tree(said, "said")
            return wire.encode("said", {**about, "tree": skeleton}, arrays)
        except OSError:
            raise
        except Exception as error:
            log.exception("the site failed")
            self.note("failed", run=run.terms.run, t=turn.t, detail=repr(error))
            (run.folder / "pending").unlink(missing_ok=True)
            return wire.encode("refused", {"code": "failed", "reason": REASONS["failed"], "asked": asked})

    def _offer(self, message: wire.Message, letter: bytes) -> bytes:
        """Keys and shares for a round to come; the same whenever they are asked for."""
        _only(message, fields=("run", "terms", "t"))
        run, t = self._asked(message)
        if not run.terms.secure:
            raise Refused("malformed", "nothing is masked in this run")
        fields = {"run": run.terms.run, "t": t}
        return wire.encode("offered", fields, {"offer": _bytes(secagg.offer(run.member, t))})

    def _reveal(self, message: wire.Message, letter: bytes) -> bytes:
        _only(message, fields=("run", "terms", "t", "survivors", "seals"), arrays=True)
        run, t = self._asked(message)
        if not run.terms.secure:
            raise Refused("malformed", "nothing is masked in this run")
        survivors, seals = message.fields["survivors"], message.fields["seals"]
        if not isinstance(survivors, list) or not all(isinstance(name, str) for name in survivors):
            raise Refused("malformed", "survivors")
        if not isinstance(seals, dict) or not all(isinstance(seal, str) for seal in seals.values()):
            raise Refused("malformed", "seals")
        with self.ledger() as ledger:
            stored = ledger.release(run.terms.run, self.dataset_id, t)
        if stored is None:
            raise Refused("order", f"round {t} was not answered")
        try:
            made = secagg.reveal(run.member, t, _offers(message), survivors, run.revealed(t), seals)
        except SordinoError as error:
            raise Refused("replayed" if run.revealed(t) else "malformed", str(error)) from None
        run.will_reveal(t, survivors)
        arrays = {"reveal": _bytes(made)}
        if t + 1 < run.plan.rounds:  # saves an exchange
            arrays["offer"] = _bytes(secagg.offer(run.member, t + 1))
        return wire.encode("revealed", {"run": run.terms.run, "t": t}, arrays)

    def _finish(self, message: wire.Message, letter: bytes) -> bytes:
        _only(message, fields=("run", "terms", "done"), arrays=True)
        run = self._known(message)
        done = message.fields["done"]
        if type(done) is not int or not 0 <= done <= run.plan.rounds:
            raise Refused("malformed", "done")
        run.finish(run.vector(message, "theta"), done)
        self._open.pop(run.terms.run, None)
        return wire.encode("finished", {"run": run.terms.run})

    # --------------------------------------------------------------------------------------------------------- within

    @cached_property
    def identity(self) -> secagg.Identity:
        return secagg.Identity.load(self.config.path(self.config.identity))

    @cached_property
    def roster(self) -> secagg.Roster:
        return secagg.Roster.read(self.config.path(self.config.roster))

    def _asked(self, message: wire.Message) -> tuple[Run, int]:
        run, t = self._known(message), message.fields.get("t")
        if type(t) is not int or not 0 <= t < run.plan.rounds:
            raise Refused("order", f"round {t!r} of {run.plan.rounds}")
        return run, t

    def _known(self, message: wire.Message) -> Run:
        name, terms = message.fields.get("run"), message.fields.get("terms")
        if not (isinstance(name, str) and RUN.fullmatch(name)):
            raise Refused("unknown-run")
        run = self._run(name)
        if terms != run.terms.sha256():
            raise Refused("changed", f"run {name}")
        return run

    def _run(self, name: str) -> Run:
        if name not in self._open:
            if not (self.runs / name / "terms.json").exists():
                raise Refused("unknown-run", name)
            self._open[name] = Run(self, name)
        return self._open[name]


class Run:
    """A run that was agreed upon, and what the site keeps of it on its own disk."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.folder = site, site.runs / name
        self.terms = Terms.read((self.folder / "terms.json").read_text(encoding="utf-8"))
        self.plan, self.model = self.terms.plan, self.terms.model
        self.mine = self.terms.names.index(site.config.name)
        self._caches: tuple[int, Tree] = (-1, ())
        if (self.folder / "data").read_text() != site.dataset_id:
            raise Refused("changed", "the data are not those that the run began with")

    @staticmethod
    def make(site: Site, terms: Terms) -> Run:
        """The folder appears whole or not at all."""
        final = site.runs / terms.run
        made = site.runs / f".{terms.run}"
        made.mkdir(mode=0o700, exist_ok=True)
        write(made / "terms.json", terms.json().encode())
        write(made / "data", site.dataset_id.encode())
        write(made / "secret", secrets.token_bytes(32))
        write(made / "spec.toml", terms.spec.encode())
        os.rename(made, final)
        sync(site.runs)
        return Run(site, terms.run)

    @cached_property
    def secret(self) -> bytes:
        """Of this run alone: noise and masks come from it, so that after a crash they are the same."""
        try:
            return (self.folder / "secret").read_bytes()
        except FileNotFoundError:
            raise Refused("order", "the run is over, and its secret gone") from None

    def _derived(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(key=self.secret, person=purpose, digest_size=32).digest()

    @cached_property
    def source(self) -> Source:
        seed = self.site.config.seed
        return Secure(self._derived(b"sordino noise")) if seed is None else Seeded(seed)

    @cached_property
    def member(self) -> secagg.Member:
        terms, site = self.terms, self.site
        session = secagg.Session.of(terms.run, site.roster, terms.sha256(), terms.dropouts, terms.colluders)
        return secagg.Member(site.identity, session, self._derived(b"sordino masks"))

    @property
    def over(self) -> bool:
        return not (self.folder / "secret").exists()

    def ready(self) -> None:
        """The run is not over, and the data are those that it began with."""
        if self.over:
            raise Refused("order", "the run is over, and its secret gone")
        self.data  # noqa: B018  read, and asked nothing

    @cached_property
    def dataset(self) -> Dataset:
        if self.site.dataset_id != self.site.identify():
            raise Refused("changed", "the data were changed while the site was running")
        return self.site.load(str(self.terms.parsed.normalize))

    @cached_property
    def data(self) -> One:
        return One(self.mine, Records.of(
            self.dataset.x_train, self.dataset.y_train, np.zeros(len(self.dataset.y_train), int),
            dtype=self.terms.number,
        ))  # fmt: skip

    @property
    def next(self) -> int:
        """The first round after those that were answered."""
        return self._kept()[0]

    # ------------------------------------------------------------------------------------------------------- a round

    def vector(self, message: wire.Message, name: str) -> Tensor:
        found = message.arrays.get(name)
        if found is None or found.shape != (self.model.size,):
            raise Refused("malformed", f"{name} is not of the model's size")
        vector = torch.from_numpy(found.copy())
        if vector.dtype != self.terms.number:
            raise Refused("malformed", f"{name} is not of the agreed type")
        if not torch.isfinite(vector).all():
            raise Refused("malformed", f"{name} is not finite")
        return vector

    def down(self, message: wire.Message) -> Down:
        theta = self.vector(message, "theta")
        size = sum(array.nbytes for array in message.arrays.values())
        if size > ROUND_LIMIT + 64 * 8 * self.model.size + ROUND_LIMIT * len(self.terms.names):
            raise Refused("malformed", "the letter is larger than a round's can be")
        return Down(theta, self._word(message))

    def _word(self, message: wire.Message) -> Tree:
        """Finite vectors. A table of them would be taken for many models at once, all noised with the same draw."""
        word = wire.to_tree(message.fields["word"], message.arrays, "word")
        parts, lengths = leaves(word), {1, int(blocks(self.model).max()) + 1, self.model.size}
        for part in parts:
            if not part.is_floating_point() or part.dim() > 1 or part.numel() not in lengths:
                raise Refused("malformed", "a word is no vector of a known length")
        word = tree_map(lambda part: part.to(self.terms.number), word)
        if not all(bool(torch.isfinite(part).all()) for part in leaves(word)):
            raise Refused("malformed", "a word is not finite")
        known = {"theta", *(f"word{k}" for k in range(len(parts)))}
        if any(name not in known and not (self.terms.secure and name.startswith("offer:")) for name in message.arrays):
            raise Refused("malformed", "arrays")
        return word

    def work(self, turn: Turn, down: Down) -> Any:
        """The message, noised: a tree, or integers under secure aggregation."""
        local = turn.stage.local
        _, stage, memory = self._kept()
        if stage != turn.first:
            memory = local.init(down.theta, memory)
        cache = self._cache(turn)
        ask = oracle(self.model, self.data, turn, self.mine, self.source, quiet=self.terms.secure)  # type: ignore[arg-type]
        message = ask.finish(local.work(ask, down, memory, cache))
        return secured(self.plan, turn, self.mine, message, self.source) if self.terms.secure else message

    def _cache(self, turn: Turn) -> Tree:
        if turn.stage.local.prepare is nothing:
            return ()
        if self._caches[0] != turn.first:
            ask = oracle(self.model, self.data, turn, self.mine, self.source, inside=True)  # type: ignore[arg-type]
            self._caches = turn.first, turn.stage.local.prepare(ask)
        return self._caches[1]

    def keep(self, t: int, turn: Turn, said: Any, down: Down) -> None:
        """What the site will remember once this is charged: what it said."""
        _, stage, memory = self._kept()
        if stage != turn.first:
            memory = turn.stage.local.init(down.theta, memory)
        if not self.terms.secure:
            memory = turn.stage.local.remember(said, down, memory)
        write(self.folder / "pending", pack((torch.tensor([t + 1, turn.first]), memory)))

    def settle(self, ledger: Ledger, who: str) -> None:
        """A memory whose round was charged is the memory; a kill may have fallen between the two."""
        pending = self.folder / "pending"
        if pending.exists():
            numbers, _ = unpack(pending.read_bytes())
            if ledger.charged(self.terms.run, who, int(numbers[0]) - 1):
                os.replace(pending, self.folder / "memory")

    def look(self, t: int, down: Down) -> None:
        """The model on the site's own test records, for its own eyes."""
        scores = evaluate(self.model, down.theta, *self._test)
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"round": t, **scores}) + "\n")

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor]:
        data = self.dataset
        return torch.from_numpy(data.x_test).to(self.terms.number), torch.from_numpy(data.y_test)

    def _kept(self) -> tuple[int, int, Tree]:
        """(next round, first round of its stage, memory)."""
        path = self.folder / "memory"
        if not path.exists():
            return 0, -1, ()
        numbers, memory = unpack(path.read_bytes())
        return int(numbers[0]), int(numbers[1]), memory

    # ---------------------------------------------------------------------------------------------- secure aggregation

    def revealed(self, t: int) -> list[str] | None:
        """For whom shares were revealed in round t, if they were: for no other survivors a second time."""
        path = self.folder / f"survivors-{t}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def will_reveal(self, t: int, survivors: list[str]) -> None:
        if self.revealed(t) is None:
            write(self.folder / f"survivors-{t}.json", json.dumps(survivors).encode())

    # --------------------------------------------------------------------------------------------------------- the end

    def finish(self, theta: Tensor, done: int) -> None:
        """Certificate, statement and model; the run's secret goes."""
        if (self.folder / "certificate.json").exists():
            (self.folder / "secret").unlink(missing_ok=True)  # a kill may have fallen between the two
            return
        with self.site.ledger() as ledger:
            cert = certificate(
                self.plan,
                self.source,
                version=sordino.__version__,
                spec_sha256=hashlib.sha256(self.terms.spec.encode()).hexdigest(),
                ledger_head=ledger.head(),
                ledger_rows=len(ledger),
                names=self.terms.names,
                execution=f"as a federation of {self.plan.clients} sites; this is what {self.site.config.name} states",
            )
            spent = ledger.spent_epsilon(self.site.dataset_id, self.site.config.delta)
            paid = len({row.round for row in ledger.rows() if row.plan == self.terms.run})
        limit = {"epsilon": self.site.config.epsilon, "delta": self.site.config.delta, "spent": spent}
        limit |= {"rounds": paid}
        cert |= {"site": {"name": self.site.config.name, "client": self.mine, "data": self.site.dataset_id, **limit}}
        save_model(self.folder / "model.safetensors", self.terms.parsed, self.dataset, self.model, theta)
        write(self.folder / "statement.md", statement(cert).encode())
        write(self.folder / "certificate.json", (json.dumps(cert, indent=2) + "\n").encode())
        (self.folder / "secret").unlink(missing_ok=True)
        self.site.note("finished", run=self.terms.run, epsilon=cert["epsilon"], rounds=done)


class One:
    """The site's records in the place that the plan gives them."""

    def __init__(self, mine: int, records: Records) -> None:
        self.mine, self.records, self.x = mine, records, records.x

    def shard(self, i: int) -> Any:
        assert i == self.mine
        return self.records.shard(0)


def _only(message: wire.Message, fields: tuple[str, ...], arrays: bool = False) -> None:
    if set(message.fields) != set(fields) or (message.arrays and not arrays):
        raise Refused("malformed", "fields")


def _offers(message: wire.Message) -> dict[str, bytes]:
    return {k.removeprefix("offer:"): v.tobytes() for k, v in message.arrays.items() if k.startswith("offer:")}


def _check_offers(run: Run, t: int, offers: dict[str, bytes]) -> None:
    """Before the data are touched: what is masked with must be whole."""
    try:
        secagg.check(run.member, t, offers)
    except SordinoError as error:
        raise Refused("malformed", str(error)) from None


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def content(source: str, key: bytes) -> str:
    """Keyed hash of a data file, or of the name of what is no file."""
    digest = hmac.new(key, digestmod="sha256")
    if not Path(source).is_file():
        digest.update(source.encode())
        return digest.hexdigest()
    with open(source, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def write(path: Path, data: bytes) -> None:
    """In one step, and on disk when it returns; for the owner alone."""
    temporary = path.with_name(path.name + ".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """What was renamed in it stays renamed after a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")
