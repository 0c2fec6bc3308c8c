"""Whether a site takes part: its own rules, held against the terms before its data are touched."""

from __future__ import annotations

from sordino import secagg
from sordino.core import SordinoError
from sordino.federation.premises import Premises
from sordino.federation.refusal import Refused
from sordino.federation.terms import Terms

MOST_CLIP = 1e6


def agree(site: Premises, terms: Terms) -> None:
    config = site.config
    if config.name not in terms.names:
        raise Refused("policy", "this site is not among the named")
    try:
        spec = terms.parsed
    except SordinoError as error:
        raise Refused("policy", str(error)) from None
    allowed, rounds = config.run_epsilon or config.epsilon, int(spec.rounds or 0)
    mine = terms.names.index(config.name)
    for fine, what in (
        (terms.classes == config.classes, "its classes are not those of site.toml"),
        (spec.model in config.models, f"model {spec.model} is not among those allowed"),
        (spec.adjacency == config.adjacency, f"adjacency {spec.adjacency}; this site's is {config.adjacency}"),
        (not spec.options.get("clip", 1.0) > MOST_CLIP, "the clip is too large for sums of floats"),
        (not terms.secure or terms.colluders >= config.colluders, f"{terms.colluders} colluders are too few"),
        (not config.methods or spec.method in config.methods, f"method {spec.method} is not among those allowed"),
        (spec.trust in config.trust, f"trust {spec.trust} is not allowed"),
        (rounds <= config.most_rounds, f"{rounds} rounds; most_rounds is {config.most_rounds}"),
        (spec.delta <= config.delta, f"delta {spec.delta:g} is larger than the limit's {config.delta:g}"),
        (min(spec.epsilon, allowed) == spec.epsilon or terms.wishes.get(config.name) == config.run_epsilon,
         f"epsilon {spec.epsilon:g} where {allowed:g} is allowed, and the site's wish was left out"),
    ):  # fmt: skip
        if not fine:
            raise Refused("policy", what)
    if terms.secure:
        roster = site.roster
        if terms.roster != roster.sha256() or tuple(roster.names) != terms.names:
            raise Refused("policy", "the roster is not this site's own")
        try:
            secagg.Session.of(terms.run, roster, terms.sha256(), terms.dropouts, terms.colluders)
        except SordinoError as error:
            raise Refused("policy", str(error)) from None
    if (claimed := (terms.sizes[mine], terms.features)) != site.shape:  # only now are the data read, and counted
        raise Refused("policy", f"records and numbers of each: {claimed} are claimed; here are {site.shape}")
    try:  # only now: a large plan takes long to make
        plan = terms.plan
        own = next(group for group in plan.groups() if mine in group.clients)
        if not plan.proved:
            raise SordinoError("the plan is not proved private")
        if plan.epsilon_of(own) > allowed * (1 + 1e-9):
            raise SordinoError(f"the plan would cost {plan.epsilon_of(own):g}, and {allowed:g} is allowed")
    except SordinoError as error:
        raise Refused("policy", str(error)) from None
