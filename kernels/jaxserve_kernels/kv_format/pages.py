"""Layouts of paged caches: bytes of a page, and the axes that moves of pages use."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.kv_format.base import CacheShape, zeros


class PageLayout(ABC):
    """A way to lay out the pages of a cache: which arrays there are, and which of their axes counts
    pages. Subclasses are frozen dataclasses."""

    @property
    def page_size(self) -> int | None:
        """The only page size that the layout supports; None: any."""
        return None

    @abstractmethod
    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> Any:
        """Shapes and dtypes of the arrays, for activations of `dtype`."""

    def allocate(self, shape: CacheShape, dtype: DTypeLike) -> Any:
        """The arrays of an empty cache."""
        return zeros(self.abstract(shape, dtype))

    def page_bytes(self, shape: CacheShape, dtype: DTypeLike) -> int:
        """Bytes of one page in all layers. `shape.pages` is ignored."""
        return self._bytes(shape, dtype, pages=2) - self._bytes(shape, dtype, pages=1)

    def fixed_bytes(self, shape: CacheShape, dtype: DTypeLike) -> int:
        """Bytes that the cache needs beside its pages: scales, and arrays per slot."""
        return self._bytes(shape, dtype, pages=1) - self.page_bytes(shape, dtype)

    def _bytes(self, shape: CacheShape, dtype: DTypeLike, *, pages: int) -> int:
        shape = dataclasses.replace(shape, pages=pages)
        leaves = jax.tree.leaves(self.abstract(shape, dtype))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    @property
    def page_axes(self) -> tuple[int | None, ...]:
        """The axis of pages of each array of a cache, in the order of its leaves. None: the array
        has no pages."""
        one, two = (
            jax.tree.leaves(self.abstract(self._smallest(pages), jnp.float32)) for pages in (1, 2)
        )
        return tuple(_grown(a.shape, b.shape) for a, b in zip(one, two, strict=True))

    def _smallest(self, pages: int) -> CacheShape:
        return CacheShape(
            layers=1, pages=pages, kv_heads=1, page_size=self.page_size or 4, head_dim=8, slots=2
        )

    def page_shapes(self, shape: CacheShape, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of one page in each of the `page_arrays`, with the axis of pages first, of length
        1."""
        leaves = zip(jax.tree.leaves(self.abstract(shape, dtype)), self.page_axes, strict=True)
        return tuple(
            jax.ShapeDtypeStruct((1, *leaf.shape[:axis], *leaf.shape[axis + 1 :]), leaf.dtype)
            for leaf, axis in leaves
            if axis is not None
        )

    def page_arrays(self, kv: Any) -> list[tuple[Array, int]]:
        """The arrays of a cache that have pages, each with the index of its axis of pages."""
        leaves = zip(jax.tree.leaves(kv), self.page_axes, strict=True)
        return [(leaf, axis) for leaf, axis in leaves if axis is not None]

    def with_page_arrays(self, kv: Any, arrays: Sequence[Array]) -> Any:
        """The cache with these arrays as its `page_arrays`."""
        leaves, structure = jax.tree.flatten(kv)
        left = list(arrays)
        pairs = zip(leaves, self.page_axes, strict=True)
        return jax.tree.unflatten(
            structure, [leaf if axis is None else left.pop(0) for leaf, axis in pairs]
        )

    def places(self, kv: Any, pages: Array) -> Array:
        """Indices of pages on that axis."""
        return pages


def _grown(before: Sequence[int], after: Sequence[int]) -> int | None:
    grown = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert len(grown) <= 1, f"shapes {before} and {after} of one page and two"
    return grown[0] if grown else None
