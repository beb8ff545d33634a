"""The kernels of the gated delta rule on the emulator against its definition."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.causal_conv.gates_config import Operands, choose
from jaxserve_kernels.gated_delta_rule import (
    Heads,
    RuleConfig,
    gated_delta_rule,
    hopper_blocks,
    triton,
)
from jaxserve_kernels.op import Refusal
from tests.emulator.targets import HOPPER, PDL
from tests.kernels.recurrent_cases import (
    SLOTS,
    Bounds,
    Mix,
    at_once,
    check_conv,
    check_conv_and_gates,
    check_drafts,
    check_rule,
    decode_rows,
    rule_arrays,
)
from tests.kernels.recurrent_steps import Part

HEADS = Heads(key_heads=2, value_heads=6, key_dim=16, value_dim=64)
CONFIG = RuleConfig(heads=HEADS, block=16, eps=1e-6)
CHANNELS = 72
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@DTYPES
def test_decode_rows_with_the_norm_of_the_output(dtype: str) -> None:
    bounds = Bounds(1e-6, 1e-6) if dtype == "float32" else Bounds(2e-3, 1e-6)
    check_rule(decode_rows(40, 0), CONFIG, dtype, at_once, PDL, bounds)


def test_rows_of_padding_are_alike() -> None:
    """Whatever is in memory. Else a router would choose experts for each of them."""
    mix = decode_rows(40, 0)
    tokens, weights, state = rule_arrays(HEADS, mix.tokens, "bfloat16")
    tokens = tokens._replace(qkv=tokens.qkv.at[mix.used :].set(jnp.nan))
    args = tokens, weights, state, 0, mix.step(CONFIG.block)
    out, _ = gated_delta_rule(*args, config=CONFIG, target=PDL)
    assert np.all(np.asarray(out[mix.used :], np.float32) == 0.0)


def test_decode_rows_of_so_many_heads_that_programs_have_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "_MANY_HEADS", 1)
    check_rule(decode_rows(40, 0), CONFIG, "float32", at_once, PDL, Bounds(1e-6, 1e-6))


@DTYPES
def test_rows_of_blocks_and_of_single_tokens(dtype: str) -> None:
    """A block, two and a short one with a rest, and a decode; prompts that end inside of the rows
    and before. What follows a short block are not numbers."""
    mix = Mix([Part(1, 4800, 16), Part(2, 0, 37), Part(0, 7, 1)], 64, (4, 4816, 35, 0, 0))
    blocked = mix.step(CONFIG.block).rows.blocked
    assert blocked is not None and blocked.tolist() == [16, 35, 0, 0]
    bounds = Bounds(2e-6, 1e-6) if dtype == "float32" else Bounds(4e-3, 2e-5)
    check_rule(mix, CONFIG, dtype, at_once, HOPPER, bounds)


@DTYPES
def test_a_state_within_a_row_is_stored_too(dtype: str) -> None:
    """After a block of two and a rest; and of the convolution, whose last inputs it needs. The
    first row has no block."""
    mix = Mix([Part(1, 32, 5), Part(2, 0, 37, 16, kept_in=4)], 64, (4, 36, 37, 0, 0))
    bounds = Bounds(2e-6, 1e-6) if dtype == "float32" else Bounds(4e-3, 2e-5)
    check_rule(mix, CONFIG, dtype, at_once, HOPPER, bounds)
    check_conv(mix, CHANNELS, dtype, at_once, HOPPER, Bounds(2e-3, 0))


@pytest.mark.parametrize("blocks", [1, 2])
def test_hopper_stores_a_state_within_a_row(blocks: int) -> None:
    """Of the blocks before the last one, and of all, which is the row's last state, too."""
    heads = Heads(key_heads=1, value_heads=2, key_dim=64, value_dim=64)
    config = RuleConfig(heads=heads, block=64, eps=1e-6)
    mix = Mix([Part(1, 6400, 128, 64 * blocks, kept_in=4)], 192, (0, 6528, 0, 0, 0))
    names = check_rule(mix, config, "bfloat16", at_once, HOPPER, Bounds(4e-3, 2e-5))
    assert names == {"hopper_blocks"}


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (64, 64)])
def test_hopper_carries_the_state(key_dim: int, value_dim: int) -> None:
    """With the models' heads and others: a row that goes on, one of two blocks and a short one, and
    one of a short one."""
    heads = Heads(key_heads=1, value_heads=2, key_dim=key_dim, value_dim=value_dim)
    config = RuleConfig(heads=heads, block=64, eps=1e-6)
    assert hopper_blocks.fits(heads, config.block, jnp.bfloat16)
    parts = [Part(1, 6400, 64), Part(2, 0, 130), Part(0, 64, 3)]
    mix = Mix(parts, 256, (67, 6464, 130, 0, 0))
    names = check_rule(mix, config, "bfloat16", at_once, HOPPER, Bounds(4e-3, 2e-5))
    assert names == {"hopper_blocks"}


