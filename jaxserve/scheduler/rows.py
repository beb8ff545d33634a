"""Builds the rows of a step and counts their tokens as computed."""

from __future__ import annotations

from jaxserve.plan import Admission, Row, Scored, Verify
from jaxserve.scheduler.sequence import Sequence


def decode_row(seq: Sequence) -> Row:
    """Returns a row that computes the last sampled token, which only the device may know yet."""
    start, mask = seq.computed, seq.mask
    seq.drafts_on_device = False
    seq.computed = start + 1
    seq.in_flight += 1
    return Row(seq.id, seq.slot, start, (), True, seq.wants_logprobs, mask)


def verify_row(
    seq: Sequence,
    end: int,
    positions: int,
    drafts: tuple[int, ...] | None,
    masks: tuple[bytes, ...] = (),
) -> Row:
    """Returns a row that computes the last sampled token and drafts after it; see `plan.Verify`. It
    counts as one token until its results arrive."""
    start = seq.computed
    positions = min(positions, end - start)
    if masks and drafts is not None:  # the masks belong to these drafts only
        drafts, masks = drafts[: positions - 1], masks[:positions]
    verify = Verify(positions, end, drafts, follows=seq.drafts_in_flight > 0, masks=masks)
    seq.computed = start + 1
    seq.in_flight += 1
    seq.drafts_in_flight += positions - 1
    seq.drafts_on_device = True
    return Row(seq.id, seq.slot, start, (), True, seq.wants_logprobs, verify=verify)


def chunk_row(seq: Sequence, budget: int) -> Row:
    """Returns a row with the next chunk of a prefill: at most `budget` tokens, at least one.

    A chunk ends where cached tokens begin (`Sequence.skip_from`).
    """
    start = seq.computed
    end = min(seq.prefill_end, start + budget, seq.skip_from or seq.prefill_end)
    samples = end == seq.prefill_end
    logprobs = samples and seq.wants_logprobs
    mask = seq.mask if samples else None
    tokens = tuple(seq.tokens[start:end])
    seq.computed, seq.drafts_on_device = end, False
    if end == seq.skip_from:
        seq.computed, seq.skip_from, seq.skip_to = seq.skip_to, 0, 0
    seq.in_flight += samples
    return Row(seq.id, seq.slot, start, tokens, samples, logprobs, mask, _scored(seq, start, end))


def admission(seq: Sequence) -> Admission:
    """Returns what the device must know about a sequence that takes a slot."""
    tokens = tuple(seq.tokens) if seq.params.penalised else ()
    return Admission(seq.slot, seq.params, tokens, seq.num_prompt)


def _scored(seq: Sequence, start: int, end: int) -> Scored | None:
    """Returns the prompt tokens after positions `start` to `end` that still need logprobs."""
    if seq.params.prompt_logprobs is None:
        return None
    first, last = max(start, seq.scored), min(end, seq.num_prompt - 1)
    if first >= last:
        return None
    seq.scored = last
    return Scored(
        first - start, tuple(seq.tokens[first + 1 : last + 1]), seq.params.prompt_logprobs
    )
