"""What differs between the Triton versions that jaxserve runs with, 3.6 and 3.9.

Kernels are written in the names of 3.9. Importing this module gives 3.6 those names, and makes
jax-triton, which asks for 3.7, import beside it. Nothing here has an effect on 3.9.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import triton.backends.nvidia.driver as nvidia_driver
from triton.backends.nvidia import compiler
from triton.experimental.gluon import language
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from jaxserve_kernels import ptxas

_NEW_NAMES: tuple[tuple[Any, str, str], ...] = (
    (language, "barrier", "thread_barrier"),
    (async_copy, "async_load", "async_copy_global_to_shared"),
    (tma, "async_load", "async_copy_global_to_shared"),
    (shared_memory_descriptor, "reinterpret", "_reinterpret"),
)
"""Where a name is, the name in 3.9, and the name in 3.6. 3.9 keeps some old ones, which raise."""

for _owner, _new, _old in _NEW_NAMES:
    if not hasattr(_owner, _new):
        setattr(_owner, _new, getattr(_owner, _old))
if not hasattr(nvidia_driver, "TMA_TF32"):
    nvidia_driver.TMA_TF32 = 11  # type: ignore[attr-defined]  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32

import jax_triton as jt  # noqa: E402  # after the constant, which its import needs
from jax_triton import triton_lib  # noqa: E402

__all__ = ["compiler_options", "jt", "option_names", "triton_lib"]

_descriptor: Any = triton_lib.TensorDescMeta
_descriptor.__required_keys__ = frozenset(_descriptor.__required_keys__) - {"is_im2col"}


def compiler_options(compute_capability: int) -> dict[str, Any]:
    """Options that every kernel is compiled with.

    - `enable_fp_fusion`: `a * b + c` may become one instruction. Triton's own default is to fuse up
      to 3.9, and not to from 3.10 on; results must not depend on it.
    - `ptx_version`: Triton writes PTX for the assembler in its own package (13.4 in 3.9). Ours may
      be older, and refuses newer PTX. Only ever lowered: Triton's own must read it, too.

    Args:
      compute_capability: of the GPU to compile for, e.g. 90.
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
    """The version, e.g. "12.8", of the assembler that Triton brings for a GPU."""
    return compiler.get_ptxas(compute_capability).version


@functools.cache
def option_names() -> frozenset[str]:
    """The names of the compiler's options."""
    return frozenset(field.name for field in dataclasses.fields(compiler.CUDAOptions))
