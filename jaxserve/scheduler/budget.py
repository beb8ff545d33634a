"""How many prompt tokens a step computes beside its decodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.scheduler.learned_times import LearnedTimes

_MAX_CHUNKS_TO_FIT = 8
"""Chunks. Prompts are not cut into more chunks than this to avoid the padding of a larger bucket.
A bound on the search; not measured."""

_MIN_COST = 1e-9
"""Seconds. A chunk costs at least this: a noisy table may have a mixed step faster than a decode
step, and prices per token must stay positive."""

MAX_SLOWDOWN = 2.0
"""Times the decode step. A mixed step may always take this long, even beyond `max_itl`: otherwise
a batch whose decode step alone reaches the limit would stop reading prompts. A rule, not measured.
"""

PREFILL_HORIZON_STEPS = 31
"""Steps. All waiting prompt tokens should be computed within this many, so a first token takes at
most about this many times as long as a next one. Chosen on an H200 with Qwen3-4B by closed loops
of 8 to 256 clients, 1,024 tokens in and 128 out, simulated and measured: "A pace, and times that
are learned" in lab/logs/scheduling.md, lab/measurements/step_times_served_h200.json."""

_NO_SKIPPING_BELOW = 0.5
"""Share of a small chunk per step. Where less keeps the horizon, no step leaves its chunk out: few
prompts wait, and each is read at once."""

_MIN_CHUNKS_PER_STEP = 0.85
"""Small chunks per step, on average. Where less than a whole one, but more than
`_NO_SKIPPING_BELOW`, keeps the horizon, one step in seven is of decodes alone. Chosen on
the same loops among 0.7 to 1.0, simulated; measured at 32 to 128 clients without the rule above it:
"Not faster than the pace either" in lab/logs/scheduling.md, lab/measurements/serving_h200.json."""

_MIN_SAVING_PER_DOUBLING = 0.08
"""Share of the price of a token. A chunk twice as large must save this much per token to be worth
the longer step. Beside 27 decodes tokens cost 12.8 us in chunks of 256, 10.6 in 512, and from there
to 2,048 less than 8 % apart ("A pace, and times that are learned" in lab/logs/scheduling.md)."""

_PRICE_EXPONENT = math.log2(1 + _MIN_SAVING_PER_DOUBLING) - 1
"""cost x tokens^exponent is equal for two chunks of which the one twice as large saves exactly
`_MIN_SAVING_PER_DOUBLING` per token."""

_ITL_SHARE_OF_CHEAPER_CHUNK = 0.5
"""Share of `max_itl`. A step may take this much for a chunk that is larger than the horizon needs
and chosen only because its tokens are cheaper. A rule, not measured."""


class Decodes(NamedTuple):
    """The decode rows of a step."""

    rows: int
    context: int
    """Tokens in the cache of all of them together."""
    guided: int = 0
    """Sequences that get a token every second step at most, as a grammar's mask comes between: in
    this step or not."""


class Prompt(NamedTuple):
    """A prompt that waits for its next chunk."""

    start: int
    """Tokens computed or cached so far."""
    tokens: int
    """Still to compute, at least 1."""
    read: int = 0
    """Of those before `start`, computed for it and not found in the cache."""


