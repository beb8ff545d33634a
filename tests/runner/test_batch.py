"""A plan and its packed array say the same, whatever the bucket."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from jaxserve.api import MAX_LOGPROBS, SamplingParams
from jaxserve.plan import Admission, PageEntry, Row, StepPlan
from jaxserve.runner import batch, sequence_state
from jaxserve.runner.batch import (
    DECODE_TOKEN,
    ROW_LOGPROBS,
    ROW_SAMPLES,
    Bucket,
    StepInputs,
    Updates,
)

MAX_SEQS, PAGES_PER_SEQ, GROUPS = 6, 8, 2
PADDING_SLOT = MAX_SEQS
STATE_SHAPE = sequence_state.shape(MAX_SEQS, PAGES_PER_SEQ, GROUPS)
WIDTH = STATE_SHAPE[1]

positions = st.integers(0, 1000)
booleans = st.booleans()
slots = st.integers(0, MAX_SEQS - 1)


@st.composite
def row_lists(draw: st.DrawFn, most_tokens: int, *, decode_only: bool) -> tuple[Row, ...]:
    """Rows in slots of their own that together have at most `most_tokens` tokens."""
    rows: list[Row] = []
    left = most_tokens
    for slot in draw(st.permutations(range(MAX_SEQS)))[: draw(st.integers(0, MAX_SEQS))]:
        if left == 0:
            break
        count = 0 if decode_only else draw(st.integers(0, left))
        tokens = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
        samples = draw(booleans)
        rows.append(
            Row(
                seq_id=100 + slot,
                slot=slot,
                start=draw(positions),
                tokens=tuple(tokens),
                samples=samples,
                logprobs=samples and draw(booleans),
            )
        )
        left -= rows[-1].num_tokens
    return tuple(rows)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        temperature=draw(st.floats(0, 2, width=32)),
        top_k=draw(st.integers(0, 50)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepPlan, Bucket]:
    """A plan and a bucket that holds it."""
    decode = draw(booleans)
    size = draw(st.integers(1, MAX_SEQS if decode else 40))
    bucket = Bucket.decode(size)
    if not decode:
        tile_size = draw(st.sampled_from([1, 2, 4, 16]))
        bucket = Bucket.mixed(size, max_rows=MAX_SEQS, tile_size=tile_size, updates=24)
    lengths = st.integers(0, 2**20)
    admissions = st.builds(Admission, slots, params(), st.just(()), lengths)
    positions, groups = st.integers(0, PAGES_PER_SEQ - 1), st.integers(0, GROUPS - 1)
    pages = st.builds(PageEntry, slots, positions, st.integers(1, 99), groups)
    plan = StepPlan(
        rows=draw(row_lists(size, decode_only=decode)),
        admissions=tuple(draw(st.lists(admissions, max_size=4))),
        pages=tuple(draw(st.lists(pages, max_size=20))),
    )
    event(f"{bucket.kind}, tiles of {bucket.tile_size}")
    return plan, bucket


def unpacked(plan: StepPlan, bucket: Bucket) -> StepInputs:
    packed = batch.pack(plan, Updates(*np.zeros((2, 0), np.int32)), bucket, PADDING_SLOT)
    assert packed.shape == (bucket.packed_size,) and packed.dtype == np.int32
    assert packed[-1] == 0, "a step adds it to all others"
    return bucket.unpack(packed)


def test_a_packed_array_is_cut_into_its_parts_without_gaps() -> None:
    bucket = Bucket.mixed(40, max_rows=MAX_SEQS, tile_size=16, updates=24)
    packed = np.arange(bucket.packed_size, dtype=np.int32)
    np.testing.assert_array_equal(np.concatenate(bucket.unpack(packed)), packed[:-1])


@given(steps())
def test_each_token_is_found_with_its_slot_and_position(step: tuple[StepPlan, Bucket]) -> None:
    plan, bucket = step
    inputs = unpacked(plan, bucket)
    expected = [
        (token, row.slot, row.start + index)
        for row in plan.rows
        for index, token in enumerate(row.tokens or (DECODE_TOKEN,))
    ]
    tokens = list(zip(inputs.token_ids, inputs.token_slots, inputs.token_positions, strict=True))
    assert tokens[: plan.num_tokens] == expected


@given(steps())
def test_each_row_samples_from_its_last_token(step: tuple[StepPlan, Bucket]) -> None:
    plan, bucket = step
    inputs = unpacked(plan, bucket)
    for index, row in enumerate(plan.rows):
        last = inputs.row_last[index]
        assert inputs.row_slots[index] == inputs.token_slots[last] == row.slot
        assert inputs.token_positions[last] == row.start + row.num_tokens - 1
        assert bool(inputs.row_flags[index] & ROW_SAMPLES) == row.samples
        assert bool(inputs.row_flags[index] & ROW_LOGPROBS) == row.logprobs


def tiles_of(inputs: StepInputs) -> list[tuple[int, int, int, int]]:
    """(first, length, slot, position) of the tiles and then of the decode rows, with padding."""
    *tiles, decode_rows = inputs.tiles
    lists = [tiles] if decode_rows is None else [tiles, decode_rows[:4]]
    return [tuple(map(int, tile)) for part in lists for tile in zip(*part, strict=True)]


@given(steps())
def test_tiles_cover_each_token_once_in_runs_of_one_sequence(step: tuple[StepPlan, Bucket]) -> None:
    plan, bucket = step
    inputs = unpacked(plan, bucket)
    covered: list[int] = []
    for first, length, slot, position in tiles_of(inputs):
        assert length <= bucket.tile_size
        tokens = np.arange(first, first + length)
        assert (inputs.token_slots[tokens] == slot).all()
        np.testing.assert_array_equal(
            inputs.token_positions[tokens], np.arange(position, position + length)
        )
        covered += tokens.tolist()
    assert sorted(covered) == list(range(plan.num_tokens))


@given(steps())
def test_rows_of_one_token_are_apart_from_chunks(step: tuple[StepPlan, Bucket]) -> None:
    plan, bucket = step
    if bucket.kind == "decode":
        return
    inputs = unpacked(plan, bucket)
    alone = [row.slot for row in plan.rows if row.num_tokens == 1]
    assert inputs.decode_slots[inputs.decode_length > 0].tolist() == alone
    assert inputs.decode_length.max() <= 1


@given(steps())
def test_tiles_with_the_longest_contexts_come_first_and_padding_last(
    step: tuple[StepPlan, Bucket],
) -> None:
    inputs = unpacked(*step)
    if step[1].kind == "mixed":
        ends = np.where(inputs.tile_length, inputs.tile_length + inputs.tile_positions, 0)
        assert (np.diff(ends) <= 0).all()


@given(steps())
def test_padding_belongs_to_the_padding_slot_and_asks_for_nothing(
    step: tuple[StepPlan, Bucket],
) -> None:
    plan, bucket = step
    inputs = unpacked(plan, bucket)
    num_rows, num_tokens = len(plan.rows), plan.num_tokens
    assert (inputs.token_slots[num_tokens:] == PADDING_SLOT).all()
    assert (inputs.row_slots[num_rows:] == PADDING_SLOT).all()
    assert all(slot == PADDING_SLOT for _, length, slot, _ in tiles_of(inputs) if length == 0)
    assert not inputs.row_flags[num_rows:].any()
    assert not inputs.token_positions[num_tokens:].any(), "padding keys go to the first place"
    ids = inputs.token_ids[num_tokens:]
    assert ((ids == 0) | (ids == DECODE_TOKEN)).all()
    for indices in (inputs.row_last, inputs.tile_first, inputs.decode_first):
        assert ((indices >= 0) & (indices < bucket.tokens)).all()


# Updates.


def applied(plan: StepPlan) -> NDArray[np.int32]:
    """The state after a plan's changes, one by one."""
    state = np.full(STATE_SHAPE, -1, np.int32)
    for admission in plan.admissions:
        for column, value in sequence_state.columns(admission.params):
            state[admission.slot, column] = value
        state[admission.slot, sequence_state.PROMPT] = admission.num_prompt
        state[admission.slot, sequence_state.HEAD_STATE] = 0
    for slot, position, page, group in plan.pages:
        state[slot, sequence_state.PAGES + group * PAGES_PER_SEQ + position] = page
    return state


