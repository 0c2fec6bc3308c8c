"""The noise of a plan: the published table, its law in a run, and who pays what."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.core import (
    SAFETY,
    Adjacency,
    Clipping,
    Correlated,
    Divisor,
    Kind,
    Lemma,
    Local,
    Method,
    Privacy,
    Query,
    Rule,
    Stage,
    Stream,
    Trust,
    Unit,
)
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.charges import charges
from sordino.methods import build
from sordino.models.linear import Linear, Loss
from sordino.privacy import calibration, releases, spending
from sordino.privacy.accounting import correlated, gaussian
from sordino.privacy.mechanisms.random import Noiseless, Secure, Seeded
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan, continues_stream
from sordino.rules import ema, scale
from sordino.rules.basic import stateless
from tests.support import covering, tiers

PC, SA, TRUSTED = Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION, Trust.TRUSTED_SERVER
ADD, SWAP = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
UNEQUAL = (40, 100, 160, 80, 20)
# the sizes of a Dirichlet(0.5) split of 50 000 records over 20 clients (DP-FedSOFIM, Table 14)
TABLE_14 = (1706, 2375, 3498, 2612, 1306, 3015, 3356, 1515, 1939, 2544)
TABLE_14 += (2536, 3396, 3312, 2926, 3329, 2980, 891, 1539, 2025, 3200)


def test_texts_of_participation_and_sampling_are_parsed():
    plan = Plan(build("dp-fedgd"), 3, UNEQUAL, Privacy(2.0), participation="fixed:2", sampling="poisson:16")
    assert (plan.participation, plan.sampling) == (Participation("fixed", 2.0), Sampling("poisson", 16.0))
    with pytest.raises(SordinoError, match=r"batch \(in a Plan: sampling\): 'poisson' has no number"):
        Plan(build("dp-fedgd"), 3, UNEQUAL, Privacy(2.0), sampling="poisson")


def test_a_method_of_another_unit_is_told_how_to_be_built():
    with pytest.raises(SordinoError, match=r"not person; .* build\('dp-fedadam', unit='person'\), or .* unit='record'"):
        Plan(build("dp-fedadam"), 3, UNEQUAL, Privacy(2.0, unit="person"))
    with pytest.raises(SordinoError, match=r"not person; .* Method\(…, unit=Unit\('person'\)\)"):
        Plan(build("dp-fedadam")._replace(registered=None), 3, UNEQUAL, Privacy(2.0, unit="person"))


def test_sampling_that_is_nothing_is_refused():
    with pytest.raises(SordinoError, match="sampling: None is not a Sampling; write a text such as 'full'"):
        Plan(build("dp-fedgd"), 3, UNEQUAL, Privacy(2.0), sampling=None)


def test_queries_are_a_tuple():
    method = build("dp-fedgd")
    wrong = method.stages[0]._replace(queries=method.stages[0].queries[0])
    with pytest.raises(SordinoError, match="queries of a stage are a tuple"):
        Plan(method._replace(stages=(wrong,)), 3, UNEQUAL, Privacy(2.0))


def test_a_message_is_semidefinite_only_if_its_answers_are():
    method = build("dp-fedgd", Unit.CLIENT)
    answer, message = method.stages[0].queries
    wrong = method.stages[0]._replace(queries=(answer, replace(message, psd=True)))
    with pytest.raises(SordinoError, match="psd is proved for a message that is made of semi-definite answers alone"):
        Plan(method._replace(stages=(wrong,)), 3, UNEQUAL, Privacy(2.0, unit="client"))
    assert Plan(build("dp-fedfc", Unit.CLIENT), 3, UNEQUAL, Privacy(2.0, unit="client")).rounds == 3


def test_a_method_whose_unit_is_a_text_is_refused():
    method = build("dp-fedgd")
    with pytest.raises(SordinoError, match=r"unit: mine has the text 'record' as its unit; write Unit\('record'\)"):
        Plan(Method("mine", "record", method.stages, method.proves), 3, UNEQUAL, Privacy(2.0))


def plan(
    sizes=UNEQUAL, rounds=6, epsilon=1.0, *, unit="record", adjacency=SWAP, trust=PC, participation="full", **fields
):
    privacy = Privacy(epsilon, 1e-5, Unit(unit), adjacency, trust, fields.pop("client_epsilon", {}))
    method = fields.pop("method", None) or build("dp-fedgd", Unit(unit), clip=fields.pop("clip", 1.0))
    return Plan(method, rounds, tuple(sizes), privacy, Participation.parse(participation), **fields)


def epsilon_of(found, client):
    (group,) = (g for g in spending.groups(found) if client in g.clients)
    return gaussian.epsilon(group.mu, found.privacy.delta)


def epsilons(found):
    return np.array([epsilon_of(found, i) for i in range(found.clients)])


# ------------------------------------------------------------------------------------------------------- the table

TABLE = {  # sigma_g for 20 clients, 70 rounds, delta = 1e-5
    (SA, ADD): {0.5: 58.832, 1: 31.213, 5: 7.462, 10: 4.182},
    (SA, SWAP): {0.5: 117.665, 1: 62.425, 5: 14.924, 10: 8.365},
    (PC, ADD): {0.5: 263.107, 1: 139.587, 5: 33.371, 10: 18.704},
    (PC, SWAP): {0.5: 526.214, 1: 279.175, 5: 66.741, 10: 37.408},
}


@pytest.mark.parametrize("epsilon", [0.5, 1, 5, 10])
@pytest.mark.parametrize(("trust", "adjacency"), TABLE)
def test_the_published_noise(trust, adjacency, epsilon):
    n, m, clip = 20, 2500, 10.0
    found = plan([m] * n, 70, epsilon, trust=trust, adjacency=adjacency, clip=clip)
    sigma, own = calibration.summed_noise(found)
    assert sigma == pytest.approx(TABLE[trust, adjacency][epsilon], abs=5.1e-4)
    assert own == pytest.approx(sigma / math.sqrt(n))
    assert calibration.aggregate_std(found, 0) == pytest.approx(clip * sigma / (n * m))
    assert spending.epsilon(found) == pytest.approx(epsilon, rel=1e-9)
    for other in set(TABLE) - {(trust, adjacency)}:
        assert TABLE[other][epsilon] != pytest.approx(sigma, rel=0.05)


def test_the_closed_form():
    """sigma = {1, 2} sqrt(T) / mu, times sqrt(n) where every message is seen."""
    mu = gaussian.mu(1.0, 1e-5)
    for (trust, adjacency), rounds, n in itertools.product(TABLE, (1, 7, 70), (1, 4, 20)):
        sigma, _ = calibration.summed_noise(plan([50] * n, rounds, trust=trust, adjacency=adjacency))
        want = (2 if adjacency is SWAP else 1) * math.sqrt(rounds * (n if trust is PC else 1)) / mu
        assert sigma == pytest.approx(want)
    assert calibration.summed_noise(plan(trust=TRUSTED)) == calibration.summed_noise(plan(trust=SA))


def test_the_wrong_view():
    """Noise calibrated for sums, seen client by client, is worth far less."""
    for epsilon, seen in {0.5: 2.61, 1: 5.41, 5: 33.2, 10: 77.4}.items():
        found = plan([2500] * 20, 70, epsilon, trust=SA, adjacency=ADD)
        exposed = plan([2500] * 20, 70, epsilon, trust=PC, adjacency=ADD, noise=calibration.summed_noise(found)[0])
        assert spending.epsilon(exposed) == pytest.approx(seen, rel=5e-3)


# ------------------------------------------------------------------------------------- the law (Lemmas 4.7 and 4.10)

FEATURES = 400
SILENCE = Linear(FEATURES, 1, Loss.SQUARES, bias=False)


def noise_of(found, seeds=50):
    """Aggregates of a run over records without gradient: x = 0 and no bias. One row a seed."""
    client = np.repeat(np.arange(found.clients), found.sizes)
    still = Records.of(np.zeros((len(client), FEATURES)), np.ones(len(client)), client, dtype=torch.float64)
    theta = torch.zeros(seeds, FEATURES, dtype=torch.float64)
    (this_round,) = simulate.run(found, SILENCE, still, [Seeded(s) for s in range(seeds)], theta=theta, shares=True)
    return this_round.aggregate.numpy()


def has_variance(sample, variance):
    """Within 4.5 standard errors, the mean being known to be zero."""
    return abs(np.mean(sample**2) / variance - 1) <= 4.5 * math.sqrt(2 / sample.size)


@pytest.mark.parametrize("sizes", [(3, 7, 4, 12), (5, 5, 5, 5)])
def test_the_variance_of_a_mean_of_client_means(sizes):
    clip, n, m = 3.0, 4, np.array(sizes)
    found = plan(sizes, 1, trust=PC, divisor="client-mean", clip=clip)
    sigma, _ = calibration.summed_noise(found)
    sample = noise_of(found)
    want = (clip * sigma) ** 2 / n**3 * (1 / m**2.0).sum()
    most = (clip * sigma) ** 2 / (n**2 * m.min() ** 2)
    assert has_variance(sample, want)
    assert calibration.aggregate_std(found, 0) == pytest.approx(math.sqrt(want))
    assert not has_variance(sample, want / n), "noise divided once more"
    assert not has_variance(sample, want / sigma), "sigma for its square"
    assert not has_variance(1.1 * sample, want)
    if len(set(sizes)) == 1:
        assert want == pytest.approx(most), "equality for equal sizes"
    else:
        assert want < most
        assert not has_variance(sample, most)
        pooled = noise_of(plan(sizes, 1, trust=PC, divisor="pooled", clip=clip))
        assert not has_variance(pooled, want), "the other divisor has another law"


@pytest.mark.parametrize("divisor", list(Divisor))
@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
@pytest.mark.parametrize("participation", ["full", "fixed:3"])
def test_the_variance_is_what_the_plan_says(unit, trust, divisor, participation):
    sizes = (4, 10, 16, 8)
    if participation != "full" and trust is PC and divisor is Divisor.CLIENT_MEAN and unit == "record":
        sizes = (8,) * 4  # with unequal own noises only the mean over cohorts is aggregate_std
    found = plan(sizes, 1, unit=unit, trust=trust, divisor=divisor, participation=participation)
    sample = noise_of(found, seeds=30)
    assert has_variance(sample, calibration.aggregate_std(found, 0) ** 2)
    assert not has_variance(sample, 2 * calibration.aggregate_std(found, 0) ** 2)


# ------------------------------------------------------------------------------------------------------ Lemma 4.11


def moving_average(found, clip_factor=1.0, noise_factor=1.0, beta=0.5):
    """E |M|^2 after every round, over seeds; every record's gradient is far above the clip, in one direction."""
    model = Linear(6, 1, Loss.SQUARES, bias=False)
    client = np.repeat(np.arange(found.clients), found.sizes)
    loud = Records.of(np.ones((len(client), 6)), np.full(len(client), -1e6), client, dtype=torch.float64)
    clear = [r.aggregate for r in simulate.run(found, model, loud, Noiseless())]
    theta = torch.zeros(300, 6, dtype=torch.float64)
    noisy = [r.aggregate for r in simulate.run(found, model, loud, [Seeded(s) for s in range(300)], theta=theta)]
    rule, m, squares = ema(beta), torch.zeros_like(theta), []
    for t, (g, mean) in enumerate(zip(noisy, clear, strict=True)):
        _, m = rule.update(clip_factor * mean + noise_factor * (g - mean), m, theta, t)
        squares.append(m.square().sum(-1))
    return clear, torch.stack(squares).numpy()


