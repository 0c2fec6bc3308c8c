import argparse
import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sordino import checks
from sordino.cli import COMMANDS, _parser, main
from sordino.cli.show import terminable
from sordino.evidence.ledger import Charge, Ledger
from sordino.federation.sentences import of_coordinator
from sordino.methods import REGISTRY
from tests.support import tiers


def call(capsys, *words):
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 526.21372), (1, 279.17491), (5, 66.74131), (10, 37.408239)])
def test_privacy_goes_both_ways(capsys, epsilon, sigma):
    flags = ["--rounds", "70", "--clients", "20", "--records", "2500", "--clip", "10", "--json"]
    status, out, err = call(capsys, "privacy", "--epsilon", str(epsilon), *flags)
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["noise"] == pytest.approx(sigma, rel=1e-7)
    assert found["client_noise"] == pytest.approx(sigma / 20**0.5, rel=1e-7)
    assert found["aggregate_std"] == pytest.approx(10 * sigma / (20 * 2500), rel=1e-7)
    _, out, _ = call(capsys, "privacy", "--noise", str(found["noise"]), *flags)
    assert json.loads(out)["epsilon"] == pytest.approx(epsilon, rel=1e-9)
    assert json.loads(out)["mu"] == pytest.approx(found["mu"], rel=1e-9)


def test_budget_shares_what_a_ledger_has_left(capsys, tmp_path):
    path = tmp_path / "ledger.db"
    with Ledger(path, epsilon=8.0, delta=1e-6) as ledger:
        ledger.charge([Charge("patients", 0, "gradient", 1.0, 1.0, 1, "first")])
        left = ledger.left("patients")
    _, out, _ = call(capsys, "budget", "--ledger", str(path), "--runs", "1", "--json")
    found = json.loads(out)
    assert found["runs"][0]["epsilon"] == pytest.approx(left, rel=1e-9)
    assert (found["account"], found["limit"], found["delta"]) == ("patients", pytest.approx(8.0), 1e-6)
    status, out, _ = call(capsys, "budget", "--limit", "8", "--shares", "3,1,1")
    assert status == 0
    assert "60.0%  5.8971" in out
    status, _, err = call(capsys, "budget", "--ledger", str(path), "--runs", "2", "--account", "others")
    assert status == 2
    assert "--account: 'others' is not in the ledger" in err


def test_privacy_in_words_and_without_records(capsys):
    status, out, _ = call(capsys, "privacy", "--epsilon", "1", "--trust", "secure-aggregation", "--unit", "client")
    assert status == 0
    assert "only sums of messages" in out
    assert "one whole client is replaced" in out
    _, out, _ = call(capsys, "privacy", "--epsilon", "1", "--json")
    assert json.loads(out)["aggregate_std"] is None


def test_methods_lists_what_is_certified(capsys):
    _, out, _ = call(capsys, "methods", "--json", "-")
    rows = json.loads(out)
    assert [row["name"] for row in rows] == list(REGISTRY)
    for row in rows:
        assert {"name", "family", "paper", "units", "certified", "releases_per_round"} <= row.keys()
        assert set(row["certified"]) == set(row["units"])
    _, out, _ = call(capsys, "methods")
    assert all(name in out for name in REGISTRY)


def test_run_prints_one_json_document_and_progress_elsewhere(capsys, tmp_path):
    out = tmp_path / "run"
    status, text, err = call(capsys, "run", "--rounds", "6", "--seed", "1", "--out", str(out), "--json")
    found = json.loads(text)
    assert status == 0
    assert "auto" in err
    assert list(found["accuracy"]) == ["1", "2", "3", "4", "5", "6"]
    assert found["epsilon"] == pytest.approx(8)
    assert found["certified"] is False
    assert {"delta", "noise", "client_noise", "seconds"} <= found.keys()
    status, text, _ = call(capsys, "verify", str(out / "public" / "certificate.json"))
    assert status == 1, "a seeded run promises nothing"
    assert "NOT CERTIFIED" in text
    assert "claims        not certified" in text
    status, text, _ = call(capsys, "verify", str(out), "--json")
    assert (status, json.loads(text)["ok"], json.loads(text)["consistent"]) == (1, False, True)
    certificate = json.loads((out / "public" / "certificate.json").read_text())
    (out / "public" / "certificate.json").write_text(json.dumps({**certificate, "epsilon": 1.0}))
    status, text, _ = call(capsys, "verify", str(out / "public" / "certificate.json"), "--json")
    assert status == 1
    assert json.loads(text)["problems"]


