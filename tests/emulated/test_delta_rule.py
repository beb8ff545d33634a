"""The kernel of the gated delta rule on the emulator against its definition."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.gated_delta_rule import Heads, reference, triton
from jaxserve_kernels.recurrent_state import RecurrentStep
from tests.emulated.errors import relative_error
from tests.emulator.targets import HOPPER
from tests.kernels.recurrent_steps import Part, step_of

HEADS = Heads(key_heads=2, value_heads=6, key_dim=16, value_dim=64)
LAYERS, LAYER, SLOTS, PADDING = 2, 1, 5, 3
"""The last slot holds a snapshot."""


def arrays(tokens: int, seed: int) -> tuple[jnp.ndarray, ...]:
    """qkv, gates, a_log, dt_bias, state."""
    rng = np.random.default_rng(seed)
    state = rng.standard_normal((LAYERS, SLOTS, *HEADS[1:]))
    state[:, 2] = np.nan  # what an earlier sequence left
    each = (
        rng.standard_normal((tokens, 2 * HEADS.keys + HEADS.values)),
        4 * rng.standard_normal((tokens, 2 * HEADS.value_heads)),
        np.log(rng.uniform(0.01, 4, HEADS.value_heads)),
        1 + 0.3 * rng.standard_normal(HEADS.value_heads),
        state,
    )
    return tuple(jnp.asarray(one, jnp.float32) for one in each)


@pytest.mark.parametrize("decode", [False, True])
def test_rows_of_chunks_and_of_single_tokens(decode: bool) -> None:
    parts = (
        [Part(1, 40, 1), Part(2, 0, 1)] if decode else [Part(1, 7, 1), Part(2, 0, 9), Part(0, 3, 5)]
    )
    used = sum(part.tokens for part in parts)
    tokens = used if decode else used + 3
    step = step_of(parts, tokens, 2 if decode else 4, PADDING)
    if decode:
        step = RecurrentStep.of_decode(step.slots, step.positions, PADDING)
    *given, state = arrays(tokens, seed=decode)
    rest = (state, LAYER, step)
    out, new = triton.gated_delta_rule(*given, *rest, heads=HEADS, target=HOPPER)
    expected, wanted = reference.gated_delta_rule(*given, *rest, heads=HEADS)
    assert relative_error(out[:used], expected[:used]) < 1e-6
    for part in parts:
        assert relative_error(new[LAYER, part.slot], wanted[LAYER, part.slot]) < 1e-6
    np.testing.assert_array_equal(new[0], state[0])
    np.testing.assert_array_equal(new[LAYER, -1], state[LAYER, -1])
