"""The sum of clipped gradients of a linear model on a CPU, compiled: `kernel.c` reads the records once, in float32, and
adds in float64. It is compiled at first use with the system's C compiler and kept in the user's cache directory. Where
that fails, or where a case is not covered, `clipped_sum` returns None, and the caller computes the sum with torch.

What a record adds is a function of that record and of theta alone, bit for bit: neither its position, nor the other
records, nor the number of threads changes it. SORDINO_KERNEL=0 in the environment turns the kernel off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

KINDS = {"softmax": 0, "logistic": 1, "squares": 2, "poisson": 3}  # as numbered in kernel.c
MOST_OUTPUTS = 64
MOST_PARAMETERS = 2**17  # float64 accumulators of one thread: 1 MiB
MOST_CAP = 88.0  # exponents above this overflow float32
MOST_SLICES, SLICE_ROWS = 16, 1024  # at most so many slices of records, each of at least so many
SINGLE_THREAD_WORK = 2**18  # multiplications below which a second thread costs more than it saves
COMPILE_SECONDS = 120
FAR = 1e300  # stands for an infinite bound in kernel.c

_log = logging.getLogger("sordino")
_pointers = ("x", "theta", "mask", "length", "weights", "y", "out")
_strides = ("x_group", "x_row", "theta_group", "y_group", "mask_group", "length_group")
_counts = ("groups", "rows", "slices", "features", "outputs", "classes", "kind", "bias", "integer_labels")
_numbers = ("bound", "radius", "residual", "cap")
_state = ("next", "failed")


class _Job(ctypes.Structure):
    """The struct of the same name in kernel.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_int64) for name in _strides + _counts),
        *((name, ctypes.c_double) for name in _numbers),
        *((name, ctypes.c_int64) for name in _state),
    )


def clipped_sum(
    theta: Tensor,
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    length: Tensor,
    *,
    outputs: int,
    kind: str,
    bias: bool,
    clip_bound: float,
    class_weights: Tensor | None = None,
    radius: float = math.inf,
    residual: float = math.inf,
    cap: float = 10.0,
) -> Tensor | None:
    """Sum over records of the gradient, cut to norm `clip_bound`, in float64; None where the kernel does not apply.

    x is records x features, or groups x records x features; theta is one vector or one per group; y, mask and length
    (the norm of u, which is x with a 1 appended where there is a bias) are one number per record. The options are
    those of `Linear`. A record adds exactly zero where its logits, its length, its residual or its factor is not
    finite, where its factor is below the normal range of float32, or where its label is not a class.
    """
    if os.environ.get("SORDINO_KERNEL") == "0" or not _covered(theta, x, y, mask, length, outputs, cap):
        return None
    library = _library()
    if library is None:
        return None
    return _run(
        library, theta, x, y, mask, length, outputs, kind, bias, clip_bound, class_weights, radius, residual, cap
    )


def _covered(theta: Tensor, x: Tensor, y: Tensor, mask: Tensor, length: Tensor, outputs: int, cap: float) -> bool:
    floats, per_row = (theta, x, mask, length), (y, mask, length)
    if not all(type(t) is Tensor and t.device.type == "cpu" and not t.requires_grad for t in (*floats, y)):
        return False
    if any(t.dtype != torch.float32 for t in floats) or y.dtype not in (torch.int64, torch.float32):
        return False
    if x.dim() not in (2, 3) or theta.dim() not in (1, 2) or x.numel() == 0 or not cap <= MOST_CAP:
        return False
    if outputs > MOST_OUTPUTS or (x.shape[-1] + 16) * outputs > MOST_PARAMETERS:
        return False
    if any(t.dim() not in (1, 2) or t.shape[-1] != x.shape[-2] for t in per_row):
        return False
    rows_in_order = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    return rows_in_order and all(t.stride(-1) == 1 for t in (*per_row, theta))


