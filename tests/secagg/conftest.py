"""Sites with fixed keys, and a whole round of theirs."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest

from sordino.secagg import Identity, Member, Roster, Session, confirm, masked, offer, reveal, seals

PLAN = "ab" * 32


def secret(*words) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()


@dataclass
class Party:
    """n sites in one run; what they send is made once."""

    members: dict[str, Member]
    round: int
    vectors: dict[str, np.ndarray]
    made: dict = field(default_factory=dict)

    @property
    def session(self) -> Session:
        return next(iter(self.members.values())).session

    @property
    def names(self) -> list[str]:
        return list(self.members)

    def offers(self, names=None) -> dict[str, bytes]:
        return {n: self.made.setdefault(("offer", n), offer(self.members[n], self.round)) for n in names or self.names}

    def masked(self, names=None, offers=None) -> dict[str, bytes]:
        offers = offers or self.offers()
        return {n: masked(self.members[n], self.round, offers, self.vectors[n]) for n in names or self.names}

    def confirmations(self, survivors, names=None, offers=None) -> dict[str, str]:
        """What survivors sign if each is told of the same survivors and offers."""
        offers = offers or self.offers()
        passed = seals(self.session, self.round, self.masked(survivors, offers))
        return {n: confirm(self.members[n], self.round, offers, list(survivors), passed) for n in names or survivors}

    def reveals(self, survivors, names=None, offers=None) -> dict[str, bytes]:
        offers = offers or self.offers()
        agreed = self.confirmations(survivors, offers=offers)
        return {n: reveal(self.members[n], self.round, offers, list(survivors), agreed) for n in names or survivors}

    def total(self, names) -> np.ndarray:
        return np.sum([self.vectors[n] for n in names], axis=0, dtype=np.uint32)


@pytest.fixture
def party():
    def make(n, dropouts=0, colluders=0, d=7, round=3, run="run-1", plan=PLAN, seed=0) -> Party:
        identities = [Identity(f"site-{i}", secret("sign", seed, i), secret("box", seed, i)) for i in range(n)]
        session = Session.of(run, Roster(tuple(each.card for each in identities)), plan, dropouts, colluders)
        rng = np.random.default_rng(n + 1000 * d)
        return Party(
            {each.name: Member(each, session, secret("run", seed, each.name)) for each in identities},
            round,
            {each.name: rng.integers(0, 2**32, d, dtype=np.uint32) for each in identities},
        )

    return make
