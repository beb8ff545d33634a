"""Opens the tiers of the prefix cache in host memory and on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxserve
from jaxserve.cli.options import Options
from jaxserve.config import ConfigError, HostTierConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.metrics.tier import TierMetrics
from jaxserve.offload.copier import CpuCopier, CudaCopier, Ring, RingPart
from jaxserve.offload.counters import OffloadCounters
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.disk import DiskTier
from jaxserve.offload.page_folder import FolderError
from jaxserve.offload.slab import HostSlab, NotEnoughMemory
from jaxserve.runner.page_moves import RingArray
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.runner.state_pieces import StatePieces
from jaxserve.scheduler.host_tier import TierParts
from jaxserve.startup import memory
from jaxserve.startup.engine_plan import EnginePlan
from jaxserve.weights.model_source import ModelSource
from jaxserve_kernels.cuda_driver import CudaError

log = logging.getLogger(__name__)


_DISK_BYTES = 100 * 10**9
"""Default limit of the folder in bytes."""


class OpenTier(NamedTuple):
    """A tier that uses the rings of a runner."""

    parts: TierParts
    close: Callable[[], None]
    """Ends all copies and frees the memory. Nothing may use the tier afterwards."""
    metrics: TierMetrics


def open_slab(config: HostTierConfig) -> HostSlab:
    """Allocates and pins the tier's host memory.

    Raises:
      ConfigError: there is too little memory, or it cannot be pinned.
    """
    size = config.slots * max(config.page_bytes)
    said = 0.0

    def show(done: int, total: int) -> None:
        nonlocal said
        if done == total or done / total >= said + 0.25:
            said = done / total
            log.info(
                "host memory for prefixes: %s of %s ready", *map(memory.in_words, (done, total))
            )

    try:
        return HostSlab(config.slots, max(config.page_bytes), cuda=_cuda(), progress=show)
    except (NotEnoughMemory, CudaError) as error:
        raise ConfigError(
            f"--kv-offload-size {memory.in_words(size)}: {error}; ask for less, or leave it out"
        ) from None


def _cuda() -> CudaContext | None:
    device: Any = jax.devices()[0]
    return CudaContext(device.local_hardware_id) if device.platform == "gpu" else None


def open_tier(
    options: Options,
    source: ModelSource,
    plan: EnginePlan,
    slab: HostSlab,
    runner: Runner,
    metrics: Metrics,
) -> OpenTier:
    """Opens the plan's tier over the runner's rings.

    Raises:
      ConfigError: the folder cannot be used, or the GPU refuses to create streams.
    """
    assert plan.host is not None
    counters = OffloadCounters()
    disk_total = options.kv_offload_disk_size or _DISK_BYTES
    try:
        copier = _copier(options, plan, slab, runner, counters)
        disk = None
        if options.kv_offload_path is not None:
            disk = DiskTier(
                options.kv_offload_path,
                disk_total,
                slab,
                fingerprint(options, source, plan.config, runner),
                wake=_wake,
                counters=counters,
            )
    except (FolderError, CudaError) as error:
        raise ConfigError(f"--kv-offload: {error}") from None
    size = slab.num_slots * slab.stride
    observer = metrics.open_tier(counters, num_bytes=size, slot_bytes=slab.slot_bytes)

    if disk is not None:
        files, observer.disk_total = disk, disk_total
        observer.disk_bytes = lambda: files.num_bytes

    def close() -> None:
        rests = [copier.close(), *([] if disk is None else [disk.close()])]
        if all(rests):
            slab.close()

    parts = TierParts(config=plan.host, copier=copier, disk=disk, observer=observer)
    return OpenTier(parts, close, observer)


def _copier(
    options: Options, plan: EnginePlan, slab: HostSlab, runner: Runner, counters: OffloadCounters
) -> CpuCopier | CudaCopier:
    mover, rings = runner.mover, plan.config.rings
    assert mover is not None and rings is not None

    def store_ring() -> Ring:
        return _ring(mover.store_ring(), rings.store)

    store, load = store_ring(), _ring(mover.load_ring(), rings.load)
    verify, cuda = options.kv_offload_verify, _cuda()
    copier: CpuCopier | CudaCopier
    if cuda is None:
        copier = CpuCopier(slab, store, load, wake=_wake, verify=verify, counters=counters)
    else:
        copier = CudaCopier(
            slab, store, load, cuda=cuda, wake=_wake, verify=verify, counters=counters
        )
    mover.on_new_ring = lambda: copier.use_store_ring(store_ring())
    return copier


def _ring(groups: list[list[RingArray]], slots: int) -> Ring:
    return Ring([[RingPart(*array) for array in arrays] for arrays in groups], slots)


def _wake() -> None:
    """Does nothing: the engine polls in each turn, and also while it waits for copies."""


def fingerprint(options: Options, source: ModelSource, config: RunnerConfig, runner: Runner) -> str:
    """Returns a JSON text of all settings on which a page's bytes depend besides its tokens.

    These are the weights (names, sizes and times of their files), the scales, the page layout, the
    draft model and the version of jaxserve.
    """
    scales = runner.kv_scales
    pairs = zip(config.layouts, config.kv_shapes, strict=True)
    shapes = [layout.page_shapes(shape, config.dtype) for layout, shape in pairs]
    if (state := config.recurrent_state) is not None:
        shapes = [*shapes, StatePieces.of(state).page_shapes(state)]
    return json.dumps(
        {
            "version": jaxserve.__version__,
            "identity": config.cache.identity,
            "page_size": config.cache.page_size,
            "pages": [[f"{part.dtype.name}{list(part.shape)}" for part in each] for each in shapes],
            "draft": options.speculative_config and options.speculative_config.model,
            "scales": None if scales is None else hashlib.sha256(scales.tobytes()).hexdigest(),
            "weights": [options.load_format, options.quantization, options.seed],
            "files": list(_files(source)),
        }
    )


def _files(source: ModelSource) -> Iterator[str]:
    folder = source.folder if source.orbax is None else Path(source.orbax.step.folder)
    if folder is None:
        return
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                found = path.stat()
                yield f"{path.relative_to(folder)} {found.st_size} {found.st_mtime_ns}"
