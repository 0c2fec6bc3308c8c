"""DP-FTRL: what its noise is made of, what it is worth, and what everybody pays, all from the engines' own noise.

A run over records without gradients is noise alone, and coordinates do not mix in it. `Units` puts each draw into a
coordinate of its own, so that one run tells the matrix by which draws become messages. The transcript is Gaussian, and
its mu is known exactly: mu^2 = shift^T (matrix matrix^T)^+ shift, for the shift that tells most.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.core import Correlated, Kind, Privacy, Stream, Trust, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.engines.schedule import round_plans
from sordino.errors import SordinoError
from sordino.evidence.charges import charges
from sordino.evidence.ledger import Ledger
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy import calibration, releases, spending
from sordino.privacy.accounting import correlated, gaussian
from sordino.privacy.accounting.inverse_root import InverseRoot
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Address, Secure, Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from tests.support import classified, covering, still, tiers

PC, SA, TRUSTED = Trust.UNTRUSTED_SERVER, Trust.SECURE_AGGREGATION, Trust.TRUSTED_SERVER
MODEL = Linear(3, 3)
MECHANISMS = {
    "independent": {"mechanism": "independent"},
    "schedule": {"mechanism": "schedule"},
    "banded": {"mechanism": "banded", "band": 3},
    "tree": {},
    "inverse": {"mechanism": "inverse-root", "inverse_band": 3},
    "restarted": {"restart": 3},
    "below": {"honaker": "below"},
    "plain": {"honaker": "none"},
}
EVERY_MECHANISM = pytest.mark.parametrize("options", MECHANISMS.values(), ids=MECHANISMS.keys())


def plan_for(
    sizes=(3, 4, 5), rounds=6, participation="full", trust=PC, unit=Unit.RECORD, name="dp-ftrl", uncertified=False, **o
):
    privacy = Privacy(o.pop("epsilon", 2.0), unit=unit, trust=trust)
    divisor = o.pop("divisor", "pooled")
    chosen = Participation.parse(participation)
    method = build(name, unit, **o)
    return Plan(method, rounds, tuple(sizes), privacy, chosen, divisor, schedule_seed=2, uncertified=uncertified)


def noise_of(plan):
    """The factors for the plan's rounds."""
    return next(query.noise for query in plan.stages[0].queries if query.noise is not None)


# ------------------------------------------------------------------------------------------ draws in their own places


class Units:
    """A source whose k-th address holds a one in the k-th place."""

    private = False

    def __init__(self):
        self.places = {}

    def fresh(self):
        return self

    def normal(self, at, shape):
        at.pack()
        draw = np.zeros(shape)
        draw[self.places.setdefault(at, len(self.places))] = 1.0
        return draw


def remembering(plan):
    """The same plan, whose clients' memory is what they said last."""
    (stage,) = plan.method.stages
    local = stage.local._replace(update_memory=lambda said, broadcast, memory: said, init=lambda theta, _: 0 * theta)
    return replace(plan, method=plan.method._replace(stages=(stage._replace(local=local),)))


FULL = Participation()


def transcript(plan, run=reference.run, places=200, **options):
    """What a run without gradients shows, as rows over draws: {(t, i): message of client i}, [aggregate of t]."""
    messages, aggregates, source = {}, [], Units()
    shown = plan if plan.only_sums_visible else remembering(plan)  # of sums no single message is made
    for this_round in run(shown, *still(plan, places), source, **options):
        aggregates.append(this_round.aggregate.numpy() if len(this_round.cohort) else np.zeros(places))
        memory = this_round.checkpoint[2]
        messages |= (
            {}
            if plan.only_sums_visible
            else {(this_round.t, int(i)): memory[int(i)].numpy() for i in this_round.cohort}
        )
    return messages, np.stack(aggregates)


def mu_of(rows, shifts):
    """The largest mu of any of the shifts (one a line) of a Gaussian vector, made of unit draws by `rows`."""
    values, vectors = np.linalg.eigh(rows @ rows.T)
    seen, told = values > 1e-11 * values.max(), shifts @ vectors
    if (np.abs(told[:, ~seen]) > 1e-9 * np.abs(shifts).max()).any():
        return math.inf
    return math.sqrt((told[:, seen] ** 2 / values[seen]).sum(1).max())


def true_mu(plan, client, found=None):
    """Of one unit of a client, which moves each of its rounds as far as it can, in all combinations of signs."""
    messages, aggregates = transcript(plan) if found is None else found
    (level,) = calibration.query_noises(plan)
    far = level.sensitivity[client] * (1.0 if level.query.kind is Kind.DELTA else 1 / plan.sizes[client])
    mine = [t for t, cohort in enumerate(plan.cohorts) if client in cohort]
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=len(mine))))
    if not plan.only_sums_visible:
        keys = list(messages)
        shifts = np.zeros((len(signs), len(keys)))
        shifts[:, [keys.index((t, client)) for t in mine]] = far * signs
        return mu_of(np.stack([messages[key] for key in keys]), shifts)
    shifts = np.zeros((len(signs), plan.rounds))
    shifts[:, mine] = plan.weights[client] / plan.participation.rate(plan.clients) * far * signs
    return mu_of(aggregates, shifts)


