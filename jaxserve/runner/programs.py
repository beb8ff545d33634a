"""The programs that a runner executes: the steps and a few small ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.config import Buckets, CacheConfig, ConfigError, SchedulerConfig
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.delta_net import abstract_state
from jaxserve.models.drafts.spec import DraftSpec, Eagle3Draft, MtpDraft
from jaxserve.models.layer import Caches, paged
from jaxserve.programs.executable_cache import Program
from jaxserve.runner import (
    batch,
    draft_cache,
    kv_cache,
    page_moves,
    prompt_scores,
    sequence_state,
    slot_tables,
    state_copies,
    verify,
)
from jaxserve.runner.batch import Bucket
from jaxserve.runner.draft_step import HeadParams, StepParams, WithHead
from jaxserve.runner.page_moves import Rings
from jaxserve.runner.step import DeviceState, run_step
from jaxserve.runner.verify import VerifyBucket, VerifyState
from jaxserve.runner.verify_step import run_verify_step
from jaxserve_kernels.kv_format import AUTO, CacheShape, KVFormat, PageLayout
from jaxserve_kernels.recurrent_state import RecurrentState
from jaxserve_kernels.sampler import SlotTables
from jaxserve_kernels.target import Target

FLUSH_UPDATES = 4096
"""State updates per call of the flush program."""

_MIXED_EXTRA_UPDATES = 256
"""Extra state updates of a mixed step, for the page tables of a few new sequences. Each row has one
update of its own and one per cache group."""

_CHUNK_TOKENS = 8
"""Smallest mean chunk length, in tokens, that a bucket has enough tiles for. A step with shorter
chunks may need a larger bucket. Tiles for every possible split would mostly stay unused, and unused
tiles cost time."""

LARGEST_MAGNITUDES = "kv_largest_"
"""Prefix of a program's name; the number of the cache group follows."""


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """All settings that compiled steps depend on."""

    spec: ModelSpec
    cache: CacheConfig
    scheduler: SchedulerConfig
    buckets: Buckets
    dtype: DTypeLike
    sampled_vocab: int
    """Only token ids below it are sampled."""
    tile_size: int
    """Query tokens of one sequence that attention processes together."""
    kv_format: KVFormat = AUTO
    target: Target = field(default_factory=Target.here)
    """The device that the steps are traced for."""
    draft: DraftSpec | None = None
    """The head or model that drafts in verify steps; None: none."""
    rings: Rings | None = None
    """Rings for moves to and from a lower tier; None: there is no lower tier."""

    def __post_init__(self) -> None:
        block = 1 if self.spec.state is None else self.spec.state.delta_net.block
        if self.cache.state_block != block:
            raise ConfigError(
                f"the model computes prompts in blocks of {block} tokens, and the cache is made "
                f"for blocks of {self.cache.state_block}"
            )
        tokens, others = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs - 1
        if tokens < others + block:
            raise ConfigError(
                f"a step of {tokens} tokens has no room for {others} decodes and a block of "
                f"{block} tokens of a prompt; raise --max-num-batched-tokens or the largest of "
                f"--prefill-buckets to {others + block}, or lower --max-num-seqs"
            )

    @property
    def pages_per_seq(self) -> int:
        return -(-self.scheduler.max_model_len // self.cache.page_size)

    @property
    def num_groups(self) -> int:
        """The number of cache groups."""
        return len(self.cache.groups)

    @property
    def kv_shapes(self) -> tuple[CacheShape, ...]:
        """The shape of each cache group."""
        return kv_cache.shapes(self.spec, self.cache, self.scheduler.max_num_seqs)

    @property
    def layouts(self) -> tuple[PageLayout, ...]:
        """The page layout of each cache group. Pages of the first group include draft entries."""
        first = draft_cache.layout(self.kv_format, self.draft)
        return first, *(self.kv_format for _ in self.cache.further)

    @property
    def recurrent_state(self) -> RecurrentState | None:
        """Shapes and dtypes of the recurrent state; None if no layer is recurrent."""
        slots = self.scheduler.max_num_seqs + 1 + self.cache.snapshots
        return abstract_state(self.spec, self.dtype, slots)

    @property
    def padding_pages(self) -> tuple[int, ...]:
        """The padding page of each cache group, then the padding piece of the recurrent state, if
        the model has one (see `state_pieces`)."""
        pieces = (
            () if self.spec.state is None else (self.padding_slot * len(self.spec.state.layers),)
        )
        return (0,) * self.num_groups + pieces

    @property
    def caches(self) -> Caches:
        """Shapes and dtypes of the caches and the recurrent state."""
        own = self.recurrent_state
        paged = tuple(self.kv_format.abstract(each, self.dtype) for each in self.kv_shapes)
        return paged if own is None else (*paged, own)

    @property
    def sequences_shape(self) -> tuple[int, int]:
        seqs = self.scheduler.max_num_seqs
        return sequence_state.shape(seqs, self.pages_per_seq, self.num_groups)

    @property
    def tables(self) -> SlotTables:
        """Shapes and dtypes of the sampler's tables."""
        return slot_tables.abstract(self.scheduler.max_num_seqs, self.spec.vocab_size)

    @property
    def pre_mlp(self) -> decoder.PreMLP:
        """Shapes and dtypes of `DeviceState.pre_mlp`."""
        return decoder.abstract_pre_mlp(self.spec, self.dtype, self.buckets.prefill[-1])

    @property
    def draft_kv(self) -> Any:
        """Shape and dtype of `DeviceState.draft_kv`."""
        return draft_cache.abstract(self.draft, self.kv_shapes[0], self.dtype)

    @property
    def draft_states(self) -> Any:
        """Shape and dtype of `DeviceState.draft_states`."""
        if not isinstance(self.draft, Eagle3Draft | MtpDraft):
            return None
        return _abstract((self.scheduler.max_num_seqs + 1, self.spec.embed), self.dtype)

    @property
    def results_shape(self) -> tuple[int, int]:
        """Shape of `DeviceState.results`: one row more than the largest step writes."""
        verified = (rows * positions for rows, positions in self.buckets.verify)
        return max([self.scheduler.max_num_seqs, *verified]) + 1, batch.RESULT_COLUMNS

    @property
    def verify(self) -> VerifyState | None:
        """Shapes and dtypes of the verify state; None without verify buckets."""
        words = self.tables.masks.shape[1]
        return verify.abstract(self.buckets.verify, self.scheduler.max_num_seqs, words)

    @property
    def padding_slot(self) -> int:
        return self.scheduler.max_num_seqs

    def all_buckets(self) -> list[Bucket | VerifyBucket]:
        """Returns all buckets, the largest of each kind first: it takes longest to compile."""
        mixed = [
            Bucket.mixed(
                tokens,
                max_rows=self.scheduler.max_num_seqs,
                tile_size=self.tile_size,
                updates=min(tokens, self.scheduler.max_num_seqs) * (1 + self.num_groups)
                + _MIXED_EXTRA_UPDATES,
                chunk_tokens=2 if tokens == self.buckets.prefill[-1] else _CHUNK_TOKENS,
            )
            for tokens in self.buckets.prefill
        ]
        decode = [Bucket.decode(rows, self.num_groups) for rows in self.buckets.decode]
        several = verify.buckets(self.buckets.verify, self.num_groups)
        return [
            *sorted(mixed, key=lambda b: -b.tokens),
            *sorted(decode, key=lambda b: -b.rows),
            *several,
        ]


def programs(config: RunnerConfig, params: Any, head: HeadParams | None = None) -> list[Program]:
    """Returns all programs of a runner, the slowest to compile first.

    Args:
      params: the weights, or a tree of ShapeDtypeStruct.
      head: weights of `config.draft`, or their ShapeDtypeStructs.
    """
    params, head = jax.tree.map(lambda leaf: _abstract(leaf.shape, leaf.dtype), (params, head))
    state = DeviceState(
        kv=config.caches,
        sequences=_abstract(config.sequences_shape, jnp.int32),
        tables=config.tables,
        pre_mlp=config.pre_mlp,
        results=_abstract(config.results_shape, jnp.int32),
        draft_kv=config.draft_kv,
        draft_states=config.draft_states,
    )

    def step(bucket: Bucket | VerifyBucket) -> Program:
        verifies = isinstance(bucket, VerifyBucket)
        states = (state, config.verify) if verifies else (state,)
        function = functools.partial(
            run_verify_step if verifies else run_step,
            spec=config.spec,
            draft=config.draft,
            bucket=bucket,
            sampled_vocab=config.sampled_vocab,
            target=config.target,
        )
        packed = _abstract((bucket.packed_size,), jnp.int32)
        return Program(
            name=step_name(bucket),
            function=function,
            arguments=(step_params(params, head), *states, packed),
            donated=(1, 2) if verifies else (1,),
            details=repr(bucket),
            work=1.0,
        )

    def zeros(abstract: Any) -> Array:
        return jnp.zeros(abstract.shape, abstract.dtype)

    def empty() -> DeviceState:
        kv: Caches = tuple(
            config.kv_format.allocate(each, config.dtype) for each in config.kv_shapes
        )
        if (own := config.recurrent_state) is not None:
            kv = (*kv, jax.tree.map(zeros, own))
        return DeviceState(
            kv=kv,
            sequences=jnp.zeros(config.sequences_shape, jnp.int32),
            tables=jax.tree.map(zeros, config.tables),
            pre_mlp=jax.tree.map(zeros, config.pre_mlp),
            results=zeros(state.results),
            draft_kv=jax.tree.map(zeros, config.draft_kv),
            draft_states=jax.tree.map(zeros, config.draft_states),
        )

    updates = _abstract((2 * FLUSH_UPDATES,), jnp.int32)
    scaled = config.kv_format.has_scales
    return [
        *(step(bucket) for bucket in config.all_buckets()),
        Program(name="flush", function=_flush, arguments=(state.sequences, updates), donated=(0,)),
        *page_moves.programs(
            *(config.layouts, config.kv_shapes, config.dtype, config.rings),
            config.recurrent_state,
            target=config.target,
        ),
        Program(name="state", function=empty, arguments=(), details=repr(state)),
        *(
            Program(
                name=f"{LARGEST_MAGNITUDES}{group}",
                function=config.kv_format.largest_magnitudes,
                arguments=(kv,),
            )
            for group, kv in enumerate(paged(state.kv))
            if scaled
        ),
        *state_copies.programs(config.recurrent_state, target=config.target),
        *slot_tables.programs(config.tables),
        *verify.programs(config.verify),
        prompt_scores.program(
            params,
            state.pre_mlp,
            spec=config.spec,
            rows=config.scheduler.max_num_seqs,
            sampled_vocab=config.sampled_vocab,
            target=config.target,
        ),
    ]


def step_params(params: decoder.Params, head: HeadParams | None) -> StepParams:
    """Returns the weights argument of the steps, with the head's weights if there is a head."""
    return params if head is None else WithHead(params, head)


def _abstract(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def step_name(bucket: Bucket | VerifyBucket) -> str:
    return f"step_{bucket.name}"


def _flush(sequences: Array, packed: Array) -> Array:
    """Applies state updates that do not fit into a step's bucket."""
    addresses, values = packed.reshape(2, -1)
    return sequence_state.apply(sequences, addresses, values)
