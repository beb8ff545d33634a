"""Translates a request of the Messages API to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from jaxserve.server.errors import invalid
from jaxserve.server.messages.schema import (
    Block,
    InputMessage,
    MessagesRequest,
    PlainText,
    PromptFields,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from jaxserve.server.request import schema as chat

NAMES = {
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
}
"""Chat fields and the fields of this API that errors about them should name."""

BILLING = "x-anthropic-billing-header"

_BLOCKS = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""The allowed blocks of messages, by role."""


def to_chat(fields: MessagesRequest) -> chat.ChatRequest:
    """Translates a request of the Messages API to a chat. Raises ApiError (400)."""
    request = prompt_to_chat(fields)
    request.stream = fields.stream
    request.max_tokens = fields.max_tokens
    request.temperature = fields.temperature
    request.top_p = fields.top_p
    request.top_k = fields.top_k
    if fields.output_config is not None and fields.output_config.format is not None:
        schema = chat.JsonSchemaFormat(schema=fields.output_config.format.schema)
        request.response_format = chat.ResponseFormat(type="json_schema", json_schema=schema)
    request.stop = fields.stop_sequences
    if fields.thinking is not None:
        request.thinking_token_budget = fields.thinking.budget_tokens
    return request


def prompt_to_chat(fields: PromptFields) -> chat.ChatRequest:
    """Returns a chat with the prompt's fields only: messages, tools and thinking."""
    system = _without_billing(fields.system or "")
    messages = [chat.Message(role="system", content=system)] if system else []
    for position, message in enumerate(fields.messages):
        messages += _translated(message, f"messages[{position}].content")
    if not messages:
        raise invalid("the messages have no content", param="messages")
    choice = fields.tool_choice
    thinks = fields.thinking is not None and fields.thinking.type != "disabled"
    return chat.ChatRequest(
        messages=messages,
        tools=[_tool(i, tool) for i, tool in enumerate(fields.tools or ())],
        tool_choice=_tool_choice(choice) if choice is not None else None,
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        chat_template_kwargs={"enable_thinking": thinks},
        # A final assistant message is the beginning of the answer.
        continue_final_message=messages[-1].role == "assistant",
    )


def _translated(message: InputMessage, param: str) -> list[chat.Message]:
    """Returns one message per tool result. The texts between results stay together."""
    if isinstance(message.content, str):
        return [chat.Message(role=message.role, content=message.content)]
    _check_blocks(message.role, message.content, param)
    if message.role == "assistant":
        return [_assistant(message.content)]
    messages: list[chat.Message] = []
    for kind, together in groupby(message.content, type):
        if kind is TextBlock:
            text = "".join(block.text for block in together if isinstance(block, TextBlock))
            messages.append(chat.Message(role=message.role, content=text))
        else:
            messages += [_result(block) for block in together if isinstance(block, ToolResultBlock)]
    return messages


def _check_blocks(role: str, blocks: Sequence[Block], param: str) -> None:
    for position, block in enumerate(blocks):
        if type(block) not in _BLOCKS[role]:
            kind = block.__struct_config__.tag
            raise invalid(
                f"a message of role {role} has no {kind} blocks",
                param=f"{param}[{position}]",
            )


def _result(block: ToolResultBlock) -> chat.Message:
    content = block.content or ""
    if not isinstance(content, str):
        content = [chat.ContentPart(type=part.type, text=part.text) for part in content]
    return chat.Message(role="tool", tool_call_id=block.tool_use_id, content=content)


def _assistant(blocks: Sequence[Any]) -> chat.Message:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        chat.ToolCall(
            id=block.id, function=chat.FunctionCall(name=block.name, arguments=block.input)
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return chat.Message(
        role="assistant",
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _without_billing(system: str | Sequence[PlainText]) -> str:
    """Returns the system text without a leading line that Claude Code adds for Anthropic's
    accounting. That line differs between requests, so the prefix cache would never have a hit. It
    says nothing to the model."""
    first, *rest = [system] if isinstance(system, str) else [block.text for block in system] or [""]
    if first.startswith(BILLING):
        first = first.partition("\n")[2]
    return "".join([first, *rest])


def _tool(position: int, tool: ToolDefinition) -> dict[str, Any]:
    """Translates a tool. Passes on unknown kinds: the chat leaves them out and names them."""
    if tool.type not in (None, "custom"):
        return {"type": tool.type}
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            param = f"tools[{position}].{name}"
            raise invalid(f"{param} is required", param=param)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Literal["none", "auto", "required"] | chat.NamedTool:
    match choice.type:
        case "tool":
            if choice.name is None:
                raise invalid("a tool_choice of type tool needs a name", param="tool_choice.name")
            return chat.NamedTool(function=chat.NamedFunction(name=choice.name))
        case "any":
            return "required"
        case kind:
            return kind
