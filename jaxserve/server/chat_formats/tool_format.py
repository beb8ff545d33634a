"""The contract of a tool call format: how calls are read from a text, and the grammar of calls."""

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
"""A function, whose arguments are a JSON object, or a custom tool, whose input is free text."""

MAX_HEADER = 1024
"""Characters in which a call's name and the start of its arguments must appear to be streamed."""


INPUT = "input"
"""The only argument of a custom tool, where a format has no place for free text."""
INPUT_OBJECT: Mapping[str, Any] = MappingProxyType(
    {
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
)
"""JSON schema of its arguments then."""


def input_grammar(tool: CustomTool) -> CustomGrammar | None:
    """Returns the grammar of a custom tool's input; None: any text."""
    return tool.format.grammar if tool.format is not None else None


def input_schema(tool: CallableTool) -> Mapping[str, Any]:
    """Returns the JSON schema of a call's arguments, for formats without free text. Raises
    GrammarError if the custom tool's input follows a grammar, which a JSON string cannot."""
    if isinstance(tool, ToolFunction):
        return tool.parameters or {}
    if input_grammar(tool) is not None:
        raise GrammarError(
            f"the input of {tool.name[:100]!r} has a grammar, and calls of this model are JSON"
        )
    return INPUT_OBJECT


def random_call_id() -> str:
    """Returns an id in OpenAI's shape."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallWriter:
    """Numbers the calls of one answer and gives them ids."""

    def __init__(self, tools: Sequence[CallableTool], make_id: Callable[[], str] = random_call_id):
        self.tools: Mapping[str, CallableTool] = {tool.name: tool for tool in tools}
        self.num_calls = 0
        self._make_id = make_id
        self._custom = False

    def is_custom(self, name: str) -> bool:
        """Whether the tool takes free text; unknown ones do not."""
        return isinstance(self.tools.get(name), CustomTool)

    def open(self, name: str) -> CallOpened:
        """Begins a call of the tool."""
        self._custom = self.is_custom(name)
        self.num_calls += 1
        return CallOpened(self.num_calls - 1, self._make_id(), name, self._custom)

    def arguments(self, text: str) -> CallArguments:
        """More of the arguments of the call that was opened last."""
        return CallArguments(self.num_calls - 1, text, self._custom)


class CallReader(Protocol):
    """Reads calls from where they begin. The parts do not depend on how the text is split."""

    @property
    def opened(self) -> bool:
        """Whether a call has begun. Before that the text may turn out to be none."""
        ...

    def push(self, text: str, parts: list[CallPart]) -> str | None:
        """Adds to `parts` what is certain by now. Returns the text behind the calls, or text that
        turned out to be no call and is not among the parts; None while the calls go on."""
        ...

    def finish(self, parts: list[CallPart]) -> None:
        """The output has ended before the calls did."""
        ...


class CallFormat(ABC):
    """How a family of models writes tool calls: among its text, or in messages of their own."""

    name: ClassVar[str]
    """vLLM's name of the parser."""
    markers: ClassVar[tuple[str, ...]]
    """Spellings that readers look for. Where tokens of these spellings are special ones, which
    texts leave out, readers must see them all the same."""
    turn_ends: ClassVar[tuple[str, ...]]
    """Spellings of the tokens that end the assistant's turn."""
    free_text: ClassVar[bool] = False
    """The input of a custom tool stands in a call as it is, in place of JSON."""

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
        """Returns the grammar of one to `most` calls. `reader` reads whatever it accepts.

        Args:
          markers: token ids by spelling; a marker that is no token is spelled out.

        Raises:
          GrammarError: the arguments of a tool cannot be followed in this format.
        """


class ToolFormat(CallFormat):
    """Calls that stand in the content, behind a marker."""

    begins: ClassVar[str]
    """The marker at which calls begin, anywhere in the content."""
    bare: ClassVar[bool] = False
    """Calls may also begin without the marker: as JSON at the beginning of the content."""
    ends_reasoning: ClassVar[bool] = False
    """The marker ends reasoning that was not closed."""

    @abstractmethod
    def reader(self, writer: CallWriter, most: int, marker: str) -> CallReader:
        """Returns a reader of calls that begin here.

        Args:
          most: the reader may end after so many calls in all.
          marker: `begins`, which has just been taken off the text; empty where calls begin bare.
        """


class MessageFormat(CallFormat):
    """An output is a row of messages, and reasoning, content and calls are kinds of them."""

    @abstractmethod
    def parser(
        self,
        tools: Sequence[CallableTool],
        *,
        reasoning: bool,
        parallel_calls: bool,
        text_or_calls: bool,
    ) -> Parser:
        """Returns a parser of one output, also where there are no tools.

        Args:
          reasoning: it is told from content.
          parallel_calls, text_or_calls: as of `OutputParser`.
        """


class Parser(Protocol):
    """A model's text as it comes: reasoning, content and tool calls told apart. The pieces do not
    depend on how the text is split."""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
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
        """Whether nothing more can be shown, because no further calls are wanted."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Returns what is certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """Returns what is still held back, once the text is complete."""
        ...
