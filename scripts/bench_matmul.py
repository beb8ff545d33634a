"""Times a model's products in every weight format, against bfloat16 and against a floor.

    python scripts/bench_matmul.py --out matmul.json --plot matmul.svg --assert-ratio 1.05
    python scripts/bench_matmul.py --tokens 1,2048 --formats bf16,int4 --budget 5 --out some.json

Each result is printed and written when it is done. If the script was cut off, by --budget or
otherwise, it continues when run again with the same --out. --tiny uses small shapes, to try the
script without a card; its times mean nothing.

Products are called through `jaxserve_kernels.matmul`, so the choice of kernels and the quantisation
of tokens are included. They run many times in one CUDA graph, with different weights each time and
one after the other, as in a step. The floor is the larger of two times, at rates measured in this
process: copying the weight's bytes, and computing the product in bfloat16.

4-bit formats are timed with their codes only, and as -copy with an additional fp8 copy where a
product reads it. --assert-ratio then judges the copy, which the engine has by default.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from card_rates import copy_bandwidth, fastest, peak_flops
from matmul_report import (
    COPY,
    Timing,
    assert_never_slower,
    layer_totals,
    line,
    plot,
    show,
)
from random_weights import QUANTIZE

from jaxserve.model_spec import ModelSpec
from jaxserve.models import registry
from jaxserve.models.registry import NAMED_MODELS
from jaxserve_kernels import weights
from jaxserve_kernels.matmul import as_read, gated_linear, linear
from jaxserve_kernels.target import Target

HEADS = ("bf16", "int8", "fp8")
"""Formats of output matrices in the engine."""

CACHES = 256 * 10**6
"""Bytes of weights per case: several times a card's L2 cache."""

PRODUCTS, LARGE_PRODUCTS, TINY_PRODUCTS = 48, 16, 2
"""Products per program, enough to hide the cost of its launch. LARGE: for 1,024 tokens or more, and
for the output matrix. TINY: few, so that they compile fast."""

TOKENS, TINY_TOKENS = [1, 16, 64, 128, 256, 512, 1024, 2048, 8192], [1, 64, 128]

TINY = registry.spec_of(
    {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 256, "hidden_size": 256,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "rope_theta": 1e6,
    }
)  # fmt: skip


class Product(NamedTuple):
    """One of a model's products; `gated` ones are followed by SwiGLU's gating."""

    name: str
    out: int
    depth: int
    gated: bool = False
    head: bool = False


class Case(NamedTuple):
    product: Product
    format: str
    tokens: int


def main() -> None:
    args = parse_args()
    deadline = math.inf if args.budget is None else time.monotonic() + args.budget * 60
    spec = TINY if args.tiny else NAMED_MODELS[args.model]
    cases = [
        Case(product, name, tokens)
        for name in args.formats
        for product in products_of(spec)
        for tokens in args.tokens
        if (not product.head or (name in HEADS and tokens <= args.max_rows))
        and (not name.endswith(COPY) or reads_copy(product, name, tokens))
    ]
    result = earlier(args) or {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": "tiny" if args.tiny else args.model,
        "copy_tb_per_s": copy_bandwidth(tiny=args.tiny) / 1e12,
        "bf16_tflop_per_s": peak_flops(tiny=args.tiny) / 1e12,
        "products": [],
    }
    timings = [Timing(**timing) for timing in result["products"]]
    known = {(t.product, t.format, t.tokens): t.us for t in timings}
    left = [case for case in cases if key_of(case) not in known]
    print(f"{len(cases) - len(left)} of {len(cases)} products are known", flush=True)
    for case, us in measure(left, args.workers, deadline, tiny=args.tiny):
        known[key_of(case)] = us
        timings.append(describe(case, known, result))
        print(line(timings[-1]), flush=True)
        result["products"] = [dataclasses.asdict(timing) for timing in timings]
        result["layers"] = [dataclasses.asdict(timing) for timing in layer_totals(timings)]
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    timings += layer_totals(timings)
    show(result, timings)
    if args.plot:
        plot(result, timings, args.plot)
    if args.assert_ratio:
        assert_never_slower(timings, args.assert_ratio)
    if missing := sum(key_of(case) not in known for case in cases):
        raise SystemExit(f"--budget is spent: {missing} of {len(cases)} products were not measured")


def key_of(case: Case) -> tuple[str, str, int]:
    return case.product.name, case.format, case.tokens


