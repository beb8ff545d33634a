"""The command line: `python -m jaxserve`. The one place that wires concrete parts together."""

from __future__ import annotations

import sys

from jaxserve.cli import parse_args


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    options = parse_args(sys.argv[1:] if argv is None else argv)
    from jaxserve.serve import serve  # after the flags: --help must not pay for jax

    return serve(options)


if __name__ == "__main__":
    sys.exit(main())
