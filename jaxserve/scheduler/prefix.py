"""Names of what full pages hold, so that sequences with equal prefixes share them.

A page's hash is the SHA-256 of the hash of the page before it and of its own tokens; the first
page follows a root that stands for everything else that keys and values depend on. So equal
hashes mean equal prefixes from position 0 on, and sequences with different roots never meet.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root(*parts: str) -> bytes:
    """The hash that the first page follows; different for different parts."""
    state = sha256()
    for part in parts:
        encoded = part.encode()
        state.update(b"%d:" % len(encoded))
        state.update(encoded)
    return state.digest()


def page_hashes(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Hashes of the full pages of `tokens`, of which the first follows `parent`."""
    words = array("i", tokens)
    encoded, size = memoryview(words.tobytes()), page_size * words.itemsize
    hashes: list[bytes] = []
    for start in range(0, len(encoded) - size + 1, size):
        parent = sha256(parent + encoded[start : start + size]).digest()
        hashes.append(parent)
    return hashes
