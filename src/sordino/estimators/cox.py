"""A federated, differentially private model of survival."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import validate_data

from sordino.data.schema import Schema
from sordino.data.target import MOST_INTERVALS, Target, signed_times
from sordino.errors import SordinoError
from sordino.estimators.base import FederatedEstimator, Labels, warn_of_a_useless_model
from sordino.training import survival
from sordino.training.spec import Spec


class FederatedCox(FederatedEstimator):
    """A proportional hazards model for grouped times, trained over clients under differential privacy.

    The hazard in each public interval of time is `sigmoid(x @ coef_ + baseline of the interval)`
    (`sordino.models.hazards`). For small hazards `exp(coef_)` are hazard ratios, as in Cox's model. Cox's partial
    likelihood compares each event with everybody at risk, so that one record moves every term of it; here a record adds
    one bounded term. `fit`, `groups`, `schema`, and what the guarantee does not cover are as in `FederatedClassifier`.

    The target y says for each record the time until the event, or until it was last seen, and whether the event
    happened. It is one of:

    - an array of two columns, time and event (1 or 0), or a frame with columns `time` and `event`;
    - a structured array of two fields, of which the boolean one is the event, as scikit-survival has it.

    Args:
      edges: public edges of time, from 0, as in `(0, 365, 730, 1095)`. Who is still there at the last edge counts as
        last seen then. None with a schema, whose target says them.
      schema, model, method, epsilon, delta, rounds, clients, unit: as of `FederatedClassifier`.
      adjacency, trust, divisor, normalize, options, ledger, limit, random_state: as of `FederatedClassifier`.

    Attributes:
      coef_: the log hazard ratio of each feature, for records scaled as `normalize_` says.
      intercept_: the log-odds of the baseline hazard in each interval.
      edges_: the ends of the intervals.
      life_table_: the noised life table (Kaplan-Meier) of the training records, which `auto` releases and pays for:
        for each interval its start and end, the shares at risk and with the event, survival, and the noise's std.
      n_features_in_, feature_names_in_, features_, normalize_: as of `FederatedClassifier`.
      certificate_, statement_, history_: the guarantee, as of `FederatedClassifier`.

    Example:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> X = rng.uniform(-1, 1, (2000, 2))
      >>> time = rng.exponential(3 * np.exp(-X[:, 0]))
      >>> y = np.stack([np.minimum(time, 4), time < 4], 1)
      >>> model = FederatedCox(epsilon=4.0, edges=(0, 1, 2, 3, 4)).fit(X, y)
      >>> model.score(X, y) > 0.6, model.predict_survival_function(X[:2]).shape
      (True, (2, 4))
    """

    tasks: ClassVar[tuple[str, ...]] = ("survival",)

    def __init__(
        self,
        *,
        edges: Sequence[float] | None = None,
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
        super().__init__(
            schema=schema,
            model=model,
            method=method,
            epsilon=epsilon,
            delta=delta,
            rounds=rounds,
            clients=clients,
            unit=unit,
            adjacency=adjacency,
            trust=trust,
            divisor=divisor,
            normalize=normalize,
            options=options,
            ledger=ledger,
            limit=limit,
            random_state=random_state,
        )
        self.edges = edges

    def predict(self, X: Any) -> np.ndarray:
        """The risk score of each record: its log hazard ratio `x @ coef_`. Higher: the event is expected earlier."""
        x = self._features(X).astype(np.float64)
        return np.asarray(x @ self.coef_)

    def predict_survival_function(self, X: Any) -> np.ndarray:
        """The probability that the event has not happened by each of `edges_`: records by edges."""
        return survival.survival_of(self._outputs(X))

    def score(self, X: Any, y: Any = None) -> float:
        """Harrell's concordance index on these records. A model at or below 0.5, or within two standard errors
        above it, raises a warning.

        With a schema, y may be left out if X has its columns.
        """
        risk = self.predict(X)
        signed = self._true(X, y) if self._schema is not None else self._labels(_survival(y)).y
        index = survival.concordance(signed, risk)
        if not index > 0.5:
            warn_of_a_useless_model(f"its concordance is {index:.4g}, and that of equal risks is 0.5")
        elif not index > 0.5 + survival.LEAST_ERRORS * survival.chance_error(signed):
            warnings.warn(
                f"these records do not show that the model is better than equal risks: its concordance is {index:.4g}, "
                f"{survival.BY_CHANCE}. More records here would show it; a larger epsilon helps if the noise hides "
                "the signal.",
                UserWarning,
                stacklevel=2,
            )
        return index

    # ------------------------------------------------------------------------------------------------------- inside

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def _read_schema(self) -> Schema | None:
        schema = super()._read_schema()
        if schema is not None and self.edges is not None:
            raise SordinoError("edges: the target of the schema says them; leave edges out.")
        return schema

    def _only_target(self) -> Schema:
        return Schema({}, Target("time", "survival", event="event", intervals=self._edges()))

    def _edges(self) -> tuple[float, ...]:
        if self.edges is None:
            raise SordinoError(
                "edges: public edges of time are needed, such as edges=(0, 365, 730, 1095); or give a schema. Take "
                "them from knowledge of the disease, never from these records."
            )
        try:
            edges = tuple(float(edge) for edge in self.edges)
        except (TypeError, ValueError):
            raise SordinoError(f"edges: {self.edges!r} must be numbers, such as (0, 365, 730).") from None
        rising = len(edges) > 1 and edges[0] == 0 and np.isfinite(edges).all() and (np.diff(edges) > 0).all()
        if not rising or len(edges) > MOST_INTERVALS + 1:
            raise SordinoError(
                f"edges: {self.edges!r} must begin with 0 and rise, and be 2 to {MOST_INTERVALS + 1} finite numbers."
            )
        return edges

    def _validated(self, X: Any, y: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        if y is None:
            raise ValueError("This FederatedCox estimator requires y to be passed, but the target y is None.")
        X = validate_data(self, X, dtype=dtype)
        target = _survival(y)
        check_consistent_length(X, target)
        return X, target

    def _labels(self, y: np.ndarray) -> Labels:
        return Labels(signed_times(y[:, 0], y[:, 1] == 1, self._edges()[-1]), None)

    def _target_columns(self, y: Any, schema: Schema) -> dict[str, np.ndarray]:
        target, columns = schema.target, _survival(y)
        assert target is not None
        assert target.event is not None
        no, yes = target.levels or ("false", "true")
        return {target.column: columns[:, 0], target.event: np.where(columns[:, 1] == 1, yes, no)}

    def _public_target(self) -> list[str]:
        return [f"The edges of time, {', '.join(f'{edge:g}' for edge in self._edges())}, are public."]

    def _keep(self, theta: np.ndarray) -> None:
        self.edges_ = np.array(self._built.intervals[1:])
        self.coef_, self.intercept_ = np.split(theta, [self._built.features])


def _survival(y: Any) -> np.ndarray:
    """Times and events (1 or 0) of any of the forms that `FederatedCox` takes: float64, records by 2."""
    names = getattr(getattr(y, "dtype", None), "names", None)
    if names is not None:
        events = [name for name in names if y.dtype[name].kind == "b"]
        if len(names) != 2 or len(events) != 1:
            raise SordinoError(
                f"y: a structured array needs two fields, a boolean event and a time; it has {', '.join(names)}."
            )
        time = next(name for name in names if name != events[0])
        columns = [y[time], y[events[0]]]
    elif hasattr(y, "columns"):
        found = [str(name) for name in y.columns]
        if len(found) != 2 and not {"time", "event"} <= set(found):
            raise SordinoError(f"y: a frame needs the columns time and event; it has {', '.join(found[:6])}.")
        wanted = ["time", "event"] if {"time", "event"} <= set(found) else list(y.columns)
        columns = [np.asarray(y[name]) for name in wanted]
    else:
        array = np.asarray(y)
        if array.ndim != 2 or array.shape[1] != 2:
            raise SordinoError(
                f"y: shape {array.shape}; survival needs two columns, the time and whether the event happened (1 or 0)."
            )
        columns = [array[:, 0], array[:, 1]]
    try:
        target = np.stack([np.asarray(column).astype(np.float64) for column in columns], 1)
    except (TypeError, ValueError):
        raise SordinoError("y: times and events must be numbers; write an event as 1, and none as 0.") from None
    time, event = target.T
    if wrong := int((~np.isfinite(time) | (time < 0)).sum()):
        raise SordinoError(f"y: {wrong} times are missing, infinite or below 0; drop those records.")
    if wrong := int(((event != 0) & (event != 1)).sum()):
        raise SordinoError(
            f"y: {wrong} events are neither 1 nor 0; the first column is the time, the second says whether the event "
            "happened."
        )
    return target
