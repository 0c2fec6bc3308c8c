"""The wheel, the sdist, what they need, and what they say of themselves."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import sordino
from tests.support import forks, plan_for

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LEFT_OUT = (".git", ".venv", "build", "runs", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", "_build")

MADE = ("docs/_build", "docs/_generated", "docs/reference", "docs/results/paper")  # by `make docs`


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(names in the wheel, its metadata, names in the sdist), built from a copy of the sources without network."""
    place = tmp_path_factory.mktemp("package")
    sources, out = place / "sources", place / "out"
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(*LEFT_OUT))
    code = "import sys; o = sys.argv[1]; from setuptools import build_meta as b; b.build_sdist(o); b.build_wheel(o)"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = next(wheel.read(name).decode() for name in names if name.endswith("/METADATA"))
    with tarfile.open(next(out.glob("*.tar.gz"))) as sdist:
        members = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    return names, message_from_string(metadata), members


def test_the_wheel_holds_the_package_alone(built):
    names, _, _ = built
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "sordino").rglob("*.py")}
    assert files <= names
    assert {"sordino/py.typed", "sordino/data/digits.npz", "sordino/models/kernel.c"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"sordino"}


def test_the_sdist_holds_tests_papers_and_pages(built):
    _, _, members = built
    for folder in ("tests", "papers", "benchmarks", "docs"):
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()]
        wanted = {name for name in files if "__pycache__" not in name and not name.startswith(MADE)}
        assert wanted
        assert wanted <= members
    pages = {"CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "README.md"}
    assert pages | {"SECURITY.md", "Makefile", "Dockerfile", "deploy/image.sh", "constraints.txt"} <= members


def test_the_metadata_serves_a_stranger(built):
    _, metadata, _ = built
    assert metadata["Version"] == sordino.__version__
    assert metadata["Author"] == "The Sordino developers"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().lstrip().startswith("# Sordino")
    assert metadata["Keywords"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.split(r"[><=;\[ ]", line)[0] for line in needed} == {
        *("torch", "numpy", "scipy", "cryptography", "rich", "safetensors", "tomli-w")
    }
    assert {"verify", "tables", "flower", "sklearn"} <= set(metadata.get_all("Provides-Extra"))


def test_links_of_the_long_description_do_not_lead_nowhere(built):
    _, metadata, _ = built
    assert re.findall(r"\]\((?!https?:|#)", metadata.get_payload()) == []
    spec = spec_from_file_location("setup", ROOT / "setup.py")
    setup = module_from_spec(spec)
    spec.loader.exec_module(setup)
    text = "See [the page](docs/page.md), [it](https://example.org) and ![a curve](docs/curve.png)."
    assert setup.long_description(text) == "See the page, [it](https://example.org) and ."
    assert "(https://example.org/r/blob/main/docs/page.md)" in setup.long_description(text, "https://example.org/r")


def test_one_version_everywhere():
    """`__version__` is the changelog's newest, the citation's, and the tag's where this commit has one."""
    newest = re.search(r"^## \[?v?(\d[^\s\]]*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest[1] == sordino.__version__
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited[1] == sordino.__version__
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "--list", "v[0-9]*"]
        tags = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        assert tags in ([], [f"v{sordino.__version__}"])


def without(package: str, folder: Path, *words: str) -> str:
    """What the command line says where a package is not installed."""
    code = f"import sys; sys.modules[{package!r}] = None; from sordino.cli import main; sys.exit(main(sys.argv[1:]))"
    done = forks.run(code, *words, folder=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def test_a_missing_extra_is_named(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("a,label\n1,0\n2,1\n")
    assert "needs pyarrow, which is not installed: pip install 'sordino[tables]'" in without(
        "pyarrow", tmp_path, "run", "--data", str(table), "--set", "label=label", "--out", str(tmp_path / "run")
    )
    certificate = tmp_path / "certificate.json"  # of minibatches: without them, a formula is enough
    minibatches = plan_for("dp-fedgd", (40, 60), epsilon=2.0, batch="poisson:4")
    certificate.write_text(json.dumps(sordino.certificate(minibatches, sordino.source(1), version="0")))
    assert "needs dp-accounting, which is not installed: pip install 'sordino[verify]'" in without(
        "dp_accounting", tmp_path, "verify", str(certificate)
    )
    assert {"pyarrow", "dp-accounting"} <= {
        re.split("[><=]", line)[0] for extra in ("tables", "verify") for line in PROJECT["optional-dependencies"][extra]
    }
