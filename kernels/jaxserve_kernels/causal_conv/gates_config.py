"""Operands and launch parameters of the kernel that convolves and multiplies the gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.op import NOT_PDL, Refusal
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target

ROWS, DEPTH = 16, 128
"""Rows of the gates' weight per program, and inputs per step of the product."""

_MOST_SPLITS, _MOST_SPLITS_OF_FEW = 8, 20
"""Parts of the inputs, each with its programs, which the rule adds. Programs of few tokens last as
long as their products take one after the other, so they have shorter parts."""

_FEW = 16
"""The most tokens with `_MOST_SPLITS_OF_FEW`."""

_MOST_STEPS = 8
"""Steps of a part, whose weights a program holds in registers."""

_MOST_TOKENS = 64
"""With more, the product reads the weight often. A rule, not measured."""


class Operands(NamedTuple):
    """Arguments of `gates.conv_and_gates`."""

    x: Array
    """[tokens, embed], the layer's normed input."""
    projected: Array
    gates: Array
    """[rows, embed], the gates' weight."""
    weight: Array
    state: Array
    step: RecurrentStep
    """For projected, weight, state and step see `reference.causal_conv`."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The inputs of the product are `splits` parts of `steps` steps."""

    splits: int
    steps: int


def choose(operands: Operands, *, target: Target) -> Config | Refusal:
    """The configuration of the kernel, or why it does not accept the operands."""
    x, gates, step = operands.x, operands.gates, operands.step
    if not target.uses_triton() or not target.pdl:
        return NOT_PDL
    if step.rows.blocked is not None:
        return Refusal("not rows of one token each")
    if x.dtype != jnp.bfloat16 or gates.dtype != jnp.bfloat16:
        return Refusal("not in bfloat16")
    if x.shape[0] > _MOST_TOKENS:
        return Refusal(f"more than {_MOST_TOKENS} tokens")
    steps, rest = divmod(x.shape[1], DEPTH)
    most = _MOST_SPLITS_OF_FEW if x.shape[0] <= _FEW else _MOST_SPLITS
    splits = max(each for each in range(1, most + 1) if steps % each == 0)
    if rest or steps // splits > _MOST_STEPS:
        return Refusal(f"not up to {most} parts of up to {_MOST_STEPS} x {DEPTH} inputs")
    return Config(splits=splits, steps=steps // splits)
