"""Hopper's experts of 4-bit integers on the emulator, whose sums are in float16: weights and tokens
that would overflow it, or of which little would be left."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.experts import ExpertWeights, hopper
from jaxserve_kernels.weights import pack_int4
from tests.emulated.errors import relative_error
from tests.emulated.test_expert_kernels import expected, summed
from tests.emulator.targets import gpu

EXPERTS, WIDTH = 2, 128


def weight(seed: int, out: int, depth: int, scale: Any = None, zero: Any = None) -> Any:
    """Random codes. scale, zero: of groups, [EXPERTS, out, depth / 128]; else random, and none."""
    rng = np.random.default_rng(seed)
    codes = np.clip(np.round(rng.standard_normal((EXPERTS, out, depth)) * 3 + 8), 0, 15)
    if scale is None:
        scale = rng.uniform(0.2, 0.4, (EXPERTS, out, depth // 128)) * depth**-0.5
    given = None if zero is None else jnp.asarray(zero)
    return pack_int4(jnp.asarray(codes, jnp.int32), jnp.asarray(scale, jnp.float32), given)


def tokens(count: int, embed: int) -> Any:
    return jnp.asarray(np.random.default_rng(count).standard_normal((count, embed)), jnp.bfloat16)


def error(x: Any, w: ExpertWeights) -> float:
    """Of tokens [tokens, embed] of which all but three are the first expert's."""
    ids = jnp.zeros((x.shape[0], 1), jnp.int32).at[:3].set(1)
    args = x, ids, jnp.ones(ids.shape, jnp.float32), w
    found = hopper.experts(*args, "silu", target=gpu(90, multiprocessors=3))
    return relative_error(summed(found), expected(*args))


@pytest.mark.parametrize("zeros", [False, True])
def test_scales_of_a_row_that_differ(zeros: bool) -> None:
    """By up to 10,000, of either sign; some are 0, and all of one row."""
    rng, embed, groups = np.random.default_rng(0), 512, 4
    scale = 0.1 * 10 ** rng.uniform(-4, 0, (EXPERTS, 2 * WIDTH, groups))
    scale *= rng.choice([-1, 1], scale.shape)
    scale[:, ::3, 1] = 0
    scale[:, 5] = 0
    zero = rng.integers(0, 16, scale.shape) if zeros else None
    w = ExpertWeights(weight(1, 2 * WIDTH, embed, scale, zero), weight(2, embed, WIDTH))
    assert error(tokens(143, embed), w) < 5e-2


@pytest.mark.parametrize("count", [63, 98, 143])
def test_tokens_that_are_all_positive(count: int) -> None:
    """What zero points take away is many times what is left: 8e-2 is the error of their products in
    bfloat16."""
    w = ExpertWeights(weight(1, 2 * WIDTH, 1024), weight(2, 1024, WIDTH))
    assert error(abs(tokens(count, 1024)), w) < 9e-2


def test_zero_points_outside_of_the_codes() -> None:
    """Weights that are all far from 0 have such ones."""
    rng, embed = np.random.default_rng(0), 512
    zero = rng.uniform(-250, -150, (EXPERTS, 2 * WIDTH, embed // 128)).astype(np.float32)
    zero[:, WIDTH:] *= rng.choice([-1, 1], (EXPERTS, WIDTH, 1))  # of up
    scale = rng.uniform(5e-4, 1e-3, zero.shape)
    w = ExpertWeights(weight(1, 2 * WIDTH, embed, scale, zero), weight(2, embed, WIDTH))
    x = jnp.asarray(rng.uniform(0.8, 1, (143, embed)), jnp.bfloat16)
    assert error(x, w) < 5e-2


@pytest.mark.parametrize(("embed", "zero"), [(6144, 0), (6144, 15), (8192, 0)])
def test_the_largest_sums(embed: int, zero: int) -> None:
    """More groups of the largest tokens than float16 has room for."""
    scale = np.full((EXPERTS, 2 * WIDTH, embed // 128), 0.5 / embed)
    codes = jnp.full((EXPERTS, 2 * WIDTH, embed), 15 - zero, jnp.int32)
    zeros = jnp.full(scale.shape, zero, jnp.int32)
    w = ExpertWeights(
        pack_int4(codes, jnp.asarray(scale, jnp.float32), zeros), weight(2, embed, WIDTH)
    )
    assert error(jnp.full((66, embed), 0.5, jnp.bfloat16), w) < 5e-2
