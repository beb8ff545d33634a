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
from jaxserve.server.off_loop import INLINE_BYTES, PARSED_INLINE_BYTES, off_loop
from jaxserve.server.reply import Arrival, answer, ignored_header
from jaxserve.server.request.parse import read_fields
from jaxserve.server.request.prompts import chat_prompt
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.shapes import CountedTokens


async def messages(request: web.Request) -> web.StreamResponse:
    arrival = Arrival(service=request.app[SERVICE], request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored, size = await read_fields(request, MessagesRequest, REJECTED, SILENT)
    model = service.model_name(fields.model)
    with renamed(NAMES):
        chat = await off_loop(size > PARSED_INLINE_BYTES, to_chat, fields)
        generation = await chat_generation(service, chat, f"msg_{arrival.id}", size)
    reply = MessagesReply(arrival=arrival, model=model, generation=generation)
    if fields.output_config is not None and fields.output_config.effort is not None:
        ignored += ("output_config.effort",)
    return await answer(arrival, generation, reply, stream=bool(fields.stream), ignored=ignored)


async def count_tokens(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    fields, ignored, size = await read_fields(request, CountTokensRequest, REJECTED, SILENT)
    service.model_name(fields.model)
    with renamed(NAMES):
        counted = await off_loop(size > INLINE_BYTES, _counted, service, fields)
    return json_response(counted, headers=ignored_header(service, ignored))


def _counted(service: Service, fields: CountTokensRequest) -> CountedTokens:
    prompt = chat_prompt(prompt_to_chat(fields), service.template, service.tokenizer)
    return CountedTokens(input_tokens=len(prompt.ids))
