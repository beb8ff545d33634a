"""`jaxserve kernels`: prints which implementation serves each operation of a model on a GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.cli.options import Options
from jaxserve.commands.plan import engine_plan, gpu_of
from jaxserve.config import ConfigError
from jaxserve.startup.environment import prepare
from jaxserve_checkpoints.reader import CheckpointError

if TYPE_CHECKING:
    from jaxserve.runner.programs import RunnerConfig
    from jaxserve_kernels.op import Choice


class Served(NamedTuple):
    """An operation in a program, and the implementation that serves it."""

    program: str
    """For example "decode 16", "mixed 512", "prompt scores"."""
    operation: str
    """The operation with the sizes of its inputs."""
    implementation: str
    config: str
    pdl: bool
    """Whether it is launched by programmatic dependent launch."""
    refused: tuple[tuple[str, str], ...]
    """Implementations that come before it, and why they refused."""


def kernels(options: Options) -> int:
    """Prints the choices. Returns the exit status. Errors are one line on stderr."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # do not use a GPU of this machine
    prepare(options.gpu_memory_utilization)
    logging.getLogger("jaxserve").setLevel(logging.ERROR)
    try:
        found = choices(options)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([each._asdict() for each in found], indent=1))
        return 0
    gpu = gpu_of(options, "--device").name
    print(f"{options.model or 'jaxserve-embedded'} on {gpu}, traced without the GPU")
    print("\n".join(_lines(found, refusals=options.all)))
    return 0


def choices(options: Options) -> list[Served]:
    """Traces every program that a start with these options would compile. Does not compile kernels:
    on a GPU, a kernel that does not compile is replaced by the next implementation.

    Raises:
      ConfigError: a start would fail, or Triton cannot be imported.
    """
    from jaxserve_kernels.target import triton_error

    planned = engine_plan(options, gpu_of(options, "--device"))
    target = planned.config.target
    if not target.uses_triton():
        raise ConfigError(
            f"kernels are traced with Triton and jax-triton, which cannot be imported: "
            f"{triton_error()}"
        )
    seen: list[Choice] = []
    config, params = _alike_once(planned.config, planned.weights.served)
    target = target.replace(checked=False, observe=seen.append)
    config = dataclasses.replace(config, target=target)
    return list(_traced(config, params, seen))


def _traced(config: RunnerConfig, params: Any, seen: list[Choice]) -> Iterator[Served]:
    import jax

    from jaxserve.runner.programs import programs, step_name
    from jaxserve.runner.prompt_scores import SCORE

    names = {step_name(bucket): f"{bucket.kind} {bucket.tokens}" for bucket in config.all_buckets()}
    names = dict(reversed(names.items())) | {SCORE: "prompt scores"}
    found = {program.name: program for program in programs(config, params)}
    for name, title in names.items():
        seen.clear()
        program = found[name]
        jax.make_jaxpr(program.function)(*program.arguments)
        yield from dict.fromkeys(_served(title, choice) for choice in seen)


def _served(program: str, choice: Choice) -> Served:
    return Served(
        program=program,
        operation=f"{choice.operation}, {choice.what}" if choice.what else choice.operation,
        implementation=choice.implementation.name,
        config=_described(choice.config),
        pdl=choice.pdl,
        refused=choice.refused,
    )


def _described(config: Any) -> str:
    """Returns the fields of a configuration as text."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return ""
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def _alike_once(config: RunnerConfig, params: Any) -> tuple[RunnerConfig, Any]:
    """Returns the model with two layers if all layers are alike. The last one differs from the
    others by the norm that follows it."""
    import jax

    spec = config.spec
    if len(set(spec.layers)) > 1:
        return config, params
    layers = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype), params.layers
    )
    config = dataclasses.replace(config, spec=dataclasses.replace(spec, layers=spec.layers[:2]))
    return config, params._replace(layers=layers)


def _lines(found: list[Served], *, refusals: bool) -> Iterator[str]:
    """Yields lines by operation. Programs with the same implementation share a line."""
    programs = list(dict.fromkeys(each.program for each in found))
    for operation in dict.fromkeys(each.operation for each in found):
        yield f"\n{operation}"
        alike: dict[Served, list[str]] = {}
        for each in found:
            if each.operation == operation:
                key = each._replace(program="", refused=each.refused if refusals else ())
                alike.setdefault(key, []).append(each.program)
        for served, names in alike.items():
            launch = ", programmatic dependent launch" if served.pdl else ""
            config = f" ({served.config})" if served.config else ""
            yield f"  {_ranges(names, programs)}: {served.implementation}{config}{launch}"
            for other, reason in served.refused:
                yield f"      not {other}: {reason}"
    yield "\nIn a mixed step, the last layer computes only the tokens whose scores are read."


def _ranges(names: list[str], programs: list[str]) -> str:
    """Returns the names of programs as text. Consecutive ones become "decode 1 to 16"."""
    places = sorted(map(programs.index, names))
    runs: list[list[str]] = []
    for place in places:
        kind = programs[place].rpartition(" ")[0]
        follows = runs and runs[-1][-1] == programs[place - 1]
        if follows and runs[-1][-1].rpartition(" ")[0] == kind:
            runs[-1].append(programs[place])
        else:
            runs.append([programs[place]])
    return ", ".join(
        run[0] + (f" to {run[-1].rpartition(' ')[2]}" if len(run) > 1 else "") for run in runs
    )
