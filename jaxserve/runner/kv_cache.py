"""The size of the KV cache, and the number of pages that a memory budget holds."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.typing import DTypeLike

from jaxserve.config import CacheConfig, ConfigError, PagedGroup
from jaxserve.model_spec import ModelSpec
from jaxserve.models.drafts.spec import DraftSpec
from jaxserve.runner import draft_cache
from jaxserve_kernels.kv_format import CacheShape, KVFormat, PageLayout
from jaxserve_kernels.recurrent_state import MOST_PROMPTS

_WINDOWS = 2
"""Pages of a group with a window, as a multiple of the pages that all sequences hold there. The
second half serves cached prefixes. More pages would shrink the groups that hold whole sequences."""


SNAPSHOT_STRIDE = 2048
"""Prompt tokens between two snapshots of recurrent state. A chunk of a prompt stores one, so this
is the largest useful chunk. In the supported models, a snapshot is as large as the keys and values
of 1,500 to 3,100 tokens."""


class Demand(NamedTuple):
    """The largest demand on the cache."""

    max_model_len: int
    """Tokens of the longest sequence."""
    sequences: int
    """Sequences that run at once."""
    step_tokens: int
    """Positions that the largest step computes."""


class SizedGroup(NamedTuple):
    """A cache group without its number of pages."""

    shape: CacheShape
    """`pages` is ignored."""
    window: int | None = None
    draft: DraftSpec | None = None
    """The head or model whose draft entries the group's pages include; None: none."""

    def layout(self, kv_format: KVFormat) -> PageLayout:
        """Returns the layout of the group's pages."""
        return draft_cache.layout(kv_format, self.draft)

    def page_bytes(self, kv_format: KVFormat, dtype: DTypeLike) -> int:
        """Returns the bytes of a page."""
        return self.layout(kv_format).page_bytes(self.shape, dtype)

    def needed(self, demand: Demand) -> int:
        """Returns the pages that one sequence of `max_model_len` tokens needs, plus the padding
        page."""
        group = PagedGroup(num_pages=2, window=self.window)
        return group.pages_of(demand.max_model_len, self.shape.page_size) + 1

    def useful(self, demand: Demand) -> int:
        """Returns the most pages that a group with a window can use beside groups without one."""
        chunks = -(-demand.step_tokens // self.shape.page_size)
        return max(_WINDOWS * demand.sequences * (self.needed(demand) - 1), chunks) + chunks + 1


def sized_groups(
    spec: ModelSpec, page_size: int, max_num_seqs: int, draft: DraftSpec | None = None
) -> list[SizedGroup]:
    """Returns the cache groups of a model, in the order of `ModelSpec.cache_groups`.

    Args:
      draft: its entries are part of the first group's pages.
    """
    return [
        SizedGroup(
            CacheShape(
                layers=len(group.layers),
                pages=1,
                kv_heads=spec.kv_heads,
                page_size=page_size,
                head_dim=spec.head_dim,
                slots=max_num_seqs + 1,
            ),
            group.window,
            None if index else draft,
        )
        for index, group in enumerate(spec.cache_groups)
    ]


def shapes(spec: ModelSpec, cache: CacheConfig, max_num_seqs: int) -> tuple[CacheShape, ...]:
    """Returns the shape of each cache group.

    Raises:
      ConfigError: the groups of the cache differ from those of the model.
    """
    groups = sized_groups(spec, cache.page_size, max_num_seqs)
    if [group.window for group in groups] != [group.window for group in cache.groups]:
        raise ConfigError("the KV cache has other groups than the model")
    pairs = zip(groups, cache.groups, strict=True)
    return tuple(replace(sized.shape, pages=group.num_pages) for sized, group in pairs)


def cache_config(
    spec: ModelSpec,
    num_pages: Sequence[int],
    page_size: int,
    own_tokens: int = 0,
    snapshots: int = 0,
) -> CacheConfig:
    """Returns the configuration of a cache.

    Args:
      num_pages: pages of each cache group of the model.
      page_size: tokens per page.
      own_tokens: see `CacheConfig`.
      snapshots: snapshots of recurrent state.
    """
    windows = [group.window for group in spec.cache_groups]
    pairs = zip(num_pages, windows, strict=True)
    first, *further = (PagedGroup(num_pages=pages, window=window) for pages, window in pairs)
    return CacheConfig(
        num_pages=first.num_pages,
        window=first.window,
        further=tuple(further),
        page_size=page_size,
        own_tokens=own_tokens,
        snapshots=snapshots,
        snapshot_stride=max(SNAPSHOT_STRIDE, page_size),
        state_block=1 if spec.state is None else spec.state.delta_net.block,
        most_prompts=sys.maxsize if spec.state is None else MOST_PROMPTS,
    )


def page_bytes(
    layouts: Sequence[PageLayout], shapes: Sequence[CacheShape], dtype: DTypeLike
) -> tuple[int, ...]:
    """Returns the bytes of a page of each cache group."""
    pairs = zip(layouts, shapes, strict=True)
    return tuple(layout.page_bytes(shape, dtype) for layout, shape in pairs)


def total_bytes(
    layouts: Sequence[PageLayout], shapes: Sequence[CacheShape], dtype: DTypeLike
) -> int:
    """Returns the bytes of the whole cache.

    Args:
      layouts, shapes: one per cache group.
      dtype: of activations.
    """
    return sum(
        shape.pages * layout.page_bytes(shape, dtype) + layout.fixed_bytes(shape, dtype)
        for layout, shape in zip(layouts, shapes, strict=True)
    )


def num_pages(
    kv_format: KVFormat,
    groups: Sequence[SizedGroup],
    dtype: DTypeLike,
    budget: int,
    demand: Demand,
) -> list[int]:
    """Returns the number of pages of each group that together fit into `budget` bytes.

    All groups get the same number. But if some groups have no window, they also get the pages that
    groups with a window cannot use.
    """
    each = [group.page_bytes(kv_format, dtype) for group in groups]
    left = max(budget - sum(kv_format.fixed_bytes(group.shape, dtype) for group in groups), 0)
    pages = [left // sum(each)] * len(groups)
    full = [index for index, group in enumerate(groups) if group.window is None]
    if full and len(full) < len(groups):
        for index, group in enumerate(groups):
            if group.window is not None:
                pages[index] = min(pages[index], group.useful(demand))
                left -= pages[index] * each[index]
        for index in full:
            pages[index] = left // sum(each[other] for other in full)
    return pages


def fit_pages(
    kv_format: KVFormat,
    groups: Sequence[SizedGroup],
    dtype: DTypeLike,
    budget: int,
    demand: Demand,
) -> list[int]:
    """Like `num_pages`, but checks that the longest sequence fits.

    Raises:
      ConfigError: not even one sequence of max_model_len tokens fits.
    """
    pages = num_pages(kv_format, groups, dtype, budget, demand)
    needed = [group.needed(demand) for group in groups]
    if any(has < needs for has, needs in zip(pages, needed, strict=True)):
        each = [group.page_bytes(kv_format, dtype) for group in groups]
        fixed = sum(kv_format.fixed_bytes(group.shape, dtype) for group in groups)
        fits = max(min(pages) - 1, 0) * groups[0].shape.page_size
        beside = f" ({fixed / 2**20:,.0f} MiB of it beside the pages)" if fixed > 2**20 else ""
        lower = "--max-model-len"
        if beside:
            lower = "--max-num-seqs" if fixed > budget else "--max-model-len, --max-num-seqs"
        wanted = fixed + sum(map(operator.mul, needed, each))
        raise ConfigError(
            f"too little memory: the KV cache gets {budget / 2**20:,.0f} MiB, which holds {fits} "
            f"tokens, but one sequence of max_model_len {demand.max_model_len} needs "
            f"{wanted / 2**20:,.0f} MiB{beside}; lower {lower}, or "
            "give it more: --kv-cache-memory-bytes, or memory that something else takes"
        )
    return pages
