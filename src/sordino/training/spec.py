"""A run as one flat list of keys: what a TOML file holds, what `--set key=value` sets, what a run directory keeps."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sordino.core import Privacy, Unit
from sordino.data import catalog
from sordino.data.readers import reader_of
from sordino.data.synthetic import BUILT_IN
from sordino.errors import SordinoError, nearest
from sordino.methods import REGISTRY, build, entry
from sordino.models.linear import Loss
from sordino.models.nets import NETS
from sordino.models.transformers import TRANSFORMERS
from sordino.privacy.evidence.certificate import SECRET_SEED
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan

MODELS = ("auto", *Loss, *NETS, *TRANSFORMERS)
READ_LABELS = ("dirichlet", "classes", "counts")  # partitions in which labels decide who holds a record
DTYPES = ("float32", "float64", "bfloat16")  # the last: forward and backward passes of a transformer


@dataclass(frozen=True)
class Spec:
    """Every key of a run but the method's own options, which stand beside them in a file.

    `None` means: decided when the run starts (`resolved`), or absent.
    """

    # data
    data: str = "digits"
    data_dir: str | None = None  # where published sets are looked for first
    label: str | None = None
    public_stats: str | None = None
    normalize: str | None = None  # the method's own word, mostly none
    test_fraction: float = 0.2
    public_data: bool | None = None  # true: everybody may see these records, as with benchmark data
    # clients
    clients: int | None = None  # 10, or as many as the partition brings
    partition: str = ""  # dirichlet for benchmarks and other open data, else iid
    sizes: str = "equal"
    split_seed: int = 0
    participation: str = "full"
    batch: str = "full"  # records of a client that a gradient is asked of
    divisor: str = "pooled"
    # method
    model: str = "auto"
    class_weights: tuple[float, ...] | None = None
    weights: str | None = None  # of a pretrained transformer: a local file or folder
    length: int = 64  # tokens of a text
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.1
    method: str = "auto"
    rounds: int | None = None  # the method's own number
    dtype: str = "float32"
    evaluate_every: int = 1  # rounds; the last one always is
    # privacy
    epsilon: float = 8.0
    delta: float = 1e-5
    unit: str = "record"
    adjacency: str = "replace-one"
    trust: str = "untrusted-server"
    noise: float | None = None
    client_epsilon: dict[str, float] = field(default_factory=dict)
    uncertified: bool = False
    # randomness
    seed: int | None = None
    schedule_seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.partition:
            object.__setattr__(self, "partition", "dirichlet" if self.open_data else "iid")
        known = entry(self.method).options
        for key in self.options:
            if key not in known:
                raise _stranger(key, self.method)
        for name, value, words in (("model", self.model, MODELS), ("dtype", self.dtype, DTYPES)):
            if value not in words:
                raise SordinoError(f"{name}: '{value}' is unknown.{nearest(value, words)}")
        if self.dtype == "bfloat16" and self.model not in TRANSFORMERS:
            raise SordinoError(f"dtype: bfloat16 is for transformers, not for model '{self.model}'; use float32.")
        if self.evaluate_every < 1:
            raise SordinoError(f"evaluate_every: {self.evaluate_every} must be at least 1.")

    @property
    def number(self) -> torch.dtype:
        """The type of records, sums and noise; bfloat16 is for the passes through a transformer alone."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def deep(self) -> bool:
        """The model is a network, not a linear one."""
        return self.model in NETS or self.model in TRANSFORMERS

    @property
    def benchmark(self) -> bool:
        """The data are a built-in or published set, which everybody may see."""
        word = re.split(r"[(:]", self.data, maxsplit=1)[0].strip()
        return (word in BUILT_IN or self.data in catalog.NAMES) and reader_of(Path(self.data)) is None

    @property
    def open_data(self) -> bool:
        """Nothing about the records needs hiding: a benchmark's, or declared public by `public_data`."""
        return self.benchmark or bool(self.public_data)

    @property
    def doubt(self) -> str:
        """Why nothing can be certified of this partition of these data; empty where something can."""
        law = self.partition.partition(":")[0]
        if self.open_data or law not in READ_LABELS:
            return ""
        return (
            f"partition {law} reads the labels of '{self.data}', so that the clients' sizes depend on its records, "
            "where the guarantee takes them as public and fixed"
        )

    def certifiable(self) -> None:
        """Refuse a run that would end in a certificate, and that nothing can be certified of."""
        noiseless = self.epsilon == math.inf and self.noise is None
        if self.doubt and not (self.uncertified or noiseless or self.seed is not None):
            raise SordinoError(
                f"partition: {self.doubt}. Use partition = iid or by-column:NAME; or set public_data = true, if "
                "everybody may see these records; or uncertified = true."
            )

    # ------------------------------------------------------------------------------------------------------- making

    @staticmethod
    def of(values: Mapping[str, Any]) -> Spec:
        """From flat keys, each checked for its type; what is not a key of a run must be an option of the method."""
        fields = {f.name: f for f in dataclasses.fields(Spec) if f.name != "options"}
        method = values.get("method", fields["method"].default)
        if {"epsilon", "noise"} <= values.keys():
            raise SordinoError("noise: epsilon is given too; one follows from the other, leave one out.")
        options = entry(str(method)).options
        run: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in values.items():
            if key in fields:
                run[key] = _typed(key, value, str(fields[key].type))
            elif key in options:
                own[key] = _like(key, value, options[key])
            else:
                raise _stranger(key, str(method))
        return Spec(**run, options=own)

    @staticmethod
    def read(path: str | Path) -> Spec:
        return Spec.of(read_values(path))

    def resolved(self) -> Spec:
        """Nothing left to decide: every option written out, the schedule's seed drawn, files named in full."""
        seed = self.seed if self.seed is not None else secrets.randbits(126)
        law, colon, argument = self.partition.partition(":")
        options = {**entry(self.method).options, **self.options}
        brings_clients = law in ("by-column", "by-site", "counts")
        return dataclasses.replace(
            self,
            data=_in_full(self.data),
            public_stats=self.public_stats and _in_full(self.public_stats),
            weights=self.weights and str(Path(self.weights).resolve()),
            partition=law + colon + (_in_full(argument) if law == "counts" else argument),
            clients=10 if self.clients is None and not brings_clients else self.clients,
            rounds=entry(self.method).rounds if self.rounds is None else self.rounds,
            normalize=entry(self.method).normalize if self.normalize is None else self.normalize,
            schedule_seed=self.schedule_seed if self.schedule_seed is not None else seed,
            options={k: _in_full(v) if k == "public" and v else v for k, v in options.items()},
        )

    # ------------------------------------------------------------------------------------------------------ writing

    def values(self) -> dict[str, Any]:
        """Flat keys, without those that are absent."""
        flat = {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "options"},
            **self.options,
        }
        if self.noise is not None:
            del flat["epsilon"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items() if v is not None and v != {}}

    def toml(self) -> str:
        import tomli_w

        flat = self.values()  # TOML wants tables last
        return tomli_w.dumps(dict(sorted(flat.items(), key=lambda item: isinstance(item[1], dict))))

    def published(self, plan: Plan) -> tuple[str, str]:
        """(what spec.toml tells, what stays private), both as TOML: a schedule that hides who took part needs a seed
        that nobody can guess, and then nobody else may know it."""
        if not plan.amplified or plan.schedule_seed < SECRET_SEED:
            return self.toml(), ""
        return dataclasses.replace(self, schedule_seed=None).toml(), f"schedule_seed = {plan.schedule_seed}\n"

    def sha256(self) -> str:
        return hashlib.sha256(self.toml().encode()).hexdigest()

    # ------------------------------------------------------------------------------------------------------ meaning

    def privacy(self) -> Privacy:
        try:
            requested_epsilons = {int(client): float(epsilon) for client, epsilon in self.client_epsilon.items()}
        except (TypeError, ValueError):
            raise SordinoError(
                "client_epsilon: write client_epsilon = { 3 = 0.5 }, client numbers and epsilons."
            ) from None
        return Privacy(self.epsilon, self.delta, self.unit, self.adjacency, self.trust, requested_epsilons)  # type: ignore[arg-type]

    def plan(self, sizes: tuple[int, ...]) -> Plan:
        privacy = self.privacy()
        return Plan(
            build(self.method, Unit(privacy.unit), **self.options),
            entry(self.method).rounds if self.rounds is None else self.rounds,
            sizes,
            privacy,
            Participation.parse(self.participation),
            self.divisor,  # type: ignore[arg-type]
            self.schedule_seed or 0,
            self.noise,
            self.uncertified,
            Sampling.parse(self.batch),
        )


