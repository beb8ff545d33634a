"""The rule token by token, and the norm of the output.

There is one program per row, value head and block of state columns. It keeps the state in registers
from the row's first token to its last, so the state is read and written once.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import triton
import triton.language as tl
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.dense_matmul.reference import sum_parts
from jaxserve_kernels.gated_delta_rule import triton_blocks
from jaxserve_kernels.gated_delta_rule.reference import (
    RuleConfig,
    RuleTokens,
    RuleWeights,
)
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.triton_loads import added, all_loaded

_COLUMNS, _MANY_COLUMNS, _MANY_HEADS = 32, 64, 768
"""State columns of a program. Columns do not depend on each other. With 128 state rows, 32 columns
are 32 registers for each thread of 4 warps.

A decode step with at least _MANY_HEADS rows times heads uses _MANY_COLUMNS: a layer was 2.5 %
faster with 64 rows of 48 heads, and 1 % slower with 8 rows."""

_WARPS = 4


@gluon.jit
def _load(
    token, tokens, qkv_ptr, gates_ptr, head, column,
    parts: gl.constexpr, key_heads: gl.constexpr, value_heads: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A token's q and k [2, KEY], its v, and the parts of its two gates. Each warp loads all of
    them, so that it needs no other warp's sums."""
    both: gl.constexpr = gl.BlockedLayout([1, KEY // 16], [2, 16], [WARPS, 1], [1, 0])
    width: gl.constexpr = 2 * key_heads * KEY + value_heads * VALUE
    source = qkv_ptr + token * width
    of_key = (head // (value_heads // key_heads)) * KEY
    of_key += gl.arange(0, KEY, gl.SliceLayout(0, both))[None, :]
    of_key += gl.arange(0, 2, gl.SliceLayout(1, both))[:, None] * (key_heads * KEY)
    qk = gl.load(source + of_key)
    v = gl.load(source + 2 * key_heads * KEY + head * VALUE + column, volatile=True)
    part = gl.arange(0, PARTS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gates = gates_ptr + (part * tokens + token) * (2 * value_heads) + head
    a = gl.load(gates, mask=part < parts, other=0.0)
    b = gl.load(gates + value_heads, mask=part < parts, other=0.0)
    return qk, v, a, b


@gluon.jit
def _advance(state, loaded, out_ptr, decay, bias, scale: gl.constexpr):
    """Returns the state after the token of `_load`. Stores the token's output unless `out_ptr` is
    None."""
    qk, v, a, b = loaded
    dtype: gl.constexpr = qk.dtype
    rows: gl.constexpr = gl.SliceLayout(1, state.type.layout)
    wide = qk.to(gl.float32)
    wide *= gl.rsqrt(gl.sum(wide * wide, axis=1) + 1e-6)[:, None]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    memory = gl.allocate_shared_memory(gl.float32, wide.shape, plain)
    memory.store(wide)
    vectors = memory.reinterpret(gl.float32, wide.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q = vectors.index(0).load(rows)[:, None] * scale
    k = vectors.index(1).load(rows)[:, None]
    a = gl.sum(a.to(gl.float32), axis=0).to(dtype).to(gl.float32) + bias
    b = gl.sum(b.to(gl.float32), axis=0).to(dtype).to(gl.float32)
    # log(1 + exp(a)) without overflow
    softplus = gl.maximum(a, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(a)))
    state *= gl.exp(decay * softplus)
    found = gl.sum(state * k, axis=0)
    write = (v.to(gl.float32) - found) / (1.0 + gl.exp(-b))
    state += k * write[None, :]
    if out_ptr is not None:
        gl.store(out_ptr, gl.sum(state * q, axis=0).to(dtype))
    return state


@gluon.jit
def _rule_kernel(
    qkv_ptr, gates_ptr, a_log_ptr, bias_ptr,
    first_ptr, length_ptr, slot_ptr, position_ptr, blocked_ptr, state_ptr, layer, out_ptr,
    slots, tokens, parts: gl.constexpr,
    key_heads: gl.constexpr, value_heads: gl.constexpr, scale: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr,
    WARPS: gl.constexpr, WRITES: gl.constexpr, SINGLE: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    """Runs the rule over one row. Without `out_ptr` it updates the state only; without WRITES it
    computes the output only. SINGLE: each row is one token.

    Adjacent programs share a head's state, so that whole rows of it are read and written together.
    """
    across: gl.constexpr = COLUMNS // 4  # threads beside each other
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // across, across], [WARPS, 1], [1, 0])
    blocks: gl.constexpr = VALUE // COLUMNS
    row = gl.program_id(1).to(gl.int64)
    head = gl.program_id(0) // blocks
    key = gl.arange(0, KEY, gl.SliceLayout(1, layout))
    column = gl.program_id(0) % blocks * COLUMNS
    column += gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    begin = 0
    if blocked_ptr is not None:
        begin = gl.load(blocked_ptr + row)
    length = gl.load(length_ptr + row)
    slot = gl.load(slot_ptr + row).to(gl.int64)
    goes_on = (gl.load(position_ptr + row) + begin > 0) & (length > begin)
    place = ((layer * slots + slot) * value_heads + head) * (KEY * VALUE)
    tile = state_ptr + place + key[:, None] * VALUE + column[None, :]
    inside = (key[:, None] >= 0) & (column[None, :] >= 0)
    # No kernel before this one in the step writes this layer's state.
    state = gl.load(tile, mask=inside & goes_on, other=0.0)
    decay = -gl.exp(gl.load(a_log_ptr + head))
    bias = gl.load(bias_ptr + head)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if SINGLE:
        loaded = _load(
            row, tokens, qkv_ptr, gates_ptr, head, column,
            parts, key_heads, value_heads, KEY, VALUE, PARTS, WARPS,
        )  # fmt: skip
        out = out_ptr + (row * value_heads + head) * VALUE + column
        if length > begin:  # v is loaded before this branch: see `triton_loads`
            state = _advance(state, loaded, out, decay, bias, scale)
            gl.store(tile, state, mask=inside)
        else:  # rows of padding are alike, so that a router chooses the same experts for all
            gl.store(out, (column * 0).to(out_ptr.dtype.element_ty))
    else:
        first = gl.load(first_ptr + row).to(gl.int64)
        for token in range(first + begin, first + length):
            loaded = _load(
                token, tokens, qkv_ptr, gates_ptr, head, column,
                parts, key_heads, value_heads, KEY, VALUE, PARTS, WARPS,
            )  # fmt: skip
            out = out_ptr
            if out_ptr is not None:
                out = out_ptr + (token * value_heads + head) * VALUE + column
            state = _advance(state, loaded, out, decay, bias, scale)
        if WRITES:
            gl.store(tile, state, mask=inside & (length > begin))


@triton.jit
def _norm(
    x_ptr, z_ptr, weight_ptr, out_ptr,
    columns: tl.constexpr, parts: tl.constexpr, heads: tl.constexpr, eps: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM)
    at = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None] * DIM + dim[None, :]
    weight = tl.load(weight_ptr + dim).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * (heads * DIM) + at, volatile=True)
    found = ()
    for part in tl.static_range(parts):
        own = z_ptr + (part * tl.num_programs(0) + token + 1) * columns - heads * DIM + at
        found = found + (tl.load(own, volatile=True),)  # noqa: RUF005
    if all_loaded():
        z = added(found, dtype).to(tl.float32)
        wide = x.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
        wide = (wide.to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)
        tl.store(out_ptr + token * (heads * DIM) + at, (wide * z / (1.0 + tl.exp(-z))).to(dtype))


def fits(config: RuleConfig) -> bool:
    """Whether the kernels support these heads and blocks."""
    dims = (config.heads.key_dim, config.heads.value_dim, config.block)
    return config.block <= 64 and all(dim >= 16 and dim & (dim - 1) == 0 for dim in dims)


def rule_and_norm(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
    hopper: bool = False,
    target: Target,
) -> tuple[Array, Array]:
    """See `reference.rule_and_norm`. Results of padding tokens are undefined. If no row has blocks,
    each row must be one token, as in `causal_conv`. hopper: blocks have `hopper_blocks`."""
    place, out = jax.new_ref(state), None
    shared = (weights, place, layer, step)
    if step.rows.blocked is not None:
        tokens = tokens._replace(gates=sum_parts(tokens.gates, tokens.qkv.dtype)[None])
        blocks = {"config": config, "hopper": hopper, "target": target}
        out = triton_blocks.in_blocks(tokens, *shared, **blocks)
    out = _one_by_one(tokens, *shared, out, config=config, target=target)
    return _normed(out, tokens, weights, config=config, target=target), jax.freeze(place)


def rule_outputs(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
    target: Target,
) -> Array:
    """See `reference.rule_outputs`. Results of padding tokens are undefined."""
    out = _one_by_one(tokens, weights, state, layer, step, None, config=config, target=target)
    return _normed(out, tokens, weights, config=config, target=target)


def advance_state(
    qkv: Array,
    gates: Array,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
    target: Target,
) -> Array:
    """See `reference.advance_state`."""
    place = jax.new_ref(state)
    arrays = (qkv, gates[None], weights, *step.rows[:5], place, layer, None)
    _rule(*arrays, config=config, target=target, out_type=())
    return jax.freeze(place)


def _one_by_one(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array | jax.Ref,
    layer: int,
    step: RecurrentStep,
    out: Array | None,
    *,
    config: RuleConfig,
    target: Target,
) -> Array:
    """Computes the tokens that are in no block: o [tokens, value_heads, value_dim]. `out` holds the
    outputs of the tokens in blocks, if there are any. The state is updated only if it is a Ref."""
    heads, results = config.heads, None if out is None else jax.new_ref(out)
    shape = (tokens.qkv.shape[0], heads.value_heads, heads.value_dim)
    made = _rule(
        tokens.qkv, tokens.gates, weights, *step.rows[:5], state, layer,
        *(() if results is None else (results,)),
        config=config,
        target=target,
        out_type=jax.ShapeDtypeStruct(shape, tokens.qkv.dtype) if results is None else (),
    )  # fmt: skip
    return made if results is None else jax.freeze(results)


def _rule(
    qkv: Array, gates: Array, weights: RuleWeights, first: Array, length: Array, slots: Array,
    positions: Array, blocked: Array | None, state: Array | jax.Ref, layer: int, *out: Any,
    config: RuleConfig, target: Target, out_type: Any,
) -> Any:  # fmt: skip
    """Calls the kernel for rows. The state is updated only if it is a Ref."""
    heads, rows = config.heads, first.shape[0]
    writes = isinstance(state, jax.Ref)
    single = blocked is None and writes and bool(out_type)
    many = single and rows * heads.value_heads >= _MANY_HEADS
    columns = min(_MANY_COLUMNS if many else _COLUMNS, heads.value_dim)
    return triton_call(
        qkv, gates, weights.a_log, weights.dt_bias,
        first, length, slots, positions, blocked, state, layer, *out,
        kernel=_rule_kernel,
        name="gated_delta_rule",
        target=target,
        out_type=out_type,
        grid=(heads.values // columns, rows),
        num_warps=_WARPS,
        slots=state.shape[1], tokens=qkv.shape[0], parts=gates.shape[0],
        PARTS=triton.next_power_of_2(gates.shape[0]), WARPS=_WARPS,
        key_heads=heads.key_heads, value_heads=heads.value_heads, scale=heads.key_dim**-0.5,
        KEY=heads.key_dim, VALUE=heads.value_dim, COLUMNS=columns,
        WRITES=writes, SINGLE=single,
    )  # fmt: skip


def _normed(
    out: Array, tokens: RuleTokens, weights: RuleWeights, *, config: RuleConfig, target: Target
) -> Array:
    """See `reference.norm_of`."""
    count, heads, dim = out.shape
    parts, _, columns = tokens.projected.shape
    at_once = math.gcd(heads, 8)
    return triton_call(
        out, tokens.projected, weights.norm,
        kernel=_norm,
        name="gated_delta_rule_norm",
        target=target,
        out_type=jax.ShapeDtypeStruct((count, heads * dim), out.dtype),
        grid=(count, heads // at_once),
        num_warps=4,
        columns=columns, parts=parts, heads=heads,
        eps=config.eps, HEADS=at_once, DIM=dim,
    )  # fmt: skip
