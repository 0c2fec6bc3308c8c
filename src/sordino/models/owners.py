"""Whose numbers are whose: which row every number of a pass was computed from.

Passes over a few rows show that rows meet only if they do so for these rows. A network that divides by the largest
number of a batch once that exceeds 255, or turns its rows around if any of them holds a certain number, keeps rows
apart in nearly all passes. So every operation of one pass is looked at by itself: it gets other numbers than those of
the pass, large and small ones, and what changes with a row has that row for an owner. What has several owners stays
mixed in all that is computed from it, whether or not it showed in the numbers of the pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from sordino.errors import SordinoError
from sordino.models.watch import FORMS

PUBLIC = -1  # of no row
MOST_ROWS = 100
MIXED = MOST_ROWS  # of several rows
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # places of the two factors
COPIES = {
    "_to_copy",
    "masked_fill_",
    "lift_fresh_copy",
    "native_dropout",
}  # number by number, although PyTorch does not say so
ERASES = {"zero_", "fill_.Scalar"}
# Row i of the first axis of what they return follows from row i of what they read, if all have as many.
ROW_BY_ROW = {"convolution", "native_layer_norm", "native_group_norm", "embedding"}
ROW_BY_ROW |= {"max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "_scaled_dot_product_attention_math"}
ROW_BY_ROW |= {"_softmax", "_log_softmax", "_safe_softmax"}
ROW_BY_ROW |= {f"_scaled_dot_product_{kind}" for kind in ("flash_attention_for_cpu", "flash_attention")}
ALONG = {"_softmax", "_log_softmax", "_safe_softmax"}  # their second argument is the axis along which numbers meet
SIZES = (math.log(1e-2), math.log(1e6))  # of numbers that are tried
BASES, FLIPPED, DRAWN = 3, 0, 3  # yes and no: as they are, all no, all yes
FAILS = (RuntimeError, IndexError, ValueError, TypeError)
OTHER_SIZE = (
    "module, or its loss: it takes numbers for numbers of another size, as x.view(torch.int8) does, so nobody can tell "
    "whose they are; convert them by x.to(torch.int8)."
)


class Owners(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the rows through the operations of a pass.

    Owners are kept by place in memory, so that views and operations in place need no rule of their own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, tuple[Any, int, Tensor]] = {}  # memory: itself, bytes per number, the owner of each
        self._draw = torch.Generator().manual_seed(0)
        self._looking = False

    def mark(self, rows: Tensor) -> None:
        """Let row i of a tensor be of row i."""
        places = torch.arange(len(rows), dtype=torch.int16).reshape(-1, *[1] * (rows.dim() - 1))
        self._write(rows, places.expand(rows.shape))

    def apart(self, outputs: Tensor) -> bool:
        """Whether row i of a tensor was computed from row i alone, and from what is public."""
        owner = self.of(outputs)
        if owner is None:
            return True
        places = torch.arange(len(owner), dtype=owner.dtype).reshape(-1, *[1] * (owner.dim() - 1))
        return bool(((owner == PUBLIC) | (owner == places)).all())

    def of(self, tensor: Tensor) -> Tensor | None:
        """The owner of every number of a tensor; None if all are public."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is None or not tensor.numel():
            return None
        _, size, owner = held
        if size == 2 * tensor.element_size():  # the parts of complex numbers
            owner = owner.repeat_interleave(2)
        elif size != tensor.element_size():
            raise SordinoError(OTHER_SIZE)
        found = owner.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return None if bool((found == PUBLIC).all()) else found

    def _write(self, tensor: Tensor, owner: Tensor) -> None:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        if not tensor.numel():
            return
        if storage._cdata not in self._held:
            fresh = torch.full((storage.nbytes() // size,), PUBLIC, dtype=torch.int16)
            self._held[storage._cdata] = storage, size, fresh
        _, known, all_owners = self._held[storage._cdata]
        if known != size:
            raise SordinoError(OTHER_SIZE)
        all_owners.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(owner)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._looking:
            return func(*args, **kwargs)
        self._looking = True
        try:
            return self._followed(func, args, kwargs)
        finally:
            self._looking = False

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        owners = [self.of(tensor) for tensor in tensors]
        written = func._schema.is_mutable
        if all(owner is None for owner in owners):
            outputs = func(*args, **kwargs)
            for tensor in tree_leaves(outputs) if written else ():
                if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._held:
                    self._write(tensor, torch.tensor(PUBLIC, dtype=torch.int16))
            return outputs
        given = [t.clone() if o is not None or written else t for t, o in zip(tensors, owners, strict=True)]
        outputs = func(*args, **kwargs)
        returned = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        before = {tensor.untyped_storage()._cdata for tensor in tensors}
        if not written and all(tensor.untyped_storage()._cdata in before for tensor in returned):
            return outputs  # views

        def again(numbers: Sequence[Tensor]) -> list[Tensor]:
            at = iter(numbers)
            mine = [next(at).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            again_args, again_kwargs = tree_unflatten(mine, form)
            return [leaf for leaf in tree_leaves(func(*again_args, **again_kwargs)) if isinstance(leaf, Tensor)]

        found = self._by_rule(func, args, tensors, owners, returned)
        if found is None or any(bool((each == MIXED).any()) for each in found):
            tried = self._by_trying(again, given, owners, returned) if found is None or _may_be_finer(func) else None
            found = found if tried is None else tried
        assert found is not None
        for tensor, owner in zip(returned, found, strict=True):
            self._write(tensor, owner)
        return outputs

    def _by_rule(
        self, func: Any, args: Any, tensors: list[Tensor], owners: list[Tensor | None], returned: list[Tensor]
    ) -> list[Tensor] | None:
        """The owners of what an operation returns, where its kind tells them."""
        name = func._schema.name.removeprefix("aten::")
        full = f"{name}.{func._schema.overload_name}"
        public = torch.tensor(PUBLIC, dtype=torch.int16)
        drawn = torch.Tag.nondeterministic_seeded in func.tags and len(tensors) == 1 and func._schema.is_mutable
        if full in ERASES or name in ERASES or name in FORMS or drawn:
            return [public for _ in returned]
        if name == "copy_":
            return [public if owners[1] is None else owners[1].clone()]
        here = [owner for owner in owners if owner is not None]
        if torch.Tag.pointwise in func.tags or name in COPIES:
            return [_all_of(here, tensor.shape) for tensor in returned]
        if name in PRODUCTS and len(returned) == 1:
            left, right = (self.of(args[place]) for place in PRODUCTS[name])
            parts = [] if left is None else [_joined(left, -1)]
            parts += [] if right is None else [_joined(right, -2)]
            if name in ("addmm", "baddbmm") and (bias := self.of(args[0])) is not None:
                parts.append(bias)
            return [_all_of(parts, returned[0].shape)]
        if name in ROW_BY_ROW and not (name in ALONG and args[1] in (0, -returned[0].dim())):
            if name == "embedding" and owners[0] is not None:
                return None
            rows = {len(each) for each in here} | {len(tensor) for tensor in returned if tensor.dim()}
            if len(rows) > 1 or any(not tensor.dim() for tensor in returned):
                return None
            each = [_joined(owner.reshape(len(owner), -1), 1).reshape(-1) for owner in here]
            joined = _all_of(each, each[0].shape)
            return [joined.reshape(-1, *[1] * (tensor.dim() - 1)) for tensor in returned]
        return None

    def _by_trying(
        self,
        again: Callable[[Sequence[Tensor]], list[Tensor]],
        given: list[Tensor],
        owners: list[Tensor | None],
        returned: list[Tensor],
    ) -> list[Tensor]:
        """The owners of what an operation returns, by what changes in it with the numbers of each row."""
        rows = {int(each) for owner in owners if owner is not None for each in set(owner.flatten().tolist())} - {PUBLIC}
        found = [torch.full(tensor.shape, PUBLIC, dtype=torch.int16) for tensor in returned]
        read = [None if owner is None else owner.to(t.device) for t, owner in zip(given, owners, strict=True)]

        def with_other(numbers: Sequence[Tensor], row: int | None, kind: int) -> list[Tensor]:
            return [
                t if owner is None else self._other(t, owner != PUBLIC if row is None else owner == row, kind)
                for t, owner in zip(numbers, read, strict=True)
            ]

        for base in range(BASES):
            numbers = with_other(given, None, base) if base else given
            with suppress(*FAILS):
                usual = again(numbers)
                for row, kind in itertools.product(rows, (FLIPPED, DRAWN)):
                    with suppress(*FAILS):
                        for owner, one, other in zip(found, usual, again(with_other(numbers, row, kind)), strict=True):
                            if one.shape == other.shape == owner.shape:
                                changed = _differ(one, other).cpu() & (owner != row)
                                many = changed & (owner != PUBLIC)
                                owner[changed] = row
                                owner[many] = MIXED
        return found

    def _other(self, tensor: Tensor, where: Tensor, kind: int) -> Tensor:
        """A tensor with other numbers in some places. kind: what becomes of yes and no."""
        if tensor.dtype is torch.bool:
            drawn = torch.rand(tensor.shape, generator=self._draw).to(tensor.device) < 0.5
            return torch.where(where, (~tensor, torch.zeros_like(tensor), torch.ones_like(tensor), drawn)[kind], tensor)
        if tensor.is_floating_point() or tensor.is_complex():
            size = torch.empty(tensor.shape).uniform_(*SIZES, generator=self._draw).exp_()
            size *= torch.empty(tensor.shape).uniform_(-1, 1, generator=self._draw)
            return torch.where(where, size.to(tensor), tensor)
        low, high = int(tensor.min()), int(tensor.max())
        drawn = torch.randint(low, high + 1, tensor.shape, generator=self._draw)
        return torch.where(where, drawn.to(tensor), tensor)


def _may_be_finer(func: Any) -> bool:
    """Whether trying an operation may show fewer owners than its rule: that of rows may read another axis."""
    return func._schema.name.removeprefix("aten::") in ROW_BY_ROW


def _joined(owner: Tensor, axis: int) -> Tensor:
    """The owner of what all numbers along an axis give together."""
    high = owner.amax(axis, keepdim=True)
    low = torch.where(owner == PUBLIC, MIXED, owner).amin(axis, keepdim=True)
    return torch.where((high == PUBLIC) | (low == high), high, MIXED).to(torch.int16)


def _all_of(owners: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The owner of numbers that follow from one of each."""
    if not owners:
        return torch.full(tuple(shape), PUBLIC, dtype=torch.int16)
    total = owners[0].expand(tuple(shape)) if math.prod(shape) else owners[0]
    for owner in owners[1:]:
        other = owner.expand(total.shape)
        total = torch.where(total == PUBLIC, other, torch.where((other == PUBLIC) | (other == total), total, MIXED))
    return total.to(torch.int16)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors differ; not a number is equal to itself."""
    if not (one.is_floating_point() or one.is_complex()):
        return one != other
    if one.is_cuda:  # kernels may add in any order
        return ~torch.isclose(one, other, 1e-3, 0.0, equal_nan=True)
    return (one != other) & ~(one.isnan() & other.isnan())
