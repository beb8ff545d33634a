"""The kernels of recurrent layers against their definition: on the emulator and on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve_kernels import pdl
from jaxserve_kernels.causal_conv import (
    Operands,
    causal_conv,
    conv_and_gates,
    convolve,
    keep_inputs,
)
from jaxserve_kernels.dense_matmul.reference import sum_parts
from jaxserve_kernels.gated_delta_rule import (
    Heads,
    RuleConfig,
    RuleTokens,
    RuleWeights,
    advance_state,
    gated_delta_rule,
    rule_outputs,
)
from jaxserve_kernels.op import Choice
from jaxserve_kernels.recurrent_state import RecurrentStep, Rows
from jaxserve_kernels.target import REFERENCE, Target
from tests.emulated.errors import relative_error
from tests.kernels.recurrent_steps import Part, step_of

LAYERS, LAYER, SLOTS, PADDING = 2, 1, 5, 3
"""The last slot holds a snapshot."""
WIDTH = 4

type Run = Callable[..., Any]
"""(..., target) -> output, state"""


class Bounds(NamedTuple):
    """Of errors, relative to the norm."""

    out: float
    state: float


class Mix(NamedTuple):
    """Rows of a step, and the tokens of each slot's prompt; None: a step of decode rows."""

    parts: list[Part]
    tokens: int
    prompts: tuple[int, ...] | None = None

    def step(self, block: int) -> RecurrentStep:
        rows = self.tokens if self.prompts is None else 4
        made = step_of(self.parts, self.tokens, rows, PADDING, self.prompts, block)
        if self.prompts is None:
            return RecurrentStep.of_decode(made.slots, made.positions, PADDING)
        return made

    @property
    def used(self) -> int:
        return sum(part.tokens for part in self.parts)


def decode_rows(*positions: int) -> Mix:
    """A row at each position in a slot of its own, from slot 1 on, and one of padding."""
    slots = (1, 2, 0)
    parts = [Part(slot, start, 1) for slot, start in zip(slots, positions, strict=False)]
    return Mix(parts, len(parts) + 1)


def at_once(run: Run, *args: Any, target: Target) -> Any:
    return run(*args, target=target)


def in_a_program(run: Run, *args: Any, target: Target) -> Any:
    return jax.jit(functools.partial(run, target=target))(*args)


def in_a_chain(run: Run, *args: Any, target: Target) -> Any:
    """Kernels that start before the one before them has ended, where the card has that."""
    return jax.jit(lambda *args: pdl.call(run, *args, target=target))(*args)


def check_rule(
    mix: Mix, config: RuleConfig, dtype: str, launch: Run, target: Target, bounds: Bounds
) -> set[str]:
    """The rule and the norm of its output: what a step gives, and the state it leaves. Returns the
    names of the implementations."""

    def run(*args: Any, target: Target) -> Any:
        *before, step = args
        return gated_delta_rule(*before, LAYER, step, config=config, target=target)

    tokens, weights, state = rule_arrays(config.heads, mix.tokens, dtype)
    if mix.prompts is not None:  # padding may be anything
        tokens = tokens._replace(qkv=tokens.qkv.at[mix.used :].set(jnp.nan))
    args = (tokens, weights, state, mix.step(config.block))
    return _check(run, args, state, mix, launch, target, bounds)


