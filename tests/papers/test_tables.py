"""The papers' tables: all are there, and what is ours stands beside the right figure."""

import json
import re
import types
from pathlib import Path

import numpy as np
import pytest

from papers import catalog, fednew, fednew_time, smoke, sofim, tables
from papers.__main__ import main

ROWS = {
    "sofim-2": 214,
    **{f"sofim-{k}": 252 for k in (3, 4, 5, 6)},
    "sofim-7": 52,
    "sofim-8": 196,
    "sofim-9": 196,
    "sofim-10-11": 24,
    "sofim-12": 28,
    "sofim-13": 20,
    "sofim-14": 20,
    "sofim-15-16": 128,
    "fednew-5": 180,
    "fednew-8": 180,
    "fednew-10": 180,
    "fednew-11": 144,
    "adamw_table10": 24,
    "adamw_table11": 16,
    "adamw_table12": 8,
    "adamw_table14": 8,
    "adamw_table18": 7,
    "adamw_table19": 4,
    "adamw_table20": 6,
}

ROOT = Path(__file__).parents[2]


def call(capsys, *words):
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out


@pytest.fixture
def features(tmp_path, monkeypatch):
    """Made-up features by the name of the real ones, and runs of two rounds."""
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    y, y_test = np.arange(300) % 10, np.arange(50) % 10
    centres = rng.standard_normal((10, 5))
    x, x_test = (centres[each] + 0.3 * rng.standard_normal((len(each), 5)) for each in (y, y_test))
    np.savez(tmp_path / "cifar10_resnet20.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    for module in (sofim, fednew):
        monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setitem(sofim.BASE, "rounds", 2)
    return tmp_path


# ---------------------------------------------------------------------------------------------------------- published


def test_every_published_table_loads_whole():
    found = {path.stem: len(tables.published(path.stem)) for path in tables.PUBLISHED.glob("*.csv")}
    assert found == ROWS


def test_every_table_has_a_preset():
    names = set(catalog.tables())
    assert {f"sofim-{k}" for k in range(3, 17)} <= names
    assert {
        f"fednew-{k}" for k in (5, 8, 10, 11, "synthetic", "fashion", "cifar", "cifar-client", "alpha-rho", "time")
    } | {"fednew-eigenvalues"} <= names
    assert {f"adamw-{k}" for k in (10, 11, 12, 14, 18, 19, 20)} <= names
    assert {f"limits-{k}" for k in (1, *range(3, 12), 13, 15, 16)} <= names
    for table in catalog.tables().values():
        assert (table.needs is None) == (table.source == "")


def test_settings_come_with_the_package():
    """For every method and budget of table 3, where each message is seen and where sums are."""
    for part in sofim.BOTH:
        label = "dp-scaffold" if part.world is sofim.SEEN else "dp-fedsofim (momentum)"
        tuning = tables.TableRequest(catalog.tables()["sofim-3"]).tuning(part.committed)
        settings = tables.chosen(tuning)
        assert {(label, epsilon) for epsilon in (0.5, 1.0, 5.0, 10.0)} <= settings.keys()
        assert tuning.get("round") == (10 if part.round == sofim.EARLY else None)
        assert len(settings) == len(tuning["settings"]), "one setting per method and budget"


def test_the_printed_totals_of_table_13_are_wrong():
    """Rows add up, and to PathMNIST's 89,996 training records; the printed total is 96,844."""
    rows = tables.published("sofim-13")
    assert sum(int(row["printed_total"]) for row in rows) == 89_996
    assert all(sum(int(row[f"class_{k}"]) for k in range(9)) == int(row["printed_total"]) for row in rows)


# -------------------------------------------------------------------------------------------------------- differences


def test_the_difference_is_ours_less_theirs():
    figure = tables.against([60.0, 62.0], 58.5, 0.7)
    assert figure["ours"] == 61.0
    assert figure["std"] == pytest.approx(2**0.5, abs=1e-4)
    assert figure["difference"] == 2.5
    assert tables.cell(figure) == "61.0 ± 1.4 (58.5, +2.5)"
    assert tables.cell(tables.against([60.0])) == "60.0"


def test_lines_that_differ_in_one_label_are_one_row():
    lines = [
        {"labels": {"method": method, "epsilon": epsilon}, "rounds": {"70": tables.against([value], said)}}
        for method, epsilon, value, said in (("A", 1.0, 50.0, 40.0), ("A", 5.0, 60.0, 65.0), ("B", 5.0, 70.0, None))
    ]
    head, rows = tables.pivot(lines, "epsilon")
    assert head == ["method", "epsilon 1", "epsilon 5"]
    assert rows == [["A", "50.0 (40.0, +10.0)", "60.0 (65.0, -5.0)"], ["B", "", "70.0"]]


def test_published_figures_meet_their_rows():
    rows = tables.published("sofim-3")
    assert sofim.printed_figures(rows, method="DP-FedSOFIM", epsilon=10.0)[70] == (68.56, 0.05)
    assert sofim.printed_figures(rows, method="DP-FedGD", epsilon=0.5)[10] == (33.98, 2.76)
    assert fednew._printed_figure(tables.published("fednew-8"), "DP-FedNew", 10, 0.1) == (pytest.approx(82.4), None)


# ------------------------------------------------------------------------------------------------------- command line


def test_what_is_not_at_hand_is_said_and_is_no_error(capsys, features):
    status, out = call(capsys, "sofim-4", "--data-dir", str(features))
    assert status == 0
    assert "missing data" in out
    assert "pathmnist_resnet20.npz" in out
    assert "sordino features --data pathmnist" in out
    assert call(capsys, "sofim-99")[0] == 2


def test_all_tables_are_listed(capsys, features):
    status, out = call(capsys, "--data-dir", str(features), "--json")
    hand = {row["table"]: row["at_hand"] for row in json.loads(out)}
    assert status == 0
    assert hand.keys() == catalog.tables().keys()
    assert (hand["sofim-3"], hand["sofim-4"], hand["fednew-synthetic"], hand["fednew-8"]) == (True, False, True, False)


@pytest.mark.parametrize("name", ["sofim-3", "sofim-7", "sofim-10", "sofim-12", "sofim-15"])
def test_a_table_is_run_and_written(capsys, features, name):
    flags = ["--data-dir", str(features), "--out", str(features / "out"), "--seeds", "1"]
    flags += ["--epsilons", "1"] if name != "sofim-7" else []
    status, out = call(capsys, name, *flags)
    assert status == 0
    assert "published" in out
    found = json.loads((features / "out" / f"{name}.json").read_text())
    assert str(features) not in json.dumps(found), "where data lie is nobody's business"
    assert found["command"].startswith(f"python -m papers {name} --data-dir DIR")
    page = (features / "out" / f"{name}.md").read_text()
    assert page.startswith(f"# {name}: ")
    lines = found["lines"]
    assert all(line["settings"] for line in lines)
    if name == "sofim-3":
        methods = [line["labels"]["method"] for line in lines]
        assert (
            methods.count("DP-FedSOFIM (momentum)") == 4
        )  # each message seen or sums alone; tuned for 10 or 70 rounds
        assert methods.count("DP-SCAFFOLD") == 2  # not proved for sums
        early = [line for line in lines if line["labels"]["tuned for"] == "round 10"]
        assert 2 * len(early) == len(lines)
        assert all("bias_correction" in line["settings"] for line in lines if "SOFIM" in line["labels"]["method"])
    if name == "sofim-10":
        steps = {(line["labels"]["part"], line["labels"]["step"]) for line in lines}
        assert {("grad_only", "lr"), ("grad_only", "lr / rho"), ("full (momentum)", "lr / rho")} <= steps
    if name == "sofim-15":
        assert {"chi2", "p"} <= lines[0]["rounds"]["2"]["test"].keys()


@pytest.mark.parametrize("name", ["sofim-3", "sofim-8", "sofim-10", "sofim-12", "sofim-14", "sofim-15"])
def test_no_budget_that_was_asked_for_is_dropped_in_silence(capsys, features, name):
    if name == "sofim-14":
        rows = [[int(row[f"class_{k}"]) for k in range(10)] for row in tables.published(name)]
        y = np.repeat(np.arange(10), np.sum(rows, axis=0))
        x = np.eye(10)[y]
        np.savez(features / "cifar10_resnet20.npz", x_train=x, y_train=y, x_test=x[::500], y_test=y[::500])
    flags = ["--data-dir", str(features), "--out", str(features / "out"), "--seeds", "1", "--epsilons", "1,2,inf"]
    assert call(capsys, name, *flags)[0] == 0
    found = json.loads((features / "out" / f"{name}.json").read_text())
    lines = [line for line in found["lines"] if line["labels"]["epsilon"] != "any"]
    where = {line["labels"].get("noise") for line in lines}
    for noise in where:
        has = {line["labels"]["epsilon"] for line in lines if line["labels"].get("noise") == noise}
        if noise == "secure-aggregation":
            assert has == {1.0}
            assert f"left out under {noise}, for want of settings: epsilon 2, ∞" in found["notes"]
        else:
            assert has == {1.0, 2.0, "inf"}
    assert any(re.search("has no epsilon 2, ∞", note) for note in found["notes"])
    for line in lines:
        last = list(line["rounds"].values())[-1]
        assert last["published"] is None or line["labels"]["epsilon"] == 1.0
        if name != "sofim-15":
            assert line["certified"] == ("no: no noise" if line["labels"]["epsilon"] == "inf" else "yes")
    assert sofim.SILENT in found["notes"]


@pytest.mark.parametrize("name", ["sofim-3", "sofim-10", "sofim-12", "sofim-15"])
def test_a_budget_without_settings_is_refused(capsys, features, name):
    assert call(capsys, name, "--data-dir", str(features), "--out", str(features), "--epsilons", "3.3")[0] == 2


def test_a_partition_is_described():
    y, whose = np.array([0, 0, 1, 1, 0, 1, 0, 0]), np.array([0, 0, 0, 0, 1, 1, 2, 2])
    shape = sofim._shape(y, whose, 2)
    assert shape["smallest client"] == 2
    assert shape["classes absent, mean"] == pytest.approx(1 / 3)
    assert shape["KL of a client's labels from uniform, mean"] == pytest.approx(np.log(2) / 3)


def test_dp_fednew_tunes_runs_and_marks_what_is_not_certified(capsys, features, monkeypatch):
    rng = np.random.default_rng(0)
    for name, many in (("a9a", 120), ("a9a.t", 40)):
        rows = [f"{'+-'[k % 2]}1 {1 + k % 2}:1 {rng.integers(3, 124)}:1" for k in range(many)]
        (features / name).write_text("\n".join(rows) + "\n")
    for key, value in (("USERS", 6), ("LIVES_AT", 4)):
        monkeypatch.setattr(fednew, key, value)
    monkeypatch.setattr(fednew, "GRIDS", {k: {n: v[:1] for n, v in g.items()} for k, g in fednew.GRIDS.items()})
    table = catalog.tables()["fednew-8"]
    table.make.keywords["clients"] = (4,)
    try:
        flags = ["--data-dir", str(features), "--out", str(features / "out"), "--epsilons", "1", "--seeds", "1"]
        assert call(capsys, "fednew-8", *flags)[0] == 0
        found = json.loads((features / "out" / "fednew-8.json").read_text())
        again = [*flags, "--settings", str(features / "out" / "fednew-8.json")]
        assert call(capsys, "fednew-8", *again)[0] == 0
    finally:
        table.make.keywords["clients"] = (10, 100, 250, 500)
    certified = {tuple(line["labels"][k] for k in ("level", "method", "noise", "certified")) for line in found["lines"]}
    assert ("record", "DP-FedNew", "secure-aggregation", "no") in certified
    assert ("record", "DP-FedNew without duals", "secure-aggregation", "yes") in certified
    assert ("record", "DP-FedNew", "untrusted-server", "yes") in certified
    assert ("client", "DP-Scaffold", "secure-aggregation", "no") in certified
    assert all(
        line["settings"].get("uncertified", False) == (line["labels"]["certified"] == "no") for line in found["lines"]
    )


def trained(scores, seconds):
    """A run of which only curves count."""
    run = types.SimpleNamespace(resolved=types.SimpleNamespace(options={}), plan=types.SimpleNamespace(sizes=(1, 1)))
    run.scores, run.cpu_seconds = dict(enumerate(scores, 1)), dict(enumerate(seconds, 1))
    return run


def test_a_method_reaches_both_when_its_mean_equals_the_best_last_accuracy():
    runs = {
        "DP-FedGD": [trained((0.2, 0.5, 0.7), (1, 2, 4)), trained((0.2, 0.5, 0.7), (2, 4, 8))],
        "DP-Scaffold": [trained((0.4, 0.5, 0.8), (3, 6, 9))] * 2,
        "DP-FedNew, cg": [trained((0.7, 0.7, 0.9), (8, 16, 24)), trained((0.8, 0.9, 0.9), (16, 32, 48))],
        "DP-FedNew-FC": [trained((0.7, 0.75, 0.79), (1, 2, 3))] * 2,
    }
    cells = {
        (line["labels"]["method"], line["labels"]["measure"]): line["rounds"]
        for line in fednew_time.compared(1.0, runs)
    }
    assert cells["DP-FedNew, cg", "reaches both"]["3"]["ours"] == 2  # 0.7 and 0.9 after two rounds
    assert cells["DP-FedNew, cg", "times DP-FedGD"]["3"]["samples"] == [6.0, 6.0]  # within a seed
    assert cells["DP-FedNew, cg", "times DP-FedGD until then"]["3"]["samples"] == [4.0, 4.0]
    assert ("DP-FedNew-FC", "reaches both") not in cells, "0.79 is below DP-Scaffold's 0.8"
    assert ("DP-Scaffold", "reaches both") not in cells
    assert cells["DP-FedGD", "seconds"]["3"]["ours"] == 6.0


def test_times_are_written_beside_accuracies_and_name_the_file_of_their_settings(capsys, features):
    (features / "fashion_mnist_resnet44.npz").write_bytes((features / "cifar10_resnet20.npz").read_bytes())
    options = {"DP-FedGD": {"lr": 1.0}, "DP-FedNew": {"lr": 1.0, "solver": "cg"}}
    settings = [
        {"method": f"{name}, record level, secure-aggregation", "epsilon": 1.0, "options": chosen, "score": 0.5}
        for name, chosen in options.items()
    ]
    chosen_before = {"how": "grid", "paid": "no", "validation": "10%"}
    (features / "settings.json").write_text(json.dumps({**chosen_before, "settings": settings}))
    flags = ["--data-dir", str(features), "--out", str(features / "out"), "--seeds", "2", "--epsilons", "1"]
    flags += ["--methods", "dp-fedgd,dp-fednew", "--settings", str(features / "settings.json")]
    assert call(capsys, "fednew-time", *flags)[0] == 0
    found = json.loads((features / "out" / "fednew-time.json").read_text())
    assert found["tuning"] == {**chosen_before, "file": str(features / "settings.json")}
    lines = {(line["labels"]["method"], line["labels"]["measure"]): line for line in found["lines"]}
    cg, built = (lines[f"DP-FedNew, {how}", "accuracy"] for how in ("cg", "Hessians"))
    assert cg["rounds"] == built["rounds"], "both solvers find the same directions"
    assert built["settings"]["solver"] == "direct"
    assert built["settings"]["clients"] == 50
    assert all(line["rounds"]["2"]["ours"] > 0 for (_, measure), line in lines.items() if measure == "seconds")


# -------------------------------------------------------------------------------------------------------------- smoke


def smoked(*names):
    known = catalog.tables()
    return smoke.run([known[name] for name in names], lambda n: None)


def test_presets_run_on_stand_ins_for_two_rounds():
    rows = smoked("sofim-3", "sofim-12")
    assert [row["outcome"] for row in rows] == ["ran", "ran"]
    assert all(row["runs"] >= row["lines"] > 0 for row in rows)
    (row,) = smoked("fednew-time")  # several lines per run
    assert row["outcome"] == "ran"
    assert row["lines"] > row["runs"] > 0


def test_eigenvalues_are_those_of_the_models_of_the_lines(tmp_path):
    table = catalog.tables()["fednew-eigenvalues"]
    smoke.prepare(table, tmp_path)
    request = tables.TableRequest(table, str(tmp_path), seeds=1, clients=(100,), rounds=2)
    lines = fednew.eigenvalues(request).lines
    assert [each["labels"]["measure"] for each in lines[:3]] == [
        "accuracy",
        "λ_max of clipped H_i",
        "λ_max before clipping",
    ]
    assert len(lines) == 3 * len(fednew.BEST_DAMPING)
    for accuracy, clipped, whole in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert set(accuracy["rounds"]) == set(clipped["rounds"]) == set(whole["rounds"]) == {"1", "2"}
        assert 0 < clipped["rounds"]["2"]["ours"] <= min(1.0, whole["rounds"]["2"]["ours"])
    alpha, rho = fednew.BEST_DAMPING[0]
    values = fednew._damped(request, fednew.DUALS, 100, alpha, rho)
    want = tables.Want({}, values, {})
    (run,) = tables.attempt(request, [want], [1], split=1)
    records = run.resolved.records(request.dataset)
    shards = [records.shard(client) for client in range(100)]
    dense = [run.model.curvature_sum(run.theta, shard, 1.0) / len(shard.x) for shard in shards]
    mean = np.mean([float(np.linalg.eigvalsh(H.double().numpy())[-1]) for H in dense])
    assert lines[1]["rounds"]["2"]["ours"] == pytest.approx(mean, abs=1e-4)


def test_methods_limit_a_table_of_dp_fednew_to_their_variants():
    who = fednew._of_methods(tables.TableRequest(None, methods=("dp-fedfc", "dp-fednew-fc")), fednew.EVERYONE)
    assert {each.method for each in who} == {"dp-fedfc", "dp-fednew-fc"}
    assert len(who) == 4
    assert fednew._of_methods(tables.TableRequest(None), fednew.EVERYONE) == list(fednew.EVERYONE)


def test_a_preset_that_fails_is_a_row_and_not_a_traceback(monkeypatch):
    def broken(request):
        raise KeyError("a column")

    table = catalog.tables()["sofim-3"]._replace(make=broken)
    (row,) = smoke.run([table], lambda n: None)
    assert row["outcome"] == "KeyError: 'a column'"


def test_smoke_needs_a_table_or_all(capsys):
    assert main(["none", "--smoke"]) == 2


@pytest.mark.soak
@pytest.mark.parametrize("name", list(catalog.tables()))
def test_every_preset_runs_on_stand_ins(name):
    pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    (row,) = smoked(name)
    assert row["outcome"] == "ran"
    assert row["lines"] > 0
    printed = {"adamw-18": 4, "adamw-19": 1, "adamw-20": 1}  # commands, which were run
    printed |= {"adamw-10": 1, "adamw-11": 1, "adamw-12": 1, "adamw-14": 1}  # rows that were trained
    assert row["runs"] == printed.get(name, row["runs"])