def scatter(state: NDArray[np.int32], packed: NDArray[np.int32]) -> None:
    addresses, values = packed.reshape(2, -1)
    assert len(set(addresses.tolist())) == len(addresses), "the device is promised unique ones"
    assert (addresses >= 0).all()
    inside = addresses < state.size
    state.reshape(-1)[addresses[inside]] = values[inside]


@given(steps())
def test_updates_are_what_the_plan_says_and_the_last_one_wins(
    step: tuple[StepPlan, Bucket],
) -> None:
    plan, _ = step
    updates = Updates.of(plan, WIDTH, GROUPS)
    state = np.full(STATE_SHAPE, -1, np.int32)
    scatter(state, updates.padded(len(updates.addresses) + 3))
    np.testing.assert_array_equal(state, applied(plan))


@given(steps(), st.integers(0, 30))
def test_updates_can_be_applied_in_two_parts(step: tuple[StepPlan, Bucket], count: int) -> None:
    plan, _ = step
    first, rest = Updates.of(plan, WIDTH, GROUPS).split(count)
    assert len(first.addresses) <= count
    state = np.full(STATE_SHAPE, -1, np.int32)
    scatter(state, first.padded(max(count, 1)))
    scatter(state, rest.padded(len(rest.addresses)))
    np.testing.assert_array_equal(state, applied(plan))


