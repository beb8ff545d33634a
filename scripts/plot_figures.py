"""Draw the figures of README and docs from the measurements in docs/measurements.

python scripts/plot_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "jaxserve"
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    for card in ("h100", "h200"):
        draw_step(card)
    draw_policies()


def draw_policies() -> None:
    """Throughput and goodput of the study's mix over the requests sent per second."""
    result = json.loads((DOCS / "measurements" / "policies_h200.json").read_text())
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
    result = json.loads((DOCS / "measurements" / f"step_{card}.json").read_text())
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
