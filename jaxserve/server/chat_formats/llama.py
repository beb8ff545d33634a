"""Llama 3's tool calls: `{"name": …, "parameters": …}`, optionally after `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxserve.server.chat_formats.json_calls import ObjectCall, any_body, json_body, skip_space
from jaxserve.server.chat_formats.pieces import CallPart, Content
from jaxserve.server.chat_formats.tool_format import CallableTool, CallWriter, ToolFormat
from jaxserve.structured import grammars

PYTHON_TAG = "<|python_tag|>"
BETWEEN = ";"
"""Separates two calls."""


class Llama3Json(ToolFormat):
    """Llama 3's tool calls. An answer is a call if it begins with the JSON of a call of a known
    tool, or has such JSON after the marker. Custom tools are called with an object that holds their
    input.
    """

    name = "llama3_json"
    begins = PYTHON_TAG
    markers = (PYTHON_TAG,)
    turn_ends = ("<|eot_id|>", "<|eom_id|>")
    bare = True

    def reader(self, writer: CallWriter, most: int, marker: str) -> Llama3Reader:
        return Llama3Reader(writer, most, marker)

    def rules(
        self, tools: Sequence[CallableTool], markers: Mapping[str, int], most: int
    ) -> grammars.CallRules:
        more = f' ("{BETWEEN}" body){{0,{most - 1}}}' if most > 1 else ""
        tag = f"{grammars.marker(PYTHON_TAG, markers)}? " if PYTHON_TAG in markers else ""
        lines = [
            f"calls: {tag}body{more}",
            any_body(tools),
            # A text that begins with a brace is parsed as a call; other text is not.
            rf"prose: /\s*[^{{\s]{grammars.ANY_TEXT}*/",
        ]
        for index, tool in enumerate(tools):
            lines += json_body(index, tool, "parameters")
        return grammars.CallRules(lines, {}, "calls | prose?")


class Llama3Reader:
    """Implements `CallReader` for all calls of an answer."""

    def __init__(self, writer: CallWriter, most: int, marker: str):
        self.opened = False
        self._writer = writer
        self._most = most
        self._marker = marker
        self._text = ""
        self._seen = ""
        """All text so far, until a call has opened."""
        self._call = self._next_call()
        self._between = False

    def push(self, text: str, parts: list[CallPart]) -> str | None:
        self._text += text
        if not self.opened:
            self._seen += text
        while True:
            if self._between:
                if (behind := self._read_between()) is not None:
                    return behind
                if self._between:
                    return None
            self._text = self._call.push(self._text, parts)
            self.opened |= self._call.opened
            if self._call.refused:
                return self._refused(parts)
            if not self._call.ended:
                return None
            self._between = True

    def finish(self, parts: list[CallPart]) -> None:
        if not self.opened:
            parts.append(Content(self._marker + self._seen))
        elif not self._between:
            self._call.finish(self._text, parts)

    def _next_call(self) -> ObjectCall:
        return ObjectCall(self._writer, ("parameters", "arguments"), only_known=True)

    def _read_between(self) -> str | None:
        """Reads the text after a call. Returns text that is not another call; None if another call
        begins or more text is needed."""
        text = skip_space(self._text)
        if self._writer.num_calls >= self._most:
            return text
        if not text.startswith(BETWEEN):
            return text or None
        text = skip_space(text[len(BETWEEN) :])
        if text.startswith(PYTHON_TAG):
            text = skip_space(text[len(PYTHON_TAG) :])
        elif PYTHON_TAG.startswith(text):
            return None
        if text:
            self._text, self._between, self._call = text, False, self._next_call()
        return None

    def _refused(self, parts: list[CallPart]) -> str:
        """Ends the reader: the text is not a call."""
        if self.opened:
            return self._text
        if self._marker:
            parts.append(Content(self._marker))
        return self._seen
