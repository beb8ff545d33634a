"""What a mixture of experts is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

from jaxserve_kernels.weights import Operand, is_quantized

type ExpertActivation = Literal["silu", "gelu_tanh", "swiglu_oss"]
"""As `activation.Activation`, and gpt-oss's: `reference.swiglu_oss`."""

SWIGLU_OSS_ALPHA, SWIGLU_OSS_LIMIT = 1.702, 7.0


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router chooses: see `reference.route`."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    """The weights of a token's experts are divided by their sum (`norm_topk_prob`).

    gpt-oss takes the softmax over the chosen logits only. That is the softmax over all of them,
    normalised: the same setting.
    """


class ExpertWeights(NamedTuple):
    """Of all experts of a layer, stacked. A weight is an array or quantised (`weights.Quantized`).

    A quantised one may have more inputs than its tokens, which makes them a multiple of 128: the
    codes of the excess must mean finite values, and are multiplied with nothing.
    """

    gate_up: Any  # [experts, 2 * width, embed]: an expert's rows of gate, then those of up
    down: Any  # [experts, embed, width]
    gate_up_bias: Array | None = None  # [experts, 2 * width]
    down_bias: Array | None = None  # [experts, embed]

    @property
    def width(self) -> int:
        """Of an expert's hidden layer."""
        return self.gate_up.shape[-2] // 2


class Stacked(NamedTuple):
    """A stacked weight as kernels take it."""

    arrays: tuple[Array, Array, Array]
    """As `Operand.arrays`, with the experts as leading axis; of a plain weight the array itself."""
    operand: Operand | None
    """Of one expert, abstract; None: the weight is plain."""


def stacked(weight: Any) -> Stacked | None:
    """None: no kernel knows the weight."""
    if not is_quantized(weight):
        return Stacked((weight, weight, weight), None)
    one: Any = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weight)
    operand = None if one.reordered else one.operand
    if operand is None:
        return None
    leaves = dict(zip(map(id, jax.tree.leaves(one)), jax.tree.leaves(weight), strict=True))
    first, second, third = (leaves[id(each)] for each in operand.arrays)
    return Stacked((first, second, third), operand)
