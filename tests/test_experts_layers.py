"""Layers of experts that are timed are compared with their definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve_kernels.target import CPU, REFERENCE
from scripts import experts_layers
from scripts.experts_layers import Model, make_weights, relative_error

TINY = Model(8, 2, 256, 256)


def error_of(format: str) -> float:
    weights = make_weights(TINY, format)
    x = jax.random.normal(jax.random.key(0), (5, TINY.embed), jnp.bfloat16)
    logits = jax.random.normal(jax.random.key(1), (5, TINY.experts))
    layer: Any = jax.tree.map(lambda leaf: leaf[0], weights)
    return relative_error(x, logits, layer, TINY.routing, TINY.activation, chain=False, target=CPU)


@pytest.mark.parametrize("format", experts_layers.FORMATS)
def test_the_definition_has_no_error(format: str) -> None:
    assert error_of(format) < 1e-5


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts_layers.experts

    def wrong(*args: Any, target: Any, **options: Any) -> Any:
        parts = right(*args, target=target, **options)
        return parts if target == REFERENCE else 1.1 * parts

    monkeypatch.setattr(experts_layers, "experts", wrong)
    assert error_of("bf16") == pytest.approx(0.1, rel=0.05)
