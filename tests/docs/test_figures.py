"""Every figure on the site and in the README is recomputed from results/ by docs/figures.py."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
WRITTEN_BY_COMMANDS = ("demo_certificate.json", "checks_cuda.json", "audit_halved.json")


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def claims(figures):
    return figures.claims()


def test_sentences_say_what_the_results_say(figures, claims):
    assert len(claims) >= 25
    for claim in claims:
        text = (ROOT / "docs" / claim.page).read_text(encoding="utf-8")
        assert claim.update(text) == text, "run: python docs/figures.py"


def test_the_readme_says_what_the_results_say(figures):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert figures.readme(text) == text, "run: python docs/figures.py"
    assert figures.readme(text.replace("53 %", "54 %")) == text


def test_a_changed_figure_is_noticed_and_mended(figures, claims):
    claim = claims[0]
    text = (ROOT / "docs" / claim.page).read_text(encoding="utf-8")
    match = claim.pattern().search(text)
    wrong = text[: match.start(1)] + "7" + text[match.start(1) :]
    assert wrong != text
    assert claim.update(wrong) == text
    with pytest.raises(ValueError, match="does not say"):
        claim.update(text.replace(match[0], ""))


def test_a_figure_that_names_no_line_is_refused(figures):
    with pytest.raises(KeyError, match="names 0 lines"):
        figures.figure("sofim-3; ours; DP-FedNothing; 70")


def unexplained(text, folder):
    """The includes of a page that no line before them explains to a reader of the sources, with a link to a file."""
    lines = text.splitlines()
    for k, line in enumerate(lines):
        if line.startswith("```{include}"):
            linked = re.match(r"% .*\]\((\S+?)\)", lines[k - 2]) if k >= 2 else None
            if linked is None or not (folder / linked[1]).exists():
                yield line


def test_pages_that_the_site_fills_in_say_where_their_content_is():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "_generated"} & {*path.parts}]
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    assert sum("```{include}" in text for text in texts.values()) >= 25
    assert [line for path, text in texts.items() for line in unexplained(text, path.parent)] == []
    assert list(unexplained("```{include} ../CHANGELOG.md\n```\n", ROOT / "docs"))
    assert list(unexplained("% See [this](gone.md).\n\n```{include} ../CHANGELOG.md\n```\n", ROOT / "docs"))


def test_no_page_hides_markers():
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/*.md"), ROOT / "README.md"]
    assert len(pages) > 50
    assert [str(page) for page in pages if "<!--" in page.read_text(encoding="utf-8")] == []


def test_every_template_is_filled_and_every_table_is_shown(figures, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    tables = figures.tables()
    shown = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts
    )
    for name, text in tables.items():
        assert "{{" not in text, name
        assert f"_generated/{name}" in shown, f"no page includes {name}"
    for name in re.findall(r"_generated/([\w-]+\.md)", shown):
        assert name in tables, name


def test_results_stay_small_and_say_where_they_come_from():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 2**20
    for path in (*RESULTS.glob("*.json"), *RESULTS.glob("bench/*.json"), *RESULTS.glob("many_cpu/*.json")):
        if path.name not in WRITTEN_BY_COMMANDS:
            document = json.loads(path.read_text(encoding="utf-8"))
            assert {"command", "commit", "versions"} <= document["provenance"].keys(), path.name
    for path in RESULTS.glob("paper/*.json"):
        assert {"command", "versions", "lines"} <= json.loads(path.read_text(encoding="utf-8")).keys(), path.name
        assert '"/' not in path.read_text(encoding="utf-8"), path.name  # no value is a path of one machine


def test_the_table_of_speed_has_one_column_per_architecture(figures, tmp_path, monkeypatch):
    for name in ("bench", "many_cpu"):
        (tmp_path / name).mkdir()
    bench = json.loads((RESULTS / "bench" / "aarch64.json").read_text())
    assert bench["provenance"]["machine"] == "aarch64"
    (tmp_path / "bench" / "aarch64.json").write_text(json.dumps(bench))
    (tmp_path / "many_cpu" / "aarch64.json").write_text((RESULTS / "many_cpu" / "aarch64.json").read_text())
    bench["provenance"] |= {"machine": "x86_64", "cpu": "A Processor"}
    bench["raw"]["round_over_two_matmuls"]["samples"] = [2.0, 2.14, 9.0]
    (tmp_path / "bench" / "x86_64.json").write_text(json.dumps(bench))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.load.cache_clear()
    head, _, first, *rest = figures.speed_table().splitlines()
    figures.load.cache_clear()
    assert "| aarch64, " in head
    assert "| x86_64, A Processor, " in head
    assert first.endswith("| 2.14 × |")
    (together,) = (line for line in rest if "64 at once" in line)
    assert together.endswith("×|  |") or together.endswith("× |  |"), "nothing where many.py did not run"
