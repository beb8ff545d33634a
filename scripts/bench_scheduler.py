"""Thread time of the scheduler per decode step, one step ahead, without a device."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.verify import Verification
from jaxserve.step_times import StepTimes

_TIMES = Path(__file__).parents[1] / "lab" / "measurements" / "step_times_verify_h200.json"
_PROMPT = 128
"""Tokens. No token of prompt or output is like those around it at an earlier place, so nothing is
drafted: what looking up costs is seen alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--lookup",
        action="store_true",
        help="look up drafts, and find none",
    )
    args = parser.parse_args()

    tokens = args.steps + 64 + 4 * args.sequences
    scheduler = _filled(args.sequences, tokens, args.page_size, lookup=args.lookup)
    pending = _prefilled(scheduler, args.sequences)
    words = random.Random(0).choices(range(3, 150_000), k=4096)
    times: dict[str, list[float]] = {"plan": [], "commit": []}
    for step in range(args.steps):
        start = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        assert plan is not None and len(plan.rows) == args.sequences
        sampled = [Sampled(words[hash((step, row.slot)) % 4096]) for row in pending.rows]
        collected = time.thread_time()
        scheduler.commit(pending, sampled)
        times["commit"].append(time.thread_time() - collected)
        times["plan"].append(planned - start)
        pending = plan
    for name, seconds in times.items():
        us = [1e6 * each for each in seconds]
        middle, worst = statistics.median(us), statistics.quantiles(us, n=100)[98]
        mean = statistics.fmean(us)
        print(f"{name:7} us: mean {mean:.1f}, median {middle:.1f}, p99 {worst:.0f}")


def _filled(sequences: int, tokens: int, page_size: int, *, lookup: bool) -> Scheduler:
    times = StepTimes.load(_TIMES)
    buckets = tuple(times.verify)
    verification = Verification(proposer=Lookup(drafts=7), buckets=buckets) if lookup else None
    pages = 1 + sequences * (-(-(_PROMPT + tokens) // page_size) + 2)
    scheduler = Scheduler(
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
    """Step until everybody decodes; the last plan is still to be committed."""
    while plan := scheduler.plan():
        if plan.decode_only and len(plan.rows) == sequences:
            return plan
        scheduler.commit(plan, [Sampled(7) if row.samples else None for row in plan.rows])
    raise RuntimeError("the sequences ended before all of them decoded")


if __name__ == "__main__":
    main()
