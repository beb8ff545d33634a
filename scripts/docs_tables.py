"""Writes the tables of README and docs from the measurements, the planner and the flags.

    python scripts/docs_tables.py

Each table is between two comments with its name. A test compares the pages with this script's
output. The last line of a table links to the files with its numbers.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.flag_tables import flags, flags_of, flags_of_convert
from scripts.markdown_tables import TEXT, table
from scripts.planner_tables import GIB, families, memory, named_models, planned

MEASUREMENTS = ROOT / "docs" / "measurements"
PLACE = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end of the table -->)", re.S)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

LOADS = ("c1", "c8", "c32", "c64", "c128", "c256")
KV_FORMATS = ("bf16", "int8", "fp8_e4m3", "kvarn_k4v4_g128", "kvarn_k4v2_g128")


@cache
def measured(name: str) -> Any:
    return json.loads((MEASUREMENTS / f"{name}.json").read_text(encoding="utf-8"))


def load(engine: str, point: str) -> dict[str, float] | None:
    """A row of the closed loops, by its columns' names; None if there is none."""
    result = measured("side_by_side_h200")
    for row in result["load"][engine]:
        if row[0] == point:
            return dict(zip(result["columns"][1:], row[1:], strict=True))
    return None


def closed_loops(ours: str, theirs: str) -> str:
    rows: list[list[str]] = []
    for point in LOADS:
        mine, other = load(ours, point), load(theirs, point)
        if mine and other:
            cells = [point.removeprefix("c")]
            for key, form in (("output_tok_s", ",.0f"), ("ttft_p50", ",.0f"), ("tpot_p50", ".2f")):
                cells += [format(mine[key], form), format(other[key], form)]
            rows.append(cells)
    head = ["clients"]
    for what in ("output tok/s", "first token p50, ms", "time per token p50, ms"):
        head += [f"{what}: jaxserve", "vLLM"]
    return table(head, rows, "side_by_side_h200")


def first_tokens() -> str:
    result = measured("side_by_side_h200")["ttft_ms"]
    names = ("jaxserve cold", "vllm cold", "jaxserve hit", "vllm hit")
    rows = [
        [f"{length:,}", *(f"{result[name][place]:.1f}" for name in names)]
        for place, length in enumerate(result["lengths"])
    ]
    head = ["prompt tokens", "new prompt, ms: jaxserve", "vLLM", "cached prefix, ms: jaxserve"]
    return table([*head, "vLLM"], rows, "side_by_side_h200")


def starts() -> str:
    result = measured("side_by_side_h200")
    seconds, memory = result["start_s"], result["host_memory_pss_mb"]
    warm = seconds["jaxserve bf16, 8 GB safetensors, precompiled, page cache warm"]
    dummy = seconds["jaxserve dummy weights, precompiled"]
    rows = [
        ["jaxserve, compiled before, files in the page cache", f"{min(warm)} to {max(warm)} s"],
        ["jaxserve, compiled before, random weights", f"{min(dummy)} to {max(dummy)} s"],
        ["jaxserve, nothing compiled", f"{seconds['jaxserve nothing compiled']} s"],
        ["vLLM, random weights, caches cold", f"{seconds['vllm bf16 dummy, own caches cold']} s"],
        ["host memory, jaxserve idle", f"{memory['jaxserve bf16 real checkpoint idle']:,} MB"],
        ["host memory, vLLM idle", f"{memory['vllm idle']:,} MB"],
    ]
    return table(["", "Qwen3-4B shape, bfloat16"], rows, "side_by_side_h200")


def decode_steps() -> str:
    rows = [
        [
            str(timing["batch"]),
            f"{timing['step_ms']:.2f}",
            f"{timing['floor_ms']:.2f}",
            f"{timing['step_ms'] / timing['floor_ms']:.2f} x",
            f"{timing['host_ms']:.2f}",
        ]
        for timing in measured("step_h200")["timings"]
    ]
    head = ["sequences", "step, ms", "floor, ms", "step over floor", "host's time, ms"]
    return table(head, rows, "step_h200")


def weight_steps() -> str:
    runs = [run for run in measured("quantized_steps_h100")["runs"] if "first" in run["machine"]]
    sizes = [timing["batch"] for timing in runs[0]["timings"]]
    rows = [
        [
            run["quantization"] or "bf16",
            *(f"{timing['step_ms']:.2f}" for timing in run["timings"]),
        ]
        for run in runs
    ]
    head = ["weights", *(f"{size} sequence{'s' if size > 1 else ''}, ms" for size in sizes)]
    return table(head, rows, "quantized_steps_h100")


