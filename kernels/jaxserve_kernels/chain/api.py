"""Chains of kernels: decides where there are any."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve_kernels import ptxas, records, target

FOR_HOPPER = "written for GPUs of compute capability 9.0"


def call[**P, R](function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """function(*args, **kwargs), where it may be as one call of all kernels that it calls.

    That is on Hopper, if the function computes everything in kernels that can start early; what
    lies between them may only be slices of whole rows and other shapes. Each kernel is brought to
    the multiprocessors while its predecessor runs, and does there what needs no results of others,
    such as reading weights. Elsewhere the function is called as it is.

    What the function returns is made by its kernels, or is an argument that they wrote in place.
    """
    if not _possible():
        return function(*args, **kwargs)
    from jaxserve_kernels.chain import lowering  # needs Triton: only for GPUs

    traced = lowering.trace(function, *args, **kwargs)
    return function(*args, **kwargs) if traced is None else traced.call()


def _possible() -> bool:
    """The products of chains are Hopper's. A chain holds machine code and nothing else, and is
    read by structures of a jaxlib that we know."""
    return target.uses_triton() and why_impossible() is None and not records.hold_source()


def why_impossible() -> str | None:
    """Why the GPU that is traced for gets no chains; None: it may."""
    if target.compute_capability() != 90:
        return FOR_HOPPER
    if not ptxas.available():
        return ptxas.MISSING
    return records.unknown_package()
