"""The command line: `python -m jaxserve`. The one place that wires concrete parts together."""

from __future__ import annotations

import sys

from jaxserve.cli import COMMANDS, parse_args


def main(argv: list[str] | None = None) -> int:
    """Run the server, or the command that the first word names; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:
        from jaxserve.bench.command import main as bench

        return bench(argv[1:])
    command = argv[0] if argv and argv[0] in COMMANDS else None
    options = parse_args(argv[1:] if command else argv, command)
    if command == "precompile":
        from jaxserve.precompile import precompile

        return precompile(options)
    if command == "convert":
        from jaxserve.convert import convert

        return convert(options)
    from jaxserve.serve import serve  # after the flags: --help must not pay for jax

    return serve(options)


if __name__ == "__main__":
    sys.exit(main())
