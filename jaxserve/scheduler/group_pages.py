"""One cache group in the scheduler: its page pool, and the pages that each sequence needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from itertools import pairwise

from jaxserve.config import PagedGroup
from jaxserve.kv_events.events import Stored
from jaxserve.scheduler.cache_events import CacheEvents
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import Sequence


class GroupPages:
    """The pages of one cache group.

    Without a window, a sequence holds all its pages from admission on. With a window, it holds the
    pages that the window of its next position covers, and the pages that the steps planned so far
    fill. It gets pages as its chunks are planned, and gives back pages entirely before the window.
    Another sequence may get such a page in the same plan: no row of that plan reads it, and earlier
    plans run first.
    """

    def __init__(
        self,
        group: PagedGroup,
        number: int,
        *,
        page_size: int,
        step_tokens: int,
        events: CacheEvents | None = None,
        event_group: int | None = None,
    ):
        """`events` records events of cached pages under group number `event_group`."""
        self.pool = PagePool(group.num_pages)
        self.window = group.window
        self.number = number
        self.max_pages = 0
        """Pages that the running sequences hold if each grows to its limit."""
        self.loading = Counter[int]()
        """Number of loads that hold each page until other pages arrive from the host."""
        self.num_loading = 0
        """Sum of the counts in `loading`."""
        self._group, self._page_size, self._step_tokens = group, page_size, step_tokens
        self._events, self._event_group = events, event_group
        if events is not None:
            self.pool.on_evict.append(lambda page, content: events.removed(event_group, content))

    def max_pages_of(self, seq: Sequence) -> int:
        """Returns the most pages that the sequence may hold. Its last token is never computed."""
        return self._group.pages_of(seq.limit - 1, self._page_size, self._step_tokens)

    def pages_of(self, tokens: int) -> int:
        """Returns the most pages that a decoding sequence of `tokens` tokens holds."""
        return self._group.pages_of(tokens, self._page_size)

    def first_page(self, position: int) -> int:
        """Returns the first page that the query at `position` reads."""
        if self.window is None:
            return 0
        return max(position - self.window + 1, 0) // self._page_size

    def cached(
        self, hashes: list[bytes], count: int, elsewhere: Callable[[bytes], bool] | None = None
    ) -> int:
        """Returns the most pages, up to `count`, after which a sequence can continue. All pages of
        the group that it would read must be cached.

        Args:
          elsewhere: whether a page that is not in the pool counts as cached, by its hash.
        """
        page_of = self.pool.page_of
        if self.window is None:
            here = len(self.pool.find(hashes[:count]))
            while elsewhere and here < count:
                if page_of(hashes[here]) is None and not elsewhere(hashes[here]):
                    break
                here += 1
            return here
        number = count
        while number > self.first_page(count * self._page_size):
            number -= 1
            content = hashes[number]
            if page_of(content) is None and not (elsewhere and elsewhere(content)):
                count = number
        return count

    def hit(self, hashes: list[bytes]) -> list[int]:
        """Returns the page table of a sequence that continues after cached pages; 0 for pages that
        it does not read. All pages that it reads must be cached."""
        first = self.first_page(len(hashes) * self._page_size)
        return [0] * first + self.pool.find(hashes[first:])

    def new_pages(self, seq: Sequence, hit: list[int]) -> int:
        """Returns how many pages an admission needs besides the cached ones."""
        held = len(hit) - self.first_page(len(hit) * self._page_size)
        return max(self.pages_of(len(seq.tokens)) - held, 0)

    def free_pages_needed(self, seq: Sequence, hit: list[int]) -> int:
        """Returns how many free pages an admission takes. A cached page without a holder is
        free."""
        free = sum(page > 0 and not self.pool.holders(page) for page in hit)
        return self.new_pages(seq, hit) + free

    def pages(self, seq: Sequence) -> list[int]:
        """Returns the sequence's page table; 0 for pages that it gave back or never had."""
        return seq.pages[self.number]

    def held(self, seq: Sequence) -> list[int]:
        """Returns the pages that the sequence holds."""
        return seq.pages[self.number][seq.behind[self.number] :]

    def own(self, seq: Sequence) -> int:
        """Returns how many of its held pages did not come from the prefix cache."""
        return len(seq.pages[self.number]) - max(seq.shared, seq.behind[self.number])

    def take(self, seq: Sequence, hit: list[int]) -> None:
        """Gives a sequence its cached pages; without a window also the pages of all its tokens.

        Raises:
          OutOfPages: too few pages are free; nothing has changed.
        """
        cached = hit[self.first_page(len(hit) * self._page_size) :]
        self.pool.share(cached)
        new = 0 if self.window is not None else -(-len(seq.tokens) // self._page_size) - len(hit)
        seq.pages.append(hit + self.pool.allocate(new))
        seq.behind.append(len(hit) - len(cached))
        self.max_pages += self.max_pages_of(seq)

    def append(self, seq: Sequence, count: int = 1) -> list[int]:
        """Gives a sequence its next pages to fill. Raises OutOfPages if too few are free."""
        pages = self.pool.allocate(count)
        seq.pages[self.number] += pages
        return pages

    def slide(self, seq: Sequence) -> None:
        """Takes back the pages that are entirely before the window of the next position to plan."""
        first, behind = self.first_page(seq.computed), seq.behind[self.number]
        if first > behind:
            table = seq.pages[self.number]
            self.pool.release(table[behind:first])
            table[behind:first] = [0] * (first - behind)
            seq.behind[self.number] = first

    def publish(self, seq: Sequence, hashes: list[bytes], first: int) -> None:
        """Publishes the pages from number `first` on under their hashes, if the sequence has
        them."""
        table, publish = seq.pages[self.number], self.pool.publish
        numbers = range(max(first, seq.behind[self.number]), len(hashes))
        new = [number for number in numbers if publish(table[number], hashes[number])]
        if new and self._events is not None:
            self._record(self._events, seq, hashes, new)

    def _record(
        self, events: CacheEvents, seq: Sequence, hashes: list[bytes], new: list[int]
    ) -> None:
        """Records newly published pages by their numbers. Consecutive pages form one event."""
        start = new[0]
        for number, following in pairwise([*new, -1]):
            if following != number + 1:
                events.stored(
                    Stored(
                        hashes=hashes[start : number + 1],
                        parent=hashes[start - 1] if start else None,
                        source=seq.tokens,
                        start=start * self._page_size,
                        page_size=self._page_size,
                        salt=seq.salt,
                        group=self._event_group,
                        window=self.window,
                    )
                )
                start = following

    def hold(self, pages: Collection[int]) -> None:
        """Holds published pages until `let_go`."""
        self.pool.share(pages)
        self.loading.update(pages)
        self.num_loading += len(pages)

    def hold_new(self, count: int) -> list[int]:
        """Allocates and returns pages, held until `let_go`. Raises OutOfPages."""
        pages = self.pool.allocate(count)
        self.loading.update(pages)
        self.num_loading += count
        return pages

    def publish_loaded(self, seq: Sequence, hashes: list[bytes], number: int, page: int) -> None:
        """Publishes page `number` of a sequence, whose content has arrived from the host."""
        if self.pool.publish(page, hashes[number]) and self._events is not None:
            self._record(self._events, seq, hashes, [number])

    def let_go(self, pages: list[int]) -> None:
        """Undoes `hold` for these pages, which are in order."""
        self.pool.release(pages)
        self.num_loading -= len(pages)
        for page in pages:
            self.loading[page] -= 1
            if not self.loading[page]:
                del self.loading[page]

    def release(self, seq: Sequence) -> None:
        """Takes back all pages."""
        self.pool.release(self.held(seq))
        self.max_pages -= self.max_pages_of(seq)

    def check(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError unless the running sequences hold all pages in use."""
        self.pool.check()
        held = Counter(page for seq in running for page in self.held(seq))
        held.update(self.loading)
        for page in range(self.pool.num_total + 1):
            assert self.pool.holders(page) == held[page], f"page {page}: wrong number of holders"
        assert self.max_pages == sum(map(self.max_pages_of, running))
        for seq in running:
            assert len(self.held(seq)) <= self.max_pages_of(seq), "it holds more than it may"
