"""The scheduler: first come, first served; decodes first, then prefill chunks; recompute."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable

from jaxserve.api import (
    FinishReason,
    GuideState,
    Overloaded,
    Rejected,
    Request,
    TokenEvent,
    TokenLogprobs,
)
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Admission, PageEntry, Row, Sampled, Scored, StepPlan
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.sequence import NO_SLOT, Sequence

log = logging.getLogger(__name__)


class Scheduler:
    """Decides who computes what in each step. Owns sequences, slots and pages; knows no device.

    The loop calls `plan`, launches the plan, and later calls `commit` with what it sampled. Plans
    must be launched and committed in the order in which they were made, but any number may be
    planned before the first is committed: one in a synchronous loop, two in a loop that is one
    step ahead. A plan that could not be executed goes to `fail` instead. `plan` returns None
    when nothing can be computed; with `has_work` that means that a commit is due.

    **Why slots and pages may be freed and given out again while steps are in flight.** A plan
    names only slots and pages that its sequences hold when `plan` returns, and an ended sequence
    is never planned again. What a sequence frees in `commit`, `abort`, `fail` or by preemption is
    given out by a later plan, or by the plan being made, which then has no row of that sequence
    (victims are taken from the end of the order in which rows are planned). The device executes
    plans in order, so every write and read of the old holder comes before the page table
    entries of the new one, and the new one writes each position before it reads it:

    - *A stop token found in `commit(t)` while the row is in plan t+1.* That row was planned, and
      launched, before the pages were freed: it writes into pages that are still its own. Its
      token reaches `commit(t+1)` under a `seq_id` that nobody has any more, and is dropped, even
      if the slot has a new owner by then.
    - *An abort between plan and launch, or launch and commit* is the same case.
    - *Preemption with a sample in flight.* The sample was computed before the pages changed hands;
      `commit` adds it to the waiting sequence's tokens (and may end the sequence there). The
      sequence is admitted again only when nothing of it is in flight, so every token it then
      recomputes is known, and no token is sampled twice.
    - *The slot's last token on the device* is read by decode rows only, and a new owner samples
      at the end of its prefill before its first decode row.

    **Why it ends.** Running sequences are ordered by arrival, and all of them arrived before
    everything that waits. A sequence that needs a page takes it from the last to arrive, so the
    oldest always computes. `limit` lets no sequence outgrow the whole pool, so alone it never
    lacks a page: at that size it ends with `length`. Admission leaves as many pages free as the
    running sequences can take until the newcomer samples (`_headroom`), so nobody is preempted
    during its prefill and each recomputation yields at least one token.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig):
        self._config = config
        self._cache = cache
        self._page_size = cache.page_size
        self.pages = PagePool(cache.num_pages)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._live: dict[int, Sequence] = {}
        self._by_request: dict[str, Sequence] = {}
        self._guided: list[tuple[Sequence, GuideState]] = []
        """Those whose next mask may not be known yet."""
        self._next_id = 0
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Preempted sequences included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request; Rejected if it can never be served, Overloaded if the queue is full."""
        self._refuse_impossible(request)
        # A burst is read at once: those that the next plan can admit do not count as queued.
        queued = len(self._waiting) - len(self._free_slots)
        if queued >= self._config.max_queued:
            raise Overloaded(f"{queued} requests are waiting, the most allowed")
        # The last token of a sequence is never computed, so it needs no room in the cache.
        limit = min(self._config.max_model_len, self._cache.usable_tokens + 1)
        seq = Sequence.of(request, seq_id=self._next_id, limit=limit)
        self._next_id += 1
        self._live[seq.id] = self._by_request[seq.request_id] = seq
        self._waiting.append(seq)

    def _refuse_impossible(self, request: Request) -> None:
        length, longest = len(request.prompt), self._config.max_model_len
        if request.id in self._by_request:
            raise Rejected(f"a request with the id {request.id!r} is not finished")
        if request.params.max_tokens < 1:
            raise Rejected(f"max_tokens must be at least 1, got {request.params.max_tokens}")
        if length == 0:
            raise Rejected("the prompt is empty; it must have at least 1 token")
        if length >= longest:
            raise Rejected(
                f"the prompt has {length} tokens; with at least 1 output token it must fit in the "
                f"model's context of {longest} tokens",
                code="context_length_exceeded",
            )
        needed = self._pages_for(length + 1)
        if needed > self._cache.usable_pages:
            raise Rejected(
                f"the prompt has {length} tokens; with 1 output token it needs {needed} pages of "
                f"{self._page_size} tokens, the KV cache has {self._cache.usable_pages}"
            )

    def abort(self, request_id: str) -> None:
        """Drop a request in any state: no more events of it. An unknown id is already over."""
        seq = self._by_request.get(request_id)
        if seq is not None:
            self._end(seq)

    # One step.

    def plan(self) -> StepPlan | None:
        """The next step, or None. The scheduler counts it as launched from here on.

        No slot is admitted twice in a plan, and no page table entry is set twice.
        """
        rows: list[Row] = []
        entries: list[PageEntry] = []
        admissions: list[Admission] = []
        prefilling = self._plan_decodes(rows, entries)
        budget = self._config.max_num_batched_tokens - len(rows)
        for seq in prefilling:
            if budget:
                budget -= self._plan_chunk(seq, budget, rows)
        while budget and (seq := self._admit(entries)):
            admissions.append(_admission(seq))
            budget -= self._plan_chunk(seq, budget, rows)
        if not rows:
            return None
        return StepPlan(rows=tuple(rows), admissions=tuple(admissions), pages=tuple(entries))

    def _plan_decodes(self, rows: list[Row], entries: list[PageEntry]) -> list[Sequence]:
        """One token for each running sequence; returns those that are still in their prefill."""
        prefilling: list[Sequence] = []
        page_size = self._page_size
        for seq in list(self._running.values()):
            start = seq.computed
            if seq.slot == NO_SLOT:
                break  # preempted by an earlier row, and so is everybody after it
            if start < seq.prefill_end:
                prefilling.append(seq)
                continue
            if start + 1 >= seq.limit or seq.guided_to_wait:
                continue  # its last token is in flight, or the mask of its next one is computed
            if start == len(seq.pages) * page_size and not self._grow(seq, entries):
                break
            seq.computed = start + 1
            seq.in_flight += 1
            logprobs = seq.params.logprobs is not None
            rows.append(Row(seq.id, seq.slot, start, (), True, logprobs, seq.mask))
        return prefilling

    def _grow(self, seq: Sequence, entries: list[PageEntry]) -> bool:
        """Give the sequence a page, if need be a later one's; False if it had to yield itself."""
        while not self.pages.num_free:
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is seq:
                return False
        entries.append(PageEntry(seq.slot, len(seq.pages), page := self.pages.allocate(1)[0]))
        seq.pages.append(page)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the front of the queue, to compute its tokens again (see the class)."""
        self._vacate(seq)
        self._waiting.appendleft(seq)
        self.num_preemptions += 1

    def _plan_chunk(self, seq: Sequence, budget: int, rows: list[Row]) -> int:
        """As much of the prefill as the budget allows, at least one token; returns the number."""
        start = seq.computed
        end = min(seq.prefill_end, start + budget)
        samples = end == seq.prefill_end
        logprobs = samples and seq.params.logprobs is not None
        mask = seq.mask if samples else None
        tokens = tuple(seq.tokens[start:end])
        scored = _scored(seq, start, end)
        rows.append(Row(seq.id, seq.slot, start, tokens, samples, logprobs, mask, scored))
        seq.computed = end
        seq.in_flight += samples
        return end - start

    def _admit(self, entries: list[PageEntry]) -> Sequence | None:
        """Give the first in the queue a slot and the pages of all its tokens, if they are there."""
        if not self._waiting or not self._free_slots:
            return None
        seq = self._waiting[0]
        needed = self._pages_for(len(seq.tokens))
        if (
            seq.in_flight
            or seq.guided_to_wait
            or needed + self._headroom(seq) > self.pages.num_free
        ):
            return None
        self._waiting.popleft()
        self._running[seq.id] = seq
        seq.slot = self._free_slots.pop()
        seq.pages = self.pages.allocate(needed)
        seq.prefill_end = len(seq.tokens)
        entries.extend(PageEntry(seq.slot, index, page) for index, page in enumerate(seq.pages))
        return seq

    def _headroom(self, seq: Sequence) -> int:
        """Pages that the running sequences can take before this one samples its first token.

        At least one each. This step gives `seq` a token or more and each later one all of the
        budget that decodes leave; meanwhile each other sequence grows by one token a step.
        """
        running = len(self._running)
        tokens_per_step = self._config.max_num_batched_tokens - running
        steps = _ceil_div(len(seq.tokens) - 1, tokens_per_step)
        return running * (1 + steps // self._page_size)

    def commit(self, plan: StepPlan, sampled: Iterable[Sampled | None]) -> list[TokenEvent]:
        """Take the results of a plan's rows, in order; results of ended sequences are ignored."""
        events: list[TokenEvent] = []
        for row, result in zip(plan.rows, sampled, strict=True):
            seq = self._live.get(row.seq_id)
            if seq is None:
                continue  # it ended after this plan was made
            if row.scored is not None and result is not None:
                seq.prompt_logprobs += result.prompt_logprobs
            if not row.samples:
                continue
            assert result is not None and result.token is not None, "a row that samples has a token"
            token = result.token
            seq.tokens.append(token)
            seq.in_flight -= 1
            finish = None
            if token in seq.params.stop_token_ids and len(seq.tokens) >= seq.stops_from:
                finish = FinishReason.STOP
            elif len(seq.tokens) >= seq.limit:
                finish = FinishReason.LENGTH
            logprobs = _wanted(result.logprobs, seq.params.logprobs)
            prompt_logprobs = None
            if seq.params.prompt_logprobs is not None and len(seq.tokens) == seq.num_prompt + 1:
                prompt_logprobs, seq.prompt_logprobs = tuple(seq.prompt_logprobs), []
            events.append(
                TokenEvent(seq.request_id, token, finish, logprobs, prompt_logprobs=prompt_logprobs)
            )
            if finish is not None:
                self._end(seq)
            elif seq.guide is not None:
                seq.guide.advance(token)
                self._guided.append((seq, seq.guide))
        return events

    def await_guides(self, timeout: float) -> list[TokenEvent]:
        """Wait for the masks of sequences that follow a grammar, at most `timeout` seconds in all.

        Waiting for all lets them share the next step. Those that cannot be followed end with an
        error.
        """
        deadline = time.monotonic() + timeout
        failed: list[Sequence] = []
        waiting, self._guided = self._guided, []
        for seq, guide in waiting:
            if seq.id not in self._live:
                continue
            if not guide.wait(max(0.0, deadline - time.monotonic())):
                self._guided.append((seq, guide))
            elif guide.error is not None:
                log.error("%s: its grammar cannot be followed: %s", seq.request_id, guide.error)
                self._end(seq)
                failed.append(seq)
        return [TokenEvent(seq.request_id, None, FinishReason.ERROR) for seq in failed]

    def fail(self, plan: StepPlan | None = None) -> list[TokenEvent]:
        """End with an error what is alive of a plan that could not be executed; None: everything.

        A failed plan is not committed. Plans made after it still are: they may hold rows of other
        sequences.
        """
        ids = list(self._live) if plan is None else [row.seq_id for row in plan.rows]
        failed = [self._live[seq_id] for seq_id in ids if seq_id in self._live]
        for seq in failed:
            self._end(seq)
        return [TokenEvent(seq.request_id, None, FinishReason.ERROR) for seq in failed]

    # What sequences hold.

    def _pages_for(self, tokens: int) -> int:
        return _ceil_div(tokens, self._page_size)

    def _vacate(self, seq: Sequence) -> None:
        """A running sequence gives back its pages and its slot."""
        del self._running[seq.id]
        self.pages.release(seq.pages)
        self._free_slots.append(seq.slot)
        seq.pages = []
        seq.slot = NO_SLOT
        seq.computed = 0

    def _end(self, seq: Sequence) -> None:
        """Forget a live sequence; rows of it that are in flight find nobody in `commit`."""
        if seq.running:
            self._vacate(seq)
        else:
            self._waiting.remove(seq)
        del self._live[seq.id]
        del self._by_request[seq.request_id]

    def check(self) -> None:
        """AssertionError if the accounts contradict each other. Linear in pages and sequences."""
        self.pages.check()
        running, waiting = list(self._running.values()), list(self._waiting)
        held = Counter(page for seq in running for page in seq.pages)
        for page in range(self._cache.num_pages):
            assert self.pages.holders(page) == held[page], f"page {page}: wrong number of holders"
        slots = sorted(self._free_slots + [seq.slot for seq in running])
        assert slots == list(range(self._config.max_num_seqs)), "a slot is lost or held twice"
        order = [seq.id for seq in running + waiting]
        assert order == sorted(set(order)), "not in order of arrival"
        assert set(order) == set(self._live), "a live sequence is in no queue"
        assert all(seq.running for seq in running) and not any(seq.running for seq in waiting)
        assert list(self._by_request.values()) == list(self._live.values())
        for seq in self._live.values():
            assert self._by_request[seq.request_id] is seq
            seq.check(self._page_size)


def _scored(seq: Sequence, start: int, end: int) -> Scored | None:
    """The prompt tokens after positions `start` to `end` that are still to be scored."""
    if seq.params.prompt_logprobs is None:
        return None
    first, last = max(start, seq.scored), min(end, seq.num_prompt - 1)
    if first >= last:
        return None
    seq.scored = last
    return Scored(
        first - start, tuple(seq.tokens[first + 1 : last + 1]), seq.params.prompt_logprobs
    )


def _admission(seq: Sequence) -> Admission:
    tokens = tuple(seq.tokens) if seq.params.penalised else ()
    return Admission(seq.slot, seq.params, tokens, seq.num_prompt)


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _wanted(logprobs: TokenLogprobs | None, most: int | None) -> TokenLogprobs | None:
    """The device reports one number of alternatives for all; a request gets as many as it asked."""
    if logprobs is None or most is None:
        return None
    return TokenLogprobs(logprobs.logprob, logprobs.top[:most])
