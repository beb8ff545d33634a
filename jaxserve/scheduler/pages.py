"""The page pool: which KV pages are free and how many holders each other page has."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. Callers look at `num_free` first."""


class PagePool:
    """Pages 1 to `num_pages - 1`; page 0 is the padding page and is never given out.

    A page is free, or held by one or more holders that each release it once. A released page may
    be given out again at once: the device executes steps in the order in which they were planned.
    """

    def __init__(self, num_pages: int):
        self.num_total = num_pages - 1
        """Pages that can be held."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages for one holder; OutOfPages (and no change) if there are fewer."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each of these pages, which somebody holds already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder gives these pages back; those without a holder become free."""
        for page in pages:
            holders = self._holders[page] - 1
            assert holders >= 0, f"page {page} released by nobody who held it"
            self._holders[page] = holders
            if holders == 0:
                self._free.append(page)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def check(self) -> None:
        """AssertionError unless every page is free exactly once or held."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert 0 not in free and self._holders[0] == 0, "the padding page was given out"
        for page, holders in enumerate(self._holders[1:], start=1):
            assert (holders == 0) == (page in free), f"page {page}: {holders} holders, free or lost"