def test_run_reads_a_spec_and_flags_override_it(capsys, tmp_path):
    (tmp_path / "spec.toml").write_text('method = "dp-fedgd"\nrounds = 2\nlr = 0.5\nseed = 3\n')
    words = ["run", str(tmp_path / "spec.toml"), "--rounds", "4", "--set", "lr=0.25", "--out", str(tmp_path / "run")]
    status, _, _ = call(capsys, *words, "--json", str(tmp_path / "out.json"))
    spec = json.loads((tmp_path / "out.json").read_text())["spec"]
    assert status == 0
    assert (spec["method"], spec["rounds"], spec["lr"]) == ("dp-fedgd", 4, 0.25)
    status, text, _ = call(capsys, "run", "--resume", str(tmp_path / "run"))
    assert status == 0, "resuming a finished run tells its outcome again"
    assert "NOT certified" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "--method", "dp-fedsofim", "--set", "lrr=1"],
            "lrr: neither a key of a run nor an option of dp-fedsofim or of model auto. Did you mean 'lr'?",
        ),
        (["run", "--set", "lr"], "--set: 'lr' must have the form key=value"),
        (["run", "--method", "dp-fedadm"], "Did you mean 'dp-fedadam'?"),
        (["run", "--epsilon", "-1"], "epsilon: -1.0 must lie in"),
        (["run", "--epsilon", "lots"], "epsilon: 'lots' must be a number"),
        (["run", "--data", "no.csv"], "there is no file 'no.csv'"),
        (["run", "--clients", "5000"], "clients"),
        (["run", "--json", "spec.toml"], "--json: 'spec.toml' should end in .json"),
        (["run", "--resume", "nowhere"], "holds no run"),
        (["run", "--resume", "nowhere", "--out", "there"], "--out: a resumed run stays in its directory"),
        (["run", "--participation", "fixed:inf"], "participation: fixed:inf needs a whole number"),
        (["run", "--set", "schedule_seed=-1"], "schedule_seed: -1 must be 0 or more"),
        (["run", "--set", "noise=1e-200"], "noise: 1e-200 must lie between"),
        (["run", "--epsilon", "2", "--set", "noise=3"], "noise: epsilon is set too"),
        (["run", "--method", "dp-fedgd", "--set", "lr=inf"], "lr: inf must be a finite number"),
        (["run", "--set", "lr=1"], "lr: not an option of auto. It is one of dp-fedgd"),
        (["run", "--rounds", "3000000000"], "rounds: 3000000000 must lie between"),
        (["run", "--json", "nodir/x.json"], "--json: there is no directory"),
        (["run", "--delta", "0.9"], "delta: 0.9 must lie in"),
        (["privacy", "--epsilon", "1e300"], "epsilon: 1e+300 must lie in"),
        (["run", "--resume", "nowhere", "--epsilon", "2"], "a resumed run keeps its spec; leave out epsilon"),
        (["run", "none.toml"], "spec: there is no file"),
        (["predict", "none.safetensors", "x.csv"], "model: there is no file"),
        (["verify", "none.json"], "certificate: there is no file"),
        (["check"], "name a method, or use --all"),
        (["check", "dp-fedsofm"], "Did you mean 'dp-fedsofim'?"),
        (["audit"], "audit: name a method, or use --all"),
        (["audit", "dp-fedgdd"], "Did you mean 'dp-fedgd'?"),
        (["audit", "dp-fedgd", "--unit", "patient"], "unit: 'patient' is unknown"),
        (["audit", "dp-fedgd", "--runs", "3"], "runs: 3 are too few; use at least 20"),
        (["audit", "dp-fedgd", "--noise-factor", "0"], "noise_factor: 0.0 must be a number above 0"),
        (["audit", "dp-fedgd", "--set", "lrr=2"], "lrr: dp-fedgd has no such option. Did you mean 'lr'?"),
        (["audit", "dp-scaffold", "--trust", "trusted-server"], "trust: dp-scaffold is not proved private"),
        (["audit", "dp-fedgd", "--one-run", "--unit", "client"], "unit: an audit in one run"),
        (["audit", "dp-fedgd", "--seed", "-1"], "seed: -1 must be an integer"),
        (["audit", "dp-fedgd", "--epsilon", "inf"], "epsilon: inf promises nothing"),
        (["rnu"], "sordino: 'rnu' is unknown. Did you mean 'run'?"),
        (["status", "runs/a"], "sordino: 'status' is unknown; write sordino federate status."),
        (["show", "runs/a"], "sordino: 'show' is unknown; write sordino ledger show."),
        ([], "sordino: COMMAND is missing; see sordino --help"),
        (["budget", "--limit", "-1", "--runs", "2"], "--limit: -1 must be an epsilon of at least 0"),
        (["budget", "--limit", "3"], "budget: give one of --runs, --shares"),
        (["budget", "--runs", "2"], "--limit: give the epsilon over all runs, or a --ledger that has a limit"),
        (["budget", "--limit", "3", "--runs", "0"], "--runs: 0 must lie in [1, 1000]"),
        (["budget", "--limit", "3", "--shares", "1,x"], "--shares: '1,x' should be a number"),
        (["ledger"], "ledger: name a step: show, export, new-account, any-choice, fixed-plan or compact"),
        (
            ["ledger", "show"],
            "ledger show: LEDGER.db is missing; for example: sordino ledger show patients.db",
        ),
        (["ledger", "patients.db"], "ledger: 'patients.db' is no step; write sordino ledger show patients.db."),
        (["patients.csv"], "sordino: 'patients.csv' is no command; write sordino run patients.csv."),
        (["verify", "runs/a", "runs/b"], "verify: 'runs/b' is one word too many; see sordino verify --help"),
        (["export", "runs/a"], "--to is missing; for example: sordino export runs/mine --to coefficients; see"),
        (["run", "--weights=folder"], "run: '--weights' is unknown; write --set weights=folder"),
        (["privacy"], "privacy: give one of --epsilon, --noise"),
        (["privacy", "--epsilon", "1", "--noise", "1"], "--noise: --epsilon is given too; leave one out"),
        (["federate", "up", "--sites", "three"], "--sites: 'three' must be a whole number"),
        (["federate", "up", "--delta", "2"], "federate up: '--delta' is unknown; write --set delta=2"),
        (["run", "--method", "dp-fedgd", "--lr", "2"], "run: '--lr' is unknown; write --set lr="),
        (["federate", "up", "--rounds", "2", "--set", "rounds=3"], "--set rounds: --rounds is given too; leave one"),
        (["federate", "up", "--person", "patient"], "person: 'patient' needs a schema"),
        (["run", "--client", "ward"], "a record is of is named by --partition by-column:COLUMN, or by client ="),
        (["sweep", "--hospital=ward"], 'is named by --partition by-column:ward, or by client = "ward" in a schema'),
        (["run", "--eps", "2"], "run: '--eps' is unknown. Did you mean '--epsilon'?"),
        (["run", "--epsilon"], "--epsilon: a value is missing"),
        (["privacy", "--epsilon", "0"], "epsilon: 0.0 must lie in"),
        (["privacy", "--noise", "0"], "noise: 0.0 must lie between 1e-06 and 1e+12"),
        (["privacy", "--epsilon", "1", "--clients", "0"], "--clients: 0 must be at least 1"),
        (["privacy", "--epsilon", "1", "--unit", "patient"], "unit: 'patient' is unknown"),
    ],
)
def test_a_mistake_gets_one_line_and_no_traceback(capsys, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, *words)
    assert status == 2
    assert message in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def test_odd_names_are_shown_as_they_are(capsys, tmp_path):
    """No mark-up, no pictures, nothing lost: names are the user's."""
    rows = "\n".join(
        f"{k},{k % 5},{'yes' if k % 3 else 'no'},{'St. [b]Ann' if k % 2 else 'Köln:hospital:'}" for k in range(80)
    )
    (tmp_path / "p.csv").write_text("a,b,label,hospital\n" + rows + "\n", encoding="utf-8")
    words = ["run", "--data", str(tmp_path / "p.csv"), "--partition", "by-column:hospital", "--rounds", "6"]
    status, out, _ = call(capsys, *words, "--out", str(tmp_path / "x[/b]"))
    assert status == 0
    assert "St. [b]Ann" in out
    assert "Köln:hospital:" in out
    assert "x[/b]" in out
    status, out, _ = call(capsys, "predict", str(tmp_path / "x[/b]"), str(tmp_path / "p.csv"))
    assert out.splitlines()[0] == "row,prediction,p(no),p(yes)"
    assert len(out.splitlines()) == 81
    status, out, _ = call(capsys, "verify", str(tmp_path / "x[/b]"))
    assert status == 0


