"""The interface of tool call formats: parsers of calls, and grammars of calls."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from jaxserve.server.chat_formats.pieces import CallArguments, CallOpened, CallPart, Piece
from jaxserve.server.request.schema import CustomGrammar, CustomTool, ToolFunction
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammars import CallRules

type CallableTool = ToolFunction | CustomTool
"""A function takes a JSON object; a custom tool takes free text."""

MAX_HEADER = 1024
"""The name and the start of the arguments must appear within this many characters, or the call is
not streamed."""


INPUT = "input"
"""The only argument of a custom tool, in formats without free text."""
INPUT_OBJECT: Mapping[str, Any] = MappingProxyType(
    {
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
)
"""JSON schema of the arguments in that case."""


def input_grammar(tool: CustomTool) -> CustomGrammar | None:
    """Returns the grammar of a custom tool's input; None: any text."""
    return tool.format.grammar if tool.format is not None else None


def input_schema(tool: CallableTool) -> Mapping[str, Any]:
    """Returns the JSON schema of a call's arguments, for formats without free text. Raises
    GrammarError if the custom tool's input has a grammar, because a JSON string cannot follow
    it."""
    if isinstance(tool, ToolFunction):
        return tool.parameters or {}
    if input_grammar(tool) is not None:
        raise GrammarError(
            f"the input of {tool.name[:100]!r} has a grammar, and calls of this model are JSON"
        )
    return INPUT_OBJECT


def random_call_id() -> str:
    """Returns an id in OpenAI's format."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallWriter:
    """Numbers the calls of one answer and gives them ids."""

    def __init__(self, tools: Sequence[CallableTool], make_id: Callable[[], str] = random_call_id):
        self.tools: Mapping[str, CallableTool] = {tool.name: tool for tool in tools}
        self.num_calls = 0
        self._make_id = make_id
        self._custom = False

    def is_custom(self, name: str) -> bool:
        """Returns whether the tool takes free text; False for unknown tools."""
        return isinstance(self.tools.get(name), CustomTool)

    def open(self, name: str) -> CallOpened:
        """Begins a call of the tool."""
        self._custom = self.is_custom(name)
        self.num_calls += 1
        return CallOpened(self.num_calls - 1, self._make_id(), name, self._custom)

    def arguments(self, text: str) -> CallArguments:
        """Adds to the arguments of the call opened last."""
        return CallArguments(self.num_calls - 1, text, self._custom)


class CallReader(Protocol):
    """Parses calls from their beginning. The result does not depend on how the text is split."""

    @property
    def opened(self) -> bool:
        """Whether a call has begun. Until then the text may turn out to be no call."""
        ...

    def push(self, text: str, parts: list[CallPart]) -> str | None:
        """Adds the certain parts to `parts`. Returns the text after the calls, or text that is no
        call and not among the parts; None while the calls continue."""
        ...

    def finish(self, parts: list[CallPart]) -> None:
        """Reports that the output has ended before the calls did."""
        ...


class CallFormat(ABC):
    """The format in which a family of models writes tool calls: inside its text, or as messages."""

    name: ClassVar[str]
    """vLLM's name of the parser."""
    markers: ClassVar[tuple[str, ...]]
    """Spellings that readers look for. If tokens with these spellings are special, texts omit them,
    but readers must still see them."""
    turn_ends: ClassVar[tuple[str, ...]]
    """Spellings of the tokens that end the assistant's turn."""
    free_text: ClassVar[bool] = False
    """Whether calls contain the input of a custom tool verbatim instead of JSON."""

    def make_id(self) -> str:
        """Returns a new call id in a form that the models' templates accept."""
        return random_call_id()

    def history_id(self, call_id: str) -> str:
        """Returns a client's call id in a form that the models' templates accept."""
        return call_id

    @abstractmethod
    def rules(
        self, tools: Sequence[CallableTool], markers: Mapping[str, int], most: int
    ) -> CallRules:
        """Returns the grammar of one to `most` calls. `reader` parses everything that it accepts.

        Args:
          markers: token ids by spelling. A marker that is no token is spelled out.

        Raises:
          GrammarError: the format cannot express the arguments of a tool.
        """


class ToolFormat(CallFormat):
    """A format whose calls are part of the content, after a marker."""

    begins: ClassVar[str]
    """The marker that begins calls, anywhere in the content."""
    bare: ClassVar[bool] = False
    """Whether calls may also begin without the marker: as JSON at the beginning of the content."""
    ends_reasoning: ClassVar[bool] = False
    """Whether the marker ends reasoning that was not closed."""

    @abstractmethod
    def reader(self, writer: CallWriter, most: int, marker: str) -> CallReader:
        """Returns a reader of calls that begin here.

        Args:
          most: the reader may end after this many calls.
          marker: `begins`, which was just removed from the text; empty if calls began without it.
        """


class MessageFormat(CallFormat):
    """A format whose output is a sequence of messages. Reasoning, content and calls are kinds of
    them."""

    @abstractmethod
    def parser(
        self,
        tools: Sequence[CallableTool],
        *,
        reasoning: bool,
        parallel_calls: bool,
        text_or_calls: bool,
    ) -> Parser:
        """Returns a parser of one output, even if there are no tools.

        Args:
          reasoning: whether to separate reasoning from content.
          parallel_calls, text_or_calls: as for `OutputParser`.
        """


class Parser(Protocol):
    """Splits a model's text into reasoning, content and tool calls as it arrives. The result does
    not depend on how the text is split into parts."""

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        ...

    @property
    def holding(self) -> bool:
        """Whether text is held back that may turn out to be content."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing more will be shown, because no further calls are wanted."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Adds text. Returns the pieces that are certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """Returns the held text at the end of the output."""
        ...
