"""Formats a chat's output as a response and its events, in the official order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from jaxserve.api import FinishReason, SamplingParams
from jaxserve.server.arrival import Arrival
from jaxserve.server.chat_formats.pieces import CallOpened, Content, Reasoning
from jaxserve.server.errors import ApiError
from jaxserve.server.output.generation import Delta, Generation
from jaxserve.server.output.logprobs import chat_logprobs
from jaxserve.server.output.segments import Change, Grew, Opened, Segment, Segments
from jaxserve.server.responses.items import OutputItems, empty_part
from jaxserve.server.responses.schema import ResponsesRequest, ToolDefinition
from jaxserve.server.responses.tools import client_names
from jaxserve.server.sse import named_event, padded

type Json = dict[str, Any]


class ResponsesReply:
    """Implements `Reply` for /v1/responses."""

    def __init__(
        self,
        *,
        arrival: Arrival,
        model: str,
        generation: Generation,
        fields: ResponsesRequest,
        seal: Callable[[str], str] | None,
        keep: Callable[[Json], None] | None,
    ):
        """`seal`: encrypts reasoning, if the client asks for that; `keep`: stores the complete
        response before the client gets it."""
        self._generation = generation
        self._choice = generation.choices[0]
        self._tokenizer = arrival.service.tokenizer
        self._num_top = fields.top_logprobs or 0
        self._obfuscated = (
            fields.stream_options is not None and fields.stream_options.include_obfuscation is True
        )
        self._segments = Segments()
        self._logprobs: dict[int, list[Json]] = {}
        """By segment: logprobs of the tokens that ended in it."""
        self._held: list[Json] = []
        """Logprobs of tokens whose text may still come."""
        self._finish: FinishReason | None = None
        self._sequence = 0
        self._items = OutputItems(arrival.id, client_names(fields.tools or ()), seal)
        self._keep_response = keep
        head = _head(arrival, model, fields, self._choice.request.params)
        self._head = {**head, "store": keep is not None}

    def events(self, delta: Delta) -> bytes:
        parts: list[bytes] = []
        if not self._sequence:
            parts.append(self._event("response.created", response=self._response("in_progress")))
            parts.append(
                self._event("response.in_progress", response=self._response("in_progress"))
            )
        self._held += self._entries(delta)
        for change in self._segments.push(delta.pieces):
            parts += self._change_events(change)
        if not delta.held:
            self._held = []
        if delta.finish is not None:
            self._finish = delta.finish
            for change in self._segments.close():
                parts += self._change_events(change)
        return b"".join(parts)

    def last_events(self) -> bytes:
        body = self.body()
        return self._event(f"response.{body['status']}", response=body)

    def error_events(self, error: ApiError) -> bytes:
        failed = self._response("failed")
        # An official code, and one that clients do not retry if the error is theirs.
        code = "invalid_prompt" if error.status == 400 else "server_error"
        failed["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=failed)

    def collect(self, delta: Delta) -> None:
        self._held += self._entries(delta)
        for change in self._segments.push(delta.pieces):
            self._keep(change)
        if not delta.held:
            self._held = []
        self._finish = delta.finish

    def body(self) -> Json:
        if self._finish is FinishReason.LENGTH:
            body = self._response("incomplete")
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body = self._response("completed")
        body["output"] = [self._finished(segment) for segment in self._segments.all]
        body["usage"] = self._usage()
        if self._keep_response is not None:
            self._keep_response(body)
        return body

    def _event(self, kind: str, **fields: Any) -> bytes:
        body: Json = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        if self._obfuscated and kind.endswith(".delta"):
            body = padded(body)
        return named_event(kind, body)

    def _entries(self, delta: Delta) -> list[Json]:
        if delta.logprobs is None:
            return []
        return chat_logprobs(self._tokenizer, delta.tokens[0], delta.logprobs, self._num_top)

    def _keep(self, change: Change) -> list[Json]:
        """Returns the logprobs of the tokens in more text of a message."""
        if not (isinstance(change, Grew) and isinstance(change.segment.first, Content)):
            return []
        entries, self._held = self._held, []
        self._logprobs.setdefault(change.segment.index, []).extend(entries)
        return entries

    def _change_events(self, change: Change) -> list[bytes]:
        entries = self._keep(change)
        if isinstance(change, Opened):
            return self._opening(change.segment)
        if isinstance(change, Grew):
            return [self._growth(change.segment, change.text, entries)]
        return self._closing(change.segment)

    def _opening(self, segment: Segment) -> list[bytes]:
        item = self._items.opened(segment)
        added = self._event("response.output_item.added", output_index=segment.index, item=item)
        if isinstance(segment.first, CallOpened):
            return [added]
        part = empty_part(segment)
        return [
            added,
            self._event("response.content_part.added", **self._place(segment), part=part),
        ]

    def _growth(self, segment: Segment, text: str, entries: list[Json]) -> bytes:
        if isinstance(segment.first, CallOpened):
            place = {"item_id": self._items.id(segment), "output_index": segment.index}
            return self._event(f"{_call_events(segment.first)}.delta", **place, delta=text)
        if isinstance(segment.first, Reasoning):
            return self._event("response.reasoning_text.delta", **self._place(segment), delta=text)
        return self._event(
            "response.output_text.delta", **self._place(segment), delta=text, logprobs=entries
        )

    def _closing(self, segment: Segment) -> list[bytes]:
        item = self._finished(segment)
        events = [self._text_done(segment, item)]
        if not isinstance(segment.first, CallOpened):
            place = self._place(segment)
            part = item["content"][0]
            events.append(self._event("response.content_part.done", **place, part=part))
        place = {"output_index": segment.index}
        events.append(self._event("response.output_item.done", **place, item=item))
        return events

    def _text_done(self, segment: Segment, item: Json) -> bytes:
        text = segment.text
        if isinstance(segment.first, CallOpened):
            place = {"item_id": item["id"], "output_index": segment.index}
            said = {"input": text}
            if not segment.first.custom:
                said = {**self._items.called_name(segment.first), "arguments": text}
            return self._event(f"{_call_events(segment.first)}.done", **place, **said)
        if isinstance(segment.first, Reasoning):
            return self._event("response.reasoning_text.done", **self._place(segment), text=text)
        logprobs = item["content"][0]["logprobs"]
        return self._event(
            "response.output_text.done", **self._place(segment), text=text, logprobs=logprobs
        )

    def _place(self, segment: Segment) -> Json:
        return {
            "item_id": self._items.id(segment),
            "output_index": segment.index,
            "content_index": 0,
        }

    def _finished(self, segment: Segment) -> Json:
        last = segment.index == len(self._segments.all) - 1
        cut = self._finish is FinishReason.LENGTH and last
        status = "incomplete" if cut else "completed"
        return self._items.finished(segment, status, self._logprobs.get(segment.index, []))

    def _response(self, status: str) -> Json:
        return {**self._head, "status": status}

    def _usage(self) -> Json:
        prompt, output = self._generation.prompt_tokens, self._generation.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._generation.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._generation.reasoning_tokens},
            "total_tokens": prompt + output,
        }


def _call_events(call: CallOpened) -> str:
    text = "custom_tool_call_input" if call.custom else "function_call_arguments"
    return f"response.{text}"


def _head(arrival: Arrival, model: str, fields: ResponsesRequest, params: SamplingParams) -> Json:
    """Returns the fields of a response that repeat its request, with the values that were used."""
    reasoning = fields.reasoning
    return {
        "id": f"resp_{arrival.id}",
        "object": "response",
        "created_at": arrival.created,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "temperature": params.temperature,
        "text": {"format": _written(fields.text and fields.text.format) or {"type": "text"}},
        "tool_choice": _written(fields.tool_choice) or "auto",
        "tools": [_written(tool) for tool in fields.tools or () if _honoured(tool)],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        **arrival.tier(fields),
    }


def _honoured(tool: ToolDefinition) -> bool:
    return tool.type in ("function", "custom", "namespace")


def _written(value: Any) -> Any:
    """Returns a value as the client wrote it, without absent fields."""
    return msgspec.to_builtins(value)
