"""What the estimators share: parameters, reading of arrays and frames, the run, its certificate, and its warnings."""

from __future__ import annotations

import dataclasses
import secrets
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data

from sordino.core import Tree, Unit
from sordino.data.arrays import numbers_of_pairs, unit_numbers
from sordino.data.identity import arrays_digest, frame_digest
from sordino.data.preprocess import preprocess
from sordino.data.schema import Schema
from sordino.data.sources import Dataset
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.estimators.parameters import plain, spec_of
from sordino.estimators.pipelines import PREPARED, UnpaidStepWarning, doubt, steps_of_callers
from sordino.estimators.reading import (
    WEIGHTED,
    check_roles,
    column_error,
    entries,
    named_target,
    read_schema,
    read_weights,
    warn_of_unused,
    weight_of,
    with_target,
)
from sordino.evidence.certificate import certificate, finite
from sordino.evidence.statement import statement
from sordino.models.hazards import Hazards
from sordino.models.linear import Linear
from sordino.privacy import spending
from sordino.training.evaluate import predictions
from sordino.training.resolved import ResolvedSpec, resolve
from sordino.training.run import PreparedRun, after_count, count, life_table, prepare_resolved
from sordino.training.shared_ledger import grouping, join
from sordino.training.spec import Spec
from sordino.version import __version__

LINEAR = (Linear, Hazards)  # models whose parameters are coefficients and constants
SEARCHED = "this was one of several fits of copies of one estimator; the others are not paid for here"

EstimatorT = TypeVar("EstimatorT", bound="FederatedEstimator")
_COPIES: WeakKeyDictionary[FederatedEstimator, tuple[str, int]] = WeakKeyDictionary()  # family, copies so far
_WARNED: set[str] = set()  # families


class UnpaidSearchWarning(UserWarning):
    """Several copies of one estimator were fitted, and no certificate covers all of them.

    Example:
        >>> issubclass(UnpaidSearchWarning, UserWarning)
        True
    """


class Labels(NamedTuple):
    """The target of each record."""

    y: np.ndarray  # as the model learns it: class indices, or float32
    classes: np.ndarray | None  # None where labels are numbers


class _Table(NamedTuple):
    """What a fit learns from."""

    x: np.ndarray
    labels: Labels
    site: np.ndarray | None
    person: np.ndarray | None
    features: tuple[str, ...]
    digest: bytes  # of the records as they were given; empty without a ledger


