"""The engine's own checkpoint format: weights as the engine holds them, quantised and packed.

    FOLDER/jaxserve.safetensors    beside config.json, tokenizer files, ... of the source

The file is a safetensors file, which other tools can read. It has one tensor for each array of each
part, "layers.3.qkv.packed". Parts that the engine stacks are adjacent, so a whole stack is one
range of the file. Tensors that fill whole pages begin at a page boundary. The metadata has JSON
under "jaxserve": the format's version, the weight type of each leaf, the source and settings of the
conversion, and a 64-bit XXH3 checksum of every tensor. The checksum detects damage, not tampering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from jaxserve_checkpoints.naming import LeafPart, generic, leaf_parts, leaf_paths, with_words
from jaxserve_checkpoints.orbax import OrbaxCheckpoint, OrbaxStep
from jaxserve_checkpoints.orbax.reader import open_plain
from jaxserve_checkpoints.reader import (
    NATIVE_FILE,
    AnyArray,
    Checkpoint,
    CheckpointError,
    read_header,
)
from jaxserve_checkpoints.rules import AnyRule, Rule
from jaxserve_kernels.weights import is_quantized, layout, types

FILE = NATIVE_FILE
FORMAT = 2
"""Increase this when the arrays of a type in `jaxserve_kernels.weights` change their meaning. In
format 1 MXFP4's codes had another order."""

METADATA = "jaxserve"

_HASH_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Description:
    """The content of the metadata."""

    made_from: Mapping[str, Any]
    """Source and settings as JSON values. Conversions with equal values have equal content."""
    types: Mapping[str, str]
    """Quantised leaves ("layers.qkv" for all layers) -> name of their weight type."""
    checksums: Mapping[str, str]
    """The `checksum` of each tensor's bytes."""

    def to_json(self) -> str:
        """Returns the description as JSON."""
        content = {
            "format": FORMAT,
            "made_from": self.made_from,
            "types": self.types,
            "checksums": self.checksums,
        }
        return json.dumps(content, sort_keys=True)


