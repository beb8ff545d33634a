"""The schema of KV cache events as vLLM 0.33 has it, with nothing else allowed."""

from __future__ import annotations

from typing import Any

import msgspec


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    """SGLang's."""


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    pass


class StoredArray(
    BlockStored, tag="BlockStored", array_like=True, forbid_unknown_fields=True, frozen=True
):
    pass


class RemovedArray(
    BlockRemoved, tag="BlockRemoved", array_like=True, forbid_unknown_fields=True, frozen=True
):
    pass


class ClearedArray(
    AllBlocksCleared,
    tag="AllBlocksCleared",
    array_like=True,
    forbid_unknown_fields=True,
    frozen=True,
):
    pass


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class ArrayBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int


type Event = BlockStored | BlockRemoved | AllBlocksCleared

_MAPS, _ARRAYS = msgspec.msgpack.Decoder(Batch), msgspec.msgpack.Decoder(ArrayBatch)


def decode(payload: bytes, *, array: bool = False) -> list[Event]:
    """The events of a batch. ValidationError: it is not exactly in the schema."""
    batch = (_ARRAYS if array else _MAPS).decode(payload)
    assert batch.data_parallel_rank == 0 and batch.ts > 1.7e9
    return list(batch.events)
