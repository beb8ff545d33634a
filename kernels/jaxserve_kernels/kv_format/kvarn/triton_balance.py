"""Scales of a tile's rows and columns on a GPU: `codec._scales` without logarithms."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sums(a, a_square, b, b_square):
    return a + b, a_square + b_square


@triton.jit
def _extremes(a_low, a_high, b_low, b_high):
    return tl.minimum(a_low, b_low), tl.maximum(a_high, b_high)


@triton.jit
def load_part(
    fresh_ptr, kept_ptr, old, token, channel,
    stride: tl.constexpr, FRESH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Loads a part of the tile, float32 [tokens, channels]. The first `old` tokens are in the tail,
    the others are the step's own."""
    row = kept_ptr + token * DIM
    if FRESH:
        row = tl.where(token < old, row, fresh_ptr + token * stride)
    return tl.load(row + channel).to(tl.float32)


@triton.jit
def reduced(
    fresh_ptr, kept_ptr, old, weights_ptr, out_ptr,
    OVER_TOKENS: tl.constexpr, EXTREMES: tl.constexpr,
    stride: tl.constexpr, FRESH: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Reduces weighted elements over the tokens, for each channel, or over channels for each token.

    The two results are the sum and the sum of squares, or the minimum and the maximum. They go
    through memory, at `out_ptr`, so that each thread ends up with one row's result.
    """
    LENGTH: tl.constexpr = DIM if OVER_TOKENS else GROUP
    COUNT: tl.constexpr = GROUP if OVER_TOKENS else DIM
    if OVER_TOKENS:
        first = tl.zeros([PART, DIM], tl.float32)
    else:
        first = tl.zeros([GROUP, PART], tl.float32)
    second = first
    if EXTREMES:
        first += float("inf")
        second -= float("inf")
    for begin in range(0, COUNT, PART):
        if OVER_TOKENS:
            token = begin + tl.arange(0, PART)[:, None]
            channel = tl.arange(0, DIM)[None, :]
        else:
            token = tl.arange(0, GROUP)[:, None]
            channel = begin + tl.arange(0, PART)[None, :]
        x = load_part(fresh_ptr, kept_ptr, old, token, channel, stride, FRESH, DIM)
        x *= tl.load(weights_ptr + (token if OVER_TOKENS else channel))
        if EXTREMES:
            first = tl.minimum(first, x)
            second = tl.maximum(second, x)
        else:
            first += x
            second += x * x
    if EXTREMES:
        first, second = tl.reduce((first, second), 0 if OVER_TOKENS else 1, _extremes)
    else:
        first, second = tl.reduce((first, second), 0 if OVER_TOKENS else 1, _sums)
    at = out_ptr + tl.arange(0, LENGTH)
    later: tl.constexpr = GROUP if GROUP > DIM else DIM
    tl.store(at, first)
    tl.store(at + later, second)
    tl.debug_barrier()
    return tl.load(at), tl.load(at + later)


@triton.jit
def _std(
    fresh_ptr, kept_ptr, old, weights_ptr, out_ptr, OVER_TOKENS: tl.constexpr,
    stride: tl.constexpr, FRESH: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Sample standard deviations over tokens, for each channel, or over channels for each token."""
    COUNT: tl.constexpr = GROUP if OVER_TOKENS else DIM
    total, squares = reduced(
        fresh_ptr, kept_ptr, old, weights_ptr, out_ptr,
        OVER_TOKENS, False, stride, FRESH, GROUP, DIM, PART,
    )  # fmt: skip
    off = squares - total * (total * (1 / COUNT))
    return tl.sqrt(tl.maximum(off, 0.0) * (1 / (COUNT - 1)))


@triton.jit
def _spread(std):
    """The ratio of the largest to the smallest."""
    low, high = tl.reduce((std, std), 0, _extremes)
    return high / tl.maximum(low, 1e-8)


@triton.jit
def _times_std(scale, std, LOWEST: tl.constexpr):
    return tl.clamp(scale * tl.clamp(std, 1e-3, 1e3), LOWEST, 22026.465794806718)  # e ** 10


@triton.jit
def balance(
    fresh_ptr, kept_ptr, old, row_ptr, column_ptr, out_ptr,
    KEYS: tl.constexpr, LOWEST: tl.constexpr, ITERATIONS: tl.constexpr,
    stride: tl.constexpr, FRESH: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Row [ROWS] and column [COLUMNS] scales: `codec._scales` without logarithms.

    Dividing a row divides its deviation, so a row's deviation is computed from the matrix divided
    along columns only, and vice versa. row_ptr and column_ptr are scratch for inverse scales.
    """
    ROWS: tl.constexpr = DIM if KEYS else GROUP
    COLUMNS: tl.constexpr = GROUP if KEYS else DIM
    row = tl.full([ROWS], 1.0, tl.float32)
    column = tl.full([COLUMNS], 1.0, tl.float32)
    column_std = column
    best_row = row
    best_column = column
    best = float("inf")
    for iteration in range(ITERATIONS + 1):  # the first one: no scales
        if iteration > 0:
            column = _times_std(column, column_std, LOWEST)
        inverse = 1.0 / column
        tl.store(column_ptr + tl.arange(0, COLUMNS), inverse)
        tl.debug_barrier()
        row_std = _std(
            fresh_ptr, kept_ptr, old, column_ptr, out_ptr,
            KEYS, stride, FRESH, GROUP, DIM, PART,
        )  # fmt: skip
        if iteration > 0:
            row = _times_std(row, row_std / row, LOWEST)
        row_inverse = 1.0 / row
        tl.store(row_ptr + tl.arange(0, ROWS), row_inverse)
        tl.debug_barrier()
        column_std = inverse * _std(
            fresh_ptr, kept_ptr, old, row_ptr, out_ptr,
            not KEYS, stride, FRESH, GROUP, DIM, PART,
        )  # fmt: skip
        found = _spread(column_std) + _spread(row_std * row_inverse)
        best_row = tl.where(found <= best, row, best_row)
        best_column = tl.where(found <= best, column, best_column)
        best = tl.minimum(found, best)
    return best_row, best_column
