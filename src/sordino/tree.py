"""Trees of tensors (messages, memories, states): map over them, list their leaves, and store them as plain data."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, overload

import numpy as np

from sordino.core import AnyTree, Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch

Skeleton: TypeAlias = "int | list[Skeleton]"  # the nesting of a tree: the number of each leaf, in order


def tree_map(f: Callable[..., Tensor], tree: AnyTree, *rest: Tree) -> AnyTree:
    """Apply a function to every tensor.

    Args:
        f: A function of one tensor per tree.
        tree: The first tree. The result has its nesting and its NamedTuples.
        rest: Trees of the same nesting.

    Returns:
        The tree of values.

    Raises:
        ValueError: The trees differ in nesting.

    >>> tree_map(torch.add, (torch.tensor(1), torch.tensor(2)), (torch.tensor(3), torch.tensor(4)))
    (tensor(4), tensor(6))
    """
    if isinstance(tree, tuple):
        return _tuple_like(tree, [tree_map(f, *parts) for parts in zip(tree, *rest, strict=True)])
    return f(tree, *rest)  # type: ignore[return-value]


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order.

    >>> leaves((torch.tensor(1), (torch.tensor(2), ())))
    [tensor(1), tensor(2)]
    """
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple) else [tree]


def rebuild(tree: Tree, template: AnyTree) -> AnyTree:
    """Give a plain tree, read from bytes, the NamedTuples of a template.

    Args:
        tree: Nested plain tuples of tensors.
        template: A tree with NamedTuples. Where it has () or a tensor, any tree is accepted unchanged.

    Returns:
        The same tensors in the template's NamedTuples.

    Raises:
        SordinoError: The tree lacks parts that a tuple of the template has, or has more.
    """
    if not isinstance(template, tuple) or not template:
        return tree  # type: ignore[return-value]
    if not isinstance(tree, tuple) or len(tree) != len(template):
        found = f"{len(tree)} parts" if isinstance(tree, tuple) else "one tensor"
        expected = ", ".join(getattr(template, "_fields", ())) or f"{len(template)} parts"
        raise SordinoError(f"stored tensors: {found} in place of {expected}; the file belongs to another method.")
    return _tuple_like(template, [rebuild(*pair) for pair in zip(tree, template, strict=True)])


def flatten(tree: Tree) -> tuple[Skeleton, list[Tensor]]:
    """The nesting of a tree, which JSON can hold, and its tensors in order.

    >>> flatten((torch.tensor(1), (torch.tensor(2), ())))
    ([0, [1, []]], [tensor(1), tensor(2)])
    """
    tensors: list[Tensor] = []

    def walk(node: Tree) -> Skeleton:
        if isinstance(node, tuple):
            return [walk(part) for part in node]
        tensors.append(node)
        return len(tensors) - 1

    return walk(tree), tensors


def unflatten(skeleton: Any, leaf: Callable[[int], Tensor]) -> Tree:
    """The tree of plain tuples that `flatten` took apart.

    Args:
        skeleton: The nesting, as JSON gave it: it may come from anybody.
        leaf: Returns the tensor of a number.

    Returns:
        The tree.

    Raises:
        ValueError: The skeleton does not count its leaves 0, 1, 2, … in order. (A short one that names the same leaf a
            million times would fill the memory.)
    """
    following = 0

    def build(node: Any) -> Tree:
        nonlocal following
        if isinstance(node, list):
            return tuple(build(part) for part in node)
        if type(node) is not int or node != following:
            raise ValueError(f"leaf {following} is missing from the nesting")
        following += 1
        return leaf(node)

    return build(skeleton)


def pack(tree: Tree) -> bytes:
    """A tree as bytes: the release that is stored before it leaves, the checkpoint from which a run resumes."""
    skeleton, tensors = flatten(tree)
    buffer = io.BytesIO()
    arrays = {f"leaf{i}": tensor.detach().cpu().numpy() for i, tensor in enumerate(tensors)}
    np.savez(buffer, allow_pickle=False, skeleton=np.array(json.dumps(skeleton)), **arrays)
    return buffer.getvalue()


@overload
def unpack(data: bytes) -> Tree: ...
@overload
def unpack(data: bytes, template: AnyTree) -> AnyTree: ...
def unpack(data: bytes, template: Tree = ()) -> Tree:
    """The tree in these bytes. Nothing in them is executed.

    Args:
        data: What `pack` returned.
        template: A tree whose NamedTuples the result gets; see `rebuild`.

    Returns:
        The tree.

    Raises:
        SordinoError: The bytes are damaged, or do not fit the template.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as store:
            tree = unflatten(json.loads(str(store["skeleton"])), lambda i: torch.from_numpy(store[f"leaf{i}"]))
    except Exception as error:  # a damaged archive raises errors of many types
        raise SordinoError(f"stored tensors: they cannot be read ({error}); the file was damaged.") from None
    return rebuild(tree, template)


def _tuple_like(template: AnyTree, parts: Iterable[Tree]) -> AnyTree:
    make: Any = getattr(type(template), "_make", tuple)
    return make(parts)  # type: ignore[no-any-return]
