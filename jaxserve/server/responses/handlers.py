"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from jaxserve.server.access import service_of
from jaxserve.server.arrival import Arrival
from jaxserve.server.errors import renamed
from jaxserve.server.middleware import take_request_id
from jaxserve.server.off_loop import PARSED_INLINE_BYTES, lane, off_loop
from jaxserve.server.reply import answer
from jaxserve.server.request.parse import read_fields
from jaxserve.server.request.resolve import resolve_chat
from jaxserve.server.responses.reply import ResponsesReply
from jaxserve.server.responses.schema import (
    LOGPROBS,
    REJECTED,
    SEALED_THOUGHTS,
    SILENT,
    Item,
    ResponsesRequest,
)
from jaxserve.server.responses.stored import earlier_items, entry, with_items
from jaxserve.server.responses.translate import NAMES, Translated, own_names, to_chat
from jaxserve.server.tenant import tenant_of


async def responses(request: web.Request) -> web.StreamResponse:
    """Answers a request of the Responses API."""
    arrival = Arrival(service=service_of(request), request=request)
    service, tenant = arrival.service, tenant_of(request)
    service.check_accepting()
    fields, ignored, size = await read_fields(request, ResponsesRequest, REJECTED, SILENT)
    take_request_id(request, fields.request_id)
    model = service.model_name(fields.model)
    history = earlier_items(service.responses, tenant, fields.previous_response_id)
    with renamed(NAMES):
        where = lane(size, PARSED_INLINE_BYTES)
        chat, left_out = await off_loop(where, _translated, arrival, fields, history)
        resolved = await resolve_chat(arrival, chat, f"resp_{arrival.id}", size)
    generation = resolved.generation(service.tokenizer)
    generation.ignored = own_names(generation.ignored)
    reply = ResponsesReply(
        arrival=arrival,
        model=model,
        generation=generation,
        fields=fields,
        seal=partial(service.sealer.seal, tenant=tenant)
        if SEALED_THOUGHTS in (fields.include or ())
        else None,
        keep=_keep(arrival, fields, history),
    )
    ignored += _without_effect(arrival, fields) + left_out
    return await answer(arrival, generation, reply, stream=bool(fields.stream), ignored=ignored)


def _translated(arrival: Arrival, fields: ResponsesRequest, history: Sequence[Item]) -> Translated:
    service, tenant = arrival.service, tenant_of(arrival.request)
    if not isinstance(fields.input, str):
        fields.input = with_items(service.responses, tenant, fields.input)
    return to_chat(fields, history, partial(service.sealer.open, tenant=tenant))


def _keep(
    arrival: Arrival, fields: ResponsesRequest, history: Sequence[Item]
) -> Callable[[dict[str, Any]], None] | None:
    """Returns a function that stores a response; None: the client does not want it stored."""
    store, tenant = arrival.service.responses, tenant_of(arrival.request)
    if fields.store is False or not store.on:
        return None
    return lambda body: store.put(tenant, body["id"], entry(fields, history, arrival.id, body))


def _without_effect(arrival: Arrival, fields: ResponsesRequest) -> tuple[str, ...]:
    names = {
        "store": fields.store and not arrival.service.responses.on,
        "reasoning.summary": fields.reasoning is not None and fields.reasoning.summary,
        "text.verbosity": fields.text is not None and fields.text.verbosity,
        "truncation": fields.truncation == "auto",
        "max_tool_calls": fields.max_tool_calls is not None,
    }
    honoured = (LOGPROBS, SEALED_THOUGHTS)
    asked = dict.fromkeys(f"include.{one}" for one in fields.include or () if one not in honoured)
    return (*(name for name, value in names.items() if value), *asked)
