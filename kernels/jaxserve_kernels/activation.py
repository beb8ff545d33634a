"""Activations of gated feed-forward layers, in plain JAX, and their numbers in kernels."""

from __future__ import annotations

from typing import Literal

import jax
from jax import Array

type Activation = Literal["silu", "gelu_tanh"]
"""silu makes SwiGLU, as in Llama and Qwen. gelu_tanh, GELU's tanh approximation, makes GeGLU, as in
Gemma (Shazeer 2020)."""

_CODES: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}
"""Values of the constant GATED of a kernel with a gated result."""


def activate(x: Array, activation: Activation) -> Array:
    """The activation of x, elementwise, in x's dtype."""
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=True)


def gating(activation: Activation, *, gated: bool = True) -> int:
    """The constant GATED of a kernel: 0 if its result is not gated."""
    return _CODES[activation] if gated else 0
