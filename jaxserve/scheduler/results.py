"""What the device found for a row, and what it means for the row's sequence."""

from __future__ import annotations

from jaxserve.api import FinishReason, Start, TokenEvent, TokenLogprobs
from jaxserve.plan import Sampled
from jaxserve.scheduler.sequence import Sequence


def event_of(seq: Sequence, result: Sampled, now: float) -> TokenEvent:
    """The last of the sequence's tokens, which it has just been given, as its client is told."""
    token, length = seq.tokens[-1], len(seq.tokens)
    finish = None
    if token in seq.stops and length >= seq.stops_from:
        finish = FinishReason.STOP
    elif length >= seq.limit:
        finish = FinishReason.LENGTH
    logprobs = _wanted(result.logprobs, seq.params.logprobs)
    preemptions = 0 if finish is None else seq.preemptions
    event = TokenEvent(seq.request_id, token, finish, logprobs, preemptions=preemptions)
    return event if length != seq.num_prompt + 1 else _first(seq, event, now)


def _first(seq: Sequence, event: TokenEvent, now: float) -> TokenEvent:
    scores = None
    if seq.params.prompt_logprobs is not None:
        scores, seq.prompt_logprobs = tuple(seq.prompt_logprobs), []
    start = Start(seq.admitted - seq.arrived, now - seq.admitted, now)
    return event._replace(cached_tokens=seq.cached, prompt_logprobs=scores, start=start)


def _wanted(logprobs: TokenLogprobs | None, most: int | None) -> TokenLogprobs | None:
    """The device reports one number of alternatives for all; a request gets as many as it asked."""
    if logprobs is None or most is None:
        return None
    return TokenLogprobs(logprobs.logprob, logprobs.top[:most])
