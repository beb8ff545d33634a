"""jaxserve: a JAX/XLA-compiled serving engine for Qwen3-class language models."""

__version__ = "0.1.0"
