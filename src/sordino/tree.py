"""Plain nested tuples of tensors: messages, memories and states."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from sordino.core import Tree
from sordino.errors import SordinoError
from sordino.lazy import Tensor, torch


def tree_map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply f to every tensor."""
    if isinstance(tree, tuple):
        parts = [tree_map(f, *part) for part in zip(tree, *rest, strict=True)]
        return type(tree)._make(parts) if hasattr(tree, "_make") else tuple(parts)
    return f(tree, *rest)


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors, in order."""
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple) else [tree]


def pack(tree: Tree) -> bytes:
    """To bytes: the release that is stored before it leaves, the checkpoint that a run resumes from."""
    flat = leaves(tree)
    numbers = iter(range(len(flat)))
    skeleton = json.dumps(tree_map(lambda _: next(numbers), tree))
    buffer = io.BytesIO()
    arrays = {f"leaf{i}": leaf.detach().cpu().numpy() for i, leaf in enumerate(flat)}
    np.savez(buffer, allow_pickle=False, skeleton=np.array(skeleton), **arrays)
    return buffer.getvalue()


def unpack(data: bytes) -> Tree:
    """From bytes; nothing in them is ever executed."""

    def build(node: Any) -> Tree:
        return tuple(build(part) for part in node) if isinstance(node, list) else torch.from_numpy(store[f"leaf{node}"])

    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as store:
            return build(json.loads(str(store["skeleton"])))
    except Exception as error:  # a damaged archive fails in a dozen ways
        raise SordinoError(f"stored tensors: they cannot be read ({error}); the file was damaged.") from None
