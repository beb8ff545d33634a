"""Reads the hardware's counters of single products and layers of experts, with Nsight Compute.

    python -m lab.studies.hardware_counters --out counters.json \
        gated:34816x5120:int4:16 linear:5120x17408:int4:16 experts:qwen3-30b-a3b:fp8:2048
    python -m lab.studies.hardware_counters --stalls --out stalls.json \
        experts:qwen3-30b-a3b:fp8:2048

A case is a product of OUTxIN weights, or a model's layer of experts; a format; and rows. Each case
runs in a process of its own under `ncu`, which must be on the path and may need root. It runs
kernels alone, several times and with a cold L2 cache, so its times are not those of a step.

--stalls: samples of what warps wait for, in each stretch of machine code that is executed equally
often. A stretch has its first instruction, their number, and how often warps execute each.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from working_tree import commit  # imports nothing of CUDA's

METRICS = {
    "us": "gpu__time_duration.sum",
    "sm_cycles_active_mean": "sm__cycles_active.avg",
    "sm_cycles_active_max": "sm__cycles_active.max",
    "sm_cycles_active_min": "sm__cycles_active.min",
    "issue_slots_busy_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor_pipe_pct": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_int8_pct": "sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active",
    "shared_memory_pipe_pct": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "registers": "launch__registers_per_thread",
}
KERNELS = "regex:^_(product|program)"
"""Functions of the products of this package."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stalls", action="store_true", help="what warps wait for, not counters")
    parser.add_argument("--here", action="store_true", help="run the case without ncu")
    args = parser.parse_args()
    if args.here:
        for case in args.cases:
            run(case)
        return
    result: dict[str, Any] = {"commit": commit(), "cases": {}}
    for case in args.cases:
        result["cases"][case] = sampled(case) if args.stalls else counted(case)
        for kernel in result["cases"][case]:
            print(case, {k: v for k, v in kernel.items() if k != "stretches"}, flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def counted(case: str) -> list[dict[str, Any]]:
    """The counters of a case's kernels: of a layer's two products, or of one."""
    options = "--csv", "--page", "raw", "--print-units", "base"
    return kernels(profiled(case, *options, "--metrics", ",".join(METRICS.values())))


def sampled(case: str) -> list[dict[str, Any]]:
    """What the warps of a case's kernels wait for."""
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report"
        profiled(case, "--section", "SourceCounters", "--import-source", "no", "-o", report)
        command = ["ncu", "-i", f"{report}.ncu-rep", "--page", "source", "--csv"]
        return stalls(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def profiled(case: str, *options: str) -> str:
    """What `ncu` prints of a case."""
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not on the path: it is in Nsight Compute, or CUDA's bin folder")
    command = [
        "ncu", "--clock-control", "none", *options,
        "--kernel-name", KERNELS, "--launch-count", "2" if case.startswith("experts") else "1",
        sys.executable, "-m", "lab.studies.hardware_counters", "--here", case,
    ]  # fmt: skip
    # Launches inside of a CUDA graph are not seen one by one.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
    )  # fmt: skip
    if found.returncode:
        raise SystemExit(f"{case}: ncu failed:\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    return found.stdout


def stalls(output: str) -> list[dict[str, Any]]:
    """Reads what `ncu --page source --csv` prints: for each kernel its name, a line of names, and a
    line for each instruction."""
    found: list[dict[str, Any]] = []
    names: list[str] = []
    for row in csv.reader(io.StringIO(output)):
        if row[:1] == ["Kernel Name"]:
            found.append({"kernel": row[1], "instructions": 0, "stretches": []})
        elif "Source" in row:
            names = row
        elif found and len(row) == len(names):
            add_instruction(found[-1], dict(zip(names, row, strict=True)))
    return found


def add_instruction(kernel: dict[str, Any], row: dict[str, str]) -> None:
    """Adds an instruction's samples to the stretch that it continues, or begins."""
    executed = number(row["Instructions Executed"])
    stretches = kernel["stretches"]
    if not stretches or abs(executed - stretches[-1]["executed"]) > 0.02 * executed:
        first = kernel["instructions"]
        stretches.append({"first": first, "instructions": 0, "executed": executed, "samples": {}})
    kernel["instructions"] += 1
    stretches[-1]["instructions"] += 1
    samples = stretches[-1]["samples"]
    for name, text in row.items():
        if name.startswith("stall_") and "(" not in name and number(text or "0"):
            reason = name.removeprefix("stall_")
            samples[reason] = samples.get(reason, 0) + number(text)


def kernels(output: str) -> list[dict[str, Any]]:
    """Reads what `ncu --csv --page raw --print-units base` prints, after what the program itself
    printed: a line of names, a line of units, and a line for each kernel.

    Raises:
      ValueError: there is no such line, because no kernel ran.
    """
    start = output.find('"ID"')
    if start < 0:
        raise ValueError(f"ncu saw no kernel: {output[-500:]}")
    _, *rows = csv.DictReader(io.StringIO(output[start:]))
    found: list[dict[str, Any]] = []
    for row in rows:
        counters = {name: number(row[each]) for name, each in METRICS.items() if row.get(each)}
        counters["us"] /= 1000  # ns
        found.append({"kernel": row["Kernel Name"], "grid": row["Grid Size"], **counters})
    return found


def number(text: str) -> float:
    return float(text.replace(",", ""))


def run(case: str) -> None:
    """Runs a case's kernels once, besides those that make its weights."""
    import jax
    import jax.numpy as jnp
    from bench_experts import Case, build
    from experts_layers import MODELS, make_weights
    from random_weights import QUANTIZE

    from jaxserve_kernels.matmul import gated_linear, linear
    from jaxserve_kernels.target import Target

    what, size, name, rows = case.split(":")
    target = Target.here()
    if what == "experts":
        sizes = MODELS[size]
        built = build(Case(size, name, int(rows)), sizes, make_weights(sizes, name), target)
        jax.block_until_ready(built.program(*built.args))
        return
    out, depth = map(int, size.split("x"))
    if target.uses_triton() and target.runs_hopper_kernels() and int(rows) <= 64:
        target = target.replace(pdl=True)  # kernels of decode steps
    key = jax.random.key(0)
    make = jax.jit(lambda: QUANTIZE[name](jax.random.normal(key, (out, depth))))
    x = jax.random.normal(key, (int(rows), depth), jnp.bfloat16)

    def product(x: jax.Array, weight: Any) -> jax.Array:
        if what == "gated":
            return gated_linear(x, weight, target=target)
        return linear(x, weight, jnp.float32, target=target)

    jax.block_until_ready(jax.jit(product)(x, make()))


if __name__ == "__main__":
    main()
