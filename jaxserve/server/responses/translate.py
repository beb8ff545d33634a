"""A request of the Responses API as a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jaxserve.server.errors import invalid
from jaxserve.server.request import schema as chat
from jaxserve.server.responses.schema import (
    FunctionChoice,
    FunctionTool,
    Item,
    Part,
    ResponsesRequest,
)

NAMES = {
    "response_format.json_schema": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""A chat's fields whose errors are about another field here."""

LOGPROBS = "message.output_text.logprobs"


def to_chat(fields: ResponsesRequest) -> chat.ChatRequest:
    with_logprobs = LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)
    return chat.ChatRequest(
        messages=_messages(fields),
        stream=fields.stream,
        max_tokens=fields.max_output_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        logprobs=with_logprobs,
        top_logprobs=fields.top_logprobs,
        tools=[_tool(tool) for tool in fields.tools] if fields.tools else None,
        tool_choice=_tool_choice(fields),
        response_format=_response_format(fields),
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning_effort=fields.reasoning.effort if fields.reasoning is not None else None,
        chat_template_kwargs=fields.chat_template_kwargs,
        priority=fields.priority,
        service_tier=fields.service_tier,
        cache_salt=fields.cache_salt,
    )


def _messages(fields: ResponsesRequest) -> list[chat.Message]:
    messages: list[chat.Message] = []
    if fields.instructions is not None:
        messages.append(chat.Message(role="system", content=fields.instructions))
    if isinstance(fields.input, str):
        return [*messages, chat.Message(role="user", content=fields.input)]
    for position, item in enumerate(fields.input):
        _add(messages, item, f"input[{position}]")
    return messages


def _add(messages: list[chat.Message], item: Item, param: str) -> None:
    """Thoughts, text and calls of one turn are one message of the assistant."""
    match item.type:
        case "message" | None:
            _add_message(messages, item, param)
        case "reasoning":
            thought = _text(item.content or item.summary or "")
            messages.append(chat.Message(role="assistant", content="", reasoning_content=thought))
        case "function_call":
            _add_call(messages, item, param)
        case "function_call_output":
            output = _text(_needed(item.output, f"{param}.output"))
            call_id = _needed(item.call_id, f"{param}.call_id")
            messages.append(chat.Message(role="tool", tool_call_id=call_id, content=output))


def _add_message(messages: list[chat.Message], item: Item, param: str) -> None:
    content = _text(_needed(item.content, f"{param}.content"))
    if item.role is None:
        raise invalid(f"{param}.role is missing", param=f"{param}.role")
    last = _turn(messages) if item.role == "assistant" else None
    if last is not None and not last.content and not last.tool_calls:
        last.content = content
    else:
        messages.append(chat.Message(role=item.role, content=content))


def _add_call(messages: list[chat.Message], item: Item, param: str) -> None:
    name = _needed(item.name, f"{param}.name")
    call_id = _needed(item.call_id, f"{param}.call_id")
    function = chat.FunctionCall(name=name, arguments=item.arguments)
    last = _turn(messages)
    if last is None:
        last = chat.Message(role="assistant", content="")
        messages.append(last)
    last.tool_calls = [*(last.tool_calls or ()), chat.ToolCall(id=call_id, function=function)]


def _turn(messages: Sequence[chat.Message]) -> chat.Message | None:
    """The assistant's message that is still growing."""
    return messages[-1] if messages and messages[-1].role == "assistant" else None


def _needed[T](value: T | None, param: str) -> T:
    if value is None:
        raise invalid(f"{param} is missing", param=param)
    return value


def _text(content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text or part.refusal or "" for part in content)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in fields.items() if value is not None},
    }


def _tool_choice(
    fields: ResponsesRequest,
) -> Literal["none", "auto", "required"] | chat.NamedTool | None:
    choice = fields.tool_choice
    if isinstance(choice, FunctionChoice):
        return chat.NamedTool(type="function", function=chat.NamedFunction(name=choice.name))
    return choice


def _response_format(fields: ResponsesRequest) -> chat.ResponseFormat | None:
    wanted = fields.text.format if fields.text is not None else None
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        wanted_schema = _needed(wanted.schema, "text.format.schema")
        schema = chat.JsonSchemaFormat(schema=wanted_schema, name=wanted.name)
    return chat.ResponseFormat(type=wanted.type, json_schema=schema)
