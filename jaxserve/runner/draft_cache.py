"""The draft cache: keys and values of a draft head's layers, or of a draft model's.

It has as many pages as the model's first cache group, with the same numbers. So the draft part of a
page is allocated, shared, copied and offloaded together with the model's part. The cache is dense
and has the activations' dtype, whatever the format of the model's cache: a head writes entries of
pages that the model has already filled, and writes them again after rejected drafts.

The kernels of dense attention support pages of 64 tokens. A longer page of the model therefore has
several parts here: the array is [layers, pages, parts, kv_heads, 2, page_size / parts, head_dim],
and the head reads it as `as_pages`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.models.drafts.spec import DraftSpec
from jaxserve.models.layer import Caches, paged
from jaxserve_kernels.kv_format import AUTO, KV, AttentionStep, CacheShape, KVFormat, PageLayout

_PAGE = 64
"""Tokens of a part, if the model's pages have more."""


class Drafted(NamedTuple):
    """The cache of the model's first group, and the draft cache."""

    model: KV
    draft: Array


@dataclass(frozen=True, kw_only=True)
class DraftedLayout(PageLayout):
    """The layout of `Drafted`. Its methods take shapes of the model's cache."""

    model: KVFormat
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def page_size(self) -> int | None:
        return self.model.page_size

    def abstract(self, shape: CacheShape, dtype: DTypeLike) -> Drafted:
        parts = max(shape.page_size // _PAGE, 1)
        own = dataclasses.replace(
            shape,
            layers=self.layers,
            kv_heads=self.kv_heads,
            page_size=shape.page_size // parts,
            head_dim=self.head_dim,
        )
        layers, pages, *page = AUTO.abstract(own, dtype).shape
        draft: Any = jax.ShapeDtypeStruct((layers, pages, parts, *page), dtype)
        return Drafted(self.model.abstract(shape, dtype), draft)


def layout(kv_format: KVFormat, draft: DraftSpec | None) -> PageLayout:
    """Returns the layout of the first cache group's pages, with their draft parts."""
    if draft is None:
        return kv_format
    body = draft.body
    return DraftedLayout(
        model=kv_format, layers=body.num_layers, kv_heads=body.kv_heads, head_dim=body.head_dim
    )


def abstract(draft: DraftSpec | None, shape: CacheShape, dtype: DTypeLike) -> Any:
    """Returns shape and dtype of the draft cache; None without a head or draft model.

    Args:
      shape: of the model's first cache.
      dtype: of activations.
    """
    found = layout(AUTO, draft)
    return found.abstract(shape, dtype).draft if isinstance(found, DraftedLayout) else None


def as_pages(draft: Array) -> Array:
    """Returns the draft cache as a dense cache whose pages are the parts. Page p of the model
    starts at page p * parts."""
    layers, pages, parts, *page = draft.shape
    return draft.reshape(layers, pages * parts, *page)


def page_table(table: Array, draft: Array) -> Array:
    """Converts the page table of the model's first cache, int32 [slots + 1, pages_per_seq], to the
    page table of `as_pages`, int32 [slots + 1, pages_per_seq * parts]."""
    parts = draft.shape[2]
    if parts == 1:
        return table
    return (table[:, :, None] * parts + jnp.arange(parts)).reshape(table.shape[0], -1)


def places(step: AttentionStep, draft: Array) -> AttentionStep:
    """Converts places of tokens in the model's first cache to places in `as_pages`."""
    parts, size = draft.shape[2], draft.shape[5]
    if parts == 1:
        return step
    return step._replace(
        pages=step.pages * parts + step.offsets // size,
        offsets=step.offsets % size,
        page_table=page_table(step.page_table, draft),
    )


def joined(kv: Caches, draft: Array | None) -> tuple[Any, ...]:
    """Returns the caches for moves of whole pages: the draft cache joins the first group."""
    return kv if draft is None else (Drafted(paged(kv)[0], draft), *kv[1:])


def split(caches: tuple[Any, ...]) -> tuple[Caches, Array | None]:
    """The inverse of `joined`."""
    first, *others = caches
    if not isinstance(first, Drafted):
        return caches, None
    return (first.model, *others), first.draft
