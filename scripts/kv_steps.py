"""Measures what encoding pages of a KV format adds to decode steps, for `bench_kv.py`."""

from __future__ import annotations

import dataclasses
import time

from jaxserve.api import SamplingParams
from jaxserve.plan import Admission, PageEntry, Row, StepPlan
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner


def encode_share(runner: Runner, config: RunnerConfig, batch: int) -> dict[str, float] | None:
    """Times a decode step with none, some and all of its sequences at the last token of a page.
    `share` is the part of a step that encoding takes if sequences fill their pages in turn."""
    group = config.kv_format.page_size
    if group is None:
        return None
    last = min(1024, config.scheduler.max_model_len // (2 * group) * group) + group - 1
    in_turn = -(-batch // group)  # sequences that fill a page in one step

    def step_ms(filling: int) -> float:
        return time_decode(runner, config, [last - (index >= filling) for index in range(batch)])

    # The fastest of three: a disturbance only makes them slower.
    turns = [(step_ms(0), step_ms(in_turn), step_ms(batch)) for _ in range(3)]
    without, some, everyone = map(min, zip(*turns, strict=True))
    return {
        "clients": batch,
        "ms_without": without,
        f"ms_with_{in_turn}_filling": some,
        "ms_with_all_filling": everyone,
        "share": (some - without) * batch / (group * in_turn) / without,
        "share_in_lockstep": (everyone - without) / group / without,
    }


def time_decode(
    runner: Runner, config: RunnerConfig, contexts: list[int], steps: int = 64
) -> float:
    """Milliseconds per decode step of sequences with these context lengths. The content of the
    cache is arbitrary."""
    per_seq = -(-(max(contexts) + 1) // config.cache.page_size)
    params = SamplingParams(max_tokens=steps, temperature=0.0)
    again = StepPlan(
        rows=tuple(Row(slot, slot, context, (), True) for slot, context in enumerate(contexts))
    )
    slots = range(len(contexts))
    first = dataclasses.replace(
        again,
        admissions=tuple(Admission(slot, params) for slot in slots),
        pages=tuple(
            PageEntry(slot, number, 1 + slot * per_seq + number)
            for slot in slots
            for number in range(per_seq)
        ),
    )
    for plan in (first, again, again):
        runner.collect(runner.launch(plan))
    begin = time.perf_counter()
    launched = [runner.launch(again) for _ in range(steps)]
    runner.collect(launched[-1])
    return (time.perf_counter() - begin) / steps * 1e3
