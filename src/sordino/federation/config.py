"""The configuration files: site.toml with a site's data and limit, federation.toml with the coordinator's sites."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from sordino import plugins
from sordino.core import MOST_DELTA, MOST_EPSILON, Adjacency, Trust, Unit
from sordino.data.schema import Schema
from sordino.data.sources import TextColumn
from sordino.errors import SordinoError, check_known, nearest
from sordino.federation import counting
from sordino.federation.terms import SITE_NAME
from sordino.methods import REGISTRY
from sordino.models import registry
from sordino.settings import read_toml, typed
from sordino.training import language

T = TypeVar("T", bound="_File")


@dataclass(frozen=True)
class _File:
    """The keys of a TOML file. Paths are relative to the file."""

    folder: Path

    @classmethod
    def read(cls: type[T], path: str | Path) -> T:
        path = Path(path)
        values = read_toml(path, path.name)
        known = {f.name: f for f in dataclasses.fields(cls) if f.name != "folder"}
        for key, value in values.items():
            if key not in known:
                raise SordinoError(f"{key}: not a key of {path.name}.{nearest(key, known)}")
            values[key] = typed(key, value, str(known[key].type))
        if values.get("schema"):
            told = _by_schema(path.parent / Path(values["schema"]).expanduser(), values)
            values |= {key: value for key, value in told.items() if key in known}
        for f in known.values():
            missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if missing and f.name not in values:
                raise SordinoError(f"{f.name}: {path.name} must set it.")
        return cls(folder=path.resolve().parent, **values)

    def path(self, name: str) -> Path:
        return self.folder / Path(name).expanduser()

    @cached_property
    def table_schema(self) -> Schema | None:
        """The schema that the file names."""
        name = getattr(self, "schema", None)
        return None if name is None else Schema.read(self.path(name))

    @property
    def weights_folder(self) -> str:
        """The whole path of the folder of weights that the file names; empty where it names none."""
        name = getattr(self, "weights", None)
        return "" if name is None else str(self.path(name).resolve())


def _by_schema(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Label, classes and features as the schema has them; keys that contradict it are refused."""
    schema = Schema.read(path)
    if schema.target is None:
        raise SordinoError(f"schema: '{path}' has no [target]; add its column and task.")
    features = (counting.filled(schema) if schema.unknown else schema).features
    known = {"label": schema.target.column, "classes": schema.classes, "features": len(features)}
    for key, value in known.items():
        if values.get(key, value) != value:
            raise SordinoError(f"{key}: the schema says {value!r}, not {values[key]!r}; remove the key.")
    return known


