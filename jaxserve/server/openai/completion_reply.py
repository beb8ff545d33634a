"""Formats a completion's deltas as OpenAI's chunks, and the chunks as one body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.api import PromptLogprobs
from jaxserve.server.arrival import Arrival
from jaxserve.server.openai.reply import Json, OpenAIReply
from jaxserve.server.output.generation import Delta, Generation
from jaxserve.server.output.logprobs import TextLogprobs, prompt_logprobs
from jaxserve.server.request.schema import CompletionRequest, StreamOptions
from jaxserve.server.sse import TextEvent
from jaxserve.tokenizer import Tokenizer


class CompletionReply(OpenAIReply):
    """Implements `Reply` for /v1/completions."""

    def __init__(
        self,
        *,
        arrival: Arrival,
        model: str,
        generation: Generation,
        options: StreamOptions,
        echoes: list[str],
        fields: CompletionRequest,
    ):
        super().__init__(
            arrival=arrival,
            prefix="cmpl",
            kind="text_completion",
            model=model,
            generation=generation,
            options=options,
            fields=fields,
        )
        self._num_prompt_logprobs = fields.prompt_logprobs
        self._num_echoed = fields.logprobs if fields.echo else None
        per_prompt = len(generation.choices) // len(echoes)
        self._states = [
            _ChoiceState(echoes[c.index // per_prompt], self._tokenizer) for c in generation.choices
        ]

    def events(self, delta: Delta) -> bytes:
        if (event := self._text_event(delta)) is not None:
            return event
        return self._encode(self._chunk(self._choice(delta)))

    def _text_event(self, delta: Delta) -> bytes | None:
        """Returns the event of a delta that only adds text. Nearly all deltas are of this kind."""
        state = self._states[delta.choice]
        if not self._plain or not state.begun or delta.finish is not None:
            return None
        if delta.logprobs is not None or delta.prompt_logprobs is not None:
            return None
        if state.text_event is None:
            state.text_event = TextEvent(
                lambda text: self._chunk(self._choice(delta._replace(text=text)))
            )
        return state.text_event(delta.text)

    def collect(self, delta: Delta) -> None:
        self._states[delta.choice].deltas.append(delta)

    def body(self) -> Json:
        choices = [_joined([self._choice(d) for d in state.deltas]) for state in self._states]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _choice(self, delta: Delta) -> Json:
        state = self._states[delta.choice]
        choice: Json = {
            "index": delta.choice,
            "text": state.take_echo() + delta.text,
            "logprobs": None,
            "finish_reason": delta.finish,
        }
        prompt = self.generation.choices[delta.choice].request.prompt
        parts = list(self._logprobs(state, prompt, delta))
        if parts:
            choice["logprobs"] = _concatenated(parts)
        if delta.prompt_logprobs is not None and (most := self._num_prompt_logprobs) is not None:
            shown = [_cut(entry, most) for entry in delta.prompt_logprobs]
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt, shown)
        if self._return_token_ids:
            choice["token_ids"] = list(delta.tokens)
            if not state.begun:
                choice["prompt_token_ids"] = list(prompt)
        state.begun = True
        return choice

    def _logprobs(
        self, state: _ChoiceState, prompt: Sequence[int], delta: Delta
    ) -> Iterator[dict[str, list[Any]]]:
        if delta.prompt_logprobs is not None and (most := self._num_echoed) is not None:
            state.logprobs = TextLogprobs(self._tokenizer, 0)
            shown = [_cut(entry, most) for entry in delta.prompt_logprobs]
            yield state.logprobs.of(prompt, [None, *shown])
        if delta.logprobs is not None:
            yield state.logprobs.of(delta.tokens, [delta.logprobs])


class _ChoiceState:
    """State of one choice between its chunks."""

    def __init__(self, echo: str, tokenizer: Tokenizer):
        self.begun = False
        self.text_event: TextEvent | None = None
        self.deltas: list[Delta] = []
        self.logprobs = TextLogprobs(tokenizer, len(echo))
        self._echo = echo

    def take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo


def _cut(entry: PromptLogprobs, most: int) -> PromptLogprobs:
    return entry._replace(top=entry.top[:most])


def _concatenated(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _joined(chunks: list[Json]) -> Json:
    """Joins the chunks of a choice for a body without streaming."""
    whole = {**chunks[0], "text": "".join(chunk["text"] for chunk in chunks)}
    whole["finish_reason"] = chunks[-1]["finish_reason"]
    if "token_ids" in whole:
        whole["token_ids"] = [token for chunk in chunks for token in chunk["token_ids"]]
    logprobs = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    if logprobs:
        whole["logprobs"] = _concatenated(logprobs)
    return whole
