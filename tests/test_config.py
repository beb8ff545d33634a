"""Settings are read and refused where they are made."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.options import parse_args
from jaxserve.config import Buckets, CacheConfig, ConfigError, SamplingDefaults, SchedulerConfig
from jaxserve.layer_spec import YarnScaling
from jaxserve.models import registry
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.tokenizer import ByteTokenizer
from jaxserve.weights.model_source import find_model
from jaxserve_checkpoints.resolve import embedded_model

GOLDEN = Path(__file__).parent / "golden"

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The published config.json, in the form that transformers 4 writes."""


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in QWEN3_4B.items() if key not in keys}


def error_of(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        registry.spec_of(config)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_published_config_is_the_named_model() -> None:
    assert registry.spec_of(QWEN3_4B) == NAMED_MODELS["qwen3-4b"]


def test_parameter_counts_of_the_named_models() -> None:
    billions = {name: round(spec.num_params / 1e9, 2) for name, spec in NAMED_MODELS.items()}
    assert billions == {
        "qwen3-0.6b": 0.6,
        "qwen3-1.7b": 1.72,
        "qwen3-4b": 4.02,
        "qwen3-8b": 8.19,
        "qwen3-14b": 14.77,
        "qwen3-32b": 32.76,
        "llama-3.1-8b": 8.03,
        "llama-3.2-1b": 1.24,
        "llama-3.2-3b": 3.21,
        "llama-3.3-70b": 70.55,
        "qwen2.5-0.5b": 0.49,
        "qwen2.5-1.5b": 1.54,
        "qwen2.5-3b": 3.09,
        "qwen2.5-7b": 7.62,
        "qwen2.5-14b": 14.77,
        "qwen2.5-32b": 32.76,
        "mistral-7b": 7.25,
        "qwen3-30b-a3b": 30.53,
        "qwen3-coder-30b-a3b": 30.53,
        "gpt-oss-20b": 20.91,
        "gpt-oss-120b": 116.83,
        "qwen3.5-27b": 26.9,
        "qwen3.6-27b": 26.9,
        "qwen3.8-27b": 26.9,
        "qwen3.5-35b-a3b": 34.66,
        "qwen3.6-35b-a3b": 34.66,
    }


def test_derived_sizes() -> None:
    spec = NAMED_MODELS["qwen3-4b"]
    assert (spec.q_size, spec.kv_size) == (4096, 1024)
    assert spec.kv_bytes_per_token(2) == 147_456


def test_rope_parameters_of_transformers_5_mean_the_same() -> None:
    config = without("rope_theta", "rope_scaling")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000}
    assert registry.spec_of(config) == registry.spec_of(QWEN3_4B)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_yarn_is_read_from_either_field(field: str, kind: str) -> None:
    yarn = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = registry.spec_of(QWEN3_4B | {field: yarn})
    assert spec.attention.rope.scaling == YarnScaling(factor=4.0, original_max_position=32768)
    assert spec.attention.rope.theta == 1_000_000.0
    assert spec.attention.rope.scaling.score_scale == 0.1 * math.log(4.0) + 1.0


def test_both_fields_may_say_the_same() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    both = {
        "rope_scaling": yarn | {"type": "yarn"},
        "rope_parameters": yarn | {"rope_type": "yarn", "rope_theta": 1000000},
    }
    expected = registry.spec_of(QWEN3_4B | {"rope_scaling": both["rope_scaling"]})
    assert registry.spec_of(without("rope_theta") | both) == expected


def test_yarn_details_are_kept() -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 2,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16,
        "beta_slow": 2,
        "attention_factor": 0.5,
    }
    spec = registry.spec_of(without("rope_theta") | {"rope_parameters": yarn})
    assert spec.attention.rope.theta == 5000.0
    assert spec.attention.rope.scaling == YarnScaling(
        factor=2.0, original_max_position=1024, beta_fast=16.0, beta_slow=2.0, attention_factor=0.5
    )
    assert spec.attention.rope.scaling.score_scale == 0.5


