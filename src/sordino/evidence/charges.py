"""What a plan's rounds cost, as rows of a ledger."""

from __future__ import annotations

import math

from sordino.evidence.ledger import Ledger
from sordino.evidence.spent import Charge
from sordino.privacy.accounting.events import Release
from sordino.privacy.calibration import query_noises
from sordino.privacy.plan import Plan, plan_mechanism
from sordino.privacy.releases import (
    mu_squared_of_round,
    release_counts,
    sampled_factor,
    sampler_of,
    sampling_rates,
    visible,
)


def whole_run(plan: Plan, client: int, run_id: str) -> list[Charge]:
    """What the client pays for all rounds in which it takes part.

    Args:
      run_id: names the run in the ledger.
    """
    # A secret cohort hides who was absent, so every client pays for every round.
    rounds = (t for t in range(plan.rounds) if plan.amplified or client in plan.cohorts[t])
    return [entry for t in rounds for entry in charges(plan, client, t, run_id)]


def reserve(ledger: Ledger, plan: Plan, client: int, run_id: str, who: str) -> None:
    """Charge all rounds of a run with minibatches before its first release; nothing if that was done.

    Args:
      ledger: the ledger of the client.
      plan: the plan of the run.
      client: the number of the client.
      run_id: names the run in the ledger.
      who: who pays.

    Raises:
      OverspentError: the whole run does not fit into a limit.
    """
    sampled = any(sampling_rates(plan, noise.query)[client] < 1 for noise in query_noises(plan))
    if sampled and not ledger.reserved(run_id, who):
        ledger.reserve([entry._replace(who=who) for entry in whole_run(plan, client, run_id)])


def charges(plan: Plan, client: int, t: int, run_id: str) -> list[Charge]:
    """What the client pays for round t, one row per query.

    Args:
      run_id: names the run in the ledger.
    """
    rows = []
    for noise in query_noises(plan):
        if noise.stage != plan.stage_of(t):
            continue
        sensitivity, std = (float(value[client]) for value in visible(plan, noise))
        query, who = noise.query, f"client {client}"
        rate = float(sampling_rates(plan, query)[client])
        mechanism = plan_mechanism(plan, noise.stage, noise.number).event.name
        if rate < 1:
            sampler = sampler_of(plan)
            factor = sampled_factor(plan, query, sampler) * float(release_counts(plan, noise.stage, query)[1][client])
            times = query.calls // query.joint
            release = Release(noise.name, sensitivity * factor, std, times, rate, sampler, mechanism)
            rows.append(Charge.of(release, who, t, run_id, plan.privacy.adjacency))
            continue
        if std:
            sensitivity = std * math.sqrt(mu_squared_of_round(plan, noise, t)[client] / query.calls)
        release = Release(noise.name, sensitivity, std, query.calls, mechanism=mechanism)
        rows.append(Charge.of(release, who, t, run_id, plan.privacy.adjacency))
    return rows
