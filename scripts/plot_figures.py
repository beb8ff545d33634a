"""Draws the figures of README and docs from the measurements in docs/measurements.

python scripts/plot_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "jaxserve"
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
FIGURES = DOCS / "figures"


def main() -> None:
    draw_side_by_side()
    draw_step(measured("step_h200"), FIGURES / "step_h200.svg")
    draw_weight_formats()
    draw_policies()
    draw_dashboard()


def draw_side_by_side() -> None:
    """Draws output tokens per second and time per token over clients, beside vLLM on the same
    card."""
    result = measured("side_by_side_h200")
    figure, (rate, pace) = plt.subplots(1, 2, figsize=(9, 3.4))
    lines = {
        "jaxserve bf16": ("o-", "C0", "jaxserve, bfloat16"),
        "vllm bf16": ("o--", "C1", "vLLM, bfloat16"),
        "jaxserve int4 g128 (head int8)": ("s-", "C0", "jaxserve, int4"),
        "vllm int4 W4A16 g128 (Marlin)": ("s--", "C1", "vLLM, int4"),
    }
    tokens, per_token = (result["columns"].index(name) for name in ("output_tok_s", "tpot_p50"))
    for name, (mark, color, label) in lines.items():
        points = [point for point in result["load"][name] if point[0].startswith("c")]
        clients = [int(point[0].removeprefix("c")) for point in points]
        for axes, column in ((rate, tokens), (pace, per_token)):
            values = [point[column] for point in points]
            axes.plot(clients, values, mark, color=color, label=label, markersize=4)
    for axes, title in ((rate, "output tokens per second"), (pace, "ms per token, median")):
        axes.set_xscale("log", base=2)
        axes.set_xticks((1, 8, 32, 64, 128, 256), ("1", "8", "32", "64", "128", "256"))
        axes.set_xlabel("clients, each 1,024 tokens in and 128 out")
        axes.set_title(title, fontsize=10)
        axes.set_ylim(0)
    rate.legend(frameon=False, fontsize=8)
    card = result["card"].split(",")[0]
    figure.suptitle(f"Qwen3-4B shape, random weights, {card}, {result['date']}", fontsize=10)
    save(figure, FIGURES / "side_by_side_h200.svg")


def draw_weight_formats() -> None:
    """Draws decode step times by weight format, and their ratio to bfloat16's on the same
    machine."""
    result = measured("quantized_steps_h100")
    figure, (steps, ratios) = plt.subplots(1, 2, figsize=(9, 3.4))
    plain: dict[str, list[float]] = {}
    for run in result["runs"]:
        name, machine = run["quantization"] or "bfloat16", run["machine"]
        rows = [timing["batch"] for timing in run["timings"]]
        times = [timing["step_ms"] for timing in run["timings"]]
        if name == "bfloat16":
            plain[machine] = times
        if machine != "first machine" and name in ("bfloat16", "int4-act-order"):
            continue  # drawn from the first result
        (line,) = steps.plot(rows, times, "o-", markersize=3)
        over = [mine / theirs for mine, theirs in zip(times, plain[machine], strict=True)]
        ratios.plot(rows, over, "o-", markersize=3, color=line.get_color(), label=name)
    for axes, label in ((steps, "ms per step"), (ratios, "over bfloat16's")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(each) for each in rows])
        axes.set_xlabel("sequences, each of 1,024 tokens")
        axes.set_ylabel(label)
        axes.set_ylim(0)
    ratios.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    figure.suptitle(f"Decode steps of {result['model']} on {result['card']}", fontsize=10)
    save(figure, FIGURES / "weight_formats_h100.svg")


def measured(name: str) -> Any:
    return json.loads((DOCS / "measurements" / f"{name}.json").read_text())


def draw_policies() -> None:
    """Draws throughput and goodput of the study's mix over the requests sent per second."""
    result = measured("policies_h200")
    figure, (throughput, goodput) = plt.subplots(1, 2, figsize=(9, 3.4))
    for policy, mark in (("fcfs", "s-"), ("slo", "o-")):
        points = [point for point in result["points"] if point["policy"] == policy]
        sent = [point["total"]["sent"] / point["duration_s"] for point in points]
        for axes, key in (
            (throughput, "output_tokens_per_s"),
            (goodput, "goodput_requests_per_s"),
        ):
            axes.plot(sent, [point["total"][key] for point in points], mark, label=policy)
        for at, point in zip(sent, points, strict=True):
            goodput.annotate(
                f"{point['total']['slo_attainment']:.0%}",
                (at, point["total"]["goodput_requests_per_s"]),
                textcoords="offset points",
                xytext=(0, 7),
                ha="center",
                fontsize=8,
            )
    goodput.plot((0, 50), (0, 50), "--", color="gray", label="all of them in time")
    throughput.set_ylabel("output tokens per second")
    goodput.set_ylabel("requests per second in time")
    for axes in (throughput, goodput):
        axes.set_xlim(0)
        axes.set_ylim(0)
        axes.set_xlabel("requests sent per second")
        axes.legend(frameon=False)
    title = f"{result['model']}, mix of the study, {result['card']}, over HTTP"
    figure.suptitle(title, fontsize=10)
    save(figure, FIGURES / "policies_h200.svg")


