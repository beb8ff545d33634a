"""Decides which functions launch their kernels by PDL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve_kernels import ptxas, records
from jaxserve_kernels.target import Target

FOR_HOPPER = "written for GPUs of compute capability 9.0"


def call[R](function: Callable[..., R], *args: Any, target: Target) -> R:
    """Returns function(*args, target=target), and launches all its kernels by PDL if possible.

    That needs Hopper, and a function that computes everything in kernels. It may only reshape
    arrays and slice whole rows between them. A kernel with the constant EARLY starts while its
    predecessor runs, and does work that needs no results of others, such as reading weights; others
    as in `join`, by which functions that also compute outside of kernels are called.

    Each result of the function must be the result of a kernel, or an argument that a kernel updates
    in place.
    """
    if not _possible(target=target):
        return function(*args, target=target)
    from jaxserve_kernels.pdl import lowering  # needs Triton: only for GPUs

    traced = lowering.trace(function, *args, target=target)
    return lowering.join(function, *args, target=target) if traced is None else traced.call()


def join[R](function: Callable[..., R], *args: Any, target: Target) -> R:
    """Returns function(*args, target=target), which may also compute outside of kernels. If
    possible, launches each chain of kernels in it by PDL.

    A kernel of these chains is launched as soon as its predecessor's programs have ended, and waits
    for their results to be visible. That saves most of the time between two kernels.
    """
    if not _possible(target=target):
        return function(*args, target=target)
    from jaxserve_kernels.pdl import lowering  # needs Triton: only for GPUs

    return lowering.join(function, *args, target=target)


def _possible(*, target: Target) -> bool:
    """Whether the target gets PDL. The kernels that start early are written for Hopper. The call
    holds machine code, so it needs ptxas. Its handler reads private structures of jaxlib, so it
    needs a known version (`records`)."""
    return (
        target.uses_triton() and why_impossible(target=target) is None and not records.hold_source()
    )


def why_impossible(*, target: Target) -> str | None:
    """Why the target's GPU gets no PDL; None if it may."""
    if target.gpu.compute_capability != 90:
        return FOR_HOPPER
    if not ptxas.available():
        return ptxas.MISSING
    return records.unknown_package()
