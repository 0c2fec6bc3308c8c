"""What a hostile server, an old backup or a changed site.toml could once do, and may not again."""

import json
import shutil

import numpy as np
import pytest
import tomli_w
from messages import NUMBERS, SIZE, put

from sordino import wire
from sordino.errors import SordinoError
from sordino.federation import site_data
from sordino.federation.terms import Terms
from sordino.methods import REGISTRY, build
from sordino.privacy.evidence.ledger import Ledger
from sordino.secagg import Identity

NORTH = "north"
SERVED = [name for name in REGISTRY if build(name).proves]


def code(reply):
    return reply.fields.get("code", reply.kind)


@pytest.mark.parametrize("method", SERVED)
def test_every_method_is_served_in_the_open(tiny, method):
    """The words of its own server are of the form that sites hold them against."""
    world = tiny(method, rounds=5)
    try:
        world.terms().plan  # noqa: B018
    except SordinoError as error:
        pytest.skip(str(error))
    world.run()
    rounds = [line["came"] for line in world.progress("round")]
    assert [sorted(names) for names in rounds] == [sorted(world.names)] * 5


@pytest.mark.parametrize("word", [put(-100.0), put(-50.0), NUMBERS])
def test_a_clip_for_each_number_is_not_the_methods_word(tiny, talk, word):
    world = tiny("dp-fedgd", quantile=0.5)
    talk = talk(world.site(NORTH), world.terms())
    talk.propose()
    assert code(talk.round(0, word=word)) == "malformed"
    for t, value in enumerate((-1e30, 1e30, 0.0)):
        reply = talk.round(t, word=np.full(1, value, np.float32))
        assert all(np.isfinite(part).all() for part in reply.arrays.values())


@pytest.mark.parametrize(("method", "fresh"), [("dp-fedsofim", True), ("dp-scaffold", True), ("dp-ftrl", False)])
def test_a_folder_put_back_noises_another_model_anew(tiny, talk, method, fresh):
    world = tiny(method, seed=None)
    place, word = world.place(NORTH), NUMBERS if method == "dp-scaffold" else None
    first = talk(world.site(NORTH), world.terms())
    first.propose()
    shutil.copytree(place, place.with_name("copy"))
    letter, other = first.letter(0, word=word), first.letter(0, word=word, arrays={"theta": put(1e-20)})
    one = first.site.answer(letter)
    answers = []
    for asked in (letter, other):
        shutil.rmtree(place)
        shutil.copytree(place.with_name("copy"), place)
        answers.append(world.site(NORTH).answer(asked))
    assert answers[0] == one  # the same letter, the same bytes
    left, right = (wire.decode(answer).arrays["said0"] for answer in answers)
    assert (np.abs(left - right).max() > 1e-3) == fresh  # carried noise must stay: docs/federation.md


def test_a_ledger_adds_up_under_one_adjacency(tiny, tmp_path):
    world = tiny()
    world.configure(NORTH, adjacency="add-remove")
    world.site(NORTH)
    world.configure(NORTH)
    with pytest.raises(SordinoError, match=r"adjacency: .* add-remove; replace-one"):
        world.site(NORTH)
    with Ledger(world.place(NORTH) / "ledger.db") as ledger:  # whoever only looks need not say
        assert len(ledger) == 0


def test_long_and_odd_letters_do_not_silence_the_log(tiny, talk, monkeypatch):
    monkeypatch.setattr(site_data, "LOG", 5000)
    world = tiny()
    talk = talk(world.site(NORTH), world.terms())
    talk.propose()
    for _ in range(30):
        assert (
            code(talk.say("round", {"run": talk.terms.run, "terms": talk.terms.sha256(), "t": "x" * 10**6, "word": []}))
            == "order"
        )
    assert (world.place(NORTH) / "events.jsonl").stat().st_size < 6000
    assert (world.place(NORTH) / "events.old.jsonl").stat().st_size < 6000
    assert world.events(NORTH)[-1]["code"] == "order"
    talk.propose(world.terms({"method": "\u001b[2Jdp-x"}, run="cd" * 16))
    assert "\x1b" not in world.events(NORTH)[-1]["detail"]


def test_a_seed_taken_out_in_the_middle_is_not_forgotten(tiny, talk):
    world = tiny(rounds=2)
    talk = talk(world.site(NORTH), world.terms())
    talk.propose()
    talk.round(0)
    text = (world.place(NORTH) / "site.toml").read_text()
    (world.place(NORTH) / "site.toml").write_text(text.replace("seed = 7\n", ""))
    talk.site = world.site(NORTH)
    assert talk.site.config.seed is None
    talk.round(1)
    fields = {"run": talk.terms.run, "terms": talk.terms.sha256(), "done": 2}
    assert talk.say("finish", fields, {"theta": NUMBERS}).kind == "finished"
    cert = world.certificate(NORTH)
    assert not cert["certified"]


def test_a_model_of_no_use_is_told_to_the_site_alone(tiny, talk):
    world = tiny(rounds=1)
    talk = talk(world.site(NORTH), world.terms())
    talk.propose()
    talk.round(0)
    reply = talk.say("finish", {"run": talk.terms.run, "terms": talk.terms.sha256(), "done": 1}, {"theta": NUMBERS})
    assert reply.fields == {"run": talk.terms.run}
    assert "constant guess" in world.events(NORTH)[-1]["hint"]


