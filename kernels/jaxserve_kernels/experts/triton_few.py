"""The experts of few tokens as two kernels of a launch chain (PDL), without a routing kernel.

There are programs for each (token, choice) pair. Each one finds its pair's expert, and all tokens
of that expert, from the scores. If an earlier token has chosen the same expert, it ends at once.

`_gate_up` lets the next kernel start only after its own wait for the scores. So `_down` may read
the scores before it waits, and fills its rings with the experts' weights while `_gate_up` runs. A
shared expert is one more pair.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import gating
from jaxserve_kernels.dense_matmul.triton_streaming import accumulate as dense_sums
from jaxserve_kernels.experts.config import limits_of
from jaxserve_kernels.experts.triton_activation import OSS, activated_sums
from jaxserve_kernels.experts.triton_choice import chosen, of_columns
from jaxserve_kernels.experts.types import ExpertActivation, ExpertWeights, Routing, stacked
from jaxserve_kernels.quantized_matmul.triton_results import rows_of
from jaxserve_kernels.quantized_matmul.triton_streaming import accumulate
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_PLAIN = gl.constexpr(-2)
"""Stands for an unquantised weight where a `weights.Kind` is expected."""
_ROWS = 64
_RESERVED = 1024
"""Bytes of shared memory that the system reserves for each program."""


@gluon.jit
def _store(values, out_ptr, place, there, n: gl.constexpr):
    """Stores each column whose `there` is set in the row `place` of out."""
    rows: gl.constexpr = values.shape[0]
    row = gl.program_id(0) * rows + gl.arange(0, rows, gl.SliceLayout(1, values.type.layout))
    mask, _ = gl.broadcast(there[None, :], values)
    gl.store(out_ptr + place[None, :] * n + row[:, None], values, mask=mask)


@gluon.jit
def expert_at(ptr, shared_ptr, expert, shared, size: gl.constexpr, SHARED: gl.constexpr):
    """The expert's part of a stack, or the shared expert's array."""
    place = ptr + expert.to(gl.int64) * size
    if SHARED:
        place = gl.where(shared, shared_ptr, place)
    return place


@gluon.jit
def _sums(
    x_ptr, packed_ptr, scale_ptr, second_ptr, shared_packed_ptr, shared_scale_ptr,
    shared_second_ptr, expert, shared, tokens: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    SHARED: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    ZERO: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """An expert's weight rows times the tokens at x_ptr."""
    packed = expert_at(packed_ptr, shared_packed_ptr, expert, shared, packed_size, SHARED)
    program = gl.program_id(0)
    if KIND == _PLAIN:
        copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [4, 1], [1, 0])
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
        row = rows_of(program, gl.arange(0, ROWS, gl.SliceLayout(1, copy)), n, GATED, ROWS)
        acc = dense_sums(
            x_ptr, packed, row, 0, tokens, k, k // DEPTH, TOKENS, ROWS, DEPTH, STAGES, EARLY, True,
            copy, mma,
        )  # fmt: skip
    else:
        scale = expert_at(scale_ptr, shared_scale_ptr, expert, shared, scale_size, SHARED)
        second = expert_at(second_ptr, shared_second_ptr, expert, shared, second_size, SHARED)
        acc = accumulate(
            (x_ptr, x_ptr, x_ptr), packed, scale, second, program, 0, tokens, n, k, columns, GATED,
            KIND, GROUP,
            ZERO, TOKENS, ROWS, k // 128, K_TILES, STAGES, True, EARLY,
        )  # fmt: skip
    return acc


@gluon.jit
def _add_bias(acc, bias_ptr, n: gl.constexpr, GATED: gl.constexpr):
    ROWS: gl.constexpr = acc.shape[0]
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    row = rows_of(gl.program_id(0), lane, n, GATED, ROWS)
    return acc + gl.load(bias_ptr + row).to(gl.float32)[:, None]


