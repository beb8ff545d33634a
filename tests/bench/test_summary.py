"""Figures: computed by hand, with every kind of loss counted as a miss."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from jaxserve.bench import summary, tables
from jaxserve.bench.records import Outcome, Record
from jaxserve.bench.summary import Window
from jaxserve.bench.traffic import STRICT, Slo


def served(
    number: int = 0,
    *,
    intended: float = 1.0,
    ttft: float = 0.1,
    gaps: tuple[float, ...] = (0.02, 0.02),
    kind: str = "chat",
) -> Record:
    record = Record(
        id=number, traffic_class=kind, intended=intended, prompt_tokens=10, max_tokens=9
    )
    record.sent = intended + 0.001
    times = [intended + ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    record.token_times = times
    record.output_tokens = len(times)
    record.outcome = Outcome.COMPLETED
    return record


def lost(outcome: Outcome) -> Record:
    record = Record(id=9, traffic_class="chat", intended=1.0, prompt_tokens=10, max_tokens=9)
    record.sent, record.outcome = 1.0, outcome
    return record


def test_latencies_count_from_the_intended_time() -> None:
    record = served(ttft=0.5)
    record.sent = record.intended + 0.4  # sent late: the user still waited half a second
    assert record.ttft == pytest.approx(0.5)
    assert record.send_lag == pytest.approx(0.4)


def test_tpot_is_per_token_and_itl_per_chunk() -> None:
    record = served(gaps=(0.04, 0.04))
    record.output_tokens = 5  # two chunks of two tokens after the first
    assert record.tpot == pytest.approx(0.02)
    assert record.gaps == pytest.approx([0.04, 0.04])


@pytest.mark.parametrize(
    ("slo", "meets"),
    [
        (Slo(), True),
        (Slo(ttft=0.1001), True),
        (Slo(ttft=0.0999), False),
        (Slo(itl_p95=0.0201), True),
        (Slo(itl_p95=0.019), False),
        (Slo(tpot=0.019), False),
        (STRICT, True),
    ],
)
def test_every_limit_of_an_slo_must_hold(slo: Slo, meets: bool) -> None:
    assert served().meets(slo) is meets


@pytest.mark.parametrize(("slow", "meets"), [(0, True), (1, True), (2, False)])
def test_95_percent_of_the_gaps_must_keep_their_limit(slow: int, meets: bool) -> None:
    gaps = (0.02,) * (20 - slow) + (0.5,) * slow
    assert served(gaps=gaps).meets(Slo(itl_p95=0.25)) is meets


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.COMPLETED])
def test_a_lost_request_is_a_miss_in_every_percentage(outcome: Outcome) -> None:
    records = [served(), served(1), served(2), lost(outcome)]
    figures = summary.summarise(records, Window(0, 10), {"chat": Slo(ttft=5)})["total"]
    assert figures["slo_attainment"] == 0.75
    assert figures[outcome.value] == 1
    assert figures["ttft_ms"]["p50"] == pytest.approx(100)
    assert figures["ttft_ms"]["p90"] is None, "the lost one is infinitely late"
    assert figures["ttft_ms_of_completed"]["p90"] == pytest.approx(100)


def test_only_requests_meant_for_the_window_count() -> None:
    records = [served(i, intended=i) for i in range(10)]
    figures = summary.summarise(records, Window(2, 6), {})
    assert figures["total"]["sent"] == 4
    assert figures["requests_outside_window"] == 6


def test_tokens_that_arrive_in_the_window_count_whenever_their_request_was_sent() -> None:
    """Requests of 2 s one after another, a token every 0.1 s: 10 per second."""
    records = [served(i, intended=2.0 * i, ttft=0.1, gaps=(0.1,) * 19) for i in range(5)]
    figures = summary.summarise(records, Window(0.95, 8.95), {})
    assert figures["total"]["output_tokens_per_s"] == pytest.approx(10)
    assert figures["classes"]["chat"]["output_tokens_per_s"] == pytest.approx(10)
    assert figures["total"]["sent"] == 4


def test_goodput_counts_only_what_met_its_slo() -> None:
    records = [served(0), served(1, ttft=3.0), served(2, kind="batch", ttft=3.0)]
    slos = {"chat": Slo(ttft=1), "batch": Slo(ttft=5)}
    figures = summary.summarise(records, Window(0, 10), slos)
    assert figures["total"]["goodput_requests_per_s"] == pytest.approx(0.2)
    assert figures["total"]["goodput_tokens_per_s"] == pytest.approx(0.6)
    assert figures["total"]["throughput_requests_per_s"] == pytest.approx(0.3)
    assert figures["classes"]["chat"]["slo_attainment"] == 0.5
    assert figures["classes"]["batch"]["slo_attainment"] == 1.0


def test_percentiles_are_of_the_values_themselves() -> None:
    found = summary.percentiles([i / 1000 for i in range(1, 101)])
    assert (found["p50"], found["p90"], found["p99"]) == (50, 90, 99)
    assert found["mean"] == pytest.approx(50.5)


def test_a_window_must_be_left() -> None:
    assert summary.stable_window(100, None, None) == (10, 90)
    with pytest.raises(ValueError, match="no window"):
        summary.stable_window(10, 6, 4)


def test_a_late_or_busy_generator_is_said() -> None:
    late = served()
    late.sent = late.intended + 0.5
    figures = summary.summarise([late], Window(0, 10), {})
    assert any("sent late" in text for text in summary.warnings(figures, [late], 0.1))
    calm = served()
    figures = summary.summarise([calm], Window(0, 10), {})
    assert summary.warnings(figures, [calm], 0.1) == []
    assert any("bottleneck" in text for text in summary.warnings(figures, [calm], 0.95))


def test_points_of_one_name_are_compared_in_their_order() -> None:
    """As of a sweep whose points were all named by --name."""

    def point(ttft: float) -> dict[str, Any]:
        figures = summary.summarise([served(ttft=ttft)], Window(0, 10), {})
        return {"name": "after", "summary": figures}

    long, short = {"points": [point(0.1), point(0.2)]}, {"points": [point(0.3)]}
    found = tables.compare([("a", long), ("b", short)])
    rows = [[list(column.cells)[4] for column in table.columns] for table in found]
    assert rows == [["TTFT p50 ms", "100.0", "300.0 (3.00x)"], ["TTFT p50 ms", "200.0", "-"]]


def test_names_are_shown_as_they_are() -> None:
    """Square brackets are markup for the library that prints, and may even end in an error."""
    figures = summary.summarise([served(kind="[chat]"), served(kind="[/x]")], Window(0, 10), {})
    point = {"name": "int4 [/copy]", "summary": figures, "errors": [], "warnings": []}
    console = Console(record=True, width=120, file=io.StringIO())
    tables.print_point(console, point)
    for table in tables.compare([("[before]", {"points": [point]})]):
        console.print(table)
    text = console.export_text()
    assert all(name in text for name in ("int4 [/copy]:", "[chat]", "[/x]", "[before]"))
