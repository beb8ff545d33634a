"""Compiled grammars, and where each sequence stands in its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from jaxserve.api import GuideError
from jaxserve.structured.grammars import MAX_SOURCE
from jaxserve.structured.worker import GrammarError, Job, MaskWorker
from jaxserve.tokenizer import Tokenizer

COMPILE_SECONDS = 10.0
CACHE_ENTRIES = 128
CACHE_CHARS = 4 * 1024 * 1024
"""Of the grammars kept compiled."""
SHARED_TOKENS = 20_000
"""That follow a grammar until it is compiled anew, beside the requests that use it meanwhile."""
_MASK_THREADS = 8
_MAX_ERROR = 500

_LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
"""A lexer state takes 1 to 2 KiB. The other limits are llguidance's own: some 20 ms of a core for
compiling, 15 ms for a mask."""


class Thinking(Enum):
    """Whether the text may begin with a `<think>` block, to which no grammar applies."""

    NONE = auto()
    MAY_OPEN = auto()
    OPEN = auto()
    """The prompt ends in it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Think:
    """Tokens and masks around a think block."""

    opens: int
    closes: int
    inside: bytes
    """All tokens but those that would end the sequence."""


@dataclass(eq=False, kw_only=True)
class _Compiled:
    """A grammar before its first token. Its copies share the states that llguidance has found, and
    the limit of these: what many sequences have followed has no room left for the next one."""

    matcher: LLMatcher
    mask: bytes
    source_chars: int
    num_tokens: int = 0
    """Those of all sequences that followed it."""
    at_limit: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Guide:
    """What one request's sequences may generate; implements `api.Guide`."""

    compiled: _Compiled
    thinking: Thinking
    think: _Think | None
    worker: MaskWorker
    end_token_ids: frozenset[int]

    def start(self) -> GuideState:
        return GuideState(self)


class _Phase(Enum):
    MAY_OPEN = auto()
    THINKING = auto()
    GRAMMAR = auto()


class GuideState:
    """Implements `api.GuideState`: the mask of a sequence's next token."""

    def __init__(self, guide: Guide):
        self._guide = guide
        self._matcher: LLMatcher | None = None
        self.error: GuideError | None = None
        self.ready = True
        self.mask = guide.compiled.mask
        self._phase = _Phase.GRAMMAR
        if guide.think is not None and guide.thinking is Thinking.MAY_OPEN:
            self._phase = _Phase.MAY_OPEN
            self.mask = _with_token(self.mask, guide.think.opens)
        elif guide.think is not None and guide.thinking is Thinking.OPEN:
            self._phase = _Phase.THINKING
            self.mask = guide.think.inside

    def advance(self, token: int) -> None:
        guide, think = self._guide, self._guide.think
        if self._phase is not _Phase.GRAMMAR:
            assert think is not None
            if self._phase is _Phase.MAY_OPEN and token == think.opens:
                self._phase, self.mask = _Phase.THINKING, think.inside
                return
            if self._phase is _Phase.THINKING:
                if token == think.closes:
                    self._phase, self.mask = _Phase.GRAMMAR, guide.compiled.mask
                return
            self._phase = _Phase.GRAMMAR
        self.ready = False
        guide.compiled.num_tokens += 1
        if self._matcher is None:
            self._matcher = guide.compiled.matcher.deep_copy()
        guide.worker.submit(Job(self, self._matcher, token))

    def wait(self, timeout: float) -> bool:
        return self.ready or self._guide.worker.wait_for(self, timeout)

    def finish(self, mask: bytes, error: GuideError | None) -> None:
        """Called by the worker."""
        if error is not None:
            self._guide.compiled.at_limit = True
        self.mask, self.error, self.ready = mask, error, True


