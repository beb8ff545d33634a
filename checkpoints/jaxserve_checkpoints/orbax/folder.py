"""Finds the checkpoint in a folder written by Orbax, from its JSON files. Needs no orbax package.

    FOLDER/                       of a CheckpointManager: a folder per step
      config.json                 of the model: here, or beside the arrays
      120/                        a step; its name may have a prefix, "checkpoint_120"
        _CHECKPOINT_METADATA      times of the save, and what its caller added
        default/                  an item: "default", or the name that the trainer chose
          _METADATA               the tree: a path for each array
          manifest.ocdbt, d/, …   the arrays in OCDBT; without it, a folder of zarr for each array

A Checkpointer writes the item's files into the folder that it is given. While Orbax writes, the
folder's name ends with ".orbax-checkpoint-tmp" and a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jaxserve_checkpoints.reader import CheckpointError

TREE_FILE, STEP_FILE = "_METADATA", "_CHECKPOINT_METADATA"
_MANIFEST = "manifest.ocdbt"
_STEP_NAME = re.compile(r"(?:.*[^0-9])?([0-9]+)")
_UNFINISHED = ".orbax-checkpoint-tmp"
_MODEL_ITEMS = ("params", "model_params", "model", "state", "items", "default")
"""Names of the model's item if a step has several items, the likeliest first. "default" is Orbax's,
"items" MaxText's, "model_params" Tunix's; the others are in common use."""


@dataclass(frozen=True, kw_only=True)
class OrbaxStep:
    """One complete checkpoint, whose arrays have not been read."""

    folder: Path
    """The folder that holds the arrays."""
    root: Path
    """The folder of the step, which is `folder` unless the checkpoint has items."""
    step: int | None
    """The step's number; None if the folder's name has none."""
    paths: tuple[tuple[str, ...], ...]
    """The keys that lead to each array."""
    ocdbt: bool
    zarr3: bool
    all_chunks: bool
    """Whether every chunk is stored. Otherwise a missing chunk means zeros."""
    added: Mapping[str, Any]
    """JSON values that the writer added to the step's metadata."""

    def settings_folder(self) -> Path | None:
        """Returns the closest folder with a config.json: with the arrays, of the step or of all
        steps; None if there is none."""
        places = dict.fromkeys((self.folder, self.root, self.root.parent))
        return next((place for place in places if (place / "config.json").is_file()), None)


def find_step(folder: Path, step: int | None = None) -> OrbaxStep | None:
    """Returns the checkpoint in a folder, or the newest complete one of a folder of steps; None if
    Orbax has written nothing there.

    Args:
      step: the step to take instead of the newest.

    Raises:
      CheckpointError: the checkpoint or each of the steps is incomplete or damaged, there is no
        such step, or it is not clear which of several items is the model.
    """
    if _UNFINISHED in folder.name:
        raise CheckpointError(f"{folder}: incomplete: Orbax had not finished writing it")
    if _is_checkpoint(folder):
        found = _opened(folder, _number(folder))
        if step is not None and step != found.step:
            raise CheckpointError(f"{folder}: one checkpoint, not a folder of steps with {step}")
        return found
    steps = _steps(folder)
    unfinished = sorted(each.name for each in folder.iterdir() if _UNFINISHED in each.name)
    if not steps:
        if unfinished:
            raise CheckpointError(f"{folder}: no complete step, only {', '.join(unfinished[:3])}")
        return None
    if step is not None:
        if step not in steps:
            known = ", ".join(map(str, sorted(steps)[-10:]))
            raise CheckpointError(f"{folder}: no complete step {step}, there is {known}")
        return _opened(steps[step], step)
    problem: CheckpointError | None = None
    for number in sorted(steps, reverse=True):
        try:
            return _opened(steps[number], number)
        except CheckpointError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _is_checkpoint(folder: Path) -> bool:
    return (folder / TREE_FILE).is_file() or (folder / STEP_FILE).is_file()


def _number(folder: Path) -> int | None:
    match = _STEP_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def _steps(folder: Path) -> dict[int, Path]:
    """Returns the folders of finished steps by number."""
    found: dict[int, Path] = {}
    for each in sorted(folder.iterdir()):
        number = _number(each)
        if number is None or _UNFINISHED in each.name or not each.is_dir():
            continue
        if _is_checkpoint(each) or any((item / TREE_FILE).is_file() for item in each.iterdir()):
            found[number] = each
    return found


def _opened(root: Path, step: int | None) -> OrbaxStep:
    described = _object(root / STEP_FILE) if (root / STEP_FILE).is_file() else {}
    if described.get("init_timestamp_nsecs") and not described.get("commit_timestamp_nsecs"):
        raise CheckpointError(f"{root}: incomplete: Orbax had not finished writing it")
    folder = _item(root)
    tree = _object(folder / TREE_FILE)
    ocdbt = bool(tree.get("use_ocdbt", (folder / _MANIFEST).is_file()))
    if ocdbt and not (folder / _MANIFEST).is_file():
        raise CheckpointError(f"{folder}: incomplete: {_MANIFEST} is missing")
    return OrbaxStep(
        folder=folder,
        root=root,
        step=step,
        paths=_paths(folder / TREE_FILE, tree),
        ocdbt=ocdbt,
        zarr3=bool(tree.get("use_zarr3")),
        all_chunks=bool(tree.get("store_array_data_equal_to_fill_value")),
        added=described.get("custom_metadata") or {},
    )


def _item(root: Path) -> Path:
    """Returns the folder with the model's arrays: the step's own, or the one of its items."""
    if (root / TREE_FILE).is_file():
        return root
    items = {each.name: each for each in sorted(root.iterdir()) if (each / TREE_FILE).is_file()}
    if len(items) == 1:
        return next(iter(items.values()))
    for name in _MODEL_ITEMS:
        if name in items:
            return items[name]
    if not items:
        raise CheckpointError(f"{root}: incomplete: no item has a {TREE_FILE}")
    raise CheckpointError(
        f"{root}: which item is the model? {', '.join(items)}; pass the item's own folder"
    )


def _paths(file: Path, tree: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    found: list[tuple[str, ...]] = []
    try:
        for entry in tree["tree_metadata"].values():
            if not entry["value_metadata"].get("skip_deserialize"):
                found.append(tuple(str(key["key"]) for key in entry["key_metadata"]))
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file}: damaged: no tree of arrays") from None
    if not found:
        raise CheckpointError(f"{file}: the checkpoint holds no arrays")
    return tuple(found)


def _object(file: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: damaged: not a JSON object")
    return cast(dict[str, Any], content)
