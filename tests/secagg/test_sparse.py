"""Rounds along a graph of masks: sums that come out right, and what must not open."""

import dataclasses

import numpy as np
import pytest

from sordino.errors import SordinoError, WrongShareError
from sordino.privacy.mechanisms import mask_graph
from sordino.privacy.mechanisms.mask_graph import PARTS, Parameters
from sordino.secagg import Member, graph, seals, shamir, sparse
from sordino.secagg.messages import (
    SparseReveal,
    read_sparse_offer,
    shown_present,
    write_masked,
    write_sparse_offer,
    write_sparse_reveal,
)

SMALL = Parameters(edge=int(0.7 * PARTS), shares=4, near=1, committee=9, quorum=6)


@pytest.fixture
def sparse_party(party, monkeypatch):
    """A few sites along a graph. It is denser than the function says: that refuses so few."""

    def make(n=14, dropouts=3, colluders=1, found=SMALL, **more):
        monkeypatch.setattr(mask_graph, "ALL_PAIRS", 2)
        monkeypatch.setattr(mask_graph, "parameters", lambda *_: found)
        return Round(party(n, dropouts=dropouts, colluders=colluders, **more))

    return make


class Round:
    """What the sites of a round send if all keep to the protocol, and the server's part in it."""

    def __init__(self, party):
        self.party, self.session, self.t = party, party.session, party.round
        self.members, self.names = party.members, party.names
        self.offers = {name: sparse.offer(self.members[name], self.t) for name in self.names}

    def slips(self, name, present=None):
        present = self.names if present is None else present
        read = {n: read_sparse_offer(self.session, self.t, n, self.offers[n]) for n in present}
        return sparse.slips(self.session, self.t, read, name)

    def masked(self, names=None, present=None):
        present = self.names if present is None else present
        vectors = self.party.vectors
        return {
            n: sparse.masked(self.members[n], self.t, present, self.slips(n, present), vectors[n])
            for n in names or present
        }

    def confirmations(self, alive, present=None):
        present = self.names if present is None else present
        asked = [n for n in alive if n in self.session.committee]
        return {n: sparse.confirm(self.members[n], self.t, present, alive) for n in asked}

    def reveals(self, alive, sent, names=None, present=None):
        present = self.names if present is None else present
        given, agreed = seals(self.session, self.t, sent), self.confirmations(alive, present)
        return {
            n: sparse.reveal(self.members[n], self.t, present, self.slips(n, present), alive, given, agreed)
            for n in names or alive
        }

    def open(self, sent, reveals, present=None):
        offers = {n: self.offers[n] for n in (self.names if present is None else present)}
        return sparse.open_sum(self.session, self.t, offers, sent, reveals)


# -------------------------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_right(sparse_party, seed):
    """Some make no offer, some send no vector, some reveal nothing."""
    r = sparse_party(16, dropouts=5, seed=seed)
    present = r.names[1:]
    sent = r.masked(present[1:], present)
    alive = sparse.survivors(r.session, sent)
    sent = {n: sent[n] for n in alive}
    reveals = r.reveals(alive, sent, alive[:-1], present)
    assert len(alive) >= 13
    assert np.array_equal(r.open(sent, reveals, present), r.party.total(alive))


def test_real_parameters(party):
    """The session of 300 sites has a graph; all of them derive the same one."""
    p = party(300, dropouts=15, colluders=6)
    found = p.session.graph
    assert found == mask_graph.parameters(300, 15, 6)
    assert p.session.adjacency.sum(1).min() >= found.shares
    assert np.array_equal(p.session.adjacency, p.session.adjacency.T)
    assert not p.session.adjacency.diagonal().any()
    assert len(p.session.committee) == found.committee
    mean = p.session.adjacency.sum(1).mean()
    assert abs(mean - found.degree(300)) < 5 * np.sqrt(2 * found.degree(300) / 300)
    assert not np.array_equal(party(300, dropouts=15, colluders=6, run="other").session.adjacency, p.session.adjacency)


def test_complete_sessions_keep_their_bytes(party):
    """Up to 256 sites there is no graph, and derived keys do not change."""
    session = party(4, dropouts=1).session
    assert session.graph is None
    assert session.context == dataclasses.replace(session).context
    assert session.committee == set(session.roster.names)


# ------------------------------------------------------------------------------------------------------------ attacks