@pytest.mark.soak  # long statistics
def test_the_moving_average_is_bounded():
    clip, beta = 2.0, 0.5
    found = plan(rounds=12, epsilon=8.0, clip=clip)
    bound = clip**2 + (1 - beta) * 6 * calibration.aggregate_std(found, 0) ** 2

    def holds(squares):
        standard_error = squares.std(1) / math.sqrt(squares.shape[1])
        return bool((squares.mean(1) <= bound + 4 * standard_error).all())

    clear, squares = moving_average(found, beta=beta)
    assert all(g.norm() <= clip for g in clear)
    assert clear[0].norm() == pytest.approx(clip * (1 - SAFETY)), "and it is reached"
    assert holds(squares)
    assert not holds(moving_average(found, clip_factor=2, beta=beta)[1]), "doubled clip"
    loud = plan(rounds=12, epsilon=0.1, clip=clip)
    bound = clip**2 + (1 - beta) * 6 * calibration.aggregate_std(loud, 0) ** 2
    assert holds(moving_average(loud, beta=beta)[1])
    assert not holds(moving_average(loud, noise_factor=2, beta=beta)[1]), "doubled noise"


# --------------------------------------------------------------------------------------------------- unequal sizes


def seen_in_the_sum(found, own):
    """Every client's epsilon where only the sum is seen, worked out from the noise each one draws: `own`."""
    level = calibration.query_noises(found)[0]
    total = math.sqrt(((level.weight * own) ** 2).sum())
    mus = math.sqrt(found.rounds) * level.weight * level.sensitivity / total
    return np.array([gaussian.epsilon(mu, found.privacy.delta) for mu in mus])


