"""The nouns: what a query's sensitivity is, by formula and by trying every neighbour."""

import itertools
import math

import numpy as np
import pytest
import torch

from sordino.core import SAFETY, Adjacency, Correlated, Kind, Lemma, Privacy, Query, Shard, Trust, Unit
from sordino.engines.oracle import clipped
from sordino.errors import SordinoError, listed, nearest
from sordino.models.linear import Linear, Loss

ADD, SWAP = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
CLIP = 0.7


# ------------------------------------------------------------------------------------------------------- formulas


def test_sensitivity_of_a_clipped_sum():
    assert Query(Kind.GRADIENT, CLIP).sensitivity(ADD, Unit.RECORD) == CLIP
    assert Query(Kind.GRADIENT, CLIP).sensitivity(SWAP, Unit.RECORD) == 2 * CLIP


def test_sensitivity_of_a_positive_semidefinite_sum():
    assert Query(Kind.GRAM, CLIP, psd=True).sensitivity(ADD, Unit.RECORD) == CLIP
    assert Query(Kind.GRAM, CLIP, psd=True).sensitivity(SWAP, Unit.RECORD) == math.sqrt(2) * CLIP


def test_a_lemma_replaces_the_clip():
    query = Query(
        Kind.DELTA,
        bound=Lemma("shrinks with the records", lambda m, adjacency: 3 * (1 + (adjacency == "replace-one")) / m),
    )
    assert query.sensitivity(ADD, Unit.RECORD, 10) == pytest.approx(0.3)
    assert query.sensitivity(SWAP, Unit.RECORD, 10) == pytest.approx(0.6)


def test_no_clip_no_bound():
    assert Query(Kind.GRADIENT).sensitivity(ADD, Unit.RECORD) == math.inf


def test_the_sensitivity_of_a_stream():
    encoder = np.array([[1.0, 0.0], [-0.5, 1.0]])
    stream = Correlated(encoder, np.linalg.inv(encoder))
    assert stream.sensitivity(np.array([0])) == pytest.approx(math.sqrt(1.25))
    assert stream.sensitivity(np.array([1])) == pytest.approx(1.0)
    # contributions of either sign in each round: the worst of all four
    worst = max(np.linalg.norm(encoder @ np.array(signs)) for signs in itertools.product([1, -1], repeat=2))
    assert stream.sensitivity(np.array([0, 1])) == pytest.approx(worst)
    assert stream.sensitivity(np.array([], dtype=int)) == 0


# ---------------------------------------------------------------------------------------- by trying every neighbour


def add_remove(release, records):
    """The largest move of `release` when one record joins any pair."""
    pairs = itertools.combinations_with_replacement(records, 2)
    return max(np.linalg.norm(release([*pair, one]) - release(pair)) for pair in pairs for one in records)


def replace_one(release, records):
    """The largest move when one record of any pair is swapped."""
    swaps = list(itertools.combinations(records, 2))
    return max(np.linalg.norm(release([keep, a]) - release([keep, b])) for keep in records for a, b in swaps)


def reaches(found, claimed):
    """Never more than claimed, and within one per cent of it."""
    return 0.99 * claimed <= found <= claimed


MODEL = Linear(2, 1, Loss.LOGISTIC)
THETA = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
ANGLES = np.arange(6) * np.pi / 3
POINTS = [(r * np.cos(a), r * np.sin(a), y) for r, a in [(0.1, 1.0), *((30.0, a) for a in ANGLES[::2])] for y in (0, 1)]


def gradient_sum(records, clip=CLIP):
    table = torch.tensor(records, dtype=torch.float64)
    shard = Shard(table[:, :2], table[:, 2], torch.ones(len(table), dtype=torch.float64))
    return MODEL.clipped_sum(THETA, shard, clip).numpy()


def test_gradient_sum():
    query = Query(Kind.GRADIENT, CLIP)
    assert reaches(add_remove(gradient_sum, POINTS), query.sensitivity(ADD, Unit.RECORD))
    assert reaches(replace_one(gradient_sum, POINTS), query.sensitivity(SWAP, Unit.RECORD))


