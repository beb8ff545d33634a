"""What each KV format costs the embedded model: answers, long-context recall, and predictions.

    python -m lab.embedded.eval_kv_formats --out docs/measurements/kv_accuracy_h200.json
    python -m lab.embedded.eval_kv_formats --tasks recall_4k --formats fp8_e4m3,int8

Of each format, beside bfloat16: how many of the stored questions the model
answers right, greedily (recall_256 to recall_4k ask for one entry of a list of so many tokens; 4k
is the model's whole context); and teacher-forced over the prompts, from --first tokens on, how far
the distribution of the next token moves. Every format reads every prompt as one chunk. On a GPU
weights and activations are bfloat16 and the kernels that serve run; elsewhere they are float32, and
the formats' plain definitions run. A round takes one case of each task; results are printed and
written as they come, so a run may be stopped after any round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import batched, chain, zip_longest
from pathlib import Path
from typing import Any

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.3)

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.models import decoder, registry
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_kernels.kv_format import NAMES, named
from lab.embedded.cached_model import CachedModel, in_batches, shapes
from lab.embedded.chat import Encoder, render
from lab.embedded.divergence import compare_where, describe
from lab.embedded.evaluate import (
    MODEL_FOLDER,
    Result,
    accuracy,
    judge,
    load_cases,
    parse_answer,
    select,
)
from scripts.kv_formats import kv_formats

PLAIN = "bf16"
ON_GPU = jax.default_backend() == "gpu"
AT_ONCE = 25 if ON_GPU else 1
"""Rounds whose cases share batches."""


def main() -> None:
    args = parse_args()
    encoder = Encoder.load(MODEL_FOLDER)
    spec = registry.spec_of(json.loads((MODEL_FOLDER / "config.json").read_text()))
    dtype = jnp.bfloat16 if ON_GPU else jnp.float32
    params = load_params(
        open_checkpoint(MODEL_FOLDER), registry.rules(spec), decoder.abstract(spec, dtype)
    )
    params = params._replace(layers=jax.tree.map(lambda *a: jnp.stack(a), *params.layers))
    names = [PLAIN, *(name for name in args.formats if name != PLAIN)]
    models = {name: CachedModel(spec, params, named(name), encoder.stop_ids) for name in names}
    found = Found(names, args.first)
    begin = time.perf_counter()
    if ON_GPU:
        with ThreadPoolExecutor(len(models)) as pool:
            list(pool.map(lambda model: model.run([[0, 0]], shapes()[0], [2]), models.values()))
        print(f"compiled, {time.perf_counter() - begin:.0f} s", flush=True)
    stored = select(load_cases(MODEL_FOLDER / "eval.jsonl.gz"), args.tasks, args.rounds)
    for number, rounds in enumerate(batched(in_rounds(stored), AT_ONCE), start=1):
        run_cases(list(chain.from_iterable(rounds)), models, encoder, found)
        print(f"round {number * AT_ONCE}, {time.perf_counter() - begin:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found.report(), indent=1) + "\n")
    show(found.report())


class Found:
    """Results by format, and sums of `divergence.compare_where` over positions from `first` on."""

    def __init__(self, names: list[str], first: int) -> None:
        self.first = first
        self.results: dict[str, list[Result]] = {name: [] for name in names}
        self.sums = {name: np.zeros(4) for name in names}

    def add(self, name: str, results: list[Result]) -> None:
        self.results[name] += results

    def compare(self, name: str, plain: jax.Array, other: jax.Array, lengths: list[int]) -> None:
        """Log-probabilities after the tokens of prompts of these lengths."""
        positions = np.concatenate([np.arange(length) for length in lengths])
        counted = np.zeros(len(plain), bool)
        counted[: len(positions)] = positions >= self.first
        self.sums[name] += np.asarray(compare_where(plain, other, counted), np.float64)

    def report(self) -> dict[str, Any]:
        formats: dict[str, Any] = {}
        for name, each in self.results.items():
            pairs = zip(each, self.results[PLAIN], strict=True)
            same = [result.answer == plain.answer for result, plain in pairs]
            formats[name] = {
                "right": sum(result.correct for result in each),
                "tasks, right": share([r for r in each if not r.task.startswith("recall")]),
                "recall, right": share([r for r in each if r.task.startswith("recall")]),
                "same answer": sum(same) / len(same),
                **(describe(self.sums[name]) if self.sums[name][0] else {}),
                "tasks": accuracy(each),
            }
        return {
            "device": jax.devices()[0].device_kind,
            "dtype": "bfloat16" if ON_GPU else "float32",
            "cases": len(self.results[PLAIN]),
            "divergence from position": self.first,
            "formats": formats,
        }


def in_rounds(cases: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The first case of each task, the second of each, ..."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        tasks.setdefault(case["task"], []).append(case)
    for group in zip_longest(*tasks.values()):
        yield [case for case in group if case is not None]


def run_cases(
    cases: list[dict[str, Any]], models: dict[str, CachedModel], encoder: Encoder, found: Found
) -> None:
    prompts = [
        encoder.ids(render(case["messages"], case["tools"], prompt=True, thinking=case["thinking"]))
        for case in cases
    ]
    limits = [case["max_tokens"] for case in cases]
    for shape, group in in_batches([len(prompt) for prompt in prompts], limits):
        chosen, most = [prompts[index] for index in group], [limits[index] for index in group]
        lengths = [len(prompt) for prompt in chosen]
        plain: jax.Array | None = None
        for name, model in models.items():
            result = model.run(chosen, shape, most)
            plain = result.log_probs if plain is None else plain
            found.compare(name, plain, result.log_probs, lengths)
            answers = [parse_answer(encoder.text(tokens)) for tokens in result.answers]
            found.add(name, judge([cases[index] for index in group], answers))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", help="only tasks whose name begins with one of these")
    parser.add_argument("--rounds", type=int, help="at most this many cases of each task")
    parser.add_argument("--formats", type=kv_formats, default=list(NAMES[1:]))
    parser.add_argument(
        "--first", type=int, default=256, help="the first position whose prediction counts"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def share(results: list[Result]) -> float | None:
    """Right of all; None: there are none."""
    return sum(result.correct for result in results) / len(results) if results else None


def show(report: dict[str, Any]) -> None:
    formats: dict[str, dict[str, Any]] = report["formats"]
    table = Table(title=f"{report['cases']} cases on {report['device']}")
    columns = [name for name in formats[PLAIN] if name != "tasks"]
    for column in ("format", *columns):
        table.add_column(column, justify="right")
    for name, each in formats.items():
        values = (each[column] for column in columns)
        cells = (
            "-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values
        )
        table.add_row(name, *cells)
    Console(width=140).print(table)
    table = Table(title="right, by task")
    for column in ("task", "cases", *formats):
        table.add_column(column, justify="right")
    for task, plain in formats[PLAIN]["tasks"].items():
        right = (str(each["tasks"][task]["correct"]) for each in formats.values())
        table.add_row(task, str(plain["cases"]), *right)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
