"""Plans an engine from a model and flags: shapes, memory and programs, before weights are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.cli.options import Options
from jaxserve.config import (
    CacheConfig,
    ConfigError,
    HostTierConfig,
    SchedulerConfig,
)
from jaxserve.models.delta_net import abstract_state
from jaxserve.programs.executable_cache import ExecutableCache, Program
from jaxserve.runner import kv_cache, slot_tables
from jaxserve.runner.fingerprint import program_key
from jaxserve.runner.page_moves import Rings, ring_bytes
from jaxserve.runner.programs import RunnerConfig, programs
from jaxserve.startup import gpu_driver, memory
from jaxserve.startup.buckets import bucket_choices, buckets_of
from jaxserve.startup.draft_head import PlannedHead, plan_head
from jaxserve.startup.environment import compiler_options, compiler_settings, memory_share
from jaxserve.startup.flag_checks import check_calibration, check_length, check_windows
from jaxserve.startup.host_tier_plan import check_flags, plan_rings, plan_tier
from jaxserve.startup.memory import MemoryPlan
from jaxserve.startup.room import Fit, Room
from jaxserve.weights.loading import WeightPlan, plan_weights
from jaxserve.weights.model_source import ModelSource
from jaxserve_checkpoints.staging import StagingProgram
from jaxserve_kernels.kv_format import KVFormat, named
from jaxserve_kernels.paged_attention import tile_tokens
from jaxserve_kernels.target import Target

log = logging.getLogger(__name__)

_CPU_TILE, _CPU_WHOLE_TILE = 64, 16
"""Query tile sizes on a CPU. The second is for KV formats that compute whole tiles."""
_GPU_MAX_ITL_MS, _CPU_MAX_ITL_MS = 50.0, 1000.0


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Everything about an engine that is known before weights are read and programs are
    compiled."""

    config: RunnerConfig
    weights: WeightPlan
    head: PlannedHead | None
    """The draft head, if there is one."""
    limit: int
    """Bytes of device memory that the process may use."""
    steps: list[Program]
    """The runner's programs."""
    staging: list[Program]
    """Programs that copy weights to the GPU as stored, and that make fp8 copies of them."""
    cache: ExecutableCache
    host: HostTierConfig | None = None
    """The tier below the device's KV cache."""

    @property
    def programs(self) -> list[Program]:
        """All programs to load or compile."""
        return [*self.steps, *self.staging]

    @property
    def step_times_file(self) -> Path:
        """The file of measured step times, stored beside the programs."""
        return self.cache.folder / "step_times.json"

    def memory(self, temporaries: int) -> MemoryPlan:
        """Returns the device memory by use. `temporaries`: scratch bytes of the largest step."""
        config = self.config
        rows, columns = config.sequences_shape
        results = 2 * 4 * math.prod(config.results_shape)  # one written, one read
        return MemoryPlan(
            limit=self.limit,
            weights=memory.tree_bytes(self.weights.served)
            + (self.head.num_bytes if self.head else 0),
            kv_cache=kv_cache.total_bytes(config.layouts, config.kv_shapes, config.dtype),
            state=rows * columns * 4
            + slot_tables.num_bytes(config.tables)
            + memory.tree_bytes(
                (config.pre_mlp, config.verify, config.recurrent_state, config.draft_states)
            )
            + results
            + ring_bytes(
                *(config.layouts, config.kv_shapes, config.dtype, config.rings),
                config.recurrent_state,
            ),
            temporaries=temporaries,
        )


