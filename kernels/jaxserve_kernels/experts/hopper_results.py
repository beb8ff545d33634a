"""The results of a tile of `hopper.py`: scaled, gated and stored in their rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.experts.hopper_lists import DOWN, FACTOR, SCALE
from jaxserve_kernels.experts.triton_activation import activated_sums


@gluon.jit
def room(STAGED: gl.constexpr, HALF: gl.constexpr):
    """A part's shared memory for results of STAGED tokens."""
    panel: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return gl.allocate_shared_memory(gl.bfloat16, [STAGED, HALF], panel)


@gluon.jit
def _listed(numbers, layout: gl.constexpr):
    """A number in float32 for each column."""
    return gl.expand_dims(numbers.load(layout), 0)


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
    HALF: gl.constexpr = values.shape[0]
    across: gl.constexpr = HALF // 8
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [HALF // 16, 1], [1, 0])
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
    scale = 1.0
    if BYTES:
        scale = _listed(listed[1].index(SCALE).slice(first, TOKENS), of_token)
        if BIAS or GATED != DOWN:
            left, right = left * scale, right * scale
    if BIAS:
        left = _biased(left, bias_ptr, column, n)
        right = _biased(right, bias_ptr, column + second, n if GATED == DOWN else n + second)
    rows = listed[0].slice(first, TOKENS)
    if GATED == DOWN:
        factor = _listed(listed[1].index(FACTOR).slice(first, TOKENS), of_token)
        if not BIAS:
            factor *= scale
        _store(left * factor, staged, out_ptr, rows, column, n)
        _store(right * factor, staged, out_ptr, rows, column + second, n)
    else:
        values = activated_sums(left, right, gl.bfloat16, GATED)
        _store(values, staged, out_ptr, rows, column, n)


@gluon.jit
def _biased(acc, bias_ptr, column, n: gl.constexpr):
    columns = column + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    bias = gl.load(bias_ptr + columns, mask=columns < n, other=0.0)
    return acc + gl.expand_dims(bias.to(gl.float32), 1)


@gluon.jit
def halves(values):
    """The first half of the tokens, and the second."""
    tokens: gl.constexpr = values.shape[1] // 2
    return gl.split(values.reshape([values.shape[0], 2, tokens]).permute((0, 2, 1)))
