"""Runs Triton kernels on the CPU, in Triton's interpreter, on jax arrays outside of jit.

A pytest plugin (-p tests.kernels.interpreter), so that it is there before any kernel: Triton reads
TRITON_INTERPRET when a kernel is defined. bfloat16 is not faithful there (products of its bits are
wrong in Triton 3.6), so tests use float32.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    """With numpy 2.4 `range(bound read from memory)` needs an index of its own."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


interpreter._patch_lang_tensor = _patch

_COMPARISONS = (
    np.less, np.less_equal, np.equal, np.not_equal, np.greater_equal, np.greater
)  # fmt: skip
_builder: Any = interpreter.InterpreterBuilder
_binary_op = _builder.binary_op


def _typed_binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    """Comparisons give truth values, operators of two integer types the type of the first."""
    if op in _COMPARISONS:
        return interpreter.TensorHandle(op(lhs.data, rhs.data), tl.int1)
    if lhs.data.dtype != rhs.data.dtype and lhs.data.dtype.kind in "iu":
        rhs = interpreter.TensorHandle(rhs.data.astype(lhs.data.dtype), rhs.dtype)
    return _binary_op(self, lhs, rhs, op)


_builder.binary_op = _typed_binary_op


def tensor_range(*bounds: Any) -> Iterator[Any]:
    """`range` for kernels that use its numbers as the tensors they are on a GPU."""
    for number in range(*map(int, bounds)):
        yield interpreter.interpreter_semantic.to_tensor(number, False)


class Argument:
    """As much of torch.Tensor as the interpreter asks for, over a numpy array."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

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

    def untyped_storage(self) -> Argument:
        return self

    def cpu(self) -> Argument:
        return self

    def copy_(self, other: Argument) -> None:
        pass

    def new_empty(self, *_: Any, **__: Any) -> Argument:
        return Argument(self.array)

    def set_(self, storage: Argument, *_: Any) -> None:
        self.array = storage.array


def triton_call(
    *args: Any, kernel: Any, name: str, out_type: Any, grid: Any, num_warps: int = 4, **meta: Any
) -> Any:
    """As `jaxserve_kernels.triton_call.triton_call`; outputs start as NaN or a large number."""
    outputs = [_poisoned(out) for out in jax.tree.leaves(out_type)]
    inputs = [
        np.array(arg[...] if _is_ref(arg) else arg) if hasattr(arg, "shape") else arg
        for arg in args
    ]
    names = list(inspect.signature(kernel.fn).parameters)
    values = [Argument(v) if isinstance(v, np.ndarray) else v for v in [*inputs, *outputs]]
    kernel[grid](**dict(zip(names, values, strict=False)), **meta)
    for arg, array in zip(args, inputs, strict=True):
        if _is_ref(arg):
            arg[...] = jnp.asarray(array)
    return jax.tree.unflatten(jax.tree.structure(out_type), [jnp.asarray(out) for out in outputs])


def _is_ref(arg: Any) -> bool:
    return isinstance(arg, jax.Ref)


def _poisoned(out: jax.ShapeDtypeStruct) -> np.ndarray:
    floating = jnp.issubdtype(out.dtype, jnp.floating)  # numpy does not know float8 as one
    poison = np.nan if floating else np.iinfo(out.dtype).max
    return np.full(out.shape, poison, out.dtype)


def pytest_configure(config: object) -> None:
    """Make the kernels' modules launch here."""
    from jaxserve_kernels import triton_call as module

    module.triton_call = triton_call
