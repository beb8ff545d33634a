"""Loads a parameter tree from a checkpoint: assembles leaves on the host, and copies them to the
device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve_checkpoints.naming import (
    LeafPart,
    LeafSource,
    leaf_nbytes,
    leaf_parts,
    leaf_paths,
    resolve_rules,
)
from jaxserve_checkpoints.orbax import OrbaxCheckpoint
from jaxserve_checkpoints.quantized.modules import PackedModules, QuantizedCheckpoint
from jaxserve_checkpoints.reader import AnyArray, Checkpoint, CheckpointError
from jaxserve_checkpoints.rules import AnyRule

type Progress = Callable[[int, int], None]
"""Called with (bytes on the device, bytes of the whole tree)."""

type Place = Callable[[Any, Any], Any]
"""Puts a host array, or a tree of them, on a device. Arguments: the arrays, and the leaf's sharding
or None."""

type Plain = Checkpoint | OrbaxCheckpoint
"""A checkpoint whose tensors are not quantised."""

type Stored = Plain | QuantizedCheckpoint
"""Any checkpoint. Parts that are stored quantised are decoded, and not encoded again."""

type Encode = Callable[[str, jax.Array], Any]
"""Returns the weight, plain or quantised, that the tree holds for a part. Arguments: the part's
path and its array on the device. It is traced for shapes, and must not depend on the layer in the
path."""

MAX_BYTES_IN_FLIGHT = 1 << 30
"""The most bytes in flight. The runtime's pinned staging memory grows to the peak of unfinished
copies, and is not freed."""

HOST_THREADS = max(4, min(16, os.cpu_count() or 1))
"""Leaves that are assembled at once. Those threads also decompress and transpose Orbax arrays."""

_BLOCK = 256
"""Rows and columns of the blocks in which a transposed matrix is copied: source and target of a
block stay in a core's cache."""


def as_stored(path: str, array: jax.Array) -> jax.Array:
    """The Encode that changes nothing."""
    return array


def load_params[Tree](
    checkpoint: Stored,
    rules: Sequence[AnyRule],
    abstract: Tree,
    *,
    progress: Progress | None = None,
    place: Place = jax.device_put,
    encode: Encode = as_stored,
    max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
) -> Tree:
    """Returns the tree of `abstract` (ShapeDtypeStructs) with arrays of those shapes and dtypes,
    each put through `encode` as soon as it is on the device.

    One group of leaves is assembled on the host while the previous group is copied. Both groups
    together take at most `max_bytes_in_flight`, or two leaves if leaves are larger. Mapped file
    pages are released after copying. On a CPU a leaf that needs no change may stay a view of the
    mapped file.

    Raises:
      CheckpointError: see `resolve_rules`.
    """
    sources = resolve_rules(rules, abstract, checkpoint)
    if _in_whole_arrays(checkpoint):
        sources.sort(key=lambda source: source.rule.leaf)  # all layers of one kind, then the next
    total = sum(leaf_nbytes(source.leaf) for source in sources)
    filling = Filling(abstract, encode, packed_leaves(checkpoint, sources))
    placed: list[LeafSource] = []

    def settle() -> None:
        """Wait for pending copies, then release their file pages."""
        filling.wait()
        release(checkpoint, placed)
        if progress:
            progress(sum(leaf_nbytes(source.leaf) for source in placed), total)

    with ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="load-params") as pool:
        for group in _groups(sources, max_bytes_in_flight // 2):
            host = list(pool.map(lambda source: assemble(checkpoint, source), group))
            settle()
            for array, source in zip(host, group, strict=True):
                filling.put(source.part, place(array, source.leaf.sharding))
            placed += group
    settle()
    return filling.tree()


def load_leaves[Tree](
    checkpoint: Plain, rules: Sequence[AnyRule], abstract: Tree, *, place: Place = jax.device_put
) -> Tree:
    """Like `load_params` without encoding, but compiles nothing: each leaf, even a stacked one, is
    assembled on the host.

    Raises:
      CheckpointError: see `resolve_rules`.
    """
    leaves: dict[str, Any] = {}
    leaves_of = dict(leaf_paths(abstract))
    by_owner: dict[str, list[LeafSource]] = {}
    for source in resolve_rules(rules, abstract, checkpoint):
        by_owner.setdefault(source.part.owner, []).append(source)
    if _in_whole_arrays(checkpoint):
        by_owner = dict(sorted(by_owner.items(), key=lambda each: each[1][0].rule.leaf))
    with ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="load-leaves") as pool:
        for owner, sources in by_owner.items():
            parts: list[Any] = list(pool.map(lambda source: assemble(checkpoint, source), sources))
            shape = leaves_of[owner].shape
            whole = np.stack(parts).reshape(shape) if sources[0].part.place else parts[0]
            leaves[owner] = jax.block_until_ready(place(whole, sources[0].leaf.sharding))
            release(checkpoint, sources)
    ordered = [leaves[path] for path, _ in leaf_paths(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), ordered)


