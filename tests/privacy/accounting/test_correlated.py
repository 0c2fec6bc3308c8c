"""The factors against counts by hand, least squares and attacks on the optimum."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import minimize

from sordino.core import Correlated, Privacy, Trust
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.privacy import calibration
from sordino.privacy.accounting import correlated, gaussian, inverse_root, tree_factors
from sordino.privacy.accounting.correlated import (
    MOST_CORRELATED_ROUNDS,
    TREE_SLACK,
    EfficientTree,
    NodeTree,
    banded,
    independent,
    least_squares,
    levels,
    prefix_error,
    schedule,
    tree,
)
from sordino.privacy.accounting.inverse_root import InverseRoot
from sordino.privacy.accounting.tree_factors import TreeFactors
from sordino.privacy.mechanisms.correlated import MOST_STRETCH, CorrelatedGaussian, InverseRootGaussian
from sordino.privacy.plan import Plan

EXACT = 1e-9  # relative: the factors are products of few float64 numbers
T = 70
ALL = np.arange(T)
CYCLES = [np.arange(r, T, 10) for r in range(10)]  # who takes part in every tenth round

BUILDERS = {
    "inverse root": lambda rounds: InverseRoot(4, rounds),
    "independent": independent,
    "schedule": schedule,
    "plain tree": lambda rounds: tree(rounds, honaker=False),
    "tree": tree,
    "restarted tree": lambda rounds: tree(rounds, restart=5),
    "completed tree": lambda rounds: tree(rounds, restart=5, complete=True),
    "completed plain tree": lambda rounds: tree(rounds, honaker=False, restart=6, complete=True),
    "efficient tree": lambda rounds: least_squares(tree(rounds, restart=6, complete=True)),
    "banded": lambda rounds: banded(rounds, 4),
    "fitted": lambda rounds: banded(rounds, 4, momentum=0.9, decay=0.01),
}
every_builder = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())


def prefix(noise: Correlated) -> np.ndarray:
    return np.cumsum(noise.decoder, axis=0)


def variances(noise: Correlated) -> np.ndarray:
    """Of the noise on the running sums."""
    return (prefix(noise) ** 2).sum(1)


def squared(noise: Correlated, rounds) -> float:
    return noise.sensitivity(np.asarray(rounds)) ** 2


def ratio(noise: Correlated, rounds: np.ndarray = ALL) -> float:
    return prefix_error(noise, rounds) / prefix_error(independent(len(noise.decoder)), rounds)


def signed(encoder: np.ndarray) -> float:
    """Squared sensitivity over all signs of contributions in every round: exact for scalars, a lower bound else."""
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=encoder.shape[1])))
    return float(((signs @ encoder.T) ** 2).sum(1).max())


def uncausal(noise: Correlated) -> float:
    """The largest weight that a release puts on a row of the encoder that involves a later round."""
    last = np.array([np.flatnonzero(row)[-1] for row in noise.encoder])
    return max(np.abs(row[last > t]).max(initial=0.0) for t, row in enumerate(noise.decoder))


# ------------------------------------------------------------------------------------------------- every builder


@every_builder
@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 13, 16, T])
def test_running_sums_are_unbiased_and_online(build, rounds):
    noise = build(rounds)
    assert noise.decoder.shape == noise.encoder.shape[::-1]
    assert len(noise.decoder) == rounds
    np.testing.assert_allclose(prefix(noise) @ noise.encoder, np.tril(np.ones((rounds, rounds))), atol=EXACT)
    assert uncausal(noise) == 0


def test_an_offline_estimator_is_seen_to_be_one():
    encoder = tree(T).encoder
    offline = Correlated(encoder, np.linalg.pinv(encoder))
    np.testing.assert_allclose(prefix(offline) @ encoder, np.tril(np.ones((T, T))), atol=EXACT)
    assert uncausal(offline) > 0.1


@every_builder
def test_sensitivity_is_reached_and_not_exceeded(build):
    """No encoder has negative entries, so equal contributions are the worst; others are tried in 2000 directions."""
    rounds, rng = 9, np.random.default_rng(0)
    noise = build(rounds)
    for pattern in ([0], [2, 7], [0, 4, 8], list(range(5)), list(range(rounds))):
        seen = noise.encoder[:, pattern]
        assert np.linalg.norm(seen.sum(1)) == pytest.approx(noise.sensitivity(np.array(pattern)), rel=EXACT)
        x = rng.standard_normal((2000, len(pattern), 3))
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        moved = np.sqrt(((seen @ x) ** 2).sum((1, 2)))
        assert moved.max() <= noise.sensitivity(np.array(pattern)) * (1 + EXACT)


@every_builder
def test_released_rows_move_no_further_than_their_own_bound(build):
    """Of a stream whose other rows nobody sees: x^T S^-1 x in 2000 directions, and equal ones. Mutant: 5 % less."""
    rounds, rng, reached = 9, np.random.default_rng(0), 0.0
    noise = build(rounds)
    for pattern in ([0], [2, 7], [0, 4, 8], list(range(5)), list(range(rounds))):
        rows = noise.decoder[pattern]
        inverse = np.linalg.inv(rows @ rows.T)
        bound = noise.released_sensitivity(np.array(pattern))
        x = rng.standard_normal((2000, len(pattern), 3))
        x = np.concatenate([x / np.linalg.norm(x, axis=-1, keepdims=True), np.ones((1, len(pattern), 1)) * [1, 0, 0]])
        moved = np.sqrt(np.einsum("nid,ij,njd->n", x, inverse, x)).max()
        assert moved <= bound * (1 + EXACT)
        assert bound <= noise.sensitivity(np.array(pattern)) * (1 + EXACT)
        reached = max(reached, moved / bound)
    assert reached > 0.95


def test_a_covariance_that_cannot_be_inverted_leaves_the_bound_of_the_whole_stream():
    noise = Correlated(np.eye(2), np.array([[1.0, 0.0], [1.0, 1e-9]]))
    assert noise.released_sensitivity(np.arange(2)) == noise.sensitivity(np.arange(2))


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: independent(0), "rounds"),
        (lambda: schedule(-3), "rounds"),
        (lambda: tree(5000), "rounds"),
        (lambda: tree(8, restart=-1), "restart"),
        (lambda: banded(8, 0), "band"),
        (lambda: banded(8, 2, momentum=1.0), "momentum"),
        (lambda: banded(8, 2, decay=-0.1), "decay"),
        (lambda: banded(8, 2, decay=float("nan")), "decay"),
    ],
)
def test_refusals_name_the_field(build, word):
    with pytest.raises(SordinoError, match=word):
        build()


# ------------------------------------------------------------------------------------------------------ the tree


def test_tree_of_70_rounds_by_hand():
    assert [len(level) for level in levels(T)] == [70, 35, 17, 8, 4, 2, 1]
    noise = tree(T)
    assert len(noise.encoder) == 137
    assert max(squared(noise, [t]) for t in ALL) == pytest.approx(7, rel=EXACT)
    assert squared(noise, ALL) == pytest.approx(8162, rel=EXACT)
    assert noise.sensitivity(ALL) == pytest.approx(90.34, abs=0.005)
    assert squared(tree(64), np.arange(64)) == pytest.approx(8128, rel=EXACT)


@pytest.mark.parametrize("rounds", [1, 5, 6, 8])
def test_tree_sensitivity_counts_rounds_in_nodes(rounds):
    """Every pattern of participation, against the nodes written down one by one."""
    sizes = [2**h for h in range(4)]
    nodes = [range(a, a + m) for m in sizes for a in range(0, rounds, m) if a + m <= rounds]
    noise = tree(rounds)
    for bits in itertools.product([False, True], repeat=rounds):
        pattern = np.flatnonzero(bits)
        count = sum(len(set(pattern) & set(node)) ** 2 for node in nodes)
        assert squared(noise, pattern) == pytest.approx(count, rel=EXACT)


def test_plain_tree_needs_as_many_nodes_as_binary_digits():
    used = prefix(tree(T, honaker=False))
    np.testing.assert_allclose(used, used.round(), atol=EXACT)  # whole nodes
    assert variances(tree(T, honaker=False)) == pytest.approx([(t + 1).bit_count() for t in range(T)], rel=EXACT)


def test_honaker_variances():
    """A complete subtree of height h: 1 / (2 - 2^-h); a running sum: the sum over its binary digits."""

    def of(height):
        return 1 / (2 - 2.0**-height)

    found = variances(tree(T))
    for h in range(7):
        assert found[2**h - 1] == pytest.approx(of(h), rel=EXACT)
    assert found == pytest.approx([sum(of(h) for h in range(7) if (t + 1) >> h & 1) for t in range(T)], rel=EXACT)


@pytest.mark.parametrize("complete", [False, True])
def test_honaker_is_least_squares_on_what_is_finished(complete):
    """After each round, on the rows that involve no later round; without `honaker` it is not."""
    rounds, far = 23, 0.0
    noise, plain = (tree(rounds, honaker, restart=11, complete=complete) for honaker in (True, False))
    for t in range(rounds):
        finished = noise.encoder[:, t + 1 :].sum(1) == 0
        best = np.ones(t + 1) @ np.linalg.pinv(noise.encoder[finished][:, : t + 1])
        np.testing.assert_allclose(prefix(noise)[t, finished], best, atol=EXACT)
        far = max(far, np.abs(prefix(plain)[t, finished] - best).max())
    assert far > 0.1


def test_restarts_make_blocks():
    noise, block, last = tree(T, restart=16), tree(16), tree(6)
    rows, short = len(block.encoder), len(last.encoder)
    assert noise.encoder.shape == (4 * rows + short, T)
    for b in range(4):
        np.testing.assert_array_equal(noise.encoder[b * rows : (b + 1) * rows, 16 * b : 16 * b + 16], block.encoder)
    np.testing.assert_array_equal(noise.encoder[-short:, 64:], last.encoder)
    assert squared(noise, ALL) == pytest.approx(4 * squared(block, np.arange(16)) + squared(last, np.arange(6)))
    # Running sums carry the noise of every block's total, and of the block at hand.
    one, rest = variances(block), variances(last)
    total = np.concatenate([b * one[-1] + one for b in range(4)] + [4 * one[-1] + rest])
    assert variances(noise) == pytest.approx(total, rel=EXACT)
    np.testing.assert_array_equal(tree(T, restart=T).decoder, tree(T).decoder)


def test_completion_takes_a_total_from_the_root():
    """Blocks of 11 rounds, 11 = 8 + 2 + 1: three nodes a total without padding, one with it; the last is as it was."""
    plain, padded = (tree(33, honaker=False, restart=11, complete=complete) for complete in (False, True))
    assert variances(plain)[[10, 21, 32]] == pytest.approx([3, 6, 9], rel=EXACT)
    assert variances(padded)[[10, 21, 32]] == pytest.approx([1, 2, 5], rel=EXACT)
    # Nodes that end beyond round 11, of sizes 2, 4, 8 and 16, hold 1, 3, 3 and 11 rounds of it.
    extra = 2 * (1 + 9 + 9 + 121)
    assert squared(padded, np.arange(33)) - squared(plain, np.arange(33)) == pytest.approx(extra, rel=EXACT)


def test_published_sensitivity_of_restarts_and_completion():
    """google-research/DP-FTRL: CIFAR-10 in batches of 500, 100 epochs in the same order, restarts every 20 of them."""
    epochs, batches = 20, 100
    seen = np.zeros((batches, epochs * batches + 1))  # times that a batch has been seen before a round
    for b in range(batches):
        seen[b, 1:] = np.cumsum(np.arange(epochs * batches) % batches == b)

    def block(complete):
        spans = np.concatenate(levels(epochs * batches, complete))
        return ((seen[:, spans[:, 1]] - seen[:, spans[:, 0]]) ** 2).sum(1)

    worst = (4 * block(True) + block(False)).max()
    assert worst == 4129
    assert (5 * block(False)).max() == 2125
    assert 46.3 / np.sqrt(worst) == pytest.approx(0.72054, abs=5e-6)
    assert gaussian.epsilon(np.sqrt(worst) / 46.3, 1e-5) == pytest.approx(6.428, abs=5e-4)
    small = tree(21, restart=10, complete=True).encoder  # the same nodes make up the encoder
    spans = np.concatenate(levels(10, complete=True))
    np.testing.assert_array_equal(small[: len(spans), :10].sum(1), spans[:, 1] - spans[:, 0])


# -------------------------------------------------------------------------------------------------- inverse roots


def test_all_coefficients_of_an_inverse_root_square_to_differences():
    decoder = InverseRoot(T, T).decoder
    differences = np.eye(T) - np.eye(T, k=-1)
    np.testing.assert_allclose(decoder @ decoder, differences, atol=EXACT)
    cut = InverseRoot(10, T)
    np.testing.assert_array_equal(cut.decoder[:10], decoder[:10])
    assert not cut.decoder[10:, 0].any()


@pytest.mark.parametrize(("bands", "rounds"), [(1, 12), (3, 40), (17, 40), (40, 40), (64, 20)])
def test_squares_of_inverse_roots_against_dense_factors(bands, rounds):
    noise, rng = InverseRoot(bands, rounds), np.random.default_rng(5)
    dense = Correlated(noise.encoder, noise.decoder)
    np.testing.assert_allclose(dense.encoder @ dense.decoder, np.eye(rounds), atol=EXACT)
    for chance in (0.05, 0.3, 0.8):
        attended = np.flatnonzero(rng.random(rounds) < chance)
        if not len(attended):
            continue
        assert noise.sensitivity(attended) == pytest.approx(dense.sensitivity(attended), rel=EXACT)
        assert noise.sensitivity(attended) >= dense.sensitivity(attended) * (1 - 1e-14)
        for k in range(1, len(attended) + 1):
            stop = attended[k] if k < len(attended) else rounds
            rows = np.linalg.norm(dense.encoder[:stop, attended[:k]].sum(1)) ** 2
            assert noise.squares(attended)[k] == pytest.approx(rows, rel=EXACT)
            seen = dense.decoder[attended[:k]]
            inverse = np.linalg.inv(seen @ seen.T)
            assert inverse.min() > -EXACT
            assert noise.released_squares(attended)[k] == pytest.approx(inverse.sum(), rel=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("band", [1, 2, 10, 40])
def test_windows_of_bands_bound_what_own_rows_tell(band, momentum, monkeypatch):
    """Against the best of some moves on dense covariances. Mutant: half a percent less, where moves of one sign are the
    worst."""
    noise, rng = correlated.banded(400, band, momentum), np.random.default_rng(7)
    monkeypatch.setattr(correlated, "AT_ONCE", 8)
    covariance = noise.decoder @ noise.decoder.T
    for chance in (0.05, 0.3, 0.9):
        attended = np.flatnonzero(rng.random(400) < chance)
        inverse = np.linalg.inv(covariance[np.ix_(attended, attended)])
        moves = [np.ones(len(attended)), *rng.choice([-1.0, 1.0], (3, len(attended)))]
        for n, move in enumerate(moves):
            for _ in range(20):
                move = np.where(inverse @ move < 0, -1.0, 1.0)
            moves[n] = move
        worst = math.sqrt(max(move @ inverse @ move for move in moves))
        found = noise.over_windows(attended)
        assert worst * (1 - 1e-12) <= found <= (1.02 if momentum else 1.005) * math.sqrt(np.abs(inverse).sum())
        with monkeypatch.context() as patch:
            patch.setattr(correlated, "MOST_INVERTED", 0)
            assert noise._inverted_sensitivity(attended) <= min(found, noise.sensitivity(attended))
    gram = noise.encoder.T @ noise.encoder
    t = np.arange(400)
    np.testing.assert_allclose(noise._products(t[:, None], t), gram, atol=1e-14)


def test_moves_of_windows_have_rows_in_common(monkeypatch):
    """Without the products of different windows, the bound would be too small."""
    noise, every = correlated.banded(300, 10), np.arange(300)
    monkeypatch.setattr(correlated, "AT_ONCE", 4)
    gram = noise.encoder.T @ noise.encoder
    blocks = sum(gram[i : i + 4, i : i + 4].sum() for i in range(0, 300, 4))
    assert math.sqrt(blocks) < 0.9 * noise.sensitivity(every)
    assert noise.over_windows(every) == pytest.approx(noise.sensitivity(every), rel=1e-9)
    assert noise.over_windows(every) >= noise.sensitivity(every)


@pytest.mark.parametrize("bands", [300, 600])
def test_long_recurrences_are_convolutions_and_no_smaller(bands, monkeypatch):
    """Mutants: no bound on rounding; a circle on which sums wrap around."""
    noise, rng = InverseRoot(bands, 700), np.random.default_rng(5)
    for chance in (0.01, 0.3, 1.0):
        attended = np.flatnonzero(rng.random(700) < chance)
        taken = np.zeros(700)
        taken[attended] = 1.0
        exact = [math.fsum(noise.solve(np.eye(1, 700)[0])[t - attended[attended <= t]]) for t in range(700)]
        assert (noise._convolved(taken) >= exact).all()
        convolved, own = noise.squares(attended), noise.released_squares(attended)
        with monkeypatch.context() as patch:
            patch.setattr(inverse_root, "MOST_RECURRENCE", 2**30)
            patch.setattr(inverse_root, "MOST_TABLE", 0)
            one_by_one, own_too = noise.squares(attended), noise.released_squares(attended)
        np.testing.assert_allclose(convolved, one_by_one, rtol=1e-7)
        np.testing.assert_allclose(own, own_too, rtol=1e-7)
        assert (own <= convolved * (1 + 1e-9)).all()


def test_running_sums_of_an_inverse_root_have_its_variances():
    noise = InverseRoot(6, 30)
    np.testing.assert_allclose(noise.prefix_variances(), variances(noise), rtol=EXACT)


def test_an_inverse_root_of_many_rounds_stores_no_matrix():
    noise = InverseRoot(32, 200_000)
    assert noise.worst_sensitivity(1000) > noise.worst_sensitivity(1000, 3) > noise.sensitivity(np.array([0])) > 1
    with pytest.raises(SordinoError, match=f"{MOST_CORRELATED_ROUNDS:,}"):
        _ = noise.encoder


# ------------------------------------------------------------------------------------------------- least squares


@pytest.mark.parametrize("start", [tree(T), tree(T, honaker=False), tree(T, restart=11, complete=True)])
def test_least_squares_keeps_the_sensitivity_and_has_the_offline_error(start):
    noise, offline = least_squares(start), np.tril(np.ones((T, T))) @ np.linalg.pinv(start.encoder)
    np.testing.assert_allclose(prefix(noise) @ prefix(noise).T, offline @ offline.T, atol=EXACT)
    assert noise.encoder.min() > -1e-12  # an M-matrix's inverse
    rng = np.random.default_rng(1)
    for pattern in [ALL, [3], *CYCLES, *(np.flatnonzero(rng.random(T) < 0.3) for _ in range(20))]:
        assert squared(noise, pattern) == pytest.approx(squared(start, pattern), rel=EXACT)
    assert prefix_error(noise, ALL) < 0.9 * prefix_error(start, ALL)


def test_least_squares_leaves_an_invertible_encoder_alone():
    noise = banded(20, 4)
    np.testing.assert_allclose(least_squares(noise).decoder, noise.decoder, atol=EXACT)


# --------------------------------------------------------------------------------------------------------- bands


SERVERS = [(0.0, 0.0), (0.9, 0.0), (0.0, 0.05), (0.99, 0.05)]  # momentum, weight decay


@pytest.mark.parametrize(("momentum", "decay"), SERVERS)
def test_banded_columns_are_unit_and_orthogonal_from_the_band_on(momentum, decay):
    noise = banded(T, 10, momentum, decay)
    gram = noise.encoder.T @ noise.encoder
    gap = np.abs(ALL[:, None] - ALL)
    np.testing.assert_allclose(np.diag(gram), 1, rtol=EXACT)
    assert np.abs(gram[gap >= 10]).max() == 0
    assert gram[gap < 10].min() > 0
    np.testing.assert_allclose(noise.encoder @ noise.decoder, np.eye(T), atol=EXACT)
    rng = np.random.default_rng(2)
    for _ in range(20):
        pattern = np.cumsum(rng.integers(10, 15, size=5)) - 10
        assert squared(noise, pattern) == pytest.approx(5, rel=EXACT)
    assert all(squared(noise, cycle) == pytest.approx(7, rel=EXACT) for cycle in CYCLES)
    assert squared(noise, np.arange(0, T, 9)) > 8.1  # eight rounds, one too near each other


def test_band_of_one_is_independent_noise():
    np.testing.assert_array_equal(banded(T, 1).decoder, np.eye(T))


def iterate_variances(noise: Correlated, momentum: float, decay: float) -> np.ndarray:
    """Of the noise on the iterates of a plain loop, if a unit that takes part once has mu = 1."""
    velocity, theta, found = 0.0, 0.0, []
    for release in noise.decoder:
        velocity = momentum * velocity + release
        theta = (1 - decay) * theta - velocity
        found.append((theta**2).sum())
    return noise.sensitivity(np.arange(1)) ** 2 * np.array(found)


def last_times_mean(noise: Correlated, momentum: float = 0.0, decay: float = 0.0) -> float:
    found = iterate_variances(noise, momentum, decay)
    return found[-1] * found.mean()


def root(rounds: int, band: int, factor=1.0) -> Correlated:
    """The truncated square root of the prefix matrix, columns normalised; `factor` spoils the coefficients."""
    c = [1.0]
    for k in range(1, band):
        c.append(c[-1] * (2 * k - 1) / (2 * k))
    c = np.array(c) * factor
    encoder = sum(c[k] * np.eye(rounds, k=-k) for k in range(band))
    encoder = encoder / np.linalg.norm(encoder, axis=0)
    return Correlated(encoder, np.linalg.inv(encoder))


def test_untruncated_root_squares_to_the_prefix_matrix():
    c = root(T, T).encoder
    c = np.tril(c / np.diag(c))  # undo the columns' norms
    np.testing.assert_allclose(c @ c, np.tril(np.ones((T, T))), atol=EXACT)


@pytest.mark.parametrize(("rounds", "band"), [(T, 2), (T, 10), (T, 35), (T, T), (200, 10)])
def test_banded_is_no_worse_than_the_root(rounds, band):
    """On the last sum, and in the product with all sums."""
    noise, other = banded(rounds, band), root(rounds, band)
    assert last_times_mean(noise) <= last_times_mean(other) * (1 + EXACT)
    assert variances(noise)[-1] <= variances(other)[-1] * (1 + EXACT)


def test_banded_coefficients_are_near_the_best():
    """20 % below the root for T = 70 and band 10; changes of 1 to 20 % in single coefficients gain under 0.5 %."""
    noise = banded(T, 10)
    assert last_times_mean(noise) / last_times_mean(root(T, 10)) == pytest.approx(0.803, abs=5e-3)
    c = noise.encoder[:10, 0] / root(T, 10).encoder[:10, 0]
    rng = np.random.default_rng(3)
    spoilt = [root(T, 10, c * np.exp(s * rng.standard_normal(10))) for s in (0.01, 0.05, 0.2) for _ in range(50)]
    assert min(last_times_mean(other) for other in spoilt) > last_times_mean(noise) * (1 - 5e-3)


def test_noise_that_each_client_holds_does_not_cancel():
    """One z for all: a fifth of the variance. A z for each of ten groups that take turns: four times as much."""
    noise = banded(T, 10)
    covariance = noise.decoder @ noise.decoder.T
    same = ALL[:, None] % 10 == ALL % 10

    def relative(matrix):
        return np.mean([matrix[:t, :t].sum() for t in range(1, T + 1)]) / np.mean(np.arange(1, T + 1))

    assert relative(covariance) == pytest.approx(ratio(noise, CYCLES[0]), rel=EXACT)
    assert relative(covariance) < 0.2
    assert relative(covariance * same) > 4


# ---------------------------------------------------------------------------------------- what is worth its while


def test_errors_under_full_participation():
    """Relative to independent noise, 2485 for T = 70."""
    assert prefix_error(independent(T), ALL) == pytest.approx(70 * 35.5, rel=EXACT)
    assert ratio(schedule(T)) == pytest.approx(0.894, abs=5e-4)
    assert ratio(tree(T, honaker=False)) == pytest.approx(24253 / 2485, rel=1e-4)
    assert ratio(tree(T)) == pytest.approx(6.179, abs=5e-4)
    assert ratio(least_squares(tree(T))) == pytest.approx(7699 / 2485, rel=1e-4)
    assert ratio(banded(T, 10)) == pytest.approx(1.620, abs=5e-3)


def test_errors_where_units_come_every_tenth_round():
    def worst(noise):
        return max(prefix_error(noise, cycle) for cycle in CYCLES) / prefix_error(independent(T), CYCLES[0])

    assert worst(banded(T, 10)) == pytest.approx(0.1959, abs=5e-4)
    assert worst(tree(T)) == pytest.approx(0.871, abs=5e-4)
    assert worst(least_squares(tree(T))) == pytest.approx(0.437, abs=5e-4)


def test_schedule_is_the_best_diagonal():
    noise = schedule(T)
    s = np.diag(noise.decoder)
    assert np.count_nonzero(noise.decoder) == T
    np.testing.assert_allclose(s**2 * np.sqrt(T - ALL), s[0] ** 2 * np.sqrt(T), rtol=EXACT)
    assert squared(noise, ALL) == pytest.approx(T, rel=EXACT)
    rng = np.random.default_rng(4)
    for _ in range(50):
        other = s * np.exp(0.05 * rng.standard_normal(T))
        assert prefix_error(Correlated(np.diag(1 / other), np.diag(other)), ALL) > prefix_error(noise, ALL)


def error(encoder: np.ndarray, sensitivity=signed) -> float:
    """The least mean error of any unbiased decoder, relative to the schedule's."""
    rounds = encoder.shape[1]
    estimator = np.tril(np.ones((rounds, rounds))) @ np.linalg.pinv(encoder)
    return sensitivity(encoder) * (estimator**2).sum() / rounds / prefix_error(schedule(rounds), np.arange(rounds))


