"""Plans the draft head or draft model that --speculative-config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from jaxserve.cli.options import Options
from jaxserve.config import VERIFY_POSITIONS, ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, registry
from jaxserve.models.drafts import mtp
from jaxserve.models.drafts.loading import open_draft
from jaxserve.models.drafts.spec import DraftSpec, Eagle3Draft, ModelDraft, MtpDraft
from jaxserve.models.registry import HUB_NAMES
from jaxserve.runner.draft_step import HeadParams
from jaxserve.setting_files import read_json_object
from jaxserve.startup import memory
from jaxserve.weights.loading import WeightPlan
from jaxserve.weights.model_source import ModelSource
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import as_stored, encoded_abstract, load_params, packed_leaves
from jaxserve_checkpoints.naming import resolve_rules
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_checkpoints.resolve import resolve_model

_HEAD_KEYS = {"speculators_model_type", "dflash_config", "draft_vocab_size"}
"""Keys of config.json that only draft heads have."""


class PlannedHead(NamedTuple):
    """A draft head or draft model whose weights are not read yet."""

    spec: DraftSpec
    abstract: HeadParams
    load: Callable[[], HeadParams]
    """Loads the weights to the device. Raises CheckpointError if a file cannot be read."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return memory.tree_bytes(self.abstract)


def plan_head(
    options: Options,
    source: ModelSource,
    weights: WeightPlan,
    dtype: DTypeLike,
    *,
    stacked: bool,
) -> PlannedHead | None:
    """Returns the draft head or draft model that the flags name; None if they name none.

    Args:
      source: the target model.
      weights: the target's weights.
      stacked: see `decoder.Params`.

    Raises:
      ConfigError: it cannot draft for this model, or not with these flags.
      CheckpointError: it does not exist, or its tensors do not match its config.json.
    """
    chosen = options.speculative_config
    if chosen is None or not (chosen.model or chosen.native):
        return None
    target, drafts = source.spec, min(chosen.drafts, max(VERIFY_POSITIONS) - 1)
    if chosen.model is None:
        return _plan_native(weights, target, drafts, dtype)
    folder = resolve_model(
        chosen.model, names=HUB_NAMES, download_dir=options.download_dir, tokenizer=False
    )
    config = read_json_object(folder / "config.json")
    if is_model(config):
        return _plan_model(folder, config, source, drafts, dtype, stacked=stacked)
    spec, abstract, load = open_draft(folder, target, dtype, stacked=stacked)
    if isinstance(spec, Eagle3Draft):
        spec = replace(spec, num_drafts=drafts)
    elif spec.mask_token >= target.vocab_size:
        raise ConfigError(
            f"--speculative-config: {folder}: mask_token_id is {spec.mask_token}, but the "
            f"model has {target.vocab_size} tokens"
        )
    return PlannedHead(spec, abstract, load)


def _plan_native(
    weights: WeightPlan, target: ModelSpec, drafts: int, dtype: DTypeLike
) -> PlannedHead:
    """Returns the head in the model's own checkpoint. Raises as `plan_head`."""
    body, checkpoint = registry.mtp_body(target), weights.checkpoint
    if body is None:
        raise ConfigError(
            f"--speculative-config: {target.architecture} has no weights for multi-token prediction"
        )
    spec = MtpDraft(body=body, num_drafts=drafts)
    abstract, rules = mtp.abstract(spec, dtype), registry.mtp_rules(target)
    if weights.folder is None:
        return PlannedHead(spec, abstract, lambda: dummy_params(abstract, weights.seed))
    if checkpoint is None or not any(name.startswith("mtp.") for name in checkpoint.names):
        converted = "; conversions leave them out" if checkpoint is None else ""
        raise ConfigError(
            f"--speculative-config: {weights.folder} has no tensors mtp.*, the weights for "
            f"multi-token prediction{converted}"
        )
    packed = packed_leaves(checkpoint, resolve_rules(rules, abstract, checkpoint))
    return PlannedHead(
        spec,
        encoded_abstract(abstract, as_stored, packed),
        lambda: load_params(checkpoint, rules, abstract),
    )


def _plan_model(
    folder: Path,
    config: Mapping[str, Any],
    source: ModelSource,
    drafts: int,
    dtype: DTypeLike,
    *,
    stacked: bool,
) -> PlannedHead:
    """Returns a draft model. Raises as `plan_head`."""
    body = registry.spec_of(config)
    if problems := _problems(folder, body, source):
        raise ConfigError(f"--speculative-config: {folder}: {'; '.join(problems)}")
    abstract = decoder.abstract(body, dtype, stacked=stacked)
    checkpoint, rules = open_checkpoint(folder), registry.rules(body)
    resolve_rules(rules, abstract, checkpoint)
    return PlannedHead(
        ModelDraft(body=body, num_drafts=drafts),
        abstract,
        lambda: load_params(checkpoint, rules, abstract),
    )


def is_model(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a complete model of a known family."""
    known = set(config.get("architectures") or []) & set(registry.ARCHITECTURES)
    return bool(known) and not _HEAD_KEYS & set(config)


def _problems(folder: Path, body: ModelSpec, source: ModelSource) -> list[str]:
    """Returns the reasons why a model cannot draft for the target; empty if it can."""
    found: list[str] = []
    target = source.spec
    if body.state is not None or [group.window for group in body.cache_groups] != [None]:
        found.append("a draft model needs full attention in every layer")
    if target.cache_groups[0].window is not None:
        found.append("every layer of the target has a window: no pages hold a whole context")
    if body.vocab_size < source.sampled_vocab:
        found.append(
            f"it has {body.vocab_size} tokens, the model {source.sampled_vocab}; a draft model "
            "needs the same vocabulary"
        )
    elif source.folder is not None and (other := _other_token(folder, source.folder)):
        found.append(f"{other}; a draft model needs the same vocabulary")
    return found


def _other_token(folder: Path, target: Path) -> str:
    """Describes the first token that differs between two models' folders. Returns "" if none does
    or a tokenizer.json is missing."""
    files = [each / "tokenizer.json" for each in (folder, target)]
    if not all(file.is_file() for file in files):
        return ""
    own, others = (_tokens(read_json_object(file)) for file in files)
    ids = sorted(own.keys() | others.keys())
    wrong = next((i for i in ids if own.get(i) != others.get(i)), None)
    if wrong is None:
        return ""
    return f"token {wrong} is {own.get(wrong)!r}, the model's is {others.get(wrong)!r}"


def _tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Returns the spelling of each id of a tokenizer.json."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    added = {each["id"]: each["content"] for each in tokenizer.get("added_tokens", [])}
    return {i: text for text, i in vocab.items()} | added
