"""The 8-bit formats: their arrays, and which implementation runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format.base import AttentionStep, CacheShape, zeros
from jaxserve_kernels.kv_format.eight_bit import reference
from jaxserve_kernels.kv_format.eight_bit.reference import Fp8KV, Int8KV
from jaxserve_kernels.op import NO_KERNELS, Implementation, Op, anything, on_kernels
from jaxserve_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class Int8:
    """int8 with a scale per token and head."""

    name: str = "int8"
    page_size: int | None = None

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> Int8KV:
        words = _words(shape)
        return Int8KV(words, _floats(words.shape[:-1]))

    def allocate(self, shape: CacheShape, dtype: DTypeLike) -> Int8KV:
        return zeros(self.abstract(shape, dtype))


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """fp8 e4m3 with a scale per layer, head and kind: 1 until others are set."""

    name: str = "fp8_e4m3"
    page_size: int | None = None

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> Fp8KV:
        return Fp8KV(_words(shape), _floats((shape.layers, shape.kv_heads, 2)))

    def allocate(self, shape: CacheShape, dtype: DTypeLike) -> Fp8KV:
        empty = zeros(self.abstract(shape, dtype))
        return empty._replace(scales=jnp.ones_like(empty.scales))


def _words(shape: CacheShape) -> Any:
    dims = (shape.layers, shape.pages, shape.kv_heads, 2, shape.page_size, shape.head_dim // 2)
    return jax.ShapeDtypeStruct(dims, jnp.int16)


def _floats(dims: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def attend[Cache: Int8KV | Fp8KV](
    qkv: Array,
    kv: Cache,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
    dtype: DTypeLike,
    window: int | None = None,
    target: Target,
) -> tuple[Array, Cache]:
    """See `kv_format.attend`."""
    return _OP(
        qkv, kv, heads, tables, step,
        layer=layer, eps=eps, tile_size=tile_size, dtype=jnp.dtype(dtype), window=window,
        target=target,
    )  # fmt: skip


def _streams(
    qkv: Array, kv: Any, heads: Any, tables: Any, step: AttentionStep, *,
    tile_size: int, dtype: Any, target: Target, **_: Any,
) -> Any:  # fmt: skip
    if not target.uses_triton():
        return NO_KERNELS
    from jaxserve_kernels.kv_format.eight_bit import triton  # needs Triton: only for GPUs

    return triton.streams(qkv, kv, step, tile_size=tile_size, dtype=dtype, target=target)


def _stream(
    config: Any,
    qkv: Array,
    kv: Any,
    *rest: Any,
    layer: int,
    eps: float,
    window: int | None,
    target: Target,
    **_: Any,
) -> Any:
    from jaxserve_kernels.kv_format.eight_bit import triton

    heads, tables, step = rest
    return triton.stream(
        qkv, kv, layer, heads, tables, step, config, eps=eps, window=window, target=target
    )


def _kernels(_: None, qkv: Array, kv: Any, *rest: Any, layer: int, **options: Any) -> Any:
    from jaxserve_kernels.kv_format.eight_bit import triton

    return triton.attend(qkv, kv, layer, *rest, **options)


def _definition(_: None, qkv: Array, kv: Any, *rest: Any, layer: int, **options: Any) -> Any:
    return reference.attend(qkv, kv, layer, *rest, **options)


_OP = Op(
    name="attention_8_bit",
    implementations=(
        Implementation(name="triton_warps, with its inputs", configure=_streams, run=_stream),
        Implementation(name="triton", configure=on_kernels, run=_kernels),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda qkv, *_, tile_size, **__: f"tokens of {qkv.shape[-1]}, tiles of {tile_size}",
    per_layer=True,
)
