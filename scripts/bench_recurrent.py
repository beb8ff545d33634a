"""Time a hybrid model's recurrent layers: decode against the floor, and prompts in both forms.

    python scripts/bench_recurrent.py --out recurrent.json
    python scripts/bench_recurrent.py --model qwen3.5-27b --rows 1,8,64 --prompts 2048,8192
    python scripts/bench_recurrent.py --dry-run

A layer is its delta net: projections, convolution, rule, norm, the output's projection, and the
norm after it. A program has some layers with weights and state of their own, more than a card's L2
holds, each of which reads what the one before gave; decode steps are one chain of kernels, as in a
whole model. The floor is the time in which the card copies the bytes of
the weights and those of the rows' state, read and written, at a rate measured in this process.
Prompts are one row, computed in blocks and token by token. --dry-run has tiny shapes, to try the
script without a card; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.9)

import jax
import jax.numpy as jnp
from card_rates import RUNS, copy_bandwidth
from working_tree import commit

from jaxserve.layer_spec import DeltaNetSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models import delta_net
from jaxserve.models.delta_net import DeltaNet
from jaxserve.models.registry import NAMED_MODELS
from jaxserve_kernels import pdl
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.matmul import add_linear
from jaxserve_kernels.records import installed
from jaxserve_kernels.recurrent_state import RecurrentState, RecurrentStep
from jaxserve_kernels.target import Target

CALLS = 5
"""Of a series."""
LAYERS = 4
TINY = DeltaNetSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=16, conv_width=4, block=16)


class Case(NamedTuple):
    """One program: single tokens of so many rows, or the tokens of one prompt."""

    kind: str
    """`decode`, `blocks`, or `one_by_one`."""
    tokens: int


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
        "layers": LAYERS,
        "copy_tb_per_s": copied / 1e12,
        "cases": [],
    }
    slots = max(args.rows) + 1
    weights = [random_weights(spec, layer) for layer in range(LAYERS)]
    for case in cases:
        seconds = measure(case, spec, weights, slots) / LAYERS
        result["cases"].append(describe(case, spec, weights[0], seconds, copied))
        print(json.dumps(result["cases"][-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    hybrids = sorted(name for name, spec in NAMED_MODELS.items() if spec.state is not None)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=hybrids, default=hybrids[0])
    parser.add_argument("--rows", type=sizes, help="of decode steps; default 1,8,64")
    parser.add_argument("--prompts", type=sizes, help="tokens; default 2048,8192")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--out", type=Path, help="the result as JSON, written after each case")
    args = parser.parse_args()
    args.rows = args.rows or ([1, 2] if args.dry_run else [1, 8, 64])
    args.prompts = args.prompts or ([40] if args.dry_run else [2048, 8192])
    return args


def model_of(args: argparse.Namespace) -> ModelSpec:
    """With one layer of attention, which a model must have, and which is not timed."""
    spec = NAMED_MODELS[args.model]
    recurrent = next(layer for layer in spec.layers if layer.delta_net is not None)
    full = next(layer for layer in spec.layers if layer.attention is not None)
    if args.dry_run:
        spec, recurrent = replace(spec, embed=64), replace(recurrent, delta_net=TINY)
    return replace(spec, layers=(*(recurrent,) * LAYERS, full))


def random_weights(spec: ModelSpec, layer: int) -> DeltaNet:
    """Matrices of deviation in ** -0.5, gates as of models that were trained."""
    assert spec.state is not None
    shapes = delta_net.abstract(spec.state.delta_net, spec.embed, jnp.bfloat16)
    keys = iter(jax.random.split(jax.random.key(layer), len(shapes)))
    made = [
        jax.random.normal(next(keys), each.shape, jnp.float32) * each.shape[-1] ** -0.5
        for each in shapes
    ]
    pairs = zip(made, shapes, strict=True)
    found = DeltaNet(*(each.astype(shape.dtype) for each, shape in pairs))
    return found._replace(norm=jnp.ones_like(found.norm))


def step_of(case: Case, slots: int, block: int) -> RecurrentStep:
    """All rows go on from an earlier position, but for prompts, which begin."""
    ints = jnp.arange(case.tokens, dtype=jnp.int32)
    if case.kind == "decode":
        return RecurrentStep.of_decode(ints, jnp.full_like(ints, 100), slots - 1)
    prompts = jnp.full(1, case.tokens if case.kind == "blocks" else 0, jnp.int32)
    row, last = jnp.zeros(1, jnp.int32), jnp.full(1, case.tokens - 1, jnp.int32)
    return RecurrentStep.of_rows(jnp.zeros_like(ints), ints, row, last, prompts, block)


def measure(case: Case, spec: ModelSpec, weights: list[DeltaNet], slots: int) -> float:
    """Seconds of all layers."""
    assert spec.state is not None
    target, own_block = Target.here(), spec.state.delta_net.block

    norm = jnp.ones(spec.embed, jnp.float32)

    def layers(
        x: jax.Array, state: RecurrentState, weights: list[DeltaNet], step: RecurrentStep,
        norm: jax.Array, *, target: Target,
    ) -> Any:  # fmt: skip
        normed = x
        for layer, each in enumerate(weights):
            mixed, state = delta_net.mix(each, normed, state, layer, step, spec, target=target)
            x, out = add_linear(x, mixed, each.out, biased=False, target=target)
            x, normed = add_rms_norm(x, out, norm, spec.norm_eps, target=target)
        return normed, state

    def run(x: jax.Array, state: RecurrentState, weights: list[DeltaNet], norm: jax.Array) -> Any:
        own = (x, state, weights, step_of(case, slots, own_block), norm)
        if case.kind == "decode":
            return pdl.call(layers, *own, target=target)
        return layers(*own, target=target)

    abstract = delta_net.abstract_state(spec, jnp.bfloat16, slots)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    x = jax.random.normal(jax.random.key(0), (case.tokens, spec.embed), jnp.bfloat16)
    program = jax.jit(run, donate_argnums=1)
    best = math.inf
    for run in range(RUNS + 1):
        start = time.perf_counter()
        for _ in range(CALLS if run else 1):  # the first one compiles
            out, state = program(x, state, weights, norm)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / CALLS) if run else math.inf
    return best


def describe(
    case: Case, spec: ModelSpec, weights: DeltaNet, seconds: float, copied: float
) -> dict[str, Any]:
    """One layer's time."""
    found: dict[str, Any] = {**case._asdict(), "us": seconds * 1e6}
    if case.kind != "decode":
        return {**found, "tokens_per_s": case.tokens / seconds}
    state = delta_net.abstract_state(spec, jnp.bfloat16, 1)
    of_row = sum(leaf.size * leaf.dtype.itemsize for leaf in state or ()) / LAYERS
    size = sum(leaf.nbytes for leaf in weights) + 2 * case.tokens * of_row
    floor = size / copied
    return {**found, "bytes": int(size), "floor_us": floor * 1e6, "over_floor": seconds / floor}


if __name__ == "__main__":
    main()
