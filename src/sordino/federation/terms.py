"""The terms of a run. Every party computes the same plan from them, and refers to them by their hash."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from sordino.core import MOST_EPSILON, Adjacency, Trust, Unit
from sordino.data.schema import Schema, assumption
from sordino.engines.trace import sent_answers
from sordino.errors import SordinoError, nearest
from sordino.evidence.certificate import STATISTICS, certificate
from sordino.federation.weights import check_weights
from sordino.foreign import read_json
from sordino.methods import entry
from sordino.methods.tally import tally_method
from sordino.models import registry
from sordino.models.registry import BuiltModel
from sordino.models.tally import CellTally
from sordino.privacy.mechanisms.quantization import Answer, Integers
from sordino.privacy.mechanisms.random import Secure, Seeded
from sordino.privacy.participation import FULL
from sordino.privacy.plan import Plan
from sordino.training.resolved import ResolvedSpec, resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import NOT_REBUILT, answers_of, differences
from sordino.version import __version__

TERMS_FORMAT = 1
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RUN = re.compile(r"[0-9a-f]{32}")
HASH = re.compile(r"([0-9a-f]{64})?", re.ASCII)
RUN_KEY = re.compile(r"[0-9a-f]{192}", re.ASCII)  # a public key and its signature
SPEC_LINE = re.compile(
    r"([a-z0-9_]+ = [^.\[{]?.{0,400})?|[a-z0-9_]+ = \[|    [-+0-9.e]+,|\]", re.ASCII
)  # of a flat spec
# Keys that a federation's spec must not have: files chosen by the server, noise that it knows, and sites' own keys.
PRIVATE = (
    "data",
    "data_dir",
    "label",
    "text",
    "prompt",
    "schema",
    "public_stats",
    "private_statistics",
    "test_fraction",
    "weights",
    "seed",
    "noise",
    "uncertified",
    "public_data",
)
LOCAL = (
    "integers",
    "dropouts",
    "colluders",
    "machines",
    "person",
    "person_ids",
    "clients",
    "partition",
    "sizes",
    "client_epsilon",
    "evaluate_every",
    "threshold",
)
UNSERVED = ("uncertainty",)  # the coordinator writes no intervals
DRAWN = "Every site drew its noise from a secret source; each says so in a certificate of its own."
EVALUATED = "The model that is named here is the one that was evaluated: the coordinator says so."
MOST_SITES, MOST_CLASSES, MOST_BLOCKS, MOST_DERIVED = 10_000, 100_000, 10_000, 1_000
VERSION = re.compile(r"[0-9A-Za-z.+-]{0,64}", re.ASCII)


def federated(values: Mapping[str, Any]) -> Spec:
    """The spec of a federation.

    Raises:
      SordinoError: a key belongs to a single machine or a single site.
    """
    for key in (*PRIVATE, *LOCAL, *UNSERVED):
        if key in values:
            if key == "private_statistics":
                raise SordinoError(
                    "private_statistics: a federation finds ranges in a run of its own; set statistics_epsilon in "
                    "federation.toml, or give public ranges."
                )
            other = {
                "weights": " Every party names its own copy: in federation.toml, and in each site.toml.",
                "public_stats": ' Scale the files at the sites, or use normalize = "l2".',
                "client_epsilon": " A site asks for a stricter epsilon by run_epsilon in its site.toml.",
            }.get(key, "")
            raise SordinoError(f"{key}: the spec of a federation must not set it; remove it.{other}")
    return Spec.of(values)


def carried_out(sites: int, name: str | None = None) -> str:
    """How a federation ran, and who says so.

    Args:
      sites: how many sites there are.
      name: of the site whose certificate it is; None for the coordinator's.
    """
    return f"as a federation of {sites} sites; this is " + (
        "the coordinator's statement" if name is None else f"what {name} states"
    )


def told_by_the_coordinator(answered: int, rounds: int) -> str:
    """What a site's certificate assumes of the result that it names.

    Args:
      answered: the rounds that the site answered.
      rounds: those of the plan.

    Returns:
      A sentence for the certificate.
    """
    return (
        "The result of the run that is named here, a model or counts, was computed from the answers of this run alone: "
        f"the coordinator says so, and the site cannot check it. The site answered {answered} of {rounds} rounds, and "
        "does not see the answers of others."
    )


def written(spec: Spec, schema: Schema | None = None) -> str:
    """The spec as sent to sites: every key is decided, and none belongs to a single party."""
    import tomli_w

    resolved = resolve(spec, schema=schema)
    flat = resolved.spec.values()
    if resolved.model.name != spec.model:  # sites do not read a schema to know the model: the terms name it
        flat = {key: value for key, value in flat.items() if key not in registry.entry(spec.model).options}
        flat |= {"model": resolved.model.name} | {
            k: list(v) for k, v in resolved.model.options.items() if v is not None
        }
    elif resolved.model.options.get("prevalence") is not None:  # which balanced class weights read from the schema
        flat |= {"prevalence": list(resolved.model.options["prevalence"])}
    return tomli_w.dumps({k: v for k, v in flat.items() if k not in (*PRIVATE, *LOCAL)})


def public_sizes(spec: Spec, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that terms state: what the sites told or, where whole sites are protected, 1 of each."""
    return tuple(sizes) if spec.unit != Unit.CLIENT else (1,) * len(sizes)


