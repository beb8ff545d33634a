"""The host side of verify steps: buckets, packed plans, results, and the state on the device.

A row begins where the slot's previous row ended, which the host may not know yet. So the host sends
drafts and bounds. `verify_runs` turns them into the inputs of a mixed step with one chunk per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxserve.plan import Row, Sampled, StepPlan, Verify
from jaxserve.programs.executable_cache import Executable, Program
from jaxserve.runner import slot_tables
from jaxserve.runner.batch import Updates, flags_of, sampled_of

NO_TOKEN = -1
"""Stands for a token id where there is no draft, or where a position is not accepted."""

ON_DEVICE = -1
"""Stands for a row's first position if only the device knows it."""

EMPTY, SET_MASKS = "verify_state", "set_verify_masks"
"""Names of the programs that make the state and that send masks."""


class VerifyState(NamedTuple):
    """Arrays that stay on the device between verify steps. Each verify step takes them as donated
    input; other steps do not read them."""

    lengths: Array
    """int32 [slots + 1]: position where the slot's next row begins, after its last verify row."""
    draft_first: Array
    """int32 [slots + 1]: position of the first draft; 0 without drafts."""
    drafts: Array
    """int32 [slots + 1, window]: token ids, then NO_TOKEN."""
    masks: Array
    """int32 [positions of the largest step, words]: one mask per position of a step."""


class VerifyInputs(NamedTuple):
    """The parts of a packed verify step in their order in the array; all int32."""

    addresses: Array  # [updates]
    values: Array  # [updates]
    row_slots: Array  # [rows]
    row_flags: Array  # [rows], as in a mixed step
    row_starts: Array  # [rows]: the first position, or ON_DEVICE
    row_ends: Array  # [rows]: the row stops before this position; 0 for padding
    row_positions: Array  # [rows]: largest number of positions
    draft_first: Array  # [rows], as in VerifyState; 0: use the drafts on the device
    drafts: Array  # [rows, window]
    masked: Array  # [rows, positions]: 1 where `VerifyState.masks` limits the choice


@dataclass(frozen=True, kw_only=True)
class VerifyBucket:
    """The static shape of one compiled verify step."""

    kind: ClassVar[str] = "verify"
    rows: int
    positions: int
    """Positions per row."""
    window: int
    """Drafts that a slot keeps on the device."""
    updates: int

    @property
    def tokens(self) -> int:
        return self.rows * self.positions

    @property
    def label(self) -> str:
        """Identifies the bucket among verify buckets."""
        return f"{self.rows}x{self.positions}"

    @property
    def name(self) -> str:
        return f"verify_{self.label}"

    @property
    def packed_size(self) -> int:
        """Numbers of a packed step. The last one is 0: see `step.unaliased`."""
        return sum(self._sizes) + 1

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (*(self.updates,) * 2, *(self.rows,) * 6, self.rows * self.window, self.tokens)

    @cached_property
    def _parts(self) -> tuple[slice, ...]:
        ends = itertools.accumulate(self._sizes)
        return tuple(slice(end - size, end) for size, end in zip(self._sizes, ends, strict=True))

    def holds(self, plan: StepPlan) -> bool:
        """Returns whether the plan's rows and positions fit."""
        positions = max((row.num_tokens for row in plan.rows), default=1)
        return len(plan.rows) <= self.rows and positions <= self.positions

    def unpack(self, packed: Any) -> VerifyInputs:
        """Returns static slices of `packed`: int32 [packed_size], traced or a numpy array."""
        parts = VerifyInputs(*(packed[part] for part in self._parts))
        return parts._replace(
            drafts=parts.drafts.reshape(self.rows, self.window),
            masked=parts.masked.reshape(self.rows, self.positions),
        )


def buckets(shapes: Sequence[tuple[int, int]], groups: int) -> list[VerifyBucket]:
    """Returns the verify buckets, the ones with most tokens first.

    Args:
      shapes: (rows, positions) of each bucket.
      groups: number of cache groups. A row may need two new pages in each.
    """
    window = draft_window(shapes)
    found = [
        VerifyBucket(rows=rows, positions=positions, window=window, updates=2 * rows * groups)
        for rows, positions in shapes
    ]
    return sorted(found, key=lambda bucket: (-bucket.tokens, -bucket.rows))


def draft_window(shapes: Sequence[tuple[int, int]]) -> int:
    """Returns the number of drafts that a slot keeps: enough for the next row, wherever the row in
    flight ends."""
    return 2 * (max((positions for _, positions in shapes), default=1) - 1)


