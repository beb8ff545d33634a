"""Runs steps on the device: owns the compiled programs and the device state."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxserve.models import decoder
from jaxserve.models.layer import Caches, paged
from jaxserve.plan import PageMoves, Sampled, StateCopy, StepPlan
from jaxserve.programs.executable_cache import Executable
from jaxserve.programs.executables import obtain
from jaxserve.runner import (
    batch,
    draft_cache,
    prompt_scores,
    slot_tables,
    state_copies,
    verify,
)
from jaxserve.runner.batch import Bucket, Updates
from jaxserve.runner.draft_step import HeadParams
from jaxserve.runner.page_moves import PageMover
from jaxserve.runner.programs import (
    FLUSH_UPDATES,
    LARGEST_MAGNITUDES,
    RunnerConfig,
    programs,
    step_name,
    step_params,
)
from jaxserve.runner.prompt_scores import PromptScorer
from jaxserve.runner.step import DeviceState
from jaxserve.runner.verify import VerifyBucket

_KERNELS = (" fusion(", " custom-call(", " copy(", " dot(", " reduce(", " gather(", " scatter(")
"""HLO instructions that launch a kernel."""


class Pending(NamedTuple):
    """A launched step whose result has not been read."""

    plan: StepPlan
    results: Array
    scores: list[Array]
    """Scores of prompt tokens, see `prompt_scores`."""
    bucket: Bucket | VerifyBucket
    launched_at: float
    late: bool
    """The previous step had ended before this one was launched: the device was idle."""


class StepObserver(Protocol):
    """Receives a report of every step. `jaxserve.metrics.metrics.Metrics` implements it."""

    def observe_step(
        self, kind: str, bucket: str, seconds: float, used: int, padded: int, late: bool
    ) -> None:
        """Report a step.

        Args:
          kind, bucket: the bucket's kind and its `label`.
          seconds: from launch until its results were on the host.
          used, padded: tokens computed, and the bucket's tokens.
          late: see `Pending.late`.
        """
        ...


class Runner:
    """Runs plans on one device and owns the device state. One thread at a time may use it."""

    def __init__(
        self,
        config: RunnerConfig,
        params: decoder.Params,
        observer: StepObserver,
        head: HeadParams | None = None,
    ):
        """Args:
        head: weights of the draft head or draft model `config.draft`; None without one.
        """
        self._config = config
        self._params, self._head = params, head
        self._abstract = jax.tree.map(_abstract, params)
        self._observer = observer
        self._buckets = config.all_buckets()
        self._steps: dict[Bucket | VerifyBucket, Any] = {}
        self._width = config.sequences_shape[1]
        self._kv_scales: NDArray[np.float32] | None = None
        self._in_flight: Any = None
        """Results of the last launched step; None once they are read."""

    def compile(self, workers: int, progress: Callable[[str, float], None]) -> None:
        """Compile all programs on `workers` threads, then `start`. Writes nothing to disk."""
        obtained = obtain(programs(self._config, self._params, self._head), None, workers, progress)
        self.start(obtained.executables, progress)

    def start(
        self,
        executables: Mapping[str, Executable],
        progress: Callable[[str, float], None],
        prepare: Callable[[Runner], None] = lambda runner: None,
    ) -> None:
        """Take the executables, allocate the device state and run every bucket once.

        The KV cache is allocated only here, so that the compiler's temporary memory need not fit
        beside it.

        Args:
          executables: the compiled `programs`, by name.
          progress: called with "warming" and the fraction done.
          prepare: called once, before the first step runs; it may set the KV cache's scales.
        """
        self._steps = {bucket: executables[step_name(bucket)] for bucket in self._buckets}
        self._flush, self._zero_state = executables["flush"], executables["state"]
        groups = range(self._config.num_groups)
        self._state_copies = executables.get(state_copies.NAME)
        self._uploads = slot_tables.Uploads(self._config.tables, executables)
        several = self._config.verify
        self._verify = None if several is None else verify.OnDevice(several, executables)
        self._scorer = PromptScorer(executables, rows=self._config.scheduler.max_num_seqs)
        self._largest = [executables.get(f"{LARGEST_MAGNITUDES}{group}") for group in groups]
        self._state, self._free_results = self._fresh_state()
        rings = self._config.rings
        self._mover = rings and PageMover(rings, executables, self._config.padding_pages)
        prepare(self)
        scored = self._scorer.warm(self._params, self._state.pre_mlp)
        for done, bucket in enumerate(self._buckets, start=1):
            self._warm(bucket)
            progress("warming", done / len(self._buckets))
        if self._mover is not None:
            self._use_pages(self._mover.warm(self._pages))
        if self._state_copies is not None:
            padding = self._config.padding_slot
            self._copy_states([StateCopy(padding, padding)])
        self._state = self._state._replace(tables=self._uploads.warm(self._state.tables))
        if self._verify is not None:
            self._verify.warm()
        jax.block_until_ready((scored, self._state))

    def temp_bytes(self) -> int:
        """Returns the largest scratch memory of any step, in bytes."""
        analyses = (step.memory_analysis() for step in self._steps.values())
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    def describe_decode(self, rows: int) -> tuple[int, int]:
        """Returns the number of kernels in a decode step of `rows` rows, and its scratch bytes."""
        step = self._steps[Bucket.decode(rows, self._config.num_groups)]
        entry = step.as_text().split("ENTRY", 1)[1].split("\n}", 1)[0]
        kernels = sum(kind in entry_line for entry_line in entry.splitlines() for kind in _KERNELS)
        kernels += sum(int(count) - 1 for count in re.findall(r"launches = (\d+) : i64", entry))
        return kernels, step.memory_analysis().temp_size_in_bytes

    def launch(self, plan: StepPlan) -> Pending:
        """Launch a step. Returns before it runs.

        Raises:
          ValueError: no bucket holds the plan, or a verify row breaks a rule of `plan.Verify`.
        """
        bucket = self._bucket_for(plan)
        if plan.states:
            self._copy_states(plan.states)
        updates = Updates.of(plan, self._width, self._config.num_groups)
        while len(updates.addresses) > bucket.updates:
            first, updates = updates.split(FLUSH_UPDATES)
            sequences = self._flush(self._state.sequences, first.padded(FLUSH_UPDATES))
            self._state = self._state._replace(sequences=sequences)
        self._state = self._state._replace(tables=self._uploads(self._state.tables, plan))
        packed = self._pack(plan, updates, bucket)
        started = time.perf_counter()
        late = self._in_flight is not None and self._in_flight.is_ready()
        results = self._execute(bucket, packed)
        self._in_flight = results
        results.copy_to_host_async()
        scores = self._scorer.launch(self._params, self._state.pre_mlp, plan)
        return Pending(plan, results, scores, bucket, started, late)

    @property
    def mover(self) -> PageMover | None:
        """Moves pages to and from a lower tier; None without a lower tier."""
        return self._mover

    def move_pages(self, moves: PageMoves) -> Callable[[], bool]:
        """Launch moves of pages ahead of the next step. Returns before they are done.

        Returns:
          A function that returns whether the moves are done, see `PageMover.move`.
        """
        assert self._mover is not None, "there are no rings"
        caches, is_done = self._mover.move(self._pages, moves)
        self._use_pages(caches)
        return is_done

    def is_done(self, pending: Pending) -> bool:
        """Whether the device has ended a step, so that `collect` does not wait."""
        return cast(Any, pending.results).is_ready()  # jax.Array's type lacks it

    def collect(self, pending: Pending) -> list[Sampled | None]:
        """Wait for a step and return its rows' results. Nothing else waits for the device."""
        results = np.asarray(pending.results)
        if self._in_flight is pending.results:
            self._in_flight = None
        bucket = pending.bucket
        self._observer.observe_step(
            kind=bucket.kind,
            bucket=bucket.label,
            seconds=time.perf_counter() - pending.launched_at,
            used=pending.plan.num_tokens,
            padded=bucket.tokens,
            late=pending.late,
        )
        if isinstance(bucket, VerifyBucket):
            return verify.unpack_results(pending.plan, results, bucket)
        scores = prompt_scores.read(pending.plan, pending.scores)
        return batch.unpack_results(pending.plan, results, scores)

    def reset(self) -> None:
        """Replace the device state after a failed step, which may have lost donated buffers."""
        for buffer in jax.tree.leaves(self._state):
            if not buffer.is_deleted():
                buffer.delete()  # there is no room for a second cache beside the first
        self._in_flight = None
        if self._mover is not None:
            self._mover.reset()
        self._uploads.forget()
        self._state, self._free_results = self._fresh_state()

    @property
    def params(self) -> decoder.Params:
        """The weights that steps read."""
        return self._params

    def use_params(self, params: decoder.Params) -> None:
        """Replace the weights. No step may be in flight.

        Args:
          params: must have the shapes and dtypes that the programs were compiled for, and lie on
            the same device.

        Raises:
          ValueError: an array has another shape or dtype; the message names the first one.
        """
        check_same(self._abstract, params)
        self._params = params

    def drop_params(self) -> None:
        """Release the weights. Call `use_params` before the next step."""
        self._params = cast(decoder.Params, None)

    def free_state(self) -> None:
        """Free the KV cache and all other device state. `reset` allocates them again."""
        for buffer in jax.tree.leaves(self._state):
            buffer.delete()
        self._free_results.delete()

    def use_kv_scales(self, scales: NDArray[np.float32]) -> None:
        """Set the KV cache's scales: float32 [num_layers, kv_heads, 2], see
        `KVFormat.with_scales`."""
        self._kv_scales = scales
        self._state = self._state._replace(kv=self._scaled(self._state.kv, scales))

    @property
    def kv_scales(self) -> NDArray[np.float32] | None:
        """The scales that `use_kv_scales` set; None if it was never called."""
        return self._kv_scales

    def _scaled(self, kv: Caches, scales: NDArray[np.float32]) -> Caches:
        caches = paged(kv)
        groups = zip(caches, self._config.spec.cache_groups, strict=True)
        scaled = self._config.kv_format.with_scales
        found = (scaled(each, scales[list(group.layers)]) for each, group in groups)
        return (*found, *kv[len(caches) :])

    def largest_magnitudes(self) -> NDArray[np.float32]:
        """Returns the largest magnitudes of keys and values in the cache: float32 [num_layers,
        kv_heads, 2], see `KVFormat.largest_magnitudes`."""
        groups = self._config.spec.cache_groups
        spec = self._config.spec
        found = np.zeros((spec.num_layers, spec.kv_heads, 2), np.float32)
        caches = paged(self._state.kv)
        for group, largest, kv in zip(groups, self._largest, caches, strict=True):
            assert largest is not None
            found[list(group.layers)] = np.asarray(largest(kv))
        return found

    def _bucket_for(self, plan: StepPlan) -> Bucket | VerifyBucket:
        """Returns the smallest bucket of the plan's kind that holds it."""
        kind = plan.kind
        for bucket in reversed(self._buckets):
            if bucket.kind == kind and bucket.holds(plan):
                return bucket
        lengths = [row.num_tokens for row in plan.rows]
        raise ValueError(f"no {kind} bucket holds a plan with rows of {lengths} tokens")

    def _fresh_state(self) -> tuple[DeviceState, Array]:
        """Returns the zeroed state and a second results array, see `_execute`. Also resets the
        verify state."""
        if self._verify is not None:
            self._verify.reset()
        state = jax.block_until_ready(self._zero_state())  # raises here if memory is short
        if self._kv_scales is not None:
            state = state._replace(kv=self._scaled(state.kv, self._kv_scales))
        return state, jax.device_put(np.zeros(self._config.results_shape, np.int32))

    @property
    def _pages(self) -> tuple[Any, ...]:
        """The caches, grouped for moves of whole pages."""
        return draft_cache.joined(self._state.kv, self._state.draft_kv)

    def _use_pages(self, caches: tuple[Any, ...]) -> None:
        kv, draft_kv = draft_cache.split(caches)
        self._state = self._state._replace(kv=kv, draft_kv=draft_kv)

    def _copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Launch copies of recurrent state. Returns before they are done."""
        copy, (*paged, state) = self._state_copies, self._state.kv
        assert copy is not None, "the model has no recurrent layers"
        for each in copies:
            state = copy(state, np.array(each, np.int32))
        self._state = self._state._replace(kv=(*paged, state))

    def _pack(
        self, plan: StepPlan, updates: Updates, bucket: Bucket | VerifyBucket
    ) -> NDArray[np.int32]:
        """Returns the packed plan, int32 [bucket.packed_size]. Sends the masks of verify rows."""
        if isinstance(bucket, Bucket):
            return batch.pack(plan, updates, bucket, self._config.padding_slot)
        packed = verify.pack(plan, updates, bucket, self._config.padding_slot)
        assert self._verify is not None
        self._verify.send_masks(plan, bucket)
        return packed

    def _execute(self, bucket: Bucket | VerifyBucket, packed: NDArray[np.int32]) -> Array:
        """Launch a compiled step. Returns its results.

        Two result arrays alternate, so that the host can read one while the next step writes the
        other. A step's results are lost when the second step after it is launched.
        """
        state = self._state._replace(results=self._free_results)
        self._free_results = self._state.results
        params = step_params(self._params, self._head)
        if isinstance(bucket, Bucket):
            self._state = self._steps[bucket](params, state, packed)
        else:
            assert self._verify is not None
            verified = self._steps[bucket](params, state, self._verify.state, packed)
            self._state, self._verify.state = verified
        return self._state.results

    def _warm(self, bucket: Bucket | VerifyBucket) -> None:
        """Run a step of padding, so that allocation and graph recording happen before serving.
        Returns before the step has run."""
        empty = StepPlan(rows=())
        packed = self._pack(empty, Updates.of(empty, self._width), bucket)
        for _ in range(_warm_calls()):
            self._execute(bucket, packed)


def check_same(abstract: Any, params: Any) -> None:
    """Compare weights with the ones that the programs were compiled for.

    Args:
      abstract: the expected tree, of ShapeDtypeStructs.
      params: the tree of arrays.

    Raises:
      ValueError: the tree's structure differs, or an array's shape or dtype.
    """
    expected, found = jax.tree.structure(abstract), jax.tree.structure(params)
    if expected != found:
        raise ValueError(f"the weights have another structure: {found}, needed is {expected}")
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(abstract), jax.tree.leaves(params), strict=True
    ):
        other = _abstract(other)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"{name} is {other.dtype} {list(other.shape)}, needed is {one.dtype} "
                f"{list(one.shape)}"
            )


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _warm_calls() -> int:
    """Returns 2 on a GPU: the first call runs op by op, the second records the CUDA graph."""
    return 2 if jax.default_backend() == "gpu" else 1
