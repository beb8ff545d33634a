"""What `hopper.py` copies by TMA: blocks of a weight and of its groups' scales."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from jaxserve_kernels.experts.hopper_copy import DEPTH
from jaxserve_kernels.experts.types import Stacked
from jaxserve_kernels.triton_call import tensor_descriptor
from jaxserve_kernels.weights import Kind


class View(NamedTuple):
    """An array as TMA sees it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""


def blocks_of(
    weight: Stacked, count: int, rows: int, inputs: int, size: int, *, gated: bool
) -> tuple[Any, Any]:
    """Returns a weight [count, rows, inputs] and its groups' scales as TMA copies them. Without
    groups the second one is any array.

    A block is what a step needs of a tile of `size` rows. Gated, it has 8 rows of gate and 8 of up
    in turn. One of codes then has 128 rows, because a view has no more than five dimensions.
    """
    codes, scale, _ = weight.arrays
    known = weight.operand
    if known is None:
        return _plain(codes, count, rows, inputs, size, gated=gated), scale
    words = codes.shape[-1]
    tiles, steps, swizzled = rows // 64, inputs // 128, layout(2 * words, rank=5)
    if gated:
        half = tiles // 2 * steps  # code tiles of gate, or of up, of an expert
        one = 64 * words
        view = View(
            ((2 * count - 1) * half, 8, 2, 8, words), (one, 8 * words, half * one, words, 1)
        )
        found = tensor_descriptor(codes, (1, 8, 2, 8, words), swizzled, view)
    else:
        whole = codes.reshape(count, tiles, steps, 64, words)
        found = tensor_descriptor(whole, (1, size // 64, 1, 64, words), swizzled)
    if known.kind < Kind.INT4 and known.group == inputs:
        return found, scale
    return found, _scales(scale, count, tiles, steps, size, gated=gated)


def _plain(array: Any, count: int, rows: int, inputs: int, size: int, *, gated: bool) -> Any:
    if not gated:
        whole = array.reshape(count, rows, inputs)
        return tensor_descriptor(whole, (1, size, DEPTH), layout(2 * DEPTH, rank=3))
    half = rows // 2
    view = View(
        (count, half // 8, 2, 8, inputs), (rows * inputs, 8 * inputs, half * inputs, inputs, 1)
    )
    box = 1, size // 16, 2, 8, DEPTH
    return tensor_descriptor(array, box, layout(2 * DEPTH, rank=5), view)


def _scales(array: Any, count: int, tiles: int, steps: int, size: int, *, gated: bool) -> Any:
    if not gated:
        whole = array.reshape(count, tiles, steps * 64)
        return tensor_descriptor(whole, (1, size // 64, 64), layout(0, 32, rank=3))
    half = tiles // 2 * steps
    view = View(
        (2 * (count - 1) * half + steps, tiles // 2, 8, 2, 8), (64, steps * 64, 8, half * 64, 1)
    )
    return tensor_descriptor(array, (1, size // 128, 8, 2, 8), layout(0, 32, rank=5), view)


def layout(size: int, bits: int = 16, rank: int = 2) -> Any:
    """Shared memory layout of rows of `size` bytes, with elements of `bits` bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=size, element_bitwidth=bits, rank=rank)
