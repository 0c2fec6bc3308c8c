"""One run of a federation, and one site in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sordino.errors import SordinoError
from sordino.privacy.mechanisms import mask_graph
from sordino.privacy.mechanisms.mask_graph import Parameters
from sordino.secagg import graph, shamir
from sordino.secagg.derive import derive, joined
from sordino.secagg.keys import Identity, Roster

ROUNDS = 2**32

_RUN = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_PLAN = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Session:
    """What all sites and the server agree on.

    Args:
      run: the name of the run.
      roster: the sites.
      threshold: the least number of sites of a sum and, where all pairs share masks, of shares that give a secret.
      plan: the sha256 of the plan.
      graph: where masks are shared along a graph, how dense it is and how many shares give a secret.

    Raises:
      SordinoError: a field is out of its range.
    """

    run: str
    roster: Roster
    threshold: int
    plan: str
    graph: Parameters | None = None

    def __post_init__(self) -> None:
        sites = len(self.roster)
        if not isinstance(self.run, str) or not _RUN.fullmatch(self.run):
            raise SordinoError("run: it must be 1 to 128 letters, digits, '-', '_' or '.'.")
        if not isinstance(self.plan, str) or not _PLAN.fullmatch(self.plan):
            raise SordinoError("plan: it must be a sha256, 64 hexadecimal digits in small letters.")
        if type(self.threshold) is not int or not (2 <= self.threshold <= sites and 2 * self.threshold > sites):
            raise SordinoError(
                f"threshold: {self.threshold!r} of {sites} sites; it must be at least 2 and more than half of them; "
                "use Session.of."
            )

    @staticmethod
    def of(run: str, roster: Roster, plan: str, dropouts: int = 0, colluders: int = 0) -> Session:
        """The session whose rounds survive `dropouts` missing sites, while `colluders` sites work with the server.

        A server with t shares of a site's self-mask and t shares of its key reads that site's vector. It may send every
        site another list of survivors, but an honest site reveals one kind of share per peer, a colluding site both:
        at most n - colluders + 2 colluders shares. So 2t > n + colluders keeps the server from having both.
        """
        sites = len(roster)
        for name, value in (("dropouts", dropouts), ("colluders", colluders)):
            if type(value) is not int or value < 0:
                raise SordinoError(f"{name}: {value!r} must be an integer from 0.")
        if sites < 2 or colluders > sites - 2:
            raise SordinoError(
                f"colluders: {colluders} of {sites} sites; with fewer than two honest sites a sum is one vector; "
                "ask more sites to join."
            )
        threshold = sites - dropouts
        least = max(2, (sites + colluders) // 2 + 1)
        if threshold < least:
            raise SordinoError(
                f"dropouts: {dropouts} of {sites} sites leave a threshold of {threshold}, but {least} are needed "
                f"against a server and {colluders} colluders; allow at most {sites - least} dropouts."
            )
        sparse = mask_graph.parameters(sites, dropouts, colluders) if sites > mask_graph.ALL_PAIRS else None
        return Session(run, roster, threshold, plan, sparse)

    @cached_property
    def context(self) -> bytes:
        """Part of every derived key: another run, plan, roster or threshold has other keys."""
        common = joined("session", self.run, self.plan, self.roster.sha256(), self.threshold)
        return common if self.graph is None else joined(common, graph.context(self.graph))

    @cached_property
    def adjacency(self) -> NDArray[np.bool_]:
        """Which sites share masks and shares: row i marks the neighbours of the site at position i."""
        sites = len(self.roster)
        if self.graph is None:
            return ~np.eye(sites, dtype=np.bool_)
        return graph.adjacency(self.context, sites, self.graph.edge)

    def neighbours(self, name: str) -> list[str]:
        """The sites that share masks with this one, in the roster's order."""
        return [self.roster.names[i] for i in np.flatnonzero(self.adjacency[self.roster.position(name)])]

    @cached_property
    def committee(self) -> frozenset[str]:
        """The sites that confirm the survivors; all of them where all pairs share masks."""
        if self.graph is None:
            return frozenset(self.roster.names)
        members = graph.committee(self.context, len(self.roster), self.graph.committee)
        return frozenset(self.roster.names[i] for i in members)

    def points(self) -> range:
        """The points of the sites' shares: position + 1, because the secret is the value at 0."""
        return range(1, len(self.roster) + 1)


