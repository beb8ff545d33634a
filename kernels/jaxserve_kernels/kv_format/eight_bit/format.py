"""The 8-bit formats: their arrays, and which implementation runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxserve_kernels.kv_format.base import AttentionStep, CacheShape
from jaxserve_kernels.kv_format.eight_bit import reference
from jaxserve_kernels.kv_format.eight_bit.reference import EightBitKV, Fp8KV, Int8KV
from jaxserve_kernels.kv_format.format import QuantizedKVFormat
from jaxserve_kernels.op import NO_KERNELS, Implementation, Op, anything, on_kernels
from jaxserve_kernels.target import Target


class _EightBit(QuantizedKVFormat):
    def tokens_per_page(self, kv: EightBitKV) -> int:
        return kv.words.shape[4]

    @property
    def attention(self) -> Op:
        return _OP


@dataclass(frozen=True, kw_only=True)
class Int8(_EightBit):
    """int8 with a scale per token and head."""

    arrays = Int8KV

    @property
    def name(self) -> str:
        return "int8"

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> Int8KV:
        words = _words(shape)
        return Int8KV(words, _floats(words.shape[:-1]))


@dataclass(frozen=True, kw_only=True)
class Fp8(_EightBit):
    """fp8 e4m3 with a scale per layer, head and kind (key or value). Scales are 1 until set."""

    arrays = Fp8KV
    has_scales = True

    @property
    def name(self) -> str:
        return "fp8_e4m3"

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> Fp8KV:
        return Fp8KV(_words(shape), _floats((shape.layers, shape.kv_heads, 2)))

    def allocate(self, shape: CacheShape, dtype: DTypeLike) -> Fp8KV:
        empty = super().allocate(shape, dtype)
        return empty._replace(scales=jnp.ones_like(empty.scales))

    def with_scales(self, kv: Fp8KV, scales: ArrayLike) -> Fp8KV:
        return kv._replace(scales=jnp.asarray(scales, jnp.float32))

    def largest_magnitudes(self, kv: Fp8KV) -> Array:
        return reference.largest_magnitudes(kv)


def _words(shape: CacheShape) -> Any:
    dims = (shape.layers, shape.pages, shape.kv_heads, 2, shape.page_size, shape.head_dim // 2)
    return jax.ShapeDtypeStruct(dims, jnp.int16)


def _floats(dims: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


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
