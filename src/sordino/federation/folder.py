"""Folders of a federation: the coordinator's, a site's, and a whole one on this machine to see it work."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sordino.core import MOST_EPSILON
from sordino.data.partition import split
from sordino.data.sources import Dataset, load
from sordino.errors import OverspentError, Refused, SordinoError
from sordino.federation.config import Federation, SiteConfig
from sordino.federation.flower.keys import node_key
from sordino.federation.handler import HANDLER
from sordino.federation.policy import agree
from sordino.federation.site import Site
from sordino.federation.terms import NAME, Terms, federated, written
from sordino.privacy import calibration, spending
from sordino.privacy.evidence.charges import charges
from sordino.privacy.evidence.ledger import Ledger
from sordino.secagg import Identity, Roster

SPEC = """\
# What is trained, and how private it is. Every site reads this and decides for itself.
method = "{method}"
rounds = {rounds}
epsilon = {epsilon}
delta = 1e-5
trust = "{trust}"
"""
FEDERATION = """\
# Whom the coordinator waits for, and the public shape of their data.
sites = {sites}
features = {features}
classes = {classes}
dropouts = {dropouts}       # sites that may fail in a round, which goes on without them
colluders = {colluders}      # sites that may tell the server what they know: the noise of the others must do
deadline = 120.0   # seconds a round waits for a site
"""
SITE = """\
# All that this site decides for itself. Nothing in it comes from the coordinator.
name = "{name}"
data = "{data}"          # .csv, .parquet or .npz, beside this file or anywhere on this machine
{label}classes = {classes}
epsilon = {epsilon}      # limit over all runs on these data, kept in ledger.db
delta = 1e-5
# run_epsilon = 1.0     # of any single run; where the federation's is larger, this site adds more noise
# methods = ["dp-fedsofim"]
# trust = ["secure-aggregation"]
# most_rounds = 1000
"""
README = """\
# A federation

`spec.toml` says what is trained, `federation.toml` with whom. The commands below are for one coordinator and
{count} sites ({names}), each on a machine of its own with `pip install 'sordino[flower]'`.

## At each site, once

    sordino federate keys NAME SITE_FOLDER --data FILE --label COLUMN --classes A,B --limit 8

makes keys, and prints the site's card. Send the card (public) and `SITE_FOLDER/node.pub` to the coordinator, and look
through `site.toml`: data, classes, limit. When all cards are collected in one `roster.toml`, put it beside `site.toml`
and compare its hash, which `sordino federate doctor SITE_FOLDER/site.toml` prints, with the other sites over the
telephone: peers' keys come from this file, never from the server.

## At the coordinator

    # roster.toml holds all cards; nodes/ holds every site's node.pub as NAME.pub
    sordino federate coordinate {folder} --host coordinator.example.org

It writes `tls/authority.pem` at the first start (send it to the sites), then waits for them, trains, and leaves
`run/model.safetensors`, `run/certificate.json` and `run/statement.md`. Stopped, or failed and mended, it goes on where
it was: same command. For another run, give `run/` another name.

## At each site, for the run

    sordino federate join SITE_FOLDER/site.toml --link coordinator.example.org:8000 --authority authority.pem

Afterwards `SITE_FOLDER/runs/` has the site's own certificate and statement; `sordino ledger show SITE_FOLDER/ledger.db`
tells what was spent.

