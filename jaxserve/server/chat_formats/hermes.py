"""Hermes tool calls, as Qwen3 writes them: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

from jaxserve.grammar_server.wire import Grammar
from jaxserve.server.chat_formats.json_calls import (
    NoHeader,
    ObjectScanner,
    any_body,
    header,
    json_body,
    json_head,
    parse_call,
)
from jaxserve.server.chat_formats.pieces import CallPart, Content, partial
from jaxserve.server.chat_formats.tool_call_tags import CALL, END_CALL, tagged_calls
from jaxserve.server.chat_formats.tool_format import (
    MAX_HEADER,
    CallableTool,
    CallWriter,
    ToolFormat,
    input_grammar,
)
from jaxserve.server.request.schema import CustomTool
from jaxserve.structured import grammars
from jaxserve.structured.errors import GrammarError

_ARGUMENTS = ("arguments",)
_FREE_TEXT_END = "}\n"
"""The template's text after arguments, both for free text and for JSON."""


class Hermes(ToolFormat):
    """Hermes tool calls. Custom tools have their verbatim input in place of JSON arguments."""

    name = "hermes"
    begins = CALL
    markers = (CALL, END_CALL)
    turn_ends = ("<|im_end|>",)
    free_text = True

    def reader(self, writer: CallWriter, most: int, marker: str) -> HermesReader:
        return HermesReader(writer)

    def rules(
        self, tools: Sequence[CallableTool], markers: Mapping[str, int], most: int
    ) -> grammars.CallRules:
        bodies, inputs = [any_body(tools)], dict[str, Grammar]()
        for index, tool in enumerate(tools):
            if isinstance(tool, CustomTool):
                if END_CALL not in markers:
                    raise GrammarError("this model has no token that ends a call with free text")
                inputs[f"input_{index}"] = _free_text(tool)
                head = json_head(tool.name, "arguments")
                bodies.append(f"body_{index}: {head} @input_{index}")
            else:
                bodies += json_body(index, tool, "arguments", end="}\n")
        return tagged_calls(bodies, inputs, markers, most)


def _free_text(tool: CustomTool) -> Grammar:
    form = input_grammar(tool)
    if form is not None and form.syntax == "lark":
        return grammars.grammar(form.definition)
    text = f"{grammars.ANY_TEXT}*" if form is None else form.definition
    return grammars.regex(rf"(?:{text})\}}\n")


def free_text_end(tool: CallableTool | None) -> str:
    """Returns the text between the free text of a call and its closing marker. A Lark grammar may
    end with a terminal that would also match the text after it."""
    form = input_grammar(tool) if isinstance(tool, CustomTool) else None
    return "" if form is not None and form.syntax == "lark" else _FREE_TEXT_END


class _State(Enum):
    HEADER = auto()
    WHOLE = auto()
    """The call has no header to stream. It is parsed at its end."""
    ARGUMENTS = auto()
    FREE_TEXT = auto()
    REST = auto()
    """After the arguments. Text up to the closing marker is dropped."""


class HermesReader:
    """Implements `CallReader` for one call.

    Text is a call as soon as its name and the opening brace of its arguments have appeared. From
    then on the arguments are passed on as written, complete or not. Other text is returned
    unchanged.
    """

    def __init__(self, writer: CallWriter):
        self.opened = False
        self._writer = writer
        self._end = ""
        """End marker of the free text that is being read."""
        self._state = _State.HEADER
        self._text = ""
        """HEADER, WHOLE: all text so far. Later: a possible beginning of the closing marker."""
        self._scanner = ObjectScanner(END_CALL)

    def push(self, text: str, parts: list[CallPart]) -> str | None:
        self._text += text
        if self._state is _State.HEADER:
            self._read_header(parts)
        if self._state is _State.ARGUMENTS:
            return self._read_arguments(parts)
        if self._state is _State.FREE_TEXT:
            return self._read_free_text(parts)
        before, found, after = self._text.partition(END_CALL)
        if not found:
            if self._state is _State.REST:
                self._text = self._text[len(self._text) - partial(self._text, END_CALL) :]
            return None
        if self._state is not _State.REST:
            parts += self._whole(before, END_CALL)
        return after

    def finish(self, parts: list[CallPart]) -> None:
        if self._state in (_State.HEADER, _State.WHOLE):
            parts += self._whole(self._text, "")
        elif self._state in (_State.ARGUMENTS, _State.FREE_TEXT) and self._text:
            parts.append(self._writer.arguments(self._text))

    def _read_header(self, parts: list[CallPart]) -> None:
        found = header(self._text[:MAX_HEADER], _ARGUMENTS, self._writer.is_custom)
        if found is None:
            closed = END_CALL in self._text
            if closed or len(self._text) >= MAX_HEADER:
                self._state = _State.WHOLE
        elif isinstance(found, NoHeader):
            self._state = _State.WHOLE
        else:
            name, start = found
            self.opened = True
            parts.append(self._writer.open(name))
            self._text = self._text[start:]
            custom = self._writer.is_custom(name)
            self._state = _State.FREE_TEXT if custom else _State.ARGUMENTS
            self._end = free_text_end(self._writer.tools.get(name))

    def _read_free_text(self, parts: list[CallPart]) -> str | None:
        closing = self._end + END_CALL
        text, found, after = self._text.partition(END_CALL)
        if found:
            text = text.removesuffix(self._end)
        else:
            held = max(partial(text, closing), partial(text, END_CALL))
            text = text[: len(text) - held]
            self._text = self._text[len(text) :]
        if text:
            parts.append(self._writer.arguments(text))
        return after if found else None

    def _read_arguments(self, parts: list[CallPart]) -> str | None:
        """Reads up to the brace that closes the arguments, or up to the closing marker outside
        strings."""
        end = self._scanner.push(self._text)
        if end:
            parts.append(self._writer.arguments(self._text[:end]))
        self._text = self._text[end:]
        if self._scanner.complete:
            self._state = _State.REST
            return self.push("", parts)
        return self._text[len(END_CALL) :] if self._scanner.cut else None

    def _whole(self, text: str, closing: str) -> Iterator[CallPart]:
        call = parse_call(text)
        if call is None:
            yield Content(CALL + text + closing)
        else:
            name, arguments = call
            self.opened = True
            yield self._writer.open(name)
            yield self._writer.arguments(arguments)
