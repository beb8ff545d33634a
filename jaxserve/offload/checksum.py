"""The checksum of a page: 64-bit XXH3. It detects damage, not attacks."""

from __future__ import annotations

from collections.abc import Buffer

import xxhash


def checksum(page: Buffer) -> int:
    """Returns the XXH3 of a page's bytes, 0 to 2**64 - 1. Releases the interpreter lock."""
    return xxhash.xxh3_64_intdigest(page)
