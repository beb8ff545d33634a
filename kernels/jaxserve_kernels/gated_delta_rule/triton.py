"""One program per row, value head and block of its columns: the state stays in registers from the
row's first token to its last, and is read and written once."""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.gated_delta_rule.reference import Heads
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_COLUMNS = 32
"""Of a state of 128 rows these are 32 registers for each thread of 4 warps. Columns do not depend
on each other."""


@triton.jit
def _kernel(
    qkv_ptr, gates_ptr, a_log_ptr, dt_bias_ptr, first_ptr, length_ptr, slot_ptr, position_ptr,
    state_ptr, layer, out_ptr,
    slots, key_heads: tl.constexpr, value_heads: tl.constexpr, scale: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, KEY)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(length_ptr + row)
    if length > 0:
        first = tl.load(first_ptr + row).to(tl.int64)
        slot = tl.load(slot_ptr + row).to(tl.int64)
        goes_on = tl.load(position_ptr + row) > 0
        place = ((layer.to(tl.int64) * slots + slot) * value_heads + head) * (KEY * VALUE)
        tile = state_ptr + place + key[:, None] * VALUE + column[None, :]
        inside = (key[:, None] >= 0) & (column[None, :] >= 0)
        state = tl.load(tile, mask=inside & goes_on, other=0.0)
        decay = -tl.exp(tl.load(a_log_ptr + head))
        bias = tl.load(dt_bias_ptr + head)
        width: tl.constexpr = 2 * key_heads * KEY + value_heads * VALUE
        of_key = (head // (value_heads // key_heads)) * KEY + key
        of_value = 2 * key_heads * KEY + head * VALUE + column
        for token in range(first, first + length):
            source = qkv_ptr + token * width
            q = tl.load(source + of_key).to(tl.float32)
            k = tl.load(source + key_heads * KEY + of_key).to(tl.float32)
            v = tl.load(source + of_value).to(tl.float32)
            gates = gates_ptr + token * (2 * value_heads) + head
            a = tl.load(gates).to(tl.float32) + bias
            b = tl.load(gates + value_heads).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
            # log(1 + exp(a)) without overflow
            softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
            state *= tl.exp(decay * softplus)
            found = tl.sum(state * k[:, None], axis=0)
            write = (v - found) / (1.0 + tl.exp(-b))
            state += k[:, None] * write[None, :]
            out = tl.sum(state * q[:, None], axis=0)
            target = out_ptr + (token * value_heads + head) * VALUE + column
            tl.store(target, out.to(out_ptr.dtype.element_ty))
        tl.store(tile, state)


def fits(heads: Heads) -> bool:
    """Whether the kernel takes such heads."""
    dims = (heads.key_dim, heads.value_dim)
    return all(dim >= 16 and dim & (dim - 1) == 0 for dim in dims)


def gated_delta_rule(
    qkv: Array,
    gates: Array,
    a_log: Array,
    dt_bias: Array,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    heads: Heads,
    target: Target,
) -> tuple[Array, Array]:
    """See `reference.gated_delta_rule`; tokens of padding get any result."""
    columns = min(_COLUMNS, heads.value_dim)
    results = (qkv.shape[0], heads.value_heads, heads.value_dim)
    reference = jax.new_ref(state)
    rows = step.rows
    out = triton_call(
        qkv, gates, a_log, dt_bias, *rows, reference, layer,
        kernel=_kernel,
        name="gated_delta_rule",
        target=target,
        out_type=jax.ShapeDtypeStruct(results, qkv.dtype),
        grid=(rows.first.shape[0], heads.value_heads, heads.value_dim // columns),
        num_warps=4,
        slots=state.shape[1],
        key_heads=heads.key_heads, value_heads=heads.value_heads, scale=heads.key_dim**-0.5,
        KEY=heads.key_dim, VALUE=heads.value_dim, COLUMNS=columns,
    )  # fmt: skip
    return out, jax.freeze(reference)
