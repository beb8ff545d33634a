"""Qwen3.5, 3.6 and 3.8: delta nets, and gated attention in every fourth layer. Text only.

There are two kinds of files. Models with vision have nested text settings, and vision tensors that
are left out. Text-only models (`qwen3_5_text`) do not nest their settings. Feed-forwards are dense
here; `qwen3_5_moe` has experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.layer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    Rope,
)
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.hf_config import Config, count, dense_spec, refused
from jaxserve.models.tensor_names import decoder_rules
from jaxserve_checkpoints.rules import AnyRule, Ignore, Offset, Repeat, Rule, Squeeze

ARCHITECTURE = "Qwen3_5ForConditionalGeneration"

_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "final_norm")
"""Leaves whose tensors are zero-centred."""
_CENTRED = (Offset(1.0),)
_FULL, _LINEAR = "full_attention", "linear_attention"


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json with a `text_config`; see `registry.spec_of`."""
    return text_spec(text_config(config), ARCHITECTURE)


def text_config(config: Config) -> Config:
    """Returns the settings of the text part of a model with vision.

    Raises:
      ConfigError: there are none.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config is missing or not an object")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "tie_word_embeddings": tied}


def text_spec(config: Config, architecture: str, experts: ExpertsSpec | None = None) -> ModelSpec:
    """Returns the model of the text part's settings.

    Args:
      experts: replace the dense feed-forwards. The config has an `intermediate_size` nevertheless.
    """
    problems = refused(config, "attention_bias", "Qwen3.5 attention has no bias")
    if config.get("attn_output_gate") is False:
        problems.append("attn_output_gate is false, supported: true")
    plain = dense_spec(
        config,
        architecture,
        problems=problems,
        qk_norm=True,
        gated=True,
        partial_rope=0.25,
        max_position=32_768,
    )
    delta_net = DeltaNetSpec(
        key_heads=count(config, "linear_num_key_heads", 16),
        value_heads=count(config, "linear_num_value_heads", 32),
        key_dim=count(config, "linear_key_head_dim", 128),
        value_dim=count(config, "linear_value_head_dim", 128),
        conv_width=count(config, "linear_conv_kernel_dim", 4),
    )
    feed_forward = experts or plain.layers[0].feed_forward
    full = LayerSpec(attention=plain.attention, feed_forward=feed_forward)
    recurrent = LayerSpec(delta_net=delta_net, feed_forward=feed_forward)
    kinds = _layer_types(config, plain.num_layers)
    layers = (full if kind == _FULL else recurrent for kind in kinds)
    return replace(plain, layers=tuple(layers), zero_centred_norms=True)


def _layer_types(config: Config, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        every = count(config, "full_attention_interval", 4)
        return [_LINEAR if (index + 1) % every else _FULL for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {_FULL, _LINEAR}:
        raise ConfigError(
            f"config.json: layer_types must name one of {_FULL} and {_LINEAR} for each of "
            f"{layers} layers"
        )
    if _FULL not in kinds:
        raise ConfigError(f"config.json: layer_types has no {_FULL}; jaxserve needs at least one")
    return kinds


def rules(spec: ModelSpec) -> tuple[AnyRule, ...]:
    """Returns the tensors of the text part; see `registry.rules`."""
    nested = spec.architecture.endswith("ForConditionalGeneration")
    prefix = "model.language_model." if nested else "model."
    found: list[AnyRule] = []
    for each in decoder_rules(spec):
        if isinstance(each, Rule):
            each = _renamed(each, prefix)
            if each.leaf.rpartition(".")[2] in _NORMS:
                each = replace(each, transforms=_CENTRED)
        elif isinstance(each, Repeat):
            each = Repeat(each.tensor, _prefixed(each.original, prefix))
        found.append(each)
    found += [Ignore("mtp.*"), *([Ignore("model.visual.*")] if nested else [])]
    return (*found, *_delta_net_rules(f"{prefix}layers.{{layer}}.linear_attn."))


def mtp_body(spec: ModelSpec) -> ModelSpec:
    """See `registry.mtp_body`."""
    full = next(layer for layer in spec.layers if layer.attention is not None)
    return replace(spec, layers=(full,))


def mtp_rules(spec: ModelSpec) -> tuple[AnyRule, ...]:
    """See `registry.mtp_rules`."""
    found: list[AnyRule] = [
        Rule("fc", ("mtp.fc.weight",)),
        Rule("embedding_norm", ("mtp.pre_fc_norm_embedding.weight",), transforms=_CENTRED),
        Rule("hidden_norm", ("mtp.pre_fc_norm_hidden.weight",), transforms=_CENTRED),
        Ignore("model.*"),
        Ignore("lm_head.*"),
    ]
    for each in decoder_rules(mtp_body(spec)):
        if isinstance(each, Rule) and each.leaf not in ("embedding", "lm_head"):
            centred = each.leaf.rpartition(".")[2] in _NORMS
            each = _renamed(each, "mtp.")
            found.append(replace(each, transforms=_CENTRED) if centred else each)
        elif isinstance(each, Ignore):
            found.append(each)
    return tuple(found)


def _renamed(rule: Rule, prefix: str) -> Rule:
    names = tuple(_prefixed(name, prefix) for name in rule.sources)
    otherwise = rule.otherwise and _renamed(rule.otherwise, prefix)
    return replace(rule, sources=names, otherwise=otherwise)


def _prefixed(name: str, prefix: str) -> str:
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _delta_net_rules(block: str) -> list[AnyRule]:
    def rule(leaf: str, *names: str, squeeze: bool = False) -> Rule:
        sources = tuple(block + name for name in names)
        transforms = (Squeeze(1),) if squeeze else ()
        return Rule(f"layers.{{layer}}.delta.{leaf}", sources, transforms=transforms)

    return [
        rule("in_proj", "in_proj_qkv.weight", "in_proj_z.weight"),
        rule("in_gates", "in_proj_a.weight", "in_proj_b.weight"),
        rule("conv", "conv1d.weight", squeeze=True),
        rule("a_log", "A_log"),
        rule("dt_bias", "dt_bias"),
        rule("norm", "norm.weight"),
        rule("out", "out_proj.weight"),
    ]


def published(
    architecture: str,
    embed: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    feed_forward: FeedForwardSpec | ExpertsSpec,
) -> ModelSpec:
    """Returns a model with the shapes of a published config.json. `heads`: query and key heads."""
    rope = Rope(theta=1e7, fraction=0.25)
    attention = AttentionSpec(
        q_heads=heads[0], kv_heads=heads[1], head_dim=256, rope=rope, qk_norm=True, gated=True
    )
    delta_net = DeltaNetSpec(
        key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, conv_width=4
    )
    recurrent = LayerSpec(delta_net=delta_net, feed_forward=feed_forward)
    full = LayerSpec(attention=attention, feed_forward=feed_forward)
    return ModelSpec(
        architecture=architecture,
        vocab_size=248_320,
        embed=embed,
        layers=(recurrent, recurrent, recurrent, full) * (layers // 4),
        max_position=262_144,
        tie_embeddings=False,
        zero_centred_norms=True,
    )


_27B = published(ARCHITECTURE, 5120, 64, (24, 4), 48, FeedForwardSpec(width=17_408))
NAMED = {
    f"qwen{version}-27b": NamedModel(f"Qwen/Qwen{version}-27B", _27B)
    for version in ("3.5", "3.6", "3.8")
}