def draw_step(result: Any, file: Path) -> None:
    """Draws step time over the batch size, beside the floor: the time to read the step's bytes."""
    timings = result["timings"]
    batch = [timing["batch"] for timing in timings]
    figure, axes = plt.subplots(figsize=(7, 3.6))
    axes.plot(batch, [timing["step_ms"] for timing in timings], "o-", label="decode step")
    axes.plot(
        batch,
        [timing["floor_ms"] for timing in timings],
        "--",
        color="gray",
        label=f"its bytes at the card's copy rate ({result['copy_tb_per_s']:.2f} TB/s)",
    )
    for timing in timings:
        axes.annotate(
            f"{timing['step_ms'] / timing['floor_ms']:.2f}x",
            (timing["batch"], timing["step_ms"]),
            textcoords="offset points",
            xytext=(0, 7),
            ha="center",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(batch, [str(size) for size in batch])
    axes.set_ylim(0)
    axes.set_xlabel("sequences in the step, 1,024 tokens of context each")
    axes.set_ylabel("ms per step")
    axes.set_title(f"{result['model']}, bfloat16, random weights, {result['card']}", fontsize=10)
    axes.legend(frameon=False)
    save(figure, file)


UNITS = {"s": "s", "percentunit": "%", "bytes": "MiB", "short": ""}
SCALES = {"percentunit": 100, "bytes": 2**-20}


def draw_dashboard() -> None:
    """Draws the panels of the Grafana dashboard, in its grid, from a run on a CPU."""
    result = measured("dashboard_cpu")
    panels = result["panels"]
    rows = len({panel["place"]["y"] for panel in panels})
    figure, grid = plt.subplots(rows, 2, figsize=(11, 1.75 * rows), sharex=True)
    tops = sorted({panel["place"]["y"] for panel in panels})
    for panel in panels:
        axes = grid[tops.index(panel["place"]["y"])][panel["place"]["x"] // 12]
        scale = SCALES.get(panel["unit"], 1)
        for line in panel["lines"]:
            times, values = zip(*line["points"], strict=True) if line["points"] else ((), ())
            axes.plot(times, [scale * value for value in values], label=line["label"], lw=1.2)
        unit = UNITS[panel["unit"]]
        axes.set_title(panel["title"] + (f", {unit}" if unit else ""), fontsize=9, loc="left")
        highest = max((value for line in axes.lines for value in line.get_ydata()), default=0)
        axes.set_ylim(0, 1.3 * highest or 1)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if panel["lines"]:
            axes.legend(frameon=False, fontsize=7, loc="upper left", ncols=4)
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=8)
    figure.suptitle(f"{result['model']} on a CPU, {result['date']}: 0.5, 1, then 2 requests/s")
    save(figure, FIGURES / "dashboard.svg")


def save(figure: Figure, file: Path) -> None:
    """Saves a figure without the date, so that equal figures are equal files."""
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
