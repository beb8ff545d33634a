"""Times steps with prefill: every token bucket, prompts in chunks, and chunks beside decode rows.

    python scripts/bench_mixed.py --out mixed.json
    python scripts/bench_mixed.py --buckets 512,1024 --profile

Every step runs as in the engine: from the scheduler's plan, one step ahead. The floor of a step is
the larger of two times, at rates measured in the same process: copying its bytes (weights once,
keys and values of each sequence once), and computing its operations at the rate of a large product.
The operations are the model's:

- two per weight and token, counting the output matrix for sampled tokens only, and of the experts
  only those that the token uses;
- four per head, dimension and visible key;
- six per element of a recurrent layer's state.

With --quantization the floor is still that of bfloat16 weights and products, so that ratios are
comparable. Only experts are counted with their quantised bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import bench_step
import jax
import jax.numpy as jnp
from decode_steps import weight_bytes
from random_weights import LAYER_FORMATS, encoder
from rich.console import Console
from rich.table import Table
from turns import turn

from jaxserve.api import SamplingParams
from jaxserve.config import Buckets, SchedulerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, delta_net
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.plan import Admission, PageEntry, Row, StepPlan
from jaxserve.runner import kv_cache
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.startup.memory import tree_bytes
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels.kv_format import NAMES, named
from jaxserve_kernels.paged_attention import tile_tokens

LONGEST = 40_960
DECODE_CONTEXT = 1024
PROMPT_SLOT = 0
"""The prompt's slot; decodes take the slots after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of the card, measured in this process."""

    copy: float
    """Bytes per second, read plus written."""
    product: float
    """Operations per second of a bfloat16 product with random operands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A prefill chunk of `chunk` tokens from position `start`, beside `decodes` decode rows."""

    chunk: int
    start: int = 0
    decodes: int = 0

    def operations(self, spec: ModelSpec) -> float:
        tokens, head = self.chunk + self.decodes, spec.vocab_size * spec.embed
        body = spec.active_params - head * (1 if spec.tie_embeddings else 2)
        keys = self.chunk * self.start + self.chunk * (self.chunk + 1) / 2
        keys += self.decodes * DECODE_CONTEXT
        attention = 4 * spec.num_paged_layers * spec.q_heads * spec.head_dim * keys
        state = delta_net.abstract_state(spec, jnp.bfloat16, slots=1)
        recurrent = 0 if state is None else 6 * state.delta.size * tokens
        return 2 * body * tokens + 2 * head * (1 + self.decodes) + attention + recurrent

    def bytes(self, spec: ModelSpec, params: decoder.Params) -> float:
        if spec.experts:
            weights = weight_bytes(params, spec, self.chunk + self.decodes)
        else:
            looked_up = 0 if spec.tie_embeddings else spec.vocab_size * spec.embed
            weights = 2 * (spec.num_params - looked_up)
        state = tree_bytes(delta_net.abstract_state(spec, jnp.bfloat16, slots=1))
        held = self.start + self.chunk + self.decodes * DECODE_CONTEXT
        return weights + held * spec.kv_bytes_per_token(2) + 2 * (1 + self.decodes) * state

    def floor_ms(self, spec: ModelSpec, params: decoder.Params, rates: Rates) -> float:
        return (
            max(self.bytes(spec, params) / rates.copy, self.operations(spec) / rates.product) * 1e3
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Times in milliseconds; `bucket` is the token bucket that the work ran in."""

    bucket: int
    chunk: int
    start: int
    decodes: int
    step_ms: float
    host_ms: float
    floor_ms: float
    tflop_per_s: float


def main() -> None:
    args = parse_args()
    spec = NAMED_MODELS[args.model]
    if args.layers:
        spec = dataclasses.replace(spec, layers=spec.layers[: args.layers])
    with turn(args.turns):
        rates = Rates(copy=bench_step.copy_bandwidth(), product=product_rate())
    runner, config, params = make_runner(spec, args)
    admit(runner, config, args.decodes)
    rounds: list[list[Timing]] = []
    for _ in range(args.rounds):
        with turn(args.turns):
            rounds.append(
                [
                    time_step(runner, config, params, work, rates, args.steps)
                    for work in works(args.buckets, args.decodes)
                ]
            )
    timings = [bench_step.middle(times) for times in zip(*rounds, strict=True)]
    with turn(args.turns):
        prompts = [time_prompt(runner, config, params, length, rates) for length in args.prompts]
    result = describe(args, rates, timings, prompts)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    if args.profile:
        with turn(args.turns):
            for work in works(args.buckets, args.decodes):
                what = f"{work.chunk} tokens from {work.start} on, {work.decodes} decodes"
                bench_step.profile_plans(runner, [plan_of(config, work)] * 12, what)


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    buckets = [64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--buckets", type=sizes, default=buckets, help="token buckets")
    parser.add_argument("--decodes", type=int, default=64, help="decode rows beside a chunk")
    parser.add_argument("--prompts", type=sizes, default=[256, 1024, 4096, 16384])
    parser.add_argument("--steps", type=int, default=12, help="timed steps per case")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds over all steps; the median counts"
    )
    parser.add_argument(
        "--turns", type=Path, metavar="FILE", help="use the card only while this file is locked"
    )
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--quantization", choices=LAYER_FORMATS)
    parser.add_argument("--lm-head-dtype", choices=("int8", "fp8"))
    parser.add_argument(
        "--fp8-copy", action="store_true", help="add fp8 copies of 4-bit weights, as served"
    )
    parser.add_argument("--kv-cache-dtype", choices=NAMES, default="auto")
    parser.add_argument("--page-size", type=int, default=64, help="unless the format fixes it")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each bucket")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def product_rate() -> float:
    """Operations per second of a product of 8192 x 8192 x 8192 in bfloat16 with random operands.

    Measured in the second half of two seconds. It is a tenth faster at first, until the card
    reaches its power limit, where consecutive steps keep it too.
    """
    size = 8192
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys(2))
    product = jax.jit(lambda a, b: a @ b)
    product(left, right).block_until_ready()
    seconds: list[float] = []
    while sum(seconds) < 0.2:
        start = time.perf_counter()
        for _ in range(10):
            out = product(left, right)
        out.block_until_ready()
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * size**3 / median(seconds[len(seconds) // 2 :])


def keys(count: int) -> Sequence[jax.Array]:
    return jax.random.split(jax.random.key(0), count)


def make_runner(
    spec: ModelSpec, args: argparse.Namespace
) -> tuple[Runner, RunnerConfig, decoder.Params]:
    kv_format = named(args.kv_cache_dtype)
    page_size = kv_format.page_size or args.page_size
    per_decode = -(-(DECODE_CONTEXT + 1) // page_size)
    longest = max([16_384 + max(args.buckets), *args.prompts])
    pages = 1 + -(-longest // page_size) + args.decodes * per_decode
    # Recurrent state is large, so such a model gets only the slots that these steps need.
    seqs = 1 + args.decodes if spec.state is not None else min(256, max(args.buckets))
    config = RunnerConfig(
        spec=spec,
        cache=kv_cache.cache_config(
            spec, [pages] * len(spec.cache_groups), page_size, kv_format.own_tokens
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=seqs,
            max_model_len=LONGEST,
            max_num_batched_tokens=max(args.buckets),
            max_chunk_context=kv_format.max_chunk_context(LONGEST, page_size=page_size),
        ),
        buckets=Buckets(decode=(1,), prefill=tuple(args.buckets)),
        dtype=jnp.bfloat16,
        sampled_vocab=spec.vocab_size,
        tile_size=tile_tokens(spec.q_heads // spec.kv_heads),
        kv_format=kv_format,
    )
    abstract = decoder.abstract(spec, jnp.bfloat16, stacked=True)
    params = dummy_params(abstract, 0, encoder(spec, args.quantization, args.lm_head_dtype))
    if args.fp8_copy:
        params = bench_step.copied(params)
    runner = Runner(config, params, Metrics("bench"))
    start = time.perf_counter()
    runner.compile(os.cpu_count() or 1, lambda name, done: None)
    print(f"compiled {len(config.all_buckets())} buckets in {time.perf_counter() - start:.1f} s")
    return runner, config, params


def admit(runner: Runner, config: RunnerConfig, decodes: int) -> None:
    """The prompt takes slot 0 and as many pages as it may ever need; decodes the slots after it. In
    each cache group they have the same pages, also those that a window has left."""
    page_size = config.cache.page_size
    per_decode = -(-(DECODE_CONTEXT + 1) // page_size)
    own = config.cache.num_pages - 1 - decodes * per_decode
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    pages = [(PROMPT_SLOT, index, 1 + index) for index in range(own)]
    pages += [
        (1 + seq, index, 1 + own + seq * per_decode + index)
        for seq in range(decodes)
        for index in range(per_decode)
    ]
    groups = range(len(config.cache.groups))
    plan = dataclasses.replace(
        plan_of(config, Work(chunk=16)),
        admissions=(
            Admission(PROMPT_SLOT, sampling, num_prompt=LONGEST),
            *(Admission(1 + seq, sampling) for seq in range(decodes)),
        ),
        pages=tuple(PageEntry(*page, group) for group in groups for page in pages),
    )
    runner.collect(runner.launch(plan))


def works(buckets: Sequence[int], decodes: int) -> list[Work]:
    """Each bucket filled by one chunk: from 0, late in a long prompt, and beside decodes."""
    return [
        *(Work(chunk=bucket) for bucket in buckets),
        *(Work(chunk=bucket, start=4096) for bucket in buckets),
        *(Work(chunk=bucket, start=16_384 - bucket) for bucket in buckets),
        *(Work(chunk=bucket - decodes, decodes=decodes) for bucket in buckets if bucket > decodes),
    ]


def plan_of(config: RunnerConfig, work: Work) -> StepPlan:
    ids = tuple((7919 * index + 13) % config.spec.vocab_size for index in range(work.chunk))
    rows = [Row(1 + seq, 1 + seq, DECODE_CONTEXT, (), True) for seq in range(work.decodes)]
    rows.append(Row(0, PROMPT_SLOT, work.start, ids, True))
    return StepPlan(rows=tuple(rows))


def run(runner: Runner, plans: Sequence[StepPlan]) -> tuple[float, float]:
    """Seconds for all plans, one step ahead, and the median that launching one took."""
    host: list[float] = []
    pending = None
    start = time.perf_counter()
    for plan in plans:
        before = time.perf_counter()
        launched = runner.launch(plan)
        host.append(time.perf_counter() - before)
        if pending is not None:
            runner.collect(pending)
        pending = launched
    assert pending is not None
    runner.collect(pending)
    return time.perf_counter() - start, median(host)


def time_step(
    runner: Runner,
    config: RunnerConfig,
    params: decoder.Params,
    work: Work,
    rates: Rates,
    steps: int,
) -> Timing:
    plan = plan_of(config, work)
    run(runner, [plan] * 3)
    seconds, host = run(runner, [plan] * steps)
    tokens = work.chunk + work.decodes
    return Timing(
        bucket=min(bucket for bucket in config.buckets.prefill if bucket >= tokens),
        **dataclasses.asdict(work),
        step_ms=seconds / steps * 1e3,
        host_ms=host * 1e3,
        floor_ms=work.floor_ms(config.spec, params, rates),
        tflop_per_s=work.operations(config.spec) * steps / seconds / 1e12,
    )


def time_prompt(
    runner: Runner, config: RunnerConfig, params: decoder.Params, length: int, rates: Rates
) -> dict[str, float]:
    """Milliseconds from the launch of a prompt's first chunk until its first token arrives."""
    largest = config.buckets.prefill[-1]
    parts = [
        Work(chunk=min(largest, length - start), start=start) for start in range(0, length, largest)
    ]
    plans = [plan_of(config, part) for part in parts]
    run(runner, plans)
    seconds = median(run(runner, plans)[0] for _ in range(5))
    operations = sum(part.operations(config.spec) for part in parts)
    return {
        "prompt": length,
        "first_token_ms": seconds * 1e3,
        "floor_ms": sum(part.floor_ms(config.spec, params, rates) for part in parts),
        "tflop_per_s": operations / seconds / 1e12,
    }


def describe(
    args: argparse.Namespace,
    rates: Rates,
    timings: list[Timing],
    prompts: list[dict[str, float]],
) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "card": device.device_kind,
        "jax": jax.__version__,
        "driver": device.client.platform_version,
        "model": args.model,
        "layers": args.layers,
        "quantization": args.quantization,
        "lm_head_dtype": args.lm_head_dtype,
        "fp8_copy": args.fp8_copy,
        "kv_cache_dtype": args.kv_cache_dtype,
        "copy_tb_per_s": rates.copy / 1e12,
        "product_tflop_per_s": rates.product / 1e12,
        "decode_context": DECODE_CONTEXT,
        "timings": [dataclasses.asdict(timing) for timing in timings],
        "prompts": prompts,
    }


