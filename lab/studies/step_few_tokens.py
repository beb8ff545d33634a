"""Runs scripts/bench_step.py with `few_tokens` in steps of up to eight tokens.

python -m lab.studies.step_few_tokens --model qwen3-30b-a3b --batch 1,8 --temperature 1
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.92)

from jax import Array

from jaxserve.model_spec import ModelSpec
from jaxserve.models import layer as layers
from jaxserve.models.layer_weights import Layer
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.experts import ExpertWeights, Routing, route
from jaxserve_kernels.matmul import add_linear, token_format
from jaxserve_kernels.target import Target
from lab.studies import few_tokens

FEW = 8
_as_it_is = layers.feed_forward


def feed_forward(
    layer: Layer,
    next_norm: layers.Norm,
    x: Array,
    attention_out: Array,
    spec: ModelSpec,
    *,
    target: Target,
) -> tuple[Array, layers.Normed]:
    """`layer.feed_forward`. Steps that count experts, by another `route`, are as they are."""
    counts = layers.route is not route
    if counts or not target.pdl or layer.experts is None or layer.shared or x.shape[0] > FEW:
        return _as_it_is(layer, next_norm, x, attention_out, spec, target=target)
    own = spec.experts
    assert layer.out is not None and layer.router is not None and own is not None
    biased = layer.out_bias is not None
    x, out = add_linear(x, attention_out, layer.out, biased=biased, target=target)
    assert out is not None
    x, normed, scores = few_tokens.norm_and_score(
        *(x, out, layer.mlp_norm, spec.norm_eps, layer.router), bias=layer.out_bias, target=target
    )
    parts = few_tokens.experts(
        *(normed, scores),
        Routing(num_experts=own.num_experts, top_k=own.top_k, normalize=own.normalize),
        ExpertWeights(*layer.experts, layer.gate_up_bias, layer.down_bias),
        own.activation,
        bias=layer.router_bias,
        target=target,
    )
    form = token_format(next_norm.reader, x.shape[0], x.dtype, target=target)
    return add_rms_norm(x, parts, next_norm.weight, spec.norm_eps, form, target=target)


if __name__ == "__main__":
    scripts = Path(__file__).parents[2] / "scripts"
    sys.path.insert(0, str(scripts))
    with mock.patch.object(layers, "feed_forward", feed_forward):
        runpy.run_path(str(scripts / "bench_step.py"), run_name="__main__")
