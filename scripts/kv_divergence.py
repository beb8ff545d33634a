"""How far each KV format moves the embedded model's predictions, teacher-forced, on a CPU.

    python scripts/kv_divergence.py --tasks recall_1k,recall_2k --cases 8 --out kv_divergence.json

Every case's prompt is one chunk; at each position from --first on the distribution over the next
token is compared with that of a cache in the activations' dtype, float32.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from divergence import compare, describe
from embedded_chat import Encoder, render
from eval_embedded import MODEL_FOLDER, load_cases
from rich.console import Console
from rich.table import Table

from jaxserve.config import ModelSpec
from jaxserve.models import qwen3
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_kernels.kv_format import NAMES, AttentionStep, CacheShape, named
from jaxserve_kernels.paged_attention import QueryTiles

TILE, PAGE = 16, 64
LENGTHS = (512, 1024, 2048, 3072, 4096)
"""Prompts are padded to the first that holds them: so many programs for each format."""


def main() -> None:
    args = parse_args()
    encoder = Encoder.load(MODEL_FOLDER)
    spec = ModelSpec.from_hf(json.loads((MODEL_FOLDER / "config.json").read_text()))
    params = load_params(
        open_checkpoint(MODEL_FOLDER), qwen3.rules(spec), qwen3.abstract(spec, jnp.float32)
    )
    cases = load_cases(MODEL_FOLDER / "eval.jsonl.gz")
    chosen = [
        case
        for task in args.tasks
        for case in [case for case in cases if case["task"] == task][: args.cases]
    ]
    sums = {name: np.zeros(4) for name in args.formats}
    for case in chosen:
        text = render(case["messages"], case["tools"], prompt=True, thinking=case["thinking"])
        ids = encoder.ids(text)[: LENGTHS[-1]]
        plain = log_probs("auto", spec, params, ids)[args.first :]
        for name in args.formats:
            sums[name] += compare(plain, log_probs(name, spec, params, ids)[args.first :])
    result = {name: describe(each) for name, each in sums.items()}
    if args.out:
        head = {"tasks": args.tasks, "cases": len(chosen), "from_position": args.first}
        args.out.write_text(json.dumps({**head, "formats": result}, indent=1) + "\n")
    table = Table(title=f"{len(chosen)} prompts of {', '.join(args.tasks)}")
    for column in ("format", *next(iter(result.values()))):
        table.add_column(column, justify="right")
    for name, each in result.items():
        table.add_row(name, *(f"{value:.3g}" for value in each.values()))
    Console(width=110).print(table)


def parse_args() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=names, default=["recall_1k", "recall_2k"])
    parser.add_argument("--cases", type=int, default=8, help="of each task")
    parser.add_argument("--formats", type=names, default=list(NAMES[1:]))
    parser.add_argument("--first", type=int, default=256, help="the first position that counts")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def log_probs(name: str, spec: ModelSpec, params: qwen3.Params, ids: list[int]) -> np.ndarray:
    """float32 [tokens, vocab]: log-probabilities of the token after each."""
    length = next(length for length in LENGTHS if length >= len(ids))
    padded = jnp.asarray([*ids, *[0] * (length - len(ids))], jnp.int32)
    return np.asarray(program(name, spec, length)(params, padded, len(ids)))[: len(ids)]


@functools.cache
def program(name: str, spec: ModelSpec, length: int) -> Any:
    kv_format = named(name)
    page = kv_format.page_size or PAGE
    pages = length // page
    shape = CacheShape(
        layers=spec.num_layers,
        pages=1 + pages,
        kv_heads=spec.kv_heads,
        page_size=page,
        head_dim=spec.head_dim,
        slots=2,
    )

    def run(params: qwen3.Params, ids: jax.Array, count: jax.Array) -> jax.Array:
        position = jnp.arange(length, dtype=jnp.int32)
        first = jnp.arange(0, length, TILE, dtype=jnp.int32)
        inside = position < count
        step = AttentionStep(
            slots=jnp.where(inside, 0, 1),
            positions=jnp.where(inside, position, 0),
            pages=jnp.where(inside, 1 + position // page, 0),
            offsets=jnp.where(inside, position % page, 0),
            tiles=QueryTiles(
                first, jnp.clip(count - first, 0, TILE), jnp.where(first < count, 0, 1), first
            ),
            page_table=jnp.stack([1 + jnp.arange(pages), jnp.zeros(pages)]).astype(jnp.int32),
            cached=jnp.zeros(2, jnp.int32),
        )
        kv = kv_format.allocate(shape, jnp.float32)
        hidden, _ = qwen3.forward(params, kv, qwen3.StepTokens(ids, step), spec, tile_size=TILE)
        return jax.nn.log_softmax(qwen3.logits(params, hidden))

    return jax.jit(run)


if __name__ == "__main__":
    main()
