"""Tables for the terminal: a run while it lasts, its figures, and comparisons of result files."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from jaxserve.bench.load import Run
from jaxserve.bench.records import Outcome, Record


@contextlib.asynccontextmanager
async def live_view(run: Run, console: Console, name: str) -> AsyncGenerator[None]:
    """Shows the run twice a second; shows nothing if the output is not a terminal."""
    if not console.is_terminal:
        yield
        return
    with Live(_live_table(run, name), console=console, refresh_per_second=2) as live:

        async def refresh() -> None:
            while True:
                await asyncio.sleep(0.5)
                live.update(_live_table(run, name))

        task = asyncio.create_task(refresh())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            live.update(_live_table(run, name))


def _live_table(run: Run, name: str) -> Table:
    left = run.duration - (run.clock() if run.clock else 0.0)
    state = f"{left:.0f} s of load left" if left > 0 else "draining"
    table = Table(title=escape(f"{name}: {state}"))
    for column in ("class", "sent", "running", "completed", "lost", "TTFT p50 ms", "TPOT p50 ms"):
        table.add_column(column, justify="left" if column == "class" else "right")
    classes = sorted({record.traffic_class for record in run.records})
    for kind in classes:
        table.add_row(escape(kind), *_live_row([r for r in run.records if r.traffic_class == kind]))
    if len(classes) > 1:
        table.add_section()
        table.add_row("all", *_live_row(run.records))
    return table


def _live_row(records: Sequence[Record]) -> list[str]:
    sent = [record for record in records if record.sent is not None]
    outcomes = Counter(record.outcome for record in sent)
    lost = len(sent) - outcomes[Outcome.COMPLETED] - outcomes[Outcome.UNFINISHED]
    ttft = [record.ttft for record in sent if record.ttft is not None]
    tpot = [record.tpot for record in sent if record.tpot is not None]
    return [
        str(len(sent)),
        str(outcomes[Outcome.UNFINISHED]),
        str(outcomes[Outcome.COMPLETED]),
        str(lost),
        f"{median(ttft) * 1e3:.0f}" if ttft else "",
        f"{median(tpot) * 1e3:.1f}" if tpot else "",
    ]


_FIGURES = (
    ("sent", "sent", "{:d}"),
    ("completed", "completed", "{:d}"),
    ("shed", "shed", "{:d}"),
    ("failed", "failed", "{:d}"),
    ("timed out", "timed_out", "{:d}"),
    ("unfinished", "unfinished", "{:d}"),
    ("SLO met", "slo_attainment", "{:.1%}"),
    ("goodput req/s", "goodput_requests_per_s", "{:.2f}"),
    ("goodput tok/s", "goodput_tokens_per_s", "{:.0f}"),
    ("output tok/s", "output_tokens_per_s", "{:.0f}"),
    ("cached prompt tokens", "cached_token_share", "{:.1%}"),
)
_LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("end to end", "e2e_ms"),
    ("TPOT (completed)", "tpot_ms_of_completed"),
    ("ITL (completed)", "itl_ms_of_completed"),
    ("send lag", "send_lag_ms"),
)


def print_point(console: Console, point: dict[str, Any]) -> None:
    """Prints the figures of one point: all requests, and each class if there are several."""
    figures = point["summary"]
    window = figures["window"]
    columns = {"all": figures["total"]}
    if len(figures["classes"]) > 1:
        columns |= figures["classes"]
    table = Table(
        title=escape(f"{point['name']}: requests of {window['start_s']:g} to {window['end_s']:g} s")
    )
    table.add_column("")
    for name in columns:
        table.add_column(escape(name), justify="right")
    for label, key, form in _FIGURES:
        table.add_row(label, *(_shown(each[key], form, "-") for each in columns.values()))
    table.add_section()
    for label, key in _LATENCIES:
        lost = "lost" if key in ("ttft_ms", "e2e_ms") else "-"
        for q in ("p50", "p99"):
            table.add_row(
                f"{label} {q} ms",
                *(_shown(each[key][q], "{:.1f}", lost) for each in columns.values()),
            )
    console.print(table)
    for error in point["errors"]:
        console.print(f"[red]{error['count']} requests:[/] {escape(error['example'])}")
    for warning in point["warnings"]:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)


def _shown(value: float | None, form: str, missing: str) -> str:
    return missing if value is None else form.format(value)


COMPARED = (
    ("SLO met", ("slo_attainment",), "{:.1%}"),
    ("goodput req/s", ("goodput_requests_per_s",), "{:.2f}"),
    ("goodput tok/s", ("goodput_tokens_per_s",), "{:.0f}"),
    ("output tok/s", ("output_tokens_per_s",), "{:.0f}"),
    ("TTFT p50 ms", ("ttft_ms", "p50"), "{:.1f}"),
    ("TTFT p99 ms", ("ttft_ms", "p99"), "{:.1f}"),
    ("TPOT p50 ms", ("tpot_ms_of_completed", "p50"), "{:.2f}"),
    ("TPOT p99 ms", ("tpot_ms_of_completed", "p99"), "{:.2f}"),
    ("ITL p99 ms", ("itl_ms_of_completed", "p99"), "{:.1f}"),
)


def compare(documents: Sequence[tuple[str, dict[str, Any]]]) -> list[Table]:
    """Returns a table for each point of the first file, with each figure and its ratio to the
    first's.

    Points match by name. Points of one name match in order. A missing point shows as "-". A ratio
    to nothing is left out.
    """
    tables: list[Table] = []
    (_, first), *_ = documents
    seen: Counter[str] = Counter()
    for point in first["points"]:
        table = Table(title=escape(point["name"]))
        table.add_column("")
        for file, _ in documents:
            table.add_column(escape(file), justify="right")
        name = point["name"]
        totals = [_total(document, name, seen[name]) for _, document in documents]
        seen[name] += 1
        for label, keys, form in COMPARED:
            values = [_at(total, keys) for total in totals]
            table.add_row(label, *(_compared(value, values[0], form) for value in values))
        tables.append(table)
    return tables


def _total(document: dict[str, Any], name: str, number: int) -> dict[str, Any] | None:
    found = [p["summary"]["total"] for p in document["points"] if p["name"] == name]
    return found[number] if number < len(found) else None


def _at(figures: dict[str, Any] | None, keys: Sequence[str]) -> float | None:
    value: Any = figures
    for key in keys:
        value = None if value is None else value[key]
    return value


def _compared(value: float | None, base: float | None, form: str) -> str:
    if value is None:
        return "-"
    if value is base or not base:
        return form.format(value)
    return f"{form.format(value)} ({value / base:.2f}x)"
