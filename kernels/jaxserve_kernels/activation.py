"""Activations of gated feed-forwards, in plain JAX, and how kernels know them."""

from __future__ import annotations

from typing import Literal

import jax
from jax import Array

type Activation = Literal["silu", "gelu_tanh"]
"""SiLU: SwiGLU, as Llama and Qwen have it. GELU by tanh: GeGLU, as Gemma has it (Shazeer 2020)."""

_CODES: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}
"""GATED of a kernel whose result is gated."""


def activate(x: Array, activation: Activation) -> Array:
    """The activation of x, elementwise, in x's dtype."""
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=True)


def gating(activation: Activation, *, gated: bool = True) -> int:
    """The constant GATED of a kernel: 0 if its result is not gated."""
    return _CODES[activation] if gated else 0
