"""The types of requests: field names, types and ranges.

All fields in these classes have an effect. Other fields that clients send are in `unsupported.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jaxserve.api import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024
"""The most prompts times choices per request."""
MAX_TOKENS = 4 * 1024 * 1024
"""The most token ids in one list. The limit on the body's size is usually lower."""
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_BAD_WORDS = 128

SALT = r"^[^@/\\\x00]+$"
"""The characters that vLLM allows in a cache salt."""

MAX_REQUEST_ID_CHARS = 256

type Tier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
type Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
type Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
type Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
type BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
type RequestId = Annotated[
    str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS, pattern=r"^[ -~]+$(?!\n)")
]
"""Printable ASCII, because the id is returned in a header."""
type TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


type Grammar = Annotated[str, Meta(min_length=1, max_length=256 * 1024)]
type JsonSchema = dict[str, Any] | Grammar
"""A string contains the schema as JSON."""
type Choices = Annotated[
    list[Annotated[str, Meta(max_length=4096)]], Meta(min_length=1, max_length=1024)
]


class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Has no effect: the schema is always followed."""


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field, with exactly one kind of constraint."""

    json: JsonSchema | None = None
    json_object: bool | None = None
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    structural_tag: None = None


class GenerationFields(Struct, kw_only=True):
    """The common fields of completions and chats."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(extra_json_schema={"minimum": -100, "maximum": 100})]],
            Meta(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    """`params` checks the values, because msgspec's error would not name the token."""
    allowed_token_ids: Annotated[list[int], Meta(min_length=1, max_length=65536)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        Annotated[str, Meta(min_length=1, max_length=4096)]
        | Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=MAX_STOPS)
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    service_tier: Tier | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=SALT)] | None = None
    request_id: RequestId | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    thinking_token_budget: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    regex: Grammar | None = None
    ebnf: Grammar | None = None
    grammar: Grammar | None = None


_TOKEN_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
}
PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
"""Constraints that the type of `prompt` cannot express: no mixtures, nothing empty."""


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(le=2**31 - 1, extra_json_schema={"minimum": 0})] | None = None
    """At least 1; 0 is allowed only with `echo`."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ContentPart(Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(Struct, kw_only=True):
    name: str
    input: str


class ToolCall(Struct, kw_only=True):
    """A call of a function or of a custom tool. `type` is optional."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class Message(Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    """The assistant's refusal, in place of content."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


type ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class ToolFunction(Struct, kw_only=True):
    name: ToolName
    parameters: dict[str, Any] | None = None


class CustomGrammar(Struct, kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: Grammar


class CustomFormat(Struct, kw_only=True):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomTool(Struct, kw_only=True):
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class Tool(Struct, kw_only=True):
    """Only the checked fields. The template gets the client's object of a function unchanged. Other
    types of tools have no effect."""

    type: str
    function: ToolFunction | None = None
    custom: CustomTool | None = None


class NamedFunction(Struct, kw_only=True):
    name: str


class NamedTool(Struct, kw_only=True, tag_field="type", tag="function"):
    """A `tool_choice` that names a function."""

    function: NamedFunction


class NamedCustomTool(Struct, kw_only=True, tag_field="type", tag="custom"):
    custom: NamedFunction


class AllowedTool(Struct, kw_only=True):
    type: str | None = None
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Restricts the tools that may be called. The prompt still shows all tools."""

    allowed_tools: AllowedTools


type ToolChoice = (
    Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedToolsChoice
)


class Prediction(Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ChatRequest(GenerationFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None


class TokenizeRequest(Struct, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    """False: leaves out the tokens that begin every prompt of the model."""
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest, kw_only=True):
    """A chat's body. Fields that do not change the prompt have no effect."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


class EmbeddingsRequest(Struct, kw_only=True):
    model: str | None = None


FREE_FORM = frozenset(
    {
        "chat_template_kwargs",
        "guided_json",
        "input",
        "messages",
        "metadata",
        "output_config",
        "response_format",
        "structured_outputs",
        "system",
        "text",
        "tool_choice",
        "tools",
    }
)
"""Fields that contain free-form JSON, whose depth must be checked."""


def field_names(kind: type[Struct]) -> frozenset[str]:
    """Returns the field names of a request type."""
    return frozenset(kind.__struct_encode_fields__)
