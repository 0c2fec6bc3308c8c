"""What comes before the first round: the coordinator waits for its sites and proposes the terms of a run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sordino import files, secagg, wire
from sordino.core import MOST_EPSILON, Trust
from sordino.errors import SordinoError, StoppedError, only_in
from sordino.federation import counting, introductions, messenger, rotations, votes
from sordino.federation.config import FederationConfig
from sordino.federation.derived import stated
from sordino.federation.messenger import Messenger, names_of, read, reason_of
from sordino.federation.terms import RUN_KEY, Terms, federated, public_sizes, schema_hash, schema_parts, written
from sordino.federation.weights import folder_hash
from sordino.settings import read_toml


class Hello(NamedTuple):
    """What a site states about itself."""

    node: int
    name: str
    records: int
    requested_epsilon: float | None  # stricter than the federation's, for this site alone
    tests: int = 0  # test records; 0 where the site answers no evaluation
    run_key: str = ""  # its box key for the run, signed; empty where it has none


class Enrolment:
    """The sites of a coordinator's folder, and the terms that it proposes to them.

    Args:
      config: whom to wait for.
      out: the run's folder, where the terms are stored.
      messenger: knows the nodes of the sites that were met.
      tell: reports progress.
    """

    def __init__(self, config: FederationConfig, out: Path, messenger: Messenger, tell: Callable[..., None]) -> None:
        self.config, self.messenger, self.tell = config, messenger, tell
        self.out, self.path = out, out / "terms.json"
        self.links: list[rotations.Link] = []  # to keys that sites have changed since roster.toml
        self.votes: list[votes.Vote] = []
        self._told: set[tuple[str, str]] = set()  # a site or node, and why it was not met
        self.fresh = False  # whether the terms were made by this process

    def meet(self) -> dict[str, Hello]:
        """Wait until all sites are connected, or in a resumed run as many as a round needs.

        Raises:
          SordinoError: a site did not connect within `patience`.
        """
        wanted = self._wanted()
        least = len(wanted) - self.config.dropouts if self.path.exists() else len(wanted)
        met: dict[str, Hello] = {}
        began = time.monotonic()
        while True:
            new = self.greet()
            met |= new
            wanted = self._wanted()
            met = {name: hello for name, hello in met.items() if name in wanted}
            waited = time.monotonic() - began
            if new:
                left = max(0.0, self.config.patience - waited)
                self.tell("joined", sites=sorted(new), missing=sorted(wanted - met.keys()), seconds=round(left))
            if met.keys() == wanted or (len(met) >= least and waited > self.config.deadline):
                return met
            if waited > self.config.patience:
                missing = ", ".join(sorted(wanted - met.keys()))
                raise StoppedError(
                    f"sites: {missing} did not connect within {self.config.patience:g} s; start them, or raise "
                    "patience in federation.toml."
                )
            time.sleep(messenger.POLL)

    def greet(self) -> dict[str, Hello]:
        """Ask the nodes that were not met before who they are."""
        known = self.messenger.nodes
        new = [node for node in self.messenger.transport.sites() if node not in known.values()]
        if not new:
            return {}
        nonce = secrets.token_hex(32)
        request = wire.encode("hello", {"nonce": nonce})
        replies = self.messenger.transport.exchange(dict.fromkeys(new, request), self.config.deadline)
        hellos = [hello for node, reply in replies.items() if (hello := self._hello(node, reply, nonce)) is not None]
        wanted = self._wanted()  # by the votes in these hellos too
        met = {hello.name: hello for hello in hellos if hello.name in wanted}
        met = self._remind(met)
        known.update({name: hello.node for name, hello in met.items()})
        for name in known.keys() - wanted:
            del known[name]
        self._told = {(who, why) for who, why in self._told if who not in met}
        return met

    def _tell_once(self, what: str, who: str, why: str, /, **fields: Any) -> None:
        """Report why a node was not met; once, because it is asked again every few seconds."""
        if (who, why) not in self._told:
            self._told.add((who, why))
            self.tell(what, **fields)

    def _owner(self, node: int) -> str | None:
        """The site whose key a node has, if the transport knows it."""
        return names_of(self.messenger.transport).get(node)

    def _remind(self, met: dict[str, Hello]) -> dict[str, Hello]:
        """Show sites the receipts that they signed last. Those that refuse have an older ledger, and are left out."""
        receipts = self.messenger.receipts
        shown = {name: receipt for name in met if receipts is not None and (receipt := receipts.of(name)) is not None}
        requests = {met[name].node: wire.encode("hello", {"receipt": receipt}) for name, receipt in shown.items()}
        replies = self.messenger.transport.exchange(requests, self.config.deadline) if requests else {}
        told: dict[str, wire.Message] = {}
        for name in shown:
            message = read(replies.get(met[name].node, b""), "hello")
            if message is None or message.kind == "refused":
                reason = "no reply" if message is None else reason_of(message)
                self._tell_once("refused", name, reason, site=name, kind="hello", reason=reason)
                del met[name]
            else:
                told[name] = message
        self.messenger.keep_receipts(told)
        return met

    def _believed(self, node: int, fields: Mapping[str, Any], nonce: str) -> bool:
        """Whether a node may say the name that it says.

        A transport that admits nodes by their keys knows whose key the node has, and the roster has the key that the
        site signs with. Each of the two that is there must agree."""
        name, owners = str(fields.get("name")), names_of(self.messenger.transport)
        self._learn(name, fields.get("rotations"))
        self._count(name, fields.get("votes"))
        why = ""
        if owners and owners.get(node) != name:
            why = f"it says that it is {name}, and does not have the node key of {name}"
        elif self._cards and not (name in self._cards and introductions.proves(fields, nonce, self._cards[name])):
            why = f"it says that it is {name}, and did not sign with the key that the roster has for {name}"
        if why:
            self._tell_once("misfit", f"node {node}", why, node=str(node), why=why)
        return not why

    def _learn(self, name: str, texts: Any) -> None:
        """Follow the links to a site's new keys, if each is signed by the key before it."""
        if not (self._cards and isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            return
        try:
            new = [link for link in rotations.parsed(texts[: rotations.MOST]) if link.name == name]
            rotations.applied(self._base_roster, [*self.links, *new])
        except SordinoError as error:
            self._tell_once("misfit", name, str(error), site=name, why=str(error))
            return
        for link in new:
            if link not in self.links:
                self.links.append(link)
                self.tell("rotated", site=link.name, old=link.old, new=link.sign)

    def _count(self, name: str, texts: Any) -> None:
        """Note a site's votes; those that are not signed do not count."""
        if not self._cards:
            return
        try:
            listed = texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else []
            cast = [vote for vote in votes.parsed(listed) if vote.voter == name and votes.is_signed(vote, self.roster)]
        except SordinoError:
            cast = []
        self.votes = [vote for vote in self.votes if vote.voter != name] + cast
        for out, by in votes.excluded(self.roster, self.votes).items():
            self._tell_once("excluded", out, str(by), site=out, votes=by)

    def _wanted(self) -> set[str]:
        """The sites that take part: those of the stored terms, or all but those who are voted out."""
        if self.path.exists():
            return set(Terms.read(self.path.read_text(encoding="utf-8")).names)
        return set(self.config.sites) - self._excluded()

    def _excluded(self) -> set[str]:
        return set(votes.excluded(self.roster, self.votes)) if self.votes else set()

    @property
    def _cards(self) -> dict[str, str]:
        """The sites' keys for signatures; empty if the coordinator has no roster."""
        if not self.config.path(self.config.roster).exists():
            return {}
        return {card.name: card.sign for card in self.roster.sites}

    def _hello(self, node: int, reply: bytes, nonce: str) -> Hello | None:
        message = read(reply, "hello")
        if message is not None and message.kind == "refused":
            who, reason = self._owner(node) or f"node {node}", reason_of(message)
            self._tell_once("refused", who, reason, site=who, kind="hello", reason=reason)
            return None
        fields = message.fields if message else {}
        name, records, epsilon = (fields.get(key) for key in ("name", "records", "epsilon"))
        if isinstance(name, str) and type(records) is int and 0 < records < 2**40:
            if name in self.config.sites and not self._believed(node, fields, nonce):
                return None
            tests = fields.get("tests", 0)
            if type(tests) is not int or not 0 <= tests < 2**40:
                tests = 0  # it answers no evaluation
            key = fields.get("run_key")
            key = key if isinstance(key, str) and RUN_KEY.fullmatch(key) else ""
            if epsilon is None:
                return Hello(node, name, records, None, tests, key)
            if type(epsilon) in (float, int) and 0 < epsilon < MOST_EPSILON:
                return Hello(node, name, records, float(epsilon), tests, key)
        owner = self._owner(node)
        self._tell_once("misfit", owner or f"node {node}", "", node=str(node), **({"site": owner} if owner else {}))
        return None

    def propose(self, met: dict[str, Hello]) -> Terms:
        """The stored terms, or new ones for the sites that were met.

        Raises:
          SordinoError: the spec cannot be run, or the roster names other sites.
        """
        if self.path.exists():
            terms = Terms.read(self.path.read_text(encoding="utf-8"), self.config.weights_folder)
            self.links = rotations.parsed(terms.rotations)  # the run keeps to its keys
            return terms
        config = self.config
        spec, schema = federated(read_toml(config.path(config.spec))), config.table_schema
        cells: tuple[int, ...] = ()
        if config.statistics_epsilon is not None:
            cells = counting.cells_of(schema)
            spec = replace(spec, epsilon=config.statistics_epsilon)
        elif schema is not None and schema.unknown:
            raise SordinoError(
                f"schema: '{schema.unknown[0]}' is left open; find it first, by a run with statistics_epsilon in "
                "federation.toml, or give public values."
            )
        out = self._excluded()
        names, roster = tuple(name for name in config.sites if name not in out), ""
        if spec.trust == Trust.SECURE_AGGREGATION:
            left = votes.reduced(self.roster, out)
            names, roster = tuple(left.names), left.sha256()
            if unlike := only_in(self.roster.names, config.sites, "it", "federation.toml"):
                raise SordinoError(f"roster.toml: {unlike}; both must list the same sites.")
        requested = {name: met[name].requested_epsilon for name in names}
        terms = Terms(
            run=secrets.token_hex(16),
            spec=written(spec, counting.filled(schema) if cells and schema is not None else schema),
            names=names,
            sizes=public_sizes(spec, [met[name].records for name in names]),
            requested_epsilons={name: e for name, e in requested.items() if e is not None and e < spec.epsilon},
            features=config.features,
            classes=tuple(config.classes),
            dropouts=config.dropouts,
            colluders=config.colluders,
            roster=roster,
            run_keys=self._run_keys(met, names) if roster else (),
            votes=tuple(sorted(vote.text() for vote in self.votes)),
            rotations=tuple(sorted(link.text() for link in self.links)) if roster else (),
            schema=schema_hash(schema),
            schema_parts=schema_parts(schema),
            found=counting.found_in(schema),
            cells=cells,
            evaluation=config.evaluation_epsilon or 0.0,
            tests=self._tests(met, names),
            weights=folder_hash(config.weights_folder),
            weights_folder=config.weights_folder,
        )
        if config.trim and terms.secure:
            raise SordinoError("trim: under masks nobody sees single messages; use untrusted-server, or set trim = 0.")
        terms = stated(terms)  # refuses a plan that cannot be calibrated before any site is asked
        if roster:
            secagg.Session.of(terms.run, left, terms.sha256(), terms.dropouts, terms.colluders)
        terms = Terms.read(terms.json(), config.weights_folder)
        files.write(self.path, terms.json().encode())
        files.write(self.out / "spec.toml", terms.spec.encode())
        self.fresh = True
        return terms

    def _run_keys(self, met: dict[str, Hello], names: tuple[str, ...]) -> tuple[str, ...]:
        """Every site's box key of the run."""
        if silent := sorted(name for name in names if not met[name].run_key):
            raise StoppedError(
                f"sites: {', '.join(silent)} sent no key for secure aggregation; put roster.toml beside its site.toml, "
                "and upgrade it."
            )
        return tuple(met[name].run_key for name in names)

    def _tests(self, met: dict[str, Hello], names: tuple[str, ...]) -> tuple[int, ...]:
        """Every site's number of test records, if federation.toml asks for an evaluation."""
        if not self.config.evaluation_epsilon:
            return ()
        if silent := sorted(name for name in names if not met[name].tests):
            raise StoppedError(
                f"evaluation_epsilon: {', '.join(silent)} answers no evaluation; set evaluation_epsilon in its "
                "site.toml, or remove the key from federation.toml."
            )
        return tuple(met[name].tests for name in names)

    def withdraw(self) -> None:
        """Delete terms that a site refused before the first round, if this process proposed them."""
        if self.fresh:
            self.path.unlink()

    @property
    def roster(self) -> secagg.Roster:
        """The sites' keys: roster.toml, and what sites have changed since."""
        return rotations.applied(self._base_roster, self.links)

    def roster_of(self, terms: Terms) -> secagg.Roster:
        """The roster of the run's sites."""
        return votes.reduced(self.roster, set(self.roster.names) - set(terms.names))

    @cached_property
    def _base_roster(self) -> secagg.Roster:
        return secagg.Roster.read(self.config.path(self.config.roster))
