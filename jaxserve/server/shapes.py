"""Types of response bodies. Small bodies are built from them, and /openapi.json describes all of
them.

Chats, completions and similar bodies are built chunk by chunk as plain objects in their own
modules. Tests check those against the types here.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class Shape(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that may be absent have the default UNSET."""


class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    error: ErrorDetail


class ModelPermission(Shape):
    """vLLM's format: every model may be sampled and nothing else. OpenAI has dropped it."""

    id: str
    created: int
    object: Literal["model_permission"] = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(Shape):
    id: str
    type: Literal["model"]
    display_name: str
    created_at: str


class AnthropicModelList(Shape):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class CachedTokens(Shape):
    cached_tokens: int


class ReasoningTokens(Shape):
    reasoning_tokens: int


class CompletionTokens(Shape):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Shape):
    logprob: float
    rank: int
    decoded_token: str


type PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, in vLLM's format; null for the first token."""


type UsedTier = Literal["default", "flex", "priority", "fast"]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: UsedTier | UnsetType = UNSET


class CalledFunction(Shape):
    name: str
    arguments: str


class CalledCustomTool(Shape):
    name: str
    input: str


class CalledTool(Shape):
    """A call of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustomTool | UnsetType = UNSET


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class TopLogprob(Shape):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: UsedTier | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Tokenized(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Shape):
    prompt: str


class Health(Shape):
    phase: str
    running: int
    waiting: int
    last_step_age_s: float
    token_s: float | UnsetType | None = UNSET


class Readiness(Shape):
    phase: str
    progress: float


class Load(Shape):
    server_load: int
    running: int
    waiting: int
    free_pages: int
    total_pages: int


class Version(Shape):
    version: str


class RenderedParams(Shape):
    """The sampling parameters of a request, by vLLM's names."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None


class Rendered(Shape):
    """A prompt as token ids, in the format of vLLM's requests to generate from tokens."""

    request_id: str
    token_ids: list[int]
    features: None
    """Features of images and sounds; always null."""
    sampling_params: RenderedParams
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class OutputItem(Struct, kw_only=True):
    """A reasoning, a message or a call."""

    id: str
    type: Literal["reasoning", "message", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Response(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    service_tier: UsedTier | UnsetType = UNSET


class DeletedResponse(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Shape):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ContentBlock(Struct, kw_only=True):
    type: Literal["thinking", "text", "tool_use"]


class MessageUsage(Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(Shape):
    input_tokens: int


class AnthropicErrorDetail(Shape):
    type: str
    message: str


class AnthropicError(Shape):
    type: Literal["error"]
    error: AnthropicErrorDetail
