"""Finds the model that the flags name: its shape, weights, tokenizer and sampling defaults. Does
not import jax."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError, SamplingDefaults
from jaxserve.model_spec import ModelSpec
from jaxserve.models.registry import HUB_NAMES, NAMED_MODELS, PUBLISHED_EXPERTS, spec_of
from jaxserve.setting_files import read_json_object
from jaxserve.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from jaxserve_checkpoints.orbax.folder import OrbaxStep, find_step
from jaxserve_checkpoints.reader import INDEX_FILE, NATIVE_FILE, SINGLE_FILE, CheckpointError
from jaxserve_checkpoints.resolve import EMBEDDED_NAME, resolve_model

log = logging.getLogger(__name__)


class OrbaxSource(NamedTuple):
    """Weights in an Orbax checkpoint."""

    step: OrbaxStep
    config: Mapping[str, Any]
    """Content of the model's config.json."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model before its weights are read."""

    names: tuple[str, ...]
    spec: ModelSpec
    folder: Path | None
    """Folder of config.json, and of the weights unless Orbax has them; None: random weights."""
    tokenizer: Tokenizer
    sampling_defaults: SamplingDefaults
    orbax: OrbaxSource | None = None
    """The Orbax checkpoint, if the weights are in one."""
    experts: Literal["mxfp4"] | None = None
    """Format of random experts; None: the same as other weights."""

    @property
    def sampled_vocab(self) -> int:
        """Only token ids below this are sampled. The output matrix of a checkpoint may have rows
        without a token."""
        known = self.spec.vocab_size
        return known if self.folder is None else min(known, self.tokenizer.vocab_size)

    @property
    def file_name(self) -> str:
        """The model's name as a part of file names."""
        name = Path(self.names[0]).name
        return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)


def find_model(options: Options) -> ModelSource:
    """Finds the model. Downloads it from the hub if it is not on disk yet.

    Raises:
      ConfigError, CheckpointError: the model cannot be found or read. The message is one line and
        says what to do.
    """
    if options.load_format == "dummy" and (named := _named_spec(options.model)):
        return _dummy(options, named)
    found = find_weights(options)
    assert found.folder is not None
    dummy = options.load_format == "dummy"
    return replace(
        found,
        folder=None if dummy else found.folder,
        orbax=None if dummy else found.orbax,
        tokenizer=_tokenizer(options, found.folder),
        sampling_defaults=_sampling_defaults(options.generation_config, found.folder),
    )


def find_weights(options: Options) -> ModelSource:
    """Returns the model with a placeholder tokenizer and default sampling parameters.

    Raises:
      ConfigError, CheckpointError: see `find_model`.
    """
    name = EMBEDDED_NAME if options.model is None else options.model
    step = _orbax_step(options, name)
    if step is not None:
        folder, file = _settings_of(options, step)
    else:
        file = Path("config.json")
        folder = resolve_model(
            name,
            names=HUB_NAMES,
            download_dir=options.download_dir,
            revision=options.revision,
            tokenizer=options.tokenizer is None,
        )
    config = read_json_object(folder / file)
    return ModelSource(
        names=_names(options, name),
        spec=spec_of(config),
        folder=folder,
        tokenizer=ByteTokenizer(),
        sampling_defaults=SamplingDefaults(),
        orbax=None if step is None else OrbaxSource(step, config),
    )


def _orbax_step(options: Options, name: str) -> OrbaxStep | None:
    """Returns the Orbax checkpoint in the folder `name`; None if there is no such folder or it has
    other weights."""
    folder = Path(name).expanduser() if name.startswith("~/") else Path(name)
    if not name or not folder.is_dir():
        return None
    others = (NATIVE_FILE, SINGLE_FILE, INDEX_FILE)
    step = None
    if options.from_step is not None or not any((folder / file).exists() for file in others):
        step = find_step(folder, options.from_step)
    if step is None and options.from_step is not None:
        raise ConfigError(f"--from-step {options.from_step}: {folder} holds no Orbax checkpoint")
    return step


def _settings_of(options: Options, step: OrbaxStep) -> tuple[Path, Path]:
    """Returns the folder of an Orbax checkpoint's settings and tokenizer, and its settings file."""
    folder, file = step.settings_folder(), Path("config.json")
    if options.hf_config is not None:
        given = options.hf_config
        return (given, file) if given.is_dir() else (given.parent, Path(given.name))
    if folder is None:
        raise CheckpointError(
            f"{step.folder}: an Orbax checkpoint without config.json: put the model's beside it, "
            "or name it with --hf-config"
        )
    return folder, file


def _sampling_defaults(wanted: str, folder: Path) -> SamplingDefaults:
    """Returns the sampling defaults. `wanted`: auto (the model's, if any), vllm (OpenAI's), or a
    folder that has them."""
    if wanted == "vllm":
        return SamplingDefaults()
    generation = (folder if wanted == "auto" else Path(wanted)) / "generation_config.json"
    if wanted == "auto" and not generation.exists():
        return SamplingDefaults()
    return SamplingDefaults.from_hf(read_json_object(generation))


def _tokenizer(options: Options, folder: Path | None) -> Tokenizer:
    """Returns the tokenizer of `--tokenizer` or of the model's folder. Random weights may use a
    byte tokenizer instead."""
    text = Path(options.tokenizer) if options.tokenizer else folder
    if text is not None and (text / "tokenizer.json").is_file():
        return HfTokenizer.from_folder(text)
    if options.tokenizer or options.load_format != "dummy":
        raise ConfigError(f"{text} holds no tokenizer.json; --tokenizer names a folder that does")
    log.warning(
        "no tokenizer files: text is encoded as its bytes; prompts of token ids work as usual "
        "(--tokenizer FOLDER gives real ones)"
    )
    return ByteTokenizer()


def _named_spec(model: str | None) -> ModelSpec | None:
    return NAMED_MODELS.get(model.lower()) if model else None


def _dummy(options: Options, spec: ModelSpec) -> ModelSource:
    """Returns a named model with random weights, which needs no files."""
    assert options.model is not None
    return ModelSource(
        names=_names(options, options.model),
        spec=spec,
        folder=None,
        tokenizer=_tokenizer(options, None),
        sampling_defaults=SamplingDefaults(),
        experts=PUBLISHED_EXPERTS[options.model.lower()],
    )


def _names(options: Options, name: str) -> tuple[str, ...]:
    return tuple(options.served_model_name or (name,))
