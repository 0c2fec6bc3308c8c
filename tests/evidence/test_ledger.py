"""The ledger forgets nothing, counts nothing twice, and notices whoever edits it."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sordino.cli import main
from sordino.errors import OverspentError, SordinoError
from sordino.evidence import ledger
from sordino.evidence.ledger import GENESIS, Charge, Lease, Ledger
from sordino.evidence.spent import Choice, Spent, SpentByRuns
from sordino.privacy.accounting import concentrated, events, gaussian

EPSILON, DELTA = 1.0, 1e-5
TEXTS = ("who", "query", "plan", "time", "key", "payload_sha256", "previous", "hash")
FIELDS = (*TEXTS, "round", "times", "seq", "sensitivity", "std", "payload")


def entry(who="ann", round=0, *, query="gradient", sensitivity=2.0, std=50.0, times=1, plan="p"):
    return Charge(who, round, query, sensitivity, std, times, plan)


def tamper(path, *statements):
    """What someone with write access to the file can do."""
    raw = sqlite3.connect(path, isolation_level=None)
    try:
        for (trigger,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            raw.execute(f"DROP TRIGGER {trigger}")
        for sql, *values in statements:
            raw.execute(sql, values)
    finally:
        raw.close()


def problems(path, **expected):
    with Ledger(path) as opened:
        return opened.audit(**expected)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Six rows of five charges, one of two queries, one without a payload."""
    path = tmp_path_factory.mktemp("ledger") / "written.db"
    with Ledger(path, epsilon=EPSILON, delta=DELTA) as opened:
        for round in range(3):
            opened.charge([entry("ann", round)], b"ann %d" % round)
        opened.charge([entry("bob", 0), entry("bob", 0, query="gram", std=80.0, times=3)], b"")
        opened.charge([entry("bob", 1)])
    return path


@pytest.fixture
def copy(written, tmp_path):
    return Path(shutil.copy(written, tmp_path / "copy.db"))


# ------------------------------------------------------------------------------------------------------- the account


def test_an_empty_ledger_is_sound_private_and_true(tmp_path):
    with Ledger(tmp_path / "new.db") as opened:
        assert (len(opened), opened.head(), opened.people(), list(opened.rows())) == (0, GENESIS, [], [])
        assert opened.audit(expect_head=GENESIS, expect_rows=0) == []
        assert opened.spent("nobody") == 0 == opened.spent_epsilon("nobody", DELTA)
        assert opened  # else `if ledger:` would run without one
        for file in tmp_path.iterdir():  # those beside it too
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_committed_row_is_synchronised(tmp_path):
    with Ledger(tmp_path / "new.db") as opened:
        assert opened._ask("PRAGMA synchronous") == [(2,)]
        assert opened._ask("PRAGMA journal_mode") == [("wal",)]


def test_rows_say_what_was_charged(written):
    with Ledger(written) as opened:
        rows = list(opened.rows())
        assert [row.seq for row in rows] == [1, 2, 3, 4, 5, 6]
        assert Charge(*rows[4][:7]) == entry("bob", 0, query="gram", std=80.0, times=3)
        assert rows[0].payload_sha256 == hashlib.sha256(b"ann 0").hexdigest()
        assert rows[0].previous == GENESIS
        assert rows[0].time.endswith("+00:00")
        assert opened.head() == rows[-1].hash
        assert opened.people() == ["ann", "bob"]
        assert opened.audit(opened.head(), len(opened)) == []
        assert opened.audit(rows[2].hash, 3) == []  # a certificate of earlier days still holds


def test_spending_is_the_composition_of_all_releases(written):
    with Ledger(written) as opened:
        bob = gaussian.mu_of([(2.0, 50.0, 2), (2.0, 80.0, 3)])
        assert opened.spent("bob") == pytest.approx(bob, rel=1e-12)
        assert opened.spent_epsilon("bob", DELTA) == pytest.approx(gaussian.epsilon(bob, DELTA), rel=1e-9)


def test_a_stored_release_is_returned_byte_for_byte(written):
    with Ledger(written) as opened:
        assert opened.release("p", "ann", 2) == b"ann 2"
        assert opened.release("p", "bob", 0) == b""
        assert opened.release("p", "bob", 1) is None
        assert opened.charged("p", "bob", 1)
        assert not opened.charged("p", "bob", 2)
        assert not opened.charged("q", "bob", 1)


def test_nothing_is_charged_twice(copy):
    with Ledger(copy) as opened:
        before = opened.spent("ann"), opened.head()
        for query in ("gradient", "another"):
            with pytest.raises(OverspentError, match="already released; re-send the stored one"):
                opened.charge([entry("ann", 1, query=query)], b"noised anew")
        with pytest.raises(OverspentError, match=r"ann, round 1 .*already released"):
            opened.charge([entry("cleo", 1), entry("ann", 1)], b"in company")
        assert (opened.spent("ann"), opened.head()) == before
        assert opened.release("p", "ann", 1) == b"ann 1"
        assert not opened.charged("p", "cleo", 1)


