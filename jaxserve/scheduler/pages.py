"""The page pool: free pages, the holders of the others, and what cached pages hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. Callers look at `num_free` first."""


class PagePool:
    """Pages 1 to `num_pages - 1`; page 0 is the padding page and is never given out.

    A page is free, or held by one or more holders that each release it once. A released page may
    be given out again at once: the device executes steps in the order in which they were planned.

    A page whose content is final may be published under the hash of what it holds. It can then be
    found and shared, also after its last holder released it: it stays findable among the free
    pages until it is given out for something else, those unused for longest first.
    """

    def __init__(self, num_pages: int):
        self.num_total = num_pages - 1
        """Pages that can be held."""
        self._free = OrderedDict.fromkeys(range(1, num_pages))
        """Given out from the front; what holds nothing of use goes there, the rest to the back."""
        self._holders = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages without a holder, published ones included."""
        return len(self._free)

    @property
    def num_published(self) -> int:
        return len(self._hash_of)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages for one holder; OutOfPages (and no change) if there are fewer."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            if (content := self._hash_of.pop(page, None)) is not None:
                del self._page_of[content]
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each of these pages, which are held already or published."""
        for page in pages:
            if not self._holders[page]:
                assert page in self._hash_of, f"page {page} is free and cannot be shared"
                del self._free[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder gives these pages back; those without a holder become free.

        Of a sequence's pages the last are given out first: a prefix is worth more than what
        follows it.
        """
        for page in reversed(pages):
            holders = self._holders[page] - 1
            assert holders >= 0, f"page {page} released by nobody who held it"
            self._holders[page] = holders
            if holders == 0:
                self._free[page] = None
                if page not in self._hash_of:
                    self._free.move_to_end(page, last=False)

    def publish(self, page: int, content: bytes) -> None:
        """A held page can be found under the hash `content`, unless another page is already."""
        assert self._holders[page] > 0 and page not in self._hash_of
        if content not in self._page_of:
            self._page_of[content] = page
            self._hash_of[page] = content

    def find(self, contents: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of published hashes from the first on; not yet shared."""
        pages: list[int] = []
        for content in contents:
            page = self._page_of.get(content)
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self) -> None:
        """Nothing published is found any more. Holders keep their pages."""
        self._hash_of.clear()
        self._page_of.clear()

    def holders(self, page: int) -> int:
        return self._holders[page]

    def check(self) -> None:
        """AssertionError unless every page is free or held, and hashes and pages are one to one."""
        assert 0 not in self._free and self._holders[0] == 0, "the padding page was given out"
        for page, holders in enumerate(self._holders[1:], start=1):
            free = page in self._free
            assert (holders == 0) == free, f"page {page}: {holders} holders, free or lost"
        assert self._page_of == {content: page for page, content in self._hash_of.items()}
        assert len(self._page_of) == len(self._hash_of), "a hash is on two pages"
