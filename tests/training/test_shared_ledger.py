"""One ledger over several runs on the same data."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from sordino.cli import main
from sordino.core import Adjacency, Privacy
from sordino.data.identity import arrays_digest
from sordino.errors import LedgerError, OverspentError, SordinoError
from sordino.evidence.ledger import Charge, Ledger
from sordino.methods import build
from sordino.privacy import spending
from sordino.privacy.accounting import events, gaussian
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from sordino.studies import sweep
from sordino.training import run, shared_ledger
from sordino.training.spec import Spec

DELTA = 1e-5


@pytest.fixture
def data(tmp_path):
    """Two files of records."""
    rng, paths = np.random.default_rng(0), []
    for name in ("a", "b"):
        x = rng.normal(size=(80, 2))
        paths.append(str(tmp_path / f"{name}.npz"))
        np.savez(paths[-1], x=x, y=(x[:, 0] > 0).astype(int))
    return paths


def train(data, out, *words, epsilon=2.0, limit=3.2):
    book = ["--ledger", str(out.parent / "mine.db"), *(["--limit", str(limit)] if limit else [])]
    spec = ["--data", data, "--method", "dp-fedgd", "--rounds", "3", "--clients", "2", "--epsilon", str(epsilon)]
    return main(["run", *spec, *book, *words, "--out", str(out), "--json", str(out.with_suffix(".json"))])


def shown(tmp_path):
    assert main(["ledger", "show", str(tmp_path / "mine.db"), "--json", str(tmp_path / "shown.json")]) == 0
    return json.loads((tmp_path / "shown.json").read_text())


def test_two_runs_fit_and_a_third_is_refused(data, tmp_path, capsys):
    """The total is that of the exact account: below the sum of 4."""
    assert train(data[0], tmp_path / "one") == 0
    assert train(data[0], tmp_path / "two", "--set", "lr=0.5") == 0
    (account,) = shown(tmp_path)["accounts"]
    exact = gaussian.epsilon(2**0.5 * gaussian.mu(2.0, DELTA), DELTA)
    assert account["epsilon"] == pytest.approx(exact, rel=1e-6)
    assert exact < 3.2 < 4
    assert account["runs"] == 2
    before = (tmp_path / "mine.db").read_bytes()
    assert train(data[0], tmp_path / "three") == 2
    refusal = capsys.readouterr().err
    assert "this would bring epsilon to 3.72" in refusal
    assert "the limit is 3.2. Nothing was charged." in refusal
    assert not (tmp_path / "three").exists(), "refused before anything was made"
    assert (tmp_path / "mine.db").read_bytes() == before
    left = float(refusal.partition("a run of ε = ")[2].split()[0])
    assert left == int(account["left"] * 100) / 100
    assert train(data[0], tmp_path / "four", epsilon=left) == 0, "what is said to be left is left"
    assert shown(tmp_path)["accounts"][0]["epsilon"] <= 3.2


def test_other_data_are_not_counted_and_the_same_are_under_any_name(data, tmp_path):
    assert train(data[0], tmp_path / "one") == 0
    assert train(data[1], tmp_path / "two") == 0
    accounts = shown(tmp_path)["accounts"]
    assert [a["runs"] for a in accounts] == [1, 1]
    assert all(a["epsilon"] == pytest.approx(2) for a in accounts)
    shutil.copy(data[0], tmp_path / "copy.npz")
    assert train(str(tmp_path / "copy.npz"), tmp_path / "three", "--clients", "4") == 0
    assert sorted(a["runs"] for a in shown(tmp_path)["accounts"]) == [1, 2]


READINGS = {  # of one file: what a schema says of it, and the column of decimals
    "whole": ('[file]\ndecimal = ","\nencoding = "latin-1"\n', 'type = "number"\nrange = [0, 10]\n'),
    "no dialect": ("", 'type = "drop"\n'),
    "encoding": ('[file]\nencoding = "iso8859-5"\n', 'type = "drop"\n'),
    "delimiter": ('[file]\ndelimiter = ";"\n', 'type = "drop"\n'),
}


def test_a_file_has_one_account_however_schemas_read_it(tmp_path, capsys):
    rows = [f"{20 + k % 60};{k % 9},5;{'Köln' if k % 2 else 'Bonn'};{'yes' if k % 3 else 'no'}" for k in range(80)]
    (tmp_path / "t.csv").write_bytes("\n".join(["age;crp;town;died", *rows]).encode("latin-1"))
    for name, (dialect, decimals) in READINGS.items():
        (tmp_path / f"{name}.toml").write_text(
            f'{dialect}[target]\ncolumn = "died"\nlevels = ["no", "yes"]\n[columns.age]\ntype = "number"\n'
            f'range = [18, 100]\n[columns.crp]\n{decimals}[columns.town]\ntype = "drop"\n'
        )
        words = "--schema", str(tmp_path / f"{name}.toml"), "--set", "clients=1"
        status = train(str(tmp_path / "t.csv"), tmp_path / name, *words, limit=2)
        assert status == (0 if name == "whole" else 2), name
    assert capsys.readouterr().err.count("the limit is 2. Nothing was charged.") == len(READINGS) - 1
    assert len(shown(tmp_path)["accounts"]) == 1


@pytest.mark.parametrize("other", ["split_seed=1", "test_fraction=0.3"])
def test_runs_that_hold_out_other_records_are_refused(data, tmp_path, capsys, other):
    """No noise hides test records: if each run had others, most records would be exposed, whatever the ledger says."""
    assert train(data[0], tmp_path / "one", limit=None) == 0
    assert train(data[0], tmp_path / "two", "--set", other, limit=None) == 2
    assert "held out other records of these data for testing" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()
    assert train(data[1], tmp_path / "three", "--set", other, limit=None) == 0, "other data"
    assert train(data[0], tmp_path / "four", "--clients", "4", limit=None) == 0
    assert sorted(a["runs"] for a in shown(tmp_path)["accounts"]) == [1, 2]


def test_a_killed_run_remembers_what_it_held_out(data, tmp_path):
    out, book = tmp_path / "run", tmp_path / "mine.db"
    spec = Spec.of({"data": data[0], "method": "dp-fedgd", "rounds": 2, "clients": 2})
    prepared = run.prepare(spec)
    run.start(prepared, out, run.join_ledger(prepared, book))  # a kill here leaves it without a charge
    again = run.prepare(run.reopen(out))
    assert len(list(run.rounds(again, out))) == 2
    other = run.prepare(dataclasses.replace(spec, split_seed=1))
    with pytest.raises(SordinoError, match=r"^test_fraction, split_seed: "):
        run.join_ledger(other, book)


def test_fits_and_paid_searches_test_on_nothing(data, tmp_path):
    """They publish no score on records of the data, so they add up with any run."""
    assert train(data[0], tmp_path / "one", "--set", "split_seed=1", limit=None) == 0
    keys = {"data": data[0], "method": "dp-fedgd", "rounds": 2, "clients": 2, "epsilon": 1.0}
    assert sweep.paid(keys, {"lr": (0.5, 1.0)}, "count", ledger=tmp_path / "mine.db")["certificate"]["certified"]
    with np.load(data[0]) as arrays:
        plan = run.prepare(Spec.of(keys)).plan
        joined = shared_ledger.join(plan, tmp_path / "mine.db", data=arrays_digest(arrays["x"], arrays["y"]))
    assert joined.tested == ""


def test_the_account_does_not_tell_the_data(data, tmp_path):
    """Two ledgers with different keys name the same data differently; no plain hash of the file is in them."""
    names = set()
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        assert train(data[0], tmp_path / folder / "run") == 0
        with Ledger(tmp_path / folder / "mine.db") as ledger:
            names.update(ledger.people())
        key = tmp_path / folder / "mine.db.key"
        assert key.stat().st_mode & 0o777 == 0o600
        plain = hashlib.sha256(Path(data[0]).read_bytes()).hexdigest()
        for path in (tmp_path / folder).rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert plain[:16].encode() not in content
            assert bytes.fromhex(plain)[:8] not in content
            assert path == key or key.read_bytes() not in content
    assert len(names) == 2


def test_a_killed_run_is_charged_once(data, tmp_path):
    out = tmp_path / "run"
    spec = Spec.of({"data": data[0], "method": "dp-fedgd", "rounds": 4, "clients": 2, "epsilon": 2.0})
    prepared = run.prepare(spec)
    run.start(prepared, out, run.join_ledger(prepared, tmp_path / "mine.db", 3.2))
    stream = run.rounds(prepared, out)
    next(stream)
    stream.close()  # as a kill does
    first = shown(tmp_path)
    assert main(["run", "--resume", str(out), "--json", str(tmp_path / "o.json")]) == 0
    assert main(["run", "--resume", str(out), "--json", str(tmp_path / "o.json")]) == 0
    again = shown(tmp_path)
    assert (first["rows"], first["head"]) == (again["rows"], again["head"])
    assert again["accounts"][0]["epsilon"] == pytest.approx(2)


def test_a_kill_between_both_charges_is_charged_once(data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    prepared = run.prepare(Spec.of({"data": data[0], "method": "dp-fedgd", "rounds": 2, "clients": 2}))
    run.start(prepared, out, run.join_ledger(prepared, tmp_path / "mine.db"))
    pay = run.pay

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "pay", killed)
    with pytest.raises(KeyboardInterrupt):
        list(run.rounds(prepared, out))
    monkeypatch.setattr(run, "pay", pay)
    rows = shown(tmp_path)["rows"]
    assert rows == 1
    assert len(list(run.rounds(prepared, out))) == 2
    assert shown(tmp_path)["rows"] == rows


def test_a_run_whose_ledger_was_exchanged_is_refused(data, tmp_path):
    out = tmp_path / "run"
    prepared = run.prepare(Spec.of({"data": data[0], "method": "dp-fedgd", "rounds": 3, "clients": 2}))
    run.start(prepared, out, run.join_ledger(prepared, tmp_path / "mine.db"))
    stream = run.rounds(prepared, out)
    next(stream)
    stream.close()
    (tmp_path / "mine.db").rename(tmp_path / "old.db")
    with pytest.raises(SordinoError, match="is missing; put it back"):
        list(run.rounds(prepared, out))
    Ledger(tmp_path / "mine.db").close()
    with pytest.raises(SordinoError, match="does not hold the charge of this run"):
        list(run.rounds(prepared, out))


def test_the_limit_is_kept_and_only_tightened(data, tmp_path, capsys):
    assert train(data[0], tmp_path / "one", limit=3.2) == 0
    assert train(data[0], tmp_path / "two", limit=5) == 2
    assert "Limits can only be tightened" in capsys.readouterr().err
    assert train(data[0], tmp_path / "three", "--delta", "1e-6", limit=3) == 0, "at the delta of the first limit"
    assert shown(tmp_path)["limits"] == [{"epsilon": 3.2, "delta": DELTA}, {"epsilon": 3.0, "delta": DELTA}]
    assert train(data[0], tmp_path / "four", limit=None) == 2, "the stored limit holds without a flag"


def test_a_refused_run_leaves_no_limit_behind(data, tmp_path, capsys):
    """A stored limit cannot be loosened, so a mistaken one must not stay."""
    assert train(data[0], tmp_path / "one", limit=1) == 2
    assert (
        "the limit is 1. Nothing was charged. Without sampling, a run of ε = 1 still fits." in capsys.readouterr().err
    )
    with Ledger(tmp_path / "mine.db") as ledger:
        assert (ledger.limits(), len(ledger)) == ([], 0)
    assert train(data[0], tmp_path / "one", limit=3.2) == 0
    assert train(data[0], tmp_path / "two", limit=2.5) == 2
    assert shown(tmp_path)["limits"] == [{"epsilon": 3.2, "delta": DELTA}]


def test_unlike_runs_with_minibatches_cost_less_than_their_sum(data, tmp_path, capsys):
    assert train(data[0], tmp_path / "one", "--batch", "poisson:8", limit=None) == 0
    (alone,) = shown(tmp_path)["accounts"]
    assert alone["epsilon"] == pytest.approx(2, rel=2e-3)
    assert train(data[0], tmp_path / "two", "--batch", "poisson:16", "--rounds", "6", limit=None) == 0
    (both,) = shown(tmp_path)["accounts"]
    assert 2.2 < both["epsilon"] < 3.9
    assert both["assumes"] == ""
    capsys.readouterr()
    assert train(data[0], tmp_path / "three", "--batch", "poisson:8", limit=1.01 * both["epsilon"]) == 2
    assert "`sordino ledger fixed-plan`" in capsys.readouterr().err
    reason = ["--reason", "three runs, written down before the first"]
    assert main(["ledger", "fixed-plan", str(tmp_path / "mine.db"), *reason]) == 0
    (fixed,) = shown(tmp_path)["accounts"]
    assert fixed["epsilon"] < both["epsilon"] == fixed["epsilon_any_choice"]
    assert "were fixed before the first result" in fixed["assumes"]
    capsys.readouterr()
    assert train(data[0], tmp_path / "four", "--batch", "poisson:8", epsilon=0.5, limit=None) == 0
    assert "were fixed before the first result" in " ".join(capsys.readouterr().out.split())


def test_minibatches_after_a_run_without_them(data, tmp_path, capsys):
    """They count as if unsampled, unless `any-choice` was said; what a refusal says is left is left."""
    assert train(data[0], tmp_path / "one", limit=4) == 0
    assert train(data[0], tmp_path / "two", "--batch", "poisson:8", epsilon=1.5, limit=None) == 2
    refusal = capsys.readouterr().err
    assert "because the first run had none. `sordino ledger any-choice`" in refusal
    assert main(["ledger", "any-choice", str(tmp_path / "mine.db")]) == 0
    assert train(data[0], tmp_path / "two", "--batch", "poisson:8", epsilon=1.5, limit=None) == 0
    (account,) = shown(tmp_path)["accounts"]
    assert 2 < account["epsilon"] < 3.5
    assert "larger by 6.25%" in account["assumes"]
    capsys.readouterr()
    assert train(data[0], tmp_path / "three", epsilon=3.9, limit=None) == 2
    left = float(capsys.readouterr().err.partition("a run of ε = ")[2].split()[0])
    assert train(data[0], tmp_path / "three", epsilon=left, limit=None) == 0
    assert shown(tmp_path)["accounts"][0]["epsilon"] <= 4 * (1 + 1e-9)


def test_any_choice_said_before_the_first_run(data, tmp_path):
    """The shares of `sordino budget` fit also there, and so does one run for the whole limit."""
    for folder, shares in (("x", "1"), ("y", "3,1")):
        (tmp_path / folder).mkdir()
        book, out = tmp_path / folder / "mine.db", tmp_path / folder / "plan.json"
        assert main(["ledger", "any-choice", str(book)]) == 0
        plan = ["budget", "--ledger", str(book), "--limit", "4", "--shares", shares, "--json", str(out)]
        assert main(plan) == 0
        runs = json.loads(out.read_text())["runs"]
        for number, planned in enumerate(runs):
            assert train(data[0], tmp_path / folder / str(number), epsilon=planned["epsilon"], limit=4) == 0
        (account,) = shown(tmp_path / folder)["accounts"]
        assert 3.9 < account["epsilon"] <= 4 * (1 + 1e-9)
        assert account["assumes"] == ""


def test_a_stopped_run_with_minibatches_costs_as_much_as_the_whole(data, tmp_path):
    out = tmp_path / "run"
    spec = {"data": data[0], "method": "dp-fedgd", "rounds": 4, "clients": 2, "epsilon": 2.0, "batch": "poisson:8"}
    prepared = run.prepare(Spec.of(spec))
    run.start(prepared, out, run.join_ledger(prepared, tmp_path / "mine.db"))
    stream = run.rounds(prepared, out)
    next(stream)
    stream.close()
    (stopped,) = shown(tmp_path)["accounts"]
    assert stopped["epsilon"] == pytest.approx(2, rel=2e-3)
    assert train(data[0], tmp_path / "next", "--batch", "poisson:16", limit=None) == 0
    assert shown(tmp_path)["accounts"][0]["assumes"] == ""


def test_without_a_limit_runs_are_added_up(data, tmp_path, capsys):
    for name in ("one", "two", "three"):
        assert train(data[0], tmp_path / name, limit=None) == 0
    (account,) = shown(tmp_path)["accounts"]
    assert (account["runs"], account["left"]) == (3, None)
    printed = re.findall(r"this run: ([0-9a-f]{16})\)", capsys.readouterr().out)
    assert main(["ledger", "show", str(tmp_path / "mine.db")]) == 0
    told = capsys.readouterr().out
    assert f"{account['epsilon']:.4g}" in told
    assert len(set(printed)) == 3
    for name, folder in zip(printed, ("one", "two", "three"), strict=True):
        assert name in told, "a run is known by the name that the ledger shows"
        assert f"In ledgers the name of this run is {name}" in (tmp_path / folder / "README.txt").read_text()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--seed", "1"], "the run is not certified (seeded"),
        (["--epsilon", "inf"], "the run is not certified"),
        (["--limit", "0"], "limit: 0.0 must be a number above 0"),
        (["--limit", "much"], "--limit: 'much' must be a number above 0"),
        (["--limit", "1"], "this would bring epsilon to 2 at delta 1e-05; the limit is 1"),
        (["--ledger", "."], "is a folder; name a file"),
        (["--ledger", "nowhere/mine.db"], "No such file or directory"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_made(data, tmp_path, words, why, capsys):
    assert train(data[0], tmp_path / "run", *words, limit=None) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_limit_needs_a_ledger(data, tmp_path, capsys):
    assert main(["run", "--data", data[0], "--limit", "4", "--out", str(tmp_path / "run")]) == 2
    assert "name one with --ledger" in capsys.readouterr().err
    assert train(data[0], tmp_path / "run") == 0
    assert main(["run", "--resume", str(tmp_path / "run"), "--ledger", "other.db"]) == 2
    assert "a resumed run keeps its ledger" in capsys.readouterr().err


def test_units_and_adjacencies_do_not_add_up(data, tmp_path, capsys):
    assert train(data[0], tmp_path / "one") == 0
    assert train(data[0], tmp_path / "two", "--unit", "client", "--set", "public_data=true") == 2
    assert "counts these data at record level" in capsys.readouterr().err
    assert train(data[0], tmp_path / "three", "--adjacency", "add-remove") == 2
    assert "under replace-one, which do not add up" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["person", "client"])
def test_other_persons_and_clients_of_the_same_data_do_not_add_up(tmp_path, unit, capsys):
    """A patient has four visits: what runs spend that protect visits is not what they spend of a patient."""
    rng, table = np.random.default_rng(0), tmp_path / "t.csv"
    rows = [f"{x!r},{int(x > 0)},p{k // 8},v{k // 4}" for k, x in enumerate(rng.normal(size=240).tolist())]
    table.write_text("\n".join(["x,label,patient,visit", *rows, ""]))

    def run_by(column, out):
        other = {"patient": "visit", "visit": "patient"}[column]
        kept = tmp_path / f"{column}.toml"
        kept.write_text(
            f'{"person" if unit == "person" else "client"} = "{column}"\n[target]\ncolumn = "label"\n'
            f'levels = ["0", "1"]\n[columns.x]\ntype = "number"\nrange = [-3, 3]\n[columns.{other}]\ntype = "drop"\n'
        )
        book = ["--ledger", str(tmp_path / "mine.db"), "--limit", "3"]
        clients = [] if unit == "client" else ["--clients", "2"]
        spec = ["--data", str(table), "--schema", str(kept), "--unit", unit, "--method", "dp-fedgd", "--rounds", "2"]
        return main(["run", *spec, *clients, "--epsilon", "1", *book, "--out", str(tmp_path / out)])

    assert run_by("patient", "one") == 0
    assert run_by("visit", "two") == 2
    assert f"counts other {unit}s of these data" in capsys.readouterr().err
    assert run_by("patient", "three") == 0
    (account,) = shown(tmp_path)["accounts"]
    assert account["runs"] == 2


def test_groups_that_are_given_as_numbers_are_told_apart(tmp_path):
    plan = Plan(build("dp-fedgd", unit="person"), 2, (10, 10), Privacy(1.0, unit="person"))
    data = hashlib.sha256(b"x").digest()
    whom = shared_ledger.grouping(np.array([0, 0, 1]))
    assert whom == shared_ledger.grouping(np.array([0, 0, 1], np.int32)) != shared_ledger.grouping(np.array([0, 1, 2]))
    before = shared_ledger.join(plan, tmp_path / "old.db", data=data)  # a ledger of before does not say whom
    before.charge("a run")
    assert shared_ledger.join(plan, tmp_path / "old.db", data=data, units=whom).who == before.who
    now = shared_ledger.join(plan, tmp_path / "new.db", data=data, units=whom)
    now.charge("a run")
    assert shared_ledger.join(plan, tmp_path / "new.db", data=data, units=whom).who == now.who
    for other in (b"visit", shared_ledger.grouping(np.array([0, 1, 2]))):
        with pytest.raises(SordinoError, match="counts other persons of these data"):
            shared_ledger.join(plan, tmp_path / "new.db", data=data, units=other)


def test_the_key_is_needed(data, tmp_path, capsys):
    assert train(data[0], tmp_path / "one") == 0
    key = tmp_path / "mine.db.key"
    os.chmod(key, 0o644)
    assert train(data[0], tmp_path / "two") == 2
    assert "chmod 600" in capsys.readouterr().err
    key.unlink()
    assert train(data[0], tmp_path / "two") == 2
    assert "nobody can tell which data were counted" in capsys.readouterr().err
    key.write_bytes(b"short")
    os.chmod(key, 0o600)
    assert train(data[0], tmp_path / "two") == 2
    assert "has 5 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "facts", "exact"),
    [
        ((40, 60, 400), {}, True),
        ((40, 60, 400), {"participation": Participation.parse("cyclic:2")}, True),
        ((50, 50, 50), {"sampling": Sampling.parse("poisson:20")}, True),
        ((40, 60, 400), {"sampling": Sampling.parse("poisson:20")}, False),
    ],
)
def test_the_charge_bounds_every_client(sizes, facts, exact):
    """At every delta; and it is exact where one client's account is the largest in every respect."""
    plan = Plan(build("dp-fedgd"), 5, sizes, Privacy(epsilon=2.0), **facts)
    worst = shared_ledger.worst_case(plan)
    for delta in (1e-3, 1e-5, 1e-8):
        charged = events.epsilon(worst, delta, plan.privacy.adjacency)
        for group in spending.groups(plan):
            assert charged >= spending.epsilon_of(plan, group, delta) * (1 - 1e-9)
    if exact:
        assert events.epsilon(worst, DELTA, plan.privacy.adjacency) == pytest.approx(spending.epsilon(plan), rel=1e-3)