def keeps(promised, found):
    """Nobody beyond the promise, and the worst off at it."""
    return promised * (1 - 1e-9) <= found.max() <= promised * (1 + 1e-9)


@pytest.mark.parametrize("divisor", list(Divisor))
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("trust", [SA, TRUSTED])
def test_no_small_client_pays_for_the_others(trust, adjacency, divisor):
    for sizes, epsilon in itertools.product((UNEQUAL, TABLE_14, (1, 1000)), (0.5, 5.0)):
        found = plan(sizes, 70, epsilon, trust=trust, adjacency=adjacency, divisor=divisor)
        own = calibration.client_std(found, 0, 0) * calibration.noise_share(found, found.clients)
        assert keeps(epsilon, epsilons(found))
        np.testing.assert_allclose(seen_in_the_sum(found, own), epsilons(found), rtol=1e-9)
        assert not keeps(epsilon, seen_in_the_sum(found, 1.1 * own))
        assert not keeps(epsilon, seen_in_the_sum(found, 0.9 * own))


@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedfc", "dp-ftrl"])
@pytest.mark.parametrize("requested_epsilons", [{}, {3: 0.7}])
def test_rounds_and_weights_are_counted_together(name, requested_epsilons):
    """In sums of unequal clients with cohorts: the worst account is at the promise, and nobody is beyond it."""
    asked = {"trust": SA, "divisor": "client-mean", "participation": "fixed:2", "client_epsilon": requested_epsilons}
    found = plan((10, 40, 80, 120, 150), 12, 2.0, method=build(name), **asked)
    spent, limits = np.zeros(5), np.array([requested_epsilons.get(i, 2.0) for i in range(5)])
    for noise in calibration.query_noises(found):
        counts, factor = releases.release_counts(found, noise.stage, noise.query)
        spent += counts * (factor * noise.weight * noise.sensitivity / (noise.weight * noise.std).max()) ** 2
    own = np.array([gaussian.epsilon(math.sqrt(square), found.privacy.delta) for square in spent])
    assert (own / limits).max() == pytest.approx(1, rel=1e-8)
    np.testing.assert_allclose(own, epsilons(found), rtol=1e-8)
    fewer = gaussian.epsilon(1.01 * math.sqrt(spent[(own / limits).argmax()]), found.privacy.delta)
    assert fewer > limits[(own / limits).argmax()] * 1.005  # mutant: 1 % less noise


def test_equal_noise_in_a_mean_of_client_means_would_not_do():
    """The smallest of 20 clients would get up to 28 for 10: its record weighs 2.2 times the mean (section 0.3)."""
    inverse = 1 / np.array(TABLE_14, dtype=float)
    inflation = inverse / math.sqrt((inverse**2).mean())
    assert inflation.max() == pytest.approx(2.23, abs=5e-3)
    assert inflation.min() == pytest.approx(0.57, abs=5e-3)
    for epsilon, got in {0.5: 1.20, 1: 2.43, 5: 13.2, 10: 28.3}.items():
        found = plan(TABLE_14, 70, epsilon, trust=SA, divisor="client-mean")
        equal = plan([2500] * 20, 70, epsilon, trust=SA)
        naive = seen_in_the_sum(found, calibration.client_std(equal, 0, 0) * calibration.noise_share(equal, 20))
        assert naive.max() == pytest.approx(got, rel=5e-3)
        assert not keeps(epsilon, naive)
        assert keeps(epsilon, epsilons(found))


@pytest.mark.parametrize("divisor", list(Divisor))
def test_where_messages_are_seen_all_pay_the_same(divisor):
    found = plan(TABLE_14, 70, trust=PC, divisor=divisor)
    np.testing.assert_allclose(epsilons(found), 1.0, rtol=1e-9)
    assert len(set(calibration.client_std(found, 0, 0))) == 1


