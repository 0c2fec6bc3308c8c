"""A site's side: it decides, keeps its own ledger, and answers messages.

The order inside a round: the site compares the message with the agreed terms, asks the ledger whether the budget
allows the round, and only then touches the data. The update is charged and stored in one transaction before it leaves.
The same message again gets the same bytes; another message about the same round is refused. A refusal holds one of a
few constant texts; the details stay in the site's own log.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sordino import files, wire
from sordino.core import Broadcast, Trust
from sordino.engines.schedule import RoundPlan, round_plans
from sordino.errors import LedgerError, OverspentError, Refused, RolledBackError, SordinoError, WireError
from sordino.evidence.charges import charges, reserve
from sordino.evidence.ledger import Ledger
from sordino.evidence.spent import Charge
from sordino.federation import (
    approvals,
    introductions,
    limits,
    masks,
    promises,
    rotations,
    run_keys,
    study_queue,
    testing,
    votes,
    witness,
)
from sordino.federation.config import SiteConfig
from sordino.federation.policy import agree, check_rules
from sordino.federation.refusal import REASONS
from sordino.federation.site_data import SiteData
from sordino.federation.site_run import SiteRun
from sordino.federation.study_queue import StudyQueue
from sordino.federation.terms import RUN, Terms
from sordino.federation.witness import Mark, SiteLedger, signed_mark
from sordino.foreign import read_json
from sordino.version import __version__

log = logging.getLogger("sordino.site")
UNUSED_RUNS = 16  # agreed runs without an answered round whose folders are kept
MAX_MESSAGE_BYTES = 2**30  # bytes of a message


class Site(SiteData):
    """Answers messages, one at a time."""

    def __init__(self, config: SiteConfig, *, only_looking: bool = False) -> None:
        """only_looking: do not write a ledger yet, so that no limit is stored."""
        super().__init__(config)
        self._open: dict[str, SiteRun] = {}
        self._last_id = ""  # of the data when the last message came
        if not only_looking:
            self.runs.mkdir(mode=0o700, exist_ok=True)
            with self.ledger() as ledger:  # refuses a limit above the stored one
                ledger.account()  # refuses a ledger whose charges it could not count
                self._check_age(ledger)
            if config.any_choice:
                self._allow_any_choice()

    def _check_age(self, ledger: Ledger) -> None:
        """Refuse a ledger that was restored from an old copy: it misses charges that the certificates name."""
        paths = self.runs.glob("[!.]*/certificate.json")
        ledgers = [read_json(path.read_text(encoding="utf-8"))["ledger"] for path in paths]
        newest = max(ledgers, key=lambda ledger: int(ledger["rows"]), default=None)
        if newest and (problems := ledger.audit(newest["head"], newest["rows"])):
            raise LedgerError(
                f"ledger {ledger.path}: {problems[0]} The certificates in {self.runs} name a newer one; restore "
                "the newest ledger."
            )

    def _allow_any_choice(self) -> None:
        """State in the ledger that minibatches of later runs count as such. No process may answer meanwhile: after a
        first run without minibatches it is too late."""
        with files.lock(self.config.folder / "lock"), self.ledger() as ledger:
            ledger.allow_any_choice(beforehand=True)

    def answer(self, request: bytes) -> bytes:
        """The reply to any bytes. Nothing is raised, and the text of an exception never leaves the site.

        A lock admits one message at a time over all processes: two workers could otherwise answer one round twice.
        """
        try:
            with files.lock(self.config.folder / "lock"), self.one_ledger():
                return self._answer(request)
        except OSError as error:
            return self._refuse("storage", str(error))

    def _answer(self, request: bytes) -> bytes:
        try:
            message = wire.decode(request, self._most_bytes(request))
            handle = self._handlers.get(message.kind)
            if handle is None:
                raise Refused("malformed", f"kind {message.kind[:40]!r}")
            self._check_for_new_data()
            return handle(message, request)
        except Refused as refusal:
            return self._refuse(refusal.code, refusal.detail)
        except WireError as error:
            return self._refuse("malformed", str(error))
        except OverspentError as error:
            return self._refuse("budget", str(error))
        except RolledBackError as error:
            return self._refuse("rolled-back", str(error))
        except (LedgerError, OSError) as error:
            return self._refuse("storage", str(error))
        except SordinoError as error:
            return self._refuse("failed", str(error))
        except Exception as error:
            log.exception("the site failed")
            return self._refuse("failed", repr(error))

    def _most_bytes(self, request: bytes) -> int:
        """How long this message may be: a long one must belong to a run, whose terms say how long."""
        if len(request) <= limits.UNKNOWN:
            return limits.UNKNOWN
        name = wire.peek(request)[1].get("run")
        known = isinstance(name, str) and RUN.fullmatch(name) and (self.runs / name / "terms.json").exists()
        return min(limits.message_bytes(self._run(str(name)).terms), MAX_MESSAGE_BYTES) if known else limits.UNKNOWN

    @cached_property
    def _handlers(self) -> dict[str, Callable[[wire.Message, bytes], bytes]]:
        return {
            "hello": self._hello,
            "terms": self._terms,
            "round": self._round,
            "offer": self._offer,
            "confirm": self._confirm,
            "reveal": self._reveal,
            "evaluate": self._evaluate,
            "finish": self._finish,
            "withdraw": self._withdraw,
        }

    @property
    def queue(self) -> StudyQueue:
        """The studies that are open at this site, and those that wait."""
        return StudyQueue(self.config.folder, self.config.most_studies, self.config.study_idle)

    def _refuse(self, code: str, detail: str) -> bytes:
        self.note("refused", code=code, detail=detail)
        return wire.encode("refused", {"code": code, "reason": REASONS[code]})

    # ------------------------------------------------------------------------------------------------------- messages

    def _hello(self, message: wire.Message, request: bytes) -> bytes:
        """Name, numbers of records and requested epsilon, which are all public, and a receipt for the ledger.

        The coordinator may show the newest receipt that it has of this site, and may send random digits, which the site
        signs together with what it says: nobody else can then say it."""
        _only(message, fields=tuple(key for key in ("receipt", "nonce") if key in message.fields))
        config = self.config
        with self.ledger() as ledger:
            self._compare(ledger, message.fields.get("receipt"))
            receipt = self._receipt(ledger.state())
        fields: dict[str, Any] = {"name": config.name, "records": self.records, "sordino": __version__}
        fields |= {"epsilon": config.run_epsilon} if config.run_epsilon else {}
        fields |= {"tests": self.tests} if config.evaluation_epsilon else {}
        if own := [link.text() for link in rotations.accepted(config.folder) if link.name == config.name]:
            fields["rotations"] = own
        if self.signer is not None and (cast := votes.own(config.folder, self.identity)):
            fields["votes"] = [vote.text() for vote in cast]
        if "nonce" in message.fields and self._masks_possible:
            fields["run_key"] = run_keys.fresh(config.folder, self.identity)
        if "nonce" in message.fields and self.signer is not None:
            fields["signature"] = introductions.signed(fields, message.fields["nonce"], self.signer)
        return wire.encode("hello", fields | receipt)

    @property
    def _masks_possible(self) -> bool:
        """Whether this site may take part under secure aggregation."""
        return (
            Trust.SECURE_AGGREGATION in self.config.trust
            and self.signer is not None
            and self.config.path(self.config.roster).exists()
        )

    def _compare(self, ledger: SiteLedger, shown: Any) -> None:
        """Refuse if this site signed a newer ledger than it has. A receipt that it did not sign is ignored."""
        older = [link.old for link in rotations.accepted(self.config.folder) if link.name == self.config.name]
        keys = [] if self.signer is None else [self.signer.public, *older]
        mark = next((found for key in keys if (found := signed_mark(shown, key)) is not None), None)
        if mark is not None and not mark.within(ledger):
            witness.write(ledger.witness, mark)  # so that every later message is refused too
            raise RolledBackError(
                f"ledger {ledger.path}: it has {len(ledger)} rows and lacks row {mark.rows}, for which this site "
                f"signed a receipt: it was put back to an older state. {witness.COPIED}"
            )

    def _receipt(self, mark: Mark) -> dict[str, Any]:
        """The field of a reply that says how far the ledger is, if the site has a key to sign it."""
        return {} if self.signer is None else {"receipt": witness.receipt(mark, self.signer)}

    def _terms(self, message: wire.Message, request: bytes) -> bytes:
        _only(message, fields=("terms",))
        try:
            terms = Terms.read(str(message.fields["terms"]), self.config.weights_folder)
        except SordinoError as error:
            raise Refused("malformed", str(error)) from None
        folder = self.runs / terms.run
        if folder.exists():
            run = self._run(terms.run)
            if run.terms != terms:
                raise Refused("changed", f"run {terms.run}")
        else:
            self._check_votes(terms)
            agree(self, terms)
            if terms.secure:
                self._accept_keys(terms)
            mine = terms.names.index(self.config.name)
            with self.ledger() as ledger:  # the whole run must fit into the budget before it begins
                account = ledger.account()
                needs_person = self._afford_run(ledger, terms, mine, account)
                if terms.evaluation:
                    self._afford_evaluation(ledger, _evaluation_entries(terms, mine, account))
            if needs_person:
                approvals.check(self.config.folder, terms)
            if (place := self.queue.enter(terms.run, terms.sha256())) is not None:
                return self._queued(terms, place)
            if needs_person:
                approvals.use(self.config.folder, terms)
            with self.ledger() as ledger:
                self._forget_unused(ledger)
            run = SiteRun.make(self, terms, account, approved=needs_person)
            self._open[terms.run] = run
            self.queue.heard(terms.run)
            self.note("agreed", run=terms.run, method=terms.plan.method.name, rounds=terms.plan.rounds)
        self._heard(run)
        with self.ledger() as ledger:
            run.settle(ledger)
            receipt = self._receipt(ledger.state())
        offers = terms.secure and not run.over
        arrays = {"offer": _bytes(masks.offer(run.member, run.next))} if offers else {}
        fields = {"run": terms.run, "terms": terms.sha256(), "next": run.next, **receipt}
        return wire.encode("agreed", fields, arrays)

    def _check_votes(self, terms: Terms) -> None:
        """Refuse terms that hide or invent a vote of this site, or that name a site with enough votes against it."""
        known = self.config.path(self.config.roster).exists()
        if not (terms.votes or votes.stored(self.config.folder)) or not known:
            return
        try:
            votes.check_own(self.config.folder, self.identity, terms.votes)
            roster = self.roster_of(replace(terms, votes=()))
            out = votes.excluded(roster, votes.parsed(terms.votes)).keys() & set(terms.names)
        except SordinoError as error:
            raise Refused("policy", str(error)) from None
        if out:
            raise Refused("policy", f"the terms name {', '.join(sorted(out))}, which enough sites have voted out")

    def _accept_keys(self, terms: Terms) -> None:
        """Check the keys of a run, and remember the new long-term keys that it brings.

        Raises:
          Refused: a key is not signed by its site, or this site does not have its own.
        """
        try:
            run_keys.roster_of_run(self.roster_of(terms), terms)
        except SordinoError as error:
            raise Refused("policy", str(error)) from None
        run_keys.waiting(self.config.folder, terms.run_keys[terms.names.index(self.config.name)], terms.run)
        known = set(rotations.accepted(self.config.folder))
        if new := [link for link in rotations.parsed(terms.rotations) if link not in known]:
            rotations.accept(self.config.folder, new)
            for link in new:
                self.note("rotated", site=link.name, old=link.old, new=link.sign)
            self.__dict__.pop("roster", None)

    def _afford_run(self, ledger: Ledger, terms: Terms, mine: int, account: str) -> bool:
        """Check that all rounds fit into the budget, beside what open studies were promised.

        Returns:
          Whether a person must approve the run: site.toml says so, or the run needs a part of the reserve.

        Raises:
          OverspentError: it does not fit.
        """
        entries = self._promised(ledger, terms.run) + promises.cost(terms, mine, account)
        ledger.afford(entries)
        return self.config.ask or not self._leaves_reserve(ledger, entries)

    def _check_approval(self, ledger: Ledger, run: SiteRun, entries: list[Charge]) -> None:
        """Refuse an answer that needs a person who did not approve the run: site.toml may ask since then, or keep a
        larger reserve; and of a run that lost its place, to which nothing was promised meanwhile, others may have got
        all but the reserve.

        Args:
          ledger: of the site.
          run: the run.
          entries: the charges of the answer, where they are from the account that has a reserve.

        Raises:
          Refused: nobody approved the run. The question is stored.
        """
        config, name = self.config, run.terms.run
        if run.used_approval:
            return
        if not config.ask:
            if not (run.lost_place or config.reserve_epsilon > run.agreed_reserve):
                return
            if any(entry.rate < 1 for entry in entries) and not ledger.reserved(name, run.account):
                entries = promises.cost(run.terms, run.mine, run.account)  # charged as a whole, before its first answer
            if self._leaves_reserve(ledger, self._promised(ledger, name) + entries):
                return
        approvals.check(config.folder, run.terms)
        approvals.use(config.folder, run.terms)
        run.note_approval()

    def _leaves_reserve(self, ledger: Ledger, entries: list[Charge]) -> bool:
        """Whether charges leave the part of the budget that only approved runs may use."""
        config = self.config
        if not config.reserve_epsilon:
            return True
        try:
            ledger.afford(entries, (config.epsilon - config.reserve_epsilon, config.delta))
        except OverspentError:
            return False
        return True

    def _promised(self, ledger: Ledger, but: str) -> list[Charge]:
        """What the rounds of other open studies will cost, where they were not charged yet."""
        found: list[Charge] = []
        for name in self.queue.open_studies():
            if name == but:
                continue
            try:
                run = self._run(name)
            except Refused:  # it cannot go on with these data
                continue
            found += ledger.unpaid(promises.cost(run.terms, run.mine, run.account))
        return found

    def _queued(self, terms: Terms, place: study_queue.Place) -> bytes:
        """The answer to a study that must wait: it may ask again."""
        if place.news:
            self.note("queued", run=terms.run, method=terms.plan.method.name, place=place.number)
        fields = {"code": "queued", "reason": REASONS["queued"], "place": place.number, "ahead": place.ahead}
        return wire.encode("refused", fields)

    def _withdraw(self, message: wire.Message, request: bytes) -> bytes:
        """Forget an agreed run of which no round was answered, and give its place and its approval back; or take a run
        that waits out of the queue."""
        _only(message, fields=("run", "terms"))
        if self.queue.give_up(str(message.fields["run"]), str(message.fields["terms"])):
            self.note("withdrawn", run=str(message.fields["run"]))
            return wire.encode("withdrawn", {"run": message.fields["run"]})
        run = self._run_of(message)
        with self.ledger() as ledger:
            if _used(ledger, run.terms.run):
                raise Refused("order", f"run {run.terms.run} has begun, and is not withdrawn")
        if run.used_approval:
            approvals.give_back(self.config.folder, run.terms)
        self.queue.leave(run.terms.run)
        self._forget(run.folder)
        self.note("withdrawn", run=run.terms.run)
        return wire.encode("withdrawn", {"run": run.terms.run})

    def _round(self, message: wire.Message, request: bytes) -> bytes:
        _only(message, fields=("run", "terms", "t", "extras"), arrays=True)
        run, t = self._run_and_round(message)
        offers = masks.shown_in(message) if run.terms.secure else {}
        asked = masks.request_hash(message, request)
        with self.ledger() as ledger:
            stored = ledger.release(run.terms.run, run.account, t)
            run.settle(ledger)
            if stored is not None:
                return _answered(stored, asked, f"round {t} of run {run.terms.run}")
            if run.next and not ledger.charged(run.terms.run, run.account, run.next - 1):
                raise Refused("storage", f"the ledger misses round {run.next - 1}; restore the newest one")
            if t < run.next:
                raise Refused("order", f"round {t} of run {run.terms.run}; the next is {run.next}")
            entries = [e._replace(who=run.account) for e in charges(run.plan, run.mine, t, run.terms.run)]
            if not entries:
                entries = [Charge(run.account, t, "nothing", 0.0, 1.0, 1, run.terms.run)]
            ledger.afford(entries)
            check_rules(self, run.terms)  # site.toml may have become stricter
            self._check_approval(ledger, run, entries)
            round_plan = next(round_plans(run.plan, run.model, t))
            broadcast = run.broadcast(message, round_plan)
            if run.mine not in round_plan.cohort:
                raise Refused("order", f"this site is not in the cohort of round {t}")
            if run.terms.secure:
                _check_offers(run, t, offers)
            run.ready()  # a refusal up to here costs nothing
            reserve(ledger, run.plan, run.mine, run.terms.run, run.account)
            receipt = self._receipt(ledger.state().after(len(entries)))
            reply = self._update(run, round_plan, broadcast, offers, asked, receipt)
            ledger.charge(entries, reply)
            run.settle(ledger)
        try:
            run.look(t, broadcast)
        except Exception:  # the evaluation is for the site alone: the charged update leaves in any case
            log.exception("the model could not be evaluated")
        return reply

    def _update(
        self,
        run: SiteRun,
        round_plan: RoundPlan,
        broadcast: Broadcast,
        offers: dict[str, bytes],
        asked: str,
        receipt: dict[str, Any],
    ) -> bytes:
        """The answer to a round. It touches the data, so its outcome is charged even if it fails: a failure that costs
        nothing could be repeated, and would tell something about the data."""
        about = {"run": run.terms.run, "t": round_plan.t, "asked": asked, **receipt}
        try:
            update = self._computed(run, round_plan, broadcast, asked)
            run.keep(round_plan.t, round_plan, update, broadcast)
            if run.terms.secure:
                run.keep_offers(round_plan.t, offers)
                masked = masks.masked(run.member, round_plan.t, offers, update, asked)
                return wire.encode("update", {**about, "tree": []}, {"masked": _bytes(masked)})
            skeleton, arrays = wire.from_tree(update, "update")
            return wire.encode("update", {**about, "tree": skeleton}, arrays)
        except OSError:
            raise
        except Exception as error:
            log.exception("the site failed")
            self.note("failed", run=run.terms.run, t=round_plan.t, detail=repr(error))
            (run.folder / "pending").unlink(missing_ok=True)
            return wire.encode("refused", {"code": "failed", "reason": REASONS["failed"], "asked": asked})

    def _computed(self, run: SiteRun, round_plan: RoundPlan, broadcast: Broadcast, asked: str) -> Any:
        """The update or, where it cannot be computed, noise around zero: that a site fails may tell of its data."""
        try:
            return run.compute(round_plan, broadcast, asked)
        except OSError:
            raise
        except Exception as error:
            log.exception("the site failed, and sends noise alone")
            update = run.compute_nothing(round_plan, broadcast, asked)
            self.note("failed", run=run.terms.run, t=round_plan.t, detail=f"noise alone was sent: {error!r}")
            return update

    def _evaluate(self, message: wire.Message, request: bytes) -> bytes:
        """The noised counts of the site's test records, once per run, paid from the account of its test records."""
        _only(message, fields=("run", "terms"), arrays=True)
        run = self._run_of(message)
        if not run.terms.evaluation:
            raise Refused("malformed", "this run has no evaluation")
        offers = masks.shown_in(message) if run.terms.secure else {}
        if any(name != "theta" and not (run.terms.secure and masks.is_about_masks(name)) for name in message.arrays):
            raise Refused("malformed", "the message has unknown arrays")
        asked, name = masks.request_hash(message, request), testing.plan_name(run.terms.run)
        who = testing.account(run.account)
        with self.ledger() as ledger:
            stored = ledger.release(name, who, 0)
            if stored is not None:
                return _answered(stored, asked, f"the evaluation of run {run.terms.run}")
            entries = _evaluation_entries(run.terms, run.mine, run.account)
            self._afford_evaluation(ledger, entries)
            check_rules(self, run.terms)  # site.toml may have become stricter
            self._check_approval(ledger, run, [])
            theta = run.vector(message, "theta")
            if run.terms.secure:
                _check_offers(run, run.plan.rounds, offers)
            run.ready()  # a refusal up to here costs nothing
            receipt = self._receipt(ledger.state().after(len(entries)))
            reply = self._counts(run, theta, offers, asked, receipt)
            ledger.charge(entries, reply)
        self.note("evaluated", run=run.terms.run, epsilon=run.terms.evaluation)
        return reply

    def _counts(
        self, run: SiteRun, theta: Tensor, offers: dict[str, bytes], asked: str, receipt: dict[str, Any]
    ) -> bytes:
        """The answer to an evaluation. It is charged even if it fails, as the answer to a round is."""
        about = {"run": run.terms.run, "asked": asked, **receipt}
        try:
            counts = self._counted_tests(run, theta, asked)
            if run.terms.secure:
                run.keep_offers(run.plan.rounds, offers)
                masked = masks.masked(run.member, run.plan.rounds, offers, counts, asked)
                return wire.encode("update", {**about, "tree": []}, {"masked": _bytes(masked)})
            return wire.encode("update", {**about, "tree": 0}, {"update0": counts.numpy()})
        except OSError:
            raise
        except Exception as error:
            log.exception("the site failed")
            self.note("failed", run=run.terms.run, detail=repr(error))
            return wire.encode("refused", {"code": "failed", "reason": REASONS["failed"], "asked": asked})

    def _counted_tests(self, run: SiteRun, theta: Tensor, asked: str) -> Any:
        """The counts or, where they cannot be computed, noise around zero, as for an update."""
        try:
            return run.evaluation.answer(run.mine, run.dataset, theta, run.test_source(asked))
        except OSError:
            raise
        except Exception as error:
            log.exception("the site failed, and sends noise alone")
            counts = run.evaluation.answer_nothing(run.mine, theta, run.spare_source(asked))
            self.note("failed", run=run.terms.run, detail=f"noise alone was sent: {error!r}")
            return counts

    def _afford_evaluation(self, ledger: Ledger, entries: list[Charge]) -> None:
        """Raises OverspentError if all evaluations together would exceed site.toml's evaluation_epsilon."""
        limit = self.config.evaluation_epsilon
        if limit is None:
            raise Refused("policy", "site.toml has no evaluation_epsilon")
        ledger.afford(entries, (limit, self.config.delta))

    def _offer(self, message: wire.Message, request: bytes) -> bytes:
        """Keys and shares for a later round; the same whenever they are asked for."""
        _only(message, fields=("run", "terms", "t"))
        run, t = self._run_and_round(message)
        if not run.terms.secure:
            raise Refused("malformed", "this run does not use secure aggregation")
        fields = {"run": run.terms.run, "t": t}
        return wire.encode("offered", fields, {"offer": _bytes(masks.offer(run.member, t))})

    def _confirm(self, message: wire.Message, request: bytes) -> bytes:
        """Agree on the survivors of a round. The list is stored first: a site agrees to one list per round."""
        _only(message, fields=("run", "terms", "t", "survivors", "seals"))
        run, t, asked = self._answered(message)
        survivors, seals = _survivors(message), _signatures(message, "seals")
        try:
            signature = masks.confirm(run.member, t, run.offers(t), survivors, seals, run.agreed(t), asked)
        except SordinoError as error:
            raise Refused("replayed" if run.agreed(t) else "malformed", str(error)) from None
        run.will_reveal(t, survivors)
        return wire.encode("confirmed", {"run": run.terms.run, "t": t, "confirmation": signature})

    def _reveal(self, message: wire.Message, request: bytes) -> bytes:
        """Shares of masks, for the survivors that enough sites confirmed."""
        run, t, asked = self._answered(message)
        sealed = ("seals",) if masks.is_sparse(run.member.session) else ()
        _only(message, fields=("run", "terms", "t", "survivors", "confirmations", *sealed))
        survivors, given = _survivors(message), _signatures(message, "confirmations")
        seals = _signatures(message, "seals") if sealed else {}
        try:
            reveal = masks.reveal(run.member, t, run.offers(t), survivors, seals, given, run.agreed(t), asked)
        except SordinoError as error:
            other = (before := run.agreed(t)) is not None and set(before) != set(survivors)
            raise Refused("replayed" if other else "malformed", str(error)) from None
        run.will_reveal(t, survivors)
        arrays = {"reveal": _bytes(reveal)}
        if t + 1 < run.terms.exchanges:  # saves an exchange
            arrays["offer"] = _bytes(masks.offer(run.member, t + 1))
        return wire.encode("revealed", {"run": run.terms.run, "t": t}, arrays)

    def _answered(self, message: wire.Message) -> tuple[SiteRun, int, str]:
        """A masked round that this site has answered: its run, its number, and the hash of the request."""
        run, t = self._run_and_round(message)
        if not run.terms.secure:
            raise Refused("malformed", "this run does not use secure aggregation")
        name, who, at = run.terms.run, run.account, t
        if t == run.plan.rounds:  # the evaluation
            name, who, at = testing.plan_name(name), testing.account(who), 0
        with self.ledger() as ledger:
            stored = ledger.release(name, who, at)
        if stored is None:
            raise Refused("order", f"round {t} was not answered")
        return run, t, str(wire.decode(stored).fields["asked"])

    def _finish(self, message: wire.Message, request: bytes) -> bytes:
        _only(message, fields=("run", "terms", "done"), arrays=True)
        run = self._run_of(message)
        done = message.fields["done"]
        if type(done) is not int or not 0 <= done <= run.plan.rounds:
            raise Refused("malformed", "done")
        run.finish(run.vector(message, "theta"), done)
        self._open.pop(run.terms.run, None)
        with self.ledger() as ledger:
            receipt = self._receipt(ledger.state())
        return wire.encode("finished", {"run": run.terms.run, **receipt})

    # --------------------------------------------------------------------------------------------------------- within

    def _check_for_new_data(self) -> None:
        """Forget what was read of the data if their identity changed. A run keeps to the data that it began with."""
        if self._last_id == (now := self.dataset_id):
            return
        if self._last_id:
            for name in ("shape", "_counted"):
                self.__dict__.pop(name, None)
            self._open.clear()
        self._last_id = now

    def _forget_unused(self, ledger: Ledger) -> None:
        """Delete the oldest agreed runs of which no round was answered: whoever proposes terms could fill the disk.

        A coordinator that comes back to such a run proposes it again, and the site makes new secrets for it."""
        paths = [path for path in self.runs.iterdir() if RUN.fullmatch(path.name) and (path / "secret").exists()]
        if len(paths) < UNUSED_RUNS:
            return
        used = {row.plan.partition(" ")[0] for row in ledger.rows()}
        unused = [path for path in paths if path.name not in used]
        unused.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in unused[: max(0, len(unused) - UNUSED_RUNS + 1)]:
            self._forget(path)

    def _forget(self, folder: Path) -> None:
        """Delete the folder of a run that answered nothing, in one step."""
        self._open.pop(folder.name, None)
        gone = self.runs / f".{folder.name}-unused"
        files.move(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _run_and_round(self, message: wire.Message) -> tuple[SiteRun, int]:
        run, t = self._run_of(message), message.fields.get("t")
        last = run.plan.rounds if message.kind == "round" else run.terms.exchanges
        if type(t) is not int or not 0 <= t < last:
            raise Refused("order", f"round {t!r} of {run.plan.rounds}")
        return run, t

    def _run_of(self, message: wire.Message) -> SiteRun:
        name, terms = message.fields.get("run"), message.fields.get("terms")
        if not (isinstance(name, str) and RUN.fullmatch(name)):
            raise Refused("unknown-run")
        run = self._run(name)
        if terms != run.terms.sha256():
            raise Refused("changed", f"run {name}")
        if not run.over:
            self._heard(run)
        return run

    def _heard(self, run: SiteRun) -> None:
        """Note that a message of a run came, and whether the run had lost its place before."""
        name = run.terms.run
        if not run.over and not run.lost_place and name not in self.queue.open_studies():
            run.note_lost_place()
        self.queue.heard(name)

    def _run(self, name: str) -> SiteRun:
        if name not in self._open:
            if not (self.runs / name / "terms.json").exists():
                raise Refused("unknown-run", name)
            self._open[name] = SiteRun(self, name)
        return self._open[name]


def _only(message: wire.Message, fields: tuple[str, ...], arrays: bool = False) -> None:
    if set(message.fields) != set(fields) or (message.arrays and not arrays):
        raise Refused("malformed", "fields")


def _answered(stored: bytes, asked: str, what: str) -> bytes:
    """The stored reply, if it answers the same request. Another one would get a second answer for one payment."""
    if wire.decode(stored).fields["asked"] != asked:
        raise Refused("replayed", f"{what}, asked with another model or other sites")
    return stored


def _used(ledger: Ledger, run: str) -> bool:
    """Whether something of a run was charged."""
    return any(row.plan.partition(" ")[0] == run for row in ledger.rows())


def _evaluation_entries(terms: Terms, mine: int, account: str) -> list[Charge]:
    plan, who = testing.AgreedEvaluation(terms).plan, testing.account(account)
    return [e._replace(who=who) for e in charges(plan, mine, 0, testing.plan_name(terms.run))]


def _survivors(message: wire.Message) -> list[str]:
    survivors = message.fields["survivors"]
    if not isinstance(survivors, list) or not all(isinstance(name, str) for name in survivors):
        raise Refused("malformed", "survivors")
    return survivors


def _signatures(message: wire.Message, field: str) -> dict[str, str]:
    given = message.fields[field]
    if not isinstance(given, dict) or not all(isinstance(signature, str) for signature in given.values()):
        raise Refused("malformed", field)
    return given


def _check_offers(run: SiteRun, t: int, offers: dict[str, bytes]) -> None:
    """Check the offers before the data are touched."""
    try:
        masks.check(run.member, t, offers)
    except SordinoError as error:
        raise Refused("malformed", str(error)) from None


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
