"""Who may run: what fits at all, and what the running sequences leave room for."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from jaxserve.api import Rejected, Request
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.holdings import Holdings
from jaxserve.scheduler.sequence import Sequence

_WEIGHT = 0.05
"""Of the newest sequence in the mean of its class."""

_MARGIN = 1.0
"""Less preempts more under steady overload, more leaves pages unused (see the test)."""

_UNKNOWN = 2048
"""Tokens that a sequence is expected to have at most as long as nothing is known of its class."""

_OVERRUN = 1.25
"""A sequence that is as long as expected is expected to grow by this factor."""


class OutputLengths:
    """What part of `max_tokens` sequences generate, learned from those that ended.

    Classes are powers of two of `max_tokens`: what clients ask for tells kinds of requests apart,
    and those that ask for everything share a class of their own. Before the first of a class has
    ended its sequences are expected to use what they asked for, up to `_UNKNOWN`.
    """

    def __init__(self) -> None:
        self._shares: dict[int, tuple[float, float]] = {}
        """Mean and variance by class."""

    def observe(self, max_tokens: int, generated: int) -> None:
        """A sequence ended, for whatever reason."""
        share, kind = generated / max_tokens, max_tokens.bit_length()
        mean, variance = self._shares.get(kind, (share, 0.0))
        error = share - mean
        variance = (1 - _WEIGHT) * (variance + _WEIGHT * error * error)
        self._shares[kind] = mean + _WEIGHT * error, variance

    def expected(self, max_tokens: int, generated: int) -> tuple[int, float]:
        """What a sequence, with `generated` tokens so far, will have at its end; the deviation."""
        known = self._shares.get(max_tokens.bit_length())
        if known is None:
            return min(max_tokens, max(_UNKNOWN, int(generated * _OVERRUN))), 0.0
        mean, variance = known
        most = max(int(mean * max_tokens), int(generated * _OVERRUN), generated + 1)
        return min(max_tokens, most), math.sqrt(variance) * max_tokens

    def of_new(self, max_tokens: int) -> Answer:
        """Of a sequence that has not begun."""
        known = self._shares.get(max_tokens.bit_length())
        if known is None:
            return Answer(min(max_tokens, _UNKNOWN), 0.0, 0)
        mean, variance = known
        expected = max(int(mean * max_tokens), 1)
        deviation = math.sqrt(variance) * max_tokens
        return Answer(expected, deviation, max(0, int(expected - deviation)))


class Answer(NamedTuple):
    """Tokens of an answer to come."""

    expected: int
    deviation: float
    short: int
    """What only few of its class end before; 0 if nothing is known."""


class Growth(NamedTuple):
    """A running sequence, in pages."""

    held: int
    """What its end frees."""
    remaining: int
    """What it is expected to take until then."""
    deviation: float = 0.0
    """Of the expectation."""


def peak_pages(sequences: Collection[Growth]) -> int:
    """The most pages that sequences will hold, if all grow at one pace and leave at their ends.

    The maximum is reached just before one of them ends. (Gong et al. 2025, "Past-Future Scheduler
    for LLM Serving under SLA Guarantees", use the same sum.)
    """
    held, peak = 0, 0
    ordered = sorted(sequences, key=lambda sequence: -sequence.remaining)
    for count, sequence in enumerate(ordered, start=1):
        held += sequence.held
        peak = max(peak, held + count * sequence.remaining)
    return peak


def margin(sequences: Collection[Growth]) -> float:
    """Pages beyond the expected peak: `_MARGIN` times the deviation of the sum, as of independent
    sequences."""
    return _MARGIN * math.sqrt(sum(sequence.deviation**2 for sequence in sequences))


def has_room(
    seq: Sequence,
    hit: list[int],
    running: Collection[Sequence],
    holdings: Holdings,
    lengths: OutputLengths,
) -> bool:
    """Whether it fits now, and everybody will fit as long as lengths are as expected.

    It need not all fit if the sequence is expected to be gone before the others hold most: then it
    makes nothing tighter. Otherwise long answers that turn out longer than expected would keep
    everybody out, short answers too, until they end.

    `hit`: the pages of its tokens that are cached.
    """
    pages = holdings.pages
    if holdings.most + holdings.most_of(seq) <= pages.num_total:
        return True
    free = pages.num_free - holdings.taken_by(seq, hit)
    if free < len(running):  # each of them may need a page in the next step
        return False
    if not running:
        return True

    def growth(of: Sequence, held: int, own: int) -> Growth:
        generated, deviation = lengths.expected(of.most_generated, of.generated + of.in_flight)
        # The last token of a sequence is never computed.
        needed = holdings.pages_for(of.num_prompt + generated - 1)
        return Growth(own, max(needed - held, 0), deviation / holdings.page_size)

    new = holdings.pages_for(len(seq.tokens)) - len(hit)
    growths = [
        growth(other, len(other.pages), len(other.pages) - other.shared) for other in running
    ]
    # Pages that several hold, or that came from the cache, count once and as held to the end.
    common = pages.num_total - free - new - sum(growth.held for growth in growths)
    grown = [*growths, growth(seq, new + len(hit), new)]
    peak = peak_pages(grown)
    return common + peak + margin(grown) <= pages.num_total or peak <= peak_pages(growths)


def refuse_impossible(request: Request, config: SchedulerConfig, cache: CacheConfig) -> None:
    """Rejected, with the numbers, if a request can never be served."""
    length, longest = len(request.prompt), config.max_model_len
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
    needed = -(-length // cache.page_size)  # the last token of a sequence is never computed
    if needed > cache.usable_pages:
        raise Rejected(
            f"the prompt has {length} tokens and needs {needed} pages of {cache.page_size} tokens, "
            f"the KV cache has {cache.usable_pages}"
        )
