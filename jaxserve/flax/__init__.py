"""The models as Flax NNX modules, to train what the engine serves (the extra `flax`)."""

from jaxserve.flax.files import load, parameters, save
from jaxserve.flax.model import CausalLM

__all__ = ["CausalLM", "load", "parameters", "save"]
