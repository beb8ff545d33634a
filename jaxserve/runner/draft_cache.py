"""The cache of what drafts: keys and values of a head's layers, or of a draft model's.

It has as many pages as the first cache group of the model, under the same numbers. So whatever
happens to a page happens to what the head keeps of its tokens: it is given to a sequence, shared,
copied, and moved to a tier below the device. The cache is dense, in the dtype of the activations,
whatever format the model's is in: a head writes an entry of a page that the model has filled
already, and writes it again after drafts that were rejected.

The kernels of dense attention are made for pages of 64 tokens. So a longer page of the model is a
few of the head's: the array is [layers, pages, parts, kv_heads, 2, page_size / parts, head_dim],
and `as_pages` is what the head reads.
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
"""Tokens of the head's pages, if the model's have more."""


class Drafted(NamedTuple):
    """The cache of the first group and that of what drafts, of which a page has both parts."""

    model: KV
    draft: Array


@dataclass(frozen=True, kw_only=True)
class DraftedLayout(PageLayout):
    """The layout of `Drafted`. Shapes are those of the model's cache."""

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
    """Returns how pages of the model's first cache group lie, with what drafts beside them."""
    if draft is None:
        return kv_format
    body = draft.body
    return DraftedLayout(
        model=kv_format, layers=body.num_layers, kv_heads=body.kv_heads, head_dim=body.head_dim
    )


def abstract(draft: DraftSpec | None, shape: CacheShape, dtype: DTypeLike) -> Any:
    """Returns shape and dtype of the cache of what drafts; None if nothing does.

    Args:
      shape: of the model's first cache.
      dtype: of activations.
    """
    found = layout(AUTO, draft)
    return found.abstract(shape, dtype).draft if isinstance(found, DraftedLayout) else None


def as_pages(draft: Array) -> Array:
    """Returns the cache of what drafts as a dense cache, in which each part is a page: page p of
    the model is those from p * parts on."""
    layers, pages, parts, *page = draft.shape
    return draft.reshape(layers, pages * parts, *page)


def page_table(table: Array, draft: Array) -> Array:
    """Returns the page table of the model's first cache, int32 [slots + 1, pages_per_seq], as that
    of `as_pages`, int32 [slots + 1, pages_per_seq * parts]."""
    parts = draft.shape[2]
    if parts == 1:
        return table
    return (table[:, :, None] * parts + jnp.arange(parts)).reshape(table.shape[0], -1)


def places(step: AttentionStep, draft: Array) -> AttentionStep:
    """Returns where tokens of the model's first cache lie in `as_pages`."""
    parts, size = draft.shape[2], draft.shape[5]
    if parts == 1:
        return step
    return step._replace(
        pages=step.pages * parts + step.offsets // size,
        offsets=step.offsets % size,
        page_table=page_table(step.page_table, draft),
    )


def joined(kv: Caches, draft: Array | None) -> tuple[Any, ...]:
    """Returns the caches as whole pages are copied and moved."""
    return kv if draft is None else (Drafted(paged(kv)[0], draft), *kv[1:])


def split(caches: tuple[Any, ...]) -> tuple[Caches, Array | None]:
    """The inverse of `joined`."""
    first, *others = caches
    if not isinstance(first, Drafted):
        return caches, None
    return (first.model, *others), first.draft
