"""Decides where kernels are launched by PDL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve_kernels import ptxas, records
from jaxserve_kernels.target import Target

FOR_HOPPER = "written for GPUs of compute capability 9.0"


def call[R](function: Callable[..., R], *args: Any, target: Target) -> R:
    """function(*args, target=target), where it may be as one call of all kernels that it calls.

    That is on Hopper, if the function computes everything in kernels that can start early; what
    lies between them may only be slices of whole rows and other shapes. Each kernel is brought to
    the multiprocessors while its predecessor runs, and does there what needs no results of others,
    such as reading weights. Elsewhere the function is called as it is.

    What the function returns is made by its kernels, or is an argument that they wrote in place.
    """
    if not _possible(target=target):
        return function(*args, target=target)
    from jaxserve_kernels.pdl import lowering  # needs Triton: only for GPUs

    traced = lowering.trace(function, *args, target=target)
    return function(*args, target=target) if traced is None else traced.call()


def _possible(*, target: Target) -> bool:
    """The products are Hopper's. The call holds machine code and nothing else, and is read by
    structures of a jaxlib that we know."""
    return (
        target.uses_triton() and why_impossible(target=target) is None and not records.hold_source()
    )


def why_impossible(*, target: Target) -> str | None:
    """Why the GPU that is traced for gets no PDL; None: it may."""
    if target.gpu.compute_capability != 90:
        return FOR_HOPPER
    if not ptxas.available():
        return ptxas.MISSING
    return records.unknown_package()
