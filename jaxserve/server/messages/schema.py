"""The request types of /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jaxserve.server.request.schema import MAX_MESSAGES, MAX_TOOLS
from jaxserve.server.request.unsupported import Harmless

MAX_STOP_SEQUENCES = 64


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class PlainText(Struct, kw_only=True):
    """A text block where no other kind is allowed. (msgspec needs a tag only to distinguish
    kinds.)"""

    type: Literal["text"]
    text: str


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Accepted and ignored, because the server cannot read its content."""

    data: str


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ResultPart(Struct, kw_only=True):
    """A text. Other parts, such as images and references, become a placeholder."""

    type: str
    text: str | None = None


class ToolResultBlock(Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultPart] | None = None


type Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(Struct, kw_only=True):
    """A tool of type `custom` or without a type. Anthropic's own tool types are not supported."""

    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class ToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Has no effect; the response header names it."""


class PromptFields(Struct, kw_only=True):
    """The fields that make up the prompt."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[PlainText] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class CountTokensRequest(PromptFields, kw_only=True):
    pass


class MessagesRequest(PromptFields, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    output_config: OutputConfig | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=4096)]],
            Meta(max_length=MAX_STOP_SEQUENCES),
        ]
        | None
    ) = None


REJECTED: dict[str, Harmless] = {
    "container": (),
    "mcp_servers": ([],),
    "output_format": (),
}
SILENT = frozenset(
    {
        "cache_control",
        "context_management",
        "messages.content.cache_control",
        "metadata",
        "service_tier",
        "speed",
        "system.cache_control",
        "tools.cache_control",
    }
)
"""Fields without effect that are not reported: prefixes are always cached."""
