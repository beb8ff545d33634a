"""Writes a step into a folder of Orbax checkpoints, with Orbax's CheckpointManager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxserve_checkpoints.orbax.folder import find_step
from jaxserve_checkpoints.reader import CheckpointError

MADE_FROM = "jaxserve_made_from"
"""Key in a step's metadata: a digest of the source and settings of the step's content."""


def finished_step(root: Path, step: int, made_from: str | None = None) -> Path | None:
    """Returns the folder of a step that was made from the same source; None if there is no such
    step.

    Args:
      made_from: the digest of source and settings. None: any existing step counts as different.

    Raises:
      CheckpointError: the step is damaged, or was made from something else.
    """
    if not (root / str(step)).exists():
        return None
    found = find_step(root, step)
    if found is None or made_from is None or found.added.get(MADE_FROM) != made_from:
        raise CheckpointError(f"{root}: has a step {step} already: choose another folder")
    return root / str(step)


def save_step(
    root: Path,
    step: int,
    make_tree: Callable[[], Any],
    *,
    keep: int | None = None,
    added: Mapping[str, Any] | None = None,
) -> Path:
    """Writes one step, and returns its folder. The folder gets its name when everything is written.

    Leftovers of a killed writer are removed first.

    Args:
      make_tree: returns dictionaries of arrays. Called once the folder is known to be usable.
      keep: number of newest steps to keep; None: all.
      added: JSON values for the step's metadata.

    Raises:
      CheckpointError: orbax-checkpoint is not installed, or the step already exists.
      OSError: the folder cannot be written.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise CheckpointError(
            f"{root}: writing Orbax checkpoints needs the package orbax-checkpoint: "
            "pip install 'jaxserve[orbax]'"
        ) from None
    finished_step(root, step)
    settings: Any = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    root.mkdir(parents=True, exist_ok=True)
    with ocp.CheckpointManager(root.absolute(), options=settings) as manager:
        arguments: Any = ocp.args
        saved = manager.save(
            step,
            args=arguments.StandardSave(make_tree()),
            custom_metadata=dict(added or {}),
            force=True,
        )
    if not saved:
        raise CheckpointError(f"{root}: Orbax did not save step {step}")
    return root / str(step)
