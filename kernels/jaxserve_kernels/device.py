"""A GPU's sizes, which determine grids, ring depths and thresholds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU. Sizes are in bytes."""

    name: str
    compute_capability: int
    """Major and minor in one number: 90 is 9.0."""
    multiprocessors: int
    shared_memory: int
    """Shared memory of each multiprocessor."""
    shared_memory_per_block: int
    """The most shared memory of one program."""
    threads: int
    """The most threads that run on a multiprocessor at once."""

    @classmethod
    def of(cls, device: Any) -> Self:
        """From a jax device, or an object with the same attributes. Missing attributes are taken
        from `card`."""
        alike = card(int(device.compute_capability.replace(".", "")))
        most = getattr(device, "shared_memory_per_block_optin", alike.shared_memory_per_block)
        return cls(
            name=device.device_kind,
            compute_capability=alike.compute_capability,
            multiprocessors=getattr(device, "core_count", alike.multiprocessors),
            shared_memory=alike.shared_memory,
            shared_memory_per_block=most,
            threads=alike.threads,
        )


_CARDS = {
    card.compute_capability: card
    for card in (
        Device(name="NVIDIA A100", compute_capability=80, multiprocessors=108,
               shared_memory=164 * _KIB, shared_memory_per_block=163 * _KIB, threads=2048),
        Device(name="NVIDIA A10", compute_capability=86, multiprocessors=72,
               shared_memory=100 * _KIB, shared_memory_per_block=99 * _KIB, threads=1536),
        Device(name="NVIDIA L40S", compute_capability=89, multiprocessors=142,
               shared_memory=100 * _KIB, shared_memory_per_block=99 * _KIB, threads=1536),
        Device(name="NVIDIA H100", compute_capability=90, multiprocessors=132,
               shared_memory=228 * _KIB, shared_memory_per_block=227 * _KIB, threads=2048),
        Device(name="NVIDIA B200", compute_capability=100, multiprocessors=148,
               shared_memory=228 * _KIB, shared_memory_per_block=227 * _KIB, threads=2048),
        Device(name="NVIDIA GeForce RTX 5090", compute_capability=120, multiprocessors=170,
               shared_memory=100 * _KIB, shared_memory_per_block=99 * _KIB, threads=1536),
    )
}  # fmt: skip
"""One card of each compute capability. `jaxserve/cli/gpus.py` cites the sources for the numbers of
multiprocessors. Sizes of shared memory and numbers of threads are those of the CUDA C++ Programming
Guide, "Compute Capabilities"."""


def card(compute_capability: int) -> Device:
    """A card of this compute capability, e.g. 90; for an unknown one, the nearest lower one."""
    known = max((each for each in _CARDS if each <= compute_capability), default=80)
    return replace(_CARDS[known], compute_capability=compute_capability)
