"""The HTTP server: an OpenAI-compatible API over `jaxserve.api.Engine`. Never imports jax."""

from jaxserve.server.app import make_app, make_runner

__all__ = ["make_app", "make_runner"]