def test_a_doubled_clip_and_a_mean_are_found_out():
    query = Query(Kind.GRADIENT, CLIP)
    assert not reaches(add_remove(lambda r: gradient_sum(r, 2 * CLIP), POINTS), query.sensitivity(ADD, Unit.RECORD))
    assert not reaches(replace_one(lambda r: gradient_sum(r, 2 * CLIP), POINTS), query.sensitivity(SWAP, Unit.RECORD))
    assert not reaches(replace_one(lambda r: gradient_sum(r) / len(r), POINTS), query.sensitivity(SWAP, Unit.RECORD))


def gram(rows):
    """Rows clipped to norm sqrt(C), so that the matrix of one has norm C."""
    x = clipped(torch.tensor(rows, dtype=torch.float64), math.sqrt(CLIP))
    return (x.T @ x).numpy()


def test_gram_of_clipped_rows():
    rows = [(r * np.cos(a), r * np.sin(a)) for r in (0.1, 9.0) for a in np.arange(8) * np.pi / 4]
    query = Query(Kind.GRAM, CLIP, psd=True)
    assert reaches(add_remove(gram, rows), query.sensitivity(ADD, Unit.RECORD))
    swapped = replace_one(gram, rows)
    assert reaches(swapped, query.sensitivity(SWAP, Unit.RECORD))
    assert not reaches(swapped, Query(Kind.GRAM, CLIP).sensitivity(SWAP, Unit.RECORD)), "2 C would be paid for nothing"
    assert not reaches(swapped, CLIP), "C would not be enough"


def test_psd_is_no_licence_for_signed_matrices():
    """Symmetric matrices that are not positive semi-definite do reach 2 C."""
    signed = [sign * np.outer(v, v) / (v @ v) * CLIP for v in (np.ones(2), np.array([1.0, 0])) for sign in (1, -1)]
    swapped = replace_one(lambda pair: np.sum(pair, axis=0), signed)
    assert swapped == pytest.approx(2 * CLIP)
    assert not reaches(swapped, Query(Kind.CURVATURE, CLIP, psd=True).sensitivity(SWAP, Unit.RECORD))


def message_sum(messages, clip=CLIP):
    return clipped(torch.tensor(messages, dtype=torch.float64), clip).sum(0).numpy()


def test_a_whole_client():
    messages = [(r * np.cos(a), r * np.sin(a)) for r in (0.1, 1e3) for a in ANGLES]
    query = Query(Kind.DELTA, CLIP)
    assert reaches(add_remove(message_sum, messages), query.sensitivity(ADD, Unit.CLIENT))
    assert reaches(replace_one(message_sum, messages), query.sensitivity(SWAP, Unit.CLIENT))
    assert not reaches(replace_one(lambda m: message_sum(m, 2 * CLIP), messages), query.sensitivity(SWAP, Unit.CLIENT))


def test_a_clipped_message_at_record_level_may_move_anywhere_in_the_ball():
    for adjacency in (ADD, SWAP):
        assert Query(Kind.DELTA, CLIP).sensitivity(adjacency, Unit.RECORD) == 2 * CLIP


def test_a_clipped_message():
    small = torch.tensor([0.3, -0.1])
    torch.testing.assert_close(clipped(small, CLIP), small.double(), rtol=0, atol=0)
    large = clipped(torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [1e30, 0.0]]), CLIP)
    assert large.norm(dim=-1)[0].item() == pytest.approx(CLIP * (1 - SAFETY), rel=1e-6)
    assert large.norm(dim=-1).max() <= CLIP
    assert not large[1:4].any(), "what is not finite says nothing"


@pytest.mark.parametrize(
    "size",
    [
        10_000,
        1_000_000,
    ],
)
def test_a_long_message_in_single_precision(size):
    long = torch.randn(size, generator=torch.Generator().manual_seed(0))
    assert clipped(long, CLIP).double().norm() <= CLIP
    assert clipped(long.double(), CLIP).norm() <= CLIP


