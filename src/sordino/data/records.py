"""A federation's records, sorted by client: one matrix for the whole cohort, views of it for each client."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.core import Model, Privacy, Shard, Unit, serves
from sordino.errors import SordinoError, count

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
    blocks = torch.split(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), 4096)
    norms = [torch.linalg.vector_norm(block, dim=-1, dtype=torch.float64) for block in blocks]
    return torch.cat(norms).to(x.dtype).reshape(x.shape[:-1])


def rows_of(units: np.ndarray, per_person: int) -> np.ndarray:
    """The rows of these units of a client; -1 for a unit of -1."""
    rows = units[:, None] * per_person + np.arange(per_person)
    return np.where(units[:, None] < 0, -1, rows).reshape(-1)


def check_grouping(privacy: Privacy, per_person: int | None) -> None:
    """Refuse records grouped otherwise than the promise says. None: each record stands for itself."""
    promised = privacy.person_records if privacy.unit is Unit.PERSON else None
    if per_person != promised:
        has = f"records are grouped by person, {per_person} rows each" if per_person else "records are not grouped"
        needs = "needs records that are not grouped" if promised is None else f"needs {promised} rows per person"
        raise SordinoError(f"person: {has}, but unit = {privacy.unit} {needs}; see Records.of(person=, per_person=).")


def clients_of_persons(client: np.ndarray, person: np.ndarray) -> np.ndarray:
    """At how many clients each person has records. Records with a client of -1 do not count."""
    held, clients = client >= 0, int(client.max()) + 1
    number = np.unique(person[held], return_inverse=True)[1]
    return np.bincount(np.unique(number * clients + client[held]) // clients)


def check_person_clients(client: np.ndarray, person: np.ndarray, most: int) -> None:
    """Refuse a person with records at more than `most` clients, who would be protected less than promised."""
    counts = clients_of_persons(client, person)
    if counts.max() > most:
        raise SordinoError(
            f"person_clients: {count(int((counts > most).sum()), 'person has', 'persons have')} records at more than "
            f"{count(most, 'client')}, one at {counts.max()}. Set person_clients = {counts.max()} (in the spec, or "
            f"--set person_clients={counts.max()}), which adds noise; or, if equal numbers at two clients are two "
            "persons, set person_ids = per-client."
        )


def check_serves(privacy: Privacy, model: Model) -> None:
    """Refuse a model that would clip each record of a person by itself."""
    if privacy.unit is Unit.PERSON and not serves(model, "persons"):
        raise SordinoError(
            f"unit: {type(model).__name__} clips single records, not persons; use a linear model or a network, or unit "
            "= record."
        )


def person_rows(
    client: np.ndarray, person: np.ndarray, per_person: int, choose: Callable[[int], np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Where the records of each person come from, and the first row of each client.

    With `choose`, every record draws a number of its own, and the smallest ones of each person are used. The draws are
    independent of each other and of all records, so what is used of a person depends on that person's records alone.
    Given the draws of all others, a run is one in which the choice is fixed: its account holds for every choice, and so
    for the mixture over choices (the divergences that define the promise are jointly convex).

    Args:
        client: The client of each record; -1 leaves a record out.
        person: A number per record. Equal numbers at two clients have rows at both.
        per_person: Rows per person. Records beyond it are left out, the last ones first.
        choose: Draws so many independent numbers, by which records are left out; None leaves out the last ones.

    Returns:
        (the record of each row, or -1; the first row of each client, and the number of rows).

    Raises:
        SordinoError: `person` is not one number per record, or `per_person` is out of its range.
    """
    if person.shape != client.shape or not np.issubdtype(person.dtype, np.integer):
        raise SordinoError("person: give one whole number per record, equal for all records of a person.")
    if per_person < 1:
        raise SordinoError(f"person_records: {per_person} must be at least 1.")
    place: np.ndarray = np.arange(len(client))
    if choose is not None:
        place = choose(len(client))
    order = np.lexsort((place, person, client))  # by client, then by person, then by position or by lot
    order = order[np.searchsorted(client[order], 0) :]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(client[order]) != 0) | (np.diff(person[order]) != 0)
    unit = np.cumsum(new) - 1
    rank = np.arange(len(order)) - np.flatnonzero(new)[unit]
    used = rank < per_person
    rows = np.full((unit[-1] + 1) * per_person, -1)
    rows[unit[used] * per_person + rank[used]] = order[used]
    persons = np.bincount(client[order][new])
    return rows, np.concatenate([[0], np.cumsum(persons)]) * per_person


def _numbers(values: Any, field: str) -> Tensor:
    if hasattr(values, "to_numpy"):  # a table or a column of pandas or polars
        values = np.array(values.to_numpy())
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "encode features as numbers" if field == "x" else "number the classes 0, 1, 2, …"
        raise SordinoError(f"{field}: not an array of numbers ({error}); {remedy}.") from None


