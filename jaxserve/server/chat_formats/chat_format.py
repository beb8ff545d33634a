"""The chat format of a model in one object, made at the start and shared by all requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.grammar_server.wire import Grammar
from jaxserve.server.chat_formats.history import History
from jaxserve.server.chat_formats.output_parser import OutputParser
from jaxserve.server.chat_formats.reasoning import ReasoningFormat
from jaxserve.server.chat_formats.tool_format import (
    INPUT,
    CallableTool,
    CallFormat,
    MessageFormat,
    Parser,
    ToolFormat,
)
from jaxserve.structured import GrammarError, Thinking, grammars


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How a model's prompts and outputs represent reasoning and tool calls."""

    tools: CallFormat | None
    """None: calls are not separated from text."""
    reasoning: ReasoningFormat | None
    """None: reasoning is not separated from text."""
    markers: Mapping[str, int] = field(repr=False)
    """Token ids of markers, by spelling."""
    history: History = field(default_factory=History)

    @property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end the assistant's turn, in addition to those in the model's settings."""
        return self._tokens(self.tools.turn_ends if self.tools is not None else ())

    def shown_tokens(self, thinking: Thinking, *, calls: bool) -> frozenset[int]:
        """Returns the tokens that the output parser must see, including special ones.

        Args:
          calls: whether the output may have calls.
        """
        seen = calls or isinstance(self.tools, MessageFormat)
        of_calls = self.tools.markers if seen and self.tools is not None else ()
        reasoning = None if thinking is Thinking.NONE else self.reasoning
        return self._tokens((*of_calls, *(reasoning.markers if reasoning is not None else ())))

    @property
    def guided_reasoning(self) -> ReasoningFormat | None:
        """The reasoning format if its markers are tokens. A guide cannot find the end of any
        other."""
        if self.reasoning is None or not self.markers.keys() >= set(self.reasoning.markers):
            return None
        return self.reasoning

    def thinking(self, prompt_end: str, *, continued: bool) -> Thinking:
        """Returns whether the output may begin with reasoning, or begins inside of reasoning.

        Args:
          prompt_end: the last characters of the prompt.
          continued: whether the output continues an assistant message.
        """
        if self.reasoning is None:
            return Thinking.NONE
        end = prompt_end.rstrip()
        if end.endswith(self.reasoning.opens):
            return Thinking.OPEN
        if continued or end.endswith(self.reasoning.closes):
            return Thinking.NONE
        return Thinking.OPEN if self.reasoning.begins_open else Thinking.MAY_OPEN

    def history_id(self, call_id: str) -> str:
        """Returns a client's call id in a form that the template accepts."""
        return call_id if self.tools is None else self.tools.history_id(call_id)

    def history_input(self, text: str) -> str | dict[str, Any]:
        """Returns the input of a custom tool call as the arguments that templates expect."""
        if self.tools is not None and not self.tools.free_text:
            return self.history.arguments({INPUT: text})
        return text if self.history.takes_text else {INPUT: text}

    def parser(
        self,
        thinking: Thinking,
        tools: Sequence[CallableTool],
        *,
        parallel_calls: bool,
        text_or_calls: bool,
    ) -> Parser:
        """Returns a parser for one output. Takes the arguments of `OutputParser`."""
        if isinstance(self.tools, MessageFormat):
            return self.tools.parser(
                tools,
                reasoning=self.reasoning is not None,
                parallel_calls=parallel_calls,
                text_or_calls=text_or_calls,
            )
        return OutputParser(
            tool_format=self.tools if tools and isinstance(self.tools, ToolFormat) else None,
            tools=tools,
            reasoning=None if thinking is Thinking.NONE else self.reasoning,
            opened=thinking is Thinking.OPEN,
            parallel_calls=parallel_calls,
            text_or_calls=text_or_calls,
        )

    def calls(
        self,
        tools: Sequence[CallableTool],
        most: int,
        *,
        forced: bool,
        answer: Grammar | None = None,
    ) -> Grammar:
        """Returns the grammar of an output with at most `most` calls of these tools.

        Args:
          forced: the output must consist of calls, at least one.
          answer: the grammar of an output without calls, if calls are not forced; None: any text,
            which
            may contain calls.

        Raises:
          GrammarError: a grammar cannot express the arguments of a tool, calls cannot be told from
            text,
            or the model has no calls.
        """
        if self.tools is None:
            raise GrammarError("tool calls are turned off here (--tool-call-parser none)")
        rules = self.tools.rules(tools, self.markers, most)
        if forced:
            return grammars.tool_calls(rules)
        if answer is None:
            return grammars.text_and_tool_calls(rules)
        return grammars.tool_calls_or(answer, rules)

    def _tokens(self, spellings: Iterable[str]) -> frozenset[int]:
        return frozenset(self.markers[each] for each in spellings if each in self.markers)
