"""Obtains a start's executables: loads them from the cache, or compiles and stores them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import jax

from jaxserve.programs.executable_cache import Executable, ExecutableCache, Program, Unusable

log = logging.getLogger(__name__)

type OnMissing = Callable[[Mapping[str, str]], None]
"""Called with program names -> reasons before anything is compiled."""

_LOADERS = 16
"""The most threads that load programs. More are not faster, and each thread holds a program twice
while it loads."""


def compile_missing(reasons: Mapping[str, str]) -> None:
    """An OnMissing that allows all compilations."""


class Obtained(NamedTuple):
    """Executables by program name, and their origin."""

    executables: dict[str, Executable]
    compiled: dict[str, str]
    """Names of compiled programs -> why they could not be loaded."""
    unkept: str
    """Why compiled programs could not be written to the cache; empty if they could."""


def obtain(
    programs: Sequence[Program],
    cache: ExecutableCache | None,
    workers: int,
    progress: Callable[[str, float], None],
    finished: Callable[[str], None] = lambda name: None,
    on_missing: OnMissing = compile_missing,
    must_keep: bool = False,
) -> Obtained:
    """Loads all programs, and compiles and stores the missing ones.

    An unusable or unwritable cache costs time but does not fail the start, unless `must_keep`.

    Args:
      programs: the slowest to compile first.
      workers: number of threads. XLA releases the interpreter lock while it loads and compiles.
      progress: called with "loading" or "compiling" and the fraction done.
      finished: called with the name of each program that is ready.
      on_missing: may raise to stop.
      must_keep: raise OSError for the first program that cannot be written, and start no other.
    """
    making = _Making(programs, cache, progress, finished, must_keep=must_keep)
    _on_threads(min(workers, _LOADERS), making.load, programs)
    if making.reasons:
        on_missing(making.reasons)
        progress("compiling", making.fraction())
        todo = [each for each in programs if each.name in making.reasons]
        _on_threads(workers, making.compile, todo)
        making.write_manifest()
    if making.failures:
        log.warning(
            "compiled programs cannot be stored, every start compiles: %s; try another --cache-dir",
            making.failures[0],
        )
    unkept = making.failures[0] if making.failures else ""
    return Obtained(making.executables, making.reasons, unkept)


class _Making:
    """The state of `obtain`, with the same arguments. Its methods run on many threads."""

    def __init__(
        self,
        programs: Sequence[Program],
        cache: ExecutableCache | None,
        progress: Callable[[str, float], None],
        finished: Callable[[str], None],
        *,
        must_keep: bool,
    ):
        self.executables: dict[str, Executable] = {}
        self.reasons: dict[str, str] = {}
        self.failures: list[str] = []
        self._work = {program.name: program.work for program in programs}
        self._cache = cache
        self._progress = progress
        self._finished = finished
        self._must_keep = must_keep
        self._lock = threading.Lock()

    def load(self, program: Program) -> None:
        if self._cache is None:
            self.reasons[program.name] = "without a cache"
            return
        try:
            executable = self._cache.load(program)
        except Unusable as error:
            self.reasons[program.name] = str(error)
        else:
            self._done("loading", program.name, executable)

    def compile(self, program: Program) -> None:
        started = time.perf_counter()
        executable = program.compile()
        if self._cache is not None:
            try:
                self._cache.store(program, executable, time.perf_counter() - started)
            except OSError as error:
                if self._must_keep:
                    raise
                self.failures.append(str(error))
        self._done("compiling", program.name, executable)

    def fraction(self) -> float:
        return sum(self._work[name] for name in self.executables) / sum(self._work.values())

    def write_manifest(self) -> None:
        if self._cache is None or self.failures:
            return
        try:
            self._cache.write_manifest()
        except OSError as error:
            if self._must_keep:
                raise
            self.failures.append(str(error))

    def _done(self, phase: str, name: str, executable: Executable) -> None:
        with self._lock:
            self.executables[name] = executable
            self._finished(name)
            self._progress(phase, self.fraction())


def _on_threads(workers: int, run: Callable[[Program], None], programs: Sequence[Program]) -> None:
    """Calls `run` for each program. After the first error or Ctrl-C it starts no other."""
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="executables") as pool:
        jobs = [pool.submit(run, program) for program in programs]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def missing(programs: Sequence[Program], cache: ExecutableCache) -> dict[str, str]:
    """Returns program names -> reasons for the programs that the cache lacks or cannot use."""
    found: dict[str, str] = {}
    for program in programs:
        try:
            cache.check(program)
        except Unusable as error:
            found[program.name] = str(error)
    return found


def by_reason(reasons: Mapping[str, str]) -> str:
    """Returns the reasons with the names of their programs, as text."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{reason}: {', '.join(group)}" for reason, group in names.items())


def on_compile(callback: Callable[[], None]) -> None:
    """Calls `callback` after every XLA compilation of this process, on the compiling thread."""

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            callback()

    jax.monitoring.register_event_duration_secs_listener(listener)
