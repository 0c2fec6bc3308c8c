"""The coordinator goes on: without sites that fail or lie, and after a kill from wherever it stood; so do the sites."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import Loopback

from sordino import files, secagg, wire
from sordino.cli.federate import _result
from sordino.cli.run import quality
from sordino.data.sources import Dataset
from sordino.errors import SordinoError, StoppedError
from sordino.evidence.ledger import Ledger
from sordino.federation import coordinator as coordinator_module
from sordino.federation import messenger, sentences
from sordino.federation import site_run as module
from sordino.federation.coordinator import Coordinator
from sordino.federation.progress import parsed, read_lines
from sordino.secagg.messages import write_reveal
from sordino.training.artifacts import load_model
from sordino.training.metrics import entropy
from tests.support import tiers

FOUR, SIX = tuple("abcd"), tuple("abcdef")
PLAIN = {"method": "dp-scaffold"}  # its sites remember
SECURE = {"trust": "secure-aggregation", "names": FOUR, "dropouts": 1}


class Kill(BaseException):
    """Of a process: nothing in it catches this."""


def model_of(federation):
    return load_model(federation.coordinator / "run" / "model.safetensors")[1]


def came(federation):
    return [line["came"] for line in federation.progress("round")]


def once(federation, rounds=3, sites=None):
    """Every site's ledger holds each round once."""
    for name in sites or federation.names:
        assert [t for _, t in federation.charged(name)] == list(range(rounds)), name


def altered(reply, fields=(), arrays=(), kind=None):
    found = wire.decode(reply)
    return wire.encode(kind or found.kind, found.fields | dict(fields), found.arrays | dict(arrays))


def fault_at(kind, how, nodes=(100,)):
    """Replies of some nodes to messages of one kind, changed by `how(reply, message)`."""

    def fault(node, request, answer):
        reply = answer(request)
        return how(reply, request) if node in nodes and wire.decode(request).kind == kind else reply

    return fault


# ------------------------------------------------------------------------------------------------- messages in the open

SIZE = 15
BIG = np.zeros(2**20, np.float32)


def nested(reply, request):
    return altered(reply, {"tree": [[0]]})


def of(name, value):
    def how(reply, request):
        array = wire.decode(reply).arrays["update0"].copy()
        array[2] = value
        return altered(reply, arrays={"update0": array})

    return pytest.param(how, id=name)


def first_reply():
    """What was said in round 0, whatever is asked."""
    kept = []

    def how(reply, request):
        kept.append(reply)
        return kept[0] if len(kept) > 1 else None

    return how


BAD = [
    pytest.param(lambda r, _: b"", id="nothing"),
    pytest.param(lambda r, _: b"\x00" * 1000, id="zeros"),
    pytest.param(lambda r, _: r[:-1], id="cut off"),
    pytest.param(lambda r, _: r + b"x", id="too long"),
    pytest.param(lambda r, request: request, id="the message itself"),
    pytest.param(lambda r, _: wire.encode("refused", {"code": "policy", "reason": "x" * 10**6}), id="a refusal"),
    pytest.param(lambda r, _: wire.encode("refused", {}), id="a bare refusal"),
    pytest.param(lambda r, _: altered(r, kind="finished"), id="another kind"),
    pytest.param(lambda r, _: altered(r, {"run": "00" * 16}), id="another run"),
    pytest.param(lambda r, _: altered(r, {"t": 7}), id="another round"),
    pytest.param(lambda r, _: altered(r, {"t": [[]]}), id="a round that is a list"),
    pytest.param(lambda r, _: altered(r, {"tree": []}), id="an empty tree"),
    pytest.param(lambda r, _: altered(r, {"tree": [0, 0, 0]}), id="one array many times"),
    pytest.param(lambda r, _: altered(r, {"tree": {"a": 0}}), id="a tree of tables"),
    pytest.param(lambda r, _: altered(r, {"tree": -1}), id="a leaf that is not there"),
    pytest.param(nested, id="nested once more"),
    pytest.param(lambda r, _: altered(r, {"tree": [0, 1]}, {"update1": np.zeros(SIZE, np.float32)}), id="two vectors"),
    pytest.param(lambda r, _: altered(r, arrays={"update0": BIG}), id="a vector of a million"),
    pytest.param(lambda r, _: altered(r, arrays={"update0": np.zeros((5, SIZE), np.float32)}), id="five vectors"),
    pytest.param(lambda r, _: altered(r, arrays={"update0": np.zeros(1, np.float32)}), id="one number"),
    pytest.param(lambda r, _: altered(r, arrays={"update0": np.zeros((), np.float32)}), id="no axis"),
    pytest.param(lambda r, _: altered(r, arrays={"update0": np.zeros(SIZE, np.int64)}), id="integers"),
    pytest.param(lambda r, _: altered(r, arrays={"update0": np.full(SIZE, 1e300)}), id="beyond float32"),
    of("NaN", np.nan),
    of("infinity", np.inf),
    pytest.param(first_reply(), id="a round before"),
]


