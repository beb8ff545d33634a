"""GET /openapi.json: built from the types that decode requests and those of the answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

import jaxserve
from jaxserve.config import ServerConfig
from jaxserve.server import info, shapes, weights
from jaxserve.server.access import ADMIN_ROUTES, is_open
from jaxserve.server.messages import schema as messages
from jaxserve.server.request import schema
from jaxserve.server.request.unsupported import REJECTED, Harmless
from jaxserve.server.responses import schema as responses

type Json = dict[str, Any]

_ERRORS = {
    400: "The request is not valid; the error names the field",
    401: "The API key is missing or not valid",
    403: "The route needs an administrator's key",
    404: "The model or response does not exist",
    405: "The route does not take this method",
    408: "The body arrived too slowly",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "The queue is full",
    500: "The generation failed",
    503: "The server is starting or draining, or has failed",
    504: "The request took longer than the server allows",
}
_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_ANY_SCHEME: list[Json] = [{name: []} for name in _SCHEMES]
_TEXT = {"type": "string"}
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
_STREAM = {
    "schema": {
        "type": "object",
        "description": "One server-sent event; see docs/api.md for those of each API",
        "properties": {"data": _TEXT, "event": _TEXT},
        "required": ["data"],
    }
}


class Operation(NamedTuple):
    """One method of one route."""

    summary: str
    answer: type[msgspec.Struct] | None
    """None: the answer has no fixed format."""
    bodies: tuple[type[msgspec.Struct], ...] = ()
    """Types of the body; the client may send any of them."""
    many: bool = False
    """Whether the answer is a list."""
    streams: bool = False
    errors: tuple[int, ...] = (405,)
    error: type[msgspec.Struct] = shapes.Error
    rejected: Mapping[str, Harmless] = MappingProxyType({})
    media: str = "application/json"
    unhealthy: bool = False
    """Whether the same answer can also come with status 503."""
    query: Mapping[str, str] = MappingProxyType({})
    """Optional query parameters and their effects."""
    choices: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The values that a query parameter takes, if it does not take any text."""


