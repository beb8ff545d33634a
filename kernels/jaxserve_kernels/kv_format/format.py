"""A KV format: one class that owns its layout, attention, and end of a step."""

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
    """A way to lay out keys and values.

    The arrays are a pytree of a type of their own, `arrays`, by which `format_of` finds the format.
    Everything else passes it on without looking inside. Subclasses are frozen dataclasses.
    """

    arrays: ClassVar[type]
    """The type of its caches. An array alone, or traced, is one of the dense format."""
    quantized: ClassVar[bool] = False
    """Whether it keeps codes rather than numbers."""
    has_scales: ClassVar[bool] = False
    """Whether its caches have scales that are set before they are used."""
    windows_on_gpus: ClassVar[bool] = True
    """Whether its kernels know windows."""
    computes_whole_tiles: ClassVar[bool] = False
    """Whether a CPU computes every place of a query tile, also those without a token."""
    rewrites_pages: ClassVar[bool] = True
    """Whether positions that a step wrote in several pages may be written again from the first of
    them on, as if the step had not been. If not, that holds within one page only."""

    def __init_subclass__(cls) -> None:
        if "arrays" in cls.__dict__:
            _BY_ARRAYS[cls.arrays] = cls

    @classmethod
    def of(cls, kv: Any) -> Self:
        """The format of a cache, with the options that its layout depends on."""
        return cls()

    @property
    @abstractmethod
    def name(self) -> str:
        """As in `--kv-cache-dtype`."""

    @property
    def own_tokens(self) -> int:
        """Tokens at the beginning, in whole pages, that each sequence has to compute itself: a page
        that others have computed does not give it all that the format keeps of them."""
        return 0

    @abstractmethod
    def tokens_per_page(self, kv: Any) -> int:
        """The page size of a cache."""

    # Attention

    @property
    @abstractmethod
    def attention(self) -> Op:
        """Called as `attention(qkv, kv, heads, tables, step, ...)`, with the options of `attend`,
        whose result it gives."""

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
        """What is left to do in the cache when all layers have attended: returns the cache."""
        return kv

    def max_chunk_context(self, max_model_len: int, *, page_size: int) -> int | None:
        """Tokens, in whole pages, that the chunks of one step may see together. None: any
        number."""
        return None

    def expanded_tokens(self, max_model_len: int, *, step_tokens: int, sequences: int) -> int:
        """Tokens whose keys and values a mixed step holds in full precision, one layer at a
        time."""
        return 0

    # Scales

    def with_scales(self, kv: Any, scales: ArrayLike) -> Any:
        """An empty cache with these scales, if the format `has_scales`.

        Args:
          scales: float32 [layers, kv_heads, 2], of keys, then values. A magnitude of 448 times its
            scale is the largest that fits.

        Raises:
          TypeError: the format has none.
        """
        raise TypeError(f"the KV format {self.name} has no scales")

    def largest_magnitudes(self, kv: Any) -> Array:
        """What scales are found by, if the format `has_scales`: the largest keys and values in the
        pages, float32 [layers, kv_heads, 2].

        Raises:
          TypeError: the format has none.
        """
        raise TypeError(f"the KV format {self.name} has no scales")


class QuantizedKVFormat(KVFormat):
    """A format of codes. What the chunks of a step see is converted first: see `chunks`."""

    quantized = True

    def max_chunk_context(self, max_model_len: int, *, page_size: int) -> int | None:
        return chunks.capacity(-(-max_model_len // page_size) * page_size)

    def expanded_tokens(self, max_model_len: int, *, step_tokens: int, sequences: int) -> int:
        return chunks.capacity(max_model_len)


def format_of(kv: Any) -> KVFormat:
    """The format of a cache, by the type of its arrays."""
    return _BY_ARRAYS.get(type(kv), _BY_ARRAYS[Array]).of(kv)