def show(result: dict[str, Any]) -> None:
    rates = f"{result['copy_tb_per_s']:.2f} TB/s, {result['product_tflop_per_s']:.0f} TFLOP/s"
    table = Table(title=f"{result['model']} on {result['card']}, {rates}")
    columns = ("bucket", "chunk", "start", "decodes", "step ms", "floor ms", "ratio")
    columns += ("TFLOP/s", "host ms")
    for column in columns:
        table.add_column(column, justify="right")
    for each in result["timings"]:
        table.add_row(
            *(str(each[column]) for column in columns[:4]),
            f"{each['step_ms']:.3f}",
            f"{each['floor_ms']:.3f}",
            f"{each['step_ms'] / each['floor_ms']:.2f}",
            f"{each['tflop_per_s']:.0f}",
            f"{each['host_ms']:.3f}",
        )
    Console(width=110).print(table)
    for each in result["prompts"]:
        ratio = each["first_token_ms"] / each["floor_ms"]
        print(
            f"prompt of {each['prompt']}: {each['first_token_ms']:.2f} ms to its first token, "
            f"floor {each['floor_ms']:.2f}, ratio {ratio:.2f}, "
            f"{each['tflop_per_s']:.0f} TFLOP/s"
        )


if __name__ == "__main__":
    main()
