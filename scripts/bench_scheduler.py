"""Time what the scheduler costs per decode step, one step ahead, without a device."""

from __future__ import annotations

import argparse
import random
import statistics
import time

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.verify import Verification
from jaxserve.step_times import StepTimes, VerifyTime

_TIMES = StepTimes(decode={256: 0.01}, mixed={4096: 0.05}, verify={(256, 8): VerifyTime(1.0, 0.0)})
"""By which no step verifies: what looking up costs is seen alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--lookup",
        action="store_true",
        help="look up drafts that no step verifies",
    )
    args = parser.parse_args()

    scheduler = _filled(args.sequences, args.steps + 64, args.page_size, lookup=args.lookup)
    pending = _prefilled(scheduler, args.sequences)
    words = random.Random(0).choices(range(3, 2003), [1 / n for n in range(1, 2001)], k=4096)
    times: dict[str, list[float]] = {"plan": [], "commit": []}
    for step in range(args.steps):
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None and len(plan.rows) == args.sequences
        sampled = [Sampled(words[hash((step, row.slot)) % 4096]) for row in pending.rows]
        collected = time.perf_counter()
        scheduler.commit(pending, sampled)
        times["commit"].append(time.perf_counter() - collected)
        times["plan"].append(planned - start)
        pending = plan
    for name, values in times.items():
        worst = statistics.quantiles(values, n=100)[98]
        print(f"{name:7} median {statistics.median(values) * 1e6:6.0f} us, p99 {worst * 1e6:6.0f}")


def _filled(sequences: int, tokens: int, page_size: int, *, lookup: bool) -> Scheduler:
    prompt = 16
    buckets = tuple(_TIMES.verify)
    verification = Verification(proposer=Lookup(drafts=7), buckets=buckets) if lookup else None
    pages = 1 + sequences * (-(-(prompt + tokens) // page_size) + 2)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=sequences,
            max_model_len=prompt + tokens,
            max_num_batched_tokens=max(sequences, 4096),
        ),
        CacheConfig(num_pages=pages, page_size=page_size),
        times=_TIMES,
        verification=verification,
    )
    params = SamplingParams(max_tokens=tokens, stop_token_ids=frozenset({1, 2}))
    for number in range(sequences):
        scheduler.add(Request(id=f"request-{number}", prompt=(5,) * prompt, params=params))
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
