"""The folders of a coordinator and of a site."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino import files
from sordino.core import MOST_EPSILON, Trust
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.federation import readmes
from sordino.federation.config import FederationConfig
from sordino.federation.sentences import count
from sordino.federation.terms import SITE_NAME, Terms, federated, public_sizes, schema_hash, schema_parts, written
from sordino.federation.weights import folder_hash
from sordino.privacy import calibration
from sordino.secagg import Identity
from sordino.training.folder import SCHEMA

SPEC_TEMPLATE = """\
# What is trained, and how private it is. Every site reads this file and decides whether to take part.
{reason}method = "{method}"
rounds = {rounds}
epsilon = {epsilon}
delta = 1e-5
trust = "{trust}"
"""
AUTO, OF_NUMBERS = "auto", "dp-fedsofim"  # the methods that `init` proposes
REASONS = {
    AUTO: '# "auto" has nothing to tune: its steps follow from public numbers, a noised covariance and the noise.\n',
    OF_NUMBERS: '# "auto", which needs no tuning, learns numbers only within the public range of a schema.\n',
}
FEDERATION = """\
# The sites that the coordinator waits for, and the public shape of their data.
sites = {sites}
{shape}dropouts = {dropouts}       # sites that may fail in a round without losing it
{colluders}deadline = 120.0   # seconds a round waits for a site
"""
SITE_TEMPLATE = """\
# What this site decides for itself. Nothing in it comes from the coordinator.
name = "{name}"
data = "{data}"          # .csv, .parquet or .npz; a path is relative to this file
{described}epsilon = {epsilon}      # limit over all runs of this site, stored in ledger.db
delta = 1e-5
# run_epsilon = 1.0     # of any single run; if the federation's is larger, this site counts less
# methods = ["auto"]
# trust = ["secure-aggregation"]
# ask = true   # a person approves every run: sordino federate approve site.toml
# most_studies = 1   # runs that are open at a time; others wait in a queue
# reserve_epsilon = 2.0   # part of epsilon that only runs approved by a person may use
# any_choice = true   # before the first run: minibatches of later runs count as such, whatever the first run is
# most_rounds = 1000
"""
COLLUDERS = "colluders = {}      # sites that may collude with the server; the noise of the others must suffice\n"
README_TEMPLATE = """\
# A federation

`spec.toml` states what is trained and how private it is, `federation.toml` with whom: one coordinator and {count} sites
({names}), each on its own machine with `pip install 'sordino[flower]'`. These are the steps, in their order.

## 1. At the coordinator: what is proposed

Check `spec.toml` and `federation.toml`, and send this page with {sent} to the sites.

## 2. At each site: keys

    sordino federate keys NAME SITE_FOLDER --data FILE {described} --limit {epsilon:g}

NAME is one of the names above, FILE this site's own table{column}. `--limit` is the epsilon that all runs of this site
may spend together; this run costs {epsilon:g}. The command creates keys, writes `SITE_FOLDER/site.toml` and prints the
site's public card. Check `site.toml`, and send the card and `SITE_FOLDER/node.pub` to the coordinator.

## 3. At the coordinator: the roster

Collect all cards in one `roster.toml`, and every node.pub as `nodes/NAME.pub`. Send `roster.toml` to all sites.

## 4. At each site: the check

Put `roster.toml` beside `site.toml`. Sites take each other's keys from this file, never from the server.

    sordino federate doctor SITE_FOLDER/site.toml

checks data, keys and budget, and prints the hash of the roster: compare it with the other sites by telephone.

## 5. At the coordinator: the start

    sordino federate doctor {folder}
    sordino federate coordinate {folder} --host coordinator.example.org

The first start writes `tls/authority.pem`; send it to the sites. The link listens on this machine alone. For sites
elsewhere put a proxy before it that passes only `/v1/fleet/` (see docs/federation.md of sordino).

## 6. At each site: the run

    sordino federate join SITE_FOLDER/site.toml --link coordinator.example.org:8000 --authority authority.pem

When all sites have joined, the coordinator trains. After a stop or a failure, the same commands continue the run.

## 7. Afterwards

