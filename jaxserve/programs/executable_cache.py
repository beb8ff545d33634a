"""The cache of compiled programs on disk.

    FOLDER/<model and key>/manifest.json    the key, and a list of the files
                           decode_16.exe    one line of JSON, then a pickled executable

Files are written under a temporary name and renamed, so a file is complete or absent. A header
holds the key, the length and the SHA-256 of the payload. The payload is unpickled only if all of
them match and no other user can write the file, because pickles run code: see SECURITY.md.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import pickle
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxserve_kernels import pdl, records

log = logging.getLogger(__name__)

type Executable = jax.stages.Compiled

type Key = Mapping[str, Any]
"""Everything that a program depends on, except its own arguments. JSON values."""

NOT_THERE = "not there"
"""The reason for a program that was never stored."""

_FORMAT = "jaxserve executable 1"
_MANIFEST = "manifest.json"
_STALE_SECONDS = 3600.0
"""Age in seconds after which an unfinished file has no writer any more."""
_DAMAGED = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""Exceptions that reading an untrusted file may raise."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function of arrays, and the shapes to compile it for."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of ShapeDtypeStruct."""
    donated: tuple[int, ...] = ()
    details: str = ""
    """Further inputs of the compiled code, for example static arguments."""
    work: float = 0.05
    """Relative cost of compiling, in model steps; used for estimates."""
    compiler_options: Mapping[str, int] = field(default_factory=dict[str, int])
    """XLA options besides XLA_FLAGS. The digest does not contain them, so the cache's key must."""

    def compile(self) -> Executable:
        """Compiles the program. If jaxlib does not accept shared machine code of Triton kernels,
        each call of a kernel assembles its own."""
        try:
            return self._lowered().compile(dict(self.compiler_options))
        except jax.errors.JaxRuntimeError as error:
            no_kernels = "jaxserve_kernels.triton_call" not in sys.modules
            if no_kernels or records.hold_source():
                raise
            log.warning("%s is compiled again, with PTX in every call: %s", self.name, error)
            with records.with_source():
                return self._lowered().compile(dict(self.compiler_options))

    def _lowered(self) -> jax.stages.Lowered:
        named = _named(self.function, self.name)
        return jax.jit(named, donate_argnums=self.donated).lower(*self.arguments)

    @property
    def digest(self) -> str:
        """Returns a digest that distinguishes programs with the same key."""
        shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape}", self.arguments)
        return _digest([self.name, self.donated, self.details, repr(shapes)])


class Unusable(Exception):
    """A cache entry must not be used. The message says why."""