def earlier(args: argparse.Namespace) -> dict[str, Any] | None:
    """The content of --out from a run with the same card, jax and model."""
    if args.out is None or not args.out.exists():
        return None
    found = json.loads(args.out.read_text())
    same = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": "tiny" if args.tiny else args.model,
    }
    if wrong := {name: found.get(name) for name in same if found.get(name) != same[name]}:
        raise SystemExit(f"{args.out} has {wrong}, this run has {same}: choose another file")
    return found


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def formats(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(QUANTIZE):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}; known: {sorted(QUANTIZE)}")
        return ["bf16", *(name for name in names if name != "bf16")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--tokens", type=sizes, help=f"default: {TOKENS}; tiny: {TINY_TOKENS}")
    parser.add_argument("--formats", type=formats, default=list(QUANTIZE))
    parser.add_argument(
        "--max-rows", type=int, default=256, help="most tokens for the output matrix"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling threads")
    parser.add_argument("--budget", type=float, help="begin nothing new after this many minutes")
    parser.add_argument("--out", type=Path, help="write the result as JSON, and continue from it")
    parser.add_argument("--plot", type=Path, help="draw a layer's time over the tokens, as SVG")
    parser.add_argument(
        "--assert-ratio",
        type=float,
        help="fail if a layer in any format takes more than this many times bfloat16's time",
    )
    args = parser.parse_args()
    args.tokens = args.tokens or (TINY_TOKENS if args.tiny else TOKENS)
    return args


def products_of(spec: ModelSpec) -> list[Product]:
    return [
        Product("qkv", spec.q_size + 2 * spec.kv_size, spec.embed),
        Product("out", spec.embed, spec.q_size),
        *([Product("gate_up", 2 * spec.ffn, spec.embed, gated=True)] if spec.ffn else []),
        *([Product("down", spec.embed, spec.ffn)] if spec.ffn else []),
        Product("head", spec.vocab_size, spec.embed, head=True),
    ]


def measure(
    cases: list[Case], workers: int, deadline: float, *, tiny: bool
) -> Iterator[tuple[Case, float]]:
    """Yields the microseconds of each case. One format at a time is in device memory. None begins
    after the deadline.

    All programs of a format are compiled before the first is timed, because creating an executable
    drops the CUDA graphs of the others.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.format, []).append(case)
    for name, members in groups.items():
        if time.monotonic() > deadline:
            return
        products = dict.fromkeys(case.product for case in members)
        stacked = {product: make_weights(product, name, tiny=tiny) for product in products}
        with ThreadPoolExecutor(workers) as pool:
            programs = list(
                pool.map(
                    lambda case: build(case, stacked[case.product], tiny=tiny),  # noqa: B023
                    members,
                )
            )
        for case, (program, x, products) in zip(members, programs, strict=True):
            seconds = fastest(program, x, stacked[case.product], calls=3) / products
            yield case, seconds * 1e6


def make_weights(product: Product, name: str, *, tiny: bool) -> Any:
    """Weights of several layers [layers, ...], in all several times as large as any cache."""
    layers = min(max(-(-CACHES // weight_bytes(product, name, 1)), 3), 32)
    layers = TINY_PRODUCTS if tiny else layers

    @jax.jit
    def one(layer: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(0), layer)
        noise = jax.random.normal(key, (product.out, product.depth), jnp.float32)
        return QUANTIZE[name]((noise * product.depth**-0.5).astype(jnp.bfloat16))

    parts = [one(jnp.int32(layer)) for layer in range(layers)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def build(case: Case, stacked: Any, *, tiny: bool) -> tuple[Any, jax.Array, int]:
    """A program that multiplies with each layer in turn, its tokens, and the number of products.

    The tokens of each product depend on the previous result. Otherwise XLA would merge products
    with the same tokens, copy their weights together, and quantise the tokens only once.
    """
    layers = jax.tree.leaves(stacked)[0].shape[0]
    products = LARGE_PRODUCTS if case.tokens >= 1024 or case.product.head else PRODUCTS
    products = TINY_PRODUCTS if tiny else products
    key = jax.random.key(case.tokens)
    x = jax.random.normal(key, (case.tokens, case.product.depth), jnp.bfloat16)

    def program(x: jax.Array, stacked: Any) -> jax.Array:
        leaves, tree = jax.tree.flatten(stacked)
        views = [tree.unflatten(leaf[index] for leaf in leaves) for index in range(layers)]
        kept = jnp.float32(0.0)
        for index in range(products):
            x, result = jax.lax.optimization_barrier(
                (x, product_of(case, x, views[index % layers]))
            )
            kept += result.reshape(-1)[0]  # uses each result, so that XLA drops none
        return kept

    return jax.jit(program).lower(x, stacked).compile(), x, products


def product_of(case: Case, x: jax.Array, weight: Any) -> jax.Array:
    if case.product.gated:
        return gated_linear(x, weight, target=Target.here())
    return linear(x, weight, jnp.float32 if case.product.head else x.dtype, target=Target.here())


def describe(
    case: Case, micros: dict[tuple[str, str, int], float], result: dict[str, Any]
) -> Timing:
    bandwidth, flops = result["copy_tb_per_s"] * 1e12, result["bf16_tflop_per_s"] * 1e12
    product, us = case.product, micros[key_of(case)]
    size = weight_bytes(product, case.format, case.tokens)
    work = 2 * case.tokens * product.out * product.depth
    return Timing(
        product=product.name,
        format=case.format,
        tokens=case.tokens,
        us=us,
        floor_us=max(size / bandwidth, work / flops) * 1e6,
        tb_per_s=size / us / 1e6,
        tflop_per_s=work / us / 1e6,
        ratio_to_bf16=us / micros[key_of(case._replace(format="bf16"))],
    )


def abstract_weight(product: Product, name: str) -> Any:
    plain = jax.ShapeDtypeStruct((product.out, product.depth), jnp.bfloat16)
    return jax.eval_shape(QUANTIZE[name], plain)


def reads_copy(product: Product, name: str, tokens: int) -> bool:
    """Whether a product reads the fp8 copy. With fewer tokens it reads the codes."""
    return isinstance(
        as_read(abstract_weight(product, name), tokens, target=Target.here()), weights.Fp8Weight
    )


def weight_bytes(product: Product, name: str, tokens: int) -> int:
    """Bytes of the weight that a product of this many tokens reads."""
    leaves = jax.tree.leaves(as_read(abstract_weight(product, name), tokens, target=Target.here()))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


if __name__ == "__main__":
    main()
