"""Opens standard streams that were closed before the start."""

from __future__ import annotations

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_closed_ones() -> None:
    """Opens /dev/null on closed standard streams. Otherwise the next file or socket would get their
    number, and output would go into it."""
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:  # Python sets closed streams to None
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