def encoders(rounds: int, count: int):
    """Random ones: lower-triangular with either or one sign, tall, and changes of the schedule."""
    rng, best = np.random.default_rng(5), schedule(rounds).encoder
    for _ in range(count):
        x = rng.standard_normal((rounds, rounds))
        yield np.tril(x, -1) + np.diag(1 + np.abs(np.diag(x)))
        yield np.tril(np.abs(x)) + np.eye(rounds)
        yield rng.standard_normal((rounds + 3, rounds))
        for size in (1e-3, 0.05, 0.3):
            yield best @ (np.eye(rounds) + size * np.tril(x))


def test_no_encoder_beats_the_schedule_under_full_participation():
    """Signs alone suffice. The mutant counts equal contributions only, and is beaten."""
    assert error(schedule(6).encoder) == pytest.approx(1, rel=EXACT)
    found = [error(encoder) for encoder in encoders(6, 50)]
    assert min(found) >= 1 - EXACT
    assert min(found) < 1.001  # some came near
    assert min(error(encoder, lambda c: (c.sum(1) ** 2).sum()) for encoder in encoders(6, 50)) < 0.98


def test_a_search_for_a_better_encoder_ends_at_the_schedule():
    lower, rng = np.tril_indices(3), np.random.default_rng(6)

    def objective(entries):
        encoder = np.zeros((3, 3))
        encoder[lower] = entries
        return error(encoder) if np.abs(np.diag(encoder)).min() > 1e-3 else np.inf

    options = {"maxiter": 4000, "maxfev": 4000, "xatol": 1e-7, "fatol": 1e-10}
    ends = [minimize(objective, rng.standard_normal(6), method="Nelder-Mead", options=options).fun for _ in range(4)]
    assert 1 - EXACT <= min(ends) < 1.01


