"""`jaxserve convert --to orbax` and `--to safetensors`, and from Orbax to the engine's format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.cli.options import Options
from jaxserve.models import decoder, registry
from jaxserve.models.tensor_names import rows_of
from jaxserve.weights.model_source import ModelSource
from jaxserve.weights.opening import open_stored_of, quantization
from jaxserve_checkpoints.load import Plain, Progress
from jaxserve_checkpoints.naming import leaf_parts, resolve_rules
from jaxserve_checkpoints.native import METADATA, NativeCheckpoint, open_native
from jaxserve_checkpoints.native_writer import NativeWriter
from jaxserve_checkpoints.orbax.layouts import flax_path
from jaxserve_checkpoints.orbax.writer import MADE_FROM, save_step
from jaxserve_checkpoints.quantized import QuantizedCheckpoint
from jaxserve_checkpoints.reader import SINGLE_FILE, AnyArray, CheckpointError
from jaxserve_checkpoints.unpacked import (
    PublicTensors,
    UnpackedCheckpoint,
    public_configuration,
)

type Named = Plain | UnpackedCheckpoint
"""A checkpoint of tensors with Hugging Face's names."""


class Readable(Protocol):
    """Tensors to write to a file."""

    @property
    def names(self) -> list[str]: ...
    @property
    def nbytes(self) -> int: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> np.dtype[Any]: ...
    def read(self, name: str) -> AnyArray: ...
    def release(self, name: str) -> None: ...


def open_named(options: Options, source: ModelSource, native: NativeCheckpoint | None) -> Named:
    """Opens weights that are not quantised, by Hugging Face's names.

    Raises:
      CheckpointError: the weights are quantised; see `open_stored_of`, `UnpackedCheckpoint`.
    """
    if native is not None:
        abstract = decoder.abstract(source.spec, np.float32, stacked=True)
        rules = registry.rules(source.spec)
        return UnpackedCheckpoint(native, rules, abstract, partial(rows_of, source.spec))
    stored = open_stored_of(source, quantization(options))
    if isinstance(stored, QuantizedCheckpoint):
        raise CheckpointError(
            f"{stored.folder}: quantised ({stored.format.describe()}); only weights that are not "
            "quantised can be converted like this: use the original"
        )
    return stored


def public_tensors(
    source: ModelSource, native: NativeCheckpoint, dtype: np.dtype[Any] | None
) -> PublicTensors:
    """Returns the engine's own quantised weights in a format that other servers also read.

    Raises:
      CheckpointError: see PublicTensors.
    """
    abstract = decoder.abstract(source.spec, np.float32, stacked=True)
    rules = registry.rules(source.spec)
    return PublicTensors(native, rules, abstract, partial(rows_of, source.spec), dtype)


class Tensors:
    """The tensors that the model uses, in order. They are read and cast one by one."""

    def __init__(self, named: Named, source: ModelSource, dtype: np.dtype[Any] | None):
        """`dtype`: None keeps the dtype of each tensor.

        Raises:
          CheckpointError: see `resolve_rules`.
        """
        abstract = decoder.abstract(source.spec, np.float32, stacked=True)
        sources = resolve_rules(registry.rules(source.spec), abstract, named)
        self.names = list(dict.fromkeys(name for each in sources for name in each.tensors))
        self._named = named
        self._dtype = dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return self._named.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Returns the dtype in which a tensor is written."""
        return self._dtype or self._named.dtype(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as written."""
        sizes = ((math.prod(self.shape(name)), self.dtype(name)) for name in self.names)
        return sum(size * dtype.itemsize for size, dtype in sizes)

    def read(self, name: str) -> AnyArray:
        return self._named.read(name).astype(self.dtype(name), copy=False)

    def release(self, name: str) -> None:
        self._named.release(name)


def check_public(source: ModelSource, encoded: decoder.Params) -> None:
    """Raises CheckpointError if no public format can hold such weights.

    Args:
      encoded: the quantised weights as ShapeDtypeStructs, with stacked layers.
    """
    assert source.folder is not None
    abstract = decoder.abstract(source.spec, np.float32, stacked=True)
    rules = registry.rules(source.spec)
    public_configuration(rules, abstract, encoded, partial(rows_of, source.spec), source.folder)