def schema_hash(schema: Schema | None) -> str:
    """How terms name a schema: by its hash, or an empty text where there is none."""
    return "" if schema is None else schema.sha256()


def schema_parts(schema: Schema | None) -> dict[str, str]:
    """What terms say of the parts of a schema, so that a site can name those that it describes differently."""
    return {} if schema is None else schema.part_hashes()


@dataclass(frozen=True)
class Terms:
    """What all parties of a run agree to. The position of a site in `names` is its number in the plan."""

    run: str  # 128 random bits, hex
    spec: str  # TOML
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # training records or, at person level, persons: public; at client level 1 of each site
    requested_epsilons: dict[str, float]  # of sites that ask for a stricter epsilon
    features: int
    classes: tuple[str, ...]  # empty: the label is a number
    dropouts: int = 0
    colluders: int = 1
    roster: str = ""  # hash of the roster, under secure aggregation
    schema: str = ""  # hash of the schema of the sites' tables, where there is one
    schema_parts: dict[str, str] = field(default_factory=dict)  # of its columns and keys; only for messages
    evaluation: float = 0.0  # epsilon of the evaluation on the sites' test records after the last round; 0: none
    found: tuple[str, ...] = ()  # parts of the schema that an earlier run found from noised counts
    cells: tuple[int, ...] = ()  # of the counts of a run that finds such parts; empty for a training
    tests: tuple[int, ...] = ()  # test records or, at person level, persons: public; empty without an evaluation
    run_keys: tuple[str, ...] = ()  # under secure aggregation: every site's box key of this run, with its signature
    rotations: tuple[str, ...] = ()  # links from keys of the sites' rosters to the keys of this run's roster
    votes: tuple[str, ...] = ()  # of sites to leave sites out, signed; `names` has no site with enough of them
    version: str = ""  # of the package that wrote the terms
    derived: dict[str, float] = field(default_factory=dict)  # numbers that follow from the rest; sites compare them
    weights: str = ""  # hash of the folder of weights that the model begins with, where there is one
    format: int = TERMS_FORMAT
    weights_folder: str = field(default="", compare=False)  # this party's own copy of them; never written or sent

    def json(self) -> str:
        values = {name: getattr(self, name) for name in TERMS_KEYS}  # `asdict` copies every name
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    def sha256(self) -> str:
        return hashlib.sha256(self.json().encode()).hexdigest()

    @staticmethod
    def read(text: str, weights_folder: str = "") -> Terms:
        """Terms as `json` wrote them, for a party with its own folder of weights."""
        try:
            values: dict[str, Any] = read_json(text)
            unknown = sorted(values.keys() - set(TERMS_KEYS))
        except SordinoError as error:
            raise SordinoError(f"terms: {error}") from None
        except (TypeError, ValueError, AttributeError, RecursionError):
            raise SordinoError("terms: they are not JSON of the known keys.") from None
        if unknown:
            raise SordinoError(_unknown_key(unknown[0], values.get("version")))
        try:
            terms = Terms(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})  # type: ignore[arg-type]
        except (TypeError, ValueError, AttributeError, RecursionError):
            raise SordinoError("terms: they are not JSON of the known keys.") from None
        try:
            terms._check()
        except (TypeError, AttributeError):  # such as a number in place of a list
            raise SordinoError("terms: a value has the wrong type.") from None
        return replace(terms, weights_folder=weights_folder) if weights_folder else terms

    def _check(self) -> None:
        for fine, what in (
            (type(self.format) is int and self.format == TERMS_FORMAT, f"format {self.format!r} is not {TERMS_FORMAT}"),
            (isinstance(self.run, str) and RUN.fullmatch(self.run), "run is not 32 hex digits"),
            (isinstance(self.spec, str) and len(self.spec) < 2**13, "spec is not a text below 8 KiB"),
            (all(SPEC_LINE.fullmatch(line) for line in self.spec.splitlines()), "spec is not a flat list of keys"),
            (
                isinstance(self.names, tuple) and 0 < len(self.names) <= MOST_SITES,
                f"names must list 1 to {MOST_SITES} sites",
            ),
            (
                all(isinstance(n, str) and SITE_NAME.fullmatch(n) for n in self.names),
                "a site's name is not made of letters, digits, dots and dashes",
            ),
            (len(set(self.names)) == len(self.names), "two sites have the same name"),
            (isinstance(self.sizes, tuple) and len(self.sizes) == len(self.names), "sizes and names differ in length"),
            (
                all(type(size) is int and 0 < size < 2**40 for size in self.sizes),
                "a site's size is not a positive integer",
            ),
            (
                isinstance(self.requested_epsilons, dict) and set(self.requested_epsilons) <= set(self.names),
                "requested_epsilons names an unknown site",
            ),
            (
                all(type(e) in (int, float) and 0 < e < MOST_EPSILON for e in self.requested_epsilons.values()),
                f"a requested epsilon is not in (0, {MOST_EPSILON:g})",
            ),
            (type(self.features) is int and 0 < self.features < 2**24, "features is not a positive integer below 2^24"),
            (
                isinstance(self.classes, tuple) and len(self.classes) <= MOST_CLASSES,
                f"classes must be a list of at most {MOST_CLASSES}",
            ),
            (
                all(isinstance(c, str) and len(c) < 256 for c in self.classes),
                "the name of a class is not a text below 256 characters",
            ),
            (len(set(self.classes)) == len(self.classes) != 1, "classes must be empty, or two or more different names"),
            (
                all(type(k) is int and 0 <= k < MOST_SITES for k in (self.dropouts, self.colluders)),
                f"dropouts and colluders must lie in [0, {MOST_SITES})",
            ),
            (isinstance(self.roster, str) and len(self.roster) in (0, 64), "roster is not a SHA-256 hash"),
            (
                type(self.evaluation) in (int, float) and 0 <= self.evaluation < MOST_EPSILON,
                f"evaluation is not an epsilon in [0, {MOST_EPSILON:g})",
            ),
            (
                isinstance(self.tests, tuple) and len(self.tests) == (len(self.names) if self.evaluation else 0),
                "tests and names differ in length",
            ),
            (
                all(type(size) is int and 0 < size < 2**40 for size in self.tests),
                "a site's number of test records is not a positive integer",
            ),
            (isinstance(self.schema, str) and len(self.schema) in (0, 64), "schema is not a SHA-256 hash"),
            (
                isinstance(self.schema_parts, dict) and len(self.schema_parts) <= MOST_CLASSES,
                f"schema_parts must have at most {MOST_CLASSES} hashes",
            ),
            (
                all(len(k) < 1024 and isinstance(v, str) and len(v) <= 64 for k, v in self.schema_parts.items()),
                "schema_parts is not made of hashes",
            ),
            (isinstance(self.weights, str) and HASH.fullmatch(self.weights), "weights is not a SHA-256 hash"),
            (
                isinstance(self.cells, tuple) and len(self.cells) <= MOST_BLOCKS,
                f"cells must be a list of at most {MOST_BLOCKS}",
            ),
            (
                all(type(cells) is int and 0 < cells <= MOST_CLASSES for cells in self.cells),
                f"a number of cells is not an integer from 1 to {MOST_CLASSES}",
            ),
            (not (self.cells and self.evaluation), "a run that finds statistics has no model to evaluate"),
            (
                isinstance(self.found, tuple) and len(self.found) <= MOST_BLOCKS,
                f"found must be a list of at most {MOST_BLOCKS}",
            ),
            (all(isinstance(name, str) and len(name) < 256 for name in self.found), "found is not a list of names"),
            (
                isinstance(self.run_keys, tuple) and len(self.run_keys) in (0, len(self.names)),
                "run_keys and names differ in length",
            ),
            (
                all(isinstance(key, str) and RUN_KEY.fullmatch(key) for key in self.run_keys),
                "a run key is not 192 hex digits",
            ),
            (
                isinstance(self.rotations, tuple) and len(self.rotations) <= MOST_SITES,
                f"rotations must be a list of at most {MOST_SITES}",
            ),
            (
                all(isinstance(link, str) and len(link) <= 1024 for link in self.rotations),
                "rotations is not a list of texts below 1 KiB",
            ),
            (
                isinstance(self.votes, tuple) and len(self.votes) <= MOST_SITES,
                f"votes must be a list of at most {MOST_SITES}",
            ),
            (
                all(isinstance(vote, str) and len(vote) <= 512 for vote in self.votes),
                "votes is not a list of texts of at most 512 characters",
            ),
            (isinstance(self.version, str) and VERSION.fullmatch(self.version), "version is not one of this package"),
            (
                isinstance(self.derived, dict) and len(self.derived) <= MOST_DERIVED,
                f"derived must have at most {MOST_DERIVED} numbers",
            ),
            (
                all(len(k) < 256 and type(v) is float and math.isfinite(v) for k, v in self.derived.items()),
                "derived is not made of finite numbers",
            ),
        ):
            if not fine:
                raise SordinoError(f"terms: {what}.")

    # ------------------------------------------------------------------------------------------------------ meaning

    @cached_property
    def values(self) -> Mapping[str, Any]:
        try:
            return tomllib.loads(self.spec)
        except (tomllib.TOMLDecodeError, RecursionError):
            raise SordinoError("terms: the spec is not TOML.") from None

    @property
    def assumptions(self) -> list[str]:
        """What the certificates of the run assume beside what the plan assumes."""
        return [*self._of_weights, *self._of_schema]

    @property
    def _of_weights(self) -> list[str]:
        if not self.weights:
            return []
        return [
            f"The weights that the model begins with (sha256 {self.weights}) are public, and were not trained on the "
            "records that this run protects."
        ]

    @property
    def _of_schema(self) -> list[str]:
        if not self.schema:
            return []
        if not self.found:
            return [assumption(self.schema)]
        return [
            f"The schema of the table (sha256 {self.schema}) is public but for {', '.join(self.found)}, which follow "
            "from noised counts of the records. An earlier run released these and paid for them: what it revealed adds "
            "up with this, and every site's ledger holds both. The schema is applied to each record by itself, which "
            "costs no privacy."
        ]

    @cached_property
    def resolved(self) -> ResolvedSpec:
        """The spec, checked for a federation and resolved. It builds no model, method or plan, and reads no data."""
        spec = federated(self.values)
        for key, words in (("unit", Unit), ("trust", Trust)):
            if getattr(spec, key) not in list(words):
                raise SordinoError(
                    f"{key}: '{getattr(spec, key)}' is unknown.{nearest(str(getattr(spec, key)), words)}"
                )
        defaults = {key: option.default for key, option in registry.entry(spec.model).options.items()}
        decided = {"rounds", "normalize", "schedule_seed", "epsilon", "delta", *entry(spec.method).options}
        decided |= {key for key, default in defaults.items() if default is not None}
        if decided - self.values.keys() or None in (spec.rounds, spec.normalize, spec.schedule_seed):
            raise SordinoError("terms: the spec leaves a key undecided.")
        if spec.options.get("public"):
            raise SordinoError("public: the spec of a federation must not name a file; remove it.")
        self._check_weights(spec)
        if spec.unit == Unit.CLIENT:
            self._check_clients(spec)
        if spec.unit == Unit.PERSON and not self.schema:
            raise SordinoError("unit: persons are known by the `person` column of a schema, and these terms have none.")
        if Trust(spec.trust) is Trust.TRUSTED_SERVER:
            raise SordinoError(
                "trust: trusted-server is not possible in a federation; use untrusted-server or secure-aggregation."
            )
        if spec.batch.startswith("allocation"):
            raise SordinoError(
                f"batch: {spec.batch} is not possible in a federation, because a site that starts again draws anew "
                "which record is in which minibatch of the epoch; use poisson or fixed."
            )
        if self.weights_folder:
            spec = replace(spec, model_options={**spec.model_options, "weights": self.weights_folder})
        return resolve(spec, elsewhere=True)

    def _check_weights(self, spec: Spec) -> None:
        """Whether the model begins with a folder of weights, and how many tokens a row of text has."""
        model = registry.entry(spec.model)
        if model.needs_weights and not self.weights:
            raise SordinoError(
                f"model: {spec.model} is whatever model a folder of weights holds; every party names its own copy by "
                "weights, in federation.toml and in each site.toml."
            )
        if (self.weights or self.weights_folder) and "weights" not in model.options:
            raise SordinoError(f"weights: model {spec.model} begins with none; remove the key.")
        if self.weights and model.reads == "text" and spec.length != self.features:
            raise SordinoError(
                f"length: {spec.length} in the spec, and features = {self.features} in federation.toml; both are the "
                "tokens of a text."
            )

    def _check_clients(self, spec: Spec) -> None:
        """What the protection of whole sites needs: the numbers of their records stay at the sites."""
        if spec.adjacency != Adjacency.REPLACE_ONE:
            raise SordinoError(
                "adjacency: the sites of a federation are known by name, so none joins or leaves unseen; with unit = "
                "client use replace-one."
            )
        if spec.batch != FULL:
            raise SordinoError(
                f"batch: {spec.batch} draws minibatches by a site's number of records, which unit = client hides; use "
                "full."
            )
        if self.sizes != public_sizes(spec, self.sizes):
            raise SordinoError("sizes: with unit = client the numbers of records stay at the sites; state 1 of each.")
        if self.cells or self.evaluation:
            raise SordinoError("unit: counts of records are proved for records and persons, not for whole clients.")

    @property
    def secure(self) -> bool:
        return self.resolved.privacy.trust is Trust.SECURE_AGGREGATION

    @property
    def exchanges(self) -> int:
        """Rounds of messages: those of the plan, and one more for the evaluation."""
        return self.plan.rounds + bool(self.evaluation)

    @property
    def number(self) -> torch.dtype:
        """The dtype of models and sums. Sums of integers need float64 to be exact."""
        return torch.float64 if self.secure else self.resolved.dtype

    @cached_property
    def model(self) -> BuiltModel:
        if self.cells:
            counts: Any = CellTally(self.features, self.cells, len(self.classes))
            return cast(BuiltModel, counts)
        if self.weights or self.weights_folder:
            check_weights(self.weights, self.weights_folder)
        return self.resolved.build_model(self.features, len(self.classes), described=bool(self.schema), elsewhere=True)

    @property
    def dimension(self) -> int:
        """Numbers of the result: of the counts of a run that finds statistics, else of the model."""
        return CellTally(self.features, self.cells).dimension if self.cells else self.model.size

    @property
    def learns_text(self) -> bool:
        """Records are texts that are learned token by token, and all labels are 0."""
        return not self.cells and self.resolved.model.entry.causal

    @property
    def label_type(self) -> torch.dtype:
        return torch.int64 if self.classes or self.learns_text else torch.float64

    @cached_property
    def plan(self) -> Plan:
        return self.plan_of(lambda plan: sent_answers(plan, self.model, self.features, self.label_type))

    def plan_of(self, messages: Callable[[Plan], tuple[tuple[Answer, ...], ...]]) -> Plan:
        """The plan, where something else than the model says what a message of each stage holds under masks."""
        requested = {
            i: float(self.requested_epsilons[n]) for i, n in enumerate(self.names) if n in self.requested_epsilons
        }
        privacy = self.resolved.privacy
        stricter = {i: e for i, e in requested.items() if e < privacy.epsilon}
        if self.cells:
            counts: Any = self.model
            plan = Plan(
                tally_method(STATISTICS, counts, privacy.unit), 1, self.sizes, replace(privacy, client_epsilon=stricter)
            )
        else:
            plan = self.resolved.plan(self.sizes, stricter)
        if plan.noiseless:
            raise SordinoError("epsilon: a federation needs noise; set a finite epsilon.")
        if not self.secure:
            return plan
        answers: Any = self.dimension if self.cells else messages(plan)
        return replace(plan, integers=Integers(answers, self.dropouts, self.colluders))


