"""Reads the tensors of an Orbax checkpoint with tensorstore, the library that Orbax is built on.

Orbax itself restores whole trees. The engine needs one layer of an array at a time, and only until
it is copied to the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve_checkpoints.orbax.folder import OrbaxStep
from jaxserve_checkpoints.orbax.layouts import Layout, Place, layout_of
from jaxserve_checkpoints.reader import AnyArray, CheckpointError
from jaxserve_checkpoints.rules import Shape


class OrbaxCheckpoint:
    """The tensors of one step. Bytes are read when they are used.

    If a chunk of an array holds several layers, the array is read once and kept until all its
    layers are released. Otherwise each layer would read the same chunks again.
    """

    def __init__(self, step: OrbaxStep, stores: Mapping[str, Any], layout: Layout):
        """`stores`: an open tensorstore for each path."""
        self.folder: Path = step.folder
        self.step = step
        self.layout = layout
        self._stores = stores
        self._places = layout.places
        self._shapes = self._checked_shapes()
        layers: dict[str, set[str]] = {}
        for name, place in self._places.items():
            if place.layer is not None and _chunk(stores[place.path], place.axis) > 1:
                layers.setdefault(place.path, set()).add(name)
        self._whole = {path: _Whole(stores[path], names) for path, names in layers.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted."""
        return tuple(sorted(self._places))

    @property
    def in_whole_arrays(self) -> bool:
        """Whether several layers are stored in one piece. If so, read all layers of one kind before
        the next kind."""
        return bool(self._whole)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[self._known(name)]

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(self._store(name).dtype.numpy_dtype)

    @property
    def main_dtype(self) -> np.dtype[Any]:
        """The dtype of the largest tensor."""
        return self.dtype(max(self._places, key=self.nbytes))

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> AnyArray:
        """Returns the tensor. Raises CheckpointError if its bytes are missing or damaged."""
        place = self._places[self._known(name)]
        whole = self._whole.get(place.path)
        try:
            if whole is not None:
                array = whole.array()[_layer(place)]
            else:
                store = self._stores[place.path]
                array = (store if place.layer is None else store[_layer(place)]).read().result()
        except (ValueError, OSError, RuntimeError) as error:
            raise CheckpointError(_damaged(self.folder, place.path, error)) from None
        result: AnyArray = np.asarray(array)
        for form in place.forms:
            result = form.apply(result)
        return result

    def release(self, name: str) -> None:
        """Releases a tensor. An array of several layers is dropped when all of them are
        released."""
        whole = self._whole.get(self._places[self._known(name)].path)
        if whole is not None:
            whole.release(name)

    def _store(self, name: str) -> Any:
        return self._stores[self._places[self._known(name)].path]

    def _known(self, name: str) -> str:
        if name not in self._places:
            raise CheckpointError(f"{self.folder}: no tensor named {name!r}")
        return name

    def _checked_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        problems: dict[str, str] = {}
        for name, place in self._places.items():
            try:
                shapes[name] = place.shape(tuple(self._stores[place.path].shape))
            except ValueError as error:
                problems.setdefault(place.path, f"{place.path}: {error}")
        if problems:
            kind = f"{self.folder}: not of the layout {self.layout.kind}"
            raise CheckpointError("\n  ".join([f"{kind}:", *problems.values()]))
        return shapes


class _Whole:
    """An array that is read once for all of its layers."""

    def __init__(self, store: Any, names: set[str]):
        self._store = store
        self._names = names
        self._left = set(names)
        self._array: AnyArray | None = None
        self._lock = threading.Lock()

    def array(self) -> AnyArray:
        with self._lock:
            if self._array is None:
                self._array = np.asarray(self._store.read().result())
            return self._array

    def release(self, name: str) -> None:
        with self._lock:
            self._left.discard(name)
            if not self._left:
                self._array, self._left = None, set(self._names)


def open_orbax(step: OrbaxStep, config: Mapping[str, Any]) -> OrbaxCheckpoint:
    """Open every array of a step, without reading it.

    Args:
      config: the model's config.json, on which some layouts depend.

    Raises:
      CheckpointError: tensorstore is not installed, arrays are missing or damaged, or the tree is
        of no known layout.
    """
    stores = open_stores(step)
    shapes = {path: tuple(store.shape) for path, store in stores.items()}
    return OrbaxCheckpoint(step, stores, layout_of(shapes, config, step.folder))


def open_plain(step: OrbaxStep) -> OrbaxCheckpoint:
    """Open a step whose arrays are tensors under their own names. CheckpointError: `open_orbax`."""
    stores = open_stores(step)
    return OrbaxCheckpoint(step, stores, Layout("plain", {path: Place(path) for path in stores}))


def open_stores(step: OrbaxStep) -> dict[str, Any]:
    """Returns an open tensorstore for each array, by its keys joined with dots.

    Raises:
      CheckpointError: tensorstore is not installed, or arrays are missing or damaged.
    """
    ts = _tensorstore(step.folder)
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    paths = [".".join(keys) for keys in step.paths]
    opening = [ts.open(_spec(step, path), open=True, read=True, context=context) for path in paths]
    stores: dict[str, Any] = {}
    problems: list[str] = []
    for path, future in zip(paths, opening, strict=True):
        try:
            stores[path] = future.result()
        except (ValueError, OSError, RuntimeError) as error:
            problems.append(_damaged(step.folder, path, error))
    if problems:
        more = f" (and {len(problems) - 1} of {len(paths)} arrays more)" if problems[1:] else ""
        raise CheckpointError(problems[0] + more)
    return stores


def _tensorstore(folder: Path) -> Any:
    try:
        import tensorstore
    except ImportError:
        raise CheckpointError(
            f"{folder}: an Orbax checkpoint, which needs the package orbax-checkpoint: "
            "pip install 'jaxserve[orbax]'"
        ) from None
    return tensorstore


def _spec(step: OrbaxStep, path: str) -> dict[str, Any]:
    files = {"driver": "file", "path": f"{step.folder.resolve()}/"}
    if step.ocdbt:
        stored: dict[str, Any] = {"driver": "ocdbt", "base": files, "path": f"{path}/"}
    else:
        stored = files | {"path": f"{step.folder.resolve()}/{path}/"}
    spec: dict[str, Any] = {"driver": "zarr3" if step.zarr3 else "zarr", "kvstore": stored}
    return spec | {"fill_missing_data_reads": not step.all_chunks}


def _layer(place: Place) -> tuple[Any, ...]:
    return (*(slice(None),) * place.axis, place.layer)


def _chunk(store: Any, axis: int) -> int:
    """Returns how many entries of an axis one chunk holds."""
    shape: tuple[int, ...] = tuple(store.chunk_layout.read_chunk.shape or store.shape)
    return shape[axis] if len(shape) > axis else 1


def _damaged(folder: Path, path: str, error: Exception) -> str:
    """One line about an array that cannot be read."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    missing = "NOT_FOUND" in first
    reason = "its bytes are missing" if missing else first.partition(" [source locations")[0][:300]
    return f"{folder}: {'incomplete' if missing else 'damaged'}: array {path}: {reason}"
