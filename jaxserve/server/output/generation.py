"""From the engine's tokens to the text of each choice, independent of the API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from jaxserve.api import (
    Engine,
    EngineFailed,
    FinishReason,
    Overloaded,
    PromptLogprobs,
    ReaderTooSlow,
    Rejected,
    Request,
    Start,
    TokenEvent,
    TokenLogprobs,
)
from jaxserve.metrics.metrics import Metrics
from jaxserve.server.chat_formats.pieces import Content, Piece
from jaxserve.server.chat_formats.tool_format import Parser
from jaxserve.server.output.prediction import PredictedTokens
from jaxserve.tokenizer import Detokenizer, StopStrings, Tokenizer


class TextOptions(NamedTuple):
    """Options for the conversion of tokens to text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that are kept in the text because the parser must see them."""
    stop_token_logprobs: bool = False
    """Whether to report the logprobs of the stop token, which is not shown."""
    prompt_only: bool = False
    """The client wants no output: the one generated token is not shown."""


class Delta(NamedTuple):
    """The output that one step added to one choice."""

    choice: int
    text: str
    """The new text; empty while a character is incomplete or a stop string may be in progress. With
    a parser, the text that the parser got; its result is in `pieces`."""
    tokens: tuple[int, ...]
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    pieces: Sequence[Piece] = ()
    """The parsed text, if the choice has a parser."""
    prompt_logprobs: Sequence[PromptLogprobs] | None = None
    held: bool = False
    """Whether text of this token, or of earlier ones, may be shown with a later token."""


class GrammarLeft(EngineFailed):
    """A sequence could not follow its grammar any further."""

    def __init__(self, num_tokens: int):
        super().__init__(f"a grammar met a limit after {num_tokens} tokens")
        self.num_tokens = num_tokens


def _nothing() -> None: ...


class Choice:
    """One sequence of a request and its output so far."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        options: TextOptions,
        parser: Parser | None = None,
    ):
        self.index = index
        self.request = request
        self.parser = parser
        self.on_first_token: Callable[[], None] = _nothing
        """Called when the prompt was computed."""
        self.num_tokens = 0
        self.predicted = PredictedTokens(request.predicted)
        """The tokens that the client predicted, as far as they came true."""
        self.weights: set[int] = set()
        """Versions of the weights that computed its tokens."""
        self.cached_tokens = 0
        self.start: Start | None = None
        """Report about the time to the first token, once it exists."""
        self.last_token_at = 0.0
        """Time of the last token by `time.perf_counter()`."""
        self.finish: FinishReason | None = None
        self.reason: FinishReason | None = None
        """How the choice ended, well or not; None: it has not begun."""
        self.reasoning_tokens = 0
        self._failed: FinishReason | None = None
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=options.skip_special, shown=options.shown_tokens
        )
        self._stops = StopStrings(options.stop, include=options.include_stop)

    def _deltas(self, events: Sequence[TokenEvent]) -> list[Delta]:
        """Returns the deltas up to the one that ends the choice. The client gets no later ones."""
        deltas: list[Delta] = []
        for event in events:
            if event.finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
                self._failed = event.finish
                break
            if event.token is not None:
                self.weights.add(event.weights)
            deltas.append(self.add(event))
            self.finish = deltas[-1].finish
            if self.finish is not None:
                break
        return deltas

    def add(self, event: TokenEvent) -> Delta:
        """Returns the client's view of one event, for a sequence that continues or ends well."""
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.start = event.start or self.start
        if self._options.prompt_only:
            scores = event.prompt_logprobs
            return Delta(self.index, "", (), None, FinishReason.LENGTH, prompt_logprobs=scores)
        delta = self._generated(event)
        if event.prompt_logprobs is not None:
            delta = delta._replace(prompt_logprobs=event.prompt_logprobs)
        return delta

    def _generated(self, event: TokenEvent) -> Delta:
        text, logprobs, finish = "", event.logprobs, event.finish
        if event.token is not None:
            self.num_tokens += 1
            if self.request.predicted:
                self.predicted.add(event.token)
            if finish is not FinishReason.STOP:
                text = self._detokenizer.push(event.token)
            elif not self._options.stop_token_logprobs:
                logprobs = None
        if finish is not None:
            text += self._detokenizer.flush()
        tokens = () if event.token is None else (event.token,)
        if self.parser is not None:
            return self._told_apart(self.parser, text, tokens, logprobs, finish)
        text = self._show(text)
        if self._stops.matched is not None:
            finish = FinishReason.STOP
        elif finish is not None:
            text += self._stops.flush()
        return Delta(self.index, text, tokens, logprobs, finish)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the output, if any."""
        return self._stops.matched

    def _told_apart(
        self,
        parser: Parser,
        text: str,
        tokens: tuple[int, ...],
        logprobs: TokenLogprobs | None,
        finish: FinishReason | None,
    ) -> Delta:
        was_reasoning = parser.in_reasoning
        parsed = parser.push(text)
        if was_reasoning and parser.in_reasoning:
            self.reasoning_tokens += 1
        pieces = self._until_stop(parsed)
        if self._stops.matched is None and (finish is not None or parser.ended):
            finish = FinishReason.STOP if parser.ended else finish
            pieces += self._until_stop(parser.finish())
            if self._stops.matched is None and (held := self._stops.flush()):
                pieces.append(Content(held))
        if self._stops.matched is not None:
            finish = FinishReason.STOP
        held = not text or parser.holding or self._stops.holding
        shown = "" if parsed and not pieces else text
        return Delta(self.index, shown, tokens, logprobs, finish, pieces, held=held)

    def _until_stop(self, pieces: list[Piece]) -> list[Piece]:
        """Cuts the content at a stop string. Reasoning and calls are not searched."""
        if not self._options.stop:
            return pieces
        shown: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, Content):
                if held := self._stops.flush():
                    shown.append(Content(held))
                shown.append(piece)
                continue
            if text := self._show(piece.text):
                shown.append(Content(text))
            if self._stops.matched is not None:
                break
        return shown

    def _show(self, text: str) -> str:
        if self.num_tokens <= self.request.params.min_tokens:
            return text
        return self._stops.push(text)

    async def run(
        self, engine: Engine, metrics: Metrics, arrived: float
    ) -> AsyncGenerator[list[Delta]]:
        """Submits the request and yields its deltas. Deltas that are available at once come
        together. The last one has `finish`. Closing the generator early aborts the sequence.

        Args:
          arrived: `time.perf_counter()` at the arrival of the request.

        Raises:
          EngineFailed: the sequence ended with an error.
          GrammarLeft: the sequence could not follow its grammar any further.
        """
        self.reason = FinishReason.ABORT
        deltas: list[Delta] = []
        try:
            # Close the engine's side before the last delta is passed on: a sequence that met a stop
            # string must not cost another step.
            async with aclosing(engine.generate(self.request)) as steps:
                async for events in steps:
                    if came := len(events) - (events[-1].token is None):
                        self._count(came, events[0], metrics, arrived)
                    deltas = self._deltas(events)
                    if self.finish is not None:
                        break
                    if deltas:
                        yield deltas
                    if self._failed is FinishReason.GRAMMAR:
                        raise GrammarLeft(self.num_tokens)
                    if self._failed is not None:
                        raise EngineFailed(f"the sequence ended with {self._failed}")
            if self.finish is None:
                raise EngineFailed("the engine's events ended without a reason")
            self.reason = self.finish
            yield deltas
        except (Rejected, Overloaded):
            self.reason = FinishReason.ERROR if self.num_tokens else None  # failed, or never begun
            raise
        except ReaderTooSlow:
            raise
        except EngineFailed:
            self.reason = FinishReason.ERROR
            raise
        finally:
            if self.reason is not None:
                metrics.prompt_accepted(len(self.request.prompt), self.request.params.max_tokens)
                took = time.perf_counter() - arrived
                metrics.sequence_finished(self.reason, self.num_tokens, took)
            if self.start is not None:
                decode = max(0.0, self.last_token_at - self.start.on_host)
                metrics.sequence_computed(self.start.prefill, decode, self.num_tokens)

    def _count(self, came: int, first: TokenEvent, metrics: Metrics, arrived: float) -> None:
        """Counts `came` tokens, of which `first` is the earliest. A failure has no token."""
        now = time.perf_counter()
        if self.last_token_at:
            metrics.next_tokens(now - self.last_token_at, came)
        else:
            cached = first.cached_tokens, first.restored_tokens
            metrics.first_token(now - arrived, len(self.request.prompt), *cached)
            metrics.next_tokens(0.0, came - 1)
            self.on_first_token()
        self.last_token_at = now


class Generation:
    """All choices of one HTTP request. Choices of one prompt are adjacent."""

    def __init__(
        self,
        choices: Sequence[Choice],
        choices_per_prompt: int,
        *,
        tokenizing: float,
        ignored: tuple[str, ...] = (),
    ):
        """`tokenizing`: seconds to render and encode the prompts. `ignored`: parts of the request
        that the prompts leave out."""
        self.choices = choices
        self.ignored = ignored
        self.tokenizing = tokenizing
        self.first_write: float | None = None
        """Seconds from a stream's first token on the host to its write to the socket."""
        self._choices_per_prompt = choices_per_prompt

    def deltas(
        self, engine: Engine, metrics: Metrics, arrived: float
    ) -> AsyncGenerator[list[Delta]]:
        """Submits all choices and yields their deltas. Deltas of one choice that are available at
        once come together."""
        metrics.request_choices(self._choices_per_prompt)
        runs = [choice.run(engine, metrics, arrived) for choice in self.choices]
        return runs[0] if len(runs) == 1 else merged(runs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts. Choices of one prompt share its count."""
        firsts = self.choices[:: self._choices_per_prompt]
        return sum(len(choice.request.prompt) for choice in firsts)

    @property
    def cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices[:: self._choices_per_prompt])

    @property
    def weights(self) -> set[int]:
        """The versions of the weights that computed the output so far."""
        return set[int]().union(*(choice.weights for choice in self.choices))

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Predicted tokens that occur in the choices."""
        return sum(choice.predicted.accepted for choice in self.choices)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Predicted tokens that do not occur in the choices, or not yet."""
        return sum(choice.predicted.rejected for choice in self.choices)

    @property
    def num_entries(self) -> int:
        """Approximate number of entries in a complete answer: tokens, and logprobs of output and
        prompts."""
        entries = 0
        for choice in self.choices:
            params = choice.request.params
            entries += choice.num_tokens * (1 + (params.logprobs or 0))
            if params.prompt_logprobs is not None:
                entries += len(choice.request.prompt) * (1 + params.prompt_logprobs)
        return entries

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens that are reasoning."""
        return sum(choice.reasoning_tokens for choice in self.choices)


class _End(NamedTuple):
    error: Exception | None


async def merged[T](sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yields items of all sources as they arrive. The first error, or closing, ends all sources. At
    most one item per source is taken ahead of the consumer."""
    queue: asyncio.Queue[T | _End] = asyncio.Queue(len(sources))

    async def pump(source: AsyncGenerator[T]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put(item)
        except Exception as raised:
            error = raised
        await queue.put(_End(error))

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
