"""Shapes of draft heads and draft models, with published sizes, for any model. Does not import
jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxserve.layer_spec import LayerSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models.drafts.spec import BlockDraft, DraftSpec, Eagle3Draft, ModelDraft, MtpDraft
from jaxserve.models.registry import NAMED_MODELS


def dspark(spec: ModelSpec) -> BlockDraft:
    """DeepSpec's published head. The tapped layers are adapted to models with fewer layers."""
    return dataclasses.replace(
        dflash(spec),
        block=7,
        predicts_next=True,
        markov_rank=256,
        confidence="hidden and markov",
    )


def dflash(spec: ModelSpec) -> BlockDraft:
    """z-lab's published head, with tapped layers adapted as in `dspark`."""
    body = dataclasses.replace(spec, layers=(_layer(spec, qk_norm=True),) * 5, tie_embeddings=False)
    return BlockDraft(
        body=body,
        taps=tuple(range(min(5, spec.num_layers - 1))),
        block=16,
        mask_token=spec.vocab_size - 1,
        predicts_next=False,
    )


def eagle3(spec: ModelSpec) -> Eagle3Draft:
    """AngelSlim's published head, with its own vocabulary of 32,000 tokens, and tapped layers
    adapted as in `dspark`."""
    body = dataclasses.replace(
        spec,
        layers=(_layer(spec, qk_norm=False),),
        vocab_size=min(32_000, spec.vocab_size // 2),
        tie_embeddings=False,
    )
    taps = tuple(range(min(3, spec.num_layers - 1)))
    return Eagle3Draft(body=body, taps=taps, target_vocab=spec.vocab_size)


def mtp(spec: ModelSpec) -> MtpDraft:
    """Qwen3.5's published head: one layer with full attention."""
    layer = next(each for each in spec.layers if each.attention is not None)
    return MtpDraft(body=dataclasses.replace(spec, layers=(layer,)))


def _layer(spec: ModelSpec, *, qk_norm: bool) -> LayerSpec:
    """A layer of the model's size, with or without norms of queries and keys."""
    layer = spec.layers[0]
    assert layer.attention is not None
    return dataclasses.replace(
        layer, attention=dataclasses.replace(layer.attention, qk_norm=qk_norm, qkv_bias=False)
    )


def small(spec: ModelSpec) -> ModelDraft:
    """A draft model of Qwen3-0.6B's layers with the model's vocabulary; one layer of the model
    itself if the model is not larger than that."""
    body = NAMED_MODELS["qwen3-0.6b"]
    if spec.embed <= body.embed:
        body = dataclasses.replace(spec, layers=spec.layers[:1])
    return ModelDraft(body=dataclasses.replace(body, vocab_size=spec.vocab_size))


HEADS: dict[str, Callable[[ModelSpec], DraftSpec]] = {
    "dspark": dspark,
    "dflash": dflash,
    "eagle3": eagle3,
    "mtp": mtp,
}

DRAFTS: dict[str, Callable[[ModelSpec], DraftSpec]] = {**HEADS, "draft": small}
"""Heads, and the draft model, by name."""
