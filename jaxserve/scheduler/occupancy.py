"""A look at the queue and the pages from another thread."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import Sequence
from jaxserve.views import Occupancy, PagesView, WaitingView


def occupancy(
    pages: PagePool, page_size: int, live: Iterable[Sequence], now: float, max_pages: int
) -> Occupancy:
    """Returns what holds the cache and what waits.

    It takes no lock: the scheduler goes on meanwhile, so a sequence may be counted as waiting that
    was admitted a moment ago.

    Args:
      live: all sequences that have not ended, in a list of the caller's own.
      now: seconds on the scheduler's clock.
      max_pages: the most pages whose states are looked at.
    """
    stride = max(1, -(-pages.num_total // max_pages))
    view = PagesView(
        page_size=page_size,
        total=pages.num_total,
        free=pages.num_free,
        cached=pages.num_cached,
        stride=stride,
        states=pages.states(stride),
    )
    waiting = tuple(
        WaitingView(
            level=seq.level,
            preempted=seq.preemptions > 0,
            left=seq.first_by - now if seq.first_by < math.inf else None,
        )
        for seq in live
        if not seq.running
    )
    return Occupancy(view, waiting)
