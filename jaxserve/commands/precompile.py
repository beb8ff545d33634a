"""`jaxserve precompile`: compiles at deploy time the programs that every start then loads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxserve.cli.options import Options
from jaxserve.commands.progress import Work
from jaxserve.config import ConfigError
from jaxserve.metrics.metrics import Metrics
from jaxserve.startup.environment import prepare
from jaxserve.startup.timeline import Timeline
from jaxserve.weights.model_source import ModelSource, find_model
from jaxserve_checkpoints.reader import CheckpointError

if TYPE_CHECKING:
    from jaxserve.programs.executable_cache import Program
    from jaxserve.programs.executables import Obtained
    from jaxserve.startup.engine_plan import EnginePlan

_LOADING = 0.8
"""Share of a trial start that is over when its steps can run."""


def precompile(options: Options) -> int:
    """Compiles missing programs. Returns the exit status. Errors are one line on stderr."""
    prepare(options.gpu_memory_utilization)
    try:
        _precompile(options)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 1
    return 0


def _precompile(options: Options) -> None:
    from jaxserve.programs.executables import by_reason, missing, obtain
    from jaxserve.startup.engine_plan import (
        plan_engine,  # imports jax, which reads the settings of `prepare`
    )

    started = time.monotonic()
    source = find_model(options)
    plan = plan_engine(options, source)
    plan.cache.prepare()
    lacking = missing(plan.programs, plan.cache)
    todo = [program for program in plan.programs if program.name in lacking]
    found = f"{len(todo)} of {len(plan.programs)} programs to compile into {plan.cache.folder}"
    unusable = {each.name: lacking[each.name] for each in todo if plan.cache.has(each)}
    print(f"{found} ({by_reason(unusable)})" if unusable else found, file=sys.stderr)
    weights = _weights(todo, plan.cache.compile_seconds())
    done: list[str] = []
    with Work("compiling") as work:

        def show(name: str) -> None:
            done.append(name)
            seconds = sum(weights[each] for each in done)
            state = f"{len(done)} of {len(todo)}: {name}"
            work.update(seconds, sum(weights.values()), state, say=True)

        try:
            obtained = obtain(
                todo,
                plan.cache,
                options.compile_workers or os.cpu_count() or 1,
                lambda phase, done: None,
                finished=show,
                must_keep=True,
            )
            plan.cache.write_manifest()
        except OSError as error:
            raise OSError(f"cannot write to {plan.cache.folder}: {error}") from None
    _check_memory(plan, obtained)
    del obtained
    tried = _try_start(options, source, plan)
    seconds = time.monotonic() - started
    print(f"{len(plan.programs)} programs in {plan.cache.folder} after {seconds:.0f} s; {tried}")


def _try_start(options: Options, source: ModelSource, plan: EnginePlan) -> str:
    """Starts an engine once, if only a start can do some of the work. Returns the result as text.

    The start measures the step times, which the scheduler needs, while the machine serves nobody.
    It also stores weights that are quantised at load. If the device's memory is taken, for example
    by the server that this one will replace, the command does not fail.
    """
    from jaxserve.startup.build import OutOfDeviceMemory, build_parts
    from jaxserve.startup.measure import kept_times

    if kept_times(plan.config, plan.step_times_file) and not plan.weights.to_be_converted:
        return "steps were timed before"
    begun: set[str] = set()
    with Work("trying a start") as work:

        def show(phase: str, fraction: float) -> None:
            warming = phase == "warming"
            done = _LOADING + (1 - _LOADING) * fraction if warming else _LOADING * fraction
            work.update(done, 1.0, f"trying a start: {phase}", say=phase not in begun)
            begun.add(phase)

        try:
            metrics = Metrics(source.names[0])
            build_parts(options, source, metrics, show, Timeline(), tiers=False)
        except OutOfDeviceMemory as error:
            return f"steps are not timed, which the first start will do: {error}"
    return "steps are timed"


def _weights(todo: Sequence[Program], known: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of each program in the work: known seconds, or an estimate from those."""
    met = [program for program in todo if program.name in known]
    rate = sum(known[each.name] for each in met) / sum(each.work for each in met) if met else 1.0
    return {each.name: known.get(each.name, rate * each.work) for each in todo}


def _check_memory(plan: EnginePlan, obtained: Obtained) -> None:
    """Raises the error that serving would raise if the programs do not fit."""
    analyses = (executable.memory_analysis() for executable in obtained.executables.values())
    plan.memory(max((a.temp_size_in_bytes for a in analyses if a), default=0)).check()