def abstract(shapes: Sequence[tuple[int, int]], slots: int, words: int) -> VerifyState | None:
    """Returns shapes and dtypes of the state; None without verify buckets.

    Args:
      shapes: (rows, positions) of each verify bucket.
      slots: number of slots without the padding slot.
      words: words per mask, as in `SlotTables.masks`.
    """
    if not shapes:
        return None
    tokens = max(rows * positions for rows, positions in shapes)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return VerifyState(
        lengths=array(slots + 1),
        draft_first=array(slots + 1),
        drafts=array(slots + 1, draft_window(shapes)),
        masks=array(tokens, words),
    )


# From the host to the device.


def pack(
    plan: StepPlan, updates: Updates, bucket: VerifyBucket, padding_slot: int
) -> NDArray[np.int32]:
    """Returns the plan as one int32 array [bucket.packed_size]. Padding rows compute nothing.

    Raises:
      ValueError: a row has more drafts than a slot keeps, or masks that do not match.
    """
    packed = np.zeros(bucket.packed_size, np.int32)
    packed[: 2 * bucket.updates] = updates.padded(bucket.updates)
    parts = bucket.unpack(packed)
    parts.row_slots[:] = padding_slot
    parts.drafts[:] = NO_TOKEN
    for index, row in enumerate(plan.rows):
        asked = _checked(row, bucket.window)
        parts.row_slots[index], parts.row_flags[index] = row.slot, flags_of(row)
        parts.row_starts[index] = ON_DEVICE if asked.follows else row.start
        parts.row_ends[index], parts.row_positions[index] = asked.end, asked.positions
        if asked.drafts is not None:
            parts.draft_first[index] = row.start + 1
            parts.drafts[index, : len(asked.drafts)] = asked.drafts
        parts.masked[index, : len(asked.masks)] = 1
    return packed


def _checked(row: Row, window: int) -> Verify:
    """Checks and returns `row.verify`. A decode row becomes a row of one position."""
    asked = row.verify or Verify(1, row.start + 1)
    if row.tokens:
        raise ValueError("a verify plan has no chunks")
    if len(asked.drafts or ()) > window:
        raise ValueError(f"a row has {len(asked.drafts or ())} drafts, a slot keeps {window}")
    if asked.masks and (
        asked.follows or asked.drafts is None or len(asked.masks) != asked.positions
    ):
        raise ValueError("masks need a known beginning, known drafts, and one for each position")
    return asked


class OnDevice:
    """Owns the verify state and the compiled programs that make it and send masks."""

    def __init__(self, state: VerifyState, executables: Mapping[str, Executable]):
        """`state` may be abstract."""
        self._masks = state.masks
        self._empty, self._set_masks = executables[EMPTY], executables[SET_MASKS]
        self.state = state
        """The input of the next verify step."""

    def reset(self) -> None:
        """Make a new state, before the first step or after a failed one."""
        self.state = self._empty()

    def send_masks(self, plan: StepPlan, bucket: VerifyBucket) -> None:
        """Send the masks of the plan's verify rows, if there are any."""
        words = self._masks.shape[1]
        masks = {
            index * bucket.positions + offset: slot_tables.mask_words(mask, words)
            for index, row in enumerate(plan.rows)
            if row.verify is not None
            for offset, mask in enumerate(row.verify.masks)
        }
        if masks:
            self._send(masks)

    def warm(self) -> None:
        """Run the program that sends masks once."""
        self._send({})

    def _send(self, masks: Mapping[int, np.ndarray]) -> None:
        packed = slot_tables.packed_rows(self._masks, masks, self._masks.shape[0])
        self.state = self.state._replace(masks=self._set_masks(self.state.masks, packed))


def programs(state: VerifyState | None) -> Iterator[Program]:
    """Yields the programs of `OnDevice`; none without verify buckets."""
    if state is None:
        return

    def empty() -> VerifyState:
        return VerifyState(*(jnp.zeros(each.shape, each.dtype) for each in state))

    yield Program(name=EMPTY, function=empty, arguments=(), details=repr(state))
    yield slot_tables.replacing(state.masks, SET_MASKS, state.masks.shape[0])


# From the device to the host.


def unpack_results(
    plan: StepPlan, results: NDArray[np.int32], bucket: VerifyBucket
) -> list[Sampled | None]:
    """Returns each row's result: its accepted positions, up to the first one with NaN logits.

    Args:
      results: int32 [at least rows * positions, RESULT_COLUMNS]. The token is NO_TOKEN where a
        position is not accepted.
    """
    each = bucket.positions
    return [
        _row_result(row, results[each * index : each * (index + 1)])
        for index, row in enumerate(plan.rows)
    ]


def _row_result(row: Row, results: NDArray[np.int32]) -> Sampled | None:
    accepted = int((results[:, 0] != NO_TOKEN).sum())
    found = [sampled_of(result, row.logprobs) for result in results[:accepted]]
    spoiled = next((n for n, each in enumerate(found, start=1) if each.token is None), accepted)
    return found[0]._replace(further=tuple(found[1:spoiled])) if found else None
