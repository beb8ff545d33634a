"""Chooses a model's chat format: by a flag, by its chat template, or by its architecture."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.config import NO_PARSER, REASONING_PARSERS, TOOL_CALL_PARSERS, ConfigError
from jaxserve.server.chat_formats.chat_format import ChatFormat
from jaxserve.server.chat_formats.harmony import Harmony
from jaxserve.server.chat_formats.hermes import Hermes
from jaxserve.server.chat_formats.history import History
from jaxserve.server.chat_formats.llama import Llama3Json
from jaxserve.server.chat_formats.mistral import Mistral
from jaxserve.server.chat_formats.qwen_xml import QwenXml
from jaxserve.server.chat_formats.reasoning import (
    DEEPSEEK_R1,
    HARMONY_ANALYSIS,
    MISTRAL_THINK,
    QWEN3,
    ReasoningFormat,
)
from jaxserve.server.chat_formats.tool_format import CallFormat
from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.chat_template import ChatTemplate

log = logging.getLogger(__name__)

HERMES, QWEN_XML, LLAMA, MISTRAL = Hermes(), QwenXml(), Llama3Json(), Mistral()
HARMONY = Harmony()

TOOL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "openai": HARMONY,
    "qwen3_coder": QWEN_XML,
    "qwen3_xml": QWEN_XML,
}
"""Tool call formats by vLLM's parser names."""
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": DEEPSEEK_R1,
    "mistral": MISTRAL_THINK,
    "openai_gptoss": HARMONY_ANALYSIS,
    "qwen3": QWEN3,
}

_IN_TEMPLATE: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<function=",), QWEN_XML),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA),
    (("ipython", "parameters"), LLAMA),
)
"""Strings in a chat template that identify a format. The first match wins."""

_BY_ARCHITECTURE: tuple[tuple[str, CallFormat], ...] = (
    ("Qwen3_5", QWEN_XML),
    ("Qwen", HERMES),
    ("Llama", LLAMA),
    ("GptOss", HARMONY),
    ("Mistral", MISTRAL),
    ("Ministral", MISTRAL),
)
"""Formats by the start of an architecture name in config.json."""


class _Chosen[T](NamedTuple):
    format: T | None
    source: str


def chat_format(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    source: str,
    *,
    architecture: str = "",
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ChatFormat:
    """Returns the format of a model's chats. Logs the choice and its reason.

    Args:
      source: the template's text.
      architecture: the architecture in config.json; empty: unknown.
      tool_call_parser, reasoning_parser: names from flags, if any.

    Raises:
      ConfigError: a name is unknown.
    """
    calls = _tool_format(source, architecture, tool_call_parser)
    thoughts = _reasoning_format(source, tokenizer.markers, reasoning_parser, calls.format)
    log.info(
        "chat format: tool calls %s (%s), reasoning %s (%s)",
        *(calls.format.name if calls.format is not None else NO_PARSER, calls.source),
        *(thoughts.format.name if thoughts.format is not None else NO_PARSER, thoughts.source),
    )
    return ChatFormat(
        tools=calls.format,
        reasoning=thoughts.format,
        markers=tokenizer.markers,
        history=History.of(template),
    )


def _tool_format(source: str, architecture: str, asked: str | None) -> _Chosen[CallFormat]:
    if asked is not None:
        _check(asked, TOOL_CALL_PARSERS, "--tool-call-parser")
        return _Chosen(TOOL_FORMATS.get(asked), "by --tool-call-parser")
    for signs, found in _IN_TEMPLATE:
        if all(sign in source for sign in signs):
            return _Chosen(found, "by the chat template")
    for beginning, found in _BY_ARCHITECTURE:
        if architecture.startswith(beginning):
            return _Chosen(found, f"by the architecture {architecture}")
    return _Chosen(HERMES, "by default")


def _reasoning_format(
    source: str, markers: Mapping[str, int], asked: str | None, calls: CallFormat | None
) -> _Chosen[ReasoningFormat]:
    if asked is not None:
        _check(asked, REASONING_PARSERS, "--reasoning-parser")
        return _Chosen(REASONING_FORMATS.get(asked), "by --reasoning-parser")
    if calls is HARMONY:
        return _Chosen(HARMONY_ANALYSIS, "as the tool calls")
    for found in (MISTRAL_THINK, QWEN3):
        if found.opens in source:
            return _Chosen(found, "by the chat template")
        if found.opens in markers:
            return _Chosen(found, "by the tokenizer")
    return _Chosen(None, "nothing marks it")


def _check(name: str, known: tuple[str, ...], flag: str) -> None:
    if name not in known:
        raise ConfigError(f"{flag} {name[:100]!r} is not known; known: {', '.join(known)}")
