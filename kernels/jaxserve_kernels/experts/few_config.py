"""Decides whether the three kernels for few tokens accept tokens and weights. See `routed`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.experts.config import limits_of, unlike
from jaxserve_kernels.experts.types import ExpertWeights, stacked
from jaxserve_kernels.op import NO_KERNELS, NOT_PDL, Refusal
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import is_quantized


def scoring_refuses(
    x: Array, update: Array | None, router: Array, *, target: Target
) -> Refusal | None:
    """Returns why one kernel cannot compute both the norm of x [tokens, embed] and the router's
    product; None if it can."""
    if update is None:
        return Refusal("no residual update to add")
    refusal = _unlike_a_decode_step(x, limits_of(target).scored_tokens, target)
    if refusal is not None:
        return refusal
    if router.dtype != x.dtype:
        return Refusal("the router has another dtype than the tokens")
    tokens, embed = x.shape
    if scoring(tokens, embed, router.shape[0]).programs > target.gpu.multiprocessors:
        return Refusal("more programs than multiprocessors")
    return None


class Scoring(NamedTuple):
    """Launch parameters of `triton_score`."""

    rows: int
    """Rows of the router that a program holds in registers."""
    num_warps: int
    programs: int
    last: bool
    """Whether the first program of each token has the last row, too: a shared expert's gate would
    be the only row of another program."""


_EACH = 64
"""Elements of the router that a thread holds."""
_ALONE = 2
"""Up to this many tokens, programs have 8 warps, more of them a token. With more tokens each has 16
warps, so that fewer programs read the same token."""


def scoring(tokens: int, embed: int, rows: int) -> Scoring:
    """Returns the launch for tokens of `embed` elements and a router of `rows` rows."""
    warps = 8 if tokens <= _ALONE else 16
    at_once = max(1, 32 * warps * _EACH // (1 << (embed - 1).bit_length()))
    last = rows % at_once == 1 and rows > 1
    return Scoring(at_once, warps, tokens * -(-(rows - last) // at_once), last)


def refuses(
    x: Array, scores: Array, w: ExpertWeights, shared: ExpertWeights | None, *, target: Target
) -> Refusal | None:
    """Returns why `triton_few` cannot compute the experts of x [tokens, embed]; None if it can."""
    refusal = _unlike_a_decode_step(x, limits_of(target).few_tokens, target)
    if refusal is not None:
        return refusal
    if scores.shape[0] > 1:
        return Refusal("scores in parts")
    for name, inputs in (("gate_up", x.shape[1]), ("down", w.width)):
        weight: Any = getattr(w, name)
        found = stacked(weight)
        if found is None:
            return Refusal(f"no kernel supports the format of {name}")
        _, rows, depth = weight.shape
        refusal = unlike(rows, depth, inputs, found)
        if refusal is not None:
            return refusal
    return None if shared is None else unlike_the_others(w, shared)


def unlike_the_others(w: ExpertWeights, shared: ExpertWeights) -> Refusal | None:
    """Returns why kernels cannot treat a shared expert like one of the experts; None if they
    can."""
    if w.gate_up_bias is not None:
        return Refusal("a shared expert beside experts with biases")
    if not (_alike(w.gate_up, shared.gate_up) and _alike(w.down, shared.down)):
        return Refusal("a shared expert unlike the others")
    return None


def _unlike_a_decode_step(x: Array, most: int, target: Target) -> Refusal | None:
    if not target.uses_triton():
        return NO_KERNELS
    if not target.pdl:
        return NOT_PDL
    if x.shape[0] > most:
        return Refusal(f"more than {most} tokens")
    return None if x.dtype == jnp.bfloat16 else Refusal("not in bfloat16")


def _alike(stack: Any, one: Any) -> bool:
    """Returns whether a weight has the same format and shape as each weight of a stack."""
    if type(stack) is not type(one) or stack.shape[1:] != one.shape:
        return False
    if is_quantized(one) and (one.reordered is not None or one.operand is None):
        return False
    shapes = [[each.shape for each in jax.tree.leaves(tree)] for tree in (stack, one)]
    dtypes = [[each.dtype for each in jax.tree.leaves(tree)] for tree in (stack, one)]
    return [shape[1:] for shape in shapes[0]] == shapes[1] and dtypes[0] == dtypes[1]
