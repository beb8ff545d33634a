"""Draft heads in their published layouts, random, and what they compute, in NumPy from the papers'
formulas alone: whole sequences, no pages, float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxserve.model_spec import ModelSpec

type Tensors = dict[str, NDArray[Any]]
type Floats = NDArray[np.floating[Any]]

THETA, EPS = 10_000.0, 1e-6


def sizes(target: ModelSpec, *, layers: int, ffn: int = 40) -> dict[str, Any]:
    """The part of config.json that is a decoder's."""
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.embed,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": target.q_heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "rope_theta": THETA,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def dflash(target: ModelSpec, *, block: int = 4, layers: int = 2) -> dict[str, Any]:
    """z-lab's."""
    return sizes(target, layers=layers) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": block,
        "dflash_config": {"mask_token_id": target.vocab_size - 1, "target_layer_ids": [0, 2]},
        "num_target_layers": target.num_layers,
        "tie_word_embeddings": False,
    }


def dspark(
    target: ModelSpec,
    *,
    block: int = 4,
    layers: int = 2,
    taps: Sequence[int] = (0, 2, 3),
    rank: int = 6,
    confidence: bool = True,
) -> dict[str, Any]:
    """DeepSpec's."""
    return sizes(target, layers=layers) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": block,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": list(taps),
        "num_target_layers": target.num_layers,
        "num_anchors": 8,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": rank > 0,
        "tie_word_embeddings": False,
    }


def eagle3(target: ModelSpec, *, vocab: int = 50) -> dict[str, Any]:
    """AngelSlim's."""
    return sizes(target, layers=1) | {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "draft_vocab_size": vocab,
    }


def speculators(target: ModelSpec, *, vocab: int = 50, **settings: Any) -> dict[str, Any]:
    """EAGLE-3 of vLLM's speculators."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": vocab,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "transformer_layer_config": sizes(target, layers=1),
    } | settings


def block_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Of DFlash or DSpark, by the names in their files."""
    embed, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"layers.{index}", embed)
        norm = (config["head_dim"],)
        for name in ("q_norm", "k_norm"):
            shapes[f"layers.{index}.self_attn.{name}.weight"] = norm
    taps = config.get("target_layer_ids") or config["dflash_config"]["target_layer_ids"]
    shapes |= {
        "fc.weight": (embed, len(taps) * embed),
        "hidden_norm.weight": (embed,),
        "norm.weight": (embed,),
    }
    if rank := config.get("markov_rank"):
        shapes |= {f"markov_head.markov_w{n}.weight": (vocab, rank) for n in (1, 2)}
    if config.get("enable_confidence_head"):
        width = embed + (rank or 0)
        shapes |= {
            "confidence_head.proj.weight": (1, width),
            "confidence_head.proj.bias": (1,),
        }
    if "markov_rank" in config:  # DeepSpec stores what is the target's
        shapes |= {"embed_tokens.weight": (vocab, embed), "lm_head.weight": (vocab, embed)}
    return filled(shapes, seed)


def eagle3_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Of EAGLE-3 in either layout."""
    inner = config.get("transformer_layer_config", config)
    prefix = "midlayer" if inner is config else "layers.0"
    embed, vocab = inner["hidden_size"], config["draft_vocab_size"]
    shapes = layer_shapes(inner, prefix, 2 * embed) | {
        f"{prefix}.hidden_norm.weight": (embed,),
        "fc.weight": (embed, 3 * embed),
        "norm.weight": (embed,),
        "lm_head.weight": (vocab, embed),
    }
    tensors = filled(shapes, seed)
    rng = np.random.default_rng(seed + 1)
    ids = np.sort(rng.choice(inner["vocab_size"], vocab, replace=False))
    listed = np.zeros(inner["vocab_size"], np.bool_)
    listed[ids] = True
    return tensors | {"d2t": (ids - np.arange(vocab)).astype(np.int64), "t2d": listed}


def layer_shapes(config: dict[str, Any], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """`width`: of what queries, keys and values read."""
    embed, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    return {
        f"{prefix}.input_layernorm.weight": (embed,),
        f"{prefix}.post_attention_layernorm.weight": (embed,),
        f"{prefix}.self_attn.q_proj.weight": (q, width),
        f"{prefix}.self_attn.k_proj.weight": (kv, width),
        f"{prefix}.self_attn.v_proj.weight": (kv, width),
        f"{prefix}.self_attn.o_proj.weight": (embed, q),
        f"{prefix}.mlp.gate_proj.weight": (ffn, embed),
        f"{prefix}.mlp.up_proj.weight": (ffn, embed),
        f"{prefix}.mlp.down_proj.weight": (embed, ffn),
    }


def filled(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Norms about 1, matrices that keep the size of what they read."""
    rng = np.random.default_rng(seed)
    found: Tensors = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        values = 1 + 0.3 * noise if len(shape) == 1 else 1.5 * noise / np.sqrt(shape[-1])
        found[name] = values.astype(np.float32)
    return found


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A folder as it is published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


