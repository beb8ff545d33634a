"""The scheduler: decodes first, then prefill chunks; admission by predicted need; recompute."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterable

from jaxserve.api import (
    DeadlineMissed,
    FinishReason,
    Overloaded,
    Rejected,
    Request,
    TokenEvent,
)
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Admission, PageEntry, Row, Sampled, StepPlan
from jaxserve.scheduler import prefix, results
from jaxserve.scheduler.admission import OutputLengths, has_room, refuse_impossible
from jaxserve.scheduler.budget import Decodes, TokenBudget, Unread
from jaxserve.scheduler.cohort import Cohort, decodes_alone
from jaxserve.scheduler.deadlines import waiting_queue
from jaxserve.scheduler.guided import Guided
from jaxserve.scheduler.holdings import Holdings
from jaxserve.scheduler.learned_times import Correction
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.preemption import choose_victim
from jaxserve.scheduler.rows import admission, chunk_row, decode_row
from jaxserve.scheduler.sequence import Sequence
from jaxserve.step_times import StepTimes

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
    (who is preempted is settled before any row is planned). The device executes plans in order,
    so every write and read of the old holder comes before the page table entries of the new one,
    and the new one writes each position before it reads it:

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

    Why pages may be shared: `Holdings`. Why every request ends: `preemption`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        times: StepTimes | None = None,
        lengths: OutputLengths | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`times` decide about chunks, `lengths` about admission; `clock` gives seconds."""
        self._config = config
        self._cache = cache
        self._clock = clock
        self._page_size = cache.page_size
        self._holdings = Holdings(config, cache)
        context = config.max_chunk_context
        self._chunk_pages = sys.maxsize if context is None else self._holdings.pages_for(context)
        self._budget = TokenBudget(
            times, max_tokens=config.max_num_batched_tokens, max_itl=config.max_itl
        )
        self._lengths = lengths or OutputLengths()
        self._waiting = waiting_queue(config, cache, times, self._lengths)
        self._running: dict[int, Sequence] = {}
        self._live: dict[int, Sequence] = {}
        self._by_request: dict[str, Sequence] = {}
        self._guided = Guided(self._live)
        self._next_id = 0
        self._blocked: Sequence | None = None
        """It does not fit before somebody gives pages back."""
        self._uncommitted: list[TokenEvent] = []
        """Events of a commit that is not over: those of one that failed are in `fail`'s."""
        self.num_preemptions = self.num_steps = 0
        self.num_prompt_tokens = 0
        """Of prompts, that committed steps have computed or found cached; each counts once."""

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len

    @property
    def pages(self) -> PagePool:
        return self._holdings.pages

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
        """Queue a request; Rejected if it can never be served, Overloaded if the queue is full.
        After these, as after any other exception, all is as it was before."""
        if request.id in self._by_request:
            raise Rejected(f"a request with the id {request.id!r} is not finished")
        refuse_impossible(request, self._config, self._cache)
        # A burst is read at once: those that the next plan can admit do not count as queued.
        queued = len(self._waiting) - self._holdings.num_free_slots
        if queued >= self._config.max_queued:
            raise Overloaded(f"{queued} requests are waiting, the most allowed")
        now = self._clock()
        # The last token of a sequence is never computed, so it needs no room in the cache.
        limit = min(self._config.max_model_len, self._cache.usable_tokens + 1)
        seq = Sequence.of(
            request,
            seq_id=self._next_id,
            limit=limit,
            level=request.priority if self._config.policy == "priority" else 0,
            root=prefix.root(self._cache.identity, request.cache_salt),
            now=now,
            ttft_slo=self._config.ttft_slo if request.ttft_slo is None else request.ttft_slo,
        )
        if self._config.policy == "slo":
            seq.uncached -= self._holdings.cached_tokens(seq)
        self._waiting.join(seq, now)
        self._next_id += 1
        self._live[seq.id] = self._by_request[seq.request_id] = seq

    def abort(self, request_id: str) -> None:
        """Drop a request in any state: no more events of it. An unknown id is already over."""
        seq = self._by_request.get(request_id)
        if seq is not None:
            self._end(seq)

    def shed(self) -> list[tuple[str, DeadlineMissed]]:
        """Drop requests that wait and can no longer be served in time; ids and what to tell."""
        now = self._clock()
        if now < self._waiting.next_review:
            return []
        running = self._running.values()
        decodes = Decodes(len(running), sum(seq.computed for seq in running))
        rate = self._budget.prefill_rate(decodes)
        shed = self._waiting.review(now, self.num_steps, rate)
        for seq, _ in shed:
            self._forget(seq)
        return [(seq.request_id, error) for seq, error in shed]

    # One step.

    def learn(self, plan: StepPlan, seconds: float) -> Correction | None:
        """A step took so long, from the end of the one before it: see `LearnedTimes.learn`."""
        return self._budget.learn(plan, seconds)

    def plan(self) -> StepPlan | None:
        """The next step, or None. The scheduler counts it as launched from here on.

        No slot is admitted twice in a plan, and no page table entry is set twice.
        """
        rows: list[Row] = []
        entries: list[PageEntry] = []
        admissions: list[Admission] = []
        prefilling, decodes = self._plan_decodes(rows, entries)
        pending = self._pending(prefilling)
        queued = len(prefilling) + len(self._waiting) - len(pending)
        budget = self._budget.chunk_tokens(decodes, pending, queued)
        room, pages_for = self._chunk_pages, self._holdings.pages_for
        for seq in prefilling:
            if budget and pages_for(min(seq.prefill_end, seq.computed + budget)) <= room:
                budget -= self._plan_chunk(seq, budget, rows)
                room -= pages_for(rows[-1].start + rows[-1].num_tokens)
        while budget and (seq := self._admit(entries, room)):
            admissions.append(admission(seq))
            budget -= self._plan_chunk(seq, budget, rows)
            room -= pages_for(rows[-1].start + rows[-1].num_tokens)
        if not rows:
            return None
        return StepPlan(rows=tuple(rows), admissions=tuple(admissions), pages=tuple(entries))

    def _plan_decodes(
        self, rows: list[Row], entries: list[PageEntry]
    ) -> tuple[list[Sequence], Decodes]:
        """One token for each running sequence; returns those that are still in their prefill, and
        what the others are."""
        prefilling: list[Sequence] = []
        decoding: list[Sequence] = []
        growing: list[Sequence] = []
        page_size, ending, guided = self._page_size, False, 0
        for seq in self._running.values():
            start = seq.computed
            if start < seq.prefill_end:
                prefilling.append(seq)
            elif start + 1 >= seq.limit:
                ending = True  # its last token is in flight
            else:
                if seq.guide is not None:
                    guided += seq.guide.following is None
                    if seq.guided_to_wait:
                        continue  # its mask is computed
                decoding.append(seq)
                if start == len(seq.pages) * page_size:
                    growing.append(seq)
        if len(growing) > self.pages.num_free:
            idle = self._make_room(growing, ending)
            decoding = [seq for seq in decoding if seq.id not in idle]
        entries.extend(map(self._holdings.grow, growing))
        rows.extend(map(decode_row, decoding))
        return prefilling, Decodes(len(rows), sum(row.start for row in rows), guided)

    def _make_room(self, growing: list[Sequence], ending: bool) -> set[int]:
        """Remove from `growing` until each of the rest can have a page; returns who is idle.

        The least costly are preempted, unless somebody ends with this step: then, or if nobody
        can be preempted, the last in rank go without a row until there are pages.
        """
        growing.sort(key=lambda seq: seq.rank)
        idle: set[int] = set()
        while len(growing) > self.pages.num_free:
            victim = None if ending else choose_victim(self._running.values(), self._holdings)
            if victim is None:
                idle.add(growing.pop().id)
                continue
            self._preempt(victim)
            idle.add(victim.id)
            if victim in growing:
                growing.remove(victim)
        return idle

    def _preempt(self, seq: Sequence) -> None:
        """Back to its place in the queue, to compute again what is not cached."""
        self._vacate(seq)
        self._waiting.push(seq)
        seq.preemptions += 1
        self.num_preemptions += 1

    def _pending(self, prefilling: list[Sequence]) -> list[Unread]:
        """Prompts that this step could advance, as far as it may matter for the budget."""
        pending = [
            Unread(seq.computed, seq.to_prefill, self._holdings.read(seq)) for seq in prefilling
        ]
        wanted, enough = sum(p.tokens for p in pending), 2 * self._config.max_num_batched_tokens
        for seq in itertools.islice(self._waiting.upcoming(), self._holdings.num_free_slots):
            if wanted >= enough or seq is self._blocked:
                break
            cached = self._holdings.cached_tokens(seq)
            pending.append(Unread(cached, len(seq.tokens) - cached))
            wanted += pending[-1].tokens
        return pending

    def _plan_chunk(self, seq: Sequence, budget: int, rows: list[Row]) -> int:
        """Plan the next chunk of a prefill; returns its tokens."""
        rows.append(chunk_row(seq, budget))
        self._holdings.publish(seq)
        return rows[-1].num_tokens

    def _admit(self, entries: list[PageEntry], room: int) -> Sequence | None:
        """Give the first in the queue a slot and the pages of all its tokens, if they are there.

        The chunks of this step may see `room` pages more.
        """
        now = self._clock()
        seq = self._waiting.first()
        if seq is None or seq is self._blocked or seq.in_flight:
            return None
        if not self._holdings.num_free_slots or seq.guided_to_wait:
            return None
        if self._holdings.pages_for(len(seq.tokens)) > room:
            return None
        hit = self._holdings.cached_pages(seq)
        if not has_room(seq, hit, self._running.values(), self._holdings, self._lengths):
            self._blocked = seq
            return None
        self._waiting.admit(seq, now)
        self._running[seq.id] = seq
        entries.extend(self._holdings.take(seq, hit))
        if seq.admitted < 0:
            seq.admitted, seq.cached = now, seq.prefill_end - seq.to_prefill
        return seq

    def commit(self, plan: StepPlan, sampled: Iterable[Sampled | None]) -> list[TokenEvent]:
        """Take the results of a plan's rows, in order; results of ended sequences are ignored."""
        events = self._uncommitted
        self.num_steps += 1
        live, now = self._live, self._clock()
        for row, result in zip(plan.rows, sampled, strict=True):
            seq = live.get(row.seq_id)
            if seq is None:
                continue  # it ended after this plan was made
            if row.scored is not None and result is not None:
                seq.prompt_logprobs += result.prompt_logprobs
            if row.tokens:
                self.num_prompt_tokens += seq.read_up_to(row.start + len(row.tokens))
            if not row.samples:
                continue
            assert result is not None, "a row that samples has a result"
            if result.token is None:
                events.append(self._spoiled(seq))
                continue
            token, tokens = result.token, seq.tokens
            tokens.append(token)
            seq.in_flight -= 1
            if len(tokens) < seq.plain_until and token not in seq.stops:
                events.append(TokenEvent(seq.request_id, token))
            else:
                events.append(self._take(seq, result, now))
        self._uncommitted = []
        return events

    def _spoiled(self, seq: Sequence) -> TokenEvent:
        """The end of a sequence whose logits are not numbers: its keys and values may be none
        either, so what it has published, like all else, is not found any more."""
        log.error(
            "request %s ends with an error: after %d tokens its logits are not numbers (NaN or"
            " infinite); the prefix cache is emptied",
            seq.request_id,
            len(seq.tokens),
        )
        seq.in_flight -= 1
        self._end(seq)
        self.pages.forget()
        return TokenEvent(seq.request_id, None, FinishReason.ERROR)

    def _take(self, seq: Sequence, result: Sampled, now: float) -> TokenEvent:
        """A token that may be more than one more token."""
        event = results.event_of(seq, result, now)
        self._holdings.publish(seq)
        if event.finish is not None:
            self._end(seq)
        elif seq.guide is not None:
            self._guided.advance(seq, seq.guide, seq.tokens[-1])
        elif not seq.wants_logprobs:
            seq.plain_until = min(seq.limit, self._holdings.next_full_page(seq))
        return event

    def cohort(self, in_flight: StepPlan, token: int) -> Cohort | None:
        """All that run, if they decode, `in_flight` is all of it, and nobody can be admitted.

        Then the steps to come are equal until one of them ends, a request comes or leaves, or
        pages are short. For the simulator: `token` is what they sample.
        """
        running = self._running
        if len(in_flight.rows) != len(running) or not self._nobody_to_admit():
            return None
        for seq, row in zip(running.values(), in_flight.rows, strict=True):
            if not decodes_alone(seq, row, self._page_size):
                return None
        return Cohort(running.values(), self._holdings, token)

    def _nobody_to_admit(self) -> bool:
        first = self._waiting.first()
        return first is None or first is self._blocked or not self._holdings.num_free_slots

    @property
    def next_review(self) -> float:
        """When who is next may change although nothing has happened but that time passed."""
        return self._waiting.next_review

    def await_guides(self, timeout: float) -> list[TokenEvent]:
        """Wait for the masks of sequences that follow a grammar, at most `timeout` seconds in all.

        Waiting for all lets them share the next step. Those that cannot go on end.
        """
        failed = self._guided.wait(timeout)
        for seq, _ in failed:
            self._end(seq)
        return [TokenEvent(seq.request_id, None, finish) for seq, finish in failed]

    def fail(self, plans: Iterable[StepPlan] | None = None) -> list[TokenEvent]:
        """End with an error what is alive of plans that will not be committed; None: everything.

        The device has lost its state: the others that run wait again, to compute their tokens
        anew, and no prefix is found. Every plan made so far is committed before, or in `plans`.
        What a commit that failed had found out before comes first.
        """
        rows = (row.seq_id for plan in plans or () for row in plan.rows)
        ids = list(self._live) if plans is None else dict.fromkeys(rows)
        failed = [self._live[seq_id] for seq_id in ids if seq_id in self._live]
        for seq in failed:
            self._end(seq)
        for seq in list(self._running.values()):
            assert not seq.in_flight, "a plan with a sample of it is neither committed nor failed"
            self._vacate(seq)
            self._waiting.push(seq)
        self.pages.forget()
        found, self._uncommitted = self._uncommitted, []
        return found + [TokenEvent(seq.request_id, None, FinishReason.ERROR) for seq in failed]

    def reset_prefix_cache(self) -> None:
        """Prefixes computed so far are not found any more; running sequences keep theirs."""
        self.pages.forget()

    def _vacate(self, seq: Sequence) -> None:
        """A running sequence gives back its pages and its slot."""
        del self._running[seq.id]
        self._holdings.give_back(seq)
        self._blocked = None

    def _end(self, seq: Sequence) -> None:
        """Forget a live sequence; rows of it that are in flight find nobody in `commit`."""
        if seq.running:
            self._vacate(seq)
            self._lengths.observe(seq.most_generated, max(seq.generated, 1))
        else:
            self._waiting.remove(seq)
        self._waiting.ended(seq)
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        if self._blocked is seq:
            self._blocked = None
        del self._live[seq.id]
        del self._by_request[seq.request_id]

    def check(self) -> None:
        """AssertionError if the accounts contradict each other. Linear in pages and sequences."""
        running, waiting = list(self._running.values()), list(self._waiting)
        self._holdings.check(running)
        ranks = [seq.rank for seq in waiting]
        assert ranks == sorted(ranks), "the queue is not in order"
        assert sorted(seq.id for seq in running + waiting) == list(self._live), "one is in no queue"
        assert all(seq.running for seq in running) and not any(seq.running for seq in waiting)
        assert list(self._by_request.values()) == list(self._live.values())
        for seq in self._live.values():
            assert self._by_request[seq.request_id] is seq
            seq.check(self._page_size)
