"""Rows of the sampler's tables: what they say of a sequence, and how they get to the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api import SamplingParams
from jaxserve.plan import Admission, Row, StepPlan
from jaxserve.programs.executable_cache import Executable, Program
from jaxserve.programs.executables import obtain
from jaxserve.runner import slot_tables
from jaxserve_kernels.sampler import IN_PROMPT, MAX_BIASES, MAX_COUNT, SUPPRESSED, SlotTables

VOCAB, SLOTS = 200, 5
ABSTRACT = slot_tables.abstract(SLOTS, VOCAB)
token_ids = st.integers(0, VOCAB - 1)


def compiled(programs: list[Program]) -> dict[str, Executable]:
    return obtain(programs, None, 1, lambda phase, done: None).executables


def rows_of(admission: Admission) -> dict[str, np.ndarray]:
    return dict(slot_tables.rows_of(admission, ABSTRACT))


@given(prompt=st.lists(token_ids, min_size=1), output=st.lists(token_ids))
def test_counts_are_of_the_output_with_a_bit_for_the_prompt(
    prompt: list[int], output: list[int]
) -> None:
    params = SamplingParams(max_tokens=1, frequency_penalty=1.0)
    rows = rows_of(Admission(0, params, (*prompt, *output), len(prompt)))
    assert list(rows) == ["counts"]
    numbers = Counter(output)
    for token, count in enumerate(rows["counts"].tolist()):
        assert count & MAX_COUNT == numbers[token]
        assert bool(count & IN_PROMPT) == (token in prompt)


def test_biases_are_in_order_of_tokens_and_end_where_they_no_longer_apply() -> None:
    params = SamplingParams(
        max_tokens=9,
        logit_bias=((70, -1.5), (3, 2.0)),
        min_tokens=4,
        stop_token_ids=frozenset([3, 199]),
    )
    ids, bits, until = rows_of(Admission(0, params, (), 10))["biases"].reshape(3, MAX_BIASES)
    forever = np.iinfo(np.int32).max
    entries = set(zip(ids.tolist(), bits.view(np.float32).tolist(), until.tolist(), strict=True))
    assert ids.tolist() == sorted(ids.tolist())
    low = float(np.float32(SUPPRESSED))
    expected = {(3, 2.0, forever), (70, -1.5, forever), (3, low, 14), (199, low, 14)}
    assert {entry for entry in entries if entry[0] < VOCAB} == expected


def test_a_sequence_that_uses_no_table_sends_nothing() -> None:
    plain = SamplingParams(max_tokens=9, min_tokens=3)  # and no stop token to keep away
    assert not rows_of(Admission(0, plain, (), 10))


def test_rows_arrive_in_their_slots_and_nowhere_else() -> None:
    tables = SlotTables(*(jnp.full(table.shape, -9, table.dtype) for table in ABSTRACT))
    uploads = slot_tables.Uploads(ABSTRACT, compiled(slot_tables.programs(ABSTRACT)))
    tables = uploads.warm(tables)
    assert all((np.asarray(table) == -9).all() for table in tables)
    params = SamplingParams(max_tokens=9, presence_penalty=1.0, allowed_token_ids=(1, 33, 199))
    admission = Admission(2, params, (7, 7, 8, 7), 2)
    longer = bytes(VOCAB)  # of a tokenizer that knows more tokens
    rows = [
        Row(0, 0, 0, (1,), True, mask=bytes([0, 0, 0, 128]) + longer),
        Row(4, 4, 0, (1,), True, mask=bytes([4, 0, 0, 128])),
    ]
    tables = uploads(tables, StepPlan(rows=tuple(rows), admissions=(admission,)))
    counts, biases, masks = (np.asarray(table) for table in tables)
    assert counts[2, [7, 8, 9]].tolist() == [1 | IN_PROMPT, 1, 0]
    assert (np.delete(counts, 2, axis=0) == -9).all() and (biases == -9).all()
    allowed = np.unpackbits(masks[2].view(np.uint8), bitorder="little")
    assert np.flatnonzero(allowed).tolist() == [1, 33, 199]
    assert masks[4].tolist() == [4 - 2**31] + [0] * (masks.shape[1] - 1), "the rest is forbidden"
    assert masks[0, 0] == -(2**31) and (masks[[1, 3, 5]] == -9).all()


def test_a_mask_that_has_not_changed_is_not_sent_again() -> None:
    sent: list[int] = []

    def counted(run: Any) -> Any:
        def call(table: Any, packed: np.ndarray) -> Any:
            sent.append(int((packed[:, 0] < table.shape[0]).sum()))
            return run(table, packed)

        return call

    executables = compiled(slot_tables.programs(ABSTRACT))
    uploads = slot_tables.Uploads(ABSTRACT, {n: counted(run) for n, run in executables.items()})
    tables = SlotTables(*(jnp.full(table.shape, -9, table.dtype) for table in ABSTRACT))
    first, second, params = bytes([1] * 8), bytes([2] * 8), SamplingParams(max_tokens=9)
    chosen = replace(params, allowed_token_ids=(5,))

    def held(masks: dict[int, bytes], *admissions: Admission) -> list[int]:
        nonlocal tables
        rows = tuple(Row(slot, slot, 0, (1,), True, mask=mask) for slot, mask in masks.items())
        sent.clear()
        tables = uploads(tables, StepPlan(rows=rows, admissions=admissions))
        return list(sent)

    assert held({0: first, 1: first}) == [2]
    assert held({0: first, 1: second}) == [1]
    assert held({0: first, 1: second}) == []
    assert held({}, Admission(0, chosen, (), 2)) == [1]
    assert held({0: first, 1: second}) == [1], "another sequence's was there meanwhile"
    assert (np.asarray(tables.masks)[0, :2] == 0x01010101).all()
    uploads.forget()
    assert held({0: first, 1: second}) == [2]
