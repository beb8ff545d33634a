"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jaxserve.api import EngineLimits, TokenLogprobs
from jaxserve.server.constraints import constrained, text_constraint
from jaxserve.server.errors import ApiError, invalid
from jaxserve.server.generation import Choice, Delta, Generation
from jaxserve.server.logprobs import finite, token_text
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
)
from jaxserve.server.schema import MAX_SEQUENCES, CompletionRequest, StreamOptions
from jaxserve.server.service import SERVICE
from jaxserve.server.sse import DONE, event_encoder
from jaxserve.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    arrival = Arrival(service=request.app[SERVICE], request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored = parse(await read_json(request), CompletionRequest)
    model = service.model_name(fields.model)
    options = check_stream_options(fields)
    if fields.echo and fields.logprobs is not None:
        raise invalid("echo with logprobs is not supported", param="echo")
    if fields.max_tokens == 0:
        raise invalid("max_tokens must be at least 1", param="max_tokens")
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
        generation=await _generation(arrival, fields, prompts),
        options=options,
        echoes=[p.spelled(service.tokenizer) for p in prompts] if fields.echo else [],
        return_token_ids=bool(fields.return_token_ids),
    )
    return await answer(
        arrival, reply.generation, reply, stream=bool(fields.stream), ignored=ignored
    )


async def _generation(
    arrival: Arrival, fields: CompletionRequest, prompts: list[Prompt]
) -> Generation:
    service = arrival.service
    constraint = text_constraint(fields)
    limits = service.engine.limits
    asked = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    choices: list[Choice] = []
    for position, prompt in enumerate(prompts):
        params = sampling_params(
            fields,
            max_tokens=tokens_to_generate(asked, len(prompt.ids), limits),
            logprobs=fields.logprobs,
            defaults=service.config.sampling_defaults,
            limits=limits,
            eos_token_ids=service.tokenizer.eos_token_ids,
        )
        params = await constrained(service, params, constraint)
        requests = choice_requests(f"cmpl-{arrival.id}-{position}", prompt.ids, params, fields)
        for request in requests:
            choices.append(Choice(len(choices), request, service.tokenizer, text_options(fields)))
    return Generation(choices, num_choices(fields))


def _shortened(prompt: Prompt, fields: CompletionRequest, limits: EngineLimits) -> Prompt:
    asked = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    ids = truncated(prompt.ids, asked, fields, limits)
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
        return_token_ids: bool,
    ):
        self.generation = generation
        self._options = options
        self._encode = event_encoder(options)
        self._tokenizer = arrival.service.tokenizer
        self._return_token_ids = return_token_ids
        self._head = {
            "id": f"cmpl-{arrival.id}",
            "object": "text_completion",
            "created": arrival.created,
            "model": model,
        }
        per_prompt = len(generation.choices) // max(1, len(echoes))
        self._states = [
            _ChoiceState(echoes[c.index // per_prompt] if echoes else "")
            for c in generation.choices
        ]

    def events(self, delta: Delta) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": [self._choice(delta)]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage_body(self.generation)
        elif self._options.include_usage:
            chunk["usage"] = None
        return self._encode(chunk)

    def last_events(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        usage = usage_body(self.generation)
        return self._encode({**self._head, "choices": [], "usage": usage}) + DONE

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
        if delta.logprobs is not None:
            choice["logprobs"] = state.logprobs(delta.tokens[0], delta.logprobs, self._tokenizer)
        if self._return_token_ids:
            choice["token_ids"] = list(delta.tokens)
            if not state.begun:
                choice["prompt_token_ids"] = list(
                    self.generation.choices[delta.choice].request.prompt
                )
        state.begun = True
        return choice


class _ChoiceState:
    """What has to be remembered between the chunks of one choice."""

    def __init__(self, echo: str):
        self.begun = False
        self.chunks: list[dict[str, Any]] = []
        self._echo = echo
        self._offset = len(echo)

    def take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo

    def logprobs(self, token: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        offset, self._offset = self._offset, self._offset + len(text)
        top: dict[str, float] = {}
        for other, logprob in logprobs.top:
            top.setdefault(token_text(tokenizer, other), finite(logprob))
        top.setdefault(text, finite(logprobs.logprob))
        return {
            "tokens": [text],
            "token_logprobs": [finite(logprobs.logprob)],
            "top_logprobs": [top],
            "text_offset": [offset],
        }


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice whose chunks these are, as a body that is not streamed shows it."""
    whole = {**chunks[0], "text": "".join(chunk["text"] for chunk in chunks)}
    whole["finish_reason"] = chunks[-1]["finish_reason"]
    if "token_ids" in whole:
        whole["token_ids"] = [token for chunk in chunks for token in chunk["token_ids"]]
    logprobs = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    if logprobs:
        whole["logprobs"] = {
            name: [value for part in logprobs for value in part[name]] for name in logprobs[0]
        }
    return whole
