"""The weight rows of a streaming product's programs, and what becomes of their sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, MXFP4, NVFP4
from jaxserve_kernels.quantized_matmul.triton_int8_k_step import SIXTEENTH
from jaxserve_kernels.quantized_matmul.triton_k_step import MOST_BY_A_WARP
from jaxserve_kernels.quantized_matmul.triton_unpack import MXFP4_POWER, power
from jaxserve_kernels.triton_activation import gated_sums

_INT4 = gl.constexpr(INT4.value)
_NVFP4 = gl.constexpr(NVFP4.value)
_MXFP4 = gl.constexpr(MXFP4.value)


@gluon.jit
def rows_of(program, lane, n: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr):
    """The weight rows of the program's lanes. Gated, every 8 rows of gate are followed by the same
    8 of up, so that a thread holds the sums of both."""
    if GATED:
        row = program * (ROWS // 2) + lane // 16 * 8 + lane % 8 + lane // 8 % 2 * n
    else:
        row = program * ROWS + lane
    return row


@gluon.jit
def sums_at(partial_ptr, index, acc):
    """Pointers to place `index` of sums that programs leave to others: [rows, tokens], as acc."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, acc.type.layout))[None, :]
    return partial_ptr + (index * ROWS + row) * TOKENS + token


@gluon.jit
def scaled(acc, of_rows, dtype: gl.constexpr, KIND: gl.constexpr, groups: gl.constexpr):
    """The sums, from what `triton_rings.add_tiles` has added up for tokens of `dtype`. of_rows: the
    scales of rows, if they have one each; their largest exponents, of MXFP4 with int8 tokens.
    groups: other scales of a row and tile."""
    if dtype == gl.int8 and KIND == _MXFP4:
        acc *= power(gl.maximum(of_rows - 4, 0))[:, None]
    elif dtype == gl.int8:
        acc *= SIXTEENTH
    elif KIND == _INT4:
        acc *= 64.0  # less_zero
    elif KIND == _NVFP4:
        acc *= (of_rows * 256.0)[:, None]
    elif KIND == _MXFP4:
        acc *= MXFP4_POWER
    elif groups == 0:
        acc *= of_rows[:, None]
    return acc


@gluon.jit
def finish(acc, out_ptr, program, tokens: gl.constexpr, n: gl.constexpr, GATED: gl.constexpr):
    """Stores the sums of a program's rows, gated or as partial sums."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
        values = gated_sums(gate, up, dtype, GATED).reshape([ROWS // 2, TOKENS])
        _store(values, out_ptr, program, tokens, n, ROWS // 16)
    else:
        out_ptr += gl.program_id(1) * (tokens * n)
        _store(acc.to(dtype), out_ptr, program, tokens, n, ROWS // 16)


@gluon.jit
def _store(
    values, out_ptr, program, tokens: gl.constexpr, n: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    rows: gl.constexpr = values.shape[0]
    if values.shape[1] <= MOST_BY_A_WARP:
        layout: gl.constexpr = values.type.layout
    else:
        layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1])
        values = gl.convert_layout(values, layout)
    row = program * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))[None, :]
    there, _ = gl.broadcast(token < tokens, values)
    gl.store(out_ptr + token * n + row, values, mask=there)