The link's port also serves Flower's control interface, which has no login: do not open it to the sites directly, but
put a proxy before it that passes `/v1/fleet/` alone (docs/federation.md of sordino).
"""


def init(
    folder: Path,
    names: Sequence[str],
    *,
    features: int,
    classes: Sequence[str],
    method: str = "dp-fedsofim",
    rounds: int = 20,
    epsilon: float = 8.0,
    trust: str = "secure-aggregation",
    dropouts: int = 0,
    colluders: int = 1,
    more: dict[str, Any] | None = None,
) -> list[Path]:
    """The coordinator's folder: spec.toml, federation.toml, a Flower app, and a README with the commands.

    more: other keys of spec.toml.
    """
    import tomli_w

    from sordino.federation.flower.processes import write_app

    for name in names:
        if not NAME.fullmatch(name):
            raise SordinoError(f"sites: '{name}' must be letters, digits, dots and dashes.")
    if len(classes) == 1 or len(set(classes)) < len(classes):
        raise SordinoError(f"classes: {', '.join(classes)}; name two or more, each once, or none for a quantity.")
    if folder.exists() and any(folder.iterdir()):
        raise SordinoError(f"'{folder}' is not empty; name another directory.")
    texts = {
        "spec.toml": SPEC.format(method=method, rounds=rounds, epsilon=epsilon, trust=trust)
        + tomli_w.dumps(more or {}),
        "federation.toml": FEDERATION.format(
            sites=json.dumps(list(names)),
            features=features,
            classes=json.dumps(list(classes)),
            dropouts=dropouts,
            colluders=colluders,
        ),
        "README.md": README.format(count=len(names), names=", ".join(names), folder=folder),
    }
    with tempfile.TemporaryDirectory() as trial:  # what cannot be is refused before anything is made
        for place in (Path(trial), folder):
            place.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (place / name).write_text(text, encoding="utf-8")
            proposed(place, [1000] * len(names))
    (folder / "nodes").mkdir()
    write_app(folder / "app")
    return [folder / name for name in (*texts, "app")]


def proposed(folder: Path, sizes: Sequence[int], names: Sequence[str] | None = None) -> Terms:
    """The terms that a coordinator's folder would propose to sites of these sizes; the plan is calibrated."""
    from sordino.settings import read_toml

    config = Federation.read(folder / "federation.toml")
    terms = Terms(
        run="0" * 32,
        spec=written(federated(read_toml(folder / config.spec))),
        names=tuple(names or config.sites),
        sizes=tuple(sizes),
        requested_epsilons={},
        features=config.features,
        classes=config.classes,
        dropouts=config.dropouts,
        colluders=config.colluders,
    )
    calibration.query_noises(terms.plan)
    return terms


