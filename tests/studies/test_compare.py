"""Comparisons: equal budgets, frozen settings, and a document whose every figure can be made again."""

import json
import math
import shlex

import numpy as np
import pytest
import torch

from sordino.cli import main
from sordino.cli.sweep import _tell
from sordino.errors import SordinoError
from sordino.privacy import calibration
from sordino.privacy.accounting import selection
from sordino.studies import compare, private_tuning, report, sweep
from sordino.studies.statistics import unpack
from sordino.training.resolved import resolve
from sordino.training.spec import Spec

BASE = {"data": "digits", "clients": 4, "rounds": 4}


@pytest.fixture(scope="module")
def made():
    who = compare.contestants(["dp-fedgd", "dp-fedavg:steps=2", "dp-scaffold", "dp-fedfc"], BASE)
    runs = compare.lineup(who, BASE, [2.0, math.inf], [1, 2], compare.UNTOUCHED)
    pairs = [("dp-fedfc", "dp-fedgd")]
    return compare.document(runs, base=BASE, tuning=compare.UNTOUCHED, command="sordino compare", pairs=pairs)


def test_a_sweep_prints_four_digits_of_a_proposal_and_keeps_all_in_the_command(capsys):
    best = {"lr": 1.2345678901234567, "clip": 1.5}
    row = {"setting": best, "mean": 0.9, "std": None}
    told = {
        "search": "optuna",
        "metric": "accuracy",
        "varied": list(best),
        "rows": [row],
        "shown": 20,
        "best": best,
        "tried": 1,
    }
    _tell({**told, "paid": "no", "command": f"sordino run --set lr={best['lr']}"}, None)
    text = capsys.readouterr().out
    assert "best: lr = 1.235, clip = 1.5" in text
    assert "1.2345678901234567" in text.replace("\n", "").split("train it:")[1]
    _tell({**told, "search": "grid", "paid": "no"}, None)
    assert "best: lr = 1.2345678901234567" in capsys.readouterr().out