def test_a_release_of_many_is_stored_under_its_own_key(copy):
    with Ledger(copy) as opened:
        opened.charge([entry("ann", 9), entry("bob", 9)], b"sum", key=("p", "everyone", 9))
        assert opened.release("p", "everyone", 9) == b"sum"
        assert opened.release("p", "ann", 9) is None
        assert all(opened.charged("p", who, 9) for who in ("everyone", "ann", "bob"))
        assert "everyone" not in opened.people()
        with pytest.raises(OverspentError, match="already released"):
            opened.charge([entry("cleo", 9)], b"sum", key=("p", "everyone", 9))
        assert opened.audit() == []


def test_two_open_ledgers_see_each_other(copy):
    with Ledger(copy) as one, Ledger(copy) as other:
        assert one.spent("ann") == other.spent("ann")
        one.charge([entry("ann", 10)])
        assert other.spent("ann") == one.spent("ann") == pytest.approx(2 * 0.04)
        for row in other.rows():  # reading on while writing
            other.charge([entry("dora", row.seq)])
            if row.seq == 5:
                break
        one.charge([entry("ann", 11)])
        assert one.audit() == other.audit() == []


# --------------------------------------------------------------------------------------------------------- the limit


@pytest.mark.parametrize("k", [1, 7, 100])
def test_k_releases_fit_and_one_more_does_not(tmp_path, k):
    std = 2.0 * math.sqrt(k) / gaussian.mu(EPSILON, DELTA)
    with Ledger(tmp_path / "l.db", epsilon=EPSILON, delta=DELTA) as opened:
        opened.afford([entry(std=std, times=k)])
        with pytest.raises(OverspentError):
            opened.afford([entry(std=std, times=k + 1)])
        with pytest.raises(OverspentError):  # summed over the entries of one charge
            opened.afford([entry(std=std, times=k), entry(std=std)])
        for round in range(k):
            opened.charge([entry(round=round, std=std)], b"x")
        assert opened.spent_epsilon("ann", DELTA) == pytest.approx(EPSILON, rel=1e-8)
        for call in (opened.afford, opened.charge):
            with pytest.raises(OverspentError, match=r"ann: .* epsilon to 1\.\d+ at delta 1e-05; the limit is 1\b"):
                call([entry(round=k, std=std, plan="another plan")])
        opened.afford([entry("bob", std=std, times=k)])  # everyone has their own
        assert len(opened) == k


def test_a_hair_more_than_the_limit_does_not_fit(tmp_path):
    std = 2.0 / gaussian.mu(EPSILON, DELTA)
    with Ledger(tmp_path / "l.db", epsilon=EPSILON, delta=DELTA) as opened:
        opened.afford([entry(std=std)])
        with pytest.raises(OverspentError):
            opened.afford([entry(std=std * (1 - 1e-8))])


def test_one_who_cannot_pay_stops_the_charge_of_all(tmp_path):
    with Ledger(tmp_path / "l.db", epsilon=EPSILON, delta=DELTA) as opened:
        with pytest.raises(OverspentError, match="bob"):
            opened.charge([entry("ann"), entry("bob", std=0.1)], b"x")
        assert len(opened) == 0
        assert opened.release("p", "ann", 0) is None


def test_a_limit_may_be_tightened_never_loosened(tmp_path):
    path = tmp_path / "l.db"
    Ledger(path, epsilon=2.0, delta=1e-5).close()
    for laxer in ((2.01, 1e-5), (2.0, 1e-4), (math.inf, 1e-5)):
        with pytest.raises(SordinoError, match=r"limit is epsilon 2 .*weaker.*tightened"):
            Ledger(path, epsilon=laxer[0], delta=laxer[1])
    Ledger(path, epsilon=2.0, delta=1e-5).close()
    big = entry(std=2.0 / gaussian.mu(1.5, 1e-5))
    with Ledger(path) as kept, Ledger(path, epsilon=1.0, delta=1e-5) as stricter:
        for opened in (kept, stricter):  # also for whoever had it open
            with pytest.raises(OverspentError, match="the limit is 1"):
                opened.afford([big])
        assert stricter._ask("SELECT epsilon FROM limits ORDER BY seq") == [(2.0,), (1.0,)]
    with pytest.raises(SordinoError, match="limit is epsilon 1 "):
        Ledger(path, epsilon=2.0, delta=1e-5)


def test_a_ledger_without_a_limit_takes_one_later(tmp_path):
    path = tmp_path / "l.db"
    with Ledger(path, epsilon=math.inf, delta=DELTA) as opened:
        opened.charge([entry(std=0.0)], b"no noise at all")
        assert opened.spent("ann") == math.inf == opened.spent_epsilon("ann", DELTA)
    with Ledger(path, epsilon=EPSILON, delta=DELTA) as opened:
        with pytest.raises(OverspentError, match="epsilon to inf"):
            opened.charge([entry(round=1)])
        with pytest.raises(OverspentError, match="epsilon to inf"):
            opened.charge([entry("bob", sensitivity=math.inf)])
        opened.charge([entry("bob", sensitivity=0.0, std=0.0)])
        assert opened.audit() == []


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "bad",
    [
        {"who": ""},
        {"who": None},
        {"sensitivity": math.nan},
        {"sensitivity": -1.0},
        {"std": math.nan},
        {"std": -1.0},
        {"std": math.inf},
        {"std": 0.0},
        {"std": "much"},
        {"times": 0},
        {"times": 1.5},
        {"round": 0.5},
    ],
)
def test_bad_values_are_refused_before_anything_is_written(copy, bad):
    with Ledger(copy) as opened:
        head = opened.head()
        for call in (opened.afford, opened.charge):
            with pytest.raises(SordinoError):
                call([entry("cleo"), entry(**{"round": 99, **bad})])
        assert opened.head() == head