def experts() -> str:
    """Times of a layer of experts over the floor; with many rows over a dense product's time."""
    result = measured("experts_h200")
    cases = [case for run in result["runs"] for case in run["experts"] if not case["dense"]]
    few = sorted({case["rows"] for case in cases} - {2048})
    rows: list[list[str]] = []
    for key in dict.fromkeys((case["model"], case["format"]) for case in cases):
        own = {case["rows"]: case for case in cases if (case["model"], case["format"]) == key}
        rows.append([
            " ".join(key),
            *(f"{own[size]['over_floor']:.2f}" if size in own else "" for size in few),
            f"{100 * own[2048]['of_dense_rate']:.0f} %",
        ])  # fmt: skip
    head = ["experts", *(f"{size} row{'s' if size > 1 else ''}" for size in few)]
    return table([*head, "2,048 rows"], rows, "experts_h200")


def expert_steps() -> str:
    """Times of whole decode steps, and their ratio to the time of copying the bytes that they
    read."""
    runs = measured("experts_h200")["steps"]
    sizes = sorted({timing["batch"] for run in runs for timing in run["timings"]})
    rows: list[list[str]] = []
    for run in runs:
        own = {timing["batch"]: timing for timing in run["timings"]}
        times = [
            f"{own[size]['step_ms']:.2f} ({own[size]['over_floor']:.2f})" if size in own else ""
            for size in sizes
        ]
        rows.append([f"{run['model']} {run['format']}", *times])
    head = [
        "step, ms (over its floor)",
        *(f"{size} row{'s' if size > 1 else ''}" for size in sizes),
    ]
    return table(head, rows, "experts_h200")


def large_models() -> str:
    cells: dict[str, dict[int, str]] = {}
    for loop in measured("large_models_h200")["loops"]:
        for point in loop["points"]:
            ttft, tpot = point["ttft_ms"]["p50"], point["tpot_ms"]["p50"]
            cell = f"{point['output_tok_per_s']:,.0f} ({ttft:.0f}, {tpot:.2f})"
            row = cells.setdefault(f"{loop['model']} {loop['weights']}", {})
            row[point["concurrency"]] = cell
    clients = (1, 8, 32, 64, 10)
    head = ["tok/s (TTFT, TPOT in ms)", "1 client", "8", "32", "64", "10, long"]
    rows = [[name, *(row.get(each, "") for each in clients)] for name, row in cells.items()]
    return table(head, rows, "large_models_h200")


def large_first_tokens() -> str:
    rows = [
        [
            f"{loop['model']} {loop['weights']}",
            *(
                f"{point[kind]['p50']:.0f}"
                for point in loop["first_token"]
                for kind in ("cold_ttft_ms", "hit_ttft_ms")
            ),
        ]
        for loop in measured("large_models_h200")["loops"]
        if "first_token" in loop
    ]
    head = ["TTFT, ms", "1,024 tokens, new", "cached", "4,096 tokens, new", "cached"]
    return table(head, rows, "large_models_h200")


def kv_speed() -> str:
    rows: list[list[str]] = []
    for name in ("bf16", "int8", "kvarn_k4v2_g128"):
        short, long = f"jaxserve kv {name}", f"jaxserve kv {name} 8192/256"
        found = [load(short, point) for point in ("c8", "c64", "c256")]
        found += [load(long, point) for point in ("c1", "c8", "c32")]
        rows.append([name, *(f"{each['output_tok_s']:,.0f}" for each in found if each)])
    head = ["KV cache", *(f"{clients} clients, 1,024 in" for clients in (8, 64, 256))]
    head += [f"{n} client{'s' if n > 1 else ''}, 8,192 in" for n in (1, 8, 32)]
    return table(head, rows, "side_by_side_h200")


def policies() -> str:
    rows = [
        [
            point["policy"],
            f"{point['total']['sent']:,}",
            f"{point['total']['slo_attainment']:.1%}".replace("%", " %"),
            f"{point['total']['goodput_requests_per_s']:.1f}",
            f"{point['total']['output_tokens_per_s']:,.0f}",
        ]
        for point in measured("policies_h200")["points"]
    ]
    head = ["policy", "requests in 90 s", "in time", "in time per second", "output tok/s"]
    return table(head, rows, "policies_h200")


def parity() -> str:
    rows = [
        [
            name.replace("vs", "against"),
            f"{result['dlogprob_mean']:.4f}",
            f"{result['dlogprob_p99']:.3f}",
            f"{result['regret_mean']:.4f}",
            f"{result['same_top1']:.1%}".replace("%", " %"),
        ]
        for name, result in measured("parity_h100")["results"].items()
    ]
    head = ["", "mean difference of logprobs", "99th percentile", "mean regret"]
    return table([*head, "same top token"], rows, "parity_h100")


