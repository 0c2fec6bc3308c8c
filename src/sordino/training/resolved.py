"""A spec resolved once: every setting decided, checked and typed. Nothing after this reads a `Spec` again."""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sordino import plugins
from sordino.core import Clipping, Divisor, Kind, Method, Privacy, Trust, Unit, answers
from sordino.data import catalog, glue
from sordino.data.partition import Partition, split
from sordino.data.readers import reader_of
from sordino.data.synthetic import BUILT_IN
from sordino.errors import SordinoError, check_known
from sordino.evidence.certificate import SECRET_SEED
from sordino.lazy import torch
from sordino.methods import build, entry
from sordino.methods.adapters import with_adapters
from sordino.methods.auto import least_rounds
from sordino.methods.calibration import added_rounds, calibrated
from sordino.methods.clipping import with_clipping
from sordino.methods.network import USUAL_MINIBATCHES
from sordino.methods.tally import after_tally
from sordino.methods.uncertainty import (
    OF_CLASSES,
    OF_QUANTITIES,
    UNCERTAINTY_ROUNDS,
    Terms,
    of_counts,
    with_uncertainty,
)
from sordino.models import images, registry
from sordino.models.pretrained import TRANSFORMERS
from sordino.models.registry import BuiltModel
from sordino.privacy.mechanisms.quantization import Answer, Integers
from sordino.privacy.mechanisms.random import source
from sordino.privacy.participation import Participation, Sampling
from sordino.privacy.plan import Plan
from sordino.training.folder import SCHEMA
from sordino.training.inputs import check_readable, check_statistics, read_statistics
from sordino.training.spec import OWN_IDS, Spec, model_of, normalize_of

if TYPE_CHECKING:  # these need torch, or are needed only where data are read
    from sordino.data.records import Records
    from sordino.data.schema import Schema
    from sordino.data.sources import Dataset, TextColumn
    from sordino.models.tally import ColumnTally


MOST_UNCERTAIN = 300  # features whose Hessian is released
MOST_COVARIANCE = 1500  # features that a schema may make of columns for methods that release a covariance
PATHS = ("data", "data_dir", "public_stats", "partition")  # keys of a run that may hold paths; beside them, options
CALIBRATE, LEAST_CALIBRATED_ROUNDS = 0.1, 20  # of mu squared, for `auto` on a table of classes; in shorter runs none


class DataSource(NamedTuple):
    """Which records a run reads, and how they are prepared."""

    name: str  # a data set's name, or a file's whole path
    folder: str | None  # where published data sets are looked for first
    label: str | None
    text: str | None  # the column of text; None where features are numbers
    prompt: str | None  # the column of what comes before each text
    test_fraction: float
    split_seed: int
    schema: Schema | None
    public_stats: str | None
    normalize: str
    length: int  # tokens per text
    tokenizer: str
    client_column: str | None
    person_column: str | None
    person_ids: str
    whole_clients: bool  # hold out whole clients for testing
    benchmark: bool  # a built-in or published data set, which everybody may see
    declared_public: bool  # by `public_data`

    @property
    def open(self) -> bool:
        """Nothing about the records needs hiding."""
        return self.benchmark or self.declared_public


class ModelChoice(NamedTuple):
    """What `registry.build` needs beside features and classes."""

    name: str
    options: Mapping[str, Any]
    seed: int  # of the first parameters; public
    bfloat16: bool  # in the forward and backward passes of a network
    compiled: bool = False  # on a GPU

    @property
    def portable(self) -> dict[str, Any]:
        """Its options as public files hold them: the names of files and folders, without their paths."""
        return _portable(self.options)

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bfloat16 else None

    @property
    def entry(self) -> registry.ModelEntry:
        return registry.entry(self.name)

    def build(self, features: int, classes: int) -> BuiltModel:
        """The model for records of this shape."""
        how = {"seed": self.seed, "autocast": self.autocast, **self.options}
        model = registry.build(self.name, features, classes, **how)
        if self.compiled:
            from sordino.models.torch_model import TorchModel

            if not isinstance(model, TorchModel):
                raise SordinoError(f"compile: model '{self.name}' is no network; leave compile out.")
            model.accelerate()
        return model


