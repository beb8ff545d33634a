"""What models write, spelled out independently of the server: the definition of each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.server.chat_formats.choose import HERMES, LLAMA, MISTRAL, QWEN_XML
from jaxserve.server.chat_formats.tool_format import ToolFormat


class Call(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {written(name)}, "arguments": {written(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def llama(calls: Sequence[Call]) -> str:
    return ";".join(
        f'{{"name": {written(name)}, "parameters": {written(arguments)}}}'
        for name, arguments in calls
    )


def llama_tagged(calls: Sequence[Call]) -> str:
    return f"<|python_tag|>{llama(calls)}"


def mistral_list(calls: Sequence[Call]) -> str:
    each = [f'{{"name": {written(n)}, "arguments": {written(a)}}}' for n, a in calls]
    return f"[TOOL_CALLS] [{', '.join(each)}]"


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{written(arguments)}" for name, arguments in calls)


def qwen_xml(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n{_parameters(arguments)}</function>\n</tool_call>"
        for name, arguments in calls
    )


def _parameters(arguments: Mapping[str, Any]) -> str:
    return "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else written(value)}\n</parameter>\n"
        for name, value in arguments.items()
    )


class Writing(NamedTuple):
    """One way in which a format's calls are written."""

    format: ToolFormat
    write: Callable[[Sequence[Call]], str]
    tokens: tuple[str, ...]
    """The markers that are tokens of models which write so."""


WRITINGS = {
    "hermes": Writing(HERMES, hermes, ()),
    "llama": Writing(LLAMA, llama, ()),
    "llama_tagged": Writing(LLAMA, llama_tagged, ("<|python_tag|>",)),
    "mistral_list": Writing(MISTRAL, mistral_list, ("[TOOL_CALLS]",)),
    "mistral": Writing(MISTRAL, mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "qwen_xml": Writing(QWEN_XML, qwen_xml, ()),
}
