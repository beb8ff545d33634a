"""Qwen3.5, 3.6 and 3.8 with experts: the mixers of `qwen3_5`, and in each layer a router, experts,
and one shared expert that every token uses. Text only.

Plain files have all experts of a layer in one tensor. fp8 files have separate tensors per expert.
"""

from __future__ import annotations

from jaxserve.layer_spec import ExpertsSpec
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.families.qwen3_5 import published, rules, text_config, text_spec
from jaxserve.models.hf_config import Config, count

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json with a `text_config`; see `registry.spec_of`."""
    return sparse_spec(text_config(config), ARCHITECTURE)


def sparse_spec(config: Config, architecture: str) -> ModelSpec:
    """Returns the model of the text part's settings."""
    experts = ExpertsSpec(
        num_experts=count(config, "num_experts"),
        top_k=count(config, "num_experts_per_tok"),
        width=count(config, "moe_intermediate_size"),
        normalize=True,
        shared_width=count(config, "shared_expert_intermediate_size"),
    )
    return text_spec({**config, "intermediate_size": experts.width}, architecture, experts)


_35B = published(
    *(ARCHITECTURE, 2048, 40, (16, 2), 32),
    ExpertsSpec(num_experts=256, top_k=8, width=512, normalize=True, shared_width=512),
)
NAMED = {
    f"qwen{version}-35b-a3b": NamedModel(f"Qwen/Qwen{version}-35B-A3B", _35B)
    for version in ("3.5", "3.6")
}
