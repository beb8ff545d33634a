"""Types of a mixture of experts: routing parameters, weights and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

from jaxserve_kernels.weights import Operand, is_quantized

type ExpertActivation = Literal["silu", "gelu_tanh", "swiglu_oss"]
"""`activation.Activation`, or gpt-oss's `reference.swiglu_oss`."""

SWIGLU_OSS_ALPHA, SWIGLU_OSS_LIMIT = 1.702, 7.0


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router chooses experts: see `reference.route`."""

    num_experts: int
    top_k: int
    """Experts per token."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    """Whether the weights of a token's experts are divided by their sum (`norm_topk_prob`).

    gpt-oss takes the softmax over the chosen logits only. That equals the normalised softmax over
    all logits, so gpt-oss uses this setting too.
    """


class Order(NamedTuple):
    """The (token, choice) pairs, sorted by expert."""

    pairs: Array  # int32 [tokens * k]: token * k + choice; undefined after the last expert's end
    ends: Array  # int32 [experts]: the end of each expert's pairs in that list


class Routes(NamedTuple):
    """What `reference.route` returns, and what the kernels of experts read."""

    ids: Array  # int32 [tokens, k]; the number of experts for padding
    weights: Array  # float32 [tokens, k]
    order: Order | None
    """None: the kernels that need it compute it."""


class ExpertWeights(NamedTuple):
    """The stacked weights of all experts of a layer: arrays, or quantised (`weights.Quantized`).

    A quantised weight may be padded to a multiple of 128 inputs, more than the tokens have. The
    padding is multiplied by 0, so its codes must decode to finite values.
    """

    gate_up: Any  # [experts, 2 * width, embed]: each expert's gate rows, then its up rows
    down: Any  # [experts, embed, width]
    gate_up_bias: Array | None = None  # [experts, 2 * width]
    down_bias: Array | None = None  # [experts, embed]

    @property
    def width(self) -> int:
        """Width of an expert's hidden layer."""
        return self.gate_up.shape[-2] // 2


class Stacked(NamedTuple):
    """A stacked weight in the form that kernels take."""

    arrays: tuple[Array, Array, Array]
    """`Operand.arrays` with a leading axis of experts; for an unquantised weight, the weight three
    times."""
    operand: Operand | None
    """The operand of one expert, with abstract arrays; None for an unquantised weight."""


def stacked(weight: Any) -> Stacked | None:
    """The weight as kernels take it; None if no kernel supports its format."""
    if not is_quantized(weight):
        return Stacked((weight, weight, weight), None)
    one: Any = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weight)
    operand = None if one.reordered else one.operand
    if operand is None:
        return None
    leaves = dict(zip(map(id, jax.tree.leaves(one)), jax.tree.leaves(weight), strict=True))
    first, second, third = (leaves[id(each)] for each in operand.arrays)
    return Stacked((first, second, third), operand)
