"""An agreed run, and what a site stores of it on its own disk: noise and masks, memory, certificate."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino import files, secagg, wire
from sordino.core import Broadcast, Tree, Unit, nothing
from sordino.data.records import Records
from sordino.data.schema import Schema
from sordino.data.sources import Dataset
from sordino.engines.oracle import combined, compute, encode_integers, rows_of_stream, stream_factors, stream_of_rows
from sordino.engines.reference import oracle
from sordino.engines.schedule import RoundPlan, record_choice, round_plans
from sordino.errors import Refused, SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.ledger import SURVIVORS, Ledger
from sordino.evidence.signing import sha256
from sordino.evidence.spent import Charge
from sordino.evidence.statement import issue
from sordino.federation import counting, masks, readmes, run_keys, testing
from sordino.federation.site_data import SiteData
from sordino.federation.terms import EVALUATED, Terms, carried_out, told_by_the_coordinator
from sordino.federation.testing import AgreedEvaluation
from sordino.federation.weights import check_weights
from sordino.models.tally import ColumnTally
from sordino.privacy import calibration
from sordino.privacy.mechanisms.laws import carries
from sordino.privacy.mechanisms.random import Secure, Seeded, Source
from sordino.privacy.plan import Plan
from sordino.training import evaluation_plan
from sordino.training.artifacts import adapter_sha256, save_model
from sordino.training.evaluate import evaluate, hardly_better, no_better, scores_to_compare
from sordino.training.folder import SCHEMA
from sordino.training.private_statistics import LARGER_EPSILON, found_schema, rough
from sordino.tree import leaves, pack, rebuild, tree_map, unpack
from sordino.version import __version__

log = logging.getLogger("sordino.site")
APPROVED = "approved"  # a file in the folder of a run that used up an approval
RESERVE = "reserve"  # a file in the folder of a run: reserve_epsilon of site.toml when the run was agreed to
LOST_PLACE = "lost-place"  # a file in the folder of a run that lost its place in the queue
ROUND_LIMIT = 2**20  # bytes that a round's message may have beyond the model's own


class StoredMemory(NamedTuple):
    """What a site stores of its memory."""

    numbers: Tensor  # the next round, and the first round of the memory's stage
    memory: Tree
    answers: Tree = ()  # of a stream of integers: one row per answered round of the stage, its number and its answer


class SiteRun:
    """One run at one site: a folder in `runs/`."""

    def __init__(self, site: SiteData, name: str, terms: Terms | None = None) -> None:
        """terms: what terms.json says, where it was read already: their plan and model are built once."""
        self.site, self.folder = site, site.runs / name
        if terms is None:
            text = (self.folder / "terms.json").read_text(encoding="utf-8")
            terms = Terms.read(text, site.config.weights_folder)
        self.terms = terms
        self._check_weights()
        self.plan, self.model = self.terms.plan, self.terms.model
        if self.terms.cells:
            counts: Any = counting.tally_of(site.config.table_schema)
            self.model = counts
        if site.config.name not in self.terms.names:
            raise Refused("changed", "site.toml names another site than when the run began; put the name back")
        self.mine = self.terms.names.index(site.config.name)
        self._caches: tuple[int, Tree] = (-1, ())
        self._latest: Tree = ()  # what `keep` stores of a stream
        if (self.folder / "data").read_text() != site.dataset_id:
            raise Refused("changed", "the data differ from those the run began with; put them back")

    def _check_weights(self) -> None:
        """Refuse another folder of weights than when the run began: its tokenizer would make other records."""
        try:
            check_weights(self.terms.weights, self.site.config.weights_folder)
        except SordinoError as error:
            raise Refused("changed", str(error)) from None

    @staticmethod
    def make(site: SiteData, terms: Terms, account: str, *, approved: bool = False) -> SiteRun:
        """Create the run's folder in one step.

        Args:
          site: whose run it is.
          terms: what was agreed; `policy.agree` has built their plan and their model.
          account: it pays for all of the run.
          approved: this run used up a person's approval of the study. Another run of the study may have needed none.

        Returns:
          The run.
        """
        final = site.runs / terms.run
        new = site.runs / f".{terms.run}"
        new.mkdir(mode=0o700, exist_ok=True)
        files.write(new / "terms.json", terms.json().encode())
        files.write(new / "data", site.dataset_id.encode())
        files.write(new / "columns", json.dumps(site.columns).encode())
        files.write(new / "account", account.encode())
        files.write(new / RESERVE, str(site.config.reserve_epsilon).encode())
        files.write(new / "secret", secrets.token_bytes(32))
        if approved:
            files.write(new / APPROVED, b"")
        if terms.secure:
            mine = terms.run_keys[terms.names.index(site.config.name)]
            files.write(new / run_keys.FILE, run_keys.take(site.config.folder, mine, terms.run))
        files.write(new / "noise", ("" if site.config.seed is None else str(site.config.seed)).encode())
        files.write(new / "spec.toml", terms.spec.encode())
        files.write(new / "README.txt", readmes.of_run(None, readmes.SITE_RUN).encode())
        files.move(new, final)
        return SiteRun(site, terms.run, terms)

    @cached_property
    def secret(self) -> bytes:
        """The secret of this run alone. Noise and masks follow from it, so that they are the same after a crash."""
        try:
            return (self.folder / "secret").read_bytes()
        except FileNotFoundError:
            raise Refused("order", "the run is over, and its secret is deleted") from None

    @cached_property
    def account(self) -> str:
        """Who pays for this run, from its beginning to its end."""
        return (self.folder / "account").read_text()

    def _derived(self, purpose: bytes, about: str = "") -> bytes:
        return hashlib.blake2b(about.encode(), key=self.secret, person=purpose, digest_size=32).digest()

    def source(self, asked: str = "") -> Source:
        """The source of noise for the answer to one message. It depends on the message: in a folder restored from a
        copy, another model would otherwise get the same noise. Noise carried over rounds cannot depend on it."""
        if seed := (self.folder / "noise").read_text():
            return Seeded(int(seed))
        # Integers have fresh noise in every round: a stream carries answers, and no noise.
        carried = not self.terms.secure and any(
            carries(query.noise) for stage in self.plan.stages for query in stage.queries
        )
        return Secure(self._derived(b"sordino noise", "" if carried else asked))

    def test_source(self, asked: str) -> Source:
        """The source of noise for the evaluation: another stream than that of any round."""
        if seed := (self.folder / "noise").read_text():
            return Seeded(int(seed) + 2**32)
        return Secure(self._derived(b"sordino tests", asked))

    def spare_source(self, asked: str) -> Source:
        """The source of noise that is sent alone where an answer failed. That of the answer would tell of the records:
        whoever sees it knows for which of them the answer fails with it, and a server can ask so that noise decides."""
        if seed := (self.folder / "noise").read_text():
            return Seeded(int(seed) + 2**33)
        return Secure(self._derived(b"sordino nothing", asked))

    @cached_property
    def evaluation(self) -> AgreedEvaluation:
        schema = self.site.config.table_schema
        return AgreedEvaluation(self.terms, 1.0 if schema is None else schema.unit)

    @cached_property
    def member(self) -> secagg.Member:
        terms, site = self.terms, self.site
        roster = run_keys.roster_of_run(site.roster_of(terms), terms)
        session = secagg.Session.of(terms.run, roster, terms.sha256(), terms.dropouts, terms.colluders)
        identity = secagg.Identity(site.config.name, site.identity.sign_key, self._box_key)
        return secagg.Member(identity, session, self._derived(b"sordino masks"))

    @property
    def _box_key(self) -> bytes:
        try:
            return (self.folder / run_keys.FILE).read_bytes()
        except FileNotFoundError:
            raise Refused("order", "the run is over, or was restored without its keys") from None

    @property
    def used_approval(self) -> bool:
        """Whether a person's approval was used up for this run."""
        return (self.folder / APPROVED).exists()

    def note_approval(self) -> None:
        """Store that this run used up a person's approval."""
        files.write(self.folder / APPROVED, b"")

    @property
    def agreed_reserve(self) -> float:
        """The part of the site's budget that was kept for approved runs when this one was agreed to."""
        path = self.folder / RESERVE
        return float(path.read_text()) if path.exists() else 0.0

    @property
    def lost_place(self) -> bool:
        """Whether the run lost its place in the queue, and with it what it was promised."""
        return (self.folder / LOST_PLACE).exists()

    def note_lost_place(self) -> None:
        """Store that it did."""
        (self.folder / LOST_PLACE).touch(mode=0o600)

    @property
    def over(self) -> bool:
        return not (self.folder / "secret").exists()

    def ready(self) -> None:
        """Check that the run is not over and that the data did not change."""
        if self.over:
            raise Refused("order", "the run is over, and its secret is deleted")
        if not self.terms.resolved.privacy.unit.sizes_public:
            return
        if (count := self.data.records.sizes[0]) != (agreed := self.terms.sizes[self.mine]):  # only counted
            unit = self.terms.resolved.privacy.unit
            raise Refused("changed", f"{count} training {unit}s, not {agreed}; did test_fraction change?")

    @cached_property
    def dataset(self) -> Dataset:
        agreed = (self.folder / "data").read_text()
        dataset = self.site.load("none" if self.terms.cells else self.terms.resolved.source.normalize)
        if self.site.dataset_id != agreed:
            raise Refused("changed", "the data changed while they were read")
        self._check_weights()
        if list(dataset.features) != json.loads((self.folder / "columns").read_text()):
            raise Refused("changed", "the columns have another order than when the run began; put them back")
        return dataset

    def _chooser(self) -> Source:
        """What draws the records of persons who have more than are used: the same in every round of the run."""
        if seed := (self.folder / "noise").read_text():
            return Seeded(int(seed))
        return Secure(self._derived(b"sordino choice"))

    @cached_property
    def data(self) -> OwnRecords:
        privacy, data = self.terms.resolved.privacy, self.dataset
        records = Records.of(
            data.x_train,
            data.y_train,
            np.zeros(len(data.y_train), int),
            person=data.person if privacy.unit is Unit.PERSON else None,
            per_person=privacy.person_records,
            choose=record_choice(self._chooser(), privacy),
            dtype=self.terms.number,
            copy=False,
        )
        records.check_unit(privacy)
        return OwnRecords(self.mine, records)

    @property
    def next(self) -> int:
        """The first round that was not answered yet."""
        return self._kept()[0]

    # ------------------------------------------------------------------------------------------------------- a round

    def vector(self, message: wire.Message, name: str) -> Tensor:
        array, size = message.arrays.get(name), self.model.size
        if self.terms.cells and message.kind == "finish":  # the sum of all counts, in place of a model
            size = self.terms.dimension
        if array is None or array.shape != (size,):
            raise Refused("malformed", f"{name} does not have the model's size, {size}")
        vector = torch.from_numpy(array.copy())
        if vector.dtype != self.terms.number:
            raise Refused("malformed", f"{name} is {vector.dtype}, and the terms say {self.terms.number}")
        if not torch.isfinite(vector).all():
            raise Refused("malformed", f"{name} is not finite")
        return vector

    def broadcast(self, message: wire.Message, round_plan: RoundPlan) -> Broadcast:
        theta = self.vector(message, "theta")
        size = sum(array.nbytes for array in message.arrays.values())
        if size > ROUND_LIMIT + 64 * 8 * self.model.size + ROUND_LIMIT * len(self.terms.names):
            raise Refused("malformed", f"the message has {size:,} bytes, more than a round's can have")
        return Broadcast(theta, self._extras(message, round_plan))

    def _extras(self, message: wire.Message, round_plan: RoundPlan) -> Tree:
        """What the server's rule broadcasts beside theta: finite vectors of the shapes that the method has. A matrix in
        place of a vector would count as several models at once, all with the same noise."""
        extras = wire.to_tree(message.fields["extras"], message.arrays, "extras")
        parts = leaves(extras)
        template = self._extras_template(round_plan.first)
        if [tuple(part.shape) for part in parts] != [tuple(part.shape) for part in leaves(template)]:
            raise Refused("malformed", "the extras do not have the method's shapes")
        if not all(part.is_floating_point() for part in parts):
            raise Refused("malformed", "the extras are not floating-point numbers")
        extras = tree_map(lambda part: part.to(self.terms.number), extras)
        if not all(bool(torch.isfinite(part).all()) for part in leaves(extras)):
            raise Refused("malformed", "the extras are not finite")
        try:
            extras = rebuild(extras, template) if parts else template
        except SordinoError:
            raise Refused("malformed", "the extras are not nested as the method's are") from None
        known = {"theta", *(f"extras{k}" for k in range(len(parts)))}
        if any(name not in known and not (self.terms.secure and masks.is_about_masks(name)) for name in message.arrays):
            raise Refused("malformed", "the message has unknown arrays")
        return extras

    def _extras_template(self, first: int) -> Tree:
        """What the server sends beside theta in the stage that begins in round `first`, with its shapes and fields."""
        theta, begins = self.model.init().to(self.terms.number), 0
        state: Tree = ()
        for stage, rounds in zip(self.plan.stages, self.plan.stage_rounds, strict=True):
            state = stage.rule.init(theta, next(round_plans(self.plan, self.model, begins)).facts, state)
            if begins == first:
                break
            begins += rounds
        extras: Tree = stage.rule.broadcast(state)
        return extras

    def _memory_template(self, first: int) -> Tree:
        """A site's memory in the stage that begins in round `first`, with its fields."""
        theta, begins = self.model.init().to(self.terms.number), 0
        memory: Tree = ()
        for stage, rounds in zip(self.plan.stages, self.plan.stage_rounds, strict=True):
            memory = stage.local.init(theta, memory)
            if begins == first:
                break
            begins += rounds
        return memory

    def compute_nothing(self, round_plan: RoundPlan, broadcast: Broadcast, asked: str = "") -> Any:
        """The noise of an update around zero, where the data give none: as from one unit without records."""
        terms, privacy = self.terms, self.terms.resolved.privacy
        rows = privacy.person_records if privacy.unit is Unit.PERSON else 1
        nothing_there = Records.absent(terms.features, terms.label_type, terms.number, rows)
        kept, self.__dict__["data"] = self.__dict__.get("data"), OwnRecords(self.mine, nothing_there)
        self._caches = (-1, ())
        try:
            return self.compute(round_plan, broadcast, source=self.spare_source(asked))
        finally:
            self._caches = (-1, ())
            self.__dict__.pop("data")
            if kept is not None:
                self.__dict__["data"] = kept

    def compute(
        self, round_plan: RoundPlan, broadcast: Broadcast, asked: str = "", source: Source | None = None
    ) -> Any:
        """The noised update: a tree, or integers under secure aggregation. None stands for the source of the answer."""
        source, round_plan = source or self.source(asked), self._with_own_size(round_plan)
        local = round_plan.stage.local
        _, stage, memory = self._kept()
        if stage != round_plan.first:
            memory = local.init(broadcast.theta, memory)
        cache = self._cache(round_plan)
        secure = self.terms.secure
        ask = oracle(self.model, self.data, round_plan, self.mine, source, add_noise=not secure, sealed=secure)  # type: ignore[arg-type]
        message = compute(local, ask, broadcast, memory, cache)
        # Integers are noised in place of answers, which must be sent as they are.
        numbers = ask.released(message) if self.terms.secure else []
        message = ask.finish(message)
        if not all(bool(torch.isfinite(part).all()) for part in leaves(message)):
            raise SordinoError("update: it is not finite, and noise does not hide that.")
        if not self.terms.secure:
            return message
        self._latest = ()
        if (factors := stream_factors(self.plan, round_plan)) is not None:
            answers = self._answers(round_plan)
            answers[round_plan.t] = leaves(message)[0].double()
            message, self._latest = combined(factors.encoder, round_plan, answers), rows_of_stream(answers)
        return encode_integers(self.plan, round_plan, self.mine, message, numbers, source)

    def _answers(self, round_plan: RoundPlan) -> dict[int, Tensor]:
        """The answers of this stage that were charged, by round."""
        path = self.folder / "memory"
        if not path.exists():
            return {}
        stored = unpack(path.read_bytes(), StoredMemory(torch.zeros(2), ()))
        return stream_of_rows(stored.answers) if int(stored.numbers[1]) == round_plan.first else {}

    def _with_own_size(self, round_plan: RoundPlan) -> RoundPlan:
        """The round, where whole sites are protected with this site's real size: the terms do not know it."""
        if self.terms.resolved.privacy.unit.sizes_public:
            return round_plan
        sizes = round_plan.sizes.copy()
        sizes[self.mine] = self.data.records.sizes[0]
        return round_plan._replace(sizes=sizes)

    def _cache(self, round_plan: RoundPlan) -> Tree:
        if round_plan.stage.local.prepare is nothing:
            return ()
        if self._caches[0] != round_plan.first:
            ask = oracle(self.model, self.data, round_plan, self.mine, self.source(), preparing=True)  # type: ignore[arg-type]
            self._caches = round_plan.first, round_plan.stage.local.prepare(ask)
        return self._caches[1]

    def keep(self, t: int, round_plan: RoundPlan, update: Any, broadcast: Broadcast) -> None:
        """Store the client's memory after this update. It becomes valid once the update is charged."""
        _, stage, memory = self._kept()
        if stage != round_plan.first:
            memory = round_plan.stage.local.init(broadcast.theta, memory)
        if not self.terms.secure:
            memory = round_plan.stage.local.update_memory(update, broadcast, memory)
        stored = StoredMemory(torch.tensor([t + 1, round_plan.first]), memory, self._latest)
        files.write(self.folder / "pending", pack(stored))

    def settle(self, ledger: Ledger) -> None:
        """Make the pending memory valid if its round was charged. A kill may have come between the two."""
        pending = self.folder / "pending"
        if pending.exists():
            stored = unpack(pending.read_bytes(), StoredMemory(torch.zeros(2), ()))
            if ledger.charged(self.terms.run, self.account, int(stored.numbers[0]) - 1):
                files.move(pending, self.folder / "memory")

    def look(self, t: int, broadcast: Broadcast) -> None:
        """Evaluate the model on the site's own test records. The scores stay at the site."""
        if self.terms.cells:
            return
        scores = evaluate(self.model, broadcast.theta, *self._test, unit=self.dataset.unit)
        files.append(self.folder / "metrics.jsonl", json.dumps({"round": t, **scores}) + "\n")

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor]:
        data = self.dataset
        return torch.from_numpy(data.x_test).to(self.terms.number), torch.from_numpy(data.y_test)

    def _kept(self) -> tuple[int, int, Tree]:
        """(next round, first round of its stage, memory)."""
        path = self.folder / "memory"
        if not path.exists():
            return 0, -1, ()
        stored = unpack(path.read_bytes(), StoredMemory(torch.zeros(2), ()))
        done, first = int(stored.numbers[0]), int(stored.numbers[1])
        return done, first, rebuild(stored.memory, self._memory_template(first))

    # ---------------------------------------------------------------------------------------------- secure aggregation

    def keep_offers(self, t: int, offers: Mapping[str, bytes]) -> None:
        """Store what this site masks with, before the masked vector leaves: later messages do not carry it again."""
        arrays = {name: np.frombuffer(offer, np.uint8) for name, offer in offers.items()}
        files.write(self.folder / "offers", wire.encode("offers", {"t": t}, arrays))

    def offers(self, t: int) -> dict[str, bytes]:
        """The offers that this site masked with in round t, its latest."""
        path = self.folder / "offers"
        stored = wire.decode(path.read_bytes()) if path.exists() else None
        if stored is None or stored.fields["t"] != t:
            raise Refused("order", f"round {t} is not the latest that this site has masked")
        return {name: offer.tobytes() for name, offer in stored.arrays.items()}

    def agreed(self, t: int) -> list[str] | None:
        """The survivors that this site confirmed, or revealed shares for, in round t; None: none yet.

        The ledger knows them where the folder of the run is an older one beside the newest ledger."""
        path, entry = self.folder / f"survivors-{t}.json", self._survivors_note(t)
        with self.site.ledger() as ledger:
            noted = path.read_bytes() if path.exists() else ledger.release(entry.plan, entry.who, entry.round)
        return None if noted is None else json.loads(noted)

    def will_reveal(self, t: int, survivors: list[str]) -> None:
        if self.agreed(t) is None:
            files.write(self.folder / f"survivors-{t}.json", json.dumps(survivors).encode())
        self._witness_survivors(t, survivors)

    def _survivors_note(self, t: int) -> Charge:
        return Charge(self.account, t, SURVIVORS, 0.0, 1.0, 1, f"{self.terms.run} {SURVIVORS}")

    def _witness_survivors(self, t: int, survivors: list[str]) -> None:
        """Write the list into the ledger's chain too, so that an older copy of the folder without it is refused."""
        with self.site.ledger() as ledger:
            ledger.note(self._survivors_note(t), json.dumps(survivors).encode())

    # --------------------------------------------------------------------------------------------------------- the end

    def finish(self, theta: Tensor, done: int) -> None:
        """Write certificate, statement and model, and delete the run's secret."""
        if (self.folder / "certificate.json").exists():
            self._end()  # a kill may have come between the two
            return
        if self.terms.cells:
            files.write(self.folder / SCHEMA, self.completed(theta).toml().encode())
        else:
            save_model(self.folder / "model.safetensors", self.terms.resolved, self.dataset, self.model, theta)
        if self.terms.evaluation:
            self._certify_evaluation()
        cert = self._certify(
            self.folder,
            self.plan,
            self.terms.run,
            self.account,
            self.site.config.epsilon,
            spec=self.terms.spec,
            schema=self.folder / SCHEMA if self.terms.cells else None,
            assumes=self.terms.assumptions,
            unseen=lambda answered: told_by_the_coordinator(answered, self.plan.rounds),
        )
        files.write(self.folder / "README.txt", readmes.of_run(cert, readmes.SITE_RUN).encode())
        files.write(self.folder / "certificate.json", (json.dumps(cert, indent=2) + "\n").encode())
        self._end()
        try:
            hint = self._hint(theta)
        except Exception:  # it is for the site alone: that its test records cannot be scored does not leave
            log.exception("the model could not be evaluated")
            hint = {}
        self.site.note("finished", run=self.terms.run, epsilon=cert["epsilon"], rounds=done, **hint)

    def _end(self) -> None:
        """Delete the run's secret, and with it the chance to answer again; then the bytes of its answers.

        A process that was killed may have left a copy of what it was writing."""
        for path in filter(files.is_leftover, list(self.folder.iterdir())):
            path.unlink()
        if self.terms.run_keys:
            run_keys.erase(self.site.config.folder, self.terms.run_keys[self.mine])
        (self.folder / run_keys.FILE).unlink(missing_ok=True)
        (self.folder / "secret").unlink(missing_ok=True)
        self._forget_answers()
        with self.site.ledger() as ledger:
            ledger.compact([self.terms.run, testing.plan_name(self.terms.run)])

    def _forget_answers(self) -> None:
        """Delete the answers of a stream, which have no noise: no later round needs them."""
        path = self.folder / "memory"
        stored = unpack(path.read_bytes(), StoredMemory(torch.zeros(2), ())) if path.exists() else None
        if stored is not None and not isinstance(stored.answers, tuple):
            files.write(path, pack(stored._replace(answers=())))

    def _certify_evaluation(self) -> None:
        """The site's own certificate of the evaluation that it answered, in evaluation/; none if it answered none."""
        name, who = testing.plan_name(self.terms.run), testing.account(self.account)
        with self.site.ledger() as ledger:
            if ledger.release(name, who, 0) is None:
                return
        out, limit = self.folder / "evaluation", self.site.config.evaluation_epsilon or self.terms.evaluation
        out.mkdir(mode=0o700, exist_ok=True)
        spec = self.evaluation.spec(sha256(self.folder / "model.safetensors"))
        assumes = evaluation_plan.assumptions(self.evaluation.settings)
        cert = self._certify(
            out,
            self.evaluation.plan,
            name,
            who,
            limit,
            spec=spec,
            schema=None,
            assumes=assumes,
            unseen=lambda _: EVALUATED,
        )
        files.write(out / "spec.toml", spec.encode())
        files.write(out / "certificate.json", (json.dumps(cert, indent=2) + "\n").encode())

    def _certify(
        self,
        out: Path,
        plan: Plan,
        name: str,
        who: str,
        limit: float,
        *,
        spec: str,
        schema: Path | None,
        assumes: list[str],
        unseen: Callable[[int], str],
    ) -> dict[str, Any]:
        """The site's certificate of what it released, signed by its key, with its statement in `out`.

        Args:
          out: where the statement is written.
          plan: what was released.
          name: of the plan in the ledger.
          who: the account that paid.
          limit: of epsilon over all plans of this account.
          spec: the settings.
          schema: a file that the certificate names.
          assumes: what the certificate assumes beside what the plan assumes.
          unseen: what the site takes from the coordinator, by the number of rounds that it answered.
        """
        model, site = self.folder / "model.safetensors", self.site
        with site.ledger() as ledger:
            paid = len({row.round for row in ledger.rows() if row.plan == name and row.is_release})
            cert = certificate(
                plan,
                self.source(),
                version=__version__,
                spec_sha256=hashlib.sha256(spec.encode()).hexdigest(),
                model_sha256="" if self.terms.cells else sha256(model),
                schema_sha256="" if schema is None else sha256(schema),
                adapter_sha256=adapter_sha256(out / model.name),
                ledger_head=ledger.head(),
                ledger_rows=len(ledger),
                names=self.terms.names,
                execution=carried_out(plan.clients, site.config.name),
                assumes=[*assumes, unseen(paid)],
            )
            spent = ledger.spent_epsilon(who, site.config.delta)
        about = {"epsilon": limit, "delta": site.config.delta, "spent": spent, "rounds": paid}
        cert |= {"site": {"name": site.config.name, "client": self.mine, "data": site.dataset_id, **about}}
        cert, text = issue(cert, site.signer)  # without a key of its own, the site's certificate stays unsigned
        files.write(out / "statement.md", text.encode())
        return cert

    def completed(self, counts: Tensor) -> Schema:
        """The site's schema with what the noised counts of all sites show."""
        schema, tally = self.site.config.table_schema, self.model
        assert schema is not None and isinstance(tally, ColumnTally)  # noqa: PT018 - the terms were checked
        return found_schema(schema, tally, counts.double().numpy(), calibration.aggregate_std(self.plan, 0))

    def _hint(self, theta: Tensor) -> dict[str, str]:
        """A hint for the site if the model is useless on its test records."""
        if self.terms.cells:
            tally, std = self.model, calibration.aggregate_std(self.plan, 0)
            assert isinstance(tally, ColumnTally)
            doubt = rough(tally, std, sum(self.plan.sizes), LARGER_EPSILON)
            return {"schema": str(self.folder / SCHEMA), **({} if doubt is None else {"hint": doubt})}
        x, y = self._test
        if not len(y):
            return {}
        schema, none = self.site.config.table_schema, np.zeros(0)
        text = self.terms.learns_text
        data = Dataset("site", none, none, none, y.numpy(), None, self.terms.classes, schema=schema, sequences=text)
        scores = scores_to_compare(self.model, theta, x, y, unit=data.unit)
        if doubt := hardly_better(data, scores):
            return {"hint": f"this site's test records do not show that the model is better than chance: {doubt}"}
        why = no_better(data, scores)
        than, ask = ("before training", "") if text else ("a constant guess", "; are the features scaled?")
        if schema is not None:  # it scales them
            ask = "; the noise may exceed the signal"
        where = f"the model is no better than {than} on this site's test records"
        return {"hint": f"{where}: {why}{ask}"} if why else {}


class OwnRecords:
    """The site's records, at the index that the plan gives this site."""

    def __init__(self, mine: int, records: Records) -> None:
        self.mine, self.records, self.x = mine, records, records.x

    def shard(self, i: int) -> Any:
        assert i == self.mine
        return self.records.shard(0)
