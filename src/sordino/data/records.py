"""A federation's records, sorted by client: one matrix for the whole cohort, views of it for each client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.core import Model, Shard
from sordino.errors import SordinoError

LOSSES_OF_NUMBERS = ("squares", "poisson", "hazards")  # for other losses, labels are class indices


def check_device(name: str, field: str = "device") -> torch.device:
    """The device `cpu`, `cuda` or `cuda:1`, if this machine has it. The error names `field`."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SordinoError(f"{field}: '{name}' is unknown; use cpu or cuda.")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= devices:
        why = (
            f"there are {devices} CUDA devices"
            if devices
            else "this machine, or this build of torch, has no CUDA device"
        )
        raise SordinoError(f"{field}: '{name}' is not available, because {why}; use cpu.")
    return device


def row_norms(x: Tensor) -> Tensor:
    """Norms summed in float64, because float32 underestimates long rows; in blocks of rows, to save memory."""
    blocks = torch.split(x.reshape(-1, x.shape[-1]), 4096)
    norms = [torch.linalg.vector_norm(block, dim=-1, dtype=torch.float64) for block in blocks]
    return torch.cat(norms).to(x.dtype).reshape(x.shape[:-1])


def _numbers(values: Any, field: str) -> Tensor:
    if hasattr(values, "to_numpy"):  # a table or a column of pandas or polars
        values = np.array(values.to_numpy())
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "encode features as numbers" if field == "x" else "number the classes 0, 1, 2, …"
        raise SordinoError(f"{field}: not an array of numbers ({error}); {remedy}.") from None


def _check_finite(values: Tensor, field: str) -> None:
    """Refuse NaN and infinity: such a record would count as one of the client's, and contribute nothing."""
    if values.is_floating_point() and not (fine := torch.isfinite(values)).all():
        row = int((~fine).flatten(1).any(1).nonzero()[0] if values.dim() > 1 else (~fine).nonzero()[0])
        raise SordinoError(
            f"{field}: {int((~fine).sum())} values are NaN, infinite or too large for {values.dtype}, the first in row "
            f"{row} (from 0); fill or drop those records."
        )


