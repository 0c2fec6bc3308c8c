"""Every figure that the README and the methods' page quote is recomputed from the raw samples in results/."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def readme():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_says_what_the_results_say(readme):
    for page in readme.PAGES:
        text = (ROOT / page).read_text()
        assert readme.rewritten(text) == text, "run: python benchmarks/readme.py"
    assert len(readme.FIGURE.findall(README)) >= 15


def test_a_changed_figure_is_noticed(readme):
    value, name = readme.FIGURE.findall(README)[0]
    assert readme.rewritten(README.replace(f"{value}<!--{name}-->", f"7{value}<!--{name}-->")) == README


def test_no_figure_goes_without_a_source():
    """Outside code, a percentage, a ratio or a rate is followed by the name of its figure."""
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    bare = re.findall(r"\d[\d.,]*(?<![.,])\s*(?:%|×(?!\s*\n?2,500)|million)", prose)
    allowed = {"20 clients ×"}
    assert [figure for figure in bare if figure not in allowed] == []


def test_results_say_where_they_come_from():
    results = ROOT / "results"
    for path in (*results.glob("*.json"), *results.glob("bench/*.json"), *results.glob("many_cpu/*.json")):
        document = json.loads(path.read_text())
        if path.name in (
            "demo_certificate.json",
            "checks.json",
            "checks_cuda.json",
            "audit.json",
            "audit_halved.json",
        ):  # what commands wrote
            continue
        assert {"command", "commit", "versions"} <= document["provenance"].keys(), path.name
        assert any(word in path.read_text() for word in ("samples", "runs", "seconds")), path.name


def test_figures_of_speed_name_their_architecture(readme):
    section = README.partition("## How fast")[2].partition("\n## ")[0]
    named = {name for _, name in readme.FIGURE.findall(section)} - {"growth", "microseconds"}
    arches = readme.architectures()
    assert arches
    assert {name.partition(" ")[2] for name in named} == set(arches)
    for arch in arches:
        assert arch in section.partition("<!--speed-->")[2].splitlines()[1], "the table's head"
        assert {f"{short} {arch}" for short in readme.speeds(arch)} - {f"run {arch}", f"import {arch}"} <= named
    for path in (ROOT / "results" / "bench").glob("*.json"):
        assert json.loads(path.read_text())["provenance"]["machine"] == path.stem


def test_a_second_architecture_gets_its_column(readme, tmp_path, monkeypatch):
    for name in ("bench", "many_cpu"):
        (tmp_path / "results" / name).mkdir(parents=True)
    bench = json.loads((ROOT / "results" / "bench" / "aarch64.json").read_text())
    many = json.loads((ROOT / "results" / "many_cpu" / "aarch64.json").read_text())
    (tmp_path / "results" / "bench" / "aarch64.json").write_text(json.dumps(bench))
    (tmp_path / "results" / "many_cpu" / "aarch64.json").write_text(json.dumps(many))
    bench["provenance"] |= {"machine": "x86_64", "cpu": "A Processor"}
    bench["raw"]["round_over_two_matmuls"]["samples"] = [2.0, 2.14, 9.0]
    (tmp_path / "results" / "bench" / "x86_64.json").write_text(json.dumps(bench))
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    head, _, first, *rest = readme.speed_table().splitlines()
    assert "[aarch64](results/bench/aarch64.json)" in head
    assert "[x86_64](results/bench/x86_64.json), A Processor" in head
    assert "2.14<!--round x86_64--> ×" in first
    assert "<!--round aarch64-->" in first
    (together,) = (line for line in rest if "64 at once" in line)
    assert "<!--together aarch64-->" in together, "and nothing where many.py did not run"
    assert "<!--together x86_64-->" not in together


def test_the_python_of_the_readme_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Certified: ε = 4" in done.stdout


def test_the_worked_method_of_contributing_passes_its_checks(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    code = "\n".join(blocks) + "\nassert all(r.passed for r in check('dp-fedavgm', method=fedavgm(), trials=8))\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