@dataclass(frozen=True)
class SiteConfig(_File):
    """site.toml: what a site decides for itself. Nothing in it comes from the coordinator."""

    name: str
    data: str
    epsilon: float  # limit over all runs on this data
    delta: float
    label: str | None = None
    classes: tuple[str, ...] = ()  # the public list of labels; empty: the label is a number
    schema: str | None = None  # the schema.toml that all sites agreed on; it names label and classes
    text: str | None = None  # the column of text of a table; without classes it is learned itself, token by token
    prompt: str | None = None  # the column of what comes before each text that is learned
    length: int = 64  # tokens per text: the features of the federation
    weights: str | None = None  # this site's own copy of the folder of weights, with the tokenizer of its texts
    test_fraction: float = 0.2  # held out to evaluate models at the site
    evaluation_epsilon: float | None = None  # limit over all evaluations on the test records; None: none is answered
    run_epsilon: float | None = None  # of any single run; if it is below the federation's, the site counts less
    methods: tuple[str, ...] = ()  # allowed methods; empty: all certified ones
    trust: tuple[str, ...] = (Trust.SECURE_AGGREGATION, Trust.UNTRUSTED_SERVER)
    adjacency: str = Adjacency.REPLACE_ONE  # one ledger adds up one kind of adjacency
    unit: str | None = None  # client: runs must protect this site as a whole, and how many records it has stays here
    models: tuple[str, ...] = (
        "auto",
        "softmax",
        "logistic",
        "squares",
        "poisson",
        "hazards",
        "trees",
    )  # networks must be listed
    most_rounds: int = 1000
    most_dropouts: int = 10_000  # more dropouts mean smaller sums, and more noise of each site
    colluders: int = 1  # least number of colluding sites that the noise must withstand, under secure aggregation
    ask: bool = False  # a person approves every run: `sordino federate approve`
    most_studies: int = 1  # runs that are open at a time; others wait in a queue
    study_idle: float = 900.0  # seconds without a message after which a run loses its place to one that waits
    reserve_epsilon: float = 0.0  # part of epsilon that only runs approved by a person may use
    any_choice: bool = False  # said before the first run: minibatches of later runs count as such
    ledger: str = "ledger.db"
    witness: str | None = None  # a file outside of this folder that notices older ledgers; None: the state directory
    identity: str = "identity.key"
    roster: str = "roster.toml"
    seed: int | None = None  # for tests: reproducible noise, so nothing is certified

    def __post_init__(self) -> None:
        if not SITE_NAME.fullmatch(self.name):
            raise SordinoError(f"name: '{self.name}' must be letters, digits, dots and dashes.")
        if not (0 < self.epsilon <= MOST_EPSILON and 0 < self.delta <= MOST_DELTA):
            raise SordinoError(
                f"epsilon, delta: {self.epsilon:g} and {self.delta:g}; the limit over all runs must lie in "
                f"(0, {MOST_EPSILON:g}] and (0, {MOST_DELTA:g}]."
            )
        if self.text is not None and self.schema is not None:
            raise SordinoError("text: a schema encodes columns of its own; leave text or schema out.")
        _check_text(self)
        if self.run_epsilon is not None and not 0 < self.run_epsilon <= self.epsilon:
            raise SordinoError(
                f"run_epsilon: {self.run_epsilon} must lie in (0, {self.epsilon}], the limit of all runs."
            )
        if not 0 <= self.reserve_epsilon < self.epsilon:
            raise SordinoError(
                f"reserve_epsilon: {self.reserve_epsilon} must lie in [0, {self.epsilon}), below the limit of all runs."
            )
        if self.most_studies < 1 or not self.study_idle > 0:
            raise SordinoError(
                f"most_studies, study_idle: {self.most_studies} and {self.study_idle:g}; they must be at least 1 and "
                "above 0 s."
            )
        if self.evaluation_epsilon is not None and not 0 < self.evaluation_epsilon <= MOST_EPSILON:
            raise SordinoError(
                f"evaluation_epsilon: {self.evaluation_epsilon} must lie in (0, {MOST_EPSILON:g}]; leave it out to "
                "answer no evaluation."
            )
        if self.unit not in (None, Unit.CLIENT):
            raise SordinoError(
                f"unit: '{self.unit}' must be client, or be left out: then records are protected, or persons where the "
                "schema names them."
            )
        if self.unit is not None and (self.adjacency != Adjacency.REPLACE_ONE or self.evaluation_epsilon is not None):
            raise SordinoError(
                "unit: a site that is protected as a whole needs adjacency = replace-one, because it is known by name, "
                "and answers no evaluation, which counts records."
            )
        for name, listed, known in (
            ("adjacency", (self.adjacency,), list(Adjacency)),
            ("models", self.models, [*registry.REGISTRY, *plugins.found(plugins.MODELS)]),
            ("methods", self.methods, [*REGISTRY, *plugins.found(plugins.METHODS)]),
        ):
            for value in listed:
                check_known(name, value, known)
        for value in self.trust:
            if value not in (Trust.SECURE_AGGREGATION, Trust.UNTRUSTED_SERVER):
                raise SordinoError(
                    f"trust: '{value}' must be secure-aggregation or untrusted-server.{nearest(value, list(Trust)[:2])}"
                )


