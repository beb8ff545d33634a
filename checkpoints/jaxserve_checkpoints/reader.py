"""Hugging Face safetensors folders as lazily mapped numpy arrays, without torch.

A safetensors file is an 8-byte little-endian header length, a JSON header that gives dtype,
shape and byte range of every tensor, and then the bytes of all tensors without gaps.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

type AnyArray = NDArray[Any]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NATIVE_FILE = "jaxserve.safetensors"
"""File name of the engine's own format: see `native`."""

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""dtypes by their names in safetensors: those that fill whole bytes. Stored little-endian."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LFS_MAGIC = b"version https://git-lfs"
_MAX_LISTED = 20


class CheckpointError(Exception):
    """A model folder or name cannot be used. The message names it and the problem."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """The location of one tensor: bytes [start, end) of `file`."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class Segment(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file."""

    file: Path
    offset: int
    nbytes: int


class Checkpoint:
    """The tensors of one folder. Files are mapped, so bytes are read when they are used."""

    def __init__(self, folder: Path, entries: dict[str, TensorEntry]) -> None:
        self.folder = folder
        self._entries = entries
        self._maps = {file: _map(file) for file in {entry.file for entry in entries.values()}}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, as stored."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Returns the dtype of a tensor."""
        return self._entry(name).dtype

    @property
    def main_dtype(self) -> np.dtype[Any]:
        """The dtype of the largest tensor."""
        return max(self._entries.values(), key=lambda entry: entry.end - entry.start).dtype

    def nbytes(self, name: str) -> int:
        """Returns the bytes of a tensor in its file."""
        entry = self._entry(name)
        return entry.end - entry.start

    def segment(self, name: str) -> Segment:
        """Returns the location of the tensor's bytes."""
        entry = self._entry(name)
        return Segment(entry.file, entry.start, entry.end - entry.start)

    def read(self, name: str) -> AnyArray:
        """Read-only view of the mapped file: no copy, valid as long as the caller holds it."""
        entry = self._entry(name)
        return np.ndarray(
            entry.shape, entry.dtype, buffer=self._maps[entry.file], offset=entry.start
        )

    def release(self, name: str) -> None:
        """Removes the tensor's pages from this process's resident memory.

        Views stay valid: touching them brings the bytes back from the page cache or the disk.
        """
        entry = self._entry(name)
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = entry.end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, start, end - start)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: no tensor named {name!r}") from None


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Maps `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Checks all headers against the sizes of their files, so that later reads cannot fail.

    Raises:
      CheckpointError: the folder or shards are missing, files are truncated or corrupt, or index
        and shards disagree.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}: {what}")
    if (folder / SINGLE_FILE).exists():
        return Checkpoint(folder, _merge(folder, [folder / SINGLE_FILE]))
    if not (folder / INDEX_FILE).exists():
        raise CheckpointError(_nothing_to_open(folder))
    weight_map = _read_index(folder / INDEX_FILE)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing: {_listed(missing)}"
        )
    entries = _merge(folder, [folder / shard for shard in shards])
    absent = sorted(weight_map.keys() - entries.keys())
    if absent:
        raise CheckpointError(
            f"{folder / INDEX_FILE}: names {len(absent)} tensors that no shard holds: "
            f"{_listed(absent)}"
        )
    return Checkpoint(folder, entries)


def _nothing_to_open(folder: Path) -> str:
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    found = f"found only {_listed(files)}" if files else "the folder holds no files"
    return f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; {found}"


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name → shard file name, from an index file."""
    try:
        index: Any = json.loads(path.read_bytes(), object_pairs_hook=_no_duplicates)
        weight_map: Any = index["weight_map"]
        items: list[tuple[str, Any]] = list(weight_map.items())
    except _DuplicateKey as error:
        raise CheckpointError(f"{path}: tensor {error} is listed twice") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: has no 'weight_map' from tensors to files") from None
    strange = [
        f"{name!r} in {file!r}"
        for name, file in items
        if not isinstance(file, str) or Path(file).name != file
    ]
    if strange or not items:
        what = f"shards must be file names: {_listed(strange)}" if strange else "names no tensors"
        raise CheckpointError(f"{path}: {what}")
    return dict(items)


def _merge(folder: Path, files: list[Path]) -> dict[str, TensorEntry]:
    """Tensors of all files; a name may occur once."""
    merged: dict[str, TensorEntry] = {}
    twice: list[str] = []
    for file in files:
        for name, entry in read_header(file)[0].items():
            if name in merged:
                twice.append(f"{name} (in {merged[name].file.name} and {file.name})")
            merged[name] = entry
    if twice:
        raise CheckpointError(f"{folder}: {len(twice)} duplicate tensors: {_listed(twice)}")
    return merged


def read_header(file: Path) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Parses and checks one file's header. Returns its tensors and its metadata.

    Offsets in the result count from the file's start.

    Raises:
      CheckpointError: the file is truncated or corrupt.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(len(_LFS_MAGIC))
        if prefix == _LFS_MAGIC:
            raise CheckpointError(
                f"{file}: a Git LFS pointer of {size} bytes, not the weights; run `git lfs pull`"
            )
        if size < _LENGTH_BYTES:
            raise CheckpointError(
                f"{file}: truncated: {size} bytes, the header length alone takes {_LENGTH_BYTES}"
            )
        length = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file}: corrupt header: its length reads {length}, allowed are up to "
                f"{_MAX_HEADER_BYTES}"
            )
        data_start = _LENGTH_BYTES + length
        if data_start > size:
            raise CheckpointError(
                f"{file}: truncated: {size} bytes, the header alone ends at {data_start}"
            )
        stream.seek(_LENGTH_BYTES)
        header = _parse_header(file, stream.read(length))
    entries = {
        name: _entry(file, name, fields, data_start)
        for name, fields in header.items()
        if name != "__metadata__"
    }
    _check_layout(file, entries, data_start, size)
    return entries, header.get("__metadata__") or {}


def _parse_header(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header: Any = json.loads(text, object_pairs_hook=_no_duplicates)
    except _DuplicateKey as error:
        raise CheckpointError(f"{file}: corrupt header: key {error} occurs twice") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: corrupt header: not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: corrupt header: not a JSON object")
    return cast(dict[str, Any], header)


def _entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    """Parses one header entry, and checks its byte count against its shape."""
    fields = _fields(value)
    if fields is None:
        raise CheckpointError(f"{file}: corrupt header: entry of tensor {name!r} is {value!r:.200}")
    code, shape, start, end = fields
    if code not in DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {code!r}, supported are {', '.join(DTYPES)}"
        )
    dtype = DTYPES[code]
    nbytes = math.prod(shape) * dtype.itemsize
    if end - start != nbytes:
        raise CheckpointError(
            f"{file}: corrupt header: tensor {name!r} of {code} {list(shape)} takes {nbytes} "
            f"bytes, its offsets [{start}, {end}] span {end - start}"
        )
    return TensorEntry(
        file=file, dtype=dtype, shape=shape, start=data_start + start, end=data_start + end
    )


def _fields(value: Any) -> tuple[str, tuple[int, ...], int, int] | None:
    """dtype, shape, start and end of a header entry; None if it is malformed."""
    try:
        code, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        return None
    numbers_ok = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    return (code, shape, start, end) if isinstance(code, str) and numbers_ok else None


def _check_layout(file: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """Checks that tensors follow each other without gap or overlap, up to the end of the file."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise CheckpointError(
                f"{file}: corrupt header: tensor {name!r} starts at byte {entry.start}, "
                f"the one before it ends at {position}"
            )
        position = entry.end
    if position != size:
        what = "truncated" if position > size else "trailing bytes"
        raise CheckpointError(f"{file}: {what}: expected {position} bytes, the file has {size}")


class _DuplicateKey(Exception):
    """A JSON object holds the same key twice."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKey(repr(key))
        result[key] = value
    return result


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _listed(items: Iterable[str]) -> str:
    """At most 20 items, with the number of those left out."""
    names = list(items)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