_DEEP = "1: a serving engine must generate a token"
_PROMPT = (400, 404, 405, 408, 413, 415)
_GENERATION = (*_PROMPT, 429, 500, 503, 504)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation(
        "Answer a chat",
        shapes.ChatCompletion,
        (schema.ChatRequest,),
        streams=True,
        errors=_GENERATION,
        rejected=REJECTED,
    ),
    ("post", "/v1/completions"): Operation(
        "Continue texts or token ids",
        shapes.Completion,
        (schema.CompletionRequest,),
        streams=True,
        errors=_GENERATION,
        rejected=REJECTED,
    ),
    ("post", "/v1/chat/completions/render"): Operation(
        "The prompt of a chat as token ids, without an answer",
        shapes.Rendered,
        (schema.ChatRequest,),
        errors=_PROMPT,
        rejected=REJECTED,
    ),
    ("post", "/v1/completions/render"): Operation(
        "The prompts of a completion as token ids, without an answer",
        shapes.Rendered,
        (schema.CompletionRequest,),
        many=True,
        errors=_PROMPT,
        rejected=REJECTED,
    ),
    ("post", "/v1/responses"): Operation(
        "Answer a list of items",
        shapes.Response,
        (responses.ResponsesRequest,),
        streams=True,
        errors=_GENERATION,
        rejected=responses.REJECTED,
    ),
    ("get", "/v1/responses/{response_id}"): Operation(
        "A stored response", shapes.Response, errors=(400, 404, 405)
    ),
    ("delete", "/v1/responses/{response_id}"): Operation(
        "Delete a stored response", shapes.DeletedResponse, errors=(404, 405)
    ),
    ("get", "/v1/responses/{response_id}/input_items"): Operation(
        "The input items of a response",
        shapes.InputItems,
        errors=(400, 404, 405),
        query={
            "limit": "number of items, 1 to 100; default 20",
            "order": "asc: oldest item first",
            "after": "an item id; the list starts after that item",
        },
    ),
    ("post", "/v1/messages"): Operation(
        "Answer a chat in Anthropic's format",
        shapes.AnthropicMessage,
        (messages.MessagesRequest,),
        streams=True,
        errors=_GENERATION,
        error=shapes.AnthropicError,
        rejected=messages.REJECTED,
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of a chat in Anthropic's format",
        shapes.CountedTokens,
        (messages.CountTokensRequest,),
        errors=_PROMPT,
        error=shapes.AnthropicError,
        rejected=messages.REJECTED,
    ),
    ("post", "/v1/embeddings"): Operation(
        "Always 404: the models served here generate text",
        None,
        (schema.EmbeddingsRequest,),
        errors=_PROMPT,
    ),
    ("post", "/tokenize"): Operation(
        "The tokens of a text or of a chat's prompt",
        shapes.Tokenized,
        (schema.TokenizeRequest, schema.TokenizeChatRequest),
        errors=_PROMPT,
        rejected=REJECTED,
    ),
    ("post", "/detokenize"): Operation(
        "The text of tokens",
        shapes.Detokenized,
        (schema.DetokenizeRequest,),
        errors=_PROMPT,
        rejected=REJECTED,
    ),
    ("get", "/v1/models"): Operation("The served names", shapes.ModelList),
    ("get", "/v1/models/{model}"): Operation("One served name", shapes.Model, errors=(404, 405)),
    ("get", "/health"): Operation(
        "Whether requests are served now; with --health-means live whether the engine is alive",
        shapes.Health,
        unhealthy=True,
        query={"deep": _DEEP},
    ),
    ("get", "/live"): Operation(
        "Whether the engine is alive", shapes.Health, unhealthy=True, query={"deep": _DEEP}
    ),
    ("get", "/ready"): Operation(
        "Whether requests are served now", shapes.Readiness, unhealthy=True
    ),
    ("get", "/server_info"): Operation("Model and limits, in SGLang's format", info.ServerInfo),
    ("get", "/get_server_info"): Operation("The same", info.ServerInfo),
    ("get", "/model_info"): Operation("The model, in SGLang's format", info.ModelInfo),
    ("get", "/get_model_info"): Operation("The same", info.ModelInfo),
    ("get", "/v1/loads"): Operation("Sequences and tokens, in SGLang's format", info.Loads),
    ("get", "/load"): Operation("Sequences and pages in use", shapes.Load),
    ("post", "/reset_prefix_cache"): Operation("Empty the prefix cache", None, errors=(405, 503)),
    ("get", "/v1/weights"): Operation("The served weights", weights.ServedWeights),
    ("post", "/v1/weights"): Operation(
        "Serve with other weights of the same shapes",
        weights.ChangedWeights,
        (weights.WeightsRequest,),
        errors=(*_PROMPT, 503),
    ),
    ("post", "/pause"): Operation(
        "Pause the engine",
        weights.Paused,
        errors=(400, 405, 503),
        query={"mode": "keep: running requests stay as they are; wait: they end first"},
        choices={"mode": weights.PAUSE_MODES},
    ),
    ("post", "/resume"): Operation("Resume the engine", weights.Paused, errors=(400, 405, 503)),
    ("get", "/is_paused"): Operation("Whether the engine is paused", weights.Paused),
    ("post", "/sleep"): Operation(
        "Pause and free the KV cache",
        weights.Sleeping,
        errors=(400, 405, 503),
        query={"level": "1 keeps the weights, 2 drops them"},
        choices={"level": weights.SLEEP_LEVELS},
    ),
    ("post", "/wake_up"): Operation("Undo sleep", weights.Sleeping, errors=(400, 405, 503)),
    ("get", "/is_sleeping"): Operation("Whether the engine sleeps", weights.Sleeping),
    ("get", "/kv_event_sources"): Operation("Where KV cache events are published", None),
    ("get", "/version"): Operation("The version", shapes.Version),
    ("get", "/metrics"): Operation(
        "Prometheus text",
        None,
        media="text/plain",
        query={"name[]": "only the families of these names"},
    ),
    ("get", "/metrics/routing"): Operation(
        "The metrics that routers read", None, media="text/plain"
    ),
    ("get", "/openapi.json"): Operation("This document", None),
}


