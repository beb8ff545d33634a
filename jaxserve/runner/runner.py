"""The device side of a step: compiled buckets, resident state, launch and collect."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxserve.models import decoder
from jaxserve.plan import Sampled, StepPlan
from jaxserve.programs.executable_cache import Executable
from jaxserve.programs.executables import obtain
from jaxserve.runner import batch, prompt_scores, slot_tables
from jaxserve.runner.batch import Bucket, Updates
from jaxserve.runner.programs import (
    FLUSH_UPDATES,
    LARGEST_MAGNITUDES,
    RunnerConfig,
    programs,
    step_name,
)
from jaxserve.runner.prompt_scores import PromptScorer
from jaxserve.runner.step import DeviceState
from jaxserve_kernels.kv_format import with_scales

_KERNELS = (" fusion(", " custom-call(", " copy(", " dot(", " reduce(", " gather(", " scatter(")
"""Instructions of a compiled program that launch a kernel."""


class Pending(NamedTuple):
    """A launched step whose result has not been read."""

    plan: StepPlan
    results: Array
    scores: list[Array]
    """Of prompt tokens."""
    bucket: Bucket
    launched_at: float
    late: bool
    """The step before it was in flight until now, but had ended: the device waited."""


class StepObserver(Protocol):
    """Told of every step; `jaxserve.metrics.metrics.Metrics`, of which no program depends."""

    def observe_step(
        self, kind: str, bucket: int, seconds: float, used: int, padded: int, late: bool
    ) -> None:
        """It computed `used` of the `padded` rows or tokens of its bucket; see `Pending.late`."""
        ...


class Runner:
    """Runs plans on one device. Used by one thread at a time; owns the KV cache and its state."""

    def __init__(self, config: RunnerConfig, params: decoder.Params, observer: StepObserver):
        self._config = config
        self._params = params
        self._observer = observer
        self._buckets = config.all_buckets()
        self._steps: dict[Bucket, Any] = {}
        self._width = config.sequences_shape[1]
        self._kv_scales: NDArray[np.float32] | None = None
        self._in_flight: Any = None
        """Results of the last step that was launched, until they are read."""

    def compile(self, workers: int, progress: Callable[[str, float], None]) -> None:
        """Compile everything on so many threads, then `start`; nothing is kept on disk."""
        obtained = obtain(programs(self._config, self._params), None, workers, progress)
        self.start(obtained.executables, progress)

    def start(
        self,
        executables: Mapping[str, Executable],
        progress: Callable[[str, float], None],
        prepare: Callable[[Runner], None] = lambda runner: None,
    ) -> None:
        """Take the executables of `programs`, allocate the state, run every bucket.

        The KV cache is allocated here and not before, so that what the compiler needs for a while
        does not have to fit beside it.

        Args:
          progress: called with "warming" and the fraction done.
          prepare: called in between, when steps can run and none has: sets scales of the cache.
        """
        self._steps = {bucket: executables[step_name(bucket)] for bucket in self._buckets}
        self._flush, self._zero_state = executables["flush"], executables["state"]
        self._uploads = slot_tables.Uploads(self._config.tables, executables)
        self._scorer = PromptScorer(executables, rows=self._config.scheduler.max_num_seqs)
        self._largest = executables.get(LARGEST_MAGNITUDES)
        self._state, self._free_results = self._fresh_state()
        prepare(self)
        scored = self._scorer.warm(self._params, self._state.attended)
        for done, bucket in enumerate(self._buckets, start=1):
            self._warm(bucket)
            progress("warming", done / len(self._buckets))
        self._state = self._state._replace(tables=self._uploads.warm(self._state.tables))
        jax.block_until_ready((scored, self._state))

    def temp_bytes(self) -> int:
        """The largest scratch memory of any compiled step."""
        analyses = (step.memory_analysis() for step in self._steps.values())
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    def describe_decode(self, rows: int) -> tuple[int, int]:
        """Kernels of the compiled step that decodes `rows` rows, and its scratch bytes."""
        step = self._steps[Bucket.decode(rows)]
        entry = step.as_text().split("ENTRY", 1)[1].split("\n}", 1)[0]
        kernels = sum(kind in entry_line for entry_line in entry.splitlines() for kind in _KERNELS)
        kernels += sum(int(count) - 1 for count in re.findall(r"launches = (\d+) : i64", entry))
        return kernels, step.memory_analysis().temp_size_in_bytes

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step; returns before it has run."""
        bucket = self._bucket_for(plan)
        updates = Updates.of(plan, self._width)
        while len(updates.addresses) > bucket.updates:
            first, updates = updates.split(FLUSH_UPDATES)
            sequences = self._flush(self._state.sequences, first.padded(FLUSH_UPDATES))
            self._state = self._state._replace(sequences=sequences)
        self._state = self._state._replace(tables=self._uploads(self._state.tables, plan))
        packed = batch.pack(plan, updates, bucket, self._config.padding_slot)
        started = time.perf_counter()
        late = self._in_flight is not None and self._in_flight.is_ready()
        results = self._execute(bucket, packed)
        self._in_flight = results
        results.copy_to_host_async()
        scores = self._scorer.launch(self._params, self._state.attended, plan)
        return Pending(plan, results, scores, bucket, started, late)

    def collect(self, pending: Pending) -> list[Sampled | None]:
        """Wait for a step and read what its rows sampled: the only wait for the device."""
        results = np.asarray(pending.results)
        if self._in_flight is pending.results:
            self._in_flight = None
        bucket = pending.bucket
        self._observer.observe_step(
            kind=bucket.kind,
            bucket=bucket.tokens,
            seconds=time.perf_counter() - pending.launched_at,
            used=pending.plan.num_tokens,
            padded=bucket.tokens,
            late=pending.late,
        )
        scores = prompt_scores.read(pending.plan, pending.scores)
        return batch.unpack_results(pending.plan, results, scores)

    def reset(self) -> None:
        """Fresh device state after a step failed: donated buffers may be gone."""
        for buffer in jax.tree.leaves(self._state):
            buffer.delete()  # there is no room for a second cache beside the first
        self._in_flight = None
        self._uploads.forget()
        self._state, self._free_results = self._fresh_state()

    def use_kv_scales(self, scales: NDArray[np.float32]) -> None:
        """From now on, for a format that has them; see `kv_format.with_scales`."""
        self._kv_scales = scales
        self._state = self._state._replace(kv=with_scales(self._state.kv, scales))

    def largest_magnitudes(self) -> NDArray[np.float32]:
        """Of the keys and values in the cache: see `kv_format.largest_magnitudes`."""
        assert self._largest is not None
        return np.asarray(self._largest(self._state.kv))

    def _bucket_for(self, plan: StepPlan) -> Bucket:
        """The smallest bucket of the plan's kind that holds it."""
        kind = "decode" if plan.decode_only else "mixed"
        for bucket in reversed(self._buckets):
            if bucket.kind == kind and bucket.holds(plan):
                return bucket
        lengths = [row.num_tokens for row in plan.rows]
        raise ValueError(f"no {kind} bucket holds a plan with rows of {lengths} tokens")

    def _fresh_state(self) -> tuple[DeviceState, Array]:
        """And a second array for results, see `_execute`."""
        state = jax.block_until_ready(self._zero_state())  # missing memory is missed here
        if self._kv_scales is not None:
            state = state._replace(kv=with_scales(state.kv, self._kv_scales))
        return state, jax.device_put(np.zeros(self._config.results_shape, np.int32))

    def _execute(self, bucket: Bucket, packed: NDArray[np.int32]) -> Array:
        """Launch a compiled step; returns its results.

        Two arrays of results take turns, so that the host can read one while the next step writes
        the other: the results of a step are gone when the one after the next is launched.
        """
        state = self._state._replace(results=self._free_results)
        self._free_results = self._state.results
        self._state = self._steps[bucket](self._params, state, packed)
        return self._state.results

    def _warm(self, bucket: Bucket) -> None:
        """Run a step of padding: allocations and graph recording happen here, not in serving.
        Returns before the device has: the next bucket is launched meanwhile."""
        empty = StepPlan(rows=())
        packed = batch.pack(
            empty, Updates.of(empty, self._width), bucket, self._config.padding_slot
        )
        for _ in range(_warm_calls()):
            self._execute(bucket, packed)


def _warm_calls() -> int:
    """On a GPU the first call runs op by op, the second records the graph for later ones."""
    return 2 if jax.default_backend() == "gpu" else 1


def on_compile(callback: Callable[[], None]) -> None:
    """Call back after every XLA compilation of this process, on the thread that caused it."""

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            callback()

    jax.monitoring.register_event_duration_secs_listener(listener)