@dataclass(frozen=True)
class ResolvedSpec:
    """What one run does. `spec` holds the same settings in writing, complete, for spec.toml and hashes."""

    spec: Spec
    source: DataSource
    partition: Partition
    clients: int | None
    model: ModelChoice
    method_name: str
    options: Mapping[str, Any]  # of the method
    rounds: int
    privacy: Privacy
    participation: Participation
    sampling: Sampling
    divisor: Divisor
    noise: float | None
    uncertified: bool
    seed: int | None
    schedule_seed: int
    evaluate_every: int
    device: str

    @property
    def dtype(self) -> torch.dtype:
        """The type of records, sums and noise."""
        wide = self.spec.dtype == "float64" or self.spec.integers  # integers are exact multiples of float64 sums
        return torch.float64 if wide else torch.float32

    @cached_property
    def method(self) -> Method:
        """The method, built on first use: a site checks the options of a proposed run before it builds anything."""
        built = self.adapted(with_clipping(build(self.method_name, self.privacy.unit, **self.options), self.clipping))
        method = calibrated(built, self.spec.calibrate or 0.0, self.spec.calibrate_slope)
        radius, person = float(self.options.get("radius", 1.0)), self.privacy.unit is Unit.PERSON
        records = self.privacy.person_records if person else 1
        method = with_uncertainty(method, self.spec.uncertainty or 0.0, radius, self._terms, records)
        plugin = registry.plugin_of(self.model.name)
        method = method if plugin is None else plugins.judged(method, plugin)
        share = self.spec.private_statistics
        return method if share is None else after_tally(method, self.statistics, share)

    def adapted(self, method: Method) -> Method:
        """The method, as the variant of the model's low-rank adapters trains them; other models have none."""
        options = self.model.options
        return with_adapters(method, options.get("lora_variant", "lora"), self.rounds, options.get("lora_every", 1))

    @property
    def _terms(self) -> Terms:
        """What one record adds at most to the releases for standard errors."""
        schema = self.source.schema
        if schema is not None and schema.task == "count":
            return of_counts(schema.unit)
        return OF_QUANTITIES if schema is not None and schema.task == "quantity" else OF_CLASSES

    @property
    def clipping(self) -> Clipping:
        """How gradients of a network are brought within the clip."""
        return Clipping.parse(self.spec.clipping)

    @property
    def statistics(self) -> ColumnTally:
        """What private statistics count."""
        from sordino.training.private_statistics import statistics_tally

        assert self.source.schema is not None
        return statistics_tally(self.source.schema)

    @property
    def noiseless(self) -> bool:
        return self.privacy.epsilon == math.inf and self.noise is None

    def plan(
        self,
        sizes: tuple[int, ...],
        client_epsilon: Mapping[int, float] | None = None,
        messages: Callable[[Plan], tuple[tuple[Answer, ...], ...]] | None = None,
    ) -> Plan:
        """The plan for clients of these sizes.

        Args:
          sizes: of the clients.
          client_epsilon: requested by single clients, in place of the spec's.
          messages: says what a message of each stage holds, where the spec asks for integers.
        """
        if self.spec.integers and messages is None:
            raise SordinoError("integers: only sordino run simulates sums of integers; leave integers out.")
        plan = self._plan(sizes, client_epsilon)
        if not self.spec.integers or messages is None:
            return plan
        colluders = 1 if self.spec.colluders is None else self.spec.colluders
        return dataclasses.replace(plan, integers=Integers(messages(plan), self.spec.dropouts or 0, colluders))

    def _plan(self, sizes: tuple[int, ...], client_epsilon: Mapping[int, float] | None) -> Plan:
        privacy = self.privacy
        if client_epsilon is not None:
            privacy = dataclasses.replace(privacy, client_epsilon=dict(client_epsilon))
        return Plan(
            self.method,
            self.rounds + (self.spec.private_statistics is not None),  # the first finds the ranges
            sizes,
            privacy,
            self.participation,
            self.divisor,
            self.schedule_seed,
            self.noise,
            self.uncertified,
            self.sampling,
        )

    def build_model(
        self, features: int, classes: int, *, described: bool = False, elsewhere: bool = False
    ) -> BuiltModel:
        """The model for records of this shape, checked against the method.

        Args:
          features: numbers per record.
          classes: number of classes; 0 where labels are quantities.
          described: the tables have a schema that is not at hand: sites hold it, and the terms its hash.
          elsewhere: the records are at sites: those of a model that reads text are rows of token ids.
        """
        task = "" if self.source.schema is None else self.source.schema.task
        if (fitting := registry.OF_TASKS.get(task)) is not None and self.model.name not in fitting:
            raise SordinoError(
                f"model: {self.model.name} does not learn a {task}; use {fitting[0]}, or auto, which stands for it."
            )
        if task == "quantity" and self.model.name in ("poisson", "hazards"):
            raise SordinoError(f"model: {self.model.name} does not learn a quantity; use squares, or auto.")
        derived = not classes and not self.model.entry.network and entry(self.method_name).normalize != "none"
        if derived and task == "survival" and self.options.get("intervals") == 0:
            raise SordinoError("intervals: 0, and the target is survival; leave the option out.")
        if derived and self.method_name != "auto":
            raise SordinoError(
                f"method: {self.method_name} derives its steps for classes, and these labels are numbers; use "
                "another method, such as dp-fedgd."
            )
        described = described or self.source.schema is not None
        if derived and not described and self.model.name not in registry.of_numbers():
            raise SordinoError(
                "method: auto learns a quantity within a public range; describe the table by a schema (sordino schema) "
                "whose target has a range, or use another method, such as dp-fedgd."
            )
        self._check_expansion(features)
        reads_text = self.model.entry.reads == "text"
        tokens = elsewhere or self.source.text is not None or self.source.name.endswith(".npz")
        if reads_text and self.source.name not in glue.TASKS and not tokens:
            raise SordinoError(
                f"model: {self.model.name} reads text ({', '.join(glue.TASKS)}, or a table whose column --text "
                f"names), not '{self.source.name}'; use mlp."
            )
        from sordino.data.columns import PREVALENCE
        from sordino.data.records import check_serves
        from sordino.engines.preconditions import check_kinds

        if self.spec.uncertainty:  # first: what follows would speak of releases that nobody asked for by name
            self._check_uncertainty(features, classes)
        choice, schema = self.model, self.source.schema
        if schema is not None and PREVALENCE in schema.unknown:  # the weights follow from the first stage
            kept = {key: value for key, value in choice.options.items() if key != "class_weights"}
            choice = choice._replace(options=kept)
        model = choice.build(features, classes)
        kinds = {query.kind for stage in self.method.stages for query in stage.queries}
        if Kind.GRAM in kinds and self.method_name != "auto" and self.model.name == "hazards":
            raise SordinoError(
                f"method: {self.method_name} divides by the covariance of features, which says nothing of the "
                "intervals of a survival model; use auto, or a method such as dp-fedadam."
            )
        searched = self.spec.private_statistics is not None  # then the first stage asks another model
        check_kinds(self.method._replace(stages=self.method.stages[searched:]), model, self.model.name)
        check_serves(self.privacy, model)
        if self.spec.calibrate_slope and not (answers(model, Kind.SLOPE) and classes == 2):
            raise SordinoError(
                "calibrate_slope: it changes the slope of a linear model or of trees for two classes, and "
                f"{self.model.name} with {classes} has none here; set calibrate_slope = 0."
            )
        if self.spec.calibrate and not (answers(model, Kind.CALIBRATION) and classes and getattr(model, "bias", False)):
            raise SordinoError(
                f"calibrate: it shifts the intercepts of a linear model of classes, and {self.model.name} has none "
                "here; set calibrate = 0."
            )
        return model

    def _check_uncertainty(self, features: int, classes: int) -> None:
        """Refuse intervals where they are not derived."""
        from sordino.data.preprocess import RADIUS

        scaled = (self.source.normalize.partition(":")[0] in ("record", "table"), "records are not scaled to a norm")
        schema = self.source.schema
        linear = {"count": "poisson", "quantity": "squares"}.get("" if schema is None else schema.task, "softmax")
        fits = classes == (0 if self._terms.numeric else 2)
        radius = float(self.options.get("radius", 0.0))
        rules = (
            (self.method_name == "auto", f"method = {self.method_name}"),
            (fits, f"there are {classes} classes"),
            (self.model.name in ("auto", linear), f"model = {self.model.name} (use auto or {linear})"),
            (radius >= RADIUS, f"radius = {radius:g}, below the norm of records, {RADIUS:g}: gradients would be cut"),
            (not self.model.options.get("class_weights"), "class_weights are set"),
            (self.participation.kind == "full", "not every client takes part in every round"),
            (self.sampling.kind == "full", f"batch = {self.spec.batch}"),
            (self.divisor is Divisor.POOLED, f"divisor = {self.divisor}"),
            (features <= MOST_UNCERTAIN, f"{features:,} features are more than {MOST_UNCERTAIN}"),
            scaled,
        )
        if wrong := [what for fine, what in rules if not fine]:
            raise SordinoError(
                "uncertainty: standard errors are derived for method = auto and two classes, or a quantity or count of "
                f"a schema, without class weights, with all records in every round, and here {wrong[0]}; leave "
                "uncertainty out."
            )

    def _check_expansion(self, features: int) -> None:
        """Refuse features of a schema that a method or model cannot use."""
        if self.source.schema is None or not self.source.schema.expansion:
            return
        if self.model.name == "trees":
            raise SordinoError(
                "features: trees split the columns themselves; leave features out of the schema, or use another model."
            )
        kinds = {query.kind for stage in self.method.stages for query in stage.queries}
        if Kind.GRAM in kinds and features > MOST_COVARIANCE:
            raise SordinoError(
                f"features: the schema makes {features:,} of them, and {self.method_name} releases their covariance, "
                f"{features:,} x {features:,} numbers; at most {MOST_COVARIANCE:,} are served. Name fewer pairs under "
                "`interactions`, take fewer bins or random features, or use a method such as dp-fedadam."
            )

    def read_unscaled(self) -> Dataset:
        """The table for private statistics: searched columns are scaled by `within`, and records are not normalised."""
        assert self.source.schema is not None
        widest = self.source.schema.at_its_widest
        return dataclasses.replace(self, source=self.source._replace(schema=widest, normalize="none")).read_data()

    def with_schema(self, schema: Schema) -> ResolvedSpec:
        """The same with the ranges and shares that private statistics found."""
        model = self.model._replace(options=_with_prevalence(self.model.options, schema))
        return dataclasses.replace(self, source=self.source._replace(schema=schema), model=model)

    def with_images(self, dataset: Dataset) -> ResolvedSpec:
        """The same with the layout of images written down, for models that read images. `image` in spec.toml is then
        what the records are, and what `sordino predict` reads later.

        Raises:
          SordinoError: the records have another layout than the spec says, or are not pixels.
        """
        choice = self.model
        if "image" not in choice.entry.options or choice.entry.reads != "image":
            return self
        image = images.agreed(choice.name, choice.options.get("image"), dataset.shape)
        published = TRANSFORMERS[choice.name].pixels if choice.name in TRANSFORMERS else None
        if images.normalises(choice.options, published):
            images.check_pixels(dataset.x_train, choice.name)
            images.check_pixels(dataset.x_test, choice.name)
        if image == choice.options.get("image"):
            return self
        options = {**choice.options, "image": image}
        spec = dataclasses.replace(self.spec, model_options={**self.spec.model_options, "image": image})
        return dataclasses.replace(self, spec=spec, model=choice._replace(options=options))

    def check_images(self, features: int, shape: tuple[int, ...]) -> None:
        """Refuse records of another layout than the model reads, where the model was agreed on before they were read.

        Raises:
          SordinoError: the records are images of another layout.
        """
        if self.model.entry.reads == "image" and shape:
            image = self.model.options.get("image") or images.usual(features)
            images.agreed(self.model.name, image, shape)

    def read_data(self) -> Dataset:
        """The records that the run names; sentences become token ids."""
        from sordino.data import text
        from sordino.data.sources import load

        source = self.source
        self._check_text()
        if source.text is not None and self.model.entry.reads != "text":
            raise SordinoError(
                f"text: model {self.model.name} does not read text; use one that does, such as minilm-lora."
            )
        if source.name in glue.TASKS:
            if source.text is not None:
                raise SordinoError(f"text: '{source.name}' has its own sentences; leave text out.")
            if self.model.entry.reads != "text":
                raise SordinoError(f"model: '{source.name}' is text; use a model that reads text, such as minilm-lora.")
            return text.load(source.name, length=source.length, tokenizer=source.tokenizer, data_dir=source.folder)
        check_readable(source.name, "data")
        statistics = read_statistics(source.public_stats) if source.public_stats else {}
        dataset = load(
            source.name,
            label=source.label,
            client=source.client_column,
            person=source.person_column if source.schema is None else None,
            test_fraction=source.test_fraction,
            seed=source.split_seed,
            schema=source.schema,
            public_stats=source.public_stats,
            normalize=source.normalize,
            data_dir=source.folder,
            whole_clients=source.whole_clients,
            whole_persons=source.open or self.privacy.unit is not Unit.RECORD,
            by_client=source.open or (self.partition.by_site and self.privacy.person_clients == 1),
            own_ids=source.person_ids == "per-client" and self.partition.by_site,
            text=self._text_column,
        )
        check_statistics(statistics, dataset.features)
        return dataset

    @property
    def _text_column(self) -> TextColumn | None:
        """The column of text, with its encoding for the model."""
        from sordino.training import language

        source = self.source
        if source.text is None:
            return None
        return language.of_table(
            source.text,
            source.length,
            causal=self.model.entry.causal,
            weights=self.model.options.get("weights"),
            tokenizer=source.tokenizer,
            prompt=source.prompt,
        )

    def _check_text(self) -> None:
        """Refuse columns that the model does not read, and a method that scales what it reads."""
        source, name = self.source, self.model.name
        reads = source.text is not None and self.model.entry.reads == "text"
        if reads and source.normalize != "none" and source.normalize == entry(self.method_name).normalize:
            raise SordinoError(
                f"method: {self.method_name} scales numbers, and the features are token ids; use a method for "
                "networks, such as dp-fedadam or dp-fedadamw."
            )
        if source.prompt is not None and not self.model.entry.causal:
            raise SordinoError(
                f"prompt: model {name} learns labels, and reads no prompt; leave prompt out, or use causal-lora."
            )
        if source.text is None and self.model.entry.causal:
            raise SordinoError(
                f"text: {name} learns the text of a table; name its column, as in --data reviews.csv --text body."
            )

    @property
    def unit_column(self) -> str:
        """The columns that say which records are those of one protected person or client; empty at record level."""
        from sordino.training.shared_ledger import persons_of

        named = self.source.schema.client if self.source.schema is not None else self.source.client_column
        if self.privacy.unit is Unit.PERSON:
            own_ids = self.source.person_ids == "per-client" and self.partition.by_site
            return persons_of(self.source.person_column, named or "", own_ids)
        if self.privacy.unit is Unit.CLIENT:
            return named or self.partition.law
        return ""

    def owners(self, dataset: Dataset) -> np.ndarray:
        """The client of every training record."""
        from sordino.data.records import check_person_clients

        by_person, by_client = self.privacy.unit is Unit.PERSON, self.privacy.unit is Unit.CLIENT
        seed = self.source.split_seed
        client = split(dataset, self.partition, self.clients, seed=seed, by_person=by_person, by_client=by_client)
        if dataset.person is not None and by_person and self.source.person_ids == "global":
            check_person_clients(client, dataset.person, self.privacy.person_clients)
        return client

    def records(self, dataset: Dataset) -> Records:
        """The training records, divided among clients and grouped by what is protected."""
        from sordino.data.arrays import numbers_of_pairs
        from sordino.data.records import Records
        from sordino.engines.schedule import record_choice

        owners, person = self.owners(dataset), dataset.person if self.privacy.unit is Unit.PERSON else None
        if person is not None and self.source.person_ids == "per-client":
            person = numbers_of_pairs(owners, person)
        return Records.of(
            dataset.x_train,
            dataset.y_train,
            owners,
            person=person,
            per_person=self.privacy.person_records,
            choose=record_choice(source(self.seed), self.privacy),
            weight=dataset.weight,
            dtype=self.dtype,
            device=self.device,
            copy=False,
        )

    # --------------------------------------------------------------------------------------- for certificate and files

    @property
    def execution(self) -> str:
        """Where the clients were; the statement begins with it."""
        machines = self.spec.machines or 1
        more = f", on {machines} machines" if machines > 1 else ""
        if self.source.benchmark:
            return f"simulation on benchmark data{more}"
        if self.source.declared_public:
            return f"simulation on data declared public{more}"
        return f"simulated on {machines} machines" if more else "simulated on one machine"

    @property
    def assumptions(self) -> list[str]:
        """What the certificate assumes beside what the plan assumes."""
        facts = []
        if (self.spec.machines or 1) > 1:
            facts.append(
                f"The {self.spec.machines} machines of the run belong to one party, and nobody else reads the network "
                "between them: gradients without noise and the key of the noise travel over it without encryption."
            )
        if self.source.schema is not None:
            from sordino.data.schema import assumption, searched_assumption

            written, searched = self.source.schema, self.spec.private_statistics is not None
            facts.append(
                searched_assumption(
                    written.without_ranges.sha256(),
                    list(written.searched),
                    written.target.column if written.counted and written.target else None,
                    list(written.merged),
                )
                if searched
                else assumption(written.sha256())
            )
            if written.expansion.rff:
                facts.append(f"Random features are drawn from the public seed {written.expansion.rff_seed}.")
        if self.source.public_stats:
            facts.append("The statistics that features were centred and whitened by are public.")
        if self.source.open and self.partition.reads_labels:
            facts.append(
                "Clients are simulated: their partition reads the labels of records that everybody may see, and their "
                "sizes follow from it. The guarantee is for clients whose sizes are public and fixed."
            )
        if self.privacy.unit is Unit.PERSON and self.source.person_ids == "per-client":
            facts.append(OWN_IDS)
        if self.source.whole_clients:
            facts.append(
                "Test records are those of clients held out as a whole, or of a test part that the file brings, which "
                "is taken to hold no record of a protected client."
            )
        return facts

    @property
    def doubts(self) -> list[str]:
        """Why no run on these data with this partition can be certified; empty if it can."""
        if self.source.open or self.partition.by_site:
            return []
        name, doubts = _without_folders(self.source.name), []
        if self.partition.reads_labels:
            doubts.append(
                f"partition {self.partition.law} reads the labels of '{name}', so that the clients' sizes "
                "depend on its records, where the guarantee takes them as public and fixed"
            )
        if self.privacy.unit is Unit.CLIENT:
            doubts.append(
                f"partition {self.partition.law} makes clients of the records of '{name}' and tests on some of them, "
                "so that metrics tell how many records there are, and each client's records depend on those of the "
                "others, where unit = client takes them as hidden and its own"
            )
        return doubts

    def check_certifiable(self) -> None:
        """Refuse a run that asks for a certificate where nothing can be certified."""
        if self.doubts and not (self.uncertified or self.noiseless or self.seed is not None):
            use = "partition = iid or by-column:NAME"
            if self.privacy.unit is Unit.CLIENT:
                use = "partition = by-column:NAME (or the schema's client column), or unit = record or person"
            raise SordinoError(
                f"partition: {self.doubts[0]}. Use {use}; or set public_data = true, if everybody may see these "
                "records; or uncertified = true (--set uncertified=true)."
            )

    @property
    def portable(self) -> Spec:
        """The spec as a run's public files hold it: its schema lies beside it, and files have no folders."""
        changes: dict[str, Any] = {key: _without_folders(getattr(self.spec, key)) for key in PATHS}
        changes |= {part: _portable(getattr(self.spec, part)) for part in ("options", "model_options")}
        return dataclasses.replace(self.spec, **changes | ({} if self.spec.schema is None else {"schema": SCHEMA}))

    @property
    def _paths(self) -> dict[str, str]:
        """Whole paths of the spec and of its options. They stay private, because folders may name users and shares."""
        values = {key: getattr(self.spec, key) for key in PATHS} | self.spec.options | self.spec.model_options
        return {key: path for key, path in values.items() if path != _without_folders(path)}

    def published(self, plan: Plan) -> tuple[str, str]:
        """(content of spec.toml, content of private/secret.toml).

        Where who takes part is secret, the seed of the schedule must be unguessable, and it stays private.
        """
        public, secret = self.portable, dict[str, Any](self._paths)
        if plan.amplified and plan.schedule_seed >= SECRET_SEED:
            public, secret = (
                dataclasses.replace(public, schedule_seed=None),
                secret | {"schedule_seed": plan.schedule_seed},
            )
        import tomli_w

        return public.toml(), tomli_w.dumps(secret) if secret else ""


