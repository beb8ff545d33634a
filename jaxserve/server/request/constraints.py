"""What a request says its output must look like, as a compiled guide."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from jaxserve.api import SamplingParams
from jaxserve.grammar_server.wire import Grammar
from jaxserve.server.chat_formats.chat_format import ChatFormat
from jaxserve.server.errors import ApiError, invalid
from jaxserve.server.off_loop import Lane, off_loop
from jaxserve.server.request.prompts import ChatPrompt
from jaxserve.server.request.schema import ChatRequest, GenerationFields
from jaxserve.server.request.tools import ChatTools
from jaxserve.server.service import Service
from jaxserve.server.tenant import CURRENT_TENANT
from jaxserve.structured import (
    BadWords,
    GrammarError,
    GrammarsBusy,
    Guide,
    Thinking,
    ThinkingBudget,
    grammars,
)


class Constraint(NamedTuple):
    param: str
    """The field it comes from."""
    grammar: Callable[[], Grammar]
    written_here: bool = True
    """The client did not write it, and is not shown where in it a fault is."""
    looser: Callable[[], Grammar] | None = None
    """For where `grammar` cannot be compiled: of calls that the model need not make, arguments
    follow their schemas if these can be followed."""


_INLINE_WORDS = 8
"""Bad words that are tokenised on the event loop: 128 of them take 3 ms."""
_PLACES = re.compile(r"^at \d+\(\d+\): |(\n +\d+ \| .*)+(\n *\^)?$")
"""Of llguidance's messages: line and column, and lines around it."""


class Constrained(NamedTuple):
    """How a chat's output is constrained."""

    params: SamplingParams
    """With the guide that follows from the constraints."""
    thinking: Thinking
    """Whether the text may begin with reasoning."""
    text_or_calls: bool
    """A text that follows a grammar has no calls in it, but may hold their markers in a string."""


async def constrained_chat(
    service: Service, fields: ChatRequest, prompt: ChatPrompt, params: SamplingParams
) -> Constrained:
    """The parameters of a chat with the guide of all that constrains it; ApiError names a field
    that excludes another, or a grammar that cannot be compiled."""
    params = replace(params, guide=await _avoided(service, fields))
    text, thinking = text_constraint(fields), prompt.thinking
    constraint = _chat_constraint(service.chats.format, fields, prompt.tools, text)
    if constraint is not None and service.chats.format.guided_reasoning is None:
        thinking = Thinking.NONE  # the grammar applies from the first token on
    params = await constrained(service, params, constraint, thinking)
    if thinking is not Thinking.NONE:
        params = within_budget(service, params, fields, prompt.ids)
    return Constrained(params, thinking, text_or_calls=text is not None)


async def constrained_completion(
    service: Service, fields: GenerationFields, params: SamplingParams
) -> SamplingParams:
    """The same of a completion, whose output is text from its first token on."""
    params = replace(params, guide=await _avoided(service, fields))
    return await constrained(service, params, text_constraint(fields))


async def _avoided(service: Service, fields: GenerationFields) -> BadWords | None:
    """The guide that keeps bad words out, if there are any."""
    if not fields.bad_words:
        return None
    if fields.allowed_token_ids:
        raise invalid("allowed_token_ids and bad_words exclude each other", param="bad_words")
    where = Lane.LARGE if len(fields.bad_words) > _INLINE_WORDS else Lane.INLINE
    return await off_loop(where, BadWords, fields.bad_words, service.tokenizer)


async def constrained(
    service: Service,
    params: SamplingParams,
    constraint: Constraint | None,
    thinking: Thinking = Thinking.NONE,
) -> SamplingParams:
    """The parameters with the guide of the constraint; ApiError if it cannot be compiled."""
    if constraint is None:
        return params
    others = {"allowed_token_ids": params.allowed_token_ids, "bad_words": params.guide}
    for name, given in others.items():
        if given:
            raise invalid(
                f"{name} and {constraint.param} exclude each other", param=constraint.param
            )
    try:
        guide = await _compiled(service, constraint, thinking)
    except GrammarError as error:
        reason = _PLACES.sub("", str(error)) if constraint.written_here else str(error)
        raise invalid(
            f"{constraint.param}: {reason}", param=constraint.param, code="invalid_grammar"
        ) from None
    except GrammarsBusy as busy:
        raise ApiError(503, str(busy), code="grammars_busy", retry_after=busy.retry_after) from None
    stops = params.stop_token_ids | guide.end_token_ids
    return replace(params, guide=guide, stop_token_ids=stops)