@dataclass(frozen=True)
class Records:
    """All clients' records as one matrix, sorted by client: client i holds rows `starts[i]` to `starts[i + 1]`.

    `Records.of(x, y, client)` builds it. A leading axis of `x` and `y` holds several data sets of the same
    sizes, one per run.

    Args:
        x: Features, one row per record.
        y: Labels: class indices, or numbers.
        starts: First row of each client, and the number of rows.

    Example:
        >>> import numpy as np
        >>> records = Records.of(np.eye(3, dtype="float32"), np.array([0, 1, 1]), np.array([0, 1, 0]))
        >>> records.sizes
        (2, 1)
    """

    x: Tensor
    y: Tensor
    starts: np.ndarray

    @staticmethod
    def of(
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor,
        client: np.ndarray,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Records:
        """Sort records by client. A client of -1 leaves its record out."""
        here = check_device(str(device))
        x, y = _numbers(x, "x"), _numbers(y, "y")
        if x.dim() != 2:
            remedy = ": x.reshape(len(x), -1)" if x.dim() > 2 else ""
            raise SordinoError(f"x: of shape {tuple(x.shape)}; give one row of features per record{remedy}.")
        if y.dim() != 1:
            raise SordinoError(f"y: of shape {tuple(y.shape)}; give one label per record (class indices, or numbers).")
        try:
            client = np.asarray(client).astype(np.int64, casting="same_kind")
        except (ValueError, TypeError):
            client = np.zeros((0, 0))
        if client.ndim != 1:
            raise SordinoError("client: give one client number for every record, as in [0, 0, 1, 2, 1]; see split().")
        if not len(x) == len(y) == len(client):
            raise SordinoError(f"data: {len(x)} rows of x, {len(y)} labels and {len(client)} client numbers differ.")
        x = x.to(dtype)
        _check_finite(x, "x")
        _check_finite(y, "y")
        counts = np.bincount(client[client >= 0]) if (client >= 0).any() else np.zeros(0, int)
        if not len(counts) or (counts == 0).any():
            empty = int(np.argmin(counts)) if len(counts) else 0
            raise SordinoError(
                f"clients: client {empty} holds no record; number clients 0, 1, 2, … without gaps, or use fewer "
                "clients or another partition."
            )
        if not (np.diff(client) >= 0).all() or client[0] < 0:
            order = np.argsort(client, kind="stable")
            rows = torch.from_numpy(order[np.searchsorted(client[order], 0) :])
            x, y = x[rows], y[rows]
        y = y if y.is_floating_point() else y.long()
        starts = np.concatenate([[0], np.cumsum(counts)])
        return Records(x.to(here), y.to(here), starts)

    def check_fits(self, model: Model) -> None:
        """Refuse records whose number of features or labels do not fit the model."""
        features, classes = getattr(model, "features", None), getattr(model, "outputs", None)
        if features is not None and self.x.shape[-1] != features:
            raise SordinoError(f"x: {self.x.shape[-1]} features, but the model reads {features}; they must agree.")
        kind = str(getattr(model, "kind", "softmax"))
        if classes is None or kind in LOSSES_OF_NUMBERS or not self.y.numel():
            return
        classes = 2 if kind == "logistic" else classes
        if self.y.is_floating_point() and kind != "logistic":
            raise SordinoError(f"y: labels of type {self.y.dtype}; the model predicts classes; give integers.")
        low, high = float(self.y.min()), float(self.y.max())
        if not (low >= 0 and high <= classes - 1):
            wrong = low if low < 0 else high
            raise SordinoError(
                f"y: the label {wrong:g} is out of range: the model has {classes} classes, 0 to {classes - 1}. Number "
                "the classes from 0, or build the model with more outputs."
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(np.diff(self.starts).tolist())

    @cached_property
    def length(self) -> Tensor:
        """The norm of every row, computed once."""
        return row_norms(self.x)

    @cached_property
    def _owner(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.sizes)), self.sizes)).to(self.x.device)

    def keep(self, cohort: np.ndarray) -> None:
        """Nothing to forget, because all records are in memory."""

    def shard(self, i: int) -> Shard:
        """One client's records."""
        rows = slice(int(self.starts[i]), int(self.starts[i + 1]))
        x = self.x[..., rows, :]
        return Shard(x, self.y[..., rows], x.new_ones(x.shape[-2]), self.length[..., rows])

    def fused(self, cohort: np.ndarray, weight: np.ndarray) -> Shard:
        """A cohort as one client, each record weighted by its owner's public `weight`."""
        scale = torch.as_tensor(weight, dtype=self.x.dtype, device=self.x.device)
        if len(cohort) == len(self.sizes):
            return Shard(self.x, self.y, scale[self._owner], self.length)
        rows = torch.from_numpy(np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in cohort]))
        rows = rows.to(self.x.device)
        return Shard(self.x[..., rows, :], self.y[..., rows], scale[self._owner[rows]], self.length[..., rows])

    def buckets(self, cohort: np.ndarray) -> list[tuple[np.ndarray, Shard]]:
        """A cohort as a few padded batches, clients of like size (within a factor of two) together."""
        sizes = np.diff(self.starts)[cohort]
        octave = np.ceil(np.log2(sizes)).astype(int)
        return [self._pad(cohort[octave == k]) for k in np.unique(octave)]

    def _pad(self, clients: np.ndarray) -> tuple[np.ndarray, Shard]:
        sizes = np.diff(self.starts)[clients]
        column = np.arange(sizes.max())
        inside = column < sizes[:, None]
        rows = torch.from_numpy(np.where(inside, self.starts[clients][:, None] + column, 0)).to(self.x.device)
        real = torch.from_numpy(inside).to(self.x.device)
        x = self.x[..., rows, :].masked_fill(~real.unsqueeze(-1), 0)
        length = self.length[..., rows].masked_fill(~real, 0)
        return clients, Shard(x, self.y[..., rows], real.to(x.dtype), length)

    def picked(self, clients: np.ndarray, rows: Sequence[np.ndarray]) -> Shard:
        """Some records of some clients as a padded batch: of client k those numbered `rows[k]`, none for -1."""
        where = np.full((len(rows), max(1, *map(len, rows))), -1)
        for k, (i, mine) in enumerate(zip(clients, rows, strict=True)):
            where[k, : len(mine)] = np.where(mine < 0, -1, self.starts[i] + mine)
        at, real = (torch.from_numpy(part).to(self.x.device) for part in (np.maximum(where, 0), where >= 0))
        x = self.x[..., at, :].masked_fill(~real.unsqueeze(-1), 0)
        return Shard(x, self.y[..., at], real.to(x.dtype), self.length[..., at].masked_fill(~real, 0))


