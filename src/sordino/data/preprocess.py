"""Preprocessing that costs no privacy: per record, or by statistics that are declared public.

No function here computes a statistic of private features and lets it shape the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sordino.core import SAFETY
from sordino.data.readers import read_arrays
from sordino.data.splits import parse_number
from sordino.errors import SordinoError, nearest

RADIUS = 10.0  # norm of a record under `record`: the bias, a feature of 1, is small beside it
FEATURES_THRESHOLD = 16  # with fewer features, a record's own mean and norm are too much of it to be removed
RIDGE = 1e-3  # of the mean eigenvalue: keeps whitening bounded where the public covariance is singular


def preprocess(x: np.ndarray, public: tuple[np.ndarray, np.ndarray] | None, normalize: str) -> np.ndarray:
    """Centre and whiten by public (mean, cov), then normalise each record by itself: neither costs privacy."""
    if normalize == "record":
        return by_record(x, public)
    return scaler(normalize)(x if public is None else whiten(x, *public))


def scaler(normalize: str) -> Callable[[np.ndarray], np.ndarray]:
    """The per-record map that `normalize` names."""
    word, given, radius = normalize.partition(":")
    if word in ("standardize", "standardise", "zscore", "minmax", "whiten", "pca"):
        raise SordinoError(
            f"normalize: '{word}' needs statistics of the private data, and these are themselves a release that "
            "nothing here pays for. Use --public-stats FILE (centre and whiten by public statistics), or normalize l2."
        )
    if word == "clip":
        limit = parse_number(radius, "normalize", f"'{normalize}' needs a radius; write clip:1.0")
        if limit <= 0:
            raise SordinoError(f"normalize: '{normalize}' needs a radius above 0; write clip:1.0.")
        limit *= 1 - SAFETY
        return lambda x: x * np.minimum(1, limit / np.maximum(norms(x), np.finfo(float).tiny)).astype(np.float32)
    if given or word not in ("none", "l2", "record"):
        known = ("none", "l2", "clip:R", "record")
        raise SordinoError(f"normalize: '{normalize}' is unknown.{nearest(normalize, known)}")
    if word == "record":
        return by_record
    if word == "none":
        return lambda x: x
    return lambda x: (x / np.where((norm := norms(x)) > 0, norm, 1)).astype(np.float32)  # a zero record stays zero


def norms(x: np.ndarray) -> np.ndarray:
    """Of each record, in float64: the squares of large float32 values overflow."""
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", x, x, dtype=np.float64)))[:, None]


def by_record(x: np.ndarray, public: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    """Every record freed of skew, offset and scale, and brought to norm RADIUS, by what it says itself.

    A record without negative entries (amounts, intensities, activations) is replaced by its square roots, which tame
    large entries. Then its own mean is taken off; or, where there are public statistics, their mean, and it is whitened
    half-way. With few features a record is only scaled to norm RADIUS where its features are 1, and cut there.
    """
    features = x.shape[1]
    if features < FEATURES_THRESHOLD:
        x = x if public is None else whiten(x, *public)
        return np.asarray(x * (RADIUS / np.maximum(norms(x), math.sqrt(features))), np.float32)
    amounts = (x >= 0).all(1, keepdims=True)
    if public is None:
        z = np.where(amounts, np.sqrt(np.abs(x)), x).astype(np.float64)
        z -= z.mean(1, keepdims=True)
    else:
        z = np.where(amounts, whiten(np.sqrt(np.abs(x)), *of_roots(*public), 0.25), whiten(x, *public, 0.25))
    norm = norms(z)
    real = norm > 1e-6 * norms(x)  # else the features are all alike, and what is left of them is rounding
    return np.asarray(np.where(real, z * (RADIUS / np.where(real, norm, 1)), 0), np.float32)


def of_roots(mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of square roots, about: as of a log-normal, and to first order."""
    mean = mean.clip(min=max(RIDGE * mean.mean(), np.finfo(np.float32).tiny))
    half = np.sqrt(mean) / 2 / mean
    return np.sqrt(mean) * (1 + np.diag(cov) / mean**2) ** -0.125, cov * np.outer(half, half)


def whiten(x: np.ndarray, mean: np.ndarray, cov: np.ndarray, power: float = 0.5) -> np.ndarray:
    """(x - mean) V diag((lambda + ridge)^-power) V^T, for cov = V diag(lambda) V^T."""
    eigenvalue, V = np.linalg.eigh((cov + cov.T) / 2)
    eigenvalue = eigenvalue.clip(min=0)
    transform = V / (eigenvalue + RIDGE * eigenvalue.mean()) ** power @ V.T
    return np.asarray((x - mean) @ transform, np.float32)


def read_public_statistics(path: Path, features: int) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise SordinoError(f"public_stats: there is no file '{path}'; check the path.")
    arrays = read_arrays(path, "public_stats")
    if "std" in arrays and "cov" not in arrays and arrays["std"].ndim == 1:
        arrays["cov"] = np.diag(arrays["std"].astype(float) ** 2)
    if not {"mean", "cov"} <= arrays.keys():
        raise SordinoError(f"public_stats: '{path}' holds {sorted(arrays)}; it needs mean, and cov or std.")
    mean, cov = arrays["mean"], arrays["cov"]
    if mean.shape != (features,) or cov.shape != (features, features):
        raise SordinoError(
            f"public_stats: mean {mean.shape} and cov {cov.shape} do not fit data of {features} features; "
            "use statistics of the same features."
        )
    if not (np.isfinite(mean).all() and np.isfinite(cov).all() and np.trace(cov) > 0):
        raise SordinoError(f"public_stats: mean and cov in '{path}' must be finite, and cov not zero.")
    return mean.astype(np.float64), cov.astype(np.float64)
