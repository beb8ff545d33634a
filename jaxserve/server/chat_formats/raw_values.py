"""Arguments that are written as raw text: their grammar, and their conversion to JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.server.chat_formats.tool_call_tags import END_CALL
from jaxserve.structured import grammars
from jaxserve.structured.errors import GrammarError

PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_EITHER = ("anyOf", "oneOf")
_MOST_REFERENCES = 16
"""The most references that one value may follow."""
_FOLLOWED = frozenset({"type", "properties", "required", "additionalProperties"})
_WITHOUT_EFFECT = frozenset(
    {"$schema", "$id", "title", "description", "examples", "default", "$defs", "definitions"}
)


def parameter_rules(tool: int, schema: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields, in the schema's order, the name of each parameter in the call's rule, and the
    parameter's own rules. Raises GrammarError if the schema constrains more than its parameters."""
    if unknown := schema.keys() - _FOLLOWED - _WITHOUT_EFFECT:
        raise GrammarError(
            f"{min(unknown)} of the arguments' schema cannot be enforced in this model's tool calls"
        )
    if schema.get("type", "object") != "object":
        raise GrammarError("the arguments of a tool must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError("required must be a list of names")
    properties = {**dict.fromkeys(required), **properties_of(schema)}
    if not properties and schema.get("additionalProperties") is not False:
        yield (
            f"any_{tool}*",
            [f"any_{tool}: /{PARAMETER}[^>\\n]{{1,256}}>\\n/ text_value"],
        )
        return
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for number, (name, value) in enumerate(properties.items()):
        if ">" in name or "\n" in name:
            raise GrammarError(f"the tool calls of this model cannot express {name[:100]!r}")
        rule = f"parameter_{tool}_{number}"
        head = grammars.literal(f"{PARAMETER}{name}>\n")
        yield (
            rule if name in required else f"{rule}?",
            [f"{rule}: {head} value_{tool}_{number}", *_value(tool, number, value, definitions)],
        )


def _value(tool: int, number: int, schema: Any, definitions: Mapping[str, Any]) -> list[str]:
    """Returns the rules of a parameter's value, up to the end of its closing tag."""
    rule = f"value_{tool}_{number}"
    if not isinstance(schema, dict):
        return [f"{rule}: text_value"]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        spelled = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
        if any(end in each for each in spelled for end in (END_PARAMETER, END_CALL)):
            raise GrammarError("the tool calls of this model cannot express a value of an enum")
        options = " | ".join(grammars.literal(f"{each}\n{END_PARAMETER}\n") for each in spelled)
        return [f"{rule}: {options}"]
    if "string" not in json_types(schema):
        end, json_rule = grammars.literal(f"\n{END_PARAMETER}\n"), f"json_{tool}_{number}"
        followed = grammars.json_rule({**schema, **definitions})
        return [f"{rule}: {json_rule} {end}", f"{json_rule}: {followed}"]
    options = next((schema[name] for name in _EITHER if isinstance(schema.get(name), list)), [])
    for each in (schema, *options):
        keys = each.keys() if isinstance(each, dict) else frozenset[str]()
        if more := keys - _WITHOUT_EFFECT - {"type", *_EITHER}:
            raise GrammarError(
                f"{min(more)} cannot be enforced in this model's tool calls where a parameter may "
                "be text"
            )
    return [f"{rule}: text_value"]


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schemas of the parameters by name, with references within the schema resolved."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _followed(value, schema) for name, value in properties.items()}


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the target of a reference to a definition."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            break
        found: Any = root
        for step in reference.removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        if found is None:
            break
        schema = found
    return schema


STRING = frozenset({"string"})
ANY_TYPE = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def json_types(schema: Any) -> frozenset[str]:
    """Returns the JSON types that the schema allows for a value."""
    if not isinstance(schema, dict):
        return ANY_TYPE
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    for name in _EITHER:
        if isinstance(options := schema.get(name), list):
            return frozenset[str]().union(*map(json_types, options))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [schema["const"]] if "const" in schema else values
    return frozenset[str]().union(*map(_type_of, values)) if values else ANY_TYPE


def _type_of(value: Any) -> frozenset[str]:
    match value:
        case bool():
            return frozenset(["boolean"])
        case int():
            return frozenset(["integer", "number"])
        case float():
            return frozenset(["number"])
        case str():
            return frozenset(["string"])
        case list():
            return frozenset(["array"])
        case None:
            return frozenset(["null"])
        case _:
            return frozenset(["object"])


def as_json(text: str, schema: Any) -> str:
    """Converts a raw text value to JSON of a type that the schema allows. Text that fits no such
    type becomes a string."""
    kinds = json_types(schema)
    literals = {"True": "true", "False": "false", "None": "null"}
    written = literals.get(text.strip(), text.strip())
    if kinds != STRING:
        try:
            value = msgspec.json.decode(written.encode())
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return json_string(text)
        if not isinstance(value, str) and _type_of(value) & kinds:
            return written
    return json_string(text)


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def text_rule(name: str, pattern: str) -> list[str]:
    """Returns a Lark rule for text that matches a regular expression and ends at the first closing
    tag of a value."""
    terminal = name.upper()
    return [
        rf"{name}: {name}_to_tag /\n/",
        rf"{name}_to_tag[lazy]: {terminal}",
        rf"{terminal}: /(?:{pattern})\n?<\/parameter>/ & ~/(?s:.*)<\/tool_call>(?s:.*)/",
    ]
