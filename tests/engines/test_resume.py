"""A federation with a ledger, killed at random moments: nothing is counted twice, nothing forgotten."""

import random
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from sordino.core import Privacy
from sordino.data.records import Records
from sordino.engines import reference
from sordino.errors import OverspentError, SordinoError
from sordino.evidence.ledger import Ledger
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy.mechanisms.random import Secure, Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.tree import unpack

CLIENTS, ROUNDS = 4, 25
MODEL = Linear(3, 2)


def federation():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, 40)
    return Records.of(x, y, np.arange(40) % CLIENTS, dtype=torch.float64)


def the_plan(epsilon=2.0, rounds=ROUNDS):
    return Plan(build("dp-fedsofim"), rounds, federation().sizes, Privacy(epsilon), Participation.parse("fixed:3"))


def train(path, source, records=None, epsilon=2.0):
    with Ledger(path, epsilon=2.0, delta=1e-5) as ledger:
        rounds = reference.run(
            the_plan(epsilon), MODEL, records or federation(), source, ledger=ledger, run_id="r", theta=torch.zeros(8)
        )
        for this_round in rounds:
            print(this_round.t, flush=True)
            yield this_round


WORK = """
for _ in train(sys.argv[1], Seeded(3) if sys.argv[2] == "seeded" else Secure()):
    pass
"""


def last(path, source, records=None):
    *_, this_round = train(path, source, records)
    return this_round.model


@pytest.mark.parametrize("kind", ["secure", pytest.param("seeded", marks=pytest.mark.soak)])
def test_kill_nine_and_resume(kind, tmp_path, capsys, lives):
    path, rng, kills = tmp_path / "ledger.db", random.Random(1), 0
    process = lives(Path(__file__).read_text(), WORK, path, kind)
    while kills < 4:
        process.begin()
        seen = [process.line() for _ in range(rng.randint(1, 4) + 5 * kills)]
        time.sleep(rng.random() * 0.01)
        process.kill()
        assert "end" not in seen, "it ended before it was killed: nothing was tested"
        kills += 1
        with Ledger(path) as ledger:
            assert ledger.audit() == []
            assert len(ledger) >= int(seen[-1]) * 3, "what was shown is in the ledger"
    with Ledger(path) as ledger:
        stored = {(row.who, row.round): row.payload_sha256 for row in ledger.rows()}
    model = last(path, Seeded(3) if kind == "seeded" else Secure())
    with Ledger(path) as ledger:
        rows = list(ledger.rows())
        assert ledger.audit() == []
    assert len(rows) == len({(row.who, row.round) for row in rows}) == 3 * ROUNDS
    again = {(row.who, row.round): row.payload_sha256 for row in rows}
    assert all(again[key] == digest for key, digest in stored.items()), "stored releases are sent again as they were"
    if kind == "seeded":
        assert torch.equal(model, last(tmp_path / "whole.db", Seeded(3)))
        with Ledger(tmp_path / "whole.db") as whole:
            assert [row[:7] for row in whole.rows()] == [row[:7] for row in rows]
    capsys.readouterr()


def test_a_line_that_a_kill_cuts_off_is_dropped(lives):
    process = lives("import time", "print('whole', flush=True); print('cut', end='', flush=True); time.sleep(60)")
    process.begin()
    assert process.line() == "whole"
    time.sleep(0.3)
    assert process.kill() == []


def test_a_complete_run_replays_without_its_data(tmp_path, capsys):
    path = tmp_path / "ledger.db"
    first = last(path, Secure())
    own = federation()
    other = Records(torch.full_like(own.x, torch.nan), own.y, own.starts)
    assert torch.equal(last(path, Secure(), other), first)
    with Ledger(path) as ledger:
        assert len(ledger) == 3 * ROUNDS
        message = unpack(ledger.release("r", rows_who(ledger), 0))
    assert message.shape == (8,)
    capsys.readouterr()


def rows_who(ledger):
    return next(row.who for row in ledger.rows())


def test_the_run_ends_before_the_round_that_cannot_be_paid(tmp_path, capsys):
    """A site whose limit is below the plan: rounds stop, nothing of the next one is computed or stored."""
    path, done = tmp_path / "ledger.db", []
    with pytest.raises(OverspentError):
        done.extend(train(path, Secure(), epsilon=3.0))
    with Ledger(path) as ledger:
        assert 0 < len(done) < ROUNDS
        assert len(ledger) == 3 * len(done)
        assert max(ledger.spent_epsilon(who, 1e-5) for who in ledger.people()) <= 2.0 * (1 + 1e-6)
    capsys.readouterr()


def test_the_secret_cohorts_of_another_run_are_refused(tmp_path):
    """Sampling hides a client once, however often the same cohorts are asked. A mutant forgets who had them."""
    privacy = Privacy(4.0, unit="client", trust="trusted-server")

    def plan(seed):
        return Plan(
            build("dp-fedgd", unit="client"),
            2,
            (10,) * 4,
            privacy,
            Participation.parse("poisson:0.5"),
            schedule_seed=seed,
        )

    def model_of(name, seed, path="l.db"):
        with Ledger(tmp_path / path) as ledger:
            *_, last_round = reference.run(plan(seed), MODEL, federation(), Secure(), ledger=ledger, run_id=name)
        return last_round.model

    first = model_of("first", 2**100)
    assert torch.equal(model_of("first", 2**100), first), "the same run is replayed"
    with pytest.raises(SordinoError, match="had the same secret cohorts"):
        model_of("second", 2**100)
    model_of("second", 2**100 + 1)
    model_of("second", 2**100, "other.db")
    with mock.patch.object(reference, "claim_cohorts"):
        model_of("third", 2**100)