def test_the_proof_signs_in_a_chain_have_the_correlations_of_running_sums():
    """The step of the proof that makes scalars suffice: E[sign sign^T] is the correlation of A's columns."""
    a = np.arange(6, 0, -1.0)
    keep = (1 + np.sqrt(a[1:] / a[:-1])) / 2
    moments = np.zeros((6, 6))
    for signs in itertools.product([1.0, -1.0], repeat=6):
        s = np.array(signs)
        moments += 0.5 * np.prod(np.where(s[1:] == s[:-1], keep, 1 - keep)) * np.outer(s, s)
    columns = np.tril(np.ones((6, 6))) / np.sqrt(a)
    np.testing.assert_allclose(moments, columns.T @ columns, atol=EXACT)


@pytest.mark.parametrize(("momentum", "decay"), SERVERS)
@pytest.mark.parametrize(("rounds", "band"), [(T, 3), (T, 10), (200, 30)])
def test_fitted_diagonals_are_near_what_a_search_finds(momentum, decay, rounds, band):
    """The search starts from the fitted ones, with derivatives by differences. Mutant: noise for sums alone."""

    def error(tail):
        noise = correlated.toeplitz(rounds, np.concatenate([[1.0], tail]))
        return np.log(last_times_mean(noise, momentum, decay))

    start, other = (np.array(correlated.fitted_diagonals(rounds, band, *s))[1:] for s in ((momentum, decay), (0, 0)))
    claimed = error(start)
    if band == 3:
        assert claimed - minimize(error, start, method="L-BFGS-B").fun < 4 * 0.01  # 1 % of a standard deviation
    directions = np.random.default_rng(7).standard_normal((40, band - 1))
    assert min(error(start * (1 + 0.05 * d)) for d in directions) > claimed - 0.02
    assert claimed <= error(other) - (0.02 if momentum or decay else 0.0)


