"""One account per ledger whatever happens to the data, and ledgers that were put back to an older state."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from fixtures import Loopback
from messages import put

from sordino import secagg, wire
from sordino.cli import main
from sordino.errors import LedgerError, RolledBackError, SordinoError
from sordino.evidence import public
from sordino.evidence.ledger import Charge, Ledger
from sordino.evidence.signing import of_site
from sordino.federation import witness
from sordino.federation.coordinator import Coordinator
from sordino.federation.run_keys import roster_of_run
from sordino.federation.witness import Mark, Receipts
from sordino.operations.doctor import doctor
from sordino.secagg import Identity

NORTH = "north"


def code(reply):
    return reply.fields["code"] if reply.kind == "refused" else reply.kind


def table(federation, how=lambda text: text):
    """Write the site's records as a CSV, changed by `how`."""
    with np.load(federation.place(NORTH) / "data.npz") as stored:
        rows = [",".join(map(repr, [*map(float, x), int(y)])) for x, y in zip(stored["x"], stored["y"], strict=True)]
    text = "a,b,c,d,label\n" + "".join(f"{row}\n" for row in rows)
    (federation.place(NORTH) / "data.csv").write_bytes(how(text).encode())
    federation.configure(NORTH, data="data.csv", epsilon=10.0, delta=1e-5)


def reordered(text):
    return "".join(",".join(reversed(line.split(","))) + "\n" for line in text.splitlines())


def renamed(federation):
    path = federation.place(NORTH)
    (path / "site.toml").write_text((path / "site.toml").read_text().replace('name = "north"', 'name = "east"'))
    (path / "identity.key").write_text((path / "identity.key").read_text().replace("north", "east"))


EDITS = {
    "CRLF": lambda federation: table(federation, lambda text: text.replace("\n", "\r\n")),
    "a blank line": lambda federation: table(federation, lambda text: text + "\n"),
    "columns": lambda federation: table(federation, reordered),
    "one record less": lambda federation: table(federation, lambda text: text.rsplit("\n", 2)[0] + "\n"),
    "no data.key": lambda federation: (federation.place(NORTH) / "data.key").unlink(),
    "a new name": renamed,
}


@pytest.mark.parametrize("edit", EDITS)
def test_no_edit_of_data_name_or_key_opens_a_budget(tiny, talk, edit):
    federation = tiny(rounds=1)
    table(federation)
    first = talk(federation.site(NORTH), federation.terms())
    assert first.propose().kind == "agreed"
    assert first.round(0).kind == "update"
    account = first.site.account
    EDITS[edit](federation)
    site = federation.site(NORTH)
    names = tuple(site.config.name if name == NORTH else name for name in federation.names)
    sizes = (site.records, *first.terms.sizes[1:])
    again = talk(site, replace(first.terms, run="cd" * 16, names=names, sizes=sizes))
    assert code(again.propose()) == "budget"
    assert site.account == account
    with site.ledger() as ledger:
        assert {row.who for row in ledger.rows()} == {account}


def test_the_account_of_evaluations_follows_the_ledger_too(tiny):
    federation = tiny(rounds=1)
    (federation.coordinator / "federation.toml").write_text(
        (federation.coordinator / "federation.toml").read_text() + "evaluation_epsilon = 2.0\n"
    )
    for name in federation.names:
        federation.configure(name, evaluation_epsilon=3.0, test_fraction=0.4)
    federation.run()
    site = federation.site(NORTH)
    with site.ledger() as ledger:
        assert ledger.people() == sorted([site.account, f"{site.account} tests"])


def test_columns_in_another_order_wait_in_the_middle_of_a_run(tiny, talk):
    """The records are the same, but the model's numbers would mean other columns."""
    federation = tiny()
    table(federation)
    first = talk(federation.site(NORTH), federation.terms())
    first.propose()
    identity = first.site.dataset_id
    table(federation, reordered)
    first.site = federation.site(NORTH)
    assert first.site.dataset_id == identity
    assert code(first.round(0)) == "changed"
    table(federation)
    assert code(first.round(0)) == "update"


