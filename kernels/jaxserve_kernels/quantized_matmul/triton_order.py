"""Permutes the inputs of tokens into the order in which a weight is stored; launched early
(PDL)."""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call


@triton.jit
def _kernel(
    x_ptr, order_ptr, out_ptr,
    k: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < k
    source = tl.load(order_ptr + place, mask=there, other=0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * k
    x = tl.load(x_ptr + row + source, mask=there)
    tl.store(out_ptr + row + place, x, mask=there)


def take_inputs(x: Array, order: Array, *, target: Target) -> Array:
    """See `api.take_inputs`."""
    tokens, k = x.shape
    block = min(1024, triton.next_power_of_2(k))
    return triton_call(
        x, order,
        kernel=_kernel,
        name="take_inputs",
        target=target,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(tokens, triton.cdiv(k, block)),
        num_warps=4,
        k=k, BLOCK=block,
    )  # fmt: skip
