"""Turns the result of a row into an event for the client."""

from __future__ import annotations

from jaxserve.api import FinishReason, Start, TokenEvent, TokenLogprobs
from jaxserve.plan import Sampled
from jaxserve.scheduler.sequence import Sequence


def event_of(seq: Sequence, result: Sampled, now: float) -> TokenEvent:
    """Returns the event of the sequence's newest token, with the finish reason if it ends."""
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
    return event._replace(
        cached_tokens=seq.cached,
        restored_tokens=seq.restored_tokens,
        prompt_logprobs=scores,
        start=start,
    )


def _wanted(logprobs: TokenLogprobs | None, most: int | None) -> TokenLogprobs | None:
    """Cuts the device's fixed number of alternatives to the requested number."""
    if logprobs is None or most is None:
        return None
    return TokenLogprobs(logprobs.logprob, logprobs.top[:most])