def test_noise_is_worth_fitting_to_momentum():
    """200 rounds and band 100: 0.85 of the noise that is fitted to sums alone, as standard deviation on the model."""
    other, fitted = (iterate_variances(banded(200, 100, momentum), 0.9, 0.0) for momentum in (0.0, 0.9))
    assert np.sqrt(fitted[-1] / other[-1]) == pytest.approx(0.85, abs=0.01)
    assert np.sqrt(fitted.mean() / other.mean()) == pytest.approx(0.94, abs=0.01)


def diagonals_by_hand(rounds, band, momentum, decay):
    """The same sums, products and quotients one by one, in the floats of the interpreter."""
    keep, best = 1 - decay, (np.inf, None)
    for number in range(1, 33):
        power, root = [1.0], [1.0]
        for k in range(1, min(band, rounds)):
            power.append(power[-1] * (keep * ((k - 1 + number / 32) / k)))
            root.append(root[-1] * (momentum * ((k - 0.5) / k)))
        c = [0.0] * len(power)
        for j, share in enumerate(root):
            for k in range(j, len(c)):
                c[k] += share * power[k - j]
        squares = list(itertools.accumulate(x * x for x in c))
        norms = [math.sqrt(squares[min(t, len(c) - 1)]) for t in range(rounds)]
        velocity, weight, last, every = 1.0, 0.0, [], []
        for t in range(rounds):
            weight = keep * weight + velocity
            velocity = momentum * velocity
            last.append(weight * norms[t])
            every.append(weight * norms[-1])
        for g in (last, every):
            for t in range(rounds):
                for k in range(1, min(len(c), rounds - t)):
                    g[t + k] -= g[t] * c[k]
        *_, end = itertools.accumulate(x * x for x in last)
        *_, total = itertools.accumulate((rounds - t) * (x * x) for t, x in enumerate(every))
        if end * total < best[0]:
            best = (end * total, tuple(c))
    return best[1]


