"""Federated, differentially private models with the interface of scikit-learn.

    FederatedClassifier(epsilon=2.0).fit(X, y, groups=hospital).predict(X_new)
    FederatedRegressor(epsilon=2.0, schema="schema.toml").fit(frame).predict(new_frame)

Every fit is one simulated run with its own certificate. Nothing is evaluated on the training records.
"""

from sordino.estimators.base import UnpaidSearchWarning
from sordino.estimators.classifier import FederatedClassifier
from sordino.estimators.cox import FederatedCox
from sordino.estimators.pipelines import UnpaidStepWarning, certificate_of
from sordino.estimators.regressor import FederatedRegressor

__all__ = [
    "FederatedClassifier",
    "FederatedCox",
    "FederatedRegressor",
    "UnpaidSearchWarning",
    "UnpaidStepWarning",
    "certificate_of",
]
