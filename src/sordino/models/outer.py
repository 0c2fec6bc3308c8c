"""Products g^T a of single examples in half precision, of which only norms and weighted sums reach memory.

The gradient of a linear layer or a convolution for example j is G_j = sum over positions p of g_jp a_jp^T. Two calls
need it: `squares` for the norm that decides on the factor f_j, and `sums` for the sum of f_j G_j. Both compute G_j from
zero in float32, over positions in the same order, so it is the same float32 matrix both times, a function of record j
and theta alone, whatever rounding the matrix unit has inside. `squares` bounds the norm of this very matrix from above.
So the terms f_j G_j keep the clip, and their sum is that of `arithmetic`: at most FLOAT32_TERMS terms in float32, and
blocks in float64. That both calls compute the same matrix is checked on the GPU that runs them, for each shape of a
layer before its first use (`same_twice`). No copy of G_j is kept: on a GPU it lives in registers, one tile at a time.
"""

from __future__ import annotations

import importlib.util
import itertools
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
MAX_COLUMNS = 256  # of a tile
WHOLE = 64  # the copy engine serves layers whose inputs and outputs are multiples of this
ALIGNMENT = 16  # bytes: tensors that begin there are read by other machine code than those that do not
TURN_COST, BLOCK_COST = 1, 2  # of one more program, and of one more float32 total, in examples of a tile
LARGE_ENTRIES = 2**20  # of a linear layer whose sums take larger tiles
ROW_COLUMNS = 512  # of stored gradients, which one program adds up
MASKED_DEPTH, MASKED_WARPS = 32, 4  # of products with dropout
FOLD_BLOCK = 1024  # numbers that one program adds up
SMALL_NUMBERS = 2**22  # numbers in the products of one chunk, where there is no kernel


class Factors(NamedTuple):
    """a and g of a layer, as the kernel reads them: positions of g are rows, and a is read at `row_step` and so on.

    With a `stride` other than zero, a and g have the layout of `_boxes`.
    """

    a: Tensor
    g: Tensor  # examples x positions x outputs
    inputs: int
    width: int  # positions per line
    row_step: int
    column_step: int
    a_line: int = 0
    channels: int = 0
    kernel_width: int = 1
    stride: int = 0
    top: int = 0  # lines and columns before the first that the kernel reads
    left: int = 0