@pytest.mark.parametrize(("momentum", "decay"), SERVERS)
@pytest.mark.parametrize(("rounds", "band"), [(1, 1), (5, 9), (40, 7), (120, 30)])
def test_fitted_diagonals_are_the_same_floats_on_every_computer(momentum, decay, rounds, band):
    """Bit for bit those of single operations, which IEEE 754 fixes."""
    found = correlated.fitted_diagonals(rounds, band, momentum, decay)
    assert found == diagonals_by_hand(rounds, band, momentum, decay)


def test_another_order_of_sums_would_show():
    by_hand = np.array(diagonals_by_hand(40, 30, 0.9, 0.01))
    k = np.arange(1, 30)
    root = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    exponent = next(p for p in correlated.EXPONENTS if abs(0.99 * p + 0.45 - by_hand[1]) < 1e-9)
    power = np.cumprod(np.concatenate([[1.0], 0.99 * ((k - 1 + exponent) / k)]))
    mutant = np.convolve((root * 0.9 ** np.arange(30))[::-1], power[::-1])[::-1][:30]
    np.testing.assert_allclose(mutant, by_hand, rtol=1e-12)
    assert not np.array_equal(mutant, by_hand)


def test_fitted_diagonals_are_remembered():
    correlated.fitted_diagonals.cache_clear()
    banded(30, 3)
    banded(30, 3)
    assert correlated.fitted_diagonals.cache_info().hits == 1


