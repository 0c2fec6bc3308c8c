"""What an auditor gets: enough to verify, and nothing that is not on the list of public fields."""

import json
import math

import pytest

from sordino.cli import main
from sordino.errors import SordinoError
from sordino.evidence import public
from sordino.evidence.spent import FIXED_BEFOREHAND, Charge
from sordino.federation import sentences
from sordino.federation.terms import against_terms
from sordino.federation.witness import signed_mark
from sordino.operations import status_page
from sordino.operations.audit_copy import audit_copy
from sordino.operations.status import of_site
from sordino.training.verify_run import verify_run

NORTH = "north"


@pytest.fixture
def ended(tiny):
    federation = tiny(rounds=2, trust="secure-aggregation", seed=None)
    federation.run()
    site = federation.site(NORTH)
    site.answer(b"no message")
    site.note("failed", run="ab" * 16, t=0, detail="ValueError('record 17 has age 93')")
    return federation


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def mu_of(cert):
    """mu of the site's rounds: sqrt(sum of times (sensitivity / std)^2) over the releases of the plan.

    Integer noise is accounted for as Gaussian noise smaller by a factor of 1 + 2^-12 (docs/secure-aggregation.md).
    """
    (group,) = cert["groups"]
    squares = sum(each["times"] * (each["sensitivity"] / each["std"]) ** 2 for each in group["releases"])
    return (1 + 2**-12) * math.sqrt(squares)


def gaussian_delta(mu, epsilon):
    """delta of Gaussian noise at epsilon, in closed form."""

    def above(x):
        return math.erfc(x / math.sqrt(2)) / 2

    return above(epsilon / mu - mu / 2) - math.exp(epsilon) * above(epsilon / mu + mu / 2)


def test_a_site_s_copy_verifies_and_holds_listed_fields_alone(ended, tmp_path, capsys):
    out = tmp_path / "copy"
    assert main(["federate", "audit-copy", str(ended.place(NORTH)), "--out", str(out)]) == 0
    (run,) = (out / "runs").iterdir()
    assert verify_run(run / "certificate.json", against_terms=against_terms).problems == []
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
    told = capsys.readouterr().out
    assert "ledger.db, which is not beside it" in " ".join(told.split())
    assert main(["verify", str(out)]) == 2
    assert f"name one of its folders: {run}" in capsys.readouterr().err
    names = {path.name for path in out.rglob("*") if path.is_file()}
    assert names <= {"ledger.json", "log.jsonl", "terms.json", *public.FILES}
    log = lines(out / "log.jsonl")
    assert {key for line in log for key in line} <= set(public.AUDIT_EVENTS)
    assert {line["what"] for line in log} == {"agreed", "finished", "refused"}, "noise hides that a site failed"
    assert "record 17" in (ended.place(NORTH) / "events.jsonl").read_text()
    assert not any(b"record 17" in path.read_bytes() for path in out.rglob("*") if path.is_file())
    ledger = json.loads((out / "ledger.json").read_text())
    assert set(public.fields(ledger)) == set(public.AUDIT_LEDGER) - {"receipt"}
    assert (ledger["rounds"], ledger["intact"], ledger["problem"]) == (2, True, False)
    # Both deltas to 1e-9: calibration leaves mu one part in 1e12 below what is requested, and the root finder is finer.
    cert = json.loads((run / "certificate.json").read_text())
    assert gaussian_delta(mu_of(cert), 8.0) == pytest.approx(1e-5, rel=1e-9), "what the plan's noise is calibrated to"
    assert gaussian_delta(mu_of(cert), ledger["spent"]) == pytest.approx(ledger["delta"], rel=1e-9)
    assert ledger["delta"] == ended.site_config(NORTH).delta > cert["delta"], "so the site's epsilon is the smaller one"
    key = {card.name: card.sign for card in ended.roster.sites}[NORTH]
    assert signed_mark(ledger["receipt"], key).rows == ledger["receipt"]["rows"]
    for secret in (ended.place(NORTH) / "data.npz", ended.place(NORTH) / "identity.key"):
        assert not any(path.read_bytes() == secret.read_bytes() for path in out.rglob("*") if path.is_file())
    assert all(path.stat().st_mode & 0o222 == 0 for path in out.rglob("*") if path.is_file())


def test_a_site_s_copy_says_what_its_figure_assumes(ended, tmp_path):
    """The reason that a person gave stays at the site."""
    sampled = Charge("", 0, "g", 1.0, 2.0, 1, "another run", 0.1, "poisson replace-one")
    assert json.loads(_copy(ended, tmp_path / "before"))["assumes"] == ""
    with ended.ledger(NORTH) as ledger:
        ledger.state_fixed_plan("protocol of 3 March")
        ledger.charge([sampled._replace(who=ledger.account())])
        assert (caveat := ledger.caveat(ledger.account())) != ""
    text = _copy(ended, tmp_path / "after")
    assert json.loads(text)["assumes"] == caveat.removeprefix(", ") == FIXED_BEFOREHAND.removeprefix(", ")
    assert "3 March" not in text
    assert caveat in status_page.page(of_site(ended.place(NORTH)))


def _copy(federation, out):
    audit_copy(federation.place(NORTH), out)
    return (out / "ledger.json").read_text()


def test_a_coordinator_s_copy_has_no_scores_and_the_sites_receipts(ended, tmp_path):
    names = audit_copy(ended.coordinator, tmp_path / "copy")
    assert {"receipts.json", "roster.toml", "log.jsonl", "runs/run/certificate.json"} <= set(names)
    log = lines(tmp_path / "copy" / "log.jsonl")
    assert {key for line in log for key in line} <= set(public.AUDIT_PROGRESS)
    assert [line["came"] for line in log if line["what"] == "round"] == [list(ended.names)] * 2
    audit_copy(ended.place(NORTH), tmp_path / "site")
    receipt = json.loads((tmp_path / "site" / "ledger.json").read_text())["receipt"]
    assert json.loads((tmp_path / "copy" / "receipts.json").read_text())[NORTH]["rows"] <= receipt["rows"]


def test_nothing_of_an_uncertified_run_is_copied(tiny, tmp_path):
    federation = tiny(rounds=2)  # with a seed, so that nothing is certified
    federation.run()
    assert audit_copy(federation.place(NORTH), tmp_path / "copy") == ["ledger.json", "log.jsonl"]


def test_a_wrong_folder_is_refused(tmp_path):
    with pytest.raises(SordinoError, match=r"neither site\.toml nor federation\.toml"):
        audit_copy(tmp_path, tmp_path / "copy")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SordinoError, match="is not empty"):
        audit_copy(tmp_path, tmp_path / "full")


def test_a_failed_evaluation_has_a_sentence():
    line = {"what": "failed", "run": "ab" * 16, "detail": "an error"}
    assert sentences.of_site(line) == "failed in the evaluation of run abababab: an error"
