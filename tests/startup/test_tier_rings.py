"""The rings through which pages leave the device hold what two of the longest steps compute."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.startup.host_tier_plan import plan_rings
from jaxserve_kernels.kv_format import CacheShape, named

PAGE = 64


@pytest.mark.parametrize(
    ("layers", "tokens", "store"),
    [(36, 2048, 64), (36, 256, 28), (8, 2048, 128), (128, 4096, 32)],
    ids=["two steps", "short steps", "small pages", "a GiB at most"],
)
def test_a_store_ring_holds_two_steps(layers: int, tokens: int, store: int) -> None:
    shape = CacheShape(layers=layers, pages=2, kv_heads=8, page_size=PAGE, head_dim=128, slots=2)
    rings, size = plan_rings(
        parse_args(["--kv-offload-size", "1Gi"]),
        [named("auto")],
        [shape],
        jnp.bfloat16,
        None,
        step_pages=tokens // PAGE,
        gpu=True,
    )
    assert rings is not None and rings.store == store
    page = layers * 2 * PAGE * 8 * 128 * 2
    assert size == page * (rings.store + rings.load + 2)