def test_methods_shows_the_options_of_one(capsys):
    _, out, _ = call(capsys, "methods", "dp-fednew")
    assert "curvature_clip = 0.1" in " ".join(out.split())
    assert "dp-fedgd" not in out
    _, out, _ = call(capsys, "methods", "dp-fednew", "--json", "-")
    assert [row["name"] for row in json.loads(out)] == ["dp-fednew"]
    status, _, err = call(capsys, "methods", "dp-fednw")
    assert status == 2
    assert "Did you mean 'dp-fednew'?" in err


def test_a_model_of_very_many_classes_is_told_of_quantities(capsys, tmp_path):
    rows = [f"{k % 7},{k % 5},{k}" for k in range(80)]
    (tmp_path / "ages.csv").write_text("\n".join(["a,b,age", *rows]) + "\n")
    words = ["run", "--data", str(tmp_path / "ages.csv"), "--label", "age", "--clients", "2", "--rounds", "6"]
    _, out, _ = call(capsys, *words, "--out", str(tmp_path / "run"))
    assert "labels counts as a class; a schema may declare a quantity" in " ".join(out.split())


def test_a_useless_model_is_called_one(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sordino.training.run.evaluate", lambda *args, **options: {"accuracy": 0.05})
    _, out, _ = call(capsys, "run", "--rounds", "6", "--out", str(tmp_path / "bad"))
    assert "no better than a constant guess" in out
    monkeypatch.setattr("sordino.training.run.evaluate", lambda *args, **options: {"accuracy": 0.95})
    _, out, _ = call(capsys, "run", "--rounds", "6", "--out", str(tmp_path / "good"))
    assert "constant guess" not in out


def test_help_reads_well(capsys):
    for words in ([], ["run"], ["predict"], ["privacy"], ["methods"], ["check"], ["audit"], ["verify"]):
        with pytest.raises(SystemExit) as stop:
            main([*words, "--help"])
        captured = capsys.readouterr()
        assert (stop.value.code, captured.err) == (0, "")
        assert "examples:" in captured.out


def test_a_comparison_does_not_list_the_flags_that_it_refuses(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    listed = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert {"--methods", "--epsilons", "--seeds", "--rounds"} <= set(listed)
    for flag, value in (("--epsilon", "2"), ("--method", "auto"), ("--seed", "1")):
        assert flag not in listed
        code, _, err = call(capsys, "compare", flag, value)
        assert code == 2
        assert "use --methods, --epsilons and --seeds" in err


def unexplained(parser):
    """The options of a command and its parts that have no help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from unexplained(part)
        elif not action.help:
            yield f"{parser.prog}: {action.dest}"


def test_every_option_is_explained():
    assert list(unexplained(_parser(COMMANDS))) == []
    bare = argparse.ArgumentParser("bare")
    bare.add_argument("--port")
    assert list(unexplained(bare)) == ["bare: port"]


def test_help_says_what_a_canary_and_the_port_of_a_link_are(capsys):
    for words, meant in (
        (["audit"], r"differ in one record \(or one whole client\): the canary, which is made so that its influence"),
        (["federate", "coordinate"], r"TCP port that the link listens on, and that sites name in --link HOST:N"),
    ):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert re.search(meant, " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize("name", ["run", "sweep", "compare"])
def test_help_says_that_a_table_may_be_named_first(capsys, name):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert "[SPEC.toml|DATA]" in capsys.readouterr().out


def test_one_round_is_no_rounds(capsys, tmp_path):
    assert main(["run", "--method", "dp-class-means", "--seed", "1", "--out", str(tmp_path / "r")]) == 0
    assert "dp-class-means on digits, 1 round" in (shown := capsys.readouterr().out)
    assert "1 rounds" not in shown


def test_federate_up_says_at_once_that_it_starts(capsys, monkeypatch, tmp_path):
    from sordino.operations import demonstration

    def prepare(out, *_, **__):
        (out / "sites").mkdir(parents=True)

    monkeypatch.setattr(demonstration, "prepare", prepare)
    monkeypatch.setattr(demonstration, "up", lambda out: iter([{"what": "finished", "epsilon": 1.0, "sites": []}]))
    main(["federate", "up", "--out", str(tmp_path / "f")])
    shown = capsys.readouterr()
    assert "starting link and sites" in shown.err.splitlines()[0]
    assert "0 rounds in 0 s, with the start of link and sites" in shown.out


@pytest.mark.parametrize("name", [name.rpartition(".")[2] for name in COMMANDS])
def test_a_command_alone_has_the_same_help_as_among_all(capsys, name):
    """`main` declares only the command that was named."""
    texts = []
    for parser in (_parser(COMMANDS), _parser((f"sordino.cli.{name}",))):
        with pytest.raises(SystemExit):
            parser.parse_args([name, "--help"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_it_is_a_program():
    done = subprocess.run([sys.executable, "-m", "sordino.cli", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "examples:" in done.stdout


def test_a_misspelt_flag_gets_a_suggestion(capsys):
    status, out, err = call(capsys, "run", "--metod", "auto")
    assert (status, out) == (2, "")
    assert "sordino: run: '--metod' is unknown. Did you mean '--method'?" in err


def test_a_table_from_draft_to_prediction(tmp_path, capsys, monkeypatch):
    """A draft is completed by hand, checked, trained with, and the model predicts from columns in another order."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    age, sex = rng.integers(20, 90, 400), rng.choice(["f", "m"], 400)
    sick = np.where(age + 10 * (sex == "m") + rng.normal(0, 10, 400) > 60, "yes", "no")
    rows = [f"{a},{s},{k},{h}" for a, s, k, h in zip(age, sex, sick, rng.choice(["n", "s"], 400), strict=True)]
    (tmp_path / "patients.csv").write_text("age,sex,sick,site\n" + "\n".join(rows) + "\n")
    assert main(["schema", "draft", "patients.csv", "--out", "schema.toml"]) == 0
    assert main(["schema", "draft", "patients.csv", "--out", "schema.toml"]) == 2  # never overwritten
    assert main(["schema", "check", "schema.toml"]) == 2
    assert "FILL IN" in capsys.readouterr().err
    (tmp_path / "schema.toml").write_text(
        'client = "site"\n[target]\ncolumn = "sick"\nlevels = ["no", "yes"]\n'
        '[columns.age]\ntype = "number"\nrange = [18, 100]\n[columns.sex]\ntype = "category"\nlevels = ["f", "m"]\n'
    )
    assert main(["schema", "check", "schema.toml", "patients.csv"]) == 0
    told = capsys.readouterr().out
    assert "every column is there" in told
    assert "constant" not in told
    schema = (tmp_path / "schema.toml").read_text()
    (tmp_path / "heading.csv").write_text("age,sex,sick,site\n")
    assert main(["schema", "check", "schema.toml", "heading.csv"]) == 2
    assert "data: 'heading.csv' holds a heading and no records" in capsys.readouterr().err
    (tmp_path / "wrong.toml").write_text(schema.replace("[18, 100]", "[0, 1]").replace('["f", "m"]', '["F", "M"]'))
    assert main(["schema", "check", "wrong.toml", "patients.csv"]) == 0
    assert "age, sex: every record becomes the same" in " ".join(capsys.readouterr().out.split())
    assert main(["schema", "check", "patients.csv", "schema.toml"]) == 0, "in the other order too"
    assert "every column is there" in capsys.readouterr().out
    assert main(["schema", "check", "patients.csv", "--schema", "schema.toml"]) == 0, "as `sordino run` names it"
    assert "every column is there" in capsys.readouterr().out
    assert main(["schema", "check", "--schema", "schema.toml"]) == 0
    assert "every column is there" not in capsys.readouterr().out
    assert main(["schema", "check", "a.toml", "patients.csv", "--schema", "schema.toml"]) == 2
    assert "--schema: 'schema.toml' is a third file; write" in capsys.readouterr().err
    assert main(["schema", "check"]) == 2
    assert "SCHEMA.toml is missing" in capsys.readouterr().err
    assert main(["run", "--data", "patients.csv", "--schema", "schema.toml", "--epsilon", "8", "--out", "r"]) == 0
    assert "clients    2 with" in capsys.readouterr().out
    cert = json.loads((tmp_path / "r" / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert any("schema of the table" in fact for fact in cert["assumes"])
    assert main(["verify", "r"]) == 0
    (tmp_path / "new.csv").write_text("sex,note,age\nm,x,85\nf,y,25\n")
    capsys.readouterr()
    assert main(["predict", "r", "new.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == ["yes", "no"]
    (tmp_path / "new.csv").write_text("sex\nm\n")
    assert main(["predict", "r", "new.csv"]) == 2
    assert "lacks the column 'age'" in capsys.readouterr().err


def test_where_results_go_is_checked_before_training(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sordino.training.run.rounds", lambda *_: pytest.fail("it trains"))
    (tmp_path / "d.json").mkdir()
    (tmp_path / "patients.csv").write_text("a,label\n1,x\n")
    (tmp_path / "columns.toml").write_text('client = "hospital"\n[columns.age]\ntype = "number"\nrange = [0, 9]\n')
    (tmp_path / "run" / "public").mkdir(parents=True)
    (tmp_path / "run" / "public" / "spec.toml").write_text("rounds = 5\n")
    for words, message in (
        (["--json", "d.json"], "--json: 'd.json' is a directory; name a file"),
        (["--out", "patients.csv"], "--out: 'patients.csv' is a file, not a folder; name a folder"),
        (["--out", "patients.csv/x"], "patients.csv' is a file, not a folder; name a folder"),
        (["none.csv"], "data: there is no file 'none.csv'"),
        (["d.json"], "spec: 'd.json' is a directory; name a TOML file"),
        (["digit"], "spec: 'digit' is no file and no data set. Did you mean the data set 'digits'?"),
        (["dp-fedgd"], "spec: 'dp-fedgd' is no file and no data set; for the method write --method dp-fedgd"),
        (["--set", "lr", "3"], "--set: 'lr' must have the form key=value"),
        (["patient.csv"], "data: there is no file 'patient.csv'. Did you mean 'patients.csv'?"),
        (["columns.toml"], "spec: 'columns.toml' looks like the schema of a table"),
        (["run"], "spec: 'run' is the folder of a run; continue it with --resume run"),
        (["--resume", "run"], "--resume: 'run' has no private/, which holds checkpoint, ledger and keys; put it back"),
    ):
        assert call(capsys, "run", *words)[0] == 2
        status, _, err = call(capsys, "run", *words)
        assert (status, len(err.splitlines())) == (2, 1)
        assert message in err
    monkeypatch.setattr("sordino.cli.show.os.access", lambda path, mode: False)
    for words, message in (
        (["--json", "x.json"], "--json: this user cannot write 'x.json'; name a file in another folder"),
        (["--out", "ro/x"], f"--out: 'ro/x' cannot be written, because this user cannot write into '{tmp_path}'"),
        ([], f"--out: 'runs' cannot be written, because this user cannot write into '{tmp_path}'"),
    ):
        status, _, err = call(capsys, "run", *words)
        assert (status, len(err.splitlines())) == (2, 1)
        assert message in err


def test_an_audit_writes_what_is_done_after_every_job(capsys, tmp_path, monkeypatch):
    """The second audit fails: the file holds the first, whose figures are numpy's."""
    from sordino.checks.audit import attacks

    real, calls = attacks.audit, []

    def once(*words, **options):
        calls.append(words)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*words, **options)._replace(lower_gaussian=np.float64(2.0), rounds=np.int64(5))

    monkeypatch.setattr(attacks, "audit", once)
    out = tmp_path / "audit.json"
    assert call(capsys, "audit", "dp-fedgd", "--runs", "100", "--seed", "1", "--json", str(out))[0] == 130
    (row,) = json.loads(out.read_text())
    assert row["broken"] is True
    assert row["rounds"] == 5


@pytest.mark.parametrize(("name", "status"), tiers([("SIGINT", 130), ("SIGTERM", 143)], 1))
def test_a_run_that_is_stopped_says_how_to_continue(name, status, tmp_path):
    words = ["run", "--method", "dp-fedgd", "--rounds", "100000", "--out", str(tmp_path / "run")]
    # A shell lets its background jobs ignore Ctrl-C, and children inherit that.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = f"{start}import sys; from sordino.__main__ import main; sys.exit(main())"
    with subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True) as process:
        metrics, end = tmp_path / "run" / "public" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(getattr(signal, name))
        err = process.communicate(timeout=60)[1]
    assert process.returncode == status
    assert f"sordino: stopped. continue with: sordino run --resume {tmp_path / 'run'}" in err
    assert re.search(r"the rounds up to \d+ spent epsilon = [\d.e-]+; the ledger is charged", err)
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_a_finalizer_is_not_lost(number):
    """Python ignores exceptions there; the handler sends the signal again."""

    class Finalized:
        def __del__(self):
            signal.raise_signal(number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), terminable():
            (Finalized(), time.sleep)[1](10)  # the object goes before the call begins
    finally:
        signal.signal(signal.SIGINT, before)


def test_control_c_while_modules_are_imported_gets_one_line(tmp_path):
    """A module that interrupts its import stands for a user who does."""
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from sordino.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "sordino: stopped.\n")


def test_columns_and_choices_are_explained(capsys, monkeypatch):
    passed = checks.Report("dp-fedgd", "record", "add-remove", "0.0 gradient", 1.0, 0.99, 0.0, True, [])
    monkeypatch.setattr(checks, "check", lambda name: [passed])
    assert "Start with auto" in call(capsys, "methods")[1]
    assert "found: the largest part of that which a search reached" in call(capsys, "check", "dp-fedgd")[1]
    words = ["audit", "dp-fedgd", "--runs", "40", "--unit", "record", "--adjacency", "replace-one", "--seed", "1"]
    assert "reach: mu that the attack achieves over the certified mu" in call(capsys, *words)[1]


def test_check_tells_of_each_finished_check_where_there_is_no_terminal(capsys, monkeypatch):
    passed = checks.Report("dp-fedgd", "record", "add-remove", "0.0 gradient", 1.0, 0.99, 0.0, True, [])
    failed = passed._replace(passed=False, problems=["too far"])
    monkeypatch.setattr(checks, "check_sums", lambda device: [passed])
    monkeypatch.setattr(checks, "check", lambda name: [passed, failed] if name == "dp-ftrl" else [passed])
    status, _, err = call(capsys, "check", "--sums", "dp-fedgd", "dp-ftrl", "--json")
    assert status == 1
    lines = [line.partition("  ")[2] for line in err.splitlines()]
    assert lines == ["1 of 3  sums: passed", "2 of 3  dp-fedgd: passed", "3 of 3  dp-ftrl: failed"]


def test_errors_name_what_is_missing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "run", "--method", "dp-fedgd", "--rounds", "2", "--out", "run")[0] == 0
    assert "data: there is no file 'nothing.csv'; check the path" in call(capsys, "predict", "run", "nothing.csv")[2]
    (tmp_path / "wrong.json").write_text("{}")
    told = call(capsys, "verify", "wrong.json")[2]
    assert "certificate: the field 'format' is missing, so this is no certificate; name a certificate.json" in told
    for name in ("certificate.json", "model.safetensors"):
        (tmp_path / "run" / "public" / name).unlink()
    for words in (["verify", "run"], ["predict", "run", "wrong.json"]):
        assert "the run in 'run' is not finished" in (told := call(capsys, *words)[2])
        assert "continue it with sordino run --resume run" in told


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            {"what": "joined", "sites": ["a"], "missing": ["b", "c"], "seconds": 600},
            "a joined; waiting up to 600 s for b, c",
        ),
        ({"what": "joined", "sites": ["b", "c"], "missing": [], "seconds": 590}, "b, c joined; all are here"),
        ({"what": "away", "site": "b", "seconds": 35}, "b left the link; waiting up to 35 s for an answer"),
        ({"what": "round", "t": 0, "came": [], "epsilon": 3.16}, "round 1 of 5  lost; up to ε 3.160 charged"),
        ({"what": "round", "t": 1, "came": ["a", "b"], "epsilon": 4.5}, "round 2 of 5  ε  4.500  2 sites"),
    ],
)
def test_a_coordinator_says_who_joined_who_is_away_and_what_a_lost_round_cost(line, words):
    assert of_coordinator(line, 5) == words


