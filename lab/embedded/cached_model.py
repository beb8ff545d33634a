"""The embedded model over a KV cache of any format: what it predicts of prompts, and its greedy
answers, several sequences at once, without a scheduler. On a GPU by the kernels that serve,
elsewhere by the definitions of the formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.model_spec import CachePlace, ModelSpec
from jaxserve.models import decoder
from jaxserve.models.layer import Norm, StepTokens, decoder_layer
from jaxserve.models.layer_weights import Layer
from jaxserve.models.rope import rope_tables
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.kv_format import AttentionStep, CacheShape, KVFormat
from jaxserve_kernels.matmul import take_rows
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import Target

PAGE = 128


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a batch holds: for each a program that reads prompts and one that answers."""

    tokens: int
    """Of all prompts."""
    sequences: int
    tile: int
    answer: int
    """The most tokens that a sequence gets."""

    @property
    def pages(self) -> int:
        """Of one sequence as long as all."""
        return -(-(self.tokens + self.answer) // PAGE)

    @property
    def cache_pages(self) -> int:
        return 1 + self.tokens // PAGE + self.sequences * (2 + self.answer // PAGE)


CPU_SHAPES = (
    Shape(tokens=2048, sequences=32, tile=64, answer=384),
    Shape(tokens=4096, sequences=2, tile=128, answer=32),
)
GPU_SHAPES = (Shape(tokens=16_384, sequences=256, tile=32, answer=384),)
"""One, because kernels take seconds to compile."""


def shapes() -> tuple[Shape, ...]:
    return GPU_SHAPES if jax.default_backend() == "gpu" else CPU_SHAPES


class Batch(NamedTuple):
    """Prompts one after the other; padding belongs to the slot behind the last."""

    ids: np.ndarray  # int32 [tokens]
    slots: np.ndarray  # int32 [tokens]
    positions: np.ndarray  # int32 [tokens]
    tiles: np.ndarray  # int32 [4, tiles]: the fields of QueryTiles
    page_table: np.ndarray  # int32 [sequences + 1, pages]
    lengths: np.ndarray  # int32 [sequences]; 0: nobody


class Result(NamedTuple):
    log_probs: Array
    """float32 [tokens of the shape, vocabulary], after each token of one prompt after the other."""
    answers: list[list[int]]
    """Without the token that ended them."""


def in_batches(lengths: Sequence[int], answers: Sequence[int]) -> Iterator[tuple[Shape, list[int]]]:
    """Groups of sequences, by index, the short ones first.

    Args:
      lengths: tokens of each prompt.
      answers: the most tokens that each gets.

    Raises:
      ValueError: one that no shape holds.
    """
    open_: dict[Shape, list[int]] = {shape: [] for shape in shapes()}
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        size, answer = lengths[index], answers[index]
        fitting = [s for s in shapes() if size <= s.tokens and answer <= s.answer]
        if not fitting:
            raise ValueError(f"{size} tokens of prompt and {answer} of answer fit into no shape")
        shape = fitting[0]
        group = open_[shape]
        used = sum(lengths[each] for each in group)
        if group and (len(group) == shape.sequences or used + size > shape.tokens):
            yield shape, group
            group = open_[shape] = []
        group.append(index)
    yield from ((shape, group) for shape, group in open_.items() if group)


def batch(prompts: Sequence[Sequence[int]], shape: Shape) -> Batch:
    spare = shape.sequences
    ids = np.zeros(shape.tokens, np.int32)
    slots = np.full(shape.tokens, spare, np.int32)
    positions = np.zeros(shape.tokens, np.int32)
    lengths = np.zeros(shape.sequences, np.int32)
    table = np.zeros((spare + 1, shape.pages), np.int32)
    tiles: list[tuple[int, int, int, int]] = []
    begin, page = 0, 1
    for slot, prompt in enumerate(prompts):
        lengths[slot] = len(prompt)
        span = slice(begin, begin + len(prompt))
        ids[span], slots[span], positions[span] = prompt, slot, np.arange(len(prompt))
        for start in range(0, len(prompt), shape.tile):
            tiles.append((begin + start, min(shape.tile, len(prompt) - start), slot, start))
        begin += len(prompt)
        count = -(-(len(prompt) + shape.answer) // PAGE)
        table[slot, :count] = np.arange(page, page + count)
        page += count
    most = shape.tokens // shape.tile + shape.sequences
    tiles += [(0, 0, spare, 0)] * (most - len(tiles))
    return Batch(ids, slots, positions, np.array(tiles, np.int32).T, table, lengths)


class CachedModel:
    """The model with its programs for one format, compiled when they are first needed."""

    def __init__(
        self,
        spec: ModelSpec,
        params: decoder.Params,
        kv_format: KVFormat,
        stop_ids: tuple[int, ...],
    ) -> None:
        self._spec = spec
        self._params = params
        self._format = kv_format
        self._stops = stop_ids
        self._read = jax.jit(self._prompts, static_argnums=0)
        self._write = jax.jit(self._answers, static_argnums=0)

    def run(
        self, prompts: Sequence[Sequence[int]], shape: Shape, most: Sequence[int] | None
    ) -> Result:
        """Read prompts, and answer with at most `most` tokens each; None: no answers."""
        work = batch(prompts, shape)
        log_probs, first, kv = self._read(shape, self._params, work)
        if most is None:
            return Result(log_probs, [])
        limits = np.zeros(shape.sequences, np.int32)
        limits[: len(prompts)] = most
        written = np.asarray(self._write(shape, self._params, kv, first, work, limits))
        answers: list[list[int]] = []
        for row, limit in zip(written.tolist(), most, strict=False):
            ends_at = [row.index(stop) for stop in self._stops if stop in row]
            answers.append(row[: min([limit, *ends_at])])
        return Result(log_probs, answers)

    def _prompts(
        self, shape: Shape, params: decoder.Params, work: Batch
    ) -> tuple[Array, Array, Any]:
        """Log-probabilities [tokens, vocabulary], the first token of each answer, the cache."""
        cache = CacheShape(
            layers=self._spec.num_layers,
            pages=shape.cache_pages,
            kv_heads=self._spec.kv_heads,
            page_size=PAGE,
            head_dim=self._spec.head_dim,
            slots=shape.sequences + 1,
        )
        kv = (self._format.allocate(cache, params.final_norm.dtype),)
        step = _step(work.slots, work.positions, QueryTiles(*work.tiles), work.page_table)
        tokens = StepTokens(jnp.asarray(work.ids), (step,))
        hidden, kv = _forward(params, kv, tokens, self._spec, shape.tile)
        log_probs = jax.nn.log_softmax(decoder.logits(params, hidden, target=Target.here()))
        last = jnp.maximum(jnp.cumsum(work.lengths) - 1, 0)
        return log_probs, log_probs[last].argmax(-1).astype(jnp.int32), kv

    def _answers(
        self, shape: Shape, params: decoder.Params, kv: Any, first: Array, work: Batch, most: Array
    ) -> Array:
        """Greedy tokens [sequences, answer], a stop token where nothing was needed any more."""
        row = jnp.arange(shape.sequences, dtype=jnp.int32)
        stops = jnp.asarray(self._stops, jnp.int32)
        out = jnp.full((shape.sequences, shape.answer), stops[0], jnp.int32)

        def unfinished(state: tuple[Any, ...]) -> Array:
            return ~state[3].all()

        def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
            count, token, out, done, kv = state
            out = out.at[:, count].set(jnp.where(done, stops[0], token))
            done |= (token[:, None] == stops).any(-1) | (count + 1 >= most)
            position = jnp.where(done, 0, work.lengths + count)
            slots = jnp.where(done, shape.sequences, row)
            tiles = QueryTiles(row, jnp.where(done, 0, 1), slots, position)
            step = _step(slots, position, tiles, work.page_table)
            tokens = StepTokens(token, (step,))
            hidden, kv = _forward(params, kv, tokens, self._spec, 1)
            found = (
                decoder.logits(params, hidden, target=Target.here()).argmax(-1).astype(jnp.int32)
            )
            return count + 1, found, out, done, kv

        state = (jnp.int32(0), first, out, work.lengths == 0, kv)
        return jax.lax.while_loop(unfinished, advance, state)[2]


def _forward(
    params: decoder.Params, kv: Any, tokens: StepTokens, spec: ModelSpec, tile_size: int
) -> tuple[Array, Any]:
    """All hidden states; on a CPU with one layer in a loop, which compiles in an eighth of the
    time: the layers are stacked, and no format has work left at the end of a step there."""
    if Target.here().implementation == "triton":
        if tile_size == 1:
            return decoder.decode(params, kv, tokens, spec, target=Target.here())
        pre_mlp, kv = decoder.forward(
            params, kv, tokens, spec, tile_size=tile_size, target=Target.here()
        )
        return decoder.finish(params, pre_mlp, spec, target=Target.here()), kv
    layers = params.layers
    assert isinstance(layers, Layer)
    x = take_rows(params.embedding, tokens.ids, params.final_norm.dtype)
    tables = rope_tables(spec.attention, tokens.positions)
    next_norms = jnp.concatenate([layers.attention_norm[1:], params.final_norm[None]])

    def body(carry: Any, each: Any) -> tuple[Any, None]:
        x, normed, kv = carry
        layer, next_weight, index = each
        next_norm = Norm(next_weight)
        carry = decoder_layer(
            layer,
            next_norm,
            CachePlace(0, index),
            x,
            normed,
            kv,
            tables,
            tokens,
            spec,
            tile_size=tile_size,
            target=Target.here(),
        )
        return carry, None

    start = x, rms_norm(x, layers.attention_norm[0], spec.norm_eps), kv
    numbers = jnp.arange(spec.num_layers)
    (_, normed, kv), _ = jax.lax.scan(body, start, (layers, next_norms, numbers))
    return normed, kv


def _step(slots: Any, positions: Any, tiles: QueryTiles, page_table: Any) -> AttentionStep:
    slots, positions, page_table = map(jnp.asarray, (slots, positions, page_table))
    return AttentionStep(
        slots=slots,
        positions=positions,
        pages=page_table[slots, positions // PAGE],
        offsets=positions % PAGE,
        tiles=tiles,
        page_table=page_table,
    )