def test_whole_clients_weigh_the_same_whatever_their_size():
    found = plan(unit="client", trust=SA, divisor="pooled")
    np.testing.assert_allclose(found.weights, 1 / 5)
    np.testing.assert_allclose(epsilons(found), 1.0, rtol=1e-9)
    np.testing.assert_allclose(plan().weights, np.array(UNEQUAL) / 400)
    np.testing.assert_allclose(plan(divisor="client-mean").weights, 1 / 5)


# ---------------------------------------------------------------------------------------------------- strict clients


@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("divisor", list(Divisor))
def test_a_stricter_client_is_heard(trust, divisor):
    requested_epsilons = {1: 0.3, 4: 0.8}
    found = epsilons(plan(trust=trust, divisor=divisor, client_epsilon=requested_epsilons))
    limits = np.array([requested_epsilons.get(i, 1.0) for i in range(5)])
    assert (found <= limits * (1 + 1e-9)).all()
    if trust is PC:
        np.testing.assert_allclose(found, limits, rtol=1e-9)
    else:
        assert (found / limits).max() == pytest.approx(1, rel=1e-9), "the binding wish is met exactly"
    deaf = epsilons(plan(trust=trust, divisor=divisor))
    assert not (deaf <= limits).all()


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("trust", list(Trust))
def test_nobody_pays_for_a_stricter_client(trust, unit):
    sizes, requested_epsilons = (50,) * 5, {1: 0.1, 4: 0.5}
    free = plan(sizes, unit=unit, trust=trust)
    found = plan(sizes, unit=unit, trust=trust, client_epsilon=requested_epsilons)
    np.testing.assert_allclose(epsilons(found), [1, 0.1, 1, 1, 0.5], rtol=1e-9)  # each of them exactly what it allows
    mu = [gaussian.mu(requested_epsilons.get(i, 1.0), 1e-5) for i in range(5)]
    np.testing.assert_allclose(found.weights, mu / np.sum(mu))
    growth = calibration.aggregate_std(found, 0) / calibration.aggregate_std(free, 0)
    assert growth == pytest.approx(5 * mu[0] / sum(mu)), "the mean is over fewer records, and no noise is larger"


def test_a_stricter_client_gets_what_it_asks_for_beside_a_whole_epsilon():
    whole = Plan(build("dp-fedgd"), 5, (100,) * 3, Privacy(epsilon=2, client_epsilon={0: 1.5}))
    assert [spending.client_epsilon(whole, client) for client in range(3)] == pytest.approx([1.5, 2, 2], rel=1e-6)


def test_a_laxer_client_is_refused():
    with pytest.raises(SordinoError, match="client_epsilon: client 2 asks for 3"):
        plan(client_epsilon={2: 3.0})


@pytest.mark.parametrize("client", [5, -1])
def test_a_stranger_is_refused(client):
    with pytest.raises(SordinoError, match=f"client_epsilon: client {client} does not exist; the last is 4"):
        plan(client_epsilon={client: 0.5})


# ---------------------------------------------------------------------------------------------------- participation


@pytest.mark.parametrize("participation", ["fixed:3", "poisson:0.5"])
@pytest.mark.parametrize("trust", [PC, SA])
def test_each_pays_for_the_rounds_it_took_part_in(trust, participation):
    found = plan((30,) * 5, 20, trust=trust, participation=participation)
    attended = np.bincount(np.concatenate(found.cohorts), minlength=5)
    level = calibration.query_noises(found)[0]
    mus = np.array([next(g.mu for g in spending.groups(found) if i in g.clients) for i in range(5)])
    ratio = level.sensitivity / level.std  # equal sizes: the same in the sum as alone
    np.testing.assert_allclose(mus**2, attended * ratio**2)
    assert spending.mu(found) == pytest.approx(gaussian.mu(1.0, 1e-5)), "who came most often has spent the budget"
    assert not np.allclose(mus**2, attended**2 * ratio**2)


def test_nothing_is_gained_by_secrecy():
    """Given as many rounds, a rarely drawn client pays as one that always comes: no amplification is claimed."""
    rare = plan((30,) * 50, 40, participation="fixed:2")
    most = np.bincount(np.concatenate(rare.cohorts)).max()
    assert calibration.client_std(rare, 0, 0)[0] == pytest.approx(
        calibration.client_std(plan((30,) * 50, int(most)), 0, 0)[0]
    )


@pytest.mark.parametrize("participation", ["full", "fixed:3", "poisson:0.5"])
def test_the_schedule_depends_on_its_seed_alone(participation):
    def schedule(seed, epsilon=1.0, sizes=UNEQUAL):
        found = plan(sizes, 30, epsilon, participation=participation, schedule_seed=seed)
        return [cohort.tolist() for cohort in found.cohorts]

    assert schedule(1) == schedule(1, 8.0, (1,) * 5)
    assert (schedule(1) == schedule(2)) == (participation == "full")
    sizes = {len(cohort) for cohort in schedule(1)}
    assert sizes == {"full": {5}, "fixed:3": {3}}.get(participation, sizes)
    assert all(cohort == sorted(set(cohort)) for cohort in schedule(1))


def test_the_rate_of_a_schedule():
    """Every client comes in k of n rounds, to within 4.5 standard errors."""
    for text in ("fixed:3", "poisson:0.3"):
        chosen = Participation.parse(text)
        counts = np.bincount(np.concatenate(chosen.schedule(4000, 10, 0)), minlength=10)
        se = math.sqrt(4000 * 0.3 * 0.7)
        assert chosen.rate(10) == pytest.approx(0.3)
        assert (abs(counts - 1200) < 4.5 * se).all()
        assert not (abs(counts - 4000 * 0.35) < 4.5 * se).all()


