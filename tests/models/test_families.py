"""Each family: its published config.json, what of it makes a difference, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import ConfigError
from jaxserve.layer_spec import ExpertsSpec, LinearScaling, Llama3Scaling, Rope
from jaxserve.model_spec import ModelSpec
from jaxserve.models.decoder import abstract
from jaxserve.models.registry import ARCHITECTURES, NAMED_MODELS, rules, spec_of
from jaxserve_checkpoints.naming import leaf_parts
from jaxserve_checkpoints.rules import WORD, Ignore, Rule
from tests.models.published_configs import (
    EXPERTS,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_TEXT,
    QWEN3_MOE,
)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GPT_OSS, "gpt-oss-20b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (LLAMA, "llama-3.1-8b"),
        (QWEN2, "qwen2.5-7b"),
        (MISTRAL, "mistral-7b"),
        (QWEN3_5, "qwen3.8-27b"),
        (QWEN3_5_MOE, "qwen3.6-35b-a3b"),
    ],
)
def test_published_configs_are_the_named_models(config: dict[str, Any], name: str) -> None:
    assert spec_of(config) == NAMED_MODELS[name]


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_the_rules_of_a_named_model_fill_each_of_its_leaves_once(name: str) -> None:
    spec = NAMED_MODELS[name]
    parts = leaf_parts(abstract(spec, "bfloat16", stacked=True))
    leaves = {re.sub(r"\.[0-9]+\.", ".", part.path) for part in parts}
    filled = [WORD.sub("", rule.leaf).replace("..", ".") for rule in _fills(spec)]
    assert sorted(filled) == sorted(leaves)


def _fills(spec: ModelSpec) -> list[Rule]:
    return [rule for rule in rules(spec) if isinstance(rule, Rule)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_takes_every_kind_of_rope(architecture: str) -> None:
    others = {"num_local_experts": 8, "sliding_window": 128, "attention_bias": None}
    others["shared_expert_intermediate_size"] = 512
    if architecture == "GptOssForCausalLM":
        others["attention_bias"] = True

    def rope_of(**changed: Any) -> Rope:
        config = LLAMA | EXPERTS | others | changed
        has_vision = architecture.endswith("ForConditionalGeneration")
        nested = {"text_config": config} if has_vision else {}
        return spec_of(config | nested | {"architectures": [architecture]}).attention.rope

    assert isinstance(rope_of().scaling, Llama3Scaling)
    linear = rope_of(rope_scaling={"type": "linear", "factor": 2.0})
    assert (linear.theta, linear.scaling) == (5e5, LinearScaling(factor=2.0))


def test_layers_of_qwen3_5_are_those_of_the_list_or_every_fourth_attends() -> None:
    spec = spec_of(QWEN3_5)
    assert [group.layers for group in spec.cache_groups] == [tuple(range(3, 64, 4))]
    assert spec.state is not None and spec.state.layers[:4] == (0, 1, 2, 4)
    assert spec.num_paged_layers == 16 and 26.5e9 < spec.num_params < 27.5e9
    kinds = ["full_attention", "linear_attention"]
    text = QWEN3_5_TEXT | {"num_hidden_layers": 2, "layer_types": kinds}
    listed = spec_of(text | {"architectures": ["Qwen3_5ForCausalLM"]})
    assert listed.state is not None and listed.state.layers == (1,)


def test_qwen3_5_with_experts_has_35_billion_parameters_of_which_a_token_meets_3() -> None:
    spec = spec_of(QWEN3_5_MOE)
    assert spec.experts is not None and spec.experts.shared_width == 512
    assert 34e9 < spec.num_params < 36e9 and 2.9e9 < spec.active_params < 3.6e9
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size"):
        text = {**QWEN3_5_MOE["text_config"], "shared_expert_intermediate_size": None}
        spec_of(QWEN3_5_MOE | {"text_config": text})


def test_qwen3_5_with_vision_is_the_text_model_with_other_names() -> None:
    text = NAMED_MODELS["qwen3.8-27b"]
    alone = replace(text, architecture="Qwen3_5ForCausalLM")
    nested, plain = (
        {rule.leaf: rule for rule in rules(spec) if isinstance(rule, Rule)}
        for spec in (text, alone)
    )
    assert nested["layers.{layer}.delta.conv"].sources == (
        "model.language_model.layers.{layer}.linear_attn.conv1d.weight",
    )
    for leaf, rule in nested.items():
        names = tuple(name.replace("model.language_model.", "model.") for name in rule.sources)
        assert plain[leaf] == replace(rule, sources=names)
    ignored = {rule.pattern for rule in rules(text) if isinstance(rule, Ignore)}
    assert {"mtp.*", "model.visual.*"} <= ignored


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.attention.window for layer in spec_of(config).layers if layer.attention]


def test_mistral_has_one_window_for_all_layers() -> None:
    assert windows(MISTRAL) == [None] * 32
    assert windows(MISTRAL | {"sliding_window": 4096}) == [4096] * 32


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_qwen_are_on_only_if_switched_on_and_in_later_layers(architecture: str) -> None:
    config = QWEN2 | {"architectures": [architecture], "num_hidden_layers": 4}
    assert windows(config) == [None] * 4
    on = config | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3}
    assert windows(on) == [None, None, None, 4096]
    assert [group.layers for group in spec_of(on).cache_groups] == [(0, 1, 2), (3,)]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(on | {"layer_types": kinds}) == [4096, None, 4096, None]


def experts(config: dict[str, Any]) -> list[bool]:
    layers = spec_of(QWEN3_MOE | {"num_hidden_layers": 6} | config).layers
    return [isinstance(layer.feed_forward, ExpertsSpec) for layer in layers]


def test_which_layers_of_qwen_have_experts() -> None:
    assert experts({}) == [True] * 6
    assert experts({"decoder_sparse_step": 2}) == [False, True] * 3
    assert experts({"mlp_only_layers": [0, 5]}) == [False, True, True, True, True, False]
    some = spec_of(QWEN3_MOE | {"mlp_only_layers": [0]})
    assert some.feed_forward is not None and some.feed_forward.width == 6144
    assert some.experts is not None and some.experts.width == 768
    assert spec_of(QWEN3_MOE).feed_forward is None


def test_a_window_of_qwen_with_experts_is_that_of_all_layers() -> None:
    on = {"use_sliding_window": True, "sliding_window": 4096, "num_hidden_layers": 3}
    assert windows(QWEN3_MOE | on) == [4096] * 3


def test_every_second_layer_of_gpt_oss_has_a_window() -> None:
    assert windows(GPT_OSS) == [128, None] * 12
    assert windows(GPT_OSS | {"layer_types": None}) == [128, None] * 12
    groups = spec_of(GPT_OSS).cache_groups
    assert [group.window for group in groups] == [None, 128]


def test_of_experts_a_token_uses_only_its_own() -> None:
    spec = spec_of(QWEN3_MOE)
    assert spec.num_params == 30_532_122_624  # as published: 30.5 billion, 3.3 of them active
    assert spec.active_params == 3_353_032_704
    dense = NAMED_MODELS["qwen3-4b"]
    assert dense.active_params == dense.num_params


def test_biases_of_llama_are_those_of_the_switches() -> None:
    spec = spec_of(LLAMA | {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"})
    assert spec.attention.qkv_bias and spec.attention.out_bias and not spec.feed_forward.bias
    assert spec.feed_forward.activation == "gelu_tanh"
    assert spec_of(LLAMA | {"mlp_bias": True}).feed_forward.bias


def test_heads_of_mistral_need_not_add_up_to_the_hidden_size() -> None:
    nemo = spec_of(MISTRAL | {"hidden_size": 5120, "head_dim": 128})
    assert (nemo.q_size, nemo.embed) == (4096, 5120)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"pretraining_tp": 2}, "pretraining_tp is 2, supported: 1"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": None}},
            "llama3 RoPE needs 'low_freq_factor', found",
        ),
        (
            LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | {"high_freq_factor": 0.5}},
            "needs 0 < low_freq_factor (1) < high_freq_factor (0.5)",
        ),
        (
            LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | {"short_factor": 1}},
            "llama3 RoPE with short_factor is not supported",
        ),
        (
            {key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"},
            "norm_topk_prob is None, needed is true or false",
        ),
        (GPT_OSS | {"swiglu_limit": 2.0}, "swiglu_limit is 2, supported: 7"),
        (GPT_OSS | {"layer_types": []}, "layer_types has 0 entries for 24 layers"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window is None: gpt-oss needs both"),
        (QWEN3_MOE | {"num_experts": 0, "num_local_experts": None}, "num_local_experts is None"),
        (QWEN3_MOE | {"num_experts_per_tok": 129}, "cannot have 129 experts of 128"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers is 3, which is not a list"),
        (MISTRAL | {"sliding_window": "wide"}, "sliding_window is 'wide', which is not a positive"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None}, "sliding_window is missing"),
        (QWEN3_5 | {"text_config": None}, "text_config is missing"),
        *(
            (QWEN3_5 | {"text_config": QWEN3_5_TEXT | changed}, message)
            for changed, message in (
                ({"attn_output_gate": False}, "attn_output_gate is false"),
                ({"layer_types": ["full_attention"]}, "for each of 64 layers"),
                ({"layer_types": ["linear_attention"] * 64}, "has no full_attention"),
                ({"linear_num_value_heads": 20}, "(20) must be a multiple of"),
                ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0, which is not a positive"),
            )
        ),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 28 layers",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec_of(config)
    by_the_spec = any(
        text in message for text in ("needs 0 <", "cannot have", "must be a multiple")
    )
    assert by_the_spec or str(error.value).startswith("config.json: ")
    assert message in str(error.value)
