"""Makes prompts: the prompts of a completion, and a chat's messages through its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from jaxserve.api import EngineLimits
from jaxserve.config import TEMPLATE_VARIABLES
from jaxserve.server.chat_formats.chat_format import ChatFormat
from jaxserve.server.errors import invalid
from jaxserve.server.off_loop import check_wanted
from jaxserve.server.request.lengths import fitting, tokens_to_generate, truncated
from jaxserve.server.request.schema import (
    MAX_PROMPTS,
    ChatRequest,
    ContentPart,
    Message,
    ToolCall,
)
from jaxserve.server.request.tools import ChatTools, chat_tools
from jaxserve.server.request.validation import check_token_ids
from jaxserve.server.service import Chats
from jaxserve.structured import Thinking
from jaxserve.tokenizer import Progress, Tokenizer
from jaxserve.tokenizer.chat_template import TemplateError


class Prompt(NamedTuple):
    """A prompt of a completion."""

    ids: list[int]
    text: str | None
    """The client's text; None if it sent token ids."""


PLACEHOLDER = "[{}: left out, this model reads text]"
"""Replaces a part of a tool's result that is not text; {} is the type of the part."""


def completion_prompts(
    prompt: str | list[str | int | list[int]], tokenizer: Tokenizer, fits: Progress | None = None
) -> list[Prompt]:
    """Returns the prompts of a completion: one text, several texts, one list of ids, or several.

    Special tokens in a text become tokens, because here the client applies any chat template.
    `fits` refuses prompts that are too long.

    Raises:
      Abandoned: the request is over.
    """
    prompts: list[Prompt] = []
    for item in _separate(prompt):
        if isinstance(item, str):
            prompts.append(Prompt(tokenizer.encode(item, "", _watch(fits)), item))
        else:
            prompts.append(Prompt(item, None))
        if not prompts[-1].ids:
            raise invalid("the prompt is empty", param="prompt")
    return prompts


def _watch(fits: Progress | None) -> Progress:
    def check(tokens: int) -> None:
        check_wanted()
        if fits is not None:
            fits(tokens)

    return check


def _separate(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))  # a list of ids may have thousands of entries
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(kinds) > 1:
        raise invalid("prompt must be a text, token ids, or a list of one of them", param="prompt")
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise invalid(
            f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt"
        )
    return cast(list[str | list[int]], prompt)


class ChatPrompt(NamedTuple):
    """A rendered and encoded chat."""

    ids: list[int]
    max_tokens: int
    """The most tokens to generate."""
    predicted: list[int]
    """The output that the client predicts; empty: none."""
    thinking: Thinking
    tools: ChatTools
    ignored: tuple[str, ...]
    """Parts of the request that the model does not read, for the header that names them."""


def chat_prompt(
    request: ChatRequest, chats: Chats, tokenizer: Tokenizer, limits: EngineLimits
) -> ChatPrompt:
    """Renders and encodes a chat, truncates it if asked, and computes how much may be generated.

    Raises:
      ApiError: the model has no template, the template refuses the messages, fields conflict, or
        the
        prompt does not fit into the context.
      Abandoned: the request is over.
    """
    fits = None if request.truncate_prompt_tokens else fitting(limits, "messages")
    rendered = rendered_chat(request, chats, tokenizer, fits)
    asked = request.max_completion_tokens  # the newer name has priority
    asked = request.max_tokens if asked is None else asked
    ids = truncated(rendered.ids, asked, request, limits)
    max_tokens = tokens_to_generate(asked, len(ids), limits, param="messages")
    check_token_ids(ids, limits, "messages")
    thinking = chats.format.thinking(
        rendered.ending, continued=bool(request.continue_final_message)
    )
    predicted = _predicted(request, tokenizer, limits)
    return ChatPrompt(ids, max_tokens, predicted, thinking, rendered.tools, rendered.ignored)


def _predicted(request: ChatRequest, tokenizer: Tokenizer, limits: EngineLimits) -> list[int]:
    """Returns the predicted output as tokens. Raises ApiError if it is longer than any output."""
    if request.prediction is None:
        return []
    most = limits.max_model_len

    def fits(tokens: int) -> None:
        if tokens > most:
            raise invalid(f"prediction has more than {most} tokens", param="prediction")

    text = _text(request.prediction.content, "prediction.content")
    tokens = tokenizer.encode(text, "", _watch(fits), prefix=False)
    fits(len(tokens))
    return tokens


class RenderedChat(NamedTuple):
    """A chat after its template, as token ids."""

    ids: list[int]
    ending: str
    """The last characters of the text."""
    tools: ChatTools
    ignored: tuple[str, ...]
    """Parts of the request that the model does not read, for the header that names them."""


