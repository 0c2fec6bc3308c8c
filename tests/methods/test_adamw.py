"""DP-LocalAdamW and DP-FedAdamW: against the library's AdamW, the formulas, and the law of the noise."""

import math

import numpy as np
import pytest
import torch

from sordino.core import Kind, Privacy, Unit
from sordino.data.records import Records
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy import calibration, spending
from sordino.privacy.mechanisms.random import Seeded
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.tree import leaves
from tests.support import classified

MODEL = Linear(3, 3)
ALIKE, UNLIKE = (20, 20, 20, 20), (5, 15, 20, 40)
NAMES = ("dp-localadamw", "dp-fedadamw")


def federation(sizes=ALIKE, features=3, seed=0):
    return classified(sizes, features, seed=seed)


def plan_for(method, records, rounds=5, participation="full", epsilon=8.0, trust="untrusted-server"):
    privacy = Privacy(epsilon, trust=trust)
    return Plan(method, rounds, records.sizes, privacy, Participation.parse(participation))


class Ear:
    """Hears every answer; or, given a tape, answers from it and leaves the data alone."""

    def __init__(self, ask, log, tape):
        self._ask, self._log, self._tape = ask, log, tape

    def __getattr__(self, name):
        return getattr(self._ask, name)

    def gradient(self, *args, **kwargs):
        self._log.append(self._ask.gradient(*args, **kwargs) if self._tape is None else next(self._tape))
        return self._log[-1]


def overheard(method, log, tape=None):
    """The method, with its noised gradients put on record (or taken from a tape)."""
    (stage,) = method.stages
    compute = stage.local.compute
    local = stage.local._replace(compute=lambda ask, *rest: compute(Ear(ask, log, tape), *rest))
    return method._replace(stages=(stage._replace(local=local),))


def gradient(model, records, theta):
    """Of the mean loss of all records, by automatic differentiation."""
    return torch.func.grad(lambda at: torch.func.vmap(model.loss, (None, 0, 0))(at, records.x, records.y).mean())(theta)


# ------------------------------------------------------------------------------------------- against the library's own


def by_the_library(records, *, rounds, steps, lr, decay, tau, rate):
    theta = torch.zeros(MODEL.size, dtype=torch.float64)
    for t in range(rounds):
        y = theta.clone().requires_grad_()
        optimizer = torch.optim.AdamW([y], lr=lr * rate(t), betas=(0.9, 0.999), eps=tau, weight_decay=decay)
        for _ in range(steps):
            y.grad = gradient(MODEL, records, y.detach())
            optimizer.step()
        theta = y.detach()
    return theta


