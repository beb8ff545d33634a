"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.chat_reply import ChatReply
from jaxserve.server.errors import invalid
from jaxserve.server.generation import Choice, Generation
from jaxserve.server.output_parser import END_THINK, THINK, OutputParser
from jaxserve.server.params import (
    choice_requests,
    sampling_params,
    text_options,
    tokens_to_generate,
)
from jaxserve.server.parse import parse, read_json
from jaxserve.server.prompts import ChatPrompt, chat_prompt
from jaxserve.server.reply import Arrival, answer, check_stream_options
from jaxserve.server.schema import ChatRequest
from jaxserve.server.service import SERVICE


async def chat_completions(request: web.Request) -> web.StreamResponse:
    arrival = Arrival(service=request.app[SERVICE], request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored = parse(await read_json(request), ChatRequest)
    model = service.model_name(fields.model)
    options = check_stream_options(fields)
    prompt = await chat_prompt(fields, service.template, service.tokenizer, service.engine.limits)
    generation = _generation(arrival, fields, prompt.ids)
    reply = ChatReply(
        arrival=arrival,
        model=model,
        generation=generation,
        options=options,
        parsers=[_output_parser(arrival, fields, prompt) for _ in generation.choices],
        num_top_logprobs=fields.top_logprobs or 0,
        return_token_ids=bool(fields.return_token_ids),
    )
    return await answer(arrival, generation, reply, stream=bool(fields.stream), ignored=ignored)


def _generation(arrival: Arrival, fields: ChatRequest, prompt: list[int]) -> Generation:
    service, n = arrival.service, fields.n or 1
    limits = service.engine.limits
    asked = fields.max_tokens if fields.max_completion_tokens is None else None
    asked = fields.max_completion_tokens if asked is None else asked
    if asked == 0:
        raise invalid("max_completion_tokens must be at least 1", param="max_completion_tokens")
    params = sampling_params(
        fields,
        max_tokens=tokens_to_generate(asked, len(prompt), limits, param="messages"),
        logprobs=_num_logprobs(fields),
        defaults=service.config.sampling_defaults,
        limits=limits,
        eos_token_ids=service.tokenizer.eos_token_ids,
    )
    requests = choice_requests(f"chatcmpl-{arrival.id}", prompt, params, fields.seed, n)
    options = text_options(fields)
    choices = [Choice(i, r, service.tokenizer, options) for i, r in enumerate(requests)]
    return Generation(choices, n)


def _num_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise invalid("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _output_parser(arrival: Arrival, fields: ChatRequest, prompt: ChatPrompt) -> OutputParser:
    """Which blocks may appear follows from the model's markers and the prompt's end."""
    markers = arrival.service.tokenizer.markers
    ending = prompt.ending.rstrip()
    return OutputParser(
        thinking=THINK in markers and not ending.endswith(END_THINK),
        tools=bool(fields.tools) and fields.tool_choice != "none",
        opened=ending.endswith(THINK),
    )
