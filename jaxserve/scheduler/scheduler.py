"""The scheduler: decode rows first, then prefill chunks; admission by predicted need."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping

from jaxserve.api import DeadlineMissed
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.kv_events.events import Sink
from jaxserve.plan import Admission, PageEntry, Row, StepPlan
from jaxserve.scheduler.admission import OutputLengths, has_room
from jaxserve.scheduler.budget import Decodes, Prompt, TokenBudget
from jaxserve.scheduler.commits import Commits
from jaxserve.scheduler.host_tier import TierParts
from jaxserve.scheduler.kv_cache_manager import Hit
from jaxserve.scheduler.learned_times import Correction, LearnedTimes
from jaxserve.scheduler.preemption import choose_victim
from jaxserve.scheduler.rows import admission, chunk_row, decode_row
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.verify import DraftCounts, Verification, VerifyRows
from jaxserve.step_times import StepTimes


class Scheduler(Commits):
    """Decides which sequences compute which tokens in each step. It never touches the device.

    The loop calls `plan`, launches the plan, and later calls `commit` with the sampled tokens.
    Plans must be launched and committed in the order in which they were made. Any number may be
    planned before the first is committed: one in a synchronous loop, two in a loop that is one step
    ahead. A plan that could not be executed goes to `fail` instead. `plan` returns None when
    nothing can be computed. If `has_work` is true then, a commit is due, or pages are in flight
    from the host (`HostTier`).

    **Why slots and pages may be reused while steps are in flight.** A plan names only slots and
    pages that its sequences hold when `plan` returns, and an ended sequence is never planned again.
    Slots and pages that `commit`, `abort`, `fail` or a preemption frees are allocated by a later
    plan, or by the current plan, which then has no row of that sequence: preemption is settled
    before any row is planned. The device executes plans in order. So every access of the old holder
    comes before the page table entries of the new one, and the new one writes each position before
    it reads it:

    - *A stop token found in `commit(t)` while a row of the sequence is in plan t+1.* That row was
      launched before the pages were freed, so it writes into its own pages. Its token reaches
      `commit(t+1)` under a `seq_id` that no longer exists and is dropped, even if the slot has a
      new owner by then.
    - *An abort between plan and launch, or launch and commit* is the same case.
    - *Preemption with a sample in flight.* The sample was computed before the pages changed
      holders. `commit` adds it to the waiting sequence's tokens, and may end the sequence. The
      sequence is admitted again only when nothing of it is in flight, so it recomputes only known
      tokens, and no token is sampled twice.
    - *The slot's last token on the device* is read by decode rows only. A new owner samples at the
      end of its prefill, before its first decode row.

    Why pages may be shared: `KVCacheManager`. Why every request ends: `preemption`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        times: StepTimes | None = None,
        lengths: OutputLengths | None = None,
        verification: Verification | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cache_events: Sink | None = None,
        host: TierParts | None = None,
    ):
        """Returns a scheduler without requests.

        Args:
          times: measured step times, which decide chunk sizes; None: every step takes as many
            tokens as fit.
          lengths: expected output lengths, which decide admission.
          verification: the source of drafts; None: no plan verifies drafts.
          clock: returns seconds.
          cache_events: gets the events of cached pages, once the device has computed the pages.
          host: a tier for the pages that the device evicts; None: evicted pages are lost.
        """
        self._times = times
        self._learned = times and LearnedTimes(times)
        super().__init__(
            config,
            cache,
            times=self._learned,
            lengths=lengths,
            clock=clock,
            cache_events=cache_events,
            host=host,
        )
        context = config.max_chunk_context
        self._least = cache.state_block
        self._most_prompts = cache.most_prompts
        self._chunk_pages = sys.maxsize if context is None else self._kv_cache.pages_for(context)
        self._verify = verification and VerifyRows(
            verification,
            self._kv_cache,
            self._learned,
            step_tokens=config.max_num_batched_tokens,
            context_pages=self._chunk_pages,
            max_itl=config.max_itl,
        )
        self._budget = TokenBudget(
            self._learned, max_tokens=config.max_num_batched_tokens, max_itl=config.max_itl
        )

    def shed(self) -> list[tuple[str, DeadlineMissed]]:
        """Drops waiting requests that can no longer meet their deadlines. Returns ids and
        errors."""
        now = self._clock()
        if now < self._waiting.next_review:
            return []
        shed = self._waiting.review(now, self.num_steps, self._prefill_rate)
        for seq, _ in shed:
            self._forget(seq)
        return [(seq.request_id, error) for seq, error in shed]

    @property
    def _prefill_rate(self) -> float | None:
        """Prompt tokens per second beside the running decodes, if known."""
        running = self._running.values()
        decodes = Decodes(len(running), sum(seq.computed for seq in running))
        return self._budget.prefill_rate(decodes)

    # One step.

    def learn(self, plan: StepPlan, seconds: float) -> Correction | None:
        """Reports the duration of a step, from the end of the previous one. See
        `LearnedTimes.learn`."""
        return self._learned.learn(plan, seconds) if self._learned else None

    def poll_host(self) -> bool:
        """Advances page moves to and from the host. Returns whether some sequences have stopped
        waiting. Call it once per turn, after a step is launched or if there is none to launch.
        Before the next step, launch the moves that `host.take` returns after this call and after
        each `plan`."""
        if self.host is None or not self.host.advance():
            return False
        self._blocked = None
        return True

    @property
    def is_moving_pages(self) -> bool:
        """Whether pages are in flight to or from the host. Then `poll_host` is due even without a
        step."""
        return self.host is not None and self.host.busy

    def plan(self) -> StepPlan | None:
        """Returns the next step, or None. The scheduler counts it as launched.

        A plan admits no slot twice and sets no page table entry twice.
        """
        rows: list[Row] = []
        entries: list[PageEntry] = []
        admissions: list[Admission] = []
        self._kv_cache.begin_plan()
        prefilling, decodes = self._plan_decodes(rows, entries)
        verify = self._verify is not None and self._verify.verifies
        if not verify:
            self._plan_prefills(prefilling, decodes, rows, entries, admissions)
        if self.host is not None and len(self._waiting):
            self.host.look_ahead(self._waiting.upcoming(), self._prefill_rate)
        if self.host is not None:
            self.host.planned(sum(row.num_tokens for row in rows))
        if not rows:
            return None
        self._kv_cache.planned()
        return StepPlan(
            rows=tuple(rows),
            admissions=tuple(admissions),
            pages=tuple(entries),
            states=self._kv_cache.state_copies(),
            verify=verify,
        )

    def _plan_prefills(
        self,
        prefilling: list[Sequence],
        decodes: Decodes,
        rows: list[Row],
        entries: list[PageEntry],
        admissions: list[Admission],
    ) -> None:
        """Plans chunks of prompts up to the token budget. Running sequences go first."""
        pending = self._pending(prefilling)
        queued = len(prefilling) + len(self._waiting) - len(pending)
        budget = self._budget.chunk_tokens(decodes, pending, queued)
        if budget:  # a smaller budget cannot hold a block of a prompt
            budget = max(budget, min(self._least, self._config.max_num_batched_tokens - len(rows)))
        room, pages_for = self._chunk_pages, self._kv_cache.pages_for
        most = len(rows) + self._most_prompts
        for seq in prefilling:
            if len(rows) == most:
                return
            if budget and pages_for(min(seq.prefill_end, seq.computed + budget)) <= room:
                budget -= (tokens := self._plan_chunk(seq, budget, rows, entries))
                room -= pages_for(rows[-1].start + tokens) if tokens else 0
        while budget and len(rows) < most and (seq := self._admit(entries, room, budget)):
            admissions.append(admission(seq))
            budget -= self._plan_chunk(seq, budget, rows, entries)
            room -= pages_for(rows[-1].start + rows[-1].num_tokens)

    def _plan_decodes(
        self, rows: list[Row], entries: list[PageEntry]
    ) -> tuple[list[Sequence], Decodes]:
        """Plans one token for each decoding sequence. Returns the sequences that are still in their
        prefill, and the planned decodes."""
        prefilling: list[Sequence] = []
        decoding: list[Sequence] = []
        growing: list[Sequence] = []
        ending, guided, guides, windows = False, 0, False, bool(self._kv_cache.windows)
        for seq in self._running.values():
            start = seq.computed
            if start < seq.prefill_end:
                prefilling.append(seq)
                if windows and self._kv_cache.waits_for_page(seq):
                    growing.append(seq)
            elif start + 1 >= seq.limit:
                ending = True  # its last token is in flight
            else:
                if seq.guide is not None:
                    guides = True
                    guided += seq.guide.following is None
                    if seq.guided_to_wait:
                        continue  # its mask is still being computed
                decoding.append(seq)
                if start == seq.capacity and not seq.drafts_in_flight:
                    growing.append(seq)
        if self._kv_cache.lacks_pages(growing):
            idle = self._make_room(growing, ending)
            decoding = [seq for seq in decoding if seq.id not in idle]
            prefilling = [seq for seq in prefilling if seq.id not in idle]
        for seq in growing:
            entries.extend(self._kv_cache.append_pages(seq))
        if self._verify is None:
            rows.extend(map(decode_row, decoding))
        else:
            chunks = bool(prefilling) or self._may_admit
            rows.extend(self._verify.rows(decoding, entries, chunks=chunks, guided=guides))
        return prefilling, Decodes(len(rows), sum(row.start for row in rows), guided)

    @property
    def _may_admit(self) -> bool:
        """Whether a waiting sequence may join this step. False while no slot or page is free."""
        first = self._waiting.first() if self._kv_cache.num_free_slots else None
        return first is not None and first is not self._blocked

    def _make_room(self, growing: list[Sequence], ending: bool) -> set[int]:
        """Shortens `growing` until each of its sequences can get its pages. Returns the ids that
        miss the step.

        Preempts the cheapest sequences, unless one ends with the step in flight. In that case, or
        if no sequence can be preempted, the sequences with the worst rank wait for pages.
        """
        growing.sort(key=lambda seq: seq.rank)
        idle: set[int] = set()
        for seq in self._running.values():
            self._kv_cache.slide(seq)
        while self._kv_cache.lacks_pages(growing):
            if self.host is not None and self.host.cancel_newest():
                continue
            victim = None if ending else choose_victim(self._running.values(), self._kv_cache)
            if victim is None:
                idle.add(growing.pop().id)
                continue
            self._preempt(victim)
            idle.add(victim.id)
            if victim in growing:
                growing.remove(victim)
        return idle

    def _pending(self, prefilling: list[Sequence]) -> list[Prompt]:
        """Returns the prompts that this step could advance, as many as matter for the budget."""
        computed = self._kv_cache.computed_since_admission
        pending = [Prompt(seq.computed, seq.prefill_remaining, computed(seq)) for seq in prefilling]
        wanted, enough = sum(p.tokens for p in pending), 2 * self._config.max_num_batched_tokens
        for seq in itertools.islice(self._waiting.upcoming(), self._kv_cache.num_free_slots):
            if wanted >= enough or seq is self._blocked:
                break
            if seq.loading:
                continue
            cached = self._kv_cache.cached_tokens(seq)
            pending.append(Prompt(cached, len(seq.tokens) - cached))
            wanted += pending[-1].tokens
        return pending

    def _plan_chunk(
        self, seq: Sequence, budget: int, rows: list[Row], entries: list[PageEntry]
    ) -> int:
        """Plans the next chunk of a prefill. Returns its number of tokens; 0 if the budget is less
        than a block."""
        start = seq.computed
        end, new = self._kv_cache.append_chunk(seq, min(start + budget, seq.prefill_end))
        entries += new
        if end == start:
            return 0
        row = chunk_row(seq, end - start)
        kept = self._kv_cache.chunk_planned(seq, start)
        rows.append(row if kept is None else row._replace(kept=kept))
        self._kv_cache.publish(seq)
        return rows[-1].num_tokens

    def _admit(self, entries: list[PageEntry], room: int, budget: int) -> Sequence | None:
        """Admits the first waiting sequence if a slot and enough pages are free.

        Args:
          room: pages of context that further chunks of this step may read.
          budget: tokens that this step may still compute.
        """
        while (seq := self._next()) is not None:
            if seq is self._blocked or seq.in_flight:
                return None
            if not self._kv_cache.num_free_slots or seq.guided_to_wait:
                return None
            if self._kv_cache.pages_for(len(seq.tokens)) > room:
                return None
            hit = self._kv_cache.cached_pages(seq)
            start = self._kv_cache.start_of(hit)
            end = min(start + budget, len(seq.tokens))
            if self._kv_cache.chunk_end(seq, start, end) == start:
                return None
            if not has_room(seq, hit, self._running.values(), self._kv_cache, self._lengths):
                self._blocked = seq
                return None
            if self.host is None or not self.host.begin(seq, hit.length, self._prefill_rate):
                self._seat(seq, hit, entries)
                return seq
        return None

    def _next(self) -> Sequence | None:
        """Returns the first waiting sequence that does not wait for pages from the host."""
        first = None if self._held else self._waiting.first()
        if first is not None and not first.loading:
            return first
        ready = (each for each in self._waiting.upcoming() if not each.loading)
        return next((each for each in ready if each.admitted >= 0 or not self._held), None)

    def _seat(self, seq: Sequence, hit: Hit, entries: list[PageEntry]) -> None:
        """Gives a waiting sequence its slot and pages."""
        now = self._clock()
        self._waiting.admit(seq, now)
        self._running[seq.id] = seq
        entries.extend(self._kv_cache.allocate(seq, hit))
        seq.waits_for_loads = 0
        if seq.admitted < 0:
            seq.admitted, seq.cached = now, seq.prefill_end - seq.prefill_remaining
            seq.restored_tokens = min(seq.restored_tokens, seq.cached)

    def expected_seconds(self, plan: StepPlan) -> float | None:
        """Returns a step's duration by the times measured at start; None without them."""
        return self._times.of(plan) if self._times else None

    @property
    def drafts(self) -> DraftCounts | None:
        """Counts of proposed and accepted drafts; None if no plan verifies."""
        return self._verify and self._verify.counts

    def bucket_seconds(self) -> Mapping[str, Mapping[int, float]]:
        """Returns the times measured at start, in seconds, by kind and size of bucket."""
        times = self._times
        return {"decode": times.decode, "mixed": times.mixed} if times else {}
