"""Draw the figures of README and docs from the measurements in docs/measurements.

python scripts/plot_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import kv_report
import matmul_report
import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "jaxserve"
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    for card in ("h100", "h200"):
        draw_step(card)
    draw_products()
    draw_weight_formats()
    draw_kv_formats()
    draw_policies()
    draw_simulated_policies()


def draw_products() -> None:
    """A layer's products: all formats but those whose turn came in a later run, and those of it."""
    result = _measured("matmul_h200")
    later = result["commit 7f7f874"]["layers"]
    layers = [matmul_report.Timing(**timing) for timing in result["layers"]]
    known = {timing.format for timing in layers}
    layers += [matmul_report.Timing(**each) for each in later if each["format"] not in known]
    matmul_report.plot(result, layers, DOCS / "figures" / "matmul_h200.svg")


def draw_weight_formats() -> None:
    """Decode steps by format of weights, and over bfloat16's of the same machine."""
    result = _measured("quantized_steps_h100")
    figure, (steps, ratios) = plt.subplots(1, 2, figsize=(9, 3.4))
    plain: dict[str, list[float]] = {}
    for run in result["runs"]:
        name, machine = run["quantization"] or "bfloat16", run["machine"]
        rows = [timing["batch"] for timing in run["timings"]]
        times = [timing["step_ms"] for timing in run["timings"]]
        if name == "bfloat16":
            plain[machine] = times
        if machine != "first machine" and name in ("bfloat16", "int4-act-order"):
            continue  # drawn of the first
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
    _save(figure, "weight_formats_h100")


def draw_kv_formats() -> None:
    """Tokens per second by format of keys and values: a run, the points that were disturbed in it
    from a later one, and those of more clients than it had from another."""
    drawn: dict[str, Any] = {}
    for name in ("kv_h200", "kv_long_h200"):
        result = _measured(name)
        drawn |= {key: result[key] for key in ("model", "card")}
        formats = drawn.setdefault("formats", {})
        for commit in ("commit 1885825", "commit df13fcb"):
            for kv_format, entry in result[commit]["formats"].items():
                formats.setdefault(kv_format, {"points": {}})["points"] |= entry["points"]
    for run in reversed(_measured("kv_queue_h200")["runs"]):
        for kv_format, entry in run["formats"].items():
            points = formats[kv_format]["points"]
            points |= {name: point for name, point in entry["points"].items() if name not in points}
    kv_report.plot(drawn, DOCS / "figures" / "kv_h200.svg")


def _measured(name: str) -> Any:
    return json.loads((DOCS / "measurements" / f"{name}.json").read_text())


def draw_simulated_policies() -> None:
    """Goodput and shares in time of the study's mix, simulated: means of the seeds, and spread."""
    result = _measured("policies_simulated_h200")
    half = result["half_rate"]
    figure, (goodput, classes) = plt.subplots(1, 2, figsize=(9, 3.4))
    for setup, mark in (("fcfs", "s-"), ("slo, told no deadlines", "^-"), ("slo", "o-")):
        points = [point for point in result["points"] if point["setup"] == setup]
        rates = sorted({point["rate"] for point in points})
        if not rates:
            continue
        by_rate = [[point for point in points if point["rate"] == rate] for rate in rates]
        good = [[point["goodput_requests_per_s"] for point in each] for each in by_rate]
        middle = [mean(each) for each in good]
        spread = [
            [value - min(each) for value, each in zip(middle, good, strict=True)],
            [max(each) - value for value, each in zip(middle, good, strict=True)],
        ]
        line = goodput.errorbar(rates, middle, spread, fmt=mark, capsize=3, label=setup)
        worst = [
            mean(min(list(point["attainment"].values())[:-1]) for point in each) for each in by_rate
        ]
        every = [mean(point["attainment"]["all"] for point in each) for each in by_rate]
        color = line.lines[0].get_color()
        classes.plot(rates, every, mark, color=color)
        classes.plot(rates, worst, mark[0] + ":", color=color)
    most = max(point["rate"] for point in result["points"])
    goodput.plot((0, most), (0, most), "--", color="gray", label="all of them in time")
    goodput.set_ylabel("requests per second in time")
    classes.set_ylabel("share of requests in time")
    for axes in (goodput, classes):
        axes.axvline(half, color="gray", linewidth=0.8)
        axes.set_xlim(0)
        axes.set_ylim(0)
        axes.set_xlabel("requests sent per second")
    goodput.legend(frameon=False, fontsize=8)
    classes.set_title("solid: of all, dotted: of the class with least", fontsize=8)
    goodput.annotate(
        "fcfs has 50 %", (half, 0), textcoords="offset points", xytext=(3, 4), fontsize=8
    )
    title = f"Simulated with step times of {result['card']}: mix of the study for "
    figure.suptitle(f"{title}{result['duration_s']:g} s", fontsize=10)
    _save(figure, "policies_simulated_h200")


def draw_policies() -> None:
    """Throughput and goodput of the study's mix over the requests sent per second."""
    result = _measured("policies_h200")
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
    _save(figure, "policies_h200")


def draw_step(card: str) -> None:
    """Step time over the batch, with the time that reading its bytes takes at least."""
    result = _measured(f"step_{card}")
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
    _save(figure, f"step_{card}")


def _save(figure: Figure, name: str) -> None:
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "figures" / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
