"""Tool calls of Qwen3-Coder and Qwen3.5: `<function=…>` with a `<parameter=…>` per argument."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from jaxserve.server.chat_formats.json_calls import ObjectScanner, any_body, skip_space
from jaxserve.server.chat_formats.pieces import CallPart, Content, first_marker, partial
from jaxserve.server.chat_formats.raw_values import (
    END_PARAMETER,
    PARAMETER,
    STRING,
    as_json,
    json_string,
    json_types,
    parameter_rules,
    properties_of,
    text_rule,
)
from jaxserve.server.chat_formats.tool_call_tags import CALL, END_CALL, tagged_calls
from jaxserve.server.chat_formats.tool_format import (
    INPUT,
    MAX_HEADER,
    CallableTool,
    CallWriter,
    ToolFormat,
    input_grammar,
)
from jaxserve.server.request.schema import CustomTool, ToolFunction
from jaxserve.structured import grammars
from jaxserve.structured.errors import GrammarError

FUNCTION, END_FUNCTION = "<function=", "</function>"

_VALUE_ENDS = (f"\n{END_PARAMETER}", END_PARAMETER, f"\n{END_CALL}", END_CALL)


class QwenXml(ToolFormat):
    """Tool calls in XML tags. Values are raw text: strings as they are, other values as JSON. The
    tool's schema says which. Line breaks next to the tags are not part of a value. The input of a
    custom tool is the value of a parameter."""

    name = "qwen3_xml"
    begins = CALL
    markers = (CALL, END_CALL)
    turn_ends = ("<|im_end|>",)
    ends_reasoning = True

    def reader(self, writer: CallWriter, most: int, marker: str) -> QwenXmlReader:
        return QwenXmlReader(writer)

    def rules(
        self, tools: Sequence[CallableTool], markers: Mapping[str, int], most: int
    ) -> grammars.CallRules:
        bodies = [any_body(tools), *text_rule("text_value", f"{grammars.ANY_TEXT}*")]
        end = grammars.literal(f"{END_FUNCTION}\n")
        for index, tool in enumerate(tools):
            if ">" in tool.name or "\n" in tool.name:
                raise GrammarError(
                    f"the tool calls of this model cannot express {tool.name[:100]!r}"
                )
            head = f"{FUNCTION}{tool.name}>\n"
            if isinstance(tool, CustomTool):
                head = grammars.literal(f"{head}{PARAMETER}{INPUT}>\n")
                bodies.append(f"body_{index}: {head} input_{index} {end}")
                bodies += text_rule(f"input_{index}", _input_text(tool))
            else:
                parameters = list(parameter_rules(index, tool.parameters or {}))
                names = " ".join(use for use, _ in parameters)
                bodies.append(f"body_{index}: {grammars.literal(head)} {names} {end}")
                bodies += [line for _, rules in parameters for line in rules]
        return tagged_calls(bodies, {}, markers, most)


def _input_text(tool: CustomTool) -> str:
    """Returns a regular expression for the input, without the slashes around it."""
    form = input_grammar(tool)
    if form is None:
        return f"{grammars.ANY_TEXT}*"
    if form.syntax == "lark":
        raise GrammarError(
            f"the input of {tool.name[:100]!r} has a Lark grammar, and in calls of this model "
            "nothing tells where that ends"
        )
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", form.definition, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")


class _State(Enum):
    HEADER = auto()
    BETWEEN = auto()
    """After the function's name or after a parameter."""
    VALUE = auto()
    REST = auto()
    """After the function. Text up to the closing marker is dropped."""


