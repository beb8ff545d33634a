"""The request types of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jaxserve.api import MAX_LOGPROBS
from jaxserve.server.request.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    SALT,
    Effort,
    Grammar,
    RequestId,
    Tier,
)
from jaxserve.server.request.unsupported import Harmless

TEXT_PARTS = frozenset(
    {"input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal"}
)


class Part(Struct, kw_only=True, omit_defaults=True):
    type: str
    """One of TEXT_PARTS. In a tool's output, other types become a placeholder."""
    text: str | None = None
    refusal: str | None = None


class Item(Struct, kw_only=True, omit_defaults=True):
    """An item of any kind. The type of a message is optional."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[Part] | dict[str, Any] | None = None


BUILT_IN_ITEMS = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Items of other servers' built-in tools. The model does not see them; a header names them."""


class ToolFormat(Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Grammar | None = None


class ToolDefinition(Struct, kw_only=True, omit_defaults=True):
    """A function, a custom tool, a namespace of those, or an unsupported tool."""

    type: str
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None


class ReasoningOptions(Struct, kw_only=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect: the output contains the full reasoning."""


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Has no effect: the schema is always followed."""


class FunctionChoice(Struct, kw_only=True, tag_field="type", tag="function", omit_defaults=True):
    name: str
    namespace: str | None = None


class CustomChoice(Struct, kw_only=True, tag_field="type", tag="custom", omit_defaults=True):
    name: str
    namespace: str | None = None


class AllowedTool(Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedChoice(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


type ToolChoice = (
    Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedChoice
)


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Struct, kw_only=True):
    include_obfuscation: bool | None = None


type Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]

LOGPROBS: Include = "message.output_text.logprobs"
SEALED_THOUGHTS: Include = "reasoning.encrypted_content"


class ResponsesRequest(Struct, kw_only=True):
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Include] | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Has no effect: `auto` would drop the beginning of a conversation."""
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Has no effect: it counts calls of built-in tools."""
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    service_tier: Tier | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=SALT)] | None = None
    request_id: RequestId | None = None


REJECTED: dict[str, Harmless] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
}
SILENT = frozenset(
    {
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