def test_participation_reads_what_it_writes():
    for text in ("full", "fixed:3", "poisson:0.5"):
        assert str(Participation.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fixd:3", "participation: 'fixd:3' is unknown. Did you mean 'fixed:5'?"),
        ("fixed", "participation: 'fixed' has no number"),
        ("fixed:x", "participation: 'fixed:x' has no number"),
        ("fixed:0", "participation: fixed:0 needs a whole number"),
        ("fixed:2.5", "participation: fixed:2.5 needs a whole number"),
        ("poisson:0", "participation: poisson:0 needs a rate"),
        ("poisson:1.5", "participation: poisson:1.5 needs a rate"),
        ("poisson:nan", "participation: poisson:nan needs a rate"),
        ("fixed:6", "participation: fixed:6 asks for 6 clients; there are 5"),
    ],
)
def test_participation_that_cannot_be(text, message):
    with pytest.raises(SordinoError) as caught:
        plan(participation=text)
    assert message in str(caught.value)


def test_a_schedule_nobody_came_to():
    found = plan(rounds=2, participation="poisson:0.0001")
    assert [len(cohort) for cohort in found.cohorts] == [0, 0]
    assert spending.epsilon(found) == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("trust", [PC, SA])
@pytest.mark.parametrize("mechanism", ["tree", "inverse-root", "independent"])
def test_a_stream_nobody_added_to(mechanism, trust):
    """Nothing was released, so the noise is that of one round, and no quotient of zeros."""
    found = plan(
        trust=trust, method=build("dp-ftrl", mechanism=mechanism), participation="poisson:1e-9", uncertified=True
    )
    (noise,) = calibration.query_noises(found)
    alone = calibration.query_noises(plan(rounds=1, trust=trust))[0]
    assert not any(len(cohort) for cohort in found.cohorts)
    np.testing.assert_allclose(noise.std, alone.std, rtol=1e-9)
    assert spending.epsilon(found) == 0


# ------------------------------------------------------------------------------------------------ a fixed noise level

ACCOUNTS = list(itertools.product(Trust, Unit, ["full", "fixed:3", "poisson:0.6"]))
COMBINATIONS = (ACCOUNTS, list(Adjacency), list(Divisor), [(30,) * 5, UNEQUAL])


@pytest.mark.parametrize(
    ("account", "adjacency", "divisor", "sizes"), tiers(itertools.product(*COMBINATIONS), covering(*COMBINATIONS))
)
def test_noise_and_epsilon_say_the_same(account, adjacency, divisor, sizes):
    trust, unit, participation = account
    chosen = {"trust": trust, "unit": unit, "adjacency": adjacency, "divisor": divisor, "participation": participation}
    chosen["schedule_seed"] = 1  # in its schedules nobody comes more often than client 4, the smallest, who pays most
    asked = plan(sizes, 10, 2.0, clip=0.4, **chosen)
    fixed = plan(sizes, 10, 99.0, clip=0.4, noise=calibration.summed_noise(asked)[0], **chosen)
    np.testing.assert_allclose(epsilons(fixed), epsilons(asked), rtol=1e-9)
    np.testing.assert_allclose(calibration.client_std(fixed, 0, 0), calibration.client_std(asked, 0, 0))
    assert calibration.summed_noise(fixed) == pytest.approx(calibration.summed_noise(asked))
    assert calibration.aggregate_std(fixed, 0) == pytest.approx(calibration.aggregate_std(asked, 0))
    assert spending.epsilon(asked) == pytest.approx(2.0, rel=5e-3 if asked.amplified else 1e-9)
    more = replace(fixed, noise=1.1 * fixed.noise)
    assert spending.epsilon(more) < 1.99
    if spending.samples(asked):
        assert [spending.epsilon_after(asked, t) for t in (0, 9)] == sorted(
            spending.epsilon_after(asked, t) for t in (0, 9)
        )
        assert spending.epsilon_after(asked, 9) == spending.epsilon(asked)
        return
    for found in (asked, fixed):
        path = spending.mu_after_each_round(found)
        assert path[-1] == pytest.approx(spending.mu(found))
        assert (np.diff(path) >= 0).all()
        np.testing.assert_allclose(path[:4], [spending.mu(found, done) for done in range(1, 5)])


def test_the_ledger_s_rows_add_up_to_the_plan():
    for trust, participation in itertools.product((PC, SA), ("full", "poisson:0.6")):
        found = plan(rounds=10, trust=trust, participation=participation)
        for i in range(5):
            rows = [e for t in range(10) if i in found.cohorts[t] for e in charges(found, i, t, "run")]
            total = gaussian.mu_of((e.sensitivity, e.std, e.times) for e in rows)
            assert gaussian.epsilon(total, 1e-5) == pytest.approx(epsilon_of(found, i))


def test_an_infinite_epsilon_adds_no_noise():
    noiseless = plan(trust=SA, epsilon=math.inf)
    assert noiseless.privacy.epsilon == math.inf
    assert calibration.aggregate_std(noiseless, 0) == 0
    assert calibration.summed_noise(noiseless) == (0, 0)
    assert spending.epsilon(noiseless) == math.inf
    assert spending.mu_after_each_round(noiseless)[0] == math.inf


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    rounds=st.integers(1, 30),
    epsilon=st.floats(0.05, 20),
    trust=st.sampled_from(list(Trust)),
    divisor=st.sampled_from(list(Divisor)),
)
def test_the_budget_is_met_and_never_exceeded(sizes, rounds, epsilon, trust, divisor):
    found = plan(sizes, rounds, epsilon, trust=trust, divisor=divisor)
    assert epsilon * (1 - 1e-9) <= spending.epsilon(found) <= epsilon


