"""The draft head that --speculative-config names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from jax.typing import DTypeLike

from jaxserve.cli.options import Options
from jaxserve.config import VERIFY_POSITIONS, ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.models.drafts.loading import open_draft
from jaxserve.models.drafts.spec import DraftSpec, Eagle3Draft
from jaxserve.runner.draft_step import HeadParams
from jaxserve.startup import memory
from jaxserve_checkpoints.resolve import resolve_model
from jaxserve_kernels.kv_format import Dense, KVFormat


class PlannedHead(NamedTuple):
    """A head that steps can run, before its weights are read."""

    spec: DraftSpec
    abstract: HeadParams
    load: Callable[[], HeadParams]
    """Puts the weights on the device. CheckpointError: a file cannot be read."""

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return memory.tree_bytes(self.abstract)


def plan_head(
    options: Options, target: ModelSpec, dtype: DTypeLike, kv_format: KVFormat, *, stacked: bool
) -> PlannedHead | None:
    """Returns the head that the flags name; None if they name none.

    Args:
      stacked: see `decoder.Params`.

    Raises:
      ConfigError: it is no head for this model, or beside a KV format in which heads do not run.
      CheckpointError: there is no such model, or its tensors are not those of its config.json.
    """
    chosen = options.speculative_config
    if chosen is None or chosen.model is None:
        return None
    folder = resolve_model(chosen.model, download_dir=options.download_dir, tokenizer=False)
    spec, abstract, load = open_draft(folder, target, dtype, stacked=stacked)
    if not isinstance(kv_format, Dense):
        raise ConfigError(
            f"--speculative-config: a draft head needs --kv-cache-dtype auto or bf16, not "
            f"{kv_format.name}"
        )
    if isinstance(spec, Eagle3Draft):
        spec = replace(spec, num_drafts=min(chosen.drafts, max(VERIFY_POSITIONS) - 1))
    elif spec.mask_token >= target.vocab_size:
        raise ConfigError(
            f"--speculative-config: {folder}: mask_token_id is {spec.mask_token}, but the "
            f"model has {target.vocab_size} tokens"
        )
    return PlannedHead(spec, abstract, load)
