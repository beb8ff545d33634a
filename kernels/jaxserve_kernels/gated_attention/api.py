"""Attention with a prologue and gates, as one operation and as its parts: picks the
implementations."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs.reference import HeadWeights, KVSlots
from jaxserve_kernels.gated_attention import reference
from jaxserve_kernels.gated_attention.reference import PrologueHeads
from jaxserve_kernels.kv_format import KV, AttentionStep, CacheArrays, attend
from jaxserve_kernels.op import NO_KERNELS, NOT_PDL, Implementation, Op, Refusal, anything
from jaxserve_kernels.paged_attention.config import choose
from jaxserve_kernels.target import Target


def gated_attention(
    projected: Array,
    kv: KV,
    layer: int,
    weights: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    heads: PrologueHeads,
    eps: float,
    tile_size: int,
    dtype: DTypeLike,
    window: int | None = None,
    target: Target,
) -> tuple[Array, KV]:
    """`kv_format.attend` between `attention_prologue` and, with gates, `gate_heads`.

    Args:
      projected, weights, tables, heads: as in `reference.attention_prologue`.
      kv, layer, step, eps, tile_size, dtype, window: as in `kv_format.attend`.

    Returns:
      [tokens, q_heads, head_dim] in `dtype`, and kv.

    Raises:
      ValueError: only one of the two norms is given.
    """
    weights.check()
    return _ATTENTION(
        projected, kv, weights, tables, step,
        layer=layer, heads=heads, eps=eps, tile_size=tile_size, dtype=jnp.dtype(dtype).name,
        window=window, target=target,
    )  # fmt: skip


def attention_prologue(
    projected: Array,
    weights: HeadWeights,
    tables: tuple[Array, Array],
    *,
    heads: PrologueHeads,
    eps: float,
    dtype: DTypeLike,
    target: Target,
) -> tuple[Array, Array | None]:
    """See `reference.attention_prologue`."""
    name = jnp.dtype(dtype).name
    return _PROLOGUE(projected, weights, tables, heads=heads, eps=eps, dtype=name, target=target)


def gate_heads(x: Array, gate: Array, *, target: Target) -> Array:
    """See `reference.gate_heads`."""
    return _GATE(x, gate, target=target)


def no_rotation(tokens: int, head_dim: int, *, target: Target) -> tuple[Array, Array]:
    """The cosines and sines that rotate nothing, with which attention reads the prologue's
    result."""
    if target.pdl:  # nothing may be computed between kernels that PDL launches
        return _no_rotation(tokens, head_dim)
    ones = jnp.ones((tokens, head_dim // 2), jnp.float32)
    return ones, jnp.zeros_like(ones)


@functools.lru_cache(maxsize=64)
def _no_rotation(tokens: int, head_dim: int) -> Any:
    ones = np.ones((tokens, head_dim // 2), np.float32)
    return ones, np.zeros_like(ones)


def _streams(
    projected: Array, kv: KV, weights: HeadWeights, tables: Any, step: AttentionStep, *,
    heads: PrologueHeads, tile_size: int, dtype: str, target: Target, **_: Any,
) -> Any:  # fmt: skip
    if not target.uses_triton():
        return NO_KERNELS
    if not target.pdl or tile_size > 1:
        return NOT_PDL
    if isinstance(kv, CacheArrays):
        return Refusal("keys and values are stored as codes")
    from jaxserve_kernels.paged_attention import triton_streaming  # needs Triton: only for GPUs

    half = tables[0].shape[-1]
    if half < 4 or half & (half - 1):
        return Refusal("rotated elements not a power of 2 from 8 on")
    if heads.gated and weights.bias is not None:
        return Refusal("gates with a bias")
    if not triton_streaming.fits(kv, jnp.dtype(dtype), q_heads=heads.q_heads):
        return Refusal("sizes of heads or pages are not supported")
    return choose(
        tiles=step.tiles.first.shape[0],
        kv_heads=heads.kv_heads,
        rows=heads.q_heads // heads.kv_heads,
        pages_per_seq=step.page_table.shape[1],
        target=target,
    )


def _stream(
    config: Any, projected: Array, kv: Array, weights: HeadWeights, tables: Any,
    step: AttentionStep, *, layer: int, heads: PrologueHeads, eps: float, window: int | None,
    target: Target, **_: Any,
) -> tuple[Array, KV]:  # fmt: skip
    from jaxserve_kernels.paged_attention import triton_streaming

    slots = KVSlots(step.pages, step.offsets)
    return triton_streaming.attend(
        projected, kv, layer, weights, tables, slots, step.page_table, step.tiles, config,
        eps=eps, window=window, gated=heads.gated, target=target,
    )  # fmt: skip


def _apart(
    _: None, projected: Array, kv: KV, weights: HeadWeights, tables: Any, step: AttentionStep, *,
    layer: int, heads: PrologueHeads, eps: float, tile_size: int, dtype: str, window: int | None,
    target: Target,
) -> tuple[Array, KV]:  # fmt: skip
    qkv, gate = attention_prologue(
        projected, weights, tables, heads=heads, eps=eps, dtype=dtype, target=target
    )
    out, kv = attend(
        qkv, kv, layer, HeadWeights(sinks=weights.sinks),
        no_rotation(qkv.shape[1], heads.head_dim, target=target), step,
        eps=eps, tile_size=tile_size, dtype=dtype, window=window, target=target,
    )  # fmt: skip
    if gate is None:
        return out, kv
    return gate_heads(out.reshape(gate.shape), gate, target=target).reshape(out.shape), kv


def _configure(*_: Any, heads: PrologueHeads, target: Target, **__: Any) -> Refusal | None:
    """Refuses calls outside a PDL chain: there XLA compiles each definition to one or two kernels.
    A PDL chain cannot contain XLA's kernels."""
    if not target.uses_triton() or not target.pdl:
        return NOT_PDL
    return Refusal("head_dim not a power of 2") if heads.head_dim & (heads.head_dim - 1) else None


