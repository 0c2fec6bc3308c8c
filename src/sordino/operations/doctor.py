"""Checks of a site before it joins, and before any budget is spent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from sordino import files
from sordino.core import Trust
from sordino.errors import LedgerError, OverspentError, Refused, SordinoError, count, only_in
from sordino.evidence.ledger import ANY_CHOICE, Ledger
from sordino.evidence.spent import Charge
from sordino.federation import promises
from sordino.federation import tls as link_files
from sordino.federation.config import FederationConfig, SiteConfig
from sordino.federation.derived import stated
from sordino.federation.folders import proposed
from sordino.federation.policy import agree, broken_rules
from sordino.federation.site import Site
from sordino.federation.site_data import read_roster
from sordino.federation.terms import Terms
from sordino.federation.tls import AUTHORITY_KEY, RENEW_DAYS, Tls, days_left, end_of
from sordino.federation.weights import folder_hash
from sordino.federation.witness import older, read
from sordino.privacy import spending
from sordino.privacy.participation import FULL
from sordino.secagg import Identity, Roster


class Check(NamedTuple):
    """The outcome of one check."""

    fine: bool
    about: str  # what was checked: a file, a key, the budget
    says: str
    soon: bool = False  # fine today, but somebody must act soon
    note: bool = False  # fine, with something to decide or to do


def doctor(path: Path, coordinator: Path | None = None, authority: Path | None = None) -> Iterator[Check]:
    """Check everything that a site needs before it joins: data, keys, roster, budget and the link's authority.

    Args:
      path: the site's site.toml.
      coordinator: a coordinator's folder, to check whether the site would agree to its run and can afford it.
      authority: the coordinator's tls/authority.pem; None for authority.pem beside site.toml, if it is there.

    Yields:
      One `Check` per item. Nothing is written.

    Raises:
      SordinoError: site.toml cannot be read.
    """
    config = SiteConfig.read(path)
    yield Check(True, "site.toml", f"{config.name}, limit ε = {config.epsilon:g} at δ = {config.delta:g} over all runs")
    if config.seed is not None:
        yield Check(False, "seed", "the noise is reproducible, so nothing is certified; remove seed from site.toml")
    if not files.is_private(config.folder):
        says = f"others on this machine can list it; chmod 700 {config.folder} hides it"
        yield Check(True, "folder", says, note=True)
    site = None
    try:
        candidate = Site(config, only_looking=True)
        data = candidate.load()
        label = f"{len(data.classes)} classes" if data.classes else "a number as label"
        label = "texts that are learned" if data.sequences else label
        persons = "" if data.person is None else f" of {candidate.records:,} persons"
        rows = f"{len(data.y_train):,} training records{persons} ({len(data.y_test):,} more are held out for testing)"
        yield Check(True, "data", f"{rows}, {data.x_train.shape[1]} features, {label}")
        yield Check(True, "data", f"identity {candidate.dataset_id}")
        if config.weights_folder:
            yield Check(True, "weights", f"hash {grouped(folder_hash(config.weights_folder))}")
        site = candidate
    except (SordinoError, OSError) as error:
        yield Check(False, "data", f"{error}")
    yield from _keys(config)
    if authority is not None or (config.folder / "authority.pem").exists():
        path = authority or config.folder / "authority.pem"
        yield _certificate(path, "ask the coordinator for the new one")
        if coordinator is not None:
            yield from _same_authority(path, Tls.of(coordinator / "tls").authority)
    if site is not None:
        yield from _budget(site, coordinator)


def coordinator_doctor(folder: Path) -> Iterator[Check]:
    """Check a coordinator's folder before `coordinate`: the run, the sites' keys, and the link's certificates.

    Args:
      folder: the coordinator's folder.

    Yields:
      One `Check` per item. Nothing is written.

    Raises:
      SordinoError: federation.toml cannot be read.
    """
    config = FederationConfig.read(folder / "federation.toml")
    yield Check(True, "federation.toml", f"{len(config.sites)} sites: {', '.join(config.sites)}")
    try:
        terms = proposed(folder, [1000] * len(config.sites))
        yield Check(
            True, "spec.toml", f"{terms.plan.method.name}, {terms.plan.rounds} rounds, {terms.resolved.spec.trust}"
        )
        if terms.weights:
            yield Check(True, "weights", f"hash {grouped(terms.weights)}")
        needed = terms.secure
    except SordinoError as error:
        yield Check(False, "spec.toml", str(error))
        needed = False
    for name in config.sites:
        if not (folder / "nodes" / f"{name}.pub").is_file():
            yield Check(False, "nodes", f"nodes/{name}.pub is missing; copy the node.pub of that site to it")
    try:
        roster = Roster.read(config.path(config.roster))
        unlike = only_in(roster.names, config.sites, "it", "federation.toml")
        says = f"{count(len(roster.names), 'site')}, hash {grouped(roster.sha256())}"
        yield Check(not unlike, "roster.toml", f"{says}; {unlike}" if unlike else says)
    except (SordinoError, OSError) as error:
        yield Check(
            not needed, "roster.toml", f"{error} Secure aggregation needs it; without it, hellos are not signed"
        )
    yield from _link(folder / "tls")


def _link(folder: Path) -> Iterator[Check]:
    """Whether the link has its certificates and keys, whether they fit together, and when they end."""
    if link_files.is_empty(folder):
        yield Check(True, "tls", "no certificates yet; `sordino federate coordinate` makes them")
        return
    tls, new = Tls.of(folder), link_files.new_authority(folder)
    try:
        incomplete = link_files.incomplete(folder)
        problem = incomplete or link_files.misfit(folder)
    except SordinoError as error:
        problem = incomplete = str(error)
    if problem:
        yield Check(False, "tls", problem.removeprefix("tls: "))
    if incomplete:
        return
    yield _certificate(tls.authority, new)
    renewable = (folder / AUTHORITY_KEY).exists()
    yield _certificate(tls.certificate, "start `coordinate` again, which renews it" if renewable else new)
    if not renewable:
        says = "it is not here, so link.pem cannot be renewed; bring it back before link.pem ends"
        yield Check(True, AUTHORITY_KEY, says, soon=True)


def _certificate(path: Path, remedy: str) -> Check:
    """Whether a certificate is valid, and for how long."""
    try:
        left, end = days_left(path), f"{end_of(path):%d %b %Y}"
    except SordinoError as error:
        return Check(False, path.name, str(error))
    if left <= 0:
        return Check(False, path.name, f"it ended on {end}; {remedy}")
    if left < RENEW_DAYS:
        return Check(True, path.name, f"it ends on {end}, in {left:.0f} days; {remedy}", soon=True)
    return Check(True, path.name, f"valid until {end}")


def _same_authority(path: Path, theirs: Path) -> Iterator[Check]:
    """Whether a site's authority is the one of the coordinator's folder, where both can be read."""
    try:
        ours, wanted = link_files.read(path), link_files.read(theirs)
    except SordinoError:
        return  # told already, or `coordinate` has not made it yet
    if wanted[0] not in ours:
        says = f"'{path}' is not the coordinator's '{theirs}', so the link would not be trusted; copy it again"
        yield Check(False, "authority.pem", says)


def _keys(config: SiteConfig) -> Iterator[Check]:
    try:
        identity = Identity.load(config.path(config.identity))
        fits = identity.name == config.name
        yield Check(fits, "identity.key", f"key of {identity.name}" + ("" if fits else f", not of {config.name}"))
        if not (config.folder / "node").exists():
            yield Check(False, "node", "the key for the link is missing; `sordino federate keys` creates it")
        if not files.is_private(config.path(config.identity)):
            yield Check(False, "identity.key", f"others on this machine can read it; run chmod 600 {config.identity}")
    except (SordinoError, OSError) as error:
        yield Check(False, "identity.key", f"{error}")
        return
    try:
        roster = read_roster(config)
        known = config.name in roster.names and roster.card(config.name) == identity.card
        problem = "" if known else "; it lacks this site's card, or holds another one"
        yield Check(known, "roster.toml", f"{len(roster.names)} sites, hash {grouped(roster.sha256())}{problem}")
    except (SordinoError, OSError) as error:
        needed = Trust.SECURE_AGGREGATION in config.trust
        yield Check(not needed, "roster.toml", f"{error} Secure aggregation needs it")


def grouped(digits: str) -> str:
    """A hash to be read out: all digits, because whoever collects the cards could make a part of them equal.

    >>> grouped("0123456789abcdef" * 4)
    '0123 4567 89ab cdef  0123 4567 89ab cdef  0123 4567 89ab cdef  0123 4567 89ab cdef'
    """
    lines = [digits[i : i + 16] for i in range(0, len(digits), 16)]
    return "  ".join(" ".join(line[i : i + 4] for i in range(0, len(line), 4)) for line in lines)


def _budget(site: Site, coordinator: Path | None) -> Iterator[Check]:
    config, terms = site.config, None
    if coordinator is not None:
        try:
            terms = _offered(site, coordinator)
            agree(site, terms)
            yield Check(True, "terms", "site.toml allows everything that the federation asks for")
            if config.ask:
                says = "a person approves the run first: sordino federate approve SITE.toml --yes STUDY"
                yield Check(True, "ask", says, note=True)
            if terms.requested_epsilons:
                yield Check(
                    True,
                    "run_epsilon",
                    f"this site gets the ε = {config.run_epsilon:g} that it requests, where the federation has "
                    f"{terms.resolved.privacy.epsilon:g}",
                )
        except Refused as refusal:
            broken = [] if terms is None else broken_rules(site, terms)
            for detail in broken if refusal.detail in broken else [refusal.detail, *broken]:
                yield Check(False, "terms", f"the site would refuse: {detail}{_hint(config, terms)}")
            terms = None
        except SordinoError as error:
            yield Check(False, "terms", str(error))
    path = config.path(config.ledger)
    if not path.exists() and read(site.witness) is not None:
        yield Check(False, "ledger.db", f"it is missing, and the witness {site.witness} knows of one; put it back")
        return
    if not path.exists():
        yield Check(True, "ledger.db", "none yet; `sordino federate join` creates it with the limit of site.toml")
        yield from _any_choice(config, None, terms)
        if terms is not None and (cost := _cost(config, terms)) > config.epsilon:
            yield Check(False, "budget", f"the run costs ε = {cost:.4g}, above the limit {config.epsilon:g}")
        return
    entries: list[Charge] = []
    try:
        entries = promises.of_open_studies(config)
    except SordinoError as error:
        yield Check(False, "runs", f"{error} What open studies were promised is not known")
    with Ledger(path, read_only=True) as ledger:
        found = list(_ledger(site, ledger))
        yield from found
        if found[0].fine:
            yield from _any_choice(config, ledger, terms)
        if terms is None or not found[0].fine:
            return
        promised, who, says = ledger.unpaid(entries), _account(ledger), f"the run costs ε = {_cost(config, terms):.4g}"
        try:
            if _run_of(coordinator) in {entry.plan for entry in entries}:
                ledger.afford(promised)
                says = "the run has begun here, and what is not spent of it yet is promised to it, and fits"
            else:
                ledger.afford([*promised, *promises.cost(terms, terms.names.index(config.name), who)])
                says += ", which fits if all sites have this site's size"
            yield Check(True, "budget", says)
        except OverspentError as error:
            left = ledger.left(who, (config.epsilon, config.delta), promised=promised) or 0.0
            yield Check(False, "budget", f"{error} Without minibatches, a run of up to ε = {left:.4g} fits.")


def _run_of(coordinator: Path | None) -> str:
    """The name of the run that a coordinator has begun; empty if it has begun none."""
    try:
        return "" if coordinator is None else Terms.read((coordinator / "run" / "terms.json").read_text("utf-8")).run
    except (OSError, SordinoError):
        return ""


def _cost(config: SiteConfig, terms: Terms) -> float:
    """The epsilon that the whole run costs this site."""
    return spending.client_epsilon(terms.plan, terms.names.index(config.name))


def _hint(config: SiteConfig, terms: Terms | None) -> str:
    """What a site may do if the federation's epsilon is above its own limit."""
    if terms is None or config.run_epsilon is not None or terms.resolved.privacy.epsilon <= config.epsilon:
        return ""
    return (
        f"; run_epsilon = {config.epsilon} in site.toml requests that ε for this site, whose messages then count less"
    )


