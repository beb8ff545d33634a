"""Time a mixture of experts against the bytes of the experts touched, and dense products as large.

    python scripts/bench_experts.py --out experts.json --budget 100
    python scripts/bench_experts.py --models qwen3-30b-a3b --formats bf16 --rows 1,64,2048 --profile

Up to 64 rows: a layer's router choice, its products and the norm that adds their parts, layer after
layer as one chain of launches. The floor is the time in which the card copies the bytes of the
experts that are touched, or in which it computes their operations at the rate of a large dense
product. `dense` is the same chain with dense products of as many bytes. More rows: `pdl.join`, as
in served steps. Routing is random and uniform; every layer has its own router logits.

--sweep tries launches beside the rule's, and compares their results with the rule's. --tiny has
small shapes, to try the script without a card.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.9)

import jax
import jax.numpy as jnp
import numpy as np
from card_rates import copy_bandwidth, fastest, peak_flops
from experts_layers import (
    FORMATS,
    LAYERS,
    MODELS,
    Model,
    as_dense,
    dense_layers,
    make_weights,
    relative_error,
    sparse_layers,
)
from kernel_profile import kernel_runs, per_layer
from turns import turn
from working_tree import commit

from jaxserve_kernels import pdl
from jaxserve_kernels.experts import ExpertWeights, token_format
from jaxserve_kernels.experts.config import (
    STREAMED,
    STREAMED_INT8,
    STREAMING,
    STREAMING_INT8,
    Launch,
)
from jaxserve_kernels.target import Target

MANY = 512
"""From this many rows on, products are bound by compute: no dense comparison."""

CHAINED = 64
"""Up to this many rows, the layers of a decode step are one chain, otherwise several."""

MOST_ERROR, MOST_ERROR_INT8, MOST_ERROR_E4M3 = 1e-2, 2e-2, 6e-2
"""Of a layer's result, relative to the definition: hidden and parts are rounded to bfloat16, tokens
of 4-bit weights sometimes to int8, and many tokens of quantised weights to e4m3."""

TRIES = {
    8: [(64, 4, 4, 16, 0), (128, 4, 4, 16, 0), (128, 4, 4, 8, 4), (64, 2, 4, 8, 4)],
    20: [(64, 4, 4, 32, 0), (128, 4, 4, 32, 0)],
    48: [(64, 4, 4, 64, 0), (128, 8, 4, 64, 0), (256, 8, 3, 64, 4)],
    512: [(64, 4, 4, 64, 0), (128, 8, 4, 64, 0)],
}
"""Values to try of rows, warps, stages, tokens and prefetching programs, by the largest mean number
of tokens per expert."""
STREAMING_TRIES = {
    4: [(8, 256, 2), (8, 256, 3), (8, 128, 2), (8, 128, 3), (8, 128, 4), (8, 128, 6), (16, 256, 3)],
    8: [(8, 256, 3), (16, 256, 2), (16, 256, 3), (16, 128, 4), (16, 128, 6)],
    48: [(32, 256, 2), (32, 256, 3), (32, 128, 4), (64, 128, 3), (64, 128, 4), (64, 256, 2)],
}
"""Likewise, for the kernel through which 4-bit codes stream: tokens, depth and stages."""
TINY = Model(8, 2, 256, 256)


class Case(NamedTuple):
    model: str
    format: str
    rows: int
    dense: bool = False
    tuned: tuple[tuple[str, Launch], ...] = ()
    """Launch parameters to try, by product."""

    @property
    def kind(self) -> str:
        """The format's name in tables of launches."""
        return "plain" if self.format == "bf16" else self.format.removesuffix("-blocks")

    def __str__(self) -> str:
        tuned = "".join(f" {name} {changed(each)}" for name, each in self.tuned)
        return f"{self.model} {self.format} {self.rows}{' dense' if self.dense else ''}{tuned}"


def changed(launch: Launch) -> dict[str, Any]:
    """Returns the parameters that differ from the default."""
    plain = dataclasses.asdict(Launch())
    return {
        name: value for name, value in dataclasses.asdict(launch).items() if value != plain[name]
    }


class Built(NamedTuple):
    program: Any
    args: tuple[Any, ...]
    layers: int
    bytes: float
    """Bytes of weights that a layer reads."""
    touched: float
    """Experts with at least one token."""
    target: Target


