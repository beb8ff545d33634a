"""Writes tests/golden: tiny random checkpoints, with the logits that transformers computes for
them.

Needs torch and transformers, which jaxserve itself never imports. Each golden.npz names the
versions that made it:

    python -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch==2.13.0 transformers==5.17.0
    /tmp/goldens/bin/python scripts/make_goldens.py [VARIANT ...]

Each variant is a Hugging Face folder (config.json, safetensors) plus golden.npz with

    num_sequences           int32 []
    tokens_{i}              int32 [length_i]
    logits_{i}              float32 [length_i, vocab], at every position
    greedy_prompt_{j}       int32 [length_j]; num_greedy of them
    greedy_tokens_{j}       int32 [64], the greedy continuation
    greedy_margin_{j}       float32 []: smallest lead of the best logit on the way
    versions                str

Everything is computed in float32 from the weights as stored. RoPE follows transformers'
rotate_half: the rotated pairs are (i, i + head_dim / 2), not (2i, 2i + 1).

Default random weights would hide errors. So weights are large (the default gives logits with a
standard deviation of 0.16), norm weights and biases are random, and with YaRN and llama3 sequences
exceed the original context by far. Windows are shorter than most sequences, and not a multiple of a
page.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 257
LENGTHS = (1, 2, 17, 48, 100)
"""Sequence lengths: one token, two, just past a page of 16, and several pages."""
PROMPT_LENGTHS = (1, 16, 37)
NEW_TOKENS = 64
MIN_MARGIN = 2e-3
"""Least margin of greedy tokens. Float32 implementations differ by about 1e-5, which must not
change a token."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
WINDOW = 24


def config(
    kind: type[PretrainedConfig],
    *,
    layers: int,
    tied: bool,
    rope: dict[str, object],
    **family: object,
) -> PretrainedConfig:
    return kind(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
        **family,
    )


