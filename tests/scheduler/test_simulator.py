"""The scheduler on simulated time does what the clock says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Row, StepPlan
from jaxserve.step_times import StepTimes
from lab.simulation.simulator import STOP, Arrival, Simulator

TIMES = StepTimes(decode={4: 0.01}, mixed={64: 0.02, 256: 0.05})
WRONG = replace(TIMES, decode={4: 0.018})
"""So that steps of decodes teach what chunks cost beyond them."""


def simulator(*, seqs: int = 4, pages: int = 1000) -> Simulator:
    config = SchedulerConfig(max_num_seqs=seqs, max_model_len=4096, max_num_batched_tokens=256)
    return Simulator(config, CacheConfig(num_pages=pages, page_size=16), TIMES)


def arrival(number: int, at: float = 0.0, *, prompt: int = 64, output: int = 3) -> Arrival:
    params = SamplingParams(max_tokens=100, stop_token_ids=frozenset({STOP}))
    tokens = tuple(range(number * 10_000, number * 10_000 + prompt))
    return Arrival(
        at=at, request=Request(id=f"r{number}", prompt=tokens, params=params), output=output
    )


def test_a_lone_request_takes_its_prefill_and_its_decode_steps() -> None:
    result = simulator().run([arrival(0, at=1.0)])
    (outcome,) = result.outcomes
    assert outcome.tokens == pytest.approx([1.02, 1.03, 1.04])
    assert outcome.finished and outcome.ttft == pytest.approx(0.02)
    assert outcome.tpot == pytest.approx(0.01)


def test_requests_beyond_the_slots_wait_for_those_before_them() -> None:
    result = simulator(seqs=1).run([arrival(0), arrival(1)])
    first, second = result.outcomes
    assert second.tokens[0] > first.tokens[-1]
    assert all(outcome.finished and len(outcome.tokens) == 3 for outcome in result.outcomes)


def test_an_equal_prompt_is_a_prefix_hit() -> None:
    again = Arrival(at=1.0, request=arrival(0).request, output=3)
    result = simulator().run([arrival(0), again])
    assert [outcome.cached for outcome in result.outcomes] == [0, 48]


def test_a_client_leaves_when_its_patience_ends() -> None:
    impatient = replace(arrival(0, output=90), patience=0.5)
    result = simulator(seqs=1).run([impatient, arrival(1, at=0.1)])
    left, next_ = result.outcomes
    assert not left.finished and left.tokens[-1] == pytest.approx(0.5, abs=0.02)
    assert next_.finished and 0.5 < next_.tokens[0] < 0.6


def test_a_simulation_can_be_cut_off() -> None:
    result = simulator().run([arrival(0, output=90)], until=0.5)
    (outcome,) = result.outcomes
    assert not outcome.finished and 40 <= len(outcome.tokens) <= 50


def test_in_a_closed_loop_a_client_sends_its_next_request_when_its_last_one_is_over() -> None:
    traffic = [arrival(number, output=output) for number, output in enumerate((3, 90, 3, 3))]
    result = simulator().run(traffic, clients=2, pause=0.25)
    first, long, second, third = result.outcomes
    assert [outcome.arrival.at for outcome in (first, long)] == [0, 0]
    for before, after in ((first, second), (second, third)):
        assert after.arrival.at == pytest.approx(before.tokens[-1] + 0.25)
        assert 0 < after.tokens[0] - after.arrival.at < 0.1
    assert third.tokens[-1] < long.tokens[-1]


def test_in_a_closed_loop_a_client_that_is_refused_or_leaves_goes_on() -> None:
    refused = arrival(0, prompt=5000)
    left = replace(arrival(1, output=90), patience=0.5)
    result = simulator().run([refused, left, arrival(2)], clients=1)
    assert [outcome.arrival.at for outcome in result.outcomes] == [
        0,
        0,
        pytest.approx(0.5, abs=0.02),
    ]
    assert [outcome.refused for outcome in result.outcomes] == [True, False, False]
    assert result.outcomes[2].finished


class Stepwise(Simulator):
    """Plans every step."""

    def _skip_to(self, horizon: float) -> bool:
        return False


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_counting_equal_steps_gives_what_planning_each_of_them_gives(data: st.DataObject) -> None:
    draw: Callable[[st.SearchStrategy[Any]], Any] = data.draw
    config = SchedulerConfig(
        max_num_seqs=draw(st.sampled_from([2, 4])),
        max_model_len=4096,
        max_num_batched_tokens=256,
        prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority", "slo"])),
    )
    cache = CacheConfig(num_pages=draw(st.sampled_from([14, 40, 200])), page_size=16)
    traffic = [
        replace(
            arrival(
                number % 4,  # some prompts come again
                at=draw(st.floats(0, 2)),
                prompt=draw(st.sampled_from([1, 15, 16, 64, 100, 600])),
                output=draw(st.sampled_from([1, 2, 40, 80, 100])),
            ),
            patience=draw(st.sampled_from([None, 0.3, 1.0])),
        )
        for number in range(draw(st.integers(1, 10)))
    ]
    traffic = [
        replace(
            a, request=replace(a.request, id=f"r{i}", e2e_slo=draw(st.sampled_from([None, 1.0])))
        )
        for i, a in enumerate(traffic)
    ]
    known = draw(st.sampled_from([None, WRONG]))
    quick, slow = (
        kind(config, cache, TIMES, known=known, host=0.001) for kind in (Simulator, Stepwise)
    )
    results = quick.run(traffic), slow.run(traffic)
    assert results[0] == results[1]
    for simulated in (quick, slow):
        simulated.scheduler.check()
    pages = [simulated.scheduler.pages for simulated in (quick, slow)]
    assert vars(pages[0]) == vars(pages[1])
    step = StepPlan(rows=(Row(0, 0, 0, (), True),))
    learned = [simulated.scheduler.learn(step, TIMES.of(step)) for simulated in (quick, slow)]
    assert learned[0] == learned[1]
