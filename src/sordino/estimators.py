"""A federated, differentially private linear classifier with the interface of scikit-learn.

    FederatedClassifier(epsilon=2.0).fit(X, y, groups=hospital).predict(X_new)

Every fit is one simulated run with its own certificate. Nothing is evaluated on the training records.
"""

from __future__ import annotations

import dataclasses
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from sordino.core import Unit
from sordino.data.preprocess import preprocess
from sordino.data.sources import Dataset
from sordino.engines import simulate
from sordino.errors import SordinoError
from sordino.privacy import spending
from sordino.privacy.evidence.certificate import certificate, finite
from sordino.privacy.evidence.statement import statement
from sordino.training.resolved import resolve
from sordino.training.run import PreparedRun, prepare_resolved
from sordino.training.shared_ledger import array_digest, join
from sordino.training.spec import RUN_KEYS, Spec
from sordino.version import __version__

OWN = ("method", "epsilon", "delta", "rounds", "clients", "unit", "adjacency", "trust", "divisor", "normalize")
NUMBERS = ("epsilon", "delta", "rounds", "clients")  # a run's spec reads them from text, too
PERSON = ("person_records", "person_clients", "person_ids")
OTHERS = ("class_weights", "client_epsilon", "dtype", "participation", "uncertified", *PERSON)  # for `options`

PREPARED = "Features were prepared without statistics of these records: by each record alone, or by public figures."
SEARCHED = "this was one of several fits of copies of one estimator; the others are not paid for here"

_COPIES: WeakKeyDictionary[FederatedClassifier, tuple[str, int]] = (
    WeakKeyDictionary()
)  # family, number of copies so far
_WARNED: set[str] = set()  # families