def test_a_person_opens_another_account_and_the_ledger_says_so(tiny, talk, capsys):
    federation = tiny(rounds=1)
    federation.configure(NORTH, epsilon=10.0, delta=1e-5)
    first = talk(federation.site(NORTH), federation.terms())
    first.propose()
    first.round(0)
    second = talk(first.site, replace(first.terms, run="cd" * 16))
    assert code(second.propose()) == "budget"
    path, old = federation.place(NORTH) / "ledger.db", first.site.account
    assert main(["ledger", "new-account", str(path)]) != 0  # without a reason
    assert main(["ledger", "new-account", str(path), "--why", " "]) != 0
    capsys.readouterr()
    assert main(["ledger", "new-account", str(path), "--why", "other patients"]) == 0
    assert "neither limit alone" in capsys.readouterr().out
    assert first.site.account != old
    assert code(second.propose()) == "agreed"
    assert code(second.round(0)) == "update"
    assert first.round(0).kind == "update"  # the first run stays with its account
    assert code(first.round(0, arrays={"theta": put(1)})) == "replayed"
    with federation.ledger(NORTH) as ledger:
        assert ledger.audit() == []
        assert [account.why for account in ledger.accounts()] == ["the first account", "other patients"]
        (row,) = (row for row in ledger.rows() if row.query == "new account")
    assert main(["ledger", "show", str(path), "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [account["why"] for account in shown["opened"]] == ["the first account", "other patients"]
    assert shown["opened"][1]["time"] == row.time
    assert main(["ledger", "show", str(path)]) == 0
    assert "other patients" in capsys.readouterr().out
    assert any("other patients" in check.says for check in doctor(federation.place(NORTH) / "site.toml"))


def test_accounts_are_those_of_sites(tmp_path):
    with Ledger(tmp_path / "mine.db") as ledger:
        ledger.charge([Charge("data 12", 0, "q", 1.0, 1.0, 1, "run")])
        with pytest.raises(LedgerError, match="not the ledger of a site"):
            ledger.new_account("why not")
        with pytest.raises(LedgerError, match="belong to no account"):
            ledger.account()


# ------------------------------------------------------------------------------------------------------ put back


def put_back(federation, copy):
    shutil.rmtree(federation.place(NORTH))
    shutil.copytree(copy, federation.place(NORTH))


def older_folder(federation, talk):
    """A site after one round of a run, and a copy of its folder from before that round."""
    first = talk(federation.site(NORTH), federation.terms())
    assert first.propose().kind == "agreed"
    copy = federation.folder / "copy"
    shutil.copytree(federation.place(NORTH), copy)
    reply = first.round(0)
    assert reply.kind == "update"
    return first, copy, reply


def test_an_older_ledger_is_refused_while_no_run_is_open(tiny, talk):
    federation = tiny(rounds=1)
    federation.site(NORTH)
    old = federation.folder / "old.db"
    shutil.copy(federation.place(NORTH) / "ledger.db", old)
    first = talk(federation.site(NORTH), federation.terms())
    first.propose()
    first.round(0)
    running = first.site
    for path in federation.place(NORTH).glob("ledger.db-*"):
        path.unlink()
    shutil.copy(old, federation.place(NORTH) / "ledger.db")
    shutil.rmtree(federation.place(NORTH) / "runs")
    with pytest.raises(RolledBackError, match="put back to an older state"):
        federation.site(NORTH)
    second = talk(running, replace(first.terms, run="cd" * 16))
    assert code(second.propose()) == "rolled-back"
    assert code(second.say("hello", {})) == "rolled-back"
    problems = [check.says for check in doctor(federation.place(NORTH) / "site.toml") if not check.fine]
    assert any("put back to an older state" in says for says in problems)
    (federation.place(NORTH) / "ledger.db").unlink()  # a lost ledger is an old one too
    with pytest.raises(RolledBackError):
        federation.site(NORTH)


def test_a_ledger_with_other_rows_of_the_same_number_is_refused(tiny, talk):
    federation = tiny()
    _, copy, _ = older_folder(federation, talk)
    put_back(federation, copy)
    with federation.ledger(NORTH) as ledger:
        ledger.charge([Charge(ledger.account(), 0, "elsewhere", 0.1, 1.0, 1, "another run")])
    with pytest.raises(RolledBackError):
        federation.site(NORTH)


def masked(tiny, talk):
    """Four sites that answered round 0, and a copy of a site's folder from before."""
    names = ("a", "b", "c", NORTH)
    federation = tiny(trust="secure-aggregation", names=names, dropouts=1)
    terms = federation.terms()
    talks = {name: talk(federation.site(name), terms) for name in names}
    offers = {f"offer:{name}": each.propose().arrays["offer"] for name, each in talks.items()}
    copy = federation.folder / "copy"
    shutil.copytree(federation.place(NORTH), copy)
    replies = {name: each.round(0, arrays=offers) for name, each in talks.items()}
    return federation, talks[NORTH], offers, copy, {name: reply.arrays["masked"] for name, reply in replies.items()}


def test_a_folder_put_back_under_masks_answers_no_second_vector(tiny, talk):
    federation, north, offers, copy, _ = masked(tiny, talk)
    put_back(federation, copy)
    assert code(north.round(0, arrays={**offers, "theta": put(1)})) == "rolled-back"
    with pytest.raises(RolledBackError):
        federation.site(NORTH)


def test_a_folder_from_before_the_survivors_were_chosen_is_refused(tiny):
    """Between the charge and the list of survivors no budget is spent, but a second list would open the vector."""
    federation = tiny(trust="secure-aggregation", names=("a", "b", "c", NORTH), rounds=1)
    copy = federation.folder / "copy"

    def fault(node, request, answer):
        reply = answer(request)
        if node == 103 and wire.decode(request).kind == "round":
            shutil.copytree(federation.place(NORTH), copy)
        return reply

    federation.run(fault)
    put_back(federation, copy)
    with pytest.raises(RolledBackError):
        federation.site(NORTH)


def test_an_older_folder_beside_the_newest_ledger_agrees_to_no_second_list_of_survivors(tiny, talk):
    """Whose folder was put back is told to restore the newest ledger: the list must not be lost with the folder."""
    federation, north, _, _, vectors = masked(tiny, talk)
    terms = north.terms
    session = secagg.Session.of(terms.run, roster_of_run(federation.roster, terms), terms.sha256(), 1, 1)
    seals = secagg.seals(session, 0, {name: vector.tobytes() for name, vector in vectors.items()})
    copy, place = federation.folder / "before", federation.place(NORTH)
    shutil.copytree(place, copy)

    def confirm(survivors):
        own = {name: seals[name] for name in survivors}
        fields = {"run": terms.run, "terms": terms.sha256(), "t": 0, "survivors": survivors, "seals": own}
        return code(north.say("confirm", fields))

    assert confirm(["a", "b", "c", NORTH]) == "confirmed"
    newest = (place / "ledger.db").read_bytes()
    put_back(federation, copy)
    (place / "ledger.db").write_bytes(newest)
    north.site = federation.site(NORTH)
    assert confirm(["a", "b", NORTH]) == "replayed"
    assert confirm(["a", "b", "c", NORTH]) == "confirmed"


def test_a_receipt_tells_where_the_witness_is_lost(tiny, talk):
    federation = tiny()
    first, copy, reply = older_folder(federation, talk)
    receipt = reply.fields["receipt"]
    assert receipt.keys() == public.RECEIPT.keys()
    put_back(federation, copy)
    first.site.witness.unlink()
    first.site = federation.site(NORTH)  # nothing here can tell
    assert code(first.say("hello", {"receipt": receipt})) == "rolled-back"
    assert code(first.round(0, arrays={"theta": put(1)})) == "rolled-back"
    with pytest.raises(RolledBackError):
        federation.site(NORTH)


def test_a_receipt_of_the_present_ledger_is_fine(tiny, talk):
    federation = tiny()
    first, _, reply = older_folder(federation, talk)
    assert code(first.say("hello", {"receipt": reply.fields["receipt"]})) == "hello"
    assert code(first.say("hello", {"receipt": first.say("hello", {}).fields["receipt"]})) == "hello"


def test_forged_receipts_are_ignored(tiny, talk):
    federation = tiny()
    first, _, reply = older_folder(federation, talk)
    own, stranger = reply.fields["receipt"], of_site(Identity.make(NORTH))
    far = witness.receipt(Mark(99, 99, "ab" * 32), stranger)
    for forged in (
        far,
        {**far, "key": own["key"]},
        {**own, "rows": 99},
        {**own, "head": "ab" * 32},
        {**own, "signature": "zz"},
        {**own, "rows": "many"},
        {"rows": 2**60},
        [],
        7,
        None,
    ):
        assert code(first.say("hello", {"receipt": forged})) == "hello", forged
    assert code(first.round(1)) == "update"


def test_the_coordinator_shows_what_sites_signed(tiny):
    federation = tiny(rounds=2)
    federation.run()
    stored = json.loads((federation.coordinator / "receipts.json").read_text())
    assert stored.keys() == set(federation.names)
    assert all(receipt["rows"] == 2 == receipt["at"] for receipt in stored.values())
    site = federation.site(NORTH)
    shutil.rmtree(federation.place(NORTH) / "runs")
    (federation.place(NORTH) / "ledger.db").unlink()
    site.witness.unlink()
    shutil.rmtree(federation.coordinator / "run")
    transport = Loopback(federation.sites())
    coordinator = Coordinator(transport, federation.coordinator)
    assert sorted(coordinator.enrolment.greet()) == ["south", "west"]
    (told,) = federation.progress("refused")
    assert (told["site"], "older" in told["reason"]) == (NORTH, True)


def test_the_coordinator_keeps_the_newest_receipt_of_a_key(tmp_path):
    signer, receipts = of_site(Identity.make(NORTH)), Receipts(tmp_path / "receipts.json")
    old, new = (witness.receipt(Mark(rows, rows, "ab" * 32), signer) for rows in (3, 5))
    for document in (old, new, old, {**new, "rows": 9}, None, "text"):
        receipts.keep(NORTH, document)
    assert Receipts(tmp_path / "receipts.json").of(NORTH) == new


def test_receipts_of_many_sites_are_written_once(tmp_path, monkeypatch):
    receipts, written = Receipts(tmp_path / "receipts.json"), []
    documents = {n: witness.receipt(Mark(1, 1, "ab" * 32), of_site(Identity.make(n))) for n in (NORTH, "south")}
    monkeypatch.setattr(witness.files, "write", lambda path, data: written.append(json.loads(data)))
    receipts.keep_all({**documents, "west": None})
    receipts.keep_all(documents)  # nothing is newer
    assert written == [documents]


def test_the_witness_lies_where_site_toml_says_and_is_private(tiny, talk, tmp_path):
    federation = tiny()
    federation.configure(NORTH, witness=str(tmp_path / "elsewhere" / "north.json"))
    older_folder(federation, talk)
    path = tmp_path / "elsewhere" / "north.json"
    assert json.loads(path.read_text())["rows"] == 1
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.write_text("{}")
    with pytest.raises(SordinoError, match=r"witness .* put it back"):
        federation.site(NORTH)


def test_a_finished_run_leaves_charges_and_no_bytes(tiny, talk, capsys):
    federation = tiny(rounds=2)
    coordinator, _ = federation.run()
    path, run = federation.place(NORTH) / "ledger.db", coordinator.terms.run
    with federation.ledger(NORTH) as ledger:
        assert ledger.audit() == []
        assert [ledger.charged(run, ledger.account(), t) for t in range(2)] == [True, True]
        assert [ledger.release(run, ledger.account(), t) for t in range(2)] == [None, None]
    late = talk(federation.site(NORTH), coordinator.terms)
    assert code(late.round(0)) == "order"  # nothing is computed again
    assert federation.charged(NORTH) == [(run, 0), (run, 1)]
    assert main(["ledger", "compact", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["finished_runs"] == 1
    assert main(["ledger", "show", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"]
    assert main(["ledger", "compact", str(path.parent / "none.db")]) == 2


def test_the_certificate_of_a_site_leaves_nothing_uncompared(tiny, talk, capsys):
    federation = tiny(seed=None, rounds=2)
    coordinator, _ = federation.run()
    path = federation.place(NORTH) / "runs" / coordinator.terms.run / "certificate.json"
    assert (path.with_name("metrics.jsonl")).exists()
    assert main(["verify", str(path), "--complete"]) == 0, capsys.readouterr()