def check_round(round: int) -> None:
    """Raise SordinoError unless the number of a round is in range."""
    if type(round) is not int or not 0 <= round < ROUNDS:
        raise SordinoError(f"round: {round!r} must be an integer from 0 to 2**32 - 1.")


def check_listed(member: Member, what: str, listed: Sequence[str]) -> set[str]:
    """The sites of a list that the server shows to a site: each named once, itself among them, and enough of them."""
    names = {name for name in listed if isinstance(name, str)}
    if len(names) != len(listed):
        raise SordinoError(f"{what}: each site must be named once.")
    if member.name not in names:
        raise SordinoError(f"{what}: '{member.name}' is not among them; it does not open a sum without its own vector.")
    needed = member.session.threshold
    if len(names) < needed:
        raise SordinoError(f"{what}: {len(names)} are too few, {needed} are needed; the round is lost, start the next.")
    return names


def check_survivors(
    member: Member, round: int, offered: Collection[str], survivors: Sequence[str], before: Sequence[str] | None
) -> set[str]:
    """The survivors that the server shows to a site: a list as above, of sites with offers, and the same as before."""
    alive = check_listed(member, "survivors", survivors)
    if not alive <= set(offered):
        raise SordinoError("survivors: each must have sent an offer.")
    if before is not None and set(before) != alive:
        raise SordinoError(
            f"survivors: '{member.name}' agreed to other survivors in round {round} before; show that list again, "
            "because a second one would open single vectors."
        )
    return alive


@dataclass(frozen=True)
class Member:
    """A site in a run. `secret` is 32 bytes (`secrets.token_bytes(32)`) drawn for this run and kept on its disk.

    All secrets of a round are derived from it, so after a crash a site writes the same messages again, byte for byte,
    and there is never a second version of a key or a share. Whoever has the secret has the site's masks.
    """

    identity: Identity
    session: Session
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.session.roster.card(self.identity.name) != self.identity.card:
            raise SordinoError(
                f"identity: the roster has other keys for '{self.identity.name}'; load the identity that its card "
                "was taken from."
            )
        if not isinstance(self.secret, bytes) or len(self.secret) != 32:
            raise SordinoError("secret: 32 bytes are needed; draw them once per run with secrets.token_bytes(32).")

    @property
    def name(self) -> str:
        return self.identity.name

    @cached_property
    def position(self) -> int:
        return self.session.roster.position(self.name)

    def ephemeral(self, round: int) -> bytes:
        """The round's X25519 key. Its shared secret with a peer's key gives their mask."""
        return self._secret(round, "ephemeral")

    def seed(self, round: int) -> bytes:
        """The seed of the self-mask, which hides the vector if the server learns the pairwise masks."""
        return self._secret(round, "seed")

    def shares(self, round: int) -> list[tuple[int, int]]:
        """Shares of the ephemeral key and of the seed, for every site of the roster including this one."""
        return self._dealt(round, self.session.threshold, self.session.points())

    def neighbours_shares(self, round: int) -> dict[str, tuple[int, int]]:
        """Where masks are shared along a graph: shares for every neighbour."""
        session = self.session
        names, few = session.neighbours(self.name), session.threshold if session.graph is None else session.graph.shares
        points = [session.roster.position(name) + 1 for name in names]
        return dict(zip(names, self._dealt(round, few, points), strict=True))

    def _dealt(self, round: int, threshold: int, points: Sequence[int]) -> list[tuple[int, int]]:
        ways = [
            shamir.deal(secret, threshold, points, self._secret(round, f"{what} shares"))
            for what, secret in (("ephemeral", self.ephemeral(round)), ("seed", self.seed(round)))
        ]
        return list(zip(*ways, strict=True))

    def _secret(self, round: int, what: str) -> bytes:
        check_round(round)
        return derive(self.secret, what, self.session.context, self.name, round)
