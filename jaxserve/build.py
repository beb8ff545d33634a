"""From a model and flags to a scheduler and a compiled runner: runs on the engine thread."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve import kv_cache, slot_tables
from jaxserve.cli import Options
from jaxserve.config import Buckets, CacheConfig, ConfigError, ModelSpec, SchedulerConfig
from jaxserve.engine import Parts, Progress
from jaxserve.measure import measure
from jaxserve.metrics import Metrics
from jaxserve.model_source import ModelSource
from jaxserve.models import qwen3
from jaxserve.models.quantization import HeadFormat, Quantization, WeightFormat
from jaxserve.runner import Pending, Runner, RunnerConfig, on_compile
from jaxserve.scheduler import Scheduler
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import Encode, encoded_abstract, load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_kernels.kv_format import KVFormat, named
from jaxserve_kernels.paged_attention import tile_tokens

log = logging.getLogger(__name__)

_GPU_DECODE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# Smaller ones take as long as 64, larger ones longer per token than 2048: see docs/performance.md.
_GPU_PREFILL = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_CPU_DECODE = (1, 4, 16, 64)
_CPU_PREFILL = (16, 64, 256)
_CPU_TILE = 16
_CPU_KV_BYTES = 512 * 2**20
_GPU_MAX_ITL_MS, _CPU_MAX_ITL_MS = 50.0, 1000.0
_HOST_RESERVE = 512 * 2**20
"""Host memory left to everything else when weights and cache live there."""


def build_parts(
    options: Options, source: ModelSource, metrics: Metrics, progress: Progress
) -> Parts[Pending]:
    """Load the weights, plan the memory, compile every bucket.

    Raises:
      ConfigError: settings that contradict each other, or too little memory, with the numbers.
      CheckpointError: weights that are missing, damaged or of another model.
    """
    gpu = jax.default_backend() == "gpu"
    _use_compile_cache(options.compile_cache_dir)
    watch = _CompileWatch(metrics, forbid=options.forbid_compiles)
    on_compile(watch)
    dtype = _dtype(options.dtype, gpu=gpu)
    buckets = _buckets(options, gpu=gpu)
    scheduler = _scheduler_config(options, source.spec, buckets, gpu=gpu)
    abstract = qwen3.abstract(source.spec, dtype, stacked=gpu)
    encode = _quantization(options).encoder(source.spec)
    weight_bytes = _nbytes(encoded_abstract(abstract, encode))
    if gpu:
        _check_device_memory(weight_bytes)
    else:
        _check_host_memory(weight_bytes, options)

    started = time.perf_counter()
    params = _load(source, abstract, encode, options.seed, progress)
    loaded = time.perf_counter()
    kv_format = named(options.kv_cache_dtype)
    cache = _cache_config(options, source.spec, kv_format, dtype, buckets, scheduler, gpu=gpu)
    cache = replace(
        cache, identity=f"{source.names[0]} {jnp.dtype(dtype).name} {options.kv_cache_dtype}"
    )
    config = RunnerConfig(
        spec=source.spec,
        cache=cache,
        scheduler=scheduler,
        buckets=buckets,
        dtype=dtype,
        sampled_vocab=min(source.spec.vocab_size, source.tokenizer.vocab_size)
        if source.folder
        else source.spec.vocab_size,
        tile_size=tile_tokens(source.spec.q_heads // source.spec.kv_heads) if gpu else _CPU_TILE,
        kv_format=kv_format,
    )
    runner = Runner(config, params, metrics)
    progress("compiling", 0.0)
    try:
        runner.compile(
            options.compile_workers or os.cpu_count() or 1,
            lambda name, done: progress("compiling", done),
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"too little memory on the device for the KV cache of {cache.usable_tokens} tokens "
            "and the steps' scratch; lower --kv-cache-memory-bytes, --max-num-batched-tokens or "
            f"--max-num-seqs ({str(error).splitlines()[0]})"
        ) from None
    kv_bytes = kv_cache.total_bytes(kv_format, config.kv_shape, dtype)
    compiled = time.perf_counter()
    times = measure(runner, config)
    log.info(
        "weights in %.1f s, %d buckets compiled in %.1f s, timed in %.1f s; KV cache (%s): "
        "%d pages of %d tokens (%d tokens, %.2f GiB); largest step scratch %.2f GiB",
        loaded - started,
        len(config.all_buckets()),
        compiled - loaded,
        time.perf_counter() - compiled,
        kv_format.name,
        cache.usable_pages,
        cache.page_size,
        cache.usable_tokens,
        kv_bytes / 2**30,
        runner.temp_bytes() / 2**30,
    )
    for kind, size in (
        ("weights", weight_bytes),
        ("kv", kv_bytes),
        ("temporaries", runner.temp_bytes()),
    ):
        metrics.set_memory(kind, size)
    metrics.set_cache_info(page_size=cache.page_size, num_pages=cache.usable_pages)
    watch.serving = True
    return Parts(Scheduler(scheduler, cache, times=times), runner)


def _use_compile_cache(folder: Path | None) -> None:
    """XLA's own cache: a restart loads what an earlier start compiled."""
    folder = folder or Path.home() / ".cache" / "jaxserve" / "xla"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # programs are loaded from it
    except OSError as error:
        log.warning("no compile cache, the next start compiles again: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _dtype(name: str, *, gpu: bool) -> DTypeLike:
    if name == "auto":
        return jnp.bfloat16 if gpu else jnp.float32
    return jnp.dtype(name)


def _buckets(options: Options, *, gpu: bool) -> Buckets:
    decode = options.decode_buckets or (_GPU_DECODE if gpu else _CPU_DECODE)
    prefill = options.prefill_buckets or (_GPU_PREFILL if gpu else _CPU_PREFILL)
    limit = options.max_num_seqs or decode[-1]
    decode = (*(size for size in decode if size < limit), limit)
    tokens = options.max_num_batched_tokens or max(prefill[-1], limit)
    prefill = (*(size for size in prefill if size < tokens), tokens)
    return Buckets(decode=decode, prefill=prefill)


def _scheduler_config(
    options: Options, spec: ModelSpec, buckets: Buckets, *, gpu: bool
) -> SchedulerConfig:
    max_model_len = options.max_model_len or spec.max_position
    if max_model_len > spec.max_position:
        raise ConfigError(
            f"--max-model-len {max_model_len} is beyond the model's {spec.max_position} positions"
        )
    return SchedulerConfig(
        max_num_seqs=buckets.decode[-1],
        max_model_len=max_model_len,
        max_num_batched_tokens=buckets.prefill[-1],
        max_queued=options.max_num_queued_reqs,
        prefix_caching=options.enable_prefix_caching,
        max_itl=(options.max_itl_ms or (_GPU_MAX_ITL_MS if gpu else _CPU_MAX_ITL_MS)) / 1e3,
        policy=options.scheduling_policy,
        ttft_slo=None if options.slo_ttft_ms is None else options.slo_ttft_ms / 1e3,
    )


def _quantization(options: Options) -> Quantization:
    head = options.lm_head_dtype
    if head == "auto":
        head = "int8" if options.quantization else "unquantized"
    return Quantization(
        layers=cast(WeightFormat | None, options.quantization),
        head=None if head == "unquantized" else cast(HeadFormat, head),
    )


def _nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _load(
    source: ModelSource, abstract: qwen3.Params, encode: Encode, seed: int, progress: Progress
) -> qwen3.Params:
    progress("loading", 0.0)
    if source.folder is None:
        params = dummy_params(abstract, seed, encode)
    else:
        params = load_params(
            open_checkpoint(source.folder),
            qwen3.rules(source.spec),
            abstract,
            progress=lambda done, total: progress("loading", done / total),
            encode=encode,
        )
    return jax.block_until_ready(params)


def _cache_config(
    options: Options,
    spec: ModelSpec,
    kv_format: KVFormat,
    dtype: DTypeLike,
    buckets: Buckets,
    scheduler: SchedulerConfig,
    *,
    gpu: bool,
) -> CacheConfig:
    page_size = options.block_size or kv_format.page_size or (64 if gpu else 16)
    if page_size != (kv_format.page_size or page_size):
        raise ConfigError(
            f"--block-size is {page_size}, but pages of --kv-cache-dtype {kv_format.name} have "
            f"{kv_format.page_size} tokens; leave --block-size away"
        )
    budget = options.kv_cache_memory_bytes
    useful = scheduler.max_num_seqs * (-(-scheduler.max_model_len // page_size)) + 1
    if budget is None:
        budget = _device_budget(spec, dtype, buckets) if gpu else _CPU_KV_BYTES
    one_page = kv_cache.shape(
        spec, CacheConfig(num_pages=2, page_size=page_size), scheduler.max_num_seqs
    )
    cache = kv_cache.fit_pages(kv_format, one_page, dtype, budget, scheduler.max_model_len)
    return replace(cache, num_pages=min(cache.num_pages, useful))


def _device_budget(spec: ModelSpec, dtype: DTypeLike, buckets: Buckets) -> int:
    """What is left of the process's share of the GPU after weights and step scratch."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    free = min(free, stats.get("largest_free_block_bytes") or free)
    itemsize = jnp.dtype(dtype).itemsize
    tokens, rows = buckets.prefill[-1], buckets.decode[-1]
    activations = tokens * (4 * spec.ffn + 4 * spec.q_size + 8 * spec.embed) * itemsize
    scores = rows * spec.vocab_size * 4 * 4
    tables = slot_tables.num_bytes(slot_tables.abstract(rows, spec.vocab_size))
    return free - activations - scores - tables - 2**30


def _check_device_memory(weights: int) -> None:
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", weights)
    if weights > limit:
        raise ConfigError(
            f"too little memory: the weights take {weights / 2**30:.1f} GiB, this process may "
            f"take {limit / 2**30:.1f} GiB of the GPU; use a smaller model, or a higher "
            "--gpu-memory-utilization if nothing else needs the card"
        )


def _check_host_memory(weights: int, options: Options) -> None:
    cache = options.kv_cache_memory_bytes or _CPU_KV_BYTES
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if weights + cache + _HOST_RESERVE > available:
        raise ConfigError(
            f"too little memory: weights {weights / 2**30:.1f} GiB + KV cache "
            f"{cache / 2**30:.1f} GiB + {_HOST_RESERVE / 2**30:.1f} GiB, but "
            f"{available / 2**30:.1f} GiB are free on this machine; "
            "use a smaller model or a GPU"
        )


class _CompileWatch:
    """Counts compilations by phase. While serving each one is a bug: said, or fatal if asked."""

    def __init__(self, metrics: Metrics, *, forbid: bool):
        self._metrics = metrics
        self._forbid = forbid
        self.serving = False

    def __call__(self) -> None:
        self._metrics.count_compile("serving" if self.serving else "startup")
        if not self.serving:
            return
        if self._forbid:
            raise RuntimeError("a program was compiled while serving")
        log.error("a program was compiled while serving: please report this")