def _check_private_statistics(spec: Spec, schema: Schema | None, unit: str) -> None:
    if spec.private_statistics is None:
        if schema is not None and schema.unknown:
            from sordino.data.columns import no_range

            raise no_range(schema.unknown[0])
        return
    if schema is None or not (schema.searched or schema.merged or schema.counted):
        raise SordinoError(
            "private_statistics: it finds the ranges of number columns of a schema that have within = [low, high], the "
            "levels of categories that have candidates, and the shares of classes of a target with find_prevalence = "
            f"true, and {'there is no schema; give --schema' if schema is None else 'the schema has none; add one'}, "
            "or leave --private-statistics out."
        )
    if unit == Unit.CLIENT:
        raise SordinoError(
            "private_statistics: counts bound what one record or one person adds, and nothing is proved for unit = "
            "client; use unit = record or person, or give public ranges."
        )


def resolve(spec: Spec, device: str = "cpu", schema: Schema | None = None, *, elsewhere: bool = False) -> ResolvedSpec:
    """Decide what the spec leaves open, and check and type everything else.

    Args:
      spec: what the user wrote.
      device: `cpu` or `cuda`.
      schema: of the tables, where the spec names no file of it.
      elsewhere: the data, and the names of their columns, are not at hand: sites hold them, or they were used before.

    Raises:
      SordinoError: names the key whose value does not fit.

    >>> resolve(Spec.of({"method": "dp-fedgd"})).rounds
    70
    """
    spec = dataclasses.replace(spec, model=model_of(spec.method, spec.model))
    benchmark = _benchmark(spec.data)
    is_open = benchmark or bool(spec.public_data)
    schema = schema if spec.schema is None else _read_schema(spec.schema)
    person = _person_column(spec, schema)
    unit = spec.unit or ("record" if person is None else "person")
    if unit == Unit.PERSON and person is None and not elsewhere:
        raise SordinoError(
            "person: unit = person needs the column that says whom a record is about; name it by --person COLUMN, or "
            "as `person` in the schema."
        )
    _check_private_statistics(spec, schema, unit)
    if schema is not None and spec.public_stats is not None:
        raise SordinoError("public_stats: the schema scales each column already; leave public_stats out.")
    partition_text = _partition_text(spec, schema, person, is_open)
    partition = Partition.parse(partition_text, spec.sizes)
    if registry.entry(spec.model).causal and partition.reads_labels:
        raise SordinoError(
            f"partition: {partition.law} divides records by their labels, and {spec.model} learns text without labels; "
            "use iid or by-column:NAME."
        )
    model_options = _model_options(spec)
    written = dataclasses.replace(
        _written(spec, schema),
        partition=partition_text,
        unit=unit,
        clients=_clients(spec, schema, partition),
        model_options=model_options,
    )
    privacy = Privacy(
        spec.epsilon,
        spec.delta,
        unit,  # type: ignore[arg-type]
        spec.adjacency,  # type: ignore[arg-type]
        spec.trust,  # type: ignore[arg-type]
        _client_epsilon(spec),
        spec.person_records,
        spec.person_clients,
        spec.person_choice,
    )
    check_known("divisor", spec.divisor, list(Divisor))
    weights = model_options.get("weights")
    records_source = DataSource(
        name=written.data,
        folder=spec.data_dir,
        label=spec.label,
        text=spec.text,
        prompt=spec.prompt,
        test_fraction=spec.test_fraction,
        split_seed=spec.split_seed,
        schema=schema,
        public_stats=written.public_stats,
        normalize=written.normalize or "none",
        length=spec.length,
        tokenizer=weights if weights and Path(weights).is_dir() else "minilm",
        client_column=partition.column,
        person_column=person,
        person_ids=spec.person_ids,
        # At client level a test on some of a protected client's records would be a release that nobody pays for.
        whole_clients=privacy.unit is Unit.CLIENT and partition.by_site and not is_open,
        benchmark=benchmark,
        declared_public=bool(spec.public_data),
    )
    return ResolvedSpec(
        spec=written,
        source=records_source,
        partition=partition,
        clients=written.clients,
        model=ModelChoice(
            *_model_of(spec, schema, model_options), spec.split_seed, spec.dtype == "bfloat16", spec.compile
        ),
        method_name=spec.method,
        options=written.options,
        rounds=written.rounds or 0,
        privacy=privacy,
        participation=Participation.parse(spec.participation),
        sampling=Sampling.parse(spec.batch),
        divisor=Divisor(spec.divisor),
        noise=spec.noise,
        uncertified=spec.uncertified,
        seed=spec.seed,
        schedule_seed=written.schedule_seed or 0,
        evaluate_every=spec.evaluate_every,
        device=device,
    )


