"""Measures the times of the compiled steps on the GPU that serves."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

import jax

from jaxserve.api import SamplingParams
from jaxserve.plan import Admission, PageEntry, Row, StepPlan, Verify
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.step_times import StepTimes, VerifyTime

log = logging.getLogger(__name__)

_REPEATS = 3
"""Measured steps per kind, each launched one step ahead as in serving. The median counts."""

_SLOW = 0.1
"""Seconds. A slower step is not repeated."""

_WARM = 8
"""Full prefill steps before any measurement. A GPU's first steps are slow, and after them its
clocks are higher than later."""

_BUSY = 0.05
"""Seconds of equal steps before a mixed bucket is measured. A GPU that rests between steps clocks
higher than in serving."""

_MOST_SPREAD, _SPREAD_STEPS = 1.5, 32
"""If the slower of so many equal steps take this many times as long as the faster ones, the GPU or
the processor does other work. A rule; what idle machines differ by was not measured."""

_MOST_SLOWER = 1.2
"""The GPU was busy during a measurement if a step took this many times as long in it as right
after. A rule, not measured."""

_ATTEMPTS = 3
"""Measurements on a busy GPU, about a second each. Often the other work is another server that
starts at the same time."""

_CONTEXT = 2048
_ROWS = 64
"""Context, and decode rows of mixed steps, if the cache and the limits allow them."""

_BRIEF = 0.015
"""Seconds. Decode rows are measured in the two largest mixed buckets that are faster than this."""

_SHORT_CONTEXT = 256
"""Context for devices with slow steps, such as CPUs. A longer one would take half of the start."""


def kept_times(config: RunnerConfig, file: Path) -> StepTimes | None:
    """Returns the times that an earlier start measured with the same programs; None if there are
    none."""
    if not file.is_file():
        return None  # reading a FIFO would block
    damaged = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
    with contextlib.suppress(*damaged):
        kept = StepTimes.load(file)
        buckets = config.buckets
        known = tuple(kept.decode), tuple(kept.mixed), set(kept.verify)
        if known == (buckets.decode, buckets.prefill, set(buckets.verify)):
            return kept
    return None


def step_times(runner: Runner, config: RunnerConfig, file: Path) -> StepTimes:
    """Returns the times in `file`, which `jaxserve precompile` or an earlier start wrote. Otherwise
    measures them.

    If the file cannot be read or written, or if the machine was busy with other work, the next
    start measures again.
    """
    kept = kept_times(config, file)
    if kept is not None:
        log.info("step times, from %s: %s", file, kept.described())
        return kept
    made: list[StepTimes] = []
    busy = None
    for _ in range(_ATTEMPTS):
        made.append(measure(runner, config))
        busy = None if jax.default_backend() == "cpu" else _busy(runner, config, made[-1])
        if busy is None:
            break
    times = made[-1] if busy is None else min(made, key=_total)
    log.info("step times, measured: %s", times.described())
    if busy is not None:
        log.warning(
            "the machine was busy with other work while steps were timed, %d times in a row: equal "
            "steps took %.2f to %.2f ms. Chunks of prompts may have the wrong size at first: the "
            "times are corrected while serving, and the next start measures them again",
            len(made),
            *(1e3 * each for each in busy),
        )
        return times
    with contextlib.suppress(OSError):
        times.save(file)
    return times


def _total(times: StepTimes) -> float:
    return sum(times.decode.values()) + sum(times.mixed.values())


def _busy(runner: Runner, config: RunnerConfig, times: StepTimes) -> tuple[float, float] | None:
    """Returns the seconds of two equal steps if the GPU did other work while `times` were measured
    or does so now; otherwise None."""
    fast, slow = spread_of(runner, config)
    if slow > _MOST_SPREAD * fast:
        return fast, slow
    seconds = _Stopwatch(runner, config)
    pairs = [(fast, times.decode[min(times.decode)])]
    pairs += [
        (seconds.of(seconds.chunk(size, 0)), times.mixed[size])
        for size in sorted({min(times.mixed), max(times.mixed)})
    ]
    return next((pair for pair in pairs if pair[1] > _MOST_SLOWER * pair[0]), None)


def spread_of(runner: Runner, config: RunnerConfig) -> tuple[float, float]:
    """Returns the seconds of a fast and of a slow step among equal ones, without the few fastest
    and slowest: a thread that is interrupted may delay these."""
    seconds = _Stopwatch(runner, config)
    steps = sorted(seconds.each(_decode_rows(min(config.buckets.decode), 1), _SPREAD_STEPS))
    return steps[_SPREAD_STEPS // 8], steps[-1 - _SPREAD_STEPS // 8]


def measure(runner: Runner, config: RunnerConfig) -> StepTimes:
    """Measures all buckets of a compiled runner that does not serve yet, with about five steps
    each.

    The content of the cache does not matter. Lengths, buckets and tokens do, see
    `_Stopwatch.chunk`.
    """
    context = min(_CONTEXT, config.scheduler.max_model_len // 2, config.cache.usable_tokens // 2)
    seconds = _Stopwatch(runner, config)
    seconds.warm(seconds.chunk(max(config.buckets.prefill), 0))
    mixed = _increasing(
        {size: seconds.of(seconds.chunk(size, 0)) for size in reversed(config.buckets.prefill)}
    )
    decode = _increasing(
        {size: seconds.of(_decode_rows(size, 1)) for size in config.buckets.decode}
    )
    if max(mixed.values()) > _SLOW:
        context = min(context, _SHORT_CONTEXT)
    chunk = max((size for size in mixed if size <= context), default=min(mixed))
    late = seconds.of(seconds.chunk(chunk, context))
    small = min(mixed)
    small_late = seconds.of(seconds.chunk(small, context))
    shared = [size for size, took in mixed.items() if took <= _BRIEF][-2:] or [small]
    rows = min(_ROWS, config.scheduler.max_num_seqs - 1)
    mixed_row, mixed_context = _decodes_in_mixed(seconds, shared, rows, context)
    most = max(decode)
    deep = seconds.of(_decode_rows(most, context))
    return StepTimes(
        decode=decode,
        mixed=mixed,
        verify=no_slower(
            {shape: seconds.of_verify(*shape, context) for shape in config.buckets.verify}
        ),
        decode_context=_slope(deep - decode[most], most * context),
        mixed_row=mixed_row,
        mixed_context=mixed_context,
        chunk_pair=_slope(late - mixed[chunk], chunk * context),
        chunk_depth=_slope(small_late - mixed[small], context),
    )


def _decodes_in_mixed(
    seconds: _Stopwatch, sizes: Iterable[int], most: int, context: int
) -> tuple[float, float]:
    """Returns the seconds per decode row of a full mixed step, and per token of its context.

    Each bucket is measured next to the same bucket without decode rows, because chunk sizes depend
    on these two numbers and a GPU may slow down meanwhile.
    """
    rows = 0
    by_row = by_context = 0.0
    for size in sizes:
        few = max(0, min(most, size - 1, seconds.free_beside(size)))
        chunk = seconds.chunk(size - few, 0, slot=few)
        alone = seconds.of(seconds.chunk(size, 0))
        shallow = seconds.of([*_decode_rows(few, 1), *chunk])
        deep = seconds.of([*_decode_rows(few, context), *chunk])
        rows += few
        by_row += shallow - alone
        by_context += deep - shallow
    return _slope(by_row, rows), _slope(by_context, rows * context)


def _increasing(times: dict[int, float]) -> dict[int, float]:
    """Removes noise from times: no bucket is slower than a larger one."""
    sizes = sorted(times)
    return {size: min(times[s] for s in sizes if s >= size) for size in sizes}


def no_slower(times: dict[tuple[int, int], VerifyTime]) -> dict[tuple[int, int], VerifyTime]:
    """Removes noise from times: no verify bucket is slower than one with at least as many rows and
    positions. What seems too slow is never run, so serving would not correct it."""

    def bound(shape: tuple[int, int]) -> float:
        rows, positions = shape
        return min(own.seconds for (r, p), own in times.items() if r >= rows and p >= positions)

    return {shape: own._replace(seconds=bound(shape)) for shape, own in times.items()}


class _Stopwatch:
    def __init__(self, runner: Runner, config: RunnerConfig):
        self._runner, self._config = runner, config
        self._longest, self._slots = config.scheduler.max_model_len, config.scheduler.max_num_seqs
        ids = range(config.sampled_vocab)
        self._ids = tuple(random.Random(0).choices(ids, k=max(config.buckets.prefill)))

    def chunk(self, tokens: int, start: int, slot: int = 0) -> list[Row]:
        """Returns the rows of one prefill. All tokens differ, as in prompts: products of equal
        tokens need less power, and a GPU at its power limit computes them a seventh faster.

        The prefill is split into rows of the longest sequence, because entries after a slot's page
        table belong to the next slot. It ends when no slot is left, or with the most prompts of a
        step.
        """
        most = self._longest - start
        rows = min(self._slots - slot, self._config.cache.most_prompts)
        cuts = range(0, tokens, most)[:rows]
        return [
            Row(slot + index, slot + index, start, self._ids[cut : min(cut + most, tokens)], True)
            for index, cut in enumerate(cuts)
        ]

    def free_beside(self, tokens: int) -> int:
        """Returns how many slots remain free beside a chunk of `tokens` tokens."""
        return self._slots - -(-tokens // self._longest)

    def warm(self, rows: Iterable[Row]) -> None:
        """Runs some steps of these rows; only one if it is slow."""
        plan = self._placed(_plan(rows))
        for _ in range(_WARM):
            if self._run(plan, 1)[0] > _SLOW:
                break

    def of(self, rows: Iterable[Row]) -> float:
        """Returns the seconds of a step of these rows. Gives their slots pages first."""
        plan = _plan(rows)
        first = self._run(self._placed(plan), 1)[0]
        if first > _SLOW:
            return first
        before = 1 if plan.kind != "mixed" else 1 + int(_BUSY / first)
        return median(self._run(plan, before + _REPEATS)[before:])

    def each(self, rows: Iterable[Row], count: int) -> list[float]:
        """Returns the seconds of each of `count` equal steps, after a few others."""
        return self._run(self._placed(_plan(rows)), 2 + count)[2:]

    def of_verify(self, rows: int, positions: int, context: int) -> VerifyTime:
        """Returns the times of a full verify bucket: without context, and with `context` tokens per
        row."""
        context = min(context, self._longest - positions)
        drafts = self._ids[: positions - 1]

        def taken(start: int) -> float:
            verify = Verify(positions, start + positions, drafts)
            return self.of(Row(slot, slot, start, (), True, verify=verify) for slot in range(rows))

        shallow, deep = taken(1), taken(context)
        return VerifyTime(shallow, _slope(deep - shallow, rows * (context - 1)))

    def _run(self, plan: StepPlan, count: int) -> list[float]:
        """Returns the seconds between the ends of equal steps. The first counts from its launch."""
        ends = [time.perf_counter()]
        running = [self._runner.launch(plan)]
        for left in reversed(range(count)):
            if left:
                running.append(self._runner.launch(plan))
            running.pop(0).results.block_until_ready()
            ends.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def _placed(self, plan: StepPlan) -> StepPlan:
        cache = self._config.cache
        entries: list[PageEntry] = []
        number = 0
        for row in plan.rows:
            for position in range(-(-(row.start + row.num_tokens) // cache.page_size)):
                for group, pages in enumerate(cache.groups):
                    page = 1 + number % pages.usable_pages
                    entries.append(PageEntry(row.slot, position, page, group))
                number += 1
        params = SamplingParams(max_tokens=1, temperature=0.0)
        # Prompts that end with their rows: recurrent layers compute prompts in blocks.
        admissions = tuple(
            Admission(row.slot, params, num_prompt=row.start + len(row.tokens)) for row in plan.rows
        )
        return replace(plan, admissions=admissions, pages=tuple(entries))


def _plan(rows: Iterable[Row]) -> StepPlan:
    rows = tuple(rows)
    return StepPlan(rows=rows, verify=any(row.verify is not None for row in rows))


def _decode_rows(count: int, context: int) -> list[Row]:
    return [Row(slot, slot, context, (), True) for slot in range(count)]


def _slope(seconds: float, count: int) -> float:
    return max(seconds, 0.0) / max(count, 1)
