"""Weights whose inputs are stored in another order, in which groups are contiguous."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.weights.format import Quantized
from jaxserve_kernels.weights.int4 import Int4Weight


class _Arrays(NamedTuple):
    packed: Array  # this and those below: see Int4Weight
    scale: Array
    order: Array  # int32 [..., in]: a permutation
    zero: Array | None = None


class OrderedInt4Weight(_Arrays, Quantized):
    """weight[n, order[i]] = stored[n, i]. Products permute their inputs to that order.

    GPTQ with activation order quantises the inputs with the largest activations first, so the
    inputs of a group are scattered. This type stores them side by side, as ordinary groups.
    """

    __slots__ = ()

    @property
    def stored(self) -> Int4Weight:
        """The weight with its inputs in the stored order."""
        return Int4Weight(self.packed, self.scale, self.zero)

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]"""
        return self.stored.shape

    @property
    def reordered(self) -> tuple[Array, Quantized]:
        return self.order, self.stored

    def dequantize(self) -> Array:
        """float32 [..., out, in]: the values of the codes, by definition."""
        place = jnp.argsort(self.order, axis=-1)[..., None, :]
        return jnp.take_along_axis(self.stored.dequantize(), place, axis=-1)

    @property
    def can_be_copied(self) -> bool:
        return True

    def e4m3_scale(self) -> Array:
        return self.stored.e4m3_scale()
