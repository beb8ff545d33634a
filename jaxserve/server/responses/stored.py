"""Stored responses: how requests refer to them, and the routes that return them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from jaxserve.server.errors import ApiError, invalid, json_response
from jaxserve.server.response_store import ResponseStore, Stored
from jaxserve.server.responses.schema import Item, ResponsesRequest
from jaxserve.server.service import SERVICE
from jaxserve.server.shapes import DeletedResponse, InputItems
from jaxserve.server.tenant import tenant_of

KEY_CHARS = 32
"""Characters of the part that a response's id shares with the ids of its items."""
MAX_LISTED = 100

_OFF = "nothing is stored on this server (--response-store-bytes 0)"
_INSTEAD = "send the items themselves in input, and store: false so that clients do so"
_GONE = "it was made with store: false, was deleted, made room for others, or the server restarted"


def earlier_items(store: ResponseStore, tenant: str, previous: str | None) -> list[Item]:
    """Returns the conversation up to and including a response. Raises ApiError (400) if it is not
    stored."""
    if previous is None:
        return []
    stored = store.get(tenant, previous)
    if stored is None:
        reason = _GONE if store.on else _OFF
        raise invalid(
            f"previous_response_id: no response {previous[:100]!r} is stored: {reason}; {_INSTEAD}",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [_item(encoded) for encoded in (*stored.input, *stored.output)]


def with_items(store: ResponseStore, tenant: str, given: Sequence[Item]) -> list[Item]:
    """Returns the items with references replaced by the items they refer to. Raises ApiError (400)
    if one is not stored."""
    return [
        _referred(store, tenant, item, f"input[{position}]") if _is_reference(item) else item
        for position, item in enumerate(given)
    ]


def entry(
    fields: ResponsesRequest, history: Sequence[Item], key: str, response: dict[str, Any]
) -> Stored:
    """Returns the entry to store for a response. `key`: unique part of its ids."""
    given = fields.input
    if isinstance(given, str):
        given = [Item(type="message", role="user", content=given)]
    items = [
        item if item.id is not None else msgspec.structs.replace(item, id=f"item_{key}{position}")
        for position, item in enumerate(given)
    ]
    return Stored(
        response=msgspec.json.encode(response),
        input=tuple(msgspec.json.encode(item) for item in (*history, *items)),
        output=tuple(msgspec.json.encode(item) for item in response["output"]),
    )


async def retrieve(request: web.Request) -> web.Response:
    """GET /v1/responses/{response_id}."""
    if request.query.get("stream") == "true":
        raise invalid("a stored response cannot be streamed", param="stream")
    return json_response(msgspec.Raw(_asked(request).response))


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{response_id}."""
    response_id = request.match_info["response_id"]
    if not request.app[SERVICE].responses.delete(tenant_of(request), response_id):
        raise _not_found(request)
    return json_response(DeletedResponse(id=response_id, object="response", deleted=True))


async def input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{response_id}/input_items: newest first, unless `order` is asc."""
    items = [msgspec.json.decode(item) for item in _asked(request).input]
    if request.query.get("order", "desc") != "asc":
        items.reverse()
    ids = [item.get("id") for item in items]
    if (after := request.query.get("after")) is not None:
        items = items[ids.index(after) + 1 :] if after in ids else []
    shown = items[: _limit(request)]
    listed = InputItems(
        object="list",
        data=shown,
        first_id=shown[0].get("id") if shown else None,
        last_id=shown[-1].get("id") if shown else None,
        has_more=len(shown) < len(items),
    )
    return json_response(listed)


def _limit(request: web.Request) -> int:
    given = request.query.get("limit", "20")
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= MAX_LISTED):
        raise invalid(f"limit must be 1 to {MAX_LISTED}, got {given[:50]!r}", param="limit")
    return int(given)


def _asked(request: web.Request) -> Stored:
    store, response_id = request.app[SERVICE].responses, request.match_info["response_id"]
    if (stored := store.get(tenant_of(request), response_id)) is None:
        raise _not_found(request)
    return stored


def _not_found(request: web.Request) -> ApiError:
    reason = _GONE if request.app[SERVICE].responses.on else _OFF
    asked = request.match_info["response_id"][:100]
    return ApiError(404, f"no response {asked!r} is stored: {reason}", code="response_not_found")


def _is_reference(item: Item) -> bool:
    """Returns whether an item is a reference. Its type is optional."""
    bare = item.type is None and item.role is None and item.content is None
    return item.type == "item_reference" or (bare and item.id is not None)


def _referred(store: ResponseStore, tenant: str, reference: Item, param: str) -> Item:
    wanted = reference.id or ""
    key = wanted.partition("_")[2][:KEY_CHARS]
    stored = store.get(tenant, f"resp_{key}")
    for encoded in (*stored.output, *stored.input) if stored is not None else ():
        if (item := _item(encoded)).id == wanted:
            return item
    reason = _GONE if store.on else _OFF
    raise invalid(
        f"{param} refers to {wanted[:100]!r}, which is not stored: {reason}; {_INSTEAD}",
        param=f"{param}.id",
        code="item_not_found",
    )


def _item(encoded: bytes) -> Item:
    return msgspec.json.decode(encoded, type=Item)
