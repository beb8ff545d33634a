"""Anthropic's Messages API: translated to a chat, and the chat's output back."""

from jaxserve.server.messages.handlers import count_tokens, messages

__all__ = ["count_tokens", "messages"]
