"""What /v1/responses understands."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jaxserve.api import MAX_LOGPROBS
from jaxserve.server.request.schema import MAX_MESSAGES, MAX_TOOLS, SALT, Effort, RequestId, Tier
from jaxserve.server.request.unsupported import Harmless


class Part(Struct, kw_only=True):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class Item(Struct, kw_only=True):
    """One of several kinds; a message need not say its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FunctionTool(Struct, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ReasoningOptions(Struct, kw_only=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect: the thoughts themselves are in the output."""


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Without effect: the schema is always followed."""


class FunctionChoice(Struct, kw_only=True):
    type: Literal["function"]
    name: str


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Struct, kw_only=True):
    include_obfuscation: bool | None = None


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
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
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
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
SILENT = frozenset(
    {
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
