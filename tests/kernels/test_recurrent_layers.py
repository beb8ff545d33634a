"""Causal convolution and gated delta rule against numpy, over splits into steps and rows."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from jaxserve_kernels.causal_conv import causal_conv
from jaxserve_kernels.gated_delta_rule.reference import (
    Heads,
    Inputs,
    gated_delta_rule,
    gated_rms_norm,
    one_block,
    one_token,
)
from jaxserve_kernels.recurrent_state import RecurrentState, RecurrentStep
from jaxserve_kernels.target import CPU
from tests.kernels.recurrent_steps import Part, step_of

type Floats = NDArray[np.floating[Any]]

HEADS = Heads(key_heads=2, value_heads=6, key_dim=8, value_dim=12)
CHANNELS, WIDTH = 2 * HEADS.keys + HEADS.values, 4
LAYERS, LAYER, SLOTS, PADDING = 2, 1, 3, 3
LENGTHS = (40, 23, 70)
"""Of the sequence in each slot."""
TOKENS, ROWS, BLOCK = 32, 4, 8
PROMPTS = (33, 5, 61, 0)
"""Tokens of each sequence that are its prompt, with one, five and five in the last block; the last
one is the padding slot's."""
FORMS = 2e-6
"""Between the recurrence in float32 and chunks in float64, relative to the largest number; 4e-7 is
the worst measured."""


class Sequence(NamedTuple):
    x: Floats  # [tokens, CHANNELS]
    gates: Floats  # [tokens, 2 * value_heads]


RNG = np.random.default_rng(0)
SEQUENCES = [
    Sequence(
        RNG.standard_normal((length, CHANNELS)).astype(np.float32),
        RNG.standard_normal((length, 2 * HEADS.value_heads)).astype(np.float32),
    )
    for length in LENGTHS
]
WEIGHT = RNG.standard_normal((CHANNELS, WIDTH)).astype(np.float32) / 2
A_LOG = np.log(RNG.uniform(0.01, 4, HEADS.value_heads)).astype(np.float32)
DT_BIAS = (1 + 0.3 * RNG.standard_normal(HEADS.value_heads)).astype(np.float32)


def dirty() -> RecurrentState:
    """What earlier sequences left."""
    conv = np.full((LAYERS, SLOTS + 1, WIDTH - 1, CHANNELS), np.nan, np.float32)
    delta = np.full((LAYERS, SLOTS + 1, *HEADS[1:]), np.nan, np.float32)
    return RecurrentState(jnp.asarray(conv), jnp.asarray(delta))


@jax.jit
def layer(
    x: jax.Array, gates: jax.Array, state: RecurrentState, step: RecurrentStep
) -> tuple[jax.Array, jax.Array, RecurrentState]:
    mixed, conv = causal_conv(x[None], jnp.asarray(WEIGHT), state.conv, LAYER, step, target=CPU)
    out, delta = gated_delta_rule(
        *(mixed, gates, jnp.asarray(A_LOG), jnp.asarray(DT_BIAS), state.delta, LAYER, step),
        heads=HEADS,
        block=BLOCK,
    )
    return mixed, out, RecurrentState(conv, delta)


def run(steps: list[list[Part]]) -> tuple[list[Floats], list[Floats], RecurrentState]:
    """What the convolution and the rule give for each sequence, and the state in the end."""
    mixed = [np.full_like(each.x, np.nan) for each in SEQUENCES]
    outs = [np.full((len(each.x), *HEADS[1::2]), np.nan, np.float32) for each in SEQUENCES]
    state = dirty()
    for parts in steps:
        singles = all(part.tokens == 1 for part in parts)
        tokens = ROWS if singles else TOKENS
        x, gates = np.zeros((tokens, CHANNELS)), np.zeros((tokens, 2 * HEADS.value_heads))
        first = 0
        for slot, start, count, *_ in parts:
            x[first : first + count] = SEQUENCES[slot].x[start : start + count]
            gates[first : first + count] = SEQUENCES[slot].gates[start : start + count]
            first += count
        step = step_of(parts, tokens, ROWS, PADDING, PROMPTS, BLOCK)
        if singles:
            step = RecurrentStep.of_decode(step.slots, step.positions, PADDING)
        arrays = (jnp.asarray(each, jnp.float32) for each in (x, gates))
        got_mixed, got, state = layer(*arrays, state, step)
        first = 0
        for slot, start, count, *_ in parts:
            mixed[slot][start : start + count] = got_mixed[first : first + count]
            outs[slot][start : start + count] = got[first : first + count]
            first += count
    return mixed, outs, state


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_kept_state_is_that_of_a_row_which_ends_there(blocks: int) -> None:
    tokens = blocks * BLOCK
    *_, state = run([[Part(0, 0, 2 * BLOCK + 1, tokens, kept_in=1)]])
    *_, shorter = run([[Part(0, 0, tokens)]])
    for found, expected in zip(state, shorter, strict=True):
        np.testing.assert_array_equal(found[LAYER, 1], expected[LAYER, 0])
    *_, longer = run([[Part(0, 0, 2 * BLOCK + 1)]])
    for found, expected in zip(state, longer, strict=True):
        np.testing.assert_array_equal(found[LAYER, 0], expected[LAYER, 0])