@pytest.mark.parametrize(("momentum", "decay"), SERVERS)
def test_the_sensitivity_of_fitted_noise_is_that_of_the_worst_signs(momentum, decay):
    """All sets of rounds of six; mutant: the number of rounds, which holds only for rounds that are a band apart."""
    noise, short = banded(6, 3, momentum, decay), 0
    for taken in itertools.product((False, True), repeat=6):
        rounds = np.flatnonzero(taken)
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(rounds))))
        found = (np.linalg.norm(signs @ noise.encoder[:, rounds].T, axis=1).max() ** 2) if len(rounds) else 0.0
        assert squared(noise, rounds) == pytest.approx(found, rel=EXACT, abs=EXACT)
        if (np.diff(rounds) >= 3).all():
            assert found == pytest.approx(len(rounds), rel=EXACT, abs=EXACT)
        short += found > len(rounds) * (1 + EXACT)
    assert short


def test_the_sensitivity_of_the_first_rounds_is_that_of_the_same_rounds_in_any_order():
    for noise in (correlated.tree(13), correlated.banded(13, 4)):
        for count in (0, 1, 5, 13):
            rounds = np.arange(count)
            moves = np.abs(noise.encoder)[:, rounds].sum(1)
            assert noise.sensitivity(rounds) == pytest.approx(np.sqrt((moves**2).sum()), rel=1e-14)
            assert noise.sensitivity(rounds[::-1]) == pytest.approx(noise.sensitivity(rounds), rel=1e-14)


# ------------------------------------------------------------------------------------------------- sums over nodes


