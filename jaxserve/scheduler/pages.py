"""The page pool: which pages are free, who holds the others, and the content hashes of pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import cast

from jaxserve.views import PageState


class OutOfPages(RuntimeError):
    """Too few pages are free. Callers check `num_free` first."""


class PagePool:
    """Pages 1 to `num_pages - 1`. Page 0 is the padding page and is never allocated.

    A page is free or has holders; each holder releases it once. A released page can be allocated
    at once, because the device executes steps in the order in which they were planned.

    A page whose content is final may be published under the hash of its content. Others can then
    find and share it. A free page stays published until it is allocated again. Free pages are
    reused in least-recently-used order.

    **A hash is on one page.** A second page with the same content is a *twin*. It takes over if the
    published page is allocated again while the twin is held. Releasing a twin counts as a use of
    the published page. So if sequences publish their pages in order and hold all of them, the page
    before a published page is always published too: it or a twin has a holder as long as the other
    page has one, and is released after it.
    """

    def __init__(self, num_pages: int):
        self.on_evict: list[Callable[[int, bytes], None]] = []
        """Called with page and hash when a published page is allocated again and no twin takes
        over. All earlier plans have computed its content, and only the plan in preparation or a
        later one overwrites it. So a copy launched at once reads the whole content. The callback
        must not raise or use the pool."""
        self.num_total = num_pages - 1
        """Pages that can be allocated."""
        self.turnover = 0
        """Changes whenever the result of `next_evicted` may change."""
        self._free = OrderedDict.fromkeys(range(1, num_pages))
        """Allocation takes the front. Pages without content are added at the front, published ones
        at the back."""
        self._holders = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._twin_of: dict[int, bytes] = {}
        self._twins: dict[bytes, list[int]] = {}
        """Held pages with the same content as a published page."""

    @property
    def num_free(self) -> int:
        """Pages without a holder, published ones included."""
        return len(self._free)

    @property
    def num_published(self) -> int:
        return len(self._hash_of)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` free pages for one holder. If too few are free, raises OutOfPages and
        changes nothing."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        self.turnover += 1
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            if (content := self._hash_of.pop(page, None)) is not None:
                self._evict(page, content)
        return pages

    def _evict(self, page: int, content: bytes) -> None:
        """Lets a twin take over; without one, drops the content."""
        if content in self._twins:
            twin = self._twins[content][-1]
            self._drop_twin(twin)
            self._page_of[content] = twin
            self._hash_of[twin] = content
            return
        del self._page_of[content]
        for tell in self.on_evict:
            tell(page, content)

    def _drop_twin(self, page: int) -> bytes:
        """Ends the page's role as a twin. Returns its content hash."""
        content = self._twin_of.pop(page)
        twins = self._twins[content]
        twins.remove(page)
        if not twins:
            del self._twins[content]
        return content

    def share(self, pages: Iterable[int]) -> None:
        """Adds one holder to each of these pages, which must be held or published."""
        for page in pages:
            if not self._holders[page]:
                assert page in self._hash_of, f"page {page} is free and cannot be shared"
                del self._free[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes one holder of each of these pages. Pages without a holder become free.

        The last pages of a sequence are reused first, because a prefix is worth more than its
        continuation.
        """
        self.turnover += 1
        for page in reversed(pages):
            holders = self._holders[page] - 1
            assert holders >= 0, f"page {page} released by nobody who held it"
            self._holders[page] = holders
            if holders == 0:
                self._free[page] = None
                if page in self._hash_of:
                    continue
                self._free.move_to_end(page, last=False)
                if page in self._twin_of:
                    published = self._page_of[self._drop_twin(page)]
                    if published in self._free:
                        self._free.move_to_end(published)

    def publish(self, page: int, content: bytes) -> bool:
        """Publishes a held page under the hash `content`, or as a twin of the page that has it.

        Returns whether the hash was new.
        """
        assert self._holders[page] > 0
        assert page not in self._hash_of and page not in self._twin_of
        if content in self._page_of:
            self._twin_of[page] = content
            self._twins.setdefault(content, []).append(page)
            return False
        self._page_of[content] = page
        self._hash_of[page] = content
        return True

    def find(self, contents: Iterable[bytes]) -> list[int]:
        """Returns the pages of the longest published prefix of `contents`. Adds no holder."""
        pages = [*map(self._page_of.get, contents)]  # five times as fast as a loop that stops
        end = pages.index(None) if None in pages else len(pages)
        return cast(list[int], pages[:end])

    def page_of(self, content: bytes) -> int | None:
        """Returns the page that is published as `content`. Adds no holder."""
        return self._page_of.get(content)

    def next_evicted(self, count: int) -> Iterator[tuple[int, bytes]]:
        """Yields page and hash of the published pages among the next `count` pages to be
        allocated."""
        for page in islice(self._free, count):
            if (content := self._hash_of.get(page)) is not None:
                yield page, content

    def forget(self) -> None:
        """Unpublishes all pages. Holders keep their pages. Does not call `on_evict`, because the
        content is lost, wrong, or unwanted."""
        self._hash_of.clear()
        self._page_of.clear()
        self._twin_of.clear()
        self._twins.clear()

    @property
    def num_cached(self) -> int:
        """Free pages whose content can be found. Callable from any thread. Linear in the pages."""
        return sum(map(self._free.__contains__, list(self._hash_of)))

    def states(self, stride: int) -> bytes:
        """Returns a `PageState` for the first page and then for every `stride`-th page. Callable
        from any thread. A page that changes meanwhile has its old or its new state."""
        published = self._hash_of
        return bytes(
            (PageState.SHARED if holders > 1 else PageState.HELD)
            if holders
            else (PageState.CACHED if page in published else PageState.FREE)
            for page, holders in zip(
                range(1, self.num_total + 1, stride), self._holders[1::stride], strict=True
            )
        )

    def holders(self, page: int) -> int:
        return self._holders[page]

    def check(self) -> None:
        """Raises AssertionError unless every page is free or held and each hash is on one page."""
        assert 0 not in self._free and self._holders[0] == 0, "the padding page was given out"
        for page, holders in enumerate(self._holders[1:], start=1):
            free = page in self._free
            assert (holders == 0) == free, f"page {page}: {holders} holders, free or lost"
        assert self._page_of == {content: page for page, content in self._hash_of.items()}
        assert len(self._page_of) == len(self._hash_of), "a hash is on two pages"
        twins = {page: content for content, pages in self._twins.items() for page in pages}
        assert twins == self._twin_of and twins.keys().isdisjoint(self._hash_of)
        assert all(self._holders[page] for page in twins), "a twin without a holder"
        assert self._twins.keys() <= self._page_of.keys(), "a twin of a page that is not published"