@pytest.fixture(scope="module")
def made():
    """What runs ended with that others are compared to; each is made once."""
    return {}


def model_once(tiny, made, settings, *faults):
    """The model of a federation with these settings, made once with such faults and once without."""
    name = str(settings), len(faults)
    if name not in made:
        federation = tiny(**settings)
        federation.run(*faults)
        made[name] = model_of(federation)
    return made[name]


NOT_HEARD = fault_at("round", lambda reply, request: None)  # the first site, in any round


@pytest.mark.parametrize("how", BAD)
def test_a_reply_that_is_no_message_counts_as_none_and_the_run_goes_on(tiny, made, how):
    federation = tiny(**PLAIN)
    federation.run(fault_at("round", how))
    assert came(federation) == [["south", "west"]] * 3
    assert torch.equal(model_of(federation), model_once(tiny, made, PLAIN, NOT_HEARD))
    once(federation)  # at the first site as well: it answered, and what left it is paid for


def test_numbers_so_large_that_no_model_is_left_move_nothing(tiny):
    federation = tiny(rounds=3)

    def how(reply, request):
        array = np.full(SIZE, np.finfo(np.float32).max)
        return altered(reply, arrays={"update0": array}) if wire.decode(request).fields["t"] == 1 else reply

    federation.run(fault_at("round", how, (100, 101, 102)))
    assert torch.isfinite(model_of(federation)).all()
    assert [line["t"] for line in federation.progress("abandoned")] == [1]
    once(federation)


def test_a_rule_that_fails_in_every_round_stops_the_run_before_it_spends_more(tiny):
    federation = tiny(rounds=6)

    def how(reply, request):
        return altered(reply, arrays={"update0": np.full(SIZE, np.finfo(np.float32).max)})

    with pytest.raises(SordinoError, match="3 rounds in a row"):
        federation.run(fault_at("round", how, (100, 101, 102)))
    assert [line["t"] for line in federation.progress("abandoned")] == [0, 1, 2]
    for name in federation.names:
        assert [t for _, t in federation.charged(name)] == [0, 1, 2]


def test_sites_that_agree_on_a_wrong_form_spoil_a_round_and_not_the_run(tiny):
    federation = tiny(rounds=3)

    def how(reply, request):
        spoiled = altered(reply, {"tree": [0, 1]}, {"update1": np.zeros(2, np.float32)})
        return spoiled if wire.decode(request).fields["t"] == 0 else reply

    federation.run(fault_at("round", how, (100, 101, 102)))
    assert [line["t"] for line in federation.progress("abandoned")] == [0]
    assert model_of(federation).abs().max() > 0


@pytest.mark.parametrize(
    "fields",
    [{"name": 7}, {"name": "nobody"}, {"records": "many"}, {"records": True}, {"epsilon": "none"}, {"epsilon": []}],
)
def test_who_does_not_say_who_it_is_is_not_met(tiny, monkeypatch, fields):
    monkeypatch.setattr(messenger, "POLL", 1e-3)
    federation = tiny(patience=0.01)
    with pytest.raises(SordinoError, match="north did not connect within"):
        federation.run(fault_at("hello", lambda reply, request: altered(reply, fields)))
    assert not (federation.coordinator / "run" / "terms.json").exists()


def test_terms_that_a_site_refuses_begin_nothing(tiny):
    federation = tiny()
    federation.configure("south", most_rounds=1)
    with pytest.raises(SordinoError, match="south: the site does not take part in such a run"):
        federation.run()
    assert all(federation.charged(name) == [] for name in federation.names)


