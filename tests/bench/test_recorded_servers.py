"""The harness against the streams of other servers: figures as the recording says by hand."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest

from jaxserve.bench.experiment import run_experiment
from jaxserve.bench.options import Experiment
from tests.bench.recorded_server import answers, replaying
from tests.bench.virtual_time import at_virtual_time

GAP = 0.03
"""Seconds between requests."""


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@at_virtual_time
async def test_figures_are_those_of_the_recording(endpoint: str, tmp_path: Path) -> None:
    recorded = answers(endpoint)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"time": GAP * number, "prompt": answer["name"], "output_tokens": 16}) + "\n"
            for number, answer in enumerate(recorded)
        )
    )
    async with replaying(endpoint) as replay:
        experiment = Experiment(
            url=replay.url,
            endpoint=endpoint,
            prompts="text",
            trace=trace,
            warmup=0.0,
            cooldown=0.0,
            drain=5.0,
        )
        point = await run_experiment(experiment, lambda run: nullcontext())

    assert replay.asked == Counter(answer["name"] for answer in recorded), "a lost request is one"
    for answer, request in zip(recorded, point["requests"], strict=True):
        check_content(answer, request)
    check_times(recorded, point)
    expected = [answer["expected"] for answer in recorded]
    good = [each for each in expected if each["good"]]
    total = point["summary"]["total"]
    seconds = GAP * (len(recorded) - 1) + 1e-3
    assert total["sent"] == len(expected)
    for outcome in ("completed", "shed", "failed", "timed_out", "unfinished"):
        assert total[outcome] == sum(each["outcome"] == outcome for each in expected)
    assert total["slo_attainment"] == pytest.approx(len(good) / len(expected))
    assert total["goodput_requests_per_s"] == pytest.approx(len(good) / seconds)
    tokens = sum(each["tokens"] for each in good)
    assert total["goodput_tokens_per_s"] == pytest.approx(tokens / seconds)
    assert total["ttft_ms"]["p99"] is None, "a lost request is infinitely late"


def check_content(answer: dict[str, Any], request: dict[str, Any]) -> None:
    """What was got."""
    name, expected = answer["name"], answer["expected"]
    assert request["outcome"] == expected["outcome"], (name, request["error"])
    assert request["output_tokens"] == expected["tokens"], name
    assert expected.get("error", "") in (request["error"] or ""), name
    if expected["first"] is None:
        assert request["ttft"] is None, name
    else:
        assert len(request["gaps"]) == expected["last"] - expected["first"], name


def check_times(recorded: list[dict[str, Any]], point: dict[str, Any]) -> None:
    """From the intended send time to the writes that the recording says."""
    ttfts: list[float] = []
    tpots: list[float] = []
    for answer, request in zip(recorded, point["requests"], strict=True):
        expected = answer["expected"]
        if expected["first"] is None:
            continue
        first, last = (answer["writes"][expected[which]][0] for which in ("first", "last"))
        assert request["ttft"] == pytest.approx(first, abs=1e-5), answer["name"]
        if expected["outcome"] == "completed":
            ttfts.append(1e3 * first)
            tpots.append(1e3 * (last - first) / (expected["tokens"] - 1))
    total = point["summary"]["total"]
    assert total["ttft_ms_of_completed"]["p50"] == pytest.approx(median_low(ttfts), abs=0.01)
    assert total["tpot_ms_of_completed"]["p50"] == pytest.approx(median_low(tpots), abs=0.01)
