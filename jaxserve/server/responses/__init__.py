"""OpenAI's Responses API, translated to a chat, and the chat's output back."""

from jaxserve.server.responses.handlers import responses

__all__ = ["responses"]