def _partition_text(spec: Spec, schema: Schema | None, person: str | None, is_open: bool) -> str:
    """The partition as asked for; by default by site where the schema names clients, by labels where they are open."""
    labelled = is_open and person is None and not registry.entry(spec.model).causal
    usual = "by-site" if schema is not None and schema.client else "dirichlet" if labelled else "iid"
    law, colon, argument = (spec.partition or usual).partition(":")
    if schema is not None and law == "by-column":
        raise SordinoError("partition: the schema names the client column; write by-site, or leave partition out.")
    return law + colon + (_whole_path(argument) if law == "counts" else argument)


def _clients(spec: Spec, schema: Schema | None, partition: Partition) -> int | None:
    """How many clients share the records; None where the partition tells. A described table is of one party, unless its
    schema names more."""
    if spec.clients is not None or partition.brings_clients:
        return spec.clients
    return 10 if schema is None or spec.partition is not None else 1


def _model_options(spec: Spec) -> dict[str, Any]:
    """The options of the model with their defaults, and a whole path of its weights."""
    known = registry.entry(spec.model).options.items()
    options = {key: option.default for key, option in known if option.default is not None} | spec.model_options
    if options.get("weights"):
        options["weights"] = str(Path(options["weights"]).expanduser().resolve())
    return options


