"""The sum of clipped gradients of a linear model on a CPU, compiled: `kernel.c` reads the records once, in float32, and
adds in float64. It is compiled at first use with the system's C compiler and kept in the user's cache directory. If
that fails, or if a case is not covered, `clipped_sum` returns None, and the caller computes the sum with torch.

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
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sordino import files

KINDS = {"softmax": 0, "logistic": 1, "squares": 2, "poisson": 3}  # as numbered in kernel.c
TILE, WIDEST_BLOCK = 16, 64  # rows computed together in kernel.c, and the most features
FAR = 1e300  # stands for an infinite bound in kernel.c
MOST_OUTPUTS = 64  # as MOST in kernel.c, which has arrays of this size
MOST_PARAMETERS = 2**17  # float64 accumulators of one thread: 1 MiB
MOST_CAP = 88.0  # exponents above this overflow float32
MOST_SLICES, SLICE_ROWS = 16, 1024  # at most so many slices of records, each of at least so many
MOST_THREADS = 64
SINGLE_THREAD_WORK = 2**18  # multiplications below which a second thread costs more than it saves
COMPILE_SECONDS = 120
HUGE_PAGE, MADV_HUGEPAGE = 2**21, 14

_log = logging.getLogger("sordino")
_pointers = ("x", "theta", "y", "mask", "length", "after", "out", "scratch")
_sizes = ("x_group", "x_row", "theta_group", "groups", "rows", "slices", "features", "outputs", "kind", "bias")


class _Job(ctypes.Structure):
    """The struct of the same name in kernel.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_int64) for name in (*_sizes, "scratch_size")),
        *((name, ctypes.c_double) for name in ("bound", "residual", "cap")),
        *((name, ctypes.c_int64) for name in ("next_item", "next_thread")),
    )


@dataclass(frozen=True)
class _Options:
    """The options of `Linear` for a loss, and the bound on one record's gradient."""

    outputs: int
    kind: str
    bias: bool
    clip_bound: float
    radius: float = math.inf
    residual: float = math.inf
    cap: float = 10.0


def takes(x: Tensor) -> bool:
    """Whether the kernel may apply to these features; a caller need not prepare its other inputs where it cannot."""
    return x.dtype is torch.float32 and x.device.type == "cpu"


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
    radius: float = math.inf,
    residual: float = math.inf,
    cap: float = 10.0,
) -> Tensor | None:
    """The sum of gradients, each clipped to norm `clip_bound`, in float64; None if the kernel does not apply.

    x is records x features, or groups x records x features; theta is one vector or one per group; y, mask and length
    (the norm of u, which is x, followed by 1 if there is a bias) are one number per record. The options are
    those of `Linear`. A record adds exactly zero if a logit, its length, its residual or its factor is not finite,
    if its factor is below the normal range of float32, or if its label is not a class.
    """
    options = _Options(outputs, kind, bias, clip_bound, radius, residual, cap)
    if os.environ.get("SORDINO_KERNEL") == "0" or not _covered(theta, x, y, mask, length, options):
        return None
    library = _library()
    return None if library is None else _run(library, theta, x, y, mask, length, options)


def _covered(theta: Tensor, x: Tensor, y: Tensor, mask: Tensor, length: Tensor, options: _Options) -> bool:
    floats, per_row, outputs = (theta, x, mask, length), (y, mask, length), options.outputs
    if not all(type(t) is Tensor and t.device.type == "cpu" and not t.requires_grad for t in (*floats, y)):
        return False
    if any(t.dtype != torch.float32 for t in floats) or y.dtype not in (torch.int64, torch.float32):
        return False
    if x.dim() not in (2, 3) or theta.dim() not in (1, 2) or x.numel() == 0 or x.stride(-1) != 1:
        return False
    if x.stride(-2) < x.shape[-1] or theta.stride(-1) != 1 or options.kind not in KINDS or not options.cap <= MOST_CAP:
        return False
    if any(t.dim() not in (1, 2) or t.shape[-1] != x.shape[-2] for t in per_row):
        return False
    if theta.shape[-1] != (x.shape[-1] + options.bias) * outputs:
        return False
    return 1 <= outputs <= MOST_OUTPUTS and (x.shape[-1] + WIDEST_BLOCK) * outputs <= MOST_PARAMETERS


