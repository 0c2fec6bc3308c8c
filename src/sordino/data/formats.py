"""Published file formats, read from bytes: idx, CIFAR's pickles, MedMNIST's .npz, LIBSVM text, JPEG, tables of text.

A damaged file raises an error that names it. No code of a file is run.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import math
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sordino.errors import SordinoError

PACKED = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}
ARRAYS = {  # all that a pickled numpy array refers to, under the old and new name of numpy's internal module
    ("numpy", "ndarray"): "numpy",
    ("numpy", "dtype"): "numpy",
    ("numpy.core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy._core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy.core.numeric", "_frombuffer"): "numpy._core.numeric",
    ("numpy._core.numeric", "_frombuffer"): "numpy._core.numeric",
    ("_codecs", "encode"): "_codecs",  # bytes, as Python 3 writes them in protocol 2
}


@contextmanager
def reading(where: str, kind: str) -> Iterator[None]:
    """Turn any error inside into one that names the damaged file."""
    try:
        yield
    except SordinoError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ImportError,
        OverflowError,
        struct.error,
        zlib.error,
        lzma.LZMAError,
        tarfile.TarError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        raise SordinoError(
            f"data: '{where}' is damaged or not {kind} ({error}); replace it by a complete copy."
        ) from None


def unpack(data: bytes, where: str) -> bytes:
    """Decompress by the suffix of the name."""
    for suffix, decompress in PACKED.items():
        if where.endswith(suffix):
            with reading(where, f"a whole {suffix} file"):
                return decompress(data)
    return data


def idx(data: bytes, where: str) -> np.ndarray:
    """The array of an idx file (MNIST and similar sets)."""
    with reading(where, "an idx file of bytes"):
        zero, kind, dimensions = struct.unpack_from(">HBB", data)
        if zero or kind != 8 or not dimensions:
            raise ValueError(f"it begins with {data[:4].hex()}")
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
        start, size = 4 + 4 * dimensions, math.prod(shape)
        if len(data) - start != size:
            raise ValueError(f"{len(data) - start} bytes, where {shape} needs {size}")
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


class _Plain(pickle.Unpickler):
    """Unpickle numbers, strings, containers and numpy arrays. A pickle that refers to anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAYS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no array needs")
        return getattr(importlib.import_module(ARRAYS[module, name]), name)


def unpickle(data: bytes, where: str) -> dict[str, Any]:
    """One of CIFAR's pickled dictionaries."""
    with reading(where, "a batch of plain arrays"):
        batch = _Plain(io.BytesIO(data), encoding="latin1").load()
        return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in batch.items()}


def cifar(data: bytes, where: str, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) and their labels; on disk an image is three planes of 32 rows."""
    batch = unpickle(data, where)
    with reading(where, "a CIFAR batch"):
        x, y = np.asarray(batch["data"]), np.asarray(batch[labels])
        if x.dtype != np.uint8 or y.dtype.kind not in "iu" or len(x) != len(y):
            raise ValueError(f"data {x.dtype} {x.shape} for labels {y.dtype} {y.shape}")
        return x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), y.astype(np.int64)


def npz(data: bytes, where: str, names: tuple[str, ...]) -> list[np.ndarray]:
    with reading(where, f"an .npz with {', '.join(names)}"), np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [arrays[name] for name in names]


def libsvm(data: bytes, where: str, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Dense float32 records and their labels, from lines `label index:value …` with indices from 1."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    x, y = np.zeros((len(lines), features), np.float32), np.empty(len(lines))
    for row, line in enumerate(lines):
        with reading(f"{where}, line {row + 1}", "LIBSVM text"):
            label, *pairs = line.split()
            y[row] = float(label)
            for pair in pairs:
                index, value = pair.split(b":")
                if not 1 <= int(index) <= features:
                    raise ValueError(f"feature {int(index)} is outside 1 to {features}")
                x[row, int(index) - 1] = float(value)
    return x, y


def jpeg(data: bytes, where: str, side: int) -> np.ndarray:
    """One image (side, side, 3); grey ones get three equal channels."""
    try:
        from PIL import Image
    except ImportError:
        raise SordinoError("data: JPEG images need Pillow; install it with pip install 'sordino[images]'.") from None
    with reading(where, "a JPEG image"), Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        if image.size != (side, side):
            raise ValueError(f"{image.size[0]} by {image.size[1]} pixels, where {side} by {side} are expected")
        return np.asarray(image.convert("RGB"))


def table(data: bytes, where: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of tab-separated text; quotes have no special meaning."""
    with reading(where, "UTF-8 text"):
        lines = data.decode("utf-8").removesuffix("\n").split("\n")
    header, *rows = ([cell.strip() for cell in line.split("\t")] for line in lines)
    return header, rows