def encoded_parts(
    checkpoint: Stored,
    rules: Sequence[AnyRule],
    abstract: Any,
    encode: Encode,
    wanted: Callable[[LeafPart], bool] = lambda part: True,
    *,
    by_layer: bool = True,
) -> Iterator[tuple[LeafPart, Any]]:
    """Yields the encoded parts of the tree of `load_params`, and reads the next part meanwhile.

    Parts without a layer come first, then layer by layer, stacked or not, because an encoder may
    need earlier layers.

    Args:
      by_layer: False allows another order if that takes much less memory, for checkpoints that
        store several layers in one piece.

    Raises:
      CheckpointError: see `resolve_rules`.
    """
    sources = [each for each in resolve_rules(rules, abstract, checkpoint) if wanted(each.part)]
    if by_layer or not _in_whole_arrays(checkpoint):
        sources.sort(key=lambda source: -1 if source.part.layer is None else source.part.layer)
    else:
        sources.sort(key=lambda source: source.rule.leaf)
    with ThreadPoolExecutor(1, thread_name_prefix="read-weights") as pool:
        host = pool.submit(assemble, checkpoint, sources[0]) if sources else None
        for index, source in enumerate(sources):
            assert host is not None
            array = jax.device_put(host.result(), source.leaf.sharding)
            following = sources[index + 1 : index + 2]
            host = pool.submit(assemble, checkpoint, following[0]) if following else None
            yield source.part, jax.block_until_ready(_encoded(encode, source.path, array))
            release(checkpoint, [source])


class MixedFormats(CheckpointError):
    """Layers that would be stacked are not quantised alike."""


def packed_leaves(checkpoint: Stored, sources: Sequence[LeafSource]) -> dict[str, PackedModules]:
    """Returns the leaves that the checkpoint stores quantised, with ShapeDtypeStructs.

    Raises:
      MixedFormats: layers of one stacked leaf differ.
    """
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return {}
    found: dict[str, PackedModules | None] = {}
    for source in sources:
        packed = checkpoint.packed(source.tensors, source.path, source.transforms, abstract=True)
        packed = None if packed is None else packed.abstract
        if found.setdefault(source.part.owner, packed) != packed:
            raise MixedFormats(
                f"{checkpoint.folder}: {source.path} is not quantised as the same matrix of the "
                "layers before it"
            )
    return {path: packed for path, packed in found.items() if packed is not None}


class Filling[Tree]:
    """A tree of device arrays that is being filled. Stacked leaves are allocated first and filled
    in place, so that the device holds no second copy, and its memory is not fragmented."""

    def __init__(
        self,
        abstract: Tree,
        encode: Encode = as_stored,
        packed: Mapping[str, PackedModules] = MappingProxyType({}),
    ):
        """`packed`: see `packed_leaves`."""
        self._abstract = abstract
        self._encode = encode
        shapes = _encoded_leaves(abstract, encode, packed)
        self._leaves: dict[str, Any] = {}
        for part in leaf_parts(abstract):
            if part.place and not any(part.place):
                zeros = functools.partial(_zeros, part.leaf.sharding)
                self._leaves[part.owner] = jax.tree.map(zeros, shapes[part.owner])

    def put(self, part: LeafPart, array: jax.Array | PackedModules) -> None:
        """Adds one part. Each part of the tree must come exactly once."""
        encoded = _encoded(self._encode, part.path, array)
        if not part.place:
            self._leaves[part.owner] = encoded
        else:
            index = tuple(map(np.int32, part.place))
            self._leaves[part.owner] = jax.tree.map(
                lambda stacked, new: _write(stacked, new, index), self._leaves[part.owner], encoded
            )

    def wait(self) -> None:
        """Blocks until the leaf is complete on the device."""
        jax.block_until_ready(self._leaves)

    def tree(self) -> Tree:
        """Returns the finished tree of encoded leaves."""
        leaves = [self._leaves[path] for path, _ in leaf_paths(self._abstract)]
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)


