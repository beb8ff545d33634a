"""Steps with a draft head over those without, of random weights: `bench_speculation.py --heads`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from typing import Any

from head_shapes import HEADS

from jaxserve.step_times import StepTimes

FLAGS = ("--load-format", "dummy", "--speculative-config", "{}")
"""Of the engine: no weights are read, and steps verify."""


def report(about: dict[str, Any], args: argparse.Namespace) -> int:
    """Print the result as JSON, and write it to `args.out`. Returns 0."""
    heads = costs(args.model, args.heads.split(","), args.memory, args.flags)
    text = json.dumps({**about, "model": args.model, "flags": args.flags, "heads": heads}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


def costs(model: str, heads: Sequence[str], memory: float, flags: str) -> dict[str, Any]:
    """Measures the steps without a head, and with each of `heads` (names in `HEADS`).

    Args:
      model: a named shape, or a folder with config.json.
      memory: share of the card that the engine without a head takes; heads come beside it.
      flags: further flags of the engine, in one word.

    Returns:
      For each head and kind of step, by bucket: milliseconds without and with the head, and the
      ratio.
    """
    from jaxserve.startup.environment import prepare

    prepare(gpu_memory_utilization=memory)

    from jaxserve.cli.options import parse_args
    from jaxserve.startup.engine_plan import plan_engine
    from jaxserve.weights.loading import weight_loader
    from jaxserve.weights.model_source import find_model

    given = ("--model", model) if model else ()
    options = parse_args([*given, *FLAGS, *shlex.split(flags)])
    plan = plan_engine(options, find_model(options))
    params = weight_loader(plan.weights, {})(lambda done, total: None)
    without = _milliseconds(_times(plan.config, params, None))
    found: dict[str, Any] = {}
    for name in heads:
        spec = HEADS[name](plan.config.spec)
        config = dataclasses.replace(plan.config, draft=spec)
        with_head = _milliseconds(_times(config, params, _random(config)))
        found[name] = {
            kind: {
                bucket: {"without_ms": one, "with_ms": other, "ratio": round(other / one, 3)}
                for (bucket, one), other in zip(
                    buckets.items(), with_head[kind].values(), strict=True
                )
            }
            for kind, buckets in without.items()
        }
    return found


def _random(config: Any) -> Any:
    """Weights of the config's head."""
    import jax.numpy as jnp

    from jaxserve.models.drafts import loading
    from jaxserve.models.drafts.eagle3 import Eagle3Params
    from jaxserve_checkpoints.dummy import dummy_params

    shapes: Any = loading.abstract(
        config.draft, config.dtype, stacked=config.target.device is not None
    )
    if not isinstance(shapes, Eagle3Params):
        return dummy_params(shapes, 1)
    params: Any = dummy_params(shapes._replace(token_ids=None), 1)
    return params._replace(token_ids=jnp.arange(config.draft.body.vocab_size, dtype=jnp.int32))


def _times(config: Any, params: Any, head: Any) -> StepTimes:
    """Of a runner with the head, which is gone afterwards."""
    from jaxserve.metrics.metrics import Metrics
    from jaxserve.runner.runner import Runner
    from jaxserve.startup.measure import measure

    runner = Runner(config, params, Metrics("bench"), head)
    runner.compile(os.cpu_count() or 1, lambda phase, done: None)
    times = measure(runner, config)
    runner.free_state()
    return times


def _milliseconds(times: StepTimes) -> dict[str, dict[str, float]]:
    verify = {f"{rows}x{each}": took.seconds for (rows, each), took in times.verify.items()}
    kinds = {"decode": times.decode, "mixed": times.mixed, "verify": verify}
    return {
        kind: {str(bucket): round(1e3 * seconds, 4) for bucket, seconds in buckets.items()}
        for kind, buckets in kinds.items()
    }