class QwenXmlReader:
    """Implements `CallReader` for one block. Passes on strings as they are written, and other
    values when they are complete."""

    def __init__(self, writer: CallWriter):
        self.opened = False
        self._writer = writer
        self._state = _State.HEADER
        self._text = ""
        self._seen = ""
        """All text so far, until a call has opened."""
        self._behind: str | None = None
        """The text after the call, once the call has ended."""
        self._custom = False
        self._schemas: Mapping[str, Any] = {}
        """Schemas of the parameters, by name."""
        self._num_parameters = 0
        self._schema: Any = None
        """Schema of the value that is being read."""
        self._value = ""
        """The value so far, if it is not passed on while it is written."""
        self._fresh = False
        """Whether nothing of the value has arrived yet."""
        self._scanner: ObjectScanner | None = None
        """Scans a list or object value, because tags in its strings are text."""

    def push(self, text: str, parts: list[CallPart]) -> str | None:
        self._text += text
        if not self.opened:
            self._seen += text
        while self._behind is None and self._step(parts):
            pass
        return self._behind

    def finish(self, parts: list[CallPart]) -> None:
        if not self.opened:
            parts.append(Content(CALL + self._seen))
        elif self._state is _State.VALUE:
            self._grow(self._text, parts)
            if self._value:
                parts.append(self._writer.arguments(self._value))

    def _step(self, parts: list[CallPart]) -> bool:
        match self._state:
            case _State.HEADER:
                return self._read_header(parts)
            case _State.BETWEEN:
                return self._read_between(parts)
            case _State.VALUE:
                return self._read_value(parts)
            case _State.REST:
                if self._skip_to(END_CALL):
                    self._behind = self._text[len(END_CALL) :]
                return False

    def _read_header(self, parts: list[CallPart]) -> bool:
        head = skip_space(self._text[:MAX_HEADER])
        name, found, _ = head.removeprefix(FUNCTION).partition(">")
        begun = head.startswith(FUNCTION)
        if begun and found and name.strip() and "\n" not in name:
            self._open(name.strip(), parts)
            self._text = skip_space(self._text)[len(FUNCTION) + len(name) + 1 :]
            return True
        may_come = "\n" not in name if begun else FUNCTION.startswith(head)
        if found or not may_come or len(self._text) >= MAX_HEADER:
            parts.append(Content(CALL))
            self._behind = self._seen
        return False

    def _open(self, name: str, parts: list[CallPart]) -> None:
        self.opened = True
        self._state = _State.BETWEEN
        self._custom = self._writer.is_custom(name)
        parts.append(self._writer.open(name))
        tool = self._writer.tools.get(name)
        schema = (tool.parameters or {}) if isinstance(tool, ToolFunction) else {}
        self._schemas = properties_of(schema)
        if not self._custom:
            parts.append(self._writer.arguments("{"))

    def _read_between(self, parts: list[CallPart]) -> bool:
        tag = self._skip_to(PARAMETER, END_FUNCTION, END_CALL)
        if tag is None:
            return False
        if tag == PARAMETER:
            name, found, behind = self._text[len(PARAMETER) :].partition(">")
            if found:
                self._text = behind
                self._begin_value(name.strip(), parts)
            return bool(found)
        self._end_function(parts)
        return True

    def _begin_value(self, name: str, parts: list[CallPart]) -> None:
        self._state, self._fresh, self._value = _State.VALUE, True, ""
        self._schema = self._schemas.get(name)
        if not self._custom:
            comma = ", " if self._num_parameters else ""
            opening = '"' if self._streams else ""
            parts.append(self._writer.arguments(f"{comma}{json_string(name)}: {opening}"))
        self._num_parameters += 1

    @property
    def _streams(self) -> bool:
        """Whether the value is a string, which is passed on as it is written."""
        return self._custom or json_types(self._schema) == STRING

    def _read_value(self, parts: list[CallPart]) -> bool:
        if self._fresh and self._text:
            self._text, self._fresh = self._text.removeprefix("\n"), False
            self._scanner = None
        if not self._streams and not self._read_nested():
            return False
        found = first_marker(self._text, (END_PARAMETER, END_CALL))
        if found is None:
            held = max(partial(self._text, end) for end in _VALUE_ENDS)
            shown = len(self._text) - held
            self._grow(self._text[:shown], parts)
            self._text = self._text[shown:]
            return False
        end, _ = found
        self._grow(self._text[:end].removesuffix("\n"), parts)
        self._text = self._text[end:].removeprefix(END_PARAMETER)
        self._state = _State.BETWEEN
        if not self._streams:
            value = self._value if end else self._value.removesuffix("\n")
            parts.append(self._writer.arguments(as_json(value, self._schema)))
        elif not self._custom:
            parts.append(self._writer.arguments('"'))
        return True

    def _read_nested(self) -> bool:
        """Reads to the end of a list or object value, if it is one. Returns False if more text is
        needed."""
        if not self._value.strip() and self._text[:1] in ("[", "{") and self._scanner is None:
            self._scanner = ObjectScanner(END_PARAMETER)
        if self._scanner is None or self._scanner.complete or self._scanner.cut:
            return True
        end = self._scanner.push(self._text)
        self._value, self._text = self._value + self._text[:end], self._text[end:]
        return self._scanner.complete or self._scanner.cut

    def _grow(self, text: str, parts: list[CallPart]) -> None:
        if not self._streams:
            self._value += text
        elif text:
            shown = text if self._custom else json_string(text)[1:-1]
            parts.append(self._writer.arguments(shown))

    def _end_function(self, parts: list[CallPart]) -> None:
        self._state = _State.REST
        if not self._custom:
            parts.append(self._writer.arguments("}"))

    def _skip_to(self, *tags: str) -> str | None:
        """Drops the text before the first of the tags and returns the tag; None if none has
        arrived."""
        found = first_marker(self._text, tags)
        if found is None:
            held = max(partial(self._text, tag) for tag in tags)
            self._text = self._text[len(self._text) - held :]
            return None
        place, tag = found
        self._text = self._text[place:]
        return tag
