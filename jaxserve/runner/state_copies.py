"""Copies the state of recurrent layers between slots, to take and restore snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from jaxserve.plan import StateCopy
from jaxserve.programs.executable_cache import Program
from jaxserve_kernels.recurrent_state import RecurrentState

NAME = "copy_states"
COPIES = 4
"""Copies per call of the program."""


def programs(state: RecurrentState | None) -> list[Program]:
    """Returns the program that takes the arrays of `pack`; none without recurrent layers. `state`
    may be abstract."""
    if state is None:
        return []
    slots = jax.ShapeDtypeStruct((2, COPIES), jnp.int32)
    return [Program(name=NAME, function=copy_states, arguments=(state, slots), donated=(0,))]


def copy_states(state: RecurrentState, slots: Array) -> RecurrentState:
    """Copies slots one after another; each copy reads what those before it wrote.

    Args:
      state: updated in place when donated.
      slots: int32 [2, copies], sources and targets.
    """

    def copy(number: Array, state: RecurrentState) -> RecurrentState:
        source, target = slots[0, number], slots[1, number]
        return RecurrentState(*(_copied(leaf, source, target) for leaf in state))

    return lax.fori_loop(0, slots.shape[1], copy, state)


def _copied(leaf: Array, source: Array, target: Array) -> Array:
    one = lax.dynamic_slice_in_dim(leaf, source, 1, axis=1)
    # In one fusion with the update, XLA would copy the whole state to read it unchanged.
    one = lax.optimization_barrier(one)
    return lax.dynamic_update_slice_in_dim(leaf, one, target, axis=1)


def pack(copies: Sequence[StateCopy], padding_slot: int) -> Iterator[NDArray[np.int32]]:
    """Yields int32 [2, COPIES], sources and targets, until all copies are packed. Padding copies
    the padding slot to itself."""
    for first in range(0, len(copies), COPIES):
        some = copies[first : first + COPIES]
        packed = np.full((2, COPIES), padding_slot, np.int32)
        packed[:, : len(some)] = np.array(some, np.int32).T
        yield packed
