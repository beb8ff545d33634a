"""Quantises tokens to 8 bits on a GPU: as a function for kernels that hold a token's row in
registers, and as a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.quantized_matmul.e4m3.tokens import (
    SUMS,
    Order,
    QuantizedTokens,
    TokenFormat,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_BYTES = tl.constexpr(Order.BYTES.value)
_WORDS = tl.constexpr(Order.WORDS.value)
_HALF_WORDS = tl.constexpr(Order.HALF_WORDS.value)
_SWAPPED = tl.constexpr(Order.SWAPPED.value)
_SUMS = tl.constexpr(SUMS)

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
def _store_pairs(codes, codes_ptr, k: tl.constexpr):
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
        word, nibble = index % 32, index // 32
        index = _in_registers(word % 4, nibble) + 64 * (word // 4 % 2) + 4 * (word // 8)
    elif ORDER == _HALF_WORDS:
        word, nibble = index % 16, index // 16 % 4
        index = _in_registers(word % 4, nibble) + 64 * (index // 64) + 4 * (word // 4)
    elif ORDER == _SWAPPED:
        index = index // 4 * 4 + index % 2 * 2 + index // 2 % 2
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


def quantized(x: Array, form: TokenFormat, *, target: Target) -> QuantizedTokens:
    """x [tokens, k] in 8 bits."""
    tokens, columns = x.shape
    k = form.inputs or columns
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


def out_types(tokens: int, k: int, form: TokenFormat) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of the arrays of `QuantizedTokens`."""
    groups = k // form.group if form.group and not form.beside else 1
    beside = 2 * SUMS if form.beside else 0
    return (
        jax.ShapeDtypeStruct((form.padded, k + beside), form.dtype),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
        jax.ShapeDtypeStruct((groups, form.padded), jnp.float32),
    )
