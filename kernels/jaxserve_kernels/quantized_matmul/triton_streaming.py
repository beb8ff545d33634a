"""Products of up to 64 tokens, launched early (PDL): codes stream through a ring in shared memory.

A program first fills the ring with codes and scales of its rows, and then waits for earlier
kernels, like `dense_matmul.triton_streaming`. Codes take a half or a quarter of the bytes of
bfloat16, so most of a weight is in flight by then. Codes become bfloat16 in registers, from which
the tensor cores read, one plane of inputs at a time; with int8 tokens they become int8.

A gated product cannot be split, because gating needs whole sums. Where its last wave would leave
at least half of the card idle, two programs take a half of the inputs of each of that wave's tiles.
Each of the two stores its sums. The one that ends last adds the other's to its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.quantized_matmul.config import Config, steps
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens
from jaxserve_kernels.quantized_matmul.triton_arguments import NVFP4, arrays, kind, tokens_of
from jaxserve_kernels.quantized_matmul.triton_results import finish, rows_of, scaled, sums_at
from jaxserve_kernels.quantized_matmul.triton_rings import (
    add_tiles,
    copy_tokens,
    copy_weight,
    groups_of,
    mma_of,
    token_rings,
    token_source,
    wait_for_copies,
    weight_rings,
    weight_source,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Quantized

_NVFP4 = gl.constexpr(NVFP4.value)


@gluon.jit
def accumulate(
    x, packed_ptr, scale_ptr, second_ptr, program, first,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, K_TILES: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The program's weight rows times the tokens over one split of the inputs, from tile `first`.

    x: pointers to tokens in bfloat16, or in int8, and then to their scales and sums.
    second_ptr: zero points of 4-bit integers, or scales per row of NVFP4. n: rows of the result;
    gated, half of the weight's. columns: inputs of the tokens; the weight's other k - columns
    inputs count as 0. STEPS: tiles of 128 inputs in a split. K_TILES: tiles in a k-step. STAGES:
    k-steps in the rings. FIRST: the next kernel may start before this one reads its weights, not
    only after.
    """
    tiles: gl.constexpr = k // 128
    ahead: gl.constexpr = STAGES - 1
    even: gl.constexpr = STEPS % K_TILES == 0
    x_ptr, factor_ptr, sum_ptr = x
    mma: gl.constexpr = mma_of(x_ptr.dtype.element_ty, TOKENS, ROWS // 16)
    if tiles % STEPS == 0:
        steps: gl.constexpr = STEPS
    else:  # the last split is shorter, by whole k-steps
        gl.static_assert(even and tiles % K_TILES == 0)
        steps = gl.minimum(STEPS, tiles - first)
    rings = weight_rings(scale_ptr, second_ptr, KIND, GROUP, ZERO, ROWS, K_TILES, STAGES)
    x_rings = token_rings(x_ptr, rings[1], ZERO, TOKENS, K_TILES, STAGES)
    if EARLY and FIRST:
        gdc_launch_dependents()
    weight = weight_source(
        packed_ptr, scale_ptr, second_ptr, program, first, n, k, GATED, KIND, GROUP, ROWS, K_TILES
    )  # fmt: skip
    own = token_source(
        x_ptr, factor_ptr, sum_ptr, first, tokens, k, columns, KIND, TOKENS, K_TILES, ROWS // 16
    )  # fmt: skip
    for k_step in gl.static_range(ahead):
        if k_step * K_TILES < steps:
            left = steps - k_step * K_TILES
            copy_weight(rings, k_step, weight, k_step, left, KIND, GROUP, ZERO, K_TILES, even)
        async_copy.commit_group()
    of_rows = _of_rows(scale_ptr, second_ptr, program, mma, n, GATED, KIND, GROUP, ROWS)
    if EARLY:
        gdc_wait()
    for k_step in gl.static_range(ahead):
        if k_step * K_TILES < steps:
            left = steps - k_step * K_TILES
            copy_tokens(x_rings, k_step, own, k_step, left, tokens, columns, k, K_TILES, ZERO)
        async_copy.commit_group()

    acc = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    slot = 0
    # Not unrolled: the grid has no third dimension.
    for k_step in range(steps // K_TILES + gl.program_id(2)):
        wait_for_copies(ahead - 1, TOKENS)
        later = k_step + ahead
        left = steps - later * K_TILES
        if left > 0:
            place = gl.where(slot == 0, ahead, slot - 1)
            copy_weight(rings, place, weight, later, left, KIND, GROUP, ZERO, K_TILES, even)
            copy_tokens(x_rings, place, own, later, left, tokens, columns, k, K_TILES, ZERO)
        async_copy.commit_group()
        acc = add_tiles(acc, rings, slot, x_rings, slot, K_TILES, KIND, GROUP, ZERO)
        slot = gl.where(slot == ahead, 0, slot + 1)
    if not even:
        wait_for_copies(0, TOKENS)
        rest: gl.constexpr = STEPS % K_TILES
        acc = add_tiles(acc, rings, slot, x_rings, slot, rest, KIND, GROUP, ZERO)
    if EARLY and not FIRST:
        gdc_launch_dependents()
    return scaled(acc, of_rows, x_ptr.dtype.element_ty, KIND, groups_of(KIND, GROUP))


@gluon.jit
def _of_rows(
    scale_ptr, second_ptr, program, mma: gl.constexpr, n: gl.constexpr, GATED: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The scales of rows, if they have one each; 0 if not."""
    groups: gl.constexpr = groups_of(KIND, GROUP)
    found = 0
    if groups == 0 or KIND == _NVFP4:
        row = rows_of(program, gl.arange(0, ROWS, gl.SliceLayout(1, mma)), n, GATED, ROWS)
        found = gl.load((scale_ptr if groups == 0 else second_ptr) + row)
    return found


@gluon.jit
def _product(
    x_ptr, factor_ptr, sum_ptr, packed_ptr, scale_ptr, second_ptr, out_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, K_TILES: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    program = gl.program_id(0)
    x = x_ptr, factor_ptr, sum_ptr
    acc = accumulate(
        x, packed_ptr, scale_ptr, second_ptr, program, gl.program_id(1) * STEPS,
        tokens, n, k, k, GATED, KIND, GROUP, ZERO, TOKENS, ROWS, STEPS, K_TILES, STAGES, FIRST,
        EARLY,
    )  # fmt: skip
    finish(acc, out_ptr, program, tokens, n, GATED)


@gluon.jit
def _product_in_halves(
    x_ptr, factor_ptr, sum_ptr, packed_ptr, scale_ptr, second_ptr, out_ptr, partial_ptr, ended_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr, HALVED: gl.constexpr,
    K_TILES: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """A gated product whose last HALVED tiles of rows have two programs each. HALF: tiles of 128
    inputs of the first of the two."""
    whole: gl.constexpr = 2 * n // ROWS - HALVED
    program = gl.program_id(0)
    x = x_ptr, factor_ptr, sum_ptr
    if program < whole:
        acc = accumulate(
            x, packed_ptr, scale_ptr, second_ptr, program, 0, tokens, n, k, k, GATED, KIND,
            GROUP, ZERO, TOKENS, ROWS, k // 128, K_TILES, STAGES, FIRST, EARLY,
        )  # fmt: skip
        finish(acc, out_ptr, program, tokens, n, GATED)
    else:
        part = program - whole
        tile = part // 2
        acc = accumulate(
            x, packed_ptr, scale_ptr, second_ptr, whole + tile, part % 2 * HALF, tokens, n, k,
            k, GATED, KIND, GROUP, ZERO, TOKENS, ROWS, HALF, K_TILES, STAGES, FIRST, EARLY,
        )  # fmt: skip
        gl.store(sums_at(partial_ptr, part, acc), acc)
        gl.barrier()
        if gl.atomic_add(ended_ptr + tile, 1, sem="acq_rel", scope="gpu") == 1:
            gl.barrier()
            # The sum of two does not depend on their order, so neither on who ends last.
            acc += gl.load(sums_at(partial_ptr, part ^ 1, acc))
            finish(acc, out_ptr, whole + tile, tokens, n, GATED)


def launch(
    x: Array | QuantizedTokens,
    weight: Quantized,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `api`."""
    tokens, k = x.shape
    read = tokens_of(x, weight, config, target)
    tiles, halved = weight.shape[0] // config.rows, config.halved
    options: dict[str, Any] = {
        "name": f"{'gated_' if gated else ''}linear_streaming_{type(weight).__name__}",
        "target": target,
        "num_warps": config.rows // 16,
        "tokens": tokens, "n": out_type.shape[-1], "k": k, **kind(weight),
        "GATED": gating(activation, gated=gated),
        "TOKENS": config.tokens, "ROWS": config.rows,
        "K_TILES": config.unroll, "STAGES": config.num_stages, "FIRST": config.first,
    }  # fmt: skip
    if halved == 0:
        return triton_call(
            *read, *arrays(weight),
            kernel=_product,
            out_type=out_type,
            grid=(tiles, config.splits),
            STEPS=steps(k // 128, config.splits, config.unroll),
            **options,
        )  # fmt: skip
    assert gated
    return triton_call(
        *read, *arrays(weight),
        kernel=_product_in_halves,
        out_type=(
            out_type,
            jax.ShapeDtypeStruct((2 * halved, config.rows, config.tokens), jnp.float32),
            jax.ShapeDtypeStruct((halved,), jnp.int32),
        ),
        zeroed_outputs=(2,),
        grid=(tiles + halved,),
        HALF=steps(k // 128, 2, config.unroll), HALVED=halved,
        **options,
    )[0]  # fmt: skip
