"""The token's own heads in `triton_streaming`: from the projection's partial sums, as halves of
rotated groups [rows, groups, half] in float32. Rows are the queries that share a KV head, the
token's key and its value."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from jaxserve_kernels.paged_attention.triton_heads import rounded


@gluon.jit
def joined(low, high):
    """Concatenates the halves of rotated groups: [rows, groups, half] each, to [rows, dim]."""
    dim: gl.constexpr = 2 * low.shape[1] * low.shape[2]
    return gl.reshape(gl.permute(gl.join(low, high), (0, 1, 3, 2)), [low.shape[0], dim])


@gluon.jit
def _of_row(x, row, index: gl.constexpr):
    """One row of x, [1, groups, half]."""
    return gl.expand_dims(gl.sum(gl.where(row == index, x, 0.0), axis=0), 0)


@gluon.jit
def head_weights(
    q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, is_query, dim, half: gl.constexpr
):  # fmt: skip
    """Loads what no earlier kernel writes: norm weights of both halves, cosines and sines. Only the
    first `half` dimensions of a head, and the `half` that follow, are rotated."""
    norms = ()
    if q_norm_ptr is not None:
        for side in gl.static_range(2):
            q_norm = gl.load(q_norm_ptr + dim + side * half)
            k_norm = gl.load(k_norm_ptr + dim + side * half)
            norms = norms + (gl.where(is_query, q_norm, k_norm),)  # noqa: RUF005
    rotated = dim < half
    cos = gl.load(cos_ptr + token * half + dim, mask=rotated, other=1.0)
    sin = gl.load(sin_ptr + token * half + dim, mask=rotated, other=0.0)
    return norms, cos, sin


@gluon.jit
def own_heads(
    source, low, high, norms, cos, sin, is_value, there,
    stride: gl.constexpr, parts: gl.constexpr, eps: gl.constexpr, half: gl.constexpr,
    layout: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A token's heads from the projection's partial sums, as halves of rotated groups [rows,
    groups, half] in float32, rounded where the reference rounds. `source` points to the low half's
    elements in the first part; `low` and `high` are the bias. Rows that are not `there` are
    padding."""
    if EARLY:
        gdc_wait()
    for part in gl.static_range(parts):
        low += gl.load(source + part * stride, mask=there, other=0.0)
        high += gl.load(source + (part * stride + half), mask=there, other=0.0)
    low, high = rounded(low), rounded(high)
    y_low, y_high = low, high
    if len(norms) > 0:
        mean = gl.sum(gl.sum(low * low + high * high, axis=2), axis=1)
        mean = mean / (2 * low.shape[1] * low.shape[2])
        scale = gl.expand_dims(gl.expand_dims(gl.rsqrt(mean + eps), 1), 2)
        y_low, y_high = low * scale, high * scale
        if norms[0].dtype == gl.bfloat16:
            y_low, y_high = rounded(y_low), rounded(y_high)
        y_low, y_high = rounded(y_low * norms[0]), rounded(y_high * norms[1])
    turned_low = rounded(y_low * cos - y_high * sin)
    turned_high = rounded(y_high * cos + y_low * sin)
    return gl.where(is_value, low, turned_low), gl.where(is_value, high, turned_high)


@gluon.jit
def sigmoid(gate_ptr, valid, stride: gl.constexpr, parts: gl.constexpr):
    """The sigmoids of gates, which are partial sums, rounded where the reference rounds."""
    gate = gl.load(gate_ptr, mask=valid, other=0.0).to(gl.float32)
    for part in gl.static_range(1, parts):
        gate += gl.load(gate_ptr + part * stride, mask=valid, other=0.0)
    return rounded(1.0 / (1.0 + gl.exp(-rounded(gate))))


@gluon.jit
def own_key(
    target, low, high, row, group: gl.constexpr, scale: gl.constexpr, sums: gl.constexpr
):  # fmt: skip
    """Stores the token's own key and value, rows `group` and the next one of low and high [rows,
    groups, half]. Returns its score for each query, and the value [dim]."""
    HALF: gl.constexpr = low.shape[2]
    DIM: gl.constexpr = 2 * low.shape[1] * HALF
    own = (row == group) | (row == group + 1)
    gl.store(target, low.to(gl.bfloat16), mask=own)
    gl.store(target + HALF, high.to(gl.bfloat16), mask=own)
    score = low * _of_row(low, row, group) + high * _of_row(high, row, group)
    score = gl.sum(gl.sum(score, axis=2), axis=1)
    score = gl.convert_layout(score * scale, gl.SliceLayout(1, sums))
    value = joined(_of_row(low, row, group + 1), _of_row(high, row, group + 1))
    return score, gl.convert_layout(gl.reshape(value, [DIM]), gl.SliceLayout(0, sums))