async def _compiled(service: Service, constraint: Constraint, thinking: Thinking) -> Guide:
    try:
        grammar = await asyncio.to_thread(constraint.grammar)
        return await service.guides.compile(grammar, thinking, CURRENT_TENANT.get())
    except GrammarError:
        if constraint.looser is None:
            raise
    grammar = await asyncio.to_thread(constraint.looser)
    return await service.guides.compile(grammar, thinking, CURRENT_TENANT.get())


def within_budget(
    service: Service, params: SamplingParams, fields: GenerationFields, prompt: Sequence[int]
) -> SamplingParams:
    """The parameters with a guide that ends think blocks that are too long, if they can be."""
    budget, tokenizer = fields.thinking_token_budget, service.tokenizer
    reasoning = service.chats.format.guided_reasoning
    if budget is None or budget >= params.max_tokens or reasoning is None:
        return params
    if params.allowed_token_ids:
        raise invalid(
            "allowed_token_ids and thinking_token_budget exclude each other",
            param="thinking_token_budget",
        )
    guide = ThinkingBudget(budget, tokenizer, prompt, params.guide, reasoning.markers)
    return replace(params, guide=guide)


def text_constraint(fields: GenerationFields) -> Constraint | None:
    """The one that the fields state, if any; two are a 400."""
    found = list(_stated(fields))
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise invalid(f"{names} exclude each other", param=found[1].param)
    return found[0] if found else None


def _chat_constraint(
    form: ChatFormat, fields: ChatRequest, tools: ChatTools, text: Constraint | None
) -> Constraint | None:
    """Calls where they are forced, whatever else the text must be; calls or else the text that the
    fields state; text with calls in it where these are not any JSON of any tool."""
    most = 1 if fields.parallel_tool_calls is False else grammars.MAX_CALLS
    if tools.forced:
        most = 1 if tools.named else most
        return Constraint("tools", lambda: form.calls(tools.callable, most))
    if not tools.callable:
        return text
    if text is not None:

        def either(*, schemas: bool) -> Grammar:
            allowed = tools.callable if schemas else tools.without_schemas
            return form.calls_or(text.grammar(), allowed, most)

        return text._replace(
            grammar=partial(either, schemas=True), looser=partial(either, schemas=False)
        )
    if tools.has_custom or tools.restricted:

        def among_text(*, schemas: bool) -> Grammar:
            allowed = tools.callable if schemas else tools.without_schemas
            return form.text_and_calls(allowed, most)

        among = partial(among_text, schemas=True)
        return Constraint("tools", among, looser=partial(among_text, schemas=False))
    return None


def _stated(fields: GenerationFields) -> Iterator[Constraint]:
    form, structured = fields.response_format, fields.structured_outputs
    if form is not None and form.type == "json_object":
        yield Constraint("response_format", grammars.json_object)
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise invalid(
                "response_format of type json_schema needs json_schema",
                param="response_format.json_schema",
            )
        yield _json("response_format.json_schema.schema", form.json_schema.schema)
    if structured is not None:
        kinds = {
            name: value
            for name in structured.__struct_fields__
            if (value := getattr(structured, name)) is not None
        }
        if not kinds:
            raise invalid("structured_outputs states no constraint", param="structured_outputs")
        if structured.json_object is False:
            raise invalid("json_object can only be true", param="structured_outputs.json_object")
        for name, value in kinds.items():
            yield _of_kind(f"structured_outputs.{name}", name, value)
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(fields, f"guided_{name}")) is not None:
            yield _of_kind(f"guided_{name}", name, value)
    for param, kind in (("regex", "regex"), ("ebnf", "grammar"), ("grammar", "grammar")):
        if (value := getattr(fields, param)) is not None:
            yield _of_kind(param, kind, value)


def _of_kind(param: str, kind: str, value: Any) -> Constraint:
    match kind:
        case "json":
            return _json(param, value)
        case "json_object":
            return Constraint(param, grammars.json_object)
        case "regex":
            return Constraint(param, lambda: grammars.regex(value))
        case "choice":
            return Constraint(param, lambda: grammars.choice(value))
        case _:
            return Constraint(param, lambda: grammars.grammar(value), written_here=False)


def _json(param: str, schema: dict[str, Any] | str) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise invalid(f"{param} is not a JSON object", param=param) from None
    decoded = schema
    return Constraint(param, lambda: grammars.json_schema(decoded))
