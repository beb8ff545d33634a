"""POST /v1/chat/completions/render and /v1/completions/render: a request's prompts as token ids.

Routers that know the cached prefixes of each server call these routes many times a second. They do
not need the engine, so they answer while it starts and while it is busy.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from jaxserve.api import SamplingParams
from jaxserve.server.access import service_of
from jaxserve.server.arrival import Arrival
from jaxserve.server.errors import json_response
from jaxserve.server.middleware import take_request_id
from jaxserve.server.off_loop import off_loop
from jaxserve.server.openai.completions import common_params, read_prompts
from jaxserve.server.openai.reply import check_stream_options
from jaxserve.server.reply import ignored_header
from jaxserve.server.request.params import num_choices, sampling_params, text_options
from jaxserve.server.request.parse import read_fields
from jaxserve.server.request.resolve import lane_of, num_logprobs, read_chat
from jaxserve.server.request.schema import ChatRequest, CompletionRequest, GenerationFields
from jaxserve.server.shapes import Rendered, RenderedParams


async def render_chat(request: web.Request) -> web.Response:
    """Answers with the prompt of the same body at /v1/chat/completions."""
    arrival = Arrival(service=service_of(request), request=request)
    service = arrival.service
    fields, ignored, size = await read_fields(request, ChatRequest)
    take_request_id(request, fields.request_id)
    model = service.model_name(fields.model)
    check_stream_options(service, fields)
    logprobs = num_logprobs(fields)
    prompt, _ = await off_loop(lane_of(fields, size), read_chat, service, fields)
    params = sampling_params(service, fields, max_tokens=prompt.max_tokens, logprobs=logprobs)
    body = _rendered(arrival, fields, f"chatcmpl-{arrival.id}", model, prompt.ids, params)
    return json_response(body, headers=ignored_header(service, (*ignored, *prompt.ignored)))


async def render_completion(request: web.Request) -> web.Response:
    """Answers with a list: one entry for each prompt of the same body at /v1/completions."""
    arrival = Arrival(service=service_of(request), request=request)
    service = arrival.service
    fields, ignored, size = await read_fields(request, CompletionRequest)
    take_request_id(request, fields.request_id)
    model = service.model_name(fields.model)
    check_stream_options(service, fields)
    prompts, _ = await off_loop(lane_of(fields, size), read_prompts, service, fields)
    common = common_params(service, fields, min(prompt.max_tokens for prompt in prompts))
    body = [
        _rendered(
            arrival,
            fields,
            f"cmpl-{arrival.id}-{position}",
            model,
            prompt.ids,
            common,
            max_tokens=prompt.max_tokens,
        )
        for position, prompt in enumerate(prompts)
    ]
    return json_response(body, headers=ignored_header(service, ignored))


def _rendered(
    arrival: Arrival,
    fields: GenerationFields,
    request_id: str,
    model: str,
    ids: list[int],
    params: SamplingParams,
    max_tokens: int | None = None,
) -> Rendered:
    """Returns the rendered prompt. `max_tokens`: the prompt's limit, if not that of `params`."""
    return Rendered(
        request_id=request_id,
        token_ids=ids,
        features=None,
        sampling_params=RenderedParams(
            n=num_choices(fields),
            max_tokens=params.max_tokens if max_tokens is None else max_tokens,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=None if fields.seed == -1 else fields.seed,
            stop=list(text_options(fields).stop),
            stop_token_ids=sorted(params.stop_token_ids),
            ignore_eos=bool(fields.ignore_eos),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        ),
        model=model,
        stream=bool(fields.stream),
        stream_options=(
            None if fields.stream_options is None else msgspec.to_builtins(fields.stream_options)
        ),
        cache_salt=fields.cache_salt,
        priority=arrival.standing(fields).priority,
        kv_transfer_params=None,
    )
