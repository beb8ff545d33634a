"""Deltas of a chat as OpenAI's chunks, and the chunks as one body."""

from __future__ import annotations

from typing import Any

from jaxserve.api import FinishReason
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Delta, Generation
from jaxserve.server.logprobs import chat_logprobs
from jaxserve.server.output_parser import Kind, OutputParser, Piece
from jaxserve.server.reply import Arrival, openai_error_events, usage_body
from jaxserve.server.schema import StreamOptions
from jaxserve.server.sse import DONE, data_event

type Json = dict[str, Any]


class ChatReply:
    def __init__(
        self,
        *,
        arrival: Arrival,
        model: str,
        generation: Generation,
        options: StreamOptions,
        parsers: list[OutputParser],
        num_top_logprobs: int,
        return_token_ids: bool,
    ):
        self._generation = generation
        self._options = options
        self._parsers = parsers
        self._tokenizer = arrival.service.tokenizer
        self._num_top = num_top_logprobs
        self._return_token_ids = return_token_ids
        self._reasoning_tokens = 0
        self._collected: list[list[Json]] = [[] for _ in parsers]
        self._begun = [False] * len(parsers)
        self._head = {
            "id": f"chatcmpl-{arrival.id}",
            "object": "chat.completion.chunk",
            "created": arrival.created,
            "model": model,
        }

    def events(self, delta: Delta) -> bytes:
        return b"".join(data_event(self._chunk([c])) for c in self._choices(delta))

    def last_events(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        return data_event({**self._head, "choices": [], "usage": self._usage()}) + DONE

    def error_events(self, error: ApiError) -> bytes:
        return openai_error_events(error)

    def collect(self, delta: Delta) -> None:
        self._collected[delta.choice] += self._choices(delta)

    def body(self) -> Json:
        choices = [_joined(index, parts) for index, parts in enumerate(self._collected)]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {**self._head, "choices": choices}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> Json:
        return usage_body(self._generation, self._reasoning_tokens)

    def _choices(self, delta: Delta) -> list[Json]:
        """The chunks' choices of one step: none while the parser has nothing to say."""
        parser = self._parsers[delta.choice]
        was_reasoning = parser.reasoning
        pieces = parser.push(delta.text)
        if delta.finish is not None:
            pieces += parser.finish()
        if was_reasoning and parser.reasoning:
            self._reasoning_tokens += len(delta.tokens)
        deltas = [fields for piece in pieces for fields in _delta_fields(piece)]
        if not deltas and (self._must_speak(delta) or not delta.text):
            deltas = [_text_fields(Kind.REASONING if parser.reasoning else Kind.CONTENT, "")]
        if not deltas:
            return []
        choices = [_choice(delta.choice, fields) for fields in deltas]
        self._add_token_fields(choices[0], delta)
        choices[-1]["finish_reason"] = _finish_reason(delta.finish, parser)
        if not self._begun[delta.choice]:
            self._begun[delta.choice] = True
            choices.insert(0, self._role_choice(delta.choice))
        return choices

    def _must_speak(self, delta: Delta) -> bool:
        return delta.finish is not None or delta.logprobs is not None or self._return_token_ids

    def _role_choice(self, index: int) -> Json:
        choice = _choice(index, {"role": "assistant", "content": ""})
        if self._return_token_ids:
            choice["prompt_token_ids"] = list(self._generation.choices[index].request.prompt)
        return choice

    def _add_token_fields(self, choice: Json, delta: Delta) -> None:
        if delta.logprobs is not None:
            choice["logprobs"] = chat_logprobs(
                self._tokenizer, delta.tokens[0], delta.logprobs, self._num_top
            )
        if self._return_token_ids:
            choice["token_ids"] = list(delta.tokens)


def _choice(index: int, fields: Json) -> Json:
    return {"index": index, "delta": fields, "logprobs": None, "finish_reason": None}


def _finish_reason(finish: FinishReason | None, parser: OutputParser) -> str | None:
    if finish is FinishReason.STOP and parser.num_calls:
        return "tool_calls"
    return finish


def _text_fields(kind: Kind, text: str) -> Json:
    # Both names of the reasoning field are in use: vLLM's and the one of SGLang and DeepSeek.
    if kind is Kind.REASONING:
        return {"reasoning": text, "reasoning_content": text}
    return {"content": text}


def _delta_fields(piece: Piece) -> list[Json]:
    call = piece.call
    if call is None:
        return [_text_fields(piece.kind, piece.text)]
    opening = {
        "index": call.position,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": ""},
    }
    arguments = {"index": call.position, "function": {"arguments": call.arguments}}
    return [{"tool_calls": [opening]}, {"tool_calls": [arguments]}]


def _joined(index: int, parts: list[Json]) -> Json:
    """The choice whose chunks these are, as a body that is not streamed shows it."""
    deltas = [part["delta"] for part in parts]
    message: Json = {"role": "assistant", "content": _text_of(deltas, "content"), "refusal": None}
    if reasoning := _text_of(deltas, "reasoning"):
        message |= _text_fields(Kind.REASONING, reasoning)
    if calls := _joined_calls(deltas):
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    choice: Json = {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": parts[-1]["finish_reason"],
    }
    entries = [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
    if entries:
        choice["logprobs"] = {"content": entries, "refusal": None}
    if "prompt_token_ids" in parts[0]:
        choice["prompt_token_ids"] = parts[0]["prompt_token_ids"]
        choice["token_ids"] = [token for part in parts for token in part.get("token_ids", ())]
    return choice


def _text_of(deltas: list[Json], name: str) -> str:
    return "".join(fields.get(name, "") for fields in deltas)


def _joined_calls(deltas: list[Json]) -> list[Json]:
    calls: dict[int, Json] = {}
    for fragment in (call for fields in deltas for call in fields.get("tool_calls", ())):
        index = fragment["index"]
        if index not in calls:
            function = dict(fragment["function"])
            calls[index] = {"id": fragment["id"], "type": "function", "function": function}
        else:
            calls[index]["function"]["arguments"] += fragment["function"]["arguments"]
    return list(calls.values())