class FederatedEstimator(BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn is not typed
    """A model trained over clients under (epsilon, delta)-differential privacy; its kinds are the public estimators."""

    tasks: ClassVar[tuple[str, ...]]  # of schemas that it can learn

    def __init__(
        self,
        *,
        schema: str | Path | Mapping[str, Any] | Schema | None = None,
        model: str = Spec.model,
        method: str = Spec.method,
        epsilon: float = 1.0,
        delta: float = Spec.delta,
        rounds: int | None = None,
        clients: int | None = None,
        unit: str | None = Spec.unit,
        adjacency: str = Spec.adjacency,
        trust: str = Spec.trust,
        divisor: str = Spec.divisor,
        normalize: str | None = Spec.normalize,
        options: Mapping[str, Any] | None = None,
        ledger: str | Path | None = None,
        limit: float | None = None,
        random_state: int | None = None,
    ) -> None:
        self.schema = schema
        self.model = model
        self.method = method
        self.epsilon = epsilon
        self.delta = delta
        self.rounds = rounds
        self.clients = clients
        self.unit = unit
        self.adjacency = adjacency
        self.trust = trust
        self.divisor = divisor
        self.normalize = normalize
        self.options = options
        self.ledger = ledger
        self.limit = limit
        self.random_state = random_state

    def fit(
        self: EstimatorT, X: Any, y: Any = None, groups: Any = None, persons: Any = None, **unknown: Any
    ) -> EstimatorT:
        """Train.

        Args:
            X: an array, records by features; with a schema, a frame (pandas, polars, pyarrow, or a dict of columns).
            y: the target of each record. With a schema it may be left out: the frame has the column. If it is given, it
              replaces that column.
            groups: the client of each record, unless the schema names a client column.
            persons: whom each record is about, unless the schema names a person column; persons are then protected.
            unknown: `sample_weight` alone, numbers in [0, 1], one per record: factors on the clipped terms of the
              records of a linear model, at record level.

        Returns:
            The estimator itself.

        Raises:
            SordinoError: a parameter, a column or a value does not fit; the message begins with its name.
        """
        sample_weight = weight_of(unknown)
        schema = self._read_schema()
        check_roles(schema, groups, persons)
        resolved = self._resolve(schema, groups is not None, persons is not None)
        counts = resolved.spec.private_statistics is not None
        widest = schema.at_its_widest if counts and schema is not None else schema
        with np.errstate(over="ignore"):  # values that overflow are reported as infinite
            table = self._table(X, y, widest, resolved)
        warn_of_unused(schema, X)
        records = len(table.x)
        weights = read_weights(sample_weight, records, resolved)
        self._check_weights(table.labels, weights)
        units, of = records, "records"
        if resolved.privacy.unit is Unit.PERSON:  # how many records they have is hidden
            who = table.person if persons is None else entries(persons, records, "persons")
            units, of = records if who is None else int(unit_numbers(who).max()) + 1, "persons"
        if resolved.clients is not None and resolved.clients > units:
            if self.clients is not None:
                raise SordinoError(f"clients: {self.clients} must be at most the number of {of}, {units}.")
            resolved = dataclasses.replace(resolved, clients=units)
        scaling = resolved.source.normalize

        def dataset(table: _Table, resolved: ResolvedSpec, scaled: bool = True) -> Dataset:
            site = table.site if groups is None else entries(groups, records)
            who = table.person if persons is None else entries(persons, records, "persons")
            x, (labels, classes) = preprocess(table.x, None, scaling) if scaled else table.x, table.labels
            number = None if who is None else unit_numbers(who)
            names = () if classes is None else tuple(map(str, classes))
            described = resolved.source.schema
            data = Dataset("given", x, labels, x[:0], labels[:0], site, names, table.features, None, described, number)
            return data._replace(weight=weights)

        unscaled = dataset(table, resolved, scaled=False)._replace(weight=None) if counts else None
        if unscaled is not None and schema is None:  # the counts are those of the classes alone
            unscaled = unscaled._replace(x_train=unscaled.x_train[:, :0], x_test=unscaled.x_test[:, :0])
        run = prepare_resolved(resolved, dataset(table, resolved), unscaled)
        searched, steps = self._warn_of_a_search(), self._warn_of_steps()
        doubts = [doubt(steps)] if steps else []
        self._pay(run, table.digest, _units(resolved, table, groups, persons), searched, doubts)

        history: list[dict[str, Any]] = []
        checkpoint: Tree = ()
        if counts:
            assert resolved.source.schema is not None
            found = count(run, resolved.source.schema)
            schema, resolved = None if schema is None else found, resolved.with_schema(found)
            history.append({"round": 1, "epsilon": finite(spending.epsilon_after(run.plan, 0))})
            table = table if schema is None else self._table(X, y, found, resolved)
            done = prepare_resolved(resolved, dataset(table, resolved), unscaled)
            run = dataclasses.replace(done, plan=run.plan, source=run.source)
            checkpoint = after_count(run)
        for this_round in simulate.run(
            run.plan,
            run.model,
            run.records,
            run.source,
            start=int(counts),
            checkpoint=checkpoint,
            every_model=False,
        ):
            history.append(
                {"round": this_round.t + 1, "epsilon": finite(spending.epsilon_after(run.plan, this_round.t))}
            )
        theta = this_round.model.cpu()
        self.normalize_, self.history_ = scaling, history
        self._schema, self._theta = schema, theta
        self.__dict__.pop("schema_", None)
        if schema is not None:
            self.schema_ = schema
        self._built: Any = run.model
        self._target: Any = resolved.source.schema  # what it says of the target; None for classes without a schema
        if schema is not None:
            self.feature_names_in_ = np.array(list(schema.reads(target=False)), dtype=object)
            self.n_features_in_ = len(self.feature_names_in_)
        self.features_ = np.array(table.features, dtype=object)
        if table.labels.classes is not None:
            self.classes_ = table.labels.classes
        for name in ("coef_", "intercept_", "life_table_"):  # of a fit of another model
            self.__dict__.pop(name, None)
        if isinstance(run.model, LINEAR):
            self._keep(theta.double().numpy())
        if (table_of_lives := life_table(run, this_round.checkpoint)) is not None:
            self.life_table_ = table_of_lives
        assumes = self._assumes(resolved, schema, bool(steps)) + ([] if weights is None else [WEIGHTED])
        self.certificate_ = _certificate(run, searched, assumes, doubts)
        self.statement_ = statement(self.certificate_)
        return self

    # -------------------------------------------------------------------------------------------- what each kind adds

    @abstractmethod
    def _labels(self, y: np.ndarray) -> Labels:
        """The target as the model learns it, without a schema."""

    def _target_columns(self, y: Any, schema: Schema) -> dict[str, np.ndarray]:
        """A target that was given beside a frame, as columns of the schema."""
        assert schema.target is not None
        return {schema.target.column: np.asarray(y)}

    def _only_target(self) -> Schema | None:
        """A schema of the target alone, without one of the columns; None for classes."""
        return None

    def _keep(self, theta: np.ndarray) -> None:
        """Set the coefficients of a linear model."""

    def _check_weights(self, labels: Labels, weights: np.ndarray | None) -> None:
        """Refuse weights that leave nothing to learn."""

    def _public_target(self) -> list[str]:
        """What is assumed of the target, without a schema."""
        return []

    # ------------------------------------------------------------------------------------------------------ reading

    def _read_schema(self) -> Schema | None:
        return None if self.schema is None else read_schema(self.schema, type(self).__name__, self.tasks)

    def _table(self, X: Any, y: Any, schema: Schema | None, resolved: ResolvedSpec) -> _Table:
        if schema is None:
            dtype = "float64" if resolved.spec.dtype == "float64" else "float32"
            try:
                X, y = self._validated(X, y, dtype)
            except ValueError as error:
                raise (column_error(X) or error) from None
            labels = self._labels(y)
            names = y if labels.classes is None else labels.classes[labels.y]  # y as given: its range may be edited
            digest = arrays_digest(X, names) if self.ledger is not None else b""
            return _Table(X, labels, None, None, tuple(getattr(self, "feature_names_in_", ())), digest)
        frame = self._frame(X, y, schema)
        encoded = schema.encode(frame)
        if not len(encoded.x):
            raise SordinoError("X: the frame has no records; check how it was read.")
        assert encoded.y is not None
        # As given: a schema may be edited.
        digest = frame_digest(with_target(X, named_target(y, schema))) if self.ledger is not None else b""
        classes = np.array(schema.classes) if schema.classes else None
        labels = Labels(schema.to_model(encoded.y), classes)
        return _Table(encoded.x, labels, encoded.client, encoded.person, tuple(schema.features), digest)

    def _validated(self, X: Any, y: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, dtype=dtype)
        return X, y

    def _frame(self, X: Any, y: Any, schema: Schema) -> Any:
        """The frame as a table, whose target columns hold y where it is given."""
        return with_target(X, {} if y is None else self._target_columns(y, schema))

    def _features(self, X: Any) -> np.ndarray:
        """New records as the model reads them. With a schema, columns are found by name."""
        check_is_fitted(self)
        if self._schema is not None:
            x = self._schema.encode(X, target=False).x
        else:
            x = validate_data(self, X, dtype=np.float64, reset=False)
        return preprocess(x, None, self.normalize_)

    def _outputs(self, X: Any) -> np.ndarray:
        """What `training.metrics` scores: log-odds, logits, numbers in the model's unit, or log-odds of hazards."""
        x, theta = torch.from_numpy(np.require(self._features(X), requirements="W")), self._theta  # copied if read-only
        if isinstance(self._built, LINEAR):
            theta = theta.double()
        return predictions(self._built, theta, x.to(theta))

    def _true(self, X: Any, y: Any) -> np.ndarray:
        """The target of records to be scored, as the model learns it, by the schema."""
        check_is_fitted(self)
        assert self._schema is not None
        schema = dataclasses.replace(self._schema, client=None, person=None)
        encoded = schema.encode(self._frame(X, y, schema))
        return np.asarray(schema.to_model(np.asarray(encoded.y)))

    # ---------------------------------------------------------------------------------------------------------- run

    def _resolve(self, schema: Schema | None, groups: bool, persons: bool) -> ResolvedSpec:
        """The run, with every parameter checked."""
        described = self._only_target() if schema is None else schema
        if persons and described is not None:
            described = dataclasses.replace(described, person="persons")
        grouped = groups or (schema is not None and schema.client is not None)
        if grouped and self.clients is not None:
            who = "groups" if groups else "the schema's client column"
            raise SordinoError(f"clients: {self.clients} cannot be set, because {who} names the clients; leave it out.")
        resolved = resolve(spec_of(self, grouped=grouped, persons=persons, bare=schema is None), schema=described)
        if resolved.privacy.unit is Unit.CLIENT and not grouped:
            raise SordinoError("groups: at client level, fit needs the client of every record; pass groups.")
        return resolved

    def _pay(self, run: PreparedRun, digest: bytes, units: bytes, searched: bool, doubts: list[str]) -> None:
        """Charge the ledger, where there is one, before anything is released."""
        if self.ledger is None:
            if self.limit is not None:
                raise SordinoError(f"limit: {self.limit} is the limit of a ledger; pass ledger='mine.db' too.")
            return
        if searched:
            raise SordinoError(
                "ledger: copies of one estimator are fitted to parts of the data, which are other data to the ledger; "
                "set ledger=None in a search."
            )
        reasons = certificate(run.plan, run.source, version=__version__, doubts=doubts)["reasons"]
        shared = join(run.plan, self.ledger, plain(self.limit), data=digest, units=units, reasons=reasons)
        shared.charge(f"fit {secrets.token_hex(16)}")

    def _assumes(self, resolved: ResolvedSpec, schema: Schema | None, unpaid: bool) -> list[str]:
        """What the certificate assumes beside what the plan assumes."""
        assumed = dataclasses.replace(resolved, source=resolved.source._replace(schema=schema)).assumptions
        if schema is not None:
            return assumed
        return [*assumed, *self._public_target(), *([] if unpaid else [PREPARED])]

    # ----------------------------------------------------------------------------------------------------- warnings

    def __sklearn_clone__(self: EstimatorT) -> EstimatorT:
        """Copy, and count the copies. A search copies an estimator once, and then that copy for every fit, so the
        second copy of one estimator is the first sign of a search."""
        copy: EstimatorT = super().__sklearn_clone__()
        family, copies = _COPIES.get(self, (secrets.token_hex(8), 0))
        _COPIES[self] = family, copies + 1
        copy._copy = family, copies + 1
        return copy

    def _warn_of_a_search(self) -> bool:
        family, number = getattr(self, "_copy", ("", 0))
        if number > 1 and family not in _WARNED:
            _WARNED.add(family)
            warnings.warn(
                f"copies of one {type(self).__name__} are being fitted, as in a search or in cross-validation: the "
                "certificate of each fit covers that fit alone, and what they reveal together is not paid for. "
                "docs/how-to/tune.md shows searches that are paid for.",
                UnpaidSearchWarning,
                stacklevel=3,
            )
        return number > 1

    def _warn_of_steps(self) -> list[str]:
        """The fitted steps of the pipelines that this estimator is being fitted in."""
        if steps := steps_of_callers(self):
            warnings.warn(f"not certified: {doubt(steps)}.", UnpaidStepWarning, stacklevel=3)
        return steps


def warn_of_a_useless_model(why: str) -> None:
    """Say that a model is no better than a constant guess on the records that it was scored on."""
    warnings.warn(
        f"the model is no better than a constant guess: {why}. The noise may exceed the signal, or features differ in "
        'scale: scale X by public figures, set normalize="l2", or raise epsilon. Another fit on the same data '
        "adds to the epsilon that is spent on them. These figures are those of the records that were passed to score, "
        "without noise: do not publish them if the records are private, as training records are.",
        UserWarning,
        stacklevel=3,
    )


def _units(resolved: ResolvedSpec, table: _Table, groups: Any, persons: Any) -> bytes:
    """What a ledger is told of the protected persons or clients: names of columns, or which records are whose."""
    unit, records = resolved.privacy.unit, len(table.x)
    given = {Unit.PERSON: persons, Unit.CLIENT: groups}.get(unit)
    site = table.site if groups is None else entries(groups, records)
    own_ids = unit is Unit.PERSON and resolved.source.person_ids == "per-client"
    if given is None:
        named = resolved.unit_column.encode()
        return named if groups is None or not own_ids else named + grouping(unit_numbers(entries(groups, records)))
    numbers = unit_numbers(entries(given, records))
    return grouping(numbers if site is None or not own_ids else numbers_of_pairs(unit_numbers(site), numbers))


def _certificate(run: PreparedRun, searched: bool, assumes: list[str], doubts: list[str]) -> dict[str, Any]:
    # At client level the names tell who took part, which must stay secret.
    names = run.names if run.plan.privacy.unit.sizes_public else []
    tuning: dict[str, Any] = {"tuning": SEARCHED} if searched else {}
    return certificate(run.plan, run.source, version=__version__, names=names, assumes=assumes, doubts=doubts, **tuning)
