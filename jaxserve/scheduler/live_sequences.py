"""The sequences that have not ended: waiting and running ones, and changes between the two."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxserve.api import Overloaded, Rejected, Request
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.kv_events.events import Sink
from jaxserve.scheduler import prefix
from jaxserve.scheduler.admission import OutputLengths, refuse_impossible
from jaxserve.scheduler.deadlines import waiting_queue
from jaxserve.scheduler.host_tier import HostTier, TierParts
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.learned_times import LearnedTimes
from jaxserve.scheduler.occupancy import occupancy
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import Sequence
from jaxserve.views import Occupancy


class LiveSequences:
    """The part of the scheduler that does not know steps. A live sequence either waits, or runs
    with a slot and pages."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        times: LearnedTimes | None = None,
        lengths: OutputLengths | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cache_events: Sink | None = None,
        host: TierParts | None = None,
    ):
        """See `Scheduler`."""
        self._config = config
        self._cache = cache
        self._clock = clock
        self._page_size = cache.page_size
        self._kv_cache = KVCacheManager(config, cache, cache_events)
        self._lengths = lengths or OutputLengths()
        self._waiting = waiting_queue(config, cache, times, self._lengths)
        self.host = host and HostTier(host, self._kv_cache, clock, lambda: self.num_running > 0)
        self._running: dict[int, Sequence] = {}
        self._live: dict[int, Sequence] = {}
        self._by_request: dict[str, Sequence] = {}
        self._next_id = 0
        self._blocked: Sequence | None = None
        """The first waiting sequence, if it must wait for free pages."""
        self._held = False
        """Whether new sequences stay in the queue. Preempted sequences may still return."""
        self.num_preemptions = 0

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len

    @property
    def pages(self) -> PagePool:
        """The page pool of the fullest cache group, which limits admission."""
        return self._kv_cache.pages

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """The page pool of each cache group."""
        return tuple(group.pool for group in self._kv_cache.groups)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Waiting sequences, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          Rejected: the request can never be served.
          Overloaded: the queue is full.

        After any exception the scheduler is unchanged.
        """
        if request.id in self._by_request:
            raise Rejected(f"a request with the id {request.id!r} is not finished")
        refuse_impossible(request, self._config, self._cache)
        # A burst arrives before the next plan. Requests that this plan can admit do not count.
        queued = len(self._waiting) - self._kv_cache.num_free_slots
        if queued >= self._config.max_queued:
            raise Overloaded(f"{queued} requests are waiting, the most allowed")
        now = self._clock()
        # The last token of a sequence is never computed, so it needs no space in the cache.
        limit = min(self._config.max_model_len, self._cache.longest + 1)
        seq = Sequence.of(
            request,
            seq_id=self._next_id,
            limit=limit,
            level=request.priority if self._config.policy == "priority" else 0,
            root=prefix.root(self._cache.identity, request.cache_salt),
            now=now,
            ttft_slo=self._config.ttft_slo if request.ttft_slo is None else request.ttft_slo,
        )
        # Also hashes the prompt's pages, while a step runs. Planning would hash them between steps.
        seq.uncached -= self._kv_cache.cached_tokens(seq)
        self._waiting.join(seq, now)
        self._next_id += 1
        self._live[seq.id] = self._by_request[seq.request_id] = seq

    def abort(self, request_id: str) -> None:
        """Drops a request in any state. It gets no more events. Unknown ids are ignored."""
        seq = self._by_request.get(request_id)
        if seq is not None:
            self._end(seq)

    def hold(self, held: bool) -> None:
        """While held, admits only sequences that were admitted before."""
        self._held = held

    @property
    def drained(self) -> bool:
        """Whether no live sequence was ever admitted."""
        return not any(seq.admitted >= 0 for seq in self._live.values())

    def restart(self) -> None:
        """Returns all running sequences to the queue, to be recomputed. No plan may be in
        flight."""
        for seq in list(self._running.values()):
            self._preempt(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Returns a running sequence to the queue. Later it recomputes tokens that are not
        cached."""
        self._vacate(seq)
        self._waiting.push(seq)
        seq.preemptions += 1
        self.num_preemptions += 1

    def occupancy(self, max_pages: int) -> Occupancy:
        """See `occupancy.occupancy`. Callable from any thread."""
        live = list(self._live.values())
        return occupancy(self.pages, self._page_size, live, self._clock(), max_pages)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Running sequences keep their pages, but nobody finds them:
        after a change of weights they hold results of the old weights."""
        self._kv_cache.forget()

    def _vacate(self, seq: Sequence) -> None:
        """Frees the slot and pages of a running sequence."""
        del self._running[seq.id]
        self._kv_cache.free(seq)
        self._blocked = None

    def _end(self, seq: Sequence) -> None:
        """Ends a live sequence. `commit` drops the results of its rows in flight."""
        if seq.running:
            self._vacate(seq)
            self._lengths.observe(seq.max_generated, max(seq.generated, 1))
        else:
            self._waiting.remove(seq)
        self._waiting.ended(seq)
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        if self._blocked is seq:
            self._blocked = None
        if seq.loading and self.host is not None:
            self.host.leave(seq)
        del self._live[seq.id]
        del self._by_request[seq.request_id]

    def check(self) -> None:
        """Raises AssertionError if the accounts are inconsistent. Linear in pages and sequences."""
        running, waiting = list(self._running.values()), list(self._waiting)
        self._kv_cache.check(running)
        if self.host is not None:
            self.host.check()
        ranks = [seq.rank for seq in waiting]
        assert ranks == sorted(ranks), "the queue is not in order"
        assert sorted(seq.id for seq in running + waiting) == list(self._live), "not all are queued"
        assert all(seq.running for seq in running) and not any(seq.running for seq in waiting)
        assert list(self._by_request.values()) == list(self._live.values())
        for seq in self._live.values():
            assert self._by_request[seq.request_id] is seq
            seq.check(self._page_size)
