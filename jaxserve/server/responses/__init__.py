"""OpenAI's Responses API: translates requests to chats, and chat outputs back."""

from jaxserve.server.responses.handlers import responses

__all__ = ["responses"]
