"""Copies of whole pages of the KV cache, in any format.

A format says the shapes of its arrays for a number of pages. The axis that grows with that number
is the axis of pages; an array without one is kept per slot or once, and is not copied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxserve.plan import PageCopy
from jaxserve.programs.executable_cache import Program
from jaxserve_kernels.kv_format import KV, CacheShape, KVFormat

NAME = "copy_pages_"
"""Followed by the number of the cache group."""
COPIES = 8
"""Copies that one call of the program does. It needs scratch memory for a single page."""


def program(kv_format: KVFormat, shape: CacheShape, dtype: DTypeLike, group: int) -> Program:
    """Returns the program that applies `pack`'s arrays to the cache of a cache group.

    Args:
      shape: of that cache.
      dtype: of activations.
    """
    axes = page_axes(kv_format, shape, dtype)
    return Program(
        name=f"{NAME}{group}",
        function=functools.partial(copy_pages, axes=axes),
        arguments=(
            kv_format.abstract(shape, dtype),
            jax.ShapeDtypeStruct((2, COPIES), jnp.int32),
        ),
        donated=(0,),
        details=repr(axes),
    )


def page_axes(kv_format: KVFormat, shape: CacheShape, dtype: DTypeLike) -> tuple[int | None, ...]:
    """Returns the axis of pages of each array of a cache, in the order of its leaves; None: the
    array has no pages."""
    one, two = (
        jax.tree.leaves(kv_format.abstract(replace(shape, pages=pages), dtype)) for pages in (1, 2)
    )
    return tuple(_grown(a.shape, b.shape) for a, b in zip(one, two, strict=True))


def _grown(before: Sequence[int], after: Sequence[int]) -> int | None:
    grown = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert len(grown) <= 1, f"shapes {before} and {after} of one page and two"
    return grown[0] if grown else None


def copy_pages(kv: KV, pages: Array, *, axes: Sequence[int | None]) -> KV:
    """Copies pages one after another; each copy reads what those before it wrote.

    Args:
      kv: the cache, updated in place when donated.
      pages: int32 [2, copies], sources and targets.
      axes: see `page_axes`.
    """

    def copy(number: Array, leaves: list[Array]) -> list[Array]:
        source, target = pages[0, number], pages[1, number]
        return [
            leaf if axis is None else _copied(leaf, axis, source, target)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]

    leaves, structure = jax.tree.flatten(kv)
    copied: Any = lax.fori_loop(0, pages.shape[1], copy, leaves)
    return jax.tree.unflatten(structure, copied)


def _copied(leaf: Array, axis: int, source: Array, target: Array) -> Array:
    page = lax.dynamic_slice_in_dim(leaf, source, 1, axis)
    # In one fusion with the update, XLA would copy the whole cache to read it unchanged.
    page = lax.optimization_barrier(page)
    return lax.dynamic_update_slice_in_dim(leaf, page, target, axis)


def pack(copies: Sequence[PageCopy]) -> Iterator[NDArray[np.int32]]:
    """Yields int32 [2, COPIES], sources and targets, until all copies, of one group, are packed.
    Padding copies the padding page to itself."""
    for first in range(0, len(copies), COPIES):
        some = copies[first : first + COPIES]
        packed = np.zeros((2, COPIES), np.int32)
        packed[:, : len(some)] = np.array(some, np.int32)[:, :2].T
        yield packed
