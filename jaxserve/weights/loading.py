"""Plans and loads a model's weights.

Weights are random, loaded as a checkpoint stores them, quantised while they load, or read from a
checkpoint in the engine's own format. `jaxserve convert` writes such a checkpoint, and so does the
first start that quantises.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.models import decoder, registry
from jaxserve.weights.fp8_copy import abstract_copies, copying_programs, with_copies
from jaxserve.weights.model_source import ModelSource
from jaxserve.weights.opening import describe, open_native_of, open_stored_of, quantization
from jaxserve_checkpoints import native
from jaxserve_checkpoints.convert import convert
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import (
    Encode,
    MixedFormats,
    Progress,
    Stored,
    as_stored,
    encoded_abstract,
    load_params,
    packed_leaves,
)
from jaxserve_checkpoints.naming import resolve_rules
from jaxserve_checkpoints.native import NativeCheckpoint, open_native
from jaxserve_checkpoints.native_writer import Busy, discard
from jaxserve_checkpoints.quantized import QuantizedCheckpoint
from jaxserve_checkpoints.reader import CheckpointError
from jaxserve_checkpoints.rules import AnyRule
from jaxserve_checkpoints.staging import StagingProgram, staging_programs, stream
from jaxserve_checkpoints.stream_sources import assembled_sources, direct_sources

log = logging.getLogger(__name__)

type Executables = Mapping[str, Callable[..., Any]]
"""Compiled programs of `WeightPlan.staging` and `copying`, by name."""


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """All facts about the weights that are known before any weights are read."""

    folder: Path | None
    """Folder of the checkpoint; None: random weights."""
    checkpoint: Stored | None
    """The opened checkpoint of `folder`, unless it is in the engine's own format."""
    rules: tuple[AnyRule, ...]
    plain: decoder.Params
    """Shapes and dtypes before `encode`."""
    encode: Encode
    """Quantises the weights."""
    encoded: decoder.Params
    """Shapes and dtypes as loaded."""
    served: decoder.Params
    """Shapes and dtypes that the steps read, with any fp8 copies of 4-bit weights."""
    native: NativeCheckpoint | None
    """The checkpoint, if it is in the engine's own format."""
    keep_in: Path | None
    """Folder in which to store the result of quantising at load; None: it is not stored."""
    made_from: Mapping[str, Any]
    staging: list[StagingProgram]
    """Programs that copy weights to a GPU in their stored format."""
    copying: list[StagingProgram]
    """Programs that make fp8 copies."""
    seed: int

    def with_fp8_copy(self) -> WeightPlan:
        """Returns the plan with a copy of each 4-bit weight."""
        served = abstract_copies(self.encoded)
        return replace(self, served=served, copying=copying_programs(self.encoded))

    @property
    def quantized(self) -> bool:
        """Whether any weight that the steps read is quantised."""
        return jax.tree.structure(self.encoded) != jax.tree.structure(self.plain)

    @property
    def to_be_converted(self) -> bool:
        """Whether the next start will quantise the weights and store the result."""
        return self.keep_in is not None and not (self.keep_in / native.FILE).exists()


def plan_weights(
    options: Options, source: ModelSource, dtype: DTypeLike, cache: Path, *, stacked: bool
) -> WeightPlan:
    """Plans which weights to load and how to transform them.

    Args:
      dtype: dtype of weights that are not quantised.
      cache: folder that contains the stored conversions.
      stacked: see `decoder.Params`. Layers that are not quantised alike are not stacked.

    Raises:
      ConfigError: the shapes do not allow the quantisation, or a converted checkpoint has a
        different
        one.
      CheckpointError: a converted or quantised checkpoint cannot be read.
    """
    plain = decoder.abstract(source.spec, dtype, stacked=stacked)
    rules = registry.rules(source.spec)
    checkpoint, keep_in, made_from = None, None, {}
    found = None if source.folder is None else open_native_of(source)
    if found is not None:
        _check_flags(options, found)
        encode, encoded = as_stored, found.encoded(plain)
    else:
        wanted = quantization(options)
        if wanted.layers is None:
            wanted = replace(wanted, experts=source.experts)
        encode, packed = wanted.encoder(source.spec), {}
        if source.folder is not None:
            checkpoint = open_stored_of(source, wanted)
        if isinstance(checkpoint, QuantizedCheckpoint):
            try:
                packed = packed_leaves(checkpoint, resolve_rules(rules, plain, checkpoint))
            except MixedFormats:
                plain = decoder.abstract(source.spec, dtype)
                packed = packed_leaves(checkpoint, resolve_rules(rules, plain, checkpoint))
        encoded = encoded_abstract(plain, encode, packed)
        if source.folder is not None and wanted.changes_anything and options.keep_converted:
            made_from = describe(source, wanted, dtype)
            keep_in = cache / "checkpoints" / f"{source.file_name}-{_digest(made_from)}"
    return WeightPlan(
        folder=source.folder,
        checkpoint=checkpoint,
        rules=rules,
        plain=plain,
        encode=encode,
        encoded=encoded,
        served=encoded,
        native=found,
        keep_in=keep_in,
        made_from=made_from,
        staging=staging_programs(encoded) if stacked and source.folder is not None else [],
        copying=[],
        seed=options.seed,
    )


