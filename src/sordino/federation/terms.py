"""What a run is about, as every party sees it: from these words each computes the same plan, and holds to its hash."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sordino.core import MOST_EPSILON, Broadcast, Kind, Trust, Unit
from sordino.engines.schedule import round_plans
from sordino.engines.trace import only_asks_for_the_gradient
from sordino.errors import SordinoError, nearest
from sordino.methods import entry
from sordino.models import registry
from sordino.models.registry import BuiltModel
from sordino.privacy.evidence.certificate import certificate
from sordino.privacy.mechanisms.quantization import Integers
from sordino.privacy.mechanisms.random import Secure, Seeded
from sordino.privacy.plan import Plan
from sordino.training.resolved import ResolvedSpec, resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import AGAINST_TERMS, differences

FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RUN = re.compile(r"[0-9a-f]{32}")
LINE = re.compile(r"([a-z0-9_]+ = [^.\[{]?.{0,400})?|[a-z0-9_]+ = \[|    [-+0-9.e]+,|\]", re.ASCII)  # of a flat spec
# What a spec may not hold here: files of the server's choosing, noise that it knows, and what every site says itself.
PRIVATE = (
    "data",
    "data_dir",
    "label",
    "public_stats",
    "test_fraction",
    "weights",
    "seed",
    "noise",
    "uncertified",
    "public_data",
)
LOCAL = ("clients", "partition", "sizes", "client_epsilon", "evaluate_every")
DRAWN = "Every site drew its noise from a secret source; each says so in a certificate of its own."
MOST_SITES, MOST_CLASSES = 10_000, 100_000


def federated(values: Mapping[str, Any]) -> Spec:
    """A spec without what has no place in a federation's."""
    for key in (*PRIVATE, *LOCAL):
        if key in values:
            other = ' Scale the files at the sites, or use normalize = "l2".' if key == "public_stats" else ""
            raise SordinoError(f"{key}: it has no place in the spec of a federation; leave it out.{other}")
    return Spec.of(values)


def written(spec: Spec) -> str:
    """The spec that is sent: everything decided, and nothing of a single party's."""
    import tomli_w

    flat = resolve(spec).spec.values()
    return tomli_w.dumps({k: v for k, v in flat.items() if k not in (*PRIVATE, *LOCAL)})


