"""Published draft heads: how their config.json becomes a DraftSpec, and which tensors they have.
Without jax.

Layouts: z-lab's DFlash; DeepSpec's DSpark, and DFlash in the same layout; EAGLE-3 as its authors
and AngelSlim publish it; EAGLE-3 of vLLM's speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.models.drafts.spec import BlockDraft, ConfidenceInput, Eagle3Draft
from jaxserve.models.drafts.spec import mismatches as mismatches_of
from jaxserve.models.hf_config import dense_spec
from jaxserve_checkpoints.rules import AnyRule, Ignore, Rule

type Config = Mapping[str, Any]

type HeadSpec = BlockDraft | Eagle3Draft

DSPARK, DFLASH = "Qwen3DSparkModel", "DFlashDraftModel"
"""Names in `architectures`."""

_MAX_POSITION = 40_960
"""Where a file does not say."""


def spec_of(config: Config, target: ModelSpec) -> HeadSpec:
    """The draft head of a `config.json`, for a target model.

    Raises:
      ConfigError: no draft head, one of another kind, or all reasons why it cannot be computed or
        does not fit the target.
    """
    names = list(config.get("architectures") or [])
    if config.get("speculators_model_type") is not None:
        read = _speculators
    elif DSPARK in names:
        read = _dspark
    elif "dflash_config" in config or DFLASH in names:
        read = _dflash
    elif "draft_vocab_size" in config:
        read = _eagle3
    else:
        raise ConfigError(
            f"config.json: architectures is {names}, which is no draft head; known are {DSPARK}, "
            f"{DFLASH}, and EAGLE-3, whose file has draft_vocab_size or speculators_model_type"
        )
    problems: list[str] = []
    draft = read(config, target, problems)
    if draft is not None:
        problems += mismatches_of(draft, target)
    if draft is None or problems:
        raise ConfigError("config.json: " + "; ".join(problems))
    return draft


def _body(config: Config, name: str, problems: list[str], **options: Any) -> ModelSpec | None:
    """The layers of a head; None, and more problems, if they cannot be computed."""
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            problems.append(f"{key} is true, which is not supported in a draft head")
    try:
        return dense_spec(config, name, max_position=_MAX_POSITION, **options)
    except ConfigError as error:
        problems.append(str(error).removeprefix("config.json: "))
        return None


def _count(config: Config, key: str, problems: list[str], least: int = 1) -> int:
    """An integer; 0, and a problem, if there is none of at least `least`."""
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    problems.append(f"{key} is {value!r:.40}, needed is an integer of at least {least}")
    return 0


def _layers(config: Config, key: str, problems: list[str]) -> tuple[int, ...]:
    """A list of numbers of layers; empty, and a problem, if there is none."""
    value = config.get(key)
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return tuple(value)
    problems.append(f"{key} is {value!r:.40}, needed are numbers of layers")
    return ()


def _dflash(config: Config, target: ModelSpec, problems: list[str]) -> BlockDraft | None:
    body = _body(config, DFLASH, problems, qk_norm=True)
    nested = config.get("dflash_config") or {}
    block = _count(config, "block_size", problems, least=2)
    mask = _count(nested, "mask_token_id", problems, least=0)
    taps = _layers(nested, "target_layer_ids", problems)
    if body is None:
        return None
    return BlockDraft(body=body, taps=taps, block=block, mask_token=mask, predicts_next=False)


def _dspark(config: Config, target: ModelSpec, problems: list[str]) -> BlockDraft | None:
    body = _body(config, DSPARK, problems, qk_norm=True)
    rank = _count(config, "markov_rank", problems, least=0)
    kind = config.get("markov_head_type")
    if rank and kind != "vanilla":
        problems.append(f"markov_head_type is {kind!r}, supported: 'vanilla'")
    confidence: ConfidenceInput | None = None
    if config.get("enable_confidence_head"):
        both = bool(config.get("confidence_head_with_markov"))
        confidence = "hidden and markov" if both else "hidden"
        if both and not rank:
            problems.append("confidence_head_with_markov is true, but markov_rank is 0")
    block = _count(config, "block_size", problems)
    mask = _count(config, "mask_token_id", problems, least=0)
    taps = _layers(config, "target_layer_ids", problems)
    if body is None:
        return None
    return BlockDraft(
        body=body,
        taps=taps,
        block=block,
        mask_token=mask,
        predicts_next=True,
        markov_rank=rank,
        confidence=confidence,
    )


def _eagle3(config: Config, target: ModelSpec, problems: list[str]) -> Eagle3Draft | None:
    eagle = config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        problems.append("use_aux_hidden_state is false, supported are heads with three taps")
    return _eagle3_of(config, config, eagle, target, problems, prefix="midlayer")


def _speculators(config: Config, target: ModelSpec, problems: list[str]) -> Eagle3Draft | None:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise ConfigError(f"config.json: speculators_model_type is {kind!r}, supported: 'eagle3'")
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        if config.get(key):
            problems.append(f"{key} is {config[key]!r}, which is not supported")
    inner = config.get("transformer_layer_config") or {}
    return _eagle3_of(config, inner, config, target, problems, prefix="layers.0")


def _eagle3_of(
    config: Config,
    inner: Config,
    settings: Config,
    target: ModelSpec,
    problems: list[str],
    *,
    prefix: str,
) -> Eagle3Draft | None:
    """`inner` has the layer's sizes, `settings` the layers that are read, if they are not the usual
    ones."""
    body = _body(inner, "Eagle3", problems)
    vocab = _count(config, "draft_vocab_size", problems)
    if body is None:
        return None
    if vocab > body.vocab_size:
        problems.append(f"draft_vocab_size is {vocab}, more than vocab_size {body.vocab_size}")
    if body.num_layers != 1:
        problems.append(f"num_hidden_layers is {body.num_layers}, EAGLE-3 has 1 layer")
    layers = target.num_layers
    entered: tuple[int, ...] = (2, layers // 2, layers - 3)
    if settings.get("eagle_aux_hidden_state_layer_ids") is not None:
        entered = _layers(settings, "eagle_aux_hidden_state_layer_ids", problems)
    return Eagle3Draft(
        body=ModelSpec(
            architecture=body.architecture,
            vocab_size=vocab,
            embed=body.embed,
            layers=body.layers[:1],
            norm_eps=body.norm_eps,
            max_position=body.max_position,
            tie_embeddings=False,
        ),
        taps=tuple(layer - 1 for layer in entered),  # the state that a layer is given
        target_vocab=body.vocab_size,
        norm_before_residual=bool(config.get("norm_before_residual")),
        layer_prefix=prefix,
    )


def rules(draft: HeadSpec) -> tuple[AnyRule, ...]:
    """Which tensors of a checkpoint make up each leaf of the head's parameters.

    Embedding, and output matrix if the head shares it, repeat the target's and are not read. `d2t`
    and `t2d` are read apart, see `loading`.
    """
    shared = [
        Rule("fc", ("fc.weight",)),
        Rule("hidden_norm", ("hidden_norm.weight",)),
        Rule("final_norm", ("norm.weight",)),
        Ignore("embed_tokens.weight"),
        Ignore("*rotary_emb.inv_freq"),
    ]
    if isinstance(draft, Eagle3Draft):
        prefix = draft.layer_prefix
        shared[1] = Rule("hidden_norm", (f"{prefix}.hidden_norm.weight",))
        return (
            *shared,
            *_layer_rules("layer", prefix),
            Rule("lm_head", ("lm_head.weight",)),
            Ignore("d2t"),
            Ignore("t2d"),
        )
    found: list[AnyRule] = [*shared, *_layer_rules("layers.{layer}", "layers.{layer}")]
    attention = "layers.{layer}.self_attn"
    for norm in ("q_norm", "k_norm"):
        found.append(Rule(f"layers.{{layer}}.{norm}", (f"{attention}.{norm}.weight",)))
    found.append(Ignore("lm_head.weight"))
    if draft.markov_rank:
        for leaf, name in (("markov_in", "markov_w1"), ("markov_out", "markov_w2")):
            found.append(Rule(leaf, (f"markov_head.{name}.weight",)))
    if draft.confidence:
        for leaf, kind in (("confidence", "weight"), ("confidence_bias", "bias")):
            found.append(Rule(leaf, (f"confidence_head.proj.{kind}",)))
    return tuple(found)


def _layer_rules(leaf: str, prefix: str) -> list[Rule]:
    def rule(name: str, *sources: str) -> Rule:
        return Rule(f"{leaf}.{name}", tuple(f"{prefix}.{source}.weight" for source in sources))

    return [
        rule("attention_norm", "input_layernorm"),
        rule("qkv", *(f"self_attn.{each}_proj" for each in "qkv")),
        rule("out", "self_attn.o_proj"),
        rule("mlp_norm", "post_attention_layernorm"),
        rule("gate_up", "mlp.gate_proj", "mlp.up_proj"),
        rule("down", "mlp.down_proj"),
    ]
