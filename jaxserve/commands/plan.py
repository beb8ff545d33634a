"""`jaxserve plan`: plans memory, sequences and step times of a model on a GPU, without a GPU."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.cli.gpus import GPUS, Gpu
from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.startup.environment import prepare
from jaxserve_checkpoints.reader import CheckpointError

if TYPE_CHECKING:
    from jaxserve.startup.engine_plan import EnginePlan

_CONTEXT = 1024
"""Tokens of each sequence in the estimated steps, as in the measurements below."""


class Factors(NamedTuple):
    """Ratios of measured decode steps to the time of reading their bytes at the peak rate."""

    least: float
    most: float


_FACTORS = {
    None: Factors(1.28, 1.48),
    "fp8": Factors(1.47, 1.57),
    "int4": Factors(1.55, 1.86),
    "nvfp4": Factors(1.61, 2.1),
}
"""Factors by --quantization, for 1 to 64 sequences of Qwen3-4B (1 to 256 in bfloat16) on an H100,
and in bfloat16 on an H200. From docs/measurements/quantized_steps_h100.json and step_h200.json; a
test recomputes them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A decode step of sequences with 1,024 tokens each. Times are in milliseconds."""

    sequences: int
    peak_ms: float
    """Time to move weights, keys, values and state at the memory's peak rate. No step is faster."""
    least_ms: float
    most_ms: float
    """Expected time, by the ratios of measured steps."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The sizes that a start with the same flags would choose, in bytes."""

    gpu: str
    memory: int
    """Memory that the process may use."""
    weights: int
    kv_cache: int
    kv_bytes_per_token: int
    kv_tokens: int
    state_bytes: int
    """State of recurrent layers per sequence; 0: there are none."""
    snapshots: int
    """Number of state snapshots for the prefix cache."""
    max_num_seqs: int
    max_model_len: int
    model_max_len: int
    measured: bool
    """Whether steps were measured on GPUs of this kind."""
    steps: list[Step]

    @property
    def streams(self) -> dict[int, int]:
        """Number of sequences that run at once, by tokens per sequence."""
        lengths = (length for length in (1024, 4096, 16384) if length <= self.max_model_len)
        return {
            length: min(self.kv_tokens // length, self.max_num_seqs)
            for length in sorted({*lengths, self.max_model_len})
        }


def plan(options: Options) -> int:
    """Prints the estimate. Returns the exit status. Errors are one line on stderr."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # do not use a GPU of this machine
    prepare(options.gpu_memory_utilization)
    logging.getLogger("jaxserve").setLevel(logging.ERROR)  # the estimate has the same figures
    try:
        found = estimate(options)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(asdict(found) | {"streams": found.streams}, indent=1))
    else:
        print("\n".join(_lines(found, options)))
    return 0


def estimate(options: Options) -> Estimate:
    """Plans a start on the GPU that the options name.

    Raises:
      ConfigError: the model does not fit, or is neither a named model nor a folder.
    """
    gpu = gpu_of(options)
    planned = engine_plan(options, gpu)
    cache, scheduler = planned.config.cache, planned.config.scheduler
    spec = planned.config.spec
    memory = planned.memory(0)
    per_token, state = _per_token(planned), _state_bytes(planned)
    each = _CONTEXT * per_token + 2 * state  # state is read and written
    return Estimate(
        gpu=gpu.name,
        memory=planned.limit,
        weights=memory.weights,
        kv_cache=memory.kv_cache,
        kv_bytes_per_token=per_token,
        kv_tokens=cache.usable_tokens,
        state_bytes=state,
        snapshots=cache.snapshots,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
        model_max_len=spec.max_position,
        measured=gpu.capability == "9.0",
        steps=[
            _step(rows, _read_weights(planned, rows), each, gpu, options.quantization)
            for rows in planned.config.buckets.decode
            if rows * _CONTEXT <= cache.usable_tokens
        ],
    )


def gpu_of(options: Options, flag: str = "--gpu") -> Gpu:
    """Returns the GPU that a flag names.

    Raises:
      ConfigError: the flag is missing.
    """
    if options.gpu is None:
        raise ConfigError(f"{flag} is missing: one of {', '.join(GPUS)}")
    gpu = GPUS[options.gpu]
    return gpu._replace(mebibytes=options.gpu_memory >> 20) if options.gpu_memory else gpu


def engine_plan(options: Options, gpu: Gpu) -> EnginePlan:
    """Plans a start on a simulated device with the GPU's figures. Reads no weights.

    Raises:
      ConfigError: a start would fail, or --model is neither a named model nor a folder.
    """
    from dataclasses import replace

    from jaxserve.startup.engine_plan import plan_engine  # imports jax
    from jaxserve.weights.model_source import find_model

    if options.model in NAMED_MODELS:  # a named model needs no files
        options = replace(options, load_format="dummy")
    elif options.model is not None and not os.path.isdir(options.model):
        raise ConfigError(
            f"--model {options.model}: pass a folder with config.json, or one of "
            f"{', '.join(NAMED_MODELS)}"
        )
    limit = int(gpu.mebibytes * 2**20 * options.gpu_memory_utilization)
    device = SimpleNamespace(
        platform="gpu",
        device_kind=gpu.name,
        compute_capability=gpu.capability,
        core_count=gpu.multiprocessors,
        memory_stats=lambda: {"bytes_limit": limit},
        client=SimpleNamespace(platform_version="cuda"),
    )
    return plan_engine(options, find_model(options), device)


def _per_token(planned: EnginePlan) -> int:
    """Returns the bytes of keys and values per token in all layers, including a draft head's."""
    from jaxserve.runner import kv_cache

    config = planned.config
    pages = sum(kv_cache.page_bytes(config.layouts, config.kv_shapes, config.dtype))
    return pages // config.cache.page_size


def _state_bytes(planned: EnginePlan) -> int:
    """Returns the bytes of recurrent state per sequence or snapshot."""
    from jaxserve.models.delta_net import abstract_state
    from jaxserve.startup.memory import tree_bytes

    return tree_bytes(abstract_state(planned.config.spec, planned.config.dtype, 1))


def _read_weights(planned: EnginePlan, rows: int) -> int:
    """Returns the bytes of weights that a decode step of few sequences reads.

    Excludes fp8 copies. Excludes an embedding that is not the output matrix, because a step reads
    few of its rows. Counts the expected number of used experts, if each sequence chooses at random.
    """
    from jaxserve.models.layer_weights import Experts
    from jaxserve.startup.memory import tree_bytes

    spec = planned.config.spec
    total = tree_bytes(planned.weights.encoded)
    if spec.experts:
        missed = (1 - spec.experts.top_k / spec.experts.num_experts) ** rows
        total -= round(missed * tree_bytes(_nodes(planned.weights.encoded, Experts)))
    if spec.tie_embeddings:
        return total
    import jax.numpy as jnp

    return total - spec.vocab_size * spec.embed * jnp.dtype(planned.config.dtype).itemsize


def _nodes(tree: Any, kind: type) -> list[Any]:
    """Returns all nodes of a type in a tree."""
    import jax

    found = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def _step(rows: int, weights: int, each: int, gpu: Gpu, quantization: str | None) -> Step:
    """Returns the estimate of a decode step. `each`: bytes per sequence besides the weights."""
    factors = _FACTORS[quantization]
    peak = (weights + rows * each) / (gpu.gb_per_s * 1e9) * 1e3
    return Step(
        sequences=rows,
        peak_ms=round(peak, 3),
        least_ms=round(peak * factors.least, 2),
        most_ms=round(peak * factors.most, 2),
    )


def _pace(step: Step) -> str:
    if step.least_ms < 1:
        return " under 1 ms: launching the step counts more"
    times = f"{step.least_ms:7.2f} to {step.most_ms:.2f} ms"
    return f"{times}, {1e3 / step.most_ms:.0f} to {1e3 / step.least_ms:.0f} tokens/s each"


def _state_lines(found: Estimate) -> list[str]:
    """Returns the lines about recurrent state, if there is any."""
    if not found.state_bytes:
        return []
    gib, each = 2**30, f"{found.state_bytes / 2**20:,.1f} MiB"
    kept = found.snapshots * found.state_bytes / gib
    return [
        f"state             {found.max_num_seqs * found.state_bytes / gib:8.1f} GiB, {each} for "
        "each sequence",
        f"snapshots         {kept:8.1f} GiB, {found.snapshots:,} of {each}, for the prefix cache",
    ]


def _lines(found: Estimate, options: Options) -> list[str]:
    gib = 2**30
    cut = "" if found.max_model_len == found.model_max_len else " (what fits)"
    lines = [
        f"{options.model or 'jaxserve-embedded'} on {found.gpu}, worked out without the GPU",
        "",
        f"memory to use     {found.memory / gib:8.1f} GiB",
        f"weights           {found.weights / gib:8.1f} GiB",
        f"KV cache          {found.kv_cache / gib:8.1f} GiB, {found.kv_tokens:,} tokens of "
        f"{found.kv_bytes_per_token / 1024:.1f} KiB",
        *_state_lines(found),
        f"context           {found.max_model_len:8,} tokens{cut}",
        f"sequences at once {found.max_num_seqs:8,}",
    ]
    lines += [f"  of {length:,} tokens each: {count:,}" for length, count in found.streams.items()]
    lines += ["", f"decode step, {_CONTEXT:,} tokens of context each:"]
    lines += [
        f"  {step.sequences:4} sequence{'s' if step.sequences > 1 else ' '} {_pace(step)}"
        for step in found.steps
    ]
    measured = "Steps were measured on such a GPU" if found.measured else "Never run on such a GPU"
    lines += ["", f"{measured}; ratios are those of Qwen3-4B on an H100 and an H200."]
    return lines
