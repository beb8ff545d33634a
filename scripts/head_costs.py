"""Measures step times with a random draft head over those without: part of `bench_speculation.py`.

python scripts/head_costs.py --model qwen3-4b --head eagle3
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from typing import Any

from head_shapes import DRAFTS

from jaxserve.models.drafts.spec import BlockDraft, ModelDraft
from jaxserve.step_times import StepTimes

FLAGS = ("--load-format", "dummy")
"""Flags of the engine: no weights are read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a named shape, or a folder")
    parser.add_argument("--head", required=True, choices=sorted(DRAFTS))
    parser.add_argument("--layers", type=int, help="only the model's first layers")
    parser.add_argument("--memory", type=float, default=0.8, help="share, without heads")
    parser.add_argument("--flags", default="", help="more engine flags, as one argument")
    args = parser.parse_args()
    found = costs(args.model, args.head, args.layers, args.memory, args.flags)
    print(json.dumps(found))


def costs(model: str, head: str, layers: int | None, memory: float, flags: str) -> dict[str, Any]:
    """Measures the steps without a head, and with one of `DRAFTS`.

    Returns:
      The model, its layers, and for each kind of step and bucket the milliseconds without and with
      the head, their difference and their ratio.
    """
    from jaxserve.startup.environment import prepare

    prepare(memory)

    from jaxserve.cli.options import parse_args
    from jaxserve.startup.engine_plan import plan_engine
    from jaxserve.weights.loading import weight_loader
    from jaxserve.weights.model_source import find_model

    options = parse_args(["--model", model, *FLAGS, *shlex.split(flags)])
    source = find_model(options)
    spec = dataclasses.replace(source.spec, layers=source.spec.layers[:layers])
    plan = plan_engine(options, dataclasses.replace(source, spec=spec))
    params = weight_loader(plan.weights, {})(lambda done, total: None)
    without = _milliseconds(_times(plan.config, params, None))
    draft = DRAFTS[head](plan.config.spec)
    most = max((positions for _, positions in plan.config.buckets.verify), default=1) - 1
    if not isinstance(draft, BlockDraft):
        draft = dataclasses.replace(draft, num_drafts=most)
    config = dataclasses.replace(plan.config, draft=draft)
    with_head = _milliseconds(_times(config, params, _random(config)))
    return {
        "model": model,
        "layers": plan.config.spec.num_layers,
        "all_layers": source.spec.num_layers,
        "drafts": draft.num_drafts,
        "steps": {kind: _compared(took, with_head[kind]) for kind, took in without.items()},
    }


def _compared(without: dict[str, float], with_head: dict[str, float]) -> dict[str, Any]:
    """Compares the times of each bucket."""
    return {
        bucket: {
            "without_ms": one,
            "with_ms": with_head[bucket],
            "head_ms": round(with_head[bucket] - one, 4),
            "ratio": round(with_head[bucket] / one, 3),
        }
        for bucket, one in without.items()
    }


def _random(config: Any) -> Any:
    """Random weights for the config's head."""
    import jax.numpy as jnp

    from jaxserve.models import decoder
    from jaxserve.models.drafts import loading
    from jaxserve.models.drafts.eagle3 import Eagle3Params
    from jaxserve_checkpoints.dummy import dummy_params

    stacked = config.target.device is not None
    if isinstance(config.draft, ModelDraft):
        return dummy_params(decoder.abstract(config.draft.body, config.dtype, stacked=stacked), 1)
    shapes: Any = loading.abstract(config.draft, config.dtype, stacked=stacked)
    if not isinstance(shapes, Eagle3Params):
        return dummy_params(shapes, 1)
    params: Any = dummy_params(shapes._replace(token_ids=None), 1)
    return params._replace(token_ids=jnp.arange(config.draft.body.vocab_size, dtype=jnp.int32))


def _times(config: Any, params: Any, head: Any) -> StepTimes:
    """Step times of a runner with this head. The runner is freed afterwards."""
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


if __name__ == "__main__":
    main()
