"""POST /v1/responses."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.chat_turn import chat_generation
from jaxserve.server.errors import renamed
from jaxserve.server.middleware import take_request_id
from jaxserve.server.off_loop import PARSED_INLINE_BYTES, off_loop
from jaxserve.server.reply import Arrival, answer
from jaxserve.server.request.parse import read_fields
from jaxserve.server.responses.reply import ResponsesReply
from jaxserve.server.responses.schema import REJECTED, SILENT, ResponsesRequest
from jaxserve.server.responses.translate import NAMES, to_chat
from jaxserve.server.service import SERVICE


async def responses(request: web.Request) -> web.StreamResponse:
    arrival = Arrival(service=request.app[SERVICE], request=request)
    service = arrival.service
    service.check_accepting()
    fields, ignored, size = await read_fields(request, ResponsesRequest, REJECTED, SILENT)
    take_request_id(request, fields.request_id)
    model = service.model_name(fields.model)
    with renamed(NAMES):
        chat = await off_loop(size > PARSED_INLINE_BYTES, to_chat, fields)
        generation = await chat_generation(service, chat, f"resp_{arrival.id}", size)
    reply = ResponsesReply(arrival=arrival, model=model, generation=generation, fields=fields)
    ignored += _without_effect(fields)
    return await answer(arrival, generation, reply, stream=bool(fields.stream), ignored=ignored)


def _without_effect(fields: ResponsesRequest) -> tuple[str, ...]:
    names = {
        "store": fields.store,
        "reasoning.summary": fields.reasoning is not None and fields.reasoning.summary,
        "text.verbosity": fields.text is not None and fields.text.verbosity,
    }
    return tuple(name for name, value in names.items() if value)
