"""The results of a tile of `hopper.py`: scaled, gated and stored in their rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.experts.hopper_copy import BOX, MAIN
from jaxserve_kernels.experts.hopper_sums import HALF
from jaxserve_kernels.experts.triton_activation import activated_sums

_MAIN = gl.constexpr(MAIN)
_BOX = gl.constexpr(BOX)
DOWN = gl.constexpr(0)
"""GATED of the down product, beside the values of `activation.gating` and `OSS`."""


@gluon.jit
def places(
    lists, first, end, tokens, choices: gl.constexpr,
    TOKENS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Result rows of the pairs from `first` on, -1 past the last one; the pairs' weights; and the
    scales of their tokens, if these are in bytes. Without a bias the weights contain the scales.

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
        if GATED == DOWN and not BIAS:
            factor *= scale
    return gl.where(there, row, -1), factor, scale


@gluon.jit
def room(STAGED: gl.constexpr, LISTS: gl.constexpr):
    """A warpgroup's shared memory: for results of STAGED tokens, and for what `places` finds of a
    tile's first tokens and of its last box."""
    panel: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    staged = gl.allocate_shared_memory(gl.bfloat16, [STAGED, HALF], panel)
    listed = gl.allocate_shared_memory(gl.int32, [LISTS, _MAIN], flat)
    return staged, listed, gl.allocate_shared_memory(gl.int32, [LISTS, _BOX], flat)


@gluon.jit
def share(listed, found, GATED: gl.constexpr, BYTES: gl.constexpr):
    """Writes what `places` found where all threads of the warpgroup see it."""
    TOKENS: gl.constexpr = found[0].shape[0]
    listed.index(0).slice(0, TOKENS).store(found[0])
    if GATED == DOWN:
        listed.index(1).slice(0, TOKENS).store(found[1].to(gl.int32, bitcast=True))
    if BYTES:
        listed.index(2).slice(0, TOKENS).store(found[2].to(gl.int32, bitcast=True))


@gluon.jit
def _listed(numbers, layout: gl.constexpr):
    """A number in float32 for each column."""
    return gl.expand_dims(numbers.load(layout).to(gl.float32, bitcast=True), 0)


@gluon.jit
def _store(values, staged, out_ptr, rows, column, n: gl.constexpr):
    """Stores values [columns, tokens] in the tokens' rows of out."""
    TOKENS: gl.constexpr = values.shape[1]
    if staged.shape[0] < TOKENS:
        first, then = halves(values)
        _store_at_once(first, staged, out_ptr, rows.slice(0, TOKENS // 2), column, n)
        _store_at_once(then, staged, out_ptr, rows.slice(TOKENS // 2, TOKENS // 2), column, n)
    else:
        _store_at_once(values, staged, out_ptr, rows, column, n)


@gluon.jit
def _store_at_once(values, staged, out_ptr, rows, column, n: gl.constexpr):
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    panel = staged.slice(0, values.shape[1])
    panel.store(values.to(gl.bfloat16).permute((1, 0)))
    out = panel.load(flat)
    row = rows.load(gl.SliceLayout(1, flat))
    columns = column + gl.arange(0, HALF, gl.SliceLayout(0, flat))
    mask = gl.expand_dims(row >= 0, 1) & gl.expand_dims(columns < n, 0)
    at = gl.expand_dims(row.to(gl.int64), 1) * n + gl.expand_dims(columns, 0)
    gl.store(out_ptr + at, out, mask=mask)


@gluon.jit
def finish(
    left, right, staged, out_ptr, bias_ptr, listed, first: gl.constexpr, column,
    second: gl.constexpr, n: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Stores the results of both halves of a tile, from their sums [HALF, tokens]. The tokens are
    those from `first` on in `listed`."""
    of_token: gl.constexpr = gl.SliceLayout(0, left.type.layout)
    TOKENS: gl.constexpr = left.shape[1]
    if BYTES and (BIAS or GATED != DOWN):
        scale = _listed(listed.index(2).slice(first, TOKENS), of_token)
        left, right = left * scale, right * scale
    if BIAS:
        left = _biased(left, bias_ptr, column, n)
        right = _biased(right, bias_ptr, column + second, n if GATED == DOWN else n + second)
    rows = listed.index(0).slice(first, TOKENS)
    if GATED == DOWN:
        factor = _listed(listed.index(1).slice(first, TOKENS), of_token)
        _store(left * factor, staged, out_ptr, rows, column, n)
        _store(right * factor, staged, out_ptr, rows, column + second, n)
    else:
        values = activated_sums(left, right, gl.bfloat16, GATED)
        _store(values, staged, out_ptr, rows, column, n)


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
