"""The KV cache manager: gives slots and pages to running sequences; equal prefixes share pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.kv_events.events import Sink
from jaxserve.plan import PageEntry, StateCopy
from jaxserve.scheduler.cache_events import CacheEvents
from jaxserve.scheduler.group_pages import GroupPages
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
from jaxserve.scheduler.snapshots import Snapshots

type Elsewhere = Callable[[GroupPages | None, bytes], bool]
"""Whether a page of a group that the device does not have, or a snapshot (None), is somewhere else,
by its hash."""


class Hit(NamedTuple):
    """A cached prefix."""

    length: int
    """In whole pages."""
    pages: tuple[list[int], ...]
    """For each group the page table of a sequence that goes on behind it, see `GroupPages.hit`."""


class LowerTier(Protocol):
    """Keeps pages that the device evicts."""

    def forget(self) -> None:
        """Nothing that it keeps or that is on its way is right any more."""
        ...

    def failed(self) -> None:
        """The device has lost its pages, and what was on its way to them or from them."""
        ...


class KVCacheManager:
    """Allocates and frees slots and pages, and finds cached prefixes.

    **Why pages may be shared.** A page is published when the plans made so far compute all of its
    positions from tokens that the host knows. Its content never changes after that: a sequence
    writes from its first uncomputed position on, and a prefix hit ends at the end of a page. A
    sequence that finds the page is planned later, or later in the same plan. In every layer a step
    writes all keys and values before it reads any. A prefix hit leaves at least one token to
    compute, so that the sequence's row samples. In a group with a window a hit needs only the pages
    that the window covers before that token. Some formats also keep the first tokens of each
    slot outside the pages (`CacheConfig.own_tokens`); a hit leaves those to be computed first.
    Where layers are recurrent a hit ends at a snapshot of their state, see `Snapshots`, and only
    what blocks of prompts have filled is published: outputs are computed token by token, with other
    rounding than a prompt with the same tokens. After a failed step nothing published is found any
    more: the device has lost it.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, sink: Sink | None = None):
        """`sink` is told what happens to cached pages, once the device has computed them."""
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
        """A page behind a window may never be published: others learn its tokens from a group
        without one."""
        self.lower: LowerTier | None = None
        """Is told what happens to all pages at once."""
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
        """Slots of sequences whose first pages were forgotten: they publish nothing more, because
        nobody could find what they have behind those."""

    @property
    def pages(self) -> PagePool:
        """The pool with the smallest share of free pages; of equal ones that of the first group."""
        pools = (group.pool for group in self.groups)
        return min(pools, key=lambda pool: pool.num_free / max(pool.num_total, 1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return self._num_slots - len(self._free_slots)

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def cached_pages(self, seq: Sequence) -> Hit:
        """Returns the longest cached prefix, which leaves at least one token."""
        count = self._cached(seq)
        hashes = seq.page_hashes(count, self.page_size) if count else []
        return Hit(count, tuple(group.hit(hashes) for group in self.groups))

    def cached_tokens(self, seq: Sequence) -> int:
        """Returns how many tokens of the sequence a prefix hit saves."""
        found = self._cached(seq) * self.page_size
        return found - self._own_tokens if found else 0

    def _cached(self, seq: Sequence, elsewhere: Elsewhere | None = None) -> int:
        """Returns the length of the longest cached prefix in pages: at its end every group has
        cached what the next token reads."""
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
                count = shorter  # of a row of pages any beginning is cached
        return count if count * self.page_size > self._own_tokens else 0

    def _most_cached(self, seq: Sequence) -> int:
        """Returns the most pages that a cached prefix may have."""
        return min(seq.max_cached_tokens, self._shareable(seq)) // self.page_size

    def _cached_in_groups(
        self, seq: Sequence, count: int, elsewhere: Elsewhere | None = None
    ) -> int:
        """Returns how many of the first `count` pages are cached, one group after the other."""
        hashes = seq.page_hashes(count, self.page_size)
        for group in self.groups:
            there = elsewhere and functools.partial(elsewhere, group)
            count = group.cached(hashes, count, there)
        return count

    def reachable(self, seq: Sequence, elsewhere: Elsewhere) -> int:
        """Returns how long the cached prefix would be, in pages, with pages that are elsewhere."""
        return self._cached(seq, elsewhere)

    def computed_since_admission(self, seq: Sequence) -> int:
        """Returns how many tokens the sequence computed: the work that preempting it wastes."""
        return max(seq.computed - seq.shared * self.page_size, 0)

    def allocate(self, seq: Sequence, hit: Hit) -> list[PageEntry]:
        """Give a sequence a slot and its first pages: without a window those of all its tokens.

        Args:
          hit: its cached prefix, from `cached_pages`.

        Returns:
          The entries of the slot's page tables. OutOfPages if there are too few free pages.
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
        """The sequence's state is that at the end of its hit. A longer hit for the next one that
        begins alike ends where its pages do that are cached."""
        if hit.length:
            content = seq.hashes[hit.length - 1]
            restore = snapshots.restore_later if seq.skip_to else snapshots.restore
            restore(content, seq)
        if self._sharing:
            snapshots.admitted(seq, self._cached_in_groups(seq, self._most_cached(seq)))

    def chunk_end(self, seq: Sequence, start: int, end: int) -> int:
        """Returns where a chunk from `start` on ends that would end at `end`: not inside of a block
        that the prompt fills. That is `start` where it must not begin."""
        blocks = seq.num_prompt // self._block * self._block
        return end if end >= blocks else max(end // self._block * self._block, start)

    def _shareable(self, seq: Sequence) -> int:
        """Returns how many first tokens of the sequence it may share with others."""
        if self.snapshots is None:
            return len(seq.tokens)
        return seq.num_prompt // self._block * self._block

    def lacks_pages(self, growing: Collection[Sequence]) -> bool:
        """Returns whether too few pages are free for each sequence to get those of its next
        token."""
        return any(
            group.pool.num_free < sum(self._is_full(group, seq) for seq in growing)
            for group in self.groups
        )

    def waits_for_page(self, seq: Sequence) -> bool:
        """Returns whether a sequence in its prefill has no page for its next token. What is behind
        its windows is taken back first."""
        for group in self.windows:
            group.slide(seq)
        return any(self._is_full(group, seq) for group in self.windows)

    def _is_full(self, group: GroupPages, seq: Sequence) -> bool:
        """Returns whether the sequence needs another page of the group for its next token."""
        return len(group.pages(seq)) * self.page_size == seq.computed

    def append_pages(self, seq: Sequence) -> Iterator[PageEntry]:
        """Give a running sequence the pages of its next token, where it has none: when it decodes
        one in each group. OutOfPages if none is free."""
        for group in self.groups:
            if self._is_full(group, seq):
                group.slide(seq)
                number = len(group.pages(seq))
                yield PageEntry(seq.slot, number, group.append(seq)[0], group.number)
        seq.capacity = max(seq.capacity, seq.computed + self.page_size)

    def extend(self, seq: Sequence) -> Iterator[PageEntry]:
        """Give a decoding sequence another page in each group. OutOfPages if none is free."""
        for group in self.groups:
            group.slide(seq)
            number = len(group.pages(seq))
            yield PageEntry(seq.slot, number, group.append(seq)[0], group.number)
        seq.capacity += self.page_size

    def append_chunk(self, seq: Sequence, end: int) -> tuple[int, list[PageEntry]]:
        """Give a sequence in its prefill the pages of its tokens up to `end`, as far as pages are
        free in the groups with a window.

        Returns:
          Where the chunk ends, at the latest where pages do in some group, and the entries of the
          new ones.
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
        """Take back the pages that are wholly behind the sequence's windows."""
        for group in self.windows:
            group.slide(seq)

    def publish(self, seq: Sequence) -> None:
        """Let others find the sequence's full pages whose tokens the host knows."""
        if not self._sharing or seq.slot in self._forgotten:
            return
        full = min(seq.computed, self._shareable(seq)) // self.page_size
        if full > seq.published:
            hashes = seq.page_hashes(full, self.page_size)
            for group in self._full_first:
                group.publish(seq, hashes, seq.published)
            seq.published = full

    def next_full_page(self, seq: Sequence) -> int:
        """Returns the number of tokens at which the sequence has one more page to publish."""
        if not self._sharing or not seq.running or seq.slot in self._forgotten:
            return seq.limit
        following = (seq.published + 1) * self.page_size
        shares = self.snapshots is None or following <= self._shareable(seq)
        return following if shares else seq.limit

    def forget(self) -> None:
        """Unpublish everything, see `PagePool.forget`, and empty the tier below."""
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
        """A plan begins."""
        if self.snapshots is not None:
            self.snapshots.settle()

    def row_planned(self, seq: Sequence) -> None:
        """A row of the sequence was planned."""
        if self.snapshots is not None:
            self.snapshots.planned(seq, publishes=seq.slot not in self._forgotten)

    def state_copies(self) -> tuple[StateCopy, ...]:
        """Returns the copies of recurrent state of the plan that is complete."""
        return () if self.snapshots is None else self.snapshots.take_copies()

    def planned(self) -> None:
        """A plan is complete and will be launched."""
        if self._events is not None:
            self._events.planned()

    def committed(self) -> None:
        """The oldest plan that is in flight has been computed and applied."""
        if self._events is not None:
            self._events.committed()

    def failed(self) -> None:
        """No plan in flight will be committed, and the device has lost all pages."""
        if self._events is not None:
            self._events.failed()
        if self.lower is not None:
            self.lower.failed()
        self._unpublish()

    def free(self, seq: Sequence) -> None:
        """Take back the slot and all pages. Published pages can be found until they are reused."""
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
        """AssertionError unless the running sequences hold all pages and slots in use."""
        for group in self.groups:
            group.check(running)
        if self.snapshots is not None:
            self.snapshots.check()
        slots = sorted(self._free_slots + [seq.slot for seq in running])
        assert slots == list(range(self._num_slots)), "a slot is lost or held twice"
