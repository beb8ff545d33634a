"""The prologue with one program per token and head; the gating with one per token and some
elements."""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.attention_inputs.reference import HeadWeights
from jaxserve_kernels.gated_attention.reference import PrologueHeads
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.triton_loads import added

_ELEMENTS = 1024
"""Elements per program of the gating."""


@triton.jit
def _load(x_ptr, bias_ptr, at, width: tl.constexpr, parts: tl.constexpr):
    """The parts of elements `at` of a token's projection, and their bias."""
    found = ()
    for part in tl.static_range(parts):
        found = found + (tl.load(x_ptr + part * tl.num_programs(0) * width + at),)  # noqa: RUF005
    if bias_ptr is not None:
        found = found + (tl.load(bias_ptr + at),)  # noqa: RUF005
    return found


@triton.jit
def _weighted(x, scale, weight):
    """x * scale * weight, rounded as in `rms_norm`: with a weight of x's dtype the quotient too."""
    wide = x.to(tl.float32) * scale
    if weight.dtype == x.dtype:
        wide = wide.to(x.dtype).to(tl.float32)
    return (wide * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _prologue(
    x_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, out_ptr, gate_ptr,
    parts: tl.constexpr, width: tl.constexpr, q_heads: tl.constexpr,
    kv_heads: tl.constexpr, half: tl.constexpr, eps: tl.constexpr, GATED: tl.constexpr,
    DIM: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One head, or the gate of a query head. The projection has a gate after each query head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    made: tl.constexpr = q_heads + 2 * kv_heads
    dim = tl.arange(0, DIM)
    rotated = dim < 2 * half
    # The other element of each rotated pair (i, i + half).
    other = tl.where(dim < half, dim + half, tl.where(rotated, dim - half, dim))
    angle = tl.where(dim < half, dim, dim - half)
    cos = tl.load(cos_ptr + token * half + angle, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + token * half + angle, mask=rotated, other=0.0)
    if q_norm_ptr is not None:
        norm = q_norm_ptr if head < q_heads else k_norm_ptr
        weight, other_weight = tl.load(norm + dim), tl.load(norm + other)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first = head * ((1 + GATED) * DIM) if head < q_heads else (head + GATED * q_heads) * DIM
    if head >= made:
        first = (head - made) * (2 * DIM) + DIM
    found = _load(x_ptr + token * width, bias_ptr, first + dim, width, parts)
    found_others = _load(x_ptr + token * width, bias_ptr, first + other, width, parts)
    if head >= made:
        tl.store(gate_ptr + (token * q_heads + head - made) * DIM + dim, added(found, dtype))
    else:
        x = added(found, dtype)
        if head < q_heads + kv_heads:
            y = added(found_others, dtype)
            if q_norm_ptr is not None:
                wide = x.to(tl.float32)
                scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
                x = _weighted(x, scale, weight)
                y = _weighted(y, scale, other_weight)
            turned = x.to(tl.float32) * cos
            turned += tl.where(dim < half, -y.to(tl.float32), y.to(tl.float32)) * sin
            x = tl.where(rotated, turned.to(dtype), x)
        tl.store(out_ptr + (token * made + head) * DIM + dim, x)


@triton.jit
def _gate(
    x_ptr, gates_ptr, out_ptr, size: tl.constexpr, ELEMENTS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    within = at < size
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + at, mask=within, other=0.0)
    gate = tl.load(gates_ptr + at, mask=within, other=0.0).to(tl.float32)
    sigmoid = (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + at, (x.to(tl.float32) * sigmoid).to(x.dtype), mask=within)


def attention_prologue(
    projected: Array,
    weights: HeadWeights,
    tables: tuple[Array, Array],
    *,
    heads: PrologueHeads,
    eps: float,
    dtype: str,
    target: Target,
) -> tuple[Array, Array | None]:
    """See `reference.attention_prologue`."""
    parts, tokens, width = projected.shape
    made = heads.q_heads + 2 * heads.kv_heads
    qkv, gate = triton_call(
        projected, *weights.of_inputs, *tables,
        kernel=_prologue,
        name="attention_prologue",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct((1, tokens, made * heads.head_dim), dtype),
            jax.ShapeDtypeStruct((tokens, heads.q_size if heads.gated else 1), dtype),
        ),
        grid=(tokens, made + heads.gated * heads.q_heads),
        num_warps=1,
        parts=parts, width=width, q_heads=heads.q_heads,
        kv_heads=heads.kv_heads, half=tables[0].shape[-1], eps=eps, GATED=int(heads.gated),
        DIM=heads.head_dim,
    )  # fmt: skip
    return qkv, gate if heads.gated else None


def gate_heads(x: Array, gate: Array, *, target: Target) -> Array:
    """See `reference.gate_heads`."""
    return triton_call(
        x, gate,
        kernel=_gate,
        name="gate_heads",
        target=target,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(triton.cdiv(x.size, _ELEMENTS),),
        num_warps=4,
        size=x.size, ELEMENTS=_ELEMENTS,
    )  # fmt: skip
