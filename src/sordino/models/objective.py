"""What a network is trained for: the sum over records of one loss each, from all that the module returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sordino.errors import SordinoError, check_known
from sordino.models.per_example import summed

LABELS = ("classes", "numbers")
FAR, COPIES = (
    1000.0,
    16,
)  # factor on the outputs of other records, or its inverse, and copies of all, where a loss must not read them
FAILS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)  # what a loss raises that does not fit
EachLoss = Callable[[Any, Tensor], Tensor]  # (what the module returns, labels) -> one loss per record


class Objective(NamedTuple):
    """A loss of single records, and the part of the module's outputs that predicts.

    Attributes:
      each: the loss; None is the cross entropy of the part that predicts.
      output: the key, index or attribute of that part; None if the module returns one tensor.
      labels: one of `LABELS`.
    """

    each: EachLoss | None = None
    output: str | int | None = None
    labels: str = "classes"

    def check(self) -> None:
        """Refuse settings that do not fit together."""
        check_known("labels", self.labels, LABELS)
        if self.labels == "numbers" and self.each is None:
            raise SordinoError(
                "loss: labels that are numbers have no default; give one loss per record, as in "
                "loss=lambda z, y: (z[:, 0] - y) ** 2."
            )

    def labels_of(self, y: Tensor, theta: Tensor) -> Tensor:
        """Labels as the loss reads them."""
        return y.to(theta.device).long() if self.labels == "classes" else y.to(theta)

    def read(self, outputs: Any) -> Tensor:
        """The part that predicts.

        Raises:
          SordinoError: there is no such part.
        """
        if isinstance(outputs, Tensor):
            if self.output is None:
                return outputs
            raise SordinoError(f"output: {self.output!r}, but the module returns one tensor; leave output out.")
        parts = _parts(outputs)
        if isinstance(found := parts.get(self.output), Tensor):
            return found
        returned = f"returns a {type(outputs).__name__}"
        if not parts:
            raise SordinoError(f"module: it {returned}; it must return one tensor, or tensors by name or position.")
        wrong = "" if self.output is None else f", and {self.output!r} is not a tensor of it"
        raise SordinoError(
            f"output: the module {returned} with {', '.join(map(repr, parts))}{wrong}; name the part that predicts, "
            f"as in output={next(iter(parts))!r}."
        )

    def losses(self, outputs: Any, y: Tensor) -> Tensor:
        """The loss of each record. Outputs in half precision are converted before a loss of the user's own."""
        if self.each is None:
            z = self.read(outputs)
            kind = torch.promote_types(z.dtype, torch.float32)
            return torch.nn.functional.cross_entropy(z.to(kind), y, reduction="none")
        return self.each(_widened(outputs), y)

    def total(self, outputs: Any, y: Tensor) -> Tensor:
        """The sum of the losses."""
        return summed(self.read(outputs), y) if self.each is None else self.losses(outputs, y).sum()

    def check_losses(self, outputs: Any, y: Tensor) -> None:
        """Refuse a loss that fails, or is not one number per record."""
        try:
            found = self.losses(outputs, y)
        except FAILS as error:
            raise SordinoError(f"loss: it fails on {len(y)} records: {type(error).__name__}: {error}") from error
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if shape != (len(y),):
            raise SordinoError(
                f"loss: it returns {shape} for {len(y)} records; return one loss per record, as with reduction='none'."
            )

    def check_apart(self, outputs: Any, mixed: Sequence[Any], y: Tensor) -> None:
        """Refuse a loss of the first record, or a gradient, that depends on the outputs or labels of other records.

        Args:
          outputs: what the module returns for some rows.
          mixed: the same with other rows after the first.
          y: labels of the rows.

        Raises:
          SordinoError: it depends on other records, even in the last digit.
        """

        def far(part: Tensor) -> Tensor:
            return torch.cat([part[:1], FAR * part[1:]])

        def near(part: Tensor) -> Tensor:
            return torch.cat([part[:1], part[1:] / FAR])

        shared = self._shared(outputs, mixed)
        copies, few = self._copies(outputs, y, shared), len(y)
        y = y.repeat(copies)
        several = [_repeated(each, few, copies, shared) for each in (outputs, *mixed)]
        several += [_with_rows(several[0], change, len(y), shared) for change in (far, near)]
        found = [self._first(several[0], y, shared)]
        for each in several:
            z = self.read(each).detach()
            right = z.argmax(-1) if self.labels == "classes" else z[:, 0].to(y)  # of small losses
            for other in (y, y[:1].expand_as(y), y.max().expand_as(y), right):
                with suppress(*FAILS):  # it takes no such numbers, as where outputs are probabilities
                    found.append(self._first(each, torch.cat([y[:1], other[1:]]), shared))
        if any(not torch.equal(found[0], other) for other in found):
            raise SordinoError(
                "loss: that of one record depends on other records, which no clip bounds, as with weights from the "
                "classes of a batch; use its own row alone, and public weights."
            )

    def _shared(self, outputs: Any, mixed: Sequence[Any]) -> frozenset[str | int | None]:
        """The parts that belong to no record, whatever their number of rows, such as prototypes of the classes: they
        are the same whatever the other records are. The part that predicts is none of them."""
        predicts, parts = self.read(outputs), _parts(outputs)
        others = [_parts(each) for each in mixed]
        return frozenset(
            name
            for name, part in parts.items()
            if isinstance(part, Tensor) and part is not predicts
            if others and all(isinstance(o.get(name), Tensor) and torch.equal(part, o[name]) for o in others)
        )

    def _copies(self, outputs: Any, y: Tensor, shared: Collection[str | int | None]) -> int:
        """How many copies of the rows the loss takes: 1 if the outputs have parts that cannot be copied."""
        try:
            found = self.losses(_repeated(outputs, len(y), COPIES, shared), y.repeat(COPIES))
        except FAILS:
            return 1
        return COPIES if found.shape == (COPIES * len(y),) else 1

    def _first(self, outputs: Any, y: Tensor, shared: Collection[str | int | None]) -> Tensor:
        """The first record's loss, and the gradient of all losses with respect to its outputs."""
        leaves: list[Tensor] = []

        def leaf(part: Tensor) -> Tensor:
            leaves.append(part.detach().clone().requires_grad_())
            return leaves[-1]

        torch.manual_seed(0)
        with torch.enable_grad():
            losses = self.losses(_with_rows(outputs, leaf, len(y), shared), y)
            needed = bool(leaves) and losses.requires_grad
            grads = torch.autograd.grad(losses.sum(), leaves, allow_unused=True) if needed else ()
        first = [losses[:1].detach(), *(g[0].flatten() for g in grads if g is not None)]
        return torch.cat([part.double() for part in first]).nan_to_num()


