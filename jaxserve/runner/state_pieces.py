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
from jax import Array, lax

from jaxserve_kernels.recurrent_state import RecurrentState


@dataclass(frozen=True)
class StatePieces:
    """Reads and writes pieces, as a KV format reads and writes pages."""

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

    def read_page(self, state: RecurrentState, page: Array) -> list[Array]:
        """Returns a piece's arrays [1, ...]."""

        def read(leaf: Array) -> Array:
            sizes = (1, 1, *leaf.shape[2:])
            return lax.dynamic_slice(leaf, self._start(leaf, page), sizes)[0]

        return [read(leaf) for leaf in state]

    def write_page(
        self, state: RecurrentState, page: Array, parts: Sequence[Array]
    ) -> RecurrentState:
        """Returns the state with a piece overwritten."""
        pairs = zip(state, parts, strict=True)
        written = (
            lax.dynamic_update_slice(leaf, part[None], self._start(leaf, page))
            for leaf, part in pairs
        )
        return RecurrentState(*written)

    def _start(self, leaf: Array, page: Array) -> tuple[Any, ...]:
        zero = jnp.int32(0)
        return (page % self.layers, page // self.layers, *(zero for _ in leaf.shape[2:]))
