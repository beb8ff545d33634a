"""Time a model's products in every format of weights, against bfloat16 and against the floor.

    python scripts/bench_matmul.py --tokens 1,16,64,256,2048 --out matmul.json --plot matmul.svg
    python scripts/bench_matmul.py --formats bf16,int4 --assert-ratio 1.05

Each product is called through `jaxserve_kernels.matmul`, so the dispatch is measured with it,
many times in one CUDA graph with other weights each time, as a step does it. The floor is the
larger of the time in which the card copies the weight's bytes and that in which it computes the
product in bfloat16, both at rates measured in this process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.environment import prepare

prepare(gpu_memory_utilization=0.9)

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxserve.config import NAMED_MODELS, ModelSpec
from jaxserve_kernels import weights
from jaxserve_kernels.matmul import gated_linear, linear
from jaxserve_kernels.weights.iq2_xxs import Iq2XxsWeight


def random_iq2_xxs(weight: jax.Array) -> Iq2XxsWeight:
    """Any codes of the right shape: what they are makes no difference in time."""
    out, depth = weight.shape
    key = jax.random.key(depth)
    return Iq2XxsWeight(
        points=jax.random.bits(key, (out, depth // 8), jnp.uint8),
        signs=jax.random.bits(key, (out, depth // 32), jnp.uint32),
        d=jnp.full((out, depth // 256), 1e-3, jnp.float16),
    )


def with_zeros(weight: jax.Array) -> weights.Int4Weight:
    """Codes as they come, with whole zero points that are not all 8."""
    packed = weights.quantize_int4(weight)
    zero = jax.random.randint(jax.random.key(1), packed.scale.shape, 6, 11)
    return packed._replace(zero=zero)


QUANTIZE: dict[str, Callable[[jax.Array], Any]] = {
    "bf16": lambda weight: weight,
    "int4": weights.quantize_int4,
    "int4-g64": functools.partial(weights.quantize_int4, group=64),
    "int4-zeros": with_zeros,
    "fp8": weights.quantize_fp8,
    "int8": weights.quantize_int8,
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
    "iq2_xxs": random_iq2_xxs,
}
RUNS = 5
"""Of each program; the fastest counts."""


class Product(NamedTuple):
    """One of a model's products; `gated` ones are followed by SwiGLU's gating."""

    name: str
    out: int
    depth: int
    gated: bool = False
    head: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One product in one format; times in microseconds."""

    product: str
    format: str
    tokens: int
    us: float
    floor_us: float
    tb_per_s: float
    tflop_per_s: float
    ratio_to_bf16: float
    """The time over bfloat16's in this process; for `layer` and `head`, what a step sees."""


class Case(NamedTuple):
    product: Product
    format: str
    tokens: int


def main() -> None:
    args = parse_args()
    products = products_of(NAMED_MODELS[args.model])
    bandwidth, flops = copy_bandwidth(), peak_flops()
    cases = [
        Case(product, name, tokens)
        for product in products
        for name in args.formats
        for tokens in args.tokens
        if not product.head or tokens <= args.max_rows
    ]
    micros: dict[Case, float] = {}
    timings: list[Timing] = []
    for case, us in measure(cases, args.workers):
        micros[case] = us
        timings.append(describe(case, micros, bandwidth, flops))
        print(line(timings[-1]), flush=True)
    timings += layer_totals(timings, products)
    result = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": args.model,
        "copy_tb_per_s": bandwidth / 1e12,
        "bf16_tflop_per_s": flops / 1e12,
        "timings": [dataclasses.asdict(timing) for timing in timings],
    }
    show(result, timings)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, timings, args.plot)
    if args.assert_ratio:
        assert_never_slower(timings, args.assert_ratio)


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
    parser.add_argument("--tokens", type=sizes, default=[1, 16, 64, 128, 256, 512, 2048])
    parser.add_argument("--formats", type=formats, default=list(QUANTIZE))
    parser.add_argument("--max-rows", type=int, default=256, help="of the output matrix's product")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling threads")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--plot", type=Path, help="draw a layer's time over the tokens, as SVG")
    parser.add_argument(
        "--assert-ratio",
        type=float,
        help="fail if a layer in some format takes more than so many times bfloat16's time",
    )
    return parser.parse_args()


