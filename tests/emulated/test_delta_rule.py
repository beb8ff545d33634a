"""The kernels of the gated delta rule on the emulator against its definition."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.causal_conv import reference as conv_reference
from jaxserve_kernels.causal_conv import triton as conv_triton
from jaxserve_kernels.dense_matmul.reference import sum_parts
from jaxserve_kernels.gated_delta_rule import (
    Heads,
    RuleConfig,
    RuleTokens,
    RuleWeights,
    reference,
    triton,
)
from jaxserve_kernels.recurrent_state import RecurrentStep, Rows
from jaxserve_kernels.target import Target
from tests.emulated.errors import relative_error
from tests.emulator.targets import HOPPER, PDL
from tests.kernels.recurrent_steps import Part, step_of

HEADS = Heads(key_heads=2, value_heads=6, key_dim=16, value_dim=64)
CONFIG = RuleConfig(heads=HEADS, block=16, eps=1e-6)
LAYERS, LAYER, SLOTS, PADDING = 2, 1, 5, 3
"""The last slot holds a snapshot."""


def arrays(tokens: int, seed: int, dtype: str) -> tuple[RuleTokens, RuleWeights, jnp.ndarray]:
    rng = np.random.default_rng(seed)
    state = rng.standard_normal((LAYERS, SLOTS, *HEADS[1:])).astype(np.float32)
    state[:, 2] = np.nan  # what an earlier sequence left
    width = 2 * HEADS.keys + HEADS.values
    parts = rng.standard_normal((3, tokens, 2 * HEADS.value_heads))
    given = RuleTokens(
        qkv=jnp.asarray(rng.standard_normal((tokens, width)), dtype),
        gates=jnp.asarray(2 * parts, jnp.float32),
        projected=jnp.asarray(rng.standard_normal((2, tokens, width + HEADS.values)), jnp.float32),
    )
    weights = RuleWeights(
        jnp.asarray(np.log(rng.uniform(0.01, 4, HEADS.value_heads)), jnp.float32),
        jnp.asarray(1 + 0.3 * rng.standard_normal(HEADS.value_heads), jnp.float32),
        jnp.asarray(rng.standard_normal(HEADS.value_dim), dtype),
    )
    return given, weights, jnp.asarray(state)


def check(
    parts: list[Part], step: RecurrentStep, dtype: str, target: Target, bounds: tuple[float, float]
) -> None:
    """Bounds of the output and of the state."""
    used = sum(part.tokens for part in parts)
    tokens, weights, state = arrays(step.slots.shape[0], len(parts), dtype)
    rest = (weights, state, LAYER, step)
    out, new = triton.rule_and_norm(tokens, *rest, config=CONFIG, target=target)
    expected, wanted = reference.rule_and_norm(tokens, *rest, config=CONFIG)
    found = (each[:used].astype(jnp.float32) for each in (out, expected))
    assert relative_error(*found) < bounds[0]
    for part in parts:
        assert relative_error(new[LAYER, part.slot], wanted[LAYER, part.slot]) < bounds[1]
    np.testing.assert_array_equal(new[0], state[0])
    np.testing.assert_array_equal(new[LAYER, -1], state[LAYER, -1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_rows_with_the_norm_of_the_output(dtype: str) -> None:
    parts = [Part(1, 40, 1), Part(2, 0, 1)]
    step = step_of(parts, 3, 3, PADDING)
    step = RecurrentStep.of_decode(step.slots, step.positions, PADDING)
    check(parts, step, dtype, PDL, (1e-6, 1e-6) if dtype == "float32" else (2e-3, 1e-6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_blocks_and_of_single_tokens(dtype: str) -> None:
    """A block, two with a rest, and a decode; prompts that end inside of the rows and before."""
    parts = [Part(1, 48, 16), Part(2, 0, 37), Part(0, 7, 1)]
    step = step_of(parts, 64, 4, PADDING, prompts=(4, 64, 33, 0, 0), block=CONFIG.block)
    assert step.rows.blocked is not None and step.rows.blocked.tolist() == [16, 32, 0, 0]
    check(parts, step, dtype, HOPPER, (2e-6, 1e-6) if dtype == "float32" else (4e-3, 2e-5))


def test_a_step_of_fewer_tokens_than_a_block() -> None:
    parts = [Part(1, 7, 1), Part(2, 0, 9)]
    step = step_of(parts, 12, 4, PADDING, prompts=(0, 64, 64, 0, 0), block=CONFIG.block)
    check(parts, step, "float32", HOPPER, (1e-6, 1e-6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_rejected_leaves_no_trace(dtype: str) -> None:
    """Outputs of all positions of rows, and then a state of some of them: of all, of one, of
    none."""
    tokens, weights, state = arrays(16, 5, dtype)
    used, slots = np.arange(16) % 8 < 5, np.repeat([1, PADDING, 0, PADDING], [5, 3, 5, 3])
    positions = np.where(used, np.tile(np.arange(40, 48), 2), 0)
    rows = Rows(*(jnp.asarray(each) for each in ([0, 8], [5, 5], [1, 0], [40, 40])))
    step = RecurrentStep(jnp.asarray(slots), jnp.asarray(positions), rows)
    given = (tokens, weights, state, LAYER, step)
    out = triton.rule_outputs(*given, config=CONFIG, target=HOPPER)
    expected = reference.rule_outputs(*given, config=CONFIG)
    found = (each[used].astype(jnp.float32) for each in (out, expected))
    assert relative_error(*found) < (1e-6 if dtype == "float32" else 2e-3)
    gates = sum_parts(tokens.gates, tokens.qkv.dtype)
    for accepted in ([5, 1], [0, 3]):
        kept = step.cut(jnp.asarray(accepted), PADDING)
        given = (tokens.qkv, gates, weights, state, LAYER, kept)
        new = triton.advance_state(*given, config=CONFIG, target=HOPPER)
        wanted = reference.advance_state(*given, config=CONFIG)
        for slot, count in zip((1, 0), accepted, strict=True):
            assert relative_error(new[LAYER, slot], wanted[LAYER, slot]) < 1e-6
            assert count or (new[LAYER, slot] == state[LAYER, slot]).all()
        np.testing.assert_array_equal(new[0], state[0])
        np.testing.assert_array_equal(new[LAYER, 2:3], state[LAYER, 2:3])


CHANNELS, WIDTH = 72, 4


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_convolution(dtype: str, decode: bool) -> None:
    """Rows of one token, of fewer than the convolution sees, and of more than a program has."""
    parts = (
        [Part(1, 40, 1), Part(2, 0, 1), Part(0, 2, 1)]
        if decode
        else [Part(1, 7, 1), Part(2, 0, 2), Part(0, 3, 37)]
    )
    used = sum(part.tokens for part in parts)
    step = step_of(parts, used + 2, used + 2 if decode else 5, PADDING, (0,) * SLOTS)
    if decode:
        step = RecurrentStep.of_decode(step.slots, step.positions, PADDING)
    rng = np.random.default_rng(decode)
    projected = jnp.asarray(rng.standard_normal((3, used + 2, CHANNELS + 20)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((CHANNELS, WIDTH)), dtype)
    state = rng.standard_normal((LAYERS, SLOTS, WIDTH - 1, CHANNELS)).astype(np.float32)
    state[:, 2] = np.nan  # what an earlier sequence left
    given = (projected, weight, jnp.asarray(state, dtype), LAYER, step)
    out, new = conv_triton.causal_conv(*given, target=PDL if decode else HOPPER)
    expected, wanted = conv_reference.causal_conv(*given)
    if not decode:  # the same in two parts
        inputs = sum_parts(projected[..., :CHANNELS], dtype)
        outputs = conv_triton.convolve(*given, target=HOPPER)
        again = conv_triton.keep_inputs(inputs, given[2], LAYER, step.rows, target=HOPPER)
        for one, other in ((outputs[:used], out[:used]), (again, new)):
            np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
    found = (each[:used].astype(jnp.float32) for each in (out, expected))
    assert relative_error(*found) < (1e-6 if dtype == "float32" else 2e-3)
    found, wide = (each.astype(jnp.float32) for each in (new, wanted))
    np.testing.assert_array_equal(found, wide)
