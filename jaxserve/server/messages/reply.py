"""Formats a chat's output for the Messages API."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.api import FinishReason
from jaxserve.server.arrival import Arrival
from jaxserve.server.chat_formats.pieces import CallOpened, Reasoning
from jaxserve.server.errors import ApiError, anthropic_body
from jaxserve.server.output.generation import Delta, Generation
from jaxserve.server.output.segments import Change, Grew, Opened, Segment, Segments
from jaxserve.server.sse import named_event

type Json = dict[str, Any]


class MessagesReply:
    """Implements `Reply` for /v1/messages."""

    def __init__(self, *, arrival: Arrival, model: str, generation: Generation):
        self._generation = generation
        self._choice = generation.choices[0]
        self._segments = Segments()
        self._finish: FinishReason | None = None
        self._begun = False
        self._head: Json = {
            "id": f"msg_{arrival.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def events(self, delta: Delta) -> bytes:
        parts = [] if self._begun else [self._message_start()]
        self._begun = True
        parts += [_change_event(change) for change in self._segments.push(delta.pieces)]
        if delta.finish is not None:
            self._finish = delta.finish
            parts += [_change_event(change) for change in self._segments.close()]
        return b"".join(parts)

    def last_events(self) -> bytes:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._choice.matched_stop}
        body = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return _event(body) + _event({"type": "message_stop"})

    def error_events(self, error: ApiError) -> bytes:
        return _event(anthropic_body(error))

    def collect(self, delta: Delta) -> None:
        for _ in self._segments.push(delta.pieces):
            pass
        self._finish = delta.finish

    def body(self) -> Json:
        return {
            **self._head,
            "content": [_block(segment) for segment in self._segments.all],
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._choice.matched_stop,
            "usage": self._usage(),
        }

    def _message_start(self) -> bytes:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": {**message, "usage": self._usage()}})

    def _usage(self) -> Json:
        """Returns the usage. `input_tokens` does not include tokens read from the cache."""
        cached = self._generation.cached_tokens
        return {
            "input_tokens": self._generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._generation.completion_tokens,
        }

    def _stop_reason(self) -> str:
        if self._finish is FinishReason.LENGTH:
            return "max_tokens"
        if self._choice.matched_stop is not None:
            return "stop_sequence"
        parser = self._choice.parser
        return "tool_use" if parser is not None and parser.num_calls else "end_turn"


def _event(body: Json) -> bytes:
    return named_event(body["type"], body)


def _change_event(change: Change) -> bytes:
    segment = change.segment
    body: Json = {"type": "content_block_stop", "index": segment.index}
    if isinstance(change, Opened):
        block = _empty_block(segment)
        body = {"type": "content_block_start", "index": segment.index, "content_block": block}
    elif isinstance(change, Grew):
        delta = _block_delta(segment, change.text)
        body = {"type": "content_block_delta", "index": segment.index, "delta": delta}
    elif isinstance(segment.first, Reasoning):
        # Reasoning is not signed. Clients expect a signature to complete the block, so it is empty.
        delta = {"type": "signature_delta", "signature": ""}
        signature = {"type": "content_block_delta", "index": segment.index, "delta": delta}
        return _event(signature) + _event(body)
    return _event(body)


def _empty_block(segment: Segment) -> Json:
    if isinstance(segment.first, CallOpened):
        call = segment.first
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    if isinstance(segment.first, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block_delta(segment: Segment, text: str) -> Json:
    if isinstance(segment.first, CallOpened):
        return {"type": "input_json_delta", "partial_json": text}
    if isinstance(segment.first, Reasoning):
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _block(segment: Segment) -> Json:
    block = _empty_block(segment)
    if block["type"] == "tool_use":
        block["input"] = _parsed(segment.text)
    else:
        block[block["type"]] = segment.text
    return block


def _parsed(arguments: str) -> Json:
    """Parses arguments. Puts text that is no JSON object, such as unfinished JSON, under the
    documented key."""
    try:
        return msgspec.json.decode(arguments.encode(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {"INVALID_JSON": arguments}
