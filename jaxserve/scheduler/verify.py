"""Verify rows in the scheduler: which sequences get drafts, their pages, and what comes back.

While a verify row is in flight, the host knows two bounds of where the sequence's next row begins.
`Sequence.computed` is the lower one: all drafts in flight are rejected. So everything else sees a
sequence that gets one token for each of its rows. `Sequence.drafts_in_flight` is the distance to
the upper one. A row is planned only if it computes a position even there: behind the last page or
the limit nothing is left to compute, and such a row would yield nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxserve.plan import PageEntry, Row, Sampled
from jaxserve.scheduler.kv_cache_manager import KVCacheManager
from jaxserve.scheduler.rows import decode_row, verify_row
from jaxserve.scheduler.sequence import Sequence


class Proposal(NamedTuple):
    """Drafts for the next row of a sequence."""

    positions: int
    """The most positions that the row should compute, at least 1."""
    drafts: tuple[int, ...] | None
    """For position `Sequence.computed` + 1 and those after it; None: those on the device."""


class Proposer(Protocol):
    """Guesses what comes next."""

    def __call__(self, seq: Sequence) -> Proposal | None:
        """Returns drafts for a sequence that decodes; None: it has no guess."""
        ...


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a scheduler needs to plan verify rows."""

    proposer: Proposer
    buckets: tuple[tuple[int, int], ...]
    """`Buckets.verify`: rows and positions per row."""


class _Planned(NamedTuple):
    seq: Sequence
    proposal: Proposal | None
    end: int
    """See `plan.Verify.end`."""
    new_pages: int
    """That it needs in each group."""


class VerifyRows:
    """Plans the rows of sequences that decode, with drafts where no chunk shares the step."""

    def __init__(
        self,
        verification: Verification,
        kv_cache: KVCacheManager,
        *,
        step_tokens: int,
        context_pages: int,
    ):
        """`step_tokens`: positions that a step may compute. `context_pages`: that all chunks of a
        step may see together. Attention takes the rows of a verify step for chunks."""
        self._verification, self._kv_cache = verification, kv_cache
        self._step_tokens, self._context_pages = step_tokens, context_pages
        widest = max((positions for _, positions in verification.buckets), default=1)
        self._window = 2 * (widest - 1)

    def rows(
        self, decoding: list[Sequence], entries: list[PageEntry], *, chunks: bool
    ) -> list[Row]:
        """Returns a row for each sequence, except for those that must wait for a commit.

        Args:
          decoding: sequences that decode. Those without drafts in flight have a page for their next
            position.
          entries: takes the new entries of page tables.
          chunks: the step may have chunks, so all rows are decode rows.
        """
        planned = [] if chunks else self._planned(decoding)
        if not any(each.proposal for each in planned):
            return [decode_row(seq) for seq in decoding if not seq.drafts_in_flight]
        rows: list[Row] = []
        for seq, proposal, end, new_pages in planned:
            for _ in range(new_pages):
                entries.extend(self._kv_cache.extend(seq))
            plain = proposal is None and not seq.drafts_in_flight
            rows.append(decode_row(seq) if plain else verify_row(seq, end, *(proposal or (1, ()))))
        return rows

    def _planned(self, decoding: list[Sequence]) -> list[_Planned]:
        """Returns what the sequences may compute in a verify step; nothing if no bucket or scratch
        memory holds them all."""
        shapes = self._verification.buckets
        most = max((positions for rows, positions in shapes if rows >= len(decoding)), default=0)
        if not most:
            return []
        planned: list[_Planned] = []
        left, room, spare = self._step_tokens - len(decoding), self._context_pages, self._spare()
        for seq in decoding:
            proposal = self._proposal(seq, min(most, 1 + left))
            positions = proposal.positions if proposal else 1
            end, new_pages = self._end(seq, positions, spare)
            if end > seq.computed + seq.drafts_in_flight:
                planned.append(_Planned(seq, proposal, end, new_pages))
                left, spare = left - positions + 1, spare - new_pages
                room -= self._kv_cache.pages_for(end)
        return planned if room >= 0 else []

    def _proposal(self, seq: Sequence, most: int) -> Proposal | None:
        """Returns the drafts for a sequence and at most so many positions."""
        proposal = None if seq.guide is not None else self._verification.proposer(seq)
        if proposal is None:
            return None
        drafts = proposal.drafts and proposal.drafts[: self._window]
        return Proposal(min(proposal.positions, most), drafts)

    def _end(self, seq: Sequence, positions: int, spare: int) -> tuple[int, int]:
        """Returns the position that a row must not reach, so that it can compute so many from
        wherever it begins, and how many pages it needs for that, of those that are to spare."""
        last, size = seq.computed + seq.drafts_in_flight, self._kv_cache.page_size
        end = min(last + positions, seq.limit - 1, seq.computed + self._step_tokens)
        new_pages = min(max(-(-(end - seq.capacity) // size), 0), spare)
        return min(end, seq.capacity + new_pages * size), new_pages

    def _spare(self) -> int:
        """Returns how many pages are free in each group beyond one for each running sequence, which
        may soon need it: drafts must not cost anybody a page."""
        free = min(group.pool.num_free for group in self._kv_cache.groups)
        return max(free - self._kv_cache.num_running, 0)


def unrolled(
    results: Iterable[tuple[Row, Sampled | None]], live: Mapping[int, Sequence]
) -> Iterator[tuple[Row, Sampled | None]]:
    """Yields a row once for each token that it yielded. Tokens beyond the first were not counted as
    in flight when the row was planned; they are from when they come back.

    Args:
      live: sequences that have not ended, by id.
    """
    for row, result in results:
        seq = live.get(row.seq_id)
        further = () if result is None else result.further
        if seq is not None and row.verify is not None:
            seq.drafts_in_flight -= row.verify.positions - 1
            seq.in_flight += len(further)
            if seq.running:
                seq.computed += len(further)
        yield row, result
        for each in further:
            yield row, each
