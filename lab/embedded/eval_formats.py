"""Measures what each weight format costs the embedded model, beside bfloat16.

    python -m lab.embedded.eval_formats --out formats.json
    python -m lab.embedded.eval_formats --formats int4-rtn,int4-awq --limit 0
    python -m lab.embedded.eval_formats --formats int4-rtn,fp8-rtn --tokens e4m3 --limit 0

Two measures, of the plain flax model with each format's dequantised weights: what a format loses,
without what a kernel adds; but --tokens rounds what the layers' matrices read. `e4m3` is what
kernels for many tokens read, `int8-after-norms` what int4's kernels for 9 to 64 tokens do, and
experts in MXFP4.

- KL divergence and other first choices, teacher-forced over training chats of a seed of their own,
  in float32: this separates the formats.
- The stored evaluation set answered greedily, in bfloat16 (on a CPU, which only emulates that, in
  float32). --limit 0 leaves it out.

AWQ is calibrated on 8,192 tokens of training chats of another seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from jaxserve.models import decoder, registry
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from lab.embedded.divergence import compare, describe
from lab.embedded.evaluate import (
    MODEL_FOLDER,
    Scores,
    accuracy,
    answer_locally,
    judge,
    load_cases,
    print_table,
    select,
)
from lab.embedded.model import ModelConfig, Parameters, Qwen3, from_huggingface
from lab.embedded.weight_formats import FORMATS, in_format, tensors_of, token_ids

TOKENS = ("e4m3", "e4m3-after-norms", "int8-after-norms")

SEED, LENGTH = 12, 256
"""Of the text for the divergences."""


def main() -> None:
    args = parse_args()
    spec = registry.spec_of(json.loads((MODEL_FOLDER / "config.json").read_text()))
    plain = load_params(
        open_checkpoint(MODEL_FOLDER), registry.rules(spec), decoder.abstract(spec, jnp.float32)
    )
    cases = select(load_cases(MODEL_FOLDER / "eval.jsonl.gz"), args.tasks, args.limit)
    device = jax.devices()[0]
    config = ModelConfig.load(MODEL_FOLDER)
    answering = Qwen3(
        config=config, dtype=jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    )
    report: dict[str, Any] = {
        "device": device.device_kind,
        "divergence": {"seed": SEED, "dtype": "float32", "formats": {}},
    }
    if cases:
        dtype = jnp.dtype(answering.dtype).name
        report["answers"] = {"cases": len(cases), "dtype": dtype, "formats": {}}
    text = token_ids(SEED, args.positions // LENGTH, LENGTH)
    expected = None
    for name in args.formats:
        begin = time.perf_counter()
        params = from_huggingface(tensors_of(in_format(name, plain, spec), spec))
        model = Qwen3(config=config, dtype=jnp.float32)
        if expected is None:
            expected = log_probs(model, params, text)
        with tokens_in_8_bits(args.tokens, spec.embed):
            predicted = log_probs(model, params, text)
        moved = describe(compare(expected, predicted))
        report["divergence"]["formats"][name] = moved
        if cases:
            answers = answer_locally(cases, MODEL_FOLDER, args.batch_tokens, (answering, params))
            report["answers"]["formats"][name] = accuracy(judge(cases, answers))
        seconds = time.perf_counter() - begin
        print(f"{name}: KL {moved['mean KL, nats']:.4f} nats, {seconds:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    print_divergences(report["divergence"]["formats"])
    if cases:
        (first, scores), *others = report["answers"]["formats"].items()
        found: dict[str, Scores] = dict(others)
        print_table(scores, f"{len(cases)} cases; first column: {first}", found)


def parse_args() -> argparse.Namespace:
    def formats(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(FORMATS):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}; known: {FORMATS}")
        return ["bf16", *(name for name in names if name != "bf16")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", type=formats, default=list(FORMATS))
    parser.add_argument("--positions", type=int, default=8_192, help="for the divergences")
    parser.add_argument(
        "--tokens", choices=TOKENS, help="rounded so in the divergences; of bf16's too"
    )
    parser.add_argument("--tasks", nargs="+", help="only tasks whose name begins with one of these")
    parser.add_argument("--limit", type=int, help="at most this many cases of each task")
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="prompt tokens")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    return parser.parse_args()


@contextmanager
def tokens_in_8_bits(which: str | None, embed: int) -> Iterator[None]:
    """Within it the layers' matrices read rounded tokens: see --tokens. Of all matrices, those that
    read a norm's output have `embed` inputs."""
    plain = nnx.Linear.__call__

    def rounding(self: nnx.Linear, x: Any, *args: Any, **kwargs: Any) -> Any:
        if which != "e4m3" and self.in_features != embed:
            return plain(self, x, *args, **kwargs)
        rounded = in_int8(x) if which == "int8-after-norms" else in_e4m3(x)
        return plain(self, rounded, *args, **kwargs)

    if which is not None:
        nnx.Linear.__call__ = rounding  # type: ignore[method-assign]
    try:
        yield
    finally:
        nnx.Linear.__call__ = plain  # type: ignore[method-assign]


def in_e4m3(x: jax.Array) -> jax.Array:
    """x [..., inputs] rounded to e4m3, with a scale for each token."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 448.0
    scale = jnp.where(scale > 0.0, scale, 1.0)
    return (x / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


def in_int8(x: jax.Array) -> jax.Array:
    """x [..., inputs] rounded to int8, with a scale for each 128 inputs of a token."""
    groups = x.reshape(*x.shape[:-1], -1, 128)
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / 127.0
    scale = jnp.where(scale > 0.0, scale, 1.0)
    return (jnp.round(groups / scale) * scale).reshape(x.shape)


def log_probs(model: Qwen3, params: Parameters, ids: jax.Array) -> np.ndarray:
    """float32 [tokens, vocabulary] for ids [sequences, tokens of each]."""

    @jax.jit
    def predict(params: Parameters, sequence: jax.Array) -> jax.Array:
        positions = jnp.arange(sequence.shape[0])[None]
        logits, _ = model.apply(params, sequence[None], positions)
        return jax.nn.log_softmax(logits[0])

    return np.concatenate([predict(params, sequence) for sequence in ids])


def print_divergences(found: dict[str, dict[str, float]]) -> None:
    table = Table(title="against bfloat16 weights, teacher-forced")
    for column in ("format", *next(iter(found.values()))):
        table.add_column(column, justify="right")
    for name, each in found.items():
        table.add_row(name, *(f"{value:.4g}" for value in each.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
