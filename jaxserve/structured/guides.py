"""Compiled grammars, and the position of each sequence in its grammar."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from jaxserve.api import Ahead, GuideError
from jaxserve.grammar_server.wire import Grammar
from jaxserve.metrics.metrics import Metrics
from jaxserve.structured.compiling import CompileLimits, Compiler
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammars import MAX_SOURCE
from jaxserve.structured.orders import GrammarProcess, MaskStep
from jaxserve.structured.vocabulary import THINK_MARKERS, Vocabulary, vocabulary_of
from jaxserve.tokenizer import Tokenizer

CACHE_ENTRIES = 64
"""The most compiled grammars to keep. Most take about 3 MiB, and 15 ms to compile again."""
CACHE_BYTES = 128 * 2**20
"""The most memory that their compilation took together."""
SHARED_TOKENS = 20_000
"""Tokens after which a grammar is compiled again. Requests that use it then continue with the old
process."""


class Thinking(Enum):
    """Whether the text may begin with a `<think>` block, to which the grammar does not apply."""

    NONE = auto()
    MAY_OPEN = auto()
    OPEN = auto()
    """The prompt ends inside the block."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Guide:
    """The constraint on one request's sequences; implements `api.Guide`."""

    compiled: GrammarProcess
    thinking: Thinking
    vocabulary: Vocabulary

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the output where the grammar allows it."""
        return self.vocabulary.end_token_ids

    def start(self) -> GuideState:
        return GuideState(self)


class _Phase(Enum):
    MAY_OPEN = auto()
    THINKING = auto()
    GRAMMAR = auto()


_numbers = itertools.count()


class GuideState:
    """Implements `api.GuideState`: the mask of a sequence's next token."""

    def __init__(self, guide: Guide):
        self._guide = guide
        self._number: int | None = None
        """Its number in the grammar's process, from its first token in the grammar on."""
        self.error: GuideError | None = None
        self.ready = True
        self.following: bytes | None = None
        """Always None: each token decides the next mask."""
        self.mask = guide.compiled.mask
        self.ahead = Ahead()
        self._phase = _Phase.GRAMMAR
        think = guide.vocabulary.think
        if think is not None and guide.thinking is Thinking.MAY_OPEN:
            self._phase = _Phase.MAY_OPEN
            self.mask = _with_token(self.mask, think.opens)
        elif think is not None and guide.thinking is Thinking.OPEN:
            self._phase = _Phase.THINKING
            self.mask = think.inside

    def advance(self, *tokens: int, drafts: Sequence[int] = (), most: int = 0) -> None:
        """See `api.GuideState`."""
        guide, self.ahead = self._guide, Ahead()
        followed = [token for token in tokens if self._is_of_grammar(token)]
        if self._phase is _Phase.THINKING:
            self.ahead = self._thought_ahead(drafts[:most])
        if not followed:
            return
        self.ready = False
        if self._number is None:
            self._number = next(_numbers)
        step = MaskStep(self._number, followed, list(drafts[:most]), most)
        guide.compiled.advance(step, self)

    def _is_of_grammar(self, token: int) -> bool:
        """Returns whether the sequence's next token belongs to the grammar, not to a think
        block."""
        think = self._guide.vocabulary.think
        if self._phase is _Phase.GRAMMAR:
            return True
        assert think is not None
        if self._phase is _Phase.MAY_OPEN and token == think.opens:
            self._phase, self.mask = _Phase.THINKING, think.inside
            return False
        if self._phase is _Phase.THINKING:
            if token == think.closes:
                self._phase, self.mask = _Phase.GRAMMAR, self._guide.compiled.mask
            return False
        self._phase = _Phase.GRAMMAR
        return True

    def _thought_ahead(self, drafts: Sequence[int]) -> Ahead:
        """Returns the drafts inside a think block. The closing marker is never a draft, because the
        grammar follows it."""
        think = self._guide.vocabulary.think
        assert think is not None
        inside = tuple(itertools.takewhile(lambda draft: draft != think.closes, drafts))
        return Ahead(inside, 0, (think.inside,) * len(inside))

    def wait(self, timeout: float) -> bool:
        return self.ready or self._guide.compiled.wait_for(self, timeout)

    def finish(self, mask: bytes, error: GuideError | None, ahead: Ahead) -> None:
        """Called on another thread."""
        self.mask, self.error, self.ahead = mask, error, ahead
        self.ready = True  # last: from here on the other thread reads the fields

    def __del__(self) -> None:
        if self._number is not None:
            self._guide.compiled.drop(self._number)


