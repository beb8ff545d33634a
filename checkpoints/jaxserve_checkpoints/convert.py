"""Converts a Hugging Face checkpoint to the engine's own format, one part at a time, on the
device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve_checkpoints.load import (
    Encode,
    Progress,
    Stored,
    encoded_abstract,
    encoded_parts,
    packed_leaves,
)
from jaxserve_checkpoints.naming import LeafPart, leaf_nbytes, leaf_parts, leaf_paths, resolve_rules
from jaxserve_checkpoints.native import FILE, NativeCheckpoint, open_native, types_of
from jaxserve_checkpoints.native_writer import NativeWriter
from jaxserve_checkpoints.reader import CheckpointError
from jaxserve_checkpoints.rules import AnyRule


def convert(
    checkpoint: Stored,
    rules: Sequence[AnyRule],
    abstract: Any,
    encode: Encode,
    folder: Path,
    *,
    made_from: Mapping[str, Any],
    progress: Progress = lambda done, total: None,
    by_layer: bool = True,
) -> Path:
    """Write the weights that `load_params` would return. Returns the file.

    Continues an interrupted call. A finished file with the same `made_from` is verified and kept.
    One part is read while the previous one is written.

    Args:
      made_from: JSON values that identify the source and the settings of the conversion.
      progress: called with bytes written and bytes in all.
      by_layer: see `encoded_parts`.

    Raises:
      CheckpointError: see `resolve_rules`. Also if there is no room, or another conversion exists
        or is in progress.
      OSError: the folder cannot be written.
    """
    found = finished(folder, made_from)
    if found is not None:
        found.verify()
        return folder / FILE
    packed = packed_leaves(checkpoint, resolve_rules(rules, abstract, checkpoint))
    encoded = encoded_abstract(abstract, encode, packed)
    nodes = jax.tree.structure(abstract).flatten_up_to(encoded)
    owners = dict(zip((path for path, _ in leaf_paths(abstract)), nodes, strict=True))
    tensors = {part.path: part.leaf for part in leaf_parts(encoded)}
    with NativeWriter(folder, tensors, made_from, types_of(abstract, encoded)) as writer:
        have = writer.written

        def wanted(part: LeafPart) -> bool:
            return any(name not in have for name, _ in _named(part.path, owners[part.owner]))

        done = sum(leaf_nbytes(tensors[name]) for name in have)
        total = sum(leaf_nbytes(leaf) for leaf in tensors.values())
        progress(done, total)
        with ThreadPoolExecutor(1, thread_name_prefix="write-weights") as pool:
            writing: Future[None] | None = None
            parts = encoded_parts(checkpoint, rules, abstract, encode, wanted, by_layer=by_layer)
            for part, weight in parts:
                arrays = {name: np.asarray(array) for name, array in _named(part.path, weight)}
                if writing is not None:
                    writing.result()
                writing = pool.submit(_write_all, writer, arrays)
                done += sum(array.nbytes for array in arrays.values())
                progress(done, total)
            if writing is not None:
                writing.result()
        return writer.finish()


def finished(folder: Path, made_from: Mapping[str, Any]) -> NativeCheckpoint | None:
    """Returns the finished conversion, unverified; None if there is none.

    Raises:
      CheckpointError: it was made from something else.
    """
    if not (folder / FILE).exists():
        return None
    found = open_native(folder)
    other = found.description.made_from
    unlike = [name for name in made_from if made_from[name] != other.get(name)]
    if unlike:
        raise CheckpointError(
            f"{folder / FILE} is another conversion, with other {', '.join(unlike)}: "
            "choose another folder"
        )
    return found


def _named(path: str, weight: Any) -> list[tuple[str, Any]]:
    """Returns (tensor name, array) of each array of a plain or quantised part."""
    return [(f"{path}.{field}" if field else path, array) for field, array in leaf_paths(weight)]


def _write_all(writer: NativeWriter, arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        writer.write(name, array)
