"""The engine's tokens to text: reasoning, content and tool calls told apart."""
