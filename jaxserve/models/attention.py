"""Which models need more before attention than the attention kernels do: gates, RoPE on a part of
each head, norms with float32 weights."""

from __future__ import annotations

from jaxserve.model_spec import ModelSpec
from jaxserve_kernels.gated_attention import PrologueHeads


def has_prologue(spec: ModelSpec) -> bool:
    """Returns whether attention has a prologue: see `gated_attention`."""
    attention = spec.attention
    return attention.gated or attention.rope.fraction < 1 or spec.zero_centred_norms


def prologue_heads(spec: ModelSpec) -> PrologueHeads:
    """Returns the heads of a model's attention."""
    own = spec.attention
    return PrologueHeads(own.q_heads, own.kv_heads, own.head_dim, own.gated)
