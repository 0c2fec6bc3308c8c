"""The GPU kernel of `random.Secure`: normals from a ChaCha20 keystream, computed where they are added."""

# Triton reads this function as text: its arguments have no Python types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

ROUNDS = tl.constexpr(10)  # pairs of a column and a diagonal round
BLOCKS = tl.constexpr(128)  # of the keystream, one per thread
_KEY = [f"k{i}" for i in range(8)]


@triton.jit
def _rotated(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _store(out, low, high, place, count):
    """The normal of one word, as `random._to_normal` computes it: one bit is the sign, 63 bits are the tail."""
    word = (low.to(tl.uint64) | (high.to(tl.uint64) << 32) | 1).to(tl.int64, bitcast=True)
    signed = word.to(tl.float64) * 5.421010862427522e-20  # 2^-64
    z = libdevice.normcdfinv(tl.abs(signed))  # of a tail of at most 1/2, so it is at most 0
    tl.store(out + place, tl.where(signed < 0, z, -z), mask=place < count)


# A key is never part of what is compiled, and no value of it chooses what is.
@triton.jit(do_not_specialize=["count", *_KEY, "n0", "n1", "n2"])
def normals(out, count, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2):
    """`count` normals: eight from each block of the keystream (RFC 8439) of key k and nonce n, from block 0 on."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    zero = tl.zeros((BLOCKS,), tl.uint32)
    counter = block.to(tl.uint32)
    i0, i1, i2, i3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    i4, i5 = zero + k0.to(tl.uint32, bitcast=True), zero + k1.to(tl.uint32, bitcast=True)
    i6, i7 = zero + k2.to(tl.uint32, bitcast=True), zero + k3.to(tl.uint32, bitcast=True)
    i8, i9 = zero + k4.to(tl.uint32, bitcast=True), zero + k5.to(tl.uint32, bitcast=True)
    i10, i11 = zero + k6.to(tl.uint32, bitcast=True), zero + k7.to(tl.uint32, bitcast=True)
    i13, i14 = zero + n0.to(tl.uint32, bitcast=True), zero + n1.to(tl.uint32, bitcast=True)
    i15 = zero + n2.to(tl.uint32, bitcast=True)
    x0, x1, x2, x3, x4, x5, x6, x7 = i0, i1, i2, i3, i4, i5, i6, i7
    x8, x9, x10, x11, x12, x13, x14, x15 = i8, i9, i10, i11, counter, i13, i14, i15
    for _ in range(ROUNDS):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    place = block * 8
    _store(out, x0 + i0, x1 + i1, place, count)
    _store(out, x2 + i2, x3 + i3, place + 1, count)
    _store(out, x4 + i4, x5 + i5, place + 2, count)
    _store(out, x6 + i6, x7 + i7, place + 3, count)
    _store(out, x8 + i8, x9 + i9, place + 4, count)
    _store(out, x10 + i10, x11 + i11, place + 5, count)
    _store(out, x12 + counter, x13 + i13, place + 6, count)
    _store(out, x14 + i14, x15 + i15, place + 7, count)
