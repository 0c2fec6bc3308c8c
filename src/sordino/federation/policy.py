"""Whether a site takes part in a run: it compares the terms with its own rules before it touches its data."""

from __future__ import annotations

from sordino import secagg
from sordino.core import Unit
from sordino.data.schema import Schema
from sordino.errors import Refused, SordinoError, listed, only_in
from sordino.federation import counting
from sordino.federation.derived import check_derived
from sordino.federation.site_data import SiteData
from sordino.federation.terms import Terms, schema_hash
from sordino.federation.weights import check_weights
from sordino.methods import entry
from sordino.methods.bounds import CLASS_WEIGHT
from sordino.models.registry import balanced
from sordino.privacy import spending
from sordino.privacy.participation import FULL
from sordino.training.resolved import ResolvedSpec

MOST_REQUESTED = 64  # different requested epsilons of a run with minibatches; each is calibrated before a site answers


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
        resolved = terms.resolved
    except SordinoError as error:
        raise Refused("policy", str(error)) from None
    _check_options(resolved)
    if refusals := broken_rules(site, terms):
        raise Refused("policy", refusals[0])
    if terms.secure:
        roster = site.roster_of(terms)
        if terms.roster != roster.sha256() or tuple(roster.names) != terms.names:
            names = only_in(roster.names, terms.names, "this site", "the coordinator")
            raise Refused(
                "policy",
                "the coordinator's roster.toml, the list of all sites and their public keys, is not this site's: "
                + (names or f"a key or the order differs (hash {terms.roster[:16]} there, {roster.sha256()[:16]} here)")
                + "; agree on one file: compare the hash that `sordino federate doctor` prints with the other sites",
            )
        try:
            secagg.Session.of(terms.run, roster, terms.sha256(), terms.dropouts, terms.colluders)
        except SordinoError as error:
            raise Refused("policy", str(error)) from None


def broken_rules(site: SiteData, terms: Terms) -> list[str]:
    """Every rule of site.toml that the terms break, in words."""
    config, resolved = site.config, terms.resolved
    models, methods, trust = (", ".join(names) for names in (config.models, config.methods, config.trust))
    allowed, rounds = config.run_epsilon or config.epsilon, resolved.rounds
    privacy, model, method = resolved.privacy, resolved.model.name, resolved.method_name
    rules = (
        (
            terms.schema == schema_hash(config.table_schema),
            f"the schema of the terms is not this site's schema.toml: {_schema_differs(terms, config.table_schema)}; "
            "columns, ranges and levels must be the same",
        ),
        (terms.found == counting.found_in(config.table_schema),
         "the terms say of other parts of the schema that noised counts found them"),
        (bool(terms.cells) == bool(config.table_schema is not None and config.table_schema.unknown)
         and (not terms.cells or terms.cells == counting.cells_of(config.table_schema)),
         "the schema leaves other ranges, levels or shares open than the terms say: a training needs a complete one"),
        (terms.classes == config.classes, "the classes of the terms are not those of site.toml"),
        (model in config.models, f"model {model}; site.toml allows {models}"),
        (config.text is not None or not resolved.model.entry.causal,
         f"model {model} learns the text of a table, and site.toml names no column of text"),
        (config.text is None or resolved.model.entry.reads == "text",
         f"model {model} does not read text, and site.toml names the column of text '{config.text}'"),
        (privacy.adjacency == config.adjacency, f"adjacency {privacy.adjacency}; site.toml has {config.adjacency}"),
        (not terms.secure or terms.colluders >= config.colluders,
         f"colluders {terms.colluders}; site.toml requires {config.colluders}"),
        (terms.dropouts <= config.most_dropouts, f"dropouts {terms.dropouts}; most_dropouts is {config.most_dropouts}"),
        (not config.methods or method in config.methods, f"method {method}; site.toml allows {methods}"),
        (privacy.trust in config.trust, f"trust {privacy.trust}; site.toml allows {trust}"),
        (not terms.evaluation or terms.evaluation <= (config.evaluation_epsilon or 0.0),
         f"evaluation {terms.evaluation:g}; site.toml allows {config.evaluation_epsilon or 'none'}"),
        (resolved.sampling.kind == FULL or len(set(terms.requested_epsilons.values())) <= MOST_REQUESTED,
         f"sites request {len(set(terms.requested_epsilons.values()))} different epsilons; with minibatches each takes "
         f"a calibration of its own, and {MOST_REQUESTED} are allowed: round them"),
        (rounds <= config.most_rounds, f"rounds {rounds}; most_rounds is {config.most_rounds}"),
        (privacy.delta <= config.delta, f"delta {privacy.delta:g} is above the limit of site.toml, {config.delta:g}"),
        (privacy.epsilon <= allowed or terms.requested_epsilons.get(config.name) == config.run_epsilon,
         f"epsilon {privacy.epsilon:g} is above {allowed:g}, and the terms leave out this site's requested epsilon"),
    )  # fmt: skip
    return [what for fine, what in rules if not fine] + _weights_differ(terms, config.weights_folder)


