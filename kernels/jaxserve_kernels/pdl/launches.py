"""The launches of a call: how they are packed into a program's bytes, unpacked and run."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import struct
import zlib
from collections.abc import Sequence, Set
from ctypes import byref, c_uint32, c_void_p
from typing import Any, NamedTuple

import numpy as np

from jaxserve_kernels import cuda_driver, ptxas
from jaxserve_kernels.cuda_driver import check
from jaxserve_kernels.pdl import c_types
from jaxserve_kernels.pdl.plan import Place
from jaxserve_kernels.tensor_map import Encoded, TensorMap

type Number = tuple[str, int | float]
"""A format character of `struct`, and a value."""


class Mapped(NamedTuple):
    """A buffer of which a kernel takes a tensor map."""

    place: Place
    tensor: TensorMap


class Launch(NamedTuple):
    """One kernel of a call."""

    code: ptxas.Code
    grid: tuple[int, int, int]
    parameters: tuple[Place | Number | Mapped, ...]
    """In the order of the kernel's signature."""
    cluster: int = 1
    """Programs of a thread block cluster, along the grid's first axis."""
    early: bool = True
    """Its programs run beside those of the kernel before."""


def pack(launches: Sequence[Launch], zeroed_bytes: int = 0, known: Set[str] = frozenset()) -> bytes:
    """Serialises launches. The result begins with a digest, the key of the launches at run time.

    Args:
      zeroed_bytes: how many bytes at the beginning of the last buffer (scratch) are set to zero
        before the first launch.
      known: digests of codes (`digests`) that calls before this one hold, so it only names them.
    """
    codes = {launch.code: launch.early for launch in launches}
    index = {code: number for number, code in enumerate(codes)}
    names = [_digest(assembled(code)) for code in codes]
    cubins = [
        b"" if name in known else assembled(code) for code, name in zip(codes, names, strict=True)
    ]
    head = {
        "kernels": [
            (code.name, 32 * code.warps, code.shared_bytes, early, len(cubin), name)
            for (code, early), name, cubin in zip(codes.items(), names, cubins, strict=True)
        ],
        "launches": [
            (index[each.code], each.grid, each.cluster, each.parameters) for each in launches
        ],
        "zeroed_bytes": zeroed_bytes,
    }
    text = json.dumps(head).encode()
    body = zlib.compress(struct.pack("<I", len(text)) + text + b"".join(cubins))
    return hashlib.sha256(body).digest() + body


def digests(launches: Sequence[Launch]) -> frozenset[str]:
    """Of the kernels' machine codes."""
    return frozenset(_digest(assembled(code)) for code in {launch.code for launch in launches})


@functools.lru_cache(maxsize=256)
def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


DIGEST_BYTES = hashlib.sha256().digest_size


@functools.cache
def assembled(code: ptxas.Code) -> bytes:
    """A kernel's machine code.

    Raises:
      RuntimeError, ptxas.Refused: it has none.
    """
    cubin = ptxas.assemble(code.ptx, code.compute_capability)
    if cubin is None:
        raise RuntimeError(
            f"CUDA's ptxas, which compiles {code.name}, is not on the path or has failed: install "
            "the CUDA toolkit, or nvidia-cuda-nvcc beside jax"
        )
    return cubin


class _Kernel(NamedTuple):
    name: str
    threads: int
    shared_bytes: int
    early: bool
    digest: str
    """Of its code, the key in `_cubins`."""


_cubins: dict[str, bytes] = {}
"""The machine code of all calls so far."""