def _repeated(outputs: Any, rows: int, copies: int, shared: Collection[str | int | None]) -> Any:
    """The outputs for so many copies of the rows."""
    return _with_rows(outputs, lambda part: part.repeat(copies, *[1] * (part.dim() - 1)), rows, shared)


def _with_rows(
    outputs: Any, change: Callable[[Tensor], Tensor], rows: int, shared: Collection[str | int | None]
) -> Any:
    """The outputs with their tensors of numbers changed that have one row per record and are not shared by all."""

    def changed(name: str | int | None, part: Tensor) -> Tensor:
        fits = part.is_floating_point() and part.dim() > 0 and len(part) == rows and name not in shared
        return change(part) if fits else part

    return _changed(outputs, changed)


def _changed(outputs: Any, change: Callable[[str | int | None, Tensor], Tensor]) -> Any:
    """The outputs with their tensors changed, given their names: one tensor, or a container of one level, whose type
    is kept, so that a loss reads its keys and attributes as it reads those of the module."""

    def changed(name: str | int | None, part: Any) -> Any:
        return change(name, part) if isinstance(part, Tensor) else part

    if isinstance(outputs, Tensor):
        return change(None, outputs)
    if isinstance(outputs, Mapping):
        parts = {key: changed(key, part) for key, part in outputs.items()}
        if type(outputs) is dict or not isinstance(outputs, MutableMapping):
            return parts
        same = copy.copy(outputs)
        for key, part in parts.items():
            same[key] = part
        return same
    if isinstance(outputs, tuple | list):
        items = [changed(place, part) for place, part in enumerate(outputs)]
        return outputs._make(items) if hasattr(outputs, "_make") else type(outputs)(items)
    if hasattr(outputs, "__dict__"):
        same = copy.copy(outputs)
        vars(same).update({name: changed(name, part) for name, part in vars(outputs).items()})
        return same
    return outputs


def _parts(outputs: Any) -> dict[str | int | None, Any]:
    """The parts of a container by key, name and index."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if not isinstance(outputs, tuple | list):
        return dict(vars(outputs)) if hasattr(outputs, "__dict__") else {}
    return {**dict(zip(getattr(outputs, "_fields", ()), outputs, strict=False)), **dict(enumerate(outputs))}


def _widened(outputs: Any) -> Any:
    """Tensors of 16 bits in float32."""
    return _changed(outputs, lambda _, part: part.float() if part.dtype in (torch.bfloat16, torch.float16) else part)
