"""The tier of the prefix cache in host memory: stores pages that the device evicts.

This module decides. `Transfers` and `DiskPages` own rings, copies and files.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.config import HostTierConfig
from jaxserve.offload.index import HostIndex, Reservation
from jaxserve.plan import PageMoves
from jaxserve.scheduler.disk_pages import Disk, DiskPages
from jaxserve.scheduler.group_pages import GroupPages
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.load import key_of
from jaxserve.scheduler.load_rates import Decision
from jaxserve.scheduler.loading import Loads
from jaxserve.scheduler.prefetch import SEQUENCES, Prefetch
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.state_pieces import StatePieces
from jaxserve.scheduler.tier_observer import NoObserver, TierObserver
from jaxserve.scheduler.transfers import Copier, Transfers

_AHEAD_EACH_TURN = 8
"""The most pages of a group that one step stores ahead of eviction, besides the number that the
previous step computed. This many delay a step by tens of microseconds."""


@dataclass(frozen=True, kw_only=True)
class TierParts:
    """The components of a host tier."""

    config: HostTierConfig
    copier: Copier
    disk: Disk | None = None
    observer: TierObserver = field(default_factory=NoObserver)


class TierUsage(NamedTuple):
    """The state of the host slots, and the number of waiting sequences."""

    total: int
    filled: int
    arriving: int
    """Slots reserved for pages in flight to the host."""
    pinned: int
    """Slots that a copy reads now or will read."""
    loading: int
    """Sequences that wait for pages."""


class HostTier:
    """Stores evicted pages in host memory and loads them back.

    **Stores.** A page is copied to the host at the latest when the device allocates it again,
    before the next plan overwrites it. Pages are also stored ahead of eviction, as fast as new
    pages are computed, because a long prompt evicts more pages at once than the store ring holds. A
    page that the host already has is not copied again. A page without a free ring slot or host slot
    is lost, and counted. A snapshot of recurrent state is stored in pieces when it is evicted
    (`StatePieces`). It is loaded after the pages before it.

    **Loads** (`Loads`). If the host has the continuation of a waiting sequence's prefix, and
    loading takes less time than computing, the sequence waits for the load. Other sequences may
    pass it. While others run, a load may have to wait for its turn (`LoadPace`).

    **Order.** Moves are launched twice per turn (`PageMoves`). Before a step come the stores that
    its plan needs. After the launch come the moves of `advance`: first loads, then stores ahead of
    eviction. A loaded page is published when its move is launched, as if the step before had
    computed it.
    """

    def __init__(
        self,
        parts: TierParts,
        kv_cache: KVCacheManager,
        clock: Callable[[], float],
        others_run: Callable[[], bool],
    ):
        """`clock` returns seconds, `others_run` whether any sequence runs."""
        config = self._config = parts.config
        self._observer, self._groups = parts.observer, kv_cache.groups
        self._page_size = kv_cache.page_size
        self.index = HostIndex(config.slots)
        self._disk = DiskPages(parts.disk)
        self._pieces = None
        if kv_cache.snapshots is not None and config.state_pieces:
            number = len(self._groups)
            self._pieces = StatePieces(kv_cache.snapshots, number=number, count=config.state_pieces)
            kv_cache.snapshots.on_evict.append(self._snapshot_evicted)
        self._transfers = Transfers(
            parts.copier,
            len(config.page_bytes),
            store_slots=config.store_ring,
            load_slots=config.load_ring,
        )
        self._loads = Loads(
            config,
            kv_cache,
            self.index,
            self._transfers,
            self._disk,
            self._pieces,
            clock=clock,
            others_run=others_run,
            observer=parts.observer,
        )
        self._prefetch = Prefetch(self.index, self._disk, self._loads)
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        """Keys of pages on the host that were not yet given to the disk."""
        self._computed = 0
        """Tokens of the last plan."""
        self._clean = [-1] * len(self._groups)
        """`PagePool.turnover` at the time when all pages of the lookahead were stored."""
        self._stored_ahead: list[dict[int, bytes]] = [{} for _ in self._groups]
        """By page: the content that was stored ahead of eviction. It is not stored again if the
        host has evicted it since, because that could evict other pages in turn."""
        for group in self._groups:
            group.pool.on_evict.append(functools.partial(self._evicted, group))
        kv_cache.lower = self

    @property
    def busy(self) -> bool:
        """Whether pages are in flight or wait to be stored. Then `advance` is due even without a
        step."""
        if self._transfers.busy or self._disk.busy or len(self._loads) > 0:
            return True
        return any(group.pool.turnover != self._clean[group.number] for group in self._groups)

    def usage(self) -> TierUsage:
        """Returns the state of the host slots. Callable from any thread."""
        index = self.index
        slots = index.num_slots, len(index), index.num_reserved, index.num_pinned
        return TierUsage(*slots, self._loads.num_waiting)

    # Calls per turn: plan, take, launched, the step, advance, take, launched.

    def advance(self) -> bool:
        """Handles moves that have ended. Returns whether some sequences have stopped waiting."""
        self._transfers.advance()
        self._disk.advance()
        self._prefetch.advance()
        self._write()
        over = self._loads.advance()
        most = _AHEAD_EACH_TURN + -(-self._computed // self._page_size)
        for group in self._groups:
            self._store_ahead(group, most)
        return over

    def planned(self, tokens: int) -> None:
        """Reports the number of tokens that a plan computes."""
        self._computed = tokens

    def take(self) -> PageMoves | None:
        """Returns the moves to launch before the next step; then call `launched`."""
        return self._transfers.take()

    def launched(self, is_done: Callable[[], bool]) -> None:
        """Reports that the moves of `take` are launched. `is_done` returns at once whether they
        have run."""
        self._transfers.launched(is_done)

    # Loads.

    def begin(self, seq: Sequence, cached: int, prefill_rate: float | None) -> bool:
        """See `Loads.begin`."""
        return self._loads.begin(seq, cached, prefill_rate)

    def look_ahead(self, waiting: Iterator[Sequence], prefill_rate: float | None) -> None:
        """Reads pages from disk for the first sequences that remain in the queue after a plan."""
        if self._disk.exists:
            self._prefetch.look(itertools.islice(waiting, SEQUENCES), prefill_rate)

    @property
    def decision(self) -> Decision | None:
        """Why the last prefix found below the device was loaded or not loaded."""
        return self._loads.decision

    def leave(self, seq: Sequence) -> None:
        """Reports that a sequence that waits for a load has ended."""
        self._loads.leave(seq)

    def cancel_newest(self) -> bool:
        """Gives up the newest load to free its pages. Returns False if there is none."""
        return self._loads.cancel_newest()

    # Stores.

    def _evicted(self, group: GroupPages, page: int, content: bytes) -> None:
        key = key_of(group.number, content)
        if key in self.index:
            self.index.renew(key)
        elif not self.index.has(key):
            cause = self._store(group.number, page, key)
            if cause:
                self._observer.tier_skipped(cause)

    def _snapshot_evicted(self, slot: int, content: bytes) -> None:
        """Stores the pieces of a snapshot that the host lacks, if there is room for all of them."""
        assert self._pieces is not None
        pairs = list(zip(self._pieces.pieces(slot), self._pieces.keys(content), strict=True))
        for _, key in pairs:
            if key in self.index:
                self.index.renew(key)
        new = [(piece, key) for piece, key in pairs if not self.index.has(key)]
        number = self._pieces.number
        cause: str | None = None
        if self._transfers.store_ring.num_free(number) < len(new):
            cause, new = "ring full", []
        for piece, key in new:
            if cause := self._store(number, piece, key):
                break
        if cause:
            self._observer.tier_skipped(cause)

    def _store(self, group: int, page: int, key: bytes) -> str | None:
        """Stores a page of a group. Returns the reason if it cannot, else None."""
        if not self._transfers.store_ring.num_free(group):
            return "ring full"
        reservation = self.index.reserve(key)
        if reservation is None:
            return "host full"
        stored = functools.partial(self._stored, group, reservation)
        self._transfers.store(page, group, reservation.slot, stored)
        return None

    def _stored(self, group: int, reservation: Reservation, error: str | None) -> None:
        if error is not None:
            self.index.release(reservation)
            self._observer.tier_skipped("copy")
        elif self.index.fill(reservation):
            self._observer.tier_stored(self._config.page_bytes[group])
            self._unwritten[reservation.key] = None
            if len(self._unwritten) > self.index.num_slots:
                self._unwritten.popitem(last=False)
            self._write()

    def _write(self) -> None:
        """Writes pages to disk in the order in which they came to the host, because a prefix with a
        gap is worthless. Skips pages that the host has evicted meanwhile."""
        while self._unwritten and self._disk.can_write:
            key, _ = self._unwritten.popitem(last=False)
            if key in self.index and not self._disk.contains(key):
                slot = self.index.pin(key)
                self._disk.write(key, slot, functools.partial(self._written, slot))

    def _written(self, slot: int, error: str | None) -> None:
        self.index.unpin(slot)

    def _store_ahead(self, group: GroupPages, most: int) -> None:
        """Stores up to `most` of the pages that will be evicted next. They may take the whole ring:
        pages evicted before the ring has room again would be the next to store anyway."""
        pool = group.pool
        room = min(self._transfers.store_ring.num_free(group.number), most)
        if room <= 0 or self._clean[group.number] == pool.turnover:
            return
        done = self._stored_ahead[group.number]
        for page, content in pool.next_evicted(self._config.lookahead):
            if done.get(page) == content:
                continue
            key = key_of(group.number, content)
            if not self.index.has(key):
                if not room:
                    return
                if self._store(group.number, page, key):
                    break  # all host slots are in use
                room -= 1
            done[page] = content
        self._clean[group.number] = pool.turnover

    # The device.

    def forget(self) -> None:
        """Drops all pages, also those in flight."""
        self.index.clear()
        self._unwritten.clear()
        for done in self._stored_ahead:
            done.clear()
        self._loads.cancel_all("forgotten")
        self._prefetch.forget()
        self._disk.forget()

    def failed(self) -> None:
        """Reports that the device has lost the pages in flight. Pages that have arrived on the host
        stay."""
        self._transfers.failed()
        self._loads.cancel_all("device")

    def check(self) -> None:
        """Raises AssertionError if the accounts are inconsistent."""
        self.index.check()
        self._transfers.check()
        if not self.busy:
            assert not self.index.num_pinned and not self.index.num_reserved, "a slot is lost"
            for ring in (self._transfers.store_ring, self._transfers.load_ring):
                count = ring.count * len(self._config.page_bytes)
                assert len(ring.all_free()) == count, "a ring slot is lost"
