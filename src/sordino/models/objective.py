"""What a network is trained for: the sum over records of one loss each, from all that the module returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sordino.errors import SordinoError, check_known
from sordino.models.per_example import summed

LABELS = ("classes", "numbers")
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
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise SordinoError(f"loss: it fails on {len(y)} records: {type(error).__name__}: {error}") from error
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if shape != (len(y),):
            raise SordinoError(
                f"loss: it returns {shape} for {len(y)} records; return one loss per record, as with reduction='none'."
            )


def _parts(outputs: Any) -> dict[str | int | None, Any]:
    """The parts of a container by key, name and index."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if not isinstance(outputs, tuple | list):
        return dict(vars(outputs)) if hasattr(outputs, "__dict__") else {}
    return {**dict(zip(getattr(outputs, "_fields", ()), outputs, strict=False)), **dict(enumerate(outputs))}


def _widened(outputs: Any) -> Any:
    """Tensors of 16 bits in float32, in containers of one level."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if isinstance(outputs, Mapping):
        return {key: _widened(part) if isinstance(part, Tensor) else part for key, part in outputs.items()}
    if isinstance(outputs, tuple | list):
        parts = [_widened(part) if isinstance(part, Tensor) else part for part in outputs]
        return outputs._make(parts) if hasattr(outputs, "_make") else parts
    return outputs
