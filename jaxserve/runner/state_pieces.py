"""The state of recurrent layers in pieces, which move between the device and rings as pages do.

A piece is the state of one layer in one slot. Piece `slot * layers + layer` is that of `layer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.recurrent_state import RecurrentState


@dataclass(frozen=True)
class StatePieces:
    """Where pieces lie, as `PageLayout` says it of pages."""

    layers: int
    """Recurrent layers."""

    @classmethod
    def of(cls, state: RecurrentState) -> StatePieces:
        """`state` may be abstract."""
        return cls(state.delta.shape[0])

    def page_shapes(self, state: RecurrentState) -> list[Any]:
        """Returns shape and dtype of a piece's arrays, with an axis of 1 in front."""
        return [jax.ShapeDtypeStruct((1, *leaf.shape[2:]), leaf.dtype) for leaf in state]

    def page_bytes(self, state: RecurrentState) -> int:
        """Returns the bytes of a piece."""
        each = self.page_shapes(state)
        return sum(math.prod(part.shape) * jnp.dtype(part.dtype).itemsize for part in each)

    def page_arrays(self, state: RecurrentState) -> list[tuple[Array, int]]:
        """Returns the arrays of the state with one axis for all pieces, and its number."""
        return [(leaf.reshape(-1, *leaf.shape[2:]), 0) for leaf in state]

    def with_page_arrays(self, state: RecurrentState, arrays: Sequence[Array]) -> RecurrentState:
        """Returns the state with these in the place of its `page_arrays`."""
        pairs = zip(state, arrays, strict=True)
        return RecurrentState(*(array.reshape(leaf.shape) for leaf, array in pairs))

    def places(self, state: RecurrentState, pages: Array) -> Array:
        """Returns where pieces lie on that axis."""
        return pages % self.layers * state.delta.shape[1] + pages // self.layers
