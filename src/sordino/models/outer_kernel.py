"""The GPU kernel of `outer`: products g^T a of single examples on matrix units, reduced before they reach memory."""

# Triton reads these functions as text: their arguments have no Python types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor

# Not specialised by value: the check of a shape must meet the same machine code as its sums.
COUNTS = ["group_size", "blocks", "terms"]


@triton.jit(do_not_specialize=COUNTS)
def products(
    a,
    g,
    factor,
    out,
    group_size,
    blocks,
    terms,
    positions,
    inputs,
    outputs,
    a_example,
    width,
    row_step,
    column_step,
    a_line,
    CHANNELS: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile (ROWS outputs x COLUMNS inputs) of the products of up to `terms` examples of one group.

    For each example the product over its positions is accumulated from zero in float32, in the same order for SUM and
    for norms. Then SUM adds factor times product to the tile's float32 total; otherwise the squares of the product are
    added: those of a row in float32, rows in float64.

    Position p reads a at (p // width) row_step + (p % width) column_step, and input i at CHANNELS numbers per entry of
    a kernel that is KERNEL_WIDTH wide, with a_line numbers between its lines. CHANNELS = 0: input i is i numbers away.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(inputs, COLUMNS)
    o = (tile // across) * ROWS + tl.arange(0, ROWS)
    i = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    if CHANNELS > 0:
        entry = i // CHANNELS
        shift = (entry // KERNEL_WIDTH) * a_line + (entry % KERNEL_WIDTH) * CHANNELS + i % CHANNELS
    else:
        shift = i
    group = block // blocks
    first = (block % blocks) * terms
    steps = tl.cdiv(positions, DEPTH)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for t in range(terms * steps):
        k = t % steps
        within = first + t // steps
        example = (group * group_size + within).to(tl.int64)
        p = k * DEPTH + tl.arange(0, DEPTH)
        live = (p < positions) & (within < group_size)
        left = tl.load(
            g + example * positions * outputs + p[:, None] * outputs + o[None, :],
            mask=live[:, None] & (o < outputs)[None, :],
            other=0.0,
        )
        place = (p // width) * row_step + (p % width) * column_step
        right = tl.load(
            a + example * a_example + place[:, None] + shift[None, :],
            mask=live[:, None] & (i < inputs)[None, :],
            other=0.0,
        )
        acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")
        if k == steps - 1:
            if SUM:
                weight = tl.load(factor + example, mask=within < group_size, other=0.0)
                total = tl.where(weight != 0.0, total + acc * weight, total)  # by selection: 0 * NaN is NaN
            else:
                rows = tl.sum(acc * acc, 1).to(tl.float64)
                tl.store(out + example * tl.num_programs(0) + tile, tl.sum(rows, 0), mask=within < group_size)
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SUM:
        there = out + block.to(tl.int64) * outputs * inputs + o.to(tl.int64)[:, None] * inputs + i[None, :]
        tl.store(there, total, mask=(o < outputs)[:, None] & (i < inputs)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def described(
    a,
    g,
    factor,
    out,
    group_size,
    blocks,
    terms,
    inputs,
    outputs,
    line,
    CHANNELS: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """`products` in whole tiles. a and g are descriptors of examples x positions x entries, which the GPU's copy engine
    reads; it fills positions before the first and beyond the last with zeros.

    CHANNELS = 0: a linear layer. Otherwise a convolution as `outer.boxes` lays it out: an entry of the kernel reads a
    plane of a (STRIDE * STRIDE of them per example) at positions shifted by whole lines and columns.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    across = inputs // COLUMNS
    row, column = (tile // across) * ROWS, (tile % across) * COLUMNS
    plane, shift = 0, 0
    if CHANNELS > 0:
        down = (column // CHANNELS) // KERNEL_WIDTH + (STRIDE - 1) * TOP  # of the entry, plus STRIDE * TOP lines
        over = (column // CHANNELS) % KERNEL_WIDTH + (STRIDE - 1) * LEFT
        plane = (down % STRIDE) * STRIDE + over % STRIDE
        shift = (down // STRIDE - TOP) * line + over // STRIDE - LEFT
        column = column % CHANNELS
    group = block // blocks
    first = (block % blocks) * terms
    last = tl.minimum(first + terms, group_size)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for within in tl.range(first, last, flatten=True):
        example = group * group_size + within
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.range(0, STEPS):
            left = g.load([example, k * DEPTH, row]).reshape(DEPTH, ROWS)
            right = a.load([example * (STRIDE * STRIDE) + plane, k * DEPTH + shift, column]).reshape(DEPTH, COLUMNS)
            acc = tl.dot(left.T, right, acc)
        if SUM:
            weight = tl.load(factor + example)
            total = tl.where(weight != 0.0, total + acc * weight, total)  # by selection: 0 * NaN is NaN
        else:
            rows = tl.sum(acc * acc, 1).to(tl.float64)
            tl.store(out + example.to(tl.int64) * tl.num_programs(0) + tile, tl.sum(rows, 0))
    if SUM:
        o = row + tl.arange(0, ROWS)
        i = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        there = out + block.to(tl.int64) * outputs * inputs + o.to(tl.int64)[:, None] * inputs + i[None, :]
        tl.store(there, total)


@triton.jit(do_not_specialize=["blocks"])
def fold(
    found,
    out,
    blocks,
    size,
    out_step,
    CHANNELS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ADD: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the float32 totals of a group's blocks in float64, in the order of the layer's weight.

    The totals have the ENTRIES of a kernel before its CHANNELS; a weight has the channels first. ADD: onto `out`.
    """
    group = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(CHANNELS, COLUMNS)
    output = (tl.program_id(0) // across) * ENTRIES * CHANNELS
    entry = tl.arange(0, LINES)[:, None]
    channel = ((tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (entry < ENTRIES) & (channel < CHANNELS)
    total = tl.zeros((LINES, COLUMNS), tl.float64)
    there = found + group * blocks * size + output + entry * CHANNELS + channel
    for block in range(blocks):
        total += tl.load(there + block.to(tl.int64) * size, mask=inside, other=0.0).to(tl.float64)
    place = out + group * out_step + output + channel * ENTRIES + entry
    if ADD:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


@triton.jit(do_not_specialize=["n"])
def weighted(rows, factor, out, n, width, TERMS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add factor times row over the n rows of a group: TERMS of them in float32, and these sums in float64.

    Rows with factor zero are not read, so they may hold anything.
    """
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for first in range(0, n, TERMS):
        block = tl.zeros((COLUMNS,), tl.float32)
        for k in tl.static_range(TERMS):
            row = group * n + first + k
            weight = tl.load(factor + row, mask=first + k < n, other=0.0)
            there = (column < width) & (weight != 0.0)
            block += weight * tl.load(rows + row * width + column, mask=there, other=0.0).to(tl.float32)
        total += block.to(tl.float64)
    tl.store(out + group * width + column, total, mask=column < width)


@triton.jit(do_not_specialize=["positions", "number"])
def dropped_products(
    x,
    up,
    seed,
    out,
    positions,
    number,
    threshold,
    scale,
    out_example,
    INPUTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """up^T dropout(x) of one example, COLUMNS of its inputs. The mask is that of `lora.dropped_out`."""
    example = tl.program_id(0)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    first, second = tl.load(seed), tl.load(seed + 1) ^ number
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(tl.cdiv(positions, DEPTH)):
        p = k * DEPTH + tl.arange(0, DEPTH)
        row, live = example * positions + p, p < positions
        left = tl.load(up + row[:, None] * RANK + r[None, :], mask=live[:, None] & (r < RANK)[None, :], other=0.0)
        place = row[:, None] * INPUTS + i[None, :]
        right = tl.load(x + place, mask=live[:, None] & (i < INPUTS)[None, :], other=0.0)
        h = (place ^ first) * 0x2C1B3C6D
        h = (h ^ ((h >> 12) & 0xFFFFF)) + second
        h = (h ^ ((h >> 15) & 0x1FFFF)) * 0x297A2D39
        kept = tl.where(h >= threshold, right.to(tl.float32) * scale, 0.0).to(right.dtype)
        acc = tl.dot(tl.trans(left), kept, acc, input_precision="ieee")
    there = out + example.to(tl.int64) * out_example + r[:, None] * INPUTS + i[None, :]
    tl.store(there, acc.to(out.dtype.element_ty), mask=(r < RANK)[:, None] & (i < INPUTS)[None, :])