def test_every_run_can_be_made_again_by_its_command(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for k, filed in enumerate(made["runs"][::3]):
        assert main([*shlex.split(filed["command"])[1:], "--json", "--out", f"run{k}"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert list(again["accuracy"].values()) == pytest.approx(filed["accuracy"], abs=1e-6)
        assert again["epsilon"] == pytest.approx(filed["certificate"]["epsilon"]) or filed["epsilon"] is None


def test_budgets_are_equal(made):
    for filed in made["runs"]:
        cert = filed["certificate"]
        if filed["epsilon"] is not None:
            assert cert["epsilon"] == pytest.approx(filed["epsilon"], rel=1e-6)
            assert max(filed["client_epsilon"]) == pytest.approx(filed["epsilon"], rel=1e-4)
        assert len(filed["client_epsilon"]) == 4


def test_accuracies_by_class_and_client_add_up(made):
    for filed in made["runs"][:3]:
        data = resolve(Spec.of({"data": "digits", "split_seed": filed["seed"]})).read_data()
        right = unpack(filed["correct"], len(data.y_test))
        assert right.mean() == pytest.approx(filed["accuracy"][-1])
        held = np.bincount(data.y_test)
        assert (np.array(filed["per_class"]) * held).sum() == pytest.approx(right.sum(), abs=0.5)
        sizes = [sum(client) for client in made["partition"][str(filed["seed"])]]
        assert sum(sizes) == len(data.y_train)
        assert 0 <= np.average(filed["per_client"], weights=sizes) <= 1


def test_traffic_is_what_the_methods_send(made):
    d, rounds = 650, 4
    by = {filed["label"]: filed for filed in made["runs"]}
    assert (by["dp-fedgd"]["bytes_up"], by["dp-fedgd"]["bytes_down"]) == (4 * d * rounds, 4 * d * rounds)
    assert by["dp-scaffold"]["bytes_down"] == 8 * d * rounds  # the model and the control variate
    assert by["dp-fedfc"]["bytes_up"] == 4 * (65**2 + d * (rounds - 1))


def test_noise_is_told_where_it_is_known(made):
    for filed in made["runs"]:
        known = filed["method"] == "dp-fedgd"
        assert (filed["signal"] is not None) == known
        assert not known or len(filed["signal"]) == len(filed["noise"]) == 4
    quiet = next(f for f in made["runs"] if f["label"] == "dp-fedgd" and f["epsilon"] is None)
    assert set(quiet["noise"]) == {0.0}


def test_the_document_makes_a_report(made, tmp_path):
    names = {path.name for path in report.write(made, tmp_path)}
    assert {"report.html", "report.md"} <= names
    assert made["pairs"][0]["a"] == "dp-fedfc"


@pytest.mark.parametrize("how", ["grid", "halving"])
def test_methods_of_one_round_stand_beside_longer_ones(how, tmp_path, capsys):
    """They spend the whole budget in their round, and the tables say so."""
    words = f"--data digits --clients 4 --trust secure-aggregation --epsilons 2 --seeds 2 --search {how}"
    methods = "dp-fedadam,dp-class-means,dp-statistics"
    more = f"--methods {methods} --rounds 12 --tune --preset steps --out {tmp_path / 'out'}"
    assert main(["compare", *words.split(), *more.split()]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {"dp-fedadam": "12", "dp-class-means": "1", "dp-statistics": "1"}.items() <= {
        words[0]: words[1] for words in shown if len(words) > 1
    }.items()
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document["rounds"] == [1, 10]
    assert {setting["method"] for setting in document["tuning"]["settings"]} == {"dp-fedadam", "dp-statistics"}
    for filed in document["runs"]:
        rounds = 12 if filed["method"] == "dp-fedadam" else 1
        assert len(filed["accuracy"]) == rounds == filed["certificate"]["rounds"]
        assert filed["certificate"]["epsilon"] == pytest.approx(2.0, rel=1e-6)
        assert ("rounds=" in filed["command"]) == (rounds == 12)
        assert filed["accuracy"][-1] > 0.5
    columns = {row[0].text: [cell.text for cell in row[1:]] for row in report.by_round(document)["2"].rows}
    assert columns["dp-statistics"][1] == "–" != columns["dp-statistics"][0]
    assert report.final(document).head[:2] == ["method", "rounds"]


def test_a_table_of_equal_rounds_has_no_column_of_rounds(made):
    assert report.final(made).head == ["method", "ε = 2", "ε = ∞"]


def test_settings_are_chosen_once_and_kept(tmp_path):
    who = compare.contestants(["dp-fedgd"], BASE)
    tuning = compare.settle(who, BASE, [2.0, 8.0], grid="paper-coarse")
    assert [s["tried"] >= 7 for s in tuning["settings"]] == [True, True]
    assert "not paid" in tuning["paid"]
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(tuning))
    runs = compare.lineup(who, BASE, [2.0, 8.0], [1, 2], compare.frozen(path))
    assert [r.values["lr"] for r in runs] == [s["options"]["lr"] for s in tuning["settings"] for _ in (1, 2)]
    for bad in ("{}", "[1]", "no"):
        path.write_text(bad)
        with pytest.raises(SordinoError, match="settings"):
            compare.frozen(path)


def test_a_search_may_be_cut_and_reads_data_in_memory(monkeypatch):
    from sordino.training.resolved import ResolvedSpec

    base = {"data": "digits", "rounds": 2, "clients": 3}
    who = compare.contestants(["dp-fedsofim"], base)
    data = resolve(Spec.of({**who[0].values(base, 4.0), "seed": 0, "split_seed": 0})).read_data()
    whole = compare.settle(who, base, [4.0], most=3, extensions=0)
    assert [each["tried"] for each in whole["settings"]] == [3]

    def read(self):
        raise AssertionError("read again")

    monkeypatch.setattr(ResolvedSpec, "read_data", read)
    assert compare.settle(who, base, [4.0], most=3, extensions=0, data=data) == whole


def test_a_grid_that_was_extended_is_named():
    base = {**BASE, "rounds": 3}
    tuning = compare.settle(compare.contestants(["dp-fedgd"], base), base, [8.0], tune_round=2, metric="log_loss")
    (setting,) = tuning["settings"]
    assert tuning["round"] == 2
    assert "by the metric after round 2" in tuning["how"]
    assert setting["tried"] == 8 + len(setting["added"]["lr"]), "three rounds want steps above 0.3"
    assert setting["added"]["lr"][0] == 0.6
    assert "extended where the best value lay on an edge: dp-fedgd (lr)" in tuning["how"]


def test_the_parts_of_sofim_keep_its_bias_correction():
    tuned = {"lr": 2.0, "rho": 4.0, "beta": 0.9, "bias_correction": True, "warm_start": 20}
    who = compare.contestants(["dp-fedsofim"], BASE)
    tuning = {**compare.UNTOUCHED, "settings": [{"method": "dp-fedsofim", "epsilon": 0.5, "options": tuned}]}
    plain, average, _ = compare.ablation(compare.lineup(who, BASE, [0.5], [1], tuning), "dp-fedsofim")
    assert average.values["bias_correction"] is True
    assert average.values["lr"] == plain.values["lr"] == 0.5
    for each in (plain, average):
        compare.Spec.of(each.values)


def test_parts_of_sofim_take_equal_effective_steps():
    who = compare.contestants(["dp-fedsofim:apply_to=momentum:lr=3:rho=10"], BASE)
    runs = compare.lineup(who, BASE, [8.0], [1], compare.UNTOUCHED)
    plain, average, full = compare.ablation(runs, who[0].label)
    assert plain.values["lr"] == pytest.approx(0.3)
    assert average.values["lr"] / average.values["rho"] == pytest.approx(0.3)
    assert full.values["lr"] / full.values["rho"] == pytest.approx(0.3)
    varied = compare.sensitivity(runs, who[0].label)
    assert {run.vary[0] for run in varied} == {"lr", "rho", "beta"}
    assert sum(run.vary == ("lr", 3) for run in varied) == 1


def test_words_for_many_methods():
    hidden = compare.contestants(["paper"], {**BASE, "trust": "secure-aggregation"})
    assert {"dp-scaffold"} == {c.method for c in compare.contestants(["paper"], BASE)} - {c.method for c in hidden}
    assert "fednew" not in {c.method for c in compare.contestants(["all"], BASE)}
    with pytest.raises(SordinoError, match="rho"):
        compare.contestants(["dp-fedsofim:roh=1"], BASE)
    with pytest.raises(SordinoError, match="clip"):
        compare.contestants(["dp-fedgd"], {**BASE, "clpi": 1})


def test_a_sweep_on_the_command_line(tmp_path, capsys):
    words = ["sweep", "--method", "dp-fedgd", "--clients", "4", "--rounds", "3", "--grid", "lr=0.5,2"]
    assert main([*words, "--grid", "epsilon=4,inf", "--seeds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 4
    assert found["rows"][0]["mean"] == max(row["mean"] for row in found["rows"])
    assert "not paid" in found["paid"]
    edge = {"lr": 4.0} if found["best"]["lr"] == 2 else {"lr": 0.25}
    assert found["beyond"] == edge, "of options of the method alone, not of epsilon"
    assert main([*words, "--search", "halving"]) == 0
    told = capsys.readouterr().out
    assert "tried: 2 settings; halving shows the best" in told
    assert "is at the edge of what was tried; try" in told
    assert main([*words, "--epsilon", "8", "--charge-tuning", "count", "--out", str(tmp_path / "paid")]) == 0
    told = capsys.readouterr().out
    assert "paid for: 2 runs" in told
    assert "certified: ε = 8 at δ = 1e-05, all runs of the search together" in told
    assert "2 runs" in (tmp_path / "paid" / "statement.md").read_text()
    cert = json.loads((tmp_path / "paid" / "certificate.json").read_text())
    assert cert["epsilon"] == pytest.approx(8.0, rel=1e-6)  # of the search, not of the run that it chose
    assert cert["rounds"] == 6
    assert main(["verify", str(tmp_path / "paid" / "certificate.json")]) == 0
    assert main([*words, "--trust", "trusted-server", "--epsilon", "8", "--charge-tuning", "stopping", "--json"]) == 0
    told = capsys.readouterr()
    assert not json.loads(told.out[told.out.index("{") :])["certificate"]["certified"]
    assert "/" not in told.err  # no bar that counts


@pytest.fixture
def patients(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    died = rng.random(600) < 1 / (1 + np.exp(2 - 2 * x[:, 0]))
    rows = [f"{a:.3f},{b:.3f},{c:.3f},{int(d)}" for (a, b, c), d in zip(x, died, strict=True)]
    (tmp_path / "patients.csv").write_text("\n".join(["a,b,c,died", *rows]) + "\n")
    (tmp_path / "dose.csv").write_text(
        "\n".join(["a,b,y", *(f"{a:.3f},{b:.3f},{a - b + 0.01:.4f}" for a, b, _ in x)]) + "\n"
    )
    return tmp_path


@pytest.mark.parametrize("metric", ["auc", "log_loss", "brier"])
def test_a_sweep_ranks_by_the_metric_asked_for(patients, capsys, metric):
    words = ["sweep", "--data", str(patients / "patients.csv"), "--label", "died", "--clients", "3", "--rounds", "3"]
    words += ["--method", "dp-fedgd", "--epsilon", "inf", "--metric", metric, "--grid", "lr=0.01,1,30"]
    assert main([*words, "--seeds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    means = [row["mean"] for row in found["rows"]]
    assert found["metric"] == metric
    assert means == sorted(means, reverse=metric == "auc")
    assert len(set(means)) == 3
    assert main(words) == 0
    told = capsys.readouterr().out
    assert {"auc": "validation AUC", "log_loss": "validation log loss", "brier": "validation Brier score"}[
        metric
    ] in told
    assert f"{means[0]:.4g}"[:4] in told
    for search in (["--search", "halving"], ["--search", "optuna", "--trials", "3"]):
        if "optuna" in search:
            pytest.importorskip("optuna")
        assert main([*words, *search, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["mean"] > 0, "the metric itself, and not its negative"


def test_a_sweep_over_quantities_ranks_by_r2(patients, capsys):
    words = ["sweep", "--data", str(patients / "dose.csv"), "--label", "y", "--clients", "3", "--rounds", "3"]
    words += ["--method", "dp-fedgd", "--epsilon", "inf", "--grid", "lr=0.1,1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == "r2"
    assert main([*words, "--metric", "auc"]) == 2
    assert "labels that are quantities have no auc; use one of r2, mse, mae" in capsys.readouterr().err
    assert main([*words[:-2], "--grid", "lr=0.1,1", "--epsilon", "4", "--charge-tuning", "count"]) == 2
    assert "labels that are quantities have no accuracy" in capsys.readouterr().err


def test_a_paid_sweep_counts_correct_records_and_nothing_else(patients, capsys):
    words = ["sweep", "--data", str(patients / "patients.csv"), "--label", "died", "--clients", "3", "--rounds", "3"]
    words += ["--method", "dp-fedgd", "--epsilon", "4", "--grid", "lr=0.5,1"]
    assert main([*words, "--charge-tuning", "count", "--metric", "log_loss"]) == 2
    assert "use accuracy, or --charge-tuning public" in capsys.readouterr().err
    public = patients / "public.csv"
    public.write_text((patients / "patients.csv").read_text())
    assert main([*words, "--charge-tuning", "public", "--public", str(public), "--metric", "log_loss"]) == 0


def test_a_comparison_ranks_by_the_metric_asked_for(patients, capsys):
    words = ["compare", "--data", str(patients / "patients.csv"), "--label", "died", "--clients", "3", "--rounds", "3"]
    words += ["--methods", "dp-fedgd,dp-fedgd:lr=20.0", "--epsilons", "inf", "--seeds", "2", "--metric", "log_loss"]
    assert main([*words, "--out", str(patients / "out")]) == 0
    told = capsys.readouterr().out
    document = json.loads((patients / "out" / "compare.json").read_text())
    losses = {each["label"]: each["scores"][-1] for each in document["runs"] if each["seed"] == 1}
    assert len(set(losses.values())) == 2
    best = min(losses, key=losses.get)
    assert f"Best at the last round by log loss: {best}" in (patients / "out" / "report.md").read_text()
    assert "0." in told.splitlines()[1]
    assert "%" not in told.splitlines()[1]


TARGETS = {
    "quantity": 'column = "days"\ntask = "quantity"\nrange = [0, 20]',
    "count": 'column = "visits"\ntask = "count"\nmaximum = 20',
    "survival": 'column = "time"\ntask = "survival"\nevent = "dead"\nintervals = [0, 1, 2, 3]',
}


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """One table with a quantity, a count and survival times, and a schema for each."""
    folder, rng = tmp_path_factory.mktemp("wards"), np.random.default_rng(0)
    x = rng.uniform(-1, 1, (900, 2))
    time = rng.exponential(3 * np.exp(-1.5 * x[:, 0]))
    columns = {
        "a": x[:, 0],
        "b": x[:, 1],
        "days": 10 + 5 * x[:, 0] + rng.normal(0, 1, 900),
        "visits": rng.poisson(np.exp(1 + x[:, 0])),
        "time": np.minimum(time, 4),
        "dead": (time < 4).astype(int),
    }
    rows = [",".join(f"{value:.4g}" for value in row) for row in zip(*columns.values(), strict=True)]
    (folder / "wards.csv").write_text("\n".join([",".join(columns), *rows]) + "\n")
    for task, target in TARGETS.items():
        used = {"quantity": ("days",), "count": ("visits",), "survival": ("time", "dead")}[task]
        drops = [f'[columns.{name}]\ntype = "drop"' for name in ("days", "visits", "time", "dead") if name not in used]
        numbers = [f'[columns.{name}]\ntype = "number"\nrange = [-1, 1]' for name in "ab"]
        (folder / f"{task}.toml").write_text("\n".join([f"[target]\n{target}", *numbers, *drops]) + "\n")
    return folder


@pytest.mark.parametrize(
    ("task", "asked", "metric"),
    [("quantity", None, "r2"), ("quantity", "mae", "mae"), ("count", None, "d2"), ("survival", None, "concordance")],
)
def test_other_tasks_are_compared_by_their_metric(wards, tmp_path, capsys, monkeypatch, task, asked, metric):
    monkeypatch.setattr(report.figures, "draw", lambda view, out: [])  # tests of the report draw them
    words = ["compare", "--data", str(wards / "wards.csv"), "--schema", str(wards / f"{task}.toml"), "--seeds", "1"]
    words += [
        "--methods",
        "auto,dp-fedadam:lr=0.1",
        "--epsilons",
        "8,inf",
        "--rounds",
        "12",
        "--clients",
        "3",
        "--set",
        "public_data=true",
        "--partition",
        "iid",
        "--json",
    ]
    assert main([*words, "--out", str(tmp_path / "out"), *(["--metric", asked] if asked else [])]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["metric"], document["data"]["task"], document["pairs"]) == (metric, task, [])
    for run in document["runs"]:
        assert (run["accuracy"], run["correct"], run["per_class"]) == ([], None, None)
        assert len(run["scores"]) == 12
        assert len(run["per_client"]) == 3
    last = {(run["label"], run["epsilon"]): run["scores"][-1] for run in document["runs"]}
    if metric == "mae":
        assert 0.7 < last["auto", None] < 1.5, "in days, the unit of the table"
        assert last["auto", None] < last["dp-fedadam (lr 0.1)", None] * 1.5
    else:
        assert last["auto", None] > {"r2": 0.8, "d2": 0.2, "concordance": 0.65}[metric]
    kind = "survival" if task == "survival" else "calibration"
    points = np.array(next(run[kind] for run in document["runs"] if run["epsilon"] is None))
    assert points.shape[1] == (5 if task == "survival" else 4)
    if task == "quantity":
        assert 0 < points[:, 0].min() < 10 < points[:, 0].max() < 20, "predictions are days"
    assert "accuracy" not in (tmp_path / "out" / "report.md").read_text().lower()
    assert document["partition"]["1"] == [[240], [240], [240]]


def test_methods_that_cannot_learn_the_task_are_left_out(wards):
    base = {"data": str(wards / "wards.csv"), "schema": str(wards / "survival.toml"), "clients": 3}
    assert "dp-fedfc" not in {each.method for each in compare.contestants(["all"], base)}
    with pytest.raises(SordinoError, match=r"^method: dp-fedfc"):
        compare.contestants(["dp-fedfc"], base)
    with pytest.raises(SordinoError, match="labels that are survival times have no auc; use one of concordance"):
        compare.check_metric("auc", base)


def test_tuning_ranks_by_the_metric_of_the_task(wards):
    base = {"data": str(wards / "wards.csv"), "schema": str(wards / "quantity.toml"), "clients": 3, "rounds": 5}
    tuning = compare.settle(compare.contestants(["dp-fedgd"], base), base, [8.0], grid="paper-coarse")
    assert tuning["metric"] == "r2"
    runs = compare.lineup(compare.contestants(["dp-fedgd"], base), base, [8.0], [1], tuning)
    assert runs[0].values["lr"] == tuning["settings"][0]["options"]["lr"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep"], "nothing to try"),
        (["sweep", "--method", "dp-fedgd", "--grid", "lr=1,2", "--metric", "acu"], "'acu' is unknown"),
        (["sweep", "--method", "dp-fedgd", "--grid", "lr=1,2", "--metric", "auc"], "many classes have no auc"),
        (
            ["compare", "--metric", "r2"],
            "many classes have no r2; use one of accuracy, balanced_accuracy",
        ),
        (["compare", "--metric", "acurracy"], "'acurracy' is unknown. Did you mean 'accuracy'?"),
        (["sweep", "--grid", "lr"], "key=a,b,c"),
        (["sweep", "--method", "dp-fedgd", "--grid", "lr=1,1"], "twice"),
        (["sweep", "--grid", "seed=1,2"], "--seeds"),
        (["sweep", "--grid", "lr=1,2", "--seeds", "7,8"], "for 2 of them write --seeds 2."),
        (
            ["compare", "--seeds", "1,2,3"],
            "--seeds: '1,2,3' must be the number of seeds; for 3 of them write",
        ),
        (["compare", "--seeds", "many"], "--seeds: 'many' must be a whole number."),
        (["compare", "--seeds", "0"], "--seeds: 0 must be at least 1."),
        (["sweep", "--method", "dp-fedgd", "--grid", "lrr=1,2"], "Did you mean 'lr'"),
        (["sweep", "--method", "dp-fedgd", "--grid", "lr=1,2", "--search", "optna"], "optuna"),
        (["sweep", "--grid", "lr=1,2", "--charge-tuning", "public"], "--public"),
        (["sweep", "--grid", "lr=1,2", "--device", "tpu"], "--device"),
        (["compare", "--methods", "dp-fedgdd"], "dp-fedgd"),
        (["compare", "--epsilons", "one"], "--epsilons"),
        (["compare", "--set", "epsilon=1"], "--epsilons"),
        (["compare", "--methods", "dp-fedgd", "--ablation"], "--of"),
        (["compare", "--methods", "dp-fedgd", "--pairs", "a/b"], "--pairs"),
        (["compare", "--tune", "--settings", "x.json"], "--tune"),
    ],
)
def test_mistakes_get_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_values_of_a_grid_are_read_as_a_run_reads_them():
    assert sweep.grid_of(["lr=1,2"], None, {"method": "dp-fedgd"}) == {"lr": (1.0, 2.0)}
    assert sweep.grid_of(["steps=1,2"], None, {"method": "dp-fedavg"}) == {"steps": (1, 2)}


def test_figures_of_real_clients_stay_private(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 9))
    np.savez(tmp_path / "d.npz", x=x, y=(x[:, 0] > 0).astype(int), client=np.arange(120) % 3)
    base = {"data": str(tmp_path / "d.npz"), "partition": "by-site", "rounds": 2}
    who = compare.contestants(["dp-fedgd"], base)
    runs = compare.lineup(who, base, [4.0], [1], compare.UNTOUCHED)
    made = compare.document(runs, base=base, tuning=compare.UNTOUCHED, command="")
    assert made["partition"] is None
    assert made["runs"][0]["per_client"] is None
    report.write(made, tmp_path)


def test_a_comparison_of_private_records_says_what_it_exposes(patients):
    """Labels by client and accuracies on training records were exact, and three seeds tested half of all records."""
    path = str(patients / "patients.csv")
    base = {"data": path, "label": "died", "clients": 3, "rounds": 2, "partition": "iid"}
    who = compare.contestants(["dp-fedgd"], base)
    told = []
    for values in (base, {**base, "public_data": True}):
        runs = compare.lineup(who, values, [4.0], [1, 2, 3], compare.UNTOUCHED)
        made = compare.document(runs, base=values, tuning=compare.UNTOUCHED, command="")
        tested = {tuple(resolve(Spec.of(run.values)).read_data().tested.tolist()) for run in runs}
        clients = [run["per_client"] for run in made["runs"]]
        told.append((made["partition"], clients, len(tested), made["exposed"], report.summary(made)))
    private, public = told
    assert private[:3] == (None, [None] * 3, 1)
    assert any("show this comparison to nobody who may not see the records." in line for line in private[4])
    assert public[2:4] == (3, "")
    assert list(public[0]) == ["1", "2", "3"]
    assert all(map(all, public[1]))


def test_a_chosen_run_that_spent_less_does_not_speak_for_the_others(monkeypatch):
    """Unequal clients and cohorts of two spend the whole budget. The last run is made with more noise than it must."""
    values = {"method": "dp-fedgd", "clients": 4, "rounds": 4, "epsilon": 8.0}
    partial = {"participation": "fixed:2", "trust": "secure-aggregation", "divisor": "client-mean"}
    whole = sweep.paid(values, {"lr": (1.0, 2.0)}, "count")["certificate"]
    part = sweep.paid({**values, **partial, "schedule_seed": 1}, {"lr": (1.0, 2.0)}, "count")["certificate"]
    for found in (whole, part):
        assert found["certified"]
        assert found["epsilon"] == pytest.approx(8.0, rel=1e-6)
    factor = calibration._account_factor
    monkeypatch.setattr(calibration, "_account_factor", lambda *facts: 1.1 * factor(*facts))
    less = sweep.paid(values, {"lr": (1.0, 2.0)}, "count")["certificate"]
    assert less["epsilon"] < 8.0 * 0.999
    assert not less["certified"]
    assert "up to ε = 8" in less["reasons"][-1]


def test_an_earlier_result_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = ["sweep", "--method", "dp-fedgd", "--clients", "4", "--rounds", "2", "--grid", "lr=0.5,2", "--out", "s"]
    comparison = ["compare", "--methods", "dp-fedgd", "--clients", "4", "--rounds", "2", "--epsilons", "8"]
    comparison += ["--seeds", "1"]
    assert main(sweep) == 0
    assert main([*comparison, "--out", "c"]) == 0
    for words, out, result in ((sweep, "s", "sweep.json"), ([*comparison, "--out", "c"], "c", "compare.json")):
        before = (tmp_path / out / result).read_bytes()
        capsys.readouterr()
        assert main(words) == 2
        assert f"--out: '{out}' already holds {result}; name another folder" in capsys.readouterr().err
        assert (tmp_path / out / result).read_bytes() == before
    assert main(comparison) == 0
    assert next(path.name for path in (tmp_path / "runs").iterdir()).startswith("compare-")


# ------------------------------------------------------------------------------------------- tuned within the budget

WITHIN = "dp-fedgd, tuned within the budget"


def tuned_within(base, how, runs=3, epsilons=(2.0, math.inf), methods=("dp-fedgd", "auto"), **more):
    who = compare.contestants(methods, base)
    searches = compare.paid_lineup(who, base, epsilons, [1, 2], how, runs=runs, **more)
    entrants = compare.lineup(who, base, epsilons, [1, 2], compare.UNTOUCHED)
    return compare.document(
        entrants, base=base, tuning=compare.UNTOUCHED, command="", paid=searches, pairs=[("auto", WITHIN)]
    )


def spent(document):
    return [run["certificate"]["epsilon"] for run in document["runs"] if run["epsilon"] is not None]


@pytest.fixture(scope="module")
def paid():
    return tuned_within(BASE, "count")


def test_a_row_tuned_within_the_budget_spends_what_the_others_spend(paid):
    assert [run["label"] for run in paid["runs"] if run["epsilon"]] == [
        label for label in ("dp-fedgd", WITHIN, "auto") for _ in (1, 2)
    ]
    assert spent(paid) == pytest.approx([2.0] * 6, rel=1e-6)
    assert max(spent(paid)) <= 2.0 * (1 + 1e-9)
    assert {run["label"] for run in paid["runs"] if run["epsilon"] is None} == {"dp-fedgd", "auto"}
    for run in paid["runs"]:
        if run["label"] == WITHIN:
            account = run["tuned_within_budget"]
            assert (account["how"], account["runs"], account["settings"]) == ("count", 3, 8)
            assert run["certificate"]["rounds"] == 3 * 4
            assert run["client_epsilon"] == [2.0] * 4
            assert run["bytes_up"] == 3 * 4 * 650 * 4
            assert len(run["accuracy"]) == 4
            assert run["seed"] in (1, 2)
    assert [(pair["a"], pair["b"], pair["epsilon"]) for pair in paid["pairs"]] == [("auto", WITHIN, 2.0)]


def test_a_search_whose_runs_each_spend_the_whole_budget_is_refused(monkeypatch):
    """The mutant: no run gives up a part of mu for the others."""
    monkeypatch.setattr(selection, "each", lambda mu, runs: mu)
    with pytest.raises(SordinoError, match="more than 2"):
        tuned_within(BASE, "count")


def test_the_report_says_which_rows_are_tuned_within_the_budget(paid, tmp_path):
    report.write(paid, tmp_path)
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert WITHIN in text
        assert "3 runs within the one budget (3 of 8 settings, drawn at random)" in text
        assert "covers every run of it, the choice and the chosen model" in text
        assert "2 methods on digits" in text
    chosen = {(row[0].text, row[4].text) for row in report.tuning(paid).rows}
    assert chosen == {(WITHIN, "3")}


def test_a_paid_row_can_be_made_again_by_its_command(paid, capsys):
    filed = next(run for run in paid["runs"] if run["label"] == WITHIN)
    assert main([*shlex.split(filed["command"])[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {key: filed["options"][key] for key in again["best"]} == again["best"]
    assert again["certificate"]["spec_sha256"] == filed["certificate"]["spec_sha256"]
    assert again["certificate"]["epsilon"] == filed["certificate"]["epsilon"]


def test_a_paid_search_sees_no_test_record_and_hands_out_its_own_model(monkeypatch):
    searched, tested = [], []
    search, run_many = private_tuning.search, compare.run_many

    def recorded(values, grid, dataset, *rest, **more):
        searched.append((dataset, search(values, grid, dataset, *rest, **more)))
        return searched[-1][1]

    def scored(specs, *rest, **more):
        tested.append(run_many(specs, *rest, **more))
        return tested[-1]

    monkeypatch.setattr(private_tuning, "search", recorded)
    monkeypatch.setattr(compare, "run_many", scored)
    tuned_within(BASE, "count", epsilons=(2.0,))
    assert len(searched) == 2
    for (dataset, chosen), (again,) in zip(searched, tested[1:], strict=True):
        assert torch.allclose(chosen.trained.theta, again.theta, atol=1e-5)
        whole = chosen.trained.resolved.read_data()
        assert len(dataset.y_train) + len(dataset.y_test) == len(whole.y_train)
        seen = {row.tobytes() for row in whole.x_test} - {row.tobytes() for row in whole.x_train}
        assert not seen & {row.tobytes() for part in (dataset.x_train, dataset.x_test) for row in part}


def test_searches_with_the_same_records_share_one_reading(monkeypatch):
    """Three budgets and two seeds: each seed has its own split, so two readings; rows stay in order."""
    who = compare.contestants(("dp-fedgd",), BASE)
    searches = compare.paid_lineup(who, BASE, (1.0, 2.0, 4.0), [1, 2], "count")
    read, ticks = [], []
    monkeypatch.setattr(compare.ResolvedSpec, "read_data", lambda self: read.append(self.seed) or self.seed)
    monkeypatch.setattr(compare, "_paid", lambda search, base, data, *_: {"values": search.values, "data": data})
    filed = compare._all_paid(searches, "accuracy", "cpu", ticks.append)
    assert read == [1, 2]
    assert sum(ticks) == 6
    assert [each["values"] for each in filed] == [search.values for search in searches]
    assert [each["data"] for each in filed] == [search.values["seed"] for search in searches]


def test_random_stopping_keeps_its_number_of_runs_out_of_a_comparison(tmp_path):
    made = tuned_within({**BASE, "trust": "trusted-server"}, "stopping", epsilons=(2.0,))
    for run in made["runs"]:
        if run["label"] == WITHIN:
            assert "runs" not in run["tuned_within_budget"]
            assert (run["bytes_up"], run["client_epsilon"]) == (None, [2.0] * 4)
            assert run["certificate"]["epsilon"] < 2.0, "the certificate of the one run that is shown"
            assert "random stopping" in run["certificate"]["reasons"][-1]
    report.write(made, tmp_path)
    assert "random number of runs" in (tmp_path / "report.md").read_text()


def test_public_records_choose_by_any_metric(patients):
    public = patients / "public.csv"
    public.write_text((patients / "patients.csv").read_text())
    base = {"data": str(patients / "patients.csv"), "label": "died", "clients": 3, "rounds": 3}
    made = tuned_within(base, "public", epsilons=(2.0,), public=str(public), metric="log_loss")
    assert spent(made) == pytest.approx([2.0] * 6, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--unit", "client"], "would both train and validate"),
        (["--set", "batch=poisson:16"], "the joint cost of k sampled runs is not calibrated"),
        (["--metric", "log_loss"], "use accuracy, or --charge-tuning public"),
        (["--epsilons", "inf"], "nothing to tune within a budget"),
        (["--methods", "auto"], "nothing to tune within a budget"),
        (["--charge-tuning", "stopping"], "trust: under untrusted-server"),
        (["--charge-tuning", "stoping"], "'stoping' is unknown"),
        (["--charge-tuning", "public"], "--public: give it together"),
        (["--charge-tuning", "no", "--paid-runs", "4"], "nothing is paid for"),
        (["--paid-runs", "0"], "--paid-runs: 0 must be at least 1"),
        (["--tune", "--tune-round", "2"], "--tune-round: a search within the budget chooses by the last round"),
        (["--only-tune"], "--only-tune: a search within the budget"),
    ],
)
def test_a_paid_row_that_is_not_proved_is_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "run_many", lambda *_, **__: pytest.fail("refuse before training"))
    assert main(["compare", "--methods", "dp-fedgd", "--rounds", "3", "--charge-tuning", "count", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_task_without_counts_of_correct_records_is_refused(patients, capsys):
    words = ["compare", "--data", str(patients / "dose.csv"), "--label", "y", "--methods", "dp-fedgd"]
    assert main([*words, "--charge-tuning", "count", "--out", str(patients / "out")]) == 2
    assert "labels that are quantities have no accuracy" in capsys.readouterr().err


def test_json_holds_rows_tuned_within_the_budget(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report.figures, "draw", lambda view, out: [])
    words = ["compare", "--methods", "dp-fedgd", "--clients", "3", "--rounds", "2", "--epsilons", "4", "--seeds", "1"]
    words += ["--preset", "paper-coarse", "--charge-tuning", "count", "--paid-runs", "2"]
    assert main([*words, "--out", str(tmp_path / "one"), "--json"]) == 0
    unpaid, row = json.loads(capsys.readouterr().out)["runs"]
    assert (unpaid["label"], row["label"]) == ("dp-fedgd", WITHIN)
    assert row["tuned_within_budget"]["epsilon"] == row["epsilon"] == unpaid["epsilon"] == 4.0
    assert main([*words, "--out", str(tmp_path / "two")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "tuned within the budget (dp-fedgd): paid for: 2 runs within the one budget (2 of 7 settings" in told
