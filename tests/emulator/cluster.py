"""The programs of a thread block cluster: see `jaxserve_kernels.triton_cluster`."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_SECONDS = 60
"""After so many, a program that others wait for has failed or never comes."""


class Cluster:
    """Numbers that programs of one cluster add, each in a thread of its own."""

    def __init__(self, size: int) -> None:
        self._numbers: list[Any] = [None] * size
        self._begun = [False] * size
        self._all = threading.Barrier(size)

    def begin(self, program: int) -> Any:
        """As `begin_cluster`. The result is for `sum`."""
        rank = program % len(self._begun)
        if self._begun[rank]:
            raise RuntimeError("a second exchange begins before the first is done")
        self._begun[rank] = True
        return self

    def sum(self, program: int, x: Any) -> Any:
        """As `sum_of_cluster`."""
        rank = program % len(self._begun)
        if not self._begun[rank]:
            raise RuntimeError("an exchange that has not begun")
        self._begun[rank] = False
        self._numbers[rank] = x
        self._all.wait(_SECONDS)
        total = np.float32(0)
        for each in self._numbers:
            total = np.float32(total + each)
        self._all.wait(_SECONDS)  # before a number is replaced
        return total
