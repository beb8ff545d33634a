"""Packs a plan into the one array that a step reads, and unpacks a step's results.

A bucket fixes the number of tokens, rows, query tiles and state updates of a step. The host packs a
plan into one int32 array of that size; the step unpacks it by static slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jaxserve.api import MAX_LOGPROBS, PromptLogprobs, TokenLogprobs
from jaxserve.plan import Row, Sampled, StepPlan
from jaxserve.runner import sequence_state
from jaxserve_kernels.paged_attention import QueryTiles

DECODE_TOKEN = -1
"""Stands for the slot's last sampled token, which the host may not know yet."""

ROW_SAMPLES, ROW_LOGPROBS, ROW_MASKED = 1, 2, 4
"""Flags of a row: it samples a token; logprobs are requested; the slot's mask limits the choice."""

_DROPPED = np.iinfo(np.int32).max
"""Addresses of padding updates count down from here: outside of any state, and all different."""


class StepInputs(NamedTuple):
    """The parts of a packed step in their order in the array; all int32.

    `single_*` describe decode rows of a mixed step, which attention handles apart from chunks.
    """

    addresses: Array  # [updates]
    values: Array  # [updates]
    token_ids: Array  # [tokens]
    token_slots: Array  # [tokens]
    token_positions: Array  # [tokens]
    row_slots: Array  # [rows]
    row_last: Array  # [rows]: index of the row's last token
    row_flags: Array  # [rows]
    row_kept: Array  # [rows] of a mixed step: tokens before the kept state (`plan.KeptState`)
    row_kept_slots: Array  # [rows] of a mixed step
    tile_first: Array  # [tiles]
    tile_length: Array  # [tiles]
    tile_slots: Array  # [tiles]
    tile_positions: Array  # [tiles]
    decode_first: Array  # [decode_rows]
    decode_length: Array  # [decode_rows]
    decode_slots: Array  # [decode_rows]
    decode_positions: Array  # [decode_rows]

    @property
    def tiles(self) -> QueryTiles:
        tiles, decode_rows = self[10:14], self[14:18]
        return QueryTiles(
            *tiles, decode_rows=QueryTiles(*decode_rows) if decode_rows[0].size else None
        )


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The static shape of one compiled step."""

    kind: str
    """`decode`: one token per row. `mixed`: prefill chunks and decode rows together."""
    tokens: int
    rows: int
    tile_size: int
    tiles: int
    decode_rows: int
    """The largest number of one-token rows in a mixed step."""
    updates: int

    @classmethod
    def decode(cls, rows: int, groups: int = 1) -> Bucket:
        """Returns a decode bucket: each row is one query tile and may need one new page in each
        cache group."""
        return cls(
            kind="decode",
            tokens=rows,
            rows=rows,
            tile_size=1,
            tiles=rows,
            decode_rows=0,
            updates=rows * groups,
        )

    @classmethod
    def mixed(
        cls, tokens: int, *, max_rows: int, tile_size: int, updates: int, chunk_tokens: int = 2
    ) -> Bucket:
        """Returns a mixed bucket.

        It has enough tiles if chunks have at least `chunk_tokens` tokens on average. A chunk leaves
        at most tile_size - 1 places of its last tile unused.
        """
        rows, tile_size = min(tokens, max_rows), min(tile_size, tokens)
        chunks = min(rows, max(tokens // chunk_tokens, 1))
        return cls(
            kind="mixed",
            tokens=tokens,
            rows=rows,
            tile_size=tile_size,
            tiles=(tokens + chunks * (tile_size - 1)) // tile_size,
            decode_rows=rows,
            updates=updates,
        )

    @property
    def label(self) -> str:
        """Identifies the bucket among buckets of its kind."""
        return str(self.tokens)

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.label}"

    @property
    def _sizes(self) -> tuple[int, ...]:
        parts = (self.updates,) * 2 + (self.tokens,) * 3 + (self.rows,) * 3
        parts += (self.rows if self.kind == "mixed" else 0,) * 2
        return parts + (self.tiles,) * 4 + (self.decode_rows,) * 4

    @property
    def packed_size(self) -> int:
        """Numbers of a packed step. The last one is 0: see `step.unaliased`."""
        return sum(self._sizes) + 1

    def holds(self, plan: StepPlan) -> bool:
        """Returns whether the plan fits. The largest bucket holds every plan of the scheduler."""
        if self.kind == "decode":
            return plan.decode_only and len(plan.rows) <= self.rows
        if plan.num_tokens > self.tokens:
            return False
        tiles = sum(-(-row.num_tokens // self.tile_size) for row in plan.rows if _is_chunk(row))
        return tiles <= self.tiles

    @cached_property
    def _parts(self) -> tuple[slice, ...]:
        ends = itertools.accumulate(self._sizes)
        return tuple(slice(end - size, end) for size, end in zip(self._sizes, ends, strict=True))

    def unpack(self, packed: Any) -> StepInputs:
        """Returns static slices of `packed`: int32 [packed_size], traced or a numpy array."""
        return StepInputs(*(packed[part] for part in self._parts))


class Updates(NamedTuple):
    """Updates of the sequence state: flat addresses and values, int32 [n] each."""

    addresses: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan, width: int, groups: int = 1) -> Updates:
        """Returns a plan's updates of a state matrix with `width` columns."""
        # Of two updates of one address, the last one wins.
        last = dict(_updates(plan, width, (width - sequence_state.PAGES) // groups))
        return cls(
            np.fromiter(last.keys(), np.int32, len(last)),
            np.fromiter(last.values(), np.int32, len(last)),
        )

    def split(self, count: int) -> tuple[Updates, Updates]:
        """Returns the first `count` updates and the rest."""
        return Updates(*(part[:count] for part in self)), Updates(*(part[count:] for part in self))

    def padded(self, size: int) -> np.ndarray:
        """Returns int32 [2 * size]: addresses, then values. Padding writes nothing."""
        out = np.zeros((2, size), np.int32)
        out[0] = _DROPPED - np.arange(size, dtype=np.int32)
        out[:, : len(self.addresses)] = self
        return out.reshape(-1)


def _updates(plan: StepPlan, width: int, pages_per_seq: int) -> Iterator[tuple[int, int]]:
    for admission in plan.admissions:
        base = admission.slot * width
        for column, value in sequence_state.columns(admission.params):
            yield base + column, value
        yield base + sequence_state.PROMPT, admission.num_prompt
        yield base + sequence_state.HEAD_STATE, 0  # forget the previous sequence's
    for slot, position, page, group in plan.pages:
        yield slot * width + sequence_state.PAGES + group * pages_per_seq + position, page


def pack(plan: StepPlan, updates: Updates, bucket: Bucket, padding_slot: int) -> np.ndarray:
    """Returns the plan as one int32 array [bucket.packed_size].

    Padding tokens, rows and tiles belong to `padding_slot`, whose page table holds only page 0.
    """
    packed = _padding(bucket, padding_slot).copy()
    parts = bucket.unpack(packed)
    count = len(updates.addresses)
    parts.addresses[:count], parts.values[:count] = updates
    if bucket.kind == "decode":
        _pack_decode(plan, parts)
    else:
        _pack_mixed(plan, parts, bucket.tile_size)
    parts.row_flags[: len(plan.rows)] = [flags_of(row) for row in plan.rows]
    return packed


@cache
def _padding(bucket: Bucket, padding_slot: int) -> np.ndarray:
    """Returns a packed step without rows, int32 [bucket.packed_size]. `pack` starts from it."""
    packed = np.zeros(bucket.packed_size, np.int32)
    parts = bucket.unpack(packed)
    packed[: 2 * bucket.updates] = Updates(packed[:0], packed[:0]).padded(bucket.updates)
    own = parts.token_slots, parts.row_slots, parts.tile_slots, parts.decode_slots
    for slots in (*own, parts.row_kept_slots):
        slots[:] = padding_slot
    if bucket.kind == "decode":  # token i is row i and tile i
        parts.row_last[:] = parts.tile_first[:] = np.arange(bucket.rows)
    packed.flags.writeable = False
    return packed


def _pack_decode(plan: StepPlan, parts: StepInputs) -> None:
    """Packs decode rows: token, row and tile i all belong to plan.rows[i]."""
    count = len(plan.rows)
    slots = np.array([row.slot for row in plan.rows], np.int32)
    starts = np.array([row.start for row in plan.rows], np.int32)
    parts.token_ids[:count] = DECODE_TOKEN
    parts.token_slots[:count] = parts.row_slots[:count] = parts.tile_slots[:count] = slots
    parts.token_positions[:count] = parts.tile_positions[:count] = starts
    parts.tile_length[:count] = 1


def _pack_mixed(plan: StepPlan, parts: StepInputs, tile_size: int) -> None:
    first = 0
    tiles: list[tuple[int, int, int, int]] = []
    decode_rows: list[tuple[int, int, int, int, int]] = []
    for index, row in enumerate(plan.rows):
        count = row.num_tokens
        if row.kept is not None:
            parts.row_kept[index], parts.row_kept_slots[index] = row.kept
        if _is_chunk(row):
            span = slice(first, first + count)
            parts.token_ids[span] = row.tokens
            parts.token_slots[span] = row.slot
            parts.token_positions[span] = np.arange(row.start, row.start + count)
            for offset in range(0, count, tile_size):
                length = min(count - offset, tile_size)
                tiles.append((first + offset, length, row.slot, row.start + offset))
            parts.row_slots[index], parts.row_last[index] = row.slot, first + count - 1
        else:
            token = row.tokens[0] if row.tokens else DECODE_TOKEN
            decode_rows.append((index, first, row.slot, row.start, token))
        first += count
    # The GPU starts tiles in this order. Longest contexts first keeps the tail short.
    tiles.sort(key=lambda tile: tile[1] + tile[3], reverse=True)
    for column, values in zip(parts[10:14], zip(*tiles, strict=True), strict=False):
        column[: len(tiles)] = values
    if decode_rows:
        _pack_decode_rows(np.array(decode_rows, np.int32), parts)


def _pack_decode_rows(decode_rows: np.ndarray, parts: StepInputs) -> None:
    """Packs rows of one token: int32 [rows, (row index, token index, slot, position, token id)]."""
    rows, places, slots, positions, ids = decode_rows.T
    parts.token_ids[places], parts.token_slots[places] = ids, slots
    parts.token_positions[places] = positions
    parts.row_slots[rows], parts.row_last[rows] = slots, places
    for column, values in zip(parts[14:18], (places, 1, slots, positions), strict=True):
        column[: len(decode_rows)] = values


def _is_chunk(row: Row) -> bool:
    """Returns whether a row has several tokens. Rows of one token are packed as decode
    rows, whether they decode or end a prompt."""
    return row.num_tokens > 1


def flags_of(row: Row) -> int:
    """Returns a row's flags in the packed array."""
    masked = row.mask is not None
    return ROW_SAMPLES * row.samples | ROW_LOGPROBS * row.logprobs | ROW_MASKED * masked


RESULT_COLUMNS = 2 + 2 * MAX_LOGPROBS
"""Columns of a result row: token, its logprob, ids and logprobs of the alternatives."""


def unpack_results(
    plan: StepPlan,
    results: np.ndarray,
    prompt_logprobs: Mapping[int, tuple[PromptLogprobs, ...]],
) -> list[Sampled | None]:
    """Returns each row's result.

    A row whose sampled token has a NaN logprob had NaN logits; it gets no token.

    Args:
      results: int32 [rows, RESULT_COLUMNS], floats as bits.
      prompt_logprobs: logprobs of scored prompt tokens, by row index.
    """
    used = results[: len(plan.rows)]
    tokens = used[:, 0].tolist()
    unpacked: list[Sampled | None] = [
        Sampled(token, _logprobs(results[index]) if row.logprobs else None) if row.samples else None
        for index, (row, token) in enumerate(zip(plan.rows, tokens, strict=True))
    ]
    for index in np.isnan(used[:, 1].view(np.float32)).nonzero()[0].tolist():
        unpacked[index] = Sampled(None) if plan.rows[index].samples else None
    for index, scored in prompt_logprobs.items():
        unpacked[index] = (unpacked[index] or Sampled(None))._replace(prompt_logprobs=scored)
    return unpacked


def sampled_of(result: np.ndarray, logprobs: bool) -> Sampled:
    """Decodes a result row, int32 [RESULT_COLUMNS]. With a NaN logprob the result has no token."""
    if np.isnan(result[1:2].view(np.float32))[0]:
        return Sampled(None)
    return Sampled(int(result[0]), _logprobs(result) if logprobs else None)


def _logprobs(result: np.ndarray) -> TokenLogprobs:
    floats = result.view(np.float32)
    ids = result[2 : 2 + MAX_LOGPROBS].tolist()
    top = floats[2 + MAX_LOGPROBS :].tolist()
    return TokenLogprobs(float(floats[1]), tuple(zip(ids, top, strict=True)))
