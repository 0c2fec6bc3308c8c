"""Whether a site takes part in a run: it compares the terms with its own rules before it touches its data."""

from __future__ import annotations

from sordino import secagg
from sordino.errors import Refused, SordinoError
from sordino.federation.site_data import SiteData
from sordino.federation.terms import Terms
from sordino.methods import entry
from sordino.methods.bounds import CLASS_WEIGHT
from sordino.privacy import spending
from sordino.training.spec import Spec


def agree(site: SiteData, terms: Terms) -> None:
    """Check rules and data before a run begins.

    Raises:
      Refused: the terms do not fit.
    """
    check_rules(site, terms)
    check_data(site, terms)


def check_rules(site: SiteData, terms: Terms) -> None:
    """Compare the terms with site.toml. It needs no data, so it is repeated before every round."""
    config = site.config
    if config.name not in terms.names:
        raise Refused("policy", "this site is not listed in the run's sites")
    try:
        spec = terms.parsed
    except SordinoError as error:
        raise Refused("policy", str(error)) from None
    _check_options(spec)
    models, methods, trust = (", ".join(names) for names in (config.models, config.methods, config.trust))
    allowed, rounds = config.run_epsilon or config.epsilon, int(spec.rounds or 0)
    for fine, what in (
        (terms.classes == config.classes, "the classes of the terms are not those of site.toml"),
        (spec.model in config.models, f"model {spec.model}; site.toml allows {models}"),
        (spec.adjacency == config.adjacency, f"adjacency {spec.adjacency}; site.toml has {config.adjacency}"),
        (not terms.secure or terms.colluders >= config.colluders,
         f"colluders {terms.colluders}; site.toml requires {config.colluders}"),
        (terms.dropouts <= config.most_dropouts, f"dropouts {terms.dropouts}; most_dropouts is {config.most_dropouts}"),
        (not config.methods or spec.method in config.methods, f"method {spec.method}; site.toml allows {methods}"),
        (spec.trust in config.trust, f"trust {spec.trust}; site.toml allows {trust}"),
        (rounds <= config.most_rounds, f"rounds {rounds}; most_rounds is {config.most_rounds}"),
        (spec.delta <= config.delta, f"delta {spec.delta:g} is above the limit of site.toml, {config.delta:g}"),
        (min(spec.epsilon, allowed) == spec.epsilon or terms.requested_epsilons.get(config.name) == config.run_epsilon,
         f"epsilon {spec.epsilon:g} is above {allowed:g}, and the terms leave out this site's requested epsilon"),
    ):  # fmt: skip
        if not fine:
            raise Refused("policy", what)
    if terms.secure:
        roster = site.roster
        if terms.roster != roster.sha256() or tuple(roster.names) != terms.names:
            raise Refused("policy", "the roster is not the one in this site's roster.toml")
        try:
            secagg.Session.of(terms.run, roster, terms.sha256(), terms.dropouts, terms.colluders)
        except SordinoError as error:
            raise Refused("policy", str(error)) from None


def _check_options(spec: Spec) -> None:
    """Every option is declared by its method, and lies in the declared range."""
    method = entry(spec.method)
    for name, default in method.options.items():
        value = spec.options.get(name, default)
        if (bound := method.bounds.get(name)) is None:
            reason = (
                f"{spec.method} does not declare what its option {name} is, so no site can check {name} = {value!r}"
            )
            raise Refused("policy", f"{reason}; declare it in the method's registry entry")
        if not bound.allows(value):
            raise Refused("policy", f"{name} = {value!r}; {spec.method} declares {bound}")
    for weight in spec.model_options.get("class_weights") or ():
        if not CLASS_WEIGHT.allows(weight):
            raise Refused("policy", f"class_weights: {weight!r}; each must be {CLASS_WEIGHT}")


def check_data(site: SiteData, terms: Terms) -> None:
    """Compare the terms with the data, and the cost of the plan with the allowed epsilon."""
    mine = terms.names.index(site.config.name)
    if (claimed := (terms.sizes[mine], terms.features)) != site.shape:  # the data are read and counted only now
        raise Refused("policy", f"records and features: the terms state {claimed}, the data have {site.shape}")
    try:  # only now, because a large plan takes long to calibrate
        plan, allowed = terms.plan, site.config.run_epsilon or site.config.epsilon
        own = next(group for group in spending.groups(plan) if mine in group.clients)
        if not plan.proved:
            raise SordinoError("the plan is not proved to be private")
        if spending.epsilon_of(plan, own) > allowed * (1 + 1e-9):
            raise SordinoError(f"the plan costs epsilon {spending.epsilon_of(plan, own):g}, and {allowed:g} is allowed")
    except SordinoError as error:
        raise Refused("policy", str(error)) from None
