"""Chooses how many prompt tokens a step computes beside its decode rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.scheduler.learned_times import LearnedTimes

_MAX_CHUNKS_TO_FIT = 8
"""The most chunks into which a prompt is cut to avoid the padding of a larger bucket. It bounds the
search; not measured."""

_MIN_COST = 1e-9
"""Seconds. The smallest cost of a chunk. A noisy table may have a mixed step that is faster than a
decode step, and prices per token must stay positive."""

MAX_SLOWDOWN = 2.0
"""A mixed step may always take this many times the decode step, even beyond `max_itl`. Otherwise a
batch whose decode step alone reaches the limit would stop reading prompts. A rule, not measured."""

PREFILL_HORIZON_STEPS = 31
"""Steps. All waiting prompt tokens should be computed within this many steps. So a first token
takes at most about this many times as long as a next token. Chosen on an H200 with Qwen3-4B by
closed loops of 8 to 256 clients, 1,024 tokens in and 128 out, simulated and measured: "A pace, and
times that are learned" in lab/logs/scheduling.md, lab/measurements/step_times_served_h200.json."""

_NO_SKIPPING_BELOW = 0.5
"""Small chunks per step. If fewer than this keep the horizon, no step goes without a chunk: few
prompts wait, and each is read at once."""

_MIN_CHUNKS_PER_STEP = 0.85
"""Small chunks per step, on average. If fewer than one but more than `_NO_SKIPPING_BELOW` keep the
horizon, one step in seven has decode rows only. Chosen among 0.7 to 1.0 by simulating the same
loops; measured at 32 to 128 clients without the rule above it: "Not faster than the pace either" in
lab/logs/scheduling.md, lab/measurements/serving_h200.json."""

_MIN_SAVING_PER_DOUBLING = 0.08
"""Share of the price of a token. A chunk of twice the size must save this much per token to justify
the longer step. Beside 27 decode rows, tokens cost 12.8 us in chunks of 256 and 10.6 us in chunks
of 512. From there to 2,048 the prices differ by less than 8 % ("A pace, and times that are learned"
in lab/logs/scheduling.md)."""

_PRICE_EXPONENT = math.log2(1 + _MIN_SAVING_PER_DOUBLING) - 1
"""cost x tokens^exponent is equal for two chunks if the one of twice the size saves exactly
`_MIN_SAVING_PER_DOUBLING` per token."""

_ITL_SHARE_OF_CHEAPER_CHUNK = 0.5
"""Share of `max_itl`. A step may take this much for a chunk that is larger than the horizon needs,
if its tokens are cheaper. A rule, not measured."""


class Decodes(NamedTuple):
    """The decode rows of a step."""

    rows: int
    context: int
    """Tokens in the cache of all decode rows together."""
    guided: int = 0
    """Sequences that wait for a grammar's mask between their tokens. They get a token in at most
    every second step. Counts them whether or not they are in this step."""


class Prompt(NamedTuple):
    """A prompt that waits for its next chunk."""

    start: int
    """Tokens already computed or cached."""
    tokens: int
    """Tokens still to compute, at least 1."""
    read: int = 0
    """Tokens before `start` that were computed, not found in the cache."""


class TokenBudget:
    """Chooses chunk sizes so that next tokens come fast and first tokens do not wait too long.

    A step is padded to its bucket, so the choice is between buckets: which one to fill now, if
    later steps compute the rest. The cost of a chunk is the time that its step takes beyond a step
    of the decode rows alone.

    Without decode rows, the budget minimises the time for all prompts. With decode rows, steps have
    a small chunk whose tokens are cheap. If the waiting prompts would take more than
    `PREFILL_HORIZON_STEPS` such steps, some steps have a large chunk instead, as many as needed to
    keep that pace. So prompts are read as fast as they arrive, at the lowest price. If the prompts
    would take slightly fewer steps, some steps have no chunk: a first token need not come earlier
    at the expense of all next tokens.

    No step may take longer than `max_itl` by the known times. If a sequence gets a token only in
    every second step, two steps together may not.
    """

    def __init__(self, times: LearnedTimes | None, *, max_tokens: int, max_itl: float):
        """`times` None: every step takes up to `max_tokens` tokens. `max_itl` is in seconds."""
        self._times = times
        self._max_tokens = max_tokens
        self._max_itl = max_itl
        self._buckets = [size for size in (times.sizes if times else ()) if size <= max_tokens]
        self._behind = 0.0
        """Tokens by which earlier steps fell behind the pace; negative if they are ahead."""

    def chunk_tokens(self, decodes: Decodes, pending: Iterable[Prompt], queued: int = 0) -> int:
        """Returns the most prompt tokens that the next step may compute. Call it once per step.

        Args:
          decodes: the decode rows of the step.
          pending: the prompts that come first.
          queued: how many more prompts wait behind them.
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
            # Count tokens already read: otherwise a long prompt's chunks would shrink over time.
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
        """Returns the small chunk, the large chunk if reading is behind the pace by that much, or 0
        if reading is ahead. `pace` is in tokens per step."""
        small = _small_chunk(costs)
        if pace <= _NO_SKIPPING_BELOW * small:
            self._behind = 0.0
            return small
        if pace <= small:
            due = min(self._behind, 0.0) + max(pace, _MIN_CHUNKS_PER_STEP * small)
            # Even after larger chunks, two steps in a row never go without one.
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
        """Returns the most prompt tokens per second beside these decode rows; None without
        times."""
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
        """Returns the seconds of each chunk size, for full buckets without earlier context."""
        rows, context = decodes.rows, decodes.context
        alone = times.of_decode(rows, context) if rows else 0.0
        return {
            size - rows: max(times.of_mixed(size, rows, context) - alone, _MIN_COST)
            for size in sizes
        }


def _small_chunk(costs: dict[int, float]) -> int:
    """Returns the chunk with the cheapest tokens, if each doubling saves
    `_MIN_SAVING_PER_DOUBLING`."""
    return min(costs, key=lambda chunk: costs[chunk] * chunk**_PRICE_EXPONENT)


def _first_chunk(costs: dict[int, float], wanted: int) -> int:
    """Returns the first chunk of the cheapest way to compute `wanted` tokens.

    `costs`: seconds by the largest number of tokens in a chunk, increasing.
    """
    chunks, prices = list(costs), list(costs.values())
    # Far from the end only the rate counts; near it, the padding of the last chunk counts too.
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
    """Returns the seconds of a full step with these decodes, if the prompts are read in order."""
    rows, context = decodes.rows, decodes.context
    return times.of_mixed(size, rows, context, *_reads(prompts, size - rows))


def _reads(prompts: list[Prompt], tokens: int) -> tuple[int, int]:
    """Returns pairs and depth of the first `tokens` tokens, see `StepTimes.of_mixed`."""
    pairs = depth = 0
    for prompt in prompts:
        taken = min(prompt.tokens, tokens)
        pairs += taken * prompt.start
        depth = max(depth, prompt.start)
        tokens -= taken
        if not tokens:
            break
    return pairs, depth