def by_hand(records, *, rounds, steps, lr, decay, tau, rate, sign=1.0):
    theta = torch.zeros(MODEL.size, dtype=torch.float64)
    for t in range(rounds):
        y, m, v = theta, 0.0, 0.0
        for k in range(1, steps + 1):
            g = gradient(MODEL, records, y)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            step = m / (1 - 0.9**k) / ((v / (1 - 0.999**k)).sqrt() + tau)
            y = y - lr * rate(t) * (step + sign * decay * y)
        theta = y
    return theta


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_one_client_without_noise_is_the_library_s_adamw(schedule):
    """And would not be, were the decay of the wrong sign, as it is printed."""
    records, numbers = federation((30,)), {"steps": 6, "lr": 0.05, "decay": 0.1, "tau": 1e-6}
    plan = plan_for(build("dp-localadamw", clip=1e9, schedule=schedule, **numbers), records, 3, epsilon=math.inf)
    *_, last = simulate.run(plan, MODEL, records, Seeded(0))

    def rate(t):
        return (1 + math.cos(math.pi * t / 3)) / 2 if schedule == "cosine" else 1.0

    library = by_the_library(records, rounds=3, rate=rate, **numbers)
    torch.testing.assert_close(last.model, library, rtol=0, atol=1e-6)
    torch.testing.assert_close(by_hand(records, rounds=3, rate=rate, **numbers), library, rtol=0, atol=1e-6)
    flipped = by_hand(records, rounds=3, rate=rate, sign=-1.0, **numbers)
    assert float((flipped - library).abs().max()) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_weights_shrink(name):
    """By (1 - lr decay)^K a round: alignment, which would go on with that, is off."""
    records, model = federation(), Linear(3, 3, bias=False)
    records = Records(0 * records.x, records.y, records.starts)
    options = {"align": "none"} if name == "dp-fedadamw" else {}
    method = build(name, steps=4, lr=0.3, decay=0.2, schedule="constant", **options)
    theta = torch.randn(model.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second = simulate.run(plan_for(method, records, 2, epsilon=math.inf), model, records, Seeded(0), theta=theta)
    torch.testing.assert_close(first.model, theta * (1 - 0.3 * 0.2) ** 4)
    torch.testing.assert_close(second.model, theta * (1 - 0.3 * 0.2) ** 8)
    assert not torch.allclose(first.model, theta * (1 + 0.3 * 0.2) ** 4)


def test_one_step_without_tau_is_a_sign():
    """Of the noised gradient: DP-FedGD's, which costs the same and draws the same noise."""
    records = federation((30,))
    ours, gd = (
        next(simulate.run(plan_for(method, records, 2), MODEL, records, Seeded(4), shares=True))
        for method in (
            build("dp-localadamw", steps=1, tau=0.0, lr=0.25, schedule="constant"),
            build("dp-fedgd"),
        )
    )
    torch.testing.assert_close(ours.model, -0.25 * torch.sign(gd.aggregate), rtol=1e-12, atol=0)
    clean = gradient(MODEL, records, torch.zeros(MODEL.size, dtype=torch.float64))
    assert (torch.sign(clean) != torch.sign(gd.aggregate)).any(), "noise turned some sign"


# ----------------------------------------------------------------------------------------------- against the formulas


def from_gradients(gs, phi, *, steps, lr, rounds, beta1=0.9, beta2=0.999, tau=0.01, decay=0.01, gamma=0.5, **wrong):
    """The specification, line by line, for clients alike and one block: theta after each round, from noised gradients
    (rounds x clients x steps x d). `wrong` names one mistake."""
    theta, means, pull, J, path = np.zeros(gs.shape[-1]), 0.0, 0.0, 0, []
    floor = 1e-8 if "floor" in wrong else min(1e-8, phi)
    for t in range(rounds):
        eta = lr * (1 + math.cos(math.pi * t / rounds)) / 2
        deltas, seconds = [], []
        for own in gs[t]:
            y, m, v = theta, 0.0, means
            for k, g in enumerate(own, start=1):
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
                v_hat = v / (1 - beta2 ** (k if "restart" in wrong else J + k))
                v_hat = v_hat if "biased" in wrong else np.maximum(v_hat - phi, floor)
                step = m / (1 - beta1**k) / (np.sqrt(v_hat) + tau)
                step = (1 - gamma) * step if "convex" in wrong else step
                y = y - eta * (step + decay * y + gamma * pull)
            deltas.append(y - theta)
            seconds.append(v.mean())
        delta, means, J = np.mean(deltas, 0), np.mean(seconds), J + steps
        pull = -delta / (steps * (lr if "first rate" in wrong else eta))
        pull = -pull if "backwards" in wrong else pull
        theta = theta + delta
        path.append(theta)
    return np.array(path)


@pytest.mark.parametrize(
    ("clip", "tau", "mistakes"),
    [
        (1.0, 0.01, ("restart", "biased", "convex", "first rate", "backwards")),
        (1e-5, 1e-6, ("floor",)),  # Phi is below 1e-8 here, and is the floor
    ],
)
def test_the_whole_method_from_its_noised_gradients(clip, tau, mistakes):
    records, log = federation(), []
    options = {"steps": 3, "lr": 0.2, "tau": tau}
    plan = plan_for(overheard(build("dp-fedadamw", clip=clip, **options), log), records, 4)
    path = np.array([this_round.model.numpy() for this_round in reference.run(plan, MODEL, records, Seeded(2))])
    gs = torch.stack(log).reshape(4, 4, 3, -1).numpy()
    phi = float((calibration.client_std(plan, 0, 0)[0] / 20) ** 2)
    np.testing.assert_allclose(path, from_gradients(gs, phi, rounds=4, **options), rtol=0, atol=1e-10)
    for mistake in mistakes:
        other = from_gradients(gs, phi, rounds=4, **options, **{mistake: True})
        assert np.abs(other - path).max() > 1e-6, mistake


def test_the_convex_form_weighs_the_step_less():
    records, log = federation(), []
    options = {"steps": 2, "lr": 0.2, "tau": 0.01, "gamma": 0.3}
    plan = plan_for(overheard(build("dp-fedadamw", align="convex", **options), log), records, 3)
    path = np.array([this_round.model.numpy() for this_round in reference.run(plan, MODEL, records, Seeded(2))])
    gs, phi = torch.stack(log).reshape(3, 4, 2, -1).numpy(), float((calibration.client_std(plan, 0, 0)[0] / 20) ** 2)
    np.testing.assert_allclose(path, from_gradients(gs, phi, rounds=3, convex=True, **options), rtol=0, atol=1e-10)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9])
