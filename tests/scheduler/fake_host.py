"""A copier and a disk made of dictionaries, whose copies end when and how a seed says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.api import TokenEvent
from jaxserve.config import CacheConfig, HostTierConfig, SchedulerConfig
from jaxserve.plan import PageMoves
from jaxserve.scheduler.host_tier import HostTier, TierParts
from jaxserve.scheduler.tier_observer import NoObserver
from tests.scheduler.fake_runner import STATE_LAYERS
from tests.scheduler.loop import Loop

type Page = list[int | None]
GARBAGE: Page = [-1]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a copier does to its copies. Shares of them."""

    late: float = 0.5
    """That do not end in a poll."""
    failed: float = 0.0
    never: float = 0.0
    """That hang until everything else is over."""
    lost_files: float = 0.0
    """Of reads from disk that find nothing."""


class Ended(NamedTuple):
    tag: int
    ok: bool
    error: str | None


class Slots:
    """Host memory: pages by slot, shared by copier and disk."""

    def __init__(self) -> None:
        self.pages: dict[int, Page] = {}


class Job(NamedTuple):
    """What a job does, what it does when it fails, and whether it may have ended."""

    do: Callable[[], None]
    spoil: Callable[[], None]
    ready: Callable[[], bool]


class Delayed:
    """Jobs that take effect at once or at their end, and end in any order."""

    def __init__(self, faults: Faults, seed: int):
        self.faults, self.random = faults, random.Random(seed)
        self.jobs: dict[int, Job] = {}
        self._hanging: set[int] = set()
        self.draining = False

    def begin(
        self,
        tag: int,
        do: Callable[[], None],
        spoil: Callable[[], None],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """The job cannot end before it is `ready`."""
        assert tag not in self.jobs
        if self.random.random() < self.faults.never:
            self._hanging.add(tag)
        if self.random.random() < 0.5:
            do()
        self.jobs[tag] = Job(do, spoil, ready)

    def poll(self) -> list[Ended]:
        ended: list[Ended] = []
        tags = list(self.jobs)
        self.random.shuffle(tags)
        for tag in tags:
            late = tag in self._hanging or self.random.random() < self.faults.late
            if (late and not self.draining) or not self.jobs[tag].ready():
                continue
            do, spoil, _ = self.jobs.pop(tag)
            ok = self.random.random() >= self.faults.failed
            (do if ok else spoil)()
            ended.append(Ended(tag, ok, None if ok else "it failed"))
        return ended


class FakeCopier(Delayed):
    """Copies between the rings of a runner and host slots. What a copy reads must not change, and
    what it writes nobody may use, until it has ended: it happens at either end."""

    def __init__(self, faults: Faults, seed: int, slots: Slots):
        super().__init__(faults, seed)
        self.slots = slots
        self.store_ring: dict[int, Page] = {}
        self.load_ring: dict[int, Page] = {}
        self.stores = self.loads = 0

    def store(self, ring_slot: int, host_slot: int, tag: int, written: Callable[[], bool]) -> None:
        self.stores += 1

        def do() -> None:
            self.slots.pages[host_slot] = list(self.store_ring[ring_slot])

        def spoil() -> None:
            self.slots.pages[host_slot] = GARBAGE

        self.begin(tag, do, spoil, written)

    def load(self, host_slot: int, ring_slot: int, tag: int) -> None:
        self.loads += 1

        def do() -> None:
            self.load_ring[ring_slot] = list(self.slots.pages[host_slot])

        def spoil() -> None:
            self.load_ring[ring_slot] = GARBAGE

        self.begin(tag, do, spoil)


class FakeDisk(Delayed):
    """Files by key; one that cannot be read is gone."""

    def __init__(self, faults: Faults, seed: int, slots: Slots, files: dict[bytes, Page]):
        super().__init__(faults, seed)
        self.slots, self.files = slots, files
        self.reads = 0

    def contains(self, key: bytes, /) -> bool:
        assert len(key) == 32
        return key in self.files

    def get(self, key: bytes, host_slot: int, tag: int, /) -> None:
        assert key in self.files
        self.reads += 1

        def do() -> None:
            self.slots.pages[host_slot] = list(self.files[key])

        def spoil() -> None:
            self.slots.pages[host_slot] = GARBAGE
            self.files.pop(key, None)

        self.begin(tag, do, spoil)

    def put(self, key: bytes, host_slot: int, tag: int, /) -> None:
        before = list(self.slots.pages[host_slot])

        def do() -> None:
            assert self.slots.pages[host_slot] == before, "it changed while it was written"
            if tag not in self.jobs:  # it can be found only at its end
                self.files[key] = before

        self.begin(tag, do, lambda: None)


class CountingObserver(NoObserver):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.recomputed = Counter[str]()
        self.skipped = Counter[str]()
        self.loaded: list[int] = []
        self.paced = 0.0
        self.tokens = Counter[str]()

    def tier_recomputed(self, cause: str) -> None:
        self.recomputed[cause] += 1

    def tier_skipped(self, cause: str) -> None:
        self.skipped[cause] += 1

    def tier_paced(self, seconds: float) -> None:
        self.paced += seconds

    def tier_loaded(
        self, num_bytes: int, seconds: float, *, host_tokens: int, disk_tokens: int
    ) -> None:
        self.loaded.append(num_bytes)
        self.tokens += Counter(host=host_tokens, disk=disk_tokens)


class TierLoop(Loop):
    """The loop with a tier. Time passes with its turns."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        host_slots: int,
        ring: int = 2,
        faults: Faults | None = None,
        seed: int = 0,
        files: dict[bytes, Page] | None = None,
        load_rate: float | None = None,
        **options: Any,
    ):
        self.faults = faults or Faults()
        slots, self.now = Slots(), 0.0
        self.copier = FakeCopier(self.faults, seed, slots)
        lost = Faults(late=self.faults.late, failed=self.faults.lost_files)
        self.disk = None if files is None else FakeDisk(lost, seed, slots, files)
        self.observer = CountingObserver()
        self._random = random.Random(seed + 1)
        parts = TierParts(
            config=HostTierConfig(
                slots=host_slots,
                page_bytes=(1,) * (len(cache.groups) + bool(cache.snapshots)),
                state_pieces=STATE_LAYERS if cache.snapshots else 0,
                store_ring=ring,
                load_ring=ring,
                lookahead=host_slots // 2,
                load_rate=load_rate,
            ),
            copier=self.copier,
            disk=self.disk,
            observer=self.observer,
        )
        super().__init__(config, cache, host=parts, clock=lambda: self.now, **options)
        self._share_rings()
        self.idle = self.restored_pieces = 0

    def _share_rings(self) -> None:
        self.runner.store_ring = self.copier.store_ring
        self.runner.load_ring = self.copier.load_ring

    def move_pages(self, moves: PageMoves) -> Callable[[], bool]:
        super().move_pages(moves)
        state = len(self.runner.kv)
        self.restored_pieces += sum(move.group == state for move in moves.restores)

        def is_done() -> bool:
            return self.copier.draining or self._random.random() > self.faults.late

        return is_done

    def fail(self) -> None:
        super().fail()
        self._share_rings()

    def _take(self, events: list[TokenEvent]) -> None:
        self.now += 0.1
        super()._take(events)

    @property
    def tier(self) -> HostTier:
        assert self.scheduler.host is not None
        return self.scheduler.host

    def drain(self) -> None:
        """Let everything end that is on its way, also what hangs."""
        self.copier.draining = True
        if self.disk is not None:
            self.disk.draining = True
        for _ in range(1000):
            if not self.tier.busy:
                break
            self.launch()
            while self.in_flight:
                self.commit()
        assert not self.tier.busy
        self.scheduler.check()