@dataclass(frozen=True)
class NativeCheckpoint:
    """An opened checkpoint in the engine's own format, or in Orbax with the same tensors."""

    tensors: Checkpoint | OrbaxCheckpoint
    description: Description
    file: str = FILE
    """The file's name. Not used for Orbax."""

    @property
    def place(self) -> Path:
        """The file, or Orbax's folder."""
        folder = self.tensors.folder
        return folder / self.file if isinstance(self.tensors, Checkpoint) else folder

    def encoded[Tree](self, abstract: Tree) -> Tree:
        """Returns the tree of plain ShapeDtypeStructs `abstract` with the file's weight types.

        Raises:
          CheckpointError: a type is unknown, or its shape differs from that of the plain weight.
        """
        firsts = [part for part in leaf_parts(abstract) if not any(part.place)]
        leaves = [
            self._encoded_leaf(part, leaf)
            for part, (_, leaf) in zip(firsts, leaf_paths(abstract), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def part(self, path: str) -> Any:
        """Returns one part on the host, e.g. "layers.3.qkv": an array, or a quantised weight of
        arrays. Call `encoded` first: it checks the types."""
        names = self._arrays(path)
        if names is None:
            return self.tensors.read(path)
        kind = types()[self.description.types[generic(path)]]
        arrays: dict[str, Any] = {field: self.tensors.read(name) for field, name in names.items()}
        return kind(**arrays)

    def release_part(self, path: str) -> None:
        """See Checkpoint.release."""
        for name in (self._arrays(path) or {"": path}).values():
            self.tensors.release(name)

    def _arrays(self, path: str) -> dict[str, str] | None:
        """Returns the tensors of a quantised part by field; None: it is not quantised."""
        name = self.description.types.get(generic(path))
        if name is None:
            return None
        arrays = {field: f"{path}.{field}" for field in types()[name]._fields}
        return {field: tensor for field, tensor in arrays.items() if tensor in self.tensors}

    def rules(self) -> list[AnyRule]:
        """Returns rules that map each tensor to the part with its name."""
        names = {with_words(name) for name in self.tensors.names}
        return [Rule(name, (name,)) for name in sorted(names)]

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """Check all tensors against their checksums.

        Args:
          progress: called with the number of bytes of each tensor.

        Raises:
          CheckpointError: checksums differ. The message names the first damaged tensor.
        """

        def damaged(name: str) -> bool:
            expected = self.description.checksums.get(name)
            same = checksum(self.tensors.read(name)) == expected
            self.tensors.release(name)
            progress(self.tensors.nbytes(name))
            return not same

        names = self.tensors.names
        with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="checksums") as pool:
            bad = [
                name for name, wrong in zip(names, pool.map(damaged, names), strict=True) if wrong
            ]
        if bad:
            raise CheckpointError(
                f"{self.place}: damaged: the checksums of {len(bad)} of "
                f"{len(names)} tensors differ, {bad[0]} is the first; convert it again"
            )

    def _encoded_leaf(self, first: LeafPart, leaf: jax.ShapeDtypeStruct) -> Any:
        """Returns the encoded form of a leaf, given its first part."""
        name = self.description.types.get(generic(first.path))
        if name is None:
            return leaf
        if name not in types():
            raise CheckpointError(
                f"{self.place}: {first.owner} is of type {name}, known are {', '.join(types())}"
            )
        arrays = self._arrays(first.path) or {}
        leading = leaf.shape[: len(leaf.shape) - len(first.leaf.shape)]
        fields: dict[str, Any] = {
            field: jax.ShapeDtypeStruct(
                (*leading, *self.tensors.shape(tensor)), self.tensors.dtype(tensor)
            )
            for field, tensor in arrays.items()
        }
        kind = types()[name]
        lacking = set(kind._fields) - set(kind._field_defaults) - set(fields)
        if lacking:
            raise CheckpointError(
                f"{self.place}: {first.owner} is of type {name}, but has no {min(lacking)}; an "
                "earlier version wrote it: convert the original again"
            )
        weight = kind(**fields)
        if not _stands_for(tuple(weight.shape), tuple(leaf.shape)):
            raise CheckpointError(
                f"{self.place}: {first.owner} is {list(weight.shape)}, the model "
                f"needs {list(leaf.shape)}"
            )
        return weight


def _stands_for(shape: tuple[int, ...], plain: tuple[int, ...]) -> bool:
    """Whether a quantised weight of this shape may replace a plain one. It may have more inputs,
    padded to the multiple that kernels need."""
    return shape[:-1] == plain[:-1] and 0 <= shape[-1] - plain[-1] < layout.TILE_IN


def open_native(folder: Path, name: str = FILE) -> NativeCheckpoint:
    """Opens a folder's file.

    Raises:
      CheckpointError: it is missing, damaged or of another version.
    """
    file = folder / name
    try:
        entries, metadata = read_header(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    return NativeCheckpoint(Checkpoint(folder, entries), _description(file, metadata), name)


def is_native(step: OrbaxStep) -> bool:
    """Returns whether an Orbax checkpoint holds tensors in the engine's own format."""
    return METADATA in step.added


def open_native_step(step: OrbaxStep) -> NativeCheckpoint:
    """Opens an Orbax checkpoint of tensors in the engine's own format.

    Raises:
      CheckpointError: see `open_native`.
    """
    return NativeCheckpoint(open_plain(step), _description(step.root, step.added))


def _description(file: Path, metadata: Mapping[str, Any]) -> Description:
    """Parses the metadata. CheckpointError: it is missing, or of another version."""
    try:
        content = json.loads(metadata[METADATA])
        number = content["format"]
        description = Description(
            made_from=content["made_from"], types=content["types"], checksums=content["checksums"]
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(f"{file}: not written by jaxserve convert") from None
    if number != FORMAT:
        raise CheckpointError(
            f"{file}: of format {number}, this version reads {FORMAT}; convert the original again"
        )
    return description


def types_of(abstract: Any, encoded: Any) -> dict[str, str]:
    """Returns the types of the weights in `encoded` where `abstract` has plain ones."""
    nodes = jax.tree.structure(abstract).flatten_up_to(encoded)
    return {
        generic(path): type(node).__name__
        for (path, _), node in zip(leaf_paths(abstract), nodes, strict=True)
        if is_quantized(node)
    }


def checksum(array: AnyArray) -> str:
    """Returns the XXH3 checksum of a contiguous array's bytes as 16 hexadecimal digits. Releases
    the interpreter's lock (GIL)."""
    return xxhash.xxh3_64_hexdigest(array.reshape(-1).view(np.uint8))
