"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from jaxserve.api import EngineLimits, PromptLogprobs
from jaxserve.server.constraints import avoided, constrained, text_constraint, within_budget
from jaxserve.server.errors import ApiError, invalid
from jaxserve.server.generation import Choice, Delta, Generation
from jaxserve.server.logprobs import TextLogprobs, prompt_logprobs
from jaxserve.server.params import (
    choice_requests,
    num_choices,
    sampling_params,
    text_options,
    tokens_to_generate,
    truncated,
)
from jaxserve.server.parse import parse, read_json
from jaxserve.server.prompts import Prompt, completion_prompts
from jaxserve.server.reply import (
    Arrival,
    answer,
    check_stream_options,
    openai_error_events,
    usage_body,
    usage_event,
)
from jaxserve.server.schema import MAX_SEQUENCES, CompletionRequest, StreamOptions
from jaxserve.server.service import SERVICE
from jaxserve.server.sse import DONE, TextEvent, event_encoder
from jaxserve.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    arrival = Arrival(service=request.app[SERVICE], request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored = parse(await read_json(request), CompletionRequest)
    model = service.model_name(fields.model)
    options = check_stream_options(service, fields)
    asked = _asked(fields)
    with arrival.timed_tokenizing():
        prompts = await completion_prompts(fields.prompt, service.tokenizer, service.engine.limits)
    prompts = [_shortened(prompt, fields, service.engine.limits) for prompt in prompts]
    if (count := len(prompts) * num_choices(fields)) > MAX_SEQUENCES:
        raise invalid(
            f"prompts times n must be at most {MAX_SEQUENCES} in one request, got {count}",
            param="n",
        )
    reply = CompletionReply(
        arrival=arrival,
        model=model,
        generation=await _generation(arrival, fields, prompts, asked),
        options=options,
        echoes=[p.spelled(service.tokenizer) for p in prompts] if fields.echo else [],
        fields=fields,
    )
    return await answer(
        arrival, reply.generation, reply, stream=bool(fields.stream), ignored=ignored
    )


async def _generation(
    arrival: Arrival, fields: CompletionRequest, prompts: list[Prompt], asked: int
) -> Generation:
    service = arrival.service
    constraint = text_constraint(fields)
    limits = service.engine.limits
    options = text_options(fields)._replace(prompt_only=fields.max_tokens == 0)
    if fields.echo and fields.logprobs is not None:
        # Clients that score prompts cut the last token off, whatever it is.
        options = options._replace(stop_token_logprobs=True)
    guide = avoided(service, fields)
    choices: list[Choice] = []
    for position, prompt in enumerate(prompts):
        params = sampling_params(
            fields,
            max_tokens=tokens_to_generate(asked, len(prompt.ids), limits),
            logprobs=fields.logprobs,
            defaults=service.config.sampling_defaults,
            limits=limits,
            eos_token_ids=service.tokenizer.eos_token_ids,
            guide=guide,
        )
        if fields.echo and fields.logprobs is not None:
            most = max(fields.logprobs, params.prompt_logprobs or 0)
            params = replace(params, prompt_logprobs=most)
        params = await constrained(service, params, constraint)
        params = within_budget(service, params, fields, prompt.ids)
        requests = choice_requests(f"cmpl-{arrival.id}-{position}", prompt.ids, params, fields)
        for request in requests:
            choices.append(Choice(len(choices), request, service.tokenizer, options))
    return Generation(choices, num_choices(fields))


def _asked(fields: CompletionRequest) -> int:
    """Tokens to compute: one at least, even if only the prompt is scored."""
    if fields.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    if fields.max_tokens < (0 if fields.echo else 1):
        bound = ">= 0" if fields.echo else ">= 1, or 0 with echo"
        raise invalid(
            f"max_tokens: Expected `int` {bound}, got {fields.max_tokens}", param="max_tokens"
        )
    return max(1, fields.max_tokens)


def _shortened(prompt: Prompt, fields: CompletionRequest, limits: EngineLimits) -> Prompt:
    ids = truncated(prompt.ids, _asked(fields), fields, limits)
    return prompt if len(ids) == len(prompt.ids) else Prompt(ids, None)


class CompletionReply:
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
        self.generation = generation
        self._arrival = arrival
        self._options = options
        self._encode = event_encoder(options)
        self._tokenizer = arrival.service.tokenizer
        self._return_token_ids = bool(fields.return_token_ids)
        self._plain = not (options.continuous_usage_stats or options.include_obfuscation)
        self._plain &= not fields.return_token_ids
        self._num_prompt_logprobs = fields.prompt_logprobs
        self._num_echoed = fields.logprobs if fields.echo else None
        self._head = {
            "id": f"cmpl-{arrival.id}",
            "object": "text_completion",
            "created": arrival.created,
            "model": model,
            **arrival.tier(fields),
        }
        per_prompt = len(generation.choices) // max(1, len(echoes))
        self._states = [
            _ChoiceState(echoes[c.index // per_prompt] if echoes else "", self._tokenizer)
            for c in generation.choices
        ]

    def events(self, delta: Delta) -> bytes:
        if (event := self._text_event(delta)) is not None:
            return event
        return self._encode(self._chunk(self._choice(delta)))

    def _text_event(self, delta: Delta) -> bytes | None:
        """For what nearly all deltas are: more text and nothing else."""
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

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage_body(self.generation)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def last_events(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        return self._encode(usage_event(self._arrival, self.generation, self._head)) + DONE

    def error_events(self, error: ApiError) -> bytes:
        return openai_error_events(error)

    def collect(self, delta: Delta) -> None:
        self._states[delta.choice].chunks.append(self._choice(delta))

    def body(self) -> dict[str, Any]:
        choices = [_joined(state.chunks) for state in self._states]
        return {**self._head, "choices": choices, "usage": usage_body(self.generation)}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        state = self._states[delta.choice]
        choice: dict[str, Any] = {
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
    """What has to be remembered between the chunks of one choice."""

    def __init__(self, echo: str, tokenizer: Tokenizer):
        self.begun = False
        self.text_event: TextEvent | None = None
        self.chunks: list[dict[str, Any]] = []
        self.logprobs = TextLogprobs(tokenizer, len(echo))
        self._echo = echo

    def take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo


def _cut(entry: PromptLogprobs, most: int) -> PromptLogprobs:
    return entry._replace(top=entry.top[:most])


def _concatenated(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice whose chunks these are, as a body that is not streamed shows it."""
    whole = {**chunks[0], "text": "".join(chunk["text"] for chunk in chunks)}
    whole["finish_reason"] = chunks[-1]["finish_reason"]
    if "token_ids" in whole:
        whole["token_ids"] = [token for chunk in chunks for token in chunk["token_ids"]]
    logprobs = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    if logprobs:
        whole["logprobs"] = _concatenated(logprobs)
    return whole
