"""A layer's router and its experts together: picks the implementations.

For one or two tokens, with programmatic dependent launch (PDL), three kernels compute everything:
`norm_and_score` is one, `routed_experts` the other two. `norm_and_score` is one kernel for a few
more tokens, too, and the kernels of the experts may include the shared expert. Otherwise both
functions call the separate operations `add_rms_norm`, `linear`, `route` and `experts`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels import matmul
from jaxserve_kernels.activation import Activation
from jaxserve_kernels.add_rms_norm import add_rms_norm_twice
from jaxserve_kernels.experts.api import configure_streaming, experts, route
from jaxserve_kernels.experts.config import Config, limits_of, token_format
from jaxserve_kernels.experts.few_config import refuses, scoring_refuses, unlike_the_others
from jaxserve_kernels.experts.types import ExpertActivation, ExpertWeights, Routing
from jaxserve_kernels.matmul import as_read, gated_linear, linear
from jaxserve_kernels.op import Implementation, Op, Refusal, anything
from jaxserve_kernels.quantized_matmul.e4m3.tokens import (
    BothForms,
    QuantizedTokens,
    TokenFormat,
    plain,
)
from jaxserve_kernels.shared_expert import add_shared_expert
from jaxserve_kernels.target import Target


def norm_and_score(
    x: Array,
    update: Array | None,
    weight: Array,
    eps: float,
    router: Array,
    *,
    bias: Array | None = None,
    form: TokenFormat | None = None,
    target: Target,
) -> tuple[Array, Array | BothForms, Array]:
    """`add_rms_norm`, then the router's scores: the normed tokens times router [rows, embed].

    Args:
      form: the 8-bit format in which the experts read the normed tokens (`token_format`).

    Returns:
      x and the normed tokens, both [tokens, embed]; and the scores, float32 [parts, tokens, rows],
      partial sums like those of `matmul.linear`.
    """
    return _SCORE(x, update, weight, router, bias, eps=eps, form=form, target=target)


def routed_experts(
    x: Array | BothForms,
    scores: Array,
    routing: Routing,
    w: ExpertWeights,
    *,
    bias: Array | None = None,
    shared: ExpertWeights | None = None,
    active: Array | None = None,
    activation: ExpertActivation = "silu",
    target: Target,
) -> Array:
    """Routes tokens by their scores (`route`), and runs their experts and the shared expert.

    Args:
      x: [tokens, embed].
      scores: float32 [parts, tokens, rows], from `norm_and_score`.
      bias: the router's bias, [experts].
      shared: weights of the expert that every token uses (`add_shared_expert`), without an axis of
        experts. Its score is in the last column, after the scores of the experts.
      active: int32 [tokens], 0 for padding, which has no experts, so that none of their weights is
        read for it; None: no token is padding. The three kernels for few tokens ignore it.

    Returns:
      Partial sums [parts, tokens, embed], in float32 or x's dtype. Those of padding are undefined.
    """
    if shared is not None:
        shared = as_read(shared, x.shape[0], target=target)
    if x.shape[0] == 1:  # kernels of one token read its ids without a check
        active = None
    args = x, scores, w, bias, shared, active
    return _EXPERTS(*args, routing=routing, activation=activation, target=target)


def _configure_score(
    x: Array,
    update: Array | None,
    _weight: Array,
    router: Array,
    *_: Any,
    target: Target,
    **__: Any,
) -> Any:
    return scoring_refuses(x, update, router, target=target)


def _score(_: None, *args: Any, form: TokenFormat | None, **options: Any) -> Any:
    from jaxserve_kernels.experts import triton_score  # needs Triton: only for GPUs

    assert form is None, "few tokens are plain"
    return triton_score.norm_and_score(*args, **options)


def _score_apart(
    _: None,
    x: Array,
    update: Array | None,
    weight: Array,
    router: Array,
    bias: Array | None,
    *,
    eps: float,
    form: TokenFormat | None,
    target: Target,
) -> tuple[Array, Array | BothForms, Array]:
    x, normed = add_rms_norm_twice(x, update, weight, eps, form, bias=bias, target=target)
    return x, normed, linear(plain(normed), router, jnp.float32, target=target)


def _configure_experts(
    x: Array,
    scores: Array,
    w: ExpertWeights,
    _bias: Array | None,
    shared: ExpertWeights | None,
    _active: Array | None,
    *,
    target: Target,
    **_: Any,
) -> Any:
    return refuses(x, scores, w, shared, target=target)


def _few(_: None, *args: Any, **options: Any) -> Array:
    from jaxserve_kernels.experts import triton_few  # needs Triton: only for GPUs

    x, *own, _ = args
    return triton_few.experts(plain(x), *own, **options)


def _configure_streaming(
    x: Array | BothForms,
    _scores: Array,
    w: ExpertWeights,
    _bias: Array | None,
    shared: ExpertWeights | None,
    _active: Array | None,
    *,
    routing: Routing,
    target: Target,
    **_: Any,
) -> Config | Refusal:
    if shared is None:
        return Refusal("no shared expert")
    tokens, limits = x.shape[0], limits_of(target)
    if tokens <= limits.few_tokens and tokens * routing.num_experts <= limits.few_scores:
        return Refusal("few tokens with few scores")
    ids = jax.ShapeDtypeStruct((x.shape[0], routing.top_k), jnp.int32)
    config = configure_streaming(x, ids, w, target=target)
    return config if isinstance(config, Refusal) else unlike_the_others(w, shared) or config


def _streaming(
    config: Config,
    x: Array | BothForms,
    scores: Array,
    w: ExpertWeights,
    bias: Array | None,
    shared: ExpertWeights,
    active: Array | None,
    *,
    routing: Routing,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    from jaxserve_kernels.experts import triton_streaming  # needs Triton: only for GPUs

    ids, weights, order = route(scores, routing, bias, active, target=target)
    return triton_streaming.experts(
        x, ids, weights, w, activation, config,
        order=order, shared=shared, scores=scores, target=target,
    )  # fmt: skip


def _apart(
    _: None,
    x: Array | BothForms,
    scores: Array,
    w: ExpertWeights,
    bias: Array | None,
    shared: ExpertWeights | None,
    active: Array | None,
    *,
    routing: Routing,
    activation: ExpertActivation,
    target: Target,
) -> Array:
    ids, weights, order = route(scores, routing, bias, active, target=target)
    update = experts(x, ids, weights, w, order, activation=activation, target=target)
    if shared is None:
        return update
    assert activation != "swiglu_oss"
    read = _read_by_shared(x, shared, w, routing.top_k, activation, target)
    gated = gated_linear(read, shared.gate_up, activation=activation, target=target)
    every = linear(gated, shared.down, target=target)
    own = update, every, scores
    return add_shared_expert(*own, column=routing.num_experts, dtype=x.dtype, target=target)


def _read_by_shared(
    x: Array | BothForms,
    shared: ExpertWeights,
    w: ExpertWeights,
    top_k: int,
    activation: Activation,
    target: Target,
) -> Array | QuantizedTokens:
    """The tokens in the experts' 8-bit form, if the shared expert reads the same."""
    if isinstance(x, BothForms):
        form = matmul.token_format(
            shared.gate_up, x.shape[0], x.dtype, gated=True, activation=activation, target=target
        )
        theirs = token_format(x.plain, top_k, w, target=target)
        if form is not None and form._replace(inputs=x.shape[1]) == theirs:
            return x.quantized
    return plain(x)


_SCORE = Op(
    name="norm_and_score",
    implementations=(
        Implementation(name="triton", configure=_configure_score, run=_score),
        Implementation(name="apart", configure=anything, run=_score_apart, kernels=False),
    ),
    describe=lambda x, _update, _weight, router, *_, **__: (
        f"tokens of {x.shape[-1]}, {router.shape[0]} rows"
    ),
)
_EXPERTS = Op(
    name="routed_experts",
    implementations=(
        Implementation(name="streaming", configure=_configure_streaming, run=_streaming),
        Implementation(name="triton", configure=_configure_experts, run=_few),
        Implementation(name="apart", configure=anything, run=_apart, kernels=False),
    ),
    describe=lambda x, _scores, w, *_, **__: (
        f"{w.gate_up.shape[0]} experts of {x.shape[-1]} x {w.width}"
    ),
)
