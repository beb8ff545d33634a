"""Entries of the cache of compiled programs that cannot be read are compiled again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.programs.executable_cache import ExecutableCache, Unusable
from jaxserve.programs.executables import missing, obtain
from tests.programs.small_program import cache_at, check, entry, program


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) * 3 // 4
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def header_with(**changes: Any) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        head, _, payload = content.partition(b"\n")
        return json.dumps({**json.loads(head), **changes}).encode() + b"\n" + payload

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_bit, "checksum"),
        (lambda content: content[:-100], "bytes, its header says"),
        (lambda content: content[: content.index(b"\n")], "of another version|bytes"),
        (lambda content: content[:20], "no readable header"),
        (lambda content: b"", "no readable header"),
        (lambda content: b"\x80\x05garbage" * 1000, "no readable header"),
        (lambda content: content + b"more", "bytes, its header says"),
        (header_with(format="jaxserve executable 0"), "another version"),
        (header_with(key="0" * 64), "another version, device or configuration"),
        (header_with(sha256="0" * 64), "checksum"),
        (header_with(size=None), "bytes, its header says"),
        (lambda content: b"[" * 100_000 + b"\n", "no readable header"),
    ],
)
def test_a_damaged_entry_is_compiled_again_and_replaced(
    cache: ExecutableCache, damage: Callable[[bytes], bytes], reason: str
) -> None:
    entry(cache).write_bytes(damage(entry(cache).read_bytes()))
    with pytest.raises(Unusable, match=reason):
        cache.load(program())
    assert missing([program()], cache).keys() == {"double"}
    obtained = obtain([program()], cache, 1, lambda phase, done: None)
    assert obtained.compiled.keys() == {"double"}
    check(obtained.executables["double"])
    check(cache.load(program()))


def test_a_whole_file_that_does_not_unpickle_is_compiled_again(cache: ExecutableCache) -> None:
    """Checksums agree: written by something that is not us, or by another jax."""
    import hashlib

    payload = b"not a pickle"
    head = json.loads(entry(cache).read_bytes().partition(b"\n")[0])
    head |= {"size": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    entry(cache).write_bytes(json.dumps(head).encode() + b"\n" + payload)
    with pytest.raises(Unusable, match="cannot be loaded"):
        cache.load(program())
    check(obtain([program()], cache, 1, lambda phase, done: None).executables["double"])


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.timeout(30)
def test_a_manifest_that_is_no_file_says_nothing(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "older").mkdir()
    make(tmp_path / "older" / "manifest.json")
    cache = cache_at(tmp_path)
    assert cache.compile_seconds() == {}
    assert not cache.differences()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.timeout(30)
def test_an_entry_that_is_no_file_is_compiled_again(
    cache: ExecutableCache, make: Callable[[Path], None]
) -> None:
    """A folder cannot be replaced, so that its program is compiled at each start."""
    entry(cache).unlink()
    make(entry(cache))
    make(cache.folder / "triple.exe")
    with pytest.raises(Unusable, match="not a regular file"):
        cache.load(program())
    assert missing([program()], cache).keys() == {"double"}
    check(obtain([program()], cache, 1, lambda phase, done: None).executables["double"])