@gluon.jit
def _gate_up(
    x_ptr, packed_ptr, scale_ptr, second_ptr, shared_packed_ptr, shared_scale_ptr,
    shared_second_ptr, bias_ptr, scores_ptr, router_bias_ptr, out_ptr,
    tokens: gl.constexpr, scored: gl.constexpr, experts: gl.constexpr, K: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    ROUTER_BIAS: gl.constexpr, SHARED: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """activation(gate) * up, [pairs, tokens, n].

    The first pair of each expert writes the rows of all tokens that have the expert. Other rows are
    not written.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    pair = gl.program_id(1)
    expert, first, choices, _ = chosen(
        scores_ptr, router_bias_ptr, pair, tokens, scored, experts, K, EXPERTS, SIGMOID, NORMALIZE,
        ROUTER_BIAS, SHARED, ROWS // 16,
    )  # fmt: skip
    if not first:
        return
    acc = _sums(
        x_ptr, packed_ptr, scale_ptr, second_ptr, shared_packed_ptr, shared_scale_ptr,
        shared_second_ptr, expert, pair == tokens * K, tokens, n, k, columns,
        packed_size, scale_size, second_size, SHARED, True, KIND, GROUP, ZERO,
        TOKENS, ROWS, K_TILES, DEPTH, STAGES, False,
    )  # fmt: skip
    if BIAS:
        acc = _add_bias(acc, bias_ptr + expert * (2 * n), n, True)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    values = activated_sums(gate, up, dtype, GATED).reshape([ROWS // 2, TOKENS])
    layout: gl.constexpr = values.type.layout
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    there = (token < tokens) & (of_columns(choices, tokens, TOKENS, layout) >= 0)
    _store(values, out_ptr, pair * tokens + token, there, n)


@gluon.jit
def _down(
    x_ptr, packed_ptr, scale_ptr, second_ptr, shared_packed_ptr, shared_scale_ptr,
    shared_second_ptr, bias_ptr, early_scores_ptr, router_bias_ptr, out_ptr,
    tokens: gl.constexpr, scored: gl.constexpr, experts: gl.constexpr, K: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    BIAS: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    ROUTER_BIAS: gl.constexpr, SHARED: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """From the result of `_gate_up`: each choice's output times its weight, [K, tokens, n]; with a
    shared expert [K + 1, tokens, n]."""
    pair = gl.program_id(1)
    expert, first, choices, weights = chosen(
        early_scores_ptr, router_bias_ptr, pair, tokens, scored, experts, K, EXPERTS, SIGMOID,
        NORMALIZE, ROUTER_BIAS, SHARED, ROWS // 16,
    )  # fmt: skip
    if not first:
        return
    acc = _sums(
        x_ptr + pair * (tokens * columns), packed_ptr, scale_ptr, second_ptr, shared_packed_ptr,
        shared_scale_ptr, shared_second_ptr, expert, pair == tokens * K, tokens, n, k, columns,
        packed_size, scale_size, second_size, SHARED, False, KIND, GROUP, ZERO,
        TOKENS, ROWS, K_TILES, DEPTH, STAGES, EARLY,
    )  # fmt: skip
    if BIAS:
        acc = _add_bias(acc, bias_ptr + expert * n, n, False)
    layout: gl.constexpr = acc.type.layout
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    choice = of_columns(choices, tokens, TOKENS, layout)
    acc *= of_columns(weights, tokens, TOKENS, layout)[None, :]
    _store(acc, out_ptr, choice * tokens + token, (token < tokens) & (choice >= 0), n)


def experts(
    x: Array,
    scores: Array,
    w: ExpertWeights,
    bias: Array | None,
    shared: ExpertWeights | None,
    *,
    routing: Routing,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    """See `routed.routed_experts`. The scores have one part. The result is float32, with a part for
    each choice and one for a shared expert."""
    (tokens, embed), k = x.shape, routing.top_k
    columns = max(8, triton.next_power_of_2(tokens))  # the tensor cores' smallest product
    constants = {
        "tokens": tokens, "scored": scores.shape[-1], "experts": routing.num_experts, "K": k,
        "EXPERTS": max(32, triton.next_power_of_2(routing.num_experts)),
        "SIGMOID": routing.scoring == "sigmoid", "NORMALIZE": routing.normalize,
        "ROUTER_BIAS": bias is not None, "SHARED": shared is not None, "TOKENS": columns,
    }  # fmt: skip
    router = scores, scores if bias is None else bias
    pairs, parts = tokens * k, k
    if shared is not None:
        pairs, parts = pairs + 1, parts + 1
    launch = functools.partial(_launch, pairs, columns, target=target)
    every = shared or w
    hidden = triton_call(
        x, *expert_arrays(w.gate_up, every.gate_up, w.gate_up_bias), *router,
        kernel=_gate_up,
        name=f"few_gate_up{_suffix(w.gate_up)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((pairs, tokens, w.width), x.dtype),
        GATED=OSS.value if activation == "swiglu_oss" else gating(activation),
        **constants, **launch(w.gate_up, w.gate_up_bias, embed, w.width),
    )  # fmt: skip
    return triton_call(
        hidden, *expert_arrays(w.down, every.down, w.down_bias), *router,
        kernel=_down,
        name=f"few_down{_suffix(w.down)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((parts, tokens, embed), jnp.float32),
        **constants, **launch(w.down, w.down_bias, w.width, embed),
    )  # fmt: skip


def _suffix(weight: Any) -> str:
    return "" if isinstance(weight, Array) else f"_{type(weight).__name__}"


def expert_arrays(weight: Any, shared: Any, bias: Array | None) -> tuple[Array, ...]:
    """The arrays of a stack, of a shared expert (else the stack's again), and a bias (else any)."""
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    one = found.arrays
    if shared is not weight:
        one = (shared,) * 3 if found.operand is None else shared.operand.arrays
    return *found.arrays, *one, found.arrays[0] if bias is None else bias


def _launch(
    pairs: int, tokens: int, weight: Any, bias: Array | None, columns: int, n: int, *,
    target: Target,
) -> dict[str, Any]:  # fmt: skip
    """Launch arguments of a product. tokens: per tile; columns: inputs per token; n: width of the
    result."""
    experts, rows, k = weight.shape
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    sizes = [each.size // experts for each in found.arrays]
    grid = rows // _ROWS, pairs
    ring = target.gpu.shared_memory // _resident(grid[0] * pairs, target) - _RESERVED
    operand = found.operand
    if operand is None:
        depth, k_tiles = 64 if k % 128 else 128, 1
        steps, stage = k // depth, 2 * (_ROWS + tokens) * depth
        constants = {"KIND": _PLAIN.value, "GROUP": 0, "ZERO": 0}
    else:
        depth, tiles = 128, k // 128
        size = _ROWS * operand.row_bytes + 256 * tokens
        k_tiles = 4 if tiles >= 8 else 2 if tiles >= 4 else 1
        while k_tiles > 1 and ring // (k_tiles * size) < 4:
            k_tiles //= 2
        steps, stage = -(-tiles // k_tiles), k_tiles * size
        constants = operand.constants
    return {
        "grid": grid, "num_warps": 4, "n": n, "k": k, "columns": columns,
        "packed_size": sizes[0], "scale_size": sizes[1], "second_size": sizes[2], **constants,
        "BIAS": bias is not None, "ROWS": _ROWS, "K_TILES": k_tiles, "DEPTH": depth,
        "STAGES": max(2, min(ring // stage, steps + 1)),
    }  # fmt: skip


def _resident(programs: int, target: Target) -> int:
    """Programs per multiprocessor: as many as the grid has, within limits. The ring of a single one
    would leave no room for the next kernel's programs."""
    each = -(-programs // target.gpu.multiprocessors)
    return max(2, min(limits_of(target).few_resident, each))