class StoredTensors:
    """The tensors of a checkpoint in which another program has quantised the weights, unchanged."""

    def __init__(self, stored: QuantizedCheckpoint, dtype: np.dtype[Any] | None):
        """`dtype`: for tensors that are not quantised; None keeps each one's own."""
        self._checkpoint = stored.checkpoint
        self._cast = (
            set()
            if dtype is None
            else {name for name in stored.names if stored.module(name) is None}
        )
        self._dtype = dtype

    @property
    def names(self) -> list[str]:
        return list(self._checkpoint.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        chosen = self._dtype if name in self._cast else None
        return chosen or self._checkpoint.dtype(name)

    @property
    def nbytes(self) -> int:
        sizes = ((math.prod(self.shape(name)), self.dtype(name)) for name in self.names)
        return sum(size * dtype.itemsize for size, dtype in sizes)

    def read(self, name: str) -> AnyArray:
        return self._checkpoint.read(name).astype(self.dtype(name), copy=False)

    def release(self, name: str) -> None:
        self._checkpoint.release(name)


def kept_safetensors(out: Path, made_from: Mapping[str, Any]) -> Path | None:
    """Returns the finished and verified file of the same conversion; None if there is none.

    Raises:
      CheckpointError: the file is damaged or comes from another conversion.
    """
    file = out / SINGLE_FILE
    if not file.exists():
        return None
    other = CheckpointError(f"{file} is there already: choose another folder")
    try:
        found = open_native(out, SINGLE_FILE)
    except CheckpointError:
        raise other from None
    if found.description.made_from != made_from:
        raise other
    found.verify()
    return file


def write_config(out: Path, config: Mapping[str, Any], quantization: Mapping[str, Any]) -> None:
    """Writes config.json with the quantisation of the weights. Raises OSError if it cannot be
    written.

    Args:
      config: the model's config; any other quantisation in it is left out.
    """
    kept = {name: value for name, value in config.items() if name not in _QUANTIZATION_KEYS}
    text = json.dumps(kept | {"quantization_config": quantization}, indent=2) + "\n"
    unfinished = out / ".config.json.partial"
    out.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(out / "config.json")
    (out / "hf_quant_config.json").unlink(missing_ok=True)


_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def write_safetensors(
    tensors: Readable, out: Path, made_from: Mapping[str, Any], progress: Progress
) -> Path:
    """Writes one file of tensors with Hugging Face's names. Continues an interrupted call. Returns
    the file.

    Raises:
      CheckpointError, OSError: see NativeWriter.
    """
    entries = {name: _Entry(tensors.shape(name), tensors.dtype(name)) for name in tensors.names}
    with NativeWriter(out, entries, made_from, {}, file=SINGLE_FILE) as writer:
        total, done = tensors.nbytes, 0
        have = writer.written
        for name in tensors.names:
            if name not in have:
                writer.write(name, tensors.read(name))
                tensors.release(name)
            done += math.prod(tensors.shape(name)) * tensors.dtype(name).itemsize
            progress(done, total)
        return writer.finish()


class _Entry:
    """The attributes of a tensor that NativeWriter reads."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self.shape, self.dtype = shape, dtype


def write_flax(
    tensors: Tensors,
    root: Path,
    step: int,
    keep: int | None,
    made_from: str,
    progress: Progress,
) -> Path:
    """Writes a step with the tree of `jaxserve.flax`. Returns its folder.

    The arrays are views of the source's files if only the order of axes changes.

    Raises:
      CheckpointError, OSError: see `save_step`.
    """

    def tree() -> dict[str, Any]:
        total, done = tensors.nbytes, 0
        nested: dict[str, Any] = {}
        for name in tensors.names:
            array = tensors.read(name)
            path, transposed = flax_path(name)
            *outer, last = path
            place = nested
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = array.T if transposed else array
            done += array.nbytes
            progress(done // 2, total)  # afterwards Orbax writes the whole tree
        return nested

    folder = save_step(root, step, tree, keep=keep, added={MADE_FROM: made_from})
    progress(tensors.nbytes, tensors.nbytes)
    return folder


def write_native_step(
    native: NativeCheckpoint,
    root: Path,
    step: int,
    keep: int | None,
    made_from: str,
    progress: Progress,
) -> Path:
    """Writes a step with the engine's own tensors, quantised or not. Returns its folder.

    Raises:
      CheckpointError, OSError: see `save_step`. CheckpointError also if a checksum differs.
    """
    checkpoint = native.tensors
    total = sum(checkpoint.nbytes(name) for name in checkpoint.names)
    native.verify()
    added = {METADATA: native.description.to_json(), MADE_FROM: made_from}

    def tree() -> dict[str, Any]:
        return {name: checkpoint.read(name) for name in checkpoint.names}

    folder = save_step(root, step, tree, keep=keep, added=added)
    progress(total, total)
    return folder


def write_native_file(
    native: NativeCheckpoint, source: ModelSource, out: Path, progress: Progress
) -> Path:
    """Writes the engine's own file from the same tensors in Orbax. Continues an interrupted call.

    Raises:
      CheckpointError, OSError: see NativeWriter. CheckpointError also if a checksum differs.
    """
    checkpoint, description = native.tensors, native.description
    encoded = native.encoded(decoder.abstract(source.spec, np.float32, stacked=True))
    names = [part.path for part in leaf_parts(encoded)]
    entries = {name: _Entry(checkpoint.shape(name), checkpoint.dtype(name)) for name in names}
    total, done = sum(checkpoint.nbytes(name) for name in names), 0
    with NativeWriter(out, entries, description.made_from, description.types) as writer:
        have = writer.written
        for name in names:
            if name not in have:
                writer.write(name, checkpoint.read(name))
            done += checkpoint.nbytes(name)
            progress(done, total)
        file = writer.finish()
    if open_native(out).description.checksums != description.checksums:
        file.unlink()
        native.verify()
        raise CheckpointError(f"{native.place}: read other tensors than the checkpoint has")
    return file
