"""The draft head that --speculative-config names."""

from __future__ import annotations

from typing import NamedTuple

from jax.typing import DTypeLike

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.models.drafts.block import BlockParams
from jaxserve.models.drafts.loading import OpenedDraft, open_draft
from jaxserve.models.drafts.spec import BlockDraft
from jaxserve.startup import memory
from jaxserve_checkpoints.resolve import resolve_model
from jaxserve_kernels.kv_format import Dense, KVFormat


class PlannedHead(NamedTuple):
    """A head that steps can run, before its weights are read."""

    spec: BlockDraft
    abstract: BlockParams
    opened: OpenedDraft

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return memory.tree_bytes(self.abstract)

    def load(self) -> BlockParams:
        """Puts the weights on the device. CheckpointError: a file cannot be read."""
        params = self.opened.load()
        assert isinstance(params, BlockParams)
        return params


def plan_head(
    options: Options, target: ModelSpec, dtype: DTypeLike, kv_format: KVFormat, *, stacked: bool
) -> PlannedHead | None:
    """Returns the head that the flags name; None if they name none.

    Args:
      stacked: see `decoder.Params`.

    Raises:
      ConfigError: it is no head for this model, or of a kind or beside a KV format that steps do
        not run.
      CheckpointError: there is no such model, or its tensors are not those of its config.json.
    """
    chosen = options.speculative_config
    if chosen is None or chosen.model is None:
        return None
    folder = resolve_model(chosen.model, download_dir=options.download_dir, tokenizer=False)
    opened = open_draft(folder, target, dtype, stacked=stacked)
    if not isinstance(opened.spec, BlockDraft) or not isinstance(opened.abstract, BlockParams):
        raise ConfigError(
            f"--speculative-config: {folder} holds an EAGLE-3 head; served are DFlash and DSpark"
        )
    if not isinstance(kv_format, Dense):
        raise ConfigError(
            f"--speculative-config: a draft head needs --kv-cache-dtype auto or bf16, not "
            f"{kv_format.name}"
        )
    if opened.spec.mask_token >= target.vocab_size:
        raise ConfigError(
            f"--speculative-config: {folder}: mask_token_id is {opened.spec.mask_token}, but the "
            f"model has {target.vocab_size} tokens"
        )
    return PlannedHead(opened.spec, opened.abstract, opened)
