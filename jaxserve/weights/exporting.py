"""`jaxserve convert --to orbax` and `--to safetensors`, and back from Orbax to the engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
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
from jaxserve_checkpoints.unpacked import UnpackedCheckpoint

type Named = Plain | UnpackedCheckpoint
"""Tensors by Hugging Face's names."""


def open_named(options: Options, source: ModelSource, native: NativeCheckpoint | None) -> Named:
    """Open what is to be written with Hugging Face's tensors or Flax's.

    Raises:
      ConfigError: the weights are or would be quantised.
      CheckpointError: see `open_stored_of`, `UnpackedCheckpoint`.
    """
    rules = registry.rules(source.spec)
    if native is not None:
        abstract = decoder.abstract(source.spec, np.float32, stacked=True)
        return UnpackedCheckpoint(native, rules, abstract, partial(rows_of, source.spec))
    wanted = quantization(options)
    stored = open_stored_of(source, wanted)
    if wanted.changes_anything or isinstance(stored, QuantizedCheckpoint):
        raise ConfigError(
            "--to safetensors writes weights that are not quantised: "
            "take --to native or --to orbax, or the original without --quantization"
        )
    return stored


class Tensors:
    """The tensors that the model uses, in order, read and cast one by one."""

    def __init__(self, named: Named, source: ModelSource, dtype: np.dtype[Any] | None):
        """`dtype`: None keeps each tensor's own.

        Raises:
          CheckpointError: see `resolve_rules`.
        """
        abstract = decoder.abstract(source.spec, np.float32, stacked=True)
        sources = resolve_rules(registry.rules(source.spec), abstract, named)
        self.names = list(dict.fromkeys(name for each in sources for name in each.tensors))
        self._named = named
        self._dtype = dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._named.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._dtype or self._named.dtype(name)

    @property
    def nbytes(self) -> int:
        sizes = {name: np.prod(self.shape(name), dtype=int) for name in self.names}
        return sum(int(size) * self.dtype(name).itemsize for name, size in sizes.items())

    def read(self, name: str) -> AnyArray:
        return self._named.read(name).astype(self.dtype(name), copy=False)

    def release(self, name: str) -> None:
        self._named.release(name)


def write_safetensors(
    tensors: Tensors, out: Path, made_from: Mapping[str, Any], progress: Progress
) -> Path:
    """Write one file of Hugging Face's tensors; continues an interrupted call. Returns the file.

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
            done += int(np.prod(tensors.shape(name), dtype=int)) * tensors.dtype(name).itemsize
            progress(done, total)
        return writer.finish()


class _Entry:
    """What NativeWriter reads of a tensor."""

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
    """Write a step with the tree of `jaxserve.flax`. Returns its folder.

    The arrays are views of the source's files where nothing changes but the order of axes.

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
            progress(done // 2, total)  # Orbax writes the whole tree afterwards
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
    """Write a step with the engine's own tensors, quantised or not. Returns its folder.

    Raises:
      CheckpointError, OSError: see `save_step`; a checksum differs.
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
    """Write the engine's own file from the same tensors in Orbax; continues an interrupted call.

    Raises:
      CheckpointError, OSError: see NativeWriter; a checksum differs.
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
