"""A token's heads from the projection's partial sums, for attention that computes them itself."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait


@gluon.jit
def rounded(x):
    """To bfloat16's digits."""
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def token_halves(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head,
    stride: gl.constexpr, parts: gl.constexpr, q_heads: gl.constexpr, kv_heads: gl.constexpr,
    eps: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The queries that share a KV head, in the next row its key, in the one after that its value:
    both halves [rows, half], normed and rotated, float32, rounded where the reference rounds."""
    DIM: gl.constexpr = 2 * HALF
    group: gl.constexpr = q_heads // kv_heads
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, layout)), 0)
    is_query = gl.expand_dims(row < group, 1)
    is_value = gl.expand_dims(row > group, 1)
    head = gl.where(row < group, kv_head * group + row, q_heads + kv_head)
    head += gl.where(row > group, kv_heads, 0)
    source = qkv_ptr + (token * (q_heads + 2 * kv_heads) + gl.expand_dims(head, 1)) * DIM + dim
    there = gl.expand_dims(row < group + 2, 1)
    q_norm = q_norm_ptr + dim
    k_norm = k_norm_ptr + dim
    norm_low = gl.where(is_query, gl.load(q_norm), gl.load(k_norm)).to(gl.float32)
    norm_high = gl.where(is_query, gl.load(q_norm + HALF), gl.load(k_norm + HALF)).to(gl.float32)
    cos = gl.load(cos_ptr + token * HALF + dim)
    sin = gl.load(sin_ptr + token * HALF + dim)
    low = gl.zeros([ROWS, HALF], gl.float32, layout)
    high = gl.zeros([ROWS, HALF], gl.float32, layout)
    if EARLY:
        gdc_wait()
    for part in gl.static_range(parts):
        low += gl.load(source + part * stride, mask=there, other=0.0)
        high += gl.load(source + (part * stride + HALF), mask=there, other=0.0)
    low = rounded(low)
    high = rounded(high)
    square = gl.sum(low * low + high * high, axis=1) / DIM
    scale = gl.expand_dims(gl.rsqrt(square + eps), 1)
    a = rounded(rounded(low * scale) * norm_low)
    b = rounded(rounded(high * scale) * norm_high)
    low = gl.where(is_value, low, rounded(a * cos - b * sin))
    high = gl.where(is_value, high, rounded(b * cos + a * sin))
    return low, high
