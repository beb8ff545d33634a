"""The device's memory of each sequence: written by address, read by column."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api import SamplingParams
from jaxserve.runner import sequence_state
from jaxserve.runner.sequence_state import MIN_P, PAGES, SEED, TEMPERATURE, TOP_K, TOP_P

SLOTS, PAGES_PER_SEQ = 3, 5
SHAPE = sequence_state.shape(SLOTS, PAGES_PER_SEQ)

apply = jax.jit(sequence_state.apply)
floats = st.floats(0, 2, width=32)


def test_there_is_a_row_per_slot_and_one_for_padding() -> None:
    assert SHAPE == (SLOTS + 1, PAGES + PAGES_PER_SEQ)
    assert [each.shape for each in sequence_state.page_tables(jnp.zeros(SHAPE, jnp.int32), 1)] == [
        (4, PAGES_PER_SEQ)
    ]


@given(
    temperature=floats,
    top_k=st.integers(0, 2**31 - 1),
    top_p=floats,
    min_p=floats,
    seed=st.integers(0, 2**64),
    slot=st.integers(0, SLOTS - 1),
)
def test_parameters_arrive_as_they_were_sent(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, slot: int
) -> None:
    params = SamplingParams(
        max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    columns = dict(sequence_state.columns(params))
    assert len(columns) == 6 and max(columns) < PAGES
    width = SHAPE[1]
    addresses = jnp.asarray([slot * width + column for column in columns], jnp.int32)
    state = apply(jnp.full(SHAPE, -7, jnp.int32), addresses, jnp.asarray([*columns.values()]))
    slots = jnp.asarray([slot])
    read = {
        column: float(sequence_state.float_column(state, slots, column)[0])
        for column in (TEMPERATURE, TOP_P, MIN_P)
    }
    assert read == {TEMPERATURE: temperature, TOP_P: top_p, MIN_P: min_p}
    assert int(state[slot, TOP_K]) == top_k
    assert int(state[slot, SEED]) % 2**32 == seed % 2**32
    assert (np.asarray(state) == -7).sum() >= state.size - 6, "somebody else's state changed"


def test_addresses_outside_are_dropped_and_the_rest_is_untouched() -> None:
    before = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)
    most = np.iinfo(np.int32).max
    addresses = np.array([most, 5, most - 1, before.size, before.size - 1, before.size + 1])
    after = apply(
        jnp.asarray(before), jnp.asarray(addresses, jnp.int32), jnp.full(6, -1, jnp.int32)
    )
    expected = before.copy().reshape(-1)
    expected[[5, before.size - 1]] = -1
    np.testing.assert_array_equal(np.asarray(after), expected.reshape(SHAPE))


def test_the_page_table_is_what_lies_behind_the_parameters() -> None:
    state = np.zeros(SHAPE, np.int32)
    state[2, PAGES + 3] = 9
    table = np.asarray(sequence_state.page_tables(jnp.asarray(state), 1)[0])
    assert table[2, 3] == 9 and table.sum() == 9
