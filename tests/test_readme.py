"""The README: its length, its snippet, its table, its links; and the worked method of CONTRIBUTING."""

import re
from pathlib import Path

import pytest

from sordino.errors import SordinoError
from tests.methods.test_documentation import problems
from tests.support import forks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def test_it_is_short_and_has_no_hidden_text():
    assert len(README.splitlines()) <= 120
    assert "<!--" not in README
    assert len(re.findall(r"(?m)^!\[", README)) == 1
    assert len(re.findall(r"(?m)^\| ?-", README)) == 1


def test_it_says_how_long_the_tests_take_as_contributing_does():
    (told,) = re.findall(r"(?m)^make test +# run the tests: (about \w+ minutes) on two cores$", README)
    assert f"`make test` ({told} on two quiet cores)" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_its_links_lead_somewhere():
    links = LINK.findall(README)
    assert len(links) >= 5
    for link in links:
        target = link.partition("#")[0]
        assert re.match(r"https://", target) or (ROOT / target).is_file(), link


def test_the_python_of_the_readme_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    done = forks.run(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Certified: ε = 4" in done.stdout


def test_the_worked_method_of_contributing_is_documented_as_all_methods_are():
    first = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    names = {}
    exec(first[1], names)
    assert problems(names["fedavgm"]) == []
    with pytest.raises(SordinoError, match=r"momentum: 1.8 must lie in \[0, 1\)"):
        names["fedavgm"](momentum=1.8)


def test_the_worked_method_of_contributing_passes_its_checks(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    code = "\n".join(blocks) + "\nassert all(r.passed for r in check('dp-fedavgm', method=fedavgm(), trials=8))\n"
    done = forks.run(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
