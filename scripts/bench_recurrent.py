"""Times a hybrid model's recurrent layers: decode against a floor, and prompts in two forms.

    python scripts/bench_recurrent.py --out recurrent.json
    python scripts/bench_recurrent.py --model qwen3.5-27b --rows 1,8,64 --prompts 2048,8192
    python scripts/bench_recurrent.py --quantization int4 --whole --profile
    python scripts/bench_recurrent.py --dry-run

A layer is its delta net: projections, convolution, rule, norm, output projection and the following
norm; with --whole also its feed-forward. A program has several layers with their own weights and
state, in all more than a card's L2 cache, and each layer reads the previous one's result. Decode
steps are one chain of kernels, as in a whole model. The floor is the time to copy the weights and
the rows' state (read and written) at a rate measured in this process. A prompt is one row, computed
in blocks, and token by token. --dry-run uses tiny shapes, to try the script without a card; its
times mean nothing.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.9)
# Otherwise XLA makes no graph of a program with one call, and the host launches its kernels.
os.environ["XLA_FLAGS"] += " --xla_gpu_graph_min_graph_size=1"

import jax
import jax.numpy as jnp
from card_rates import RUNS, copy_bandwidth
from kernel_profile import kernel_runs
from random_weights import LAYER_FORMATS, encoder
from working_tree import commit

from jaxserve.layer_spec import DeltaNetSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models import delta_net
from jaxserve.models.layer import Norm, feed_forward
from jaxserve.models.layer_weights import Layer, abstract_layer
from jaxserve.models.registry import NAMED_MODELS
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels import pdl
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.matmul import add_linear
from jaxserve_kernels.records import installed
from jaxserve_kernels.recurrent_state import RecurrentState, RecurrentStep
from jaxserve_kernels.target import Target

LAYERS = 4
TINY = DeltaNetSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=16, conv_width=4, block=16)


class Case(NamedTuple):
    """One program: a decode step of several rows, or one prompt."""

    kind: str
    """`decode`, `blocks`, or `one_by_one`."""
    tokens: int

    @property
    def calls(self) -> int:
        """Number of calls in a timed series."""
        return 10 if self.kind == "decode" else 5


class Bench(NamedTuple):
    """Weights and settings that all programs share."""

    spec: ModelSpec
    weights: tuple[Layer, ...]
    slots: int
    whole: bool
    """Whether layers include their feed-forward."""


def main() -> None:
    args = parse_args()
    spec = model_of(args)
    cases = [Case("decode", rows) for rows in args.rows]
    cases += [Case(kind, each) for each in args.prompts for kind in ("blocks", "one_by_one")]
    copied = copy_bandwidth(tiny=args.dry_run)
    result: dict[str, Any] = {
        "card": jax.devices()[0].device_kind,
        "versions": {name: installed(name) for name in ("jax", "jaxlib", "triton", "jax-triton")},
        "commit": commit(),
        "model": "tiny" if args.dry_run else args.model,
        "quantization": args.quantization,
        "whole": args.whole,
        "layers": LAYERS,
        "copy_tb_per_s": copied / 1e12,
        "cases": [],
    }
    bench = Bench(spec, random_weights(spec, args), max(args.rows) + 1, args.whole)
    for case in cases:
        result["cases"].append(describe(case, bench, measure(case, bench, args), copied))
        print(json.dumps(result["cases"][-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    hybrids = sorted(name for name, spec in NAMED_MODELS.items() if spec.state is not None)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=hybrids, default=hybrids[0])
    parser.add_argument("--quantization", choices=LAYER_FORMATS)
    parser.add_argument("--whole", action="store_true", help="layers with their feed-forward")
    parser.add_argument("--rows", type=sizes, help="rows of decode steps; default 1,8,64")
    parser.add_argument("--prompts", type=sizes, help="prompt lengths; default 2048,8192")
    parser.add_argument("--profile", action="store_true", help="also time each kernel")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--out", type=Path, help="the result as JSON, written after each case")
    args = parser.parse_args()
    if args.rows is None:
        args.rows = [1, 2] if args.dry_run else [1, 8, 64]
    if args.prompts is None:
        args.prompts = [40] if args.dry_run else [2048, 8192]
    return args


def model_of(args: argparse.Namespace) -> ModelSpec:
    """The model's recurrent layers, and one attention layer, which a model must have. Attention is
    not timed."""
    spec = NAMED_MODELS[args.model]
    recurrent = next(layer for layer in spec.layers if layer.delta_net is not None)
    full = next(layer for layer in spec.layers if layer.attention is not None)
    if args.dry_run:
        spec, recurrent = replace(spec, embed=64), replace(recurrent, delta_net=TINY)
    return replace(spec, layers=(*(recurrent,) * LAYERS, full))


def random_weights(spec: ModelSpec, args: argparse.Namespace) -> tuple[Layer, ...]:
    each = abstract_layer(spec.layers[0], spec.embed, jnp.bfloat16, jnp.float32)
    if not args.whole:
        each = each._replace(gate_up=None, down=None, router=None, experts=None, shared=None)
    return dummy_params((each,) * LAYERS, 0, encoder(spec, args.quantization, None))


def step_of(case: Case, slots: int, block: int) -> RecurrentStep:
    """Decode rows continue from an earlier position; prompts begin at 0."""
    ints = jnp.arange(case.tokens, dtype=jnp.int32)
    if case.kind == "decode":
        return RecurrentStep.of_decode(ints, jnp.full_like(ints, 100), slots - 1)
    prompts = jnp.full(1, case.tokens if case.kind == "blocks" else 0, jnp.int32)
    row, last = jnp.zeros(1, jnp.int32), jnp.full(1, case.tokens - 1, jnp.int32)
    return RecurrentStep.of_rows(jnp.zeros_like(ints), ints, row, last, prompts, block)


class Program(NamedTuple):
    """A compiled program, with its arguments."""

    run: Callable[..., Any]
    """(x, state, weights, step) -> output, state."""
    x: jax.Array
    step: RecurrentStep

    @classmethod
    def of(cls, case: Case, bench: Bench) -> Program:
        assert bench.spec.state is not None
        step = step_of(case, bench.slots, bench.spec.state.delta_net.block)
        target, shape = Target.here(), (case.tokens, bench.spec.embed)

        def layers(
            x: jax.Array, state: RecurrentState, weights: tuple[Layer, ...], step: RecurrentStep,
            *, target: Target,
        ) -> Any:  # fmt: skip
            normed = x
            for index, layer in enumerate(weights):
                own = (x, normed, state, layer, index, step)
                x, normed, state = one_layer(*own, bench, target=target)
            return normed, state

        def run(*args: Any) -> Any:
            if case.kind == "decode":
                return pdl.call(layers, *args, target=target)
            return layers(*args, target=target)

        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        return cls(jax.jit(run, donate_argnums=1), x, step)

    def calls(self, state: RecurrentState, bench: Bench, count: int) -> RecurrentState:
        """Makes `count` calls and waits for them. Returns the state after them."""
        for _ in range(count):
            out, state = self.run(self.x, state, bench.weights, self.step)
            del out
        return jax.block_until_ready(state)


def one_layer(
    x: jax.Array, normed: Any, state: Any, layer: Layer, index: int, step: RecurrentStep,
    bench: Bench, *, target: Target,
) -> Any:  # fmt: skip
    """Returns x, the normed x of the next layer, and the state."""
    assert layer.delta is not None
    spec = bench.spec
    own = (layer.delta, normed, state, index, step, spec)
    mixed, state = delta_net.mix(*own, target=target)
    if bench.whole:
        norm = Norm(layer.attention_norm)
        return *feed_forward(layer, norm, x, mixed, spec, target=target), state
    x, out = add_linear(x, mixed, layer.delta.out, biased=False, target=target)
    return *add_rms_norm(x, out, layer.mlp_norm, spec.norm_eps, target=target), state


def measure(case: Case, bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a layer, and of its kernels."""
    shapes = delta_net.abstract_state(bench.spec, jnp.bfloat16, bench.slots)
    state: Any = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    program = Program.of(case, bench)
    state, best = program.calls(state, bench, 1), math.inf  # compiles
    for _ in range(RUNS):
        start = time.perf_counter()
        state = program.calls(state, bench, case.calls)
        best = min(best, (time.perf_counter() - start) / case.calls)
    found: dict[str, Any] = {"us": best / LAYERS * 1e6}
    if args.profile:
        found["kernels_us"] = kernels_of(program, state, bench)
    return found


