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
    for path in (ROOT / "results").glob("*.json"):
        document = json.loads(path.read_text())
        if path.name in (
            "demo_certificate.json",
            "checks.json",
            "audit.json",
            "audit_halved.json",
        ):  # what commands wrote
            continue
        assert {"command", "commit", "versions"} <= document["provenance"].keys(), path.name
        assert any(word in path.read_text() for word in ("samples", "runs", "seconds")), path.name


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
