"""Admission: refuses requests that can never fit, and admits others if enough pages are free."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from jaxserve.api import Rejected, Request
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler.group_pages import GroupPages
from jaxserve.scheduler.kv_cache_manager import Hit, KVCacheManager
from jaxserve.scheduler.sequence import Sequence

_WEIGHT = 0.05
"""Weight of the newest sequence in the moving mean of its class."""

_MARGIN = 1.0
"""Standard deviations kept free. Less causes more preemptions under steady overload; more leaves
pages unused (see the test)."""

_UNKNOWN = 2048
"""The longest expected output, in tokens, of a class without finished sequences."""

_OVERRUN = 1.25
"""A sequence that reached its expected length is expected to grow by this factor."""


class OutputLengths:
    """Expected output lengths, learned from finished sequences as a share of `max_tokens`.

    Sequences are grouped into classes by the power of two of `max_tokens`, because that number
    separates kinds of requests. Until the first sequence of a class ends, each is expected to
    generate `max_tokens`, up to `_UNKNOWN`.
    """

    def __init__(self) -> None:
        self._shares: dict[int, tuple[float, float]] = {}
        """(mean, variance) of generated / max_tokens, by class."""

    def observe(self, max_tokens: int, generated: int) -> None:
        """Reports a finished sequence and its number of generated tokens."""
        share, kind = generated / max_tokens, max_tokens.bit_length()
        mean, variance = self._shares.get(kind, (share, 0.0))
        error = share - mean
        variance = (1 - _WEIGHT) * (variance + _WEIGHT * error * error)
        self._shares[kind] = mean + _WEIGHT * error, variance

    def expected(self, max_tokens: int, generated: int) -> tuple[int, float]:
        """Returns the expected final length and its standard deviation, in output tokens, of a
        sequence that has `generated` tokens so far."""
        known = self._shares.get(max_tokens.bit_length())
        if known is None:
            return min(max_tokens, max(_UNKNOWN, int(generated * _OVERRUN))), 0.0
        mean, variance = known
        most = max(int(mean * max_tokens), int(generated * _OVERRUN), generated + 1)
        return min(max_tokens, most), math.sqrt(variance) * max_tokens

    def of_new(self, max_tokens: int) -> ExpectedOutput:
        """Returns the expected output of a sequence that has not started."""
        known = self._shares.get(max_tokens.bit_length())
        if known is None:
            return ExpectedOutput(min(max_tokens, _UNKNOWN), 0.0, 0)
        mean, variance = known
        expected = max(int(mean * max_tokens), 1)
        deviation = math.sqrt(variance) * max_tokens
        return ExpectedOutput(expected, deviation, max(0, int(expected - deviation)))


class ExpectedOutput(NamedTuple):
    """The expected length of an output, in tokens."""

    expected: int
    deviation: float
    short: int
    """The mean minus one deviation: few outputs are shorter. 0 if nothing is known."""


class Growth(NamedTuple):
    """A running sequence and its expected growth, in pages."""

    held: int
    """Pages that it frees when it ends."""
    remaining: int
    """Pages that it is expected to add before it ends."""
    deviation: float = 0.0
    """Standard deviation of `remaining`."""


def peak_pages(sequences: Collection[Growth]) -> int:
    """Returns the most pages that the sequences will hold at once.

    All sequences grow at the same rate and free their pages when they end. So the maximum comes
    just before one of them ends. Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA
    Guarantees", use the same sum.
    """
    held, peak = 0, 0
    ordered = sorted(sequences, key=lambda sequence: -sequence.remaining)
    for count, sequence in enumerate(ordered, start=1):
        held += sequence.held
        peak = max(peak, held + count * sequence.remaining)
    return peak


def margin(sequences: Collection[Growth]) -> float:
    """Returns the pages to keep free beyond the expected peak.

    The margin is `_MARGIN` standard deviations of the sum, assuming independent sequences.
    """
    return _MARGIN * math.sqrt(sum(sequence.deviation**2 for sequence in sequences))


def has_room(
    seq: Sequence,
    hit: Hit,
    running: Collection[Sequence],
    kv_cache: KVCacheManager,
    lengths: OutputLengths,
) -> bool:
    """Returns whether a waiting sequence may be admitted. It needs room in every cache group.

    It must fit now. All running sequences must also fit later, if their lengths are as expected.
    The second condition does not apply if the sequence should end before the others reach their
    peak, because then it does not raise the peak. Without this exception, answers that run longer
    than expected would keep out even short requests.

    Args:
      hit: the sequence's cached prefix.
    """
    return all(
        _has_room(seq, cached, running, group, kv_cache.page_size, lengths)
        for group, cached in zip(kv_cache.groups, hit.pages, strict=True)
    )


def _has_room(
    seq: Sequence,
    hit: list[int],
    running: Collection[Sequence],
    group: GroupPages,
    page_size: int,
    lengths: OutputLengths,
) -> bool:
    """Returns whether the sequence has room in one group. `hit` is its page table in that group."""
    pages = group.pool
    if group.max_pages + group.num_loading + group.max_pages_of(seq) <= pages.num_total:
        return True
    free = pages.num_free - group.free_pages_needed(seq, hit)
    if free < len(running):  # each running sequence may need a page in the next step
        return False
    if not running:
        return True

    def growth(of: Sequence, held: int, own: int) -> Growth:
        generated, deviation = lengths.expected(of.max_generated, of.generated + of.in_flight)
        # The last token of a sequence is never computed.
        needed = group.pages_of(of.num_prompt + generated - 1)
        return Growth(own, max(needed - held, 0), deviation / page_size)

    new = group.new_pages(seq, hit)
    cached = sum(page > 0 for page in hit)
    growths = [growth(other, len(group.held(other)), group.own(other)) for other in running]
    # Shared pages and pages from the cache count once, and as held to the end.
    common = pages.num_total - free - new - sum(growth.held for growth in growths)
    grown = [*growths, growth(seq, new + cached, new)]
    peak = peak_pages(grown)
    return common + peak + margin(grown) <= pages.num_total or peak <= peak_pages(growths)


def refuse_impossible(request: Request, config: SchedulerConfig, cache: CacheConfig) -> None:
    """Raises Rejected, with the numbers, if the request can never be served."""
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
    for group in cache.groups:  # the last token of a sequence is never computed
        needed = group.pages_of(length, cache.page_size)
        if needed > group.usable_pages:
            raise Rejected(
                f"the prompt has {length} tokens and needs {needed} pages of {cache.page_size} "
                f"tokens, the KV cache has {group.usable_pages}"
            )