class ExecutableCache:
    """Executables of one key in one folder. Any number of processes may read and write it."""

    def __init__(self, folder: Path, key: Key, title: str):
        """Returns a cache. Touches no file.

        Args:
          folder: folder for the entries of all keys; created if missing.
          key: see Key.
          title: prefix of the name of this key's folder, for people.
        """
        self._key = dict(key)
        self._digest = _digest(self._key)
        self._folder = folder / f"{title}-{self._digest[:16]}"
        self._parent = folder

    @property
    def folder(self) -> Path:
        """Folder of the executables of this key."""
        return self._folder

    def load(self, program: Program) -> Executable:
        """Returns the program's executable. Raises Unusable if no usable one exists."""
        payload = self._read(program)
        if jax.default_backend() == "gpu":
            pdl.register()
        try:
            blob, in_tree, out_tree = pickle.loads(payload)
            if b"lapack_" in blob:
                _find_lapack()
            return deserialize_and_load(
                blob, in_tree, out_tree, execution_devices=jax.devices()[:1]
            )
        except Exception as error:  # a changed class or runtime may raise anything
            raise Unusable(
                f"cannot be loaded ({type(error).__name__}: {str(error)[:200]})"
            ) from error

    def has(self, program: Program) -> bool:
        """Returns whether an entry exists. `check` and `load` say whether it is usable."""
        return self._path(program).exists()

    def check(self, program: Program) -> None:
        """Raises Unusable if `load` would, without loading the program."""
        self._read(program)

    def store(self, program: Program, executable: Executable, seconds: float) -> None:
        """Stores an executable that took `seconds` to compile. Raises OSError if it cannot be
        written."""
        payload = pickle.dumps(serialize(executable))
        header = {
            "format": _FORMAT,
            "key": self._digest,
            "program": program.digest,
            "name": program.name,
            "seconds": round(seconds, 3),
            "size": len(payload),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_atomically(self._path(program), json.dumps(header).encode() + b"\n" + payload)

    def write_manifest(self) -> None:
        """Writes the key and the list of files to the folder. Raises OSError like `store`."""
        entries = {
            header["name"]: {name: header[name] for name in ("size", "sha256", "seconds")}
            for header in self._headers()
        }
        content = {"format": _FORMAT, "key": self._key, "programs": entries}
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        _write_atomically(self._folder / _MANIFEST, text.encode())

    def compile_seconds(self) -> dict[str, float]:
        """Returns the compile times of programs in seconds, by name, under any key; for
        estimates."""
        found: dict[str, float] = {}
        for manifest in self._manifests():
            for name, entry in manifest["programs"].items():
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    found.setdefault(name, float(entry["seconds"]))
        return found

    def differences(self) -> str:
        """Returns how the most similar other key differs, which explains why its entries are
        unusable."""
        nearest: list[str] | None = None
        for manifest in self._manifests():
            other = manifest["key"]
            names = sorted(self._key.keys() | other.keys())
            unlike = [name for name in names if self._key.get(name) != other.get(name)]
            if unlike and (nearest is None or len(unlike) < len(nearest)):
                nearest = [
                    f"{name} is {_short(other.get(name))}, not {_short(self._key.get(name))}"
                    for name in unlike
                ]
        return "; ".join(nearest or [])

    def prepare(self) -> None:
        """Creates the folder and deletes files of killed writers. Raises OSError if that fails."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in self._folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > _STALE_SECONDS:
                    file.unlink()

    def _path(self, program: Program) -> Path:
        return self._folder / f"{program.name}.exe"

    def _read(self, program: Program) -> bytes:
        """Returns the verified payload of an entry."""
        content = _read_own_file(self._path(program))
        head, newline, payload = content.partition(b"\n")
        try:
            header = json.loads(head)
            expected = (header["format"], header["key"], header["program"])
            size, checksum = header["size"], header["sha256"]
        except _DAMAGED:
            raise Unusable("damaged: no readable header") from None
        if not newline or expected != (_FORMAT, self._digest, program.digest):
            raise Unusable("of another version, device or configuration")
        if len(payload) != size:
            raise Unusable(f"damaged: {len(payload)} bytes, its header says {size}")
        if hashlib.sha256(payload).hexdigest() != checksum:
            raise Unusable("damaged: its checksum differs")
        return payload

    def _headers(self) -> Iterator[dict[str, Any]]:
        for file in sorted(self._folder.glob("*.exe")):
            with contextlib.suppress(*_DAMAGED), _open_regular(file) as stream:
                header = json.loads(stream.readline())
                if header["key"] == self._digest:
                    yield header

    def _manifests(self) -> Iterator[dict[str, Any]]:
        """Yields the manifests of this format for all keys. Skips folders of other versions."""
        for file in sorted(self._parent.glob(f"*/{_MANIFEST}")):
            with contextlib.suppress(*_DAMAGED), _open_regular(file) as stream:
                manifest = json.loads(stream.read())
                parts = manifest["key"], manifest["programs"]
                if manifest["format"] == _FORMAT and all(isinstance(p, dict) for p in parts):
                    yield manifest


def _open_regular(path: Path) -> BinaryIO:
    """Opens a regular file. Raises OSError if it is missing, a link or not regular. Never blocks,
    as opening a FIFO would."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def _read_own_file(path: Path) -> bytes:
    """Returns the content of a regular file that only this user can write."""
    try:
        folder = path.parent.stat()
        stream = _open_regular(path)
    except FileNotFoundError:
        raise Unusable(NOT_THERE) from None
    except OSError as error:
        raise Unusable(f"cannot be opened ({error.strerror})") from None
    with stream:
        for what, status in (("its folder", folder), ("it", os.fstat(stream.fileno()))):
            if status.st_uid != os.geteuid():
                raise Unusable(f"not trusted: {what} belongs to user {status.st_uid}")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise Unusable(f"not trusted: other users may write {what}")
        try:
            return stream.read()
        except OSError as error:
            raise Unusable(f"cannot be read ({error.strerror})") from None


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@functools.cache
def _find_lapack() -> None:
    """Lowers a call of LAPACK. JAX finds its functions then, on a CPU. A program that is loaded
    would call address 0 without them."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.jit(jax.lax.linalg.triangular_solve).lower(one, one)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the function under a name that profiles and dumps show."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = name
    return call