def test_a_charge_of_nothing_is_refused(copy):
    with Ledger(copy) as opened, pytest.raises(SordinoError, match="the list is empty"):
        opened.charge([], b"free")


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, None), (None, 1e-5), (-1.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0)])
def test_a_bad_limit_leaves_no_file(tmp_path, epsilon, delta):
    with pytest.raises(SordinoError):
        Ledger(tmp_path / "l.db", epsilon=epsilon, delta=delta)
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_kind_are_refused_and_left_alone(copy, tmp_path):
    tamper(copy, ("PRAGMA user_version = 7",))
    with pytest.raises(SordinoError, match=r"the file has schema 7.*reads schema 2"):
        Ledger(copy)

    foreign, text = tmp_path / "foreign.db", tmp_path / "text.db"
    tamper(foreign, ("CREATE TABLE t (x)",))
    text.write_text("certainly not a database " * 50)
    for path, message in ((foreign, "another kind"), (text, "not a database; name a file")):
        path.chmod(0o644)
        before = path.read_bytes()
        with pytest.raises(SordinoError, match=message):
            Ledger(path)
        assert path.read_bytes() == before
        assert stat.S_IMODE(path.stat().st_mode) == 0o644

    mode = tmp_path.stat().st_mode
    for path in (tmp_path / "missing" / "l.db", tmp_path):
        with pytest.raises(SordinoError, match="ledger"):
            Ledger(path)
    assert tmp_path.stat().st_mode == mode


def test_a_copy_that_anyone_can_read_is_closed_to_them(copy):
    copy.chmod(0o644)
    Ledger(copy).close()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


def test_a_full_disk_charges_nothing_and_says_so(copy):
    with Ledger(copy) as opened:
        before = opened.head(), len(opened), opened.spent("ann")
        (pages,) = opened._ask("PRAGMA page_count")[0]
        opened._ask(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(SordinoError, match="full; free some disk space"):
            opened.charge([entry("ann", 50), entry("ann", 50, query="big")], bytes(100_000))
        assert (opened.head(), len(opened), opened.spent("ann")) == before
        assert not opened.charged("p", "ann", 50)
        opened._ask(f"PRAGMA max_page_count = {pages + 1000}")
        opened.charge([entry("ann", 50)], bytes(100_000))
        assert opened.audit() == []


def test_a_locked_file_says_who_to_wait_for(copy, monkeypatch):
    monkeypatch.setattr(ledger, "TIMEOUT", 0.05)
    with Ledger(copy) as opened:
        other = sqlite3.connect(copy, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SordinoError, match="locked; another process has locked it"):
            opened.charge([entry("ann", 50)], b"x")
        other.close()
        opened.charge([entry("ann", 50)], b"x")


def test_sql_cannot_edit_rows_by_accident(copy):
    raw = sqlite3.connect(copy)
    for table in ("entries", "limits"):
        for sql in (f"UPDATE {table} SET seq = seq + 100", f"DELETE FROM {table}"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                raw.execute(sql)
    raw.close()
    assert problems(copy) == []


# --------------------------------------------------------------------------------------------------------- tampering


def nudge(value):
    """The least change of its kind."""
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    if isinstance(value, int):
        return value + 1
    return value + (" " if isinstance(value, str) else b"\0") if value is not None else b""


values = st.one_of(
    st.just(nudge),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=8),
)


@given(seq=st.integers(1, 6), field=st.sampled_from(FIELDS), value=values)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_change_of_any_field_is_noticed(written, seq, field, value):
    path = written.with_name("tampered.db")
    shutil.copy(written, path)
    column = "CAST(payload AS BLOB)" if field == "payload" else field  # text of the same bytes is the same payload
    read = f"SELECT {column}, typeof({column}) FROM entries ORDER BY rowid"
    raw = sqlite3.connect(path)
    before = raw.execute(read).fetchall()
    raw.close()
    value = nudge(before[seq - 1][0]) if value is nudge else value
    try:
        tamper(path, (f"UPDATE entries SET {field} = ? WHERE seq = ?", value, seq))
    except sqlite3.IntegrityError:
        assume(False)  # a sequence number or key that is taken
    raw = sqlite3.connect(path)
    raw.text_factory = bytes
    after = raw.execute(read).fetchall()
    raw.close()
    encoded = [(x.encode() if isinstance(x, str) else x, kind.encode()) for x, kind in before]
    assume(after != encoded)
    assert problems(path), (field, before, after)


@pytest.mark.parametrize("field", FIELDS)
def test_the_least_change_of_a_field_is_noticed(copy, field):
    with sqlite3.connect(copy) as raw:
        (value,) = raw.execute(f"SELECT {field} FROM entries WHERE seq = 6").fetchone()
    raw.close()
    tamper(copy, (f"UPDATE entries SET {field} = ? WHERE seq = 6", nudge(value)))
    assert problems(copy)


def test_text_that_is_no_text_is_noticed(copy):
    tamper(copy, ("UPDATE entries SET who = CAST(x'ff' AS TEXT) WHERE seq = 3",))
    assert "cannot be read beyond row 2" in problems(copy)[0]


def test_a_payload_removed_or_exchanged_is_noticed(copy):
    tamper(copy, ("UPDATE entries SET payload = NULL WHERE seq = 2",))
    assert "Row 2 has a payload" in problems(copy)[0]
    tamper(copy, ("UPDATE entries SET payload = (SELECT payload FROM entries WHERE seq = 1) WHERE seq = 2",))
    assert "Row 2 has a payload" in problems(copy)[0]


@pytest.mark.parametrize("seq", [1, 3, 5])
def test_a_row_removed_from_the_middle_is_noticed(copy, seq):
    tamper(copy, ("DELETE FROM entries WHERE seq = ?", seq))
    assert any("gap" in problem for problem in problems(copy))
    tamper(copy, ("UPDATE entries SET seq = seq - 1 WHERE seq > ?", seq))  # closing the gap opens the chain
    assert any("chain is broken" in problem for problem in problems(copy))


@pytest.mark.parametrize("left", [0, 1, 5])
def test_rows_cut_from_the_end_are_noticed_by_a_certificate(copy, left):
    with Ledger(copy) as opened:
        head, count = opened.head(), len(opened)
    tamper(copy, ("DELETE FROM entries WHERE seq > ?", left))
    assert [
        f"The witness counts {count} rows, but row {left} is the last: rows were cut off or rewritten."
    ] == problems(copy)
    with Ledger(copy) as opened, pytest.raises(SordinoError, match="rows were cut off"):
        opened.charge([Charge("late", 1, "q", 0.01, 1.0, 1, "other")])  # and would hide that they were
    tamper(copy, ("DELETE FROM witness",))
    assert problems(copy) == []  # nothing in the file can tell any more, hence the certificate
    assert "No row has the expected hash" in problems(copy, expect_head=head)[0]
    assert f"{left} rows, but {count} are expected" in problems(copy, expect_rows=count)[0]


@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 5), (4, 5)])
def test_rows_reordered_are_noticed(copy, one, other):
    move = "UPDATE entries SET seq = ? WHERE seq = ?"
    tamper(copy, (move, 99, one), (move, one, other), (move, other, 99))
    assert problems(copy)


