"""The base class of KV formats: layout, sizes, attention, end of a step and page copies."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format import chunks
from jaxserve_kernels.kv_format.base import AttentionStep, CacheShape, zeros
from jaxserve_kernels.op import Op
from jaxserve_kernels.target import Target

_BY_ARRAYS: dict[type, type[KVFormat]] = {}


class KVFormat(ABC):
    """A way to store keys and values.

    A cache is a pytree of the type `arrays`, by which `format_of` finds the format. Other code
    passes caches on without looking inside. Subclasses are frozen dataclasses.
    """

    arrays: ClassVar[type]
    """The type of its caches. A single array, traced or not, is a cache of the dense format."""
    quantized: ClassVar[bool] = False
    """Whether it stores codes rather than numbers."""
    has_scales: ClassVar[bool] = False
    """Whether its caches have scales that are set before use."""
    windows_on_gpus: ClassVar[bool] = True
    """Whether its kernels support sliding windows."""
    computes_whole_tiles: ClassVar[bool] = False
    """Whether a CPU computes every place of a query tile, even those without a token."""
    rewrites_pages: ClassVar[bool] = True
    """Whether a later step may overwrite positions that an earlier step wrote, even if they span
    several pages. False: only positions within one page may be overwritten."""

    def __init_subclass__(cls) -> None:
        if "arrays" in cls.__dict__:
            _BY_ARRAYS[cls.arrays] = cls

    @classmethod
    def of(cls, kv: Any) -> Self:
        """The format of a cache, including the options that determine its layout."""
        return cls()

    @property
    @abstractmethod
    def name(self) -> str:
        """The format's name in `--kv-cache-dtype`."""

    @property
    def page_size(self) -> int | None:
        """The only page size that the format supports; None: any."""
        return None

    @property
    def own_tokens(self) -> int:
        """Leading tokens, in whole pages, that each sequence must compute itself. The prefix cache
        cannot supply them, because the format stores more about them than their pages hold."""
        return 0

    # Layout and bytes

    @abstractmethod
    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> Any:
        """Shapes and dtypes of the arrays, for activations of `dtype`."""

    def allocate(self, shape: CacheShape, dtype: DTypeLike) -> Any:
        """The arrays of an empty cache."""
        return zeros(self.abstract(shape, dtype))

    @abstractmethod
    def tokens_per_page(self, kv: Any) -> int:
        """The page size of a cache."""

    def page_bytes(self, shape: CacheShape, dtype: DTypeLike) -> int:
        """Bytes of one page in all layers. `shape.pages` is ignored."""
        return self._bytes(shape, dtype, pages=2) - self._bytes(shape, dtype, pages=1)

    def fixed_bytes(self, shape: CacheShape, dtype: DTypeLike) -> int:
        """Bytes that the format needs beside its pages: scales, and arrays per slot."""
        return self._bytes(shape, dtype, pages=1) - self.page_bytes(shape, dtype)

    def _bytes(self, shape: CacheShape, dtype: DTypeLike, *, pages: int) -> int:
        shape = dataclasses.replace(shape, pages=pages)
        leaves = jax.tree.leaves(self.abstract(shape, dtype))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    # Attention

    @property
    @abstractmethod
    def attention(self) -> Op:
        """The operation behind `attend`. Called as `attention(qkv, kv, heads, tables, step, ...)`,
        with the options of `attend`."""

    def attend(
        self,
        qkv: Array,
        kv: Any,
        layer: int,
        heads: HeadWeights,
        tables: tuple[Array, Array],
        step: AttentionStep,
        *,
        eps: float,
        tile_size: int,
        dtype: DTypeLike,
        window: int | None = None,
        target: Target,
    ) -> tuple[Array, Any]:
        """See `kv_format.attend`."""
        return self.attention(
            qkv, kv, heads, tables, step,
            layer=layer, eps=eps, tile_size=tile_size, dtype=jnp.dtype(dtype), window=window,
            target=target,
        )  # fmt: skip

    def end_step(self, kv: Any, step: AttentionStep, *, tile_size: int, target: Target) -> Any:
        """Finishes a step in the cache after attention in all layers. Returns the cache."""
        return kv

    def max_chunk_context(self, max_model_len: int, *, page_size: int) -> int | None:
        """The most context tokens, counted in whole pages, of all chunks of one step together.
        None: no limit."""
        return None

    def expanded_tokens(self, max_model_len: int, *, step_tokens: int, sequences: int) -> int:
        """Number of tokens whose keys and values a mixed step expands to full precision, in one
        layer at a time."""
        return 0

    # Page copies

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

    def copy_page(self, kv: Any, source: Array, target: Array) -> Any:
        """The cache after copying page `source` to page `target`; int32 [] each."""
        leaves, structure = jax.tree.flatten(kv)
        copied = [
            leaf if axis is None else _copied(leaf, axis, source, target)
            for leaf, axis in zip(leaves, self.page_axes, strict=True)
        ]
        return jax.tree.unflatten(structure, copied)

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

    # Scales

    def with_scales(self, kv: Any, scales: ArrayLike) -> Any:
        """An empty cache with these scales, if the format `has_scales`.

        Args:
          scales: float32 [layers, kv_heads, 2], of keys, then values. The largest magnitude that
            fits is 448 times the scale.

        Raises:
          TypeError: the format has no scales.
        """
        raise TypeError(f"the KV format {self.name} has no scales")

    def largest_magnitudes(self, kv: Any) -> Array:
        """The largest magnitudes of keys and of values in the pages, float32 [layers, kv_heads, 2],
        from which scales are calibrated, if the format `has_scales`.

        Raises:
          TypeError: the format has no scales.
        """
        raise TypeError(f"the KV format {self.name} has no scales")


class QuantizedKVFormat(KVFormat):
    """A format of codes. The contexts of a step's chunks are expanded first: see `chunks`."""

    quantized = True

    def max_chunk_context(self, max_model_len: int, *, page_size: int) -> int | None:
        return chunks.capacity(-(-max_model_len // page_size) * page_size)

    def expanded_tokens(self, max_model_len: int, *, step_tokens: int, sequences: int) -> int:
        return chunks.capacity(max_model_len)


def format_of(kv: Any) -> KVFormat:
    """The format of a cache, by the type of its arrays."""
    return _BY_ARRAYS.get(type(kv), _BY_ARRAYS[Array]).of(kv)


def _grown(before: Sequence[int], after: Sequence[int]) -> int | None:
    grown = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert len(grown) <= 1, f"shapes {before} and {after} of one page and two"
    return grown[0] if grown else None


def _copied(leaf: Array, axis: int, source: Array, target: Array) -> Array:
    page = lax.dynamic_slice_in_dim(leaf, source, 1, axis)
    # Without the barrier XLA would fuse this with the update, and copy the whole cache first.
    page = lax.optimization_barrier(page)
    return lax.dynamic_update_slice_in_dim(leaf, page, target, axis)
