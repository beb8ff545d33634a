"""Splits the state of recurrent layers into pieces, which move through rings like pages.

A piece is the state of one layer in one slot. Its number is `slot * layers + layer`.
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
    """The layout of pieces. It has the methods of `PageLayout` that moves need."""

    layers: int
    """The number of recurrent layers."""

    @classmethod
    def of(cls, state: RecurrentState) -> StatePieces:
        """`state` may be abstract."""
        return cls(state.delta.shape[0])

    def page_shapes(self, state: RecurrentState) -> list[Any]:
        """Returns shapes and dtypes of a piece's arrays, each with a leading axis of size 1."""
        return [jax.ShapeDtypeStruct((1, *leaf.shape[2:]), leaf.dtype) for leaf in state]

    def page_bytes(self, state: RecurrentState) -> int:
        """Returns the bytes of a piece."""
        each = self.page_shapes(state)
        return sum(math.prod(part.shape) * jnp.dtype(part.dtype).itemsize for part in each)

    def page_arrays(self, state: RecurrentState) -> list[tuple[Array, int]]:
        """Returns the state's arrays reshaped to have one axis over all pieces, and that axis."""
        return [(leaf.reshape(-1, *leaf.shape[2:]), 0) for leaf in state]

    def with_page_arrays(self, state: RecurrentState, arrays: Sequence[Array]) -> RecurrentState:
        """Returns the state with its `page_arrays` replaced by `arrays`."""
        pairs = zip(state, arrays, strict=True)
        return RecurrentState(*(array.reshape(leaf.shape) for leaf, array in pairs))

    def places(self, state: RecurrentState, pages: Array) -> Array:
        """Returns the indices of pieces on the axis of `page_arrays`."""
        return pages % self.layers * state.delta.shape[1] + pages // self.layers
