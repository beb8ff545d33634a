"""Loads: bring pages back to the device while the sequences that need them wait."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from jaxserve.config import HostTierConfig
from jaxserve.offload.index import HostIndex
from jaxserve.scheduler.disk_pages import DiskPages
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.load import Load, LoadPage, State
from jaxserve.scheduler.load_pace import Asked, LoadPace
from jaxserve.scheduler.load_rates import Decision, LoadRates
from jaxserve.scheduler.prefix_pages import Found, PrefixPages
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.state_pieces import StatePieces
from jaxserve.scheduler.tier_observer import TierObserver
from jaxserve.scheduler.transfers import Transfers

log = logging.getLogger(__name__)

_MAX_WAITS = 4
"""The most loads that a sequence waits for. Then it computes the missing tokens. Otherwise a
sequence whose loaded pages are always evicted before its turn would wait for ever."""

_TIMEOUT, _TIMES_PREDICTED = 5.0, 20.0
"""A load is given up after this many seconds, or this many times its predicted duration."""


class Loads:
    """Begins loads, advances them, and ends them.

    A load holds the device pages on which its sequences will continue. It publishes loaded pages in
    order, as a sequence publishes computed pages. When it ends, for whatever reason, it holds
    nothing, and its sequences are admitted with the pages cached by then. So whatever a failed load
    did not bring is computed. Copies write only to rings, so the pages of a load that is given up
    are free at once.

    While other sequences run, loads wait for their turn to begin (`LoadPace`). A load that has not
    begun holds nothing.
    """

    def __init__(
        self,
        config: HostTierConfig,
        kv_cache: KVCacheManager,
        index: HostIndex,
        transfers: Transfers,
        disk: DiskPages,
        pieces: StatePieces | None = None,
        *,
        clock: Callable[[], float],
        others_run: Callable[[], bool],
        observer: TierObserver,
    ):
        """`clock` returns seconds. For `others_run` see `LoadPace`."""
        self._config, self._kv_cache, self._index = config, kv_cache, index
        self._transfers, self._disk, self._pieces = transfers, disk, pieces
        self._clock, self._observer = clock, observer
        self._loads: list[Load] = []
        self._prefixes = PrefixPages(config, kv_cache, index, disk, pieces, self._is_loading)
        self.pace = LoadPace(config.load_rate, clock=clock, others_run=others_run)
        self._news = False
        """Whether a load has ended since the last `advance` and freed its pages."""
        self._orphans = 0
        """Copies in flight of loads that have ended."""
        self.rates = LoadRates(config)
        self.decision: Decision | None = None
        """The most recent decision."""
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return len(self._loads) + len(self.pace)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for loads. Callable from any thread."""
        return sum(len(load.waiting) for load in list(self._loads)) + len(self.pace)

    def begin(self, seq: Sequence, cached: int, prefill_rate: float | None) -> bool:
        """Decides whether to load the continuation of a waiting sequence's cached prefix. If
        loading all of it does not pay, considers the part in memory. Returns whether the sequence
        must wait. The load starts in the next `advance` in which its turn has come: starting it
        here would delay the step.

        Args:
          cached: pages of the sequence that the device has.
          prefill_rate: tokens per second that a prefill would compute instead; None: unknown.
        """
        if seq.waits_for_loads >= _MAX_WAITS:
            return False
        found = self._look(seq, cached, prefill_rate)
        if found is None:
            return False
        seq.loading = True
        seq.waits_for_loads += 1
        self._ask(seq, prefill_rate, found)
        return True

    def _ask(
        self, seq: Sequence, rate: float | None, found: Load | Found, held: float | None = None
    ) -> None:
        if isinstance(found, Load):
            self.pace.ask(Asked(seq, rate, held=held))
        else:
            self.pace.ask(Asked(seq, rate, found.keys, found.host_bytes, held))

    def _start_asked(self, now: float) -> None:
        """Starts the loads whose turn has come, in order. Sequences that can join a load need no
        turn."""
        before = len(self._loads)
        for asked in self.pace.take():
            new = self._loads[before:]
            joins = not asked.keys or not all(asked.keys.isdisjoint(load.keys) for load in new)
            if joins or self.pace.is_open(now):
                self._start(asked, now)
            else:
                self.pace.hold(asked, now)

    def _start(self, asked: Asked, now: float) -> None:
        """Starts the load that `begin` decided on, or joins another one. If none is possible any
        more, the next plan handles the sequence."""
        seq, rate = asked.seq, asked.prefill_rate
        found = self._look(seq, self._kv_cache.cached_pages(seq).length, rate)
        if isinstance(found, Found) and not self.pace.is_open(now):
            self._ask(seq, rate, found, asked.held)  # the load that it wanted to join is over
            return
        if asked.held is not None:
            self._observer.tier_paced(now - asked.held)
        if found is None:
            seq.loading, self._news = False, True
        else:
            load = found if isinstance(found, Load) else self._begin(seq, found)
            load.waiting.append(seq)

    def _look(self, seq: Sequence, cached: int, prefill_rate: float | None) -> Load | Found | None:
        """Returns the load in flight that brings pages of the sequence, or the pages to load for
        it. None if no load pays and fits. Arguments as for `begin`."""
        count = self._kv_cache.reachable(seq, self._prefixes.has)
        size = self._kv_cache.page_size
        if not seq.waits_for_loads:
            self._observer.tier_looked_up(len(seq.tokens) - cached * size, (count - cached) * size)
        if count <= cached:
            return None
        found = self._prefixes.found(seq, count)
        for load in self._loads:
            if not found.keys.isdisjoint(load.keys):
                return load
        decision = self.decision = self._decide((count - cached) * size, found, prefill_rate)
        if not decision.pays and decision.disk_bytes:
            self.rates.refused(decision)
            count = self._kv_cache.reachable(seq, self._prefixes.has_in_memory)
            if count <= cached:
                return None
            found = self._prefixes.found(seq, count)
            decision = self.decision = self._decide((count - cached) * size, found, prefill_rate)
        if not decision.pays:
            self.rates.refused(decision)
            return None
        # Copies that hang would delay new loads.
        if self._orphans or not self._prefixes.fits(found):
            return None
        return found

    def _is_loading(self, key: bytes) -> bool:
        return any(key in load.keys for load in self._loads)

    def _decide(self, tokens: int, found: Found, prefill_rate: float | None) -> Decision:
        seconds = self.rates.seconds(found.host_bytes, found.disk_bytes)
        computing = None if prefill_rate is None else tokens / prefill_rate
        wait = self.pace.seconds(found.keys)
        return Decision(tokens, found.host_bytes, found.disk_bytes, seconds, computing, wait)

    def wanted_from_disk(self, seq: Sequence, prefill_rate: float | None) -> list[bytes]:
        """Returns the keys of the pages that only the disk has, in order, if a load would pay once
        they are in host memory."""
        count, size = self._kv_cache.reachable(seq, self._prefixes.has), self._kv_cache.page_size
        found = self._prefixes.found(seq, count)
        firsts = {number for _, number, _ in found.missing}
        computing = len(firsts) * size / prefill_rate if prefill_rate else math.inf
        if self.rates.seconds(found.host_bytes, 0) > computing:
            return []
        return [key for _, _, key in found.missing if not self._index.has(key)]

    def _begin(self, seq: Sequence, found: Found) -> Load:
        hashes, missing = found.hashes, found.missing
        tables = self._prefixes.hold(found)
        snapshot, places = None, iter(())
        if self._pieces is not None and missing[-1][0] is self._pieces:
            snapshot = self._pieces.snapshots.reserve()
            places = iter(self._pieces.pieces(snapshot))
        on_host = [self._index.pin(key) if key in self._index else None for _, _, key in missing]
        pages = [
            LoadPage(
                group=group,
                number=number,
                key=key,
                page=next(places)
                if isinstance(group, StatePieces)
                else tables[group.number][number],
                state=State.ON_DISK if slot is None else State.ON_HOST,
                host_slot=-1 if slot is None else slot,
            )
            for (group, number, key), slot in zip(missing, on_host, strict=True)
        ]
        self._index.touch([each.key for each in reversed(pages)])
        load = Load(
            seq=seq,
            hashes=hashes,
            pages=pages,
            held=[[table[number] for number in sorted(table)] for table in tables],
            snapshot=snapshot,
            waiting=[],
            began=self._clock(),
            predicted=self.rates.seconds(found.host_bytes, found.disk_bytes),
            end=len(pages),
            keys=found.keys,
        )
        self._loads.append(load)
        self.pace.began(load.began, found.host_bytes)
        return load

    def advance(self) -> bool:
        """Advances all loads. Returns whether one has ended since the last call, for any reason."""
        now = self._clock()
        # Before other loads let go of their pages: the next plan is the first to use those.
        self._start_asked(now)
        for load in list(self._loads):
            self._publish(load)
            if load.published == load.end:
                self._finish(load)
            elif now > load.began + max(_TIMEOUT, _TIMES_PREDICTED * load.predicted):
                self._fail(load, load.published, "timeout", f"{now - load.began:.1f} s")
                self._finish(load)
            else:
                self._feed(load)
        news, self._news = self._news, False
        return news

    def _publish(self, load: Load) -> None:
        """Publishes arrived pages, in order."""
        while load.published < load.end:
            each = load.pages[load.published]
            if each.state is not State.ARRIVED:
                return
            each.group.publish_loaded(load.seq, load.hashes, each.number, each.page)
            load.published += 1

    def _feed(self, load: Load) -> None:
        """Begins file reads, and as many copies as there are free ring slots."""
        for place in range(load.published, load.end):
            each = load.pages[place]
            if each.state is State.ON_DISK:
                self._read(load, place, each)
            if each.state is State.ON_HOST and not self._copy(load, place, each):
                return

    def _copy(self, load: Load, place: int, each: LoadPage) -> bool:
        def copied(ring_slot: int, error: str | None) -> None:
            self._index.unpin(each.host_slot)
            self._orphans -= load.over
            if error is None and place < load.end and not load.over:
                self._transfers.restore(each.page, ring_slot, each.group.number)
                each.state = State.ARRIVED
                return
            self._transfers.load_ring.give_back(ring_slot)
            each.state = State.GONE
            if error is not None:
                self._index.discard(each.key)
                self._fail(load, place, "copy", error)

        began = self._transfers.load(each.host_slot, each.group.number, copied)
        if began:
            each.state = State.COPYING
        return began

    def _read(self, load: Load, place: int, each: LoadPage) -> None:
        """Begins to read a page from disk, unless it is in memory by now."""
        if each.key in self._index:
            each.host_slot, each.state = self._index.pin(each.key), State.ON_HOST
            return
        if self._index.has(each.key) or not self._disk.can_read:
            return  # it is in flight, or must wait for other reads
        reservation = self._index.reserve(each.key)
        if reservation is None:
            self._fail(load, place, "host full", "all host slots are in use")
            return
        if not self._disk.contains(each.key):
            self._index.release(reservation)
            self._fail(load, place, "disk", "the file is gone")
            return
        each.state, each.from_disk = State.READING, True

        def read(error: str | None) -> None:
            self._orphans -= load.over
            each.state = State.GONE
            if error is not None:
                self._index.release(reservation)
            elif self._index.fill(reservation) and place < load.end and not load.over:
                each.host_slot, each.state = self._index.pin(each.key), State.ON_HOST
                return
            self._fail(load, place, "disk", error or "it is no longer wanted")

        self._disk.read(each.key, reservation.slot, read)

    def _fail(self, load: Load, place: int, cause: str, error: str) -> None:
        """Reports that page `place` cannot be loaded: only the pages before it are still wanted."""
        if load.over or place >= load.end:
            return
        load.end, load.error = place, cause
        if cause not in self._logged:
            self._logged.add(cause)
            log.warning(
                "an evicted prefix cannot be loaded and is computed instead (%s: %s); "
                "further cases of this cause are only counted",
                *(cause, error),
            )

    def _finish(self, load: Load) -> None:
        """Ends a load that has published its pages."""
        load.over = self._news = True
        self._loads.remove(load)
        for each in load.pages[load.published :]:
            if each.state is State.ON_HOST:
                self._index.unpin(each.host_slot)
            self._orphans += each.state in (State.COPYING, State.READING)
        for group, held in zip(self._kv_cache.groups, load.held, strict=True):
            group.let_go(held)
        if load.snapshot is not None and self._pieces is not None:
            self._pieces.snapshots.release(load.snapshot)
        for seq in load.waiting:
            seq.loading = False
            if load.error:
                self._observer.tier_recomputed(load.error)
        self._learn(load)

    def _give_up(self, load: Load, cause: str) -> None:
        """Ends a load before all pages have arrived."""
        load.error = cause
        self._finish(load)

    def _learn(self, load: Load) -> None:
        seconds = max(self._clock() - load.began, 1e-6)
        loaded = load.pages[: load.published]
        page_bytes = self._config.page_bytes
        size = sum(page_bytes[each.group.number] for each in loaded)
        whole = [each.from_disk for each in loaded if each.group.number == 0]
        tokens, disk_tokens = (n * self._kv_cache.page_size for n in (len(whole), sum(whole)))
        for seq in load.waiting:
            seq.restored_tokens = tokens
        if loaded:
            self._observer.tier_loaded(
                size, seconds, host_tokens=tokens - disk_tokens, disk_tokens=disk_tokens
            )
        if not load.error and size:
            disk = sum(page_bytes[each.group.number] for each in loaded if each.from_disk)
            self.rates.learn(size, disk, seconds)

    def leave(self, seq: Sequence) -> None:
        """Reports that a waiting sequence has ended."""
        self.pace.drop(seq)
        for load in self._loads:
            if seq in load.waiting:
                load.waiting.remove(seq)
                seq.loading = False
                if not load.waiting:
                    self._give_up(load, "no use")
                return

    def cancel_newest(self) -> bool:
        """Gives up the newest load to free its pages. Returns False if there is none."""
        if not self._loads:
            return False
        self._give_up(self._loads[-1], "pages")
        return True

    def cancel_all(self, cause: str) -> None:
        """Gives up all loads."""
        for asked in self.pace.take():
            asked.seq.loading = False
        for load in list(self._loads):
            self._give_up(load, cause)
