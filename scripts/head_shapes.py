"""Draft heads of published sizes for any model; without weights, and without jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxserve.layer_spec import LayerSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models.drafts.spec import BlockDraft, DraftSpec, Eagle3Draft


def dspark(spec: ModelSpec) -> BlockDraft:
    """As DeepSpec publishes it, but for taps of a model with fewer layers."""
    return dataclasses.replace(
        dflash(spec),
        block=7,
        predicts_next=True,
        markov_rank=256,
        confidence="hidden and markov",
    )


def dflash(spec: ModelSpec) -> BlockDraft:
    """As z-lab publishes it, with taps as above."""
    body = dataclasses.replace(spec, layers=(_layer(spec, qk_norm=True),) * 5, tie_embeddings=False)
    return BlockDraft(
        body=body,
        taps=tuple(range(min(5, spec.num_layers - 1))),
        block=16,
        mask_token=spec.vocab_size - 1,
        predicts_next=False,
    )


def eagle3(spec: ModelSpec) -> Eagle3Draft:
    """As AngelSlim publishes it, with taps as above: 32,000 tokens of its own."""
    body = dataclasses.replace(
        spec,
        layers=(_layer(spec, qk_norm=False),),
        vocab_size=min(32_000, spec.vocab_size // 2),
        tie_embeddings=False,
    )
    taps = tuple(range(min(3, spec.num_layers - 1)))
    return Eagle3Draft(body=body, taps=taps, target_vocab=spec.vocab_size)


def _layer(spec: ModelSpec, *, qk_norm: bool) -> LayerSpec:
    """One of the model's, with norms of queries and keys or without."""
    layer = spec.layers[0]
    assert layer.attention is not None
    return dataclasses.replace(
        layer, attention=dataclasses.replace(layer.attention, qk_norm=qk_norm, qkv_bias=False)
    )


HEADS: dict[str, Callable[[ModelSpec], DraftSpec]] = {
    "dspark": dspark,
    "dflash": dflash,
    "eagle3": eagle3,
}
