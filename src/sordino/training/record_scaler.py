"""Scaling of records as a step of a scikit-learn Pipeline, for exported models."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin

from sordino.data.preprocess import preprocess, scaler


class RecordScaler(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Scales each record by itself, as training did. It learns nothing from data.

    Args:
      normalize: the law, as in a spec: none, l2, clip:R, record, table:COLUMNS.
      public: public mean and covariance to centre and whiten by first.
    """

    def __init__(self, normalize: str = "none", public: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        self.normalize = normalize
        self.public = public

    def fit(self, X: Any, y: Any = None) -> RecordScaler:
        """Only notes the number of features."""
        scaler(self.normalize)
        self.n_features_in_ = np.asarray(X).shape[1]
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The records, scaled: float32."""
        return preprocess(np.asarray(X, np.float32), self.public, self.normalize)
