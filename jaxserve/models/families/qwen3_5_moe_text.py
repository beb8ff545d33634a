"""Qwen3.5, 3.6 and 3.8 with experts, in files without vision: see `qwen3_5_moe`."""

from __future__ import annotations

from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.families.qwen3_5 import rules
from jaxserve.models.families.qwen3_5_moe import sparse_spec
from jaxserve.models.hf_config import Config

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
NAMED: dict[str, NamedModel] = {}


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json; see `registry.spec_of`."""
    return sparse_spec(config, ARCHITECTURE)
