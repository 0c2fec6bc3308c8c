"""The spec of a run from the parameters of an estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from sordino.errors import SordinoError
from sordino.training.spec import RUN_KEYS, Spec, normalize_of

OWN = ("model", "method", "epsilon", "delta", "rounds", "clients", "unit", "adjacency", "trust", "divisor", "normalize")
NUMBERS = ("epsilon", "delta", "rounds", "clients")  # a run's spec reads them from text, too
PERSON = ("person_records", "person_clients", "person_ids", "person_choice")
OTHERS = (
    "batch",
    "calibrate",
    "calibrate_slope",
    "class_weights",
    "client_epsilon",
    "clipping",
    "dtype",
    "participation",
    "private_statistics",
    "uncertified",
    *PERSON,
)


def spec_of(estimator: BaseEstimator, *, grouped: bool, persons: bool, bare: bool) -> Spec:
    """The spec of the run that an estimator's parameters describe.

    Args:
      estimator: the estimator.
      grouped: the client of each record is known.
      persons: persons are given as an argument of fit.
      bare: there is no schema, so that records are scaled as the method needs arrays.
    """
    seed = plain(estimator.random_state)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise SordinoError(f"random_state: {seed!r} must be an integer of at least 0, or None for private noise.")
    if estimator.options is not None and not isinstance(estimator.options, Mapping):
        raise SordinoError(f"options: {estimator.options!r} must be a dict of the method's options.")
    for key in NUMBERS:
        if isinstance(value := getattr(estimator, key), str):
            raise SordinoError(f"{key}: '{value}' is a text; give a number, without quotes.")
    options = {str(key): plain(value) for key, value in (estimator.options or {}).items()}
    keys = set(RUN_KEYS) - set(OTHERS)
    if misplaced := sorted(keys & options.keys()):
        where = "it is a parameter of the estimator" if misplaced[0] in OWN else "it has no meaning here"
        raise SordinoError(f"options: '{misplaced[0]}' does not belong there; {where}.")
    parameters = {key: plain(getattr(estimator, key)) for key in OWN if not (grouped and key == "clients")}
    if bare and parameters["normalize"] is None:
        parameters["normalize"] = normalize_of(str(estimator.method), str(parameters["model"]))
    return Spec.of(
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


def plain(value: Any) -> Any:
    """A numpy number, as in a grid of parameters, as a Python number."""
    return value.item() if isinstance(value, np.generic) else value