def _ledger(site: Site, ledger: Ledger) -> Iterator[Check]:
    config = site.config
    try:
        problems = [older(ledger, site.witness)] if older(ledger, site.witness) else ledger.audit()
    except LedgerError as error:
        problems = [str(error)]
    yield Check(not problems, "ledger.db", "complete" if not problems else problems[0])
    if problems:  # what was spent is not known from such a ledger
        return
    for epsilon, delta in ledger.limits():
        if (config.epsilon, config.delta) > (epsilon, delta) and config.epsilon > epsilon:
            yield Check(False, "epsilon", f"the ledger's limit is {epsilon:g}; it can be lowered, never raised")
    accounts = ledger.accounts()
    if ledger.people() and not accounts:
        yield Check(False, "ledger.db", "its charges belong to no account of this site; is it another site's ledger?")
    spent = ledger.spent_epsilon(_account(ledger), config.delta)
    most = min([config.epsilon, *(epsilon for epsilon, _ in ledger.limits())])
    yield Check(spent < most, "budget", f"ε = {spent:.4g} of {most:g} spent{ledger.caveat(_account(ledger))}")
    for old, new in pairwise(accounts):
        before = ledger.spent_epsilon(old.who, config.delta)
        says = f"since {new.time[:16]} runs are paid from another account: {new.why}. Records that were there before"
        yield Check(True, "ledger.db", f"{says} have also spent ε = {before:.4g}, and no limit adds the two up")


