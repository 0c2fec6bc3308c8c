"""McNemar's test for two classifiers on the same test records, and its compact storage."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Bits = np.ndarray | Sequence[bool]


class McNemar(NamedTuple):
    n10: int  # a right, b wrong
    n01: int  # a wrong, b right
    chi2: float
    p: float


def mcnemar(correct_a: Bits, correct_b: Bits) -> McNemar:
    """McNemar's test with continuity correction."""
    a, b = np.asarray(correct_a, bool), np.asarray(correct_b, bool)
    if a.shape != b.shape:
        raise ValueError(f"answers to {a.shape} and {b.shape} records cannot be paired")
    return from_counts(int((a & ~b).sum()), int((~a & b).sum()))


def from_counts(n10: int, n01: int) -> McNemar:
    """The test from its two counts. If the classifiers never differ, p is 1."""
    from scipy.stats import chi2

    if n10 + n01 == 0:
        return McNemar(n10, n01, 0.0, 1.0)
    value = max(0, abs(n10 - n01) - 1) ** 2 / (n10 + n01)
    return McNemar(n10, n01, value, float(chi2.sf(value, 1)))


def pack(bits: Bits) -> str:
    """Bits as base64, eight per byte."""
    return base64.b64encode(np.packbits(np.asarray(bits, bool)).tobytes()).decode("ascii")


def unpack(text: str, count: int) -> np.ndarray:
    """The first `count` bits of a text that `pack` returned."""
    raw = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if len(raw) != -(-count // 8):
        raise ValueError(f"{len(raw)} bytes do not hold {count} bits")
    return np.unpackbits(raw, count=count).astype(bool)