def _own(part: Tensor, given: Tensor) -> Tensor:
    """The numbers of a part, in other memory than what the caller gave."""
    shared = part.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return part.clone() if shared else part


def _weights(weight: np.ndarray, records: int) -> Tensor:
    """Factors on the terms of single records, each in [0, 1]."""
    factor = _numbers(weight, "weight").double()
    if factor.shape != (records,):
        raise SordinoError(f"weight: of shape {tuple(factor.shape)} for {records} records; give one number per record.")
    _check_weights(factor)
    return factor


def _check_weights(factor: Tensor) -> None:
    if not ((factor >= 0) & (factor <= 1)).all():  # false for NaN
        raise SordinoError(
            "weight: a weight is not in [0, 1]; divide all weights by a public number that none exceeds, because a "
            "larger factor would carry a term out of its clip."
        )


def check_precision(dtype: torch.dtype) -> None:
    """Refuse records in half precision.

    Args:
        dtype: Type of the features.

    Raises:
        SordinoError: It has fewer than 32 bits, so rounding makes clipped gradients longer than the clip.
    """
    if dtype.is_floating_point and torch.finfo(dtype).bits < 32:
        raise SordinoError(
            f"x: of type {dtype}, in which rounding makes clipped gradients longer than the clip; convert it to "
            "torch.float32. A network computes in bfloat16 all the same with dtype = bfloat16."
        )