# ----------------------------------------------------------------------------------------------------- other shapes


def stage(*queries, rounds=None):
    return Stage(
        Local(lambda ask, broadcast, memory, cache: ask.gradient(broadcast.theta)), scale(-1.0), queries, rounds
    )


def method(*stages, proves=frozenset({(Unit.RECORD, PC)})):
    return Method("toy", Unit.RECORD, stages, proves, "Its state is hidden.")


def gradient(**fields):
    return Query(Kind.GRADIENT, 1.0, **fields)


def gram(**fields):
    return Query(Kind.GRAM, 1.0, psd=True, **fields)


@pytest.mark.parametrize(
    ("shares", "total"), [((0.5, 0.6), "1.1"), ((0.5, 0.3), "0.8"), ((1.0, None), "1"), ((1.5, None), "1.5")]
)
def test_shares_must_add_up(shares, total):
    found = plan(method=method(stage(gradient(share=shares[0]), gram(share=shares[1]))))
    with pytest.raises(SordinoError, match=f"share: the parts of the budget add up to {total}"):
        calibration.query_noises(found)


@pytest.mark.parametrize(("shares", "parts"), [((0.25, 0.75), (0.25, 0.75)), ((0.2, None), (0.2, 0.8))])
def test_shares_divide_mu_squared(shares, parts):
    found = plan(method=method(stage(gradient(share=shares[0]), gram(share=shares[1]))))
    (group,) = spending.groups(found)
    mu2 = gaussian.mu(1.0, 1e-5) ** 2
    for release, part in zip(group.releases, parts, strict=True):
        assert release.times * (release.sensitivity / release.std) ** 2 == pytest.approx(part * mu2)
    assert group.releases[1].sensitivity == pytest.approx(math.sqrt(2))


def test_a_lemma_sets_each_client_s_sensitivity():
    delta = Query(Kind.DELTA, bound=Lemma("1/m", lambda m, adjacency: 1 * (1 + (adjacency == "replace-one")) / m))
    found = plan(method=method(stage(gradient(noise=None), delta)))
    np.testing.assert_allclose(calibration.query_noises(found)[0].sensitivity, 2 / np.array(UNEQUAL))
    np.testing.assert_allclose(epsilons(found), 1.0, rtol=1e-9)


def test_a_stage_nobody_came_to():
    two = method(stage(gradient(), rounds=1), stage(gradient()))
    cohorts = (Participation.parse("poisson:0.15").schedule(8, 5, seed) for seed in range(99))
    seed = next(s for s, found in enumerate(cohorts) if not len(found[0]) and len(np.concatenate(found)))
    found = plan(rounds=8, participation="poisson:0.15", method=two, schedule_seed=seed)
    assert not len(found.cohorts[0])
    assert spending.epsilon(found) == pytest.approx(1.0, rel=1e-9)


def test_noise_and_epsilon_say_the_same_of_a_lemma():
    delta = Query(Kind.DELTA, bound=Lemma("1/m", lambda m, adjacency: 1 * (1 + (adjacency == "replace-one")) / m))
    asked = plan(method=method(stage(gradient(noise=None), delta)))
    assert calibration.summed_noise(asked)[0] > 0
    assert spending.epsilon(replace(asked, noise=calibration.summed_noise(asked)[0])) == pytest.approx(1.0)


def test_stages_take_their_rounds():
    found = plan(rounds=6, method=method(stage(gradient(), rounds=2), stage(gradient())))
    assert found.stage_rounds == (2, 4)
    assert [found.stage_of(t) for t in range(6)] == [0, 0, 1, 1, 1, 1]
    assert releases.participation_table(found, 0).shape == (2, 5)
    assert releases.participation_table(found, 1, done=3).sum() == 5
    assert calibration.stage_facts(found, 1).rounds == 4


# ------------------------------------------------------------------------------------------------ correlated noise


def streams(asked=None):
    """Two rounds of independent noise, then a tree; `asked` collects the rounds for which factors were asked."""

    def over(rounds):
        if asked is not None:
            asked.append(rounds)
        return correlated.tree(rounds)

    return method(stage(gradient(), rounds=2), stage(gradient(noise=Stream("tree", over))))


@pytest.mark.parametrize("rounds", [3, 6, 9])
def test_a_stream_is_factorised_for_the_rounds_of_its_stage(rounds):
    asked = []
    found = plan(rounds=rounds, method=streams(asked))
    noise = found.stages[1].queries[0].noise
    assert isinstance(noise, Correlated)
    np.testing.assert_array_equal(noise.decoder, correlated.tree(rounds - 2).decoder)
    assert spending.epsilon(found) == pytest.approx(1.0, rel=1e-9)
    assert asked == [rounds - 2], "once, and not for all rounds of the plan"
    assert isinstance(found.method.stages[1].queries[0].noise, Stream), "the method serves other plans too"
    first, second = calibration.query_noises(found)
    (group,) = spending.groups(found)
    assert [release.times for release in group.releases] == [2, 1]
    whole = second.sensitivity[0] * noise.sensitivity(np.arange(rounds - 2))
    assert group.releases[1].sensitivity == pytest.approx(whole)
    assert group.releases[0].sensitivity == first.sensitivity[0]


