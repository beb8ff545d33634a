"""The page pool against a model of it: what each holder holds."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from jaxserve.scheduler import OutOfPages, PagePool

NUM_PAGES = 9
CONTENTS = [b"a", b"b", b"c", b"d"]


class PagePoolMachine(RuleBasedStateMachine):
    """Holders and published contents, kept beside the pool in the plainest way."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.told: list[tuple[int, bytes]] = []
        """What `on_evict` was called with since the last allocation."""
        self.pool.on_evict.append(lambda page, content: self.told.append((page, content)))
        self.held = Counter[int]()
        self.content: dict[int, bytes] = {}
        """What the page was published as, in the order in which free ones will be given out."""
        self.twins: dict[int, bytes] = {}
        """Held pages with the content of a published one, the newest last."""

    @rule(target=holdings, count=st.integers(0, 4))
    def allocate(self, count: int) -> Any:
        if count > self.pool.num_free:
            free = self.pool.num_free
            with pytest.raises(OutOfPages, match=f"{count} pages wanted, {free} free"):
                self.pool.allocate(count)
            return multiple()
        idle = [page for page in self.content if not self.held[page]]
        unpublished = self.pool.num_free - len(idle)
        pages = self.pool.allocate(count)
        assert len(pages) == count and 0 not in pages
        assert not any(self.held[page] for page in pages), "a held page was given out"
        evicted = [page for page in pages if page in self.content]
        assert evicted == idle[: max(0, count - unpublished)], "not the longest unused"
        assert self.told == [each for page in evicted if (each := self._evict(page)) is not None]
        self.told.clear()
        self.held.update(pages)
        return pages

    def _evict(self, page: int) -> tuple[int, bytes] | None:
        """What is told of an allocated page that was published; nothing if a twin takes over."""
        content = self.content.pop(page)
        twins = [twin for twin, of in self.twins.items() if of == content]
        if not twins:
            return page, content
        del self.twins[twins[-1]]
        self.content[twins[-1]] = content
        return None

    @rule(target=holdings, pages=holdings)
    def share(self, pages: list[int]) -> list[int]:
        self.pool.share(pages)
        self.held.update(pages)
        return pages

    @rule(target=holdings, names=st.lists(st.sampled_from(CONTENTS), max_size=3))
    def hit(self, names: list[bytes]) -> list[int]:
        """As an admission does: what is found is shared at once."""
        pages = self.pool.find(names)
        of = {content: page for page, content in self.content.items()}
        known = list(itertools.takewhile(lambda name: name in of, names))
        assert pages == [of[name] for name in known]
        self.pool.share(pages)
        self.held.update(pages)
        return pages

    @rule(pages=holdings, name=st.sampled_from(CONTENTS), index=st.integers(0, 3))
    def publish(self, pages: list[int], name: bytes, index: int) -> None:
        if index < len(pages) and pages[index] not in self.content | self.twins:
            known = name in self.content.values()
            assert self.pool.publish(pages[index], name) is not known
            (self.twins if known else self.content)[pages[index]] = name

    @rule(pages=consumes(holdings))
    def release(self, pages: list[int]) -> None:
        """A sequence ends, is preempted or aborted."""
        self.pool.release(pages)
        self.held.subtract(pages)
        for page in reversed(pages):
            if page in self.content and not self.held[page]:
                self.content[page] = self.content.pop(page)  # the most recently used
            elif page in self.twins and not self.held[page]:
                name = self.twins.pop(page)
                (published,) = (each for each, of in self.content.items() if of == name)
                if not self.held[published]:
                    self.content[published] = self.content.pop(published)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.content.clear()
        self.twins.clear()

    @invariant()
    def nobody_is_told_of_pages_that_keep_their_content(self) -> None:
        assert not self.told

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check()
        assert all(self.pool.holders(page) == self.held[page] for page in range(NUM_PAGES))
        assert self.pool.num_free == self.pool.num_total - len(+self.held)
        assert self.pool.num_published == len(self.content)
        assert all(self.pool.find([name]) == [page] for page, name in self.content.items())


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=50, deadline=None)


def test_all_pages_but_the_padding_page_can_be_held() -> None:
    pool = PagePool(NUM_PAGES)
    assert sorted(pool.allocate(pool.num_total)) == list(range(1, NUM_PAGES))
    assert pool.num_free == 0


def test_a_page_cannot_be_released_more_often_than_it_was_held() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released by nobody"):
        pool.release(pages)


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="cannot be shared"):
        PagePool(3).share([1])


def test_a_content_stays_while_somebody_who_computed_it_too_holds_it() -> None:
    """It would take what follows it out of reach, too."""
    pool, told = PagePool(4), list[bytes]()
    pool.on_evict.append(lambda page, content: told.append(content))
    first = pool.allocate(1)
    assert pool.publish(first[0], b"a")
    twin = pool.allocate(1)
    assert not pool.publish(twin[0], b"a")
    pool.release(first)
    pool.release(pool.allocate(2))  # the first one's page, too
    assert pool.find([b"a"]) == twin and told == []
    pool.release(twin)
    pool.allocate(3)
    assert told == [b"a"]


def test_who_computed_a_content_that_was_there_counts_as_its_user() -> None:
    pool, told = PagePool(4), list[bytes]()
    pool.on_evict.append(lambda page, content: told.append(content))
    first = pool.allocate(1)
    pool.publish(first[0], b"a")
    pages = pool.allocate(2)
    pool.publish(pages[0], b"a")
    pool.publish(pages[1], b"b")
    pool.release(first)
    pool.release(pages)
    pool.allocate(3)
    assert told == [b"b", b"a"], "what follows goes first"


def test_check_finds_a_page_that_is_lost() -> None:
    pool = PagePool(4)
    del pool._free[2]  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="page 2"):
        pool.check()
