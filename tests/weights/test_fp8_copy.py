"""A model's copies in fp8: what is planned is what is made, by few programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.weights.fp8_copy import abstract_copies, copying_programs, with_copies
from jaxserve_kernels import weights

OUT, DEPTH = 128, 256


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    @jax.jit
    def make() -> dict[str, Any]:
        stacked = jnp.ones((2, OUT, DEPTH))
        return {
            "int4": weights.quantize_int4(stacked),
            "alike": weights.quantize_int4(stacked),
            "nvfp4": weights.quantize_nvfp4(stacked[0]),
            "head": weights.quantize_int8(stacked[0]),
            "norm": stacked[0, 0],
        }

    return make()


def test_what_is_planned_is_what_is_made(params: dict[str, Any]) -> None:
    planned = abstract(params)
    programs = copying_programs(planned)
    assert len(programs) == 2  # those that are alike have one
    made = with_copies(params, {each.name: jax.jit(each.function) for each in programs})
    assert abstract(made) == abstract_copies(planned)
    for name in ("int4", "alike", "nvfp4"):
        assert isinstance(made[name], weights.CopiedWeight)
        assert made[name].codes is params[name]
    assert made["head"].packed is params["head"].packed and made["norm"] is params["norm"]


def test_where_nothing_has_4_bits_there_is_nothing_to_make(params: dict[str, Any]) -> None:
    plain = abstract({name: params[name] for name in ("head", "norm")})
    assert copying_programs(plain) == []
    assert abstract_copies(plain) == plain
