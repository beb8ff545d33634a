"""Measures how long the compiled steps take on the card that they will serve on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from jaxserve.api import SamplingParams
from jaxserve.plan import Admission, PageEntry, Row, StepPlan
from jaxserve.runner import Runner, RunnerConfig
from jaxserve.step_times import StepTimes

_REPEATS = 3
"""Launched one after the other, as in serving; their mean counts."""

_SLOW = 0.1
"""A step that takes longer, in seconds, is not repeated."""

_CONTEXT = 2048
_ROWS = 64
"""Where the cost of context is measured, if the cache and the limits have room for it."""

_SHORT_CONTEXT = 256
"""The same where steps are slow, as on a CPU: there a longer one would take half of the start."""


def step_times(runner: Runner, config: RunnerConfig, file: Path) -> StepTimes:
    """What an earlier start with the same programs measured and kept in `file`, or `measure`.

    A file that cannot be read or written costs the time of measuring.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        kept = StepTimes.load(file)
        if (tuple(kept.decode), tuple(kept.mixed)) == (
            config.buckets.decode,
            config.buckets.prefill,
        ):
            return kept
    times = measure(runner, config)
    with contextlib.suppress(OSError):
        times.save(file)
    return times


def measure(runner: Runner, config: RunnerConfig) -> StepTimes:
    """Times all buckets of a runner that is compiled and serves nobody yet.

    Keys and values of whatever is in the cache are read and written; lengths and buckets decide
    the time, contents do not. Takes about four steps per bucket.
    """
    context = min(_CONTEXT, config.scheduler.max_model_len // 2, config.cache.usable_tokens // 2)
    rows = min(_ROWS, config.scheduler.max_num_seqs - 1)
    seconds = _Stopwatch(runner, config)
    decode = _increasing(
        {size: seconds.of(_decode_rows(size, 1)) for size in config.buckets.decode}
    )
    mixed = _increasing({size: seconds.of(_chunk(size, 0)) for size in config.buckets.prefill})
    if max(mixed.values()) > _SLOW:
        context = min(context, _SHORT_CONTEXT)
    timed = max(size for size in decode if size <= max(rows, min(decode)))
    chunk = max((size for size in mixed if size <= context), default=min(mixed))
    deep = seconds.of(_decode_rows(timed, context))
    late = seconds.of(_chunk(chunk, context))
    small = min(mixed)
    small_late = seconds.of(_chunk(small, context))
    tokens = max((size for size in mixed if size <= 512), default=min(mixed))
    few = min(rows, tokens - 1)
    shallow_rows = seconds.of([*_decode_rows(few, 1), *_chunk(tokens - few, 0, slot=few)])
    deep_rows = seconds.of([*_decode_rows(few, context), *_chunk(tokens - few, 0, slot=few)])
    return StepTimes(
        decode=decode,
        mixed=mixed,
        decode_context=_slope(deep - decode[timed], timed * context),
        mixed_row=_slope(shallow_rows - mixed[tokens], few),
        mixed_context=_slope(deep_rows - shallow_rows, few * context),
        chunk_pair=_slope(late - mixed[chunk], chunk * context),
        chunk_depth=_slope(small_late - mixed[small], context),
    )


def _increasing(times: dict[int, float]) -> dict[int, float]:
    """Without the noise that makes a bucket slower than a larger one."""
    sizes = sorted(times)
    return {size: min(times[s] for s in sizes if s >= size) for size in sizes}


class _Stopwatch:
    def __init__(self, runner: Runner, config: RunnerConfig):
        self._runner, self._config = runner, config

    def of(self, rows: Iterable[Row]) -> float:
        """Seconds of a step of these rows, whose slots get pages of their own first."""
        plan = StepPlan(rows=tuple(rows))
        first = self._run(self._placed(plan), 1)
        return first if first > _SLOW else self._run(plan, _REPEATS)

    def _run(self, plan: StepPlan, repeats: int) -> float:
        start = time.perf_counter()
        steps = [self._runner.launch(plan) for _ in range(repeats)]
        steps[-1].results.block_until_ready()
        return (time.perf_counter() - start) / repeats

    def _placed(self, plan: StepPlan) -> StepPlan:
        cache = self._config.cache
        entries: list[PageEntry] = []
        for row in plan.rows:
            for position in range(-(-(row.start + row.num_tokens) // cache.page_size)):
                entries.append(PageEntry(row.slot, position, 1 + len(entries) % cache.usable_pages))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        admissions = tuple(Admission(row.slot, params) for row in plan.rows)
        return StepPlan(rows=plan.rows, admissions=admissions, pages=tuple(entries))


def _decode_rows(count: int, context: int) -> list[Row]:
    return [Row(slot, slot, context, (), True) for slot in range(count)]


def _chunk(tokens: int, start: int, slot: int = 0) -> list[Row]:
    return [Row(slot, slot, start, (0,) * tokens, True)]


def _slope(seconds: float, count: int) -> float:
    return max(seconds, 0.0) / max(count, 1)
