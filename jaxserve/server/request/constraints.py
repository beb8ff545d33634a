"""What a request says its output must look like, as a compiled guide."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from jaxserve.api import SamplingParams
from jaxserve.server.errors import invalid
from jaxserve.server.output.output_parser import END_THINK, THINK
from jaxserve.server.request.schema import ChatRequest, GenerationFields, NamedTool, Tool
from jaxserve.server.service import Service
from jaxserve.structured import BadWords, GrammarError, Thinking, ThinkingBudget, grammars


class Constraint(NamedTuple):
    param: str
    """The field it comes from."""
    grammar: Callable[[], str]
    written_here: bool = True
    """The client did not write it, and is not shown where in it a fault is."""


_PLACES = re.compile(r"^at \d+\(\d+\): |(\n +\d+ \| .*)+(\n *\^)?$")
"""Of llguidance's messages: line and column, and lines around it."""


def avoided(service: Service, fields: GenerationFields) -> BadWords | None:
    """The guide that keeps bad words out, if there are any."""
    if not fields.bad_words:
        return None
    if fields.allowed_token_ids:
        raise invalid("allowed_token_ids and bad_words exclude each other", param="bad_words")
    return BadWords(fields.bad_words, service.tokenizer)


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
        grammar = await asyncio.to_thread(constraint.grammar)
        guide = await service.guides.compile(grammar, thinking)
    except GrammarError as error:
        reason = _PLACES.sub("", str(error)) if constraint.written_here else str(error)
        raise invalid(
            f"{constraint.param}: {reason}", param=constraint.param, code="invalid_grammar"
        ) from None
    stops = params.stop_token_ids | guide.end_token_ids
    return replace(params, guide=guide, stop_token_ids=stops)


def within_budget(
    service: Service, params: SamplingParams, fields: GenerationFields, prompt: Sequence[int]
) -> SamplingParams:
    """The parameters with a guide that ends think blocks that are too long, if they can be."""
    budget, tokenizer = fields.thinking_token_budget, service.tokenizer
    can_think = {THINK, END_THINK} <= tokenizer.markers.keys()
    if budget is None or budget >= params.max_tokens or not can_think:
        return params
    if params.allowed_token_ids:
        raise invalid(
            "allowed_token_ids and thinking_token_budget exclude each other",
            param="thinking_token_budget",
        )
    return replace(params, guide=ThinkingBudget(budget, tokenizer, prompt, params.guide))


def text_constraint(fields: GenerationFields) -> Constraint | None:
    """The one that the fields state, if any; two are a 400."""
    found = list(_stated(fields))
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise invalid(f"{names} exclude each other", param=found[1].param)
    return found[0] if found else None


def tool_constraint(fields: ChatRequest, markers: dict[str, int]) -> Constraint | None:
    """A call of any tool where one is required, of the one that is named; excludes the others."""
    choice = fields.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    tools = [tool.function for tool in msgspec.convert(fields.tools or [], list[Tool])]
    most = grammars.MAX_CALLS
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name][:1]
        most = 1
        if not tools:
            raise invalid(
                f"tool_choice names {choice.function.name[:100]!r}, which is not among the tools",
                param="tool_choice",
            )
    if fields.parallel_tool_calls is False:
        most = 1
    if (other := text_constraint(fields)) is not None:
        raise invalid(
            f"a tool_choice that forces a call and {other.param} exclude each other",
            param="tool_choice",
        )
    named = [(tool.name, tool.parameters or {}) for tool in tools]
    return Constraint("tools", lambda: grammars.tool_calls(named, markers, most=most))


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