def claimed_mu(plan, client):
    return next(group.mu for group in spending.groups(plan) if client in group.clients)


# --------------------------------------------------------------------------------------------------- the mechanisms


@pytest.mark.parametrize("rounds", [1, 6, 11])
def test_every_mechanism_has_its_factors(rounds):
    trees = {name: correlated.tree(rounds, honaker=name == "below") for name in ("below", "plain")}
    restarted = correlated.tree(rounds, honaker=False, restart=3)
    factors = {
        "independent": correlated.independent(rounds),
        "schedule": correlated.schedule(rounds),
        "banded": correlated.banded(rounds, 3),
        "inverse": InverseRoot(3, rounds),
        "tree": correlated.least_squares(trees["plain"]),
        "restarted": correlated.least_squares(restarted),
        **trees,
    }
    assert factors.keys() == MECHANISMS.keys()
    for name, options in MECHANISMS.items():
        for unit, kind in ((Unit.RECORD, Kind.GRADIENT), (Unit.CLIENT, Kind.DELTA)):
            plan = plan_for(rounds=rounds, unit=unit, **options)
            (noised,) = [query for query in plan.method.stages[0].queries if query.noise is not None]
            assert (noised.kind, type(noised.noise)) == (kind, Stream)
            found, same = noise_of(plan).decoder, factors[name].decoder
            np.testing.assert_allclose(found @ found.T, same @ same.T, atol=1e-12)
            if name not in trees:  # these have draws of all nodes, and `NodeTree` has one per round
                np.testing.assert_allclose(noise_of(plan).encoder, factors[name].encoder, atol=1e-12)
                np.testing.assert_allclose(found, same, atol=1e-12)


@EVERY_MECHANISM
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_a_client_s_noise_is_the_decoder_times_its_own_draws(options, unit):
    plan = plan_for(unit=unit, **options)
    messages, aggregates = transcript(plan)
    decoder, std = noise_of(plan).decoder, calibration.client_std(plan, 0, 0 if unit is Unit.RECORD else 1)
    divisor = np.array(plan.sizes) if unit is Unit.RECORD else np.ones(3)
    for i in range(3):
        rows = np.stack([messages[t, i] for t in range(6)])
        np.testing.assert_allclose(rows @ rows.T, (std[i] / divisor[i]) ** 2 * decoder @ decoder.T, rtol=1e-9)
        for j in range(i):
            assert not (rows @ np.stack([messages[t, j] for t in range(6)]).T).any(), "streams of their own"
    total = sum(plan.weights[i] * np.stack([messages[t, i] for t in range(6)]) for i in range(3))
    np.testing.assert_allclose(aggregates, total, atol=1e-12)


class Relabelled:
    """A stream's j-th draw is the draw of the j-th round."""

    private = False

    def __init__(self, seed):
        self.inner = Seeded(seed)

    def fresh(self):
        return self

    def normal(self, at, shape):
        return self.inner.normal(Address(at.client, at.round + at.index, at.query), shape)


@pytest.fixture(scope="module")
def records():
    return classified((3, 5, 8, 9))


def path(plan, records, source, run=reference.run, **options):
    return torch.stack([this_round.model for this_round in run(plan, MODEL, records, source, **options)])


