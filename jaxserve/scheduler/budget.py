"""How many prompt tokens a step computes beside its decodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.step_times import StepTimes

_MOST_STEPS = 8
"""Nothing is cut into more chunks than this to spare padding."""

_SLOWDOWN = 2.0
"""A mixed step may take this many times the decode step, whatever the limit: prompts advance."""


class Decodes(NamedTuple):
    """The decode rows of a step."""

    rows: int
    context: int
    """Tokens in the cache of all of them together."""


class Pending(NamedTuple):
    """A prompt that waits for its next chunk."""

    start: int
    """Tokens computed or cached so far."""
    tokens: int
    """Still to compute, at least 1."""


class TokenBudget:
    """Chooses chunks so that all sequences together wait as little as possible.

    A step is padded to its bucket, so the choice is one of buckets: which of them to fill now,
    when what is left over takes further steps. A step with a chunk makes each prompt wait for as
    long as it takes, and each decoding sequence for as much longer as it takes than a step of
    decodes alone; the choice with the least sum over all of them wins. So a queue makes chunks
    larger, and many streams make them smaller, as far as that pays. While sequences decode no
    step may take longer than `max_itl`, as far as the measured times tell.
    """

    def __init__(self, times: StepTimes | None, *, max_tokens: int, max_itl: float):
        """Without times every step takes up to `max_tokens` tokens. `max_itl` is in seconds."""
        self._times = times
        self._max_tokens = max_tokens
        self._max_itl = max_itl
        self._buckets = [size for size in (times.mixed if times else ()) if size <= max_tokens]

    def chunk_tokens(self, decodes: Decodes, pending: Iterable[Pending], queued: int = 0) -> int:
        """Prompt tokens that the next step may compute, at most.

        `pending` are the first to come, `queued` how many wait behind them.
        """
        room = self._max_tokens - decodes.rows
        if self._times is None or room < 1:
            return max(room, 0)
        prompts = list(pending)
        sizes = [size for size in self._buckets if size > decodes.rows]
        if not sizes or not prompts:
            return room
        allowed = self._within_itl(self._times, sizes, decodes, prompts) or sizes[:1]
        costs = {
            size - decodes.rows: self._waiting_time(
                self._times, size, decodes, len(prompts) + queued
            )
            for size in allowed
        }
        return min(_first_chunk(costs, sum(prompt.tokens for prompt in prompts)), room)

    def prefill_rate(self, decodes: Decodes) -> float | None:
        """Prompt tokens per second at most beside these decodes; None without times."""
        times, sizes = self._times, [size for size in self._buckets if size > decodes.rows]
        if times is None or not sizes:
            return None
        allowed = self._within_itl(times, sizes, decodes, []) or sizes[:1]
        return max((size - decodes.rows) / times.of_mixed(size, *decodes) for size in allowed)

    def _within_itl(
        self, times: StepTimes, sizes: list[int], decodes: Decodes, prompts: list[Pending]
    ) -> list[int]:
        if not decodes.rows:
            return sizes
        limit = max(self._max_itl, _SLOWDOWN * times.of_decode(*decodes))
        return [
            size
            for size in sizes
            if times.of_mixed(size, *decodes, *_reads(prompts, size - decodes.rows)) <= limit
        ]

    def _waiting_time(self, times: StepTimes, size: int, decodes: Decodes, prompts: int) -> float:
        """Of all sequences, for a full bucket without context before its chunks."""
        step = times.of_mixed(size, *decodes)
        alone = times.of_decode(*decodes) if decodes.rows else 0.0
        return prompts * step + decodes.rows * max(step - alone, 0.0)


def _first_chunk(costs: dict[int, float], wanted: int) -> int:
    """The first of the chunks that compute `wanted` tokens at least cost.

    `costs`: of a chunk of at most so many tokens, increasing.
    """
    chunks, prices = list(costs), list(costs.values())
    # Far from the end only the rate counts; near it, what the last chunk wastes.
    if wanted > 2 * chunks[-1]:
        return max(chunks, key=lambda chunk: (chunk / costs[chunk], chunk))

    known: dict[int, float] = {}

    def rest(left: int) -> float:
        if left <= 0:
            return 0.0
        if (best := known.get(left)) is not None:
            return best
        fitting = bisect_left(chunks, left)
        best = prices[fitting] if fitting < len(chunks) else math.inf
        for smaller in range(max(fitting - 2, 0), fitting):
            chunk = chunks[smaller]
            if chunk * _MOST_STEPS >= left:
                best = min(best, prices[smaller] + rest(left - chunk))
        known[left] = best
        return best

    return min(chunks, key=lambda chunk: (costs[chunk] + rest(wanted - chunk), -chunk))


def _reads(prompts: list[Pending], tokens: int) -> tuple[int, int]:
    """Pairs and depth of the first `tokens` tokens, see `StepTimes.of_mixed`."""
    pairs = depth = 0
    for start, wanted in prompts:
        taken = min(wanted, tokens)
        pairs += taken * start
        depth = max(depth, start)
        tokens -= taken
        if not tokens:
            break
    return pairs, depth
