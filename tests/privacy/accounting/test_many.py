"""Accounts that are searched as rows of a batch, against the accountant of single ones and against dp-accounting."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import pld

from sordino import Plan, Privacy, build
from sordino.core import Adjacency
from sordino.privacy import calibration, spending
from sordino.privacy.accounting import many, subsampled
from sordino.privacy.accounting.samplers import SampledAccount, SampledGaussian, Sampler
from sordino.privacy.accounting.subsampled import COARSE, EXCESS

ADD, REPLACE = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
POISSON, FIXED = Sampler.POISSON, Sampler.FIXED
DELTA = 1e-6


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))


def accounts(samplers, number=12, seed=0, beside=False):
    """Accounts of clients that differ in rates, numbers of releases, and epsilons."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(number):
        releases = [
            SampledGaussian(
                float(10 ** rng.uniform(-3, -0.4)), float(rng.uniform(0.3, 1.0)), int(rng.integers(1, 600)), s
            )
            for s in samplers
        ]
        result.append(SampledAccount(releases, 0.1 * beside, float(rng.choice([0.25, 1.0, 6.0]))))
    return result


KINDS = [((POISSON,), False), ((FIXED,), False), ((POISSON, POISSON), True), ((FIXED,), True)]


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize(("samplers", "beside"), KINDS)
def test_rows_keep_epsilon_by_the_accountant_of_single_ones_and_little_more(samplers, beside, adjacency):
    """Mutant: two percent less noise."""
    asked = accounts(samplers, beside=beside)
    ((places, batch),) = many.batches(asked, DELTA, adjacency)
    assert places == list(range(len(asked)))
    found = many.factors(batch, DELTA, adjacency, subsampled.WIDE)
    assert np.isfinite(found).mean() > 0.9  # others are searched by themselves
    for (releases, mu, epsilon), factor in zip(asked, found, strict=True):
        if math.isinf(factor):
            continue

        def spent(s, releases=releases, mu=mu):
            return subsampled.epsilon([r._replace(mu=r.mu / s) for r in releases], DELTA, adjacency, mu / s)

        assert spent(factor) <= epsilon < spent(0.98 * factor)


@pytest.mark.parametrize("way", ["remove", "add", "replace"])
@pytest.mark.parametrize(("samplers", "beside"), KINDS)
def test_curves_of_rows_are_bounds_and_as_tight_as_their_grid(samplers, beside, way):
    ((_, batch),) = many.batches(accounts(samplers, beside=beside), DELTA, REPLACE if way == "replace" else ADD)
    for row in range(0, len(batch.target), 3):
        parts, mu = batch.parts(row), float(batch.beside[row])
        exact = subsampled._one_grid(parts, mu, way, DELTA, None, EXCESS)
        if not 0 < exact < 30 or exact >= subsampled._most_loss(parts, mu, way):
            continue
        near = batch.rows(np.array([row]))._replace(target=np.array([exact]))
        exact = subsampled._one_grid(parts, mu, way, DELTA, exact, EXCESS)
        (found,), _ = many.reached(near, DELTA, way, COARSE)
        assert exact * (1 - 2 * EXCESS) <= found <= exact * (1 + 2 * COARSE)


def test_rare_large_losses_need_no_more_cells_than_a_single_account():
    """A lower tilt makes the window shorter. Mutant: the tilt of the saddle point."""
    account = SampledAccount([SampledGaussian(0.0011, 1.33, 9999)], 0.0, 2.0)
    ((_, batch),) = many.batches([account] * 8, DELTA, REPLACE)
    (placed,) = set(many._placed(batch, DELTA, "replace", COARSE / 2).cells.tolist())
    assert placed <= 12288
    exact = subsampled._one_grid(batch.parts(0), 0.0, "replace", DELTA, 2.0, EXCESS)
    found = many.reached(batch._replace(target=np.full(8, exact)), DELTA, "replace", COARSE)[0]
    assert (exact * (1 - 2 * EXCESS) <= found).all()
    assert (found <= exact * (1 + 2 * COARSE)).all()