class UnpaidSearchWarning(UserWarning):
    """Several copies of one estimator were fitted, and no certificate covers all of them.

    Example:
        >>> issubclass(UnpaidSearchWarning, UserWarning)
        True
    """


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is not typed
    """Softmax regression, trained over clients under (epsilon, delta)-differential privacy.

    `fit(X, y, groups=site)` makes one client per group; at client level the groups are the protected clients. Without
    groups the records are divided at random among `clients` simulated clients. `fit(X, y, persons=patient)` protects
    all records of a person together (options `person_records`, `person_clients`, `person_ids`). In a `Pipeline` pass
    `model__groups=site`, or route it: `set_fit_request(groups=True)`. The groups of a search reach only its splitter,
    unless they are routed.

    What the guarantee does not cover:

    - Earlier steps of a pipeline. A scaler fitted to the same records is a release that no budget pays for; scale by
      public constants, or set `normalize="l2"`.
    - Searches and cross-validation. The certificate of a fit covers only that fit. The second fitted copy raises an
      `UnpaidSearchWarning`, once per search. `sordino.privacy.accounting.selection` computes the joint cost.
    - The set of classes, which is public. It comes from `y`, unless `classes` declares it.

    Args:
      method: a name that `sordino methods` lists.
      epsilon, delta, unit, adjacency, trust: the guarantee, as in `sordino.Privacy`. epsilon = inf: no noise.
      rounds: number of rounds; by default that of the method.
      clients: number of simulated clients if there are no groups, at most the number of records; by default 10, or as
        many as there are records.
      divisor: `pooled` or `client-mean`.
      normalize: `none`, `l2` (every record to norm 1) or `clip:R` (norms at most R); by default as the
        method needs it.
      options: options of the method, as in `{"lr": 0.5, "clip": 2.0}`; also the keys `participation`, `class_weights`,
        `client_epsilon`, `dtype` and `uncertified` of a run.
      classes: all labels that may occur, even if `y` lacks some.
      ledger: a file that adds up the fits and runs on the same data, as `sordino run --ledger` does; None for none. The
        same data are the same arrays X and y, so that parts of them, as in cross-validation, are other data.
      limit: the most epsilon that all of them together may spend; fit raises `OverspentError` before it would exceed
        it. The ledger keeps it.
      random_state: None for cryptographic noise. An int makes a fit reproducible but not private, because whoever
        knows it can subtract the noise. The certificate states this.

    Attributes:
      classes_, n_features_in_, feature_names_in_, coef_, intercept_: as in scikit-learn's linear classifiers.
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

    def __init__(
        self,
        *,
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
        self.classes = classes
        self.ledger = ledger
        self.limit = limit
        self.random_state = random_state

    def fit(self, X: Any, y: Any, groups: Any = None, persons: Any = None) -> FederatedClassifier:
        """Train. groups: the client of each record. persons: whom each record is about; they are then protected."""
        resolved = resolve(self._spec(groups is not None, persons is not None))
        if resolved.privacy.unit is Unit.CLIENT and groups is None:
            raise SordinoError("groups: at client level, fit needs the client of every record; pass groups.")
        with np.errstate(over="ignore"):  # values that overflow are reported as infinite
            X, y = validate_data(self, X, y, dtype=resolved.spec.dtype)
        site = None if groups is None else _sites(groups, len(X))
        classes, index = self._labels(y)
        if resolved.clients is not None and resolved.clients > len(X):
            if self.clients is not None:
                raise SordinoError(f"clients: {self.clients} must be at most the number of records, {len(X)}.")
            resolved = dataclasses.replace(resolved, clients=len(X))
        scaling = resolved.source.normalize
        digest = array_digest(X, y.astype(str)) if self.ledger is not None else b""
        X = preprocess(X, None, scaling)
        who = None if persons is None else np.unique(_sites(persons, len(X), "persons"), return_inverse=True)[1]
        data = Dataset("given", X, index, X[:0], index[:0], site, tuple(map(str, classes)), person=who)
        run = prepare_resolved(resolved, data)
        searched = self._warn_of_a_search()
        self._pay(run, digest, searched)

        history = []
        for this_round in simulate.run(run.plan, run.model, run.records, run.source):
            history.append(
                {"round": this_round.t + 1, "epsilon": finite(spending.epsilon_after(run.plan, this_round.t))}
            )
        theta = this_round.model.double().numpy()

        self.classes_, self.normalize_ = classes, scaling
        weight, bias = theta[: -len(classes)].reshape(X.shape[1], -1).T, theta[-len(classes) :]
        self.coef_, self.intercept_ = (np.diff(part, axis=0) if len(classes) == 2 else part for part in (weight, bias))
        self.history_ = history
        self.certificate_ = _certificate(run, searched)
        self.statement_ = statement(self.certificate_)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits, one per class; for two classes, the second minus the first."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        z = preprocess(X, None, self.normalize_) @ self.coef_.T + self.intercept_
        return np.asarray(z[:, 0] if len(self.classes_) == 2 else z)

    def predict_proba(self, X: Any) -> np.ndarray:
        z = self.decision_function(X)
        return np.stack([expit(-z), expit(z)], 1) if z.ndim == 1 else np.asarray(softmax(z, axis=1))

    def predict(self, X: Any) -> np.ndarray:
        z = self.decision_function(X)
        return np.asarray(self.classes_[(z > 0).astype(int) if z.ndim == 1 else z.argmax(1)])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy on these records. A model that is no better than a constant guess on them raises a warning.

        `fit` cannot warn: a comparison on the training records would be a release that no budget pays for.
        """
        accuracy = float(super().score(X, y, sample_weight))
        _, index = np.unique(np.asarray(y), return_inverse=True)
        weights = np.bincount(index, weights=None if sample_weight is None else np.asarray(sample_weight, float))
        constant = float(weights.max() / weights.sum())
        if len(weights) > 1 and accuracy <= constant * (1 + 1e-12):
            warnings.warn(
                f"the model is no better than a constant guess: its accuracy is {accuracy:.1%}, and {constant:.1%} of "
                "these records have the most common class. The noise exceeds the signal, or features differ in scale: "
                'scale X by public figures, set normalize="l2", or raise epsilon.',
                UserWarning,
                stacklevel=2,
            )
        return accuracy

    # ------------------------------------------------------------------------------------------------------- inside

    def _spec(self, grouped: bool, persons: bool = False) -> Spec:
        """The spec of the run, with every parameter checked."""
        seed = _plain(self.random_state)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise SordinoError(f"random_state: {seed!r} must be an integer of at least 0, or None for private noise.")
        if self.options is not None and not isinstance(self.options, Mapping):
            raise SordinoError(f"options: {self.options!r} must be a dict of the method's options.")
        for key in NUMBERS:
            if isinstance(value := getattr(self, key), str):
                raise SordinoError(f"{key}: '{value}' is a text; give a number, without quotes.")
        options = {str(key): _plain(value) for key, value in (self.options or {}).items()}
        keys = set(RUN_KEYS) - set(OTHERS)
        if misplaced := sorted(keys & options.keys()):
            where = "it is a parameter of the estimator" if misplaced[0] in OWN else "it has no meaning here"
            raise SordinoError(f"options: '{misplaced[0]}' does not belong there; {where}.")
        parameters = {key: _plain(getattr(self, key)) for key in OWN if not (grouped and key == "clients")}
        spec = Spec.of(
            {
                **options,
                **parameters,
                "data": "given",
                "partition": "by-site" if grouped else "iid",
                "person": "persons" if persons else None,
                "seed": seed,
                "split_seed": seed or 0,
            }
        )
        return spec

    def _labels(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sorted classes, and the class index of each record."""
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
        return classes, index.astype(np.int64)

    def _pay(self, run: PreparedRun, digest: bytes, searched: bool) -> None:
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
        reasons = certificate(run.plan, run.source, version=__version__)["reasons"]
        shared = join(run.plan, self.ledger, _plain(self.limit), data=digest, reasons=reasons)
        shared.charge(f"fit {secrets.token_hex(16)}")

    def __sklearn_clone__(self) -> FederatedClassifier:
        """Copy, and count the copies. A search copies an estimator once, and then that copy for every fit, so the
        second copy of one estimator is the first sign of a search."""
        copy: FederatedClassifier = super().__sklearn_clone__()
        family, copies = _COPIES.get(self, (secrets.token_hex(8), 0))
        _COPIES[self] = family, copies + 1
        copy._copy = family, copies + 1
        return copy

    def _warn_of_a_search(self) -> bool:
        family, number = getattr(self, "_copy", ("", 0))
        if number > 1 and family not in _WARNED:
            _WARNED.add(family)
            warnings.warn(
                "copies of one FederatedClassifier are being fitted, as in a search or in cross-validation: the "
                "certificate of each fit covers that fit alone, and what they reveal together is not paid for. "
                "docs/how-to/tune.md shows searches that are paid for.",
                UnpaidSearchWarning,
                stacklevel=3,
            )
        return number > 1


def _certificate(run: PreparedRun, searched: bool) -> dict[str, Any]:
    # At client level the names tell who took part, which must stay secret.
    names = run.names if run.plan.privacy.unit.sizes_public else []
    tuning: dict[str, Any] = {"tuning": SEARCHED} if searched else {}
    return certificate(run.plan, run.source, version=__version__, names=names, assumes=[PREPARED], **tuning)


def _sites(groups: Any, records: int, field: str = "groups") -> np.ndarray:
    site = np.asarray(groups)
    if site.shape != (records,):
        raise SordinoError(f"{field}: shape {site.shape} for {records} records; give one entry per record.")
    missing = sum(each is None or each != each for each in site.tolist())
    if missing:
        raise SordinoError(f"{field}: {missing} entries are missing; fill them or drop those records.")
    return site.astype(str) if site.dtype == object else site


def _plain(value: Any) -> Any:
    """A numpy number, as in a grid of parameters, as a Python number."""
    return value.item() if isinstance(value, np.generic) else value
