"""Converts weights for `jaxserve convert`: source and target formats, and quantisation methods."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.models import decoder, registry
from jaxserve.models.awq import AwqLayers
from jaxserve.models.quantization import Quantization, Report, calibrated, reporting
from jaxserve.setting_files import read_text
from jaxserve.weights.exporting import (
    Readable,
    StoredTensors,
    Tensors,
    check_public,
    kept_safetensors,
    open_named,
    public_tensors,
    write_config,
    write_flax,
    write_native_file,
    write_native_step,
    write_safetensors,
)
from jaxserve.weights.model_source import ModelSource
from jaxserve.weights.opening import (
    config_of,
    describe,
    files_of,
    open_native_of,
    open_stored_of,
    quantization,
)
from jaxserve_checkpoints.convert import convert, finished
from jaxserve_checkpoints.load import Progress, encoded_abstract, load_params, packed_leaves
from jaxserve_checkpoints.naming import resolve_rules
from jaxserve_checkpoints.native import NativeCheckpoint, open_native
from jaxserve_checkpoints.orbax.writer import finished_step
from jaxserve_checkpoints.quantized import QuantizedCheckpoint, detect

_STAGED = ".converting"
"""Folder for the intermediate result of a conversion that Orbax will write."""

_CALIBRATION_SEQUENCES, _CALIBRATION_TOKENS, _LEAST_TOKENS = 128, 512, 64


def convert_model(
    options: Options,
    source: ModelSource,
    out: Path,
    progress: Progress,
    report: Report = lambda path, error: None,
    begin: Callable[[], None] = lambda: None,
) -> Path:
    """Writes the model's weights into `out` as the flags say. Returns the file, or Orbax's folder.

    Args:
      begin: called when flags and files are valid, before anything is written.

    Raises:
      ConfigError: the shapes do not allow the quantisation; the weights are already converted; a
        calibration text is missing, too short or not used.
      CheckpointError, OSError: see `jaxserve_checkpoints.convert`, and `exporting`.
    """
    if options.keep is not None and options.to != "orbax":
        raise ConfigError("--keep says how many steps stay: it needs --to orbax")
    native = open_native_of(source)
    if native is not None:
        _check_as_is(options, native)
    if options.to == "safetensors":
        return _to_safetensors(options, source, native, out, progress, report, begin)
    if options.to == "orbax":
        return _to_orbax(options, source, native, out, progress, report, begin)
    if native is None:
        return _to_native(options, source, out, progress, report, begin)
    if source.orbax is None:
        raise ConfigError(f"{source.folder} is converted already: convert the original")
    begin()
    return write_native_file(native, source, out, progress)


def _check_as_is(options: Options, native: NativeCheckpoint) -> None:
    """Raises ConfigError if the flags would change weights that are already in the engine's
    format."""
    if quantization(options).changes_anything or options.calibration is not None:
        raise ConfigError(f"{native.place} is converted already: quantise the original")


def _to_safetensors(
    options: Options,
    source: ModelSource,
    native: NativeCheckpoint | None,
    out: Path,
    progress: Progress,
    report: Report,
    begin: Callable[[], None],
) -> Path:
    """Writes tensors with Hugging Face's names. Weights to quantise are first converted to the
    engine's format, in a file in the folder. Weights that others have quantised are copied."""
    made_from = {"digest": _digest_of(options, source)}
    found, staged = kept_safetensors(out, made_from), out / _STAGED
    if found is not None:
        shutil.rmtree(staged, ignore_errors=True)  # left by a conversion that was killed at its end
        return found
    wanted = quantization(options)
    if wanted.changes_anything:
        check_public(source, _encoded(source, wanted))
        _to_native(options, source, staged, progress, report, begin)
        native = open_native(staged)
        file = _write_public(options, source, native, out, made_from, progress, lambda: None)
        shutil.rmtree(staged)
        return file
    if native is not None and native.description.types:
        native.verify()
        return _write_public(options, source, native, out, made_from, progress, begin)
    stored = None if native else open_stored_of(source, wanted)
    if isinstance(stored, QuantizedCheckpoint):
        abstract = decoder.abstract(source.spec, np.float32, stacked=True)
        resolve_rules(registry.rules(source.spec), abstract, stored)
        tensors: Readable = StoredTensors(stored, _dtype(options))
    else:
        tensors = Tensors(open_named(options, source, native), source, _dtype(options))
    begin()
    return write_safetensors(tensors, out, made_from, progress)


def _encoded(source: ModelSource, wanted: Quantization) -> decoder.Params:
    """Returns the shapes of the quantised weights, stacked."""
    plain = decoder.abstract(source.spec, np.float32, stacked=True)
    stored = open_stored_of(source, wanted)
    sources = resolve_rules(registry.rules(source.spec), plain, stored)
    return encoded_abstract(plain, wanted.encoder(source.spec), packed_leaves(stored, sources))


