"""The process of one grammar: compiles it within limits, and then computes its masks."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import threading
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any, Final, NoReturn

import msgspec
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from jaxserve.grammar_server.wire import (
    Advance,
    Compiled,
    Defect,
    Drop,
    Failed,
    Frames,
    Grammar,
    Job,
    Kind,
    Limits,
    LookedAhead,
    Masks,
    Start,
    tell,
)

EXIT_DEFECT, EXIT_MEMORY = 70, 71
"""Exit statuses."""

_MAX_ERROR = 500
_SLOTS_PER_FRAME = 256
_SET_PARENT_DEATH_SIGNAL = 1

_LIMITS: Final = LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
)
"""A lexer state takes 1 to 2 KiB. The other limits are llguidance's defaults: about 20 ms of a core
to compile, and 15 ms for a mask."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """State that all grammar processes share."""

    tokenizer: LLTokenizer
    address: int
    """Address of the shared memory for masks."""
    mask_bytes: int
    num_slots: int
    limits: Limits


def run(start: Start, orders: int, reports: int, shared: Shared) -> NoReturn:
    """Runs a process that was just forked. It ends when the pipe `orders` is closed, when its
    parent ends, or at a limit: by a signal, even inside native code."""
    with contextlib.suppress(BaseException):
        _limit(shared.limits)
        if start.niceness:
            os.nice(start.niceness)
        threading.stack_size(shared.limits.stack_bytes)
        # The stack size of a process's first thread cannot be chosen.
        thread = threading.Thread(target=_live, args=(start, orders, reports, shared))
        thread.start()
        thread.join()
    os._exit(EXIT_DEFECT)


def _limit(limits: Limits) -> None:
    """Sets limits on memory and core dumps, and ends with the parent."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _allow_memory(limits.process_bytes + limits.stack_bytes)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the output of a panic may contain the client's text


def _allow_memory(more: int) -> None:
    """Allows `more` bytes beyond the current use, or beyond an earlier limit.

    Uses RLIMIT_DATA, which counts private writable memory. RLIMIT_AS would also count addresses
    that the C library only reserves, 64 MiB per thread.
    """
    allowed, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if allowed == resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            allowed = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (allowed + more, hard))


@contextlib.contextmanager
def _within(seconds: float) -> Generator[None]:
    """Ends the process with SIGPROF if the block needs more CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _live(start: Start, orders: int, reports: int, shared: Shared) -> None:
    try:
        with _within(start.seconds):
            root = _compiled(start, reports, shared)
        if root is not None:
            _Followers(root, reports, shared).follow(Frames(orders))
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BaseException as error:  # a panic in llguidance is not an Exception
        where = "".join(traceback.format_tb(error.__traceback__))[-_MAX_ERROR:]
        tell(reports, Defect(start.process, f"{type(error).__name__}\n{where}"))  # without its text
        os._exit(EXIT_DEFECT)
    os._exit(0)


def _compiled(start: Start, reports: int, shared: Shared) -> LLMatcher | None:
    """Returns the compiled grammar before its first token; None after an error that was
    reported."""
    error: str | None = None
    matcher: LLMatcher | None = None
    before = private_bytes()
    try:
        text = _in_llguidances_words(start.grammar)
        matcher = LLMatcher(shared.tokenizer, text, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            _compute(matcher, start.slot, shared)
        error = matcher.get_error() if matcher.is_error() else None
    except RecursionError:
        error = "it is nested too deeply"
    except (GbnfToLarkError, ValueError) as failure:
        error = str(failure)
    told = None if error is None else error[:_MAX_ERROR]
    tell(reports, Compiled(start.process, told, max(0, private_bytes() - before)))
    return matcher if error is None else None


def private_bytes(pid: int | str = "self") -> int:
    """Returns the resident bytes of a process that belong to no file, including those shared with
    its parent. 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, of_files, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(of_files)) * mmap.PAGESIZE


def _in_llguidances_words(grammar: Grammar) -> str:
    match grammar.kind:
        case Kind.LARK:
            return grammar.text
        case Kind.GBNF:
            return any_to_lark(grammar.text)
        case Kind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case Kind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case Kind.PARTS:
            parts = msgspec.json.decode(grammar.text, type=dict[str, Grammar])
            named = [
                {**_one(_in_llguidances_words(part)), "name": name} for name, part in parts.items()
            ]
            return msgspec.json.encode({"grammars": named}).decode()


