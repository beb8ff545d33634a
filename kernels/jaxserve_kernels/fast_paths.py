"""Reports which optional fast paths are on. Without them steps are slower, but requests succeed."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve_kernels import fallback, pdl, ptxas, records
from jaxserve_kernels.target import Target, triton_error


class FastPath(NamedTuple):
    """One optional fast path."""

    feature: str
    """triton_kernels, hopper_kernels, kernel_chains or machine_code_records."""
    why_off: str | None
    """Why the path is off; None if it is on."""
    by_design: bool = False
    """Whether it is off on every GPU of this compute capability: not a defect of the
    installation."""


def fast_paths(*, target: Target) -> list[FastPath]:
    """The fast paths of the target's GPU; none unless operations run Triton kernels."""
    if target.implementation != "triton":
        return []
    error, unknown = triton_error(), records.unknown_package()
    fallen = fallback.fallen_back()
    hopper = target.gpu.compute_capability == 90
    reasons = {
        "triton_kernels": None,
        "hopper_kernels": unknown if hopper else pdl.FOR_HOPPER,
        "kernel_chains": pdl.why_impossible(target=target) or fallen.get("kernel_chains"),
        "machine_code_records": unknown if ptxas.available() else ptxas.MISSING,
    }
    return [
        FastPath(feature, error or why_off, error is None and why_off == pdl.FOR_HOPPER)
        for feature, why_off in reasons.items()
    ]
