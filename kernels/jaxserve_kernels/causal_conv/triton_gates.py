"""The convolution of decode rows, and the product of the gates beside it, as one kernel of a launch
chain (PDL).

Neither needs the other's result, and the delta rule needs both. Programs of the product come first:
they load their part of the weight before they wait for the tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.causal_conv.gates_config import DEPTH, ROWS, Config, Operands
from jaxserve_kernels.causal_conv.triton import CHANNELS, convolve_row, sizes
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_TOKENS = 16
"""Tokens of a program of the product: the rows of a tensor core's smallest tile."""


@triton.jit
def _multiply(
    x_ptr, w_ptr, out_ptr, program, tokens: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight times some tokens, over one of SPLITS parts of the inputs."""
    tiles: tl.constexpr = (n + ROWS - 1) // ROWS
    split = program // tiles % SPLITS
    row = program % tiles * ROWS + tl.arange(0, ROWS)
    token = program // (tiles * SPLITS) * TOKENS + tl.arange(0, TOKENS)
    depth = split * (STEPS * DEPTH) + tl.arange(0, DEPTH)
    w = ()
    for step in tl.static_range(STEPS):
        at = row[None, :] * k + step * DEPTH + depth[:, None]
        w = w + (tl.load(w_ptr + at, mask=(row < n)[None, :], other=0.0),)  # noqa: RUF005
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = ()
    for step in tl.static_range(STEPS):
        at = token[:, None] * k + step * DEPTH + depth[None, :]
        x = x + (tl.load(x_ptr + at, mask=(token < tokens)[:, None], other=0.0),)  # noqa: RUF005
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for step in tl.static_range(STEPS):
        total = tl.dot(x[step], w[step], total)
    at = (split * tokens + token)[:, None] * n + row[None, :]
    tl.store(out_ptr + at, total, mask=(token < tokens)[:, None] & (row < n)[None, :])


@triton.jit
def _conv_and_gates(
    projected_ptr, weight_ptr, length_ptr, slot_ptr, position_ptr, x_ptr, w_ptr, state_ptr, layer,
    out_ptr, gates_ptr,
    slots, tokens: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr,
    channels: tl.constexpr, KEPT: tl.constexpr, CHANNELS: tl.constexpr,
    n: tl.constexpr, k: tl.constexpr, PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """PROGRAMS: programs of the product."""
    program = tl.program_id(0)
    if program < PROGRAMS:
        _multiply(
            x_ptr, w_ptr, gates_ptr, program, tokens, n, k, ROWS, TOKENS, DEPTH, STEPS, SPLITS,
            EARLY,
        )  # fmt: skip
    else:
        blocks: tl.constexpr = (channels + CHANNELS - 1) // CHANNELS
        convolve_row(
            projected_ptr, weight_ptr, length_ptr, slot_ptr, position_ptr, state_ptr, layer,
            out_ptr, ((program - PROGRAMS) // blocks).to(tl.int64), (program - PROGRAMS) % blocks,
            slots, tokens, columns, parts, channels, KEPT, CHANNELS, EARLY,
        )  # fmt: skip


def conv_and_gates(
    config: Config, operands: Operands, layer: int, *, target: Target
) -> tuple[Array, Array, Array]:
    """See `gates.conv_and_gates`. Results of padding tokens are undefined."""
    x, projected, gates, weight, state, step = operands
    rows, place = step.rows, jax.new_ref(state)
    (tokens, k), n, channels = x.shape, gates.shape[0], weight.shape[0]
    programs = triton.cdiv(n, ROWS) * config.splits * triton.cdiv(tokens, _TOKENS)
    mixed, scores = triton_call(
        projected, weight, rows.length, rows.slots, rows.positions, x, gates, place, layer,
        kernel=_conv_and_gates,
        name="conv_and_gates",
        out_type=(
            jax.ShapeDtypeStruct((tokens, channels), state.dtype),
            jax.ShapeDtypeStruct((config.splits, tokens, n), jnp.float32),
        ),
        grid=(programs + tokens * triton.cdiv(channels, CHANNELS),),
        n=n, k=k, PROGRAMS=programs, ROWS=ROWS, TOKENS=_TOKENS, DEPTH=DEPTH,
        STEPS=config.steps, SPLITS=config.splits,
        **sizes(projected, state, target),
    )  # fmt: skip
    return mixed, scores, jax.freeze(place)
