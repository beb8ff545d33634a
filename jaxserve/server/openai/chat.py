"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.access import service_of
from jaxserve.server.arrival import Arrival
from jaxserve.server.middleware import take_request_id
from jaxserve.server.openai.chat_reply import ChatReply
from jaxserve.server.openai.reply import check_stream_options
from jaxserve.server.reply import answer
from jaxserve.server.request.parse import read_fields
from jaxserve.server.request.resolve import resolve_chat
from jaxserve.server.request.schema import ChatRequest


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a chat in OpenAI's format."""
    arrival = Arrival(service=service_of(request), request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored, size = await read_fields(request, ChatRequest)
    take_request_id(request, fields.request_id)
    model = service.model_name(fields.model)
    options = check_stream_options(service, fields)
    resolved = await resolve_chat(arrival, fields, f"chatcmpl-{arrival.id}", size)
    generation = resolved.generation(service.tokenizer)
    reply = ChatReply(
        arrival=arrival, model=model, generation=generation, options=options, fields=fields
    )
    return await answer(arrival, generation, reply, stream=bool(fields.stream), ignored=ignored)