# The formulas.


def rms(x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(x: Floats, positions: Floats) -> Floats:
    """x [tokens, heads, head_dim]; pairs (i, i + head_dim / 2)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    one, two = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def attention(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_]) -> Floats:
    """q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim], seen [queries, keys]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(q.shape[0], -1)


def mlp(t: Tensors, prefix: str, x: Floats) -> Floats:
    gate, up, down = (t[f"{prefix}.mlp.{each}_proj.weight"] for each in ("gate", "up", "down"))
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def heads(t: Tensors, name: str, x: Floats, head_dim: int) -> Floats:
    return (x @ t[f"{name}.weight"].T).reshape(x.shape[0], -1, head_dim)


def block_states(
    config: dict[str, Any], t: Tensors, embedding: Floats, taps: Floats, ids: Sequence[int]
) -> Floats:
    """States after the final norm of a block that begins behind the target's tokens.

    Args:
      taps: [tokens of the target, taps * embed].
      ids: of the block's tokens.
    """
    size, before = config["head_dim"], taps.shape[0]
    t = {name: each.astype(np.float64) for name, each in t.items()}
    context = rms(taps @ t["fc.weight"].T, t["hidden_norm.weight"])
    positions = np.arange(before + len(ids), dtype=np.float64)
    seen = np.ones((len(ids), before + len(ids)), np.bool_)
    x = embedding[list(ids)].astype(np.float64)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        own = f"{layer}.self_attn"
        u = rms(x, t[f"{layer}.input_layernorm.weight"])
        both = np.concatenate([context, u])
        q = rms(heads(t, f"{own}.q_proj", u, size), t[f"{own}.q_norm.weight"])
        k = rms(heads(t, f"{own}.k_proj", both, size), t[f"{own}.k_norm.weight"])
        v = heads(t, f"{own}.v_proj", both, size)
        out = attention(rotated(q, positions[before:]), rotated(k, positions), v, seen)
        x = x + out @ t[f"{own}.o_proj.weight"].T
        x = x + mlp(t, layer, rms(x, t[f"{layer}.post_attention_layernorm.weight"]))
    return rms(x, t["norm.weight"])


def eagle3_passes(
    config: dict[str, Any],
    t: Tensors,
    embedding: Floats,
    taps: Floats,
    ids: Sequence[int],
    drafts: Sequence[int],
) -> Floats:
    """Scores [1 + drafts, draft vocab], after the target's tokens and after each draft.

    Args:
      taps: [tokens, 3 * embed], the target's states.
      ids: the tokens after each of them.
      drafts: the tokens of the later passes.
    """
    inner = config.get("transformer_layer_config", config)
    layer = "midlayer" if inner is config else "layers.0"
    size, own = inner["head_dim"], f"{layer}.self_attn"
    t = {name: each.astype(np.float64) for name, each in t.items()}
    states = taps @ t["fc.weight"].T
    tokens, found = list(ids), list[Floats]()
    for draft in (*drafts, None):
        normed = rms(states, t[f"{layer}.hidden_norm.weight"])
        first = rms(embedding[tokens].astype(np.float64), t[f"{layer}.input_layernorm.weight"])
        x = np.concatenate([first, normed], -1)
        positions = np.arange(len(tokens), dtype=np.float64)
        q = rotated(heads(t, f"{own}.q_proj", x, size), positions)
        k = rotated(heads(t, f"{own}.k_proj", x, size), positions)
        v = heads(t, f"{own}.v_proj", x, size)
        seen = np.tri(len(tokens), dtype=np.bool_)
        y = normed if config.get("norm_before_residual") else states
        y = y + attention(q, k, v, seen) @ t[f"{own}.o_proj.weight"].T
        y = y + mlp(t, layer, rms(y, t[f"{layer}.post_attention_layernorm.weight"]))
        found.append(rms(y[-1], t["norm.weight"]) @ t["lm_head.weight"].T)
        if draft is not None:  # the layer's own state goes on
            states, tokens = np.concatenate([states, y[-1:]]), [*tokens, draft]
    return np.stack(found)