def convolved(x: Floats) -> Floats:
    """In float64, with the sum over the places written out."""
    padded = np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), x.astype(np.float64)])
    total = sum(padded[i : i + len(x)] * WEIGHT[:, i].astype(np.float64) for i in range(WIDTH))
    return total / (1 + np.exp(-total))


def in_chunks(mixed: Floats, gates: Floats, size: int = 16) -> tuple[Floats, Floats]:
    """The chunked form in float64 (the WY representation of Yang et al. 2024): o and the state."""
    wide = mixed.astype(np.float64)
    q, k, v = np.split(wide, [HEADS.keys, 2 * HEADS.keys], axis=1)
    groups = HEADS.value_heads // HEADS.key_heads

    def normed(each: Floats) -> Floats:
        each = each.reshape(len(wide), HEADS.key_heads, HEADS.key_dim)
        each = each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6)
        return each.repeat(groups, axis=1).swapaxes(0, 1)

    q, k = normed(q) / np.sqrt(HEADS.key_dim), normed(k)
    v = v.reshape(len(wide), HEADS.value_heads, HEADS.value_dim).swapaxes(0, 1)
    a, b = np.split(gates.astype(np.float64), 2, axis=1)
    g = (-np.exp(A_LOG) * np.log1p(np.exp(a + DT_BIAS))).T
    beta = (1 / (1 + np.exp(-b))).T[:, :, None]
    state = np.zeros((HEADS.value_heads, HEADS.key_dim, HEADS.value_dim))
    outs: list[Floats] = []
    for start in range(0, len(wide), size):
        part = slice(start, start + size)
        Q, K, V, B, c = q[:, part], k[:, part], v[:, part], beta[:, part], g[:, part].cumsum(1)
        lower = np.tril(np.ones((c.shape[1],) * 2))
        decay = np.exp(np.where(lower, c[:, :, None] - c[:, None], -np.inf))
        K_t, grown = K.swapaxes(1, 2), np.exp(c)[:, :, None]
        system = np.eye(c.shape[1]) + np.tril(B * (K @ K_t) * decay, -1)
        written = np.linalg.solve(system, B * V) - np.linalg.solve(system, B * grown * K) @ state
        outs.append((Q * grown) @ state + (Q @ K.swapaxes(1, 2) * decay) @ written)
        last = c[:, -1:, None]
        state = np.exp(last) * state + (K * np.exp(last - c[:, :, None])).swapaxes(1, 2) @ written
    return np.concatenate(outs, axis=1).swapaxes(0, 1), state


WHOLE = [
    [Part(slot, start, min(TOKENS, length - start))]
    for slot, length in enumerate(LENGTHS)
    for start in range(0, length, TOKENS)
]


@cache
def whole() -> tuple[list[Floats], list[Floats], RecurrentState]:
    return run(WHOLE)


def test_the_convolution_is_that_of_numpy() -> None:
    for found, sequence in zip(whole()[0], SEQUENCES, strict=True):
        np.testing.assert_allclose(found, convolved(sequence.x), rtol=0, atol=2e-6)


def test_the_recurrence_agrees_with_the_chunked_form() -> None:
    mixed, outs, state = whole()
    for slot, sequence in enumerate(SEQUENCES):
        expected, last = in_chunks(mixed[slot], sequence.gates)
        np.testing.assert_allclose(
            outs[slot], expected, rtol=0, atol=FORMS * np.abs(expected).max()
        )
        found = np.asarray(state.delta)[LAYER, slot]
        np.testing.assert_allclose(found, last, rtol=0, atol=FORMS * np.abs(last).max())
    assert np.isnan(np.asarray(state.delta)[0]).all(), "other layers are left alone"


