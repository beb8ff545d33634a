"""Finds the formats that each kind of GPU supports, by compiling every kernel that steps call.

    .venv-compiler/bin/python scripts/support_matrix.py --out docs/measurements/support.json

Needs no GPU, but Triton with jax-triton, and CUDA's ptxas. Traces steps of Qwen3-0.6B, 4B and 8B,
at the buckets that change the choice of kernels, with every format of weights and of KV caches.
Compiles their kernels to machine code, and checks that they fit the GPU's shared memory. Of kernels
that differ only in sizes that bound loops (rows, depth, strides), it compiles one; with `--sizes`
all. Entries of other capabilities stay in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # no GPU client is created
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
from random_weights import LAYER_FORMATS, encoder

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, delta_net
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.runner import batch, kv_cache, sequence_state, slot_tables
from jaxserve.runner.batch import Bucket
from jaxserve.runner.step import DeviceState, run_step
from jaxserve_checkpoints.load import encoded_abstract
from jaxserve_kernels import ptxas, records
from jaxserve_kernels.kv_format import named
from jaxserve_kernels.paged_attention import tile_tokens
from jaxserve_kernels.target import Target

CAPABILITIES = (80, 86, 89, 90, 100, 120)
MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
WEIGHTS = ("bf16", *LAYER_FORMATS)
KV_FORMATS = ("bf16", "fp8_e4m3", "int8", "kvarn_k4v4_g128", "kvarn_k4v2_g128")
DECODE, PREFILL = (1, 16, 64, 256), (512, 2048)
MAX_SEQS, MAX_TOKENS, PAGES = 256, 2048, 2000
SIZES = frozenset(
    ("n", "k", "tokens", "padded", "stride", "table_stride", "count_stride", "mask_stride", "vocab",
     "chunks", "steps", "tiles", "width", "pages", "programs", "whole", "SPLITS", "STEPS", "TILES",
     "MIN_BLOCKS", "embed", "parts", "layers", "q_heads", "BLOCK")
)  # fmt: skip
"""Kernel constants that are sizes or counts. Of kernels that differ in these only, the one with the
largest is compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step to trace."""

    model: str
    weights: str
    kv: str
    bucket: Bucket


def main() -> None:
    args = parse_args()
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    cards = found.get("cards", {})
    if args.trace:
        for capability in args.capabilities:
            trace(capability, args)
        return
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        reports = pool.map(report, args.capabilities, itertools.repeat(args))
        for capability, found_here in zip(args.capabilities, reports, strict=True):
            cards[f"{capability / 10}"] = found_here
            ordered = dict(sorted(cards.items(), key=by_number))
            text = json.dumps({**description(args), "cards": ordered}, indent=1)
            if args.out:
                args.out.write_text(text + "\n", encoding="utf-8")
    if not args.out:
        print(text)


def by_number(item: tuple[str, Any]) -> float:
    return float(item[0])


def parse_args() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file; default: stdout")
    parser.add_argument("--capabilities", type=numbers, default=list(CAPABILITIES))
    parser.add_argument("--models", type=names, default=list(MODELS))
    parser.add_argument("--weights", type=names, default=list(WEIGHTS))
    parser.add_argument("--kv", type=names, default=list(KV_FORMATS))
    parser.add_argument("--decode", type=numbers, default=list(DECODE))
    parser.add_argument("--prefill", type=numbers, default=list(PREFILL))
    parser.add_argument("--jobs", type=int, default=1, help="capabilities at the same time")
    parser.add_argument("--sizes", action="store_true", help="compile each size of a kernel")
    parser.add_argument("--trace", action="store_true", help="print launches, compile nothing")
    return parser.parse_args()


def description(args: argparse.Namespace) -> dict[str, Any]:
    packages = ("jax", "jaxlib", "jax-triton", "triton")
    versions = {name: records.installed(name) for name in packages}
    return {
        "versions": {"python": platform.python_version(), **versions, "ptxas": ptxas.version()},
        "models": args.models,
        "every size": args.sizes,
        "buckets": {"decode": args.decode, "prefill": args.prefill},
    }


def report(capability: int, args: argparse.Namespace) -> dict[str, Any]:
    """For a compute capability: the kernels of each format, and those that do not compile."""
    began = time.process_time()
    variants: dict[Any, Any] = {}
    used: dict[str, dict[str, set[Any]]] = {"weights": {}, "kv": {}}
    for step in steps(args):
        # A step has other kernels, too: a format works only if all of them do.
        kind, name = ("kv", step.kv) if step.kv != "bf16" else ("weights", step.weights)
        for equation in launches(capability, step):
            key, size = variant(equation, sizes=args.sizes)
            if key not in variants or size > variants[key][0]:
                variants[key] = size, equation
            used[kind].setdefault(name, set()).add(key)
    if "bf16" in used["weights"]:
        used["kv"]["bf16"] = used["weights"]["bf16"]  # the same steps
    failures: dict[Any, str | None] = {}
    for key, (_, equation) in variants.items():
        failures[key] = failure(equation)
        print(f"{capability}: {len(failures)} of {len(variants)}", file=sys.stderr)

    def entry(keys: set[Any]) -> dict[str, Any]:
        failed = {variants[key][1].params["name"]: failures[key] for key in keys if failures[key]}
        return {"kernels": len(keys), "failed": failed}

    return {
        "kernels": len(variants),
        "seconds": round(time.process_time() - began),
        **{kind: {name: entry(keys) for name, keys in each.items()} for kind, each in used.items()},
    }


def trace(capability: int, args: argparse.Namespace) -> None:
    """Prints every launch of every step, to show the effect of changes to grids or choices."""
    for step in steps(args):
        for equation in launches(capability, step):
            print(
                json.dumps([step.model, step.weights, step.kv, step.bucket.name, launch(equation)])
            )


def steps(args: argparse.Namespace) -> Iterator[Step]:
    """Every weight format with plain keys and values, and every KV format with plain weights. Other
    combinations have the same kernels."""
    pairs = [(weights, "bf16") for weights in args.weights]
    pairs += [("bf16", kv) for kv in args.kv if kv != "bf16"]
    for model in args.models:
        spec = NAMED_MODELS[model]
        tile_size = tile_tokens(spec.q_heads // spec.kv_heads)
        buckets = [Bucket.decode(rows) for rows in args.decode]
        buckets += [
            Bucket.mixed(
                tokens, max_rows=MAX_SEQS, tile_size=tile_size, updates=2 * min(tokens, MAX_SEQS)
            )
            for tokens in args.prefill
        ]
        for weights, kv in pairs:
            for bucket in buckets:
                yield Step(model=model, weights=weights, kv=kv, bucket=bucket)


def launches(capability: int, step: Step) -> list[Any]:
    """The equations of a step that call kernels."""
    spec = spec_of(step)
    target = Target.for_gpu(capability).replace(checked=False)
    traced = jax.make_jaxpr(step_function(spec, step, target))(*arguments(spec, step))
    return list(kernel_calls(traced.jaxpr))


def spec_of(step: Step) -> ModelSpec:
    """The step's model, with two layers, since the last one differs from the others; with recurrent
    ones up to the first with attention."""
    spec = NAMED_MODELS[step.model]
    attention = next(index for index, layer in enumerate(spec.layers) if layer.attention)
    return dataclasses.replace(spec, layers=spec.layers[: max(2, attention + 1)])


def step_function(spec: ModelSpec, step: Step, target: Target) -> Callable[..., Any]:
    return functools.partial(
        run_step,
        spec=spec,
        bucket=step.bucket,
        sampled_vocab=spec.vocab_size,
        target=target,
    )


@functools.cache
def parameters(spec: ModelSpec, weights: str) -> Any:
    plain = decoder.abstract(spec, jnp.bfloat16, stacked=True)
    if weights == "bf16":
        return plain
    head = None if spec.embed % 128 else "fp8" if weights == "fp8" else "int8"
    return encoded_abstract(plain, encoder(spec, weights, head))


def arguments(spec: ModelSpec, step: Step) -> tuple[Any, DeviceState, jax.ShapeDtypeStruct]:
    kv_format = named(step.kv)
    page_size = kv_format.page_size or 64
    cache = kv_cache.cache_config(spec, [PAGES] * len(spec.cache_groups), page_size)
    groups = kv_cache.shapes(spec, cache, MAX_SEQS)
    recurrent = delta_net.abstract_state(spec, jnp.bfloat16, MAX_SEQS + 1)
    state = DeviceState(
        kv=(
            *(kv_format.abstract(each, jnp.bfloat16) for each in groups),
            *(() if recurrent is None else (recurrent,)),
        ),
        sequences=jax.ShapeDtypeStruct(
            sequence_state.shape(MAX_SEQS, spec.max_position // page_size, len(groups)), jnp.int32
        ),
        tables=slot_tables.abstract(MAX_SEQS, spec.vocab_size),
        pre_mlp=decoder.abstract_pre_mlp(spec, jnp.bfloat16, max(step.bucket.tokens, MAX_TOKENS)),
        results=jax.ShapeDtypeStruct((MAX_SEQS + 1, batch.RESULT_COLUMNS), jnp.int32),
    )
    packed = jax.ShapeDtypeStruct((step.bucket.packed_size,), jnp.int32)
    return parameters(spec, step.weights), state, packed


def kernel_calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "triton_kernel_call":
            yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernel_calls(inner)


def launch(equation: Any) -> list[Any]:
    params = equation.params
    constants = {name: str(value) for name, value in sorted(params["metaparams"].items())}
    options = {name: str(value) for name, value in sorted(params["backend_options"].items())}
    shapes = [str(var.aval) for var in (*equation.invars, *equation.outvars)]
    return [params["name"], params["fn"].__name__, str(params["grid"]), constants, options, shapes]


def variant(equation: Any, *, sizes: bool) -> tuple[Any, tuple[int, ...]]:
    """A key of the machine code, which includes sizes only if `sizes` is true; and the sizes."""
    params = equation.params
    given = sorted(params["metaparams"].items())
    constants = tuple(
        (name, str(value)) for name, value in given if sizes or not is_size(name, value)
    )
    options = tuple(sorted((name, str(value)) for name, value in params["backend_options"].items()))
    dtypes = tuple(str(var.aval.dtype) for var in (*equation.invars, *equation.outvars))
    size = tuple(int(value) for name, value in given if is_size(name, value))
    return (params["fn"], constants, options, dtypes), size


def is_size(name: str, value: Any) -> bool:
    """Whether a constant is a size that only bounds loops, like a group that is a whole row."""
    return name in SIZES or (name == "GROUP" and value > 128)


def failure(equation: Any) -> str | None:
    """Why a kernel does not compile or does not fit the GPU, in one line; None if it does."""
    from jaxserve_kernels.pdl.describe import describe

    try:
        describe(equation)
    except Exception as error:  # a compiler may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


if __name__ == "__main__":
    main()