def test_nothing_that_is_printed_steers_the_terminal_or_adds_lines(tmp_path, capsys):
    """Whoever wrote the text: a name in a received file, a cell, a key that an error quotes."""
    from sordino.cli import show

    foreign = "site\x1b[3A\r\nholds: the numbers agree [/] [red]"
    shown = r"site\x1b[3A\r\nholds: the numbers agree [/] [red]"
    show.facts([("signed by", foreign)])
    show.table(("site", "state"), [(foreign, show.marked("[green]yes[/]"))])
    show.console().print(foreign, markup=False)
    show.say(foreign)
    told = capsys.readouterr().out
    assert told.count(shown) == 4
    assert "\x1b" not in told
    assert "yes" in told
    assert not any(line.startswith("holds") for line in told.splitlines())
    (tmp_path / "spec.toml").write_text('"rounds\\u001b[2J\\nholds: the numbers agree" = 3\n')
    assert main(["run", str(tmp_path / "spec.toml")]) == 2
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert r"rounds\x1b[2J\nholds" in told
    assert len(told.splitlines()) == 1


def test_a_bar_is_not_drawn_for_what_is_refused(capsys):
    words = ["compare", "--data", "nope.csv", "--label", "x", "--methods", "auto,dp-fedgd", "--epsilons", "1"]
    assert main(words) == 2
    assert capsys.readouterr().err.strip() == "sordino: data: there is no file 'nope.csv'; check the path."


def test_evaluate_names_its_table_once(capsys, tmp_path):
    for words, message in (
        ([], "evaluate: the test records are missing; write sordino evaluate RUN test.csv --epsilon 0.5."),
        (["a.csv", "--data", "b.csv"], "evaluate: FILE and --data name the test records twice"),
    ):
        assert main(["evaluate", str(tmp_path), *words, "--epsilon", "1"]) == 2
        assert message in capsys.readouterr().err
    assert main(["advise", "table.csv"]) == 2
    assert "advise: --records, --dim are missing" in capsys.readouterr().err


def test_a_second_table_is_refused_with_what_to_do(capsys, tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    assert main(["run", str(tmp_path / "a.csv"), str(tmp_path / "a.csv")]) == 2
    shown = capsys.readouterr().err
    assert "is one file too many, because it reads one table" in shown
    assert "a column that names the hospital (client in the schema)" in shown