def test_a_row_rehashed_needs_all_that_follow_rehashed(copy):
    with Ledger(copy) as opened:
        head, row = opened.head(), list(opened.rows())[2]._replace(std=1e9)
    forged = ledger._chained(row)
    tamper(
        copy,
        ("UPDATE entries SET std = ?, hash = ? WHERE seq = 3", row.std, forged),
        ("UPDATE entries SET previous = ? WHERE seq = 4", forged),
    )
    assert problems(copy, expect_head=head) == ["Row 4 does not match its hash: it was changed."]


def test_a_chain_forged_throughout_is_noticed_by_a_certificate(copy, tmp_path):
    with Ledger(copy) as opened, Ledger(tmp_path / "forged.db") as forged:
        for row in opened.rows():
            forged.charge([Charge(*row[:7])._replace(std=row.std * 10, round=row.seq)])
        assert forged.audit(expect_rows=len(opened)) == []
        assert "rewritten" in forged.audit(expect_head=opened.head())[0]


def test_a_row_without_sense_stops_further_charges(copy):
    tamper(copy, ("UPDATE entries SET times = -1000 WHERE who = 'ann'",))  # a refund
    with Ledger(copy) as opened, pytest.raises(SordinoError, match="times: -1000"):
        opened.charge([entry("ann", 50)])


# --------------------------------------------------------------------------------------------- processes and crashes

# Forked inside one process of their own, so that the imports are paid for once.
TOGETHER = """
import os, sys
from sordino.errors import OverspentError
from sordino.evidence.ledger import Charge, Ledger

def work(path, std, worker):
    with Ledger(path, epsilon=1.0, delta=1e-5) as ledger:
        for round in range(1000):
            try:
                ledger.charge([Charge("ann", round, "g", 2.0, std, 1, f"of {worker}")], b"%d" % worker)
            except OverspentError:
                return 0
    return 1

for path in sys.argv[2:]:
    for worker in range(4):
        if not os.fork():
            try:
                while not os.path.exists(path + ".go"):  # so that they race to create it, too
                    pass
                status = work(path, float(sys.argv[1]), worker)
            except BaseException as error:
                status = 2
                print(error, flush=True)
            os._exit(status)
    open(path + ".go", "w").close()
    assert [os.wait()[1] for _ in range(4)] == [0] * 4
"""

