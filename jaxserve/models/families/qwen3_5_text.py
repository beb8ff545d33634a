"""Qwen3.5, 3.6 and 3.8, dense, in files without vision: see `qwen3_5`."""

from __future__ import annotations

from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.families.qwen3_5 import rules, text_spec
from jaxserve.models.hf_config import Config

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "Qwen3_5ForCausalLM"
NAMED: dict[str, NamedModel] = {}


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json; see `registry.spec_of`."""
    return text_spec(config, ARCHITECTURE)