def allowed(slot: int, start: int, count: int) -> int:
    """As many of so many tokens as do not end inside of a block of the prompt."""
    end = start + count
    return count if end >= PROMPTS[slot] else max(end // BLOCK * BLOCK - start, 0)


@st.composite
def splits(draw: st.DrawFn) -> list[list[Part]]:
    """All sequences, in steps of a few rows each; a step of singles is one of decode rows."""
    done, steps = [0] * SLOTS, list[list[Part]]()
    while any(have < length for have, length in zip(done, LENGTHS, strict=True)):
        parts, room = list[Part](), TOKENS
        alone = draw(st.booleans())
        for slot in draw(st.permutations(range(SLOTS))):
            most = min(room, LENGTHS[slot] - done[slot], 1 if alone else TOKENS)
            if most > 0 and draw(st.booleans()):
                count = allowed(slot, done[slot], draw(st.integers(1, most)))
                if not count:
                    continue
                parts.append(Part(slot, done[slot], count))
                done[slot] += count
                room -= count
        if parts:
            steps.append(parts)
    return steps


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.large_base_example, HealthCheck.too_slow],
)
@given(steps=splits())
def test_steps_and_rows_change_no_bit(steps: list[list[Part]]) -> None:
    mixed, outs, state = whole()
    found_mixed, found_outs, found_state = run(steps)
    for found, expected in zip([*found_mixed, *found_outs], [*mixed, *outs], strict=True):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(found_state, state, strict=True):
        np.testing.assert_array_equal(found[LAYER, :SLOTS], expected[LAYER, :SLOTS])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_output_norm_is_that_of_numpy(dtype: Any) -> None:
    x, gate = (jnp.asarray(RNG.standard_normal((5, 6, 12)), dtype) for _ in range(2))
    weight = jnp.asarray(RNG.standard_normal(12), dtype)
    wide, z = np.asarray(x, np.float64), np.asarray(gate, np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    expected = normed * np.asarray(weight, np.float64) * z / (1 + np.exp(-z))
    atol = 3e-6 if dtype == jnp.float32 else 2**-6
    found = np.asarray(gated_rms_norm(x, gate, weight, 1e-6), np.float64)
    np.testing.assert_allclose(found, expected, rtol=0 if dtype == jnp.float32 else 0.02, atol=atol)


BOUND = 2e-6
"""Between both forms, relative to the norm of the numbers; the worst measured is 5e-7."""


SHAPES = [(64, 2, 128, 128), (64, 3, 8, 12), (16, 1, 16, 16)]
"""Tokens, heads, and elements of keys and values."""


@st.composite
def shapes_and_gates(draw: st.DrawFn) -> tuple[Inputs, Floats]:
    """Tokens of a block, and a state: gates near 0 and 1, decays that forget everything or nothing,
    keys that repeat."""
    size, heads, key_dim, value_dim = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))

    def normed(each: Floats) -> Floats:
        return each / np.linalg.norm(each, axis=-1, keepdims=True)

    keys = normed(rng.standard_normal((size, heads, key_dim)))
    if draw(st.booleans()):
        keys[:] = keys[:1]
    kind = draw(st.sampled_from(["usual", "keeps", "forgets", "mixed"]))
    low, high = {"usual": (-2, 1), "keeps": (-9, -6), "forgets": (1, 3), "mixed": (-9, 3)}[kind]
    log_decay = -(10 ** rng.uniform(low, high, (size, heads)))
    bounds = draw(st.sampled_from([(-2, 2), (-20, 20)]))
    beta = 1 / (1 + np.exp(-rng.uniform(*bounds, keys.shape[:2])))
    tokens = (
        normed(rng.standard_normal(keys.shape)) * key_dim**-0.5,
        keys, rng.standard_normal((size, heads, value_dim)), log_decay, beta,
    )  # fmt: skip
    state = rng.standard_normal((heads, key_dim, value_dim)).astype(np.float32)
    return Inputs(*(jnp.asarray(each, jnp.float32) for each in tokens)), state


@jax.jit
def both_forms(state: jax.Array, tokens: Inputs) -> Any:
    return one_block(state, tokens), jax.lax.scan(one_token, state, tokens)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(given_=shapes_and_gates())
def test_a_block_gives_what_its_tokens_give_one_by_one(given_: tuple[Inputs, Floats]) -> None:
    tokens, state = given_
    (last, outs), (expected_last, expected) = both_forms(jnp.asarray(state), tokens)
    written = np.linalg.norm(state) + np.linalg.norm(tokens.v)
    for found, wanted in ((outs, expected), (last, expected_last)):
        assert np.linalg.norm(found - wanted) < BOUND * max(np.linalg.norm(wanted), 1e-3 * written)


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 6)), max_size=3))
def test_a_token_is_as_far_in_its_row_as_it_is_after_the_rows_first(
    rows: list[tuple[int, int]],
) -> None:
    """Padding is at 0, wherever rows begin."""
    parts = [Part(slot, *row) for slot, row in enumerate(rows)]
    step = step_of(parts, 20, ROWS, PADDING)
    expected = [index for part in parts for index in range(part.tokens)]
    padding = 20 - len(expected)
    assert step.offsets(SLOTS + 1).tolist() == expected + [0] * padding
    starts = [part.start for part in parts]
    assert step.rows.positions.tolist() == starts + [0] * (ROWS - len(parts))
