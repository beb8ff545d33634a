"""What /metrics says is what Prometheus' own client library would say, and costs far less."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.api import Start
from jaxserve.metrics import exposition
from jaxserve.metrics.exposition import Registry, TokenHistogram
from jaxserve.metrics.families import FORMER_NAMES, ROUTING
from jaxserve.metrics.metrics import Metrics

BOUNDS = (0.001, 0.25, 1.0, 80.0)
LABEL = 'a\\b"c\nd'
"""With everything that has to be escaped."""


def by_library(registry: CollectorRegistry) -> list[str]:
    """Without the times at which series were made, which we leave out."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not re.match(r"(# \w+ )?\w+_created\b", line)]


class Both:
    """The same metrics in our registry and in the client library's."""

    def __init__(self) -> None:
        self.ours, self.theirs = Registry(), CollectorRegistry()
        self.counter = self.ours.counter("c", "Counter", ["of", "a"])
        self.gauge = self.ours.gauge("g", "Gauge")
        self.histogram = self.ours.histogram("h", "Times", BOUNDS, ["of", "zone"])
        self.tokens = self.ours.histogram("t", "Times", BOUNDS, ["of"], TokenHistogram)
        self.their_counter = Counter("c", "Counter", ["of", "a"], registry=self.theirs)
        self.their_gauge = Gauge("g", "Gauge", registry=self.theirs)
        self.their_histogram = LibraryHistogram(
            "h", "Times", ["of", "zone"], buckets=BOUNDS, registry=self.theirs
        )
        self.their_tokens = LibraryHistogram(
            "t", "Times", ["of"], buckets=BOUNDS, registry=self.theirs
        )

    def change(self, which: str, value: float) -> None:
        match which:
            case "counter":
                self.counter.labels(of=LABEL, a="b").inc(value)
                self.their_counter.labels(of=LABEL, a="b").inc(value)
            case "gauge":
                self.gauge.labels().set(value)
                self.their_gauge.set(value)
            case "histogram":
                self.histogram.labels(of="x", zone=str(value > 1)).observe(value)
                self.their_histogram.labels(of="x", zone=str(value > 1)).observe(value)
            case _:
                self.tokens.labels(of="x").observe(value)
                self.their_tokens.labels(of="x").observe(value)


CHANGES = st.tuples(
    st.sampled_from(("counter", "gauge", "histogram", "tokens", "read")),
    st.floats(0, 1e300) | st.integers(0, 10**7).map(float),
)


@settings(max_examples=60)
@given(st.lists(CHANGES, max_size=40))
def test_text_is_that_of_the_client_library_however_it_is_read_in_between(
    changes: list[tuple[str, float]],
) -> None:
    both = Both()
    both.gauge.labels()
    for which, value in changes:
        if which == "read":
            both.ours.exposition()
        else:
            both.change(which, value)
    ours = both.ours.exposition().decode().splitlines()
    assert [line for line in ours if "process_" not in line] == by_library(both.theirs)


def served(metrics: Metrics, requests: int = 64) -> None:
    """Reports what that many requests report, in steps of all buckets."""
    for kind, buckets in (("decode", (1, 2, 4, 8, 16, 32, 64, 128, 256)), ("mixed", (512, 2048))):
        for bucket in buckets:
            metrics.observe_step(kind, str(bucket), 0.01, 1, bucket, late=False)
            metrics.observe_correction(kind, str(bucket), 0.001 * requests)
    for _ in range(requests):
        metrics.first_token(0.1, 10, 5)
        metrics.observe_start(Start(0.1, 0.2, 0.3))
        metrics.next_tokens(0.01, 2)
        metrics.sequence_computed(0.1, 0.2, 10)
        metrics.sequence_finished("stop", 10, 1.0)
        metrics.request_generated(3)
        metrics.prompt_accepted(10, 100)
        metrics.observe_tokenizing(0.001)
        metrics.observe_first_write(0.001)


def samples(text: str) -> dict[tuple[str, Any], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_kept_of_an_earlier_scrape_is_what_a_new_one_would_say() -> None:
    read, unread = Metrics("m"), Metrics("m")
    for metrics in (read, unread):
        for _ in range(3):
            served(metrics)
            metrics.set_memory("kv", 10**10)
            if metrics is read:
                metrics.exposition()
                metrics.exposition(ROUTING)
    kept = samples(read.exposition().decode())
    new = samples(unread.exposition().decode())
    of_now = re.compile(r"process_|vllm:lora_requests_info")  # of the system, and a time
    told = {key: value for key, value in kept.items() if not of_now.match(key[0])}
    assert len(told) > 700
    assert told == {key: value for key, value in new.items() if not of_now.match(key[0])}


def test_former_names_have_the_values_of_their_successors() -> None:
    metrics = Metrics("m")
    served(metrics)
    found = samples(metrics.exposition().decode())
    for former, name in FORMER_NAMES.items():
        ours = {key[1]: v for key, v in found.items() if key[0].startswith(name)}
        assert ours == {key[1]: v for key, v in found.items() if key[0].startswith(former)}, name
    assert not any(
        former in Metrics("m", legacy=False).exposition().decode() for former in FORMER_NAMES
    )


def test_a_scrape_may_name_families_or_series() -> None:
    metrics = Metrics("m")
    metrics.set_cache_info(page_size=64, num_pages=2)
    named = metrics.exposition(
        {"vllm:num_requests_running", "vllm:e2e_request_latency_seconds_sum"}
    )
    assert re.findall(r"^# TYPE (\S+)", named.decode(), re.M) == [
        "vllm:e2e_request_latency_seconds",
        "vllm:num_requests_running",
    ]
    assert set(re.findall(r"^# TYPE (\S+)", metrics.exposition(ROUTING).decode(), re.M)) == ROUTING
    assert metrics.exposition({"unknown"}) == b""
    whole = metrics.exposition().decode()
    assert all(line in whole for line in metrics.exposition(ROUTING).decode().splitlines())


def test_a_scrape_takes_less_time_than_formatting_1200_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """About a millisecond of the thread's own time, although everything has changed since the last
    one. Milliseconds themselves would depend on what else the processor does."""
    monkeypatch.setattr(exposition, "PROCESS_SECONDS", 3600.0)
    metrics = Metrics("m")

    def least(run: Callable[[], object]) -> float:
        taken: list[float] = []
        for _ in range(30):
            served(metrics)
            begun = time.thread_time()
            run()
            taken.append(time.thread_time() - begun)
        return min(taken)

    one = least(lambda: [f"{n} {n / 7!r}" for n in range(1000)]) / 1000
    assert least(metrics.exposition) < 1200 * one
    assert least(lambda: metrics.exposition(ROUTING)) < 300 * one
