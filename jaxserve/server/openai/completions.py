"""POST /v1/completions."""

from __future__ import annotations

import time
from dataclasses import replace

from aiohttp import web

from jaxserve.api import EngineLimits
from jaxserve.server.errors import invalid
from jaxserve.server.middleware import take_request_id
from jaxserve.server.openai.completion_reply import CompletionReply
from jaxserve.server.openai.reply import check_stream_options
from jaxserve.server.output.generation import Choice, Generation
from jaxserve.server.reply import Arrival, answer
from jaxserve.server.request.constraints import avoided, constrained, text_constraint, within_budget
from jaxserve.server.request.params import (
    choice_requests,
    num_choices,
    sampling_params,
    text_options,
    tokens_to_generate,
    truncated,
)
from jaxserve.server.request.parse import parse, read_json
from jaxserve.server.request.prompts import Prompt, completion_prompts
from jaxserve.server.request.schema import MAX_SEQUENCES, CompletionRequest
from jaxserve.server.service import SERVICE

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    arrival = Arrival(service=request.app[SERVICE], request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored = parse(await read_json(request), CompletionRequest)
    take_request_id(request, fields.request_id)
    model = service.model_name(fields.model)
    options = check_stream_options(service, fields)
    asked = _asked(fields)
    begun = time.perf_counter()
    prompts = await completion_prompts(fields.prompt, service.tokenizer, service.engine.limits)
    tokenizing = time.perf_counter() - begun
    prompts = [_shortened(prompt, fields, service.engine.limits) for prompt in prompts]
    if (count := len(prompts) * num_choices(fields)) > MAX_SEQUENCES:
        raise invalid(
            f"prompts times n must be at most {MAX_SEQUENCES} in one request, got {count}",
            param="n",
        )
    reply = CompletionReply(
        arrival=arrival,
        model=model,
        generation=Generation(
            await _choices(arrival, fields, prompts, asked),
            num_choices(fields),
            tokenizing=tokenizing,
        ),
        options=options,
        echoes=[p.spelled(service.tokenizer) for p in prompts] if fields.echo else [],
        fields=fields,
    )
    return await answer(
        arrival, reply.generation, reply, stream=bool(fields.stream), ignored=ignored
    )


async def _choices(
    arrival: Arrival, fields: CompletionRequest, prompts: list[Prompt], asked: int
) -> list[Choice]:
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
        if constraint is None:  # else the text is of the grammar: no thoughts, no end of them
            params = within_budget(service, params, fields, prompt.ids)
        requests = choice_requests(f"cmpl-{arrival.id}-{position}", prompt.ids, params, fields)
        for request in requests:
            choices.append(Choice(len(choices), request, service.tokenizer, options))
    return choices


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
