"""Tunes the launch parameters of the decode step's kernels on this card.

    python scripts/tune_kernels.py --model qwen3-4b --batch 1,8,16 --seconds 600

Each candidate is timed inside a whole step, because cache contents and the overlap with
neighbouring kernels matter. One operation is changed at a time; its best candidate stays while the
next operation is tuned. With --write the results are stored in the card's tables, with this command
as their source.

    python scripts/tune_kernels.py --dry-run --gpu l40s

prints the candidates for a card, which need not be present.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.8)

import jax
import jax.numpy as jnp
import numpy as np
from tuning import Key, candidates, operations, pretended, write

from jaxserve.cli.gpus import GPUS
from jaxserve.config import Buckets, CacheConfig, SchedulerConfig
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.plan import Row, StepPlan
from jaxserve.runner import batch, sequence_state
from jaxserve.runner.batch import Bucket, Updates
from jaxserve.runner.programs import RunnerConfig, programs
from jaxserve.runner.step import DeviceState
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels import tables
from jaxserve_kernels.device import Device
from jaxserve_kernels.target import Parameters, Target

PAGE_SIZE = 64
START = time.monotonic()


class Bench:
    """Decode steps of a model with few layers, all sequences at one context length."""

    def __init__(self, spec: ModelSpec, rows: int, context: int):
        per_seq = context // PAGE_SIZE + 1
        self.config = config = RunnerConfig(
            spec=spec,
            cache=CacheConfig(num_pages=1 + rows * per_seq, page_size=PAGE_SIZE),
            scheduler=SchedulerConfig(
                max_num_seqs=rows, max_model_len=spec.max_position, max_num_batched_tokens=512
            ),
            buckets=Buckets(decode=(rows,), prefill=(512,)),
            dtype=jnp.bfloat16,
            sampled_vocab=spec.vocab_size,
            tile_size=32,
        )
        self.bucket = Bucket.decode(rows)
        self.params = dummy_params(decoder.abstract(spec, jnp.bfloat16, stacked=True), 0)
        (empty,) = (each for each in programs(config, self.params) if each.name == "state")
        self.empty = empty.compile()
        sequences = np.zeros(config.sequences_shape, np.int32)
        pages = 1 + np.arange(rows * per_seq).reshape(rows, per_seq)
        sequences[:rows, sequence_state.PAGES : sequence_state.PAGES + per_seq] = pages
        self.sequences = sequences
        self.state = self.fresh_state()
        plan = StepPlan(rows=tuple(Row(slot, slot, context, (), True) for slot in range(rows)))
        updates = Updates.of(plan, sequences.shape[1])
        self.packed = jnp.asarray(batch.pack(plan, updates, self.bucket, padding_slot=rows))

    def fresh_state(self) -> DeviceState:
        return self.empty()._replace(sequences=jnp.asarray(self.sequences))

    def compile(self, parameters: Mapping[Key, Parameters]) -> Any:
        target = Target.here().with_tuned(parameters)
        steps = programs(dataclasses.replace(self.config, target=target), self.params)
        (step,) = (each for each in steps if each.name == f"step_{self.bucket.name}")
        return step.compile()

    def time(self, program: Any, steps: int = 100, rounds: int = 5) -> float:
        """Microseconds per step, in the fastest of several rounds."""
        for _ in range(3):  # by the third call the graph is recorded
            self.state = program(self.params, self.state, self.packed)
        jax.block_until_ready(self.state.results)
        best = float("inf")
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(steps):
                self.state = program(self.params, self.state, self.packed)
            jax.block_until_ready(self.state.results)
            best = min(best, (time.perf_counter() - start) / steps * 1e6)
        return best


def tune(
    bench: Bench, keys: dict[str, Key], tokens: int, device: Device, deadline: float
) -> dict[Key, Any]:
    """The best parameters found until the deadline."""
    best: dict[Key, dict[str, int]] = {}
    program = bench.compile({})
    fastest = bench.time(program)
    print(f"batch {tokens}: {fastest:.1f} us by the heuristics", flush=True)

    def attempt(name: str, key: Key, tried: list[dict[str, int]]) -> None:
        nonlocal fastest

        def compiled(parameters: dict[str, int]) -> Any:
            if time.monotonic() > deadline:
                return None
            try:
                return bench.compile({**best, key: parameters})
            except Exception as error:  # too much shared memory, a tile that Triton refuses
                return error

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = list(pool.map(compiled, tried))
        results = []
        for parameters, program in zip(tried, programs, strict=True):
            if program is None or isinstance(program, Exception):
                if program is not None:
                    print(f"  {name} {parameters}: {str(program)[:100]}", flush=True)
                continue
            try:
                results.append((bench.time(program), parameters))
            except Exception as error:
                print(f"  {name} {parameters}: {str(error)[:100]}", flush=True)
                bench.state = bench.fresh_state()  # the old one was donated
        results.sort(key=lambda result: result[0])
        for took, parameters in results[:6] + results[-1:]:
            print(f"  {name:9} {took:8.1f} us  {parameters}", flush=True)
        if results and results[0][0] < fastest * 0.998:
            fastest, best[key] = results[0]
        print(f"batch {tokens}: {fastest:.1f} us after {name}, {len(results)} tried", flush=True)

    for name, key in keys.items():
        attempt(name, key, candidates(key, tokens, device))
    return best


def main() -> None:
    args = parse_args()
    spec = NAMED_MODELS[args.model]
    spec = dataclasses.replace(spec, layers=spec.layers[: args.layers])
    keys = operations(spec)
    if args.operations:
        keys = {name: key for name, key in keys.items() if name in args.operations}
    device = pretended(args.gpu) if args.gpu else Target.here().gpu
    if args.dry_run:
        dry_run(keys, args.batch, device)
        return
    if args.gpu:
        raise SystemExit("--gpu needs --dry-run: kernels are timed on the card of this machine")
    day, call = time.strftime("%Y-%m-%d"), " ".join(sys.argv[1:])
    source = f"scripts/tune_kernels.py {call}, jax {jax.__version__}, {day}"
    found: dict[str, list[dict[str, Any]]] = {}
    for index, tokens in enumerate(args.batch):
        seconds = args.seconds - (time.monotonic() - START)
        deadline = time.monotonic() + seconds / (len(args.batch) - index)
        bench = Bench(spec, tokens, args.context)
        for (operation, shape), parameters in tune(bench, keys, tokens, device, deadline).items():
            entry = {
                "shape": shape, "tokens": tokens, "parameters": parameters, "source": source,
            }  # fmt: skip
            found.setdefault(operation, []).append(entry)
    for operation, entries in found.items():
        print(operation, json.dumps(entries))
        if args.write:
            print(write(operation, entries, device, Path(tables.__file__).parent))


def dry_run(keys: Mapping[str, Key], batches: list[int], device: Device) -> None:
    """Prints the candidates for a card."""
    print(f"{device.name}: {device.multiprocessors} multiprocessors")
    for tokens in batches:
        for name, key in keys.items():
            tried = candidates(key, tokens, device)
            print(f"batch {tokens}, {name} {key[1]}: {len(tried)} candidates")
            for parameters in tried:
                print(f"  {parameters}")


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b", help="default: qwen3-4b")
    add("--batch", type=sizes, default=[1, 16], help="sequences of a step; default: 1,16")
    add("--context", type=int, default=1024, help="tokens of each sequence; default: 1024")
    add("--layers", type=int, default=6, help="enough to exceed the L2 cache; default: 6")
    add("--operations", type=names, help="only these; default: all that a decode step has")
    add("--seconds", type=float, default=600, help="time for everything; default: 600")
    add("--write", action="store_true", help="write the card's tables, not only print")
    add("--dry-run", action="store_true", help="print the candidates; needs no GPU with --gpu")
    add("--gpu", choices=sorted(GPUS), help="the card of --dry-run; default: this machine's")
    return parser.parse_args()


if __name__ == "__main__":
    main()
