"""Schedules and prompts: what is asked for, the same for equal seeds."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench import arrivals, traffic
from jaxserve.bench.arrivals import constant_rate, ramp, schedule, steps
from jaxserve.bench.traffic import Content


@given(
    rate=st.floats(0.5, 200),
    seconds=st.floats(1, 100),
    burstiness=st.sampled_from([0.25, 1.0, 4.0, math.inf]),
    seed=st.integers(0, 2**32),
)
def test_arrivals_are_ordered_and_within_the_run(
    rate: float, seconds: float, burstiness: float, seed: int
) -> None:
    times = schedule(constant_rate(rate, seconds), burstiness=burstiness, seed=seed)
    assert times == sorted(times)
    assert all(0 <= time < seconds * (1 + 1e-9) for time in times)
    assert times == schedule(constant_rate(rate, seconds), burstiness=burstiness, seed=seed)


def test_poisson_gaps_have_the_rate_and_the_spread_of_an_exponential() -> None:
    gaps = np.diff(schedule(constant_rate(10, 2000), burstiness=1, seed=1))
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.03)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1.0, abs=0.03)


def test_burstiness_sets_the_spread_of_the_gaps_and_not_the_rate() -> None:
    for burstiness in (0.25, 4.0):
        gaps = np.diff(schedule(constant_rate(10, 2000), burstiness=burstiness, seed=2))
        assert np.mean(gaps) == pytest.approx(0.1, rel=0.05)
        spread = np.std(gaps) / np.mean(gaps)
        assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_infinite_burstiness_is_evenly_spaced() -> None:
    times = schedule(constant_rate(4, 2), burstiness=math.inf, seed=0)
    assert times == pytest.approx([0.125 + 0.25 * index for index in range(8)])


def test_a_ramp_sends_where_the_rate_is_high() -> None:
    times = schedule(ramp(0, 20, 100), burstiness=math.inf, seed=0)
    assert len(times) == 1000
    assert sum(time < 50 for time in times) == pytest.approx(250, abs=1)


def test_steps_have_their_rates() -> None:
    times = schedule(steps([2, 8], 20), burstiness=math.inf, seed=0)
    assert sum(time < 10 for time in times) == 20
    assert sum(time >= 10 for time in times) == 80


def test_a_segment_finds_the_time_of_its_last_arrival() -> None:
    segment = arrivals.Segment(10, 5, 1)
    assert segment.when(segment.requests) == pytest.approx(10)


def _first(count: int, seed: int, content: Content | None = None) -> list[traffic.Prompt]:
    prompts = traffic.generate(traffic.STUDY, content or Content(), seed)
    return list(itertools.islice(prompts, count))


def test_the_mix_has_the_shares_and_lengths_of_the_study() -> None:
    prompts = _first(3000, 5)
    for kind in traffic.STUDY:
        mine = [prompt for prompt in prompts if prompt.traffic_class == kind.name]
        assert len(mine) / 3000 == pytest.approx(kind.share / 725, abs=0.03)
        low, high = kind.prompt_tokens
        assert all(low <= len(prompt.prompt) == prompt.prompt_tokens <= high for prompt in mine)
        low, high = kind.output_tokens
        assert all(low <= prompt.output_tokens <= high for prompt in mine)
        assert all(kind.temperature[0] <= p.temperature <= kind.temperature[1] for p in mine)


def test_prompts_are_unique_and_differ_between_seeds() -> None:
    one, again, other = _first(300, 1), _first(300, 1), _first(300, 2)
    assert one == again
    texts = {json.dumps(prompt.prompt) for prompt in (*one, *other)}
    assert len(texts) == 600


def test_a_shared_prefix_is_common_to_a_class_only() -> None:
    content = Content(shared_prefix_tokens=50)
    firsts: dict[str, set[str]] = {}
    for prompt in _first(200, 3, content):
        assert isinstance(prompt.prompt, list)
        firsts.setdefault(prompt.traffic_class, set()).add(json.dumps(prompt.prompt[:50]))
    assert len(firsts) == 4
    assert all(len(prefixes) == 1 for prefixes in firsts.values())
    assert len(set.union(*firsts.values())) == 4


def test_half_of_the_requests_share_a_prefix_if_asked() -> None:
    content = Content(shared_prefix_tokens=50, shared_prefix_share=0.5)
    prompts = [p for p in _first(800, 3, content) if p.traffic_class == "siso"]
    shared = sum(p.prompt_tokens > 101 for p in prompts)  # siso prompts are 101 at most
    assert 0.4 < shared / len(prompts) < 0.6


def test_text_prompts_are_text() -> None:
    (prompt,) = _first(1, 0, Content(kind="text"))
    assert isinstance(prompt.prompt, str)
    assert len(prompt.prompt.split()) == prompt.prompt_tokens


def test_a_trace_is_replayed_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"time": 2.5, "prompt_tokens": 7, "output_tokens": 3, "class": "chat"},
        {"time": 0.5, "prompt": [1, 2, 3], "output_tokens": 4, "temperature": 0.5},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = traffic.read_trace(path, Content(), 0)
    assert (first.time, first.prompt.prompt, first.prompt.traffic_class) == (
        0.5,
        [1, 2, 3],
        "trace",
    )
    assert (second.time, second.prompt.prompt_tokens) == (2.5, 7)
    assert len(second.prompt.prompt) == 7


@pytest.mark.parametrize("line", ["{}", "no json", '{"time": 1, "output_tokens": 2}', "[1]"])
def test_a_bad_trace_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        traffic.read_trace(path, Content(), 0)


def test_a_trace_without_requests_is_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no requests"):
        traffic.read_trace(path, Content(), 0)


def test_a_trace_s_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    """Other line separators may stand inside of a text."""
    path = tmp_path / "trace.jsonl"
    line = {"time": 0, "prompt": "one\u2028two\x85three", "output_tokens": 1}
    path.write_bytes(json.dumps(line, ensure_ascii=False).encode() + b"\r\n")
    (entry,) = traffic.read_trace(path, Content(kind="text"), 0)
    assert entry.prompt.prompt == line["prompt"]
