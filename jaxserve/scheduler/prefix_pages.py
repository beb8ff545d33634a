"""Finds where the pages of a prefix are, on the device or in lower tiers, and holds those of the
device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxserve.config import HostTierConfig
from jaxserve.offload.index import HostIndex
from jaxserve.scheduler.disk_pages import DiskPages
from jaxserve.scheduler.group_pages import GroupPages
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.load import key_of
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.state_pieces import StatePieces

type MissingPage = tuple[GroupPages | StatePieces, int, bytes]
"""Group, number and key of a page that the device lacks. The group of a piece of a snapshot is
`StatePieces`."""


class Found(NamedTuple):
    """A prefix, and its pages that the device lacks."""

    hashes: list[bytes]
    """Hashes of all pages up to the end of the prefix."""
    missing: list[MissingPage]
    """In order of numbers, and then the pieces of the snapshot after them."""
    keys: frozenset[bytes]
    """Keys of the missing pages."""
    host_bytes: int
    """Bytes of the missing pages."""
    disk_bytes: int
    """The part of `host_bytes` that host memory lacks."""


class PrefixPages:
    """Looks up the pages of prefixes."""

    def __init__(
        self,
        config: HostTierConfig,
        kv_cache: KVCacheManager,
        index: HostIndex,
        disk: DiskPages,
        pieces: StatePieces | None,
        is_loading: Callable[[bytes], bool],
    ):
        """`is_loading` returns whether a load in flight brings the page of a key."""
        self._page_bytes, self._kv_cache = config.page_bytes, kv_cache
        self._index, self._disk, self._pieces = index, disk, pieces
        self._is_loading = is_loading

    def has(self, group: GroupPages | None, content: bytes) -> bool:
        """Returns whether lower tiers have a page of a group, or a snapshot (group None)."""
        if group is not None:
            return self._has_key(key_of(group.number, content))
        return self._pieces is not None and all(map(self._has_key, self._pieces.keys(content)))

    def has_in_memory(self, group: GroupPages | None, content: bytes) -> bool:
        """Returns whether host memory has a page of a group, or a snapshot (group None)."""
        if group is not None:
            return key_of(group.number, content) in self._index
        pieces = self._pieces
        return pieces is not None and all(key in self._index for key in pieces.keys(content))

    def _has_key(self, key: bytes) -> bool:
        return key in self._index or self._disk.contains(key) or self._is_loading(key)

    def found(self, seq: Sequence, count: int) -> Found:
        """Returns what the device lacks of the first `count` pages of a sequence."""
        hashes = seq.page_hashes(count, self._kv_cache.page_size)
        missing = list(self._missing(hashes))
        host = disk = 0
        for group, _, key in missing:
            host += self._page_bytes[group.number]
            if key not in self._index:
                disk += self._page_bytes[group.number]
        return Found(hashes, missing, frozenset(key for _, _, key in missing), host, disk)

    def _missing(self, hashes: list[bytes]) -> Iterable[MissingPage]:
        end = len(hashes) * self._kv_cache.page_size
        firsts = [(group, group.first_page(end)) for group in self._kv_cache.groups]
        for number, content in enumerate(hashes):
            for group, first in firsts:
                if number >= first and group.pool.page_of(content) is None:
                    yield group, number, key_of(group.number, content)
        pieces = self._pieces
        if pieces is not None and hashes and hashes[-1] not in pieces.snapshots:
            for key in pieces.keys(hashes[-1]):
                yield pieces, len(hashes) - 1, key

    def fits(self, found: Found) -> bool:
        """Returns whether all pages that a load would hold are free or held by others."""
        hashes, missing = found.hashes, found.missing
        if isinstance(missing[-1][0], StatePieces) and not missing[-1][0].snapshots.can_reserve:
            return False
        end = len(hashes) * self._kv_cache.page_size
        for group in self._kv_cache.groups:
            pages = map(group.pool.page_of, hashes[group.first_page(end) :])
            needed = sum(page is None or not group.pool.holders(page) for page in pages)
            if needed > group.pool.num_free:
                return False
        return True

    def hold(self, found: Found) -> list[dict[int, int]]:
        """Holds the pages that the device has, and allocates pages for the others. Returns the
        pages of each group by their numbers."""
        hashes, missing = found.hashes, found.missing
        end = len(hashes) * self._kv_cache.page_size
        tables: list[dict[int, int]] = []
        for group in self._kv_cache.groups:  # first, because allocating may evict these pages
            numbers = range(group.first_page(end), len(hashes))
            pages = {number: group.pool.page_of(hashes[number]) for number in numbers}
            there = {number: page for number, page in pages.items() if page is not None}
            group.hold(there.values())
            tables.append(there)
        for group, table in zip(self._kv_cache.groups, tables, strict=True):
            numbers = [number for of, number, _ in missing if of is group]
            table.update(zip(numbers, group.hold_new(len(numbers)), strict=True))
        return tables