@pytest.mark.parametrize("participation", ["full", "fixed:2", "cyclic:2"])
@pytest.mark.parametrize("trust", [PC, SA])
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_independent_noise_is_gradient_descent_draw_for_draw(unit, trust, participation, records):
    """C = I: the same noise and the same price. Under sums, where clients outside the cohort send noise as well, the
    sum's noise has another address but the same size."""
    chosen = {"participation": participation, "trust": trust, "unit": unit, "lr": 0.7}
    gd = plan_for(records.sizes, name="dp-fedgd", **chosen)
    stream = plan_for(records.sizes, mechanism="independent", **chosen)
    for i in range(4):
        assert claimed_mu(stream, i) == pytest.approx(claimed_mu(gd, i), rel=1e-12)
    np.testing.assert_allclose(calibration.query_noises(stream)[0].std, calibration.query_noises(gd)[0].std, rtol=1e-12)
    if trust is PC or participation == "full":
        same = [path(plan, records, Relabelled(3)) for plan in (stream, gd)]
        torch.testing.assert_close(*same, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(path(stream, records, Seeded(3)), same[1]), "other addresses, other draws"
    else:
        shown = [transcript(plan)[1] for plan in (stream, gd)]
        np.testing.assert_allclose(*(rows @ rows.T for rows in shown), rtol=1e-9, atol=1e-20)
    other = plan_for(records.sizes, mechanism="schedule", **chosen)
    assert not torch.allclose(path(other, records, Relabelled(3)), path(gd, records, Relabelled(3)))


# -------------------------------------------------------------------------------------------------------- the server


@EVERY_MECHANISM
def test_the_model_is_the_start_less_a_running_sum(options, records):
    plan = plan_for(records.sizes, lr=0.3, **options)
    start = torch.linspace(-1, 1, 12, dtype=torch.float64)
    total = torch.zeros(12, dtype=torch.float64)
    for this_round in simulate.run(plan, MODEL, records, Seeded(1), theta=start):
        total = total + this_round.aggregate
        torch.testing.assert_close(this_round.model, start - 0.3 * total, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(this_round.model, start - 0.3 * this_round.aggregate) or this_round.t == 0


def test_running_sums_carry_the_noise_that_was_factorised():
    """One client: theta's noise is lr times the running sum of the decoder's rows; and so a tree cancels."""
    plan = plan_for((4,), 8, lr=0.5, honaker="none")
    rows = [this_round.model.numpy() for this_round in reference.run(plan, *still(plan, 30), Units())]
    prefix = np.cumsum(noise_of(plan).decoder, 0) * 0.5 * calibration.client_std(plan, 0, 0)[0] / 4
    np.testing.assert_allclose(np.stack(rows) @ np.stack(rows).T, prefix @ prefix.T, rtol=1e-9)
    nodes = [np.count_nonzero(np.round(row, 12)) for row in rows]
    assert nodes == [1, 1, 2, 1, 2, 2, 3, 1], "binary digits, as Kairouz et al. have it"


SERVED = {"momentum": 0.6, "weight_decay": 0.2}


@pytest.mark.parametrize("run", [reference.run, simulate.run])
@pytest.mark.parametrize("tail", [0.0, 0.5])
def test_weight_decay_against_a_plain_loop(run, tail, records):
    """The model loses its part whatever the step size is, and a tail averages the iterates."""
    plan = plan_for(records.sizes, lr=0.3, mechanism="banded", band=3, tail=tail, **SERVED)
    theta, iterates = torch.linspace(-1, 1, 12, dtype=torch.float64), []
    velocity, kept = torch.zeros_like(theta), True
    for this_round in run(plan, MODEL, records, Seeded(5), theta=theta):
        velocity = 0.6 * velocity + this_round.aggregate
        theta = theta - 0.2 * theta - 0.3 * velocity
        iterates.append(theta)
        expected = torch.stack(iterates[3:]).mean(0) if tail and this_round.t >= 3 else theta
        torch.testing.assert_close(this_round.model, expected, rtol=1e-12, atol=1e-12)
        kept &= torch.allclose(this_round.model, expected + 0.2 * 0.3 * velocity)
    assert not kept, "decay of the step alone would show"


def test_banded_noise_is_fitted_to_the_server():
    """The model's noise is that of the factors for this momentum and decay; mutant: those for sums alone."""
    plan = plan_for((4,), 12, lr=0.5, mechanism="banded", band=4, **SERVED)
    fitted, other = correlated.banded(12, 4, 0.6, 0.2), correlated.banded(12, 4)
    np.testing.assert_array_equal(noise_of(plan).decoder, fitted.decoder)
    assert not np.allclose(noise_of(plan).decoder, other.decoder, atol=1e-2)
    rows = np.stack([this_round.model.numpy() for this_round in reference.run(plan, *still(plan, 30), Units())])
    velocity, theta, noise = np.zeros(12), np.zeros(12), []
    for row in fitted.decoder * calibration.client_std(plan, 0, 0)[0] / 4:
        velocity = 0.6 * velocity + row
        theta = 0.8 * theta - 0.5 * velocity
        noise.append(theta)
    np.testing.assert_allclose(rows @ rows.T, np.stack(noise) @ np.stack(noise).T, rtol=1e-9)


@pytest.mark.parametrize(("option", "value"), [("weight_decay", 1.0), ("weight_decay", -0.1), ("momentum", 1.0)])
def test_a_server_that_forgets_all_is_refused(option, value):
    with pytest.raises(SordinoError, match=option):
        build("dp-ftrl", mechanism="banded", **{option: value})


@pytest.mark.parametrize("restart", [0, 2, 4])
def test_momentum_against_a_plain_loop(restart, records):
    """theta = theta_0 - lr m, m <- beta m + S (Kairouz et al.), which is heavy ball on the increments of S; a restart
    forgets the increments, and keeps the model."""
    plan = plan_for(records.sizes, lr=0.3, momentum=0.6, restart=restart)
    velocity, theta, published = 0.0, torch.zeros(12, dtype=torch.float64), []
    m, total = torch.zeros_like(theta), torch.zeros_like(theta)
    for this_round in reference.run(plan, MODEL, records, Seeded(5)):
        velocity = (0.0 if restart and this_round.t % restart == 0 else 0.6) * velocity + this_round.aggregate
        theta = theta - 0.3 * velocity
        torch.testing.assert_close(this_round.model, theta, rtol=1e-12, atol=1e-12)
        total = total + this_round.aggregate
        m = 0.6 * m + total
        published.append(torch.allclose(this_round.model, -0.3 * m, rtol=1e-9))
    assert all(published) == (restart == 0)
    assert all(published[: restart or 6])
    assert spending.groups(plan) == spending.groups(plan_for(records.sizes, restart=restart)), (
        "momentum is post-processing"
    )


def test_a_new_tree_owes_nothing_to_the_one_before():
    for restart, alone in ((3, True), (0, False)):
        plan = plan_for((4,), restart=restart)
        messages, _ = transcript(plan)
        early, late = (np.stack([messages[t, 0] for t in span]) for span in (range(3), range(3, 6)))
        assert (not np.abs(early @ late.T).max() > 1e-12) == alone


# --------------------------------------------------------------------------------------------------------- the price


@EVERY_MECHANISM
@pytest.mark.parametrize("participation", ["full", "fixed:2", "cyclic:3"])
@pytest.mark.parametrize("trust", [PC, SA])
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_nobody_pays_less_than_the_transcript_tells(unit, trust, participation, options):
    """Exactly as much where all that the encoder makes is shown: by sums in every round, or by a client that comes to
    every round, if the encoder can be read off what is shown. Else less is told than is paid for."""
    plan = plan_for(rounds=7, participation=participation, trust=trust, unit=unit, divisor="client-mean", **options)
    found = transcript(plan)
    square = noise_of(plan).encoder.shape == (7, 7)
    ratios = []
    for i in range(3):
        ratios.append(true_mu(plan, i, found) / claimed_mu(plan, i))
        assert ratios[-1] <= 1 + 1e-9
        if square and (participation == "full" or trust is SA):
            assert ratios[-1] == pytest.approx(1, rel=1e-9)
    assert spending.epsilon(plan) <= 2.0 * (1 + 1e-9)
    assert max(ratios) > 0.3, "no price is far from what is told"
    if options.get("mechanism") in ("independent", "schedule"):
        np.testing.assert_allclose(ratios, 1, rtol=1e-9)


@pytest.mark.parametrize("trust", [PC, SA])
def test_a_price_for_one_round_would_be_found_too_low(trust):
    """Mutants: the stream paid for as if a unit came once, and as if its rounds did not add up."""
    plan = plan_for(rounds=7, trust=trust)
    noise, (level,) = noise_of(plan), calibration.query_noises(plan)
    told = true_mu(plan, 2)
    once = level.sensitivity[2] / level.std[2] * max(noise.sensitivity(np.array([t])) for t in range(7))
    apart = level.sensitivity[2] / level.std[2] * math.sqrt((noise.encoder**2).sum())
    assert told == pytest.approx(spending.mu(plan), rel=1e-9)
    assert told > 2 * once
    assert told > 1.4 * apart


def test_seventy_rounds_of_a_tree():
    """90.34 clips for a unit that always comes, 2.646 for one that comes once to a stream that all add to."""
    full, once = plan_for((5,), 70, "full", SA, epsilon=1.0), plan_for((5,) * 70, 70, "cyclic:70", SA, epsilon=1.0)
    assert noise_of(full).sensitivity(np.arange(70)) == pytest.approx(90.34, abs=5e-3)
    assert max(noise_of(once).sensitivity(np.array([t])) for t in range(70)) == pytest.approx(math.sqrt(7))
    assert calibration.query_noises(full)[0].std[0] / calibration.query_noises(once)[0].std[0] == pytest.approx(
        90.34 / math.sqrt(7), rel=1e-4
    )
    for plan in (full, once):
        assert spending.mu(plan) == pytest.approx(gaussian.mu(1.0, 1e-5), rel=1e-9)


def test_a_client_with_a_stream_of_its_own_pays_for_the_rows_that_it_releases():
    """A client that comes once releases one row, as if its noise were independent."""
    once = plan_for((5,) * 7, 7, "cyclic:7", PC, epsilon=1.0)
    gd = plan_for((5,) * 7, 7, "cyclic:7", PC, name="dp-fedgd", epsilon=1.0)
    row = np.linalg.norm(noise_of(once).decoder, axis=1)
    released = calibration.query_noises(once)[0].std[0] * row.min()
    assert released == pytest.approx(calibration.query_noises(gd)[0].std[0], rel=1e-9)
    assert spending.mu(once) == pytest.approx(gaussian.mu(1.0, 1e-5), rel=1e-9)


def test_units_that_come_band_rounds_apart_pay_for_their_rounds_alone():
    plan = plan_for((4,) * 6, 12, "cyclic:3", SA, mechanism="banded", band=3, **SERVED)
    gd = plan_for((4,) * 6, 12, "cyclic:3", SA, name="dp-fedgd")
    np.testing.assert_allclose(calibration.query_noises(plan)[0].std, calibration.query_noises(gd)[0].std, rtol=1e-9)
    often = plan_for((4,) * 6, 12, "cyclic:2", SA, mechanism="banded", band=3)
    gd = plan_for((4,) * 6, 12, "cyclic:2", SA, name="dp-fedgd")
    assert (calibration.query_noises(often)[0].std > 1.2 * calibration.query_noises(gd)[0].std).all()


def test_the_ledger_s_rows_add_up_to_the_stream():
    for trust, participation in itertools.product((PC, SA), ("full", "fixed:2", "cyclic:2")):
        plan = plan_for(rounds=7, participation=participation, trust=trust)
        for i in range(3):
            rows = [e for t in range(7) if i in plan.cohorts[t] for e in charges(plan, i, t, "run")]
            total = gaussian.mu_of((e.sensitivity, e.std, e.times) for e in rows)
            assert total == pytest.approx(claimed_mu(plan, i))
        np.testing.assert_allclose(
            spending.mu_after_each_round(plan), [spending.mu(plan, done) for done in range(1, 8)], rtol=1e-9
        )


@pytest.mark.parametrize(
    ("trust", "participation"), [(PC, "cyclic:2"), (PC, "fixed:2"), (SA, "cyclic:2"), (SA, "full")]
)
def test_the_ledger_s_rows_of_an_inverse_root_add_up_to_the_stream(trust, participation):
    """The rows of a client pay for what is seen before its next round, so a run that stops has paid for all of it."""
    plan = plan_for(
        rounds=9,
        participation=participation,
        trust=trust,
        divisor="client-mean",
        mechanism="inverse-root",
        inverse_band=4,
    )
    for i in range(3):
        rows = [e for t in range(9) if i in plan.cohorts[t] for e in charges(plan, i, t, "run")]
        assert gaussian.mu_of((e.sensitivity, e.std, e.times) for e in rows) == pytest.approx(claimed_mu(plan, i))
    after = spending.mu_after_each_round(plan)
    np.testing.assert_allclose(after, [spending.mu(plan, done) for done in range(1, 10)], rtol=1e-9)
    (level,) = calibration.query_noises(plan)
    noise, unit = noise_of(plan), level.sensitivity[0] / level.std[0]
    for done in range(1, 10):  # what rows of the stream before `done` show of the client that they show most of
        seen = []
        for i in range(3):
            mine = np.array([t for t in range(done) if i in plan.cohorts[t]], dtype=int)
            if trust is SA:
                encoder = noise.encoder[:done, mine].sum(1)
                seen.append(level.weight[i] / level.weight.max() * unit * np.linalg.norm(encoder))
            elif len(mine):
                rows = noise.decoder[mine]
                ones = np.ones(len(mine))
                own = ones @ np.linalg.solve(rows @ rows.T, ones)
                seen.append(level.sensitivity[i] / level.std[i] * math.sqrt(own))
        assert max(seen) <= after[done - 1] * (1 + 1e-9)
        assert max(seen) > 0.6 * after[done - 1]


def test_streams_of_more_rounds_than_dense_factors_have_are_inverse_roots():
    long = plan_for((5,) * 10, 5000, "cyclic:10", SA)
    assert noise_of(long) == InverseRoot(128, 5000)
    assert spending.mu(long) == pytest.approx(gaussian.mu(2.0, 1e-5), rel=1e-6)
    assert isinstance(noise_of(plan_for(rounds=4096, mechanism="inverse-root")), InverseRoot)
    for options, word in (({"mechanism": "tree"}, "inverse-root"), ({"mechanism": "banded"}, "inverse-root")):
        with pytest.raises(SordinoError, match=word):
            plan_for(rounds=5000, **options)
    with pytest.raises(SordinoError, match="inverse_band"):
        build("dp-ftrl", inverse_band=0)


def test_both_engines_draw_the_same_inverse_root_and_a_resumed_run_continues_it(records):
    plan = plan_for(records.sizes, 12, "cyclic:2", SA, mechanism="inverse-root", inverse_band=5)
    rounds = [list(run(plan, MODEL, records, Seeded(4))) for run in (reference.run, simulate.run)]
    for one, other in zip(*rounds, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=1e-6, atol=1e-6)
    checkpoint = rounds[1][6].checkpoint
    again = list(simulate.run(plan, MODEL, records, Seeded(4), start=7, checkpoint=checkpoint))
    assert [r.t for r in again] == list(range(7, 12))
    for one, other in zip(again, rounds[1][7:], strict=True):
        assert torch.equal(one.model, other.model)
    with pytest.raises(SordinoError, match="resume"):
        list(simulate.run(plan, MODEL, records, Secure(), start=7, checkpoint=checkpoint))


def test_integers_of_an_inverse_root_are_those_of_its_dense_factors(records):
    options = {"mechanism": "inverse-root", "inverse_band": 3}
    short = replace(plan_for(records.sizes, 6, trust=SA, **options), integers=Integers(MODEL.size))
    noise = noise_of(short)
    (stage,) = short.method.stages
    dense = replace(stage.queries[0], noise=Correlated(noise.encoder, noise.decoder))
    other = replace(short, method=short.method._replace(stages=(stage._replace(queries=(dense,)),)))
    assert spending.epsilon(short) == pytest.approx(spending.epsilon(other), rel=1e-9)
    torch.testing.assert_close(path(short, records, Seeded(2)), path(other, records, Seeded(2)), rtol=1e-9, atol=1e-9)
    with pytest.raises(SordinoError, match="a site keeps its answers"):
        replace(plan_for(records.sizes, 5000, trust=SA, **options), integers=Integers(MODEL.size))


def test_coins_are_refused_unless_nothing_is_claimed():
    """A client that a coin calls may come twice within a band: its price is right for the schedule that was drawn, but
    nothing is few by design."""
    with pytest.raises(SordinoError, match=r"participation: the correlated noise of dp-ftrl is certified for full,"):
        plan_for(participation="poisson:0.5")
    plan = plan_for(participation="poisson:0.5", uncertified=True)
    assert spending.epsilon(plan) == pytest.approx(2.0, rel=1e-9)
    for i in range(3):
        assert true_mu(plan, i) <= claimed_mu(plan, i) * (1 + 1e-9)
    assert plan_for(participation="poisson:0.5", name="dp-fedgd").proved


@pytest.mark.parametrize("trust", list(Trust))
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_every_trust_model_is_proved(unit, trust):
    assert plan_for(unit=unit, trust=trust).proved


# ------------------------------------------------------------------------------------------------ what it is worth


def error(plan, coordinates=2500):
    """(mean, standard error) over coordinates of the model's noise: theta^2 of a run without gradients, its mean over
    rounds. Coordinates are independent copies of one another."""
    rounds = simulate.run(plan, *still(plan, coordinates), Seeded(7))
    squares = torch.stack([this_round.model.square() for this_round in rounds]).mean(0).numpy()
    return squares.mean(), squares.std(ddof=1) / math.sqrt(coordinates)


def predicted(plan):
    """The same by the formula: one stream for all where only sums are seen, else each client's own."""
    noise, (level,) = noise_of(plan), calibration.query_noises(plan)
    rate, taken = plan.participation.rate(plan.clients), releases.participation_table(plan, 0)
    covariance = noise.decoder @ noise.decoder.T
    if plan.only_sums_visible:
        parts = [((level.weight * level.std).max() / rate, np.ones(plan.rounds))]
    else:
        parts = [(level.weight[i] * level.std[i] / rate, taken[:, i]) for i in range(plan.clients)]
    total = sum(scale**2 * np.outer(here, here) * covariance for scale, here in parts)
    return np.cumsum(np.cumsum(total, 0), 1).diagonal().mean()


def measured_ratio(plan, base):
    """Of the two errors and its standard error; both are what the formula says."""
    (a, a_se), (b, b_se) = error(plan), error(base)
    for other, got, se in ((plan, a, a_se), (base, b, b_se)):
        assert abs(got - predicted(other)) < 4.5 * se
        assert not abs(1.2 * got - predicted(other)) < 4.5 * se
    return a / b, a / b * math.hypot(a_se / a, b_se / b)


def in_turn(trust, rounds=30, cohorts=6, mechanism="banded"):
    sizes = (5,) * 2 * cohorts
    return plan_for(sizes, rounds, f"cyclic:{cohorts}", trust, mechanism=mechanism, band=cohorts, lr=1.0)


@pytest.mark.parametrize(
    ("trust", "worth", "longer"), [(SA, 0.3134, 0.1959), (TRUSTED, 0.3134, 0.1959), (PC, 2.744, 2.952)], ids=str
)
def test_banded_noise_cancels_where_it_is_common(trust, worth, longer):
    """Cohorts in turn, at equal epsilon: 0.31 of the error of independent noise where only sums are seen, and 2.7 times
    as much where every client holds its own stream, of whose rows a band apart it sends one after the other."""
    banded, base = (in_turn(trust, mechanism=mechanism) for mechanism in ("banded", "independent"))
    ratio, se = measured_ratio(banded, base)
    assert predicted(banded) / predicted(base) == pytest.approx(worth, rel=2e-3)
    assert abs(ratio - worth) < 4.5 * se
    assert (worth < 0.35) == banded.only_sums_visible
    assert spending.epsilon(banded) == pytest.approx(spending.epsilon(base), rel=1e-9)
    seventy = [predicted(in_turn(trust, 70, 10, mechanism)) for mechanism in ("banded", "independent")]
    assert seventy[0] / seventy[1] == pytest.approx(longer, rel=2e-3)


@pytest.mark.parametrize(
    ("options", "worth"),
    [({"mechanism": "schedule"}, 0.894), ({}, 3.098), ({"honaker": "below"}, 6.18), ({"honaker": "none"}, 7.341)],
)
def test_full_participation(options, worth):
    """Seventy rounds: no tree is worth its price, and the best there is gains a tenth."""
    plan, base = (plan_for((5, 5), 70, lr=1.0, **chosen) for chosen in (options, {"mechanism": "independent"}))
    assert predicted(plan) / predicted(base) == pytest.approx(worth, rel=2e-3)
    ratio, se = measured_ratio(plan, base)
    assert abs(ratio - worth) < 4.5 * se


# --------------------------------------------------------------------------------------------------------- engines


PARTICIPATIONS = ["full", "fixed:2", "cyclic:2", "cyclic:4"]


PLANS = ([Unit.RECORD, Unit.CLIENT], list(Trust), PARTICIPATIONS)
EVERY_PLAN = pytest.mark.parametrize(
    ("unit", "trust", "participation"), tiers(itertools.product(*PLANS), covering(*PLANS))
)


@EVERY_PLAN
def test_engines_agree_draw_for_draw(unit, trust, participation, records):
    fitted = {"mechanism": "banded", "band": 2, "tail": 0.5, "momentum": 0.5, "weight_decay": 0.1}
    for options in ({"momentum": 0.5, "restart": 2}, fitted):
        plan = plan_for(records.sizes, participation=participation, trust=trust, unit=unit, **options)
        slow = path(plan, records, Seeded(1))
        fast = path(plan, records, Seeded(1), simulate.run, shares=True)
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(path(plan, records, Seeded(2), simulate.run, shares=True), slow)


@EVERY_PLAN
def test_noise_drawn_once_has_the_law_of_the_shares(unit, trust, participation):
    """Covariances over rounds, exactly."""
    for options in ({}, {"mechanism": "banded", "band": 3}):
        plan = plan_for((3, 4, 5, 6), 7, participation, trust, unit, **options)
        shown = [
            transcript_of_sums(plan, reference.run),
            transcript_of_sums(plan, simulate.run, shares=True),
            transcript_of_sums(plan, simulate.run, shares=False),
        ]
        for other in shown[1:]:
            np.testing.assert_allclose(other, shown[0], rtol=1e-9, atol=1e-12 * shown[0].max())
        if participation != "full" and trust is PC:
            together = noise_of(plan).decoder @ noise_of(plan).decoder.T
            correlation = [m / np.sqrt(np.outer(m.diagonal(), m.diagonal())) for m in (shown[0], together)]
            assert np.abs(correlation[0] - correlation[1]).max() > 0.05, "they do not add up to one stream"


def transcript_of_sums(plan, run, **options):
    """The aggregates' covariance over rounds."""
    rows = [
        this_round.aggregate.numpy() if len(this_round.cohort) else np.zeros(200)
        for this_round in run(plan, *still(plan, 200), Units(), **options)
    ]
    return np.stack(rows) @ np.stack(rows).T


@pytest.mark.parametrize("trust", [PC, SA])
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_law_and_shares_where_coins_call_now_some_now_all(unit, trust):
    plan = plan_for(rounds=8, participation="poisson:0.7", trust=trust, unit=unit, uncertified=True)
    assert {len(cohort) for cohort in plan.cohorts} >= {2, 3}
    slow, fast = (transcript_of_sums(plan, simulate.run, shares=shares) for shares in (True, False))
    np.testing.assert_allclose(fast, slow, rtol=1e-9, atol=1e-12 * slow.max())


def test_a_common_stream_has_the_same_noise_whoever_came_and_reads_the_cohort_alone(records):
    plan = plan_for(records.sizes, 4, "cyclic:2", SA)
    assert all(this_round.noise_on_sum for this_round in round_plans(plan, MODEL))
    assert not any(
        this_round.noise_on_sum for this_round in round_plans(plan_for(records.sizes, 4, "cyclic:2", PC), MODEL)
    )
    alone, all_ = (transcript_of_sums(each, reference.run) for each in (plan, replace(plan, participation=FULL)))
    ratio = np.diag(alone) / np.diag(all_)  # half of the clients: their mean counts twice
    np.testing.assert_allclose(ratio, ratio[0])
    quiet = replace(plan, privacy=Privacy(math.inf, trust=SA))
    cohort_only = path(quiet, records, Seeded(0))
    unread = records.x.clone()
    for i in (1, 3):  # who comes in the odd rounds
        unread[records.starts[i] : records.starts[i + 1]] = torch.nan
    absent = Records(unread, records.y, records.starts)
    torch.testing.assert_close(path(quiet, absent, Seeded(0))[0], cohort_only[0], rtol=0, atol=0)
    assert not torch.equal(path(quiet, absent, Seeded(0))[1], cohort_only[1])


# ---------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(("participation", "trust"), [("full", PC), ("fixed:2", PC), ("cyclic:2", SA)])
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.CLIENT])
def test_a_seeded_run_goes_on_bit_for_bit(unit, participation, trust, records):
    plan = plan_for(records.sizes, participation=participation, trust=trust, unit=unit, momentum=0.5, tail=0.5)
    whole = list(simulate.run(plan, MODEL, records, Seeded(4)))
    for t in range(5):
        rest = simulate.run(plan, MODEL, records, Seeded(4), start=t + 1, checkpoint=whole[t].checkpoint)
        assert all(torch.equal(a.model, b.model) for a, b in zip(rest, whole[t + 1 :], strict=True))
    other = list(simulate.run(plan, MODEL, records, Seeded(5), start=3, checkpoint=whole[2].checkpoint))
    assert not torch.equal(other[-1].model, whole[-1].model)


