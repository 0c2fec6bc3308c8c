"""A federated, differentially private linear classifier with the manners of scikit-learn.

    FederatedClassifier(epsilon=2.0).fit(X, y, groups=hospital).predict(X_new)

Every fit is one simulated run, with a certificate of its own. Nothing is evaluated on the training records.
"""

from __future__ import annotations

import dataclasses
import secrets
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

import sordino
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
from sordino.training.spec import RUN_KEYS, Spec

OWN = ("method", "epsilon", "delta", "rounds", "clients", "unit", "adjacency", "trust", "divisor", "normalize")
OTHERS = ("class_weights", "client_epsilon", "dtype", "participation", "uncertified")  # keys of a run for `options`

PREPARED = "Features were prepared without statistics of these records: by each record alone, or by public figures."
SEARCHED = "this was one of several fits of copies of one estimator; the others are not paid for here"

_COPIES: WeakKeyDictionary[FederatedClassifier, tuple[str, int]] = WeakKeyDictionary()  # family, copies made so far
_WARNED: set[str] = set()  # families


class UnpaidSearchWarning(UserWarning):
    """Several copies of one estimator are fitted, and no certificate covers them together.

    Example:
        >>> issubclass(UnpaidSearchWarning, UserWarning)
        True
    """


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is not typed
    """Softmax regression, trained over clients under (epsilon, delta)-differential privacy.

    `fit(X, y, groups=site)` takes one client a group; at user level the groups are the users whom the promise is for.
    Without groups the records are dealt out at random to `clients` simulated ones. In a `Pipeline` pass
    `model__groups=site`, or route it: `set_fit_request(groups=True)`. The groups given to a search reach its splitter
    alone, unless they are routed.

    What the promise does not cover:

    - Steps before this one. A scaler fitted to the same records is a release that nothing pays for; scale by public
      figures, or set `normalize="l2"`.
    - Searches and cross-validation. Each fit's certificate covers that fit alone; a second copy that is fitted says so
      by an `UnpaidSearchWarning`, once a search. `sordino.privacy.accounting.selection` has the price of all.
    - The set of classes, which is public. It is taken from `y`, unless `classes` declares it.

    Args:
      method: as `sordino methods` lists them.
      epsilon, delta, unit, adjacency, trust: the promise, as in `sordino.Privacy`. epsilon = inf: no noise.
      rounds: by default the method's own number.
      clients: simulated ones, where no groups are given; no more than there are records.
      divisor: `pooled` or `client-mean`.
      normalize: `none`, `l2` (every record to norm 1) or `clip:R` (norms at most R); by default the method's own.
      options: the method's own, as in `{"lr": 0.5, "clip": 2.0}`; also `participation`, `class_weights`,
        `client_epsilon`, `dtype` and `uncertified`, as a run's spec has them.
      classes: all labels that may occur, whether they do or not.
      random_state: None for cryptographic noise. An int makes a fit reproducible, and not private: whoever knows it
        can subtract the noise, and the certificate says so.

    Attributes:
      classes_, n_features_in_, feature_names_in_, coef_, intercept_: as in scikit-learn's linear classifiers.
      normalize_: how records are scaled before they are used.
      certificate_: all numbers of the promise, for `sordino.verify`. statement_: the same in words, as Markdown.
      history_: of each round, its number and the epsilon spent up to it.

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
        clients: int = 10,
        unit: str = Spec.unit,
        adjacency: str = Spec.adjacency,
        trust: str = Spec.trust,
        divisor: str = Spec.divisor,
        normalize: str | None = Spec.normalize,
        options: Mapping[str, Any] | None = None,
        classes: Any = None,
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
        self.random_state = random_state

    def fit(self, X: Any, y: Any, groups: Any = None) -> FederatedClassifier:
        """Train. groups: whose each record is."""
        resolved = resolve(self._spec(groups is not None))
        if resolved.privacy.unit is Unit.USER and groups is None:
            raise SordinoError("groups: at user level, fit needs the user of every record; pass groups.")
        with np.errstate(over="ignore"):  # what overflows is reported as infinite
            X, y = validate_data(self, X, y, dtype=resolved.spec.dtype)
        site = None if groups is None else _sites(groups, len(X))
        classes, index = self._labels(y)
        if resolved.clients is not None:
            resolved = dataclasses.replace(resolved, clients=min(resolved.clients, len(X)))
        scaling = resolved.source.normalize
        X = preprocess(X, None, scaling)
        data = Dataset("given", X, index, X[:0], index[:0], site, tuple(map(str, classes)))
        run = prepare_resolved(resolved, data)
        searched = self._warn_of_a_search()

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
        """Logits, one a class; of two classes, the second one's less the first's."""
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

    # ------------------------------------------------------------------------------------------------------- inside

    def _spec(self, grouped: bool) -> Spec:
        """The run that the parameters ask for, each checked."""
        seed = _plain(self.random_state)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise SordinoError(
                f"random_state: {seed!r} must be a whole number, 0 or more, or None for noise that is private."
            )
        if self.options is not None and not isinstance(self.options, Mapping):
            raise SordinoError(f"options: {self.options!r} should be a dict of the method's options.")
        if self.clients is None:
            raise SordinoError("clients: None; give the number of clients to simulate, which groups overrule.")
        options = {str(key): _plain(value) for key, value in (self.options or {}).items()}
        keys = set(RUN_KEYS) - set(OTHERS)
        if misplaced := sorted(keys & options.keys()):
            where = "it is a parameter of the estimator" if misplaced[0] in OWN else "it has no meaning here"
            raise SordinoError(f"options: '{misplaced[0]}' does not belong there; {where}.")
        own = {key: _plain(getattr(self, key)) for key in OWN if not (grouped and key == "clients")}
        spec = Spec.of(
            {
                **options,
                **own,
                "data": "given",
                "partition": "by-site" if grouped else "iid",
                "seed": seed,
                "split_seed": seed or 0,
            }
        )
        return spec

    def _labels(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The classes, sorted, and the index of each record's."""
        check_classification_targets(y)
        classes, index = np.unique(y, return_inverse=True)
        if self.classes is not None:
            found, classes = classes, np.unique(np.asarray(self.classes))
            if unknown := [label for label in found if label not in classes]:
                raise SordinoError(f"classes: label '{unknown[0]}' of y is not among them; declare it, or drop it.")
            index = np.searchsorted(classes, found)[index]
        if len(classes) < 2:
            raise SordinoError("y: all records are of one class; take more data, or declare the others by classes.")
        return classes, index.astype(np.int64)

    def __sklearn_clone__(self) -> FederatedClassifier:
        """A copy that knows it is one. Searches copy an estimator once and then that copy for every fit; so copies of
        one estimator are a family, and the second of them to be made is the first sign of a search."""
        copy: FederatedClassifier = super().__sklearn_clone__()
        family, made = _COPIES.get(self, (secrets.token_hex(8), 0))
        _COPIES[self] = family, made + 1
        copy._copy = family, made + 1
        return copy

    def _warn_of_a_search(self) -> bool:
        family, number = getattr(self, "_copy", ("", 0))
        if number > 1 and family not in _WARNED:
            _WARNED.add(family)
            warnings.warn(
                "copies of one FederatedClassifier are being fitted, as in a search or in cross-validation: the "
                "certificate of each fit covers that fit alone, and what they reveal together is not paid for. "
                "sordino.privacy.accounting.selection tells what it costs.",
                UnpaidSearchWarning,
                stacklevel=3,
            )
        return number > 1


def _certificate(run: PreparedRun, searched: bool) -> dict[str, Any]:
    # At user level the names say who took part, and that is to be hidden.
    names = run.names if run.plan.privacy.unit is Unit.RECORD else []
    tuning: dict[str, Any] = {"tuning": SEARCHED} if searched else {}
    return certificate(run.plan, run.source, version=sordino.__version__, names=names, assumes=[PREPARED], **tuning)


def _sites(groups: Any, records: int) -> np.ndarray:
    site = np.asarray(groups)
    if site.shape != (records,):
        raise SordinoError(f"groups: shape {site.shape} for {records} records; give one group a record.")
    missing = sum(each is None or each != each for each in site.tolist())
    if missing:
        raise SordinoError(f"groups: {missing} entries are missing; fill them or drop those records.")
    return site.astype(str) if site.dtype == object else site


def _plain(value: Any) -> Any:
    """A number of numpy's, as a grid of parameters holds them, as Python's own."""
    return value.item() if isinstance(value, np.generic) else value
