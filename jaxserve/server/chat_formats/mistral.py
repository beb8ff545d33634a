"""Mistral's tool calls after `[TOOL_CALLS]`: a JSON list, or name, `[ARGS]` and a JSON object."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from hashlib import blake2b

from jaxserve.server.chat_formats.json_calls import (
    Arguments,
    ObjectCall,
    any_body,
    first_of,
    json_body,
    skip_space,
)
from jaxserve.server.chat_formats.pieces import CallPart, Content
from jaxserve.server.chat_formats.tool_format import (
    MAX_HEADER,
    CallableTool,
    CallWriter,
    ToolFormat,
    input_schema,
)
from jaxserve.structured import grammars

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_CHARS = 9
"""Letters and digits in a call id. Templates refuse other ids."""

_ALPHABET = string.ascii_letters + string.digits
_ID = re.compile(rf"[a-zA-Z0-9]{{{ID_CHARS}}}")


class Mistral(ToolFormat):
    """Mistral's tool calls. It parses both forms. The grammar uses the newer form if the vocabulary
    has `[ARGS]`. Custom tools are called with an object that holds their input."""

    name = "mistral"
    begins = CALLS
    markers = (CALLS, ARGS, CALL_ID)
    turn_ends = ("</s>",)

    def make_id(self) -> str:
        return "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))

    def history_id(self, call_id: str) -> str:
        if _ID.fullmatch(call_id):
            return call_id
        return blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:ID_CHARS]

    def reader(self, writer: CallWriter, most: int, marker: str) -> MistralReader:
        return MistralReader(writer, most)

    def rules(
        self, tools: Sequence[CallableTool], markers: Mapping[str, int], most: int
    ) -> grammars.CallRules:
        begin = grammars.marker(CALLS, markers)
        if ARGS in markers:
            lines = [f"calls: ({begin} body){{1,{most}}}"]
            for index, tool in enumerate(tools):
                name, args = grammars.literal(tool.name), grammars.marker(ARGS, markers)
                arguments = grammars.arguments_rule(input_schema(tool))
                lines += [
                    f"body_{index}: {name} {args} arguments_{index}",
                    f"arguments_{index}: {arguments}",
                ]
        else:
            more = f' (", " body){{0,{most - 1}}}' if most > 1 else ""
            lines = [f'calls: {begin} " "? "[" body{more} "]"']
            for index, tool in enumerate(tools):
                lines += json_body(index, tool, "arguments")
        among_text = "text? calls?" if CALLS in markers else None
        return grammars.CallRules([*lines, any_body(tools)], {}, among_text)


class _State(Enum):
    START = auto()
    NAME = auto()
    ARGUMENTS = auto()
    IN_LIST = auto()
    BETWEEN = auto()
    """After a call in a list."""


class MistralReader:
    """Implements `CallReader` for one list of calls, or for one call in the newer form."""

    def __init__(self, writer: CallWriter, most: int):
        self.opened = False
        self._writer = writer
        self._most = most
        self._state = _State.START
        self._text = ""
        self._seen = ""
        """All text so far, until a call has opened."""
        self._call = self._next_call()
        self._arguments = Arguments(writer, custom=False)

    def push(self, text: str, parts: list[CallPart]) -> str | None:
        self._text += text
        if not self.opened:
            self._seen += text
        while True:
            before = self._state
            match self._state:
                case _State.START:
                    self._start()
                case _State.NAME:
                    if not self._read_name(parts):
                        return self._refused(parts)
                case _State.ARGUMENTS:
                    self._text = self._arguments.push(self._text, parts)
                    if self._arguments.ended:
                        return self._text
                case _State.IN_LIST:
                    self._text = self._call.push(self._text, parts)
                    self.opened |= self._call.opened
                    if self._call.refused:
                        return self._refused(parts)
                    if self._call.ended:
                        self._state = _State.BETWEEN
                case _State.BETWEEN:
                    if (behind := self._read_between()) is not None:
                        return behind
            if self._state is before:
                return None

    def finish(self, parts: list[CallPart]) -> None:
        if not self.opened:
            parts.append(Content(CALLS + self._seen))
        elif self._state is _State.ARGUMENTS:
            self._arguments.finish(self._text, parts)
        elif self._state is _State.IN_LIST:
            self._call.finish(self._text, parts)

    def _next_call(self) -> ObjectCall:
        return ObjectCall(self._writer, ("arguments",), only_known=False)

    def _start(self) -> None:
        self._text = skip_space(self._text)
        if self._text.startswith("["):
            self._text, self._state = self._text[1:], _State.IN_LIST
        elif self._text:
            self._state = _State.NAME

    def _read_name(self, parts: list[CallPart]) -> bool:
        """Reads a call's name. Returns False if the text is not a name."""
        head = self._text[:MAX_HEADER]
        may_come = len(self._text) < MAX_HEADER
        end = next((i for i, char in enumerate(head) if char in "[{"), -1)
        if end < 0:
            return may_come
        name, behind = head[:end].strip(), head[end:]
        found = first_of(behind, (ARGS, CALL_ID, "{"))
        if not name or found is None:
            return False
        if found == CALL_ID:
            _, found, behind = behind.partition(ARGS)
        if not found:
            return may_come
        behind = skip_space(behind.removeprefix(ARGS))
        if not behind.startswith("{"):
            return not behind and may_come
        text = behind + self._text[MAX_HEADER:]
        parts.append(self._writer.open(name))
        self.opened = True
        custom = self._writer.is_custom(name)
        self._arguments = Arguments(self._writer, custom=custom, marker=CALLS)
        self._text, self._state = text, _State.ARGUMENTS
        return True

    def _read_between(self) -> str | None:
        text = skip_space(self._text)
        if text.startswith("]") or self._writer.num_calls >= self._most:
            return text[1:]
        if not text.startswith(","):
            return text or None
        self._text, self._state, self._call = text[1:], _State.IN_LIST, self._next_call()
        return None

    def _refused(self, parts: list[CallPart]) -> str:
        """Ends the reader: the text is not a call."""
        if self.opened:
            return self._text
        parts.append(Content(CALLS))
        return self._seen