def test_yarn_scores_as_deepseek_has_them() -> None:
    """transformers' _compute_yarn_parameters: only with both is their ratio taken."""
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    both = registry.spec_of(
        QWEN3_4B | {"rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 0.707}}
    )
    one = registry.spec_of(QWEN3_4B | {"rope_scaling": yarn | {"mscale": 1.0}})
    assert both.attention.rope.scaling is not None and one.attention.rope.scaling is not None
    log = 0.1 * math.log(40.0)
    assert both.attention.rope.scaling.score_scale == pytest.approx((log + 1) / (0.707 * log + 1))
    assert one.attention.rope.scaling.score_scale == log + 1


def test_yarn_without_an_original_length_takes_the_configured_one() -> None:
    spec = registry.spec_of(QWEN3_4B | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    assert spec.attention.rope.scaling == YarnScaling(factor=2.0, original_max_position=40960)


def test_absent_fields_mean_what_transformers_means() -> None:
    keys = ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings", "hidden_act")
    spec = registry.spec_of(without(*keys))
    assert spec.head_dim == 2560 // 32
    assert spec.kv_heads == spec.q_heads == 32
    assert spec.attention.rope.theta == 10_000.0
    assert spec.tie_embeddings is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures is ['MambaForCausalLM']"),
        ({"architectures": None}, "architectures is [], supported: ['Qwen3ForCausalLM'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window is true, but sliding_window is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu', 'gelu_pytorch_tanh'"),
        ({"vocab_size": 0}, "vocab_size is missing or not a positive integer"),
        ({"hidden_size": "2560"}, "hidden_size is missing or not a positive integer"),
        ({"num_attention_heads": 30}, "num_attention_heads (30) must be a multiple of"),
        ({"head_dim": 127}, "head_dim must be even for RoPE, got 127"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope type is 'longrope', supported"),
        ({"rope_scaling": {"type": "yarn"}}, "YaRN needs 'factor'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "attn_factor": 1.2}},
            "YaRN with attn_factor is not supported",
        ),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_type": "default"}},
            "they contradict each other",
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
            },
            "'factor': 2.0}: they contradict each other",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', which is not an object"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": "1"}},
            "attention_factor is '1', which is not a number",
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2,
                    "original_max_position_embeddings": "32k",
                }
            },
            "original_max_position_embeddings is '32k', which is not a number",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "YaRN factor must be at least 1"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, Any], message: str) -> None:
    assert message in error_of(QWEN3_4B | change)


def test_everything_wrong_is_listed_at_once() -> None:
    message = error_of(without("vocab_size", "hidden_size") | {"attention_bias": True})
    for problem in ("attention_bias is true", "vocab_size is missing", "hidden_size is missing"):
        assert problem in message


@pytest.mark.parametrize("variant", ["tied", "untied_sharded", "yarn"])
def test_configs_as_transformers_5_writes_them(variant: str) -> None:
    spec = registry.spec_of(json.loads((GOLDEN / variant / "config.json").read_text()))
    assert (spec.vocab_size, spec.embed, spec.q_heads, spec.kv_heads) == (257, 64, 4, 2)
    assert spec.tie_embeddings == (variant != "untied_sharded")
    yarn = YarnScaling(factor=4.0, original_max_position=64)
    assert spec.attention.rope.scaling == (yarn if variant == "yarn" else None)
    assert spec.attention.rope.theta == (10_000.0 if variant == "yarn" else 1_000_000.0)


