"""Turns a request's constraints on its output into a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec

from jaxserve.grammar_server.wire import Grammar
from jaxserve.server.chat_formats.chat_format import ChatFormat
from jaxserve.server.errors import invalid
from jaxserve.server.request.schema import ChatRequest, GenerationFields
from jaxserve.server.request.tools import ChatTools
from jaxserve.structured import grammars


class Constraint(NamedTuple):
    """A grammar for the output, and the field that asks for it."""

    param: str
    """The field that asks for it."""
    grammar: Callable[[], Grammar]
    written_here: bool = True
    """Whether the server wrote the grammar. Then errors do not show positions in it."""
    looser: Callable[[], Grammar] | None = None
    """Makes a replacement for a `grammar` that cannot be compiled. In it, the arguments of optional
    calls follow only those schemas that can be compiled."""
    text_or_calls: bool = False
    """Whether a text that follows the grammar has no calls, but may have their markers in a
    string."""


def text_constraint(fields: GenerationFields) -> Constraint | None:
    """Returns the constraint of the fields, if any. Raises ApiError if there are two."""
    found = list(_stated(fields))
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise invalid(f"{names} cannot be used together", param=found[1].param)
    return found[0] if found else None


def chat_constraint(form: ChatFormat, fields: ChatRequest, tools: ChatTools) -> Constraint | None:
    """Returns the constraint of a chat's output, if any. Forced calls override other constraints.
    If calls are optional, the output is either calls or a text that follows the other constraint.
    Without such a text, a grammar is needed only for custom tools and for tools that may not be
    called."""
    text = text_constraint(fields)
    most = 1 if fields.parallel_tool_calls is False else grammars.MAX_CALLS
    if tools.forced:
        most = 1 if tools.named else most
        return Constraint("tools", lambda: form.calls(tools.callable, most, forced=True))
    if not tools.callable:
        return text
    if text is None and not (tools.has_custom or tools.restricted):
        return None
    answer = None if text is None else text.grammar

    def allowed(*, schemas: bool) -> Grammar:
        callable_ = tools.callable if schemas else tools.without_schemas
        instead = answer() if answer is not None else None
        return form.calls(callable_, most, forced=False, answer=instead)

    return Constraint(
        "tools" if text is None else text.param,
        partial(allowed, schemas=True),
        looser=partial(allowed, schemas=False),
        written_here=text is None or text.written_here,
        text_or_calls=text is not None,
    )


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
            kinds = ", ".join(structured.__struct_fields__)
            raise invalid(f"structured_outputs needs one of {kinds}", param="structured_outputs")
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
