"""Global and shared memory, and the barriers that say when what is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.order import HERE, KERNELS, Touched, TouchedShared
from tests.emulator.values import Tensor, size_of, tensor, unwritten, where

PATIENCE = 30.0
"""Seconds until a wait is taken for one without an end."""


class Pointer:
    """Into an array in global memory; `index` may be of any shape."""

    def __init__(
        self,
        array: NDArray[Any],
        index: Any = 0,
        name: str = "",
        touched: Touched | None = None,
    ) -> None:
        """name: the kernel's, of an argument. touched: by programs that run together."""
        self.array, self.index, self.name, self.touched = array, index, name, touched
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, index: Any) -> Pointer:
        return self._at(self.index + index)

    def __sub__(self, index: Any) -> Pointer:
        return self._at(self.index - index)

    def __getitem__(self, at: Any) -> Pointer:
        return self._at(tensor(self.index)[at])

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.index)

    def to(self, dtype: Any, *, bitcast: bool = False) -> Pointer:
        """The same place, seen as elements of another type."""
        index = self.index * self.array.itemsize // dtype.itemsize
        return Pointer(self.array.view(dtype), index, self.name)

    def load(self, mask: Any = True, other: Any = 0) -> Tensor:
        HERE.partition.reads_argument(self.name)
        if self.touched:
            index, mask = self._checked(mask)
            self.touched.read(index[mask])
        return self.load_copy(mask, other)

    def load_copy(self, mask: Any = True, other: Any = 0) -> Tensor:
        """What a partition has asked for before."""
        index, mask = self._checked(mask)
        found = self.array[index] if self.array.size else np.zeros(index.shape, self.array.dtype)
        return tensor(np.where(mask, found, np.asarray(other, found.dtype)))

    def store(self, values: Any, mask: Any = True) -> None:
        HERE.partition.writes_argument(self.name)
        shape = np.broadcast_shapes(np.shape(self.index), np.shape(values), np.shape(mask))
        index, mask = self._at(np.broadcast_to(self.index, shape))._checked(mask)
        if self.touched:
            self.touched.write(index[mask])
        self.array[index[mask]] = np.broadcast_to(np.asarray(values), shape)[mask]

    def exchange(self, value: Any, sem: str) -> Any:
        return self._atomic(lambda before: value, sem)

    def add(self, value: Any, sem: str) -> Any:
        return self._atomic(lambda before: before + value, sem)

    def _atomic(self, change: Callable[[Any], Any], sem: str) -> Any:
        HERE.partition.writes_argument(self.name)
        with HERE.partition.order.lock:
            at = int(self.index)
            before, self.array[at] = self.array[at], change(self.array[at])
            HERE.partition.atomic((id(self.array), at), sem)
        return before

    def _at(self, index: Any) -> Pointer:
        return Pointer(self.array, index, self.name, self.touched)

    def _checked(self, mask: Any) -> tuple[Any, Any]:
        """Indices and mask of one shape. IndexError: one that counts is outside."""
        index, mask = np.broadcast_arrays(self.index, mask)
        used = index[mask]
        if used.size and not 0 <= used.min() <= used.max() < self.array.size:
            raise IndexError(f"{used.min()} to {used.max()} of {self.array.size}")
        return np.where(mask, index, 0), mask


class Either:
    """One of two pointers for each element."""

    def __init__(self, condition: Any, first: Pointer, second: Pointer) -> None:
        self.condition, self.pointers = condition, (first, second)

    def __add__(self, index: Any) -> Either:
        return Either(self.condition, *(each + index for each in self.pointers))

    def load(self, mask: Any = True, other: Any = 0) -> Tensor:
        first, second = self.pointers
        return where(
            self.condition,
            first.load(mask & self.condition, other),
            second.load(mask & ~self.condition, other),
        )


def choose(condition: Any, a: Any, b: Any) -> Any:
    """`where`, of anything."""
    if not np.ndim(condition):
        return a if condition else b
    return Either(condition, a, b) if isinstance(a, Pointer) else where(condition, a, b)


