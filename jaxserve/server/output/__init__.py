"""From the engine's tokens to text, split into reasoning, content and tool calls."""