def _written(spec: Spec, schema: Schema | None) -> Spec:
    """The spec with whole paths, and with what it leaves open to method, model and schema."""
    known, normalize = entry(spec.method), spec.normalize
    if normalize is None:
        normalize = normalize_of(spec.method, spec.model)
        normalize = f"table:{schema.used}" if schema is not None and normalize == "record" else normalize
    schedule_seed = spec.schedule_seed if spec.schedule_seed is not None else spec.seed
    return dataclasses.replace(
        spec,
        data=_whole_path(spec.data),
        data_dir=spec.data_dir and str(Path(spec.data_dir).expanduser().resolve()),
        schema=spec.schema and _whole_path(spec.schema),
        public_stats=spec.public_stats and _whole_path(spec.public_stats),
        calibrate=_calibrate(spec, schema),
        rounds=_usual_rounds(spec, schema) if spec.rounds is None else spec.rounds,
        normalize=normalize,
        schedule_seed=secrets.randbits(126) if schedule_seed is None else schedule_seed,
        options={
            key: _whole_path(value) if key == "public" and value else value
            for key, value in {**known.options, **_run_options(spec, schema), **spec.options}.items()
        },
    )


def _usual_rounds(spec: Spec, schema: Schema | None) -> int:
    """The rounds of a run that does not say; a method of fixed rounds leaves none for what the run adds to it."""
    known = entry(spec.method)
    return known.rounds + (_added_rounds(spec, schema) if known.fixed else 0)


