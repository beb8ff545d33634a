"""The tensor names that most Hugging Face decoders use."""

from __future__ import annotations

from jaxserve.model_spec import ModelSpec
from jaxserve_checkpoints.rules import (
    AnyRule,
    Element,
    Ignore,
    Reorder,
    Repeat,
    Rule,
    Transform,
    Transpose,
)


def decoder_rules(spec: ModelSpec) -> tuple[AnyRule, ...]:
    """Returns the tensors of a decoder of plain layers, by the leaves of `decoder.Params`."""
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
        # Files may also store a tied head; old exports hold RoPE's frequencies.
        Repeat("lm_head.weight", "model.embed_tokens.weight")
        if spec.tie_embeddings
        else Rule("lm_head", ("lm_head.weight",)),
        Ignore("*.rotary_emb.inv_freq"),
        # GPTQ files have zero biases for models without biases.
        Ignore("*_proj.bias", only_zeros=True),
        # Scales of an fp8 KV cache: see `startup/kv_scales.py`.
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
    if spec.attention.sinks:
        rules.append(Rule("layers.{layer}.sinks", (attention + "sinks",)))
    if spec.experts:
        rules += expert_rules(spec)
    return tuple(rules)


def expert_rules(spec: ModelSpec) -> list[Rule]:
    """Returns the rules of routers and experts. A file has separate tensors for each expert, or one
    tensor for all experts of a layer. Files with biases follow gpt-oss: matrices are transposed
    unless they are MXFP4, and rows of gate and up alternate."""
    assert spec.experts
    block, leaf = "model.layers.{layer}.mlp.", "layers.{layer}."

    def rule(leaf: str, source: str, *transforms: Transform, otherwise: Rule | None = None) -> Rule:
        return Rule(leaf, (block + source,), transforms=transforms, otherwise=otherwise)

    def matrix(name: str, *names: str) -> Rule:
        each = tuple(f"{block}experts.{{expert}}.{name}.weight" for name in names)
        fused = f"experts.{name}_proj"
        path = f"{leaf}experts.{{expert}}.{name}"
        if not spec.experts or not spec.experts.bias:
            return Rule(path, each, otherwise=rule(path, fused, Element("expert")))
        order = (Reorder(2),) if name == "gate_up" else ()
        quantized = rule(path, f"{fused}.weight", Element("expert"), *order)
        return rule(path, fused, Element("expert"), Transpose(), *order, otherwise=quantized)

    rules = [matrix("gate_up", "gate_proj", "up_proj"), matrix("down", "down_proj")]
    router = "router" if spec.experts.bias else "gate"
    scores = ("gate.weight", "shared_expert_gate.weight")
    if spec.experts.shared_width:
        rules.append(Rule(leaf + "router", tuple(block + each for each in scores)))
        rules += _shared_rules(f"{block}shared_expert.", f"{leaf}shared.")
    else:
        rules.append(rule(leaf + "router", f"{router}.weight"))
    if spec.experts.router_bias:
        rules.append(rule(leaf + "router_bias", f"{router}.bias"))
    if spec.experts.bias:
        gate_up = rule(leaf + "gate_up_bias", "experts.gate_up_proj_bias", Reorder(2, axis=1))
        rules += [gate_up, rule(leaf + "down_bias", "experts.down_proj_bias")]
    return rules


def _shared_rules(block: str, leaf: str) -> list[Rule]:
    gate_up = (f"{block}gate_proj.weight", f"{block}up_proj.weight")
    return [Rule(f"{leaf}gate_up", gate_up), Rule(f"{leaf}down", (f"{block}down_proj.weight",))]


def rows_of(spec: ModelSpec, path: str) -> tuple[int, ...] | None:
    """Returns the number of rows of each source of a leaf's rule; None: there is one source.

    Args:
      path: path of the leaf, such as "layers.3.qkv".
    """
    leaf = path.rpartition(".")[2]
    if leaf in ("qkv", "qkv_bias"):
        return (spec.q_size * (1 + spec.attention.gated), spec.kv_size, spec.kv_size)
    own, experts = spec.state and spec.state.delta_net, spec.experts
    if own and leaf in ("in_proj", "in_gates"):
        many = leaf == "in_proj"
        return (own.channels, own.values) if many else (own.value_heads, own.value_heads)
    if experts and experts.shared_width and leaf == "router":
        return (experts.num_experts, 1)
    if leaf not in ("gate_up", "gate_up_bias"):
        return None
    width = spec.ffn
    if experts and (".experts." in path or ".shared." in path):
        width = experts.width if ".experts." in path else experts.shared_width
    return (width, width)