def test_runs_with_the_same_secret_cohorts_do_not_add_up(tmp_path):
    """Ten such runs are ten times as many releases to the same cohorts, which sampling then hides once. A mutant that
    does not tell schedules apart adds up 7.1 where 16.5 is true."""
    privacy = Privacy(epsilon=2.0, unit="client", trust="trusted-server")
    method = build("dp-fedgd", unit="client")

    def plan(seed, rate="0.1"):
        drawn = Participation.parse(f"poisson:{rate}")
        return Plan(method, 10, (20,) * 100, privacy, drawn, schedule_seed=seed)

    def joined(plan, name="l.db"):
        return shared_ledger.join(plan, tmp_path / name, data=b"records")

    one, other = 2**125 + 1, 2**125 + 2
    joined(plan(one)).charge("first")
    joined(plan(other)).charge("second")
    stored = shared_ledger.store(joined(plan(other + 1)))
    for again in (plan(one), plan(one, "0.2")):
        with pytest.raises(SordinoError, match="had the same secret cohorts"):
            joined(again)
    shared_ledger.reopen(stored, plan(one)).charge("first")  # a resumed run was charged
    with pytest.raises(SordinoError, match="schedule_seed"):
        shared_ledger.reopen(stored, plan(one)).charge("third")
    public = Plan(build("dp-fedgd"), 10, (20,) * 100, Privacy(epsilon=2.0), Participation.parse("poisson:0.1"))
    for name in ("first", "second"):  # what is paid for is then the number of rounds of each client
        joined(public, "other.db").charge(name)

    mutant = joined(plan(other + 1), "mutant.db")._replace(schedule="")
    for run_number in range(10):
        mutant.charge(f"run {run_number}")
    (release,) = mutant.releases
    joint = release._replace(std=release.std / 10**0.5)
    true = events.epsilon((joint,), DELTA, privacy.adjacency)
    assert mutant.summary()["epsilon"] < 7.5 < 16 < true


def test_what_is_left_with_sampled_releases(tmp_path):
    with Ledger(tmp_path / "l.db", epsilon=2.0, delta=DELTA, adjacency=Adjacency.ADD_REMOVE) as ledger:
        assert ledger.left("me") == pytest.approx(2)
        ledger.charge([Charge("me", 0, "q", 1.0, 1.0, 10, "p", 0.01, "poisson add-remove")])
        left = ledger.left("me")
        assert 0 < left < 2
        mu = gaussian.mu(left, DELTA)
        ledger.charge([Charge("me", 0, "q", mu, 1.0, 1, "fits")])
        with pytest.raises(OverspentError):
            ledger.charge([Charge("me", 0, "q", 0.2, 1.0, 1, "too much")])
        assert ledger.left("somebody else") == pytest.approx(2)
        with pytest.raises(LedgerError):
            Ledger(tmp_path / "l.db", epsilon=3.0, delta=DELTA)
