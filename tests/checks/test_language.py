"""The contracts of causal language models, on a small one whose records may begin with a prompt."""

import json

import pytest
import torch

from sordino import checks
from sordino.checks import report as rows
from sordino.checks import suites
from sordino.checks.language import clips_every_token, small_language, tokens
from sordino.cli import main
from sordino.core import Adjacency, Shard, Unit
from sordino.methods import entry
from tests.support import tiers


@pytest.mark.parametrize("unit", tiers([Unit.RECORD, Unit.PERSON], quick=[Unit.RECORD]))
def test_sequences_keep_their_contracts(unit):
    reports = checks.check_sequences(trials=checks.LEAST_TRIALS, units=[unit])
    assert {report.adjacency for report in reports} == set(Adjacency)
    assert all(report.passed for report in reports), [report.problems for report in reports]


def test_a_mutant_that_is_none_is_noticed(monkeypatch):
    monkeypatch.setattr(rows, "reports_of", lambda *args: iter([passed("replace-one")]))
    monkeypatch.setattr(suites, "clips_every_token", lambda method, model: (method, model))
    (report,) = checks.check_sequences(trials=checks.LEAST_TRIALS, units=[Unit.RECORD])
    assert not report.passed


def test_the_model_is_checked_by_its_name_too(monkeypatch, capsys):
    monkeypatch.setitem(checks.SUITES, "sequences", lambda name: [passed("add-remove")._replace(name=name)])
    assert main(["check", "causal-lora", "sequences", "--json"]) == 0
    assert [report["name"] for report in json.loads(capsys.readouterr().out)] == ["causal-lora", "sequences"]


def passed(adjacency):
    return checks.Report("sequences", "record", adjacency, "0.0 gradient", 2.0, 2.0, 0.0, True, [])


def test_records_of_the_small_model_are_tokens_and_prompts():
    x = torch.tensor([[-1e6, -0.5, 0.5], [1.5, 1e6, torch.nan]])
    assert tokens(x).tolist() == [[-3, -1, 0], [1, 2, 0]]
    model, shard = small_language(), Shard(x[:1] - 10, torch.zeros(1, dtype=torch.long), torch.ones(1))
    assert not model.clipped_sum(model.init(), shard, 1.0).any(), "a prompt alone adds nothing"


def test_the_mutant_clips_every_token():
    model = small_language()
    _, wrong = clips_every_token(entry("dp-fedgd").at(Unit.RECORD), model)
    shard = Shard(torch.tensor([[0.5, 0.5, 0.5]]), torch.zeros(1, dtype=torch.long), torch.ones(1))
    right = float(model.clipped_sum(model.init(), shard, 0.01).norm())
    assert right == pytest.approx(0.01, rel=1e-4)
    assert float(wrong.clipped_sum(model.init(), shard, 0.01).norm()) > 1.2 * right