def make_site(
    folder: Path, name: str, *, data: str, classes: Sequence[str], epsilon: float, label: str = ""
) -> Identity:
    """A site's folder with keys and a site.toml to fill in."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "identity.key").exists():
        identity = Identity.load(folder / "identity.key")
        if identity.name != name:
            raise SordinoError(f"name: '{folder}' is the folder of {identity.name}; name another for {name}.")
        return identity
    if not 0 < epsilon <= MOST_EPSILON:
        raise SordinoError(f"limit: {epsilon:g} must lie in (0, {MOST_EPSILON:g}].")
    identity = Identity.make(name)
    identity.save(folder / "identity.key")
    node_key(folder / "node")
    path = folder / "site.toml"
    if not path.exists():
        own = f'label = "{label}"\n' if label else ""
        text = SITE.format(name=name, data=data, label=own, classes=json.dumps(list(classes)), epsilon=epsilon)
        path.write_text(text, encoding="utf-8")
    return identity


# -------------------------------------------------------------------------------------------------------------- doctor


def doctor(path: Path, coordinator: Path | None = None) -> Iterator[tuple[bool, str]]:
    """(fine, sentence) for each thing a site needs before it joins: data, keys, roster, budget."""
    config = SiteConfig.read(path)
    yield True, f"site.toml: {config.name}, limit ε = {config.epsilon:g} at δ = {config.delta:g} over all runs"
    if config.seed is not None:
        yield False, "seed: noise that anyone can repeat; nothing will be certified. Take it out"
    site = None
    try:
        here = Site(config, only_looking=True)
        data = here.load()
        kinds = f"{len(data.classes)} classes" if data.classes else "a quantity"
        yield True, f"data: {len(data.y_train):,} training records, {data.x_train.shape[1]} features, {kinds}"
        yield True, f"data: identity {here.dataset_id}"
        site = here
    except (SordinoError, OSError) as error:
        yield False, f"{error}"
    yield from _keys(config)
    if site is not None:
        yield from _budget(site, coordinator)


def _keys(config: SiteConfig) -> Iterator[tuple[bool, str]]:
    try:
        identity = Identity.load(config.path(config.identity))
        yield identity.name == config.name, f"identity.key: of {identity.name}"
        if not (config.folder / "node").exists():
            yield (
                False,
                "node: the key that lets this site into the link is not there; `sordino federate keys` makes it",
            )
        mode = config.path(config.identity).stat().st_mode & 0o077
        if mode:
            yield False, f"identity.key: others on this machine can read it; chmod 600 {config.identity}"
    except (SordinoError, OSError) as error:
        yield False, f"{error}"
        return
    try:
        roster = Roster.read(config.path(config.roster))
        known = config.name in roster.names and roster.card(config.name) == identity.card
        yield (
            known,
            f"roster.toml: {len(roster.names)} sites, hash {roster.sha256()[:16]}"
            + ("" if known else "; this site's card is not in it, or another one"),
        )
    except (SordinoError, OSError) as error:
        yield "secure-aggregation" not in config.trust, f"{error} It is needed for secure aggregation"


def _budget(site: Site, coordinator: Path | None) -> Iterator[tuple[bool, str]]:
    config, terms = site.config, None
    if coordinator is not None:
        try:
            terms = _offered(site, coordinator)
            agree(site, terms)
            yield True, "the federation asks for nothing that site.toml does not allow"
            if terms.requested_epsilons:
                asked = terms.parsed.epsilon
                yield True, f"run_epsilon: this site's wish for {config.run_epsilon:g} is met, where {asked:g} is asked"
        except Refused as no:
            yield False, f"the site would refuse: {no.detail}"
            terms = None
        except SordinoError as error:
            yield False, str(error)
    path = config.path(config.ledger)
    if not path.exists():
        yield True, "ledger.db: none yet; the first start of `join` makes it, with the limit of site.toml"
        if terms is not None and spending.epsilon(terms.plan) > config.epsilon:
            yield (
                False,
                f"budget: the run costs ε = {spending.epsilon(terms.plan):.4g}, the limit is {config.epsilon:g}",
            )
        return
    with Ledger(path) as ledger:
        problems = ledger.audit()
        yield not problems, "ledger.db: whole" if not problems else f"ledger.db: {problems[0]}"
        for epsilon, delta in ledger.limits():
            if (config.epsilon, config.delta) > (epsilon, delta) and config.epsilon > epsilon:
                yield False, f"epsilon: the ledger's limit is {epsilon:g}; it can be lowered, never raised"
        spent = ledger.spent_epsilon(site.dataset_id, config.delta)
        most = min([config.epsilon, *(epsilon for epsilon, _ in ledger.limits())])
        yield spent < most, f"budget: ε = {spent:.4g} of {most:g} spent on these data"
        if others := [who for who in ledger.people() if who != site.dataset_id]:
            new = "" if spent else "; these data have none yet. Was data.key lost, or the file merely rewritten?"
            kept = f"ledger.db: {len(others)} other contents of the data have accounts of their own"
            yield bool(spent), f"{kept}, and what was spent there on the same records counts too{new}"
        if terms is None:
            return
        try:
            mine = terms.names.index(config.name)
            entries = [e for t in range(terms.plan.rounds) for e in charges(terms.plan, mine, t, terms.run)]
            ledger.afford([entry._replace(who=site.dataset_id) for entry in entries])
            yield (
                True,
                f"budget: the run (ε = {spending.epsilon(terms.plan):.4g}) can be afforded, if sites are like this one",
            )
        except OverspentError as error:
            yield False, f"budget: {error}"


def _offered(site: Site, coordinator: Path) -> Terms:
    """What the federation would propose, were all sites as large as this one."""
    config, federation = site.config, Federation.read(coordinator / "federation.toml")
    if config.name not in federation.sites:
        raise SordinoError(f"federation.toml: it does not name {config.name}.")
    terms = proposed(coordinator, [site.records] * len(federation.sites))
    requested_epsilon = config.run_epsilon
    if requested_epsilon is not None and requested_epsilon < terms.parsed.epsilon:
        terms = replace(terms, requested_epsilons={config.name: requested_epsilon})
    if not terms.secure:
        return terms
    if set(site.roster.names) != set(federation.sites):
        raise SordinoError(f"roster.toml: it names {', '.join(site.roster.names)}, federation.toml others.")
    theirs = coordinator / federation.roster
    if theirs.exists() and Roster.read(theirs).sha256() != site.roster.sha256():
        raise SordinoError("roster.toml: the coordinator's is another; compare the hashes.")
    return replace(terms, names=site.roster.names, roster=site.roster.sha256())


# ------------------------------------------------------------------------------------------------------- all on one


def demonstration(
    folder: Path,
    count: int,
    *,
    spec: dict[str, Any],
    data: str = "digits",
    label: str | None = None,
    dropouts: int = 0,
) -> Path:
    """Folders of a coordinator and of `count` sites, each with its part of the data; the coordinator's."""
    if count < 2:
        raise SordinoError(f"sites: {count}; a federation needs two, and three for secure aggregation.")
    whole = load(data, label=label)
    names = [f"site{k + 1}" for k in range(count)]
    owner = split(whole, "dirichlet:5" if whole.classes else "iid", count, sizes="equal", seed=0)
    coordinator = folder / "coordinator"
    values: dict[str, Any] = {
        "method": "dp-fedsofim",
        "rounds": 10,
        "epsilon": 8.0,
        "trust": "secure-aggregation",
    } | spec
    federated(values)  # a wrong key or value is told before anything is made
    keys = ("method", "rounds", "epsilon", "trust")
    shape: dict[str, Any] = {"features": whole.x_train.shape[1], "classes": whole.classes}
    rest = {k: v for k, v in values.items() if k not in keys}
    init(coordinator, names, **shape, **{k: values[k] for k in keys}, dropouts=dropouts, more=rest)
    np.savez(coordinator / "test.npz", x=whole.x_test, y=_named(whole, whole.y_test))
    with open(coordinator / "federation.toml", "a", encoding="utf-8") as file:
        file.write('test = "test.npz"   # the coordinator\'s own, to watch by\n')
    limit = 2 * float(values["epsilon"])
    cards = []
    for k, name in enumerate(names):
        place = folder / "sites" / name
        cards.append(make_site(place, name, data="data.npz", classes=whole.classes, epsilon=limit).card)
        _save(place / "data.npz", whole, owner == k)
    roster = Roster(tuple(cards))
    for place in (coordinator, *(folder / "sites" / name for name in names)):
        roster.write(place / "roster.toml")
    return coordinator


