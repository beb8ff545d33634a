"""Formats a chat's deltas as OpenAI's chunks, and the chunks as one body."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.api import FinishReason, PromptLogprobs
from jaxserve.server.arrival import Arrival
from jaxserve.server.chat_formats.pieces import (
    CallArguments,
    CallOpened,
    Content,
    Piece,
    Reasoning,
)
from jaxserve.server.chat_formats.tool_format import Parser
from jaxserve.server.openai.reply import Json, OpenAIReply
from jaxserve.server.output.generation import Delta, Generation
from jaxserve.server.output.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.server.request.schema import ChatRequest, NamedCustomTool, NamedTool, StreamOptions
from jaxserve.server.sse import TextEvent

_REASONING_NAMES = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}
"""Two names of the field are in use: vLLM's, and that of SGLang and DeepSeek."""


class ChatReply(OpenAIReply):
    """Implements `Reply` for /v1/chat/completions."""

    def __init__(
        self,
        *,
        arrival: Arrival,
        model: str,
        generation: Generation,
        options: StreamOptions,
        fields: ChatRequest,
    ):
        super().__init__(
            arrival=arrival,
            prefix="chatcmpl",
            kind="chat.completion.chunk",
            model=model,
            generation=generation,
            options=options,
            fields=fields,
        )
        self._num_top = fields.top_logprobs or 0
        self._reasoning = _REASONING_NAMES[arrival.service.config.reasoning_field]
        self._show_reasoning = fields.include_reasoning is not False
        self._prompt_logprobs: Sequence[PromptLogprobs] | None = None
        self._named_tool = isinstance(fields.tool_choice, NamedTool | NamedCustomTool)
        self._held: list[list[Json]] = [[] for _ in generation.choices]
        """Logprobs of tokens whose text may still come."""
        self._collected: list[list[Json]] = [[] for _ in generation.choices]
        self._begun = [False] * len(generation.choices)
        self._text_events: dict[tuple[int, type[Piece]], TextEvent] = {}

    def events(self, delta: Delta) -> bytes:
        if (event := self._text_event(delta)) is not None:
            return event
        return b"".join(self._encode(self._chunk(c)) for c in self._choices(delta))

    def _text_event(self, delta: Delta) -> bytes | None:
        """Returns the event of a delta that only adds text. Nearly all deltas are of this kind."""
        if not self._plain or delta.finish is not None or delta.logprobs is not None:
            return None
        if len(delta.pieces) != 1 or not self._begun[delta.choice]:
            return None
        piece = delta.pieces[0]
        if not isinstance(piece, Content | Reasoning) or not self._shown(piece):
            return None
        index, kind = key = (delta.choice, type(piece))
        if (event := self._text_events.get(key)) is None:
            event = self._text_events[key] = TextEvent(
                lambda text: self._chunk(self._piece_choice(index, kind(text)))
            )
        return event(piece.text)

    def _piece_choice(self, index: int, piece: Piece) -> Json:
        return _choice(index, _delta_fields(piece, self._reasoning))

    def collect(self, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._collected[delta.choice] += self._choices(delta)

    def body(self) -> Json:
        choices = [
            _joined(index, parts, self._reasoning) for index, parts in enumerate(self._collected)
        ]
        head = {**self._head, "object": "chat.completion"}
        body: Json = {**head, "choices": choices, "usage": self._usage()}
        if self._prompt_logprobs is not None:
            prompt = self.generation.choices[0].request.prompt
            body["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, prompt, self._prompt_logprobs
            )
        return body

    def _choices(self, delta: Delta) -> list[Json]:
        """Returns the choices in a step's chunks; empty while the parser has no output."""
        parser = self.generation.choices[delta.choice].parser
        reasoning = parser is not None and parser.in_reasoning
        pieces = filter(self._shown, delta.pieces)
        deltas = [_delta_fields(piece, self._reasoning) for piece in pieces]
        entries = self._released(delta)
        if not deltas and (self._must_speak(delta) or not (delta.text or delta.pieces)):
            names = self._reasoning if reasoning and self._show_reasoning else ("content",)
            # If there are only calls, a client that concatenates contents must get none.
            called = parser is not None and parser.num_calls > 0
            deltas = [{} if called else dict.fromkeys(names, "")]
        if not deltas:
            return []
        choices = [_choice(delta.choice, fields) for fields in deltas]
        if self._return_token_ids:
            choices[0]["token_ids"] = list(delta.tokens)
        if entries:
            shown = (choice for choice in choices if "content" in choice["delta"])
            next(shown, choices[0])["logprobs"] = {"content": entries, "refusal": None}
        choices[-1]["finish_reason"] = self._finish_reason(delta.finish, parser)
        if not self._begun[delta.choice]:
            self._begun[delta.choice] = True
            choices.insert(0, self._role_choice(delta.choice, deltas[0]))
        return choices

    def _released(self, delta: Delta) -> list[Json]:
        """Returns the logprobs of this step: those of the content's tokens, once it is shown. If
        the client asked for token ids, those of all tokens at once."""
        if delta.logprobs is None:
            return []
        held = self._held[delta.choice]
        held += chat_logprobs(self._tokenizer, delta.tokens[0], delta.logprobs, self._num_top)
        shown = any(isinstance(piece, Content) for piece in delta.pieces)
        released = list(held) if shown or self._return_token_ids else []
        if released or not delta.held:
            held.clear()
        return released

    def _shown(self, piece: Piece) -> bool:
        return self._show_reasoning or not isinstance(piece, Reasoning)

    def _finish_reason(self, finish: FinishReason | None, parser: Parser | None) -> str | None:
        called = parser is not None and parser.num_calls > 0 and not self._named_tool
        return "tool_calls" if called and finish is FinishReason.STOP else finish

    def _must_speak(self, delta: Delta) -> bool:
        return delta.finish is not None or self._return_token_ids

    def _role_choice(self, index: int, first: Json) -> Json:
        """Returns the choice with the role. `first`: its next part; a call has no content before
        it."""
        content = "" if "content" in first else None
        choice = _choice(index, {"role": "assistant", "content": content})
        if self._return_token_ids:
            choice["prompt_token_ids"] = list(self.generation.choices[index].request.prompt)
        return choice


def _choice(index: int, fields: Json) -> Json:
    return {"index": index, "delta": fields, "logprobs": None, "finish_reason": None}


def _delta_fields(piece: Piece, reasoning_names: Sequence[str]) -> Json:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return dict.fromkeys(reasoning_names, text)
        case CallOpened():
            kind, text = _call_names(custom=piece.custom)
            call = {"name": piece.name, text: ""}
            call = {"index": piece.position, "id": piece.id, "type": kind, kind: call}
        case CallArguments():
            kind, text = _call_names(custom=piece.custom)
            call = {"index": piece.position, kind: {text: piece.text}}
    return {"tool_calls": [call]}


def _call_names(*, custom: bool) -> tuple[str, str]:
    """Returns the names of a call's field and of its text."""
    return ("custom", "input") if custom else ("function", "arguments")


def _joined(index: int, parts: list[Json], reasoning_names: Sequence[str]) -> Json:
    """Joins the chunks of a choice for a body without streaming."""
    deltas = [part["delta"] for part in parts]
    message: Json = {"role": "assistant", "content": _text_of(deltas, "content"), "refusal": None}
    if reasoning := _text_of(deltas, reasoning_names[0]):
        message |= dict.fromkeys(reasoning_names, reasoning)
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
    return "".join(fields.get(name) or "" for fields in deltas)


def _joined_calls(deltas: list[Json]) -> list[Json]:
    calls: dict[int, Json] = {}
    for fragment in (call for fields in deltas for call in fields.get("tool_calls", ())):
        index = fragment["index"]
        kind, text = _call_names(custom="custom" in fragment)
        if index not in calls:
            calls[index] = {"id": fragment["id"], "type": kind, kind: dict(fragment[kind])}
        else:
            calls[index][kind][text] += fragment[kind][text]
    return list(calls.values())
