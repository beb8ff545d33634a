"""A snapshot of queue and pages for another thread."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import Sequence
from jaxserve.views import Occupancy, PagesView, WaitingView


def occupancy(
    pages: PagePool, page_size: int, live: Iterable[Sequence], now: float, max_pages: int
) -> Occupancy:
    """Returns the sequences that hold the cache, and the waiting ones.

    Takes no lock: the scheduler continues meanwhile, so a sequence that was just admitted may still
    count as waiting.

    Args:
      live: all sequences that have not ended, in a list that only the caller uses.
      now: seconds on the scheduler's clock.
      max_pages: the most pages whose states are reported.
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
