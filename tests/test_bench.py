"""The guard of `make bench`, with made-up figures: nothing is measured here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sordino.rules import fisher

ROOT = Path(__file__).parents[1]


def loaded(name):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def guard():
    return loaded("guard")


@pytest.fixture
def path(tmp_path, guard, monkeypatch):
    monkeypatch.setattr(guard.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "bench").mkdir()
    return tmp_path / "bench" / "x86_64.json"


def settle(guard, path, old, new, accept=False):
    document = {**new, "provenance": {"machine": "x86_64"}, "raw": {"samples": [1, 2]}}
    return guard.settle(path, document, old, new, accept), document


@pytest.mark.parametrize(
    ("new", "grew"),
    [(2.0, False), (1.0, False), (2.2999, False), (2.3001, True), (40.0, True), (float("nan"), True), (None, True)],
)
def test_a_ratio_may_grow_by_fifteen_percent(guard, new, grew):
    (row,) = guard.compare({"a": 2.0}, {} if new is None else {"a": new})
    assert row.limit == pytest.approx(2.3)
    assert row.grew is grew


def test_what_holds_takes_the_place_of_the_old_figures(guard, path, capsys):
    path.write_text("old")
    status, document = settle(guard, path, {"a": 2.0, "b": 0.01}, {"a": 2.2, "b": 0.005, "c": 7.0})
    out = capsys.readouterr().out
    assert status == 0
    assert json.loads(path.read_text()) == document
    for shown in ("committed", "new", "limit (+15%)", "2.2", "2.3", "0.005", "0.0115", "x86_64"):
        assert shown in out
    assert "grew" not in out


def test_a_regression_leaves_the_committed_file_and_names_another(guard, path, capsys):
    path.write_text("old")
    status, document = settle(guard, path, {"a": 2.0, "b": 1.0}, {"a": 2.4, "b": 1.0})
    out = capsys.readouterr().out
    assert status == 1
    assert path.read_text() == "old"
    (kept,) = (path.parents[1] / "temporary").iterdir()
    assert json.loads(kept.read_text()) == document
    assert str(kept) in out
    assert "grew by more than 15%: a." in out
    assert "--accept" in out


def test_what_is_accepted_is_written(guard, path, capsys):
    path.write_text("old")
    status, document = settle(guard, path, {"a": 2.0}, {"a": 2.4}, accept=True)
    assert status == 0
    assert json.loads(path.read_text()) == document
    assert list((path.parents[1] / "temporary").iterdir()) == []
    assert "grew" in capsys.readouterr().out, "it is told all the same"


def test_an_architecture_without_figures_gets_its_first(guard, path, capsys):
    status, document = settle(guard, path.with_name("riscv64.json"), {}, {"a": 9.0})
    assert status == 0
    assert json.loads(path.with_name("riscv64.json").read_text()) == document
    assert "riscv64 has no committed figures" in capsys.readouterr().out


def test_figures_are_those_of_the_last_commit_and_of_the_same_file(guard, tmp_path):
    """Else three runs that each grow by a tenth would pass, one after another."""
    path = tmp_path / "results" / "bench" / "x86_64.json"
    assert guard.committed(path) is None
    path.parent.mkdir(parents=True)
    path.write_text('{"a": 1.0}')
    assert guard.committed(path) == {"a": 1.0}, "without git: the file"

    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    assert guard.committed(path) is None, "nothing is committed yet"
    git("add", "-A")
    git("commit", "-q", "-m", "figures")
    path.write_text('{"a": 1.1}')
    assert guard.committed(path) == {"a": 1.0}
    assert guard.committed(path.with_name("aarch64.json")) is None


def test_the_architecture_has_one_name(guard, monkeypatch):
    for said, name in (("arm64", "aarch64"), ("AMD64", "x86_64"), ("x86_64", "x86_64"), ("aarch64", "aarch64")):
        monkeypatch.setattr(guard.platform, "machine", lambda said=said: said)
        assert guard.architecture() == name
        assert guard.place("bench") == ROOT / "results" / "bench" / f"{name}.json"
        assert guard.machine()["machine"] == name
    assert guard.cpu_model()


def test_only_ratios_are_compared(guard):
    bench = loaded("bench")
    document = json.loads((ROOT / "results" / "bench" / "aarch64.json").read_text())
    found = guard.ratios_of(document, bench.RATIOS)
    assert found.keys() == set(bench.RATIOS)
    assert {name for name in document if "_over_" in name} == found.keys(), "each ratio that is measured"
    assert guard.ratios_of(None, bench.RATIOS) == {}


def test_fewer_times_faster_is_growth(guard):
    old = guard.together_over_one_by_one({"times_faster": {"dp-fedgd": 2.0, "auto": 2.0}})
    new = guard.together_over_one_by_one({"times_faster": {"dp-fedgd": 1.8, "auto": 1.7}})
    assert [row.grew for row in guard.compare(old, new)] == [False, True]
    assert guard.together_over_one_by_one(None) == {}
    document = json.loads((ROOT / "results" / "many_cpu" / "aarch64.json").read_text())
    assert len(guard.together_over_one_by_one(document)) == 3


def measured(monkeypatch, bench, guard, path, **values):
    """bench.main with every measurement replaced by a number."""
    names = [*bench.RATIOS, "secure_normals_per_second"]
    for name in names:
        result = {"value": values.get(name, 1.0), "samples": [1.0]}
        fake = lambda result=result: result  # noqa: E731
        fake.__name__ = name
        monkeypatch.setattr(bench, name, fake)
    monkeypatch.setattr(
        bench, "whole_run", lambda: ({"value": 3.0, "samples": [3.0]}, {"value": 1.0, "samples": [1.0]})
    )
    monkeypatch.setattr(bench.guard, "place", lambda name: path)


def test_the_benchmark_exits_by_the_guard(guard, path, monkeypatch, capsys):
    bench = loaded("bench")
    monkeypatch.setattr(bench.guard.tempfile, "tempdir", str(path.parents[1] / "temporary"))
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    measured(monkeypatch, bench, guard, path)
    assert bench.main() == 0
    first = json.loads(path.read_text())
    assert first["provenance"]["machine"] == guard.architecture()
    assert first["provenance"]["cpu"]
    measured(monkeypatch, bench, guard, path, secure_normals_per_second=1e-3)
    assert bench.main() == 0, "a rate is no ratio"
    before = path.read_text()
    measured(monkeypatch, bench, guard, path, fednew_over_product=1.2)
    assert bench.main() == 1
    assert path.read_text() == before
    monkeypatch.setattr(sys, "argv", ["bench.py", "--accept"])
    assert bench.main() == 0
    assert json.loads(path.read_text())["fednew_over_product"] == 1.2
    assert "fednew_over_product" in capsys.readouterr().out


def test_make_bench_fails_where_either_part_fails():
    """Both parts run, and either's status is make's."""
    recipe = (ROOT / "Makefile").read_text().partition("\nbench: $(READY)\n")[2].partition("\n\n")[0]
    for first, second, status in ((0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)):
        text = recipe.replace("\t@", "\t").replace("$(BIN)/python benchmarks/bench.py", f"(exit {first})")
        text = text.replace("$(BIN)/python benchmarks/many.py", f"(exit {second})").replace("$(ACCEPT)", "")
        lines = [line for line in text.replace("$$", "$").splitlines() if not line.strip().startswith("#")]
        assert subprocess.run(["sh", "-c", "\n".join(lines)], check=False).returncode == status


def test_compacting_a_table_changes_no_figure_that_pages_show():
    digits = loaded("compact").digits
    assert digits({"ours": 36.6449, "published": 30.0}, "ours") == 36.64
    assert digits({"ours": 36.7499}, "ours") == 36.7499, "36.75 is shown as 36.8"
    assert digits({"ours": 84.4522, "published": 82.4}, "ours") == 84.4522, "the difference would be 2.0, and is 2.1"
    assert digits({"ours": 0.12345, "digits": 3}, "ours") == 0.12345


def test_compacting_names_the_file_of_settings_that_a_larger_table_holds():
    settings = loaded("compact").settings
    held = json.loads((ROOT / "results" / "paper" / "fednew-fashion.json").read_text(encoding="utf-8"))["tuning"]
    assert settings(held) == held, "a table keeps its own"
    part = {**held, "settings": held["settings"][:2]}
    assert settings(part)["file"] == "results/paper/fednew-fashion.json"
    assert "settings" not in settings(part)
    other = {**held, "settings": [{**held["settings"][0], "score": 0.0}]}
    assert settings(other) == other
    assert settings(None) is None


def test_compacting_estimation_names_columns_once_and_keeps_every_point():
    compact, points_of = loaded("compact"), loaded("estimation").points_of
    methods = {"fedsgd": {"error": 0.25, "se": 0.0123, "median": 0.2}}
    simulated = {"model": "logistic", "rate": 0.1, "rate_with_log": 0.2, "torch": "2", "methods": methods}
    simulated["predicted"] = {"fedsgd": {"total": 0.24, "bias": 0.0}}
    mnist = {"task": "mnist-binary", "methods": {"fedsgd": {"accuracy": 0.9, "se": 0.00345}}}
    document = {"points": [simulated, {**simulated, "rate_with_log": None}, mnist]}
    held = compact.estimation(document)
    assert compact.estimation(held) == held
    short = {
        "model": "logistic",
        "rate": 0.1,
        "rate_with_log": 0.2,
        "methods": {"fedsgd": {"error": 0.25, "se": 0.012}},
    }
    short["predicted"] = {"fedsgd": {"total": 0.24}}
    mnist["methods"]["fedsgd"]["se"] = 0.0034
    assert points_of(held) == [short, {**short, "rate_with_log": None}, mnist]
    assert points_of(document) == document["points"]


def test_compacting_subsampling_keeps_what_the_page_reads():
    compact = loaded("compact")
    row = {"epsilon": 1.0, "mean": 0.6, "noise_multiplier": 2.0, "record_gradients": 7, "milliseconds_per_round": 3.0}
    rows = compact.subsampled({"rows": [row, {**row, "epsilon": 5.0}]})["rows"]
    assert rows[0] == {"epsilon": 1.0, "mean": 0.6, "noise_multiplier": 2.0, "record_gradients": 7}
    assert rows[1] == {"epsilon": 5.0, "mean": 0.6}


def test_compacting_checks_names_columns_once_and_keeps_problems():
    compact = loaded("compact")
    report = dict.fromkeys(compact.CHECK, 1) | {"engines_max_diff": 0.0, "problems": []}
    document = compact.checks([report, report | {"problems": ["it fails"]}])
    assert document["rows"] == [[1] * len(document["columns"])] * 2
    assert document["problems"] == ["it fails"]
    assert compact.checks(document) == document


def test_the_page_of_networks_follows_from_the_finished_runs():
    networks = loaded("networks")
    shared = {"data": "mnist", "rounds": 100}
    done = [
        {**shared, "method": method, "epsilon": epsilon, "lr": lr, "scores": [score, score + 1.0]}
        for method, lr, score in (("auto", None, 90.0), ("dp-fedgd", None, 88.0), ("dp-fedgd", 0.1, 89.0))
        for epsilon in networks.EPSILONS
    ]
    cells = networks.cells([*done, {**done[-1], "lr": 0.3, "scores": [91.0, 91.0]}])
    assert cells["mnist"]["auto"] == [90.5, 0.7] * 2
    assert cells["mnist"]["dp-fedgd (tuned)"] == [89.5, 0.7, 0.1, 91.0, 0.0, 0.3]
    document = {"provenance": {"command": "python"}, "rounds": 100, "refused": ["dp-ftrl"], "earlier": [], **cells}
    assert "earlier calls" not in networks.page(document)
    page = networks.page({**document, "earlier": ["mnist dp-fedgd"]})
    assert "earlier calls the others: `mnist auto`." in page
    assert "| `auto` | 90.5 ± 0.7 | 90.5 ± 0.7 |" in page
    assert "| `dp-fedgd`, tuned | 89.5 ± 0.7 (step 0.1) | 91.0 ± 0.0 (step 0.3) |" in page
    assert "the best other untuned method is `dp-fedgd`; `auto` differs by +2.0 points" in page
    assert "SST-2" not in page, "nothing of it was run"
    assert "`dp-ftrl`." in page
    stored = ROOT / "results" / "networks.json"
    if stored.exists():
        assert networks.page(json.loads(stored.read_text())) == stored.with_suffix(".md").read_text()


def test_the_largest_eigenvalue_is_that_of_the_whole_hessian():
    spectra, rng = loaded("spectra"), np.random.default_rng(0)
    u, p = rng.normal(size=(40, 5)), rng.dirichlet(np.ones(3), size=40)
    whole = sum(np.kron(np.outer(a, a), np.diag(b) - np.outer(b, b)) for a, b in zip(u, p, strict=True)) / 40
    assert spectra.largest(u, p) == pytest.approx(np.linalg.eigvalsh(whole)[-1], rel=1e-2)


def test_the_rule_that_follows_from_noise_is_the_momentum_form_where_nothing_follows():
    structures, theta = loaded("structures"), torch.zeros(3, 7).double()
    gs = torch.randn(20, 3, 7, generator=torch.Generator().manual_seed(0)).double()
    facts = SimpleNamespace(aggregate_std=0.5, shapes=((7,),))

    def last(rule):
        state = rule.init(theta, facts, ())
        for t, g in enumerate(gs):
            step, state = rule.update(g, state, theta, t)
        return step, state

    fixed = fisher(rho=0.3, beta=0.9, apply_to="momentum")
    torch.testing.assert_close(last(structures.self_tuned(False, False, rho=0.3, beta=0.9))[0], last(fixed)[0])
    _, state = last(structures.self_tuned(True, True, rho=0.3, beta=0.9))
    assert (state.energy == 7 * 0.25).all()
    assert ((state.noise > 0) & (state.noise <= state.doubt) & (state.doubt < state.energy)).all()


def test_the_page_of_structures_is_that_of_its_figures():
    stored = ROOT / "results" / "structures.json"
    assert loaded("structures").page(json.loads(stored.read_text())) == stored.with_suffix(".md").read_text()


def test_the_page_of_spectra_is_that_of_its_figures():
    stored = ROOT / "results" / "spectra.json"
    assert loaded("spectra").page(json.loads(stored.read_text())) == stored.with_suffix(".md").read_text()


def test_compacting_a_study_of_a_cnn_joins_seeds_and_its_runs_can_be_taken_apart_again():
    compact, cnn = loaded("compact"), loaded("cnn")
    runs = [
        {"label": label, "clients": 5, "samples": 40, "seeds": [seed], "scores": [seed / 10], "seconds": 1.0}
        for label in ("a", "b")
        for seed in (2, 1)
    ]
    held = compact.cells(
        {"runs": [*runs, {"label": "a", "clients": 5, "samples": 40, "seeds": [3], "error": "no memory"}]}
    )
    assert held["runs"][0] == {"label": "a", "clients": 5, "samples": 40, "seeds": [1, 2], "scores": [0.1, 0.2]}
    apart = cnn.one_by_one(held["runs"])
    assert sorted(run["scores"][0] for run in apart) == [0.1, 0.1, 0.2, 0.2]
    assert {len(run["seeds"]) for run in apart} == {1}