def _stranger(key: str, method: str) -> SordinoError:
    """For a key that neither the run nor its method has; others may."""
    others = [name for name, known in REGISTRY.items() if key in known.options]
    if others:
        also = f" It is one of {', '.join(others[:3])}{' …' if len(others) > 3 else ''}: name the method."
        return SordinoError(f"{key}: not an option of {method}.{also}")
    return SordinoError(f"{key}: neither a key of a run nor an option of {method}.{nearest(key, keys(method))}")


def _in_full(name: str) -> str:
    """A file's whole path, so that a run resumes from any directory; other sources as they are."""
    return str(Path(name).resolve()) if Path(name).is_file() else name


RUN_KEYS = tuple(f.name for f in dataclasses.fields(Spec) if f.name != "options")  # of a run of any method


def keys(method: str) -> list[str]:
    """All keys that a run of this method knows."""
    return [*RUN_KEYS, *entry(method).options]


def read_values(path: str | Path) -> dict[str, Any]:
    """The flat keys of a TOML file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise SordinoError(f"spec: there is no file '{path}'; check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SordinoError(f"spec: '{path}' is not TOML ({error}).") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value`; the value is read as TOML, or else as a word."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SordinoError(f"--set: '{text}' should read key=value, as in --set lr=0.5.")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _typed(key: str, value: Any, kind: str) -> Any:
    """A run's key as its declared type; `none` unsets what may be absent."""
    if "None" in kind and (value is None or (value == "none" and key != "normalize")):
        return None
    wanted = kind.replace(" | None", "")
    if wanted == "str" and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if wanted == "bool" and isinstance(value, bool):
        return value
    if wanted == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if wanted == "float":
        return _number(key, value)
    if wanted.startswith("tuple") and isinstance(value, list | tuple):
        return tuple(_number(key, part) for part in value)
    if wanted.startswith("dict") and isinstance(value, dict):
        return {str(k): v for k, v in value.items()}
    words = {"str": "a word", "int": "a whole number", "bool": "true or false", "float": "a number"}
    raise SordinoError(
        f"{key}: {value!r} should be {words.get(wanted, 'a list' if wanted.startswith('tuple') else 'a table')}."
    )


def _like(key: str, value: Any, default: Any) -> Any:
    """A method's option, of the type of its default."""
    kind = "bool" if isinstance(default, bool) else type(default).__name__
    return _typed(key, value, kind)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SordinoError(f"{key}: {value!r} should be a number.")
    try:
        number = float(value)
    except ValueError:
        raise SordinoError(f"{key}: '{value}' should be a number.") from None
    if math.isnan(number) or (math.isinf(number) and key != "epsilon"):
        raise SordinoError(f"{key}: {number} is not a number to run with.")
    return number
