"""The client of the grammar server: processes that compile grammars and compute masks."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from weakref import WeakValueDictionary

import msgspec

from jaxserve.api import Ahead, FinishReason, GuideError
from jaxserve.grammar_server.wire import (
    Advance,
    Cause,
    Compiled,
    Defect,
    Drop,
    End,
    Ended,
    Failed,
    Frames,
    Grammar,
    Job,
    Limits,
    LookedAhead,
    Masks,
    Report,
    Setup,
    Start,
    frame,
    write,
)
from jaxserve.metrics.metrics import Metrics
from jaxserve.structured.orders import (
    CompileOrder,
    GrammarProcess,
    MaskOrder,
    NotCompiled,
    Order,
    ProcessEnded,
    Waiting,
)
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NUM_SLOTS = 2048
"""The most masks that are computed at one time. Further ones wait."""

_FAILED = GuideError("the mask could not be computed", FinishReason.ERROR)
_NOTHING = Ahead()
_AT_LIMIT = {
    Cause.TIME: "a mask took too long to compute",
    Cause.MEMORY: "its states took too much memory",
    Cause.TOTAL_MEMORY: "its states took too much memory",
    Cause.STACK: "it is nested too deeply",
}


class Processes:
    """A running grammar server. When it has `ended`, it never restarts, and all its processes have
    ended too.

    One thread writes orders, all available ones in one message. Another thread reads results.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, limits: Limits, metrics: Metrics
    ):
        """Returns before the server is ready, which takes a second or two. Orders wait until
        then."""
        self._metrics = metrics
        self._mask_bytes = -(-vocabulary.num_tokens // 32) * 4
        self._descriptor = os.memfd_create("masks")
        os.truncate(self._descriptor, NUM_SLOTS * self._mask_bytes)
        self._memory = mmap.mmap(self._descriptor, NUM_SLOTS * self._mask_bytes)
        self._free = list(range(NUM_SLOTS))
        self._starved = False
        """Whether some orders wait for a slot."""
        self._numbers = itertools.count()
        self._orders: SimpleQueue[Order | None] = SimpleQueue()  # `__del__` may put into it
        self._compiling: dict[int, tuple[CompileOrder, int]] = {}
        self._in_flight: dict[int, tuple[MaskOrder, list[int]]] = {}
        """Orders by their first slot, with all of their slots."""
        self._live: WeakValueDictionary[int, GrammarProcess] = WeakValueDictionary()
        self._done = threading.Condition()
        self.ended = False
        self._closing = False
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxserve.grammar_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._descriptor],
            env=_environment(limits),
            start_new_session=True,  # Ctrl-C must only reach this process
        )
        setup = partial(self._setup, tokenizer, vocabulary, limits)
        threading.Thread(target=self._send, args=(setup,), name="grammars out", daemon=True).start()
        threading.Thread(target=self._receive, name="grammars in", daemon=True).start()

    def __len__(self) -> int:
        """Returns the number of grammars that have a process and are in use or kept."""
        return len(self._live) + len(self._compiling)

    @property
    def pid(self) -> int:
        """Id of the process that forks the grammar processes."""
        return self._server.pid

    def held_by(self, tenant: str) -> int:
        """Returns the number of grammars compiled for the tenant that are in use or kept."""
        return sum(process.tenant == tenant for process in list(self._live.values()))

    def compile(
        self, grammar: Grammar, seconds: float, niceness: int, tenant: str
    ) -> Future[GrammarProcess]:
        """Compiles a grammar in its own process with this limit of CPU seconds.

        The future fails with NotCompiled or ProcessEnded. Cancelling it ends the process.
        """
        number = next(self._numbers)
        made: Future[GrammarProcess] = Future()

        def end_if_cancelled(done: Future[GrammarProcess]) -> None:
            if done.cancelled():
                self.order(End(number))

        made.add_done_callback(end_if_cancelled)
        self.order(CompileOrder(number, grammar, seconds, niceness, tenant, made))
        return made

    def order(self, order: Order | None) -> None:
        """Queues an order. Callable from any thread and from `__del__`."""
        self._orders.put(order)
        if self.ended:
            self._fail_all()

    def wait_for(self, waiting: Waiting, timeout: float) -> bool:
        """See `GrammarProcess.wait_for`."""
        with self._done:
            return self._done.wait_for(lambda: waiting.ready, timeout)

    def close(self) -> None:
        """Ends the grammar server and all its processes. Returns at once."""
        self._closing = True
        self.order(None)

    # The thread that writes.

    def _setup(self, tokenizer: Tokenizer, vocabulary: Vocabulary, limits: Limits) -> Setup:
        return Setup(
            tokenizer=pickle.dumps(tokenizer),
            num_tokens=vocabulary.num_tokens,
            end_token_ids=sorted(vocabulary.end_token_ids),
            masks=self._descriptor,
            num_slots=NUM_SLOTS,
            limits=limits,
        )

    def _send(self, setup: Callable[[], Setup]) -> None:
        assert self._server.stdin is not None
        pipe = self._server.stdin.fileno()
        waiting: deque[CompileOrder | MaskOrder] = deque()
        try:
            write(pipe, frame(setup()))
            while not (self._closing or self.ended):
                write(pipe, self._next(waiting))
        except OSError:  # the server has ended; the reading thread reports it
            pass
        except Exception:
            log.exception("structured output: the grammar process takes no requests")
        finally:
            for order in waiting:
                self.order(order)
            self._server.stdin.close()

    def _next(self, waiting: deque[CompileOrder | MaskOrder]) -> bytes:
        """Waits for orders. Returns the messages of all available orders that have a slot. It keeps
        no order in a variable while it waits, because that would keep a grammar's process alive."""
        others: list[Drop | End] = []
        for order in self._at_hand():
            if isinstance(order, Drop | End):
                others.append(order)
            elif order is not None:
                waiting.append(order)
        return b"".join(map(frame, [*self._placed(waiting), *others]))

    def _at_hand(self) -> list[Order | None]:
        """Waits for an order. Returns all orders that are available by then."""
        orders = [self._orders.get()]
        with suppress(Empty):
            while True:
                orders.append(self._orders.get_nowait())
        return orders

    def _placed(self, waiting: deque[CompileOrder | MaskOrder]) -> list[Start | Advance]:
        """Returns messages for the orders that get a slot now, and removes those from the queue."""
        starts: list[Start] = []
        jobs: list[Job] = []
        self._starved = True  # set first, so that a slot freed after the check is reported
        while waiting and len(self._free) >= _slots_of(waiting[0]):
            order = waiting.popleft()
            slots = [self._free.pop() for _ in range(_slots_of(order))]
            if isinstance(order, MaskOrder):
                self._in_flight[slots[0]] = order, slots
                step = order.step
                number = order.process.number
                jobs.append(Job(number, step.sequence, step.tokens, slots, step.drafts))
            elif not order.made.cancelled():
                self._compiling[order.number] = (order, slots[0])
                starts.append(
                    Start(order.number, order.grammar, slots[0], order.seconds, order.niceness)
                )
            else:
                self._free += slots
        self._starved = bool(waiting)
        return [*starts, Advance(jobs)] if jobs else [*starts]

    # The thread that reads.

    def _receive(self) -> None:
        assert self._server.stdout is not None
        frames = Frames(self._server.stdout.fileno())
        decoder = msgspec.msgpack.Decoder(Report)
        try:
            while (messages := frames.read()) is not None:
                for message in messages:
                    self._take(decoder.decode(message))
                if self._starved:
                    self._orders.put(None)
                self._metrics.set_grammars(len(self._live))
                with self._done:
                    self._done.notify_all()
        except Exception:
            log.exception("structured output: the grammar process's results could not be read")
            self._server.kill()
        self.ended = True
        self._server.stdout.close()
        status = self._server.wait()
        if not self._closing:
            log.error("the process that grammars are compiled in has ended with status %d", status)
        self._fail_all()
        self._orders.put(None)  # wakes the writing thread
        self._memory.close()
        os.close(self._descriptor)

    def _take(self, report: Report) -> None:
        match report:
            case Masks():
                for slot in report.slots:
                    self._finish(slot, self._mask(slot), None)
            case LookedAhead():
                _, slots = self._in_flight[report.slot]
                masks = tuple(self._mask(slot) for slot in slots[1 : 1 + len(report.drafts)])
                ahead = Ahead(tuple(report.drafts), report.forced, masks)
                self._finish(report.slot, self._mask(report.slot), None, ahead)
            case Failed():
                self._finish(report.slot, b"", GuideError(report.error))
            case Compiled():
                order, slot = self._compiling.pop(report.process)
                self._settle(order, slot, report)
            case Ended():
                self._end(report.process, report.cause)
            case Defect():
                log.error("structured output: a grammar's process failed: %s", report.error)

    def _mask(self, slot: int) -> bytes:
        return self._memory[slot * self._mask_bytes : (slot + 1) * self._mask_bytes]

    def _finish(
        self, slot: int, mask: bytes, error: GuideError | None, ahead: Ahead = _NOTHING
    ) -> None:
        asked, slots = self._in_flight.pop(slot)
        self._free += slots
        if error is not None:
            asked.process.at_limit = True
        asked.waiting.finish(mask, error, ahead)

    def _settle(self, order: CompileOrder, slot: int, report: Compiled) -> None:
        mask = self._mask(slot)
        self._free.append(slot)
        if report.error is not None:
            order.fail(NotCompiled(report.error))
            return
        process = GrammarProcess(
            server=self,
            number=order.number,
            mask=mask,
            tenant=order.tenant,
            size=report.size,
        )
        self._live[order.number] = process
        with suppress(InvalidStateError):  # the request was cancelled
            order.made.set_result(process)

    def _end(self, number: int, cause: Cause) -> None:
        """Handles the end of a process, for whatever reason."""
        if cause is not Cause.OTHER:
            self._metrics.count_grammar_limit(cause)
        process = self._live.get(number)
        if process is not None:
            process.at_limit = True
        if number in self._compiling:
            order, slot = self._compiling.pop(number)
            self._free.append(slot)
            order.fail(ProcessEnded(cause))
        error = GuideError(_AT_LIMIT[cause]) if cause in _AT_LIMIT else _FAILED
        for slot, (asked, _) in list(self._in_flight.items()):
            if asked.process.number == number:
                self._finish(slot, b"", error)

    def _fail_all(self) -> None:
        """Fails all orders after the server has ended. Callable from any thread."""
        for process in list(self._live.values()):
            process.at_limit = True
        with suppress(Empty):
            while True:
                order = self._orders.get_nowait()
                if isinstance(order, MaskOrder):
                    order.waiting.finish(b"", _FAILED, _NOTHING)
                elif isinstance(order, CompileOrder):
                    order.fail(ProcessEnded(Cause.NOT_STARTED))
        for number in list(self._compiling):
            with suppress(KeyError):
                order, _ = self._compiling.pop(number)
                order.fail(ProcessEnded(Cause.NOT_STARTED))
        for slot in list(self._in_flight):
            with suppress(KeyError):
                self._in_flight.pop(slot)[0].waiting.finish(b"", _FAILED, _NOTHING)
        with self._done:
            self._done.notify_all()


def _slots_of(order: CompileOrder | MaskOrder) -> int:
    return 1 + order.step.most if isinstance(order, MaskOrder) else 1


def _environment(limits: Limits) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TOKENIZERS_PARALLELISM": "false",  # no threads, because the process forks
        "RUST_MIN_STACK": str(limits.stack_bytes),
    }
