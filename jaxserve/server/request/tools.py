"""The tools of a chat: which ones the template shows, which may be called, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.server.errors import invalid
from jaxserve.server.request.schema import (
    AllowedToolsChoice,
    ChatRequest,
    CustomTool,
    NamedCustomTool,
    NamedTool,
    Tool,
    ToolFunction,
)
from jaxserve.server.request.validation import wrong_field


@dataclass(frozen=True, kw_only=True)
class ChatTools:
    """The tools of one chat."""

    shown: Sequence[dict[str, Any]] = ()
    """The tools in the form that the template gets."""
    callable: Sequence[ToolFunction | CustomTool] = ()
    """The tools that may be called."""
    forced: bool = False
    """Whether the answer must consist of calls."""
    named: bool = False
    """Whether the client named the tool to call."""
    restricted: bool = False
    """Whether some of the shown tools may not be called."""
    ignored: tuple[str, ...] = ()
    """Built-in tools of other servers, which have no effect, for the header that names them."""

    @property
    def has_custom(self) -> bool:
        return any(isinstance(tool, CustomTool) for tool in self.callable)

    @property
    def without_schemas(self) -> Sequence[ToolFunction | CustomTool]:
        """The tools that may be called. Functions take any JSON object."""
        return [
            ToolFunction(name=tool.name) if isinstance(tool, ToolFunction) else tool
            for tool in self.callable
        ]


def chat_tools(fields: ChatRequest) -> ChatTools:
    """Returns the tools of a chat. Raises ApiError if a tool is incomplete, or if `tool_choice`
    names an unknown tool."""
    raw = fields.tools or []
    try:
        tools = msgspec.convert(raw, list[Tool])
    except msgspec.ValidationError as error:
        raise wrong_field(error, raw, list[Tool], at="tools") from None
    shown: list[dict[str, Any]] = []
    found: list[ToolFunction | CustomTool] = []
    ignored: dict[str, None] = {}
    for position, (tool, sent) in enumerate(zip(tools, raw, strict=True)):
        match tool.type:
            case "function":
                found.append(_whole(tool.function, f"tools[{position}].function"))
                shown.append(sent)
            case "custom":
                custom = _whole(tool.custom, f"tools[{position}].custom")
                _check_format(custom, f"tools[{position}].custom.format")
                found.append(custom)
                shown.append(_as_function(custom))
            case other:
                ignored[f"tools.{other}"] = None
    if fields.tool_choice == "none":
        return ChatTools(ignored=tuple(ignored))
    return _chosen(fields, shown, found, tuple(ignored))


def _chosen(
    fields: ChatRequest,
    shown: Sequence[dict[str, Any]],
    found: Sequence[ToolFunction | CustomTool],
    ignored: tuple[str, ...],
) -> ChatTools:
    choice = fields.tool_choice
    forced, named, chosen = choice == "required", False, found
    if isinstance(choice, NamedTool | NamedCustomTool):
        wanted = _of_choice(choice)
        chosen = [tool for tool in found if (type(tool), tool.name) == wanted][:1]
        forced = named = True
        if not chosen:
            raise _not_there(wanted[1])
    elif isinstance(choice, AllowedToolsChoice):
        allowed = set(_allowed(choice, found))
        chosen = [tool for tool in found if (type(tool), tool.name) in allowed]
        forced = choice.allowed_tools.mode == "required"
    if forced and not chosen:
        raise invalid(
            "tool_choice demands a call, but there is no tool to call",
            param="tool_choice",
        )
    return ChatTools(
        shown=shown,
        callable=chosen,
        forced=forced,
        named=named,
        restricted=len(chosen) < len(found),
        ignored=ignored,
    )


type _Key = tuple[type[ToolFunction | CustomTool], str]


def _of_choice(choice: NamedTool | NamedCustomTool) -> _Key:
    if isinstance(choice, NamedTool):
        return ToolFunction, choice.function.name
    return CustomTool, choice.custom.name


def _allowed(
    choice: AllowedToolsChoice, found: Sequence[ToolFunction | CustomTool]
) -> Iterator[_Key]:
    """Yields the allowed tools. Skips built-in tools, which are also skipped in `tools`."""
    known = {(type(tool), tool.name) for tool in found}
    for allowed in choice.allowed_tools.tools:
        for kind, names in ((ToolFunction, allowed.function), (CustomTool, allowed.custom)):
            if names is None:
                continue
            if (kind, names.name) not in known:
                raise _not_there(names.name)
            yield kind, names.name


def _not_there(name: str) -> Exception:
    return invalid(
        f"tool_choice names {name[:100]!r}, which is not among the tools", param="tool_choice"
    )


def _whole[T](value: T | None, param: str) -> T:
    if value is None:
        raise invalid(f"{param} is required", param=param)
    return value


def _check_format(tool: CustomTool, param: str) -> None:
    if tool.format is not None and tool.format.type == "grammar":
        _whole(tool.format.grammar, f"{param}.grammar")


def _as_function(tool: CustomTool) -> dict[str, Any]:
    """Returns a custom tool as a function with a text argument, because templates know only
    functions."""
    told = [tool.description] if tool.description else []
    told.append("The arguments are plain text, which is not JSON and not quoted.")
    if tool.format is not None and tool.format.grammar is not None:
        grammar = tool.format.grammar
        told.append(f"They follow this grammar ({grammar.syntax}):\n{grammar.definition}")
    function = {
        "name": tool.name,
        "description": "\n".join(told),
        "parameters": {"type": "string"},
    }
    return {"type": "function", "function": function}
