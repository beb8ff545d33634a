"""A tier of the prefix cache in the host's memory: what the device evicts goes there.

The scheduler decides; rings, copies and files are someone else's (`Transfers`, `DiskPages`).
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
"""The most pages of a group that are stored ahead of their eviction with a step, beside as many as
the step before computed. So much delays a step by tens of microseconds."""


@dataclass(frozen=True, kw_only=True)
class TierParts:
    """What a tier is made of."""

    config: HostTierConfig
    copier: Copier
    disk: Disk | None = None
    observer: TierObserver = field(default_factory=NoObserver)


class TierUsage(NamedTuple):
    """Host slots, and who waits."""

    total: int
    filled: int
    arriving: int
    """Reserved for pages on their way to them."""
    pinned: int
    """Read by copies that are begun or due."""
    loading: int
    """Sequences that wait for pages."""


class HostTier:
    """Stores pages and loads them again.

    **Stores.** A page is copied to the host when the device allocates it again, in time before the
    next plan overwrites it, or ahead of that: as fast as pages are computed, because a long prompt
    evicts more at once than the store ring holds. What the host has already is not copied again. A
    page that finds no ring slot or host slot is lost, and counted. A snapshot of recurrent state
    goes down in pieces when it makes room (`StatePieces`), and comes back behind the pages before
    it.

    **Loads** (`Loads`). A waiting sequence whose prefix goes on in the host waits for it, while
    others pass, if that takes less time than computing it.

    **Order.** Moves are launched twice in a turn: before a step what its plan evicts, and behind it
    what `advance` found, first what comes back, then what leaves ahead (`PageMoves`). A page that
    comes back is published when it is launched, as if the step before it computed it.
    """

    def __init__(self, parts: TierParts, kv_cache: KVCacheManager, clock: Callable[[], float]):
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
            observer=parts.observer,
        )
        self._prefetch = Prefetch(self.index, self._disk, self._loads)
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        """Pages of the host that the disk has not been given yet."""
        self._computed = 0
        """Tokens of the last plan."""
        self._clean = [-1] * len(self._groups)
        """`PagePool.turnover` when nothing of the lookahead was left to store."""
        self._stored_ahead: list[dict[int, bytes]] = [{} for _ in self._groups]
        """By page: what was stored ahead of its eviction. It is not stored again where the host has
        lost it since, because others may be lost for it in turn."""
        for group in self._groups:
            group.pool.on_evict.append(functools.partial(self._evicted, group))
        kv_cache.lower = self

    @property
    def busy(self) -> bool:
        """Something is on its way or to be stored: `advance` is due even if no step is."""
        if self._transfers.busy or self._disk.busy or len(self._loads) > 0:
            return True
        return any(group.pool.turnover != self._clean[group.number] for group in self._groups)

    def usage(self) -> TierUsage:
        """Returns the state of the host slots. Callable from any thread."""
        index = self.index
        slots = index.num_slots, len(index), index.num_reserved, index.num_pinned
        return TierUsage(*slots, self._loads.num_waiting)

    # Once per turn: the plan, take, launched, the step, advance, take, launched.

    def advance(self) -> bool:
        """Go on with what has ended. Returns whether sequences wait no longer."""
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
        """A plan computes so many tokens."""
        self._computed = tokens

    def take(self) -> PageMoves | None:
        """Returns what to launch before the next step; then call `launched`."""
        return self._transfers.take()

    def launched(self, is_done: Callable[[], bool]) -> None:
        """What was taken is launched. `is_done` tells, without waiting, whether it has run."""
        self._transfers.launched(is_done)

    # Loads.

    def begin(self, seq: Sequence, cached: int, prefill_rate: float | None) -> bool:
        """See `Loads.begin`."""
        return self._loads.begin(seq, cached, prefill_rate)

    def look_ahead(self, waiting: Iterator[Sequence], prefill_rate: float | None) -> None:
        """Read pages of the first sequences that a plan has left in the queue from disk."""
        if self._disk.exists:
            self._prefetch.look(itertools.islice(waiting, SEQUENCES), prefill_rate)

    @property
    def decision(self) -> Decision | None:
        """Why the last prefix that was found below the device was loaded, or was not."""
        return self._loads.decision

    def leave(self, seq: Sequence) -> None:
        """A sequence that waits for a load has ended."""
        self._loads.leave(seq)

    def cancel_newest(self) -> bool:
        """Give up a load for its pages. Returns False if there is none."""
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
        """Store the pieces that the host lacks, if all of them find room."""
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
        """Store a page of a group. Returns why not."""
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
        """Write what has no file yet, in the order in which it came: a prefix with a hole is worth
        nothing. What the host has lost meanwhile is left out."""
        while self._unwritten and self._disk.can_write:
            key, _ = self._unwritten.popitem(last=False)
            if key in self.index and not self._disk.contains(key):
                slot = self.index.pin(key)
                self._disk.write(key, slot, functools.partial(self._written, slot))

    def _written(self, slot: int, error: str | None) -> None:
        self.index.unpin(slot)

    def _store_ahead(self, group: GroupPages, most: int) -> None:
        """Store up to `most` of the pages that will be evicted next. They may take the whole ring:
        what is evicted before it has room again would be next."""
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
                    break  # the host is full of pages in use
                room -= 1
            done[page] = content
        self._clean[group.number] = pool.turnover

    # The device.

    def forget(self) -> None:
        """Drop all pages, and those on their way."""
        self.index.clear()
        self._unwritten.clear()
        for done in self._stored_ahead:
            done.clear()
        self._loads.cancel_all("forgotten")
        self._prefetch.forget()
        self._disk.forget()

    def failed(self) -> None:
        """The device has lost what was on its way. What has arrived on the host is kept."""
        self._transfers.failed()
        self._loads.cancel_all("device")

    def check(self) -> None:
        """AssertionError if the accounts are inconsistent."""
        self.index.check()
        self._transfers.check()
        if not self.busy:
            assert not self.index.num_pinned and not self.index.num_reserved, "a slot is lost"
            for ring in (self._transfers.store_ring, self._transfers.load_ring):
                count = ring.count * len(self._config.page_bytes)
                assert len(ring.all_free()) == count, "a ring slot is lost"
