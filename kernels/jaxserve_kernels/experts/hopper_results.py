"""The results of a tile of `hopper.py`: scaled, gated and stored in their rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.experts.hopper_sums import HALF
from jaxserve_kernels.experts.triton_activation import activated_sums

DOWN = gl.constexpr(0)
"""GATED of the down product, beside the values of `activation.gating` and `OSS`."""


@gluon.jit
def places(
    lists, first, end, tokens, choices: gl.constexpr,
    TOKENS: gl.constexpr, GATED: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Result rows of the pairs from `first` on, -1 past the last one; the pairs' weights; and the
    scales of their tokens, if these are in bytes.

    The result of down is in the order of choice and token, that of gate and up in expert order.
    """
    order_ptr, weights_ptr, token_scale_ptr = lists
    place = first + gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [4], [0]))
    there = place < end
    factor = 1.0
    scale = 1.0
    row = place
    of_scale = place
    if GATED == DOWN or BYTES:
        pair = gl.load(order_ptr + place, mask=there, other=0)
        if GATED == DOWN:
            factor = gl.load(weights_ptr + pair, mask=there, other=0.0)
            row = (pair % choices) * tokens + pair // choices
        else:
            of_scale = pair // choices
    if BYTES:
        scale = gl.load(token_scale_ptr + of_scale, mask=there, other=0.0)
    return gl.where(there, row, -1), factor, scale


@gluon.jit
def _store(values, out_ptr, rows, column, n: gl.constexpr):
    """Stores values [columns, tokens] in the tokens' rows of out."""
    flat: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    out = gl.convert_layout(values.to(gl.bfloat16), flat)
    rows = gl.convert_layout(rows, gl.SliceLayout(0, flat))
    columns = column + gl.arange(0, HALF, gl.SliceLayout(1, flat))
    mask = gl.expand_dims(rows >= 0, 0) & gl.expand_dims(columns < n, 1)
    at = gl.expand_dims(rows.to(gl.int64), 0) * n + gl.expand_dims(columns, 1)
    gl.store(out_ptr + at, out, mask=mask)


@gluon.jit
def finish(
    left, right, out_ptr, bias_ptr, pairs, column, second: gl.constexpr,
    n: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Stores the results of both halves of a tile, from their sums [HALF, tokens]. `pairs` are from
    `places`."""
    of_token: gl.constexpr = gl.SliceLayout(0, left.type.layout)
    if BYTES:
        scale = gl.expand_dims(gl.convert_layout(pairs[2], of_token), 0)
        left, right = left * scale, right * scale
    if BIAS:
        left = _biased(left, bias_ptr, column, n)
        right = _biased(right, bias_ptr, column + second, n if GATED == DOWN else n + second)
    if GATED == DOWN:
        factor = gl.expand_dims(gl.convert_layout(pairs[1], of_token), 0)
        _store(left * factor, out_ptr, pairs[0], column, n)
        _store(right * factor, out_ptr, pairs[0], column + second, n)
    else:
        _store(activated_sums(left, right, gl.bfloat16, GATED), out_ptr, pairs[0], column, n)


@gluon.jit
def _biased(acc, bias_ptr, column, n: gl.constexpr):
    columns = column + gl.arange(0, HALF, gl.SliceLayout(1, acc.type.layout))
    bias = gl.load(bias_ptr + columns, mask=columns < n, other=0.0)
    return acc + gl.expand_dims(bias.to(gl.float32), 1)


@gluon.jit
def halves(values):
    """The first half of the tokens, and the second."""
    tokens: gl.constexpr = values.shape[1] // 2
    return gl.split(values.reshape([HALF, 2, tokens]).permute((0, 2, 1)))