def kernels_of(program: Program, state: RecurrentState, bench: Bench) -> dict[str, float]:
    """Microseconds that each kernel adds to a layer: by place and name if all kernels belong to
    layers, otherwise by name."""
    calls = 5
    runs = kernel_runs(lambda: program.calls(state, bench, calls))
    each, others = divmod(len(runs), calls * LAYERS)
    times: dict[str, float] = collections.defaultdict(float)
    for number, kernel in enumerate(runs):
        place = "" if others else f"{number % each:02d} "
        times[place + kernel.name] += kernel.adds_us / (calls * LAYERS)
    return {name: round(us, 2) for name, us in sorted(times.items())}


def describe(case: Case, bench: Bench, found: dict[str, Any], copied: float) -> dict[str, Any]:
    """One layer's time, and its ratio to the floor. With experts there is no floor, because rows
    use only some of them."""
    result = {**case._asdict(), **found}
    seconds = found["us"] / 1e6
    if case.kind != "decode":
        return {**result, "tokens_per_s": case.tokens / seconds}
    if bench.whole and bench.spec.experts:
        return result
    state = delta_net.abstract_state(bench.spec, jnp.bfloat16, 1)
    of_row = sum(leaf.size * leaf.dtype.itemsize for leaf in state or ()) / LAYERS
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(bench.weights)) / LAYERS
    size = weights + 2 * case.tokens * of_row
    floor = size / copied
    return {**result, "bytes": int(size), "floor_us": floor * 1e6, "over_floor": seconds / floor}


if __name__ == "__main__":
    main()
