"""jax-triton, made to work with the Triton versions we support."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import triton
import triton.backends.nvidia.driver as nvidia_driver
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from jaxserve_kernels import target

# jax-triton 0.4 asks for Triton 3.7; with 3.6 its import needs one constant and its tensor
# descriptors one key less. Both are no-ops on 3.7.
if not hasattr(nvidia_driver, "TMA_TF32"):
    nvidia_driver.TMA_TF32 = 11  # type: ignore[attr-defined]  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32

import jax_triton as jt  # after the constant
from jax_triton import triton_lib

_descriptor: Any = triton_lib.TensorDescMeta
_descriptor.__required_keys__ = frozenset(_descriptor.__required_keys__) - {"is_im2col"}

_library: Any = triton_lib.triton_kernel_call_lib
_TritonKernel: Any = _library.TritonKernel


_MOST_SHARED_MEMORY = {
    80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376
}  # fmt: skip
"""Bytes that one block may have, by compute capability."""


def _without_ttir(*args: Any) -> Any:
    """A kernel's record without its Triton source form, which is there for dumps only.

    Each of the 300 calls of a step has a copy of the record, in memory as long as the program.
    A kernel that the card could not start is refused here, where no card is needed.
    """
    name, num_warps, num_ctas, shared_memory, ptx, _ttir, *rest = args
    most = _MOST_SHARED_MEMORY.get(rest[0], shared_memory)
    if shared_memory > most:
        raise ValueError(
            f"the kernel {name} asks for {shared_memory:,} bytes of shared memory, and a GPU of "
            f"compute capability {rest[0] / 10} has {most:,}: use smaller blocks or fewer stages"
        )
    return _TritonKernel(name, num_warps, num_ctas, shared_memory, ptx, "", *rest)


_library.TritonKernel = _without_ttir

_compile_triton: Any = triton_lib.TritonFunction._compile_kernel


def _compile_kernel(
    function: Any, specialization: Any, target: Any, backend: Any, options: Mapping[str, Any]
) -> tuple[Any, str, Any, Any]:
    """jax-triton 0.4 takes Gluon kernels through Triton's own passes, and launches them without
    the warps that warp specialisation adds. Triton's compiler does both right."""
    if not isinstance(function.fn, GluonJITFunction):
        return _compile_triton(function, specialization, target, backend, options)
    known = {field.name for field in dataclasses.fields(backend.parse_options({}))}
    compiled = triton.compile(
        GluonASTSource(
            function.fn, specialization.signature, specialization.constants, specialization.attrs
        ),
        target=target,
        options={name: value for name, value in options.items() if name in known},
    )
    found: Any = compiled.metadata
    kernel = _library.TritonKernel(
        found.name, found.num_warps, found.num_ctas, found.shared, compiled.asm["ptx"], "",
        target.arch,
    )  # fmt: skip
    result = triton_lib.CompilationResult(
        binary=compiled.asm["ptx"],
        name=found.name,
        shared_mem_bytes=found.shared,
        ttgir="",
        llir="",
        tensordesc_meta=found.tensordesc_meta,
    )
    return kernel, "", None, result


triton_lib.TritonFunction._compile_kernel = _compile_kernel  # type: ignore[method-assign]


def triton_call(*args: jax.Array | jax.Ref | int, name: str, **kwargs: Any) -> Any:
    """`jax_triton.triton_call` for the current target. Ints are launch constants.

    Every kernel runs inside the step's CUDA graph, so configurations are fixed beforehand: Triton
    cannot tune while a graph is recorded.
    """
    capability = target.current().compute_capability
    return jt.triton_call(*args, name=name, compute_capability=capability, **kwargs)


def tensor_descriptor(x: jax.Array, block: Sequence[int], layout: Any) -> Any:
    """x as an argument that a kernel copies blocks of by TMA."""
    return jt.TensorDescriptor.from_array(x, block, layout)
