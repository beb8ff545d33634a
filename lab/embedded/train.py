"""Trains the embedded model from a seed, on chats generated while it trains, and measures it.

    python -m lab.embedded.data  --out checkpoints/jaxserve_checkpoints/embedded
    python -m lab.embedded.train --out checkpoints/jaxserve_checkpoints/embedded

The first writes the tokenizer and the evaluation set, the second the weights and configuration.
A run is a pure function of its arguments as long as --minutes does not end it before --steps do.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.embedded.chat import Encoder
from lab.embedded.data import BLOCK_LENGTHS, block_rows
from lab.embedded.evaluate import accuracy, answer_locally, judge, load_cases, print_table
from lab.embedded.model import (
    ModelConfig,
    Parameters,
    Qwen3,
    init_parameters,
    load_model,
    save_model,
)

Block = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What a run depends on. A step sums the gradients of one batch of rows from each block."""

    seed: int = 0
    steps: int = 5_600
    minutes: float = math.inf
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.05
    short_rows: int = 192
    medium_rows: int = 64
    long_rows: int = 12
    longest_rows: int = 4
    # Progress at which a block joins. Copying is learned on short lists first, then stretched.
    long_from: float = 0.12
    longest_from: float = 0.45

    def rows(self, block: str) -> int:
        return getattr(self, f"{block}_rows")

    def blocks(self, progress: float) -> tuple[str, ...]:
        joined = ("short", "medium")
        joined += ("long",) if progress >= self.long_from else ()
        return joined + (("longest",) if progress >= self.longest_from else ())

    def rate(self, step: int, progress: float) -> float:
        """Linear warm-up, then a cosine down to a hundredth."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * max(cosine, 0.01)


# -- Data ---------------------------------------------------------------------------------------

_encoder: Encoder


def _start_worker(folder: Path) -> None:
    global _encoder
    _encoder = Encoder.load(folder)


def _make_rows(seed: int, step: int, block: str, num_rows: int) -> Block:
    return block_rows(seed, step, block, num_rows, _encoder)


class DataPool:
    """Worker processes that generate the rows of coming steps while the device trains."""

    def __init__(self, config: TrainConfig, folder: Path, workers: int) -> None:
        self._config = config
        self._depth = 2 * workers
        self._pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _start_worker, (folder,)
        )

    def _submit(self, step: int, progress: float) -> dict[str, Future[Block]]:
        config = self._config
        return {
            block: self._pool.submit(_make_rows, config.seed, step, block, config.rows(block))
            for block in config.blocks(progress)
        }

    def steps(self, clock: "Clock") -> Iterator[dict[str, Block]]:
        """The blocks of step 0, 1, 2, ... until the clock says that training is over."""
        ahead: deque[dict[str, Future[Block]]] = deque()
        step = 0
        while clock.progress(step) < 1.0:
            while len(ahead) < self._depth:
                upcoming = step + len(ahead)
                ahead.append(self._submit(upcoming, clock.progress(upcoming)))
            yield {block: rows.result() for block, rows in ahead.popleft().items()}
            step += 1

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Clock:
    """How far a run has come: by its steps, or by its minutes where those end first."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def progress(self, step: int) -> float:
        return max(step / self._config.steps, self.seconds / (60 * self._config.minutes))


# -- Steps --------------------------------------------------------------------------------------


def _loss(
    params: Parameters, model: Qwen3, ids: jax.Array, scored: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Summed negative log likelihood of scored tokens, and [that sum, their number, hits]."""
    ids = ids.astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    logits, _ = model.apply(params, ids, positions)
    # The first token of a row is never scored, so what rolls around to the end has weight 0.
    targets, weights = (jnp.roll(x, -1, axis=1) for x in (ids, scored))
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    total = jnp.sum(nll, where=weights)
    hits = jnp.sum(logits.argmax(-1) == targets, where=weights)
    return total, jnp.stack([total, weights.sum(), hits]).astype(jnp.float32)


@partial(jax.jit, static_argnames="model", donate_argnames=("grads", "totals"))
def _accumulate(
    params: Parameters,
    grads: Parameters,
    totals: jax.Array,
    ids: jax.Array,
    scored: jax.Array,
    *,
    model: Qwen3,
) -> tuple[Parameters, jax.Array]:
    """Adds one block's gradients and totals."""
    (_, counts), new = jax.value_and_grad(_loss, has_aux=True)(params, model, ids, scored)
    return jax.tree.map(jnp.add, grads, new), totals + counts


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW without its learning rate; only matrices decay."""

    def matrices(params: Parameters) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
    )


@partial(jax.jit, static_argnames="optimizer", donate_argnames=("params", "state", "grads"))
def _apply(
    params: Parameters,
    state: optax.OptState,
    grads: Parameters,
    num_scored: jax.Array,
    rate: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[Parameters, optax.OptState, Parameters]:
    """Takes the optimizer's step; returns the gradients as zeros for the next one."""
    mean = jax.tree.map(lambda g: g / num_scored, grads)
    updates, state = optimizer.update(mean, state, params)
    params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
    return params, state, jax.tree.map(jnp.zeros_like, grads)


def _compile_blocks(config: TrainConfig, model: Qwen3, params: Parameters) -> dict[str, Any]:
    """One executable per block, all compiled at the same time."""

    def compile_one(block: str) -> Any:
        shape = (config.rows(block), BLOCK_LENGTHS[block])
        ids, scored = jnp.zeros(shape, jnp.uint16), jnp.zeros(shape, jnp.bool_)
        lowered = _accumulate.lower(params, params, jnp.zeros(3), ids, scored, model=model)
        return lowered.compile()

    with ThreadPoolExecutor() as threads:
        return dict(zip(BLOCK_LENGTHS, threads.map(compile_one, BLOCK_LENGTHS), strict=True))


def train(
    config: TrainConfig, model: Qwen3, params: Parameters, data: DataPool, clock: Clock
) -> tuple[Parameters, dict[str, Any]]:
    """Runs all steps; returns the parameters and what to report about the run."""
    executables = _compile_blocks(config, model, params)
    compile_seconds = clock.seconds
    optimizer = _optimizer(config)
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.zeros_like, params)
    totals: dict[str, jax.Array] = {}
    curve: list[dict[str, float]] = []
    num_tokens = step = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task("training", total=config.steps)
        for blocks in data.steps(clock):
            for block, (ids, scored) in blocks.items():
                total = totals.pop(block) if block in totals else jnp.zeros(3)
                grads, totals[block] = executables[block](params, grads, total, ids, scored)
                num_tokens += ids.size
            num_scored = jnp.float32(sum(int(scored.sum()) for _, scored in blocks.values()))
            rate = jnp.float32(config.rate(step, clock.progress(step)))
            params, state, grads = _apply(
                params, state, grads, num_scored, rate, optimizer=optimizer
            )
            step += 1
            bar.update(task, completed=step)
            if step % 250 == 0:
                curve.append({"step": step, "seconds": round(clock.seconds, 1)} | _means(totals))
                bar.console.print(json.dumps(curve[-1]), soft_wrap=True)
                totals = {}
    jax.block_until_ready(params)
    return params, {
        "steps": step,
        "row_tokens": num_tokens,
        "seconds": round(clock.seconds, 1),
        "compile_seconds": round(compile_seconds, 1),
        "row_tokens_per_second": round(num_tokens / (clock.seconds - compile_seconds)),
        "curve": curve,
    }


