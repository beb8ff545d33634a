"""8-bit keys and values on a GPU: the order of the kernels.

The kernel that writes keys and values quantises them. Attention of single tokens dequantises them
on the fly. Prompt chunks attend to pages that another kernel has expanded before.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.typing import DTypeLike
from triton.experimental.gluon import language as gl

from jaxserve_kernels.attention_inputs import HeadWeights, KVSlots
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.eight_bit import triton_attention, triton_expand
from jaxserve_kernels.kv_format.eight_bit.reference import EightBitKV
from jaxserve_kernels.kv_format.eight_bit.triton_inputs import frozen, references, write
from jaxserve_kernels.kv_format.eight_bit.triton_numbers import numbers
from jaxserve_kernels.op import Refusal
from jaxserve_kernels.paged_attention import triton_warps
from jaxserve_kernels.paged_attention.config import Config
from jaxserve_kernels.paged_attention.triton_visits import FP8, INT8
from jaxserve_kernels.target import Target


def attend[Cache: EightBitKV](
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
    """See `kv_format.attend`. One kernel writes keys and values, others attend: those of chunks
    over expanded pages."""
    q, kv = write(qkv, kv, layer, heads, tables, step, eps=eps, dtype=dtype, target=target)
    if tile_size == 1:
        tiles = step.tiles.in_one_list()
        return triton_attention.attend(
            q, kv, layer, step.page_table, tiles, window=window, sinks=heads.sinks, target=target
        ), kv
    result = triton_expand.attend(
        q, kv, layer, step,
        tile_size=tile_size, window=window, sinks=heads.sinks, target=target,
    )  # fmt: skip
    if step.tiles.decode_rows is None:
        return result, kv
    out = jax.new_ref(result)
    triton_attention.attend_decode_rows(
        q, kv, layer, step.page_table, step.tiles.decode_rows, out,
        window=window, sinks=heads.sinks, target=target,
    )  # fmt: skip
    return jax.freeze(out), kv


def streams(
    qkv: Array, kv: EightBitKV, step: AttentionStep, *,
    tile_size: int, dtype: DTypeLike, target: Target,
) -> Config | Refusal:  # fmt: skip
    """The launch parameters of `stream`, or why it does not accept the arguments."""
    if tile_size > 1:
        return Refusal("the step has prompt chunks")
    if not numbers(dtype, kv, target=target)["FAST"]:
        return Refusal("the GPU has no instructions that convert these bytes")
    if not triton_warps.fits(qkv, kv.words, dtype):
        return Refusal("sizes of heads or pages are not supported")
    tiles = step.tiles.in_one_list().first.shape[0]
    return triton_warps.heuristic(
        tiles=tiles, kv_heads=kv.words.shape[2], kind=_kind(kv), target=target
    )


def _kind(kv: EightBitKV) -> gl.constexpr:
    return FP8 if kv.fp8 else INT8


def stream[Cache: EightBitKV](
    qkv: Array,
    kv: Cache,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    config: Config,
    *,
    eps: float,
    window: int | None = None,
    target: Target,
) -> tuple[Array, Cache]:
    """Attention of single tokens, with a kernel that also computes their queries, keys and
    values."""
    words, scales = references(kv)
    out = triton_warps.launch(
        qkv, words, scales, layer, heads, tables, KVSlots(step.pages, step.offsets),
        step.page_table, step.tiles.in_one_list(), config,
        eps=eps, kind=_kind(kv), window=window, target=target,
    )  # fmt: skip
    return out, frozen(kv, words, scales)