def _write_public(
    options: Options,
    source: ModelSource,
    native: NativeCheckpoint,
    out: Path,
    made_from: Mapping[str, Any],
    progress: Progress,
    begin: Callable[[], None],
) -> Path:
    tensors = public_tensors(source, native, _dtype(options))
    begin()
    write_config(out, config_of(source), tensors.configuration)
    return write_safetensors(tensors, out, made_from, progress)


def _to_orbax(
    options: Options,
    source: ModelSource,
    native: NativeCheckpoint | None,
    out: Path,
    progress: Progress,
    report: Report,
    begin: Callable[[], None],
) -> Path:
    """Writes a step of an Orbax folder. Keeps a finished step of the same conversion.

    Weights that are not quantised get the tree of `jaxserve.flax`. Quantised weights keep the
    engine's own tensors. A file beside the steps holds those until they are complete."""
    step = (source.orbax.step.step if source.orbax else None) or 0
    made_from = _digest_of(options, source)
    found, staged = finished_step(out, step, made_from), out / _STAGED
    if found is not None:
        shutil.rmtree(staged, ignore_errors=True)  # left by a conversion that was killed at its end
        return found
    wanted = quantization(options)
    plain = native is None and not wanted.changes_anything
    if plain or (native is not None and not native.description.types):
        stored = open_named(options, source, native) if native else open_stored_of(source, wanted)
        if not isinstance(stored, QuantizedCheckpoint):
            tensors = Tensors(stored, source, _dtype(options))
            begin()
            return write_flax(tensors, out, step, options.keep, made_from, progress)
    if native is not None:
        begin()
        return write_native_step(native, out, step, options.keep, made_from, progress)
    _to_native(options, source, staged, progress, report, begin)
    native = open_native(staged)
    folder = write_native_step(native, out, step, options.keep, made_from, progress)
    shutil.rmtree(staged)
    return folder


def _digest_of(options: Options, source: ModelSource) -> str:
    """Returns a digest of everything that the content of a step depends on."""
    assert source.folder is not None
    text = options.calibration
    content: list[Any] = [
        files_of(source),
        None if source.orbax else repr(detect(source.folder)),
        options.dtype,
        asdict(quantization(options)),
        None if text is None else read_text(text, "--calibration"),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _dtype(options: Options) -> np.dtype[Any] | None:
    """Returns the requested dtype; None: each tensor keeps its own."""
    return None if options.dtype == "auto" else np.dtype(options.dtype)


def _to_native(
    options: Options,
    source: ModelSource,
    out: Path,
    progress: Progress,
    report: Report,
    begin: Callable[[], None],
) -> Path:
    wanted = quantization(options)
    checkpoint = open_stored_of(source, wanted)
    dtype = checkpoint.main_dtype if options.dtype == "auto" else np.dtype(options.dtype)
    made_from = describe(source, wanted, dtype)
    encode = reporting(wanted.encoder(source.spec), report)
    sequences = _calibration(options, source)
    if sequences is not None:
        made_from["calibration"] = hashlib.sha256(sequences.tobytes()).hexdigest()[:16]

        def plain() -> decoder.Params:
            abstract = decoder.abstract(source.spec, dtype)
            return load_params(checkpoint, registry.rules(source.spec), abstract)

        encode = calibrated(encode, AwqLayers(plain, sequences, source.spec, report).part)
    finished(out, made_from)
    begin()
    return convert(
        checkpoint,
        registry.rules(source.spec),
        decoder.abstract(source.spec, dtype, stacked=True),
        encode,
        out,
        made_from=made_from,
        progress=progress,
        by_layer=sequences is not None,
    )


def _calibration(options: Options, source: ModelSource) -> np.ndarray | None:
    """Returns the token ids of the calibration text, int32 [sequences, tokens]; None without a
    text.

    Raises:
      ConfigError: the text is needed but missing, given but not used, or too short.
    """
    needed = options.quantization_method == "awq"
    if options.calibration is None and not needed:
        return None
    if options.calibration is None or not needed:
        raise ConfigError(
            "--quantization-method awq needs --calibration FILE, a text to read, and no other "
            "method does"
        )
    ids = source.tokenizer.encode(read_text(options.calibration, "--calibration"))
    length = min(_CALIBRATION_TOKENS, len(ids))
    if length < _LEAST_TOKENS:
        raise ConfigError(
            f"--calibration {options.calibration} has {length} tokens; at least {_LEAST_TOKENS} "
            f"are needed, {_CALIBRATION_SEQUENCES * _CALIBRATION_TOKENS} are used"
        )
    count = min(len(ids) // length, _CALIBRATION_SEQUENCES)
    return np.array(ids[: count * length], np.int32).reshape(count, length)
