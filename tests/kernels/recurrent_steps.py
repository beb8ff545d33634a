"""Steps of recurrent layers for tests: which sequences compute how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve_kernels.recurrent_state import Kept, RecurrentStep


class Part(NamedTuple):
    """A row of a step."""

    slot: int
    start: int
    tokens: int
    kept: int = 0
    """After how many of its tokens the state also goes to slot `kept_in`; 0: never."""
    kept_in: int = 0


def step_of(
    parts: Sequence[Part],
    tokens: int,
    rows: int,
    padding_slot: int,
    prompts: Sequence[int] | None = None,
    block: int = 1,
) -> RecurrentStep:
    """The rows one after the other, then padding; `prompts`: tokens of each slot's prompt."""
    slots, positions = np.full(tokens, padding_slot, np.int32), np.zeros(tokens, np.int32)
    row_slots, last = np.full(rows, padding_slot, np.int32), np.zeros(rows, np.int32)
    kept = np.zeros(rows, np.int32), np.full(rows, padding_slot, np.int32)
    first = 0
    for index, (slot, start, count, *own) in enumerate(parts):
        slots[first : first + count] = slot
        positions[first : first + count] = np.arange(start, start + count)
        first += count
        row_slots[index], last[index] = slot, first - 1
        kept[0][index], kept[1][index] = own
    first, second, third, fourth = map(jnp.asarray, (slots, positions, row_slots, last))
    of_rows = None if prompts is None else jnp.asarray(np.array(prompts, np.int32)[row_slots])
    states = None if prompts is None else Kept(*map(jnp.asarray, kept))
    return RecurrentStep.of_rows(first, second, third, fourth, of_rows, block, states)