WEIGHTS = {
    "bf16": (None, "bf16", "It fits, and you want the checkpoint's own accuracy."),
    "fp8": ("fp8", "fp8-rtn", "You want less memory at nearly no loss."),
    "int4": ("int4", "int4-rtn", "Memory or the speed of few users counts most."),
    "nvfp4": ("nvfp4", "nvfp4-rtn", "The checkpoint is NVFP4, or you compare with one."),
}
"""Format -> names of its speed runs and accuracy runs, and when to pick it."""


def quantised_weights() -> str:
    rows: list[list[str]] = []
    runs = measured("quantized_steps_h100")["runs"]
    answers = measured("embedded_formats_h200")["formats"]
    for name, (run_name, method, when) in WEIGHTS.items():
        run = next(each for each in runs if each["quantization"] == run_name)
        times = {timing["batch"]: timing["step_ms"] for timing in run["timings"]}
        divergence = measured("formats_cpu")["divergence"]["formats"][method]
        line = f"qwen3-8b --quantization {run_name} --fp8-copy off" if run_name else "qwen3-8b"
        right = answers[{"int4": "int4, round to nearest"}.get(name, name)]["correct"]
        rows.append(
            [
                f"`{name}`",
                when,
                f"{planned('b200', line).weights / GIB:.1f}",
                *(f"{times[size]:.2f}" for size in (1, 64)),
                f"{divergence['mean KL, nats']:.4f}" if run_name else "0",
                f"{right:,}",
            ]
        )
    head = ["weights", TEXT, "qwen3-8b, GiB", "step of 1 sequence, ms", "step of 64, ms"]
    head += ["KL divergence, nats", "correct of 2,840 answers"]
    sources = ("quantized_steps_h100", "formats_cpu", "embedded_formats_h200")
    return table(head, rows, *sources)


KV_PICKS = {
    "bf16": "Memory is no concern.",
    "int8": "**The default choice to save memory.**",
    "fp8_e4m3": "The checkpoint has scales for it, or a client demands it.",
    "kvarn_k4v4_g128": "You need 3.7 times the tokens.",
    "kvarn_k4v2_g128": "You need 4.7 times the tokens, and have tested your tasks.",
}


def kv_formats() -> str:
    found = measured("kv_accuracy_h200")["formats"]
    rows: list[list[str]] = []
    for name in KV_FORMATS:
        size = planned("h200", f"qwen3-4b --kv-cache-dtype {name}").kv_bytes_per_token
        entry = found[name]
        rows.append(
            [
                f"`{name}`",
                KV_PICKS[name],
                f"{size:,}",
                f"{entry['mean KL, nats']:.4f}",
                f"{entry['other first choice']:.1%}".replace("%", " %"),
                f"{entry['right']:,}",
            ]
        )
    head = ["format", TEXT, "bytes per token, Qwen3-4B", "KL divergence, nats"]
    head += ["other top token", "correct of 2,840 answers"]
    return table(head, rows, "kv_accuracy_h200")


TABLES: dict[str, Callable[[], str]] = {
    "closed-loops-bf16": lambda: closed_loops("jaxserve bf16", "vllm bf16"),
    "closed-loops-int4": lambda: closed_loops(
        "jaxserve int4 g128 (head int8)", "vllm int4 W4A16 g128 (Marlin)"
    ),
    "first-tokens": first_tokens,
    "starts": starts,
    "decode-steps": decode_steps,
    "weight-steps": weight_steps,
    "experts": experts,
    "expert-steps": expert_steps,
    "large-first-tokens": large_first_tokens,
    "large-models": large_models,
    "kv-speed": kv_speed,
    "policies": policies,
    "parity": parity,
    "quantised-weights": quantised_weights,
    "kv-formats": kv_formats,
    "named-models": named_models,
    "families": families,
    "memory": memory,
    "flags-model": lambda: flags("model"),
    "flags-server": lambda: flags("server"),
    "flags-access": lambda: flags("access"),
    "flags-engine": lambda: flags("engine"),
    "flags-plan": lambda: flags_of("plan"),
    "flags-kernels": lambda: flags_of("kernels"),
    "flags-convert": flags_of_convert,
}


def with_tables(page: str, *, root: bool = False) -> str:
    """The page with new tables. `root`: the page is not in docs/."""

    def made(match: re.Match[str]) -> str:
        text = TABLES[match[2]]()
        text = text.replace("](measurements/", "](docs/measurements/") if root else text
        return f"{match[1]}{text}\n{match[3]}"

    return PLACE.sub(made, page)


def main() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        path.write_text(with_tables(text, root=path.parent == ROOT), encoding="utf-8")


if __name__ == "__main__":
    from jaxserve.startup.environment import prepare

    prepare(0.9)
    logging.getLogger("jaxserve").setLevel(logging.ERROR)
    main()
