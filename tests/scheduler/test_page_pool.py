"""The page pool against a model of it: what each holder holds."""

from __future__ import annotations

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


class PagePoolMachine(RuleBasedStateMachine):
    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held = Counter[int]()

    @rule(target=holdings, count=st.integers(0, 4))
    def allocate(self, count: int) -> Any:
        if count > self.pool.num_free:
            free = self.pool.num_free
            with pytest.raises(OutOfPages, match=f"{count} pages wanted, {free} free"):
                self.pool.allocate(count)
            return multiple()
        pages = self.pool.allocate(count)
        assert len(pages) == count and 0 not in pages
        assert not any(self.held[page] for page in pages), "a held page was given out"
        self.held.update(pages)
        return pages

    @rule(target=holdings, pages=holdings)
    def share(self, pages: list[int]) -> list[int]:
        self.pool.share(pages)
        self.held.update(pages)
        return pages

    @rule(pages=consumes(holdings))
    def release(self, pages: list[int]) -> None:
        self.pool.release(pages)
        self.held.subtract(pages)

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check()
        assert all(self.pool.holders(page) == self.held[page] for page in range(NUM_PAGES))
        assert self.pool.num_free == self.pool.num_total - len(+self.held)


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


def test_check_finds_a_page_that_is_lost() -> None:
    pool = PagePool(4)
    pool._free.remove(2)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="page 2"):
        pool.check()
