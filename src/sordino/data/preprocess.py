"""Preprocessing that costs no privacy: per record, or by statistics that are declared public.

No function here uses a statistic of private features to change the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sordino import files
from sordino.core import SAFETY
from sordino.data.arrays import each_times
from sordino.data.readers import read_arrays
from sordino.data.splits import parse_number
from sordino.errors import SordinoError, nearest

RADIUS = 10.0  # norm of a record under `record`; the bias feature, 1, is small against it
FEATURES_THRESHOLD = 16  # with fewer features, removing a record's mean and norm would remove too much of it
RIDGE = 1e-3  # share of the mean eigenvalue; keeps whitening bounded if the public covariance is singular


def preprocess(
    x: np.ndarray, public: tuple[np.ndarray, np.ndarray] | None, normalize: str, *, apart: bool = False
) -> np.ndarray:
    """Centre and whiten by public (mean, cov), then normalise each record separately. Neither costs privacy.

    apart: where the number of records is not public; see `arrays.each_times`. It is slower.
    """
    if normalize == "record":
        return by_record(x, public, apart)
    return scaler(normalize)(x if public is None else whiten(x, *public, apart=apart))


def scaler(normalize: str) -> Callable[[np.ndarray], np.ndarray]:
    """The per-record map that `normalize` names."""
    law, colon, radius = normalize.partition(":")
    if law in ("standardize", "standardise", "zscore", "minmax", "whiten", "pca"):
        raise SordinoError(
            f"normalize: '{law}' needs statistics of the private data, and these are a release that "
            "no budget pays for. Use --public-stats FILE (centre and whiten by public statistics), or normalize l2."
        )
    if law == "table":
        columns = parse_number(radius, "normalize", f"'{normalize}' needs a number of columns; write table:13")
        if columns < 1:
            raise SordinoError(f"normalize: '{normalize}' needs at least one column; write table:13.")
        return lambda x: by_table(x, columns)
    if law == "clip":
        limit = parse_number(radius, "normalize", f"'{normalize}' needs a radius; write clip:1.0")
        if limit <= 0:
            raise SordinoError(f"normalize: '{normalize}' needs a radius above 0; write clip:1.0.")
        limit *= 1 - SAFETY
        return lambda x: x * (limit / np.maximum(norms(x), limit)).astype(np.float32)
    if colon or law not in ("none", "l2", "record"):
        known = ("none", "l2", "clip:R", "record", "table:COLUMNS")
        raise SordinoError(f"normalize: '{normalize}' is unknown.{nearest(normalize, known)}")
    if law == "record":
        return by_record
    if law == "none":
        return lambda x: x
    return lambda x: (x / np.where((norm := norms(x)) > 0, norm, 1)).astype(np.float32)  # a zero record stays zero


def norms(x: np.ndarray) -> np.ndarray:
    """Norm of each record, in float64, because the squares of large float32 values overflow."""
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", x, x, dtype=np.float64)))[:, None]


def by_record(x: np.ndarray, public: tuple[np.ndarray, np.ndarray] | None = None, apart: bool = False) -> np.ndarray:
    """Remove skew, offset and scale of each record separately, and scale it to norm RADIUS.

    A record without negative entries (amounts, intensities, activations) is replaced by its square roots, which reduce
    large entries. Then its own mean is subtracted; with public statistics, their mean, and the record is half whitened.
    A record with few features is only scaled, so that features of 1 have norm RADIUS, and clipped there.
    """
    features = x.shape[1]
    if features < FEATURES_THRESHOLD:
        x = x if public is None else whiten(x, *public, apart=apart)
        return np.asarray(x * (RADIUS / np.maximum(norms(x), math.sqrt(features))), np.float32)
    amounts = (x >= 0).all(1, keepdims=True)
    if public is None:
        z = np.where(amounts, np.sqrt(np.abs(x)), x).astype(np.float64)
        z -= z.mean(1, keepdims=True)
    else:
        of_amounts = whiten(np.sqrt(np.abs(x)), *of_roots(*public), 0.25, apart)
        z = np.where(amounts, of_amounts, whiten(x, *public, 0.25, apart))
    norm = norms(z)
    real = norm > 1e-6 * norms(x)  # otherwise all features are equal, and only rounding errors remain
    return np.asarray(np.where(real, z * (RADIUS / np.where(real, norm, 1)), 0), np.float32)


def by_table(x: np.ndarray, columns: float) -> np.ndarray:
    """Records that a schema encoded: scaled so that one with 1 in every column has norm RADIUS, and clipped there."""
    scale = RADIUS / np.maximum(norms(x), math.sqrt(columns))
    out = np.empty_like(x, np.float32)
    np.multiply(x, scale, out=out, casting="same_kind")  # in float64, without an array of that type
    return out


def of_roots(mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Approximate mean (as for a log-normal) and covariance (to first order) of square roots."""
    mean = mean.clip(min=max(RIDGE * mean.mean(), np.finfo(np.float32).tiny))
    half = np.sqrt(mean) / 2 / mean
    return np.sqrt(mean) * (1 + np.diag(cov) / mean**2) ** -0.125, cov * np.outer(half, half)


def whiten(x: np.ndarray, mean: np.ndarray, cov: np.ndarray, power: float = 0.5, apart: bool = False) -> np.ndarray:
    """(x - mean) V diag((lambda + ridge)^-power) V^T, for cov = V diag(lambda) V^T."""
    matrix = whitening(cov, power)
    return np.asarray(each_times(x - mean, matrix) if apart else (x - mean) @ matrix, np.float32)


def whitening(cov: np.ndarray, power: float = 0.5) -> np.ndarray:
    """V diag((lambda + ridge)^-power) V^T, for cov = V diag(lambda) V^T."""
    eigenvalue, V = np.linalg.eigh((cov + cov.T) / 2)
    eigenvalue = eigenvalue.clip(min=0)
    return np.asarray(V / (eigenvalue + RIDGE * eigenvalue.mean()) ** power @ V.T)


def read_public_statistics(path: Path, features: int) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise files.absent("public_stats", path)
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
