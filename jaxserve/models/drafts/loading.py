"""Opens a folder with a draft head and loads its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxserve.config import ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.models.drafts import block, eagle3, layouts, mtp
from jaxserve.models.drafts.block import BlockParams
from jaxserve.models.drafts.eagle3 import Eagle3Params
from jaxserve.models.drafts.layouts import HeadSpec
from jaxserve.models.drafts.mtp import MtpParams
from jaxserve.models.drafts.spec import BlockDraft, Eagle3Draft, MtpDraft
from jaxserve.setting_files import read_json_object
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.naming import resolve_rules
from jaxserve_checkpoints.reader import Checkpoint, CheckpointError, open_checkpoint

type DraftParams = BlockParams | Eagle3Params | MtpParams


class OpenedDraft(NamedTuple):
    """A draft head whose files fit, before its weights are read."""

    spec: HeadSpec
    abstract: DraftParams
    """Shapes and dtypes of `load`'s result."""
    load: Callable[[], DraftParams]
    """Puts the weights on the device."""


def abstract(draft: HeadSpec | MtpDraft, dtype: DTypeLike, *, stacked: bool = False) -> DraftParams:
    """Shapes and dtypes of the parameters; see `decoder.Params` for `stacked`."""
    if isinstance(draft, MtpDraft):
        return mtp.abstract(draft, dtype)
    if isinstance(draft, BlockDraft):
        return block.abstract(draft, dtype, stacked=stacked)
    return eagle3.abstract(draft, dtype)


def open_draft(
    folder: Path, target: ModelSpec, dtype: DTypeLike, *, stacked: bool = False
) -> OpenedDraft:
    """Opens a folder with a published draft head for a target model.

    Args:
      dtype: of the weights on the device.
      stacked: see `decoder.Params`.

    Raises:
      ConfigError: the folder holds no draft head, or one that cannot draft for the target; the
        message has all reasons that config.json gives.
      CheckpointError: its tensors are not those of its config.json; the message has all of them.
    """
    try:
        spec = layouts.spec_of(read_json_object(folder / "config.json"), target)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    checkpoint, rules = open_checkpoint(folder), layouts.rules(spec)
    shapes = abstract(spec, dtype, stacked=stacked)
    ids = None
    read: Any = shapes
    if isinstance(shapes, Eagle3Params):
        read = shapes._replace(token_ids=None)
        assert isinstance(spec, Eagle3Draft)
        ids = _token_ids(checkpoint, spec)
    resolve_rules(rules, read, checkpoint)

    def load() -> DraftParams:
        params: Any = load_params(checkpoint, rules, read)
        return params if ids is None else params._replace(token_ids=jax.device_put(ids))

    return OpenedDraft(spec, shapes, load)


def _token_ids(checkpoint: Checkpoint, draft: Eagle3Draft) -> np.ndarray | None:
    """Returns the target's id of each of the head's: int32 [draft vocab]; None if they are the
    same. `d2t` holds the differences, `t2d` which of the target's tokens are among them.

    Raises:
      CheckpointError: the two are missing, of other shapes, or contradict each other.
    """
    if not draft.reduced_vocab:
        return None
    vocab, where = draft.body.vocab_size, checkpoint.folder
    shapes = {"d2t": (vocab,), "t2d": (draft.target_vocab,)}
    for name, shape in shapes.items():
        if name not in checkpoint or checkpoint.shape(name) != shape:
            has = list(checkpoint.shape(name)) if name in checkpoint else "missing"
            raise CheckpointError(f"{where}: {name} is {has}, the head needs {list(shape)}")
    ids = np.arange(vocab) + checkpoint.read("d2t").astype(np.int64)
    listed = np.flatnonzero(checkpoint.read("t2d"))
    if not np.array_equal(np.sort(ids), listed):
        raise CheckpointError(
            f"{where}: d2t and t2d contradict each other: they name {len(set(ids.tolist()))} and "
            f"{len(listed)} tokens of the target, which are not the same {vocab}"
        )
    return ids.astype(jnp.int32)