def weight_loader(
    plan: WeightPlan, executables: Executables
) -> Callable[[Progress], decoder.Params]:
    """Returns a function that puts the weights on the device and makes their copies.

    Raises:
      CheckpointError: the checkpoint is missing, damaged or of another model. This call raises it,
        before programs are compiled. Damage that only checksums show is found during loading.
    """
    load = _loader(plan, executables)
    if not plan.copying:
        return load
    return lambda progress: with_copies(load(progress), executables)


def _loader(plan: WeightPlan, executables: Executables) -> Callable[[Progress], decoder.Params]:
    """Returns a function that puts `plan.encoded` on the device. CheckpointError as in
    `weight_loader`."""
    if plan.folder is None:
        return lambda progress: dummy_params(plan.plain, plan.seed, plan.encode)
    if plan.native is not None:
        own = plan.native
        return lambda progress: _load_native(plan, own, executables, progress)
    checkpoint = plan.checkpoint
    assert checkpoint is not None
    direct = direct_sources(checkpoint, plan.rules, plan.plain)

    def load(progress: Progress) -> decoder.Params:
        if plan.keep_in is not None:
            kept = _kept(plan, plan.keep_in, checkpoint, executables, progress)
            if kept is not None:
                return kept
        if plan.staging and not plan.quantized:
            assert not isinstance(checkpoint, QuantizedCheckpoint)
            sources = direct or assembled_sources(checkpoint, plan.rules, plan.plain)
            return stream(sources, plan.plain, executables, progress=progress)
        return load_params(
            checkpoint, plan.rules, plan.plain, progress=progress, encode=plan.encode
        )

    return load


def _load_native(
    plan: WeightPlan, own: NativeCheckpoint, executables: Executables, progress: Progress
) -> decoder.Params:
    """Copies the arrays to the device while it compares their checksums."""
    rules = own.rules()
    with ThreadPoolExecutor(1, thread_name_prefix="verify") as pool:
        verified = pool.submit(own.verify)
        if plan.staging:
            direct = direct_sources(own.tensors, rules, plan.encoded)
            sources = direct or assembled_sources(own.tensors, rules, plan.encoded)
            params = stream(sources, plan.encoded, executables, progress=progress)
        else:
            params = load_params(own.tensors, rules, plan.encoded, progress=progress)
        verified.result()
    return params


def _kept(
    plan: WeightPlan,
    folder: Path,
    checkpoint: Stored,
    executables: Executables,
    progress: Progress,
) -> decoder.Params | None:
    """Loads the conversion of an earlier start, or converts now. Returns None if neither is
    possible."""
    found = (folder / native.FILE).exists()
    while True:
        try:
            if not found:
                _convert(plan, folder, checkpoint, progress)
            return _load_native(plan, open_native(folder), executables, progress)
        except Busy:
            return None  # another server is converting: do not wait for it
        except (CheckpointError, OSError) as error:
            log.warning("converted weights cannot be kept or used: %s", error)
            discard(folder)
            if not found:
                return None
            found = False


def _convert(plan: WeightPlan, folder: Path, checkpoint: Stored, progress: Progress) -> None:
    log.info("quantising the weights; the result is kept in %s for later starts", folder)
    convert(
        checkpoint,
        plan.rules,
        plan.plain,
        plan.encode,
        folder,
        made_from=plan.made_from,
        progress=progress,
    )


def _check_flags(options: Options, found: NativeCheckpoint) -> None:
    """Raises ConfigError if the flags ask for another quantisation than that of the checkpoint."""
    has = found.description.made_from["quantization"]
    wanted = {"--quantization": options.quantization or has["layers"]}
    if options.lm_head_dtype != "auto":
        wanted["--lm-head-dtype"] = options.lm_head_dtype
    have = {"--quantization": has["layers"], "--lm-head-dtype": has["head"] or "unquantized"}
    wrong = [f"{flag} {value}" for flag, value in wanted.items() if have[flag] != value]
    if wrong:
        raise ConfigError(
            f"{found.place} was converted with layers in {has['layers'] or 'full'}, the "
            f"output matrix in {has['head'] or 'full'} precision: it cannot be served with "
            f"{' '.join(wrong)}; leave the flag out, or convert the original again"
        )


def _digest(made_from: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
