"""Computes figures from records. A request that was not served well is a miss, for any reason.

Percentiles count lost requests as infinitely late (`None` in JSON, "lost" in tables). So a server
that refuses half of its load does not look faster for it. Percentiles of completed requests only
have names that say so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.bench.records import Outcome, Record
from jaxserve.bench.traffic import Slo

PERCENTILES = (50, 90, 95, 99)

_LATE_SEND = 0.01
"""Seconds of send lag (p99) above which the generator's own delay affects the figures."""


class Window(NamedTuple):
    """Requests with an intended time in it count. In seconds from the start of the run."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the window, in seconds."""
        return self.end - self.start

    def holds(self, record: Record) -> bool:
        """Returns whether a request counts: whether its intended time is in the window."""
        return self.start <= record.intended < self.end


def stable_window(duration: float, warmup: float | None, cooldown: float | None) -> Window:
    """Returns the run without its filling and emptying: by default, a tenth on each side.

    Raises:
      ValueError: warmup and cooldown leave nothing of the run.
    """
    start = duration / 10 if warmup is None else warmup
    end = duration - (duration / 10 if cooldown is None else cooldown)
    if end <= start:
        raise ValueError(
            f"no window is left: warmup {start:g} s and cooldown {duration - end:g} s of a run of "
            f"{duration:g} s"
        )
    return Window(start, end)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Returns mean and percentiles in milliseconds; None means infinitely late or no value."""
    if not values:
        return {"mean": None, **{f"p{q}": None for q in PERCENTILES}}
    ordered = np.sort(np.asarray(values, np.float64))
    found: dict[str, float | None] = {"mean": _milliseconds(float(ordered.mean()))}
    for q in PERCENTILES:
        # The smallest value that at least q % do not exceed; also defined for infinities.
        index = max(math.ceil(q / 100 * len(ordered)) - 1, 0)
        found[f"p{q}"] = _milliseconds(float(ordered[index]))
    return found


def _milliseconds(seconds: float) -> float | None:
    return round(seconds * 1e3, 3) if math.isfinite(seconds) else None


def summarise(records: Sequence[Record], window: Window, slos: Mapping[str, Slo]) -> dict[str, Any]:
    """Returns the figures of all classes together (`total`) and of each one (`classes`)."""
    inside = [record for record in records if window.holds(record)]
    names = sorted({record.traffic_class for record in records})
    return {
        "window": {"start_s": window.start, "end_s": window.end},
        "requests_outside_window": len(records) - len(inside),
        "total": _figures(records, window, slos),
        "classes": {
            name: _figures([r for r in records if r.traffic_class == name], window, slos)
            for name in names
        },
    }


def _figures(every: Sequence[Record], window: Window, slos: Mapping[str, Slo]) -> dict[str, Any]:
    records = [record for record in every if window.holds(record)]
    outcomes = Counter(record.outcome for record in records)
    good = [r for r in records if r.meets(slos.get(r.traffic_class, Slo()))]
    done = [record for record in records if record.outcome is Outcome.COMPLETED]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    return {
        "sent": len(records),
        **{outcome.value: outcomes[outcome] for outcome in Outcome},
        "slo_attainment": len(good) / len(records) if records else None,
        "goodput_requests_per_s": len(good) / window.seconds,
        "goodput_tokens_per_s": sum(record.output_tokens for record in good) / window.seconds,
        "throughput_requests_per_s": len(done) / window.seconds,
        "output_tokens_per_s": _tokens_within(every, window) / window.seconds,
        "cached_token_share": (
            sum(record.cached_tokens for record in done) / prompt_tokens if prompt_tokens else None
        ),
        "ttft_ms": percentiles([_or_lost(r, r.ttft) for r in records]),
        "e2e_ms": percentiles([_or_lost(r, r.e2e) for r in records]),
        "tpot_ms_of_completed": percentiles([r.tpot for r in done if r.tpot is not None]),
        "itl_ms_of_completed": percentiles([gap for r in done for gap in r.gaps]),
        "ttft_ms_of_completed": percentiles([r.ttft for r in done if r.ttft is not None]),
        "send_lag_ms": percentiles([r.send_lag for r in records if r.send_lag is not None]),
    }


def _or_lost(record: Record, value: float | None) -> float:
    """Returns the latency of a completed request, and infinity for a lost one."""
    if record.outcome is not Outcome.COMPLETED or value is None:
        return math.inf
    return value


def _tokens_within(records: Sequence[Record], window: Window) -> float:
    """Returns the output tokens that arrived within the window, even for requests sent before it:
    at its begin the server is busy with those. A chunk may carry several tokens."""
    tokens = 0.0
    for record in records:
        if record.token_times:
            each = record.output_tokens / len(record.token_times)
            tokens += each * sum(window.start <= when < window.end for when in record.token_times)
    return tokens


def errors(records: Iterable[Record], most: int = 5) -> list[dict[str, Any]]:
    """Returns the most common reasons of lost requests: `count`, and one message as `example`.

    Messages that differ only in numbers count as one reason.
    """
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for record in records:
        if record.error is not None:
            reason = re.sub(r"[0-9]+", "0", record.error)
            examples.setdefault(reason, record.error)
            counts[reason] += 1
    return [
        {"count": count, "example": examples[reason]} for reason, count in counts.most_common(most)
    ]


def warnings(summary: Mapping[str, Any], records: Sequence[Record], cpu_share: float) -> list[str]:
    """Returns reasons to doubt the figures, as text."""
    found: list[str] = []
    lag = summary["total"]["send_lag_ms"]["p99"]
    if lag is not None and lag > _LATE_SEND * 1e3:
        found.append(
            f"the generator sent late (p99 {lag:.1f} ms after the intended time): latencies count "
            "from the intended time and include it; give the generator a core of its own or "
            "lower the rate"
        )
    if cpu_share > 0.85:
        found.append(
            f"the generator used {cpu_share:.0%} of a core and may itself be the bottleneck"
        )
    lost = [record for record in records if record.outcome is not Outcome.COMPLETED]
    if records and len(lost) == len(records):
        found.append("no request completed")
    tail = [record for record in records if record.outcome is Outcome.UNFINISHED]
    if tail:
        found.append(
            f"{len(tail)} requests were still running at the end and count as misses; a longer "
            "--drain would show when they end"
        )
    return found
