"""Content hashes of full pages, by which sequences with equal prefixes share pages.

The hash of a page is the SHA-256 of the previous page's hash and the page's own tokens. The first
page follows a root hash, which covers everything else that keys and values depend on. So equal
hashes mean equal prefixes from position 0, and sequences with different roots share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct

_WORD = 4
"""Bytes per token."""


def root(*parts: str) -> bytes:
    """Returns the hash that precedes the first page. Different parts give different roots."""
    state = sha256()
    for part in parts:
        encoded = part.encode()
        state.update(b"%d:" % len(encoded))
        state.update(encoded)
    return state.digest()


def page_hashes(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Returns the hashes of the full pages of `tokens`; the first page follows `parent`."""
    words = Struct(f"{len(tokens)}i")  # takes two thirds of the time of an array
    encoded, size = memoryview(words.pack(*tokens)), page_size * _WORD
    hashes: list[bytes] = []
    for start in range(0, len(encoded) - size + 1, size):
        parent = sha256(parent + encoded[start : start + size]).digest()
        hashes.append(parent)
    return hashes