def _save(path: Path, whole: Dataset, mine: np.ndarray) -> None:
    np.savez(path, x=whole.x_train[mine], y=_named(whole, whole.y_train[mine]))


def _named(whole: Dataset, y: np.ndarray) -> np.ndarray:
    """Labels as the source has them: names of classes, or quantities."""
    return np.array(whole.classes)[y] if whole.classes else y


def up(folder: Path, seconds: float = 1800.0) -> Iterator[dict[str, Any]]:
    """Start link, coordinator and sites of a demonstration on loopback, over TLS; yield progress until it is over."""
    from sordino.federation.flower.processes import Federation as Processes

    coordinator = folder / "coordinator"
    names = Federation.read(coordinator / "federation.toml").sites
    server, sites = {"SORDINO_FOLDER": str(coordinator.resolve())}, {"SORDINO_SITES": str((folder / "sites").resolve())}
    threads = {"OMP_NUM_THREADS": "1"}
    progress = coordinator / "run" / "progress.jsonl"
    seen = count_lines(progress)
    place = next(p for k in range(10_000) if not (p := folder / f"flower{k or ''}").exists())
    with Processes(place, names, handler=HANDLER, server=server | threads, site=sites | threads) as running:
        running.run()
        yield from follow(progress, running, seconds, seen)


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def follow(path: Path, running: Any, seconds: float, seen: int = 0) -> Iterator[dict[str, Any]]:
    """Lines of a coordinator's progress after the first `seen`, until it finished or failed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines[seen:]:
            found = json.loads(line)
            yield found
            if found["what"] in ("finished", "failed"):
                return
        seen = len(lines)
        for name, what in (("server", "coordinator"), ("link", "link")):
            if (status := running.processes[name].poll()) is not None:
                raise SordinoError(
                    f"the {what} ended with status {status}; see {running.log(name)}. Started again, the run goes on."
                )
        time.sleep(0.2)
    raise SordinoError(f"the federation took more than {seconds:g} s; see {running.log('server').parent}.")