def test_noise_of_rows_against_dp_accounting():
    asked = accounts((POISSON,), seed=3)
    found = many.scales(asked, DELTA, ADD)
    for (releases, _, epsilon), factor in list(zip(asked, found, strict=True))[1::4]:
        (release,) = releases

        def other(noise, release=release):
            accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, 4e-4)
            event = dp.PoissonSampledDpEvent(release.rate, dp.GaussianDpEvent(noise / release.mu))
            return accountant.compose(dp.SelfComposedDpEvent(event, release.times)).get_epsilon(DELTA)

        assert other(1.01 * factor) <= epsilon < other(0.98 * factor)


def test_grids_that_begin_above_epsilon_are_no_sign_that_it_is_reached():
    """Of a record that joins, all losses are small. A grid around the target begins far above them, and says little."""
    account = SampledAccount([SampledGaussian(0.0019749097404287348, 0.5738597333469634, 532)], 0.0, 1.0)
    found = many.scales([account] * 8, DELTA, ADD)
    assert found == pytest.approx([subsampled.scale(account.releases, 1.0, DELTA, ADD)] * 8, rel=0.01)
    ((_, batch),) = many.batches([account] * 8, DELTA, ADD)
    epsilons, below = many.reached(batch.with_noise(np.full(8, 2 * found[0])), DELTA, "add", COARSE)
    assert below.all()
    assert (epsilons > 0.9).all()


def test_one_direction_is_not_enough(monkeypatch):
    """Of a record that leaves a sample of a fixed size the loss is another one than of a record that joins."""
    ((_, batch),) = many.batches(accounts((FIXED,), seed=1), DELTA, ADD)
    both = many.factors(batch, DELTA, ADD, subsampled.WIDE)
    monkeypatch.setattr(subsampled, "_ways", lambda adjacency: ("add",))
    assert (many.factors(batch, DELTA, ADD, subsampled.WIDE) < 0.9 * both).any()


def test_accounts_in_no_batch_are_searched_one_by_one():
    alike = accounts((POISSON,))
    epoch = SampledAccount([SampledGaussian(0.1, 1.0, 20, Sampler.ALLOCATION)], 0.0, 2.0)
    free = SampledAccount(alike[0].releases, 0.0, math.inf)
    rare = SampledAccount([SampledGaussian(1e-9, 1.0, 2)], 0.0, 0.5)  # less likely to be drawn than delta
    never = SampledAccount([], 0.0, 2.0)
    others = [epoch, free, rare, never]
    found = many.scales([*alike, *others], DELTA, ADD)
    one_by_one = [subsampled.scale(a.releases, a.epsilon, DELTA, ADD, a.gaussian_mu) for a in others]
    np.testing.assert_allclose(found[len(alike) :], one_by_one, rtol=0.02)
    assert found[-1] == found[-3] == 0.0


def test_what_is_stored_is_what_was_found(monkeypatch):
    asked = accounts((POISSON,))
    found = many.scales(asked, DELTA, ADD)
    monkeypatch.delattr(many, "_search")
    assert many.scales(asked, DELTA, ADD) == found


def test_unequal_clients_of_cohorts_take_few_curves(monkeypatch):
    """Work, not time: no curve of a single account, few accounts, and fewer than three rows of curves for each."""
    rng = np.random.default_rng(1)
    sizes = tuple(int(size) for size in rng.lognormal(6, 1, 1000) + 100)
    cohorts = Plan(build("dp-fedgd"), 200, sizes, Privacy(1.0, 1e-5), participation="fixed:100", sampling="poisson:32")
    single, rows, searched = [], [], []
    whole, of_rows, batches = subsampled._curve, many._on_grids, many.batches
    monkeypatch.setattr(subsampled, "_curve", lambda *a, **k: single.append(a) or whole(*a, **k))
    monkeypatch.setattr(many, "_on_grids", lambda batch, *a: rows.extend(batch.target) or of_rows(batch, *a))
    monkeypatch.setattr(many, "batches", lambda asked, *a: searched.extend(asked) or batches(asked, *a))
    calibration.query_noises(cohorts)
    assert not single
    assert len(searched) == calibration.MOST_ACCOUNTS
    assert len(rows) < 3 * len(searched)
    some = spending.groups(cohorts)[::60]
    assert max(spending.epsilon_of(cohorts, group) for group in some) <= 1.0