class Tile(NamedTuple):
    """How a kernel divides a product."""

    rows: int
    columns: int
    depth: int  # positions of one step
    warps: int
    stages: int


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
    if not any(sides) and module.kernel_size == module.stride:  # patches side by side: a linear layer reads them
        (down, across), (high, wide) = module.kernel_size, g.shape[2:]
        a = a[:, :, : high * down, : wide * across].reshape(n, -1, high, down, wide, across)
        a, g = a.permute(0, 2, 4, 1, 3, 5).reshape(n, high * wide, -1).contiguous(), g.flatten(2).mT.contiguous()
        return Factors(a, g, a.shape[-1], g.shape[1], 0, a.shape[-1])
    if boxed(module, a, g):
        return _boxes(module, a, g)
    if any(sides):
        a = functional.pad(a, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
    a = a.permute(0, 2, 3, 1).contiguous()
    _, _, across, channels = a.shape
    line, stride, wide = across * channels, module.stride, g.shape[-1]
    inputs = channels * math.prod(module.kernel_size)
    g = g.permute(0, 2, 3, 1).reshape(len(g), -1, g.shape[1]).contiguous()
    return Factors(a, g, inputs, wide, stride[0] * line, stride[1] * channels, line, channels, module.kernel_size[1])


def boxed(module: Any, a: Tensor, g: Tensor) -> bool:
    """Whether the copy engine serves a convolution: its output is as large as its input, or half of it."""
    if not (by_kernel(a) and _copy_engine(a.device)):
        return False
    return _fits(module, a, g)


def _fits(module: Any, a: Tensor, g: Tensor) -> bool:
    (_, channels, *sides), (_, outputs, *found) = a.shape, g.shape
    step, padded = module.stride[0], any(module._reversed_padding_repeated_twice)
    return (
        not (channels % WHOLE or outputs % WHOLE)
        and step in (1, 2)
        and set(module.stride) == {step}
        and not (padded and module.padding_mode != "zeros")
        and not any(side % step for side in sides)
        and [side // step for side in sides] == found
    )


def _boxes(module: Any, a: Tensor, g: Tensor) -> Factors:
    """Factors of a convolution in which an entry of the kernel reads a at a fixed distance from the position of g.

    Positions are lines of g, each followed by `wide` columns of zeros, in g as in a. A shift by at most so many columns
    then meets zeros where it leaves the line, and one by lines leaves the image, where the copy engine writes zeros. If
    the stride is s, a is divided into s x s planes of every s-th line and column, and an entry reads one of them.
    """
    left, _, top, _ = module._reversed_padding_repeated_twice
    (high, across), step = module.kernel_size, module.stride[0]
    if high == across == 1:
        a, step = a[:, :, ::step, ::step], 1
    n, channels, lines, columns = a.shape
    wide = max(-(-left // step), (across - 1 - left) // step)
    a = a.permute(0, 2, 3, 1).reshape(n, lines // step, step, columns // step, step, channels)
    a = functional.pad(a.permute(0, 2, 4, 1, 3, 5), (0, 0, 0, wide)).contiguous()
    g = functional.pad(g.permute(0, 2, 3, 1), (0, 0, 0, wide)).contiguous()
    a, g = a.view(n, step * step, -1, channels), g.view(n, -1, g.shape[-1])
    line = columns // step + wide
    return Factors(a, g, channels * high * across, line, 0, 0, 0, channels, across, step, top, left)


def squares(parts: Factors) -> Tensor:
    """Upper bounds on the squared norms of G_j, in float64.

    At most MAX_COLUMNS = 256 squares are added in float32 (u = 2^-24), in any order, and these sums in float64. A sum
    is too small by at most (256 + 1) u of itself, and each square by the smallest normal number. (256 + 8) eps of the
    sum is added, which is twice that. The remainder exceeds what float64 loses.
    """
    if by_kernel(parts.a):
        _check(parts)
    return _above(_partial_squares(parts).sum(1), parts.g.shape[-1] * parts.inputs)


def _above(total: Tensor, entries: int) -> Tensor:
    about = torch.finfo(torch.float32)
    return total * (1 + (MAX_COLUMNS + 8) * about.eps) + entries * about.tiny


def _partial_squares(parts: Factors) -> Tensor:
    """Sums of squares of the tiles of G_j: examples x tiles."""
    n, _, outputs = parts.g.shape
    tile = _tile(parts, total=False)
    if not by_kernel(parts.a):
        chunk = max(1, SMALL_NUMBERS // (parts.inputs * outputs))
        return torch.cat([_norms(_explicit(parts, k), tile) for k in _slices(n, chunk)])
    found = torch.empty(n, _tiles(parts, tile), dtype=torch.float64, device=parts.a.device)
    terms = _terms(n, found.shape[1], _processors(parts.a.device), 0)
    _launch(parts, found, found, 1, terms, tile, total=False)
    return found


def sums(parts: Factors, factor: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """The sum of f_j G_j over the examples of each group in float64: groups x entries of the layer's weight.

    Args:
      parts: the factors of all groups, one after another.
      factor: groups x examples, in float32. Products with factor zero are left out, also those that are not finite.
      out: where to write the sums; its rows are contiguous.
      add: add to what is there instead.

    Returns:
      The sums, or `out`.
    """
    (groups, n), size = factor.shape, parts.inputs * parts.g.shape[-1]
    if out is None:
        out, add = torch.empty(groups, size, dtype=torch.float64, device=parts.a.device), False
    if by_kernel(parts.a):
        tile = _tile(parts, total=True)
        terms = _terms(n, groups * _tiles(parts, tile), _processors(parts.a.device), BLOCK_COST)
        found = torch.empty(groups * -(-n // terms), size, dtype=torch.float32, device=parts.a.device)
        _launch(parts, _aligned(factor.float().contiguous()), found, groups, terms, tile, total=True)
        _fold(parts, found, out, add)
        return out
    chunk = max(1, SMALL_NUMBERS // (groups * size))
    chunk = chunk - chunk % FLOAT32_TERMS if chunk > FLOAT32_TERMS else chunk
    total = torch.zeros(groups, size, dtype=torch.float64, device=parts.a.device)
    for k in _slices(n, chunk):
        rows = torch.stack([_explicit(parts, slice(c * n + k.start, c * n + k.stop)) for c in range(groups)])
        rows = blank(rows.flatten(0, 1), (factor[:, k] != 0).flatten()).view(rows.shape)
        total += row_sums(factor[:, k].float(), rows)
    total = _as_weight(parts, total)
    return out.add_(total) if add else out.copy_(total)


def weighted_rows(factor: Tensor, rows: Tensor) -> Tensor:
    """`arithmetic.row_sums` by one kernel, which reads rows in their own type, and none with factor zero.

    Args:
      factor: groups x n.
      rows: groups x n x width, on a GPU. Rows with factor zero need not be finite.

    Returns:
      groups x width in float64.
    """
    from sordino.models import outer_kernel

    groups, n, width = rows.shape
    out = torch.empty(groups, width, dtype=torch.float64, device=rows.device)
    factor, rows = factor.float().contiguous(), rows.contiguous()
    grid = (-(-width // ROW_COLUMNS), groups)
    outer_kernel.weighted[grid](rows, factor, out, n, width, TERMS=FLOAT32_TERMS, COLUMNS=ROW_COLUMNS)
    return out


def dropped_products(
    up: Tensor, x: Tensor, seed: Tensor, number: int, threshold: int, scale: float, out: Tensor
) -> Tensor:
    """up^T dropout(x) of single examples by one kernel, which never stores dropout(x): see `lora.dropped_out`.

    Args:
      up: examples x positions x rank, in half precision on a GPU, with at most TILE columns.
      x: examples x positions x inputs, of the same type.
      seed: two random numbers of type int32.
      number: of the layer, mixed into the mask.
      threshold: the smallest random number that keeps an entry.
      scale: what kept entries are multiplied by.
      out: examples x rank x inputs. Its last two axes are contiguous.

    Returns:
      out.
    """
    from sordino.models import outer_kernel

    n, positions, rank = up.shape
    inputs = x.shape[-1]
    columns = min(TILE, max(16, 1 << (inputs - 1).bit_length()))
    outer_kernel.dropped_products[(n, -(-inputs // columns))](
        *(x, up, seed, out, positions, number, threshold, scale, out.stride(0)),
        INPUTS=inputs,
        RANK=rank,
        ROWS=max(16, 1 << (rank - 1).bit_length()),
        COLUMNS=columns,
        DEPTH=MASKED_DEPTH,
        num_warps=MASKED_WARPS,
        num_stages=STAGES,
    )
    return out


def _terms(n: int, tiles: int, processors: int, block_cost: float) -> int:
    """How many examples one program takes: few blocks, and few idle multiprocessors in the last turn."""

    def cost(terms: int) -> float:
        blocks = -(-n // terms)
        return -(-tiles * blocks // processors) * (terms + TURN_COST) + block_cost * blocks * tiles / processors

    return min(range(1, FLOAT32_TERMS + 1), key=cost)


def _as_weight(parts: Factors, total: Tensor) -> Tensor:
    """Sums in the order of the layer's weight: channels before entries of the kernel."""
    if not parts.channels:
        return total
    return total.view(len(total), parts.g.shape[-1], -1, parts.channels).mT.flatten(1)


def same_twice(parts: Factors) -> bool:
    """Whether norms and sums of layers of this shape are those of the same float32 matrices.

    Two made-up examples whose terms cancel exactly: each position reads the same a, and the second half of g is the
    first in another order, with the opposite sign. Magnitudes differ by up to 2^20, so that additions round. The
    product is then rounding error alone, which depends on the order of additions. The norms of its tiles agree only if
    both calls add in the same order.
    """
    generator = torch.Generator().manual_seed(0)
    (_, positions, outputs), device = parts.g.shape, parts.g.device
    read, half = torch.randn(2, *parts.a.shape[1:][-1:], generator=generator), positions // 2
    a = read.view(2, *[1] * (parts.a.dim() - 2), -1).expand(2, *parts.a.shape[1:])
    magnitudes = 2 ** (20 * torch.rand(2, half, 1, generator=generator) - 10)
    first = torch.randn(2, half, outputs, generator=generator) * magnitudes
    rest = torch.zeros(2, positions - 2 * half, outputs)
    g = torch.cat([first, -first[:, torch.randperm(half, generator=generator)], rest], 1)
    made = parts._replace(a=a.contiguous().to(parts.g), g=g.to(parts.g))
    summed = torch.cat([sums(made, row.view(1, 2)) for row in torch.eye(2, device=device)])
    rows, columns = _tile(parts, total=False)[:2]
    if parts.channels:
        summed = summed.view(2, outputs, parts.channels, -1).mT
    summed = summed.reshape(2, outputs, parts.inputs)
    summed = functional.pad(summed, (0, -parts.inputs % columns, 0, -outputs % rows))
    norms = summed.view(2, -(-outputs // rows), rows, -1, columns).square().sum((2, 4)).flatten(1)
    least, most = _partial_squares(made), 2 * (MAX_COLUMNS + 8) * 2.0**-23
    floor = rows * columns * torch.finfo(torch.float32).tiny
    return bool(((norms <= _above(least, rows * columns)) & (least <= norms * (1 + most) + floor)).all())


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


# ------------------------------------------------------------------------------------------------------------ kernels


def _tile(parts: Factors, *, total: bool) -> Tile:
    """The tile of a layer's kernel, for its norms or its sums. It depends on the layer's shape alone.

    The choices are the fastest of those tried on an H200. Sums need twice the registers of norms.
    """
    _, positions, outputs = parts.g.shape
    if not by_kernel(parts.a):
        return Tile(outputs, parts.channels or parts.inputs, 0, 0, 0)
    if not _described(parts):
        rows, columns = _power(outputs), _power(parts.inputs)
        warps = WARPS if rows * columns >= TILE * TILE // 2 else WARPS // 2
        return Tile(rows, columns, DEPTH if positions > 16 else 16, warps, STAGES)
    if outputs % TILE:
        return Tile(WHOLE, WHOLE, DEPTH, WARPS // 2, STAGES)
    if parts.channels:
        return Tile(TILE, WHOLE, DEPTH // 2, WARPS // 2, 4)
    if total and parts.inputs % MAX_COLUMNS == 0 and parts.inputs * outputs >= LARGE_ENTRIES:
        return Tile(TILE, MAX_COLUMNS, DEPTH // 2, WARPS, 6)
    if total or parts.inputs % TILE:
        return Tile(TILE, WHOLE, DEPTH // 2, WARPS // 2, 6)
    return Tile(TILE, TILE, DEPTH // 2, WARPS // 2, 4)


def _power(size: int) -> int:
    return TILE if size > TILE // 2 else max(16, 1 << (size - 1).bit_length())


def _tiles(parts: Factors, tile: Tile) -> int:
    return -(-parts.g.shape[-1] // tile.rows) * -(-parts.inputs // tile.columns)


def _launch(parts: Factors, factor: Tensor, out: Tensor, groups: int, terms: int, tile: Tile, *, total: bool) -> None:
    from sordino.models import outer_kernel

    n, positions, outputs = parts.g.shape
    each = n // groups
    blocks = -(-each // terms)
    grid = (_tiles(parts, tile), groups * blocks)
    sizes = {"SUM": total, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    left, right = _aligned(parts.a), _aligned(parts.g)
    if _described(parts):
        left = left.flatten(0, 1) if parts.stride else left
        a, g = (
            outer_kernel.TensorDescriptor.from_tensor(t, [1, tile.depth, k])
            for t, k in ((left, tile.columns), (right, tile.rows))
        )
        outer_kernel.described[grid](
            *(a, g, factor, out, each, blocks, terms, parts.inputs, outputs, parts.width),
            CHANNELS=parts.channels,
            KERNEL_WIDTH=parts.kernel_width,
            STRIDE=max(1, parts.stride),
            TOP=parts.top,
            LEFT=parts.left,
            STEPS=-(-positions // tile.depth),
            **sizes,
            **options,
        )
        return
    outer_kernel.products[grid](
        *(left, right, factor, out, each, blocks, terms, positions, parts.inputs, outputs),
        *(left.stride(0), parts.width, parts.row_step, parts.column_step, parts.a_line),
        CHANNELS=parts.channels,
        KERNEL_WIDTH=parts.kernel_width,
        **sizes,
        **options,
    )


def _fold(parts: Factors, found: Tensor, out: Tensor, add: bool) -> None:
    """Add the blocks of each group in float64 and write them to `out` in the order of the layer's weight."""
    from sordino.models import outer_kernel

    size, groups = found.shape[1], len(out)
    channels, entries = parts.channels, parts.inputs // (parts.channels or parts.inputs)
    if entries == 1:  # the order is the same
        channels = size
    lines = 1 << (entries - 1).bit_length()
    columns = min(1 << (channels - 1).bit_length(), max(1, FOLD_BLOCK // lines))
    outer_kernel.fold[(size // (channels * entries) * -(-channels // columns), groups)](
        *(found, out, len(found) // groups, size, out.stride(0)),
        CHANNELS=channels,
        ENTRIES=entries,
        ADD=add,
        LINES=lines,
        COLUMNS=columns,
    )


def _aligned(t: Tensor) -> Tensor:
    return t.clone() if t.data_ptr() % ALIGNMENT else t


def _described(parts: Factors) -> bool:
    """Whether the GPU's copy engine serves: a layer of whole tiles, on a GPU that has one."""
    if parts.stride:
        return True
    _, positions, outputs = parts.g.shape
    whole = not parts.channels and positions >= 16 and outputs % WHOLE == 0 and parts.inputs % WHOLE == 0
    return whole and _copy_engine(parts.a.device)


@cache
def _copy_engine(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _slices(n: int, step: int) -> list[slice]:
    return [slice(first, min(n, first + step)) for first in range(0, n, step)]


def _explicit(parts: Factors, k: slice) -> Tensor:
    """G_j of some examples in float32, one by one, so that no product depends on how many there are."""
    a, g = parts.a[k], parts.g[k].float()
    if parts.stride:
        a = _shifted(parts, a)
    elif parts.channels:
        lines = g.shape[1] // parts.width
        kernel = parts.inputs // (parts.channels * parts.kernel_width), parts.kernel_width, parts.channels
        sizes = (len(a), lines, parts.width, *kernel)
        steps = (a.stride(0), parts.row_step, parts.column_step, parts.a_line, parts.channels, 1)
        a = a.as_strided(sizes, steps, a.storage_offset()).reshape(len(a), g.shape[1], parts.inputs)
    a = a.float()
    return torch.stack([(left.mT @ right).flatten() for left, right in zip(g, a, strict=True)])


def _shifted(parts: Factors, a: Tensor) -> Tensor:
    """What each entry of the kernel reads of `_boxes`: examples x positions x inputs."""
    read, step = list[Tensor](), parts.stride
    high = parts.inputs // (parts.channels * parts.kernel_width)
    for down, right in itertools.product(range(-parts.top, high - parts.top), range(parts.kernel_width)):
        lines, columns = down // step, (right - parts.left) // step
        shift, plane = lines * parts.width + columns, (down % step) * step + (right - parts.left) % step
        moved = functional.pad(a[:, plane], (0, 0, max(0, -shift), max(0, shift)))
        read.append(moved[:, max(0, shift) :][:, : a.shape[2]])
    return torch.cat(read, 2)


def _norms(products: Tensor, tile: Tile) -> Tensor:
    each = products.view(len(products), tile.rows, -1, tile.columns).transpose(1, 2).flatten(2)
    found: Tensor = torch.linalg.vector_norm(each, dim=2, dtype=torch.float64)
    return found.square()