TERMS_KEYS = tuple(part.name for part in fields(Terms) if part.compare)


def _unknown_key(key: str, version: object) -> str:
    """What to do about terms that another version wrote."""
    named = isinstance(version, str) and version and VERSION.fullmatch(version)
    return (
        f"terms: their key {key[:40]!a} is unknown to sordino {__version__}, which runs here; the coordinator runs "
        f"sordino {version if named else 'of an unknown version'}. Upgrade this site."
    )


def against_terms(cert: dict[str, Any], path: Path) -> Iterator[str]:
    """Differences between a party's certificate and the one that follows from terms.json."""
    try:
        terms = Terms.read(path.read_text(encoding="utf-8"))
        plan = terms.plan_of(partial(answers_of, cert)) if terms.weights else terms.plan  # weights may not be at hand
    except SordinoError as error:
        yield f"no plan follows from terms.json ({error})"
        return
    noise = path.with_name("noise")
    seeded = noise.read_text() != "" if noise.is_file() else cert["noise_source"] == "seeded"
    stated = told_by_the_coordinator(cert["site"]["rounds"], plan.rounds) if "site" in cert else DRAWN
    rebuilt = certificate(
        plan,
        Seeded(0) if seeded else Secure(),
        version=cert["sordino"],
        names=terms.names,
        execution=carried_out(len(terms.names), cert["site"]["name"] if "site" in cert else None),
        assumes=[*terms.assumptions, stated] if "site" in cert else [stated, *terms.assumptions],
    )
    yield from differences(cert, rebuilt, NOT_REBUILT)
    if "site" in cert and terms.names.index(cert["site"]["name"]) != cert["site"]["client"]:
        yield f"terms.json gives the site '{cert['site']['name']}' another number than {cert['site']['client']}"
