"""8-bit keys and values on a GPU: which kernels run in which order.

Keys and values are quantised where they are written and dequantised inside attention, and chunks
see what is made of their pages beforehand.
"""

from __future__ import annotations

import jax
from jax import Array

from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.eight_bit import triton_streaming
from jaxserve_kernels.kv_format.eight_bit.reference import Fp8KV, Int8KV
from jaxserve_kernels.kv_format.eight_bit.triton_attention import read, read_some
from jaxserve_kernels.kv_format.eight_bit.triton_expand import read_chunks
from jaxserve_kernels.kv_format.eight_bit.triton_inputs import write


def attend[Cache: Int8KV | Fp8KV](
    qkv: Array,
    kv: Cache,
    layer: int,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
) -> tuple[Array, Cache]:
    if tile_size == 1 and qkv.shape[1] <= triton_streaming.MAX_TOKENS:
        return triton_streaming.attend(qkv, kv, layer, norms, tables, step, eps=eps)
    q, kv = write(qkv, kv, layer, norms, tables, step, eps=eps)
    if tile_size == 1:
        return read(q, kv, layer, step.page_table, step.tiles.in_one_list()), kv
    result = read_chunks(q, kv, layer, step, tile_size)
    if step.tiles.singles is None:
        return result, kv
    out = jax.new_ref(result)
    read_some(q, kv, layer, step.page_table, step.tiles.singles, out)
    return jax.freeze(out), kv
