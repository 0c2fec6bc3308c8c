"""The Python examples on pages that are not executed notebooks run as they stand."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if BLOCK.search(page.read_text()))


def test_the_pages_with_examples_are_found():
    assert {"start.md", "deep.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for code in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        exec(compile(code, page, "exec"), names)
