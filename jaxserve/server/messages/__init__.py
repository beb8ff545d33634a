"""Anthropic's Messages API: translates requests to chats, and chat outputs back."""

from jaxserve.server.messages.handlers import count_tokens, messages

__all__ = ["count_tokens", "messages"]