def rendered_chat(
    request: ChatRequest, chats: Chats, tokenizer: Tokenizer, fits: Progress | None = None
) -> RenderedChat:
    """Applies the template to a chat and encodes it. `fits` refuses a prompt that is too long.

    Raises:
      ApiError: the model has no template, the template refuses the messages, or fields conflict.
      Abandoned: the request is over.
    """
    check_wanted()
    if (template := chats.template) is None:
        raise invalid("this model has no chat template; use /v1/completions", param="messages")
    tools = chat_tools(request)
    unread: dict[str, None] = {}
    messages = [
        _plain_message(i, message, chats.format, unread)
        for i, message in enumerate(request.messages)
    ]
    messages = chats.format.history.arranged(messages)
    _check_ending(request)
    try:
        rendered = template.render(
            messages,
            tools=list(tools.shown),
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final=bool(request.continue_final_message),
            variables=_template_variables(request),
        )
    except TemplateError as error:
        raise invalid(str(error), param="messages", code="chat_template_error") from None
    ids = tokenizer.encode(rendered.text, rendered.breaker, _watch(fits))
    if not ids:
        raise invalid("the prompt is empty", param="messages")
    return RenderedChat(ids, rendered.text[-32:], tools, (*tools.ignored, *unread))


def _check_ending(request: ChatRequest) -> None:
    if not request.continue_final_message:
        return
    param = "continue_final_message"
    if request.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt cannot be used together", param=param
        )
    if request.messages[-1].role != "assistant" or not request.messages[-1].content:
        raise invalid(
            "only a last message of the assistant that has text can be continued", param=param
        )


def _plain_message(
    position: int, message: Message, form: ChatFormat, unread: dict[str, None]
) -> dict[str, Any]:
    """Returns a message as templates expect it: text content, and `developer` as `system`."""
    role = "system" if message.role == "developer" else message.role
    param = f"messages[{position}].content"
    if message.content is None and role != "assistant":
        raise invalid(f"a message of role {message.role} needs content", param=param)
    match role:
        case "tool":
            text = _of_tool(message.content, unread)
        case "assistant":
            text = _text(_without_refusals(message), param)
        case _:
            text = _text(message.content, param)
    plain: dict[str, Any] = {"role": role, "content": text}
    if role == "assistant":
        _add_assistant_fields(plain, message, form, f"messages[{position}]")
    else:
        _check_no_assistant_fields(message, f"messages[{position}]")
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = form.history_id(message.tool_call_id)
    return plain


def _check_no_assistant_fields(message: Message, param: str) -> None:
    for name in ("refusal", "reasoning", "reasoning_content", "tool_calls"):
        if getattr(message, name):
            raise invalid(f"only messages of the assistant have {name}", param=f"{param}.{name}")


def _add_assistant_fields(
    plain: dict[str, Any], message: Message, form: ChatFormat, param: str
) -> None:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is None and "</think>" in plain["content"]:
        # Templates search the content for these markers, but the markers are broken up there, as
        # in any other text from clients.
        before, _, after = plain["content"].rpartition("</think>")
        reasoning = before.split("</think>")[0].split("<think>")[-1].strip("\n")
        plain["content"] = after.lstrip("\n")
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            _plain_call(call, form, f"{param}.tool_calls[{position}]")
            for position, call in enumerate(message.tool_calls)
        ]


def _plain_call(call: ToolCall, form: ChatFormat, param: str) -> dict[str, Any]:
    if call.custom is not None:
        name, arguments = call.custom.name, form.history_input(call.custom.input)
    elif call.function is not None:
        name, arguments = call.function.name, form.history.arguments(call.function.arguments)
    else:
        raise invalid(f"{param}.function is required", param=f"{param}.function")
    call_id = None if call.id is None else form.history_id(call.id)
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _text(content: str | Sequence[ContentPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for position, part in enumerate(content):
        where = f"{param}[{position}]"
        if part.type != "text":
            kind = repr(part.type[:50])
            raise invalid(
                f"content of type {kind} is not supported; this model reads text", param=where
            )
        if part.text is None:
            raise invalid(f"{where}.text is required", param=f"{where}.text")
    return "".join(part.text or "" for part in content)


def _without_refusals(message: Message) -> str | list[ContentPart] | None:
    """Returns the assistant's content. Refusals become plain texts."""
    if message.content is None or isinstance(message.content, str):
        return message.content or message.refusal
    return [
        ContentPart(type="text", text=part.refusal) if part.type == "refusal" else part
        for part in message.content
    ]


def _of_tool(content: str | Sequence[ContentPart] | None, unread: dict[str, None]) -> str:
    """Returns a tool's result. Parts that are not text become a placeholder, because the client
    cannot choose them and they must not end the conversation. Adds their names to `unread`."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text":
            unread[f"messages.content.{part.type}"] = None
    return "".join(
        part.text or "" if part.type == "text" else PLACEHOLDER.format(part.type[:50])
        for part in content
    )


def _template_variables(request: ChatRequest) -> Mapping[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    for name, value in variables.items():
        param = f"chat_template_kwargs.{name[:100]}"
        if name not in TEMPLATE_VARIABLES:
            allowed = ", ".join(sorted(TEMPLATE_VARIABLES))
            raise invalid(f"{param}: chat_template_kwargs may set {allowed}", param=param)
        if not isinstance(value, bool | int | float | str | None):
            raise invalid(
                "chat_template_kwargs takes texts, numbers, true, false and null only", param=param
            )
    if request.enable_thinking is not None:
        variables.setdefault("enable_thinking", request.enable_thinking)
    if request.reasoning_effort is not None:
        variables.setdefault("enable_thinking", request.reasoning_effort != "none")
    return variables