def test_a_site_that_refuses_every_round_is_left_out(tiny):
    federation = tiny()

    def fault(node, request, answer):
        if node == 101 and wire.decode(request).kind == "round":
            request = altered(request, {"terms": "00" * 32})
        return answer(request)

    federation.run(fault)
    assert came(federation) == [["north", "west"]] * 3
    assert {line["site"] for line in federation.progress("refused")} == {"south"}
    assert federation.charged("south") == []
    once(federation, sites=("north", "west"))


def test_nobody_at_all_moves_nothing_and_the_run_ends(tiny):
    federation = tiny()
    federation.run(fault_at("round", lambda reply, request: None, (100, 101, 102)))
    assert came(federation) == [[]] * 3
    assert not model_of(federation).any()
    once(federation)


# ------------------------------------------------------------------------------------------------------ under the masks


def flipped(key):
    def how(reply, request):
        array = wire.decode(reply).arrays[key].copy()
        array[len(array) // 2] ^= 1
        return altered(reply, arrays={key: array})

    return how


def as_floats(key):
    return lambda reply, request: altered(reply, arrays={key: np.full(40, np.nan)})


SPOILT = {
    "lost": lambda key: lambda r, _: None,
    "cut off": lambda key: lambda r, _: r[: len(r) // 2],
    "empty": lambda key: lambda r, _: altered(r, arrays={key: np.zeros(0, np.uint8)}),
    "a bit flipped": flipped,
    "floats": as_floats,
    "a round before": lambda key: first_reply(),
    "refused": lambda key: lambda r, _: wire.encode("refused", {"code": "failed", "reason": ""}),
}


@pytest.mark.parametrize("spoilt", tiers(SPOILT, ["lost", "a bit flipped", "floats", "refused"]))
def test_a_masked_vector_that_is_none_counts_as_dropped_out(tiny, made, spoilt):
    federation = tiny(**SECURE)
    federation.run(fault_at("round", SPOILT[spoilt]("masked")))
    assert came(federation) == [["b", "c", "d"]] * 3
    assert torch.equal(model_of(federation), model_once(tiny, made, SECURE, NOT_HEARD))
    once(federation)


@pytest.mark.parametrize("spoilt", tiers(SPOILT, ["lost", "cut off", "empty", "a round before"]))
def test_a_reveal_that_is_none_is_not_needed(tiny, made, spoilt):
    federation = tiny(**SECURE)
    federation.run(fault_at("reveal", SPOILT[spoilt]("reveal")))
    assert came(federation) == [list(FOUR)] * 3
    assert torch.equal(model_of(federation), model_once(tiny, made, SECURE))
    once(federation)


@pytest.mark.parametrize("what", ["a wrong share", "other survivors", "other offers"])
def test_a_signed_lie_is_named_and_left_out(tiny, made, what):
    federation = tiny(**SECURE)
    liar = federation.site("a")

    def how(reply, request):
        asked, found = wire.decode(request), wire.decode(reply)
        run, t = liar._run(asked.fields["run"]), asked.fields["t"]
        said = secagg.read_reveal(run.member.session, t, "a", found.arrays["reveal"].tobytes())
        if what == "a wrong share":
            said = said._replace(seeds={name: (share + 1) % 2**200 for name, share in said.seeds.items()})
        elif what == "other survivors":
            gone = said.seeds.pop("d")
            said = said._replace(keys={"d": gone})
        else:
            said = said._replace(shown_sha256="00" * 32)
        signed = np.frombuffer(write_reveal(run.member, t, said), np.uint8)
        return altered(reply, arrays={"reveal": signed})

    answers = federation.sites() | {100: liar.answer}
    federation.run(fault_at("reveal", how), answers)
    assert came(federation) == [list(FOUR)] * 3
    assert torch.equal(model_of(federation), model_once(tiny, made, SECURE))
    assert [(line["site"], line["t"]) for line in federation.progress("misfit")] == [("a", t) for t in range(3)]


def test_a_threshold_that_no_site_would_accept_is_refused_before_anybody_is_asked(tiny):
    federation = tiny(trust="secure-aggregation", names=tuple("abcde"), dropouts=2)
    asked = []
    with pytest.raises(SordinoError, match="dropouts: 2 of 5 sites"):
        federation.run(lambda node, request, answer: (asked.append(wire.decode(request).kind), answer(request))[1])
    assert set(asked) == {"hello"}


@pytest.mark.parametrize("kind", ["round", "confirm", "reveal"])
def test_too_many_missing_lose_the_round_which_stays_paid_for_and_the_run_goes_on(tiny, kind):
    federation = tiny(**SECURE)

    def how(reply, request):
        return None if wire.decode(request).fields["t"] == 1 else reply

    federation.run(fault_at(kind, how, (100, 103)))
    assert [line["t"] for line in federation.progress("abandoned")] == [1]
    assert came(federation) == [list(FOUR), [], list(FOUR)]
    assert model_of(federation).abs().max() > 0
    once(federation)
    plan_epsilon = federation.certificate("a")["epsilon"]
    site = federation.site("a")
    with site.ledger() as ledger:
        spent = ledger.spent_epsilon(site.account, 1e-5)
    assert spent == pytest.approx(plan_epsilon, rel=1e-6)  # nothing was given back


def test_a_coordinator_that_tells_sites_of_different_survivors_or_models_opens_nothing(tiny):
    """Each lie is told in one round to two of six sites; the threshold is four."""
    for lie in ("survivors", "theta"):
        federation = tiny(trust="secure-aggregation", names=SIX, dropouts=2, rounds=2)

        def fault(node, request, answer, lie=lie):
            told = wire.decode(request)
            if node not in (100, 101, 102) or told.fields.get("t") != 0:
                return answer(request)
            if lie == "survivors" and told.kind == "confirm":
                fewer = [name for name in told.fields["survivors"] if name != SIX[5]]
                return answer(wire.encode(told.kind, told.fields | {"survivors": fewer}, told.arrays))
            if lie == "theta" and told.kind == "round":
                theta = told.arrays["theta"] + np.float32(1)
                return answer(wire.encode(told.kind, told.fields, {**told.arrays, "theta": theta}))
            return answer(request)

        federation.run(fault)
        assert [line["t"] for line in federation.progress("abandoned")] == [0]
        assert came(federation) == [[], list(SIX)]
        once(federation, rounds=2)


STEPS = ["terms", "round", "confirm", "reveal", "offer", "finish"]


FAILURES = [(2, True), (1, True), (2, False)]  # sites that fail, and whether they heard the message


@pytest.mark.parametrize(
    ("step", "count", "delivered"),
    tiers(
        [(step, *failure) for step in STEPS for failure in FAILURES],
        [(step, *FAILURES[k % 3]) for k, step in enumerate(STEPS)],
    ),
)
def test_as_many_as_may_fail_fail_at_each_step_of_a_secure_round(tiny, step, count, delivered):
    federation = tiny(trust="secure-aggregation", names=SIX, dropouts=2, rounds=2)
    lost, seen = {100 + k for k in range(count)}, set()

    def fault(node, request, answer):
        kind = wire.decode(request).kind
        if step == "offer" and kind == "reveal" and node in lost:
            return None  # so that offers are asked for
        if kind == step and node in lost and (node, kind) not in seen:
            seen.add((node, kind))
            if delivered:
                answer(request)
            return None
        return answer(request)

    federation.run(fault)
    assert len(seen) == count
    assert federation.progress("abandoned") == []
    (*_, done) = federation.progress("finished")
    away = {SIX[node - 100] for node in lost}
    assert set(done["sites"]) == set(SIX)  # whoever missed the terms, or the end, was told again
    for name in SIX:
        rounds = [t for _, t in federation.charged(name)]
        assert rounds == sorted(set(rounds))
        if name not in away:
            assert rounds == [0, 1]
    assert all(len(names) >= 4 for names in came(federation))
    if step in ("terms", "offer", "finish"):
        expected = list(SIX) if step != "offer" else sorted(set(SIX) - away)
        assert came(federation)[-1] == expected


@pytest.mark.parametrize("step", ["terms", "round", "finish"])
@pytest.mark.parametrize("delivered", [True, False], ids=["reply lost", "message lost"])
def test_in_the_open_any_number_may_fail_at_each_step(tiny, step, delivered):
    for count in (1, 2):
        federation = tiny(**PLAIN)
        lost, seen = {100 + k for k in range(count)}, set()

        def fault(node, request, answer, lost=lost, seen=seen):
            kind = wire.decode(request).kind
            if kind == step and node in lost and node not in seen:
                seen.add(node)
                if delivered:
                    answer(request)
                return None
            return answer(request)

        federation.run(fault)
        assert federation.progress("finished")
        assert torch.isfinite(model_of(federation)).all()
        assert came(federation)[-1] == sorted(federation.names)
        once(federation, sites=federation.names[count:])


def test_a_site_that_missed_the_terms_and_then_refuses_them_is_left_out(tiny):
    federation = tiny(rounds=3)

    def fault(node, request, answer):
        kind = wire.decode(request).kind
        if node == 100 and kind == "terms":
            if not federation.progress("begun"):
                return None
            federation.configure("north", methods=["dp-fedgd"])
            return federation.site("north").answer(request)
        return answer(request)

    federation.run(fault)
    assert came(federation) == [["south", "west"]] * 3
    assert federation.charged("north") == []


@pytest.mark.parametrize("keys", [{}, SECURE], ids=["plain", "secure"])
def test_rounds_that_come_to_nothing_stop_the_run_which_goes_on_when_asked(tiny, keys):
    federation = tiny(**{**keys, "rounds": 6})
    answers, broken = federation.sites(), [True]

    def fault(node, request, answer):
        return None if broken[0] and wire.decode(request).kind == "round" else answer(request)

    with pytest.raises(SordinoError, match="3 rounds in a row"):
        federation.run(fault, answers)
    assert came(federation) == [[]] * 3
    assert all(federation.charged(name) == [] for name in federation.names)
    broken[0] = False
    federation.run(fault, answers)
    assert federation.progress("misfit") == [], "offers for rounds that were lost are asked for again, without blame"
    assert came(federation)[3:] == [sorted(federation.names)] * 3
    for name in federation.names:
        assert [t for _, t in federation.charged(name)] == [3, 4, 5]


# --------------------------------------------------------------------------------------------- kills of the coordinator


@dataclass
class Killing:
    """A transport that ends the coordinator at one exchange: before messages leave, midway, or before replies come."""

    answers: dict
    at: int
    when: str
    count: int = 0
    requests: dict = field(default_factory=dict)

    def sites(self):
        return list(self.answers)

    def exchange(self, requests, seconds, enough=None):
        self.count += 1
        now = self.count == self.at
        if now and self.when == "before":
            raise Kill
        found = {}
        for k, (node, request) in enumerate(requests.items()):
            if now and self.when == "midway" and k == 1:
                raise Kill
            found[node] = self.answers[node](request)
            about = wire.decode(request)
            if about.kind in ("round", "reveal"):
                self.requests.setdefault((node, about.kind, about.fields["t"]), set()).add((request, found[node]))
        if now:
            raise Kill
        return found


KILLS = [(PLAIN, "before"), (PLAIN, "midway"), (PLAIN, "after"), (SECURE, "before"), (SECURE, "after")]


@pytest.mark.parametrize(("keys", "when"), tiers(KILLS, [(PLAIN, "midway"), (SECURE, "before")]))
def test_a_coordinator_killed_at_any_exchange_ends_as_if_it_had_not_been(tiny, made, keys, when):
    rounds = 2
    if (name := f"resumed {keys}") not in made:
        clean = tiny(**keys, rounds=rounds)
        clean.run()
        made[name] = model_of(clean), [clean.certificate(site)["epsilon"] for site in clean.names]
    model, epsilons = made[name]
    at = 0
    while True:
        at += 1
        federation = tiny(**keys, rounds=rounds)
        transport = Killing(federation.sites(), at, when)
        try:
            Coordinator(transport, federation.coordinator).run()
        except Kill:
            Coordinator(transport, federation.coordinator).run()
        else:
            break
        assert torch.equal(model_of(federation), model), at
        assert [federation.certificate(site)["epsilon"] for site in federation.names] == epsilons
        assert federation.progress("abandoned") == []
        assert federation.progress("misfit") == [], "honest sites are not blamed for a restart"
        once(federation, rounds)
        for told in transport.requests.values():  # one message and one reply, however often
            assert len(told) == 1
        assert not any((federation.folder_of(site) / "secret").exists() for site in federation.names)
    assert at > (5 if keys is PLAIN else 7)


def test_a_coordinator_killed_after_a_lost_round_asks_for_the_offers_it_lacks(tiny):
    """The site that was away made its last offer for a round that is over."""
    federation = tiny(**SECURE, rounds=3)
    answers, state = federation.sites(), {"down": True}

    def fault(node, request, answer):
        about = wire.decode(request)
        if about.kind == "round" and about.fields["t"] == 1 and node in (100, 101):
            return None  # not delivered: the round is lost
        if about.kind == "offer" and about.fields["t"] == 2 and state.pop("down", False):
            raise Kill
        return answer(request)

    with pytest.raises(Kill):
        federation.run(fault, answers)
    federation.run(fault, answers)
    assert came(federation)[-1] == list(FOUR)
    assert [t for _, t in federation.charged("a")] == [0, 2]
    assert [t for _, t in federation.charged("c")] == [0, 1, 2]


def test_a_round_that_was_begun_without_a_site_is_resumed_without_it(tiny):
    """Other offers in the messages would be another round, which the sites refuse."""
    federation = tiny(**SECURE, rounds=2)
    answers, state = federation.sites(), {"away": True}

    def fault(node, request, answer):
        about = wire.decode(request)
        if about.kind == "reveal" and state.pop("away", False):
            raise Kill
        if node == 100 and about.kind in ("terms", "offer") and "away" in state:
            return None
        return answer(request)

    with pytest.raises(Kill):
        federation.run(fault, answers)
    federation.run(fault, answers)
    assert federation.progress("abandoned") == []
    assert came(federation) == [["b", "c", "d"], list(FOUR)]
    assert [t for _, t in federation.charged("a")] == [1]


@pytest.mark.parametrize("keys", [SECURE, {**PLAIN, "names": FOUR, "dropouts": 1}], ids=["secure", "plain"])
def test_a_site_that_comes_after_the_others_to_a_resumed_run_takes_part_from_then_on(tiny, monkeypatch, keys):
    monkeypatch.setattr(messenger, "POLL", 1e-3)
    federation = tiny(**keys, rounds=4, deadline=0.01, patience=5.0)
    answers, state = federation.sites(), {"alive": True}

    def fault(node, request, answer):
        about = wire.decode(request)
        if about.kind == "round" and about.fields["t"] == 1 and state.pop("alive", False):
            raise Kill
        return answer(request)

    with pytest.raises(Kill):
        federation.run(fault, answers)
    late = answers.pop(100)

    def back(node, request, answer):
        about = wire.decode(request)
        if about.kind == "round" and about.fields["t"] == 2:
            answers[100] = late
        return answer(request)

    federation.run(back, answers)
    assert [len(names) for names in came(federation)] == [4, 3, 3, 4]
    assert [t for _, t in federation.charged("a")] == [0, 3]
    assert len(federation.progress("finished")[-1]["sites"]) == 4


# --------------------------------------------------------------------------------------------------- kills of a site


def killed_at(monkeypatch, at):
    """Ends the site before or after its `at`-th step that changes something on disk; gives the number of steps."""
    count = [0]

    def around(real):
        def step(*args, **keys):
            count[0] += 1
            if count[0] == at:
                raise Kill
            made = real(*args, **keys)
            count[0] += 1
            if count[0] == at:
                raise Kill
            return made

        return step

    monkeypatch.setattr(module.files, "write", around(module.files.write))
    monkeypatch.setattr(Ledger, "charge", around(Ledger.charge))
    monkeypatch.setattr(os, "replace", around(os.replace))
    monkeypatch.setattr(os, "rename", around(os.rename))
    monkeypatch.setattr(module, "save_model", around(module.save_model))
    monkeypatch.setattr(module.SiteRun, "look", around(module.SiteRun.look))
    return count


def scripted(federation, terms, at=None, monkeypatch=None):
    """Terms, three rounds and the end, each message until it is answered; replies, and how many kills there were."""
    replies, kills, c = [], 0, np.zeros(SIZE, np.float32)
    site = federation.site("north")
    with monkeypatch.context() as patch:
        count = killed_at(patch, at)
        fields = {"run": terms.run, "terms": terms.sha256()}
        requests = [("terms", {"terms": terms.json()}, {})]
        requests += [("round", fields | {"t": t, "extras": 0}, {"theta": c + t, "extras0": c - t}) for t in range(3)]
        requests += [("finish", fields | {"done": 3}, {"theta": c})]
        for request in requests:
            data = wire.encode(*request)
            try:
                reply = site.answer(data)
            except Kill:
                kills += 1
                site = federation.site("north")
                reply = site.answer(data)
            assert wire.decode(reply).kind != "refused", (at, request[0], federation.events("north")[-1])
            assert request[0] == "finish" or site.answer(data) == reply  # and once more
            message = wire.decode(reply)
            fields_sent = {k: v for k, v in message.fields.items() if k != "receipt"}  # each federation has other keys
            replies.append(wire.encode(message.kind, fields_sent, message.arrays))
    memory = (federation.folder_of("north") / "memory").read_bytes()
    return replies, memory, kills, count[0]


@pytest.mark.parametrize("stride", tiers([4, 1], 1))
def test_a_site_killed_at_any_step_says_and_remembers_what_it_would_have(tiny, monkeypatch, stride):
    federation = tiny(**PLAIN)
    terms = federation.terms()
    replies, memory, kills, steps = scripted(federation, terms, None, monkeypatch)
    assert (kills, steps > 30) == (0, True)
    for at in {*range(1, steps + 1, stride), steps}:
        federation = tiny(**PLAIN)
        again, remembered, kills, _ = scripted(federation, terms, at, monkeypatch)
        assert kills == 1
        assert again == replies, at
        assert remembered == memory, at
        once(federation, sites=["north"])
        assert not (federation.folder_of("north") / "secret").exists()


def test_a_site_killed_between_its_charge_and_its_reply_keeps_what_it_owes(tiny, talk, monkeypatch):
    """With noise that nobody can repeat: the bytes can only come from the ledger."""
    federation = tiny(**PLAIN, seed=None)
    talk = talk(federation.site("north"), federation.terms())
    talk.propose()
    request = talk.request(0, word=np.zeros(SIZE, np.float32))
    stored, charge = [], Ledger.charge

    def killed(self, entries, payload):
        charge(self, entries, payload)
        stored.append(payload)
        raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", killed)
        with pytest.raises(Kill):
            talk.site.answer(request)
    folder = federation.folder_of("north")
    assert (folder / "pending").exists()
    assert not (folder / "memory").exists()
    site = federation.site("north")
    assert [site.answer(request)] == stored
    assert (folder / "memory").exists()
    once(federation, 1, ["north"])


def test_a_site_killed_before_its_charge_forgets_what_it_did_not_say(tiny, talk, monkeypatch):
    federation = tiny(**PLAIN, seed=None)
    talk = talk(federation.site("north"), federation.terms())
    talk.propose()
    c = np.zeros(SIZE, np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", lambda *args: (_ for _ in ()).throw(Kill()))
        with pytest.raises(Kill):
            talk.site.answer(talk.request(0, word=c))
    assert federation.charged("north") == []
    talk.site = federation.site("north")
    assert talk.propose().fields["next"] == 0
    reply = talk.round(0, arrays={"theta": c + 1}, word=c)  # it left nothing, so another model is another first one
    assert reply.kind == "update"
    _, _, memory = talk.site._run(talk.terms.run)._kept()
    np.testing.assert_allclose(memory.numpy(), reply.arrays["update0"] / 2.0, rtol=1e-6)  # zeta / (K local_lr)
    once(federation, 1, ["north"])


@pytest.mark.parametrize("keys", [PLAIN, SECURE], ids=["plain", "secure"])
def test_sites_that_restart_before_every_letter_make_the_same_model(tiny, keys):
    clean, federation = tiny(**keys), tiny(**keys)
    clean.run()
    answers = {
        100 + k: lambda request, name=name: federation.site(name).answer(request)
        for k, name in enumerate(federation.names)
    }
    federation.run(answers=answers)
    assert torch.equal(model_of(federation), model_of(clean))
    once(federation)


def test_the_last_line_has_every_metric_of_the_coordinators_test_records(federation):
    coordinator, _ = federation(rounds=2).run()
    classes, features = len(coordinator.terms.classes), coordinator.terms.features
    coordinator.__dict__["_test"] = torch.randn(40, features, dtype=torch.float64), torch.arange(40) % classes
    found = coordinator._metrics(torch.randn(coordinator.model.size, dtype=torch.float64))["metrics"]
    assert found["records"] == 40
    assert found["constant"] == pytest.approx(entropy(np.arange(40) % classes)), "the log loss of the prevalence"
    shown = dict(quality(found, found["constant"]))
    assert "log loss" in shown["scores"]
    (heading, first), *_ = lines = _result(found)  # as `federate up` prints it
    assert heading == "result"
    assert first.startswith("accuracy")
    assert "balanced" not in first, "another line says it"
    assert "40 test records" in first
    said = " ".join(line for heading, line in lines if heading != "class")
    assert [said.count(name) for name in ("log loss", "AUC")] == [1, 1]
    if classes > 2:
        assert [heading for heading, _ in lines] == ["result", "scores", *["class"] * classes]
        assert set(found["classes"][0]) == {"class", "recall", "auc"}
    if classes == 2:
        assert list(shown) == ["scores", "risks", "threshold"]
        assert "records" not in found["calibration_curve"][0]
    coordinator.__dict__["_test"] = None
    assert coordinator._metrics(torch.zeros(coordinator.model.size)) == {}


def test_a_useless_model_is_called_one(federation, monkeypatch):
    """By the line that ends the coordinator's progress, on its own test records."""
    coordinator, _ = federation(rounds=2).run()
    terms = coordinator.terms
    no_x, no_y = np.zeros((0, terms.features)), np.zeros(0, int)
    data = Dataset("sites", no_x, no_y, no_x, no_y, None, terms.classes)
    model, y = torch.zeros(coordinator.model.size, dtype=torch.float64), torch.arange(40) % len(terms.classes)
    coordinator.__dict__["_test"] = torch.zeros(40, terms.features, dtype=torch.float64), y
    told = coordinator._useless(data, model)
    line = {"what": "finished", "epsilon": 8.0, "sites": ["a"], **told}
    assert "WARNING: the model is no better than a constant guess: its" in sentences.of_coordinator(line, 2)
    monkeypatch.setattr(coordinator_module, "no_better", lambda *_: "")
    assert coordinator._useless(data, model) == {}
    monkeypatch.setattr(coordinator_module, "hardly_better", lambda *_: "its concordance index is 0.51")
    line = {"what": "finished", "epsilon": 8.0, "sites": ["a"], **coordinator._useless(data, model)}
    assert "the model is not shown to be better than a constant guess" in sentences.of_coordinator(line, 2)
    coordinator.__dict__["_test"] = None
    assert coordinator._useless(data, model) == {}


def test_two_coordinators_on_one_folder_are_refused(tiny, monkeypatch):
    federation = tiny()
    monkeypatch.setattr(coordinator_module, "LOCK_SECONDS", 0.1)
    path = federation.coordinator / coordinator_module.COORDINATOR_LOCK
    with files.lock(path), pytest.raises(StoppedError, match="in use by another coordinator"):
        coordinator_module.serve(Loopback(federation.sites()), federation.coordinator)
    assert not (federation.coordinator / "run").exists()  # not a word in the progress of the other one
    coordinator_module.serve(Loopback(federation.sites()), federation.coordinator)
    assert federation.progress("finished")


@pytest.mark.parametrize("where", ["write", "append"])
def test_a_full_disk_ends_the_coordinator_and_the_run_goes_on_when_there_is_room(tiny, monkeypatch, where):
    federation = tiny()
    plain, full = getattr(files, where), []

    def fails(path, data, **more):
        mine = federation.coordinator in Path(path).parents
        if mine and (full or Path(path).name == "checkpoint" or '"what": "round"' in str(data)):
            full.append(path)
            if where == "append":
                plain(path, data[:7])  # what still fitted; `write` leaves no half of a file
            raise OSError(28, "No space left on device")
        plain(path, data, **more)

    with monkeypatch.context() as patch:
        patch.setattr(files, where, fails)
        with pytest.raises(OSError, match="No space left"):
            coordinator_module.serve(Loopback(federation.sites()), federation.coordinator)
    assert full
    coordinator_module.serve(Loopback(federation.sites()), federation.coordinator)
    told = list(parsed(read_lines(federation.coordinator / "run" / "progress.jsonl")))
    assert told[-1]["what"] == "finished"
    assert all(len(federation.charged(name)) == 3 for name in federation.names)