def random_model(settings: PretrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """A float32 model whose weights are exact in `dtype`."""
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(".A_log"):  # decays of exp(-0.01) to exp(-4) and more
                value = torch.empty_like(weight).uniform_(0.01, 4, generator=generator).log()
            elif name.endswith(".dt_bias"):
                value = 1.0 + 0.3 * noise
            elif name.endswith("bias") or _is_zero_centred(name, settings):
                value = 0.3 * noise
            elif name.endswith("sinks"):
                value = noise
            elif settings.model_type == "gpt_oss" and weight.ndim == 3:  # [experts, in, out]
                # Large enough that gate and up are clamped.
                value = noise * (3.0 if "gate_up" in name else 0.5) / math.sqrt(weight.shape[1])
            elif weight.ndim == 3:  # [experts, out, in], or of a convolution [channels, 1, width]
                value = noise * 1.5 / math.sqrt(weight.shape[2])
            elif weight.ndim == 1:
                value = 1.0 + 0.3 * noise
            elif "embed_tokens" in name or "lm_head" in name:
                value = noise * (0.35 if settings.tie_word_embeddings else 0.5)
            else:
                value = noise * 1.5 / math.sqrt(weight.shape[1])
            weight.copy_(value.to(dtype).float())
    return model


def _is_zero_centred(name: str, settings: PretrainedConfig) -> bool:
    """Whether a norm adds 1 to its weight: in Qwen3.5 all norms but those inside delta nets."""
    zero_centred = isinstance(settings, Qwen3_5TextConfig | Qwen3_5MoeTextConfig)
    return zero_centred and name.endswith("norm.weight") and "linear_attn" not in name


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Float32 [length, vocab]."""
    return model(torch.tensor(tokens)[None].long(), use_cache=False).logits[0].float().numpy()


def greedy(model: PreTrainedModel, prompt: np.ndarray) -> tuple[np.ndarray, float]:
    """The greedy continuation, without a KV cache, and the smallest margin of a chosen token."""
    tokens, margin = list(prompt), math.inf
    for _ in range(NEW_TOKENS):
        last = logits_of(model, np.array(tokens, np.int32))[-1]
        second, first = np.sort(last)[-2:]
        margin = min(margin, float(first - second))
        tokens.append(int(last.argmax()))
    return np.array(tokens[len(prompt) :], np.int32), margin


def prompt_with_margin(
    model: PreTrainedModel, length: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, float]:
    """A random prompt whose continuation varies and has no near ties."""
    for _ in range(50):
        prompt = generator.integers(0, VOCAB, length, dtype=np.int32)
        tokens, margin = greedy(model, prompt)
        if margin > MIN_MARGIN and len(set(tokens.tolist())) > 8:
            return prompt, tokens, margin
    raise SystemExit(f"no prompt of {length} tokens has a margin above {MIN_MARGIN}")


def golden(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    arrays = {
        "num_sequences": np.int32(len(LENGTHS)),
        "num_greedy": np.int32(len(PROMPT_LENGTHS)),
        "versions": np.array(f"torch {torch.__version__}, transformers {transformers.__version__}"),
    }
    for i, length in enumerate(LENGTHS):
        tokens = generator.integers(0, VOCAB, length, dtype=np.int32)
        arrays |= {f"tokens_{i}": tokens, f"logits_{i}": logits_of(model, tokens)}
    for j, length in enumerate(PROMPT_LENGTHS):
        prompt, tokens, margin = prompt_with_margin(model, length, generator)
        arrays |= {
            f"greedy_prompt_{j}": prompt,
            f"greedy_tokens_{j}": tokens,
            f"greedy_margin_{j}": np.float32(margin),
        }
    return arrays


def write(
    folder: Path, settings: PretrainedConfig, *, dtype: torch.dtype, shard_size: str, seed: int
) -> None:
    model = random_model(settings, seed, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    arrays = golden(model, seed)
    np.savez_compressed(folder / "golden.npz", **arrays)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in folder.iterdir())
    spread = arrays["logits_4"].std()
    margin = min(float(arrays[f"greedy_margin_{j}"]) for j in range(len(PROMPT_LENGTHS)))
    print(f"{folder.name}: {size / 1e3:.0f} kB, logit std {spread:.2f}, margin {margin:.4f}")


def variants() -> dict[str, dict[str, Any]]:
    """Arguments of `write`, by name of the folder."""
    bf16, whole = torch.bfloat16, "1GB"
    qwen3 = {"kind": Qwen3Config, "head_dim": 32}
    plain = {"rope": DEFAULT_ROPE}
    mistral = config(
        MistralConfig, layers=2, tied=False, head_dim=32, sliding_window=WINDOW, **plain
    )
    qwen2 = config(
        Qwen2Config,
        layers=3,
        tied=True,
        use_sliding_window=True,
        max_window_layers=2,
        sliding_window=WINDOW,
        **plain,
    )
    kinds = ["sliding_attention", "full_attention"] * 2
    alternating = config(
        Qwen3Config,
        layers=4,
        tied=True,
        head_dim=32,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=kinds,
        **plain,
    )
    llama = config(LlamaConfig, layers=2, tied=False, rope=LLAMA3, head_dim=24)
    linear = config(LlamaConfig, layers=2, tied=True, rope=LINEAR)
    switched_on = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}
    biases = config(LlamaConfig, layers=2, tied=True, **plain, **switched_on)
    experts = {
        "kind": Qwen3MoeConfig, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 48, **plain,
    }  # fmt: skip
    mixed = config(
        **experts, layers=4, tied=False, norm_topk_prob=True, mlp_only_layers=[2],
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2,
    )  # fmt: skip
    stepped = config(**experts, layers=4, tied=True, norm_topk_prob=False, decoder_sparse_step=2)
    gpt_oss = config(
        GptOssConfig, layers=4, tied=False, head_dim=24, num_local_experts=8,
        num_experts_per_tok=3, sliding_window=WINDOW,
        rope=YARN | {"factor": 8.0, "truncate": False},
    )  # fmt: skip
    every = config(**experts, layers=2, tied=False, norm_topk_prob=True)
    delta_nets = {
        "layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }
    hybrid = config(Qwen3_5TextConfig, tied=True, **delta_nets)
    hybrid_moe = config(
        Qwen3_5MoeTextConfig, tied=False, **delta_nets, num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=40, shared_expert_intermediate_size=48,
    )  # fmt: skip
    settings = {
        "tied": (config(**qwen3, layers=2, tied=True, **plain), bf16, whole),
        "untied_sharded": (config(**qwen3, layers=3, tied=False, **plain), bf16, "150KB"),
        "yarn": (config(**qwen3, layers=2, tied=True, rope=YARN), torch.float32, whole),
        "llama": (llama, bf16, whole),
        "llama_linear": (linear, bf16, whole),
        "qwen2": (qwen2, bf16, whole),
        "mistral": (mistral, bf16, "150KB"),
        "llama_biases": (biases, bf16, whole),
        "alternating": (alternating, bf16, whole),
        "qwen3_moe": (every, bf16, whole),
        "qwen3_moe_mixed": (mixed, bf16, "150KB"),
        "qwen3_moe_stepped": (stepped, bf16, whole),
        "gpt_oss": (gpt_oss, bf16, whole),
        "hybrid": (hybrid, bf16, whole),
        "hybrid_moe": (hybrid_moe, bf16, whole),
    }
    return {
        name: {"settings": each, "dtype": dtype, "shard_size": shard_size, "seed": seed}
        for seed, (name, (each, dtype, shard_size)) in enumerate(settings.items(), 1)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "tests" / "golden"
    parser.add_argument("--out", type=Path, default=default)
    known = variants()
    parser.add_argument("variant", nargs="*", help=f"of {', '.join(known)}; all, if none is named")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.variant or known:
        write(args.out / name, **known[name])


if __name__ == "__main__":
    main()
