"""The bytes of events, against bytes written by hand and the strict schema of vLLM 0.33."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.kv_events.events import CacheEvent, Cleared, Removed, Stored
from jaxserve.kv_events.wire import encode, number_of
from jaxserve.scheduler.prefix import page_hashes, root
from tests.kv_events.wire_schema import AllBlocksCleared, BlockRemoved, BlockStored, decode

FIRST, SECOND = b"\0" * 24 + b"\xff" * 8, b"\1" * 24 + b"\0" * 7 + b"\7"
STORED = Stored([FIRST, SECOND], None, [1, 2, 3, 300], 0, 2, "salt", None, None)
PLAIN = Stored([SECOND], FIRST, [0, 0, 3, 151_000], 2, 2, "", None, None)
WINDOWED = Stored([SECOND], FIRST, [3, 4], 0, 2, "", 1, 512)
REMOVED = Removed([SECOND], None)
TIME = 1_800_000_000.5
HEAD = b"\x93\xcb\x41\xda\xd2\x74\x80\x20\x00\x00"
"""An array of three that begins with TIME."""


def text(value: str) -> bytes:
    return bytes([0xA0 + len(value)]) + value.encode()


def test_an_array_is_these_bytes() -> None:
    assert encode(TIME, [STORED, REMOVED, Cleared()], array=True) == (
        HEAD
        + b"\x93"
        + (b"\x9c" + text("BlockStored"))
        + (b"\x92\xcf" + b"\xff" * 8 + b"\x07")  # the largest 64-bit number, and 7
        + b"\xc0"  # no parent
        + b"\x94\x01\x02\x03\xcd\x01\x2c"
        + b"\x02"
        + (b"\xc0" + text("GPU") + b"\xc0")
        + (b"\x92\x91" + text("salt") + b"\xc0")
        + b"\xc0\xc0\xc0"  # no group
        + (b"\x94" + text("BlockRemoved") + b"\x91\x07" + text("GPU") + b"\xc0")
        + (b"\x91" + text("AllBlocksCleared"))
        + b"\x00"
    )


def test_a_map_is_these_bytes() -> None:
    assert encode(TIME, [PLAIN, REMOVED, Cleared()], array=False) == (
        HEAD
        + b"\x93"
        + (b"\x88" + text("type") + text("BlockStored"))
        + (text("block_hashes") + b"\x91\x07")
        + (text("parent_block_hash") + b"\xcf" + b"\xff" * 8)
        + (text("token_ids") + b"\x92\x03\xce\x00\x02\x4d\xd8")
        + (text("block_size") + b"\x02")
        + (text("lora_id") + b"\xc0")
        + (text("medium") + text("GPU"))
        + (text("lora_name") + b"\xc0")
        + (b"\x83" + text("type") + text("BlockRemoved"))
        + (text("block_hashes") + b"\x91\x07" + text("medium") + text("GPU"))
        + (b"\x81" + text("type") + text("AllBlocksCleared"))
        + b"\x00"
    )


@pytest.mark.parametrize("array", [False, True])
def test_both_forms_have_what_the_schema_has(array: bool) -> None:
    events: list[CacheEvent] = [STORED, WINDOWED, Removed([FIRST, SECOND], 1), Cleared()]
    stored, windowed, removed, cleared = decode(encode(TIME, events, array=array), array=array)
    assert isinstance(stored, BlockStored) and isinstance(windowed, BlockStored)
    fields = {
        "block_hashes": [2**64 - 1, 7],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 300],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [("salt",), None],
        "group_idx": None,
        "kv_cache_spec_kind": None,
        "kv_cache_spec_sliding_window": None,
        "cache_salt": None if array else "salt",
    }
    assert {name: getattr(stored, name) for name in stored.__struct_fields__} == fields
    assert (windowed.parent_block_hash, windowed.extra_keys) == (2**64 - 1, None)
    assert (windowed.group_idx, windowed.kv_cache_spec_kind) == (1, "sliding_window")
    assert windowed.kv_cache_spec_sliding_window == 512
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([2**64 - 1, 7], "GPU", 1)
    assert isinstance(cleared, AllBlocksCleared)


def test_only_the_first_page_of_a_prompt_has_the_salt_in_its_keys_and_every_event_beside() -> None:
    (stored,) = decode(encode(TIME, [STORED._replace(parent=SECOND)], array=False))
    assert isinstance(stored, BlockStored)
    assert (stored.extra_keys, stored.cache_salt) == (None, "salt")


def test_a_full_group_beside_others_says_so() -> None:
    (stored,) = decode(encode(TIME, [PLAIN._replace(group=0)], array=False))
    assert isinstance(stored, BlockStored)
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, "full_attention")
    assert stored.kv_cache_spec_sliding_window is None


def test_an_empty_batch_still_has_its_rank() -> None:
    """Dynamo drops batches without one."""
    assert encode(TIME, [], array=False) == HEAD + b"\x90\x00"


def test_the_schema_of_these_tests_is_strict() -> None:
    batch = msgspec.msgpack.encode([TIME, [{"type": "AllBlocksCleared", "more": 1}], 0])
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        decode(batch)


def test_a_page_s_name_is_the_low_64_bits_of_its_hash() -> None:
    (content,) = page_hashes(root("model", ""), (1, 2), 2)
    assert number_of(content) == int(content.hex()[-16:], 16) >= 0
