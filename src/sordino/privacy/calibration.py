"""How much noise each query gets, as functions over a `Plan`.

One rule covers every trust model. A round adds up w_i / b_i times client i's clipped sum (w_i: public weight, b_i:
public divisor of its answers), so a record of client i moves the observed quantity by (w_i / b_i) * sensitivity.

- `untrusted-server`: every message is seen, so each client's own noise must cover its own sensitivity.
- `secure-aggregation`, `trusted-server`: only the weighted sum is seen. Its noise must cover every client: a client
  that moves the sum by d in each of its k rounds spends k (d / std)^2 of mu squared. The client with the largest
  account decides, which need be neither the heaviest one nor the one with the most rounds. Each participant adds an
  equal part of the noise *as it arrives in the sum*. Hence no client spends more than was promised, whatever the
  weights. Correlated noise is one stream over all rounds, so every client sends its part of it in every round, also
  when it is not in the cohort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

import numpy as np

from sordino.core import SAMPLED, Adjacency, Facts, Kind, Query, Unit
from sordino.errors import SordinoError
from sordino.privacy.accounting import concentrated, events
from sordino.privacy.accounting.samplers import SampledAccount, SampledGaussian, Sampler
from sordino.privacy.mechanisms import discrete_gaussian, quantization
from sordino.privacy.mechanisms.laws import DiscreteGaussianNoise, carries
from sordino.privacy.mechanisms.mechanism import Mechanism
from sordino.privacy.participation import FULL
from sordino.privacy.plan import Plan, memoised, noised_queries, plan_mechanism, unbounded_sampling, with_weights_of
from sordino.privacy.releases import (
    MOST_RATES,
    AccountColumns,
    QueryNoise,
    account_columns,
    person_factor,
    release_counts,
    releases,
    sampled_terms,
    sampler_of,
)

MOST_RELEASES = 72  # of all accounts, where only sums are visible: each takes some milliseconds
EPOCH_RELEASES = 1.8  # what one with epochs counts for
MOST_RATIO = 1e9  # of rates that are taken for one
RISE = 0.003  # share by which coarse grids raise a factor at least
TOGETHER = 8  # accounts with epochs whose pairs are computed at once
GROUPED = 0.95  # of the largest factor: accounts that need less together are compared as one
EPOCH_ACCOUNTS = 24  # with epochs, where every message is visible: each is searched by itself
MOST_ACCOUNTS = 128  # the same without epochs: they are searched together
RATIO_STEPS = 2**40  # of ratios of sensitivity to noise, which are rounded up
LOG_STEPS = 2**20  # of logarithms that are compared
COMPARED = 256  # accounts that are compared with others at once
NO_RELEASE = 0.1  # releases: what none counts for where accounts are compared
ACCOUNT_MARGIN = 5e-4  # on the noise, for accounts that are not computed: their grids may err by more, by EXCESS
EPOCH_MARGIN = 2e-3  # the same with epochs


@memoised
def query_noises(plan: Plan) -> tuple[QueryNoise, ...]:
    """The noise of every noised query: calibrated to epsilon, or fixed by `plan.noise`.

    Raises:
      SordinoError: a clip is infinite, the shares do not add up, or integers are too coarse.
    """
    queries = list(noised_queries(plan))
    counts = np.array([release_counts(plan, s, q)[0].max() for s, _, q in queries], dtype=float)
    shares = _shares([q.share for *_, q in queries], counts)
    if plan.integers is not None and plan.sampling.kind != FULL:
        return _sampled_integers(plan, int(counts.sum()))
    epsilons = np.full(
        plan.clients, plan.privacy.epsilon, dtype=float
    )  # from an epsilon of 1 NumPy would make whole numbers
    for client, epsilon in plan.privacy.client_epsilon.items():
        epsilons[client] = epsilon
    distinct, which = _distinct(epsilons)
    kinds = [plan_mechanism(plan, s, k).event for s, k, _ in queries]
    may_fail = int(sum(count for kind, count in zip(kinds, counts, strict=True) if kind.may_fail))
    mu = np.array([events.allowed_mu(kinds, e, plan.privacy.delta, may_fail) for e in distinct])[which]
    noises = []
    for (s, k, query), share, count in zip(queries, shares, counts, strict=True):
        # The schedule may leave a stage empty: nobody uses its noise, and it takes no budget.
        noise, needed = _query_noise(plan, s, k, query, mu, count / share if count else 1.0)
        noises.append(noise if plan.integers is None else _in_steps(plan, noise, needed))
    if plan.integers is None and plan.noise is None and not plan.noiseless:
        factor = _account_factor(plan, noises, epsilons, mu)
        noises = [noise._replace(std=noise.std * factor) for noise in noises]
    return tuple(noises)


def client_std(plan: Plan, stage: int, number: int) -> np.ndarray:
    """Each client's own noise on one query, before `noise_share`; zeros for a query without noise."""
    for noise in query_noises(plan):
        if (noise.stage, noise.number) == (stage, number):
            return noise.std
    return np.zeros(plan.clients)


