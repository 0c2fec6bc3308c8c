"""Every method documents its parameters and its guarantee, with an example that runs."""

import doctest
import inspect
import re

import pytest

from sordino.core import Unit
from sordino.methods import REGISTRY, build

SECTIONS = ("Args", "Returns", "Raises", "Guarantee", "Example")
PARTS = ("Released", "Sensitivity", "Proved for", "Reason")


def sections(text):
    """The lines of each section of a docstring, without their indent."""
    found, name = {}, ""
    for line in inspect.cleandoc(text).splitlines():
        if heading := re.fullmatch(r"([A-Z]\w*):", line):
            name = heading[1]
            found[name] = []
        elif name:
            found[name].append(line[4:])
    return found


def entries(lines):
    """`name: text` of a section, continuation lines joined."""
    joined = re.sub(r"\n +", " ", "\n".join(lines).strip())
    return dict(line.split(": ", 1) for line in joined.splitlines() if line)


def problems(factory):
    """What the docstring of a factory lacks."""
    text = factory.__doc__ or ""
    found = sections(text)
    missing = [f"no section {name}" for name in SECTIONS if name not in found]
    if missing:
        return missing
    options = list(inspect.signature(factory).parameters)
    described = entries(found["Args"])
    missing += [f"Args lacks {name}" for name in options if not described.get(name)]
    missing += [f"Args has {name}, which is no parameter" for name in described if name not in options]
    guarantee = entries(found["Guarantee"])
    missing += [f"Guarantee lacks {name}" for name in PARTS if not guarantee.get(name)]
    examples = doctest.DocTestParser().get_examples(text)
    if not 2 <= len(examples) <= 6 or not examples[-1].want:
        missing.append("Example needs two to six lines that show a result")
    return missing


@pytest.mark.parametrize("name", REGISTRY)
def test_a_method_documents_its_parameters_and_its_guarantee(name):
    assert problems(REGISTRY[name].factory) == []


@pytest.mark.parametrize("name", REGISTRY)
def test_the_example_runs(name):
    factory = REGISTRY[name].factory
    test = doctest.DocTestParser().get_doctest(factory.__doc__, {}, name, None, 0)
    said = []
    assert doctest.DocTestRunner(verbose=False).run(test, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_guarantee_names_what_the_method_proves(name):
    """With default options, every proved unit and trust model is named, and none if nothing is proved."""
    proved = entries(sections(REGISTRY[name].factory.__doc__)["Guarantee"])["Proved for"]
    pairs = {pair for unit in REGISTRY[name].units for pair in build(name, Unit(unit)).proves}
    assert ("nothing" in proved.split(".")[0]) == (not pairs)
    for unit, trust in pairs:
        assert str(trust) in proved
        assert str(unit) in proved or "both levels" in proved


@pytest.mark.parametrize("name", REGISTRY)
def test_the_first_line_is_the_summary(name):
    assert 20 < len(REGISTRY[name].summary) <= 120
    assert REGISTRY[name].summary == REGISTRY[name].factory.__doc__.splitlines()[0]


def complete(*, clip: float = 1.0):
    """theta <- theta - G, a method that is documented.

    Args:
        clip: Bound on the norm of a gradient.

    Returns:
        The method.

    Raises:
        SordinoError: Never.

    Guarantee:
        Released: One gradient.
        Sensitivity: clip.
        Proved for: record level; untrusted-server.
        Reason: It is
            linear.

    Example:
        >>> 1 + 1
        2
        >>> 2 + 2
        4
    """


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("\nGuarantee:", "\nPromise:", "no section Guarantee"),
        ("clip: Bound", "cap: Bound", "Args lacks clip"),
        ("Sensitivity: clip.", "", "Guarantee lacks Sensitivity"),
        (">>> 2 + 2\n    4", "", "Example needs"),
    ],
)
def test_a_gap_is_found(old, new, problem):
    assert problems(complete) == []

    def gap(*, clip: float = 1.0): ...

    gap.__doc__ = inspect.getdoc(complete).replace(old, new)  # Python 3.13 removes the indent itself
    assert any(said.startswith(problem) for said in problems(gap)), problems(gap)