def _schema_differs(terms: Terms, schema: Schema | None) -> str:
    """In which parts the schema of the terms and that of this site differ. Both are public."""
    if not terms.schema or schema is None:
        return "there is none " + ("in the terms" if schema else "here, so put it beside site.toml and name it there")
    ours, theirs = schema.part_hashes(), terms.schema_parts
    others = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    said = [only_in(ours, theirs, "this site", "the coordinator"), f"other words in {listed(others)}" * bool(others)]
    return "; ".join(filter(None, said)) or "the columns have another order"


def _weights_differ(terms: Terms, folder: str) -> list[str]:
    """Why this site's folder of weights is not that of the terms; empty if it is."""
    try:
        check_weights(terms.weights, folder)
    except SordinoError as error:
        return [str(error)]
    return []


def _check_options(resolved: ResolvedSpec) -> None:
    """Every option is declared by its method, and lies in the declared range."""
    method = entry(resolved.method_name)
    for name, default in method.options.items():
        value = resolved.options.get(name, default)
        if (bound := method.bounds.get(name)) is None:
            raise Refused(
                "policy",
                f"{resolved.method_name} does not declare what its option {name} is, so no site can check "
                f"{name} = {value!r}; declare it in the method's registry entry",
            )
        if not bound.allows(value):
            raise Refused("policy", f"{name} = {value!r}; {resolved.method_name} declares {bound}")
    weights = resolved.model.options.get("class_weights") or ()
    if isinstance(weights, str):
        weights = balanced(resolved.model.options.get("prevalence") or ())
    for weight in weights:
        if not CLASS_WEIGHT.allows(weight):
            raise Refused("policy", f"class_weights: {weight!r}; each must be {CLASS_WEIGHT}")


def check_data(site: SiteData, terms: Terms) -> None:
    """Compare the terms with the data, and the cost of the plan with the allowed epsilon, and build the model.

    Args:
      site: its own rules and data.
      terms: what the coordinator proposes.

    Raises:
      Refused: the terms do not fit, or no plan or model follows from them.
    """
    if terms.resolved.privacy.unit is not site.unit:
        needs = "person, because its schema names a person column" if site.unit is Unit.PERSON else str(site.unit)
        raise Refused(
            "policy", f"unit: the terms protect a {terms.resolved.privacy.unit}, this site needs unit = {needs}"
        )
    number = terms.names.index(site.config.name)
    if (claimed := (terms.sizes[number], terms.features)) != site.shape:  # the data are read and counted only now
        raise Refused("policy", f"records and features: the terms state {claimed}, the data have {site.shape}")
    if terms.evaluation and terms.tests[number] != site.tests:
        raise Refused(
            "policy", f"tests: the terms state {terms.tests[number]} test records, the data have {site.tests}"
        )
    try:  # only now, because a large plan takes long to calibrate
        terms.resolved.check_images(terms.features, site.record_shape)
        plan, allowed = terms.plan, site.config.run_epsilon or site.config.epsilon
        _ = terms.model  # before anything is written: an option may lie beyond what the model allows
        if not plan.proved:
            raise SordinoError("the plan is not proved to be private")
        if (cost := spending.client_epsilon(plan, number)) > allowed * (1 + 1e-9):
            raise SordinoError(f"the plan costs epsilon {cost:g}, and {allowed:g} is allowed")
        check_derived(terms)
    except SordinoError as error:
        raise Refused("policy", str(error)) from None
