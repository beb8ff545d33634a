"""Residual add and RMSNorm: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.add_rms_norm import reference
from jaxserve_kernels.op import Implementation, Op, Refusal, anything, on_kernels
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens, TokenFormat
from jaxserve_kernels.target import Target


def add_rms_norm(
    x: Array,
    update: Array | None,
    weight: Array,
    eps: float,
    form: TokenFormat | None = None,
    *,
    bias: Array | None = None,
    target: Target,
) -> tuple[Array, Array | QuantizedTokens]:
    """See `reference.add_rms_norm`.

    Args:
      update: None if it is in x already (`matmul.add_linear`).
      form: what the normed tokens become, for a reader that takes 8 bits (`matmul.token_format`,
        which asks for it only where there are kernels). Both are the same as one after the other.
      bias: of the product that `update` is of.
    """
    return _OP(x, update, weight, bias, eps=eps, form=form, target=target)


def _configure(
    x: Array, update: Array | None, weight: Array, bias: Array | None, *, target: Target, **_: Any
) -> Any:
    if update is None:  # XLA's fusion reads and writes each token once
        return Refusal("there is nothing to add")
    return on_kernels(target=target)


def _kernel(
    _: None,
    x: Array,
    update: Array,
    weight: Array,
    bias: Array | None,
    *,
    eps: float,
    form: Any,
    target: Target,
) -> Any:
    from jaxserve_kernels.add_rms_norm import triton  # needs Triton: only for GPUs

    return triton.add_rms_norm(x, update, weight, eps, form, bias=bias, target=target)


def _definition(
    _: None,
    x: Array,
    update: Array | None,
    weight: Array,
    bias: Array | None,
    *,
    eps: float,
    **__: Any,
) -> tuple[Array, Array]:
    """Plain tokens, which a product takes, too."""
    if update is None:
        return x, reference.rms_norm(x, weight, eps)
    return reference.add_rms_norm(x, update, weight, eps, bias)


_OP = Op(
    name="add_rms_norm",
    implementations=(
        Implementation(name="triton", configure=_configure, run=_kernel),
        Implementation(name="reference", configure=anything, run=_definition, kernels=False),
    ),
    describe=lambda x, *_, **__: f"tokens of {x.shape[-1]}",
)
