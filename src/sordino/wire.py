"""Messages between machines: a short JSON head, then the bytes of arrays. Nothing in a message is executed.

    b"SRD1" | length of the head, 4 bytes | head | arrays, one after another

The head holds `kind`, `fields` (JSON values; bytes as hex) and `arrays` (name, type, shape). A reader knows every size
before it allocates anything, and rejects a message whose sizes do not add up to its last byte.
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
from sordino.tree import Skeleton, flatten, unflatten

MAGIC = b"SRD1"
MAX_HEAD_BYTES = 2**22
MAX_MESSAGE_BYTES = 2**31  # a reader may set a lower limit
MAX_DEPTH = 8  # of nested lists and objects in a head
MAX_ARRAYS = 4096
MAX_AXES = 4
TYPES = {"f4": np.float32, "f8": np.float64, "i8": np.int64, "u4": np.uint32, "u1": np.uint8}
NOT_A_HEAD = "message: the head must hold kind, fields and arrays, nested at most 8 deep."


class Message(NamedTuple):
    """A decoded message."""

    kind: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def encode(kind: str, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """A message as bytes.

    Args:
        kind: What the message is.
        fields: JSON values by name.
        arrays: Arrays by name; their types must be in `TYPES`.

    Returns:
        The bytes.

    Raises:
        WireError: An array has another type, a field is NaN or infinite, or the head is too long.

    >>> decode(encode("hello", {"t": 1}, {"x": np.zeros(2)})).arrays["x"]
    array([0., 0.])
    """
    listed, bodies = [], []
    for name, array in (arrays or {}).items():
        code = np.asarray(array).dtype.str.lstrip("<>|=")
        if code not in TYPES:
            raise WireError(f"{name}: arrays of type {code} cannot be sent; convert to one of {', '.join(TYPES)}.")
        body = np.ascontiguousarray(array, dtype=np.dtype(TYPES[code]).newbyteorder("<"))
        listed.append([name, code, list(np.shape(array))])
        bodies.append(body.tobytes())
    try:
        content = {"kind": kind, "fields": dict(fields), "arrays": listed}
        head = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise WireError("message: fields cannot hold NaN or infinity; send them in an array.") from None
    if len(head) > MAX_HEAD_BYTES:
        raise WireError(f"message: the head has {len(head):,} bytes; the limit is {MAX_HEAD_BYTES:,}.")
    return b"".join([MAGIC, struct.pack("<I", len(head)), head, *bodies])


def decode(data: bytes, most: int = MAX_MESSAGE_BYTES) -> Message:
    """A message from bytes that anybody may have sent.

    Args:
        data: The bytes.
        most: The largest message to accept, in bytes.

    Returns:
        The message.

    Raises:
        WireError: The bytes are not a message.
    """
    if len(data) > most:
        raise WireError(f"message: {len(data):,} bytes; the limit is {most:,}.")
    kind, fields, listed, at = _head(data)
    if len(listed) > MAX_ARRAYS:
        raise WireError(f"message: {len(listed):,} arrays; the limit is {MAX_ARRAYS:,}.")
    arrays = dict[str, np.ndarray]()
    for item in listed:
        name, code, shape = _array_header(item)
        if name in arrays:
            raise WireError(f"message: two arrays have the name {name[:40]!r}.")
        dtype = np.dtype(TYPES[code]).newbyteorder("<")
        length = dtype.itemsize * math.prod(shape)
        if length > len(data) - at:
            raise WireError(f"message: the array {name[:40]!r} does not fit into the message.")
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape).astype(TYPES[code])
        at += length
    if at != len(data):
        raise WireError(f"message: {len(data) - at:,} bytes follow the last array.")
    return Message(kind, fields, arrays)


def peek(data: bytes) -> tuple[str, dict[str, Any]]:
    """Kind and fields of a message, without its arrays: enough to know how long the message may be.

    Args:
        data: The bytes, which anybody may have sent.

    Returns:
        The kind and the fields.

    Raises:
        WireError: The bytes do not begin as a message does.

    >>> peek(encode("hello", {"t": 1}, {"x": np.zeros(2)}))
    ('hello', {'t': 1})
    """
    return _head(data)[:2]


def _head(data: bytes) -> tuple[str, dict[str, Any], list[Any], int]:
    """Kind, fields, the list of arrays, and where the first array begins."""
    if len(data) < 8 or data[:4] != MAGIC:
        raise WireError(f"message: it must start with {MAGIC!r} and the length of its head.")
    (size,) = struct.unpack("<I", data[4:8])
    if size > min(MAX_HEAD_BYTES, len(data) - 8):
        raise WireError(f"message: a head of {size:,} bytes does not fit into the message.")
    try:
        head = json.loads(data[8 : 8 + size].decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message: the head cannot be read ({type(error).__name__}).") from None
    if not isinstance(head, dict) or head.keys() != {"kind", "fields", "arrays"} or not _shallow(head, MAX_DEPTH):
        raise WireError(NOT_A_HEAD)
    kind, fields, listed = head["kind"], head["fields"], head["arrays"]
    if not (isinstance(kind, str) and isinstance(fields, dict) and isinstance(listed, list)):
        raise WireError(NOT_A_HEAD)
    return kind, fields, listed, 8 + size


def _array_header(item: Any) -> tuple[str, str, tuple[int, ...]]:
    valid = isinstance(item, list) and len(item) == 3 and isinstance(item[0], str) and item[1] in list(TYPES)
    shape = item[2] if valid else None
    if not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise WireError(f"message: an array needs a name, a type of {', '.join(TYPES)} and at most {MAX_AXES} axes.")
    # Axes of length 0 count as 1 here: numpy rejects a shape whose other axes would not fit into memory.
    total = math.prod(max(k, 1) if type(k) is int else 1 for k in shape)
    if any(type(k) is not int or not 0 <= k <= MAX_MESSAGE_BYTES for k in shape) or total > MAX_MESSAGE_BYTES:
        raise WireError(f"message: axes must be whole numbers, 0 or more, with a product up to {MAX_MESSAGE_BYTES:,}.")
    return item[0], item[1], tuple(shape)


def _reject_constant(constant: str) -> float:
    raise ValueError(constant)  # NaN and infinities are not JSON


def _shallow(node: Any, depth: int) -> bool:
    if isinstance(node, dict | list):
        parts = node.values() if isinstance(node, dict) else node
        return depth > 0 and all(_shallow(part, depth - 1) for part in parts)
    return True


def from_tree(tree: Tree, name: str) -> tuple[Skeleton, dict[str, np.ndarray]]:
    """A tree as parts of a message.

    Args:
        tree: The tree.
        name: Prefix of the arrays' names.

    Returns:
        The nesting, for the fields, and the tensors as arrays `name0`, `name1`, …
    """
    skeleton, tensors = flatten(tree)
    return skeleton, {f"{name}{i}": tensor.detach().cpu().numpy() for i, tensor in enumerate(tensors)}


def to_tree(skeleton: Any, arrays: Mapping[str, np.ndarray], name: str) -> Tree:
    """The tree that `from_tree` took apart, of plain tuples; `tree.rebuild` restores NamedTuples.

    Args:
        skeleton: The nesting, as the sender gave it.
        arrays: The message's arrays.
        name: Prefix of the arrays' names.

    Returns:
        The tree.

    Raises:
        WireError: The nesting names an array that is missing, or names arrays out of order.
    """
    try:
        return unflatten(skeleton, lambda i: torch.from_numpy(arrays[f"{name}{i}"].copy()))
    except (ValueError, KeyError) as error:
        raise WireError(f"message: '{name}' names a missing array, or arrays out of order ({error}).") from None