def _means(totals: dict[str, jax.Array]) -> dict[str, float]:
    """block -> mean loss, and block_hits -> share of scored tokens that were the likeliest."""
    means: dict[str, float] = {}
    for block, total in totals.items():
        loss, count, hits = np.asarray(total).tolist()
        means[block] = round(loss / count, 4)
        means[f"{block}_hits"] = round(hits / count, 4)
    return means


# -- Command line -------------------------------------------------------------------------------


def _write_configs(folder: Path, config: ModelConfig, encoder: Encoder) -> None:
    end, end_of_text = encoder.stop_ids
    model = config.huggingface(bos_id=end_of_text, eos_id=end)
    generation = {
        "bos_token_id": end_of_text,
        "do_sample": False,
        "eos_token_id": [end, end_of_text],
        "pad_token_id": end_of_text,
    }
    for name, contents in (("config", model), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(contents, indent=2) + "\n")


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
    }


def _evaluate(folder: Path, batch_tokens: int) -> dict[str, Any]:
    """Accuracy of the model as stored, in bfloat16."""
    cases = load_cases(folder / "eval.jsonl.gz")
    results = judge(cases, answer_locally(cases, folder, batch_tokens))
    for wrong in [result for result in results if not result.correct][:60]:
        print(json.dumps(asdict(wrong)))
    scores = accuracy(results)
    print_table(scores, "accuracy", {})
    return scores


def _parse_args() -> argparse.Namespace:
    default = TrainConfig()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--report", type=Path, help="where to write figures of the run as JSON")
    parser.add_argument("--resume", type=Path, help="folder of a model to start from")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--minutes", type=float, help="end by then, whatever step it is")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--long-from", type=float, default=default.long_from)
    parser.add_argument("--longest-from", type=float, default=default.longest_from)
    parser.add_argument("--rows-divisor", type=int, default=1, help="smaller batches, for a trial")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--attention", choices=("xla", "cudnn"), default="xla")
    parser.add_argument("--eval-batch-tokens", type=int, default=65_536)
    parser.add_argument("--no-eval", action="store_true")
    return parser.parse_args()


def _train_config(args: argparse.Namespace) -> TrainConfig:
    config = TrainConfig(
        seed=args.seed,
        steps=args.steps,
        minutes=math.inf if args.minutes is None else args.minutes,
        learning_rate=args.learning_rate,
        long_from=args.long_from,
        longest_from=args.longest_from,
    )
    rows = {f"{b}_rows": max(1, config.rows(b) // args.rows_divisor) for b in BLOCK_LENGTHS}
    return replace(config, **rows)


def main() -> None:
    args = _parse_args()
    config, folder = _train_config(args), args.out
    clock, data = Clock(config), DataPool(config, folder, args.workers)
    model = Qwen3(config=ModelConfig(), kernel=args.attention)
    params = init_parameters(model.config, config.seed)
    if args.resume:
        params = jax.tree.map(jnp.asarray, load_model(args.resume))
    print(f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters")
    params, run = train(config, model, params, data, clock)
    data.close()
    save_model(folder, params)
    _write_configs(folder, model.config, Encoder.load(folder))
    report = {
        "command": " ".join(["python", *sys.argv]),
        "environment": _environment(),
        "attention": args.attention,
        "train": asdict(config) | {"minutes": args.minutes},
        "model": asdict(model.config),
        "run": run,
    }
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    if not args.no_eval:
        report["accuracy"] = _evaluate(folder, args.eval_batch_tokens)
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