def _one(text: str) -> dict[str, Any]:
    """Returns llguidance's format of one grammar. Its text is Lark, or JSON that lists it."""
    try:
        return msgspec.json.decode(text, type=_Listed).grammars[0]
    except msgspec.MsgspecError:
        return {"lark_grammar": text}


class _Listed(msgspec.Struct):
    grammars: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


def _compute(matcher: LLMatcher, slot: int, shared: Shared) -> None:
    address = shared.address + slot * shared.mask_bytes
    matcher.unsafe_compute_mask_ptr(address, shared.mask_bytes)


class _Followers:
    """The sequences that follow the grammar."""

    def __init__(self, root: LLMatcher, reports: int, shared: Shared):
        self._root = root
        self._reports = reports
        self._shared = shared
        self._matchers: dict[int, LLMatcher] = {}
        self._executor: LLExecutor | None = None

    def follow(self, orders: Frames) -> None:
        """Handles orders until the pipe is closed. All available jobs share one parallel call."""
        decoder = msgspec.msgpack.Decoder(Advance | Drop)
        while (messages := orders.read()) is not None:
            jobs: list[Job] = []
            dropped: list[int] = []
            for message in messages:
                order = decoder.decode(message)
                if isinstance(order, Advance):
                    jobs += order.jobs
                else:
                    dropped += order.sequences
            if jobs:
                with _within(self._shared.limits.mask_seconds * sum(len(j.slots) for j in jobs)):
                    self._report(jobs, self._advanced(jobs))
            for sequence in dropped:
                self._matchers.pop(sequence, None)

    def _advanced(self, jobs: list[Job]) -> list[LLMatcher]:
        """Returns the matchers of the jobs, after it wrote their masks to the slots."""
        shared, known = self._shared, self._matchers
        matchers: list[LLMatcher] = []
        for job in jobs:
            if job.sequence not in known:
                known[job.sequence] = self._root.deep_copy()
            matchers.append(known[job.sequence])
        if len(jobs) == 1:
            for token in jobs[0].tokens:
                matchers[0].consume_token(token)
            _compute(matchers[0], jobs[0].slots[0], shared)
            return matchers
        executor = self._executor = self._executor or self._threads()
        pairs = list(zip(matchers, jobs, strict=True))
        for place in range(max(len(job.tokens) for job in jobs)):
            executor.consume_token_par(
                [(matcher, job.tokens[place]) for matcher, job in pairs if place < len(job.tokens)]
            )
        targets = [(matcher, job.slots[0]) for matcher, job in pairs]
        executor.unsafe_compute_mask_ptr(
            targets, shared.address, shared.mask_bytes, shared.num_slots
        )
        return matchers

    def _threads(self) -> LLExecutor:
        limits = self._shared.limits
        _allow_memory(limits.threads * limits.stack_bytes)
        return LLExecutor(limits.threads)

    def _report(self, jobs: list[Job], matchers: list[LLMatcher]) -> None:
        """Reports the jobs. Jobs with drafts come last, so that no other sequence waits for
        them."""
        done: list[int] = []
        looking: list[tuple[Job, LLMatcher]] = []
        for job, matcher in zip(jobs, matchers, strict=True):
            if matcher.is_error():
                tell(self._reports, Failed(job.slots[0], matcher.get_error()[:_MAX_ERROR]))
            elif len(job.slots) > 1:
                looking.append((job, matcher))
            else:
                done.append(job.slots[0])
        for first in range(0, len(done), _SLOTS_PER_FRAME):
            tell(self._reports, Masks(done[first : first + _SLOTS_PER_FRAME]))
        for job, matcher in looking:
            tell(self._reports, self._looked_ahead(job, matcher))

    def _looked_ahead(self, job: Job, matcher: LLMatcher) -> LookedAhead:
        """Computes the masks after drafts. Drafts are the tokens that the grammar forces. If the
        job's drafts begin with those, they are the job's drafts up to the first forbidden one. The
        matcher does not move."""
        forced = matcher.compute_ff_tokens()
        guessed = job.drafts[: len(forced)] == forced and len(job.drafts) > len(forced)
        drafts = job.drafts if guessed else forced
        found: list[int] = []
        if drafts:
            matcher = matcher.deep_copy()  # a limit met here must not end the sequence
        for draft, slot in zip(drafts, job.slots[1:], strict=False):
            if matcher.is_stopped() or matcher.try_consume_tokens([draft]) != 1:
                break
            _compute(matcher, slot, self._shared)
            if matcher.is_error():
                break
            found.append(draft)
        return LookedAhead(job.slots[0], found, min(len(forced), len(found)))
