"""Differences between the Triton versions that jaxserve supports, 3.6 and 3.9.

Kernels use the names of 3.9. Importing this module adds those names to 3.6, and lets jax-triton,
which requires 3.7, be imported with 3.6. It changes nothing on 3.9.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import triton.backends.nvidia.driver as nvidia_driver
from triton.backends.nvidia import compiler
from triton.experimental.gluon import language
from triton.experimental.gluon.language import _standard
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import standard

from jaxserve_kernels import ptxas

_NEW_NAMES: tuple[tuple[Any, str, str], ...] = (
    (language, "barrier", "thread_barrier"),
    (async_copy, "async_load", "async_copy_global_to_shared"),
    (tma, "async_load", "async_copy_global_to_shared"),
    (shared_memory_descriptor, "reinterpret", "_reinterpret"),
)
"""Owner of a name, the name in 3.9, and the name in 3.6. 3.9 keeps some old names, which raise."""

for _owner, _new, _old in _NEW_NAMES:
    if not hasattr(_owner, _new):
        setattr(_owner, _new, getattr(_owner, _old))
if not hasattr(language, "cumsum"):
    language.cumsum = _standard._import_from_triton(standard.cumsum)  # type: ignore[attr-defined]
if not hasattr(nvidia_driver, "TMA_TF32"):
    nvidia_driver.TMA_TF32 = 11  # type: ignore[attr-defined]  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32

import jax_triton as jt  # noqa: E402  # after the constant, which its import needs
from jax_triton import triton_lib  # noqa: E402

__all__ = ["compiler_options", "jt", "option_names", "triton_lib"]

_descriptor: Any = triton_lib.TensorDescMeta
_descriptor.__required_keys__ = frozenset(_descriptor.__required_keys__) - {"is_im2col"}


def compiler_options(compute_capability: int) -> dict[str, Any]:
    """Compiler options of every kernel.

    - `enable_fp_fusion`: `a * b + c` may become one instruction. Triton's default is True up to 3.9
      and False from 3.10 on. Setting it keeps results independent of the version.
    - `ptx_version`: Triton writes PTX for the assembler in its own package (13.4 in 3.9). Ours may
      be older, and rejects newer PTX. The version is only ever lowered, because Triton's own
      assembler must accept the PTX too.

    Args:
      compute_capability: that of the GPU to compile for, e.g. 90.
    """
    options: dict[str, Any] = {"enable_fp_fusion": True}
    ours = ptxas.version()
    if ours is not None:
        highest = compiler.ptx_get_version(_package_ptxas(compute_capability))
        lowered = compiler.ptx_get_version(ours.rpartition(".")[0])
        if lowered < highest:
            options["ptx_version"] = lowered
    return options


@functools.cache
def _package_ptxas(compute_capability: int) -> str:
    """The version, e.g. "12.8", of the assembler that Triton's package has for a GPU."""
    return compiler.get_ptxas(compute_capability).version


@functools.cache
def option_names() -> frozenset[str]:
    """The names of the compiler's options."""
    return frozenset(field.name for field in dataclasses.fields(compiler.CUDAOptions))