class Guides:
    """Compiles grammars for one tokenizer and keeps the last ones. Used on the event loop."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="grammars")
        self._vocabulary: _Vocabulary | None = None
        self._making = threading.Lock()
        self._cache: OrderedDict[str, _Compiled] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def compile(self, grammar: str, thinking: Thinking = Thinking.NONE) -> Guide:
        """A guide for a grammar of `grammars`.

        Raises:
          GrammarError: it is not valid, not supported, too large or too slow to compile.
        """
        if len(grammar) > MAX_SOURCE:
            raise GrammarError(f"it has {len(grammar)} characters, the most are {MAX_SOURCE}")
        compiled = self._cache.get(grammar)
        if compiled is None or compiled.at_limit:
            try:
                compiled = await self._compiled_anew(grammar)
            except TimeoutError:
                raise GrammarError(
                    f"it took more than {COMPILE_SECONDS:.0f} s to compile"
                ) from None
        elif compiled.num_tokens > SHARED_TOKENS:
            compiled.num_tokens = 0
            self._begin(grammar).add_done_callback(partial(self._renew, grammar))
        self._cache.move_to_end(grammar)
        self._evict()
        vocabulary = self._vocabulary
        assert vocabulary is not None, "something was compiled"
        return Guide(
            compiled=compiled,
            thinking=thinking,
            think=vocabulary.think,
            worker=vocabulary.worker,
            end_token_ids=vocabulary.end_token_ids,
        )

    async def _compiled_anew(self, grammar: str) -> _Compiled:
        """Those who ask for the same grammar meanwhile take what the first of them has made."""
        turn = self._turns.setdefault(grammar, asyncio.Lock())
        async with asyncio.timeout(COMPILE_SECONDS), turn:
            compiled = self._cache.get(grammar)
            if compiled is None or compiled.at_limit:
                compiled = self._cache[grammar] = await self._begin(grammar)
            return compiled

    def _begin(self, grammar: str) -> asyncio.Future[_Compiled]:
        return asyncio.get_running_loop().run_in_executor(self._pool, self._compile, grammar)

    def _renew(self, grammar: str, done: asyncio.Future[_Compiled]) -> None:
        if not done.cancelled() and done.exception() is None and grammar in self._cache:
            self._cache[grammar] = done.result()

    def _evict(self) -> None:
        chars = sum(compiled.source_chars for compiled in self._cache.values())
        while len(self._cache) > CACHE_ENTRIES or chars > CACHE_CHARS:
            _, evicted = self._cache.popitem(last=False)
            chars -= evicted.source_chars

    def _compile(self, grammar: str) -> _Compiled:
        with self._making:  # 1 to 3 s for 150,000 tokens: by the first request that needs it
            if self._vocabulary is None:
                self._vocabulary = _make_vocabulary(self._tokenizer)
        tokenizer = self._vocabulary.tokenizer
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_told(matcher.get_error()))
        return _Compiled(matcher=matcher, mask=mask, source_chars=len(grammar))


class _Vocabulary(NamedTuple):
    """A tokenizer in llguidance's terms."""

    tokenizer: LLTokenizer
    worker: MaskWorker
    end_token_ids: frozenset[int]
    think: _Think | None
    """None: the model has no such markers."""


class _Tokens:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], end: int):
        self.eos_token_id = end
        self.tokens = tokens
        # No marker is text: `</tool_call>` inside a string is spelled by other tokens.
        self.special_token_ids = sorted({*tokenizer.markers.values(), end})
        self._spell = tokenizer.spell

    def __call__(self, text: str) -> list[int]:
        """Of text that a grammar leaves no choice about: the mask lets through only these."""
        return self._spell(text)


def _make_vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    ends = tokenizer.eos_token_ids
    if not ends:  # a token without a text, which then means the end
        tokens.append(b"<end>")
        ends = frozenset([len(tokens) - 1])
    wrapper = TokenizerWrapper(_Tokens(tokenizer, tokens, min(ends)))
    words = -(-len(tokens) // 32)
    return _Vocabulary(
        tokenizer=LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=sorted(ends)),
        worker=MaskWorker(words, min(_MASK_THREADS, max(1, (os.cpu_count() or 1) // 2))),
        end_token_ids=ends,
        think=_think(tokenizer, len(tokens), ends),
    )


def _think(tokenizer: Tokenizer, num_tokens: int, ends: frozenset[int]) -> _Think | None:
    opens, closes = (tokenizer.markers.get(marker) for marker in ("<think>", "</think>"))
    if opens is None or closes is None:
        return None
    inside = np.ones(-(-num_tokens // 32) * 32, np.uint8)
    inside[[*ends, *range(num_tokens, len(inside))]] = 0
    return _Think(
        opens=opens, closes=closes, inside=np.packbits(inside, bitorder="little").tobytes()
    )


def _told(error: str) -> str:
    """llguidance's words, without what only its developers know."""
    text = error.removesuffix("<non-verbose/>").strip()[:_MAX_ERROR]
    return f"it cannot be compiled ({text})" if text.isidentifier() else text


def _with_token(mask: bytes, token: int) -> bytes:
    changed = bytearray(mask)
    changed[token // 8] |= 1 << token % 8
    return bytes(changed)