def encoded_abstract[Tree](
    abstract: Tree,
    encode: Encode,
    packed: Mapping[str, PackedModules] = MappingProxyType({}),
) -> Tree:
    """Returns the shapes and dtypes of `abstract` after `encode`.

    Args:
      packed: see `packed_leaves`.
    """
    leaves = list(_encoded_leaves(abstract, encode, packed).values())
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _encoded(encode: Encode, path: str, array: Any) -> Any:
    return array.decode() if isinstance(array, PackedModules) else encode(path, array)


def _encoded_leaves(
    abstract: Any, encode: Encode, packed: Mapping[str, PackedModules]
) -> dict[str, Any]:
    """Returns the encoded form of each leaf, in leaf order. Stacked leaves keep their leading
    axis."""
    whole = {path: leaf.shape for path, leaf in leaf_paths(abstract)}
    parts: dict[str, LeafPart] = {}
    for part in leaf_parts(abstract):
        parts.setdefault(part.owner, part)
    stored = {owner: packed.get(owner, part.leaf) for owner, part in parts.items()}

    def encode_all(leaves: dict[str, Any]) -> dict[str, Any]:
        return {owner: _encoded(encode, parts[owner].path, leaf) for owner, leaf in leaves.items()}

    shapes = jax.eval_shape(encode_all, stored)  # one trace: each takes milliseconds
    encoded: dict[str, Any] = {}
    for owner, part in parts.items():
        with_leading = functools.partial(_with_leading, whole[owner][: len(part.place)])
        encoded[owner] = jax.tree.map(with_leading, shapes[owner])
    return encoded


def _with_leading(leading: tuple[int, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*leading, *leaf.shape), leaf.dtype, sharding=leaf.sharding)


def _zeros(sharding: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _write(stacked: jax.Array, part: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    start = (*index, *(np.int32(0) for _ in part.shape))
    block = part.reshape((1,) * len(index) + part.shape)
    return jax.lax.dynamic_update_slice(stacked, block, start)


def assemble(checkpoint: Stored, source: LeafSource) -> AnyArray | PackedModules:
    """Returns one leaf on the host: a view of the file if nothing changes, else a new array."""
    if isinstance(checkpoint, QuantizedCheckpoint):
        packed = checkpoint.packed(source.tensors, source.path, source.transforms)
        if packed is not None:
            return packed
        checkpoint = checkpoint.checkpoint
    dtype = np.dtype(source.leaf.dtype)
    parts = [_read(checkpoint, name, source) for name in source.tensors]
    plain = parts[0].flags.aligned and parts[0].flags.c_contiguous
    if len(parts) == 1 and parts[0].dtype == dtype and plain:
        return parts[0]
    result: AnyArray = np.empty(source.leaf.shape, dtype)
    targets = [result]
    if len(parts) > 1:
        edges = np.cumsum([part.shape[source.axis] for part in parts[:-1]])
        targets = np.split(result, edges, source.axis)
    for target, part in zip(targets, parts, strict=True):
        _copy(target, part)
    return result


def _read(checkpoint: Plain, name: str, source: LeafSource) -> AnyArray:
    array = checkpoint.read(name)
    for transform in source.transforms:
        array = transform.apply(array)
    return array


def _copy(target: AnyArray, part: AnyArray) -> None:
    """Copies and casts. Equal dtypes are copied as bytes, without the interpreter's lock (GIL)."""
    if target.dtype == part.dtype and part.ndim:
        bits = np.dtype(f"u{part.dtype.itemsize}")
        target, part = target.view(bits), part.view(bits)
    if part.ndim == 2 and part.strides[0] < part.strides[1]:
        for row in range(0, part.shape[0], _BLOCK):
            for column in range(0, part.shape[1], _BLOCK):
                block = np.s_[row : row + _BLOCK, column : column + _BLOCK]
                np.copyto(target[block], part[block], casting="unsafe")
    else:
        np.copyto(target, part, casting="unsafe")


def _groups(sources: list[LeafSource], limit: int) -> Iterator[list[LeafSource]]:
    """Yields consecutive leaves of at most `limit` bytes together, but at least one leaf."""
    group: list[LeafSource] = []
    size = 0
    for source in sources:
        if group and size + leaf_nbytes(source.leaf) > limit:
            yield group
            group, size = [], 0
        group.append(source)
        size += leaf_nbytes(source.leaf)
    if group:
        yield group


def _in_whole_arrays(checkpoint: Stored) -> bool:
    return isinstance(checkpoint, OrbaxCheckpoint) and checkpoint.in_whole_arrays


def release(checkpoint: Stored, sources: Sequence[LeafSource]) -> None:
    """Releases the memory of tensors that were used."""
    for source in sources:
        for name in source.tensors:
            checkpoint.release(name)
