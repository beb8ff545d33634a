"""The convolution with one program for some tokens and channels, and the state's update with one
per row. Tokens do not depend on each other's results."""

from __future__ import annotations

from typing import Any

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.recurrent_state import RecurrentStep, Rows
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import sigmoid
from jaxserve_kernels.triton_call import triton_call

CHANNELS = 256
"""Channels of a program."""

_MANY, _TOKENS, _FEW_TOKENS, _WIDE = 512, 8, 4, 512
"""Of a step with prompts of at least _MANY tokens, a program has _TOKENS of them, else _FEW_TOKENS;
and _WIDE channels."""


@triton.jit
def _sum(x_ptr, at, mask, stride, parts: tl.constexpr, dtype: tl.constexpr):
    """The sum over the parts of the convolution's inputs, rounded to `dtype`; 0 where masked."""
    total = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        total += tl.load(x_ptr + part * stride + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype)


@triton.jit
def convolve_row(
    x_ptr, weight_ptr, length_ptr, slot_ptr, position_ptr, state_ptr, layer, out_ptr, row, block,
    slots, tokens, columns: tl.constexpr, parts: tl.constexpr, channels: tl.constexpr,
    KEPT: tl.constexpr, CHANNELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Convolves one block of channels of a row of one token, and updates the row's state."""
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    within = channel < channels
    slot = tl.load(slot_ptr + row).to(tl.int64)
    state = state_ptr + (layer * slots + slot) * (KEPT * channels) + channel
    real = within & (tl.load(length_ptr + row) > 0)
    goes_on = real & (tl.load(position_ptr + row) > 0)
    weights = weight_ptr + channel * (KEPT + 1)
    total = tl.zeros([CHANNELS], tl.float32)
    kept = ()
    for place in tl.static_range(KEPT):
        kept = kept + (tl.load(state + place * channels, mask=goes_on, other=0.0),)  # noqa: RUF005
        weight = tl.load(weights + place, mask=within, other=0.0).to(tl.float32)
        total += kept[place].to(tl.float32) * weight
    weight = tl.load(weights + KEPT, mask=within, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = _sum(x_ptr, row * columns + channel, within, tokens * columns, parts, dtype)
    total += x.to(tl.float32) * weight
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row * channels + channel, out.to(dtype), mask=within)
    for place in tl.static_range(1, KEPT):
        tl.store(state + (place - 1) * channels, kept[place], mask=real)
    tl.store(state + (KEPT - 1) * channels, x, mask=real)


@triton.jit
def _decode(
    x_ptr, weight_ptr, length_ptr, slot_ptr, position_ptr, state_ptr, layer, out_ptr,
    slots, tokens, columns: tl.constexpr, parts: tl.constexpr, channels: tl.constexpr,
    KEPT: tl.constexpr, CHANNELS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Convolves rows of one token each. The program that reads a row's state also updates it."""
    convolve_row(
        x_ptr, weight_ptr, length_ptr, slot_ptr, position_ptr, state_ptr, layer, out_ptr,
        tl.program_id(0).to(tl.int64), tl.program_id(1), slots, tokens, columns, parts, channels,
        KEPT, CHANNELS, EARLY,
    )  # fmt: skip


@triton.jit
def _convolve(
    x_ptr, weight_ptr, slot_ptr, position_ptr, offset_ptr, state_ptr, layer, out_ptr,
    slots, tokens, columns: tl.constexpr, parts: tl.constexpr, channels: tl.constexpr,
    KEPT: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Convolves some consecutive tokens, whose inputs it loads once. offset_ptr has each token's
    offset in its row."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    within = channel < channels
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    inputs = ()
    for place in tl.static_range(KEPT + TOKENS):
        token = first + place - KEPT
        there = within & (token >= 0) & (token < tokens)
        at = token * columns + channel
        inputs = inputs + (_sum(x_ptr, at, there, tokens * columns, parts, dtype),)  # noqa: RUF005
    weights = ()
    for place in tl.static_range(KEPT + 1):
        weight = tl.load(weight_ptr + channel * (KEPT + 1) + place, mask=within, other=0.0)
        weights = weights + (weight.to(tl.float32),)  # noqa: RUF005
    for place in tl.static_range(TOKENS):
        token = first + place
        total = inputs[place + KEPT].to(tl.float32) * weights[KEPT]
        before = tl.zeros([CHANNELS], tl.float32)
        for back in tl.static_range(1, KEPT + 1):
            before += inputs[place + KEPT - back].to(tl.float32) * weights[KEPT - back]
        offset = tl.load(offset_ptr + token, mask=token < tokens, other=KEPT)
        if offset < KEPT:
            before = _begin_of_row(
                slot_ptr, position_ptr, state_ptr, layer, slots, token, offset, channel, within,
                inputs[place : place + KEPT], weights, channels, KEPT,
            )  # fmt: skip
        total += before
        out = (total * sigmoid(total)).to(dtype)
        tl.store(out_ptr + token * channels + channel, out, mask=within & (token < tokens))


@triton.jit
def _begin_of_row(
    slot_ptr, position_ptr, state_ptr, layer, slots, token, offset, channel, within, inputs,
    weights, channels: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What the KEPT inputs before the token at `offset` of its row add, of which some are in the
    state."""
    slot = tl.load(slot_ptr + token).to(tl.int64)
    goes_on = within & (tl.load(position_ptr + token) > offset)
    state = state_ptr + (layer * slots + slot) * (KEPT * channels) + channel
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(1, KEPT + 1):
        kept = state + (KEPT - back + offset) * channels
        kept = tl.load(kept, mask=goes_on & (offset < back), other=0.0).to(tl.float32)
        own = tl.where(offset >= back, inputs[KEPT - back].to(tl.float32), kept)
        total += own * weights[KEPT - back]
    return total


@triton.jit
def _keep(
    x_ptr, first_ptr, length_ptr, slot_ptr, position_ptr, state_ptr, layer,
    slots, tokens, columns: tl.constexpr, parts: tl.constexpr, channels: tl.constexpr,
    KEPT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Stores the last inputs of a row as its slot's state. A short row keeps some older inputs."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    length = tl.load(length_ptr + row)
    real = (channel < channels) & (length > 0)
    goes_on = real & (tl.load(position_ptr + row) > 0)
    last = tl.load(first_ptr + row).to(tl.int64) + length - KEPT
    slot = tl.load(slot_ptr + row).to(tl.int64)
    state = state_ptr + (layer * slots + slot) * (KEPT * channels) + channel
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    # In this order no entry is read after it is written.
    for place in tl.static_range(KEPT):
        of_row = length >= KEPT - place
        at = (last + place) * columns + channel
        new = _sum(x_ptr, at, real & of_row, tokens * columns, parts, dtype)
        source = tl.where(of_row, 0, length + place)
        old = tl.load(state + source * channels, mask=goes_on & (length < KEPT - place), other=0.0)
        tl.store(state + place * channels, new + old, mask=real)


def causal_conv(
    projected: Array, weight: Array, state: Array, layer: int, step: RecurrentStep, *,
    target: Target,
) -> tuple[Array, Array]:  # fmt: skip
    """See `reference.causal_conv`. Results of padding tokens are undefined."""
    rows = step.rows
    if rows.blocked is not None:
        place = jax.new_ref(state)
        out = _outputs(projected, weight, place, layer, step, target=target)
        _kept(projected, place, layer, rows.with_kept(), target=target)
        return out, jax.freeze(place)
    tokens, channels, place = projected.shape[1], weight.shape[0], jax.new_ref(state)
    out = triton_call(
        projected, weight, rows.length, rows.slots, rows.positions, place, layer,
        kernel=_decode,
        name="causal_conv",
        out_type=jax.ShapeDtypeStruct((tokens, channels), state.dtype),
        grid=(tokens, triton.cdiv(channels, CHANNELS)),
        **sizes(projected, state, target),
    )  # fmt: skip
    return out, jax.freeze(place)


def convolve(
    projected: Array, weight: Array, state: Array, layer: int, step: RecurrentStep, *,
    target: Target,
) -> Array:  # fmt: skip
    """See `reference.convolve`. Results of padding tokens are undefined."""
    return _outputs(projected, weight, state, layer, step, target=target)


def keep_inputs(x: Array, state: Array, layer: int, rows: Rows, *, target: Target) -> Array:
    """See `reference.keep_inputs`."""
    place = jax.new_ref(state)
    _kept(x[None], place, layer, rows, target=target)
    return jax.freeze(place)


def sizes(projected: Array, state: Array | jax.Ref, target: Target) -> dict[str, Any]:
    """Launch constants of all kernels of the convolution."""
    parts, tokens, columns = projected.shape
    return {
        "slots": state.shape[1], "tokens": tokens, "columns": columns, "parts": parts,
        "channels": state.shape[3], "KEPT": state.shape[2], "CHANNELS": CHANNELS, "num_warps": 4,
        "target": target,
    }  # fmt: skip


def _outputs(
    projected: Array, weight: Array, state: Array | jax.Ref, layer: int, step: RecurrentStep, *,
    target: Target,
) -> Array:  # fmt: skip
    tokens, channels = projected.shape[1], weight.shape[0]
    each = _TOKENS if tokens >= _MANY else _FEW_TOKENS
    return triton_call(
        projected, weight, step.slots, step.positions, step.offsets(state.shape[1]), state, layer,
        kernel=_convolve,
        name="causal_conv",
        out_type=jax.ShapeDtypeStruct((tokens, channels), state.dtype),
        grid=(triton.cdiv(tokens, each), triton.cdiv(channels, _WIDE)),
        TOKENS=each,
        **{**sizes(projected, state, target), "CHANNELS": _WIDE},
    )  # fmt: skip


def _kept(projected: Array, state: jax.Ref, layer: int, rows: Rows, *, target: Target) -> None:
    triton_call(
        projected, *rows[:4], state, layer,
        kernel=_keep,
        name="causal_conv_state",
        out_type=(),
        grid=(rows.first.shape[0], triton.cdiv(state.shape[3], CHANNELS)),
        **sizes(projected, state, target),
    )  # fmt: skip