def plan_engine(options: Options, source: ModelSource, device: Any = None) -> EnginePlan:
    """Plans shapes, memory and programs, for serving and for `jaxserve precompile`.

    Args:
      device: an object with the attributes of a jax device; None: the process's first device.

    Raises:
      ConfigError: settings contradict each other, or memory is too small. The message has the
        numbers.
    """
    # jaxserve has its own cache. On a CPU, programs from JAX's cache cannot be serialised again.
    jax.config.update("jax_enable_compilation_cache", False)
    device = device or jax.devices()[0]
    gpu = device.platform == "gpu"
    spec = source.spec
    dtype = _dtype(options.dtype, gpu=gpu)
    check_length(options, spec)
    check_flags(options)
    files = _cache_folder(options)
    weights = plan_weights(options, source, dtype, files, stacked=gpu)
    kv_format = named(options.kv_cache_dtype)
    check_windows(options, spec, kv_format, gpu=gpu)
    check_calibration(options, kv_format)
    head = plan_head(options, source, weights, dtype, stacked=gpu)
    target = Target.of(device)
    page_size = _page_size(options, kv_format, gpu=gpu)
    groups = kv_cache.sized_groups(spec, page_size, 1, head and head.spec)
    layouts = [each.layout(kv_format) for each in groups]
    shapes = [each.shape for each in groups]
    state = abstract_state(spec, dtype, 1)
    step_pages = -(-buckets_of(options, gpu=gpu).prefill[-1] // page_size)
    rings, beside = plan_rings(
        options, layouts, shapes, dtype, state, step_pages=step_pages, gpu=gpu
    )
    beside += head.num_bytes if head else 0
    e4m3 = _fp8_pays(dtype, target)
    room = Room(
        spec=spec,
        dtype=dtype,
        kv_format=kv_format,
        page_size=page_size,
        gpu=gpu,
        limit=_device_limit(device),
        beside=beside,
        given=options.kv_cache_memory_bytes,
        caches_prefixes=options.enable_prefix_caching,
        quantized=weights.quantized,
        unpacks=not e4m3,
        draft=head and head.spec,
    )
    choices = bucket_choices(options, gpu=gpu)

    def left_beside(weights: int) -> int:
        """Returns the bytes for the KV cache beside `weights` bytes, the head and the rings."""
        fit = room.fit(weights + beside, choices, options.max_model_len)
        return room.left(weights + beside, fit.buckets, fit.max_model_len)

    weights = _with_fp8_copy(options, weights, left_beside, pays=e4m3)
    size = memory.tree_bytes(weights.served) + beside
    fit = room.fit(size, choices, options.max_model_len)
    if not gpu:
        kept = room.state_bytes(fit.buckets, fit.snapshots)
        memory.check_host_memory(size, fit.budget + kept)
    config = _runner_config(options, source, room, fit, target, head, rings)
    room.report(fit, size, choices, chosen=options.max_model_len is None)
    compiling = compiler_options(gpu=gpu)
    settings = compiler_settings() | {name: str(value) for name, value in compiling.items()}
    key = program_key(config, weights.served, settings, device)
    return EnginePlan(
        config=config,
        weights=weights,
        head=head,
        limit=room.limit,
        steps=[
            replace(each, compiler_options=compiling)
            for each in programs(config, weights.served, head and head.abstract)
        ],
        staging=[_staging(each) for each in (*weights.staging, *weights.copying)],
        cache=ExecutableCache(files / "executables", key, source.file_name),
        host=plan_tier(options, config),
    )


def _runner_config(
    options: Options,
    source: ModelSource,
    room: Room,
    fit: Fit,
    target: Target,
    head: PlannedHead | None,
    rings: Rings | None,
) -> RunnerConfig:
    spec, kv_format, dtype = room.spec.within(fit.max_model_len), room.kv_format, room.dtype
    scheduler = _scheduler_config(options, fit, gpu=room.gpu)
    if spec.state is not None:
        scheduler = _with_state(scheduler, room, fit)
    cache = replace(
        _cache_config(options, room, fit),
        identity=f"{source.names[0]} {jnp.dtype(dtype).name} {options.kv_cache_dtype}",
    )
    context = kv_format.max_chunk_context(scheduler.max_model_len, page_size=cache.page_size)
    return RunnerConfig(
        spec=spec,
        cache=cache,
        scheduler=replace(scheduler, max_chunk_context=context),
        buckets=fit.buckets,
        dtype=dtype,
        sampled_vocab=source.sampled_vocab,
        tile_size=tile_tokens(spec.q_heads // spec.kv_heads) if room.gpu else _cpu_tile(kv_format),
        kv_format=kv_format,
        target=target,
        draft=head and head.spec,
        rings=rings,
    )


def _with_state(scheduler: SchedulerConfig, room: Room, fit: Fit) -> SchedulerConfig:
    """Returns the settings for a model with recurrent layers, and logs their state's size."""
    log.info(
        "recurrent layers keep %s of state for %d sequences, and %s in %d snapshots for the prefix "
        "cache",
        memory.in_words(room.state_bytes(fit.buckets)),
        scheduler.max_num_seqs,
        memory.in_words(
            room.state_bytes(fit.buckets, fit.snapshots) - room.state_bytes(fit.buckets)
        ),
        fit.snapshots,
    )
    if not scheduler.prefix_caching or fit.snapshots:
        return scheduler
    log.warning("prefixes are not cached: there is no memory for snapshots of recurrent state")
    return replace(scheduler, prefix_caching=False)


def _cpu_tile(kv_format: KVFormat) -> int:
    return _CPU_WHOLE_TILE if kv_format.computes_whole_tiles else _CPU_TILE


def _device_limit(device: Any) -> int:
    """Returns the bytes of device memory for the process: the allocator's limit, or a share of the
    card if the allocator reports none."""
    return memory.device_limit(device, int(memory_share() * gpu_driver.total_memory()))


def _with_fp8_copy(
    options: Options, weights: WeightPlan, left_beside: Callable[[int], int], *, pays: bool
) -> WeightPlan:
    """Returns the weights, with fp8 copies if --fp8-copy asks for them. `auto` makes copies if
    they pay (`pays`) and memory is left.

    Raises:
      ConfigError: --fp8-copy is on and no weight has 4 bits.
    """
    copied = weights.with_fp8_copy()
    wanted = options.fp8_copy == "on"
    if wanted and not copied.copying:
        raise ConfigError("--fp8-copy on: none of the weights has 4 bits; leave the flag out")
    if not wanted and (options.fp8_copy == "off" or not pays or not copied.copying):
        return weights
    plain = memory.tree_bytes(weights.served)
    size, left = memory.tree_bytes(copied.served) - plain, left_beside(plain)
    sizes = memory.in_words(size), memory.in_words(left)
    if wanted or memory.affords_copy(size, left, options.kv_cache_memory_bytes):
        log.info(
            "steps of more than 64 tokens read a copy in fp8 of the 4-bit weights: it takes %s of "
            "%s for keys and values",
            *sizes,
        )
        return copied
    if size < left:
        log.info(
            "steps of more than 64 tokens would be faster with a copy in fp8 of the 4-bit weights, "
            "but it would take %s of %s for keys and values; --fp8-copy on makes it nevertheless",
            *sizes,
        )
    return weights


def _fp8_pays(dtype: DTypeLike, target: Target) -> bool:
    """Returns whether fp8 products have fast kernels on this device."""
    gpu = target.device
    return gpu is not None and dtype == jnp.bfloat16 and gpu.compute_capability >= 89


def _cache_folder(options: Options) -> Path:
    return options.cache_dir or Path.home() / ".cache" / "jaxserve"


def _dtype(name: str, *, gpu: bool) -> DTypeLike:
    if name == "auto":
        return jnp.bfloat16 if gpu else jnp.float32
    return jnp.dtype(name)


def _scheduler_config(options: Options, fit: Fit, *, gpu: bool) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=fit.buckets.decode[-1],
        max_model_len=fit.max_model_len,
        max_num_batched_tokens=fit.buckets.prefill[-1],
        max_queued=options.max_num_queued_reqs,
        prefix_caching=options.enable_prefix_caching,
        max_itl=(options.max_itl_ms or (_GPU_MAX_ITL_MS if gpu else _CPU_MAX_ITL_MS)) / 1e3,
        policy=options.scheduling_policy,
        ttft_slo=None if options.slo_ttft_ms is None else options.slo_ttft_ms / 1e3,
    )


def _staging(program: StagingProgram) -> Program:
    return Program(
        name=program.name,
        function=program.function,
        arguments=program.arguments,
        donated=program.donated,
        details="staging",
    )


def _page_size(options: Options, kv_format: KVFormat, *, gpu: bool) -> int:
    page_size = options.block_size or kv_format.page_size or (64 if gpu else 16)
    if page_size != (kv_format.page_size or page_size):
        raise ConfigError(
            f"--block-size is {page_size}, but pages of --kv-cache-dtype {kv_format.name} have "
            f"{kv_format.page_size} tokens; leave --block-size out"
        )
    return page_size


def _cache_config(options: Options, room: Room, fit: Fit) -> CacheConfig:
    page_size, sequences = room.page_size, fit.buckets.decode[-1]
    useful = sequences * (-(-fit.max_model_len // page_size)) + 1
    spec, demand = room.spec.within(fit.max_model_len), room.demand(fit.buckets, fit.max_model_len)
    groups = kv_cache.sized_groups(spec, page_size, sequences, room.draft)
    pages = kv_cache.fit_pages(room.kv_format, groups, room.dtype, fit.budget, demand)
    cache = kv_cache.cache_config(
        spec,
        [min(each, useful) for each in pages],
        page_size,
        room.kv_format.own_tokens,
        fit.snapshots,
    )
    least = min(group.usable_pages for group in cache.groups)
    if options.max_num_seqs is not None and options.max_num_seqs > least:
        raise ConfigError(
            f"--max-num-seqs is {options.max_num_seqs}, but the KV cache has "
            f"{least} pages, and each sequence needs one at least"
        )
    return cache
