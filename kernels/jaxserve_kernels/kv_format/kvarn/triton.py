"""KVarN on a GPU: which kernels run in which order.

In a decode step keys and values go straight to the slot's sink or tail, and what they fill is
encoded once for all layers when the step ends. In a mixed step a chunk may fill several pages, so
each layer encodes them from the step's own keys and values, before its attention, and keeps what is
left for the tails, after it.
"""

from __future__ import annotations

from jax import Array

from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn import triton_attention
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.kv_format.kvarn.triton_encode import encode_filled, keep_raw
from jaxserve_kernels.kv_format.kvarn.triton_inputs import inputs


def attend(
    qkv: Array,
    kv: KVarNKV,
    layer: int,
    norms: tuple[Array, Array],
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    tile_size: int,
) -> tuple[Array, KVarNKV]:
    decode = _decodes(step, tile_size)
    q, kv, fresh = inputs(qkv, kv, layer, norms, tables, step, eps=eps, keep=decode)
    if fresh is not None:
        kv = encode_filled(kv, layer, 1, fresh, step)
    out = triton_attention.attend(q, kv, layer, fresh, step, tile_size=tile_size)
    if fresh is not None:
        kv = keep_raw(kv, layer, fresh, step)
    return out, kv


def end_step(kv: KVarNKV, step: AttentionStep, *, tile_size: int) -> KVarNKV:
    if not _decodes(step, tile_size):
        return kv
    return encode_filled(kv, 0, kv.raw.shape[0], None, step)


def _decodes(step: AttentionStep, tile_size: int) -> bool:
    """Whether every token of the step is a sequence of its own: so it is in decode buckets."""
    return tile_size == 1 and step.tiles.first.shape[0] == step.positions.shape[0]
