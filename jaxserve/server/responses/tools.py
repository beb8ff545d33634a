"""The tools of a response as those of a chat: namespaces become a part of the names."""

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
    """A tool's, as the client knows it."""

    namespace: str | None
    name: str

    @property
    def flat(self) -> str:
        """As the model knows it."""
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"


def chat_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """What no chat has either is passed on, to be left out and named there."""
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
    """The tools of namespaces by the names that the model knows, and by those without the namespace
    where nothing else has these: a model may leave it out."""
    inner = [Name(tool.name, one.name or "") for tool, one in _namespaced(tools)]
    plain = [tool.name for tool in tools if tool.type != "namespace"] + [n.name for n in inner]
    return {n.name: n for n in inner if plain.count(n.name) == 1} | {n.flat: n for n in inner}


def chat_tool_choice(
    choice: ToolChoice | None, tools: Sequence[ToolDefinition]
) -> chat.ToolChoice | None:
    """Returns the tool choice as chats have it."""
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
    """What the namespace says of itself stands before what its first tool does."""
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
    """A tool, all of a namespace, or nothing: what is left out of the tools."""
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
