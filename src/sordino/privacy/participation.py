"""Who takes part in which round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sordino.core import SordinoError, nearest

EVERYONE = "full"


@dataclass(frozen=True)
class Participation:
    """Who takes part: everyone, a fixed number drawn anew each round, each client by a coin of its own, or fixed
    cohorts in turn (`cyclic:4`: every client in every fourth round).

    The schedule is drawn before the run, without looking at any data, so each client's number of rounds is known and
    is what it pays for. Nothing is gained from the adversary not knowing the schedule: no amplification is claimed.
    """

    kind: str = EVERYONE
    amount: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in (EVERYONE, "fixed", "poisson", "cyclic"):
            known = [EVERYONE, "fixed:5", "poisson:0.5", "cyclic:4"]
            raise SordinoError(f"participation: '{self.kind}' is unknown.{nearest(self.kind, known)}")
        if self.kind in ("fixed", "cyclic") and not (1 <= self.amount < 2**31 and self.amount == int(self.amount)):
            what = "clients" if self.kind == "fixed" else "cohorts"
            raise SordinoError(f"participation: {self} needs a whole number of {what}, at least 1.")
        if self.kind == "poisson" and not 0 < self.amount <= 1:
            raise SordinoError(f"participation: {self} needs a rate in (0, 1].")

    @staticmethod
    def parse(text: str) -> Participation:
        kind, _, number = text.partition(":")
        if kind not in ("fixed", "poisson", "cyclic"):
            return Participation(text)
        try:
            return Participation(kind, float(number))
        except ValueError as error:
            if isinstance(error, SordinoError):
                raise
            raise SordinoError(
                f"participation: '{text}' lacks a number; write fixed:5, poisson:0.5 or cyclic:4."
            ) from None

    def __str__(self) -> str:
        return self.kind if self.kind == EVERYONE else f"{self.kind}:{self.amount:g}"

    def rate(self, clients: int) -> float:
        """The expected fraction of clients in a round: a public constant, unlike the realised one."""
        if self.kind in ("fixed", "cyclic") and self.amount > clients:
            what = "clients" if self.kind == "fixed" else "cohorts"
            raise SordinoError(f"participation: {self} asks for {self.amount:g} {what}; there are {clients} clients.")
        parts = {EVERYONE: 1.0, "fixed": self.amount / clients, "poisson": self.amount, "cyclic": 1 / self.amount}
        return parts[self.kind]

    def schedule(self, rounds: int, clients: int, seed: int) -> list[np.ndarray]:
        """The participants of each round."""
        if self.kind == EVERYONE:
            return [np.arange(clients)] * rounds
        if self.kind == "cyclic":
            cohorts = int(self.amount)
            return [np.arange(t % cohorts, clients, cohorts) for t in range(rounds)]
        rng = np.random.default_rng([seed, 0x5EED])
        if self.kind == "fixed":
            return [np.sort(rng.choice(clients, int(self.amount), replace=False)) for _ in range(rounds)]
        return [np.flatnonzero(rng.random(clients) < self.amount) for _ in range(rounds)]