def test_a_stream_goes_on_after_its_first_round():
    """A run that is taken up there needs the draws that the stream began with."""
    found = plan(rounds=6, method=streams())
    assert [continues_stream(found, t) for t in range(6)] == [False, False, False, True, True, True]
    assert not any(continues_stream(plan(rounds=6), t) for t in range(6)), "fresh noise owes nothing to the past"
    noiseless = plan(rounds=6, method=streams(), epsilon=math.inf)
    assert not any(continues_stream(noiseless, t) for t in range(6)), "and no noise owes nothing at all"
    fixed = plan(rounds=6, method=streams(), epsilon=math.inf, noise=3.0)
    assert continues_stream(fixed, 4)
    backwards = method(streams().stages[1], stage(gradient(), rounds=2))
    assert [continues_stream(plan(rounds=6, method=backwards), t) for t in range(6)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_factors_for_fewer_rounds_are_refused():
    short = method(stage(gradient(noise=correlated.banded(5, 2))))
    with pytest.raises(SordinoError, match="rounds: the noise was factorised for 5 rounds, not 6"):
        plan(rounds=6, method=short)
    whole, part = (plan(rounds=rounds, method=short) for rounds in (5, 4))
    for found in (whole, part):
        assert spending.epsilon(found) == pytest.approx(1.0, rel=1e-9)
    assert calibration.client_std(part, 0, 0)[0] < calibration.client_std(whole, 0, 0)[0], (
        "a part of the rounds costs less"
    )
    with pytest.raises(SordinoError, match="a correlated query is called once per round"):
        plan(method=method(stage(gradient(noise=correlated.banded(6, 2), calls=2))))


@pytest.mark.parametrize("who", ["full", "fixed:2", "poisson:0.3", "cyclic:3"])
def test_rounds_of_clients_are_those_of_the_table(who, monkeypatch):
    """Clients that took part in the same rounds share one entry; a table of all rounds and clients is not needed."""
    found = plan((30,) * 7, 9, participation=who)
    for done in (None, 0, 4):
        table = releases.participation_table(found, 0, done)
        patterns, which = releases._attendances(found, 0, done)
        for i in range(7):
            np.testing.assert_array_equal(patterns[which[i]], np.flatnonzero(table[:, i]))
        assert len(patterns) == len({column.tobytes() for column in table.T})
    monkeypatch.setattr(releases, "participation_table", lambda *given: pytest.fail("a table"))
    stream = method(stage(gradient(noise=correlated.schedule(9))))
    assert calibration.query_noises(plan((30,) * 7, 9, method=stream, participation="cyclic:3"))


def test_who_comes_less_often_pays_less_of_a_stream():
    found = plan((30,) * 5, 12, method=method(stage(gradient(noise=correlated.tree(12)))), participation="fixed:3")
    noise, taken = found.stages[0].queries[0].noise, releases.participation_table(found, 0)
    level = calibration.query_noises(found)[0]
    for group in spending.groups(found):
        for i in group.clients:
            mine = noise.released_sensitivity(np.flatnonzero(taken[:, i]))
            assert group.mu == pytest.approx(mine * level.sensitivity[i] / level.std[i])
    assert len({group.mu for group in spending.groups(found)}) > 1
    assert spending.mu(found) == pytest.approx(gaussian.mu(1.0, 1e-5))
    for done in (1, 5, 12):
        assert spending.mu(found, done) == pytest.approx(spending.mu_after_each_round(found)[done - 1])


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounds": 0}, "rounds: 0 must lie between 1 and"),
        ({"sizes": ()}, "clients: every client needs at least one record"),
        ({"sizes": (3, 0)}, "clients: every client needs at least one record"),
        ({"divisor": "pool"}, "divisor: 'pool' is unknown. Did you mean 'pooled'?"),
        ({"trust": "nobody"}, "trust: 'nobody' is unknown"),
        ({"adjacency": "replace-on"}, "adjacency: 'replace-on' is unknown. Did you mean 'replace-one'?"),
        ({"method": method(stage(gradient())), "trust": SA}, "trust: toy is not proved private at record level under"),
        ({"method": method(stage(gradient())), "unit": "client"}, "unit: toy was built for record, not client"),
        ({"method": method(stage(gradient(), rounds=7))}, "rounds: toy needs 7 rounds"),
        ({"method": method(stage(gradient(), rounds=6), stage(gradient()))}, "rounds: toy needs more than 6 rounds"),
        ({"method": method(stage(gradient(), rounds=5))}, "rounds: toy needs 5 rounds"),
        ({"method": method(stage(gradient()), stage(gradient()))}, "rounds: toy needs"),
    ],
)
def test_plans_that_cannot_be(fields, message):
    with pytest.raises(SordinoError) as caught:
        plan(**fields)
    assert message in str(caught.value)


def test_an_unproved_plan_may_be_had_as_such():
    unproved = {"method": method(stage(gradient())), "trust": SA}
    assert not plan(**unproved, uncertified=True).proved
    assert spending.epsilon(plan(**unproved, epsilon=math.inf)) == math.inf, "no promise, nothing to prove"
    with pytest.raises(SordinoError) as caught:
        plan(**unproved)
    assert "Its state is hidden." in str(caught.value)
    assert "Proved: record level under untrusted-server" in str(caught.value)


def test_an_unproved_plan_with_a_fixed_noise_is_refused():
    with pytest.raises(SordinoError, match="not proved"):
        plan(method=method(stage(gradient())), trust=SA, epsilon=math.inf, noise=30.0)


@pytest.mark.parametrize("noise", [-1.0, math.nan])
def test_a_noise_that_cannot_be(noise):
    with pytest.raises(SordinoError, match="noise"):
        plan(noise=noise)


def test_a_noised_query_needs_a_clip():
    unbounded = Method("toy", Unit.RECORD, (stage(Query(Kind.GRADIENT)),), frozenset({(Unit.RECORD, PC)}))
    for noise in ({}, {"noise": 3.0}, {"epsilon": math.inf, "noise": 3.0}):
        with pytest.raises(SordinoError, match="epsilon: toy bounds nothing"):
            calibration.query_noises(plan(method=unbounded, **noise))


