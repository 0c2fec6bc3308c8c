"""Steps in front of an estimator that learn from the same records: a release that no budget pays for.

A scaler fitted to private records puts their mean into every feature. The clip bounds what one record adds to a sum; it
does not bound how one record moves the features of all others. So a fit after such a step is not certified.

An estimator does not know the `Pipeline` that it stands in, and nothing in scikit-learn tells it. But `Pipeline.fit`
calls the estimator's `fit`, so while the estimator is fitted, the pipeline is a caller. `steps_of_callers` reads the
callers. It misses a pipeline if the fit was handed to another process in between (a `BaggingClassifier` with `n_jobs`
as last step), if it is none of scikit-learn's, or if the features were scaled by hand; the certificate then assumes
that no statistic of the records prepared them. `certificate_of` reads a pipeline from the outside, also one that was
put together from fitted parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
from sklearn.frozen import FrozenEstimator
from sklearn.kernel_approximation import RBFSampler
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, PolynomialFeatures
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection
from sklearn.utils import get_tags

from sordino.errors import SordinoError

PREPARED = "Features were prepared without statistics of these records: by each record alone, or by public figures."
UNUSED = (None, "passthrough", "drop")


class UnpaidStepWarning(UserWarning):
    """A step in front of an estimator was fitted to the same records, and no budget pays for what it learnt.

    Example:
        >>> issubclass(UnpaidStepWarning, UserWarning)
        True
    """


def _always(step: Any) -> bool:
    return True


def _given_categories(step: Any) -> bool:
    """Whether the levels of every column are given, and none is merged or dropped by how often it occurs."""
    if isinstance(step.categories, str):
        return False
    return step.min_frequency is None and step.max_categories is None


# What `fit` of these takes from the records is the number of columns, and of rows, alone. Exact types: a subclass may
# do something else.
DATA_FREE: dict[type, Callable[[Any], bool]] = {
    PolynomialFeatures: _always,
    RBFSampler: lambda step: step.gamma != "scale",  # "scale" divides by the variance of the records
    GaussianRandomProjection: _always,
    SparseRandomProjection: _always,
    OneHotEncoder: _given_categories,
    OrdinalEncoder: _given_categories,
}


def fitted_steps(step: Any, name: str = "") -> list[str]:
    """The parts of a transformer that learn from the records that it is fitted to, for people.

    A part that works on each record alone is none: one that scikit-learn calls stateless (the tag `requires_fit` is
    False: `Normalizer`, `FunctionTransformer`, …), one whose fit reads only the shape of the data, and a
    `FrozenEstimator`, which is not fitted here.

    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import Normalizer, StandardScaler
    >>> fitted_steps(make_pipeline(Normalizer(), StandardScaler()))
    ['standardscaler (StandardScaler)']
    """
    if (isinstance(step, str) or step is None) and step in UNUSED:
        return []
    if isinstance(step, Pipeline):
        return [part for inner, each in step.steps for part in fitted_steps(each, _joined(name, inner))]
    if isinstance(step, FeatureUnion):
        return [part for inner, each in step.transformer_list for part in fitted_steps(each, _joined(name, inner))]
    if isinstance(step, ColumnTransformer):
        return list(_of_columns(step, name))
    if isinstance(step, FrozenEstimator) or not get_tags(step).requires_fit:
        return []
    if (rule := DATA_FREE.get(type(step))) is not None and rule(step):
        return []
    return [f"{name} ({type(step).__name__})" if name else type(step).__name__]


def _of_columns(step: ColumnTransformer, name: str) -> Iterator[str]:
    for inner, each, columns in (*step.transformers, ("remainder", step.remainder, [])):
        if callable(columns) and not isinstance(columns, make_column_selector):  # a selector reads names and types
            yield f"{_joined(name, inner)} (columns chosen by a function of the records)"
        yield from fitted_steps(each, _joined(name, inner))


def _joined(name: str, inner: str) -> str:
    return f"{name}/{inner}" if name else inner


def steps_of_callers(estimator: Any) -> list[str]:
    """The fitted steps in front of the estimator, in every pipeline that is calling its fit now."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name in _FITTING else None
        for part in _before(caller, estimator):
            if part not in found:
                found.append(part)
        frame = frame.f_back  # type: ignore[assignment]  # the outermost frame has none
    return found


_FITTING = ("fit", "fit_transform", "fit_predict", "_fit")


def _before(caller: Any, estimator: Any) -> list[str]:
    """What one caller fits in front of the estimator."""
    if isinstance(caller, Pipeline):
        places = [k for k, (_, step) in enumerate(caller.steps) if step is estimator]
        earlier = caller.steps[: places[0] if places else -1]
        return [part for name, step in earlier for part in fitted_steps(step, name)]
    if isinstance(caller, TransformedTargetRegressor) and caller.transformer is not None:
        return [f"of the target, {part}" for part in fitted_steps(caller.transformer)]
    return []


def doubt(steps: list[str]) -> str:
    """Why a fit after these steps is not certified."""
    which = f"step {steps[0]} was" if len(steps) == 1 else f"steps {', '.join(steps)} were"
    return (
        f"the {which} fitted to the same records in front of the estimator, and no budget pays for what that tells of "
        'them. Scale by public figures, by a schema, or by normalize = "l2"'
    )


def certificate_of(fitted: Any) -> dict[str, Any]:
    """The certificate of a fitted estimator, pipeline or search, with what the steps of a pipeline mean for it.

    The certificate of an estimator knows the pipelines that fitted it in the same process. This function reads the
    pipeline itself, however it was fitted or put together.

    Args:
        fitted: A fitted `FederatedClassifier`, `FederatedRegressor` or `FederatedCox`; a `Pipeline` whose last step is
            one; or a search (`GridSearchCV`) over one of these.

    Returns:
        The certificate. It is not certified if a step of the pipeline was fitted to the records.

    Raises:
        SordinoError: There is no fitted estimator of this package in it.

    Example:
        >>> import sordino as so
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import Normalizer
        >>> data = so.load("digits")
        >>> pipe = make_pipeline(Normalizer(), so.FederatedClassifier(rounds=5))
        >>> so.certificate_of(pipe.fit(data.x_train, data.y_train))["certified"]
        True
    """
    steps: list[str] = []
    inner = fitted
    while not hasattr(inner, "certificate_"):
        if isinstance(inner, Pipeline) and inner.steps:
            steps += [part for name, step in inner.steps[:-1] for part in fitted_steps(step, name)]
            inner = inner.steps[-1][1]
        elif hasattr(inner, "best_estimator_"):
            inner = inner.best_estimator_
        else:
            raise SordinoError(
                f"certificate_of: {type(inner).__name__} holds no certificate; pass a fitted FederatedClassifier, "
                "FederatedRegressor or FederatedCox, or a fitted Pipeline that ends with one."
            )
    return with_steps(dict(inner.certificate_), steps)


def with_steps(cert: dict[str, Any], steps: list[str]) -> dict[str, Any]:
    """The certificate where these steps were fitted to the records."""
    if not steps:
        return cert
    reasons = cert["reasons"]
    if not any("in front of the estimator" in reason for reason in reasons):
        reasons = [*reasons, f"not proved: {doubt(steps)}"]
    assumes = [line for line in cert["assumes"] if line != PREPARED]
    return {**cert, "certified": False, "reasons": reasons, "assumes": assumes}
