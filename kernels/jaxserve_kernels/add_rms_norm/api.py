"""Residual add and RMSNorm: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxserve_kernels.add_rms_norm import reference
from jaxserve_kernels.op import Implementation, Op, Refusal, anything, on_kernels
from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms, QuantizedTokens, TokenFormat
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
      update: None if x already includes it (`matmul.add_linear`).
      weight: [embed] or longer.
      form: the 8-bit format in which the reader takes the normed tokens (`matmul.token_format`,
        which returns one only where kernels run). The result equals norming, then quantising.
      bias: that of the product whose partial sums `update` has, [embed] or longer.
    """
    return _OP(x, update, weight, bias, eps=eps, form=form, both=False, target=target)


def add_rms_norm_twice(
    x: Array,
    update: Array | None,
    weight: Array,
    eps: float,
    form: TokenFormat | None,
    *,
    bias: Array | None = None,
    target: Target,
) -> tuple[Array, Array | BothForms]:
    """`add_rms_norm` for two readers, of which one takes plain tokens."""
    return _OP(x, update, weight, bias, eps=eps, form=form, both=True, target=target)


def _configure(
    x: Array, update: Array | None, weight: Array, bias: Array | None, *, target: Target, **_: Any
) -> Any:
    if update is None:  # XLA fuses the norm alone into one kernel that reads each token once
        return Refusal("no residual update to add")
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
    both: bool,
    target: Target,
) -> Any:
    from jaxserve_kernels.add_rms_norm import triton  # needs Triton: only for GPUs

    own = x, update, weight, eps, form
    return triton.add_rms_norm(*own, bias=bias, both=both, target=target)


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
    """Returns unquantised tokens whatever `form` is: products accept both."""
    weight, bias = weight[: x.shape[1]], bias if bias is None else bias[: x.shape[1]]
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