def _added_rounds(spec: Spec, schema: Schema | None) -> int:
    """Rounds of `rounds` that are not the method's own."""
    calibrating = added_rounds(_calibrate(spec, schema), spec.calibrate_slope)
    return calibrating + (UNCERTAINTY_ROUNDS if spec.uncertainty else 0)


def _calibrate(spec: Spec, schema: Schema | None) -> float:
    """The part of the budget that calibrates intercepts: as asked for, or a small one for a table of classes."""
    if spec.calibrate is not None:
        return spec.calibrate
    weighted = bool(spec.model_options.get("class_weights"))  # weights ask for intercepts that are not calibrated
    classes = schema is not None and bool(schema.classes)
    usual = (
        (spec.method, spec.model) in (("auto", "auto"), ("dp-boost", "trees"))
        and spec.unit != Unit.CLIENT
        and not weighted
    )
    enough = spec.rounds is None or spec.rounds >= LEAST_CALIBRATED_ROUNDS
    return CALIBRATE if classes and usual and enough else 0.0


def _read_schema(path: str) -> Schema:
    from sordino.data.schema import Schema

    return Schema.read(path)


def _person_column(spec: Spec, schema: Schema | None) -> str | None:
    """The column that says whom a record is about: the schema names it, or the spec does."""
    if schema is not None and spec.person not in (None, schema.person):
        named = f"names '{schema.person}'" if schema.person else "names none"
        raise SordinoError(
            f"person: '{spec.person}', but the schema {named}; write the column as `person` into the schema."
        )
    return spec.person if schema is None else schema.person


