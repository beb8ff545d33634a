"""The target that a program is traced for. Every operation takes one as its keyword `target`.

A program calls `Target.here()` once, at its start. Operations read neither jax's devices nor a
global.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import jax

from jaxserve_kernels import records
from jaxserve_kernels.device import Device, card

type Implementation = Literal["reference", "cpu", "triton"]
"""On "cpu", an operation without a CPU implementation uses its definition."""

type Shape = tuple[str | int, ...]
"""Key of a configuration, beside the number of tokens. Each operation defines its own."""

type Parameters = Mapping[str, int]

_IMPLEMENTATIONS: dict[str, Implementation] = {"cpu": "cpu", "gpu": "triton"}
"""By JAX's backend. Other backends use the definitions in plain JAX."""


class Tuned(NamedTuple):
    """Launch parameters that replace an operation's own choice; the tuner sets them."""

    operation: str
    shape: Shape
    parameters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target that a program is traced for. Hashable, so it may be a static argument."""

    implementation: Implementation
    device: Device | None = None
    """The GPU; None unless operations run Triton kernels."""
    pdl: bool = False
    """Kernels are traced for programmatic dependent launch (PDL): a kernel may start before its
    predecessor ends, and must itself wait before it reads the predecessor's results."""
    joined: bool = False
    """Kernels are joined to chains after they have been traced (`pdl.join`), so an operation that a
    library computes as fast had better be a kernel."""
    checked: bool = True
    """Whether another implementation replaces kernels that do not compile (`fallback`)."""
    tuned: tuple[Tuned, ...] = ()
    observe: Callable[[Any], None] | None = field(default=None, compare=False, repr=False)
    """Called with the `op.Choice` of each operation call."""

    @classmethod
    def here(cls) -> Self:
        """The target for this process's first jax device."""
        return cls.of(jax.devices()[0])

    @classmethod
    def of(cls, device: Any) -> Self:
        """The target for a jax device, or for an object with the same attributes."""
        implementation = _IMPLEMENTATIONS.get(device.platform, "reference")
        gpu = Device.of(device) if implementation == "triton" else None
        return cls(implementation=implementation, device=gpu)

    @classmethod
    def for_gpu(cls, compute_capability: int) -> Self:
        """The target for a GPU of this compute capability, e.g. 90. No such GPU need be present."""
        return cls(implementation="triton", device=card(compute_capability))

    @property
    def gpu(self) -> Device:
        """The GPU. Call it only where operations run Triton kernels."""
        assert self.device is not None, f"{self.implementation} has no GPU"
        return self.device

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_tuned(self, parameters: Mapping[tuple[str, Shape], Parameters]) -> Self:
        """A copy with these launch parameters, by operation and shape."""
        added = (Tuned(*key, tuple(sorted(each.items()))) for key, each in parameters.items())
        return self.replace(tuned=(*added, *self.tuned))

    def uses_triton(self) -> bool:
        """Whether operations run Triton kernels. If they do, this has imported all of Triton.

        Triton's packages import each other. Threads that compile a model's programs in parallel
        would otherwise see packages that another thread has imported only in part.
        """
        if self.implementation != "triton":
            return False
        with _importing:
            return _import_triton()

    def runs_hopper_kernels(self) -> bool:
        """Whether the Gluon kernels for Hopper can run. jax-triton needs `triton_call` to launch
        them, and that works with the package versions in `records` only."""
        return self.gpu.compute_capability == 90 and records.unknown_package() is None


CPU = Target(implementation="cpu")
REFERENCE = Target(implementation="reference")
"""The definitions in plain JAX, on any device."""

_importing = threading.Lock()
_NEEDED = ("triton.experimental.gluon.language.nvidia.hopper", "jaxserve_kernels.triton_call")


@functools.cache
def _import_triton() -> bool:
    try:
        for module in _NEEDED:
            importlib.import_module(module)
    except Exception as error:  # e.g. a version that lacks a name that we import
        _import_errors.append(f"{type(error).__name__}: {error}")
        return False
    return True


_import_errors: list[str] = []


def triton_error() -> str | None:
    """Why importing Triton and jax-triton failed, e.g. that they are not installed.

    None if the import succeeded, or if nobody has tried it: a start that finds all its programs
    compiled needs neither package.
    """
    return _import_errors[0] if _import_errors else None