def products_of(spec: ModelSpec) -> list[Product]:
    return [
        Product("qkv", spec.q_size + 2 * spec.kv_size, spec.embed),
        Product("out", spec.embed, spec.q_size),
        Product("gate_up", 2 * spec.ffn, spec.embed, gated=True),
        Product("down", spec.embed, spec.ffn),
        Product("head", spec.vocab_size, spec.embed, head=True),
    ]


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of copies of 2 GiB of integers."""
    source = jnp.ones((2**29,), jnp.int32)
    seconds = fastest(jax.jit(lambda x: x + 1), source, calls=10)
    return 2 * source.nbytes / seconds


def peak_flops() -> float:
    """Of a large square product in bfloat16."""
    side = jnp.ones((8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / fastest(jax.jit(jnp.dot), side, side, calls=10)


def fastest(call: Callable[..., Any], *args: Any, calls: int) -> float:
    """Seconds of one call, from the best of several series of them."""
    for _ in range(3):
        jax.block_until_ready(call(*args))
    best = math.inf
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(calls):
            out = call(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def measure(cases: list[Case], workers: int) -> Iterator[tuple[Case, float]]:
    """Microseconds of each case. One product and format at a time holds device memory.

    All programs of it are compiled before the first is timed: making an executable drops the CUDA
    graphs of the others.
    """
    groups: dict[tuple[Product, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.product, case.format), []).append(case)
    for (product, name), members in groups.items():
        stacked = make_weights(product, name)
        # XLA tries cuBLASLt's algorithms out: nothing else may run on the card then.
        with ThreadPoolExecutor(1 if name == "bf16" else workers) as pool:
            programs = list(pool.map(lambda case: build(case, stacked), members))  # noqa: B023
        for case, (program, x, layers) in zip(members, programs, strict=True):
            seconds = fastest(program, x, stacked, calls=3) / layers
            yield case, seconds * 1e6


def make_weights(product: Product, name: str) -> Any:
    """Many layers' weights [layers, ...], together far larger than any cache."""
    layers = 3 if product.head else -(-(10**9) // (product.out * product.depth))

    @jax.jit
    def one(layer: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(0), layer)
        noise = jax.random.normal(key, (product.out, product.depth), jnp.float32)
        return QUANTIZE[name]((noise * product.depth**-0.5).astype(jnp.bfloat16))

    parts = [one(jnp.int32(layer)) for layer in range(layers)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def build(case: Case, stacked: Any) -> tuple[Any, jax.Array, int]:
    """A program of a product with each layer, its tokens, and the number of layers.

    Each weight is used once: XLA would merge products that share one. One element of each result
    is kept, so that none is dropped and the host has little to do.
    """
    layers = jax.tree.leaves(stacked)[0].shape[0]
    key = jax.random.key(case.tokens)
    x = jax.random.normal(key, (case.tokens, case.product.depth), jnp.bfloat16)

    def program(x: jax.Array, stacked: Any) -> jax.Array:
        leaves, tree = jax.tree.flatten(stacked)
        views = [tree.unflatten(leaf[index] for leaf in leaves) for index in range(layers)]
        results = [product_of(case, x, view) for view in views]
        return sum(result.reshape(-1)[0].astype(jnp.float32) for result in results)

    return jax.jit(program).lower(x, stacked).compile(), x, layers


def product_of(case: Case, x: jax.Array, weight: Any) -> jax.Array:
    if isinstance(weight, Iq2XxsWeight):
        return iq2_xxs_product(case, x, weight)
    if case.product.gated:
        return gated_linear(x, weight)
    return linear(x, weight, jnp.float32 if case.product.head else x.dtype)


def iq2_xxs_product(case: Case, x: jax.Array, weight: Iq2XxsWeight) -> jax.Array:
    """The engine does not serve this format: its kernels are called here."""
    from jaxserve_kernels.quantized_matmul import triton_iq2_xxs  # needs Triton

    product = triton_iq2_xxs.linear(x, weight)
    if case.product.gated:
        gate, up = jnp.split(product, 2, axis=-1)
        product = jax.nn.silu(gate) * up
    return product if case.product.head else product.astype(x.dtype)


def describe(case: Case, micros: dict[Case, float], bandwidth: float, flops: float) -> Timing:
    product, us = case.product, micros[case]
    size = weight_bytes(product, case.format)
    work = 2 * case.tokens * product.out * product.depth
    return Timing(
        product=product.name,
        format=case.format,
        tokens=case.tokens,
        us=us,
        floor_us=max(size / bandwidth, work / flops) * 1e6,
        tb_per_s=size / us / 1e6,
        tflop_per_s=work / us / 1e6,
        ratio_to_bf16=us / micros[case._replace(format="bf16")],
    )


def weight_bytes(product: Product, name: str) -> int:
    plain = jax.ShapeDtypeStruct((product.out, product.depth), jnp.bfloat16)
    leaves = jax.tree.leaves(jax.eval_shape(QUANTIZE[name], plain))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def layer_totals(timings: list[Timing], products: list[Product]) -> list[Timing]:
    """The four products of a layer together."""
    layer = {product.name for product in products if not product.head}
    groups: dict[tuple[str, int], list[Timing]] = {}
    for timing in timings:
        if timing.product in layer:
            groups.setdefault((timing.format, timing.tokens), []).append(timing)
    totals = {key: sum(timing.us for timing in group) for key, group in groups.items()}
    return [
        Timing(
            product="layer",
            format=name,
            tokens=tokens,
            us=totals[name, tokens],
            floor_us=sum(timing.floor_us for timing in group),
            tb_per_s=sum(t.tb_per_s * t.us for t in group) / totals[name, tokens],
            tflop_per_s=sum(t.tflop_per_s * t.us for t in group) / totals[name, tokens],
            ratio_to_bf16=totals[name, tokens] / totals["bf16", tokens],
        )
        for (name, tokens), group in groups.items()
    ]


def line(t: Timing) -> str:
    return (
        f"{t.product:8} {t.format:10} {t.tokens:5} tokens {t.us:7.1f} us, {t.ratio_to_bf16:.2f} of "
        f"bf16, {t.us / t.floor_us:.2f} of the floor"
    )


def assert_never_slower(timings: list[Timing], limit: float) -> None:
    slower = [
        f"{t.product} {t.format} at {t.tokens} tokens: {t.ratio_to_bf16:.2f} times bfloat16"
        for t in timings
        if t.product in ("layer", "head") and t.ratio_to_bf16 > limit
    ]
    if slower:
        raise SystemExit("slower than bfloat16:\n" + "\n".join(slower))


def show(result: dict[str, Any], timings: list[Timing]) -> None:
    title = (
        f"{result['model']} on {result['card']}: copy {result['copy_tb_per_s']:.2f} TB/s, "
        f"bfloat16 {result['bf16_tflop_per_s']:.0f} TFLOP/s; times over bfloat16's"
    )
    table = Table(title=title)
    table.add_column("tokens", justify="right")
    for name in dict.fromkeys(t.format for t in timings):
        table.add_column(name, justify="right")
    for product in ("layer", "head"):
        for tokens in dict.fromkeys(t.tokens for t in timings if t.product == product):
            cells = [
                f"{t.us:.0f} us ({t.ratio_to_bf16:.2f})"
                for t in timings
                if (t.product, t.tokens) == (product, tokens)
            ]
            table.add_row(f"{product} {tokens}", *cells)
    Console(width=140).print(table)


def plot(result: dict[str, Any], timings: list[Timing], path: Path) -> None:
    """A layer's products, time over tokens, one line for each format."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    layer = [timing for timing in timings if timing.product == "layer"]
    for name in dict.fromkeys(timing.format for timing in layer):
        line = [timing for timing in layer if timing.format == name]
        style = "o--" if name == "bf16" else "o-"
        axes.plot([t.tokens for t in line], [t.us for t in line], style, label=name, ms=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({timing.tokens for timing in layer})
    axes.set_xticks(ticks, [str(tokens) for tokens in ticks])
    axes.set_xlabel("tokens")
    axes.set_ylabel("µs for the four products of a layer")
    axes.set_title(f"{result['model']}, {result['card']}", fontsize=10)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