def test_a_secret_run_does_not_go_on(records):
    plan = plan_for(records.sizes)
    whole = list(simulate.run(plan, MODEL, records, Secure()))
    for t in range(5):
        with pytest.raises(SordinoError, match=f"key that is not stored, so round {t + 1}"):
            list(simulate.run(plan, MODEL, records, Secure(), start=t + 1, checkpoint=whole[t].checkpoint))
    assert len(list(simulate.run(plan, MODEL, records, Secure()))) == 6, "a new one may begin"
    fresh = plan_for(records.sizes, name="dp-fedgd")
    *_, last = simulate.run(fresh, MODEL, records, Secure(), start=3, checkpoint=(whole[2].model, ((),), ()))
    assert last.t == 5, "noise that is fresh in every round has no key to lose"


@pytest.mark.parametrize("participation", ["full", "fixed:2"])
def test_a_secret_run_with_a_ledger_does_not_go_on(participation, records, tmp_path):
    plan = plan_for(records.sizes, participation=participation)

    def run(source, name, rounds):
        with Ledger(tmp_path / name) as ledger:
            round_plans = reference.run(plan, MODEL, records, source, ledger=ledger, run_id="r")
            return [this_round.model for this_round in itertools.islice(round_plans, rounds)], len(ledger)

    said, rows = run(Secure(), "secret.db", 3)
    with pytest.raises(SordinoError, match="key that is not stored, so round 3"):
        run(Secure(), "secret.db", 6)
    again, still_rows = run(Secure(), "secret.db", 3)
    assert still_rows == rows, "nothing was made anew"
    assert all(torch.equal(a, b) for a, b in zip(said, again, strict=True))
    run(Seeded(4), "seeded.db", 3)
    resumed, _ = run(Seeded(4), "seeded.db", 6)
    whole, _ = run(Seeded(4), "whole.db", 6)
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))


