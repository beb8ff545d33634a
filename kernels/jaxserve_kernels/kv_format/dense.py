"""The dense format: keys and values in the dtype of activations or another float dtype, in one
array.

[layers, pages, kv_heads, 2, page_size, head_dim]    keys, then values, on the axis of 2
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots, attention_inputs
from jaxserve_kernels.kv_format.base import AttentionStep, CacheShape
from jaxserve_kernels.kv_format.format import KVFormat
from jaxserve_kernels.op import NO_KERNELS, NOT_PDL, Implementation, Op, Refusal, anything
from jaxserve_kernels.paged_attention import paged_attention
from jaxserve_kernels.paged_attention.config import choose, limits_of
from jaxserve_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class Dense(KVFormat):
    """The format with an array of `dtype`; None: the dtype of the activations."""

    arrays = Array
    dtype: str | None = None

    @property
    def name(self) -> str:
        return "auto" if self.dtype is None else "bf16"

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        dims = (shape.layers, shape.pages, shape.kv_heads, 2, shape.page_size, shape.head_dim)
        return jax.ShapeDtypeStruct(dims, jnp.dtype(self.dtype or dtype))

    def tokens_per_page(self, kv: Array) -> int:
        return kv.shape[4]

    @property
    def attention(self) -> Op:
        return _OP


def _fits(
    qkv: Array, kv: Array, step: AttentionStep, *, tile_size: int, dtype: Any, target: Target
) -> Refusal | None:
    """Why no kernel computes attention together with its inputs; None if one does."""
    if not target.uses_triton():
        return NO_KERNELS
    if not target.pdl or tile_size > 1:
        return NOT_PDL
    from jaxserve_kernels.paged_attention import triton_warps  # needs Triton: only for GPUs

    fits = triton_warps.fits(qkv, kv, dtype)
    return None if fits else Refusal("sizes of heads or pages are not supported")


def _streams(
    qkv: Array, kv: Array, heads: Any, tables: Any, step: AttentionStep, *,
    tile_size: int, dtype: Any, target: Target, **_: Any,
) -> Any:  # fmt: skip
    if refused := _fits(qkv, kv, step, tile_size=tile_size, dtype=dtype, target=target):
        return refused
    from jaxserve_kernels.paged_attention import triton_streaming

    tokens, kv_heads, head_dim = qkv.shape[1], kv.shape[2], kv.shape[5]
    most = limits_of(target).most_streaming
    if tokens > most:
        return Refusal(f"more than {most} tokens")
    if not triton_streaming.fits(kv, dtype, q_heads=qkv.shape[2] // head_dim - 2 * kv_heads):
        return Refusal("sizes of heads or pages are not supported")
    return choose(
        tiles=step.tiles.first.shape[0],
        kv_heads=kv_heads,
        rows=qkv.shape[2] // head_dim // kv_heads - 2,
        pages_per_seq=step.page_table.shape[1],
        target=target,
    )


def _warps(
    qkv: Array, kv: Array, heads: Any, tables: Any, step: AttentionStep, *,
    tile_size: int, dtype: Any, target: Target, **_: Any,
) -> Any:  # fmt: skip
    if refused := _fits(qkv, kv, step, tile_size=tile_size, dtype=dtype, target=target):
        return refused
    from jaxserve_kernels.paged_attention import triton_warps

    tokens = qkv.shape[1]
    most = limits_of(target).most_streaming
    if tokens <= most:
        return Refusal(f"{most} tokens or fewer")
    return triton_warps.heuristic(
        tiles=step.tiles.first.shape[0], kv_heads=kv.shape[2], kind=triton_warps.BF16, target=target
    )


def _run(name: str) -> Callable[..., Any]:
    def run(
        config: Any, qkv: Array, kv: Array, heads: Any, tables: Any, step: AttentionStep, *,
        layer: int, eps: float, window: int | None, target: Target, **_: Any,
    ) -> Any:  # fmt: skip
        kernels = importlib.import_module(f"jaxserve_kernels.paged_attention.{name}")
        slots = KVSlots(step.pages, step.offsets)
        return kernels.attend(
            qkv, kv, layer, heads, tables, slots, step.page_table, step.tiles, config,
            eps=eps, window=window, target=target,
        )  # fmt: skip

    return run


def _apart(
    _: None, qkv: Array, kv: Array, heads: HeadWeights, tables: Any, step: AttentionStep, *,
    layer: int, eps: float, tile_size: int, dtype: Any, window: int | None, target: Target,
) -> tuple[Array, Array]:  # fmt: skip
    slots = KVSlots(step.pages, step.offsets)
    q, kv = attention_inputs(
        qkv, kv, layer, heads, tables, slots, eps=eps, dtype=dtype, target=target
    )
    out = paged_attention(
        q, kv, layer, step.page_table, step.tiles,
        tile_size=tile_size, window=window, sinks=heads.sinks, target=target,
    )  # fmt: skip
    return out.astype(dtype), kv


_OP = Op(
    name="attention",
    implementations=(
        Implementation(
            name="triton_streaming, with its inputs",
            configure=_streams,
            run=_run("triton_streaming"),
        ),
        Implementation(
            name="triton_warps, with its inputs", configure=_warps, run=_run("triton_warps")
        ),
        Implementation(
            name="attention_inputs, then paged_attention",
            configure=anything,
            run=_apart,
            kernels=False,
        ),
    ),
    describe=lambda qkv, *_, tile_size, **__: f"tokens of {qkv.shape[-1]}, tiles of {tile_size}",
    per_layer=True,
)