def check_conv(
    mix: Mix, channels: int, dtype: str, launch: Run, target: Target, bounds: Bounds
) -> None:
    """The convolution: what a step gives, and the inputs it keeps."""

    def run(*args: Any, target: Target) -> Any:
        *before, step = args
        return causal_conv(*before, LAYER, step, target=target)

    rng = np.random.default_rng(mix.tokens)
    projected = jnp.asarray(rng.standard_normal((3, mix.tokens, channels + 20)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((channels, WIDTH)), dtype)
    state = rng.standard_normal((LAYERS, SLOTS, WIDTH - 1, channels)).astype(np.float32)
    state[:, 2] = np.nan  # what an earlier sequence left
    before = jnp.asarray(state, dtype)
    _check(run, (projected, weight, before, mix.step(1)), before, mix, launch, target, bounds)


def check_conv_and_gates(
    mix: Mix, embed: int, rows: int, channels: int, launch: Run, target: Target, bounds: Bounds
) -> None:
    """The convolution and the gates: both results side by side, and the inputs it keeps."""

    def separate(*args: Any, target: Target) -> Any:
        return conv_and_gates(Operands(*args), LAYER, target=target)

    def beside(mixed: Any, gates: Any, kept: Any) -> Any:
        return jnp.concatenate([mixed.astype(jnp.float32), gates.sum(0)], axis=1), kept

    def run(*args: Any, target: Target) -> Any:
        return beside(*separate(*args, target=target))

    def launch_apart(_: Run, *args: Any, target: Target) -> Any:
        return beside(*launch(separate, *args, target=target))  # a chain has no kernels of XLA

    rng = np.random.default_rng(mix.tokens)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    x, gates = array(mix.tokens, embed), array(rows, embed) / embed**0.5
    projected = array(3, mix.tokens, channels + 20, dtype=jnp.float32)
    before = array(LAYERS, SLOTS, WIDTH - 1, channels).at[:, 2].set(jnp.nan)
    args = (x, projected, gates, array(channels, WIDTH), before, mix.step(1))
    _check(run, args, before, mix, launch_apart, target, bounds)


def check_drafts(
    config: RuleConfig, dtype: str, launch: Run, target: Target, bounds: Bounds
) -> None:
    """What rows of several positions give, which leave the state alone; then the state with some
    positions of each row: all, one, none, or fewer than the convolution sees."""
    lengths, held, begin = np.array([7, 0, 6]), np.array([1, PADDING, 0]), np.array([40, 0, 2])
    used = (np.arange(8) < lengths[:, None]).reshape(-1)
    slots = np.where(used, np.repeat(held, 8), PADDING)
    positions = np.where(used, np.repeat(begin, 8) + np.tile(np.arange(8), 3), 0)
    rows = Rows(*(jnp.asarray(each, jnp.int32) for each in ([0, 8, 16], lengths, held, begin)))
    step = RecurrentStep(jnp.asarray(slots, jnp.int32), jnp.asarray(positions, jnp.int32), rows)
    tokens, weights, delta = rule_arrays(config.heads, 24, dtype)
    rng = np.random.default_rng(1)
    conv = jnp.asarray(rng.standard_normal((LAYERS, SLOTS, WIDTH - 1, tokens.qkv.shape[1])), dtype)
    weight = jnp.asarray(rng.standard_normal((tokens.qkv.shape[1], WIDTH)), dtype)

    def outputs(*args: Any, target: Target) -> Any:
        tokens, weights, delta, conv, step = args
        mixed = convolve(tokens.projected, weight, conv, LAYER, step, target=target)
        rest = (weights, delta, LAYER, step)
        return mixed, rule_outputs(tokens, *rest, config=config, target=target)

    def states(*args: Any, target: Target) -> Any:
        tokens, weights, delta, conv, accepted = args
        kept, gates = step.cut(accepted, PADDING), sum_parts(tokens.gates, tokens.qkv.dtype)
        rest = (weights, delta, LAYER, kept)
        new = advance_state(tokens.qkv, gates, *rest, config=config, target=target)
        return new, keep_inputs(tokens.qkv, conv, LAYER, kept.rows, target=target)

    args = (tokens, weights, delta, conv)
    pairs = zip(
        launch(outputs, *args, step, target=target),
        outputs(*args, step, target=REFERENCE),
        strict=True,
    )
    for found, expected in pairs:
        assert relative_error(found[used], expected[used]) <= bounds.out
    for accepted in ([7, 0, 1], [0, 0, 2], [4, 0, 6]):
        own = (*args, jnp.asarray(accepted, jnp.int32))
        found = launch(states, *own, target=target)
        for new, wanted, old in zip(found, states(*own, target=REFERENCE), args[2:], strict=True):
            for slot, count in zip((1, 0), accepted[::2], strict=True):
                assert relative_error(new[LAYER, slot], wanted[LAYER, slot]) <= bounds.state
                assert count or bool((new[LAYER, slot] == old[LAYER, slot]).all())
            before, after = (np.asarray(each, np.float32) for each in (old, new))
            np.testing.assert_array_equal(after[0], before[0])
            np.testing.assert_array_equal(after[LAYER, [2, 4]], before[LAYER, [2, 4]])


def _check(
    run: Run, args: Any, state: Any, mix: Mix, launch: Run, target: Target, bounds: Bounds
) -> set[str]:
    """Kernels give the definition's output and state, and leave all other state alone. Returns the
    names of their implementations."""
    choices: list[Choice] = []
    out, new = launch(run, *args, target=target.replace(observe=choices.append))
    names = {each.implementation.name for each in choices}
    assert names and names <= {"triton", "hopper_blocks"}
    expected, wanted = run(*args, target=REFERENCE)
    assert bool(jnp.isfinite(expected[: mix.used]).all()), "a row reads a slot without numbers"
    assert relative_error(out[: mix.used], expected[: mix.used]) <= bounds.out
    touched = [part.slot for part in mix.parts] + [part.kept_in for part in mix.parts if part.kept]
    for slot in touched:
        assert relative_error(new[LAYER, slot], wanted[LAYER, slot]) <= bounds.state
    others = [slot for slot in range(SLOTS) if slot not in (*touched, PADDING)]
    before, after = (np.asarray(each, np.float32) for each in (state, new))
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[LAYER, others], before[LAYER, others])
    return names


def rule_arrays(heads: Heads, tokens: int, dtype: str) -> tuple[RuleTokens, RuleWeights, Any]:
    """What a layer's products give for so many tokens, its weights, and state in all slots."""
    rng = np.random.default_rng(tokens)
    state = rng.standard_normal((LAYERS, SLOTS, *heads[1:])).astype(np.float32)
    state[:, 2] = np.nan  # what an earlier sequence left
    width = 2 * heads.keys + heads.values
    parts = rng.standard_normal((3, tokens, 2 * heads.value_heads))
    given = RuleTokens(
        qkv=jnp.asarray(rng.standard_normal((tokens, width)), dtype),
        gates=jnp.asarray(2 * parts, jnp.float32),
        projected=jnp.asarray(rng.standard_normal((2, tokens, width + heads.values)), jnp.float32),
    )
    weights = RuleWeights(
        jnp.asarray(np.log(rng.uniform(0.01, 4, heads.value_heads)), jnp.float32),
        jnp.asarray(1 + 0.3 * rng.standard_normal(heads.value_heads), jnp.float32),
        jnp.asarray(rng.standard_normal(heads.value_dim), dtype),
    )
    return given, weights, jnp.asarray(state)