def test_alignment_is_heavy_ball_momentum(gamma):
    """K = 1: theta' = theta - lr (mean of m^ / root + decay theta) + gamma (theta - the theta before)."""
    records, log = federation(UNLIKE), []
    lr, decay, tau, beta2 = 0.1, 0.05, 0.01, 0.999
    options = {"steps": 1, "lr": lr, "decay": decay, "tau": tau, "gamma": gamma, "schedule": "constant"}
    plan = plan_for(overheard(build("dp-fedadamw", **options), log), records, 6)
    rounds_done = list(reference.run(plan, MODEL, records, Seeded(5)))
    gs, phi = (
        torch.stack(log).reshape(6, 4, -1),
        torch.from_numpy((calibration.client_std(plan, 0, 0) / np.array(UNLIKE)) ** 2)[:, None],
    )
    weights = torch.from_numpy(plan.weights)
    before = theta = means = noise = torch.zeros(MODEL.size, dtype=torch.float64)
    for t, this_round in enumerate(rounds_done):
        gathered = 1 - beta2 ** (t + 1)
        v, b = beta2 * means + (1 - beta2) * gs[t] ** 2, beta2 * noise + (1 - beta2) * phi
        root = ((v - b) / gathered).maximum(phi.clamp(max=1e-8)).sqrt()
        mean = weights @ (gs[t] / (root + tau))
        after = theta - lr * (mean + decay * theta) + gamma * (theta - before)
        torch.testing.assert_close(this_round.model, after, rtol=0, atol=1e-10)
        if t and gamma:
            assert not torch.allclose(this_round.model, after - gamma * (theta - before), rtol=0, atol=1e-10)
        before, theta, means, noise = theta, after, (weights @ v).mean(), (weights @ b).mean()


# ------------------------------------------------------------------------------------------------- its three parts

OFF = {"aggregate": "none", "correct": False, "align": "none"}
SAME = {"steps": 3, "lr": 0.2, "tau": 0.01, "decay": 0.1, "schedule": "cosine", "beta2": 0.99}


@pytest.mark.parametrize("participation", ["full", "fixed:2", "poisson:0.6"])
def test_with_all_parts_off_it_is_local_adamw_bit_for_bit(participation):
    records = federation(UNLIKE)

    def path(name, **options):
        plan = plan_for(build(name, **SAME, **options), records, participation=participation)
        return torch.stack(
            [this_round.model for this_round in simulate.run(plan, MODEL, records, Seeded(1), shares=True)]
        )

    bare = path("dp-localadamw")
    assert torch.equal(path("dp-fedadamw", **OFF), bare)
    assert torch.equal(path("dp-fedadamw", **OFF | {"align": "additive"}, gamma=0.0), bare)
    assert torch.equal(path("dp-fedadamw", **OFF | {"align": "convex"}, gamma=0.0), bare)
    for part in ({"aggregate": "block"}, {"correct": True}, {"align": "additive"}, {"align": "convex"}):
        assert not torch.allclose(path("dp-fedadamw", **OFF | part), bare), part


class Fine(Linear):
    """Every parameter is a block."""

    @property
    def blocks(self):
        return torch.arange(self.size)


def test_blocks_are_the_model_s_own():
    """One number a block goes up beside the update and the noise's part of v; without aggregation the update alone."""
    records = federation()
    for model, blocks in ((MODEL, 1), (Fine(3, 3), MODEL.size)):
        first = next(simulate.run(plan_for(build("dp-fedadamw"), records), model, records, Seeded(1)))
        assert [leaf.shape[-1] for leaf in leaves(first.aggregate)] == [MODEL.size, blocks, 1]
        bare = next(simulate.run(plan_for(build("dp-fedadamw", aggregate="none"), records), model, records, Seeded(1)))
        assert [leaf.shape[-1] for leaf in leaves(bare.aggregate)] == [MODEL.size]


