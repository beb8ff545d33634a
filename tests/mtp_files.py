"""The tensors of a checkpoint for multi-token prediction, random, and what they compute, in NumPy
from the formulas alone: whole sequences, no pages, float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.layer_spec import ExpertsSpec
from jaxserve.model_spec import ModelSpec
from tests.draft_files import Floats, Tensors, attention, filled

LAYER = "mtp.layers.0"


def mtp_tensors(spec: ModelSpec, seed: int = 0) -> Tensors:
    """As published: norms less 1, the experts of the layer in two tensors."""
    own, block, embed = spec.attention, spec.layers[0].feed_forward, spec.embed
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (embed, 2 * embed),
        "mtp.pre_fc_norm_embedding.weight": (embed,),
        "mtp.pre_fc_norm_hidden.weight": (embed,),
        "mtp.norm.weight": (embed,),
        f"{LAYER}.input_layernorm.weight": (embed,),
        f"{LAYER}.post_attention_layernorm.weight": (embed,),
        f"{LAYER}.self_attn.q_norm.weight": (own.head_dim,),
        f"{LAYER}.self_attn.k_norm.weight": (own.head_dim,),
        f"{LAYER}.self_attn.q_proj.weight": (2 * spec.q_size, embed),
        f"{LAYER}.self_attn.k_proj.weight": (spec.kv_size, embed),
        f"{LAYER}.self_attn.v_proj.weight": (spec.kv_size, embed),
        f"{LAYER}.self_attn.o_proj.weight": (embed, spec.q_size),
    }

    def dense(prefix: str, width: int) -> None:
        for name in ("gate", "up"):
            shapes[f"{prefix}.{name}_proj.weight"] = (width, embed)
        shapes[f"{prefix}.down_proj.weight"] = (embed, width)

    if isinstance(block, ExpertsSpec):
        every, width = block.num_experts, block.width
        shapes[f"{LAYER}.mlp.experts.gate_up_proj"] = (every, 2 * width, embed)
        shapes[f"{LAYER}.mlp.experts.down_proj"] = (every, embed, width)
        shapes[f"{LAYER}.mlp.gate.weight"] = (every, embed)
        shapes[f"{LAYER}.mlp.shared_expert_gate.weight"] = (1, embed)
        dense(f"{LAYER}.mlp.shared_expert", block.shared_width)
    else:
        dense(f"{LAYER}.mlp", block.width)
    tensors = filled(shapes, seed)
    return {name: each - (each.ndim == 1) for name, each in tensors.items()}


def mtp_passes(
    spec: ModelSpec,
    t: Tensors,
    embedding: Floats,
    states: Floats,
    ids: Sequence[int],
    drafts: Sequence[int] = (),
) -> Floats:
    """States after the head's norm [1 + drafts, embed], after the model's tokens and after each
    draft.

    Args:
      states: [tokens, embed], the model's, after its final norm.
      ids: the tokens after each of them.
      drafts: the tokens of the later passes.
    """
    t = {name: each.astype(np.float64) for name, each in t.items()}
    tokens, found = list(ids), list[Floats]()
    for draft in (*drafts, None):
        embedded = norm(embedding[tokens].astype(np.float64), t["mtp.pre_fc_norm_embedding.weight"])
        hidden = norm(states, t["mtp.pre_fc_norm_hidden.weight"])
        x = np.concatenate([embedded, hidden], -1) @ t["mtp.fc.weight"].T
        x = x + _gated_attention(spec, t, norm(x, t[f"{LAYER}.input_layernorm.weight"]))
        x = x + _feed_forward(spec, t, norm(x, t[f"{LAYER}.post_attention_layernorm.weight"]))
        found.append(norm(x[-1], t["mtp.norm.weight"]))
        if draft is not None:  # the head's own state goes on
            states, tokens = np.concatenate([states, found[-1][None]]), [*tokens, draft]
    return np.stack(found)


def norm(x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight)


def _gated_attention(spec: ModelSpec, t: Tensors, x: Floats) -> Floats:
    own, size = spec.attention, spec.head_dim

    def heads(name: str, dim: int = size) -> Floats:
        return (x @ t[f"{LAYER}.self_attn.{name}_proj.weight"].T).reshape(len(x), -1, dim)

    both = heads("q", 2 * size)  # of each head the query, then the gate
    q = norm(both[..., :size], t[f"{LAYER}.self_attn.q_norm.weight"])
    k = norm(heads("k"), t[f"{LAYER}.self_attn.k_norm.weight"])
    half = int(own.rope.fraction * size) // 2
    angles = np.arange(len(x))[:, None, None] * own.rope.theta ** (-np.arange(half) / half)

    def rotated(each: Floats) -> Floats:
        one, two, rest = each[..., :half], each[..., half : 2 * half], each[..., 2 * half :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cos - two * sin, two * cos + one * sin, rest], -1)

    out = attention(rotated(q), rotated(k), heads("v"), np.tri(len(x), dtype=np.bool_))
    gate = both[..., size:].reshape(len(x), -1)
    return (out / (1 + np.exp(-gate))) @ t[f"{LAYER}.self_attn.o_proj.weight"].T


def _swiglu(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def _feed_forward(spec: ModelSpec, t: Tensors, x: Floats) -> Floats:
    block = spec.layers[0].feed_forward

    def dense(prefix: str) -> Floats:
        return _swiglu(x, *(t[f"{prefix}.{each}_proj.weight"] for each in ("gate", "up", "down")))

    if not isinstance(block, ExpertsSpec):
        return dense(f"{LAYER}.mlp")
    scores = x @ t[f"{LAYER}.mlp.gate.weight"].T
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    shared = 1 / (1 + np.exp(-x @ t[f"{LAYER}.mlp.shared_expert_gate.weight"].T))
    total = shared * dense(f"{LAYER}.mlp.shared_expert")
    for row, each in enumerate(chances):
        chosen = np.argsort(-each)[: block.top_k]
        for expert in chosen:
            gate_up = t[f"{LAYER}.mlp.experts.gate_up_proj"][expert]
            down = t[f"{LAYER}.mlp.experts.down_proj"][expert]
            weight = each[expert] / each[chosen].sum()
            total[row] += weight * _swiglu(x[row : row + 1], *np.split(gate_up, 2), down)[0]
    return total
