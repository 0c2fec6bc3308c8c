"""What open studies were promised is not left for others: at the site, on the status page, in `ledger` and `budget`."""

import json

import pytest

from sordino.cli import main
from sordino.operations.status import of_site
from sordino.operations.status_page import page

NORTH = "north"


@pytest.fixture
def folder(tiny, talk):
    """The folder of a site, and a function that answers the rest of its open study of three rounds, one is answered."""
    federation = tiny(rounds=3)
    federation.configure(NORTH, epsilon=13.0, delta=1e-5)
    study = talk(federation.site(NORTH), federation.terms())

    def end():
        for t in (1, 2):
            assert study.round(t).kind == "update"
        fields = {"run": study.terms.run, "terms": study.terms.sha256(), "done": 3}
        assert study.say("finish", fields, {"theta": study.terms.model.init().numpy()}).kind == "finished"

    assert study.propose().kind == "agreed"
    assert study.round(0).kind == "update"
    return federation.place(NORTH), end


def told(capsys, *words):
    assert main([*map(str, words), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def figures(place, capsys):
    """(spent when the open studies have ended, left) by `status`, `ledger show` and `budget`."""
    ledger = place / "ledger.db"
    status = told(capsys, "federate", "status", place)
    (account,) = told(capsys, "ledger", "show", ledger)["accounts"]
    budget = told(capsys, "budget", "--ledger", ledger, "--runs", 1)
    return [
        (status["promised"], status["left"]),
        (account["promised"], account["left"]),
        (budget["promised"], budget["runs"][0]["epsilon"]),
    ]


def test_what_is_promised_to_an_open_study_is_not_left(folder, capsys):
    place, end = folder
    spent = of_site(place).epsilon
    before = figures(place, capsys)
    end()
    after, whole = figures(place, capsys), of_site(place).epsilon
    assert spent < whole / 1.5
    assert [promised for promised, _ in before] == pytest.approx([whole] * 3)
    assert [promised for promised, _ in after] == [None] * 3
    assert [left for _, left in before] == pytest.approx([left for _, left in after])


def test_people_read_what_is_promised(folder, capsys):
    place, end = folder
    commands = (["federate", "status"], ["ledger", "show"], ["budget", "--runs", "1", "--ledger"])
    paths = (place, place / "ledger.db", place / "ledger.db")
    for promised in (True, False):
        for words, path in zip(commands, paths, strict=True):
            assert main([*words, str(path)]) == 0
            assert ("to open runs: ε = " in " ".join(capsys.readouterr().out.split())) == promised
        assert ("ε when open runs have ended" in page(of_site(place))) == promised
        if promised:
            end()


def test_a_ledger_without_its_site_knows_no_promise(folder, tmp_path, capsys):
    place, _ = folder
    alone = tmp_path / "alone.db"
    alone.write_bytes((place / "ledger.db").read_bytes())
    (account,) = told(capsys, "ledger", "show", alone)["accounts"]
    assert account["promised"] is None
    (tmp_path / "site.toml").write_text((place / "site.toml").read_text())  # it names another ledger
    assert told(capsys, "ledger", "show", alone)["accounts"] == [account]
