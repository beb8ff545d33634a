"""The base class of KV formats: layout, attention and end of a step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format import chunks
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.pages import PageLayout
from jaxserve_kernels.op import Op
from jaxserve_kernels.target import Target

_BY_ARRAYS: dict[type, type[KVFormat]] = {}


class KVFormat(PageLayout):
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
    def own_tokens(self) -> int:
        """Leading tokens, in whole pages, that each sequence must compute itself. The prefix cache
        cannot supply them, because the format stores more about them than their pages hold."""
        return 0

    @abstractmethod
    def tokens_per_page(self, kv: Any) -> int:
        """The page size of a cache."""

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