def _on_pdl(*_: Any, target: Target) -> Refusal | None:
    return None if target.uses_triton() and target.pdl else NOT_PDL


def _kernel(_: None, *args: Any, **options: Any) -> Any:
    from jaxserve_kernels.gated_attention import triton  # needs Triton: only for GPUs

    return triton.attention_prologue(*args, **options)


def _gate_kernel(_: None, *args: Any, target: Target) -> Any:
    from jaxserve_kernels.gated_attention import triton  # needs Triton: only for GPUs

    return triton.gate_heads(*args, target=target)


def _definition(_: None, *args: Any, target: Target, **options: Any) -> Any:
    return reference.attention_prologue(*args, **options)


def _define_gate(_: None, x: Array, gate: Array, *, target: Target) -> Array:
    return reference.gate_heads(x, gate)


_ATTENTION = Op(
    name="gated_attention",
    implementations=(
        Implementation(name="triton_streaming, with its inputs", configure=_streams, run=_stream),
        Implementation(
            name="attention_prologue, attention, gate_heads",
            configure=anything,
            run=_apart,
            kernels=False,
        ),
    ),
    describe=lambda projected, *_, tile_size, **__: (
        f"tokens of {projected.shape[-1]}, tiles of {tile_size}"
    ),
    per_layer=True,
)
_PROLOGUE = Op(
    name="attention_prologue",
    implementations=(
        Implementation(name="triton", configure=_configure, run=_kernel),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda projected, *_, **__: f"tokens of {projected.shape[-1]}",
)
_GATE = Op(
    name="gate_heads",
    implementations=(
        Implementation(name="triton", configure=_on_pdl, run=_gate_kernel),
        Implementation(name="reference", configure=anything, run=_define_gate, kernels=False),
    ),
    describe=lambda x, *_, **__: f"tokens of {x.shape[-1]}",
)
