"""Output items of a response."""

from __future__ import annotations

from typing import Any

from jaxserve.server.output.output_parser import Reasoning
from jaxserve.server.output.segments import Segment
from jaxserve.server.output.tool_calls import CallOpened

type Json = dict[str, Any]


def item_id(segment: Segment, key: str) -> str:
    """`key` is the response's own."""
    if isinstance(segment.first, CallOpened):
        prefix = "fc"
    else:
        prefix = "rs" if isinstance(segment.first, Reasoning) else "msg"
    return f"{prefix}_{key}{segment.index}"


def opened_item(segment: Segment, key: str) -> Json:
    """As it is announced: nothing in it yet."""
    item = finished_item(segment, key, "in_progress", [])
    if "content" in item:
        item["content"] = []
    else:
        item["arguments"] = ""
    return item


def finished_item(segment: Segment, key: str, status: str, logprobs: list[Json]) -> Json:
    item: Json = {"id": item_id(segment, key), "status": status}
    if isinstance(segment.first, CallOpened):
        call = segment.first
        names = {"type": "function_call", "call_id": call.id, "name": call.name}
        return {**item, **names, "arguments": segment.text}
    part = {**empty_part(segment), "text": segment.text}
    if isinstance(segment.first, Reasoning):
        return {**item, "type": "reasoning", "summary": [], "content": [part]}
    if logprobs:
        part["logprobs"] = logprobs
    return {**item, "type": "message", "role": "assistant", "content": [part]}


def empty_part(segment: Segment) -> Json:
    if isinstance(segment.first, Reasoning):
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
