"""Sums of clipped terms whose sensitivity is proved for the arithmetic that runs.

A float32 sum in one accumulator has no useful sensitivity bound: a changed record changes how every later addition
rounds. The sums here keep rounding local. Let t_1 … t_n be the terms, float vectors of norm at most
C' = C (1 - SAFETY), where t_j depends on record j and on theta alone. `row_sums` adds up to k = FLOAT32_TERMS terms in
float32 (u = 2^-24) and everything beyond in float64 (v = 2^-53). Neighbouring data differ in one term, so the computed
sums differ by at most the sum of

- C', the change of the term itself (2 C' if one record is replaced by another: the account then pays for 2 C);
- 2 * k * k * u * C' = 2^-15 C': only the block of the changed record changes, and either version of its float32 sum is
  off by at most gamma_k times the sum of its k norms, for any order of additions;
- 2 * depth * n * v * C' <= 2^-16 C' for the float64 additions, of which each number passes at most `depth`. `in_chunks`
  enforces this bound.

Together at most C' (1 + 4.6e-5) < C, because SAFETY = 2^-14 = 6.1e-5. The remaining 1.5e-5 covers the rounding of the
clip factors to float32 (2^-24 each) and the float64 products of `per_example.total` (6e-6 at most).
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sordino.errors import SordinoError

FLOAT32_TERMS = 16  # terms that are added in float32
FLOAT64_TERMS = 1024  # float64 numbers that are added one after another before their sum is added to the total
PRODUCT_DRIFT = 5e-5  # the share of the clip by which sums made of float64 products alone may move; SAFETY is 6.1e-5
DRIFT = 2.0**-16  # the share of the clip by which the float64 additions may move a sum
PARTS_DRIFT = 2.0**-18  # what of either is left for adding up the parts of a sum that several processes computed

# Environment variables that lower the precision of products regardless of the program, and their harmless values.
PRECISION_VARIABLES = {
    "DNNL_DEFAULT_FPMATH_MODE": ("", "strict"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("", "strict"),
    "NVIDIA_TF32_OVERRIDE": ("", "0"),
    "CUBLAS_EMULATE_SINGLE_PRECISION": ("", "0"),
    "CUBLAS_EMULATE_DOUBLE_PRECISION": ("", "0"),
}


# ----------------------------------------------------------------------------------------------------------- settings


def exact_arithmetic(device: torch.device | None = None, *, own_code: bool = False) -> _Exact:
    """Run a block, or a function, with float32 products in float32 and without autocast, for any settings of the
    process.

    Holds the process-wide settings (TF32 and bfloat16 products, reduced-precision reductions) and this thread's
    autocast, and restores them at the end. Several threads may be inside at once: the last one to leave restores.

    Args:
      device: where the block computes; the CPU is always included.
      own_code: whether the block calls code of the user's, which might change the settings. Leaving it then raises
        SordinoError if they were changed.

    Returns:
      A context manager that also decorates functions. Entering it raises SordinoError if an environment variable lowers
      the precision of products, which the program cannot override.
    """
    return _Exact(device, own_code)


class _Exact(ContextDecorator):
    """What `exact_arithmetic` returns. It is entered for every sum, so it does only what the settings require."""

    def __init__(self, device: torch.device | None, own_code: bool) -> None:
        self._own_code = own_code
        self._types = ("cpu",) if device is None or device.type == "cpu" else ("cpu", device.type)
        self._autocast: list[torch.autocast] = []

    def _recreate_cm(self) -> _Exact:
        """A decorated function may call itself, so every call has a context of its own."""
        fresh = _Exact(None, self._own_code)
        fresh._types = self._types
        return fresh

    def __enter__(self) -> None:
        _settings.hold()
        self._autocast = [
            torch.autocast(each, enabled=False) for each in self._types if torch.is_autocast_enabled(each)
        ]
        for each in self._autocast:
            each.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        changed = self._own_code and not (_settings.exact() and self._plain())
        try:
            for each in reversed(self._autocast):
                each.__exit__(*error)
        finally:
            _settings.release()
        if changed and error[0] is None:
            raise SordinoError(
                "precision: the settings of products, or autocast, were changed while a sum was computed, so that it "
                "may exceed its bound. Leave set_float32_matmul_precision, allow_tf32 and autocast out of modules and "
                "of other threads; a network computes in bfloat16 with autocast=torch.bfloat16."
            )

    def _plain(self) -> bool:
        """Whether autocast is off."""
        return not any(torch.is_autocast_enabled(each) for each in self._types)


class _Settings:
    """The process-wide settings of products, held by a counted number of callers."""

    def __init__(self) -> None:
        self._lock, self._holders = threading.Lock(), 0
        self._before: _Values | None = None  # None if they were exact already
        self._exact: _Values | None = None  # what exact settings read as, once they were made

    def hold(self) -> None:
        with self._lock:
            if self._holders == 0:
                _check_environment()
                before = _read()
                self._before = None if before == self._exact else before
                if self._before is not None:
                    _make_exact()
                    self._exact = self._exact or _read()
            self._holders += 1

    def exact(self) -> bool:
        """Whether the settings are still as they were made."""
        return _read() == self._exact

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before is not None:
                _write(self._before)


_settings = _Settings()


def _check_environment() -> None:
    for name, harmless in PRECISION_VARIABLES.items():
        if os.environ.get(name, "").lower() not in harmless:
            raise SordinoError(
                f"{name}: '{os.environ[name]}' lowers the precision of products, so clipped sums would exceed "
                "their bound; unset it."
            )


_MATMUL: Any = torch.backends.cuda.matmul
# Owners of an `fp32_precision` of products; PyTorch before 2.9 has none.
_OWNERS: list[Any] = [
    owner
    for owner in (_MATMUL, getattr(torch.backends.mkldnn, "matmul", None))
    if owner is not None and hasattr(owner, "fp32_precision")
]
_REDUCTIONS = [
    name
    for name in (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    if hasattr(_MATMUL, name)
]
_SPLIT = {name for name in _REDUCTIONS if hasattr(_MATMUL, f"{name}_split_k")}  # set together, read apart


class _Values(NamedTuple):
    precision: str | None
    owners: list[str]
    reductions: list[Any]


def _read() -> _Values:
    precision: str | None
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the process has mixed PyTorch's two interfaces: only the newer one can be read
        precision = None
    reductions = [getattr(_MATMUL, name) for name in _REDUCTIONS]
    reductions = [
        (value, getattr(_MATMUL, f"{name}_split_k")) if name in _SPLIT else value
        for name, value in zip(_REDUCTIONS, reductions, strict=True)
    ]
    return _Values(precision, [owner.fp32_precision for owner in _OWNERS], reductions)


def _make_exact() -> None:
    torch.set_float32_matmul_precision("highest")  # sets every `fp32_precision` of products too
    for name in _REDUCTIONS:
        setattr(_MATMUL, name, False)


def _write(values: _Values) -> None:
    if values.precision is not None:
        torch.set_float32_matmul_precision(values.precision)
    for owner, value in zip(_OWNERS, values.owners, strict=True):
        owner.fp32_precision = value
    for name, value in zip(_REDUCTIONS, values.reductions, strict=True):
        setattr(_MATMUL, name, value)


# --------------------------------------------------------------------------------------------------------------- sums


def row_sums(factor: Tensor, rows: Tensor) -> Tensor:
    """Sum of factor times row over the n rows of each group: (groups, n) and (groups, n, width) to (groups, width).

    Blocks of FLOAT32_TERMS rows are added in the type of `rows`, float32 at least, and blocks in float64. Blocks depend
    on the shapes alone. Entries of `rows` must be finite, also those of rows whose factor is zero.
    """
    groups, n, width = rows.shape
    whole = n - n % FLOAT32_TERMS if groups == 1 or n % FLOAT32_TERMS == 0 else 0
    blocks = rows[:, :whole].reshape(groups * whole // FLOAT32_TERMS, FLOAT32_TERMS, width)  # a view
    sums = torch.bmm(factor[:, :whole].reshape(-1, 1, FLOAT32_TERMS), blocks)
    total = sums.view(groups, whole // FLOAT32_TERMS, width).sum(1, dtype=torch.float64)
    for start in range(whole, n, FLOAT32_TERMS):
        total += torch.bmm(
            factor[:, None, start : start + FLOAT32_TERMS], rows[:, start : start + FLOAT32_TERMS]
        ).squeeze(1)
    return total


def blank(rows: Tensor, usable: Tensor) -> Tensor:
    """Set rows that are not usable to zero, in place if memory allows. Multiplication is not enough: 0 * NaN is NaN.

    Bits are masked, so the time does not depend on the numbers; on a CPU that is faster than `torch.where`.
    """
    rows = rows.contiguous()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    rows.view(kind).bitwise_and_(usable.to(kind).neg_().view(-1, 1))  # -1 has all bits set
    return rows


_parts: ContextVar[int] = ContextVar("parts", default=1)


@contextmanager
def sum_of_parts(parts: int, n: int) -> Iterator[None]:
    """Meanwhile every sum is one of some parts, which are added up in float64: together they drift no further than one.

    The additions of the parts move a sum of n terms by at most 2 * (parts - 1) * n * 2^-53 <= PARTS_DRIFT clips. Each
    part may drift by an equal share of what this leaves, so that the bound does not depend on how other parts round.

    Args:
      parts: the number of parts.
      n: the number of terms of all parts together.

    Raises:
      SordinoError: the terms are too many.
    """
    if 2 * (parts - 1) * n * 2.0**-53 > PARTS_DRIFT:
        raise SordinoError(
            f"records: {n:,} in {parts} parts: rounding could move their sum by more than the clip allows; use fewer "
            "parts."
        )
    before = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(before)


def _allowed(drift: float) -> float:
    """How far this sum may drift."""
    parts = _parts.get()
    return drift if parts == 1 else (drift - PARTS_DRIFT) / parts


def product_rows(n: int, requested: int) -> int:
    """How many of n rows one float64 product adds up, close to the requested number; products are added in order.

    Each number passes at most `depth` additions, rows of its product and products together, so rounding moves the
    sum of terms up to the clip by at most 2 * depth * n * 2^-53 <= PRODUCT_DRIFT clips, in any order.

    Raises:
      SordinoError: n is too large for any number of rows (above 23 million).
    """
    depth = _allowed(PRODUCT_DRIFT) * 2.0**52 / n
    least, most = math.ceil(2 * n / depth), int(depth / 2)
    if least > most:
        raise SordinoError(
            f"records: {n:,} in one sum are too many: rounding in float64 could exceed the margin of the clip; divide "
            "them among several clients."
        )
    return min(max(requested, least), most)


def in_chunks(
    total: Callable[[], Tensor], n: int, step: int, add: Callable[[Callable[[], Tensor], slice], None]
) -> None:
    """Call add(into, rows) for chunks of at most `step` of n rows, so that float64 sums stay shallow.

    `into` returns the float64 total, or the sum of FLOAT64_TERMS chunks, which is then added to it. A total that is
    made when it is first asked for takes no memory during the pass before. Within a chunk a number
    passes at most as many additions as there are rows, and no more than FLOAT64_TERMS of them and one per FLOAT64_TERMS
    rows: blocks of FLOAT32_TERMS rows, or rows of an embedding (`per_example.token_sums`).

    Raises:
      SordinoError: n is so large that rounding in float64 could move a sum by more than DRIFT of the clip.
    """
    rows = min(n, step)
    depth = min(rows, FLOAT64_TERMS) + rows / FLOAT64_TERMS + FLOAT64_TERMS + n / (FLOAT64_TERMS * step)
    if 2 * depth * n * 2.0**-53 > _allowed(DRIFT):
        raise SordinoError(
            f"records: {n:,} in chunks of {step}: rounding could move their sum by more than the clip allows. Divide "
            "them among several clients, or use larger chunks."
        )
    for first in range(0, n, FLOAT64_TERMS * step):
        last = min(n, first + FLOAT64_TERMS * step)
        into = total if n <= FLOAT64_TERMS * step else functools.cache(lambda: torch.zeros_like(total()))
        for start in range(first, last, step):
            add(into, slice(start, min(last, start + step)))
        if into is not total:
            total().add_(into())