@dataclass(frozen=True)
class FederationConfig(_File):
    """federation.toml: the sites that the coordinator waits for, and the public shape of their data."""

    sites: tuple[str, ...]
    features: int = 0  # numbers per record; a schema tells them too
    classes: tuple[str, ...] = ()
    schema: str | None = None  # the schema.toml that all sites agreed on
    dropouts: int = 0  # sites that may fail in a round without losing it
    colluders: int = 1
    deadline: float = 120.0  # seconds a round waits for a site
    patience: float = 600.0  # seconds to wait for sites before the run
    queue_patience: float = 86_400.0  # seconds to wait in the queues of sites that are busy with other studies
    roster: str = "roster.toml"
    spec: str = "spec.toml"
    trim: int = 0  # in the open: sites whose garbage must not move the model; see `robust`
    test: str | None = None  # the coordinator's own test records
    evaluation_epsilon: float | None = (
        None  # ask the sites for noised counts of their test records after the last round
    )
    statistics_epsilon: float | None = (
        None  # find what the schema leaves open, in a run of its own, instead of training
    )
    label: str | None = None
    text: str | None = None  # of the coordinator's own test records, as in site.toml
    prompt: str | None = None  # of the coordinator's own test records, as in site.toml
    weights: str | None = None  # the coordinator's own copy of the folder of weights that the model begins with

    def __post_init__(self) -> None:
        _check_text(self)
        if len(set(self.sites)) < len(self.sites) or not self.sites:
            raise SordinoError("sites: list every site once, and at least one.")
        if not 1 <= self.features < 2**24:
            raise SordinoError(
                f"features: {self.features} must be the number of columns without the label, from 1 to 2^24."
            )
        if self.evaluation_epsilon is not None and not 0 < self.evaluation_epsilon < MOST_EPSILON:
            raise SordinoError(
                f"evaluation_epsilon: {self.evaluation_epsilon} must lie in (0, {MOST_EPSILON:g}); leave it out for no "
                "evaluation."
            )
        if self.statistics_epsilon is not None and not 0 < self.statistics_epsilon < MOST_EPSILON:
            raise SordinoError(
                f"statistics_epsilon: {self.statistics_epsilon} must lie in (0, {MOST_EPSILON:g}); leave it out to "
                "train."
            )
        if self.statistics_epsilon and self.evaluation_epsilon:
            raise SordinoError(
                "evaluation_epsilon: a run that finds statistics trains no model; remove statistics_epsilon or "
                "evaluation_epsilon."
            )
        if not (self.deadline > 0 and self.patience > 0):
            raise SordinoError(f"deadline, patience: {self.deadline:g} and {self.patience:g}; both must be above 0 s.")
        if not self.queue_patience >= 0:
            raise SordinoError(f"queue_patience: {self.queue_patience:g} must be at least 0 s.")
        if not 0 <= 2 * self.trim < len(self.sites):
            raise SordinoError(
                f"trim: {self.trim} values are left out at each end, of {len(self.sites)} sites; it must be below half "
                "of the sites."
            )
        if not 0 <= self.dropouts < len(self.sites):
            raise SordinoError(
                f"dropouts: {self.dropouts} must lie in [0, {len(self.sites) - 1}], because one "
                f"of {len(self.sites)} sites must remain."
            )


def _check_text(config: SiteConfig | FederationConfig) -> None:
    """Refuse columns of text that no model reads."""
    if config.prompt is not None and (config.text is None or config.classes):
        raise SordinoError(
            "prompt: it comes before a text that is learned; name its column by text, and leave classes out."
        )
    if config.text is not None and not config.classes and config.weights is None:
        raise SordinoError(
            "weights: without classes the text itself is learned; name the folder of the causal language model by "
            "weights, or list the labels by classes."
        )


def text_column(config: SiteConfig | FederationConfig, length: int) -> TextColumn | None:
    """The column of text of a party's table, with its encoding; None where the file names none.

    Args:
      config: site.toml or federation.toml. Where it lists no classes, the text itself is learned.
      length: tokens per text.
    """
    if config.text is None:
        return None
    return language.of_table(
        config.text,
        length,
        causal=not config.classes,
        weights=config.weights_folder or None,
        tokenizer=config.weights_folder or "minilm",
        prompt=config.prompt,
    )
