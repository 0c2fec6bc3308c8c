"""A federated, differentially private regression of quantities or counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import d2_tweedie_score, r2_score

from sordino.data.schema import Schema
from sordino.data.target import MOST_COUNT, Target
from sordino.errors import SordinoError, check_known
from sordino.estimators.base import FederatedEstimator, Labels, warn_of_a_useless_model
from sordino.training.spec import Spec


class FederatedRegressor(RegressorMixin, FederatedEstimator):  # type: ignore[misc]  # scikit-learn is not typed
    """A regression, trained over clients under (epsilon, delta)-differential privacy.

    Quantities are learnt by least squares, counts by Poisson regression. Targets lie in a public range and are clamped
    to it, so that one record has a bounded influence; predictions lie in it too. The range is public: take it from
    knowledge of the quantity, never from the records. `fit`, `groups`, `persons`, `schema`, and what the guarantee does
    not cover are as in `FederatedClassifier`.

    Args:
      target_range: public least and largest target, as in `(0.0, 250.0)`; of counts `(0, largest)`. None with a schema,
        whose target says it.
      task: `quantity` or `count`; by default that of the schema, or `quantity`.
      schema, model, method, epsilon, delta, rounds, clients, unit: as of `FederatedClassifier`.
      adjacency, trust, divisor, normalize, options, ledger, limit, random_state: as of `FederatedClassifier`.

    Attributes:
      coef_, intercept_: quantities are predicted by `x @ coef_ + intercept_`, counts by its exponential, for x scaled
        as `normalize_` says, then clamped to the range. A network has none.
      n_features_in_, feature_names_in_, features_, normalize_: as of `FederatedClassifier`.
      certificate_, statement_, history_: the guarantee, as of `FederatedClassifier`.

    Example:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> X = rng.uniform(-1, 1, (2000, 3))
      >>> y = X @ [2.0, -1.0, 0.5] + rng.normal(0, 0.3, 2000)
      >>> model = FederatedRegressor(epsilon=4.0, target_range=(-4, 4)).fit(X, y)
      >>> model.score(X, y) > 0.7, model.certificate_["certified"]
      (True, True)
    """

    tasks: ClassVar[tuple[str, ...]] = ("quantity", "count")

    def __init__(
        self,
        *,
        target_range: tuple[float, float] | None = None,
        task: str | None = None,
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
        self.target_range = target_range
        self.task = task

    def predict(self, X: Any) -> np.ndarray:
        """The predicted quantity, or the predicted mean count, within the public range."""
        outputs = self._outputs(X)
        return np.asarray(self._target.to_people(outputs))

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R² of quantities, or the share of the Poisson deviance that is explained (D²) of counts.

        0 is what the mean of these records has; a model that is not above it raises a warning. With a schema, y may be
        left out if X has its column.
        """
        predicted = self.predict(X)
        if self._schema is not None:
            y = self._target.to_people(self._true(X, y))
        counts = self._target.task == "count"
        if counts:
            predicted = np.maximum(predicted, np.finfo(np.float64).tiny)
        share = d2_tweedie_score(y, predicted, sample_weight=sample_weight, power=1) if counts else None
        share = float(r2_score(y, predicted, sample_weight=sample_weight) if share is None else share)
        if share <= 0 or math.isnan(share):
            name = "D²" if counts else "R²"
            warn_of_a_useless_model(f"its {name} is {share:.4g}, and that of the mean of these records is 0")
        return share

    # ------------------------------------------------------------------------------------------------------- inside

    def _read_schema(self) -> Schema | None:
        schema = super()._read_schema()
        if schema is None:
            return None
        if self.target_range is not None:
            raise SordinoError("target_range: the target of the schema says it; leave target_range out.")
        if self.task not in (None, schema.task):
            raise SordinoError(f"task: '{self.task}', but the target of the schema is a {schema.task}; leave task out.")
        return schema

    def _only_target(self) -> Schema:
        task = self.task or "quantity"
        check_known("task", task, self.tasks)
        low, high = self._range(task)
        target = Target("y", "count", maximum=high) if task == "count" else Target("y", "quantity", range=(low, high))
        return Schema({}, target)

    def _range(self, task: str) -> tuple[float, float]:
        example = "(0, 50)" if task == "count" else "(0.0, 250.0)"
        if self.target_range is None:
            raise SordinoError(
                f"target_range: the public least and largest target are needed, such as target_range={example}; or "
                "give a schema. Take them from knowledge of the target, never from these records."
            )
        try:
            low, high = (float(end) for end in self.target_range)
        except (TypeError, ValueError):
            raise SordinoError(f"target_range: {self.target_range!r} must be two numbers, such as {example}.") from None
        if not -math.inf < low < high < math.inf:
            raise SordinoError(f"target_range: {self.target_range!r} must be two finite numbers, the lower one first.")
        if task == "count" and not (low == 0 and 1 <= high <= MOST_COUNT and high.is_integer()):
            raise SordinoError(
                f"target_range: {self.target_range!r} must be 0 and a whole number from 1 to {MOST_COUNT:,} for counts."
            )
        return low, high

    def _validated(self, X: Any, y: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        X, y = super()._validated(X, y, dtype)
        try:
            y = y.astype(np.float64)
        except (TypeError, ValueError):
            raise SordinoError("y: the targets are not numbers; for classes use FederatedClassifier.") from None
        return X, y

    def _labels(self, y: np.ndarray) -> Labels:
        task, (low, high) = self.task or "quantity", self._range(self.task or "quantity")
        if task == "count" and (wrong := int(((y < 0) | (y != np.floor(y))).sum())):
            raise SordinoError(f"y: {wrong} targets are not counts (0, 1, 2, …); correct them, or use task='quantity'.")
        schema = self._only_target()
        return Labels(schema.to_model(np.clip(y, low, high)), None)

    def _public_target(self) -> list[str]:
        low, high = self._range(self.task or "quantity")
        return [f"The range of the target, {low:g} … {high:g}, is public; targets are clamped to it."]

    def _keep(self, theta: np.ndarray) -> None:
        weight, bias, target = theta[:-1], float(theta[-1]), self._target
        if target.task == "count":
            self.coef_, self.intercept_ = weight, bias + math.log(target.unit)
        else:
            self.coef_, self.intercept_ = weight * target.unit, bias * target.unit + target.middle