KILLED = """
import hashlib, os, random, signal, sys, time
from sordino.evidence.ledger import Charge, Ledger

pause = random.Random(5)
for life in range(6):
    child = os.fork()
    if not child:
        ledger = Ledger(sys.argv[1])
        assert ledger.audit() == [] and len(ledger) % 2 == 0
        for round in range(len(ledger) // 2, 10**9):
            payload = os.urandom(5_000)
            ledger.charge([Charge("ann", round, query, 1.0, 9.0, 1, "p") for query in ("g", "h")], payload)
            os.write(1, f"{round} {hashlib.sha256(payload).hexdigest()}\\n".encode())
    time.sleep(pause.uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def python(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_processes_share_one_limit_and_one_chain(tmp_path):
    fit = 20
    paths = [tmp_path / f"{i}.db" for i in range(4)]
    assert python(TOGETHER, 2.0 * math.sqrt(fit) / gaussian.mu(EPSILON, DELTA), *paths) == ""
    for path in paths:
        with Ledger(path) as opened:
            assert len(opened) == fit
            assert opened.audit() == []
            for row in opened.rows():
                assert opened.release(row.plan, "ann", row.round) == row.plan.removeprefix("of ").encode()


def test_a_killed_process_forgets_nothing_it_has_said(tmp_path):
    said = [line.split() for line in python(KILLED, tmp_path / "l.db").splitlines()]
    assert len(said) > 20
    with Ledger(tmp_path / "l.db") as opened:
        assert opened.audit() == []
        for round, sha256 in said:
            assert opened.charged("p", "ann", int(round))
            payload = opened.release("p", "ann", int(round))
            assert payload is not None
            assert hashlib.sha256(payload).hexdigest() == sha256
        times = Counter((row.plan, row.who, row.round, row.query) for row in opened.rows())
        assert set(times.values()) == {1}
        assert len(times) % 2 == 0  # both rows of a charge, or neither
        assert len({round for round, _ in said}) == len(said) <= len(times) // 2 <= len(said) + 6


def shown(path, capsys):
    status = main(["ledger", "show", str(path)])
    return status, capsys.readouterr().out.splitlines()[-1]


def test_show_says_what_can_be_seen_and_what_cannot(copy, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with Ledger(copy) as opened:
        head, count = opened.head(), len(opened)
    status, words = shown(copy, capsys)
    assert status == 0
    assert "as many rows as the file records; whoever can write the file could have cut both" in words
    tamper(copy, ("DELETE FROM entries WHERE seq > ?", count - 1))
    status, words = shown(copy, capsys)
    assert status == 1
    assert "rows were cut off" in words
    tamper(copy, ("DELETE FROM witness",))  # the witness too: only the certificate is left
    status, words = shown(copy, capsys)
    assert status == 0
    assert "rows cut from its end cannot be noticed here" in words
    place = tmp_path / "run"
    for name in ("public", "private"):
        (place / name).mkdir(parents=True)
    shutil.copy(copy, place / "private" / "ledger.db")
    (place / "public" / "certificate.json").write_text(json.dumps({"ledger": {"head": head, "rows": count}}))
    for path in (place, place / "public", place / "private" / "ledger.db"):
        status, words = shown(path, capsys)
        assert status == 1
        assert f"There are {count - 1} rows, but {count} are expected" in words


def test_rounds_stored_never_fall_and_outlive_the_process(tmp_path):
    with Ledger(tmp_path / "new.db") as opened:
        assert opened.marked("plan") == 0
        for rounds in (3, 1):
            opened.mark("plan", rounds)
    with Ledger(tmp_path / "new.db") as opened:
        assert (opened.marked("plan"), opened.marked("other")) == (3, 0)
        assert opened._ask("PRAGMA synchronous") == [(2,)]  # FULL again: charges wait for the drive


def test_a_ledger_of_an_earlier_version_gets_its_witness_with_the_next_charge(copy):
    tamper(copy, ("DROP TABLE witness",), ("DROP TABLE progress",))
    with Ledger(copy) as opened:
        assert not opened.witnessed()
        assert opened.audit() == []
        assert opened.marked("plan") == 0
        opened.charge([Charge("late", 1, "q", 0.01, 1.0, 1, "other")])
        assert opened.witnessed()
        assert opened.audit() == []


def folder_of(path):
    """Names, sizes, modes and times of everything beside the file."""
    return {p.name: (p.stat().st_size, p.stat().st_mode, p.stat().st_mtime_ns) for p in path.parent.iterdir()}


def test_looking_changes_nothing(copy, capsys):
    """Neither the file nor its folder: both may be read-only."""
    copy.chmod(0o444)
    before = folder_of(copy)
    with Ledger(copy, read_only=True) as book:
        assert book.audit() == []
        assert len(book) > 0
        with pytest.raises(SordinoError, match="readonly"):
            book.charge([entry("zoe", 99, plan="new")])
    assert main(["ledger", "show", str(copy)]) == 0
    assert main(["ledger", "export", str(copy)]) == 0
    assert folder_of(copy) == before
    missing = copy.with_name("none.db")
    with pytest.raises(SordinoError, match="unable to open"):
        Ledger(missing, read_only=True)
    assert not missing.exists()
    missing.write_bytes(b"")
    with pytest.raises(SordinoError, match="the file is empty; name a file that is a ledger"):
        Ledger(missing, read_only=True)


def test_what_is_not_yet_in_the_file_is_seen(copy, tmp_path, monkeypatch):
    """SQLite keeps the newest rows beside the file until the ledger is closed; a killed process leaves them there."""
    place = tmp_path / "killed"
    place.mkdir()
    with Ledger(copy) as book:
        book.charge([entry("zoe", 99, plan="new")])
        rows, head = len(book), book.head()
        with Ledger(copy, read_only=True) as other:
            assert (len(other), other.head()) == (rows, head)
        for end in ("", "-wal"):
            shutil.copy(f"{copy}{end}", place / f"a.db{end}")
    connect = Ledger._connect_to_read

    def in_a_read_only_folder(self, path, more=""):
        if path.parent == place:
            raise sqlite3.OperationalError("unable to open database file")
        connect(self, path, more)

    monkeypatch.setattr(Ledger, "_connect_to_read", in_a_read_only_folder)
    before = folder_of(place / "a.db")
    with Ledger(place / "a.db", read_only=True) as book:
        assert (len(book), book.head()) == (rows, head)
        assert book.audit() == []
    assert folder_of(place / "a.db") == before


def test_compaction_deletes_the_bytes_of_ended_plans_and_keeps_the_chain(tmp_path):
    path, big = tmp_path / "ledger.db", b"x" * 200_000
    with Ledger(path, epsilon=EPSILON, delta=DELTA) as opened:
        for round in range(5):
            opened.charge([entry(round=round, plan="ended")], big)
        opened.charge([entry(round=5, plan="open")], b"kept")
        opened.charge([entry(round=6, query=ledger.SURVIVORS, sensitivity=0.0, plan="ended")], b"a note")
        head, spent = opened.head(), opened.spent("ann")
        assert opened.compact(["ended"]) == 5
        assert opened.compact(["ended"]) == 0
        assert (opened.head(), opened.spent("ann")) == (head, spent)
        assert opened.audit(head, 7) == []
        assert opened.release("ended", "ann", 0) is None
        assert opened.release("open", "ann", 5) == b"kept"
        assert opened.release("ended", "ann", 6) == b"a note"
        with pytest.raises(OverspentError, match="already released"):
            opened.charge([entry(round=0, plan="ended")], b"once more")
        with pytest.raises(SordinoError, match="append-only"):  # the triggers are back
            opened._ask("UPDATE entries SET payload = NULL WHERE seq = 6")
        opened.shrink()
        assert opened.audit(head, 7) == []
    assert path.stat().st_size < 100_000
    tamper(path, ("UPDATE entries SET payload = NULL WHERE seq = 6",))
    assert problems(path) == ["Row 6 has a payload that does not match its hash: it was changed."]


# -------------------------------------------------------------------------------- runs that are chosen after looking


def sampled(plan, rate, std, times=50):
    return Charge("ann", 0, "gradient", 1.0, std, times, plan, rate, "poisson add-remove")


def test_limits_hold_for_later_runs_however_they_are_chosen(tmp_path, capsys):
    path = tmp_path / "ledger.db"
    first, second = sampled("first", 0.05, 1.0), sampled("second", 0.2, 4.0)
    with Ledger(path, epsilon=8.0, delta=1e-5) as opened:
        opened.charge([first])
        alone = opened.spent_epsilon("ann", 1e-5)
        assert alone == total(first).epsilon(1e-5), "the first run alone counts exactly"
        opened.charge([second])
        adaptive = opened.spent_epsilon("ann", 1e-5)
        fixed = total(first, second).epsilon(1e-5)
        apart = [total(run).epsilon(1e-5) for run in (first, second)]
        assert fixed < adaptive < sum(apart), "more than if all were fixed, less than the sum of both"
        assert opened.caveat("ann") == ""
        assert 0 < opened.left("ann") < 8
    with (
        Ledger(path, epsilon=1.001 * adaptive, delta=1e-5) as opened,
        pytest.raises(OverspentError, match=r"fixed before the first result was seen.*`sordino ledger fixed-plan`"),
    ):
        opened.charge([sampled("third", 0.05, 1.0)])
    assert main(["ledger", "show", str(path)]) == 0
    assert f"{adaptive:.4g}" in capsys.readouterr().out


def total(*charges):
    spent = Spent()
    for charge in charges:
        spent.add(charge)
    return spent


def test_a_person_may_state_that_all_runs_were_fixed_beforehand(tmp_path, capsys):
    path = tmp_path / "ledger.db"
    runs = [sampled("first", 0.05, 1.0), sampled("second", 0.2, 4.0)]
    with Ledger(path, epsilon=8.0, delta=1e-5) as opened, Ledger(path) as beside:
        for run in runs:
            opened.charge([run])
        most, roomy = opened.spent_epsilon("ann", 1e-5), opened.left("ann")
        assert main(["ledger", "fixed-plan", str(path), "--reason", " "]) == 2
        assert "say where the numbers of all runs were fixed" in capsys.readouterr().err
        assert main(["ledger", "fixed-plan", str(path), "--reason", "protocol of 3 March"]) == 0
        assert "ASSUMPTION" in capsys.readouterr().out
        for each in (opened, beside):  # another process that has the file open follows
            assert each.spent_epsilon("ann", 1e-5) == total(*runs).epsilon(1e-5) < most
            assert each.adaptive_epsilon("ann", 1e-5) == most
            assert "if the rates, noise and rounds of all runs were fixed" in each.caveat("ann")
            assert each.left("ann") > roomy
            assert each.people() == ["ann"]
    assert main(["ledger", "show", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(protocol of 3 March)" in shown
    assert f"However they were chosen, ε is at most {most:.4g}" in shown
    assert main(["ledger", "export", str(path)]) == 0
    assert "fixed plan: protocol of 3 March" in capsys.readouterr().out
    assert main(["ledger", "any-choice", str(path)]) == 2, "a statement cannot be taken back"
    assert problems(path) == []


def test_after_a_first_run_without_minibatches_they_count_as_if_unsampled(tmp_path):
    path, full, part = tmp_path / "ledger.db", entry(plan="a", std=10.0), sampled("b", 0.05, 1.0)
    with Ledger(path, epsilon=8.0, delta=1e-5) as opened:
        opened.charge([full])
        with pytest.raises(OverspentError, match=r"because the first run had none. `sordino ledger any-choice`"):
            opened.charge([part])
        exact = opened.spent_epsilon("ann", 1e-5)
        opened.allow_any_choice()
        assert opened.spent_epsilon("ann", 1e-5) == exact
        assert opened.caveat("ann") == "", "nothing with minibatches was released yet"
        opened.charge([part])
        assert exact < opened.spent_epsilon("ann", 1e-5) < exact + total(part).epsilon(1e-5)
        assert "at a delta that is larger by 6.25%" in opened.caveat("ann")
    assert problems(path) == []


def test_any_choice_said_before_the_first_run_costs_a_part_of_delta(tmp_path, capsys):
    path, full, part = tmp_path / "new.db", entry(plan="a", std=10.0), sampled("b", 0.05, 1.0)
    assert main(["ledger", "any-choice", str(path)]) == 0
    assert "new ledger" in capsys.readouterr().out
    with Ledger(path, epsilon=8.0, delta=1e-5) as opened:
        opened.charge([full])
        assert opened.spent_epsilon("ann", 1e-5) == pytest.approx(total(full).epsilon(1e-5), rel=1e-12)
        opened.charge([part])
        assert opened.caveat("ann") == ""
        mixed = opened.spent_epsilon("ann", 1e-5)
    with Ledger(tmp_path / "late.db", epsilon=8.0, delta=1e-5) as late:
        late.charge([full])
        late.allow_any_choice()
        late.charge([part])
        assert late.spent_epsilon("ann", 1e-5) < mixed


def test_any_choice_said_beforehand_is_refused_where_a_limit_would_hold_at_a_larger_delta(tmp_path):
    full, part = entry(plan="a", std=10.0), sampled("b", 0.05, 1.0)
    for name, first, late in (("none", [], False), ("part", [part], False), ("full", [full], True)):
        with Ledger(tmp_path / f"{name}.db", epsilon=8.0, delta=1e-5) as opened:
            for each in first:
                opened.charge([each])
            if late:
                with pytest.raises(SordinoError, match="too late to say it beforehand"):
                    opened.allow_any_choice(beforehand=True)
                assert opened.statements() == []
                continue
            opened.allow_any_choice(beforehand=True)
            for each in (full._replace(plan="c"), part._replace(plan="d")):
                opened.charge([each])
            assert opened.caveat("ann") == ""


def test_a_file_in_which_any_choice_was_said_before_counts_on(tmp_path):
    """Files of earlier versions have a table for it, and no row."""
    for name, before in (("early", True), ("late", False)):
        with Ledger(tmp_path / f"{name}.db", epsilon=8.0, delta=1e-5) as opened:
            if not before:
                opened.charge([entry(plan="a", std=10.0)])
            opened._ask("CREATE TABLE any_choice (time TEXT NOT NULL)")
            opened._ask("INSERT INTO any_choice VALUES (?)", ledger._now())
            if before:
                opened.charge([entry(plan="a", std=10.0)])
            opened.charge([sampled("b", 0.05, 1.0)])
        with Ledger(tmp_path / f"{name}.db", read_only=True) as opened:
            assert opened.choice("ann") == ("mixed" if before else "late")
            assert [kind for _, kind, _ in opened.statements()] == ["any choice"]


# ------------------------------------------------------------------------------------------------------ reservations


def rounds_of(plan, count, **numbers):
    whole = sampled(plan, 0.05, 1.0, times=1)._replace(**numbers)
    return [whole._replace(round=t) for t in range(count)]


def test_a_reserved_run_counts_as_a_whole_and_its_rounds_use_it_up(tmp_path, capsys):
    path, rounds = tmp_path / "ledger.db", rounds_of("run", 10)
    with Ledger(path, epsilon=8.0, delta=1e-5) as opened:
        assert opened.reserve(rounds)
        whole = opened.spent_epsilon("ann", 1e-5)
        assert whole == total(*rounds).epsilon(1e-5)
        for each in rounds[:4]:
            opened.charge([each], b"noised")
        assert not opened.reserve(rounds), "a resumed run uses its own reservation"
        assert opened.spent_epsilon("ann", 1e-5) == whole, "an early stop gives nothing back"
        later = rounds_of("next", 5)
        opened.reserve(later)
        for each in later:
            opened.charge([each])
        assert opened.caveat("ann") == ""
        assert opened.spent_epsilon("ann", 1e-5) > whole
        with pytest.raises(OverspentError, match="more than it reserved at its start"):
            opened.charge([later[0]._replace(round=5)])
        with pytest.raises(OverspentError, match="more than it reserved at its start"):
            opened.charge([rounds[4]._replace(std=0.9)])
        opened.charge([rounds[4]._replace(std=1.0 + 1e-15)])  # rounding of another library
    assert main(["ledger", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "5 of 10 reserved" in shown
    assert "5 of 5 reserved" in shown
    assert problems(path) == []


def test_only_runs_with_minibatches_are_reserved(tmp_path):
    with Ledger(tmp_path / "ledger.db", epsilon=8.0, delta=1e-5) as opened:
        assert not opened.reserve([entry(round=t) for t in range(3)])
        assert len(opened) == 0


def test_a_run_that_is_not_reserved_says_that_it_must_not_be_stopped(tmp_path):
    """As in files of earlier versions, or where a program charges round by round."""
    with Ledger(tmp_path / "ledger.db", epsilon=8.0, delta=1e-5) as opened:
        for each in rounds_of("run", 4):
            opened.charge([each])
        assert opened.caveat("ann") == "", "nothing was chosen after it"
        assert not opened.reserve(rounds_of("run", 8)), "its first rounds would count twice"
        opened.charge([sampled("next", 0.05, 1.0)])
        assert "if no run with minibatches was stopped" in opened.caveat("ann")


def test_a_whole_run_that_does_not_fit_is_not_begun(tmp_path):
    rounds = rounds_of("run", 10)
    limit = total(*rounds[:9]).epsilon(1e-5)
    with Ledger(tmp_path / "ledger.db", epsilon=limit, delta=1e-5) as opened:
        with pytest.raises(OverspentError, match="the limit is"):
            opened.reserve(rounds)
        assert len(opened) == 0


def test_runs_without_samples_are_counted_as_before(tmp_path):
    with Ledger(tmp_path / "ledger.db", epsilon=8.0, delta=1e-5) as opened:
        opened.charge([entry(plan="a")])
        opened.charge([entry(plan="b", std=20.0)])
        assert opened.caveat("ann") == ""
        exact = gaussian.epsilon(math.hypot(2 / 50, 2 / 20), 1e-5)
        assert opened.spent_epsilon("ann", 1e-5) == pytest.approx(exact, rel=1e-12)


def test_each_minibatch_of_all_runs_may_overflow(tmp_path):
    """The share of delta that a run reserves is one of its own delta, which the ledger does not know."""
    few, many = Spent(), Spent()
    few.add(sampled("a", 1e-4, 50.0, 10))
    many.add(sampled("a", 1e-4, 50.0, 10**6))
    assert few.epsilon(1e-9) < math.inf
    assert many._under("add-remove", 1e-12) == math.inf, "2^-56 per minibatch is more than delta"


def test_concentrated_dp_after_gaussian_noise_counts_only_where_it_is_proved(monkeypatch):
    """Rows of integers are functions of Gaussian noise, and another law is not: it must be there from the start."""

    class Other(events.NoiseEvent):
        name = "other-concentrated"

    monkeypatch.setitem(events.EVENTS, Other.name, Other)

    def charged(*laws, choice=Choice.ANY):
        spent = SpentByRuns(choice)
        for number, law in enumerate(laws):
            spent.add(Charge("ann", 0, "g", 1.0, 10.0, 5, f"run {number}", 1.0, law))
        return spent

    rows = charged("", "discrete-gaussian", "")
    assert rows.epsilon(1e-5) == pytest.approx(concentrated.epsilon(15 / 100 / 2, 1e-5, 5))
    assert rows.epsilon(1e-5) > gaussian.epsilon(math.sqrt(rows.gaussian_square), 1e-5)
    for laws in (("", "other-concentrated"), ("", "discrete-gaussian", "other-concentrated")):
        assert charged(*laws).epsilon(1e-5) == math.inf
        assert charged(*laws).copy().exceeds(1.0, 8.0, 1e-5)
        assert charged(*laws, choice=Choice.FIXED).epsilon(1e-5) < math.inf
    for laws in (("other-concentrated", ""), ("discrete-gaussian", "other-concentrated")):
        may_fail = 5 * laws.count("discrete-gaussian")
        assert charged(*laws).epsilon(1e-5) == pytest.approx(concentrated.epsilon(10 / 100 / 2, 1e-5, may_fail))


def test_a_lease_passes_to_who_knows_its_token_and_has_its_rounds(tmp_path):
    path = tmp_path / "ledger.db"
    with Ledger(path) as first, Ledger(path) as second:
        assert first.lease("p") is None
        assert first.pass_lease("p", [], Lease("a", 0))
        assert first.pass_lease("p", ["a"], Lease("a", 4), durable=False)
        assert not second.pass_lease("p", ["a"], Lease("b", 3)), "fewer rounds"
        assert not second.pass_lease("p", ["b"], Lease("b", 4)), "another token"
        assert second.pass_lease("p", ["b", "a"], Lease("b", 4))
        assert not first.pass_lease("p", ["a"], Lease("a", 5)), "it was taken"
        assert first.lease("p") == Lease("b", 4)
        assert first.lease("another") is None
        assert first._ask("PRAGMA synchronous") == [(2,)], "charges still wait for the disk"
        assert (len(first), first.audit()) == (0, [])
