"""Copies of whole pages of the KV cache, in any layout: `PageLayout.copy_page`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxserve.plan import PageCopy
from jaxserve.programs.executable_cache import Program
from jaxserve_kernels.kv_format import CacheShape, PageLayout

NAME = "copy_pages_"
"""Prefix of a program's name; the number of the cache group follows."""
COPIES = 8
"""Copies per call of the program. A call needs scratch memory for one page only."""


def program(layout: PageLayout, shape: CacheShape, dtype: DTypeLike, group: int) -> Program:
    """Returns the program that copies pages of a cache group, as packed by `pack`.

    Args:
      layout, shape: the group's page layout and shape.
      dtype: of activations.
    """
    return Program(
        name=f"{NAME}{group}",
        function=functools.partial(copy_pages, layout=layout),
        arguments=(
            layout.abstract(shape, dtype),
            jax.ShapeDtypeStruct((2, COPIES), jnp.int32),
        ),
        donated=(0,),
        details=repr(layout.page_axes),
    )


def copy_pages(kv: Any, pages: Array, *, layout: PageLayout) -> Any:
    """Copies pages one after another; each copy reads what those before it wrote.

    Args:
      kv: the cache, updated in place when donated.
      pages: int32 [2, copies], sources and targets.
      layout: of the cache.
    """

    def copy(number: Array, kv: Any) -> Any:
        return layout.copy_page(kv, pages[0, number], pages[1, number])

    return lax.fori_loop(0, pages.shape[1], copy, kv)


def pack(copies: Sequence[PageCopy]) -> Iterator[NDArray[np.int32]]:
    """Yields int32 [2, COPIES], sources and targets, until all copies are packed. All copies must
    belong to one group. Padding copies the padding page to itself."""
    for first in range(0, len(copies), COPIES):
        some = copies[first : first + COPIES]
        packed = np.zeros((2, COPIES), np.int32)
        packed[:, : len(some)] = np.array(some, np.int32)[:, :2].T
        yield packed