def test_a_server_cannot_single_out_a_site(sparse_party):
    """It leaves out a victim's neighbours: sites reveal nothing about a list on which somebody has too few of them."""
    r = sparse_party(14, dropouts=6, found=dataclasses.replace(SMALL, edge=PARTS // 2))
    victim = min(r.names, key=lambda name: len(r.session.neighbours(name)))
    near = r.session.neighbours(victim)
    out = near[: len(near) - SMALL.shares + 1]
    alive = [name for name in r.names if name not in out]
    assert len(alive) >= r.session.threshold
    member = next(name for name in alive if name in r.session.committee)
    with pytest.raises(SordinoError, match="fewer than 4 neighbours"):
        sparse.confirm(r.members[member], r.t, r.names, alive)
    with pytest.raises(SordinoError, match="fewer than 4 neighbours"):
        sparse.reveal(r.members[member], r.t, r.names, r.slips(member), alive, {}, {})
    assert victim not in sparse.survivors(r.session, alive)


def test_two_lists_of_survivors(sparse_party):
    r = sparse_party()
    sent = r.masked()
    first, second = r.names, r.names[:-1]
    given, agreed = seals(r.session, r.t, sent), r.confirmations(first)
    someone = next(name for name in second if name in r.session.committee)
    with pytest.raises(SordinoError, match="agreed to other survivors"):
        sparse.confirm(r.members[someone], r.t, r.names, second, before=first)
    with pytest.raises(SordinoError, match="0 of the committee confirmed"):
        sparse.reveal(r.members[someone], r.t, r.names, r.slips(someone), second, given, agreed)
    few = dict(list(agreed.items())[: SMALL.quorum - 1])
    with pytest.raises(SordinoError, match="5 of the committee confirmed"):
        sparse.reveal(r.members[someone], r.t, r.names, r.slips(someone), first, given, few)
    outside = next(name for name in r.names if name not in r.session.committee)
    with pytest.raises(SordinoError, match="not in this run's committee"):
        sparse.confirm(r.members[outside], r.t, r.names, first)


def test_a_neighbour_that_was_shown_something_else(sparse_party):
    """Other offers, or another request: its neighbours reveal nothing."""
    r = sparse_party()
    sent = r.masked()
    victim = r.names[0]
    fewer = [name for name in r.names if name != r.names[-1]]
    sent[victim] = r.masked([victim], fewer)[victim]
    given, agreed = seals(r.session, r.t, sent), r.confirmations(r.names)
    near = r.session.neighbours(victim)[0]
    with pytest.raises(SordinoError, match=f"seal of '{victim}'"):
        sparse.reveal(r.members[near], r.t, r.names, r.slips(near), r.names, given, agreed)
    asked = sparse.masked(r.members[victim], r.t, r.names, r.slips(victim), r.party.vectors[victim], "a model")
    given = seals(r.session, r.t, sent | {victim: asked})
    with pytest.raises(SordinoError, match=f"seal of '{victim}'"):
        sparse.reveal(r.members[near], r.t, r.names, r.slips(near), r.names, given, agreed)


def test_hidden_neighbours(sparse_party):
    """A server that shows a site only some of its neighbours' slips, or changed ones."""
    r = sparse_party()
    member, slips = r.members[r.names[0]], r.slips(r.names[0])
    vector = r.party.vectors[member.name]
    with pytest.raises(SordinoError, match="made one; the server must show those"):
        sparse.masked(member, r.t, r.names, slips[1:], vector)
    for byte in (3, 40, 100):  # its key, its commitment, its signature
        changed = slips.copy()
        changed[0, byte] ^= 1
        with pytest.raises(SordinoError, match=r"signature is not by the key|low order"):
            sparse.masked(member, r.t, r.names, changed, vector)
    changed = slips.copy()
    changed[0, -1] ^= 1
    with pytest.raises(SordinoError, match="cannot be read"):
        sparse.masked(member, r.t, r.names, changed, vector)
    few = r.names[: r.session.threshold - 1]
    with pytest.raises(SordinoError, match="too few"):
        sparse.masked(member, r.t, few, r.slips(member.name, few), vector)
    with pytest.raises(SordinoError, match="named once"):
        sparse.masked(member, r.t, [*r.names, r.names[1]], slips, vector)
    with pytest.raises(SordinoError, match="not among them"):
        sparse.masked(member, r.t, r.names[1:], slips, vector)


def test_a_wrong_share_is_named(sparse_party):
    r = sparse_party(found=dataclasses.replace(SMALL, edge=int(0.95 * PARTS)))
    sent = r.masked()
    reveals = r.reveals(r.names, sent)
    liar = r.names[0]
    told = sparse.read_reveal(r.session, r.t, liar, reveals[liar], r.names, r.names)
    wrong = SparseReveal(told.shown_sha256, [(s + 1) % shamir.PRIME for s in told.seeds], told.keys)
    reveals[liar] = write_sparse_reveal(r.members[liar], r.t, wrong)
    with pytest.raises(WrongShareError) as error:
        r.open(sent, reveals)
    assert error.value.site == liar
    del reveals[liar]
    assert np.array_equal(r.open(sent, reveals), r.party.total(r.names))


def test_shares_below_the_threshold_open_nothing(sparse_party):
    r = sparse_party()
    sent = r.masked()
    reveals = r.reveals(r.names, sent)
    victim = r.names[0]
    near = r.session.neighbours(victim)
    kept = near[: SMALL.shares - 1]
    few = {name: data for name, data in reveals.items() if name not in near or name in kept}
    with pytest.raises(SordinoError, match="the shares do not give"):
        r.open(sent, few)


def test_messages_of_others(sparse_party):
    r = sparse_party()
    liar, victim = (r.members[name] for name in r.names[:2])
    read = read_sparse_offer(r.session, r.t, liar.name, r.offers[liar.name])
    with pytest.raises(SordinoError, match="sender is another"):
        read_sparse_offer(r.session, r.t, victim.name, r.offers[liar.name])
    with pytest.raises(SordinoError, match="round is another"):
        read_sparse_offer(r.session, r.t + 1, liar.name, r.offers[liar.name])
    zero = write_sparse_offer(liar, r.t, read._replace(public=bytes(32)))
    with pytest.raises(SordinoError, match="low order"):
        read_sparse_offer(r.session, r.t, liar.name, zero)
    sent = r.masked()
    sent[liar.name] = write_masked(liar, r.t, shown_present(r.names[1:]), r.party.vectors[liar.name])
    with pytest.raises(SordinoError, match="other offers"):
        r.open(sent, {})


# -------------------------------------------------------------------------------------------------- what masks hide


def _rank(matrix):
    """Rank modulo 2, which is at most the rank modulo 2^32 over its units."""
    rows, rank = matrix.copy() % 2, 0
    for column in range(rows.shape[1]):
        pivots = np.flatnonzero(rows[rank:, column])
        if not len(pivots):
            continue
        rows[[rank, rank + pivots[0]]] = rows[[rank + pivots[0], rank]]
        for i in range(len(rows)):
            if i != rank and rows[i, column]:
                rows[i] ^= rows[rank]
        rank += 1
        if rank == len(rows):
            break
    return rank


def test_masks_along_a_connected_graph_leave_only_the_sum(sparse_party):
    """Masks of honest survivors map to the vectors of sum 0, and onto all of them where the graph is connected: the
    signed incidence matrix has rank n - 1. Where it has two parts, two sums are left (n - 2)."""
    r = sparse_party()
    near = np.triu(r.session.adjacency)
    pairs = np.argwhere(near)
    incidence = np.zeros((len(near), len(pairs)), np.int64)
    for k, (i, j) in enumerate(pairs):
        incidence[i, k], incidence[j, k] = 1, -1
    assert (incidence.sum(0) == 0).all()
    assert _rank(np.abs(incidence)) == len(near) - 1
    inside = [k for k, (i, j) in enumerate(pairs) if (i < 7) == (j < 7)]
    assert _rank(np.abs(incidence[:, inside])) == len(near) - 2


def test_the_core_leaves_out_sites_with_few_neighbours():
    line = np.zeros((5, 5), bool)
    for i in range(4):
        line[i, i + 1] = line[i + 1, i] = True
    assert not graph.core(line, np.ones(5, bool), 2).any()
    ring = line.copy()
    ring[0, 4] = ring[4, 0] = True
    assert graph.core(ring, np.ones(5, bool), 2).all()
    assert not graph.core(ring, np.array([1, 1, 1, 1, 0], bool), 2).any()


def test_a_member_writes_the_same_offer_again(sparse_party):
    r = sparse_party()
    member = r.members[r.names[0]]
    again = Member(member.identity, member.session, member.secret)
    assert sparse.offer(again, r.t) == r.offers[member.name]
