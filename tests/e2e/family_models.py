"""Folders with a tiny random checkpoint, tokenizer and template of each family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.layer_spec import ExpertsSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models.registry import spec_of
from jaxserve_checkpoints.resolve import embedded_model
from tests.tokenizer.small_tokenizers import llama3, sentence_piece

LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content }}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- else %}{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}
"""
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_scaling": _LLAMA3_ROPE, "tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"use_sliding_window": False, "sliding_window": 64},
    "Qwen3ForCausalLM": {"head_dim": 32, "tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "MistralForCausalLM": {"head_dim": 32, "sliding_window": 256},
    "Qwen3_5ForConditionalGeneration": {"vision_config": {"depth": 1}},
    "Qwen3_5MoeForConditionalGeneration": {"vision_config": {"depth": 1}},
}
_QWEN3_5_TEXT = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_QWEN3_5_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}


def write(folder: Path, architecture: str) -> Path:
    """Fill the folder with a model of the architecture; contexts of up to 256 tokens."""
    folder.mkdir()
    _write_tokenizer(folder, architecture)
    config = {
        "architectures": [architecture],
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        **CONFIGS[architecture],
    }
    if architecture.startswith("Qwen3_5"):
        config["text_config"] = config | _QWEN3_5_TEXT | _QWEN3_5_EXPERTS
    (folder / "config.json").write_text(json.dumps(config))
    spec = spec_of(config)
    tensors = _tensors(spec) if spec.state is None else _hybrid_tensors(spec)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _write_tokenizer(folder: Path, architecture: str) -> None:
    if architecture.startswith("Qwen"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded_model() / name, folder / name)
        return
    llama = architecture == "LlamaForCausalLM"
    full = llama3() if llama else sentence_piece("first")
    full.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>"] if llama else [])
    full.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|begin_of_text|>" if llama else "<s>",
        "eos_token": "<|eot_id|>" if llama else "</s>",
        "chat_template": LLAMA3_TEMPLATE if llama else MISTRAL_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _tensors(spec: ModelSpec) -> dict[str, np.ndarray]:
    heads, embed = spec.attention, spec.embed
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, embed)}
    shapes["model.norm.weight"] = (embed,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, embed)
    for index in range(spec.num_layers):
        block = f"model.layers.{index}."
        attention, mlp = f"{block}self_attn.", f"{block}mlp."
        for name, size in (("q", heads.q_size), ("k", heads.kv_size), ("v", heads.kv_size)):
            shapes[f"{attention}{name}_proj.weight"] = (size, embed)
            if heads.qkv_bias:
                shapes[f"{attention}{name}_proj.bias"] = (size,)
        if heads.qk_norm:
            shapes |= {f"{attention}{name}_norm.weight": (heads.head_dim,) for name in "qk"}
        shapes[f"{attention}o_proj.weight"] = (embed, heads.q_size)
        blocks = {mlp: spec.ffn}
        if isinstance(own := spec.layers[index].feed_forward, ExpertsSpec):
            shapes[f"{mlp}gate.weight"] = (own.num_experts, embed)
            blocks = {f"{mlp}experts.{each}.": own.width for each in range(own.num_experts)}
        for name, width in blocks.items():
            shapes |= {f"{name}{each}_proj.weight": (width, embed) for each in ("gate", "up")}
            shapes[f"{name}down_proj.weight"] = (embed, width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}{name}.weight"] = (embed,)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in shapes.items()}


def _hybrid_tensors(spec: ModelSpec) -> dict[str, np.ndarray]:
    """As Qwen3.5's files have them, with a tensor of vision and one of MTP. All experts of a layer
    are in one tensor."""
    assert spec.state is not None
    heads, own, embed = spec.attention, spec.state.delta_net, spec.embed
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (spec.vocab_size, embed)}
    shapes["norm"] = (embed,)
    for index, layer in enumerate(spec.layers):
        block = f"layers.{index}."
        if layer.attention is not None:
            part = f"{block}self_attn."
            shapes[f"{part}q_proj"] = (2 * heads.q_size, embed)
            shapes |= {f"{part}{name}_proj": (heads.kv_size, embed) for name in "kv"}
            shapes |= {f"{part}{name}_norm": (heads.head_dim,) for name in "qk"}
            shapes[f"{part}o_proj"] = (embed, heads.q_size)
        else:
            part = f"{block}linear_attn."
            shapes[f"{part}in_proj_qkv"] = (own.channels, embed)
            shapes[f"{part}in_proj_z"] = (own.values, embed)
            shapes |= {f"{part}in_proj_{name}": (own.value_heads, embed) for name in "ab"}
            shapes[f"{part}conv1d"] = (own.channels, 1, own.conv_width)
            shapes |= {f"{part}{name}": (own.value_heads,) for name in ("A_log", "dt_bias")}
            shapes[f"{part}norm"] = (own.value_dim,)
            shapes[f"{part}out_proj"] = (embed, own.values)
        mlp, width = f"{block}mlp.", spec.ffn
        if experts := spec.experts:
            shapes[f"{mlp}gate"] = (experts.num_experts, embed)
            shapes[f"{mlp}shared_expert_gate"] = (1, embed)
            sizes = (experts.num_experts, 2 * experts.width, embed)
            shapes[f"{mlp}experts.gate_up_proj"] = sizes
            shapes[f"{mlp}experts.down_proj"] = (experts.num_experts, embed, experts.width)
            mlp, width = f"{mlp}shared_expert.", experts.shared_width
        shapes |= {f"{mlp}{name}_proj": (width, embed) for name in ("gate", "up")}
        shapes[f"{mlp}down_proj"] = (embed, width)
        shapes |= {f"{block}{name}_layernorm": (embed,) for name in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    tensors = {
        "lm_head.weight": rng.normal(size=(spec.vocab_size, embed)).astype(np.float32),
        "model.visual.patch_embed.proj.weight": np.ones((4, 3), np.float32),
        "mtp.norm.weight": np.ones(embed, np.float32),
    }
    for name, shape in shapes.items():
        plain = name.endswith(("A_log", "dt_bias")) or ".experts." in name
        full = f"model.language_model.{name}" + ("" if plain else ".weight")
        tensors[full] = rng.normal(size=shape, scale=0.3).astype(np.float32)
    return tensors
