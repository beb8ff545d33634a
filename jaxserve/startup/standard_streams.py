"""Standard streams that were closed before the start."""

from __future__ import annotations

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_closed_ones() -> None:
    """Open /dev/null on closed standard streams. Otherwise the next file or socket would get their
    number, and output would be written into it."""
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:  # as Python leaves what it finds closed
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
