"""Who gives its pages back when there are too few.

**Why it ends.** The first in rank of those that run is never preempted, and `limit` lets no
sequence outgrow the whole pool. It goes without a row only while no page is free and nobody
else can be preempted: then the others end with a step in flight, or are in their prefill,
whose pages they all have. The first prefill advances in every step: decode rows leave room for
a token (a sequence in its prefill has a slot, and slots are not more than tokens of a step).
Only sequences that have sampled since their admission are preempted, so each recomputation
yields at least one token; and who was preempted is admitted again only when there is room for
what everybody is expected to need. A sequence that runs alone is admitted in any case, so the
first in rank of all comes to run, and every request ends.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.scheduler.holdings import Holdings
from jaxserve.scheduler.sequence import Sequence


def choose_victim(running: Collection[Sequence], holdings: Holdings) -> Sequence | None:
    """Who decodes, is not the first in rank, frees a page and has least to compute again."""
    senior = min(running, key=lambda seq: seq.rank)

    def frees_pages(seq: Sequence) -> bool:
        return any(holdings.pages.holders(page) == 1 for page in reversed(seq.pages))

    def cost(seq: Sequence) -> tuple[int, int, int]:
        return -seq.level, holdings.read(seq), -seq.id

    decoding = (seq for seq in running if seq.computed >= seq.prefill_end and seq is not senior)
    return min(filter(frees_pages, decoding), key=cost, default=None)
