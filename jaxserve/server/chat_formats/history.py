"""Converts earlier turns to the form that a model's chat template can render."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.tokenizer.chat_template import ChatTemplate, TemplateError

INVALID = "INVALID_JSON"
"""The key for arguments that are no JSON object, if a template needs an object."""

type Message = dict[str, Any]

_PROBED: dict[str, Any] = {"probed_name": "probed value"}
_WRITTEN = json.dumps(_PROBED)


@dataclass(frozen=True, kw_only=True)
class History:
    """The forms of earlier tool calls that a template can render."""

    takes_text: bool = True
    """Call arguments as the text that the model wrote. This is preferred: the prompt then begins
    with exactly the generated tokens, which the prefix cache has."""
    takes_objects: bool = True
    """Call arguments as an object."""
    takes_several: bool = True
    """Several calls in one message."""

    @classmethod
    def of(cls, template: ChatTemplate | None) -> History:
        """Tries out what the template can render. A template that shows no calls is assumed to
        support everything."""
        if template is None:
            return cls()
        text, parsed = _rendered(template, [_WRITTEN]), _rendered(template, [_PROBED])
        takes_text, takes_objects = _WRITTEN in text, _shows_object(parsed)
        if not (takes_text or takes_objects):
            return cls()
        arguments = _WRITTEN if takes_text else _PROBED
        return cls(
            takes_text=takes_text,
            takes_objects=takes_objects,
            takes_several=bool(_rendered(template, [arguments, arguments])),
        )

    def arguments(self, given: str | dict[str, Any] | None) -> str | dict[str, Any]:
        """Returns a call's arguments for the template. Accepts anything that a model wrote, because
        one bad turn must not end the conversation."""
        given = given or {}
        if isinstance(given, str):
            return given if self.takes_text else _as_object(given)
        return given if self.takes_objects else json.dumps(given, ensure_ascii=False)

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages. If the template renders only one call per message, splits them, and
        puts each call's result behind the call."""
        if self.takes_several:
            return list(messages)
        return [each for message in _with_results(messages) for each in message]


def _rendered(template: ChatTemplate, calls: Sequence[Any]) -> str:
    """Renders a conversation with these calls. Returns an empty text if the template refuses it."""
    ids = [f"probe000{number}" for number in range(len(calls))]
    functions = [{"name": "probe", "arguments": arguments} for arguments in calls]
    made = [
        {"id": call_id, "type": "function", "function": function}
        for call_id, function in zip(ids, functions, strict=True)
    ]
    messages: list[Message] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": made},
        *({"role": "tool", "tool_call_id": call_id, "content": "Done"} for call_id in ids),
    ]
    parameters = {"type": "object", "properties": {}}
    function = {"name": "probe", "description": "Probes", "parameters": parameters}
    try:
        rendered = template.render(messages, tools=[{"type": "function", "function": function}])
    except TemplateError:
        return ""
    return rendered.text.replace(rendered.breaker, "")


def _shows_object(text: str) -> bool:
    shown = all(each in text for pair in _PROBED.items() for each in pair)
    return shown and '\\"probed_name' not in text


def _as_object(written: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(written.encode(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {INVALID: written}


def _with_results(messages: Sequence[Message]) -> Iterator[list[Message]]:
    results: dict[str, Message] = {}
    for position, message in enumerate(messages):
        calls: list[Any] = message.get("tool_calls") or []
        if len(calls) > 1:
            behind = messages[position + 1 : position + 1 + len(calls)]
            results = {
                each["tool_call_id"]: each
                for each in behind
                if each["role"] == "tool" and each.get("tool_call_id") is not None
            }
            for number, call in enumerate(calls):
                alone = {**message, "tool_calls": [call]}
                if number:
                    alone = {"role": message["role"], "content": "", "tool_calls": [call]}
                result = results.get(call["id"])
                yield [alone] if result is None else [alone, result]
        elif results.get(message.get("tool_call_id") or "") is not message:
            yield [message]
