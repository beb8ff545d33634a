"""The scheduling policies on simulated time: whoever waits, for whom and for how long."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.config import POLICIES, CacheConfig, SchedulerConfig
from jaxserve.plan import Row, Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.deadlines import STRETCH
from jaxserve.scheduler.in_time import Capacity, Job, in_time
from jaxserve.scheduler.queue import AGEING, MAX_LEVEL
from jaxserve.scheduler.sequence import Sequence
from jaxserve.step_times import StepTimes
from lab.simulation.simulator import STOP, Arrival, Outcome, Simulator

TIMES = StepTimes(decode={1: 0.01, 8: 0.012}, mixed={64: 0.02, 256: 0.05}, decode_context=1e-6)
CACHE = CacheConfig(num_pages=401, page_size=16)


def simulator(policy: str, *, seqs: int = 1, ttft_slo: float | None = None) -> Simulator:
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_model_len=2048,
        max_num_batched_tokens=256,
        policy=policy,
        ttft_slo=ttft_slo,
    )
    return Simulator(config, CACHE, TIMES)


def arrival(
    name: str, at: float, *, prompt: int = 64, output: int = 10, **fields: object
) -> Arrival:
    params = SamplingParams(max_tokens=200, stop_token_ids=frozenset({STOP}))
    tokens = tuple(hash((name, i)) % 100_000 for i in range(prompt))
    request = replace(Request(id=name, prompt=tokens, params=params), **fields)
    return Arrival(at=at, request=request, output=output)


def order(outcomes: list[Outcome]) -> list[str]:
    """By the time of the first token."""
    begun = sorted((o for o in outcomes if o.tokens), key=lambda o: o.tokens[0])
    return [outcome.arrival.request.id for outcome in begun]


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    count = draw(st.integers(1, 25))
    return [
        arrival(
            f"r{number}",
            draw(st.floats(0, 3)),
            prompt=draw(st.sampled_from([1, 40, 300, 1000])),
            output=draw(st.integers(1, 60)),
            priority=draw(st.integers(-1, 2)),
            tenant=draw(st.sampled_from(["a", "b", "c"])),
        )
        for number in range(count)
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traffic=traffic(), policy=st.sampled_from(POLICIES), seqs=st.integers(1, 8))
def test_no_request_is_lost_and_the_device_never_idles_with_work_to_do(
    traffic: list[Arrival], policy: str, seqs: int
) -> None:
    sim = simulator(policy, seqs=seqs)
    result = sim.run(traffic)
    for outcome in result.outcomes:
        assert outcome.finished and len(outcome.tokens) == outcome.arrival.output
    sim.scheduler.check()
    assert sim.scheduler.pages.num_free == CACHE.usable_pages
    # Between the first arrival and the end the device computes, but for gaps without requests.
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((o.arrival.at, o.tokens[-1]) for o in result.outcomes):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    occupied = sum(end - begin for begin, end in spans)
    assert result.busy * result.seconds >= 0.95 * occupied - 0.1


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_requests_are_served_in_order_of_arrival(policy: str) -> None:
    arrivals = [arrival(f"r{i}", 0.01 * i) for i in range(20)]
    result = simulator(policy, seqs=2).run(arrivals)
    assert order(result.outcomes) == [f"r{i}" for i in range(20)]


def test_priorities_are_respected() -> None:
    levels = [2, 0, 1, 0, 2, 1]
    arrivals = [arrival("first", 0.0)]
    arrivals += [arrival(f"{level}-{i}", 0.05, priority=level) for i, level in enumerate(levels)]
    got = order(simulator("priority").run(arrivals).outcomes)[1:]
    assert got == ["0-1", "0-3", "1-2", "1-5", "2-0", "2-4"]


def test_priority_counts_for_nothing_in_order_of_arrival() -> None:
    arrivals = [arrival(f"r{i}", 0.01 * i, priority=-i) for i in range(5)]
    assert order(simulator("fcfs").run(arrivals).outcomes) == [f"r{i}" for i in range(5)]


def test_whoever_waits_long_enough_goes_before_higher_priorities() -> None:
    """A stream of urgent requests that alone would keep the device busy for ever."""
    patient = arrival("patient", 0.0, priority=1)
    urgent = [arrival(f"u{i}", 0.1 * i, priority=0) for i in range(round(1.5 * AGEING / 0.1))]
    result = simulator("priority").run([urgent[0], patient, *urgent[1:]], until=1.5 * AGEING)
    # Those that came in the first AGEING seconds go before it, and nobody else.
    assert abs(order(result.outcomes).index("patient") - AGEING / 0.1) <= 2


def test_priorities_beyond_all_bounds_keep_nobody_waiting_for_ever() -> None:
    now = 0.0
    config = SchedulerConfig(
        max_num_seqs=1, max_model_len=2048, max_num_batched_tokens=256, policy="priority"
    )
    scheduler = Scheduler(config, CACHE, times=TIMES, clock=lambda: now)
    scheduler.add(arrival("patient", 0.0, priority=2**62).request)
    for now in (0.0, 2 * MAX_LEVEL * AGEING - 1, 2 * MAX_LEVEL * AGEING + 1):
        scheduler.add(arrival(f"urgent at {now}", now, priority=-(2**62)).request)
    admitted: list[int] = []
    while (plan := scheduler.plan()) is not None:
        admitted += [row.seq_id for row in plan.rows]
        scheduler.commit(plan, [Sampled(STOP) for _ in plan.rows])
    assert admitted == [1, 2, 0, 3]


def test_the_lowest_priority_gives_its_pages_back_first() -> None:
    config = SchedulerConfig(
        max_num_seqs=3, max_model_len=256, max_num_batched_tokens=64, policy="priority"
    )
    sim = Simulator(config, CacheConfig(num_pages=13, page_size=16), TIMES)
    arrivals = [
        arrival(f"p{level}", 0.0, prompt=60 - level, output=90, priority=level)
        for level in (2, 0, 1)
    ]
    result = sim.run(arrivals)
    assert all(outcome.finished for outcome in result.outcomes)
    ends = {o.arrival.request.id: o.tokens[-1] for o in result.outcomes}
    assert ends["p0"] < ends["p1"] < ends["p2"]


def test_short_prompts_overtake_long_ones_and_long_ones_do_not_starve() -> None:
    arrivals = [arrival("first", 0.0), arrival("long", 0.01, prompt=1000)]
    arrivals += [arrival(f"short{i}", 0.02 + 0.12 * i, prompt=20) for i in range(200)]
    got = order(simulator("slo").run(arrivals).outcomes)
    assert got[1] == "short0" and 2 < got.index("long") < 60


def test_nobody_without_a_deadline_starves_beside_those_who_have_one() -> None:
    arrivals = [arrival("any time", 0.01, prompt=100)]
    arrivals += [arrival(f"near{i}", 0.1 * i, ttft_slo=5.0, prompt=60) for i in range(300)]
    outcomes = simulator("slo").run(arrivals).outcomes
    longest_wait = STRETCH * 100 / TIMES.prefill_rate
    assert order(outcomes).index("any time") < longest_wait / 0.1 + 2


def test_prefix_hits_count_as_short_prompts() -> None:
    seen = arrival("seen", 0.0, prompt=1000)
    again = Arrival(at=2.0, request=replace(seen.request, id="again"), output=10)
    arrivals = [seen, arrival("running", 1.9), arrival("new", 1.99, prompt=300), again]
    assert order(simulator("slo").run(arrivals).outcomes) == ["seen", "running", "again", "new"]


def test_a_tenant_with_many_requests_does_not_keep_others_waiting() -> None:
    arrivals = [arrival(f"a{i}", 0.0, tenant="a") for i in range(30)]
    arrivals += [arrival(f"b{i}", 0.5, tenant="b") for i in range(3)]
    got = order(simulator("slo").run(arrivals).outcomes)
    assert max(got.index(f"b{i}") for i in range(3)) < 16
    got = order(simulator("fcfs").run(arrivals).outcomes)
    assert min(got.index(f"b{i}") for i in range(3)) == 30


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    claimed=st.sampled_from([0.3, 1.0, 5.0]),
    honest=st.sampled_from([None, 10.0, 30.0]),
    names=st.permutations(["a", "b"]),
)
def test_tight_deadlines_for_everything_do_not_win_over_other_keys(
    claimed: float, honest: float | None, names: list[str]
) -> None:
    """Twice what fits, half of it of each."""
    arrivals = [
        arrival(f"{tenant}{i}", 0.1 * i, prompt=200, ttft_slo=slo, tenant=tenant)
        for i in range(100)
        for tenant, slo in zip(names, (claimed, honest), strict=True)
    ]
    result = simulator("slo", seqs=2).run(arrivals, until=10.0)
    # Once there are lengths of answers to reckon with.
    served = [o.arrival.request.tenant for o in result.outcomes if o.tokens and o.tokens[0] > 3]
    assert served.count(names[1]) >= 0.48 * len(served) > 25


def test_a_key_for_each_request_does_not_keep_others_waiting_for_ever() -> None:
    arrivals = [arrival(f"new{i}", 0.05 * i, prompt=200, tenant=f"k{i}") for i in range(200)]
    arrivals += [arrival(f"one{i}", 0.05 * i, prompt=200, tenant="z") for i in range(200)]
    result = simulator("slo", seqs=2).run(arrivals, until=10.0)
    got = order(result.outcomes)
    places = [place for place, name in enumerate(got) if name.startswith("one")]
    assert len(places) > 8 and max(b - a for a, b in itertools.pairwise(places)) < len(got) / 2


def test_longer_answers_than_others_give_are_paid_for() -> None:
    """All ask for as many tokens; those of one key use them all."""
    arrivals = [
        arrival(f"{tenant}{i}", 0.01 * i, prompt=20, output=output, tenant=tenant)
        for i in range(150)
        for tenant, output in (("long", 200), ("short", 10))
    ]
    result = simulator("slo", seqs=2).run(arrivals, until=20.0)
    tokens = {
        tenant: sum(len(o.tokens) for o in result.outcomes if o.arrival.request.tenant == tenant)
        for tenant in ("long", "short")
    }
    assert 0.7 < tokens["long"] / tokens["short"] < 1.5


def test_who_cannot_be_served_in_time_is_told_so_and_the_others_are_in_time() -> None:
    arrivals = [arrival(f"r{i}", 0.02 * i) for i in range(200)]
    result = simulator("slo", seqs=2, ttft_slo=1.0).run(arrivals)
    served = [o for o in result.outcomes if not o.refused]
    assert 20 < len(served) < 120
    assert all(o.finished and o.ttft is not None and o.ttft <= 1.12 for o in served)
    assert all(not o.tokens for o in result.outcomes if o.refused)


def test_without_deadlines_nobody_is_dropped() -> None:
    result = simulator("slo").run([arrival(f"r{i}", 0.0) for i in range(50)])
    assert all(outcome.finished for outcome in result.outcomes)


def test_who_waits_beyond_its_deadline_is_told_when_to_come_again() -> None:
    now = 0.0
    config = SchedulerConfig(
        max_num_seqs=1, max_model_len=2048, max_num_batched_tokens=256, policy="slo"
    )
    scheduler = Scheduler(config, CACHE, times=TIMES, clock=lambda: now)
    for number in range(40):
        scheduler.add(arrival(f"r{number}", 0.0, prompt=500).request)
    scheduler.plan()
    scheduler.add(arrival("late", 0.0, prompt=500, ttft_slo=20.0).request)
    assert not scheduler.shed()
    now = 19.8  # its prefill takes another 0.1 s at least
    assert not scheduler.shed()
    now = 19.95
    ((name, error),) = scheduler.shed()
    assert name == "late" and error.retry_after > 1
    assert scheduler.num_waiting == 39
    scheduler.check()


@pytest.mark.parametrize("learned", [False, True])
def test_deadlines_are_judged_by_learned_times(learned: bool) -> None:
    """The table was measured on a busy GPU: prompts take a fifth of its times."""
    now = 0.0
    slow = replace(TIMES, mixed={size: 5 * seconds for size, seconds in TIMES.mixed.items()})
    config = SchedulerConfig(
        max_num_seqs=1, max_model_len=2048, max_num_batched_tokens=256, policy="slo"
    )
    scheduler = Scheduler(config, CACHE, times=slow, clock=lambda: now)
    chunk = Row(1, 1, 0, (1,) * 255, True)
    step = StepPlan(rows=(Row(0, 0, 100, (), True), chunk))
    for _ in range(600 if learned else 0):
        scheduler.learn(step, TIMES.of(step))
    scheduler.add(arrival("running", 0.0, prompt=500).request)
    scheduler.plan()
    scheduler.add(arrival("waiting", 0.0, prompt=500, ttft_slo=0.6).request)
    now = 0.3  # by the table its prefill takes another 0.49 s, in truth 0.1
    assert bool(scheduler.shed()) != learned


def test_short_answers_are_in_time_while_long_ones_use_what_they_leave() -> None:
    """Twice what fits, for half a minute."""
    near = [arrival(f"near{i}", 0.25 * i, prompt=300, ttft_slo=1.0) for i in range(120)]
    far = [arrival(f"far{i}", 0.5 * i, prompt=300, output=60, e2e_slo=30.0) for i in range(60)]

    def in_time(policy: str) -> int:
        outcomes = simulator(policy, seqs=1).run([*near, *far]).outcomes
        return sum(
            o.finished
            and o.tokens[0] - o.arrival.at <= (o.arrival.request.ttft_slo or math.inf)
            and o.tokens[-1] - o.arrival.at <= (o.arrival.request.e2e_slo or math.inf)
            for o in outcomes
        )

    assert in_time("fcfs") < 0.4 * 180
    assert in_time("slo") > 0.9 * 180


@pytest.mark.parametrize("pause", [2.0, 8.0])
def test_a_pause_is_not_taken_for_slow_steps(pause: float) -> None:
    """An answer that takes one second is given within ten, however long nobody came before."""
    earlier = arrival("earlier", 0.0, output=3)
    params = replace(earlier.request.params, max_tokens=4)
    earlier = replace(earlier, request=replace(earlier.request, params=params))
    others = [arrival(f"r{i}", pause, output=90) for i in range(20)]
    due = arrival("due", pause + 0.05, output=100, e2e_slo=10.0)
    (*_, outcome) = simulator("slo").run([earlier, *others, due]).outcomes
    assert outcome.arrival.request.id == "due" and outcome.finished


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(gaps=st.lists(st.floats(0, 0.3), min_size=1, max_size=25), seqs=st.integers(1, 8))
def test_uniform_traffic_is_served_as_in_order_of_arrival_to_the_last_bit(
    gaps: list[float], seqs: int
) -> None:
    times = list(itertools.accumulate(gaps))
    arrivals = [arrival(f"r{i}", at, prompt=200, output=20) for i, at in enumerate(times)]
    tokens = {
        policy: [outcome.tokens for outcome in simulator(policy, seqs=seqs).run(arrivals).outcomes]
        for policy in ("fcfs", "slo")
    }
    assert tokens["slo"] == tokens["fcfs"]


jobs = st.builds(
    lambda deadline, prefill: Job(
        deadline, math.inf, prefill, 0.0, 0.0, True, cast(Sequence, None)
    ),
    st.floats(0, 12),
    st.integers(1, 5),
)


@given(jobs=st.lists(jobs, max_size=8))
def test_as_many_as_possible_are_in_time(jobs: list[Job]) -> None:
    jobs.sort(key=lambda job: job.due)

    def feasible(chosen: list[Job]) -> bool:
        ends = itertools.accumulate(job.prefill for job in chosen)
        return all(end <= job.due for end, job in zip(ends, chosen, strict=True))

    best = max(
        len(chosen)
        for count in range(len(jobs) + 1)
        for chosen in itertools.combinations(jobs, count)
        if feasible(list(chosen))
    )
    kept = in_time(jobs, 0.0, Capacity(prefill=1.0, decode=1.0))
    assert sum(kept) == best
    assert feasible([job for job, keep in zip(jobs, kept, strict=True) if keep])
