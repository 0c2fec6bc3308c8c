"""Messages between machines: a short JSON head, then the bytes of arrays. Nothing in them is ever executed.

    b"SRD1" | length of the head, 4 bytes | head | arrays, one after another

The head holds `kind`, `fields` (what JSON holds; bytes as hex) and `arrays` (name, type, shape). A reader knows every
size before it makes anything, and refuses what does not add up to the last byte.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from sordino.core import Tree
from sordino.errors import WireError
from sordino.tree import leaves, tree_map

MAGIC = b"SRD1"
HEAD = 2**22  # bytes of a head at most
MOST = 2**31  # bytes of a message at most; a reader may set less
DEPTH = 8  # of lists and tables in a head, and of trees
ARRAYS = 4096  # of a message at most
TYPES = {"f4": np.float32, "f8": np.float64, "i8": np.int64, "u4": np.uint32, "u1": np.uint8}


class Message(NamedTuple):
    kind: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def encode(kind: str, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    listed, bodies = [], []
    for name, array in (arrays or {}).items():
        code = np.asarray(array).dtype.str.lstrip("<>|=")
        if code not in TYPES:
            raise WireError(f"{name}: arrays of {code} are not sent.")
        body = np.ascontiguousarray(array, dtype=np.dtype(TYPES[code]).newbyteorder("<"))
        listed.append([name, code, list(np.shape(array))])
        bodies.append(body.tobytes())
    try:
        said = {"kind": kind, "fields": dict(fields), "arrays": listed}
        head = json.dumps(said, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise WireError("message: NaN and infinities are sent in arrays only.") from None
    if len(head) > HEAD:
        raise WireError(f"message: a head of {len(head):,} bytes; {HEAD:,} are the most.")
    return b"".join([MAGIC, struct.pack("<I", len(head)), head, *bodies])


def decode(data: bytes, most: int = MOST) -> Message:
    if len(data) > most:
        raise WireError(f"message: {len(data):,} bytes; {most:,} are the most.")
    if len(data) < 8 or data[:4] != MAGIC:
        raise WireError("message: it does not begin like one.")
    (size,) = struct.unpack("<I", data[4:8])
    if size > min(HEAD, len(data) - 8):
        raise WireError("message: its head is longer than it.")
    try:
        head = json.loads(data[8 : 8 + size].decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message: its head cannot be read ({type(error).__name__}).") from None
    if not isinstance(head, dict) or head.keys() != {"kind", "fields", "arrays"} or not _shallow(head, DEPTH):
        raise WireError("message: its head is not made of kind, fields and arrays.")
    kind, fields, listed = head["kind"], head["fields"], head["arrays"]
    if not (isinstance(kind, str) and isinstance(fields, dict) and isinstance(listed, list) and len(listed) <= ARRAYS):
        raise WireError("message: its head is not made of kind, fields and arrays.")
    arrays, at = dict[str, np.ndarray](), 8 + size
    for item in listed:
        name, code, shape = _described(item)
        if name in arrays:
            raise WireError(f"message: two arrays are named {name[:40]!r}.")
        dtype = np.dtype(TYPES[code]).newbyteorder("<")
        length = dtype.itemsize * math.prod(shape)
        if length > len(data) - at:
            raise WireError(f"message: the array {name[:40]!r} is longer than it.")
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape).astype(TYPES[code])
        at += length
    if at != len(data):
        raise WireError("message: bytes are left over.")
    return Message(kind, fields, arrays)


def _described(item: Any) -> tuple[str, str, tuple[int, ...]]:
    fine = isinstance(item, list) and len(item) == 3 and isinstance(item[0], str) and item[1] in list(TYPES)
    shape = item[2] if fine else None
    if not isinstance(shape, list) or len(shape) > 4:
        raise WireError("message: an array is not described by name, type and shape.")
    # Axes of length 0 count as 1 here: numpy refuses what would not fit in memory without them.
    if any(type(k) is not int or not 0 <= k <= MOST for k in shape) or math.prod(max(k, 1) for k in shape) > MOST:
        raise WireError("message: an array's shape is no shape.")
    return item[0], item[1], tuple(shape)


def _no_number(word: str) -> float:
    raise ValueError(word)  # NaN and infinities are not JSON


def _shallow(node: Any, depth: int) -> bool:
    if isinstance(node, dict | list):
        parts = node.values() if isinstance(node, dict) else node
        return depth > 0 and all(_shallow(part, depth - 1) for part in parts)
    return True


def from_tree(tree: Tree, name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A skeleton for the fields, and the tensors as arrays named after it."""
    numbers = iter(range(2**31))
    skeleton = tree_map(lambda _: next(numbers), tree)
    return skeleton, {f"{name}{i}": leaf.detach().cpu().numpy() for i, leaf in enumerate(leaves(tree))}


def to_tree(skeleton: Any, arrays: Mapping[str, np.ndarray], name: str) -> Tree:
    numbers = iter(range(2**31))

    def build(node: Any) -> Tree:
        if isinstance(node, list):
            return tuple(build(part) for part in node)
        # In order, each once: a small skeleton that names one array a million times would fill the memory.
        if type(node) is not int or node != next(numbers) or f"{name}{node}" not in arrays:
            raise WireError(f"message: {name} names an array that is not there, or not in order.")
        return torch.from_numpy(arrays[f"{name}{node}"].copy())

    return build(skeleton)
