"""What a program is traced for: a value that every operation takes as its keyword `target`.

`Target.here()` makes it once, where a program begins: operations ask neither jax nor a global.
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
"""Operations without one of their own for CPUs take the definition there."""

type Shape = tuple[str | int, ...]
"""What a configuration depends on beside the number of tokens; its meaning is the operation's."""

type Parameters = Mapping[str, int]

_IMPLEMENTATIONS: dict[str, Implementation] = {"cpu": "cpu", "gpu": "triton"}
"""By JAX's backend; on others the definitions in plain JAX."""


class Tuned(NamedTuple):
    """Launch parameters that take the place of an operation's own choice, for the tuner."""

    operation: str
    shape: Shape
    parameters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a program is traced for. Hashable, so it may be a static argument."""

    implementation: Implementation
    device: Device | None = None
    """The GPU; None where operations are no kernels."""
    pdl: bool = False
    """Kernels are traced for programmatic dependent launch: each may start before the one before it
    ends, and must wait itself for what it reads."""
    checked: bool = True
    """Whether kernels that do not compile are replaced (`fallback`)."""
    tuned: tuple[Tuned, ...] = ()
    observe: Callable[[Any], None] | None = field(default=None, compare=False, repr=False)
    """Called with the `op.Choice` of every call of an operation."""

    @classmethod
    def here(cls) -> Self:
        """Triton on a GPU, what is made for a CPU on one, the definitions elsewhere."""
        return cls.of(jax.devices()[0])

    @classmethod
    def of(cls, device: Any) -> Self:
        """For a jax device, or an object with its attributes."""
        implementation = _IMPLEMENTATIONS.get(device.platform, "reference")
        gpu = Device.of(device) if implementation == "triton" else None
        return cls(implementation=implementation, device=gpu)

    @classmethod
    def for_gpu(cls, compute_capability: int) -> Self:
        """For a card of a compute capability, e.g. 90, which need not be here."""
        return cls(implementation="triton", device=card(compute_capability))

    @property
    def gpu(self) -> Device:
        """The GPU; only where operations are kernels."""
        assert self.device is not None, f"{self.implementation} has no GPU"
        return self.device

    def replace(self, **changes: Any) -> Self:
        """A copy with other values of some fields."""
        return dataclasses.replace(self, **changes)

    def with_tuned(self, parameters: Mapping[tuple[str, Shape], Parameters]) -> Self:
        """With these launch parameters, by operation and shape."""
        added = (Tuned(*key, tuple(sorted(each.items()))) for key, each in parameters.items())
        return self.replace(tuned=(*added, *self.tuned))

    def uses_triton(self) -> bool:
        """Whether operations are kernels; if so, Triton has been imported, whole.

        Its packages import each other: of threads that begin with different ones, as those that
        compile a model's programs do, some would find others half imported.
        """
        if self.implementation != "triton":
            return False
        with _importing:
            return _import_triton()

    def runs_hopper_kernels(self) -> bool:
        """Whether kernels that are written for Hopper, in Gluon, can be used: jax-triton launches
        them only with `triton_call`'s help, which knows the versions in `records`."""
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
    except Exception as error:  # a version that lacks what we import, or fails at it
        _import_errors.append(f"{type(error).__name__}: {error}")
        return False
    return True


_import_errors: list[str] = []


def triton_error() -> str | None:
    """Why Triton and jax-triton could not be imported, e.g. that they are not installed. None: they
    could, or nobody has tried: a start that finds its programs compiled needs neither."""
    return _import_errors[0] if _import_errors else None