STRICTER = [
    ({"methods": ["dp-fedgd"]}, "policy"),
    ({"trust": ["secure-aggregation"]}, "policy"),
    ({"run_epsilon": 0.1}, "policy"),
    ({"most_rounds": 1}, "policy"),
    ({"test_fraction": 0.9}, "changed"),
]


@pytest.mark.parametrize(("keys", "expected"), STRICTER)
def test_a_site_that_becomes_stricter_is_so_at_once(tiny, talk, keys, expected):
    world = tiny()
    talk = talk(world.site(NORTH), world.terms())
    talk.propose()
    assert talk.round(0).kind == "said"
    world.configure(NORTH, **keys)
    talk.site = world.site(NORTH)
    assert code(talk.round(1)) == expected
    assert [t for _, t in world.charged(NORTH)] == [0]


ENDS = [
    ("dp-fedgd", {"clip": 1e-9}),
    ("dp-fedgd", {"clip": 1e9}),
    ("dp-fedgd", {"class_weights": [1.0, 1e9, 1.0]}),
    ("dp-fedgd", {"class_weights": [1.0, 1e-9, 1.0]}),
    ("dp-fedfc", {"covariance_clip": 1e-20}),
    ("fednewton-head", {"clip": 4.5e-23}),
    ("dp-fedavg", {"steps": 10**6}),
]


@pytest.mark.parametrize(("method", "spec"), ENDS)
def test_bounds_at_the_ends_of_floats_are_refused(tiny, talk, method, spec):
    world = tiny(method)
    assert code(talk(world.site(NORTH), world.terms(spec)).propose()) == "policy"


def test_dropouts_are_the_sites_choice_too(tiny, talk):
    world = tiny(trust="secure-aggregation", names=tuple("abcdef"), dropouts=2)
    world.configure("a", most_dropouts=1)
    assert code(talk(world.site("a"), world.terms()).propose()) == "policy"
    assert code(talk(world.site("b"), world.terms()).propose()) == "agreed"


def test_a_ledger_put_back_is_noticed(tiny, talk):
    world = tiny()
    empty = world.place(NORTH) / "empty.db"
    world.site(NORTH)
    shutil.copy(world.place(NORTH) / "ledger.db", empty)
    world.run()
    shutil.copy(empty, world.place(NORTH) / "ledger.db")
    for path in world.place(NORTH).glob("ledger.db-*"):
        path.unlink()
    with pytest.raises(SordinoError, match=r"ledger .* put the newest back"):
        world.site(NORTH)


def test_a_ledger_put_back_in_the_middle_of_a_run_is_noticed(tiny, talk):
    world = tiny()
    talk = talk(world.site(NORTH), world.terms())
    talk.propose()
    empty = world.place(NORTH) / "empty.db"
    shutil.copy(world.place(NORTH) / "ledger.db", empty)
    assert talk.round(0).kind == "said"
    shutil.copy(empty, world.place(NORTH) / "ledger.db")
    for path in world.place(NORTH).glob("ledger.db-*"):
        path.unlink()
    talk.site = world.site(NORTH)
    for t in (0, 1):
        assert code(talk.round(t, arrays={"theta": put(1)})) == "storage"


@pytest.mark.parametrize("lie", [{"records": 0}, {"records": 2**60}, {"epsilon": -1.0}, {"epsilon": 1e5}])
def test_a_hello_that_cannot_be_true_ends_nothing_for_good(tiny, lie):
    world = tiny(patience=0.01)

    def fault(node, letter, answer):
        found = wire.decode(answer(letter))
        return wire.encode(
            found.kind, found.fields | (lie if node == 101 and found.kind == "hello" else {}), found.arrays
        )

    with pytest.raises(SordinoError, match="south"):
        world.run(fault)
    world.run()
    assert world.progress("finished")


def test_terms_that_were_refused_are_proposed_anew(tiny):
    world = tiny()
    world.configure("south", methods=["dp-scaffold"])
    with pytest.raises(SordinoError, match="refused by south"):
        world.run()
    (world.coordinator / "spec.toml").write_text(tomli_w.dumps({**world.spec, "method": "dp-scaffold"}))
    world.run()
    terms = Terms.read((world.coordinator / "run" / "terms.json").read_text())
    assert terms.parsed.method == "dp-scaffold"
    assert json.loads((world.coordinator / "run" / "certificate.json").read_text())["method"] == "dp-scaffold"


def test_the_key_of_another_site_is_refused(tiny, talk):
    world = tiny(trust="secure-aggregation", names=tuple("abcd"))
    Identity.make("z").save(world.place("a") / "other.key")
    world.configure("a", identity="other.key")
    assert code(talk(world.site("a"), world.terms()).propose()) == "failed"
    assert world.terms().model.size == SIZE


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_terms_of_a_run_that_was_begun_are_kept_though_a_site_refuses_them_now(tiny, trust):
    """Others in their place would be paid for again."""
    world = tiny(trust=trust, names=tuple("abcd"))
    answers = world.sites()

    def fault(node, letter, answer):
        reply = answer(letter)
        if wire.decode(letter).kind == "round" and node == 103:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        world.run(fault, answers)
    before = (world.coordinator / "run" / "terms.json").read_text()
    path = world.place("b") / "data.npz"
    kept = path.read_bytes()
    with np.load(path) as stored:
        np.savez(path, x=stored["x"] + 1, y=stored["y"])
    with pytest.raises(SordinoError, match="refused by b"):
        world.run()
    assert (world.coordinator / "run" / "terms.json").read_text() == before
    path.write_bytes(kept)
    world.run()
    for name in world.names:
        assert [t for _, t in world.charged(name)] == [0, 1, 2]