At the coordinator `run/` holds `model.safetensors`, `certificate.json` and `statement.md`; at each site
`SITE_FOLDER/runs/` holds its own signed certificate and statement, and `sordino ledger show SITE_FOLDER/ledger.db`
prints what was spent. For another run, rename `run/` first.
"""


def described_by(classes: Sequence[str], *, schema: bool) -> str:
    """The flags of `sordino federate keys` that say what the tables of a study hold.

    >>> described_by(("no", "not known"), schema=False)
    "--label COLUMN --classes 'no,not known'"
    """
    if schema:
        return f"--schema {SCHEMA}"
    return f"--label COLUMN --classes {shlex.quote(','.join(classes))}" if classes else "--label COLUMN"


def init(
    folder: Path,
    names: Sequence[str],
    *,
    features: int | None = None,
    classes: Sequence[str] = (),
    schema: Path | None = None,
    method: str | None = None,
    rounds: int = 20,
    epsilon: float = 8.0,
    trust: str = "secure-aggregation",
    dropouts: int = 0,
    colluders: int = 1,
    trim: int = 0,
    weights: str = "",
    more: dict[str, Any] | None = None,
) -> list[Path]:
    """Write the coordinator's folder: spec.toml, federation.toml, and a README with the commands.

    Args:
      folder: a new or empty folder.
      names: the sites.
      features: number of columns without the label; a schema has it.
      classes: the labels; none if the label is a number, or a schema has them.
      schema: the schema of the tables, which is copied into the folder.
      method: name of the method; None for auto, and without classes and a schema for one that learns numbers.
      rounds: number of rounds.
      epsilon: privacy budget of the run.
      trust: secure-aggregation or untrusted-server.
      dropouts: sites that may fail in a round.
      colluders: sites that may collude with the server.
      trim: in the open, sites whose garbage must not move the model.
      weights: the coordinator's own copy of the folder of weights that the model begins with, if there is one.
      more: other keys of spec.toml.

    Returns:
      The files written.

    Raises:
      SordinoError: the folder is not empty, or the spec cannot be run. Nothing is written then.
    """
    import tomli_w

    for name in names:
        if not SITE_NAME.fullmatch(name):
            raise SordinoError(f"sites: '{name}' must be letters, digits, dots and dashes.")
    if len(classes) == 1 or len(set(classes)) < len(classes):
        raise SordinoError(
            f"classes: {', '.join(classes)}; list two or more different labels, or none if the label is a number."
        )
    if folder.exists() and any(folder.iterdir()):
        raise SordinoError(f"'{folder}' is not empty; choose another folder.")
    if (features is None) == (schema is None):
        raise SordinoError("features: give either the number of features, or a schema, which has it.")
    secure = trust == Trust.SECURE_AGGREGATION
    if secure and min(dropouts, colluders) >= 0 and len(names) < dropouts + colluders + 2:
        raise SordinoError(_too_few(len(names), dropouts, colluders))
    if trim and secure:
        raise SordinoError("trim: under masks nobody sees single messages; use --trust untrusted-server.")
    if schema is not None and classes:
        raise SordinoError("classes: the schema has them; leave classes out.")
    reason = ""
    if method is None:
        method = AUTO if classes or schema is not None else OF_NUMBERS
        reason = REASONS[method]
    shape = f"features = {features}\nclasses = {json.dumps(list(classes))}\n"
    if schema is not None:
        shape = f'schema = "{SCHEMA}"   # of the tables of all sites; it has the features and the classes\n'
    texts = {
        "spec.toml": SPEC_TEMPLATE.format(reason=reason, method=method, rounds=rounds, epsilon=epsilon, trust=trust)
        + tomli_w.dumps(more or {}),
        "federation.toml": FEDERATION.format(
            sites=json.dumps(list(names)),
            shape=shape
            if schema is None
            else f'schema = "{SCHEMA}"   # the tables of all sites; it has the features\n',
            dropouts=dropouts,
            colluders=COLLUDERS.format(colluders) if secure else "",  # in the open, a site trusts no other site
        )
        + (f"trim = {trim}           # per coordinate, leave out so many largest and smallest values\n" if trim else "")
        + (f"weights = {json.dumps(weights)}   # the terms hold the hash of its files\n" if weights else ""),
        "README.md": README_TEMPLATE.format(
            count=len(names),
            names=", ".join(names),
            folder=folder,
            epsilon=epsilon,
            described=described_by(classes, schema=schema is not None),
            sent="`spec.toml`" if schema is None else f"`spec.toml` and `{SCHEMA}`",
            column=", COLUMN its column of labels" if schema is None else "",
        ),
    }
    if schema is not None:
        texts[SCHEMA] = _schema_text(schema)
    with tempfile.TemporaryDirectory() as trial:  # a spec that cannot be run is refused before the folder is made
        for place in (Path(trial), folder):
            place.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (place / name).write_text(text, encoding="utf-8")
            proposed(place, [1000] * len(names))
    (folder / "nodes").mkdir()
    return [folder / name for name in texts]


def _too_few(sites: int, dropouts: int, colluders: int) -> str:
    """Why so few sites cannot use secure aggregation, and which flags of `init` help."""
    most = sites - dropouts - 2
    if most >= 0:
        fewer = f"; or `federate init` with --colluders {most}, if every site.toml says colluders = {most} too"
    else:
        fewer = "; or fewer --dropouts" if dropouts else ""
    return (
        f"sites: secure aggregation needs at least {dropouts + colluders + 2} sites where {dropouts} may drop out and "
        f"{colluders} may collude, and there {'is' if sites == 1 else 'are'} {count(sites, 'site')}. Use --trust "
        f"untrusted-server{fewer}; or add sites."
    )


def proposed(folder: Path, sizes: Sequence[int]) -> Terms:
    """The terms that a coordinator's folder would propose to sites of these sizes, with a calibrated plan."""
    from sordino.settings import read_toml

    config = FederationConfig.read(folder / "federation.toml")
    spec = federated(read_toml(folder / config.spec))
    terms = Terms(
        run="0" * 32,
        spec=written(spec, config.table_schema),
        names=tuple(config.sites),
        sizes=public_sizes(spec, sizes),
        requested_epsilons={},
        features=config.features,
        classes=config.classes,
        dropouts=config.dropouts,
        colluders=config.colluders,
        schema=schema_hash(config.table_schema),
        schema_parts=schema_parts(config.table_schema),
        weights=folder_hash(config.weights_folder),
        weights_folder=config.weights_folder,
    )
    calibration.query_noises(terms.plan)
    return terms


