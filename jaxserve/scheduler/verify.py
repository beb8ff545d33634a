"""Plans verify rows: which sequences get drafts, their pages, and the handling of results.

While a verify row is in flight, the host knows only two bounds of the next row's first position.
`Sequence.computed` is the lower bound, for which all drafts in flight are rejected. The rest of the
scheduler uses it, as if each row yielded one token. `Sequence.drafts_in_flight` is the distance to
the upper bound. A row is planned only if it computes a position even from the upper bound, before
its last page and its limit end. Otherwise it might yield no token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxserve.plan import PageEntry, Row, Sampled, Verify
from jaxserve.scheduler.guided import Drafted
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.learned_times import LearnedTimes
from jaxserve.scheduler.rows import decode_row, verify_row
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.speculation.decision import Decision


class Proposal(NamedTuple):
    """Drafts for the next row of a sequence."""

    positions: int
    """The most positions that the row should compute. 1: only its next row will have drafts."""
    drafts: tuple[int, ...] | None
    """Tokens for positions from `Sequence.computed` + 1 on; None: the drafts are on the device."""
    survival: tuple[float, ...] = ()
    """For each draft of the row, the probability that it and all drafts before it are accepted.
    Drafts without a value count as rejected."""
    masks: tuple[bytes, ...] = ()
    """Token masks of structured output: at the row's first position and after each draft."""


class Proposer(Protocol):
    """Proposes drafts."""

    def __call__(self, sequences: list[Sequence]) -> Mapping[int, Proposal]:
        """Returns proposals by sequence id, for some of the decoding sequences."""
        ...


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a scheduler needs to plan verify rows."""

    proposer: Proposer
    buckets: tuple[tuple[int, int], ...]
    """`Buckets.verify`: (rows, positions per row)."""
    observe: Callable[[int, int], None] | None = None
    """Called for each row with drafts from the device, with the largest possible number of drafts
    and the number accepted."""
    ended: Callable[[Sequence], None] | None = None
    """Called for each sequence that ends."""
    room: int = 0
    """Positions after a row's end that need pages, because a head drafts there."""


class DraftCounts:
    """Counts computed and accepted drafts, including those accepted after a stop."""

    def __init__(self, most: int):
        """`most`: the most drafts per row."""
        self.rows = 0
        """Finished rows that had drafts."""
        self.drafts = 0
        self.accepted = [0] * most
        """Accepted drafts by their place in the row."""

    def take(self) -> tuple[int, int, list[int]]:
        """Returns rows, drafts and accepted drafts by place, and resets the counts."""
        counts = self.rows, self.drafts, self.accepted
        self.rows, self.drafts, self.accepted = 0, 0, [0] * len(self.accepted)
        return counts

    def add(self, drafts: int, accepted: int) -> None:
        """Counts a row."""
        self.rows += drafts > 0
        self.drafts += drafts
        for place in range(accepted):
            self.accepted[place] += 1


_WORTH_A_MASK = 0.25
"""The least probability of a draft for which the grammar's process computes the mask after it.
Chosen, not measured."""

_CHEAP_ROWS, _NEAR, _LONGEST_REST = 8, 0.5, 32
"""Lookups for up to `_CHEAP_ROWS` rows run in every step. With more rows, about that many are
looked up first. If these expect less than `_NEAR` of the drafts that would pay, lookups pause for
up to `_LONGEST_REST` steps. Chosen values; a lookup was measured at some 3 us per row and step."""

_SPREAD = 0x9E3779B1
"""Multiplier from the golden ratio. It spreads consecutive ids evenly over 32 bits."""

_FORCED = 0.98
"""Probability of a draft that the grammar forces. Some masks also allow other tokenisations of the
same text, so it is below 1."""


class _Drafts(NamedTuple):
    positions: int
    drafts: tuple[int, ...] | None
    masks: tuple[bytes, ...] = ()


_NO_DRAFTS = _Drafts(1, ())


class _Planned(NamedTuple):
    seq: Sequence
    proposal: _Drafts | None
    end: int
    """See `plan.Verify.end`."""
    new_pages: int
    """Pages that the row needs in each cache group."""