# --------------------------------------------------------------------------------------------- the law of the noise


def pure_noise(sizes, *, model, rounds, participation="full", **options):
    """A federation whose gradients are zero, and the state (v by blocks, the noise's part, J) it ends with."""
    records = federation(sizes, model.features)
    records = Records(0 * records.x, records.y, records.starts)
    plan = plan_for(build("dp-fedadamw", tau=1.0, lr=0.01, **options), records, rounds, participation)
    for this_round in simulate.run(plan, model, records, Seeded(3), shares=True):
        _, _, means, noise, J = this_round.checkpoint.state.extras
    return plan, means, noise, J


def test_what_noise_adds_to_v_is_taken_off():
    """J steps of pure noise, one block of d entries, S clients alike: v^ is a weighted mean of chi-squares, of mean Phi
    and variance 2 Phi^2 / (d S) each. So v^ - b^ is zero within four standard errors; without the correction, Phi."""
    beta2, steps, rounds, model = 0.98, 4, 10, Linear(40, 10, bias=False)
    plan, means, noise, J = pure_noise(ALIKE, model=model, rounds=rounds, steps=steps, beta2=beta2)
    assert J.item() == rounds * steps
    phi, gathered = (calibration.client_std(plan, 0, 0)[0] / 20) ** 2, 1 - beta2 ** J.item()
    v_hat, b_hat = means.item() / gathered, noise.item() / gathered
    assert b_hat == pytest.approx(phi, rel=1e-9)
    weight = (1 - beta2) * beta2 ** np.arange(rounds * steps) / gathered
    error = phi * math.sqrt(2 / (model.size * 4) * (weight**2).sum())
    assert abs(v_hat - b_hat) < 4 * error
    assert abs(v_hat) > 100 * error, "as it is without the correction"
    assert abs(v_hat - phi * 20 * 20) > 4 * error, "the noise of a sum, not of a mean"
    assert abs(means.item() - phi) > 4 * error, "without the global counter J"


def test_clients_of_unlike_sizes_have_unlike_noise():
    """The federation's v holds the clients' mean Phi, not each one's own: v^ - b^ is still zero within four standard
    errors, while taking off one's own Phi would miss for some."""
    beta2, steps, rounds, model = 0.98, 4, 10, Linear(40, 10, bias=False)
    plan, means, noise, J = pure_noise(UNLIKE, model=model, rounds=rounds, steps=steps, beta2=beta2)
    phi, gathered = (calibration.client_std(plan, 0, 0) / np.array(UNLIKE)) ** 2, 1 - beta2 ** J.item()
    v_hat, b_hat = means.item() / gathered, noise.item() / gathered
    assert b_hat == pytest.approx(plan.weights @ phi, rel=1e-9)
    weight = (1 - beta2) * beta2 ** np.arange(rounds * steps) / gathered
    error = math.sqrt(2 / model.size * (plan.weights**2 @ phi**2) * (weight**2).sum())
    assert abs(v_hat - b_hat) < 4 * error
    assert (np.abs(v_hat - phi) > 4 * error).all()


@pytest.mark.parametrize(("block", "clients"), [(1, 1), (8, 1), (1, 3)])
def test_the_variance_of_v(block, clients):
    """Of stationary v: 2 Phi^2 (1 - beta2) / (1 + beta2), over the size of a block, over the number of clients.

    A sample variance of n values of kurtosis k has standard error sqrt((k - 1) / n) of itself. A sum of chi-squares of
    weights beta2^j has k = 3 + 12 (1 - beta2^2) / (1 + beta2^2); a mean of N of them, 3 and an N-th of the rest.
    """
    beta2 = 0.8

    class Blocked(Linear):
        @property
        def blocks(self):
            return torch.arange(self.size) // block

    plan, v, _, _ = pure_noise((20,) * clients, model=Blocked(320, 10, bias=False), rounds=4, steps=20, beta2=beta2)
    assert len(v) == 3200 // block
    expected = 2 * (calibration.client_std(plan, 0, 0)[0] / 20) ** 4 * (1 - beta2) / (1 + beta2) / (block * clients)
    kurtosis = 3 + 12 * (1 - beta2**2) / (1 + beta2**2) / (block * clients)
    error = expected * math.sqrt((kurtosis - 1) / len(v))
    assert abs(float(v.var()) - expected) < 4 * error
    for mutant in (expected / 2, expected * (1 + beta2), expected / (1 - beta2)):
        assert abs(float(v.var()) - mutant) > 4 * error