def _schema_text(path: Path) -> str:
    Schema.read(path)
    return path.read_text(encoding="utf-8")


def make_site(
    folder: Path,
    name: str,
    *,
    data: str,
    epsilon: float,
    classes: Sequence[str] = (),
    label: str = "",
    schema: Path | None = None,
    text: str = "",
    prompt: str = "",
    length: int = 64,
    weights: str = "",
    model: str = "",
) -> Identity:
    """Write a site's folder: keys, and a site.toml to check. Existing files are kept.

    Args:
      folder: the site's folder.
      name: the site.
      data: the file of its records.
      epsilon: limit over all runs.
      classes: the labels; none if the label is a number, or a schema has them.
      label: the column of the label, in a table without a schema.
      schema: the schema of the table, which is copied into the folder.
      text: the column of text of a table, for models that read text.
      prompt: the column of what comes before each text, for causal language models.
      length: tokens per text.
      weights: the site's own copy of the folder of weights that the model begins with, if there is one.
      model: the network that the site allows. By default the one that fits text, classes and weights.

    Raises:
      SordinoError: the folder belongs to another site, or epsilon is out of range.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / "identity.key").exists():
        identity = Identity.load(folder / "identity.key")
        if identity.name != name:
            raise SordinoError(f"name: '{folder}' is the folder of {identity.name}; choose another folder for {name}.")
        return identity
    if not 0 < epsilon <= MOST_EPSILON:
        raise SordinoError(f"limit: {epsilon:g} must lie in (0, {MOST_EPSILON:g}].")
    if schema is not None and (label or classes or text):
        raise SordinoError("label, classes, text: the schema has them; leave them out.")
    described = (f'label = "{label}"\n' if label else "") + f"classes = {json.dumps(list(classes))}\n"
    if text:
        described += f"text = {json.dumps(text)}\n" + (f"prompt = {json.dumps(prompt)}\n" if prompt else "")
        described += f"length = {length}   # tokens per text: features of the federation\n"
        model = model or ("minilm-lora" if not weights else "sequence-lora" if classes else "causal-lora")
    if schema is not None:
        files.write(folder / SCHEMA, _schema_text(schema).encode())
        described = f'schema = "{SCHEMA}"   # the same file at every site; it has the label and the classes\n'
    if weights:
        described += f"weights = {json.dumps(weights)}   # this site's own copy, with its tokenizer\n"
    if model:
        described += f'models = ["{model}"]   # networks must be named\n'
    identity = Identity.make(name)
    identity.save(folder / "identity.key")
    files.write(folder / "README.txt", readmes.SITE.format(name=name).encode())
    path = folder / "site.toml"
    if not path.exists():
        content = SITE_TEMPLATE.format(name=name, data=data, described=described, epsilon=epsilon)
        files.write(path, content.encode())
    return identity
