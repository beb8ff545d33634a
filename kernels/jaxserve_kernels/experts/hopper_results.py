"""The results of a tile of `hopper.py`: scaled, gated and stored in their rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.experts.hopper_lists import DOWN, FACTOR, SCALE
from jaxserve_kernels.experts.hopper_sums import tile_rows
from jaxserve_kernels.experts.triton_activation import activated_sums


@gluon.jit
def room(STAGED: gl.constexpr, COLUMNS: gl.constexpr):
    """A part's shared memory for COLUMNS results of STAGED tokens."""
    panel: gl.constexpr = gl.NVMMASharedLayout(min(2 * COLUMNS, 128), 16, rank=2)
    return gl.allocate_shared_memory(gl.bfloat16, [STAGED, COLUMNS], panel)


@gluon.jit
def _listed(numbers, layout: gl.constexpr):
    """A number in float32 for each column."""
    return gl.expand_dims(numbers.load(layout), 0)


@gluon.jit
def _store(values, staged, out_ptr, rows, column, n: gl.constexpr):
    """Stores values [columns, tokens] in the tokens' rows of out."""
    COLUMNS: gl.constexpr = values.shape[0]
    TOKENS: gl.constexpr = values.shape[1]
    if staged.shape[1] < COLUMNS:
        first, then = _first_rows(values)
        _store(first, staged, out_ptr, rows, column, n)
        _store(then, staged, out_ptr, rows, column + COLUMNS // 2, n)
    elif staged.shape[0] < TOKENS:
        first, then = halves(values)
        _store(first, staged, out_ptr, rows.slice(0, TOKENS // 2), column, n)
        _store(then, staged, out_ptr, rows.slice(TOKENS // 2, TOKENS // 2), column, n)
    else:
        _store_at_once(values, staged, out_ptr, rows, column, n)


@gluon.jit
def _store_at_once(values, staged, out_ptr, rows, column, n: gl.constexpr):
    COLUMNS: gl.constexpr = values.shape[0]
    WARPS: gl.constexpr = max(COLUMNS // 16, 4)
    across: gl.constexpr = COLUMNS // 8
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [WARPS, 1], [1, 0])
    panel = staged.slice(0, values.shape[1])
    panel.store(values.to(gl.bfloat16).permute((1, 0)))
    out = panel.load(flat)
    row = rows.load(gl.SliceLayout(1, flat))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, flat))
    mask = gl.expand_dims(row >= 0, 1) & gl.expand_dims(columns < n, 0)
    at = gl.expand_dims(row.to(gl.int64), 1) * n + gl.expand_dims(columns, 0)
    gl.store(out_ptr + at, out, mask=mask)


@gluon.jit
def finish(
    sums, staged, out_ptr, bias_ptr, listed, first: gl.constexpr, column,
    rows: gl.constexpr, n: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Stores the results of a part of a tile, from its sums [rows, tokens]. column: the first
    column of the result, and row of the expert. The tokens are those from `first` on in
    `listed`."""
    of_token: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    TOKENS: gl.constexpr = sums.shape[1]
    scale = 1.0
    if BYTES:
        scale = _listed(listed[1].index(SCALE).slice(first, TOKENS), of_token)
        if BIAS or GATED != DOWN:
            sums = sums * scale
    if BIAS:
        lane = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        own = tile_rows(column, n, lane, GATED)
        bias = gl.load(bias_ptr + own, mask=own < rows, other=0.0)
        sums += gl.expand_dims(bias.to(gl.float32), 1)
    to = listed[0].slice(first, TOKENS)
    if GATED == DOWN:
        factor = _listed(listed[1].index(FACTOR).slice(first, TOKENS), of_token)
        if not BIAS:
            factor *= scale
        _store(sums * factor, staged, out_ptr, to, column, n)
    else:
        blocks: gl.constexpr = sums.shape[0] // 16
        turns = sums.reshape([blocks, 2, 8, TOKENS]).permute((0, 2, 3, 1))
        gate, up = gl.split(turns)
        values = activated_sums(gate, up, gl.bfloat16, GATED)
        _store(values.reshape([8 * blocks, TOKENS]), staged, out_ptr, to, column, n)


@gluon.jit
def halves(values):
    """The first half of the tokens, and the second."""
    tokens: gl.constexpr = values.shape[1] // 2
    return gl.split(values.reshape([values.shape[0], 2, tokens]).permute((0, 2, 1)))


@gluon.jit
def _first_rows(values):
    """The first half of the rows, and the second."""
    rows: gl.constexpr = values.shape[0] // 2
    return gl.split(values.reshape([2, rows, values.shape[1]]).permute((1, 2, 0)))
