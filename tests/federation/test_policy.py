"""A site reads what a method declares of its options; federation knows no option by name."""

import pytest

from sordino.core import Unit
from sordino.methods import REGISTRY, MethodEntry
from sordino.methods.bounds import CLIP, declare
from sordino.methods.fedgd import fedgd

NORTH = "north"


def toy(*, unit: Unit = Unit.RECORD, ceiling: float = 1.0, lr: float = 0.5):
    """DP-FedGD with its clip under another name."""
    return fedgd(unit=unit, clip=ceiling, lr=lr)._replace(name="dp-toy")


def registered(monkeypatch, **bounds):
    monkeypatch.setitem(REGISTRY, "dp-toy", MethodEntry(toy, "toy", "no paper", bounds=declare(**bounds)))


def answer(tiny, talk, **spec):
    """Kind of the site's answer to terms, and the reason in its own log if it refuses."""
    federation = tiny("dp-toy")
    reply = talk(federation.site(NORTH), federation.terms(spec)).propose()
    refused = [event for event in federation.events(NORTH) if event["what"] == "refused"]
    return reply.fields.get("code", reply.kind), refused[-1]["detail"] if refused else ""


def test_an_option_that_is_not_declared_is_refused_with_its_name(tiny, talk, monkeypatch):
    registered(monkeypatch, step_sizes="lr")
    code, reason = answer(tiny, talk)
    assert code == "policy"
    assert "dp-toy does not declare what its option ceiling is" in reason
    assert "registry entry" in reason


@pytest.mark.parametrize(("value", "code"), [(1.0, "agreed"), (1e-9, "policy"), (1e9, "policy")])
def test_a_new_method_with_a_declared_clip_needs_nothing_in_the_federation(tiny, talk, monkeypatch, value, code):
    registered(monkeypatch, clips="ceiling", step_sizes="lr")
    assert (found := answer(tiny, talk, ceiling=value))[0] == code
    if code == "policy":
        assert found[1].endswith(f"ceiling = {value}; dp-toy declares {CLIP}")


def test_a_range_that_is_declared_too_wide_is_the_one_that_is_read(tiny, talk, monkeypatch):
    """The mutant of the test above: declared as a weight, the same small value passes the policy."""
    registered(monkeypatch, weights="ceiling", step_sizes="lr")
    assert answer(tiny, talk, ceiling=1e-9)[0] == "agreed"