def _check_finite(values: Tensor, field: str) -> None:
    """Refuse NaN and infinity: such a record would count as one of the client's, and contribute nothing."""
    # A sum is finite only if every term is. numpy needs no copy of the values for it; torch would make one in float64.
    with np.errstate(all="ignore"):
        if not values.is_floating_point() or math.isfinite(values.detach().cpu().numpy().sum(dtype=np.float64)):
            return
    wrong = (~torch.isfinite(values)).reshape(len(values), -1).sum(1)
    if wrong.any():  # a sum of numbers near the end of floats may overflow
        raise SordinoError(
            f"{field}: {int(wrong.sum())} values are NaN, infinite or too large for {values.dtype}, the first in row "
            f"{int(wrong.nonzero()[0])} (from 0); fill or drop those records."
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
        filled: Which rows hold a record; None if all do.
        per_person: Rows of each person, of which it may fill fewer; 1 if each record stands for itself.
        weight: Factors in [0, 1] on the clipped terms of the records; None if all count fully.
        person_clients: The most clients that hold records of one person.

    Example:
        >>> import numpy as np
        >>> records = Records.of(np.eye(3, dtype="float32"), np.array([0, 1, 1]), np.array([0, 1, 0]))
        >>> records.sizes
        (2, 1)
    """

    x: Tensor
    y: Tensor
    starts: np.ndarray
    filled: Tensor | None = None
    per_person: int = 1
    weight: Tensor | None = None
    person_clients: int = 1

    def __post_init__(self) -> None:
        if self.weight is not None:
            _check_weights(self.weight)
        if self.filled is not None and self.filled.dtype is not torch.bool:  # it multiplies terms that are clipped
            raise SordinoError(f"filled: of type {self.filled.dtype}; say by True and False which rows hold a record.")
        with torch.inference_mode(False):  # PyTorch does not count how often tensors of this mode are changed
            for name in ("x", "y", "filled", "weight"):
                if (part := getattr(self, name)) is not None and part.is_inference():
                    object.__setattr__(self, name, part.clone())
        object.__setattr__(self, "_edits", self._edited)

    @property
    def _edited(self) -> tuple[int, ...]:
        """How often the tensors were changed in place."""
        parts = (self.x, self.y, self.filled, self.weight)
        return tuple(0 if part is None else part._version for part in parts)

    def check_unchanged(self) -> None:
        """Refuse records that were changed in place: their norms, by which gradients are clipped, are of before.

        Raises:
          SordinoError: a tensor is not as it was when the records were built.
        """
        if self._edited != self._edits:  # type: ignore[attr-defined]
            raise SordinoError(
                "records: their numbers were changed in place after they were checked and measured; change the arrays "
                "first, and build the records from them."
            )

    @staticmethod
    def of(
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor,
        client: np.ndarray,
        *,
        person: np.ndarray | None = None,
        per_person: int = 1,
        choose: Callable[[int], np.ndarray] | None = None,
        weight: np.ndarray | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        copy: bool = True,
    ) -> Records:
        """Sort records by client. A client of -1 leaves its record out.

        The numbers are copied, so that what the caller does to the arrays afterwards does not change them; without
        `copy`, arrays that are sorted and of the right type may be shared, and nobody may change them.

        With `weight`, a factor in [0, 1] per record, the clipped term of a record is multiplied by it, so that the
        term stays within the clip. Divisors stay numbers of records. Refused for persons: a person's terms are clipped
        as a sum, in which weights may undo what cancels.

        With `person`, a number per record, the records of a person at a client lie together, in `per_person` rows. Of a
        person with more records the first `per_person` are used, or as many that `choose` draws. Equal numbers at two
        clients are one person, who is at both: a plan must allow that (`person_clients`).
        """
        here = check_device(str(device))
        given = x, y = _numbers(x, "x"), _numbers(y, "y")
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
            raise SordinoError(
                f"data: x has {count(len(x), 'row')}, y {count(len(y), 'label')} and client "
                f"{count(len(client), 'number')}; give one of each per record."
            )
        check_precision(dtype)
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
        y = y if y.is_floating_point() else y.long()
        factor = None if weight is None else _weights(weight, len(x)).to(dtype)
        if person is not None:
            if factor is not None:
                raise SordinoError("weight: nothing is proved for weights of the records of a person; leave them out.")
            rows, starts = person_rows(client, np.asarray(person), per_person, choose)
            filled = torch.from_numpy(rows >= 0)
            at = torch.from_numpy(np.maximum(rows, 0))
            x = x[at].masked_fill_(~filled.unsqueeze(-1), 0)
            y = y[at].masked_fill(~filled, 0)
            most = int(clients_of_persons(client, np.asarray(person)).max())
            return Records(x.to(here), y.to(here), starts, filled.to(here), per_person, person_clients=most)
        if not (np.diff(client) >= 0).all() or client[0] < 0:
            order = np.argsort(client, kind="stable")
            at = torch.from_numpy(order[np.searchsorted(client[order], 0) :])
            x, y, factor = x[at], y[at], None if factor is None else factor[at]
        starts = np.concatenate([[0], np.cumsum(counts)])
        if copy:
            x, y = (_own(part, whole) for part, whole in zip((x, y), given, strict=True))
            factor = None if factor is None else factor.clone()
        return Records(x.to(here), y.to(here), starts, weight=None if factor is None else factor.to(here))

    @staticmethod
    def absent(features: int, labels: torch.dtype, dtype: torch.dtype, per_person: int = 1) -> Records:
        """One client with one unit that holds no record: sums over it are zero, whatever is asked."""
        x, filled = torch.zeros(per_person, features, dtype=dtype), torch.zeros(per_person, dtype=torch.bool)
        return Records(x, torch.zeros(per_person, dtype=labels), np.array([0, per_person]), filled, per_person)

    def check_fits(self, model: Model) -> None:
        """Refuse records whose number of features or labels do not fit the model."""
        features, classes = getattr(model, "features", None), getattr(model, "outputs", None)
        check_precision(self.x.dtype)
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

    def check_unit(self, privacy: Privacy) -> None:
        """Refuse records that are not grouped as the promised unit needs it, or persons at too many clients."""
        check_grouping(privacy, self.per_person if self.filled is not None else None)
        if privacy.unit is Unit.PERSON and self.person_clients > privacy.person_clients:
            raise SordinoError(
                f"person_clients: a person has records at {self.person_clients} clients, and the plan protects persons "
                f"at {count(privacy.person_clients, 'client')}. Promise Privacy(…, person_clients="
                f"{self.person_clients}), which adds noise; or number persons apart, if equal numbers at two clients "
                "are two persons."
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Units of each client: records, or persons."""
        return tuple((np.diff(self.starts) // self.per_person).tolist())

    @cached_property
    def length(self) -> Tensor:
        """The norm of every row, computed once."""
        return row_norms(self.x)

    @cached_property
    def _owner(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.sizes)), np.diff(self.starts))).to(self.x.device)

    def keep(self, cohort: np.ndarray) -> None:
        """Nothing to forget, because all records are in memory."""

    def shard(self, i: int) -> Shard:
        """One client's records."""
        rows = slice(int(self.starts[i]), int(self.starts[i + 1]))
        x = self.x[..., rows, :]
        mask = x.new_ones(x.shape[-2]) if self.filled is None else self.filled[rows].to(x.dtype)
        mask = mask if self.weight is None else self.weight[rows]
        return Shard(x, self.y[..., rows], mask, self.length[..., rows], self.per_person)

    def fused(self, cohort: np.ndarray, weight: np.ndarray) -> Shard:
        """A cohort as one client, each record weighted by its owner's public `weight`."""
        scale = torch.as_tensor(weight, dtype=self.x.dtype, device=self.x.device)[self._owner]
        scale = scale if self.filled is None else scale * self.filled
        scale = scale if self.weight is None else scale * self.weight
        if len(cohort) == len(self.sizes):
            return Shard(self.x, self.y, scale, self.length, self.per_person)
        rows = torch.from_numpy(np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in cohort]))
        rows = rows.to(self.x.device)
        return Shard(self.x[..., rows, :], self.y[..., rows], scale[rows], self.length[..., rows], self.per_person)

    def buckets(self, cohort: np.ndarray) -> list[tuple[np.ndarray, Shard]]:
        """A cohort as a few padded batches, clients of like size (within a factor of two) together."""
        sizes = np.diff(self.starts)[cohort]
        octave = np.ceil(np.log2(sizes)).astype(int)
        return [self._pad(cohort[octave == k]) for k in np.unique(octave)]

    def _pad(self, clients: np.ndarray) -> tuple[np.ndarray, Shard]:
        sizes = np.diff(self.starts)[clients]
        if self.filled is None and self.x.dim() == 2 and (sizes == sizes[0]).all() and (np.diff(clients) == 1).all():
            own = slice(int(self.starts[clients[0]]), int(self.starts[clients[-1] + 1]))  # a view: nothing is copied
            shape = (len(clients), int(sizes[0]))
            x = self.x[own].view(*shape, -1)
            y, length = self.y[own].view(shape), self.length[own].view(shape)
            mask = x.new_ones(shape) if self.weight is None else self.weight[own].view(shape)
            return clients, Shard(x, y, mask, length, self.per_person)
        column = np.arange(sizes.max())
        inside = column < sizes[:, None]
        rows = np.where(inside, self.starts[clients][:, None] + column, -1)
        return clients, self._padded(rows)

    def picked(self, clients: np.ndarray, rows: Sequence[np.ndarray]) -> Shard:
        """Some units of some clients as a padded batch: of client k those numbered `rows[k]`, none for -1."""
        where = np.full((len(rows), self.per_person * max(1, *map(len, rows))), -1)
        for k, (i, units) in enumerate(zip(clients, rows, strict=True)):
            mine = rows_of(units, self.per_person)
            where[k, : len(mine)] = np.where(mine < 0, -1, self.starts[i] + mine)
        return self._padded(where)

    def _padded(self, rows: np.ndarray) -> Shard:
        """A batch of rows, where -1 stands for padding."""
        at, real = (torch.from_numpy(part).to(self.x.device) for part in (np.maximum(rows, 0), rows >= 0))
        real = real if self.filled is None else real & self.filled[at]
        x = self.x[..., at, :].masked_fill_(~real.unsqueeze(-1), 0)
        length = self.length[..., at].masked_fill(~real, 0)
        mask = real.to(x.dtype) if self.weight is None else self.weight[at].masked_fill(~real, 0)
        return Shard(x, self.y[..., at], mask, length, self.per_person)


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
    per_person: int = 1
    _kept: dict[bytes, Records] = field(default_factory=dict, repr=False, compare=False)
    _cohort: list[bytes] = field(default_factory=list, repr=False, compare=False)
    _model: list[Model] = field(default_factory=list, repr=False, compare=False)  # that of the last `check_fits`

    @staticmethod
    def of(sizes: Sequence[int], load: Callable[[int], tuple[Tensor, Tensor]]) -> Lazy:
        return Lazy(tuple(sizes), load, load(0)[0][:0])

    def check_fits(self, model: Model) -> None:
        """Refuse rows of another width than the model reads. Rows and labels of a client are checked when it is loaded.

        Args:
            model: The model; records that are loaded later must fit it.

        Raises:
            SordinoError: The number of features does not fit. What loads a client raises it for its labels.
        """
        Records(self.x, self.x.new_zeros(0), np.zeros(1, np.int64)).check_fits(model)
        if not (self._model and self._model[0] is model):
            self._kept.clear()  # they were checked for another model
            self._model[:] = [model]

    def check_unit(self, privacy: Privacy) -> None:
        """Refuse person level, because records that are loaded on demand are not grouped by person."""
        check_grouping(privacy, None)

    def shard(self, i: int) -> Shard:
        x, y = self.load(i)
        if len(x) != self.sizes[i]:
            raise SordinoError(
                f"clients: client {i} has {len(x)} records, but {self.sizes[i]} were declared; make both equal."
            )
        if x.dtype is not self.x.dtype:
            raise SordinoError(f"x: of type {x.dtype} at client {i}, and {self.x.dtype} at client 0; make both equal.")
        for model in self._model:
            try:
                Records(x, y, np.array([0, len(x)])).check_fits(model)
            except SordinoError as error:
                raise SordinoError(f"clients: client {i} does not fit the model. {error}") from None
        return Shard(x, y, x.new_ones(len(x)))

    def check_unchanged(self) -> None:
        """Nothing to compare: what is loaded is measured when it is loaded."""

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
