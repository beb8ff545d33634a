"""Preemption: chooses the running sequence that gives its pages back when too few are free.

**Why every request ends.** The running sequence with the best rank is never preempted, and `limit`
keeps every sequence smaller than the whole pool. That sequence misses a step only while no page is
free and no other sequence can be preempted. Then the others end with the step in flight, or are in
their prefill and already hold all their pages. The first prefill advances in every step, because
decode rows leave room for one token: a sequence in its prefill holds a slot, and a step has at
least as many tokens as there are slots. Only sequences that sampled since their admission are
preempted, so each recomputation yields at least one token. A preempted sequence is admitted again
when the expected need of all running sequences leaves room. A sequence that would run alone is
always admitted, so the sequence with the best rank of all always runs at some point.

In a cache group with a window, a sequence in its prefill gets its pages with its chunks. So it
counts as a growing sequence. If no decoding sequence can be preempted, a sequence in its prefill
is, except the one with the best rank. That one therefore gets a page in every step, and ends.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.sequence import Sequence


def choose_victim(running: Collection[Sequence], kv_cache: KVCacheManager) -> Sequence | None:
    """Returns the sequence that is cheapest to preempt, or None.

    The choice never has the best rank and always frees at least one page. A decoding sequence goes
    before a sequence in its prefill; the latter is chosen only if pages are given to chunks as they
    are planned. The lowest priority goes first, then the fewest tokens to recompute, then the
    newest.
    """
    senior = min(running, key=lambda seq: seq.rank)

    def frees_pages(seq: Sequence) -> bool:
        return any(
            group.pool.holders(page) == 1
            for group in kv_cache.groups
            for page in reversed(group.held(seq))
        )

    def cost(seq: Sequence) -> tuple[int, int, int]:
        return -seq.level, kv_cache.computed_since_admission(seq), -seq.id

    others = [seq for seq in running if seq is not senior]
    decoding = (seq for seq in others if seq.computed >= seq.prefill_end)
    victim = min(filter(frees_pages, decoding), key=cost, default=None)
    if victim is None and kv_cache.windows:
        victim = min(filter(frees_pages, others), key=cost, default=None)
    return victim
