"""Reports the results of `bench_step.py`: a table of times, and a comparison with earlier ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

_DISTURBED = 1.1
"""Ratio of mean to median above which a result counts as disturbed. On a quiet host the mean is
within 2 % of the median."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One bucket at one context length. Times are in milliseconds."""

    batch: int
    context: int
    step_ms: float
    """Median of the times between results. It excludes stalls of the host that other processes
    cause."""
    mean_ms: float
    """Mean of all timed steps, including stalls."""
    host_ms: float
    floor_ms: float
    kernels: int
    temp_mb: float
    experts: float | None = None
    """Mean number of experts per layer that any row used; None: the model has no experts."""

    @property
    def ratio(self) -> float:
        return self.step_ms / self.floor_ms


def assert_never_slower(result: dict[str, Any], earlier: dict[str, Any], limit: float) -> None:
    """Raises SystemExit if a step takes more than `limit` times its earlier time."""
    before = {(t["batch"], t["context"]): t["step_ms"] for t in earlier["timings"]}
    slower = [
        f"batch {t['batch']}, context {t['context']}: {t['step_ms']:.3f} ms, was {known:.3f}"
        for t in result["timings"]
        if (known := before.get((t["batch"], t["context"]))) and t["step_ms"] > limit * known
    ]
    if slower:
        raise SystemExit(f"more than {limit} times the time:\n" + "\n".join(slower))


def show(result: dict[str, Any], earlier: dict[str, Any] | None) -> None:
    known = {(t["batch"], t["context"]): t for t in (earlier or {}).get("timings", ())}
    table = Table(
        title=f"{result['model']} on {result['card']}, copy {result['copy_tb_per_s']:.2f} TB/s"
    )
    for column in (
        "batch",
        "context",
        "step ms",
        "mean ms",
        "floor ms",
        "ratio",
        "host ms",
        "kernels",
    ):
        table.add_column(column, justify="right")
    table.add_column("tok/s", justify="right")
    touched = any(t.get("experts") for t in result["timings"])
    if touched:
        table.add_column("experts", justify="right")
    if earlier:
        table.add_column("before ms", justify="right")
        table.add_column("change", justify="right")
    for values in result["timings"]:
        timing = Timing(**values)
        cells = [
            str(timing.batch),
            str(timing.context),
            f"{timing.step_ms:.3f}",
            f"{timing.mean_ms:.3f}",
            f"{timing.floor_ms:.3f}",
            f"{timing.ratio:.2f}",
            f"{timing.host_ms:.3f}",
            str(timing.kernels),
            f"{timing.batch / timing.step_ms * 1e3:.0f}",
        ]
        if touched:
            cells.append(f"{timing.experts:.1f}")
        if earlier:
            before = known.get((timing.batch, timing.context))
            cells += (
                [f"{before['step_ms']:.3f}", f"{timing.step_ms / before['step_ms'] - 1:+.1%}"]
                if before
                else ["-", "-"]
            )
        table.add_row(*cells)
    Console(width=110).print(table)
    disturbed = [
        f"{t['batch']} x {t['context']}"
        for t in result["timings"]
        if t["mean_ms"] > _DISTURBED * t["step_ms"]
    ]
    if disturbed:
        print(
            f"means of {', '.join(disturbed)} are more than {_DISTURBED} times their medians: "
            "something else had the host or the card, do not compare them"
        )
