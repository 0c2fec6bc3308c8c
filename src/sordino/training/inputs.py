"""Checks of the files that a run names, before it reads or trains anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sordino.errors import SordinoError


def check_readable(name: str, field: str) -> None:
    """Refuse a file that exists and that this user cannot read.

    Args:
      name: a path, or the name of a data set, which is not checked.
      field: the setting that named it, for the error.

    Raises:
      SordinoError: the file cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file() and not os.access(path, os.R_OK):
        raise SordinoError(f"{field}: this user cannot read '{name}'; ask its owner, or change its permissions.")


def read_statistics(name: str) -> dict[str, Any]:
    """The arrays of a file of public statistics. A missing file has none; `load` names it.

    Raises:
      SordinoError: the file is no .npz.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        return {}
    check_readable(name, "public_stats")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except Exception:  # text, a single array and a damaged archive fail in different ways
        raise SordinoError(
            f"public_stats: '{name}' is not an .npz file; write one with numpy.savez(FILE, mean=…, std=…), from "
            "figures that are public."
        ) from None


def check_statistics(arrays: dict[str, Any], columns: Sequence[str]) -> None:
    """Refuse standard deviations that are not above 0, and variances that are negative.

    Args:
      arrays: what `read_statistics` returned.
      columns: names of the features, in order; empty where they have none.

    Raises:
      SordinoError: names the column.
    """
    for key, least in (("std", "above 0"), ("cov", "0 or more on its diagonal")):
        if key not in arrays or (key == "std" and "cov" in arrays):
            continue
        values = np.asarray(arrays[key], dtype=np.float64)
        values = values.diagonal() if key == "cov" and values.ndim == 2 else np.atleast_1d(values)
        wrong = np.flatnonzero(~(values > 0) if key == "std" else values < 0)
        if len(wrong):
            at = int(wrong[0])
            column = f"column '{columns[at]}'" if at < len(columns) else f"feature {at}"
            raise SordinoError(
                f"public_stats: {key} must be {least}, and {column} has {values[at]:g}; give the figures of public "
                "records, or leave the column out of data and statistics."
            )
