"""The bytes of a batch of events: msgpack in the schema of vLLM 0.33.

A batch is an array: Unix time in seconds, events, and the data-parallel rank, which is 0. An event
is a map with its kind under `type`, or an array that begins with the kind. Routers treat hashes as
opaque names and hash the token ids themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.kv_events.events import CacheEvent, Cleared, Removed, Stored

MEDIUM = "GPU"
"""Location of pages. Routers treat other media as slower tiers, so a CPU device also says GPU."""


class _Stored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None] | None = None
    """Per page, what its hash covers besides tokens: the salt, for the first page of a prompt."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _SaltedStored(_Stored, tag="BlockStored"):
    cache_salt: str | None = None
    """SGLang's field, which Dynamo reads. The array encoding has no place for it."""


class _StoredArray(_Stored, array_like=True, tag="BlockStored"): ...


class _Removed(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"): ...


class _Cleared(msgspec.Struct, gc=False, tag="AllBlocksCleared"): ...


class _ClearedArray(_Cleared, array_like=True, tag="AllBlocksCleared"): ...


_ENCODER = msgspec.msgpack.Encoder()


def encode(timestamp: float, events: Sequence[CacheEvent], *, array: bool) -> bytes:
    """Returns the payload of a batch.

    Args:
      timestamp: Unix time in seconds.
      array: encode events by position instead of by name.
    """
    return _ENCODER.encode((timestamp, [_wire(event, array=array) for event in events], 0))


def _wire(event: CacheEvent, *, array: bool) -> msgspec.Struct:
    match event:
        case Stored():
            return _stored(event, array=array)
        case Removed(hashes, group):
            kind = _RemovedArray if array else _Removed
            return kind([number_of(each) for each in hashes], MEDIUM, group)
        case Cleared():
            return (_ClearedArray if array else _Cleared)()


def _stored(event: Stored, *, array: bool) -> msgspec.Struct:
    salt, count = event.salt or None, len(event.hashes)
    keys: list[list[str] | None] | None = None
    if salt and event.parent is None:
        keys = [[salt], *[None] * (count - 1)]
    values: dict[str, Any] = {
        "block_hashes": [number_of(each) for each in event.hashes],
        "parent_block_hash": None if event.parent is None else number_of(event.parent),
        "token_ids": event.tokens,
        "block_size": event.page_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
        "extra_keys": keys,
    }
    if event.group is not None:
        values["group_idx"] = event.group
        kind = "full_attention" if event.window is None else "sliding_window"
        values["kv_cache_spec_kind"] = kind
        values["kv_cache_spec_sliding_window"] = event.window
    return _StoredArray(**values) if array else _SaltedStored(**values, cache_salt=salt)


def number_of(content: bytes) -> int:
    """Returns the public name of a page: the low 64 bits of its hash, unsigned."""
    return int.from_bytes(content[-8:], "big")
