# ruff: noqa: RUF005  (Triton adds tuples in no other way)
"""Computes a token's heads from the projection's partial sums, and writes its key and value, inside
attention kernels.

The rows of a program are the queries that share a KV head, then its key, then its value. A head is
two or four pieces [rows, width]. Norms and bias are None if the model has none. `triton_streaming`
has other layouts, and its own functions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from jaxserve_kernels.paged_attention.triton_visits import BF16, FP8, INT8


@gluon.jit
def rounded(x):
    """x rounded to bfloat16, as float32."""
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def token_heads(
    qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, kv_head,
    stride: gl.constexpr, parts: gl.constexpr, q_heads: gl.constexpr, kv_heads: gl.constexpr,
    eps: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr,
    layout: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The pieces of a token's heads, normed and rotated, in float32, rounded where the reference
    rounds. EARLY: wait for earlier kernels before reading qkv."""
    group: gl.constexpr = q_heads // kv_heads
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, layout)), 0)
    is_query = gl.expand_dims(row < group, 1)
    is_value = gl.expand_dims(row > group, 1)
    head = gl.where(row < group, kv_head * group + row, q_heads + kv_head)
    head += gl.where(row > group, kv_heads, 0)
    head = gl.expand_dims(head, 1)
    source = qkv_ptr + (token * (q_heads + 2 * kv_heads) + head) * (PIECES * WIDTH) + dim
    there = gl.expand_dims(row < group + 2, 1)
    constants = _constants(
        q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, head, is_query,
        WIDTH, PIECES, layout,
    )  # fmt: skip
    return _normed_and_rotated(
        source, is_value, there, constants,
        stride, parts, eps, ROWS, WIDTH, PIECES, layout, EARLY,
    )  # fmt: skip


