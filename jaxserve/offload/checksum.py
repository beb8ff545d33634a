"""The checksum of a page. Against damage, not against people: XXH3 with 64 bits."""

from __future__ import annotations

from collections.abc import Buffer

import xxhash


def checksum(page: Buffer) -> int:
    """Returns the XXH3 of a page's bytes, 0 to 2**64 - 1. Other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest(page)