@pytest.mark.parametrize("engine", [reference, simulate])
def test_without_noise_nothing_need_be_clipped(engine):
    unbounded = plan((4, 4), 2, math.inf, method=method(stage(Query(Kind.GRADIENT))))
    assert calibration.client_std(unbounded, 0, 0).tolist() == [0, 0]
    assert calibration.aggregate_std(unbounded, 0) == 0
    assert spending.epsilon(unbounded) == math.inf
    model = Linear(2, 1, Loss.SQUARES, bias=False)
    x, y = torch.eye(2).double().repeat(4, 1), torch.full((8,), -1e6).double()
    first = next(engine.run(unbounded, model, Records(x, y, np.array([0, 4, 8])), Noiseless()))
    torch.testing.assert_close(first.aggregate, torch.full((2,), 5e5).double())


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numbers_of_numpy_are_accounted_for_in_full_precision(kind):
    """float16 would round a clip less its margin to the clip, and a delta less what is reserved to the delta."""
    promise, clip = Privacy(kind(1.3), kind(1e-5)), kind(0.7)
    query = Query(Kind.GRADIENT, clip)
    assert [type(each) for each in (promise.epsilon, promise.delta, query.clip)] == [float] * 3
    assert query.clip * (1 - SAFETY) < query.clip
    found = Plan(build("dp-fedgd", clip=clip), 5, (100, 100), promise, sampling="poisson:10")
    same = Plan(build("dp-fedgd", clip=float(clip)), 5, (100, 100), Privacy(float(kind(1.3)), float(kind(1e-5))))
    assert calibration.query_noises(found)[0].std.dtype == np.float64
    exact = replace(same, sampling=found.sampling)
    np.testing.assert_array_equal(calibration.query_noises(found)[0].std, calibration.query_noises(exact)[0].std)


def test_a_rule_may_keep_the_state_it_inherits():
    """Plans do not look at rules: two methods with the same queries have the same account."""
    idle = Rule(stateless, lambda g, state, theta, t: (torch.zeros_like(theta), state))
    lazy = method(stage(gradient())._replace(rule=idle))
    assert spending.groups(plan(method=lazy)) == spending.groups(plan())


@pytest.mark.parametrize(
    ("options", "promise", "why"),
    [
        ({"rounds": 2.5}, {}, r"rounds: 2\.5 must be a whole number"),
        ({"rounds": True}, {}, "rounds: True must be a whole number"),
        ({"rounds": math.nan}, {}, "rounds: nan must be a whole number"),
        ({"schedule_seed": 1.5}, {}, r"schedule_seed: 1\.5 must be a whole number"),
        ({"sizes": (3, 100.5)}, {}, r"sizes: client 1 has 100\.5 records; give a whole number below"),
        ({"sizes": (math.nan, 3)}, {}, "sizes: client 0 has nan records"),
        ({"sizes": (3, math.inf)}, {}, "sizes: client 1 has inf records"),
        ({"sizes": (3, 2**60)}, {}, "sizes: client 1 has 1152921504606846976 records"),
        (
            {},
            {"client_epsilon": {"0": 0.5}},
            "client_epsilon: '0' is not a client's number; write whole numbers from 0",
        ),
        ({}, {"client_epsilon": {0.5: 0.5}}, r"client_epsilon: 0\.5 is not a client's number"),
        ({}, {"client_epsilon": {True: 0.5}}, "client_epsilon: True is not a client's number"),
        ({}, {"client_epsilon": {0: "1"}}, "client_epsilon: client 0: '1' must be a number"),
        ({}, {"person_records": 2.5}, r"person_records: 2\.5 must be a whole number"),
        ({"sampling": "poisson:10"}, {"delta": 1e-300}, "delta: 1e-300 must be at least 1e-200 where .* batch = full"),
        ({"sampling": "fixed:10"}, {"delta": 5e-324}, "delta: 5e-324 must be at least 1e-200"),
    ],
)
def test_numbers_that_no_account_understands_are_refused_by_name(options, promise, why):
    fields = {"rounds": 5, "sizes": (100, 80)} | options
    with pytest.raises(SordinoError, match=why):
        certificate(Plan(build("dp-fedgd"), privacy=Privacy(**promise), **fields), Secure(), version="0")


def test_numbers_of_numpy_and_a_tiny_delta_without_samples_are_fine():
    sizes = tuple(np.array([100, 80]))
    plan = Plan(build("dp-fedgd"), np.int64(5), sizes, Privacy(delta=1e-300, client_epsilon={np.int64(1): 0.5}))
    assert certificate(plan, Secure(), version="0")["certified"]
    whole = Privacy(delta=1e-300, unit=Unit.CLIENT, trust=Trust.TRUSTED_SERVER)
    with pytest.raises(SordinoError, match="delta: 1e-300 must be at least 1e-200 where records or clients are drawn"):
        Plan(build("dp-fedgd", "client"), 5, (100, 80), whole, participation="fixed:1")


def test_what_the_caller_goes_on_to_change_does_not_change_a_plan():
    """Noise is calibrated once: with one record in place of 100, it hid a seventieth of what the account says."""
    sizes, requests, layers = [100, 100], {0: 0.5}, [1.0, 2.0]
    plan = Plan(build("dp-fedgd"), 3, sizes, Privacy(1.0, client_epsilon=requests))
    clipping = Clipping("per-layer", layers)
    sizes[0], requests[0], layers[0] = 1, 0.9, 100.0
    assert plan.sizes == (100, 100)
    assert plan.privacy.client_epsilon == {0: 0.5}
    assert clipping.layers == (1.0, 2.0)
    assert Plan(build("dp-fedgd"), 3, np.array([5, 6]), Privacy(1.0)).sizes == (5, 6)
