"""Quantises tokens to 8 bits on a GPU: as a function for kernels that hold a token's row in
registers, and as a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.quantized_matmul.e4m3.tokens import (
    SUMS,
    Order,
    QuantizedTokens,
    TokenFormat,
)
from jaxserve_kernels.quantized_matmul.triton_planes import of_planes
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Kind

_BYTES = tl.constexpr(Order.BYTES.value)
_WORDS = tl.constexpr(Order.WORDS.value)
_PLANES = tl.constexpr(Order.PLANES.value)
_EIGHTHS = tl.constexpr(Order.EIGHTHS.value)
_MXFP4 = tl.constexpr(Kind.MXFP4.value)
_SUMS = tl.constexpr(SUMS)

_PIECE = 2048
"""The most inputs of a token that a program quantises in groups."""

_SHORT, _MANY, _SHORT_EACH = 1024, 4096, 4
"""Tokens of so few inputs, if there are so many, have programs of so many: the hidden activations
of small experts."""


@triton.jit
def store_quantized(
    x, token, padded, codes_ptr, scale_ptr, sum_ptr,
    k: tl.constexpr, GROUP: tl.constexpr, ORDER: tl.constexpr, BESIDE: tl.constexpr = False,
):  # fmt: skip
    """Quantises and stores a token: see `TokenFormat`. x: its k inputs in float32, padded with
    zeros to a power of two."""
    block: tl.constexpr = x.shape[0]
    place = tl.arange(0, block)
    mask = place < k
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    largest: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    scale = tl.max(tl.abs(x), axis=0) / largest
    values = x * (1.0 / tl.where(scale > 0.0, scale, 1.0))
    if dtype == tl.int8:
        values = (values + 12582912.0) - 12582912.0  # to the nearest
    codes = values.to(dtype)
    tl.store(scale_ptr + token, scale)
    codes_ptr += token.to(tl.int64) * (k + 2 * _SUMS if BESIDE else k)
    if GROUP:
        sums = tl.sum(tl.reshape(codes.to(tl.float32), (block // GROUP, GROUP)), axis=1)
        group = tl.arange(0, block // GROUP)
        if BESIDE:
            beside = (codes_ptr + k).to(tl.pointer_type(tl.bfloat16))
            number = tl.arange(0, _SUMS)
            none = tl.zeros_like(number).to(tl.bfloat16)
            tl.store(beside + number, none, mask=number >= block // GROUP)
            tl.store(beside + group, sums.to(tl.bfloat16))
        else:
            tl.store(sum_ptr + group * padded + token, sums, mask=group < k // GROUP)
    if ORDER == _BYTES:
        _store_pairs(codes, codes_ptr, k)
    else:
        place += _place(place % 128, ORDER) - place % 128
        tl.store(codes_ptr + place, codes, mask=mask)


@triton.jit
def store_scaled_groups(
    x, token, tokens, piece, codes_ptr, scale_ptr, sum_ptr,
    k: tl.constexpr, taken: tl.constexpr, SCALE_GROUP: tl.constexpr, ORDER: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Quantises a token, or the `piece`-th of its pieces of `taken` inputs, to int8 with a scale
    for each SCALE_GROUP inputs, and stores it. x: its inputs in float32, padded with zeros to a
    power of two. The last piece may have fewer. SUMS: also stores the sums of each group's codes.
    """
    block: tl.constexpr = x.shape[0]
    groups: tl.constexpr = block // SCALE_GROUP
    grouped = tl.reshape(x, (groups, SCALE_GROUP))
    scale = tl.max(tl.abs(grouped), axis=1) / 127.0
    values = grouped * (1.0 / tl.where(scale > 0.0, scale, 1.0))[:, None]
    values = (values + 12582912.0) - 12582912.0  # to the nearest
    group = tl.arange(0, groups)
    own = taken
    if k % taken:
        own = tl.minimum(k - piece * taken, taken)
    there = group < own // SCALE_GROUP
    at = (piece * (taken // SCALE_GROUP) + group) * tokens + token
    tl.store(scale_ptr + at, scale, mask=there)
    if SUMS:
        tl.store(sum_ptr + at, tl.sum(values, axis=1), mask=there)
    codes_ptr += token.to(tl.int64) * k + piece * taken
    codes = tl.reshape(values.to(tl.int8), (block,))
    if ORDER == _EIGHTHS:
        _store_eighths(codes, codes_ptr, own)
    else:
        _store_pairs(codes, codes_ptr, own)


@triton.jit
def _store_eighths(codes, codes_ptr, k):
    """Stores each 128 codes as eight times the 16 inputs that are eight inputs apart."""
    blocks: tl.constexpr = codes.shape[0] // 128
    codes = tl.permute(tl.reshape(codes, (blocks, 16, 8)), (0, 2, 1))
    place = tl.arange(0, blocks * 128)
    tl.store(codes_ptr + place, tl.reshape(codes, (blocks * 128,)), mask=place < k)


@triton.jit
def _store_pairs(codes, codes_ptr, k):
    """Stores codes as pairs: an input beside the one that is 64 inputs later."""
    blocks: tl.constexpr = codes.shape[0] // 128
    halves = tl.reshape(codes.to(tl.uint8, bitcast=True), (blocks, 2, 64))
    low, high = tl.split(tl.permute(halves, (0, 2, 1)))
    pairs = low.to(tl.uint16) | high.to(tl.uint16) << 8
    place = tl.arange(0, blocks)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(codes_ptr.to(tl.pointer_type(tl.uint16)) + place, pairs, mask=place < k // 2)


@triton.jit
def _place(index, ORDER: tl.constexpr):
    """The place of an input within its 128 inputs."""
    if ORDER == _WORDS:
        word, nibble = index % 16, index // 16 % 4
        index = _in_registers(word % 4, nibble) + 64 * (index // 64) + 4 * (word // 4)
    elif ORDER == _PLANES:
        index = of_planes(index, _MXFP4)
    elif ORDER == _EIGHTHS:
        index = index % 8 * 16 + index // 8
    return index


@triton.jit
def _in_registers(word, nibble):
    """Maps a nibble of a word to its byte in a register. Four words make four registers: the even
    nibbles of two words, their odd ones, then those of the other two. Registers are 16 inputs
    apart."""
    return 16 * (word // 2 * 2 + nibble % 2) + word % 2 * 2 + nibble // 2


@triton.jit
def _quantize(
    x_ptr, padded, codes_ptr, scale_ptr, sum_ptr,
    columns: tl.constexpr, k: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    ORDER: tl.constexpr, BESIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """All of a program's tokens, of `columns` inputs, are requested before the first is
    quantised."""
    first = tl.program_id(0) * TOKENS
    place = tl.arange(0, BLOCK)
    rows = ()
    for index in tl.static_range(TOKENS):
        at = (first + index).to(tl.int64) * columns + place
        rows = rows + (tl.load(x_ptr + at, mask=place < columns, other=0.0),)  # noqa: RUF005
    for index in tl.static_range(TOKENS):
        x = rows[index].to(tl.float32)
        store_quantized(
            x, first + index, padded, codes_ptr, scale_ptr, sum_ptr, k, GROUP, ORDER, BESIDE
        )


@triton.jit
def _quantize_groups(
    x_ptr, tokens, codes_ptr, scale_ptr, sum_ptr,
    columns: tl.constexpr, k: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    SCALE_GROUP: tl.constexpr, ORDER: tl.constexpr, SUMS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """A program quantises one of the PIECES of a token, which has `columns` inputs."""
    token, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    taken: tl.constexpr = k // PIECES
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * taken + own
    there = own < taken
    if columns < k:
        at -= token * (k - columns)
        there &= piece * taken + own < columns
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    store_scaled_groups(
        x, token, tokens, piece, codes_ptr, scale_ptr, sum_ptr,
        k, taken, SCALE_GROUP, ORDER, SUMS,
    )  # fmt: skip


def quantized(x: Array, form: TokenFormat, *, target: Target) -> QuantizedTokens:
    """x [tokens, k] in 8 bits."""
    tokens, columns = x.shape
    k = form.inputs or columns
    if form.scale_group:
        return _quantized_groups(x, form, target)
    block = triton.next_power_of_2(k)
    each = _SHORT_EACH if block <= _SHORT and tokens >= _MANY and tokens % _SHORT_EACH == 0 else 1
    return QuantizedTokens(
        *triton_call(
            x, form.padded,
            kernel=_quantize,
            name="quantize_tokens",
            target=target,
            out_type=out_types(tokens, k, form),
            grid=(tokens // each,),
            num_warps=max(1, min(16, block // 512)),
            columns=columns, k=k, BLOCK=block, GROUP=form.group, ORDER=form.order.value,
            BESIDE=form.beside, TOKENS=each,
        )
    )  # fmt: skip


def _quantized_groups(x: Array, form: TokenFormat, target: Target) -> QuantizedTokens:
    tokens, columns = x.shape
    k = form.inputs or columns
    groups = k // form.scale_group
    pieces = next(n for n in range(1, groups + 1) if groups % n == 0 and k // n <= _PIECE)
    return QuantizedTokens(
        *triton_call(
            x, tokens,
            kernel=_quantize_groups,
            name="quantize_groups_of_tokens",
            target=target,
            out_type=out_types(tokens, k, form),
            grid=(tokens * pieces,),
            num_warps=4,
            columns=columns, k=k, PIECES=pieces, BLOCK=triton.next_power_of_2(k // pieces),
            SCALE_GROUP=form.scale_group, ORDER=form.order.value, SUMS=form.group > 0,
        )
    )  # fmt: skip


def out_types(tokens: int, k: int, form: TokenFormat) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of the arrays of `QuantizedTokens`."""
    groups = k // form.group if form.group and not form.beside else 1
    beside = 2 * SUMS if form.beside else 0
    scales = (k // form.scale_group, tokens) if form.scale_group else (tokens,)
    return (
        jax.ShapeDtypeStruct((form.padded, k + beside), form.dtype),
        jax.ShapeDtypeStruct(scales, jnp.float32),
        jax.ShapeDtypeStruct((groups, form.padded), jnp.float32),
    )
