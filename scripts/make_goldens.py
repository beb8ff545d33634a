"""Write tests/golden: tiny random Qwen3 checkpoints with the logits transformers computes for them.

Needs torch and transformers, which jaxserve itself never imports; the committed files were made
with the versions that each golden.npz names:

    python -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch==2.13.0 transformers==5.17.0
    /tmp/goldens/bin/python scripts/make_goldens.py

Each variant is a Hugging Face folder (config.json, safetensors) plus golden.npz with

    num_sequences           int32 []
    tokens_{i}              int32 [length_i]
    logits_{i}              float32 [length_i, vocab], at every position
    greedy_prompt_{j}       int32 [length_j]; num_greedy of them
    greedy_tokens_{j}       int32 [64], the greedy continuation
    greedy_margin_{j}       float32 []: smallest lead of the best logit on the way
    versions                str

All computed in float32 from the weights exactly as stored. RoPE is transformers' rotate_half
convention: the rotated pairs are (i, i + head_dim / 2), not (2i, 2i + 1). Three things make errors
visible that default random weights hide: large weights (the default gives logits of deviation
0.16), random norm weights, and, for YaRN, sequences far beyond the original context.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 257
LENGTHS = (1, 2, 17, 48, 100)
"""One token, two, just past a page of 16, and several pages."""
PROMPT_LENGTHS = (1, 16, 37)
NEW_TOKENS = 64
MIN_MARGIN = 2e-3
"""A float32 implementation differs by about 1e-5: greedy tokens must not depend on that."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}


def config(*, layers: int, tied: bool, rope: dict[str, object]) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )


def random_model(settings: Qwen3Config, seed: int, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """Float32 model whose weights are representable in `dtype`."""
    model = Qwen3ForCausalLM(settings).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                value = 1.0 + 0.3 * noise
            elif "embed_tokens" in name or "lm_head" in name:
                value = noise * (0.35 if settings.tie_word_embeddings else 0.5)
            else:
                value = noise * 1.5 / math.sqrt(weight.shape[1])
            weight.copy_(value.to(dtype).float())
    return model


@torch.no_grad()
def logits_of(model: Qwen3ForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Float32 [length, vocab]."""
    return model(torch.tensor(tokens)[None].long(), use_cache=False).logits[0].float().numpy()


def greedy(model: Qwen3ForCausalLM, prompt: np.ndarray) -> tuple[np.ndarray, float]:
    """Continuation without a KV cache, and the smallest lead of a chosen token."""
    tokens, margin = list(prompt), math.inf
    for _ in range(NEW_TOKENS):
        last = logits_of(model, np.array(tokens, np.int32))[-1]
        second, first = np.sort(last)[-2:]
        margin = min(margin, float(first - second))
        tokens.append(int(last.argmax()))
    return np.array(tokens[len(prompt) :], np.int32), margin


def prompt_with_margin(
    model: Qwen3ForCausalLM, length: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, float]:
    """A random prompt whose continuation varies and is nowhere close to a tie."""
    for _ in range(50):
        prompt = generator.integers(0, VOCAB, length, dtype=np.int32)
        tokens, margin = greedy(model, prompt)
        if margin > MIN_MARGIN and len(set(tokens.tolist())) > 8:
            return prompt, tokens, margin
    raise SystemExit(f"no prompt of {length} tokens has a margin above {MIN_MARGIN}")


def golden(model: Qwen3ForCausalLM, seed: int) -> dict[str, np.ndarray]:
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
    folder: Path, settings: Qwen3Config, *, dtype: torch.dtype, shard_size: str, seed: int
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "tests" / "golden"
    parser.add_argument("--out", type=Path, default=default)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    plain = {"rope": DEFAULT_ROPE}
    bf16, whole = torch.bfloat16, "1GB"
    write(out / "tied", config(layers=2, tied=True, **plain), dtype=bf16, shard_size=whole, seed=1)
    untied = config(layers=3, tied=False, **plain)
    write(out / "untied_sharded", untied, dtype=bf16, shard_size="150KB", seed=2)
    yarn = config(layers=2, tied=True, rope=YARN)
    write(out / "yarn", yarn, dtype=torch.float32, shard_size=whole, seed=3)


if __name__ == "__main__":
    main()
