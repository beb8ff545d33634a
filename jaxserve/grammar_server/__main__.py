"""The grammar server: forks a process per grammar and forwards orders to it.

It stays small and has one thread, so that a fork takes milliseconds and copies no held locks. It
never parses text of a client.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import select
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

import msgspec

from jaxserve.grammar_server import process
from jaxserve.grammar_server.vocabulary import make_vocabulary
from jaxserve.grammar_server.wire import (
    Advance,
    Cause,
    Drop,
    End,
    Ended,
    Frames,
    Job,
    Order,
    Setup,
    Start,
    frame,
    tell,
)

_ORDERS = 0
"""File descriptor of orders: standard input. Reports go to standard output."""
_LOOK_SECONDS = 0.25
"""Seconds between two checks of the memory of all processes."""
_CAUSES = {
    signal.SIGPROF: Cause.TIME,
    signal.SIGABRT: Cause.MEMORY,  # Rust aborts if an allocation fails
    signal.SIGSEGV: Cause.STACK,
    signal.SIGBUS: Cause.STACK,
}


class _Process(msgspec.Struct):
    pid: int
    orders: int
    """The pipe from which the process reads orders."""
    cause: Cause | None = None
    """Why this server killed it; None: it did not."""


class GrammarServer:
    """The grammar processes, by the numbers that the client gave them."""

    def __init__(self, setup: Setup, reports: int):
        self._setup = setup
        self._reports = reports
        mask_bytes = -(-setup.num_tokens // 32) * 4
        self._memory = mmap.mmap(setup.masks, setup.num_slots * mask_bytes)
        self._shared = process.Shared(
            tokenizer=make_vocabulary(setup),
            address=ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),
            mask_bytes=mask_bytes,
            num_slots=setup.num_slots,
            limits=setup.limits,
        )
        self._processes: dict[int, _Process] = {}
        self._of_pid: dict[int, int] = {}
        self._child_ended, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._child_ended, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # else a collection in a child would copy the pages that all share
        self._own_bytes = process.private_bytes(os.getpid())

    def serve(self, orders: Frames, messages: list[bytes]) -> None:
        """Handles messages until the client closes the pipe or ends. `messages`: the first ones."""
        decoder = msgspec.msgpack.Decoder(Order)
        self._obey([decoder.decode(message) for message in messages])
        poll = select.poll()
        poll.register(_ORDERS, select.POLLIN)
        poll.register(self._child_ended, select.POLLIN)
        looked = time.monotonic()
        while True:
            timeout = _LOOK_SECONDS * 1000 if self._processes else None
            ready = {descriptor for descriptor, _ in poll.poll(timeout)}
            if self._child_ended in ready:
                os.read(self._child_ended, 4096)
                self._reap()
            if _ORDERS in ready:
                read = orders.read()
                if read is None:
                    return
                self._obey([decoder.decode(message) for message in read])
            if time.monotonic() - looked > _LOOK_SECONDS:
                self._watch_memory()
                looked = time.monotonic()

    def _obey(self, orders: list[Order]) -> None:
        jobs: defaultdict[int, list[Job]] = defaultdict(list)
        for order in orders:
            match order:
                case Start():
                    self._fork(order)
                case Advance():
                    for job in order.jobs:
                        jobs[job.process].append(job)
                case Drop():
                    self._send(order.process, order)
                case End():
                    self._kill(order.process, Cause.OTHER)
        for number, together in jobs.items():
            self._send(number, Advance(together))

    def _fork(self, start: Start) -> None:
        read = wrote = -1
        try:
            read, wrote = os.pipe()
            pid = os.fork()
        except OSError:
            for descriptor in {read, wrote} - {-1}:
                os.close(descriptor)
            self._tell(start.process, Cause.NOT_STARTED)
            return
        if pid == 0:
            self._begin_process(start, read, wrote)
        os.close(read)
        os.set_blocking(wrote, False)
        self._processes[start.process] = _Process(pid, wrote)
        self._of_pid[pid] = start.process

    def _begin_process(self, start: Start, orders: int, wrote: int) -> NoReturn:
        with contextlib.suppress(BaseException):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(_ORDERS)
            os.close(wrote)
            for other in self._processes.values():
                os.close(other.orders)
            process.run(start, orders, self._reports, self._shared)
        os._exit(process.EXIT_DEFECT)

    def _send(self, number: int, order: Advance | Drop) -> None:
        """Sends an order to a process. Skips one that is gone, which may be reported already."""
        known = self._processes.get(number)
        if known is None:
            if isinstance(order, Advance):
                self._tell(number, Cause.OTHER)
            return
        data = frame(order)
        try:
            sent = os.write(known.orders, data)
        except BlockingIOError:
            sent = 0
        except BrokenPipeError:
            return  # it has ended and will be reaped
        if sent < len(data):  # the process does not read
            self._kill(number, Cause.TIME)

    def _kill(self, number: int, cause: Cause) -> None:
        known = self._processes.get(number)
        if known is not None:
            known.cause = known.cause or cause
            os.kill(known.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._of_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._of_pid.pop(pid)
            ended = self._processes.pop(number)
            os.close(ended.orders)
            self._tell(number, ended.cause or _cause(status))

    def _tell(self, number: int, cause: Cause) -> None:
        tell(self._reports, Ended(number, cause))

    def _watch_memory(self) -> None:
        """Ends the largest process if all of them together take too much memory."""
        taken = {
            number: max(0, process.private_bytes(each.pid) - self._own_bytes)
            for number, each in self._processes.items()
            if each.cause is None
        }
        if sum(taken.values()) > self._setup.limits.total_bytes:
            self._kill(max(taken, key=taken.__getitem__), Cause.TOTAL_MEMORY)


def _cause(status: int) -> Cause:
    if os.WIFSIGNALED(status):
        return _CAUSES.get(signal.Signals(os.WTERMSIG(status)), Cause.OTHER)
    return Cause.MEMORY if os.WEXITSTATUS(status) == process.EXIT_MEMORY else Cause.OTHER


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the group gets these; the client decides
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # lets the kernel kill this first if memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    reports = os.dup(1)
    os.dup2(2, 1)  # output printed by mistake must not become a report
    orders = Frames(_ORDERS)
    messages: list[bytes] = []
    while not messages:
        read = orders.read()
        if read is None:
            return
        messages = read
    setup = msgspec.msgpack.decode(messages[0], type=Setup)
    GrammarServer(setup, reports).serve(orders, messages[1:])


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
    os._exit(0)  # the remaining processes end with this one
