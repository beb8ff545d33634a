"""Heads and experts of other families through scheduler, prefix cache and every KV format."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.layer_spec import ExpertsSpec
from jaxserve_kernels.kv_format import KVFormat, named
from jaxserve_kernels.kv_format.kvarn import KVarN
from tests.runner.test_equivalence import CONFIG
from tests.runner.test_kv_formats import FEW_BUCKETS, MOST_DIFFERENT, Served, play_workloads
from tests.tiny_model import make_runner, tiny_spec

PLAIN = tiny_spec(qk_norm=False, architecture="LlamaForCausalLM")
BIASED = tiny_spec(qk_norm=False, qkv_bias=True, architecture="Qwen2ForCausalLM")
EXPERTS = tiny_spec(
    ffn=ExpertsSpec(num_experts=6, top_k=2, width=24, normalize=True),
    architecture="Qwen3MoeForCausalLM",
)
SPECS = {"plain": PLAIN, "biased": BIASED, "experts": EXPERTS}

FORMATS: tuple[KVFormat, ...] = (
    *(named(name) for name in ("auto", "bf16", "int8", "fp8_e4m3")),
    *(KVarN(value_bits=bits, group=4) for bits in (2, 4)),
)
OFTEN = {("plain", "fp8_e4m3"), ("experts", "auto")}
"""The others are slow tests. Biases: tests/test_library.py serves a model that has them."""


@pytest.mark.parametrize(
    ("heads", "kv_format"),
    [
        pytest.param(
            heads,
            each,
            id=f"{heads}-{each.name}",
            marks=[] if (heads, each.name) in OFTEN else pytest.mark.slow,
        )
        for heads in SPECS
        for each in FORMATS
    ],
)
def test_each_request_gets_the_tokens_it_would_get_alone(heads: str, kv_format: KVFormat) -> None:
    config = replace(CONFIG, spec=SPECS[heads], kv_format=kv_format, buckets=FEW_BUCKETS)
    # With pages of KVarN's groups the first 15 workloads preempt nothing.
    examples = 15 if (heads, kv_format.name) in OFTEN else 25
    found = play_workloads(Served(make_runner(config), kv_format), examples)
    assert found.preemptions and found.hit_tokens
    assert found.different <= MOST_DIFFERENT * found.requests, found
