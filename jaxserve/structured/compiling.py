"""Compiles grammars in processes: quick ones before slow ones, and fair to tenants."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from dataclasses import dataclass

from jaxserve.grammar_server.wire import Cause, Grammar, Limits
from jaxserve.metrics.metrics import Metrics
from jaxserve.structured.errors import GrammarError, GrammarsBusy
from jaxserve.structured.orders import GrammarProcess, NotCompiled, ProcessEnded
from jaxserve.structured.processes import Processes
from jaxserve.structured.turns import Turns
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.tokenizer import Tokenizer

_MAX_THREADS = 8
_MAX_ERROR = 500
_MAX_REFUSED = 1024
_SLOW_NICENESS = 5
_SHARE = 8
"""A tenant may have this many times the free processes: 456 of 512 if it is alone, 241 each if
there are two."""
_PROCESS_LIMITS = Limits(threads=min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)))


@dataclass(frozen=True, kw_only=True)
class CompileLimits:
    """Limits of compilation. Seconds are CPU time, because a busy machine is not the client's
    fault."""

    quick_seconds: float = 0.5
    """A slower compilation starts again among the slow ones, so that other grammars need not
    wait."""
    seconds: float = 10.0
    queue_seconds: float = 10.0
    """The longest wait for a turn, in wall-clock time."""
    patience: float = 30.0
    """The longest compilation in wall-clock time, for when the CPUs are busy."""
    quick_at_once: int = 4
    slow_at_once: int = 2
    processes: int = 512
    """The most grammars in memory; each has its own process."""
    process: Limits = _PROCESS_LIMITS


class Compiler:
    """Starts the grammar server with the first grammar, and restarts it if it ends. Used on the
    event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        metrics: Metrics,
        limits: CompileLimits,
    ):
        self._tokenizer, self._vocabulary, self._metrics = tokenizer, vocabulary, metrics
        self._limits = limits
        self._quick, self._slow = Turns(limits.quick_at_once), Turns(limits.slow_at_once)
        self._processes: Processes | None = None
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        """Digests of a tenant's grammars that met a limit: compiling them again would cost as
        much."""

    def has_room(self, tenant: str) -> bool:
        """Returns whether the tenant may have another grammar in memory. The more grammars it has,
        the more processes must be free. So there is always room for other tenants (dynamic
        thresholds, Choudhury and Hahne 1998)."""
        if self._processes is None:
            return True
        free = self._limits.processes - len(self._processes)
        return free > 0 and self.held_by(tenant) < _SHARE * free

    def held_by(self, tenant: str) -> int:
        """Returns the number of grammars in memory that were compiled for the tenant."""
        return 0 if self._processes is None else self._processes.held_by(tenant)

    async def compile(self, grammar: Grammar, tenant: str) -> GrammarProcess:
        """Returns a new process of the grammar.

        Raises:
          GrammarError: the grammar is invalid or exceeds a limit.
          GrammarsBusy: the grammar got no turn in time, or there is no room.
        """
        digest = hashlib.sha256(
            f"{tenant} {grammar.kind} {grammar.text}".encode("utf-8", "surrogatepass")
        ).digest()
        if (told := self._refused.get(digest)) is not None:
            raise GrammarError(told)
        try:
            try:
                return await self._at_turn(self._quick, grammar, tenant, slow=False)
            except ProcessEnded as ended:
                if ended.cause is not Cause.TIME:
                    raise
            return await self._at_turn(self._slow, grammar, tenant, slow=True)
        except NotCompiled as fault:
            raise GrammarError(_told(str(fault))) from None
        except ProcessEnded as ended:
            raise self._refusal(ended.cause, digest) from None

    def close(self) -> None:
        """Ends the grammar server, if it runs."""
        if self._processes is not None:
            self._processes.close()

    async def _at_turn(
        self, turns: Turns, grammar: Grammar, tenant: str, *, slow: bool
    ) -> GrammarProcess:
        limits, metrics = self._limits, self._metrics
        asked = time.perf_counter()
        try:
            async with turns.turn(tenant, limits.queue_seconds):
                begun = time.perf_counter()
                metrics.observe_grammar_queue(begun - asked)
                try:
                    return await self._in_time(grammar, tenant, slow=slow)
                finally:
                    metrics.observe_grammar_compile(time.perf_counter() - begun)
        except TimeoutError:
            raise GrammarsBusy(
                f"it has waited {limits.queue_seconds:g} s to be compiled, the longest allowed",
                retry_after=limits.queue_seconds,
            ) from None

    async def _in_time(self, grammar: Grammar, tenant: str, *, slow: bool) -> GrammarProcess:
        limits = self._limits
        if not self.has_room(tenant):
            raise GrammarsBusy(
                f"too many grammars are in use: at most {limits.processes}, fewer for one client",
                retry_after=limits.queue_seconds,
            )
        seconds = limits.seconds if slow else limits.quick_seconds
        niceness = _SLOW_NICENESS if slow else 0
        compiling = self._running().compile(grammar, seconds, niceness, tenant)
        try:
            async with asyncio.timeout(limits.patience):
                return await asyncio.wrap_future(compiling)
        except TimeoutError:
            raise GrammarsBusy(
                f"the machine is busy: compiling took longer than {limits.patience:g} s",
                retry_after=limits.queue_seconds,
            ) from None

    def _running(self) -> Processes:
        """The grammar server's processes."""
        if self._processes is None or self._processes.ended:
            if self._processes is not None:
                self._metrics.count_grammar_server_restart()
            self._processes = Processes(
                self._tokenizer, self._vocabulary, self._limits.process, self._metrics
            )
        return self._processes

    def _refusal(self, cause: Cause, digest: bytes) -> GrammarError | GrammarsBusy:
        """Returns the error for the client of a process that ended. Not all causes are the
        grammar's."""
        limits = self._limits
        if cause in (Cause.TOTAL_MEMORY, Cause.NOT_STARTED):
            return GrammarsBusy(
                "the processes that compile grammars are short of memory or have restarted",
                retry_after=1.0,
            )
        told = {
            Cause.TIME: f"it takes more than {limits.seconds:g} s of a processor to compile",
            Cause.MEMORY: f"it takes more than {limits.process.process_bytes >> 20} MiB to compile",
            Cause.STACK: "it is nested too deeply",
        }.get(cause, "it cannot be compiled")
        self._refused[digest] = told
        while len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
        return GrammarError(told)


def _told(error: str) -> str:
    """Returns llguidance's message without internal names."""
    text = error.removesuffix("<non-verbose/>").strip()[:_MAX_ERROR]
    return f"it cannot be compiled ({text})" if text.isidentifier() else text