def _run(
    library: ctypes.CDLL, theta: Tensor, x: Tensor, y: Tensor, mask: Tensor, length: Tensor, options: _Options
) -> Tensor:
    leads = [size for t, axes in ((x, 2), (theta, 1), (y, 1), (mask, 1), (length, 1)) for size in t.shape[:-axes]]
    grouped, groups = bool(leads), max(leads, default=1)
    rows, features = x.shape[-2:]
    x, theta = x.expand(groups, rows, features), theta.expand(groups, theta.shape[-1])
    after = None
    if math.isfinite(options.radius):  # Mallows
        after = _per_row((options.radius / length.double().clamp_min(options.radius)).square(), groups)
    y, mask, length = (_per_row(t, groups) for t in (y, mask, length))

    slices = max(1, min(MOST_SLICES, rows // SLICE_ROWS))  # a function of the number of records alone
    small = groups * rows * features * options.outputs < SINGLE_THREAD_WORK
    threads = 1 if small else min(torch.get_num_threads(), groups * slices, MOST_THREADS)
    width = -(-features // WIDEST_BLOCK) * WIDEST_BLOCK
    numbers = TILE * options.outputs + width * (options.outputs + TILE)
    scratch = torch.zeros(threads, numbers, dtype=torch.float64, device="cpu")  # whatever the default device
    out = _new(groups, slices, theta.shape[-1])
    job = _Job(
        x=x.data_ptr(),
        theta=theta.data_ptr(),
        y=y.data_ptr(),
        mask=mask.data_ptr(),
        length=length.data_ptr(),
        after=0 if after is None else after.data_ptr(),
        out=out.data_ptr(),
        scratch=scratch.data_ptr(),
        x_group=x.stride(0),
        x_row=x.stride(1),
        theta_group=theta.stride(0),
        groups=groups,
        rows=rows,
        slices=slices,
        features=features,
        outputs=options.outputs,
        kind=KINDS[options.kind],
        bias=options.bias,
        scratch_size=scratch.shape[1],
        bound=min(options.clip_bound, FAR),
        residual=min(options.residual, FAR),
        cap=options.cap,
    )
    parallel = _parallel() if threads > 1 else None
    if parallel is None:
        library.clipped_sum(ctypes.byref(job))
    else:
        parallel(library.clipped_sum, ctypes.byref(job), ctypes.c_uint(threads), ctypes.c_uint(0))
    total = out[:, 0]
    for part in range(1, slices):  # in this order, whichever thread computed them
        total += out[:, part]
    return total.contiguous() if grouped else total[0]


def _per_row(values: Tensor, groups: int) -> Tensor:
    return values.to(torch.float32).expand(groups, values.shape[-1]).contiguous()


def _new(*shape: int) -> Tensor:
    """Uninitialized memory, in huge pages if it is large: thousands of page faults take longer than many small sums."""
    out = torch.empty(shape, dtype=torch.float64, device="cpu")
    first = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    pages = (out.data_ptr() + 8 * out.numel() - first) // HUGE_PAGE
    if pages > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(pages * HUGE_PAGE), MADV_HUGEPAGE)
    return out


@functools.cache
def _parallel() -> Callable[..., object] | None:
    """A function that runs another in torch's OpenMP threads, which wait actively and would slow down other threads.

    It is found among what torch has loaded: under a global name, or in the OpenMP library that lies beside torch.
    """
    beside = sorted(Path(torch.__file__).parent.glob("lib/libgomp*"))
    for name, mode in ((None, ctypes.DEFAULT_MODE), *((str(path), os.RTLD_NOLOAD) for path in beside)):
        try:
            return ctypes.CDLL(name, mode=mode).GOMP_parallel
        except (AttributeError, OSError):
            continue
    return None


# ------------------------------------------------------------------------------------------------------------- loading


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel; None if it cannot be built or fails its self-test."""
    try:
        library = ctypes.CDLL(str(_compiled()))
        library.clipped_sum.restype = None
        _self_test(library)
    except Exception as error:  # of any kind, because torch computes the same sums
        _log.debug("The compiled kernel is not used: %s", error)
        return None
    return library


def _compiled() -> Path:
    """The path of the shared library. It is compiled if the cache does not hold it."""
    source, command = Path(__file__).with_name("kernel.c"), _compiler()
    native = ["-march=native"]
    if platform.machine() in ("aarch64", "arm64"):  # GCC would order instructions so that sums leave the registers
        native = ["-mcpu=native", "-fno-schedule-insns"]
    flags = ["-O3", "-std=gnu11", *native, "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
    parts = (source.read_bytes(), "\0".join([*command, *flags]).encode(), _output(*command, "--version"), _processor())
    name = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]
    folder = _folder()
    path = folder / f"kernel-{name}.so"
    if not path.exists():
        with files.replacing(path, durable=False) as temporary:
            _output(*command, *flags, "-o", str(temporary), str(source), "-lm")
    _refuse_foreign(path)
    return path


def _output(*command: str) -> bytes:
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout


def _compiler() -> list[str]:
    configured = os.environ.get("CC")
    for name in (configured,) if configured else ("cc", "gcc", "clang"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise RuntimeError(f"no C compiler was found ({f'CC={configured}' if configured else 'cc, gcc, clang'})")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "sordino"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(folder)
    return folder


def _refuse_foreign(path: Path) -> None:
    """Refuse to load code through a link or from a path that others can write to."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(f"{path} is a link, belongs to another user, or can be written to by others")


def _processor() -> bytes:
    """A description of the processor, for which `native` code is compiled."""
    keys = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    relevant = {line for line in lines if line.split(":")[0].strip() in keys}
    return "\n".join([platform.machine(), platform.processor(), *sorted(relevant)]).encode()


def _self_test(library: ctypes.CDLL) -> None:
    """Raise unless the library agrees with float64 sums over a few records, one of them not finite."""
    for kind in KINDS:
        outputs = 11 if kind == "softmax" else 1
        rows, features = 37, 21
        x = torch.arange(rows * features, dtype=torch.float64).mul(1.7).sin().reshape(rows, features)
        theta = torch.arange((features + 1) * outputs, dtype=torch.float64).mul(2.3).cos()
        x, theta = x.float().double(), theta.float().double()  # the same numbers for both
        y = torch.arange(rows) % max(2, outputs)
        mask = (torch.arange(rows) % 5 > 0).double()
        length = (x.square().sum(-1) + 1).sqrt()
        options = _Options(outputs, kind, True, 0.8, radius=3.1, residual=2.0)
        z = x @ theta[:-outputs].reshape(features, outputs) + theta[-outputs:]
        value = {"softmax": z.softmax(-1), "logistic": z.sigmoid(), "squares": z, "poisson": z.clamp(max=10).exp()}[
            kind
        ]
        r = value - (torch.nn.functional.one_hot(y, outputs) if kind == "softmax" else y.unsqueeze(-1))
        r = r * (2.0 / r.norm(dim=-1).clamp_min(2.0) * (3.1 / length.clamp_min(3.1)).square()).unsqueeze(-1)
        factor = mask * (0.8 / (r.norm(dim=-1) * length)).clamp(max=1)
        factor[7] = 0
        want = (torch.cat([x, torch.ones(rows, 1)], -1).T @ (r * factor.unsqueeze(-1))).flatten()
        x[7, 3] = math.nan
        computed = _run(library, theta.float(), x.float(), y, mask.float(), length.float(), options)
        if not bool((computed - want).norm() <= 1e-5 * want.norm()):
            raise RuntimeError(f"the kernel's self-test failed for {kind}")
