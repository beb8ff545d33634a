"""Copies the state of recurrent layers between slots, to restore snapshots."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.programs.executable_cache import Program
from jaxserve_kernels.recurrent_state import RecurrentState
from jaxserve_kernels.ring_copies import within
from jaxserve_kernels.target import Target

NAME = "copy_state"


def programs(state: RecurrentState | None, *, target: Target) -> list[Program]:
    """Returns the program that copies a slot's state; none without recurrent layers. `state` may be
    abstract."""
    if state is None:
        return []
    pair = jax.ShapeDtypeStruct((2,), jnp.int32)
    function = functools.partial(copy_state, target=target)
    return [Program(name=NAME, function=function, arguments=(state, pair), donated=(0,))]


def copy_state(state: RecurrentState, pair: Array, *, target: Target) -> RecurrentState:
    """Copies a slot's state to another slot.

    On a GPU it takes no scratch memory. A program that does waits, on the host, until the step in
    flight frees its own, because the caches leave room for one step.

    Args:
      state: updated in place when donated.
      pair: int32 [2], the slots of the source and of the target.
    """
    return RecurrentState(*(within(leaf, pair, axis=1, target=target) for leaf in state))