class TokenBudget:
    """Chooses chunks so that tokens come fast and first tokens do not wait too long for it.

    A step is padded to its bucket, so the choice is one of buckets: which of them to fill now, when
    what is left over takes further steps. What a chunk costs is the time that its step takes beyond
    one of the decodes alone. While nobody decodes, the least time for all prompts wins. While
    sequences decode, steps have a small chunk whose tokens are cheap. Where what waits would take
    more than `PREFILL_HORIZON_STEPS` such steps, some have a large one instead, as many as it takes
    to keep that pace: so as many prompts are read as come, whatever the times are worth, and the
    rest at the least price. Where it would take somewhat less, some have none: a first token need
    not come sooner than that at the expense of all that follow others. No step may take longer than
    `max_itl`, as far as they tell; nor two of them where a sequence gets its token in one of two.
    """

    def __init__(self, times: LearnedTimes | None, *, max_tokens: int, max_itl: float):
        """Without times every step takes up to `max_tokens` tokens. `max_itl` is in seconds."""
        self._times = times
        self._max_tokens = max_tokens
        self._max_itl = max_itl
        self._buckets = [size for size in (times.sizes if times else ()) if size <= max_tokens]
        self._behind = 0.0
        """Tokens that earlier steps left unread of what was to be read in each; negative if they
        have read more."""

    def chunk_tokens(self, decodes: Decodes, pending: Iterable[Prompt], queued: int = 0) -> int:
        """Prompt tokens that the next step may compute, at most; to be asked once for each.

        `pending` are the first to come, `queued` how many wait behind them.
        """
        room = self._max_tokens - decodes.rows
        if self._times is None or room < 1:
            return max(room, 0)
        prompts = list(pending)
        sizes = [size for size in self._buckets if size > decodes.rows]
        if not sizes or not prompts:
            self._behind = 0.0
            return room
        wanted = sum(prompt.tokens for prompt in prompts)
        allowed = self._within_itl(self._times, sizes, decodes, prompts) or sizes[:1]
        costs = self._costs(self._times, allowed, decodes)
        if decodes.rows:
            # What is read already counts, or a long prompt's chunks would shrink as it is read.
            waiting = wanted * (1 + queued / len(prompts)) + sum(prompt.read for prompt in prompts)
            chunk = self._paced(
                self._times, costs, waiting / PREFILL_HORIZON_STEPS, decodes, prompts
            )
            if chunk <= wanted:
                return chunk
            costs = {size: cost for size, cost in costs.items() if size >= chunk}
        return min(_first_chunk(costs, wanted), room)

    def _paced(
        self,
        times: LearnedTimes,
        costs: dict[int, float],
        pace: float,
        decodes: Decodes,
        prompts: list[Prompt],
    ) -> int:
        """The small chunk, the large one if by now as much is to be read, or nothing if by now more
        has been than was to be; `pace`: tokens per step."""
        small = _small_chunk(costs)
        if pace <= _NO_SKIPPING_BELOW * small:
            self._behind = 0.0
            return small
        if pace <= small:
            due = min(self._behind, 0.0) + max(pace, _MIN_CHUNKS_PER_STEP * small)
            # However much earlier chunks were larger: no two steps in a row are without one.
            chunk, self._behind = (small, due - small) if due > 0 else (0, 0.0)
            return chunk
        enough = [size for size in costs if size >= pace] or [max(costs)]
        limit = _ITL_SHARE_OF_CHEAPER_CHUNK * self._max_itl
        gentle = [
            size for size in enough if _step(times, size + decodes.rows, decodes, prompts) <= limit
        ]
        large = min(gentle or enough[:1], key=lambda size: costs[size] / size)
        due = min(self._behind + pace, 2 * large)
        chunk = large if due >= large else small
        self._behind = max(due - chunk, 0.0)
        return chunk

    def prefill_rate(self, decodes: Decodes) -> float | None:
        """Prompt tokens per second at most beside these decodes; None without times."""
        times, sizes = self._times, [size for size in self._buckets if size > decodes.rows]
        if times is None or not sizes:
            return None
        allowed = self._within_itl(times, sizes, decodes, []) or sizes[:1]
        return max(
            (size - decodes.rows) / times.of_mixed(size, decodes.rows, decodes.context)
            for size in allowed
        )

    def _within_itl(
        self, times: LearnedTimes, sizes: list[int], decodes: Decodes, prompts: list[Prompt]
    ) -> list[int]:
        if not decodes.rows and not decodes.guided:
            return sizes
        steps = 2 if decodes.guided else 1
        decode = times.of_decode(decodes.rows, decodes.context)
        limit = max(self._max_itl / steps, MAX_SLOWDOWN * decode)
        return [size for size in sizes if _step(times, size, decodes, prompts) <= limit]

    def _costs(self, times: LearnedTimes, sizes: list[int], decodes: Decodes) -> dict[int, float]:
        """Seconds by chunk, for full buckets without context before the chunks."""
        rows, context = decodes.rows, decodes.context
        alone = times.of_decode(rows, context) if rows else 0.0
        return {
            size - rows: max(times.of_mixed(size, rows, context) - alone, _MIN_COST)
            for size in sizes
        }


def _small_chunk(costs: dict[int, float]) -> int:
    """The chunk with the cheapest tokens, if each doubling saves `_MIN_SAVING_PER_DOUBLING`."""
    return min(costs, key=lambda chunk: costs[chunk] * chunk**_PRICE_EXPONENT)


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
            if chunk * _MAX_CHUNKS_TO_FIT >= left:
                best = min(best, prices[smaller] + rest(left - chunk))
        known[left] = best
        return best

    return min(chunks, key=lambda chunk: (costs[chunk] + rest(wanted - chunk), -chunk))


def _step(times: LearnedTimes, size: int, decodes: Decodes, prompts: list[Prompt]) -> float:
    """Seconds of a full step with these decodes, if the prompts are read in order."""
    rows, context = decodes.rows, decodes.context
    return times.of_mixed(size, rows, context, *_reads(prompts, size - rows))


def _reads(prompts: list[Prompt], tokens: int) -> tuple[int, int]:
    """Pairs and depth of the first `tokens` tokens, see `StepTimes.of_mixed`."""
    pairs = depth = 0
    for prompt in prompts:
        taken = min(prompt.tokens, tokens)
        pairs += taken * prompt.start
        depth = max(depth, prompt.start)
        tokens -= taken
        if not tokens:
            break
    return pairs, depth
