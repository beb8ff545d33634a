"""Reports timings of products: totals per layer, the never-slower check, a table and a plot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LAYER = ("qkv", "out", "gate_up", "down")

_WIDTH = 180
"""Width of the table in characters: room for ten columns."""

COPY = "-copy"
"""Suffix of a 4-bit format with an fp8 copy. It is timed where products read the copy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One product in one format; times in microseconds."""

    product: str
    format: str
    tokens: int
    us: float
    floor_us: float
    tb_per_s: float
    tflop_per_s: float
    ratio_to_bf16: float
    """The time divided by bfloat16's in this process. Entries `layer` and `head` matter for
    steps."""


def layer_totals(timings: list[Timing]) -> list[Timing]:
    """Sums of the four products of a layer, if all are known, with bfloat16's for comparison."""
    known: dict[tuple[str, int], list[Timing]] = {}
    for timing in timings:
        if timing.product in LAYER:
            known.setdefault((timing.format, timing.tokens), []).append(timing)
    groups = {
        (name, tokens): group
        for (name, tokens), group in known.items()
        if len(group) == len(LAYER) and len(known.get(("bf16", tokens), ())) == len(LAYER)
    }
    totals = {key: sum(timing.us for timing in group) for key, group in groups.items()}
    return [
        Timing(
            product="layer",
            format=name,
            tokens=tokens,
            us=totals[name, tokens],
            floor_us=sum(timing.floor_us for timing in group),
            tb_per_s=sum(t.tb_per_s * t.us for t in group) / totals[name, tokens],
            tflop_per_s=sum(t.tflop_per_s * t.us for t in group) / totals[name, tokens],
            ratio_to_bf16=totals[name, tokens] / totals["bf16", tokens],
        )
        for (name, tokens), group in groups.items()
    ]


def line(t: Timing) -> str:
    return (
        f"{t.product:8} {t.format:10} {t.tokens:5} tokens {t.us:7.1f} us, {t.ratio_to_bf16:.2f} of "
        f"bf16, {t.us / t.floor_us:.2f} of the floor"
    )


def assert_never_slower(timings: list[Timing], limit: float) -> None:
    """Raises SystemExit if a layer, or the output matrix, takes more than `limit` times bfloat16's
    time in a format that the engine serves. Codes count only if no copy was timed."""
    copied = {(t.product, t.format, t.tokens) for t in timings if t.format.endswith(COPY)}
    slower = [
        f"{t.product} {t.format} at {t.tokens} tokens: {t.ratio_to_bf16:.2f} times bfloat16"
        for t in timings
        if t.product in ("layer", "head")
        and (t.product, t.format + COPY, t.tokens) not in copied
        and t.ratio_to_bf16 > limit
    ]
    if slower:
        raise SystemExit("slower than bfloat16:\n" + "\n".join(slower))


def show(result: dict[str, Any], timings: list[Timing]) -> None:
    """Prints a row for each format of a layer and of the output matrix, with a column for each
    number of tokens."""
    title = (
        f"{result['model']} on {result['card']}: copy {result['copy_tb_per_s']:.2f} TB/s, "
        f"bfloat16 {result['bf16_tflop_per_s']:.0f} TFLOP/s; us (over bfloat16's) by tokens"
    )
    shown = [timing for timing in timings if timing.product in ("layer", "head")]
    known = {(t.product, t.format, t.tokens): t for t in shown}
    sizes = sorted({t.tokens for t in shown})
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for tokens in sizes:
        table.add_column(str(tokens), justify="right", no_wrap=True)
    for product in ("layer", "head"):
        for name in dict.fromkeys(t.format for t in shown if t.product == product):
            cells = [_cell(known.get((product, name, tokens))) for tokens in sizes]
            table.add_row(f"{product} {name}", *cells)
        table.add_section()
    Console(width=_WIDTH).print(table)


def _cell(timing: Timing | None) -> str:
    return "-" if timing is None else f"{timing.us:.0f} ({timing.ratio_to_bf16:.2f})"


def plot(result: dict[str, Any], timings: list[Timing], path: Path) -> None:
    """Plots a layer's products over tokens, one line per format: their time, and its ratio to
    bfloat16's."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (times, ratios) = plt.subplots(1, 2, figsize=(10, 4))
    layer = [timing for timing in timings if timing.product == "layer"]
    for name in dict.fromkeys(timing.format for timing in layer):
        line = [timing for timing in layer if timing.format == name]
        style = "o--" if name == "bf16" else "o:" if f"{name}{COPY}" in _names(layer) else "o-"
        tokens = [t.tokens for t in line]
        drawn = times.plot(tokens, [t.us for t in line], style, label=name, ms=3)
        color = drawn[0].get_color()
        ratios.plot(tokens, [t.ratio_to_bf16 for t in line], style, color=color, ms=3)
    times.set_yscale("log")
    times.set_ylabel("µs for the four products of a layer")
    ratios.set_ylabel("over bfloat16's")
    ticks = sorted({t.tokens for t in layer if t.tokens.bit_count() == 1})
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tokens) for tokens in ticks], fontsize=8)
        axes.set_xlabel("tokens")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    times.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result['model']}, {result['card']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _names(timings: list[Timing]) -> set[str]:
    return {timing.format for timing in timings}
