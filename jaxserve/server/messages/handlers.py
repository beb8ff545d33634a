"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.access import service_of
from jaxserve.server.arrival import Arrival
from jaxserve.server.errors import json_response, renamed
from jaxserve.server.messages.reply import MessagesReply
from jaxserve.server.messages.schema import (
    REJECTED,
    SILENT,
    CountTokensRequest,
    MessagesRequest,
)
from jaxserve.server.messages.translate import NAMES, prompt_to_chat, to_chat
from jaxserve.server.off_loop import PARSED_INLINE_BYTES, lane, off_loop
from jaxserve.server.reply import answer, ignored_header
from jaxserve.server.request.parse import read_fields
from jaxserve.server.request.prompts import RenderedChat, rendered_chat
from jaxserve.server.request.resolve import resolve_chat
from jaxserve.server.service import Service
from jaxserve.server.shapes import CountedTokens


async def messages(request: web.Request) -> web.StreamResponse:
    """Answers a chat in Anthropic's format."""
    arrival = Arrival(service=service_of(request), request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored, size = await read_fields(request, MessagesRequest, REJECTED, SILENT)
    model = service.model_name(fields.model)
    with renamed(NAMES):
        chat = await off_loop(lane(size, PARSED_INLINE_BYTES), to_chat, fields)
        resolved = await resolve_chat(arrival, chat, f"msg_{arrival.id}", size)
    generation = resolved.generation(service.tokenizer)
    reply = MessagesReply(arrival=arrival, model=model, generation=generation)
    if fields.output_config is not None and fields.output_config.effort is not None:
        ignored += ("output_config.effort",)
    return await answer(arrival, generation, reply, stream=bool(fields.stream), ignored=ignored)


async def count_tokens(request: web.Request) -> web.Response:
    """Answers with the number of tokens in the prompt."""
    service = service_of(request)
    fields, ignored, size = await read_fields(request, CountTokensRequest, REJECTED, SILENT)
    service.model_name(fields.model)
    with renamed(NAMES):
        prompt = await off_loop(lane(size), _prompt, service, fields)
    headers = ignored_header(service, (*ignored, *prompt.ignored))
    return json_response(CountedTokens(input_tokens=len(prompt.ids)), headers=headers)


def _prompt(service: Service, fields: CountTokensRequest) -> RenderedChat:
    return rendered_chat(prompt_to_chat(fields), service.chats, service.tokenizer)