def _run_options(spec: Spec, schema: Schema | None) -> dict[str, Any]:
    """What `auto` needs to know of a run: whether the model is a network and takes several minibatches per round, how
    many intervals there are for survival, whether records are centred, and whether rounds are few."""
    if spec.method != "auto":
        return {}
    if registry.entry(spec.model).network:
        several = spec.batch != "full" and spec.trust == Trust.UNTRUSTED_SERVER
        return {"network": True, "minibatches": USUAL_MINIBATCHES if several else 1}
    options: dict[str, Any] = {}
    if schema is not None and schema.target is not None and schema.task == "survival":
        options["intervals"] = len(schema.target.intervals) - 1
    numbers = schema is not None and schema.target is not None and not schema.classes
    if numbers or spec.model in registry.of_numbers():
        options["centred"] = False
    chosen = {**entry(spec.method).options, **options, **spec.options}
    added = _added_rounds(spec, schema) + (0 if spec.private_statistics is None else 1)
    own = (entry(spec.method).rounds if spec.rounds is None else spec.rounds) - added
    if 1 <= own < least_rounds(chosen["intervals"], chosen["early_share"]):
        options["few_rounds"] = own
    return options


def _model_of(spec: Spec, schema: Schema | None, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and options of the model. `auto` stands for the model of the schema's task, whose intervals are its own."""
    target, name = None if schema is None else schema.target, spec.model
    options = _with_prevalence(options, schema)
    if schema is None or target is None:
        return name, options
    if name == "auto":
        name = registry.OF_TASKS.get(target.task, (name,))[0]
    if name == "trees":
        loss = "poisson" if target.task == "count" else options.get("loss")
        widths = tuple(len(block.features) for block in schema.blocks) or None  # None: it describes the target alone
        return name, {**options, "widths": widths, "loss": loss}
    if name != "hazards":
        return name, options
    if options.get("edges") not in (None, target.intervals):
        raise SordinoError("edges: the target of the schema has other intervals; leave the option out.")
    return name, {**spec.model_options, "edges": target.intervals}


def _with_prevalence(options: Mapping[str, Any], schema: Schema | None) -> Mapping[str, Any]:
    """The options of a model, where balanced class weights read the shares of classes from the schema."""
    shares = schema.target.prevalence if schema is not None and schema.target is not None else ()
    if options.get("class_weights") != registry.BALANCED or not shares:
        return options
    if options.get("prevalence") not in (None, shares):
        raise SordinoError("prevalence: the target of the schema has other shares; leave the option out.")
    return {**options, "prevalence": shares}


def _benchmark(data: str) -> bool:
    """Whether the data are a built-in or published set."""
    name = re.split(r"[(:]", data, maxsplit=1)[0].strip()
    return (name in BUILT_IN or data in catalog.NAMES) and reader_of(Path(data)) is None


def _whole_path(name: str) -> str:
    """A file's whole path, so that a run resumes from any directory; other sources as they are."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_file() else name


def _portable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as public files hold them."""
    return {key: _without_folders(value) for key, value in options.items()}


def _without_folders(value: Any) -> Any:
    """A path, or a path after a colon, without its folders; any other value unchanged.

    >>> _without_folders("/home/a/b.csv"), _without_folders("counts:/home/a/b.csv"), _without_folders("dirichlet:0.5")
    ('b.csv', 'counts:b.csv', 'dirichlet:0.5')
    """
    if not isinstance(value, str):
        return value
    before, colon, path = ("", "", value) if Path(value).is_absolute() else value.partition(":")
    return f"{before}{colon}{Path(path).name}" if Path(path).is_absolute() else value


def _client_epsilon(spec: Spec) -> dict[int, float]:
    try:
        return {int(client): float(epsilon) for client, epsilon in spec.client_epsilon.items()}
    except (TypeError, ValueError):
        raise SordinoError(
            "client_epsilon: must map client numbers to epsilons, for example client_epsilon = { 3 = 0.5 }."
        ) from None
