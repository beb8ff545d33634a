"""Requests that need one tool: of a fixed table, or a tool invented for the request."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from lab.embedded import tool_tables
from lab.embedded.chat import Message
from lab.embedded.strings import (
    Split,
    city,
    code,
    draw,
    full_name,
    invented_word,
    name,
    phrase,
    word,
)

Tool = dict[str, Any]

_ARGUMENTS: dict[str, Callable[[Random], Any]] = {
    "city": city,
    "minutes": lambda rng: rng.randint(1, 120),
    "recipient": name,
    "text": lambda rng: f"the {word(rng)} is in the {word(rng)}",
    "query": lambda rng: phrase(rng, 1, 4),
    "amount": lambda rng: rng.randint(1, 9999),
    "source": lambda rng: rng.choice(tool_tables.CURRENCIES),
    "target": lambda rng: rng.choice(tool_tables.CURRENCIES),
    "title": lambda rng: phrase(rng, 1, 3),
    "day": lambda rng: rng.choice(tool_tables.DAYS),
    "room": lambda rng: rng.choice(tool_tables.ROOMS),
    "state": lambda rng: rng.choice(("on", "off")),
    "order": code,
    "artist": full_name,
}
_RESULTS: dict[str, Callable[[Random], Any]] = {
    "degrees": lambda rng: rng.randint(-20, 40),
    "sky": lambda rng: rng.choice(tool_tables.SKIES),
    "time": lambda rng: f"{rng.randrange(24):02}:{rng.randrange(60):02}",
    "count": lambda rng: rng.randint(1, 999),
    "amount": lambda rng: rng.randint(1, 99999),
    "state": lambda rng: rng.choice(tool_tables.ORDER_STATES),
}


@dataclass(frozen=True)
class ToolUse:
    """The tools on offer, a request, the call it needs, what that returns, and the answer."""

    tools: list[Tool]
    request: str
    call: dict[str, Any]
    result: str
    answer: str


def known_tool_use(rng: Random, split: Split) -> ToolUse:
    """A tool of the table; the filled request is on one side of the split."""

    def sample() -> tuple[str, str, dict[str, Any]]:
        chosen = rng.choice(tuple(tool_tables.TOOLS))
        definition, requests, _ = tool_tables.TOOLS[chosen]
        properties = definition["function"]["parameters"]["properties"]
        arguments = {key: _ARGUMENTS[key](rng) for key in properties}
        return chosen, rng.choice(requests).format(**arguments), arguments

    chosen, request, arguments = draw(split, "tool", sample, lambda drawn: drawn[1])
    definition, _, answer = tool_tables.TOOLS[chosen]
    results = {key: make(rng) for key, make in _RESULTS.items() if f"{{result_{key}}}" in answer}
    text = answer.format(**arguments, **{f"result_{key}": value for key, value in results.items()})
    call = {"name": chosen, "arguments": arguments}
    return ToolUse(
        offered_with(rng, definition), request, call, json.dumps(results or {"status": "ok"}), text
    )


def offered_with(rng: Random, tool: Tool | None) -> list[Tool]:
    """One to three different tools in random order, `tool` among them if given."""
    others = [table[0] for table in tool_tables.TOOLS.values() if table[0] is not tool]
    others += [_invented_tool(rng)] * 3
    chosen = rng.sample(others, rng.choice((0, 1, 1, 2)) + (tool is None))
    tools = {
        offered["function"]["name"]: offered for offered in [*chosen, *([tool] if tool else [])]
    }
    return rng.sample(list(tools.values()), len(tools))


def _invented_tool(rng: Random) -> Tool:
    verb, thing = rng.choice(tool_tables.TOOL_VERBS), word(rng)
    fields = rng.sample(tool_tables.TOOL_FIELDS, rng.randint(1, 3))
    if rng.random() < 0.3:
        fields[0] = invented_word(rng)
    kinds = {field: rng.choice(("string", "string", "integer")) for field in fields}
    described = {field: f"{kind}: The {field}" for field, kind in kinds.items()}
    return tool_tables.tool(f"{verb}_{thing}", f"{verb.capitalize()} the {thing}.", **described)


def invented_tool_use(rng: Random, split: Split) -> ToolUse:
    """A tool that exists for this request only, asked for in the words of its definition."""

    def sample() -> Tool:
        return _invented_tool(rng)

    tool = draw(split, "new_tool", sample, lambda drawn: drawn["function"]["name"])["function"]
    arguments: dict[str, Any] = {}
    for field, schema in tool["parameters"]["properties"].items():
        text = rng.choice((name, word, code))(rng)
        arguments[field] = text if schema["type"] == "string" else rng.randint(0, 9999)
    verb, _, thing = tool["name"].partition("_")
    listed = ", ".join(f"{field} {value}" for field, value in arguments.items())
    request = rng.choice(
        (
            f"{verb.capitalize()} the {thing} with {listed}.",
            f"Please {verb} the {thing}: {listed}",
            f"{verb.capitalize()} {thing}, {listed}",
        )
    )
    call = {"name": tool["name"], "arguments": arguments}
    offered = offered_with(rng, {"type": "function", "function": tool})
    return ToolUse(offered, request, call, json.dumps({"status": "ok"}), "Done.")


def tool_use(rng: Random, split: Split) -> ToolUse:
    return (known_tool_use if rng.random() < 0.6 else invented_tool_use)(rng, split)


def call_message(call: dict[str, Any], call_id: str | None = None) -> Message:
    """The assistant turn that makes a call; with an id its arguments are text, as in the API."""
    made: dict[str, Any] = {"type": "function", "function": call}
    if call_id is not None:
        text = json.dumps(call["arguments"])
        made |= {"id": call_id, "function": {"name": call["name"], "arguments": text}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}