def noise_share(plan: Plan, cohort: int) -> float:
    """The factor on a participant's std: its part of the summed noise, where only sums are visible."""
    return 1 / math.sqrt(max(cohort, 1)) if plan.only_sums_visible else 1.0


def own_std(plan: Plan, noise: QueryNoise) -> np.ndarray:
    """What each client itself adds in a cohort of the expected size; for a stream, to one number of it."""
    return np.asarray(noise.std / (math.sqrt(noise_senders(plan, noise.query)) if plan.only_sums_visible else 1.0))


def noise_senders(plan: Plan, query: Query) -> float:
    """The expected number of clients whose noise a round adds up.

    This is the cohort, or all clients where they share one noise stream; under secure aggregation, the clients whose
    noise is certain to arrive and unknown to the coalition.
    """
    if plan.integers is not None:
        return plan.integers.honest(plan.clients)
    common = plan.only_sums_visible and carries(query.noise)
    return plan.clients * (1.0 if common else plan.participation.rate(plan.clients))


def aggregate_std(plan: Plan, stage: int, number: int | None = None) -> float:
    """Expected noise per coordinate on the aggregate.

    Args:
      number: of the query within the stage (default: the stage's first noised query).
    """
    noises = (noise for noise in query_noises(plan) if noise.stage == stage and number in (None, noise.number))
    noise = next(noises, None)
    if noise is None:
        return 0.0
    rate = plan.participation.rate(plan.clients)
    variances = (noise.weight * noise.std) ** 2
    total = variances.max() if plan.only_sums_visible else variances.sum() * rate
    if plan.integers is not None:  # all of the noise, also that of dropouts and colluders
        total *= plan.clients / plan.integers.honest(plan.clients)
    return float(math.sqrt(total)) / rate


def summed_noise(plan: Plan) -> tuple[float, float]:
    """(std of a cohort's summed noise, largest std of one client), divided by the clip of the first noised query."""
    noise = query_noises(plan)[0]
    stds = own_std(plan, noise) / noise.scale
    return float(math.sqrt(noise_senders(plan, noise.query) * (stds**2).mean())), float(stds.max())


def integer_variance(plan: Plan, noise: QueryNoise) -> float:
    """The variance of the discrete noise that each client adds, in integer steps."""
    assert plan.integers is not None
    total = float((noise.weight * noise.std).max() / noise.weight.max() / noise.step)
    return total**2 / plan.integers.honest(plan.clients)


def stage_facts(plan: Plan, stage: int) -> Facts:
    """The public numbers that the stage's rules may read."""
    rate = plan.participation.rate(plan.clients)
    return Facts(
        clients=plan.clients,
        sizes=np.asarray(plan.sizes if plan.privacy.unit.sizes_public else ()),
        rounds=plan.stage_rounds[stage],
        cohort=rate * plan.clients,
        aggregate_std=aggregate_std(plan, stage),
        persons=plan.privacy.unit is Unit.PERSON,
        same_records=plan.participation.kind == FULL and plan.sampling.kind == FULL,
        query_stds=tuple(aggregate_std(plan, s, k) for s, k, _ in noised_queries(plan) if s == stage),
    )


# --------------------------------------------------------------------------------------------------------- internals


