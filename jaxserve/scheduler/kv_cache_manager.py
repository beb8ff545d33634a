"""The KV cache manager: gives slots and pages to running sequences; equal prefixes share pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import PageEntry
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import NO_SLOT, Sequence


class KVCacheManager:
    """Allocates and frees slots and pages, and finds cached prefixes.

    **Why pages may be shared.** A page is published when the plans made so far compute all of its
    positions from tokens that the host knows. Its content never changes after that: a sequence
    writes from its first uncomputed position on, and a prefix hit ends at the end of a page. A
    sequence that finds the page is planned later, or later in the same plan. In every layer a step
    writes all keys and values before it reads any. A prefix hit leaves at least one token to
    compute, so that the sequence's row samples. Some formats also keep the first tokens of each
    slot outside the pages (`CacheConfig.own_tokens`); a hit leaves those to be computed first.
    After a failed step nothing published is found any more: the device has lost it.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig):
        self.pages = PagePool(cache.num_pages)
        self.page_size = cache.page_size
        self._own_tokens = cache.own_tokens
        self._num_slots = config.max_num_seqs
        self._sharing = config.prefix_caching
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.max_pages = 0
        """Pages that the running sequences take if each grows to its limit."""

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def max_pages_of(self, seq: Sequence) -> int:
        """Returns the pages of one sequence at its limit. Its last token is never computed."""
        return self.pages_for(seq.limit - 1)

    def cached_pages(self, seq: Sequence) -> list[int]:
        """Returns the pages of the longest cached prefix, which leaves at least one token."""
        if not self._sharing:
            return []
        count = seq.max_cached_tokens // self.page_size
        found = self.pages.find(seq.page_hashes(count, self.page_size))
        return found if len(found) * self.page_size > self._own_tokens else []

    def cached_tokens(self, seq: Sequence) -> int:
        """Returns how many tokens of the sequence a prefix hit saves."""
        found = len(self.cached_pages(seq)) * self.page_size
        return found - self._own_tokens if found else 0

    def computed_since_admission(self, seq: Sequence) -> int:
        """Returns how many tokens the sequence computed: the work that preempting it wastes."""
        return max(seq.computed - seq.shared * self.page_size, 0)

    def free_pages_needed(self, seq: Sequence, hit: list[int]) -> int:
        """Returns how many free pages `allocate` takes. Cached pages without a holder are free."""
        new = self.pages_for(len(seq.tokens)) - len(hit)
        return new + sum(not self.pages.holders(page) for page in hit)

    def allocate(self, seq: Sequence, hit: list[int]) -> list[PageEntry]:
        """Give a sequence a slot and the pages of all its tokens.

        Args:
          hit: the pages of its cached prefix, from `cached_pages`.

        Returns:
          The entries of the slot's page table. OutOfPages if there are too few free pages.
        """
        self.pages.share(hit)
        seq.pages = hit + self.pages.allocate(self.pages_for(len(seq.tokens)) - len(hit))
        seq.slot = self._free_slots.pop()
        self.max_pages += self.max_pages_of(seq)
        seq.shared = seq.published = len(hit)
        seq.computed = len(hit) * self.page_size
        if hit and self._own_tokens:
            seq.computed, seq.skip_from, seq.skip_to = 0, self._own_tokens, seq.computed
        seq.prefill_end = len(seq.tokens)
        seq.plain_until = 0
        return [PageEntry(seq.slot, index, page) for index, page in enumerate(seq.pages)]

    def append_page(self, seq: Sequence) -> PageEntry:
        """Give a running sequence one page more. OutOfPages if none is free."""
        entry = PageEntry(seq.slot, len(seq.pages), self.pages.allocate(1)[0])
        seq.pages.append(entry.page)
        return entry

    def publish(self, seq: Sequence) -> None:
        """Let others find the sequence's full pages whose tokens the host knows."""
        if not self._sharing:
            return
        full = min(seq.computed, len(seq.tokens)) // self.page_size
        if full > seq.published:
            hashes = seq.page_hashes(full, self.page_size)
            for index in range(seq.published, full):
                self.pages.publish(seq.pages[index], hashes[index])
            seq.published = full

    def next_full_page(self, seq: Sequence) -> int:
        """Returns the number of tokens at which the sequence has one more page to publish."""
        return (seq.published + 1) * self.page_size if self._sharing and seq.running else seq.limit

    def free(self, seq: Sequence) -> None:
        """Take back the slot and all pages. Published pages can be found until they are reused."""
        self.pages.release(seq.pages)
        self.max_pages -= self.max_pages_of(seq)
        self._free_slots.append(seq.slot)
        seq.pages = []
        seq.slot = NO_SLOT
        seq.computed = seq.published = seq.shared = seq.plain_until = 0
        seq.skip_from = seq.skip_to = 0

    def check(self, running: Collection[Sequence]) -> None:
        """AssertionError unless the running sequences hold all pages and slots in use."""
        self.pages.check()
        held = Counter(page for seq in running for page in seq.pages)
        for page in range(self.pages.num_total + 1):
            assert self.pages.holders(page) == held[page], f"page {page}: wrong number of holders"
        assert self.max_pages == sum(map(self.max_pages_of, running))
        slots = sorted(self._free_slots + [seq.slot for seq in running])
        assert slots == list(range(self._num_slots)), "a slot is lost or held twice"
