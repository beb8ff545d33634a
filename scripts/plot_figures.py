"""Draw the figures of the decode step from the measurements in docs/measurements.

python scripts/plot_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    for card in ("h100", "h200"):
        draw(card)


def draw(card: str) -> None:
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "figures" / f"step_{card}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
