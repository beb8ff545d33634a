"""What running sequences hold: a slot each, and pages, some of them shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import PageEntry
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import NO_SLOT, Sequence


class Holdings:
    """Gives slots and pages to sequences and takes them back.

    **Why pages may be shared.** A page is published when plans made so far compute all of its
    positions from tokens that the host knows. It is not written after that but with the values
    that it has: each sequence writes from its first uncomputed position on, and a hit ends at a
    page's end. Who finds the page is planned later, or later in the same plan: in every layer a
    step writes all its keys and values before it reads any. A hit leaves at least one token to
    compute, whose row samples. Where a format keeps the first tokens for each slot, a hit leaves
    these as well, to be computed before the rest. `fail` forgets what is published: the device has
    lost it.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig):
        self.pages = PagePool(cache.num_pages)
        self.page_size = cache.page_size
        self._own_tokens = cache.own_tokens
        self._num_slots = config.max_num_seqs
        self._sharing = config.prefix_caching
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.most = 0
        """Pages that those who run would take if all became as long as they may."""

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def most_of(self, seq: Sequence) -> int:
        """Its part of `most`. The last token of a sequence is never computed."""
        return self.pages_for(seq.limit - 1)

    def cached_pages(self, seq: Sequence) -> list[int]:
        """Pages that hold the beginning of its tokens, all but the last token at most."""
        if not self._sharing:
            return []
        most = seq.most_cached // self.page_size
        found = self.pages.find(seq.page_hashes(most, self.page_size))
        return found if len(found) * self.page_size > self._own_tokens else []

    def cached_tokens(self, seq: Sequence) -> int:
        """Of its tokens, those that it need not compute."""
        found = len(self.cached_pages(seq)) * self.page_size
        return found - self._own_tokens if found else 0

    def read(self, seq: Sequence) -> int:
        """Of its tokens, those computed since its admission: what preempting it would waste."""
        return max(seq.computed - seq.shared * self.page_size, 0)

    def taken_by(self, seq: Sequence, hit: list[int]) -> int:
        """Free pages that `take` needs."""
        new = self.pages_for(len(seq.tokens)) - len(hit)
        return new + sum(not self.pages.holders(page) for page in hit)

    def take(self, seq: Sequence, hit: list[int]) -> list[PageEntry]:
        """A slot and the pages of all its tokens, of which `hit` hold the first ones already."""
        self.pages.share(hit)
        seq.pages = hit + self.pages.allocate(self.pages_for(len(seq.tokens)) - len(hit))
        seq.slot = self._free_slots.pop()
        self.most += self.most_of(seq)
        seq.shared = seq.published = len(hit)
        seq.computed = len(hit) * self.page_size
        if hit and self._own_tokens:
            seq.computed, seq.skip_from, seq.skip_to = 0, self._own_tokens, seq.computed
        seq.prefill_end = len(seq.tokens)
        seq.plain_until = 0
        return [PageEntry(seq.slot, index, page) for index, page in enumerate(seq.pages)]

    def grow(self, seq: Sequence) -> PageEntry:
        """One page more; there must be a free one."""
        entry = PageEntry(seq.slot, len(seq.pages), self.pages.allocate(1)[0])
        seq.pages.append(entry.page)
        return entry

    def publish(self, seq: Sequence) -> None:
        """Its full pages, computed from tokens that the host knows, can be found from now on."""
        if not self._sharing:
            return
        full = min(seq.computed, len(seq.tokens)) // self.page_size
        if full > seq.published:
            hashes = seq.page_hashes(full, self.page_size)
            for index in range(seq.published, full):
                self.pages.publish(seq.pages[index], hashes[index])
            seq.published = full

    def next_full_page(self, seq: Sequence) -> int:
        """How many tokens it has when there is a page more to publish."""
        return (seq.published + 1) * self.page_size if self._sharing and seq.running else seq.limit

    def give_back(self, seq: Sequence) -> None:
        """Its slot and all its pages, which stay findable as far as they were published."""
        self.pages.release(seq.pages)
        self.most -= self.most_of(seq)
        self._free_slots.append(seq.slot)
        seq.pages = []
        seq.slot = NO_SLOT
        seq.computed = seq.published = seq.shared = seq.plain_until = 0
        seq.skip_from = seq.skip_to = 0

    def check(self, running: Collection[Sequence]) -> None:
        """AssertionError unless these sequences hold everything that is not free."""
        self.pages.check()
        held = Counter(page for seq in running for page in seq.pages)
        for page in range(self.pages.num_total + 1):
            assert self.pages.holders(page) == held[page], f"page {page}: wrong number of holders"
        assert self.most == sum(map(self.most_of, running))
        slots = sorted(self._free_slots + [seq.slot for seq in running])
        assert slots == list(range(self._num_slots)), "a slot is lost or held twice"
