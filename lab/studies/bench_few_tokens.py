"""Compares ways to launch a layer of experts for few tokens, in turns in one process.

    python -m lab.studies.bench_few_tokens --out few_tokens.json

A layer is the norm that adds the previous result, the router, its choice, and the experts'
products. The layers form one chain whose buffers do not move. The script compares each way's result
with that of the default way. Then it measures the time of a layer, and how long each kernel ends
after the previous one.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import importlib.metadata
import itertools
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import jax
import jax.numpy as jnp
import numpy as np
from bench_experts import EPS, LAYERS, MODELS, MOST_ERROR, TINY, Model, make_weights
from working_tree import commit

from jaxserve_kernels import pdl, tables
from jaxserve_kernels.experts import Routing, norm_and_score, routed_experts
from jaxserve_kernels.target import Target

DEPTH = 16
"""Layers in a chain."""
FEW = 64
"""The most tokens in a case."""
CASES = (
    *("qwen3-30b-a3b:bf16:1", "qwen3-30b-a3b:int4:1", "qwen3-30b-a3b:bf16:8"),
    *("qwen3-30b-a3b:int4:8", "gpt-oss-20b:mxfp4:1", "gpt-oss-20b:mxfp4:8"),
    *("qwen3-30b-a3b:bf16:16", "qwen3-30b-a3b:int4:16"),
    *("qwen3-30b-a3b:fp8:1", "qwen3-30b-a3b:fp8:8"),
)
"""Cases: model, format and tokens."""

LIMITS: dict[str, dict[str, int]] = {
    "apart": {"few_tokens": 0},
    "few, 2": {"few_tokens": FEW, "few_resident": 2},
    "few, 3": {"few_tokens": FEW, "few_resident": 3},
}
"""Settings of `jaxserve_kernels/tables/experts`, by way."""
KEY = "experts", tables.LIMITS


def layer(x: Any, parts: Any, norm: Any, router: Any, w: Any, sizes: Model, **on: Any) -> Any:
    """Runs a layer. Returns x and its parts."""
    x, token, scores = norm_and_score(x, parts, norm, EPS, router, **on)
    routing = Routing(num_experts=sizes.experts, top_k=sizes.top_k)
    return x, routed_experts(token, scores, routing, w, activation=sizes.activation, **on)


def main() -> None:
    args = parse_args()
    target, began = Target.here(), time.monotonic()
    result: dict[str, Any] = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "triton": target.uses_triton() and importlib.metadata.version("triton"),
        "commit": commit(),
        "cases": [],
    }
    for case in args.cases:
        if time.monotonic() - began > args.budget:
            print("--budget is spent", flush=True)
            break
        name, form, tokens = case.split(":")
        sizes = TINY if args.tiny else MODELS[name]
        for row in measure(sizes, form, int(tokens), args, target):
            result["cases"].append({"case": case, **row})
            print(case, row, flush=True)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=lambda text: text.split(","), default=CASES)
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=list(LIMITS))
    parser.add_argument("--rounds", type=int, default=7, help="of all ways, in turns")
    parser.add_argument("--budget", type=float, default=50.0, help="seconds; then no case is begun")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(
    sizes: Model, form: str, tokens: int, args: argparse.Namespace, target: Target
) -> list[dict[str, Any]]:
    weights = make_weights(sizes, form)
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (LAYERS, sizes.experts, sizes.embed)
    router = jax.random.normal(keys[0], shape, jnp.bfloat16) * sizes.embed**-0.5
    norm = jnp.ones((sizes.embed,), jnp.bfloat16)
    parts = 0.3 * jax.random.normal(keys[1], (sizes.top_k, tokens, sizes.embed), jnp.float32)
    x = jax.random.normal(keys[2], (tokens, sizes.embed), jnp.bfloat16)
    fixed = (norm, router, weights)
    programs = {
        way: compiled(x, parts, fixed, sizes, target.with_tuned({KEY: LIMITS[way]}))
        for way in args.ways
    }
    rows = {way: {"way": way, "rounds_us": []} for way in args.ways}
    expected = None
    for way, program in programs.items():
        found = [np.asarray(each, np.float32) for each in program(x + 0, parts + 0, *fixed)]
        found[1] = found[1].sum(0)
        expected = found if expected is None else expected
        pairs = zip(found, expected, strict=True)
        errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
        rows[way]["errors"] = errors
        if not max(errors) < MOST_ERROR:
            print(f"{way}: WRONG, it differs by {errors}", flush=True)
    for _ in range(args.rounds):
        for way, program in programs.items():
            rows[way]["rounds_us"].append(seconds(program, x, parts, fixed) / DEPTH * 1e6)
    for way, program in programs.items():
        rows[way]["us"] = min(rows[way]["rounds_us"])
        if tokens == 1:
            rows[way]["ends_us"] = ends(program, x, parts, fixed)
    return list(rows.values())


def compiled(x: Any, parts: Any, fixed: Any, sizes: Model, target: Target) -> Any:
    """Compiles a chain that donates x and parts, so that its buffers do not move."""

    def chain(x: Any, parts: Any, norm: Any, router: Any, w: Any, *, target: Target) -> Any:
        for index in range(DEPTH):
            at = index % LAYERS
            own: Any = jax.tree.map(lambda leaf: leaf[at], (router, w))  # noqa: B023
            x, parts = layer(x, parts, norm, *own, sizes, target=target)
        return x, parts

    def program(*args: Any) -> Any:
        x, found = pdl.call(chain, *args, target=target)
        if found.shape != parts.shape:  # the parts of the reference implementation
            found = jnp.zeros_like(parts).at[0].set(found[0].astype(parts.dtype))
        # Scales the result to the size of the first layer's, so that chains can follow one another.
        return x / jnp.maximum(1, jnp.abs(x).max()), found

    return jax.jit(program, donate_argnums=(0, 1)).lower(x, parts, *fixed).compile()


def seconds(program: Any, x: Any, parts: Any, fixed: Any, calls: int = 20) -> float:
    """Returns the seconds of one chain, from several in a row."""
    state = jax.block_until_ready((x + 0, parts + 0))
    for _ in range(2):
        state = program(*state, *fixed)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(calls):
        state = program(*state, *fixed)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / calls


def ends(program: Any, x: Any, parts: Any, fixed: Any) -> dict[str, float]:
    """Returns how long after the previous kernel each kernel ends, in µs, the median over the
    chain's layers. Kernels overlap, so their durations do not show this."""
    state = program(x + 0, parts + 0, *fixed)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(3):
                state = program(*state, *fixed)
            jax.block_until_ready(state)
        trace = next(Path(folder).rglob("perfetto_trace.json.gz"))
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    found = sorted(
        (event["ts"] + event["dur"], re.sub(r"(_\d+)+$", "", event["name"]))
        for event in events
        if event.get("ph") == "X" and "correlation_id" in event.get("args", {})
    )
    times: dict[str, list[float]] = collections.defaultdict(list)
    for (before, _), (after, name) in itertools.pairwise(found):
        times[name].append(after - before)
    return {name: round(median(each), 2) for name, each in times.items() if len(each) > 3}


if __name__ == "__main__":
    main()
