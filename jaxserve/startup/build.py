"""Builds the scheduler and the compiled runner from a model and flags. Runs on the engine
thread."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.engine.engine import Progress
from jaxserve.engine.loop import Parts
from jaxserve.kv_events.events import Sink
from jaxserve.metrics.metrics import Metrics
from jaxserve.models import decoder
from jaxserve.offload.slab import HostSlab
from jaxserve.programs.executable_cache import NOT_THERE, Executable
from jaxserve.programs.executables import Obtained, OnMissing, by_reason, obtain, on_compile
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Pending, Runner
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.speculation.head import HeadDrafts
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.verify import Verification
from jaxserve.setting_files import read_text
from jaxserve.speculation_config import SpeculationConfig
from jaxserve.startup import fast_paths, heap, host_tier, host_tier_plan, kv_scales, memory
from jaxserve.startup.engine_plan import EnginePlan, plan_engine
from jaxserve.startup.measure import step_times
from jaxserve.startup.timeline import Timeline
from jaxserve.startup.weight_store import RunnerWeights
from jaxserve.weights.loading import weight_loader
from jaxserve.weights.model_source import ModelSource
from jaxserve_checkpoints.quantized import QuantizedCheckpoint
from jaxserve_checkpoints.reader import Checkpoint

log = logging.getLogger(__name__)


class OutOfDeviceMemory(ConfigError):
    """The device has less free memory than planned, usually because other processes use it."""


def build_parts(
    options: Options,
    source: ModelSource,
    metrics: Metrics,
    progress: Progress,
    timeline: Timeline,
    *,
    cache_events: Sink | None = None,
    alone: bool = True,
    tiers: bool = True,
) -> Parts[Pending]:
    """Loads weights and programs in parallel, compiles missing programs, and runs every bucket
    once.

    Args:
      cache_events: gets the events of cached pages.
      tiers: allocate host memory for evicted pages, if the flags ask for it.
      alone: nothing else in the process compiles, so any later compilation is an error.

    Raises:
      ConfigError: see `plan_engine`. Also if programs are missing and `--require-precompiled` is
        set, and OutOfDeviceMemory.
      CheckpointError: weights are missing, damaged or belong to another model.
    """
    jax.devices()
    with timeline.span("plan"):
        plan = plan_engine(options, source)
    if tiers and plan.host is not None:
        own, parts = jax.default_backend() == "cpu", plan.memory(0)
        beside = parts.weights + parts.kv_cache + parts.state if own else 0
        host_tier_plan.check_memory(plan.host, beside)
    on_missing: OnMissing = functools.partial(_announce_missing, plan)
    if options.require_precompiled:
        on_missing = functools.partial(_refuse_missing, plan)
        on_missing({each.name: NOT_THERE for each in plan.programs if not plan.cache.has(each)})
    watch = _CompileWatch(metrics, forbid=options.forbid_compiles)
    on_compile(watch)
    workers = options.compile_workers or os.cpu_count() or 1
    both = _Both(progress)
    with timeline.span("copies"):
        copies = _copies(plan, on_missing)
    loader = weight_loader(plan.weights, copies)

    def load() -> decoder.Params:
        with timeline.span("weights"):
            return jax.block_until_ready(loader(both.weights))

    def take_host_memory() -> HostSlab | None:
        if plan.host is None or not tiers:
            return None
        with timeline.span("host memory"):
            return host_tier.open_slab(plan.host)

    with ThreadPoolExecutor(2, thread_name_prefix="weights") as pool:
        weights = pool.submit(load)
        slab = pool.submit(take_host_memory)

        def shown(phase: str, fraction: float) -> None:
            if weights.done():
                weights.result()  # if the weights fail, no further program is started
            both.executables(phase, fraction)

        with timeline.span("executables"):
            obtained = _with_memory_errors(
                plan,
                lambda: obtain(plan.steps, plan.cache, workers, shown, on_missing=on_missing),
            )
        params = _with_memory_errors(plan, weights.result)
        slab = slab.result()
    head = _with_memory_errors(plan, plan.head.load) if plan.head else None
    runner = Runner(plan.config, params, metrics, head)
    with timeline.span("warming"):
        prepare = functools.partial(_set_kv_scales, options, source, plan)
        _with_memory_errors(plan, lambda: runner.start(obtained.executables, progress, prepare))
    with timeline.span("timing"):
        times = step_times(runner, plan.config, plan.step_times_file)
    with timeline.span("trimming"):
        heap.settle()
    _report(plan, runner, obtained, metrics)
    fast_paths.report(metrics, plan.config.target)
    watch.serving = alone
    store = RunnerWeights(options, source, plan, copies, runner)
    host = slab and host_tier.open_tier(options, source, plan, slab, runner, metrics)
    config = plan.config
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        times=times,
        verification=_verification(options, config),
        cache_events=cache_events,
        host=host and host.parts,
    )
    if host is not None and scheduler.host is not None:
        host.metrics.usage = scheduler.host.usage
    return Parts(scheduler, runner, store, host and host.close)


def _verification(options: Options, config: RunnerConfig) -> Verification | None:
    buckets = config.buckets.verify
    if not buckets:
        return None
    chosen = options.speculative_config or SpeculationConfig()
    drafts = min(max(positions for _, positions in buckets) - 1, chosen.drafts)
    if config.draft is not None:
        head = HeadDrafts(drafts=min(drafts, config.draft.num_drafts))
        room = config.draft.room
        return Verification(proposer=head, buckets=buckets, observe=head.observe, room=room)
    proposer = Lookup(
        drafts=drafts,
        least=chosen.least_match,
        most=chosen.most_match,
        shared=chosen.shared_tokens,
    )
    return Verification(proposer=proposer, buckets=buckets, ended=proposer.ended)


def _set_kv_scales(options: Options, source: ModelSource, plan: EnginePlan, runner: Runner) -> None:
    """Sets the scales of a KV format that has them: computed from a text, the checkpoint's, or
    1."""
    config, weights = plan.config, plan.weights
    if not config.kv_format.has_scales:
        return
    if options.calculate_kv_scales:
        chosen = options.calibration
        text = read_text(chosen, "--calibration") if chosen else kv_scales.TEXT
        ids = source.tokenizer.encode(text)
        scales, origin = kv_scales.calculated(runner, config, ids), f"from {len(ids)} tokens"
    else:
        scales, origin = None, "from the checkpoint"
        checkpoint = weights.checkpoint
        if isinstance(checkpoint, QuantizedCheckpoint):
            checkpoint = checkpoint.checkpoint
        if isinstance(checkpoint, Checkpoint):  # other sources have no scales
            scales = kv_scales.stored(checkpoint, config.spec)
        if scales is not None:
            runner.use_kv_scales(scales)
    if scales is None:
        log.info("scales of the KV cache: 1, so keys and values beyond 448 are clipped")
    else:
        log.info(
            "scales of the KV cache: %s, keys end at %.3g to %.3g, values at %.3g to %.3g",
            *(origin, *(448 * f(scales[:, :, kind]) for kind in (0, 1) for f in (np.min, np.max))),
        )


def _announce_missing(plan: EnginePlan, lacking: Mapping[str, str]) -> None:
    """Logs why this start takes longer than the next one."""
    if any(each.name in lacking for each in plan.steps):  # other programs compile at once
        log.info(
            "compiling %d of %d programs; later starts load them from %s",
            *(len(lacking), len(plan.programs), plan.cache.folder),
        )


def _refuse_missing(plan: EnginePlan, lacking: Mapping[str, str]) -> None:
    """Raises ConfigError for missing programs, given as name -> reason."""
    if lacking:
        near = plan.cache.differences()
        raise ConfigError(
            f"{len(lacking)} of {len(plan.programs)} programs are not precompiled in "
            f"{plan.cache.folder}: {by_reason(lacking)}"
            + (f". There are programs for other settings: {near}" if near else "")
            + ". Run `jaxserve precompile` with the same flags on this machine"
        )


def _with_memory_errors[T](plan: EnginePlan, run: Callable[[], T]) -> T:
    """Calls `run`. If the device runs out of memory, raises OutOfDeviceMemory with one line of
    text."""
    try:
        return run()
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_exhausted(error):
            raise
        raise OutOfDeviceMemory(
            f"too little memory on the device for the weights, the KV cache of "
            f"{plan.config.cache.usable_tokens} tokens and the steps' scratch; if no other process "
            "uses it, lower --kv-cache-memory-bytes, --max-num-batched-tokens or --max-num-seqs "
            f"({str(error).splitlines()[0]})"
        ) from None


def _report(plan: EnginePlan, runner: Runner, obtained: Obtained, metrics: Metrics) -> None:
    """Logs the memory plan with the compiler's real needs, and sets its metrics."""
    config, cache = plan.config, plan.config.cache
    planned = plan.memory(runner.temp_bytes())
    planned.check()
    loaded = len(plan.steps) - len(obtained.compiled)
    first = not loaded and set(obtained.compiled.values()) == {NOT_THERE}
    log.info(
        "%d of %d programs loaded, %d compiled%s",
        *(loaded, len(plan.steps), len(obtained.compiled)),
        "" if first or not obtained.compiled else f" ({by_reason(obtained.compiled)})",
    )
    log.info(
        "memory: %s; KV cache (%s): %d pages of %d tokens, %d tokens",
        planned,
        config.kv_format.name,
        cache.usable_pages,
        cache.page_size,
        cache.usable_tokens,
    )
    for kind, size in (
        ("weights", planned.weights),
        ("kv", planned.kv_cache),
        ("state", planned.state),
        ("temporaries", planned.temporaries),
        ("free", planned.headroom),
    ):
        metrics.set_memory(kind, size)
    metrics.set_cache_info(page_size=config.cache.page_size, num_pages=cache.usable_pages)


class _Both:
    """Combines the progress of weights and programs, which load in parallel. If anything is
    compiled, the progress of compilation counts alone."""

    def __init__(self, report: Progress):
        self._report = report
        self._lock = threading.Lock()
        self._weights = self._executables = 0.0
        self._phase = "loading"

    def weights(self, done: int, total: int) -> None:
        with self._lock:
            self._weights = done / total
            self._show()

    def executables(self, phase: str, fraction: float) -> None:
        with self._lock:
            self._phase, self._executables = phase, fraction
            self._show()

    def _show(self) -> None:
        both = (self._weights + self._executables) / 2
        self._report(self._phase, self._executables if self._phase == "compiling" else both)


def _copies(plan: EnginePlan, on_missing: OnMissing) -> Mapping[str, Executable]:
    """Loads or compiles the programs that copy weights. They come before the steps, so that copying
    starts early."""
    workers = len(plan.staging)
    return obtain(
        plan.staging, plan.cache, workers, lambda phase, done: None, on_missing=on_missing
    ).executables


class _CompileWatch:
    """Counts compilations by phase. A compilation while serving is a bug: it is logged, or with
    `--forbid-compiles` it fails the step."""

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