def _any_choice(config: SiteConfig, ledger: Ledger | None, terms: Terms | None) -> Iterator[Check]:
    """How minibatches of later runs count, where the first run has none."""
    stated = {kind: time for time, kind, _ in ledger.statements()} if ledger is not None else {}
    problem = ledger.too_late_for_any_choice() if ledger is not None else ""
    about = "any_choice"
    if ANY_CHOICE in stated:
        yield Check(True, about, f"stated on {stated[ANY_CHOICE][:16]}: minibatches of later runs count as such")
    elif config.any_choice and problem:
        yield Check(False, about, problem.removeprefix("any_choice: "))
    elif config.any_choice:
        yield Check(True, about, "`sordino federate join` states in the ledger that minibatches count as such")
    elif terms is not None and terms.plan.sampling.kind == FULL and (ledger is None or not ledger.people()):
        says = (
            "this first run uses all records in each round. If later runs may use minibatches, set any_choice = true "
            "in site.toml before it: otherwise a minibatch will cost as much as all records"
        )
        yield Check(True, about, says, note=True)


def _account(ledger: Ledger) -> str:
    """Who pays for the next run; nobody in a ledger that no site has used."""
    accounts = ledger.accounts()
    return accounts[-1].who if accounts else "nobody"


def _offered(site: Site, coordinator: Path) -> Terms:
    """The terms that the federation would propose if all sites had the size of this one."""
    config, federation = site.config, FederationConfig.read(coordinator / "federation.toml")
    if config.name not in federation.sites:
        raise SordinoError(f"federation.toml: it does not list {config.name}; ask the coordinator to add this site.")
    terms = proposed(coordinator, [site.records] * len(federation.sites))
    if config.run_epsilon is not None and config.run_epsilon < terms.resolved.privacy.epsilon:
        terms = replace(terms, requested_epsilons={config.name: config.run_epsilon})
    if not terms.secure:
        return stated(terms)
    if unlike := only_in(site.roster.names, federation.sites, "it", "federation.toml"):
        raise SordinoError(f"roster.toml: {unlike}; both must list the same sites.")
    theirs = coordinator / federation.roster
    if theirs.exists() and (other := Roster.read(theirs)).sha256() != site.roster.sha256():
        names = only_in(site.roster.names, other.names, "this site", "the coordinator")
        raise SordinoError(
            f"roster.toml: the coordinator's is not this site's: {names or 'a key or the order differs'}; agree on one "
            "file, and compare its hash with the other sites."
        )
    return stated(replace(terms, names=site.roster.names, roster=site.roster.sha256()))
