"""`torch.distributions` without validation of arguments, while a model computes.

Validation asks of all rows together whether each is allowed, and raises an error if one is not. So one record could end
a run, which everybody sees and no clip bounds. Without it nothing is asked: what a distribution computes of a record
follows from that record alone, and is bounded by the clip. A gradient that is not finite counts as zero.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


class _Default:
    """The process-wide default of `validate_args`, held by a counted number of callers."""

    def __init__(self) -> None:
        self._lock, self._holders, self._before = threading.Lock(), 0, False

    def hold(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._before = bool(Distribution._validate_args)
                Distribution.set_default_validate_args(False)
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                Distribution.set_default_validate_args(self._before)


_default = _Default()


@contextmanager
def unvalidated() -> Iterator[None]:
    """Meanwhile distributions validate arguments only where `validate_args=True` asks for it, in all threads."""
    _default.hold()
    try:
        yield
    finally:
        _default.release()
