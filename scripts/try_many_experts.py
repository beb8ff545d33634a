"""Time candidates for experts of many tokens: each is compared with the definition first."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.9)

import jax
import jax.numpy as jnp
import numpy as np
from bench_experts import LAYERS, MODELS, TINY, make_weights
from card_rates import copy_bandwidth, fastest, peak_flops
from working_tree import commit

from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.experts import Routing, experts, hopper, hopper_rows, reference, route
from jaxserve_kernels.target import Target

CASES = (
    "qwen3-30b-a3b:bf16", "qwen3-30b-a3b:int4", "qwen3-30b-a3b:fp8",
    "gpt-oss-20b:mxfp4", "gpt-oss-20b:bf16",
)  # fmt: skip
MOST_ERROR = 1e-2


def candidates(form: str) -> dict[str, Callable[..., Any]]:
    """Functions of x, ids, weights, w, activation."""
    now = hopper.experts if form == "bf16" else now_of_codes
    return {"now": now, "rows": hopper_rows.experts}


def now_of_codes(x: Any, ids: Any, weights: Any, w: Any, activation: Any, *, target: Target) -> Any:
    return experts(x, ids, weights, w, activation=activation, target=target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", type=float, default=50)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begun = time.monotonic()
    result: dict[str, Any] = {
        "card": jax.devices()[0].device_kind,
        "commit": commit(),
        "copy_tb_per_s": copy_bandwidth(tiny=args.tiny) / 1e12,
        "bf16_tflop_per_s": peak_flops(tiny=args.tiny) / 1e12,
        "rows": [],
    }
    print({name: value for name, value in result.items() if value}, flush=True)
    for case in args.cases.split(","):
        if time.monotonic() - begun > args.budget:
            print("the budget is spent", flush=True)
            break
        for row in measure(case, args, result):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{time.monotonic() - begun:.0f} s", flush=True)


def measure(case: str, args: Any, result: dict[str, Any]) -> list[dict[str, Any]]:
    name, form = case.split(":")
    sizes, target = (TINY if args.tiny else MODELS[name]), Target.here()
    w = make_weights(sizes, form)
    keys = jax.random.split(jax.random.key(1), 2)
    x = jax.random.normal(keys[0], (args.tokens, sizes.embed), jnp.bfloat16)
    shape = (args.layers, args.tokens, sizes.experts)
    logits = jax.random.normal(keys[1], shape, jnp.float32)
    routing = Routing(num_experts=sizes.experts, top_k=sizes.top_k)
    norm = jnp.ones((sizes.embed,), jnp.bfloat16)
    found = candidates(form)

    def alone(function: Any, x: Any, logits: Any, w: Any) -> Any:
        ids, weights = route(logits[0], routing, target=target)
        layer = jax.tree.map(lambda leaf: leaf[0], w)
        parts = function(x, ids, weights, layer, sizes.activation)
        return parts.astype(jnp.float32).sum(0)

    def chain(function: Any, x: Any, logits: Any, w: Any, norm: Any) -> Any:
        normed = x
        for index in range(args.layers):
            layer = jax.tree.map(lambda leaf: leaf[index % LAYERS], w)  # noqa: B023
            ids, weights = route(logits[index], routing, target=target)
            parts = function(normed, ids, weights, layer, sizes.activation)
            x, normed = add_rms_norm(x, parts, norm, 1e-6, target=target)
        return x, normed

    def compiled(function: Any) -> tuple[Any, Any] | Exception:
        try:
            return (
                jax.jit(partial(alone, function)).lower(x, logits, w).compile(),
                jax.jit(partial(chain, function)).lower(x, logits, w, norm).compile(),
            )
        except Exception as error:
            return error

    functions = [partial(function, target=target) for function in found.values()]
    with ThreadPoolExecutor(8) as pool:
        definition = pool.submit(
            lambda: jax.jit(partial(alone, reference.experts)).lower(x, logits, w).compile()
        )
        programs = list(pool.map(compiled, functions))
    expected = np.asarray(definition.result()(x, logits, w))
    rows = []
    operations = 6 * args.tokens * sizes.top_k * sizes.embed * sizes.width
    for label, program in zip(found, programs, strict=True):
        row: dict[str, Any] = {"case": case, "tokens": args.tokens, "candidate": label}
        rows.append(row)
        if isinstance(program, Exception):
            row["failed"] = str(program)[:300]
            continue
        values = np.asarray(program[0](x, logits, w))
        row["error"] = float(np.linalg.norm(values - expected) / np.linalg.norm(expected))
        if not row["error"] < MOST_ERROR:
            row["failed"] = "WRONG"
            continue
        seconds = fastest(program[1], x, logits, w, norm, calls=3) / args.layers
        row["us"] = seconds * 1e6
        row["of_dense_rate"] = operations / seconds / 1e12 / result["bf16_tflop_per_s"]
        row["kernels_us"] = profile(program[1], x, logits, w, norm)
    return rows


def profile(program: Any, *arguments: Any) -> dict[str, float]:
    """Median microseconds of each kernel of a layer; kernels of one name are told apart by turns
    of two."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            jax.block_until_ready(program(*arguments))
            jax.block_until_ready(program(*arguments))
        trace = next(Path(folder).rglob("perfetto_trace.json.gz"))
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    times: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("ph") == "X" and "correlation_id" in event.get("args", {}):
            name = re.sub(r"(_\d+)+$", "", event["name"])
            times.setdefault(name, []).append((event["ts"], event["dur"]))
    found = {}
    for name, each in sorted(times.items()):
        durations = [duration for _, duration in sorted(each)]
        if "_program" in name:
            found[name + " gate_up"] = round(median(durations[::2]), 2)
            found[name + " down"] = round(median(durations[1::2]), 2)
        else:
            found[name] = round(median(durations), 2)
    return found


if __name__ == "__main__":
    main()
