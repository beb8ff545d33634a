"""The evaluation of weight formats: how it rounds the tokens that matrices read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lab.embedded.eval_formats import TOKENS, tokens_in_8_bits

EMBED = 256


@pytest.mark.parametrize("which", [None, *TOKENS])
def test_matrices_read_rounded_tokens_within_the_context_only(which: str | None) -> None:
    after_norm = nnx.Linear(EMBED, 128, rngs=nnx.Rngs(0))
    other = nnx.Linear(512, EMBED, rngs=nnx.Rngs(1))
    bounds = {None: (0, 0), "e4m3": (4e-2, 4e-2), "e4m3-after-norms": (4e-2, 0)}
    for matrix, most in zip((after_norm, other), bounds.get(which, (1.2e-2, 0)), strict=True):
        x = jax.random.normal(jax.random.key(2), (8, matrix.in_features))
        exact = matrix(x)
        with tokens_in_8_bits(which, EMBED):
            rounded = matrix(x)
        error = jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact)
        assert most / 4 <= error <= most
        np.testing.assert_array_equal(matrix(x), exact)
