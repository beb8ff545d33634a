"""Each family: its published config.json, what of it makes a difference, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import ConfigError
from jaxserve.model_spec import LinearScaling, Llama3Scaling, Rope
from jaxserve.models.decoder import abstract
from jaxserve.models.registry import ARCHITECTURES, NAMED_MODELS, rules, spec_of
from jaxserve_checkpoints.naming import leaf_parts
from jaxserve_checkpoints.rules import Rule

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA, "llama-3.1-8b"), (QWEN2, "qwen2.5-7b"), (MISTRAL, "mistral-7b")],
)
def test_published_configs_are_the_named_models(config: dict[str, Any], name: str) -> None:
    assert spec_of(config) == NAMED_MODELS[name]


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_the_rules_of_a_named_model_fill_each_of_its_leaves_once(name: str) -> None:
    spec = NAMED_MODELS[name]
    leaves = {part.owner for part in leaf_parts(abstract(spec, "bfloat16", stacked=True))}
    filled = [rule.leaf.replace(".{layer}", "") for rule in rules(spec) if isinstance(rule, Rule)]
    assert sorted(filled) == sorted(leaves)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_takes_every_kind_of_rope(architecture: str) -> None:
    config = LLAMA | {"architectures": [architecture]}
    assert isinstance(spec_of(config).attention.rope.scaling, Llama3Scaling)
    linear = spec_of(config | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.attention.rope == Rope(theta=5e5, scaling=LinearScaling(factor=2.0))


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.attention.window for layer in spec_of(config).layers]


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
        (MISTRAL | {"sliding_window": "wide"}, "sliding_window is 'wide', which is not a positive"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None}, "sliding_window is missing"),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 28 layers",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec_of(config)
    assert str(error.value).startswith("config.json: ") or "needs 0 <" in message
    assert message in str(error.value)