def main() -> None:
    args = parse_args()
    target = Target.here()
    with turn(args.turns):
        rates = copy_bandwidth(tiny=args.tiny), peak_flops(tiny=args.tiny)
    result: dict[str, Any] = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "triton": target.uses_triton() and importlib.metadata.version("triton"),
        "commit": commit(),
        "copy_tb_per_s": rates[0] / 1e12,
        "bf16_tflop_per_s": rates[1] / 1e12,
        "experts": [],
    }
    print({name: value for name, value in result.items() if value}, flush=True)
    deadline = math.inf if args.budget is None else time.monotonic() + args.budget
    for case, built, seconds in measure(args, target, deadline):
        row = describe(case, built, seconds, result)
        result["experts"].append(row)
        print(line(row), flush=True)
        if args.profile and not case.dense:
            with turn(args.turns):
                runs = kernel_runs(lambda: built.program(*built.args))  # noqa: B023
            row["kernels_us"] = per_layer(runs, built.layers)
            print("   ", row["kernels_us"], flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--rows", type=sizes, default=[1, 8, 32, 64, 256, 2048])
    parser.add_argument("--no-dense", action="store_true", help="no dense products beside them")
    parser.add_argument("--profile", action="store_true", help="time of each kernel, too")
    parser.add_argument("--sweep", action="store_true", help="try launch parameters")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling threads")
    parser.add_argument("--rounds", type=int, default=1, help="the fastest round counts")
    parser.add_argument("--turns", type=Path, help="use the card only while this file is locked")
    parser.add_argument("--budget", type=float, help="begin nothing new after so many seconds")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def cases_of(model: str, name: str, args: argparse.Namespace) -> list[Case]:
    cases = [Case(model, name, rows) for rows in args.rows]
    if args.sweep:
        return [each for case in cases for each in (case, *candidates(case))]
    padded = name != "bf16" and MODELS[model].width % 128
    if args.no_dense or padded:  # a dense product's inputs would not be those of its tokens
        return cases
    return cases + [case._replace(dense=True) for case in cases if case.rows <= 64]


def candidates(case: Case) -> Iterator[Case]:
    """Yields other launches than the rule's, the same for both products."""
    target = Target.here()
    if case.rows >= MANY and target.uses_triton() and target.runs_hopper_kernels():
        return  # Hopper's kernel has no parameters
    sizes = MODELS[case.model]
    each = case.rows * sizes.top_k / sizes.experts
    most_streamed = {kind.name.lower(): most for kind, most in STREAMED.items()}
    most_streamed["int4"] = STREAMED_INT8
    streams = 1 < case.rows < MANY and each <= most_streamed.get(case.kind, 0)
    if streams and target.uses_triton() and target.runs_hopper_kernels():
        tries = next(tries for most, tries in STREAMING_TRIES.items() if each <= most)
        for tokens, depth, stages in tries:
            one = Launch(rows=128, tokens=tokens, depth=depth, num_stages=stages)
            names = (f"{STREAMING}gate_up", f"{STREAMING_INT8}gate_up", f"{STREAMING}down")
            yield case._replace(tuned=tuple((name, one) for name in names))
        return
    for rows, warps, stages, tokens, ahead in next(
        tries for most, tries in TRIES.items() if each <= most
    ):
        one = Launch(rows=rows, tokens=tokens, num_warps=warps, num_stages=stages, ahead=ahead)
        yield case._replace(tuned=(("gate_up", one), ("down", one)))


def measure(
    args: argparse.Namespace, target: Target, deadline: float
) -> Iterator[tuple[Case, Built, float]]:
    """Yields the seconds per layer of each case, of its fastest round. One format of one model at a
    time holds device memory, and none begins after the deadline. All programs of a format are
    compiled before the first is timed, because a new executable drops the graphs of the others."""
    for name, model in itertools.product(args.formats, args.models):
        if time.monotonic() > deadline:
            print("--budget is spent", flush=True)
            return
        sizes = TINY if args.tiny else MODELS[model]
        with turn(args.turns):
            stacked = jax.block_until_ready(make_weights(sizes, name))
        cases = cases_of(model, name, args)
        with ThreadPoolExecutor(args.workers) as pool:
            programs = list(
                pool.map(lambda case: attempt(case, sizes, stacked, target), cases)  # noqa: B023
            )
        with turn(args.turns):
            right = [
                (case, built)
                for case, built in zip(cases, programs, strict=True)
                if built is not None and is_right(case, built, sizes, stacked)
            ]
        for case, built in right:
            best = math.inf
            for _ in range(args.rounds):
                with turn(args.turns):
                    best = min(best, fastest(built.program, *built.args, calls=3) / built.layers)
            yield case, built, best


def is_right(case: Case, built: Built, sizes: Model, stacked: ExpertWeights) -> bool:
    """Returns whether a layer of a case is the definition, except for rounding."""
    if case.dense:  # its values mean nothing
        return True
    x, logits, *_ = built.args
    layer: Any = jax.tree.map(lambda leaf: leaf[0], stacked)
    own = x, logits[0], layer, sizes.routing, sizes.activation
    error = relative_error(*own, chain=case.rows <= CHAINED, target=built.target)
    form = token_format(x, sizes.top_k, layer, target=built.target)
    most = MOST_ERROR
    if form is not None:
        most = MOST_ERROR_INT8 if form.dtype == jnp.int8 else MOST_ERROR_E4M3
    if not error < most:
        print(f"{case}: WRONG, it differs by {error:.1e} from the definition", flush=True)
    return error < most


def attempt(case: Case, sizes: Model, stacked: Any, target: Target) -> Built | None:
    """Builds a case. Returns None if its launch parameters do not compile."""
    try:
        return build(case, sizes, stacked, target)
    except Exception as error:
        if not case.tuned:
            raise
        print(f"{case}: {str(error)[:100]}", flush=True)
        return None


def build(case: Case, sizes: Model, stacked: ExpertWeights, target: Target) -> Built:
    """Compiles a program of several layers. Each layer reads the output of the layer before it."""
    layers = 16
    keys = jax.random.split(jax.random.key(case.rows), 2)
    x = jax.random.normal(keys[0], (case.rows, sizes.embed), jnp.bfloat16)
    logits = jax.random.normal(keys[1], (layers, case.rows, sizes.experts), jnp.float32)
    chosen = np.argsort(-np.asarray(logits), axis=-1)[..., : sizes.top_k]
    touched = float(np.mean([np.unique(each).size for each in chosen]))
    norm = jnp.ones((sizes.embed,), jnp.bfloat16)
    tuned = {}
    for name, launch in case.tuned:
        weight = getattr(stacked, name.removeprefix(STREAMING_INT8).removeprefix(STREAMING))
        shape = (name, case.kind, *weight.shape[1:])
        tuned["experts", shape] = dataclasses.asdict(launch)
    target = target.with_tuned(tuned)
    if case.dense:
        arrays, function = as_dense(stacked, math.ceil(touched)), dense_layers
    else:
        arrays, function = stacked, sparse_layers

    def chain(x: Any, logits: Any, norm: Any, w: Any, *, target: Target) -> Any:
        return function(x, logits, norm, w, sizes, target=target)

    def program(*args: Any) -> Any:
        launch = pdl.join if case.rows > CHAINED else pdl.call
        return launch(chain, *args, target=target)

    args = (x, logits, norm, arrays)
    of_one = sum(leaf.nbytes for leaf in jax.tree.leaves(stacked)) / LAYERS / sizes.experts
    size = of_one * (math.ceil(touched) if case.dense else touched)
    return Built(jax.jit(program).lower(*args).compile(), args, layers, size, touched, target)


def describe(case: Case, built: Built, seconds: float, result: dict[str, Any]) -> dict[str, Any]:
    sizes = MODELS[case.model]
    operations = 6 * case.rows * sizes.top_k * sizes.embed * sizes.width
    if case.dense:
        operations *= built.touched / sizes.top_k
    reading = built.bytes / (result["copy_tb_per_s"] * 1e12)
    floor = max(reading, operations / (result["bf16_tflop_per_s"] * 1e12))
    return {
        "model": case.model,
        "format": case.format,
        "rows": case.rows,
        "dense": case.dense,
        "tuned": {name: dataclasses.asdict(each) for name, each in case.tuned},
        "touched": built.touched,
        "us": seconds * 1e6,
        "floor_us": floor * 1e6,
        "over_floor": seconds / floor,
        "tflop_per_s": operations / seconds / 1e12,
        "of_dense_rate": operations / seconds / 1e12 / result["bf16_tflop_per_s"],
        "case": str(case),
    }


def line(row: dict[str, Any]) -> str:
    text = f"{row['case']}: {row['us']:.1f} us, {row['over_floor']:.2f} of {row['floor_us']:.1f}"
    if row["rows"] < MANY:
        return f"{text} ({row['touched']:.1f} experts)"
    rate = f"{row['tflop_per_s']:.0f} TFLOP/s, {row['of_dense_rate']:.2f} of a dense product's"
    return f"{text}, {rate}"


if __name__ == "__main__":
    main()
