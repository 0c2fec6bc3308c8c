"""Rounds: sums that come out right, and everything that must not come out."""

import dataclasses
import itertools

import numpy as np
import pytest

from sordino.errors import SordinoError, WrongShareError
from sordino.secagg import (
    Member,
    confirm,
    mask,
    masked,
    offer,
    open_sum,
    read_masked,
    read_offer,
    read_reveal,
    reveal,
    seals,
)
from sordino.secagg.derive import add_stream, agree, derive
from sordino.secagg.messages import Offer, write_offer, write_reveal
from sordino.secagg.shamir import PRIME
from tests.support import tiers


def subsets(names, most):
    return itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(most + 1))


# -------------------------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("d", [1, 16_387])
def test_sums_are_right(party, n, d):
    p = party(n, dropouts=(n - 1) // 2, d=d)
    sent = p.masked()
    assert np.array_equal(open_sum(p.session, 3, p.offers(), sent, p.reveals(p.names)), p.total(p.names))


@pytest.mark.parametrize("n", tiers(range(2, 8), range(2, 6)))
def test_every_set_of_dropouts(party, n):
    """First those who offer and send no vector, then those who send one and reveal nothing."""
    p = party(n, dropouts=(n - 1) // 2, d=5)
    t, offers, sent = p.session.threshold, p.offers(), p.masked()
    rng, opened = np.random.default_rng(n), 0
    for early in subsets(p.names, n - t):
        alive = [name for name in p.names if name not in early]
        told = p.reveals(alive)
        for late in subsets(alive, len(alive) - t):
            if n == 7 and rng.random() > 0.2:
                continue
            reveals = {name: told[name] for name in alive if name not in late}
            total = open_sum(p.session, 3, offers, {name: sent[name] for name in alive}, reveals)
            assert np.array_equal(total, p.total(alive))
            opened += 1
    assert opened >= (1 if n == 2 else 2)


def test_sites_that_made_no_offer(party):
    p = party(5, dropouts=2)
    for absent in subsets(p.names, 2):
        here = [name for name in p.names if name not in absent]
        offers = p.offers(here)
        sent = p.masked(here, offers)
        assert np.array_equal(open_sum(p.session, 3, offers, sent, p.reveals(here, offers=offers)), p.total(here))


def test_too_few_open_nothing(party):
    p = party(5, dropouts=2)
    offers, sent, told = p.offers(), p.masked(), p.reveals(p.names)
    two, three = p.names[:2], p.names[:3]

    def only(names, messages):
        return {name: messages[name] for name in names}

    with pytest.raises(SordinoError, match="offers: there are 2, but 3 are needed"):
        mask(p.members["site-0"], 3, only(two, offers), p.vectors["site-0"])
    with pytest.raises(SordinoError, match="offers: there are 2, but 3 are needed"):
        open_sum(p.session, 3, only(two, offers), only(two, sent), only(two, told))
    with pytest.raises(SordinoError, match="masked: there are 2"):
        open_sum(p.session, 3, offers, only(two, sent), only(two, told))
    with pytest.raises(SordinoError, match="reveals: there are 2"):
        open_sum(p.session, 3, offers, sent, only(two, told))
    with pytest.raises(SordinoError, match="survivors: 2 are too few"):
        reveal(p.members["site-0"], 3, offers, two, {})
    with pytest.raises(SordinoError, match="reveal of 'site-0': it is for other survivors"):
        open_sum(p.session, 3, offers, only(three, sent), only(three, told))
    with pytest.raises(SordinoError, match="took no part"):
        open_sum(p.session, 3, offers, only(three, sent), told)


# ---------------------------------------------------------------------------------------------------- what is hidden


def chi_square(words: np.ndarray) -> float:
    """Of the bytes' counts, in standard deviations from what uniform bytes give."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = 4 * words.size / 256
    return float(((counts - expected) ** 2 / expected).sum() - 255) / (2 * 255) ** 0.5


def test_a_masked_vector_looks_uniform(party):
    p = party(3, d=100_000)
    p.vectors = {name: np.full(100_000, 5, np.uint32) for name in p.names}
    hidden = [read_masked(p.session, 3, name, data).vector for name, data in p.masked().items()]
    for words in hidden:
        assert abs(chi_square(words)) < 4.5
        assert (words == 5).mean() < 1e-4
    assert abs(chi_square(hidden[0] - hidden[1])) < 4.5
    skewed = hidden[0].copy()
    skewed[:1000] = 5
    for mutant in (p.vectors["site-0"], hidden[0] & np.uint32(0xFFFFFF), hidden[0] % 2**31, skewed):
        assert chi_square(mutant.astype(np.uint32)) > 4.5


def test_masks_are_those_of_the_formula(party):
    """vector + PRG(b) + those of later sites - those of earlier ones, each left off in turn."""
    p = party(4)
    me = p.members["site-1"]
    hidden = mask(me, 3, p.offers(), p.vectors["site-1"])
    add_stream(hidden, derive(me.seed(3), "self mask", p.session.context, 3, "site-1"), -1)
    for peer, sign in (("site-0", -1), ("site-2", 1), ("site-3", 1)):
        assert not np.array_equal(hidden, p.vectors["site-1"])
        common = agree(me.ephemeral(3), read_offer(p.session, 3, peer, p.offers()[peer]).public)
        add_stream(hidden, derive(common, "pair mask", p.session.context, 3, *sorted(("site-1", peer))), -sign)
    assert np.array_equal(hidden, p.vectors["site-1"])


def test_one_kind_of_share_of_each_peer(party):
    p = party(5, dropouts=2)
    shares = {name: member.shares(3) for name, member in p.members.items()}
    for early in subsets(p.names, 2):
        alive = [name for name in p.names if name not in early]
        for name, data in p.reveals(alive).items():
            told = read_reveal(p.session, 3, name, data)
            position = p.names.index(name)
            assert set(told.seeds) == set(alive)
            assert set(told.keys) == set(early)
            assert all(told.seeds[peer] == shares[peer][position][1] for peer in alive)
            assert all(told.keys[peer] == shares[peer][position][0] for peer in early)
            for peer in p.names:  # not anywhere else in the bytes either
                other = shares[peer][position][0 if peer in alive else 1].to_bytes(33, "little")
                assert other not in data


def test_another_list_of_survivors_is_refused(party):
    p = party(5, dropouts=2)
    me, first, second = p.members["site-0"], p.names[:4], p.names[:3]
    agreed = p.confirmations(first)
    once = reveal(me, 3, p.offers(), first, agreed)
    assert reveal(me, 3, p.offers(), first[::-1], agreed, before=first) == once
    passed = seals(p.session, 3, p.masked())
    assert confirm(me, 3, p.offers(), first[::-1], passed, before=first) == agreed["site-0"]
    for other in (second, p.names):
        with pytest.raises(SordinoError, match="agreed to other survivors"):
            reveal(me, 3, p.offers(), other, p.confirmations(other), before=first)
        with pytest.raises(SordinoError, match="agreed to other survivors"):
            confirm(me, 3, p.offers(), other, passed, before=first)


@pytest.mark.parametrize(
    ("survivors", "match"),
    [
        (["site-1", "site-2", "site-3"], "'site-0' is not among them"),
        (["site-0", "site-1", "site-1", "site-2"], "named once"),
        (["site-0", "site-1", "site-2", "eve"], "sent an offer"),
        (["site-0", "site-1", ["site-2"]], "named once"),
        (["site-0", "site-1"], "too few"),
        ([], "not among them"),
    ],
)
def test_bad_survivors_are_refused(party, survivors, match):
    p = party(5, dropouts=2)
    with pytest.raises(SordinoError, match=match):
        reveal(p.members["site-0"], 3, p.offers(), survivors, {})
    with pytest.raises(SordinoError, match=match):
        confirm(p.members["site-0"], 3, p.offers(), survivors, seals(p.session, 3, p.masked()))


def test_a_site_that_lost_what_it_sent_sends_the_same(party):
    one, two = party(4, dropouts=1), party(4, dropouts=1)
    assert one.offers() == two.offers()
    assert one.masked() == two.masked()
    assert one.reveals(one.names[:3]) == two.reveals(two.names[:3])
    again = Member(one.members["site-0"].identity, one.session, b"another secret, of thirty-two b.")
    assert offer(again, 3) != one.offers()["site-0"]


def test_a_second_vector_under_the_same_masks_is_refused(party):
    p = party(4, dropouts=1)
    me, mine, fewer = p.members["site-0"], p.vectors["site-0"], p.offers(p.names[:3])
    sent = masked(me, 3, p.offers(), mine)
    assert masked(me, 3, p.offers(), mine, before=sent) == sent
    for offers, vector in ((p.offers(), mine + np.uint32(1)), (fewer, mine)):
        with pytest.raises(SordinoError, match="two vectors under one mask"):
            masked(me, 3, offers, vector, before=sent)


def test_boxes_never_share_a_key(party, monkeypatch):
    """Over rounds, runs, plans, thresholds, senders, receivers, and a secret drawn anew."""
    seen = list[tuple[bytes, bytes]]()

    class Cipher:
        def __init__(self, key):
            self.key = key

        def encrypt(self, nonce, text, about):
            seen.append((self.key, nonce))
            return bytes(len(text) + 16)

    monkeypatch.setattr("sordino.secagg.boxes.ChaCha20Poly1305", Cipher)
    for p in (party(4), party(4, run="run-2"), party(4, plan="cd" * 32), party(4, dropouts=1)):
        for member, round in itertools.product(p.members.values(), (0, 1)):
            offer(member, round)
    renewed = dataclasses.replace(p.members["site-0"], secret=bytes(32))
    offer(renewed, 0)
    assert len(set(seen)) == len({key for key, _ in seen}) == len(seen) == 4 * 4 * 2 * 3 + 3


# ------------------------------------------------------------------------------------- a server that changes messages


def both(p, offers):
    """What a site says to such offers, in either step."""
    for step in (
        lambda: mask(p.members["site-0"], 3, offers, p.vectors["site-0"]),
        lambda: reveal(p.members["site-0"], 3, offers, list(offers), {}),
    ):
        with pytest.raises(SordinoError) as caught:
            step()
        yield str(caught.value)


def changed(p, **other):
    """The party's site-1, elsewhere, says this."""
    elsewhere = dataclasses.replace(p.session, **other) if other else p.session
    return dataclasses.replace(p.members["site-1"], session=elsewhere)


@pytest.mark.parametrize("what", ["key", "round", "run", "plan", "threshold", "signature", "box", "name", "empty"])
def test_a_changed_offer_is_refused(party, what):
    p = party(4, dropouts=1)
    offers, victim = dict(p.offers()), p.members["site-1"]
    true = read_offer(p.session, 3, "site-1", offers["site-1"])
    boxes = true.boxes.copy()
    boxes[:, 0] ^= 1
    eve = dataclasses.replace(victim, identity=dataclasses.replace(victim.identity))
    object.__setattr__(eve.identity, "sign_key", bytes(32))  # she holds the name and all else, but not this
    offers["site-1"] = {
        "key": write_offer(eve, 3, Offer(bytes([9]) + bytes(31), true.commitment, true.boxes)),
        "round": offer(victim, 4),
        "run": offer(changed(p, run="run-2"), 3),
        "plan": offer(changed(p, plan="cd" * 32), 3),
        "threshold": offer(changed(p, threshold=4), 3),
        "signature": offers["site-1"][:-64] + bytes(64),
        "box": write_offer(victim, 3, Offer(true.public, true.commitment, boxes)),
        "name": offers["site-2"],
        "empty": b"",
    }[what]
    for words in both(p, offers):
        assert "'site-1'" in words
    if what != "box":  # the server cannot see into boxes
        with pytest.raises(SordinoError, match="site-1"):
            open_sum(p.session, 3, offers, p.masked(), p.reveals(p.names))


def test_a_key_of_low_order_is_refused(party):
    p = party(4, dropouts=1)
    true = read_offer(p.session, 3, "site-1", p.offers()["site-1"])
    offers = {
        **p.offers(),
        "site-1": write_offer(p.members["site-1"], 3, Offer(bytes(32), true.commitment, true.boxes)),
    }
    assert all("offer of 'site-1': its key is of low order" in words for words in both(p, offers))


def test_ones_own_offer_must_be_there_unchanged(party):
    p = party(4, dropouts=1)
    without = {name: data for name, data in p.offers().items() if name != "site-0"}
    for offers in (without, {**without, "site-0": offer(p.members["site-0"], 2)}):
        assert all("offer of 'site-0': it is missing or changed" in words for words in both(p, offers))


def test_strangers_are_refused(party):
    p = party(4, dropouts=1)
    offers = {**p.offers(), "eve": p.offers()["site-1"]}
    assert all("'eve' is not in the roster" in words for words in both(p, offers))


def test_vectors_masked_with_other_offers_are_not_opened(party):
    p = party(4, dropouts=1)
    fewer = p.offers(["site-0", "site-1", "site-2"])
    sent = {**p.masked(), "site-1": masked(p.members["site-1"], 3, fewer, p.vectors["site-1"])}
    with pytest.raises(SordinoError, match="masked of 'site-1': it is masked with other offers"):
        open_sum(p.session, 3, p.offers(), sent, p.reveals(p.names))
    told = {**p.reveals(["site-0", "site-1", "site-2"]), **p.reveals(["site-0", "site-1", "site-2"], ["site-1"], fewer)}
    three = {name: p.masked()[name] for name in fewer}
    with pytest.raises(SordinoError, match="reveal of 'site-1': it is for other offers"):
        open_sum(p.session, 3, p.offers(), three, told)


def test_other_dimensions_are_named(party):
    p = party(3)
    p.vectors["site-2"] = p.vectors["site-2"][:-1]
    with pytest.raises(SordinoError, match="masked of 'site-2': it has 6 numbers, others 7"):
        open_sum(p.session, 3, p.offers(), p.masked(), p.reveals(p.names))


def test_vectors_are_arrays_of_uint32(party):
    p = party(3)
    for vector in (np.zeros(3), np.zeros((3, 1), np.uint32), [1, 2], np.zeros(0, np.uint32)):
        with pytest.raises(SordinoError, match="vector"):
            mask(p.members["site-0"], 3, p.offers(), vector)


# ---------------------------------------------------------------------- a server that shows everyone something else


def test_a_site_that_was_shown_other_offers_is_not_singled_out(party):
    """n = 5, t = 3. The victim sees offers of two peers only. All others are told that it survived: with the keys of
    the two and the victim's seed, its vector would be open. Nobody confirms such a list, because the victim's seal is
    about other offers."""
    p = party(5, dropouts=2)
    victim, peers, rest = "site-0", ["site-1", "site-2"], ["site-3", "site-4"]
    few = p.offers([victim, *peers])
    passed = seals(p.session, 3, {**p.masked(), **p.masked([victim], few)})
    for name in [*peers, *rest]:
        with pytest.raises(SordinoError, match="seal of 'site-0'"):
            confirm(p.members[name], 3, p.offers(), [victim, *rest] if name in rest else [victim, *rest, name], passed)


def test_bad_seals_are_named(party):
    p = party(3)
    me, good = p.members["site-0"], seals(p.session, 3, p.masked())
    assert confirm(me, 3, p.offers(), p.names, good) == p.confirmations(p.names)["site-0"]
    for bad in ("", "zz" * 64, good["site-1"], good["site-2"].upper(), None, 3):
        with pytest.raises(SordinoError, match="seal of 'site-2'"):
            confirm(me, 3, p.offers(), p.names, {**good, "site-2": bad})
    with pytest.raises(SordinoError, match="seal of 'site-2'"):
        confirm(me, 3, p.offers(), p.names, {k: v for k, v in good.items() if k != "site-2"})


def test_a_site_that_answered_another_request_is_in_no_sum(party):
    """A server that sends one site another model learns that site's message under the noise of a whole sum."""
    p = party(4, dropouts=1)
    one, other = "11" * 32, "22" * 32
    sent = {
        n: masked(p.members[n], 3, p.offers(), p.vectors[n], request=other if n == "site-3" else one) for n in p.names
    }
    passed = seals(p.session, 3, sent)
    for name in p.names:
        with pytest.raises(SordinoError, match="seal of"):
            confirm(p.members[name], 3, p.offers(), p.names, passed, request=other if name == "site-3" else one)
    alive = p.names[:3]
    agreed = {n: confirm(p.members[n], 3, p.offers(), alive, passed, request=one) for n in alive}
    told = {n: reveal(p.members[n], 3, p.offers(), alive, agreed, request=one) for n in alive}
    kept = {n: sent[n] for n in alive}
    assert np.array_equal(open_sum(p.session, 3, p.offers(), kept, told, request=one), p.total(alive))
    with pytest.raises(SordinoError, match="or for another request"):
        open_sum(p.session, 3, p.offers(), kept, told, request=other)


def lying_about_survivors(p, colluders, rng):
    """The lists that a server gets confirmed if it tells every honest site of survivors as it likes.

    Colluders sign whatever it wants. Returns every list that reaches the threshold.
    """
    passed = seals(p.session, 3, p.masked())
    honest = [name for name in p.names if name not in colluders]
    lists = [frozenset(rng.choice(p.names, size=p.session.threshold, replace=False)) for _ in range(3)]
    lists.append(frozenset(p.names))
    signed = {alive: {} for alive in lists}
    for name in honest:  # each confirms one list
        alive = lists[rng.integers(len(lists))]
        if name in alive:
            signed[alive][name] = confirm(p.members[name], 3, p.offers(), sorted(alive), passed)
    for alive, confirmations in signed.items():
        for name in colluders & alive:
            confirmations[name] = confirm(p.members[name], 3, p.offers(), sorted(alive), passed)
    return [(sorted(alive), found) for alive, found in signed.items() if len(found) >= p.session.threshold]


@pytest.mark.parametrize("lies", tiers([6, 30], 1))
def test_a_server_that_tells_of_different_survivors_opens_at_most_one_sum(party, lies):
    """Before sites confirmed a list, n = 20 with 9 dropouts and a colluder opened sums of 2 honest vectors."""
    p, rng = party(9, dropouts=3, colluders=2), np.random.default_rng(0)
    assert p.session.threshold == 6
    for _ in range(lies):
        agreed = lying_about_survivors(p, {"site-0", "site-1"}, rng)
        assert len(agreed) <= 1
    alive = p.names[:6]
    agreed = p.confirmations(alive)
    for name in alive[: 2 if lies < 30 else None]:
        five = {n: agreed[n] for n in alive[:5]}
        with pytest.raises(SordinoError, match="confirmations: 5 sites confirmed this list of survivors, 6 are needed"):
            reveal(p.members[name], 3, p.offers(), alive, five)
        with pytest.raises(SordinoError, match="confirmations: 0 sites"):  # signatures under another list
            reveal(p.members[name], 3, p.offers(), p.names[:7], agreed)
        for forged in ("", "00" * 64, agreed["site-1"], None):
            with pytest.raises(SordinoError, match="confirmations: 5 sites"):
                reveal(p.members[name], 3, p.offers(), alive, {**agreed, "site-0": forged})


# ------------------------------------------------------------------------------------------------------ wrong shares


def lying(p, liar, survivors, kind, about):
    told = read_reveal(p.session, 3, liar, p.reveals(survivors, [liar])[liar])
    shares = dict(getattr(told, kind))
    shares[about] = (shares[about] + 2**100) % PRIME
    return write_reveal(p.members[liar], 3, told._replace(**{kind: shares}))


@pytest.mark.parametrize(("kind", "about"), [("seeds", "site-2"), ("keys", "site-4")])
def test_a_wrong_share_is_found_and_named(party, kind, about):
    p = party(5, dropouts=2)
    alive = p.names[:4]
    sent = p.masked(alive)
    for liar in p.names[:3]:
        told = {**p.reveals(alive), liar: lying(p, liar, alive, kind, about)}
        with pytest.raises(
            WrongShareError, match=f"reveal of '{liar}': its share of .* of '{about}' is wrong"
        ) as caught:
            open_sum(p.session, 3, p.offers(), sent, told)
        del told[caught.value.site]
        assert np.array_equal(open_sum(p.session, 3, p.offers(), sent, told), p.total(alive))
    exact = {**p.reveals(alive, alive[:3]), "site-1": lying(p, "site-1", alive, kind, about)}
    with pytest.raises(SordinoError, match=f"the shares do not give .* of '{about}'") as lost:
        open_sum(p.session, 3, p.offers(), sent, exact)
    assert not isinstance(lost.value, WrongShareError)


def test_a_site_that_commits_to_another_seed_spoils_the_round_and_is_named(party, monkeypatch):
    p = party(4, dropouts=1)
    others = ["site-0", "site-2", "site-3"]
    offers = p.offers(others)
    with monkeypatch.context() as bent:
        bent.setattr("sordino.secagg.round.commitment", lambda *_: bytes(32))
        offers["site-1"] = offer(p.members["site-1"], 3)
        sent = p.masked(["site-1"], offers)
    sent |= p.masked(others, offers)
    passed = seals(p.session, 3, sent)
    agreed = {name: confirm(p.members[name], 3, offers, p.names, passed) for name in others}
    told = {name: reveal(p.members[name], 3, offers, p.names, agreed) for name in others}
    with pytest.raises(SordinoError, match="the shares do not give the seed of 'site-1'"):
        open_sum(p.session, 3, offers, sent, told)
