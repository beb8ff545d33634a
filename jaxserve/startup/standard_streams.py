"""Standard streams that were closed before the start."""

from __future__ import annotations

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_closed_ones() -> None:
    """What is opened next would get their numbers: a socket or a model's file would be written
    to as if it were the standard output. They are /dev/null from here on."""
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:  # as Python leaves what it finds closed
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
