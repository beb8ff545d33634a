"""Output items of a response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.server.chat_formats.pieces import CallOpened, Reasoning
from jaxserve.server.output.segments import Segment
from jaxserve.server.responses.tools import Name

type Json = dict[str, Any]


class OutputItems:
    """Formats segments of an output as output items of the API."""

    def __init__(
        self, key: str, names: Mapping[str, Name], seal: Callable[[str], str] | None = None
    ):
        """`key`: unique part of the response's ids; `names`: the client's names of tools in
        namespaces; `seal`: encrypts reasoning, if the client asks for that."""
        self._key = key
        self._names = names
        self._seal = seal
        self._sealed: dict[int, str] = {}
        """Encrypted reasoning by segment, because encrypting the same text twice gives two
        results."""

    def id(self, segment: Segment) -> str:
        first = segment.first
        if isinstance(first, CallOpened):
            prefix = "ctc" if first.custom else "fc"
        else:
            prefix = "rs" if isinstance(first, Reasoning) else "msg"
        return f"{prefix}_{self._key}{segment.index}"

    def opened(self, segment: Segment) -> Json:
        """Returns the item as it is announced, still empty."""
        item = self.finished(segment, "in_progress", [])
        for name, nothing in (("content", []), ("arguments", ""), ("input", "")):
            if name in item:
                item[name] = nothing
        return item

    def finished(self, segment: Segment, status: str, logprobs: list[Json]) -> Json:
        item: Json = {"id": self.id(segment), "status": status}
        if isinstance(segment.first, CallOpened):
            return item | self._call(segment.first, segment.text)
        part = {**empty_part(segment), "text": segment.text}
        if isinstance(segment.first, Reasoning):
            item |= {"type": "reasoning", "summary": [], "content": [part]}
            if self._seal is not None and status != "in_progress":
                if segment.index not in self._sealed:
                    self._sealed[segment.index] = self._seal(segment.text)
                item["encrypted_content"] = self._sealed[segment.index]
            return item
        if logprobs:
            part["logprobs"] = logprobs
        return {**item, "type": "message", "role": "assistant", "content": [part]}

    def called_name(self, call: CallOpened) -> Json:
        """Returns the call's name in the fields that the client expects."""
        name = self._names.get(call.name, Name(None, call.name))
        if name.namespace is None:
            return {"name": name.name}
        return {"name": name.name, "namespace": name.namespace}

    def _call(self, call: CallOpened, text: str) -> Json:
        kind, field = (
            ("custom_tool_call", "input") if call.custom else ("function_call", "arguments")
        )
        return {"type": kind, "call_id": call.id, **self.called_name(call), field: text}


def empty_part(segment: Segment) -> Json:
    if isinstance(segment.first, Reasoning):
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
