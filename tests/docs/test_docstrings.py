"""Every public name has a summary, its arguments or fields, what it returns, and an example that runs."""

import dataclasses
import doctest
import inspect
import re
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

import sordino

ROOT = Path(__file__).parents[2]
ESTIMATORS = sordino._SKLEARN
NAMES = [*sordino.__all__, *ESTIMATORS]


def public(name):
    if name in ESTIMATORS:
        pytest.importorskip("sklearn", reason="scikit-learn is an extra")
    return getattr(sordino, name)


def arguments(thing):
    """What Args, Attributes or Fields must list."""
    if inspect.isclass(thing) and issubclass(thing, Enum | BaseException):
        return []
    if isinstance(thing, ModuleType):
        return []
    if hasattr(thing, "_fields"):
        return list(thing._fields)
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if field.init]
    return [name for name in inspect.signature(thing).parameters if name != "self"]


def section(doc, *heads):
    match = re.search(rf"^(?:{'|'.join(heads)}):\s*\n((?:(?: +.*)?\n)+)", doc + "\n", flags=re.MULTILINE)
    return match[1] if match else ""


def missing(thing):
    """What a docstring lacks."""
    doc = inspect.getdoc(thing) or ""
    problems = []
    summary = doc.split("\n\n")[0].strip()
    if not re.search(r"[.:!?]$", summary) or len(summary) < 15 or summary.startswith(f"{thing.__name__}("):
        problems.append("a summary that is a sentence")
    listed = section(doc, "Args", "Attributes", "Fields")
    named = {
        word.strip(" *`")
        for names in re.findall(r"^ +([\w*`, ]+?)(?: \([^)]*\))?:", listed, flags=re.MULTILINE)
        for word in names.split(",")
    }
    problems += [f"Args: {name}" for name in arguments(thing) if name not in named]
    returns = inspect.isfunction(thing) and inspect.signature(thing).return_annotation not in (None, "None")
    if returns and not section(doc, "Returns", "Yields"):
        problems.append("Returns")
    if not doctest.DocTestParser().get_examples(doc):
        problems.append("an example (>>>)")
    return problems


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name):
    assert missing(public(name)) == [], f"sordino.{name}"


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    thing = public(name)
    module = thing if isinstance(thing, ModuleType) else sys.modules[thing.__module__]
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    tests = finder.find(thing, name, module=module, globs=dict(vars(module)))
    output = []
    for test in tests:
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


def test_an_undocumented_function_is_noticed():
    def wrong(x, y):
        """Adds."""
        return x + y

    assert missing(wrong) == ["a summary that is a sentence", "Args: x", "Args: y", "Returns", "an example (>>>)"]

    def right(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x, y: the numbers.

        Returns:
            Their sum.

        Example:
            >>> 1 + 1
            2
        """
        return x + y

    assert missing(right) == []


def test_help_is_useful():
    """help(sordino) names what to begin with, and every public name in it has a summary."""
    for name in ("Privacy", "simulate", "certificate", "FederatedClassifier"):
        assert name in sordino.__doc__
    assert doctest.DocTestParser().get_examples(sordino.__doc__)
    assert doctest.testmod(sordino).failed == 0