class VerifyRows:
    """Plans the rows of decoding sequences. Rows have drafts if they pay and the step has no
    chunks."""

    def __init__(
        self,
        verification: Verification,
        kv_cache: KVCacheManager,
        times: LearnedTimes | None,
        *,
        step_tokens: int,
        context_pages: int,
        max_itl: float,
    ):
        """Creates a planner. Without `times` it verifies all drafts.

        Args:
          step_tokens: the most positions per step.
          context_pages: the most pages that all chunks of a step may attend to together. Attention
            treats the rows of a verify step as chunks.
          max_itl: see `Decision`.
        """
        self._verification, self._kv_cache = verification, kv_cache
        self._step_tokens, self._context_pages = step_tokens, context_pages
        widest = max((positions for _, positions in verification.buckets), default=1)
        self._window = 2 * (widest - 1)
        positions = {each for _, each in verification.buckets}
        self._decision = times and Decision(times, positions, max_itl=max_itl)
        self._most_rows = max((rows for rows, _ in verification.buckets), default=0)
        self._rest, self._resting = 1, 0
        """Length of the last pause of lookups in steps, and the steps left of it."""
        self.verifies = False
        """Whether the last plan has verify rows."""
        self.in_flight = 0
        """Number of plans in flight with verify rows. If 0, no sequence has drafts in flight."""
        self._hoped = True
        """Whether the first rows that were looked up suggest that drafts pay."""
        self.counts = DraftCounts(widest - 1)
        self.ended = verification.ended
        """Called for each sequence that ends."""

    def rows(
        self,
        decoding: list[Sequence],
        entries: list[PageEntry],
        *,
        chunks: bool,
        guided: bool,
    ) -> list[Row]:
        """Returns a row for each sequence that need not wait for a commit. With a verify row, the
        step can have no chunks.

        Args:
          decoding: decoding sequences. Those without drafts in flight have a page for their next
            position.
          entries: new page table entries are appended to it.
          chunks: whether prompts wait for a step with chunks. If so, there are no new drafts, and
            at most one verify step for the sequences in flight comes first.
          guided: whether any sequence has structured output.
        """
        unsettled, self._hoped = 0, True
        if self.in_flight:
            unsettled = sum(seq.drafts_in_flight > 0 for seq in decoding)
        proposals: Mapping[int, Proposal] = {}
        if not chunks and 0 < len(decoding) <= self._most_rows:
            proposals = self._proposals(decoding, unsettled)
            if guided:
                proposals = {**proposals, **_guided(decoding)}
        most = 0
        if proposals or unsettled:
            most = self._most_positions(decoding, proposals, unsettled, chunks=chunks)
            if not most and not self._hoped:
                self._begin_rest(2 * self._rest)
        planned = self._planned(decoding, proposals, most) if most else []
        self.verifies = bool(planned)
        if not planned:
            free = decoding if not unsettled else [s for s in decoding if not s.drafts_in_flight]
            return list(map(decode_row, free))
        self.in_flight += 1
        rows: list[Row] = []
        for seq, proposal, end, new_pages in planned:
            for _ in range(new_pages):
                entries.extend(self._kv_cache.extend(seq))
            plain = proposal is None and not seq.drafts_in_flight
            rows.append(
                decode_row(seq) if plain else verify_row(seq, end, *(proposal or _NO_DRAFTS))
            )
        return rows

    def _proposals(self, decoding: list[Sequence], unsettled: int) -> Mapping[int, Proposal]:
        """Returns proposals. With many rows, it looks up the same few rows first, and the others
        only if these have nearly enough drafts: lookups for all rows in each step would take some
        percent of the step on the host."""
        rows, decision, propose = len(decoding), self._decision, self._verification.proposer
        everyone = decision is None or unsettled > 0 or rows <= _CHEAP_ROWS
        if self._resting and not everyone:
            self._resting -= 1
            return {}
        self._resting = 0
        asked = [seq for seq in decoding if seq.guide is None]
        if decision is None or everyone:
            return propose(asked)
        context = sum(seq.computed for seq in decoding)
        needed = decision.least_drafts(rows, context)
        if math.isinf(needed):
            self._begin_rest(_LONGEST_REST)
            return {}
        share = _CHEAP_ROWS * 2**32 // rows
        first = [seq for seq in asked if seq.id * _SPREAD % 2**32 < share]
        found = propose(first)
        expected = sum(sum(each.survival) for each in found.values()) * len(asked)
        if expected < _NEAR * needed * len(first):
            self._begin_rest(2 * self._rest)
            return {}
        self._hoped = decision.trust * expected >= needed * len(first)
        if self._hoped:
            self._rest = 1
        scouts = {seq.id for seq in first}
        return {**found, **propose([seq for seq in asked if seq.id not in scouts])}

    def _begin_rest(self, steps: int) -> None:
        self._rest = self._resting = min(steps, _LONGEST_REST)

    def _most_positions(
        self,
        decoding: list[Sequence],
        proposals: Mapping[int, Proposal],
        unsettled: int,
        *,
        chunks: bool,
    ) -> int:
        """Returns the most positions per row of the next step; 0: no verify step."""
        rows, decision = len(decoding), self._decision
        if decision is None:
            shapes = self._verification.buckets
            most = max((positions for most, positions in shapes if most >= rows), default=0)
            return most if proposals else min(most, 1)
        context = sum(seq.computed for seq in decoding)
        if chunks:
            return int(decision.settles(rows, context, unsettled))
        survivals = [each.survival for each in proposals.values() if each.positions > 1]
        coming = [each.survival for each in proposals.values() if each.positions == 1]
        return decision.choose(rows, context, survivals, unsettled=unsettled, coming=coming)

    def _planned(
        self, decoding: list[Sequence], proposals: Mapping[int, Proposal], most: int
    ) -> list[_Planned]:
        """Returns the sequences' rows in a verify step of at most `most` positions each; an empty
        list if their context exceeds the step's scratch memory."""
        planned: list[_Planned] = []
        left, room, spare = self._step_tokens - len(decoding), self._context_pages, self._spare()
        for seq in decoding:
            proposal = self._cut(proposals.get(seq.id), min(most, 1 + left))
            positions = proposal.positions if proposal else 1
            end, new_pages = self._end(seq, positions, spare)
            if end > seq.computed + seq.drafts_in_flight:
                planned.append(_Planned(seq, proposal, end, new_pages))
                left, spare = left - positions + 1, spare - new_pages
                room -= self._kv_cache.pages_for(end)
        drafted = any(each.proposal or each.seq.drafts_in_flight for each in planned)
        return planned if drafted and room >= 0 else []

    def _cut(self, proposal: Proposal | None, most: int) -> _Drafts | None:
        """Returns a proposal cut to at most `most` positions; None without drafts."""
        if proposal is None or most < 2:
            return None
        drafts = proposal.drafts and proposal.drafts[: self._window]
        return _Drafts(min(proposal.positions, most), drafts, proposal.masks)

    def guess(self, sequences: list[Sequence]) -> tuple[int, Mapping[int, Drafted]]:
        """Guesses the next tokens of structured output, so that another process can compute their
        masks before the next step is planned. See `guided.Guess`. Guesses nothing if more
        sequences run than a verify step can take."""
        if self._kv_cache.num_running > self._most_rows:
            return 0, {}
        found: dict[int, Drafted] = {}
        for key, proposal in self._verification.proposer(sequences).items():
            likely = [each for each in proposal.survival if each >= _WORTH_A_MASK]
            found[key] = (proposal.drafts or ())[: len(likely)], tuple(likely)
        return self._window // 2, found

    def _end(self, seq: Sequence, positions: int, spare: int) -> tuple[int, int]:
        """Returns the end of a row (exclusive) and the new pages that it needs, at most `spare`.

        Up to the end, the row can compute `positions` positions from any possible start, and a
        head can draft after them.
        """
        last, size = seq.computed + seq.drafts_in_flight, self._kv_cache.page_size
        end = last + positions + self._verification.room
        end = min(end, seq.limit - 1, seq.computed + self._step_tokens)
        new_pages = min(max(-(-(end - seq.capacity) // size), 0), spare)
        return min(end, seq.capacity + new_pages * size), new_pages

    def _spare(self) -> int:
        """Returns the free pages per group beyond one for each running sequence. Each may soon need
        one, and drafts must not take it."""
        free = min(group.pool.num_free for group in self._kv_cache.groups)
        return max(free - self._kv_cache.num_running, 0)

    def unrolled(
        self, results: Iterable[tuple[Row, Sampled | None]], live: Mapping[int, Sequence]
    ) -> Iterator[tuple[Row, Sampled | None]]:
        """Yields a row once per token of its result. Tokens after the first count as in flight
        only from now on, not from when the row was planned.

        Args:
          live: sequences that have not ended, by id.
        """
        for row, result in results:
            seq = live.get(row.seq_id)
            further = () if result is None else result.further
            if seq is not None and row.verify is not None:
                self._count(seq, row, row.verify, len(further))
                seq.drafts_in_flight -= row.verify.positions - 1
                seq.in_flight += len(further)
                if seq.running:
                    seq.computed += len(further)
            yield row, result
            for each in further:
                yield row, each
        self.in_flight -= 1

    def failed(self) -> None:
        """Records that no plan is in flight any more."""
        self.in_flight = 0

    def _count(self, seq: Sequence, row: Row, asked: Verify, accepted: int) -> None:
        """Counts the computed drafts. Their number depends on where the row began."""
        begin = len(seq.tokens) - 1
        known = asked.positions if asked.drafts is None else len(asked.drafts) - begin + row.start
        drafts = max(min(asked.positions - 1, asked.end - 1 - begin, known), accepted)
        self.counts.add(drafts, accepted)
        if asked.drafts is None and self._verification.observe is not None:
            self._verification.observe(drafts, accepted)
        if self._decision is not None:
            self._decision.observe(accepted)


def _guided(decoding: list[Sequence]) -> dict[int, Proposal]:
    """Returns drafts with ready masks, for structured output without tokens in flight."""
    found: dict[int, Proposal] = {}
    for seq in decoding:
        if seq.guide is None or seq.in_flight or not seq.guide.ahead.drafts:
            continue
        drafts, forced, masks = seq.guide.ahead
        survival = [_FORCED ** (place + 1) for place in range(forced)]
        reached = seq.guessed[forced - 1] if 0 < forced <= len(seq.guessed) else 1.0
        survival += [each / reached for each in seq.guessed[forced : len(drafts)]]
        masks = (seq.guide.mask, *masks)
        found[seq.id] = Proposal(1 + len(drafts), drafts, tuple(survival), masks)
    return found