# -------------------------------------------------------------------------------------------------------- promises


def test_words_become_members():
    privacy = Privacy(unit="client", adjacency="add-remove", trust="secure-aggregation")
    assert (privacy.unit, privacy.adjacency, privacy.trust) == (Unit.CLIENT, ADD, Trust.SECURE_AGGREGATION)
    assert privacy.unit is Unit.CLIENT


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"epsilon": 0.0}, "epsilon: 0.0 must lie in"),
        ({"epsilon": -1.0}, "epsilon: -1.0 must lie in"),
        ({"epsilon": math.nan}, "epsilon: nan must lie in"),
        ({"delta": 0.0}, "delta: 0.0 must lie in"),
        ({"delta": 1.0}, "delta: 1.0 must lie in"),
        ({"delta": math.nan}, "delta: nan must lie in"),
        ({"unit": "recrod"}, "unit: 'recrod' is unknown. Did you mean 'record'?"),
        ({"adjacency": "replace"}, "adjacency: 'replace' is unknown. Did you mean 'replace-one'?"),
        ({"trust": "trusted"}, "trust: 'trusted' is unknown. Did you mean 'trusted-server'?"),
        ({"client_epsilon": {3: 2.0}}, "client_epsilon: client 3 asks for 2.0"),
        ({"client_epsilon": {3: 0.0}}, "client_epsilon: client 3 asks for 0.0"),
    ],
)
def test_promises_that_cannot_be_kept(bad, message):
    with pytest.raises(SordinoError) as caught:
        Privacy(**bad)
    assert message in str(caught.value)


def test_no_noise_is_asked_for_by_infinity():
    assert Privacy(epsilon=math.inf).epsilon == math.inf
    with pytest.raises(SordinoError, match="client_epsilon: with epsilon = inf nobody adds noise"):
        Privacy(epsilon=math.inf, client_epsilon={0: 1.0})


def test_nearest_suggests_a_close_name_or_lists_all():
    assert nearest("dp-fedgt", ["dp-fedgd", "dp-fedyogi"]) == " Did you mean 'dp-fedgd'?"
    assert nearest("zzz", ["b", "a"]) == " Known: a, b."
    assert nearest("fedgd", ["dp-fedgd", "fedsgd"]) == " Did you mean 'dp-fedgd'?", "though fedsgd is nearer"
    columns = [f"c{k}" for k in range(40)]
    assert nearest("zzz", columns).endswith(" and 32 more."), "of a wide table"
    assert listed(columns[:20]) == ", ".join(columns[:20])
    assert listed(columns, like="C39").startswith("c39, ")
    assert nearest("fedsg", ["dp-fedgd", "fedsgd"]) == " Did you mean 'fedsgd'?"


@pytest.mark.parametrize("clip", [0.0, -1.0, 1e-13, 5e-324, math.nan])
def test_a_clip_is_a_number_that_floats_can_keep(clip):
    with pytest.raises(SordinoError, match=r"clip: .* or more"):
        Query(Kind.GRADIENT, clip)
    assert Query(Kind.GRADIENT, 1e-12).clip == 1e-12


def test_only_kinds_whose_terms_cannot_oppose_each_other_claim_psd():
    with pytest.raises(SordinoError, match="psd: terms of kind gradient can point in opposite directions"):
        Query(Kind.GRADIENT, 1.0, psd=True)
    assert Query("gram", 1.0, psd=True).kind is Kind.GRAM
    with pytest.raises(SordinoError, match="kind: 'gradeint' is unknown"):
        Query("gradeint", 1.0)


@pytest.mark.parametrize("wrong", ["1", None, True])
def test_bounds_are_numbers(wrong):
    with pytest.raises(SordinoError, match=r"clip: .* must be a number"):
        Query(Kind.GRADIENT, wrong)
    with pytest.raises(SordinoError, match=r"epsilon: .* must be a number"):
        Privacy(wrong)