def _sampled_integers(plan: Plan, releases: int) -> tuple[QueryNoise, ...]:
    """Integer noise beside minibatches: that of real numbers, for what is left of delta, made a little larger.

    Integer noise is a function of Gaussian noise of a slightly smaller standard deviation (`concentrated.SMOOTHING`).
    """
    left = concentrated.remaining(plan.privacy.delta, releases)
    if left <= 0:
        raise SordinoError(f"delta: {plan.privacy.delta} is too small for {releases} releases.")
    real = replace(plan, integers=None, privacy=replace(plan.privacy, delta=left))
    gaussian = query_noises(with_weights_of(real, plan))
    factor = concentrated.SMOOTHING * (1 + 1e-12) if plan.noise is None else 1.0
    larger = [noise._replace(std=noise.std * factor) for noise in gaussian]
    return tuple(_in_steps(plan, n, 1 / n.weight) for n in larger)


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values in order, and the place of each value among them. `np.unique` imports `numpy.ma` for it."""
    distinct = np.array(sorted(set(values.tolist())), values.dtype)
    return distinct, np.searchsorted(distinct, values)


def _query_noise(
    plan: Plan, stage: int, number: int, query: Query, mu: np.ndarray, parts: float
) -> tuple[QueryNoise, np.ndarray]:
    """One query's noise before subsampling, and the std that each client's own promise needs.

    Args:
      mu: of all releases together, per client.
      parts: into which mu squared is divided; one release of this query spends one of them.
    """
    unit, adjacency = plan.privacy.unit, plan.privacy.adjacency
    sizes, position = _distinct(np.array(plan.sizes))
    # A bound about minibatches depends on the rates at which they are drawn, not on those of the account.
    amplifies = query.sampled and not unbounded_sampling(plan)
    rates = plan.sampling.rates(sizes.astype(float)) if amplifies else np.ones(len(sizes))
    of_sizes = [(int(m), float(rate)) for m, rate in zip(sizes, rates, strict=True)]
    sensitivity = np.array([query.sensitivity(adjacency, unit, *each) for each in of_sizes])[position]
    sensitivity = sensitivity * person_factor(plan)
    if not np.isfinite(sensitivity).all() and not plan.noiseless:
        raise SordinoError(f"clip: {plan.method.name}'s {query.kind} needs a finite clip; set clip.")
    bounds = [query.sensitivity(Adjacency.ADD_REMOVE, unit, *each) for each in of_sizes]
    scale = query.clip if query.bound is None else max(bounds)
    divisor = 1.0 if query.kind is Kind.DELTA else np.asarray(plan.sizes, dtype=float)
    divisor = divisor * plan.rates if query.kind in SAMPLED else divisor
    weight = plan.weights / divisor
    factor = release_counts(plan, stage, query)[1].max() or 1.0  # where nobody takes part, that of fresh noise
    mechanism = plan_mechanism(plan, stage, number)
    needed = np.zeros(plan.clients) if plan.noiseless else mechanism.std(sensitivity * factor * np.sqrt(parts), mu)
    std = (weight * needed).max() / weight if plan.only_sums_visible else needed
    if plan.noise is not None:  # the caller fixes the noise of a cohort's sum; its shape over clients stays
        shape = (weight * sensitivity).max() / weight if plan.only_sums_visible else sensitivity
        parties = 1.0 if plan.only_sums_visible else plan.participation.rate(plan.clients) * plan.clients
        std = shape * plan.noise * scale / math.sqrt(parties * (shape**2).mean())
    return QueryNoise(stage, number, query, scale, sensitivity, std, weight), needed


def _in_steps(plan: Plan, noise: QueryNoise, needed: np.ndarray) -> QueryNoise:
    """The same noise for integers: the finest steps that fit, with noise that also covers rounding.

    Args:
      needed: the std that each client's own promise needs without rounding; rounding lengthens a small sensitivity
        by a larger factor than a large one.
    """
    records = 1.0 if noise.query.kind is Kind.DELTA else np.asarray(plan.sizes, dtype=float)
    mechanism = plan_mechanism(plan, noise.stage, noise.number)
    assert isinstance(mechanism, DiscreteGaussianNoise)
    integers = mechanism.integers
    largest = float((noise.weight * records * noise.query.clip).sum()) * integers.row_sums[1]
    total = float((noise.weight * noise.std).max())
    steps = integers.steps(largest, total, plan.clients)
    sensitivity = steps * noise.weight * noise.sensitivity
    terms = sampled_terms(plan, noise.query)
    factor = integers.lengthened(sensitivity, noise.weight * needed, terms) if plan.noise is None else 1.0
    noise = noise._replace(std=noise.std * factor, step=1 / (steps * noise.weight.max()), dimension=integers.dimension)
    variance = integer_variance(plan, noise)
    if variance < quantization.LEAST_STEP_VARIANCE:
        raise SordinoError(
            f"noise: its variance is {variance:.3g} in integer steps; {quantization.LEAST_STEP_VARIANCE:g} are needed."
        )
    wraps = discrete_gaussian.wraps(largest * steps + plan.clients, variance, plan.clients, integers.dimension)
    if wraps > quantization.MOST_WRAP_PROBABILITY:
        raise SordinoError("noise: the sums exceed the range of integers too often; use untrusted-server.")
    return noise


def _account_factor(plan: Plan, noises: list[QueryNoise], epsilons: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """Per client, the factor on the noise that its whole account allows: 1, or less.

    Releases may be about random samples. Where only sums are visible, the noise so far covers a client with the largest
    weight and the largest number of releases, and there may be no such client; then the client whose account needs most
    noise decides.

    Args:
      mu: that each client may spend on Gaussian releases about all of its data.
    """
    by_query = [account_columns(plan, noise) for noise in noises]
    if all((query.rate == 1).all() for query in by_query):
        laws = [plan_mechanism(plan, noise.stage, noise.number) for noise in noises]
        if any(type(law).std is not Mechanism.std for law in laws):  # it may not be proportional to what is spent
            return np.ones(plan.clients)
        spent = np.sqrt(sum(query.times * (query.sensitivity / query.std) ** 2 for query in by_query) / mu**2)
        largest = float(np.max(spent)) * (1 + 1e-12)
        return np.full(plan.clients, largest if plan.only_sums_visible and 0 < largest < 1 - 1e-9 else 1.0)
    units = np.ones(plan.clients)
    if not plan.only_sums_visible:
        by_query, units = _in_own_units(by_query)
        never = sum(query.times for query in by_query) == 0
        by_query = [q._replace(sensitivity=np.where(never, 0.0, q.sensitivity)) for q in by_query]
        epsilons = np.where(never, plan.privacy.epsilon, epsilons)
    columns = [column for query in by_query for column in query]
    accounts, which = np.unique(np.stack([*columns, epsilons], 1), axis=0, return_inverse=True)
    number, which = len(accounts), which.reshape(-1)
    if plan.only_sums_visible:
        accounts = _largest(accounts)
        which = np.zeros(plan.clients, dtype=int)
    elif number > MOST_RATES:
        most = EPOCH_ACCOUNTS if sampler_of(plan) is Sampler.ALLOCATION else MOST_ACCOUNTS // len(by_query)
        most *= 1 if len(np.unique(epsilons)) == 1 else 2  # they differ in two ways
        accounts, levels = _few_levels(accounts, np.bincount(which), most)
        which = levels[which]
    factors = np.ones(len(accounts))
    parts = [events.split(releases(plan, noises, row[:-1]), plan.privacy.adjacency) for row in accounts]
    if any(sampled for sampled, _ in parts):
        delta, adjacency = plan.privacy.delta, plan.privacy.adjacency
        needs = [SampledAccount(*part, float(row[-1])) for part, row in zip(parts, accounts, strict=True)]
        if plan.only_sums_visible:
            needs = _few(needs)
            factors = np.full(1, _largest_factor(needs, delta, adjacency))
        else:
            from sordino.privacy.accounting import many

            factors = np.array(many.scales(needs, delta, adjacency))
        margin = EPOCH_MARGIN if sampler_of(plan) is Sampler.ALLOCATION else ACCOUNT_MARGIN
        factors = factors * (1 + margin * (len(needs) < number))
    return np.asarray(np.minimum(factors[which] * units, 1.0))


def _in_own_units(by_query: list[AccountColumns]) -> tuple[list[AccountColumns], np.ndarray]:
    """The columns with noise in units in which the largest ratio of sensitivity to noise is 1, and these units.

    Clients that ask for different epsilons differ in their noise by one factor. In these units they have like accounts.
    Ratios are rounded up.
    """
    ratios = [np.where(q.sensitivity > 0, q.sensitivity / np.where(q.std > 0, q.std, 1.0), 0.0) for q in by_query]
    units = np.max(ratios, axis=0)
    units = np.where(units > 0, units, 1.0)
    rounded = [np.ceil(ratio / units * RATIO_STEPS) / RATIO_STEPS for ratio in ratios]
    ones = np.ones(len(units))
    return [q._replace(sensitivity=ratio, std=ones) for q, ratio in zip(by_query, rounded, strict=True)], units


def _largest_factor(accounts: Sequence[SampledAccount], delta: float, adjacency: Adjacency) -> float:
    """The largest factor that one of the accounts needs; one that a smaller factor suffices for needs no search.

    If there are many, the one that should need most by the central limit comes first, and those that should need less
    are compared in groups: what suffices for the largest numbers of a group suffices for its members. Many accounts
    with epochs are searched on coarse grids alone.
    """
    from sordino.privacy.accounting import subsampled

    tolerance = subsampled.tolerance(accounts)
    coarse = tolerance >= subsampled.WIDE
    limit = partial(subsampled.limit, delta=delta, adjacency=adjacency)
    groups = [[account] for account in accounts]
    largest = 0.0  # the limit of the first account, if there are many
    if len(accounts) > subsampled.FEW:
        limits = [limit(account) for account in accounts]
        first, largest = int(np.argmax(limits)), max(limits)
        others = [account for n, account in enumerate(accounts) if n != first]
        grouped = _grouped(others, lambda group: limit(_merged(group)) < GROUPED * largest)
        # Those that may need most come first: later ones are then compared with what decides.
        groups = [[accounts[first]], *sorted(grouped, key=lambda group: -limit(_merged(group)))]
    most, prepared = 0.0, 0
    while groups:
        if coarse and most and not prepared:
            prepared = min(len(groups), TOGETHER)
            ahead = [_merged(group) for group in groups[:prepared]]
            parts = [limit(each) / largest if largest else 0.0 for each in ahead]
            scaled = [_with_noise(each, most) for each in ahead]
            subsampled.prepare(zip(scaled, parts, strict=True), delta, adjacency)
        group, prepared = groups.pop(0), max(prepared - 1, 0)
        together = _merged(group)
        if most:
            part = limit(together) / largest if largest else 0.0
            releases, mu, epsilon = _with_noise(together, most)
            if subsampled.suffices(releases, epsilon, delta, adjacency, mu, expected=part, fine=not coarse):
                continue
        if len(group) > 1:
            groups[:0] = [[account] for account in group]
        else:
            start = float(f"{most:.6g}") if coarse else 0.0
            releases, mu, epsilon = together
            factor = subsampled.scale(releases, epsilon, delta, adjacency, mu, tolerance=tolerance, start=start)
            most = max(most * (1 + RISE * coarse), factor)
        prepared = 0
    return most


def _few(accounts: list[SampledAccount]) -> list[SampledAccount]:
    """Accounts with at most MOST_RELEASES sampled releases: those whose rates and whose epsilons differ by less than
    some factor, as small as possible, become one that covers them. It keeps the smallest epsilon of its members, so a
    strict client is never taken together with others that are far from it."""
    each = max(
        sum(EPOCH_RELEASES if release.sampler is Sampler.ALLOCATION else 1 for release in account.releases)
        for account in accounts
    )
    most = int(MOST_RELEASES / max(1.0, each))
    if len(accounts) <= most:
        return accounts
    facts = [
        (_rates(account), account.epsilon, [release.sampler for release in account.releases], account)
        for account in sorted(accounts, key=lambda account: account.epsilon)
    ]

    def grouped(factor: float) -> list[list[SampledAccount]]:
        starts = [0]  # of those with like epsilons
        for n, (_, epsilon, *_) in enumerate(facts):
            if epsilon > factor * facts[starts[-1]][1]:
                starts.append(n)
        groups: list[list[SampledAccount]] = []
        for start, stop in zip(starts, [*starts[1:], len(facts)], strict=True):
            limits, kinds = None, None
            for rates, _, samplers, account in sorted(facts[start:stop], key=itemgetter(0)):
                if limits is None or samplers != kinds or rates > limits:
                    groups.append([])
                    limits, kinds = [factor * rate for rate in rates], samplers
                groups[-1].append(account)
        return groups

    low, high = 1.0, 2.0
    while len(grouped(high)) > most and high < MOST_RATIO:
        low, high = high, high**2
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if len(grouped(middle)) > most else (low, middle)
    return [_merged(group) for group in grouped(high)]


def _grouped(
    accounts: Iterable[SampledAccount], together: Callable[[list[SampledAccount]], bool]
) -> list[list[SampledAccount]]:
    """Groups of accounts with like rates, in ascending order, as large as `together` allows."""
    groups: list[list[SampledAccount]] = []
    for account in sorted(accounts, key=_rates):
        samplers = [release.sampler for release in account.releases]
        alike = groups and [release.sampler for release in groups[-1][0].releases] == samplers
        if alike and together([*groups[-1], account]):
            groups[-1] = [*groups[-1], account]
        else:
            groups.append([account])
    return groups


def _rates(account: SampledAccount) -> list[float]:
    return [release.rate for release in account.releases]


def _merged(accounts: Sequence[SampledAccount]) -> SampledAccount:
    """The account with the largest numbers of these, whose releases have the same samplers. It costs no less than any
    of them."""
    releases = [
        SampledGaussian(max(r.rate for r in kind), max(r.mu for r in kind), max(r.times for r in kind), kind[0].sampler)
        for kind in zip(*(account.releases for account in accounts), strict=True)
    ]
    return SampledAccount(releases, max(a.gaussian_mu for a in accounts), min(a.epsilon for a in accounts))


def _with_noise(account: SampledAccount, factor: float) -> SampledAccount:
    """The account with every standard deviation multiplied by the factor."""
    releases = [release._replace(mu=release.mu / factor) for release in account.releases]
    return account._replace(releases=releases, gaussian_mu=account.gaussian_mu / factor)


def _few_levels(accounts: np.ndarray, clients: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most so many accounts, or one for all that differ only in numbers of releases and epsilons, and which of them
    covers each of the given ones.

    A level has the largest numbers of releases and the smallest epsilon of its accounts. The level that is divided next
    is the one where that saves most noise, summed over clients, if noise is proportional to the root of the number of
    releases and inversely to epsilon. Accounts with the same rates follow each other, so that a search can start where
    the last one points.

    Args:
      accounts: the accounts.
      clients: how many clients have each account.
      most: number of levels.
    """
    columns = np.arange(2, accounts.shape[1] - 1, 4)
    needs = np.column_stack([np.log(np.maximum(accounts[:, columns], NO_RELEASE)) / 2, -np.log(accounts[:, -1])])
    # Whole numbers, whose sums are exact on every machine. Several kinds of releases count as much as one.
    needs = np.rint(needs * LOG_STEPS).astype(np.int64) * np.append(np.ones(len(columns), int), len(columns))
    alike = np.unique(np.delete(accounts, [*columns, -1], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(alike, kind="stable")
    starts = np.flatnonzero(np.diff(alike[order])) + 1
    levels = np.split(order, starts)
    parts = [_best_parts(needs, clients, level) for level in levels]
    while len(levels) < most:
        widest = max(range(len(parts)), key=lambda n: parts[n][0])
        saved, *both = parts[widest]
        if not saved:
            break
        levels[widest : widest + 1] = both
        parts[widest : widest + 1] = [_best_parts(needs, clients, part) for part in both]
    rounded = accounts.copy()
    for level in levels:
        rounded[np.ix_(level, columns)] = accounts[np.ix_(level, columns)].max(0)
        rounded[level, -1] = accounts[level, -1].min()
    return _in_order(rounded)


def _best_parts(needs: np.ndarray, clients: np.ndarray, level: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """What it saves to divide a level in two, and the accounts of both parts; the first one needs less."""
    best, parts = 0, (level[:0], level)
    own = needs[level]
    largest, differ = own.max(0), np.flatnonzero(np.ptp(own, axis=0))
    for column in differ:
        place = np.argsort(own[:, column], kind="stable")
        ordered, number = own[place][:, differ], clients[level[place]]
        first, rest = np.maximum.accumulate(ordered)[:-1], np.maximum.accumulate(ordered[::-1])[-2::-1]
        saved = number.cumsum()[:-1] * (largest[differ] - first).sum(1)
        saved += number[::-1].cumsum()[-2::-1] * (largest[differ] - rest).sum(1)
        at = int(saved.argmax())
        if int(saved[at]) > best:
            best, parts = int(saved[at]), (level[place[: at + 1]], level[place[at + 1 :]])
    return best, *parts


def _in_order(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different ones of these accounts, those with the same rates together, and the place of each among them."""
    distinct, which = np.unique(levels, axis=0, return_inverse=True)
    order = np.lexsort((distinct[:, 2:-1:4].sum(1), distinct[:, -1], distinct[:, 3:-1:4].sum(1)))
    return distinct[order], np.argsort(order)[which.reshape(-1)]


def _largest(accounts: np.ndarray) -> np.ndarray:
    """The accounts without those that another one exceeds in every number; those need no more noise.

    Epsilon grows with the ratio of sensitivity to noise, the number of releases and the rate of every query
    (docs/proofs.md, lemma 9; under allocation, "Fewer minibatches").
    """
    sensitivity, std, times, rate = (accounts[:, k:-1:4] for k in range(4))
    made = times > 0
    sizes = np.hstack([made * sensitivity / std, times, made * rate, 1 / accounts[:, -1:]])
    order = np.argsort(-(sizes / np.maximum(sizes.max(0), 1e-300)).sum(1))
    kept = order[:0]
    for start in range(0, len(order), COMPARED):
        some = order[start : start + COMPARED]
        some = some[~_exceeded(sizes[some], sizes[kept])]
        earlier = np.tri(len(some), k=-1, dtype=bool)  # an account is compared with those before it
        kept = np.append(kept, some[~_exceeded(sizes[some], sizes[some], earlier)])
    return np.asarray(accounts[kept])


def _exceeded(sizes: np.ndarray, others: np.ndarray, among: np.ndarray | bool = True) -> np.ndarray:
    """Which of these rows another row exceeds, or equals, in every number.

    Args:
      sizes: the rows.
      others: the other rows.
      among: which of the others count for which row.
    """
    exceeds = np.full((len(sizes), len(others)), among)
    for own, of_others in zip(sizes.T, others.T, strict=True):
        exceeds &= of_others >= own[:, None]
    return np.asarray(exceeds.any(1))


def _shares(declared: list[float | None], counts: np.ndarray) -> np.ndarray:
    """Parts of mu squared; queries that declare none divide the rest in proportion to their releases.

    The method's declaration is checked whatever the schedule drew. A query without releases (the schedule drew nobody
    for its stage) spends nothing: its part goes to the others, so that the parts spent add up to one.
    """
    total = sum(share for share in declared if share is not None)
    left_open = any(share is None for share in declared)
    if total > 1 + 1e-9 or (left_open and total >= 1) or (declared and not left_open and abs(total - 1) > 1e-9):
        raise SordinoError(f"share: the parts of the budget add up to {total:g}; they must add up to 1.")
    if not counts.any():
        return np.ones(len(declared))
    free = np.array([count if share is None else 0.0 for share, count in zip(declared, counts, strict=True)])
    rest = (1 - total) * free / max(free.sum(), 1)
    shares = np.array([share if share is not None else rest[i] for i, share in enumerate(declared)])
    spent = counts > 0
    if shares[spent].sum() < 1 - 1e-9:
        shares = np.where(spent, shares / shares[spent].sum(), 0.0)
    return shares