class Launches:
    """Launches with prepared C arguments. A new run only changes the buffers' addresses."""

    def __init__(self, body: bytes):
        """
        Args:
          body: the bytes of `pack` after the digest.
        """
        body = zlib.decompress(body)
        (length,) = struct.unpack_from("<I", body)
        head = json.loads(body[4 : 4 + length])
        at = 4 + length
        self._kernels: list[_Kernel] = []
        for name, threads, shared_bytes, early, size, digest in head["kernels"]:
            if size:
                _cubins[digest] = body[at : at + size]
            self._kernels.append(_Kernel(name, threads, shared_bytes, early, digest))
            at += size
        self._functions: list[Any] = []
        parameters = [each for *_, launch in head["launches"] for each in launch]
        places = sorted({place for each in parameters if (place := _place(each))})
        self._index = {place: index for index, place in enumerate(places)}
        self._buffers = np.array([buffer for buffer, _ in places], np.int64)
        self._offsets = np.array([offset for _, offset in places], np.uint64)
        self._addresses = np.zeros(len(places) + 1, np.uint64)  # the last one stays null
        self._numbers: list[Any] = []  # keeps them alive: C points to them
        self._maps: list[tuple[int, Encoded]] = []  # index of an address, and the map of its array
        self._zeroed_bytes: int = head["zeroed_bytes"]
        self._launches = [self._prepare(*launch) for launch in head["launches"]]
        self._launches[0][1].num_attributes -= 1  # the kernels before the call have ended

    def _prepare(
        self, index: int, grid: list[int], cluster: int, parameters: list[Any]
    ) -> tuple[int, Any, Any]:
        slots = self._addresses.ctypes.data
        null = slots + 8 * len(self._index)
        arguments: list[int] = []
        for kind, value in parameters:
            if isinstance(kind, int):
                arguments.append(slots + 8 * self._index[kind, value])
            elif isinstance(kind, list):
                encoded = Encoded(TensorMap(*value))
                self._maps.append((self._index[tuple(kind)], encoded))
                arguments.append(encoded.address)
            else:
                number = ctypes.create_string_buffer(struct.pack(f"={kind}", value))
                self._numbers.append(number)
                arguments.append(ctypes.addressof(number))
        # Triton appends pointers to two scratch buffers, which these kernels do not use.
        pointers = (c_void_p * (len(arguments) + 2))(*arguments, null, null)
        kernel = self._kernels[index]
        attributes = c_types.attributes(cluster)
        config = c_types.LaunchConfig(
            grid=(c_uint32 * 3)(*grid),
            block=(c_uint32 * 3)(kernel.threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            attributes=attributes,
            num_attributes=len(attributes),
        )
        return index, config, pointers

    def launch(self, buffers: Sequence[int], stream: int) -> None:
        """Launches all kernels on a stream of the current context.

        Args:
          buffers: addresses of the call's operands, then of its results.
        """
        self._functions = self._functions or [_load(kernel) for kernel in self._kernels]
        self._addresses[:-1] = np.array(buffers, np.uint64)[self._buffers] + self._offsets
        for index, encoded in self._maps:
            encoded.encode(int(self._addresses[index]))
        if self._zeroed_bytes:
            where = ctypes.c_uint64(buffers[-1])
            size = ctypes.c_size_t(self._zeroed_bytes)
            status = cuda_driver.locked_library().cuMemsetD8Async(where, 0, size, c_void_p(stream))
            check(status, "cuMemsetD8Async")
        launch = cuda_driver.locked_library().cuLaunchKernelEx
        for index, config, arguments in self._launches:
            config.stream = stream
            status = launch(byref(config), self._functions[index], arguments, None)
            check(status, f"the launch of {self._kernels[index].name}")


def _place(parameter: list[Any]) -> tuple[int, int] | None:
    """The place of a parameter that is a buffer or its map. None for numbers."""
    found = parameter[0] if isinstance(parameter[0], list) else parameter
    return (found[0], found[1]) if isinstance(found[0], int) else None


@functools.cache
def _load(kernel: _Kernel) -> c_void_p:
    """Loads a kernel on the device of the current context. A process has one device."""
    module, function = c_void_p(), c_void_p()
    cuda = cuda_driver.locked_library()
    check(cuda.cuModuleLoadData(byref(module), _cubins[kernel.digest]), "cuModuleLoadData")
    name = kernel.name.encode()
    check(cuda.cuModuleGetFunction(byref(function), module, name), "cuModuleGetFunction")
    attributes = [(c_types.MAX_SHARED_BYTES, kernel.shared_bytes)]
    if kernel.early:
        # Kernels share a multiprocessor only if they ask for the same split of its memory into
        # shared memory and L1 cache. Others are faster with more of the cache.
        attributes.append((c_types.SHARED_CARVEOUT, 100))
    for attribute, value in attributes:
        check(cuda.cuFuncSetAttribute(function, attribute, value), "cuFuncSetAttribute")
    return function