class Shared:
    """Shared memory, or a view of a part of it."""

    layout = None

    def __init__(self, data: NDArray[Any], touched: Touched | None = None) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, data.shape
        self.touched = TouchedShared(data) if touched is None else touched

    def index(self, at: Any) -> Shared:
        return self._view(self.data[int(at)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if start < 0 or start + length > self.shape[dim]:
            raise IndexError(f"{length} from {start} on of {self.shape[dim]}")
        return self._view(self.data[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(np.transpose(self.data, order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self.reinterpret(self.dtype, shape)

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any = None) -> Shared:
        if not self.data.flags.c_contiguous:
            raise ValueError("only what lies in one piece has other shapes")
        flat = self.data.reshape(-1).view(np.uint8)
        return self._view(flat[: size_of(dtype, shape)].view(dtype).reshape(shape))

    def load(self, layout: Any = None) -> Tensor:
        self.touched.read(self.data)
        return tensor(self.data.copy())

    def store(self, values: Any) -> None:
        if values.shape != self.shape or values.dtype.itemsize != self.dtype.itemsize:
            raise ValueError(f"{values.dtype}{values.shape} into {self.dtype}{self.shape}")
        self.touched.write(self.data)
        self.data[...] = values.view(self.dtype)

    def _view(self, data: NDArray[Any]) -> Shared:
        return Shared(data, self.touched)


class Barriers:
    """An allocation of them."""

    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self._all[int(at)]


class Descriptor:
    """Of a tensor whose blocks are copied by TMA."""

    layout = None

    def __init__(self, array: NDArray[Any], block: Sequence[int], name: str = "") -> None:
        self.array, self.block_shape, self.dtype = array, list(block), array.dtype
        self.name = name

    def copy(self, at: Sequence[int], place: Shared) -> int:
        """Bytes of a block, with zeros for what lies outside of the tensor."""
        block = tuple(
            slice(start, start + size) for start, size in zip(at, place.shape, strict=True)
        )
        found = self.array[block]
        place.data[...] = np.zeros((), self.dtype)
        place.data[tuple(slice(0, size) for size in found.shape)] = found
        return place.data.nbytes


class Barrier:
    """An mbarrier: a phase ends when so many have arrived, and the bytes that were announced."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._missing = self._bytes = self._phase = 0
        self._copies: list[Callable[[], int]] = []
        self._number = HERE.partition.order.enter("a copy")
        self._arrived = HERE.partition.known.copy()
        self._known = self._arrived

    def begin(self, count: int) -> None:
        self._count = self._missing = count

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        with self._changed:
            np.maximum(self._arrived, HERE.partition.release(), out=self._arrived)
            self._missing -= count
            self._bytes += expected
            if self._missing < 0:
                raise RuntimeError(f"more than {self._count} arrive in phase {self._phase}")
            self._end()

    def copy(
        self,
        copy: Callable[[], int],
        places: Sequence[Shared],
        *,
        arrivals: int = 0,
        tma: bool = True,
        late: bool,
    ) -> None:
        """Into these places. late: when somebody waits for it. After it so many arrive."""

        def made() -> int:
            size = copy()
            self._missing -= arrivals
            return size

        with self._changed:
            self._arrived[KERNELS] |= HERE.partition.known[KERNELS]
            for each in places:
                each.touched.write(each.data, (self._number, self._phase + 1), tma=tma)
            self._copies.append(made)
            if not late:
                self._make_copies()
            self._changed.notify_all()

    def wait(self, parity: int) -> None:
        end = time.monotonic() + PATIENCE
        with self._changed:
            while self._phase & 1 == parity:
                self._make_copies()
                if self._phase & 1 == parity and not self._changed.wait(0.1):
                    self._check(end)
            HERE.partition.learn(self._known)

    def _check(self, end: float) -> None:
        if time.monotonic() > end or HERE.partition.order.failed.is_set():
            raise TimeoutError(
                f"nobody ends phase {self._phase}: {self._missing} of {self._count} have not "
                f"arrived, nor {self._bytes} bytes"
            )

    def _make_copies(self) -> None:
        for copy in self._copies:
            self._bytes -= copy()
        self._copies.clear()
        self._end()

    def _end(self) -> None:
        if self._missing == 0 and self._bytes == 0 and not self._copies:
            self._phase += 1
            self._missing = self._count
            self._known = self._arrived.copy()
            self._known[self._number] = self._phase
            self._changed.notify_all()


def allocate(dtype: Any, shape: Sequence[int], layout: Any = None) -> Shared | Barriers:
    if layout is Barrier:
        return Barriers(shape[0])
    return Shared(unwritten(dtype, shape))
