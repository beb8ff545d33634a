"""A token's heads from the projection's partial sums, and their rotation, there and back.

Heads are four quarters [rows, quarter], a quarter's channels in the lanes of a warp: so Sylvester's
matrix, that of 32 times that of four, is shuffles and sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from jaxserve_kernels.paged_attention.triton_heads import rounded


@gluon.jit
def _transformed(x):
    """x [rows, 32], a row in the lanes of a warp, times Sylvester's matrix."""
    layout: gl.constexpr = x.type.layout
    dim = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    for bit in gl.static_range(5):
        other = gl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r",
            [x, gl.full(x.shape, 1 << bit, gl.int32, layout)],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
        sign = gl.where((dim & (1 << bit)) != 0, -1.0, 1.0)
        x = x * gl.expand_dims(sign, 0) + other
    return x


@gluon.jit
def rotated(x0, x1, x2, x3):
    """Rows of heads in four quarters [rows, quarter], rotated: bfloat16."""
    norm: gl.constexpr = (4 * x0.shape[1]) ** -0.5
    x0 = _transformed(x0) * norm
    x1 = _transformed(x1) * norm
    x2 = _transformed(x2) * norm
    x3 = _transformed(x3) * norm
    a = x0 + x1
    b = x0 - x1
    c = x2 + x3
    d = x2 - x3
    return (
        (a + c).to(gl.bfloat16), (b + d).to(gl.bfloat16),
        (a - c).to(gl.bfloat16), (b - d).to(gl.bfloat16),
    )  # fmt: skip


@gluon.jit
def token_heads(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, token, kv_head,
    stride: gl.constexpr, parts: gl.constexpr, q_heads: gl.constexpr, kv_heads: gl.constexpr,
    eps: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr, layout: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The queries that share a KV head, in the next row its key, in the one after that its value:
    four quarters [rows, quarter], normed, turned and rotated, in bfloat16; rounded where the
    reference rounds."""
    DIM: gl.constexpr = 4 * QUARTER
    HALF: gl.constexpr = 2 * QUARTER
    group: gl.constexpr = q_heads // kv_heads
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.expand_dims(gl.arange(0, QUARTER, gl.SliceLayout(0, layout)), 0)
    is_query = gl.expand_dims(row < group, 1)
    is_value = gl.expand_dims(row > group, 1)
    head = gl.where(row < group, kv_head * group + row, q_heads + kv_head)
    head += gl.where(row > group, kv_heads, 0)
    source = qkv_ptr + (token * (q_heads + 2 * kv_heads) + gl.expand_dims(head, 1)) * DIM + dim
    there = gl.expand_dims(row < group + 2, 1)
    q_norm = q_norm_ptr + dim
    k_norm = k_norm_ptr + dim
    n0 = gl.where(is_query, gl.load(q_norm), gl.load(k_norm)).to(gl.float32)
    n1 = gl.where(is_query, gl.load(q_norm + QUARTER), gl.load(k_norm + QUARTER)).to(gl.float32)
    n2 = gl.where(is_query, gl.load(q_norm + HALF), gl.load(k_norm + HALF)).to(gl.float32)
    late: gl.constexpr = 3 * QUARTER
    n3 = gl.where(is_query, gl.load(q_norm + late), gl.load(k_norm + late)).to(gl.float32)
    cos0 = gl.load(cos_ptr + token * HALF + dim)
    cos1 = gl.load(cos_ptr + token * HALF + QUARTER + dim)
    sin0 = gl.load(sin_ptr + token * HALF + dim)
    sin1 = gl.load(sin_ptr + token * HALF + QUARTER + dim)
    x0 = gl.zeros([ROWS, QUARTER], gl.float32, layout)
    x1 = x0
    x2 = x0
    x3 = x0
    if EARLY:
        gdc_wait()
    for part in gl.static_range(parts):
        x0 += gl.load(source + part * stride, mask=there, other=0.0)
        x1 += gl.load(source + (part * stride + QUARTER), mask=there, other=0.0)
        x2 += gl.load(source + (part * stride + HALF), mask=there, other=0.0)
        x3 += gl.load(source + (part * stride + late), mask=there, other=0.0)
    x0 = rounded(x0)
    x1 = rounded(x1)
    x2 = rounded(x2)
    x3 = rounded(x3)
    square = gl.sum((x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3), axis=1) / DIM
    scale = gl.expand_dims(gl.rsqrt(square + eps), 1)
    a = rounded(rounded(x0 * scale) * n0)
    b = rounded(rounded(x1 * scale) * n1)
    c = rounded(rounded(x2 * scale) * n2)
    d = rounded(rounded(x3 * scale) * n3)
    return rotated(
        gl.where(is_value, x0, rounded(a * cos0 - c * sin0)),
        gl.where(is_value, x1, rounded(b * cos1 - d * sin1)),
        gl.where(is_value, x2, rounded(c * cos0 + a * sin0)),
        gl.where(is_value, x3, rounded(d * cos1 + b * sin1)),
    )


@gluon.jit
def store_heads(target, x0, x1, x2, x3, mask):
    """Four quarters [rows, quarter] of heads, behind one another at `target`."""
    target += gl.expand_dims(gl.arange(0, x0.shape[1], gl.SliceLayout(0, x0.type.layout)), 0)
    gl.store(target, x0, mask=mask)
    gl.store(target + x0.shape[1], x1, mask=mask)
    gl.store(target + 2 * x0.shape[1], x2, mask=mask)
    gl.store(target + 3 * x0.shape[1], x3, mask=mask)
