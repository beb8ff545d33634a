"""Values that a kernel has in registers, and what Triton's functions do to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.emulator.ptx import run_assembly

TYPES = {
    "float32": np.float32, "int1": np.bool_, "int8": np.int8, "uint8": np.uint8, "int16": np.int16,
    "uint16": np.uint16, "int32": np.int32, "uint32": np.uint32, "int64": np.int64,
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float8e4nv": ml_dtypes.float8_e4m3fn,
}  # fmt: skip


class Tensor(np.ndarray):
    """An array that remains one: operators never give it numpy's scalars, nor other types."""

    type = SimpleNamespace(layout=None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Numbers of Python's take the type of the tensor beside them, as in Triton."""
        types = [each.dtype for each in inputs if isinstance(each, np.ndarray)]
        plain = [_beside(each, np.result_type(*types)) for each in inputs]
        kwargs.pop("out", None)  # the name is another value's now, what others have of it stays
        with np.errstate(all="ignore"):
            return tensor(getattr(ufunc, method)(*plain, **kwargs))

    def to(self, dtype: Any, *, bitcast: bool = False) -> Tensor:
        with np.errstate(all="ignore"):
            return tensor(self.view(dtype) if bitcast else np.asarray(self).astype(dtype))

    def permute(self, order: Sequence[int]) -> Tensor:
        return tensor(np.transpose(self, order))

    def broadcast_to(self, shape: Sequence[int]) -> Tensor:
        return tensor(np.broadcast_to(self, shape))


def tensor(values: Any) -> Tensor:
    array = np.asarray(values)
    return np.ascontiguousarray(array).reshape(array.shape).view(Tensor)


def scalar(value: int) -> Tensor:
    return tensor(np.int32(value))


def _beside(value: Any, dtype: Any) -> Any:
    if isinstance(value, np.ndarray) or not isinstance(value, int | float):
        return np.asarray(value)
    if isinstance(value, float) and dtype.kind in "iub":
        dtype = np.dtype(np.float32)
    return np.asarray(value, dtype)


def unwritten(dtype: Any, shape: Sequence[int]) -> NDArray[Any]:
    """Memory that nobody wrote: NaN, or integers of which all bits are set."""
    return np.full(size_of(dtype, shape), 255, np.uint8).view(dtype).reshape(shape)


def size_of(dtype: Any, shape: Sequence[int]) -> int:
    """Bytes."""
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def where(condition: Any, a: Any, b: Any) -> Tensor:
    types = [each.dtype for each in (a, b) if isinstance(each, np.ndarray)]
    dtype = np.result_type(*types) if types else None
    return tensor(np.where(condition, np.asarray(a, dtype), np.asarray(b, dtype)))


def product(a: Any, b: Any, acc: Any = 0.0) -> Tensor:
    """acc + a @ b: in float32, or of 8-bit integers in int32. In float16, which tensor cores round
    to after each 32 inputs, if acc is."""
    dtype = np.int32 if a.dtype == np.int8 else np.float32
    a, b = a.astype(dtype), b.astype(dtype)
    if np.asarray(acc).dtype != np.float16:
        return tensor(np.asarray(acc, dtype) + a @ b)
    for at in range(0, a.shape[1], 32):
        more = a[:, at : at + 32] @ b[at : at + 32]
        acc = tensor(acc).to(dtype) + more
        acc = tensor(acc).to(np.float16)
    return tensor(acc)


def assembly(
    code: str, constraints: str, inputs: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """`pack` neighbours in the last axis share registers. Of shuffles, that axis is a warp's lanes,
    as kernels have it."""
    if code.startswith("shfl.sync.bfly"):
        values, lanes = inputs
        return tensor(values[..., np.arange(32) ^ int(lanes.reshape(-1)[0])])
    if "prefetch" in code:
        return tensor(np.zeros_like(inputs[0].load(), dtype))
    outputs = list(dtype) if isinstance(dtype, tuple) else [dtype]
    arrays = np.broadcast_arrays(*inputs)
    registers: list[Any] = []
    for array in arrays:
        packed = np.ascontiguousarray(array).reshape(-1, pack).view(np.uint32)
        registers += [packed[:, each] for each in range(packed.shape[1])]
    sizes = [max(1, pack * each.itemsize // 4) for each in outputs]
    results = iter(run_assembly(code, sum(sizes), registers))
    found = []
    for each, size in zip(outputs, sizes, strict=True):
        words = np.stack([next(results) for _ in range(size)], axis=-1).astype(np.uint32)
        found.append(tensor(words.view(each).reshape(arrays[0].shape)))
    return tuple(found) if isinstance(dtype, tuple) else found[0]


def _reduce(values: tuple[Any, ...], axis: int, combine: Callable[..., Any]) -> tuple[Any, ...]:
    first, *others = zip(*(np.moveaxis(each, axis, 0) for each in values), strict=True)
    return functools.reduce(lambda found, each: combine(*found, *each), others, first)


def _assert(holds: Any, message: str = "") -> None:
    assert holds, message


def _no_layout(*_: Any, **__: Any) -> None:
    """Who holds what means nothing here."""


class _SharedLayout:
    get_default_for = _no_layout
    __new__ = _no_layout


def count(*bounds: Any, **_: Any) -> Iterator[Tensor]:
    """`range` of values as a GPU has them."""
    return map(scalar, range(*map(int, bounds)))


def _plain(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Of numpy, whatever it makes of a subclass."""

    def call(values: Any, *args: Any, **kwargs: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return tensor(function(np.asarray(values), *args, **kwargs))

    return call


LANGUAGE: dict[str, Any] = {
    **{name: np.dtype(each) for name, each in TYPES.items()},
    **dict.fromkeys(
        (
            *("SliceLayout", "NVMMADistributedLayout", "BlockedLayout", "DotOperandLayout"),
            *("DistributedLinearLayout", "SwizzledSharedLayout"),
        ),
        _no_layout,
    ),
    "NVMMASharedLayout": _SharedLayout,
    "constexpr": lambda value: value,
    "pointer_type": lambda element: element,
    "static_range": range,
    "static_assert": _assert,
    "range": count,
    "arange": lambda start, stop, layout=None: tensor(np.arange(start, stop, dtype=np.int32)),
    "zeros": lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
    "zeros_like": lambda values: tensor(np.zeros_like(values)),
    "full": lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
    "inline_asm_elementwise": assembly,
    "barrier": lambda: None,
    "debug_barrier": lambda: None,
    "convert_layout": lambda values, *_, **__: values,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "abs": _plain(np.abs),
    "exp": _plain(np.exp),
    "exp2": _plain(np.exp2),
    "log": _plain(np.log),
    "sqrt": _plain(np.sqrt),
    "rsqrt": _plain(lambda values: 1 / np.sqrt(values)),
    "sigmoid": _plain(lambda values: 1 / (1 + np.exp(-values))),
    "clamp": _plain(np.clip),
    "div_rn": lambda a, b: a / b,
    "cdiv": lambda a, b: (a + b - 1) // b,
    "dot": lambda a, b, acc=0.0, **_: product(a, b, acc),
    "max": _plain(np.max),
    "min": _plain(np.min),
    "sum": _plain(np.sum),
    "cumsum": _plain(np.cumsum),
    "reduce": _reduce,
    "join": lambda a, b: tensor(np.stack(np.broadcast_arrays(a, b), axis=-1)),
    "split": lambda values: (tensor(values[..., 0]), tensor(values[..., 1])),
    "permute": _plain(np.transpose),
    "trans": _plain(lambda values, *order: np.transpose(values, order or None)),
    "reshape": _plain(np.reshape),
    "expand_dims": _plain(np.expand_dims),
    "broadcast": lambda a, b: tuple(tensor(each) for each in np.broadcast_arrays(a, b)),
    "broadcast_to": _plain(np.broadcast_to),
}
"""What `triton.language` and Gluon's language have that needs no memory."""
