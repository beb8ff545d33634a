"""What the model reads: a completion's prompts, a chat's messages through the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from jaxserve.config import TEMPLATE_VARIABLES
from jaxserve.server.errors import invalid
from jaxserve.server.request.schema import (
    MAX_PROMPTS,
    ChatRequest,
    ContentPart,
    Message,
    Tool,
)
from jaxserve.server.request.validation import wrong_field
from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.chat_template import ChatTemplate, TemplateError


class Prompt(NamedTuple):
    ids: list[int]
    text: str | None
    """As the client wrote it; None if it sent token ids."""


def completion_prompts(
    prompt: str | list[str | int | list[int]], tokenizer: Tokenizer
) -> list[Prompt]:
    """One text, several texts, one list of ids or several: each becomes one prompt.

    Markers in a text become their tokens: here the caller applies the chat template, if any.
    """
    prompts: list[Prompt] = []
    for item in _separate(prompt):
        if isinstance(item, str):
            prompts.append(Prompt(tokenizer.encode(item), item))
        else:
            prompts.append(Prompt(item, None))
        if not prompts[-1].ids:
            raise invalid("the prompt is empty", param="prompt")
    return prompts


def _separate(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))  # a prompt of ids has thousands of them
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(kinds) > 1:
        raise invalid("prompt mixes texts, token ids and lists of them", param="prompt")
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise invalid(
            f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt"
        )
    return cast(list[str | list[int]], prompt)


class ChatPrompt(NamedTuple):
    ids: list[int]
    ending: str
    """The last characters: whether the template opened or closed a `<think>` block."""


def chat_prompt(
    request: ChatRequest, template: ChatTemplate | None, tokenizer: Tokenizer
) -> ChatPrompt:
    """The template applied to a chat, as token ids.

    ApiError: there is no template, it refuses the messages, or a field contradicts another.
    """
    if template is None:
        raise invalid("this model has no chat template; use /v1/completions", param="messages")
    messages = [_plain_message(i, message) for i, message in enumerate(request.messages)]
    _check_ending(request)
    try:
        rendered = template.render(
            messages,
            tools=_checked_tools(request),
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final=bool(request.continue_final_message),
            variables=_template_variables(request),
        )
    except TemplateError as error:
        raise invalid(str(error), param="messages", code="chat_template_error") from None
    ids = tokenizer.encode(rendered.text, rendered.breaker)
    if not ids:
        raise invalid("the prompt is empty", param="messages")
    return ChatPrompt(ids, rendered.text[-32:])


def _check_ending(request: ChatRequest) -> None:
    if not request.continue_final_message:
        return
    param = "continue_final_message"
    if request.add_generation_prompt:
        raise invalid("continue_final_message excludes add_generation_prompt", param=param)
    if request.messages[-1].role != "assistant" or not request.messages[-1].content:
        raise invalid(
            "only a last message of the assistant that has text can be continued", param=param
        )


def _plain_message(position: int, message: Message) -> dict[str, Any]:
    """As templates expect it: text content, OpenAI's `developer` under its older name."""
    role = "system" if message.role == "developer" else message.role
    param = f"messages[{position}].content"
    if message.content is None and role != "assistant":
        raise invalid(f"a message of role {message.role} needs content", param=param)
    plain: dict[str, Any] = {"role": role, "content": _text(message.content, param)}
    if role == "assistant":
        _add_assistant_fields(plain, message)
    else:
        _check_no_assistant_fields(message, f"messages[{position}]")
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _check_no_assistant_fields(message: Message, param: str) -> None:
    for name in ("reasoning", "reasoning_content", "tool_calls"):
        if getattr(message, name):
            raise invalid(f"only messages of the assistant have {name}", param=f"{param}.{name}")


def _add_assistant_fields(plain: dict[str, Any], message: Message) -> None:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is None and "</think>" in plain["content"]:
        # Templates look for the markers in the content themselves, but there they are broken up
        # like those in any other text from outside.
        before, _, after = plain["content"].rpartition("</think>")
        reasoning = before.split("</think>")[0].split("<think>")[-1].strip("\n")
        plain["content"] = after.lstrip("\n")
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments or {},
                },
            }
            for call in message.tool_calls
        ]


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


def _template_variables(request: ChatRequest) -> Mapping[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    for name, value in variables.items():
        param = f"chat_template_kwargs.{name[:100]}"
        if name not in TEMPLATE_VARIABLES:
            allowed = ", ".join(sorted(TEMPLATE_VARIABLES))
            raise invalid(f"{param}: chat_template_kwargs may set {allowed}", param=param)
        if not isinstance(value, bool | int | float | str | None):
            raise invalid("chat_template_kwargs takes scalar values", param=param)
    if request.reasoning_effort is not None:
        variables.setdefault("enable_thinking", request.reasoning_effort != "none")
    return variables


def _checked_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    if request.tools is None:
        if request.tool_choice not in (None, "none"):
            raise invalid("tool_choice needs tools", param="tool_choice")
        return None
    try:
        msgspec.convert(request.tools, list[Tool])
    except msgspec.ValidationError as error:
        raise wrong_field(error, request.tools, list[Tool], at="tools") from None
    return None if request.tool_choice == "none" else request.tools
