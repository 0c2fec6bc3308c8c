"""Parties that derive other numbers from the terms, or write other keys, take no part; nothing is charged."""

import json
from dataclasses import replace

import pytest
from fixtures import LocalFolders

from sordino.errors import Refused, SordinoError
from sordino.federation.derived import check_derived, derived_numbers, stated
from sordino.federation.policy import agree
from sordino.federation.terms import Terms
from sordino.privacy.mechanisms import quantization
from sordino.version import __version__

SPEC = {"method": "dp-fedsofim", "rounds": 3, "epsilon": 8.0, "delta": 1e-5}


@pytest.fixture(params=["untrusted-server", "secure-aggregation"])
def federation(tmp_path, request):
    return LocalFolders(tmp_path, SPEC | {"trust": request.param})


def test_the_terms_state_every_noised_query(federation):
    terms = federation.terms()
    assert terms.version == __version__
    parts = {name.rsplit(" ", 1)[1] for name in terms.derived}
    assert parts == {"bound", "noise", "weight", "step"}
    assert (terms.derived["0.0 gradient step"] > 0) == terms.secure
    assert Terms.read(terms.json()) == terms
    agree(federation.site("north"), terms)


@pytest.mark.parametrize("part", ["bound", "noise", "weight", "step"])
def test_a_number_that_differs_is_refused(federation, part):
    terms = federation.terms()
    name = f"0.0 gradient {part}"
    with pytest.raises(Refused, match=f"derived: the terms state .* for '{name}'.*install the same version"):
        agree(federation.site("north"), replace(terms, derived=terms.derived | {name: terms.derived[name] * 2 + 1}))
    last_bits = {key: value * (1 + 1e-14) for key, value in terms.derived.items()}
    check_derived(replace(terms, derived=last_bits))  # as on another processor


def test_terms_that_state_nothing_are_refused(federation):
    with pytest.raises(Refused, match="the terms state nothing"):
        agree(federation.site("north"), replace(federation.terms(), derived={}))


def test_a_site_with_another_constant_takes_no_part(tmp_path, monkeypatch):
    """With finer integers at one site, the sum would hold its vector twice, under noise for once."""
    federation = LocalFolders(tmp_path, SPEC | {"trust": "secure-aggregation"})
    terms = federation.terms()
    monkeypatch.setattr(quantization, "FINEST_STD", 2.0 * quantization.FINEST_STD)
    changed = replace(terms, version="0.0.9")  # another object, whose plan is not cached
    with pytest.raises(Refused, match=r"sordino 0\.0\.9"):
        agree(federation.site("north"), changed)


def test_an_evaluation_is_stated_too(tmp_path):
    federation = LocalFolders(tmp_path, SPEC | {"trust": "untrusted-server"})
    terms = stated(replace(federation.terms(), evaluation=1.0, tests=(10,) * len(federation.names)))
    assert any(name.startswith("evaluation ") for name in derived_numbers(terms))


def test_terms_of_another_version_say_so(federation):
    values = json.loads(federation.terms().json())
    with pytest.raises(SordinoError, match=r"key .shuffler. is unknown.*runs sordino 0\.2\.0\. Upgrade this site"):
        Terms.read(json.dumps(values | {"shuffler": 1, "version": "0.2.0"}))
    with pytest.raises(SordinoError, match="of an unknown version"):
        Terms.read(json.dumps(values | {"shuffler": 1, "version": "\x1b[31m"}))
    for wrong in ({"version": 3}, {"derived": []}, {"derived": {"a": "b"}}, {"derived": {"a": float("inf")}}):
        with pytest.raises(SordinoError, match="terms: "):
            Terms.read(json.dumps(values | wrong))


def test_noise_for_minibatches_may_differ_by_the_tolerance_of_its_search(tmp_path):
    federation = LocalFolders(tmp_path, SPEC | {"trust": "untrusted-server", "batch": "poisson:8"})
    terms = federation.terms()
    name = "0.0 gradient noise"
    check_derived(replace(terms, derived=terms.derived | {name: terms.derived[name] * 1.001}))
    with pytest.raises(SordinoError, match="derived: the terms state"):
        check_derived(replace(terms, derived=terms.derived | {name: terms.derived[name] * 1.003}))
    weight = "0.0 gradient weight"
    with pytest.raises(SordinoError, match="derived: the terms state"):
        check_derived(replace(terms, derived=terms.derived | {weight: terms.derived[weight] * 1.001}))
