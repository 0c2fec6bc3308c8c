"""Box keys of a run: stolen long-term keys open nothing that was recorded before."""

import os
from pathlib import Path

import pytest

from sordino import wire
from sordino.errors import Refused, SordinoError
from sordino.federation import rotations, run_keys
from sordino.operations import backups
from sordino.secagg import Identity, Member, Session, offer, read_offer
from sordino.secagg.round import _shares

SECURE = {"trust": "secure-aggregation", "rounds": 2}
RUN = "ab" * 16


def test_a_key_stolen_later_opens_no_recorded_offer(tiny):
    """The thief has all that is left of every site's folder, and all messages."""
    federation = tiny(**SECURE)
    coordinator, transport = federation.run()
    terms, names = coordinator.terms, federation.names
    recorded = [reply for _, request, reply in transport.log if wire.decode(request).kind == "terms"]
    offers = dict(zip(names, (wire.decode(reply).arrays["offer"].tobytes() for reply in recorded), strict=True))
    stolen = {name: Identity.load(federation.place(name) / "identity.key") for name in names}
    roster = run_keys.roster_of_run(federation.roster, terms)
    session = Session.of(terms.run, roster, terms.sha256(), terms.dropouts, terms.colluders)
    victim, thief = names[:2]
    read = read_offer(session, 0, victim, offers[victim])
    for each in names:  # what is left on the disks
        left = [path.read_bytes() for path in federation.place(each).rglob("*") if path.is_file()]
        for text in terms.run_keys:
            (private,) = [key for key in [bytes.fromhex(text[:64])] if key]
            assert not any(len(data) >= 32 and run_keys.public(data[:32]) == private for data in left)
    with pytest.raises(SordinoError, match="other keys"):
        Member(stolen[thief], session, bytes(32))
    forced = object.__new__(Member)
    object.__setattr__(forced, "identity", stolen[thief])
    object.__setattr__(forced, "session", session)
    with pytest.raises(SordinoError, match="cannot be read"):
        _shares(forced, 0, victim, read)


def test_keys_are_there_during_the_run_and_gone_after_it(tiny):
    federation = tiny(**SECURE)
    seen = []

    def fault(node, request, answer):
        reply = answer(request)
        if wire.decode(request).kind == "round":
            seen.append((federation.folder_of("north") / run_keys.FILE).exists())
            with pytest.raises(SordinoError, match="is open"):
                rotations.rotate(federation.site("north").config)
        return reply

    federation.run(fault)
    assert seen
    assert all(seen)
    for name in federation.names:
        assert not (federation.folder_of(name) / run_keys.FILE).exists()
        assert not (federation.folder_of(name) / "secret").exists()
        assert list((federation.place(name) / run_keys.FOLDER).iterdir()) == []


def test_two_runs_have_other_keys(tiny):
    federation = tiny(**SECURE)
    assert federation.run_key("north") != federation.run_key("north")


def test_a_key_serves_one_run(tiny, talk):
    """A coordinator that names one key in two runs, and ends only the first, kept what opens the first on the disk."""
    federation = tiny(**SECURE)
    terms = federation.terms(run=RUN)
    talk = talk(federation.site("north"), terms)
    assert talk.propose().kind == "agreed"
    other = federation.terms(run="cd" * 16, run_keys=terms.run_keys)
    assert talk.propose(other).fields["code"] == "policy"
    assert "every run has a key of its own" in federation.events("north")[-1]["detail"]
    assert talk.say("withdraw", {"run": RUN, "terms": terms.sha256()}).kind == "withdrawn"
    assert talk.propose(other).fields["code"] == "policy"
    assert talk.propose(terms).kind == "agreed"


def test_terms_without_right_keys_are_refused(tiny, talk):
    federation = tiny(**SECURE)
    terms = federation.terms()
    one, two, three = terms.run_keys

    def refusal(keys, run):
        reply = federation.site("north").answer(
            wire.encode("terms", {"terms": federation.terms(run_keys=keys, run=run * 32).json()})
        )
        return wire.decode(reply).fields.get("code"), federation.events("north")[-1]["detail"]

    assert "differ in length" in refusal((one, two), "1")[1]
    assert refusal((), "2") == ("policy", "run_keys: the terms name 0, and the roster has 3 sites.")
    assert "is not signed" in refusal((one, three, two), "3")[1]  # each signed, by another site
    assert "is not signed" in refusal((one, two, three[:64] + "0" * 128), "4")[1]
    run_keys.erase(federation.place("north"), one)
    assert "does not have" in refusal((one, two, three), "5")[1]


def test_old_waiting_keys_are_deleted(tmp_path):
    identity = Identity.make("north")
    first = run_keys.fresh(tmp_path, identity)
    run_keys.waiting(tmp_path, first, RUN)
    os.utime(tmp_path / run_keys.FOLDER / first[:64], (0, 0))
    second = run_keys.fresh(tmp_path, identity)
    with pytest.raises(Refused, match="does not have"):
        run_keys.waiting(tmp_path, first, RUN)
    for _ in range(run_keys.MOST_WAITING + 3):
        run_keys.fresh(tmp_path, identity)
    assert len(list((tmp_path / run_keys.FOLDER).iterdir())) == run_keys.MOST_WAITING
    with pytest.raises(Refused, match="does not have"):
        run_keys.waiting(tmp_path, second, RUN)
    with pytest.raises(Refused):
        run_keys.waiting(tmp_path, "../identity.key", RUN)


def test_backups_leave_them_out(tiny):
    federation = tiny(**SECURE)
    federation.run()
    federation.run_key("north")
    kept = backups.backup(federation.place("north"), federation.folder / "north.tar")
    assert not [name for name in kept if run_keys.FOLDER in name or name.endswith("/box")]


def test_copies_that_a_kill_left_are_not_backed_up_and_end_with_the_run(tiny):
    """A process that is killed while it writes a file leaves `.NAME.*.tmp`, with all that the file would have held."""
    federation = tiny("dp-ftrl", trust="secure-aggregation", names=("north", "south", "west", "east"))
    replace, left = os.replace, set()

    def killed_before(source, target):
        """What a kill would leave: the new content under its temporary name."""
        if Path(target).name in ("box", "secret", "pending") and federation.place("north") in Path(target).parents:
            copy = Path(source).with_name(f".{Path(target).name}.killed.tmp")
            copy.write_bytes(Path(source).read_bytes())
            left.add(copy.name)
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", killed_before)

        def fault(node, request, answer):
            if wire.decode(request).kind == "finish" and node == 100:
                found["kept"] = backups.backup(federation.place("north"), federation.folder / "north.tar")
            return answer(request)

        found = {}
        federation.run(fault)
    assert left == {".box.killed.tmp", ".secret.killed.tmp", ".pending.killed.tmp"}
    assert not [name for name in found["kept"] if "killed" in name]
    assert not [path for path in federation.folder_of("north").iterdir() if "killed" in path.name]


def test_offers_still_repeat_after_a_crash(tiny):
    """The box key of a run is stored, so another process writes the same offer."""
    federation = tiny(**SECURE)
    terms = federation.terms()
    federation.site("north").answer(wire.encode("terms", {"terms": terms.json()}))
    first, second = (federation.site("north")._run(terms.run).member for _ in range(2))
    assert offer(first, 0) == offer(second, 0)