@gluon.jit
def _constants(
    q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, head, is_query,
    WIDTH: gl.constexpr, PIECES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Loads the inputs that no earlier kernel writes: norm weights and biases per piece, cosines
    and sines per pair of pieces. `head`: each row's head in the projection; any head for padding
    rows."""
    DIM: gl.constexpr = PIECES * WIDTH
    dim = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, layout)), 0)
    norms = ()
    biases = ()
    cos = ()
    sin = ()
    for piece in gl.static_range(PIECES):
        if q_norm_ptr is not None:
            q_norm = gl.load(q_norm_ptr + dim + piece * WIDTH)
            k_norm = gl.load(k_norm_ptr + dim + piece * WIDTH)
            norms = norms + (gl.where(is_query, q_norm, k_norm).to(gl.float32),)
    for piece in gl.static_range(PIECES):
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + head * DIM + dim + piece * WIDTH)
            biases = biases + (bias.to(gl.float32),)
    for piece in gl.static_range(PIECES // 2):
        angles = gl.load(cos_ptr + token * (DIM // 2) + piece * WIDTH + dim)
        cos = cos + (angles,)
    for piece in gl.static_range(PIECES // 2):
        angles = gl.load(sin_ptr + token * (DIM // 2) + piece * WIDTH + dim)
        sin = sin + (angles,)
    return norms, biases, cos, sin


@gluon.jit
def _normed_and_rotated(
    source, is_value, there, constants,
    stride: gl.constexpr, parts: gl.constexpr, eps: gl.constexpr, ROWS: gl.constexpr,
    WIDTH: gl.constexpr, PIECES: gl.constexpr, layout: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """`token_heads` after `_constants`. `source` points to each row's first piece in the first
    part. Rows that are not `there` are padding."""
    norms, biases, cos, sin = constants
    x = biases
    if len(biases) == 0:
        for _piece in gl.static_range(PIECES):
            x = x + (gl.zeros([ROWS, WIDTH], gl.float32, layout),)
    if EARLY:
        gdc_wait()
    for part in gl.static_range(parts):
        sums = ()
        for piece in gl.static_range(PIECES):
            more = gl.load(source + (part * stride + piece * WIDTH), mask=there, other=0.0)
            sums = sums + (x[piece] + more,)
        x = sums
    values = ()
    for piece in gl.static_range(PIECES):
        values = values + (rounded(x[piece]),)
    y = values
    if len(norms) > 0:
        y = _normed(values, norms, eps, PIECES)
    half: gl.constexpr = PIECES // 2
    found = ()
    for piece in gl.static_range(half):
        turned = rounded(y[piece] * cos[piece] - y[piece + half] * sin[piece])
        found = found + (gl.where(is_value, values[piece], turned),)
    for piece in gl.static_range(half):
        turned = rounded(y[piece + half] * cos[piece] + y[piece] * sin[piece])
        found = found + (gl.where(is_value, values[piece + half], turned),)
    return found


@gluon.jit
def _normed(x, norms, eps: gl.constexpr, PIECES: gl.constexpr):
    square = x[0] * x[0] + x[1] * x[1]
    if PIECES == 4:
        square = square + (x[2] * x[2] + x[3] * x[3])
    mean = gl.sum(square, axis=1) / (PIECES * x[0].shape[1])
    scale = gl.expand_dims(gl.rsqrt(mean + eps), 1)
    y = ()
    for piece in gl.static_range(PIECES):
        y = y + (rounded(rounded(x[piece] * scale) * norms[piece]),)
    return y


@gluon.jit
def _encoded(x, factor, KIND: gl.constexpr):
    """Encodes x * factor in 8 bits. Returns the bytes, and the numbers that they encode."""
    if KIND == FP8:
        code = gl.minimum(gl.maximum(x * factor, -448.0), 448.0).to(gl.float8e4nv)
        byte = code.to(gl.uint8, bitcast=True).to(gl.int32)
        number = code.to(gl.float32)
    else:
        number = (x * factor + 12582912.0) - 12582912.0  # to the nearest integer, halves to even
        byte = number.to(gl.int32) + 128
    return byte, number


@gluon.jit
def write_heads(
    low, high, is_new, kv_ptr, scales_ptr, new_row, key_scale, value_scale,
    group: gl.constexpr, PAGE: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Writes the token's key and value to the cache, the heads that are `is_new`, after `group`
    queries. Returns the heads with the numbers that the cache then represents, and the scales of
    key and value."""
    ROWS: gl.constexpr = low.shape[0]
    HALF: gl.constexpr = low.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, low.type.layout))
    dim = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, low.type.layout)), 0)
    there = gl.expand_dims(is_new, 1)
    at = new_row + gl.where(row > group, PAGE, 0)
    if KIND == BF16:
        target = kv_ptr + gl.expand_dims(at, 1) * (2 * HALF) + dim
        gl.store(target, low.to(gl.bfloat16), mask=there)
        gl.store(target + HALF, high.to(gl.bfloat16), mask=there)
    else:
        if KIND == INT8:
            largest = gl.max(gl.maximum(gl.abs(low), gl.abs(high)), axis=1)
            new_scales = largest / 127.0
            gl.store(scales_ptr + at, new_scales, mask=is_new)
            key_scale = gl.sum(gl.where(row == group, new_scales, 0.0), axis=0)
            value_scale = gl.sum(gl.where(row == group + 1, new_scales, 0.0), axis=0)
            factor = 127.0 / gl.where(largest > 0, largest, 127.0)
        else:
            factor = 1.0 / gl.where(row == group, key_scale, value_scale)
        low_byte, low_number = _encoded(low, gl.expand_dims(factor, 1), KIND)
        high_byte, high_number = _encoded(high, gl.expand_dims(factor, 1), KIND)
        low = gl.where(there, low_number, low)
        high = gl.where(there, high_number, high)
        words = (low_byte | (high_byte << 8)).to(gl.int16)
        gl.store(kv_ptr + gl.expand_dims(at, 1) * HALF + dim, words, mask=there)
    return low, high, key_scale, value_scale