@dataclass(frozen=True)
class Terms:
    """Sites in order: their number in this list is their number in the plan."""

    run: str  # 128 random bits, hex
    spec: str  # TOML
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # training records, public
    requested_epsilons: dict[str, float]  # stricter epsilons of single sites
    features: int
    classes: tuple[str, ...]  # empty: labels are quantities
    dropouts: int = 0
    colluders: int = 1
    roster: str = ""  # hash of the roster, under secure aggregation
    format: int = FORMAT

    def json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def sha256(self) -> str:
        return hashlib.sha256(self.json().encode()).hexdigest()

    @staticmethod
    def read(text: str) -> Terms:
        try:
            values: dict[str, Any] = json.loads(text)
            made = Terms(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})  # type: ignore[arg-type]
        except (TypeError, ValueError, AttributeError, RecursionError):
            raise SordinoError("terms: they cannot be read.") from None
        try:
            made._check()
        except (TypeError, AttributeError):  # a number where a list belongs, and the like
            raise SordinoError("terms: they are not of the known form.") from None
        return made

    def _check(self) -> None:
        for fine, what in (
            (type(self.format) is int and self.format == FORMAT, "their format is not the one known here"),
            (isinstance(self.run, str) and RUN.fullmatch(self.run), "the run has no proper number"),
            (isinstance(self.spec, str) and len(self.spec) < 2**13, "there is no spec"),
            (all(LINE.fullmatch(line) for line in self.spec.splitlines()), "the spec is not a list of keys"),
            (isinstance(self.names, tuple) and 0 < len(self.names) <= MOST_SITES, "no sites are named"),
            (all(isinstance(n, str) and NAME.fullmatch(n) for n in self.names), "a site's name is no name"),
            (len(set(self.names)) == len(self.names), "two sites have one name"),
            (isinstance(self.sizes, tuple) and len(self.sizes) == len(self.names), "sizes and sites differ in number"),
            (all(type(size) is int and 0 < size < 2**40 for size in self.sizes), "a site's size is no size"),
            (
                isinstance(self.requested_epsilons, dict) and set(self.requested_epsilons) <= set(self.names),
                "a wish belongs to nobody",
            ),
            (
                all(type(e) in (int, float) and 0 < e < MOST_EPSILON for e in self.requested_epsilons.values()),
                "a wish is no epsilon",
            ),
            (type(self.features) is int and 0 < self.features < 2**24, "the number of features is none"),
            (isinstance(self.classes, tuple) and len(self.classes) <= MOST_CLASSES, "the classes are no list"),
            (all(isinstance(c, str) and len(c) < 256 for c in self.classes), "a class has no name"),
            (len(set(self.classes)) == len(self.classes) != 1, "the classes are fewer than two, or not distinct"),
            (all(type(k) is int and 0 <= k < MOST_SITES for k in (self.dropouts, self.colluders)), "no such dropouts"),
            (isinstance(self.roster, str) and len(self.roster) in (0, 64), "the roster's hash is none"),
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

    @cached_property
    def parsed(self) -> Spec:
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
            raise SordinoError("terms: the spec leaves something to decide.")
        if spec.options.get("public"):
            raise SordinoError("public: a federation's spec names no file.")
        if Unit(spec.unit) is not Unit.RECORD:
            raise SordinoError("unit: sites are protected record by record; unit = user has no place here.")
        if Trust(spec.trust) is Trust.TRUSTED_SERVER:
            raise SordinoError("trust: trusted-server has no place here; untrusted-server or secure-aggregation.")
        return spec

    @cached_property
    def resolved(self) -> ResolvedSpec:
        return resolve(self.parsed)

    @property
    def secure(self) -> bool:
        return Trust(self.parsed.trust) is Trust.SECURE_AGGREGATION

    @property
    def number(self) -> torch.dtype:
        """Of models and sums; for integers they are exact to less than a step, which float32 is not."""
        return torch.float64 if self.secure else self.resolved.dtype

    @cached_property
    def model(self) -> BuiltModel:
        return self.resolved.build_model(self.features, len(self.classes))

    @cached_property
    def plan(self) -> Plan:
        requested = {
            i: float(self.requested_epsilons[n]) for i, n in enumerate(self.names) if n in self.requested_epsilons
        }
        epsilon = self.resolved.privacy.epsilon
        plan = self.resolved.plan(self.sizes, {i: e for i, e in requested.items() if e < epsilon})
        if plan.noiseless:
            raise SordinoError("epsilon: a federation without noise is not offered.")
        if not self.secure:
            return plan
        plan = replace(plan, integers=Integers(self.model.size, self.dropouts, self.colluders))
        _check_messages(plan, self.model)
        return plan


def _check_messages(plan: Plan, model: BuiltModel) -> None:
    """Integers are noised in place of an answer, so that a message must be the answer itself, or clipped as a whole."""
    theta, state = model.init(), ()
    for s, stage in enumerate(plan.stages):
        round_plan = next(round_plans(plan, model, sum(plan.stage_rounds[:s])))
        state = stage.rule.init(theta, round_plan.facts, state)
        whole = any(query.kind is Kind.DELTA for query in stage.queries)
        if not whole and not only_asks_for_the_gradient(stage, Broadcast(theta, stage.rule.broadcast(state))):
            raise SordinoError(
                f"method: {plan.method.name} makes something of its gradient before it sends it; secure aggregation "
                "needs it as it is. Use dp-fedsofim, dp-fedgd or dp-fedadam, or untrusted-server."
            )


def against_terms(cert: dict[str, Any], path: Path) -> Iterator[str]:
    """Of a federation: every party computes the same plan from the terms. Its words are those of the party."""
    try:
        terms = Terms.read(path.read_text(encoding="utf-8"))
        plan = terms.plan
    except SordinoError as error:
        yield f"no plan follows from terms.json ({error})"
        return
    noise = path.with_name("noise")
    seeded = noise.read_text() != "" if noise.is_file() else cert["noise_source"] == "seeded"
    rebuilt = certificate(
        plan,
        Seeded(0) if seeded else Secure(),
        version=cert["sordino"],
        names=terms.names,
        execution=cert["execution"],
        assumes=[] if "site" in cert else [DRAWN],
    )
    yield from differences(cert, rebuilt)


AGAINST_TERMS[:] = [against_terms]
