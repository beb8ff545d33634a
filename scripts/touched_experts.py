"""Counts the experts that any row of a step uses, by running steps with a counting router."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxserve.metrics.metrics import Metrics
from jaxserve.models import decoder, layer
from jaxserve.plan import StepPlan
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve_kernels.experts import Routing, route, routed_experts


def touched_experts(
    config: RunnerConfig, params: decoder.Params, runs: Iterable[list[StepPlan]], warm: int
) -> list[float]:
    """For each run of steps, the number of experts per layer that any row uses: the mean over
    layers, and over all steps but the first `warm`.

    Compiles its own programs, and allocates another KV cache.
    """
    counts: list[int] = []
    with mock.patch.object(layer, "routed_experts", counting(counts)):
        runner = Runner(config, params, Metrics("touched"))
        runner.compile(os.cpu_count() or 1, lambda name, done: None)
    found: list[float] = []
    for plans in runs:
        for index, plan in enumerate(plans):
            if index == warm:
                jax.effects_barrier()
                counts.clear()
            runner.collect(runner.launch(plan))
        jax.effects_barrier()
        found.append(mean(counts))
    runner.free_state()
    return found


def counting(counts: list[int]) -> Callable[..., jax.Array]:
    """`routed_experts` that also appends, at run time, the number of experts that its tokens
    use, except for padding."""

    def counted(
        x: jax.Array, scores: jax.Array, routing: Routing, *args: Any, bias: Any, **options: Any
    ) -> jax.Array:
        ids, *_ = route(scores, routing, bias, options["active"], target=options["target"])
        used = jnp.zeros(routing.num_experts, bool).at[ids.ravel()].set(True, mode="drop")
        touched = used.sum()
        jax.debug.callback(lambda count: counts.append(int(count)), touched)
        return routed_experts(x, scores, routing, *args, bias=bias, **options)

    return counted
