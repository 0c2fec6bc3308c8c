"""A federated, differentially private classifier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets

from sordino.data.schema import Schema
from sordino.data.sources import Dataset
from sordino.data.target import Target
from sordino.errors import SordinoError
from sordino.estimators.base import FederatedEstimator, Labels, warn_of_a_useless_model
from sordino.training.evaluate import no_better
from sordino.training.metrics import Task, score
from sordino.training.spec import Spec


class FederatedClassifier(ClassifierMixin, FederatedEstimator):  # type: ignore[misc]  # scikit-learn is not typed
    """A classifier, trained over clients under (epsilon, delta)-differential privacy; by default softmax regression.

    `fit(X, y, groups=site)` makes one client per group; at client level the groups are the protected clients. Without
    groups the records are divided at random among `clients` simulated clients. `fit(X, y, persons=patient)` protects
    all records of a person together (options `person_records` and others). In a `Pipeline` pass
    `model__groups=site`, or route it: `set_fit_request(groups=True)`. The groups of a search reach only its splitter,
    unless they are routed.

    With a `schema`, X is a frame of pandas, polars or pyarrow, or a dict of columns. The schema encodes each record by
    itself, and names the target, the client and the person: `fit(frame)` needs nothing else. A y that is given replaces
    the target column. Columns are found by name, absent ones are refused, and others are ignored.

    What the guarantee does not cover:

    - Earlier steps of a pipeline. A scaler fitted to the same records is a release that no budget pays for: fit raises
      an `UnpaidStepWarning`, and the certificate is not certified. Scale by a schema or by public constants, or set
      `normalize="l2"`. Steps that work on each record alone (`Normalizer`, `FunctionTransformer`) are taken as such.
      Features that were scaled by hand cannot be told from others: `assumes` in the certificate says what is assumed.
    - Searches and cross-validation. The certificate of a fit covers only that fit. The second fitted copy raises an
      `UnpaidSearchWarning`, once per search. `sordino.privacy.accounting.selection` computes the joint cost.
    - The set of classes, which is public. It comes from `y`, unless `classes` or the schema declares it.

    `fit(X, y, sample_weight=w)` multiplies each record's clipped gradient by its weight. Weights lie in [0, 1], so a
    record's term stays within the clip; divide larger ones by a public number, because their maximum is private. It is
    proved for linear models at record level, and refused elsewhere. Each weight must be a function of its own record,
    or public: `assumes` in the certificate says so. Small weights lose signal, and the noise stays.

    Args:
      schema: what the columns of a frame mean: the path of a schema.toml, a dict with its keys, or a `Schema`. None for
        arrays.
      model: `auto` (softmax regression), `logistic`, `trees` (for method dp-boost, which implies it), or a network such
        as `mlp`, for which a method such as dp-fedadam is needed.
      method: a name that `sordino methods` lists.
      epsilon, delta, unit, adjacency, trust: the guarantee, as in `sordino.Privacy`. epsilon = inf: no noise.
      rounds: number of rounds; by default that of the method.
      clients: number of simulated clients if there are no groups, at most the number of records; by default 10, or as
        many as there are records; 1 with a schema.
      divisor: `pooled` or `client-mean`.
      normalize: `none`, `l2` (every record to norm 1) or `clip:R` (norms at most R); by default as the
        method needs it.
      options: options of the method, as in `{"lr": 0.5, "clip": 2.0}`; and of the model (`class_weights`,
        `prevalence`);
        also the keys `batch`, `calibrate`, `client_epsilon`, `dtype`, `participation`, `person_records`,
        `person_clients`, `person_ids`, `person_choice`, `private_statistics` and `uncertified` of a run.
        `{"class_weights": "balanced", "private_statistics": 0.05}` pays for noised counts of the classes by that part
        of the budget; the classes must be declared, or the schema has `find_prevalence`.
      classes: all labels that may occur, even if `y` lacks some.
      ledger: a file that adds up the fits and runs on the same data, as `sordino run --ledger` does; None for none. The
        same data are the same arrays X and y, so that parts of them, as in cross-validation, are other data. With a
        schema, y is left out, or has the names of the target's columns itself.
      limit: the most epsilon that all of them together may spend; fit raises `OverspentError` before it would exceed
        it. The ledger keeps it.
      random_state: None for cryptographic noise. An int makes a fit reproducible but not private, because whoever
        knows it can subtract the noise. The certificate states this.

    Attributes:
      classes_, n_features_in_, feature_names_in_, coef_, intercept_: as in scikit-learn's linear classifiers. Networks
        and trees have no coefficients. With a schema, `classes_` are its levels, and features are columns of the frame.
      schema_: with a schema, the one that encodes records: completed by what `private_statistics` found.
      features_: names of the features that `coef_` is of, where there are names.
      normalize_: how records are scaled before they are used.
      certificate_: all numbers of the guarantee, for `sordino.verify`. statement_: the same in words, as Markdown.
      history_: number of each round and the epsilon spent so far.

    Example:
      >>> import sordino as so
      >>> data = so.load("digits")
      >>> model = FederatedClassifier(epsilon=4.0, rounds=5).fit(data.x_train, data.y_train)
      >>> model.certificate_["certified"], round(model.certificate_["epsilon"], 2)
      (True, 4.0)
    """

    tasks: ClassVar[tuple[str, ...]] = ("classes",)

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
        classes: Any = None,
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
        self.classes = classes

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits, one per class; for two classes, the second minus the first."""
        return self._outputs(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, records by classes, in the order of `classes_`."""
        z = self.decision_function(X)
        return np.stack([expit(-z), expit(z)], 1) if z.ndim == 1 else np.asarray(softmax(z, axis=1))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each record."""
        return self._classes_of(self.decision_function(X))

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy on these records. A model that is no better than a constant guess on them raises a warning.

        Two classes are compared by log loss and AUC, as a run does; many classes, and weighted records, by accuracy.
        `fit` cannot warn: a comparison on the training records would be a release that no budget pays for. With a
        schema, y may be left out if X has its column.
        """
        z = self.decision_function(X)
        predicted = self._classes_of(z)
        y = np.asarray(y) if self._schema is None else self.classes_[self._true(X, y)]
        accuracy = float(accuracy_score(y, predicted, sample_weight=sample_weight))
        if why := self._no_better(y, z, accuracy, sample_weight):
            warn_of_a_useless_model(why)
        return accuracy

    # ------------------------------------------------------------------------------------------------------- inside

    def _labels(self, y: np.ndarray) -> Labels:
        """The class index of each record, and the sorted classes."""
        check_classification_targets(y)
        classes, index = np.unique(y, return_inverse=True)
        if self.classes is not None:
            present, classes = classes, np.unique(np.asarray(self.classes))
            if unknown := [label for label in present if label not in classes]:
                raise SordinoError(
                    f"classes: label '{unknown[0]}' of y is not declared; declare it, or drop its records."
                )
            index = np.searchsorted(classes, present)[index]
        if len(classes) < 2:
            raise SordinoError(
                "y: all records have one class; use more data, or declare the other classes by `classes`."
            )
        return Labels(index.astype(np.int64), classes)

    def _check_weights(self, labels: Labels, weights: np.ndarray | None) -> None:
        """As for y: records of one class are refused, unless the classes are declared."""
        if weights is None or self.classes is not None or self.schema is not None:
            return
        if len(np.unique(labels.y[weights > 0])) < 2:
            raise SordinoError(
                "sample_weight: all records with a weight above 0 have one class; use more data, or declare the other "
                "classes by `classes`."
            )

    def _only_target(self) -> Schema | None:
        """The levels of the target, where noised counts are to find their shares."""
        if "private_statistics" not in (self.options or {}):
            return None
        if self.classes is None:
            raise SordinoError(
                "private_statistics: it counts the records of each class here, so the classes must be declared: "
                "classes=['no', 'yes']; or give a schema with find_prevalence = true under its target."
            )
        levels = tuple(map(str, np.unique(np.asarray(self.classes))))
        return Schema({}, Target("y", "classes", levels=levels, find_prevalence=True))

    def _classes_of(self, z: np.ndarray) -> np.ndarray:
        return np.asarray(self.classes_[(z > 0).astype(int) if z.ndim == 1 else z.argmax(1)])

    def _no_better(self, y: np.ndarray, z: np.ndarray, accuracy: float, sample_weight: Any) -> str:
        """Why the model is no better than a constant guess on these records; empty if it is, or if nothing tells."""
        present, index = np.unique(y, return_inverse=True)
        if len(present) < 2:
            return ""
        if z.ndim == 1 and sample_weight is None and np.isin(present, self.classes_).all():
            label = (y == self.classes_[1]).astype(np.int64)
            data = Dataset("given", z[:0], label[:0], z[:0], label, None, tuple(map(str, self.classes_)))
            return no_better(data, dict(score(Task.TWO_CLASSES, label, z)))
        weights = np.bincount(index, weights=None if sample_weight is None else np.asarray(sample_weight, float))
        constant = float(weights.max() / weights.sum())
        if accuracy > constant * (1 + 1e-12):
            return ""
        return f"its accuracy is {accuracy:.1%}, and {constant:.1%} of these records have the most common class"

    def _keep(self, theta: np.ndarray) -> None:
        outputs = self._built.outputs
        weight, bias = theta[:-outputs].reshape(-1, outputs).T, theta[-outputs:]
        self.coef_, self.intercept_ = (np.diff(part, axis=0) if outputs == 2 else part for part in (weight, bias))

    def _read_schema(self) -> Schema | None:
        schema = super()._read_schema()
        if schema is not None and self.classes is not None:
            raise SordinoError("classes: the target of the schema has its levels; leave classes out.")
        return schema