def test_a_step_of_fewer_tokens_than_a_block() -> None:
    """The last token of a prompt, alone in its block, and a prompt."""
    mix = Mix([Part(1, 64, 1), Part(2, 0, 9)], 12, (0, 65, 9, 0, 0))
    blocked = mix.step(CONFIG.block).rows.blocked
    assert blocked is not None and blocked.tolist() == [0, 9, 0, 0]
    check_rule(mix, CONFIG, "float32", at_once, HOPPER, Bounds(1e-6, 1e-6))


@DTYPES
def test_what_is_rejected_leaves_no_trace(dtype: str) -> None:
    bounds = Bounds(2e-6, 1e-6) if dtype == "float32" else Bounds(4e-3, 1e-6)
    check_drafts(CONFIG, dtype, at_once, HOPPER, bounds)


@pytest.mark.parametrize("decode", [False, True])
@DTYPES
def test_the_convolution(dtype: str, decode: bool) -> None:
    """Rows of one token, of fewer than the convolution sees, and of more than a program has."""
    parts = [Part(1, 7, 1), Part(2, 0, 2), Part(0, 3, 37)]
    mix = decode_rows(40, 0, 2) if decode else Mix(parts, 42, (0,) * SLOTS)
    bounds = Bounds(1e-6 if dtype == "float32" else 2e-3, 0)
    check_conv(mix, CHANNELS, dtype, at_once, PDL if decode else HOPPER, bounds)


def test_the_convolution_of_padding_beside_a_row_far_into_its_prompt() -> None:
    """The emulator finds reads outside of the state."""
    mix = Mix([Part(1, 700, 5)], 12, (0,) * SLOTS)
    check_conv(mix, CHANNELS, "float32", at_once, HOPPER, Bounds(1e-6, 0))


@pytest.mark.parametrize(("embed", "rows"), [(384, 12), (1280, 96)])
@pytest.mark.parametrize("tokens", [2, 20])
def test_the_convolution_and_the_gates(embed: int, rows: int, tokens: int) -> None:
    """Less than a tile of gates and more; steps that one program does, and several; more tokens
    than a program has."""
    rows_of_step = decode_rows(40, 0)
    mix = Mix(rows_of_step.parts, tokens)
    check_conv_and_gates(mix, embed, rows, CHANNELS, at_once, PDL, Bounds(2e-3, 0))


def test_the_gates_of_prompts_are_a_product_of_their_own() -> None:
    step = Mix([Part(1, 0, 16)], 16, (0, 16, 0, 0, 0)).step(16)
    x, gates = jnp.zeros((16, 384), jnp.bfloat16), jnp.zeros((12, 384), jnp.bfloat16)
    rest: Any = None
    operands = Operands(x, rest, gates, rest, rest, step)
    assert choose(operands, target=PDL) == Refusal("not rows of one token each")
