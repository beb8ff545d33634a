"""Layouts of pages, and caches whose elements tell where they were."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runner.draft_cache import DraftedLayout
from jaxserve_kernels.kv_format import CacheShape, PageLayout, named
from jaxserve_kernels.kv_format.kvarn import KVarN

PAGES = 7
SHAPE = CacheShape(layers=2, pages=PAGES, kv_heads=2, page_size=4, head_dim=8, slots=3)
KVARN = KVarN(value_bits=2, group=4)
LAYOUTS: dict[str, PageLayout] = {
    "auto": named("auto"),
    "int8": named("int8"),
    "fp8_e4m3": named("fp8_e4m3"),
    "kvarn": KVARN,
    "kvarn, with a head's": DraftedLayout(model=KVARN, layers=1, kv_heads=1, head_dim=6),
}
AXES = {
    "auto": (1,),
    "int8": (1, 1),
    "fp8_e4m3": (1, None),
    "kvarn": (1, 1, 1, None),
    "kvarn, with a head's": (1, 1, 1, None, 1),
}
"""The axis of pages of each array. Scales of fp8 and KVarN's slots have none."""
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def numbered(layout: PageLayout) -> Any:
    """A cache in which every element tells where it was."""

    def fill(leaf: Any) -> np.ndarray:
        return (np.arange(leaf.size) % 101).astype(leaf.dtype).reshape(leaf.shape)

    return jax.tree.map(fill, layout.abstract(SHAPE, jnp.float32))
