"""The model families, by Hugging Face's names of their classes. Does not import jax.

Only this module knows families. All other code uses a ModelSpec, which `decoder` runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from jaxserve.config import ConfigError
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.families import (
    gpt_oss,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
)
from jaxserve_checkpoints.rules import AnyRule


class Family(Protocol):
    """The interface of a module in `jaxserve.models.families`."""

    @property
    def ARCHITECTURE(self) -> str:
        """The name of the class in `architectures` of config.json."""
        ...

    @property
    def NAMED(self) -> Mapping[str, NamedModel]:
        """Published models, by the short names that --model accepts."""
        ...

    def spec(self, config: Mapping[str, Any], /) -> ModelSpec:
        """See `spec_of`."""
        ...

    def rules(self, spec: ModelSpec, /) -> tuple[AnyRule, ...]:
        """See `rules`."""
        ...


_FAMILIES: tuple[Family, ...] = (
    *(qwen3, llama, qwen2, mistral, qwen3_moe, gpt_oss),
    *(qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text),
)

_WITH_MTP = (qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text)
"""Families whose checkpoints have weights for multi-token prediction, under the same names."""

ARCHITECTURES: Mapping[str, Family] = {family.ARCHITECTURE: family for family in _FAMILIES}


_NAMED = {name: each for family in _FAMILIES for name, each in family.NAMED.items()}

NAMED_MODELS: dict[str, ModelSpec] = {name: each.spec for name, each in _NAMED.items()}
"""Shapes of published models by short name, in lower case, from their config.json files."""

PUBLISHED_EXPERTS: dict[str, Literal["mxfp4"] | None] = {
    name: each.experts for name, each in _NAMED.items()
}
"""Formats of the published experts by short name; None: the same as other weights."""

HUB_NAMES: dict[str, str] = {name: each.hub_id for name, each in _NAMED.items()}
"""Repositories on the Hugging Face Hub by short name."""


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the model of a Hugging Face `config.json`.

    Raises:
      ConfigError: the architecture is not supported, or the model would be computed wrongly.
    """
    architectures = config.get("architectures") or []
    found = [ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES]
    if not found:
        raise ConfigError(
            f"config.json: architectures is {architectures}, supported: {list(ARCHITECTURES)}"
        )
    return found[0].spec(config)


def rules(spec: ModelSpec) -> tuple[AnyRule, ...]:
    """Returns which checkpoint tensors make up each leaf of `decoder.Params`."""
    return ARCHITECTURES[spec.architecture].rules(spec)


def mtp_body(spec: ModelSpec) -> ModelSpec | None:
    """Returns a family's layer for multi-token prediction, as a model with that layer; None: it has
    none."""
    known = any(spec.architecture == family.ARCHITECTURE for family in _WITH_MTP)
    return qwen3_5.mtp_body(spec) if known else None


def mtp_rules(spec: ModelSpec) -> tuple[AnyRule, ...]:
    """Returns which checkpoint tensors make up each leaf of `mtp.MtpParams`, without the leaves of
    the model itself."""
    return qwen3_5.mtp_rules(spec)
