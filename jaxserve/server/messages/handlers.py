"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.chat_turn import chat_generation
from jaxserve.server.errors import json_response, renamed
from jaxserve.server.messages.reply import MessagesReply
from jaxserve.server.messages.schema import (
    REJECTED,
    SILENT,
    CountTokensRequest,
    MessagesRequest,
)
from jaxserve.server.messages.translate import NAMES, prompt_to_chat, to_chat
from jaxserve.server.reply import Arrival, answer, ignored_header
from jaxserve.server.request.parse import parse, read_json
from jaxserve.server.request.prompts import chat_prompt
from jaxserve.server.service import SERVICE
from jaxserve.server.shapes import CountedTokens


async def messages(request: web.Request) -> web.StreamResponse:
    arrival = Arrival(service=request.app[SERVICE], request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored = parse(await read_json(request), MessagesRequest, REJECTED, SILENT)
    model = service.model_name(fields.model)
    with renamed(NAMES):
        generation = await chat_generation(service, to_chat(fields), f"msg_{arrival.id}")
    reply = MessagesReply(arrival=arrival, model=model, generation=generation)
    if fields.output_config is not None and fields.output_config.effort is not None:
        ignored += ("output_config.effort",)
    return await answer(arrival, generation, reply, stream=bool(fields.stream), ignored=ignored)


async def count_tokens(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    fields, ignored = parse(await read_json(request), CountTokensRequest, REJECTED, SILENT)
    service.model_name(fields.model)
    with renamed(NAMES):
        prompt = await chat_prompt(
            prompt_to_chat(fields), service.template, service.tokenizer, service.engine.limits
        )
    headers = ignored_header(service, ignored)
    return json_response(CountedTokens(input_tokens=len(prompt.ids)), headers=headers)
