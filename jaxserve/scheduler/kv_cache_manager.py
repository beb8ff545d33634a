"""The KV cache manager: allocates slots and pages, and shares the pages of equal prefixes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.kv_events.events import Sink
from jaxserve.plan import KeptState, PageEntry, StateCopy
from jaxserve.scheduler.cache_events import CacheEvents
from jaxserve.scheduler.group_pages import GroupPages
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
from jaxserve.scheduler.snapshots import Snapshots

type Elsewhere = Callable[[GroupPages | None, bytes], bool]
"""Returns whether a lower tier has a page of a group, or a snapshot (group None), by its hash. It
is asked only about content that the device lacks."""


class Hit(NamedTuple):
    """A cached prefix."""

    length: int
    """Tokens, a multiple of the page size."""
    pages: tuple[list[int], ...]
    """For each group, the page table of a sequence that continues after the prefix, see
    `GroupPages.hit`."""


class LowerTier(Protocol):
    """A tier that keeps pages which the device evicts."""

    def forget(self) -> None:
        """Drops all pages, also those in flight: their content is no longer right."""
        ...

    def failed(self) -> None:
        """Reports that the device has lost its pages and all copies in flight."""
        ...


class KVCacheManager:
    """Allocates and frees slots and pages, and finds cached prefixes.

    **Why pages may be shared.** A page is published when the plans made so far compute all of its
    positions from tokens that the host knows. Its content never changes after that: a sequence
    writes from its first uncomputed position on, and a prefix hit ends at the end of a page. A
    sequence that finds the page is planned later, or later in the same plan. In every layer a step
    writes all keys and values before it reads any. A prefix hit leaves at least one token to
    compute, so that the sequence's row samples.

    In a group with a window, a hit needs only the pages that the window covers before that token.
    Some formats also keep the first tokens of each slot outside the pages
    (`CacheConfig.own_tokens`). A sequence with a hit computes those tokens first.

    With recurrent layers, a hit ends at a snapshot of their state, see `Snapshots`. Only pages that
    prompt blocks have filled are published. Outputs are computed token by token, with other
    rounding than a prompt of the same tokens.

    After a failed step the device has lost all pages, so no published page can be found.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, sink: Sink | None = None):
        """`sink` gets the events of cached pages, once the device has computed the pages."""
        self.page_size = cache.page_size
        self._events = events = None if sink is None else CacheEvents(sink)
        several = cache.further or cache.window is not None
        self.groups = tuple(
            GroupPages(
                group,
                number,
                page_size=cache.page_size,
                step_tokens=config.max_num_batched_tokens,
                events=events,
                event_group=number if several else None,
            )
            for number, group in enumerate(cache.groups)
        )
        self.windows = [group for group in self.groups if group.window is not None]
        self._full_first = sorted(self.groups, key=lambda group: group.window is not None)
        """Groups without a window come first: readers of cache events learn tokens from them. A
        group with a window may never publish a page before its window."""
        self.lower: LowerTier | None = None
        """Reports to this tier when all pages are forgotten or lost."""
        self._own_tokens = cache.own_tokens
        self._block = cache.state_block
        self.snapshots = None
        if cache.snapshots:
            self.snapshots = Snapshots(
                cache.snapshots,
                first_slot=config.max_num_seqs + 1,
                stride=cache.snapshot_stride,
                page_size=cache.page_size,
                block=cache.state_block,
            )
            drop = self.snapshots.drop
            for group in self.groups:
                group.pool.on_evict.append(lambda page, content: drop(content))
        self._num_slots = config.max_num_seqs
        self._sharing = config.prefix_caching
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._forgotten: set[int] = set()
        """Slots of sequences whose first pages were forgotten. They publish no more pages, because
        nobody could find a page without the pages before it."""

    @property
    def pages(self) -> PagePool:
        """The pool with the smallest share of free pages; among equals, the first group's."""
        pools = (group.pool for group in self.groups)
        return min(pools, key=lambda pool: pool.num_free / max(pool.num_total, 1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return self._num_slots - len(self._free_slots)

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def cached_pages(self, seq: Sequence) -> Hit:
        """Returns the longest cached prefix that leaves at least one token to compute."""
        count = self._cached(seq)
        hashes = seq.page_hashes(count, self.page_size) if count else []
        return Hit(count, tuple(group.hit(hashes) for group in self.groups))

    def cached_tokens(self, seq: Sequence) -> int:
        """Returns how many tokens of the sequence a prefix hit saves."""
        found = self._cached(seq) * self.page_size
        return found - self._own_tokens if found else 0

    def _cached(self, seq: Sequence, elsewhere: Elsewhere | None = None) -> int:
        """Returns the length of the longest cached prefix in pages. After it, every group has
        cached all pages that the next token reads."""
        if not self._sharing:
            return 0
        shorter = self._most_cached(seq)
        count = shorter + 1
        while shorter < count:
            count = shorter
            shorter = self._cached_in_groups(seq, shorter, elsewhere)
            if self.snapshots is not None:
                there = elsewhere and functools.partial(elsewhere, None)
                hashes = seq.page_hashes(shorter, self.page_size)
                shorter = self.snapshots.longest(hashes, shorter, there)
            elif len(self.groups) == 1 and not self.windows:
                count = shorter  # every prefix of consecutive cached pages is cached too
        return count if count * self.page_size > self._own_tokens else 0

    def _most_cached(self, seq: Sequence) -> int:
        """Returns the most pages that a cached prefix may have."""
        return min(seq.max_cached_tokens, self._shareable(seq)) // self.page_size

    def _cached_in_groups(
        self, seq: Sequence, count: int, elsewhere: Elsewhere | None = None
    ) -> int:
        """Returns how many of the first `count` pages every group has cached."""
        hashes = seq.page_hashes(count, self.page_size)
        for group in self.groups:
            there = elsewhere and functools.partial(elsewhere, group)
            count = group.cached(hashes, count, there)
        return count

    def reachable(self, seq: Sequence, elsewhere: Elsewhere) -> int:
        """Returns the length of the cached prefix in pages if pages of a lower tier count too."""
        return self._cached(seq, elsewhere)

    def computed_since_admission(self, seq: Sequence) -> int:
        """Returns how many tokens the sequence computed: the work that a preemption would waste."""
        return max(seq.computed - seq.shared * self.page_size, 0)

    def allocate(self, seq: Sequence, hit: Hit) -> list[PageEntry]:
        """Gives a sequence a slot and its first pages; without a window, the pages of all its
        tokens.

        Args:
          hit: its cached prefix, from `cached_pages`.

        Returns:
          The entries of the slot's page tables.

        Raises:
          OutOfPages: too few pages are free.
        """
        seq.slot = self._free_slots.pop()
        seq.shared = seq.published = hit.length
        seq.computed, cached = self.start_of(hit), hit.length * self.page_size
        if seq.computed < cached:
            seq.skip_from, seq.skip_to = self._own_tokens, cached
        seq.prefill_end = len(seq.tokens)
        seq.plain_until = 0
        seq.capacity = self.pages_for(len(seq.tokens)) * self.page_size
        for group, cached in zip(self.groups, hit.pages, strict=True):
            group.take(seq, cached)
        if self.snapshots is not None:
            self._begin_state(self.snapshots, seq, hit)
        return [
            PageEntry(seq.slot, position, page, number)
            for number, table in enumerate(seq.pages)
            for position, page in enumerate(table)
            if page
        ]

    def start_of(self, hit: Hit) -> int:
        """Returns the first position that a sequence with this cached prefix computes."""
        return 0 if self._own_tokens else hit.length * self.page_size

    def _begin_state(self, snapshots: Snapshots, seq: Sequence, hit: Hit) -> None:
        """Restores the state at the end of the hit. Also notes where the cached pages end, so that
        the next sequence with this prefix finds a snapshot there."""
        if hit.length:
            content = seq.hashes[hit.length - 1]
            restore = snapshots.restore_later if seq.skip_to else snapshots.restore
            restore(content, seq)
        if self._sharing:
            snapshots.admitted(seq, self._cached_in_groups(seq, self._most_cached(seq)))

    def chunk_end(self, seq: Sequence, start: int, end: int) -> int:
        """Returns where to end a chunk from `start` that would end at `end`: never inside a block
        of the prompt. Returns `start` if no block fits."""
        if end >= seq.num_prompt:
            return end
        return max(end // self._block * self._block, start)

    def _shareable(self, seq: Sequence) -> int:
        """Returns how many first tokens of the sequence may be shared with other sequences."""
        if self.snapshots is None:
            return len(seq.tokens)
        return seq.num_prompt // self._block * self._block

    def lacks_pages(self, growing: Collection[Sequence]) -> bool:
        """Returns whether too few pages are free for the next token of each sequence."""
        return any(
            group.pool.num_free < sum(self._is_full(group, seq) for seq in growing)
            for group in self.groups
        )

    def waits_for_page(self, seq: Sequence) -> bool:
        """Returns whether a sequence in its prefill lacks a page for its next token. Takes back
        pages before its windows first."""
        for group in self.windows:
            group.slide(seq)
        return any(self._is_full(group, seq) for group in self.windows)

    def _is_full(self, group: GroupPages, seq: Sequence) -> bool:
        """Returns whether the sequence needs another page of the group for its next token."""
        return len(group.pages(seq)) * self.page_size == seq.computed

    def append_pages(self, seq: Sequence) -> Iterator[PageEntry]:
        """Gives a running sequence the pages of its next token: one in each group where it has
        none. Raises OutOfPages if none is free."""
        for group in self.groups:
            if self._is_full(group, seq):
                group.slide(seq)
                number = len(group.pages(seq))
                yield PageEntry(seq.slot, number, group.append(seq)[0], group.number)
        seq.capacity = max(seq.capacity, seq.computed + self.page_size)

    def extend(self, seq: Sequence) -> Iterator[PageEntry]:
        """Gives a decoding sequence another page in each group. Raises OutOfPages if none is
        free."""
        for group in self.groups:
            group.slide(seq)
            number = len(group.pages(seq))
            yield PageEntry(seq.slot, number, group.append(seq)[0], group.number)
        seq.capacity += self.page_size

    def append_chunk(self, seq: Sequence, end: int) -> tuple[int, list[PageEntry]]:
        """Gives a sequence in its prefill the pages of its tokens up to `end`. In groups with a
        window, only as many as are free.

        Returns:
          The end of the chunk, which is earlier if a group has too few pages, and the page table
          entries of the new pages.
        """
        entries: list[PageEntry] = []
        if self.snapshots is not None:
            end = self.snapshots.chunk_end(seq, end)
        for group in self.windows:
            group.slide(seq)
            number = len(group.pages(seq))
            count = min(max(self.pages_for(end) - number, 0), group.pool.num_free)
            pages = group.append(seq, count)
            entries += [
                PageEntry(seq.slot, position, page, group.number)
                for position, page in enumerate(pages, start=number)
            ]
            end = min(end, len(group.pages(seq)) * self.page_size)
        return self.chunk_end(seq, seq.computed, end), entries

    def slide(self, seq: Sequence) -> None:
        """Takes back the pages that are entirely before the sequence's windows."""
        for group in self.windows:
            group.slide(seq)

    def publish(self, seq: Sequence) -> None:
        """Publishes the sequence's full pages whose tokens the host knows."""
        if not self._sharing or seq.slot in self._forgotten:
            return
        full = min(seq.computed, self._shareable(seq)) // self.page_size
        if full > seq.published:
            hashes = seq.page_hashes(full, self.page_size)
            for group in self._full_first:
                group.publish(seq, hashes, seq.published)
            seq.published = full

    def next_full_page(self, seq: Sequence) -> int:
        """Returns the length, in tokens, at which the sequence has one more page to publish."""
        if not self._sharing or not seq.running or seq.slot in self._forgotten:
            return seq.limit
        following = (seq.published + 1) * self.page_size
        shares = self.snapshots is None or following <= self._shareable(seq)
        return following if shares else seq.limit

    def forget(self) -> None:
        """Unpublishes all pages, see `PagePool.forget`, and empties the lower tier."""
        if self.lower is not None:
            self.lower.forget()
        self._unpublish()

    def _unpublish(self) -> None:
        for group in self.groups:
            group.pool.forget()
        if self.snapshots is not None:
            self.snapshots.forget()
        self._forgotten = set(range(self._num_slots)).difference(self._free_slots)
        if self._events is not None:
            self._events.cleared()

    def begin_plan(self) -> None:
        """Reports that a plan begins."""
        if self.snapshots is not None:
            self.snapshots.settle()

    def chunk_planned(self, seq: Sequence, start: int) -> KeptState | None:
        """Reports that a chunk of the sequence was planned, from `start` on. Returns the recurrent
        state that its row stores."""
        if self.snapshots is None:
            return None
        return self.snapshots.planned(seq, start, publishes=seq.slot not in self._forgotten)

    def state_copies(self) -> tuple[StateCopy, ...]:
        """Returns the copies of recurrent state for the complete plan."""
        return () if self.snapshots is None else self.snapshots.take_copies()

    def planned(self) -> None:
        """Reports that a plan is complete and will be launched."""
        if self._events is not None:
            self._events.planned()

    def committed(self) -> None:
        """Reports that the oldest plan in flight was computed and applied."""
        if self._events is not None:
            self._events.committed()

    def failed(self) -> None:
        """Reports that no plan in flight will be committed and the device has lost all pages."""
        if self._events is not None:
            self._events.failed()
        if self.lower is not None:
            self.lower.failed()
        self._unpublish()

    def free(self, seq: Sequence) -> None:
        """Takes back the slot and all pages. Published pages can be found until they are reused."""
        for group in self.groups:
            group.release(seq)
        if self.snapshots is not None:
            self.snapshots.freed(seq)
        self._free_slots.append(seq.slot)
        self._forgotten.discard(seq.slot)
        seq.pages, seq.behind = [], []
        seq.slot = NO_SLOT
        seq.computed = seq.published = seq.shared = seq.plain_until = seq.capacity = 0
        seq.skip_from = seq.skip_to = 0

    def check(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError unless the running sequences hold all pages and slots in use."""
        for group in self.groups:
            group.check(running)
        if self.snapshots is not None:
            self.snapshots.check()
        slots = sorted(self._free_slots + [seq.slot for seq in running])
        assert slots == list(range(self._num_slots)), "a slot is lost or held twice"
