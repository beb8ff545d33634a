"""Preemption: which running sequence gives its pages back when too few are free.

**Why every request ends.** The running sequence with the best rank is never preempted, and `limit`
keeps every sequence smaller than the whole pool. That sequence misses a step only while no page is
free and nobody else can be preempted. The others then end with the step in flight, or are in their
prefill and hold all their pages already. The first prefill advances in every step, because decode
rows leave room for one token: a sequence in its prefill holds a slot, and a step has at least as
many tokens as there are slots. Only sequences that sampled since their admission are preempted, so
each recomputation yields at least one token. A preempted sequence is admitted again when the
expected need of all running sequences leaves room. A sequence that would run alone is always
admitted, so the best rank of all comes to run.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.sequence import Sequence


def choose_victim(running: Collection[Sequence], kv_cache: KVCacheManager) -> Sequence | None:
    """Returns the sequence that is cheapest to preempt, or None.

    It decodes, does not have the best rank and frees at least one page. The lowest priority goes
    first, then the fewest tokens to recompute, then the newest.
    """
    senior = min(running, key=lambda seq: seq.rank)

    def frees_pages(seq: Sequence) -> bool:
        return any(kv_cache.pages.holders(page) == 1 for page in reversed(seq.pages))

    def cost(seq: Sequence) -> tuple[int, int, int]:
        return -seq.level, kv_cache.computed_since_admission(seq), -seq.id

    decoding = (seq for seq in running if seq.computed >= seq.prefill_end and seq is not senior)
    return min(filter(frees_pages, decoding), key=cost, default=None)
