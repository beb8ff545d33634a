"""Runs Triton kernels on a CPU by Triton's interpreter: import it before any kernel.

`triton_call` becomes a loop over the programs of the grid, on numpy arrays, so that the functions
that launch kernels can be called as they are, outside of `jax.jit`. bfloat16 arithmetic is wrong in
Triton 3.6's interpreter: use float32 (or float16) inputs.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """numpy 2.4 refuses to make an int of a 1-element array, which `range` in a kernel needs."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


interpreter._patch_lang_tensor = _with_index


class _Tensor:
    """As much of torch.Tensor over a numpy array as the interpreter asks for."""

    def __init__(self, array: np.ndarray):
        self.array = array

    dtype = property(lambda self: f"torch.{self.array.dtype}")
    shape = property(lambda self: self.array.shape)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def element_size(self) -> int:
        return self.array.itemsize

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def copy_(self, other: Any) -> None:
        pass

    def new_empty(self, *_: Any, **__: Any) -> _Tensor:
        return _Tensor(self.array)

    def set_(self, storage: _Tensor, *_: Any) -> None:
        self.array = storage.array


def triton_call(
    *args: Any,
    kernel: Any,
    name: str,
    out_type: Any,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    **kwargs: Any,
) -> Any:
    """`jaxserve_kernels.triton_call.triton_call` by interpretation; outputs start as NaN."""
    passed = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    refs: list[tuple[Any, np.ndarray]] = []
    for key, value in passed.items():
        if isinstance(value, jax.Ref):
            array = np.array(value[...])
            refs.append((value, array))
        elif hasattr(value, "shape"):
            array = np.array(value)
        else:
            continue
        passed[key] = _Tensor(array)
    leaves, tree = jax.tree.flatten(out_type)
    outputs = [_filled(leaf.shape, leaf.dtype) for leaf in leaves]
    free = [key for key in kernel.arg_names if key not in passed]
    passed |= dict(zip(free, map(_Tensor, outputs), strict=True))
    kernel[grid](**passed)
    for ref, array in refs:
        ref[...] = jnp.asarray(array)
    return jax.tree.unflatten(tree, [jnp.asarray(output) for output in outputs])


def _filled(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else 77, dtype)


_fake: Any = types.ModuleType("jaxserve_kernels.triton_call")
_fake.triton_call = triton_call
sys.modules["jaxserve_kernels.triton_call"] = _fake