@given(steps())
def test_packed_updates_lead_the_array(step: tuple[StepPlan, Bucket]) -> None:
    plan, bucket = step
    updates, _ = Updates.of(plan, WIDTH, GROUPS).split(bucket.updates)
    inputs = bucket.unpack(batch.pack(plan, updates, bucket, PADDING_SLOT))
    state = np.full(STATE_SHAPE, -1, np.int32)
    scatter(state, np.concatenate([inputs.addresses, inputs.values]))
    expected = np.full(STATE_SHAPE, -1, np.int32)
    scatter(expected, updates.padded(bucket.updates))
    np.testing.assert_array_equal(state, expected)


# Results.


def test_results_come_back_row_by_row() -> None:
    rng = np.random.default_rng(0)
    top_ids = rng.integers(0, 1000, (4, MAX_LOGPROBS), np.int32)
    top = rng.standard_normal((4, MAX_LOGPROBS), np.float32)
    own = rng.standard_normal((4, 1), np.float32)
    tokens = np.array([[11], [12], [13], [14]], np.int32)
    results = np.hstack([tokens, own.view(np.int32), top_ids, top.view(np.int32)])
    plan = StepPlan(
        rows=(
            Row(seq_id=0, slot=2, start=5, tokens=(), samples=True),
            Row(seq_id=1, slot=0, start=0, tokens=(1, 2), samples=False),
            Row(seq_id=2, slot=1, start=0, tokens=(3,), samples=True, logprobs=True),
        )
    )
    plain, nothing, detailed = batch.unpack_results(plan, results, {})
    assert plain is not None and plain.token == 11 and plain.logprobs is None
    assert nothing is None
    assert detailed is not None and detailed.token == 13 and detailed.logprobs is not None
    assert detailed.logprobs.logprob == float(own[2, 0])
    assert detailed.logprobs.top == tuple(zip(top_ids[2].tolist(), top[2].tolist(), strict=True))


@pytest.mark.parametrize(("tokens", "tile_size"), [(1, 16), (3, 1), (7, 4), (40, 16)])
def test_a_mixed_bucket_has_tiles_for_the_worst_split(tokens: int, tile_size: int) -> None:
    """Rows of two tokens and rows just over a tile waste the most."""
    bucket = Bucket.mixed(tokens, max_rows=MAX_SEQS, tile_size=tile_size, updates=8)
    for num_rows in range(1, bucket.rows + 1):
        for short in (1, 2, tile_size + 1):
            counts = [short] * (num_rows - 1)
            counts.append(tokens - sum(counts))
            if counts[-1] < 1:
                continue
            plan = prefill(counts)
            assert bucket.holds(plan)
            inputs = unpacked(plan, bucket)
            assert inputs.tile_length.sum() + inputs.decode_length.sum() == tokens


def test_a_bucket_for_longer_chunks_says_when_a_plan_has_too_many_tiles() -> None:
    bucket = Bucket.mixed(32, max_rows=MAX_SEQS, tile_size=8, updates=8, chunk_tokens=16)
    assert bucket.tiles < Bucket.mixed(32, max_rows=MAX_SEQS, tile_size=8, updates=8).tiles
    assert bucket.holds(prefill([16, 16]))
    assert bucket.holds(prefill([27, 1, 1, 1, 1, 1]))
    assert not bucket.holds(prefill([9, 9, 9]))
    assert not bucket.holds(prefill([33]))


def prefill(counts: list[int]) -> StepPlan:
    """One chunk from position 0 for each of `counts`."""
    return StepPlan(
        rows=tuple(
            Row(seq_id=slot, slot=slot, start=0, tokens=(1,) * count, samples=True)
            for slot, count in enumerate(counts)
        )
    )
