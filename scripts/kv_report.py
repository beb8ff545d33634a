"""Reports runs of KV formats: medians, ratios of runs in the same turn, a table and a plot."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


def compared(runs: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Summarises each format's runs at a point: the median run, all speeds, and the sorted ratios
    to the first format's runs in the same turns."""
    base = next(iter(runs.values()))
    return {
        name: sorted(found, key=_speed)[(len(found) - 1) // 2]
        | {
            "tok_per_s": median(map(_speed, found)),
            "runs": list(map(_speed, found)),
            "ratios": sorted(map(operator.truediv, map(_speed, found), map(_speed, base))),
        }
        for name, found in runs.items()
    }


def _speed(run: Mapping[str, Any]) -> float:
    return run["tok_per_s"]


def show(result: dict[str, Any]) -> None:
    """Prints tokens per second, and ratios to the first format; a dash if nothing was measured."""
    formats: dict[str, dict[str, Any]] = result["formats"]
    if not formats:
        return
    base = next(iter(formats.values()))
    for load, points in by_load(formats).items():
        table = Table(title=f"{result['model']} on {result['card']}, {load}: output tok/s")
        for column in ("clients", *formats):
            table.add_column(column, justify="right")
        for clients in points:
            cells = [str(clients)]
            for entry in formats.values():
                point = entry["points"].get(f"{load} {clients}")
                cells.append(cell(point) if point else "-")
            table.add_row(*cells)
        Console(width=140).print(table)
    for name, entry in formats.items():
        ratio = entry["tokens"] / base["tokens"]
        print(
            f"{name}: {entry['tokens']:,} tokens ({ratio:.2f}x), {entry['sequences']} sequences of "
            f"--capacity-context, encode {entry.get('encode', 'not measured')}"
        )
    print(f"{result['compiles']} compilations under load")


def cell(point: dict[str, Any]) -> str:
    """Speed and median ratio; with several runs also the smallest and the largest ratio."""
    ratios = point["ratios"]
    spread = f", {ratios[0]:.2f} to {ratios[-1]:.2f}" if len(ratios) > 1 else ""
    return f"{point['tok_per_s']:,.0f} ({median(ratios):.3f}{spread})"


def by_load(formats: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """The numbers of clients that were measured for each load."""
    found: dict[str, set[int]] = {}
    for entry in formats.values():
        for point in entry["points"].values():
            found.setdefault(point["load"], set()).add(point["clients"])
    return {load: sorted(clients) for load, clients in found.items()}


def plot(result: dict[str, Any], file: Path) -> None:
    """Plots output tokens per second over clients, with a panel for each load."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    loads = by_load(result["formats"])
    if not loads:
        return
    figure, panels = plt.subplots(1, len(loads), figsize=(4.5 * len(loads), 3.6), squeeze=False)
    for axes, (load, clients) in zip(panels[0], loads.items(), strict=True):
        for name, entry in result["formats"].items():
            points = {n: p for n in clients if (p := entry["points"].get(f"{load} {n}"))}
            speeds = [point["tok_per_s"] for point in points.values()]
            axes.plot(list(points), speeds, "o-", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(n) for n in clients])
        axes.set_ylim(0)
        axes.set_title(f"{load} tokens", fontsize=9)
        axes.set_xlabel("clients")
        axes.set_ylabel("output tokens per second")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result['model']}, {result['card']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    print(f"plot: {file}")
