"""Draw the figures of the experiment logs from lab/measurements.

python -m lab.plot_figures
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from jaxserve.scheduler.learned_times import LearnedTimes
from jaxserve.scheduler.speculation.decision import Decision
from jaxserve.step_times import StepTimes
from scripts import kv_report, matmul_report, plot_figures

LAB = Path(__file__).parent


def main() -> None:
    plot_figures.draw_step(_measured("step_h100"), LAB / "figures" / "step_h100.svg")
    draw_products()
    draw_kv_formats()
    draw_simulated_policies()
    draw_routing()
    draw_decision()


def draw_decision() -> None:
    """Positions per row that speculation chooses, and the gain it expects, by rows and by how
    probable each draft is after those before it."""
    times = StepTimes.load(LAB / "measurements" / "step_times_verify_h200.json")
    learned = LearnedTimes(times)
    positions = {shape[1] for shape in times.verify}
    rows = [2**n for n in range(9)]
    rates = [n / 20 for n in range(21)]
    figure, axes = plot_figures.plt.subplots(figsize=(7, 3.6))
    gains: list[list[float]] = []
    for rate in rates:
        gains.append([])
        survival = [rate**n for n in range(1, 8)]
        for column, count in enumerate(rows):
            decision, context = Decision(learned, positions), 1024 * count
            chosen = decision.choose(count, context, [survival] * count, unsettled=0)
            seconds = learned.of_verify(count, chosen, context) if chosen else None
            plain = learned.of_decode(count, context)
            drafts = sum(survival[: chosen - 1]) if chosen else 0.0
            gains[-1].append(1.0 if seconds is None else (1 + drafts) * plain / seconds)
            if chosen and round(20 * rate) % 2 == 0:
                axes.text(column, rate, str(chosen), ha="center", va="center", fontsize=7)
    mesh = axes.pcolormesh(range(len(rows)), rates, gains, cmap="Blues", vmin=1, vmax=6)
    figure.colorbar(mesh, label="tokens per second over plain decoding")
    axes.set_xticks(range(len(rows)), [str(count) for count in rows])
    axes.set_xlabel("rows, all with drafts and 1,024 tokens of context")
    axes.set_ylabel("probability of each draft")
    axes.set_title("positions per row that a step verifies (none: plain decoding)", fontsize=10)
    sizes = ", ".join(str(size) for size in times.decode)
    title = f"Qwen3-4B on an H200, measured steps of a server with decode buckets {sizes}"
    figure.suptitle(title, fontsize=9)
    plot_figures.save(figure, plot_figures.FIGURES / "speculation_decision.svg")


def draw_products() -> None:
    """A layer's products: all formats but those whose turn came in a later run, and those of it."""
    result = _measured("matmul_h200")
    later = result["commit 7f7f874"]["layers"]
    layers = [matmul_report.Timing(**timing) for timing in result["layers"]]
    known = {timing.format for timing in layers}
    layers += [matmul_report.Timing(**each) for each in later if each["format"] not in known]
    matmul_report.plot(result, layers, LAB / "figures" / "matmul_h200.svg")


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
    kv_report.plot(drawn, LAB / "figures" / "kv_h200.svg")


def _measured(name: str) -> Any:
    return json.loads((LAB / "measurements" / f"{name}.json").read_text())


def draw_simulated_policies() -> None:
    """Goodput and shares in time of the study's mix, simulated: means of the seeds, and spread."""
    result = _measured("policies_simulated_h200")
    half = result["half_rate"]
    figure, (goodput, classes) = plot_figures.plt.subplots(1, 2, figsize=(9, 3.4))
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
    plot_figures.save(figure, LAB / "figures" / "policies_simulated_h200.svg")


ROUTER_MARKS = {
    "random": "x:",
    "least loaded": "s:",
    "prefixaware": "v-",
    "cache_aware": "^-",
    "llm-d": "o-",
    "Dynamo": "D-",
}


def draw_routing() -> None:
    """Goodput above hit rate, one column for each kind of traffic, one line for each router."""
    result = _measured("routing_simulated")
    kinds = [traffic["name"] for traffic in result["traffic"]]
    figure, axes = plot_figures.plt.subplots(2, len(kinds), figsize=(10, 5.4), sharex="col")
    for column, kind in enumerate(kinds):
        goodput, hits = axes[:, column]
        points = [point for point in result["points"] if point["traffic"] == kind]
        rates = sorted({point["rate"] for point in points})
        for router, mark in ROUTER_MARKS.items():
            line = sorted((p for p in points if p["router"] == router), key=lambda p: p["rate"])
            at = [point["rate"] for point in line]
            goodput.plot(at, [point["goodput"] for point in line], mark, label=router, markersize=4)
            hits.plot(at, [point["hit_rate"] for point in line], mark, markersize=4)
        goodput.plot((0, rates[-1]), (0, rates[-1]), "--", color="gray", linewidth=0.8)
        goodput.set_title(kind, fontsize=9)
        goodput.set_xlim(0)
        goodput.set_ylim(0)
        hits.set_ylim(0, 1)
        hits.set_xlabel("requests sent per second")
    axes[0, 0].set_ylabel("good requests per second")
    axes[1, 0].set_ylabel("share of prompt tokens cached")
    axes[0, 0].legend(frameon=False, fontsize=7)
    title = f"Simulated: {result['replicas']} replicas, {result['model']}, step times of an "
    figure.suptitle(f"{title}{result['card']}", fontsize=10)
    plot_figures.save(figure, LAB.parent / "docs" / "figures" / "routing_simulated.svg")


if __name__ == "__main__":
    main()
