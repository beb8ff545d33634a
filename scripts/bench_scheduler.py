"""Measures the scheduler's processor time per decode step, one step ahead, without a device.

A figure is the median of means over 40 steps each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import batched
from pathlib import Path
from typing import Any

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.verify import Verification
from jaxserve.step_times import StepTimes

_TIMES = Path(__file__).parents[1] / "lab" / "measurements" / "step_times_verify_h200.json"
_PROMPT = 128
"""Tokens. No sequence of tokens repeats, so nothing is drafted, and only the cost of the lookup is
measured."""


_TURN = 40
"""Steps with lookup in a turn, and the same number without."""


class _Switched(Scheduler):
    """A scheduler whose lookup of drafts can be switched. It must never find a draft."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._drafting = self._verify

    def look_up(self, on: bool) -> None:
        self._verify = self._drafting if on else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--lookup", action="store_true", help="look up drafts in every other turn")
    args = parser.parse_args()

    tokens = args.steps + 64 + 4 * args.sequences
    scheduler = _filled(args.sequences, tokens, args.page_size, lookup=args.lookup)
    pending = _prefilled(scheduler, args.sequences)
    words = random.Random(0).choices(range(3, 150_000), k=4096)
    times: dict[str, list[float]] = {}
    for step in range(args.steps):
        on = args.lookup and step // _TURN % 2 == 1
        scheduler.look_up(on)
        start = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        assert plan is not None and len(plan.rows) == args.sequences
        sampled = [Sampled(words[hash((step, row.slot)) % 4096]) for row in pending.rows]
        collected = time.thread_time()
        scheduler.commit(pending, sampled)
        ended = time.thread_time()
        for name, seconds in (("plan", planned - start), ("commit", ended - collected)):
            times.setdefault(f"{name}, lookup" if on else name, []).append(1e6 * seconds)
        pending = plan
    for name, us in times.items():
        means = [statistics.fmean(turn) for turn in batched(us, _TURN)]
        worst = statistics.quantiles(us, n=100)[98]
        print(f"{name:14} {statistics.median(means):6.1f} us, p99 {worst:6.1f}")


def _filled(sequences: int, tokens: int, page_size: int, *, lookup: bool) -> _Switched:
    times = StepTimes.load(_TIMES)
    buckets = tuple(times.verify)
    verification = Verification(proposer=Lookup(drafts=7), buckets=buckets) if lookup else None
    pages = 1 + sequences * (-(-(_PROMPT + tokens) // page_size) + 2)
    scheduler = _Switched(
        SchedulerConfig(
            max_num_seqs=sequences,
            max_model_len=_PROMPT + tokens,
            max_num_batched_tokens=max(sequences, 4096),
        ),
        CacheConfig(num_pages=pages, page_size=page_size),
        times=times,
        verification=verification,
    )
    params = SamplingParams(max_tokens=tokens, stop_token_ids=frozenset({1, 2}))
    words = random.Random(1)
    for number in range(sequences):
        prompt = tuple(words.choices(range(3, 150_000), k=_PROMPT))
        scheduler.add(Request(id=f"request-{number}", prompt=prompt, params=params))
    return scheduler


def _prefilled(scheduler: Scheduler, sequences: int) -> StepPlan:
    """Steps until all sequences decode. The last plan is not committed yet."""
    while plan := scheduler.plan():
        if plan.decode_only and len(plan.rows) == sequences:
            return plan
        scheduler.commit(plan, [Sampled(7) if row.samples else None for row in plan.rows])
    raise RuntimeError("the sequences ended before all of them decoded")


if __name__ == "__main__":
    main()