@dataclass(frozen=True)
class Lazy:
    """Clients whose records are loaded on demand, so that a round costs only what its cohort costs.

    `load(i)` returns client i's (x, y), always the same. The class has the part of `Records` that the engines need. The
    last cohort stays in memory, so that local steps do not read it again.
    """

    sizes: tuple[int, ...]
    load: Callable[[int], tuple[Tensor, Tensor]]
    x: Tensor  # no rows: holds dtype, device and number of features
    length: None = None
    _kept: dict[bytes, Records] = field(default_factory=dict, repr=False, compare=False)
    _cohort: list[bytes] = field(default_factory=list, repr=False, compare=False)

    @staticmethod
    def of(sizes: Sequence[int], load: Callable[[int], tuple[Tensor, Tensor]]) -> Lazy:
        return Lazy(tuple(sizes), load, load(0)[0][:0])

    def check_fits(self, model: Model) -> None:
        """Refuse rows of another width than the model reads. Labels are checked when a client is loaded."""
        Records(self.x, self.x.new_zeros(0), np.zeros(1, np.int64)).check_fits(model)

    def shard(self, i: int) -> Shard:
        x, y = self.load(i)
        if len(x) != self.sizes[i]:
            raise SordinoError(
                f"clients: client {i} has {len(x)} records, but {self.sizes[i]} were declared; make both equal."
            )
        return Shard(x, y, x.new_ones(len(x)))

    def keep(self, cohort: np.ndarray) -> None:
        """Forget all clients outside this cohort."""
        key = cohort.astype(np.int64).tobytes()
        if self._cohort[:] != [key]:
            self._kept.clear()
            self._cohort[:] = [key]

    def _some(self, clients: np.ndarray) -> Records:
        """Only these clients, numbered from 0."""
        key = np.asarray(clients, dtype=np.int64).tobytes()
        if key not in self._kept:
            parts = [self.shard(int(i)) for i in clients]
            starts = np.concatenate([[0], np.cumsum([len(part.x) for part in parts])])
            x, y = (torch.cat(columns) for columns in zip(*((part.x, part.y) for part in parts), strict=True))
            self._kept[key] = Records(x, y, starts)
        return self._kept[key]

    def fused(self, cohort: np.ndarray, weight: np.ndarray) -> Shard:
        return self._some(cohort).fused(np.arange(len(cohort)), np.asarray(weight)[cohort])

    def buckets(self, cohort: np.ndarray) -> list[tuple[np.ndarray, Shard]]:
        if not len(cohort):
            return []
        some = self._some(cohort).buckets(np.arange(len(cohort)))
        return [(cohort[clients], shard) for clients, shard in some]

    def picked(self, clients: np.ndarray, rows: Sequence[np.ndarray]) -> Shard:
        """As `Records.picked`. A client that several runs name is loaded once."""
        distinct, place = np.unique(clients, return_inverse=True)
        return self._some(distinct).picked(place.reshape(-1), rows)
