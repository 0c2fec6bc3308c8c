"""A run as a flat list of keys: the content of a TOML file, of `--set key=value`, and of a run's spec.toml.

A `Spec` holds what a user wrote, each key checked for its type. `resolved.resolve` turns it once into the typed object
that everything else works with.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError, check_known, closest
from sordino.methods import REGISTRY, entry
from sordino.models import registry
from sordino.settings import read_toml, typed

MOST_STATISTICS = 0.5  # share of the budget
DTYPES = ("float32", "float64", "bfloat16")  # bfloat16: the forward and backward passes of a network

PERSON_IDS = ("global", "per-client")
OWN_IDS = "Persons are numbered by each client: equal numbers at two clients are two persons."  # of per-client


@dataclass(frozen=True)
class Spec:
    """Every key of a run; the options of its method and of its model stand beside them in a file.

    `None` means that the run decides when it starts (`resolved.resolve`), or that there is none.
    """

    # data
    data: str = "digits"
    data_dir: str | None = None  # folder where published data sets are looked for first
    label: str | None = None
    text: str | None = None  # the column of text that a model of language reads
    prompt: str | None = None  # the column of what comes before each text: a causal model reads it, and learns the text
    schema: str | None = None  # a schema.toml: what the columns of a table mean
    person: str | None = None  # the column that says whom a record is about; a schema names it itself
    person_ids: str = "global"  # or per-client: equal ids at two clients are two persons
    public_stats: str | None = None
    private_statistics: float | None = None  # share of the budget that finds the ranges of columns with `within`
    normalize: str | None = None  # by default what the method asks for (`normalize_of`), mostly none
    test_fraction: float = 0.2
    public_data: bool | None = None  # true: everybody may see these records
    length: int = 64  # tokens per text
    # clients
    clients: int | None = None  # by default 10, or as many as the partition brings; 1 if a schema names none
    partition: str | None = None  # by default dirichlet for benchmarks and public data, else iid
    sizes: str = "equal"
    split_seed: int = 0
    participation: str = "full"
    batch: str = "full"  # records of a client that a gradient is computed on
    divisor: str = "pooled"
    # model and method
    model: str = "auto"
    method: str = "auto"
    clipping: str = "flat"  # or per-layer, per-layer:1,2,1, automatic, automatic:0.01: of a network's gradients
    rounds: int | None = None  # by default the method's number
    dtype: str = "float32"
    compile: bool = False  # a network's passes are compiled and its sums replayed as CUDA graphs, on a GPU
    evaluate_every: int = 1  # rounds; the last round is always evaluated
    threshold: float = 0.5  # of two classes: above it the second is predicted, for sensitivity and specificity
    # privacy
    epsilon: float = 8.0
    delta: float = 1e-5
    unit: str | None = None  # by default person where a person column is named, else record
    person_records: int = 4  # of one person that each client uses
    person_clients: int = 1  # at most so many hold records of one person
    person_choice: str = "first"  # or random: which records are used of a person with more
    adjacency: str = "replace-one"
    trust: str = "untrusted-server"
    noise: float | None = None
    calibrate: float | None = None  # part of the budget that calibrates intercepts; by default 0.1 for tables and auto
    calibrate_slope: float = 0.0  # part of the budget that calibrates the slope of two classes, beside calibrate
    uncertainty: float | None = None  # part of the budget that gives coefficients standard errors; by default none
    client_epsilon: dict[str, float] = field(default_factory=dict)
    uncertified: bool = False
    integers: bool | None = None  # true: messages are integers, as a federation with secure aggregation adds them up
    dropouts: int | None = None  # of integers: clients that may fail in a round; by default 0
    colluders: int | None = None  # of integers: clients that may reveal their noise to the server; by default 1
    machines: int | None = None  # on which --distributed runs, if several: the command sets it, the certificate says it
    # randomness
    seed: int | None = None
    schedule_seed: int | None = None
    # options of the method and of the model
    options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known, model = entry(self.method).options, registry.entry(self.model)
        for key in self.options:
            if key not in known:
                raise _unknown(key, self.method, self.model)
        for key in self.model_options:
            if key not in model.options:
                raise _unknown(key, self.method, self.model)
        check_known("dtype", self.dtype, DTYPES)
        if self.dtype == "bfloat16":
            model.check_half(self.model)
        if self.compile and not model.network:
            raise SordinoError(f"compile: it is for networks, not for model '{self.model}'; leave it out.")
        check_known("person_ids", self.person_ids, PERSON_IDS)
        for key in ("dropouts", "colluders"):
            if getattr(self, key) is not None and not self.integers:
                raise SordinoError(f"{key}: it belongs to sums of integers; set integers = true, or leave it out.")
        if self.integers and self.private_statistics is not None:
            raise SordinoError(
                "integers: private_statistics asks another model in its first round, whose integers are not simulated; "
                "leave one of them out."
            )
        if self.machines is not None and self.machines < 1:
            raise SordinoError(f"machines: {self.machines} must be at least 1.")
        if self.evaluate_every < 1:
            raise SordinoError(f"evaluate_every: {self.evaluate_every} must be at least 1.")
        share = self.private_statistics
        if share is not None and not 0 < share <= MOST_STATISTICS:
            raise SordinoError(
                f"private_statistics: {share:g} must lie in (0, {MOST_STATISTICS:g}]: a share of the budget; 0.05 is "
                "usual."
            )
        if not 0 < self.threshold < 1:
            raise SordinoError(
                f"threshold: {self.threshold:g} must lie between 0 and 1; it is a probability, and 0.5 is usual."
            )

    # ------------------------------------------------------------------------------------------------------- reading

    @staticmethod
    def of(values: Mapping[str, Any]) -> Spec:
        """Read flat keys: keys of a run, options of its method, options of its model.

        Raises:
          SordinoError: an unknown key, or a value of the wrong type.

        >>> Spec.of({"method": "dp-fedadam", "lr": 0.1, "clients": 4}).options
        {'lr': 0.1}
        """
        method = str(values.get("method", Spec.method))
        model = model_of(method, str(values.get("model", Spec.model)))
        if {"epsilon", "noise"} <= values.keys():
            raise SordinoError("noise: epsilon is set too, and one follows from the other; leave one out.")
        method_options, model_options = entry(method).options, registry.entry(model).options
        parts: dict[str, dict[str, Any]] = {"run": {}, "method": {}, "model": {}}
        for key, value in values.items():
            if key == "normalize" and value == "none":
                parts["run"][key] = value  # a way to normalise, not an absent key
            elif key in RUN_KEYS:
                parts["run"][key] = typed(key, value, _ANNOTATIONS[key], infinite=key == "epsilon")
            elif key in method_options and key in model_options:
                raise SordinoError(f"{key}: both method {method} and model {model} have it; rename the model's option.")
            elif key in method_options:
                parts["method"][key] = typed(key, value, _type_of(method_options[key]))
            elif key in model_options:
                parts["model"][key] = typed(key, value, model_options[key].annotation)
            else:
                raise _unknown(key, method, model)
        parts["run"]["model"] = model
        return Spec(**parts["run"], options=parts["method"], model_options=parts["model"])

    @staticmethod
    def read(path: str | Path) -> Spec:
        """Read a TOML file."""
        return Spec.of(read_toml(path))

    # ------------------------------------------------------------------------------------------------------- writing

    def values(self) -> dict[str, Any]:
        """The same as flat keys, without absent ones."""
        flat = {**{key: getattr(self, key) for key in RUN_KEYS}, **self.options, **self.model_options}
        if self.noise is not None:
            del flat["epsilon"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items() if v is not None and v != {}}

    def toml(self) -> str:
        """The content of a spec.toml."""
        import tomli_w

        return tomli_w.dumps(dict(sorted(self.values().items(), key=lambda item: isinstance(item[1], dict))))

    def sha256(self) -> str:
        """Hash of the TOML."""
        return hashlib.sha256(self.toml().encode()).hexdigest()


SIMILAR = 0.7  # spelling of a key that is suggested for another one, from 0 to 1
_ANNOTATIONS = {f.name: str(f.type) for f in dataclasses.fields(Spec)}
RUN_KEYS = tuple(name for name in _ANNOTATIONS if name not in ("options", "model_options"))  # of a run of any method


def model_of(method: str, model: str) -> str:
    """The model that is meant: a method may stand for another one than `auto`."""
    return entry(method).model if model == Spec.model else model


def normalize_of(method: str, model: str) -> str:
    """How records are scaled where nobody says: as the method asks for, and those of a network not at all.

    >>> normalize_of("auto", "auto"), normalize_of("auto", "mlp")
    ('record', 'none')
    """
    return "none" if registry.entry(model_of(method, model)).network else entry(method).normalize


def keys(method: str, model: str = Spec.model) -> list[str]:
    """All keys that a run of this method and model accepts."""
    return [*RUN_KEYS, *entry(method).options, *registry.entry(model_of(method, model)).options]


def _type_of(default: Any) -> str:
    return type(default).__name__


def _unknown(key: str, method: str, model: str) -> SordinoError:
    """The error for a key that neither the run nor its method nor its model has."""
    if others := _methods_with(key):
        return SordinoError(f"{key}: not an option of {method}. It is one of {others}: set method.")
    if others := _some([name for name, known in registry.REGISTRY.items() if key in known.options]):
        return SordinoError(f"{key}: not an option of model {model}. It is one of {others}: set model.")
    if meant := closest(key, keys(method, model), cutoff=SIMILAR):
        hint = f"Did you mean '{meant}'?"
    elif meant := closest(key, {option for known in REGISTRY.values() for option in known.options}, cutoff=SIMILAR):
        hint = f"Did you mean '{meant}'? It is an option of {_methods_with(meant)}: set method."
    else:
        hint = f"Options of {method}: {', '.join(entry(method).options)}."
    return SordinoError(f"{key}: neither a key of a run nor an option of {method} or of model {model}. {hint}")


def _methods_with(option: str) -> str:
    """Some methods that have an option; empty if none has."""
    return _some([name for name, known in REGISTRY.items() if option in known.options])


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
