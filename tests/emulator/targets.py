"""Cards whose kernels run on the emulator. Whether they compile does not matter there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve_kernels.target import Target


def gpu(compute_capability: int, multiprocessors: int | None = None) -> Target:
    """A card of a compute capability, e.g. 90; with another number of multiprocessors, if given."""
    target = Target.for_gpu(compute_capability).replace(checked=False)
    if multiprocessors is None:
        return target
    return target.replace(device=replace(target.gpu, multiprocessors=multiprocessors))


HOPPER = gpu(90)
PDL = HOPPER.replace(pdl=True)
"""Kernels that may start before the one before them has ended."""


def with_pdl[R](function: Callable[..., R], *args: Any, target: Target) -> R:
    """What `pdl.call` does, at once."""
    return function(*args, target=target.replace(pdl=True))


def joined[R](function: Callable[..., R], *args: Any, target: Target) -> R:
    """What `pdl.join` does, at once, without chains."""
    return function(*args, target=target.replace(joined=True))