def test_a_round_to_which_few_came_changes_little():
    """One client of four a round, of unequal weight. Had it sent what is carried, that would be multiplied by a weight
    each time and die out; the changes average to the clients' mean Phi, within four standard errors of the schedule."""
    beta2, rounds, sizes = 0.999, 300, np.array(UNLIKE)
    plan, _, noise, J = pure_noise(UNLIKE, model=MODEL, rounds=rounds, steps=1, participation="fixed:1")
    phi, share = (calibration.client_std(plan, 0, 0) / sizes) ** 2, plan.weights / plan.participation.rate(4)
    gathered, expected = 1 - beta2 ** J.item(), plan.weights @ phi
    error = (share * phi).std() / math.sqrt(rounds)
    assert abs(noise.item() / gathered - expected) < 4 * error
    summed = 0.0
    for cohort in plan.cohorts:
        summed = sum(share[i] * (beta2 * summed + (1 - beta2) * phi[i]) for i in cohort)
    assert abs(summed / gathered - expected) > 4 * error


# ------------------------------------------------------------------------------------------------------------ privacy


@pytest.mark.parametrize("name", NAMES)
def test_uploads_are_post_processing_of_noised_gradients(name):
    """Answers on tape, raw data swapped: every upload comes out as it was, bit for bit."""
    records, other, log = federation(UNLIKE), federation(UNLIKE, seed=9), []
    method = build(name, steps=2)

    def uploads(tape, records):
        heard = overheard(method, log, tape)
        return [
            this_round.aggregate for this_round in reference.run(plan_for(heard, records), MODEL, records, Seeded(1))
        ]

    first, tape = uploads(None, records), list(log)
    again = uploads(iter(tape), other)
    fresh = uploads(None, other)
    for a, b, c in zip(first, again, fresh, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))
        assert not any(torch.equal(x, y) for x, y in zip(a[:1], c[:1], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_local_gradient_is_paid_for_and_nothing_else(name):
    records = federation(UNLIKE)
    plan = plan_for(build(name, steps=4), records, 5)
    (group,) = spending.groups(plan)
    assert [(release.query, release.times) for release in group.releases] == [("0.0 gradient", 20)]
    assert group.releases == spending.groups(plan_for(build("dp-fedavg", steps=4), records, 5))[0].releases
    assert spending.epsilon(plan) == pytest.approx(8.0, rel=1e-9)
    assert all(query.noise is not None for query in plan.stages[0].queries if query.kind is Kind.GRADIENT)


@pytest.mark.parametrize("trust", ["secure-aggregation", "trusted-server"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_proved_is_refused(name, trust):
    for steps in (1, 3):  # one step too: it is a sign
        with pytest.raises(SordinoError, match="not linear in a client's noise"):
            plan_for(build(name, steps=steps), federation(), trust=trust)
    with pytest.raises(SordinoError, match=f"unit: {name} exists at record and person level"):
        build(name, Unit.CLIENT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosinus"}, r"schedule: 'cosinus' is unknown\. Did you mean 'cosine'\?"),
        ({"aggregate": "blocks"}, "aggregate: 'blocks' is unknown"),
        ({"align": "add"}, "align: 'add' is unknown"),
        ({"gamma": 1.0}, r"gamma: 1.0 must lie in \[0, 1\)"),
        ({"beta2": 1.0}, "beta2: 1.0"),
        ({"lr": 0.0}, "lr: 0.0"),
        ({"decay": -0.1}, "decay: -0.1"),
        ({"v_floor": -1.0}, "v_floor: -1.0"),
        ({"tau": math.inf}, "tau: inf"),
        ({"steps": 0}, "steps: 0"),
        ({"clip": math.inf}, "clip: inf"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(SordinoError, match=message):
        build("dp-fedadamw", **options)
