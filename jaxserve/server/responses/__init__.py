"""OpenAI's Responses API, without a store: translated to a chat, and the chat's output back."""

from jaxserve.server.responses.handlers import responses

__all__ = ["responses"]
