"""KVarN on a GPU: the order of the kernels.

In a decode step keys and values go directly to the slot's sink or tail. Filled pages are encoded
when the step ends, in all layers at once. In a mixed step a chunk may fill several pages. Each
layer encodes them from the step's own keys and values, and expands the contexts of its chunks. Then
it stores the remaining tokens in sinks and tails, from which rows of one token read.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn import triton_attention, triton_expand
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.kvarn.triton_encode import encode_filled, keep_raw
from jaxserve_kernels.kv_format.kvarn.triton_inputs import inputs
from jaxserve_kernels.target import Target


def attend(
    qkv: Array,
    kv: KVarNKV,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
    dtype: DTypeLike,
    target: Target,
) -> tuple[Array, KVarNKV]:
    """See `kv_format.attend`. Single tokens attend to encoded pages; `end_step` encodes the pages
    that they fill. Pages of chunks are encoded first, and then expanded for attention."""
    decodes = tile_size == 1  # each token belongs to another sequence
    q, kv, fresh = inputs(
        qkv, kv, layer, heads, tables, step, eps=eps, keep=decodes, dtype=dtype, target=target
    )
    if fresh is None:
        tiles = step.tiles.in_one_list()
        return triton_attention.attend(q, kv, layer, step.page_table, tiles, target=target), kv
    kv = encode_filled(kv, layer, 1, fresh, step, target=target)
    result, kv = triton_expand.attend(q, kv, layer, fresh, step, tile_size=tile_size, target=target)
    kv = keep_raw(kv, layer, fresh, step, target=target)
    if step.tiles.decode_rows is None:
        return result, kv
    out = jax.new_ref(result)
    triton_attention.attend_decode_rows(
        q, kv, layer, step.page_table, step.tiles.decode_rows, out, target=target
    )
    return jax.freeze(out), kv


def end_step(kv: KVarNKV, step: AttentionStep, *, tile_size: int, target: Target) -> KVarNKV:
    """See `kv_format.end_step`. Encodes the pages that single tokens have filled, in all layers."""
    if tile_size > 1:
        return kv
    return encode_filled(kv, 0, kv.raw.shape[0], None, step, target=target)
