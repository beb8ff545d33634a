"""The names that most Hugging Face decoders give their tensors."""

from __future__ import annotations

from jaxserve.model_spec import ModelSpec
from jaxserve_checkpoints.rules import AnyRule, Element, Ignore, Repeat, Rule


def decoder_rules(spec: ModelSpec) -> tuple[AnyRule, ...]:
    """Tensors of a decoder of plain layers, by the leaves of `decoder.Params` that they fill."""
    block = "model.layers.{layer}."
    attention, mlp = block + "self_attn.", block + "mlp."

    def rule(leaf: str, prefix: str, *names: str, kind: str = "weight") -> Rule:
        return Rule(f"layers.{{layer}}.{leaf}", tuple(f"{prefix}{name}.{kind}" for name in names))

    qkv = ("q_proj", "k_proj", "v_proj")
    rules: list[AnyRule] = [
        Rule("embedding", ("model.embed_tokens.weight",)),
        rule("attention_norm", block, "input_layernorm"),
        rule("qkv", attention, *qkv),
        rule("out", attention, "o_proj"),
        rule("mlp_norm", block, "post_attention_layernorm"),
        Rule("final_norm", ("model.norm.weight",)),
        # A tied head may be stored as well; old exports hold RoPE's frequencies.
        Repeat("lm_head.weight", "model.embed_tokens.weight")
        if spec.tie_embeddings
        else Rule("lm_head", ("lm_head.weight",)),
        Ignore("*.rotary_emb.inv_freq"),
        # GPTQ files have biases of zero where the model has none.
        Ignore("*_proj.bias", only_zeros=True),
        # Scales of a KV cache in fp8: see `startup/kv_scales.py`.
        Ignore("*.self_attn.*k_scale"),
        Ignore("*.self_attn.*v_scale"),
    ]
    if spec.attention.qk_norm:
        rules += [rule(name, attention, name) for name in ("q_norm", "k_norm")]
    if spec.attention.qkv_bias:
        rules.append(rule("qkv_bias", attention, *qkv, kind="bias"))
    if spec.attention.out_bias:
        rules.append(rule("out_bias", attention, "o_proj", kind="bias"))
    dense = spec.feed_forward
    if dense:
        rules.append(rule("gate_up", mlp, "gate_proj", "up_proj"))
        rules.append(rule("down", mlp, "down_proj"))
    if dense and dense.bias:
        rules.append(rule("gate_up_bias", mlp, "gate_proj", "up_proj", kind="bias"))
        rules.append(rule("down_bias", mlp, "down_proj", kind="bias"))
    if spec.experts:
        rules.append(rule("router", mlp, "gate"))
        rules += expert_rules()
    return tuple(rules)


def expert_rules() -> list[Rule]:
    """Matrices of experts: a tensor for each, or all in one, with gate's rows before up's."""
    block, leaf = "model.layers.{layer}.mlp.experts.", "layers.{layer}.experts.{expert}."

    def rule(name: str, fused: str, *names: str) -> Rule:
        together = Rule(leaf + name, (block + fused,), transforms=(Element("expert"),))
        each = tuple(f"{block}{{expert}}.{name}.weight" for name in names)
        return Rule(leaf + name, each, otherwise=together)

    return [
        rule("gate_up", "gate_up_proj", "gate_proj", "up_proj"),
        rule("down", "down_proj", "down_proj"),
    ]


def rows_of(spec: ModelSpec, path: str) -> tuple[int, ...] | None:
    """Returns the rows that each source of a leaf's rule has; None: one source has them all.

    Args:
      path: the leaf's, "layers.3.qkv".
    """
    leaf = path.rpartition(".")[2]
    if leaf in ("qkv", "qkv_bias"):
        return (spec.q_size, spec.kv_size, spec.kv_size)
    if leaf not in ("gate_up", "gate_up_bias"):
        return None
    width = spec.experts.width if spec.experts and ".experts." in path else spec.ffn
    return (width, width)
