"""The executables of a start: loaded from their cache, or compiled and kept there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from jaxserve.executable_cache import Executable, ExecutableCache, Program, Rejected

log = logging.getLogger(__name__)

type OnMissing = Callable[[Mapping[str, str]], None]
"""Called, before anything is compiled, with the names of what has to be -> why."""

_LOADERS = 16
"""Threads that load at most: more are not faster, and each holds a program twice meanwhile."""


def compile_missing(reasons: Mapping[str, str]) -> None:
    """The OnMissing that lets everything be compiled."""


class Obtained(NamedTuple):
    """Executables by program name, and where they came from."""

    executables: dict[str, Executable]
    compiled: dict[str, str]
    """Names of programs that had to be compiled -> why they could not be loaded."""
    unkept: str
    """Why compiled programs could not be written to the cache; empty if they were."""


def obtain(
    programs: Sequence[Program],
    cache: ExecutableCache | None,
    workers: int,
    progress: Callable[[str, float], None],
    finished: Callable[[str], None] = lambda name: None,
    on_missing: OnMissing = compile_missing,
    must_keep: bool = False,
) -> Obtained:
    """Load every program, then compile and keep what could not be loaded.

    A cache that cannot be used or written costs time, not the start, unless `must_keep`.

    Args:
      programs: those that take longest to compile first.
      workers: threads; XLA releases the interpreter while it loads and compiles.
      progress: called with what is going on, "loading" or "compiling", and the fraction done.
      finished: called with the name of each program.
      on_missing: may refuse to go on, by an exception.
      must_keep: the first program that cannot be written is an OSError, and no other is begun.
    """
    work = {program.name: program.work for program in programs}
    executables: dict[str, Executable] = {}
    reasons: dict[str, str] = {}
    failures: list[str] = []
    lock = threading.Lock()

    def done(phase: str, name: str, executable: Executable) -> None:
        with lock:
            executables[name] = executable
            finished(name)
            progress(phase, fraction())

    def fraction() -> float:
        return sum(work[name] for name in executables) / sum(work.values())

    def load(program: Program) -> None:
        if cache is None:
            reasons[program.name] = "without a cache"
            return
        try:
            executable = cache.load(program)
        except Rejected as rejected:
            reasons[program.name] = str(rejected)
        else:
            done("loading", program.name, executable)

    def make(program: Program) -> None:
        started = time.perf_counter()
        executable = program.compile()
        if cache is not None:
            try:
                cache.store(program, executable, time.perf_counter() - started)
            except OSError as error:
                if must_keep:
                    raise
                failures.append(str(error))
        done("compiling", program.name, executable)

    _on_threads(min(workers, _LOADERS), load, programs)
    if reasons:
        on_missing(reasons)
        progress("compiling", fraction())
        _on_threads(workers, make, [each for each in programs if each.name in reasons])
        if cache is not None and not failures:
            try:
                cache.write_manifest()
            except OSError as error:
                failures.append(str(error))
    if failures:
        log.warning(
            "compiled programs cannot be kept, every start compiles: %s; another --cache-dir?",
            failures[0],
        )
    return Obtained(executables, reasons, failures[0] if failures else "")


def _on_threads(workers: int, run: Callable[[Program], None], programs: Sequence[Program]) -> None:
    """Run for each program; after the first error, or Ctrl-C, no other is begun."""
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="executables") as pool:
        jobs = [pool.submit(run, program) for program in programs]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def missing(programs: Sequence[Program], cache: ExecutableCache) -> dict[str, str]:
    """Names of the programs that the cache does not hold, or not whole -> why."""
    found: dict[str, str] = {}
    for program in programs:
        try:
            cache.check(program)
        except Rejected as rejected:
            found[program.name] = str(rejected)
    return found


def by_reason(reasons: Mapping[str, str]) -> str:
    """Names of programs -> why not, in the other direction and in words."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{reason}: {', '.join(group)}" for reason, group in names.items())
