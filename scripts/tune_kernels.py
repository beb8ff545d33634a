"""Find launch parameters of the decode step's kernels on this card, and write them for it.

    python scripts/tune_kernels.py --model qwen3-4b --batch 1,8,16 --seconds 600

Each candidate is timed inside the step that it will run in: what a kernel leaves in the caches,
and how it overlaps with its neighbours, counts. One operation is changed at a time; the best
candidate stays while the next operation is tried. The results go into the card's tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.8)

import jax
import jax.numpy as jnp
import numpy as np

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
from jaxserve_kernels.target import Parameters, Shape, Target

type Key = tuple[str, Shape]

SHARED_MEMORY = 227 * 1024
PAGE_SIZE = 64
START = time.monotonic()


def operations(spec: ModelSpec) -> dict[str, Key]:
    """What is tuned, in the order of the bytes that it reads."""
    qkv, ffn = spec.q_size + 2 * spec.kv_size, spec.ffn
    return {
        "gate_up": ("dense_matmul", ("gated", 2 * ffn, spec.embed)),
        "down": ("dense_matmul", ("linear", spec.embed, ffn)),
        "qkv": ("dense_matmul", ("linear", qkv, spec.embed)),
        "out": ("dense_matmul", ("linear", spec.embed, spec.q_size)),
        "attention": ("paged_attention", (spec.q_heads // spec.kv_heads, spec.kv_heads)),
        "head": ("dense_matmul", ("linear", spec.vocab_size, spec.embed)),
    }


def products(shape: Shape, tokens: int) -> Iterator[dict[str, int]]:
    """Tilings that fill the card, with enough bytes under way and not too much shared memory."""
    kind, out, depth = shape
    assert isinstance(out, int)
    assert isinstance(depth, int)
    columns = max(16, tokens)
    for rows, step, stages in itertools.product((16, 32, 64, 128), (128, 256), (3, 4, 6)):
        size = (rows + columns) * step * 2 * stages
        if out % rows or depth % step or not 40_000 < size < SHARED_MEMORY:
            continue
        resident = max(1, min(SHARED_MEMORY // size, 8))
        if not 8 * 1024 <= rows * step * 2 <= 32 * 1024 or size * resident < 96 * 1024:
            continue
        for splits in range(1, 17):
            programs = out // rows * splits
            if depth // step % splits or (kind == "gated" and splits > 1):
                continue
            full = programs / (Target.here().gpu.multiprocessors * resident)
            if kind != "gated" and out < 100_000 and not 0.6 <= full <= 2:
                continue
            if splits > 1 and depth // step // splits < 3:
                continue
            yield {
                "rows": rows, "depth": step, "splits": splits,
                "num_warps": 8 if rows == 128 else 4, "num_stages": stages,
            }  # fmt: skip


def attentions(tokens: int, kv_heads: int) -> Iterator[dict[str, int]]:
    for splits, warps, stages in itertools.product((1, 2, 4, 8, 16, 32), (2, 4), (2, 3)):
        if 64 <= tokens * kv_heads * splits <= 528:
            yield {"splits": splits, "num_warps": warps, "num_stages": stages}


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
        """Microseconds per step: the least of some rounds."""
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


def candidates(name: str, key: Key, tokens: int) -> list[dict[str, int]]:
    if name == "attention":
        kv_heads = key[1][1]
        assert isinstance(kv_heads, int)
        return list(attentions(tokens, kv_heads))
    return list(products(key[1], tokens))


def tune(bench: Bench, keys: dict[str, Key], tokens: int, deadline: float) -> dict[Key, Any]:
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
        attempt(name, key, candidates(name, key, tokens))
    return best


def main() -> None:
    args = parse_args()
    spec = NAMED_MODELS[args.model]
    spec = dataclasses.replace(spec, layers=spec.layers[: args.layers])
    keys = operations(spec)
    if args.operations:
        keys = {name: key for name, key in keys.items() if name in args.operations}
    found: dict[str, list[dict[str, Any]]] = {}
    for index, tokens in enumerate(args.batch):
        seconds = args.seconds - (time.monotonic() - START)
        deadline = time.monotonic() + seconds / (len(args.batch) - index)
        bench = Bench(spec, tokens, args.context)
        for (operation, shape), parameters in tune(bench, keys, tokens, deadline).items():
            entry = {"shape": shape, "tokens": tokens, "parameters": parameters}
            found.setdefault(operation, []).append(entry)
    for operation, entries in found.items():
        print(operation, json.dumps(entries))
        if args.write:
            write(operation, entries)


def write(operation: str, entries: list[dict[str, Any]]) -> None:
    """Replace the entries of these shapes and numbers of tokens in this card's table."""
    device = Target.here().gpu
    file = Path(tables.__file__).parent / operation / tables.file_name(device.name)
    table: dict[str, Any] = {
        "device": device.name, "compute_capability": device.compute_capability,
        "limits": {}, "launches": [],
    }  # fmt: skip
    if file.is_file():
        table = json.loads(file.read_text())
    source = f"scripts/tune_kernels.py {' '.join(sys.argv[1:])}, jax {jax.__version__}"
    entries = [entry | {"source": source} for entry in entries]
    new = {(tuple(each["shape"]), each["tokens"]): each for each in table["launches"] + entries}
    table["launches"] = [new[key] for key in sorted(new, key=str)]
    file.write_text(json.dumps(table, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--batch", type=sizes, default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6, help="enough for cold weights")
    parser.add_argument("--operations", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--seconds", type=float, default=600, help="time for everything")
    parser.add_argument("--write", action="store_true", help="write the files, not only print")
    return parser.parse_args()


if __name__ == "__main__":
    main()