def document(config: ServerConfig) -> bytes:
    """Returns the OpenAPI 3.1 description of a server with this configuration, encoded."""
    operations = {
        (method, path): operation
        for (method, path), operation in OPERATIONS.items()
        if config.admin_key_digests or path not in ADMIN_ROUTES
    }
    types = {kind for operation in operations.values() for kind in _types(operation)}
    _, components = msgspec.json.schema_components(
        sorted(types, key=lambda kind: kind.__name__), ref_template="#/components/schemas/{name}"
    )
    bodies = {kind: each for each in operations.values() for kind in each.bodies}
    for kind, operation in bodies.items():
        names = () if kind is weights.WeightsRequest else config.model_names
        _complete(components[kind.__name__]["properties"], operation.rejected, names)
    components["CompletionRequest"]["properties"]["prompt"] = schema.PROMPT
    paths: dict[str, Json] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method] = _described(operation, path, config)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "jaxserve", "version": jaxserve.__version__},
            "servers": [{"url": config.root_path or "/"}],
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": _SCHEMES},
        }
    )


def _types(operation: Operation) -> tuple[type[msgspec.Struct], ...]:
    answers = () if operation.answer is None else (operation.answer,)
    return (*operation.bodies, *answers, operation.error)


def _complete(
    properties: Json, rejected: Mapping[str, Harmless], model_names: tuple[str, ...]
) -> None:
    """Adds facts that the types do not have: the served names (none: `model` is not one of them),
    and the values of restricted fields."""
    if model_names and "model" in properties:
        optional = "anyOf" in properties["model"]
        properties["model"] = {"enum": [*model_names, *([None] if optional else [])]}
    for name, harmless in rejected.items():
        properties.setdefault(name, {"enum": [None, *harmless]})


def _described(operation: Operation, path: str, config: ServerConfig) -> Json:
    admin = path in ADMIN_ROUTES
    keyed = admin or (bool(config.api_key_digests) and not is_open(path, config))
    refusals = (401, 403) if admin else (401,) if keyed else ()
    described: Json = {
        "summary": operation.summary,
        "security": _ANY_SCHEME if keyed else [],
        "responses": _responses(operation, refusals),
    }
    if operation.bodies:
        kinds = [_reference(kind) for kind in operation.bodies]
        body = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    parameters: list[Json] = []
    for name, text in operation.query.items():
        values = operation.choices.get(name)
        kind = _TEXT if values is None else {"enum": values}
        parameters.append({"name": name, "in": "query", "description": text, "schema": kind})
    for name in _PATH_PARAMETER.findall(path):
        text = {"type": "string", "minLength": 1}
        parameters.append({"name": name, "in": "path", "required": True, "schema": text})
    if parameters:
        described["parameters"] = parameters
    return described


def _responses(operation: Operation, refusals: tuple[int, ...]) -> Json:
    kind = operation.answer
    schema: Json = {} if kind is None else _reference(kind)
    if operation.many:
        schema = {"type": "array", "items": schema}
    content: Json = {operation.media: {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = _STREAM
    answers: Json = {"200": {"description": "OK", "content": content}}
    if operation.unhealthy:
        answers["503"] = {"description": "Not healthy, or not ready", "content": content}
    error: Json = {"application/json": {"schema": _reference(operation.error)}}
    for status in (*operation.errors, *refusals):
        answers[str(status)] = {"description": _ERRORS[status], "content": error}
    return answers


def _reference(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