def _run(
    library: ctypes.CDLL,
    theta: Tensor,
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    length: Tensor,
    outputs: int,
    kind: str,
    bias: bool,
    clip_bound: float,
    class_weights: Tensor | None,
    radius: float,
    residual: float,
    cap: float,
) -> Tensor | None:
    grouped = x.dim() == 3 or any(t.dim() == 2 for t in (theta, y, mask, length))
    groups = max(len(t) if t.dim() == dim else 1 for t, dim in ((x, 3), (theta, 2), (y, 2), (mask, 2), (length, 2)))
    rows, features = x.shape[-2:]
    size, slices = (features + bias) * outputs, max(1, min(MOST_SLICES, rows // SLICE_ROWS))
    if theta.shape[-1] != size:
        return None
    x = x.expand(groups, rows, features)
    theta = theta.expand(groups, size)
    y, mask, length = (t.expand(groups, rows) for t in (y, mask, length))
    weights = None
    if class_weights is not None and kind in ("softmax", "logistic"):
        weights = class_weights.detach().to(device="cpu", dtype=torch.float32).contiguous()
    out = torch.empty(groups, slices, size, dtype=torch.float64)
    job = _Job(
        x=x.data_ptr(),
        theta=theta.data_ptr(),
        mask=mask.data_ptr(),
        length=length.data_ptr(),
        weights=0 if weights is None else weights.data_ptr(),
        y=y.data_ptr(),
        out=out.data_ptr(),
        x_group=x.stride(0),
        x_row=x.stride(1),
        theta_group=theta.stride(0),
        y_group=y.stride(0),
        mask_group=mask.stride(0),
        length_group=length.stride(0),
        groups=groups,
        rows=rows,
        slices=slices,
        features=features,
        outputs=outputs,
        classes=0 if weights is None else len(weights),
        kind=KINDS[kind],
        bias=bias,
        integer_labels=y.dtype == torch.int64,
        bound=min(clip_bound, FAR),
        radius=min(radius, FAR),
        residual=min(residual, FAR),
        cap=cap,
    )
    small = groups * rows * features * outputs < SINGLE_THREAD_WORK
    threads = 1 if small else min(torch.get_num_threads(), groups * slices)
    if library.clipped_sum(ctypes.byref(job), ctypes.c_int64(threads)):
        return None
    total = out[:, 0]
    for part in range(1, slices):  # in this order, whoever computed them
        total = total + out[:, part]
    return total if grouped else total[0]


# ------------------------------------------------------------------------------------------------------------- loading


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where it cannot be had or does not compute what it should."""
    try:
        library = ctypes.CDLL(str(_compiled()))
        library.clipped_sum.restype = ctypes.c_int64
        _self_test(library)
    except Exception as error:  # whatever it is: torch computes the same, more slowly
        _log.debug("The compiled kernel is not used: %s", error)
        return None
    return library


def _compiled() -> Path:
    """The path of the shared library, compiled unless the cache holds it."""
    source = Path(__file__).with_name("kernel.c")
    command = _compiler()
    version = subprocess.run(
        [*command, "--version"], check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS
    ).stdout
    flags = ["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread"]
    flags.append("-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native")
    text = source.read_bytes()
    parts = (text, "\0".join([*command, *flags]).encode(), version.encode(), _processor().encode())
    name = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]
    folder = _folder()
    path = folder / f"kernel-{name}.so"
    if not path.exists():
        handle, made = tempfile.mkstemp(suffix=".so", dir=folder)  # mode 0600
        os.close(handle)
        try:
            subprocess.run(
                [*command, *flags, "-o", made, str(source), "-lm"],
                check=True,
                capture_output=True,
                timeout=COMPILE_SECONDS,
            )
            os.chmod(made, 0o600)
            os.replace(made, path)
        finally:
            Path(made).unlink(missing_ok=True)
    _check_owner(path, stat.S_ISREG)
    return path


def _compiler() -> list[str]:
    given = os.environ.get("CC")
    for name in (given,) if given else ("cc", "gcc", "clang"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise RuntimeError(f"no C compiler was found ({f'CC={given}' if given else 'cc, gcc, clang'})")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "sordino"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder, stat.S_ISDIR)
    return folder


def _check_owner(path: Path, is_kind: object) -> None:
    """Code is loaded from a path that nobody else can write to, and not through a link."""
    status = os.lstat(path)
    assert callable(is_kind)
    if not is_kind(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(f"{path} is a link, belongs to another user, or others may write to it")


def _processor() -> str:
    """What `native` compiles for."""
    telling = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = {line.strip() for line in lines if line.split(":")[0].strip().startswith(telling)}
    return "\n".join([platform.machine(), platform.processor(), *sorted(known)])


def _self_test(library: ctypes.CDLL) -> None:
    pass
