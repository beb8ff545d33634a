"""Measure the step-time table of a model on this card, and how well it predicts other steps.

    python -m lab.simulation.measure_steps --model qwen3-4b --out step_times.json

Writes what the scheduler measures at start-up, for the simulator; prints steps of many kinds with
their predicted and their measured time.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.9)

import jax
import jax.numpy as jnp

from jaxserve.config import Buckets, CacheConfig, SchedulerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.models import decoder
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.startup.buckets import GPU_DECODE, GPU_PREFILL
from jaxserve.startup.measure import _decode_rows, _Stopwatch, measure
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels.paged_attention import tile_tokens


def main() -> None:
    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-gib", type=float, default=46.0)
    parser.add_argument("--decode-buckets", type=sizes, default=GPU_DECODE)
    parser.add_argument("--prefill-buckets", type=sizes, default=GPU_PREFILL)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    runner, config = make_runner(args)
    start = time.perf_counter()
    times = measure(runner, config)
    print(f"measured in {time.perf_counter() - start:.2f} s: {times}")
    if args.out:
        device = jax.devices()[0].device_kind
        times.save(args.out, card=device, model=args.model, page_size=args.page_size)
    watch = _Stopwatch(runner, config)
    for rows in (1, 8, 32, 64, 128, 256):
        for context in (64, 1024, 4096):
            if rows <= config.scheduler.max_num_seqs and rows * context < 400_000:
                took = watch.of(_decode_rows(rows, context))
                predicted = times.of_decode(rows, rows * context)
                show(f"decode {rows} x {context}", predicted, took)
    for tokens in config.buckets.prefill:
        for rows, context in ((0, 0), (8, 1024), (32, 1024), (64, 1024), (128, 1024)):
            for before in (0, 4096, 15000):
                chunk = tokens - rows
                if chunk < 1 or rows >= config.scheduler.max_num_seqs:
                    continue
                took = watch.of(
                    [*_decode_rows(rows, context), *watch.chunk(chunk, before, slot=rows)]
                )
                predicted = times.of_mixed(tokens, rows, rows * context, chunk * before, before)
                show(f"mixed {rows} x {context} + {chunk} after {before}", predicted, took)


def make_runner(args: argparse.Namespace) -> tuple[Runner, RunnerConfig]:
    spec = NAMED_MODELS[args.model]
    page_bytes = spec.kv_bytes_per_token(2) * args.page_size
    config = RunnerConfig(
        spec=spec,
        cache=CacheConfig(
            num_pages=int(args.kv_gib * 2**30) // page_bytes, page_size=args.page_size
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max(args.decode_buckets),
            max_model_len=40_960,
            max_num_batched_tokens=max(args.prefill_buckets),
        ),
        buckets=Buckets(decode=args.decode_buckets, prefill=args.prefill_buckets),
        dtype=jnp.bfloat16,
        sampled_vocab=spec.vocab_size,
        tile_size=tile_tokens(spec.q_heads // spec.kv_heads),
    )
    params = dummy_params(decoder.abstract(spec, jnp.bfloat16, stacked=True), 0)
    runner = Runner(config, params, Metrics("measure"))
    runner.compile(os.cpu_count() or 1, lambda name, done: None)
    return runner, config


def show(step: str, predicted: float, took: float) -> None:
    print(f"{step:36} {took * 1e3:8.3f} ms, predicted {predicted * 1e3:8.3f}", flush=True)


if __name__ == "__main__":
    main()
