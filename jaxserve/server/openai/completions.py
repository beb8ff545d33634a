"""POST /v1/completions."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from aiohttp import web

from jaxserve.api import Request, SamplingParams
from jaxserve.server.access import service_of
from jaxserve.server.arrival import Arrival
from jaxserve.server.errors import invalid
from jaxserve.server.middleware import take_request_id
from jaxserve.server.off_loop import off_loop
from jaxserve.server.openai.completion_reply import CompletionReply
from jaxserve.server.openai.reply import check_stream_options
from jaxserve.server.reply import answer
from jaxserve.server.request.constraints import text_constraint
from jaxserve.server.request.guides import avoided, guided, within_budget
from jaxserve.server.request.lengths import fitting, tokens_to_generate, truncated
from jaxserve.server.request.params import (
    choice_requests,
    num_choices,
    sampling_params,
    text_options,
)
from jaxserve.server.request.parse import read_fields
from jaxserve.server.request.prompts import completion_prompts
from jaxserve.server.request.resolve import Resolved, lane_of
from jaxserve.server.request.schema import MAX_SEQUENCES, CompletionRequest
from jaxserve.server.request.validation import check_token_ids
from jaxserve.server.service import Service
from jaxserve.structured import BadWords
from jaxserve.tokenizer import decode

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """Continues one or more prompts, in OpenAI's format."""
    arrival = Arrival(service=service_of(request), request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored, size = await read_fields(request, CompletionRequest)
    take_request_id(request, fields.request_id)
    model = service.model_name(fields.model)
    options = check_stream_options(service, fields)
    begun = time.perf_counter()
    prompts, bad_words = await off_loop(lane_of(fields, size), read_prompts, service, fields)
    tokenizing = time.perf_counter() - begun
    resolved = await _resolved(arrival, fields, prompts, bad_words, tokenizing)
    reply = CompletionReply(
        arrival=arrival,
        model=model,
        generation=resolved.generation(service.tokenizer),
        options=options,
        echoes=[prompt.echo for prompt in prompts],
        fields=fields,
    )
    return await answer(
        arrival, reply.generation, reply, stream=bool(fields.stream), ignored=ignored
    )


class CompletionPrompt(NamedTuple):
    """A prompt of a completion after truncation."""

    ids: list[int]
    max_tokens: int
    echo: str
    """Text that precedes the output."""


def read_prompts(
    service: Service, fields: CompletionRequest
) -> tuple[list[CompletionPrompt], BadWords | None]:
    """Returns the prompts of a request with their limits on output tokens, and the words to avoid.

    Raises:
      ApiError: the prompts are too long, or a field is wrong.
      Abandoned: the request is over.
    """
    return _prompts(service, fields), avoided(service.tokenizer, fields)


def _prompts(service: Service, fields: CompletionRequest) -> list[CompletionPrompt]:
    """Returns the truncated prompts of the request with their limits on output tokens."""
    limits, asked = service.engine.limits, _asked(fields)
    fits = None if fields.truncate_prompt_tokens else fitting(limits, "prompt")
    given = completion_prompts(fields.prompt, service.tokenizer, fits)
    if (count := len(given) * num_choices(fields)) > MAX_SEQUENCES:
        raise invalid(
            f"prompts times n must be at most {MAX_SEQUENCES} in one request, got {count}",
            param="n",
        )
    prompts: list[CompletionPrompt] = []
    for ids, text in given:
        kept = truncated(ids, asked, fields, limits)
        max_tokens = tokens_to_generate(asked, len(kept), limits)
        check_token_ids(kept, limits, "prompt")
        if text is None or len(kept) < len(ids):
            text = decode(service.tokenizer, kept, skip_special=False) if fields.echo else ""
        prompts.append(CompletionPrompt(kept, max_tokens, text if fields.echo else ""))
    return prompts


async def _resolved(
    arrival: Arrival,
    fields: CompletionRequest,
    prompts: list[CompletionPrompt],
    bad_words: BadWords | None,
    tokenizing: float,
) -> Resolved:
    service, standing = arrival.service, arrival.standing(fields)
    options = text_options(fields)._replace(prompt_only=fields.max_tokens == 0)
    if fields.echo and fields.logprobs is not None:
        # Clients that score prompts cut off the last token, even a stop token.
        options = options._replace(stop_token_logprobs=True)
    constraint = text_constraint(fields)
    params = common_params(service, fields, min(prompt.max_tokens for prompt in prompts))
    of_all = await guided(service, params, constraint, bad_words)
    requests: list[Request] = []
    for position, (ids, max_tokens, _) in enumerate(prompts):
        params = replace(of_all, max_tokens=max_tokens)
        if constraint is None:  # a constrained output has no reasoning
            params = within_budget(service, params, fields, ids)
        request_id = f"cmpl-{arrival.id}-{position}"
        requests += choice_requests(request_id, ids, params, fields, standing)
    return Resolved(
        requests=requests,
        choices_per_prompt=num_choices(fields),
        options=options,
        tokenizing=tokenizing,
    )


def common_params(service: Service, fields: CompletionRequest, max_tokens: int) -> SamplingParams:
    """Returns the sampling parameters that all prompts share.

    Args:
      max_tokens: the smallest limit of the prompts.

    Raises:
      ApiError: a value conflicts with another one or with the model.
    """
    params = sampling_params(service, fields, max_tokens=max_tokens, logprobs=fields.logprobs)
    if fields.echo and fields.logprobs is not None:
        most = max(fields.logprobs, params.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=most)
    return params


def _asked(fields: CompletionRequest) -> int:
    """Returns the number of tokens to compute: at least one, even if only the prompt is scored."""
    if fields.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    if fields.max_tokens < (0 if fields.echo else 1):
        bound = "0" if fields.echo else "1, or 0 with echo"
        raise invalid(
            f"max_tokens must be at least {bound}, got {fields.max_tokens}", param="max_tokens"
        )
    return max(1, fields.max_tokens)
