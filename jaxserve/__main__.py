"""The command line, `python -m jaxserve`: picks the command and starts it."""

from __future__ import annotations

import os
import signal
import sys

from jaxserve.cli.foreign_flags import translated
from jaxserve.cli.options import COMMANDS, FLAGS_VARIABLE, parse_args
from jaxserve.startup import gpu_driver, heap, standard_streams
from jaxserve.startup.timeline import Timeline

_INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a command that Ctrl-C ended, by the convention of shells."""


def main(argv: list[str] | None = None) -> int:
    """Runs the server, or the command that the first word names. Returns the exit status."""
    standard_streams.open_closed_ones()
    argv = sys.argv[1:] if argv is None else argv
    _take_sigterm()
    try:
        status = _run(argv)
    except KeyboardInterrupt:
        goes_on = "; the same command goes on from here" if argv[:1] and argv[0] in COMMANDS else ""
        print(f"jaxserve: interrupted{goes_on}", file=sys.stderr, flush=True)
        os._exit(_INTERRUPTED)  # an orderly exit would wait for threads that compile or download
    except BrokenPipeError:  # as in `jaxserve plan … | head`
        os._exit(128 + signal.SIGPIPE)
    if "triton" in sys.modules:  # at an orderly exit 3.9 prints what its own compiler leaks
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _take_sigterm() -> None:
    """Makes SIGTERM end the first process of a container. The kernel ignores signals that process 1
    does not handle. The server installs its own handler later."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def _run(argv: list[str]) -> int:
    if argv[:1] == ["bench"]:
        from jaxserve.bench.command import main as bench

        return bench(argv[1:])
    if argv[:1] == ["serve"]:  # as in vLLM: the model may follow
        argv = ["--model", *argv[1:]] if argv[1:] and not argv[1].startswith("-") else argv[1:]
    try:
        argv, without_effect = translated(argv)
    except ValueError as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        sys.exit(2)
    command = argv[0] if argv and argv[0] in COMMANDS else None
    given = os.environ.get(FLAGS_VARIABLE, "")
    options = parse_args(argv[1:] if command else argv, command, given)
    if command == "precompile":
        from jaxserve.commands.precompile import precompile

        return precompile(options)
    if command == "convert":
        from jaxserve.commands.convert import convert

        return convert(options)
    if command == "plan":
        from jaxserve.commands.plan import plan

        return plan(options)
    if command == "kernels":
        from jaxserve.commands.kernels import kernels

        return kernels(options)
    timeline = Timeline()
    gpu_driver.open_early(timeline, os.environ.get("JAX_PLATFORMS"))
    heap.import_freely()
    from jaxserve.commands.serve import serve  # after the flags: --help must not pay for jax

    return serve(options, timeline, without_effect)


if __name__ == "__main__":
    sys.exit(main())
