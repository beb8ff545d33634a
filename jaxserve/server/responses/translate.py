"""Translates a request of the Responses API to a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from jaxserve.server.errors import invalid
from jaxserve.server.request import schema as chat
from jaxserve.server.responses.schema import (
    BUILT_IN_ITEMS,
    LOGPROBS,
    TEXT_PARTS,
    Item,
    Part,
    ResponsesRequest,
)
from jaxserve.server.responses.tools import Name, chat_tool_choice, chat_tools

NAMES = {
    "response_format.json_schema": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Chat fields and the fields of this API that errors about them should name."""


class Translated(NamedTuple):
    """The chat for a request of the Responses API."""

    chat: chat.ChatRequest
    ignored: tuple[str, ...]
    """Parts that the model does not see, for the header that names them."""


def to_chat(
    fields: ResponsesRequest, history: Sequence[Item], opened: Callable[[str], str | None]
) -> Translated:
    """
    Args:
      history: items of earlier requests and their responses, before the items of the input.
      opened: returns the text of encrypted reasoning; None: it cannot be decrypted.
    """
    conversation = _Conversation(opened)
    if fields.instructions is not None:
        conversation.say("system", fields.instructions)
    # Stored items have no name; errors need one.
    for item in history:
        conversation.add(item, "previous_response_id")
    if isinstance(fields.input, str):
        conversation.say("user", fields.input)
    else:
        for position, item in enumerate(fields.input):
            conversation.add(item, f"input[{position}]")
    return Translated(_chat(fields, conversation.messages), tuple(conversation.ignored))


def _chat(fields: ResponsesRequest, messages: list[chat.Message]) -> chat.ChatRequest:
    with_logprobs = LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)
    tools = fields.tools or ()
    return chat.ChatRequest(
        messages=messages,
        stream=fields.stream,
        max_tokens=fields.max_output_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        logprobs=with_logprobs,
        top_logprobs=fields.top_logprobs,
        tools=chat_tools(tools),
        tool_choice=chat_tool_choice(fields.tool_choice, tools),
        response_format=_response_format(fields),
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning_effort=fields.reasoning.effort if fields.reasoning is not None else None,
        chat_template_kwargs=fields.chat_template_kwargs,
        priority=fields.priority,
        service_tier=fields.service_tier,
        cache_salt=fields.cache_salt,
    )


def own_names(ignored: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of ignored parts of tool results as fields of this API."""
    return tuple(name.replace("messages.content.", "input.output.") for name in ignored)


class _Conversation:
    """Builds the messages of a chat from items."""

    def __init__(self, opened: Callable[[str], str | None]):
        self.messages: list[chat.Message] = []
        self.ignored: dict[str, None] = {}
        self._opened = opened

    def say(self, role: Literal["user", "system"], text: str) -> None:
        self.messages.append(chat.Message(role=role, content=text))

    def add(self, item: Item, param: str) -> None:
        """Adds an item. Reasoning, text and calls of one turn form one assistant message."""
        match item.type:
            case "message" | None:
                self._add_message(item, param)
            case "reasoning":
                thought = self._thought(item, param)
                message = chat.Message(role="assistant", content="", reasoning_content=thought)
                self.messages.append(message)
            case "function_call" | "custom_tool_call":
                self._add_call(item, param)
            case "function_call_output" | "custom_tool_call_output":
                output = _output(_needed(item.output, f"{param}.output"), f"{param}.output")
                call_id = _needed(item.call_id, f"{param}.call_id")
                message = chat.Message(role="tool", tool_call_id=call_id, content=output)
                self.messages.append(message)
            case other if other in BUILT_IN_ITEMS:
                self.ignored[f"input.{other}"] = None
            case other:
                raise invalid(
                    f"{param}.type is {other[:50]!r}, which is not known here",
                    param=f"{param}.type",
                )

    def _thought(self, item: Item, param: str) -> str:
        """Returns the text of reasoning. Clients may send only its encrypted form. Reasoning that
        cannot be decrypted, as after a restart without a configured key, must not end the
        conversation."""
        if not item.content and item.encrypted_content:
            if (opened := self._opened(item.encrypted_content)) is not None:
                return opened
            self.ignored["input.encrypted_content"] = None
        return _text(item.content or item.summary or "", f"{param}.content")

    def _add_message(self, item: Item, param: str) -> None:
        content = _text(_needed(item.content, f"{param}.content"), f"{param}.content")
        if item.role is None:
            raise invalid(f"{param}.role is missing", param=f"{param}.role")
        last = self._turn() if item.role == "assistant" else None
        if last is not None and not last.content and not last.tool_calls:
            last.content = content
        else:
            self.messages.append(chat.Message(role=item.role, content=content))

    def _add_call(self, item: Item, param: str) -> None:
        name = Name(item.namespace, _needed(item.name, f"{param}.name")).flat
        call_id = _needed(item.call_id, f"{param}.call_id")
        if item.type == "custom_tool_call":
            custom = chat.CustomCall(name=name, input=_needed(item.input, f"{param}.input"))
            call = chat.ToolCall(id=call_id, custom=custom)
        else:
            function = chat.FunctionCall(name=name, arguments=item.arguments)
            call = chat.ToolCall(id=call_id, function=function)
        last = self._turn()
        if last is None:
            last = chat.Message(role="assistant", content="")
            self.messages.append(last)
        last.tool_calls = [*(last.tool_calls or ()), call]

    def _turn(self) -> chat.Message | None:
        """Returns the assistant message that is still growing, if any."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last.role == "assistant" else None


def _needed[T](value: T | None, param: str) -> T:
    if value is None:
        raise invalid(f"{param} is missing", param=param)
    return value


def _text(content: str | Sequence[Part], param: str) -> str:
    if isinstance(content, str):
        return content
    for position, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise invalid(
                f"content of type {part.type[:50]!r} is not supported; this model reads text",
                param=f"{param}[{position}].type",
            )
    return "".join(part.text or part.refusal or "" for part in content)


def _output(output: str | list[Part] | dict[str, Any], param: str) -> str | list[chat.ContentPart]:
    """Returns a tool's output. Parts that the model cannot read become placeholders in the
    prompt."""
    if isinstance(output, str):
        return output
    if isinstance(output, dict):
        raise invalid(f"{param}: Expected a text or its parts, got an object", param=param)
    return [
        chat.ContentPart(type="text", text=part.text or part.refusal or "")
        if part.type in TEXT_PARTS
        else chat.ContentPart(type=part.type)
        for part in output
    ]


def _response_format(fields: ResponsesRequest) -> chat.ResponseFormat | None:
    wanted = fields.text.format if fields.text is not None else None
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        wanted_schema = _needed(wanted.schema, "text.format.schema")
        schema = chat.JsonSchemaFormat(schema=wanted_schema, name=wanted.name)
    return chat.ResponseFormat(type=wanted.type, json_schema=schema)
