"""Opens a model's checkpoint: Hugging Face's files, the engine's own format, or Orbax."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.typing import DTypeLike

import jaxserve.models
import jaxserve_checkpoints.quantized
import jaxserve_kernels.weights
from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.models.quantization import HeadFormat, Method, Quantization, WeightFormat
from jaxserve.setting_files import read_json_object
from jaxserve.weights.model_source import ModelSource
from jaxserve_checkpoints import native
from jaxserve_checkpoints.load import Stored
from jaxserve_checkpoints.native import NativeCheckpoint, open_native, open_native_step
from jaxserve_checkpoints.orbax import open_orbax
from jaxserve_checkpoints.quantized import QuantizedCheckpoint, detect
from jaxserve_checkpoints.quantized.modules import PackedModules
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from jaxserve_kernels.matmul import has_rows

log = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"


def open_native_of(source: ModelSource) -> NativeCheckpoint | None:
    """Returns the checkpoint if its tensors are in the engine's own format, else None.

    Raises:
      CheckpointError: the checkpoint is damaged or of another version.
    """
    if source.orbax is not None:
        step = source.orbax.step
        return open_native_step(step) if native.is_native(step) else None
    assert source.folder is not None
    return open_native(source.folder) if (source.folder / native.FILE).exists() else None


def open_stored_of(source: ModelSource, wanted: Quantization) -> Stored:
    """Opens a model's checkpoint of Hugging Face's tensors, or a tree that has all of them.

    Raises:
      ConfigError: the checkpoint is quantised, and the flags ask to quantise the layers.
      CheckpointError: it is damaged, or its layout or quantisation is not supported.
    """
    assert source.folder is not None
    if source.orbax is None:
        return open_checkpoint_of(source.folder, wanted)
    found = open_orbax(source.orbax.step, source.orbax.config)
    log.info("%s: Orbax, tree of %s", found.folder, found.layout.kind)
    return found


def config_of(source: ModelSource) -> Mapping[str, Any]:
    """Returns the model's config.json. Raises ConfigError if it cannot be read."""
    if source.orbax is not None:
        return source.orbax.config
    assert source.folder is not None
    return read_json_object(source.folder / "config.json")


def quantization(options: Options) -> Quantization:
    """Returns the quantisation that the flags ask for."""
    head = options.lm_head_dtype
    if head == "auto":
        head = "int8" if options.quantization else "unquantized"
    return Quantization(
        layers=cast(WeightFormat | None, options.quantization),
        head=None if head == "unquantized" else cast(HeadFormat, head),
        method=cast(Method, options.quantization_method or "rtn"),
    )


def open_checkpoint_of(folder: Path, wanted: Quantization) -> Stored:
    """Opens the checkpoint in a folder. It may already be quantised.

    Raises:
      ConfigError: the checkpoint is quantised, and the flags ask to quantise the layers.
      CheckpointError: it is damaged, or its quantisation is not supported.
    """
    checkpoint, format = open_checkpoint(folder), detect(folder)
    if format is None:
        return checkpoint
    if wanted.layers is not None:
        raise ConfigError(
            f"--quantization {wanted.layers}: {folder} is quantised already "
            f"({format.describe()}); leave the flag out, or use the original"
        )
    stored = QuantizedCheckpoint(checkpoint, format)
    _check_embedding(stored)
    log.info("%s: %s, %d matrices", folder, format.describe(), len(stored.modules))
    if stored.unused:
        kinds = sorted({name.rpartition(".")[2] for name in stored.unused})
        log.info("%d tensors are not used: %s", len(stored.unused), ", ".join(kinds))
    return stored


def _check_embedding(stored: QuantizedCheckpoint) -> None:
    """Raises CheckpointError if the quantisation of the embedding does not allow row look-ups."""
    packed = stored.packed([_EMBEDDING], "the embedding")
    if packed is not None and not has_rows(jax.eval_shape(PackedModules.decode, packed.abstract)):
        raise CheckpointError(
            f"{stored.folder}: {_EMBEDDING} is quantised ({stored.format.describe()}); supported "
            "is an embedding of 8 bits with a scale per row or tensor, or one that is not quantised"
        )


def describe(source: ModelSource, wanted: Quantization, dtype: DTypeLike) -> dict[str, Any]:
    """Returns everything that the content of a conversion depends on."""
    assert source.folder is not None
    # The encoding of quantised weights, from config.json.
    stored = None if source.orbax else detect(source.folder)
    return {
        "files": files_of(source),
        "quantization": asdict(wanted),
        "dtype": np.dtype(dtype).name,
        "code": _code_digest(),
        **({"stored": repr(stored)} if stored else {}),
    }


def files_of(source: ModelSource) -> list[list[Any]]:
    """Returns name, size and modification time of each weight file."""
    assert source.folder is not None
    found = (
        source.orbax.step.folder.rglob("*") if source.orbax else source.folder.glob("*.safetens*")
    )
    files = sorted(each for each in found if each.is_file() and each.suffix != ".json")
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _code_digest() -> str:
    """Returns a digest of the source files that define quantised weights."""
    digest = hashlib.sha256()
    for package in (jaxserve_kernels.weights, jaxserve.models, jaxserve_checkpoints.quantized):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