def patterns(rounds, rng):
    """Rounds of a unit: all, halves, regular ones, ends, and random ones."""
    every = np.arange(rounds)
    yield from (every, every[: rounds // 2], every[rounds // 2 :], every[[0, -1]] if rounds > 1 else every)
    yield from (every[first::step] for step in (2, 3, 4, 8) for first in (0, step - 1))
    yield from (np.flatnonzero(rng.random(rounds) < share) for share in (0.0, 0.1, 0.3, 0.9))


@pytest.mark.parametrize("restart", [0, 7, 16])
@pytest.mark.parametrize("rounds", [1, 2, 13, 64, 70])
def test_sums_over_nodes_are_the_sensitivities_of_dense_factors(rounds, restart):
    noise, same = EfficientTree(rounds, restart), least_squares(tree(rounds, restart=restart))
    np.testing.assert_allclose(noise.encoder, same.encoder, rtol=0, atol=1e-13)
    np.testing.assert_allclose(noise.decoder, same.decoder, rtol=0, atol=1e-13)
    for chosen in patterns(rounds, np.random.default_rng(rounds)):
        assert noise.sensitivity(chosen) == pytest.approx(same.sensitivity(chosen), rel=1e-13)
        own, by_inverse = noise.over_nodes(chosen), same.released_sensitivity(chosen)
        assert by_inverse * (1 - 1e-9) <= own <= by_inverse * (1 + 1.1 * TREE_SLACK)
        assert by_inverse * (1 - 1e-9) <= noise.released_sensitivity(chosen) <= own * (1 + 1e-9)


STRUCTURED = {
    "efficient tree": lambda: EfficientTree(300),
    "restarted": lambda: EfficientTree(45, 10),
    "restarted in each round": lambda: EfficientTree(5, 1),
    "plain nodes": lambda: NodeTree(300, honaker=False),
    "nodes from below": lambda: NodeTree(203),
    "plain nodes, restarted": lambda: NodeTree(45, honaker=False, restart=10),
    "nodes from below, restarted in each round": lambda: NodeTree(5, restart=1),
    "schedule": lambda: schedule(200),
    "independent": lambda: independent(7),
    "banded": lambda: banded(200, 10),
    "banded, with momentum": lambda: banded(120, 300, 0.9, 0.1),
    "a band of one": lambda: banded(5, 1),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_noise_is_accounted_for_as_its_dense_factors(name):
    noise = STRUCTURED[name]()
    dense = Correlated(noise.encoder, noise.decoder)
    assert noise.length == dense.length
    assert noise.separate == dense.separate
    for chosen in patterns(noise.length, np.random.default_rng(3)):
        assert noise.sensitivity(chosen) == pytest.approx(dense.sensitivity(chosen), rel=1e-12)
        own = dense.released_sensitivity(chosen)
        assert own * (1 - 1e-9) <= noise.released_sensitivity(chosen) <= own * (1 + 1.1 * TREE_SLACK)
        np.testing.assert_allclose(noise.decoder_rows(chosen), dense.decoder_rows(chosen), rtol=0, atol=1e-14)
        largest = dense.largest_column(chosen)
        assert noise.largest_column(chosen) == (None if largest is None else pytest.approx(largest, rel=1e-12))


@pytest.mark.parametrize("name", STRUCTURED)
def test_the_stretch_of_structured_noise_covers_its_residual(name):
    """Mutant: a decoder that is off by one part in 2^40."""
    noise = STRUCTURED[name]()
    norms = np.linalg.norm(noise.encoder, axis=0)

    def residual(decoder):
        off = np.eye(noise.length) - decoder.astype(np.longdouble) @ noise.encoder.astype(np.longdouble)
        return math.sqrt(noise.length) * float((norms @ np.abs(off) / norms).max())

    assert residual(noise.decoder) <= noise.stretch() <= MOST_STRETCH / 100
    assert residual(noise.decoder * (1 + 2.0**-30)) > noise.stretch()


@pytest.mark.parametrize("height", [0, 1, 5, 8])
def test_factors_of_a_tree_keep_their_digits(height):
    """Against sums in twice the digits. Mutant: the error of single precision."""
    factors, rounds = TreeFactors.of(height), 2**height
    encoder, decoder = np.zeros((rounds, rounds)), np.zeros((rounds, rounds))
    factors.write(encoder, decoder)
    c, gram = encoder.astype(np.longdouble), np.zeros((rounds, rounds))
    for first, stop in np.concatenate(levels(rounds)):
        gram[first:stop, first:stop] += 1
    assert float(np.abs((c.T @ c - gram) / gram).max()) <= 2 * tree_factors.ERROR
    assert float(np.abs(decoder.astype(np.longdouble) @ c - np.eye(rounds)).max()) <= rounds * tree_factors.ERROR
    single = encoder.astype(np.float32).astype(float)
    assert height < 2 or np.abs((single.T @ single - gram) / gram).max() > 2 * tree_factors.ERROR
    np.testing.assert_allclose(factors.row_sums(), encoder.sum(1), rtol=1e-13)
    weights = np.arange(1.0, rounds + 1)
    np.testing.assert_allclose(factors.times_absolute(weights), weights @ np.abs(decoder) @ encoder, rtol=1e-13)


LONG = {
    **{name: {"mechanism": name} for name in ("tree", "schedule", "independent", "banded")},
    **{f"tree, {name}": {"mechanism": "tree", "honaker": name} for name in ("below", "none")},
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("trust", list(Trust))
def test_long_streams_are_calibrated_without_dense_factors(name, trust, monkeypatch):
    """Time must not grow with the cube of the rounds, nor with their square."""
    monkeypatch.setattr(correlated.Structured, "_factors", lambda noise: pytest.fail("dense factors"))
    for kind in (EfficientTree, NodeTree, correlated.Banded, correlated.Fresh):
        monkeypatch.setattr(kind, "_factors", lambda noise: pytest.fail("dense factors"))
    method = build("dp-ftrl", **LONG[name])
    for who in ("full", "cyclic:400"):
        found = Plan(method, 4096, (100,) * 400, Privacy(2.0, trust=trust), who)
        assert calibration.query_noises(found)[0].std.min() > 0


@pytest.mark.parametrize(("rounds", "band", "momentum"), [(60, 2, 0.0), (300, 10, 0.9), (200, 500, 0.0)])
def test_own_streams_of_bands_are_inverted_from_one_matrix_of_covariances(rounds, band, momentum, monkeypatch):
    """Mutant: an inverse that is not checked."""
    noise, rng = banded(rounds, band, momentum), np.random.default_rng(0)
    for share in (0.05, 0.3, 0.9):
        chosen = np.flatnonzero(rng.random(rounds) < share)
        dense = Correlated._inverted_sensitivity(noise, chosen)
        assert noise._inverted_sensitivity(chosen) == pytest.approx(dense, rel=1e-6)
    monkeypatch.setattr(correlated, "MOST_ERROR", 0.0)
    monkeypatch.setattr(correlated, "MOST_INVERTED", 10**9)
    assert noise._inverted_sensitivity(chosen) == noise.sensitivity(chosen) > dense


def test_calibration_of_own_streams_of_bands_multiplies_no_rows_of_the_decoder(monkeypatch):
    """Such a product takes ten times as long as all else, for each client."""
    monkeypatch.setattr(correlated.Banded, "decoder_rows", lambda noise, rounds: pytest.fail("rows of the decoder"))
    method = build("dp-ftrl", mechanism="banded")
    found = Plan(method, 600, (100,) * 20, Privacy(2.0), "fixed:2")
    assert calibration.query_noises(found)[0].std.min() > 0


def test_structured_noise_refuses_what_its_account_does_not_cover():
    for fields, word in (((4, (1.0, -0.5)), "negative"), ((4, (0.0, 1.0)), "positive"), ((4, (np.inf,)), "infinite")):
        with pytest.raises(SordinoError, match=word):
            correlated.Banded(*fields, 0.0, 0.0)
    for stds in ((1.0, 0.0), (1.0, -1.0), (np.inf,)):
        with pytest.raises(SordinoError, match="positive"):
            correlated.Fresh(stds)
    with pytest.raises(AttributeError):
        _ = schedule(3).factors


def test_long_streams_are_summed_over_nodes():
    noise, chosen = EfficientTree(200), np.arange(1, 200, 2)
    assert noise.released_sensitivity(chosen) == noise.over_nodes(chosen)
    assert noise.released_sensitivity(chosen[:40]) == Correlated.released_sensitivity(noise, chosen[:40])


def test_rounds_that_nobody_sees_are_free():
    """Mutants: all other rounds are 0 (too much), or 5 % less (too little)."""
    noise, chosen = EfficientTree(16), np.array([2, 3, 9])
    own = noise.over_nodes(chosen)
    assert own < 0.9 * noise.sensitivity(chosen)
    rng = np.random.default_rng(0)
    for _ in range(200):
        x = rng.normal(size=16)
        x[chosen] = 1.0
        assert np.linalg.norm(noise.encoder @ x) >= own / (1 + 1.1 * TREE_SLACK)
    covariance = noise.decoder[chosen] @ noise.decoder[chosen].T
    assert (0.95 * own) ** 2 < np.abs(np.linalg.inv(covariance)).sum() <= own**2


def test_inverses_of_a_tree_s_covariance_have_no_negative_entry():
    """What sums over nodes rest on. Mutant: running sums of noise, whose covariance has positive entries."""
    rng = np.random.default_rng(1)
    for restart in (0, 7):
        decoder = EfficientTree(45, restart).decoder
        covariance = decoder @ decoder.T
        assert (covariance - np.diag(covariance.diagonal()) <= 1e-12).all()
        chosen = np.flatnonzero(rng.random(45) < 0.3)
        assert (np.linalg.inv(covariance[np.ix_(chosen, chosen)]) >= -1e-12).all()
    sums = np.tri(45)
    assert (sums @ sums.T - np.diag((sums**2).sum(1)) > 0.1).any()


@pytest.mark.parametrize("honaker", [False, True])
@pytest.mark.parametrize("restart", [0, 7, 16])
@pytest.mark.parametrize("rounds", [1, 2, 13, 64, 70])
def test_trees_of_one_draw_per_round_have_the_noise_of_those_of_all_nodes(rounds, restart, honaker):
    """The releases have the same covariance, so they have the same sensitivity when others add nothing, and a smaller
    one otherwise: nodes that nobody sees are not paid for. Mutant: 5 % less."""
    found, same = NodeTree(rounds, honaker, restart), tree(rounds, honaker, restart)
    covariance = same.decoder @ same.decoder.T
    np.testing.assert_allclose(found.decoder @ found.decoder.T, covariance, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.decoder @ found.encoder, np.eye(rounds), rtol=0, atol=1e-13)
    assert (found.encoder >= 0).all()
    assert (covariance - np.diag(covariance.diagonal()) <= 1e-12).all()  # so its parts have inverses without negatives
    for chosen in patterns(rounds, np.random.default_rng(rounds)):
        assert found.sensitivity(chosen) <= same.sensitivity(chosen) * (1 + 1e-12)
        own, by_inverse = found.over_nodes(chosen), same.released_sensitivity(chosen)
        assert by_inverse * (1 - 1e-9) <= own <= by_inverse * (1 + 1.1 * TREE_SLACK)
        if len(chosen):
            moved = np.linalg.inv(covariance[np.ix_(chosen, chosen)])
            assert (0.95 * own) ** 2 < moved.sum() <= own**2


def test_rows_of_a_node_in_fractions():
    """The formulas of docs/proofs.md against the recursion that defines the estimates, without rounding."""
    for height in range(1, 9):
        variance = [Fraction(2**h, 2 ** (h + 1) - 1) for h in range(height + 1)]
        of_one, both = variance[height], 2 * variance[height - 1]
        assert of_one == both / (both + 1)  # weights inversely proportional to variances
        parts, left = [], Fraction(1)
        for h in range(height, 0, -1):
            left *= 1 - variance[h]
            parts.append(left)
        assert parts == [Fraction(2 ** (j + 1) - 1, 2 ** (height + 1) - 1) for j in reversed(range(height))]
        fresh = of_one - sum(p**2 * variance[j] for p, j in zip(parts, reversed(range(height)), strict=True))
        assert fresh == Fraction(2 ** (height + 1) + 1, 3 * (2 ** (height + 1) - 1))
        kept = fresh - sum(p * (1 - p) * variance[j] for p, j in zip(parts, reversed(range(height)), strict=True))
        assert kept == Fraction(1, 2 ** (height + 1) - 1) > 0
        v, keep, added = correlated._node_weights(height, True)
        assert (v, keep, added) == pytest.approx([float(of_one), float(parts[0]), float(fresh)], rel=1e-15)


def test_factors_of_a_tree_cannot_be_replaced():
    """Sums over nodes would charge a scaled encoder too little. Its plain factors are charged as they are."""
    noise, chosen = EfficientTree(8), np.array([1, 6])
    with pytest.raises(ValueError, match="encoder"):
        dataclasses.replace(noise, encoder=2 * noise.encoder)
    with pytest.raises(TypeError):
        EfficientTree(2 * noise.encoder, noise.decoder, 8)
    with pytest.raises(ValueError, match="read-only"):
        noise.encoder[0, 0] = 2.0
    scaled = Correlated(2 * noise.encoder, noise.decoder / 2)
    assert scaled.released_sensitivity(chosen) == pytest.approx(2 * noise.over_nodes(chosen), rel=1e-5)


class Modest(correlated.Banded):
    """A mutant that understates what it costs."""

    def sensitivity(self, rounds):
        return 1e-3


class Quiet(correlated.Banded):
    """A mutant whose noise is smaller than its formulas say."""

    def _factors(self):
        encoder, decoder = super()._factors()
        return encoder, decoder / 1000


class ModestRoot(InverseRoot):
    """The same for long streams."""

    def sensitivity(self, rounds):
        return 1e-3


def test_a_class_of_somebody_else_is_accounted_for_by_its_matrices():
    """Formulas are believed of the classes that docs/proofs.md is about, and not of those derived from them."""
    honest, every = correlated.banded(8, 3), np.arange(8)
    fields = (honest.rounds, honest.diagonals, honest.momentum, honest.decay)
    checked = CorrelatedGaussian(Modest(*fields)).over(8)
    assert checked.sensitivity(every) == pytest.approx(honest.sensitivity(every))
    assert type(InverseRootGaussian(ModestRoot(3, 8)).over(8)) is InverseRoot
    with pytest.raises(SordinoError, match="must be the identity"):
        CorrelatedGaussian(Quiet(*fields)).over(8)
    assert CorrelatedGaussian(honest).over(8) is honest