def test_generation_config() -> None:
    assert SamplingDefaults.from_hf({}) == SamplingDefaults()
    published = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    expected = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert SamplingDefaults.from_hf(published) == expected
    assert SamplingDefaults.from_hf(published | {"do_sample": False}).temperature == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),  # JSON of Python's has it
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": math.inf}, "top_k is inf"),
        ({"top_k": "20"}, "top_k is '20', which is not a number"),
    ],
)
def test_a_generation_config_that_no_request_could_ask_for_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: {message}"):
        SamplingDefaults.from_hf(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": "wide"}, "head_dim is missing or not a positive integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is missing or not a positive integer"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', which is not a number"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\], which is not a number"),
        ({"rope_theta": math.nan}, "rope_theta is nan, which is not a finite number"),
        ({"rope_theta": 10**400}, "rope_theta is 10+, which is not a finite number"),
        ({"rope_theta": -5.0}, "rope_theta is -5 and must be above 1"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf, which is not a finite number"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is .* not a positive integer up to"),
        ({"hidden_size": 10**30}, "hidden_size is .* not a positive integer up to"),
        ({"vocab_size": True}, "vocab_size is missing or not a positive integer"),
    ],
)
def test_fields_of_wrong_types_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        registry.spec_of(QWEN3_4B | fields)


@pytest.mark.parametrize("sizes", [(), (2, 1), (1, 1), (0, 1)])
def test_buckets_must_increase(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="decode buckets must be increasing and positive"):
        Buckets(decode=sizes, prefill=(64,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"num_pages": 1}, "at least 2 pages"), ({"num_pages": 4, "page_size": 12}, "power of two")],
)
def test_cache_limits(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**arguments)


def test_the_padding_page_is_not_usable() -> None:
    assert CacheConfig(num_pages=5, page_size=16).usable_tokens == 64


def test_scheduler_limits() -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at least 1, got 0"):
        SchedulerConfig(max_num_seqs=1, max_model_len=0, max_num_batched_tokens=1)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(4\) must be at least"):
        SchedulerConfig(max_num_seqs=8, max_model_len=16, max_num_batched_tokens=4)


def test_unset_sampling_fields_come_from_where_the_flag_says(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    for wanted, temperature in (("vllm", 1.0), (str(tmp_path), 0.25)):
        assert find_model(parse_args(["--generation-config", wanted])).sampling_defaults == (
            SamplingDefaults(temperature=temperature)
        )
    with pytest.raises(ConfigError, match=r"generation_config\.json is missing"):
        find_model(parse_args(["--generation-config", str(tmp_path / "nothing")]))


def test_null_in_a_generation_config_is_as_if_it_were_not_there() -> None:
    assert SamplingDefaults.from_hf({"temperature": None, "top_k": None}) == SamplingDefaults()
    assert SamplingDefaults.from_hf({"temperature": 0}).temperature == 0.0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json: cannot be read: EOF"),
        ("tokenizer.json", "{}", "tokenizer.json: cannot be read: Model missing"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object"),
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature is 'hot', which is not"),
        ("generation_config.json", '{"eos_token_id": ["a"]}', r"eos_token_id is \['a'\], no"),
        ("generation_config.json", '{"eos_token_id": 2147483648}', r"is \[2147483648\], no"),
        ("generation_config.json", '{"eos_token_id": [3, -1]}', r"is \[3, -1\], no token ids"),
        ("config.json", "[" * 100_000, "config.json is not valid JSON"),
    ],
)
def test_a_damaged_file_beside_the_weights_is_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    for file in embedded_model().glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_model(parse_args(["--model", str(tmp_path)]))


def test_a_tokenizer_is_what_was_asked_for_and_bytes_only_beside_random_weights(
    tmp_path: Path,
) -> None:
    dummy = ["--model", "qwen3-0.6b", "--load-format", "dummy"]
    assert isinstance(find_model(parse_args(dummy)).tokenizer, ByteTokenizer)
    for line in ([], dummy):
        with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
            find_model(parse_args([*line, "--tokenizer", str(tmp_path)]))


@pytest.mark.parametrize("text", ["[]", "{", '{"chat_template": "x"}'])
def test_template_variables_are_checked_at_the_start(text: str) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--default-chat-template-kwargs", text])
