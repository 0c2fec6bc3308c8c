"""Products g^T a of single examples in half precision, of which only norms and weighted sums reach memory.

The gradient of a linear layer or a convolution for example j is G_j = sum over positions p of g_jp a_jp^T. Two calls
need it: `squares` for the norm that decides on the factor f_j, and `sums` for the sum of f_j G_j. Both compute G_j from
zero in float32 by the same instructions, so it is the same float32 matrix both times, a function of record j and theta
alone, whatever rounding the matrix unit has inside. `squares` bounds the norm of this very matrix from above. So the
terms f_j G_j keep the clip, and their sum is that of `arithmetic`: at most FLOAT32_TERMS terms in float32, and blocks
in float64. That both calls compute the same matrix is checked on the GPU that runs them, for each shape of a layer
before its first use (`same_twice`). No copy of G_j is kept: on a GPU it lives in registers, one tile at a time.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.errors import SordinoError
from sordino.models.arithmetic import FLOAT32_TERMS, blank, row_sums

HALVES = (torch.bfloat16, torch.float16)
TILE, DEPTH, WARPS, STAGES = 128, 64, 8, 3  # rows and columns of a tile, positions of one step
PROGRAMS = 528  # that fill a GPU: four per multiprocessor
SMALL_NUMBERS = 2**22  # numbers in the products of one chunk, where there is no kernel


class Factors(NamedTuple):
    """a and g of a layer, as the kernel reads them: positions of g are rows, and a is read at `row_step` and so on."""

    a: Tensor
    g: Tensor  # examples x positions x outputs
    inputs: int
    width: int  # positions per line
    row_step: int
    column_step: int
    a_line: int = 0
    channels: int = 0
    kernel_width: int = 1


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def by_kernel(t: Tensor) -> bool:
    """Whether products of this tensor are computed by the kernel."""
    return t.is_cuda and _installed()


def pays(t: Tensor) -> bool:
    """Whether computing products twice is faster than storing them."""
    return by_kernel(t)


def serves(module: nn.Module, g: Tensor) -> bool:
    """Whether the weight of this layer is served: a linear layer, or a plain 2-d convolution, in half precision."""
    if g.dtype not in HALVES:
        return False
    if type(module) is nn.Linear:
        return True
    return type(module) is nn.Conv2d and module.groups == 1 and set(module.dilation) == {1}


def prepare(module: Any, a: Tensor, g: Tensor, n: int) -> Factors:
    """The factors of a layer in the type of g and in the kernel's order.

    Args:
      module: the layer.
      a: its input.
      g: the loss's gradient with respect to its output.
      n: examples; windows or tokens in the first axis are positions.

    Returns:
      The factors. Of a convolution, a is padded, and its channels are last.
    """
    a = a.to(g.dtype)
    if isinstance(module, nn.Linear):
        a, g = (t.reshape(n, -1, t.shape[-1]).contiguous() for t in (a, g))
        return Factors(a, g, a.shape[-1], g.shape[1], 0, a.shape[-1])
    sides = module._reversed_padding_repeated_twice
    if any(sides):
        a = functional.pad(a, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
    a = a.permute(0, 2, 3, 1).contiguous()
    _, _, across, channels = a.shape
    line, stride, wide = across * channels, module.stride, g.shape[-1]
    inputs = channels * math.prod(module.kernel_size)
    g = g.permute(0, 2, 3, 1).reshape(len(g), -1, g.shape[1]).contiguous()
    return Factors(a, g, inputs, wide, stride[0] * line, stride[1] * channels, line, channels, module.kernel_size[1])


def squares(parts: Factors) -> Tensor:
    """Upper bounds on the squared norms of G_j, in float64.

    TILE = 128 squares are added in float32 (u = 2^-24), in any order, and these sums in float64. A sum is too small by
    at most (128 + 1) u of itself, and each square by the smallest normal number. (128 + 8) eps of the sum is added,
    which is twice that. The remainder exceeds what float64 loses.
    """
    if by_kernel(parts.a):
        _check(parts)
    return _squares(parts)


def _squares(parts: Factors) -> Tensor:
    a, g = parts[:2]
    n, _, outputs = g.shape
    if by_kernel(a):
        rows, columns = _tile(outputs), _tile(parts.inputs)
        tiles = -(-outputs // rows) * -(-parts.inputs // columns)
        found = torch.empty(n, tiles, dtype=torch.float64, device=a.device)
        terms = min(FLOAT32_TERMS // 4, max(1, n * tiles // PROGRAMS))
        _launch(parts, found, found, 1, terms, total=False)
        total = found.sum(1)
    else:
        chunk = max(1, SMALL_NUMBERS // (parts.inputs * outputs))
        total = torch.cat([_norms(_explicit(parts, k)) for k in _slices(n, chunk)])
    about = torch.finfo(torch.float32)
    return total * (1 + (TILE + 8) * about.eps) + outputs * parts.inputs * about.tiny


def sums(parts: Factors, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of f_j G_j over the examples of each group in float64: groups x (outputs times inputs).

    Args:
      parts: the factors of all groups, one after another.
      factor: groups x examples, in float32. Products with factor zero are left out, also those that are not finite.
      out: where to write the sums.

    Returns:
      The sums. Inputs of a convolution are in the order of `prepare`: kernel entries, then channels.
    """
    (groups, n), (a, g) = factor.shape, parts[:2]
    outputs = g.shape[-1]
    if by_kernel(a):
        tiles = -(-outputs // _tile(outputs)) * -(-parts.inputs // _tile(parts.inputs))
        terms = FLOAT32_TERMS
        while terms > 4 and groups * -(-n // terms) * tiles < PROGRAMS // 8:
            terms //= 2
        blocks = -(-n // terms)
        found = torch.empty(groups * blocks, outputs, parts.inputs, device=a.device)
        _launch(parts, factor.float().contiguous(), found, groups, terms, total=True)
        return torch.sum(found.view(groups, blocks, -1), 1, dtype=torch.float64, out=out)
    chunk = max(1, SMALL_NUMBERS // (groups * parts.inputs * outputs))
    chunk = chunk - chunk % FLOAT32_TERMS if chunk > FLOAT32_TERMS else chunk
    total = torch.zeros(groups, outputs * parts.inputs, dtype=torch.float64, device=a.device)
    for k in _slices(n, chunk):
        rows = torch.stack([_explicit(parts, slice(c * n + k.start, c * n + k.stop)) for c in range(groups)])
        rows = blank(rows.flatten(0, 1), (factor[:, k] != 0).flatten()).view(rows.shape)
        total += row_sums(factor[:, k].float(), rows)
    return total if out is None else out.copy_(total)


def same_twice(parts: Factors) -> bool:
    """Whether norms and sums of layers of this shape are those of the same float32 matrices.

    Two made-up examples whose terms cancel exactly: each position reads the same a, and the second half of g is the
    first in another order, with the opposite sign. The product is then rounding error alone, which depends on the order
    of additions. Norms agree only if both calls add in the same order.
    """
    generator = torch.Generator().manual_seed(0)
    _, positions, outputs = parts.g.shape
    read, half = torch.randn(2, *parts.a.shape[1:][-1:], generator=generator), positions // 2
    a = read.view(2, *[1] * (parts.a.dim() - 2), -1).expand(2, *parts.a.shape[1:])
    first = torch.randn(2, half, outputs, generator=generator) * 8 ** torch.randn(2, half, 1, generator=generator)
    rest = torch.zeros(2, positions - 2 * half, outputs)
    g = torch.cat([first, -first[:, torch.randperm(half, generator=generator)], rest], 1)
    made = parts._replace(a=a.contiguous().to(parts.g), g=g.to(parts.g))
    summed = torch.cat([sums(made, row.view(1, 2)) for row in torch.eye(2, device=parts.g.device)])
    norms, bounds = summed.square().sum(1), _squares(made)
    floor = 2 * outputs * parts.inputs * torch.finfo(torch.float32).tiny
    return bool(((norms <= bounds) & (bounds <= norms * (1 + 2 * (TILE + 8) * 2.0**-23) + floor)).all())


_checked: set[Hashable] = set()


def _check(parts: Factors) -> None:
    key = (parts.a.device, parts.g.dtype, parts.a.shape[1:], parts.g.shape[1:], *parts[2:])
    if key in _checked:
        return
    where = f"a layer of {parts.inputs} inputs, {parts.g.shape[-1]} outputs and {parts.g.shape[1]} positions"
    if parts.a.is_cuda and torch.cuda.is_current_stream_capturing():
        raise SordinoError(f"capture: {where} has not been checked; compute one sum before the CUDA graph is captured.")
    if not same_twice(parts):
        raise SordinoError(
            f"autocast: this GPU computes the gradient of {where} in another order for its norm than for the sum, so "
            "no clip is proved; use autocast=None."
        )
    _checked.add(key)


def weight_of(module: nn.Module, total: Tensor) -> Tensor:
    """The sums in the order of the layer's weight."""
    if isinstance(module, nn.Linear):
        return total
    weight = module.weight
    assert isinstance(weight, Tensor)
    outputs, channels, *kernel = weight.shape
    return total.view(len(total), outputs, *kernel, channels).movedim(-1, 2).flatten(1)


def _tile(size: int) -> int:
    return TILE if size > TILE // 2 else max(16, 1 << (size - 1).bit_length())


def _launch(parts: Factors, factor: Tensor, out: Tensor, groups: int, terms: int, *, total: bool) -> None:
    from sordino.models import outer_kernel

    n, positions, outputs = parts.g.shape
    rows, columns = _tile(outputs), _tile(parts.inputs)
    each = n // groups
    blocks = -(-each // terms)
    grid = (-(-outputs // rows) * -(-parts.inputs // columns), groups * blocks)
    if _describable(parts):
        a, g = (
            outer_kernel.TensorDescriptor.from_tensor(t, [1, DEPTH, k])
            for t, k in ((parts.a, columns), (parts.g, rows))
        )
        outer_kernel.described[grid](
            *(a, g, factor, out, each, blocks, terms, parts.inputs, outputs),
            SUM=total,
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=DEPTH,
            STEPS=-(-positions // DEPTH),
            num_warps=WARPS,
            num_stages=STAGES,
        )
        return
    outer_kernel.products[grid](
        *(parts.a, parts.g, factor, out, each, blocks, terms, positions, parts.inputs, outputs),
        *(parts.a.stride(0), parts.width, parts.row_step, parts.column_step, parts.a_line),
        CHANNELS=parts.channels,
        KERNEL_WIDTH=parts.kernel_width,
        SUM=total,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=DEPTH if positions > 16 else 16,
        num_warps=WARPS if rows * columns >= TILE * TILE // 2 else WARPS // 2,
        num_stages=STAGES,
    )


def _describable(parts: Factors) -> bool:
    """Whether the GPU's copy engine serves: a linear layer of whole tiles, on a GPU that has one."""
    _, positions, outputs = parts.g.shape
    whole = not parts.channels and positions >= 16 and outputs % TILE == 0 and parts.inputs % TILE == 0
    return whole and _copy_engine(parts.a.device)


@cache
def _copy_engine(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def _slices(n: int, step: int) -> list[slice]:
    return [slice(first, min(n, first + step)) for first in range(0, n, step)]


def _explicit(parts: Factors, k: slice) -> Tensor:
    """G_j of some examples in float32, one by one, so that no product depends on how many there are."""
    a, g = parts.a[k], parts.g[k].float()
    if parts.channels:
        lines = g.shape[1] // parts.width
        kernel = parts.inputs // (parts.channels * parts.kernel_width), parts.kernel_width, parts.channels
        sizes = (len(a), lines, parts.width, *kernel)
        steps = (a.stride(0), parts.row_step, parts.column_step, parts.a_line, parts.channels, 1)
        a = a.as_strided(sizes, steps, a.storage_offset()).reshape(len(a), g.shape[1], parts.inputs)
    a = a.float()
    return torch.stack([(left.mT @ right).flatten() for left, right in zip(g, a, strict=True)])


def _norms(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return found.square()
