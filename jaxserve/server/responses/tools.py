"""Translates the tools of a response to those of a chat. Namespaces become part of names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.server.errors import invalid
from jaxserve.server.request import schema as chat
from jaxserve.server.responses.schema import (
    AllowedChoice,
    AllowedTool,
    CustomChoice,
    FunctionChoice,
    ToolChoice,
    ToolDefinition,
    ToolFormat,
)


class Name(NamedTuple):
    """The client's name of a tool."""

    namespace: str | None
    name: str

    @property
    def flat(self) -> str:
        """The model's name of the tool."""
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"


def chat_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Translates tools. Passes on unknown kinds: the chat leaves them out and names them."""
    translated: list[dict[str, Any]] = []
    for position, tool in enumerate(tools):
        param = f"tools[{position}]"
        if tool.type == "namespace":
            translated += _of_namespace(tool, param)
        else:
            translated.append(_tool(tool, None, param))
    if len(translated) > chat.MAX_TOOLS:
        raise invalid(
            f"tools and their namespaces hold {len(translated)} tools, the most are "
            f"{chat.MAX_TOOLS}",
            param="tools",
        )
    return translated


def client_names(tools: Sequence[ToolDefinition]) -> Mapping[str, Name]:
    """Returns the names of tools in namespaces, by the model's name. Also by the name without the
    namespace if it is unique, because a model may omit the namespace."""
    inner = [Name(tool.name, one.name or "") for tool, one in _namespaced(tools)]
    plain = [tool.name for tool in tools if tool.type != "namespace"] + [n.name for n in inner]
    return {n.name: n for n in inner if plain.count(n.name) == 1} | {n.flat: n for n in inner}


def chat_tool_choice(
    choice: ToolChoice | None, tools: Sequence[ToolDefinition]
) -> chat.ToolChoice | None:
    """Translates the tool choice to that of a chat."""
    match choice:
        case FunctionChoice():
            return chat.NamedTool(function=_named(choice))
        case CustomChoice():
            return chat.NamedCustomTool(custom=_named(choice))
        case AllowedChoice():
            allowed = [one for tool in choice.tools for one in _allowed(tool, tools)]
            return chat.AllowedToolsChoice(
                allowed_tools=chat.AllowedTools(mode=choice.mode, tools=allowed)
            )
        case _:
            return choice


def _namespaced(
    tools: Sequence[ToolDefinition],
) -> Iterator[tuple[ToolDefinition, ToolDefinition]]:
    for tool in tools:
        if tool.type == "namespace":
            for one in tool.tools or ():
                yield tool, one


def _of_namespace(namespace: ToolDefinition, param: str) -> Iterator[dict[str, Any]]:
    """Yields the tools of a namespace. The description of the namespace precedes that of its first
    tool."""
    if namespace.name is None:
        raise invalid(f"{param}.name is required", param=f"{param}.name")
    told = namespace.description
    for position, tool in enumerate(namespace.tools or ()):
        yield _tool(tool, namespace.name, f"{param}.tools[{position}]", told)
        told = None


def _tool(
    tool: ToolDefinition, namespace: str | None, param: str, told: str | None = None
) -> dict[str, Any]:
    if tool.type not in ("function", "custom"):
        return {"type": tool.type}
    if tool.name is None:
        raise invalid(f"{param}.name is required", param=f"{param}.name")
    description = "\n\n".join(text for text in (told, tool.description) if text)
    fields: dict[str, Any] = {"name": Name(namespace, tool.name).flat}
    if description:
        fields["description"] = description
    if tool.type == "custom":
        if tool.format is not None:
            fields["format"] = _format(tool.format, f"{param}.format")
        return {"type": "custom", "custom": fields}
    fields |= {"parameters": tool.parameters, "strict": tool.strict}
    known = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": known}


def _format(form: ToolFormat, param: str) -> dict[str, Any]:
    if form.type == "text":
        return {"type": "text"}
    for name in ("syntax", "definition"):
        if getattr(form, name) is None:
            raise invalid(f"{param}.{name} is required", param=f"{param}.{name}")
    return {"type": "grammar", "grammar": {"syntax": form.syntax, "definition": form.definition}}


def _named(choice: FunctionChoice | CustomChoice) -> chat.NamedFunction:
    return chat.NamedFunction(name=Name(choice.namespace, choice.name).flat)


def _allowed(tool: AllowedTool, tools: Sequence[ToolDefinition]) -> Iterator[chat.AllowedTool]:
    """Yields a tool, or all tools of a namespace. Yields nothing for unsupported tools."""
    if tool.type in ("function", "custom") and tool.name is not None:
        yield _allowed_tool(tool.type, Name(tool.namespace, tool.name))
    elif tool.type == "namespace":
        for namespace, one in _namespaced(tools):
            if namespace.name == tool.name and one.type in ("function", "custom"):
                yield _allowed_tool(one.type, Name(tool.name, one.name or ""))


def _allowed_tool(kind: str, name: Name) -> chat.AllowedTool:
    named = chat.NamedFunction(name=name.flat)
    if kind == "custom":
        return chat.AllowedTool(custom=named)
    return chat.AllowedTool(function=named)
