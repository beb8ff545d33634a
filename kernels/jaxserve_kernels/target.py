"""Which implementation of the operations to use: the device decides, a context overrides it."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax

from jaxserve_kernels import records

type Implementation = Literal["reference", "cpu", "triton"]
"""Operations without one of their own for CPUs take the definition there."""


class Target(NamedTuple):
    """What a program is traced for."""

    implementation: Implementation
    compute_capability: int | None = None
    """Of the GPU to compile for, e.g. 90; None: the GPU of this process."""
    device: str | None = None
    """Its name, for tuned launch parameters; None: the GPU of this process."""


_IMPLEMENTATIONS: dict[str, Implementation] = {"cpu": "cpu", "gpu": "triton"}
"""By JAX's backend; on others the definitions in plain JAX."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What grids, rings and thresholds follow."""

    name: str
    compute_capability: int
    multiprocessors: int
    shared_memory: int
    """Bytes, of each multiprocessor."""
    shared_memory_per_block: int
    """The most bytes that one program may have."""


_KIB = 1024
_CARDS = {
    card.compute_capability: card
    for card in (
        Device(name="NVIDIA A100", compute_capability=80, multiprocessors=108,
               shared_memory=164 * _KIB, shared_memory_per_block=163 * _KIB),
        Device(name="NVIDIA A10", compute_capability=86, multiprocessors=72,
               shared_memory=100 * _KIB, shared_memory_per_block=99 * _KIB),
        Device(name="NVIDIA L40S", compute_capability=89, multiprocessors=142,
               shared_memory=100 * _KIB, shared_memory_per_block=99 * _KIB),
        Device(name="NVIDIA H100", compute_capability=90, multiprocessors=132,
               shared_memory=228 * _KIB, shared_memory_per_block=227 * _KIB),
        Device(name="NVIDIA B200", compute_capability=100, multiprocessors=148,
               shared_memory=228 * _KIB, shared_memory_per_block=227 * _KIB),
        Device(name="NVIDIA GeForce RTX 5090", compute_capability=120, multiprocessors=170,
               shared_memory=100 * _KIB, shared_memory_per_block=99 * _KIB),
    )
}  # fmt: skip
"""A card of each compute capability: what is not known of others is taken from the nearest below,
and all of it where a program is compiled for a card that is not here."""

_override: ContextVar[Target | None] = ContextVar("target", default=None)


def current() -> Target:
    """Triton on a GPU, what is made for a CPU on one, unless `use` says otherwise."""
    override = _override.get()
    if override is not None:
        return override
    backend = jax.default_backend()
    return Target(_IMPLEMENTATIONS.get(backend, "reference"))


_importing = threading.Lock()
_NEEDED = ("triton.experimental.gluon.language.nvidia.hopper", "jaxserve_kernels.triton_call")


def uses_triton() -> bool:
    """Whether operations are kernels; if so, Triton has been imported, whole.

    Its packages import each other: of threads that begin with different ones, as those that compile
    a model's programs do, some would find others half imported.
    """
    if current().implementation != "triton":
        return False
    with _importing:
        return _import_triton()


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


@contextmanager
def use(target: Target) -> Generator[None]:
    """Trace for another target in this context: compiling without a GPU, comparing both."""
    token = _override.set(target)
    try:
        yield
    finally:
        _override.reset(token)


def compute_capability() -> int:
    """Of the GPU that is traced for, e.g. 90."""
    given = current().compute_capability
    return given or int(jax.devices()[0].compute_capability.replace(".", ""))


def runs_hopper_kernels() -> bool:
    """Whether kernels that are written for Hopper, in Gluon, can be used: jax-triton launches them
    only with `triton_call`'s help, which knows the versions in `records`."""
    return compute_capability() == 90 and records.unknown_package() is None


def device() -> Device:
    """The GPU that is traced for: this process's, or a card of the capability that was given.

    Without either it is an H100.
    """
    given = current().compute_capability
    if given is not None:
        return card(given)
    here = jax.devices()[0]
    if here.platform != "gpu":
        return card(90)
    alike = card(compute_capability())
    return replace(
        alike,
        name=here.device_kind,
        multiprocessors=here.core_count,
        shared_memory_per_block=getattr(
            here, "shared_memory_per_block_optin", alike.shared_memory_per_block
        ),
    )


def card(compute_capability: int) -> Device:
    """A card of a compute capability, e.g. 90; of one that is not known, the nearest below."""
    known = max((each for each in _CARDS if each <= compute_capability), default=80)
    return replace(_CARDS[known], compute_capability=compute_capability)


def multiprocessors() -> int:
    """Of the GPU that is traced for."""
    return device().multiprocessors
