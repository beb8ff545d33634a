"""The models as Flax NNX modules, to train the models that the engine serves (extra `flax`)."""

from jaxserve.flax.files import load, parameters, save
from jaxserve.flax.model import CausalLM

__all__ = ["CausalLM", "load", "parameters", "save"]