@pytest.mark.parametrize(("participation", "rounds"), [("full", 4), ("cyclic:2", 4), ("cyclic:2", 1)])
def test_a_sum_on_record_is_not_noised_anew(participation, rounds, records, tmp_path):
    """Under secure aggregation the sum is what is seen, and another noise for the same data would tell more of them. It
    is on record, and said again as it was."""
    plan = plan_for(records.sizes, rounds, participation, SA)

    def sums(source, name):
        with Ledger(tmp_path / name) as ledger:
            return [
                this_round.aggregate
                for this_round in reference.run(plan, MODEL, records, source, ledger=ledger, run_id="r")
            ]

    first = sums(Secure(), "secret.db")
    assert all(torch.equal(a, b) for a, b in zip(first, sums(Secure(), "secret.db"), strict=True))
    seeded = [sums(Seeded(1), "seeded.db") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*seeded, strict=True))


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": "trees"}, r"mechanism: 'trees' is unknown\. Did you mean 'tree'\?"),
        ({"honaker": "belw"}, r"honaker: 'belw' is unknown\. Did you mean 'below'\?"),
        ({"restart": -1}, "restart, band: -1 and 10"),
        ({"band": 0}, "restart, band: 0 and 0"),
        ({"momentum": 1.0}, "momentum: 1.0 must lie in"),
        ({"clip": 0.0}, "clip: 0.0"),
        ({"lr": 0.0}, "lr: 0.0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(SordinoError, match=message):
        build("dp-ftrl", **options)


def test_too_many_rounds_for_a_dense_matrix():
    with pytest.raises(SordinoError, match="rounds: 5000 must lie between 1 and 4096"):
        plan_for(mechanism="tree", rounds=5000)