class _Key(NamedTuple):
    """Key of a compiled grammar."""

    tenant: str
    """The tenant that owns it; empty: shared by all."""
    grammar: Grammar


class _Making(NamedTuple):
    """A grammar that is being compiled."""

    task: asyncio.Task[GrammarProcess]
    waiting: set[object]
    """Requests that wait for it."""


class Guides:
    """Compiles grammars for one tokenizer, and keeps recent ones. Used on the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        isolated: bool = False,
        limits: CompileLimits | None = None,
        think_markers: tuple[str, str] = THINK_MARKERS,
    ):
        """`isolated`: tenants do not share compiled grammars. `think_markers`: markers around
        reasoning, to which no grammar applies."""
        self._vocabulary = vocabulary_of(tokenizer, think_markers)
        self._compiler = Compiler(tokenizer, self._vocabulary, metrics, limits or CompileLimits())
        self._isolated = isolated
        self._cache: OrderedDict[_Key, GrammarProcess] = OrderedDict()
        self._making: dict[_Key, _Making] = {}

    async def compile(
        self, grammar: Grammar, thinking: Thinking = Thinking.NONE, tenant: str = ""
    ) -> Guide:
        """Returns a guide for a grammar of `grammars`.

        Raises:
          GrammarError: the grammar is invalid, unsupported, too large, or too expensive to compile.
          GrammarsBusy: the grammar could not be compiled now.
        """
        if len(grammar.text) > MAX_SOURCE:
            raise GrammarError(f"it has {len(grammar.text)} characters, the most are {MAX_SOURCE}")
        try:
            grammar.text.encode()
        except UnicodeEncodeError:
            raise GrammarError("it holds one half of a surrogate pair") from None
        key = _Key(tenant if self._isolated else "", grammar)
        compiled = self._cache.get(key)
        if compiled is None or compiled.at_limit:
            self._cache.pop(key, None)
            compiled = await self._compiled_anew(key, tenant)
        else:
            self._cache.move_to_end(key)
            if compiled.num_tokens > SHARED_TOKENS:
                compiled.num_tokens = 0
                self._make(key, tenant)
        return Guide(compiled=compiled, thinking=thinking, vocabulary=self._vocabulary)

    def close(self) -> None:
        """Ends the processes of all grammars."""
        self._cache.clear()
        self._compiler.close()

    async def _compiled_anew(self, key: _Key, tenant: str) -> GrammarProcess:
        """Compiles a grammar. Requests that ask for the same grammar meanwhile share the
        compilation. It is cancelled when none of them needs it any more."""
        making, waiter = self._make(key, tenant), object()
        making.waiting.add(waiter)
        try:
            return await asyncio.shield(making.task)
        finally:
            making.waiting.discard(waiter)
            if not making.waiting and not making.task.done():
                making.task.cancel()
                self._making.pop(key, None)

    def _make(self, key: _Key, tenant: str) -> _Making:
        making = self._making.get(key)
        if making is None:
            task = asyncio.create_task(self._compile(key, tenant))
            making = self._making[key] = _Making(task, set())
            task.add_done_callback(partial(self._made, key))
        return making

    async def _compile(self, key: _Key, tenant: str) -> GrammarProcess:
        compiler = self._compiler
        while not compiler.has_room(tenant) and self._evict(compiler.held_by(tenant)):
            pass
        return await self._compiler.compile(key.grammar, tenant)

    def _evict(self, at_least: int = 0) -> bool:
        """Drops one grammar: the least recently used one of the tenant with the most in memory, if
        that tenant has `at_least` that many. So no tenant loses a grammar to a tenant that has
        more."""
        tenants = {process.tenant for process in self._cache.values()}
        held = {tenant: self._compiler.held_by(tenant) for tenant in tenants}
        most = max(held.values(), default=0)
        if not held or most < at_least:
            return False
        del self._cache[
            next(key for key, process in self._cache.items() if held[process.tenant] == most)
        ]
        return True

    def _made(self, key: _Key, done: asyncio.Task[GrammarProcess]) -> None:
        if key in self._making and self._making[key].task is done:
            del self._making[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._cache[key] = done.result()
        while len(self._cache) > CACHE_ENTRIES or self._kept_bytes() > CACHE_BYTES:
            self._evict()

    def _kept_bytes(self) -> int:
        return sum(process.size for process in self._cache.values())


def _with_token(mask: bytes, token: int) -> bytes:
    changed = bytearray(mask)
    changed[token // 8] |= 1 << token % 8
    return bytes(changed)
