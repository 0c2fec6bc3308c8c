"""The built site: no warning, no broken link, nothing from another host, every public name and method on a page."""

import functools
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import sordino
from sordino.methods import REGISTRY
from tests.support import tiers

for package in ("sphinx", "myst_nb", "furo"):
    pytest.importorskip(package, reason="the docs extra is not installed: pip install 'sordino[docs]'")

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "docs" / "_build" / "html"
CHECKED = ROOT / "docs" / "_build" / "checked"  # `make docs` writes it after these tests, and removes it before a build
EXTERNAL = re.compile(r"^(https?:|mailto:|data:)")


class Page(HTMLParser):
    """Anchors of a page, its links, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif tag in ("img", "script") and found.get("src"):
            self.loads.append(found["src"])
        elif (
            tag == "link" and found.get("href") and found.get("rel") in ("stylesheet", "icon", "search", "next", "prev")
        ):
            self.loads.append(found["href"])


@functools.cache
def parsed(path):
    return Page(path.read_text(encoding="utf-8"))


def broken(folder):
    """Every link that leads nowhere, as 'page: link'."""
    pages = {path.resolve(): parsed(path.resolve()) for path in folder.rglob("*.html")}
    problems = []
    for path, page in pages.items():
        for link in (*page.links, *page.loads):
            if EXTERNAL.match(link):
                continue
            place, anchor = urldefrag(link)
            place = place.partition("?")[0]
            target = (path.parent / unquote(place)).resolve() if place else path
            lost = anchor and target in pages and unquote(anchor) not in pages[target].anchors
            if lost or not target.is_file():
                problems.append(f"{path.relative_to(folder.resolve())}: {link}")
    return problems


def up_to_date():
    """Whether `make docs`, which fails on any warning, ran after the last change of a page or of the package."""
    index = BUILT / "index.html"
    sources = [
        path
        for folder in ("docs", "src", "results", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"_build", "_generated", "reference", "__pycache__"} & set(path.parts)
    ]
    sources += [
        ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml")
    ]
    return index.exists() and max(path.stat().st_mtime for path in sources) < index.stat().st_mtime


@pytest.fixture(scope="module", params=tiers(["of make docs", "built here"], 1))
def site(request, tmp_path_factory):
    """The site of `make docs`, which runs these tests after it. `make soak` builds one here, without running the
    tutorials, which changes neither links nor pages."""
    if request.param == "of make docs":
        if not up_to_date():
            pytest.skip("the site is older than its sources; `make docs` builds it and runs these tests")
        if CHECKED.exists() and CHECKED.stat().st_mtime > Path(__file__).stat().st_mtime:
            pytest.skip("`make docs` ran these tests on this site")
        return BUILT
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-D", "nb_execution_mode=off"]
    done = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(ROOT / "docs"), str(out / "html")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out / "html"


def test_every_internal_link_leads_somewhere(site):
    assert len(list(site.rglob("*.html"))) > 90
    assert broken(site) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a> <a href="c.html">c</a> <a href="#top">top</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p> <a href="a.html">a</a> <a href="https://example.org/">x</a>')
    assert broken(tmp_path) == ["a.html: b.html#here", "a.html: c.html", "a.html: #top"]


def test_nothing_is_loaded_from_another_host(site):
    for path in site.rglob("*.html"):
        page = parsed(path.resolve())
        assert [link for link in page.loads if EXTERNAL.match(link) and not link.startswith("data:")] == [], path.name


def test_every_public_name_and_method_and_tutorial_has_a_page(site):
    for name in sordino.__all__:
        thing, text = getattr(sordino, name), (site / "reference" / "api" / f"{name}.html").read_text(encoding="utf-8")
        assert f'id="sordino.{name}"' in text or f"{thing.__name__}." in text, name
    for name in REGISTRY:
        text = (site / "reference" / "methods" / f"{name}.html").read_text()
        assert "Certified for" in text, name
    tutorials = [path for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.stem != "index"]
    assert len(tutorials) >= 6
    for path in tutorials:
        # The page for operators needs root: tests/federation/test_networks.py runs its commands.
        runs = "```bash" if path.stem == "operate" else "{code-cell}"
        assert runs in path.read_text(encoding="utf-8"), path.name
        assert (site / "tutorials" / f"{path.stem}.html").is_file()
