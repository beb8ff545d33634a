"""The engine's own checkpoint: weights as the engine holds them, quantised and packed.

    FOLDER/jaxserve.safetensors    and config.json, tokenizer files, ... as they were

The file is a safetensors file, so its index is JSON and other tools can read it: one tensor for
each array of each part, "layers.3.qkv.packed". Parts that the engine stacks follow each other, so
that a whole stack is one range of the file; whatever fills whole pages begins on one. The metadata
has, as JSON under "jaxserve", the format's number, which type of weight each leaf is, what it was
made from, and a checksum of every tensor: XXH3 with 64 bits, which finds damage, not intent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from jaxserve_checkpoints.naming import LeafPart, leaf_parts, leaf_paths
from jaxserve_checkpoints.reader import AnyArray, Checkpoint, CheckpointError, read_header
from jaxserve_checkpoints.rules import AnyRule, Rule
from jaxserve_kernels.weights import QUANTIZED, QuantizedWeight

FILE = "jaxserve.safetensors"
FORMAT = 1
"""To be increased when the arrays of a type in `jaxserve_kernels.weights` change their meaning."""

METADATA = "jaxserve"

_TYPES: dict[str, type[QuantizedWeight]] = {kind.__name__: kind for kind in QUANTIZED}
_LAYER = re.compile(r"^layers\.[0-9]+\.")
_HASH_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the metadata says."""

    made_from: Mapping[str, Any]
    """Source and settings; JSON values. Two conversions of equal ones are the same."""
    types: Mapping[str, str]
    """Leaves that are quantised, "layers.qkv" for all layers -> the name of their type."""
    checksums: Mapping[str, str]
    """Of each tensor's bytes, as `checksum` gives it."""

    def to_json(self) -> str:
        content = {
            "format": FORMAT,
            "made_from": self.made_from,
            "types": self.types,
            "checksums": self.checksums,
        }
        return json.dumps(content, sort_keys=True)


@dataclass(frozen=True)
class NativeCheckpoint:
    """An opened one."""

    tensors: Checkpoint
    description: Description

    def encoded[Tree](self, abstract: Tree) -> Tree:
        """The tree of plain ShapeDtypeStructs `abstract` with the file's types of weights in it.

        CheckpointError: a type that is not known, or of another shape than the plain weight.
        """
        firsts = [part for part in leaf_parts(abstract) if not part.layer]
        leaves = [
            self._encoded_leaf(part, leaf)
            for part, (_, leaf) in zip(firsts, leaf_paths(abstract), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def rules(self) -> list[AnyRule]:
        """Each tensor fills the part that it is named after."""
        names = {_LAYER.sub("layers.{layer}.", name) for name in self.tensors.names}
        return [Rule(name, (name,)) for name in sorted(names)]

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """CheckpointError, with their names, if tensors are not what was written.

        Args:
          progress: called with the number of bytes of each tensor.
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
                f"{self.tensors.folder / FILE}: damaged: the checksums of {len(bad)} of "
                f"{len(names)} tensors differ, {bad[0]} is the first; convert it again"
            )

    def _encoded_leaf(self, first: LeafPart, leaf: jax.ShapeDtypeStruct) -> Any:
        """What stands in the place of a leaf, given its first part."""
        name = self.description.types.get(_LAYER.sub("layers.", first.path))
        if name is None:
            return leaf
        if name not in _TYPES:
            raise CheckpointError(
                f"{self.tensors.folder / FILE}: {first.owner} is of type {name}, known are "
                f"{', '.join(_TYPES)}"
            )
        arrays = {field: f"{first.path}.{field}" for field in _TYPES[name]._fields}
        leading = leaf.shape[: len(leaf.shape) - len(first.leaf.shape)]
        fields: dict[str, Any] = {
            field: jax.ShapeDtypeStruct(
                (*leading, *self.tensors.shape(tensor)), self.tensors.dtype(tensor)
            )
            for field, tensor in arrays.items()
            if tensor in self.tensors
        }
        weight = _TYPES[name](**fields)
        if tuple(weight.shape) != tuple(leaf.shape):
            raise CheckpointError(
                f"{self.tensors.folder / FILE}: {first.owner} is {list(weight.shape)}, the model "
                f"needs {list(leaf.shape)}"
            )
        return weight


def open_native(folder: Path) -> NativeCheckpoint:
    """CheckpointError: not there, damaged, or of another version of jaxserve."""
    file = folder / FILE
    try:
        entries, metadata = read_header(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
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
    return NativeCheckpoint(Checkpoint(folder, entries), description)


def types_of(abstract: Any, encoded: Any) -> dict[str, str]:
    """Types of the weights that stand in `encoded` where `abstract` has plain ones."""
    nodes = jax.tree.structure(abstract).flatten_up_to(encoded)
    return {
        _LAYER.sub("layers.", path): type(node).__name__
        for (path, _), node in zip(leaf_paths(abstract), nodes, strict=True)
        if isinstance(node, QUANTIZED)
    }


def checksum(array: AnyArray) -> str:
    """16 hexadecimal digits of a contiguous array's bytes; releases the interpreter."""
    return xxhash.xxh3_64_hexdigest(array.reshape(-1).view(np.uint8))
